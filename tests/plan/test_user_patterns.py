"""Plans of `Packed` inside other patterns and of user-defined patterns hold the pairs that the patterns define."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import multiplicities
from own_patterns import ByLength, HeadBlocks, HeadResidues, Levels, Table

from dilated_attention_pytorch import (
    Causal,
    Dilated,
    Global,
    Packed,
    Pattern,
    PerHead,
    Random,
    SlidingWindow,
    Strided,
    make_plan,
    parse,
)
from dilated_attention_pytorch.plan import plan_rows

N, HEADS = 70, 3
LADDER = Dilated((8, 16, 12), (1, 2, 3))
COLOURS = Table(*(token * token % 3 for token in range(N)))
TWO, THREE = (30, 40), (15, 25, 30)
PATTERNS = [
    HeadResidues(),
    Levels(),
    COLOURS,
    HeadBlocks(block=16),
    HeadResidues() & Causal(),
    HeadResidues() | Levels(2),
    Levels(3) & LADDER,
    COLOURS & LADDER | SlidingWindow(2),
    HeadBlocks(block=16) & Causal(),
    PerHead((Packed(LADDER, TWO), HeadResidues(), Levels(2))) & Causal(),
    Packed(HeadResidues(), TWO),
    Packed(HeadBlocks(block=5), TWO),
    Packed(ByLength(), THREE),
    Packed(ByLength(), THREE) & Causal(),
    Packed(Dilated((8,), (2,)), (35, 35)) & Causal(),
    Packed(LADDER, TWO) & Causal(),
    Causal() & Packed(LADDER, TWO) & SlidingWindow(9),
    Packed(LADDER, TWO) | Causal(),
    Packed(LADDER, TWO) & Global(35),
    Packed(LADDER, TWO) & LADDER,
    Packed(LADDER, TWO) & Packed(LADDER, (20, 50)),
    Packed(LADDER, TWO) | Packed(SlidingWindow(3), TWO),
    Packed(Packed(LADDER, (15, 20)), (35, 35)),
    Packed(Packed(LADDER, (15, 20)) & Causal(), (35, 35)),
    Packed(Random(0.4, block=4, per_head=True), TWO) & Causal(),
    Packed(Random(0.4, block=4, per_head=True), TWO) | SlidingWindow(2),
    Packed(parse("dilated:16x4;offset=block"), TWO) | Global(3),
    Packed(parse("dilated:8x1,8x2,16x3;heads=split"), TWO) | Strided(3),
    Packed(parse("heads{window:2 / causal / full}"), TWO) & Strided(3),
]


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_plan_holds_the_pairs_of_every_head(pattern, block_size):
    wanted = multiplicities(pattern, N, HEADS)
    assert torch.equal(make_plan(pattern, N, HEADS, block_size).to_dense().double(), wanted)
    for run in ((0, 17), (25, 47), (60, 70)):
        rows = plan_rows(pattern.resolve(N, HEADS), N, HEADS, [run], block_size=block_size)
        assert torch.equal(rows.to_dense()[:, slice(*run)].double(), wanted[:, slice(*run)])


def test_causal_packed_ladders_keep_their_axis():
    packed, n = Packed(Dilated((2048, 8192), (1, 4)), (8192,) * 4), 4 * 8192
    plan = make_plan(packed & Causal(), n, 4)
    assert plan.blocks == make_plan(Packed(packed.pattern & Causal(), packed.lengths), n, 4).blocks
    assert [part.queries.rate for part in plan.parts] == [1, 4]


@pytest.mark.parametrize("after", [0, 1000])
def test_multiplicities_above_their_bound_are_refused(after: int):
    @dataclass(frozen=True)
    class Twice(Pattern):
        def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
            return k <= q + after

        def multiplicity(self, q: Any, k: Any, head: Any = 0) -> Any:
            return 2 * (k <= q + after)

    with pytest.raises(ValueError, match=r"Twice\(\) must have multiplicities up to its max_multiplicity 1, got 2"):
        make_plan(Twice(), 40, 1)


def test_methods_of_library_patterns_stay_as_they_are():
    with pytest.raises(TypeError, match="expected Odd to keep the methods of SlidingWindow, got its own allows"):

        class Odd(SlidingWindow):
            def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
                return (q - k) % 2 == 1
