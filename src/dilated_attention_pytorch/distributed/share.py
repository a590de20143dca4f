"""From a problem to each rank's share of it: what it computes in which stage, and what is exchanged for that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns import Global, Or, Pattern, PerHead
from ..plan import Plan, plan_rows
from .butterfly import butterfly, why_no_butterfly
from .choose import Exchange, Machine, Overlap, Work, chosen, predicted
from .comm import ExchangePlan, Request, agree, request_for
from .inside import InsidePlan, inside
from .restrict import Pairs, RankPlan, restrict
from .shard import SequenceLayout
from .transport import Transport


@dataclass(frozen=True, eq=False, slots=True)
class Stage:
    """Some pairs, and how the rows they need from other ranks get here."""

    work: RankPlan | InsidePlan
    exchange: ExchangePlan | None
    """None where nothing is fetched for this stage alone."""
    which: Tensor
    """int64: the fetched row that each place `work.far_at` takes"""

    def to(self, device: torch.device) -> Stage:
        """With everything the kernels read on the device."""
        return replace(self, work=self.work.to(device), which=self.which.to(device))


@dataclass(frozen=True, eq=False, slots=True)
class Visit:
    """Queries of leading tokens that travel to the keys, and what this rank computes for them."""

    tokens: int
    exchange: ExchangePlan
    """Of query rows: its key heads are the query heads."""
    place: Tensor
    """int64 [H * tokens]: where each lies in [own rows, received rows]"""
    work: RankPlan

    def to(self, device: torch.device) -> Visit:
        """With everything the kernels read on the device."""
        return replace(self, work=self.work.to(device), place=self.place.to(device))


@dataclass(frozen=True, eq=False, slots=True)
class Share:
    """Everything about one rank's part in a problem that does not depend on the numbers in its tensors."""

    rank: int
    layout: SequenceLayout
    tokens: Tensor
    """int64 [n]: the rank's tokens"""
    stages: tuple[Stage, ...]
    visit: Visit | None
    exchange: str
    """How rows travel: direct, butterfly or ring."""
    why: str
    """Why they travel so."""

    def to(self, device: torch.device) -> Share:
        """With everything the kernels read on the device."""
        if self.tokens.device == device:
            return self
        return replace(
            self,
            tokens=self.tokens.to(device),
            stages=tuple(stage.to(device) for stage in self.stages),
            visit=None if self.visit is None else self.visit.to(device),
        )


class Problem(NamedTuple):
    """What a call asks, apart from the numbers in its tensors."""

    pattern: Pattern
    """Resolved for the whole sequence."""
    heads: int
    key_heads: int
    batch: int
    widths: tuple[int, int]
    """Of a key and of a value."""
    itemsize: int
    overlap: Overlap = "none"
    exchange: Exchange = "auto"
    receive_budget: int | None = None
    """Bytes of fetched rows that may be here at a time."""
    machine: Machine = Machine()

    @property
    def row_bytes(self) -> int:
        """Of a row of K and its row of V, over the batch."""
        return self.batch * sum(self.widths) * self.itemsize


def rank_plan(
    pattern: Pattern, layout: SequenceLayout, rank: int, heads: int, key_heads: int, pairs: Pairs | None = None
) -> RankPlan:
    """One rank's pairs under a resolved pattern."""
    pairs = pairs or Pairs()
    if not pairs.visiting:
        return restrict(_own_plan(pattern, layout, rank, heads), layout, rank, key_heads, pairs)
    runs = layout.runs(rank)
    hull = (runs[0][0], runs[-1][1]) if runs else (0, 0)
    plan = plan_rows(pattern, layout.n, heads, [(0, pairs.travelling)], hull)
    return restrict(plan, layout, rank, key_heads, pairs)


@lru_cache(maxsize=8)
def _own_plan(pattern: Pattern, layout: SequenceLayout, rank: int, heads: int) -> Plan:
    return plan_rows(pattern, layout.n, heads, layout.runs(rank))


def shares_of(problem: Problem, layout: SequenceLayout, transport: Transport) -> list[Share]:
    """The shares of the ranks of this process. Collective."""
    if layout.world == 1:
        (work,) = _works(problem, layout, transport, [Pairs()])
        return [Share(0, layout, layout.positions(0), (_stage(work),), None, "none", "one rank has all rows")]
    travelling = _travelling(problem, layout)
    local = problem.overlap == "local" or problem.receive_budget is not None
    far_pairs = Pairs(far=True, travelling=travelling) if local else Pairs()
    far = _works(problem, layout, transport, [far_pairs] * len(transport.ranks))
    own = [_own_plan(problem.pattern, layout, rank, problem.heads) for rank in transport.ranks] if local else []
    within = [inside(plan, layout, rank, travelling) for plan, rank in zip(own, transport.ranks, strict=False)]
    edges = [Pairs(holder=rank, travelling=travelling, edges=True) for rank in transport.ranks] if local else []
    edge = _works(problem, layout, transport, edges)
    plans = agree(
        [_request(work, problem, layout, rank) for rank, work in zip(transport.ranks, far, strict=True)],
        layout,
        problem.key_heads,
        transport,
    )
    stages, limit = _stage_count(problem, layout, transport, far)
    plans, exchange, why = _choose(problem, layout, transport, plans, [*zip(within, edge, strict=True)], far, stages)
    if exchange == "ring":
        return _ring_shares(problem, layout, transport, why)
    if stages > 1:
        columns = _staged(problem, layout, transport, far, travelling, stages, limit)
    else:
        columns = [[_stage(work, plan) for work, plan in zip(far, plans, strict=True)]]
    if local:
        columns[:0] = [[_stage(work) for work in works] for works in (within, edge)]
    visits = _visits(problem, layout, transport, travelling) if travelling else [None] * len(transport.ranks)
    return [
        Share(rank, layout, layout.positions(rank), tuple(column[at] for column in columns), visits[at], exchange, why)
        for at, rank in enumerate(transport.ranks)
    ]


def _stage(work: RankPlan | InsidePlan, plan: ExchangePlan | None = None) -> Stage:
    if plan is None or isinstance(work, InsidePlan):
        return Stage(work, None, torch.empty(0, dtype=torch.int64))
    return Stage(work, plan, plan.received(work.far_codes))


def _works(problem: Problem, layout: SequenceLayout, transport: Transport, pairs: list[Pairs]) -> list[RankPlan]:
    return [
        rank_plan(problem.pattern, layout, rank, problem.heads, problem.key_heads, some)
        for rank, some in zip(transport.ranks, pairs, strict=False)
    ]


def _request(work: RankPlan, problem: Problem, layout: SequenceLayout, rank: int) -> Request:
    return request_for(work.far_codes, layout, rank, problem.key_heads)


def _travelling(problem: Problem, layout: SequenceLayout) -> int:
    """Leading tokens whose queries go to the keys: where that moves fewer numbers than bringing them all keys."""
    if problem.overlap == "none" or problem.exchange == "ring":
        return 0
    tokens = min(_global_queries(problem.pattern), layout.n)
    key, value = problem.widths
    shipped = tokens * problem.heads * (layout.world - 1) * (key + 2 * (value + 1))
    fetched = (layout.n - max(layout.lengths)) * problem.key_heads * (key + value)
    return tokens if shipped < fetched else 0


def _global_queries(pattern: Pattern) -> int:
    """Leading tokens whose queries see every key."""
    match pattern:
        case Global(queries=True):
            return pattern.tokens
        case Or():
            return max(_global_queries(pattern.left), _global_queries(pattern.right))
        case PerHead():
            return min(map(_global_queries, pattern.patterns))
        case _:
            return 0


def _choose(
    problem: Problem,
    layout: SequenceLayout,
    transport: Transport,
    plans: list[ExchangePlan],
    near: list[tuple[InsidePlan, RankPlan]],
    far: list[RankPlan],
    stages: int,
) -> tuple[list[ExchangePlan], str, str]:
    """The exchange all ranks use, with the plans it needs, and why."""
    against = {}
    reason = "rows come in several stages" if stages > 1 else why_no_butterfly(problem.pattern, layout)
    if reason is not None:
        against["butterfly"] = reason
    if problem.overlap == "none" and problem.exchange == "auto":
        against["ring"] = 'its sums depend on the number of ranks; overlap="local" allows that'
    stepped = plans
    if reason is None:
        stepped = [replace(plan, steps=butterfly(problem.pattern, plan, problem.heads)) for plan in plans]
    table = []
    for at, plan in enumerate(plans):
        near_flops = sum(work.plan.flops(*problem.widths) for work in near[at]) if near else 0
        work = Work(problem.batch * near_flops, problem.batch * far[at].plan.flops(*problem.widths))
        told = plan.report(problem.row_bytes), stepped[at].report(problem.row_bytes)
        direct, through = (predicted(t, work, layout.world, problem.overlap, problem.machine) for t in told)
        table.append(torch.tensor([direct["direct"], through["direct"], direct["ring"]], dtype=torch.float64))
    names = ("direct", "butterfly", "ring")
    seconds = dict(zip(names, transport.highest(table).tolist(), strict=True))
    exchange, why = chosen(seconds, problem.exchange, against, problem.machine)
    return (stepped if exchange == "butterfly" else plans), exchange, why


def _stage_count(
    problem: Problem, layout: SequenceLayout, transport: Transport, far: list[RankPlan]
) -> tuple[int, int]:
    """In how many stages rows are fetched, the same on every rank, and how many rows a stage may bring."""
    if problem.receive_budget is None:
        return 1, 0
    rows = [len(torch.unique(work.far_codes)) for work in far]
    most = int(transport.highest([torch.tensor([many]) for many in rows]))
    if most * problem.row_bytes <= problem.receive_budget:
        return 1, most
    # Two stages are here at a time: one is computed while the next arrives.
    limit = max(problem.key_heads, problem.receive_budget // (2 * problem.row_bytes))
    cuts = [_cuts(work, layout, limit) for work in far]
    return int(transport.highest([torch.tensor([len(own) - 1]) for own in cuts])), limit


def _cuts(work: RankPlan, layout: SequenceLayout, limit: int) -> list[int]:
    """Tokens that part the fetched rows into stretches of at most `limit` rows."""
    token = torch.unique(work.far_codes).remainder(layout.n).sort().values
    cuts = [0]
    at = 0
    while len(token) - at > limit:
        # All rows of a token come together.
        following = int(torch.searchsorted(token, token[at + limit]))
        at = following if following > at else int(torch.searchsorted(token, token[at], right=True))
        cuts.append(int(token[at]) if at < len(token) else layout.n)
    return [*cuts, layout.n]


def _staged(
    problem: Problem,
    layout: SequenceLayout,
    transport: Transport,
    far: list[RankPlan],
    travelling: int,
    stages: int,
    limit: int,
) -> list[list[Stage]]:
    bounds = [_cuts(work, layout, limit) for work in far]
    columns = []
    for index in range(stages):
        some = [
            Pairs(
                far=True,
                travelling=travelling,
                begin=own[min(index, len(own) - 1)],
                end=own[min(index + 1, len(own) - 1)],
            )
            for own in bounds
        ]
        works = _works(problem, layout, transport, some)
        requests = [_request(work, problem, layout, rank) for rank, work in zip(transport.ranks, works, strict=True)]
        plans = agree(requests, layout, problem.key_heads, transport)
        columns.append([_stage(work, plan) for work, plan in zip(works, plans, strict=True)])
    return columns


def _ring_shares(problem: Problem, layout: SequenceLayout, transport: Transport, why: str) -> list[Share]:
    longest, found = max(layout.lengths), []
    for rank in transport.ranks:
        stages = []
        for hop in range(layout.world):
            work = rank_plan(
                problem.pattern,
                layout,
                rank,
                problem.heads,
                problem.key_heads,
                Pairs(holder=(rank - hop) % layout.world),
            )
            _, place = layout.locate(work.far_codes % layout.n)
            stages.append(Stage(work, None, work.far_codes // layout.n * longest + place))
        found.append(Share(rank, layout, layout.positions(rank), tuple(stages), None, "ring", why))
    return found


def _visits(problem: Problem, layout: SequenceLayout, transport: Transport, travelling: int) -> list[Visit]:
    codes = (torch.arange(problem.heads)[:, None] * layout.n + torch.arange(travelling)).flatten()
    requests = [request_for(codes, layout, rank, problem.heads) for rank in transport.ranks]
    plans = agree(requests, layout, problem.heads, transport)
    works = _works(
        problem,
        layout,
        transport,
        [Pairs(holder=rank, travelling=travelling, visiting=True) for rank in transport.ranks],
    )
    return [Visit(travelling, plan, plan.place(codes), work) for plan, work in zip(plans, works, strict=True)]
