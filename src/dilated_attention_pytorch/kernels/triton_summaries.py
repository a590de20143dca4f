"""What blocks of a sequence add up to, a program for each. Names as in `triton_primitives`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quick_launch import launch
from .triton_launch import OPTIONS, held

TILE = 8192
"""Numbers that a program holds at once: enough on their way to keep memory busy."""


@triton.jit
def summary_kernel(
    p_x, p_padding, p_summary, p_units, p_there, n, blocks, heads, sx_b, sx_h, sx_n,
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
        tl.store(p_there + o_unit, (b_many > 0).to(tl.uint8))
        b_total += tl.sum(b_sum, 0)
        present += tl.sum(b_many, 0)
    b_mean = b_total / tl.maximum(present, 1)
    # What is not finite spoils the sum, so that the mean tells of every token.
    good = (tl.sum((b_mean - b_mean != 0.0).to(tl.int32), 0) == 0) & (present > 0)
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
            tl.store(p_there + place * UNITS + unit, (present < 0).to(tl.uint8))


def summarised(
    x: Tensor, size: int, unit: int, padding: Tensor | None, extremes: bool, before: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each block (b, h, t, ...) its mean, then with `extremes` maximum and minimum, the means of its units, and
    which of those hold something; 0 and nothing for a block that is not finite. With `before`, of the block before."""
    batch, heads, n, d = x.shape
    t, units = -(-n // size), size // unit
    x = x if x.stride(3) == 1 else x.contiguous()
    made = {"dtype": torch.float32, "device": x.device}
    summary = torch.empty((batch, heads, t, 3 * d if extremes else d), **made)
    means = torch.empty((batch, heads, t, units, d), **made)
    there = torch.empty((batch, heads, t, units), dtype=torch.uint8, device=x.device)
    present = there if padding is None else padding.contiguous().view(torch.uint8)
    tokens = max(TILE // held(d), 1)
    launch(summary_kernel, (t, batch * heads),
        x, present, summary, means, there, n, t, heads, *x.stride()[:3],
        UNITS=units, UNIT=unit, BU=min(max(tokens // unit, 1), units), STEP=min(unit, tokens), D=d, DP=held(d),
        EXTREMES=extremes, BEFORE=before,
        PADDING=padding is not None, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return summary, means, there.view(torch.bool)
