"""Gradient compression with error feedback.

Each rank adds the part of a gradient that it did not send to its next gradient. Over any number of steps,

    sum of applied gradients + mean over ranks of the errors = sum of the mean gradients.

A step in which some rank has a number that is not finite applies nothing: its mean is NaN on every rank, and the errors
of all ranks stay finite, with the finite gradients of that step added to them.

On fast links compression costs more than it saves; `explain` predicts where the break-even lies.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import must, must_be
from .transport import gathered

log = logging.getLogger(__name__)


class Compression:
    """Compressed average of flat gradients over a group.

    Args:
        ratio: fraction of the gradient that is sent.
        group: ranks that average; the default group if None.
        error_feedback: add the part that was not sent to the next gradient; without it that part is lost.
        start: first steps, which are averaged densely. DDP changes its buckets after the first one.
    """

    def __init__(
        self, ratio: float, *, group: dist.ProcessGroup | None = None, error_feedback: bool = True, start: int = 2
    ) -> None:
        if not 0 < ratio <= 1:
            raise must("ratio must be a fraction of the gradient sent, 0 < ratio <= 1", ratio, "0.08 sends 8 %.")
        if start < 0:
            raise must("start must be >= 0", start)
        self.ratio, self.group, self.error_feedback, self.start = float(ratio), group, bool(error_feedback), start
        self.steps: dict[Hashable, int] = {}
        """Gradients averaged so far, by key."""
        self.errors: dict[Hashable, Tensor] = {}
        """Error of this rank: gradients not sent yet, by key."""
        self.sent = 0.0
        """Bytes that this rank has sent in compressed steps."""
        self.dense = 0.0
        """Bytes of a dense ring all-reduce of the same gradients."""
        self._loaded: frozenset[Hashable] | None = None
        """Keys of the state that was loaded."""
        self._rehearsal = False
        """Whether this is a timing run without communication."""

    @property
    def world(self) -> int:
        return 1 if self._rehearsal else dist.get_world_size(self.group)

    def average(self, key: Hashable, gradient: Tensor) -> Tensor:
        """Replace a flat gradient by its mean over the group, compressed. Collective; the same bits on every rank.

        Args:
            key: name of the gradient from step to step, the same on every rank.
            gradient: (numbers,); overwritten and returned.
        """
        if gradient.dim() != 1:
            raise must("gradient must be flat", f"shape {tuple(gradient.shape)}")
        if self._loaded is not None and key not in self._loaded:
            advice = "Use the parameters and the bucket sizes with which the state was saved."
            raise must(f"expected a gradient of the loaded state, {sorted(map(str, self._loaded))}", repr(key), advice)
        step = self.steps.get(key, 0)
        self.steps[key] = step + 1
        if step < self.start:
            # Divided first, as DDP does: a sum of float16 gradients may overflow where their mean does not.
            return self._summed(gradient.div_(self.world))
        if step == self.start and log.isEnabledFor(logging.INFO):
            log.info("%s", self.explain(gradient.numel() * gradient.element_size(), gradient))
        error = self.errors.get(key)
        failed = gradient.isfinite().all().logical_not_()
        gradient.nan_to_num_(0.0, 0.0, 0.0)
        if error is None:
            total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        elif error.shape != gradient.shape:
            raise must(f"gradient {key!r} must keep its {len(error)} numbers", len(gradient), "Use another key.")
        else:
            # In place: fresh memory would cost more than the sum.
            total = error.to(gradient.device).add_(gradient)
        self.dense += self._all_reduced(gradient)
        failed = self._exchange(total, gradient, failed)
        gradient.masked_fill_(failed, math.nan)
        if self.error_feedback:
            self.errors[key] = total
        return gradient

    def _exchange(self, total: Tensor, mean: Tensor, failed: Tensor) -> Tensor:
        """Write the mean of the sent parts, and leave this rank's error in `total`, which is at least float32.

        `failed` is whether this rank had a number that is not finite; returns whether any rank had one, in which case
        the error of every rank is all of `total`.
        """
        raise NotImplementedError

    def share(self, world: int, element: int = 4) -> float:
        """Bytes sent over those of a dense all-reduce, for numbers of `element` bytes."""
        raise NotImplementedError

    def _summed(self, payload: Tensor) -> Tensor:
        if not self._rehearsal:
            dist.all_reduce(payload, group=self.group)
        return payload

    def _all_reduced(self, payload: Tensor) -> float:
        """Bytes a rank sends in a ring all-reduce."""
        return 2 * (self.world - 1) / self.world * payload.numel() * payload.element_size()

    def explain(self, size: int, like: Tensor | None = None, world: int | None = None) -> str:
        """Predicted savings on a gradient of `size` bytes, and the links on which compression pays.

        The time of compression is measured once; the link is assumed to carry a ring all-reduce at its full rate.
        """
        like = torch.empty(0, device="cpu") if like is None else like
        world = self.world if world is None else world
        share = self.share(world, like.element_size())
        cost = _seconds_a_byte(type(self), self.ratio, like.dtype, like.device)
        dense = 2 * (world - 1) / world
        saved = dense * (1 - share)
        text = f"{type(self).__name__} at ratio {self.ratio:g}, {world} ranks: {100 * share:.3g} % of the dense bytes"
        if saved <= 0:
            return f"{text}, so it never pays; use BlockTopK or fewer ranks"
        link = saved / cost / 1e9
        return (
            f"{text}; compressing takes {cost * size * 1e3:.3g} ms for {size / 1e6:.3g} MB (timed on this machine), "
            f"so it is predicted to pay on links slower than {link:.3g} GB/s"
        )

    def state_dict(self) -> dict[str, Any]:
        """State of this rank. Errors differ from rank to rank and stand under a name of their own for each, so that
        `torch.distributed.checkpoint` keeps them apart.
        """
        errors = {key: error.clone() for key, error in self.errors.items()}
        return {"ratio": self.ratio, "steps": dict(self.steps), _own_name(): errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of this rank, in a job of as many ranks and with the same gradients."""
        if state["ratio"] != self.ratio:
            raise must(f"the state must be of ratio {self.ratio}", state["ratio"])
        errors = _own(state)
        self.steps = dict(state["steps"])
        self.errors = {key: error.clone() for key, error in errors.items()}
        self._loaded = frozenset(self.steps)


def _own_name() -> str:
    """Name of this rank's part in the state of all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return "rank 0 of 1"
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def _own(state: dict[str, Any]) -> dict[Any, Any]:
    """This rank's part of a state."""
    name = _own_name()
    if name not in state:
        present = [key for key in state if key.startswith("rank ")]
        advice = "Load on every rank the state it saved, in a job of as many ranks."
        raise must(f"expected the state of {name}", f"that of {', '.join(present) or 'no rank'}", advice)
    return state[name]


def _rounded(total: Tensor, dtype: torch.dtype, terms: int = 1) -> Tensor:
    """Numbers to send in fewer bits, such that a sum of `terms` of them is finite: the rest stays in the error."""
    info = torch.finfo(dtype)
    most = info.max / terms * (max(1 - terms * info.eps, 0.5) if terms > 1 else 1)
    return total.clamp(-most, most).to(dtype)


def _left(total: Tensor, sent: Tensor) -> Tensor:
    """Rounding error of sending in fewer bits; 0 where it is not finite."""
    return (total - sent).nan_to_num_(0.0, 0.0, 0.0)


class BlockTopK(Compression):
    """Compression by the blocks with the largest energy summed over ranks.

    All ranks sum the energies of their blocks, pick the same blocks and all-reduce these: no indices are sent, and
    the bytes, ratio + 1 / 64 of the dense ones for float32, do not depend on the number of ranks.

    Args:
        ratio: fraction of the blocks sent.
        block: numbers in a block; 64 for float32, and as many bytes of other dtypes.
        options: `group`, `error_feedback`, `start`: see `Compression`.
    """

    def __init__(self, ratio: float = 0.08, *, block: int | None = None, **options: Any) -> None:
        super().__init__(ratio, **options)
        if block is not None and block < 1:
            raise must("block must be >= 1", block)
        self.block = block

    def _size(self, element: int) -> int:
        return self.block or 256 // element

    def _exchange(self, total: Tensor, mean: Tensor, failed: Tensor) -> Tensor:
        block = self._size(mean.element_size())
        whole = len(total) // block * block
        blocks, rest = total[:whole].view(-1, block), total[whole:]
        norms = torch.linalg.vector_norm(blocks, dim=1).square_()
        summed = self._summed(torch.cat([norms, failed.to(norms.dtype)[None]]))
        failed, energies = summed[-1] > 0, summed[:-1]
        # Rounded down, so that the ratio is kept for every length, but one block and what fills none always go.
        count = min(len(energies), max(1, int(self.ratio * len(energies))))
        chosen = energies.topk(count).indices.sort().values
        # Shares of the mean are summed: a sum of float16 gradients may overflow where their mean does not.
        sent = _rounded(torch.cat([blocks[chosen].flatten(), rest]) / self.world, mean.dtype, self.world)
        split, own = count * block, sent.to(total.dtype) * self.world
        blocks[chosen] = torch.where(failed, blocks[chosen], _left(blocks[chosen], own[:split].view(-1, block)))
        rest.copy_(torch.where(failed, rest, _left(rest, own[split:])))
        self._summed(sent)
        self.sent += self._all_reduced(summed) + self._all_reduced(sent)
        mean.zero_()
        mean[:whole].view(-1, block)[chosen] = sent[:split].view(-1, block)
        mean[whole:] = sent[split:]
        return failed

    def share(self, world: int, element: int = 4) -> float:
        return self.ratio + max(element, 4) / (self._size(element) * element)


class TopK(Compression):
    """Compression by each rank's largest numbers, sent with their places.

    Ranks pick different places, so each rank receives those of all: `ratio x world` of the dense bytes for float32,
    which pays for few ranks only.
    """

    def _exchange(self, total: Tensor, mean: Tensor, failed: Tensor) -> Tensor:
        chosen = total.abs().topk(max(1, int(self.ratio * len(total)))).indices
        sent = _rounded(total[chosen], mean.dtype)
        places = self._gathered(chosen.int())
        numbers = self._gathered(torch.cat([sent, failed.to(sent.dtype)[None]]))
        failed = torch.stack([number[-1] for number in numbers]).any()
        total[chosen] = torch.where(failed, total[chosen], _left(total[chosen], sent))
        # One rank after another, so that the sum has the same bits everywhere; float16 sums would overflow.
        summed = torch.zeros_like(total)
        for place, number in zip(places, numbers, strict=True):
            summed[place.long()] += number[:-1]
        mean.copy_(summed.div_(self.world))
        return failed

    def _gathered(self, own: Tensor) -> list[Tensor]:
        if self._rehearsal:
            return [own]
        self.sent += (self.world - 1) * own.numel() * own.element_size()
        return gathered(own, self.group)

    def share(self, world: int, element: int = 4) -> float:
        return self.ratio * (element + 4) / element * world / 2


@lru_cache(maxsize=32)
def _seconds_a_byte(kind: type[Compression], ratio: float, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of compression a byte on this machine without communication, best of three on 4 MB."""
    sample = torch.randn(4 * 2**20 // dtype.itemsize, device=device).to(dtype)
    compression = kind(ratio, start=0)
    compression._rehearsal = True
    taken = []
    for _ in range(4):
        gradient = sample.clone()
        begin = time.perf_counter()
        # Reading a number waits for the device.
        compression.average("sample", gradient)[0].item()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:]) / (sample.numel() * sample.element_size())


def ddp_hook(buckets: GradientBuckets, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook: `ddp.register_comm_hook(GradientBuckets(ddp.parameters(), BlockTopK(0.08)), ddp_hook)`.

    DDP changes its buckets after its first step, and a process that resumes begins with the first ones again. So
    gradients are averaged in the buckets of `GradientBuckets`, once the last bucket of DDP is there.
    """
    if not isinstance(buckets, GradientBuckets):
        advice = "register_comm_hook(GradientBuckets(ddp.parameters(), BlockTopK(0.08)), ddp_hook)"
        raise must_be("expected the state of ddp_hook to be a GradientBuckets", type(buckets).__name__, advice)
    return buckets.collect(bucket)


# DDP compares the annotations themselves, which are text in this file.
ddp_hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def compress_fsdp(model: nn.Module, compression: Compression) -> None:
    """Average the shards of a `fully_shard`ed model over `compression.group`, compressed.

    Shard within a node, where links are fast, and let `compression.group` be the ranks that hold the same shard on
    other nodes. FSDP averages over the shards' group itself. Not for native hybrid sharding, which has its own
    all-reduce.
    """
    from torch.distributed.fsdp import FSDPModule

    sharded = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise must_be("model must hold modules made by fully_shard", type(model).__name__)
    for name, module in sharded:
        module.set_all_reduce_hook(_fsdp_hook(name, compression))


def _fsdp_hook(name: str, compression: Compression) -> Callable[[Tensor], None]:
    def average(shard: Tensor) -> None:
        compression.average(name, shard.view(-1))

    return average


class PowerSGD:
    """torch's PowerSGD for DDP: `ddp.register_comm_hook(power.state, power.hook)`.

    Its state belongs to DDP's buckets, which DDP changes after its first step: a process that resumes takes one step
    first and then loads the model, the optimizer and this state. On gloo, torch's hook hangs where DDP has several
    buckets: set `bucket_cap_mb` so that one holds the model.

    Args:
        rank: of the matrices that stand for a gradient; bytes are (m + n) x rank / (m x n) of an m x n gradient.
        group: ranks that average; the default group if None.
        start: first steps, which are averaged densely; at least 2.
        options: further arguments of torch's `PowerSGDState`.
    """

    SAVED = ("error_dict", "p_memory_dict", "q_memory_dict")

    def __init__(
        self, rank: int = 2, *, group: dist.ProcessGroup | None = None, start: int = 2, **options: Any
    ) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self._hook, self._steps = powerSGD_hook.powerSGD_hook, 0
        self.state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=start, **options
        )

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Communication hook for `register_comm_hook`, with `state` beside it."""
        self._steps += bucket.is_last()
        return self._hook(state, bucket)

    hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}

    def state_dict(self) -> dict[str, Any]:
        """State of this rank, without the process group; see `Compression.state_dict`."""
        saved = {name: {k: t.clone() for k, t in getattr(self.state, name).items()} for name in self.SAVED}
        _, keys, place, *_ = self.state.rng.get_state()
        drawn = {"keys": torch.tensor(keys, dtype=torch.int64, device="cpu"), "place": place}
        return {
            _own_name(): saved,
            "iter": self.state.iter,
            "rank": self.state.matrix_approximation_rank,
            "drawn": drawn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of this rank; the group stays the one given here."""
        if state["rank"] != self.state.matrix_approximation_rank:
            raise must(f"the state must be of rank {self.state.matrix_approximation_rank}", state["rank"])
        if not self._steps:
            advice = "Take one step on any batch, then load the model, the optimizer and this state."
            raise must(
                "expected load_state_dict after the first step of DDP, which changes its buckets", "none", advice
            )
        saved = _own(state)
        for name in self.SAVED:
            setattr(self.state, name, {key: tensor.clone() for key, tensor in saved[name].items()})
        self.state.iter = state["iter"]
        drawn = state["drawn"]
        self.state.rng.set_state(("MT19937", drawn["keys"].numpy(), drawn["place"], 0, 0.0))


class GradientBuckets:
    """Averages gradients over a group, a bucket at a time: after `backward` by `synchronize`, or within DDP by
    `ddp_hook`. Buckets follow from the parameters and the sizes alone, so that a resumed process has the same.

    Args:
        parameters: parameters whose gradients are averaged; in the same order on every rank.
        compression: compression of the average; dense if None.
        group: ranks that average; the default group if None. With `compression`, its own group.
        size_mb: bytes after which a bucket is full, in MB.
        count: tensors after which a bucket is full.

    >>> model = nn.Linear(8, 8)
    >>> [len(bucket) for bucket in GradientBuckets(model.parameters(), count=1).buckets]
    [1, 1]
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        compression: Compression | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        size_mb: float = 25.0,
        count: int = 32,
    ) -> None:
        if not size_mb > 0:
            raise must("size_mb must be > 0", size_mb)
        if count < 1:
            raise must("count must be >= 1", count)
        if compression is not None and not isinstance(compression, Compression):
            advice = "PowerSGD needs the layers of DDP's buckets: register it with DDP."
            raise must_be("compression must be a BlockTopK or TopK", type(compression).__name__, advice)
        if compression is not None and group is not None and group is not compression.group:
            raise must("group must be that of the compression", "another")
        self.compression, self.group = compression, group if compression is None else compression.group
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise must("there must be parameters that require gradients", "none")
        self.buckets = list(self._packed(size_mb * 1e6, count))
        self.names = [self._name(number, bucket) for number, bucket in enumerate(self.buckets)]
        """Keys of the buckets in the state of the compression, of which the shapes within are a part."""
        self._collected: list[tuple[dict[int, Tensor], Tensor, torch.futures.Future[Tensor]]] = []

    def _name(self, number: int, bucket: list[int]) -> str:
        shapes = [(index, tuple(self.parameters[index].shape)) for index in bucket]
        return f"bucket {number} {sha256(repr(shapes).encode()).hexdigest()[:8]}"

    def _packed(self, most_bytes: float, most: int) -> Iterable[list[int]]:
        """Indices of parameters, last first as gradients arrive, of one dtype and device a bucket."""
        bucket, filled, kind = [], 0, None
        for index in reversed(range(len(self.parameters))):
            parameter = self.parameters[index]
            size = parameter.numel() * parameter.element_size()
            own = parameter.dtype, parameter.device
            if bucket and (filled + size > most_bytes or len(bucket) == most or own != kind):
                yield bucket
                bucket, filled = [], 0
            bucket, filled, kind = [*bucket, index], filled + size, own
        yield bucket

    @torch.no_grad()
    def synchronize(self) -> None:
        """Replace every gradient by its mean over the group. Collective; call it after `backward`.

        A rank without a gradient counts as zero; a parameter without one on any rank stays without.
        """
        device = self.parameters[0].device
        present = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.int32, device=device)
        dist.all_reduce(present, dist.ReduceOp.MAX, group=self.group)
        somewhere = present.tolist()
        for index, mean in self._means([p.grad for p in self.parameters]):
            parameter = self.parameters[index]
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
            # An error of an earlier step may be sent in a step without a gradient.
            elif somewhere[index] or mean.any():
                parameter.grad = mean.clone()

    def _means(self, gradients: list[Tensor | None]) -> Iterable[tuple[int, Tensor]]:
        """Index and mean of every gradient, in the order of the buckets. Collective."""
        for name, bucket in zip(self.names, self.buckets, strict=True):
            members = [(self.parameters[i], gradients[i]) for i in bucket]
            flat = torch.cat([(torch.zeros_like(p) if grad is None else grad).flatten() for p, grad in members])
            if self.compression is None:
                mean = flat.div_(dist.get_world_size(self.group))
                dist.all_reduce(mean, group=self.group)
            else:
                mean = self.compression.average(name, flat)
            pieces = mean.split([p.numel() for p, _ in members])
            yield from ((i, piece.view_as(p)) for i, piece, (p, _) in zip(bucket, pieces, members, strict=True))

    @torch.no_grad()
    def collect(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Collect a bucket of DDP, and average all gradients after the last one. For `ddp_hook`."""
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        if bucket.index() == 0:
            self._collected = []
        own = dict(zip(map(id, bucket.parameters()), bucket.gradients(), strict=True))
        self._collected.append((own, bucket.buffer(), done))
        if not bucket.is_last():
            return done
        collected, self._collected = self._collected, []
        gradients = {key: grad for own, _, _ in collected for key, grad in own.items()}
        if gradients.keys() != set(map(id, self.parameters)):
            advice = "Build GradientBuckets with ddp.parameters()."
            came = f"{len(gradients)} in its buckets and {len(self.parameters)} here"
            raise must("expected the parameters that DDP averages", came, advice)
        ordered = [gradients[id(parameter)] for parameter in self.parameters]
        for index, mean in self._means(list(ordered)):
            ordered[index].copy_(mean)
        for _, buffer, future in collected:
            future.set_result(buffer)
        return done
