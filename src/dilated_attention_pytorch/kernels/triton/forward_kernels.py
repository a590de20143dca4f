"""Forward kernels by query row: an online softmax over whole tiles, then over partial tiles."""

# A condition on a compile-time constant must stand alone: joined to a value it would be decided at run time.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import (
    LN2,
    LOG2E,
    NO_KEY,
    averaged,
    bias_of,
    careful_entry,
    contained,
    dropout_keep,
    empty_softmax,
    end_entry,
    entry_at,
    load_rows,
    names_in_dropout,
    owner_of_program,
    piece_rows,
    range_of_places,
    rows_left,
    rows_of_program,
    sink_share,
    spoilt,
    store_rows,
    streamed,
    tanh_and_slope,
    tokens_of,
    tokens_of_tile,
    visible,
    work_of,
)


@triton.jit
def softmax_step(
    b_acc, b_l, b_m, b_q, b_k, b_v, elements, b_row, b_key, scale, threshold, inverse_keep,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, MASKED: tl.constexpr, HOLES: tl.constexpr, BITS: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, CONTAINED: tl.constexpr, cap_scale=None, bias=None, tokens=None,
    BIASED: tl.constexpr = False,
):  # fmt: skip
    """Update the online softmax (b_m, b_l, b_acc) of BM rows with BN keys; the state is empty if FIRST.

    b_m and `scale` are in log2 units; `elements` are arguments of `visible`. CONTAINED keeps non-finite values out of
    rows that may not see them. Scores are `scale * q k`, or `scale * tanh(cap_scale * q k)` unless `cap_scale` is None,
    plus the bias unless it is None; `tokens` are arguments of `bias_of` for the keys.
    """
    if BIASED:
        first, o_step, b_exist = tokens
        entry = end_entry(bias, first, o_step, b_exist, 1)
        b_bias = bias_of(bias, entry, first, o_step, b_exist, 1)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
    if cap_scale is not None:
        b_s, _ = tanh_and_slope(b_s * cap_scale)
    if BIASED:
        b_s = b_s * scale + b_bias
        scale = 1.0
    if MASKED or HOLES:
        b_ok = visible(*elements, BLOCK, MASKED, HOLES, BITS, CONTAINED)
        b_s = tl.where(b_ok, b_s, NO_KEY)
    # The scale is positive, so it commutes with the maximum and joins the subtraction below in one multiply-add.
    b_top = tl.max(b_s, 1) * scale
    if not FIRST:
        b_top = tl.maximum(b_m, b_top)
    b_ref = b_top
    if MASKED or HOLES:
        # exp2(-inf - -inf) is NaN: a row without a key so far uses 0 as its reference, so that its weights are 0.
        b_ref = tl.where(b_top == NO_KEY, 0.0, b_top)
    if BIASED:  # Its entries of -inf mask keys of whole tiles, too.
        b_ref = tl.where(b_top == NO_KEY, 0.0, b_top)
    b_p = tl.math.exp2(b_s * scale - b_ref[:, None])
    if FIRST:
        b_l = tl.sum(b_p, 1)
    else:
        b_shrink = tl.math.exp2(b_m - b_ref)
        b_l = b_l * b_shrink + tl.sum(b_p, 1)
        b_acc = b_acc * b_shrink[:, None]
    if DROPOUT:
        b_p = tl.where(dropout_keep(b_row[:, None], b_key[None, :], threshold), b_p * inverse_keep, 0.0)
    if CONTAINED:
        b_acc, b_v = contained(b_acc, b_v, b_ok, PRECISION)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_l, b_top


@triton.jit
def forward_tile(
    b_acc, b_l, b_m, b_q, p_k, p_v, p_masks, p_padding, p_key_positions, b_row, mask, whole, scale, cap_scale,
    bias, threshold, inverse_keep, o_i, o_j, k_first, left, o_step, o_d, o_e,
    BLOCK: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr,
    BOUNDED: tl.constexpr, BITS: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr, CONTAINED: tl.constexpr,
):  # fmt: skip
    """Load BN keys and values and apply `softmax_step`; with CONTAINED, `whole` marks a tile without a mask."""
    b_seen = o_step < left  # [BN]
    b_k = load_rows(p_k, b_seen, o_d, D, DP, MASKED and BOUNDED)  # [BN, DP]
    if PADDING:
        b_seen = b_seen & (tl.load(p_padding + k_first + o_step, mask=b_seen, other=1) == 0)
    # An excluded key may hold inf or NaN, and 0 * NaN would reach the output.
    b_v = load_rows(p_v, b_seen, o_e, E, EP, (MASKED and BOUNDED) or PADDING)  # [BN, EP]
    elements = p_masks, mask, whole, b_seen[None, :], o_i[:, None], o_j[None, :]
    b_key = k_first + o_step
    if DROPOUT:
        b_key = tokens_of(p_key_positions, b_key, b_seen, POSITIONS)
    return softmax_step(
        b_acc, b_l, b_m, b_q, b_k, b_v, elements, b_row, b_key, scale, threshold, inverse_keep,
        BLOCK, False, MASKED, (MASKED and BOUNDED) or PADDING, BITS, DROPOUT, PRECISION, CONTAINED, cap_scale, bias,
        (k_first, o_step, b_seen), bias[0] is not None,
    )  # fmt: skip


@triton.jit
def carried_softmax(
    p_lse, p_carry, o_row, b_exist, slot, o_e,
    BM: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, CARRY_IN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Initial softmax state (b_acc, b_l, b_m) of rows."""
    b_m, b_l, b_acc = empty_softmax(BM, EP)
    if CARRY_IN:
        b_past = tl.load(p_lse + o_row, mask=b_exist, other=NO_KEY)
        if SPLIT:
            # The kernel that joins the pieces adds the state of earlier parts.
            b_past = tl.where(slot < 0, b_past, NO_KEY)
        b_met = b_past != NO_KEY
        b_m = b_past * LOG2E
        b_l = tl.where(b_met, 1.0, 0.0)
        # Rows without a key in earlier parts were never written to the carry.
        b_acc = load_rows(p_carry + o_row[:, None] * E + o_e[None, :], b_met, o_e, E, EP, True)
    return b_acc, b_l, b_m


@triton.jit
def store_softmax(
    p_rows, p_lse, p_carry, p_piece_out, p_piece_lse, b_acc, b_lse, o_row, o_piece, b_exist, slot, o_e,
    E: tl.constexpr, EP: tl.constexpr, CARRY_OUT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write finished rows to their piece, to the carry, or to the output."""
    b_own = b_exist
    if SPLIT:
        b_piece = o_piece - o_piece + slot >= 0
        tl.store(p_piece_lse + o_piece, b_lse, mask=b_piece)
        store_rows(p_piece_out + o_piece[:, None] * E + o_e[None, :], b_acc, b_piece, o_e, E, EP)
        b_own = b_exist & (b_piece == 0)
    tl.store(p_lse + o_row, b_lse, mask=b_own)
    if CARRY_OUT:
        store_rows(p_carry + o_row[:, None] * E + o_e[None, :], b_acc, b_own, o_e, E, EP)
    else:
        store_rows(p_rows, b_acc, b_own, o_e, E, EP)


@triton.jit(do_not_specialize=["items", "mask_shift", "q_tiles", "k_tiles", "slots", "threshold"])
def attention_fwd_kernel(
    p_q, p_k, p_v, p_out, p_lse, p_carry, p_piece_out, p_piece_lse, p_sink, p_work, p_heads, p_lists, p_masks, p_q_axis,
    p_k_axis, p_padding, p_seed, p_positions, scale, cap_scale, p_bias, p_places, p_key_places, bias_size, bias_columns,
    s_places, inverse_keep, threshold, items, mask_shift, slots, heads, group, q_tiles, k_tiles, q_length, k_length,
    q_rate, k_rate, sq_b, sq_h, sq_n, sk_b, sk_h, sv_b, sv_h, so_b, so_h, so_n,
    SK_N: tl.constexpr, SV_N: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, CAREFUL: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    STRIDED: tl.constexpr, PER_HEAD: tl.constexpr, BOUNDED: tl.constexpr, PARTIAL: tl.constexpr, BITS: tl.constexpr,
    PADDING: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
    CONTAIN: tl.constexpr, CARRY_IN: tl.constexpr, CARRY_OUT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Output and LSE of BM query rows of one head.

    CARRY_IN starts from the softmax of earlier parts; CARRY_OUT stores it in float32 for later parts.
    SPLIT: some items are pieces of a long row, which `merge_pieces_kernel` joins.
    CONTAIN keeps a NaN of a value out of rows that may not see it.
    SIGN is the sign of the scale and `scale` its magnitude; if SIGN is 0, `scale` is any positive number.
    With a soft cap, `cap_scale` is the magnitude of the scale over the cap, and `scale` the cap.
    `p_sink` has a logit of each head, None without sinks; rows that are carried on are without it.
    The bias is described in `bias_index`; `s_places` is the stride of its positions by sample, or with `p_key_places`
    by query head.
    """
    item, o_i = rows_of_program(BLOCK, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, DP)
    o_e = tl.arange(0, EP)
    batch, head, item, q_offset, k_offset = owner_of_program(p_heads, item, items, PER_HEAD)
    tile, row, slot = work_of(p_work, item)
    if SPLIT:
        # Head classes with fewer items than the longest are padded with items of tile -1.
        if tile < 0:
            return

    q_axis = p_q_axis, q_tiles, q_length, q_rate
    k_axis = p_k_axis, k_tiles, k_length, k_rate
    o_q, b_exist = tokens_of_tile(q_axis, tile, q_offset, o_i, BLOCK, STRIDED)
    p_q_tile = p_q + batch * sq_b + head * sq_h + o_q[:, None] * sq_n + o_d[None, :]
    b_q = load_rows(p_q_tile, b_exist, o_d, D, DP, BOUNDED)  # [BM, DP]
    if SIGN != 1:
        b_q = (b_q * SIGN).to(b_q.dtype)

    o_row = (batch * heads + head) * q_length + o_q
    o_step = o_n * k_rate  # [BN] int32
    o_k_tile = o_step.to(tl.int64)[:, None] * SK_N + o_d[None, :]  # [BN, DP]
    o_v_tile = o_step.to(tl.int64)[:, None] * SV_N + o_e[None, :]  # [BN, EP]
    p_k += batch * sk_b + (head // group) * sk_h
    p_v += batch * sv_b + (head // group) * sv_h
    if PADDING:
        p_padding += batch * k_length
    if p_bias is not None:
        p_bias += head * bias_size
    # Triton 3.6 has no functions that return None.
    if p_key_places is not None:
        p_places += head * s_places
        own = range_of_places(p_places, bias_columns, o_q, b_exist)
        bias = p_bias, p_places, p_key_places + head * s_places, bias_size, bias_columns, o_q, b_exist, k_rate, own
    else:
        if p_places is not None:
            p_places += batch * s_places
        own = range_of_places(p_places, bias_columns, o_q, b_exist)
        bias = p_bias, p_places, p_places, bias_size, bias_columns, o_q, b_exist, k_rate, own
    b_row, p_key_positions = names_in_dropout(
        p_seed, p_positions, batch, head, heads, o_q, b_exist, q_length, k_length, DROPOUT, POSITIONS
    )

    b_acc, b_l, b_m = carried_softmax(p_lse, p_carry, o_row, b_exist, slot, o_e, BM, E, EP, CARRY_IN, SPLIT)
    SUB_N: tl.constexpr = BLOCK // BN
    # Whole tiles, then partial ones.
    for MASKED in tl.static_range(2 if PARTIAL else 1):
        for j in range(row[3 * MASKED] * SUB_N, row[3 * MASKED + 1] * SUB_N):
            k_tile, mask = entry_at(p_lists, mask_shift, row, j // SUB_N, MASKED)
            k_first, k_end, o_sub = streamed(k_axis, k_tile, k_offset, j, BLOCK, BN, STRIDED)
            p_k_tile = p_k + k_first * SK_N + o_k_tile
            p_v_tile = p_v + k_first * SV_N + o_v_tile
            b_acc, b_l, b_m = forward_tile(
                b_acc, b_l, b_m, b_q, p_k_tile, p_v_tile, p_masks, p_padding, p_key_positions, b_row, mask, False,
                scale, cap_scale, bias, threshold, inverse_keep, o_i, o_sub + o_n, k_first, rows_left(k_first, k_end),
                o_step, o_d, o_e,
                BLOCK, D, E, DP, EP, MASKED, BOUNDED, BITS, PADDING, DROPOUT, POSITIONS, PRECISION, False,
            )  # fmt: skip

    b_acc = averaged(b_acc, b_l)
    b_lse = (b_m + tl.math.log2(b_l)) * LN2
    o_piece = piece_rows(batch, slots, slot, o_i, BLOCK)
    p_rows = p_out + batch * so_b + head * so_h + o_q[:, None] * so_n + o_e[None, :]
    if CONTAIN:
        if spoilt(b_acc):
            # Some row is NaN, possibly through a weight of 0: recompute all rows with containment.
            b_redo, b_sum, b_top = carried_softmax(
                p_lse, p_carry, o_row, b_exist, slot, o_e, BM, E, EP, CARRY_IN, SPLIT
            )
            o_c = tl.arange(0, CAREFUL)
            o_hop = o_c * k_rate  # [CAREFUL] int32
            SUB: tl.constexpr = BLOCK // CAREFUL
            for c in tl.range(0, (row[1] - row[0] + row[4] - row[3]) * SUB, num_stages=1):
                c_tile, c_mask, whole = careful_entry(p_lists, mask_shift, row, c // SUB)
                c_first, c_end, o_part = streamed(k_axis, c_tile, k_offset, c, BLOCK, CAREFUL, STRIDED)
                p_k_part = p_k + (c_first + o_hop)[:, None] * SK_N + o_d[None, :]
                p_v_part = p_v + (c_first + o_hop)[:, None] * SV_N + o_e[None, :]
                b_redo, b_sum, b_top = forward_tile(
                    b_redo, b_sum, b_top, b_q, p_k_part, p_v_part, p_masks, p_padding, p_key_positions, b_row,
                    c_mask, whole, scale, cap_scale, bias, threshold, inverse_keep, o_i, o_part + o_c, c_first,
                    rows_left(c_first, c_end), o_hop, o_d, o_e,
                    BLOCK, D, E, DP, EP, True, BOUNDED, BITS, PADDING, DROPOUT, POSITIONS, PRECISION, True,
                )  # fmt: skip
            b_acc = averaged(b_redo, b_sum)
    if p_sink is not None:
        b_share = sink_share(p_sink, head, b_lse)
        if SPLIT:
            # The kernel that joins the pieces adds the sink to their rows.
            b_share = tl.where(slot < 0, b_share, 1.0)
        b_acc *= b_share[:, None]
    store_softmax(
        p_rows, p_lse, p_carry, p_piece_out, p_piece_lse, b_acc, b_lse, o_row, o_piece, b_exist, slot, o_e,
        E, EP, CARRY_OUT, SPLIT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heavy", "slots", "q_tiles"])
def merge_pieces_kernel(
    p_out, p_lse, p_carry, p_piece_out, p_piece_lse, p_sink, p_heavy, p_heads, p_q_axis, heavy, slots, heads, q_tiles,
    q_length, q_rate, so_b, so_h, so_n,
    BLOCK: tl.constexpr, BM: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, STRIDED: tl.constexpr,
    PER_HEAD: tl.constexpr, CARRY_IN: tl.constexpr, CARRY_OUT: tl.constexpr,
):  # fmt: skip
    """Join the pieces of rows that `attention_fwd_kernel` split, in the order of their slots."""
    entry, o_i = rows_of_program(BLOCK, BM)
    o_e = tl.arange(0, EP)
    batch, head, entry, q_offset, _ = owner_of_program(p_heads, entry, heavy, PER_HEAD)
    tile = tl.load(p_heavy + entry * 4)
    first_slot = tl.load(p_heavy + entry * 4 + 1)
    pieces = tl.load(p_heavy + entry * 4 + 2)
    if tile < 0:
        return
    o_q, b_exist = tokens_of_tile((p_q_axis, q_tiles, q_length, q_rate), tile, q_offset, o_i, BLOCK, STRIDED)
    o_row = (batch * heads + head) * q_length + o_q
    b_m, b_l, b_acc = empty_softmax(BM, EP)
    if CARRY_IN:
        b_m = tl.load(p_lse + o_row, mask=b_exist, other=NO_KEY)
        b_l = tl.where(b_m != NO_KEY, 1.0, 0.0)
        b_acc = load_rows(p_carry + o_row[:, None] * E + o_e[None, :], b_m != NO_KEY, o_e, E, EP, True)
    o_first = piece_rows(batch, slots, first_slot, o_i, BLOCK)
    for piece in range(pieces):
        o_piece = o_first + piece * BLOCK
        b_lse = tl.load(p_piece_lse + o_piece)
        b_value = load_rows(p_piece_out + o_piece[:, None] * E + o_e[None, :], b_exist, o_e, E, EP, True)
        b_top = tl.maximum(b_m, b_lse)
        b_ref = tl.where(b_top == NO_KEY, 0.0, b_top)
        b_old = tl.math.exp2((b_m - b_ref) * LOG2E)
        b_gain = tl.math.exp2((b_lse - b_ref) * LOG2E)
        b_acc = b_acc * b_old[:, None] + b_value * b_gain[:, None]
        b_l = b_l * b_old + b_gain
        b_m = b_top
    b_acc = averaged(b_acc, b_l)
    b_lse = b_m + tl.math.log2(b_l) * LN2
    tl.store(p_lse + o_row, b_lse, mask=b_exist)
    if p_sink is not None:
        b_acc *= sink_share(p_sink, head, b_lse)[:, None]
    if CARRY_OUT:
        store_rows(p_carry + o_row[:, None] * E + o_e[None, :], b_acc, b_exist, o_e, E, EP)
    else:
        p_out_tile = p_out + batch * so_b + head * so_h + o_q[:, None] * so_n + o_e[None, :]
        store_rows(p_out_tile, b_acc, b_exist, o_e, E, EP)


@triton.jit(do_not_specialize=["rows"])
def carry_to_output_kernel(
    p_out, p_lse, p_carry, p_sink, rows, so_b, so_h, so_n,
    BM: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Convert the carried softmax to the output; rows that no part wrote are 0."""
    o_q = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_e = tl.arange(0, EP)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    o_row = (batch * tl.num_programs(1) + head) * rows + o_q
    b_exist = o_q < rows
    b_lse = tl.load(p_lse + o_row, mask=b_exist, other=NO_KEY)
    b_value = load_rows(p_carry + o_row[:, None] * E + o_e[None, :], b_lse != NO_KEY, o_e, E, EP, True)
    if p_sink is not None:
        b_value *= sink_share(p_sink, head, b_lse)[:, None]
    store_rows(p_out + batch * so_b + head * so_h + o_q[:, None] * so_n + o_e[None, :], b_value, b_exist, o_e, E, EP)
