"""Summaries of blocks of a sequence, in torch. No gradients are recorded.

Shapes: b batch, h heads, n tokens, t blocks, u sub-blocks of a block, d width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 2**24
"""Bytes of temporary memory while blocks are summarised or ranked."""


class BlockSummaries(NamedTuple):
    """Summaries of blocks."""

    summary: Tensor
    """(b, h, t, d): means of query blocks; (b, h, t, 3 d): mean, maximum and minimum of key blocks"""
    units: Tensor
    """(b, h, t, u, d): means of sub-blocks"""
    unit_there: Tensor
    """bool (b, h, t, u): sub-blocks with a visible token"""
    there: Tensor
    """bool (b, h, t): blocks with a visible token"""

    def before(self) -> BlockSummaries:
        """Summaries shifted by one block: a block's own mean would reveal its last tokens to its first ones."""
        return BlockSummaries(*(x.roll(1, 2) for x in self))


def summarise(
    query: Tensor, key: Tensor, size: int, row_unit: int, unit: int, padding: Tensor | None, before: bool
) -> tuple[BlockSummaries, BlockSummaries]:
    """Summaries of blocks of queries (b, h, n, d), in sub-blocks of `row_unit`, and of keys (b, g, n, d).

    Padding is ignored, and a block with a value that is not finite counts as empty. With `before`, summaries of queries
    are those of the preceding block.
    """
    dtype = score_dtype(query)
    rows = _summarise(query, size, min(row_unit, size), padding, dtype, False)
    keys = _summarise(key, size, min(unit, size), padding, dtype, True)
    return rows.before() if before else rows, keys


def score_dtype(query: Tensor) -> torch.dtype:
    """Dtype of summaries and scores."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@torch.no_grad()
def _summarise(
    x: Tensor, size: int, unit: int, padding: Tensor | None, dtype: torch.dtype, extremes: bool
) -> BlockSummaries:
    batch, heads, n, d = x.shape
    found = []
    step = max(1, CHUNK // (batch * heads * size * d * dtype.itemsize))
    for first in range(0, n, step * size):
        piece = x[:, :, first : first + step * size].to(dtype)
        missing = -piece.shape[2] % size
        there = None if padding is None else ~padding[:, first : first + step * size]
        if missing and there is None:
            there = torch.ones(batch, piece.shape[2], dtype=torch.bool, device=x.device)
        if there is not None:
            piece, there = F.pad(piece, (0, 0, 0, missing)), F.pad(there, (0, missing))
            there = there.unflatten(1, (-1, size // unit, unit))
        found.append(_summaries(piece.unflatten(2, (-1, size // unit, unit)), there, extremes))
    return BlockSummaries(*(torch.cat(parts, 2) for parts in zip(*found, strict=True)))


class Sums(NamedTuple):
    """Partial sums of blocks; sums of disjoint sets of tokens add up."""

    sums: Tensor
    """(b, h, t, u, d)"""
    many: Tensor
    """(b, 1, t, u, 1): tokens in the sums"""
    high: Tensor | None
    """(b, h, t, d) for keys"""
    low: Tensor | None

    def blocks(self) -> BlockSummaries:
        """Summaries of the blocks."""
        many = self.many
        units, mean = self.sums / many.clamp(min=1), self.sums.sum(3) / many.sum(3).clamp(min=1)
        # The mean is finite only if every token of the block is.
        good = mean.isfinite().all(-1, keepdim=True) & (many.sum(3) > 0)
        summary = mean if self.high is None or self.low is None else torch.cat([mean, self.high, self.low], -1)
        return BlockSummaries(
            torch.where(good, summary, 0.0),
            torch.where(good[..., None], units, 0.0),
            (good & (many[..., 0] > 0)).expand(*units.shape[:-1]),
            good[..., 0],
        )


def _summaries(piece: Tensor, there: Tensor | None, extremes: bool) -> BlockSummaries:
    """Summaries of (b, h, t, u, unit, d), ignoring tokens where `there` (b, t, u, unit) is False."""
    unit = piece.shape[4]
    low = high = piece
    many = torch.full((*piece.shape[:1], 1, *piece.shape[2:4], 1), unit, dtype=piece.dtype, device=piece.device)
    if there is not None:
        real = there[:, None, ..., None]
        many = real.sum(4).to(piece.dtype)
        low = piece.masked_fill(~real, torch.inf) if extremes else low
        high = piece.masked_fill(~real, -torch.inf) if extremes else high
        piece = torch.where(real, piece, 0.0)
    sums = piece.sum(4) if unit > 1 else piece.squeeze(4)
    if not extremes:
        return Sums(sums, many, None, None).blocks()
    return Sums(sums, many, high.amax((3, 4)), low.amin((3, 4))).blocks()


@torch.no_grad()
def sums_at(x: Tensor, at: Tensor, n: int, size: int, unit: int, padding: Tensor | None, dtype: torch.dtype) -> Sums:
    """Contribution of the tokens `at` to the blocks of a sequence of n; x is (b, h, tokens, d), padding (b, tokens).

    Add sums and counts of disjoint tokens; take the maximum of `high` and the minimum of `low`.
    """
    batch, heads, _, d = x.shape
    t, unit = -(-n // size), min(unit, size)
    made = {"dtype": dtype, "device": x.device}
    sums, many = (
        torch.zeros(batch, heads, t * (size // unit), d, **made),
        torch.zeros(batch, t * (size // unit), **made),
    )
    high = torch.full((batch, heads, t, d), -torch.inf, **made)
    low = -high
    step = max(1, CHUNK // (batch * heads * d * dtype.itemsize))
    for first in range(0, len(at), step):
        some = slice(first, first + step)
        piece, block = x[:, :, some].to(dtype), (at[some] // size)[:, None]
        there = torch.ones(batch, piece.shape[2], dtype=torch.bool, device=x.device)
        there = there if padding is None else ~padding[:, some]
        real = there[:, None, :, None]
        sums.index_add_(2, at[some] // unit, torch.where(real, piece, 0.0))
        many.index_add_(1, at[some] // unit, there.to(dtype))
        high.scatter_reduce_(2, block.expand_as(piece), torch.where(real, piece, -torch.inf), "amax")
        low.scatter_reduce_(2, block.expand_as(piece), torch.where(real, piece, torch.inf), "amin")
    return Sums(sums.unflatten(2, (t, -1)), many.view(batch, 1, t, -1, 1), high, low)
