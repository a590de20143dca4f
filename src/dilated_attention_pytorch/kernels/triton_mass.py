"""How much attention some queries pay to some blocks, without an array of scores, and what a scorer learns from it.

Names as in `triton_primitives`. Rows are groups of W queries, a block of them or a token. With ALL a row meets every
block, else its own and then those of its list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plan.selected import Selection
from .quick_launch import launch
from .selection import Factors
from .triton_launch import LOG2E, OPTIONS, _precision, held
from .triton_primitives import LN2, NO_KEY, load_rows

TILE = 4096
"""Numbers that a program holds at once."""


@triton.jit(do_not_specialize=["n", "blocks", "rows", "queries", "total", "width"])
def block_lse_kernel(
    p_q, p_k, p_rows, p_blocks, p_padding, p_lse, scale, n, blocks, rows, queries, total, width, heads, group, sq_b,
    sq_h, sq_n, sk_b, sk_h, sk_n,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ALL: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """LSE of BM queries, of `queries` that share a list, on one block of it; -inf where they see nothing of it."""
    tiles = (queries + BM - 1) // BM
    row = (tl.program_id(0) // tiles).to(tl.int64)
    o_i = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
    slot = tl.program_id(1)
    stream = tl.program_id(2).to(tl.int64)
    sample = stream // heads
    head = stream % heads
    o_flat = row * queries + o_i
    o_q = tl.load(p_rows + o_flat // W, mask=o_i < queries, other=n) * W + o_flat % W
    b_exist = (o_i < queries) & (o_q < n)
    block = slot.to(tl.int64)
    if not ALL:
        first = tl.load(p_rows + row)
        p_own = p_blocks + (stream * total + first) * (width - 1) + slot - 1
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
    tl.store(p_lse + o_line, b_lse, mask=o_i < queries)


@triton.jit(do_not_specialize=["n", "blocks", "rows", "total", "width", "factor"])
def lesson_kernel(
    p_logs, p_scores, p_lists, p_visible, p_rows, p_lse, p_do, p_padding, p_grad, p_found, n, blocks, rows, total,
    width, heads, factor, sg_b, sg_h, sg_n,
    BLOCK: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, L: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    ALL: tl.constexpr, CAUSAL: tl.constexpr, SALIENCY: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """One row, L blocks at most: `ops.selection_mass.learn` of what its queries hold by their LSE on each block.

    Told are its loss, entropy, and with ALL the share of attention that its queries keep and how many those are.
    """
    row = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    line = stream * rows + row
    place = tl.load(p_rows + row)
    own = place * W // BLOCK
    o_l = tl.arange(0, L)
    o_e = tl.arange(0, EP)
    p_logs += line * W * width
    p_do += (stream // heads) * sg_b + (stream % heads) * sg_h
    b_mass = tl.zeros([L], tl.float32)
    captured = 0.0
    seen = 0.0
    for first in range(0, W, BM):
        o_i = first + tl.arange(0, BM)
        o_q = place * W + o_i
        b_real = o_q < n
        b_logs = tl.load(p_logs + o_i[:, None] * width + o_l[None, :], mask=(o_l < width)[None, :], other=NO_KEY)
        b_kept = tl.load(p_lse + stream * n + o_q, mask=b_real, other=NO_KEY)
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
            b_weight = tl.sqrt(tl.sum(b_do * b_do, 1))
        if PADDING:
            b_real = b_real & (tl.load(p_padding + (stream // heads) * n + o_q, mask=b_real, other=1) == 0)
        b_share = tl.where(b_logs == NO_KEY, 0.0, tl.exp(b_logs - b_whole[:, None]))
        b_counts = (b_real & (b_weight > 0.0))[:, None]
        b_mass += tl.sum(tl.where(b_counts, b_share * b_weight[:, None], 0.0), 0)
    if ALL:
        o_entry = line * width + o_l
        b_own = o_l == own
        b_compared = (o_l < own if CAUSAL else o_l != own) & (o_l < blocks)
        b_compared = b_compared & (tl.load(p_visible + stream * blocks + o_l, mask=b_compared, other=0) != 0)
        b_stored = o_l < width
    else:
        o_entry = line * (width - 1) + o_l - 1
        b_own = o_l == 0
        b_stored = (o_l > 0) & (o_l < width)
        p_list = p_lists + (stream * total + place) * (width - 1) + o_l - 1
        b_compared = tl.load(p_list, mask=b_stored, other=blocks) < blocks
    b_logit = tl.load(p_scores + o_entry, mask=b_compared, other=NO_KEY)
    b_logit = tl.where(b_own, 0.0, b_logit)
    top = tl.max(b_logit, 0)
    b_log = b_logit - (top + tl.log(tl.sum(tl.exp(b_logit - top), 0)))
    b_share = tl.exp(b_log)
    b_mass = tl.where(b_compared | b_own, b_mass, 0.0)
    whole = tl.sum(b_mass, 0)
    # A row that weighs nothing, or is not finite, teaches nothing.
    teaches = (whole > 0.0) & (whole < float("inf"))
    b_target = tl.where(teaches, b_mass / whole, 0.0)
    # What is not compared is predicted never, and weighs nothing.
    b_log = tl.maximum(b_log, -1e30)
    b_terms = b_target * (tl.log(tl.where(b_target > 0.0, b_target, 1.0)) - b_log)
    b_grad = tl.where(b_compared, tl.where(teaches, b_share - b_target, 0.0), 0.0)
    tl.store(p_grad + o_entry, b_grad * factor, mask=b_stored)
    every = tl.num_programs(1) * rows
    tl.store(p_found + line, tl.sum(b_terms, 0) * factor)
    tl.store(p_found + every + line, -tl.sum(b_share * b_log, 0) / every)
    tl.store(p_found + 2 * every + line, captured)
    tl.store(p_found + 3 * every + line, seen)


@triton.jit(do_not_specialize=["rows", "chosen", "total", "blocks", "width"])
def spread_kernel(
    p_listed, p_every, p_lists, p_ids, p_scores, p_log, p_spread, p_sums, rows, chosen, total, blocks, width, heads,
    coldest, T: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Gradients of one row's scores, before their temperature, by block; its parts in those of temperature and bias."""
    row = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    line = stream * rows + row
    o_t = tl.arange(0, T)
    b_real = o_t < blocks
    b_grad = tl.zeros([T], tl.float32)
    if row < chosen:
        p_lists += (stream * total + tl.load(p_ids + row)) * width
        p_listed += (stream * chosen + row) * width
        for first in range(0, width, K):
            o_k = first + tl.arange(0, K)
            b_block = tl.load(p_lists + o_k, mask=o_k < width, other=blocks)
            b_one = tl.load(p_listed + o_k, mask=o_k < width, other=0.0)
            b_grad += tl.sum(tl.where(b_block[:, None] == o_t[None, :], b_one[:, None], 0.0), 0)
    else:
        b_grad = tl.load(p_every + (stream * (rows - chosen) + row - chosen) * blocks + o_t, mask=b_real, other=0.0)
    free = tl.exp(tl.load(p_log + stream % heads).to(tl.float32))
    inverse = 1.0 / tl.maximum(free, coldest)
    # What is not listed has gathered in one column more.
    b_grad = tl.where(b_real, b_grad, 0.0)
    b_score = tl.load(p_scores + line * blocks + o_t, mask=b_real, other=0.0)
    tl.store(p_sums + line, -tl.sum(b_grad * b_score, 0) * free * inverse)
    b_grad *= inverse
    tl.store(p_sums + tl.num_programs(1).to(tl.int64) * rows + line, tl.sum(b_grad, 0))
    tl.store(p_spread + line * blocks + o_t, b_grad, mask=b_real)


@triton.jit(do_not_specialize=["rows", "total", "blocks"])
def match_bwd_kernel(
    p_pairs, p_spread, p_ids, p_left_there, p_right_there, rows, total, blocks, root,
    A: tl.constexpr, BT: tl.constexpr, U: tl.constexpr, LEFT: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """Matches of one row's A sub-blocks with the U of each of BT blocks: their gradients take their place.

    A block's goes to the best of its matches, or to all that are equally good alike; where nothing is there, nowhere.
    """
    stream = tl.program_id(1).to(tl.int64)
    line = stream * rows + tl.program_id(0)
    o_t = tl.program_id(2) * BT + tl.arange(0, BT)
    o_a = tl.arange(0, A)[:, None, None]
    o_right = o_t[None, :, None] * U + tl.arange(0, U)[None, None, :]
    b_grad = tl.load(p_spread + line * blocks + o_t, mask=o_t < blocks, other=0.0) * root
    # Most rows list few blocks; of the others no match is read.
    b_there = (b_grad != 0.0)[None, :, None]
    if HOLES:
        b_there = b_there & (tl.load(p_right_there + stream * blocks * U + o_right, mask=b_there, other=0) != 0)
    if LEFT:
        p_left_there += (stream * total + tl.load(p_ids + tl.program_id(0))) * A
        b_there = b_there & (tl.load(p_left_there + o_a) != 0)
    p_own = p_pairs + line * A * blocks * U + o_a * (blocks * U) + o_right
    b_pair = tl.load(p_own, mask=b_there, other=NO_KEY)
    # Where one is not a number, none is best.
    b_best = tl.max(tl.max(tl.where(b_pair == b_pair, b_pair, float("inf")), 2), 0)
    b_best = tl.where(b_best == NO_KEY, float("inf"), b_best)
    b_tied = b_pair == b_best[None, :, None]
    b_share = b_grad / tl.maximum(tl.sum(tl.sum(b_tied.to(tl.int32), 2), 0), 1)
    tl.store(p_own, tl.where(b_tied, b_share[None, :, None], 0.0), mask=(o_t < blocks)[None, :, None])


def spread_out(
    grads: tuple[Tensor, ...], lists: Tensor, ids: Tensor, scores: Tensor, factors: Factors
) -> tuple[Tensor, Tensor]:
    """Gradients (b h, r, t) of scores (b, h, r, t) but for temperature, and of temperature and bias, (2, b h).

    Given are those of scores over temperature of listed blocks (b, h, c, k), for the first c rows, and of all blocks
    (b, h, r - c, t) for the others; the rows are `ids` of those of the lists int32 (b, h, all rows, k).
    """
    batch, heads, many, t = scores.shape
    spread = torch.empty((batch * heads, many, t), dtype=torch.float32, device=scores.device)
    sums = torch.empty((2, batch * heads, many), dtype=torch.float32, device=scores.device)
    listed, every = (x.contiguous() for x in grads)
    launch(spread_kernel, (many, batch * heads),
        listed, every, lists.contiguous(), ids, scores, factors.log_temperature, spread, sums, many, listed.shape[2],
        lists.shape[2], t, lists.shape[3], heads, float(factors.coldest),
        T=held(t), K=min(held(lists.shape[3]), max(TILE // held(t), 1)), num_warps=4, **OPTIONS,
    )  # fmt: skip
    return spread, sums.sum(2)


def match_gradient_(pairs: Tensor, spread: Tensor, ids: Tensor, factors: Factors) -> Tensor:
    """What gradients (b h, r, t) of scores give the matches (b h, r a, t u) of sub-blocks, in their place."""
    (streams, many, t), own_units, (units, rank) = spread.shape, factors.own.shape[3], factors.right.shape[3:]
    blocks = min(max(TILE // (own_units * units), 1), held(t))
    there = [ids if x is None else x.contiguous() for x in (factors.left_there, factors.right_there)]
    launch(match_bwd_kernel, (many, streams, -(-t // blocks)),
        pairs, spread, ids, *there, many, factors.own.shape[2], t, rank**-0.5,
        A=own_units, BT=blocks, U=units, LEFT=factors.left_there is not None, HOLES=factors.right_there is not None,
        num_warps=min(max(own_units * units // 1024, 4), 16), **OPTIONS,
    )  # fmt: skip
    return pairs


def taught(
    query: Tensor,
    key: Tensor,
    selection: Selection,
    rows: Tensor,
    listed: bool,
    scores: Tensor,
    visible: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    scale: float,
    key_padding_mask: Tensor | None,
    weight: float,
    saliency: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the scores of rows, and float32 (4): their loss, entropy, share of attention kept and its queries.

    For queries and keys of a dtype and width that the Triton kernels take, rows int64 (r), and scores (b, h, r, k) of
    the blocks that the selection lists for them, or (b, h, r, t) of all; `lse` (b, h, n), without gaps, and
    `grad_output` (b, h, n, e) are those of what the rows kept. The rest is as in `ops.selection_mass.Lesson`.
    """
    batch, heads, n, e = grad_output.shape
    d, t, size, many = query.shape[3], selection.blocks, selection.block_size, len(rows)
    wide, rows, lists = 1 if selection.per_token else size, rows.contiguous(), selection.indices.contiguous()
    width = lists.shape[3] + 1 if listed else t
    logs = torch.empty((batch, heads, many, wide, width), dtype=torch.float32, device=query.device)
    # Rows without lists of their own need not be kept apart, so that short ones fill a tile together.
    groups, queries = (many, wide) if listed else (1, many * wide)
    most = 32 if query.dtype is torch.float32 else 64
    at_once, length = min(held(queries), most), held(width)
    padding = rows if key_padding_mask is None else key_padding_mask.contiguous()
    told = {"BLOCK": size, "W": wide, "ALL": not listed, "CAUSAL": selection.is_causal}
    told |= {"PADDING": key_padding_mask is not None} | OPTIONS
    launch(block_lse_kernel, (groups * -(-queries // at_once), width, batch * heads),
        query, key, rows, lists, padding, logs, scale * LOG2E, n, t, groups, queries, -(-n // wide), width, heads,
        heads // key.shape[1], *query.stride()[:3], *key.stride()[:3],
        BM=at_once, BN=min(most, size), D=d, DP=held(d), PRECISION=_precision(query.dtype), num_warps=4, num_stages=1,
        **told,
    )  # fmt: skip
    grad = torch.empty(scores.shape, dtype=torch.float32, device=query.device)
    found = torch.empty((4, batch * heads * many), dtype=torch.float32, device=query.device)
    launch(lesson_kernel, (many, batch * heads),
        logs, scores.contiguous(), lists, visible, rows, lse, grad_output, padding, grad, found, n, t,
        many, -(-n // wide), width, heads, weight / (batch * heads * many), *grad_output.stride()[:3],
        BM=min(wide, max(TILE // length, 1)), L=length, E=e, EP=held(e), SALIENCY=saliency,
        num_warps=min(max(length // 1024, 4), 16), **told,
    )  # fmt: skip
    return grad, found.sum(1)
