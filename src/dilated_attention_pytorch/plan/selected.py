"""Plans from block lists that a tensor holds: chosen anew in every step, for every sample and head.

Nothing here reads a value back to the host on a GPU: list lengths live in the tables, storage has the size the shapes
allow. Samples lie one after another on one token axis, as packed documents do, and every head is a class of its own.

Shapes: b batch, h heads, n tokens, t blocks of a sample, r rows (t or n), k listed blocks, B block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .plan import Axis, Masks, Part, Plan, Walk
from .walks import start_order

WHOLE, TRIANGLE = 0, 1
"""Element masks: all pairs, and those with the key not after the query."""


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

    def density(self) -> Tensor:
        """Blocks seen over blocks that dense attention sees, a scalar tensor."""
        t, near, first = self.blocks, self.local_blocks, self.sink_blocks
        own = self.row_blocks()
        seen = own.clamp(max=near - 1) + 1 + (own - near + 1).clamp(min=0, max=first)
        if not self.is_causal:
            seen += (t - 1 - own).clamp(max=near - 1) + (min(first, t) - own - near).clamp(min=0)
        dense = (own + 1 if self.is_causal else torch.full_like(own, t)).sum()
        return (seen.sum() + self.counts.sum(-1).double().mean()) / dense


def shared_blocks(own: Tensor, blocks: int, local: int, sink: int, is_causal: bool) -> Tensor:
    """Which blocks rows in the blocks `own` see without being listed, bool (r, t)."""
    column = torch.arange(blocks, device=own.device)
    seen = ((own[:, None] - column).abs() < local) | (column < sink)
    return seen & (column <= own[:, None]) if is_causal else seen


@lru_cache(maxsize=64)
def _shared_lists(blocks: int, local: int, sink: int, is_causal: bool, device: torch.device) -> Tensor:
    """The same as lists, int64 (t, s), -1 where a row has fewer."""
    own = torch.arange(blocks)[:, None]
    near = own + torch.arange(1 - local, 1 if is_causal else local)
    first = torch.arange(min(sink, blocks)).expand(blocks, -1)
    first = torch.where((own - first).abs() < local, -1, first)
    lists = torch.cat([near, first], 1)
    outside = (lists < 0) | (lists >= blocks) | (is_causal & (lists > own))
    return lists.masked_fill(outside, -1).to(device)


@lru_cache(maxsize=64)
def _masks(block_size: int, device: torch.device) -> Masks:
    element = torch.arange(block_size)
    dense = torch.stack([torch.ones(block_size, block_size, dtype=torch.bool), element <= element[:, None]])
    words = -(-block_size // 32)
    bits = torch.nn.functional.pad(dense, (0, 32 * words - block_size)).unflatten(-1, (words, 32)).long()
    packed = (bits << torch.arange(32)).sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    band = torch.tensor([[1 - block_size, block_size - 1], [1 - block_size, 0]], dtype=torch.int32)
    return Masks(packed.to(device), band.to(device))


@lru_cache(maxsize=64)
def _token_axis(batch: int, n: int, heads: int, block_size: int, device: torch.device) -> Axis:
    """Samples of n tokens one after another."""
    first = torch.arange(batch)[:, None] * n
    start = first + torch.arange(0, n, block_size)
    end = (first + n).expand_as(start)
    offset = torch.zeros(heads, dtype=torch.int32, device=device)
    return Axis(1, offset, start.flatten().to(device), end.flatten().to(device))


def block_plan(selection: Selection) -> Plan:
    """The plan of a selection by query blocks, for (1, h, b * n, d): samples one after another."""
    batch, heads, t, _ = selection.indices.shape
    device, size = selection.indices.device, selection.block_size
    tiles, ragged = batch * t, selection.n % size > 0
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
    axis = _token_axis(batch, selection.n, heads, size, device)
    classes = torch.arange(heads, dtype=torch.int32, device=device)
    part = Part(axis, axis, classes, *walks)
    # On a GPU the exact number would have to be waited for.
    blocks = lists.numel() if device.type == "cuda" else int(listed.sum())
    return Plan("learned", batch * selection.n, heads, size, (part,), _masks(size, device), blocks)


def _walk(row: Tensor, tile: Tensor, mask: Tensor | None, listed: Tensor, rows: int) -> Walk:
    """Meetings in any order as a walk, every list stored on its own; those not listed are sorted past the last row."""
    row, tile, listed = row.flatten(), tile.flatten(), listed.flatten()
    some = torch.zeros_like(row) if mask is None else (mask.flatten() >= 0).long()
    place = torch.where(listed, 2 * row + some, 2 * rows)
    place, order = place.sort(stable=True)
    bounds = torch.searchsorted(place, torch.arange(2 * rows + 1, device=row.device)).int()
    begin, middle, end = bounds[:-1:2], bounds[1::2], bounds[2::2]
    nothing = torch.zeros_like(begin)
    table = torch.stack([begin, middle, nothing, middle, end, nothing], 1)
    stored = tile[order].int()
    if mask is None:
        return Walk(table, stored, stored[:0], stored[:0], start_order(table))
    # One memory serves both kinds, as two tensors: within a row, tiles met whole come first.
    return Walk(table, stored, stored.view_as(stored), mask.flatten()[order].clamp(min=0).int(), start_order(table))


@dataclass(frozen=True, eq=False, slots=True)
class Gathered:
    """Queries laid out by the block they chose, in tiles that meet one key tile each."""

    plan: Plan
    """For (1, h, rows, d) gathered queries on (1, h, b * n, d) keys"""
    source: Tensor
    """int64 (h, rows): the token, counted over samples, that each gathered row is a copy of; -1 where it is filler"""
    place: Tensor
    """int64 (h, b * n, k): the gathered row of each listed choice; `rows` where nothing is listed"""


def token_plan(selection: Selection) -> Gathered:
    """The plan of a selection by tokens, without what all rows share: a key tile streams the queries that chose it.

    Tokens that choose differently share no tiles, so the union of a query tile's choices would save nothing.
    """
    batch, heads, n, k = selection.indices.shape
    device, size, t = selection.indices.device, selection.block_size, selection.blocks
    key_tiles = batch * t
    chosen = selection.indices.transpose(0, 1).long()
    first_tile = torch.arange(batch, device=device)[:, None, None] * t
    tile = torch.where(chosen < t, chosen + first_tile, key_tiles).reshape(heads, -1)
    ordered, order = tile.sort(dim=1, stable=True)
    edges = torch.arange(key_tiles + 1, device=device).expand(heads, -1).contiguous()
    begin = torch.searchsorted(ordered, edges)
    tiles_of = -(-begin.diff(dim=1) // size)
    last = tiles_of.cumsum(1)
    first = last - tiles_of
    room = tile.shape[1] // size + min(key_tiles, tile.shape[1])
    query_tiles = max(room if device.type == "cuda" else int(last[:, -1].max()), 1)
    rows = query_tiles * size

    # A choice lies as far into its tile's run as it comes after the first that chose the same tile.
    within = torch.arange(tile.shape[1], device=device) - begin.gather(1, ordered)
    run = torch.nn.functional.pad(first * size, (0, 1), value=rows)
    spot = torch.where(ordered < key_tiles, run.gather(1, ordered) + within, rows)
    place = torch.empty_like(spot).scatter_(1, order, spot)
    source = torch.full((heads, rows + 1), -1, dtype=torch.int64, device=device)
    source.scatter_(1, spot, order // k)

    streamed = torch.arange(query_tiles, device=device).expand(heads, -1).contiguous()
    met = torch.searchsorted(last, streamed, right=True)
    used = (met < key_tiles).long()
    part_met = used * ((met % t == t - 1) & (selection.n % size > 0))
    base, nothing = met.clamp(max=key_tiles - 1), torch.zeros_like(met)
    by_query = torch.stack([nothing, used - part_met, base, nothing, part_met, base], -1)
    nothing = torch.zeros_like(first)
    by_key = torch.stack([nothing, tiles_of, first, nothing, nothing, nothing], -1)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    tables = [table.flatten(0, 1).int() for table in (by_query, by_key)]
    part = Part(
        queries=_token_axis(1, rows, heads, size, device),
        keys=_token_axis(batch, n, heads, size, device),
        head_class=torch.arange(heads, dtype=torch.int32, device=device),
        by_query=Walk(tables[0], zero, zero.clone(), zero + WHOLE, start_order(tables[0])),
        by_key=Walk(tables[1], streamed[0].int(), zero[:0], zero[:0], start_order(tables[1])),
    )
    plan = Plan("learned by token", rows, heads, size, (part,), _masks(size, device), heads * query_tiles)
    return Gathered(plan, source[:, :-1], place.view(heads, batch * n, k))
