"""A run of query rows as a problem of its own: its queries and the keys they meet, each tile after tile in a buffer.

The buffers hold what a part of the plan reads and nothing between, so a branch of rate r costs 1 / r of its segment.
Query heads that share a key head may sample different residues of it; each residue then has a copy of the part's key
tiles in the buffer, a *slot*, which the axis's offset selects.

Legend: H query heads, G key heads, T query tiles, S key tiles, B block size, n rows of the buffers, R queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns import Pattern
from .plan import Axis, Masks, Part, Plan, Walk
from .planner import MaskTable
from .restricted import plan_rows
from .walks import build_walk, join_walks


@dataclass(frozen=True, eq=False, slots=True)
class Excerpt:
    """One part of a plan for a run of rows, over buffers. The plan alone lives on the device asked for."""

    plan: Plan
    """Over buffer rows; `plan.n` is the length of both buffers."""
    queries: Tensor
    """int64 [R]: `head * rows of the run + row` of every query the part computes, each once"""
    places: Tensor
    """int64 [R]: `head * n + buffer row` where it lies"""
    query_rows: Tensor
    """int64 [H, n], on the plan's device: the row of the run that a buffer row holds, 0 for filler"""
    key_tokens: Tensor
    """int64 [G, n]: the token that a buffer row holds, -1 for filler"""


class _Kind(NamedTuple):
    """Heads of a part that share their lists and their residues."""

    walk_class: int
    offset: int
    key_offset: int


def excerpts(
    pattern: Pattern,
    n: int,
    heads: int,
    key_heads: int,
    begin: int,
    end: int,
    block_size: int,
    device: torch.device | str = "cpu",
    keys: tuple[int, int] | None = None,
) -> tuple[Excerpt, ...]:
    """What the rows `begin` to `end - 1` compute under a resolved pattern, part by part.

    With `keys`, key tiles outside that stretch of tokens are left out, and tiles across its edges are cut there.

    Planning takes time and memory of the tiles these rows meet. One softmax runs over the keys of all parts together,
    so what the parts find merges by LSE.

    >>> from dilated_attention_pytorch import Dilated
    >>> (branch,) = excerpts(Dilated((2**30,), (2**20,)), 2**30, 8, 8, 2**29, 2**29 + 2**22, 128)
    >>> branch.plan.n, branch.key_tokens[3, :2].tolist(), len(branch.queries)
    (1024, [3, 1048579], 32)
    """
    plan = plan_rows(pattern, n, heads, [(begin, end)], keys, block_size)
    seen = (0, n) if keys is None else keys
    return tuple(_excerpt(plan, part, key_heads, (begin, end), seen, torch.device(device)) for part in plan.parts)


def _excerpt(
    plan: Plan, part: Part, key_heads: int, run: tuple[int, int], keys: tuple[int, int], device: torch.device
) -> Excerpt:
    begin, end = run
    heads, size = plan.heads, plan.block_size
    facts = (x.tolist() for x in (part.head_class, part.queries.offset, part.keys.offset))
    kind_of = [_Kind(*kind) if kind[0] >= 0 else None for kind in zip(*facts, strict=True)]
    kinds = sorted({kind for kind in kind_of if kind is not None})
    masks = _Masks(plan)
    walks = [_walks(part, kind, size, keys, masks) for kind in kinds]
    classes = torch.tensor([-1 if kind is None else kinds.index(kind) for kind in kind_of], dtype=torch.int32)

    shared = heads // key_heads
    slots = [
        sorted({kind.key_offset for kind in kind_of[g * shared : (g + 1) * shared] if kind is not None})
        for g in range(key_heads)
    ]
    slot_rows = part.keys.tiles * size
    key_offset = [0 if k is None else slots[h // shared].index(k.key_offset) * slot_rows for h, k in enumerate(kind_of)]
    rows = max(part.queries.tiles * size, max(map(len, slots)) * slot_rows)

    def laid(axis: Axis, offset: Tensor) -> Axis:
        # Every row of a buffer exists; masks keep filler apart.
        start = torch.arange(axis.tiles) * size
        return Axis(1, offset, start, torch.full_like(start, rows))

    compact = Part(
        laid(part.queries, torch.zeros(heads, dtype=torch.int32)),
        laid(part.keys, torch.tensor(key_offset, dtype=torch.int32)),
        classes,
        join_walks([by_query for by_query, _ in walks]),
        join_walks([by_key for _, by_key in walks]),
    )
    blocks = sum(sum(torch.add(*walks[c][0].counts()).tolist()) for c in classes.tolist() if c >= 0)
    whole = Plan(plan.name, rows, heads, size, (compact,), masks.finish(), blocks)

    query_rows = torch.full((heads, rows), -1, dtype=torch.int64)
    key_tokens = torch.full((key_heads, rows), -1, dtype=torch.int64)
    for head, kind in enumerate(kind_of):
        if kind is not None:
            token, exists = part.queries.tokens(size, head)
            own = exists & (token >= begin) & (token < end)
            query_rows[head, : token.numel()] = torch.where(own, token - begin, -1).flatten()
            token, exists = part.keys.tokens(size, head)
            exists = exists & (token >= keys[0]) & (token < keys[1])
            at = key_offset[head]
            key_tokens[head // shared, at : at + slot_rows] = torch.where(exists, token, -1).flatten()
    places = (query_rows.flatten() >= 0).nonzero()[:, 0]
    queries = places // rows * (end - begin) + query_rows.flatten()[places]
    return Excerpt(whole.to(device), queries, places, query_rows.clamp(min=0).to(device), key_tokens)


def _walks(part: Part, kind: _Kind, size: int, keys: tuple[int, int], masks: _Masks) -> tuple[Walk, Walk]:
    """The lists of one kind by query and by key, with keys that do not exist or lie outside masked out."""
    tiles, streamed = part.queries.tiles, part.keys.tiles
    walk = part.by_query
    own = walk.rows[kind.walk_class * tiles : (kind.walk_class + 1) * tiles]
    row, tile, mask = Walk(own, walk.full, walk.partial, walk.mask, walk.order).entries()
    start, rate = part.keys.start + kind.key_offset, part.keys.rate
    first = (-((start - keys[0]) // rate)).clamp(0, size)[tile]
    stop = (-((start - part.keys.end.clamp(max=keys[1])) // rate)).clamp(0, size)[tile]
    met = stop > first
    row, tile, mask = row[met], tile[met], masks.cut(mask[met], first[met], stop[met])
    order = torch.argsort(tile, stable=True)
    rows, columns = torch.arange(tiles), torch.arange(streamed)
    by_query = build_walk(row, tile, mask, (torch.zeros_like(rows), rows))
    by_key = build_walk(tile[order], row[order], mask[order], (torch.zeros_like(columns), columns))
    return by_query, by_key


class _Masks:
    """Masks of a plan, and behind them those cut where a key tile is, each kept once."""

    def __init__(self, plan: Plan) -> None:
        self.given, self.size = plan.masks, plan.block_size
        self.table = MaskTable(plan.block_size, plan.device)
        self.known: dict[int, int] = {}

    def cut(self, mask: Tensor, first: Tensor, stop: Tensor) -> Tensor:
        """Indices of the masks (-1 where whole) for tiles of which the keys `first` to `stop - 1` exist."""
        short = (stop - first < self.size).nonzero()[:, 0]
        base = self.size + 1
        whole = torch.where(mask < 0, MaskTable.everything, mask)
        codes, which = torch.unique((whole * base + first)[short] * base + stop[short], return_inverse=True)
        for code in codes.tolist():
            if code not in self.known:
                one, low, high = code // base**2, code // base % base, code % base
                allowed = Masks(self.given.bits[one : one + 1], self.given.band[one : one + 1]).dense(self.size)
                place = torch.arange(self.size)
                index = self.table.add(allowed & (place >= low) & (place < high))
                self.known[code] = len(self.given.bits) + int(index[0])
        cut = mask.clone()
        cut[short] = torch.tensor([self.known[code] for code in codes.tolist()], dtype=torch.int64)[which]
        return cut

    def finish(self) -> Masks:
        cut = self.table.finish()
        return Masks(torch.cat([self.given.bits, cut.bits]), torch.cat([self.given.band, cut.band]))
