"""Worlds larger than this machine: threads with real collectives, groups that only count, butterflies of 512 ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from limits import scaled
from oracle import answer, error
from worlds import fake_world, run_threads

from dilated_attention_pytorch import Dilated, parse
from dilated_attention_pytorch.distributed import (
    SequenceLayout,
    context_parallel_attention_with_lse,
    dilated_request,
    shard_sequence,
    virtual_attention,
)
from dilated_attention_pytorch.distributed.butterfly import butterfly, why_no_butterfly
from dilated_attention_pytorch.distributed.exchange import (
    ExchangePlan,
    RowSource,
    exchange,
    fetch,
    plan_exchange,
    request_for,
    return_gradients,
)
from dilated_attention_pytorch.distributed.schedule import rank_plan
from dilated_attention_pytorch.distributed.transport import VirtualTransport


def ladder(first: int, levels: int, factor: int = 2) -> Dilated:
    return Dilated([first * factor**i for i in range(levels)], [factor**i for i in range(levels)])


def compare_on_threads(world: int, text: str, n: int, **options) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, n, 4, dtype=torch.float64) for _ in range(4)]
    wanted = answer(*inputs[:3], parse(text), grad_output=inputs[3])
    layout = SequenceLayout.contiguous(n, world)

    def check(rank: int, _: int) -> None:
        leaves = [shard_sequence(x, layout, rank).clone().requires_grad_() for x in inputs[:3]]
        output, lse = context_parallel_attention_with_lse(*leaves, text, layout, **options)
        grads = torch.autograd.grad((output * shard_sequence(inputs[3], layout, rank)).sum(), leaves)
        for got, want in zip((output, lse, *grads), wanted, strict=True):
            assert error(got, shard_sequence(want, layout, rank)) <= 1e-12

    run_threads(check, world)


@pytest.mark.timeout(200)
def test_eight_threads_compute_what_one_device_does():
    compare_on_threads(8, "dilated:8x1,32x4,128x16 & causal", 128)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "options"), [(64, {}), (24, {"overlap": "local"})], ids=["64, fetch", "24, overlap"])
def test_many_threads_compute_what_one_device_does(world, options):
    compare_on_threads(world, "window:5 | global:2;queries=1", 4 * world, **options)


def test_a_world_of_262144_exchanges_what_the_formula_says():
    """One rank of a billion tokens: one collective, with the rows planned for it."""
    pattern, world, rank = ladder(2048, 20), 262_144, 131_071
    layout = SequenceLayout.contiguous(2**30, world)
    request = dilated_request(pattern, layout, rank, 1)
    below = [2048 * 2**i for i in range(20)]
    before = [0, *below]
    own = 2**30 // world
    # A branch sampled more sparsely than the shard is long may have no sample in it.
    rows = sum(
        (w - max(own, b)) // 2**i
        for i, (w, b) in enumerate(zip(below, before, strict=False))
        if w > own and (-rank * own) % 2**i < own
    )
    assert len(request.codes) == rows
    plan = ExchangePlan(rank, layout, 1, request, torch.arange(1), (1, *(0,) * (world - 1)))
    calls = []
    send = dist.all_to_all_single
    with fake_world(rank, world):
        dist.all_to_all_single = lambda *given, **named: calls.append(given[0].shape) or send(*given, **named)
        try:
            exchange(torch.zeros(own, 8), plan, None)
        finally:
            dist.all_to_all_single = send
    assert calls == [(rows, 8)]


def planned(pattern, layout, heads, key_heads=None):
    key_heads = key_heads or heads
    requests = [dilated_request(pattern, layout, rank, heads, key_heads) for rank in range(layout.world)]
    plans = plan_exchange(requests, layout, key_heads, VirtualTransport(layout.world))
    return [
        ExchangePlan(
            plan.rank, layout, key_heads, plan.request, plan.send, plan.send_counts, butterfly(pattern, plan, heads)
        )
        for plan in plans
    ]


@pytest.mark.parametrize(
    ("n", "world", "heads", "key_heads", "first", "levels", "factor"),
    [
        (1024, 8, 4, 4, 32, 6, 2),
        (4096, 64, 2, 1, 16, 5, 4),
        pytest.param(4096, 512, 2, 2, 8, 10, 2, marks=pytest.mark.slow),
    ],
)
def test_a_butterfly_brings_the_rows_asked_for_in_few_messages(n, world, heads, key_heads, first, levels, factor):
    pattern, layout = ladder(first, levels, factor), SequenceLayout.contiguous(n, world)
    assert why_no_butterfly(pattern, layout) is None
    plans = planned(pattern, layout, heads, key_heads)
    transport = VirtualTransport(world)
    codes = [
        (torch.arange(key_heads)[:, None] * n + layout.positions(rank))[None, ..., None].double()
        for rank in range(world)
    ]
    received = fetch([RowSource(x) for x in codes], plans, transport).wait()
    for rows, plan in zip(received, plans, strict=True):
        assert rows[:, 0].long().equal(plan.request.codes)
        told = plan.report(1)
        assert (
            told.rows_received
            == len(plan.request.codes)
            == sum(len(r) for s in plan.rounds for r in s.receive.values())
        )
        most = 0
        while factor**most < world:
            most += 1
        assert told.messages <= (factor - 1) * most
    # The adjoint gives every row back to its holder: as many units as ranks that asked for it.
    home = return_gradients(
        [torch.ones(len(rows), 1, dtype=torch.float64) for rows in received], plans, transport
    ).wait()
    asked = torch.bincount(torch.cat([plan.request.codes for plan in plans]), minlength=key_heads * n)
    for rank, (rows, plan) in enumerate(zip(home, plans, strict=True)):
        assert rows[:, 0].long().equal(asked[codes[rank].flatten().long()])
        assert plan.local_rows == len(rows)


@pytest.mark.parametrize(
    ("pattern", "layout", "why"),
    [
        (parse("window:4"), SequenceLayout.contiguous(64, 4), "not a plain dilated"),
        (parse("dilated:16x1,64x4 & causal"), SequenceLayout.contiguous(64, 4), "not a plain dilated"),
        (parse("dilated:16x1,64x4;offset=block"), SequenceLayout.contiguous(64, 4), "not among those"),
        (parse("dilated:16x1,64x4"), SequenceLayout.zigzag(64, 4), "contiguous and equal"),
        (parse("dilated:16x1,64x4"), SequenceLayout.contiguous(66, 4), "contiguous and equal"),
        (parse("dilated:12x1,64x4"), SequenceLayout.contiguous(64, 4), "do not part evenly"),
        (parse("dilated:32x2,64x3"), SequenceLayout.contiguous(64, 4), "do not refine"),
    ],
)
def test_where_a_butterfly_cannot_go_it_says_why(pattern, layout, why):
    assert why in why_no_butterfly(pattern, layout)


def test_butterfly_and_direct_exchange_give_the_same_bits():
    torch.manual_seed(0)
    inputs = [torch.randn(1, 4, 128, 8) for _ in range(3)]
    layout = SequenceLayout.contiguous(128, 8)
    one, other = (virtual_attention(*inputs, ladder(16, 4), layout, exchange=e) for e in ("direct", "butterfly"))
    assert one.output.equal(other.output)
    assert one.lse.equal(other.lse)


def test_rank_of_a_billion_tokens_plans_its_own_tiles():
    """The whole kernel plan of a rank: its time is that of its million tokens, whatever the sequence."""
    pattern = ladder(2048, 20)
    layout = SequenceLayout.contiguous(2**30, 1024)
    began = time.perf_counter()
    work = rank_plan(pattern, layout, 500, 8, 8)
    request = request_for(work.far_codes, layout, 500, 8)
    seconds = time.perf_counter() - began
    assert request.codes.equal(dilated_request(pattern, layout, 500, 8).codes)
    assert len(request.codes) == 8 * 1024 * 10
    assert len(request.codes) * 2 * 128 * 2 <= 42e6
    assert seconds < scaled(10), "it takes about a second on a quiet core"


def test_receive_memory_is_flat_in_the_length():
    """Tokens a rank fixed, ranks from 16 to 1024: the rows received stay those of the ladder's reach."""
    pattern = ladder(512, 6)
    own = 4096
    most, buffers = [], []
    for world in (16, 64, 256, 1024):
        layout = SequenceLayout.contiguous(own * world, world)
        most.append(max(len(dilated_request(pattern, layout, rank, 8).codes) for rank in (1, world // 2, world - 2)))
        buffers.append(rank_plan(pattern, layout, world // 2, 8, 8).key_rows.numel())
    assert len(set(most)) == 1 and most[0] > 0
    assert len(set(buffers)) == 1 and buffers[0] > most[0]
