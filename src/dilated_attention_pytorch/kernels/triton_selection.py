"""Scores of blocks from factors, tile by tile.

Names as in `triton_primitives`. A program takes BM rows: query blocks, or tokens (TOKENS). BN are the blocks of a step,
M the hidden units, RANK the width of the match and RP the power of two that holds it, D the width of what it projects,
UQ and UK the sub-blocks of a row and of a key block, of which a product takes UG.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quick_launch import launch
from .selection import COLUMNS, Factors
from .triton_launch import OPTIONS, _precision, held
from .triton_primitives import NO_KEY, projected

MATCHED, MATCHES_A_WARP = 64, 1024
"""Sub-blocks of rows of a step, and matches that a warp takes: the more code, the longer the first call."""
MATCHED_TOGETHER, UNITS_TOGETHER = 128, 128
"""Tokens of a block and sub-blocks of a product, or of rank 64 half as many, where tokens follow one another: registers
hold two programs."""
PROGRAMS = 384
"""So many keep a large GPU busy, those that begin late and end soon among them."""


@triton.jit
def scale_of(b_most):
    """The power of two that brings numbers up to `b_most` below 2^15, and what undoes it."""
    b_bits = tl.maximum(b_most.to(tl.uint32, bitcast=True) & 0x7F800000, 0x0D800000)
    return (0x86000000 - b_bits).to(tl.float32, bitcast=True), (b_bits - 0x07000000).to(tl.float32, bitcast=True)


@triton.jit
def halves(b_x):
    """Two of float16 that add up to numbers below 2^15, but for what float32 would not show beside the largest."""
    b_first = b_x.to(tl.float16)
    return b_first, (b_x - b_first.to(tl.float32)).to(tl.float16)


@triton.jit
def halved(b_x):
    """Rows in halves, each row by a scale of its own, and what undoes that."""
    b_scale, b_undone = scale_of(tl.max(tl.abs(b_x), 1))
    b_first, b_second = halves(b_x * b_scale[:, None])
    return b_first, b_second, b_undone


@triton.jit
def split_kernel(p_x, p_first, p_second, p_scale, MANY: tl.constexpr, BM: tl.constexpr):
    """The numbers of a block in halves, and what undoes their scale."""
    block = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, BM)
    b_x = tl.load(p_x + block * MANY + o_i, mask=o_i < MANY, other=0.0)
    scale, undone = scale_of(tl.max(tl.abs(b_x), 0))
    b_first, b_second = halves(b_x * scale)
    tl.store(p_first + block * MANY + o_i, b_first, mask=o_i < MANY)
    tl.store(p_second + block * MANY + o_i, b_second, mask=o_i < MANY)
    tl.store(p_scale + block, undone)


@triton.jit
def larger(x, y):
    """The larger one, or what is not a number."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def match_scores(
    b_left, b_rest, b_left_there, p_right, p_rest, p_right_there, begun, blocks, o_r,
    BM: tl.constexpr, BN: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, UQ: tl.constexpr, UK: tl.constexpr,
    UG: tl.constexpr, HOLES: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The best match of a sub-block of each row with one of each key block, [BM, BN], still without 1 / sqrt(rank).

    A product takes UG sub-blocks of every key block. With SPLIT both sides are given in halves.
    """
    b_best = tl.full([BM, BN], NO_KEY, tl.float32)
    o_n = tl.arange(0, UG * BN)
    b_there = begun + o_n % BN < blocks
    for unit in range(0, UK, UG):
        # All blocks of a head: at most 2^14 of 2^7 units of rank 2^7.
        o_unit = (begun + o_n % BN) * UK + unit + o_n // BN
        b_mask = b_there[:, None]
        if RANK < RP:
            b_mask = b_mask & (o_r < RANK)[None, :]
        o_right = o_unit[:, None] * RANK + o_r[None, :]
        b_right = tl.load(p_right + o_right, mask=b_mask, other=0.0)  # [UG * BN, RP]
        if SPLIT:
            # Three products of halves are as exact as one in float32, and of twice the pace of tf32.
            b_pair = tl.dot(b_rest, tl.trans(b_right))
            b_pair = tl.dot(b_left, tl.trans(tl.load(p_rest + o_right, mask=b_mask, other=0.0)), b_pair)
            b_pair = tl.dot(b_left, tl.trans(b_right), b_pair)
        else:
            b_pair = tl.dot(b_left, tl.trans(b_right), input_precision=PRECISION)  # [BM * UQ, UG * BN]
        if HOLES:
            b_seen = tl.load(p_right_there + o_unit, mask=b_there, other=0) != 0
            b_pair = tl.where(b_left_there[:, None] & b_seen[None, :], b_pair, NO_KEY)
        b_best = larger(b_best, tl.reduce(tl.reshape(b_pair, [BM, UQ * UG, BN]), 1, larger))
    if HOLES:
        # Nothing there on either side: as the torch path has it.
        b_best = tl.where(b_best == NO_KEY, 0.0, b_best)
    return b_best


@triton.jit
def with_blocks(b_match, p_scale, p_table, o_column, b_there):
    """Scores of tokens of one block, from their matches with blocks in halves and a line of `ByToken.table`."""
    b_match *= tl.load(p_scale + o_column, mask=b_there, other=0.0)[None, :]
    return b_match + tl.load(p_table + o_column, mask=b_there, other=0.0)[None, :]


@triton.jit(do_not_specialize=["begin", "rows", "total", "span", "first", "lines"])
def score_kernel(
    p_rows, p_columns, p_weight, p_bias, p_keep, p_own, p_project, p_left_there, p_right, p_rest, p_scale,
    p_right_there, p_log, p_ids, p_scores, begin, rows, width, total, blocks, heads, span, first, lines, coldest, root,
    so_b, so_h, so_n, s_weight, s_bias, s_project,
    BM: tl.constexpr, BN: tl.constexpr, M: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    UQ: tl.constexpr, UK: tl.constexpr, UG: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, IDS: tl.constexpr,
    CAUSAL: tl.constexpr, KEEP: tl.constexpr, HOLES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of BM rows, from `begin` on or with IDS any, with `span` of the first `width` blocks.

    With CAUSAL maybe not of later ones. Tokens from `begin` on are of one block a program: `p_rows` has the scores of
    `lines` blocks, from `first` on, without any match.
    """
    TOGETHER: tl.constexpr = TOKENS and not IDS
    # Those that see most begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    o_i = tile * BM + tl.arange(0, BM)  # [BM]
    stream = tl.program_id(2).to(tl.int64)
    head = stream % heads
    b_exist = o_i < rows
    o_row = tl.load(p_ids + o_i, mask=b_exist, other=0).to(tl.int32) if IDS else begin + o_i
    o_block = o_row // SIZE if TOKENS else o_row
    own = (begin + tile * BM) // SIZE
    if TOGETHER:
        p_rows += (stream * lines + own - first) * blocks
    elif M > 0:
        p_rows += stream * M * blocks
        p_columns += stream * M * blocks
        p_weight += head * s_weight
        p_keep += stream * M * blocks
    o_r = tl.arange(0, RP)
    b_left = tl.zeros([BM * UQ, RP], tl.float32)
    b_rest = b_left
    b_undone = tl.full([BM], 1.0, tl.float32)
    b_left_there = tl.full([BM * UQ], 1, tl.int32) > 0
    if RANK > 0:
        o_unit = tile * (BM * UQ) + tl.arange(0, BM * UQ)
        b_real = o_unit < rows * UQ
        o_left = tl.load(p_ids + o_unit // UQ, mask=b_real, other=0).to(tl.int32) if IDS else begin + o_unit // UQ
        o_left = o_left * UQ + o_unit % UQ
        p_own += (stream // heads) * so_b + head * so_h
        p_project += head * s_project
        b_left = projected(p_own, p_project, o_left.to(tl.int64), b_real, o_r, so_n, D, RANK, RP, PRECISION)
        if TOGETHER:
            b_left, b_rest, b_undone = halved(b_left)
        if HOLES and not TOKENS:
            b_left_there = tl.load(p_left_there + stream * total * UQ + o_left, mask=b_real, other=0) != 0
        p_right += stream * blocks * UK * RANK
        p_rest += stream * blocks * UK * RANK
        p_right_there += stream * blocks * UK
    bias = tl.load(p_bias + head * s_bias)
    inverse = 1.0 / tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest)
    p_scores += stream * rows * width
    end = tl.minimum((tl.program_id(1) + 1) * span, width)
    if CAUSAL:
        end = tl.minimum(end, own if TOGETHER else tl.max(o_block, 0))
    for begun in range(tl.program_id(1) * span, end, BN):
        o_column = begun + tl.arange(0, BN)
        b_there = o_column < blocks
        b_score = tl.zeros([BM, BN], tl.float32)
        if RANK > 0:
            b_score = (inverse / root) * b_undone[:, None] * match_scores(
                b_left, b_rest, b_left_there, p_right, p_rest, p_right_there, begun, blocks, o_r,
                BM, BN, RANK, RP, UQ, UK, UG, HOLES, TOGETHER, PRECISION,
            )  # fmt: skip
        if TOGETHER:
            b_score = with_blocks(b_score, p_scale + stream * blocks, p_rows, o_column, b_there)
        else:
            # w . relu(row + column), whose factors lie unit by unit.
            b_sum = tl.zeros([BM, BN], tl.float32) + bias
            for m in tl.range(0, M, loop_unroll_factor=4):
                b_row = tl.load(p_rows + m * blocks + o_block, mask=b_exist, other=0.0)
                b_column = tl.load(p_columns + m * blocks + o_column, mask=b_there, other=0.0)
                b_hidden = larger(b_row[:, None] + b_column[None, :], 0.0)
                if KEEP:
                    b_hidden *= tl.load(p_keep + m * blocks + o_block, mask=b_exist, other=0.0)[:, None]
                b_sum += b_hidden * tl.load(p_weight + m)
            b_score += inverse * b_sum
        # Scores of a head are held to some bytes, or a few rows.
        o_score = o_i[:, None] * width + o_column[None, :]
        tl.store(p_scores + o_score, b_score, mask=b_exist[:, None] & (o_column < width)[None, :])


@triton.jit(do_not_specialize=["many", "streamed"])
def hidden_bwd_kernel(
    p_held, p_streamed, p_grad, p_weight, p_out, many, streamed, heads, s_weight, sh_n, sh_m, ss_n, ss_m, sg_n,
    sg_j, M: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of one row, or one block, the gradient of its part in `score_kernel`; behind them all, its part in that of w."""
    i = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    o_m = tl.arange(0, MP)
    b_unit = o_m < M
    b_held = tl.load(p_held + stream * many * M + i * sh_n + o_m * sh_m, mask=b_unit, other=0.0)
    b_out = tl.zeros([MP], tl.float32)
    b_sum = tl.zeros([MP], tl.float32)
    for first in range(0, streamed, BN):
        o_j = first + tl.arange(0, BN)
        b_real = o_j < streamed
        b_grad = tl.load(p_grad + stream * many * streamed + i * sg_n + o_j * sg_j, mask=b_real, other=0.0)[:, None]
        p_tile = p_streamed + stream * streamed * M + o_j[:, None] * ss_n + o_m[None, :] * ss_m
        b_hidden = b_held[None, :] + tl.load(p_tile, mask=b_real[:, None] & b_unit[None, :], other=0.0)
        b_out += tl.sum(tl.where(b_hidden > 0.0, b_grad, 0.0), 0)
        b_sum += tl.sum(tl.maximum(b_hidden, 0.0) * b_grad, 0)
    o_line = (stream * many + i) * M + o_m
    p_sum = p_out + tl.num_programs(1).to(tl.int64) * many * M
    tl.store(p_out + o_line, b_out * tl.load(p_weight + (stream % heads) * s_weight + o_m, mask=b_unit), mask=b_unit)
    tl.store(p_sum + o_line, b_sum, mask=b_unit)


def hidden_gradient(held_still: Tensor, streamed: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Gradients (2, b h, i, m) of what is held in scores w . relu(held + streamed), and of w what each row gives.

    For held (b, h, i, m) and streamed (b, h, j, m), each without gaps, grad (b h, i, j) and weight (h, m).
    """
    many, hidden = held_still.shape[2:]
    found = torch.empty((2, len(grad), many, hidden), dtype=torch.float32, device=grad.device)
    launch(hidden_bwd_kernel, (many, len(grad)),
        held_still, streamed, grad, weight, found, many, streamed.shape[2], len(weight), weight.stride(0),
        *held_still.stride()[2:], *streamed.stride()[2:], *grad.stride()[1:],
        M=hidden, MP=held(hidden), BN=max(4096 // held(hidden), 1), num_warps=4, **OPTIONS,
    )  # fmt: skip
    return found


class ByToken(NamedTuple):
    """For tokens that follow one another: scores (b, h, blocks, t) of blocks from the first on, without any match."""

    first: int
    table: Tensor
    right: tuple[Tensor, Tensor, Tensor]
    """`Factors.right` as `split` gives it"""


def split(right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Halves of (b, h, t, u, p), float16, and what undoes the scale of each block, (b, h, t)."""
    right, many = right.contiguous(), right.shape[3] * right.shape[4]
    first, second = torch.empty((2, *right.shape), dtype=torch.float16, device=right.device).unbind()
    scale = torch.empty(right.shape[:3], dtype=torch.float32, device=right.device)
    launch(split_kernel, (scale.numel(),), right, first, second, scale, MANY=many, BM=held(max(many, 1)), **OPTIONS)
    return first, second, scale


def matched_together(units: int, rank: int) -> tuple[int, int]:
    """How many sub-blocks of a key block a product of tokens takes, and of how many blocks."""
    together = min(UNITS_TOGETHER * 32 // held(max(rank, 1)), UNITS_TOGETHER)
    grouped = min(units & -units, together // 16)
    return grouped, together // grouped


def scoring(
    factors: Factors, block_size: int, per_token: bool, is_causal: bool, together: ByToken | None = None
) -> Callable[..., Tensor]:
    """What gives scores over temperature of rows, int64 (r), with every block or the first so many, (b, h, r, t).

    With `is_causal` those with a row's own and later blocks may be anything. Tokens of a range must come `together`.
    """
    batch, heads, total, own_units, d = factors.own.shape
    t, units, rank = factors.right.shape[2:]
    at_once, columns, grouped = min(max(MATCHED // own_units, 1), block_size if per_token else MATCHED), COLUMNS, 1
    warps = min(max(at_once * own_units * columns // MATCHES_A_WARP, 4), 16)
    if together is None:
        by_unit = [x.mT.contiguous() for x in (factors.rows, factors.columns, factors.keep) if x is not None]
        right, lines = (factors.right.contiguous(),) * 3, (0, 0)
    else:
        at_once, (grouped, columns) = min(MATCHED_TOGETHER, block_size), matched_together(units, rank)
        warps = max(at_once // 16, 4)
        by_unit, right = [together.table] * 2, together.right
        lines = together.first, together.table.shape[2]
    # Where one of these is not given, no program reads it.
    own = factors.own.flatten(2, 3)
    there = [own if x is None else x.contiguous() for x in (factors.left_there, factors.right_there)]
    read = by_unit[0], by_unit[1], factors.weight, factors.bias, by_unit[-1], own, factors.project, there[0], *right
    read += there[1], factors.log_temperature
    shared = factors.weight.stride(0), factors.bias.stride(0), factors.project.stride(0)
    numbers = *lines, float(factors.coldest), max(rank, 1) ** 0.5, *own.stride()[:3], *shared
    constants = {"BM": at_once, "BN": columns, "M": 0 if together else factors.rows.shape[3], "D": d, "RANK": rank}
    constants |= {"RP": held(max(rank, 1)), "UQ": own_units, "UK": units, "UG": grouped, "SIZE": block_size}
    constants |= {"TOKENS": per_token, "CAUSAL": is_causal, "KEEP": not together and factors.keep is not None}
    constants |= {"HOLES": factors.right_there is not None, "PRECISION": _precision(torch.float32)}
    constants |= {"num_warps": warps, "num_stages": 3 if together else 1} | OPTIONS

    def run(rows: range | Tensor, width: int = t) -> Tensor:
        many = len(rows)
        ids, begin = (own, rows.start) if isinstance(rows, range) else (rows, 0)
        # Rows that are many fill the machine by themselves, and then project their queries but once.
        tiles = -(-many // at_once)
        spans = -(-width // columns) if together is None else max(PROGRAMS // (tiles * batch * heads), 1)
        span = -(-width // (spans * columns)) * columns
        scores = torch.empty((batch, heads, many, width), dtype=torch.float32, device=own.device)
        sizes = begin, many, width, total, t, heads, span
        launch(score_kernel, (tiles, -(-width // span), batch * heads),
            *read, ids, scores, *sizes, *numbers, IDS=ids is not own, **constants,
        )  # fmt: skip
        return scores

    return run
