"""Scores of blocks from factors, tile by tile.

Names as in `primitives`. A program takes BM rows: query blocks, or tokens, SIZE to a block. BN are the blocks of
a step, M the hidden units, RANK the width of the match and RP the power of two that holds it, D the width of what it
projects, UQ and UK the sub-blocks of a row and of a key block, of which a product takes UG.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton.primitives import NO_KEY, dropout_rows, projected
from .topk_kernels import may_list, noisy, sight

UNROLLED = tl.constexpr(8192)
"""Numbers of the right side that a step may take for its products to be written out, and thus asked for steps ahead:
three of those steps have 48 KiB of shared memory."""
SIGHTED = tl.constexpr(64)
"""Blocks at a time of which rows are asked whether they see them."""


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
def halved(b_x, BM: tl.constexpr, UQ: tl.constexpr):
    """The BM * UQ sub-blocks of rows in halves, each row by a scale of its own, and what undoes that, [BM]."""
    b_scale, b_undone = scale_of(tl.max(tl.reshape(tl.max(tl.abs(b_x), 1), [BM, UQ]), 1))
    b_scale = tl.reshape(tl.broadcast_to(b_scale[:, None], [BM, UQ]), [BM * UQ])
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
def matched_units(
    b_left, b_rest, b_left_there, p_right, p_rest, p_right_there, begun, unit, blocks, o_r,
    BM: tl.constexpr, BN: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, UQ: tl.constexpr, UK: tl.constexpr,
    UG: tl.constexpr, HOLES: tl.constexpr, ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`match_scores` with UG sub-blocks of every key block, from `unit` on, or NO_KEY."""
    o_n = tl.arange(0, UG * BN)
    b_there = (begun + o_n % BN < blocks) | WHOLE
    # All blocks of a head: at most 2^14 of 2^7 units of rank 2^7.
    o_unit = (begun + o_n % BN) * UK + unit + o_n // BN
    b_mask = b_there[:, None]
    if RANK < RP:
        b_mask = b_mask & (o_r < RANK)[None, :]
    o_right = o_unit[:, None] * RANK + o_r[None, :]
    b_right = tl.load(p_right + o_right, mask=b_mask, other=0.0)  # [UG * BN, RP]
    # [BM * UQ, UG * BN]
    if ROUNDS:
        b_pair = tl.dot(b_left, tl.trans(b_right))
    else:
        # Three products of halves are as exact as one in float32, and of twice the pace of tf32.
        b_pair = tl.dot(b_rest, tl.trans(b_right))
        b_pair = tl.dot(b_left, tl.trans(tl.load(p_rest + o_right, mask=b_mask, other=0.0)), b_pair)
        b_pair = tl.dot(b_left, tl.trans(b_right), b_pair)
    if HOLES:
        b_seen = tl.load(p_right_there + o_unit, mask=b_there, other=0) != 0
        b_pair = tl.where(b_left_there[:, None] & b_seen[None, :], b_pair, NO_KEY)
    return tl.reduce(tl.reshape(b_pair, [BM, UQ * UG, BN]), 1, larger)


@triton.jit
def match_scores(
    b_left, b_rest, b_left_there, p_right, p_rest, p_right_there, begun, blocks, o_r,
    BM: tl.constexpr, BN: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, UQ: tl.constexpr, UK: tl.constexpr,
    UG: tl.constexpr, HOLES: tl.constexpr, ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The best match of a sub-block of each row with one of each key block, [BM, BN], of both sides in halves, or with
    ROUNDS of the first alone, still without 1 / sqrt(rank). A product takes UG sub-blocks of every key block. WHOLE
    are steps of which all blocks are there, without a question."""
    b_best = tl.full([BM, BN], NO_KEY, tl.float32)
    # A loop within the caller's would keep the compiler from asking for what later steps of that need.
    AT_ONCE: tl.constexpr = UK if UK * BN * RP * (1 if ROUNDS else 2) <= UNROLLED else UG
    for unit in range(0, UK, AT_ONCE):
        for more in tl.static_range(0, AT_ONCE, UG):
            b_best = larger(b_best, matched_units(
                b_left, b_rest, b_left_there, p_right, p_rest, p_right_there, begun, unit + more, blocks, o_r,
                BM, BN, RANK, RP, UQ, UK, UG, HOLES, ROUNDS, WHOLE,
            ))  # fmt: skip
    if HOLES:
        # Nothing there on either side: as the torch path has it.
        b_best = tl.where(b_best == NO_KEY, 0.0, b_best)
    return b_best


@triton.jit
def down(b_x, BM: tl.constexpr):
    """Of rows, [BM], what a tile of `hidden_kernel` takes: four that follow one another in a thread."""
    return tl.reshape(tl.permute(tl.reshape(b_x, [BM // 16, 4, 4]), (2, 0, 1)), [1, 1, 4, BM // 16, 4, 1])


@triton.jit
def across(b_x, BN: tl.constexpr):
    """The same of blocks, [BN]."""
    return tl.reshape(tl.permute(tl.reshape(b_x, [BN // 32, 8, 4]), (0, 2, 1)), [BN // 32, 4, 1, 1, 1, 8])


@triton.jit(do_not_specialize=["begin", "rows", "room", "local", "sink", "least", "most"])
def hidden_kernel(
    p_rows, p_columns, p_weight, p_bias, p_keep, p_log, p_ids, p_scores, p_visible, p_may, begin, rows, width, heads,
    coldest, s_weight, s_bias, room, local, sink, least, most, kept, BM: tl.constexpr, BN: tl.constexpr,
    M: tl.constexpr, UM: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, IDS: tl.constexpr,
    EVEN: tl.constexpr, CAUSAL: tl.constexpr, KEEP: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """Scores without any match of BM rows, SIZE to a block, from `begin` on or with IDS any, with BN blocks.

    With CAUSAL maybe not of later ones. UM hidden units are taken at once, and T is how far apart they lie. A tile is
    [BN / 32, 4, 4, BM / 16, 4, 8], whose last two are the lanes of a warp: a thread has rows and blocks by fours, each
    read at once, of rows only with EVEN, where `begin` is a multiple of four, and what it reads serves all it has. BM
    and BN are below the number of threads, or the compiler would read each number once and pass it on in shared memory.
    With LISTS rows are all blocks, and have NO_KEY with what they do not see or need not list: tokens of a block, who
    share these scores, need not ask again. How many those may list is left where `p_may` points to.
    """
    stream = tl.program_id(2).to(tl.int64)
    head = stream % heads
    first_row, first_column = tl.program_id(0) * BM, tl.program_id(1) * BN
    o_i = first_row + tl.arange(0, BM)
    o_j = first_column + tl.arange(0, BN)
    # Rows and blocks past the last are computed like others, and not stored: a mask would take a register each. T is a
    # power of two, and what lies within is there to be read.
    o_row = tl.load(p_ids + tl.minimum(o_i, rows - 1)).to(tl.int32) if IDS else begin + o_i
    o_row = o_row // SIZE % T
    if EVEN:
        o_row = tl.max_contiguous(tl.multiple_of(o_row, 4), 4)
    p_row = p_rows + stream * M * T + o_row
    p_each = p_row
    p_kept = p_keep + stream * M * T + o_row
    # What differs from thread to thread is small and known, so that one address serves all loads.
    p_column = p_columns + (stream * M * T + first_column) + tl.arange(0, BN) % T
    p_weight += head * s_weight
    b_sum = tl.zeros([BN // 32, 4, 4, BM // 16, 4, 8], tl.float32)
    b_own = tl.zeros([BM], tl.float32) + tl.load(p_bias + head * s_bias)
    # None where all of a tile comes later; rows that are not listed follow one another.
    units = tl.where(first_column >= (begin + first_row + BM - 1) // SIZE, 0, M) if CAUSAL else M
    # w . relu(row + column), whose factors lie unit by unit: relu(x + y) is max(-x, y) + x.
    for first in tl.range(0, units, UM, num_stages=STAGES):
        for m in tl.static_range(UM):
            weight = tl.load(p_weight + first + m)
            b_row = down(tl.load(p_row + m * T), BM)
            b_most = larger(-b_row, across(tl.load(p_column + m * T), BN))
            if KEEP:
                b_sum += (b_most + b_row) * (weight * down(tl.load(p_kept + m * T), BM))
            else:
                b_sum += b_most * weight
                b_own += tl.load(p_each + m * T) * weight
        p_row += UM * T
        p_each += UM * T
        p_kept += UM * T
        p_column += UM * T
    b_score = tl.reshape(tl.permute(b_sum, (3, 4, 2, 0, 5, 1)), [BM, BN]) + b_own[:, None]
    b_score *= 1.0 / tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest)
    # Scores of a head are held to some bytes, or a few rows.
    o_i, o_j = o_i[:, None], o_j[None, :]
    if LISTS:
        p_visible += stream * width
        b_seen, b_near = sight(p_visible, begin + o_i, width, local, sink, o_j, CAUSAL)
        # The least number counts as none, and must not be taken for what is not listed.
        b_score = tl.where(b_score == NO_KEY, float("nan"), b_score)
        b_score = tl.where(b_seen & (b_near == 0), b_score, NO_KEY)
    tl.store(p_scores + stream * rows * width + o_i * width + o_j, b_score, mask=(o_i < rows) & (o_j < width))
    # Causal rows of the first tile have nothing to do with later blocks: each such program asks for a tile of rows, and
    # for those of the one that has, the last of the next tile's.
    spare = (tl.program_id(0) == 1) & (tl.program_id(1) == tl.num_programs(1) - 1)
    asks = (tl.program_id(0) == 0) & ((first_column > 0) | (tl.num_programs(0) == 1))
    if LISTS and (asks | spare):
        first_asked = tl.where(spare, 0, first_column)
        o_own = first_asked + tl.arange(0, BM)
        end = tl.minimum(begin + first_asked + BM, width) if CAUSAL else width
        b_may = may_list(p_visible, begin + o_own, end, local, sink, room, least, most, kept, SIGHTED, CAUSAL)
        tl.store(p_may + stream * width + begin + o_own, b_may, mask=o_own < rows)


@triton.jit(do_not_specialize=["begin", "rows", "span", "first", "lines", "total"])
def match_kernel(
    p_table, p_own, p_project, p_left_there, p_right, p_rest, p_scale, p_right_there, p_log, p_ids, p_scores, p_seed,
    begin, rows, span, first, lines, width, total, blocks, heads, coldest, root, so_b, so_h, so_n, s_project,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, UQ: tl.constexpr,
    UK: tl.constexpr, UG: tl.constexpr, SIZE: tl.constexpr, IDS: tl.constexpr, TOGETHER: tl.constexpr,
    NOISE: tl.constexpr, CAUSAL: tl.constexpr, HOLES: tl.constexpr, ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the scores of BM rows with `span` of the first `width` blocks what their sub-blocks match.

    Rows as `hidden_kernel` has them. TOGETHER are those of one block a program, whose scores so far are a line of
    `p_table`, which has `lines` of `blocks` each, from block `first` on. NOISE is in those: it costs less here than
    where they are ranked, as nothing is made for what comes later.
    """
    # Those that see most begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    o_i = tile * BM + tl.arange(0, BM)  # [BM]
    stream = tl.program_id(2).to(tl.int64)
    head = stream % heads
    b_exist = o_i < rows
    own = (begin + tile * BM) // SIZE
    o_unit = tile * (BM * UQ) + tl.arange(0, BM * UQ)
    b_real = o_unit < rows * UQ
    o_left = tl.load(p_ids + o_unit // UQ, mask=b_real, other=0).to(tl.int32) if IDS else begin + o_unit // UQ
    o_left = o_left * UQ + o_unit % UQ
    o_r = tl.arange(0, RP)
    p_own += (stream // heads) * so_b + head * so_h
    p_project += head * s_project
    b_left = projected(p_own, p_project, o_left.to(tl.int64), b_real, o_r, so_n, D, RANK, RP, PRECISION)
    b_left, b_rest, b_undone = halved(b_left, BM, UQ)
    b_undone *= 1.0 / tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest) / root
    b_left_there = b_real
    if HOLES and SIZE == 1:
        b_left_there = tl.load(p_left_there + stream * total * UQ + o_left, mask=b_real, other=0) != 0
    p_right += stream * blocks * UK * RANK
    p_rest += stream * blocks * UK * RANK
    p_right_there += stream * blocks * UK
    p_scale += stream * blocks
    p_scores += stream * rows * width
    p_table += (stream * lines + own - first) * blocks
    b_name = begin + o_i
    if NOISE:
        b_name = dropout_rows(p_seed, stream, b_name)
    # Spans are whole steps: without that known, scores would be stored one by one.
    start = tl.multiple_of(tl.program_id(1) * span, BN)
    end = tl.minimum(start + span, width)
    if CAUSAL:
        end = tl.minimum(end, own if TOGETHER else begin + tile * BM + BM)
    # Told the stages, the compiler asks steps ahead for what lies beside the products too, which comes from far away.
    for begun in tl.range(start, end, BN, num_stages=STAGES):
        o_column = begun + tl.arange(0, BN)
        b_there = (o_column < width) | WHOLE
        # Scores of a head are held to some bytes, or a few rows.
        p_tile = p_scores + o_i[:, None] * width + o_column[None, :]
        b_mask = b_exist[:, None] & b_there[None, :]
        if TOGETHER:
            b_score = tl.load(p_table + o_column, mask=b_there, other=0.0)[None, :]
        else:
            b_score = tl.load(p_tile, mask=b_mask, other=0.0)
        b_scale = tl.load(p_scale + o_column, mask=b_there, other=0.0)[None, :]
        b_match = match_scores(
            b_left, b_rest, b_left_there, p_right, p_rest, p_right_there, begun, blocks, o_r,
            BM, BN, RANK, RP, UQ, UK, UG, HOLES, ROUNDS, WHOLE,
        )  # fmt: skip
        b_match = b_score + b_undone[:, None] * b_match * b_scale
        if NOISE:
            b_match = noisy(b_match, b_name[:, None], o_column[None, :])
        tl.store(p_tile, b_match, mask=b_mask)
