"""The plan of some rows is the plan's rows: against the pattern itself, for any rows and any pattern."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import multiplicities
from strategies import problems

from dilated_attention_pytorch import Dilated, Packed, parse
from dilated_attention_pytorch.plan import make_plan, plan_rows


def runs_of(cuts: list[int], n: int) -> list[tuple[int, int]]:
    """Every second stretch between the cuts."""
    bounds = sorted({0, n, *(cut % n for cut in cuts)})
    return list(pairwise(bounds))[::2]


def rows_in(runs: list[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([torch.arange(a, b) for a, b in runs])


@given(problems(longest=90), st.lists(st.integers(0, 500), max_size=6), st.sampled_from([16, 32, None]))
@settings(max_examples=25)
def test_rows_meet_what_the_pattern_says(problem, cuts, block):
    pattern, n, heads = problem
    try:
        wanted = multiplicities(pattern, n, heads)
    except ValueError:
        assume(False)
    runs = runs_of(cuts, n)
    rows = rows_in(runs)
    plan = plan_rows(pattern.resolve(n, heads), n, heads, runs, block_size=block)
    assert plan.to_dense()[:, rows].double().equal(wanted[:, rows])


@pytest.mark.parametrize("text", ["dilated:16x1,40x3", "window:9 & causal", "random:0.4;block=16", "full"])
def test_packed_sequences(text):
    lengths, n = (40, 3, 57, 40, 20), 160
    pattern = Packed(parse(text), lengths).resolve(n, 3)
    wanted = multiplicities(pattern, n, 3)
    for runs in ([(0, 160)], [(35, 50)], [(0, 41), (99, 155)], [(41, 42)]):
        assert plan_rows(pattern, n, 3, runs).to_dense()[:, rows_in(runs)].double().equal(wanted[:, rows_in(runs)])


def test_all_rows_are_the_whole_plan():
    for text in ("dilated:64x1,256x4 & causal", "window:70", "random:0.2;block=32", "strided:5 & causal"):
        pattern = parse(text).resolve(500, 4)
        whole, rows = make_plan(pattern, 500, 4), plan_rows(pattern, 500, 4, [(0, 500)])
        assert whole.blocks == rows.blocks
        assert whole.to_dense().equal(rows.to_dense())


def test_keys_outside_the_stretch_asked_for_are_left_out():
    pattern = parse("window:3 | global:5;queries=1").resolve(300, 2)
    plan = plan_rows(pattern, 300, 2, [(0, 5)], keys=(100, 180), block_size=16)
    dense, wanted = plan.to_dense()[:, :5, 100:180].double(), multiplicities(pattern, 300, 2)[:, :5, 100:180]
    assert dense.equal(wanted)
    assert plan.parts[0].keys.tiles <= 80 // 16 + 2


def test_no_rows_have_no_parts():
    assert plan_rows(parse("causal"), 100, 2, []).parts == ()


def test_the_plan_of_a_few_rows_does_not_grow_with_the_sequence():
    ladder = Dilated([2048 * 2**i for i in range(20)], [2**i for i in range(20)])
    sizes = [plan_rows(ladder, n, 8, [(n // 2, n // 2 + 8192)]).nbytes for n in (2**24, 2**30)]
    assert sizes[1] <= 1.5 * sizes[0] <= 2e6
