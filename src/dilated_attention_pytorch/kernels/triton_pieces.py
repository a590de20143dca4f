"""Rows between a sequence and the pieces it is computed in: gathered before a backward pass, combined after either.

A piece is one call of a dense kernel: tensors (outer, inner, length, width), where the outer index counts segments, the
inner one heads, and either may count batches as well. The table says which token of which head each of its rows is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
"""Rows a program takes."""

COLUMNS = (
    "batch", "batches", "batch_outer", "batch_inner", "begin", "hop", "segments", "head", "head_step", "heads",
    "offset", "offset_step", "rate", "length", "stride_outer", "stride_inner", "stride_row", "inner", "packed",
)  # fmt: skip
"""What the table holds of a piece; strides are counted in elements, `packed`, the place of its first row, in rows."""
WIDTH = len(COLUMNS)


def combine(
    output: Tensor, lse: Tensor | None, pieces: list[Tensor], lses: list[Tensor], table: Tensor, seen: bool, group: int
) -> None:
    """Write the softmax merge (where there is an lse) or the sum of all pieces into `output` (B, H, N, D).

    With `seen`, output and lse already hold one more piece that covers every row. Head h of the output takes what the
    pieces computed for heads h * group and the group - 1 after it.
    """
    batch, heads, n, width = output.shape
    slots = lse if lse is not None else table
    combine_rows_kernel[(triton.cdiv(n, ROWS), heads, batch)](
        output, slots, tuple(pieces), tuple(lses) or (table,), table, n, heads, *output.stride()[:3],
        COLUMNS=WIDTH, PIECES=len(pieces), GROUP=group, SOFTMAX=lse is not None, SEEN=seen,
        BM=ROWS, D=width, DP=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def gather(rows: Tensor, grads: Tensor, lse: Tensor, table: Tensor, blocks: Tensor, count: int) -> tuple[Tensor, ...]:
    """Rows of the output, of its gradient and of the lse that the pieces in `blocks` compute, piece after piece, flat.

    `blocks` int32 [programs, 2] names a piece and the first of its rows; `count` is their number of rows together.
    """
    width = rows.shape[3]
    packed = torch.empty(count * width, dtype=rows.dtype, device=rows.device)
    packed_grads = torch.empty(count * width, dtype=grads.dtype, device=rows.device)
    packed_lse = torch.empty(count, dtype=lse.dtype, device=rows.device)
    gather_rows_kernel[(len(blocks),)](
        rows, grads, lse, packed, packed_grads, packed_lse, table, blocks,
        *rows.stride()[:3], *grads.stride()[:3], *lse.stride(),
        COLUMNS=WIDTH, BM=ROWS, D=width, DP=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return packed, packed_grads, packed_lse


@triton.jit
def combine_rows_kernel(
    p_out, p_lse, pieces, lses, p_table, n, heads, so_b, so_h, so_n,
    COLUMNS: tl.constexpr, PIECES: tl.constexpr, GROUP: tl.constexpr, SOFTMAX: tl.constexpr, SEEN: tl.constexpr,
    BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
) -> None:  # fmt: skip
    """One program joins the rows of one head, a stretch of tokens."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    token = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.arange(0, DP)
    inside = (column < D)[None, :]
    b_sum = tl.zeros([BM, DP], dtype=tl.float32)
    b_max = tl.full([BM], float("-inf"), dtype=tl.float32)
    b_norm = tl.zeros([BM], dtype=tl.float32)
    touched = tl.zeros([BM], dtype=tl.int32)
    for piece in tl.static_range(PIECES):
        entry = p_table + piece * COLUMNS
        own_batch = batch - tl.load(entry).to(tl.int32)
        batches = tl.load(entry + 1).to(tl.int32)
        batch_outer = tl.load(entry + 2).to(tl.int32)
        batch_inner = tl.load(entry + 3).to(tl.int32)
        begin = tl.load(entry + 4).to(tl.int32)
        hop = tl.load(entry + 5).to(tl.int32)
        segments = tl.load(entry + 6).to(tl.int32)
        first_head = tl.load(entry + 7).to(tl.int32)
        head_step = tl.load(entry + 8).to(tl.int32)
        piece_heads = tl.load(entry + 9).to(tl.int32)
        offset = tl.load(entry + 10).to(tl.int32)
        offset_step = tl.load(entry + 11).to(tl.int32)
        rate = tl.load(entry + 12).to(tl.int32)
        length = tl.load(entry + 13).to(tl.int32)
        stride_outer = tl.load(entry + 14)
        stride_inner = tl.load(entry + 15)
        stride_row = tl.load(entry + 16)
        inner_count = tl.load(entry + 17)
        past = token - begin
        segment = past // hop
        for member in range(GROUP):
            steps = head * GROUP + member - first_head
            index = steps // head_step
            ours = (own_batch >= 0) & (own_batch < batches)
            ours = ours & (steps >= 0) & (steps % head_step == 0) & (index < piece_heads)
            if ours:
                within = past - segment * hop - (offset + index * offset_step)
                row = within // rate
                held = (past >= 0) & (segment < segments) & (within >= 0) & (row * rate == within) & (row < length)
                held = held & (token < n)
                outer = (segment + own_batch * batch_outer).to(tl.int64)
                inner = (index + own_batch * batch_inner).to(tl.int64)
                place = outer * stride_outer + inner * stride_inner + row.to(tl.int64) * stride_row
                b_rows = tl.load(
                    pieces[piece] + place[:, None] + column[None, :], mask=held[:, None] & inside, other=0.0
                ).to(tl.float32)
                touched = touched | held.to(tl.int32)
                if SOFTMAX:
                    slot = (outer * inner_count + inner) * length + row
                    b_lse = tl.load(lses[piece] + slot, mask=held, other=float("-inf")).to(tl.float32)
                    larger = tl.maximum(b_max, b_lse)
                    # Rows no piece has reached yet have no maximum to subtract.
                    pivot = tl.where(larger == float("-inf"), 0.0, larger)
                    kept = tl.exp(b_max - pivot)
                    added = tl.exp(b_lse - pivot)
                    b_sum = b_sum * kept[:, None] + b_rows * added[:, None]
                    b_norm = b_norm * kept + added
                    b_max = larger
                else:
                    b_sum += b_rows
    written = token < n
    if SEEN:
        written = written & (touched > 0)
    p_rows = p_out + batch.to(tl.int64) * so_b + head.to(tl.int64) * so_h + token.to(tl.int64) * so_n
    p_rows = p_rows[:, None] + column[None, :]
    if SOFTMAX:
        p_slots = p_lse + (batch.to(tl.int64) * heads + head) * n + token
    if SEEN:
        b_rows = tl.load(p_rows, mask=written[:, None] & inside, other=0.0).to(tl.float32)
        if SOFTMAX:
            b_lse = tl.load(p_slots, mask=written, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(b_max, b_lse)
            pivot = tl.where(larger == float("-inf"), 0.0, larger)
            kept = tl.exp(b_max - pivot)
            added = tl.exp(b_lse - pivot)
            b_sum = b_sum * kept[:, None] + b_rows * added[:, None]
            b_norm = b_norm * kept + added
            b_max = larger
        else:
            b_sum += b_rows
    if SOFTMAX:
        empty = b_norm == 0.0
        divisor = tl.where(empty, 1.0, b_norm)
        b_sum = b_sum / divisor[:, None]
        b_lse = tl.where(empty, float("-inf"), b_max + tl.log(divisor))
        tl.store(p_slots, b_lse, mask=written)
    tl.store(p_rows, b_sum.to(p_out.dtype.element_ty), mask=written[:, None] & inside)


@triton.jit
def gather_rows_kernel(
    p_rows, p_grads, p_lse, p_packed, p_packed_grads, p_packed_lse, p_table, p_blocks,
    sr_b, sr_h, sr_n, sg_b, sg_h, sg_n, sl_b, sl_h, sl_n,
    COLUMNS: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
) -> None:  # fmt: skip
    """One program copies a stretch of one piece's rows."""
    p_block = p_blocks + tl.program_id(0) * 2
    entry = p_table + tl.load(p_block) * COLUMNS
    first_batch = tl.load(entry)
    batch_outer = tl.load(entry + 2).to(tl.int32)
    batch_inner = tl.load(entry + 3).to(tl.int32)
    begin = tl.load(entry + 4)
    hop = tl.load(entry + 5)
    segments = tl.load(entry + 6).to(tl.int32)
    first_head = tl.load(entry + 7)
    head_step = tl.load(entry + 8)
    piece_heads = tl.load(entry + 9).to(tl.int32)
    offset = tl.load(entry + 10)
    offset_step = tl.load(entry + 11)
    rate = tl.load(entry + 12)
    length = tl.load(entry + 13).to(tl.int32)
    stride_outer = tl.load(entry + 14)
    stride_inner = tl.load(entry + 15)
    stride_row = tl.load(entry + 16)
    inner_count = tl.load(entry + 17).to(tl.int32)
    packed_at = tl.load(entry + 18)
    outer_count = segments * tl.where(batch_outer > 0, tl.load(entry + 1).to(tl.int32), 1)
    slot = tl.load(p_block + 1) + tl.arange(0, BM)
    column = tl.arange(0, DP)
    line = slot // length
    row = slot - line * length
    outer = line // inner_count
    inner = line - outer * inner_count
    held = outer < outer_count
    own_batch = tl.where(batch_outer > 0, outer // segments, 0) + tl.where(batch_inner > 0, inner // piece_heads, 0)
    segment = (outer - own_batch * batch_outer).to(tl.int64)
    index = (inner - own_batch * batch_inner).to(tl.int64)
    token = begin + segment * hop + offset + index * offset_step + row.to(tl.int64) * rate
    head = first_head + index * head_step
    batch = first_batch + own_batch
    to = packed_at * D + outer.to(tl.int64) * stride_outer + inner.to(tl.int64) * stride_inner
    to = (to + row.to(tl.int64) * stride_row)[:, None] + column[None, :]
    mask = held[:, None] & (column < D)[None, :]
    source = (batch * sr_b + head * sr_h + token * sr_n)[:, None] + column[None, :]
    tl.store(p_packed + to, tl.load(p_rows + source, mask=mask, other=0.0), mask=mask)
    source = (batch * sg_b + head * sg_h + token * sg_n)[:, None] + column[None, :]
    tl.store(p_packed_grads + to, tl.load(p_grads + source, mask=mask, other=0.0), mask=mask)
    b_lse = tl.load(p_lse + batch * sl_b + head * sl_h + token * sl_n, mask=held, other=0.0)
    tl.store(p_packed_lse + packed_at + slot, b_lse, mask=held)
