"""Triton kernels before and after the Hopper backward: delta of every row, and conversion of the dQ accumulator.

Names: `p_` pointer, `b_` block, `o_` offset.
"""

from __future__ import annotations

import triton
import triton.language as tl

PIECE_FLOATS = tl.constexpr(64 * 64)
"""Elements of a piece of dQ; see `dkv_kernel`."""


@triton.jit
def prepare_bwd_kernel(
    p_out, p_do, p_lse, p_dlse, p_delta, p_sum, p_next, heads, tiles, n, so_b, so_h, so_n, sg_b, sg_h, sg_n, sl_b, sl_h,
    sl_n, BM: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, LSE_GRAD: tl.constexpr, ZERO: tl.constexpr,
    COUNTERS: tl.constexpr,
):  # fmt: skip
    """Compute delta = rowsum(dO * O) - dLSE of a tile of query rows, and zero its dQ accumulator.

    Tiles have D columns, of which rows of the output have the first WIDTH.
    """
    index = tl.program_id(0).to(tl.int64)
    tile = index % tiles
    row = index // tiles
    head = row % heads
    batch = row // heads
    o_q = tile * BM + tl.arange(0, BM)
    o_d = tl.arange(0, D)
    b_exist = o_q < n
    b_here = b_exist[:, None]
    if WIDTH < D:
        b_here = b_here & (o_d < WIDTH)[None, :]
    b_out = tl.load(p_out + batch * so_b + head * so_h + o_q[:, None] * so_n + o_d[None, :], mask=b_here, other=0.0)
    b_do = tl.load(p_do + batch * sg_b + head * sg_h + o_q[:, None] * sg_n + o_d[None, :], mask=b_here, other=0.0)
    b_delta = tl.sum(b_out.to(tl.float32) * b_do.to(tl.float32), 1)
    if LSE_GRAD:
        # The LSE of a row without a key is constant -inf, so its gradient is dropped.
        b_met = tl.load(p_lse + row * n + o_q, mask=b_exist, other=float("-inf")) != float("-inf")
        b_delta -= tl.load(p_dlse + batch * sl_b + head * sl_h + o_q * sl_n, mask=b_met, other=0.0)
    if index == 0:
        tl.store(p_next + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))
    tl.store(p_delta + row * n + o_q, b_delta, mask=b_exist)
    if ZERO:
        o_sum = tl.arange(0, BM * D)
        tl.store(p_sum + index * BM * D + o_sum, tl.zeros([BM * D], tl.float32))


@triton.jit(do_not_specialize=["heads", "tiles", "n", "rate", "scale"])
def finish_dq_kernel(
    p_sum, p_dq, p_tiles, p_heads, heads, tiles, n, sx_b, sx_h, sx_n, rate, scale,
    BM: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """Convert the accumulator to dQ: scaled and in row order; rows of a strided part are added to dQ.

    Tiles of the accumulator have D columns, of which rows of dQ have the first WIDTH.
    """
    index = tl.program_id(0).to(tl.int64)
    tile = index % tiles
    head = index // tiles % heads
    batch = index // tiles // heads
    o_row = tl.arange(0, BM)[:, None]
    o_col = tl.arange(0, D)[None, :]
    piece = o_row // 64 + o_col // 64
    row = o_row % 64
    col = o_col % 64
    lane = (row // 16) * 32 + (row % 8) * 4 + (col // 2) % 4
    o_sum = piece * PIECE_FLOATS + (col // 8) * 512 + lane * 4 + (row // 8) % 2 * 2 + col % 2
    b_dq = tl.load(p_sum + index * BM * D + o_sum) * scale
    o_q = tile * BM + o_row
    end = n
    if STRIDED:
        p_tile = p_tiles + tile * BM // BLOCK * 2
        o_q = tl.load(p_tile) + tl.load(p_heads + head * 3 + 2) + (o_q % BLOCK) * rate
        end = tl.load(p_tile + 1)
    p_out = p_dq + batch * sx_b + head * sx_h + o_q.to(tl.int64) * sx_n + o_col
    b_here = o_q < end
    if WIDTH < D:
        b_here = b_here & (o_col < WIDTH)
    if STRIDED:
        b_dq += tl.load(p_out, mask=b_here, other=0.0)
    tl.store(p_out, b_dq.to(p_dq.dtype.element_ty), mask=b_here)
