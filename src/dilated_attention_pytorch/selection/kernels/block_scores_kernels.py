"""Block scores from their factors, tile by tile; see `types.Factors`.

Names as in `primitives`. A program scores BM rows, SIZE of which belong to a block, and BN blocks at a time. M is the
number of hidden units, RANK the rank of the match, RP the rank padded to a power of two and D the width of the queries
that are projected to the rank. UK is the number of sub-blocks of a key block, and UG those of one product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton.primitives import NO_KEY, dropout_rows, projected
from .topk_kernels import add_noise, count_listable, visible_and_near

NONE = tl.constexpr(-1e30)
"""Score of blocks that a row cannot list."""
UNROLLED = tl.constexpr(8192)
"""Elements of the key side up to which the products of a step are unrolled, so that the compiler pipelines their loads
over steps: three stages take 48 KiB of shared memory."""
COUNT_STEP = tl.constexpr(64)
"""Blocks that `count_listable` processes at a time."""


@triton.jit
def power_of_two_scale(b_maximum):
    """Power of two that scales magnitudes up to `b_maximum` below 2^15, and its inverse, float32."""
    b_bits = tl.maximum(b_maximum.to(tl.uint32, bitcast=True) & 0x7F800000, 0x0D800000)
    return (0x86000000 - b_bits).to(tl.float32, bitcast=True), (b_bits - 0x07000000).to(tl.float32, bitcast=True)


@triton.jit
def split_float16(b_x):
    """Leading and remaining part, both float16, of float32 numbers below 2^15. The sum of the parts has an absolute
    error that float32 would round off beside the largest number."""
    b_first = b_x.to(tl.float16)
    return b_first, (b_x - b_first.to(tl.float32)).to(tl.float16)


@triton.jit
def scaled_halves(b_x, BM: tl.constexpr, EACH: tl.constexpr):
    """Split lines [BM * EACH, RP] into float16 halves, EACH of which share a scale. Returns both halves and the inverse
    scales, [BM]."""
    b_scale, b_inverse_scale = power_of_two_scale(tl.max(tl.reshape(tl.max(tl.abs(b_x), 1), [BM, EACH]), 1))
    b_scale = tl.reshape(tl.broadcast_to(b_scale[:, None], [BM, EACH]), [BM * EACH])
    b_first, b_second = split_float16(b_x * b_scale[:, None])
    return b_first, b_second, b_inverse_scale


@triton.jit
def split_kernel(p_x, p_first, p_second, p_scale, MANY: tl.constexpr, BM: tl.constexpr):
    """Split the MANY numbers of a block into scaled float16 halves, and store the inverse of the scale."""
    block = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, BM)
    b_x = tl.load(p_x + block * MANY + o_i, mask=o_i < MANY, other=0.0)
    scale, inverse_scale = power_of_two_scale(tl.max(tl.abs(b_x), 0))
    b_first, b_second = split_float16(b_x * scale)
    tl.store(p_first + block * MANY + o_i, b_first, mask=o_i < MANY)
    tl.store(p_second + block * MANY + o_i, b_second, mask=o_i < MANY)
    tl.store(p_scale + block, inverse_scale)


@triton.jit
def nan_maximum(x, y):
    """Elementwise maximum that propagates NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def match_units(
    b_left, b_rest, p_right, p_rest, p_right_there, begun, unit, blocks, o_r, BM: tl.constexpr, BN: tl.constexpr,
    RANK: tl.constexpr, RP: tl.constexpr, UK: tl.constexpr, UG: tl.constexpr, HOLES: tl.constexpr, ROUNDS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """`match_scores` over UG sub-blocks of every key block, from `unit` on, [BM, BN]; NO_KEY where all are empty."""
    o_n = tl.arange(0, UG * BN)
    b_exists = (begun + o_n % BN < blocks) | WHOLE
    # Offsets within a head fit 32 bits: at most 2^14 blocks of 2^7 sub-blocks of rank 2^7.
    o_unit = (begun + o_n % BN) * UK + unit + o_n // BN
    b_mask = b_exists[:, None]
    if RANK < RP:
        b_mask = b_mask & (o_r < RANK)[None, :]
    o_right = o_unit[:, None] * RANK + o_r[None, :]
    b_right = tl.load(p_right + o_right, mask=b_mask, other=0.0)  # [UG * BN, RP]
    # [BM, UG * BN]
    if ROUNDS:
        b_pair = tl.dot(b_left, tl.trans(b_right))
    else:
        # Three float16 products are as accurate as one in float32, and twice as fast as three in tf32.
        b_pair = tl.dot(b_rest, tl.trans(b_right))
        b_pair = tl.dot(b_left, tl.trans(tl.load(p_rest + o_right, mask=b_mask, other=0.0)), b_pair)
        b_pair = tl.dot(b_left, tl.trans(b_right), b_pair)
    if HOLES:
        b_seen = tl.load(p_right_there + o_unit, mask=b_exists, other=0) != 0
        b_pair = tl.where(b_seen[None, :], b_pair, NO_KEY)
    return tl.reduce(tl.reshape(b_pair, [BM, UG, BN]), 1, nan_maximum)


@triton.jit
def match_scores(
    b_left, b_rest, p_right, p_rest, p_right_there, begun, blocks, o_r, BM: tl.constexpr, BN: tl.constexpr,
    RANK: tl.constexpr, RP: tl.constexpr, UK: tl.constexpr, UG: tl.constexpr, HOLES: tl.constexpr, ROUNDS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Best match of a row with any sub-block of a key block, without the factor 1 / sqrt(rank), [BM, BN]. `b_left`,
    `b_rest` and `p_right`, `p_rest` are both sides as float16 halves; with ROUNDS only the leading ones are used. With
    HOLES some sub-blocks are empty. With WHOLE all blocks of the tile exist."""
    b_best = tl.full([BM, BN], NO_KEY, tl.float32)
    # A loop inside the caller's loop would prevent the compiler from pipelining the loads of the outer one.
    AT_ONCE: tl.constexpr = UK if UK * BN * RP * (1 if ROUNDS else 2) <= UNROLLED else UG
    for unit in range(0, UK, AT_ONCE):
        for more in tl.static_range(0, AT_ONCE, UG):
            b_best = nan_maximum(b_best, match_units(
                b_left, b_rest, p_right, p_rest, p_right_there, begun, unit + more, blocks, o_r,
                BM, BN, RANK, RP, UK, UG, HOLES, ROUNDS, WHOLE,
            ))  # fmt: skip
    if HOLES:
        # Without a match the score is 0, as in the torch implementation.
        b_best = tl.where(b_best == NO_KEY, 0.0, b_best)
    return b_best


@triton.jit
def arranged_rows(b_x, BM: tl.constexpr):
    """Values of rows [BM] in the shape of a tile of `hidden_kernel`, [1, 1, 4, BM / 16, 4, 1]. Four adjacent rows lie
    in one thread."""
    return tl.reshape(tl.permute(tl.reshape(b_x, [BM // 16, 4, 4]), (2, 0, 1)), [1, 1, 4, BM // 16, 4, 1])


@triton.jit
def arranged_columns(b_x, BN: tl.constexpr):
    """Values of blocks [BN] in the shape of a tile of `hidden_kernel`, [BN / 32, 4, 1, 1, 1, 8]."""
    return tl.reshape(tl.permute(tl.reshape(b_x, [BN // 32, 8, 4]), (0, 2, 1)), [BN // 32, 4, 1, 1, 1, 8])


@triton.jit(do_not_specialize=["begin", "rows", "room", "local", "sink", "least", "most"])
def hidden_kernel(
    p_rows, p_columns, p_weight, p_bias, p_keep, p_log, p_ids, p_scores, p_visible, p_may, begin, rows, width, heads,
    coldest, s_weight, s_bias, room, local, sink, least, most, kept, BM: tl.constexpr, BN: tl.constexpr,
    M: tl.constexpr, UM: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, IDS: tl.constexpr,
    EVEN: tl.constexpr, CAUSAL: tl.constexpr, KEEP: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """Scores without the match, w . relu(rows + columns) + bias over temperature, of BM rows with BN blocks.

    Rows start at `begin`, or with IDS are listed in `p_ids`; SIZE of them belong to a block. With CAUSAL, which needs
    adjacent rows, scores of later blocks are undefined. UM hidden units are processed at a time, T elements apart.

    A tile is [BN / 32, 4, 4, BM / 16, 4, 8], whose last two axes are the lanes of a warp: a thread holds groups of four
    rows and four blocks, which it loads as vectors (rows only with EVEN, if `begin` is a multiple of four) and reuses
    for all of its pairs. BM and BN are below the number of threads; otherwise the compiler would load each value once
    and distribute it through shared memory.

    With LISTS, rows are blocks whose tokens share these scores: they have NO_KEY for blocks that are not visible or not
    listed, and the result of `count_listable` is written to `p_may`.
    """
    stream = tl.program_id(2).to(tl.int64)
    head = stream % heads
    first_row, first_column = tl.program_id(0) * BM, tl.program_id(1) * BN
    o_i = first_row + tl.arange(0, BM)
    o_j = first_column + tl.arange(0, BN)
    # Rows and blocks past the end are computed and not stored, because a mask would take a register per load. Indices
    # modulo T, a power of two, stay inside the padded factors.
    o_row = tl.load(p_ids + tl.minimum(o_i, rows - 1)).to(tl.int32) if IDS else begin + o_i
    o_row = o_row // SIZE % T
    if EVEN:
        o_row = tl.max_contiguous(tl.multiple_of(o_row, 4), 4)
    p_row = p_rows + stream * M * T + o_row
    p_each = p_row
    p_kept = p_keep + stream * M * T + o_row
    # The offset that differs between threads is a small constant range, so that one address register serves all loads.
    p_column = p_columns + (stream * M * T + first_column) + tl.arange(0, BN) % T
    p_weight += head * s_weight
    b_sum = tl.zeros([BN // 32, 4, 4, BM // 16, 4, 8], tl.float32)
    b_own = tl.zeros([BM], tl.float32) + tl.load(p_bias + head * s_bias)
    # No unit if all blocks of the tile are later than its rows, which are adjacent.
    units = tl.where(first_column >= (begin + first_row + BM - 1) // SIZE, 0, M) if CAUSAL else M
    # relu(x + y) = max(-x, y) + x, and the sum over the second term is shared by all blocks of a row.
    for first in tl.range(0, units, UM, num_stages=STAGES):
        for m in tl.static_range(UM):
            weight = tl.load(p_weight + first + m)
            b_row = arranged_rows(tl.load(p_row + m * T), BM)
            b_maximum = nan_maximum(-b_row, arranged_columns(tl.load(p_column + m * T), BN))
            if KEEP:
                b_sum += (b_maximum + b_row) * (weight * arranged_rows(tl.load(p_kept + m * T), BM))
            else:
                b_sum += b_maximum * weight
                b_own += tl.load(p_each + m * T) * weight
        p_row += UM * T
        p_each += UM * T
        p_kept += UM * T
        p_column += UM * T
    b_score = tl.reshape(tl.permute(b_sum, (3, 4, 2, 0, 5, 1)), [BM, BN]) + b_own[:, None]
    b_score *= 1.0 / tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest)
    # Offsets within a head fit 32 bits, because callers limit the bytes of scores.
    o_i, o_j = o_i[:, None], o_j[None, :]
    if LISTS:
        p_visible += stream * width
        b_seen, b_near = visible_and_near(p_visible, begin + o_i, width, local, sink, o_j, CAUSAL)
        # -inf is never listed, like NaN, but its block counts as a candidate, which one with NO_KEY does not.
        b_score = tl.where(b_score == NO_KEY, float("nan"), b_score)
        b_score = tl.where(b_seen & (b_near == 0), b_score, NO_KEY)
    tl.store(p_scores + stream * rows * width + o_i * width + o_j, b_score, mask=(o_i < rows) & (o_j < width))
    # Programs without scores to compute count the blocks: those of the first row tile with later blocks take one tile
    # of rows each, and the last program of the second row tile takes the rows of the first.
    counts_first = (tl.program_id(0) == 1) & (tl.program_id(1) == tl.num_programs(1) - 1)
    counts_own = (tl.program_id(0) == 0) & ((first_column > 0) | (tl.num_programs(0) == 1))
    if LISTS and (counts_own | counts_first):
        first_counted = tl.where(counts_first, 0, first_column)
        o_own = first_counted + tl.arange(0, BM)
        end = tl.minimum(begin + first_counted + BM, width) if CAUSAL else width
        b_may = count_listable(p_visible, begin + o_own, end, local, sink, room, least, most, kept, COUNT_STEP, CAUSAL)
        tl.store(p_may + stream * width + begin + o_own, b_may, mask=o_own < rows)


@triton.jit(do_not_specialize=["begin", "rows", "span", "first", "lines"])
def match_kernel(
    p_table, p_own, p_project, p_right, p_rest, p_scale, p_right_there, p_log, p_ids, p_scores, p_seed, begin, rows,
    span, first, lines, width, blocks, heads, coldest, root, so_b, so_h, so_n, s_project,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, UK: tl.constexpr,
    UG: tl.constexpr, SIZE: tl.constexpr, IDS: tl.constexpr, TOGETHER: tl.constexpr, NOISE: tl.constexpr,
    CAUSAL: tl.constexpr, HOLES: tl.constexpr, ROUNDS: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the match to the scores of BM rows with `span` of the first `width` blocks.

    Rows as in `hidden_kernel`. With TOGETHER the rows of a program belong to one block, and their scores without
    the match are one row of `p_table`, which has `lines` rows of `blocks` from block `first` on. NOISE is added here,
    where it costs less than in the ranking: none is computed for later blocks.
    """
    # Longest first: under a causal mask the last rows see the most blocks.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    o_i = tile * BM + tl.arange(0, BM)  # [BM]
    stream = tl.program_id(2).to(tl.int64)
    head = stream % heads
    b_exist = o_i < rows
    own = (begin + tile * BM) // SIZE
    o_left = tl.load(p_ids + o_i, mask=b_exist, other=0).to(tl.int32) if IDS else begin + o_i
    o_r = tl.arange(0, RP)
    p_own += (stream // heads) * so_b + head * so_h
    p_project += head * s_project
    b_left = projected(p_own, p_project, o_left.to(tl.int64), b_exist, o_r, so_n, D, RANK, RP, PRECISION)
    b_left, b_rest, b_inverse_scale = scaled_halves(b_left, BM, 1)
    b_inverse_scale *= 1.0 / tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest) / root
    p_right += stream * blocks * UK * RANK
    p_rest += stream * blocks * UK * RANK
    p_right_there += stream * blocks * UK
    p_scale += stream * blocks
    p_scores += stream * rows * width
    p_table += (stream * lines + own - first) * blocks
    b_noise_row = begin + o_i
    if NOISE:
        b_noise_row = dropout_rows(p_seed, stream, b_noise_row)
    # Spans are multiples of BN. Without the hint, scores would be stored one by one instead of as vectors.
    start = tl.multiple_of(tl.program_id(1) * span, BN)
    end = tl.minimum(start + span, width)
    if CAUSAL:
        end = tl.minimum(end, own if TOGETHER else begin + tile * BM + BM)
    # With explicit stages the compiler also pipelines loads that feed no product.
    for begun in tl.range(start, end, BN, num_stages=STAGES):
        o_column = begun + tl.arange(0, BN)
        b_exists = (o_column < width) | WHOLE
        # Offsets within a head fit 32 bits, because callers limit the bytes of scores.
        p_tile = p_scores + o_i[:, None] * width + o_column[None, :]
        b_mask = b_exist[:, None] & b_exists[None, :]
        if TOGETHER:
            b_score = tl.load(p_table + o_column, mask=b_exists, other=0.0)[None, :]
        else:
            b_score = tl.load(p_tile, mask=b_mask, other=0.0)
        b_scale = tl.load(p_scale + o_column, mask=b_exists, other=0.0)[None, :]
        b_match = match_scores(
            b_left, b_rest, p_right, p_rest, p_right_there, begun, blocks, o_r,
            BM, BN, RANK, RP, UK, UG, HOLES, ROUNDS, WHOLE,
        )  # fmt: skip
        b_match = b_score + b_inverse_scale[:, None] * b_match * b_scale
        if NOISE:
            b_match = add_noise(b_match, b_noise_row[:, None], o_column[None, :])
        tl.store(p_tile, b_match, mask=b_mask)


@triton.jit(do_not_specialize=["first", "rows"])
def selecting_kernel(
    p_scores, p_visible, p_present, p_out, first, rows, width, blocks, heads,
    BM: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr, CAUSAL: tl.constexpr, HOLES: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    """Scores by which a block of queries selects, from those of its SIZE rows with up to T blocks, BM rows at a time.

    The result is the logarithm of the predicted shares of each block summed over rows; -inf for blocks that no row
    predicts. With OWN it is relative to the own block, whose logit is 0. With HOLES only rows in
    `p_present` count.
    """
    row = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    own = first + row
    o_t = tl.arange(0, T)
    b_others = (o_t < own if CAUSAL else o_t != own) & (o_t < width)
    b_others = b_others & (tl.load(p_visible + stream * blocks + o_t, mask=b_others, other=0) != 0)
    p_scores += (stream * rows + row) * SIZE * width
    p_present += (stream // heads * blocks + own) * SIZE
    # Running logarithm of a sum over rows, as its largest term and the sum relative to that, by block and of the own.
    b_top = tl.full([T], NONE, tl.float32)
    b_sum = tl.zeros([T], tl.float32)
    own_top = tl.full([], NONE, tl.float32)
    own_sum = tl.zeros([], tl.float32)
    least = tl.full([], -NONE, tl.float32)
    for begin in range(0, SIZE, BM):
        o_i = begin + tl.arange(0, BM)
        b_score = tl.load(p_scores + o_i[:, None] * width + o_t[None, :], mask=b_others[None, :], other=NONE)
        b_score = tl.where(b_others[None, :] & (tl.abs(b_score) < float("inf")), b_score, NONE)
        b_most = tl.max(b_score, 1)
        b_most = tl.maximum(b_most, 0.0) if OWN else b_most
        b_total = tl.sum(tl.exp(b_score - b_most[:, None]), 1)
        b_total = b_most + tl.log(b_total + tl.exp(-b_most) if OWN else b_total)
        b_absent = b_total < NONE / 2
        if HOLES:
            b_absent = b_absent | (tl.load(p_present + o_i) == 0)
        b_total = tl.where(b_absent, -NONE, b_total)
        b_share = b_score - b_total[:, None]
        b_next = tl.maximum(b_top, tl.max(b_share, 0))
        b_sum = b_sum * tl.exp(b_top - b_next) + tl.sum(tl.exp(b_share - b_next[None, :]), 0)
        b_top = b_next
        least = tl.minimum(least, tl.min(b_total, 0))
        if OWN:
            own_next = tl.maximum(own_top, tl.max(-b_total, 0))
            own_sum = own_sum * tl.exp(own_top - own_next) + tl.sum(tl.exp(-b_total - own_next), 0)
            own_top = own_next
    b_out = b_top + tl.log(b_sum)
    b_out = b_out - (own_top + tl.log(own_sum)) if OWN else b_out
    b_out = tl.where(b_others & (b_out > NONE / 2), b_out, float("-inf"))
    b_out = tl.where(least < -NONE / 2, b_out, float("-inf"))
    tl.store(p_out + (stream * rows + row) * width + o_t, b_out, mask=o_t < width)
