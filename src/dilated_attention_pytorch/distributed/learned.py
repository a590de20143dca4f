"""Attention over selected blocks of a sequence spread over ranks: each rank selects blocks for its own rows.

A rank concatenates the blocks that its rows see, its own included, requests the missing rows from their holders, and
attends on that shorter sequence as one device does. Attention mass of blocks is measured by the holders of the keys and
summed over ranks.

Shapes: b batch, h heads, g key heads, n tokens here, r rows here (query blocks, or tokens), t blocks of the sequence,
k listed blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.derivatives import once_differentiable
from ..selection.attention import selected_attention
from ..selection.backend import distill_inputs
from ..selection.distill import (
    DistillInputs,
    RowComparison,
    captured,
    compare_rows,
    listed_mass,
    query_weights,
    row_factors,
    row_weights,
    summed_by_list,
)
from ..selection.types import DistillBatch, Selection, shared_blocks
from .exchange import ExchangePlan, exchange, flatten_rows, plan_exchange, request_for
from .layout import SequenceLayout
from .transport import GroupTransport, completed_together, gathered

STEP = 2**22
"""Most scores of dense rows in memory at a time."""


@dataclass(frozen=True, eq=False, slots=True)
class Choice:
    """Blocks selected by the rows of one rank."""

    layout: SequenceLayout
    rank: int
    group: dist.ProcessGroup | None
    rows: Tensor
    """int64 (r): the rows, ascending, numbered over the whole sequence"""
    indices: Tensor
    """int32 (b, h, r, k): selected blocks, as in `Selection`"""
    block_size: int
    is_causal: bool
    per_token: bool
    local_blocks: int
    sink_blocks: int

    @property
    def blocks(self) -> int:
        return -(-self.layout.n // self.block_size)

    @property
    def own(self) -> Tensor:
        """Block of each row, int64 (r)."""
        return self.rows // self.block_size if self.per_token else self.rows

    def forced(self) -> Tensor:
        """Blocks that each row sees without selecting them, except its own, int64 (r, most), padded with t."""
        t = self.blocks
        # Computed once a block, since a row for every token of all blocks would be far too much.
        own, which = torch.unique(self.own, return_inverse=True)
        shared = shared_blocks(own, t, self.local_blocks, self.sink_blocks, self.is_causal)
        column = torch.arange(t, device=own.device)
        shared &= column != own[:, None]
        most = int(shared.sum(1).max()) if len(own) else 0
        return column.expand_as(shared).masked_fill(~shared, t).sort(1).values[:, :most][which]

    def seen(self) -> Tensor:
        """Blocks that each row sees except its own, int64 (b, h, r, k + forced), ascending, padded with t."""
        forced = self.forced().expand(*self.indices.shape[:2], -1, -1)
        return torch.cat([self.indices.long(), forced], -1).sort(-1).values


class SelectedBlocks(NamedTuple):
    """The blocks that the rows of one rank see, concatenated."""

    blocks: Tensor
    """int64: the blocks, ascending"""
    number: Tensor
    """int64 (t + 1): index of each block among them; one past the last for other blocks and for t"""
    tokens: Tensor
    """int64 (n'): their tokens"""
    place: Tensor
    """int64 (n): place of the rank's own tokens among them"""
    source: Tensor
    """int64 (g, n'): place of each token's K and V in [own rows, received rows, zeros]"""
    exchange: ExchangePlan


def select_blocks(choice: Choice, seen: Tensor, key_heads: int) -> SelectedBlocks:
    """Blocks of one rank and the plan of their exchange. Collective."""
    layout, size, t = choice.layout, choice.block_size, choice.blocks
    shared = seen.shape[1] // key_heads
    wanted = torch.zeros(key_heads, t + 1, dtype=torch.bool, device="cpu")
    each = seen.cpu().unflatten(1, (key_heads, shared)).transpose(0, 1).flatten(1)
    wanted.scatter_(1, each, True)
    positions = layout.positions(choice.rank)
    wanted[:, torch.unique(positions // size)] = True
    wanted = wanted[:, :t]
    blocks = wanted.any(0).nonzero()[:, 0]
    order = torch.arange(len(blocks), device="cpu")
    number = torch.full((t + 1,), len(blocks), device="cpu").scatter_(0, blocks, order)
    tokens = (blocks[:, None] * size + torch.arange(size, device="cpu")).flatten()
    tokens = tokens[tokens < layout.n]
    codes = torch.arange(key_heads, device="cpu")[:, None] * layout.n + tokens
    needed = wanted[:, tokens // size]
    codes = torch.where(needed, codes, -1)
    request = request_for(codes, layout, choice.rank, key_heads)
    (plan,) = plan_exchange([request], layout, key_heads, GroupTransport(choice.group, choice.rank))
    nothing = plan.local_rows + len(request.codes)
    source = torch.where(needed, plan.place(codes.clamp(min=0)), nothing)
    return SelectedBlocks(blocks, number, tokens, torch.searchsorted(tokens, positions), source, plan)


class Attended(NamedTuple):
    """Attention of a rank's rows."""

    output: Tensor
    """(b, h, n, e)"""
    lse: Tensor
    """(b, h, n)"""
    inputs: DistillInputs
    """The shorter sequence, without gradients."""
    inputs_lse: Tensor
    """(b, h, n'): LSE of its rows; undefined for rows of other ranks"""
    number: Tensor
    """See `SelectedBlocks`, as `place`."""
    place: Tensor


def attend_chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    choice: Choice,
    *,
    scale: float,
    padding: Tensor | None = None,
    backend: str = "auto",
) -> Attended:
    """Exact attention of a rank's rows over what they chose, differentiable in query, key and value. Collective.

    Args:
        query: (b, h, n, d), the rank's tokens.
        key: (b, g, n, d).
        value: (b, g, n, e).
        choice: blocks that its rows see.
        scale: factor on the scores.
        padding: bool (b, N), True where a key of the whole sequence takes no part.
        backend: "auto" or a name from `backends()`.
    """
    seen = choice.seen()
    part = select_blocks(choice, seen, key.shape[1])
    rows = flatten_rows(torch.cat([key, value], -1))
    far = exchange(rows, part.exchange, choice.group)
    attended: list[Attended] = []
    with completed_together(GroupTransport(choice.group, choice.rank)) as local:
        local.run(
            lambda: attended.append(_attend(query, key, value, choice, seen, part, rows, far, scale, padding, backend)),
            lambda: None,
        )
    return attended[0]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    choice: Choice,
    seen: Tensor,
    part: SelectedBlocks,
    rows: Tensor,
    far: Tensor,
    scale: float,
    padding: Tensor | None,
    backend: str,
) -> Attended:
    """Attention on the selected blocks, from own rows and received ones."""
    device, heads = query.device, query.shape[1]
    place, number = part.place.to(device), part.number.to(device)
    held = torch.cat([rows, far, rows.new_zeros(1, rows.shape[1])]).index_select(0, part.source.flatten().to(device))
    held = held.view(key.shape[1], -1, len(query), key.shape[3] + value.shape[3]).permute(2, 0, 1, 3)
    keys, values = held.split([key.shape[3], value.shape[3]], -1)
    queries = query.new_zeros(*query.shape[:2], len(part.tokens), query.shape[3]).index_copy(2, place, query)
    mine = place if choice.per_token else number[choice.rows]
    count = len(part.tokens) if choice.per_token else len(part.blocks)
    listed = torch.full((len(query), heads, count, seen.shape[-1]), len(part.blocks), dtype=torch.int32, device=device)
    listed[:, :, mine] = number[seen].sort(-1).values.int()
    counts = (listed < len(part.blocks)).sum(-1, dtype=torch.int32)
    shape = (len(part.tokens), choice.block_size, choice.is_causal, choice.per_token)
    selection = Selection(listed[..., : int(counts.max()) if counts.numel() else 0], counts, *shape, 1, 0)
    masked = None if padding is None else padding[:, part.tokens.to(device)]
    if len(part.tokens):
        settings = {"scale": scale, "enable_gqa": True, "key_padding_mask": masked, "backend": backend}
        output, lse = selected_attention(queries, keys, values, selection, return_lse=True, **settings)
    else:
        # No rows here; those of others still need the backward pass of the exchange.
        lse = queries.sum(-1, dtype=torch.promote_types(query.dtype, torch.float32))
        output = query.new_zeros(*query.shape[:3], value.shape[3]) + held.sum() + queries.sum()
    inputs = distill_inputs(queries.detach(), keys.detach(), selection, scale, masked)
    return Attended(output[:, :, place], lse.detach()[:, :, place], inputs, lse.detach(), number, place)


@dataclass(frozen=True, eq=False, slots=True)
class RankBatch:
    """Rows on which all ranks together distill the scorer, and which of them this rank compares."""

    choice: Choice
    batch: DistillBatch
    """Rows of the whole sequence, the same on every rank, as its results."""
    chosen_mine: Tensor
    """bool: of the chosen rows, those whose scores this rank has"""
    dense_mine: Tensor
    """bool: likewise of the dense rows"""
    padding: Tensor | None
    """bool (b, N)"""

    @property
    def row_tokens(self) -> int:
        """Queries of a row of the batch."""
        return self.batch.row_tokens or (1 if self.choice.per_token else self.choice.block_size)


def distill(attended: Attended, key: Tensor, query: Tensor, chosen: Tensor, dense: Tensor, about: RankBatch) -> Tensor:
    """The output, in whose backward pass the scores get their gradients. Collective there.

    Args:
        attended: attention of the rows.
        key: (b, g, n, d), the rank's own.
        query: (b, h, n, d), likewise.
        chosen: (b, s, rows, k), scores of the blocks listed for the chosen rows that this rank compares.
        dense: (b, s, rows, t), scores of all blocks for the dense ones.
        about: the rows of the batch.
    """
    without = attended._replace(output=attended.output.detach())
    return _Distilled.apply(attended.output, chosen, dense, without, key.detach(), query.detach(), about)


class _Distilled(torch.autograd.Function):
    """Identity whose backward pass distills the scorer."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        chosen: Tensor,
        dense: Tensor,
        attended: Attended,
        key: Tensor,
        query: Tensor,
        about: RankBatch,
    ) -> Tensor:
        ctx.save_for_backward(chosen, dense)
        ctx.attended, ctx.key, ctx.query, ctx.about = attended, key, query, about
        return output.view_as(output)

    @staticmethod
    @once_differentiable("learned context-parallel attention")
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        chosen, dense = ctx.saved_tensors
        attended, key, query, about = ctx.attended, ctx.key, ctx.query, ctx.about
        choice, batch = about.choice, about.batch
        t, mine = choice.blocks, choice.layout.positions(choice.rank).to(key.device)
        own_padding = None if about.padding is None else about.padding[:, mine]
        over_ranks = partial(summed_over_ranks, group=choice.group)
        weights = query_weights(batch, attended.lse, grad_output, own_padding, over_ranks)
        queries = about.row_tokens
        mass, own_mass, listed, sums = _chosen_mass(attended, about, weights.each)
        group = mass.shape[1] // chosen.shape[1]
        mass, own_mass, listed = summed_by_list(mass, group), summed_by_list(own_mass, group), listed[:, ::group]
        of_rows = weights.of_rows(sums, queries, group)
        some = about.chosen_mine
        factor = batch.chosen_weight * row_factors(batch, of_rows, len(some))[:, :, some]
        own_mass = own_mass[:, :, some] if batch.with_own else None
        first = compare_rows(chosen, mass[:, :, some], own_mass, listed[:, :, some], factor)
        loss = _mean_divergence(first, of_rows, some, choice.group)
        if not len(batch.dense_rows):
            batch.stats["loss"] = batch.weight * loss
            return grad_output, first.grad, torch.zeros_like(dense), *(None,) * 4
        mass, sums, coverage = _dense_mass(attended, key, query, about, weights.each)
        mass, of_rows = summed_by_list(mass, group), weights.of_rows(sums, queries, group)
        some, rows = about.dense_mine, batch.dense_rows[about.dense_mine]
        own = rows * about.row_tokens // choice.block_size
        column = torch.arange(t, device=key.device)
        others = column < own[:, None] if choice.is_causal else column != own[:, None]
        assert batch.visible is not None
        others = others & batch.visible[:, :, None]
        at = own.expand(*mass.shape[:2], -1)[..., None]
        own_mass = mass[:, :, some].gather(-1, at) if batch.with_own else None
        factor = row_factors(batch, of_rows, len(some))[:, :, some]
        second = compare_rows(dense, mass[:, :, some], own_mass, others, factor)
        entropy = summed_over_ranks(second.entropy.sum(), choice.group) / of_rows.numel()
        loss = batch.weight * (loss + _mean_divergence(second, of_rows, some, choice.group))
        batch.stats |= {"loss": loss, "entropy": entropy, "coverage": coverage}
        return grad_output, first.grad, second.grad, *(None,) * 4


def _mean_divergence(compared: RowComparison, weights: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Weighted mean divergence of the rows of all ranks, of which this rank compared `mine`."""
    total = summed_over_ranks((compared.divergence * weights[:, :, mine]).sum(), group)
    return total / weights.sum().clamp(min=1e-30)


def summed_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over the ranks, in place."""
    dist.all_reduce(x, group=group)
    return x


def _chosen_mass(attended: Attended, about: RankBatch, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mass of the chosen rows' listed and own blocks (b, h, rows, k and 1), lists of this rank, and row weights."""
    choice, rows = about.choice, about.batch.chosen_rows
    batch, heads, _, k = choice.indices.shape
    table = torch.zeros(batch, heads, len(rows), 2 + k, dtype=weights.dtype, device=weights.device)
    listed = torch.zeros(batch, heads, len(rows), k, dtype=torch.bool, device=weights.device)
    each = 1 if choice.per_token else choice.block_size // about.row_tokens
    here = torch.isin(rows // each, choice.rows).nonzero()[:, 0]
    at = torch.searchsorted(choice.rows, rows[here] // each)
    if len(here):
        some = choice.indices[:, :, at].long()
        own = choice.own[at]
        blocks = attended.number[torch.cat([own.expand(batch, heads, -1)[..., None], some], -1)]
        every = torch.zeros_like(attended.inputs_lse).index_copy(2, attended.place, weights)
        local = attended.place[at] if choice.per_token else attended.number[own] * each + rows[here] % each
        inputs = attended.inputs._replace(row_tokens=about.row_tokens)
        table[:, :, here, 1:] = listed_mass(inputs, local, blocks, attended.inputs_lse, every)
        table[:, :, here, 0] = row_weights(inputs, local, every)
        listed[:, :, here] = some < choice.blocks
    of_rows, own_mass, mass = summed_over_ranks(table, choice.group).split([1, 1, k], -1)
    return mass, own_mass, listed, of_rows[..., 0]


def _dense_mass(
    attended: Attended, key: Tensor, query: Tensor, about: RankBatch, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted dense attention of the dense rows on every block (b, h, rows, t), row weights, and captured share."""
    choice, rows, group = about.choice, about.batch.dense_rows, about.choice.group
    layout, size, t = choice.layout, choice.block_size, choice.blocks
    batch, heads, _, width = query.shape
    dtype, device = weights.dtype, weights.device
    mine = layout.positions(choice.rank).to(device)
    tokens = rows[:, None] * about.row_tokens + torch.arange(about.row_tokens, device=device)
    flat = tokens.flatten()
    here = torch.isin(flat, mine).nonzero()[:, 0]
    of = torch.searchsorted(mine, flat[here])
    # From the holders of these queries: the query, its weight, and the LSE of its selected blocks.
    known = torch.zeros(batch, heads, len(flat), width + 3, dtype=dtype, device=device)
    if len(here):
        kept = attended.lse[:, :, of]
        facts = [weights[:, :, of], kept.nan_to_num(neginf=0.0), kept.isfinite().to(dtype)]
        known[:, :, here] = torch.cat([query[:, :, of].to(dtype), torch.stack(facts, -1)], -1)
    queries, facts = summed_over_ranks(known, group).split([width, 3], -1)
    weight, kept, attends = facts.unbind(-1)
    padding = None if about.padding is None else about.padding[:, mine]
    scorer = _DenseScores(queries, flat, key, mine, attended.inputs.scale, choice.is_causal, padding)
    whole = torch.stack(gathered(scorer.logs(), group)).logsumexp(0)
    mass = scorer.mass(whole, weight, mine // size, t, tokens.shape)
    mass = summed_over_ranks(mass, group)
    lse = torch.where(attends > 0, kept, -torch.inf)
    real = torch.where(flat < layout.n, torch.arange(len(flat), device=device), len(flat))
    of_rows = weight.unflatten(2, tokens.shape).sum(-1)
    of_rows = torch.where(of_rows.isfinite(), of_rows, 0.0)
    return mass, of_rows, captured(lse, whole, real)


class _DenseScores:
    """Queries of anywhere with the keys of this rank."""

    def __init__(
        self,
        queries: Tensor,
        tokens: Tensor,
        key: Tensor,
        mine: Tensor,
        scale: float,
        is_causal: bool,
        padding: Tensor | None,
    ) -> None:
        self.queries, self.tokens, self.mine, self.scale, self.is_causal = queries, tokens, mine, scale, is_causal
        self.key, self.padding = key.to(queries.dtype), padding
        batch, heads = queries.shape[:2]
        self.step = max(1, STEP // max(1, batch * heads * len(mine)))

    def _scores(self) -> Iterator[tuple[slice, Tensor]]:
        """Scores of some tokens at a time (b, h, tokens, keys here)."""
        batch, heads = self.queries.shape[:2]
        for begin in range(0, len(self.tokens), self.step):
            some = slice(begin, begin + self.step)
            grouped = self.queries[:, :, some].reshape(batch, self.key.shape[1], -1, self.queries.shape[3])
            scores = (self.scale * (grouped @ self.key.mT)).view(batch, heads, len(self.tokens[some]), len(self.mine))
            if self.is_causal:
                scores = scores.masked_fill_(self.mine > self.tokens[some, None], -torch.inf)
            if self.padding is not None:
                scores = scores.masked_fill_(self.padding[:, None, None], -torch.inf)
            yield some, scores

    def logs(self) -> Tensor:
        """LSE over the keys here (b, h, tokens)."""
        lse = self.queries.new_full(self.queries.shape[:3], -torch.inf)
        for some, scores in self._scores():
            lse[:, :, some] = scores.logsumexp(-1)
        return lse

    def mass(self, whole: Tensor, weight: Tensor, blocks: Tensor, t: int, shape: torch.Size) -> Tensor:
        """Weighted shares of the blocks here (b, h, rows, t), zero for those elsewhere."""
        mass = weight.new_zeros(*weight.shape[:2], *shape, t)
        flat = mass.flatten(2, 3)
        for some, scores in self._scores():
            share = torch.where(scores > -torch.inf, (scores - whole[:, :, some, None]).exp(), 0.0)
            weighted = torch.where(weight[:, :, some, None] > 0, share * weight[:, :, some, None], 0.0)
            flat[:, :, some] = torch.zeros_like(flat[:, :, some]).index_add_(3, blocks, weighted)
        return mass.sum(3)
