"""All ranks in one process, one after another: for tests, and to see what a layout costs before there is a cluster."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import AttentionOutput
from ..patterns import Dilated, Pattern
from .comm import ExchangePlan, Request, Traffic, agree_virtually, exchange_virtually, pack, request_for
from .restrict import RankPlan
from .ring import attend_locally, check_shard, pack_padding, rank_plan, resolved, share_of
from .shard import SequenceLayout, shard_sequence, unshard_sequence


def virtual_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | str,
    layout: SequenceLayout,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: Tensor | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """`context_parallel_attention_with_lse` on every rank of a layout, given and giving the whole sequence.

    Each rank computes from its own shard and the rows its exchange plan brings, and from nothing else.
    """
    ranks = range(layout.world)
    whole = resolved(pattern, is_causal, layout.n, query.shape[1])
    plans, exchanges = _planned(whole, layout, query.shape[1], key.shape[1])
    queries, keys, values = ([shard_sequence(x, layout, rank) for rank in ranks] for x in (query, key, value))
    masks = [None if key_padding_mask is None else shard_sequence(key_padding_mask, layout, r, 1) for r in ranks]
    for rank in ranks:
        check_shard(queries[rank], keys[rank], values[rank], layout, rank, enable_gqa, masks[rank])
    rows = [pack(k, v) for k, v in zip(keys, values, strict=True)]
    received = exchange_virtually(rows, exchanges)
    padding: list[tuple[Tensor, Tensor] | None] = [None] * layout.world
    if key_padding_mask is not None:
        own = [pack_padding(m, key.shape[1]) for m in masks if m is not None]
        padding = list(zip(own, exchange_virtually(own, exchanges), strict=True))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found = [
        attend_locally(
            queries[rank],
            keys[rank],
            values[rank],
            received[rank],
            padding[rank],
            share_of(plans[rank], exchanges[rank]),
            scale,
            backend,
        )
        for rank in ranks
    ]
    outputs, lses = zip(*found, strict=True)
    return AttentionOutput(unshard_sequence(outputs, layout), unshard_sequence(lses, layout))


def traffic(
    pattern: Pattern | str,
    layout: SequenceLayout,
    heads: int,
    key_heads: int | None = None,
    *,
    row_bytes: int,
    is_causal: bool = False,
) -> list[Traffic]:
    """What every rank sends and receives in one forward pass; `row_bytes` are those of a row of K and of V together.

    >>> from dilated_attention_pytorch.distributed import SequenceLayout, traffic
    >>> moved = traffic("window:64 & causal", SequenceLayout.contiguous(4096, 4), heads=2, row_bytes=512)
    >>> [rank.rows_received for rank in moved]
    [0, 128, 128, 128]
    """
    whole = resolved(pattern, is_causal, layout.n, heads)
    return [plan.report(row_bytes) for plan in _planned(whole, layout, heads, key_heads or heads)[1]]


def dilated_request(
    pattern: Dilated,
    layout: SequenceLayout,
    rank: int,
    heads: int,
    key_heads: int | None = None,
    *,
    is_causal: bool = False,
) -> Request:
    """What one rank asks for under a dilated pattern, in closed form: time and memory are those of these rows.

    One rank of 1024 that share a billion tokens, with 8 key heads:

    >>> from dilated_attention_pytorch import Dilated
    >>> from dilated_attention_pytorch.distributed import SequenceLayout, dilated_request
    >>> ladder = Dilated([2048 * 2**i for i in range(20)], [2**i for i in range(20)])
    >>> len(dilated_request(ladder, SequenceLayout.contiguous(2**30, 1024), 500, 8).codes)
    81920
    """
    key_heads = key_heads or heads
    known = pattern.resolve(layout.n, heads)
    assert isinstance(known, Dilated)
    found = []
    for head in range(heads):
        first_code = head // (heads // key_heads) * layout.n
        for index, (segment, rate) in enumerate(known.branches):
            if known.takes_part(index, head):
                residue = known.sampled_residue(index, head)
                for run in layout.runs(rank):
                    # A segment between the first and the last that a run meets lies inside the run.
                    for which in {run[0] // segment, (run[1] - 1) // segment}:
                        first, end = which * segment + residue, min((which + 1) * segment, layout.n)
                        found += [first_code + x for x in _outside(run, first, end, rate, is_causal)]
    codes = torch.cat(found) if found else torch.arange(0)
    return request_for(codes, layout, rank, key_heads)


def _outside(run: tuple[int, int], first: int, end: int, rate: int, is_causal: bool) -> list[Tensor]:
    """The samples first, first + rate, ... below `end` outside a run that its own samples see."""
    begin, stop = (max(first, first - (first - bound) // rate * rate) for bound in run)
    if begin >= min(stop, end):
        return []
    before = torch.arange(first, begin, rate)
    return [before] if is_causal else [before, torch.arange(min(stop, end), end, rate)]


def _planned(
    pattern: Pattern, layout: SequenceLayout, heads: int, key_heads: int
) -> tuple[list[RankPlan], list[ExchangePlan]]:
    plans = [rank_plan(pattern, layout, rank, heads, key_heads) for rank in range(layout.world)]
    requests = [request_for(plan.key_codes, layout, rank, key_heads) for rank, plan in enumerate(plans)]
    return plans, agree_virtually(requests, layout, key_heads)
