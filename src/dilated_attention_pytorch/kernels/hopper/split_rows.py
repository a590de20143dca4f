"""Splitting of long rows for the Hopper kernels into pieces that are computed separately and joined.

One program, or two with blocks of 64, occupies a multiprocessor, so a row with more tiles than an equal share of the
work runs longer than all others. Its pieces run in a separate launch after the other rows, one for each program that
runs at a time. Tables and pieces in memory
(batch, head, slot, row of the block, width) have the format of the portable kernels (`triton.lowering`), whose kernels
join the pieces in the order of their slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..launch.launcher import LaunchStep, Tensors
from ..triton.lowering import SHORTEST_PIECE, split_rows
from .lowering import BackwardItems, ForwardItems, LoweredPart, balanced

Work = TypeVar("Work", ForwardItems, BackwardItems)
ROWS_A_PIECE = 8
"""Blocks of rows per piece, which bounds the memory of the pieces."""


@dataclass(frozen=True, slots=True)
class Split(Generic[Work]):
    """One direction of a part with split rows. A holder is a head of the stationary tensor."""

    rest: Work
    """Rows that stay whole."""
    pieces: Work
    """Pieces of the other rows. A record ends with the item-sized tile of its result; `rows` has a row per slot."""
    slots: int
    """Blocks of pieces per holder."""
    heavy: Tensor
    """int32 [C * R, 4], as in `triton.lowering`."""
    heavy_rows: int
    owners: Tensor
    """int32 [holders, 4], as in `triton.lowering`."""
    per_head: bool
    block: int

    def piece_shape(self, batch: int, width: int) -> tuple[int, int, int, int]:
        """Shape of the pieces."""
        return batch, len(self.owners), self.slots * self.block, width

    def join(self, kernel: Any, pointers: Sequence[Any], like: Tensors, joined: Tensor) -> LaunchStep:
        """Launch that joins the pieces into `joined`; `pointers` are the arguments of the kernel before its tables."""
        from ..triton.launches import ROWS, padded_width

        batch, _, n, width = joined.shape
        tables = self.heavy, self.owners, self.heavy
        numbers = self.heavy_rows, self.slots, len(self.owners), 0, n, 1, *joined.stride()[:3]
        constants = self.block, ROWS, width, padded_width(width), False, self.per_head, False, False
        grid = self.heavy_rows * (self.block // ROWS), len(self.owners), batch
        arguments = *pointers, *tables, *numbers, *constants
        return LaunchStep(kernel, grid, arguments, like, plain=True)


def lengths_of_pieces(lengths: Tensor, programs: int, most: int, shortest: int) -> tuple[int, int] | None:
    """Most entries of a row that stays whole, and entries of a piece; None if no row of these lengths is split.

    A row is split if it exceeds an equal share of the work by more than the shortest piece and fills at least two
    pieces. The number of pieces is at most `most` and at most the number of programs, so that no piece waits.
    """
    most = min(most, programs)
    if most < 2:
        return None
    whole = int(lengths.sum()) // programs + shortest
    while True:
        long = lengths[lengths > whole]
        if not len(long):
            return None
        limit = max(-(-int(long.sum()) // most), shortest)
        if int(long.min()) >= 2 * limit:
            return whole, int((-(-long // (long // limit))).max())
        whole = 2 * limit - 1


def split(
    lowered: LoweredPart, work: Work, batch: int, programs: int, group: int = 1, *, by_key: bool = False
) -> Split[Work] | None:
    """Work of a part with its long rows split, for a batch size and number of programs; None if no row is long."""
    if lowered.strided or lowered.launches is not None:
        return None
    part, block = lowered.near, lowered.block_size
    walk, tiles = (part.by_key, part.keys.tiles) if by_key else (part.by_query, part.queries.tiles)
    members = part.head_class.long().view(-1, group)
    kinds = members[:, 0]
    if bool((members != kinds[:, None]).any()) or bool((kinds < 0).any()):
        # Heads of a group have different lists, so no single list gives the length of the row.
        return None
    full, partial = walk.counts()
    lengths = (full + partial).view(-1, tiles)[kinds].flatten().repeat(batch)
    halves = block // lowered.item_rows
    most = len(lengths) // ROWS_A_PIECE
    limits = lengths_of_pieces(lengths.cpu(), programs // halves, most, max(SHORTEST_PIECE // (block**2 * group), 1))
    if limits is None:
        return None
    device = work.items.device
    whole, limit = limits
    table, items_a_class, heavy, heavy_rows, slots = split_rows(walk.rows, walk.order.long(), tiles, limit, whole)
    if slots * ROWS_A_PIECE > tiles:
        # Every head is allocated as many slots as the head with most pieces.
        return None
    classes = len(walk.rows) // tiles
    kind = torch.arange(classes, device=table.device).repeat_interleave(items_a_class)
    cut = table[:, 7] >= 0
    kind, table = kind[cut], table[cut].long()
    long = torch.zeros(len(walk.rows), dtype=torch.bool, device=table.device)
    long[kind * tiles + table[:, 0]] = True
    by_slot = table.new_full((classes, slots, 7), -1)
    by_slot[kind, table[:, 7]] = table[:, :7]

    own = by_slot[kinds][:, :, None].expand(-1, -1, halves, -1)
    tile = own[..., 0] * halves + torch.arange(halves, device=own.device)
    holder = torch.arange(len(kinds), device=own.device)[:, None, None].expand_as(tile)
    stored = torch.arange(slots * halves, device=own.device).view(slots, halves).expand_as(tile)
    begin, end, base, part_begin, part_end, part_base = own[..., 1:].unbind(-1)
    fully, partly = end - begin, part_end - part_begin
    met = fully + partly
    if isinstance(work, BackwardItems):
        met = met * group
        columns = holder, tile, met, stored
        pieces = work._replace(rows=by_slot[..., 1:].flatten(0, 1).int().contiguous().to(device))
    else:
        columns = holder, tile, begin, fully, base, part_begin, partly, part_base, stored
        pieces = work
    exists = (own[..., 0] >= 0) & (tile * lowered.item_rows < lowered.n)
    records = torch.stack(columns, dim=-1)[exists]

    items = work.items.to(kinds.device).long()
    items = items[~long[kinds[items[:, 0]] * tiles + items[:, 1] // halves]]
    weight = items[:, 2].clamp(min=1) if isinstance(work, BackwardItems) else items[:, 3] + items[:, 6]
    zero = torch.zeros_like(kinds)
    owners = torch.stack((torch.arange(len(kinds), device=kinds.device), kinds, zero, zero), dim=1).int()
    return Split(
        rest=work._replace(items=balanced(items, weight).to(device)),
        pieces=pieces._replace(items=balanced(records, met[exists]).to(device)),
        slots=slots,
        heavy=heavy.to(device),
        heavy_rows=heavy_rows,
        owners=owners.to(device),
        per_head=classes > 1,
        block=block,
    )
