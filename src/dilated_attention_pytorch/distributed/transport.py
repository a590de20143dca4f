"""How rows travel: between the processes of a group, or between ranks that live in one process.

Both kinds take and give one item for each rank of this process: a group has one, virtual ranks are all here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import must
from .memory import receive_buffer

Item = TypeVar("Item")
Messages = dict[int, Tensor]
"""By rank."""


class Pending(Generic[Item]):
    """Something on its way."""

    def __init__(self, arrive: Callable[[], Item]) -> None:
        self._arrive = arrive

    def wait(self) -> Item:
        """Block until it is here."""
        return self._arrive()


class Transport(Protocol):
    """What the exchange asks for."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that live in this process."""
        ...

    @property
    def wire(self) -> torch.device:
        """Where integers must lie to be carried."""
        ...

    def all_to_all(
        self, sent: list[Tensor], send_counts: list[tuple[int, ...]], receive_counts: list[tuple[int, ...]]
    ) -> Pending[list[Tensor]]:
        """Rows ordered by receiver, and how many are whose; gives rows ordered by sender. Collective."""
        ...

    def highest(self, numbers: list[Tensor]) -> Tensor:
        """Elementwise, the highest number any rank has. Collective."""
        ...

    def swap(self, outgoing: list[Messages], sources: list[dict[int, int]]) -> Pending[list[Messages]]:
        """Messages to some ranks, and how many rows come from which; every message has the width of those sent."""
        ...


class GroupTransport:
    """Rows between the members of a process group."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world: int) -> None:
        self.group, self.ranks, self.world = group, (rank,), world
        self.wire = torch.device("cpu") if world == 1 else wire_device(group)

    def all_to_all(
        self, sent: list[Tensor], send_counts: list[tuple[int, ...]], receive_counts: list[tuple[int, ...]]
    ) -> Pending[list[Tensor]]:
        """See `Transport`."""
        (rows,), (out,), (into,) = sent, send_counts, receive_counts
        received = receive_buffer(rows, sum(into))
        if self.world == 1:
            return Pending(lambda: [received.copy_(rows)])
        rows = rows.contiguous()
        work = dist.all_to_all_single(received, rows, list(into), list(out), group=self.group, async_op=True)
        travelling = [] if work is None else [(work, rows)]

        def arrive() -> list[Tensor]:
            _finish(travelling)
            return [received]

        return Pending(arrive)

    def swap(self, outgoing: list[Messages], sources: list[dict[int, int]]) -> Pending[list[Messages]]:
        """See `Transport`."""
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
        travelling = [(work, sent) for work in works]
        operations.clear()

        def arrive() -> list[Messages]:
            _finish(travelling)
            return [got]

        return Pending(arrive)

    def highest(self, numbers: list[Tensor]) -> Tensor:
        """See `Transport`."""
        most = numbers[0].to(self.wire)
        if self.world > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return most.cpu()

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _finish(travelling: list[tuple[dist.Work, Any]]) -> None:
    """Wait for what is under way, each with what must live until it has left.

    Both are let go whatever happens: an error keeps the functions it passed through, and what those hold would keep a
    broken group's connections open.
    """
    try:
        for work, _ in travelling:
            work.wait()
    finally:
        travelling.clear()


class VirtualTransport:
    """Rows between ranks that are all in this process."""

    def __init__(self, world: int) -> None:
        self.ranks, self.wire = tuple(range(world)), torch.device("cpu")

    def all_to_all(
        self, sent: list[Tensor], send_counts: list[tuple[int, ...]], receive_counts: list[tuple[int, ...]]
    ) -> Pending[list[Tensor]]:
        """See `Transport`."""
        pieces = [rows.split(counts) for rows, counts in zip(sent, send_counts, strict=True)]
        received = [torch.cat([own[rank] for own in pieces]) for rank in self.ranks]
        assert all(len(rows) == sum(counts) for rows, counts in zip(received, receive_counts, strict=True))
        return Pending(lambda: received)

    def swap(self, outgoing: list[Messages], sources: list[dict[int, int]]) -> Pending[list[Messages]]:
        """See `Transport`."""
        got = [{peer: outgoing[peer][rank].clone() for peer in into} for rank, into in enumerate(sources)]
        return Pending(lambda: got)

    def highest(self, numbers: list[Tensor]) -> Tensor:
        """See `Transport`."""
        return torch.stack(numbers).amax(0)


def rank_in(group: dist.ProcessGroup | None, world: int) -> int:
    """This process's place in the group; 0 where a layout of one rank comes without a group."""
    if group is None and world == 1:
        return 0
    if not dist.is_available() or not dist.is_initialized():
        raise must(
            f"a layout of {world} ranks must meet a process group of {world} members",
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
        raise must(f"a layout of {world} ranks must meet a process group of {world} members", members)
    carriers = dist.get_backend_config(group)
    if device.type == "cuda" and "nccl" not in carriers and "gloo" in carriers:
        raise must(
            "tensors on a GPU must meet a process group that carries them",
            carriers,
            'Start it with init_process_group("nccl"), or "cpu:gloo,cuda:nccl" for both.',
        )


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's backend wants the integers it carries."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
