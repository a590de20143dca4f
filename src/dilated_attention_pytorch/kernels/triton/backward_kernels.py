"""Backward kernels: dQ by query row, dK and dV by key column; without atomics, so bitwise reproducible."""

# A condition on a compile-time constant must stand alone: joined to a value it would be decided at run time.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import (
    NO_KEY,
    add_to_ends,
    add_to_table,
    bias_index,
    bias_of,
    careful_entry,
    contained,
    dropout_keep,
    dropout_rows,
    end_entry,
    entry_at,
    load_rows,
    names_in_dropout,
    owner_of_program,
    piece_rows,
    range_of_places,
    reference_of,
    row_of_member,
    rows_left,
    rows_of_program,
    spoilt,
    store_rows,
    streamed,
    tanh_and_slope,
    tokens_of,
    tokens_of_tile,
    visible,
    work_of,
)


@triton.jit(do_not_specialize=["rows"])
def delta_bwd_kernel(
    p_out, p_do, p_lse, p_dlse, p_delta, rows, so_b, so_h, so_n, sg_b, sg_h, sg_n, sl_b, sl_h, sl_n,
    BM: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, LSE_GRAD: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) - dLSE."""
    o_q = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_e = tl.arange(0, EP)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    b_exist = o_q < rows
    p_out_tile = p_out + batch * so_b + head * so_h + o_q[:, None] * so_n + o_e[None, :]
    p_do_tile = p_do + batch * sg_b + head * sg_h + o_q[:, None] * sg_n + o_e[None, :]
    b_out = load_rows(p_out_tile, b_exist, o_e, E, EP, True).to(tl.float32)
    b_do = load_rows(p_do_tile, b_exist, o_e, E, EP, True).to(tl.float32)
    b_delta = tl.sum(b_out * b_do, 1)
    o_row = (batch * tl.num_programs(1) + head) * rows + o_q
    if LSE_GRAD:
        # The LSE of a row without a key is constant -inf, so its gradient is dropped.
        b_met = tl.load(p_lse + o_row, mask=b_exist, other=NO_KEY) != NO_KEY
        b_delta -= tl.load(p_dlse + batch * sl_b + head * sl_h + o_q * sl_n, mask=b_met, other=0.0)
    tl.store(p_delta + o_row, b_delta, mask=b_exist)


@triton.jit
def store_gradient(p_rows, p_sum, b_grad, b_exist, o_d, D: tl.constexpr, DP: tl.constexpr, SUM_OUT: tl.constexpr):
    """Write rows of a gradient, or with SUM_OUT of the float32 accumulator for later parts."""
    if SUM_OUT:
        store_rows(p_sum, b_grad, b_exist, o_d, D, DP)
    else:
        store_rows(p_rows, b_grad, b_exist, o_d, D, DP)


@triton.jit
def dq_tile(
    b_dq, b_low, b_high, b_q, b_do, b_lse, b_delta, p_k, p_v, p_masks, p_padding, p_key_positions, b_row, mask, whole,
    scale, cap_scale, bias, table, threshold, inverse_keep, o_i, o_j, k_first, left, o_step, o_d, o_e,
    BLOCK: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr,
    BOUNDED: tl.constexpr, BITS: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr, CONTAINED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of BN keys to the unscaled query gradient of BM rows; CONTAINED as in the forward.

    The gradient of a bias is added to `table` unless its first element is None. Tiles beyond an end of the table add
    theirs by row to `b_low` or `b_high`.
    """
    b_seen = o_step < left  # [BN]
    if PADDING:
        b_seen = b_seen & (tl.load(p_padding + k_first + o_step, mask=b_seen, other=1) == 0)
    HOLES: tl.constexpr = (MASKED and BOUNDED) or PADDING
    b_k = load_rows(p_k, b_seen, o_d, D, DP, HOLES)  # [BN, DP]
    b_v = load_rows(p_v, b_seen, o_e, E, EP, HOLES)  # [BN, EP]
    if bias[0] is not None:
        entry = end_entry(bias, k_first, o_step, b_seen, 1)
        b_bias = bias_of(bias, entry, k_first, o_step, b_seen, 1)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)  # [BM, BN]
    if cap_scale is not None:
        b_s, b_slope = tanh_and_slope(b_s * cap_scale)
    if bias[0] is not None:
        b_s = b_s * scale + b_bias
        scale = 1.0
    b_p = tl.math.exp2(b_s * scale - b_lse[:, None])
    if DROPOUT:
        b_key = tokens_of(p_key_positions, k_first + o_step, b_seen, POSITIONS)
        b_dp = tl.where(dropout_keep(b_row[:, None], b_key[None, :], threshold), b_dp * inverse_keep, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])
    b_db = b_ds
    if cap_scale is not None:
        b_ds *= b_slope
    # The mask is applied to dS, not to the weights: a weight of 0 does not remove a NaN of the values.
    if MASKED or PADDING:
        b_ok = visible(
            p_masks, mask, whole, b_seen[None, :], o_i[:, None], o_j[None, :],
            BLOCK, MASKED, HOLES, BITS, CONTAINED,
        )  # fmt: skip
        b_ds = tl.where(b_ok, b_ds, 0.0)
        if table[0] is not None:
            b_db = tl.where(b_ok & bias[6][:, None], b_db, 0.0)
    if table[0] is not None:
        b_sum = tl.sum(b_db, 1)
        b_low = tl.where(entry == 0, b_low + b_sum, b_low)
        b_high = tl.where(entry > 0, b_high + b_sum, b_high)
        if entry < 0:
            add_to_table(table, bias_index(bias, k_first + o_step, b_seen, 1), b_db)
    if CONTAINED:
        b_dq, b_k = contained(b_dq, b_k, b_ok, PRECISION)
    return tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION), b_low, b_high


@triton.jit(do_not_specialize=["items", "mask_shift", "q_tiles", "k_tiles", "slots", "threshold"])
def attention_dq_bwd_kernel(
    p_q, p_k, p_v, p_do, p_lse, p_delta, p_dq, p_sum, p_piece, p_work, p_heads, p_lists, p_masks, p_q_axis,
    p_k_axis, p_padding, p_seed, p_positions, scale, scale_log2, cap_scale, p_bias, p_places, p_key_places, bias_size,
    bias_columns, s_places, p_bias_sum, p_bias_bad, p_bias_unit, inverse_keep, threshold, items, mask_shift, slots,
    heads, group, q_tiles, k_tiles, q_length, k_length, q_rate, k_rate, sq_b, sq_h, sq_n, sk_b, sk_h, sv_b, sv_h, sg_b,
    sg_h, sg_n, sx_b, sx_h, sx_n,
    SK_N: tl.constexpr, SV_N: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAREFUL: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, STRIDED: tl.constexpr,
    PER_HEAD: tl.constexpr, BOUNDED: tl.constexpr, PARTIAL: tl.constexpr, BITS: tl.constexpr, PADDING: tl.constexpr,
    DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr, CONTAIN: tl.constexpr,
    SUM_IN: tl.constexpr, SUM_OUT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """dQ of BM query rows of one head. SUM_IN adds the float32 sum of earlier parts; SUM_OUT stores it for later.

    With a soft cap, `cap_scale` is the scale over the cap, and `scale_log2` the cap in log2 units.
    """
    item, o_i = rows_of_program(BLOCK, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, DP)
    o_e = tl.arange(0, EP)
    batch, head, item, q_offset, k_offset = owner_of_program(p_heads, item, items, PER_HEAD)
    tile, row, slot = work_of(p_work, item)
    if SPLIT:
        if tile < 0:
            return
    q_axis = p_q_axis, q_tiles, q_length, q_rate
    k_axis = p_k_axis, k_tiles, k_length, k_rate
    o_q, b_exist = tokens_of_tile(q_axis, tile, q_offset, o_i, BLOCK, STRIDED)
    o_row = (batch * heads + head) * q_length + o_q
    p_q_tile = p_q + batch * sq_b + head * sq_h + o_q[:, None] * sq_n + o_d[None, :]
    p_do_tile = p_do + batch * sg_b + head * sg_h + o_q[:, None] * sg_n + o_e[None, :]
    b_q = load_rows(p_q_tile, b_exist, o_d, D, DP, BOUNDED)  # [BM, DP]
    b_do = load_rows(p_do_tile, b_exist, o_e, E, EP, BOUNDED)  # [BM, EP]
    b_lse = reference_of(tl.load(p_lse + o_row, mask=b_exist, other=NO_KEY))
    b_delta = tl.load(p_delta + o_row, mask=b_exist, other=0.0)
    o_step = o_n * k_rate  # [BN] int32
    o_k_tile = o_step.to(tl.int64)[:, None] * SK_N + o_d[None, :]  # [BN, DP]
    o_v_tile = o_step.to(tl.int64)[:, None] * SV_N + o_e[None, :]  # [BN, EP]
    p_k += batch * sk_b + (head // group) * sk_h
    p_v += batch * sv_b + (head // group) * sv_h
    if PADDING:
        p_padding += batch * k_length
    if p_bias is not None:
        p_bias += head * bias_size
        p_bias_sum += head * bias_size
        p_bias_bad += head * bias_size
    if p_key_places is not None:
        p_places += head * s_places
        own = range_of_places(p_places, bias_columns, o_q, b_exist)
        bias = p_bias, p_places, p_key_places + head * s_places, bias_size, bias_columns, o_q, b_exist, k_rate, own
    else:
        if p_places is not None:
            p_places += batch * s_places
        own = range_of_places(p_places, bias_columns, o_q, b_exist)
        bias = p_bias, p_places, p_places, bias_size, bias_columns, o_q, b_exist, k_rate, own
    table = p_bias_sum, p_bias_bad, p_bias_unit
    b_row, p_key_positions = names_in_dropout(
        p_seed, p_positions, batch, head, heads, o_q, b_exist, q_length, k_length, DROPOUT, POSITIONS
    )
    b_dq = tl.zeros([BM, DP], tl.float32)
    b_low = tl.zeros([BM], tl.float32)
    b_high = tl.zeros([BM], tl.float32)
    SUB_N: tl.constexpr = BLOCK // BN
    # Whole tiles, then partial ones.
    for MASKED in tl.static_range(2 if PARTIAL else 1):
        for j in range(row[3 * MASKED] * SUB_N, row[3 * MASKED + 1] * SUB_N):
            k_tile, mask = entry_at(p_lists, mask_shift, row, j // SUB_N, MASKED)
            k_first, k_end, o_sub = streamed(k_axis, k_tile, k_offset, j, BLOCK, BN, STRIDED)
            p_k_tile = p_k + k_first * SK_N + o_k_tile
            p_v_tile = p_v + k_first * SV_N + o_v_tile
            b_dq, b_low, b_high = dq_tile(
                b_dq, b_low, b_high, b_q, b_do, b_lse, b_delta, p_k_tile, p_v_tile, p_masks, p_padding, p_key_positions,
                b_row, mask, False, scale_log2, cap_scale, bias, table, threshold, inverse_keep, o_i, o_sub + o_n,
                k_first, rows_left(k_first, k_end), o_step, o_d, o_e,
                BLOCK, D, E, DP, EP, MASKED, BOUNDED, BITS, PADDING, DROPOUT, POSITIONS, PRECISION, False,
            )  # fmt: skip
    if CONTAIN:
        if spoilt(b_dq):
            # Some row is NaN, possibly through a weight of 0: recompute all rows with containment.
            b_redo = tl.zeros([BM, DP], tl.float32)
            o_c = tl.arange(0, CAREFUL)
            o_hop = o_c * k_rate  # [CAREFUL] int32
            SUB: tl.constexpr = BLOCK // CAREFUL
            for c in tl.range(0, (row[1] - row[0] + row[4] - row[3]) * SUB, num_stages=1):
                c_tile, c_mask, whole = careful_entry(p_lists, mask_shift, row, c // SUB)
                c_first, c_end, o_part = streamed(k_axis, c_tile, k_offset, c, BLOCK, CAREFUL, STRIDED)
                p_k_part = p_k + (c_first + o_hop)[:, None] * SK_N + o_d[None, :]
                p_v_part = p_v + (c_first + o_hop)[:, None] * SV_N + o_e[None, :]
                b_redo, _, _ = dq_tile(
                    b_redo, b_low, b_high, b_q, b_do, b_lse, b_delta, p_k_part, p_v_part, p_masks, p_padding,
                    p_key_positions, b_row, c_mask, whole, scale_log2, cap_scale, bias, (None, None, None),
                    threshold, inverse_keep, o_i, o_part + o_c, c_first, rows_left(c_first, c_end), o_hop, o_d, o_e,
                    BLOCK, D, E, DP, EP, True, BOUNDED, BITS, PADDING, DROPOUT, POSITIONS, PRECISION, True,
                )  # fmt: skip
            b_dq = b_redo
    if p_bias_sum is not None:
        if bias_columns is None:
            add_to_ends(table, bias_size, b_low, b_high)
    b_dq *= scale
    if SPLIT:
        if slot >= 0:
            o_piece = piece_rows(batch, slots, slot, o_i, BLOCK)
            store_rows(p_piece + o_piece[:, None] * D + o_d[None, :], b_dq, o_i >= 0, o_d, D, DP)
            return
    p_sum_tile = p_sum + o_row[:, None] * D + o_d[None, :]
    if SUM_IN:
        b_dq += load_rows(p_sum_tile, b_exist, o_d, D, DP, True)
    p_dq_tile = p_dq + batch * sx_b + head * sx_h + o_q[:, None] * sx_n + o_d[None, :]
    store_gradient(p_dq_tile, p_sum_tile, b_dq, b_exist, o_d, D, DP, SUM_OUT)


@triton.jit
def dkv_step(
    b_dk, b_dv, b_k, b_v, b_q, b_do, b_lse, b_delta, elements, b_row, b_key, scale, threshold, inverse_keep,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, HOLES: tl.constexpr, BITS: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, CONTAINED: tl.constexpr, cap_scale=None, bias=None, tokens=None,
    BIASED: tl.constexpr = False,
):  # fmt: skip
    """Add the contribution of BM queries to the gradients of BN keys and values; also returns dS, [BN, BM].

    The gradients of keys and scores are unscaled. `b_lse` is from `reference_of`; `elements`, `cap_scale`,
    `bias` and `tokens` (of the queries) as in the forward.
    """
    if BIASED:
        first, o_step, b_exist = tokens
        entry = end_entry(bias, first, o_step, b_exist, -1)
        b_bias = bias_of(bias, entry, first, o_step, b_exist, -1)
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BN, BM]
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)  # [BN, BM]
    if cap_scale is not None:
        b_s, b_slope = tanh_and_slope(b_s * cap_scale)
    if BIASED:
        b_s = b_s * scale + b_bias
        scale = 1.0
    b_p = tl.math.exp2(b_s * scale - b_lse[None, :])
    if MASKED or HOLES:
        b_ok = visible(*elements, BLOCK, MASKED, HOLES, BITS, CONTAINED)
        b_p = tl.where(b_ok, b_p, 0.0)
    if DROPOUT:
        b_keep = dropout_keep(b_row[None, :], b_key[:, None], threshold)
        b_weight = tl.where(b_keep, b_p * inverse_keep, 0.0)
        b_dp = tl.where(b_keep, b_dp * inverse_keep, 0.0)
    else:
        b_weight = b_p
    b_ds = b_p * (b_dp - b_delta[None, :])
    if cap_scale is not None:
        b_ds *= b_slope
    if MASKED or HOLES:
        # A weight of 0 does not remove a NaN of the row's delta.
        b_ds = tl.where(b_ok, b_ds, 0.0)
    if CONTAINED:
        b_dv, b_do = contained(b_dv, b_do, b_ok, PRECISION)
        b_dk, b_q = contained(b_dk, b_q, b_ok, PRECISION)
    b_dv = tl.dot(b_weight.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
    b_ds = b_ds.to(b_q.dtype)
    b_dk = tl.dot(b_ds, b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_dv, b_ds


@triton.jit
def dkv_tile(
    b_dk, b_dv, b_k, b_v, p_q, p_do, p_lse, p_delta, p_masks, p_seed, p_positions, b_key, row,
    mask, whole, scale, cap_scale, bias, threshold, inverse_keep, o_i, o_j, q_first, left, o_step, o_d, o_e,
    BLOCK: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr,
    BOUNDED: tl.constexpr, BITS: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr, CONTAINED: tl.constexpr,
):  # fmt: skip
    """Load BM queries and apply `dkv_step`."""
    HOLES: tl.constexpr = MASKED and BOUNDED
    b_seen = o_step < left  # [BM]
    if HOLES:
        b_lse = tl.load(p_lse + q_first + o_step, mask=b_seen, other=NO_KEY)
        b_delta = tl.load(p_delta + q_first + o_step, mask=b_seen, other=0.0)
    else:
        b_lse = tl.load(p_lse + q_first + o_step)
        b_delta = tl.load(p_delta + q_first + o_step)
    b_lse = reference_of(b_lse)
    b_q = load_rows(p_q, b_seen, o_d, D, DP, HOLES)  # [BM, DP]
    b_do = load_rows(p_do, b_seen, o_e, E, EP, HOLES)  # [BM, EP]
    elements = p_masks, mask, whole, b_seen[None, :], o_i[None, :], o_j[:, None]
    b_row = q_first + o_step
    if DROPOUT:
        b_row = dropout_rows(p_seed, row, tokens_of(p_positions, b_row, b_seen, POSITIONS))
    b_dk, b_dv, _ = dkv_step(
        b_dk, b_dv, b_k, b_v, b_q, b_do, b_lse, b_delta, elements, b_row, b_key, scale, threshold, inverse_keep,
        BLOCK, MASKED, HOLES, BITS, DROPOUT, PRECISION, CONTAINED, cap_scale, bias,
        (q_first, o_step, b_seen), bias[0] is not None,
    )  # fmt: skip
    return b_dk, b_dv


@triton.jit(do_not_specialize=["items", "mask_shift", "q_tiles", "k_tiles", "slots", "threshold"])
def attention_dkv_bwd_kernel(
    p_q, p_k, p_v, p_do, p_lse, p_delta, p_dk, p_dv, p_sum_k, p_sum_v, p_piece_k, p_piece_v, p_work, p_owners,
    p_heads, p_rows, p_lists, p_masks, p_q_axis, p_k_axis, p_padding, p_seed, p_positions, scale, scale_log2, cap_scale,
    p_bias, p_places, p_key_places, bias_size, bias_columns, s_places, inverse_keep, threshold, items, mask_shift,
    slots, heads, group, q_tiles, k_tiles, q_length, k_length, q_rate, k_rate, sq_b, sq_h, sk_b, sk_h, sk_n, sv_b, sv_h,
    sv_n, sg_b, sg_h, sx_b, sx_h, sx_n, sy_b, sy_h, sy_n,
    SQ_N: tl.constexpr, SG_N: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAREFUL: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, GROUP: tl.constexpr,
    STRIDED: tl.constexpr, PER_HEAD: tl.constexpr, MIXED: tl.constexpr, BOUNDED: tl.constexpr, PARTIAL: tl.constexpr,
    BITS: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
    CONTAIN: tl.constexpr, SUM_IN: tl.constexpr, SUM_OUT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """dK and dV of BN key rows of one key head, summed over the query heads that read it.

    An owner is a key head and the residue of its rows. MIXED: the query heads of a group do not share one list and one
    residue, so each looks up its own row, and heads on another residue belong to another owner.
    """
    item, o_j = rows_of_program(BLOCK, BN)
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, DP)
    o_e = tl.arange(0, EP)
    batch, key_head, item, k_offset, _ = owner_of_program(p_owners, item, items, PER_HEAD)
    tile, row, slot = work_of(p_work, item)
    if SPLIT:
        if tile < 0:
            return

    q_axis = p_q_axis, q_tiles, q_length, q_rate
    k_axis = p_k_axis, k_tiles, k_length, k_rate
    o_key, b_exist = tokens_of_tile(k_axis, tile, k_offset, o_j, BLOCK, STRIDED)
    p_k_tile = p_k + batch * sk_b + key_head * sk_h + o_key[:, None] * sk_n + o_d[None, :]
    p_v_tile = p_v + batch * sv_b + key_head * sv_h + o_key[:, None] * sv_n + o_e[None, :]
    b_k = load_rows(p_k_tile, b_exist, o_d, D, DP, BOUNDED)  # [BN, DP]
    b_v = load_rows(p_v_tile, b_exist, o_e, E, EP, BOUNDED)  # [BN, EP]
    b_dk = tl.zeros([BN, DP], tl.float32)
    b_dv = tl.zeros([BN, EP], tl.float32)
    o_step = o_m * q_rate  # [BM] int32
    o_q_tile = o_step.to(tl.int64)[:, None] * SQ_N + o_d[None, :]  # [BM, DP]
    o_do_tile = o_step.to(tl.int64)[:, None] * SG_N + o_e[None, :]  # [BM, EP]

    if p_places is not None and p_key_places is None:
        p_places += batch * s_places
    # Places by head are assigned in loops below, which keep the type of the first value.
    own = range_of_places(p_places if p_key_places is None else p_key_places, bias_columns, o_key, b_exist)
    SUB_M: tl.constexpr = BLOCK // BM
    for member in range(GROUP):
        head = key_head * GROUP + member
        own_row, q_offset = row_of_member(p_heads, p_rows, head, row, k_offset, k_tiles, tile, PER_HEAD, MIXED)
        stream = batch * heads + head
        p_q_head = p_q + batch * sq_b + head * sq_h
        p_do_head = p_do + batch * sg_b + head * sg_h
        p_row_lse = p_lse + stream * q_length
        p_row_delta = p_delta + stream * q_length
        p_tokens = p_positions + head * q_length
        bias = p_bias, p_places, p_places, bias_size, bias_columns, o_key, b_exist, q_rate, own
        if p_key_places is not None:
            p_own, p_others = p_key_places + head * s_places, p_places + head * s_places
            own = range_of_places(p_own, bias_columns, o_key, b_exist)
            bias = p_bias + head * bias_size, p_own, p_others, bias_size, bias_columns, o_key, b_exist, q_rate, own
        elif p_bias is not None:
            bias = p_bias + head * bias_size, p_places, p_places, bias_size, bias_columns, o_key, b_exist, q_rate, own
        b_key = tokens_of(p_positions + (heads + head) * k_length, o_key, b_exist, POSITIONS)
        # Whole tiles, then partial ones.
        for MASKED in tl.static_range(2 if PARTIAL else 1):
            for j in range(own_row[3 * MASKED] * SUB_M, own_row[3 * MASKED + 1] * SUB_M):
                q_tile, mask = entry_at(p_lists, mask_shift, own_row, j // SUB_M, MASKED)
                q_first, q_end, o_sub = streamed(q_axis, q_tile, q_offset, j, BLOCK, BM, STRIDED)
                p_q_tile = p_q_head + q_first * SQ_N + o_q_tile
                p_do_tile = p_do_head + q_first * SG_N + o_do_tile
                b_dk, b_dv = dkv_tile(
                    b_dk, b_dv, b_k, b_v, p_q_tile, p_do_tile, p_row_lse, p_row_delta, p_masks, p_seed, p_tokens,
                    b_key, stream, mask, False, scale_log2, cap_scale, bias, threshold, inverse_keep, o_sub + o_m, o_j,
                    q_first, rows_left(q_first, q_end), o_step, o_d, o_e,
                    BLOCK, D, E, DP, EP, MASKED, BOUNDED, BITS, DROPOUT, POSITIONS, PRECISION, False,
                )  # fmt: skip

    b_shown = b_exist
    if PADDING:
        # The gradient of a padded key is 0 regardless of its sums, so the loops ignore the padding.
        b_shown = tl.load(p_padding + batch * k_length + o_key, mask=b_exist, other=1) == 0
        b_dk = tl.where(b_shown[:, None], b_dk, 0.0)
        b_dv = tl.where(b_shown[:, None], b_dv, 0.0)
    if CONTAIN:
        if spoilt(b_dk) | spoilt(b_dv):
            # Some key is NaN, possibly through a weight of 0: recompute all keys with containment.
            b_redo_k = tl.zeros([BN, DP], tl.float32)
            b_redo_v = tl.zeros([BN, EP], tl.float32)
            o_c = tl.arange(0, CAREFUL)
            o_hop = o_c * q_rate  # [CAREFUL] int32
            SUB: tl.constexpr = BLOCK // CAREFUL
            for other in range(GROUP):
                c_head = key_head * GROUP + other
                c_row, c_offset = row_of_member(p_heads, p_rows, c_head, row, k_offset, k_tiles, tile, PER_HEAD, MIXED)
                c_key = tokens_of(p_positions + (heads + c_head) * k_length, o_key, b_exist, POSITIONS)
                c_stream = batch * heads + c_head
                c_bias = p_bias, p_places, p_places, bias_size, bias_columns, o_key, b_exist, q_rate, own
                if p_key_places is not None:
                    p_own, p_others = p_key_places + c_head * s_places, p_places + c_head * s_places
                    own = range_of_places(p_own, bias_columns, o_key, b_exist)
                    p_row = p_bias + c_head * bias_size
                    c_bias = p_row, p_own, p_others, bias_size, bias_columns, o_key, b_exist, q_rate, own
                elif p_bias is not None:
                    p_row = p_bias + c_head * bias_size
                    c_bias = p_row, p_places, p_places, bias_size, bias_columns, o_key, b_exist, q_rate, own
                for c in tl.range(0, (c_row[1] - c_row[0] + c_row[4] - c_row[3]) * SUB, num_stages=1):
                    c_tile, c_mask, whole = careful_entry(p_lists, mask_shift, c_row, c // SUB)
                    c_first, c_end, o_part = streamed(q_axis, c_tile, c_offset, c, BLOCK, CAREFUL, STRIDED)
                    p_q_part = p_q + batch * sq_b + c_head * sq_h + (c_first + o_hop)[:, None] * SQ_N + o_d[None, :]
                    p_do_part = p_do + batch * sg_b + c_head * sg_h + (c_first + o_hop)[:, None] * SG_N + o_e[None, :]
                    b_redo_k, b_redo_v = dkv_tile(
                        b_redo_k, b_redo_v, b_k, b_v, p_q_part, p_do_part,
                        p_lse + c_stream * q_length, p_delta + c_stream * q_length, p_masks, p_seed,
                        p_positions + c_head * q_length, c_key, c_stream, c_mask, whole, scale_log2, cap_scale,
                        c_bias, threshold, inverse_keep, o_part + o_c, o_j, c_first, rows_left(c_first, c_end), o_hop,
                        o_d, o_e,
                        BLOCK, D, E, DP, EP, True, BOUNDED, BITS, DROPOUT, POSITIONS, PRECISION, True,
                    )  # fmt: skip
            b_dk = tl.where(b_shown[:, None], b_redo_k, 0.0)
            b_dv = tl.where(b_shown[:, None], b_redo_v, 0.0)
    b_dk *= scale
    if SPLIT:
        if slot >= 0:
            o_piece = piece_rows(batch, slots, slot, o_j, BLOCK)
            store_rows(p_piece_k + o_piece[:, None] * D + o_d[None, :], b_dk, o_j >= 0, o_d, D, DP)
            store_rows(p_piece_v + o_piece[:, None] * E + o_e[None, :], b_dv, o_j >= 0, o_e, E, EP)
            return
    o_row = (batch * (heads // GROUP) + key_head) * k_length + o_key
    p_sum_k_tile = p_sum_k + o_row[:, None] * D + o_d[None, :]
    p_sum_v_tile = p_sum_v + o_row[:, None] * E + o_e[None, :]
    if SUM_IN:
        b_dk += load_rows(p_sum_k_tile, b_exist, o_d, D, DP, True)
        b_dv += load_rows(p_sum_v_tile, b_exist, o_e, E, EP, True)
    p_dk_tile = p_dk + batch * sx_b + key_head * sx_h + o_key[:, None] * sx_n + o_d[None, :]
    p_dv_tile = p_dv + batch * sy_b + key_head * sy_h + o_key[:, None] * sy_n + o_e[None, :]
    store_gradient(p_dk_tile, p_sum_k_tile, b_dk, b_exist, o_d, D, DP, SUM_OUT)
    store_gradient(p_dv_tile, p_sum_v_tile, b_dv, b_exist, o_e, E, EP, SUM_OUT)


@triton.jit(do_not_specialize=["heavy", "slots", "tiles"])
def sum_pieces_bwd_kernel(
    p_grad, p_sum, p_piece, p_heavy, p_owners, p_axis, heavy, slots, heads, tiles, length, rate, sx_b, sx_h, sx_n,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STRIDED: tl.constexpr,
    PER_HEAD: tl.constexpr, SUM_IN: tl.constexpr, SUM_OUT: tl.constexpr,
):  # fmt: skip
    """Sum the pieces of rows that a backward kernel split."""
    entry, o_i = rows_of_program(BLOCK, ROWS)
    o_d = tl.arange(0, DP)
    batch, head, entry, offset, _ = owner_of_program(p_owners, entry, heavy, PER_HEAD)
    tile = tl.load(p_heavy + entry * 4)
    first_slot = tl.load(p_heavy + entry * 4 + 1)
    pieces = tl.load(p_heavy + entry * 4 + 2)
    if tile < 0:
        return
    o_token, b_exist = tokens_of_tile((p_axis, tiles, length, rate), tile, offset, o_i, BLOCK, STRIDED)
    p_sum_tile = p_sum + ((batch * heads + head) * length + o_token)[:, None] * D + o_d[None, :]
    b_grad = tl.zeros([ROWS, DP], tl.float32)
    if SUM_IN:
        b_grad = load_rows(p_sum_tile, b_exist, o_d, D, DP, True)
    o_first = piece_rows(batch, slots, first_slot, o_i, BLOCK)
    for piece in range(pieces):
        p_one = p_piece + (o_first + piece * BLOCK)[:, None] * D + o_d[None, :]
        b_grad += load_rows(p_one, b_exist, o_d, D, DP, True)
    p_grad_tile = p_grad + batch * sx_b + head * sx_h + o_token[:, None] * sx_n + o_d[None, :]
    store_gradient(p_grad_tile, p_sum_tile, b_grad, b_exist, o_d, D, DP, SUM_OUT)
