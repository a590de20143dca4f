"""Gradients of what scores of some rows are made of, without an array of hidden units or of matches.

Names as in `triton_primitives`. R rows were scored with T blocks each; A are the sub-blocks of a row, U those of a
block, M the hidden units, RANK the width of the match and RP the power of two that holds it. Rows and blocks are two
sides of the same sums, and a launch has programs of both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quick_launch import KEPT, Launch, Room, Shape
from .selection import Factors
from .triton_entry import Grid
from .triton_launch import OPTIONS, _precision, held
from .triton_primitives import NO_KEY, projected
from .triton_selection import own_rows

PROJECTED = 32
"""Sub-blocks, or rows, that a program of `own_kernel` takes."""
TILE = 4096
"""Pairs of a row, or a block, with hidden units that a program holds at once."""
HELD, STREAMED = 16, 128
"""Sub-blocks of a program of matches, and those of the other side that it meets at once."""
SUMMED, STEP = (32, 64), 64
"""Rows and columns of a program of `sums_kernel`, and what it adds up at once."""


@triton.jit
def inverse_of(p_log, head, coldest):
    """What scores are multiplied by."""
    return 1.0 / tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest)


@triton.jit(do_not_specialize=["rows"])
def own_kernel(
    p_factors, p_own, p_project, p_ids, p_room, rows, heads, at_left, sf_h, sf_n, sf_m, so_b, so_h, so_n, s_project,
    BM: tl.constexpr, A: tl.constexpr, M: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr,
    RP: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of BM sub-blocks of rows the query's side of the match; of as many rows what hidden units have of them.

    Rows lie first in what all kernels here write to, and the rest where they are told.
    """
    stream = tl.program_id(1).to(tl.int64)
    head = stream % heads
    o_i = tl.program_id(0) * BM + tl.arange(0, BM)
    b_real = o_i < rows * A
    o_own = tl.load(p_ids + o_i // A, mask=b_real, other=0) * A + o_i % A
    o_r = tl.arange(0, RP)
    p_own += (stream // heads) * so_b + head * so_h
    b_left = projected(p_own, p_project + head * s_project, o_own, b_real, o_r, so_n, D, RANK, RP, PRECISION)
    p_tile = p_room + at_left + (stream * rows * A + o_i)[:, None] * RANK + o_r[None, :]
    tl.store(p_tile, b_left, mask=b_real[:, None] & (o_r < RANK)[None, :])
    b_real = o_i < rows
    o_row = tl.load(p_ids + o_i, mask=b_real, other=0) // SIZE
    for first in range(0, M, BH):
        o_m = first + tl.arange(0, BH)
        b_mask = b_real[:, None] & (o_m < M)[None, :]
        b_row = tl.load(p_factors + stream * sf_h + o_row[:, None] * sf_n + o_m[None, :] * sf_m, mask=b_mask, other=0.0)
        tl.store(p_room + (stream * rows + o_i)[:, None] * M + o_m[None, :], b_row, mask=b_mask)


@triton.jit
def hidden_part(
    p_held, p_streamed, p_grad, p_scores, many, sh_m, ss_n, ss_m, sg_j,
    M: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of one row, or one block, the gradients by hidden unit but for its weight, and of the weight; sums for a row."""
    o_m = tl.arange(0, MP)
    b_unit = o_m < M
    b_held = tl.load(p_held + o_m * sh_m, mask=b_unit, other=0.0)
    b_out = tl.zeros([MP], tl.float32)
    b_sum = tl.zeros([MP], tl.float32)
    b_all = tl.zeros([BN], tl.float32)
    b_by_score = tl.zeros([BN], tl.float32)
    for first in range(0, many, BN):
        o_j = first + tl.arange(0, BN)
        b_real = o_j < many
        b_one = tl.load(p_grad + o_j * sg_j, mask=b_real, other=0.0)
        b_all += b_one
        b_by_score += b_one * tl.load(p_scores + o_j * sg_j, mask=b_real, other=0.0)
        b_grad = b_one[:, None]
        p_tile = p_streamed + o_j[:, None] * ss_n + o_m[None, :] * ss_m
        b_hidden = b_held[None, :] + tl.load(p_tile, mask=b_real[:, None] & b_unit[None, :], other=0.0)
        b_out += tl.sum(tl.where(b_hidden > 0.0, b_grad, 0.0), 0)
        b_sum += tl.sum(tl.maximum(b_hidden, 0.0) * b_grad, 0)
    return b_out, b_sum, tl.sum(b_all, 0), tl.sum(b_by_score, 0)


@triton.jit
def hidden_bwd(
    p_rows, p_columns, p_grad, p_scores, p_weight, p_log, p_by_row, p_by_weight, p_by_block, p_sums, i, stream, rows,
    blocks, heads, coldest, s_weight, sc_h, sc_n, sc_m, M: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of one row, or one block, the gradient of its part in hidden units; a row's of w, temperature and bias too."""
    head = stream % heads
    o_m = tl.arange(0, MP)
    b_unit = o_m < M
    b_weight = tl.load(p_weight + head * s_weight + o_m, mask=b_unit, other=0.0).to(tl.float32)
    inverse = inverse_of(p_log, head, coldest)
    p_columns += stream * sc_h
    p_grad += stream * rows * blocks
    p_scores += stream * rows * blocks
    p_rows += stream * rows * M
    if i < rows:
        b_out, b_sum, whole, by_score = hidden_part(
            p_rows + i * M, p_columns, p_grad + i * blocks, p_scores + i * blocks, blocks, 1, sc_n, sc_m, 1, M, MP, BN
        )
        line = stream * rows + i
        tl.store(p_by_row + line * M + o_m, b_out * (b_weight * inverse), mask=b_unit)
        tl.store(p_by_weight + line * M + o_m, b_sum * inverse, mask=b_unit)
        # Below the coldest the gradient still passes, by the temperature that is not held there.
        tl.store(p_sums + 2 * line, -by_score * tl.exp(tl.load(p_log + head).to(tl.float32)) * inverse)
        tl.store(p_sums + 2 * line + 1, whole * inverse)
    else:
        j = i - rows
        b_out, b_sum, whole, by_score = hidden_part(
            p_columns + j * sc_n, p_rows, p_grad + j, p_scores + j, rows, sc_m, M, 1, blocks, M, MP, BN
        )
        tl.store(p_by_block + (stream * blocks + j) * M + o_m, b_out * (b_weight * inverse), mask=b_unit)


@triton.jit
def match_tile(
    p_left, p_right, p_grad, p_ids, p_left_there, p_right_there, first_row, first_block, rows, blocks, factor, o_r,
    BR: tl.constexpr, BT: tl.constexpr, A: tl.constexpr, U: tl.constexpr, RANK: tl.constexpr, LEFT: tl.constexpr,
    HOLES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both sides of the matches of BR rows with BT blocks, and the gradients of those, [BR * A, BT * U].

    A block's goes to the best of its matches, or to all that are equally good alike; where nothing is there, nowhere.
    """
    o_i = first_row * A + tl.arange(0, BR * A)
    o_j = first_block * U + tl.arange(0, BT * U)
    b_left_real = o_i < rows * A
    b_right_real = o_j < blocks * U
    b_wide = (o_r < RANK)[None, :]
    b_left = tl.load(p_left + o_i[:, None] * RANK + o_r[None, :], mask=b_left_real[:, None] & b_wide, other=0.0)
    b_right = tl.load(p_right + o_j[:, None] * RANK + o_r[None, :], mask=b_right_real[:, None] & b_wide, other=0.0)
    o_row = first_row + tl.arange(0, BR)
    o_block = first_block + tl.arange(0, BT)
    b_mask = (o_row < rows)[:, None] & (o_block < blocks)[None, :]
    b_grad = tl.load(p_grad + o_row[:, None] * blocks + o_block[None, :], mask=b_mask, other=0.0) * factor
    b_pair = tl.dot(b_left, tl.trans(b_right), input_precision=PRECISION)
    if HOLES:
        b_there = tl.load(p_right_there + o_j, mask=b_right_real, other=0) != 0
        b_pair = tl.where(b_there[None, :], b_pair, NO_KEY)
    if LEFT:
        o_own = tl.load(p_ids + o_i // A, mask=b_left_real, other=0) * A + o_i % A
        b_there = tl.load(p_left_there + o_own, mask=b_left_real, other=0) != 0
        b_pair = tl.where(b_there[:, None], b_pair, NO_KEY)
    b_pair = tl.reshape(b_pair, [BR, A, BT, U])
    # Where one is not a number, none is best.
    b_best = tl.max(tl.max(tl.where(b_pair == b_pair, b_pair, float("inf")), 3), 1)
    b_best = tl.where(b_best == NO_KEY, float("inf"), b_best)
    b_tied = b_pair == b_best[:, None, :, None]
    b_share = b_grad / tl.maximum(tl.sum(tl.sum(b_tied.to(tl.int32), 3), 1), 1)
    b_share = tl.where(b_tied, b_share[:, None, :, None], 0.0)
    return b_left, b_right, tl.reshape(b_share, [BR * A, BT * U])


@triton.jit
def match_bwd(
    p_left, p_right, p_grad, p_ids, p_left_there, p_right_there, p_log, p_by_left, p_by_right, tile, stream, rows,
    blocks, total, heads, coldest, root, BR: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    A: tl.constexpr, U: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, LEFT: tl.constexpr, HOLES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What scores give the query's side of the match of BR rows, met by BLOCKS at once, or the key's of BT blocks."""
    factor = inverse_of(p_log, stream % heads, coldest) * root
    o_r = tl.arange(0, RP)
    b_wide = (o_r < RANK)[None, :]
    p_left += stream * rows * A * RANK
    p_right += stream * blocks * U * RANK
    p_grad += stream * rows * blocks
    p_left_there += stream * total * A
    p_right_there += stream * blocks * U
    tiles = tl.cdiv(rows, BR)
    if tile < tiles:
        b_out = tl.zeros([BR * A, RP], tl.float32)
        for first in range(0, blocks, BLOCKS):
            b_left, b_right, b_share = match_tile(
                p_left, p_right, p_grad, p_ids, p_left_there, p_right_there, tile * BR, first, rows, blocks, factor,
                o_r, BR, BLOCKS, A, U, RANK, LEFT, HOLES, PRECISION,
            )  # fmt: skip
            b_out = tl.dot(b_share, b_right, b_out, input_precision=PRECISION)
        o_i = tile * (BR * A) + tl.arange(0, BR * A)
        p_tile = p_by_left + (stream * rows * A + o_i)[:, None] * RANK + o_r[None, :]
        tl.store(p_tile, b_out, mask=(o_i < rows * A)[:, None] & b_wide)
    else:
        tile -= tiles
        b_out = tl.zeros([BT * U, RP], tl.float32)
        for first in range(0, rows, ROWS):
            b_left, b_right, b_share = match_tile(
                p_left, p_right, p_grad, p_ids, p_left_there, p_right_there, first, tile * BT, rows, blocks, factor,
                o_r, ROWS, BT, A, U, RANK, LEFT, HOLES, PRECISION,
            )  # fmt: skip
            b_out = tl.dot(tl.trans(b_share), b_left, b_out, input_precision=PRECISION)
        o_j = tile * (BT * U) + tl.arange(0, BT * U)
        p_tile = p_by_right + (stream * blocks * U + o_j)[:, None] * RANK + o_r[None, :]
        tl.store(p_tile, b_out, mask=(o_j < blocks * U)[:, None] & b_wide)


@triton.jit(do_not_specialize=["rows", "blocks", "total"])
def sides_bwd_kernel(
    p_room, p_columns, p_right, p_grad, p_scores, p_ids, p_left_there, p_right_there, p_weight, p_log, rows, blocks,
    total, heads, coldest, root, at_left, at_row, at_weight, at_block, at_sums, at_by_left, at_right, s_weight, sc_h,
    sc_n, sc_m, M: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, A: tl.constexpr, U: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    LEFT: tl.constexpr, HOLES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`match_bwd` of rows, then of blocks, and `hidden_bwd` of both."""
    program = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    matched = tl.cdiv(rows, BR) + tl.cdiv(blocks, BT)
    if program < matched:
        match_bwd(
            p_room + at_left, p_right, p_grad, p_ids, p_left_there, p_right_there, p_log, p_room + at_by_left,
            p_room + at_right, program, stream, rows, blocks, total, heads, coldest, root,
            BR, BT, ROWS, BLOCKS, A, U, RANK, RP, LEFT, HOLES, PRECISION,
        )  # fmt: skip
    else:
        hidden_bwd(
            p_room, p_columns, p_grad, p_scores, p_weight, p_log, p_room + at_row, p_room + at_weight,
            p_room + at_block, p_room + at_sums, program - matched, stream, rows, blocks, heads, coldest, s_weight,
            sc_h, sc_n, sc_m, M, MP, BN,
        )  # fmt: skip


@triton.jit
def summed(
    p_x, p_y, p_ids, p_out, tile, many, sx_n, sx_m, sy_n, s_out,
    M: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, X_ROWS: tl.constexpr,
    Y_ROWS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of x^T y, (M, N), of `many` lines; of those of X_ROWS or Y_ROWS, A to a row and SIZE rows to a line."""
    columns = tl.cdiv(N, BN)
    o_m = (tile // columns) * BM + tl.arange(0, BM)
    o_c = (tile % columns) * BN + tl.arange(0, BN)
    b_out = tl.zeros([BM, BN], tl.float32)
    for first in range(0, many, BK):
        o_k = (first + tl.arange(0, BK)).to(tl.int64)
        b_real = o_k < many
        o_x = o_k
        o_y = o_k
        if X_ROWS or Y_ROWS:
            o_at = tl.load(p_ids + o_k // A, mask=b_real, other=0) // SIZE * A + o_k % A
            o_x = o_at if X_ROWS else o_k
            o_y = o_at if Y_ROWS else o_k
        b_mask = (o_m < M)[:, None] & b_real[None, :]
        b_x = tl.load(p_x + o_x[None, :] * sx_n + o_m[:, None] * sx_m, mask=b_mask, other=0.0).to(tl.float32)
        if X_ROWS:
            # As `projected` has them.
            b_x = tl.where(b_x - b_x == 0.0, b_x, 0.0)
        b_mask = b_real[:, None] & (o_c < N)[None, :]
        b_y = tl.load(p_y + o_y[:, None] * sy_n + o_c[None, :], mask=b_mask, other=0.0).to(tl.float32)
        b_out = tl.dot(b_x, b_y, b_out, input_precision=PRECISION)
    b_mask = (o_m < M)[:, None] & (o_c < N)[None, :]
    tl.store(p_out + o_m[:, None] * s_out + o_c[None, :], b_out, mask=b_mask)


@triton.jit(do_not_specialize=["rows", "blocks", "heads", "alike", "total"])
def sums_kernel(
    p_own, p_units, p_means, p_summary, p_room, p_ids, p_out, rows, blocks, heads, alike, total, at_row, at_weight,
    at_block, at_sums, at_by_left, at_right, to_joint, to_project, to_match, to_bias, to_last, to_two, so_b, so_h, so_n,
    A: tl.constexpr, U: tl.constexpr, M: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of parameters, of which `alike` heads have their own, in `p_out`, `total` of them for a sample.

    Of the first layer's part of the keys, and of the mixture, only what both follow from: by_block^T summary.
    """
    stream = tl.program_id(1).to(tl.int64)
    p_own += (stream // heads) * so_b + (stream % heads) * so_h
    p_out += (stream // alike) * total
    head = stream % alike
    tile = tl.program_id(0)
    WIDE: tl.constexpr = 3 * D
    # The longest sums begin first.
    MATCHED: tl.constexpr = ((D + BM - 1) // BM) * ((RANK + BR - 1) // BR)
    JOINT: tl.constexpr = ((M + BM - 1) // BM) * ((WIDE + BN - 1) // BN)
    FIRST: tl.constexpr = ((M + BM - 1) // BM) * ((D + BN - 1) // BN)
    p_by_row = p_room + at_row + stream * rows * M
    if tile < MATCHED:
        summed(
            p_units + stream * blocks * U * D, p_room + at_right + stream * blocks * U * RANK, p_ids,
            p_out + to_match + head * D * RANK, tile, blocks * U, D, 1, RANK, RANK,
            D, RANK, BM, BR, BK, False, False, 1, 1, PRECISION,
        )  # fmt: skip
    elif tile < 2 * MATCHED:
        summed(
            p_own, p_room + at_by_left + stream * rows * A * RANK, p_ids,
            p_out + to_project + head * D * RANK, tile - MATCHED, rows * A, so_n, 1, RANK, RANK,
            D, RANK, BM, BR, BK, True, False, A, 1, PRECISION,
        )  # fmt: skip
    elif tile < 2 * MATCHED + JOINT:
        summed(
            p_room + at_block + stream * blocks * M, p_summary + stream * blocks * WIDE, p_ids,
            p_out + to_joint + head * M * WIDE, tile - 2 * MATCHED, blocks, M, 1, WIDE, WIDE,
            M, WIDE, BM, BN, BK, False, False, 1, 1, PRECISION,
        )  # fmt: skip
    elif tile < 2 * MATCHED + JOINT + FIRST:
        summed(
            p_by_row, p_means + stream * blocks * D, p_ids,
            p_out + head * M * 2 * D, tile - 2 * MATCHED - JOINT, rows, M, 1, D, 2 * D,
            M, D, BM, BN, BK, False, True, 1, SIZE, PRECISION,
        )  # fmt: skip
    else:
        tile -= 2 * MATCHED + JOINT + FIRST
        o_m = tile * BM + tl.arange(0, BM)
        o_two = tl.arange(0, 2)
        p_by_weight = p_room + at_weight + stream * rows * M
        b_bias = tl.zeros([BM], tl.float32)
        b_last = tl.zeros([BM], tl.float32)
        b_two = tl.zeros([2], tl.float32)
        for first in range(0, rows, BK):
            o_k = first + tl.arange(0, BK)
            b_real = (o_k < rows)[:, None]
            b_mask = b_real & (o_m < M)[None, :]
            o_tile = o_k[:, None] * M + o_m[None, :]
            b_bias += tl.sum(tl.load(p_by_row + o_tile, mask=b_mask, other=0.0), 0)
            b_last += tl.sum(tl.load(p_by_weight + o_tile, mask=b_mask, other=0.0), 0)
            o_tile = (stream * rows + o_k)[:, None] * 2 + o_two[None, :]
            b_two += tl.sum(tl.load(p_room + at_sums + o_tile, mask=b_real, other=0.0), 0)
        tl.store(p_out + to_bias + head * M + o_m, b_bias, mask=o_m < M)
        tl.store(p_out + to_last + head * M + o_m, b_last, mask=o_m < M)
        # Of temperatures, then of biases.
        tl.store(p_out + to_two + o_two * alike + head, b_two, mask=o_two < tl.where(tile == 0, 2, 0))


@triton.jit
def mixture_kernel(
    p_first, p_mixture, p_out, to_joint, to_mixture, s_first, s_mixture, M: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the first layer's part of the keys, and of the mixture of summaries that it meets."""
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    WIDE: tl.constexpr = 3 * D
    FIRST: tl.constexpr = ((M + BM - 1) // BM) * ((D + BN - 1) // BN)
    p_joint = p_out + to_joint + head * M * WIDE
    if tile < FIRST:
        summed(
            p_joint, p_mixture + head * s_mixture, p_out, p_out + head * M * 2 * D + D, tile, WIDE, 1, WIDE, D, 2 * D,
            M, D, BM, BN, BK, False, False, 1, 1, PRECISION,
        )  # fmt: skip
    else:
        summed(
            p_joint, p_first + head * s_first + D, p_out, p_out + to_mixture + head * WIDE * D, tile - FIRST, M, WIDE,
            1, 2 * D, D, WIDE, D, BM, BN, BK, False, False, 1, 1, PRECISION,
        )  # fmt: skip


class _Launches(NamedTuple):
    own: Launch
    sides: Launch
    sums: Launch
    mixture: Launch
    grids: tuple[Grid, ...]
    held: Room
    """What lies between the launches"""
    found: Room
    """What is found, of each sample"""


@lru_cache(maxsize=KEPT)
def _launches(
    device: torch.device, batch: int, heads: int, alike: int, rows: int, t: int, hidden: int, total: int,
    own_units: int, d: int, units: int, rank: int, size: int, left: bool, holes: bool, coldest: float, tile: int,
    s_weight: int, s_project: int, s_first: int, s_mixture: int, apart: tuple[int, ...], rows_apart: tuple[int, ...],
    columns_apart: tuple[int, ...],
) -> _Launches:  # fmt: skip
    streams, wide = batch * heads, held(rank)
    a_row, a_left, a_block = (streams * rows * hidden,), (streams * rows * own_units * rank,), (streams * t * hidden,)
    shapes: dict[str, Shape] = {"rows": a_row, "left": a_left, "by_row": a_row, "by_weight": a_row, "by_block": a_block}
    shapes |= {"sums": (2 * streams * rows,), "by_left": a_left, "by_right": (streams * t * units * rank,)}
    between = Room(torch.float32, device, shapes)
    (at_left,), at = between.begin("left"), between.begin(*tuple(shapes)[2:])
    # Of the first layers; by_block^T summary, from which follow their part of the keys and the mixture; of both
    # projections of the match, first biases, second layers; of temperatures and then second biases; of the mixture.
    shapes = {"first": (alike, hidden, 2 * d), "joint": (alike, hidden, 3 * d), "project": (alike, d, rank)}
    shapes |= {"match": (alike, d, rank), "bias": (alike, hidden), "last": (alike, 1, hidden), "two": (2, alike)}
    found = Room(torch.float32, device, shapes | {"mixture": (alike, 3 * d, d)})
    to = found.begin("joint", "project", "match", "bias", "last", "two")
    precise = {"PRECISION": _precision(torch.float32)} | OPTIONS
    shape = {"A": own_units, "M": hidden, "RANK": rank}
    own = Launch(
        own_kernel, device, rows, heads, at_left, *rows_apart, *apart, s_project, BM=PROJECTED,
        BH=min(held(hidden), 64), D=d, RP=wide, SIZE=size, num_warps=4, **shape, **precise,
    )  # fmt: skip
    # A product takes 16 of either side and more.
    met = max(min(tile // HELD, STREAMED), HELD)
    br, bt, some_rows, some_blocks = (max(many // each, 1) for many in (HELD, met) for each in (own_units, units))
    pairs = own_units * units * max(br * some_blocks, bt * some_rows)
    sides = Launch(
        sides_bwd_kernel, device, rows, t, total, heads, coldest, rank**-0.5, at_left, *at, s_weight, *columns_apart,
        MP=held(hidden), BN=max(tile // held(hidden), 1), BR=br, BT=bt, ROWS=some_rows, BLOCKS=some_blocks, U=units,
        RP=wide, LEFT=left, HOLES=holes, num_warps=min(max(pairs // 2048, 4), 16), num_stages=2, **shape, **precise,
    )  # fmt: skip
    tiles = {"BM": SUMMED[0], "BN": min(SUMMED[1], held(d)), "BK": STEP, "num_warps": 4, "num_stages": 2}
    narrow = min(SUMMED[1], wide)
    sums = Launch(
        sums_kernel, device, rows, t, heads, alike, found.total, *at, *to, *apart, U=units, D=d, BR=narrow,
        SIZE=size, **tiles, **shape, **precise,
    )  # fmt: skip
    steps = *found.begin("joint", "mixture"), s_first, s_mixture
    mixture = Launch(mixture_kernel, device, *steps, M=hidden, D=d, **tiles, **precise)
    tall, broad, across = -(-hidden // SUMMED[0]), -(-3 * d // SUMMED[0]), -(-d // tiles["BN"])
    added = 2 * -(-d // SUMMED[0]) * -(-rank // narrow) + tall * (-(-3 * d // tiles["BN"]) + across + 1)
    grids = (
        (-(-rows * own_units // PROJECTED), streams, 1),
        (-(-rows // br) + -(-t // bt) + rows + t, streams, 1),
        (added, streams, 1),
        ((tall + broad) * across, alike, 1),
    )
    return _Launches(own, sides, sums, mixture, grids, between, found)


def parameter_gradients(
    grad: Tensor, scores: Tensor, ids: Tensor, factors: Factors, seen: tuple[Tensor, Tensor, Tensor], first: Tensor,
    mixture: Tensor, size: int,
) -> list[Tensor]:  # fmt: skip
    """What gradients (b, h, r, t) of scores over temperature give parameters (h or 1, ...): first layers (.., m, 2 d),
    their biases (.., m), second layers (.., 1, m), their biases (.., 1), the mixture (.., 3 d, d), projections of
    queries and keys (.., d, p), and the logarithms of temperatures (h).

    The rows are `ids`, `size` to a block. The factors have no factors on hidden units, and were made of what is `seen`,
    means (b, h, t, d) of query blocks, summaries (b, h, t, 3 d) and units (b, h, t, u, d) of key blocks, by first
    layers `first` (h or 1, m, 2 d) and the `mixture` of summaries.
    """
    (batch, heads, many, t), device, alike = scores.shape, scores.device, len(first)
    own, *apart = own_rows(factors.own)
    right, rows, columns = factors.right.contiguous(), factors.rows, factors.columns
    left_there, right_there = factors.left_there, factors.right_there
    made = _launches(
        device, batch, heads, alike, many, t, rows.shape[3], *own.shape[2:], *right.shape[3:], size,
        left_there is not None, right_there is not None, float(factors.coldest), TILE, factors.weight.stride(0),
        factors.project.stride(0), first.stride(0), mixture.stride(0), tuple(apart), rows.stride()[1:],
        columns.stride()[1:],
    )  # fmt: skip
    memory = made.held.made()
    # Gradients outlive the rest. Heads may share a scorer, but each has its temperature.
    each = torch.empty((batch * heads // alike, made.found.total), dtype=torch.float32, device=device)
    # Where one of these is not given, no program reads it.
    there = [ids if x is None else x.contiguous() for x in (left_there, right_there)]
    grad, log, (means, summary, units) = grad.contiguous(), factors.log_temperature, (x.contiguous() for x in seen)
    by_own, by_sides, by_sums, by_mixture = made.grids
    made.own(by_own, (rows, own, factors.project, ids, memory))
    made.sides(by_sides, (memory, columns, right, grad, scores, ids, *there, factors.weight, log))
    made.sums(by_sums, (own, units, means, summary, memory, ids, each))
    total = each[0] if len(each) == 1 else each.sum(0)
    made.mixture(by_mixture, (first, mixture, total))
    names = "first", "bias", "last", "mixture", "project", "match"
    *layers, by_mixed, by_project, by_match = (made.found.tensor(total, name) for name in names)
    (two,) = made.found.begin("two")
    apart = (made.found.total, 1) if alike == heads else (heads * made.found.total, made.found.total)
    by_temperature = each.as_strided((batch, heads), apart, two)
    by_temperature = by_temperature[0] if batch == 1 else by_temperature.sum(0)
    by_second = total.as_strided((alike, 1), (1, 1), two + alike)
    return [*layers, by_second, by_mixed, by_project, by_match, by_temperature]
