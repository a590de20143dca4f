"""Who may see whom: the value every other room starts from.

A pattern answers for a query position, a key position and a head. Positions are plain integers or any array
of integers with Python's operators (torch tensors broadcast), so one definition serves a single question,
the dense oracle and the planner.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..errors import must, must_be


class Pattern:
    """A frozen, hashable value. Combine with `&` (both allow) and `|` (either allows, each key counted once)."""

    __slots__ = ()

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        """Whether the query at `q` may see the key at `k` in this head."""
        raise NotImplementedError

    def multiplicity(self, q: Any, k: Any, head: Any = 0) -> Any:
        """How often the pair counts in the softmax; 0 means it is not allowed."""
        return self.allows(q, k, head) * 1

    def resolve(self, n: int, heads: int) -> Pattern:
        """The same pattern with all it needs to know of the sequence length and head count filled in."""
        return self

    def describe(self) -> str:
        """Text from which `parse` makes an equal pattern."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.describe()

    def __and__(self, other: Pattern) -> Pattern:
        return And(self, _pattern(other))

    def __or__(self, other: Pattern) -> Pattern:
        return Or(self, _pattern(other))


def _pattern(value: object) -> Pattern:
    if not isinstance(value, Pattern):
        raise must_be("a pattern combines with a Pattern", repr(value), 'Text becomes one with parse("causal").')
    return value


@dataclass(frozen=True, slots=True, repr=False)
class And(Pattern):
    """Both sides allow; multiplicities multiply.

    window 1 & causal:   0 1 2 3
                       0 # . . .
                       1 # # . .
                       2 . # # .
                       3 . . # #
    """

    left: Pattern
    right: Pattern

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.left.allows(q, k, head) & self.right.allows(q, k, head)

    def multiplicity(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.left.multiplicity(q, k, head) * self.right.multiplicity(q, k, head)

    def resolve(self, n: int, heads: int) -> Pattern:
        return And(self.left.resolve(n, heads), self.right.resolve(n, heads))

    def describe(self) -> str:
        right = self.right.describe()
        # Both operators group to the left, so a composite on the right needs its parentheses to come back equal.
        right = f"({right})" if isinstance(self.right, And | Or) else right
        left = self.left.describe()
        left = f"({left})" if isinstance(self.left, Or) else left
        return f"{left} & {right}"

    __repr__ = Pattern.__str__


@dataclass(frozen=True, slots=True, repr=False)
class Or(Pattern):
    """Either side allows; a key allowed by both counts once.

    window 0 | global 1:   0 1 2 3
                         0 # . . .
                         1 # # . .
                         2 # . # .
                         3 # . . #
    """

    left: Pattern
    right: Pattern

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.left.allows(q, k, head) | self.right.allows(q, k, head)

    def resolve(self, n: int, heads: int) -> Pattern:
        return Or(self.left.resolve(n, heads), self.right.resolve(n, heads))

    def describe(self) -> str:
        right = self.right.describe()
        right = f"({right})" if isinstance(self.right, Or) else right
        return f"{self.left.describe()} | {right}"

    __repr__ = Pattern.__str__


@dataclass(frozen=True, slots=True, repr=False)
class PerHead(Pattern):
    """Head h follows the h-th pattern.

    PerHead((SlidingWindow(0), Causal())):   head 0   # . .   head 1   # . .
                                                      . # .            # # .
                                                      . . #            # # #
    """

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", tuple(_pattern(p) for p in self.patterns))
        if not self.patterns:
            raise must("PerHead must name one pattern a head", "none")

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.multiplicity(q, k, head) > 0

    def multiplicity(self, q: Any, k: Any, head: Any = 0) -> Any:
        if isinstance(head, int):
            return self.patterns[head].multiplicity(q, k, head)
        return sum((head == h) * p.multiplicity(q, k, head) for h, p in enumerate(self.patterns))

    def resolve(self, n: int, heads: int) -> Pattern:
        if len(self.patterns) != heads:
            raise must(
                f"a pattern for {len(self.patterns)} heads must meet {len(self.patterns)} heads",
                heads,
                "Give PerHead one pattern for each head of the query.",
            )
        return PerHead(tuple(p.resolve(n, heads) for p in self.patterns))

    def describe(self) -> str:
        return "heads{" + " / ".join(p.describe() for p in self.patterns) + "}"

    __repr__ = Pattern.__str__


def options(pattern: Any, *names: str) -> str:
    """The `;name=value` tail of a description: the named fields that differ from their defaults."""
    defaults = {f.name: f.default for f in fields(pattern)}
    values = {name: getattr(pattern, name) for name in names}
    return "".join(
        f";{name}={int(value) if isinstance(value, bool) else value}"
        for name, value in values.items()
        if value != defaults[name]
    )


LARGEST = 2**48
"""Of every length in a pattern: room for its products and sums in 64 bits, which would wrap around without a word."""


def integer(what: str, value: object, least: int, most: int = LARGEST) -> int:
    """`value` as an int of `least` .. `most`, or an error that names the parameter."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise must_be(f"{what} must be an integer", repr(value))
    number = int(value.__index__())  # pyrefly: ignore[missing-attribute]
    if number < least:
        raise must(f"{what} must be >= {least}", number)
    if number > most:
        raise must(f"{what} must be <= {most}", number)
    return number


def integers(what: str, values: object, least: int) -> tuple[int, ...]:
    """A non-empty sequence of such integers as a tuple."""
    try:
        items = tuple(values)  # pyrefly: ignore[bad-argument-type]
    except TypeError:
        raise must_be(f"{what} must be a sequence of integers", repr(values)) from None
    if not items:
        raise must(f"{what} must not be empty", "()")
    return tuple(integer(what, item, least) for item in items)
