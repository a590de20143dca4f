"""A sequence seen from afar: what blocks of it add up to. Nothing here carries a gradient.

Shapes: b batch, h heads, n tokens, t blocks, u sub-blocks of a block, d width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.selection import summaries

CHUNK = 2**24
"""Bytes held at a time while blocks are summed up or ranked."""


class Blocks(NamedTuple):
    """Summaries of blocks."""

    summary: Tensor
    """(b, h, t, d): the mean; (b, h, t, 3 d): mean, maximum and minimum, where those were asked for"""
    units: Tensor
    """(b, h, t, u, d): means of sub-blocks"""
    unit_there: Tensor
    """bool (b, h, t, u): sub-blocks with something to see"""
    there: Tensor
    """bool (b, h, t): blocks with something to see"""

    def before(self) -> Blocks:
        """Of each block, the one before: its own mean would tell a block's first tokens of its last."""
        return Blocks(*(x.roll(1, 2) for x in self))


class Columns(NamedTuple):
    """Key blocks, as far as scores need them."""

    hidden: Tensor
    """(b, h, t, hidden): the first layer's part"""
    matched: Tensor
    """(b, h, t, u, rank)"""
    unit_there: Tensor
    """bool (b, h, t, u)"""


class Rows(NamedTuple):
    """Query blocks that speak for rows."""

    hidden: Tensor
    """(b, h, t, hidden)"""
    units: Tensor
    """(b, h, t, u, d)"""
    unit_there: Tensor
    """bool (b, h, t, u)"""
    keep: Tensor | None
    """(b, h, t, hidden): hidden units kept while training"""


def blocks_of(
    query: Tensor, key: Tensor, size: int, own_unit: int, unit: int, padding: Tensor | None, dtype: torch.dtype, *,
    before: bool,
) -> tuple[Blocks, Blocks]:  # fmt: skip
    """Summaries by blocks of queries (b, h, n, d), by units of their own, without extremes, and of keys (b, g, n, d).

    What is padding does not count, and a block that is not finite counts as absent. With `before`, those of queries are
    each of the block before; see `Blocks.before`.
    """
    own_unit, unit = min(own_unit, size), min(unit, size)
    made = summaries(query, key, size, own_unit, unit, padding, before=before)
    if made is not None:
        return Blocks(*made[0]), Blocks(*made[1])
    rows = _blocks_by_torch(query, size, own_unit, padding, dtype, False)
    keys = _blocks_by_torch(key, size, unit, padding, dtype, True)
    return rows.before() if before else rows, keys


@torch.no_grad()
def _blocks_by_torch(
    x: Tensor, size: int, unit: int, padding: Tensor | None, dtype: torch.dtype, extremes: bool
) -> Blocks:
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
    return Blocks(*(torch.cat(parts, 2) for parts in zip(*found, strict=True)))


class Sums(NamedTuple):
    """What blocks add up to, so far; those of parts of a sequence add up to those of the whole."""

    sums: Tensor
    """(b, h, t, u, d)"""
    many: Tensor
    """(b, 1, t, u, 1): tokens in the sums"""
    high: Tensor | None
    """(b, h, t, d), where extremes were asked for"""
    low: Tensor | None

    def blocks(self) -> Blocks:
        """The summaries that follow."""
        many = self.many
        units, mean = self.sums / many.clamp(min=1), self.sums.sum(3) / many.sum(3).clamp(min=1)
        # What is not finite spoils the sum, so that the mean tells of every token.
        good = mean.isfinite().all(-1, keepdim=True) & (many.sum(3) > 0)
        summary = mean if self.high is None or self.low is None else torch.cat([mean, self.high, self.low], -1)
        return Blocks(
            torch.where(good, summary, 0.0),
            torch.where(good[..., None], units, 0.0),
            (good & (many[..., 0] > 0)).expand(*units.shape[:-1]),
            good[..., 0],
        )


def _summaries(piece: Tensor, there: Tensor | None, extremes: bool) -> Blocks:
    """Summaries of (b, h, t, u, unit, d), where `there` (b, t, u, unit) is False counting nothing."""
    unit = piece.shape[4]
    low = high = piece
    many = torch.full((*piece.shape[:1], 1, *piece.shape[2:4], 1), unit, dtype=piece.dtype, device=piece.device)
    if there is not None:
        real = there[:, None, ..., None]
        many = real.sum(4).to(piece.dtype)
        low = piece.masked_fill(~real, torch.inf) if extremes else low
        high = piece.masked_fill(~real, -torch.inf) if extremes else high
        piece = torch.where(real, piece, 0.0)
    sums = piece.sum(4)
    if not extremes:
        return Sums(sums, many, None, None).blocks()
    return Sums(sums, many, high.amax(4).amax(3), low.amin(4).amin(3)).blocks()


@torch.no_grad()
def sums_at(x: Tensor, at: Tensor, n: int, size: int, unit: int, padding: Tensor | None, dtype: torch.dtype) -> Sums:
    """What the tokens `at` of a sequence of n add to its blocks; x is (b, h, tokens, d), padding (b, tokens).

    Sums and counts of all tokens add up to those of the sequence; of `high` the highest counts, of `low` the lowest.
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
