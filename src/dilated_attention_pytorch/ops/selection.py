"""Which blocks are kept, from their scores: forced ones first, then the best, by a budget or by coverage.

Scores come in chunks of rows and are ranked chunk by chunk, so that no array of all pairs exists.
Shapes: b batch, h heads, r rows (query blocks, or tokens), t key blocks, k listed blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..kernels import triton_backend
from ..kernels.dropout import GOLDEN, WORD, fresh_seed, mix
from ..kernels.selection import Factors, no_kernels, rounded
from ..plan.selected import Budget, Selection, may_read, shared_blocks

__all__ = ["Budget", "Factors", "Selection", "fresh_seed", "gumbel", "rounded", "select", "select_rows", "summaries"]


def summaries(
    query: Tensor, key: Tensor, size: int, own_unit: int, unit: int, padding: Tensor | None, *, before: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
    """What `triton_summaries.summarised` gives on a GPU; None where no kernel adds them up."""
    able = query.dtype in triton_backend.DTYPES and key.dtype in triton_backend.DTYPES
    if not able or query.shape[2:] != key.shape[2:] or may_read(query.device) or no_kernels(query.device) is not None:
        return None
    from ..kernels.triton_summaries import summarised

    return summarised(query, key, size, own_unit, unit, padding, before)


def factored(
    means: Tensor, summary: Tensor, units: Tensor, first: Tensor, bias: Tensor, mixture: Tensor, match: Tensor
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None] | None:
    """What `triton_summaries.factored` gives on a GPU; None where no kernel computes it, or gradients are asked for."""
    able = summary.dtype is torch.float32 and match.shape[2] > 0 and units.shape[4] <= triton_backend.WIDEST
    if torch.is_grad_enabled() or not able or may_read(units.device) or no_kernels(units.device) is not None:
        return None
    from ..kernels.triton_summaries import factored

    return factored(means, summary, units, first, bias, mixture, match)


def select(
    scores: Callable[[int, int], Tensor],
    chunk: Callable[[], int],
    visible: Tensor,
    budget: Budget,
    *,
    n: int,
    block_size: int,
    is_causal: bool,
    per_token: bool,
    local_blocks: int,
    sink_blocks: int,
    seed: Tensor | None = None,
    factors: Factors | None = None,
) -> Selection:
    """Keep the best blocks of every row; of equals, the first.

    Args:
        scores: gives float (b, h, rows, t) for the rows from one to before another, already divided by temperature.
        chunk: tells how many rows to ask for at a time.
        visible: bool (b, h, t), False for blocks that hold nothing to see.
        budget: how many to keep.
        n: tokens of a sample.
        block_size: tokens in a block.
        is_causal: only blocks before a row's own are listed.
        per_token: rows are tokens, not query blocks.
        local_blocks: see `Selection`, as `sink_blocks`.
        seed: int64 [1]: Gumbel noise is added to the ranking, as if blocks were drawn in proportion to their weight.
        factors: what the scores are made of: a GPU then ranks every pair in one pass, and `scores` is not asked.
    """
    t = visible.shape[-1]
    told = {
        "block_size": block_size,
        "is_causal": is_causal,
        "per_token": per_token,
        "local_blocks": local_blocks,
        "sink_blocks": sink_blocks,
        "seed": seed,
    }
    if factors is not None and not may_read(visible.device) and factors.why_not(budget.room(t)) is None:
        from ..kernels.triton_choice import listed_blocks

        listed, many = listed_blocks(factors, visible, budget, **told)
    else:
        rows = torch.arange(n if per_token else t, device=visible.device)
        listed, many = select_rows(scores, chunk, rows, visible, budget, **told)
    return Selection(listed, many, n, block_size, is_causal, per_token, local_blocks, sink_blocks)


def select_rows(
    scores: Callable[[int, int], Tensor],
    chunk: Callable[[], int],
    rows: Tensor,
    visible: Tensor,
    budget: Budget,
    *,
    block_size: int,
    is_causal: bool,
    per_token: bool,
    local_blocks: int,
    sink_blocks: int,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `select` lists for some rows of a sequence, and how many: `Selection.indices` and `counts` of those.

    Args:
        scores: as for `select`, of rows counted among those here.
        chunk: see `select`.
        rows: int64 (r): which rows of the sequence they are.
        visible: see `select`, as everything else.
    """
    t, readable = visible.shape[-1], may_read(visible.device)
    counted = counted_blocks(visible, local_blocks, sink_blocks, is_causal)
    grows = budget.coverage is not None and readable
    width = 0 if grows else budget.room(t)
    indices = torch.full((*visible.shape[:2], len(rows), width), t, dtype=torch.int32, device=visible.device)
    counts = torch.zeros(indices.shape[:3], dtype=torch.int32, device=visible.device)
    for begin, end in spans(len(rows), chunk()):
        row = rows[begin:end]
        own = row // block_size if per_token else row
        shared = shared_blocks(own, t, local_blocks, sink_blocks, is_causal)
        listed, many = rank_blocks(scores(begin, end), row, own, shared, visible, counted, budget, is_causal, seed)
        # Where the scores decide how many there are, room for all would be far more than what is kept.
        listed = listed[..., : int(many.max())] if grows else listed
        if listed.shape[-1] > indices.shape[-1]:
            indices = torch.nn.functional.pad(indices, (0, listed.shape[-1] - indices.shape[-1]), value=t)
        indices[:, :, begin:end, : listed.shape[-1]] = listed
        counts[:, :, begin:end] = many
    if readable and counts.numel():
        indices = indices[..., : int(counts.max())]
    return indices, counts


def rank_blocks(
    scores: Tensor,
    row: Tensor,
    own: Tensor,
    shared: Tensor,
    visible: Tensor,
    counted: tuple[Tensor, Tensor],
    budget: Budget,
    is_causal: bool,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Listed blocks int32 (b, h, r, k) of some rows, and their counts."""
    t = visible.shape[-1]
    column = torch.arange(t, device=visible.device)
    within = column < own[:, None] if is_causal else column != own[:, None]
    within = within & visible[:, :, None]
    forced = shared & within
    open_to_choice = within & ~forced
    # A score that is not a number says nothing for its block: such a block comes last.
    scores = torch.where(within & ~scores.isnan(), scores, -torch.inf)
    ranked = scores if seed is None else scores + gumbel(seed, row, column, scores)
    room = min(budget.room(t), t - 1)
    best, indices = _best(ranked.masked_fill(~open_to_choice, -torch.inf), room)
    taken, seen = (x[:, :, own] for x in counted)
    if budget.coverage is None:
        wanted = budget.wanted(seen)
    else:
        share = _shares(scores)
        # The forced blocks are kept whatever they hold; choices are added until all of it reaches the target.
        held = share[..., -1] + (share[..., :-1] * forced).sum(-1)
        reached = held[..., None] + share.gather(-1, indices).cumsum(-1)
        wanted = taken + ((reached < budget.coverage).sum(-1) + 1) * (held < budget.coverage)
        wanted = wanted.clamp(min=budget.least, max=budget.most)
    slot = torch.arange(room, device=visible.device)
    listed = (slot < (wanted - taken)[..., None]) & (best > -torch.inf)
    counts = listed.sum(-1, dtype=torch.int32)
    return indices.masked_fill(~listed, t).sort(-1).values.int(), counts


def counted_blocks(visible: Tensor, local: int, sink: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Blocks that rows of each block keep without listing them, their own one, and blocks they see, int64 (b, h, t)."""
    t = visible.shape[-1]
    own = torch.arange(t, device=visible.device)
    before = torch.nn.functional.pad(visible.cumsum(-1), (1, 0))
    first, last = (own - local + 1).clamp(min=0), (own + local).clamp(max=t)
    hidden = (~visible).long()
    if is_causal:
        taken = before[..., own] - before[..., first] + before[..., first.clamp(max=sink)]
        return taken + 1, before[..., 1:] + hidden
    # First blocks lie before what is near, or behind it.
    taken = before[..., last.clamp(min=min(sink, t))] - before[..., first] + before[..., first.clamp(max=sink)]
    return taken + hidden, before[..., -1:] + hidden


def _best(ranked: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """The best of (..., t), descending, and where they stand; of equals the first."""
    if may_read(ranked.device):
        best, indices = ranked.topk(min(many + 1, ranked.shape[-1]), -1)
        tied = (best[..., 1:] == best[..., :-1]) & (best[..., 1:] > -torch.inf)
        if not bool(tied.any()):
            return best[..., :many], indices[..., :many]
    best, indices = ranked.sort(dim=-1, descending=True, stable=True)
    return best[..., :many], indices[..., :many]


def _shares(scores: Tensor) -> Tensor:
    """What share of a row's attention each block is predicted to hold, its own last: that has the logit 0."""
    own = torch.zeros_like(scores[..., :1])
    return torch.cat([scores, own], -1).softmax(-1)


def gumbel(seed: Tensor, row: Tensor, column: Tensor, like: Tensor) -> Tensor:
    """Gumbel noise from (seed, batch, head, row, column) alone, in the shape (b, h, r, t) and dtype of `like`."""
    batch, heads = like.shape[:2]
    low, high = seed & WORD, (seed >> 32) & WORD
    stream = torch.arange(batch * heads, device=like.device).view(batch, heads, 1, 1)
    word = mix(mix((mix(low ^ mix((high + stream) & WORD)) + row[:, None]) & WORD) ^ ((column * GOLDEN) & WORD))
    # Without the last step of `mix`, which changes no more than the last of the bits that are taken.
    word = word ^ (word >> 16)
    # 23 bits and a half: never 0 or 1, and exact in float32.
    uniform = ((word >> 9).to(like.dtype) + 0.5) / 2**23
    return -(-uniform.log()).log()


def spans(total: int, chunk: int) -> Iterator[tuple[int, int]]:
    """[0, total) in runs of at most `chunk`."""
    for begin in range(0, total, chunk):
        yield begin, min(begin + chunk, total)
