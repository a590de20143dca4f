"""The plan of some query rows alone: in time and memory of the tiles they meet, however long the sequence is.

Tiles of the whole sequence are numbered as `make_plan` numbers them, without ever being written out; a part of the
result holds the query tiles that reach into the requested rows, and the key tiles that they attend to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns import BlockPattern, Packed, Pattern
from .builder import Layout, MaskTable, Meetings, decide_tiles, head_classes, own_block, sorted_once
from .closed_forms import Domain, closed_form, ranges
from .plan import Axis, Part, Plan
from .terms import Segments, Term, packed_form, terms_of
from .tile_lists import build_walk, join_walks

Runs = Sequence[tuple[int, int]]
"""Begin and end of stretches of tokens, ascending, apart from each other."""


class _Piece(NamedTuple):
    """Contribution of one term, before its lists are stored."""

    queries: Axis
    keys: Axis
    groups: list[list[int]]
    """Heads of each class."""
    met: list[Meetings]
    """Meetings of each class; tiles count from the first of `queries` and `keys`."""


def plan_rows(
    pattern: Pattern, n: int, heads: int, runs: Runs, keys: tuple[int, int] | None = None, block_size: int | None = None
) -> Plan:
    """Plan of the query tiles that overlap the given runs of tokens, on the CPU; lists as in `make_plan`.

    Args:
        pattern: who may see whom; resolved for `n` and `heads`.
        n: tokens in the sequence.
        heads: query heads.
        runs: the queries, as stretches of tokens.
        keys: leave out key tiles that lie outside this stretch.
        block_size: edge of a tile; the pattern's own by default.

    >>> from dilated_attention_pytorch import Causal, Dilated
    >>> from dilated_attention_pytorch.plan import plan_rows
    >>> ladder = Dilated([2048 * 2**i for i in range(20)], [2**i for i in range(20)])
    >>> plan_rows(ladder & Causal(), 2**30, 1, [(2**29, 2**29 + 4096)]).blocks
    480
    """
    size = own_block(pattern) if block_size is None else block_size
    masks = MaskTable(size, torch.device("cpu"))
    laid, pieces = packed_form(pattern), None
    if isinstance(laid, Packed):
        pieces = _packed(laid, heads, size, runs, keys, masks)
    if pieces is None:
        pieces = _pieces(laid, n, heads, size, runs, keys, masks)
    parts = [_stored(piece, heads) for piece in pieces if any(len(met[0]) for met in piece.met)]
    blocks = sum(
        len(group) * len(met[0]) for piece in pieces for group, met in zip(piece.groups, piece.met, strict=True)
    )
    return Plan(pattern.describe(), n, heads, size, tuple(parts), masks.finish(), blocks)


def _pieces(
    pattern: Pattern, n: int, heads: int, size: int, runs: Runs, keys: tuple[int, int] | None, masks: MaskTable
) -> list[_Piece]:
    return [_piece(term, n, heads, size, runs, keys, masks) for term in terms_of(pattern, heads)]


def _packed(
    pattern: Packed, heads: int, size: int, runs: Runs, keys: tuple[int, int] | None, masks: MaskTable
) -> list[_Piece] | None:
    """Documents that lie in one run are planned once a length; all pieces of a term stand one after another.

    None where documents differ in their terms.
    """
    whole: dict[int, list[_Piece]] = {}
    documents: list[tuple[int, list[_Piece]]] = []
    for length, end in zip(pattern.lengths, accumulate(pattern.lengths), strict=True):
        start = end - length
        own = [(max(a - start, 0), min(b - start, length)) for a, b in runs if a < end and b > start]
        seen = None if keys is None else (max(keys[0] - start, 0), min(keys[1] - start, length))
        if not own or (seen is not None and seen[0] >= seen[1]):
            continue
        if own == [(0, length)] and seen in (None, (0, length)):
            if length not in whole:
                whole[length] = _pieces(pattern.document(length), length, heads, size, own, None, masks)
            documents.append((start, whole[length]))
        else:
            documents.append((start, _pieces(pattern.document(length), length, heads, size, own, seen, masks)))
    if not documents:
        return []
    outlines = {tuple(_outline(piece) for piece in pieces) for _, pieces in documents}
    if len(outlines) > 1:
        return None
    return [_joined([(start, pieces[index]) for start, pieces in documents]) for index in range(len(documents[0][1]))]


def _outline(piece: _Piece) -> tuple[object, ...]:
    return piece.queries.rate, *piece.queries.offset.tolist(), *map(tuple, piece.groups)


def _joined(pieces: list[tuple[int, _Piece]]) -> _Piece:
    first = pieces[0][1]
    met: list[Meetings] = []
    for index in range(len(first.groups)):
        columns, rows, tiles = [], 0, 0
        for _, piece in pieces:
            query, key, mask = piece.met[index]
            columns.append((query + rows, key + tiles, mask))
            rows, tiles = rows + piece.queries.tiles, tiles + piece.keys.tiles
        met.append(tuple(torch.cat(column) for column in zip(*columns, strict=True)))  # pyrefly: ignore[bad-argument-type]

    def laid(axes: list[Axis]) -> Axis:
        shifted = [(axis.start + start, axis.end + start) for axis, (start, _) in zip(axes, pieces, strict=True)]
        start, end = (torch.cat(column) for column in zip(*shifted, strict=True))
        return replace(axes[0], start=start, end=end)

    return _Piece(laid([p.queries for _, p in pieces]), laid([p.keys for _, p in pieces]), first.groups, met)


def _piece(
    term: Term, n: int, heads: int, size: int, runs: Runs, keys: tuple[int, int] | None, masks: MaskTable
) -> _Piece:
    tiles = _Tiles(term.axis, heads, size, Domain(n, torch.device("cpu")), runs)
    rows = tiles.layout(tiles.own)
    groups = head_classes(term, heads, rows)
    candidates = []
    for group in groups:
        offset = min(rows.offsets[head] for head in group)
        domain = _RowDomain(n, *rows.edges(offset))
        head = min(group, key=lambda member: rows.offsets[member])
        candidates.append((domain, *_candidates(term, tiles, rows, head, domain, keys)))
    streamed = torch.unique(torch.cat([tiles.own[:0], *(key for _, _, key in candidates)]))
    # `decide_tiles` below indexes own query tiles first, then key tiles.
    both = tiles.layout(torch.cat([tiles.own, streamed]))
    met = []
    for group, (domain, row, key) in zip(groups, candidates, strict=True):
        query, column, mask = decide_tiles(
            term, group, row, len(tiles.own) + torch.searchsorted(streamed, key), both, domain, masks
        )
        met.append((query, column - len(tiles.own), mask))
    used = torch.unique(torch.cat([streamed[:0], *(column for _, column, _ in met)]))
    met = [(query, torch.searchsorted(used, column), mask) for query, column, mask in met]
    return _Piece(rows.axis, tiles.layout(streamed[used]).axis, groups, met)


def _stored(piece: _Piece, heads: int) -> Part:
    head_class = torch.full((heads,), -1, dtype=torch.int32, device="cpu")
    by_query, by_key = [], []
    rows, columns = (torch.zeros(axis.tiles, dtype=torch.int64, device="cpu") for axis in (piece.queries, piece.keys))
    for index, (group, (query, key, mask)) in enumerate(zip(piece.groups, piece.met, strict=True)):
        head_class[group] = index
        order = torch.argsort(key, stable=True)
        by_query.append(build_walk(query, key, mask, (rows,)))
        by_key.append(build_walk(key[order], query[order], mask[order], (columns,)))
    return Part(piece.queries, piece.keys, head_class, join_walks(by_query), join_walks(by_key))


class _RowDomain(Domain):
    """A grid that lists block patterns for the rows of some query tiles only."""

    def __init__(self, n: int, first: Tensor, last: Tensor) -> None:
        super().__init__(n, torch.device("cpu"))
        self.first, self.last = first, last

    def rows_of(self, pattern: BlockPattern) -> Tensor:
        begin = self.first // pattern.block
        _, block = ranges(begin, self.last // pattern.block - begin + 1)
        return torch.unique(block.clamp(max=pattern.blocks - 1))


class _Tiles:
    """The tiles of an axis by number, of the segments that some runs meet."""

    def __init__(self, segments: Segments, heads: int, size: int, domain: Domain, runs: Runs) -> None:
        self.segments, self.heads, self.size, self.domain = segments, heads, size, domain
        self.span = segments.rate * size
        begin, end = segments.bounds(domain.n, domain.device)
        run_begin, run_end = (
            (torch.tensor(column, dtype=torch.int64, device="cpu") for column in zip(*runs, strict=True))
            if runs
            else (begin[:0],) * 2
        )
        first = torch.searchsorted(run_end, begin, right=True)
        stop = torch.searchsorted(run_begin, end)
        meeting = (stop > first).nonzero()[:, 0]
        self.begin, self.end = begin[meeting], end[meeting]
        counts = -(-(self.end - self.begin) // self.span)
        self.first_tile, self.tile_count = counts.cumsum(0) - counts, counts
        segment, run = ranges(first[meeting], (stop - first)[meeting])
        start = self.begin[segment]
        low = (torch.maximum(run_begin[run], start) - start) // self.span
        high = (torch.minimum(run_end[run], self.end[segment]) - 1 - start) // self.span
        owner, local = ranges(low, high - low + 1)
        self.own = torch.unique(self.first_tile[segment[owner]] + local)
        """int64: numbers of the tiles that reach into a run"""

    def segment(self, tile: Tensor) -> Tensor:
        return torch.searchsorted(self.first_tile, tile, right=True) - 1

    def layout(self, tile: Tensor) -> _SomeTiles:
        """These tiles alone."""
        segment = self.segment(tile)
        start = self.begin[segment] + (tile - self.first_tile[segment]) * self.span
        return _SomeTiles(self.segments, self.heads, self.size, start, self.end[segment])


class _SomeTiles(Layout):
    """Chosen tiles of an axis."""

    def __init__(self, segments: Segments, heads: int, size: int, start: Tensor, end: Tensor) -> None:
        offsets = torch.tensor(segments.offsets or (0,) * heads, dtype=torch.int32, device="cpu")
        self.rate, self.span, self.block_size = segments.rate, segments.rate * size, size
        self.offsets = offsets.tolist()
        self.axis = Axis(segments.rate, offsets, start, end)
        self.tiles = self.axis.tiles


def _candidates(
    term: Term, tiles: _Tiles, rows: _SomeTiles, head: int, domain: Domain, keys: tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """Own query tiles, by place, and numbers of the key tiles of their segment they may meet, ordered, each once."""
    first, last = rows.edges(rows.offsets[head])
    segment = tiles.segment(tiles.own)
    every = torch.arange(len(tiles.own), device="cpu")
    options = [(every, torch.zeros_like(first), torch.full_like(last, domain.n - 1))]
    options += [closed_form(pattern).reach(first, last, head, domain) for pattern in term.where]
    best = None
    for row, begin, end in options:
        if keys is not None:
            begin, end = begin.clamp(min=keys[0]), end.clamp(max=keys[1] - 1)
        of = segment[row]
        # The first element of a tile follows its start by less than one step of the axis.
        low = ((begin - tiles.begin[of]) // tiles.span).clamp(min=0)
        high = torch.minimum((end - tiles.begin[of]) // tiles.span, tiles.tile_count[of] - 1)
        count = (high - low + 1).clamp(min=0)
        if best is None or int(count.sum()) < best[0]:
            best = int(count.sum()), row, low, count
    assert best is not None
    _, row, low, count = best
    owner, local = ranges(low, count)
    row = row[owner]
    total = int(tiles.tile_count.sum())
    return sorted_once(row, tiles.first_tile[segment[row]] + local, total)
