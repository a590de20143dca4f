"""Patterns of position alone: everything, the past, a window, sinks, documents."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..errors import must
from .base import Pattern, flag, integer, integers, options


@dataclass(frozen=True, slots=True, repr=False)
class Full(Pattern):
    """Every query attends to every key.

      0 1
    0 # #
    1 # #
    """

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return (q >= 0) & (k >= 0)

    def describe(self) -> str:
        return "full"


@dataclass(frozen=True, slots=True, repr=False)
class Causal(Pattern):
    """A query attends to itself and earlier keys.

      0 1 2
    0 # . .
    1 # # .
    2 # # #
    """

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return k <= q

    def describe(self) -> str:
        return "causal"


@dataclass(frozen=True, slots=True, repr=False)
class SlidingWindow(Pattern):
    """A query attends to itself, `before` tokens before it and `after` tokens after it (`before` by default).

    window 1:   0 1 2 3
              0 # # . .
              1 # # # .
              2 . # # #
              3 . . # #
    """

    before: int
    after: int = None  # pyrefly: ignore[bad-assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", integer("window", self.before, 0))
        after = self.before if self.after is None else integer("window", self.after, 0)
        object.__setattr__(self, "after", after)

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return (k >= q - self.before) & (k <= q + self.after)

    def describe(self) -> str:
        return f"window:{self.before}" + ("" if self.after == self.before else f",{self.after}")


@dataclass(frozen=True, slots=True, repr=False)
class Global(Pattern):
    """Every query attends to the first `tokens` keys (sinks); with `queries`, these tokens also attend to every key.

    global 1:   0 1 2     global 1;queries=1:   0 1 2
              0 # . .                         0 # # #
              1 # . .                         1 # . .
              2 # . .                         2 # . .
    """

    tokens: int
    queries: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", integer("global tokens", self.tokens, 1))
        object.__setattr__(self, "queries", flag("queries", self.queries))

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        sinks = k < self.tokens
        return sinks | (q < self.tokens) if self.queries else sinks

    def describe(self) -> str:
        return f"global:{self.tokens}{options(self, 'queries')}"


@dataclass(frozen=True, slots=True, repr=False)
class Documents(Pattern):
    """Tokens of one document attend to each other; `lengths` are in the order of the documents.

    documents 2,1:   0 1 2
                   0 # # .
                   1 # # .
                   2 . . #
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", integers("document length", self.lengths, 1))

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.lengths))

    def resolve(self, n: int, heads: int) -> Pattern:
        if sum(self.lengths) != n:
            raise must(f"document lengths must add up to the sequence length {n}", sum(self.lengths))
        return self

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self._document(q) == self._document(k)

    def _document(self, position: Any) -> Any:
        if isinstance(position, int):
            return bisect_right(self.ends, position)
        return _search(position.new_tensor(self.ends), position)

    def describe(self) -> str:
        return "documents:" + ",".join(map(str, self.lengths))


def _search(ends: Any, position: Any) -> Any:
    """Binary search by arithmetic alone: how many ends lie at or below each position."""
    low = position * 0
    step = 1 << (len(ends) - 1).bit_length()
    while step:
        candidate = low + step
        inside = candidate <= len(ends)
        low = low + step * (inside & (ends[(candidate * inside - 1) % len(ends)] <= position))
        step >>= 1
    return low
