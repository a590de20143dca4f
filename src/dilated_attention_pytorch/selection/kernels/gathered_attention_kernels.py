"""Attention of tokens on their listed blocks: an outer loop over key blocks gathers the queries that list them.

These kernels run after attention over the blocks that all tokens share, and add the listed blocks in place. Forward:
each tile of gathered queries reads one key block and writes its own softmax state; a second kernel merges the states of
a token in the order of its list. Backward: dK and dV are summed by key block over its query tiles, which write partial
dQ; a second kernel sums these by token. Queries are gathered by address, without a copy, and gradients are bitwise
reproducible, because there are no atomics.

Names as in `primitives`; `p_source`, `p_place`, `p_tile` and `p_first` are those of `types.GatherIndex`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton.backward_kernels import dkv_step
from ...kernels.triton.forward_kernels import softmax_step
from ...kernels.triton.primitives import (
    LN2,
    NO_KEY,
    averaged,
    dropout_rows,
    empty_softmax,
    load_rows,
    reference_of,
    store_rows,
)


@triton.jit
def load_sources(p_source, first, end, o_m):
    """Tokens of the gathered rows `first + o_m`, numbered over all samples; -1, the mark of filler, from `end` on."""
    return tl.load(p_source + first + o_m, mask=first + o_m < end, other=-1)


@triton.jit
def tokens_of_sources(b_source, sample, n):
    """Tokens of gathered rows within their sample, int64, and a mask of the rows that are not filler."""
    return b_source.to(tl.int64) - sample * n, b_source >= 0


@triton.jit
def key_exists(p_padding, sample, n, o_key, PADDING: tl.constexpr):
    """Mask of the keys that exist and are not padding."""
    b_valid = o_key < n
    if PADDING:
        b_valid = tl.load(p_padding + sample * n + o_key, mask=b_valid, other=1) == 0
    return b_valid


@triton.jit
def key_bounds(p_bounds, o_q, b_exist):
    """First key and end of the keys that each query may see; placeholders without bounds."""
    if p_bounds is None:
        return 0, 0
    else:
        b_low = tl.load(p_bounds + 2 * o_q, mask=b_exist, other=0)
        return b_low, tl.load(p_bounds + 2 * o_q + 1, mask=b_exist, other=0)


@triton.jit
def visible_arguments(p_bounds, b_valid, o_key, b_low, b_high):
    """Arguments of `visible` for keys that exist, and with bounds lie within those of each query; all broadcastable."""
    if p_bounds is not None:
        b_valid = b_valid & (o_key >= b_low) & (o_key < b_high)
    return b_valid, 0, False, b_valid, 0, 0


@triton.jit(do_not_specialize=["rows", "tiles", "run", "threshold", "first_head"])
def chosen_fwd_kernel(
    p_q, p_k, p_v, p_part, p_part_lse, p_source, p_tile, p_first, p_padding, p_seed, p_bounds, scale, inverse_keep,
    threshold, rows, tiles, run, n, blocks, samples, heads, first_head, group, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b,
    sv_h, sv_n,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, SIGN: tl.constexpr, RAGGED: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial output and LSE of the gathered queries of `run` query tiles, each on its one key block.

    Query tiles of the same key block are adjacent: the block is loaded once for all of them if it fits a program (BN =
    BLOCK). SIGN is the sign of the scale, as in the forward kernel of plans. `p_bounds` holds the first key and the end
    of the keys of each token, or is None.
    """
    SUB_M: tl.constexpr = BLOCK // BM
    HOLES: tl.constexpr = RAGGED or PADDING
    CUT: tl.constexpr = HOLES or p_bounds is not None
    head = tl.program_id(1).to(tl.int64)
    key_tiles = samples * blocks
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, DP)
    o_e = tl.arange(0, EP)
    p_tile += head * tiles
    p_first += head * (key_tiles + 1)
    p_source += head * rows
    at = (tl.program_id(0) * run).to(p_first.dtype.element_ty)
    end = tl.minimum(at + run, tiles)
    tile = tl.load(p_tile + at).to(tl.int64)
    while tile < key_tiles:
        stop = tl.minimum(tl.load(p_first + tile + 1), end)
        sample = tile // blocks
        o_key = (tile - sample * blocks) * BLOCK + o_n
        p_k_tile = p_k + sample * sk_b + (head // group) * sk_h + o_key[:, None] * sk_n + o_d[None, :]
        p_v_tile = p_v + sample * sv_b + (head // group) * sv_h + o_key[:, None] * sv_n + o_e[None, :]
        if BN == BLOCK:
            b_valid = key_exists(p_padding, sample, n, o_key, PADDING)
            b_k = load_rows(p_k_tile, b_valid, o_d, D, DP, HOLES)
            b_v = load_rows(p_v_tile, b_valid, o_e, E, EP, HOLES)
        b_next = load_sources(p_source, at * BLOCK, stop * BLOCK, o_m)
        for j in range(at * SUB_M, stop * SUB_M):
            o_q, b_exist = tokens_of_sources(b_next, sample, n)
            # Loaded one step ahead, so that the loads of the rows, which depend on it, can be pipelined.
            b_next = load_sources(p_source, (j + 1) * BM, stop * BLOCK, o_m)
            p_q_tile = p_q + sample * sq_b + head * sq_h + o_q[:, None] * sq_n + o_d[None, :]
            b_q = load_rows(p_q_tile, b_exist, o_d, D, DP, True)
            if SIGN != 1:
                b_q = (b_q * SIGN).to(b_q.dtype)
            b_row = o_q
            if DROPOUT:
                b_row = dropout_rows(p_seed, sample * heads + first_head + head, o_q)
            b_low, b_high = key_bounds(p_bounds, o_q[:, None], b_exist[:, None])
            b_m, b_l, b_acc = empty_softmax(BM, EP)
            if BN == BLOCK:
                elements = visible_arguments(p_bounds, b_valid[None, :], o_key[None, :], b_low, b_high)
                b_acc, b_l, b_m = softmax_step(
                    b_acc, b_l, b_m, b_q, b_k, b_v, elements, b_row, o_key, scale, threshold,
                    inverse_keep, BLOCK, True, False, CUT, False, DROPOUT, PRECISION, False,
                )  # fmt: skip
            else:
                for part in range(BLOCK // BN):
                    o_part = o_key + part * BN
                    b_seen = key_exists(p_padding, sample, n, o_part, PADDING)
                    b_k_part = load_rows(p_k_tile + part * BN * sk_n, b_seen, o_d, D, DP, HOLES)
                    b_v_part = load_rows(p_v_tile + part * BN * sv_n, b_seen, o_e, E, EP, HOLES)
                    elements = visible_arguments(p_bounds, b_seen[None, :], o_part[None, :], b_low, b_high)
                    b_acc, b_l, b_m = softmax_step(
                        b_acc, b_l, b_m, b_q, b_k_part, b_v_part, elements, b_row, o_part, scale,
                        threshold, inverse_keep, BLOCK, False, False, CUT, False, DROPOUT, PRECISION, False,
                    )  # fmt: skip
            o_row = head * rows + j * BM + o_m
            tl.store(p_part_lse + o_row, (b_m + tl.math.log2(b_l)) * LN2)
            store_rows(p_part + o_row[:, None] * E + o_e[None, :], averaged(b_acc, b_l), b_exist, o_e, E, EP)
        at = stop
        tile = tl.load(p_tile + at, mask=at < end, other=key_tiles).to(tl.int64)


@triton.jit
def most_entries_used(p_token, b_exist, rows, slots, BM: tl.constexpr):
    """Largest number of used list entries of BM tokens; unused entries are last."""
    b_used = tl.zeros([BM], tl.int32)
    for first in range(0, slots, 64):
        o_s = first + tl.arange(0, 64)
        b_mask = b_exist[:, None] & (o_s < slots)[None, :]
        b_used += tl.sum((tl.load(p_token[:, None] + o_s[None, :], mask=b_mask, other=rows) < rows).to(tl.int32), 1)
    return tl.max(b_used, 0)


@triton.jit(do_not_specialize=["rows", "n"])
def join_tokens_kernel(
    p_out, p_lse, p_part, p_part_lse, p_place, rows, n, slots, so_b, so_h, so_n, sl_b, sl_h, sl_n,
    BM: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Merge the partial outputs of BM tokens on their listed blocks into the output and LSE of the shared blocks.
    TOGETHER list entries are merged at a time."""
    o_q = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_e = tl.arange(0, EP)
    head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    b_exist = o_q < n
    o_token = head * (n * tl.num_programs(2)) + sample * n + o_q
    p_line = p_out + sample * so_b + head * so_h + o_q[:, None] * so_n + o_e[None, :]
    p_slot = p_lse + sample * sl_b + head * sl_h + o_q * sl_n
    b_m = tl.load(p_slot, mask=b_exist, other=NO_KEY)
    b_l = tl.where(b_m == NO_KEY, 0.0, 1.0)
    b_acc = load_rows(p_line, b_m != NO_KEY, o_e, E, EP, True).to(tl.float32)
    p_token = p_place + o_token * slots
    for first in range(0, most_entries_used(p_token, b_exist, rows, slots, BM), TOGETHER):
        # All loads are issued before the first use, because the rows are scattered in memory.
        b_lses = ()
        b_parts = ()
        b_top = b_m
        for slot in tl.static_range(TOGETHER):
            b_here = b_exist & (0 * o_q + first + slot < slots)
            b_place = tl.load(p_token + first + slot, mask=b_here, other=rows).to(tl.int64)
            o_row = head * rows + b_place
            b_lses += (tl.load(p_part_lse + o_row, mask=b_place < rows, other=NO_KEY),)
            b_parts += (load_rows(p_part + o_row[:, None] * E + o_e[None, :], b_place < rows, o_e, E, EP, True),)
            b_top = tl.maximum(b_top, b_lses[slot])
        b_ref = tl.where(b_top == NO_KEY, 0.0, b_top)
        b_old = tl.exp(b_m - b_ref)
        b_acc *= b_old[:, None]
        b_l *= b_old
        for slot in tl.static_range(TOGETHER):
            b_gain = tl.exp(b_lses[slot] - b_ref)
            b_acc += b_parts[slot].to(tl.float32) * b_gain[:, None]
            b_l += b_gain
        b_m = b_top
    b_acc = averaged(b_acc, b_l)
    tl.store(p_slot, b_m + tl.log(b_l), mask=b_exist)
    store_rows(p_line, b_acc, b_exist, o_e, E, EP)


@triton.jit(do_not_specialize=["rows", "n"])
def add_tokens_kernel(
    p_dq, p_part, p_place, scale, rows, n, slots, sx_b, sx_h, sx_n, BM: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TURNED: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add the partial dQ of BM tokens, in the order of their lists, to the dQ of the shared blocks. With TURNED the
    columns are permuted as `hopper.primitives.leave_piece` stores them."""
    o_q = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, DP)
    head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    b_exist = o_q < n
    o_token = head * (n * tl.num_programs(2)) + sample * n + o_q
    p_line = p_dq + sample * sx_b + head * sx_h + o_q[:, None] * sx_n + o_d[None, :]
    b_dq = load_rows(p_line, b_exist, o_d, D, DP, True)
    b_sum = tl.zeros([BM, DP], tl.float32)
    p_token = p_place + o_token * slots
    for first in range(0, most_entries_used(p_token, b_exist, rows, slots, BM), TOGETHER):
        b_parts = ()
        for slot in tl.static_range(TOGETHER):
            b_here = b_exist & (0 * o_q + first + slot < slots)
            b_place = tl.load(p_token + first + slot, mask=b_here, other=rows).to(tl.int64)
            p_rows = p_part + (head * rows + b_place)[:, None] * D + o_d[None, :]
            b_parts += (load_rows(p_rows, b_place < rows, o_d, D, DP, True),)
        for slot in tl.static_range(TOGETHER):
            b_sum += b_parts[slot].to(tl.float32)
    if TURNED:
        b_sum = tl.reshape(tl.permute(tl.reshape(b_sum, [BM, DP // 64, 4, 8, 2]), (0, 1, 3, 2, 4)), [BM, DP])
    store_rows(p_line, b_dq + b_sum * scale, b_exist, o_d, D, DP)


@triton.jit(do_not_specialize=["rows", "threshold", "first_head"])
def chosen_bwd_kernel(
    p_q, p_k, p_v, p_do, p_lse, p_delta, p_part, p_dk, p_dv, p_source, p_first, p_order, p_padding, p_seed, p_bounds,
    scale, scale_log2, inverse_keep, threshold, rows, n, blocks, samples, heads, first_head, sq_b, sq_h, sq_n, sk_b,
    sk_h, sk_n, sv_b, sv_h, sv_n, sg_b, sg_h, sg_n, sx_b, sx_h, sx_n, sy_b, sy_h, sy_n,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients from the gathered queries of a key block to its dK and dV, and store the partial dQ of each.

    Sums run over the GROUP query heads of the key head. A gathered row belongs to one key block, so that no other
    program writes its partial dQ. BN keys are held at a time; the rows are streamed once for each such part of the
    block, and dQ accumulates over the parts.
    """
    SUB_M: tl.constexpr = BLOCK // BM
    HOLES: tl.constexpr = RAGGED or PADDING
    CUT: tl.constexpr = HOLES or p_bounds is not None
    key_tiles = samples * blocks
    key_head = tl.program_id(1).to(tl.int64)
    tile = tl.load(p_order + key_head * key_tiles + tl.program_id(0)).to(tl.int64)
    sample = tile // blocks
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, DP)
    o_e = tl.arange(0, EP)
    for part in range(BLOCK // BN):
        o_key = (tile - sample * blocks) * BLOCK + part * BN + tl.arange(0, BN)
        b_valid = key_exists(p_padding, sample, n, o_key, PADDING)
        p_k_tile = p_k + sample * sk_b + key_head * sk_h + o_key[:, None] * sk_n + o_d[None, :]
        p_v_tile = p_v + sample * sv_b + key_head * sv_h + o_key[:, None] * sv_n + o_e[None, :]
        b_k = load_rows(p_k_tile, b_valid, o_d, D, DP, HOLES)
        b_v = load_rows(p_v_tile, b_valid, o_e, E, EP, HOLES)
        b_dk = tl.zeros([BN, DP], tl.float32)
        b_dv = tl.zeros([BN, EP], tl.float32)
        for member in range(GROUP):
            head = key_head * GROUP + member
            p_run = p_first + head * (key_tiles + 1) + tile
            stream = sample * heads + first_head + head
            p_q_head = p_q + sample * sq_b + head * sq_h + o_d[None, :]
            p_do_head = p_do + sample * sg_b + head * sg_h + o_e[None, :]
            first = tl.load(p_run) * SUB_M
            stop = tl.load(p_run + 1) * SUB_M
            p_source_head = p_source + head * rows
            b_next = load_sources(p_source_head, first * BM, stop * BM, o_m)
            for j in range(first, stop):
                o_row = head * rows + j * BM + o_m
                o_q, b_exist = tokens_of_sources(b_next, sample, n)
                b_next = load_sources(p_source_head, (j + 1) * BM, stop * BM, o_m)
                b_lse = reference_of(tl.load(p_lse + stream * n + o_q, mask=b_exist, other=NO_KEY))
                b_delta = tl.load(p_delta + stream * n + o_q, mask=b_exist, other=0.0)
                b_q = load_rows(p_q_head + o_q[:, None] * sq_n, b_exist, o_d, D, DP, True)
                b_do = load_rows(p_do_head + o_q[:, None] * sg_n, b_exist, o_e, E, EP, True)
                b_row = o_q
                if DROPOUT:
                    b_row = dropout_rows(p_seed, stream, o_q)
                b_low, b_high = key_bounds(p_bounds, o_q[None, :], b_exist[None, :])
                elements = visible_arguments(p_bounds, b_valid[:, None], o_key[:, None], b_low, b_high)
                b_dk, b_dv, b_ds = dkv_step(
                    b_dk, b_dv, b_k, b_v, b_q, b_do, b_lse, b_delta, elements, b_row, o_key,
                    scale_log2, threshold, inverse_keep, BLOCK, False, CUT, False, DROPOUT, PRECISION, False,
                )  # fmt: skip
                b_by_width = tl.trans(b_k)
                if BN < BLOCK:
                    # Loaded again, because a third layout of wide keys would not fit beside the other two.
                    b_by_width = tl.trans(load_rows(p_k_tile, b_valid, o_d, D, DP, HOLES))
                b_dq = tl.trans(tl.dot(b_by_width, b_ds, input_precision=PRECISION))
                p_dq_part = p_part + o_row[:, None] * D + o_d[None, :]
                if BN < BLOCK:
                    b_dq += load_rows(p_dq_part, b_exist & (part + o_m * 0 > 0), o_d, D, DP, True)
                store_rows(p_dq_part, b_dq, b_exist, o_d, D, DP)
        p_dk_tile = p_dk + sample * sx_b + key_head * sx_h + o_key[:, None] * sx_n + o_d[None, :]
        p_dv_tile = p_dv + sample * sy_b + key_head * sy_h + o_key[:, None] * sy_n + o_e[None, :]
        store_rows(p_dk_tile, b_dk * scale + load_rows(p_dk_tile, b_valid, o_d, D, DP, True), b_valid, o_d, D, DP)
        store_rows(p_dv_tile, b_dv + load_rows(p_dv_tile, b_valid, o_e, E, EP, True), b_valid, o_e, E, EP)
        if BN < BLOCK:
            # The next part reads the dQ that other threads wrote.
            tl.debug_barrier()
