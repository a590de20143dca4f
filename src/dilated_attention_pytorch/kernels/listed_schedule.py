"""Schedules of plans whose lists a tensor holds, for the GPU kernels, laid out without looking at a value.

A plan of positions is scheduled once and used for long, so its schedule may ask the device what it holds. A learned
plan lives for one call: its tables have the sizes that shapes allow, and what is not used says so in the table.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..plan.plan import (
    FULL_BASE,
    FULL_BEGIN,
    FULL_END,
    PARTIAL_BASE,
    PARTIAL_BEGIN,
    PARTIAL_END,
    Plan,
    Walk,
)
from . import hopper_work, triton_schedule
from .hopper_work import ITEM_ROWS, Ground, HeldWork, QueryWork, Step
from .registry import AttentionCall, Backend, choose
from .triton_schedule import PROGRAMS_PER_PROCESSOR, SHORTEST_PIECE, PartSchedule, Schedule, Side


def choose_listed(call: AttentionCall, backend: str, samples: int) -> tuple[str, Backend]:
    """`choose` for a plan of one part that lists blocks of samples laid one after another, every head for itself."""
    plan = call.plan
    ragged = plan.n // samples % plan.block_size > 0
    strided = ragged and samples > 1
    plain = not strided and (plan.block_size == ITEM_ROWS or not ragged)
    if plain:
        if plan not in hopper_work.known_steps:
            hopper_work.known_steps[plan] = (ListedStep(plan),)
    elif backend == "auto":
        # The Hopper kernels would have to be told which items exist.
        backend = "triton"
    name, chosen = choose(call, backend)
    group = call.query.shape[1] // call.key.shape[1]
    if name == "triton" and plan not in triton_schedule.known_schedules:
        triton_schedule.known_schedules[plan] = {group: _schedule(plan, group, strided, ragged)}
    return name, chosen


def _schedule(plan: Plan, group: int, strided: bool, ragged: bool) -> Schedule:
    """The schedule of such a plan for the Triton kernels."""
    (part,) = plan.parts
    device = plan.device
    head = torch.arange(plan.heads, dtype=torch.int32, device=device)
    nothing = torch.zeros_like(head)
    heads = torch.stack([head, head, nothing, nothing], 1)
    key_owners = torch.stack([head // group, head, nothing, nothing], 1)[::group].contiguous()
    by_query = _side(plan, part.by_query, part.queries.tiles, heads, None, mixed=False)
    entries = len(part.by_key.full) // plan.heads
    limit = None if group > 1 else _piece_length(plan, len(part.by_key.full))
    by_key = _side(plan, part.by_key, part.keys.tiles, key_owners, limit, mixed=group > 1, entries=entries)
    whole = PartSchedule(
        by_query=by_query,
        by_key=by_key,
        heads=heads,
        key_rows=part.by_key.rows,
        query_axis=torch.cat([part.queries.start, part.queries.end]),
        key_axis=torch.cat([part.keys.start, part.keys.end]),
        query_tiles=part.queries.tiles,
        key_tiles=part.keys.tiles,
        query_rate=1,
        key_rate=1,
        strided=strided,
        per_head=True,
        bounded=ragged,
    )
    return Schedule((whole,), (whole,), plan.masks.band, bits=False)


def _piece_length(plan: Plan, entries: int) -> int:
    """Entries above which a row is split, were every place in the lists used."""
    processors = 1
    if plan.device.type == "cuda":
        processors = torch.cuda.get_device_properties(plan.device).multi_processor_count
    return max(entries // (processors * PROGRAMS_PER_PROCESSOR), SHORTEST_PIECE // plan.block_size**2, 1)


def _side(
    plan: Plan, walk: Walk, tiles: int, owners: Tensor, limit: int | None, *, mixed: bool, entries: int = 0
) -> Side:
    """One direction; rows of more than `limit` of a head's `entries` are shared by several programs."""
    order = walk.order.long()
    row = order[torch.argsort(order // tiles, stable=True)]
    table = walk.rows[row].long().view(-1, tiles, 6)
    tile = (row % tiles).view(-1, tiles)
    more = 0 if limit is None else entries // limit
    if more and limit is not None:
        work, heavy = _split(table, tile, limit, more)
    else:
        work = torch.cat([tile[..., None], table, torch.full_like(tile, -1)[..., None]], -1)
        heavy = tile[..., :0, None].expand(-1, -1, 4)
    has_masks = len(walk.mask) > 0
    return Side(
        work=work.flatten(0, 1).int(),
        items=work.shape[1],
        owners=owners,
        heavy=heavy.flatten(0, 1).int(),
        heavy_rows=heavy.shape[1],
        slots=2 * more,
        # Both kinds of a listed walk lie in one memory, so the lists need be there but once.
        lists=torch.cat([walk.full, walk.mask]) if has_masks else walk.full,
        mask_shift=len(walk.full),
        partial=has_masks,
        mixed=mixed,
        covers=True,
    )


def _split(table: Tensor, tile: Tensor, limit: int, more: int) -> tuple[Tensor, Tensor]:
    """Work (C, T + more, 8) of rows (C, T, 6) in pieces of at most `limit` entries, and the long rows (C, more, 4).

    Entries beyond whole multiples of the limit are fewer than `more` pieces, and a long row has two pieces or more.
    """
    classes, tiles = tile.shape
    full = table[..., FULL_END] - table[..., FULL_BEGIN]
    total = full + table[..., PARTIAL_END] - table[..., PARTIAL_BEGIN]
    pieces = (-(-total // limit)).clamp(min=1)
    last = pieces.cumsum(1)
    split = torch.where(pieces > 1, pieces, 0)
    first_slot = split.cumsum(1) - split

    item = torch.arange(tiles + more, device=tile.device).expand(classes, -1).contiguous()
    at = torch.searchsorted(last, item, right=True)
    used, at = at < tiles, at.clamp(max=tiles - 1)
    of = {name: x.gather(1, at) for name, x in (("full", full), ("total", total), ("pieces", pieces))}
    piece = item - (last - pieces).gather(1, at)
    begin, end = ((piece + side) * of["total"] // of["pieces"] for side in (0, 1))
    row = table.gather(1, at[..., None].expand(-1, -1, 6))
    columns = [
        torch.where(used, tile.gather(1, at), -1),
        row[..., FULL_BEGIN] + torch.minimum(begin, of["full"]),
        row[..., FULL_BEGIN] + torch.minimum(end, of["full"]),
        row[..., FULL_BASE],
        row[..., PARTIAL_BEGIN] + (begin - of["full"]).clamp(min=0),
        row[..., PARTIAL_BEGIN] + (end - of["full"]).clamp(min=0),
        row[..., PARTIAL_BASE],
        torch.where(of["pieces"] > 1, first_slot.gather(1, at) + piece, -1),
    ]
    long = pieces > 1
    place = torch.where(long, long.cumsum(1) - 1, more)
    heavy = torch.full((classes, more + 1, 4), -1, dtype=torch.int64, device=tile.device)
    entry = torch.stack([tile, first_slot, pieces, torch.zeros_like(tile)], -1)
    heavy.scatter_(1, place[..., None].expand(-1, -1, 4), entry)
    return torch.stack(columns, -1), heavy[:, :-1]


class ListedStep(Step):
    """The part of such a plan as the Hopper kernels run it; every row meets its own tile, so every item has work."""

    def __init__(self, plan: Plan) -> None:
        ground = Ground(plan)
        # Both masks are bands, so nobody reads the bits.
        ground.transposed_bits = plan.masks.bits
        super().__init__(ground, plan.parts[0], strided=False)

    def _rows(self, walk: Walk, tiles: int) -> Tensor:
        """Tiles of each class in starting order, int64 (C, T)."""
        order = walk.order.long()
        return order[torch.argsort(order // tiles, stable=True)].view(-1, tiles) % tiles

    def _halves(self, block: Tensor) -> Tensor:
        """Tiles of 128 rows in those blocks, one dimension more."""
        halves = self.ground.block_size // ITEM_ROWS
        return block[..., None] * halves + torch.arange(halves, device=block.device)

    @cached_property
    def by_query(self) -> QueryWork:  # pyrefly: ignore[bad-override]
        """The forward's work list."""
        walk, tiles = self.part.by_query, self.part.queries.tiles
        block = self._rows(walk, tiles)
        tile = self._halves(block)
        table = walk.rows.long().view(-1, tiles, 6).gather(1, block[..., None].expand(-1, -1, 6))
        table = table[:, :, None].expand(-1, -1, tile.shape[2], -1)
        columns = (
            torch.arange(len(tile), device=tile.device)[:, None, None].expand_as(tile),
            tile,
            table[..., FULL_BEGIN],
            table[..., FULL_END] - table[..., FULL_BEGIN],
            table[..., FULL_BASE],
            table[..., PARTIAL_BEGIN],
            table[..., PARTIAL_END] - table[..., PARTIAL_BEGIN],
            table[..., PARTIAL_BASE],
        )
        items = torch.stack(columns, -1).flatten(0, 2)
        items = hopper_work.balanced(items, items[:, 3] + items[:, 6])
        table = hopper_work.tile_table(self.part.keys)
        return QueryWork(items, walk.full, self.ground.partial(walk), table, covers=True)

    def _held_work(self, group: int, by_key: bool) -> HeldWork:
        part, ground = self.part, self.ground
        walk, tiles = (part.by_key, part.keys.tiles) if by_key else (part.by_query, part.queries.tiles)
        partial = ground.partial(walk)
        if not by_key:
            # A band counts keys minus queries, and the kernel what is held minus what is streamed.
            partial[:, 2:] = -partial[:, 2:].flip(1)
        met = sum(walk.counts()).view(-1, group, tiles).sum(1)  # pyrefly: ignore[missing-attribute]
        # The heads of a group have lists of their own; the order of the last of them has to do for all.
        block = self._rows(walk, tiles)[group - 1 :: group]
        tile = self._halves(block)
        holder = torch.arange(len(block), device=block.device)[:, None, None].expand_as(tile)
        steps = met.gather(1, block)[..., None].expand_as(tile)
        items = torch.stack((holder, tile, steps, torch.zeros_like(tile)), -1).flatten(0, 2)
        items = hopper_work.balanced(items, items[:, 2].clamp(min=1))
        table = hopper_work.tile_table(part.queries if by_key else part.keys)
        bits = ground.masks.bits
        return HeldWork(items, part.head_class, walk.rows.contiguous(), walk.full, partial, table, bits)
