"""A plan cut down to some of its heads or query rows, which then are computed as they would be among the others."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns import Pattern
from .plan import FULL_BASE, FULL_BEGIN, FULL_END, PARTIAL_BASE, PARTIAL_BEGIN, PARTIAL_END, Axis, Part, Plan, Walk
from .row_plan import plan_rows


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
    key = "heads", begin, end
    subset = plan.memo.get(key)
    if subset is None:
        parts = tuple(_part(part, begin, end) for part in plan.parts)
        facts = (x for part in parts for x in (part.head_class, part.queries.offset, part.keys.offset))
        # Runs of heads with equal classes and offsets share one plan, and with it the work lists of backends.
        equal = "heads", *(tuple(x.tolist()) for x in facts)
        subset = plan.memo.get(equal)
        if subset is None:
            blocks = sum(sum(head_entries(part)) for part in parts)
            subset = plan.memo.setdefault(equal, replace(plan, heads=end - begin, parts=parts, blocks=blocks))
        plan.memo[key] = subset
    return subset


def of_rows(plan: Plan, pattern: Pattern, span: Span) -> Plan:
    """The plan of a run of rows alone, on the stretches of queries and keys it touches.

    Its tiles are those of the whole plan of this resolved pattern and meet the same tiles in the same order.
    """
    if span.end - span.begin == plan.n:
        return plan
    key = "rows", span
    subset = plan.memo.get(key)
    if subset is None:
        rows = plan_rows(pattern, plan.n, plan.heads, [(span.begin, span.end)], block_size=plan.block_size)
        parts = tuple(
            replace(part, queries=_shifted(part.queries, span.first), keys=_shifted(part.keys, span.key_first))
            for part in rows.parts
        )
        subset = replace(rows, n=span.key_last - span.key_first, parts=parts).to(plan.device)
        subset = plan.memo.setdefault(key, subset)
    return subset


def spans(plan: Plan, rows: int) -> list[Span]:
    """The runs that so many rows at a time make of the sequence."""
    if rows >= plan.n:
        return [Span(0, plan.n, 0, plan.n, 0, plan.n, plan.blocks)]
    key = "spans", rows
    if key not in plan.memo:
        plan.memo[key] = _spans_of(plan, rows)
    return plan.memo[key]


def widest_tile(plan: Plan) -> int:
    """Rows that a run should not have fewer of: whole blocks of what the longest tile reaches over."""
    block = plan.block_size
    reaches = (_reach(part.queries, block) for part in plan.parts)
    longest = max((int((stop - start).max()) for start, stop in reaches), default=block)
    return min(plan.n, -(-longest // block) * block)


def _spans_of(plan: Plan, rows: int) -> list[Span]:
    begin = torch.arange(0, plan.n, rows, device="cpu")
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
    least, most = (
        torch.full((len(table),), torch.iinfo(torch.int64).max, device="cpu"),
        torch.full((len(table),), -1, device="cpu"),
    )
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


def _shifted(axis: Axis, first: int) -> Axis:
    return replace(axis, start=axis.start - first, end=axis.end - first)


def head_entries(part: Part) -> list[int]:
    """Tile pairs of each head of a part."""
    entries = torch.add(*part.by_query.counts()).view(-1, part.queries.tiles).sum(1).tolist()
    return [entries[kind] if kind >= 0 else 0 for kind in part.head_class.tolist()]


def longest_row(part: Part) -> int:
    """Entries of the longest row of a part, by query or by key."""
    return max(int(torch.add(*walk.counts()).max()) for walk in (part.by_query, part.by_key))
