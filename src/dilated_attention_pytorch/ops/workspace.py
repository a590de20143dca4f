"""What each backend takes besides its results, reckoned from above: read off its code, and held to it by tests."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.registry import AttentionCall, reproducible_gradients
from ..plan import Part
from ..plan.cut import head_entries


class Extent(NamedTuple):
    """How much of a call is computed at a time."""

    queries: int
    """Query rows over all samples and heads."""
    keys: int
    samples: int
    heads: int
    """Query heads of a sample."""
    pairs: int | None = None
    """Tile pairs that it meets at most, where it is only some rows of a head."""


def workspace(call: AttentionCall, name: str, direction: str, extent: Extent) -> int:
    """The most bytes a backend takes besides the results of a chunk."""
    row, key = _a_row(call, name, direction == "forward", extent.pairs is not None)
    return row * extent.queries + key * extent.keys + _whatever_rows(call, name, direction == "forward", extent)


def _a_row(call: AttentionCall, name: str, forward: bool, cut: bool) -> tuple[int, int]:
    """Bytes a query row and a key row."""
    d, e, n = call.query.shape[3], call.value.shape[3], call.plan.n
    item, wide = call.query.dtype.itemsize, call.compute_dtype.itemsize
    if name == "triton" or (name == "cudnn" and not forward):
        # Several parts, or one that leaves rows out, carry their sums in float32; delta is one number a row.
        sums = 0 if _writes_all(call, cut) else 4
        needed = (sums * e, 0) if forward else (4 + sums * d, sums * (d + e))
        if name == "triton":
            return needed
        # Rows gathered for a piece and those before, its gradients for every query head, and cuDNN's own sum of dQ.
        return max(needed[0], 4 * item * e + 3 * item * (2 * d + e) + 8 * (d + 4)), needed[1]
    if name == "cudnn":
        # A piece, the one before it, and one laid out anew.
        return 3 * (item * e + wide) + wide, 0
    if name in ("hopper", "flash4"):
        # One number or two a row of whole blocks, and in float32 the sums of what has no fixed order: one a part.
        sums = d if name == "flash4" or not reproducible_gradients() else 0
        tiles = [part.queries.tiles for part in call.plan.parts]
        blocks = max(-(-n // call.plan.block_size), sum(tiles) if sums and name == "hopper" else max(tiles, default=0))
        padded = -(-blocks * call.plan.block_size * 4 // n)
        needed = padded * (sums + (2 if name == "flash4" else 1)) + item * e + 4
        return (0, 0) if forward else (needed, padded * (d + e) if name == "flash4" else 0)
    if name == "flex":
        dense = 8 * wide * n if call.device.type == "cpu" else 0
        more = (2 * item * e + 2 * wide, 0) if forward else (2 * item * (d + e) + 6 * wide, 2 * item * (d + e))
        return dense + more[0], more[1]
    copies = max(2, torch.get_num_threads()) if call.device.type == "cpu" else 2
    if name == "native" and item == wide:
        return (4 * wide, 0) if forward else (wide * (d + 2), copies * wide * (_lanes(d) + _lanes(e)))
    if forward:
        # Everything once more in the dtype of the sums.
        return wide * (d + e + 1), wide * (d + e)
    return wide * (3 * d + 2 * e + 3), (1 + copies) * wide * (_lanes(d) + _lanes(e))


def _writes_all(call: AttentionCall, cut: bool) -> bool:
    """Whether one part of the plan writes every row, so that triton needs no sums beside the results."""
    parts = call.plan.parts
    if cut or len(parts) != 1 or bool((parts[0].head_class < 0).any()):
        return False
    axes, block = (parts[0].queries, parts[0].keys), call.plan.block_size
    return all(a.rate == 1 and int((a.end - a.start).clamp(max=block).sum()) == call.plan.n for a in axes)


def _whatever_rows(call: AttentionCall, name: str, forward: bool, extent: Extent) -> int:
    """Bytes that do not grow with the rows."""
    n, d, e = call.plan.n, call.query.shape[3], call.value.shape[3]
    wide, block, parts = call.compute_dtype.itemsize, call.plan.block_size, call.plan.parts
    if name == "cpu":
        from ..kernels import cpu

        tiles = max((max(head_entries(part)) for part in parts), default=0) if extent.pairs is None else extent.pairs
        a_tile = extent.samples * block * (4 * block + 2 * (d + e)) * wide
        # As cpu.py reckons; its masks, and what a product holds meanwhile, come to as much again.
        return 2 * min(max(cpu.BUDGET, a_tile), tiles * a_tile)
    if name == "reference":
        from ..kernels import reference

        return 8 * wide * extent.samples * min(n, reference.ROWS) * n
    if name in ("triton", "cudnn") and parts:
        width = e + 1 if forward else d + e
        # Those of a part are there until the next one has its own.
        pieces = min(len(parts), 2) * max(_pieces(call, part, extent) for part in parts)
        return extent.samples * pieces * block * width * 4
    if name == "hopper" and len(parts) == 1:
        width = wide + call.query.dtype.itemsize * (e if forward else 2 * d + e)
        return _hopper_pieces(call, parts[0], extent) * block * width
    return 0


def _hopper_pieces(call: AttentionCall, part: Part, extent: Extent) -> int:
    """Room for pieces of long rows, in blocks, that hopper has for a chunk at most."""
    from ..kernels.hopper_backend import processors
    from ..kernels.hopper_split import ROWS_A_PIECE

    programs = processors(call.device)
    if _longest(part) <= extent.samples * extent.heads * min(head_entries(part)) // programs:
        return 0
    return extent.samples * extent.heads * min(programs, max(part.queries.tiles, part.keys.tiles) // ROWS_A_PIECE)


def _longest(part: Part) -> int:
    """Entries of the longest row by query or by key."""
    return max(int(torch.add(*walk.counts()).max()) for walk in (part.by_query, part.by_key))


def _pieces(call: AttentionCall, part: Part, extent: Extent) -> int:
    """The most pieces of long rows that triton has for a sample of a chunk."""
    from ..kernels.triton_schedule import PROGRAMS_PER_PROCESSOR, SHORTEST_PIECE

    programs = PROGRAMS_PER_PROCESSOR
    if call.device.type == "cuda":
        programs *= torch.cuda.get_device_properties(call.device).multi_processor_count
    shortest = max(1, SHORTEST_PIECE // call.plan.block_size**2)
    entries = [own for own in head_entries(part) if own] or [1]
    longest = _longest(part)
    if extent.pairs is not None:
        entries, longest = [max(extent.pairs, 1)], min(longest, extent.pairs)
    share = 0 if extent.pairs is not None else extent.heads * min(entries) // programs
    if longest <= max(shortest, share):
        return 0
    # Rows are cut to a program's share of the whole, or the shortest piece, and have fewer than two pieces a length.
    uneven = min(extent.heads, -(-max(entries) // min(entries)))
    return min(2 * (programs + -(-programs // shortest)) * uneven, 2 * extent.heads * -(-max(entries) // shortest))


def _lanes(width: int) -> int:
    return -(-width // 16) * 16
