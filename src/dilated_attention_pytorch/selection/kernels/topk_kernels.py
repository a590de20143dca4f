"""Top-k of rows of scores in registers, without sorting, and the lists of the chosen blocks.

A threshold is estimated from the mean and the standard deviation of a row. Each trial counts the scores above the
threshold and improves it, until at most MAX_MISRANKED scores are on the wrong side; these are passed one by one. If
that does not converge (ties, or scores of very different magnitude), the scores are mapped to integers of the same
order, and the k-th largest is determined bit by bit.

Names as in `block_scores_kernels`. BM is the number of rows of a program, T the number of blocks and K the capacity of
a list, both padded to powers of two. A row lies in few lanes, so that counting over it takes few shuffles and an
instruction on per-row values serves several rows: a row of a tensor core product in four lanes with 2 of every 8
columns each (PRODUCT), a loaded row in W / V lanes with V of every W columns each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton.primitives import LN2, NO_KEY, NO_PTX, scrambled
from .block_lists_kernels import popcount

MAX_TRIALS, ESTIMATED_TRIALS, UNCHECKED_TRIALS = tl.constexpr(20), tl.constexpr(4), tl.constexpr(3)
"""Thresholds tried before the search falls back to bits; the first of them, which move by the estimated gap between
scores, where later ones divide the bracket; and, for rows of a product, the trials before convergence is first checked:
many rows share a program, and the check is a reduction over all of them."""
MAX_MISRANKED = tl.constexpr(3)
"""Scores on the wrong side of the threshold that are passed one by one."""
BITS_PER_STEP = tl.constexpr(2)
"""Set bits of a word that an iteration of `write_lists` stores."""
SLOPE, MIN_THRESHOLD, MAX_THRESHOLD = tl.constexpr(2.0**90), tl.constexpr(2.0**-66), tl.constexpr(2.0**36)
"""Magnitudes of thresholds are limited so that (score - threshold) * SLOPE is either 0 or at least 1 in magnitude."""


@triton.jit
def order_key(b_score):
    """Sort keys of float32 scores: uint32 in the same order, 0 for NO_KEY and NaN. No score may be -0."""
    b_bits = b_score.to(tl.int32, bitcast=True)
    b_key = b_bits.to(tl.uint32, bitcast=True) ^ ((b_bits >> 31).to(tl.uint32, bitcast=True) | 0x80000000)
    return tl.where(b_score > NO_KEY, b_key, 0)


@triton.jit
def score_of_key(b_key):
    """Score of a sort key, float32: the inverse of `order_key`."""
    b_bits = b_key ^ tl.where(b_key >> 31 > 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def approx_log2(b_x):
    """Approximate log2 of normal positive numbers: error 2^-22 from 1/2 to 2, relative error 2^-22 elsewhere."""
    if NO_PTX:
        return tl.log2(b_x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, is_pure=True, pack=1)


@triton.jit
def approx_reciprocal(b_x):
    """Approximate 1 / x of normal numbers; used for thresholds, which affect the speed of the search but no result."""
    if NO_PTX:
        return 1.0 / b_x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, is_pure=True, pack=1)


@triton.jit
def one_to_two(b_bits):
    """float32 in [1, 2) whose mantissa is the upper 23 bits of each word."""
    if NO_PTX:
        return ((b_bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    else:
        # A funnel shift inserts the exponent in the same instruction.
        ASM: tl.constexpr = "shf.r.wrap.b32 $0, $1, 127, 9;"
        return tl.inline_asm_elementwise(ASM, "=f,r", [b_bits], tl.float32, is_pure=True, pack=1)


@triton.jit
def add_noise(b_score, b_row, b_column):
    """Add the Gumbel noise of `rank.gumbel` to scores, up to a constant that does not change their order. `b_row` is
    from `dropout_rows`, `b_column` are block numbers; the arguments are broadcastable."""
    # The first step of `scramble` is linear over xor, so that rows and columns take it separately, once each.
    b_column = b_column.to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32)
    b_bits = scrambled((b_row ^ (b_row >> 16)) ^ (b_column ^ (b_column >> 16)))
    b_uniform = one_to_two(b_bits) - (1.0 - 2.0**-24)
    # -log2(uniform) with an absolute error of at most 2^-21, never 0. The smallest values, which are the largest noise,
    # are less precise; such blocks rank first in any case.
    b_sum = 2.0**-22 - approx_log2(b_uniform)
    return tl.fma(approx_log2(b_sum), -LN2, b_score)


@triton.jit
def visible_and_near(p_visible, own, blocks, local, sink, o_j, CAUSAL: tl.constexpr):
    """Two masks of blocks `o_j` for rows of the block `own`: visible and not `own`; near or first, hence never listed.
    `p_visible` holds a bool per block. Blocks nearer than `local` are near, and `sink` blocks are first."""
    b_distance = own - o_j
    b_visible = tl.load(p_visible + o_j, mask=o_j < blocks, other=0) != 0
    b_seen = (b_distance > 0 if CAUSAL else b_distance != 0) & b_visible
    return b_seen, (tl.abs(b_distance) < local) | (o_j < sink)


@triton.jit
def bits_below(column, o_word):
    """Words of 32 blocks, starting at the blocks `o_word`, with the bits set of all blocks before `column`."""
    b_many = tl.minimum(tl.maximum(column - o_word, 0), 32)
    return tl.where(b_many == 32, -1, (1 << (b_many & 31)) - 1)


@triton.jit
def keep_second(b_one, b_other):
    """Combine function of a scan over an axis of length 1, which never calls it."""
    return b_other


@triton.jit
def visible_and_near_words(p_visible, own, blocks, local, sink, T: tl.constexpr, CAUSAL: tl.constexpr):
    """`visible_and_near` for all T blocks as bit masks, two arrays of words [T / 32]."""
    o_j = tl.arange(0, T)
    # Loaded as int8, which holds 0 or 1: a bool would be compared to 0 and converted to an integer again.
    p_visible = p_visible.to(tl.pointer_type(tl.int8), bitcast=True)
    b_visible = tl.load(p_visible + o_j, mask=o_j < blocks, other=0).to(tl.int32)
    b_seen = tl.sum(tl.reshape(b_visible, [T // 32, 32]) << tl.arange(0, 32)[None, :], 1)
    # The scan changes nothing but the layout: each word is computed once instead of by every thread.
    b_seen = tl.reshape(tl.associative_scan(tl.reshape(b_seen, [T // 32, 1]), 1, keep_second), [T // 32])
    o_word = 32 * tl.arange(0, T // 32)
    b_before = bits_below(own, o_word)
    b_seen &= b_before if CAUSAL else b_before | ~bits_below(own + 1, o_word)
    return b_seen, (bits_below(own + local, o_word) & ~bits_below(own - local + 1, o_word)) | bits_below(sink, o_word)


@triton.jit
def unpack_bits(b_words, T: tl.constexpr):
    """Bits of words [T / 32] as a mask [1, T]."""
    return tl.reshape(b_words[None, :, None] & (1 << tl.arange(0, 32))[None, None, :], [1, T]) != 0


@triton.jit
def rounded_fraction(b_many, kept):
    """The fraction `kept` of counts, int32, rounded half to even like `torch.round`.

    In float64 the product is exact, as in `Budget.share`; in float32 it would depend on whether a compiler fuses it.
    """
    b_part = b_many.to(tl.float64) * kept
    b_wanted = tl.floor(b_part).to(tl.int32)
    b_rest = b_part - tl.floor(b_part)
    return b_wanted + ((b_rest > 0.5) | ((b_rest == 0.5) & (b_wanted % 2 == 1))).to(tl.int32)


@triton.jit
def count_listable(
    p_visible, o_own, end, local, sink, room, least, most, kept, MANY: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """List length k of the rows of each block `o_own`, and 2^16 times the number of candidates, int32. A row keeps the
    fraction `kept` of its visible blocks, between `least` and `most`, minus the unlisted ones, and at most `room`.
    Blocks from `end` on are not visible; the others are counted MANY at a time."""
    b_both = tl.zeros([o_own.shape[0], MANY], tl.int32)
    for begun in range(0, end, MANY):
        o_j = begun + tl.arange(0, MANY)[None, :]
        b_seen, b_near = visible_and_near(p_visible, o_own[:, None], end, local, sink, o_j, CAUSAL)
        b_both += tl.where(b_seen, tl.where(b_near, 65537, 1), 0)
    # Visible blocks, and those of them that are not listed; both counts include the own block.
    b_both = tl.sum(b_both, 1)
    b_seen = 1 + b_both % 65536
    b_taken = 1 + b_both // 65536
    b_candidates = b_seen - b_taken
    b_wanted = tl.minimum(tl.minimum(tl.maximum(rounded_fraction(b_seen, kept), least), most) - b_taken, room)
    return tl.maximum(tl.minimum(b_wanted, b_candidates), 0) + 65536 * b_candidates


@triton.jit
def scan_words(word, many, other_word, other_many):
    """Combine function of a scan over (word, bit count): the second word, and the sum of the counts."""
    return other_word, many + other_many


@triton.jit
def pack_words(b_ones, BM: tl.constexpr, T: tl.constexpr, PRODUCT: tl.constexpr):
    """Pack rows [BM, T] of 1.0 and 0.0 into words of 32 bits; returns the words and the set bits before each word. Both
    results are int32 [BM, T / 32]."""
    # A thread holds 4 of 16 bits. Their weighted sum is exact in float32, in a pipeline that is idle otherwise, and
    # adding 2^23 moves it into the low bits of the mantissa.
    if PRODUCT:
        b_ones = tl.permute(tl.reshape(b_ones, [BM, T // 32, 2, 2, 4, 2]), [0, 1, 2, 4, 3, 5])
    else:
        b_ones = tl.reshape(b_ones, [BM, T // 32, 2, 4, 2, 2])
    b_ones = tl.sum(b_ones * (1 + tl.arange(0, 2)).to(tl.float32), 5)
    b_ones = tl.sum(b_ones * (1 + (255 if PRODUCT else 3) * tl.arange(0, 2)).to(tl.float32), 4)
    b_half = b_ones * (1 << (2 if PRODUCT else 4) * tl.arange(0, 4)).to(tl.float32) + 8388608.0
    b_half = (b_half.to(tl.int32, bitcast=True) & 0xFFFF) << (16 * tl.arange(0, 2))[None, None, :, None]
    b_words = tl.sum(tl.reshape(b_half, [BM, T // 32, 8]), 2)
    # The scan carries the words, too, so that both results have its layout, which keeps each word in one thread only.
    b_words, b_many = tl.associative_scan((b_words, popcount(b_words)), 1, scan_words)
    return b_words, b_many - popcount(b_words)


@triton.jit
def count_ones(b_ones, BM: tl.constexpr, T: tl.constexpr, W: tl.constexpr, V: tl.constexpr):
    """Number of ones in each row [BM, T] of 1.0 and 0.0, int32 [BM]."""
    # Summed as integers, of which an instruction adds two: 1.0 has the bits 127 << 23, and 127 * 383 is 1 modulo 512.
    b_sum = b_ones.to(tl.int32, bitcast=True)
    if T < 512:
        b_sum = tl.sum(b_sum, 1).to(tl.uint32, bitcast=True)
        return (((b_sum >> 23) * 383) & 511).to(tl.int32)
    else:
        # Per thread first, because the sum counts modulo 512.
        b_sum = tl.sum(tl.sum(tl.reshape(b_sum, [BM, T // W, W // V, V]), 3), 1).to(tl.uint32, bitcast=True)
        return tl.sum((((b_sum >> 23) * 383) & 511).to(tl.int32), 1)


@triton.jit
def above_threshold(b_score, b_threshold):
    """1.0 where scores [BM, T] are above the threshold [BM] of their row, otherwise 0.0. Magnitudes of thresholds are
    between MIN_THRESHOLD and MAX_THRESHOLD, or infinite."""
    # One saturating fused multiply-add, which leaves the integer pipeline free: floats near such a threshold are at
    # least 1 / SLOPE apart.
    return tl.minimum(tl.maximum(tl.fma(b_score, SLOPE, (b_threshold * -SLOPE)[:, None]), 0.0), 1.0)


@triton.jit
def past_next_score(b_score, b_from, b_sign):
    """Values just past the next score of each row above `b_from`, or below it where `b_sign` is negative, [BM]."""
    # As unsigned integers, negative distances are larger than positive ones, and positive NaN larger than numbers.
    b_distance = tl.fma(b_score, b_sign[:, None], (-b_sign * b_from)[:, None]).to(tl.uint32, bitcast=True)
    b_least = tl.min(b_distance, 1).to(tl.float32, bitcast=True)
    return b_from + b_sign * (b_least + 2.0**-22 * (b_least + tl.abs(b_from)))


@triton.jit
def usable_threshold(b_threshold):
    """Thresholds with MIN_THRESHOLD in place of those too close to 0 for `above_threshold`."""
    return tl.where(tl.abs(b_threshold) < MIN_THRESHOLD, MIN_THRESHOLD, b_threshold)


@triton.jit
def top_k_mask(
    b_score, b_mean, b_square, b_candidates, b_count, BM: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
    V: tl.constexpr, PRODUCT: tl.constexpr, AS_ONE: tl.constexpr,
):  # fmt: skip
    """Mask of the `b_count` largest scores of each row, 1.0 and 0.0 [BM, T]; the first of equal scores win.

    `b_candidates` is the number of scores of a row other than NO_KEY and NaN. `b_mean` and `b_square` are the means of
    the scores and of their squares. Wrong means, or fewer scores than `b_candidates`, cost time only. With AS_ONE one
    comparison at the end serves all paths, which is shorter where the scores have the layout that the mask needs.
    """
    b_spread = tl.sqrt(tl.maximum(b_square - b_mean * b_mean, 0.0) + 1e-6 * b_mean * b_mean)
    # No score of T is further from the mean than sqrt(T) standard deviations.
    b_low = tl.maximum(b_mean - T**0.5 * b_spread, -MAX_THRESHOLD)
    b_high = tl.minimum(b_mean + T**0.5 * b_spread, MAX_THRESHOLD)
    # The lower end of the bracket has `b_over` scores too many above it, the upper end `b_under` too few.
    b_over = tl.maximum(b_candidates - b_count, 0).to(tl.float32)
    b_under = tl.maximum(b_count, 0).to(tl.float32)
    # Quantile and gap between neighbouring scores of a typical distribution, from the log odds of the rank.
    b_many = tl.maximum(b_under, 1.0)
    b_rest = tl.maximum(b_over, 1.0)
    b_log_odds = approx_log2(b_rest) - approx_log2(b_many)
    b_threshold = b_mean + b_spread * b_log_odds * (0.44 - 0.013 * tl.abs(b_log_odds))
    b_threshold = tl.minimum(tl.maximum(b_threshold, b_low), b_high)
    b_gap = b_spread * (b_many + b_rest) * approx_reciprocal(b_many * b_rest * (1.5 + 0.18 * tl.abs(b_log_odds)))
    left = MAX_TRIALS
    misranked = MAX_MISRANKED + 1.0
    while (left > 0) & (misranked > MAX_MISRANKED):
        b_threshold = usable_threshold(b_threshold)
        b_off = (count_ones(above_threshold(b_score, b_threshold), BM, T, W, V) - b_count).to(tl.float32)
        b_enough = b_off >= 0.0
        b_over = tl.where(b_enough, b_off, b_over)
        b_under = tl.where(b_enough, b_under, -b_off)
        b_low = tl.where(b_enough, b_threshold, b_low)
        b_high = tl.where(b_enough, b_high, b_threshold)
        if left > MAX_TRIALS - ESTIMATED_TRIALS:
            b_threshold += b_off * b_gap
            b_threshold = tl.where((b_threshold > b_low) & (b_threshold < b_high), b_threshold, 0.5 * (b_low + b_high))
        else:
            # Alternate between bisection and linear interpolation of the counts.
            b_part = (b_over + 0.5) * approx_reciprocal(b_over + b_under + 1.0)
            b_threshold = b_low + tl.where(left % 2 == 0, b_part, 0.5) * (b_high - b_low)
        if left <= MAX_TRIALS - (UNCHECKED_TRIALS - 1 if PRODUCT else 0):
            misranked = tl.max(tl.minimum(b_over, b_under), 0)
        left -= 1
    more = (misranked > MAX_MISRANKED).to(tl.int32)
    if (misranked > 0.0) & (misranked <= MAX_MISRANKED):
        b_misranked = tl.minimum(b_over, b_under)
        b_sign = tl.where(b_over <= b_under, 1.0, -1.0)
        b_end = tl.where(b_over <= b_under, b_low, b_high)
        for passed in range(misranked.to(tl.int32)):
            b_end = tl.where(b_misranked > passed, past_next_score(b_score, b_end, b_sign), b_end)
        b_low = tl.where(b_misranked > 0.0, usable_threshold(b_end), b_low)
        # Equal scores are passed together, which can miss the count.
        b_off = count_ones(above_threshold(b_score, b_low), BM, T, W, V) != b_count
        more = tl.max((b_off & (b_misranked > 0.0)).to(tl.int32), 0)
    if more > 0:
        # Ties, or scores of very different magnitude: determine the key of the k-th score bit by bit.
        b_count = tl.minimum(b_count, count_ones((b_score > NO_KEY).to(tl.float32), BM, T, W, V))
        b_key = tl.zeros([BM], tl.uint32)
        for bit in range(32):
            b_next = b_key | (tl.full([], 1, tl.uint32) << (31 - bit))
            b_above = count_ones((b_score >= score_of_key(b_next)[:, None]).to(tl.float32), BM, T, W, V)
            b_key = tl.where(b_above >= b_count, b_next, b_key)
        # If k is 0, the key has all bits set: a NaN, above which there is no score.
        b_last = score_of_key(b_key)[:, None]
        # Scores above it are listed; of the equal ones those with the smallest block numbers, by bisection.
        b_rank = tl.where(b_score == b_last, -tl.arange(0, T).to(tl.float32)[None, :], -4.0 * T)
        b_rank = tl.where(b_score > b_last, 1.0, b_rank)
        b_end = tl.full([BM], 0.5, tl.float32)
        # Depends on a run-time value, so that the compiler does not unroll the loop.
        step = T * more
        while step > 0:
            b_next = b_end - step.to(tl.float32)
            b_end = tl.where(count_ones(above_threshold(b_rank, b_next), BM, T, W, V) <= b_count, b_next, b_end)
            step //= 2
        if AS_ONE:
            b_score, b_low = b_rank, b_end
        else:
            b_listed = above_threshold(b_rank, b_end)
    else:
        b_low = tl.where(b_candidates == b_count, NO_KEY, b_low)
        b_low = tl.where(b_count > 0, b_low, -NO_KEY)
        if not AS_ONE:
            b_listed = above_threshold(b_score, b_low)
    if AS_ONE:
        b_listed = above_threshold(b_score, b_low)
    return b_listed


@triton.jit
def clear_lists(p_indices, b_exist, room, blocks, BM: tl.constexpr, K: tl.constexpr):
    """Fill the lists of BM adjacent rows, `room` entries each from `p_indices` on, with `blocks`: no block."""
    o_k = tl.arange(0, BM * K)
    b_rest = o_k < room * tl.sum(b_exist.to(tl.int32), 0)
    tl.store(p_indices + o_k, tl.full([BM * K], 0, tl.int32) + blocks, mask=b_rest)


@triton.jit
def write_lists(
    p_indices, p_counts, b_listed, b_exist, room, BM: tl.constexpr, T: tl.constexpr, PRODUCT: tl.constexpr
):  # fmt: skip
    """Write the set elements of masks [BM, T] as ascending lists, and their counts, into lists that are cleared.
    `p_indices` and `p_counts` point to the first of BM rows."""
    o_i = tl.arange(0, BM)
    # Each word stores its lowest bit per step, since few bits are set.
    b_words, b_before_word = pack_words(b_listed, BM, T, PRODUCT)
    tl.store(p_counts + o_i, tl.sum(popcount(b_words), 1), mask=b_exist)
    # The contiguity hint places the words of a row in one warp, whose stores then hit few rows.
    p_place = tl.max_contiguous(p_indices + o_i[:, None] * room + b_before_word, [1, 2])
    o_j = 32 * tl.arange(0, T // 32)[None, :]
    # Other threads cleared the lists.
    tl.debug_barrier()
    for _ in range(0, tl.max(tl.max(popcount(b_words), 1), 0), BITS_PER_STEP):
        for bit in tl.static_range(BITS_PER_STEP):
            b_left = b_words & (b_words - 1)
            tl.store(p_place + bit, o_j + popcount((b_words ^ b_left) - 1), mask=b_words != 0)
            b_words = b_left
        p_place += BITS_PER_STEP
