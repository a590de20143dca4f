"""What blocks of a sequence add up to, a program for each, and what scores need of that. Names: `triton_primitives`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quick_launch import launch
from .triton_launch import OPTIONS, _precision, held
from .triton_primitives import projected

TILE = 8192
"""Numbers that a program holds at once: enough on their way to keep memory busy."""
PROJECTED = 32
"""Blocks, or sub-blocks, that a program projects, and hidden units of a step."""


@triton.jit
def summary_kernel(
    p_x, p_padding, p_summary, p_units, p_there, p_visible, n, blocks, heads, sx_b, sx_h, sx_n,
    UNITS: tl.constexpr, UNIT: tl.constexpr, BU: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    EXTREMES: tl.constexpr, BEFORE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """One block, of UNITS * UNIT tokens: its mean, with EXTREMES its maximum and minimum, and the means of its units.

    STEP tokens of BU units are read at once. With BEFORE it stands in the place of the block after it, the last in that
    of the first.
    """
    block = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    sample = stream // heads
    p_x += sample * sx_b + (stream % heads) * sx_h
    place = stream * blocks + ((block + 1) % blocks if BEFORE else block)
    o_d = tl.arange(0, DP)
    b_wide = o_d < D
    b_total = tl.zeros([DP], tl.float32)
    b_high = tl.full([DP], float("-inf"), tl.float32)
    b_low = tl.full([DP], float("inf"), tl.float32)
    present = 0
    for unit in range(0, UNITS, BU):
        o_u = unit + tl.arange(0, BU)
        b_sum = tl.zeros([BU, DP], tl.float32)
        b_many = tl.zeros([BU], tl.int32)
        for step in range(0, UNIT, STEP):
            o_n = (block * UNITS + o_u[:, None]) * UNIT + step + tl.arange(0, STEP)[None, :]
            b_real = o_n < n
            if PADDING:
                b_real = b_real & (tl.load(p_padding + sample * n + o_n, mask=b_real, other=1) == 0)
            b_here = b_real[:, :, None] & b_wide[None, None, :]
            p_tile = p_x + o_n[:, :, None].to(tl.int64) * sx_n + o_d[None, None, :]
            b_x = tl.load(p_tile, mask=b_here, other=0.0).to(tl.float32)
            b_sum += tl.sum(b_x, 1)
            b_many += tl.sum(b_real.to(tl.int32), 1)
            if EXTREMES:
                b_high = tl.maximum(b_high, tl.max(tl.max(tl.where(b_here, b_x, float("-inf")), 1), 0))
                b_low = tl.minimum(b_low, tl.min(tl.min(tl.where(b_here, b_x, float("inf")), 1), 0))
        o_unit = place * UNITS + o_u
        b_mean = b_sum / tl.maximum(b_many, 1)[:, None]
        tl.store(p_units + o_unit[:, None] * D + o_d[None, :], b_mean, mask=b_wide[None, :])
        tl.store(p_there + o_unit, b_many > 0)
        b_total += tl.sum(b_sum, 0)
        present += tl.sum(b_many, 0)
    b_mean = b_total / tl.maximum(present, 1)
    # What is not finite spoils the sum, so that the mean tells of every token.
    good = (tl.sum((b_mean - b_mean != 0.0).to(tl.int32), 0) == 0) & (present > 0)
    tl.store(p_visible + place, good)
    WIDE: tl.constexpr = 3 * D if EXTREMES else D
    tl.store(p_summary + place * WIDE + o_d, tl.where(good, b_mean, 0.0), mask=b_wide)
    if EXTREMES:
        tl.store(p_summary + place * WIDE + D + o_d, tl.where(good, b_high, 0.0), mask=b_wide)
        tl.store(p_summary + place * WIDE + 2 * D + o_d, tl.where(good, b_low, 0.0), mask=b_wide)
    if good == 0:
        # Others of the program wrote there.
        tl.debug_barrier()
        for unit in range(UNITS):
            tl.store(p_units + (place * UNITS + unit) * D + o_d, tl.zeros([DP], tl.float32), mask=b_wide)
            tl.store(p_there + place * UNITS + unit, present < 0)


@triton.jit(do_not_specialize=["blocks", "units"])
def factor_kernel(
    p_means, p_summary, p_units, p_first, p_bias, p_mixture, p_match, p_rows, p_columns, p_right, blocks, units, heads,
    s_first, s_bias, s_mixture, s_match,
    BM: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of BM query blocks the rows of `Factors`, of key blocks the columns, both unit by unit, of sub-blocks `right`."""
    stream = tl.program_id(1).to(tl.int64)
    head = stream % heads
    tiles = tl.cdiv(blocks, BM)
    tile = tl.program_id(0)
    if tile < 2 * tiles:
        o_i = (tile % tiles) * BM + tl.arange(0, BM)
        b_exist = o_i < blocks
        o_d = tl.arange(0, DP)
        b_wide = o_d < D
        p_first += head * s_first
        p_out = p_rows
        if tile < tiles:
            p_tile = p_means + (stream * blocks + o_i)[:, None] * D + o_d[None, :]
            b_x = tl.load(p_tile, mask=b_exist[:, None] & b_wide[None, :], other=0.0)
        else:
            p_first += D
            p_out = p_columns
            p_summary += stream * blocks * (3 * D)
            p_mixture += head * s_mixture
            b_x = projected(p_summary, p_mixture, o_i, b_exist, o_d, 3 * D, 3 * D, D, DP, PRECISION)
        for first in range(0, M, BM):
            o_m = first + tl.arange(0, BM)
            b_mask = b_wide[:, None] & (o_m < M)[None, :]
            b_weight = tl.load(p_first + o_m[None, :] * (2 * D) + o_d[:, None], mask=b_mask, other=0.0).to(tl.float32)
            b_out = tl.dot(b_x, b_weight, input_precision=PRECISION)
            if tile < tiles:
                b_out += tl.load(p_bias + head * s_bias + o_m, mask=o_m < M, other=0.0).to(tl.float32)[None, :]
            p_tile = p_out + (stream * M + o_m[None, :]) * blocks + o_i[:, None]
            tl.store(p_tile, b_out, mask=b_exist[:, None] & (o_m < M)[None, :])
    else:
        o_i = (tile - 2 * tiles) * BM + tl.arange(0, BM)
        o_r = tl.arange(0, RP)
        p_units += stream * units * D
        b_right = projected(p_units, p_match + head * s_match, o_i, o_i < units, o_r, D, D, RANK, RP, PRECISION)
        p_tile = p_right + (stream * units + o_i)[:, None] * RANK + o_r[None, :]
        tl.store(p_tile, b_right, mask=(o_i < units)[:, None] & (o_r < RANK)[None, :])


def factored(
    means: Tensor, summary: Tensor, units: Tensor, first: Tensor, bias: Tensor, mixture: Tensor, match: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`rows`, `columns` and `right` of `Factors`: of the means of query blocks (b, h, t, d), and of summaries and units
    of key blocks, by parameters (h or 1, ...): first layer and its bias, mixture of summaries, match."""
    (batch, heads, t, many, d), hidden, rank = units.shape, first.shape[1], match.shape[2]
    made = {"dtype": torch.float32, "device": units.device}
    rows, columns = torch.empty((2, batch, heads, hidden, t), **made).unbind()
    right = torch.empty((batch, heads, t, many, rank), **made)
    apart = [x.stride(0) if len(x) == heads else 0 for x in (first, bias, mixture, match)]
    launch(factor_kernel, (2 * -(-t // PROJECTED) + -(-t * many // PROJECTED), batch * heads),
        means, summary, units, first, bias, mixture, match, rows, columns, right, t, t * many, heads, *apart,
        BM=PROJECTED, M=hidden, D=d, DP=held(d), RANK=rank, RP=held(rank), PRECISION=_precision(torch.float32),
        num_warps=4, num_stages=1, **OPTIONS,
    )  # fmt: skip
    return rows.mT, columns.mT, right


def summarised(
    x: Tensor, size: int, unit: int, padding: Tensor | None, extremes: bool, before: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each block (b, h, t, ...) its mean, then with `extremes` maximum and minimum, the means of its units, which of
    those hold something, and whether any does; 0 and nothing for one that is not finite. With `before`, of the block
    before."""
    batch, heads, n, d = x.shape
    t, units = -(-n // size), size // unit
    x = x if x.stride(3) == 1 else x.contiguous()
    made = {"dtype": torch.float32, "device": x.device}
    summary = torch.empty((batch, heads, t, 3 * d if extremes else d), **made)
    means = torch.empty((batch, heads, t, units, d), **made)
    there = torch.empty((batch, heads, t, units), dtype=torch.bool, device=x.device)
    visible = torch.empty((batch, heads, t), dtype=torch.bool, device=x.device)
    present = there if padding is None else padding.contiguous()
    tokens = max(TILE // held(d), 1)
    launch(summary_kernel, (t, batch * heads),
        x, present, summary, means, there, visible, n, t, heads, *x.stride()[:3],
        UNITS=units, UNIT=unit, BU=min(max(tokens // unit, 1), units), STEP=min(unit, tokens), D=d, DP=held(d),
        EXTREMES=extremes, BEFORE=before,
        PADDING=padding is not None, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return summary, means, there, visible
