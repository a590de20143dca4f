"""The best blocks of every row, by scores that are made as they are needed.

A row is ranked without being sorted: the range of its scores is halved until as many lie above as are listed. Where
that does not end, scores count as integers of the same order, and the last that is listed is found bit by bit.

Names as in `triton_selection`; K and T are the powers of two that hold what a row may list and all blocks. A row of a
product's result lies in four lanes (PRODUCT), so that a count over it takes two exchanges; other rows lie in all.
"""

from __future__ import annotations

from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plan.selected import Budget
from .quick_launch import launch
from .selection import Factors
from .triton_launch import OPTIONS, _precision, held
from .triton_lists import ones_of
from .triton_primitives import NO_KEY, dropout_rows, projected, scramble
from .triton_selection import ByToken, halved, match_scores, matched_together, scoring, split, with_blocks

HALVINGS = tl.constexpr(20)
"""Of the range of a row's scores; most rows take ten."""
RANKED = 512
"""Scores that a warp ranks at once, or with coverage half as many; they live in registers."""
SCORE_BYTES = 9 * 2**21
"""Scores held at a time: choosing for 32K tokens and 8 heads must take no more than 64 MB, its lists included."""
CHOSEN, CHOSEN_AMONG, NARROWEST = 64, 256, 128
"""Tokens of a program that keeps all their scores in registers, the most blocks that it ranks, of which two programs
fit a multiprocessor, and the fewest for which it is compiled."""


@triton.jit
def place_of(b_score):
    """uint32 in the order of the scores, 0 for NO_KEY and what is not a number; none may be -0."""
    b_bits = b_score.to(tl.int32, bitcast=True)
    b_place = b_bits.to(tl.uint32, bitcast=True) ^ ((b_bits >> 31).to(tl.uint32, bitcast=True) | 0x80000000)
    return tl.where(b_score > NO_KEY, b_place, 0)


@triton.jit
def score_at(b_place):
    """The score that has that place."""
    b_bits = b_place ^ tl.where(b_place >> 31 > 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def logarithm(b_x):
    """Of numbers above 2^-126, as exact as `tl.log` in half the time: no other numbers come."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_power = (b_bits - 0x3F2AAAAB) & -0x800000
    b_y = (b_bits - b_power).to(tl.float32, bitcast=True) - 1.0  # from -1/3 to 1/3
    # A polynomial of least squares for what follows y - y^2 / 2.
    b_sum = ((0.1381045 * b_y - 0.15056509) * b_y + 0.14044635) * b_y - 0.16483656
    b_sum = ((b_sum * b_y + 0.20007749) * b_y - 0.25003773) * b_y + 0.3333327
    return b_power.to(tl.float32) * 8.2629582e-8 + ((b_sum * b_y - 0.5) * (b_y * b_y) + b_y)


@triton.jit
def gumbel(b_row, b_column):
    """`ops.selection.gumbel`, with `b_row` from `dropout_rows`, already broadcastable."""
    b_bits = scramble(b_row ^ (b_column.to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32))) >> 9
    b_uniform = (b_bits.to(tl.float32) + 0.5) / 8388608.0
    return -logarithm(-logarithm(b_uniform))


@triton.jit
def sight(p_visible, own, blocks, local, sink, o_j, CAUSAL: tl.constexpr):
    """Which blocks rows of the block `own` see besides it, and which are near, thus need no listing."""
    b_away = own - o_j
    b_visible = tl.load(p_visible + o_j, mask=o_j < blocks, other=0) != 0
    b_seen = (b_away > 0 if CAUSAL else b_away != 0) & b_visible
    return b_seen, (tl.abs(b_away) < local) | (o_j < sink)


@triton.jit
def share_of(b_many, kept):
    """That fraction of so many; half goes to the even number, as torch rounds."""
    b_part = kept * b_many.to(tl.float32)
    b_wanted = tl.floor(b_part).to(tl.int32)
    b_rest = b_part - tl.floor(b_part)
    return b_wanted + ((b_rest > 0.5) | ((b_rest == 0.5) & (b_wanted % 2 == 1))).to(tl.int32)


@triton.jit
def later_word(word, many, other_word, other_many):
    """The later word of two, and how many bits both have."""
    return other_word, many + other_many


@triton.jit
def words_of(b_flag, BM: tl.constexpr, T: tl.constexpr):
    """Flags of a row in words of 32, [BM, T / 32], and how many are set in the words before."""
    b_flag = tl.reshape(b_flag, [BM, T // 32, 32])
    b_words = tl.sum(tl.where(b_flag, 1 << tl.arange(0, 32)[None, None, :], 0), 2)
    # The words go along, so that both lie where a running sum leaves them: in one thread each, not in four.
    b_words, b_many = tl.associative_scan((b_words, ones_of(b_words)), 1, later_word)
    return b_words, b_many - ones_of(b_words)


@triton.jit
def before(b_flag, BM: tl.constexpr, T: tl.constexpr, PRODUCT: tl.constexpr):
    """How many are flagged before each of a row."""
    if PRODUCT:
        # A running sum would move all of them between threads; words are few.
        b_words, b_prior = words_of(b_flag, BM, T)
        b_within = ones_of(b_words[:, :, None] & ((1 << tl.arange(0, 32)[None, None, :]) - 1))
        return tl.reshape(b_within + b_prior[:, :, None], [BM, T])
    else:
        return tl.cumsum(b_flag.to(tl.int32), 1) - b_flag.to(tl.int32)


@triton.jit
def ones_in(b_flag, b_one, PRODUCT: tl.constexpr):
    """How many are flagged in each row; `b_one` is 1 in rows that exist."""
    if PRODUCT:
        # In float32, beside the comparisons: integers would take turns with them.
        return tl.sum(b_flag.to(tl.float32), 1).to(tl.int32)
    else:
        # A number that the compiler does not know: it would gather bits to count them, which takes longer.
        return tl.sum(tl.where(b_flag, b_one, 0), 1)


@triton.jit
def span_of(b_score, b_one, PRODUCT: tl.constexpr):
    """The least and the largest score of each row, and how many there are."""
    b_open = b_score > NO_KEY
    return tl.min(tl.where(b_open, b_score, -NO_KEY), 1), tl.max(b_score, 1), ones_in(b_open, b_one, PRODUCT)


@triton.jit
def best_of(b_score, b_span, b_count, b_one, BM: tl.constexpr, T: tl.constexpr, PRODUCT: tl.constexpr):
    """Which are the best `b_count` of each row, of equals the first; `b_span` is that of the scores."""
    b_low, b_high, b_have = b_span
    left = HALVINGS
    more = 1
    while (left > 0) & (more > 0):
        b_trial = 0.5 * b_low + 0.5 * b_high
        b_found = ones_in(b_score >= b_trial[:, None], b_one, PRODUCT)
        b_enough = b_found >= b_count
        b_have = tl.where(b_enough, b_found, b_have)
        b_low = tl.where(b_enough, b_trial, b_low)
        b_high = tl.where(b_enough, b_high, b_trial)
        more = tl.max(((b_have != b_count) & (b_count > 0)).to(tl.int32), 0)
        left -= 1
    if more > 0:
        # Equals, or scores of very different size: the last that is listed, bit by bit, and of equals the first.
        b_place = tl.zeros([BM], tl.uint32)
        for bit in range(32):
            b_next = b_place | (tl.full([], 1, tl.uint32) << (31 - bit))
            b_found = ones_in(b_score >= score_at(b_next)[:, None], b_one, PRODUCT)
            b_place = tl.where(b_found >= b_count, b_next, b_place)
        b_last = score_at(b_place)[:, None]
        b_spare = b_count - ones_in(b_score > b_last, b_one, PRODUCT)
        b_first = before(b_score == b_last, BM, T, PRODUCT) < b_spare[:, None]
        b_score = tl.where((b_score > b_last) | ((b_score == b_last) & b_first), b_score, NO_KEY)
        b_low = tl.min(tl.where(b_score > NO_KEY, b_score, -NO_KEY), 1)
    return b_score >= tl.where(b_count > 0, b_low, float("nan"))[:, None]


@triton.jit
def write_lists(
    p_indices, p_counts, b_listed, b_count, b_exist, room, blocks, BM: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """Of BM rows, the first of which `p_indices` and `p_counts` point to."""
    o_i = tl.arange(0, BM)
    o_line = o_i[:, None] * room
    if PRODUCT:
        # Of every word the first one left at a time: few are listed.
        b_words, b_prior = words_of(b_listed, BM, T)
        o_place = o_line + b_prior
        o_j = 32 * tl.arange(0, T // 32)[None, :]
        for _ in range(tl.max(tl.max(ones_of(b_words), 1), 0)):
            b_left = b_words & (b_words - 1)
            tl.store(p_indices + o_place, o_j + ones_of((b_words ^ b_left) - 1), mask=b_words != 0)
            b_words = b_left
            o_place += 1
    else:
        o_place = o_line + before(b_listed, BM, T, False)
        tl.store(p_indices + o_place, tl.arange(0, T)[None, :] + 0 * o_place, mask=b_listed)
    o_k = tl.arange(0, K)[None, :]
    b_rest = b_exist[:, None] & (o_k >= b_count[:, None]) & (o_k < room)
    tl.store(p_indices + o_line + o_k, tl.full([BM, K], 0, tl.int32) + blocks, mask=b_rest)
    tl.store(p_counts + o_i, tl.maximum(b_count, 0), mask=b_exist)


@triton.jit(do_not_specialize=["begin", "rows", "total", "room", "local", "sink", "least", "most"])
def rank_kernel(
    p_scores, p_visible, p_seed, p_indices, p_counts, begin, rows, width, total, blocks, room, local, sink, least, most,
    kept, coverage, BM: tl.constexpr, T: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    NOISE: tl.constexpr, COVERAGE: tl.constexpr,
):  # fmt: skip
    """List the best `room` blocks, or fewer, of BM rows of a block, ascending, `blocks` where there is none.

    A row keeps a fraction `kept` of what it sees, all in the first `width` blocks, or with COVERAGE as many as it takes
    for the predicted share to reach `coverage`, within `least` and `most`: that many less those kept without being
    listed. A row's own block has the logit 0 in that. SIZE rows are of one block.
    """
    start = tl.program_id(0) * BM
    o_i = start + tl.arange(0, BM)  # [BM]
    stream = tl.program_id(1).to(tl.int64)
    b_exist = o_i < rows
    o_j = tl.arange(0, T)[None, :]
    b_seen, b_near = sight(p_visible + stream * blocks, (begin + start) // SIZE, blocks, local, sink, o_j, CAUSAL)
    # Blocks that a row sees, and those of them that need no listing, its own among both.
    b_many = 1 + tl.sum(b_seen.to(tl.int32), 1)
    b_taken = 1 + tl.sum((b_seen & b_near).to(tl.int32), 1)
    p_scores += (stream * rows + start) * width
    o_score = tl.arange(0, BM)[:, None] * width + o_j
    b_score = tl.load(p_scores + o_score, mask=b_exist[:, None] & (o_j < width), other=NO_KEY)
    b_share = b_score
    if COVERAGE:
        b_share = tl.where(b_seen & (b_score > NO_KEY), b_score, NO_KEY)
        b_top = tl.maximum(tl.max(b_share, 1), 0.0)
        b_share = tl.exp(b_share - b_top[:, None])
        b_own = tl.exp(-b_top)
        b_total = b_own + tl.sum(b_share, 1)
        b_held = (b_own + tl.sum(tl.where(b_near, b_share, 0.0), 1)) / b_total
        b_share = tl.where(b_near, 0.0, b_share / b_total[:, None])
    if NOISE:
        b_score += gumbel(dropout_rows(p_seed, stream, begin + o_i)[:, None], o_j)
    # A score that is not a number says nothing for its block: it lies above none.
    b_score += tl.where(b_seen & (b_near == 0), 0.0, NO_KEY)
    b_one = b_exist.to(tl.int32)[:, None]
    b_span = span_of(b_score, b_one, False)
    if COVERAGE:
        # As many as lie above the largest place from which on the share is reached, and of equals the first.
        b_place = place_of(b_score)
        b_limit = tl.zeros([BM], tl.uint32)
        for bit in range(32):
            b_trial = b_limit | (tl.full([], 1, tl.uint32) << (31 - bit))
            b_sum = b_held + tl.sum(tl.where(b_place >= b_trial[:, None], b_share, 0.0), 1)
            b_limit = tl.where(b_sum >= coverage, b_trial, b_limit)
        b_above = b_place > b_limit[:, None]
        b_tied = (b_place == b_limit[:, None]) & (b_place > 0)
        b_sum = b_held + tl.sum(tl.where(b_above, b_share, 0.0), 1)
        b_equal = tl.where(b_tied, b_share, 0.0)
        b_short = b_tied & (b_sum[:, None] + tl.cumsum(b_equal, 1) - b_equal < coverage)
        # Where nothing reaches it, one more than there are.
        b_wanted = tl.sum((b_above | b_short).to(tl.int32), 1) + (b_limit == 0).to(tl.int32)
        b_wanted = tl.where(b_held < coverage, b_wanted, 0) + b_taken
    else:
        b_wanted = share_of(b_many, kept)
    b_wanted = tl.minimum(tl.maximum(b_wanted, least), most) - b_taken
    b_count = tl.minimum(tl.minimum(b_wanted, room), b_span[2])
    b_listed = best_of(b_score, b_span, b_count, b_one, BM, T, False)
    line = stream * total + begin + start
    write_lists(p_indices + line * room, p_counts + line, b_listed, b_count, b_exist, room, blocks, BM, T, K, False)


@triton.jit(do_not_specialize=["first", "begin", "lines", "total", "room", "local", "sink", "least", "most"])
def choice_kernel(
    p_table, p_own, p_project, p_right, p_rest, p_scale, p_right_there, p_log, p_visible, p_seed, p_indices, p_counts,
    first, begin, lines, total, blocks, heads, room, local, sink, least, most, kept, coldest, root, so_b, so_h, so_n,
    s_project, BM: tl.constexpr, BN: tl.constexpr, T: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    RANK: tl.constexpr, RP: tl.constexpr, UK: tl.constexpr, UG: tl.constexpr, SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    NOISE: tl.constexpr, HOLES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `score_kernel` and `rank_kernel` give for tokens of the blocks from `begin` on, BM of one block.

    `p_table` has `lines` lines, from block `first` on. T holds the blocks that a token sees.
    """
    # Those that see most begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    head = stream % heads
    own = begin + tile * BM // SIZE
    o_row = begin * SIZE + tile * BM + tl.arange(0, BM)
    b_exist = o_row < total
    p_table += (stream * lines + own - first) * blocks
    p_visible += stream * blocks
    p_right += stream * blocks * UK * RANK
    p_rest += stream * blocks * UK * RANK
    o_r = tl.arange(0, RP)
    p_own += (stream // heads) * so_b + head * so_h
    b_left = projected(
        p_own, p_project + head * s_project, o_row.to(tl.int64), b_exist, o_r, so_n, D, RANK, RP, PRECISION
    )
    b_left, b_rest, b_undone = halved(b_left)
    b_undone *= 1.0 / tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest) / root
    b_name = dropout_rows(p_seed, stream, o_row)[:, None] if NOISE else o_row[:, None]
    o_step = tl.arange(0, T // BN)[None, :, None]
    b_score = tl.full([BM, T // BN, BN], NO_KEY, tl.float32)
    for begun in range(0, own if CAUSAL else blocks, BN):
        o_column = begun + tl.arange(0, BN)
        b_match = b_undone[:, None] * match_scores(
            b_left, b_rest, b_exist, p_right, p_rest, p_right_there + stream * blocks * UK, begun, blocks, o_r,
            BM, BN, RANK, RP, 1, UK, UG, HOLES, True, PRECISION,
        )  # fmt: skip
        b_tile = with_blocks(b_match, p_scale + stream * blocks, p_table, o_column, o_column < blocks)
        if NOISE:
            b_tile += gumbel(b_name, o_column[None, :])
        b_seen, b_near = sight(p_visible, own, blocks, local, sink, o_column, CAUSAL)
        # A score that is not a number says nothing for its block: it lies above none.
        b_tile += tl.where(b_seen & (b_near == 0), 0.0, NO_KEY)[None, :]
        b_score = tl.where(o_step == begun // BN, b_tile[:, None, :], b_score)
    b_score = tl.reshape(b_score, [BM, T])
    b_seen, b_near = sight(p_visible, own, blocks, local, sink, tl.arange(0, T), CAUSAL)
    taken = 1 + tl.sum((b_seen & b_near).to(tl.int32), 0)
    wanted = share_of(1 + tl.sum(b_seen.to(tl.int32), 0), kept)
    b_one = b_exist.to(tl.int32)[:, None]
    b_span = span_of(b_score, b_one, True)
    wanted = tl.minimum(tl.maximum(wanted, least), most) - taken
    b_count = tl.minimum(tl.where(b_exist, tl.minimum(wanted, room), 0), b_span[2])
    b_listed = best_of(b_score, b_span, b_count, b_one, BM, T, True)
    line = stream * total + begin * SIZE + tile * BM
    write_lists(p_indices + line * room, p_counts + line, b_listed, b_count, b_exist, room, blocks, BM, T, K, True)


def choose(
    factors: Factors, together: ByToken, visible: Tensor, seed: Tensor | None, indices: Tensor, counts: Tensor,
    bounds: tuple[int | float, ...], block_size: int, is_causal: bool,
) -> None:  # fmt: skip
    """List for the tokens of the blocks that are scored `together`, whose scores never lie in memory."""
    batch, heads, total, _, d = factors.own.shape
    t, units, rank = factors.right.shape[2:]
    own, there = factors.own.flatten(2, 3), factors.right_there
    grouped, columns = matched_together(units, rank)
    first, lines, room = together.first, together.table.shape[2], indices.shape[3]
    read = together.table, own, factors.project, *together.right, visible if there is None else there.contiguous()
    read += factors.log_temperature, visible, counts if seed is None else seed
    numbers = room, *bounds, float(factors.coldest), rank**0.5, *own.stride()[:3], factors.project.stride(0)
    constants = {"BM": CHOSEN, "BN": columns, "K": held(room), "D": d, "RANK": rank, "RP": held(rank), "UK": units}
    constants |= {"UG": grouped, "SIZE": block_size, "CAUSAL": is_causal, "NOISE": seed is not None}
    constants |= {"HOLES": there is not None, "PRECISION": _precision(torch.float32), "num_stages": 3} | OPTIONS
    last, least = first + lines, max(NARROWEST, columns)
    while last > first:
        # Rows see no blocks but those before: the first half of them have half as many to rank.
        wide = max(held(last - 1 if is_causal else t), least)
        begin = max(wide // 2 + 1, first) if is_causal and wide > least else first
        tiles = -(-(min(last * block_size, total) - begin * block_size) // CHOSEN)
        launch(choice_kernel, (tiles, batch * heads),
            *read, indices, counts, first, begin, lines, total, t, heads, *numbers,
            T=wide, num_warps=4, **constants,
        )  # fmt: skip
        last = begin


def listed_blocks(
    factors: Factors, visible: Tensor, budget: Budget, *, block_size: int, is_causal: bool, per_token: bool,
    local_blocks: int, sink_blocks: int, seed: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The best blocks of every row, int32 (b, h, r, room), ascending and then t, and how many, int32 (b, h, r).

    `factors` are such as `Factors.why_not` accepts; the rest is what `ops.selection.select` is told.
    """
    batch, heads, total = factors.own.shape[:3]
    t = factors.right.shape[2]
    room, coverage = budget.room(t), budget.coverage
    indices = torch.empty((batch, heads, total, room), dtype=torch.int32, device=visible.device)
    counts = torch.empty((batch, heads, total), dtype=torch.int32, device=visible.device)
    size = block_size if per_token else 1
    held_scores = SCORE_BYTES // (4 * batch * heads)
    told = block_size, per_token, is_causal
    bounds = local_blocks, sink_blocks, budget.least, t if budget.most is None else budget.most, budget.kept
    in_registers = coverage is None and 0 < factors.right.shape[4] <= 64 and block_size >= CHOSEN and t <= CHOSEN_AMONG
    if per_token:
        parts = split(factors.right)
        blocks = scoring(factors._replace(right=factors.right[..., :0]), 1, False, is_causal)
    else:
        scored = scoring(factors, *told)
    first = made = 0
    while first < t:
        if per_token and first == made:
            # Of as many blocks as there are scores to hold at a time, which takes the same memory.
            made = min(first + max(held_scores // t, 1), t)
            together = ByToken(first, blocks(range(first, made)), parts)
            if in_registers:
                choose(factors, together, visible, seed, indices, counts, bounds, block_size, is_causal)
                first = made
                continue
            scored = scoring(factors, *told, together)
        # Rows see no blocks but those before: the earlier, the more of them at a time. Scores are read four at a time.
        fit = (isqrt(first**2 + 4 * held_scores // size) - first) // 2 if is_causal else held_scores // (size * t)
        last = min(first + max(fit, 1), made if per_token else t)
        width = min(-(-last // 16) * 16, t) if is_causal else t
        begin, end = first * size, min(last * size, total)
        wide = held(width)
        at_once = min(max(RANKED // (wide if coverage is None else 2 * wide), 1), size)
        launch(rank_kernel, (-(-(end - begin) // at_once), batch * heads),
            scored(range(begin, end), width), visible, counts if seed is None else seed, indices, counts, begin,
            end - begin, width, total, t, room, *bounds, 0.0 if coverage is None else coverage,
            BM=at_once, T=wide, K=held(room), SIZE=size, CAUSAL=is_causal, NOISE=seed is not None,
            COVERAGE=coverage is not None, num_warps=max(wide // RANKED, 1), **OPTIONS,
        )  # fmt: skip
        first = last
    return indices, counts
