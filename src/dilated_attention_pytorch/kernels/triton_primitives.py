"""Pieces shared by the Triton kernels: where a tile lies, how it is loaded, which of its elements count.

Names: `p_` pointers, `o_` offsets, `b_` blocks of values. BLOCK is the plan's tile edge; BM and BN are the rows of
queries and of keys a kernel holds at once, each dividing BLOCK; CAREFUL are the rows it streams at once where something
is not finite. D and E are the widths of keys and of values,
DP and EP the powers of two that hold them.
"""

# A condition on a compile-time constant must stand alone: joined to a value it would be decided at run time.

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_KEY = tl.constexpr(float("-inf"))


@triton.jit
def tile_span(p_axis, tile, tiles, offset, length, BLOCK: tl.constexpr, STRIDED: tl.constexpr):
    """First token of a tile for one head, and the token just past its segment, both int64."""
    if STRIDED:
        return tl.load(p_axis + tile) + offset, tl.load(p_axis + tiles + tile)
    else:
        return tile.to(tl.int64) * BLOCK, length


@triton.jit
def room_left(first, end):
    """Tokens from `first` to the end of the segment, int32; more than any tile spans where there is more."""
    return tl.minimum(end - first, 1 << 30).to(tl.int32)


@triton.jit
def load_rows(p_rows, b_exist, o_d, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, BOUNDED: tl.constexpr):
    """Rows of a tile, [ROWS, PADDED_WIDTH], zero where a row does not exist."""
    if BOUNDED:
        if WIDTH < PADDED_WIDTH:
            return tl.load(p_rows, mask=b_exist[:, None] & (o_d < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(p_rows, mask=b_exist[:, None], other=0.0)
    else:
        if WIDTH < PADDED_WIDTH:
            return tl.load(p_rows, mask=(o_d < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(p_rows)


@triton.jit
def store_rows(p_rows, b_value, b_exist, o_d, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    """Write the rows that exist, cast to what the pointer holds."""
    b_value = b_value.to(p_rows.dtype.element_ty)
    if WIDTH < PADDED_WIDTH:
        tl.store(p_rows, b_value, mask=b_exist[:, None] & (o_d < WIDTH)[None, :])
    else:
        tl.store(p_rows, b_value, mask=b_exist[:, None])


@triton.jit
def element_mask(p_masks, mask, o_i, o_j, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Which elements of a partial tile count; `o_i` are its query and `o_j` its key elements, already broadcastable.

    A mask is its band, and with BITS also its words, read only where the band is empty.
    """
    WORDS: tl.constexpr = (BLOCK + 31) // 32
    p_mask = p_masks + mask.to(tl.int64) * (2 + BLOCK * WORDS if BITS else 2)
    lo = tl.load(p_mask)
    hi = tl.load(p_mask + 1)
    b_ok = (o_j - o_i >= lo) & (o_j - o_i <= hi)
    if BITS:
        # Chosen without a branch: triton 3.6 cannot compile a branch that yields the mask of a float32 product.
        b_use = (o_i + o_j + 1) * (lo > hi).to(tl.int32) > 0  # [BM, BN]
        b_word = tl.load(p_mask + 2 + o_i * WORDS + o_j // 32, mask=b_use, other=0)
        b_ok = b_ok | (((b_word >> (o_j % 32)) & 1) != 0)
    return b_ok


@triton.jit
def spoilt(b_rows):
    """Whether some element is NaN, as a scalar."""
    return tl.max(tl.max((b_rows != b_rows).to(tl.int32), 1), 0) > 0


@triton.jit
def contained(b_sum, b_rows, b_seen, PRECISION: tl.constexpr):
    """NaN in the sum where a row of it sees what is not finite, and the streamed rows with 0 in its place.

    A masked weight is 0, but 0 times NaN is NaN: a plain product would carry it to rows that may not see it.
    """
    b_bad = (b_rows - b_rows) != 0.0
    b_met = tl.dot(b_seen.to(b_rows.dtype), b_bad.to(b_rows.dtype), input_precision=PRECISION)
    return tl.where(b_met > 0.0, float("nan"), b_sum), tl.where(b_bad, 0.0, b_rows).to(b_rows.dtype)


@triton.jit
def careful_entry(p_lists, mask_shift, full_begin, full_end, full_base, partial_begin, partial_base, index):
    """Entry `index` of a row, counted over whole tiles and then partial ones: tile, mask, whether it is whole."""
    whole = index < full_end - full_begin
    at = tl.where(whole, full_begin + index, partial_begin + index - (full_end - full_begin))
    tile = tl.where(whole, full_base, partial_base) + tl.load(p_lists + at)
    return tile, tl.load(p_lists + mask_shift + at, mask=index >= full_end - full_begin, other=0), whole


@triton.jit
def row_of_member(p_heads, p_rows, head, k_offset, k_tiles, tile):
    """The entries of one query head for a key tile; none where the head sits out or samples another residue."""
    kind = tl.load(p_heads + head * 4 + 1)
    mine = (kind >= 0) & (tl.load(p_heads + head * 4 + 3) == k_offset)
    p_own = p_rows + (tl.where(mine, kind, 0) * k_tiles + tile) * 6
    full_begin = tl.load(p_own)
    full_end = tl.where(mine, tl.load(p_own + 1), full_begin)
    partial_begin = tl.load(p_own + 3)
    partial_end = tl.where(mine, tl.load(p_own + 4), partial_begin)
    return full_begin, full_end, tl.load(p_own + 2), partial_begin, partial_end, tl.load(p_own + 5)


@triton.jit
def tokens_of(p_positions, b_row, b_exist, POSITIONS: tl.constexpr):
    """What rows are called in dropout: their own numbers, or what the call gives for them."""
    if POSITIONS:
        return tl.load(p_positions + b_row, mask=b_exist, other=0)
    else:
        return b_row


@triton.jit
def scramble(b_x):
    """`dropout.mix` in uint32."""
    b_x = b_x ^ (b_x >> 16)
    b_x = b_x * tl.full([], 0x7FEB352D, tl.uint32)
    b_x = b_x ^ (b_x >> 15)
    b_x = b_x * tl.full([], 0x846CA68B, tl.uint32)
    return b_x ^ (b_x >> 16)


@triton.jit
def dropout_rows(p_seed, batch_head, b_query):
    """The part of `dropout.kept` that depends on the row alone, uint32 like `b_query`."""
    seed = tl.load(p_seed)
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    stream = scramble(low ^ scramble(high + batch_head.to(tl.uint32)))
    return scramble(stream + b_query.to(tl.uint32))


@triton.jit
def dropout_kept(b_row, b_key, threshold):
    """Whether each weight survives; `b_row` from `dropout_rows` and key tokens, already broadcastable."""
    b_word = scramble(b_row ^ (b_key.to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32)))
    return b_word >= threshold.to(tl.uint32)
