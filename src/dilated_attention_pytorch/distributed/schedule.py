"""Schedules: the stages a rank computes a call in, and the exchange that each stage needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns import Pattern
from ..plan import Plan, plan_rows
from ..plan.buffers import Pairs, RankPlan, TokenRuns, buffer_plan, local_plan, split_keys
from ..plan.closed_forms import closed_form
from .butterfly import butterfly, why_no_butterfly
from .cost_model import Exchange, Machine, Overlap, RankFlops, choose_exchange, predict
from .exchange import ExchangePlan, Request, plan_exchange, request_for
from .layout import SequenceLayout
from .transport import Transport, together


@dataclass(frozen=True, eq=False, slots=True)
class Stage:
    """Pairs computed in one go, and the exchange of the rows that they need from other ranks."""

    work: RankPlan | Plan
    """A `Plan` is one over the shard itself."""
    exchange: ExchangePlan | None
    """None for a stage that needs no exchange of its own."""
    source: Tensor
    """int64: received row for each place `work.far_at`"""

    def to(self, device: torch.device) -> Stage:
        """The stage with all tensors that kernels read on a device."""
        return replace(self, work=self.work.to(device), source=self.source.to(device))


@dataclass(frozen=True, eq=False, slots=True)
class Visit:
    """Queries of leading tokens that are sent to the keys, and the work of this rank for them."""

    tokens: int
    exchange: ExchangePlan
    """Exchange of query rows: its key heads are the query heads."""
    place: Tensor
    """int64 [H * tokens]: place of each row in [own rows, received rows]"""
    work: RankPlan

    def to(self, device: torch.device) -> Visit:
        """The visit with all tensors that kernels read on a device."""
        return replace(self, work=self.work.to(device), place=self.place.to(device))


@dataclass(frozen=True, eq=False, slots=True)
class RankSchedule:
    """The part of one rank in a call, as far as it does not depend on the values in its tensors."""

    rank: int
    layout: SequenceLayout
    tokens: Tensor
    """int64 [n]: tokens of the rank"""
    stages: tuple[Stage, ...]
    visit: Visit | None
    exchange: str
    """Exchange in use: direct, butterfly or ring."""
    why: str
    """Reason for the exchange in use."""

    def to(self, device: torch.device) -> RankSchedule:
        """The schedule with all tensors that kernels read on a device."""
        if self.tokens.device == device:
            return self
        return replace(
            self,
            tokens=self.tokens.to(device),
            stages=tuple(stage.to(device) for stage in self.stages),
            visit=None if self.visit is None else self.visit.to(device),
        )


class ScheduleSpec(NamedTuple):
    """Everything about a call that its schedules depend on, apart from the layout."""

    pattern: Pattern
    """Resolved for the whole sequence."""
    heads: int
    key_heads: int
    batch: int
    widths: tuple[int, int]
    """Widths of a key and of a value."""
    itemsize: int
    overlap: Overlap = "none"
    exchange: Exchange = "auto"
    receive_budget: int | None = None
    """Most bytes of received rows in memory at a time."""
    machine: Machine = Machine()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of K and its row of V, over the batch."""
        return self.batch * sum(self.widths) * self.itemsize

    def flops(self, plan: Plan) -> int:
        """Floating-point operations of a plan over the batch."""
        return self.batch * plan.flops(*self.widths)


def rank_plan(pattern: Pattern, layout: SequenceLayout, rank: int, heads: int, key_heads: int) -> RankPlan:
    """Buffer plan of one rank under a resolved pattern, for all pairs of its queries."""
    return _buffers(_own_plan(pattern, layout, rank, heads), layout, rank, key_heads, Pairs(layout.token_runs(rank)))


def _buffers(own: Plan, layout: SequenceLayout, rank: int, key_heads: int, pairs: Pairs) -> RankPlan:
    return split_keys(buffer_plan(own, key_heads, pairs), layout.token_runs(rank), layout.n)


def _visit_plan(spec: ScheduleSpec, layout: SequenceLayout, rank: int, shipped: int) -> RankPlan:
    """Pairs of the first `shipped` queries with the keys of a rank."""
    runs = layout.runs(rank)
    hull = (runs[0][0], runs[-1][1]) if runs else (0, 0)
    plan = plan_rows(spec.pattern, layout.n, spec.heads, [(0, shipped)], hull)
    shard = layout.token_runs(rank)
    return split_keys(buffer_plan(plan, spec.key_heads, Pairs(TokenRuns([(0, shipped)]), keys=shard)), shard, layout.n)


def _own_plan(pattern: Pattern, layout: SequenceLayout, rank: int, heads: int) -> Plan:
    return plan_rows(pattern, layout.n, heads, layout.runs(rank))


def make_schedules(spec: ScheduleSpec, layout: SequenceLayout, transport: Transport) -> list[RankSchedule]:
    """Schedules of the ranks of this process. Collective; an exception on one rank is raised on all."""
    local = spec.overlap == "local" or spec.receive_budget is not None
    ranks = transport.ranks
    with together(transport):
        shipped = _shipped_queries(spec, layout)
        shards = [layout.token_runs(rank) for rank in ranks]
        plans = {rank: _own_plan(spec.pattern, layout, rank, spec.heads) for rank in ranks}
        far = _rank_plans(
            spec, layout, plans, [Pairs(own, shipped, other_keys=own) if local else Pairs(own) for own in shards]
        )
        inside, edge = [], []
        if local:
            inside = [
                local_plan(plans[rank], own, layout.lengths[rank], shipped)
                for own, rank in zip(shards, ranks, strict=True)
            ]
            edge = _rank_plans(spec, layout, plans, [Pairs(own, shipped, keys=own, edges=True) for own in shards])
        requests = _requests(spec, layout, ranks, far)
    exchanges = plan_exchange(requests, layout, spec.key_heads, transport)
    stages, limit = _stage_count(spec, layout, transport, far)
    exchanges, name, why = _choose(spec, layout, transport, exchanges, [*zip(inside, edge, strict=True)], far, stages)
    if name == "ring":
        with together(transport):
            schedules = _ring_schedules(spec, layout, plans, why)
        return schedules
    columns = _staged(spec, layout, transport, plans, far, shipped, stages, limit) if stages > 1 else []
    visits = _visits(spec, layout, transport, shipped) if shipped else [None] * len(ranks)
    with together(transport):
        columns = columns or [[_stage(work, plan) for work, plan in zip(far, exchanges, strict=True)]]
        if local:
            columns[:0] = [[_stage(work) for work in works] for works in (inside, edge)]
        schedules = [
            RankSchedule(
                rank, layout, layout.positions(rank), tuple(column[at] for column in columns), visits[at], name, why
            )
            for at, rank in enumerate(ranks)
        ]
    return schedules


def _stage(work: RankPlan | Plan, plan: ExchangePlan | None = None) -> Stage:
    if plan is None or isinstance(work, Plan):
        return Stage(work, None, torch.empty(0, dtype=torch.int64, device="cpu"))
    return Stage(work, plan, plan.received(work.far_codes))


def _rank_plans(
    spec: ScheduleSpec, layout: SequenceLayout, plans: dict[int, Plan], pairs: list[Pairs]
) -> list[RankPlan]:
    """Buffer plans of the pairs of each rank; `plans` holds the plan of each rank's queries."""
    return [
        _buffers(own, layout, rank, spec.key_heads, some)
        for (rank, own), some in zip(plans.items(), pairs, strict=True)
    ]


def _requests(
    spec: ScheduleSpec, layout: SequenceLayout, ranks: tuple[int, ...], plans: list[RankPlan]
) -> list[Request]:
    return [request_for(plan.far_codes, layout, rank, spec.key_heads) for rank, plan in zip(ranks, plans, strict=True)]


def _shipped_queries(spec: ScheduleSpec, layout: SequenceLayout) -> int:
    """Leading tokens whose queries are sent to the keys, where that moves fewer numbers than fetching all keys."""
    if spec.overlap == "none" or spec.exchange == "ring":
        return 0
    tokens = min(closed_form(spec.pattern).global_queries, layout.n)
    key, value = spec.widths
    sent = tokens * spec.heads * (layout.world - 1) * (key + 2 * (value + 1))
    fetched = (layout.n - max(layout.lengths)) * spec.key_heads * (key + value)
    return tokens if sent < fetched else 0


def _choose(
    spec: ScheduleSpec,
    layout: SequenceLayout,
    transport: Transport,
    plans: list[ExchangePlan],
    near: list[tuple[Plan, RankPlan]],
    far: list[RankPlan],
    stages: int,
) -> tuple[list[ExchangePlan], str, str]:
    """Exchange plans of all ranks, the name of the exchange, and the reason for it."""
    against = {}
    reason = "rows come in several stages" if stages > 1 else why_no_butterfly(spec.pattern, layout)
    if reason is not None:
        against["butterfly"] = reason
    if spec.overlap == "none" and spec.exchange == "auto":
        against["ring"] = 'its sums depend on the number of ranks; overlap="local" allows that'
    with together(transport):
        passed = plans
        if reason is None:
            passed = [replace(plan, rounds=butterfly(spec.pattern, plan, spec.heads)) for plan in plans]
        table = []
        for at, (plan, through) in enumerate(zip(plans, passed, strict=True)):
            inside = spec.flops(near[at][0]) + spec.flops(near[at][1].plan) if near else 0
            flops = RankFlops(inside, spec.flops(far[at].plan))
            times = [
                predict(one.report(spec.row_bytes), flops, layout.world, spec.overlap, spec.machine)
                for one in (plan, through)
            ]
            seconds = [times[0]["direct"], times[1]["direct"], times[0]["ring"]]
            table.append(torch.tensor(seconds, dtype=torch.float64, device="cpu"))
    names = ("direct", "butterfly", "ring")
    predicted = dict(zip(names, transport.highest(table).tolist(), strict=True))
    name, why = choose_exchange(predicted, spec.exchange, against, spec.machine)
    return (passed if name == "butterfly" else plans), name, why


def _stage_count(
    spec: ScheduleSpec, layout: SequenceLayout, transport: Transport, far: list[RankPlan]
) -> tuple[int, int]:
    """Number of stages that fetch rows, equal on every rank, and the most rows of a stage."""
    if spec.receive_budget is None:
        return 1, 0
    with together(transport):
        rows = [len(torch.unique(plan.far_codes)) for plan in far]
    most = int(transport.highest([torch.tensor([many], device="cpu") for many in rows]))
    if most * spec.row_bytes <= spec.receive_budget:
        return 1, most
    # Two stages are in memory at a time: one is computed while the next arrives.
    limit = max(spec.key_heads, spec.receive_budget // (2 * spec.row_bytes))
    with together(transport):
        cuts = [_cuts(plan, layout, limit) for plan in far]
    return int(transport.highest([torch.tensor([len(own) - 1], device="cpu") for own in cuts])), limit


def _cuts(plan: RankPlan, layout: SequenceLayout, limit: int) -> list[int]:
    """Tokens that divide the fetched rows into ranges of at most `limit` rows."""
    token = torch.unique(plan.far_codes).remainder(layout.n).sort().values
    cuts = [0]
    at = 0
    while len(token) - at > limit:
        # All rows of a token are fetched together.
        following = int(torch.searchsorted(token, token[at + limit]))
        at = following if following > at else int(torch.searchsorted(token, token[at], right=True))
        cuts.append(int(token[at]) if at < len(token) else layout.n)
    return [*cuts, layout.n]


def _staged(
    spec: ScheduleSpec,
    layout: SequenceLayout,
    transport: Transport,
    own_plans: dict[int, Plan],
    far: list[RankPlan],
    shipped: int,
    stages: int,
    limit: int,
) -> list[list[Stage]]:
    columns, ranks = [], transport.ranks
    for index in range(stages):
        with together(transport):
            pairs = []
            for rank, plan in zip(ranks, far, strict=True):
                own, cuts = layout.token_runs(rank), _cuts(plan, layout, limit)
                begin, end = (cuts[min(at, len(cuts) - 1)] for at in (index, index + 1))
                pairs.append(Pairs(own, shipped, other_keys=own, key_range=(begin, end)))
            plans = _rank_plans(spec, layout, own_plans, pairs)
            requests = _requests(spec, layout, ranks, plans)
        exchanges = plan_exchange(requests, layout, spec.key_heads, transport)
        with together(transport):
            columns.append([_stage(work, plan) for work, plan in zip(plans, exchanges, strict=True)])
    return columns


def _ring_schedules(spec: ScheduleSpec, layout: SequenceLayout, plans: dict[int, Plan], why: str) -> list[RankSchedule]:
    longest, schedules = max(layout.lengths), []
    for rank, own in plans.items():
        stages = []
        for hop in range(layout.world):
            holder = layout.token_runs((rank - hop) % layout.world)
            work = _buffers(own, layout, rank, spec.key_heads, Pairs(layout.token_runs(rank), keys=holder))
            _, place = layout.locate(work.far_codes % layout.n)
            stages.append(Stage(work, None, work.far_codes // layout.n * longest + place))
        schedules.append(RankSchedule(rank, layout, layout.positions(rank), tuple(stages), None, "ring", why))
    return schedules


def _visits(spec: ScheduleSpec, layout: SequenceLayout, transport: Transport, shipped: int) -> list[Visit]:
    with together(transport):
        heads, tokens = torch.arange(spec.heads, device="cpu"), torch.arange(shipped, device="cpu")
        codes = (heads[:, None] * layout.n + tokens).flatten()
        requests = [request_for(codes, layout, rank, spec.heads) for rank in transport.ranks]
    exchanges = plan_exchange(requests, layout, spec.heads, transport)
    with together(transport):
        visits = [
            Visit(shipped, plan, plan.place(codes), _visit_plan(spec, layout, rank, shipped))
            for rank, plan in zip(transport.ranks, exchanges, strict=True)
        ]
    return visits
