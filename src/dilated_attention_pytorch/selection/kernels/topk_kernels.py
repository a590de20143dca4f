"""Ranking rows of scores in a kernel, and listing the best.

A row is ranked without being sorted: by the mean of its scores and their spread a number is tried, then another by how
many lie above, until those are nearly as many as are listed; the few that are wrong are passed one by one. Where that
does not end, scores count as integers of the same order, and the last that is listed is found bit by bit.

Names as in `block_scores`; K and T are the powers of two that hold what a row may list and all blocks. A row lies
in few lanes, so that a count over it takes few exchanges and what follows from it serves several rows: that of a
product's result in four, of which each has 2 of 8 (PRODUCT), and one that is loaded in W / V, of which each has V of W.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton.primitives import LN2, NO_KEY, NO_PTX, scrambled
from .block_lists_kernels import ones_of

TRIALS, AIMED, UNASKED = tl.constexpr(20), tl.constexpr(4), tl.constexpr(3)
"""Of what as many lie above as are listed. The first are moved by how many are wrong, later ones lie between those that
counts are known of; only after so many are rows of a product, of which many share a program, asked whether all are
near."""
NEAR = tl.constexpr(3)
"""Scores too many or too few that are passed one by one."""
LISTED_TOGETHER = tl.constexpr(2)
"""Bits of a word that are listed before the next question whether any is left."""
STEEP, SMALLEST, LARGEST = tl.constexpr(2.0**90), tl.constexpr(2.0**-66), tl.constexpr(2.0**36)
"""Trials lie between those sizes, so that a difference from one, times STEEP, is 0 or at least 1 in size."""


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
def quick_log2(b_x):
    """To 2^-22, of numbers from 1/2 to 2, or to 2^-22 of it, of others above 2^-126: no other numbers come."""
    if NO_PTX:
        return tl.log2(b_x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, is_pure=True, pack=1)


@triton.jit
def quick_inverse(b_x):
    """1 / x, nearly, of numbers of usual size: for what is tried, not for what is told."""
    if NO_PTX:
        return 1.0 / b_x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, is_pure=True, pack=1)


@triton.jit
def from_one(b_bits):
    """The number from 1 to 2 whose digits are the first 23 bits."""
    if NO_PTX:
        return ((b_bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    else:
        # One instruction, where shifting and then setting bits would be two.
        ASM: tl.constexpr = "shf.r.wrap.b32 $0, $1, 127, 9;"
        return tl.inline_asm_elementwise(ASM, "=f,r", [b_bits], tl.float32, is_pure=True, pack=1)


@triton.jit
def noisy(b_score, b_row, b_column):
    """Scores and `rank.gumbel`, less a number that all have in common.

    With `b_row` from `dropout_rows`; all already broadcastable.
    """
    # Rows and columns take the first step of `scramble` apart.
    b_column = b_column.to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32)
    b_bits = scrambled((b_row ^ (b_row >> 16)) ^ (b_column ^ (b_column >> 16)))
    b_uniform = from_one(b_bits) - (1.0 - 2.0**-24)
    # -log2(uniform), off by 2^-21 at most, and never 0. The smallest, thus the largest noise, have fewer digits for
    # that; such blocks rank first in any case.
    b_sum = 2.0**-22 - quick_log2(b_uniform)
    return tl.fma(quick_log2(b_sum), -LN2, b_score)


@triton.jit
def sight(p_visible, own, blocks, local, sink, o_j, CAUSAL: tl.constexpr):
    """Which blocks rows of the block `own` see besides it, and which are near, thus need no listing."""
    b_away = own - o_j
    b_visible = tl.load(p_visible + o_j, mask=o_j < blocks, other=0) != 0
    b_seen = (b_away > 0 if CAUSAL else b_away != 0) & b_visible
    return b_seen, (tl.abs(b_away) < local) | (o_j < sink)


@triton.jit
def below(column, o_word):
    """Of words of 32 blocks, the first of which are told, the bits of those before a block."""
    b_many = tl.minimum(tl.maximum(column - o_word, 0), 32)
    return tl.where(b_many == 32, -1, (1 << (b_many & 31)) - 1)


@triton.jit
def only(b_one, b_other):
    """Of a running sum over one there is no second."""
    return b_other


@triton.jit
def sight_words(p_visible, own, blocks, local, sink, T: tl.constexpr, CAUSAL: tl.constexpr):
    """As `sight`, of all T blocks, as bits in words of 32, [T / 32]."""
    o_j = tl.arange(0, T)
    # As numbers, which are 0 and 1: as flags they would be compared, and then be made numbers.
    p_visible = p_visible.to(tl.pointer_type(tl.int8), bitcast=True)
    b_visible = tl.load(p_visible + o_j, mask=o_j < blocks, other=0).to(tl.int32)
    b_seen = tl.sum(tl.reshape(b_visible, [T // 32, 32]) << tl.arange(0, 32)[None, :], 1)
    # A running sum, were it of one, has a layout of its own: words are made once, and not by every thread for itself.
    b_seen = tl.reshape(tl.associative_scan(tl.reshape(b_seen, [T // 32, 1]), 1, only), [T // 32])
    o_word = 32 * tl.arange(0, T // 32)
    b_before = below(own, o_word)
    b_seen &= b_before if CAUSAL else b_before | ~below(own + 1, o_word)
    return b_seen, (below(own + local, o_word) & ~below(own - local + 1, o_word)) | below(sink, o_word)


@triton.jit
def flags(b_words, T: tl.constexpr):
    """Which bits of the words are set, [1, T]."""
    return tl.reshape(b_words[None, :, None] & (1 << tl.arange(0, 32))[None, None, :], [1, T]) != 0


@triton.jit
def share_of(b_many, kept):
    """That fraction of so many; half goes to the even number, as torch rounds."""
    b_part = kept * b_many.to(tl.float32)
    b_wanted = tl.floor(b_part).to(tl.int32)
    b_rest = b_part - tl.floor(b_part)
    return b_wanted + ((b_rest > 0.5) | ((b_rest == 0.5) & (b_wanted % 2 == 1))).to(tl.int32)


@triton.jit
def may_list(
    p_visible, o_own, end, local, sink, room, least, most, kept, MANY: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """How many blocks rows of each own block may list: a fraction `kept` of what they see, within bounds.

    And, times 2^16, among how many. They see none from `end` on; the others are asked MANY at a time.
    """
    b_both = tl.zeros([o_own.shape[0], MANY], tl.int32)
    for begun in range(0, end, MANY):
        o_j = begun + tl.arange(0, MANY)[None, :]
        b_seen, b_near = sight(p_visible, o_own[:, None], end, local, sink, o_j, CAUSAL)
        b_both += tl.where(b_seen, tl.where(b_near, 65537, 1), 0)
    # Blocks that a row sees, and those of them that need no listing, its own among both.
    b_both = tl.sum(b_both, 1)
    b_seen = 1 + b_both % 65536
    b_taken = 1 + b_both // 65536
    b_open = b_seen - b_taken
    b_wanted = tl.minimum(tl.minimum(tl.maximum(share_of(b_seen, kept), least), most) - b_taken, room)
    return tl.maximum(tl.minimum(b_wanted, b_open), 0) + 65536 * b_open


@triton.jit
def later_word(word, many, other_word, other_many):
    """The later word of two, and how many bits both have."""
    return other_word, many + other_many


@triton.jit
def words_of(b_step, BM: tl.constexpr, T: tl.constexpr, PRODUCT: tl.constexpr):
    """Of a row of 1 and 0 the bits in words of 32, [BM, T / 32], and how many are set in the words before."""
    # Of 16 each thread has 4, whose sums are exact in float32, beside what integers take.
    if PRODUCT:
        b_step = tl.permute(tl.reshape(b_step, [BM, T // 32, 2, 2, 4, 2]), [0, 1, 2, 4, 3, 5])
    else:
        b_step = tl.reshape(b_step, [BM, T // 32, 2, 4, 2, 2])
    b_step = tl.sum(b_step * (1 + tl.arange(0, 2)).to(tl.float32), 5)
    b_step = tl.sum(b_step * (1 + (255 if PRODUCT else 3) * tl.arange(0, 2)).to(tl.float32), 4)
    b_half = b_step * (1 << (2 if PRODUCT else 4) * tl.arange(0, 4)).to(tl.float32) + 8388608.0
    b_half = (b_half.to(tl.int32, bitcast=True) & 0xFFFF) << (16 * tl.arange(0, 2))[None, None, :, None]
    b_words = tl.sum(tl.reshape(b_half, [BM, T // 32, 8]), 2)
    # The words go along, so that both lie where a running sum leaves them: in one thread each, not in several.
    b_words, b_many = tl.associative_scan((b_words, ones_of(b_words)), 1, later_word)
    return b_words, b_many - ones_of(b_words)


@triton.jit
def counted(b_step, BM: tl.constexpr, T: tl.constexpr, W: tl.constexpr, V: tl.constexpr):
    """How many of each row are 1.0; the others are 0.0."""
    # The bits of 1.0 are 127 << 23. Integers add up two of those at a time, and 127 * 383 is 1 modulo 512.
    b_sum = b_step.to(tl.int32, bitcast=True)
    if T < 512:
        b_sum = tl.sum(b_sum, 1).to(tl.uint32, bitcast=True)
        return (((b_sum >> 23) * 383) & 511).to(tl.int32)
    else:
        # First those of a thread.
        b_sum = tl.sum(tl.sum(tl.reshape(b_sum, [BM, T // W, W // V, V]), 3), 1).to(tl.uint32, bitcast=True)
        return tl.sum((((b_sum >> 23) * 383) & 511).to(tl.int32), 1)


@triton.jit
def above(b_score, b_trial):
    """Which of each row lie above its trial, as 1 and 0; trials are from SMALLEST to LARGEST in size, or endless."""
    # One instruction, beside what integers take: next to such a trial numbers are no less than 1 / STEEP apart.
    return tl.minimum(tl.maximum(tl.fma(b_score, STEEP, (b_trial * -STEEP)[:, None]), 0.0), 1.0)


@triton.jit
def past_next(b_score, b_from, b_sign):
    """Just past the next score above, or where the sign is negative below."""
    # As bits without a sign, negative differences are larger than any other, and what is not a number than the rest.
    b_away = tl.fma(b_score, b_sign[:, None], (-b_sign * b_from)[:, None]).to(tl.uint32, bitcast=True)
    b_least = tl.min(b_away, 1).to(tl.float32, bitcast=True)
    return b_from + b_sign * (b_least + 2.0**-22 * (b_least + tl.abs(b_from)))


@triton.jit
def tried(b_trial):
    """What may be asked for with `above`: no number too near to 0."""
    return tl.where(tl.abs(b_trial) < SMALLEST, SMALLEST, b_trial)


@triton.jit
def best_of(
    b_score, b_mean, b_square, b_open, b_count, BM: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
    V: tl.constexpr, PRODUCT: tl.constexpr, AS_ONE: tl.constexpr,
):  # fmt: skip
    """Which are the best `b_count` of each row's `b_open` scores, or all where those are fewer, as 1 and 0.

    Of equals the first. Where the means of scores and of their squares are not right, that takes longer, and also where
    scores are fewer than told. AS_ONE, however they were found, they are told by the same instructions, which is less
    where scores lie as what follows needs them.
    """
    b_spread = tl.sqrt(tl.maximum(b_square - b_mean * b_mean, 0.0) + 1e-6 * b_mean * b_mean)
    # Of T scores none lies further from the mean.
    b_low = tl.maximum(b_mean - T**0.5 * b_spread, -LARGEST)
    b_high = tl.minimum(b_mean + T**0.5 * b_spread, LARGEST)
    # Scores too many above the lower end, and too few above the higher.
    b_over = tl.maximum(b_open - b_count, 0).to(tl.float32)
    b_under = tl.maximum(b_count, 0).to(tl.float32)
    # As many lie above, and so far apart, if the scores are spread as most are.
    b_many = tl.maximum(b_under, 1.0)
    b_rest = tl.maximum(b_over, 1.0)
    b_odds = quick_log2(b_rest) - quick_log2(b_many)
    b_trial = b_mean + b_spread * b_odds * (0.44 - 0.013 * tl.abs(b_odds))
    b_trial = tl.minimum(tl.maximum(b_trial, b_low), b_high)
    b_pace = b_spread * (b_many + b_rest) * quick_inverse(b_many * b_rest * (1.5 + 0.18 * tl.abs(b_odds)))
    left = TRIALS
    far = NEAR + 1.0
    while (left > 0) & (far > NEAR):
        b_trial = tried(b_trial)
        b_off = (counted(above(b_score, b_trial), BM, T, W, V) - b_count).to(tl.float32)
        b_enough = b_off >= 0.0
        b_over = tl.where(b_enough, b_off, b_over)
        b_under = tl.where(b_enough, b_under, -b_off)
        b_low = tl.where(b_enough, b_trial, b_low)
        b_high = tl.where(b_enough, b_high, b_trial)
        if left > TRIALS - AIMED:
            b_trial += b_off * b_pace
            b_trial = tl.where((b_trial > b_low) & (b_trial < b_high), b_trial, 0.5 * (b_low + b_high))
        else:
            # By turns in the middle, and where it would be if what lies between were spread evenly.
            b_part = (b_over + 0.5) * quick_inverse(b_over + b_under + 1.0)
            b_trial = b_low + tl.where(left % 2 == 0, b_part, 0.5) * (b_high - b_low)
        if left <= TRIALS - (UNASKED - 1 if PRODUCT else 0):
            far = tl.max(tl.minimum(b_over, b_under), 0)
        left -= 1
    more = (far > NEAR).to(tl.int32)
    if (far > 0.0) & (far <= NEAR):
        b_wrong = tl.minimum(b_over, b_under)
        b_sign = tl.where(b_over <= b_under, 1.0, -1.0)
        b_end = tl.where(b_over <= b_under, b_low, b_high)
        for passed in range(far.to(tl.int32)):
            b_end = tl.where(b_wrong > passed, past_next(b_score, b_end, b_sign), b_end)
        b_low = tl.where(b_wrong > 0.0, tried(b_end), b_low)
        # Of equals one is not passed without the other.
        b_off = counted(above(b_score, b_low), BM, T, W, V) != b_count
        more = tl.max((b_off & (b_wrong > 0.0)).to(tl.int32), 0)
    if more > 0:
        # Equals, or scores of very different size: the last that is listed, bit by bit, and of equals the first.
        b_count = tl.minimum(b_count, counted((b_score > NO_KEY).to(tl.float32), BM, T, W, V))
        b_place = tl.zeros([BM], tl.uint32)
        for bit in range(32):
            b_next = b_place | (tl.full([], 1, tl.uint32) << (31 - bit))
            b_found = counted((b_score >= score_at(b_next)[:, None]).to(tl.float32), BM, T, W, V)
            b_place = tl.where(b_found >= b_count, b_next, b_place)
        # Where none is listed, that is the last place, above which there is nothing, and not a number.
        b_last = score_at(b_place)[:, None]
        # Then of those above it all, and of equals those before the last block before which there are no more.
        b_turn = tl.where(b_score == b_last, -tl.arange(0, T).to(tl.float32)[None, :], -4.0 * T)
        b_turn = tl.where(b_score > b_last, 1.0, b_turn)
        b_end = tl.full([BM], 0.5, tl.float32)
        # Not known to the compiler, which would write all steps out.
        step = T * more
        while step > 0:
            b_next = b_end - step.to(tl.float32)
            b_end = tl.where(counted(above(b_turn, b_next), BM, T, W, V) <= b_count, b_next, b_end)
            step //= 2
        if AS_ONE:
            b_score, b_low = b_turn, b_end
        else:
            b_listed = above(b_turn, b_end)
    else:
        b_low = tl.where(b_open == b_count, NO_KEY, b_low)
        b_low = tl.where(b_count > 0, b_low, -NO_KEY)
        if not AS_ONE:
            b_listed = above(b_score, b_low)
    if AS_ONE:
        b_listed = above(b_score, b_low)
    return b_listed


@triton.jit
def clear_lists(p_indices, b_exist, room, blocks, BM: tl.constexpr, K: tl.constexpr):
    """Lists of BM rows, the first of which is pointed to, without anything in them; these lines follow one another."""
    o_k = tl.arange(0, BM * K)
    b_rest = o_k < room * tl.sum(b_exist.to(tl.int32), 0)
    tl.store(p_indices + o_k, tl.full([BM * K], 0, tl.int32) + blocks, mask=b_rest)


@triton.jit
def write_lists(
    p_indices, p_counts, b_listed, b_exist, room, BM: tl.constexpr, T: tl.constexpr, PRODUCT: tl.constexpr
):  # fmt: skip
    """Of BM rows, the first of which `p_indices` and `p_counts` point to, what lists that are cleared begin with."""
    o_i = tl.arange(0, BM)
    # Every word gives the first bit that is left at a time: few are listed.
    b_words, b_prior = words_of(b_listed, BM, T, PRODUCT)
    tl.store(p_counts + o_i, tl.sum(ones_of(b_words), 1), mask=b_exist)
    # Told to follow one another, words of a row share a warp, whose stores then fall on few rows.
    p_place = tl.max_contiguous(p_indices + o_i[:, None] * room + b_prior, [1, 2])
    o_j = 32 * tl.arange(0, T // 32)[None, :]
    # Others cleared them.
    tl.debug_barrier()
    for _ in range(0, tl.max(tl.max(ones_of(b_words), 1), 0), LISTED_TOGETHER):
        for bit in tl.static_range(LISTED_TOGETHER):
            b_left = b_words & (b_words - 1)
            tl.store(p_place + bit, o_j + ones_of((b_words ^ b_left) - 1), mask=b_words != 0)
            b_words = b_left
        p_place += LISTED_TOGETHER
