"""Packed documents whose bounds stay on their device: key intervals of rows, and plans of windows.

Row t of a document [a, b) sees keys max(a, t - before) .. min(b, t + after + 1) - 1. Nothing here reads a value: sizes
follow from the number of tokens and documents. Bounds that do not ascend from 0 to n never lead out of the sequence:
the first counts as 0, the last as n, and the others are raised to the largest before them and held below n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..patterns import And, Causal, Full, Pattern, SlidingWindow
from .plan import Axis, DeviceTables, Masks, Part, Plan, Walk
from .tile_lists import start_order


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


def ascending(cu_seqlens: Tensor, n: int) -> Tensor:
    """Bounds of documents from 0 to n, int64 (documents + 1), whatever the values are."""
    inner = cu_seqlens[1:-1].long().clamp(0, n).cummax(0).values
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), n)])


def row_bounds(cu_seqlens: Tensor, n: int, is_causal: bool) -> Tensor:
    """First key and end of the keys of each row in its document, int64 (n, 2)."""
    bounds, row = ascending(cu_seqlens, n), torch.arange(n, device=cu_seqlens.device)
    after = torch.searchsorted(bounds, row, right=True)
    return torch.stack([bounds[after - 1], row + 1 if is_causal else bounds[after]], 1)


def interval_bits(low: Tensor, high: Tensor, size: int) -> Tensor:
    """Elements low .. high - 1 of tiles as words of `Masks.bits`, int32 (..., W); elements outside a tile are cut."""
    word = torch.arange(0, size, 32, device=low.device)
    low, high = ((x[..., None] - word).clamp(0, min(size, 32)) for x in (low, high))
    one = torch.ones_like(low)
    return ((one << high) - (one << low)).clamp(min=0).int()


def documents_plan(cu_seqlens: Tensor, n: int, heads: int, size: int, before: int, after: int) -> Plan:
    """Plan of a window in packed documents, for `heads` heads that share its lists.

    Every document has tiles of its own, so that a pair of tiles has one of a few bands, which follows from their
    distance. Tiles that exceed the documents' own start and end at n.
    """
    device, bounds = cu_seqlens.device, ascending(cu_seqlens, n)
    length = bounds.diff()
    last = ((length + size - 1) // size).cumsum(0)
    tile = torch.arange(n // size + len(length), device=device)
    document = torch.searchsorted(last, tile, right=True)
    is_used, document = document < len(length), document.clamp(max=len(length) - 1)
    length = length[document].where(is_used, 0)
    many, complete = (length + size - 1) // size, length // size
    place = tile - last[document] + many
    start = (bounds[document] + place * size).where(is_used, n)
    axis = Axis(1, torch.zeros(heads, dtype=torch.int32, device=device), start, bounds[document + 1].where(is_used, n))

    # Distances in tiles, key minus query: tiles met in part lie on both sides of those met whole.
    before, after = (side if side < n else n + size for side in (before, after))
    near, far = -((before - size + 1) // size), (after - size + 1) // size
    first, end, most = -before // size, (after + size - 1) // size + 1, n // size
    sides = ((first, near), (far + 1, end)) if near <= far else ((first, end),)
    sides = [(max(low, -most), min(high, most + 1)) for low, high in sides]
    steps = torch.cat([torch.arange(low, max(low, high), device=device) for low, high in sides])
    row = torch.arange(size, device=device)
    low = torch.cat([(-before - steps * size).clamp(min=1 - size), row[:1] + 1 - size])
    high = torch.cat([(after - steps * size).clamp(max=size - 1), row[:1] + size - 1])
    bits = interval_bits(low[:, None] + row, high[:, None] + row + 1, size)
    masks = Masks(bits, torch.stack([low, high], 1).int())

    def walk(steps: Tensor, near: int, far: int) -> Walk:
        """Walk of tiles that meet others at some distances in part, and from `near` to `far` whole."""
        met = place[:, None] + steps
        # The last tile of a document exists in part: it is met through the mask that allows all.
        cut = many - 1
        is_cut = (complete < many) & (cut - place >= near) & (cut - place <= far)
        listed = torch.cat([(met >= 0) & (met < many[:, None]), is_cut[:, None]], 1)
        met = torch.cat([met, cut[:, None]], 1) + (tile - place)[:, None]
        order = (~listed).int().argsort(dim=1, stable=True)
        begin = tile * listed.shape[1]
        from_tile = (place + near).clamp(min=0)
        to_tile = torch.minimum(place + far + 1, complete).clamp(min=from_tile)
        nothing, base = torch.zeros_like(tile), tile - place
        rows = torch.stack([from_tile, to_tile, base, begin, begin + listed.sum(1), nothing], 1).int()
        partial = met.gather(1, order).flatten().int()
        return Walk(rows, tile.int(), partial, order.flatten().int(), start_order(rows))

    part = Part(axis, axis, axis.offset, walk(steps, near, far), walk(-steps, -far, -near))
    blocks, tables = heads * len(tile) * min(len(tile), end - first + 1), DeviceTables(True, True, False)
    return Plan("packed window", n, heads, size, (part,), masks, blocks, tables)
