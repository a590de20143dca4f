"""What blocks of a sequence add up to, a program for each, and what scores need of that. Names: `triton_primitives`."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .hopper_launch import Grid
from .quick_launch import KEPT, Launch, Room
from .triton_launch import OPTIONS, _precision, held
from .triton_primitives import projected
from .triton_selection import Halves, halved

TILE = 8192
"""Numbers that a program holds at once: enough on their way to keep memory busy."""
PROJECTED = 32
"""Blocks, or sub-blocks, that a program projects, and hidden units of a step."""


@triton.jit
def sum_block(
    p_x, p_padding, p_summary, p_units, p_there, p_visible, block, stream, n, blocks, heads, sx_b, sx_h, sx_n,
    UNITS: tl.constexpr, UNIT: tl.constexpr, BU: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    EXTREMES: tl.constexpr, BEFORE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """One block, of UNITS * UNIT tokens: its mean, with EXTREMES its maximum and minimum, and the means of its units.

    STEP tokens of BU units are read at once. With BEFORE it stands in the place of the block after it, the last in that
    of the first.
    """
    stream = stream.to(tl.int64)
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


@triton.jit
def summary_kernel(
    p_x, p_padding, p_summary, p_units, p_there, p_visible, n, blocks, heads, sx_b, sx_h, sx_n,
    UNITS: tl.constexpr, UNIT: tl.constexpr, BU: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    EXTREMES: tl.constexpr, BEFORE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """`sum_block` of every block."""
    sum_block(
        p_x, p_padding, p_summary, p_units, p_there, p_visible, tl.program_id(0), tl.program_id(1), n, blocks, heads,
        sx_b, sx_h, sx_n, UNITS, UNIT, BU, STEP, D, DP, EXTREMES, BEFORE, PADDING,
    )  # fmt: skip


@triton.jit
def summaries_kernel(
    p_query, p_means, p_own, p_own_there, p_own_visible, p_key, p_summary, p_units, p_there, p_visible, p_padding, n,
    blocks, heads, key_heads, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, OWN_UNITS: tl.constexpr, OWN_UNIT: tl.constexpr,
    OWN_BU: tl.constexpr, OWN_STEP: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, BU: tl.constexpr,
    STEP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BEFORE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """`sum_block` of every block of queries, without extremes, and with BEFORE of the one before, and of keys."""
    block = tl.program_id(0)
    stream = tl.program_id(1)
    streams = tl.num_programs(1) // (heads + key_heads) * key_heads
    if stream < streams:
        sum_block(
            p_key, p_padding, p_summary, p_units, p_there, p_visible, block, stream, n, blocks, key_heads,
            sk_b, sk_h, sk_n, UNITS, UNIT, BU, STEP, D, DP, True, False, PADDING,
        )  # fmt: skip
    else:
        sum_block(
            p_query, p_padding, p_means, p_own, p_own_there, p_own_visible, block, stream - streams, n, blocks, heads,
            sq_b, sq_h, sq_n, OWN_UNITS, OWN_UNIT, OWN_BU, OWN_STEP, D, DP, False, BEFORE, PADDING,
        )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "units"])
def factor_kernel(
    p_means, p_summary, p_units, p_first, p_bias, p_mixture, p_match, p_rows, p_columns, p_right, p_half, p_rest,
    p_scale, blocks, units, heads, s_first, s_bias, s_mixture, s_match, apart,
    BM: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    UNITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of BM query blocks the rows of `Factors`, of key blocks the columns, both unit by unit, of sub-blocks `right`.

    A block has UNITS sub-blocks. Where BM hold whole blocks, `right` is also `split`.
    """
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
            p_tile = p_out + (stream * M + o_m[None, :]) * apart + o_i[:, None]
            tl.store(p_tile, b_out, mask=b_exist[:, None] & (o_m < M)[None, :])
    else:
        o_i = (tile - 2 * tiles) * BM + tl.arange(0, BM)
        o_r = tl.arange(0, RP)
        p_units += stream * units * D
        b_right = projected(p_units, p_match + head * s_match, o_i, o_i < units, o_r, D, D, RANK, RP, PRECISION)
        o_right = (stream * units + o_i)[:, None] * RANK + o_r[None, :]
        b_mask = (o_i < units)[:, None] & (o_r < RANK)[None, :]
        tl.store(p_right + o_right, b_right, mask=b_mask)
        if BM % UNITS == 0:
            b_first, b_second, b_undone = halved(b_right, BM // UNITS, UNITS)
            tl.store(p_half + o_right, b_first, mask=b_mask)
            tl.store(p_rest + o_right, b_second, mask=b_mask)
            o_block = (tile - 2 * tiles) * (BM // UNITS) + tl.arange(0, BM // UNITS)
            tl.store(p_scale + stream * blocks + o_block, b_undone, mask=o_block < blocks)


@lru_cache(maxsize=KEPT)
def _factoring(
    device: torch.device, batch: int, heads: int, t: int, many: int, d: int, hidden: int, rank: int, *steps: int
) -> tuple[Launch, Grid, Room, Room]:
    constants = {"BM": PROJECTED, "M": hidden, "D": d, "DP": held(d), "RANK": rank, "RP": held(rank), "UNITS": many}
    constants |= {"PRECISION": _precision(torch.float32), "num_warps": 4, "num_stages": 1} | OPTIONS
    tiles, apart = 2 * -(-t // PROJECTED) + -(-t * many // PROJECTED), held(t)
    launch = Launch(factor_kernel, device, t, t * many, heads, *steps, apart, **constants)
    side = (batch, heads, t, hidden), (heads * hidden * apart, hidden * apart, 1, apart)
    right = (batch, heads, t, many, rank), None
    whole = Room(torch.float32, device, side, side, right, ((batch, heads, t), None))
    return launch, (tiles, batch * heads, 1), whole, Room(torch.float16, device, right, right)


def factored(
    means: Tensor, summary: Tensor, units: Tensor, first: Tensor, bias: Tensor, mixture: Tensor, match: Tensor
) -> tuple[Tensor, Tensor, Tensor, Halves | None]:
    """`rows`, `columns`, `right` and maybe `halves` of `Factors`: of the means of query blocks (b, h, t, d), and of
    summaries and units of key blocks, by parameters (h or 1, ...): first layer and its bias, mixture of summaries,
    match. The first two lie as `triton_selection.by_unit` has them."""
    (batch, heads, t, many, d), parameters = units.shape, (first, bias, mixture, match)
    steps = [x.stride(0) if x.shape[0] == heads else 0 for x in parameters]
    told = batch, heads, t, many, d, first.shape[1], match.shape[2]
    launch, grid, whole, half = _factoring(units.device, *told, *steps)
    rows, columns, right, scale = whole()
    halves = (*half(), scale) if PROJECTED % many == 0 else None
    launch(grid, (means, summary, units, *parameters, rows, columns, right, *(halves or (right,) * 3)))
    return rows, columns, right, halves


Summary = tuple[Tensor, Tensor, Tensor, Tensor]
"""What `summarised` gives."""


def _summary_shapes(
    batch: int, heads: int, t: int, units: int, d: int, extremes: bool
) -> tuple[tuple[tuple[int, ...], None], ...]:
    """Shapes of the two in float32, and of the two that are true or not."""
    lead = batch, heads, t
    return ((*lead, 3 * d if extremes else d), None), ((*lead, units, d), None), ((*lead, units), None), (lead, None)


def _steps(units: int, unit: int, d: int, tile: int) -> tuple[int, int, int, int]:
    """How many units a block has, of how many tokens, and how many of each are read at once."""
    tokens = max(tile // held(d), 1)
    return units, unit, min(max(tokens // unit, 1), units), min(unit, tokens)


@lru_cache(maxsize=KEPT)
def _summing(
    device: torch.device, shape: tuple[int, ...], apart: tuple[int, ...], units: int, unit: int, extremes: bool,
    before: bool, padded: bool, tile: int,
) -> tuple[Launch, Grid, Room, Room]:  # fmt: skip
    batch, heads, n, d = shape
    t = -(-n // (units * unit))
    constants = dict(zip(("UNITS", "UNIT", "BU", "STEP"), _steps(units, unit, d, tile), strict=True))
    constants |= {"D": d, "DP": held(d), "EXTREMES": extremes, "BEFORE": before, "PADDING": padded, "num_warps": 4}
    shapes = _summary_shapes(batch, heads, t, units, d, extremes)
    launch = Launch(summary_kernel, device, n, t, heads, *apart[:3], **constants, **OPTIONS)
    return (
        launch,
        (t, batch * heads, 1),
        Room(torch.float32, device, *shapes[:2]),
        Room(torch.bool, device, *shapes[2:]),
    )


def summarised(x: Tensor, size: int, unit: int, padding: Tensor | None, extremes: bool, before: bool) -> Summary:
    """Of each block (b, h, t, ...) its mean, then with `extremes` maximum and minimum, the means of its units, which of
    those hold something, and whether any does; 0 and nothing for one that is not finite. With `before`, of the block
    before."""
    x = x if x.stride(3) == 1 else x.contiguous()
    told = size // unit, unit, extremes, before, padding is not None, TILE
    launch, grid, numbers, flags = _summing(x.device, x.shape, x.stride(), *told)
    (summary, means), (there, visible) = numbers(), flags()
    launch(grid, (x, there if padding is None else padding.contiguous(), summary, means, there, visible))
    return summary, means, there, visible


@lru_cache(maxsize=KEPT)
def _summing_both(
    device: torch.device, shape: tuple[int, ...], key_heads: int, apart: tuple[int, ...], key_apart: tuple[int, ...],
    size: int, own_unit: int, unit: int, before: bool, padded: bool, tile: int,
) -> tuple[Launch, Grid, Room, Room]:  # fmt: skip
    batch, heads, n, d = shape
    t, units, own_units = -(-n // size), size // unit, size // own_unit
    named = "OWN_UNITS", "OWN_UNIT", "OWN_BU", "OWN_STEP", "UNITS", "UNIT", "BU", "STEP"
    sides = *_steps(own_units, own_unit, d, tile), *_steps(units, unit, d, tile)
    constants = dict(zip(named, sides, strict=True))
    constants |= {"D": d, "DP": held(d), "BEFORE": before, "PADDING": padded, "num_warps": 4} | OPTIONS
    numbers = n, t, heads, key_heads, *apart[:3], *key_apart[:3]
    launch = Launch(summaries_kernel, device, *numbers, **constants)
    own = _summary_shapes(batch, heads, t, own_units, d, False)
    key = _summary_shapes(batch, key_heads, t, units, d, True)
    rooms = Room(torch.float32, device, *own[:2], *key[:2]), Room(torch.bool, device, *own[2:], *key[2:])
    return launch, (t, batch * (heads + key_heads), 1), *rooms


def summarised_both(
    query: Tensor, key: Tensor, size: int, own_unit: int, unit: int, padding: Tensor | None, before: bool
) -> tuple[Summary, Summary]:
    """`summarised` of queries, without extremes, and of keys, of one width, in one launch; `before` is of queries."""
    query, key = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key))
    told = size, own_unit, unit, before, padding is not None, TILE
    sides = query.shape, key.shape[1], query.stride(), key.stride()
    launch, grid, numbers, flags = _summing_both(query.device, *sides, *told)
    (means, own, summary, units), (own_there, own_visible, there, visible) = numbers(), flags()
    rows, keys = (means, own, own_there, own_visible), (summary, units, there, visible)
    launch(grid, (query, *rows, key, *keys, there if padding is None else padding.contiguous()))
    return rows, keys
