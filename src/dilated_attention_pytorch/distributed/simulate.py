"""All ranks in one process, one after another: for tests, and to see what a layout costs before there is a cluster."""

from __future__ import annotations

from torch import Tensor

from ..ops import AttentionOutput
from ..patterns import Pattern
from .comm import ExchangePlan, Traffic, agree_virtually, exchange_virtually, request_for
from .restrict import RankPlan
from .ring import attend_locally, check_shard, pack, pack_padding, rank_plan, resolved, share_of
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
            rows[rank],
            received[rank],
            padding[rank],
            share_of(plans[rank], exchanges[rank]),
            value.shape[-1],
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


def _planned(
    pattern: Pattern, layout: SequenceLayout, heads: int, key_heads: int
) -> tuple[list[RankPlan], list[ExchangePlan]]:
    plans = [rank_plan(pattern, layout, rank, heads, key_heads) for rank in range(layout.world)]
    requests = [request_for(plan.key_codes, layout, rank, key_heads) for rank, plan in enumerate(plans)]
    return plans, agree_virtually(requests, layout, key_heads)
