"""Plans from block lists that a tensor holds: chosen anew in every step, for every sample and head.

Nothing here reads a value back to the host on a GPU: list lengths live in the tables, storage has the size the shapes
allow. Samples lie one after another on one token axis, as packed documents do, and every head is a class of its own.

Shapes: b batch, h heads, n tokens, t blocks of a sample, r rows (t or n), k listed blocks, B block size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .plan import Axis, Masks, Part, Plan, Walk
from .walks import start_order

WHOLE, TRIANGLE = 0, 1
"""Element masks: all pairs, and those with the key not after the query."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many blocks a row keeps, its own and the forced ones counted."""

    kept: float
    """Fraction of the visible blocks."""
    coverage: float | None
    """Instead: as many as it takes for their predicted share of the attention to reach this."""
    least: int
    most: int | None

    def room(self, blocks: int) -> int:
        """The most a row can ever list beside its own block."""
        most = blocks if self.most is None else min(self.most, blocks)
        if self.coverage is None:
            most = min(most, max(self.least, round(self.kept * blocks), 1))
        return min(most, blocks) - 1

    def wanted(self, seen: Tensor) -> Tensor:
        """How many of that many visible blocks a row keeps by the fraction, int64."""
        return (self.kept * seen).round().long().clamp(min=self.least, max=self.most)


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """Which key blocks each row sees: its own, near ones and the first ones always, and those listed for it."""

    indices: Tensor
    """int32 (b, h, r, k): block numbers, ascending; what follows the row's count is t"""
    counts: Tensor
    """int32 (b, h, r)"""
    n: int
    block_size: int
    is_causal: bool
    per_token: bool
    """A row is a token; otherwise a block of queries."""
    local_blocks: int
    """Blocks nearer than this many are seen by every row; 1 is the row's own."""
    sink_blocks: int
    """The first blocks, seen by every row."""

    @property
    def blocks(self) -> int:
        return -(-self.n // self.block_size)

    def row_blocks(self) -> Tensor:
        """The block each row lies in, int64 (r)."""
        rows = torch.arange(self.indices.shape[2], device=self.indices.device)
        return rows // self.block_size if self.per_token else rows

    def shared(self) -> Tensor:
        """Which blocks a query block sees without being listed, bool (t, t)."""
        own = torch.arange(self.blocks, device=self.indices.device)
        return shared_blocks(own, self.blocks, self.local_blocks, self.sink_blocks, self.is_causal)

    def allowed(self) -> Tensor:
        """Which blocks each row sees, bool (b, h, r, t)."""
        listed = torch.zeros(*self.indices.shape[:3], self.blocks + 1, dtype=torch.bool, device=self.indices.device)
        listed.scatter_(-1, self.indices.long(), True)
        return listed[..., :-1] | self.shared()[self.row_blocks()]

    def without_lists(self) -> Selection:
        """The same with no room for lists: enough to count, in far less memory."""
        return replace(self, indices=self.counts[..., None][..., :0])

    def density(self) -> Tensor:
        """Blocks seen over blocks that dense attention sees, a scalar tensor."""
        batch, heads, rows, _ = self.indices.shape
        by_row = self.block_size if self.per_token else 1
        shared, dense = _counted(rows, by_row, self.blocks, self.local_blocks, self.sink_blocks, self.is_causal)
        return (self.counts.sum(dtype=torch.float64) / (batch * heads) + shared) / dense


@lru_cache(maxsize=256)
def _counted(rows: int, by_row: int, blocks: int, local: int, sink: int, is_causal: bool) -> tuple[int, int]:
    """Blocks that all rows see without being listed, and that dense attention sees; `by_row` rows share a block."""
    shared = dense = 0
    for own in range(blocks):
        many = min(by_row, rows - own * by_row)
        seen = min(own, local - 1) + 1 + min(max(own - local + 1, 0), sink)
        if not is_causal:
            seen += min(blocks - 1 - own, local - 1) + max(min(sink, blocks) - own - local, 0)
        shared += many * seen
        dense += many * (own + 1 if is_causal else blocks)
    return shared, dense


def shared_blocks(own: Tensor, blocks: int, local: int, sink: int, is_causal: bool) -> Tensor:
    """Which blocks rows in the blocks `own` see without being listed, bool (r, t)."""
    column = torch.arange(blocks, device=own.device)
    seen = ((own[:, None] - column).abs() < local) | (column < sink)
    return seen & (column <= own[:, None]) if is_causal else seen


def may_read(device: torch.device) -> bool:
    """Whether the host may look at what a device computed: a GPU would have to be waited for."""
    return device.type != "cuda"


@lru_cache(maxsize=64)
def _shared_lists(blocks: int, local: int, sink: int, is_causal: bool, device: torch.device) -> Tensor:
    """The same as lists, int64 (t, s), -1 where a row has fewer; column `local - 1` is the row's own."""
    own = torch.arange(blocks, device=device)[:, None]
    near = own + torch.arange(1 - local, 1 if is_causal else local, device=device)
    first = torch.arange(min(sink, blocks), device=device).expand(blocks, -1)
    first = torch.where((own - first).abs() < local, -1, first)
    lists = torch.cat([near, first], 1)
    outside = (lists < 0) | (lists >= blocks) | (is_causal & (lists > own))
    return lists.masked_fill(outside, -1)


@lru_cache(maxsize=64)
def _masks(block_size: int, device: torch.device) -> Masks:
    element = torch.arange(block_size, device=device)
    below = element <= element[:, None]
    dense = torch.stack([torch.ones_like(below), below])
    words = -(-block_size // 32)
    bits = torch.nn.functional.pad(dense, (0, 32 * words - block_size)).unflatten(-1, (words, 32)).long()
    packed = (bits << torch.arange(32, device=device)).sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    band = torch.full((2, 2), 1 - block_size, dtype=torch.int32, device=device)
    band[WHOLE, 1].fill_(block_size - 1)
    band[TRIANGLE, 1].zero_()
    return Masks(packed, band)


@lru_cache(maxsize=64)
def _token_axis(batch: int, n: int, heads: int, block_size: int, device: torch.device) -> Axis:
    """Samples of n tokens one after another."""
    first = torch.arange(batch, device=device)[:, None] * n
    start = first + torch.arange(0, n, block_size, device=device)
    end = (first + n).expand_as(start)
    offset = torch.zeros(heads, dtype=torch.int32, device=device)
    return Axis(1, offset, start.flatten(), end.flatten())


@lru_cache(maxsize=64)
def _ground(batch: int, n: int, heads: int, block_size: int, device: torch.device) -> tuple[Axis, Tensor, Masks]:
    """What plans of some sizes have in common: axis, head classes and masks."""
    classes = torch.arange(heads, dtype=torch.int32, device=device)
    return _token_axis(batch, n, heads, block_size, device), classes, _masks(block_size, device)


def plan_of(selection: Selection, by_query: Walk, by_key: Walk, blocks: int) -> Plan:
    """The plan of those walks."""
    batch, heads = selection.indices.shape[:2]
    n, size = selection.n, selection.block_size
    axis, classes, masks = _ground(batch, n, heads, size, selection.indices.device)
    part = Part(axis, axis, classes, by_query, by_key)
    return Plan("learned", batch * n, heads, size, (part,), masks, blocks)


def block_plan(selection: Selection) -> Plan:
    """The plan of a selection by query blocks, for (1, h, b * n, d): samples one after another."""
    batch, heads, t, _ = selection.indices.shape
    device = selection.indices.device
    tiles, ragged = batch * t, selection.n % selection.block_size > 0
    shared = _shared_lists(t, selection.local_blocks, selection.sink_blocks, selection.is_causal, device)
    lists = torch.cat([shared.expand(heads, batch, -1, -1), selection.indices.transpose(0, 1).long()], -1)
    block = torch.arange(t, device=device)[:, None].expand_as(lists)
    listed = (lists >= 0) & (lists < t)
    first_tile = torch.arange(batch, device=device)[:, None, None] * t
    head = torch.arange(heads, device=device)[:, None, None, None]
    query, key = block + first_tile, lists.clamp(0, t - 1) + first_tile
    own = torch.where(lists == block, TRIANGLE, -1) if selection.is_causal else torch.full_like(lists, -1)
    walks = []
    for row, tile, streamed in ((query, key, lists), (key, query, block)):
        mask = own if not ragged else torch.where((own < 0) & (streamed == t - 1), WHOLE, own)
        has_masks = ragged or selection.is_causal
        walks.append(_walk(row + head * tiles, tile, mask if has_masks else None, listed, heads * tiles))
    blocks = int(listed.sum()) if may_read(device) else lists.numel()
    return plan_of(selection, walks[0], walks[1], blocks)


def _walk(row: Tensor, tile: Tensor, mask: Tensor | None, listed: Tensor, rows: int) -> Walk:
    """Meetings in any order as a walk, every list stored on its own; those not listed are sorted past the last row."""
    row, tile, listed = row.flatten(), tile.flatten(), listed.flatten()
    some = torch.zeros_like(row) if mask is None else (mask.flatten() >= 0).long()
    # A sort takes as many passes as its keys have bytes.
    place = torch.where(listed, 2 * row + some, 2 * rows).int()
    place, order = place.sort(stable=True)
    edges = torch.arange(2 * rows + 1, dtype=torch.int32, device=row.device)
    bounds = torch.searchsorted(place, edges, out_int32=True)
    begin, middle, end = bounds[:-1:2], bounds[1::2], bounds[2::2]
    nothing = torch.zeros_like(begin)
    table = torch.stack([begin, middle, nothing, middle, end, nothing], 1)
    stored = tile[order].int()
    if mask is None:
        return Walk(table, stored, stored[:0], stored[:0], start_order(table))
    # One memory serves both kinds, as two tensors: within a row, tiles met whole come first.
    masks = mask.flatten()[order].clamp(min=0).int()
    return Walk(table, stored, stored.view_as(stored), masks, start_order(table))


class Chosen(NamedTuple):
    """Queries laid out by the block they chose, in tiles of the block size that meet one key tile each.

    Key tiles count over samples, as tokens do: t blocks, or n tokens, of one sample after another. All int64, or all
    int32.
    """

    source: Tensor
    """(h, rows): the token that each row is a copy of; -1 where it is filler, or anything in tiles of nothing else"""
    place: Tensor
    """(h, b * n, k): the row of each listed choice; `rows` where nothing is listed"""
    tile: Tensor
    """(h, rows / B): the key tile that each tile of queries meets; b * t where it holds nothing but filler"""
    first: Tensor
    """(h, b * t + 1): the first tile of queries of each key tile, and where the last one ends"""
    order: Tensor
    """(g, b * t): key tiles of each key head in starting order, those with most tiles of queries first"""


def chosen_tokens(selection: Selection, group: int = 1, least: int = 0) -> Chosen:
    """The choices of a selection by tokens, turned round: for a key tile the queries that chose it.

    Tokens that choose differently share no tiles, so the union of a query tile's choices would save nothing. Key heads
    are each read by `group` query heads. There are `least` rows or more.
    """
    batch, heads, n, k = selection.indices.shape
    device, size, t = selection.indices.device, selection.block_size, selection.blocks
    key_tiles = batch * t
    chosen = selection.indices.transpose(0, 1).long()
    first_tile = torch.arange(batch, device=device)[:, None, None] * t
    tile = torch.where(chosen < t, chosen + first_tile, key_tiles).reshape(heads, -1)
    # A sort takes as many passes as its keys have bytes.
    narrow = tile.short() if key_tiles < 2**15 else tile.int()
    by_tile = narrow.sort(dim=1, stable=True).indices
    ordered = tile.gather(1, by_tile)
    edges = torch.arange(key_tiles + 1, device=device).expand(heads, -1).contiguous()
    begin = torch.searchsorted(ordered, edges)
    tiles_of = -(-begin.diff(dim=1) // size)
    first = torch.nn.functional.pad(tiles_of.cumsum(1), (1, 0))
    room = tile.shape[1] // size + min(key_tiles, tile.shape[1])
    query_tiles = max(int(first[:, -1].max()) if may_read(device) else room, -(-least // size), 1)
    rows = query_tiles * size

    # A choice lies as far into its tile's run as it comes after the first that chose the same tile.
    within = torch.arange(tile.shape[1], device=device) - begin.gather(1, ordered)
    spot = torch.where(ordered < key_tiles, first.gather(1, ordered) * size + within, rows)
    place = torch.empty_like(spot).scatter_(1, by_tile, spot)
    # One place past the last row of the last head takes what is not listed.
    source = torch.full((heads * rows + 1,), -1, dtype=torch.int64, device=device)
    run = torch.arange(heads, device=device)[:, None] * rows
    source.scatter_(0, torch.where(spot < rows, spot + run, heads * rows).flatten(), (by_tile // k).flatten())
    streamed = torch.arange(query_tiles, device=device).expand(heads, -1).contiguous()
    met = torch.searchsorted(first[:, 1:].contiguous(), streamed, right=True)
    order = tiles_of.unflatten(0, (-1, group)).sum(1).argsort(dim=1, descending=True, stable=True)
    return Chosen(source[:-1].view(heads, rows), place.view(heads, batch * n, k), met, first, order)


@dataclass(frozen=True, eq=False, slots=True)
class Gathered:
    """Chosen queries as a plan."""

    plan: Plan
    """For (1, h, rows, d) gathered queries on (1, h, b * n, d) keys"""
    source: Tensor
    """See `Chosen`."""
    place: Tensor


def token_plan(selection: Selection, least: int = 0) -> Gathered:
    """The plan of a selection by tokens, without what all rows share: a key tile streams the queries that chose it.

    It has `least` rows or more.
    """
    batch, heads, n, _ = selection.indices.shape
    device, size, t = selection.indices.device, selection.block_size, selection.blocks
    source, place, met, first, _ = chosen_tokens(selection, least=least)
    rows, key_tiles = source.shape[1], batch * t
    used = (met < key_tiles).long()
    part_met = used * ((met % t == t - 1) & (n % size > 0))
    base, nothing = met.clamp(max=key_tiles - 1), torch.zeros_like(met)
    by_query = torch.stack([nothing, used - part_met, base, nothing, part_met, base], -1)
    nothing = torch.zeros_like(first[:, :-1])
    by_key = torch.stack([nothing, first.diff(dim=1), first[:, :-1], nothing, nothing, nothing], -1)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    tables = [table.flatten(0, 1).int() for table in (by_query, by_key)]
    streamed = torch.arange(rows // size, dtype=torch.int32, device=device)
    part = Part(
        queries=_token_axis(1, rows, heads, size, device),
        keys=_token_axis(batch, n, heads, size, device),
        head_class=torch.arange(heads, dtype=torch.int32, device=device),
        by_query=Walk(tables[0], zero, zero.clone(), zero + WHOLE, start_order(tables[0])),
        by_key=Walk(tables[1], streamed, zero[:0], zero[:0], start_order(tables[1])),
    )
    plan = Plan("learned by token", rows, heads, size, (part,), _masks(size, device), met.numel())
    return Gathered(plan, source, place)
