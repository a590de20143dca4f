"""Exchange of rows of K and V between ranks: plans, the exchange itself and its adjoint.

A *row* is one token of one key head, over the whole batch. Its code is `key head * n + token`; in the shard of a rank
with `m` tokens it is row `key head * m + place`.

gloo raises no error when two ranks disagree on an exchange; it leaves rows unwritten. A rank therefore sends the rows
that others requested from it, and all ranks compare their calls first.
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
from .layout import SequenceLayout
from .local_attention import RowGradients, Shard
from .transport import GroupTransport, Pending, Transport, error_text, gathered, group_name, on_every_rank, together


class Traffic(NamedTuple):
    """Rows and bytes of one exchange through one rank, in the forward pass.

    The backward pass returns the same bytes by a direct exchange in one stage. A butterfly and a ring carry gradients
    in at least float32: twice the bytes for bfloat16. Stages fetch their rows once more in the backward pass.
    """

    rows_received: int
    rows_sent: int
    bytes_received: int
    bytes_sent: int
    peers: int
    """Number of ranks that send rows to it."""
    ring_bytes: int
    """Bytes that a ring or an all-gather would receive."""
    messages: int
    """Messages received: one a peer, or those of the rounds of a butterfly."""
    bytes_between_nodes: int
    """Bytes received from other nodes."""

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
    """Rows that a rank needs from others."""

    codes: Tensor
    """int64, ordered by holder, then by code"""
    counts: tuple[int, ...]
    """Rows requested from each rank."""


@dataclass(frozen=True, eq=False, slots=True)
class ButterflyRound:
    """One round of a butterfly: equal numbers of rows to and from each of a few partners."""

    send: dict[int, Tensor]
    """int64, by partner: places in [rows of the shard, received rows]"""
    receive: dict[int, Tensor]
    """int64, by partner: indices of the rows that arrive among all received rows"""


@dataclass(frozen=True, eq=False, slots=True)
class ExchangePlan:
    """Rows that one rank sends and receives."""

    rank: int
    layout: SequenceLayout
    key_heads: int
    request: Request
    """Received rows, in this order."""
    send: Tensor
    """int64: rows of the shard, ordered by receiver"""
    send_counts: tuple[int, ...]
    rounds: tuple[ButterflyRound, ...] | None = None
    """Rounds of a butterfly; None for a direct exchange, from every holder to every receiver."""

    @property
    def local_rows(self) -> int:
        return self.key_heads * self.layout.lengths[self.rank]

    def report(self, row_bytes: int, ranks_per_node: int = 1) -> Traffic:
        """Rows and bytes, for `row_bytes` of a row of K and its row of V together."""
        received, sent = len(self.request.codes), len(self.send)
        messages = list(enumerate(self.request.counts))
        if self.rounds is not None:
            messages = [(peer, len(rows)) for one in self.rounds for peer, rows in one.receive.items()]
            sent = sum(len(rows) for one in self.rounds for rows in one.send.values())
        messages = [(peer, rows) for peer, rows in messages if rows]
        node = self.rank // ranks_per_node
        return Traffic(
            rows_received=received,
            rows_sent=sent,
            bytes_received=received * row_bytes,
            bytes_sent=sent * row_bytes,
            peers=len({peer for peer, _ in messages}),
            ring_bytes=(self.key_heads * self.layout.n - self.local_rows) * row_bytes,
            messages=len(messages),
            bytes_between_nodes=row_bytes * sum(rows for peer, rows in messages if peer // ranks_per_node != node),
        )

    def place(self, codes: Tensor) -> Tensor:
        """Place of each row in [own rows, received rows]."""
        token, head = codes % self.layout.n, codes // self.layout.n
        holder, place = self.layout.locate(token)
        own = head * self.layout.lengths[self.rank] + place
        return torch.where(holder == self.rank, own, self.local_rows + self.received(codes))

    def received(self, codes: Tensor) -> Tensor:
        """Index of each row among the received rows."""
        order = self.layout.key_order(self.request.codes, self.key_heads)
        return torch.searchsorted(order, self.layout.key_order(codes, self.key_heads))


def request_for(codes: Tensor, layout: SequenceLayout, rank: int, key_heads: int) -> Request:
    """Request of a rank for the rows `codes` (any shape, with repetitions and -1 for no row) that it does not hold."""
    wanted = torch.unique(codes[codes >= 0])
    holder, _ = layout.locate(wanted % layout.n)
    wanted, holder = wanted[holder != rank], holder[holder != rank]
    order = torch.argsort(layout.key_order(wanted, key_heads))
    counts = torch.bincount(holder, minlength=layout.world)
    return Request(wanted[order], tuple(counts.tolist()))


def plan_exchange(
    requests: list[Request], layout: SequenceLayout, key_heads: int, transport: Transport
) -> list[ExchangePlan]:
    """Exchange plans of the ranks of this process from the requests of all ranks. Collective."""
    counts = [torch.tensor(request.counts, device=transport.wire)[:, None] for request in requests]
    each = [(1,) * layout.world] * len(requests)
    requested = [tuple(rows[:, 0].tolist()) for rows in transport.all_to_all(counts, each, each).wait()]
    codes = [request.codes.to(transport.wire)[:, None] for request in requests]
    wanted = transport.all_to_all(codes, [request.counts for request in requests], requested).wait()
    with together(transport):
        plans = [
            _plan(request, rows[:, 0].cpu(), many, layout, rank, key_heads)
            for rank, request, rows, many in zip(transport.ranks, requests, wanted, requested, strict=True)
        ]
    return plans


def _plan(
    request: Request, codes: Tensor, counts: tuple[int, ...], layout: SequenceLayout, rank: int, key_heads: int
) -> ExchangePlan:
    holder, place = layout.locate(codes % layout.n)
    assert bool((holder == rank).all()), "request for rows of another rank"
    send = codes // layout.n * layout.lengths[rank] + place
    return ExchangePlan(rank, layout, key_heads, request, send, counts)


def exchange(rows: Tensor, plan: ExchangePlan, group: dist.ProcessGroup | None) -> Tensor:
    """Requested rows from the (local rows, width) shards of other ranks. Collective, twice differentiable.

    The backward pass returns gradients of received rows to their holder, which sums them in at least float32.
    """
    send = plan.send.to(rows.device)
    counts = list(plan.send_counts), list(plan.request.counts)
    return torch.ops.dilated_attention.exchange(rows, send, *counts, group_name(group))


def _transport(name: str) -> GroupTransport:
    return GroupTransport(_resolve_process_group(name), 0)  # pyrefly: ignore[bad-argument-type]


@torch.library.custom_op(
    "dilated_attention::exchange",
    mutates_args=(),
    schema="(Tensor rows, Tensor send, int[] send_counts, int[] receive_counts, str group) -> Tensor",
)
def _exchange(rows: Tensor, send: Tensor, send_counts: list[int], receive_counts: list[int], group: str) -> Tensor:
    moved = _transport(group).all_to_all([rows[send]], [tuple(send_counts)], [tuple(receive_counts)])
    return moved.wait()[0]


@torch.library.custom_op(
    "dilated_attention::exchange_transposed",
    mutates_args=(),
    schema="(Tensor rows, Tensor send, int[] send_counts, int[] receive_counts, int local_rows, str group) -> Tensor",
)
def _exchange_transposed(
    rows: Tensor, send: Tensor, send_counts: list[int], receive_counts: list[int], local_rows: int, group: str
) -> Tensor:
    returned = _transport(group).all_to_all([rows], [tuple(receive_counts)], [tuple(send_counts)]).wait()[0]
    return summed(returned, send, local_rows).to(rows.dtype)


def summed(returned: Tensor, send: Tensor, local_rows: int) -> Tensor:
    """Returned rows summed by row of the shard, in at least float32."""
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


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
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


_exchange.register_autograd(_exchange_backward, setup_context=_save)
_exchange_transposed.register_autograd(_exchange_transposed_backward, setup_context=_save)


class Agreement(NamedTuple):
    """Outcome of comparing a call over the ranks."""

    cached: bool
    """Whether every rank has the schedule in its cache."""
    seed: int
    """Dropout seed of the first rank."""


def compare_calls(
    call: str,
    failure: Exception | None,
    cached: bool,
    seed: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Agreement:
    """Compare a call over the ranks before anything is exchanged; raise on all ranks if one differs. Collective.

    Args:
        call: description of this rank's call; must be the same text on every rank.
        failure: error in this rank's arguments, if any; the other ranks then raise as well.
        cached: whether this rank has the schedule of the call in its cache.
        seed: dropout seed of this rank.
        group: ranks that compare.
        device: device of tensors that the group's backend carries.
    """
    digest = int.from_bytes(sha256(call.encode()).digest()[:7], "big")
    mine = torch.tensor([failure is None, cached, digest, seed], dtype=torch.int64, device=device)
    facts = torch.stack(gathered(mine, group)).cpu()
    if bool(facts[:, 0].all()) and bool((facts[:, 2] == digest).all()):
        return Agreement(bool(facts[:, 1].all()), int(facts[0, 3]))
    texts: list[Any] = [None] * len(facts)
    dist.all_gather_object(texts, call if failure is None else f"failed with {error_text(failure)}", group=group)
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
    differs = must("every rank must make the same call on its shard of one sequence", f"\n{lines}")
    raise on_every_rank(failure or differs, group)


def flatten_rows(x: Tensor) -> Tensor:
    """(heads * n, B * W) of (B, heads, n, W)."""
    return x.permute(1, 2, 0, 3).flatten(0, 1).flatten(1)


class RowSource:
    """Rows of (B, heads, n, W) tensors, side by side."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors, self.device = tensors, tensors[0].device
        self.width = sum(len(x) * x.shape[3] for x in tensors)
        self.dtype = tensors[0].dtype

    def rows(self, at: Tensor) -> Tensor:
        """(rows, B * W)"""
        n = max(self.tensors[0].shape[2], 1)
        picked = [x[:, at // n, at % n] for x in self.tensors]
        return torch.cat(picked, -1).transpose(0, 1).flatten(1)


class PaddingRows(RowSource):
    """Padding of the rows of a shard, uint8."""

    def __init__(self, shard: Shard) -> None:
        assert shard.padding is not None
        super().__init__(shard.padding[:, None, :, None].to(torch.uint8).expand(-1, shard.key.shape[1], -1, -1))


class QueryRows(RowSource):
    """Rows of Q for the backward pass: the query, the gradient of its output, its LSE and minus its delta."""

    def __init__(self, shard: Shard, given: RowGradients) -> None:
        wide = given.lse.dtype
        delta = (given.grad_output.to(wide) * given.output.to(wide)).sum(-1)
        delta = -delta if given.grad_lse is None else given.grad_lse.to(wide) - delta
        parts = [shard.query.to(wide), given.grad_output.to(wide), given.lse[..., None], delta[..., None]]
        self.whole = torch.cat(parts, -1)
        super().__init__(self.whole)


def fetch(sources: list[RowSource], plans: list[ExchangePlan], transport: Transport) -> Pending[list[Tensor]]:
    """Requested rows of each rank of this process, in the order of its request. Collective."""
    rounds = [plan.rounds for plan in plans if plan.rounds is not None]
    if not rounds:
        sent = [source.rows(plan.send.to(source.device)) for source, plan in zip(sources, plans, strict=True)]
        return transport.all_to_all(sent, [p.send_counts for p in plans], [p.request.counts for p in plans])
    firsts = [_own_rows(plan, steps) for plan, steps in zip(plans, rounds, strict=True)]
    own = [source.rows(first.to(source.device)) for source, first in zip(sources, firsts, strict=True)]
    received = [rows.new_empty(len(plan.request.codes), rows.shape[1]) for rows, plan in zip(own, plans, strict=True)]
    for now in zip(*rounds, strict=True):
        outgoing = []
        for plan, one, first, mine, got in zip(plans, now, firsts, own, received, strict=True):
            messages = {}
            for peer, places in one.send.items():
                rows = mine.new_empty(len(places), mine.shape[1])
                here = places < plan.local_rows
                rows[here] = mine[torch.searchsorted(first, places[here]).to(mine.device)]
                rows[~here] = got[(places[~here] - plan.local_rows).to(mine.device)]
                messages[peer] = rows
            outgoing.append(messages)
        arrived = _swap(outgoing, [one.receive for one in now], transport)
        for one, got, messages in zip(now, received, arrived, strict=True):
            for peer, rows in messages.items():
                got[one.receive[peer].to(got.device)] = rows
    return Pending(lambda: received)


def return_gradients(rows: list[Tensor], plans: list[ExchangePlan], transport: Transport) -> Pending[list[Tensor]]:
    """Adjoint of `fetch`: rows return to their holders and are summed by row of the shard, in at least float32."""
    rounds = [plan.rounds for plan in plans if plan.rounds is not None]
    if not rounds:
        moving = transport.all_to_all(rows, [p.request.counts for p in plans], [p.send_counts for p in plans])
        return Pending(
            lambda: [
                summed(returned, plan.send, plan.local_rows)
                for returned, plan in zip(moving.wait(), plans, strict=True)
            ]
        )
    wide = torch.promote_types(rows[0].dtype, torch.float32)
    totals = [
        torch.cat([own.new_zeros(plan.local_rows, own.shape[1], dtype=wide), own.to(wide)])
        for own, plan in zip(rows, plans, strict=True)
    ]
    for now in reversed([*zip(*rounds, strict=True)]):
        outgoing = [
            {peer: total[(plan.local_rows + at).to(total.device)] for peer, at in one.receive.items()}
            for total, plan, one in zip(totals, plans, now, strict=True)
        ]
        arrived = _swap(outgoing, [one.send for one in now], transport)
        for total, one, messages in zip(totals, now, arrived, strict=True):
            for peer, some in messages.items():
                total.index_add_(0, one.send[peer].to(total.device), some)
    return Pending(lambda: [total[: plan.local_rows] for total, plan in zip(totals, plans, strict=True)])


def _swap(
    outgoing: list[dict[int, Tensor]], incoming: list[dict[int, Tensor]], transport: Transport
) -> list[dict[int, Tensor]]:
    """One round of a butterfly; `incoming` has a row index for every row that arrives."""
    if not any(map(len, outgoing)):
        return [{}] * len(outgoing)
    return transport.swap(outgoing, [{peer: len(rows) for peer, rows in one.items()} for one in incoming]).wait()


def _own_rows(plan: ExchangePlan, rounds: tuple[ButterflyRound, ...]) -> Tensor:
    """Rows of the shard that are sent in some round."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    places = torch.cat([none, *(rows for one in rounds for rows in one.send.values())])
    return torch.unique(places[places < plan.local_rows])
