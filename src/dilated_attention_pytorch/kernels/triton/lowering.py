"""Lowering of plans for the Triton kernels: work items of the programs in starting order; built once per plan.

Tables, all int32 unless said otherwise, with A owners (heads that take part), C head classes, I items a class:

    work    [C * I, 8]  stationary tile; begin, end and base of its whole tiles, then of its partial tiles; slot
    owners  [A, 4]      head, class, residue on the stationary axis, residue on the streamed axis
    lists   [L]         the walk's whole tiles, its partial tiles, and their masks
    heavy   [C * R, 4]  tile, first slot, pieces, 0: a row that is split over several programs
    masks   [M, 2 or more]  band; if some mask is not a band, also the words of every mask
    axes    int64 [2T]  start of every tile, then the end of its segment
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...plan.plan import PARTIAL_BEGIN, PARTIAL_END, Axis, Part, Plan, Walk
from ...plan.subset import head_entries, longest_row

SHORTEST_PIECE = 16 * 128 * 128
"""Element pairs below which joining a piece costs more than splitting saves."""
PROGRAMS_PER_PROCESSOR = 4
"""Target number of programs per multiprocessor when long rows are split."""


@dataclass(frozen=True, slots=True)
class WalkTables:
    """Tables of one direction of a part: rows of stationary tiles and the tiles that each streams."""

    work: Tensor
    items: int
    owners: Tensor
    lists: Tensor
    mask_shift: int
    """Distance in `lists` from a partial entry to its mask."""
    partial: bool
    mixed: bool = False
    """Whether query heads of a key head differ in class or residue, so that each looks up its own row."""
    covers: bool = True
    """Whether this part writes every row of every head."""
    heavy: Tensor | None = None
    """None if no row is split."""
    heavy_rows: int = 0
    slots: int = 0
    """Pieces of the split rows of an owner; 0 if no row is split."""


@dataclass(frozen=True, slots=True)
class PartSchedule:
    """Lowered part of a plan, for both directions."""

    by_query: WalkTables
    by_key: WalkTables
    heads: Tensor
    """int32 [H, 4]: `owners` of every head; class -1 for a head without work"""
    key_rows: Tensor
    """int32 [C * T, 6]: `Walk.rows` by key, with indices into `lists`."""
    query_axis: Tensor
    key_axis: Tensor
    query_tiles: int
    key_tiles: int
    query_rate: int
    key_rate: int
    strided: bool
    per_head: bool
    bounded: bool
    """Whether some tile reaches past the end of its segment."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Lowered plan for one number of query heads per key head. Parts that write every row come last."""

    by_query: tuple[PartSchedule, ...]
    by_key: tuple[PartSchedule, ...]
    masks: Tensor
    bits: bool
    """Whether some mask is not a band; then `masks` holds the words of each mask behind its band."""


def schedule(plan: Plan, group: int) -> Schedule:
    """Schedule of a plan for `group` query heads per key head; built on the first call."""
    cached = plan.memo.get(("triton schedule", group))
    build = _build if plan.device_tables is None else _build_unread
    return attach_schedule(plan, group, build(plan, group)) if cached is None else cached


def attach_schedule(plan: Plan, group: int, ready: Schedule) -> Schedule:
    """Attach a precomputed schedule to a plan and return the one in effect."""
    return plan.memo.setdefault(("triton schedule", group), ready)


def has_schedule(plan: Plan, group: int) -> bool:
    """Whether the schedule of a plan is there already."""
    return ("triton schedule", group) in plan.memo


def _build(plan: Plan, group: int) -> Schedule:
    parts = [_part(plan, part, group) for part in plan.parts]
    used = torch.cat([part.by_query.mask for part in plan.parts]) if parts else plan.masks.band.new_zeros(0)
    band = plan.masks.band[used]
    bits = bool((band[:, 0] > band[:, 1]).any())
    return Schedule(
        by_query=tuple(sorted(parts, key=lambda part: part.by_query.covers)),
        by_key=tuple(sorted(parts, key=lambda part: part.by_key.covers)),
        masks=torch.cat([plan.masks.band, plan.masks.bits.flatten(1)], dim=1) if bits else plan.masks.band.contiguous(),
        bits=bits,
    )


def _build_unread(plan: Plan, group: int) -> Schedule:
    """Schedule of a plan of one part that covers every row, without reading its tables: no row is split."""
    (part,), known = plan.parts, plan.device_tables
    assert known is not None
    name, apart = ("triton schedule", group), len(part.by_query.rows) > part.queries.tiles
    shared = known.memo.get(name) or known.memo.setdefault(name, _shared_tables(plan, part, group))
    heads, key_owners, masks, *lists = shared
    by_query, _ = _unread_side(part.by_query, part.queries.tiles, heads, lists[0], mixed=False)
    by_key, key_rows = _unread_side(part.by_key, part.keys.tiles, key_owners, lists[1], mixed=apart and group > 1)
    axes = torch.cat([part.queries.start, part.queries.end])
    whole = PartSchedule(
        by_query=by_query,
        by_key=by_key,
        heads=heads,
        key_rows=key_rows,
        query_axis=axes,
        key_axis=axes if part.keys is part.queries else torch.cat([part.keys.start, part.keys.end]),
        query_tiles=part.queries.tiles,
        key_tiles=part.keys.tiles,
        query_rate=1,
        key_rate=1,
        strided=known.strided,
        per_head=known.strided or apart,
        bounded=known.ragged,
    )
    return Schedule((whole,), (whole,), masks, known.bits)


def _shared_tables(plan: Plan, part: Part, group: int) -> tuple[Tensor, ...]:
    """Tables that do not depend on rows of walks: owners of both directions, masks, and lists of both."""
    head = torch.arange(plan.heads, dtype=torch.int32, device=plan.device)
    nothing, band, known = torch.zeros_like(head), plan.masks.band, plan.device_tables
    heads, keys = (torch.stack([x, part.head_class, nothing, nothing], 1) for x in (head, head // group))
    masks = torch.cat([band, plan.masks.bits.flatten(1)], 1) if known is None or known.bits else band.contiguous()
    return heads, keys[::group].contiguous(), masks, part.by_query.lists(), part.by_key.lists()


def _unread_side(walk: Walk, tiles: int, owners: Tensor, lists: Tensor, mixed: bool) -> tuple[WalkTables, Tensor]:
    rows, row = walk.rows, walk.order
    if walk.partial is not walk.full:
        rows = rows.clone()
        rows[:, PARTIAL_BEGIN : PARTIAL_END + 1] += len(walk.full)
    if len(rows) > tiles:
        row = row[torch.argsort(row // tiles, stable=True)]
    tile = row if len(rows) == tiles else row % tiles
    side = WalkTables(
        work=torch.cat([tile[:, None], rows.index_select(0, row), torch.full_like(tile, -1)[:, None]], 1),
        items=tiles,
        owners=owners,
        lists=lists,
        mask_shift=len(walk.partial),
        partial=len(walk.partial) > 0,
        mixed=mixed,
    )
    return side, rows


def _part(plan: Plan, part: Part, group: int) -> PartSchedule:
    block = plan.block_size
    classes = part.head_class.long()
    active = classes >= 0
    heads = torch.stack(
        [torch.arange(plan.heads, device=classes.device), classes, part.queries.offset.long(), part.keys.offset.long()],
        dim=1,
    )
    strided = not (_contiguous(part.queries, plan.n, block) and _contiguous(part.keys, plan.n, block))
    key_owners, mixed = _key_owners(heads, group)
    key_side, key_rows = _side(plan, part.by_key, part.keys, key_owners, plan.heads // group, mixed)
    query_side, _ = _side(plan, part.by_query, part.queries, heads[active], plan.heads, mixed=False)
    return PartSchedule(
        by_query=query_side,
        by_key=key_side,
        heads=heads.int(),
        key_rows=key_rows,
        query_axis=torch.cat([part.queries.start, part.queries.end]),
        key_axis=torch.cat([part.keys.start, part.keys.end]),
        query_tiles=part.queries.tiles,
        key_tiles=part.keys.tiles,
        query_rate=part.queries.rate,
        key_rate=part.keys.rate,
        strided=strided,
        per_head=strided or bool((classes != 0).any()),
        bounded=_ragged(part.queries, active, block) or _ragged(part.keys, active, block),
    )


def _contiguous(axis: Axis, n: int, block: int) -> bool:
    tiles = torch.arange(axis.tiles, device=axis.start.device)
    plain = (axis.start == tiles * block).all() & (axis.end == n).all() & (axis.offset == 0).all()
    return axis.rate == 1 and bool(plain)


def _ragged(axis: Axis, active: Tensor, block: int) -> bool:
    if not bool(active.any()):
        return False
    last = axis.start + axis.offset[active].max() + axis.rate * (block - 1)
    return bool((last >= axis.end).any())


def _key_owners(heads: Tensor, group: int) -> tuple[Tensor, bool]:
    """Pairs of key head and residue that some query head reads, [A, 4], and whether groups are mixed."""
    grouped = heads.view(-1, group, 4)
    mixed = bool((grouped[:, :, 1:] != grouped[:, :1, 1:]).any())
    active = heads[heads[:, 1] >= 0]
    owners = torch.stack([active[:, 0] // group, active[:, 1], active[:, 3], active[:, 2]], dim=1)
    pair = owners[:, 0] * (int(owners[:, 2].max()) + 1 if len(owners) else 1) + owners[:, 2]
    # The sort is stable, so the first head of each pair comes first in its run.
    pair, at = pair.sort(stable=True)
    first = torch.ones_like(pair, dtype=torch.bool)
    first[1:] = pair[1:] != pair[:-1]
    return owners[at[first]], mixed


def _side(plan: Plan, walk: Walk, axis: Axis, owners: Tensor, heads: int, mixed: bool) -> tuple[WalkTables, Tensor]:
    full = len(walk.full)
    rows = walk.rows.clone()
    rows[:, [PARTIAL_BEGIN, PARTIAL_END]] += full
    # A mixed key head joins rows of several classes, so no single row gives the length of its work.
    limit = None if mixed else _piece_length(plan, walk, axis.tiles, owners)
    work, items, heavy, heavy_rows, slots = split_rows(rows, walk.order.long(), axis.tiles, limit)
    side = WalkTables(
        work=work,
        items=items,
        owners=owners.int(),
        heavy=heavy,
        heavy_rows=heavy_rows,
        slots=slots,
        lists=torch.cat([walk.full, walk.partial, walk.mask]),
        mask_shift=len(walk.partial),
        partial=len(walk.partial) > 0,
        mixed=mixed,
        covers=_covers(plan, axis, owners, heads),
    )
    return side, rows


def _piece_length(plan: Plan, walk: Walk, tiles: int, owners: Tensor) -> int:
    """Entries above which a row is split: an equal share of all entries."""
    full, partial = walk.counts()
    by_class = (full + partial).view(-1, max(tiles, 1)).sum(1)
    total = int(by_class[owners[:, 1]].sum())
    return share_of(plan, total)


def share_of(plan: Plan, entries: int) -> int:
    """Entries of an equal share per program, at least those of the shortest piece."""
    return max(entries // _programs(plan.device), SHORTEST_PIECE // plan.block_size**2, 1)


def _programs(device: torch.device) -> int:
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return processors * PROGRAMS_PER_PROCESSOR


def most_pieces(plan: Plan, part: Part, heads: int, pairs: int | None) -> int:
    """Upper bound of the pieces per sample, for `heads` heads or, given `pairs`, for a run of rows."""
    programs = _programs(plan.device)
    shortest = max(1, SHORTEST_PIECE // plan.block_size**2)
    entries = [own for own in head_entries(part) if own] or [1]
    longest = longest_row(part)
    if pairs is not None:
        entries, longest = [max(pairs, 1)], min(longest, pairs)
    share = 0 if pairs is not None else heads * min(entries) // programs
    if longest <= max(shortest, share):
        return 0
    # A row has fewer than two pieces per program's share, or per shortest piece.
    uneven = min(heads, -(-max(entries) // min(entries)))
    return min(2 * (programs + -(-programs // shortest)) * uneven, 2 * heads * -(-max(entries) // shortest))


def split_rows(
    rows: Tensor, order: Tensor, tiles: int, limit: int | None, whole: int = 0
) -> tuple[Tensor, int, Tensor, int, int]:
    """Work table, items per class, heavy table, heavy rows per class, and slots per owner.

    Pieces have at most `limit` entries; rows of at most `whole` entries are not split.
    """
    if not len(rows):
        return rows.new_zeros(0, 8), 0, rows.new_zeros(0, 4), 0, 0
    device = rows.device
    classes = len(rows) // tiles
    row = order[torch.argsort(order // tiles, stable=True)]
    table = rows[row].long()
    full_begin, full_end, full_base, part_begin, part_end, part_base = table.unbind(1)
    full = full_end - full_begin
    total = full + part_end - part_begin
    pieces = torch.ones_like(total) if limit is None else (-(-total // limit)).clamp_min(1)
    pieces = torch.where(total > whole, pieces, 1)

    at = torch.arange(len(row), device=device).repeat_interleave(pieces)
    item = torch.arange(len(at), device=device)
    piece = item - (pieces.cumsum(0) - pieces)[at]
    begin = piece * total[at] // pieces[at]
    end = (piece + 1) * total[at] // pieces[at]
    kind = row // tiles
    split = torch.where(pieces > 1, pieces, 0)
    split_before = split.cumsum(0) - split
    class_first = split_before[torch.arange(classes, device=device) * tiles]
    first_slot = split_before - class_first[kind]
    slot = torch.where(pieces[at] > 1, first_slot[at] + piece, -1)
    columns = [
        (row % tiles)[at],
        *(full_begin[at] + torch.minimum(edge, full[at]) for edge in (begin, end)),
        full_base[at],
        *(part_begin[at] + (edge - full[at]).clamp_min(0) for edge in (begin, end)),
        part_base[at],
        slot,
    ]
    work, items = _by_class(torch.stack(columns, dim=1), kind[at], classes)
    long_rows = pieces > 1
    entries = torch.stack([row % tiles, first_slot, pieces, torch.zeros_like(row)], dim=1)[long_rows]
    heavy, heavy_rows = _by_class(entries, kind[long_rows], classes)
    return work, items, heavy, heavy_rows, int(split.view(classes, tiles).sum(1).max())


def _by_class(entries: Tensor, kind: Tensor, classes: int) -> tuple[Tensor, int]:
    """Entries sorted by class, in runs of equal length padded with tile -1."""
    counts = torch.bincount(kind, minlength=classes)
    longest = int(counts.max())
    table = entries.new_full((classes * longest, entries.shape[1]), -1)
    within = torch.arange(len(entries), device=entries.device) - (counts.cumsum(0) - counts)[kind]
    table[kind * longest + within] = entries
    return table.int(), longest


def _covers(plan: Plan, axis: Axis, owners: Tensor, heads: int) -> bool:
    """Whether the rows of the owners, which are disjoint, cover every token of every head."""
    span = axis.end[None, :] - axis.start[None, :] - owners[:, 2, None]
    rows = (-(-span // axis.rate)).clamp(0, plan.block_size).sum(1)
    by_head = rows.new_zeros(heads).index_add_(0, owners[:, 0], rows)
    return bool((by_head == plan.n).all())
