"""Tiles of a pattern as kernels read them: strided axes cut into tiles, and lists of tile pairs.

A `Plan` is a tuple of `Part`s; one softmax runs over the keys of all parts together. A part lives on
one strided axis, so the cost of a dilated branch follows its samples, not the tokens between them.

Shapes in this file: H heads, T tiles of an axis, C head classes, B block size,
F and P stored full and partial entries, M element masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import must
from .cost import Cost, cost_of

FULL_BEGIN, FULL_END, FULL_BASE, PARTIAL_BEGIN, PARTIAL_END, PARTIAL_BASE = range(6)
"""Columns of `Walk.rows`."""
HOST_NUMBERS = 2**18
"""Size of a table, in numbers, up to which it is built on the host: that takes milliseconds."""
MOST_BASES, SUMMED_ROWS = 64, 2**10
"""Bases of lists that are summed once each, and rows whose lists are otherwise written out at a time."""


@dataclass(frozen=True, eq=False, slots=True)
class Axis:
    """Positions of the tiles of one strided axis in the sequence.

    Element `i` of tile `t` for head `h` is the token `start[t] + offset[h] + rate * i`,
    and it exists when that is below `end[t]`.
    """

    rate: int
    """Distance in tokens between two neighbours on the axis."""
    offset: Tensor
    """int32 [H]: residue sampled by each head (0 when the rate is 1)."""
    start: Tensor
    """int64 [T]: token of the tile's first element, before the head's offset."""
    end: Tensor
    """int64 [T]: token just past the tile's segment."""

    @property
    def tiles(self) -> int:
        return self.start.numel()

    def tokens(self, block_size: int, head: int) -> tuple[Tensor, Tensor]:
        """Tokens of every tile for one head, int64 [T, B], and which of them exist, bool [T, B]."""
        step = self.rate * torch.arange(block_size, device=self.start.device)
        token = self.start[:, None] + self.offset[head].long() + step
        return token, token < self.end[:, None]


@dataclass(frozen=True, eq=False, slots=True)
class Walk:
    """For each stationary tile, the streamed tiles it meets: those met whole, then those met in part.

    Row `c * T + t` belongs to stationary tile `t` of head class `c`. It meets, whole, the streamed tiles

        rows[r, FULL_BASE] + full[j]           for j in rows[r, FULL_BEGIN] .. rows[r, FULL_END] - 1

    and, through an element mask, the streamed tiles

        rows[r, PARTIAL_BASE] + partial[j]     with mask[j], for j in PARTIAL_BEGIN .. PARTIAL_END - 1.

    Rows with the same list relative to their base share its storage, so a window stores a handful of lists at
    any length. A tile met whole exists in every element for every head of the class; a kernel checks
    `token < end` on the streamed side for partial entries only (the last tile of a ragged segment is
    always partial), and on the stationary side always.
    """

    rows: Tensor
    """int32 [C * T, 6]"""
    full: Tensor
    """int32 [F]"""
    partial: Tensor
    """int32 [P]; `full` itself if both kinds are stored together"""
    mask: Tensor
    """int32 [P]: index into `Masks`"""
    order: Tensor
    """int32 [C * T]: rows in the order a scheduler should start them, heavy ones first, neighbours together"""

    def lists(self) -> Tensor:
        """Stored whole tiles, partial tiles and masks in one tensor; the tiles once if they are one tensor."""
        return torch.cat([self.full, *([] if self.partial is self.full else [self.partial]), self.mask])

    def counts(self) -> tuple[Tensor, Tensor]:
        """Entries met whole and in part by each row, int64 [C * T] each."""
        rows = self.rows.long()
        return rows[:, FULL_END] - rows[:, FULL_BEGIN], rows[:, PARTIAL_END] - rows[:, PARTIAL_BEGIN]

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """All entries written out: row, streamed tile, mask (-1 where whole), each int64, ordered by row."""
        whole, part = self.counts()
        table = self.rows.long()
        parts = []
        for count, begin, base, column, masks in (
            (whole, FULL_BEGIN, FULL_BASE, self.full, None),
            (part, PARTIAL_BEGIN, PARTIAL_BASE, self.partial, self.mask),
        ):
            row, slot = ranges(table[:, begin], count)
            tile = table[row, base] + column[slot]
            mask = torch.full_like(slot, -1) if masks is None else masks[slot].long()
            parts.append((row, tile, mask))
        row, tile, mask = (torch.cat(pair) for pair in zip(*parts, strict=True))
        order = torch.argsort(row, stable=True)
        return row[order], tile[order], mask[order]

    def sums(self, values: Tensor) -> Tensor:
        """Sum over the entries of each row, [C * T, ...], of the values [T, ...] of their streamed tiles.

        Values are integers, in any dtype: lists of one base are summed once, for all rows that hold a stretch of them.
        """
        table, total = self.rows.long(), values.new_zeros(len(self.rows), *values.shape[1:])
        for begin, end, base, stored in (
            (FULL_BEGIN, FULL_END, FULL_BASE, self.full.long()),
            (PARTIAL_BEGIN, PARTIAL_END, PARTIAL_BASE, self.partial.long()),
        ):
            used = (table[:, end] > table[:, begin]).nonzero()[:, 0]
            bases = table[used, base].unique().tolist()
            if len(bases) * len(stored) <= int((table[:, end] - table[:, begin]).sum()) and len(bases) <= MOST_BASES:
                for one in bases:
                    rows = used[table[used, base] == one]
                    # Lists of other bases may point past the end, and no row of this base reads them.
                    before = values[(stored + one).clamp(0, len(values) - 1)].cumsum(0)
                    before = torch.cat([torch.zeros_like(values[:1]), before])
                    total[rows] += before[table[rows, end]] - before[table[rows, begin]]
                continue
            for rows in used.split(SUMMED_ROWS):
                own, slot = ranges(table[rows, begin], table[rows, end] - table[rows, begin])
                total.index_add_(0, rows[own], values[table[rows[own], base] + stored[slot]])
        return total


def ranges(begin: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Write out `begin[i] .. begin[i] + count[i] - 1` for every i: the owner i and the number, each int64."""
    owner = torch.arange(len(count), device=count.device).repeat_interleave(count)
    before = count.cumsum(0) - count
    return owner, begin[owner] + torch.arange(len(owner), device=count.device) - before[owner]


def rebuild(value: Any) -> tuple[Any, ...]:
    """`__reduce__` of a dataclass from its fields alone, without values derived from them."""
    return type(value), tuple(getattr(value, f.name) for f in fields(value) if f.init)


@dataclass(frozen=True, eq=False)
class Masks:
    """Element masks of partial tiles, each stored once however many tiles use it."""

    bits: Tensor
    """int32 [M, B, W], W = ceil(B / 32): bit `j % 32` of `bits[m, i, j // 32]` allows query element i, key element j"""
    band: Tensor
    """int32 [M, 2]: if `lo <= hi`, the mask is exactly `lo <= j - i <= hi`; otherwise it is given by its bits"""

    def dense(self, block_size: int) -> Tensor:
        """Every mask written out, bool [M, B, B]."""
        shifts = torch.arange(32, dtype=torch.int32, device=self.bits.device)
        flat = ((self.bits[..., None] >> shifts) & 1).bool().flatten(2)
        return flat[..., :block_size]

    @cached_property
    def transposed(self) -> Tensor:
        """`bits` with keys and queries exchanged; `bits` itself if every mask is a band, which kernels read instead."""
        band = self.band.cpu()
        if bool((band[:, 0] <= band[:, 1]).all()):
            return self.bits
        # The first use of each GPU operation loads its code, which takes longer than a small table on the host.
        bits = self.bits.cpu() if 32 * self.bits.numel() <= HOST_NUMBERS else self.bits
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        transposed = torch.empty_like(bits)
        chunk = 1024
        for first in range(0, len(bits), chunk):
            dense = ((bits[first : first + chunk, ..., None] >> shifts) & 1).flatten(2)[..., : bits.shape[1]]
            words = dense.transpose(1, 2).unflatten(2, (-1, 32))
            transposed[first : first + chunk] = (words << shifts).sum(-1, dtype=torch.int64).to(torch.int32)
        return transposed.to(self.bits.device)

    __reduce__ = rebuild


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Tiles of one strided axis and the pairs of tiles that meet. A head with class -1 has no work."""

    queries: Axis
    keys: Axis
    head_class: Tensor
    """int32 [H]"""
    by_query: Walk
    """Stationary query tiles, streamed key tiles: for the output and dQ."""
    by_key: Walk
    """Stationary key tiles, streamed query tiles: for dK and dV."""


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """Properties of a plan whose tables were computed on a device and must not be read back to find them."""

    strided: bool
    """Tiles may start anywhere, not at multiples of the block size."""
    ragged: bool
    """Some tile may reach past the end of its segment."""
    bits: bool
    """Some mask may not be a band."""
    memo: dict[Any, Any] = field(init=False, default_factory=dict, repr=False, compare=False)
    """Values derived from what all plans with this object share: heads, masks and stored lists, not rows of walks"""

    __reduce__ = rebuild


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Tiles that attention over `n` tokens computes. Build one with `make_plan`.

    `memo` is a dictionary of values derived from the plan (work lists, launches, plans of some rows). It is not part of
    equality, hash, repr, copies or pickles, nor counted in `nbytes`. A value must not refer to the plan, so that the
    plan is freed with its last user and not by the garbage collector.
    """

    name: str
    """The pattern, in the syntax of `parse`."""
    n: int
    heads: int
    block_size: int
    parts: tuple[Part, ...]
    masks: Masks
    blocks: int
    """Tile pairs computed, over all heads; an upper bound with `device_tables`."""
    device_tables: DeviceTables | None = None
    """Given where the host must not read the tables; backends that lower plans on the host cannot run such a plan."""

    memo: dict[Any, Any] = field(init=False, default_factory=dict)

    __reduce__ = rebuild

    @property
    def device(self) -> torch.device:
        return self.masks.bits.device

    @property
    def density(self) -> float:
        """Computed tiles over the tiles of dense attention; for a block pattern, kept blocks over all blocks."""
        grid = -(-self.n // self.block_size)
        return self.blocks / (self.heads * grid * grid)

    @property
    def nbytes(self) -> int:
        """Memory of the plan, in bytes."""
        # The axis of the queries and of the keys is usually one object.
        once = {id(tensor): tensor for tensor in tensors_of(self)}
        return sum(t.numel() * t.element_size() for t in once.values())

    def flops(self, head_dim: int, value_dim: int | None = None) -> int:
        """Floating-point operations of a forward pass for one batch element, counted on the computed tiles."""
        width = head_dim + (head_dim if value_dim is None else value_dim)
        return 2 * self.blocks * self.block_size**2 * width

    def cost(
        self,
        head_dim: int,
        *,
        value_dim: int | None = None,
        key_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
        batch: int = 1,
    ) -> Cost:
        """Operations, bytes moved and peak memory of a forward and a backward pass."""
        return cost_of(
            n=self.n,
            heads=self.heads,
            key_heads=key_heads or self.heads,
            tiles=self.blocks,
            block_size=self.block_size,
            head_dim=head_dim,
            value_dim=value_dim or head_dim,
            itemsize=dtype.itemsize,
            batch=batch,
            plan_bytes=self.nbytes,
            several_parts=len(self.parts) > 1,
        )

    def to(self, device: torch.device | str) -> Plan:
        """The same plan on another device."""
        return map_tensors(self, lambda tensor: tensor.to(device))

    def to_dense(self) -> Tensor:
        """Multiplicity of every pair, int32 [H, n, n]; for small n."""
        if self.n > 8192:
            raise must("to_dense must have n <= 8192", self.n, "Use plan.picture() to see a long plan.")
        dense = torch.zeros(self.heads, self.n, self.n, dtype=torch.int32, device=self.device)
        masks = self.masks.dense(self.block_size).int()
        for part in self.parts:
            row, tile, mask = part.by_query.entries()
            block = torch.where((mask < 0)[:, None, None], 1, masks[mask.clamp(min=0)])
            for head, own in enumerate(part.head_class.tolist()):
                mine = row // part.queries.tiles == own
                q, q_exists = (t[row[mine] % part.queries.tiles] for t in part.queries.tokens(self.block_size, head))
                k, k_exists = (t[tile[mine]] for t in part.keys.tokens(self.block_size, head))
                pairs = block[mine] * (q_exists[:, :, None] & k_exists[:, None, :])
                index = q.clamp(max=self.n - 1)[:, :, None] * self.n + k.clamp(max=self.n - 1)[:, None, :]
                dense[head].view(-1).index_put_((index.flatten(),), pairs.flatten(), accumulate=True)
        return dense

    def picture(self, head: int = 0, width: int = 32) -> str:
        """Text map of the computed pairs: `#` all, `+` some, `.` none of the pairs of a cell."""
        cell, share = self.cells(head, width)
        rows = ["".join("#" if x > 0.99 else "+" if x > 0 else "." for x in line) for line in share.tolist()]
        return "\n".join([f"{self.name}: head {head}, a cell is {cell} x {cell} tokens", *rows])

    def cells(self, head: int = 0, width: int = 32) -> tuple[int, Tensor]:
        """The map in at most `width` squared cells: tokens along a cell, and the computed share of each, float64."""
        cell = max(1, -(-self.n // width))
        # Whole tiles: a tile of the diagonal that straddled two cells would show pairs above it.
        cell = cell if cell <= self.block_size else -(-cell // self.block_size) * self.block_size
        side = -(-self.n // cell)
        area = torch.zeros(side, side, dtype=torch.float64, device="cpu")
        for part in self.parts:
            own = int(part.head_class[head])
            if own < 0:
                continue
            # A tile spreads its elements evenly over what it spans.
            q, k = (self._spread(axis, head, cell, side) for axis in (part.queries, part.keys))
            met = part.by_query.sums(k.to(part.by_query.rows.device)).cpu()
            area += q.T @ met[own * len(q) : (own + 1) * len(q)]
        return cell, area / cell**2

    def _spread(self, axis: Axis, head: int, cell: int, side: int) -> Tensor:
        """Elements of each tile in each cell."""
        token, exists = axis.tokens(self.block_size, head)
        cells = torch.zeros(axis.tiles, side, dtype=torch.float64, device="cpu")
        return cells.scatter_add_(1, (token // cell).clamp(max=side - 1).cpu(), exists.double().cpu())

    def __repr__(self) -> str:
        facts = (
            f"{self.n:,} tokens",
            f"{self.heads} heads",
            f"{self.blocks:,} tiles of {self.block_size} x {self.block_size}",
            f"density {self.density:.4g}",
            f"{len(self.parts)} {'part' if len(self.parts) == 1 else 'parts'}",
            f"{self.flops(64):.3g} flops at head_dim 64",
            f"{self.nbytes / 1e6:.3g} MB on {self.device}",
        )
        return f"Plan({self.name}: {', '.join(facts)})"


def tensors_of(value: object) -> Iterator[Tensor]:
    """Every tensor of a plan or a piece of one, in a fixed order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value):
        for item in fields(value):
            yield from tensors_of(getattr(value, item.name))


Piece = TypeVar("Piece")


def map_tensors(value: Piece, change: Callable[[Tensor], Tensor]) -> Piece:
    """A copy with every tensor changed, visited in the order of `tensors_of`."""
    if isinstance(value, Tensor):
        return change(value)  # pyrefly: ignore[bad-return]
    if isinstance(value, tuple):
        return tuple(map_tensors(item, change) for item in value)  # pyrefly: ignore[bad-return]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: map_tensors(getattr(value, f.name), change) for f in fields(value) if f.init})
    return value
