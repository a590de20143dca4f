"""A plan as the Hopper kernels read it: which of its parts run how, and the work lists of each.

A part whose tile `t` is tokens `t * block_size` and on is *plain*. Any other is *strided*: its records name tokens, and
it joins what the parts before it left in memory. One plain part, where there is one, runs first, the rest after it.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..plan.plan import Axis, Part, Piece, Plan, Walk, map_tensors, tensors_of

ITEM_ROWS = 128
"""Rows of one work item: two warpgroups of 64."""
FEW_ITEMS = 2048
"""About as many items as begin to level out over the multiprocessors of a GPU in whatever order they start."""
GROUP = 200
"""Half as many items again as run at a time on the GPUs these kernels are for."""
HOST_NUMBERS = 2**18
"""Numbers up to which lists are made on the host, in milliseconds: a GPU has to load the code of every operation at its
first use, which takes longer."""


class QueryWork(NamedTuple):
    """A walk by query as the forward kernel reads it: one record an item, in the order items start."""

    items: Tensor
    """int32 [I, 8 or 10]: see `hopper_forward.WORK_WIDTH` and `STRIDED_WORK_WIDTH`"""
    full: Tensor
    """int32 [F]"""
    partial: Tensor
    """int32 [P, 4]: tile, mask, first and last difference of the band"""
    tiles: Tensor
    """int32 [T, 2]: start and end of each key tile"""
    covers: bool
    """Whether every row of the output belongs to an item; asked of plain parts."""


class HeldWork(NamedTuple):
    """A walk as the backward kernels read it: one record an item, in the order items start."""

    items: Tensor
    """int32 [I, 4]: head, 128-row tile, tiles of the plan it meets over all heads of its group, 0; where strided
    [I, 6]: head, first token, tiles it meets, rows that exist, tile, offset"""
    classes: Tensor
    """int32 [H]: head class; where strided [H, 3]: class, offset of what is held, offset of what is streamed"""
    rows: Tensor
    """int32 [C * T, 6]: the walk's rows"""
    full: Tensor
    """int32 [F]"""
    partial: Tensor
    """int32 [P, 4]: tile, mask, first and last difference, held minus streamed, of the band"""
    tiles: Tensor
    """int32 [T, 2]: start and end of each streamed tile"""
    bits: Tensor
    """int32 [M, B, W]: bit `j % 32` of `bits[m, i, j // 32]` allows held element i, streamed element j"""


class Strides(NamedTuple):
    """How the tokens of a sequence fall into the residues of an axis."""

    rate: int
    """Distance in tokens between rows."""
    longer: int
    """Residues that have one row more than the others; they are the first."""


def brought_near(value: Piece, numbers: int) -> Piece:
    """What lists of so many numbers are made from, on the host if they are few."""
    return map_tensors(value, Tensor.cpu) if numbers <= HOST_NUMBERS else value


class Ground:
    """What the parts of a plan have in common. Not the plan, which would then live as long as what is kept for it."""

    def __init__(self, plan: Plan) -> None:
        self.n = plan.n
        self.block_size = plan.block_size
        self.masks = plan.masks

    @cached_property
    def transposed_bits(self) -> Tensor:
        """`Masks.bits` with keys and queries exchanged; nothing to read when bands tell all."""
        band = self.masks.band.cpu()
        if bool((band[:, 0] <= band[:, 1]).all()):
            return self.masks.bits
        bits = brought_near(self.masks.bits, 32 * self.masks.bits.numel())
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        turned = torch.empty_like(bits)
        chunk = 1024
        for first in range(0, len(turned), chunk):
            some = bits[first : first + chunk]
            dense = ((some[..., None] >> shifts) & 1).flatten(2)[..., : self.block_size]
            words = dense.transpose(1, 2).unflatten(2, (-1, 32))
            turned[first : first + chunk] = (words << shifts).sum(-1, dtype=torch.int64).to(torch.int32)
        return turned.to(self.masks.bits.device)

    def partial(self, walk: Walk) -> Tensor:
        """Entries met in part, int32 [P, 4]: tile, mask, first and last difference of its band."""
        band = self.masks.band.to(walk.mask.device)[walk.mask.long()]
        return torch.cat((torch.stack((walk.partial, walk.mask), dim=1), band), dim=1).int().contiguous()


class Mould:
    """What learned plans of one shape share: what follows from shapes alone is kept by it, and not by any of them."""


class Step:
    """One part of a plan and how it runs."""

    mould: Mould | None = None
    """Given where the lists live for one call, so that how long rows are may not be asked of the device."""

    def __init__(self, ground: Ground, part: Part, *, strided: bool) -> None:
        self.ground = ground
        self.part = part
        self.strided = strided
        self.queries, self.keys = (Strides(axis.rate, ground.n % axis.rate) for axis in (part.queries, part.keys))
        self.shape = strided, *(strided and axis.longer > 0 for axis in (self.queries, self.keys))
        """What a kernel is compiled for: whether strided, and whether queries and keys have residues of two lengths."""
        self._held: dict[tuple[int, bool], HeldWork] = {}

    @property
    def writes_all(self) -> bool:
        """Whether its tiles are all that the sequence has, so that it writes gradients of every row.

        What a rank computes has rows of other parts alone behind those of this one.
        """
        reach = min(self.part.queries.tiles, self.part.keys.tiles) * self.ground.block_size
        return not self.strided and reach >= self.ground.n

    @cached_property
    def near(self) -> Part:
        """The part where its lists are made."""
        axes = self.part.queries, self.part.keys
        numbers = sum(one.numel() for one in tensors_of(self.part))
        numbers += len(self.part.head_class) * max(axis.tiles for axis in axes)
        return brought_near(self.part, numbers)

    @cached_property
    def by_query(self) -> QueryWork:
        """The forward's work list."""
        near, full = self.near, self.part.by_query.full
        items, covers = _query_items(self.ground, near, strided=self.strided)
        made = items, self.ground.partial(near.by_query), tile_table(near.keys)
        items, partial, table = (one.to(full.device) for one in made)
        return QueryWork(items, full, partial, table, covers)

    def held(self, group: int, *, by_key: bool) -> HeldWork:
        """The work list of dK and dV, or of dQ, for groups of that many query heads to a key head."""
        found = self._held.get((group, by_key))
        if found is None:
            found = self._held[group, by_key] = self._held_work(group if by_key else 1, by_key)
        return found

    def _held_work(self, group: int, by_key: bool) -> HeldWork:
        part, near, ground = self.part, self.near, self.ground
        walk, held, streamed = (
            (near.by_key, near.keys, near.queries) if by_key else (near.by_query, near.queries, near.keys)
        )
        partial = ground.partial(walk)
        if not by_key:
            # A band counts keys minus queries, and the kernel what is held minus what is streamed.
            band = partial[:, 2:]
            band.copy_(torch.where(band[:, :1] <= band[:, 1:], -band.flip(1), band))
        classes = near.head_class.int()
        if self.strided:
            classes = torch.stack((classes, held.offset, streamed.offset), dim=1)
        items = _held_items(ground, near, walk, held, group, strided=self.strided)
        bits = ground.transposed_bits if by_key else ground.masks.bits
        made = items, classes.contiguous(), partial, tile_table(streamed)
        items, classes, partial, table = (one.to(bits.device) for one in made)
        own = part.by_key if by_key else part.by_query
        return HeldWork(items, classes, own.rows.contiguous(), own.full, partial, table, bits)


_regular: WeakIdKeyDictionary = WeakIdKeyDictionary()
_known_steps: WeakKeyDictionary[Plan, tuple[Step, ...]] = WeakKeyDictionary()


def steps_of(plan: Plan) -> tuple[Step, ...]:
    """The parts of a plan in the order they run."""
    steps = _known_steps.get(plan)
    return keep_steps(plan, _arranged(plan)) if steps is None else steps


def keep_steps(plan: Plan, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Take steps that somebody made ready for a plan, unless it has some; those it has."""
    return _known_steps.setdefault(plan, steps)


def keeper_of(plan: Plan) -> Plan | Mould:
    """By what to keep things that follow from shapes: the plan itself, or the mould that its lists were cast in."""
    steps = _known_steps.get(plan)
    return plan if not steps or steps[0].mould is None else steps[0].mould


def _arranged(plan: Plan) -> tuple[Step, ...]:
    ground = Ground(plan)
    plain = [
        part
        for part in plan.parts
        if all(is_regular(axis, plan.block_size, plan.n) for axis in (part.queries, part.keys))
    ]
    candidates = [Step(ground, part, strided=False) for part in plain]
    # A part that writes every row saves filling them first.
    first = next((step for step in candidates if step.by_query.covers), None) or next(iter(candidates), None)
    rest = tuple(Step(ground, part, strided=True) for part in plan.parts if first is None or part is not first.part)
    return rest if first is None else (first, *rest)


def is_regular(axis: Axis, block_size: int, n: int) -> bool:
    """Whether tile `t` is tokens `t * block_size` and on for every head, cut short only by the sequence's end."""
    if axis.start not in _regular:
        first, end, offset = (one.cpu() for one in (axis.start, axis.end, axis.offset))
        start = torch.arange(axis.tiles) * block_size
        whole = end >= (start + block_size).clamp(max=n)
        unshifted = axis.rate == 1 and not bool(offset.any())
        _regular[axis.start] = unshifted and bool(((first == start) & whole).all())
    return _regular[axis.start]


def tile_table(axis: Axis) -> Tensor:
    """First token of each tile and where it ends, int32 (T, 2)."""
    return torch.stack((axis.start, axis.end), dim=1).int()


def _existing_rows(axis: Axis, first: Tensor, tile: Tensor) -> Tensor:
    """How many rows of an item exist that begins at those tokens."""
    return ((axis.end[tile] - first + axis.rate - 1) // axis.rate).clamp(0, ITEM_ROWS)


def balanced(items: Tensor, work: Tensor) -> Tensor:
    """Work records, given with neighbours together, in starting order.

    Neighbours read the same keys, so they must run at about the same time; but a heavy item must not start last. So the
    records are taken in groups, each with as much work as `GROUP` of the heaviest, and within a group heavy ones start
    first. Groups are counted from the end, which makes the last a whole one.
    """
    if len(items):
        most, levels = work.max(), 16
        group = (work.sum() - work.cumsum(0)) // (GROUP * most)
        place = group * (levels + 1) + work * levels // most
        items = items[torch.argsort(place, descending=True, stable=True)]
    return items.int().contiguous()


def _neighbours(walk: Walk, tiles: int) -> Tensor:
    """Tiles of each class, int64 [C, T], as they lie, or from the last down where weights grow: light ones end."""
    whole, partly = walk.counts()
    weight = (whole + partly).view(-1, tiles).double()
    place = torch.arange(tiles, device=weight.device)
    grows = (weight * (2 * place - (tiles - 1))).sum(1, keepdim=True) > 0
    return torch.where(grows, tiles - 1 - place, place)


def _query_items(ground: Ground, part: Part, *, strided: bool) -> tuple[Tensor, bool]:
    """Work records of every head, heads outermost before they are balanced, and whether no row is left out."""
    walk, axis, tiles = part.by_query, part.queries, part.queries.tiles
    device = walk.rows.device
    sub_tiles = ground.block_size // ITEM_ROWS
    head_class = part.head_class.long()
    heads = torch.arange(len(head_class), device=device)[head_class >= 0]
    own = head_class[heads]
    row = (_neighbours(walk, tiles)[own] + own[:, None] * tiles)[:, :, None].expand(-1, -1, sub_tiles)
    tile = row % tiles * sub_tiles + torch.arange(sub_tiles, device=device)
    begin, end, base, part_begin, part_end, part_base = walk.rows.long()[row].unbind(-1)
    full, partial = end - begin, part_end - part_begin
    lists = begin, full, base, part_begin, partial, part_base
    head = heads[:, None, None].expand_as(row)
    if strided:
        first = axis.start[tile] + axis.offset[head]
        rows = _existing_rows(axis, first, tile)
        kept = rows > 0
        columns = head, first, *lists, rows, part.keys.offset[head]
    else:
        kept = tile * ITEM_ROWS < ground.n
        columns = head, tile, *lists
    kept &= full + partial > 0
    items = torch.stack([column.long() for column in columns], dim=-1)[kept]
    items = balanced(items, items[:, 3] + items[:, 6])
    return items, len(items) == len(head_class) * -(-ground.n // ITEM_ROWS)


def _held_items(ground: Ground, part: Part, walk: Walk, axis: Axis, group: int, *, strided: bool) -> Tensor:
    """Work records of every head that holds, heads outermost before they are balanced.

    Of a plain part items without a pair are kept, as they write zeros. Heads of a group that hold other tokens have
    items of their own.
    """
    device, tiles = walk.rows.device, axis.tiles
    owners: dict[tuple[int, int], list[int]] = {}
    for head, (own, offset) in enumerate(zip(part.head_class.tolist(), axis.offset.tolist(), strict=True)):
        owners.setdefault((head // group, offset), []).append(own)
    width = max(map(len, owners.values()))
    head_class = torch.tensor([own + [-1] * (width - len(own)) for own in owners.values()], device=device)
    holder, offset = torch.tensor(list(owners), device=device).unbind(1)
    # The heads of a group may have lists of their own; the order of one of them has to do for all.
    block = _neighbours(walk, tiles)[head_class.amax(1).clamp(min=0)]
    whole, partly = walk.counts()
    met = (whole + partly).view(-1, tiles)
    total = torch.where((head_class >= 0)[..., None], met[head_class.clamp(min=0)], 0).sum(1)
    steps = total.gather(1, block)
    if strided:
        first = axis.start[block] + offset[:, None]
        rows = _existing_rows(axis, first, block)
        kept = (rows > 0) & (steps > 0)
        columns = holder[:, None].expand_as(block), first, steps, rows, block, offset[:, None].expand_as(block)
    else:
        sub_tiles = ground.block_size // ITEM_ROWS
        tile = block[:, :, None] * sub_tiles + torch.arange(sub_tiles, device=device)
        kept = tile * ITEM_ROWS < ground.n
        held = holder[:, None, None].expand_as(tile)
        columns = held, tile, steps[:, :, None].expand_as(tile), torch.zeros_like(tile)
    items = torch.stack(columns, dim=-1)[kept]
    return balanced(items, items[:, 2].clamp(min=1))
