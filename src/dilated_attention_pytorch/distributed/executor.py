"""Execution of schedules, forward and backward, for the ranks of this process: one of a group, or a virtual world.

The exchange of a stage is in flight while the stage before it is computed. In the backward pass, gradients of one
stage return to their owners while those of the next are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.derivatives import once_differentiable
from .exchange import ExchangePlan, PaddingRows, QueryRows, RowSource, fetch, flatten_rows, return_gradients
from .local_attention import (
    GradientSums,
    KernelSettings,
    Keys,
    Queries,
    Received,
    RowGradients,
    RunningSoftmax,
    Shard,
    attend,
    differentiate,
    zeros_for,
)
from .ring import Ring
from .schedule import RankSchedule, Visit
from .transport import LocalWork, Pending, Transport, completed_together


class RankOutputs(NamedTuple):
    """Results of the ranks of this process, and received rows to reuse in the backward pass."""

    outputs: list[Tensor]
    lses: list[Tensor]
    received: list[Tensor]
    """Rows of the only stage with an exchange, for every rank; empty for several stages."""


class Executor:
    """One call on the ranks of this process."""

    def __init__(
        self,
        transport: Transport,
        schedules: list[RankSchedule],
        settings: KernelSettings,
        padding: list[Tensor | None],
        reuse: bool,
    ) -> None:
        self.transport, self.schedules, self.settings, self.padding = transport, schedules, settings, padding
        stages = schedules[0].stages
        self.reuse = reuse and sum(stage.exchange is not None for stage in stages) == 1
        self.ring = schedules[0].exchange == "ring"
        self.visits = [schedule.visit for schedule in schedules if schedule.visit is not None]

    def shards(self, queries: Iterable[Tensor], keys: Iterable[Tensor], values: Iterable[Tensor]) -> list[Shard]:
        """Tensors of the ranks of this process."""
        return [Shard(*one) for one in zip(queries, keys, values, self.padding, strict=True)]

    def forward(self, shards: list[Shard]) -> RankOutputs:
        """Output and LSE of every rank of this process. An exception on one rank is raised on all."""
        with completed_together(self.transport) as local:
            into = local.run(lambda: [RunningSoftmax.start(x.query, x.value.shape[3]) for x in shards], list)
            reused: list[Tensor] = []
            sources = [RowSource(shard.query) for shard in shards]
            shipped = self._fetch_rows(sources, self._visit_exchanges, local) if self.visits else None
            arrivals = self._ring(shards).hops() if self.ring else self._arrivals(shards, self._order(), [], local)
            for index, received in arrivals:
                local.run(lambda index=index, received=received: self._attend(index, shards, received, into), _nothing)
                if self.reuse and received is not None:
                    reused = [one.rows for one in received]
            if shipped is not None:
                self._attend_visits(shards, shipped, into, local)
        shapes = [shard.query.shape[1:3] for shard in shards]
        outputs = [s.output.to(x.query.dtype).unflatten(1, n) for s, x, n in zip(into, shards, shapes, strict=True)]
        return RankOutputs(outputs, [s.lse.unflatten(1, n) for s, n in zip(into, shapes, strict=True)], reused)

    def backward(self, shards: list[Shard], given: list[RowGradients], reused: list[Tensor]) -> list[GradientSums]:
        """Gradients of every rank of this process, in the compute dtype. An exception on one rank is raised on all."""
        with completed_together(self.transport) as local:
            bias = self.settings.bias
            into = local.run(lambda: [GradientSums.start(*x[:3], bias) for x in shards], list)

            def gradients(index: int, received: list[Received] | None) -> list[Tensor | None]:
                return local.run(
                    lambda: self._differentiate(index, shards, received, given, into),
                    lambda: [torch.zeros_like(one.rows) for one in received or ()],
                )

            if self.ring:
                returned = self._ring(shards).differentiate(gradients)
                local.run(lambda: _add_keys(returned, into), _nothing)
            else:
                self._differentiate_stages(shards, gradients, into, reused, local)
                if self.visits:
                    self._differentiate_visits(shards, given, into, local)
        return into

    def _differentiate_stages(
        self, shards: list[Shard], gradients: Any, into: list[GradientSums], reused: list[Tensor], local: LocalWork
    ) -> None:
        homeward: list[Pending[list[Tensor]]] = []

        def take(pending: Pending[list[Tensor]]) -> None:
            rows = pending.wait()
            local.run(lambda: _add_keys([_split(*one) for one in zip(rows, shards, strict=True)], into), _nothing)

        # Gradients that other ranks wait for come first; own rows are differentiated while they travel.
        for index, received in self._arrivals(shards, self._order(exchanges_first=True), reused, local):
            grads = [grad for grad in gradients(index, received) if grad is not None]
            if received is not None:
                homeward.append(return_gradients(grads, self._exchanges(index), self.transport))
            if len(homeward) > 1:
                take(homeward.pop(0))
        for pending in homeward:
            take(pending)

    def _ring(self, shards: list[Shard]) -> Ring:
        sources = [[stage.source for stage in schedule.stages] for schedule in self.schedules]
        return Ring(self.transport, shards, sources, self.schedules[0].layout.lengths)

    def _exchanges(self, index: int) -> list[ExchangePlan]:
        """Exchange plans of a stage; empty for a stage without."""
        plans = (schedule.stages[index].exchange for schedule in self.schedules)
        return [plan for plan in plans if plan is not None]

    @property
    def _visit_exchanges(self) -> list[ExchangePlan]:
        return [visit.exchange for visit in self.visits]

    def _order(self, exchanges_first: bool = False) -> list[int]:
        order = range(len(self.schedules[0].stages))
        return sorted(order, key=lambda index: not self._exchanges(index)) if exchanges_first else list(order)

    def _ranks(self, shards: list[Shard]) -> list[tuple[RankSchedule, Queries, Keys]]:
        return [
            (one, Queries(shard.query, one.tokens), Keys(shard, one.tokens, one.layout.n))
            for one, shard in zip(self.schedules, shards, strict=True)
        ]

    def _attend(
        self, index: int, shards: list[Shard], received: list[Received] | None, into: list[RunningSoftmax]
    ) -> None:
        for at, (schedule, queries, keys) in enumerate(self._ranks(shards)):
            rows = None if received is None else received[at]
            attend(schedule.stages[index].work, queries, keys, rows, self.settings, into[at])

    def _differentiate(
        self,
        index: int,
        shards: list[Shard],
        received: list[Received] | None,
        given: list[RowGradients],
        into: list[GradientSums],
    ) -> list[Tensor | None]:
        return [
            differentiate(
                schedule.stages[index].work,
                queries,
                keys,
                None if received is None else received[at],
                self.settings,
                given[at],
                into[at],
            )
            for at, (schedule, queries, keys) in enumerate(self._ranks(shards))
        ]

    def _arrivals(
        self, shards: list[Shard], order: list[int], reused: list[Tensor], local: LocalWork
    ) -> Iterator[tuple[int, list[Received] | None]]:
        """Stages in order, each with its received rows; the next exchange starts before a stage is computed."""
        waiting = [index for index in order if self._exchanges(index)]
        started: dict[int, Pending[list[Received]]] = {}
        for index in order:
            received = None
            if index in waiting:
                waiting.remove(index)
                received = (started.pop(index, None) or self._fetch(index, shards, reused, local)).wait()
            if waiting and waiting[0] not in started:
                started[waiting[0]] = self._fetch(waiting[0], shards, reused, local)
            yield index, received

    def _fetch(
        self, index: int, shards: list[Shard], reused: list[Tensor], local: LocalWork
    ) -> Pending[list[Received]]:
        exchanges = self._exchanges(index)
        rows = Pending(lambda: reused)
        if not reused:
            rows = self._fetch_rows([RowSource(shard.key, shard.value) for shard in shards], exchanges, local)
        masks: Pending[list[Any]] = Pending(lambda: [None] * len(shards))
        if shards[0].padding is not None:
            masks = self._fetch_rows([PaddingRows(shard) for shard in shards], exchanges, local)
        sources = [schedule.stages[index].source for schedule in self.schedules]
        return Pending(lambda: [Received(*one) for one in zip(rows.wait(), masks.wait(), sources, strict=True)])

    def _fetch_rows(
        self, sources: Sequence[RowSource], plans: list[ExchangePlan], local: LocalWork
    ) -> Pending[list[Tensor]]:
        return fetch([_GuardedRows(source, local) for source in sources], plans, self.transport)

    def _attend_visits(
        self, shards: list[Shard], pending: Pending[list[Tensor]], into: list[RunningSoftmax], local: LocalWork
    ) -> None:
        """Compute for the queries that arrived, return the results, and fold returned results in."""
        rows, plans = pending.wait(), self._visit_exchanges
        results: list[RunningSoftmax] = []

        def compute() -> list[Tensor]:
            for visit, shard, (_, _, keys), some in zip(self.visits, shards, self._ranks(shards), rows, strict=True):
                queries = _visiting(visit, flatten_rows(shard.query), some, shard.query)
                results.append(RunningSoftmax.start(queries.rows, shard.value.shape[3]))
                attend(visit.work, queries, keys, None, self.settings, results[-1])
            packed = [torch.cat([one.output, one.lse[..., None]], -1).transpose(0, 1).flatten(1) for one in results]
            return [one[_received_order(visit)] for one, visit in zip(packed, self.visits, strict=True)]

        def zeros() -> list[Tensor]:
            wide = torch.promote_types(shards[0].query.dtype, torch.float32)
            widths = [len(shard.value) * (shard.value.shape[3] + 1) for shard in shards]
            return [one.new_zeros(len(one), width, dtype=wide) for one, width in zip(rows, widths, strict=True)]

        counts = [plan.request.counts for plan in plans], [plan.send_counts for plan in plans]
        arrived = self.transport.all_to_all(local.run(compute, zeros), *counts).wait()

        def fold() -> None:
            for visit, seen, some, total in zip(self.visits, results, arrived, into, strict=True):
                own = (visit.place < visit.exchange.local_rows).nonzero()[:, 0]
                total.fold(visit.place[own], seen.output[:, own], seen.lse[:, own])
                both = some.unflatten(1, (len(seen.lse), -1)).transpose(0, 1)
                places = visit.exchange.send.to(some.device).split(visit.exchange.send_counts)
                for place, one in zip(places, both.split(visit.exchange.send_counts, 1), strict=True):
                    total.fold(place, one[..., :-1], one[..., -1])

        local.run(fold, _nothing)

    def _differentiate_visits(
        self, shards: list[Shard], given: list[RowGradients], into: list[GradientSums], local: LocalWork
    ) -> None:
        sources = [QueryRows(shard, one) for shard, one in zip(shards, given, strict=True)]
        rows = self._fetch_rows(sources, self._visit_exchanges, local).wait()
        own_sums: list[Tensor] = []

        def compute() -> list[Tensor]:
            for visit, shard, source, (_, _, keys), some, total in zip(
                self.visits, shards, sources, self._ranks(shards), rows, into, strict=True
            ):
                facts, tokens = _visiting(visit, flatten_rows(source.whole), some, source.whole)
                width = shard.query.shape[3]
                query, grads, lse, minus_delta = facts.split([width, facts.shape[3] - width - 2, 1, 1], -1)
                query, grads = query.to(shard.query.dtype).contiguous(), grads.to(shard.query.dtype).contiguous()
                # With an output of 0 the kernels' delta is minus the gradient of the LSE, so the latter carries it.
                facts = RowGradients(torch.zeros_like(grads), lse[..., 0], grads, minus_delta[..., 0].contiguous())
                sums = total._replace(query=zeros_for(query))
                differentiate(visit.work, Queries(query, tokens), keys, None, self.settings, facts, sums)
                own_sums.append(sums.query)
            packed = [one.transpose(0, 1).flatten(1) for one in own_sums]
            return [one[_received_order(visit)] for one, visit in zip(packed, self.visits, strict=True)]

        def zeros() -> list[Tensor]:
            widths = [len(shard.query) * shard.query.shape[3] for shard in shards]
            return [one.new_zeros(len(one), width) for one, width in zip(rows, widths, strict=True)]

        home = return_gradients(local.run(compute, zeros), self._visit_exchanges, self.transport).wait()

        def add() -> None:
            for visit, some, own, total in zip(self.visits, home, own_sums, into, strict=True):
                total.query.add_(some.unflatten(1, (len(own), -1)).transpose(0, 1))
                mine = (visit.place < visit.exchange.local_rows).nonzero()[:, 0]
                total.query.index_add_(1, visit.place[mine], own[:, mine])

        local.run(add, _nothing)


def _nothing() -> None:
    """Skip local work after a failure."""


class _GuardedRows(RowSource):
    """Rows of a source, zeros from the first failure of the rank on."""

    def __init__(self, source: RowSource, local: LocalWork) -> None:
        super().__init__(*source.tensors)
        self.local = local

    def rows(self, at: Tensor) -> Tensor:
        return self.local.run(
            lambda: super(_GuardedRows, self).rows(at),
            lambda: torch.zeros(len(at), self.width, dtype=self.dtype, device=self.device),
        )


def _split(rows: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values, (B, rows, D) and (B, rows, E), from rows of both side by side."""
    widths = shard.key.shape[3], shard.value.shape[3]
    key, value = rows.unflatten(1, (-1, sum(widths))).transpose(0, 1).split(widths, -1)
    return key, value


def _add_keys(returned: list[tuple[Tensor, Tensor]], into: list[GradientSums]) -> None:
    """Add gradients of own keys and values by other ranks."""
    for (key, value), total in zip(returned, into, strict=True):
        total.key.add_(key)
        total.value.add_(value)


def _received_order(visit: Visit) -> Tensor:
    """Rows of the visiting queries that were received, in the order of their arrival."""
    own = visit.place < visit.exchange.local_rows
    return torch.argsort(visit.place.masked_fill(own, -1), stable=True)[int(own.sum()) :]


def _visiting(visit: Visit, own: Tensor, received: Tensor, like: Tensor) -> Queries:
    """(B, H, tokens, W) from own rows (local rows, B * W) and received ones, of a tensor like (B, H, n, W)."""
    batch, heads, _, width = like.shape
    rows = torch.cat([own, received])[visit.place].view(heads, visit.tokens, batch, width)
    return Queries(rows.permute(2, 0, 1, 3).contiguous(), torch.arange(visit.tokens, device=rows.device))


class ContextParallel(torch.autograd.Function):
    """Output and LSE of the ranks of this process as a function of a bias and their queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, executor: Executor, bias: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.executor = executor
        result = executor.forward(executor.shards(*_thirds(tensors)))
        # The bias is that of the executor's settings; saved, a change in place is an error.
        ctx.save_for_backward(bias, *tensors, *result.outputs, *result.lses, *result.received)
        return *result.outputs, *result.lses

    @staticmethod
    @once_differentiable("context_parallel_attention")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        executor: Executor = ctx.executor
        ranks = len(executor.schedules)
        bias, *saved = ctx.saved_tensors
        tensors, rest = tuple(saved[: 3 * ranks]), saved[3 * ranks :]
        outputs, lses, reused = rest[:ranks], rest[ranks : 2 * ranks], list(rest[2 * ranks :])
        given = row_gradients(outputs, lses, grads[:ranks], grads[ranks:])
        shards = executor.shards(*_thirds(tensors))
        sums = executor.backward(shards, given, reused)
        return None, bias_gradient(bias, sums), *input_gradients(shards, sums)


def row_gradients(outputs: Any, lses: Any, grads: Any, lse_grads: Any) -> list[RowGradients]:
    """Inputs of the backward pass for each rank; a gradient of None counts as 0."""
    return [
        RowGradients(
            output.contiguous(),
            lse.contiguous(),
            (torch.zeros_like(output) if grad is None else grad).contiguous(),
            lse_grad,
        )
        for output, lse, grad, lse_grad in zip(outputs, lses, grads, lse_grads, strict=True)
    ]


def input_gradients(shards: list[Shard], sums: list[GradientSums]) -> list[Tensor]:
    """Gradients in the shape and dtype of their tensors: of all queries, all keys, all values."""
    return [
        getattr(total, name).unflatten(1, getattr(shard, name).shape[1:3]).to(getattr(shard, name).dtype)
        for name in ("query", "key", "value")
        for shard, total in zip(shards, sums, strict=True)
    ]


def bias_gradient(bias: Tensor | None, sums: list[GradientSums]) -> Tensor | None:
    """Share of the ranks of this process in the gradient of a bias, in its dtype."""
    shares = [total.bias for total in sums if total.bias is not None]
    return None if bias is None else torch.stack(shares).sum(0).to(bias.dtype)


def _thirds(tensors: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    many = len(tensors) // 3
    return list(tensors[:many]), list(tensors[many : 2 * many]), list(tensors[2 * many :])
