"""Attention mass of queries on key blocks, without an array of scores, and gradients of a scorer's scores.

Names as in `primitives`. A row is W queries of a block, whose attention is one distillation target; EACH rows have one
list. With ALL a row is compared on every block, otherwise on its own block and then on its listed blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton.primitives import LN2, NO_KEY, load_rows


@triton.jit
def block_lse(
    p_q, p_k, p_rows, p_blocks, p_padding, p_logs, program, stream, scale, n, blocks, rows, queries, total, width,
    heads, group, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, LISTED: tl.constexpr, ALL: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the LSE over one key block of BM of the `queries` queries of a row; -inf if a query sees no key of it.
    `p_logs` is [streams, rows, queries, width]; `width` is the number of blocks of a row. LISTED heads share a list."""
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
        list_row = first // EACH if EACH > 1 else first
        p_own = p_blocks + ((stream // LISTED if LISTED > 1 else stream) * total + list_row) * (width - 1) + slot - 1
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
    BLOCK: tl.constexpr, BM: tl.constexpr, BMA: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, EACH: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, LISTED: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`block_lse` of `chosen` rows on their lists, in the first `programs` programs; of `dense` rows on all blocks."""
    program = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    if program < programs:
        block_lse(
            p_q, p_k, p_rows, p_blocks, p_padding, p_logs, program, stream, scale, n, blocks, chosen, W, total,
            slots + 1, heads, group, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
            BLOCK, BM, BN, W, EACH, D, DP, LISTED, False, CAUSAL, PADDING, PRECISION,
        )  # fmt: skip
    else:
        # Rows on all blocks have no lists that differ, so that queries of several short rows share a tile.
        block_lse(
            p_q, p_k, p_rows + chosen, p_blocks, p_padding, p_logs + at_all, program - programs, stream, scale, n,
            blocks, 1, dense * W, total, blocks, heads, group, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
            BLOCK, BMA, BN, W, EACH, D, DP, LISTED, True, CAUSAL, PADDING, PRECISION,
        )  # fmt: skip


@triton.jit
def row_mass(
    p_logs, p_lse, p_do, p_mean, p_padding, place, n, width, sg_n, b_mass, kept_share, queries,
    W: tl.constexpr, BM: tl.constexpr, L: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, ALL: tl.constexpr,
    SALIENCY: tl.constexpr, FLOOR: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Add the weighted attention of one head's queries on the L blocks of a row to `b_mass` [L]. With ALL, `kept_share`
    and `queries` grow by the share of attention that the selection keeps, summed over queries, and by the number of
    queries. Also returns the weights of the queries summed over steps, [BM]."""
    o_l = tl.arange(0, L)
    o_e = tl.arange(0, EP)
    b_weights = tl.zeros([BM], tl.float32)
    for first in range(0, W, BM):
        o_i = first + tl.arange(0, BM)
        o_q = place * W + o_i
        b_real = o_q < n
        b_logs = tl.load(p_logs + o_i[:, None] * width + o_l[None, :], mask=(o_l < width)[None, :], other=NO_KEY)
        b_kept_lse = tl.load(p_lse + o_q, mask=b_real, other=NO_KEY)
        b_lse = b_kept_lse
        if ALL:
            b_top = tl.max(b_logs, 1)
            b_top = tl.where(b_top == NO_KEY, 0.0, b_top)
            b_lse = b_top + tl.log(tl.sum(tl.exp(b_logs - b_top[:, None]), 1))
            b_counted = b_real & (b_lse != NO_KEY)
            kept_share += tl.sum(tl.where(b_counted, tl.exp(b_kept_lse - b_lse), 0.0), 0)
            queries += tl.sum(b_counted.to(tl.float32), 0)
        b_weight = tl.full([BM], 1.0, tl.float32)
        if SALIENCY:
            b_do = load_rows(p_do + o_q[:, None] * sg_n + o_e[None, :], b_real, o_e, E, EP, True).to(tl.float32)
            b_weight = tl.sqrt(tl.sum(b_do * b_do, 1)) + FLOOR * tl.load(p_mean)
        if PADDING:
            b_real = b_real & (tl.load(p_padding + o_q, mask=b_real, other=1) == 0)
        b_share = tl.where(b_logs == NO_KEY, 0.0, tl.exp(b_logs - b_lse[:, None]))
        b_weighted = b_real & (b_weight > 0.0)
        b_mass += tl.sum(tl.where(b_weighted[:, None], b_share * b_weight[:, None], 0.0), 0)
        b_weights += tl.where(b_weighted, b_weight, 0.0)
    return b_mass, kept_share, queries, b_weights


@triton.jit
def row_weight(b_weights):
    """Sum of the weights of a row's queries, or 0 if it is not finite."""
    weight = tl.sum(b_weights, 0)
    return tl.where(weight < float("inf"), weight, 0.0)


@triton.jit
def distill_row(
    p_logs, p_scores, p_list, p_visible, p_lse, p_do, p_mean, p_padding, p_grad, p_found, place, n, blocks, width,
    every, factor, sg_n, sl_h, sg_h, BLOCK: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, L: tl.constexpr,
    T: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, LISTED: tl.constexpr, ALL: tl.constexpr, CAUSAL: tl.constexpr,
    SALIENCY: tl.constexpr, FLOOR: tl.constexpr, PADDING: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the scores of one row of at most L blocks, from the LSEs of its queries on each block.

    The target is the attention mass of the row's queries, summed over LISTED heads, whose LSEs are `sl_h` apart; the
    prediction is the softmax of the scores, with OWN also of 0 for the row's own block. Five statistics are stored
    `every` elements apart: divergence times weight, entropy (with ALL, otherwise 0), kept share of attention, number of
    queries, weight. The weight is the number of queries, or with SALIENCY W times the mean norm of gradients, which
    also multiplies the gradients. With T, the scores and gradients of a listed row are arrays over up to T blocks.
    """
    own = place * W // BLOCK
    o_l = tl.arange(0, L)
    b_mass = tl.zeros([L], tl.float32)
    kept_share = 0.0
    queries = 0.0
    if LISTED == 1:
        b_mass, kept_share, queries, b_weights = row_mass(
            p_logs, p_lse, p_do, p_mean, p_padding, place, n, width, sg_n, b_mass, kept_share, queries,
            W, BM, L, E, EP, ALL, SALIENCY, FLOOR, PADDING,
        )  # fmt: skip
    else:
        weight = 0.0
        for _ in range(LISTED):
            b_mass, kept_share, queries, b_weights = row_mass(
                p_logs, p_lse, p_do, p_mean, p_padding, place, n, width, sg_n, b_mass, kept_share, queries,
                W, BM, L, E, EP, ALL, SALIENCY, FLOOR, PADDING,
            )  # fmt: skip
            head_weight = row_weight(b_weights)
            weight += tl.where(head_weight > 0.0, W * tl.load(p_mean), 0.0) if SALIENCY else head_weight
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
    if OWN:
        b_logit = tl.where(b_own, 0.0, b_logit)
        b_mass = tl.where(b_compared | b_own, b_mass, 0.0)
    else:
        # A row that sees no other block has neither a target nor a prediction.
        alone = tl.max(b_compared.to(tl.int32), 0) == 0
        b_logit = tl.where(b_own & alone, 0.0, b_logit)
        b_mass = tl.where(b_compared, b_mass, 0.0)
    top = tl.max(b_logit, 0)
    b_log = b_logit - (top + tl.log(tl.sum(tl.exp(b_logit - top), 0)))
    b_share = tl.exp(b_log)
    mass = tl.sum(b_mass, 0)
    # A row without weight, or with a weight that is not finite, has no gradient.
    if LISTED == 1:
        weight = row_weight(b_weights)
    has_target = (mass > 0.0) & (mass < float("inf"))
    if SALIENCY:
        if LISTED == 1:
            weight = tl.where(weight > 0.0, W * tl.load(p_mean), 0.0)
        factor *= weight
    b_target = tl.where(has_target, b_mass / mass, 0.0)
    # Blocks that are not compared have probability 0: a finite logarithm keeps 0 * log at 0.
    b_log = tl.maximum(b_log, -1e30)
    b_terms = b_target * (tl.log(tl.where(b_target > 0.0, b_target, 1.0)) - b_log)
    b_grad = tl.where(b_compared, tl.where(has_target, b_share - b_target, 0.0), 0.0) * factor
    if T and not ALL:
        o_t = tl.arange(0, T)
        tl.store(p_grad + o_t, tl.zeros([T], tl.float32), mask=o_t < blocks)
        # Other threads of the program wrote the zeros.
        tl.debug_barrier()
        tl.store(p_grad + o_entry, b_grad, mask=b_compared)
    else:
        tl.store(p_grad + o_entry, b_grad, mask=b_stored)
    tl.store(p_found, tl.sum(b_terms, 0) * weight)
    entropy = -tl.sum(b_share * b_log, 0) if ALL else 0.0
    tl.store(p_found + every, entropy)
    tl.store(p_found + 2 * every, kept_share)
    tl.store(p_found + 3 * every, queries)
    tl.store(p_found + 4 * every, weight)


@triton.jit(do_not_specialize=["n", "blocks", "chosen", "slots", "total", "factor", "all_factor"])
def distill_kernel(
    p_logs, p_scores, p_all_scores, p_lists, p_visible, p_rows, p_lse, p_do, p_mean, p_padding, p_grad, p_all_grad,
    p_found, n, blocks, chosen, slots, total, at_all, heads, factor, all_factor, sg_b, sg_h, sg_n,
    BLOCK: tl.constexpr, W: tl.constexpr, EACH: tl.constexpr, BM: tl.constexpr, L: tl.constexpr, BMA: tl.constexpr,
    LA: tl.constexpr, T: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, LISTED: tl.constexpr, CAUSAL: tl.constexpr,
    SALIENCY: tl.constexpr, FLOOR: tl.constexpr, PADDING: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """`distill_row` for each row: first `chosen` rows on their lists, then the other rows on all blocks. With T,
    `p_scores` and `p_grad` are arrays over all blocks for both kinds. `heads` is the number of lists of a row, each
    shared by LISTED query heads."""
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
    p_list = p_lists + (stream * total + (place // EACH if EACH > 1 else place)) * slots
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
            BLOCK, W, BM, L, T, E, EP, LISTED, False, CAUSAL, SALIENCY, FLOOR, PADDING, OWN,
        )  # fmt: skip
    else:
        line = stream * dense + row - chosen
        o_entry = o_line if T else line * blocks
        first = stream * LISTED * dense + row - chosen
        distill_row(
            p_logs + at_all + first * W * blocks, p_all_scores + o_entry, p_list, p_visible, p_lse, p_do, p_mean,
            p_padding, p_all_grad + o_entry, p_found, place, n, blocks, blocks, every, all_factor, sg_n,
            dense.to(tl.int64) * W * blocks, sg_h,
            BLOCK, W, BMA, LA, T, E, EP, LISTED, True, CAUSAL, SALIENCY, FLOOR, PADDING, OWN,
        )  # fmt: skip
