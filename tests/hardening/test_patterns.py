"""Patterns against one-line definitions of their own, and plans past the range of 32-bit integers."""

from __future__ import annotations

import pytest
import torch
from cases import PROBLEMS, Problem
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import answer, error, multiplicities

from dilated_attention_pytorch import attention_with_lse
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.patterns import Causal, Packed, parse
from dilated_attention_pytorch.plan import PlanCache, make_plan

N = 40
DEFINITIONS = {
    "causal": lambda q, k: k <= q,
    "window:3": lambda q, k: abs(q - k) <= 3,
    "window:3,1": lambda q, k: -3 <= k - q <= 1,
    "global:4": lambda q, k: k < 4,
    "global:4;queries=1": lambda q, k: k < 4 or q < 4,
    "strided:7": lambda q, k: q % 7 == k % 7,
    "strided:2;block=5": lambda q, k: q // 5 % 2 == k // 5 % 2,
    "documents:10,1,29": lambda q, k: (q < 10) == (k < 10) and (q < 11) == (k < 11),
    "dilated:8x2": lambda q, k: q // 8 == k // 8 and q % 2 == k % 2 == 1,
}
"""Of head 1."""


@pytest.mark.parametrize("text", DEFINITIONS)
def test_a_pattern_allows_what_its_definition_says(text):
    pattern = parse(text).resolve(N, 2)
    wanted = [[bool(DEFINITIONS[text](q, k)) for k in range(N)] for q in range(N)]
    position = torch.arange(N)
    assert torch.equal(pattern.allows(position[:, None], position[None, :], 1).expand(N, N), torch.tensor(wanted))
    assert make_plan(pattern, N, 2, 16).to_dense()[1].tolist() == torch.tensor(wanted).int().tolist()


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_a_plan_of_every_problem_holds_the_pairs_of_its_pattern(problem):
    plan = make_plan(problem.pattern, problem.n, problem.heads, 16)
    assert torch.equal(plan.to_dense().double(), multiplicities(problem.pattern, problem.n, problem.heads))


@pytest.mark.parametrize("n", [47, 48, 49])
def test_a_tile_one_element_short_is_not_whole(n):
    plan = make_plan(parse("full"), n, 1, 16)
    row, tile, mask = plan.parts[0].by_query.entries()
    cut = (row == n // 16) | (tile == n // 16)
    assert torch.equal(mask >= 0, cut if n % 16 else torch.zeros_like(cut))


@pytest.mark.parametrize("text", ["causal", "dilated:16x1,32x2", "window:9 & causal"])
def test_packed_documents_hold_the_pairs_of_each(text):
    packed = Packed(parse(text), (30, 16, 51, 30))
    plan = make_plan(packed, 127, 2, 16)
    wanted = torch.zeros(2, 127, 127, dtype=torch.float64)
    at = 0
    for length in packed.lengths:
        wanted[:, at : at + length, at : at + length] = multiplicities(parse(text), length, 2)
        at += length
    assert torch.equal(plan.to_dense().double(), wanted)


@pytest.mark.parametrize("blocks", ["blocks:0,0 1,2;block=16", "random:0.5;block=16", "hierarchical:1x1,0x2;block=16"])
def test_a_later_head_may_have_lists_that_no_other_head_has(blocks):
    pattern = parse(f"heads{{causal / full / {blocks}}}")
    plan = make_plan(pattern, 40, 3, 16)
    assert torch.equal(plan.to_dense().double(), multiplicities(pattern, 40, 3))


def test_pairs_of_tiles_beyond_32_bits_are_told_apart():
    tiles = 1 << 17
    plan = make_plan(parse("window:8"), 16 * tiles, 1, 16)
    row, tile, _ = plan.parts[0].by_query.entries()
    assert plan.blocks == len(row) == 3 * tiles - 2
    assert bool(((row - tile).abs() <= 1).all())
    assert torch.equal(row.bincount(minlength=tiles), tile.bincount(minlength=tiles))


@pytest.mark.parametrize(
    "backend",
    [
        "cpu",
        pytest.param("native", marks=pytest.mark.skipif(not library_path().exists(), reason="C++ kernel not built")),
    ],
)
def test_ragged_tile_of_one_branch_is_whole_in_another(backend):
    """Rows lie apart, so the C++ kernel copies keys together, and a copy of 4 must not stand in for 16."""
    problem = Problem(name="", text="dilated:20x1,64x1", n=64, heads=1, key_heads=1)
    query, key, value = (torch.cat([x, x], -1)[..., : problem.d] for x in problem.inputs(torch.float32)[:3])
    output, lse = attention_with_lse(query, key, value, f"{problem.text} & random:1.0;block=16", backend=backend)
    exact = answer(query, key, value, problem.pattern)
    assert error(output, exact.output) <= 2e-6
    assert error(lse, exact.lse) <= 2e-6


@pytest.mark.parametrize("change", [{"n": 96}, {"heads": 4}, {"block_size": 32}])
def test_a_cached_plan_serves_its_own_problem_alone(change):
    cache = PlanCache()
    before = {"n": 64, "heads": 2, "block_size": 16}
    cache.get(parse("causal"), **before)
    plan = cache.get(parse("causal"), **before | change)
    assert {name: getattr(plan, name) for name in before} == before | change


LARGE = ["window:{}", "window:{},0", "global:{}", "strided:{}", "strided:{};block={}", "dilated:{}x1", "dilated:40x{}"]
LARGE += ["dilated:{}x{}", "random:0.5;block={}", "hierarchical:{}x1;block=16", "block_dilated:{}x1;block=16"]


@pytest.mark.parametrize("text", LARGE)
def test_the_largest_numbers_do_not_wrap_around(text):
    pattern = parse(text.replace("{}", str(2**48)))
    small = parse(text.replace("{}", "1000"))
    for one in (pattern, pattern & Causal()):
        plan = make_plan(one, N, 2, 16)
        assert torch.equal(plan.to_dense().double(), multiplicities(one, N, 2))
    assert torch.equal(multiplicities(pattern, N, 2), multiplicities(small, N, 2))
    with pytest.raises(ValueError, match="must be <= 281474976710656, got 281474976710657"):
        parse(text.replace("{}", str(2**48 + 1)))


@pytest.mark.parametrize("text", ["(" * 5000, "heads{" * 3000, "&".join(["causal"] * 5000), "full | " * 3000 + "full"])
def test_patterns_nested_beyond_reason_are_refused(text):
    with pytest.raises(ValueError, match="at most 128 patterns inside one another") as caught:
        parse(text)
    assert len(str(caught.value)) < 2000


WORDS = ["window:", "3", "causal", "&", "|", "(", ")", "heads{", "}", "/", "dilated:16x1", ",32x2", ";", "offset=block"]
WORDS += [
    "random:0.5",
    "block=16",
    " ",
    "global:",
    "packed{",
    "documents:9",
    "9" * 30,
    "-1",
    "é",
    "=",
    "nan",
    "\0",
    "<b>",
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS), max_size=9).map("".join) | st.text(max_size=30))
def test_any_text_parses_or_raises_a_clear_error(text):
    try:
        pattern = parse(text)
    except ValueError as error:
        assert "must" in str(error)
    else:
        assert parse(pattern.describe()) == pattern
