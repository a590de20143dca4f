"""A plan cut down to some of its heads, which then are computed as they would be among the others."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from .plan import Axis, Part, Plan

_cuts: WeakKeyDictionary[Plan, dict[tuple[object, ...], Plan]] = WeakKeyDictionary()
"""Cuts of each plan: backends keep what they derive from a plan by its identity."""


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


def _part(part: Part, begin: int, end: int) -> Part:
    queries, keys = _axis(part.queries, begin, end), _axis(part.keys, begin, end)
    return replace(part, queries=queries, keys=keys, head_class=part.head_class[begin:end].clone())


def _axis(axis: Axis, begin: int, end: int) -> Axis:
    return replace(axis, offset=axis.offset[begin:end].clone())


def head_entries(part: Part) -> list[int]:
    """Tile pairs that each head of a part computes."""
    entries = torch.add(*part.by_query.counts()).view(-1, part.queries.tiles).sum(1).tolist()
    return [entries[kind] if kind >= 0 else 0 for kind in part.head_class.tolist()]
