"""Virtual ranks: all ranks in one process, for tests and to see the cost of a layout without a cluster."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.dropout import fresh_seed
from ..ops import AttentionOutput
from ..patterns import And, Causal, Dilated, Pattern
from ..plan import own_block, plan_rows
from .attention import Call, Inputs
from .cost_model import Exchange, Machine, Overlap
from .exchange import Request, Traffic, plan_exchange, request_for
from .executor import ContextParallel, Executor
from .layout import SequenceLayout, shard_sequence, unshard_sequence
from .local_attention import KernelSettings
from .schedule import RankSchedule, ScheduleSpec, make_schedules, rank_plan
from .transport import VirtualTransport


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
    cu_seqlens: Tensor | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    bias_positions: Tensor | None = None,
    overlap: Overlap = "none",
    exchange: Exchange = "auto",
    receive_budget: int | None = None,
    machine: Machine | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """`context_parallel_attention_with_lse` on every rank of a layout, from and to the whole sequence.

    Each virtual rank computes from its own shard and the rows of its exchange plan only.
    """
    settings = is_causal, scale, enable_gqa, cu_seqlens, dropout_p, softcap
    call = Call(pattern, layout, *settings, overlap, exchange, receive_budget, machine, backend)
    inputs = Inputs(query, key, value, key_padding_mask, None, bias, bias_positions).autocasted()
    if layout.world == 1 or not layout.n:
        return call.on_one_device(inputs)
    query, key, value = inputs[:3]
    ranks = range(layout.world)
    parts = [[shard_sequence(x, layout, rank) for rank in ranks] for x in (query, key, value)]
    padding = [None if key_padding_mask is None else shard_sequence(key_padding_mask, layout, r, 1) for r in ranks]
    for rank, *shard in zip(ranks, *parts, padding, strict=True):
        call.check_shard(rank, Inputs(*shard))
    seed = fresh_seed(query.device) if dropout_p else None
    terms = call.softcap or 0.0, *inputs.kernel_bias(layout.n)
    settings = KernelSettings(call.scale_for(query.shape[3]), backend, dropout_p, seed, *terms)
    transport = VirtualTransport(layout.world)
    schedules = [schedule.to(query.device) for schedule in _schedules(call.spec(query, key, value), layout)]
    executor = Executor(transport, schedules, settings, padding, reuse=True)
    results = ContextParallel.apply(executor, bias, *parts[0], *parts[1], *parts[2])
    outputs, lses = results[: layout.world], results[layout.world :]
    return AttentionOutput(unshard_sequence(outputs, layout), unshard_sequence(lses, layout))


@lru_cache(maxsize=8)
def _schedules(spec: ScheduleSpec, layout: SequenceLayout) -> list[RankSchedule]:
    return make_schedules(spec, layout, VirtualTransport(layout.world))


def traffic(
    pattern: Pattern | str,
    layout: SequenceLayout,
    heads: int,
    key_heads: int | None = None,
    *,
    row_bytes: int,
    is_causal: bool = False,
    ranks_per_node: int = 1,
) -> list[Traffic]:
    """Traffic of every rank in one forward pass; `row_bytes` are the bytes of a row of K and its row of V.

    >>> from dilated_attention_pytorch.distributed import SequenceLayout, traffic
    >>> moved = traffic("window:64 & causal", SequenceLayout.contiguous(4096, 4), heads=2, row_bytes=512)
    >>> [rank.rows_received for rank in moved]
    [0, 128, 128, 128]
    """
    whole = Call(pattern, layout, is_causal).resolved(heads)
    key_heads = key_heads or heads
    works = [rank_plan(whole, layout, rank, heads, key_heads) for rank in range(layout.world)]
    requests = [request_for(work.far_codes, layout, rank, key_heads) for rank, work in enumerate(works)]
    return [
        plan.report(row_bytes, ranks_per_node)
        for plan in plan_exchange(requests, layout, key_heads, VirtualTransport(layout.world))
    ]


def explain_exchange(
    pattern: Pattern | str,
    layout: SequenceLayout,
    heads: int,
    key_heads: int | None = None,
    *,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    is_causal: bool = False,
    overlap: Overlap = "none",
    exchange: Exchange = "auto",
    receive_budget: int | None = None,
    machine: Machine | None = None,
    ranks_per_node: int = 1,
) -> str:
    """Description of the exchange of a call, the reason for it, and the traffic of every rank.

    >>> from dilated_attention_pytorch.distributed import SequenceLayout, explain_exchange
    >>> print(explain_exchange("window:64", SequenceLayout.contiguous(4096, 2), heads=2, exchange="direct"))
    direct: requested
    rank 0: receives 0.0328 MB in 1 messages from 1 ranks (0.0328 MB between nodes), sends 0.0328 MB; a ring or an \
all-gather receives 1.05 MB
    rank 1: receives 0.0328 MB in 1 messages from 1 ranks (0.0328 MB between nodes), sends 0.0328 MB; a ring or an \
all-gather receives 1.05 MB
    """
    call = Call(
        pattern, layout, is_causal, overlap=overlap, exchange=exchange, receive_budget=receive_budget, machine=machine
    )
    query, key = (
        torch.empty(batch, many, 0, head_dim, dtype=dtype, device="cpu") for many in (heads, key_heads or heads)
    )
    spec = call.spec(query, key, key)
    if layout.world == 1:
        return "none: one rank holds all rows"
    schedules = _schedules(spec, layout)
    lines = [f"{schedules[0].exchange}: {schedules[0].why}"]
    for schedule in schedules:
        plans = [stage.exchange for stage in schedule.stages if stage.exchange is not None]
        for index, plan in enumerate(plans):
            where = f"rank {schedule.rank}" + (f", stage {index}" if len(plans) > 1 else "")
            lines.append(f"{where}: {plan.report(spec.row_bytes, ranks_per_node)}")
    return "\n".join(lines)


class Forecast(NamedTuple):
    """Predicted exchange and work of one rank in a forward pass."""

    rank: int
    tokens: int
    rows: int
    """Rows of K and V that it fetches."""
    peers: int
    flops: int
    """On the tiles of its queries, for one batch entry and head width 1."""


def forecast_rank(
    pattern: Pattern, layout: SequenceLayout, rank: int, heads: int, key_heads: int | None = None
) -> Forecast:
    """Forecast for one rank under a resolved pattern, in time of its own tiles."""
    key_heads = key_heads or heads
    dilated, is_causal = _dilated(pattern)
    size = own_block(pattern)
    runs = layout.runs(rank)
    if dilated is not None and dilated.overlap == "count" and len(runs) == 1:
        request = dilated_request(dilated, layout, rank, heads, key_heads, is_causal=is_causal)
        flops = 4 * size**2 * _dilated_tiles(dilated, layout.n, *runs[0], heads, size, is_causal)
    else:
        flops = plan_rows(pattern, layout.n, heads, runs).flops(1)
        codes = rank_plan(pattern, layout, rank, heads, key_heads).far_codes
        request = request_for(codes, layout, rank, key_heads)
    peers = sum(count > 0 for count in request.counts)
    return Forecast(rank, layout.lengths[rank], len(request.codes), peers, flops)


def _dilated_tiles(pattern: Dilated, n: int, begin: int, end: int, heads: int, size: int, is_causal: bool) -> int:
    """Tile pairs of the queries begin .. end - 1: a tile sees the tiles of its segment, up to itself when causal."""
    total = 0
    for index, (segment, rate) in enumerate(pattern.branches):
        length, span = min(segment, n), rate * size

        def pairs(start: int, length: int = length, span: int = span) -> int:
            tiles = -(-(min(start + length, n) - start) // span)
            low, high = max(begin - start, 0) // span, (min(end, start + length, n) - 1 - start) // span
            own = high - low + 1
            return own * (low + high + 2) // 2 if is_causal else own * tiles

        first, last = begin // length * length, (end - 1) // length * length
        seen = pairs(first) + (pairs(last) if last > first else 0)
        if last - first > length:
            # Segments in between lie inside the run, and have equal counts.
            seen += (last - first - length) // length * pairs(first + length)
        total += seen * sum(bool(pattern.takes_part(index, head)) for head in range(heads))
    return total


def _dilated(pattern: Pattern) -> tuple[Dilated | None, bool]:
    match pattern:
        case Dilated():
            return pattern, False
        case And(Dilated() as dilated, Causal()):
            return dilated, True
        case _:
            return None, False


def dilated_request(
    pattern: Dilated,
    layout: SequenceLayout,
    rank: int,
    heads: int,
    key_heads: int | None = None,
    *,
    is_causal: bool = False,
) -> Request:
    """Request of one rank under a dilated pattern, in closed form: time and memory follow the requested rows.

    One rank of 1024 that share a billion tokens, with 8 key heads:

    >>> from dilated_attention_pytorch import Dilated
    >>> from dilated_attention_pytorch.distributed import SequenceLayout, dilated_request
    >>> ladder = Dilated([2048 * 2**i for i in range(20)], [2**i for i in range(20)])
    >>> len(dilated_request(ladder, SequenceLayout.contiguous(2**30, 1024), 500, 8).codes)
    81920
    """
    key_heads = key_heads or heads
    resolved = pattern.resolve(layout.n, heads)
    assert isinstance(resolved, Dilated)
    rows = []
    for head in range(heads):
        first_code = head // (heads // key_heads) * layout.n
        for index, (segment, rate) in enumerate(resolved.branches):
            if resolved.takes_part(index, head):
                residue = resolved.sampled_residue(index, head)
                for run in layout.runs(rank):
                    # A segment between the first and the last of a run lies inside the run.
                    for which in {run[0] // segment, (run[1] - 1) // segment}:
                        first, end = which * segment + residue, min((which + 1) * segment, layout.n)
                        rows += [first_code + x for x in _outside(run, first, end, rate, is_causal)]
    codes = torch.cat(rows) if rows else torch.arange(0, device="cpu")
    return request_for(codes, layout, rank, key_heads)


def _outside(run: tuple[int, int], first: int, end: int, rate: int, is_causal: bool) -> list[Tensor]:
    """Samples first, first + rate, ... below `end` outside a run that the samples inside it see."""
    begin, stop = (max(first, first - (first - bound) // rate * rate) for bound in run)
    if begin >= min(stop, end):
        return []
    before = torch.arange(first, begin, rate, device="cpu")
    return [before] if is_causal else [before, torch.arange(min(stop, end), end, rate, device="cpu")]
