"""Lists of meetings, stored so that rows with the same list relative to their place share one copy."""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import FULL_BEGIN, FULL_END, PARTIAL_BEGIN, PARTIAL_END, Walk


def build_walk(row: Tensor, tile: Tensor, mask: Tensor, bases: tuple[Tensor, ...]) -> Walk:
    """Store meetings ordered by row (int64 each; mask -1 where whole) for one head class.

    `bases` are tiles, int64 [rows], that a row's list may be counted from, the most promising first.
    """
    whole = mask < 0
    if bool(whole.all()):
        some = row[:0], tile[:0], mask[:0]
    else:
        some = row[~whole], tile[~whole], mask[~whole]
        row, tile = row[whole], tile[whole]
    full, _, full_table = _store(row, tile, None, bases)
    partial, masks, partial_table = _store(*some, bases)
    table = torch.cat([full_table, partial_table], 1).to(torch.int32)
    return Walk(table, full, partial, masks, start_order(table))


def run_walk(
    first: Tensor, count: Tensor, row: Tensor, tile: Tensor, mask: Tensor, base: Tensor, bases: tuple[Tensor, ...]
) -> Walk:
    """Store rows that meet a run of tiles whole, `count` from `first`, and others in part as in `build_walk`.

    Runs are stretches of one list of all tiles, counted from `base`.
    """
    partial, masks, partial_table = _store(row, tile, mask, bases)
    begin = torch.where(count > 0, first - base, 0)
    full = torch.arange(int((begin + count).max()), dtype=torch.int32, device=row.device)
    table = torch.cat([torch.stack([begin, begin + count, base], 1), partial_table], 1).to(torch.int32)
    return Walk(table, full, partial, masks, start_order(table))


def join_walks(walks: list[Walk]) -> Walk:
    """Concatenate walks: the rows of class 0, of class 1, and so on."""
    if len(walks) == 1:
        return walks[0]
    tables, stored, stored_partial = [], 0, 0
    for walk in walks:
        shift = torch.tensor([stored, stored, 0, stored_partial, stored_partial, 0], device=walk.rows.device)
        tables.append((walk.rows + shift).to(torch.int32))
        stored += len(walk.full)
        stored_partial += len(walk.partial)
    table = torch.cat(tables)
    full, partial, mask = (torch.cat([getattr(w, name) for w in walks]) for name in ("full", "partial", "mask"))
    return Walk(table, full, partial, mask, start_order(table))


def start_order(table: Tensor) -> Tensor:
    """Rows in the order a scheduler should start them."""
    counts = table[:, FULL_END] - table[:, FULL_BEGIN] + table[:, PARTIAL_END] - table[:, PARTIAL_BEGIN]
    return torch.argsort(weight(counts), descending=True, stable=True).to(torch.int32)


def weight(counts: Tensor) -> Tensor:
    """Weight by which rows of so many entries are started, float32 integers, the heaviest first."""
    # Buckets a factor of sqrt(2) wide: heavy rows start first, yet neighbours, which share keys, stay together.
    return (2 * torch.log2(counts.clamp(min=1).float())).round()


def _store(row: Tensor, tile: Tensor, mask: Tensor | None, bases: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Stored tiles and masks, int32, and where each row finds its own: begin, end, base, int64 [rows, 3]."""
    count = torch.bincount(row, minlength=len(bases[0]))
    begin = count.cumsum(0) - count
    sharing = [
        (leader, base) for base in bases if (leader := _leaders(row, tile, mask, base, count, begin)) is not None
    ]
    if not sharing:
        masks = tile[:0] if mask is None else mask
        return _int32(tile), _int32(masks), torch.stack([begin, begin + count, torch.zeros_like(begin)], 1)
    leader, base = min(sharing, key=lambda option: int(_leads(option[0]).sum()))
    leads = _leads(leader)
    stored = leads[row]
    lengths = count * leads
    begin = (lengths.cumsum(0) - lengths)[leader]
    masks = tile[:0] if mask is None else mask[stored]
    return _int32((tile - base[row])[stored]), _int32(masks), torch.stack([begin, begin + count, base], 1)


def _int32(values: Tensor) -> Tensor:
    return values.to(torch.int32)


def _leads(leader: Tensor) -> Tensor:
    return leader == torch.arange(len(leader), device=leader.device)


def _leaders(
    row: Tensor, tile: Tensor, mask: Tensor | None, base: Tensor, count: Tensor, begin: Tensor
) -> Tensor | None:
    """For each row the first row with the same list counted from its base; None when sharing would save little."""
    if not len(row):
        return torch.zeros_like(count)
    last_slot = len(row) - 1
    first, last = tile[begin.clamp(max=last_slot)] - base, tile[(begin + count - 1).clamp(0, last_slot)] - base
    # Cheap and decisive for lists without structure: count, first and last entry already differ.
    if len(torch.unique((count * 0x1F123BB5 + first) * 0x2545F491 + last)) > len(count) // 2:
        return None
    relative = tile - base[row]
    content = relative if mask is None else relative * 0x632BE59BD9B4E019 + mask
    within = torch.arange(len(row), device=row.device) - begin[row]
    word = (content * 0x9E3779B97F4A7C1 + within) * 0x2545F4914F6CDD1D
    word = (word ^ (word >> 29)) * 0x369DEA0F31A53F85
    digest = torch.zeros_like(count).scatter_add_(0, row, word) * 31 + count
    values, group = torch.unique(digest, return_inverse=True)
    own = torch.arange(len(count), device=count.device)
    leader = torch.full_like(values, len(count)).scatter_reduce_(0, group, own, "amin")[group]
    # Digests may collide, so the lists are compared.
    twin = (begin[leader[row]] + within).clamp(max=last_slot)
    equal = (count[leader] == count).all() & (relative[twin] == relative).all()
    if mask is not None:
        equal &= (mask[twin] == mask).all()
    return leader if bool(equal) else None
