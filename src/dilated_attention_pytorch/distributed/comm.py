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

from ..errors import must
from .shard import SequenceLayout


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

    @property
    def share_of_ring(self) -> float:
        return self.bytes_received / self.ring_bytes if self.ring_bytes else 0.0


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """Rows a rank needs and does not hold."""

    codes: Tensor
    """int64, ordered by holder, then by code"""
    counts: tuple[int, ...]
    """Rows wanted from each rank."""


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

    @property
    def local_rows(self) -> int:
        return self.key_heads * self.layout.lengths[self.rank]

    @property
    def fingerprint(self) -> str:
        """Equal for equal plans."""
        numbers = torch.cat([self.request.codes, self.send]).cpu().contiguous()
        facts = repr((self.rank, self.layout, self.key_heads, self.request.counts, self.send_counts))
        return sha256(facts.encode() + bytes(numbers.view(torch.uint8).tolist())).hexdigest()[:16]

    def report(self, row_bytes: int) -> Traffic:
        """Rows and bytes, when a row of K and its row of V take `row_bytes` together."""
        received, sent = len(self.request.codes), len(self.send)
        remote = self.key_heads * self.layout.n - self.local_rows
        peers = sum(count > 0 for count in self.request.counts)
        return Traffic(received, sent, received * row_bytes, sent * row_bytes, peers, remote * row_bytes)

    def place(self, codes: Tensor) -> Tensor:
        """Where each row lies in [own rows, received rows, one row of filler]; codes of -1 are filler."""
        token, head = codes % self.layout.n, codes // self.layout.n
        holder, place = self.layout.locate(token)
        order = self.layout.key_order(self.request.codes, self.key_heads)
        received = torch.searchsorted(order, self.layout.key_order(codes.clamp(min=0), self.key_heads))
        found = torch.where(
            holder == self.rank, head * self.layout.lengths[self.rank] + place, self.local_rows + received
        )
        return torch.where(codes < 0, self.local_rows + len(self.request.codes), found)


def request_for(codes: Tensor, layout: SequenceLayout, rank: int, key_heads: int) -> Request:
    """What the rank must ask for to have the rows `codes` (any shape, repetitions and -1 for none allowed)."""
    wanted = torch.unique(codes[codes >= 0])
    holder, _ = layout.locate(wanted % layout.n)
    wanted, holder = wanted[holder != rank], holder[holder != rank]
    order = torch.argsort(layout.key_order(wanted, key_heads))
    counts = torch.bincount(holder, minlength=layout.world)
    return Request(wanted[order], tuple(counts.tolist()))


def agree(
    request: Request,
    layout: SequenceLayout,
    rank: int,
    key_heads: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> ExchangePlan:
    """Tell the holders what is wanted, learn what others want. Collective over the group."""
    if layout.world == 1:
        return _answer(request, [request.codes[:0]], layout, rank, key_heads)
    mine = torch.tensor(request.counts, device=device)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    counts = theirs.tolist()
    asked = torch.empty(sum(counts), dtype=torch.int64, device=device)
    dist.all_to_all_single(asked, request.codes.to(device), counts, list(request.counts), group=group)
    return _answer(request, list(asked.cpu().split(counts)), layout, rank, key_heads)


def agree_virtually(requests: list[Request], layout: SequenceLayout, key_heads: int) -> list[ExchangePlan]:
    """The plans of all ranks, made in one process."""
    asked = [request.codes.split(request.counts) for request in requests]
    return [
        _answer(request, [from_rank[rank] for from_rank in asked], layout, rank, key_heads)
        for rank, request in enumerate(requests)
    ]


def _answer(request: Request, asked: list[Tensor], layout: SequenceLayout, rank: int, key_heads: int) -> ExchangePlan:
    codes = torch.cat(asked)
    holder, place = layout.locate(codes % layout.n)
    assert bool((holder == rank).all()), "asked for rows of another rank"
    send = codes // layout.n * layout.lengths[rank] + place
    return ExchangePlan(rank, layout, key_heads, request, send, tuple(map(len, asked)))


def exchange(rows: Tensor, plan: ExchangePlan, group: dist.ProcessGroup | None) -> Tensor:
    """The rows a rank asked for, from the (local rows, width) shards of the others. Collective, twice differentiable.

    Going backward, gradients of received rows return to their holder, which adds them up in at least float32.
    """
    return _Fetch.apply(rows, plan, group)


def exchange_pair(key: Tensor, value: Tensor, plan: ExchangePlan, group: dist.ProcessGroup | None) -> Tensor:
    """`exchange` of rows of K and V side by side, (rows, B * (D + E)), from (B, G, n, D) and (B, G, n, E) shards."""
    return _FetchPair.apply(key, value, plan, group)


def exchange_transposed(rows: Tensor, plan: ExchangePlan, group: dist.ProcessGroup | None) -> Tensor:
    """The adjoint of `exchange`: received rows go back to their holder and are added up there."""
    return _Return.apply(rows, plan, group)


def pack(key: Tensor, value: Tensor) -> Tensor:
    """All rows of K and V side by side, (key heads * tokens, batch * (D + E)); differentiable."""
    return torch.cat([key, value], -1).permute(1, 2, 0, 3).flatten(0, 1).flatten(1)


def exchange_virtually(shards: list[Tensor], plans: list[ExchangePlan]) -> list[Tensor]:
    """`exchange` for all ranks in one process."""
    kind = shards[0].dtype
    # Widening on the way makes autograd add up what comes back in float32, as holders do.
    wide = torch.promote_types(kind, torch.float32) if kind.is_floating_point else kind
    sent = [shard.to(wide)[plan.send].split(plan.send_counts) for shard, plan in zip(shards, plans, strict=True)]
    return [torch.cat([from_rank[rank] for from_rank in sent]).to(kind) for rank in range(len(plans))]


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: ExchangePlan, group: dist.ProcessGroup | None) -> Tensor:
        ctx.plan, ctx.group = plan, group
        return _moved(rows[plan.send.to(rows.device)], plan, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        return exchange_transposed(grad, ctx.plan, ctx.group), None, None


class _FetchPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, plan: ExchangePlan, group: dist.ProcessGroup | None) -> Tensor:
        ctx.plan, ctx.group, ctx.widths = plan, group, (key.shape[3], value.shape[3])
        local = max(key.shape[2], 1)
        head, place = (index.to(key.device) for index in (plan.send // local, plan.send % local))
        sent = torch.cat([key[:, head, place], value[:, head, place]], -1).transpose(0, 1).flatten(1)
        return _moved(sent, plan, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyrefly: ignore[bad-override]
        width = sum(ctx.widths)
        rows = exchange_transposed(grad, ctx.plan, ctx.group).unflatten(1, (grad.shape[1] // width, width))
        both = rows.unflatten(0, (ctx.plan.key_heads, -1 if len(rows) else 0)).permute(2, 0, 1, 3)
        grad_key, grad_value = both.split(ctx.widths, -1)
        return grad_key, grad_value, None, None


def _moved(sent: Tensor, plan: ExchangePlan, group: dist.ProcessGroup | None) -> Tensor:
    """What a rank receives when each sends its rows, ordered by who asked for them."""
    received = sent.new_empty(len(plan.request.codes), sent.shape[1])
    if plan.layout.world > 1:
        dist.all_to_all_single(received, sent, list(plan.request.counts), list(plan.send_counts), group=group)
    return received


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: ExchangePlan, group: dist.ProcessGroup | None) -> Tensor:
        ctx.plan, ctx.group = plan, group
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros(plan.local_rows, rows.shape[1], dtype=wide)
        if plan.layout.world > 1:
            returned = rows.new_empty(len(plan.send), rows.shape[1])
            dist.all_to_all_single(
                returned, rows.contiguous(), list(plan.send_counts), list(plan.request.counts), group=group
            )
            total.index_add_(0, plan.send.to(rows.device), returned.to(wide))
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        return exchange(grad, ctx.plan, ctx.group), None, None


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


def check_group(group: dist.ProcessGroup | None, world: int) -> None:
    """A layout must have as many ranks as the group has members."""
    members = dist.get_world_size(group)
    if members != world:
        raise must(f"a layout of {world} ranks must meet a process group of {world} members", members)


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's backend wants the integers it carries."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def same_everywhere(
    problem: str,
    failure: Exception | None,
    prepared: bool,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> bool:
    """Compare the problem over the ranks before anything is exchanged; raise on all of them where one differs.

    Args:
        problem: what this rank is about to compute; must be the same text on every rank.
        failure: what is wrong with this rank's input, if anything; the other ranks then raise too.
        prepared: whether this rank still has the plan of this problem.
        group: who compares.
        device: where the group's backend wants its tensors.

    Returns:
        Whether every rank still has the plan.
    """
    digest = int.from_bytes(sha256(problem.encode()).digest()[:7], "big")
    mine = torch.tensor([failure is None, prepared, digest], dtype=torch.int64, device=device)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(table, mine, group=group)
    facts = torch.stack(table).cpu()
    if bool(facts[:, 0].all()) and bool((facts[:, 2] == digest).all()):
        return bool(facts[:, 1].all())
    told: list[Any] = [None] * len(table)
    dist.all_gather_object(told, problem if failure is None else f"failed: {failure}", group=group)
    if failure is not None:
        raise failure
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(told))
    raise must("every rank must make the same call on its shard of one sequence", f"\n{lines}")
