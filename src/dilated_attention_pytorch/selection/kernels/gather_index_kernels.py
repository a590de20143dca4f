"""Inverted index of a selection by tokens, from a bit matrix of tokens and key blocks.

Names as in `primitives`, tables as in `types.GatherIndex`. All tables are int32 and share one arena `p_room`; the
parameters `o_` are their offsets in it. A *share* is the 32 * WORDS tokens of one program. P is the number of list
entries and T the number of key blocks that are processed at a time, `wide` the padded number of key blocks, and SIZE
the rows of a query tile. The launches run in the order `mark_tokens_kernel`, `runs_kernel`, `place_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .block_lists_kernels import list_index, popcount


@triton.jit(do_not_specialize=["n", "blocks", "heads", "samples", "listed"])
def mark_tokens_kernel(
    p_indices, p_room, o_bits, o_before, o_counters, n, blocks, heads, samples, listed, wide, s_sample, s_head,
    WORDS: tl.constexpr, P: tl.constexpr, T: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Set one bit per token of a share in the words of the blocks it lists, and count the tokens that list each block.
    The bit matrix is [heads, samples, shares, WORDS, wide], the counts [heads, samples, shares, wide]. Also resets the
    counter of `runs_kernel` for each head."""
    share = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) % heads
    sample = tl.program_id(1).to(tl.int64) // heads
    if (share == 0) & (sample == 0):
        tl.store(p_room + o_counters + head, 0)
    # No other program writes these words, which are adjacent.
    line = (head * samples + sample) * tl.num_programs(0) + share
    p_bits = p_room + o_bits + line * WORDS * wide
    for first in range(0, WORDS * wide, T):
        o_t = first + tl.arange(0, T)
        tl.store(p_bits + o_t, o_t * 0, mask=o_t < WORDS * wide)
    tl.debug_barrier()
    # One dimension, so that a thread keeps its list entries in every load and store, without layout conversions.
    o_i = tl.arange(0, 32 * P) // P
    o_k = tl.arange(0, 32 * P) % P
    for word in range(WORDS):
        begin = share * (WORDS * 32) + word * 32
        p_own = p_indices + sample * s_sample + list_index(head, SHARED) * s_head + begin.to(tl.int64) * listed
        slot = 0
        # Unused entries are last, so that the loop ends at the first step without an entry.
        while slot < listed:
            b_real = (begin + o_i < n) & (slot + o_k < listed)
            b_block = tl.load(p_own + (o_i * listed + slot + o_k), mask=b_real, other=blocks)
            # Relaxed: the words are read after the barrier only, and every ordered atomic would cost a fence.
            tl.atomic_or(p_bits + (word * wide + b_block), 1 << o_i, mask=b_block < blocks, sem="relaxed")
            slot = tl.where(tl.max((b_block < blocks).to(tl.int32), 0) > 0, slot + P, listed)
    tl.debug_barrier()
    for first in range(0, wide, T):
        o_t = first + tl.arange(0, T)
        b_count = o_t * 0
        for kept in tl.static_range(WORDS):
            # Atomics write to L2; a volatile load bypasses a stale line in L1.
            b_count += popcount(tl.load(p_bits + kept * wide + o_t, mask=o_t < wide, other=0, volatile=True))
        tl.store(p_room + o_before + line * wide + o_t, b_count, mask=o_t < wide)


@triton.jit(do_not_specialize=["shares", "blocks"])
def runs_kernel(
    p_room, o_before, o_first, o_total, o_counters, shares, blocks, wide, SIZE: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Prefix sums for BT key tiles: tokens of earlier shares that list each, and first query tile of each key tile.
    Counts over shares are replaced by their exclusive prefix sum, and the total is stored. The tokens of a key tile
    fill whole query tiles of SIZE rows; the last program of a head to finish sums those over key tiles."""
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
        b_count = tl.load(p_before + o_s * wide, mask=o_s < shares, other=0)
        tl.store(p_before + o_s * wide, b_total[None, :] + tl.cumsum(b_count, 0) - b_count, mask=o_s < shares)
        b_total += tl.sum(b_count, 0)
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
            # Other programs wrote them; a volatile load bypasses a stale line in L1.
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
    """Write the gathered row of each list entry of a share of tokens, and the tables of some key tiles.

    The row of an entry is the first row of its key tile plus the number of earlier tokens that list the tile: the
    prefix sum of `runs_kernel` plus the bits set before the token's. The programs of a head also divide the key tiles:
    they write the key tile of each query tile, the filler rows, and the starting order of key tiles, the most query
    tiles first. Tokens are numbered over all samples if `first_token` is None; otherwise they are tokens of one sample
    from `first_token` on.
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
        # Filler: rows after the last token of a key tile, up to a whole query tile.
        o_rest = begin * SIZE + tl.load(p_room + o_total + head * key_tiles + tile) + o_r
        tl.store(p_source + o_rest, o_r * 0 - 1, mask=o_rest < end * SIZE)
        if head % GROUP == 0:
            own_tiles = count_query_tiles(p_first, tile, tile >= 0, key_tiles, GROUP)
            place = 0
            for first in range(0, key_tiles, R):
                o_t = first + tl.arange(0, R)
                b_here = o_t < key_tiles
                b_other = tl.where(b_here, count_query_tiles(p_first, o_t, b_here, key_tiles, GROUP), -1)
                place += tl.sum(((b_other > own_tiles) | ((b_other == own_tiles) & (o_t < tile))).to(tl.int32), 0)
            tl.store(p_room + o_order + head // GROUP * key_tiles + place, tile)
    # Query tiles of filler alone, behind those of the last key tile.
    program = sample.to(tl.int32) * tl.num_programs(0) + share
    for first in range(
        tl.load(p_first + key_tiles) + program * SIZE, rows // SIZE, samples * tl.num_programs(0) * SIZE
    ):
        tl.store(p_tile + first + o_r, o_r * 0 + key_tiles, mask=first + o_r < rows // SIZE)
    # One dimension, so that a thread keeps its list entries in every load and store, without layout conversions.
    o_i = tl.arange(0, 32 * P) // P
    o_k = tl.arange(0, 32 * P) % P
    for window in range(0, blocks, T):
        o_t = window + tl.arange(0, T)
        b_before = tl.load(p_room + o_before + line * wide + o_t, mask=o_t < wide, other=0)
        b_next = tl.load(p_first + sample * blocks + o_t, mask=o_t < blocks, other=0) * SIZE + b_before
        # Loop invariants are recomputed: kept in registers, they would prevent a second program per multiprocessor.
        for word in tl.range(WORDS, disable_licm=True):
            b_bits = tl.load(p_room + o_bits + (line * WORDS + word) * wide + o_t, mask=o_t < wide, other=0)
            begin = share * (WORDS * 32) + word * 32
            p_own = p_indices + sample * s_sample + list_index(head, SHARED) * s_head + begin.to(tl.int64) * listed
            p_place = p_room + o_place + ((head * samples + sample) * n + begin) * listed
            used = listed
            o_own = o_i * listed + o_k
            for slot in tl.range(0, listed, P, disable_licm=True):
                b_real = (begin + o_i < n) & (slot + o_k < listed)
                b_block = tl.load(p_own + o_own, mask=b_real & (slot + o_k < used), other=blocks)
                # Unused entries are last: after a step without an entry, `used` is 0 and no more are loaded.
                used *= tl.max((b_block < blocks).to(tl.int32), 0)
                b_here = (b_block >= window) & (b_block < window + T) & (b_block < blocks)
                b_place = b_block * 0 + rows
                if used > 0:
                    b_at = tl.where(b_here, b_block - window, 0)
                    b_within = popcount(tl.gather(b_bits, b_at, 0) & ((1 << o_i) - 1))
                    b_place = tl.where(b_here, tl.gather(b_next, b_at, 0) + b_within, rows)
                    if first_token is None:
                        tl.store(p_source + b_place, sample.to(tl.int32) * n + begin + o_i, mask=b_here)
                    else:
                        tl.store(p_source + b_place, first_token + begin + o_i, mask=b_here)
                tl.store(p_place + o_own, b_place, mask=b_real & (b_here | (b_block >= blocks)))
                o_own += P
            b_next += popcount(b_bits)


@triton.jit
def count_query_tiles(p_first, o_tile, b_here, key_tiles, GROUP: tl.constexpr):
    """Number of query tiles of the key tiles `o_tile`, summed over the GROUP query heads of a key head."""
    b_tiles = o_tile * 0
    for member in tl.static_range(GROUP):
        p_run = p_first + member * (key_tiles + 1) + o_tile
        b_tiles += tl.load(p_run + 1, mask=b_here, other=0) - tl.load(p_run, mask=b_here, other=0)
    return b_tiles
