"""Packed documents whose bounds stay on their device: key intervals of rows, and plans of windows.

Row t of a document [a, b) sees keys max(a, t - before) .. min(b, t + after + 1) - 1. Nothing here reads a value: sizes
follow from the number of tokens and documents. Bounds that do not ascend from 0 to n never lead out of the sequence:
the first counts as 0, the last as n, and the others are raised to the largest before them and held below n.

Operations on a device are few, because tables that follow from shapes alone are cached (`WindowTables`). Plans are not
cached: kernels of others may write to the bounds, which torch does not count as changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..patterns import And, Causal, Full, Pattern, SlidingWindow
from .cache import StreamCache
from .plan import FULL_BEGIN, FULL_END, Axis, DeviceTables, Masks, Part, Plan, Walk
from .tile_lists import weight

Result = TypeVar("Result")
LONGEST = 2**15
"""Most tiles of tables that are cached: 10 MiB."""
_tables = StreamCache(16)
"""Tables that follow from shapes alone, by these."""


def window_of(pattern: Pattern, n: int) -> tuple[int, int] | None:
    """Tokens before and after a query that a pattern allows, at most n; None if it is no window."""
    # Classes derived from these may allow other pairs.
    if type(pattern) is And:
        left, right = window_of(pattern.left, n), window_of(pattern.right, n)
        return None if left is None or right is None else (min(left[0], right[0]), min(left[1], right[1]))
    if type(pattern) is SlidingWindow:
        return min(pattern.before, n), min(pattern.after, n)
    if type(pattern) is Full:
        return n, n
    return (n, 0) if type(pattern) is Causal else None


def _is_intercepted() -> bool:
    return bool(torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack())


def _of_shapes(make: Callable[..., Result], length: int, device: torch.device, *sizes: Hashable) -> Result:
    """`make(device, *sizes)`, cached unless it is long. Compilers, modes and transforms may pass fake tensors."""
    if length > LONGEST or torch.compiler.is_compiling() or _is_intercepted():
        return make(device, *sizes)
    return _tables.get(device, (make, device, *sizes), lambda: make(device, *sizes))


def _limits(device: torch.device, documents: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Source, least and largest value of each bound in `ascending`, int64 (documents + 2) each."""
    slot = torch.arange(documents + 2, device=device)
    return slot.clamp(max=documents), (slot >= documents) * n, (slot > 0) * n


def ascending(cu_seqlens: Tensor, n: int) -> Tensor:
    """Bounds of documents from 0 to n, whatever the values are, and n again: the bounds of an empty document.

    int64 (documents + 2).
    """
    many = len(cu_seqlens)
    source, least, most = _of_shapes(_limits, many, cu_seqlens.device, many - 1, n)
    return cu_seqlens.index_select(0, source).clamp(least, most).cummax(0).values


def row_bounds(cu_seqlens: Tensor, n: int, is_causal: bool) -> Tensor:
    """First key and end of the keys of each row in its document, int64 (n, 2)."""
    bounds, row = ascending(cu_seqlens, n), torch.arange(n, device=cu_seqlens.device)
    document = torch.searchsorted(bounds[1:], row, right=True)
    return torch.stack([bounds[document], row + 1], 1) if is_causal else bounds.unfold(0, 2, 1)[document]


def interval_bits(low: Tensor, high: Tensor, size: int) -> Tensor:
    """Elements low .. high - 1 of tiles as words of `Masks.bits`, int32 (..., W); elements outside a tile are cut."""
    word = torch.arange(0, size, 32, device=low.device)
    low, high = ((x[..., None] - word).clamp(0, min(size, 32)) for x in (low, high))
    one = torch.ones_like(low)
    return ((one << high) - (one << low)).clamp(min=0).int()


class WindowTables(NamedTuple):
    """Tables of a window that follow from shapes alone, for T tiles of B tokens and D documents.

    A tile's lists, counted from the tile, depend on two numbers: its place, the tiles of its document before it, and
    its rest, the tiles from it to the end of its document. `Walk.rows` of a tile is the sum of a row for its place, one
    for its rest and one for its own number. Tables of both walks are stacked, by key and by query.
    """

    rounding: Tensor
    """int64 (2, 1): B - 1 and 0, added to a length before its division by B, to count tiles and complete tiles"""
    tile: Tensor
    """int64 (T)"""
    steps: Tensor
    """int64 (4, T): added to numbers of a tile's document for its start, its end, its place and its row of `by_rest`"""
    by_place: Tensor
    """int32 (2, T, 6)"""
    by_rest: Tensor
    """int32 (2, 4T + 1, 6): row 2 (T + rest), or the one before if the last tile of the document is cut short"""
    by_tile: Tensor
    """int32 (T, 6)"""
    stored: tuple[Tensor, Tensor]
    """`Walk.full` of each walk, which is `Walk.partial` too"""
    mask: tuple[Tensor, Tensor]
    """`Walk.mask` of each walk"""
    weight: Tensor
    """int8: `tile_lists.weight` of numbers of entries"""
    masks: Masks
    offset: Tensor
    """int32 (heads)"""
    blocks: int
    known: DeviceTables


def _window_tables(
    device: torch.device, n: int, documents: int, heads: int, size: int, before: int, after: int
) -> WindowTables:
    most = n // size
    tiles = most + documents
    # Distances in tiles, key minus query: tiles met in part lie on both sides of those met whole.
    before, after = (side if side < n else n + size for side in (before, after))
    near, far = -((before - size + 1) // size), (after - size + 1) // size
    first, end = -before // size, (after + size - 1) // size + 1
    sides = ((first, near), (far + 1, end)) if near <= far else ((first, end), (end, end))
    sides = [range(max(low, -most), min(high, most + 1)) for low, high in sides]
    steps = torch.cat([torch.arange(x.start, max(x.start, x.stop), device=device) for x in sides])

    # A mask for each of these distances, and one that allows all.
    row = torch.arange(size, device=device)
    low = torch.cat([(-before - steps * size).clamp(min=1 - size), row[:1] + 1 - size])
    high = torch.cat([(after - steps * size).clamp(max=size - 1), row[:1] + size - 1])
    bits = interval_bits(low[:, None] + row, high[:, None] + row + 1, size)
    masks = Masks(bits, torch.stack([low, high], 1).int())
    number = torch.arange(len(steps), device=device)
    whole, last = (max(near, -most), min(far, most)), len(steps)
    # By key, distances are those to the query: the negative ones.
    by_query = _walk_tables(tiles, steps, number, len(sides[0]), last, *whole)
    by_key = _walk_tables(tiles, -steps.flip(0), number.flip(0), len(sides[1]), last, -whole[1], -whole[0])
    by_place, by_rest, *lists = zip(by_key, by_query, strict=True)

    tile = torch.arange(tiles, device=device)
    none, counts = torch.zeros_like(tile), torch.arange(tiles + last + 2, device=device)
    return WindowTables(
        rounding=torch.arange(1, -1, -1, device=device)[:, None] * (size - 1),
        tile=tile,
        steps=torch.stack([tile * size, none, tile, 2 * (tiles - tile)]),
        by_place=torch.stack(by_place),
        by_rest=torch.stack(by_rest),
        by_tile=torch.stack([none, none, tile, none, none, tile], 1).int(),
        stored=lists[0],
        mask=lists[1],
        weight=weight(counts).to(torch.int8),
        masks=masks,
        offset=torch.zeros(heads, dtype=torch.int32, device=device),
        blocks=heads * tiles * min(tiles, end - first + 1),
        known=DeviceTables(strided=True, ragged=True, bits=False),
    )


def _walk_tables(
    tiles: int, steps: Tensor, number: Tensor, side: int, last: int, near: int, far: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`by_place`, `by_rest`, stored lists and masks of a walk that meets tiles at the distances `near` to `far` whole.

    At the ascending distances `steps`, of which the first `side` come before `near`, it meets tiles through the masks
    `number`. Stored are the distances of tiles met whole, then the steps. A last tile that is cut short is met through
    the mask `last`, which allows all: for each distance of it from `near` to `far` follow the first `side` steps and
    this distance. What a tile meets in part is therefore one run of the list, with and without such a tile.
    """
    device = steps.device
    whole = torch.arange(near, max(far + 1, near), device=device)
    cut = torch.cat([steps[:side].expand(len(whole), side), whole[:, None]], 1)
    stored = torch.cat([whole, steps, cut.flatten()])
    cut = torch.cat([number[:side].expand(len(whole), side), torch.full_like(whole, last)[:, None]], 1)
    mask = torch.cat([torch.zeros_like(whole), number, cut.flatten()])

    begin = -torch.arange(tiles, device=device)
    none, partial = torch.zeros_like(begin), torch.searchsorted(steps, begin) + len(whole)
    by_place = torch.stack([begin.clamp(min=near) - near, none, none, partial, none, none], 1)

    index = torch.arange(-2 * tiles, 2 * tiles + 1, device=device)
    complete, rest = index // 2, (index + 1) // 2
    none, at = torch.zeros_like(rest), rest - 1 - near
    is_cut = (complete < rest) & (at >= 0) & (at < len(whole))
    jump = (len(steps) + at * (side + 1)).where(is_cut, 0)
    end = (jump + side + 1).where(is_cut, torch.searchsorted(steps, rest)) + len(whole)
    by_rest = torch.stack([none, complete.clamp(max=far + 1) - near, none, jump, end, none], 1)
    return by_place.int(), by_rest.int(), stored.int(), mask.int()


def documents_plan(cu_seqlens: Tensor, n: int, heads: int, size: int, before: int, after: int) -> Plan:
    """Plan of a window in packed documents, for `heads` heads that share its lists.

    Every document has tiles of its own, so that a pair of tiles has one of a few bands, which follows from their
    distance. Tiles that exceed the documents' own start and end at n.
    """
    shapes = n, len(cu_seqlens) - 1, heads, size, before, after
    tables = _of_shapes(_window_tables, n // size + len(cu_seqlens) - 1, cu_seqlens.device, *shapes)
    # Of documents, and of one more that has the tiles beyond their own.
    bounds = ascending(cu_seqlens, n)
    many, complete = (bounds.diff() + tables.rounding) // size
    end = many.cumsum(0)
    before_first = many - end
    rest = torch.add(complete - many, end, alpha=2)
    start = torch.add(bounds[:-1], before_first, alpha=size)
    owner = torch.searchsorted(end[:-1], tables.tile, right=True)
    of_tile = torch.stack([start, bounds[1:], before_first, rest]).index_select(1, owner) + tables.steps
    start, end, place, rest = of_tile.unbind()
    axis = Axis(1, tables.offset, start.clamp_(max=n), end)

    rows = tables.by_place.index_select(1, place)
    rows += tables.by_rest.index_select(1, rest)
    rows += tables.by_tile
    rows[..., FULL_END].clamp_(min=rows[..., FULL_BEGIN])
    first, past, _ = rows.unflatten(-1, (2, 3)).unbind(-1)
    entries = (past - first).sum(-1)
    order = tables.weight[entries].sort(dim=1, descending=True, stable=True).indices.int()
    lists = zip(rows, tables.stored, tables.stored, tables.mask, order, strict=True)
    by_key, by_query = (Walk(*walk) for walk in lists)
    part = Part(axis, axis, tables.offset, by_query, by_key)
    return Plan("packed window", n, heads, size, (part,), tables.masks, tables.blocks, tables.known)
