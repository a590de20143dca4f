"""Transports: rows between the processes of a group, or between virtual ranks of one process.

Both kinds take and return one item for each rank of this process: a group has one of them, a virtual world all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import must
from .receive_buffers import free_on, receive_buffer

Item = TypeVar("Item")
Messages = dict[int, Tensor]
"""By rank."""


class Pending(Generic[Item]):
    """Result of an exchange in flight."""

    def __init__(self, arrive: Callable[[], Item]) -> None:
        self._arrive = arrive

    def wait(self) -> Item:
        """Block until the exchange is complete."""
        return self._arrive()


class Transport(Protocol):
    """Collective operations of an exchange."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of this process."""

    @property
    def wire(self) -> torch.device:
        """Device of integers that can be sent."""

    def all_to_all(
        self, sent: list[Tensor], send_counts: list[tuple[int, ...]], receive_counts: list[tuple[int, ...]]
    ) -> Pending[list[Tensor]]:
        """Send rows ordered by receiver, with their counts; returns rows ordered by sender. Collective."""

    def highest(self, numbers: list[Tensor]) -> Tensor:
        """Elementwise maximum over the ranks. Collective."""

    def swap(self, outgoing: list[Messages], sources: list[dict[int, int]]) -> Pending[list[Messages]]:
        """Send messages to some ranks; `sources` has the rows that arrive, by rank. All messages have one width."""

    def check(self, failure: Exception | None) -> None:
        """Raise on every rank if one failed, see `check_everywhere`. Collective."""

    def check_completion(self, failure: Exception | None) -> None:
        """Raise on every rank if one failed during a call, as far as the transport can without a device sync."""


class GroupTransport:
    """Rows between the members of a process group."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int) -> None:
        self.group, self.ranks, self.wire = group, (rank,), wire_device(group)

    def all_to_all(
        self, sent: list[Tensor], send_counts: list[tuple[int, ...]], receive_counts: list[tuple[int, ...]]
    ) -> Pending[list[Tensor]]:
        (rows,), (out,), (into,) = sent, send_counts, receive_counts
        received = receive_buffer(rows, sum(into))
        rows = rows.contiguous()
        work = dist.all_to_all_single(received, rows, list(into), list(out), group=self.group, async_op=True)
        return _arrival([] if work is None else [(work, rows)], [received])

    def swap(self, outgoing: list[Messages], sources: list[dict[int, int]]) -> Pending[list[Messages]]:
        (out,), (into,) = outgoing, sources
        like = next(iter(out.values()))
        got = {rank: like.new_empty(rows, *like.shape[1:]) for rank, rows in into.items()}
        operations = [
            dist.P2POp(send, rows.contiguous(), self._global(rank), self.group)
            for send, messages in ((dist.isend, out), (dist.irecv, got))
            for rank, rows in sorted(messages.items())
            if rows.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        sent = [operation.tensor for operation in operations]
        operations.clear()
        return _arrival([(work, sent) for work in works], [got])

    def highest(self, numbers: list[Tensor]) -> Tensor:
        most = numbers[0].to(self.wire)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return most.cpu()

    def check(self, failure: Exception | None) -> None:
        check_everywhere(failure, self.group)

    def check_completion(self, failure: Exception | None) -> None:
        """On NCCL a check would wait for the GPU in every call, so only this rank raises."""
        if self.wire.type == "cpu":
            check_everywhere(failure, self.group)
        elif failure is not None:
            raise failure

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _arrival(travelling: list[tuple[dist.Work, Any]], arrived: Item) -> Pending[Item]:
    """Result of operations, each given with the tensors that must live until it is complete.

    The references are dropped in any case: the frames of an error would hold them, and with them the connections of a
    broken group.
    """

    def arrive() -> Item:
        try:
            for work, _ in travelling:
                work.wait()
        finally:
            travelling.clear()
        return arrived

    return Pending(arrive)


class VirtualTransport:
    """Rows between ranks that are all in this process."""

    def __init__(self, world: int) -> None:
        self.ranks, self.wire = tuple(range(world)), torch.device("cpu")

    def all_to_all(
        self, sent: list[Tensor], send_counts: list[tuple[int, ...]], receive_counts: list[tuple[int, ...]]
    ) -> Pending[list[Tensor]]:
        pieces = [rows.split(counts) for rows, counts in zip(sent, send_counts, strict=True)]
        received = [torch.cat([own[rank] for own in pieces]) for rank in self.ranks]
        assert all(len(rows) == sum(counts) for rows, counts in zip(received, receive_counts, strict=True))
        return Pending(lambda: received)

    def swap(self, outgoing: list[Messages], sources: list[dict[int, int]]) -> Pending[list[Messages]]:
        got = [{peer: outgoing[peer][rank].clone() for peer in into} for rank, into in enumerate(sources)]
        return Pending(lambda: got)

    def highest(self, numbers: list[Tensor]) -> Tensor:
        return torch.stack(numbers).amax(0)

    def check(self, failure: Exception | None) -> None:
        if failure is not None:
            raise failure

    check_completion = check


@contextmanager
def together(transport: Transport) -> Iterator[None]:
    """Run local work between two collectives; an exception on one rank is raised on all at its end. Collective."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    transport.check(failure)


class LocalWork:
    """Local work of one call with several collectives.

    After an exception the rank computes nothing more and takes part in the remaining collectives with zeros, so that
    no other rank waits for it.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def run(self, work: Callable[[], Item], otherwise: Callable[[], Item]) -> Item:
        """The result of `work`, or of `otherwise` from the first exception on."""
        if self.failure is None:
            try:
                return work()
            except Exception as error:
                self.failure = error
        return otherwise()


@contextmanager
def completed_together(transport: Transport) -> Iterator[LocalWork]:
    """A call with several collectives: an exception in the local work of one rank is raised on all at its end."""
    local = LocalWork()
    try:
        yield local
    except Exception as fault:
        # A broken link must not hide this rank's own error.
        if local.failure is not None:
            raise local.failure from fault
        raise
    transport.check_completion(local.failure)


MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error reports that memory ran out on this rank."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and MEMORY.search(str(error)) is not None


def check_everywhere(failure: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank of a group if one of them failed. Collective.

    A failed rank raises its own error. The others raise a ValueError that quotes it, or a MemoryError where memory ran
    out and nothing else failed: `attempt` then runs the step again on all ranks.
    """
    kind = 0 if failure is None else 1 if out_of_memory(failure) else 2
    worst = torch.tensor([kind], dtype=torch.int32, device=wire_device(group))
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    if not int(worst):
        return
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, None if failure is None else error_text(failure), group=group)
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
    if int(worst) == 1:
        raise failure or MemoryError(f"memory ran out on another rank:\n{lines}")
    raise on_every_rank(failure or must("expected every rank to succeed", f"errors:\n{lines}"), group)


def on_every_rank(error: Exception, group: dist.ProcessGroup | None) -> Exception:
    """Mark an error that every rank of a group raises, so that no vote about it is needed."""
    error._raised_by = group_name(group)  # pyrefly: ignore[missing-attribute]
    return error


def is_on_every_rank(error: BaseException, group: dist.ProcessGroup | None) -> bool:
    """Whether `on_every_rank` marked the error for this group."""
    return getattr(error, "_raised_by", None) == group_name(group)


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group, or the default one."""
    members = dist.group.WORLD if group is None else group
    assert members is not None
    return members


def group_name(group: dist.ProcessGroup | None) -> str:
    """Name of a group, or of the default one."""
    return group_of(group).group_name


def gathered(own: Tensor, group: dist.ProcessGroup | None, patience: timedelta | None = None) -> list[Tensor]:
    """The tensors of all ranks, of one shape and dtype. Collective.

    Raises after `patience`, or the group's timeout if None.
    """
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(every, own, group=group, async_op=patience is not None)
    if work is not None and patience is not None:
        work.wait(patience)
    return every


def error_text(error: BaseException) -> str:
    """Type and message of an exception."""
    return f"{type(error).__name__}: {error}"


def rank_in(group: dist.ProcessGroup | None, world: int) -> int:
    """Rank of this process in the group that a layout of `world` ranks needs."""
    if not dist.is_available() or not dist.is_initialized():
        raise must(
            f"a layout of {world} ranks needs a process group of {world} members",
            "no initialised process group",
            "Start the script with torchrun and call torch.distributed.init_process_group.",
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise must("this process must be a member of the group", f"global rank {dist.get_rank()}, which is not")
    return rank


def check_group(group: dist.ProcessGroup | None, world: int, device: torch.device) -> None:
    """A layout must have as many ranks as the group has members, and the group must carry tensors of the device."""
    members = dist.get_world_size(group)
    if members != world:
        raise must(f"a layout of {world} ranks needs a process group of {world} members", members)
    carriers = dist.get_backend_config(group)
    if device.type == "cuda" and "nccl" not in carriers and "gloo" in carriers:
        raise must(
            "tensors on a GPU need a process group that supports them",
            carriers,
            'Start it with init_process_group("nccl"), or "cpu:gloo,cuda:nccl" for both.',
        )
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        # NCCL binds a rank to one GPU, and integers are carried on the current one.
        current = torch.cuda.current_device()
        advice = 'Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group.'
        raise must(f"expected tensors on the current device cuda:{current}", device, advice)


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """Device of the integers that the group's backend carries: with NCCL, the current GPU of this process."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def least_free(device: torch.device, group: dist.ProcessGroup | None = None) -> int | None:
    """Least free bytes of a device over the ranks, None if unknown on some rank. Collective.

    `receive_budget=int(FRACTION * least)` makes an exchange fit everywhere.
    """
    least = torch.tensor([free_on(device)], device=wire_device(group))
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return int(least) if int(least) >= 0 else None
