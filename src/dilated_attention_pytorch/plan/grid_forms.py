"""Closed forms of `Grid`: keys within reach of a range of tokens, and meetings of two ranges.

A range of tokens in row-major order is cut into boxes, one interval of coordinates an axis. The window of an interval
of coordinates is again an interval, so the keys in reach of a box form a box.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..patterns.grid import Grid
from .plan import ranges

Interval = tuple[Tensor, Tensor]
"""First and last coordinate on an axis, int64."""


def grid_reach(pattern: Grid, q0: Tensor, q1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row, first key and last key of stretches that hold every key in reach of the queries `q0 .. q1`."""
    rows = torch.arange(len(q0), device=q0.device)
    inside, tokens = q1 >= pattern.prefix, pattern.shape[0] * pattern.strides[0]
    # A strided tile may begin past the sequence; it has no elements.
    low, high = ((t - pattern.prefix).clamp(0, tokens - 1)[inside] for t in (q0, q1))
    stretches = [_box_reach(pattern, *box) for box in _boxes(pattern, rows[inside], low, high, 0)]
    if pattern.prefix:
        wide = q0 < pattern.prefix
        last = torch.where(wide, pattern.prefix + tokens, pattern.prefix) - 1
        stretches.append((rows, torch.zeros_like(q0), last))
    row, first, last = (torch.cat(column) for column in zip(*stretches, strict=True))
    return row, first, last


def _boxes(pattern: Grid, rows: Tensor, low: Tensor, high: Tensor, axis: int) -> list[tuple[Tensor, list[Interval]]]:
    """Boxes of the ranges `low .. high` of tokens, counted inside the axes from `axis` on."""
    stride = pattern.strides[axis]
    first, last = low // stride, high // stride
    if axis + 1 == len(pattern.shape):
        return [(rows, [(first, last)])]
    whole = [(torch.zeros_like(first), torch.full_like(first, size - 1)) for size in pattern.shape[axis + 1 :]]
    one, top = first == last, torch.full_like(low, stride - 1)
    parts = []
    # Head and tail rows may be cut; the rows between are whole.
    for selected, at, begin, end in (
        (one, first, low % stride, high % stride),
        (~one, first, low % stride, top),
        (~one, last, torch.zeros_like(low), high % stride),
    ):
        index = selected.nonzero()[:, 0]
        for slots, box in _boxes(pattern, index, begin[index], end[index], axis + 1):
            parts.append((rows[slots], [(at[slots], at[slots]), *box]))
    between = (last > first + 1).nonzero()[:, 0]
    middle = [(first + 1, last - 1), *whole]
    parts.append((rows[between], [(a[between], b[between]) for a, b in middle]))
    return parts


def _box_reach(pattern: Grid, rows: Tensor, box: list[Interval]) -> tuple[Tensor, Tensor, Tensor]:
    """Stretches of keys in reach of boxes of queries: one along the last axis for every coordinate of the others."""
    owner = torch.arange(len(rows), device=rows.device)
    token = torch.full_like(owner, pattern.prefix)
    for axis, (low, high) in enumerate(box[:-1]):
        first, last = _window(pattern, axis, low, high)
        rate = pattern.dilations[axis]
        index, coordinate = ranges(first[owner], (last - first + 1)[owner])
        owner, token = owner[index], token[index]
        # Only residues that occur among the queries are seen.
        seen = (coordinate - low[owner]) % rate <= high[owner] - low[owner]
        owner, token = owner[seen], (token + coordinate * pattern.strides[axis])[seen]
    first, last = _window(pattern, len(box) - 1, *box[-1])
    return rows[owner], token + first[owner], token + last[owner]


def _window(pattern: Grid, axis: int, low: Tensor, high: Tensor) -> Interval:
    """First and last coordinate in the windows of the coordinates `low .. high`, possibly with some to spare."""
    first, last = _edges(pattern, axis, low.device)
    # Windows of different residues start up to `dilation` - 1 out of order.
    return first.flip(0).cummin(0).values.flip(0)[low], last.cummax(0).values[high]


def _edges(pattern: Grid, axis: int, device: torch.device) -> Interval:
    """First and last coordinate in the window of every coordinate of an axis."""
    size, window, rate = pattern.shape[axis], pattern.windows[axis], pattern.dilations[axis]
    at = torch.arange(size, device=device)
    if pattern.causal_axes[axis]:
        return torch.maximum(at - (window - 1) * rate, at % rate), at
    length = (size - at % rate + rate - 1) // rate
    start = torch.minimum(at // rate - window // 2, length - window).clamp(min=0) * rate + at % rate
    return start, start + (window - 1) * rate


def classify_grid(pattern: Grid, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, Tensor]:
    """Whether all, and whether none, of the pairs of two ranges of tokens are allowed; cautious in both."""
    every, none = torch.ones_like(q0, dtype=torch.bool), torch.zeros_like(q0, dtype=torch.bool)
    spans = [_span(pattern, *(t - pattern.prefix for t in ends)) for ends in ((q0, q1), (k0, k1))]
    for axis, ((a0, a1), (b0, b1)) in enumerate(zip(*spans, strict=True)):
        rate, (first, last) = pattern.dilations[axis], _edges(pattern, axis, q0.device)
        latest, earliest = first.cummax(0).values[a1], last.flip(0).cummin(0).values.flip(0)[a0]
        low, high = _window(pattern, axis, a0, a1)
        residue = (a1 - b0) % rate
        every &= (latest <= b0) & (b1 <= earliest) & ((rate == 1) | ((a0 == a1) & (b0 == b1) & (residue == 0)))
        # Differences run from b0 - a1 to b1 - a0; no multiple of the dilation among them, no pair.
        none |= (b1 < low) | (b0 > high) | (residue > (b1 - a0) - (b0 - a1))
    if pattern.prefix:
        outside = (q0 < pattern.prefix) | (k0 < pattern.prefix)
        every = torch.where(outside, (q1 < pattern.prefix) | (k1 < pattern.prefix), every)
        none &= ~outside
    return every, none


def _span(pattern: Grid, low: Tensor, high: Tensor) -> list[Interval]:
    """Interval of coordinates on every axis that holds a range of tokens: whole below the first axis that changes."""
    low, high = low.clamp(min=0), high.clamp(min=0)
    fixed, spans = torch.ones_like(low, dtype=torch.bool), []
    for size, stride in zip(pattern.shape, pattern.strides, strict=True):
        first, last = low // stride % size, high // stride % size
        spans.append((torch.where(fixed, first, 0), torch.where(fixed, last, size - 1)))
        fixed = fixed & (first == last)
    return spans


def grid_columns(pattern: Grid, q0: Tensor, k0: Tensor, extent: int) -> list[Tensor]:
    """Columns that promise equal masks when equal.

    Away from the borders of an axis, a mask depends on the difference of coordinates alone, provided neither tile
    wraps around on that axis.
    """
    query, key = q0 - pattern.prefix, k0 - pattern.prefix
    columns, steady = [], torch.ones_like(q0, dtype=torch.bool)
    for axis, (size, stride) in enumerate(zip(pattern.shape, pattern.strides, strict=True)):
        first, last, other, last_other = (
            # A tile that ends past the sequence must not wrap around on axis 0.
            t // stride % size if axis else t // stride
            for t in (query, query + extent - 1, key, key + extent - 1)
        )
        window, rate = pattern.windows[axis], pattern.dilations[axis]
        inside = (first >= window // 2 * rate) & (last < size - (window - 1 - window // 2) * rate)
        moves = steady & (inside | pattern.causal_axes[axis])
        columns += [other - first, torch.where(moves, -1, first)]
        steady = steady & (first == last) & (other == last_other)
    if pattern.prefix:
        columns += [q0.clamp(max=pattern.prefix), k0.clamp(max=pattern.prefix)]
    return columns
