"""Sequences packed one after another, each attending as if it were alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ..errors import must, must_be
from .base import Pattern, integer, integers


@dataclass(frozen=True, slots=True, repr=False)
class Packed(Pattern):
    """Documents of the given lengths; in each, positions restart at 0 and `pattern` applies.

    Packed(Causal(), (2, 2)):   0 1 2 3
                              0 # . . .
                              1 # # . .
                              2 . . # .
                              3 . . # #

    `Documents(lengths) & pattern` differs for patterns of absolute positions: it does not restart them.
    """

    pattern: Pattern
    lengths: tuple[int, ...]
    num_heads: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise must_be("packed documents must have a Pattern", repr(self.pattern))
        object.__setattr__(self, "lengths", integers("document length", self.lengths, 1))
        if self.num_heads is not None:
            object.__setattr__(self, "num_heads", integer("num_heads", self.num_heads, 1))

    @property
    def children(self) -> tuple[Pattern, ...]:
        return (self.pattern,)

    def resolve(self, n: int, heads: int) -> Pattern:
        if sum(self.lengths) != n:
            raise must(f"packed lengths must add up to the sequence length {n}", sum(self.lengths))
        if self.num_heads not in (None, heads):
            raise must(f"the call must have the pattern's {self.num_heads} heads", heads)
        known = replace(self, num_heads=heads)
        for length in set(self.lengths):
            known.document(length)
        return known

    def document(self, length: int) -> Pattern:
        """Pattern inside a document of this length."""
        if self.num_heads is None:
            raise must("a packed pattern must know its head count", "none", "Call pattern.resolve(n, heads) first.")
        return self.pattern.resolve(length, self.num_heads)

    def multiplicity(self, q: Any, k: Any, head: Any = 0) -> Any:
        total: Any = 0
        for length, end in zip(self.lengths, accumulate(self.lengths), strict=True):
            start = end - length
            inside = (q >= start) & (q < end) & (k >= start) & (k < end)
            # Positions in other documents are set to 0: a pattern is evaluated only at positions it has.
            total = total + inside * self.document(length).multiplicity(
                (q - start) * inside, (k - start) * inside, head
            )
        return total

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.multiplicity(q, k, head) > 0

    @property
    def max_multiplicity(self) -> int:
        return max(self.document(length).max_multiplicity for length in set(self.lengths))

    def describe(self) -> str:
        tail = "" if self.num_heads is None else f";num_heads={self.num_heads}"
        return f"packed{{{self.pattern.describe()} / documents:{','.join(map(str, self.lengths))}{tail}}}"
