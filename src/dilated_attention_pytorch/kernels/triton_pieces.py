"""Rows between a sequence and the pieces it is computed in: gathered before a backward pass, joined after either.

A piece is one call of a dense kernel: tensors (outer, inner, length, width), where the outer index counts segments, the
inner one heads, and either may count batches as well. The table says which token of which head each of its rows is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quick_launch import launch

ROWS = 32
"""Rows a program takes: few, for there are enough programs to keep memory busy and registers to spare."""

COLUMNS = (
    "batch", "batches", "batch_outer", "batch_inner", "begin", "hop", "segments", "head", "head_step", "heads",
    "offset", "offset_step", "rate", "length", "stride_outer", "stride_inner", "stride_row", "members",
)  # fmt: skip
"""What the table holds of a piece for one tensor; `members` neighbours on the inner axis are the same row of it."""
WIDTH = tl.constexpr(len(COLUMNS))


def merge(output: Tensor, lse: Tensor, piece: Tensor, piece_lse: Tensor, table: Tensor, index: int) -> None:
    """Join a piece to the softmax that `output` (B, H, N, D) and `lse` (B, H, N) hold already."""
    width = output.shape[3]
    launch(merge_rows_kernel, (triton.cdiv(piece_lse.numel(), ROWS),),
        output, lse, piece, piece_lse, table, index, *output.stride()[:3], *lse.stride(),
        BM=ROWS, D=width, DP=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def add(totals: Sequence[Tensor], pieces: Sequence[Tensor], table: Tensor, index: int) -> None:
    """Add the pieces' gradients of query, key and value to those of the sequence; the table has a section for each."""
    query, key, value = totals
    width = query.shape[3]
    launch(add_rows_kernel, (triton.cdiv(pieces[0].numel() // width, ROWS), 3),
        *totals, *pieces, table, index, len(table) // 3, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        BM=ROWS, D=width, DP=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def gather(
    rows: Tensor,
    grads: Tensor,
    lse: Tensor,
    table: Tensor,
    index: int,
    size: tuple[int, int, int],
    strides: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """A piece's rows of the output and of its gradient, with these strides, and of the lse, contiguous."""
    width = rows.shape[3]
    packed, packed_grads = (
        torch.empty_strided((*size, width), strides, dtype=rows.dtype, device=rows.device) for _ in range(2)
    )
    packed_lse = torch.empty(size, dtype=lse.dtype, device=rows.device)
    launch(gather_rows_kernel, (triton.cdiv(packed_lse.numel(), ROWS),),
        rows, grads, lse, packed, packed_grads, packed_lse, table, index,
        *rows.stride()[:3], *grads.stride()[:3], *lse.stride(),
        BM=ROWS, D=width, DP=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return packed, packed_grads, packed_lse


@triton.jit
def rows_of_piece(entry, BM: tl.constexpr):
    """For a program's rows: batch, head, token, place in the piece, whether they exist, and how many share each."""
    batches = tl.load(entry + 1).to(tl.int32)
    batch_outer = tl.load(entry + 2).to(tl.int32)
    batch_inner = tl.load(entry + 3).to(tl.int32)
    segments = tl.load(entry + 6).to(tl.int32)
    heads = tl.load(entry + 9).to(tl.int32)
    length = tl.load(entry + 13).to(tl.int32)
    members = tl.load(entry + 17).to(tl.int32)
    outer_count = segments * tl.where(batch_outer > 0, batches, 1)
    inner_count = heads * tl.where(batch_inner > 0, batches, 1) // members
    slot = tl.program_id(0) * BM + tl.arange(0, BM)
    line = slot // length
    row = slot - line * length
    outer = line // inner_count
    inner = (line - outer * inner_count) * members
    own_batch = tl.where(batch_outer > 0, outer // segments, 0) + tl.where(batch_inner > 0, inner // heads, 0)
    segment = (outer - own_batch * batch_outer).to(tl.int64)
    index = (inner - own_batch * batch_inner).to(tl.int64)
    row = row.to(tl.int64)
    token = tl.load(entry + 4) + segment * tl.load(entry + 5) + row * tl.load(entry + 12)
    token += tl.load(entry + 10) + index * tl.load(entry + 11)
    head = tl.load(entry + 7) + index * tl.load(entry + 8)
    batch = tl.load(entry) + own_batch
    place = outer * tl.load(entry + 14) + inner * tl.load(entry + 15) + row * tl.load(entry + 16)
    # Rows begin at multiples of 16 bytes, which the compiler cannot see through the table.
    return batch, head, token, tl.multiple_of(place, 8), outer < outer_count, members


@triton.jit(do_not_specialize=["index"])
def merge_rows_kernel(
    p_out, p_lse, p_piece, p_piece_lse, p_table, index, so_b, so_h, so_n, sl_b, sl_h, sl_n,
    BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """One program joins a stretch of one piece's rows to the output."""
    batch, head, token, place, held, _ = rows_of_piece(p_table + index * WIDTH, BM)
    column = tl.arange(0, DP)[None, :]
    mask = held[:, None] & (column < D)
    slot = tl.program_id(0) * BM + tl.arange(0, BM)
    p_slots = p_lse + batch * sl_b + head * sl_h + token * sl_n
    to = tl.multiple_of(batch * so_b + head * so_h + token * so_n, 8)
    p_rows = p_out + to[:, None] + column
    before = tl.load(p_slots, mask=held, other=0.0)
    added = tl.load(p_piece_lse + slot, mask=held, other=0.0)
    b_rows = tl.load(p_rows, mask=mask, other=0.0).to(tl.float32)
    b_piece = tl.load(p_piece + place[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    larger = tl.maximum(before, added)
    lse = larger + tl.log(tl.exp(before - larger) + tl.exp(added - larger))
    b_rows = b_rows * tl.exp(before - lse)[:, None] + b_piece * tl.exp(added - lse)[:, None]
    tl.store(p_rows, b_rows.to(p_out.dtype.element_ty), mask=mask)
    tl.store(p_slots, lse, mask=held)


@triton.jit
def add_rows(p_total, p_piece, entry, st_b, st_h, st_n, BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Add a stretch of one piece's rows to one tensor."""
    batch, head, token, place, held, members = rows_of_piece(entry, BM)
    stride_inner = tl.load(entry + 15)
    column = tl.arange(0, DP)[None, :]
    mask = held[:, None] & (column < D)
    to = tl.multiple_of(batch * st_b + head * st_h + token * st_n, 8)
    p_rows = p_total + to[:, None] + column
    b_rows = tl.load(p_rows, mask=mask, other=0.0).to(tl.float32)
    for member in range(members):
        share = tl.multiple_of(place + member * stride_inner, 8)
        b_rows += tl.load(p_piece + share[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_rows, b_rows.to(p_total.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["index", "sections"])
def add_rows_kernel(
    p_query, p_key, p_value, p_query_piece, p_key_piece, p_value_piece, p_table, index, sections,
    sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n,
    BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """One program adds a stretch of one piece's rows to one of the three gradients."""
    side = tl.program_id(1)
    entry = p_table + (side * sections + index) * WIDTH
    # A pointer chosen at run time would lose what the compiler knows of its alignment.
    if side == 0:
        add_rows(p_query, p_query_piece, entry, sq_b, sq_h, sq_n, BM, D, DP)
    elif side == 1:
        add_rows(p_key, p_key_piece, entry, sk_b, sk_h, sk_n, BM, D, DP)
    else:
        add_rows(p_value, p_value_piece, entry, sv_b, sv_h, sv_n, BM, D, DP)


@triton.jit(do_not_specialize=["index"])
def gather_rows_kernel(
    p_rows, p_grads, p_lse, p_packed, p_packed_grads, p_packed_lse, p_table, index,
    sr_b, sr_h, sr_n, sg_b, sg_h, sg_n, sl_b, sl_h, sl_n,
    BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """One program copies a stretch of one piece's rows."""
    batch, head, token, place, held, _ = rows_of_piece(p_table + index * WIDTH, BM)
    column = tl.arange(0, DP)[None, :]
    mask = held[:, None] & (column < D)
    slot = tl.program_id(0) * BM + tl.arange(0, BM)
    to = place[:, None] + column
    source = tl.multiple_of(batch * sr_b + head * sr_h + token * sr_n, 8)
    b_rows = tl.load(p_rows + source[:, None] + column, mask=mask, other=0.0)
    source = tl.multiple_of(batch * sg_b + head * sg_h + token * sg_n, 8)
    b_grads = tl.load(p_grads + source[:, None] + column, mask=mask, other=0.0)
    b_lse = tl.load(p_lse + batch * sl_b + head * sl_h + token * sl_n, mask=held, other=0.0)
    tl.store(p_packed + to, b_rows, mask=mask)
    tl.store(p_packed_grads + to, b_grads, mask=mask)
    tl.store(p_packed_lse + slot, b_lse, mask=held)
