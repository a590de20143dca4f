"""Patterns are values: equal by content, hashable, printable, combinable; pairs and grids get the same answer."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import patterns, problems

from dilated_attention_pytorch import patterns as room
from dilated_attention_pytorch.patterns import (
    BlockDilated,
    BlockLists,
    Causal,
    Dilated,
    Documents,
    Full,
    Global,
    Hierarchical,
    Packed,
    Pattern,
    PerHead,
    Random,
    SlidingWindow,
    Strided,
    parse,
)


def fits(pattern: Pattern, n: int, heads: int) -> Pattern:
    try:
        return pattern.resolve(n, heads)
    except ValueError:
        assume(False)
        raise


@given(problems())
def test_text_and_value_say_the_same(problem):
    pattern, n, heads = problem
    assert parse(pattern.describe()) == pattern
    resolved = fits(pattern, n, heads)
    assert parse(resolved.describe()) == resolved
    assert hash(parse(str(pattern))) == hash(pattern)
    assert repr(pattern) == pattern.describe()


@pytest.mark.parametrize(
    "text", ["block_dilated:64x1;sparsity_ratio=0.25;reserved=2;block=16", "block_columns:4;block=16;length=256"]
)
def test_every_option_that_is_written_is_read(text):
    assert parse(text).describe() == text


@given(problems(longest=30), st.data())
def test_one_pair_and_a_grid_get_the_same_answer(problem, data):
    pattern, n, heads = problem
    pattern = fits(pattern, n, heads)
    position = torch.arange(n)
    head = data.draw(st.integers(0, heads - 1))
    grid = torch.as_tensor(pattern.multiplicity(position[:, None], position[None], head)).expand(n, n)
    allowed = torch.as_tensor(pattern.allows(position[:, None], position[None], head)).expand(n, n)
    assert torch.equal(grid > 0, allowed)
    for _ in range(20):
        q, k = data.draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))
        assert grid[q, k] == pattern.multiplicity(q, k, head)
        assert bool(allowed[q, k]) == bool(pattern.allows(q, k, head))


@given(patterns(40, 2), patterns(40, 2))
def test_and_multiplies_and_or_counts_once(left, right):
    left, right = fits(left, 40, 2), fits(right, 40, 2)
    q, k = torch.arange(40)[:, None], torch.arange(40)[None]
    for head in range(2):
        a, b = (torch.as_tensor(p.multiplicity(q, k, head)) for p in (left, right))
        assert torch.equal(torch.as_tensor((left & right).multiplicity(q, k, head)), a * b)
        assert torch.equal(torch.as_tensor((left | right).multiplicity(q, k, head)), ((a > 0) | (b > 0)) * 1)


@given(problems())
def test_patterns_survive_pickle_and_copy(problem):
    pattern = problem[0]
    assert pickle.loads(pickle.dumps(pattern)) == copy.deepcopy(pattern) == pattern


def test_dilated_follows_the_definition():
    pattern = Dilated((8, 12), (2, 3))
    for head in range(3):
        for q in range(30):
            for k in range(30):
                expected = sum(
                    q // w == k // w and q % w % r == head % r and k % w % r == head % r for w, r in ((8, 2), (12, 3))
                )
                assert pattern.multiplicity(q, k, head) == expected


def test_block_offset_gives_neighbouring_heads_one_residue():
    pattern = Dilated((16,), (4,), offset="block").resolve(16, 6)
    assert [pattern.sampled_residue(0, head) for head in range(6)] == [0, 0, 1, 1, 2, 2]


def test_split_heads_give_the_first_groups_one_more():
    pattern = Dilated((4, 8, 16), (1, 2, 4), heads="split").resolve(16, 8)
    owners = [[i for i in range(3) if pattern.takes_part(i, head)] for head in range(8)]
    assert owners == [[0], [0], [0], [1], [1], [1], [2], [2]]


def test_hierarchical_covers_no_distance_twice():
    pattern = Hierarchical(((3, 1), (9, 2), (0, 4)), block=1).resolve(40, 1)
    assert pattern.distances() == (0, 1, 2, 3, 5, 7, 9, 13, 17, 21, 25, 29, 33, 37)


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.1, 0.33, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("n", [1, 100, 1500])
def test_the_sparsity_ratio_is_honoured_in_every_row(ratio, n):
    pattern = BlockDilated((256, 512), (1, 2), ratio, block=16).resolve(n, 1)
    blocks = -(-n // 16)
    wanted = max(1, round(ratio * blocks + 1e-9))
    assert {abs(len(pattern.row(i)) - wanted) <= 1 for i in range(blocks)} == {True}
    assert all(i in pattern.row(i) for i in range(blocks))


def test_a_budget_below_the_offer_keeps_the_nearest():
    pattern = BlockDilated((64,), (1,), 4 / 16, block=4).resolve(64, 1)
    assert pattern.row(8) == (6, 7, 8, 9)


def test_a_budget_above_the_offer_continues_the_ladder():
    pattern = BlockDilated((4,), (1,), 4 / 16, block=1).resolve(16, 1)
    assert pattern.row(0) == (0, 1, 2, 3)
    wider = BlockDilated((4,), (1,), 6 / 16, block=1).resolve(16, 1)
    assert wider.row(0) == (0, 1, 2, 3, 4, 6)


def test_random_lists_depend_on_the_seed_alone():
    rows = [Random(0.2, seed, block=16).resolve(800, 4).row(7) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]
    per_head = Random(0.2, block=16, per_head=True).resolve(800, 4)
    assert per_head.row(7, 0) != per_head.row(7, 1)


@pytest.mark.parametrize(
    ("make", "first_line"),
    [
        (lambda: Dilated((), ()), "segment length must not be empty, got ()"),
        (lambda: Dilated((4,), (0,)), "dilation rate must be >= 1, got 0"),
        (lambda: Dilated((0,), (1,)), "segment length must be >= 1, got 0"),
        (lambda: Dilated((4, 8), (1,)), "segment_lengths and dilation_rates must be equally long, got 2 and 1"),
        (lambda: Dilated((4.5,), (1,)), "segment length must be an integer, got 4.5"),
        (lambda: Dilated(4, 1), "segment length must be a sequence of integers, got 4"),
        (lambda: Dilated((4,), (2,), offset="odd"), "offset must be one of mod, block, got 'odd'"),
        (lambda: Dilated((4,), (2,), overlap="sum"), "overlap must be one of count, union, got 'sum'"),
        (lambda: SlidingWindow(-1), "window must be >= 0, got -1"),
        (lambda: SlidingWindow(True), "window must be an integer, got True"),
        (lambda: Global(0), "global tokens must be >= 1, got 0"),
        (lambda: Strided(0), "stride must be >= 1, got 0"),
        (lambda: Documents((3, 0)), "document length must be >= 1, got 0"),
        (lambda: Random(0.0), "density must be a fraction of blocks kept, 0 < density <= 1, got 0.0"),
        (lambda: Random(1.5), "density must be a fraction of blocks kept, 0 < density <= 1, got 1.5"),
        (lambda: Random(float("nan")), "density must be a fraction of blocks kept, 0 < density <= 1, got nan"),
        (
            lambda: BlockDilated((4,), (1,), 0.0),
            "sparsity_ratio must be a fraction of blocks kept, 0 < sparsity_ratio <= 1, got 0.0",
        ),
        (lambda: Hierarchical(((4, 1), (2, 1))), "reaches must grow from level to level, got [4, 2]"),
        (lambda: Hierarchical(()), "levels must not be empty, got ()"),
        (lambda: PerHead(()), "PerHead must name one pattern per head, got none"),
        (lambda: BlockLists.of([[0], [5]]), "key blocks must lie in 0 .. 1, got 0 .. 5"),
        (
            lambda: BlockLists.of([]),
            "block lists must have the same number of rows in every head, at least one, got none",
        ),
        (lambda: Causal() & 3, "a pattern combines with a Pattern, got 3"),
        (
            lambda: parse("windw:3"),
            "a pattern name must be known, got 'windw' in 'windw:3'",
        ),
        (lambda: parse("causal &"), "pattern text must have a pattern at the end, got 'causal &'"),
        (lambda: parse("(causal"), "pattern text must have ')' at the end, got '(causal'"),
        (
            lambda: parse("causal full"),
            "pattern text must have & or | between patterns before 'causal full', got 'causal full'",
        ),
        (
            lambda: parse("dilated:2048"),
            "dilated must be written like dilated:2048x1,8192x4;offset=block, got 'dilated:2048'",
        ),
        (lambda: parse("window:2;size=3"), "window must have no options but after, got 'size=3'"),
        (lambda: parse("full;size=3"), "full must have no options, got 'size=3'"),
        (lambda: parse("strided:4;block"), "strided must have block=value at most once, got 'block'"),
        (
            lambda: parse("strided:4;block=2;block=3"),
            "strided must have block=value at most once, got 'block=2;block=3'",
        ),
        (
            lambda: parse("random:0.5;per_head=maybe"),
            "per_head of random must be one of 1, true, yes, 0, false, no, got 'maybe'",
        ),
        (lambda: parse("random:0.5;seed=1.5"), "seed of random must be an integer, got '1.5'"),
        (
            lambda: parse("block_dilated:8x1;sparsity_ratio=few"),
            "sparsity_ratio of block_dilated must be a number, got 'few'",
        ),
        (lambda: parse("blocks:0,0,0,0;heads=3"), "rows of blocks must be a multiple of heads=3, got 4 rows"),
        (lambda: parse("blocks:0;heads=0"), "heads of blocks must be >= 1, got 0"),
        (lambda: parse("blocks:0;heads=-1"), "heads of blocks must be >= 1, got -1"),
        (lambda: parse("blocks:@0123"), "block lists must be written out, got the digest @0123"),
        (
            lambda: parse("packed{causal / documents:4;foo=1}"),
            "packed must have no options but num_heads, got 'foo=1'",
        ),
        (lambda: parse("packed{causal / documents:4;num_heads=0}"), "num_heads must be >= 1, got 0"),
        (
            lambda: parse("dilated:8x1x2"),
            "dilated must be written like dilated:2048x1,8192x4;offset=block, got 'dilated:8x1x2'",
        ),
        (lambda: Global(4, queries="no"), "queries must be True or False, got 'no'"),
        (lambda: Random(0.5, per_head="false"), "per_head must be True or False, got 'false'"),
        (lambda: Packed("causal", (4,)), "packed documents must have a Pattern, got 'causal'"),
    ],
)
def test_bad_parameters_say_what_must_hold(make, first_line):
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    assert str(caught.value).splitlines()[0] == first_line


@pytest.mark.parametrize(
    ("pattern", "n", "heads", "first_line"),
    [
        (PerHead((Full(), Causal())), 8, 3, "the call must have the pattern's 2 heads, got 3"),
        (Dilated((4,), (1,), num_heads=4), 8, 3, "the call must have the pattern's 4 heads, got 3"),
        (
            Dilated((4, 8), (1, 2), heads="split"),
            8,
            1,
            'heads="split" must have a head for each of 2 branches, got 1 heads',
        ),
        (Documents((3, 4)), 8, 1, "document lengths must add up to the sequence length 8, got 7"),
        (Packed(Causal(), (3, 4), num_heads=2), 7, 3, "the call must have the pattern's 2 heads, got 3"),
        (Packed(Causal(), (3, 4)), 8, 1, "packed lengths must add up to the sequence length 8, got 7"),
        (
            BlockLists.of([[0], [1]], 4),
            9,
            1,
            "a sequence for 2 rows of block lists must have 2 blocks of 4 tokens, got 9 tokens",
        ),
        (Random(0.5, block=4, length=8), 9, 1, "the sequence must have the pattern's 8 tokens, got 9"),
    ],
)
def test_a_pattern_for_another_problem_says_so(pattern, n, heads, first_line):
    with pytest.raises(ValueError) as caught:
        pattern.resolve(n, heads)
    assert str(caught.value).splitlines()[0] == first_line


def test_every_pattern_draws_itself():
    kinds = [kind for _, kind in inspect.getmembers(room, inspect.isclass) if issubclass(kind, Pattern)]
    abstract = {Pattern, room.BlockPattern}
    for kind in set(kinds) - abstract:
        assert "#" in (kind.__doc__ or ""), f"{kind.__name__} has no picture in its docstring"


def test_long_block_lists_are_described_by_digest():
    rows = [[j for j in range(200) if (i * j) % 3 == 0] for i in range(200)]
    lists = BlockLists.of(rows, 16)
    assert lists.describe().startswith("blocks:@")
    assert lists.describe() == BlockLists.of(rows, 16).describe() != BlockLists.of(rows[::-1], 16).describe()


@pytest.mark.parametrize(("word", "switch"), {"1": True, "yes": True, "True": True, "0": False, "no": False}.items())
def test_switches_in_text_mean_what_they_say(word, switch):
    assert parse(f"global:4;queries={word}") == Global(4, queries=switch)
    assert parse(f"random:0.5;per_head={word}") == Random(0.5, per_head=switch)
