"""What a rank computes where its tokens lie: pairs of tiles that each lie in one run of its shard, without any copy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..plan import Axis, Part, Plan, Walk
from ..plan.plan import map_tensors
from ..plan.walks import build_walk, join_walks
from .shard import SequenceLayout


@dataclass(frozen=True, eq=False, slots=True)
class InsidePlan:
    """A plan over the rows of a shard."""

    plan: Plan

    def to(self, device: torch.device) -> InsidePlan:
        """The same on another device."""
        return map_tensors(self, lambda tensor: tensor.to(device))


def inside(plan: Plan, layout: SequenceLayout, rank: int, travelling: int = 0) -> InsidePlan:
    """The pairs of a plan whose tiles both lie in a run of the rank, on its shard; see `lies_inside`."""
    parts, blocks = [], 0
    for part in plan.parts:
        sides = []
        for axis, least in ((part.queries, travelling), (part.keys, 0)):
            own, shift = lies_inside(axis, layout, rank, plan.block_size, least)
            start, end = (axis.start - shift)[own], (axis.end - shift)[own].clamp(max=layout.lengths[rank])
            sides.append((own, replace(axis, start=start, end=end)))
        (from_query, queries), (from_key, keys) = sides
        row, tile, mask = part.by_query.entries()
        kept = from_query[row % part.queries.tiles] & from_key[tile]
        row, tile, mask = row[kept], tile[kept], mask[kept]
        if not len(row):
            continue
        kind, query = row // part.queries.tiles, _renumbered(from_query)[row % part.queries.tiles]
        key = _renumbered(from_key)[tile]
        classes = range(len(part.by_query.rows) // part.queries.tiles)
        walks = [_walks(query[kind == c], key[kind == c], mask[kind == c], queries, keys) for c in classes]
        by_query, by_key = zip(*walks, strict=True)
        parts.append(Part(queries, keys, part.head_class, join_walks(list(by_query)), join_walks(list(by_key))))
        heads = torch.bincount(part.head_class[part.head_class >= 0], minlength=len(classes))
        blocks += int(heads[kind].sum())
    return InsidePlan(replace(plan, n=layout.lengths[rank], parts=tuple(parts), blocks=blocks))


def lies_inside(axis: Axis, layout: SequenceLayout, rank: int, size: int, least: int = 0) -> tuple[Tensor, Tensor]:
    """Which tiles lie in one run of the rank, not before token `least`; and what their tokens lie off its shard."""
    last = torch.minimum(axis.start + axis.rate * size, axis.end) - 1
    holder, place = layout.locate(axis.start)
    other, end = layout.locate(last)
    own = (holder == rank) & (other == rank) & (end - place == last - axis.start) & (axis.start >= least)
    return own, axis.start - place


def _renumbered(kept: Tensor) -> Tensor:
    return kept.long().cumsum(0) - 1


def _walks(query: Tensor, key: Tensor, mask: Tensor, queries: Axis, keys: Axis) -> tuple[Walk, Walk]:
    order = torch.argsort(key, stable=True)
    return (
        build_walk(query, key, mask, _bases(queries, keys)),
        build_walk(key[order], query[order], mask[order], _bases(keys, queries)),
    )


def _bases(stationary: Axis, streamed: Axis) -> tuple[Tensor, ...]:
    """Tiles of one segment end together: lists count from the first of them, or from the tile's own number."""
    return torch.searchsorted(streamed.end, stationary.end), torch.arange(stationary.tiles)
