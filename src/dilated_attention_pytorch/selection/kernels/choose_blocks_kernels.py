"""The best blocks of every row, by scores computed as they are needed. Names as in `topk_kernels`."""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton.primitives import NO_KEY, dropout_rows, projected
from .block_lists_kernels import ones_of
from .block_scores_kernels import halved, match_scores
from .topk_kernels import (
    best_of,
    clear_lists,
    counted,
    flags,
    noisy,
    place_of,
    quick_inverse,
    share_of,
    sight_words,
    write_lists,
)

FEWEST_ASKED = tl.constexpr(256)
"""Blocks up to which all scores of a row are asked for their mean."""


@triton.jit(do_not_specialize=["begin", "rows", "total", "room", "local", "sink", "least", "most"])
def rank_kernel(
    p_scores, p_sight, p_seed, p_indices, p_counts, begin, rows, width, total, blocks, room, local, sink, least, most,
    kept, coverage, BM: tl.constexpr, T: tl.constexpr, W: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    SIZE: tl.constexpr, CAUSAL: tl.constexpr, READY: tl.constexpr, NOISE: tl.constexpr, COVERAGE: tl.constexpr,
):  # fmt: skip
    """List the best `room` blocks, or fewer, of BM rows of a block, ascending, `blocks` where there is none.

    A row keeps a fraction `kept` of what it sees, all in the first `width` blocks, or with COVERAGE as many as it takes
    for the predicted share to reach `coverage`, within `least` and `most`: that many less those kept without being
    listed. A row's own block has the logit 0 in that. SIZE rows are of one block. `p_sight` tells which blocks are
    visible, or of scores that are READY, without what is not listed and with noise, what `may_list` gives.
    """
    start = tl.program_id(0) * BM
    o_i = start + tl.arange(0, BM)  # [BM]
    stream = tl.program_id(1).to(tl.int64)
    b_exist = o_i < rows
    # A tile of [BM, T / W, W] has a row in W / V threads. Rows past the last are ranked like it, and not listed.
    o_line = tl.minimum(o_i, rows - 1)[:, None, None] * width
    o_first, o_lane = W * tl.arange(0, T // W)[None, :, None], tl.arange(0, W)[None, None, :]
    o_tile = o_first + o_lane
    own = (begin + start) // SIZE
    line = stream * total + begin + start
    # In this order one address serves all loads of a thread. Told to follow one another too, though fewer than blocks,
    # rows share a warp whichever way a compiler goes.
    p_scores = tl.max_contiguous(p_scores + stream * rows * width + o_line + o_lane + o_first, [2, 1, W])
    if READY:
        # What comes later was never made, but for the rest of 16, the fewest that are made at once.
        end = tl.minimum((own + 15) // 16 * 16, width) if CAUSAL else width
        may = tl.load(p_sight + stream * blocks + own)
        b_score = tl.reshape(tl.load(p_scores, mask=o_tile < end, other=NO_KEY), [BM, T])
        b_open = tl.zeros([BM], tl.int32) + (may >> 16)
        b_count = tl.where(b_exist, may & 0xFFFF, 0)
        # Of many, one in four, where a thread reads so many at a time, say nearly as well what to try first. What
        # is left out is -0, which nobody adds.
        EACH: tl.constexpr = V if T > FEWEST_ASKED else 1
        b_asked = (tl.arange(0, T) % EACH == 0)[None, :]
        b_finite = tl.where(tl.abs(b_score) < float("inf"), b_score, 0.0)
        b_sum = tl.sum(tl.where(b_asked, b_finite, -0.0), 1) * EACH
        b_squares = tl.sum(tl.where(b_asked, b_finite * b_finite, -0.0), 1) * EACH
    else:
        # Nothing is seen past the width, so that what stands there does not matter.
        b_score = tl.load(p_scores, mask=o_tile < width)
        b_score = tl.reshape(b_score, [BM, T])
        b_seen, b_near = sight_words(p_sight + stream * blocks, own, blocks, local, sink, T, CAUSAL)
        # Blocks that a row sees, and those of them that need no listing, its own among both.
        seen = 1 + tl.sum(ones_of(b_seen), 0)
        taken = 1 + tl.sum(ones_of(b_seen & b_near), 0)
        b_share = b_score
        if COVERAGE:
            b_share = tl.where(flags(b_seen, T) & (b_score > NO_KEY), b_score, NO_KEY)
            b_top = tl.maximum(tl.max(b_share, 1), 0.0)
            b_share = tl.exp(b_share - b_top[:, None])
            b_own = tl.exp(-b_top)
            b_total = b_own + tl.sum(b_share, 1)
            b_held = (b_own + tl.sum(tl.where(flags(b_near, T), b_share, 0.0), 1)) / b_total
            b_share = tl.where(flags(b_near, T), 0.0, b_share / b_total[:, None])
        if NOISE:
            b_name = dropout_rows(p_seed, stream, begin + o_i)
            b_score = noisy(b_score, b_name[:, None], tl.arange(0, T)[None, :])
        # A score that is not a number says nothing for its block: it lies above none.
        b_listable = flags(b_seen & ~b_near, T)
        b_score = tl.where(b_listable, b_score, NO_KEY)
        b_finite = tl.where(b_listable, b_score, 0.0)
        b_open = tl.zeros([BM], tl.int32) + (seen - taken)
        b_sum = tl.sum(b_finite, 1)
        b_squares = tl.sum(b_finite * b_finite, 1)
        if tl.max((b_sum - b_sum != 0.0).to(tl.int32), 0) > 0:
            b_open = counted((b_score > NO_KEY).to(tl.float32), BM, T, W, V)
            b_finite = tl.where(tl.abs(b_score) < float("inf"), b_score, 0.0)
            b_sum = tl.sum(b_finite, 1)
            b_squares = tl.sum(b_finite * b_finite, 1)
        if COVERAGE:
            # As many as lie above the largest place from which on the share is reached, and of equals the first.
            b_place = place_of(b_score)
            b_limit = tl.zeros([BM], tl.uint32)
            for bit in range(32):
                b_trial = b_limit | (tl.full([], 1, tl.uint32) << (31 - bit))
                b_reached = b_held + tl.sum(tl.where(b_place >= b_trial[:, None], b_share, 0.0), 1)
                b_limit = tl.where(b_reached >= coverage, b_trial, b_limit)
            b_above = b_place > b_limit[:, None]
            b_tied = (b_place == b_limit[:, None]) & (b_place > 0)
            b_reached = b_held + tl.sum(tl.where(b_above, b_share, 0.0), 1)
            b_equal = tl.where(b_tied, b_share, 0.0)
            b_short = b_tied & (b_reached[:, None] + tl.cumsum(b_equal, 1) - b_equal < coverage)
            # Where nothing reaches it, one more than there are.
            b_wanted = counted((b_above | b_short).to(tl.float32), BM, T, W, V) + (b_limit == 0).to(tl.int32)
            b_wanted = tl.where(b_held < coverage, b_wanted, 0) + taken
        else:
            b_wanted = share_of(seen, kept)
        b_wanted = tl.minimum(tl.maximum(b_wanted, least), most) - taken
        b_count = tl.minimum(tl.where(b_exist, tl.minimum(b_wanted, room), 0), b_open)
    b_each = quick_inverse(tl.maximum(b_open, 1).to(tl.float32))
    b_mean, b_square = b_sum * b_each, b_squares * b_each
    b_listed = best_of(b_score, b_mean, b_square, b_open, b_count, BM, T, W, V, False, READY)
    clear_lists(p_indices + line * room, b_exist, room, blocks, BM, K)
    write_lists(p_indices + line * room, p_counts + line, b_listed, b_exist, room, BM, T, False)


@triton.jit
def put(b_tile, begun, b_first, b_second, b_third, b_fourth, WIDE: tl.constexpr):
    """Four parts of WIDE columns, [BM, WIDE / BN, BN], one of which has the tile as its columns from `begun` on."""
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
def together_of(b_first, b_second, b_third, b_fourth):
    """Four parts of [BM, steps, BN], one after the other, [BM, 4 * steps * BN]."""
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
    """What `match_kernel` and `rank_kernel` give for tokens of the blocks from `begin` on, BM of one block.

    `p_table` has `lines` lines, from block `first` on, NO_KEY where nothing is listed. T holds the blocks that a token
    sees. With FEW, programs whose tokens list nothing end at once. With NEXT, programs of the next launch, which is
    AFTER this one, start as soon as the last of this one have started: it needs nothing of this one.
    """
    if NEXT:
        tl.extra.cuda.gdc_launch_dependents()
    # Those that see most begin first, of all heads.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    stream = tl.program_id(0).to(tl.int64)
    if AFTER and (tile == 0) & (stream == 0):
        # What follows waits for this launch, and must wait for the one before.
        tl.extra.cuda.gdc_wait()
    head = stream % heads
    own = begin + tile * BM // SIZE
    o_row = begin * SIZE + tile * BM + tl.arange(0, BM)
    b_exist = o_row < total
    p_table += (stream * lines + own - first) * blocks
    p_right += stream * blocks * UK * RANK
    p_rest += stream * blocks * UK * RANK
    # A loop that surely runs needs no registers set for when it does not.
    end = tl.maximum(own if CAUSAL else blocks, 1)
    may = tl.load(p_may + stream * blocks + own)
    line = stream * total + begin * SIZE + tile * BM
    p_indices += line * room
    p_counts += line
    if FEW and (may & 0xFFFF) == 0:
        # Those that see few blocks keep what needs no listing, and no more.
        clear_lists(p_indices, b_exist, room, blocks, BM, K)
        tl.store(p_counts + tl.arange(0, BM), tl.zeros([BM], tl.int32), mask=b_exist)
        return
    temperature = tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest)
    b_name = dropout_rows(p_seed, stream, o_row)[:, None] if NOISE else o_row[:, None]
    o_r = tl.arange(0, RP)
    p_own += (stream // heads) * so_b + head * so_h
    b_left = projected(
        p_own, p_project + head * s_project, o_row.to(tl.int64), b_exist, o_r, so_n, D, RANK, RP, PRECISION,
        64 if D > 32 else 32,
    )  # fmt: skip
    b_left, b_rest, b_undone = halved(b_left, BM, 1)
    b_undone *= 1.0 / temperature / root
    # In eighths, and only one is written at a time: its place is not known before.
    EIGHTH: tl.constexpr = T // 8
    b_1 = tl.full([BM, EIGHTH // BN, BN], NO_KEY, tl.float32)
    b_2, b_3, b_4, b_5, b_6, b_7, b_8 = b_1, b_1, b_1, b_1, b_1, b_1, b_1
    # Four sums a row, one in each of its threads.
    b_sum = tl.zeros([BM, 1, 4], tl.float32)
    b_squares = b_sum
    for begun in range(0, end, BN):
        o_column = begun + tl.arange(0, BN)
        # Asked for before the products, which take as long as it does to come.
        b_there = (o_column < blocks) | WHOLE
        b_line = tl.load(p_table + o_column, mask=b_there, other=NO_KEY)
        b_scale = tl.load(p_scale + stream * blocks + o_column, mask=b_there, other=0.0)
        b_match = b_undone[:, None] * match_scores(
            b_left, b_rest, b_exist, p_right, p_rest, p_right_there + stream * blocks * UK, begun, blocks, o_r,
            BM, BN, RANK, RP, 1, UK, UG, HOLES, ROUNDS, WHOLE,
        )  # fmt: skip
        # A score that is not a number says nothing for its block: it lies above none.
        b_tile = b_match * b_scale[None, :] + b_line[None, :]
        if NOISE:
            b_tile = noisy(b_tile, b_name, o_column[None, :])
        # What is not listed counts as 0 in the sums.
        b_four = tl.where((b_line != NO_KEY)[None, :], b_tile, 0.0)
        b_four = tl.reshape(b_four[:, None, :], [BM, 1, BN // 8, 4, 2])
        b_sum += tl.sum(tl.sum(b_four, 4), 2)
        b_squares += tl.sum(tl.sum(b_four * b_four, 4), 2)
        if begun < T // 2:
            b_1, b_2, b_3, b_4 = put(b_tile, begun, b_1, b_2, b_3, b_4, EIGHTH)
        else:
            b_5, b_6, b_7, b_8 = put(b_tile, begun - T // 2, b_5, b_6, b_7, b_8, EIGHTH)
    b_score = tl.join(together_of(b_1, b_2, b_3, b_4), together_of(b_5, b_6, b_7, b_8))
    b_score = tl.reshape(tl.permute(b_score, [0, 2, 1]), [BM, T])
    each = quick_inverse(tl.maximum(may >> 16, 1).to(tl.float32))
    b_mean = tl.gather(tl.sum(tl.sum(b_sum, 2), 1), tl.arange(0, BM), 0) * each
    b_square = tl.gather(tl.sum(tl.sum(b_squares, 2), 1), tl.arange(0, BM), 0) * each
    b_open = tl.zeros([BM], tl.int32) + (may >> 16)
    b_count = tl.where(b_exist, may & 0xFFFF, 0)
    b_listed = best_of(b_score, b_mean, b_square, b_open, b_count, BM, T, T, 1, True, True)
    clear_lists(p_indices, b_exist, room, blocks, BM, K)
    write_lists(p_indices, p_counts, b_listed, b_exist, room, BM, T, True)
