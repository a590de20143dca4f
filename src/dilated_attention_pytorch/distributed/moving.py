"""Rows picked from a rank's tensors, sent where they were asked for, and their gradients brought home."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .comm import ExchangePlan, summed
from .local import Outcome, Shard
from .transport import Pending, Transport


def all_rows(x: Tensor) -> Tensor:
    """(heads * n, B * W) of (B, heads, n, W)."""
    return x.permute(1, 2, 0, 3).flatten(0, 1).flatten(1)


class Rows:
    """Rows of one (B, heads, n, W) tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def rows(self, at: Tensor) -> Tensor:
        """(rows, B * W)"""
        n = max(self.x.shape[2], 1)
        return self.x[:, at // n, at % n].transpose(0, 1).flatten(1)


class PairRows(Rows):
    """Rows of K and V side by side, without putting all of them side by side first."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def rows(self, at: Tensor) -> Tensor:
        n = max(self.shard.key.shape[2], 1)
        both = [x[:, at // n, at % n] for x in (self.shard.key, self.shard.value)]
        return torch.cat(both, -1).transpose(0, 1).flatten(1)


class PaddingRows(Rows):
    """Which rows are padding, uint8."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def rows(self, at: Tensor) -> Tensor:
        assert self.shard.padding is not None
        return self.shard.padding[:, at % max(self.shard.key.shape[2], 1)].T.to(torch.uint8)


class FactRows(Rows):
    """What backward must know of a row of Q: itself, what is asked of its output, its LSE and minus its delta."""

    def __init__(self, shard: Shard, outcome: Outcome) -> None:
        wide = outcome.lse.dtype
        delta = (outcome.grad_output.to(wide) * outcome.output.to(wide)).sum(-1)
        delta = -delta if outcome.grad_lse is None else outcome.grad_lse.to(wide) - delta
        lse = outcome.lse
        parts = [shard.query.to(wide), outcome.grad_output.to(wide), lse[..., None], delta[..., None]]
        super().__init__(torch.cat(parts, -1))
        self.width = self.x.shape[-1]

    def every(self) -> Tensor:
        return all_rows(self.x)


def fetch(sources: list[Any], plans: list[Any], transport: Transport) -> Pending[list[Tensor]]:
    """The rows each rank asked for, in the order it asked."""
    if plans[0].steps is None:
        sent = [source.rows(plan.send.to(_device(source))) for source, plan in zip(sources, plans, strict=True)]
        return transport.all_to_all(sent, [p.send_counts for p in plans], [p.request.counts for p in plans])
    firsts = [_first_sent(plan) for plan in plans]
    own = [source.rows(first.to(_device(source))) for source, first in zip(sources, firsts, strict=True)]
    received = [rows.new_empty(len(plan.request.codes), rows.shape[1]) for rows, plan in zip(own, plans, strict=True)]
    for round_ in range(len(plans[0].steps)):
        outgoing = []
        for plan, first, mine, got in zip(plans, firsts, own, received, strict=True):
            messages = {}
            for peer, places in plan.steps[round_].send.items():
                rows = mine.new_empty(len(places), mine.shape[1])
                here = places < plan.local_rows
                rows[here] = mine[torch.searchsorted(first, places[here]).to(mine.device)]
                rows[~here] = got[(places[~here] - plan.local_rows).to(mine.device)]
                messages[peer] = rows
            outgoing.append(messages)
        into = [{peer: len(rows) for peer, rows in plan.steps[round_].receive.items()} for plan in plans]
        arrived = transport.swap(outgoing, into).wait() if any(map(len, outgoing)) else [{}] * len(plans)
        for plan, got, messages in zip(plans, received, arrived, strict=True):
            for peer, rows in messages.items():
                got[plan.steps[round_].receive[peer].to(got.device)] = rows
    return Pending(lambda: received)


def give_back(rows: list[Tensor], plans: list[Any], transport: Transport) -> Pending[list[Tensor]]:
    """The adjoint: rows return to their holders and are added up there by row of the shard, in at least float32."""
    if plans[0].steps is None:
        moving = transport.all_to_all(rows, [p.request.counts for p in plans], [p.send_counts for p in plans])

        def arrive() -> list[Tensor]:
            return [
                summed(returned, plan.send, plan.local_rows)
                for returned, plan in zip(moving.wait(), plans, strict=True)
            ]

        return Pending(arrive)
    wide = torch.promote_types(rows[0].dtype, torch.float32)
    totals = [
        torch.cat([own.new_zeros(plan.local_rows, own.shape[1], dtype=wide), own.to(wide)])
        for own, plan in zip(rows, plans, strict=True)
    ]
    for round_ in reversed(range(len(plans[0].steps))):
        steps = [plan.steps[round_] for plan in plans]
        outgoing = [
            {peer: total[(plan.local_rows + at).to(total.device)] for peer, at in step.receive.items()}
            for total, plan, step in zip(totals, plans, steps, strict=True)
        ]
        into = [{peer: len(at) for peer, at in step.send.items()} for step in steps]
        arrived = transport.swap(outgoing, into).wait() if any(map(len, outgoing)) else [{}] * len(plans)
        for total, step, messages in zip(totals, steps, arrived, strict=True):
            for peer, some in messages.items():
                total.index_add_(0, step.send[peer].to(total.device), some)
    return Pending(lambda: [total[: plan.local_rows] for total, plan in zip(totals, plans, strict=True)])


def _first_sent(plan: ExchangePlan) -> Tensor:
    assert plan.steps is not None
    none = torch.empty(0, dtype=torch.int64)
    places = torch.cat([none, *(rows for step in plan.steps for rows in step.send.values())])
    return torch.unique(places[places < plan.local_rows])


def _device(source: Any) -> torch.device:
    return source.x.device if hasattr(source, "x") else source.shard.key.device
