"""Buffer plans: some pairs of a plan as a problem of its own, on copies of the rows it reads.

Ranks, streams and excerpts compute a selection of query-key pairs. `buffer_plan` cuts it out of a plan in
whole tiles and stores the tiles one after another in a query buffer and a key buffer. The buffers hold
only rows of the selected tiles, so a branch of rate r costs 1 / r of its segment, and a query meets its
keys in the same order whatever the selection.

Query heads that share a key head may sample different residues of it. Each residue then has its own copy
of the part's key tiles in the buffer, a *slot*, which the offset of the key axis selects.

Legend: H query heads, G key heads, T tiles, B block size, n rows of the buffers, E entries of a walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns import Pattern
from .builder import MaskTable
from .plan import Axis, Masks, Part, Plan, Walk, map_tensors
from .row_plan import plan_rows
from .tile_lists import build_walk, join_walks


class TokenRuns:
    """Rows of a tensor that stores ascending runs of tokens, given by begin and end, one after another."""

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        table = torch.tensor([*runs] or [(0, 0)], dtype=torch.int64, device="cpu")
        self.begins, self.ends = table.T.contiguous().unbind()
        lengths = self.ends - self.begins
        self.shift = self.begins - (lengths.cumsum(0) - lengths)
        """Distance of a run's tokens to their rows."""

    def locate(self, tokens: Tensor) -> Tensor:
        """Row of each token, int64, -1 for tokens of no run."""
        run = self._run(tokens)
        return torch.where((run >= 0) & (tokens < self.ends[run]), tokens - self.shift[run], -1)

    def tile_rows(self, axis: Axis, tiles: Tensor, offset: int, size: int) -> Tensor:
        """Row of each element of some tiles, int64 [T, B], -1 for elements of no run."""
        step = axis.rate * torch.arange(size, device="cpu")
        first = axis.start[tiles] + offset
        count = (-(-(axis.end[tiles] - first) // axis.rate)).clamp(0, size)
        last = first + axis.rate * (count - 1).clamp(min=0)
        run = self._run(first)
        together = run == self._run(last)
        outside = (run < 0) | (first >= self.ends[run])
        inside = together & ~outside & (last < self.ends[run])
        rows = (first - self.shift[run])[:, None] + step
        rows.masked_fill_((step >= axis.rate * count[:, None]) | ~inside[:, None], -1)
        # Rows of a tile inside one run are evenly spaced; elements of tiles across an edge are located one by one.
        split = (~inside & ~(together & outside)).nonzero()[:, 0]
        if len(split):
            token = first[split, None] + step
            rows[split] = torch.where(token < axis.end[tiles[split], None], self.locate(token), -1)
        return rows

    def holds(self, axis: Axis, size: int) -> tuple[Tensor, Tensor]:
        """Whether each tile lies in one run for every head, bool [T], and the distance of its tokens to their rows."""
        run = self._run(axis.start)
        last = torch.minimum(axis.start + axis.rate * size, axis.end) - 1
        return (run >= 0) & (last < self.ends[run]), self.shift[run]

    def _run(self, tokens: Tensor) -> Tensor:
        """Last run that begins at or before each token, -1 for none."""
        if len(self.begins) == 1:
            return (tokens >= self.begins).long() - 1
        return torch.searchsorted(self.begins, tokens, right=True) - 1


@dataclass(frozen=True, eq=False, slots=True)
class Pairs:
    """Selection of query-key pairs by their tokens."""

    queries: TokenRuns
    first_query: int = 0
    """Leave out queries before this token."""
    keys: TokenRuns | None = None
    """Only keys of these runs."""
    other_keys: TokenRuns | None = None
    """Only keys outside these runs."""
    key_range: tuple[int, int] | None = None
    """Only keys of this range of tokens."""
    edges: bool = False
    """Omit pairs of tiles that both lie in a run of `queries`; they belong to `local_plan`."""


@dataclass(frozen=True, eq=False, slots=True)
class BufferPlan:
    """A plan over buffers, and the rows to copy into them."""

    plan: Plan
    """Over buffer rows; `plan.n` is the length of both buffers."""
    query_rows: Tensor
    """int32 [H, n]: row of `Pairs.queries` in each row of the query buffer, -1 for filler"""
    key_tokens: Tensor
    """int64 [G, n]: token in each row of the key buffer, -1 for filler"""
    spans: tuple[tuple[int, int], ...]
    """Query buffer rows of each part; a query may occur in several parts and at most once in each."""


@dataclass(frozen=True, eq=False, slots=True)
class RankPlan:
    """Buffer plan of one rank, with the keys of its own shard separated from those of other ranks."""

    plan: Plan
    query_rows: Tensor
    """See `BufferPlan`, as `spans`."""
    key_rows: Tensor
    """int32 [G, n]: row of the rank's shard in each row of the key buffer, -1 for other rows"""
    far_at: Tensor
    """int64: rows of the key buffer, counted over all heads, for rows of other ranks"""
    far_codes: Tensor
    """int64: `key head * tokens of the sequence + token` of each of those rows"""
    spans: tuple[tuple[int, int], ...]

    def to(self, device: torch.device) -> RankPlan:
        """The same plan on another device."""
        return map_tensors(self, lambda tensor: tensor.to(device))

    def key_tokens(self, tokens: Tensor, n: int) -> Tensor:
        """int64 [G, n]: token in each row of the key buffer, -1 for filler.

        Args:
            tokens: int64, the tokens of the rank's shard, on the plan's device.
            n: tokens of the sequence.
        """
        near = tokens[self.key_rows.clamp(min=0).long()] if len(tokens) else -1
        result = torch.where(self.key_rows >= 0, near, -1)
        result.view(-1)[self.far_at] = self.far_codes % n
        return result


def split_keys(buffers: BufferPlan, shard: TokenRuns, n: int) -> RankPlan:
    """The buffer plan of a rank that holds a shard of a sequence of `n` tokens."""
    tokens = buffers.key_tokens
    rows = shard.locate(tokens)
    far_at = ((tokens >= 0) & (rows < 0)).flatten().nonzero()[:, 0]
    codes = far_at // max(tokens.shape[1], 1) * n + tokens.flatten()[far_at]
    return RankPlan(buffers.plan, buffers.query_rows, rows.int(), far_at, codes, buffers.spans)


@dataclass(frozen=True, eq=False, slots=True)
class Excerpt:
    """One part of a plan for a run of rows, over buffers. Only `plan` and `query_rows` live on the requested device."""

    plan: Plan
    """Over buffer rows; without parts where no row of the run takes part."""
    queries: Tensor
    """int64 [R]: `head * rows of the run + row` of every query the part computes, each once"""
    slots: Tensor
    """int64 [R]: `head * n + buffer row` of each"""
    query_rows: Tensor
    """int64 [H, n]: row of the run in each buffer row, -1 for filler"""
    key_tokens: Tensor
    """int64 [G, n]: token in each buffer row, -1 for filler"""


def excerpts(
    pattern: Pattern,
    n: int,
    heads: int,
    key_heads: int,
    begin: int,
    end: int,
    block_size: int,
    device: torch.device | str = "cpu",
    keys: tuple[int, int] | None = None,
) -> tuple[Excerpt, ...]:
    """Buffer plans of the rows `begin` to `end - 1` under a resolved pattern, one for each part.

    With `keys`, only keys of that range of tokens take part. Time and memory follow the tiles that the rows
    meet. One softmax runs over the keys of all parts, so the results of the parts merge by LSE.

    >>> from dilated_attention_pytorch import Dilated
    >>> (branch,) = excerpts(Dilated((2**30,), (2**20,)), 2**30, 8, 8, 2**29, 2**29 + 2**22, 128)
    >>> branch.plan.n, branch.key_tokens[3, :2].tolist(), len(branch.queries)
    (1024, [3, 1048579], 32)
    """
    plan = plan_rows(pattern, n, heads, [(begin, end)], keys, block_size)
    pairs = Pairs(TokenRuns([(begin, end)]), key_range=keys)
    excerpts = []
    for part in plan.parts:
        buffers = buffer_plan(replace(plan, parts=(part,)), key_heads, pairs)
        rows = buffers.query_rows.long()
        slots = (rows.flatten() >= 0).nonzero()[:, 0]
        queries = slots // max(buffers.plan.n, 1) * (end - begin) + rows.flatten()[slots]
        excerpts.append(Excerpt(buffers.plan.to(device), queries, slots, rows.to(device), buffers.key_tokens))
    return tuple(excerpts)


def buffer_plan(plan: Plan, key_heads: int, pairs: Pairs) -> BufferPlan:
    """Cut a selection of pairs out of a plan on the CPU."""
    masks = _CutMasks(plan)
    cuts = [_Cut(plan, part, key_heads, pairs, masks) for part in plan.parts]
    cuts = [cut for cut in cuts if len(cut.key_tiles)]
    query_ends, key_ends = (
        torch.tensor([0, *lengths], device="cpu").cumsum(0).tolist()
        for lengths in ([cut.query_length for cut in cuts], [cut.key_length for cut in cuts])
    )
    n = max(query_ends[-1], key_ends[-1])
    query_rows = torch.full((plan.heads, n), -1, dtype=torch.int32, device="cpu")
    key_tokens = torch.full((key_heads, n), -1, dtype=torch.int64, device="cpu")
    for cut, query_base, key_base in zip(cuts, query_ends[:-1], key_ends[:-1], strict=True):
        cut.write_queries(query_rows[:, query_base:])
        cut.write_keys(key_tokens[:, key_base:])
    starts = zip(cuts, query_ends[:-1], key_ends[:-1], strict=True)
    parts = tuple(cut.over_buffers(query_base, key_base, n) for cut, query_base, key_base in starts)
    cut_out = replace(plan, n=n, parts=parts, masks=masks.table.finish(), blocks=sum(cut.blocks for cut in cuts))
    return BufferPlan(cut_out, query_rows, key_tokens, tuple(pairwise(query_ends)))


class _Kind(NamedTuple):
    """Heads of a part that share their lists and their residues."""

    walk_class: int
    offset: int
    key_offset: int


class _Meetings(NamedTuple):
    """Entries of the queries of one kind."""

    row: Tensor
    """int64 [E]: index into the query tiles of the cut"""
    tile: Tensor
    """int64 [E]: key tile of the whole plan"""
    mask: Tensor
    """int64 [E]: mask of the cut, -1 for whole tiles"""
    tiles: Tensor
    """int64 [T]: the key tiles, each once"""
    needed: Tensor
    """bool [T, B]: their elements that some query sees"""


class _Cut:
    """The selected pairs of one part of a plan."""

    def __init__(self, plan: Plan, part: Part, key_heads: int, pairs: Pairs, masks: _CutMasks) -> None:
        self.source, self.pairs, self.masks, self.size = part, pairs, masks, plan.block_size
        self.shared = plan.heads // key_heads
        facts = (x.tolist() for x in (part.head_class, part.queries.offset, part.keys.offset))
        self.kind_of = [_Kind(*kind) if kind[0] >= 0 else None for kind in zip(*facts, strict=True)]
        self.kinds = sorted({kind for kind in self.kind_of if kind is not None})
        groups = [self.kind_of[g * self.shared : (g + 1) * self.shared] for g in range(key_heads)]
        self.slots = [sorted({kind.key_offset for kind in group if kind is not None}) for group in groups]
        entries = {index: self._entries(index) for index in sorted({kind.walk_class for kind in self.kinds})}
        tiles = torch.unique(torch.cat([query for query, _, _ in entries.values()]))
        rows = {kind: self._query_rows(tiles, kind.offset) for kind in self.kinds}
        used = torch.stack([(own >= 0).any(1) for own in rows.values()]).any(0)
        self.tiles = tiles[used]
        """int64 [T]: query tiles of the plan with a selected query of some head"""
        self.rows = {kind: own[used] for kind, own in rows.items()}
        self.met = {kind: self._meetings(kind, *entries[kind.walk_class]) for kind in self.kinds}
        self.key_tiles = torch.unique(torch.cat([met.tiles for met in self.met.values()]))
        self.blocks = sum(len(self.met[kind].row) for kind in self.kind_of if kind is not None)
        self.query_length, self.slot_length = len(self.tiles) * self.size, len(self.key_tiles) * self.size
        self.key_length = max(map(len, self.slots)) * self.slot_length

    def _entries(self, walk_class: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query tile, key tile and mask of the entries of a class that may hold selected pairs."""
        walk, part, pairs = self.source.by_query, self.source, self.pairs
        rows = walk.rows[walk_class * part.queries.tiles : (walk_class + 1) * part.queries.tiles]
        query, key, mask = Walk(rows, walk.full, walk.partial, walk.mask, walk.order).entries()
        if pairs.edges:
            late = part.queries.start >= pairs.first_query
            dropped = (pairs.queries.holds(part.queries, self.size)[0] & late)[query]
            dropped &= pairs.queries.holds(part.keys, self.size)[0][key]
        elif pairs.other_keys is not None:
            dropped = pairs.other_keys.holds(part.keys, self.size)[0][key]
        else:
            return query, key, mask
        return query[~dropped], key[~dropped], mask[~dropped]

    def _tokens(self, axis: Axis, tiles: Tensor, offset: int) -> Tensor:
        """Token of each element of some tiles, int64 [T, B]."""
        return axis.start[tiles, None] + offset + axis.rate * torch.arange(self.size, device="cpu")

    def _query_rows(self, tiles: Tensor, offset: int) -> Tensor:
        """Row of each element of query tiles, int64 [T, B], -1 for elements that are not selected."""
        axis, pairs = self.source.queries, self.pairs
        rows = pairs.queries.tile_rows(axis, tiles, offset, self.size)
        if pairs.first_query:
            rows.masked_fill_(self._tokens(axis, tiles, offset) < pairs.first_query, -1)
        return rows

    def _keys_selected(self, tiles: Tensor, offset: int) -> Tensor:
        """Elements of key tiles that exist and are selected, bool [T, B]."""
        axis, pairs = self.source.keys, self.pairs
        if pairs.keys is not None:
            selected = pairs.keys.tile_rows(axis, tiles, offset, self.size) >= 0
        else:
            count = -(-(axis.end[tiles] - axis.start[tiles] - offset) // axis.rate)
            selected = torch.arange(self.size, device="cpu") < count[:, None]
        if pairs.other_keys is not None:
            selected &= pairs.other_keys.tile_rows(axis, tiles, offset, self.size) < 0
        if pairs.key_range is not None:
            token = self._tokens(axis, tiles, offset)
            selected &= (token >= pairs.key_range[0]) & (token < pairs.key_range[1])
        return selected

    def _meetings(self, kind: _Kind, query: Tensor, tile: Tensor, mask: Tensor) -> _Meetings:
        own = self.rows[kind] >= 0
        row = torch.searchsorted(self.tiles, query)
        row, alive = row.clamp(max=max(len(self.tiles) - 1, 0)), row < len(self.tiles)
        if len(self.tiles):
            alive &= (self.tiles[row] == query) & own.any(1)[row]
        row, tile, mask = row[alive], tile[alive], mask[alive]
        tiles, which = torch.unique(tile, return_inverse=True)
        selected = self._keys_selected(tiles, kind.key_offset)
        keep = selected.any(1)[which]
        whole = torch.zeros(len(tiles), dtype=torch.bool, device="cpu")
        whole[which[mask < 0]] = True
        needed = selected & whole[:, None]
        partial = ((mask >= 0) & keep).nonzero()[:, 0]
        if len(partial):
            shapes, shape = _distinct(own)
            code, case = torch.unique(mask[partial] * len(shapes) + shape[row[partial]], return_inverse=True)
            seen = torch.cat(
                [
                    (self.masks.dense(some // len(shapes)) & shapes[some % len(shapes)][:, :, None]).any(1)
                    for some in code.split(256)
                ]
            )[case]
            seen &= selected[which[partial]]
            keep[partial] = seen.any(1)
            needed |= torch.zeros_like(needed, dtype=torch.int32).index_add_(0, which[partial], seen.int()).bool()
        row, tile, mask, which = row[keep], tile[keep], mask[keep], which[keep]
        met = needed.any(1)
        return _Meetings(row, tile, self.masks.cut(mask, selected, which), tiles[met], needed[met])

    def write_queries(self, rows: Tensor) -> None:
        """Write the rows of the query buffer, int32 [H, n], from its first row on."""
        for head, kind in enumerate(self.kind_of):
            if kind is not None:
                rows[head, : self.query_length] = self.rows[kind].flatten()

    def write_keys(self, tokens: Tensor) -> None:
        """Write the tokens of the key buffer, int64 [G, n], from its first row on: keys that some query sees."""
        cache: dict[frozenset[_Kind], Tensor] = {}
        for group, residues in enumerate(self.slots):
            kinds = self.kind_of[group * self.shared : (group + 1) * self.shared]
            for slot, residue in enumerate(residues):
                seeing = frozenset(kind for kind in kinds if kind is not None and kind.key_offset == residue)
                if seeing not in cache:
                    needed = torch.zeros(len(self.key_tiles), self.size, dtype=torch.bool, device="cpu")
                    for kind in seeing:
                        met = self.met[kind]
                        needed[torch.searchsorted(self.key_tiles, met.tiles)] |= met.needed
                    token = self._tokens(self.source.keys, self.key_tiles, residue)
                    cache[seeing] = token.masked_fill_(~needed, -1).flatten()
                tokens[group, slot * self.slot_length : (slot + 1) * self.slot_length] = cache[seeing]

    def over_buffers(self, query_base: int, key_base: int, n: int) -> Part:
        """The part over buffer rows. Every row of a buffer exists; masks exclude filler."""
        rows, columns = (torch.arange(len(tiles), device="cpu") for tiles in (self.tiles, self.key_tiles))
        walks: list[tuple[Walk, Walk]] = []
        distinct: list[_Kind] = []
        class_of: dict[_Kind | None, int] = {None: -1}
        for kind in self.kinds:
            row, tile, mask, *_ = self.met[kind]
            # Kinds that differ in their residues only have equal lists, and share them.
            twin = next((one for one in distinct if _same(self.met[one], self.met[kind])), None)
            class_of[kind] = len(distinct) if twin is None else class_of[twin]
            if twin is None:
                distinct.append(kind)
                tile = torch.searchsorted(self.key_tiles, tile)
                walks.append(
                    _both_walks(row, tile, mask, *((base, torch.zeros_like(base)) for base in (rows, columns)))
                )
        slots = [
            0 if kind is None else self.slots[head // self.shared].index(kind.key_offset) * self.slot_length
            for head, kind in enumerate(self.kind_of)
        ]
        queries, keys = (
            Axis(1, torch.tensor(offset, dtype=torch.int32, device="cpu"), start, torch.full_like(start, n))
            for offset, start in (
                ([0] * len(slots), query_base + rows * self.size),
                (slots, key_base + columns * self.size),
            )
        )
        classes = torch.tensor([class_of[kind] for kind in self.kind_of], dtype=torch.int32, device="cpu")
        by_query, by_key = (join_walks([*side]) for side in zip(*walks, strict=True))
        return Part(queries, keys, classes, by_query, by_key)


def _same(one: _Meetings, other: _Meetings) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))


def _both_walks(
    query: Tensor, key: Tensor, mask: Tensor, query_bases: tuple[Tensor, ...], key_bases: tuple[Tensor, ...]
) -> tuple[Walk, Walk]:
    """Walks by query and by key of entries ordered by query tile."""
    order = torch.argsort(key, stable=True)
    return (
        build_walk(query, key, mask, query_bases),
        build_walk(key[order], query[order], mask[order], key_bases),
    )


def _distinct(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows of bool [T, B], and the index of each row among them; sorts only rows that are not all True."""
    ragged = ~flags.all(1)
    full = torch.ones(1, flags.shape[1], dtype=torch.bool, device="cpu")
    shapes, index = torch.unique(torch.cat([full, flags[ragged]]), dim=0, return_inverse=True)
    which = torch.full((len(flags),), int(index[0]), dtype=torch.int64, device="cpu")
    which[ragged] = index[1:]
    return shapes, which


class _CutMasks:
    """Masks of a cut: masks of the plan without keys that are not selected, each stored once."""

    def __init__(self, plan: Plan) -> None:
        self.bits, self.size = plan.masks.bits, plan.block_size
        self.table = MaskTable(plan.block_size, plan.device)
        self.cache: dict[tuple[int, bytes], int] = {}

    def dense(self, mask: Tensor) -> Tensor:
        """Masks of the plan written out, bool [., B, B]; -1 allows all."""
        bits = self.bits[mask.clamp(min=0)]
        return Masks(bits, bits).dense(self.size) | (mask < 0)[:, None, None]

    def cut(self, mask: Tensor, selected: Tensor, which: Tensor) -> Tensor:
        """Indices of masks of the plan cut to the keys `selected[which]`; -1 for whole tiles."""
        result = torch.full_like(mask, -1)
        slots = ((mask >= 0) | ~selected.all(1)[which]).nonzero()[:, 0]
        if not len(slots):
            return result
        shapes, shape = _distinct(selected)
        code, case = torch.unique((mask[slots] + 1) * len(shapes) + shape[which[slots]], return_inverse=True)
        names = [bytes(row) for row in shapes.to(torch.uint8).tolist()]
        keys = [(one // len(shapes) - 1, names[one % len(shapes)]) for one in code.tolist()]
        new = torch.tensor([i for i, key in enumerate(keys) if key not in self.cache], dtype=torch.int64, device="cpu")
        for some in new.split(256):
            allowed = self.dense(code[some] // len(shapes) - 1) & shapes[code[some] % len(shapes)][:, None, :]
            self.cache.update(zip((keys[i] for i in some.tolist()), self.table.add(allowed).tolist(), strict=True))
        result[slots] = torch.tensor([self.cache[key] for key in keys], device="cpu")[case]
        return result


def local_plan(plan: Plan, shard: TokenRuns, rows: int, first_query: int = 0) -> Plan:
    """Plan of the pairs whose tiles both lie in a run of a shard, on the shard itself, without copies.

    Args:
        plan: a plan of the whole sequence, on the CPU.
        shard: tokens of the shard.
        rows: number of its tokens.
        first_query: leave out query tiles that start before this token.
    """
    parts, blocks = [], 0
    for part in plan.parts:
        sides = []
        for axis, least in ((part.queries, first_query), (part.keys, 0)):
            local, shift = shard.holds(axis, plan.block_size)
            local &= axis.start >= least
            start, end = (axis.start - shift)[local], (axis.end - shift)[local].clamp(max=rows)
            sides.append((local, local.long().cumsum(0) - 1, replace(axis, start=start, end=end)))
        (query_local, query_index, queries), (key_local, key_index, keys) = sides
        row, tile, mask = part.by_query.entries()
        keep = query_local[row % part.queries.tiles] & key_local[tile]
        row, tile, mask = row[keep], tile[keep], mask[keep]
        if not len(row):
            continue
        kind, query, key = row // part.queries.tiles, query_index[row % part.queries.tiles], key_index[tile]
        # Tiles of one segment end together: lists count from the first of them, or from the tile's own number.
        bases = [
            (torch.searchsorted(other.end, own.end), torch.arange(own.tiles, device="cpu"))
            for own, other in ((queries, keys), (keys, queries))
        ]
        classes = range(len(part.by_query.rows) // part.queries.tiles)
        walks = [_both_walks(query[kind == c], key[kind == c], mask[kind == c], *bases) for c in classes]
        by_query, by_key = (join_walks([*side]) for side in zip(*walks, strict=True))
        parts.append(Part(queries, keys, part.head_class, by_query, by_key))
        heads = torch.bincount(part.head_class[part.head_class >= 0], minlength=len(classes))
        blocks += int(heads[kind].sum())
    return replace(plan, n=rows, parts=tuple(parts), blocks=blocks)
