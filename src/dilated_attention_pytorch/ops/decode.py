"""Single rows of causal attention against cached keys, in time of the keys they see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import must, must_be
from ..patterns import (
    And,
    BlockDilated,
    BlockLists,
    BlockPattern,
    Dilated,
    Documents,
    Global,
    Or,
    Packed,
    Pattern,
    PerHead,
    Random,
    SlidingWindow,
    Strided,
    as_pattern,
)
from ..plan.cover import Grid, count, head_key
from .attention import attention
from .checks import check_masks, check_tensors

CPU = torch.device("cpu")
MOST_ROWS = 64
"""From this many new tokens on, one whole computation is cheaper than row after row."""


class Kept(NamedTuple):
    """Which positions a cache holds: those below `sinks`, and those from `begin` on, one after another."""

    sinks: int = 0
    begin: int = 0

    def slots(self, positions: Tensor) -> Tensor:
        """Where these positions lie in the cache."""
        return torch.where(positions < self.sinks, positions, positions - self.begin + self.sinks)


class Seen(NamedTuple):
    """The keys one row sees, padded to the longest list of any head."""

    positions: Tensor
    """int64 (H, K)"""
    bias: Tensor
    """float64 (H, K): logarithm of how often each counts; -inf where padded"""


def attention_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | str,
    positions: int | Sequence[int],
    *,
    length: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: Tensor | None = None,
    kept: Kept | None = None,
    backend: str = "auto",
    memory_budget: int | float | None = None,
) -> Tensor:
    """Rows of causal attention for queries that follow on cached keys.

    Args:
        query: (B, H, M, D), M consecutive tokens, usually one.
        key: (B, G, L, D), the cache, these tokens' own keys included; G = H, or a divisor of H when `enable_gqa`.
        value: (B, G, L, E).
        pattern: who may see whom; always causal here.
        positions: position of the first of the M tokens, for all samples or one for each.
        length: length of the whole sequence, for patterns whose layout depends on it (a ratio of all blocks).
        scale: factor on the scores; 1 / sqrt(D) by default.
        enable_gqa: let query head h read key head h // (H / G).
        key_padding_mask: bool (B, L), True where a key takes no part.
        kept: which positions the cache holds, when not all.
        backend: for many tokens at once, see `attention`, as `memory_budget`.

    Returns:
        (B, H, M, E): row t of the full computation, in time of the keys it sees.

    >>> from dilated_attention_pytorch import attention
    >>> q, k, v = torch.randn(3, 1, 2, 50, 8).unbind()
    >>> row = attention_step(q[:, :, 40:41], k, v, "dilated:16x1,64x4", 40)
    >>> torch.allclose(row, attention(q, k, v, "dilated:16x1,64x4", is_causal=True)[:, :, 40:41], atol=1e-6)
    True
    """
    whole = as_pattern(pattern)
    check_tensors(query, key, value, enable_gqa, one_length=False, one_dtype=False)
    check_masks(key, key_padding_mask, None)
    if scale is not None and not math.isfinite(scale):
        raise must("scale must be finite", scale)
    batch, heads, rows, width = query.shape
    first = [positions] * batch if isinstance(positions, int) else list(positions)
    if len(first) != batch or min(first) < 0:
        raise must(f"positions must be one number or {batch}, each >= 0", first)
    kept = kept or Kept()
    held = kept.slots(torch.tensor([max(first) + rows - 1]))
    if int(held) >= key.shape[2]:
        raise must(
            "the cache must hold the keys of the new tokens too", f"{key.shape[2]} keys for position {max(first)}"
        )
    scale = width**-0.5 if scale is None else scale
    if rows < MOST_ROWS or kept != Kept() or len(set(first)) > 1:
        where = length, scale, key_padding_mask, kept
        return torch.stack(
            [_row(query[:, :, m], key, value, whole, [t + m for t in first], *where) for m in range(rows)], 2
        )
    before, end = first[0], first[0] + rows
    found = attention(
        torch.nn.functional.pad(query, (0, 0, before, 0)),
        key[:, :, :end],
        value[:, :, :end],
        opening(whole, length, end, heads),
        is_causal=True,
        scale=scale,
        enable_gqa=True,
        key_padding_mask=None if key_padding_mask is None else key_padding_mask[:, :end],
        backend=backend,
        memory_budget=memory_budget,
    )
    return found[:, :, before:]


def _row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    positions: list[int],
    length: int | None,
    scale: float,
    key_padding_mask: Tensor | None,
    kept: Kept,
) -> Tensor:
    batch, heads, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    seen = {t: seen_keys(pattern, length, t, heads) for t in set(positions)}
    longest = max(row.positions.shape[1] for row in seen.values())
    if longest == 0:
        return query.new_zeros(batch, heads, value.shape[-1])
    alike = len(seen) == 1
    rows = [_padded(*seen[t], longest) for t in (positions[:1] if alike else positions)]
    index, bias = (torch.stack(column).to(query.device) for column in zip(*rows, strict=True))
    slots = kept.slots(index).clamp(min=0).expand(batch, heads, longest)
    sample = torch.arange(batch, device=query.device)[:, None, None]
    group = torch.arange(heads, device=query.device)[None, :, None] // (heads // key.shape[1])
    keys, values = key[sample, group, slots].to(dtype), value[sample, group, slots].to(dtype)
    scores = scale * torch.einsum("bhd,bhkd->bhk", query.to(dtype), keys) + bias.to(dtype)
    absent = bias == -torch.inf
    if key_padding_mask is not None:
        absent = absent | key_padding_mask[sample, slots]
    # What takes no part may hold anything, and 0 times NaN is NaN.
    scores, values = scores.masked_fill(absent, -torch.inf), values.masked_fill(absent[..., None], 0.0)
    any_key = (scores != -torch.inf).any(-1, keepdim=True)
    weights = torch.where(any_key, torch.where(any_key, scores, 0.0).softmax(-1), 0.0)
    return torch.einsum("bhk,bhke->bhe", weights, values).to(query.dtype)


def _padded(positions: Tensor, bias: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    more = longest - positions.shape[-1]
    if more == 0:
        return positions, bias
    return torch.nn.functional.pad(positions, (0, more)), torch.nn.functional.pad(bias, (0, more), value=-torch.inf)


@lru_cache(maxsize=256)
def seen_keys(pattern: Pattern, length: int | None, position: int, heads: int) -> Seen:
    """The keys the causal row at `position` sees in every head."""
    resolved, grid = _laid_out(pattern, length, position, heads)
    by_class: dict[object, tuple[Tensor, Tensor]] = {}
    rows = []
    for head in range(heads):
        own = head_key(resolved, head)
        if own not in by_class:
            by_class[own] = _seen_by(resolved, position, head, grid)
        rows.append(by_class[own])
    longest = max(len(keys) for keys, _ in rows)
    positions, bias = zip(*(_padded(*row, longest) for row in rows), strict=True)
    return Seen(torch.stack(positions), torch.stack(bias))


def _seen_by(pattern: Pattern, t: int, head: int, grid: Grid) -> tuple[Tensor, Tensor]:
    stretches = [torch.arange(s.start, s.stop, s.step) for s in _stretches(pattern, t, head, grid) if len(s)]
    keys = torch.cat(stretches).unique() if stretches else torch.arange(0)
    times = count(pattern, torch.tensor(t), keys, head, grid).to(torch.float64)
    return keys[times > 0], times[times > 0].log()


def _laid_out(pattern: Pattern, length: int | None, position: int, heads: int) -> tuple[Pattern, Grid]:
    if length is None:
        check_decodable(pattern, None)
        # Doubling, so that a growing sequence lays its blocks out a logarithmic number of times.
        length = max(1024, 1 << position.bit_length())
    elif position >= length:
        raise must(f"positions must lie below the length {length}", position)
    return _grid(pattern, length, heads)


@lru_cache(maxsize=32)
def _grid(pattern: Pattern, length: int, heads: int) -> tuple[Pattern, Grid]:
    check_decodable(pattern, length)
    return pattern.resolve(length, heads), Grid(length, CPU)


def check_decodable(pattern: Pattern, length: int | None) -> None:
    """Refuse what has no rows to come: packed sequences, and layouts of a length not told."""
    match pattern:
        case And() | Or():
            check_decodable(pattern.left, length)
            check_decodable(pattern.right, length)
        case PerHead():
            for one in pattern.patterns:
                check_decodable(one, length)
        case Documents() | Packed():
            raise must_be(
                "a decoded pattern must be of one sequence", pattern, "Decode each document with its own cache."
            )
        case BlockPattern() if length is None and _follows_length(pattern):
            raise must("length must be given for a pattern that keeps a share of all blocks", f"{pattern} without it")


def _follows_length(pattern: BlockPattern) -> bool:
    return isinstance(pattern, Random | BlockLists) or (
        isinstance(pattern, BlockDilated) and pattern.sparsity_ratio is not None
    )


def _stretches(pattern: Pattern, t: int, head: int, grid: Grid) -> list[range]:
    """Stretches, none past `t`, that hold every key row `t` sees, as few keys more as the pattern allows to tell."""
    past = range(0, t + 1)
    match pattern:
        case And():
            sides = [_stretches(side, t, head, grid) for side in (pattern.left, pattern.right)]
            return min(sides, key=lambda side: sum(map(len, side)))
        case Or():
            return _stretches(pattern.left, t, head, grid) + _stretches(pattern.right, t, head, grid)
        case PerHead():
            return _stretches(pattern.patterns[head], t, head, grid)
        case SlidingWindow():
            return [past[max(0, t - pattern.before) :]]
        case Global():
            return [past if pattern.queries and t < pattern.tokens else past[: pattern.tokens]]
        case Dilated():
            return [
                range(t // w * w + pattern.sampled_residue(i, head), t + 1, r)
                for i, (w, r) in enumerate(pattern.branches)
                if pattern.takes_part(i, head) and t % w % r == pattern.sampled_residue(i, head)
            ]
        case Strided(block=1):
            return [past[t % pattern.stride :: pattern.stride]]
        case Strided():
            size, own = pattern.block, t // pattern.block
            return [past[j * size : (j + 1) * size] for j in range(own % pattern.stride, own + 1, pattern.stride)]
        case BlockPattern():
            keys, own = grid.block_keys(pattern, head), t // pattern.block
            edges = torch.tensor([own * pattern.blocks, (own + 1) * pattern.blocks])
            begin, end = torch.searchsorted(keys, edges).tolist()
            blocks = (keys[begin:end] % pattern.blocks).tolist()
            return [past[j * pattern.block : (j + 1) * pattern.block] for j in blocks]
        case _:
            return [past]


def needed(pattern: Pattern, length: int | None, position: int, heads: int) -> Kept:
    """Which keys rows from `position` on can still see; a cache may drop the others."""
    resolved, grid = _laid_out(pattern, length, position, heads)
    return _needed(resolved, position, heads, grid, length is not None)


def _needed(pattern: Pattern, t: int, heads: int, grid: Grid, laid_out: bool) -> Kept:
    match pattern:
        case And():
            sides = [_needed(side, t, heads, grid, laid_out) for side in (pattern.left, pattern.right)]
            return max(sides, key=lambda side: side.begin - side.sinks)
        case Or():
            return _either([_needed(side, t, heads, grid, laid_out) for side in (pattern.left, pattern.right)])
        case PerHead():
            return _either([_needed(one, t, heads, grid, laid_out) for one in pattern.patterns])
        case SlidingWindow():
            return Kept(0, max(0, t - pattern.before))
        case Global():
            return Kept(min(pattern.tokens, t), t) if t >= pattern.tokens else Kept()
        case Dilated():
            return Kept(0, min(t // w * w for w in pattern.segment_lengths))
        case BlockDilated(sparsity_ratio=None):
            # A segment may begin inside a block, whose every key counts.
            starts = (t // pattern.block * pattern.block // w * w for w in pattern.segment_lengths)
            return Kept(0, min(start // pattern.block * pattern.block for start in starts))
        case BlockPattern() if laid_out:
            own = t // pattern.block
            lows = [_lowest(pattern, h, grid)[own] for h in range(heads if pattern.by_head else 1)]
            return Kept(0, min(t, *(int(low) * pattern.block for low in lows)))
        case _:
            return Kept()


def _either(sides: list[Kept]) -> Kept:
    kept = Kept(max(side.sinks for side in sides), min(side.begin for side in sides))
    return kept if kept.begin > kept.sinks else Kept()


@lru_cache(maxsize=32)
def _lowest(pattern: BlockPattern, head: int, grid: Grid) -> Tensor:
    """For each query block, the lowest key block that it or a later one sees."""
    keys = grid.block_keys(pattern, head)
    lowest = torch.full((pattern.blocks,), pattern.blocks, dtype=torch.int64)
    lowest.scatter_reduce_(0, keys // pattern.blocks, keys % pattern.blocks, "amin")
    return lowest.flip(0).cummin(0).values.flip(0)


def opening(pattern: Pattern, length: int | None, n: int, heads: int) -> Pattern:
    """A pattern for the first `n` tokens alone whose causal rows are those of the whole sequence."""
    check_decodable(pattern, length)
    if length is None or n == length:
        return pattern
    match pattern:
        case And():
            return opening(pattern.left, length, n, heads) & opening(pattern.right, length, n, heads)
        case Or():
            return opening(pattern.left, length, n, heads) | opening(pattern.right, length, n, heads)
        case PerHead():
            return PerHead(tuple(opening(one, length, n, heads) for one in pattern.patterns))
        case BlockPattern() if _follows_length(pattern):
            resolved, grid = _grid(pattern, length, heads)
            assert isinstance(resolved, BlockPattern)
            return _first_blocks(resolved, -(-n // pattern.block), heads, grid)
        case _:
            return pattern


def _first_blocks(pattern: BlockPattern, rows: int, heads: int, grid: Grid) -> BlockLists:
    pointers, columns = [0], []
    own_lists = heads if pattern.by_head else 1
    for head in range(own_lists):
        keys = grid.block_keys(pattern, head)
        row, column = keys // pattern.blocks, keys % pattern.blocks
        # Blocks past the opening are past every one of its rows, so a causal row never misses them.
        inside = (row < rows) & (column < rows)
        ends = torch.bincount(row[inside], minlength=rows).cumsum(0) + len(columns)
        pointers += ends.tolist()
        columns += column[inside].tolist()
    return BlockLists.from_csr(pointers, columns, rows, own_lists, pattern.block)
