"""Random patterns for hypothesis: every kind, and their combinations. Random places for rows in memory."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st

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
)

BLOCKS = st.sampled_from([3, 8, 16, 32])
LAYOUTS = st.sampled_from(["heads first", "tokens first", "rows apart", "width outside"])
"""Of rows in memory, see `laid_out`."""


@st.composite
def lengths_adding_to(draw: st.DrawFn, n: int) -> tuple[int, ...]:
    cuts = draw(st.sets(st.integers(1, max(1, n - 1)), max_size=4)) if n > 1 else set()
    bounds = [0, *sorted(cuts), n]
    return tuple(b - a for a, b in pairwise(bounds))


@st.composite
def dilated(draw: st.DrawFn, n: int) -> Dilated:
    branches = draw(st.lists(st.tuples(st.integers(1, n + 10), st.integers(1, 6)), min_size=1, max_size=3))
    segments, rates = zip(*branches, strict=True)
    return Dilated(
        segments,
        rates,
        offset=draw(st.sampled_from(["mod", "block"])),
        overlap=draw(st.sampled_from(["count", "union"])),
        heads=draw(st.sampled_from(["all", "all", "split"])),
    )


@st.composite
def block_patterns(draw: st.DrawFn, n: int, heads: int) -> Pattern:
    block = draw(BLOCKS)
    kind = draw(st.sampled_from([Random, Hierarchical, BlockDilated, BlockLists]))
    if kind is Random:
        return Random(draw(st.floats(0.01, 1.0)), draw(st.integers(0, 99)), draw(st.booleans()), block=block)
    if kind is Hierarchical:
        first, second = sorted(draw(st.sets(st.integers(1, 12), min_size=2, max_size=2)))
        stride = st.integers(1, 4)
        return Hierarchical(((first, draw(stride)), (second, draw(stride)), (0, draw(stride))), block=block)
    if kind is BlockDilated:
        branches = draw(st.lists(st.tuples(st.integers(1, n + 10), st.integers(1, 4)), min_size=1, max_size=3))
        segments, rates = zip(*branches, strict=True)
        return BlockDilated(segments, rates, draw(st.none() | st.floats(0.01, 1.0)), block=block)
    rows = -(-n // block)
    one_head = st.lists(st.lists(st.integers(0, rows - 1), max_size=4), min_size=rows, max_size=rows)
    return BlockLists.of([draw(one_head) for _ in range(draw(st.sampled_from([1, heads])))], block)


def patterns(n: int, heads: int) -> st.SearchStrategy[Pattern]:
    """Patterns that fit `n` tokens and `heads` heads."""
    simple = st.one_of(
        st.just(Full()),
        st.just(Causal()),
        st.builds(SlidingWindow, st.integers(0, n), st.none() | st.integers(0, n)),
        st.builds(Global, st.integers(1, n + 3), st.booleans()),
        st.builds(Documents, lengths_adding_to(n)),
        dilated(n),
        st.builds(Strided, st.integers(1, 6)),
        st.builds(Strided, st.integers(1, 4), BLOCKS),
        block_patterns(n, heads),
    )
    return st.recursive(
        simple,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.lists(inner, min_size=heads, max_size=heads).map(lambda each: PerHead(tuple(each))),
        ),
        max_leaves=4,
    )


@st.composite
def problems(draw: st.DrawFn, longest: int = 140, heads: tuple[int, ...] = (1, 3, 4)) -> tuple[Pattern, int, int]:
    """A pattern, a length and a head count that go together; sometimes of packed sequences."""
    own_heads = draw(st.sampled_from(heads))
    n = draw(st.integers(1, longest))
    if draw(st.integers(0, 5)) > 0:
        return draw(patterns(n, own_heads)), n, own_heads
    document = draw(st.integers(1, max(1, longest // 3)))
    times = draw(st.integers(1, 3))
    simple = st.one_of(st.just(Causal()), dilated(document), st.builds(SlidingWindow, st.integers(0, 20)))
    return Packed(draw(simple), (document,) * times), document * times, own_heads


def laid_out(rows: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in other memory."""
    match layout:
        case "tokens first":
            return rows.transpose(1, 2).contiguous().transpose(1, 2)
        case "rows apart":
            return torch.cat([rows, torch.full_like(rows, float("nan"))], -1)[..., : rows.shape[-1]]
        case "width outside":
            return rows.transpose(2, 3).contiguous().transpose(2, 3)
        case _:
            return rows
