"""What one rank computes and reads: its rows of a plan, on buffers that hold its queries and the keys they see.

Every part of the plan is cut out in whole tiles, element for element as on one device, and its tiles lie one after
another in the buffers. A row therefore meets the same keys in the same order whatever the number of ranks.

Heads that share a key head may sample different residues of it. Each residue then has its own copy of the
part's tiles in the key buffer, a *slot*, which the axis's offset selects.

Legend: H query heads, G key heads, T tiles, B block size, Q and K rows of the two buffers, E entries of a walk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan import Axis, Masks, Part, Plan, Walk
from ..plan.planner import MaskTable
from ..plan.walks import build_walk, join_walks
from .shard import SequenceLayout


@dataclass(frozen=True, eq=False, slots=True)
class RankPlan:
    """One rank's share of a plan."""

    plan: Plan
    """Over buffer rows; `plan.n` is the length of both buffers."""
    query_rows: Tensor
    """int64 [H, n]: the row of the rank's shard that a buffer row holds, -1 for filler"""
    key_codes: Tensor
    """int64 [G, n]: `key head * tokens of the sequence + token` that a buffer row holds, -1 for filler"""
    spans: tuple[tuple[int, int], ...]
    """Query buffer rows of each part; a query may occur in several parts and never twice in one."""


class _Kind(NamedTuple):
    """Heads of a part that share their lists and their residue."""

    walk_class: int
    offset: int
    key_offset: int


class _Meetings(NamedTuple):
    """What the own rows of one kind meet."""

    row: Tensor
    """int64 [E]: index into the part's local query tiles"""
    tile: Tensor
    """int64 [E]: key tile of the whole plan"""
    mask: Tensor
    """int64 [E]: mask of the whole plan, -1 where whole"""
    needed: Tensor
    """bool [E, B]: key elements that some own row sees"""
    count: Tensor
    """int64 [E]: elements of the key tile that exist for this kind"""


def restrict(plan: Plan, layout: SequenceLayout, rank: int, key_heads: int) -> RankPlan:
    """The rank's rows of a plan on the CPU."""
    size = plan.block_size
    masks = _MaskTable(plan)
    parts, spans, query_rows, key_codes, blocks = [], [], [], [], 0
    query_base = key_base = 0
    for part in plan.parts:
        cut = _Cut(plan, part, layout, rank, key_heads, masks)
        if not len(cut.key_tiles):
            continue
        parts.append(cut.part(query_base, key_base))
        query_rows.append(cut.query_rows())
        key_codes.append(cut.key_codes())
        spans.append((query_base, query_base + query_rows[-1].shape[1]))
        query_base, key_base = spans[-1][1], key_base + key_codes[-1].shape[1]
        blocks += cut.blocks
    n = max(query_base, key_base)
    # Every row of a buffer exists: what is missing is filler, and masks keep it apart.
    parts = [_ending_at(part, n) for part in parts]
    local = Plan(plan.name, n, plan.heads, size, tuple(parts), masks.finish(), blocks)
    return RankPlan(local, _joined(query_rows, plan.heads, n), _joined(key_codes, key_heads, n), tuple(spans))


def _ending_at(part: Part, n: int) -> Part:
    queries, keys = (
        Axis(axis.rate, axis.offset, axis.start, torch.full_like(axis.start, n)) for axis in (part.queries, part.keys)
    )
    return Part(queries, keys, part.head_class, part.by_query, part.by_key)


def _joined(maps: list[Tensor], heads: int, n: int) -> Tensor:
    """Maps of the parts side by side, filled up with -1 to the length of the buffer."""
    whole = torch.full((heads, n), -1, dtype=torch.int64)
    at = 0
    for one in maps:
        whole[:, at : at + one.shape[1]] = one
        at += one.shape[1]
    return whole


class _Cut:
    """One part of a plan, cut down to the tiles that hold queries of a rank."""

    def __init__(
        self, plan: Plan, part: Part, layout: SequenceLayout, rank: int, key_heads: int, masks: _MaskTable
    ) -> None:
        self.whole, self.source, self.layout, self.rank, self.key_heads = plan, part, layout, rank, key_heads
        self.masks = masks
        self.size = plan.block_size
        classes, offsets, key_offsets = (x.tolist() for x in (part.head_class, part.queries.offset, part.keys.offset))
        self.kind_of = [
            _Kind(*facts) if facts[0] >= 0 else None for facts in zip(classes, offsets, key_offsets, strict=True)
        ]
        self.kinds = sorted({kind for kind in self.kind_of if kind is not None})
        near = self._tiles_near()
        own = {kind: self._own(near, kind.offset) for kind in self.kinds}
        holding = torch.stack([(rows >= 0).any(1) for rows in own.values()]).any(0)
        self.tiles = near[holding]
        """int64 [T]: query tiles of the whole plan that hold a query of this rank, for some head"""
        self.own = {kind: rows[holding] for kind, rows in own.items()}
        self.met = {kind: self._meetings(kind) for kind in self.kinds}
        self.key_tiles = torch.unique(torch.cat([met.tile for met in self.met.values()]))
        self.slots = [self._slots(group) for group in range(key_heads)]
        self.blocks = sum(len(self.met[kind].row) for kind in self.kind_of if kind is not None)

    def _tiles_near(self) -> Tensor:
        """Query tiles that reach over a run of the rank."""
        start, end = self.source.queries.start, self.source.queries.end
        last = torch.minimum(start + self.source.queries.rate * self.size, end)
        near = torch.zeros_like(start, dtype=torch.bool)
        runs = self.layout.runs(self.rank)
        if len(runs) <= 8:
            for begin, stop in runs:
                near |= (start < stop) & (last > begin)
        elif runs:
            near |= (start < runs[-1][1]) & (last > runs[0][0])
        return near.nonzero()[:, 0]

    def _own(self, tiles: Tensor, offset: int) -> Tensor:
        """Which rows of the rank's shard the elements of query tiles are, int64 [T, B], -1 where not its own."""
        axis = self.source.queries
        token = axis.start[tiles, None] + offset + axis.rate * torch.arange(self.size)
        holder, place = self.layout.locate(token.clamp(max=self.layout.n - 1))
        return torch.where((token < axis.end[tiles, None]) & (holder == self.rank), place, -1)

    def _meetings(self, kind: _Kind) -> _Meetings:
        walk, size = self.source.by_query, self.size
        rows = walk.rows[kind.walk_class * self.source.queries.tiles + self.tiles]
        row, tile, mask = Walk(rows, walk.full, walk.partial, walk.mask, walk.order).entries()
        own = self.own[kind] >= 0
        alive = own.any(1)[row]
        row, tile, mask = row[alive], tile[alive], mask[alive]
        axis = self.source.keys
        count = -(-(axis.end[tile] - axis.start[tile] - kind.key_offset) // axis.rate)
        count = count.clamp(0, size)
        needed = torch.arange(size) < count[:, None]
        partial = (mask >= 0).nonzero()[:, 0]
        if len(partial):
            shapes, shape = torch.unique(own, dim=0, return_inverse=True)
            pair, which = torch.unique(mask[partial] * len(shapes) + shape[row[partial]], return_inverse=True)
            seen = [
                (self.masks.dense(some // len(shapes)) & shapes[some % len(shapes)][:, :, None]).any(1)
                for some in pair.split(256)
            ]
            needed[partial] &= torch.cat(seen)[which]
        some = needed.any(1)
        return _Meetings(row[some], tile[some], mask[some], needed[some], count[some])

    def _slots(self, group: int) -> list[int]:
        """Residues that the query heads of one key head sample, a slot for each."""
        shared = self.whole.heads // self.key_heads
        kinds = self.kind_of[group * shared : (group + 1) * shared]
        return sorted({kind.key_offset for kind in kinds if kind is not None})

    @property
    def _slot_rows(self) -> int:
        return len(self.key_tiles) * self.size

    def query_rows(self) -> Tensor:
        """int64 [H, rows of this part]"""
        none = torch.full((len(self.tiles) * self.size,), -1, dtype=torch.int64)
        return torch.stack([none if kind is None else self.own[kind].flatten() for kind in self.kind_of])

    def key_codes(self) -> Tensor:
        """int64 [G, rows of this part]: only what some own query sees; everything else is filler."""
        axis = self.source.keys
        most = max(map(len, self.slots))
        codes = torch.full((self.key_heads, most, self._slot_rows), -1, dtype=torch.int64)
        shared = self.whole.heads // self.key_heads
        for group, residues in enumerate(self.slots):
            for slot, residue in enumerate(residues):
                needed = torch.zeros(len(self.key_tiles), self.size, dtype=torch.int32)
                for kind in {k for k in self.kind_of[group * shared : (group + 1) * shared] if k is not None}:
                    if kind.key_offset == residue:
                        met = self.met[kind]
                        needed.index_add_(0, torch.searchsorted(self.key_tiles, met.tile), met.needed.int())
                token = axis.start[self.key_tiles, None] + residue + axis.rate * torch.arange(self.size)
                codes[group, slot] = torch.where(needed > 0, group * self.layout.n + token, -1).flatten()
        return codes.flatten(1)

    def part(self, query_base: int, key_base: int) -> Part:
        """The part over buffer rows; its axes still have no end."""
        heads, shared = self.whole.heads, self.whole.heads // self.key_heads
        by_query, by_key = [], []
        rows, columns = torch.arange(len(self.tiles)), torch.arange(len(self.key_tiles))
        for kind in self.kinds:
            met = self.met[kind]
            tile, mask = torch.searchsorted(self.key_tiles, met.tile), self.masks.taken(met.mask, met.count)
            by_query.append(build_walk(met.row, tile, mask, (rows, torch.zeros_like(rows))))
            order = torch.argsort(tile, stable=True)
            by_key.append(build_walk(tile[order], met.row[order], mask[order], (columns, torch.zeros_like(columns))))
        classes = [-1 if kind is None else self.kinds.index(kind) for kind in self.kind_of]
        slot = [
            0 if kind is None else self.slots[head // shared].index(kind.key_offset)
            for head, kind in enumerate(self.kind_of)
        ]
        key_offset = torch.tensor(slot, dtype=torch.int32) * self._slot_rows
        query_start, key_start = query_base + rows * self.size, key_base + columns * self.size
        return Part(
            Axis(1, torch.zeros(heads, dtype=torch.int32), query_start, query_start),
            Axis(1, key_offset, key_start, key_start),
            torch.tensor(classes, dtype=torch.int32),
            join_walks(by_query),
            join_walks(by_key),
        )


class _MaskTable:
    """The masks a rank uses, with what does not exist masked out, since its buffers have no ends; each kept once."""

    def __init__(self, plan: Plan) -> None:
        self.bits, self.size = plan.masks.bits, plan.block_size
        self.table = MaskTable(plan.block_size, plan.device)
        self.known: dict[int, int] = {}

    def dense(self, mask: Tensor) -> Tensor:
        """Masks of the whole plan written out, bool [., B, B]."""
        flat = ((self.bits[mask][..., None] >> torch.arange(32, dtype=torch.int32)) & 1).bool().flatten(2)
        return flat[..., : self.size]

    def taken(self, mask: Tensor, count: Tensor) -> Tensor:
        """Indices of masks of the whole plan cut to `count` keys; -1 stays -1."""
        base = self.size + 1
        pair, which = torch.unique(torch.where(mask < 0, -1, mask * base + count), return_inverse=True)
        unknown = [code for code in pair.tolist() if code >= 0 and code not in self.known]
        for some in torch.tensor(unknown, dtype=torch.int64).split(256):
            exists = torch.arange(self.size) < (some % base)[:, None]
            found = self.table.add(self.dense(some // base) & exists[:, None, :])
            self.known.update(zip(some.tolist(), found.tolist(), strict=True))
        return torch.tensor([self.known.get(code, -1) for code in pair.tolist()], dtype=torch.int64)[which]

    def finish(self) -> Masks:
        return self.table.finish()
