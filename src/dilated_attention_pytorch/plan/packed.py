"""Plans of several documents laid one after another on one token axis."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from .plan import (
    FULL_BASE,
    FULL_BEGIN,
    FULL_END,
    PARTIAL_BASE,
    PARTIAL_BEGIN,
    PARTIAL_END,
    Axis,
    Masks,
    Part,
    Plan,
    Walk,
)
from .tile_lists import start_order


def lay_out(plans: list[Plan]) -> Plan:
    """One plan for documents in this order; a plan object that occurs again is stored once.

    The plans must have the same parts: equal rates, offsets and head classes.
    """
    distinct = list({id(plan): plan for plan in plans}.values())
    mask_shift = dict(zip(map(id, distinct), _before(len(plan.masks.bits) for plan in distinct), strict=True))
    masks = Masks(torch.cat([p.masks.bits for p in distinct]), torch.cat([p.masks.band for p in distinct]))
    starts = _before(plan.n for plan in plans)
    parts = []
    for index, first in enumerate(plans[0].parts):
        own = [plan.parts[index] for plan in plans]
        shifts = [mask_shift[id(plan)] for plan in plans]
        classes = len(first.by_query.rows) // first.queries.tiles
        queries = _lay_axis([part.queries for part in own], starts)
        keys = queries if first.keys is first.queries else _lay_axis([part.keys for part in own], starts)
        tiles = [part.queries.tiles for part in own]
        by_query = _lay_walk([part.by_query for part in own], tiles, shifts, classes)
        by_key = _lay_walk([part.by_key for part in own], tiles, shifts, classes)
        parts.append(Part(queries, keys, first.head_class, by_query, by_key))
    first = plans[0]
    total, blocks = sum(plan.n for plan in plans), sum(plan.blocks for plan in plans)
    return Plan(first.name, total, first.heads, first.block_size, tuple(parts), masks, blocks)


def _before(counts: Iterable[int]) -> list[int]:
    """Exclusive prefix sum."""
    return [0, *accumulate(counts)][:-1]


def _lay_axis(axes: list[Axis], starts: list[int]) -> Axis:
    start = torch.cat([axis.start + shift for axis, shift in zip(axes, starts, strict=True)])
    end = torch.cat([axis.end + shift for axis, shift in zip(axes, starts, strict=True)])
    return Axis(axes[0].rate, axes[0].offset, start, end)


def _lay_walk(walks: list[Walk], tiles: list[int], mask_shifts: list[int], classes: int) -> Walk:
    distinct = {id(walk): (walk, shift) for walk, shift in zip(walks, mask_shifts, strict=True)}
    stored = [walk for walk, _ in distinct.values()]
    full_at = dict(zip(distinct, _before(len(walk.full) for walk in stored), strict=True))
    partial_at = dict(zip(distinct, _before(len(walk.partial) for walk in stored), strict=True))
    tables: list[Tensor] = []
    for walk, first_tile in zip(walks, _before(tiles), strict=True):
        table = walk.rows.clone().view(classes, -1, 6)
        table[..., [FULL_BEGIN, FULL_END]] += full_at[id(walk)]
        table[..., [PARTIAL_BEGIN, PARTIAL_END]] += partial_at[id(walk)]
        table[..., [FULL_BASE, PARTIAL_BASE]] += first_tile
        tables.append(table)
    rows = torch.cat(tables, 1).flatten(0, 1)
    full, partial = torch.cat([walk.full for walk in stored]), torch.cat([walk.partial for walk in stored])
    mask = torch.cat([walk.mask + shift for walk, shift in distinct.values()])
    return Walk(rows, full, partial, mask, start_order(rows))
