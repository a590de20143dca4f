"""A plan cut down to some of its heads or query rows, which then are computed as they would be among the others."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..patterns import Pattern
from .plan import FULL_BASE, FULL_BEGIN, FULL_END, PARTIAL_BASE, PARTIAL_BEGIN, PARTIAL_END, Axis, Part, Plan, Walk
from .restricted import plan_rows

_cuts: WeakKeyDictionary[Plan, dict[tuple[object, ...], Plan]] = WeakKeyDictionary()
"""Cuts of each plan: backends keep what they derive from a plan by its identity."""
_spans: WeakKeyDictionary[Plan, dict[int, list[Span]]] = WeakKeyDictionary()


class Span(NamedTuple):
    """A run of query rows, and the stretches of tokens that computing it touches, each begin and end."""

    begin: int
    end: int
    first: int
    """Tiles reach into the run from here ..."""
    last: int
    """... to here: a tile is computed whole, also where its elements are not of the run."""
    key_first: int
    key_last: int
    """Not shorter than the stretch of queries."""
    pairs: int
    """Tile pairs of a head, at most."""


def of_heads(plan: Plan, begin: int, end: int) -> Plan:
    """The plan of heads `begin` to `end - 1` alone; the lists are shared with the whole plan."""
    if (begin, end) == (0, plan.heads):
        return plan
    known = _cuts.setdefault(plan, {})
    if (begin, end) not in known:
        parts = tuple(_part(part, begin, end) for part in plan.parts)
        facts = (x for part in parts for x in (part.head_class, part.queries.offset, part.keys.offset))
        # Heads that are alike give one cut, wherever they begin.
        alike = tuple(tuple(x.tolist()) for x in facts)
        if alike not in known:
            blocks = sum(sum(head_entries(part)) for part in parts)
            known[alike] = replace(plan, heads=end - begin, parts=parts, blocks=blocks)
        known[begin, end] = known[alike]
    return known[begin, end]


def of_rows(plan: Plan, pattern: Pattern, span: Span) -> Plan:
    """The plan of a run of rows alone, on the stretches of queries and keys it touches.

    Its tiles are those of the whole plan of this resolved pattern and meet the same tiles in the same order.
    """
    if span.end - span.begin == plan.n:
        return plan
    known = _cuts.setdefault(plan, {})
    if span not in known:
        rows = plan_rows(pattern, plan.n, plan.heads, [(span.begin, span.end)], block_size=plan.block_size)
        parts = tuple(
            replace(part, queries=_moved(part.queries, span.first), keys=_moved(part.keys, span.key_first))
            for part in rows.parts
        )
        known[span] = replace(rows, n=span.key_last - span.key_first, parts=parts).to(plan.device)
    return known[span]


def spans(plan: Plan, rows: int) -> list[Span]:
    """The runs that so many rows at a time make of the sequence."""
    if rows >= plan.n:
        return [Span(0, plan.n, 0, plan.n, 0, plan.n, plan.blocks)]
    known = _spans.setdefault(plan, {})
    if rows not in known:
        known[rows] = _spans_of(plan, rows)
    return known[rows]


def widest_tile(plan: Plan) -> int:
    """Rows that a run should not have fewer of: whole blocks of what the longest tile reaches over."""
    block = plan.block_size
    reaches = (_reach(part.queries, block) for part in plan.parts)
    longest = max((int((stop - start).max()) for start, stop in reaches), default=block)
    return min(plan.n, -(-longest // block) * block)


def _spans_of(plan: Plan, rows: int) -> list[Span]:
    begin = torch.arange(0, plan.n, rows)
    end = (begin + rows).clamp(max=plan.n)
    first, last = begin.clone(), end.clone()
    key_first, key_last, pairs = torch.full_like(begin, plan.n), torch.zeros_like(begin), torch.zeros_like(begin)
    for part in plan.parts:
        start, stop = _reach(part.queries, plan.block_size)
        key_start, key_stop = _reach(part.keys, plan.block_size)
        least, most = _met(part.by_query, part.queries.tiles)
        met = torch.add(*part.by_query.counts()).view(-1, part.queries.tiles).amax(0).cpu()
        run, final = start // rows, (stop - 1) // rows
        for _ in range(int((final - run).max()) + 1):
            here = run <= final
            first.scatter_reduce_(0, run[here], start[here], "amin")
            last.scatter_reduce_(0, run[here], stop[here], "amax")
            here &= met > 0
            pairs.scatter_add_(0, run[here], met[here])
            key_first.scatter_reduce_(0, run[here], key_start[least[here]], "amin")
            key_last.scatter_reduce_(0, run[here], key_stop[most[here]], "amax")
            run = run + 1
    key_first = torch.minimum(key_first, plan.n - (last - first))
    key_last = torch.maximum(key_last, key_first + last - first)
    columns = begin, end, first, last, key_first, key_last, pairs
    return [Span(*line) for line in torch.stack(columns, 1).tolist()]


def _reach(axis: Axis, block_size: int) -> tuple[Tensor, Tensor]:
    """Tokens that each tile reaches over, for whichever head: first, and just past the last."""
    start, end = axis.start.cpu(), axis.end.cpu()
    return start, torch.minimum(start + axis.rate * block_size, end)


def _met(walk: Walk, tiles: int) -> tuple[Tensor, Tensor]:
    """First and last tile that each stationary tile meets for some class, where it meets any."""
    table = walk.rows.cpu().long()
    least, most = torch.full((len(table),), torch.iinfo(torch.int64).max), torch.full((len(table),), -1)
    for begin, end, base, stored in (
        (FULL_BEGIN, FULL_END, FULL_BASE, walk.full.cpu()),
        (PARTIAL_BEGIN, PARTIAL_END, PARTIAL_BASE, walk.partial.cpu()),
    ):
        row = (table[:, end] > table[:, begin]).nonzero()[:, 0]
        # Lists ascend.
        least[row] = torch.minimum(least[row], table[row, base] + stored[table[row, begin]])
        most[row] = torch.maximum(most[row], table[row, base] + stored[table[row, end] - 1])
    return least.view(-1, tiles).amin(0), most.view(-1, tiles).amax(0)


def _part(part: Part, begin: int, end: int) -> Part:
    queries, keys = _axis(part.queries, begin, end), _axis(part.keys, begin, end)
    return replace(part, queries=queries, keys=keys, head_class=part.head_class[begin:end].clone())


def _axis(axis: Axis, begin: int, end: int) -> Axis:
    return replace(axis, offset=axis.offset[begin:end].clone())


def _moved(axis: Axis, first: int) -> Axis:
    return replace(axis, start=axis.start - first, end=axis.end - first)


def head_entries(part: Part) -> list[int]:
    """Tile pairs that each head of a part computes."""
    entries = torch.add(*part.by_query.counts()).view(-1, part.queries.tiles).sum(1).tolist()
    return [entries[kind] if kind >= 0 else 0 for kind in part.head_class.tolist()]
