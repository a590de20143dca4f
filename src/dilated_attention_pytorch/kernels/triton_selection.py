"""What blocks add up to, and the best of them for every row in one pass: scores come tile by tile from their factors.

A block is ranked by one 64-bit word, its score above its number, so that the better is the larger word and of equals
the first wins. A row keeps its best words sorted and takes in those of a tile of blocks at a time.

Names as in `triton_primitives`. A program takes BM rows: query blocks, or tokens of one block (TOKENS). K is the power
of two that holds what a row may list, BN the blocks of a step, which divides K or is a multiple of it, M the hidden
units, RANK the width of the match and RP the power of two that holds it, D the width of what it projects, UQ and UK the
sub-blocks of a row, each taken REPEAT times, and of a key block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .selection import Factors, widths
from .triton_launch import OPTIONS, _precision, held
from .triton_primitives import NO_KEY, dropout_rows, scramble

NOTHING = tl.constexpr(-(2**63))
LAST = tl.constexpr(0x7FFFFFFF)
STEP_M = tl.constexpr(32)
STEP_D = tl.constexpr(64)
MOST_TOKENS = 32
"""Tokens that are summed up at once."""


@triton.jit
def summary_kernel(
    p_x, p_padding, p_summary, p_units, p_there, n, blocks, heads, sx_b, sx_h, sx_n,
    UNITS: tl.constexpr, UNIT: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    EXTREMES: tl.constexpr, BEFORE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """One block, of UNITS * UNIT tokens: its mean, with EXTREMES its maximum and minimum, and the means of its units.

    With BEFORE it stands in the place of the block after it, the last in that of the first.
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
    for unit in range(UNITS):
        b_sum = tl.zeros([DP], tl.float32)
        many = 0
        for step in range(UNIT // STEP):
            o_n = block * (UNITS * UNIT) + unit * UNIT + step * STEP + tl.arange(0, STEP)
            b_real = o_n < n
            if PADDING:
                b_real = b_real & (tl.load(p_padding + sample * n + o_n, mask=b_real, other=1) == 0)
            b_here = b_real[:, None] & b_wide[None, :]
            b_x = tl.load(p_x + o_n[:, None].to(tl.int64) * sx_n + o_d[None, :], mask=b_here, other=0.0).to(tl.float32)
            b_sum += tl.sum(b_x, 0)
            many += tl.sum(b_real.to(tl.int32), 0)
            if EXTREMES:
                b_high = tl.maximum(b_high, tl.max(tl.where(b_here, b_x, float("-inf")), 0))
                b_low = tl.minimum(b_low, tl.min(tl.where(b_here, b_x, float("inf")), 0))
        tl.store(p_units + (place * UNITS + unit) * D + o_d, b_sum / tl.maximum(many, 1), mask=b_wide)
        tl.store(p_there + place * UNITS + unit, (many > 0).to(tl.uint8))
        b_total += b_sum
        present += many
    b_mean = b_total / tl.maximum(present, 1)
    # What is not finite spoils the sum, so that the mean tells of every token.
    good = (tl.sum((b_mean - b_mean != 0.0).to(tl.int32), 0) == 0) & (present > 0)
    WIDE: tl.constexpr = 3 * D if EXTREMES else D
    tl.store(p_summary + place * WIDE + o_d, tl.where(good, b_mean, 0.0), mask=b_wide)
    if EXTREMES:
        tl.store(p_summary + place * WIDE + D + o_d, tl.where(good, b_high, 0.0), mask=b_wide)
        tl.store(p_summary + place * WIDE + 2 * D + o_d, tl.where(good, b_low, 0.0), mask=b_wide)
    if good == 0:
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
    there = torch.empty((batch, heads, t, units), dtype=torch.bool, device=x.device)
    present = there if padding is None else padding.contiguous()
    summary_kernel[(t, batch * heads)](
        x, present.view(torch.uint8), summary, means, there.view(torch.uint8), n, t, heads, *x.stride()[:3],
        UNITS=units, UNIT=unit, STEP=min(unit, MOST_TOKENS), D=d, DP=held(d), EXTREMES=extremes, BEFORE=before,
        PADDING=padding is not None, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return summary, means, there


@triton.jit
def words_of(b_score, b_column):
    """Words that order scores, and equal scores by block; 0 and -0 are equal."""
    b_bits = (b_score + 0.0).to(tl.int32, bitcast=True)
    b_ordered = b_bits ^ ((b_bits >> 31) & LAST)
    return (b_ordered.to(tl.int64) << 32) | (b_column ^ LAST).to(tl.int64)


@triton.jit
def read_words(b_word):
    """Scores and blocks of words; of `NOTHING` neither means anything."""
    b_ordered = (b_word >> 32).to(tl.int32)
    b_score = (b_ordered ^ ((b_ordered >> 31) & LAST)).to(tl.float32, bitcast=True)
    return b_score, (b_word & LAST).to(tl.int32) ^ LAST


@triton.jit
def best_of_tile(b_word, BM: tl.constexpr, BN: tl.constexpr, K: tl.constexpr):
    """The K best words of BN, descending; `NOTHING` after them where there are fewer."""
    if BN > K:
        return tl.topk(b_word, K)
    else:
        b_word = tl.sort(b_word, descending=True)
        for i in tl.static_range((K // BN).bit_length() - 1):
            b_more = tl.full([BM, BN << i], NOTHING, tl.int64)
            b_word = tl.reshape(tl.permute(tl.join(b_word, b_more), (0, 2, 1)), [BM, BN << (i + 1)])
        return b_word


@triton.jit
def gumbel(b_row, b_column):
    """`ops.selection.gumbel`, with `b_row` from `dropout_rows`, already broadcastable."""
    b_bits = scramble(b_row ^ (b_column.to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32))) >> 9
    b_uniform = (b_bits.to(tl.float32) + 0.5) / 8388608.0
    return -tl.log(-tl.log(b_uniform))


@triton.jit
def hidden_scores(
    p_rows, p_columns, p_weight, p_keep, o_own, b_exist, o_column, b_there, blocks,
    BM: tl.constexpr, BN: tl.constexpr, M: tl.constexpr, TOKENS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """w . relu(row + column) of all pairs, [BM, BN], or of one row for all, [1, BN]; factors lie unit by unit."""
    if TOKENS:
        b_sum = tl.zeros([BN], tl.float32)
        for first in range(0, M, STEP_M):
            o_m = first + tl.arange(0, STEP_M)
            b_unit = o_m < M
            b_row = tl.load(p_rows + o_m * blocks + o_own, mask=b_unit, other=0.0)
            b_weight = tl.load(p_weight + o_m, mask=b_unit, other=0.0)
            if KEEP:
                b_weight *= tl.load(p_keep + o_m * blocks + o_own, mask=b_unit, other=0.0)
            b_pair = b_unit[:, None] & b_there[None, :]
            b_column = tl.load(p_columns + o_m[:, None] * blocks + o_column[None, :], mask=b_pair, other=0.0)
            b_hidden = tl.maximum(b_row[:, None] + b_column, 0.0, propagate_nan=tl.PropagateNan.ALL)
            b_sum += tl.sum(b_hidden * b_weight[:, None], 0)
        return b_sum[None, :]
    else:
        b_sum = tl.zeros([BM, BN], tl.float32)
        for m in range(M):
            b_row = tl.load(p_rows + m * blocks + o_own, mask=b_exist, other=0.0)
            b_column = tl.load(p_columns + m * blocks + o_column, mask=b_there, other=0.0)
            b_hidden = tl.maximum(b_row[:, None] + b_column[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
            if KEEP:
                b_hidden *= tl.load(p_keep + m * blocks + o_own, mask=b_exist, other=0.0)[:, None]
            b_sum += b_hidden * tl.load(p_weight + m)
        return b_sum


@triton.jit
def match_scores(
    b_left, b_left_there, p_right, p_right_there, o_column, b_there, o_r,
    BM: tl.constexpr, BN: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, UQ: tl.constexpr, UK: tl.constexpr,
    HOLES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The best match of a sub-block of each row with one of each key block, [BM, BN], still without 1 / sqrt(rank)."""
    b_best = tl.full([BM, BN], NO_KEY, tl.float32)
    for unit in range(UK):
        o_unit = o_column.to(tl.int64) * UK + unit
        b_mask = b_there[:, None]
        if RANK < RP:
            b_mask = b_mask & (o_r < RANK)[None, :]
        b_right = tl.load(p_right + o_unit[:, None] * RANK + o_r[None, :], mask=b_mask, other=0.0)  # [BN, RP]
        b_pair = tl.dot(b_left, tl.trans(b_right), input_precision=PRECISION)  # [BM * UQ, BN]
        if HOLES:
            b_seen = tl.load(p_right_there + o_unit, mask=b_there, other=0) != 0
            b_pair = tl.where(b_left_there[:, None] & b_seen[None, :], b_pair, NO_KEY)
        if UQ > 1:
            b_pair = tl.max(tl.reshape(b_pair, [BM, UQ, BN]), 1)
        b_best = tl.maximum(b_best, b_pair, propagate_nan=tl.PropagateNan.ALL)
    if HOLES:
        # Nothing there on either side: as the torch path has it.
        b_best = tl.where(b_best == NO_KEY, 0.0, b_best)
    return b_best


@triton.jit
def projected(p_own, p_project, o_own, b_real, o_r, s_own, D: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """The query's side of the match, [rows, RP], of rows whose numbers count as 0 where they are not finite."""
    b_left = tl.zeros([o_own.shape[0], RP], tl.float32)
    for first in range(0, D, STEP_D):
        o_d = first + tl.arange(0, STEP_D)
        b_mask = b_real[:, None] & (o_d < D)[None, :]
        b_own = tl.load(p_own + o_own[:, None] * s_own + o_d[None, :], mask=b_mask, other=0.0).to(tl.float32)
        b_own = tl.where(b_own - b_own == 0.0, b_own, 0.0)
        b_mask = (o_d < D)[:, None] & (o_r < RANK)[None, :]
        b_project = tl.load(p_project + o_d[:, None] * RANK + o_r[None, :], mask=b_mask, other=0.0)
        b_left = tl.dot(b_own, b_project.to(tl.float32), b_left, input_precision=PRECISION)
    return b_left


@triton.jit(do_not_specialize=["rows", "blocks", "room", "local", "sink", "least", "most"])
def select_kernel(
    p_rows, p_columns, p_weight, p_bias, p_keep, p_own, p_project, p_left_there, p_right, p_right_there, p_log,
    p_visible, p_seed, p_indices, p_counts, rows, blocks, heads, room, local, sink, least, most, kept, coverage,
    coldest, root, so_b, so_h, so_n, s_weight, s_bias, s_project,
    BM: tl.constexpr, BN: tl.constexpr, K: tl.constexpr, M: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr,
    RP: tl.constexpr, UQ: tl.constexpr, UK: tl.constexpr, REPEAT: tl.constexpr, SIZE: tl.constexpr,
    TOKENS: tl.constexpr, CAUSAL: tl.constexpr, KEEP: tl.constexpr, HOLES: tl.constexpr, NOISE: tl.constexpr,
    COVERAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """List the best `room` blocks, or fewer, of BM rows, ascending, `blocks` where there is none.

    A row keeps a fraction `kept` of what it sees, or with COVERAGE as many as it takes for the predicted share to reach
    `coverage`, within `least` and `most`: that many less those kept without being listed. A row's own block has the
    logit 0 in that.
    """
    o_i = tl.program_id(0) * BM + tl.arange(0, BM)  # [BM]
    stream = tl.program_id(1).to(tl.int64)
    head = stream % heads
    b_exist = o_i < rows
    b_own = o_i // SIZE if TOKENS else o_i
    first_own = tl.program_id(0) * BM // SIZE if TOKENS else tl.program_id(0) * BM
    p_visible += stream * blocks
    if M > 0:
        p_rows += stream * M * blocks
        p_columns += stream * M * blocks
        p_weight += head * s_weight
        p_keep += stream * M * blocks
    o_r = tl.arange(0, RP)
    b_left = tl.zeros([BM * UQ, RP], tl.float32)
    b_left_there = tl.full([BM * UQ], 1, tl.int32) > 0
    if RANK > 0:
        o_left = tl.program_id(0) * (BM * UQ // REPEAT) + tl.arange(0, BM * UQ) // REPEAT
        b_real = o_left < rows * (UQ // REPEAT)
        p_own += (stream // heads) * so_b + head * so_h
        p_project += head * s_project
        b_left = projected(p_own, p_project, o_left.to(tl.int64), b_real, o_r, so_n, D, RANK, RP, PRECISION)
        if HOLES and not TOKENS:
            b_left_there = tl.load(p_left_there + stream * rows * (UQ // REPEAT) + o_left, mask=b_real, other=0) != 0
        p_right += stream * blocks * UK * RANK
        p_right_there += stream * blocks * UK
    bias = tl.load(p_bias + head * s_bias)
    inverse = 1.0 / tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest)
    b_noise = b_own
    if NOISE:
        b_noise = dropout_rows(p_seed, stream, o_i)

    b_best = tl.full([BM, K], NOTHING, tl.int64)
    # The softmax over all blocks, the row's own with the logit 0 and so far alone; b_forced is what needs no listing.
    b_top = tl.zeros([BM], tl.float32)
    b_total = tl.full([BM], 1.0, tl.float32)
    b_forced = tl.full([BM], 1.0, tl.float32)
    # Blocks that a row sees, and those of them that need no listing, its own among both.
    b_many = tl.full([BM], 1, tl.int32)
    b_taken = tl.full([BM], 1, tl.int32)
    end = blocks
    if CAUSAL:
        end = tl.minimum(blocks, first_own if TOKENS else first_own + BM - 1)
    for first in range(0, end, BN):
        o_column = first + tl.arange(0, BN)
        b_there = o_column < blocks
        b_score = tl.zeros([BM, BN], tl.float32) + bias
        if M > 0:
            b_score += hidden_scores(
                p_rows, p_columns, p_weight, p_keep, first_own if TOKENS else o_i, b_exist, o_column, b_there, blocks,
                BM, BN, M, TOKENS, KEEP,
            )  # fmt: skip
        if RANK > 0:
            b_match = match_scores(
                b_left, b_left_there, p_right, p_right_there, o_column, b_there, o_r,
                BM, BN, RANK, RP, UQ, UK, HOLES, PRECISION,
            )  # fmt: skip
            b_score += b_match / root
        b_score *= inverse
        b_column = o_column[None, :]
        b_away = b_own[:, None] - b_column
        b_within = b_away > 0 if CAUSAL else b_away != 0
        b_within = b_within & (tl.load(p_visible + o_column, mask=b_there, other=0) != 0)[None, :]
        b_near = (tl.abs(b_away) < local) | (b_column < sink)
        b_many += tl.sum(b_within.to(tl.int32), 1)
        b_taken += tl.sum((b_within & b_near).to(tl.int32), 1)
        # A score that is not a number says nothing for its block.
        b_within = b_within & (b_score == b_score) & (b_score != NO_KEY)
        if COVERAGE:
            b_seen = tl.where(b_within, b_score, NO_KEY)
            b_higher = tl.maximum(b_top, tl.max(b_seen, 1))
            b_shrink = tl.exp(b_top - b_higher)
            b_weight = tl.exp(b_seen - b_higher[:, None])
            b_total = b_total * b_shrink + tl.sum(b_weight, 1)
            b_forced = b_forced * b_shrink + tl.sum(tl.where(b_near, b_weight, 0.0), 1)
            b_top = b_higher
        if NOISE:
            b_score += gumbel(b_noise[:, None], b_column)
        b_word = tl.where(b_within & (b_near == 0), words_of(b_score, b_column), NOTHING)
        if tl.max(tl.max((b_word > tl.min(b_best, 1)[:, None]).to(tl.int32), 1), 0) > 0:
            # The larger of one list ascending and one descending are the best of both, and rise and fall but once.
            b_best = tl.bitonic_merge(tl.maximum(b_best, best_of_tile(b_word, BM, BN, K)), descending=False)

    b_chosen, b_block = read_words(b_best)
    b_some = b_best != NOTHING
    o_rank = K - 1 - tl.arange(0, K)[None, :]
    if COVERAGE:
        if NOISE:
            b_chosen -= gumbel(b_noise[:, None], b_block)
        b_share = tl.where(b_some, tl.exp(b_chosen - b_top[:, None]) / b_total[:, None], 0.0)
        b_held = b_forced / b_total
        b_reached = b_held[:, None] + tl.cumsum(b_share, 1, reverse=True)
        b_short = (b_reached < coverage) & (o_rank < room)
        b_wanted = tl.where(b_held < coverage, tl.sum(b_short.to(tl.int32), 1) + 1, 0) + b_taken
    else:
        # Half goes to the even number, as torch rounds.
        b_share = kept * b_many.to(tl.float32)
        b_wanted = tl.floor(b_share).to(tl.int32)
        b_rest = b_share - tl.floor(b_share)
        b_wanted += ((b_rest > 0.5) | ((b_rest == 0.5) & (b_wanted % 2 == 1))).to(tl.int32)
    b_limit = tl.minimum(tl.maximum(b_wanted, least), most) - b_taken
    b_listed = b_some & (o_rank < tl.minimum(b_limit, room)[:, None])
    b_sorted = tl.sort(tl.where(b_listed, b_block, blocks))
    o_row = stream * rows + o_i
    o_k = tl.arange(0, K)
    p_line = p_indices + o_row[:, None] * room + o_k[None, :]
    tl.store(p_line, b_sorted, mask=b_exist[:, None] & (o_k < room)[None, :])
    tl.store(p_counts + o_row, tl.sum(b_listed.to(tl.int32), 1), mask=b_exist)


def listed_blocks(
    factors: Factors,
    visible: Tensor,
    room: int,
    *,
    block_size: int,
    is_causal: bool,
    per_token: bool,
    local_blocks: int,
    sink_blocks: int,
    kept: float,
    coverage: float | None,
    least: int,
    most: int | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The best blocks of every row, int32 (b, h, r, room), ascending and then t, and how many, int32 (b, h, r).

    `factors` are such as `Factors.why_not` accepts, `room` is the most that any row lists; the rest is what
    `ops.selection.select` is told, and its `Budget`.
    """
    batch, heads, rows, own_units, d = factors.own.shape
    t, units, rank = factors.right.shape[2:]
    hidden = factors.rows.shape[3]
    indices = torch.empty((batch, heads, rows, room), dtype=torch.int32, device=visible.device)
    counts = torch.empty((batch, heads, rows), dtype=torch.int32, device=visible.device)
    cut = widths(room, own_units)
    # Tokens of one program share a block.
    at_once = min(cut.rows, block_size) if per_token else cut.rows
    # Where one of these is not given, no program reads it.
    holes = factors.right_there is not None
    left_there = visible if factors.left_there is None else factors.left_there
    right_there = visible if factors.right_there is None else factors.right_there
    by_unit = [x.mT.contiguous() for x in (factors.rows, factors.columns, factors.keep) if x is not None]
    own = factors.own.flatten(2, 3)
    shared = factors.weight.stride(0), factors.bias.stride(0), factors.project.stride(0)
    select_kernel[(-(-rows // at_once), batch * heads)](
        by_unit[0], by_unit[1], factors.weight, factors.bias, by_unit[-1], own, factors.project,
        left_there.contiguous().view(torch.uint8), factors.right.contiguous(),
        right_there.contiguous().view(torch.uint8), factors.log_temperature, visible.view(torch.uint8),
        counts if seed is None else seed, indices, counts, rows, t, heads, room, local_blocks, sink_blocks, least,
        t if most is None else most, kept, 0.0 if coverage is None else coverage, float(factors.coldest),
        max(rank, 1) ** 0.5, *own.stride()[:3], *shared,
        BM=at_once, BN=cut.columns, K=cut.listed, M=hidden, D=d, RANK=rank, RP=held(max(rank, 1)), UQ=cut.units,
        UK=units, REPEAT=cut.repeat, SIZE=block_size, TOKENS=per_token, CAUSAL=is_causal,
        KEEP=factors.keep is not None, HOLES=holes, NOISE=seed is not None, COVERAGE=coverage is not None,
        PRECISION=_precision(torch.float32),
        num_warps=cut.warps, num_stages=1, **OPTIONS,
    )  # fmt: skip
    return indices, counts
