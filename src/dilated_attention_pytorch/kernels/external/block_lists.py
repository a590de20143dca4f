"""Block lists of plans of one part, in the format of FlashAttention-4 and FlexAttention.

Both libraries take, per row of blocks, the number and indices of whole blocks and of partial blocks. Shapes: Q rows of
blocks, K blocks of the longest row, H heads, or 1 if all heads share one list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...plan.plan import Plan, Walk
from ..hopper.lowering import is_regular


class Lists(NamedTuple):
    """Number and ascending indices of the blocks of each row."""

    counts: Tensor
    """int32 [..., Q]"""
    indices: Tensor
    """int32 [..., Q, K]"""


class Band(NamedTuple):
    """The pairs with `low <= key - query <= high`, in tokens."""

    low: int
    high: int


@dataclass(frozen=True, eq=False, slots=True)
class BlockTables:
    """A plan's blocks by query and by key, each [1, H, ...]."""

    whole: Lists
    partial: Lists
    whole_by_key: Lists
    partial_by_key: Lists
    band: Band | None
    """Band over the sequence that all partial blocks are cut from, or None."""


def why_not_blocks(plan: Plan) -> str | None:
    """Reason why a plan cannot be written as block lists of the sequence, or None."""
    if len(plan.parts) != 1:
        return f"needs a plan of one part, got {len(plan.parts)}"
    part = plan.parts[0]
    if part.queries.rate != 1 or part.keys.rate != 1:
        return f"needs a part of rate 1, got {max(part.queries.rate, part.keys.rate)}"
    if not all(is_regular(axis, plan.block_size, plan.n) for axis in (part.queries, part.keys)):
        return "needs segments that are multiples of the block size"
    return None


def tables_of(plan: Plan) -> BlockTables:
    """Block lists of a plan that `why_not_blocks` accepts; built once per plan."""
    tables = plan.memo.get("block tables")
    if tables is None:
        part = plan.parts[0]
        partial, whole = _by_head(plan, part.by_query, part.queries.tiles)
        partial_by_key, whole_by_key = _by_head(plan, part.by_key, part.keys.tiles)
        tables = BlockTables(whole, partial, whole_by_key, partial_by_key, _band_of(plan))
        plan.memo["block tables"] = tables
    return tables


def lists_of(table: Tensor, width: int | None = None) -> Lists:
    """A table of blocks, bool [..., Q, columns], as lists of the given width or as wide as the longest row."""
    row, column = table.flatten(0, -2).nonzero().unbind(1)
    counts, indices = lists_of_pairs(row, column, table[..., 0].numel(), width)
    return Lists(counts.view(table.shape[:-1]), indices.view(*table.shape[:-1], -1))


def lists_of_pairs(row: Tensor, column: Tensor, rows: int, width: int | None = None) -> Lists:
    """`lists_of` for the blocks (row, column), in any order."""
    order = torch.argsort(row * (int(column.max()) + 1 if len(column) else 1) + column)
    row, column = row[order], column[order]
    counts = torch.bincount(row, minlength=rows)
    within = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    width = max(1, int(counts.max())) if width is None else width
    indices = torch.zeros(rows, width, dtype=torch.int32, device=row.device)
    indices[row, within] = column.int()
    return Lists(counts.int(), indices)


def _by_head(plan: Plan, walk: Walk, tiles: int) -> tuple[Lists, Lists]:
    """Partial and whole blocks of a walk."""
    row, tile, mask = walk.entries()
    own = plan.parts[0].head_class.long()
    # Heads that share a list use one line; a head without work has an empty list of its own.
    own = own[:1] if bool((own == own[0]).all()) else own
    made = []
    for kind in (mask >= 0, mask < 0):
        counts, indices = lists_of_pairs(row[kind], tile[kind], len(walk.rows))
        counts, indices = counts.view(-1, tiles)[own], indices.view(-1, tiles, indices.shape[1])[own]
        made.append(Lists(torch.where(own[:, None] >= 0, counts, 0)[None], indices[None]))
    return made[0], made[1]


def _band_of(plan: Plan) -> Band | None:
    """Band that every partial block is cut from, if there is one."""
    part, block = plan.parts[0], plan.block_size
    row, tile, mask = part.by_query.entries()
    row, tile, mask = (entry[mask >= 0] for entry in (row, tile, mask))
    middle = (tile - row % part.queries.tiles) * block
    low, high = plan.masks.band.long()[mask].unbind(1)
    if bool((low > high).any()):
        return None
    # A bound at the corner of a block does not determine where the band ends beyond it.
    least, most = middle - (block - 1), middle + block - 1
    low, high = torch.maximum(middle + low, least), torch.minimum(middle + high, most)
    beyond = plan.n + block
    lower = max(-beyond, *low[low > least].unique().tolist(), -beyond)
    upper = min(beyond, *high[high < most].unique().tolist(), beyond)
    same = (least.clamp_min(lower) == low) & (most.clamp_max(upper) == high)
    return Band(max(lower, -plan.n), min(upper, plan.n)) if bool(same.all()) else None
