"""Rows of K and V on their way: who sends which to whom, and the exchange and its adjoint.

A *row* is one token of one key head, over the whole batch. Its code is `key head * n + token`; in the shard of a rank
that holds `m` tokens it is row `key head * m + place`.

gloo raises no error when two ranks disagree on what they exchange, it leaves rows unwritten. So what a rank sends is
what others asked it for, and before that all ranks compare what they are about to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ..errors import must
from .shard import SequenceLayout
from .transport import GroupTransport, Transport


class Traffic(NamedTuple):
    """What one exchange moves through one rank, in the forward pass; the backward pass moves the same back."""

    rows_received: int
    rows_sent: int
    bytes_received: int
    bytes_sent: int
    peers: int
    """Ranks it receives rows from."""
    ring_bytes: int
    """What a ring, or an all-gather, would receive here."""
    messages: int
    """Messages it receives: one a peer, or those of a butterfly's steps."""
    bytes_between_nodes: int
    """Of the bytes received, those that come from another node."""

    @property
    def share_of_ring(self) -> float:
        return self.bytes_received / self.ring_bytes if self.ring_bytes else 0.0

    def __str__(self) -> str:
        return (
            f"receives {self.bytes_received / 1e6:.3g} MB in {self.messages} messages from {self.peers} ranks "
            f"({self.bytes_between_nodes / 1e6:.3g} MB between nodes), sends {self.bytes_sent / 1e6:.3g} MB; "
            f"a ring or an all-gather receives {self.ring_bytes / 1e6:.3g} MB"
        )


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """Rows a rank needs and does not hold."""

    codes: Tensor
    """int64, ordered by holder, then by code"""
    counts: tuple[int, ...]
    """Rows wanted from each rank."""


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One round of a butterfly: the same number of rows to and from each of a few partners."""

    send: dict[int, Tensor]
    """int64, by partner: places in [rows of the shard, received rows]"""
    receive: dict[int, Tensor]
    """int64, by partner: received rows that arrive, counted from the first received row"""


@dataclass(frozen=True, eq=False, slots=True)
class ExchangePlan:
    """Which rows one rank sends and receives."""

    rank: int
    layout: SequenceLayout
    key_heads: int
    request: Request
    """What it receives, in this order."""
    send: Tensor
    """int64: rows of the shard, ordered by who asked for them"""
    send_counts: tuple[int, ...]
    steps: tuple[Step, ...] | None = None
    """Rounds in which rows are passed on from rank to rank; None when every holder sends to every asker."""

    @property
    def local_rows(self) -> int:
        return self.key_heads * self.layout.lengths[self.rank]

    @property
    def fingerprint(self) -> str:
        """Equal for equal plans."""
        numbers = torch.cat([self.request.codes, self.send]).cpu().contiguous()
        facts = repr((self.rank, self.layout, self.key_heads, self.request.counts, self.send_counts))
        return sha256(facts.encode() + bytes(numbers.view(torch.uint8).tolist())).hexdigest()[:16]

    def report(self, row_bytes: int, ranks_per_node: int = 1) -> Traffic:
        """Rows and bytes, when a row of K and its row of V take `row_bytes` together."""
        received, sent = len(self.request.codes), len(self.send)
        remote = self.key_heads * self.layout.n - self.local_rows
        peers = sum(count > 0 for count in self.request.counts)
        node = self.rank // ranks_per_node
        arrivals = dict(enumerate(self.request.counts))
        messages = peers
        if self.steps is not None:
            rounds = [{who: len(rows) for who, rows in step.receive.items() if len(rows)} for step in self.steps]
            messages, sent = sum(map(len, rounds)), sum(len(rows) for step in self.steps for rows in step.send.values())
            arrivals = {}
            for who, rows in (pair for one in rounds for pair in one.items()):
                arrivals[who] = arrivals.get(who, 0) + rows
            peers = len(arrivals)
        between = sum(rows for who, rows in arrivals.items() if who // ranks_per_node != node)
        moved = (received * row_bytes, sent * row_bytes, peers, remote * row_bytes, messages, between * row_bytes)
        return Traffic(received, sent, *moved)

    def place(self, codes: Tensor) -> Tensor:
        """Where each row lies in [own rows, received rows]."""
        token, head = codes % self.layout.n, codes // self.layout.n
        holder, place = self.layout.locate(token)
        own = head * self.layout.lengths[self.rank] + place
        return torch.where(holder == self.rank, own, self.local_rows + self.received(codes))

    def received(self, codes: Tensor) -> Tensor:
        """Which received row each of these rows is."""
        order = self.layout.key_order(self.request.codes, self.key_heads)
        return torch.searchsorted(order, self.layout.key_order(codes, self.key_heads))


def request_for(codes: Tensor, layout: SequenceLayout, rank: int, key_heads: int) -> Request:
    """What the rank must ask for to have the rows `codes` (any shape, repetitions and -1 for none allowed)."""
    wanted = torch.unique(codes[codes >= 0])
    holder, _ = layout.locate(wanted % layout.n)
    wanted, holder = wanted[holder != rank], holder[holder != rank]
    order = torch.argsort(layout.key_order(wanted, key_heads))
    counts = torch.bincount(holder, minlength=layout.world)
    return Request(wanted[order], tuple(counts.tolist()))


def agree(requests: list[Request], layout: SequenceLayout, key_heads: int, transport: Transport) -> list[ExchangePlan]:
    """Tell the holders what is wanted, learn what others want, for the ranks of this process. Collective."""
    world = layout.world
    counts = [torch.tensor(request.counts, device=transport.wire)[:, None] for request in requests]
    each = [(1,) * world] * len(requests)
    asked = [tuple(rows[:, 0].tolist()) for rows in transport.all_to_all(counts, each, each).wait()]
    wanted = [request.codes.to(transport.wire)[:, None] for request in requests]
    codes = transport.all_to_all(wanted, [request.counts for request in requests], asked).wait()
    return [
        _answer(request, rows[:, 0].cpu(), many, layout, rank, key_heads)
        for rank, request, rows, many in zip(transport.ranks, requests, codes, asked, strict=True)
    ]


def _answer(
    request: Request, codes: Tensor, counts: tuple[int, ...], layout: SequenceLayout, rank: int, key_heads: int
) -> ExchangePlan:
    holder, place = layout.locate(codes % layout.n)
    assert bool((holder == rank).all()), "asked for rows of another rank"
    send = codes // layout.n * layout.lengths[rank] + place
    return ExchangePlan(rank, layout, key_heads, request, send, counts)


def exchange(rows: Tensor, plan: ExchangePlan, group: dist.ProcessGroup | None) -> Tensor:
    """The rows a rank asked for, from the (local rows, width) shards of the others. Collective, twice differentiable.

    Going backward, gradients of received rows return to their holder, which adds them up in at least float32.
    """
    send = plan.send.to(rows.device)
    counts = list(plan.send_counts), list(plan.request.counts)
    return torch.ops.dilated_attention.exchange(rows, send, *counts, _name(group, plan.layout.world))


def exchange_transposed(rows: Tensor, plan: ExchangePlan, group: dist.ProcessGroup | None) -> Tensor:
    """The adjoint of `exchange`: received rows go back to their holder and are added up there."""
    send = plan.send.to(rows.device)
    counts = list(plan.send_counts), list(plan.request.counts)
    name = _name(group, plan.layout.world)
    return torch.ops.dilated_attention.exchange_transposed(rows, send, *counts, plan.local_rows, name)


def _name(group: dist.ProcessGroup | None, world: int) -> str:
    if world == 1:
        return ""
    members = dist.group.WORLD if group is None else group
    assert members is not None
    return members.group_name


def _transport(name: str, world: int) -> GroupTransport:
    return GroupTransport(None if not name else _resolve_process_group(name), 0, world)  # pyrefly: ignore[bad-argument-type]


@torch.library.custom_op(
    "dilated_attention::exchange",
    mutates_args=(),
    schema="(Tensor rows, Tensor send, int[] send_counts, int[] receive_counts, str group) -> Tensor",
)
def _exchange(rows: Tensor, send: Tensor, send_counts: list[int], receive_counts: list[int], group: str) -> Tensor:
    moved = _transport(group, len(send_counts)).all_to_all([rows[send]], [tuple(send_counts)], [tuple(receive_counts)])
    return moved.wait()[0]


@torch.library.custom_op(
    "dilated_attention::exchange_transposed",
    mutates_args=(),
    schema="(Tensor rows, Tensor send, int[] send_counts, int[] receive_counts, int local_rows, str group) -> Tensor",
)
def _exchange_transposed(
    rows: Tensor, send: Tensor, send_counts: list[int], receive_counts: list[int], local_rows: int, group: str
) -> Tensor:
    returned = (
        _transport(group, len(send_counts)).all_to_all([rows], [tuple(receive_counts)], [tuple(send_counts)]).wait()[0]
    )
    return summed(returned, send, local_rows).to(rows.dtype)


def summed(returned: Tensor, send: Tensor, local_rows: int) -> Tensor:
    """What came back, added up by row of the shard, in at least float32."""
    wide = torch.promote_types(returned.dtype, torch.float32)
    total = returned.new_zeros(local_rows, returned.shape[1], dtype=wide)
    return total.index_add_(0, send.to(returned.device), returned.to(wide))


@_exchange.register_fake
def _(rows: Tensor, send: Tensor, send_counts: list[int], receive_counts: list[int], group: str) -> Tensor:
    return rows.new_empty(sum(receive_counts), rows.shape[1])


@_exchange_transposed.register_fake
def _(
    rows: Tensor, send: Tensor, send_counts: list[int], receive_counts: list[int], local_rows: int, group: str
) -> Tensor:
    return rows.new_empty(local_rows, rows.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, send, *rest = inputs
    ctx.save_for_backward(send)
    ctx.rest, ctx.local_rows = rest, len(rows)


def _exchange_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (send,), (out, into, group) = ctx.saved_tensors, ctx.rest
    back = torch.ops.dilated_attention.exchange_transposed(grad, send, out, into, ctx.local_rows, group)
    return back, *(None,) * 4


def _exchange_transposed_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (send,), (out, into, _, group) = ctx.saved_tensors, ctx.rest
    return torch.ops.dilated_attention.exchange(grad, send, out, into, group), *(None,) * 5


_exchange.register_autograd(_exchange_backward, setup_context=_keep)
_exchange_transposed.register_autograd(_exchange_transposed_backward, setup_context=_keep)


class Agreement(NamedTuple):
    """What the ranks found when they compared notes."""

    prepared: bool
    """Whether every rank still has the plan."""
    seed: int
    """The first rank's seed for dropout."""


def same_everywhere(
    problem: str,
    failure: Exception | None,
    prepared: bool,
    seed: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Agreement:
    """Compare the problem over the ranks before anything is exchanged; raise on all of them where one differs.

    Args:
        problem: what this rank is about to compute; must be the same text on every rank.
        failure: what is wrong with this rank's input, if anything; the other ranks then raise too.
        prepared: whether this rank still has the plan of this problem.
        seed: where this rank would start dropout.
        group: who compares.
        device: where the group's backend wants its tensors.
    """
    digest = int.from_bytes(sha256(problem.encode()).digest()[:7], "big")
    mine = torch.tensor([failure is None, prepared, digest, seed], dtype=torch.int64, device=device)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(table, mine, group=group)
    facts = torch.stack(table).cpu()
    if bool(facts[:, 0].all()) and bool((facts[:, 2] == digest).all()):
        return Agreement(bool(facts[:, 1].all()), int(facts[0, 3]))
    told: list[Any] = [None] * len(table)
    dist.all_gather_object(told, problem if failure is None else f"failed: {failure}", group=group)
    if failure is not None:
        raise failure
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(told))
    raise must("every rank must make the same call on its shard of one sequence", f"\n{lines}")
