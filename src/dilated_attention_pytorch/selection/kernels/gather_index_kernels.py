"""Inverted selection by tokens, found from one bit for each token and key block.

Names as in `primitives`; tables as in `types.GatherIndex`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .block_lists_kernels import list_of, ones_of


@triton.jit(do_not_specialize=["n", "blocks", "heads", "samples", "listed"])
def mark_tokens_kernel(
    p_indices, p_room, o_bits, o_before, o_counters, n, blocks, heads, samples, listed, wide, s_sample, s_head,
    WORDS: tl.constexpr, P: tl.constexpr, T: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """For a share of 32 * WORDS tokens: a bit of each in the words of the blocks it chose, and how many chose each.

    The launch that comes next finds counters at 0.
    """
    share = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) % heads
    sample = tl.program_id(1).to(tl.int64) // heads
    if (share == 0) & (sample == 0):
        tl.store(p_room + o_counters + head, 0)
    # No other program has bits in these words, which lie closely.
    line = (head * samples + sample) * tl.num_programs(0) + share
    p_bits = p_room + o_bits + line * WORDS * wide
    for first in range(0, WORDS * wide, T):
        o_t = first + tl.arange(0, T)
        tl.store(p_bits + o_t, o_t * 0, mask=o_t < WORDS * wide)
    tl.debug_barrier()
    # In one dimension: threads stay with their choices whatever is read or written.
    o_i = tl.arange(0, 32 * P) // P
    o_k = tl.arange(0, 32 * P) % P
    for word in range(WORDS):
        begin = share * (WORDS * 32) + word * 32
        p_own = p_indices + sample * s_sample + list_of(head, SHARED) * s_head + begin.to(tl.int64) * listed
        slot = 0
        # Slots that are not filled come last.
        while slot < listed:
            b_real = (begin + o_i < n) & (slot + o_k < listed)
            b_block = tl.load(p_own + (o_i * listed + slot + o_k), mask=b_real, other=blocks)
            # Nothing is read until all have done it: an order among them would be paid for with each.
            tl.atomic_or(p_bits + (word * wide + b_block), 1 << o_i, mask=b_block < blocks, sem="relaxed")
            slot = tl.where(tl.max((b_block < blocks).to(tl.int32), 0) > 0, slot + P, listed)
    tl.debug_barrier()
    for first in range(0, wide, T):
        o_t = first + tl.arange(0, T)
        b_many = o_t * 0
        for kept in tl.static_range(WORDS):
            # The bits were set behind the back of what this multiprocessor remembers.
            b_many += ones_of(tl.load(p_bits + kept * wide + o_t, mask=o_t < wide, other=0, volatile=True))
        tl.store(p_room + o_before + line * wide + o_t, b_many, mask=o_t < wide)


@triton.jit(do_not_specialize=["shares", "blocks"])
def runs_kernel(
    p_room, o_before, o_first, o_total, o_counters, shares, blocks, wide, SIZE: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Of BT key tiles: tokens that chose each before each share, and where the tiles of SIZE begin that they fill.

    That is known once all tiles of a head are counted: the last program to end says it of all.
    """
    head = tl.program_id(1).to(tl.int64)
    columns = wide // BT
    sample = tl.program_id(0) // columns
    samples = tl.num_programs(0) // columns
    key_tiles = samples * blocks
    o_b = tl.program_id(0) % columns * BT + tl.arange(0, BT)
    p_before = p_room + o_before + (head * samples + sample) * shares * wide + o_b[None, :]
    b_total = tl.zeros([BT], tl.int32)
    for first in range(0, shares, BS):
        o_s = first + tl.arange(0, BS)[:, None]
        b_many = tl.load(p_before + o_s * wide, mask=o_s < shares, other=0)
        tl.store(p_before + o_s * wide, b_total[None, :] + tl.cumsum(b_many, 0) - b_many, mask=o_s < shares)
        b_total += tl.sum(b_many, 0)
    p_first = p_room + o_first + head * (key_tiles + 1)
    o_tile = sample * blocks + o_b
    tl.store(p_room + o_total + head * key_tiles + o_tile, b_total, mask=o_b < blocks)
    tl.store(p_first + 1 + o_tile, (b_total + SIZE - 1) // SIZE, mask=o_b < blocks)
    tl.debug_barrier()
    if tl.atomic_add(p_room + o_counters + head, 1) == tl.num_programs(0) - 1:
        end = 0
        for first in range(0, key_tiles, P):
            o_t = first + tl.arange(0, P)
            b_here = o_t < key_tiles
            # Others wrote them: not what this multiprocessor may remember.
            b_tiles = tl.load(p_first + 1 + o_t, mask=b_here, other=0, volatile=True)
            tl.store(p_first + 1 + o_t, end + tl.cumsum(b_tiles, 0), mask=b_here)
            end += tl.sum(b_tiles, 0)
        tl.store(p_first, end * 0)


@triton.jit(do_not_specialize=["first_token", "n", "blocks", "heads", "samples", "listed", "rows"])
def place_kernel(
    p_indices, p_room, first_token, o_bits, o_before, o_first, o_total, o_source, o_place, o_tile, o_order, n, blocks,
    heads, samples, listed, wide, rows, s_sample, s_head, WORDS: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    SIZE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """For a share of the tokens: where each choice lies. And for a share of the key tiles: which start first.

    A choice lies as far into its tile's run as there are tokens before it that chose the same. Some tokens of one
    sample are numbered from `first_token` on, which is None for all tokens.
    """
    share = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) % heads
    sample = tl.program_id(1).to(tl.int64) // heads
    key_tiles = samples * blocks
    p_first = p_room + o_first + head * (key_tiles + 1)
    p_source = p_room + o_source + head * rows
    line = (head * samples + sample) * tl.num_programs(0) + share
    o_r = tl.arange(0, SIZE)
    p_tile = p_room + o_tile + head * (rows // SIZE)
    for block in range(share, blocks, tl.num_programs(0)):
        tile = sample.to(tl.int32) * blocks + block
        begin = tl.load(p_first + tile)
        end = tl.load(p_first + tile + 1)
        for first in range(begin, end, SIZE):
            tl.store(p_tile + first + o_r, o_r * 0 + tile, mask=first + o_r < end)
        # Rows behind the last choice of a key tile, up to a whole tile.
        o_rest = begin * SIZE + tl.load(p_room + o_total + head * key_tiles + tile) + o_r
        tl.store(p_source + o_rest, o_r * 0 - 1, mask=o_rest < end * SIZE)
        if head % GROUP == 0:
            chosen = tiles_filled(p_first, tile, tile >= 0, key_tiles, GROUP)
            place = 0
            for first in range(0, key_tiles, R):
                o_t = first + tl.arange(0, R)
                b_here = o_t < key_tiles
                b_chosen = tl.where(b_here, tiles_filled(p_first, o_t, b_here, key_tiles, GROUP), -1)
                place += tl.sum(((b_chosen > chosen) | ((b_chosen == chosen) & (o_t < tile))).to(tl.int32), 0)
            tl.store(p_room + o_order + head // GROUP * key_tiles + place, tile)
    # Tiles that are left over.
    program = sample.to(tl.int32) * tl.num_programs(0) + share
    for first in range(
        tl.load(p_first + key_tiles) + program * SIZE, rows // SIZE, samples * tl.num_programs(0) * SIZE
    ):
        tl.store(p_tile + first + o_r, o_r * 0 + key_tiles, mask=first + o_r < rows // SIZE)
    # In one dimension: threads stay with their choices whatever is read or written.
    o_i = tl.arange(0, 32 * P) // P
    o_k = tl.arange(0, 32 * P) % P
    for window in range(0, blocks, T):
        o_t = window + tl.arange(0, T)
        b_before = tl.load(p_room + o_before + line * wide + o_t, mask=o_t < wide, other=0)
        b_next = tl.load(p_first + sample * blocks + o_t, mask=o_t < blocks, other=0) * SIZE + b_before
        # What every round could compute anew takes the registers of a second program if it is kept.
        for word in tl.range(WORDS, disable_licm=True):
            b_bits = tl.load(p_room + o_bits + (line * WORDS + word) * wide + o_t, mask=o_t < wide, other=0)
            begin = share * (WORDS * 32) + word * 32
            p_own = p_indices + sample * s_sample + list_of(head, SHARED) * s_head + begin.to(tl.int64) * listed
            p_place = p_room + o_place + ((head * samples + sample) * n + begin) * listed
            used = listed
            o_own = o_i * listed + o_k
            for slot in tl.range(0, listed, P, disable_licm=True):
                b_real = (begin + o_i < n) & (slot + o_k < listed)
                b_block = tl.load(p_own + o_own, mask=b_real & (slot + o_k < used), other=blocks)
                # Slots that are not filled come last.
                used *= tl.max((b_block < blocks).to(tl.int32), 0)
                b_here = (b_block >= window) & (b_block < window + T) & (b_block < blocks)
                b_place = b_block * 0 + rows
                if used > 0:
                    b_at = tl.where(b_here, b_block - window, 0)
                    b_within = ones_of(tl.gather(b_bits, b_at, 0) & ((1 << o_i) - 1))
                    b_place = tl.where(b_here, tl.gather(b_next, b_at, 0) + b_within, rows)
                    if first_token is None:
                        tl.store(p_source + b_place, sample.to(tl.int32) * n + begin + o_i, mask=b_here)
                    else:
                        tl.store(p_source + b_place, first_token + begin + o_i, mask=b_here)
                tl.store(p_place + o_own, b_place, mask=b_real & (b_here | (b_block >= blocks)))
                o_own += P
            b_next += ones_of(b_bits)


@triton.jit
def tiles_filled(p_first, o_tile, b_here, key_tiles, GROUP: tl.constexpr):
    """How many tiles of queries key tiles have, over the query heads that read them."""
    b_filled = o_tile * 0
    for member in tl.static_range(GROUP):
        p_run = p_first + member * (key_tiles + 1) + o_tile
        b_filled += tl.load(p_run + 1, mask=b_here, other=0) - tl.load(p_run, mask=b_here, other=0)
    return b_filled
