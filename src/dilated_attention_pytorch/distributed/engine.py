"""Fetch and compute, forward and backward, for the ranks of this process: one of a group, or all of a virtual world.

A *stage* is some pairs and the exchange that brings their keys. The exchange of a stage is in flight while the stage
before it is computed; going backward, gradients of one stage travel home while those of the next are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dense import Ring
from .local import Fetched, Outcome, Settings, Shard, Softmax, Totals, attend, differentiate, zeros_for
from .moving import FactRows, PaddingRows, PairRows, Rows, all_rows, fetch, give_back
from .share import Share, Visit
from .transport import Pending, Transport


class Results(NamedTuple):
    """What the ranks of this process computed, and what they fetched for it."""

    outputs: list[Tensor]
    lses: list[Tensor]
    fetched: list[Tensor]
    """Rows worth keeping for backward: of one stage, for every rank; else none."""


class Job:
    """One call on the ranks of this process."""

    def __init__(
        self, transport: Transport, shares: list[Share], settings: Settings, padding: list[Tensor | None], keep: bool
    ) -> None:
        self.transport, self.shares, self.settings, self.padding = transport, shares, settings, padding
        self.keep = keep and sum(stage.exchange is not None for stage in shares[0].stages) == 1
        self.ring = shares[0].exchange == "ring"

    def shards(self, queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> list[Shard]:
        return [Shard(*one) for one in zip(queries, keys, values, self.padding, strict=True)]

    def forward(self, shards: list[Shard]) -> Results:
        """Output and LSE of every rank here."""
        into = [Softmax.start(shard.query, shard.value.shape[3]) for shard in shards]
        kept: list[Tensor] = []
        visit = self._visits_begin(shards)
        if self.ring:
            for index, fetched in self._ring(shards).hops():
                self._attend(index, shards, fetched, into)
        else:
            for index, fetched in self._arrivals(shards, range(len(self.shares[0].stages))):
                self._attend(index, shards, fetched, into)
                if self.keep and fetched is not None:
                    kept = [one.rows for one in fetched]
        if visit is not None:
            self._visits_end(shards, visit, into)
        shapes = [shard.query.shape[1:3] for shard in shards]
        outputs = [s.output.to(x.query.dtype).unflatten(1, n) for s, x, n in zip(into, shards, shapes, strict=True)]
        return Results(outputs, [s.lse.unflatten(1, n) for s, n in zip(into, shapes, strict=True)], kept)

    def backward(self, shards: list[Shard], outcomes: list[Outcome], kept: list[Tensor]) -> list[Totals]:
        """Gradients of query, key and value of every rank here, in the compute dtype."""
        into = [Totals.start(*shard[:3]) for shard in shards]
        if self.ring:
            self._ring(shards).differentiate(
                lambda hop, fetched: self._differentiate(hop, shards, fetched, outcomes, into), into
            )
            return into
        stages = self.shares[0].stages
        # What others wait for comes first; own rows are differentiated while it travels.
        order = sorted(range(len(stages)), key=lambda index: stages[index].exchange is None)
        homeward: list[tuple[int, Pending[list[Tensor]]]] = []
        for index, fetched in self._arrivals(shards, order, kept):
            found = self._differentiate(index, shards, fetched, outcomes, into)
            if fetched is not None:
                homeward.append((index, self._return(index, found)))
            if len(homeward) > 1:
                self._take(*homeward.pop(0), shards, into)
        for one in homeward:
            self._take(*one, shards, into)
        self._visits_differentiate(shards, outcomes, into)
        return into

    def _ring(self, shards: list[Shard]) -> Ring:
        which = [[stage.which for stage in share.stages] for share in self.shares]
        return Ring(self.transport, shards, which, self.shares[0].layout.lengths)

    def _attend(self, index: int, shards: list[Shard], fetched: list[Fetched] | None, into: list[Softmax]) -> None:
        for at, (share, shard) in enumerate(zip(self.shares, shards, strict=True)):
            attend(
                share.stages[index].work,
                shard.query,
                share.tokens,
                shard,
                None if fetched is None else fetched[at],
                share.layout,
                share.rank,
                self.settings,
                into[at],
            )

    def _differentiate(
        self,
        index: int,
        shards: list[Shard],
        fetched: list[Fetched] | None,
        outcomes: list[Outcome],
        into: list[Totals],
    ) -> list[Tensor | None]:
        return [
            differentiate(
                share.stages[index].work,
                shard.query,
                share.tokens,
                shard,
                None if fetched is None else fetched[at],
                share.layout,
                share.rank,
                self.settings,
                outcomes[at],
                into[at],
            )
            for at, (share, shard) in enumerate(zip(self.shares, shards, strict=True))
        ]

    def _arrivals(self, shards: list[Shard], order: Any, kept: list[Tensor] | None = None) -> Any:
        """Stages in order, each with its rows; the next exchange starts before a stage is handed out."""
        order = list(order)
        needing = [i for i in order if self.shares[0].stages[i].exchange is not None]
        started: dict[int, Pending[list[Fetched]]] = {}
        for index in order:
            if needing and index == needing[0]:
                needing.pop(0)
                pending = started.pop(index, None) or self._fetch(index, shards, kept)
                fetched = pending.wait()
            else:
                fetched = None
            if needing and needing[0] not in started:
                started[needing[0]] = self._fetch(needing[0], shards, kept)
            yield index, fetched

    def _fetch(self, index: int, shards: list[Shard], kept: list[Tensor] | None) -> Pending[list[Fetched]]:
        stages = [share.stages[index] for share in self.shares]
        plans = [stage.exchange for stage in stages]
        rows = None if kept else fetch([PairRows(shard) for shard in shards], plans, self.transport)
        padding = None
        if shards[0].padding is not None:
            padding = fetch([PaddingRows(shard) for shard in shards], plans, self.transport)

        def arrive() -> list[Fetched]:
            got = kept if rows is None else rows.wait()
            assert got is not None
            masks = [None] * len(got) if padding is None else padding.wait()
            return [Fetched(one, mask, stage.which) for one, mask, stage in zip(got, masks, stages, strict=True)]

        return Pending(arrive)

    def _return(self, index: int, grads: list[Tensor | None]) -> Pending[list[Tensor]]:
        plans = [share.stages[index].exchange for share in self.shares]
        return give_back([grad for grad in grads if grad is not None], plans, self.transport)

    def _take(self, index: int, pending: Pending[list[Tensor]], shards: list[Shard], into: list[Totals]) -> None:
        """Add the gradients of own rows that others used."""
        for rows, shard, total in zip(pending.wait(), shards, into, strict=True):
            widths = shard.key.shape[3], shard.value.shape[3]
            both = rows.unflatten(1, (-1, sum(widths))).transpose(0, 1).split(widths, -1)
            total.key.add_(both[0])
            total.value.add_(both[1])

    def _visits_begin(self, shards: list[Shard]) -> Pending[list[Tensor]] | None:
        visits = [share.visit for share in self.shares]
        if visits[0] is None:
            return None
        return fetch([Rows(shard.query) for shard in shards], [v.exchange for v in visits if v], self.transport)

    def _visits_end(self, shards: list[Shard], pending: Pending[list[Tensor]], into: list[Softmax]) -> None:
        """Compute for the queries that came, send home what was found, and fold it in there."""
        partial, found = [], []
        for share, shard, rows in zip(self.shares, shards, pending.wait(), strict=True):
            visit = share.visit
            assert visit is not None
            batch, heads, _, width = shard.query.shape
            queries = _visiting(visit, all_rows(shard.query), rows, (batch, heads, width))
            seen = Softmax.start(queries, shard.value.shape[3])
            tokens = torch.arange(visit.tokens, device=queries.device)
            attend(visit.work, queries, tokens, shard, None, share.layout, share.rank, self.settings, seen)
            found.append(seen)
            packed = torch.cat([seen.output, seen.lse[..., None]], -1).transpose(0, 1).flatten(1)
            partial.append(packed[_asked(visit)])
        plans = [share.visit.exchange for share in self.shares if share.visit]
        counts = [plan.request.counts for plan in plans], [plan.send_counts for plan in plans]
        home = self.transport.all_to_all(partial, *counts).wait()
        for share, plan, seen, rows, total in zip(self.shares, plans, found, home, into, strict=True):
            assert share.visit is not None
            own = (share.visit.place < plan.local_rows).nonzero()[:, 0]
            total.fold(share.visit.place[own], seen.output[:, own], seen.lse[:, own])
            both = rows.unflatten(1, (len(seen.lse), -1)).transpose(0, 1)
            place, at = plan.send.to(rows.device), 0
            for count in plan.send_counts:
                some = both[:, at : at + count]
                total.fold(place[at : at + count], some[..., :-1], some[..., -1])
                at += count

    def _visits_differentiate(self, shards: list[Shard], outcomes: list[Outcome], into: list[Totals]) -> None:
        if self.shares[0].visit is None:
            return
        sources = [FactRows(shard, outcome) for shard, outcome in zip(shards, outcomes, strict=True)]
        plans = [share.visit.exchange for share in self.shares if share.visit]
        arrived = fetch(sources, plans, self.transport).wait()
        returned, own_rows = [], []
        for share, shard, source, rows, total in zip(self.shares, shards, sources, arrived, into, strict=True):
            visit = share.visit
            assert visit is not None
            batch, heads, _, width = shard.query.shape
            facts = _visiting(visit, source.every(), rows, (batch, heads, source.width))
            queries, grads, lse, minus_delta = facts.split([width, source.width - width - 2, 1, 1], -1)
            queries, grads = queries.to(shard.query.dtype).contiguous(), grads.to(shard.query.dtype).contiguous()
            # With an output of 0 the kernels' delta is minus the gradient of the LSE, so that carries it whole.
            outcome = Outcome(torch.zeros_like(grads), lse[..., 0], grads, minus_delta[..., 0].contiguous())
            tokens = torch.arange(visit.tokens, device=queries.device)
            sums = total._replace(query=zeros_for(queries))
            context = (share.layout, share.rank, self.settings)
            differentiate(visit.work, queries, tokens, shard, None, *context, outcome, sums)
            packed = sums.query.transpose(0, 1).flatten(1)
            own_rows.append(sums.query)
            returned.append(packed[_asked(visit)])
        home = give_back(returned, plans, self.transport).wait()
        for share, plan, rows, own, total in zip(self.shares, plans, home, own_rows, into, strict=True):
            assert share.visit is not None
            total.query.add_(rows.unflatten(1, (len(own), -1)).transpose(0, 1))
            mine = (share.visit.place < plan.local_rows).nonzero()[:, 0]
            total.query.index_add_(1, share.visit.place[mine], own[:, mine])


def _asked(visit: Visit) -> Tensor:
    """Rows of the visiting queries in the order in which they were received."""
    own = visit.exchange.local_rows
    return torch.argsort(visit.place.masked_fill(visit.place < own, -1), stable=True)[int((visit.place < own).sum()) :]


def _visiting(visit: Visit, own: Tensor, received: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """(B, H, tokens, W) from rows (local rows, B * W) and those received."""
    batch, heads, width = shape
    rows = torch.cat([own, received])[visit.place]
    return rows.view(heads, visit.tokens, batch, width).permute(2, 0, 1, 3).contiguous()


class ContextParallel(torch.autograd.Function):
    """Output and LSE of the ranks here as a function of their queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.job = job
        found = job.forward(job.shards(*_thirds(tensors)))
        ctx.save_for_backward(*tensors, *found.outputs, *found.lses, *found.fetched)
        return *found.outputs, *found.lses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        job: Job = ctx.job
        ranks = len(job.shares)
        saved = ctx.saved_tensors
        tensors, outputs, lses, kept = (
            saved[: 3 * ranks],
            saved[3 * ranks : 4 * ranks],
            saved[4 * ranks : 5 * ranks],
            list(saved[5 * ranks :]),
        )
        outcomes = outcomes_of(outputs, lses, grads[:ranks], grads[ranks:])
        shards = job.shards(*_thirds(tensors))
        return None, *gradients_of(shards, job.backward(shards, outcomes, kept))


def outcomes_of(outputs: Any, lses: Any, grads: Any, lse_grads: Any) -> list[Outcome]:
    """What backward knows of each rank's rows; a gradient that is None counts as 0."""
    return [
        Outcome(output, lse, (torch.zeros_like(output) if grad is None else grad).contiguous(), lse_grad)
        for output, lse, grad, lse_grad in zip(outputs, lses, grads, lse_grads, strict=True)
    ]


def gradients_of(shards: list[Shard], totals: list[Totals]) -> list[Tensor]:
    """Gradients in the shape and dtype of what they belong to: of all queries, all keys, all values."""
    return [
        total[which].unflatten(1, shard[which].shape[1:3]).to(shard[which].dtype)  # pyrefly: ignore[missing-attribute]
        for which in range(3)
        for shard, total in zip(shards, totals, strict=True)
    ]


def _thirds(tensors: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    many = len(tensors) // 3
    return list(tensors[:many]), list(tensors[many : 2 * many]), list(tensors[2 * many :])
