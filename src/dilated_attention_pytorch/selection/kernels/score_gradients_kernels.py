"""Gradients of the factors and parameters of a scorer, without an array of hidden units or of matches.

Names as in `primitives`, factors as in `types.Factors`. Some rows, `rows` of them with the numbers `p_ids`, were scored
with all `blocks`. U is the number of sub-blocks of a key block, M of hidden units; RANK is the rank of the match and RP
the rank padded to a power of two. A *stream* is a head of a sample. Rows and blocks are the two sides of the same
pairwise sums: a program holds some of one side and streams the other, and a launch has programs for both.

Intermediate results are float32 and share one arena `p_room`, where the parameters `at_` are offsets; the factors of
the rows are at offset 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton.primitives import NO_KEY, projected


@triton.jit
def inverse_temperature(p_log, head, coldest):
    """Inverse temperature of a head, by which scores are multiplied; the temperature is at least `coldest`."""
    return 1.0 / tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest)


@triton.jit(do_not_specialize=["rows"])
def own_kernel(
    p_factors, p_own, p_project, p_ids, p_room, rows, heads, at_left, sf_h, sf_n, sf_m, so_b, so_h, so_n, s_project,
    BM: tl.constexpr, M: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr,
    RP: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the query side of the match of BM rows, [RANK] each at `at_left`, and their hidden factors, [M] each, which
    are those of a block of SIZE rows."""
    stream = tl.program_id(1).to(tl.int64)
    head = stream % heads
    o_i = tl.program_id(0) * BM + tl.arange(0, BM)
    b_real = o_i < rows
    o_own = tl.load(p_ids + o_i, mask=b_real, other=0)
    o_r = tl.arange(0, RP)
    p_own += (stream // heads) * so_b + head * so_h
    b_left = projected(p_own, p_project + head * s_project, o_own, b_real, o_r, so_n, D, RANK, RP, PRECISION)
    p_tile = p_room + at_left + (stream * rows + o_i)[:, None] * RANK + o_r[None, :]
    tl.store(p_tile, b_left, mask=b_real[:, None] & (o_r < RANK)[None, :])
    o_row = o_own // SIZE
    for first in range(0, M, BH):
        o_m = first + tl.arange(0, BH)
        b_mask = b_real[:, None] & (o_m < M)[None, :]
        b_row = tl.load(p_factors + stream * sf_h + o_row[:, None] * sf_n + o_m[None, :] * sf_m, mask=b_mask, other=0.0)
        tl.store(p_room + (stream * rows + o_i)[:, None] * M + o_m[None, :], b_row, mask=b_mask)


@triton.jit
def hidden_sums(
    p_held, p_streamed, p_grad, p_scores, lines, sh_m, ss_n, ss_m, sg_j,
    M: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sums over the `lines` streamed rows or blocks of a held block or row, for hidden = relu(held + streamed). Returns
    the sum of gradients where a unit is active, [MP]; of hidden * gradient, [MP]; of gradients; and of gradient *
    score."""
    o_m = tl.arange(0, MP)
    b_unit = o_m < M
    b_held = tl.load(p_held + o_m * sh_m, mask=b_unit, other=0.0)
    b_out = tl.zeros([MP], tl.float32)
    b_sum = tl.zeros([MP], tl.float32)
    b_total = tl.zeros([BN], tl.float32)
    b_by_score = tl.zeros([BN], tl.float32)
    for first in range(0, lines, BN):
        o_j = first + tl.arange(0, BN)
        b_real = o_j < lines
        b_grad_row = tl.load(p_grad + o_j * sg_j, mask=b_real, other=0.0)
        b_total += b_grad_row
        b_by_score += b_grad_row * tl.load(p_scores + o_j * sg_j, mask=b_real, other=0.0)
        b_grad = b_grad_row[:, None]
        p_tile = p_streamed + o_j[:, None] * ss_n + o_m[None, :] * ss_m
        b_hidden = b_held[None, :] + tl.load(p_tile, mask=b_real[:, None] & b_unit[None, :], other=0.0)
        b_out += tl.sum(tl.where(b_hidden > 0.0, b_grad, 0.0), 0)
        b_sum += tl.sum(tl.maximum(b_hidden, 0.0) * b_grad, 0)
    return b_out, b_sum, tl.sum(b_total, 0), tl.sum(b_by_score, 0)


@triton.jit
def hidden_bwd(
    p_rows, p_columns, p_grad, p_scores, p_weight, p_log, p_by_row, p_by_weight, p_by_block, p_sums, i, stream, rows,
    blocks, heads, coldest, s_weight, sc_h, sc_n, sc_m, M: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradient of the hidden factors of one row or block; for a row also its terms for w, temperature and bias.
    Programs `i` below `rows` hold a row, the others a block."""
    head = stream % heads
    o_m = tl.arange(0, MP)
    b_unit = o_m < M
    b_weight = tl.load(p_weight + head * s_weight + o_m, mask=b_unit, other=0.0).to(tl.float32)
    inverse = inverse_temperature(p_log, head, coldest)
    p_columns += stream * sc_h
    p_grad += stream * rows * blocks
    p_scores += stream * rows * blocks
    p_rows += stream * rows * M
    if i < rows:
        b_out, b_sum, total, by_score = hidden_sums(
            p_rows + i * M, p_columns, p_grad + i * blocks, p_scores + i * blocks, blocks, 1, sc_n, sc_m, 1, M, MP, BN
        )
        line = stream * rows + i
        tl.store(p_by_row + line * M + o_m, b_out * (b_weight * inverse), mask=b_unit)
        tl.store(p_by_weight + line * M + o_m, b_sum * inverse, mask=b_unit)
        # Below `coldest` the gradient passes through the clamp, multiplied by temperature / coldest.
        tl.store(p_sums + 2 * line, -by_score * tl.exp(tl.load(p_log + head).to(tl.float32)) * inverse)
        tl.store(p_sums + 2 * line + 1, total * inverse)
    else:
        j = i - rows
        b_out, b_sum, total, by_score = hidden_sums(
            p_columns + j * sc_n, p_rows, p_grad + j, p_scores + j, rows, sc_m, M, 1, blocks, M, MP, BN
        )
        tl.store(p_by_block + (stream * blocks + j) * M + o_m, b_out * (b_weight * inverse), mask=b_unit)


@triton.jit
def match_pairs(
    p_left, p_right, p_there, o_i, o_j, rows, blocks, o_r, U: tl.constexpr,
    RANK: tl.constexpr, HOLES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Factors of the rows `o_i`, [., RP], and of the sub-blocks `o_j` of blocks, [., RP], and their products, with
    HOLES NO_KEY if a sub-block is empty."""
    b_left_real = o_i < rows
    b_right_real = o_j < blocks * U
    b_wide = (o_r < RANK)[None, :]
    b_left = tl.load(p_left + o_i[:, None] * RANK + o_r[None, :], mask=b_left_real[:, None] & b_wide, other=0.0)
    b_right = tl.load(p_right + o_j[:, None] * RANK + o_r[None, :], mask=b_right_real[:, None] & b_wide, other=0.0)
    b_pair = tl.dot(b_left, tl.trans(b_right), input_precision=PRECISION)
    if HOLES:
        b_there = tl.load(p_there + o_j, mask=b_right_real, other=0) != 0
        b_pair = tl.where(b_there[None, :], b_pair, NO_KEY)
    return b_left, b_right, b_pair


@triton.jit
def match_tile(
    p_left, p_right, p_grad, p_best, p_there, first_row, first_block, rows, blocks, factor,
    o_r, M: tl.constexpr, N: tl.constexpr, U: tl.constexpr, RANK: tl.constexpr,
    HOLES: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Factors of M rows and N sub-blocks of blocks, and the gradients of the products, [M, N]. The gradient of a score
    goes to the best match of its row and block, in equal shares if several are best, and is dropped if all sub-blocks
    are empty. N covers whole blocks, unless `best_kernel` ran before (KNOWN)."""
    o_i = first_row + tl.arange(0, M)
    o_j = first_block + tl.arange(0, N)
    b_left, b_right, b_pair = match_pairs(
        p_left, p_right, p_there, o_i, o_j, rows, blocks, o_r,
        U, RANK, HOLES, PRECISION,
    )  # fmt: skip
    if KNOWN:
        b_mask = (o_i < rows)[:, None] & (o_j < blocks * U)[None, :]
        p_pair = p_best + 2 * (o_i[:, None] * blocks + (o_j // U)[None, :])
        b_best = tl.load(p_pair, mask=b_mask, other=float("inf"))
        b_share = tl.load(p_pair + 1, mask=b_mask, other=0.0) * factor
        b_share = tl.where(b_pair == b_best, b_share, 0.0)
    else:
        BT: tl.constexpr = N // U
        o_block = first_block // U + tl.arange(0, BT)
        b_mask = (o_i < rows)[:, None] & (o_block < blocks)[None, :]
        b_grad = tl.load(p_grad + o_i[:, None] * blocks + o_block[None, :], mask=b_mask, other=0.0) * factor
        b_pair = tl.reshape(b_pair, [M, BT, U])
        # With a NaN among the matches none is best.
        b_best = tl.max(tl.where(b_pair == b_pair, b_pair, float("inf")), 2)
        b_best = tl.where(b_best == NO_KEY, float("inf"), b_best)
        b_tied = b_pair == b_best[:, :, None]
        b_share = b_grad / tl.maximum(tl.sum(b_tied.to(tl.int32), 2), 1)
        b_share = tl.reshape(tl.where(b_tied, b_share[:, :, None], 0.0), [M, N])
    return b_left, b_right, b_share


@triton.jit(do_not_specialize=["rows", "blocks"])
def best_kernel(
    p_room, p_right, p_grad, p_there, rows, blocks, at_left, at_best, BR: tl.constexpr, BU: tl.constexpr,
    U: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, HOLES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the best match of each of BR rows with one block, and the gradient of its score over the number of ties. BU
    sub-blocks of the block are multiplied at a time."""
    stream = tl.program_id(2).to(tl.int64)
    block = tl.program_id(1)
    o_i = tl.program_id(0) * BR + tl.arange(0, BR)
    o_r = tl.arange(0, RP)
    p_left = p_room + at_left + stream * rows * RANK
    p_right += stream * blocks * U * RANK
    p_there += stream * blocks * U
    b_best = tl.full([BR], NO_KEY, tl.float32)
    b_ties = tl.zeros([BR], tl.float32)
    for unit in range(0, U, BU):
        o_j = block * U + unit + tl.arange(0, BU)
        _, _, b_pair = match_pairs(
            p_left, p_right, p_there, o_i, o_j, rows, blocks, o_r, U, RANK, HOLES, PRECISION
        )  # fmt: skip
        # With a NaN among the matches none is best.
        b_top = tl.max(tl.where(b_pair == b_pair, b_pair, float("inf")), 1)
        b_tied = tl.sum((b_pair == b_top[:, None]).to(tl.float32), 1)
        b_next = tl.maximum(b_best, b_top)
        b_ties = tl.where(b_best == b_next, b_ties, 0.0) + tl.where(b_top == b_next, b_tied, 0.0)
        b_best = b_next
    b_best = tl.where(b_best == NO_KEY, float("inf"), b_best)
    o_pair = (stream * rows + o_i) * blocks + block
    b_grad = tl.load(p_grad + o_pair, mask=o_i < rows, other=0.0)
    tl.store(p_room + at_best + 2 * o_pair, b_best, mask=o_i < rows)
    tl.store(p_room + at_best + 2 * o_pair + 1, b_grad / tl.maximum(b_ties, 1.0), mask=o_i < rows)


@triton.jit
def left_bwd(
    p_left, p_right, p_grad, p_best, p_there, p_by_left, tile, rows, blocks, factor,
    M: tl.constexpr, N: tl.constexpr, U: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    HOLES: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the query side of M rows; N sub-blocks of blocks are streamed at a time."""
    o_r = tl.arange(0, RP)
    b_out = tl.zeros([M, RP], tl.float32)
    for first in range(0, blocks * U, N):
        _, b_right, b_share = match_tile(
            p_left, p_right, p_grad, p_best, p_there, tile * M, first, rows, blocks, factor,
            o_r, M, N, U, RANK, HOLES, KNOWN, PRECISION,
        )  # fmt: skip
        b_out = tl.dot(b_share, b_right, b_out, input_precision=PRECISION)
    o_i = tile * M + tl.arange(0, M)
    b_mask = (o_i < rows)[:, None] & (o_r < RANK)[None, :]
    tl.store(p_by_left + o_i[:, None] * RANK + o_r[None, :], b_out, mask=b_mask)


@triton.jit
def right_bwd(
    p_left, p_right, p_grad, p_best, p_there, p_by_right, tile, rows, blocks, factor,
    M: tl.constexpr, N: tl.constexpr, U: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    HOLES: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the key side of N sub-blocks of blocks; M rows are streamed at a time."""
    o_r = tl.arange(0, RP)
    b_out = tl.zeros([N, RP], tl.float32)
    for first in range(0, rows, M):
        b_left, _, b_share = match_tile(
            p_left, p_right, p_grad, p_best, p_there, first, tile * N, rows, blocks, factor,
            o_r, M, N, U, RANK, HOLES, KNOWN, PRECISION,
        )  # fmt: skip
        b_out = tl.dot(tl.trans(b_share), b_left, b_out, input_precision=PRECISION)
    o_j = tile * N + tl.arange(0, N)
    b_mask = (o_j < blocks * U)[:, None] & (o_r < RANK)[None, :]
    tl.store(p_by_right + o_j[:, None] * RANK + o_r[None, :], b_out, mask=b_mask)


@triton.jit
def match_bwd(
    p_left, p_right, p_grad, p_best, p_there, p_log, p_by_left, p_by_right, tile, stream,
    rows, blocks, heads, coldest, root, HELD_LEFT: tl.constexpr, HELD_RIGHT: tl.constexpr,
    MET_LEFT: tl.constexpr, MET_RIGHT: tl.constexpr, U: tl.constexpr, RANK: tl.constexpr,
    RP: tl.constexpr, HOLES: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`left_bwd` on a tile of HELD_LEFT rows, or `right_bwd` on HELD_RIGHT sub-blocks of blocks. The tiles of rows come
    first. MET_RIGHT sub-blocks of blocks, or MET_LEFT rows, are streamed at a time."""
    factor = inverse_temperature(p_log, stream % heads, coldest) * root
    p_left += stream * rows * RANK
    p_right += stream * blocks * U * RANK
    p_grad += stream * rows * blocks
    p_best += 2 * stream * rows * blocks
    p_there += stream * blocks * U
    tiles = tl.cdiv(rows, HELD_LEFT)
    if tile < tiles:
        left_bwd(
            p_left, p_right, p_grad, p_best, p_there, p_by_left + stream * rows * RANK,
            tile, rows, blocks, factor, HELD_LEFT, MET_RIGHT, U, RANK, RP, HOLES, KNOWN, PRECISION,
        )  # fmt: skip
    else:
        right_bwd(
            p_left, p_right, p_grad, p_best, p_there,
            p_by_right + stream * blocks * U * RANK, tile - tiles, rows, blocks, factor,
            MET_LEFT, HELD_RIGHT, U, RANK, RP, HOLES, KNOWN, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "blocks"])
def sides_bwd_kernel(
    p_room, p_columns, p_right, p_grad, p_scores, p_there, p_weight, p_log, rows, blocks,
    heads, coldest, root, at_left, at_row, at_weight, at_block, at_sums, at_by_left, at_right, at_best, s_weight,
    sc_h, sc_n, sc_m, M: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr, HELD_LEFT: tl.constexpr,
    HELD_RIGHT: tl.constexpr, MET_LEFT: tl.constexpr, MET_RIGHT: tl.constexpr, U: tl.constexpr,
    RANK: tl.constexpr, RP: tl.constexpr, HOLES: tl.constexpr, KNOWN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`match_bwd` for tiles of rows, then for tiles of blocks, and `hidden_bwd` for each row and each block."""
    program = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    matched = tl.cdiv(rows, HELD_LEFT) + tl.cdiv(blocks * U, HELD_RIGHT)
    if program < matched:
        match_bwd(
            p_room + at_left, p_right, p_grad, p_room + at_best, p_there, p_log,
            p_room + at_by_left, p_room + at_right, program, stream, rows, blocks, heads, coldest, root,
            HELD_LEFT, HELD_RIGHT, MET_LEFT, MET_RIGHT, U, RANK, RP, HOLES, KNOWN, PRECISION,
        )  # fmt: skip
    else:
        hidden_bwd(
            p_room, p_columns, p_grad, p_scores, p_weight, p_log, p_room + at_row, p_room + at_weight,
            p_room + at_block, p_room + at_sums, program - matched, stream, rows, blocks, heads, coldest, s_weight,
            sc_h, sc_n, sc_m, M, MP, BN,
        )  # fmt: skip


@triton.jit
def transposed_product(
    p_x, p_y, p_ids, p_out, tile, lines, sx_n, sx_m, sy_n, s_out,
    M: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, X_ROWS: tl.constexpr,
    Y_ROWS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, Y_HEADS: tl.constexpr = 1,
    sy_h=0,
):  # fmt: skip
    """Store a tile [BM, BN] of x^T y, (M, N), summed over `lines` lines of x and y. With X_ROWS or Y_ROWS that tensor
    has the lines of the whole sequence: line k stands for the row `p_ids[k]`, and SIZE rows share a line. With Y_HEADS,
    y is the mean over heads, which are `sy_h` apart."""
    columns = tl.cdiv(N, BN)
    o_m = (tile // columns) * BM + tl.arange(0, BM)
    o_c = (tile % columns) * BN + tl.arange(0, BN)
    b_out = tl.zeros([BM, BN], tl.float32)
    for first in range(0, lines, BK):
        o_k = (first + tl.arange(0, BK)).to(tl.int64)
        b_real = o_k < lines
        o_x = o_k
        o_y = o_k
        if X_ROWS or Y_ROWS:
            o_at = tl.load(p_ids + o_k, mask=b_real, other=0) // SIZE
            o_x = o_at if X_ROWS else o_k
            o_y = o_at if Y_ROWS else o_k
        b_mask = (o_m < M)[:, None] & b_real[None, :]
        b_x = tl.load(p_x + o_x[None, :] * sx_n + o_m[:, None] * sx_m, mask=b_mask, other=0.0).to(tl.float32)
        if X_ROWS:
            # Non-finite elements count as 0, as in `projected`.
            b_x = tl.where(b_x - b_x == 0.0, b_x, 0.0)
        b_mask = b_real[:, None] & (o_c < N)[None, :]
        b_y = tl.load(p_y + o_y[:, None] * sy_n + o_c[None, :], mask=b_mask, other=0.0).to(tl.float32)
        if Y_HEADS > 1:
            for member in range(1, Y_HEADS):
                b_y += tl.load(p_y + member * sy_h + o_y[:, None] * sy_n + o_c[None, :], mask=b_mask, other=0.0)
            b_y *= 1.0 / Y_HEADS
        b_out = tl.dot(b_x, b_y, b_out, input_precision=PRECISION)
    b_mask = (o_m < M)[:, None] & (o_c < N)[None, :]
    tl.store(p_out + o_m[:, None] * s_out + o_c[None, :], b_out, mask=b_mask)


@triton.jit(do_not_specialize=["rows", "blocks", "heads", "alike", "total", "splits", "span"])
def sums_kernel(
    p_own, p_units, p_means, p_summary, p_room, p_ids, p_out, rows, blocks, heads, alike, total, splits, span, at_row,
    at_weight, at_block, at_sums, at_by_left, at_right, at_parts, to_joint, to_project, to_bias, to_last, to_two, so_b,
    so_h, so_n, key_heads, U: tl.constexpr, M: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the parameters of one stream, in `p_out`, from those of the factors.

    `alike` heads have parameters of their own, and each run of `alike` streams has `total` elements of `p_out`. For the
    key part of the first layer and for the mixture only their common factor is computed, by_block^T summary. With
    GROUP, a head is a list of GROUP query heads and of KEYS of the `key_heads`, each with its own projection. The
    gradient of the key projection is summed over `splits` runs of `span` sub-blocks, whose partial sums
    `mixture_kernel` adds: with short sub-blocks a single run would take as long as everything else.
    """
    stream = tl.program_id(1).to(tl.int64)
    p_own += (stream // heads) * so_b + (stream % heads) * GROUP * so_h
    p_out += (stream // alike) * total
    head = stream % alike
    key_stream = stream * key_heads // heads if key_heads is not None else stream
    tile = tl.program_id(0)
    WIDE: tl.constexpr = 3 * D
    # Longest sums first.
    EACH: tl.constexpr = ((D + BM - 1) // BM) * ((RANK + BR - 1) // BR)
    OWN: tl.constexpr = GROUP * EACH
    matched = splits * KEYS * EACH
    JOINT: tl.constexpr = ((M + BM - 1) // BM) * ((WIDE + BN - 1) // BN)
    FIRST: tl.constexpr = ((M + BM - 1) // BM) * ((D + BN - 1) // BN)
    p_by_row = p_room + at_row + stream * rows * M
    if tile < matched:
        part = tile // EACH
        key = part // splits if KEYS > 1 else 0
        begin = (part - key * splits) * span
        transposed_product(
            p_units + ((key_stream + key) * blocks * U + begin) * D,
            p_room + at_right + (stream * blocks * U + begin) * RANK, p_ids,
            p_room + at_parts + (stream * KEYS * splits + part) * D * RANK, tile - part * EACH,
            tl.minimum(span, blocks * U - begin), D, 1, RANK, RANK,
            D, RANK, BM, BR, BK, False, False, 1, PRECISION,
        )  # fmt: skip
    elif tile < matched + OWN:
        member = ((tile - matched) // EACH).to(tl.int64) if GROUP > 1 else 0
        transposed_product(
            p_own + member * so_h, p_room + at_by_left + stream * rows * RANK, p_ids,
            p_out + to_project + (head * GROUP + member) * D * RANK, tile - matched - member * EACH, rows, so_n, 1,
            RANK, RANK,
            D, RANK, BM, BR, BK, True, False, 1, PRECISION,
        )  # fmt: skip
    elif tile < matched + OWN + JOINT:
        transposed_product(
            p_room + at_block + stream * blocks * M, p_summary + key_stream * blocks * WIDE, p_ids,
            p_out + to_joint + head * M * WIDE, tile - matched - OWN, blocks, M, 1, WIDE, WIDE,
            M, WIDE, BM, BN, BK, False, False, 1, PRECISION, KEYS, blocks * WIDE,
        )  # fmt: skip
    elif tile < matched + OWN + JOINT + FIRST:
        transposed_product(
            p_by_row, p_means + stream * GROUP * blocks * D, p_ids,
            p_out + head * M * 2 * D, tile - matched - OWN - JOINT, rows, M, 1, D, 2 * D,
            M, D, BM, BN, BK, False, True, SIZE, PRECISION, GROUP, blocks * D,
        )  # fmt: skip
    else:
        tile -= matched + OWN + JOINT + FIRST
        o_m = tile * BM + tl.arange(0, BM)
        o_two = tl.arange(0, 2)
        p_by_weight = p_room + at_weight + stream * rows * M
        b_bias = tl.zeros([BM], tl.float32)
        b_last = tl.zeros([BM], tl.float32)
        b_two = tl.zeros([2], tl.float32)
        for first in range(0, rows, BK):
            o_k = first + tl.arange(0, BK)
            b_real = (o_k < rows)[:, None]
            b_mask = b_real & (o_m < M)[None, :]
            o_tile = o_k[:, None] * M + o_m[None, :]
            b_bias += tl.sum(tl.load(p_by_row + o_tile, mask=b_mask, other=0.0), 0)
            b_last += tl.sum(tl.load(p_by_weight + o_tile, mask=b_mask, other=0.0), 0)
            o_tile = (stream * rows + o_k)[:, None] * 2 + o_two[None, :]
            b_two += tl.sum(tl.load(p_room + at_sums + o_tile, mask=b_real, other=0.0), 0)
        tl.store(p_out + to_bias + head * M + o_m, b_bias, mask=o_m < M)
        tl.store(p_out + to_last + head * M + o_m, b_last, mask=o_m < M)
        # Gradients of temperatures, then of biases.
        tl.store(p_out + to_two + o_two * alike + head, b_two, mask=o_two < tl.where(tile == 0, 2, 0))


@triton.jit(do_not_specialize=["streams", "alike", "splits"])
def mixture_kernel(
    p_first, p_mixture, p_room, p_out, streams, alike, splits, at_parts, to_joint, to_mixture, to_match, s_first,
    s_mixture, M: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr, KEYS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the key part of the first layer, of the mixture of summaries, and of the key projection. The first
    two are products of the common factor of `sums_kernel`. The last is the sum of its partial sums over runs and
    samples, BP elements per program."""
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    WIDE: tl.constexpr = 3 * D
    FIRST: tl.constexpr = ((M + BM - 1) // BM) * ((D + BN - 1) // BN)
    SECOND: tl.constexpr = ((WIDE + BM - 1) // BM) * ((D + BN - 1) // BN)
    p_joint = p_out + to_joint + head * M * WIDE
    if tile < FIRST:
        transposed_product(
            p_joint, p_mixture + head * s_mixture, p_out, p_out + head * M * 2 * D + D, tile, WIDE, 1, WIDE, D, 2 * D,
            M, D, BM, BN, BK, False, False, 1, PRECISION,
        )  # fmt: skip
    elif tile < FIRST + SECOND:
        transposed_product(
            p_joint, p_first + head * s_first + D, p_out, p_out + to_mixture + head * WIDE * D, tile - FIRST, M, WIDE,
            1, 2 * D, D, WIDE, D, BM, BN, BK, False, False, 1, PRECISION,
        )  # fmt: skip
    else:
        MANY: tl.constexpr = D * RANK
        tile -= FIRST + SECOND
        key = tile // ((MANY + BP - 1) // BP)
        o_i = (tile % ((MANY + BP - 1) // BP)) * BP + tl.arange(0, BP)
        b_sum = tl.zeros([BP], tl.float32)
        for part in range(0, streams // alike * splits):
            stream = part // splits * alike + head
            p_part = p_room + at_parts + ((stream * KEYS + key) * splits + part % splits) * MANY
            b_sum += tl.load(p_part + o_i, mask=o_i < MANY, other=0.0)
        tl.store(p_out + to_match + (head * KEYS + key) * MANY + o_i, b_sum, mask=o_i < MANY)
