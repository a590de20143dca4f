"""Order of the additions to dQ: turns of the work items of `dkv_kernel` at the tiles of dQ they add to.

Every tile of dQ (sample, head, tile of queries) has a counter. An entry of an item carries its turn, the number of
entries that add to the same tile before it, and adds when the counter has reached it. Items are claimed in the order
of their records, and turns follow that order, so an item waits only for items claimed before it.

How long items wait depends on the order of items and of their entries. Items of a few heads start tile by tile, so that
not all running items add to the same tiles. Entries run against the order of tiles: an item reaches the query tiles it
shares with its predecessor one entry later than its predecessor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...plan.plan import Plan
from .lowering import ITEM_ROWS, BackwardItems, launch_cache

STRIDED_WIDTH = 6
"""Columns of the records of a strided part."""
HEADS = 8
"""Key heads whose items start together; between two additions to a tile of dQ, the other heads use the L2 cache."""
LEAST_NEAR = 0.5
"""Least share of additions to dQ that follow one of the preceding key tile, for a plan that `suits` turns."""
MOST_ENTRIES = 2**20
"""Most pairs of tiles of a plan that `suits` turns: their list has 24 bytes each and takes about a microsecond."""


def suits(plan: Plan) -> bool:
    """Whether sums of dQ in turns are faster than dQ by rows, as far as that follows from the plan; cached in it.

    Turns are faster if consecutive additions to a tile of dQ come from neighbouring key tiles: their items run at the
    same time and add in the same order. If the lists of key tiles have no query tiles in common, the tile of dQ and the
    queries of every addition are outside the L2 cache.
    """
    if launch_cache(plan) is not plan.memo:
        # The host may not read the lists of a learned plan.
        return False
    suitable = plan.memo.get("hopper turns")
    if suitable is None:
        suitable = plan.memo["hopper turns"] = _has_near_additions(plan)
    return suitable


def _has_near_additions(plan: Plan) -> bool:
    entries = near = total = 0
    for part in plan.parts:
        entries += sum(int(count.sum()) for count in part.by_query.counts())
        if entries > MOST_ENTRIES:
            return False
        row, tile, _ = part.by_query.entries()
        step = (row * (part.keys.tiles + 1) + tile).sort().values.diff()
        # Entries of the next row are numbered from one more than the number of tiles on.
        follows = row[1:] == row[:-1]
        near += int((follows & (step == 1)).sum())
        total += int(follows.sum())
    return total > 0 and near >= LEAST_NEAR * total


def in_turns(
    works: Sequence[BackwardItems], blocks: Sequence[int], tiles: int, block: int, group: int
) -> list[BackwardItems]:
    """Items by key of launches that run one after another, in starting order and with turns.

    `blocks` are the rows per head class of each walk, and `tiles` the query tiles of a head. Records gain a column, the
    first entry of the item. `partial` becomes int32 [E, 6] and lists all entries of an item in streaming order: tile,
    mask (-1 for a whole tile), band, head within the group, turn. Heads with equal lists share their entries.
    """
    done = torch.zeros(len(works[0].classes) * tiles, dtype=torch.int64, device="cpu")
    return [
        _ordered(work, rows, done, tiles, block, group, n > 0)
        for n, (work, rows) in enumerate(zip(works, blocks, strict=True))
    ]


def _ordered(
    work: BackwardItems, blocks: int, done: Tensor, tiles: int, block: int, group: int, are_pieces: bool
) -> BackwardItems:
    """Items of one launch; `done` counts the entries at each tile of dQ of earlier launches and is updated."""
    device = work.items.device
    items, classes, rows, full, partial = (x.cpu().long() for x in work[:5])
    strided = items.shape[1] == STRIDED_WIDTH
    holder, stored = items[:, 0], items[:, 3]
    tile = items[:, 4] if strided else items[:, 1]
    offset = items[:, 5] if strided else torch.zeros_like(tile)
    row = tile if strided else (stored if are_pieces else tile) * ITEM_ROWS // block
    # Light tiles start last.
    descends = bool((items[:, 2] * (tile - tile.double().mean())).sum() > 0)
    start = _ordered_by(holder // HEADS, -tile if descends else tile, stored if are_pieces else offset, holder)
    items, holder, tile, offset, row = (x[start] for x in (items, holder, tile, offset, row))

    # Heads of a group that sample other keys belong to another item.
    heads = holder[:, None] * group + torch.arange(group, device="cpu")
    kinds = classes.view(len(classes), -1)[heads]
    member_class = torch.where(kinds[..., 1] == offset[:, None], kinds[..., 0], -1) if strided else kinds[..., 0]
    owner = torch.unique(torch.stack((holder, offset), dim=1), dim=0, return_inverse=True)[1]
    kind = torch.unique(torch.cat((member_class, offset[:, None]), dim=1), dim=0, return_inverse=True)[1]
    first_owner = torch.full((len(items),), len(items), device="cpu").scatter_reduce(0, kind, owner, "amin")
    shown = owner == first_owner[kind]
    # Owners of a kind have the same items in the same order.
    place = _ranks(owner)
    count = torch.bincount(kind[shown], minlength=len(items))
    listing = (count.cumsum(0) - count)[kind] + place
    chosen = torch.nonzero(shown).flatten()
    chosen = chosen[listing[chosen].argsort()]

    which, member = torch.nonzero(member_class[chosen] >= 0, as_tuple=True)
    item = chosen[which]
    source, entries = _entries(rows[member_class[item, member] * blocks + row[item]], full, partial)
    which, member = which[source], member[source]
    index = entries[:, 0] if descends else tiles - 1 - entries[:, 0]
    order = _ordered_by(which, member, index)
    entries, which, member = entries[order], which[order], member[order]
    slot = heads[chosen[which], member] * tiles + entries[:, 0]
    turn = done[slot] + _ranks(slot)
    done += torch.bincount(slot, minlength=len(done))
    length = torch.bincount(which, minlength=len(chosen))
    begin = (length.cumsum(0) - length)[listing]

    records = torch.cat((items, begin[:, None]), dim=1)
    listed = torch.cat((entries, member[:, None], turn[:, None]), dim=1)
    return work._replace(items=records.int().contiguous().to(device), partial=listed.int().contiguous().to(device))


def _ordered_by(*keys: Tensor) -> Tensor:
    """Permutation that sorts by the first key, then by the second, and so on; equal elements keep their order."""
    order = torch.arange(len(keys[0]), device="cpu")
    for key in reversed(keys):
        order = order[key[order].argsort(stable=True)]
    return order


def _ranks(key: Tensor) -> Tensor:
    """Number of earlier elements with the same key, for each element."""
    order = key.argsort(stable=True)
    count = torch.bincount(key)
    rank = torch.empty_like(key)
    rank[order] = torch.arange(len(key), device="cpu") - (count.cumsum(0) - count)[key[order]]
    return rank


def _entries(rows: Tensor, full: Tensor, partial: Tensor) -> tuple[Tensor, Tensor]:
    """Entries of rows of a walk: the row of each, and tile, mask (-1 for a whole tile) and band, int64 [E, 4]."""
    begin, end, base, part_begin, part_end, part_base = rows.unbind(1)
    sources, listed = [], []
    for first, last, shift, table in (
        (begin, end, base, torch.stack((full, torch.full_like(full, -1), *[torch.zeros_like(full)] * 2), dim=1)),
        (part_begin, part_end, part_base, partial),
    ):
        count = last - first
        source = torch.arange(len(rows), device="cpu").repeat_interleave(count)
        within = torch.arange(len(source), device="cpu") - (count.cumsum(0) - count)[source]
        entries = table[first[source] + within]
        entries[:, 0] += shift[source]
        sources.append(source)
        listed.append(entries)
    return torch.cat(sources), torch.cat(listed)
