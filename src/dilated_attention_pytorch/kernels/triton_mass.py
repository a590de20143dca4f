"""How much attention some queries pay to some blocks, without an array of scores: the LSE of each block by itself.

Names as in `triton_primitives`. Rows are groups of Q queries, padded to BM; every row has a list of blocks of its own,
or with ALL every block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_launch import LOG2E, OPTIONS, _precision, held
from .triton_primitives import LN2, NO_KEY, load_rows


@triton.jit(do_not_specialize=["n", "blocks", "rows", "width"])
def block_lse_kernel(
    p_q, p_k, p_token, p_blocks, p_padding, p_lse, scale, n, blocks, rows, width, heads, group, sq_b, sq_h, sq_n, sk_b,
    sk_h, sk_n,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ALL: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """LSE of BM queries of one row on one block of its list; -inf where they see nothing of it."""
    SUB_M: tl.constexpr = (Q + BM - 1) // BM
    row = (tl.program_id(0) // SUB_M).to(tl.int64)
    o_i = (tl.program_id(0) % SUB_M) * BM + tl.arange(0, BM)
    slot = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64) // heads
    head = tl.program_id(2).to(tl.int64) % heads
    b_exist = o_i < Q
    o_q = tl.load(p_token + row * Q + o_i, mask=b_exist, other=n)
    b_exist = b_exist & (o_q < n)
    block = slot.to(tl.int64)
    if not ALL:
        block = tl.load(p_blocks + (tl.program_id(2).to(tl.int64) * rows + row) * width + slot)
    o_line = ((tl.program_id(2).to(tl.int64) * rows + row) * Q + o_i) * width + slot
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
    tl.store(p_lse + o_line, b_lse, mask=o_i < Q)


def block_lse(
    query: Tensor,
    key: Tensor,
    token: Tensor,
    blocks: Tensor | None,
    *,
    scale: float,
    key_padding_mask: Tensor | None,
    block_size: int,
    is_causal: bool,
) -> Tensor:
    """LSE of each block by itself, float32 (b, h, r, q, l).

    Args:
        query: (b, h, n, d), of a dtype and width that the Triton kernels take.
        key: (b, g, n, d).
        token: int64 (r, q): queries of each row; n and above are none.
        blocks: int64 (b, h, r, l): blocks of each row, past the last for none; every block for all rows if None.
        scale: factor on scores.
        key_padding_mask: bool (b, n).
        block_size: tokens in a block.
        is_causal: only keys not after a query count.
    """
    batch, heads, n, d = query.shape
    rows, wide = token.shape
    t = -(-n // block_size)
    width = t if blocks is None else blocks.shape[3]
    found = torch.empty((batch, heads, rows, wide, width), dtype=torch.float32, device=query.device)
    own = token.contiguous()
    if blocks is None:
        # Rows without lists of their own need not be kept apart, so that short ones fill a tile together.
        rows, wide = 1, rows * wide
    most = 32 if query.dtype is torch.float32 else 64
    at_once = min(max(16, 1 << (wide - 1).bit_length()), most)
    padding = own if key_padding_mask is None else key_padding_mask.contiguous().view(torch.uint8)
    if found.numel():
        block_lse_kernel[(rows * -(-wide // at_once), width, batch * heads)](
            query, key, own, own if blocks is None else blocks.contiguous(), padding, found, scale * LOG2E, n, t, rows,
            width, heads, heads // key.shape[1], *query.stride()[:3], *key.stride()[:3],
            BLOCK=block_size, BM=at_once, BN=min(most, block_size), Q=wide, D=d, DP=held(d), ALL=blocks is None,
            CAUSAL=is_causal, PADDING=key_padding_mask is not None, PRECISION=_precision(query.dtype),
            num_warps=4, num_stages=1, **OPTIONS,
        )  # fmt: skip
    return found
