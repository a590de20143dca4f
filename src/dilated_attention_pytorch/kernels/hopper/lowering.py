"""Lowering of plans for the Hopper kernels: the order in which parts run, and the work items of each.

A part whose tile `t` starts at token `t * block_size` is *plain*. Any other part is *strided*: its items hold token
numbers, and its kernel accumulates onto the results of earlier parts. At most one plain part runs, as the first.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...plan.plan import HOST_NUMBERS, Axis, Masks, Part, Plan, Walk, map_tensors, tensors_of
from ..call import AttentionCall

ITEM_ROWS = 128
"""Most rows of a work item: two warpgroups of 64. In a plan of blocks of 64 an item is a block."""
FEW_ITEMS = 2048
"""Number of items from which the load of the multiprocessors is balanced in any starting order."""
GROUP = 200
"""Items of a group in `balanced`: 1.5 times the items that run at a time on an H100."""


class ForwardItems(NamedTuple):
    """Work items of the forward kernel, from a walk by query: one record per item, in starting order."""

    items: Tensor
    """int32 [I, 8 or 10]: see `forward_kernel.WORK_WIDTH` and `STRIDED_WORK_WIDTH`"""
    full: Tensor
    """int32 [F]"""
    partial: Tensor
    """int32 [P, 4]: tile, mask, first and last difference of the band"""
    tiles: Tensor
    """int32 [T, 2]: start and end of each key tile"""
    covers: bool
    """Whether every row of the output belongs to an item; meaningful for plain parts."""


class BackwardItems(NamedTuple):
    """Work items of a backward kernel, from a walk by key or by query: one record per item, in starting order.

    A kernel holds one tile and streams the tiles of its list.
    """

    items: Tensor
    """int32 [I, 4]: head, tile of an item's rows, number of plan tiles it streams over all heads of its group, 0; where
    strided [I, 6]: head, first token, number of tiles it streams, existing rows, tile, offset"""
    classes: Tensor
    """int32 [H]: head class; where strided [H, 3]: class, offset of held rows, offset of streamed rows"""
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
    """Residue classes of the tokens of a sequence on a strided axis."""

    rate: int
    """Distance in tokens between rows."""
    longer: int
    """Number of residues with one row more than the others; they come first."""


class LoweredPart:
    """Work items of one part of a plan."""

    launches: dict[Any, Any] | None = None
    """Cache of launches that learned plans of one shape share. Their lists live for one call and may not be read by the
    host. None for a plan of positions, whose launches are cached in `Plan.memo`."""

    def __init__(self, plan: Plan, part: Part, *, strided: bool) -> None:
        self.n, self.block_size, self.masks = plan.n, plan.block_size, plan.masks
        self.part = part
        self.strided = strided
        self.item_rows = min(plan.block_size, ITEM_ROWS)
        self.queries, self.keys = (Strides(axis.rate, plan.n % axis.rate) for axis in (part.queries, part.keys))
        self._by_group: dict[tuple[int, bool], BackwardItems] = {}

    def strides(self, call: AttentionCall) -> tuple[Strides, Strides]:
        """Residue classes of the queries and of the keys of a call, which may have a run of the queries alone."""
        lengths = call.query.shape[2], call.key.shape[2]
        rates = self.queries.rate, self.keys.rate
        queries, keys = (Strides(rate, n % rate) for n, rate in zip(lengths, rates, strict=True))
        return queries, keys

    @property
    def writes_all(self) -> bool:
        """Whether the part has every tile of the sequence, and therefore writes gradients of every row.

        In the buffers of a rank, rows of other parts lie behind those of this part.
        """
        reach = min(self.part.queries.tiles, self.part.keys.tiles) * self.block_size
        return not self.strided and reach >= self.n

    @cached_property
    def near(self) -> Part:
        """The part on the device that builds its lists: the host if they are small."""
        axes = self.part.queries, self.part.keys
        numbers = sum(one.numel() for one in tensors_of(self.part))
        numbers += len(self.part.head_class) * max(axis.tiles for axis in axes)
        return map_tensors(self.part, Tensor.cpu) if numbers <= HOST_NUMBERS else self.part

    @cached_property
    def by_query(self) -> ForwardItems:
        """Work items of the forward."""
        near, full = self.near, self.part.by_query.full
        items, covers = _forward_records(self, near)
        made = items, partial_entries(self.masks, near.by_query), tile_table(near.keys)
        items, partial, table = (one.to(full.device) for one in made)
        return ForwardItems(items, full, partial, table, covers)

    def backward_items(self, group: int, *, by_key: bool) -> BackwardItems:
        """Work items of dK and dV, or of dQ, for `group` query heads per key head."""
        items = self._by_group.get((group, by_key))
        if items is None:
            items = self._by_group[group, by_key] = self._backward_items(group if by_key else 1, by_key)
        return items

    def _backward_items(self, group: int, by_key: bool) -> BackwardItems:
        part, near, masks = self.part, self.near, self.masks
        walk, stationary, streamed = (
            (near.by_key, near.keys, near.queries) if by_key else (near.by_query, near.queries, near.keys)
        )
        partial = partial_entries(masks, walk)
        if not by_key:
            # A band bounds key minus query, the kernel held minus streamed.
            band = partial[:, 2:]
            band.copy_(torch.where(band[:, :1] <= band[:, 1:], -band.flip(1), band))
        classes = near.head_class.int()
        if self.strided:
            classes = torch.stack((classes, stationary.offset, streamed.offset), dim=1)
        items = _backward_records(self, near, walk, stationary, group)
        bits = masks.transposed if by_key else masks.bits
        made = items, classes.contiguous(), partial, tile_table(streamed)
        items, classes, partial, table = (one.to(bits.device) for one in made)
        own = part.by_key if by_key else part.by_query
        return BackwardItems(items, classes, own.rows.contiguous(), own.full, partial, table, bits)


_regular: WeakIdKeyDictionary = WeakIdKeyDictionary()


def lower(plan: Plan) -> tuple[LoweredPart, ...]:
    """Lower the parts of a plan, in the order they run; once per plan."""
    parts = plan.memo.get("hopper parts")
    return attach_parts(plan, _arranged(plan)) if parts is None else parts


def attach_parts(plan: Plan, parts: tuple[LoweredPart, ...]) -> tuple[LoweredPart, ...]:
    """Attach precomputed work items to a plan and return the ones in effect."""
    return plan.memo.setdefault("hopper parts", parts)


def launch_cache(plan: Plan) -> dict[Any, Any]:
    """Cache of launches: shared by learned plans of one shape, and the memo of any other plan."""
    parts = plan.memo.get("hopper parts")
    shared = parts[0].launches if parts else None
    return plan.memo if shared is None else shared


def _arranged(plan: Plan) -> tuple[LoweredPart, ...]:
    plain = [
        part
        for part in plan.parts
        if all(is_regular(axis, plan.block_size, plan.n) for axis in (part.queries, part.keys))
    ]
    candidates = [LoweredPart(plan, part, strided=False) for part in plain]
    # No fill is needed before a part that writes every row.
    first = next((part for part in candidates if part.by_query.covers), None) or next(iter(candidates), None)
    rest = tuple(
        LoweredPart(plan, part, strided=True) for part in plan.parts if first is None or part is not first.part
    )
    return rest if first is None else (first, *rest)


def is_regular(axis: Axis, block_size: int, n: int) -> bool:
    """Whether tile `t` is tokens `t * block_size` and on for every head, cut short only by the sequence's end."""
    if axis.start not in _regular:
        first, end, offset = (one.cpu() for one in (axis.start, axis.end, axis.offset))
        start = torch.arange(axis.tiles, device="cpu") * block_size
        whole = end >= (start + block_size).clamp(max=n)
        unshifted = axis.rate == 1 and not bool(offset.any())
        _regular[axis.start] = unshifted and bool(((first == start) & whole).all())
    return _regular[axis.start]


def partial_entries(masks: Masks, walk: Walk) -> Tensor:
    """Partial entries of a walk, int32 [P, 4]: tile, mask, first and last difference of the band."""
    band = masks.band.to(walk.mask.device)[walk.mask.long()]
    return torch.cat((torch.stack((walk.partial, walk.mask), dim=1), band), dim=1).int().contiguous()


def tile_table(axis: Axis) -> Tensor:
    """Start and end of each tile in tokens, int32 (T, 2)."""
    return torch.stack((axis.start, axis.end), dim=1).int()


def _existing_rows(axis: Axis, first: Tensor, tile: Tensor, most: int) -> Tensor:
    """Number of existing rows, at most `most`, of the items that begin at the tokens `first`."""
    return ((axis.end[tile] - first + axis.rate - 1) // axis.rate).clamp(0, most)


def balanced(items: Tensor, work: Tensor) -> Tensor:
    """Sort work records, given with neighbours together, into starting order.

    Neighbours read the same keys and should run at about the same time, but a heavy item must not start last. Records
    are therefore sorted by weight within groups whose work equals that of `GROUP` heaviest items. Groups are counted
    from the end, so that the last group is complete.
    """
    if len(items):
        most, levels = work.max(), 16
        group = (work.sum() - work.cumsum(0)) // (GROUP * most)
        index = group * (levels + 1) + work * levels // most
        items = items[torch.argsort(index, descending=True, stable=True)]
    return items.int().contiguous()


def _neighbours(walk: Walk, tiles: int) -> Tensor:
    """Tiles of each class, int64 [C, T]: ascending, or descending where weights grow, so that light tiles come last."""
    whole, partly = walk.counts()
    weight = (whole + partly).view(-1, tiles).double()
    index = torch.arange(tiles, device=weight.device)
    grows = (weight * (2 * index - (tiles - 1))).sum(1, keepdim=True) > 0
    return torch.where(grows, tiles - 1 - index, index)


def _forward_records(lowered: LoweredPart, part: Part) -> tuple[Tensor, bool]:
    """Forward records of every head (heads outermost before balancing), and whether they cover every row."""
    walk, axis, tiles = part.by_query, part.queries, part.queries.tiles
    device = walk.rows.device
    sub_tiles = lowered.block_size // lowered.item_rows
    head_class = part.head_class.long()
    heads = torch.arange(len(head_class), device=device)[head_class >= 0]
    own = head_class[heads]
    row = (_neighbours(walk, tiles)[own] + own[:, None] * tiles)[:, :, None].expand(-1, -1, sub_tiles)
    tile = row % tiles * sub_tiles + torch.arange(sub_tiles, device=device)
    begin, end, base, part_begin, part_end, part_base = walk.rows.long()[row].unbind(-1)
    full, partial = end - begin, part_end - part_begin
    lists = begin, full, base, part_begin, partial, part_base
    head = heads[:, None, None].expand_as(row)
    if lowered.strided:
        first = axis.start[tile] + axis.offset[head]
        rows = _existing_rows(axis, first, tile, lowered.item_rows)
        exists = rows > 0
        columns = head, first, *lists, rows, part.keys.offset[head]
    else:
        exists = tile * lowered.item_rows < lowered.n
        columns = head, tile, *lists
    exists &= full + partial > 0
    items = torch.stack([column.long() for column in columns], dim=-1)[exists]
    items = balanced(items, items[:, 3] + items[:, 6])
    return items, len(items) == len(head_class) * -(-lowered.n // lowered.item_rows)


def _backward_records(lowered: LoweredPart, part: Part, walk: Walk, axis: Axis, group: int) -> Tensor:
    """Backward records of every holding head, heads outermost before balancing.

    A plain part includes items without a pair, which write zeros. Heads of a group that hold different tokens have
    separate items.
    """
    device, tiles = walk.rows.device, axis.tiles
    owners: dict[tuple[int, int], list[int]] = {}
    for head, (own, offset) in enumerate(zip(part.head_class.tolist(), axis.offset.tolist(), strict=True)):
        owners.setdefault((head // group, offset), []).append(own)
    width = max(map(len, owners.values()))
    head_class = torch.tensor([own + [-1] * (width - len(own)) for own in owners.values()], device=device)
    holder, offset = torch.tensor(list(owners), device=device).unbind(1)
    # Heads of a group may have different lists; the order of one head serves all.
    block = _neighbours(walk, tiles)[head_class.amax(1).clamp(min=0)]
    whole, partly = walk.counts()
    met = (whole + partly).view(-1, tiles)
    total = torch.where((head_class >= 0)[..., None], met[head_class.clamp(min=0)], 0).sum(1)
    steps = total.gather(1, block)
    if lowered.strided:
        first = axis.start[block] + offset[:, None]
        rows = _existing_rows(axis, first, block, lowered.item_rows)
        exists = (rows > 0) & (steps > 0)
        columns = holder[:, None].expand_as(block), first, steps, rows, block, offset[:, None].expand_as(block)
    else:
        sub_tiles = lowered.block_size // lowered.item_rows
        tile = block[:, :, None] * sub_tiles + torch.arange(sub_tiles, device=device)
        exists = tile * lowered.item_rows < lowered.n
        stationary = holder[:, None, None].expand_as(tile)
        columns = stationary, tile, steps[:, :, None].expand_as(tile), torch.zeros_like(tile)
    items = torch.stack(columns, dim=-1)[exists]
    return balanced(items, items[:, 2].clamp(min=1))
