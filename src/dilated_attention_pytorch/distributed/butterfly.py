"""The thinning butterfly: rows of a dilated ladder in a few messages a rank, each row once.

Before a level a rank holds, for each head, the samples of its segment one level down. It swaps the samples that the
level keeps with the ranks at the same place in the sibling segments, and then holds the samples of its segment at the
level. With segments and rates that grow by a factor a, that is (a - 1) log_a P messages instead of up to P - 1.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..patterns import Dilated, Pattern
from .exchange import ButterflyRound, ExchangePlan
from .layout import SequenceLayout


def why_no_butterfly(pattern: Pattern, layout: SequenceLayout) -> str | None:
    """Reason why a resolved pattern has no butterfly on a layout, or None."""
    if not isinstance(pattern, Dilated):
        return "the pattern is not a plain dilated one"
    if pattern.heads == "split" or (pattern.offset == "block" and max(pattern.dilation_rates) > 1):
        return "a head's samples at one rate are not among those at the rate before"
    own, rest = divmod(layout.n, layout.world)
    if rest or layout.begins != tuple(range(0, layout.n, own)) or layout.ranks != tuple(range(layout.world)):
        return "shards are not contiguous and equal"
    cut = [
        segment
        for segment, _ in pattern.branches
        if (own % segment if segment <= own else layout.n % min(segment, layout.n))
    ]
    if cut:
        return f"segments of {cut[0]} do not part evenly with shards of {own}"
    extent, before = own, 1
    for segment, rate in _levels(pattern, layout):
        if segment <= extent or segment % extent or extent % rate or rate % before:
            return f"segments of {segment} at rate {rate} do not refine stretches of {extent} at rate {before}"
        extent, before = segment, rate
    return None


def _levels(pattern: Dilated, layout: SequenceLayout) -> list[tuple[int, int]]:
    """Branches that reach beyond a shard, ascending."""
    own = layout.n // layout.world
    return sorted((min(segment, layout.n), rate) for segment, rate in pattern.branches if segment > own)


def messages(pattern: Pattern, layout: SequenceLayout) -> int:
    """The most messages a rank receives in all rounds; `why_no_butterfly` must be None."""
    assert isinstance(pattern, Dilated)
    extents = [layout.n // layout.world, *(segment for segment, _ in _levels(pattern, layout))]
    return sum(wide // narrow - 1 for narrow, wide in pairwise(extents))


def butterfly(pattern: Pattern, plan: ExchangePlan, heads: int) -> tuple[ButterflyRound, ...]:
    """Rounds that bring the requested rows of a plan; `why_no_butterfly` must be None."""
    assert isinstance(pattern, Dilated)
    layout, rank = plan.layout, plan.rank
    own = layout.n // layout.world
    rounds, extent = [], own
    for segment, rate in _levels(pattern, layout):
        residues = _residues(plan, heads, rate, own)
        first = rank * own // segment * segment
        within = rank * own % extent
        send, receive = {}, {}
        for start in range(first, first + segment, extent):
            peer = (start + within) // own
            if peer != rank and residues:
                mine = _codes(rank * own - within, extent, rate, residues, layout.n)
                theirs = _codes(start, extent, rate, residues, layout.n)
                send[peer], receive[peer] = plan.place(mine), plan.received(theirs)
        rounds.append(ButterflyRound(send, receive))
        extent = segment
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    brought = torch.cat([none, *(rows for one in rounds for rows in one.receive.values())])
    assert brought.sort().values.equal(torch.arange(len(plan.request.codes), device="cpu")), (
        "a butterfly must bring the requested rows"
    )
    return tuple(rounds)


def _residues(plan: ExchangePlan, heads: int, rate: int, own: int) -> list[tuple[int, int]]:
    """Key heads with each residue that a query head with a sample in this shard takes of them."""
    shared = heads // plan.key_heads
    begin = plan.rank * own
    return sorted({(head // shared, head % rate) for head in range(heads) if (head % rate - begin) % rate < own})


def _codes(start: int, extent: int, rate: int, residues: list[tuple[int, int]], n: int) -> Tensor:
    return torch.cat(
        [group * n + torch.arange(start + residue, start + extent, rate, device="cpu") for group, residue in residues]
    )
