"""Top-k blocks of every row, from stored scores or from scores that stay in registers. Names as in `topk_kernels`."""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton.primitives import NO_KEY, dropout_rows, projected
from .block_lists_kernels import popcount
from .block_scores_kernels import match_scores, scaled_halves
from .topk_kernels import (
    add_noise,
    approx_reciprocal,
    clear_lists,
    count_ones,
    order_key,
    rounded_fraction,
    top_k_mask,
    unpack_bits,
    visible_and_near_words,
    write_lists,
)

FULL_STATISTICS = tl.constexpr(256)
"""Blocks up to which the mean of a row is computed from all of its scores."""


@triton.jit(do_not_specialize=["begin", "rows", "total", "room", "local", "sink", "least", "most"])
def rank_kernel(
    p_scores, p_sight, p_seed, p_indices, p_counts, begin, rows, width, total, blocks, room, local, sink, least, most,
    kept, coverage, BM: tl.constexpr, T: tl.constexpr, W: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    SIZE: tl.constexpr, CAUSAL: tl.constexpr, READY: tl.constexpr, NOISE: tl.constexpr, COVERAGE: tl.constexpr,
):  # fmt: skip
    """Write the top blocks of BM rows of one block as ascending lists of capacity `room`, padded with `blocks`.

    A row keeps the fraction `kept` of its visible blocks, all of which are among the first `width`, or with COVERAGE
    the fewest blocks whose predicted attention reaches `coverage`. The number is between `least` and `most` and
    includes blocks that are kept without being listed. COVERAGE uses the softmax of the scores, with logit 0 for the
    row's own block. SIZE rows belong to one block.

    Scores that are READY contain the noise, and NO_KEY for blocks that are not listed; `p_sight` is then the result of
    `count_listable`. Otherwise `p_sight` holds the visible blocks as bool, and NOISE adds the noise here.
    """
    start = tl.program_id(0) * BM
    o_i = start + tl.arange(0, BM)  # [BM]
    stream = tl.program_id(1).to(tl.int64)
    b_exist = o_i < rows
    # A tile [BM, T / W, W] keeps a row in W / V threads. Rows past the end repeat the last one and are not stored.
    o_line = tl.minimum(o_i, rows - 1)[:, None, None] * width
    o_first, o_lane = W * tl.arange(0, T // W)[None, :, None], tl.arange(0, W)[None, None, :]
    o_tile = o_first + o_lane
    own = (begin + start) // SIZE
    line = stream * total + begin + start
    # Added in this order, one address register serves all loads of a thread. The contiguity hint of 2 along rows keeps
    # several rows in a warp on every compiler release.
    p_scores = tl.max_contiguous(p_scores + stream * rows * width + o_line + o_lane + o_first, [2, 1, W])
    if READY:
        # Scores of later blocks were never computed, except up to a multiple of 16, the smallest tile of scores.
        end = tl.minimum((own + 15) // 16 * 16, width) if CAUSAL else width
        may = tl.load(p_sight + stream * blocks + own)
        b_score = tl.reshape(tl.load(p_scores, mask=o_tile < end, other=NO_KEY), [BM, T])
        b_candidates = tl.zeros([BM], tl.int32) + (may >> 16)
        b_count = tl.where(b_exist, may & 0xFFFF, 0)
        # A long row is sampled, one in V scores, which suffices for the first threshold. The others are replaced by the
        # constant -0.0, so that the compiler drops their additions.
        EACH: tl.constexpr = V if T > FULL_STATISTICS else 1
        b_sampled = (tl.arange(0, T) % EACH == 0)[None, :]
        b_finite = tl.where(tl.abs(b_score) < float("inf"), b_score, 0.0)
        b_sum = tl.sum(tl.where(b_sampled, b_finite, -0.0), 1) * EACH
        b_squares = tl.sum(tl.where(b_sampled, b_finite * b_finite, -0.0), 1) * EACH
    else:
        # Undefined values past the width do not matter, because no row sees those blocks.
        b_score = tl.load(p_scores, mask=o_tile < width)
        b_score = tl.reshape(b_score, [BM, T])
        b_visible, b_near = visible_and_near_words(p_sight + stream * blocks, own, blocks, local, sink, T, CAUSAL)
        # Visible blocks, and those of them that are not listed; both counts include the own block.
        seen = 1 + tl.sum(popcount(b_visible), 0)
        taken = 1 + tl.sum(popcount(b_visible & b_near), 0)
        b_share = b_score
        if COVERAGE:
            b_share = tl.where(unpack_bits(b_visible, T) & (b_score > NO_KEY), b_score, NO_KEY)
            b_top = tl.maximum(tl.max(b_share, 1), 0.0)
            b_share = tl.exp(b_share - b_top[:, None])
            b_own = tl.exp(-b_top)
            b_total = b_own + tl.sum(b_share, 1)
            b_near_share = (b_own + tl.sum(tl.where(unpack_bits(b_near, T), b_share, 0.0), 1)) / b_total
            b_share = tl.where(unpack_bits(b_near, T), 0.0, b_share / b_total[:, None])
        if NOISE:
            b_noise_row = dropout_rows(p_seed, stream, begin + o_i)
            b_score = add_noise(b_score, b_noise_row[:, None], tl.arange(0, T)[None, :])
        # NaN is above no threshold, so that its block is never listed.
        b_listable = unpack_bits(b_visible & ~b_near, T)
        b_score = tl.where(b_listable, b_score, NO_KEY)
        b_finite = tl.where(b_listable, b_score, 0.0)
        b_candidates = tl.zeros([BM], tl.int32) + (seen - taken)
        b_sum = tl.sum(b_finite, 1)
        b_squares = tl.sum(b_finite * b_finite, 1)
        if tl.max((b_sum - b_sum != 0.0).to(tl.int32), 0) > 0:
            b_candidates = count_ones((b_score > NO_KEY).to(tl.float32), BM, T, W, V)
            b_finite = tl.where(tl.abs(b_score) < float("inf"), b_score, 0.0)
            b_sum = tl.sum(b_finite, 1)
            b_squares = tl.sum(b_finite * b_finite, 1)
        if COVERAGE:
            # Binary search for the largest key whose blocks and all above reach the coverage; of ties the first count.
            b_key = order_key(b_score)
            b_limit = tl.zeros([BM], tl.uint32)
            for bit in range(32):
                b_trial = b_limit | (tl.full([], 1, tl.uint32) << (31 - bit))
                b_reached = b_near_share + tl.sum(tl.where(b_key >= b_trial[:, None], b_share, 0.0), 1)
                b_limit = tl.where(b_reached >= coverage, b_trial, b_limit)
            b_above = b_key > b_limit[:, None]
            b_tied = (b_key == b_limit[:, None]) & (b_key > 0)
            b_reached = b_near_share + tl.sum(tl.where(b_above, b_share, 0.0), 1)
            b_equal = tl.where(b_tied, b_share, 0.0)
            b_needed = b_tied & (b_reached[:, None] + tl.cumsum(b_equal, 1) - b_equal < coverage)
            # If all blocks together do not reach it, one more than there are.
            b_wanted = count_ones((b_above | b_needed).to(tl.float32), BM, T, W, V) + (b_limit == 0).to(tl.int32)
            b_wanted = tl.where(b_near_share < coverage, b_wanted, 0) + taken
        else:
            b_wanted = rounded_fraction(seen, kept)
        b_wanted = tl.minimum(tl.maximum(b_wanted, least), most) - taken
        b_count = tl.minimum(tl.where(b_exist, tl.minimum(b_wanted, room), 0), b_candidates)
    b_inverse = approx_reciprocal(tl.maximum(b_candidates, 1).to(tl.float32))
    b_mean, b_square = b_sum * b_inverse, b_squares * b_inverse
    b_listed = top_k_mask(b_score, b_mean, b_square, b_candidates, b_count, BM, T, W, V, False, READY)
    clear_lists(p_indices + line * room, b_exist, room, blocks, BM, K)
    write_lists(p_indices + line * room, p_counts + line, b_listed, b_exist, room, BM, T, False)


@triton.jit
def insert_tile(b_tile, begun, b_first, b_second, b_third, b_fourth, WIDE: tl.constexpr):
    """Insert a tile [BM, BN] at column `begun` into four adjacent arrays [BM, WIDE / BN, BN]; returns the four.
    Registers cannot be indexed at run time: each of the WIDE / BN slots of one array selects old or new values."""
    BN: tl.constexpr = b_tile.shape[1]
    b_here = tl.arange(0, WIDE // BN)[None, :, None] == begun // BN % (WIDE // BN)
    b_tile = b_tile[:, None, :]
    if begun < 2 * WIDE:
        if begun < WIDE:
            b_first = tl.where(b_here, b_tile, b_first)
        else:
            b_second = tl.where(b_here, b_tile, b_second)
    else:
        if begun < 3 * WIDE:
            b_third = tl.where(b_here, b_tile, b_third)
        else:
            b_fourth = tl.where(b_here, b_tile, b_fourth)
    return b_first, b_second, b_third, b_fourth


@triton.jit
def concatenated(b_first, b_second, b_third, b_fourth):
    """Concatenate four arrays [BM, steps, BN] along the columns, [BM, 4 * steps * BN]."""
    SHAPE: tl.constexpr = b_first.shape
    b_all = tl.permute(tl.join(tl.join(b_first, b_third), tl.join(b_second, b_fourth)), [0, 3, 4, 1, 2])
    return tl.reshape(b_all, [SHAPE[0], 4 * SHAPE[1] * SHAPE[2]])


@triton.jit(do_not_specialize=["first", "begin", "lines", "total", "room"])
def choice_kernel(
    p_table, p_own, p_project, p_right, p_rest, p_scale, p_right_there, p_log, p_may, p_seed, p_indices, p_counts,
    first, begin, lines, total, blocks, heads, room, coldest, root, so_b, so_h, so_n, s_project, BM: tl.constexpr,
    BN: tl.constexpr, T: tl.constexpr, K: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    UK: tl.constexpr, UG: tl.constexpr, SIZE: tl.constexpr, CAUSAL: tl.constexpr, NOISE: tl.constexpr,
    HOLES: tl.constexpr, ROUNDS: tl.constexpr, FEW: tl.constexpr, NEXT: tl.constexpr, AFTER: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fused `match_kernel` and `rank_kernel` for BM tokens of one block; their scores are never stored.

    The launch covers the tokens of the blocks from `begin` on. `p_table` holds the part of the scores that tokens of a
    block share, `lines` rows from block `first` on, with NO_KEY for blocks that are not listed. T is at least the
    number of blocks that a token sees. With FEW, programs whose tokens list nothing return early. With NEXT, the next
    launch, which does not depend on this one and has AFTER set, may start once all programs of this one have started.
    """
    if NEXT:
        tl.extra.cuda.gdc_launch_dependents()
    # Longest rows first, over all heads: under a causal mask the last tokens see the most blocks.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    stream = tl.program_id(0).to(tl.int64)
    if AFTER and (tile == 0) & (stream == 0):
        # The kernel after this one waits for this launch only, hence one program waits for the launch before.
        tl.extra.cuda.gdc_wait()
    head = stream % heads
    own = begin + tile * BM // SIZE
    o_row = begin * SIZE + tile * BM + tl.arange(0, BM)
    b_exist = o_row < total
    p_table += (stream * lines + own - first) * blocks
    p_right += stream * blocks * UK * RANK
    p_rest += stream * blocks * UK * RANK
    # With at least one iteration the compiler needs no initial values of the results in registers.
    end = tl.maximum(own if CAUSAL else blocks, 1)
    may = tl.load(p_may + stream * blocks + own)
    line = stream * total + begin * SIZE + tile * BM
    p_indices += line * room
    p_counts += line
    if FEW and (may & 0xFFFF) == 0:
        # Tokens with few visible blocks keep the unlisted ones only.
        clear_lists(p_indices, b_exist, room, blocks, BM, K)
        tl.store(p_counts + tl.arange(0, BM), tl.zeros([BM], tl.int32), mask=b_exist)
        return
    temperature = tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest)
    b_noise_row = dropout_rows(p_seed, stream, o_row)[:, None] if NOISE else o_row[:, None]
    o_r = tl.arange(0, RP)
    p_own += (stream // heads) * so_b + head * so_h
    b_left = projected(
        p_own, p_project + head * s_project, o_row.to(tl.int64), b_exist, o_r, so_n, D, RANK, RP, PRECISION,
        64 if D > 32 else 32,
    )  # fmt: skip
    b_left, b_rest, b_inverse_scale = scaled_halves(b_left, BM, 1)
    b_inverse_scale *= 1.0 / temperature / root
    # Scores [BM, T] as eight arrays, because an insertion at a run-time column selects over a whole array.
    EIGHTH: tl.constexpr = T // 8
    b_1 = tl.full([BM, EIGHTH // BN, BN], NO_KEY, tl.float32)
    b_2, b_3, b_4, b_5, b_6, b_7, b_8 = b_1, b_1, b_1, b_1, b_1, b_1, b_1
    # Four partial sums per row, one in each of its lanes.
    b_sum = tl.zeros([BM, 1, 4], tl.float32)
    b_squares = b_sum
    for begun in range(0, end, BN):
        o_column = begun + tl.arange(0, BN)
        # Loaded before the products, whose duration hides the latency.
        b_exists = (o_column < blocks) | WHOLE
        b_line = tl.load(p_table + o_column, mask=b_exists, other=NO_KEY)
        b_scale = tl.load(p_scale + stream * blocks + o_column, mask=b_exists, other=0.0)
        b_match = b_inverse_scale[:, None] * match_scores(
            b_left, b_rest, p_right, p_rest, p_right_there + stream * blocks * UK, begun, blocks, o_r,
            BM, BN, RANK, RP, UK, UG, HOLES, ROUNDS, WHOLE,
        )  # fmt: skip
        # NaN is above no threshold, so that its block is never listed.
        b_tile = b_match * b_scale[None, :] + b_line[None, :]
        if NOISE:
            b_tile = add_noise(b_tile, b_noise_row, o_column[None, :])
        # Blocks that are not listed count as 0 in the sums.
        b_four = tl.where((b_line != NO_KEY)[None, :], b_tile, 0.0)
        b_four = tl.reshape(b_four[:, None, :], [BM, 1, BN // 8, 4, 2])
        b_sum += tl.sum(tl.sum(b_four, 4), 2)
        b_squares += tl.sum(tl.sum(b_four * b_four, 4), 2)
        if begun < T // 2:
            b_1, b_2, b_3, b_4 = insert_tile(b_tile, begun, b_1, b_2, b_3, b_4, EIGHTH)
        else:
            b_5, b_6, b_7, b_8 = insert_tile(b_tile, begun - T // 2, b_5, b_6, b_7, b_8, EIGHTH)
    b_score = tl.join(concatenated(b_1, b_2, b_3, b_4), concatenated(b_5, b_6, b_7, b_8))
    b_score = tl.reshape(tl.permute(b_score, [0, 2, 1]), [BM, T])
    each = approx_reciprocal(tl.maximum(may >> 16, 1).to(tl.float32))
    b_mean = tl.gather(tl.sum(tl.sum(b_sum, 2), 1), tl.arange(0, BM), 0) * each
    b_square = tl.gather(tl.sum(tl.sum(b_squares, 2), 1), tl.arange(0, BM), 0) * each
    b_candidates = tl.zeros([BM], tl.int32) + (may >> 16)
    b_count = tl.where(b_exist, may & 0xFFFF, 0)
    b_listed = top_k_mask(b_score, b_mean, b_square, b_candidates, b_count, BM, T, T, 1, True, True)
    clear_lists(p_indices, b_exist, room, blocks, BM, K)
    write_lists(p_indices, p_counts, b_listed, b_exist, room, BM, T, True)
