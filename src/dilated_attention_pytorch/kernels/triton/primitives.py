"""Pieces shared by the Triton kernels: what a program works on, where a tile lies, which of its elements count.

Names: `p_` pointers, `o_` offsets, `b_` blocks of values. BLOCK is the plan's tile edge; BM and BN are the rows of
queries and of keys a kernel holds at once, each dividing BLOCK; CAREFUL are the rows it streams at once where something
is not finite. D and E are the widths of keys and of values, DP and EP the powers of two that hold them.
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
STEP_D = tl.constexpr(32)
NO_PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip is not None)
"""Whether instructions cannot be given by name."""


@triton.jit
def rows_of_program(BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Which item of its head's class a program works on, and its ROWS elements of that item's tile."""
    SUB: tl.constexpr = BLOCK // ROWS
    return tl.program_id(0) // SUB, (tl.program_id(0) % SUB) * ROWS + tl.arange(0, ROWS)


@triton.jit
def owner_of_program(p_owners, item, items, PER_HEAD: tl.constexpr):
    """Sample and head of a program, its item among those of all classes, residues on stationary and streamed axis."""
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
    """An item's tile, -1 for filler; its row: begin, end and base of whole tiles, then of partial ones; its slot."""
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
    """Where rows of a program's owner lie among the pieces of split rows."""
    return ((batch * tl.num_programs(1) + tl.program_id(1)) * slots + slot) * BLOCK + o_i


@triton.jit
def tile_span(axis, tile, offset, BLOCK: tl.constexpr, STRIDED: tl.constexpr):
    """First token of a tile for one head, and the token just past its segment, both int64.

    An axis is (starts and ends of its tiles, how many they are, tokens, rate).
    """
    p_axis, tiles, length, _ = axis
    if STRIDED:
        return tl.load(p_axis + tile) + offset, tl.load(p_axis + tiles + tile)
    else:
        return tile.to(tl.int64) * BLOCK, length


@triton.jit
def tokens_of_tile(axis, tile, offset, o_i, BLOCK: tl.constexpr, STRIDED: tl.constexpr):
    """Tokens of a tile's elements, int64, and whether they exist."""
    first, end = tile_span(axis, tile, offset, BLOCK, STRIDED)
    o_token = first + o_i * axis[3]
    return o_token, o_token < end


@triton.jit
def streamed(axis, tile, offset, index, BLOCK: tl.constexpr, ROWS: tl.constexpr, STRIDED: tl.constexpr):
    """Where a tile's rows lie that are streamed at step `index`: first token, end of the segment, first element."""
    first, end = tile_span(axis, tile, offset, BLOCK, STRIDED)
    o_sub = (index % (BLOCK // ROWS)) * ROWS
    first += o_sub * axis[3]
    return first, end, o_sub


@triton.jit
def rows_left(first, end):
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
def reference_of(b_lse):
    """An LSE in log2 units, inf for rows that do not exist or have no key: exp2(s - inf) = 0, so they weigh nothing."""
    return tl.where(b_lse == NO_KEY, float("inf"), b_lse * LOG2E)


@triton.jit
def visible(
    p_masks, mask, whole, b_seen, o_i, o_j, BLOCK: tl.constexpr, MASKED: tl.constexpr, HOLES: tl.constexpr,
    BITS: tl.constexpr, CONTAINED: tl.constexpr,
):  # fmt: skip
    """Which elements of a tile count; `o_i` are its query and `o_j` its key elements, `b_seen` the streamed rows.

    All already broadcastable. A mask is its band, and with BITS also its words, read only where the band is empty.
    With CONTAINED, `whole` says that the mask is none; with HOLES some streamed row may not be there.
    """
    b_ok = b_seen
    if MASKED:
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
        if CONTAINED:
            b_ok = b_ok | whole
        if HOLES:
            b_ok = b_ok & b_seen
    return b_ok


@triton.jit
def empty_softmax(BM: tl.constexpr, EP: tl.constexpr):
    """A softmax over no key: the maximum of each row, the sum of its weights, and that of its weighted values."""
    return tl.full([BM], NO_KEY, tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM, EP], tl.float32)


@triton.jit
def averaged(b_acc, b_l):
    """Rows of a finished softmax, 0 where they met no key."""
    return b_acc / tl.where(b_l == 0.0, 1.0, b_l)[:, None]


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
def entry_at(p_lists, mask_shift, row, at, MASKED: tl.constexpr):
    """Tile and mask of a row's entry, which lies at `at` in the lists: of a whole tile, or MASKED of a partial one."""
    tile = row[3 * MASKED + 2] + tl.load(p_lists + at)
    return tile, tl.load(p_lists + mask_shift + at) if MASKED else 0


@triton.jit
def careful_entry(p_lists, mask_shift, row, index):
    """Entry `index` of a row, counted over whole tiles and then partial ones: tile, mask, whether it is whole."""
    full_begin, full_end, full_base, partial_begin, _, partial_base = row
    whole = index < full_end - full_begin
    at = tl.where(whole, full_begin + index, partial_begin + index - (full_end - full_begin))
    tile = tl.where(whole, full_base, partial_base) + tl.load(p_lists + at)
    return tile, tl.load(p_lists + mask_shift + at, mask=index >= full_end - full_begin, other=0), whole


@triton.jit
def row_of_member(p_heads, p_rows, head, row, k_offset, k_tiles, tile, PER_HEAD: tl.constexpr, MIXED: tl.constexpr):
    """What one query head of a group lists for a key tile, and its residue. Where all share one row, that is `row`.

    Nothing where heads are MIXED and it sits out or samples another residue of the keys.
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
    """What rows are called in dropout: their own numbers, or what the call gives for them."""
    if POSITIONS:
        return tl.load(p_positions + b_row, mask=b_exist, other=0)
    else:
        return b_row


@triton.jit
def scrambled(b_x):
    """`scramble` but for its first and its last step."""
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
    """What dropout knows query rows by, and where it finds the tokens of their keys; anything where nothing drops."""
    if DROPOUT:
        p_key_positions = p_positions + (heads + head) * k_length
        b_query = tokens_of(p_positions + head * q_length, o_q, b_exist, POSITIONS)
        return dropout_rows(p_seed, batch * heads + head, b_query), p_key_positions
    else:
        return o_q, p_positions


@triton.jit
def dropout_keep(b_row, b_key, threshold):
    """Whether each weight survives; `b_row` from `dropout_rows` and key tokens, already broadcastable."""
    b_word = scramble(b_row ^ (b_key.to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32)))
    return b_word >= threshold.to(tl.uint32)


@triton.jit
def finite(b_x):
    """Numbers, and 0 in place of what is none or has no end."""
    if NO_PTX or b_x.dtype != tl.bfloat16:
        return tl.where(tl.abs(b_x.to(tl.float32)) < float("inf"), b_x, 0.0)
    else:
        # Two at a time: exponents of ones alone, one more, reach the first bit, which then is all bits of a mask.
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
    """The first 8 bits of float32 as bfloat16, and what is left."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_first = (b_bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return b_first, b_x - (b_bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def product(b_left, b_right, b_sum):
    """The product of two of bfloat16, and a sum; the interpreter knows none but of other types."""
    if NO_PTX:
        return tl.dot(b_left.to(tl.float32), b_right.to(tl.float32), b_sum, input_precision="ieee")
    else:
        return tl.dot(b_left, b_right, b_sum)


@triton.jit
def projected(p_own, p_project, o_own, b_real, o_r, s_own, D: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
              PRECISION: tl.constexpr, STEP: tl.constexpr = STEP_D):  # fmt: skip
    """Rows of width D times a matrix (D, RANK), [rows, RP]; of the rows, what is not finite counts as 0."""
    b_left = tl.zeros([o_own.shape[0], RP], tl.float32)
    for first in range(0, D, STEP):
        o_d = first + tl.arange(0, STEP)
        # Asked for first, or it would be only when the rows, which come from further away, are there.
        b_mask = (o_d < D)[:, None] & (o_r < RANK)[None, :]
        b_project = tl.load(p_project + o_d[:, None] * RANK + o_r[None, :], mask=b_mask, other=0.0).to(tl.float32)
        b_mask = b_real[:, None] & (o_d < D)[None, :]
        b_own = finite(tl.load(p_own + o_own[:, None] * s_own + o_d[None, :], mask=b_mask, other=0.0))
        if p_own.dtype.element_ty == tl.bfloat16:
            # Three such numbers add up to one of float32, and their products with the rows are exact.
            b_first, b_project = leading(b_project)
            b_second, b_project = leading(b_project)
            b_left = product(b_own, b_project.to(tl.bfloat16), b_left)
            b_left = product(b_own, b_second, b_left)
            b_left = product(b_own, b_first, b_left)
        else:
            b_left = tl.dot(b_own.to(tl.float32), b_project, b_left, input_precision=PRECISION)
    return b_left
