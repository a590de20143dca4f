"""Device functions of the Triton kernels: work items, addresses of tiles, and element masks.

Names: `p_` pointers, `o_` offsets, `b_` blocks of values. BLOCK is the tile size of the plan; BM and BN are the query
and key rows that a kernel processes at a time, each dividing BLOCK; CAREFUL is the number of rows streamed at a time if
an input is not finite. D and E are the widths of keys and values, DP and EP the same padded to powers of two.
"""

# A condition on a compile-time constant must stand alone: joined to a value it would be decided at run time.

from __future__ import annotations

import os

import torch

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_KEY = tl.constexpr(float("-inf"))
TANH_0 = tl.constexpr(-0.33333144074185633)
TANH_1 = tl.constexpr(0.13325884127305102)
TANH_2 = tl.constexpr(-0.05304590963211715)
TANH_3 = tl.constexpr(0.017242478446542153)
"""Minimax polynomial p(z) on z <= 1/4: tanh(x) = x + x z p(z) with z = x^2, relative error 1.5e-8."""
STEP_D = tl.constexpr(32)
NO_PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip is not None)
"""Whether inline PTX is unavailable."""


@triton.jit
def rows_of_program(BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Item of a program within its head class, and the ROWS elements of the item's tile that it processes."""
    SUB: tl.constexpr = BLOCK // ROWS
    return tl.program_id(0) // SUB, (tl.program_id(0) % SUB) * ROWS + tl.arange(0, ROWS)


@triton.jit
def owner_of_program(p_owners, item, items, PER_HEAD: tl.constexpr):
    """Sample, head, item over all classes, and residues on the stationary and streamed axis of a program."""
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    offset = 0
    streamed_offset = 0
    if PER_HEAD:
        p_owner = p_owners + head * 4
        head = tl.load(p_owner).to(tl.int64)
        item += tl.load(p_owner + 1) * items
        offset = tl.load(p_owner + 2)
        streamed_offset = tl.load(p_owner + 3)
    return batch, head, item, offset, streamed_offset


@triton.jit
def work_of(p_work, item):
    """Tile of an item (-1 for padding); begin, end and base of its whole, then of its partial tiles; its slot."""
    p_item = p_work + item * 8
    tile = tl.load(p_item)
    full_begin = tl.load(p_item + 1)
    full_end = tl.load(p_item + 2)
    full_base = tl.load(p_item + 3)
    partial_begin = tl.load(p_item + 4)
    partial_end = tl.load(p_item + 5)
    partial_base = tl.load(p_item + 6)
    slot = tl.load(p_item + 7)
    return tile, (full_begin, full_end, full_base, partial_begin, partial_end, partial_base), slot


@triton.jit
def piece_rows(batch, slots, slot, o_i, BLOCK: tl.constexpr):
    """Indices of the rows of a program's owner in the buffer of pieces."""
    return ((batch * tl.num_programs(1) + tl.program_id(1)) * slots + slot) * BLOCK + o_i


@triton.jit
def tile_span(axis, tile, offset, BLOCK: tl.constexpr, STRIDED: tl.constexpr):
    """First token of a tile for one head, and the token just past its segment, both int64.

    An axis is (pointer to starts and ends of its tiles, number of tiles, number of tokens, rate).
    """
    p_axis, tiles, length, _ = axis
    if STRIDED:
        return tl.load(p_axis + tile) + offset, tl.load(p_axis + tiles + tile)
    else:
        return tile.to(tl.int64) * BLOCK, length


@triton.jit
def tokens_of_tile(axis, tile, offset, o_i, BLOCK: tl.constexpr, STRIDED: tl.constexpr):
    """Tokens of the elements of a tile, int64, and a mask of those that exist."""
    first, end = tile_span(axis, tile, offset, BLOCK, STRIDED)
    o_token = first + o_i * axis[3]
    return o_token, o_token < end


@triton.jit
def streamed(axis, tile, offset, index, BLOCK: tl.constexpr, ROWS: tl.constexpr, STRIDED: tl.constexpr):
    """Rows streamed at step `index`: first token, end of the segment, first element of the tile."""
    first, end = tile_span(axis, tile, offset, BLOCK, STRIDED)
    o_sub = (index % (BLOCK // ROWS)) * ROWS
    first += o_sub * axis[3]
    return first, end, o_sub


@triton.jit
def rows_left(first, end):
    """Tokens from `first` to the end of the segment, int32, clamped to a value beyond any tile."""
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
    """Write the rows that exist, cast to the dtype of the pointer."""
    b_value = b_value.to(p_rows.dtype.element_ty)
    if WIDTH < PADDED_WIDTH:
        tl.store(p_rows, b_value, mask=b_exist[:, None] & (o_d < WIDTH)[None, :])
    else:
        tl.store(p_rows, b_value, mask=b_exist[:, None])


@triton.jit
def reference_of(b_lse):
    """LSE in log2 units; inf for rows that do not exist or have no key, so that their weights exp2(s - inf) are 0."""
    return tl.where(b_lse == NO_KEY, float("inf"), b_lse * LOG2E)


@triton.jit
def visible(
    p_masks, mask, whole, b_seen, o_i, o_j, BLOCK: tl.constexpr, MASKED: tl.constexpr, HOLES: tl.constexpr,
    BITS: tl.constexpr, CONTAINED: tl.constexpr,
):  # fmt: skip
    """Mask of the allowed elements of a tile, from query elements `o_i`, key elements `o_j` and streamed rows `b_seen`.

    The arguments are broadcastable. A mask is a band, with BITS also words, which are read only if the band is empty.
    With CONTAINED, `whole` marks a tile without a mask; with HOLES some streamed rows may not exist.
    """
    b_ok = b_seen
    if MASKED:
        WORDS: tl.constexpr = (BLOCK + 31) // 32
        p_mask = p_masks + mask.to(tl.int64) * (2 + BLOCK * WORDS if BITS else 2)
        lo = tl.load(p_mask)
        hi = tl.load(p_mask + 1)
        b_ok = (o_j - o_i >= lo) & (o_j - o_i <= hi)
        if BITS:
            # Without a branch: Triton 3.6 cannot compile a branch that yields the mask of a float32 product.
            b_use = (o_i + o_j + 1) * (lo > hi).to(tl.int32) > 0  # [BM, BN]
            b_word = tl.load(p_mask + 2 + o_i * WORDS + o_j // 32, mask=b_use, other=0)
            b_ok = b_ok | (((b_word >> (o_j % 32)) & 1) != 0)
        if CONTAINED:
            b_ok = b_ok | whole
        if HOLES:
            b_ok = b_ok & b_seen
    return b_ok


@triton.jit
def tanh_and_slope(b_x):
    """tanh(x) and its derivative in float32, from one exp2.

    The relative error is at most 5 * 2^-24 for tanh and (6 + 3|x|) * 2^-24 for the derivative. On a GPU, `ex2.approx`
    (error 2^-22) and `div.full` (2 ulp) add at most 12 * 2^-24 to each.
    """
    b_size = tl.abs(b_x)
    b_u = tl.math.exp2(b_size * (-2.0 * LOG2E))
    b_share = 1.0 / (1.0 + b_u)
    b_z = b_size * b_size
    b_near = b_size + b_size * (b_z * (TANH_0 + b_z * (TANH_1 + b_z * (TANH_2 + b_z * TANH_3))))
    # 1 - u cancels for small |x|, and 1 - tanh(x)^2 for large |x|.
    b_tanh = tl.where(b_size < 0.5, b_near, (1.0 - b_u) * b_share)
    return tl.where(b_x < 0.0, -b_tanh, b_tanh), 4.0 * b_u * b_share * b_share


@triton.jit
def clipped(b_distance, width):
    """Index of a distance on one axis of a bias table."""
    return tl.minimum(tl.maximum(b_distance + width // 2, 0), width - 1).to(tl.int32)


@triton.jit
def bias_index(bias, o_other, b_exist, SIGN: tl.constexpr):
    """Entries of a bias table for stationary rows and streamed tokens, int32; as `bias_index` of `kernels.call`.

    A bias is (pointer to the table of a head or None, pointers to the positions of stationary and of streamed rows or
    None for tokens, entries of the table, columns of a table with two axes or None, tokens of the stationary rows, mask
    of those that exist, distance in tokens of streamed rows, range of the stationary positions). SIGN is 1 if keys are
    streamed and -1 if queries are.
    """
    _, p_places, p_other_places, size, columns, o_own, b_own, _, _ = bias
    o_own = o_own[:, None]
    o_other = o_other[None, :]
    if p_places is None:
        return clipped((o_other.to(tl.int32) - o_own.to(tl.int32)) * SIGN, size)
    else:
        AXES: tl.constexpr = 1 if columns is None else 2
        p_own = p_places + o_own * AXES
        p_other = p_other_places + o_other * AXES
        b_far = tl.load(p_other, mask=b_exist[None, :], other=0) - tl.load(p_own, mask=b_own[:, None], other=0)
        if AXES == 1:
            return clipped(b_far * SIGN, size)
        else:
            b_row = clipped(b_far * SIGN, size // columns)
            b_far = tl.load(p_other + 1, mask=b_exist[None, :], other=0) - tl.load(
                p_own + 1, mask=b_own[:, None], other=0
            )
            return b_row * columns + clipped(b_far * SIGN, columns)


@triton.jit
def range_of_places(p_places, columns, o_own, b_own):
    """Smallest and largest position of stationary rows; meaningless for a table with two axes."""
    b_place = o_own.to(tl.int32)
    if p_places is not None and columns is None:
        b_place = tl.load(p_places + o_own, mask=b_own, other=0)
    return tl.min(b_place, 0), tl.max(b_place, 0)


@triton.jit
def end_entry(bias, first, o_step, b_exist, SIGN: tl.constexpr):
    """First or last entry of a bias table if all pairs of a tile lie beyond that end, otherwise -1.

    The streamed rows are the tokens `first + o_step`. Always -1 for a table with two axes.
    """
    _, p_places, p_other_places, size, columns, _, _, rate, own = bias
    if columns is None:
        low = first.to(tl.int32)
        high = (first + (o_step.shape[0] - 1) * rate).to(tl.int32)
        if p_places is not None:
            b_place = tl.load(p_other_places + first + o_step, mask=b_exist, other=0)
            low = tl.min(b_place, 0)
            high = tl.max(b_place, 0)
        if SIGN == 1:
            nearest = clipped(low - own[1], size)
            farthest = clipped(high - own[0], size)
        else:
            nearest = clipped(own[0] - high, size)
            farthest = clipped(own[1] - low, size)
        return tl.where((farthest == 0) | (nearest == size - 1), nearest, -1)
    else:
        return -1


@triton.jit
def bias_of(bias, entry, first, o_step, b_exist, SIGN: tl.constexpr):
    """Bias of a tile in log2 units, one number for a tile with an `end_entry`."""
    ROWS: tl.constexpr = bias[5].shape[0]
    if entry >= 0:
        b_bias = tl.zeros([ROWS, o_step.shape[0]], tl.float32) + tl.load(bias[0] + entry)
    else:
        b_bias = tl.load(bias[0] + bias_index(bias, first + o_step, b_exist, SIGN))
    return b_bias * LOG2E


@triton.jit
def add_to_ends(table, size, b_low, b_high):
    """Add row sums `b_low` and `b_high` to the first and the last entry of the gradient of a bias table."""
    p_sum, p_bad, p_unit = table
    unit = tl.load(p_unit)
    low, high = tl.sum(b_low, 0), tl.sum(b_high, 0)
    low_is_finite, high_is_finite = (low - low) == 0.0, (high - high) == 0.0
    tl.atomic_add(p_sum, tl.floor(low * unit + 0.5).to(tl.int64), mask=low_is_finite, sem="relaxed")
    tl.atomic_add(p_sum + size - 1, tl.floor(high * unit + 0.5).to(tl.int64), mask=high_is_finite, sem="relaxed")
    tl.atomic_add(p_bad, low, mask=low_is_finite == 0, sem="relaxed")
    tl.atomic_add(p_bad + size - 1, high, mask=high_is_finite == 0, sem="relaxed")


@triton.jit
def add_to_table(table, b_index, b_grad):
    """Add gradients of scores to the gradient of a bias table, at the entries of `bias_index`.

    A table is (pointer to int64 sums, pointer to float32 sums, pointer to a unit). Finite gradients are added in fixed
    point, as integer multiples of 1 / unit, because integer sums do not depend on the order of the programs. Others are
    added in float32, where inf and NaN do not depend on the order either.
    """
    p_sum, p_bad, p_unit = table
    unit = tl.load(p_unit)
    b_finite = (b_grad - b_grad) == 0.0
    b_grad_finite = tl.where(b_finite, b_grad, 0.0)
    # Tiles beyond the table have one entry, which all their elements would add to at once: it receives their sum.
    first = tl.min(tl.min(b_index, 1), 0)
    alone = (first == tl.max(tl.max(b_index, 1), 0)).to(tl.float32)
    total = tl.sum(tl.sum(b_grad_finite, 1), 0) * alone
    tl.atomic_add(p_sum + first, tl.floor(total * unit + 0.5).to(tl.int64), sem="relaxed")
    b_fixed = tl.floor(b_grad_finite * ((1.0 - alone) * unit) + 0.5).to(tl.int64)
    tl.atomic_add(p_sum + b_index, b_fixed, mask=b_fixed != 0, sem="relaxed")
    tl.atomic_add(p_bad + b_index, b_grad, mask=b_finite == 0, sem="relaxed")


@triton.jit
def empty_softmax(BM: tl.constexpr, EP: tl.constexpr):
    """State of a softmax over no key: row maximum, sum of weights, sum of weighted values."""
    return tl.full([BM], NO_KEY, tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM, EP], tl.float32)


@triton.jit
def averaged(b_acc, b_l):
    """Output rows of a softmax state, 0 for rows without a key."""
    return b_acc / tl.where(b_l == 0.0, 1.0, b_l)[:, None]


@triton.jit
def sink_share(p_sink, head, b_lse):
    """Share of the keys in the denominators of rows: sigmoid(LSE - sink of the head), 0 for a row without keys."""
    b_rest = tl.math.exp2((tl.load(p_sink + head).to(tl.float32) - b_lse) * LOG2E)
    return tl.where(b_lse == NO_KEY, 0.0, 1.0 / (1.0 + b_rest))


@triton.jit
def spoilt(b_rows):
    """Whether some element is NaN, as a scalar."""
    return tl.max(tl.max((b_rows != b_rows).to(tl.int32), 1), 0) > 0


@triton.jit
def contained(b_sum, b_rows, b_seen, PRECISION: tl.constexpr):
    """The sum with NaN in rows that see a non-finite element, and the streamed rows with such elements set to 0.

    A masked weight is 0, but 0 * NaN is NaN: a plain product would spread it to rows that may not see it.
    """
    b_bad = (b_rows - b_rows) != 0.0
    b_met = tl.dot(b_seen.to(b_rows.dtype), b_bad.to(b_rows.dtype), input_precision=PRECISION)
    return tl.where(b_met > 0.0, float("nan"), b_sum), tl.where(b_bad, 0.0, b_rows).to(b_rows.dtype)


@triton.jit
def entry_at(p_lists, mask_shift, row, at, MASKED: tl.constexpr):
    """Tile and mask of the entry at index `at` of the lists: a whole tile, or with MASKED a partial tile."""
    tile = row[3 * MASKED + 2] + tl.load(p_lists + at)
    return tile, tl.load(p_lists + mask_shift + at) if MASKED else 0


@triton.jit
def careful_entry(p_lists, mask_shift, row, index):
    """Tile, mask and whether it is whole, of entry `index` of a row; whole tiles come before partial ones."""
    full_begin, full_end, full_base, partial_begin, _, partial_base = row
    whole = index < full_end - full_begin
    at = tl.where(whole, full_begin + index, partial_begin + index - (full_end - full_begin))
    tile = tl.where(whole, full_base, partial_base) + tl.load(p_lists + at)
    return tile, tl.load(p_lists + mask_shift + at, mask=index >= full_end - full_begin, other=0), whole


@triton.jit
def row_of_member(p_heads, p_rows, head, row, k_offset, k_tiles, tile, PER_HEAD: tl.constexpr, MIXED: tl.constexpr):
    """List of a key tile in one query head of a group, and the head's residue; `row` if all heads share one list.

    With MIXED the list is empty for a head without work or with another residue of the keys.
    """
    q_offset = 0
    if PER_HEAD:
        q_offset = tl.load(p_heads + head * 4 + 2)
    if MIXED:
        kind = tl.load(p_heads + head * 4 + 1)
        mine = (kind >= 0) & (tl.load(p_heads + head * 4 + 3) == k_offset)
        p_own = p_rows + (tl.where(mine, kind, 0) * k_tiles + tile) * 6
        full_begin = tl.load(p_own)
        full_end = tl.where(mine, tl.load(p_own + 1), full_begin)
        partial_begin = tl.load(p_own + 3)
        partial_end = tl.where(mine, tl.load(p_own + 4), partial_begin)
        row = full_begin, full_end, tl.load(p_own + 2), partial_begin, partial_end, tl.load(p_own + 5)
    return row, q_offset


@triton.jit
def tokens_of(p_positions, b_row, b_exist, POSITIONS: tl.constexpr):
    """Token numbers of rows in dropout: row numbers, or the positions of the call."""
    if POSITIONS:
        return tl.load(p_positions + b_row, mask=b_exist, other=0)
    else:
        return b_row


@triton.jit
def scrambled(b_x):
    """`scramble` without its first and last step."""
    b_x = b_x * tl.full([], 0x7FEB352D, tl.uint32)
    b_x = b_x ^ (b_x >> 15)
    return b_x * tl.full([], 0x846CA68B, tl.uint32)


@triton.jit
def scramble(b_x):
    """`dropout.mix` in uint32."""
    b_x = scrambled(b_x ^ (b_x >> 16))
    return b_x ^ (b_x >> 16)


@triton.jit
def dropout_rows(p_seed, batch_head, b_query):
    """The part of `dropout.keep_mask` that depends on the row alone, uint32 like `b_query`."""
    seed = tl.load(p_seed)
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    stream = scramble(low ^ scramble(high + batch_head.to(tl.uint32)))
    return scramble(stream + b_query.to(tl.uint32))


@triton.jit
def names_in_dropout(
    p_seed, p_positions, batch, head, heads, o_q, b_exist, q_length, k_length, DROPOUT: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """Dropout state of query rows and the pointer to the tokens of their keys; placeholders without DROPOUT."""
    if DROPOUT:
        p_key_positions = p_positions + (heads + head) * k_length
        b_query = tokens_of(p_positions + head * q_length, o_q, b_exist, POSITIONS)
        return dropout_rows(p_seed, batch * heads + head, b_query), p_key_positions
    else:
        return o_q, p_positions


@triton.jit
def dropout_keep(b_row, b_key, threshold):
    """Mask of weights that dropout keeps, from `dropout_rows` and key tokens, both broadcastable."""
    b_word = scramble(b_row ^ (b_key.to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32)))
    return b_word >= threshold.to(tl.uint32)


@triton.jit
def finite(b_x):
    """The values, with 0 in place of NaN and infinity."""
    if NO_PTX or b_x.dtype != tl.bfloat16:
        return tl.where(tl.abs(b_x.to(tl.float32)) < float("inf"), b_x, 0.0)
    else:
        # Two values at a time: adding 1 to an exponent of all ones sets the sign bit, which is expanded to a mask.
        ASM: tl.constexpr = """{
            .reg .b32 m;
            and.b32 m, $1, 0x7F807F80;
            add.u32 m, m, 0x00800080;
            prmt.b32 m, m, 0, 0xBB99;
            not.b32 m, m;
            and.b32 $0, $1, m;
        }"""
        return tl.inline_asm_elementwise(ASM, "=r,r", [b_x], tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def leading(b_x):
    """Leading 8 bits of a float32 as bfloat16, and the remainder."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_first = (b_bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return b_first, b_x - (b_bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def product(b_left, b_right, b_sum):
    """Product of bfloat16 matrices added to a sum; the interpreter multiplies in float32."""
    if NO_PTX:
        return tl.dot(b_left.to(tl.float32), b_right.to(tl.float32), b_sum, input_precision="ieee")
    else:
        return tl.dot(b_left, b_right, b_sum)


@triton.jit
def projected_step(b_left, p_own, p_project, o_own, o_d, b_real, o_r, s_own, D: tl.constexpr, RANK: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """Add the product of the columns `o_d` of the rows with a matrix (D, RANK) to `b_left`, [rows, RP]."""
    # Loaded first; otherwise the load would be issued only after the rows, whose latency is longer.
    b_mask = (o_d < D)[:, None] & (o_r < RANK)[None, :]
    b_project = tl.load(p_project + o_d[:, None] * RANK + o_r[None, :], mask=b_mask, other=0.0).to(tl.float32)
    b_mask = b_real[:, None] & (o_d < D)[None, :]
    b_own = finite(tl.load(p_own + o_own[:, None] * s_own + o_d[None, :], mask=b_mask, other=0.0))
    if p_own.dtype.element_ty == tl.bfloat16:
        # Three bfloat16 terms represent a float32 exactly, and their products with the rows are exact.
        b_first, b_project = leading(b_project)
        b_second, b_project = leading(b_project)
        b_left = product(b_own, b_project.to(tl.bfloat16), b_left)
        b_left = product(b_own, b_second, b_left)
        return product(b_own, b_first, b_left)
    else:
        return tl.dot(b_own.to(tl.float32), b_project, b_left, input_precision=PRECISION)


@triton.jit
def projected(p_own, p_project, o_own, b_real, o_r, s_own, D: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
              PRECISION: tl.constexpr, STEP: tl.constexpr = STEP_D):  # fmt: skip
    """Product [rows, RP] of rows of width D and a matrix (D, RANK); non-finite elements of the rows count as 0.

    With D = 0 the rows are such products already.
    """
    b_left = tl.zeros([o_own.shape[0], RP], tl.float32)
    if D == 0:
        b_mask = b_real[:, None] & (o_r < RANK)[None, :]
        b_left = tl.load(p_own + o_own[:, None] * s_own + o_r[None, :], mask=b_mask, other=0.0)
    for first in range(0, D, STEP):
        o_d = first + tl.arange(0, STEP)
        b_left = projected_step(b_left, p_own, p_project, o_own, o_d, b_real, o_r, s_own, D, RANK, PRECISION)
    return b_left


@triton.jit
def projected_heads(
    p_own, p_project, o_own, b_real, o_r, s_own, s_head, s_project, D: tl.constexpr, RANK: tl.constexpr,
    RP: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr = 32,
):  # fmt: skip
    """Sum of the products of HEADS heads, `s_head` apart in the rows, with matrices that are `s_project` apart."""
    b_left = tl.zeros([o_own.shape[0], RP], tl.float32)
    STEPS: tl.constexpr = (D + STEP - 1) // STEP
    apart = tl.full([], 0, tl.int64) + s_head
    # One loop, so that loads of the next head are issued ahead.
    for step in range(HEADS * STEPS):
        head = step // STEPS
        o_d = step % STEPS * STEP + tl.arange(0, STEP)
        p_rows, p_matrix = p_own + head * apart, p_project + head * s_project
        b_left = projected_step(b_left, p_rows, p_matrix, o_own, o_d, b_real, o_r, s_own, D, RANK, PRECISION)
    return b_left
