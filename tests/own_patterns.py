"""Patterns as a user of the library defines them, for tests that hold every path to `allows` and `multiplicity`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dilated_attention_pytorch import Causal, Dilated, Pattern
from dilated_attention_pytorch.patterns import BlockPattern


@dataclass(frozen=True)
class HeadResidues(Pattern):
    """Heads that differ in every row; only `allows` is defined."""

    step: int = 3

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return (self.step * q + (head + 1) * k) % (head + 2) == 0


@dataclass(frozen=True)
class Levels(Pattern):
    """Multiplicities from 0 to 3."""

    step: int = 1

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.multiplicity(q, k, head) > 0

    def multiplicity(self, q: Any, k: Any, head: Any = 0) -> Any:
        return (q + self.step * k + head) % 4

    @property
    def max_multiplicity(self) -> int:
        return 3


class Table(Pattern):
    """A class that is no dataclass, whose `allows` indexes a table of one entry a token."""

    def __init__(self, *colours: int) -> None:
        self.colours = colours

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        if isinstance(q, int) and isinstance(k, int):
            return self.colours[q] == (self.colours[k] + head) % 3
        table = (k if isinstance(q, int) else q).new_tensor(self.colours)
        return table[q] == (table[k] + head) % 3


@dataclass(frozen=True)
class ByLength(Pattern):
    """Another pattern for short sequences than for long ones, with other parts."""

    def resolve(self, n: int, heads: int) -> Pattern:
        return Dilated((8, 16), (2, 4)).resolve(n, heads) if n > 20 else Causal()


@dataclass(frozen=True)
class HeadBlocks(BlockPattern):
    """Block lists that differ by head; only `row` is defined."""

    def row(self, block: int, head: int = 0) -> tuple[int, ...]:
        return tuple(j for j in range(self.blocks) if (block + j * (head + 1)) % 3 == 0)
