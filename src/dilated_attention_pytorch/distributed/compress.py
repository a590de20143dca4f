"""Fewer bytes for gradients: send the parts that matter now, keep the rest for later.

What a rank does not send it adds to its next gradient (error feedback), so nothing is lost: over any number of steps,

    sum of what was applied + mean over ranks of what is kept = sum of the mean gradients.

On fast links compression costs more than it saves; `explain` predicts where the break-even lies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import must, must_be

log = logging.getLogger(__name__)


class Compression:
    """Averages flat gradients over a group, sending less than all of them.

    Args:
        ratio: fraction of the gradient that is sent.
        group: who averages; the default group if None.
        error_feedback: add what was not sent to the next gradient; without it training loses those parts for good.
        start: steps averaged densely at first. DDP lays out its buckets anew after the first one.
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
        """What this rank has not sent yet, by key."""
        self.sent = 0.0
        """Bytes this rank has put on the wire while compressing."""
        self.dense = 0.0
        """Bytes a dense ring all-reduce of the same gradients puts there."""
        self._rehearsal = False
        """Whether this rank works alone, to be timed."""

    @property
    def world(self) -> int:
        return 1 if self._rehearsal else dist.get_world_size(self.group)

    def average(self, key: Hashable, gradient: Tensor) -> Tensor:
        """Replace a flat gradient by its mean over the group, compressed. Collective; the same bits on every rank.

        Args:
            key: names the gradient from step to step, the same on every rank.
            gradient: (numbers,); overwritten and returned.
        """
        if gradient.dim() != 1:
            raise must("gradient must be flat", f"shape {tuple(gradient.shape)}")
        step = self.steps.get(key, 0)
        self.steps[key] = step + 1
        if step < self.start:
            return self._summed(gradient).div_(self.world)
        if step == self.start and log.isEnabledFor(logging.INFO):
            log.info("%s", self.explain(gradient.numel() * gradient.element_size(), gradient))
        kept = self.errors.get(key)
        if kept is None:
            total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        elif kept.shape != gradient.shape:
            raise must(f"gradient {key!r} must keep its {len(kept)} numbers", len(gradient), "Use another key.")
        else:
            # In place: fresh memory would cost more than the sum.
            total = kept.to(gradient.device).add_(gradient)
        self.dense += self._all_reduced(gradient)
        self._exchange(total, gradient)
        if self.error_feedback:
            self.errors[key] = total
        return gradient

    def _exchange(self, total: Tensor, mean: Tensor) -> None:
        """Write the mean of what ranks send, and leave in `total`, which is at least float32, what this rank keeps."""
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
        """What compression saves on a gradient of `size` bytes, and on which links it pays; a prediction.

        What compressing takes is timed here, once; the link is assumed to carry a ring all-reduce at its full rate.
        """
        like = torch.empty(0) if like is None else like
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
        """What this rank must keep to go on where it stopped; each rank has its own."""
        return {
            "ratio": self.ratio,
            "steps": dict(self.steps),
            "errors": {key: error.clone() for key, error in self.errors.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of this rank."""
        if state["ratio"] != self.ratio:
            raise must(f"the state must be of ratio {self.ratio}", state["ratio"])
        self.steps = dict(state["steps"])
        self.errors = {key: error.clone() for key, error in state["errors"].items()}


def _left(total: Tensor, sent: Tensor) -> Tensor:
    """What sending in fewer bits leaves behind; nothing of what is no number, or it would come back for ever."""
    return (total - sent).nan_to_num_(0.0, 0.0, 0.0)


class BlockTopK(Compression):
    """Sends the blocks with the largest energy summed over ranks.

    All ranks add up the energies of their blocks, pick the same ones and all-reduce just those: no indices travel, and
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

    def _exchange(self, total: Tensor, mean: Tensor) -> None:
        block = self._size(mean.element_size())
        whole = len(total) // block * block
        blocks, rest = total[:whole].view(-1, block), total[whole:]
        energies = self._summed(torch.linalg.vector_norm(blocks, dim=1).square_())
        # Rounded down, so that the ratio is kept for every length, but one block and what fills none always go.
        count = min(len(energies), max(1, int(self.ratio * len(energies))))
        chosen = energies.topk(count).indices.sort().values
        sent = torch.cat([blocks[chosen].flatten(), rest]).to(mean.dtype)
        split = count * block
        blocks[chosen] = _left(blocks[chosen], sent[:split].view(-1, block))
        rest.copy_(_left(rest, sent[split:]))
        self._summed(sent).div_(self.world)
        self.sent += self._all_reduced(energies) + self._all_reduced(sent)
        mean.zero_()
        mean[:whole].view(-1, block)[chosen] = sent[:split].view(-1, block)
        mean[whole:] = sent[split:]

    def share(self, world: int, element: int = 4) -> float:
        return self.ratio + max(element, 4) / (self._size(element) * element)


class TopK(Compression):
    """Sends each rank's largest numbers, with their places.

    Ranks pick different places, so all of them travel to all: `ratio x world` of the dense bytes for float32, which
    pays for few ranks alone.
    """

    def _exchange(self, total: Tensor, mean: Tensor) -> None:
        chosen = total.abs().topk(max(1, int(self.ratio * len(total)))).indices
        sent = total[chosen].to(mean.dtype)
        total[chosen] = _left(total[chosen], sent)
        places, numbers = (self._gathered(x) for x in (chosen.int(), sent))
        mean.zero_()
        # One rank after another, so that the sum has the same bits everywhere.
        for place, number in zip(places, numbers, strict=True):
            mean[place.long()] += number
        mean.div_(self.world)

    def _gathered(self, own: Tensor) -> list[Tensor]:
        if self._rehearsal:
            return [own]
        every = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(every, own, group=self.group)
        self.sent += (self.world - 1) * own.numel() * own.element_size()
        return every

    def share(self, world: int, element: int = 4) -> float:
        return self.ratio * (element + 4) / element * world / 2


@lru_cache(maxsize=32)
def _seconds_a_byte(kind: type[Compression], ratio: float, dtype: torch.dtype, device: torch.device) -> float:
    """What compressing costs on this machine besides the wire, best of three on 4 MB."""
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


def ddp_hook(compression: Compression, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """For `DistributedDataParallel.register_comm_hook(compression, ddp_hook)`; its buckets have 25 MiB by default."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(compression.average(bucket.index(), bucket.buffer()))
    return done


# DDP compares the annotations themselves, which are text in this file.
ddp_hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def compress_fsdp(model: nn.Module, compression: Compression) -> None:
    """Average the shards of a `fully_shard`ed model over `compression.group`, compressed.

    Shard within a node, where links are fast, and let `compression.group` be the ranks that hold the same shard on
    other nodes. FSDP averages over the shards' group itself. Not for native hybrid sharding, which has its own
    all-reduce.
    """
    from torch.distributed.fsdp import FSDPModule

    found = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not found:
        raise must_be("model must hold modules made by fully_shard", type(model).__name__)
    for name, module in found:
        module.set_all_reduce_hook(_fsdp_hook(name, compression))


def _fsdp_hook(name: str, compression: Compression) -> Callable[[Tensor], None]:
    def average(shard: Tensor) -> None:
        compression.average(name, shard.view(-1))

    return average


class PowerSGD:
    """torch's PowerSGD for DDP: `ddp.register_comm_hook(power.state, power.hook)`.

    Args:
        rank: of the matrices that stand for a gradient; bytes are (m + n) x rank / (m x n) of an m x n gradient.
        group: who averages; the default group if None.
        start: steps averaged densely at first, at least 2.
        options: whatever else torch's `PowerSGDState` takes.
    """

    KEPT = ("error_dict", "p_memory_dict", "q_memory_dict")

    def __init__(
        self, rank: int = 2, *, group: dist.ProcessGroup | None = None, start: int = 2, **options: Any
    ) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self.hook = powerSGD_hook.powerSGD_hook
        self.state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=start, **options
        )

    def state_dict(self) -> dict[str, Any]:
        """What this rank must keep to go on where it stopped, without the process group."""
        kept = {name: {k: t.clone() for k, t in getattr(self.state, name).items()} for name in self.KEPT}
        _, keys, place, *_ = self.state.rng.get_state()
        drawn = {"keys": torch.tensor(keys, dtype=torch.int64), "place": place}
        return {**kept, "iter": self.state.iter, "rank": self.state.matrix_approximation_rank, "drawn": drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of this rank; the group stays the one given here."""
        if state["rank"] != self.state.matrix_approximation_rank:
            raise must(f"the state must be of rank {self.state.matrix_approximation_rank}", state["rank"])
        for name in self.KEPT:
            setattr(self.state, name, {key: tensor.clone() for key, tensor in state[name].items()})
        self.state.iter = state["iter"]
        drawn = state["drawn"]
        self.state.rng.set_state(("MT19937", drawn["keys"].numpy(), drawn["place"], 0, 0.0))


class GradientBuckets:
    """Averages gradients over a group after `backward`, a bucket at a time, for models outside DDP and FSDP.

    Args:
        parameters: whose gradients; the same, in the same order, on every rank.
        compression: how to average; densely if None.
        group: who averages; the default group if None. With `compression`, its own group.
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
            advice = "PowerSGD speaks of the layers of DDP's buckets: register it there."
            raise must_be("compression must be a BlockTopK or TopK", type(compression).__name__, advice)
        if compression is not None and group is not None and group is not compression.group:
            raise must("group must be that of the compression", "another")
        self.compression, self.group = compression, group if compression is None else compression.group
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise must("there must be parameters that require gradients", "none")
        self.buckets = list(self._packed(size_mb * 1e6, count))

    def _packed(self, most_bytes: float, most: int) -> Iterable[list[int]]:
        """Indices of parameters, last first as gradients arrive, of one dtype and device a bucket."""
        bucket, held, kind = [], 0, None
        for index in reversed(range(len(self.parameters))):
            parameter = self.parameters[index]
            size = parameter.numel() * parameter.element_size()
            own = parameter.dtype, parameter.device
            if bucket and (held + size > most_bytes or len(bucket) == most or own != kind):
                yield bucket
                bucket, held = [], 0
            bucket, held, kind = [*bucket, index], held + size, own
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
        for number, bucket in enumerate(self.buckets):
            members = [self.parameters[i] for i in bucket]
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in members])
            if self.compression is None:
                dist.all_reduce(flat, group=self.group)
                mean = flat.div_(dist.get_world_size(self.group))
            else:
                mean = self.compression.average(number, flat)
            for index, parameter, piece in zip(bucket, members, mean.split([p.numel() for p in members]), strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(piece.view_as(parameter))
                # What was kept from an earlier step may go out in one without a gradient.
                elif somewhere[index] or piece.any():
                    parameter.grad = piece.view_as(parameter).clone()
