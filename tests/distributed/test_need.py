"""A rank asks for the rows its queries see and for no other: counted against the pattern itself and against a formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import multiplicities
from strategies import dilated, problems

from dilated_attention_pytorch.distributed import SequenceLayout, dilated_request, traffic
from dilated_attention_pytorch.distributed.exchange import RowSource, fetch, plan_exchange, request_for
from dilated_attention_pytorch.distributed.schedule import rank_plan
from dilated_attention_pytorch.distributed.transport import VirtualTransport
from dilated_attention_pytorch.patterns import Causal, Dilated, parse


def needed_rows(pattern, layout, rank, heads, key_heads):
    """Codes of all rows that some query of the rank sees, straight from the definition."""
    seen = multiplicities(pattern, layout.n, heads)[:, layout.positions(rank)].sum(1) > 0
    by_key_head = seen.unflatten(0, (key_heads, -1)).any(1)
    return by_key_head.flatten().nonzero()[:, 0]


def planned(pattern, layout, heads, key_heads):
    whole = pattern.resolve(layout.n, heads)
    plans = [rank_plan(whole, layout, rank, heads, key_heads) for rank in range(layout.world)]
    requests = [request_for(plan.far_codes, layout, rank, key_heads) for rank, plan in enumerate(plans)]
    return plans, plan_exchange(requests, layout, key_heads, VirtualTransport(layout.world))


@given(problems(longest=80), st.integers(1, 5), st.sampled_from(["contiguous", "zigzag", "owners"]), st.booleans())
@settings(max_examples=30)
def test_what_is_fetched_is_what_is_seen(problem, world, kind, grouped):
    pattern, n, heads = problem
    layout = {
        "contiguous": SequenceLayout.contiguous(n, world),
        "zigzag": SequenceLayout.zigzag(n, world),
        "owners": SequenceLayout.of_owners([(token * 7 // 3) % world for token in range(n)], world),
    }[kind]
    key_heads = 1 if grouped else heads
    try:
        multiplicities(pattern, n, heads)
    except ValueError:
        assume(False)
    plans, exchanges = planned(pattern, layout, heads, key_heads)
    for rank, (plan, exchange) in enumerate(zip(plans, exchanges, strict=True)):
        wanted = needed_rows(pattern, layout, rank, heads, key_heads)
        tokens = plan.key_tokens(layout.positions(rank), n)
        codes = torch.arange(key_heads)[:, None] * n + tokens
        assert torch.unique(codes[tokens >= 0]).equal(wanted)
        remote = wanted[layout.locate(wanted % n)[0] != rank]
        assert exchange.request.codes.sort().values.equal(remote)
        assert exchange.report(1).rows_received == len(remote) == sum(exchange.request.counts)
    assert sum(len(e.send) for e in exchanges) == sum(len(e.request.codes) for e in exchanges)


@pytest.mark.parametrize("offset", ["mod", "block"])
@pytest.mark.parametrize(("world", "levels"), [(2, 4), (4, 5), (8, 6)])
def test_a_dilated_ladder_fetches_what_the_formula_says(offset, world, levels):
    segments, rates = [32 * 2**i for i in range(levels)], [2**i for i in range(levels)]
    n, heads = 1024, 8
    own = n // world
    branches = ",".join(f"{w}x{r}" for w, r in zip(segments, rates, strict=True))
    moved = traffic(f"dilated:{branches};offset={offset}", SequenceLayout.contiguous(n, world), heads, row_bytes=64)
    before = [0, *segments]
    rows = sum((w - max(own, before[i])) // r for i, (w, r) in enumerate(zip(segments, rates, strict=True)) if w > own)
    if offset == "mod":
        assert {rank.rows_received for rank in moved} == {heads * rows}
    else:
        # A head's residues of neighbouring rates need not be nested, so its rows are at most those of each branch.
        apart = sum((w - own) // r for w, r in zip(segments, rates, strict=True) if w > own)
        assert all(rank.rows_received <= heads * apart for rank in moved)
    assert all(rank.bytes_received == 64 * rank.rows_received for rank in moved)
    assert all(rank.ring_bytes == 64 * heads * (n - own) for rank in moved)


@given(st.data(), st.integers(1, 120), st.integers(3, 6), st.integers(1, 6), st.booleans(), st.booleans())
@settings(max_examples=12)
def test_the_closed_form_asks_for_what_the_plan_does(data, n, heads, world, is_causal, zigzag):
    pattern = data.draw(dilated(n))
    key_heads = data.draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0]))
    layout = SequenceLayout.zigzag(n, world) if zigzag else SequenceLayout.contiguous(n, world)
    _, exchanges = planned(pattern & Causal() if is_causal else pattern, layout, heads, key_heads)
    for rank, exchange in enumerate(exchanges):
        found = dilated_request(pattern, layout, rank, heads, key_heads, is_causal=is_causal)
        assert found.codes.equal(exchange.request.codes)
        assert found.counts == exchange.request.counts


def test_a_billion_tokens_move_42_megabytes_a_rank():
    ladder = Dilated([2048 * 2**i for i in range(20)], [2**i for i in range(20)])
    layout = SequenceLayout.contiguous(2**30, 1024)
    for rank in (0, 511, 1023):
        rows = len(dilated_request(ladder, layout, rank, 8).codes)
        assert rows == 8 * 1024 * 10
        assert rows * 2 * 128 * 2 <= 42e6


def test_share_of_ring_is_received_over_ring_bytes():
    alone, (moved, _) = (
        traffic("window:16 & causal", SequenceLayout.contiguous(128, w), heads=1, row_bytes=4) for w in (1, 2)
    )
    assert alone[0].share_of_ring == moved.share_of_ring == 0.0
    assert traffic("causal", SequenceLayout.contiguous(128, 2), heads=1, row_bytes=4)[1].share_of_ring == 1.0


def test_segments_within_a_shard_send_nothing():
    moved = traffic("dilated:16x1,64x4", SequenceLayout.contiguous(512, 8), heads=4, row_bytes=1)
    assert all(rank.rows_received == rank.rows_sent == rank.peers == 0 for rank in moved)


def test_heads_that_share_a_key_head_fetch_a_row_once():
    layout = SequenceLayout.contiguous(128, 4)
    each, shared = (traffic("window:9", layout, 4, key_heads, row_bytes=1) for key_heads in (4, 1))
    assert [rank.rows_received for rank in each] == [4 * rank.rows_received for rank in shared]


def test_virtual_exchange_brings_the_rows_asked_for():
    layout = SequenceLayout.zigzag(90, 3)
    _, exchanges = planned(parse("window:7 | global:2"), layout, 2, 2)
    codes = [
        torch.stack([head * 90 + layout.positions(rank) for head in range(2)])[None, ..., None] for rank in range(3)
    ]
    received = fetch([RowSource(c) for c in codes], exchanges, VirtualTransport(3)).wait()
    for rows, exchange in zip(received, exchanges, strict=True):
        assert rows[:, 0].equal(exchange.request.codes)
