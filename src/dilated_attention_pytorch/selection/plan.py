"""Plans built from block lists in a tensor, selected anew in every step for every sample and head.

Without `host_sync` no value is read back from the device: list lengths live in the tables, and storage has the size
that shapes allow. Samples are concatenated on one token axis, as packed documents are, and every head is a class of its
own.

Shapes: b batch, h heads, n tokens, t blocks of a sample, r rows (t or n), k listed blocks, B block size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..plan.documents import interval_bits
from ..plan.plan import Axis, DeviceTables, Masks, Part, Plan, Walk
from ..plan.tile_lists import start_order
from .types import Gathered, GatherIndex, Selection

WHOLE, TRIANGLE, NOTHING = 0, 1, 2
"""Element masks: all pairs, pairs whose key does not follow the query, and no pair."""


@lru_cache(maxsize=64)
def _shared_lists(blocks: int, local: int, sink: int, is_causal: bool, device: torch.device) -> Tensor:
    """Shared blocks as lists, int64 (t, s), padded with -1; column `local - 1` is the row's own block, if any is."""
    own = torch.arange(blocks, device=device)[:, None]
    near = own + torch.arange(1 - local, max(1 if is_causal else local, 1 - local), device=device)
    first = torch.arange(min(sink, blocks), device=device).expand(blocks, -1)
    first = torch.where((own - first).abs() < local, -1, first)
    lists = torch.cat([near, first], 1)
    outside = (lists < 0) | (lists >= blocks) | (is_causal & (lists > own))
    return lists.masked_fill(outside, -1)


def _masks(block_size: int, device: torch.device) -> Masks:
    element = torch.arange(block_size, device=device)
    below = element <= element[:, None]
    dense = torch.stack([torch.ones_like(below), below, torch.zeros_like(below)])
    words = -(-block_size // 32)
    bits = torch.nn.functional.pad(dense, (0, 32 * words - block_size)).unflatten(-1, (words, 32)).long()
    packed = (bits << torch.arange(32, device=device)).sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    band = torch.full((3, 2), 1 - block_size, dtype=torch.int32, device=device)
    band[WHOLE, 1].fill_(block_size - 1)
    band[TRIANGLE, 1].zero_()
    band[NOTHING].fill_(block_size)
    return Masks(packed, band)


def _token_axis(batch: int, n: int, heads: int, block_size: int, device: torch.device) -> Axis:
    """Token axis of concatenated samples of n tokens."""
    first = torch.arange(batch, device=device)[:, None] * n
    start = first + torch.arange(0, n, block_size, device=device)
    end = (first + n).expand_as(start)
    offset = torch.zeros(heads, dtype=torch.int32, device=device)
    return Axis(1, offset, start.flatten(), end.flatten())


@lru_cache(maxsize=64)
def ground(batch: int, n: int, heads: int, block_size: int, device: torch.device) -> tuple[Axis, Tensor, Masks]:
    """Axis, head classes and masks of plans of one size."""
    classes = torch.arange(heads, dtype=torch.int32, device=device)
    return _token_axis(batch, n, heads, block_size, device), classes, _masks(block_size, device)


def plan_of(selection: Selection, by_query: Walk, by_key: Walk, blocks: int, group: int = 1) -> Plan:
    """Plan of a selection with the given walks, each for `group` heads."""
    batch, heads = selection.indices.shape[0], selection.heads
    n, size = selection.n, selection.block_size
    axis, classes, masks = ground(batch, n, heads, size, selection.indices.device)
    part = Part(axis, axis, classes if group == 1 else classes // group, by_query, by_key)
    return Plan("learned", batch * n, heads, size, (part,), masks, blocks)


def dense_plan(selection: Selection) -> Plan:
    """Plan without parts, with the sizes of a selection: the dense formula reads pairs instead of tiles."""
    tokens, masks = selection.indices.shape[0] * selection.n, _masks(selection.block_size, selection.indices.device)
    return Plan("selected", tokens, selection.heads, selection.block_size, (), masks, 0)


KINDS = 5
"""Element masks of a query block with bounds: first key block, others before, own, others after, last."""


def _bounded_masks(bounds: Tensor, size: int) -> Masks:
    """`KINDS` element masks for each query block, from the bounds of its rows."""
    low, high = torch.nn.functional.pad(bounds, (0, 0, 0, -len(bounds) % size)).T.unflatten(1, (-1, size))
    own = torch.arange(len(low), device=bounds.device)
    block = torch.stack([low[:, 0] // size, own - 1, own, own + 1, (high.amax(1) - 1) // size], 1)
    start = block[..., None] * size
    bits = interval_bits(low[:, None] - start, high[:, None] - start, size).flatten(0, 1)
    return _own_masks(bits)


def _own_masks(bits: Tensor) -> Masks:
    """Masks given by their bits: an empty band, 1 to 0, stands for each."""
    return Masks(bits, torch.arange(1, -1, -1, dtype=torch.int32, device=bits.device).repeat(len(bits), 1))


def _bounded_tiles(bounds: Tensor, size: int, lists: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """Mask of each listed key block of a query block, and whether every row sees the whole key block.

    Rows of one block belong to documents that follow each other. Only the first of them reaches back past the block and
    only the last ahead, so blocks strictly between the first one seen and the own one have a single mask.
    """
    low, high = bounds.T
    ends = ((block + 1) * size).clamp(max=len(bounds)) - 1
    first, last = low[block * size] // size, (high[ends] - 1) // size
    kind = torch.where(lists < block, (lists > first).long(), 3 + (lists >= last).long())
    kind = torch.where(lists == block, 2, kind)
    whole = (low[ends] <= lists * size) & (lists * size + size <= high[block * size])
    return block * KINDS + kind, whole


def block_plan(selection: Selection, host_sync: bool = True) -> Plan:
    """Plan of a selection by query blocks, for (1, h, b * n, d): samples concatenated."""
    batch, own_lists, t, _ = selection.indices.shape
    device = selection.indices.device
    tiles, ragged = batch * t, selection.n % selection.block_size > 0
    shared = _shared_lists(t, selection.local_blocks, selection.sink_blocks, selection.is_causal, device)
    lists = torch.cat([shared.expand(own_lists, batch, -1, -1), selection.indices.transpose(0, 1).long()], -1)
    block = torch.arange(t, device=device)[:, None].expand_as(lists)
    listed = (lists >= 0) & (lists < t)
    first_tile = torch.arange(batch, device=device)[:, None, None] * t
    first_row = torch.arange(own_lists, device=device)[:, None, None, None] * tiles
    query, key = block + first_tile, lists.clamp(0, t - 1) + first_tile
    own = torch.where(lists == block, TRIANGLE, -1) if selection.is_causal else torch.full_like(lists, -1)
    bounds, size = selection.bounds, selection.block_size
    whole_mask: Tensor | int = WHOLE
    if bounds is not None:
        whole_mask, whole = _bounded_tiles(bounds, size, lists, block)
        own = whole_mask.masked_fill(whole, -1)
    walks = []
    # By key, pairs of the last key block are masked, too: dQ accumulated by key tile adds products of all its rows.
    last_key = lists == t - 1
    for row, tile, cut in ((query, key, last_key), (key, query, last_key | (block == t - 1))):
        mask = own if not ragged else torch.where((own < 0) & cut, whole_mask, own)
        has_masks = ragged or selection.is_causal or bounds is not None
        walks.append(_walk(row + first_row, tile, mask if has_masks else None, listed, own_lists * tiles))
    by_query, by_key = [Walk(*walk, start_order(walk[0])) for walk in walks]
    blocks = int(listed.sum()) if host_sync else lists.numel()
    plan = plan_of(selection, by_query, by_key, blocks * selection.group, selection.group)
    if bounds is None:
        return plan
    tables = None if host_sync else DeviceTables(strided=False, ragged=ragged, bits=True)
    return replace(plan, masks=_bounded_masks(bounds, size), device_tables=tables)


def _walk(
    row: Tensor, tile: Tensor, mask: Tensor | None, listed: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Walk of pairs in any order, without its starting order.

    Every list is stored separately; unlisted pairs are sorted past the last row.
    """
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
        return table, stored, stored[:0], stored[:0]
    # Both kinds share one storage, as two tensors: within a row, whole tiles come first.
    masks = mask.flatten()[order].clamp(min=0).int()
    return table, stored, stored.view_as(stored), masks


def invert_selection(selection: Selection, group: int = 1, least: int = 0, host_sync: bool = True) -> GatherIndex:
    """Inverted index of a selection by tokens, or some of them: for each key tile the queries that chose it, by list.

    Tokens with different choices share no tiles, so the union of a query tile's choices would save nothing.

    Args:
        selection: by tokens.
        group: query heads of a key head.
        least: smallest number of rows of the index.
        host_sync: size the index by its content instead of by shapes.
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
    query_tiles = max(int(first[:, -1].max()) if host_sync else room, -(-least // size), 1)
    rows = query_tiles * size

    # Offset of a choice in the run of its tile: its rank among the choices of the same tile.
    within = torch.arange(tile.shape[1], device=device) - begin.gather(1, ordered)
    spot = torch.where(ordered < key_tiles, first.gather(1, ordered) * size + within, rows)
    place = torch.empty_like(spot).scatter_(1, by_tile, spot)
    # Unlisted entries go one past the last row of the last head.
    source = torch.full((heads * rows + 1,), -1, dtype=torch.int64, device=device)
    run = torch.arange(heads, device=device)[:, None] * rows
    source.scatter_(0, torch.where(spot < rows, spot + run, heads * rows).flatten(), (by_tile // k).flatten())
    streamed = torch.arange(query_tiles, device=device).expand(heads, -1).contiguous()
    met = torch.searchsorted(first[:, 1:].contiguous(), streamed, right=True)
    order = tiles_of.unflatten(0, (-1, group)).sum(1).argsort(dim=1, descending=True, stable=True)
    return GatherIndex(source[:-1].view(heads, rows), place.view(heads, batch * n, k), met, first, order)


def token_plan(selection: Selection, least: int = 0, host_sync: bool = True) -> Gathered:
    """Plan of the listed blocks of a selection by tokens, with `least` rows or more: key tiles stream queries.

    The lists may be those of some tokens only; they are counted from the first of them.
    """
    batch, n, heads, group = len(selection.indices), selection.n, selection.heads, selection.group
    device, size, t = selection.indices.device, selection.block_size, selection.blocks
    source, place, met, first, _ = invert_selection(selection, least=least, host_sync=host_sync)
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
    keys, classes, masks = ground(batch, n, heads, size, device)
    part = Part(
        queries=_token_axis(1, rows, heads, size, device),
        keys=keys,
        head_class=classes if group == 1 else classes // group,
        by_query=Walk(tables[0], zero, zero.clone(), zero + WHOLE, start_order(tables[0])),
        by_key=Walk(tables[1], streamed, zero[:0], zero[:0], start_order(tables[1])),
    )
    plan = Plan("learned by token", rows, heads, size, (part,), masks, met.numel() * group)
    if selection.bounds is not None:
        plan = _bounded_token_plan(plan, selection.bounds, source, used, base, first)
    return Gathered(plan, source, place)


def _bounded_token_plan(plan: Plan, bounds: Tensor, source: Tensor, used: Tensor, base: Tensor, first: Tensor) -> Plan:
    """A plan of gathered queries with an element mask for each of their tiles.

    Args:
        plan: of queries that see whole blocks.
        bounds: first key and end of the keys of each token.
        source: see `GatherIndex`, also for `first`.
        used: int64 (h, rows / B), 1 for tiles of queries that are not filler alone.
        base: (h, rows / B), key tile of each tile of queries.
    """
    (part,), size = plan.parts, plan.block_size
    low, high = bounds[source.clamp(min=0)].unbind(-1)
    start = base.repeat_interleave(size, 1, output_size=source.shape[1]) * size
    bits = interval_bits(low - start, high - start, size).unflatten(1, (-1, size)).flatten(0, 1)
    mask = torch.arange(used.numel(), dtype=torch.int32, device=source.device)
    begin, many = mask.view_as(used).long(), first.diff(dim=1)
    nothing, none = torch.zeros_like(begin), torch.zeros_like(many)
    by_query = torch.stack([nothing, nothing, nothing, begin, begin + used, base], -1).flatten(0, 1).int()
    begin = begin[:, :1] + first[:, :-1]
    by_key = torch.stack([none, none, none, begin, begin + many, none], -1).flatten(0, 1).int()
    part = replace(
        part,
        by_query=Walk(by_query, mask[:1], torch.zeros_like(mask), mask, part.by_query.order),
        by_key=Walk(by_key, mask[:1], mask % used.shape[1], mask, part.by_key.order),
    )
    return replace(plan, parts=(part,), masks=_own_masks(bits))
