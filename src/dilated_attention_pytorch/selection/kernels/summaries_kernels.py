"""Block summaries of a sequence, one program per block, and the factors of scores. Names as in `primitives`."""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton.primitives import projected, projected_heads
from .block_scores_kernels import scaled_halves


@triton.jit
def sum_block(
    p_x, p_padding, p_summary, p_units, p_there, p_visible, block, stream, n, blocks, heads, sx_b, sx_h, sx_n,
    UNITS: tl.constexpr, UNIT: tl.constexpr, BU: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, EXTREMES: tl.constexpr, BEFORE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Store the summary of a block of UNITS * UNIT tokens: its mean, with EXTREMES its maximum and minimum, unit means.

    Units are the sub-blocks. `p_there` receives whether each unit has tokens, `p_visible` whether the block has tokens
    and only finite ones; otherwise the summary is 0.

    BU units are read at a time. The tokens of a unit are divided into PARTS interleaved parts, and RUN tokens of each
    part are loaded at once. Sums stay in the registers of a thread until the end of a unit, if it has several parts,
    and of the block. With BEFORE the summary is stored for the next block, and that of the last block for the first.
    """
    SIZE: tl.constexpr = UNITS * UNIT
    sample = (stream // heads).to(tl.int64)
    p_x += sample * sx_b + (stream % heads).to(tl.int64) * sx_h + block.to(tl.int64) * SIZE * sx_n
    p_padding += sample * n + block * SIZE
    place = stream.to(tl.int64) * blocks + ((block + 1) % blocks if BEFORE else block)
    left = n - block * SIZE
    whole = False if PADDING else left >= SIZE
    o_d = tl.arange(0, DP)
    b_column = o_d < D
    o_part = tl.arange(0, BU * PARTS)
    o_first = o_part // PARTS * UNIT + o_part % PARTS
    b_total = tl.zeros([BU * PARTS, DP], tl.float32)
    b_high = tl.full([BU * PARTS, DP], float("-inf"), tl.float32)
    b_low = tl.full([BU * PARTS, DP], float("inf"), tl.float32)
    present = 0 if PADDING else tl.minimum(left, SIZE)
    for unit in range(0, UNITS, BU):
        b_sum = tl.zeros([BU * PARTS, DP], tl.float32)
        for step in range(0, UNIT, RUN * PARTS):
            o_step = o_first + (unit * UNIT + step)
            # All loads are issued before the branch, because the compiler moves none across it, and inside it only a
            # few would be in flight. Tokens past the end are replaced by the last one.
            b_tiles = ()
            for run in tl.static_range(RUN):
                p_tile = p_x + (tl.minimum(o_step + run * PARTS, left - 1) * sx_n)[:, None] + o_d[None, :]
                b_tiles += (tl.load(p_tile) if D == DP else tl.load(p_tile, mask=b_column[None, :], other=0.0),)
            if whole:
                for run in tl.static_range(RUN):
                    b_x = b_tiles[run].to(tl.float32)
                    b_sum += b_x
                    if EXTREMES:
                        b_high = tl.maximum(b_high, b_x)
                        b_low = tl.minimum(b_low, b_x)
            else:
                for run in tl.static_range(RUN):
                    b_real = o_step + run * PARTS < left
                    if PADDING:
                        b_real = b_real & (tl.load(p_padding + o_step + run * PARTS, mask=b_real, other=1) == 0)
                    b_x = b_tiles[run].to(tl.float32)
                    b_sum += tl.where(b_real[:, None], b_x, 0.0)
                    if EXTREMES:
                        b_high = tl.maximum(b_high, tl.where(b_real[:, None], b_x, float("-inf")))
                        b_low = tl.minimum(b_low, tl.where(b_real[:, None], b_x, float("inf")))
        b_total += b_sum
        if PARTS > 1:
            b_sum = tl.sum(b_sum.reshape(BU, PARTS, DP), 1)
        o_u = unit + tl.arange(0, BU)
        if PADDING:
            o_n = o_u[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
            b_count = tl.sum((tl.load(p_padding + o_n, mask=o_n < left, other=1) == 0).to(tl.int32), 1)
            present += tl.sum(b_count, 0)
        else:
            b_count = tl.minimum(tl.maximum(left - o_u * UNIT, 0), UNIT)
        b_mean = b_sum * (1.0 / tl.maximum(b_count, 1))[:, None]
        tl.store(p_units + (place * UNITS + o_u)[:, None] * D + o_d[None, :], b_mean, mask=b_column[None, :])
        tl.store(p_there + place * UNITS + o_u, b_count > 0)
    b_mean = tl.sum(b_total, 0) * (1.0 / tl.maximum(present, 1))
    # A non-finite token makes the mean non-finite. The test compares magnitudes: mean - mean need not be 0, because the
    # compiler may fuse the subtraction with the product before rounding.
    is_finite = (tl.min((tl.abs(b_mean) < float("inf")).to(tl.int32), 0) > 0) & (present > 0)
    tl.store(p_visible + place, is_finite)
    WIDE: tl.constexpr = 3 * D if EXTREMES else D
    tl.store(p_summary + place * WIDE + o_d, tl.where(is_finite, b_mean, 0.0), mask=b_column)
    if EXTREMES:
        tl.store(p_summary + place * WIDE + D + o_d, tl.where(is_finite, tl.max(b_high, 0), 0.0), mask=b_column)
        tl.store(p_summary + place * WIDE + 2 * D + o_d, tl.where(is_finite, tl.min(b_low, 0), 0.0), mask=b_column)
    if is_finite == 0:
        # Other threads of the program wrote the means.
        tl.debug_barrier()
        for unit in range(UNITS):
            tl.store(p_units + (place * UNITS + unit) * D + o_d, tl.zeros([DP], tl.float32), mask=b_column)
            tl.store(p_there + place * UNITS + unit, present < 0)


@triton.jit
def summaries_kernel(
    p_query, p_means, p_own, p_own_there, p_own_visible, p_key, p_summary, p_units, p_there, p_visible, p_padding, n,
    blocks, heads, key_heads, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, OWN_UNITS: tl.constexpr, OWN_UNIT: tl.constexpr,
    OWN_BU: tl.constexpr, OWN_PARTS: tl.constexpr, OWN_RUN: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr,
    BU: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BEFORE: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """`sum_block` for each block of queries, without extremes, and for each block of keys. With BEFORE a query block
    receives the summary of the block before. Programs of all heads of a block are adjacent, because the heads of a
    token are adjacent in memory in most tensors."""
    streams = tl.num_programs(0) // blocks
    block = tl.program_id(0) // streams
    stream = tl.program_id(0) % streams
    key_streams = streams // (heads + key_heads) * key_heads
    if stream < key_streams:
        sum_block(
            p_key, p_padding, p_summary, p_units, p_there, p_visible, block, stream, n, blocks, key_heads,
            sk_b, sk_h, sk_n, UNITS, UNIT, BU, PARTS, RUN, D, DP, True, False, PADDING,
        )  # fmt: skip
    else:
        sum_block(
            p_query, p_padding, p_means, p_own, p_own_there, p_own_visible, block, stream - key_streams, n, blocks,
            heads, sq_b, sq_h, sq_n, OWN_UNITS, OWN_UNIT, OWN_BU, OWN_PARTS, OWN_RUN, D, DP, False, BEFORE, PADDING,
        )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "units"])
def factor_kernel(
    p_means, p_summary, p_units, p_first, p_bias, p_mixture, p_match, p_rows, p_columns, p_right, p_half, p_rest,
    p_scale, p_own, p_project, p_left, blocks, units, heads, s_first, s_bias, s_mixture, s_match, apart, lines,
    key_heads, so_b, so_h, so_n, BM: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    RANK: tl.constexpr, RP: tl.constexpr, UNITS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of `types.Factors`: `rows` of BM query blocks, `columns` of BM key blocks, or `right` of BM units.

    Rows and columns are stored by hidden unit, `apart` elements apart. A block has UNITS units, the sub-blocks of keys;
    if BM is a multiple of that, `right` is also stored as float16 halves with a scale. With GROUP, GROUP query heads
    and KEYS of the `key_heads` share a list: summaries are averaged over them and projections summed, and the query
    side `left` of BM of the `lines` sub-blocks of rows is computed as well.
    """
    stream = tl.program_id(1).to(tl.int64)
    head = stream % heads
    # First key head of the list; several lists may share a key head.
    key_stream = stream * key_heads // heads if key_heads is not None else stream
    tiles = tl.cdiv(blocks, BM)
    tile = tl.program_id(0)
    if tile < 2 * tiles:
        o_i = (tile % tiles) * BM + tl.arange(0, BM)
        b_exist = o_i < blocks
        o_d = tl.arange(0, DP)
        b_column = o_d < D
        p_first += head * s_first
        p_out = p_rows
        if tile < tiles:
            b_mask = b_exist[:, None] & b_column[None, :]
            p_tile = p_means + (stream * GROUP * blocks + o_i)[:, None] * D + o_d[None, :]
            b_x = tl.load(p_tile, mask=b_mask, other=0.0)
            if GROUP > 1:
                for member in range(1, GROUP):
                    b_x += tl.load(p_tile + member * blocks * D, mask=b_mask, other=0.0)
                b_x *= 1.0 / GROUP
        else:
            p_first += D
            p_out = p_columns
            p_summary += key_stream * blocks * (3 * D)
            p_mixture += head * s_mixture
            if KEYS > 1:
                b_x = projected_heads(
                    p_summary, p_mixture, o_i, b_exist, o_d, 3 * D, blocks * (3 * D), 0, 3 * D, D, DP, KEYS, PRECISION
                )
                b_x *= 1.0 / KEYS
            else:
                b_x = projected(p_summary, p_mixture, o_i, b_exist, o_d, 3 * D, 3 * D, D, DP, PRECISION)
        for first in range(0, M, BM):
            o_m = first + tl.arange(0, BM)
            b_mask = b_column[:, None] & (o_m < M)[None, :]
            b_weight = tl.load(p_first + o_m[None, :] * (2 * D) + o_d[:, None], mask=b_mask, other=0.0).to(tl.float32)
            b_out = tl.dot(b_x, b_weight, input_precision=PRECISION)
            if tile < tiles:
                b_out += tl.load(p_bias + head * s_bias + o_m, mask=o_m < M, other=0.0).to(tl.float32)[None, :]
            p_tile = p_out + (stream * M + o_m[None, :]) * apart + o_i[:, None]
            tl.store(p_tile, b_out, mask=b_exist[:, None] & (o_m < M)[None, :])
    elif GROUP > 1 and tile >= 2 * tiles + tl.cdiv(units, BM):
        o_i = (tile - 2 * tiles - tl.cdiv(units, BM)) * BM + tl.arange(0, BM)
        o_r = tl.arange(0, RP)
        p_own += (stream // heads) * so_b + head * GROUP * so_h
        b_left = projected_heads(
            p_own, p_project + head * (GROUP * D * RANK), o_i.to(tl.int64), o_i < lines, o_r, so_n, so_h, D * RANK,
            D, RANK, RP, GROUP, PRECISION,
        )  # fmt: skip
        p_tile = p_left + (stream * lines + o_i)[:, None] * RANK + o_r[None, :]
        tl.store(p_tile, b_left, mask=(o_i < lines)[:, None] & (o_r < RANK)[None, :])
    else:
        o_i = (tile - 2 * tiles) * BM + tl.arange(0, BM)
        o_r = tl.arange(0, RP)
        p_units += key_stream * units * D
        if KEYS > 1:
            b_right = projected_heads(
                p_units, p_match + head * (KEYS * D * RANK), o_i.to(tl.int64), o_i < units, o_r, D, units * D, D * RANK,
                D, RANK, RP, KEYS, PRECISION,
            )  # fmt: skip
        else:
            b_right = projected(
                p_units, p_match + head * s_match, o_i.to(tl.int64), o_i < units, o_r, D, D, RANK, RP, PRECISION
            )
        o_right = (stream * units + o_i)[:, None] * RANK + o_r[None, :]
        b_mask = (o_i < units)[:, None] & (o_r < RANK)[None, :]
        tl.store(p_right + o_right, b_right, mask=b_mask)
        if BM % UNITS == 0:
            b_first, b_second, b_inverse_scale = scaled_halves(b_right, BM // UNITS, UNITS)
            tl.store(p_half + o_right, b_first, mask=b_mask)
            tl.store(p_rest + o_right, b_second, mask=b_mask)
            o_block = (tile - 2 * tiles) * (BM // UNITS) + tl.arange(0, BM // UNITS)
            tl.store(p_scale + stream * blocks + o_block, b_inverse_scale, mask=o_block < blocks)
