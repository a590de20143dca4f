"""Patterns of blocks: which key blocks each query block sees, one softmax a row over all their keys."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from ctypes import string_at
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from typing import Any

from ..errors import must, must_be
from .base import CONSTRUCTORS, Pattern, flag, integer, options
from .dilated import Branch, check_branches

WORD = 0xFFFFFFFF
LEAST_BLOCK = 16
"""Smallest block of a mask that is listed by blocks; masks of smaller blocks are listed by pairs."""
MOST_WRITTEN = 4096
"""Entries of block lists that are written out as text."""


@dataclass(frozen=True, slots=True, repr=False)
class BlockPattern(Pattern):
    """A pattern given by `row`: the key blocks that one query block sees."""

    block: int = field(default=128, kw_only=True)
    """Tokens in a block."""
    length: int | None = field(default=None, kw_only=True)
    """Tokens in the sequence; filled in by `resolve`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", integer("block", self.block, 1))

    def resolve(self, n: int, heads: int) -> Pattern:
        if self.length not in (None, n):
            raise must(f"the sequence must have the pattern's {self.length} tokens", n)
        return replace(self, length=n)

    @property
    def blocks(self) -> int:
        """Blocks in the sequence, the last one perhaps ragged."""
        if self.length is None:
            raise must("this block pattern must know the length", "none", "Call pattern.resolve(n, heads) first.")
        return -(-self.length // self.block)

    @property
    def by_head(self) -> bool:
        """Whether `row` depends on the head."""
        return True

    def row(self, block: int, head: int = 0) -> tuple[int, ...]:
        """Key blocks that query block `block` sees, ascending."""
        raise NotImplementedError

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        if isinstance(q, int) and isinstance(k, int):
            return k // self.block in self.row(q // self.block, head if self.by_head else 0)
        top = 1 + (int(head if isinstance(head, int) else head.max()) if self.by_head else 0)
        like = k if isinstance(q, int) else q
        table = like.new_tensor(_table(self, top)) > 0
        return table[head if self.by_head else 0, q // self.block, k // self.block]


@lru_cache(maxsize=8)
def _table(pattern: BlockPattern, heads: int) -> list[list[list[int]]]:
    """The whole grid written out, for the dense oracle at small lengths."""
    grid = []
    for head in range(heads):
        rows = [[0] * pattern.blocks for _ in range(pattern.blocks)]
        for i, row in enumerate(rows):
            for j in pattern.row(i, head):
                row[j] = 1
        grid.append(rows)
    return grid


def _ratio(what: str, value: float) -> float:
    if not isinstance(value, int | float | Fraction) or isinstance(value, bool) or not 0 < value <= 1:
        advice = "0.01 keeps 1 % of the blocks."
        raise must(f"{what} must be a fraction of blocks kept, 0 < {what} <= 1", repr(value), advice)
    return float(value)


def _budget(ratio: float, blocks: int) -> int:
    return max(1, math.floor(ratio * blocks + 0.5))


def scramble(x: Any) -> Any:
    """Mix 32-bit words, held in Python integers or int64 arrays."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & WORD
    return x ^ (x >> 16)


@dataclass(frozen=True, slots=True, repr=False)
class Random(BlockPattern):
    """Each query block keeps the fraction `density` of all key blocks, one drawn from each of as many equal strata.

    density 0.5, block 1:   0 1 2 3
                          0 # . . #
                          1 . # # .
                          2 . # . #
                          3 # . # .
    """

    density: float
    seed: int = 0
    per_head: bool = False

    def __post_init__(self) -> None:
        BlockPattern.__post_init__(self)
        object.__setattr__(self, "density", _ratio("density", self.density))
        object.__setattr__(self, "seed", integer("seed", self.seed, 0, 2**63 - 1))
        object.__setattr__(self, "per_head", flag("per_head", self.per_head))

    @property
    def by_head(self) -> bool:
        return self.per_head

    @property
    def kept(self) -> int:
        """Number of key blocks that a row keeps."""
        return _budget(self.density, self.blocks)

    def drawn(self, block: Any, stratum: Any, head: Any = 0) -> Any:
        """Key block that query block `block` keeps in a stratum."""
        first, last = stratum * self.blocks // self.kept, (stratum + 1) * self.blocks // self.kept
        stream = scramble((self.seed + head * self.per_head * 0x632BE5AB) & WORD)
        word = scramble(scramble((stream + block) & WORD) ^ ((stratum * 0x9E3779B9) & WORD))
        return first + word % (last - first)

    def row(self, block: int, head: int = 0) -> tuple[int, ...]:
        return tuple(self.drawn(block, stratum, head) for stratum in range(self.kept))

    def describe(self) -> str:
        return f"random:{self.density!r}{options(self, 'block', 'seed', 'per_head', 'length')}"


@dataclass(frozen=True, slots=True, repr=False)
class Hierarchical(BlockPattern):
    """Levels divide the distance axis: each keeps every `stride`-th distance from the previous level's end to `reach`.

    levels 2x1,4x2, block 1:   0 1 2 3 4
                             0 # # # . .
                             1 # # # # .
                             2 # # # # #

    No key block is covered twice. A reach of 0 in the last level extends it to the end of the sequence.
    """

    levels: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        BlockPattern.__post_init__(self)
        levels = tuple((integer("reach", reach, 0), integer("stride", stride, 1)) for reach, stride in self.levels)
        if not levels:
            raise must("levels must not be empty", "()")
        reaches = [reach for reach, _ in levels]
        bounded = reaches[:-1] if reaches[-1] == 0 else reaches
        if 0 in bounded or sorted(set(bounded)) != bounded:
            raise must("reaches must grow from level to level", reaches, "Only the last may be 0, for no bound.")
        object.__setattr__(self, "levels", levels)

    @property
    def by_head(self) -> bool:
        return False

    def distances(self) -> tuple[int, ...]:
        """Distances in blocks that are kept, ascending, the query block's own 0 first."""
        kept, begin = [], 0
        for reach, stride in self.levels:
            end = min(reach or self.blocks, self.blocks)
            kept += range(begin, end, stride)
            begin = end
        return tuple(kept)

    def row(self, block: int, head: int = 0) -> tuple[int, ...]:
        near = {block + sign * distance for distance in self.distances() for sign in (-1, 1)}
        return tuple(sorted(j for j in near if 0 <= j < self.blocks))

    def describe(self) -> str:
        body = ",".join(f"{reach}x{stride}" for reach, stride in self.levels)
        return f"hierarchical:{body}{options(self, 'block', 'length')}"


@dataclass(frozen=True, slots=True, repr=False)
class BlockDilated(BlockPattern):
    """Within a segment, a query block attends to every `rate`-th block counted from itself; a row keeps all branches.

    segment 4, rate 2, block 1:   0 1 2 3
                                0 # . # .
                                1 . # . #
                                2 # . # .

    With `sparsity_ratio` each row keeps that fraction of all blocks. If the branches contain more, the nearest are
    kept. If they contain fewer, branches with doubled segment and rate are added up to the length of the sequence,
    then the nearest other blocks. `reserved` blocks of the fraction are left to other patterns of a union, such as
    global tokens; at least one block is kept.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    sparsity_ratio: float | None = None
    reserved: int = 0

    def __post_init__(self) -> None:
        BlockPattern.__post_init__(self)
        check_branches(self)
        if self.sparsity_ratio is not None:
            object.__setattr__(self, "sparsity_ratio", _ratio("sparsity_ratio", self.sparsity_ratio))
        object.__setattr__(self, "reserved", integer("reserved", self.reserved, 0))
        if self.reserved and self.sparsity_ratio is None:
            raise must("reserved must come with sparsity_ratio", self.reserved)

    @property
    def by_head(self) -> bool:
        return False

    @property
    def budget(self) -> int | None:
        """Number of key blocks that a row keeps; None without `sparsity_ratio`."""
        if self.sparsity_ratio is None:
            return None
        return max(1, _budget(self.sparsity_ratio, self.blocks) - self.reserved)

    def ladder(self) -> tuple[Branch, ...]:
        """The given branches, then the branches that a budget may add."""
        steps = [Branch(w, r) for w, r in zip(self.segment_lengths, self.dilation_rates, strict=True)]
        if self.sparsity_ratio is not None:
            while steps[-1].segment < self.blocks * self.block:
                steps.append(Branch(steps[-1].segment * 2, steps[-1].rate * 2))
        return tuple(steps)

    def offered(self, branch: Branch, i: Any, j: Any) -> Any:
        """Whether a branch contains key block `j` for query block `i`."""
        return (i * self.block // branch.segment == j * self.block // branch.segment) & ((j - i) % branch.rate == 0)

    def row(self, block: int, head: int = 0) -> tuple[int, ...]:
        by_distance = sorted(range(self.blocks), key=lambda j: (abs(j - block), j))
        given, budget, ladder = len(self.segment_lengths), self.budget, self.ladder()
        offered = {j for j in by_distance if any(self.offered(branch, block, j) for branch in ladder[:given])}
        for branch in ladder[given:]:
            if budget is not None and len(offered) >= budget:
                break
            offered.update(j for j in by_distance if self.offered(branch, block, j))
        nearest = [j for j in by_distance if j in offered]
        if budget is not None:
            nearest = [*nearest, *(j for j in by_distance if j not in offered)][:budget]
        return tuple(sorted(nearest))

    def describe(self) -> str:
        body = ",".join(f"{w}x{r}" for w, r in zip(self.segment_lengths, self.dilation_rates, strict=True))
        return f"block_dilated:{body}{options(self, 'sparsity_ratio', 'reserved', 'block', 'length')}"


@dataclass(frozen=True, slots=True, repr=False)
class BlockColumns(BlockPattern):
    """`count` evenly spread key blocks, the same for every query block.

    count 2, block 1:   0 1 2 3
                      0 . # . #
                      1 . # . #
                      2 . # . #
    """

    count: int

    def __post_init__(self) -> None:
        BlockPattern.__post_init__(self)
        object.__setattr__(self, "count", integer("count", self.count, 1))
        if self.length is not None and self.count > self.blocks:
            raise must(f"count must be at most the number of blocks, {self.blocks}", self.count)

    def columns(self) -> tuple[int, ...]:
        """The key blocks, ascending."""
        return tuple((2 * i + 1) * self.blocks // (2 * self.count) for i in range(self.count))

    def row(self, block: int, head: int = 0) -> tuple[int, ...]:
        return self.columns()

    def describe(self) -> str:
        return f"block_columns:{self.count}{options(self, 'block', 'length')}"


@dataclass(frozen=True, slots=True, repr=False)
class BlockLists(BlockPattern):
    """Explicit lists of the key blocks of each query block, shared by the heads or one set of lists per head.

    BlockLists.of([[0], [0, 1], [1, 2]], block=1):   0 1 2
                                                   0 # . .
                                                   1 # # .
                                                   2 . # #
    """

    pointers: bytes
    """Little-endian int64: where each row's list begins in `columns`, and the end of the last."""
    columns: bytes
    """Little-endian int32, ascending within a row."""
    rows: int
    """Query blocks a head."""
    heads: int = 1
    """1 when the lists are shared by all heads."""

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]], block: int = 128) -> BlockLists:
        """From nested sequences: `lists[row]`, or `lists[head][row]`."""
        depth_two = bool(lists) and all(len(row) == 0 or isinstance(row[0], int) for row in lists)
        by_head: Any = [lists] if depth_two else lists
        if not by_head or len({len(rows) for rows in by_head}) != 1 or not by_head[0]:
            raise must("block lists must have the same number of rows in every head, at least one", _shape(by_head))
        pointers, columns = array("q", [0]), array("i")
        for rows in by_head:
            for row in rows:
                columns.extend(sorted(set(integer("key block", j, 0) for j in row)))
                pointers.append(len(columns))
        return cls.from_csr(pointers, columns, len(by_head[0]), len(by_head), block)

    @classmethod
    def from_csr(
        cls, pointers: Iterable[int], columns: Iterable[int], rows: int, heads: int = 1, block: int = 128
    ) -> BlockLists:
        """From row pointers (heads * rows + 1) and ascending columns."""
        packed = array("q", pointers), array("i", columns)
        if len(packed[0]) != heads * rows + 1:
            raise must(f"pointers must have heads * rows + 1 = {heads * rows + 1} entries", len(packed[0]))
        if len(packed[1]) and not 0 <= min(packed[1]) <= max(packed[1]) < rows:
            raise must(f"key blocks must lie in 0 .. {rows - 1}", f"{min(packed[1])} .. {max(packed[1])}")
        return cls(packed[0].tobytes(), packed[1].tobytes(), rows, heads, block=block)

    @classmethod
    def from_mask(cls, mask: Any) -> BlockLists:
        """Lists of a bool mask (n, n), (heads, n, n) or (1, heads, n, n), in the largest blocks that are uniform."""
        if not hasattr(mask, "new_zeros"):
            raise must_be("mask must be a bool Tensor", type(mask).__name__)
        mask = mask.detach().cpu()
        if str(mask.dtype) != "torch.bool":
            raise must_be(
                "mask must be bool, True where a query attends", mask.dtype, "For an additive mask, pass mask == 0."
            )
        if mask.dim() == 4 and mask.shape[0] == 1:
            mask = mask[0]
        mask = mask[None] if mask.dim() == 2 else mask
        if mask.dim() != 3 or mask.shape[1] != mask.shape[2] or not mask.numel():
            advice = "A plan holds for every sample: give padding as key_padding_mask." if mask.dim() == 4 else None
            raise must("mask must have shape (n, n), (heads, n, n) or (1, heads, n, n)", tuple(mask.shape), advice)
        mask = mask[:1] if bool((mask == mask[:1]).all()) else mask
        block, kept, coarse = 1, mask, _coarser(mask)
        for size in (2, 4, 8, 16, 32, 64, 128):
            if coarse is None:
                break
            block, kept = (size, coarse) if size >= LEAST_BLOCK else (block, kept)
            coarse = _coarser(coarse)
        ends = kept.sum(-1).flatten().cumsum(0)
        pointers, columns = bytes(8) + _bytes(ends), _bytes(kept.nonzero()[:, 2].int())
        return cls(pointers, columns, kept.shape[1], mask.shape[0], block=block)

    def resolve(self, n: int, heads: int) -> Pattern:
        if self.heads not in (1, heads):
            raise must(f"the call must have the pattern's {self.heads} heads", heads)
        if -(-n // self.block) != self.rows:
            what = f"a sequence for {self.rows} rows of block lists must have {self.rows} blocks of {self.block} tokens"
            raise must(what, f"{n} tokens")
        return replace(self, length=n)

    @property
    def by_head(self) -> bool:
        return self.heads > 1

    def row(self, block: int, head: int = 0) -> tuple[int, ...]:
        begin, end = memoryview(self.pointers).cast("q")[head * self.rows + block :][:2]
        return tuple(memoryview(self.columns).cast("i")[begin:end])

    def describe(self) -> str:
        tail = options(self, "heads", "block", "length")
        if self.is_writable:
            lists = (self.row(i, h) for h in range(self.heads) for i in range(self.rows))
            return "blocks:" + ",".join(" ".join(map(str, row)) or "-" for row in lists) + tail
        digest = sha256(self.pointers + self.columns).hexdigest()[:32]
        return f"blocks:@{digest}{tail}"

    @property
    def is_writable(self) -> bool:
        """Whether the lists are short enough for text that `parse` reads back; others are described by a digest."""
        return len(self.columns) <= 4 * MOST_WRITTEN

    @property
    def nbytes(self) -> int:
        return len(self.pointers) + len(self.columns)


def _shape(nested: Any) -> str:
    return " + ".join(str(len(rows)) for rows in nested) or "none"


def _coarser(cells: Any) -> Any:
    """Cells twice as wide, of a bool (heads, rows, rows); None where the cells of some wider one differ."""
    wide = cells[:, ::2, ::2]
    for part in (cells[:, ::2, 1::2], cells[:, 1::2, ::2], cells[:, 1::2, 1::2]):
        # A ragged end has no second row or column.
        if not bool((wide[:, : part.shape[1], : part.shape[2]] == part).all()):
            return None
    return wide


def _bytes(tensor: Any) -> bytes:
    """Contents of a CPU tensor; numpy, which torch needs for the same, may be missing."""
    tensor = tensor.contiguous()
    return string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""


CONSTRUCTORS["mask"] = BlockLists.from_mask
