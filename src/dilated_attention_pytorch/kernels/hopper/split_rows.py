"""Rows too long for one program of the Hopper kernels: cut into pieces, which are computed apart and joined.

A program has a multiprocessor for itself, so that a row of more tiles than its share of the whole outlasts all others.
Its pieces run in a launch of their own, after that of all other rows, one for each multiprocessor. Tables, and pieces
in memory (batch, head, slot, row of the block, width), are those of the portable kernels (`lowering`), whose
own kernels join them, in the order of the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..launch.gluon_launcher import GluonLaunch, Tensors
from ..triton.lowering import SHORTEST_PIECE, split_rows
from .lowering import ITEM_ROWS, BackwardItems, ForwardItems, LoweredPart, balanced

Work = TypeVar("Work", ForwardItems, BackwardItems)
ROWS_A_PIECE = 8
"""For so many blocks of rows there may be one piece, which bounds the memory that pieces take."""


@dataclass(frozen=True, slots=True)
class Split(Generic[Work]):
    """One direction of a part whose long rows are cut; a holder is a head of what is held still."""

    rest: Work
    """Rows that stay whole."""
    pieces: Work
    """The others; a record ends with the 128-row tile of the pieces that it writes, and `rows` has a row a slot."""
    slots: int
    """Blocks of pieces a holder."""
    heavy: Tensor
    """int32 [C * R, 4], as `lowering` has it."""
    heavy_rows: int
    owners: Tensor
    """int32 [holders, 4], likewise."""
    per_head: bool
    block: int

    def piece_shape(self, batch: int, width: int) -> tuple[int, int, int, int]:
        """Shape of the pieces."""
        return batch, len(self.owners), self.slots * self.block, width

    def join(
        self, kernel: Any, pointers: Sequence[Any], batch: int, n: int, like: Tensors, joined: Tensor
    ) -> GluonLaunch:
        """The launch that joins them to `joined`; `places` are what the kernel reads and writes before its tables."""
        from ..triton.launches import OPTIONS, ROWS, padded_width

        width = joined.shape[-1]
        tables = self.heavy, self.owners, self.heavy
        numbers = self.heavy_rows, self.slots, len(self.owners), 0, n, 1, *joined.stride()[:3]
        constants = self.block, ROWS, width, padded_width(width), False, self.per_head, False, False
        grid = self.heavy_rows * (self.block // ROWS), len(self.owners), batch
        identity = "join", kernel, like[0].device.index, joined.dtype, numbers, constants
        arguments = *pointers, *tables, *numbers, *constants
        return GluonLaunch(kernel, identity, grid, arguments, like, plain=True, **OPTIONS)


def lengths_of_pieces(lengths: Tensor, programs: int, most: int, shortest: int) -> tuple[int, int] | None:
    """Entries up to which a row stays whole, and those of a piece; None where no row of these lengths is cut.

    A row is long when it outlasts an equal share of the work by more than what a piece must save, and has room for two.
    Together the pieces are no more than there are programs, so that none of them waits for another to end, nor than
    `most`.
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
    """The work of a part with its long rows cut, for so many samples and multiprocessors; None where no row is long."""
    if lowered.strided or lowered.launches is not None:
        return None
    part, block = lowered.near, lowered.block_size
    walk, tiles = (part.by_key, part.keys.tiles) if by_key else (part.by_query, part.queries.tiles)
    members = part.head_class.long().view(-1, group)
    kinds = members[:, 0]
    if bool((members != kinds[:, None]).any()) or bool((kinds < 0).any()):
        # Heads of a group with lists of their own: none of them is the length of the row.
        return None
    full, partial = walk.counts()
    lengths = (full + partial).view(-1, tiles)[kinds].flatten().repeat(batch)
    halves = block // ITEM_ROWS
    most = len(lengths) // ROWS_A_PIECE
    limits = lengths_of_pieces(lengths.cpu(), programs // halves, most, max(SHORTEST_PIECE // (block**2 * group), 1))
    if limits is None:
        return None
    device = work.items.device
    whole, limit = limits
    table, items_a_class, heavy, heavy_rows, slots = split_rows(walk.rows, walk.order.long(), tiles, limit, whole)
    if slots * ROWS_A_PIECE > tiles:
        # All heads have as much room as the one with most pieces.
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
    exists = (own[..., 0] >= 0) & (tile * ITEM_ROWS < lowered.n)
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
