"""Plans that are dense attention within segments, recognised from their tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..plan.plan import Axis, Masks, Part, Plan


class Run(NamedTuple):
    """Segments of one extent at one distance: [begin + i * hop, begin + i * hop + extent) for i < segments."""

    begin: int
    hop: int
    segments: int
    extent: int


@dataclass(frozen=True, slots=True)
class Branch:
    """A part of a plan, seen as segments whose samples all meet, or meet up to their own place."""

    rate: int
    runs: tuple[Run, ...]
    heads: tuple[tuple[int, int, bool], ...]
    """head, the residue it samples, whether it is causal; heads that sit out are not listed"""


_branches: WeakKeyDictionary[Plan, tuple[Branch, ...] | None] = WeakKeyDictionary()


def branches_of(plan: Plan) -> tuple[Branch, ...] | None:
    """The plan's parts as dense or causal segments, or None when some part is anything else."""
    if plan not in _branches:
        found = []
        for part in plan.parts:
            branch = _branch(part, plan.block_size, plan.masks)
            if branch is None:
                break
            found.append(branch)
        _branches[plan] = tuple(found) if len(found) == len(plan.parts) else None
    return _branches[plan]


def _branch(part: Part, block: int, masks: Masks) -> Branch | None:
    axis = part.queries
    if not (part.keys is axis or _same(part.keys, axis)):
        return None
    device = axis.start.device
    tiles, span = axis.tiles, axis.rate * block
    tile = torch.arange(tiles, device=device)
    opens = torch.ones(tiles, dtype=torch.bool, device=device)
    opens[1:] = (axis.start.diff() != span) | (axis.end.diff() != 0)
    first = torch.where(opens, tile, 0).cummax(0).values
    stop = torch.searchsorted(tile[opens], tile, right=True)
    stop = torch.cat([tile[opens], tile.new_tensor([tiles])])[stop]
    head_class, offset = part.head_class.tolist(), axis.offset.tolist()
    causal: dict[int, bool] = {}
    for own in sorted(set(head_class) - {-1}):
        lowest = min(offset[h] for h, c in enumerate(head_class) if c == own)
        elements = -(-(axis.end - axis.start - lowest) // axis.rate)
        kind = _kind(part, own, first, stop, elements, masks, block)
        if kind is None:
            return None
        causal[own] = kind
    heads = tuple((h, offset[h], causal[c]) for h, c in enumerate(head_class) if c >= 0)
    begins, extents = axis.start[opens].tolist(), (axis.end - axis.start)[opens].tolist()
    return Branch(axis.rate, tuple(_runs(begins, extents)), heads)


def _same(one: Axis, other: Axis) -> bool:
    alike = one.rate == other.rate and one.tiles == other.tiles
    return alike and all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("offset", "start", "end"))


def _kind(part: Part, own: int, first: Tensor, stop: Tensor, elements: Tensor, masks: Masks, block: int) -> bool | None:
    """Whether the rows of a head class are causal within their segments, or dense; None when they are neither."""
    walk, tiles = part.by_query, part.queries.tiles
    rows = walk.rows[own * tiles : (own + 1) * tiles].long()
    full_begin, full_end, full_base, begin, end, base = rows.unbind(1)
    whole, some = full_end - full_begin, end - begin
    plain = ((masks.band[:, 0] == 1 - block) & (masks.band[:, 1] == block - 1))[walk.mask.long()]
    diagonal = ((masks.band[:, 0] == 1 - block) & (masks.band[:, 1] == 0))[walk.mask.long()]
    # Tiles met whole come first and the rest follows them, both without a gap.
    runs = _consecutive(walk.full, full_begin, full_end, first - full_base)
    runs &= _consecutive(walk.partial, begin, end, first + whole - base)
    odd_before = _count_before(~plain)
    last = (end - 1).clamp(min=0)
    odd, odd_but_last = odd_before[end] - odd_before[begin], odd_before[torch.maximum(last, begin)] - odd_before[begin]
    ends_diagonal = (some > 0) & (diagonal[last] if len(diagonal) else torch.zeros_like(some, dtype=torch.bool))
    nobody = elements <= 0
    dense = nobody | (runs & (whole + some == stop - first) & (odd == 0))
    if bool(dense.all()):
        return False
    own_tile = torch.arange(tiles, device=first.device)
    on_diagonal = ends_diagonal | ((elements == 1) & (odd == 0))
    causal = nobody | (runs & (whole + some == own_tile + 1 - first) & (odd_but_last == 0) & on_diagonal)
    return True if bool(causal.all()) else None


def _consecutive(stored: Tensor, begin: Tensor, end: Tensor, expected: Tensor) -> Tensor:
    """Whether stored[begin:end] is expected, expected + 1, and so on, bool [rows]; an empty list is."""
    if not len(stored):
        return torch.ones_like(begin, dtype=torch.bool)
    breaks = torch.ones_like(stored, dtype=torch.bool)
    breaks[1:] = stored.diff() != 1
    before = _count_before(breaks)
    unbroken = before[end] - before[torch.minimum(begin + 1, end)] == 0
    return (begin == end) | (unbroken & (stored[begin.clamp(max=len(stored) - 1)] == expected))


def _count_before(flags: Tensor) -> Tensor:
    """How many flags are set before each place, and in all, int64 [len + 1]."""
    return torch.cat([torch.zeros(1, dtype=torch.int64, device=flags.device), flags.long().cumsum(0)])


def _runs(begins: list[int], extents: list[int]) -> Iterator[Run]:
    at = 0
    while at < len(begins):
        stop, extent = at + 1, extents[at]
        hop = begins[stop] - begins[at] if stop < len(begins) else 0
        # Segments that interleave cannot be told apart by dividing a token by the hop.
        while (
            hop >= extent and stop < len(begins) and (begins[stop] - begins[stop - 1], extents[stop]) == (hop, extent)
        ):
            stop += 1
        yield Run(begins[at], hop if stop - at > 1 else extent, stop - at, extent)
        at = stop
