"""Closed forms of patterns: one class per pattern, found by `closed_form`.

A closed form gives, without writing out pairs, the keys that a tile of queries can reach, whether two tiles meet in
all, some or none of their pairs, and the keys that a decoded row reads. A tile is given by the tokens of its first and
last element. SOME is always a correct verdict: the planner then evaluates the element mask. A pattern without a class
of its own uses `ClosedForm`, which evaluates `Pattern.multiplicity`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from itertools import accumulate
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import must
from ..patterns import (
    And,
    BlockColumns,
    BlockDilated,
    BlockLists,
    BlockPattern,
    Causal,
    Dilated,
    Documents,
    Full,
    Global,
    Hierarchical,
    Or,
    Packed,
    Pattern,
    PerHead,
    Random,
    SlidingWindow,
    Strided,
)
from ..patterns.functions import MaskMod
from ..patterns.grid import Grid
from .grid_forms import classify_grid, grid_columns, grid_reach
from .intervals import Traced, trace
from .plan import ranges

NONE, SOME, ALL = 0, 1, 2
Tiles = tuple[Tensor, Tensor, Tensor, Tensor]
"""First and last token of query tiles, first and last token of key tiles."""
P = TypeVar("P", bound=Pattern)
TRACED_TILES = 2**16
"""Pairs of tiles with bounds at once; each operation of a predicate takes a few numbers for every pair."""
OPEN_SQUARES = 16
"""Squares without a verdict, per query tile, from which on a search for the keys in reach stops."""


class Reach(NamedTuple):
    """Ranges of keys: row `row` can reach only keys in the union of its `first .. last`, ends included."""

    row: Tensor
    first: Tensor
    last: Tensor


class LiveKeys(NamedTuple):
    """Keys that some row from a position on can see: those below `sinks`, and those from `begin` on."""

    sinks: int = 0
    begin: int = 0

    def slots(self, positions: Tensor) -> Tensor:
        """Slots of positions in a cache that holds these keys alone."""
        return torch.where(positions < self.sinks, positions, positions - self.begin + self.sinks)


@dataclass(frozen=True, slots=True)
class AtLeast(Pattern):
    """Pairs that `pattern` counts at least `times` times, each counted once."""

    pattern: Pattern
    times: int

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.pattern.multiplicity(q, k, head) >= self.times


@dataclass(frozen=True, slots=True)
class Prefix(Pattern):
    """First tokens of a pattern that was resolved for a longer sequence."""

    pattern: Pattern

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.pattern.allows(q, k, head)

    def multiplicity(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.pattern.multiplicity(q, k, head)

    @property
    def max_multiplicity(self) -> int:
        return self.pattern.max_multiplicity


class Domain:
    """Length and device of a sequence, and a cache of the block lists of its patterns."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.n = n
        self.device = device
        self._lists: dict[tuple[BlockPattern, int], Tensor] = {}
        self._lowest: dict[tuple[BlockPattern, int], Tensor] = {}
        self._ends: dict[Documents, Tensor] = {}
        self._documents: dict[int, Domain] = {}

    def arange(self, *bounds: int) -> Tensor:
        return torch.arange(*bounds, device=self.device)

    def rows_of(self, pattern: BlockPattern) -> Tensor:
        """Query blocks whose lists are needed, ascending, int64."""
        return self.arange(pattern.blocks)

    def block_keys(self, pattern: BlockPattern, head: int) -> Tensor:
        """Pairs of blocks of a block pattern as sorted keys `query block * blocks + key block`."""
        head = head if pattern.by_head else 0
        if (pattern, head) not in self._lists:
            self._lists[pattern, head] = block_pairs(pattern, [head], self)
        return self._lists[pattern, head]

    def lowest(self, pattern: BlockPattern, head: int) -> Tensor:
        """Lowest key block that each query block or a later one sees, int64."""
        if (pattern, head) not in self._lowest:
            keys = self.block_keys(pattern, head)
            lowest = torch.full((pattern.blocks,), pattern.blocks, dtype=torch.int64, device=self.device)
            lowest.scatter_reduce_(0, keys // pattern.blocks, keys % pattern.blocks, "amin")
            self._lowest[pattern, head] = lowest.flip(0).cummin(0).values.flip(0)
        return self._lowest[pattern, head]

    def ends(self, pattern: Documents) -> Tensor:
        """Ends of documents, int64."""
        if pattern not in self._ends:
            self._ends[pattern] = torch.tensor(pattern.ends, device=self.device)
        return self._ends[pattern]

    def document(self, n: int) -> Domain:
        """Domain of a document of this length, with positions from 0."""
        if n not in self._documents:
            self._documents[n] = Domain(n, self.device)
        return self._documents[n]


class ClosedForm(Generic[P]):
    """Closed form of a pattern, from its `multiplicity` alone; the base of all others."""

    sides: tuple[Pattern, ...] = ()
    """Patterns that `&`, `|` or a choice by head combines."""
    is_packed = False
    """Whether the pattern separates several sequences."""
    is_shift_invariant = False
    """Whether the pattern depends on differences of positions alone."""
    is_positional = False
    """Whether the pattern depends on positions alone, never on the length of the sequence."""
    global_queries = 0
    """Number of leading tokens whose queries see every key."""
    run: Literal["all", "before"] | None = None
    """Tiles that a tile of queries sees whole, if they are a run of its segment: all, or those before its own."""

    def __init__(self, pattern: P) -> None:
        self.pattern = pattern

    @property
    def block_sizes(self) -> list[int]:
        """Block sizes that the pattern is made of."""
        return []

    @property
    def follows_length(self) -> bool:
        """Whether rows depend on the length of the sequence."""
        kind: type[Pattern] = type(self.pattern)
        return kind.resolve is not Pattern.resolve

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        """Ranges that contain every key the query tiles `q0 .. q1` may see."""
        first, last = torch.zeros_like(q0), torch.full_like(q0, domain.n - 1)
        bounds = self.pattern.key_range(q0, q1, head)
        if bounds is not None:
            low, high = (torch.as_tensor(bound, device=domain.device) for bound in bounds)
            first, last = torch.maximum(first, low), torch.minimum(last, high)
        return Reach(domain.arange(len(q0)), first, torch.maximum(last, first - 1))

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        """Verdict on pairs of tiles: NONE, SOME or ALL of their pairs, int8."""
        return torch.full_like(tiles[0], SOME, dtype=torch.int8)

    def count(self, q: Tensor, k: Tensor, head: int, domain: Domain) -> Tensor:
        """`Pattern.multiplicity`, without writing out a grid of blocks."""
        # Tiles end past the sequence, where a user's pattern may have no table entry.
        q, k = q.clamp(max=domain.n - 1), k.clamp(max=domain.n - 1)
        times = torch.as_tensor(self.pattern.multiplicity(q, k, head), device=domain.device)
        if times.numel() and int(times.max()) > self.pattern.max_multiplicity:
            raise must(
                f"{self.pattern.describe()} must have multiplicities up to its max_multiplicity "
                f"{self.pattern.max_multiplicity}",
                int(times.max()),
                "Override max_multiplicity where multiplicity is overridden.",
            )
        return times.expand(torch.broadcast_shapes(q.shape, k.shape))

    def head_key(self, head: int) -> object:
        """Value that is equal for two heads only if the pattern allows the same pairs in both."""
        return head

    def mask_keys(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        """Columns whose equality implies equal element masks; `extent` is the number of tokens that a tile spans.

        Columns of `place_keys` matter for partial tiles alone.
        """
        verdict = self.classify(tiles, head, domain)
        columns = self.key_columns(tiles, extent, head, domain)
        return [verdict.long(), *(torch.where(verdict == SOME, column, 0) for column in columns)]

    def key_columns(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        """Columns that determine the element mask of partial tiles."""
        return [tiles[0], tiles[2]]

    def row_keys(self, t: int, head: int, domain: Domain) -> list[range]:
        """Ranges up to `t` that contain every key the causal row `t` sees."""
        return [range(t + 1)]

    def live_keys(self, t: int, heads: int, domain: Domain, final: bool) -> LiveKeys:
        """Keys that causal rows from `t` on can see; `final` if the length of the grid is that of the sequence."""
        return LiveKeys()

    def combine(self, sides: Sequence[Pattern]) -> Pattern:
        """Combination of other patterns in the place of `sides`."""
        return self.pattern

    def prefix(self, n: int, heads: int, domain: Domain) -> Pattern:
        """Pattern for the first `n` tokens whose causal rows equal those of the resolved pattern."""
        return Prefix(self.pattern)


@singledispatch
def closed_form(pattern: Pattern) -> ClosedForm[Any]:
    """Closed form of a pattern, by its class or the nearest base class that has one."""
    return TracedForm(pattern)


class TracedForm(ClosedForm[P]):
    """Closed form of a user's pattern: bounds of its `multiplicity` by interval arithmetic, where these exist."""

    def traced(self, tiles: Tiles, head: int) -> list[Traced] | None:
        """Bounds over pairs of tiles, `TRACED_TILES` of them in each item."""
        found = []
        for some in zip(*(column.split(TRACED_TILES) for column in tiles), strict=True):
            bounds = trace(self.pattern.multiplicity, some, head)
            if bounds is None:
                return None
            found.append(bounds)
        return found

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        whole = super().reach(q0, q1, head, domain)
        kind: type[Pattern] = type(self.pattern)
        square = q0[:1], q1[:1], whole.first[:1], whole.last[:1]
        if kind.key_range is not Pattern.key_range or not len(q0) or self.traced(square, head) is None:
            return whole
        # A quadtree over groups of query tiles and key ranges, all squares of a level at once.
        rows, span = len(q0), int((q1 - q0).max()) + 1
        side = 1 << max(rows - 1, (domain.n - 1) // span).bit_length()
        row = column = domain.arange(1)
        found = []
        while True:
            begin, end = row * side, ((row + 1) * side).clamp(max=rows)
            first, last = column * side * span, ((column + 1) * side * span).clamp(max=domain.n) - 1
            verdict = self.classify((-_highest(-q0, side)[row], _highest(q1, side)[row], first, last), head, domain)
            open_ = verdict == SOME
            # The planner classifies every pair of tiles in reach, so coarse ranges do for predicates without structure.
            is_last = side == 1 or int(open_.sum()) > OPEN_SQUARES * rows
            done = verdict != NONE if is_last else verdict == ALL
            owner, query = ranges(begin[done], (end - begin)[done])
            found.append(Reach(query, first[done][owner], last[done][owner]))
            if is_last:
                break
            side //= 2
            row = (2 * row[open_][:, None] + domain.arange(4) // 2).flatten()
            column = (2 * column[open_][:, None] + domain.arange(4) % 2).flatten()
            inside = (row * side < rows) & (column * side * span < domain.n)
            row, column = row[inside], column[inside]
        reach = _joined(*found)
        tokens, most = (int((option.last - option.first + 1).sum()) for option in (reach, whole))
        return reach if 4 * tokens < 3 * most else whole

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        traced = self.traced(tiles, head)
        if not traced:
            return super().classify(tiles, head, domain)
        low, high = torch.cat([some.low for some in traced]), torch.cat([some.high for some in traced])
        # A multiplicity above the maximum is left to `count`, which raises.
        return _verdict((low >= 1) & (high <= self.pattern.max_multiplicity), high <= 0)

    def key_columns(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        traced = self.traced(tiles, head)
        if traced and all(some.is_shift_invariant for some in traced):
            return [tiles[2] - tiles[0]]
        return super().key_columns(tiles, extent, head, domain)


@closed_form.register(MaskMod)
class MaskModForm(TracedForm[MaskMod]):
    """A function, called with the head as a tensor."""

    def head_key(self, head: int) -> object:
        one = torch.zeros(1, dtype=torch.int64, device="cpu")
        return head if trace(self.pattern.multiplicity, (one,) * 4, None) is None else None


class _Combined(ClosedForm[P]):
    """Combination of two patterns, or of one per head."""

    @property
    def forms(self) -> list[ClosedForm[Any]]:
        return [closed_form(side) for side in self.sides]

    @property
    def block_sizes(self) -> list[int]:
        return [size for form in self.forms for size in form.block_sizes]

    @property
    def is_positional(self) -> bool:  # pyrefly: ignore[bad-override]
        return all(form.is_positional for form in self.forms)


class _Pair(_Combined[P]):
    @property
    def sides(self) -> tuple[Pattern, ...]:  # pyrefly: ignore[bad-override]
        return self.pattern.left, self.pattern.right  # pyrefly: ignore[missing-attribute]

    @property
    def is_shift_invariant(self) -> bool:  # pyrefly: ignore[bad-override]
        return all(form.is_shift_invariant for form in self.forms)

    def head_key(self, head: int) -> object:
        return tuple(form.head_key(head) for form in self.forms)

    def key_columns(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        return [column for form in self.forms for column in form.mask_keys(tiles, extent, head, domain)]


@closed_form.register(And)
class AndForm(_Pair[And]):
    """Pairs of both sides; multiplicities multiply."""

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        sides = [form.reach(q0, q1, head, domain) for form in self.forms]
        return min(sides, key=lambda side: int((side.last - side.first + 1).sum()))

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        left, right = (form.classify(tiles, head, domain) for form in self.forms)
        return torch.minimum(left, right)

    def count(self, q: Tensor, k: Tensor, head: int, domain: Domain) -> Tensor:
        left, right = (form.count(q, k, head, domain) for form in self.forms)
        return left * right

    def row_keys(self, t: int, head: int, domain: Domain) -> list[range]:
        return min((form.row_keys(t, head, domain) for form in self.forms), key=lambda side: sum(map(len, side)))

    def live_keys(self, t: int, heads: int, domain: Domain, final: bool) -> LiveKeys:
        sides = (form.live_keys(t, heads, domain, final) for form in self.forms)
        return max(sides, key=lambda side: side.begin - side.sinks)

    def combine(self, sides: Sequence[Pattern]) -> Pattern:
        return sides[0] & sides[1]


@closed_form.register(Or)
class OrForm(_Pair[Or]):
    """Pairs of either side, each counted once."""

    @property
    def global_queries(self) -> int:  # pyrefly: ignore[bad-override]
        return max(form.global_queries for form in self.forms)

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        return _joined(*(form.reach(q0, q1, head, domain) for form in self.forms))

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        left, right = (form.classify(tiles, head, domain) for form in self.forms)
        return torch.maximum(left, right)

    def count(self, q: Tensor, k: Tensor, head: int, domain: Domain) -> Tensor:
        left, right = (form.count(q, k, head, domain) for form in self.forms)
        return (left + right > 0) * 1

    def row_keys(self, t: int, head: int, domain: Domain) -> list[range]:
        return [keys for form in self.forms for keys in form.row_keys(t, head, domain)]

    def live_keys(self, t: int, heads: int, domain: Domain, final: bool) -> LiveKeys:
        return _either([form.live_keys(t, heads, domain, final) for form in self.forms])

    def combine(self, sides: Sequence[Pattern]) -> Pattern:
        return sides[0] | sides[1]


@closed_form.register(PerHead)
class PerHeadForm(_Combined[PerHead]):
    """A pattern for each head."""

    @property
    def sides(self) -> tuple[Pattern, ...]:  # pyrefly: ignore[bad-override]
        return tuple(self.pattern.patterns)

    @property
    def global_queries(self) -> int:  # pyrefly: ignore[bad-override]
        return min(form.global_queries for form in self.forms)

    def of_head(self, head: int) -> ClosedForm[Any]:
        return closed_form(self.pattern.patterns[head])

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        return self.of_head(head).reach(q0, q1, head, domain)

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        return self.of_head(head).classify(tiles, head, domain)

    def count(self, q: Tensor, k: Tensor, head: int, domain: Domain) -> Tensor:
        return self.of_head(head).count(q, k, head, domain)

    def head_key(self, head: int) -> object:
        return self.pattern.patterns[head], self.of_head(head).head_key(head)

    def key_columns(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        return self.of_head(head).key_columns(tiles, extent, head, domain)

    def row_keys(self, t: int, head: int, domain: Domain) -> list[range]:
        return self.of_head(head).row_keys(t, head, domain)

    def live_keys(self, t: int, heads: int, domain: Domain, final: bool) -> LiveKeys:
        return _either([form.live_keys(t, heads, domain, final) for form in self.forms])

    def combine(self, sides: Sequence[Pattern]) -> Pattern:
        return PerHead(tuple(sides))


@closed_form.register(AtLeast)
class AtLeastForm(ClosedForm[AtLeast]):
    """Level set of a counting pattern."""

    @property
    def inner(self) -> ClosedForm[Any]:
        return closed_form(self.pattern.pattern)

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        return self.inner.reach(q0, q1, head, domain)

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        verdict = self.inner.classify(tiles, head, domain)
        return verdict if self.pattern.times == 1 else verdict.clamp(max=SOME)

    def count(self, q: Tensor, k: Tensor, head: int, domain: Domain) -> Tensor:
        return (self.inner.count(q, k, head, domain) >= self.pattern.times) * 1

    def head_key(self, head: int) -> object:
        return self.inner.head_key(head)

    def key_columns(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        return self.inner.key_columns(tiles, extent, head, domain)


@closed_form.register(Packed)
class PackedForm(ClosedForm[Packed]):
    """Sequences one after another, each with the inner pattern."""

    is_packed = True

    @property
    def documents(self) -> DocumentsForm:
        return DocumentsForm(Documents(self.pattern.lengths))

    @property
    def block_sizes(self) -> list[int]:
        return closed_form(self.pattern.pattern).block_sizes

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        return self.documents.reach(q0, q1, head, domain)

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        return self.documents.classify(tiles, head, domain).clamp(max=SOME)

    def count(self, q: Tensor, k: Tensor, head: int, domain: Domain) -> Tensor:
        lengths = self.pattern.lengths
        start, length = (
            torch.tensor(column, device=domain.device) for column in ((0, *accumulate(lengths[:-1])), lengths)
        )
        own, other = self.documents.number(q, domain), self.documents.number(k, domain)
        together, (q, k) = own == other, (q - start[own], k - start[other])
        total = torch.zeros_like(together, dtype=torch.int64)
        for size in sorted(set(lengths)):
            inside = together & (length[own] == size)
            if bool(inside.any()):
                # Positions of other documents become 0, a position that every document has.
                local_q, local_k = torch.where(inside, q, 0), torch.where(inside, k, 0)
                inner = closed_form(self.pattern.document(size))
                total += inside * inner.count(local_q, local_k, head, domain.document(size))
        return total

    def head_key(self, head: int) -> object:
        return tuple(
            closed_form(self.pattern.document(length)).head_key(head) for length in sorted(set(self.pattern.lengths))
        )


class _PositionForm(ClosedForm[P]):
    """Base of closed forms that are the same for every head and defined at every position."""

    is_positional = True

    def count(self, q: Tensor, k: Tensor, head: int, domain: Domain) -> Tensor:
        times = torch.as_tensor(self.pattern.multiplicity(q, k, head), device=q.device)
        return times.expand(torch.broadcast_shapes(q.shape, k.shape))

    def head_key(self, head: int) -> object:
        return None


@closed_form.register(Full)
class FullForm(_PositionForm[Full]):
    """Every pair."""

    is_shift_invariant = True
    run = "all"

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        return torch.full_like(tiles[0], ALL, dtype=torch.int8)

    def key_columns(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        return []


@closed_form.register(Causal)
class CausalForm(_PositionForm[Causal]):
    """Keys up to the query."""

    is_shift_invariant = True
    run = "before"

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        return Reach(domain.arange(len(q0)), torch.zeros_like(q0), q1)

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        q0, q1, k0, k1 = tiles
        return _verdict(k1 <= q0, k0 > q1)

    def key_columns(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        return [(tiles[2] - tiles[0]).clamp(-extent, extent)]


@closed_form.register(SlidingWindow)
class WindowForm(_PositionForm[SlidingWindow]):
    """Keys within a distance of the query."""

    is_shift_invariant = True

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        before, after = self.pattern.before, self.pattern.after
        return Reach(domain.arange(len(q0)), (q0 - before).clamp(min=0), (q1 + after).clamp(max=domain.n - 1))

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        q0, q1, k0, k1 = tiles
        before, after = self.pattern.before, self.pattern.after
        nearest, farthest = k0 - q1, k1 - q0
        inside = (nearest >= -before) & (farthest <= after)
        return _verdict(inside, (farthest < -before) | (nearest > after))

    def key_columns(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        return [(tiles[2] - tiles[0]).clamp(-self.pattern.before - extent, self.pattern.after + extent)]

    def row_keys(self, t: int, head: int, domain: Domain) -> list[range]:
        return [range(max(0, t - self.pattern.before), t + 1)]

    def live_keys(self, t: int, heads: int, domain: Domain, final: bool) -> LiveKeys:
        return LiveKeys(0, max(0, t - self.pattern.before))


@closed_form.register(Global)
class GlobalForm(_PositionForm[Global]):
    """Leading keys that every query sees, and leading queries that see every key."""

    @property
    def global_queries(self) -> int:  # pyrefly: ignore[bad-override]
        return self.pattern.tokens if self.pattern.queries else 0

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        whole = super().reach(q0, q1, head, domain)
        sinks = whole._replace(last=torch.full_like(q0, min(self.pattern.tokens, domain.n) - 1))
        own = (q0 < self.global_queries).nonzero()[:, 0]
        return _joined(sinks, Reach(own, whole.first[own], whole.last[own]))

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        q0, q1, k0, k1 = tiles
        tokens = self.pattern.tokens
        seen, unseen = k1 < tokens, k0 >= tokens
        if self.pattern.queries:
            seen, unseen = seen | (q1 < tokens), unseen & (q0 >= tokens)
        return _verdict(seen, unseen)

    def key_columns(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        columns = [tiles[2].clamp(max=self.pattern.tokens)]
        return [*columns, tiles[0].clamp(max=self.pattern.tokens)] if self.pattern.queries else columns

    def row_keys(self, t: int, head: int, domain: Domain) -> list[range]:
        return [range(t + 1 if t < self.global_queries else min(self.pattern.tokens, t + 1))]

    def live_keys(self, t: int, heads: int, domain: Domain, final: bool) -> LiveKeys:
        return LiveKeys(min(self.pattern.tokens, t), t) if t >= self.pattern.tokens else LiveKeys()


@closed_form.register(Documents)
class DocumentsForm(_PositionForm[Documents]):
    """Pairs inside one document."""

    is_packed = True
    is_positional = False

    def number(self, position: Tensor, domain: Domain) -> Tensor:
        """Number of the document of each position."""
        return torch.searchsorted(domain.ends(self.pattern), position.clamp(max=self.pattern.ends[-1] - 1), right=True)

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        ends = torch.tensor((0, *self.pattern.ends), device=domain.device)
        return Reach(domain.arange(len(q0)), ends[self.number(q0, domain)], ends[self.number(q1, domain) + 1] - 1)

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        q_first, q_last, k_first, k_last = (self.number(token, domain) for token in tiles)
        same = (q_first == q_last) & (k_first == k_last) & (q_first == k_first)
        return _verdict(same, (q_last < k_first) | (k_last < q_first))


@closed_form.register(Strided)
class StridedForm(_PositionForm[Strided]):
    """Keys, or blocks of them, at multiples of a stride from the query."""

    @property
    def is_shift_invariant(self) -> bool:  # pyrefly: ignore[bad-override]
        return self.pattern.block == 1

    @property
    def block_sizes(self) -> list[int]:
        return [self.pattern.block] if self.pattern.block > 1 else []

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        kept = self.pattern.allows(tiles[0], tiles[2])
        one_block = _in_one_block(tiles, self.pattern.block)
        return _verdict(one_block & kept, one_block & ~kept)

    def key_columns(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        if self.pattern.block > 1:
            return super().key_columns(tiles, extent, head, domain)
        return [(tiles[2] - tiles[0]) % self.pattern.stride]

    def row_keys(self, t: int, head: int, domain: Domain) -> list[range]:
        past, size, stride = range(t + 1), self.pattern.block, self.pattern.stride
        if size == 1:
            return [past[t % stride :: stride]]
        own = t // size
        return [past[j * size : (j + 1) * size] for j in range(own % stride, own + 1, stride)]


@closed_form.register(Grid)
class GridForm(_PositionForm[Grid]):
    """Neighbourhoods on a grid of tokens."""

    is_positional = False

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        return Reach(*grid_reach(self.pattern, q0, q1))

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        return _verdict(*classify_grid(self.pattern, *tiles))

    def key_columns(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        return grid_columns(self.pattern, tiles[0], tiles[2], extent)


@closed_form.register(Dilated)
class DilatedForm(_PositionForm[Dilated]):
    """Every r-th token of segments of w tokens, for each branch (w, r)."""

    follows_length = False  # pyrefly: ignore[bad-override]

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        rows, last = domain.arange(len(q0)), domain.n - 1
        return _joined(
            *(Reach(rows, q0 // w * w, (q1 // w * w + w - 1).clamp(max=last)) for w, _ in self.pattern.branches)
        )

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        verdict = torch.zeros_like(tiles[0], dtype=torch.int8)
        for index, (w, r) in enumerate(self.pattern.branches):
            if not self.pattern.takes_part(index, head):
                continue
            q0, q1, k0, k1 = (token // w for token in tiles)
            apart = (q1 < k0) | (k1 < q0)
            one_segment = (q0 == q1) & (k0 == k1) & (q0 == k0)
            whole = one_segment if r == 1 else torch.zeros_like(apart)
            verdict = torch.maximum(verdict, _verdict(whole, apart))
        return verdict

    def head_key(self, head: int) -> object:
        pattern, indices = self.pattern, range(len(self.pattern.segment_lengths))
        return tuple((pattern.sampled_residue(i, head), bool(pattern.takes_part(i, head))) for i in indices)

    def key_columns(self, tiles: Tiles, extent: int, head: int, domain: Domain) -> list[Tensor]:
        return [tiles[2] - tiles[0], *(tiles[0] % w for w in self.pattern.segment_lengths)]

    def row_keys(self, t: int, head: int, domain: Domain) -> list[range]:
        pattern = self.pattern
        return [
            range(t // w * w + pattern.sampled_residue(i, head), t + 1, r)
            for i, (w, r) in enumerate(pattern.branches)
            if pattern.takes_part(i, head) and t % w % r == pattern.sampled_residue(i, head)
        ]

    def live_keys(self, t: int, heads: int, domain: Domain, final: bool) -> LiveKeys:
        return LiveKeys(0, min(t // w * w for w in self.pattern.segment_lengths))


B = TypeVar("B", bound=BlockPattern)


@closed_form.register(BlockPattern)
class BlockForm(ClosedForm[B]):
    """Lists of key blocks for each query block, row by row from `BlockPattern.row`."""

    listed_type: type[BlockPattern] | None = None
    """Class whose lists `pairs` gives; a subclass may override `row`, and is listed row by row."""
    follows_length = True  # pyrefly: ignore[bad-override]

    @property
    def block_sizes(self) -> list[int]:
        return [self.pattern.block]

    def pairs(self, head: int, domain: Domain) -> Tensor:
        """Kept pairs of a head as sorted keys `query block * blocks + key block`."""
        pattern = self.pattern
        rows = domain.rows_of(pattern).tolist()
        keys = [row * pattern.blocks + column for row in rows for column in sorted(set(pattern.row(row, head)))]
        return torch.tensor(keys, dtype=torch.int64, device=domain.device)

    def pairs_of_heads(self, heads: list[int], domain: Domain) -> Tensor:
        """Kept pairs of several heads, those of head `i` of the list shifted by `i * blocks**2`."""
        form = self if type(self.pattern) is self.listed_type else BlockForm(self.pattern)
        keys = [form.pairs(head, domain) for head in heads]
        square = self.pattern.blocks**2
        return torch.cat([own + index * square for index, own in enumerate(keys)]) if len(keys) > 1 else keys[0]

    def keeps(self, q: Tensor, k: Tensor, head: int, domain: Domain) -> Tensor:
        """Whether the blocks of pairs of tokens are kept."""
        keys = domain.block_keys(self.pattern, head)
        pair = q // self.pattern.block * self.pattern.blocks + k // self.pattern.block
        at = torch.searchsorted(keys, pair).clamp(max=max(len(keys) - 1, 0))
        return keys[at] == pair if len(keys) else torch.zeros_like(pair, dtype=torch.bool)

    def reach(self, q0: Tensor, q1: Tensor, head: int, domain: Domain) -> Reach:
        keys, block, blocks = domain.block_keys(self.pattern, head), self.pattern.block, self.pattern.blocks
        first = torch.searchsorted(keys, q0 // block * blocks)
        last = torch.searchsorted(keys, (q1 // block + 1) * blocks)
        row, slot = ranges(first, last - first)
        column = keys[slot] % blocks
        return Reach(row, column * block, ((column + 1) * block).clamp(max=domain.n) - 1)

    def classify(self, tiles: Tiles, head: int, domain: Domain) -> Tensor:
        kept = self.keeps(tiles[0], tiles[2], head, domain)
        one_block = _in_one_block(tiles, self.pattern.block)
        return _verdict(one_block & kept, one_block & ~kept)

    def count(self, q: Tensor, k: Tensor, head: int, domain: Domain) -> Tensor:
        return self.keeps(q.clamp(max=domain.n - 1), k.clamp(max=domain.n - 1), head, domain) * 1

    def head_key(self, head: int) -> object:
        return head if self.pattern.by_head else None

    def row_keys(self, t: int, head: int, domain: Domain) -> list[range]:
        keys, block, blocks = domain.block_keys(self.pattern, head), self.pattern.block, self.pattern.blocks
        own = t // block
        edges = torch.tensor([own * blocks, (own + 1) * blocks], device="cpu")
        begin, end = torch.searchsorted(keys, edges).tolist()
        past = range(t + 1)
        return [past[j * block : (j + 1) * block] for j in (keys[begin:end] % blocks).tolist()]

    def live_keys(self, t: int, heads: int, domain: Domain, final: bool) -> LiveKeys:
        if not final:
            return LiveKeys()
        pattern = self.pattern
        lows = [domain.lowest(pattern, h)[t // pattern.block] for h in range(heads if pattern.by_head else 1)]
        return LiveKeys(0, min(t, *(int(low) * pattern.block for low in lows)))

    def prefix(self, n: int, heads: int, domain: Domain) -> Pattern:
        pattern, rows = self.pattern, -(-n // self.pattern.block)
        pointers, columns = [0], []
        own_lists = heads if pattern.by_head else 1
        for head in range(own_lists):
            keys = domain.block_keys(pattern, head)
            row, column = keys // pattern.blocks, keys % pattern.blocks
            # A causal row of the prefix sees no block behind the prefix.
            inside = (row < rows) & (column < rows)
            ends = torch.bincount(row[inside], minlength=rows).cumsum(0) + len(columns)
            pointers += ends.tolist()
            columns += column[inside].tolist()
        return BlockLists.from_csr(pointers, columns, rows, own_lists, pattern.block)


@closed_form.register(Random)
class RandomForm(BlockForm[Random]):
    """Blocks drawn by a counter-based generator."""

    def pairs_of_heads(self, heads: list[int], domain: Domain) -> Tensor:
        pattern, head = self.pattern, torch.tensor(heads, device=domain.device)[:, None, None]
        row = domain.rows_of(pattern)[:, None]
        drawn = pattern.drawn(row, domain.arange(pattern.kept), head)
        row_index = domain.arange(len(heads))[:, None, None] * pattern.blocks + row
        return (row_index * pattern.blocks + drawn).flatten()


@closed_form.register(Hierarchical)
class HierarchicalForm(BlockForm[Hierarchical]):
    """Blocks at a fixed set of distances."""

    listed_type = Hierarchical
    follows_length = False  # pyrefly: ignore[bad-override]
    is_positional = True

    def pairs(self, head: int, domain: Domain) -> Tensor:
        distance = torch.tensor(self.pattern.distances(), device=domain.device)
        offset = torch.cat([-distance.flip(0), distance[1:]])
        row = domain.rows_of(self.pattern)[:, None]
        column = row + offset
        return (row * self.pattern.blocks + column)[(column >= 0) & (column < self.pattern.blocks)]


@closed_form.register(BlockColumns)
class BlockColumnsForm(BlockForm[BlockColumns]):
    """The same key blocks for every row."""

    listed_type = BlockColumns

    def pairs(self, head: int, domain: Domain) -> Tensor:
        columns = torch.tensor(self.pattern.columns(), dtype=torch.int64, device=domain.device)
        return (domain.rows_of(self.pattern)[:, None] * self.pattern.blocks + columns).flatten()


@closed_form.register(BlockLists)
class BlockListsForm(BlockForm[BlockLists]):
    """Lists in compressed rows."""

    listed_type = BlockLists

    def pairs(self, head: int, domain: Domain) -> Tensor:
        pattern = self.pattern
        pointers = torch.frombuffer(bytearray(pattern.pointers), dtype=torch.int64)
        pointers = pointers[head * pattern.rows : (head + 1) * pattern.rows + 1]
        begin, end = int(pointers[0]), int(pointers[-1])
        if begin == end:
            return domain.arange(0)
        columns = torch.frombuffer(bytearray(pattern.columns[4 * begin : 4 * end]), dtype=torch.int32)
        rows = domain.rows_of(pattern).cpu()
        row, slot = ranges(pointers[rows] - begin, pointers.diff()[rows])
        return (rows[row] * pattern.blocks + columns[slot]).to(domain.device)


@closed_form.register(BlockDilated)
class BlockDilatedForm(BlockForm[BlockDilated]):
    """Blocks of dilated branches, by distance, up to a budget."""

    listed_type = BlockDilated

    @property
    def follows_length(self) -> bool:  # pyrefly: ignore[bad-override]
        return self.pattern.sparsity_ratio is not None

    @property
    def is_positional(self) -> bool:  # pyrefly: ignore[bad-override]
        return self.pattern.sparsity_ratio is None

    def live_keys(self, t: int, heads: int, domain: Domain, final: bool) -> LiveKeys:
        if self.follows_length:
            return super().live_keys(t, heads, domain, final)
        block = self.pattern.block
        # A segment may begin inside a block, all keys of which are kept.
        starts = (t // block * block // w * w for w in self.pattern.segment_lengths)
        return LiveKeys(0, min(start // block * block for start in starts))

    def pairs(self, head: int, domain: Domain) -> Tensor:
        """Rows against candidate distances, nearest first, in chunks of rows: time O(candidates)."""
        pattern = self.pattern
        blocks, budget, ladder = pattern.blocks, pattern.budget, pattern.ladder()
        offered = {0}
        for segment, rate in ladder:
            reach_blocks = min(-(-segment // pattern.block), blocks)
            if budget is not None:
                # Kept blocks are among the nearest `budget` of some branch, on either side.
                reach_blocks = min(reach_blocks, budget * rate + 1)
            offered.update(d for m in range(rate, reach_blocks, rate) for d in (-m, m))
        if budget is not None:
            # At an end of the sequence the whole budget may be on one side.
            offered.update(d for m in range(min(2 * budget, blocks)) for d in (-m, m))
        distance = torch.tensor(sorted(offered, key=lambda d: (abs(d), d)), device=domain.device)
        chunk = max(1, 2**22 // len(distance))
        return torch.cat([self._rows(rows, distance) for rows in domain.rows_of(pattern)[:, None].split(chunk)])

    def _rows(self, row: Tensor, distance: Tensor) -> Tensor:
        pattern = self.pattern
        ladder, budget, given = pattern.ladder(), pattern.budget, len(pattern.segment_lengths)
        column = row + distance
        inside = (column >= 0) & (column < pattern.blocks)
        beyond = len(ladder)
        step = torch.full_like(column, beyond)
        for index in reversed(range(beyond)):
            step = torch.where(inside & pattern.offered(ladder[index], row, column), max(index, given - 1), step)
        if budget is None:
            kept = step < beyond
        else:
            # The ladder stops at the first step with enough blocks; other blocks fill up only where it ends short.
            counts = torch.stack([(step <= s).sum(1) for s in range(given - 1, beyond)], 1)
            needed = given - 1 + (counts < budget).sum(1, keepdim=True)
            offered = step <= needed.clamp(max=beyond - 1)
            filler = inside & (needed == beyond)
            tier = torch.where(offered, 0, torch.where(filler, 1, 2))
            ordered = torch.argsort(tier, dim=1, stable=True)
            rank = torch.empty_like(ordered).scatter_(
                1, ordered, torch.arange(len(distance), device=row.device).expand_as(ordered)
            )
            kept = (tier < 2) & (rank < budget)
        keys = (row * pattern.blocks + column).masked_fill(~kept, -1).sort(1).values.flatten()
        return keys[keys >= 0]


def block_pairs(pattern: BlockPattern, heads: list[int], domain: Domain) -> Tensor:
    """Kept pairs of a block pattern, sorted: `(i * blocks + query block) * blocks + key block` for `heads[i]`."""
    # Lists that all heads share are those of head 0.
    form = closed_form(pattern)
    assert isinstance(form, BlockForm)
    return form.pairs_of_heads(heads if pattern.by_head else [0] * len(heads), domain)


def _highest(values: Tensor, size: int) -> Tensor:
    """Highest of every `size` neighbours."""
    count = -(-len(values) // size)
    padded = torch.cat([values, values[-1:].expand(count * size - len(values))])
    return padded.view(count, size).amax(1)


def _verdict(all_of_it: Tensor, none_of_it: Tensor) -> Tensor:
    return torch.where(all_of_it, ALL, torch.where(none_of_it, NONE, SOME)).to(torch.int8)


def _in_one_block(tiles: Tiles, block: int) -> Tensor:
    """Whether query tiles and key tiles each lie inside one block."""
    q0, q1, k0, k1 = (token // block for token in tiles)
    return (q0 == q1) & (k0 == k1)


def _joined(*parts: Reach) -> Reach:
    return Reach(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _either(sides: list[LiveKeys]) -> LiveKeys:
    live = LiveKeys(max(side.sinks for side in sides), min(side.begin for side in sides))
    return live if live.begin > live.sinks else LiveKeys()
