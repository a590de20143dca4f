"""From a pattern to its plan, in time and memory of the blocks it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import must
from ..patterns import BlockPattern, Packed, Pattern, as_pattern
from ..patterns.base import integer
from .closed_forms import ALL, NONE, Domain, Tiles, block_pairs, closed_form, ranges
from .packed import lay_out
from .plan import Axis, Masks, Part, Plan, Walk
from .terms import Segments, Term, packed_form, terms_of
from .tile_lists import build_walk, join_walks, run_walk

BLOCK_SIZES = (16, 32, 64, 128, 256)
MOST_TILES = 2**24
"""Most tiles of a sequence in one plan. A tile takes half a kilobyte while a window is planned, so 8 GiB in all."""
MOST_HEADS = 2**16
"""Most heads, as planning iterates over every head."""
Meetings = tuple[Tensor, Tensor, Tensor]
"""Pairs of tiles that meet, ordered, each int64: query tile, key tile, mask (-1 where whole)."""
MEETINGS_ON_CPU, MEETINGS_ON_GPU = 2**19, 2**24
"""Pairs of tiles listed in one go: what a CPU's cache likes, and what keeps a GPU busy."""


def make_plan(
    pattern: Pattern | str,
    n: int,
    heads: int,
    block_size: int | None = None,
    device: torch.device | str = "cpu",
) -> Plan:
    """Plan attention over `n` tokens and `heads` heads.

    Args:
        pattern: keys that each query attends to, as a value or as text.
        n: tokens in the sequence.
        heads: query heads.
        block_size: edge of a tile, a power of two from 16 to 256. By default the block of the pattern, otherwise 128.
        device: device of the plan's tensors.

    >>> from dilated_attention_pytorch import SlidingWindow, make_plan
    >>> make_plan(SlidingWindow(256), n=4096, heads=8).density
    0.150390625
    """
    pattern, n, heads = as_pattern(pattern), integer("n", n, 1), integer("heads", heads, 1, MOST_HEADS)
    block_size = own_block(pattern) if block_size is None else block_size
    if block_size not in BLOCK_SIZES:
        raise must(f"block_size must be a power of two, one of {BLOCK_SIZES}", block_size)
    if n > MOST_TILES * block_size:
        raise must(
            f"a plan must have at most {MOST_TILES:,} tiles per side",
            f"{n:,} tokens, {-(-n // block_size):,} tiles of {block_size}",
            "plan_rows plans some of the rows.",
        )
    resolved = pattern.resolve(n, heads)
    laid, plan = packed_form(resolved), None
    if isinstance(laid, Packed):
        plan = _plan_packed(laid, heads, block_size, torch.device(device))
    if plan is None:
        plan = _plan(laid, n, heads, block_size, torch.device(device))
    parts = tuple(part for part in plan.parts if len(part.by_query.full) + len(part.by_query.partial))
    return replace(plan, name=resolved.describe(), parts=parts)


def _plan(resolved: Pattern, n: int, heads: int, block_size: int, device: torch.device) -> Plan:
    domain = Domain(n, device)
    masks = MaskTable(block_size, device)
    built = [_part(term, heads, block_size, domain, masks) for term in terms_of(resolved, heads)]
    parts, blocks = zip(*built, strict=True)
    return Plan(resolved.describe(), n, heads, block_size, parts, masks.finish(), sum(blocks))


def _plan_packed(pattern: Packed, heads: int, block_size: int, device: torch.device) -> Plan | None:
    """Plan documents of one length once and lay them one after another; None where documents differ in their parts."""
    plans = {
        length: _plan(pattern.document(length), length, heads, block_size, device) for length in set(pattern.lengths)
    }
    outlines = {
        tuple((part.queries.rate, *part.queries.offset.tolist(), *part.head_class.tolist()) for part in plan.parts)
        for plan in plans.values()
    }
    return lay_out([plans[length] for length in pattern.lengths]) if len(outlines) == 1 else None


def own_block(pattern: Pattern) -> int:
    """Default tile size of a pattern: the smallest of its block sizes, at most 128."""
    sizes = [size for size in closed_form(pattern).block_sizes if size in BLOCK_SIZES]
    return min([128, *sizes])


def _part(term: Term, heads: int, block_size: int, domain: Domain, masks: MaskTable) -> tuple[Part, int]:
    layout = Layout(term.axis, heads, block_size, domain)
    groups = head_classes(term, heads, layout)
    head_class = [-1] * heads
    for index, group in enumerate(groups):
        for head in group:
            head_class[head] = index
    classes = torch.tensor(head_class, dtype=torch.int32, device=domain.device)
    runs = {closed_form(pattern).run for pattern in term.where}
    if not term.exclude and None not in runs and len(groups) == 1:
        *walks, entries = _segment_walks(groups[0], "before" in runs, layout, masks)
        return Part(layout.axis, layout.axis, classes, *walks), entries * len(groups[0])
    by_query, by_key, blocks = [], [], 0
    for several, (query, key, mask) in _meetings_of_classes(term, groups, layout, domain, masks):
        # Rows of a later class in the same list follow all tiles of earlier classes.
        owner = query // layout.tiles * layout.tiles
        transposed = torch.argsort(owner + key, stable=True)
        bases = tuple(base.repeat(len(several)) for base in layout.bases)
        by_query.append(build_walk(query, key, mask, bases))
        by_key.append(
            build_walk((owner + key)[transposed], (query - owner)[transposed], mask[transposed], bases),
        )
        members = torch.tensor([len(group) for group in several], device=domain.device)
        blocks += int(members[query // layout.tiles].sum())
    return Part(layout.axis, layout.axis, classes, join_walks(by_query), join_walks(by_key)), blocks


def _segment_walks(group: list[int], causal: bool, layout: Layout, masks: MaskTable) -> tuple[Walk, Walk, int]:
    """Walks by query and by key, and entries, of segments without conditions or with a causal one.

    Whole tiles of a row are a run of its segment, so that one list serves every row: a pair of tiles takes neither time
    nor memory, unlike in `_meetings`.
    """
    offsets = {layout.offsets[member] for member in group}
    device = layout.axis.start.device
    own = torch.arange(layout.tiles, device=device)
    head, tail = layout.edges(min(offsets))
    exists = head < layout.axis.end
    ragged = torch.stack([layout.ragged(offset) for offset in offsets]).any(0) & exists
    # Only the last tile of a segment can be cut short or missing.
    begin, last = layout.first_tile, layout.first_tile + layout.tile_count - 1
    end = last + exists[last].long()
    whole = end - ragged[last].long()
    ends = (ragged[last] & ~ragged & exists).nonzero()[:, 0]
    cut = ragged.nonzero()[:, 0]
    at, tile = ranges(begin[cut], (cut if causal else end[cut]) - begin[cut])
    whole_mask = torch.full_like(own, masks.everything)
    shapes = (cut[at], tile, whole_mask[tile]), (ends, last[ends], whole_mask[ends])
    diagonal = own[exists]
    if causal:
        # As in `_element_masks`, tiles share masks with tiles of as many elements.
        sizes, size = torch.unique((tail - head)[diagonal], return_inverse=True)
        square = torch.ones(len(sizes), layout.block_size, layout.block_size, dtype=torch.bool, device=device)
        lower = diagonal, diagonal, masks.add(square.tril())[size]
        partial = (shapes[0], lower), (lower, shapes[1])
        runs = (begin, own), (own + 1, whole)
    else:
        partial, runs = (shapes, shapes), ((begin, whole), (begin, whole))
    walks, entries = [], 0
    for some, (first, stop) in zip(partial, runs, strict=True):
        row, tile, mask = (torch.cat(column) for column in zip(*some, strict=True))
        order = torch.argsort(row * layout.tiles + tile)
        count = torch.where(exists & ~ragged, stop - first, 0)
        walks.append(run_walk(first, count, row[order], tile[order], mask[order], begin, layout.bases))
        entries = int(count.sum()) + len(row)
    return walks[0], walks[1], entries


class Layout:
    """An axis cut into tiles, with what the planner needs beyond what a kernel does."""

    def __init__(self, segments: Segments, heads: int, block_size: int, domain: Domain) -> None:
        begin, end = segments.bounds(domain.n, domain.device)
        self.span = segments.rate * block_size
        self.rate = segments.rate
        offsets = torch.tensor(segments.offsets or (0,) * heads, dtype=torch.int32, device=domain.device)
        self.offsets = offsets.tolist()
        counts = -(-(end - begin) // self.span)
        self.segment, local = ranges(torch.zeros_like(counts), counts)
        self.first_tile = (counts.cumsum(0) - counts)[self.segment]
        self.tile_count = counts[self.segment]
        self.segment_start = begin[self.segment]
        self.axis = Axis(segments.rate, offsets, self.segment_start + local * self.span, end[self.segment])
        self.tiles = self.axis.tiles
        self.block_size = block_size
        own = torch.arange(self.tiles, device=domain.device)
        self.bases = (own,) if len(begin) == 1 else (self.first_tile, own)
        """Tiles a row's list may be counted from, most promising first."""

    def edges(self, offset: int) -> tuple[Tensor, Tensor]:
        """Tokens of each tile's first and last element; the last that exists, where the tile is ragged."""
        first = self.axis.start + offset
        last = first + self.rate * (self.block_size - 1)
        existing = first + (self.axis.end - 1 - first).clamp(min=0) // self.rate * self.rate
        return first, torch.minimum(last, existing)

    def ragged(self, offset: int) -> Tensor:
        """Tiles whose last elements do not all exist for a head that samples this residue."""
        return self.axis.start + offset + self.rate * (self.block_size - 1) >= self.axis.end


def head_classes(term: Term, heads: int, layout: Layout) -> list[list[int]]:
    """Groups of heads that share lists. Offsets matter only to conditions on absolute positions."""
    shifts_matter = not all(closed_form(p).is_shift_invariant for p in term.conditions)
    classes: dict[object, list[int]] = {}
    for head in sorted(term.heads) if term.heads is not None else range(heads):
        own = tuple(closed_form(p).head_key(head) for p in term.conditions)
        classes.setdefault((own, layout.offsets[head] if shifts_matter else None), []).append(head)
    return list(classes.values())


def _meetings_of_classes(
    term: Term, groups: list[list[int]], layout: Layout, domain: Domain, masks: MaskTable
) -> Iterator[tuple[list[list[int]], Meetings]]:
    """The meetings of every head class, several at once where the pattern lists them itself."""
    match term:
        case Term(axis, (BlockPattern() as pattern,), ()) if axis.whole and pattern.block == layout.block_size:
            # Tiles are the pattern's own blocks, so its lists are the answer.
            ragged = layout.ragged(0)
            most = MEETINGS_ON_CPU if domain.device.type == "cpu" else MEETINGS_ON_GPU
            at_once = (
                1 if len(groups) == 1 else max(1, most // max(1, len(block_pairs(pattern, groups[0][:1], domain))))
            )
            for first in range(0, len(groups), at_once):
                several = groups[first : first + at_once]
                pairs = block_pairs(pattern, [group[0] for group in several], domain)
                query, key = pairs // layout.tiles, pairs % layout.tiles
                cut = ragged[key] | ragged[query % layout.tiles]
                yield several, (query, key, torch.where(cut, masks.everything, -1))
        case _:
            for group in groups:
                yield [group], _meetings(term, group, layout, domain, masks)


def _meetings(term: Term, group: list[int], layout: Layout, domain: Domain, masks: MaskTable) -> Meetings:
    """Pairs of tiles that meet for one head class."""
    # Heads of a class may sample different residues; the one that starts first has the longest tiles.
    head = min(group, key=lambda member: layout.offsets[member])
    offset = layout.offsets[head]
    first, last = layout.edges(offset)
    query, key = _candidates(term, first, last, head, offset, layout, domain)
    return decide_tiles(term, group, query, key, layout, domain, masks)


def decide_tiles(
    term: Term, group: list[int], query: Tensor, key: Tensor, layout: Layout, domain: Domain, masks: MaskTable
) -> Meetings:
    """Candidate pairs with at least one allowed pair of existing elements, for one head class."""
    head = min(group, key=lambda member: layout.offsets[member])
    first, last = layout.edges(layout.offsets[head])
    # A short segment may end before the residue that the class samples.
    exists = first < layout.axis.end
    if not bool(exists.all()):
        both = exists[query] & exists[key]
        query, key = query[both], key[both]
    verdict = _verdicts(term, (first[query], last[query], first[key], last[key]), head, domain)
    ragged = torch.stack([layout.ragged(offset) for offset in {layout.offsets[h] for h in group}]).any(0)
    certain = verdict == ALL
    mask = torch.where(certain & ~(ragged[key] | ragged[query]), -1, masks.everything).long()
    open_ = (verdict != ALL) & (verdict != NONE)
    keep = certain
    if open_.any():
        slots = open_.nonzero()[:, 0]
        pairs = first[query[slots]], last[query[slots]], first[key[slots]], last[key[slots]]
        own, some, whole = _element_masks(term, pairs, head, layout, domain, masks)
        exact = whole & ~(ragged[key[slots]] | ragged[query[slots]])
        mask[slots] = torch.where(exact, -1, own)
        keep = certain.clone()
        keep[slots] = some
    return query[keep], key[keep], mask[keep]


def _verdicts(term: Term, tiles: Tiles, head: int, domain: Domain) -> Tensor:
    """Verdict on pairs of tiles under all conditions of a term."""
    verdict = torch.full_like(tiles[0], ALL, dtype=torch.int8)
    for pattern in term.where:
        verdict = torch.minimum(verdict, closed_form(pattern).classify(tiles, head, domain))
    for pattern in term.exclude:
        verdict = torch.minimum(verdict, ALL - closed_form(pattern).classify(tiles, head, domain))
    return verdict


def _candidates(
    term: Term, first: Tensor, last: Tensor, head: int, offset: int, layout: Layout, domain: Domain
) -> tuple[Tensor, Tensor]:
    """Pairs of tiles of one segment that may meet, ordered, each once."""
    every = torch.arange(layout.tiles, device=domain.device)
    best = every, torch.zeros_like(every), layout.tile_count
    for pattern in term.where:
        spans = closed_form(pattern).reach(first, last, head, domain)
        origin = layout.segment_start[spans.row] + offset
        low = ((spans.first - origin) // layout.span).clamp(min=0)
        high = torch.minimum((spans.last - origin) // layout.span, layout.tile_count[spans.row] - 1)
        spans = _joined(spans.row, low, (high - low + 1).clamp(min=0), layout.tiles)
        best = min(best, spans, key=lambda option: int(option[2].sum()))
    owner, local = ranges(*best[1:])
    row = best[0][owner]
    return sorted_once(row, layout.first_tile[row] + local, layout.tiles)


def _joined(row: Tensor, low: Tensor, count: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stretches of tiles with the longest of every row and first tile; a row may reach one tile by many keys."""
    if len(row) <= columns:
        return row, low, count
    start, stretch = torch.unique(row * columns + low.clamp(max=columns - 1), return_inverse=True)
    longest = torch.zeros_like(start).scatter_reduce_(0, stretch, count, "amax")
    return start // columns, start % columns, longest


def sorted_once(row: Tensor, column: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Pairs in order, each once."""
    key = row * columns + column
    if not bool((key.diff() > 0).all()):
        key = torch.unique(key)
    return key // columns, key % columns


def _element_masks(
    term: Term, tiles: Tiles, head: int, layout: Layout, domain: Domain, masks: MaskTable
) -> tuple[Tensor, Tensor, Tensor]:
    """Mask index of each pair of tiles, and whether it allows some existing elements and all elements.

    A pattern is undefined past the end of a segment: mask bits there are arbitrary, and kernels ignore them.
    """
    q0, q1, k0, k1 = tiles
    # Tiles that are cut short share masks only with tiles that have as many elements.
    columns = [q1 - q0, k1 - k0]
    for pattern in term.conditions:
        columns += closed_form(pattern).mask_keys(tiles, layout.span, head, domain)
    label = torch.zeros_like(q0)
    for column in columns:
        values, inverse = torch.unique(column, return_inverse=True)
        label = torch.unique(label * len(values) + inverse, return_inverse=True)[1]
    count = int(label.max()) + 1
    example = torch.empty(count, dtype=torch.int64, device=label.device)
    example[label] = torch.arange(len(label), device=label.device)
    step = layout.rate * torch.arange(layout.block_size, device=label.device)
    indices, some, whole = [], [], []
    for slots in example.split(512):
        q = q0[slots][:, None, None] + step[:, None]
        k = k0[slots][:, None, None] + step
        allowed = torch.ones(len(slots), layout.block_size, layout.block_size, dtype=torch.bool, device=label.device)
        for pattern in term.where:
            allowed &= closed_form(pattern).count(q, k, head, domain) > 0
        for pattern in term.exclude:
            allowed &= closed_form(pattern).count(q, k, head, domain) == 0
        exists = (q <= q1[slots][:, None, None]) & (k <= k1[slots][:, None, None])
        indices.append(masks.add(allowed))
        some.append((allowed & exists).flatten(1).any(1))
        whole.append(allowed.flatten(1).all(1))
    return tuple(torch.cat(column)[label] for column in (indices, some, whole))  # pyrefly: ignore[bad-return]


class MaskTable:
    """Table of distinct element masks."""

    everything = 0
    """Index of the mask that allows all; for tiles whose ragged end alone is checked."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        whole = torch.ones(1, block_size, block_size, dtype=torch.bool, device=device)
        self.bits = [self._pack(whole)]
        self.bands = [self._bands(whole)]

    def add(self, allowed: Tensor) -> Tensor:
        """Indices of the masks, int64 [U], for bool [U, B, B]."""
        base = sum(map(len, self.bits))
        self.bits.append(self._pack(allowed))
        self.bands.append(self._bands(allowed))
        return base + torch.arange(len(allowed), device=allowed.device)

    def finish(self) -> Masks:
        return Masks(torch.cat(self.bits), torch.cat(self.bands))

    def _pack(self, allowed: Tensor) -> Tensor:
        words = allowed.unflatten(2, (-1, min(32, self.block_size))).long()
        shifts = torch.arange(words.shape[-1], device=allowed.device)
        packed = (words << shifts).sum(-1)
        # The top bit of an unsigned word is the sign of an int32.
        return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)

    def _bands(self, allowed: Tensor) -> Tensor:
        edge = torch.arange(self.block_size, device=allowed.device)
        difference = edge - edge[:, None]
        low = torch.where(allowed, difference, self.block_size).flatten(1).amin(1)
        high = torch.where(allowed, difference, -self.block_size).flatten(1).amax(1)
        band = (difference >= low[:, None, None]) & (difference <= high[:, None, None])
        exact = (band == allowed).flatten(1).all(1)
        empty = torch.tensor([1, 0], device=allowed.device)
        return torch.where(exact[:, None], torch.stack([low, high], 1), empty).to(torch.int32)
