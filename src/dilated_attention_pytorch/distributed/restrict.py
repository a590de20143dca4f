"""What one rank computes and reads: some pairs of a plan, on buffers that hold queries and the keys they see.

Every part of the plan is cut out in whole tiles, element for element as on one device, and its tiles lie one after
another in the buffers. A row therefore meets the same keys in the same order whatever the number of ranks.

Heads that share a key head may sample different residues of it. Each residue then has its own copy of the
part's tiles in the key buffer, a *slot*, which the axis's offset selects.

Legend: H query heads, G key heads, T tiles, B block size, n rows of a buffer, E entries of a walk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan import Axis, Masks, Part, Plan, Walk
from ..plan.plan import map_tensors
from ..plan.planner import MaskTable
from ..plan.walks import build_walk, join_walks
from .inside import lies_inside
from .shard import SequenceLayout


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which pairs a rank computes in one go. By default all that its queries meet."""

    holder: int | None = None
    """Only keys that this rank holds."""
    far: bool = False
    """Only keys that other ranks hold."""
    begin: int = 0
    """Only keys from this token ..."""
    end: int | None = None
    """... to just before this one."""
    travelling: int = 0
    """Queries of so many leading tokens are left out: they go to the keys, instead of the keys to them."""
    visiting: bool = False
    """Those queries, rather than the rank's own."""
    edges: bool = False
    """Leave out pairs of tiles that both lie in a run of the rank: `inside` has them."""


@dataclass(frozen=True, eq=False, slots=True)
class RankPlan:
    """One rank's share of a plan."""

    plan: Plan
    """Over buffer rows; `plan.n` is the length of both buffers."""
    query_rows: Tensor
    """int32 [H, n]: the row of the rank's shard (or of the visiting queries) that a buffer row holds, -1 for filler"""
    key_rows: Tensor
    """int32 [G, n]: the row of the rank's shard that a row of the key buffer holds, -1 where it is none of them"""
    far_at: Tensor
    """int64: rows of the key buffer, counted over all heads, that hold rows of other ranks"""
    far_codes: Tensor
    """int64: `key head * tokens of the sequence + token` of each of them"""
    spans: tuple[tuple[int, int], ...]
    """Query buffer rows of each part; a query may occur in several parts and never twice in one."""

    def to(self, device: torch.device) -> RankPlan:
        """The same on another device."""
        return map_tensors(self, lambda tensor: tensor.to(device))

    def key_codes(self, layout: SequenceLayout, rank: int) -> Tensor:
        """int64 [G, n]: code of the row that each row of the key buffer holds, -1 for filler."""
        device = self.key_rows.device
        tokens = layout.positions(rank).to(device)
        group = torch.arange(len(self.key_rows), device=device)[:, None]
        known = (
            tokens[self.key_rows.clamp(min=0).long()]
            if len(tokens)
            else torch.zeros_like(self.key_rows, dtype=torch.int64)
        )
        codes = torch.where(self.key_rows >= 0, group * layout.n + known, -1)
        codes.view(-1)[self.far_at] = self.far_codes
        return codes


class _Kind(NamedTuple):
    """Heads of a part that share their lists and their residue."""

    walk_class: int
    offset: int
    key_offset: int


class _Meetings(NamedTuple):
    """What the queries of one kind meet."""

    row: Tensor
    """int64 [E]: index into the part's local query tiles"""
    tile: Tensor
    """int64 [E]: key tile of the whole plan"""
    mask: Tensor
    """int64 [E]: mask of the rank's plan, -1 where whole"""
    tiles: Tensor
    """int64 [T]: the key tiles, each once"""
    needed: Tensor
    """bool [T, B]: their elements that some query sees"""


def restrict(plan: Plan, layout: SequenceLayout, rank: int, key_heads: int, pairs: Pairs | None = None) -> RankPlan:
    """The rank's pairs of a plan on the CPU."""
    pairs = pairs or Pairs()
    masks = _MaskTable(plan)
    cuts = [_Cut(plan, part, layout, rank, key_heads, pairs, masks) for part in plan.parts]
    cuts = [cut for cut in cuts if len(cut.key_tiles)]
    parts, spans = [], []
    query_base = key_base = 0
    for cut in cuts:
        parts.append(cut.part(query_base, key_base))
        spans.append((query_base, query_base + len(cut.tiles) * plan.block_size))
        query_base, key_base = spans[-1][1], key_base + cut.key_length
    n = max(query_base, key_base)
    query_rows, key_rows = (torch.full((heads, n), -1, dtype=torch.int32) for heads in (plan.heads, key_heads))
    far_at, far_codes, key_base = [], [], 0
    for cut, (begin, end) in zip(cuts, spans, strict=True):
        cut.fill_queries(query_rows[:, begin:end])
        for at, codes in cut.fill_keys(key_rows, key_base):
            far_at.append(at)
            far_codes.append(codes)
        key_base += cut.key_length
    # Every row of a buffer exists: what is missing is filler, and masks keep it apart.
    parts = [_ending_at(part, n) for part in parts]
    local = replace(plan, n=n, parts=tuple(parts), masks=masks.finish(), blocks=sum(cut.blocks for cut in cuts))
    none = torch.empty(0, dtype=torch.int64)
    return RankPlan(
        local, query_rows, key_rows, torch.cat([none, *far_at]), torch.cat([none, *far_codes]), tuple(spans)
    )


def _ending_at(part: Part, n: int) -> Part:
    queries, keys = (replace(axis, end=torch.full_like(axis.start, n)) for axis in (part.queries, part.keys))
    return replace(part, queries=queries, keys=keys)


class _Cut:
    """One part of a plan, cut down to the tiles that hold queries of a rank."""

    def __init__(
        self,
        plan: Plan,
        part: Part,
        layout: SequenceLayout,
        rank: int,
        key_heads: int,
        pairs: Pairs,
        masks: _MaskTable,
    ) -> None:
        self.whole, self.source, self.layout, self.rank, self.key_heads = plan, part, layout, rank, key_heads
        self.pairs, self.masks = pairs, masks
        self.size = plan.block_size
        classes, offsets, key_offsets = (x.tolist() for x in (part.head_class, part.queries.offset, part.keys.offset))
        self.kind_of = [
            _Kind(*facts) if facts[0] >= 0 else None for facts in zip(classes, offsets, key_offsets, strict=True)
        ]
        self.kinds = sorted({kind for kind in self.kind_of if kind is not None})
        self.listed = {kind: self._listed(kind) for kind in sorted({kind.walk_class for kind in self.kinds})}
        every = torch.arange(part.queries.tiles)
        if pairs.far or pairs.edges:
            every = torch.unique(torch.cat([query for query, _, _ in self.listed.values()]))
        own = {kind: self._query_places(every, kind.offset) for kind in self.kinds}
        holding = torch.stack([(rows >= 0).any(1) for rows in own.values()]).any(0)
        self.tiles = every[holding]
        """int64 [T]: query tiles of the plan that hold a query of this rank, for some head"""
        self.own = own if len(self.tiles) == len(every) else {kind: rows[holding] for kind, rows in own.items()}
        self.met = {kind: self._meetings(kind) for kind in self.kinds}
        self.key_tiles = torch.unique(torch.cat([met.tiles for met in self.met.values()]))
        self.slots = [self._slots(group) for group in range(key_heads)]
        self.blocks = sum(len(self.met[kind].row) for kind in self.kind_of if kind is not None)

    def _query_places(self, tiles: Tensor, offset: int) -> Tensor:
        """Which of the queries at hand the elements of query tiles are, int64 [T, B], -1 where none."""
        axis, pairs = self.source.queries, self.pairs
        if pairs.visiting:
            token, exists = self._tokens(axis, tiles, offset)
            return torch.where(exists & (token < pairs.travelling), token, -1)
        places = self._places(axis, tiles, offset, self.rank)
        if pairs.travelling:
            token, _ = self._tokens(axis, tiles, offset)
            places = torch.where(token < pairs.travelling, -1, places)
        return places

    def _tokens(self, axis: Axis, tiles: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        token = axis.start[tiles, None] + offset + axis.rate * torch.arange(self.size)
        return token, token < axis.end[tiles, None]

    def _places(self, axis: Axis, tiles: Tensor, offset: int, holder: int) -> Tensor:
        """The rows of a holder's shard that the elements of tiles are, int64 [T, B], -1 where not its own."""
        layout, step = self.layout, axis.rate * torch.arange(self.size)
        first = axis.start[tiles] + offset
        count = (-(-(axis.end[tiles] - first) // axis.rate)).clamp(0, self.size)
        last = first + axis.rate * (count - 1).clamp(min=0)
        bound = layout.n - 1
        own, place = layout.locate(first.clamp(max=bound))
        other, end = layout.locate(last.clamp(max=bound))
        places = torch.where(own == holder, place, -1)[:, None] + step
        dead = (step >= axis.rate * count[:, None]) | (own != holder)[:, None]
        places.masked_fill_(dead, -1)
        # A tile in one run has its rows at even distances; the others are looked up one by one.
        split = ((other != own) | (end - place != last - first)).nonzero()[:, 0]
        if len(split):
            token, exists = self._tokens(axis, tiles[split], offset)
            who, where = layout.locate(token.clamp(max=bound))
            places[split] = torch.where(exists & (who == holder), where, -1)
        return places

    def _there(self, tiles: Tensor, offset: int) -> Tensor:
        """Which elements of key tiles exist and are wanted now, bool [T, B]."""
        axis, pairs = self.source.keys, self.pairs
        if pairs.holder is not None:
            there = self._places(axis, tiles, offset, pairs.holder) >= 0
        else:
            count = -(-(axis.end[tiles] - axis.start[tiles] - offset) // axis.rate)
            there = torch.arange(self.size) < count[:, None]
            if pairs.far:
                there &= self._places(axis, tiles, offset, self.rank) < 0
        if pairs.begin or pairs.end is not None:
            token, _ = self._tokens(axis, tiles, offset)
            there &= (token >= pairs.begin) & (token < (self.layout.n if pairs.end is None else pairs.end))
        return there

    def _meetings(self, kind: _Kind) -> _Meetings:
        row, tile, mask = self._entries(kind.walk_class)
        own = self.own[kind] >= 0
        alive = own.any(1)
        if not bool(alive.all()):
            row, tile, mask = (column[alive[row]] for column in (row, tile, mask))
        tiles, which = torch.unique(tile, return_inverse=True)
        there = self._there(tiles, kind.key_offset)
        kept = there.any(1)[which]
        whole = torch.zeros(len(tiles), dtype=torch.bool)
        whole[which[mask < 0]] = True
        needed = there & whole[:, None]
        partial = ((mask >= 0) & kept).nonzero()[:, 0]
        if len(partial):
            shapes, shape = torch.unique(own, dim=0, return_inverse=True)
            pair, case = torch.unique(mask[partial] * len(shapes) + shape[row[partial]], return_inverse=True)
            seen = torch.cat(
                [
                    (self.masks.dense(some // len(shapes)) & shapes[some % len(shapes)][:, :, None]).any(1)
                    for some in pair.split(256)
                ]
            )[case]
            seen &= there[which[partial]]
            kept[partial] = seen.any(1)
            needed |= torch.zeros_like(needed, dtype=torch.int32).index_add_(0, which[partial], seen.int()).bool()
        if not bool(kept.all()):
            row, tile, mask, which = row[kept], tile[kept], mask[kept], which[kept]
        met = needed.any(1)
        return _Meetings(row, tile, self.masks.taken(mask, there, which), tiles[met], needed[met])

    def _listed(self, walk_class: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query tile, key tile and mask of what one class meets, as far as tiles alone can tell it is asked for."""
        walk, tiles = self.source.by_query, self.source.queries.tiles
        rows = walk.rows[walk_class * tiles : (walk_class + 1) * tiles]
        query, key, mask = Walk(rows, walk.full, walk.partial, walk.mask, walk.order).entries()
        if self.pairs.far or self.pairs.edges:
            dropped = lies_inside(self.source.keys, self.layout, self.rank, self.size)[0][key]
            if self.pairs.edges:
                least = self.pairs.travelling
                dropped &= lies_inside(self.source.queries, self.layout, self.rank, self.size, least)[0][query]
            query, key, mask = query[~dropped], key[~dropped], mask[~dropped]
        return query, key, mask

    def _entries(self, walk_class: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same with query tiles counted among those of this cut."""
        query, key, mask = self.listed[walk_class]
        if len(self.tiles) == self.source.queries.tiles:
            return query, key, mask
        row = torch.searchsorted(self.tiles, query).clamp(max=max(len(self.tiles) - 1, 0))
        here = self.tiles[row] == query if len(self.tiles) else torch.zeros_like(query, dtype=torch.bool)
        return row[here], key[here], mask[here]

    def _slots(self, group: int) -> list[int]:
        """Residues that the query heads of one key head sample, a slot for each."""
        return sorted({kind.key_offset for kind in self._kinds_of(group)})

    def _kinds_of(self, group: int) -> set[_Kind]:
        shared = self.whole.heads // self.key_heads
        return {kind for kind in self.kind_of[group * shared : (group + 1) * shared] if kind is not None}

    @property
    def _slot_rows(self) -> int:
        return len(self.key_tiles) * self.size

    @property
    def key_length(self) -> int:
        """Rows of this part in the key buffer."""
        return max(map(len, self.slots)) * self._slot_rows

    def fill_queries(self, rows: Tensor) -> None:
        """Write the part's rows of the query buffer, int32 [H, rows of this part]."""
        for head, kind in enumerate(self.kind_of):
            if kind is not None:
                rows[head] = self.own[kind].flatten()

    def fill_keys(self, rows: Tensor, base: int) -> list[tuple[Tensor, Tensor]]:
        """Write the part's rows of the key buffer, int32 [G, n], and tell where others' rows go and which they are.

        Only what some query sees is asked for; everything else is filler.
        """
        far, known = [], {}
        for group, residues in enumerate(self.slots):
            for slot, residue in enumerate(residues):
                kinds = frozenset(kind for kind in self._kinds_of(group) if kind.key_offset == residue)
                if kinds not in known:
                    known[kinds] = self._key_rows(kinds, residue)
                own, at, token = known[kinds]
                begin = base + slot * self._slot_rows
                rows[group, begin : begin + self._slot_rows] = own
                if len(at):
                    far.append((group * rows.shape[1] + begin + at, group * self.layout.n + token))
        return far

    def _key_rows(self, kinds: frozenset[_Kind], residue: int) -> tuple[Tensor, Tensor, Tensor]:
        needed = torch.zeros(len(self.key_tiles), self.size, dtype=torch.bool)
        for kind in kinds:
            met = self.met[kind]
            needed[torch.searchsorted(self.key_tiles, met.tiles)] |= met.needed
        own = self._places(self.source.keys, self.key_tiles, residue, self.rank)
        others = (needed & (own < 0)).nonzero()
        axis = self.source.keys
        token = axis.start[self.key_tiles[others[:, 0]]] + residue + axis.rate * others[:, 1]
        own.masked_fill_(~needed, -1)
        return own.flatten(), others[:, 0] * self.size + others[:, 1], token

    def part(self, query_base: int, key_base: int) -> Part:
        """The part over buffer rows; its axes still have no end."""
        heads, shared = self.whole.heads, self.whole.heads // self.key_heads
        by_query, by_key = [], []
        rows, columns = torch.arange(len(self.tiles)), torch.arange(len(self.key_tiles))
        alike: list[_Kind] = []
        classes = []
        for kind in self.kinds:
            row, tile, mask, *_ = self.met[kind]
            # Residues apart, most kinds meet the same tiles; they share their lists.
            twin = next((i for i, other in enumerate(alike) if _same(self.met[other], self.met[kind])), None)
            classes.append(len(alike) if twin is None else twin)
            if twin is not None:
                continue
            alike.append(kind)
            tile = torch.searchsorted(self.key_tiles, tile)
            by_query.append(build_walk(row, tile, mask, (rows, torch.zeros_like(rows))))
            order = torch.argsort(tile, stable=True)
            by_key.append(build_walk(tile[order], row[order], mask[order], (columns, torch.zeros_like(columns))))
        class_of = dict(zip(self.kinds, classes, strict=True))
        slot = [
            0 if kind is None else self.slots[head // shared].index(kind.key_offset)
            for head, kind in enumerate(self.kind_of)
        ]
        key_offset = torch.tensor(slot, dtype=torch.int32) * self._slot_rows
        query_start, key_start = query_base + rows * self.size, key_base + columns * self.size
        return Part(
            Axis(1, torch.zeros(heads, dtype=torch.int32), query_start, query_start),
            Axis(1, key_offset, key_start, key_start),
            torch.tensor([-1 if kind is None else class_of[kind] for kind in self.kind_of], dtype=torch.int32),
            join_walks(by_query),
            join_walks(by_key),
        )


def _same(one: _Meetings, other: _Meetings) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))


class _MaskTable:
    """The masks a rank uses, with what is not there masked out, since its buffers have no ends; each kept once."""

    def __init__(self, plan: Plan) -> None:
        self.bits, self.size = plan.masks.bits, plan.block_size
        self.table = MaskTable(plan.block_size, plan.device)
        self.known: dict[tuple[int, bytes], int] = {}

    def dense(self, mask: Tensor) -> Tensor:
        """Masks of the whole plan written out, bool [., B, B]; -1 allows all."""
        flat = ((self.bits[mask.clamp(min=0)][..., None] >> torch.arange(32, dtype=torch.int32)) & 1).bool().flatten(2)
        return flat[..., : self.size] | (mask < 0)[:, None, None]

    def taken(self, mask: Tensor, there: Tensor, which: Tensor) -> Tensor:
        """Indices of masks of the whole plan cut to the keys `there[which]`; -1 where all is met."""
        cut = ~there.all(1)
        found = torch.full_like(mask, -1)
        slots = ((mask >= 0) | cut[which]).nonzero()[:, 0]
        if not len(slots):
            return found
        # Rows of `there` that are cut at all are few; those that are not share the shape 0.
        shapes, shape = torch.unique(
            torch.cat([torch.ones(1, self.size, dtype=torch.bool), there[cut]]), dim=0, return_inverse=True
        )
        of_tile = torch.full((len(there),), int(shape[0]), dtype=torch.int64)
        of_tile[cut] = shape[1:]
        pair, case = torch.unique((mask[slots] + 1) * len(shapes) + of_tile[which[slots]], return_inverse=True)
        names = [bytes(row) for row in shapes.to(torch.uint8).tolist()]
        keys = [(code // len(shapes) - 1, names[code % len(shapes)]) for code in pair.tolist()]
        unknown = torch.tensor([i for i, key in enumerate(keys) if key not in self.known], dtype=torch.int64)
        for some in unknown.split(256):
            code = pair[some]
            allowed = self.dense(code // len(shapes) - 1) & shapes[code % len(shapes)][:, None, :]
            self.known.update(zip((keys[i] for i in some.tolist()), self.table.add(allowed).tolist(), strict=True))
        found[slots] = torch.tensor([self.known[key] for key in keys])[case]
        return found

    def finish(self) -> Masks:
        return self.table.finish()
