"""Closed forms: which keys a tile of queries can reach, and whether two tiles meet whole, in part or not at all.

Tiles are given by the tokens of their first and last element. Answers may be cautious (a meeting called partial is
settled by its element mask), never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..patterns import (
    And,
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
    Pattern,
    PerHead,
    Random,
    SlidingWindow,
    Strided,
)

NONE, SOME, ALL = 0, 1, 2
Tiles = tuple[Tensor, Tensor, Tensor, Tensor]
"""First and last token of query tiles, first and last token of key tiles."""


class Reach(NamedTuple):
    """Stretches of keys: row `row` can reach only keys in the union of its `first .. last`, ends included."""

    row: Tensor
    first: Tensor
    last: Tensor


class Grid:
    """What the closed forms need to know of one sequence on one device; holds the written-out block lists."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.n = n
        self.device = device
        self._lists: dict[tuple[BlockPattern, int], Tensor] = {}

    def arange(self, *bounds: int) -> Tensor:
        return torch.arange(*bounds, device=self.device)

    def rows_of(self, pattern: BlockPattern) -> Tensor:
        """The query blocks whose lists are asked for, ascending, int64."""
        return self.arange(pattern.blocks)

    def block_keys(self, pattern: BlockPattern, head: int) -> Tensor:
        """Every kept pair of a block pattern as the sorted key `query block * blocks + key block`."""
        head = head if pattern.by_head else 0
        if (pattern, head) not in self._lists:
            self._lists[pattern, head] = listed(pattern, [head], self)
        return self._lists[pattern, head]


def reach(pattern: Pattern, q0: Tensor, q1: Tensor, head: int, grid: Grid) -> Reach:
    """Stretches that hold every key the query tiles `q0 .. q1` may see."""
    rows = grid.arange(len(q0))
    everything = Reach(rows, torch.zeros_like(q0), torch.full_like(q0, grid.n - 1))
    match pattern:
        case And():
            left, right = (reach(side, q0, q1, head, grid) for side in (pattern.left, pattern.right))
            return min(left, right, key=lambda side: int((side.last - side.first + 1).sum()))
        case Or():
            left, right = (reach(side, q0, q1, head, grid) for side in (pattern.left, pattern.right))
            return _together(left, right)
        case PerHead():
            return reach(pattern.patterns[head], q0, q1, head, grid)
        case Causal():
            return Reach(rows, everything.first, q1)
        case SlidingWindow():
            return Reach(rows, (q0 - pattern.before).clamp(min=0), (q1 + pattern.after).clamp(max=grid.n - 1))
        case Global():
            sinks = Reach(rows, everything.first, torch.full_like(q0, min(pattern.tokens, grid.n) - 1))
            own = (q0 < pattern.tokens).nonzero()[:, 0] if pattern.queries else rows[:0]
            return _together(sinks, Reach(own, everything.first[own], everything.last[own]))
        case Documents():
            ends = torch.tensor((0, *pattern.ends), device=grid.device)
            return Reach(rows, ends[_document(pattern, q0)], ends[_document(pattern, q1) + 1] - 1)
        case Dilated():
            parts = [Reach(rows, q0 // w * w, (q1 // w * w + w - 1).clamp(max=grid.n - 1)) for w, _ in pattern.branches]
            return _together(*parts)
        case BlockPattern():
            return _block_reach(pattern, q0, q1, head, grid)
        case _:
            return everything


def classify(pattern: Pattern, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor, head: int, grid: Grid) -> Tensor:
    """How the tiles `q0 .. q1` and `k0 .. k1` meet: NONE, SOME or ALL of their pairs, int8."""
    match pattern:
        case And():
            sides = [classify(side, q0, q1, k0, k1, head, grid) for side in (pattern.left, pattern.right)]
            return torch.minimum(*sides)
        case Or():
            sides = [classify(side, q0, q1, k0, k1, head, grid) for side in (pattern.left, pattern.right)]
            return torch.maximum(*sides)
        case PerHead():
            return classify(pattern.patterns[head], q0, q1, k0, k1, head, grid)
        case Full():
            return torch.full_like(q0, ALL, dtype=torch.int8)
        case Causal():
            return _verdict(k1 <= q0, k0 > q1)
        case SlidingWindow():
            nearest, farthest = k0 - q1, k1 - q0
            inside = (nearest >= -pattern.before) & (farthest <= pattern.after)
            return _verdict(inside, (farthest < -pattern.before) | (nearest > pattern.after))
        case Global():
            seen, unseen = k1 < pattern.tokens, k0 >= pattern.tokens
            if pattern.queries:
                seen, unseen = seen | (q1 < pattern.tokens), unseen & (q0 >= pattern.tokens)
            return _verdict(seen, unseen)
        case Documents():
            q_first, q_last, k_first, k_last = (_document(pattern, t) for t in (q0, q1, k0, k1))
            same = (q_first == q_last) & (k_first == k_last) & (q_first == k_first)
            return _verdict(same, (q_last < k_first) | (k_last < q_first))
        case Dilated():
            return _classify_dilated(pattern, q0, q1, k0, k1, head)
        case BlockPattern():
            one_block = (q0 // pattern.block == q1 // pattern.block) & (k0 // pattern.block == k1 // pattern.block)
            kept = _keeps(pattern, q0, k0, head, grid)
            return _verdict(one_block & kept, one_block & ~kept)
        case Strided():
            one_block = (q0 // pattern.block == q1 // pattern.block) & (k0 // pattern.block == k1 // pattern.block)
            kept = pattern.allows(q0, k0)
            return _verdict(one_block & kept, one_block & ~kept)
        case _:
            return torch.full_like(q0, SOME, dtype=torch.int8)


def evaluate(pattern: Pattern, q: Tensor, k: Tensor, head: int, grid: Grid) -> Tensor:
    """`pattern.allows`, without ever writing a block grid out."""
    return count(pattern, q, k, head, grid) > 0


def count(pattern: Pattern, q: Tensor, k: Tensor, head: int, grid: Grid) -> Tensor:
    """`pattern.multiplicity`, without ever writing a block grid out."""
    match pattern:
        case And():
            return count(pattern.left, q, k, head, grid) * count(pattern.right, q, k, head, grid)
        case Or():
            either = count(pattern.left, q, k, head, grid) + count(pattern.right, q, k, head, grid)
            return (either > 0) * 1
        case PerHead():
            return count(pattern.patterns[head], q, k, head, grid)
        case BlockPattern():
            return _keeps(pattern, q.clamp(max=grid.n - 1), k.clamp(max=grid.n - 1), head, grid) * 1
        case _:
            times = torch.as_tensor(pattern.multiplicity(q, k, head), device=grid.device)
            return times.expand(torch.broadcast_shapes(q.shape, k.shape))


def moves_freely(pattern: Pattern) -> bool:
    """Whether only the difference of positions matters, so that shifting both changes nothing."""
    match pattern:
        case And() | Or():
            return moves_freely(pattern.left) and moves_freely(pattern.right)
        case Full() | Causal() | SlidingWindow() | Strided(block=1):
            return True
        case _:
            return False


def head_key(pattern: Pattern, head: int) -> object:
    """Equal for two heads only if the pattern treats them alike."""
    match pattern:
        case And() | Or():
            return head_key(pattern.left, head), head_key(pattern.right, head)
        case PerHead():
            return pattern.patterns[head], head_key(pattern.patterns[head], head)
        case BlockPattern():
            return head if pattern.by_head else None
        case Dilated():
            indices = range(len(pattern.segment_lengths))
            return tuple((pattern.sampled_residue(i, head), bool(pattern.takes_part(i, head))) for i in indices)
        case _:
            return None


def mask_keys(pattern: Pattern, tiles: Tiles, extent: int, head: int, grid: Grid) -> list[Tensor]:
    """Columns that, when equal, promise equal element masks; `extent` is how many tokens a tile spans.

    Where a condition holds for all or none of a tile's pairs, where the tile lies does not matter.
    """
    verdict = classify(pattern, *tiles, head, grid)
    columns = _place_keys(pattern, tiles, extent, head, grid)
    return [verdict.long(), *(torch.where(verdict == SOME, column, 0) for column in columns)]


def _place_keys(pattern: Pattern, tiles: Tiles, extent: int, head: int, grid: Grid) -> list[Tensor]:
    q0, _, k0, _ = tiles
    match pattern:
        case And() | Or():
            return [c for side in (pattern.left, pattern.right) for c in mask_keys(side, tiles, extent, head, grid)]
        case PerHead():
            return _place_keys(pattern.patterns[head], tiles, extent, head, grid)
        case Full():
            return []
        case Causal():
            return [(k0 - q0).clamp(-extent, extent)]
        case SlidingWindow():
            return [(k0 - q0).clamp(-pattern.before - extent, pattern.after + extent)]
        case Strided(block=1):
            return [(k0 - q0) % pattern.stride]
        case Global():
            columns = [k0.clamp(max=pattern.tokens)]
            return [*columns, q0.clamp(max=pattern.tokens)] if pattern.queries else columns
        case Dilated():
            return [k0 - q0, *(q0 % w for w in pattern.segment_lengths)]
        case _:
            return [q0, k0]


def _verdict(all_of_it: Tensor, none_of_it: Tensor) -> Tensor:
    return torch.where(all_of_it, ALL, torch.where(none_of_it, NONE, SOME)).to(torch.int8)


def _together(*parts: Reach) -> Reach:
    return Reach(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _document(pattern: Documents, position: Tensor) -> Tensor:
    ends = _ends(pattern, position.device)
    return torch.searchsorted(ends, position.clamp(max=pattern.ends[-1] - 1), right=True)


@lru_cache(maxsize=4)
def _ends(pattern: Documents, device: torch.device) -> Tensor:
    return torch.tensor(pattern.ends, device=device)


def _classify_dilated(pattern: Dilated, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor, head: int) -> Tensor:
    verdict = torch.zeros_like(q0, dtype=torch.int8)
    for index, (w, r) in enumerate(pattern.branches):
        if not pattern.takes_part(index, head):
            continue
        apart = (q1 // w < k0 // w) | (k1 // w < q0 // w)
        one_segment = (q0 // w == q1 // w) & (k0 // w == k1 // w) & (q0 // w == k0 // w)
        whole = one_segment if r == 1 else torch.zeros_like(apart)
        verdict = torch.maximum(verdict, _verdict(whole, apart))
    return verdict


def _keeps(pattern: BlockPattern, q: Tensor, k: Tensor, head: int, grid: Grid) -> Tensor:
    keys = grid.block_keys(pattern, head)
    wanted = q // pattern.block * pattern.blocks + k // pattern.block
    at = torch.searchsorted(keys, wanted).clamp(max=max(len(keys) - 1, 0))
    return keys[at] == wanted if len(keys) else torch.zeros_like(wanted, dtype=torch.bool)


def _block_reach(pattern: BlockPattern, q0: Tensor, q1: Tensor, head: int, grid: Grid) -> Reach:
    keys = grid.block_keys(pattern, head)
    first = torch.searchsorted(keys, q0 // pattern.block * pattern.blocks)
    last = torch.searchsorted(keys, (q1 // pattern.block + 1) * pattern.blocks)
    row, slot = ranges(first, last - first)
    block = keys[slot] % pattern.blocks
    return Reach(row, block * pattern.block, ((block + 1) * pattern.block).clamp(max=grid.n) - 1)


def ranges(begin: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Write out `begin[i] .. begin[i] + count[i] - 1` for every i: the owner i and the number, each int64."""
    owner = torch.arange(len(count), device=count.device).repeat_interleave(count)
    before = count.cumsum(0) - count
    return owner, begin[owner] + torch.arange(len(owner), device=count.device) - before[owner]


def listed(pattern: BlockPattern, heads: list[int], grid: Grid) -> Tensor:
    """Every kept pair of a block pattern, sorted: head `i` of those asked for has query block `q` and key block `k` as

    `(i * blocks + q) * blocks + k`.
    """
    # Lists that all heads share are those of head 0, whichever head of several patterns uses them.
    heads = heads if pattern.by_head else [0] * len(heads)
    if isinstance(pattern, Random):
        return _random_keys(pattern, heads, grid)
    makers: dict[type[BlockPattern], Callable[[Any, int, Grid], Tensor]] = {
        Hierarchical: _hierarchical_keys,
        BlockDilated: _block_dilated_keys,
        BlockLists: _listed_keys,
    }
    keys = [makers[type(pattern)](pattern, head, grid) for head in heads]
    return torch.cat([own + index * pattern.blocks**2 for index, own in enumerate(keys)]) if len(keys) > 1 else keys[0]


def _random_keys(pattern: Random, heads: list[int], grid: Grid) -> Tensor:
    head = torch.tensor(heads, device=grid.device)[:, None, None]
    row = grid.rows_of(pattern)[:, None]
    drawn = pattern.drawn(row, grid.arange(pattern.kept), head)
    place = grid.arange(len(heads))[:, None, None] * pattern.blocks + row
    return (place * pattern.blocks + drawn).flatten()


def _hierarchical_keys(pattern: Hierarchical, head: int, grid: Grid) -> Tensor:
    distance = torch.tensor(pattern.distances(), device=grid.device)
    offset = torch.cat([-distance.flip(0), distance[1:]])
    row = grid.rows_of(pattern)[:, None]
    column = row + offset
    return (row * pattern.blocks + column)[(column >= 0) & (column < pattern.blocks)]


def _listed_keys(pattern: BlockLists, head: int, grid: Grid) -> Tensor:
    pointers = torch.frombuffer(bytearray(pattern.pointers), dtype=torch.int64)
    pointers = pointers[head * pattern.rows : (head + 1) * pattern.rows + 1]
    begin, end = int(pointers[0]), int(pointers[-1])
    if begin == end:
        return grid.arange(0)
    columns = torch.frombuffer(bytearray(pattern.columns[4 * begin : 4 * end]), dtype=torch.int32)
    rows = grid.rows_of(pattern).cpu()
    row, slot = ranges(pointers[rows] - begin, pointers.diff()[rows])
    return (rows[row] * pattern.blocks + columns[slot]).to(grid.device)


def _block_dilated_keys(pattern: BlockDilated, head: int, grid: Grid) -> Tensor:
    """Rows against candidate distances, nearest first, in chunks of rows: time O(candidates), which a budget bounds."""
    blocks, budget, ladder = pattern.blocks, pattern.budget, pattern.ladder()
    offered = {0}
    for segment, rate in ladder:
        reach_blocks = min(-(-segment // pattern.block), blocks)
        if budget is not None:
            # What is kept is among the nearest `budget` of some branch, on either side.
            reach_blocks = min(reach_blocks, budget * rate + 1)
        offered.update(d for m in range(rate, reach_blocks, rate) for d in (-m, m))
    if budget is not None:
        # At an end of the sequence all of the budget may have to come from one side.
        offered.update(d for m in range(min(2 * budget, blocks)) for d in (-m, m))
    distance = torch.tensor(sorted(offered, key=lambda d: (abs(d), d)), device=grid.device)
    chunk = max(1, 2**22 // len(distance))
    return torch.cat(
        [_block_dilated_rows(pattern, rows, distance) for rows in grid.rows_of(pattern)[:, None].split(chunk)]
    )


def _block_dilated_rows(pattern: BlockDilated, row: Tensor, distance: Tensor) -> Tensor:
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
        # The ladder stops at the first step that offers enough; only where it ends short do other blocks fill in.
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
