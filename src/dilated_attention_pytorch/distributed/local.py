"""What one rank computes once the rows are here: some queries over buffers of its own and of fetched keys.

Results fold into the running softmax of the rows, so that the keys of a row may come in any number of goes. Gradients
need the LSE and output of the whole row only, and simply add up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.dropout import shifted
from ..kernels.registry import AttentionCall, choose
from ..plan import Axis, Plan
from .inside import InsidePlan
from .restrict import RankPlan
from .shard import SequenceLayout


class Settings(NamedTuple):
    """How scores become weights, and who computes."""

    scale: float
    backend: str
    dropout_p: float = 0.0
    seed: Tensor | None = None
    """int64 [1], the same on every rank"""


class Shard(NamedTuple):
    """The tensors of one rank."""

    query: Tensor
    """(B, H, n, D)"""
    key: Tensor
    """(B, G, n, D)"""
    value: Tensor
    """(B, G, n, E)"""
    padding: Tensor | None
    """bool (B, n)"""


class Fetched(NamedTuple):
    """Rows of other ranks."""

    rows: Tensor
    """(rows, B * (D + E)): K and V side by side"""
    padding: Tensor | None
    """uint8 (rows, B)"""
    which: Tensor
    """int64: the row that each place `RankPlan.far_at` of the key buffer takes"""


class Softmax(NamedTuple):
    """A softmax over the keys met so far, and its result, in the compute dtype."""

    output: Tensor
    """(B, H * n, E)"""
    lse: Tensor
    """(B, H * n)"""

    @staticmethod
    def start(query: Tensor, width: int) -> Softmax:
        dtype = torch.promote_types(query.dtype, torch.float32)
        batch, heads, n, _ = query.shape
        return Softmax(
            query.new_zeros(batch, heads * n, width, dtype=dtype),
            query.new_full((batch, heads * n), -torch.inf, dtype=dtype),
        )

    def fold_all(self, found: Tensor, found_lse: Tensor) -> None:
        """Take in the first keys of all rows, (B, H, n, E) and (B, H, n); nothing may have been folded before."""
        self.output.view(found.shape).copy_(found)
        self.lse.view(found_lse.shape).copy_(found_lse)

    def fold(self, place: Tensor, found: Tensor, found_lse: Tensor) -> None:
        """Take in more keys of the rows at `place`, none twice."""
        output, lse = self
        before = lse[:, place]
        top = torch.maximum(before, found_lse)
        top = torch.where(top == -torch.inf, 0.0, top)
        # torch.logaddexp rounds an element by where in memory it lies; a row's bits must not depend on that.
        old, added = (before - top).exp(), (found_lse - top).exp()
        total = old + added
        lse[:, place] = torch.where(total > 0, top + total.log(), -torch.inf)
        total = torch.where(total > 0, total, 1.0)
        output[:, place] = output[:, place] * (old / total)[..., None] + found * (added / total)[..., None]


class Totals(NamedTuple):
    """Gradients of one rank's tensors, in the compute dtype, rows counted over all heads."""

    query: Tensor
    key: Tensor
    value: Tensor

    @staticmethod
    def start(query: Tensor, key: Tensor, value: Tensor) -> Totals:
        return Totals(*(zeros_for(x) for x in (query, key, value)))


def zeros_for(x: Tensor) -> Tensor:
    """Where a gradient of x (B, heads, n, W) is summed."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros(len(x), x.shape[1] * x.shape[2], x.shape[3], dtype=dtype)


class Outcome(NamedTuple):
    """What backward knows of the rows: their result and what is asked of it, each (B, H, n, ...)."""

    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None


def attend(
    work: RankPlan | InsidePlan,
    query: Tensor,
    query_tokens: Tensor,
    shard: Shard,
    fetched: Fetched | None,
    layout: SequenceLayout,
    rank: int,
    settings: Settings,
    into: Softmax,
) -> None:
    """Fold what `work` lists into the softmax of the queries (B, H, m, D), which stand for `query_tokens`."""
    if not work.plan.parts:
        return
    if isinstance(work, InsidePlan):
        call = _call_inside(work, query, query_tokens, shard, settings)
        result = choose(call, settings.backend)[1].forward(call)
        into.fold_all(result.output, result.lse)
        return
    buffers = _Buffers(work, query, query_tokens, shard, fetched, layout, rank, settings)
    dtype = into.lse.dtype
    found = buffers.query.new_empty(*buffers.query.shape[:3], shard.value.shape[3])
    found_lse = buffers.query.new_empty(buffers.query.shape[:3], dtype=dtype)
    for entries, heads, call in buffers.calls():
        result = choose(call, settings.backend)[1].forward(call)
        found[entries, heads], found_lse[entries, heads] = result.output, result.lse
    for begin, end in work.spans:
        place, at = _places(work.query_rows[:, begin:end], query.shape[2])
        part = found[:, :, begin:end].flatten(1, 2)[:, at].to(dtype)
        into.fold(place, part, found_lse[:, :, begin:end].flatten(1)[:, at])


def differentiate(
    work: RankPlan | InsidePlan,
    query: Tensor,
    query_tokens: Tensor,
    shard: Shard,
    fetched: Fetched | None,
    layout: SequenceLayout,
    rank: int,
    settings: Settings,
    outcome: Outcome,
    into: Totals,
) -> Tensor | None:
    """Add the gradients of what `work` lists; those of the fetched rows are returned, in the dtype of the rows."""
    if isinstance(work, InsidePlan):
        if work.plan.parts:
            call = _call_inside(work, query, query_tokens, shard, settings)
            found = choose(call, settings.backend)[1].backward(call, *outcome)
            for total, grad in zip(into, found, strict=True):
                total.view(grad.shape).add_(grad)
        return None
    grad_fetched = None
    if fetched is not None:
        grad_fetched = fetched.rows.new_zeros(fetched.rows.shape, dtype=into.query.dtype)
    if work.plan.parts:
        buffers = _Buffers(work, query, query_tokens, shard, fetched, layout, rank, settings)
        # Filler rows have zeros for query and gradient and a finite LSE: they add nothing to any key.
        output, grad_output = (_gather(x, work.query_rows) for x in (outcome.output, outcome.grad_output))
        lse = _gather(outcome.lse[..., None], work.query_rows)[..., 0]
        grad_lse = None if outcome.grad_lse is None else _gather(outcome.grad_lse[..., None], work.query_rows)[..., 0]
        grads = tuple(x.new_zeros(x.shape, dtype=into.query.dtype) for x in (buffers.query, buffers.key, buffers.value))
        shared = query.shape[1] // shard.key.shape[1]
        for entries, heads, call in buffers.calls():
            groups = slice(heads.start // shared, heads.stop // shared)
            found = choose(call, settings.backend)[1].backward(
                call,
                output[entries, heads],
                lse[entries, heads],
                grad_output[entries, heads],
                None if grad_lse is None else grad_lse[entries, heads],
            )
            for grad, one, those in zip(grads, found, (heads, groups, groups), strict=True):
                grad[entries, those] += one
        place, at = _places(work.query_rows, query.shape[2])
        into.query.index_add_(1, place, grads[0].flatten(1, 2)[:, at])
        place, at = _places(work.key_rows, shard.key.shape[2])
        for total, grad in zip(into[1:], grads[1:], strict=True):
            total.index_add_(1, place, grad.flatten(1, 2)[:, at])
        if fetched is not None and grad_fetched is not None:
            both = torch.cat([grad.flatten(1, 2)[:, work.far_at] for grad in grads[1:]], -1)
            grad_fetched.index_add_(0, fetched.which, both.transpose(0, 1).flatten(1))
    return None if fetched is None or grad_fetched is None else grad_fetched.to(fetched.rows.dtype)


def _call_inside(
    work: InsidePlan, query: Tensor, query_tokens: Tensor, shard: Shard, settings: Settings
) -> AttentionCall:
    """The call on the shard itself."""
    positions = None
    if settings.dropout_p:
        positions = query_tokens.expand(2, query.shape[1], -1).contiguous()
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, shard.key, shard.value))
    scale, _, dropout_p, seed = settings
    padding = shard.padding
    return AttentionCall(query, key, value, work.plan, scale, padding, dropout_p, seed, positions=positions)


class _Buffers:
    """Queries, and the keys and values they see, laid out as a rank's plan wants them."""

    def __init__(
        self,
        work: RankPlan,
        query: Tensor,
        query_tokens: Tensor,
        shard: Shard,
        fetched: Fetched | None,
        layout: SequenceLayout,
        rank: int,
        settings: Settings,
    ) -> None:
        self.plan, self.settings = work.plan, settings
        batch, key_heads = len(query), shard.key.shape[1]
        self.query = _gather(query, work.query_rows)
        self.key, self.value = (_gather(x, work.key_rows) for x in (shard.key, shard.value))
        if fetched is not None:
            widths = self.key.shape[3], self.value.shape[3]
            rows = fetched.rows.unflatten(1, (-1, sum(widths)))[fetched.which].transpose(0, 1).split(widths, -1)
            for buffer, some in zip((self.key, self.value), rows, strict=True):
                buffer.view(batch, -1, some.shape[-1])[:, work.far_at] = some
        self.padding = None
        if shard.padding is not None:
            own = shard.padding.T[None, None].expand(1, key_heads, -1, -1)
            mask = _gather(own.to(torch.uint8), work.key_rows)[0]
            if fetched is not None and fetched.padding is not None:
                mask.view(-1, batch)[work.far_at] = fetched.padding[fetched.which]
            self.padding = mask.bool()
            """(G, n, B): rows of the buffer are other tokens for each key head, so each has its own padding"""
        self.positions = None
        if settings.dropout_p:
            codes = work.key_codes(layout, rank)
            keys = (codes.clamp(min=0) % layout.n).repeat_interleave(query.shape[1] // key_heads, 0)
            tokens = query_tokens[work.query_rows.clamp(min=0).long()] if len(query_tokens) else torch.zeros_like(keys)
            self.positions = torch.stack([tokens, keys])

    def calls(self) -> list[tuple[slice, slice, AttentionCall]]:
        """What to compute, and for which entries of the batch and which query heads."""
        batch, heads, key_heads = len(self.query), self.query.shape[1], self.key.shape[1]
        scale, _, dropout_p, seed = self.settings
        if self.padding is None:
            call = AttentionCall(
                self.query, self.key, self.value, self.plan, scale, None, dropout_p, seed, positions=self.positions
            )
            return [(slice(0, batch), slice(0, heads), call)]
        shared = heads // key_heads
        # The stream of random numbers follows from batch entry and head; a call without the first ones skips theirs.
        entries = [slice(i, i + 1) for i in range(batch)] if dropout_p else [slice(0, batch)]
        found = []
        for some in entries:
            for group in range(key_heads):
                mine = slice(group * shared, (group + 1) * shared)
                call = AttentionCall(
                    self.query[some, mine],
                    self.key[some, group : group + 1],
                    self.value[some, group : group + 1],
                    _heads(self.plan, mine),
                    scale,
                    self.padding[group].T[some].contiguous(),
                    dropout_p,
                    None if seed is None else shifted(seed, some.start * heads + mine.start),
                    positions=None if self.positions is None else self.positions[:, mine],
                )
                found.append((some, mine, call))
        return found


def _heads(plan: Plan, mine: slice) -> Plan:
    """The plan of some of the heads."""

    def axis(whole: Axis) -> Axis:
        return replace(whole, offset=whole.offset[mine])

    parts = tuple(
        replace(part, queries=axis(part.queries), keys=axis(part.keys), head_class=part.head_class[mine])
        for part in plan.parts
    )
    return replace(plan, heads=mine.stop - mine.start, parts=parts)


def _places(rows: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Of the real rows of a buffer, (heads, rows): their place among heads * n, and in the flat buffer."""
    at = (rows.flatten() >= 0).nonzero()[:, 0]
    return at // max(rows.shape[1], 1) * n + rows.flatten()[at], at


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """x (B, H, n, W) at rows (H, N), 0 where they are -1: (B, H, N, W)."""
    if not x.shape[2]:
        return x.new_zeros(*x.shape[:2], rows.shape[1], x.shape[3])
    head = torch.arange(len(rows), device=rows.device)[:, None]
    return x[:, head, rows.clamp(min=0).long()].masked_fill_((rows < 0)[None, :, :, None], 0)
