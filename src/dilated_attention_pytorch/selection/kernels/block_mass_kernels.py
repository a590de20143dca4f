"""Attention of queries on blocks, without an array of scores, and gradients of a scorer's scores.

Names as in `primitives`. Rows are groups of W queries: a block, or one token. With ALL a row visits every block,
otherwise its own and then its listed blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton.primitives import LN2, NO_KEY, load_rows


@triton.jit
def block_lse(
    p_q, p_k, p_rows, p_blocks, p_padding, p_logs, program, stream, scale, n, blocks, rows, queries, total, width,
    heads, group, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    LISTED: tl.constexpr, ALL: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """LSE of BM queries, of `queries` that share a list, on one block of it; -inf where they see nothing of it.

    LISTED heads have one list.
    """
    tiles = (queries + BM - 1) // BM
    row = (program % (tiles * rows) // tiles).to(tl.int64)
    o_i = (program % tiles) * BM + tl.arange(0, BM)
    slot = program // (tiles * rows)
    sample = stream // heads
    head = stream % heads
    o_flat = row * queries + o_i
    o_q = tl.load(p_rows + o_flat // W, mask=o_i < queries, other=n) * W + o_flat % W
    b_exist = (o_i < queries) & (o_q < n)
    block = slot.to(tl.int64)
    if not ALL:
        first = tl.load(p_rows + row)
        p_own = p_blocks + ((stream // LISTED if LISTED > 1 else stream) * total + first) * (width - 1) + slot - 1
        block = tl.where(slot == 0, first * W // BLOCK, tl.load(p_own, mask=slot > 0, other=0).to(tl.int64))
    o_line = ((stream * rows + row) * queries + o_i) * width + slot
    o_d = tl.arange(0, DP)
    o_n = tl.arange(0, BN)
    b_q = load_rows(p_q + sample * sq_b + head * sq_h + o_q[:, None] * sq_n + o_d[None, :], b_exist, o_d, D, DP, True)
    p_k += sample * sk_b + (head // group) * sk_h
    b_m = tl.full([BM], NO_KEY, tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    if block < blocks:
        for j in range(BLOCK // BN):
            o_key = block * BLOCK + j * BN + o_n
            b_seen = o_key < n
            if PADDING:
                b_seen = b_seen & (tl.load(p_padding + sample * n + o_key, mask=b_seen, other=1) == 0)
            b_k = load_rows(p_k + o_key[:, None] * sk_n + o_d[None, :], b_seen, o_d, D, DP, True)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
            b_ok = b_seen[None, :]
            if CAUSAL:
                b_ok = b_ok & (o_key[None, :] <= o_q[:, None])
            b_s = tl.where(b_ok, b_s, NO_KEY)
            b_top = tl.maximum(b_m, tl.max(b_s, 1))
            b_ref = tl.where(b_top == NO_KEY, 0.0, b_top)
            b_l = b_l * tl.math.exp2(b_m - b_ref) + tl.sum(tl.math.exp2(b_s - b_ref[:, None]), 1)
            b_m = b_top
    b_lse = tl.where(b_exist, (b_m + tl.math.log2(b_l)) * LN2, NO_KEY)
    tl.store(p_logs + o_line, b_lse, mask=o_i < queries)


@triton.jit(do_not_specialize=["n", "blocks", "chosen", "dense", "slots", "total", "programs"])
def block_lse_kernel(
    p_q, p_k, p_rows, p_blocks, p_padding, p_logs, scale, n, blocks, chosen, dense, slots, total, programs, at_all,
    heads, group, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
    BLOCK: tl.constexpr, BM: tl.constexpr, BMA: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, LISTED: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`block_lse` of `chosen` rows on their lists, by the first `programs`, and of `dense` behind on every block."""
    program = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    if program < programs:
        block_lse(
            p_q, p_k, p_rows, p_blocks, p_padding, p_logs, program, stream, scale, n, blocks, chosen, W, total,
            slots + 1, heads, group, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
            BLOCK, BM, BN, W, D, DP, LISTED, False, CAUSAL, PADDING, PRECISION,
        )  # fmt: skip
    else:
        # Rows without lists of their own need not be kept apart, so that short ones fill a tile together.
        block_lse(
            p_q, p_k, p_rows + chosen, p_blocks, p_padding, p_logs + at_all, program - programs, stream, scale, n,
            blocks, 1, dense * W, total, blocks, heads, group, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
            BLOCK, BMA, BN, W, D, DP, LISTED, True, CAUSAL, PADDING, PRECISION,
        )  # fmt: skip


@triton.jit
def row_mass(
    p_logs, p_lse, p_do, p_mean, p_padding, place, n, width, sg_n, b_mass, captured, seen,
    W: tl.constexpr, BM: tl.constexpr, L: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, ALL: tl.constexpr,
    SALIENCY: tl.constexpr, FLOOR: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Add one head's weighted attention on each block of a row, with ALL the shares that its queries keep and their
    number; and the weights of the queries, [BM]."""
    o_l = tl.arange(0, L)
    o_e = tl.arange(0, EP)
    b_weights = tl.zeros([BM], tl.float32)
    for first in range(0, W, BM):
        o_i = first + tl.arange(0, BM)
        o_q = place * W + o_i
        b_real = o_q < n
        b_logs = tl.load(p_logs + o_i[:, None] * width + o_l[None, :], mask=(o_l < width)[None, :], other=NO_KEY)
        b_kept = tl.load(p_lse + o_q, mask=b_real, other=NO_KEY)
        b_whole = b_kept
        if ALL:
            b_top = tl.max(b_logs, 1)
            b_top = tl.where(b_top == NO_KEY, 0.0, b_top)
            b_whole = b_top + tl.log(tl.sum(tl.exp(b_logs - b_top[:, None]), 1))
            b_met = b_real & (b_whole != NO_KEY)
            captured += tl.sum(tl.where(b_met, tl.exp(b_kept - b_whole), 0.0), 0)
            seen += tl.sum(b_met.to(tl.float32), 0)
        b_weight = tl.full([BM], 1.0, tl.float32)
        if SALIENCY:
            b_do = load_rows(p_do + o_q[:, None] * sg_n + o_e[None, :], b_real, o_e, E, EP, True).to(tl.float32)
            b_weight = tl.sqrt(tl.sum(b_do * b_do, 1)) + FLOOR * tl.load(p_mean)
        if PADDING:
            b_real = b_real & (tl.load(p_padding + o_q, mask=b_real, other=1) == 0)
        b_share = tl.where(b_logs == NO_KEY, 0.0, tl.exp(b_logs - b_whole[:, None]))
        b_counts = b_real & (b_weight > 0.0)
        b_mass += tl.sum(tl.where(b_counts[:, None], b_share * b_weight[:, None], 0.0), 0)
        b_weights += tl.where(b_counts, b_weight, 0.0)
    return b_mass, captured, seen, b_weights


@triton.jit
def row_weight(b_weights):
    """Sum of the weights of a row's queries; 0 where it is not finite."""
    weight = tl.sum(b_weights, 0)
    return tl.where(weight < float("inf"), weight, 0.0)


@triton.jit
def distill_row(
    p_logs, p_scores, p_list, p_visible, p_lse, p_do, p_mean, p_padding, p_grad, p_found, place, n, blocks, width,
    every, factor, sg_n, sl_h, sg_h, BLOCK: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, L: tl.constexpr,
    T: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, LISTED: tl.constexpr, ALL: tl.constexpr, CAUSAL: tl.constexpr,
    SALIENCY: tl.constexpr, FLOOR: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Gradients of one row, L blocks at most, from the attention of its queries on each block, given by LSEs.

    Stored `every` rows apart: its divergence times its weight, with ALL its entropy, the share of attention that its
    queries keep and their number, and its weight, the number of its queries. With SALIENCY that is times the mean norm
    of gradients, and multiplies gradients of scores. With T scores of a listed row are those of up to T blocks, and so
    are their gradients. The attention of LISTED heads, whose LSEs of blocks are `sl_h` apart, is added up.
    """
    own = place * W // BLOCK
    o_l = tl.arange(0, L)
    b_mass = tl.zeros([L], tl.float32)
    captured = 0.0
    seen = 0.0
    if LISTED == 1:
        b_mass, captured, seen, b_weights = row_mass(
            p_logs, p_lse, p_do, p_mean, p_padding, place, n, width, sg_n, b_mass, captured, seen,
            W, BM, L, E, EP, ALL, SALIENCY, FLOOR, PADDING,
        )  # fmt: skip
    else:
        weight = 0.0
        for _ in range(LISTED):
            b_mass, captured, seen, b_weights = row_mass(
                p_logs, p_lse, p_do, p_mean, p_padding, place, n, width, sg_n, b_mass, captured, seen,
                W, BM, L, E, EP, ALL, SALIENCY, FLOOR, PADDING,
            )  # fmt: skip
            one = row_weight(b_weights)
            weight += tl.where(one > 0.0, W * tl.load(p_mean), 0.0) if SALIENCY else one
            p_logs += sl_h
            p_lse += n
            p_do += sg_h
            p_mean += 1
    if ALL:
        o_entry = o_l
        b_own = o_l == own
        b_compared = (o_l < own if CAUSAL else o_l != own) & (o_l < blocks)
        b_compared = b_compared & (tl.load(p_visible + o_l, mask=b_compared, other=0) != 0)
        b_stored = o_l < width
    else:
        b_own = o_l == 0
        b_stored = (o_l > 0) & (o_l < width)
        b_block = tl.load(p_list + o_l - 1, mask=b_stored, other=blocks)
        b_compared = b_block < blocks
        o_entry = b_block if T else o_l - 1
    b_logit = tl.load(p_scores + o_entry, mask=b_compared, other=NO_KEY)
    b_logit = tl.where(b_own, 0.0, b_logit)
    top = tl.max(b_logit, 0)
    b_log = b_logit - (top + tl.log(tl.sum(tl.exp(b_logit - top), 0)))
    b_share = tl.exp(b_log)
    b_mass = tl.where(b_compared | b_own, b_mass, 0.0)
    whole = tl.sum(b_mass, 0)
    # A row without weight, or with a weight that is not finite, has no gradient.
    if LISTED == 1:
        weight = row_weight(b_weights)
    has_target = (whole > 0.0) & (whole < float("inf"))
    if SALIENCY:
        if LISTED == 1:
            weight = tl.where(weight > 0.0, W * tl.load(p_mean), 0.0)
        factor *= weight
    b_target = tl.where(has_target, b_mass / whole, 0.0)
    # What is not compared is predicted never, and weighs nothing.
    b_log = tl.maximum(b_log, -1e30)
    b_terms = b_target * (tl.log(tl.where(b_target > 0.0, b_target, 1.0)) - b_log)
    b_grad = tl.where(b_compared, tl.where(has_target, b_share - b_target, 0.0), 0.0) * factor
    if T and not ALL:
        o_t = tl.arange(0, T)
        tl.store(p_grad + o_t, tl.zeros([T], tl.float32), mask=o_t < blocks)
        # Others of the program wrote there.
        tl.debug_barrier()
        tl.store(p_grad + o_entry, b_grad, mask=b_compared)
    else:
        tl.store(p_grad + o_entry, b_grad, mask=b_stored)
    tl.store(p_found, tl.sum(b_terms, 0) * weight)
    entropy = -tl.sum(b_share * b_log, 0) if ALL else 0.0
    tl.store(p_found + every, entropy)
    tl.store(p_found + 2 * every, captured)
    tl.store(p_found + 3 * every, seen)
    tl.store(p_found + 4 * every, weight)


@triton.jit(do_not_specialize=["n", "blocks", "chosen", "slots", "total", "factor", "all_factor"])
def distill_kernel(
    p_logs, p_scores, p_all_scores, p_lists, p_visible, p_rows, p_lse, p_do, p_mean, p_padding, p_grad, p_all_grad,
    p_found, n, blocks, chosen, slots, total, at_all, heads, factor, all_factor, sg_b, sg_h, sg_n,
    BLOCK: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, L: tl.constexpr, BMA: tl.constexpr, LA: tl.constexpr,
    T: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, LISTED: tl.constexpr, CAUSAL: tl.constexpr,
    SALIENCY: tl.constexpr, FLOOR: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """`distill_row` of every row: `chosen` ones with their lists, then those with every block.

    With T `p_scores` and `p_grad` have every block of all rows. There are `heads` lists, each of LISTED query heads.
    """
    row = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(0)
    dense = rows - chosen
    every = tl.num_programs(1).to(tl.int64) * rows
    place = tl.load(p_rows + row)
    p_do += (stream // heads) * sg_b + (stream % heads) * LISTED * sg_h
    p_padding += (stream // heads) * n
    p_lse += stream * LISTED * n
    p_mean += stream * LISTED
    p_visible += stream * blocks
    p_list = p_lists + (stream * total + place) * slots
    p_found += stream * rows + row
    o_line = (stream * rows + row) * blocks
    if row < chosen:
        line = stream * chosen + row
        o_entry = o_line if T else line * slots
        first = stream * LISTED * chosen + row
        distill_row(
            p_logs + first * W * (slots + 1), p_scores + o_entry, p_list, p_visible, p_lse, p_do, p_mean, p_padding,
            p_grad + o_entry, p_found, place, n, blocks, slots + 1, every, factor, sg_n,
            chosen.to(tl.int64) * W * (slots + 1), sg_h,
            BLOCK, W, BM, L, T, E, EP, LISTED, False, CAUSAL, SALIENCY, FLOOR, PADDING,
        )  # fmt: skip
    else:
        line = stream * dense + row - chosen
        o_entry = o_line if T else line * blocks
        first = stream * LISTED * dense + row - chosen
        distill_row(
            p_logs + at_all + first * W * blocks, p_all_scores + o_entry, p_list, p_visible, p_lse, p_do, p_mean,
            p_padding, p_all_grad + o_entry, p_found, place, n, blocks, blocks, every, all_factor, sg_n,
            dense.to(tl.int64) * W * blocks, sg_h,
            BLOCK, W, BMA, LA, T, E, EP, LISTED, True, CAUSAL, SALIENCY, FLOOR, PADDING,
        )  # fmt: skip
