"""Choices of tokens turned round: for a key block the queries that chose it, found by a bit for each of them.

Names as in `triton_primitives`; tables as in `plan.selected.Chosen`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plan.selected import Chosen, Selection
from .quick_launch import KEPT, Launch, Room
from .triton_launch import OPTIONS, held
from .triton_lists import mark_kernel, ones_of


@triton.jit(do_not_specialize=["words"])
def runs_kernel(p_room, o_bits, o_before, o_first, o_counters, words, SIZE: tl.constexpr, P: tl.constexpr):
    """Of one key tile: tokens that chose it before each word, and where the tiles of SIZE begin that they fill.

    That is known once all tiles of a head are counted: the last program to end says it of all.
    """
    head = tl.program_id(1).to(tl.int64)
    row = head * tl.num_programs(0) + tl.program_id(0)
    total = 0
    for first in range(0, words, P):
        o_w = first + tl.arange(0, P)
        b_many = ones_of(tl.load(p_room + o_bits + row * words + o_w, mask=o_w < words, other=0))
        b_before = total + tl.cumsum(b_many, 0) - b_many
        tl.store(p_room + o_before + row * words + o_w, b_before, mask=o_w < words)
        total += tl.sum(b_many, 0)
    p_first = p_room + o_first + head * (tl.num_programs(0) + 1)
    tl.store(p_first + 1 + tl.program_id(0), (total + SIZE - 1) // SIZE)
    tl.debug_barrier()
    if tl.atomic_add(p_room + o_counters + head, 1) == tl.num_programs(0) - 1:
        end = 0
        for first in range(0, tl.num_programs(0), P):
            o_t = first + tl.arange(0, P)
            b_here = o_t < tl.num_programs(0)
            # Others wrote them: not what this multiprocessor may remember.
            b_tiles = tl.load(p_first + 1 + o_t, mask=b_here, other=0, volatile=True)
            tl.store(p_first + 1 + o_t, end + tl.cumsum(b_tiles, 0), mask=b_here)
            end += tl.sum(b_tiles, 0)
        tl.store(p_first, end * 0)


@triton.jit(do_not_specialize=["n", "blocks", "heads", "samples", "listed", "rows"])
def place_kernel(
    p_indices, p_room, o_bits, o_before, o_first, o_source, o_place, o_tile, o_order, n, blocks, heads, samples, listed,
    rows, s_sample, s_head, SIZE: tl.constexpr, P: tl.constexpr, T: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """For 32 tokens: where each choice lies. And for a share of the key tiles: which start first.

    A choice lies as far into its tile's run as there are tokens before it that chose the same.
    """
    word = tl.program_id(0)
    words = tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64) % heads
    sample = tl.program_id(1).to(tl.int64) // heads
    key_tiles = samples * blocks
    p_first = p_room + o_first + head * (key_tiles + 1)
    o_i = tl.arange(0, 32)[:, None]
    o_token = word * 32 + o_i
    p_own = p_indices + sample * s_sample + head * s_head + o_token.to(tl.int64) * listed
    for slot in range(0, listed, P):
        o_k = slot + tl.arange(0, P)[None, :]
        b_real = (o_token < n) & (o_k < listed)
        b_block = tl.load(p_own + o_k, mask=b_real, other=blocks)
        b_some = b_block < blocks
        b_tile = sample * blocks + b_block
        o_word = (head * key_tiles + b_tile) * words + word
        b_bits = tl.load(p_room + o_bits + o_word, mask=b_some, other=0)
        b_within = tl.load(p_room + o_before + o_word, mask=b_some, other=0) + ones_of(b_bits & ((1 << o_i) - 1))
        b_first = tl.load(p_first + b_tile, mask=b_some, other=0)
        b_place = b_first * SIZE + b_within
        o_entry = ((head * samples + sample) * n + o_token) * listed + o_k
        tl.store(p_room + o_place + o_entry, tl.where(b_some, b_place, rows), mask=b_real)
        p_source = p_room + o_source + head * rows
        tl.store(p_source + b_place, (sample * n + o_token + o_k * 0).to(tl.int32), mask=b_some)
        p_met = p_room + o_tile + head * (rows // SIZE) + b_first + b_within // SIZE
        tl.store(p_met, b_tile.to(tl.int32), mask=b_some & (b_within % SIZE == 0))
    if head % GROUP == 0:
        p_order = p_room + o_order + head // GROUP * key_tiles
        for block in range(word, blocks, words):
            tile = sample.to(tl.int32) * blocks + block
            chosen = tiles_filled(p_first, tile, tile >= 0, key_tiles, GROUP)
            place = 0
            for first in range(0, key_tiles, T):
                o_t = first + tl.arange(0, T)
                b_here = o_t < key_tiles
                b_chosen = tl.where(b_here, tiles_filled(p_first, o_t, b_here, key_tiles, GROUP), -1)
                place += tl.sum(((b_chosen > chosen) | ((b_chosen == chosen) & (o_t < tile))).to(tl.int32), 0)
            tl.store(p_order + place, tile)


@triton.jit
def tiles_filled(p_first, o_tile, b_here, key_tiles, GROUP: tl.constexpr):
    """How many tiles of queries key tiles have, over the query heads that read them."""
    b_filled = o_tile * 0
    for member in tl.static_range(GROUP):
        p_run = p_first + member * (key_tiles + 1) + o_tile
        b_filled += tl.load(p_run + 1, mask=b_here, other=0) - tl.load(p_run, mask=b_here, other=0)
    return b_filled


class TurnedTokens:
    """What turns round selections of some sizes by tokens, where key heads are each read by `group` query heads."""

    def __init__(
        self, device: torch.device, shape: tuple[int, ...], apart: tuple[int, ...], size: int, t: int, group: int
    ) -> None:
        batch, heads, n, listed = shape
        key_tiles, words, each = batch * t, -(-n // 32), batch * n * listed
        query_tiles = max(each // size + min(key_tiles, each), 1)
        rows = query_tiles * size
        shapes = {"source": (heads, rows), "place": (heads, batch * n, listed), "tile": (heads, query_tiles)}
        shapes |= {"first": (heads, key_tiles + 1), "order": (heads // group, key_tiles), "counters": (heads,)}
        shapes |= dict.fromkeys(("bits", "before"), (heads, key_tiles, words))
        self._room = Room(torch.int32, device, shapes)
        begin, sizes = self._room.begin, (n, t, heads, batch, listed)
        once = {"P": min(held(listed), 64), "num_warps": 4} | OPTIONS
        self._mark = Launch(
            mark_kernel, device, *begin("bits", "source", "tile", "counters"), *sizes, heads * rows,
            heads * query_tiles, heads, *apart, FILL=-1, **once,
        )  # fmt: skip
        self._count = Launch(
            runs_kernel, device, *begin("bits", "before", "first", "counters"), words,
            SIZE=size, P=min(held(words), 1024), **OPTIONS,
        )  # fmt: skip
        self._place = Launch(
            place_kernel, device, *begin("bits", "before", "first", "source", "place", "tile", "order"), *sizes, rows,
            *apart, SIZE=size, T=min(held(key_tiles), 1024), GROUP=group, **once,
        )  # fmt: skip
        self._choices, self._runs = (words, batch * heads, 1), (key_tiles, heads, 1)

    def __call__(self, indices: Tensor) -> Chosen:
        memory = self._room.made()
        self._mark(self._choices, (indices, memory))
        self._count(self._runs, (memory,))
        self._place(self._choices, (indices, memory))
        return Chosen(*[self._room.tensor(memory, name) for name in Chosen._fields])


_turned_tokens = lru_cache(maxsize=KEPT)(TurnedTokens)


def chosen_tokens(selection: Selection, group: int = 1) -> Chosen:
    """`plan.selected.chosen_tokens`, in a bit a token and key tile instead of a sort, and in numbers of 32 bits."""
    indices = selection.indices
    apart = indices.stride()
    # Some heads of all are read where they lie.
    if apart[2:] != (indices.shape[3], 1):
        indices = indices.contiguous()
        apart = indices.stride()
    told = selection.block_size, selection.blocks, group
    return _turned_tokens(indices.device, indices.shape, apart[:2], *told)(indices)
