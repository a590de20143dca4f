"""Random patterns of every kind and random places for rows in memory, drawn by hypothesis or, without it, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from dilated_attention_pytorch.patterns import (
    BlockColumns,
    BlockDilated,
    BlockLists,
    Causal,
    Dilated,
    Documents,
    Full,
    Global,
    Grid,
    Hierarchical,
    Packed,
    Pattern,
    PerHead,
    Random,
    SlidingWindow,
    Strided,
)

if TYPE_CHECKING:
    # A GPU machine where nothing can be installed draws from a seed.
    from hypothesis import strategies as st

BLOCKS = (3, 8, 16, 32)
EXPANDED = ("one sample", "one head", "one token")
"""Layouts that repeat one slice along a dimension, with stride 0."""
LAYOUTS = ("heads first", "tokens first", "rows apart", "width outside", *EXPANDED, "off the grid")
"""Of rows in memory, see `laid_out`."""
VIEWS = (
    *LAYOUTS,
    "inside a larger tensor",
    "every second sample",
    "every second head",
    "every second token",
    "every second number",
    "one head, tokens first",
    "one number",
)
"""`LAYOUTS`, and views of other storage: sliced with offsets and steps, or expanded, which repeats rows."""

T = TypeVar("T")
Problem = tuple[Pattern, int, int]


class Draw(Protocol):
    """Where choices come from. What comes first and what is small makes the simpler example."""

    def integer(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        ...

    def number(self, low: float, high: float) -> float: ...

    def choice(self, options: Sequence[T]) -> T: ...


class Seeded:
    """Draws the same from the same seed."""

    def __init__(self, seed: int | str) -> None:
        source = random.Random(seed)
        self.integer = source.randint
        self.number = source.uniform
        self.choice = source.choice


class Explored:
    """Draws what hypothesis looks into."""

    def __init__(self, draw: st.DrawFn) -> None:
        from hypothesis import strategies as st

        self.integer = lambda low, high: draw(st.integers(low, high))
        self.number = lambda low, high: draw(st.floats(low, high))
        self.choice = lambda options: draw(st.sampled_from(options))


def strategy(drawing: Callable[..., T], *arguments: Any, **options: Any) -> st.SearchStrategy[T]:
    """What `drawing(draw, ...)` gives, for hypothesis."""
    from hypothesis import strategies as st

    return st.composite(lambda draw: drawing(Explored(draw), *arguments, **options))()


def draw_branches(draw: Draw, n: int, fastest: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Segments and rates of up to three branches."""
    count = draw.integer(1, 3)
    segments, rates = ([draw.integer(1, most) for _ in range(count)] for most in (n + 10, fastest))
    return tuple(segments), tuple(rates)


def draw_dilated(draw: Draw, n: int) -> Dilated:
    """Branches of any length and rate, in any order."""
    return Dilated(
        *draw_branches(draw, n, 6),
        offset=draw.choice(["mod", "block"]),
        overlap=draw.choice(["count", "union"]),
        heads=draw.choice(["all", "all", "split"]),
    )


def draw_documents(draw: Draw, n: int) -> Documents:
    """Lengths that add up to `n`."""
    cuts = {draw.integer(1, n - 1) for _ in range(draw.integer(0, 4))} if n > 1 else set()
    return Documents(tuple(b - a for a, b in pairwise([0, *sorted(cuts), n])))


def draw_hierarchical(draw: Draw, block: int) -> Hierarchical:
    """Two levels and the rest."""
    first = draw.integer(1, 11)
    second = draw.integer(first + 1, 12)
    return Hierarchical(tuple((reach, draw.integer(1, 4)) for reach in (first, second, 0)), block=block)


def draw_block_lists(draw: Draw, n: int, heads: int, block: int) -> BlockLists:
    """Up to four blocks a row, the same for all heads or lists for each."""
    rows = -(-n // block)
    each = [
        [[draw.integer(0, rows - 1) for _ in range(draw.integer(0, 4))] for _ in range(rows)]
        for _ in range(draw.choice([1, heads]))
    ]
    return BlockLists.of(each, block)


def draw_grid(draw: Draw, n: int) -> Grid:
    """One to three axes, with tokens before the grid where the length asks for them."""
    prefix = draw.choice([0, 0, min(draw.integer(1, 20), n - 1)])
    rest, shape = n - prefix, []
    for _ in range(draw.integer(0, 2)):
        size = draw.choice([d for d in range(1, rest + 1) if rest % d == 0][:8])
        shape.append(size)
        rest //= size
    shape.append(rest)
    dilation = tuple(min(draw.integer(1, 3), size) for size in shape)
    window = tuple(draw.integer(1, size // rate) for size, rate in zip(shape, dilation, strict=True))
    return Grid(tuple(shape), window, dilation, tuple(draw.choice([False, True]) for _ in shape), prefix)


LEAVES: dict[str, Callable[[Draw, int, int, int], Pattern]] = {
    "full": lambda draw, n, heads, block: Full(),
    "causal": lambda draw, n, heads, block: Causal(),
    "window": lambda draw, n, heads, block: SlidingWindow(
        draw.integer(0, n), draw.integer(0, n) if draw.choice([False, True]) else None
    ),
    "global": lambda draw, n, heads, block: Global(draw.integer(1, n + 3), draw.choice([False, True])),
    "documents": lambda draw, n, heads, block: draw_documents(draw, n),
    "dilated": lambda draw, n, heads, block: draw_dilated(draw, n),
    "strided": lambda draw, n, heads, block: Strided(draw.integer(1, 6)),
    "strided blocks": lambda draw, n, heads, block: Strided(draw.integer(1, 4), block),
    "random": lambda draw, n, heads, block: Random(
        draw.number(0.01, 1.0), draw.integer(0, 99), draw.choice([False, True]), block=block
    ),
    "hierarchical": lambda draw, n, heads, block: draw_hierarchical(draw, block),
    "block dilated": lambda draw, n, heads, block: BlockDilated(
        *draw_branches(draw, n, 4), draw.number(0.01, 1.0) if draw.choice([False, True]) else None, block=block
    ),
    "block columns": lambda draw, n, heads, block: BlockColumns(draw.integer(1, -(-n // block)), block=block),
    "block lists": lambda draw, n, heads, block: draw_block_lists(draw, n, heads, block),
    "grid": lambda draw, n, heads, block: draw_grid(draw, n),
}
"""Every kind of pattern but combinations of others: from a draw, a length, a number of heads and a block."""


def draw_pattern(
    draw: Draw,
    n: int,
    heads: int,
    leaves: int = 4,
    kinds: Sequence[str] = tuple(LEAVES),
    blocks: Sequence[int] = BLOCKS,
) -> Pattern:
    """A pattern that fits `n` tokens and `heads` heads, put together from about `leaves` others at most."""
    way = draw.choice(["alone", "alone", "and", "or", "heads"]) if leaves > 1 else "alone"
    if way == "alone":
        return LEAVES[draw.choice(kinds)](draw, n, heads, draw.choice(blocks))
    if way == "heads":
        within = min(leaves - 1, leaves // heads)
        return PerHead(tuple(draw_pattern(draw, n, heads, within, kinds, blocks) for _ in range(heads)))
    left = draw.integer(1, leaves - 1)
    first, second = (draw_pattern(draw, n, heads, most, kinds, blocks) for most in (left, leaves - left))
    return first & second if way == "and" else first | second


def draw_problem(
    draw: Draw, longest: int = 140, heads: Sequence[int] = (1, 3, 4), edges: Sequence[int] = (), **of_pattern: Any
) -> Problem:
    """A pattern, a length and a head count that go together; sometimes of packed sequences.

    Every third length is one of `edges`, where some are given; `of_pattern` goes to `draw_pattern`.
    """
    own_heads = draw.choice(heads)
    n = draw.choice(edges) if edges and draw.integer(0, 2) == 0 else draw.integer(1, longest)
    if draw.integer(0, 5) > 0:
        return draw_pattern(draw, n, own_heads, **of_pattern), n, own_heads
    document = draw.integer(1, max(1, longest // 3))
    times = draw.integer(1, 3)
    kind = draw.choice(["causal", "dilated", "window"])
    inside = SlidingWindow(draw.integer(0, 20)) if kind == "window" else LEAVES[kind](draw, document, own_heads, 8)
    packed, n = Packed(inside, (document,) * times), document * times
    way = draw.choice(["alone", "alone", "and", "or"])
    if way == "alone":
        return packed, n, own_heads
    other = draw_pattern(draw, n, own_heads, **of_pattern | {"leaves": 1})
    return (packed & other if way == "and" else other | packed), n, own_heads


dilated = partial(strategy, draw_dilated)
patterns = partial(strategy, draw_pattern)
problems = partial(strategy, draw_problem)


def laid_out(rows: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in other memory, but for views that repeat the first sample, head, token or number."""
    batch, heads, n, width = rows.shape

    def around(*shape: int) -> torch.Tensor:
        return rows.new_full(shape, float("nan"))

    match layout:
        case "inside a larger tensor":
            whole = around(batch + 2, heads + 1, n + 3, width + 5)
            whole[1:-1, 1:, 2:-1, 3:-2] = rows
            return whole[1:-1, 1:, 2:-1, 3:-2]
        case "every second sample" | "every second head" | "every second token" | "every second number":
            dim = ("sample", "head", "token", "number").index(layout.removeprefix("every second "))
            return torch.stack([rows, torch.full_like(rows, float("nan"))], dim + 1).flatten(dim, dim + 1)[
                tuple(slice(None, None, 2 if at == dim else 1) for at in range(4))
            ]
        case "one sample":
            return rows[:1].expand_as(rows)
        case "one head":
            return rows[:, :1].expand_as(rows)
        case "one head, tokens first":
            return rows[:, 0].repeat_interleave(2, 1)[:, ::2, None].expand(batch, n, heads, width).transpose(1, 2)
        case "one token":
            return rows[:, :, :1].expand_as(rows)
        case "one number":
            return rows[:1, :1, :1, :1].expand_as(rows)
        case "tokens first":
            return rows.transpose(1, 2).contiguous().transpose(1, 2)
        case "rows apart":
            return torch.cat([rows, torch.full_like(rows, float("nan"))], -1)[..., : rows.shape[-1]]
        case "width outside":
            return rows.transpose(2, 3).contiguous().transpose(2, 3)
        case "off the grid":
            return torch.cat([rows.new_full((1,), float("nan")), rows.flatten()])[1:].view(rows.shape)
        case _:
            return rows
