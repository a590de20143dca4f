"""LongNet's dilated attention, and the plain strided pattern."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from ..errors import must
from .base import Pattern, integer, integers, options

Offset = Literal["mod", "block"]
Overlap = Literal["count", "union"]
Heads = Literal["all", "split"]


class Branch(NamedTuple):
    """Tokens of one segment that share a residue see each other."""

    segment: int
    rate: int


def check_branches(pattern: Any) -> None:
    """Store the segment lengths and dilation rates of a frozen pattern as tuples, one of each for every branch."""
    object.__setattr__(pattern, "segment_lengths", integers("segment length", pattern.segment_lengths, 1))
    object.__setattr__(pattern, "dilation_rates", integers("dilation rate", pattern.dilation_rates, 1))
    if len(pattern.segment_lengths) != len(pattern.dilation_rates):
        raise must(
            "segment_lengths and dilation_rates must be equally long",
            f"{len(pattern.segment_lengths)} and {len(pattern.dilation_rates)}",
            "Give each segment length its own dilation rate.",
        )


@dataclass(frozen=True, slots=True, repr=False)
class Dilated(Pattern):
    """LongNet's attention: in branch (w, r), head h samples tokens t with (t mod w) mod r == offset(h) in each segment.

    segment 8, rate 2, head 0:   0 1 2 3 4 5 6 7
                               0 # . # . # . # .
                               1 . . . . . . . .
                               2 # . # . # . # .
                               3 . . . . . . . .

    Samples of a segment attend to each other. A pair in several branches counts once for each of them
    (`overlap="count"`, the paper's mixing of branches by their denominators) or once (`overlap="union"`).
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    offset: Offset = "mod"
    """Which residue a head samples: `h mod r` (the paper) or `h // ceil(H / r)` (torchscale, published weights)."""
    overlap: Overlap = "count"
    heads: Heads = "all"
    """Every head runs every branch, or the heads are divided over the branches."""
    num_heads: int | None = None
    """Filled in by `resolve`; the block offset and split heads depend on it."""

    def __post_init__(self) -> None:
        check_branches(self)
        for name, kinds in (("offset", Offset), ("overlap", Overlap), ("heads", Heads)):
            if getattr(self, name) not in get_args(kinds):
                raise must(f"{name} must be one of {', '.join(get_args(kinds))}", repr(getattr(self, name)))
        if self.num_heads is not None:
            integer("num_heads", self.num_heads, 1)
            if self.heads == "split" and self.num_heads < len(self.segment_lengths):
                raise must(
                    f'heads="split" must have a head for each of {len(self.segment_lengths)} branches',
                    f"{self.num_heads} heads",
                    'Use more heads, fewer branches, or heads="all".',
                )

    @property
    def branches(self) -> tuple[Branch, ...]:
        return tuple(Branch(w, r) for w, r in zip(self.segment_lengths, self.dilation_rates, strict=True))

    @property
    def needs_heads(self) -> bool:
        return self.heads == "split" or (self.offset == "block" and max(self.dilation_rates) > 1)

    def resolve(self, n: int, heads: int) -> Pattern:
        if self.num_heads is not None and self.num_heads != heads:
            raise must(
                f"the call must have the pattern's {self.num_heads} heads",
                heads,
                "Leave num_heads out and it is taken from the query.",
            )
        return replace(self, num_heads=heads) if self.needs_heads else self

    def sampled_residue(self, index: int, head: Any) -> Any:
        """Residue that `head` samples in branch `index`."""
        rate = self.dilation_rates[index]
        if self.heads == "split":
            return index % rate
        if self.offset == "mod" or rate == 1:
            return head % rate
        return head // -(-self._known_heads() // rate)

    def takes_part(self, index: int, head: Any) -> Any:
        """Whether `head` runs branch `index`."""
        if self.heads == "all":
            return head >= 0
        each, extra = divmod(self._known_heads(), len(self.segment_lengths))
        first = index * each + min(index, extra)
        return (head >= first) & (head < first + each + (index < extra))

    def multiplicity(self, q: Any, k: Any, head: Any = 0) -> Any:
        count = sum(self._branch_allows(i, q, k, head) * 1 for i in range(len(self.segment_lengths)))
        return count if self.overlap == "count" else (count > 0) * 1

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.multiplicity(q, k, head) > 0

    @property
    def max_multiplicity(self) -> int:
        return len(self.segment_lengths) if self.overlap == "count" and self.heads == "all" else 1

    def _branch_allows(self, index: int, q: Any, k: Any, head: Any) -> Any:
        segment, rate = self.branches[index]
        residue = self.sampled_residue(index, head)
        together = q // segment == k // segment
        both_sampled = (q % segment % rate == residue) & (k % segment % rate == residue)
        return together & both_sampled & self.takes_part(index, head)

    def _known_heads(self) -> int:
        if self.num_heads is None:
            raise must("this dilated pattern must know its head count", "none", "Call pattern.resolve(n, heads) first.")
        return self.num_heads

    def describe(self) -> str:
        body = ",".join(f"{w}x{r}" for w, r in self.branches)
        return f"dilated:{body}{options(self, 'offset', 'overlap', 'heads', 'num_heads')}"


@dataclass(frozen=True, slots=True, repr=False)
class Strided(Pattern):
    """A query attends to keys whose distance, in blocks of `block` tokens, is a multiple of `stride`.

    stride 2:   0 1 2 3
              0 # . # .
              1 . # . #
              2 # . # .
              3 . # . #
    """

    stride: int
    block: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", integer("stride", self.stride, 1))
        object.__setattr__(self, "block", integer("block", self.block, 1))

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return (q // self.block - k // self.block) % self.stride == 0

    def describe(self) -> str:
        return f"strided:{self.stride}{options(self, 'block')}"
