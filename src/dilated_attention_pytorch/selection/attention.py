"""Attention over a selection: exact attention on blocks that a tensor lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import must
from ..kernels.call import Forward
from ..kernels.dropout import fresh_seed
from ..ops.attention import autocasted, empty_attention, readable
from ..ops.checks import check_masks, check_tensors
from ..ops.derivatives import check_reverse_mode, once_differentiable, scale_of
from ..ops.merge import AttentionOutput
from ..shapes import Key, KeyPadding, Query, Value
from .attend import BlockAttend, TokenAttend, fold, unfold
from .backend import choose_attend, distill, distill_inputs, score_rows
from .scores import BlockScores
from .types import DistillBatch, Selection

LONGEST_WEIGHTED = 8192


@torch.compiler.disable
def selected_attention(
    query: Query,
    key: Key,
    value: Value,
    selection: Selection,
    *,
    scale: float | None = None,
    key_padding_mask: KeyPadding | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    distill_batch: DistillBatch | None = None,
    scores: BlockScores | tuple[Tensor | None, Tensor | None] | None = None,
) -> AttentionOutput:
    """Exact attention over the blocks of a selection, differentiable in query, key and value.

    Args:
        query: (B, H, N, D).
        key: (B, G, N, D), G = H or a divisor of it.
        value: (B, G, N, E).
        selection: blocks that each row sees.
        scale: factor on the scores; 1 / sqrt(D) by default.
        key_padding_mask: bool (B, N), True where a key takes no part.
        dropout_p: probability of dropping a weight.
        backend: "auto" or a name from `backends()`.
        distill_batch: rows on which a scorer is distilled in the backward pass.
        scores: of the batch's rows: a `BlockScores`, evaluated after attention has been launched, or the scores
            (B, H, rows, k) of the blocks listed for the chosen rows and (B, H, rows, T) of all blocks for the dense
            rows. They receive gradients in the backward pass whatever the loss is.
    """
    query, key, value = autocasted(query, key, value)
    check_tensors(query, key, value, enable_gqa=True)
    check_masks(query, key_padding_mask, None)
    check_reverse_mode(query, key, value)
    scale = scale_of(scale, query.shape[-1])
    _check_selection(query, selection)
    seed = fresh_seed(query.device) if dropout_p > 0 else None
    if not query.shape[0] or not query.shape[2]:
        return AttentionOutput(*empty_attention(query, key, value))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    distilled = None if distill_batch is None else distill_batch.rows[: distill_batch.chosen]
    settings = selection, scale, key_padding_mask, dropout_p, seed, backend, distilled
    attend = choose_attend(query, key, value, *settings)
    with torch.no_grad():
        result = attend.forward(query, key, value)
    if isinstance(scores, BlockScores):
        assert distill_batch is not None
        scores = score_rows(scores, distill_batch, selection.indices)
    given = (None, None) if scores is None else scores
    return AttentionOutput(*_Selected.apply(query, key, value, *given, result, attend, distill_batch))


def _check_selection(query: Tensor, selection: Selection) -> None:
    batch, heads, n, _ = query.shape
    rows = n if selection.per_token else -(-n // selection.block_size)
    if selection.n != n or selection.indices.shape[:3] != (batch, heads, rows):
        raise must(
            f"the selection must be for {batch} samples, {heads} heads and {n} tokens",
            f"indices {tuple(selection.indices.shape)} for {selection.n} tokens",
        )


class _Selected(torch.autograd.Function):
    """Attention already computed, with its backward; gradients of scores come from distillation, not from the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        chosen_scores: Tensor | None,
        dense_scores: Tensor | None,
        result: Forward,
        attend: BlockAttend | TokenAttend,
        batch: DistillBatch | None,
    ) -> tuple[Tensor, Tensor]:
        output, lse = result
        ctx.attend, ctx.batch = attend, batch
        ctx.set_materialize_grads(False)
        saved = query, key, value, chosen_scores, dense_scores, output, lse, attend.listed_lse
        ctx.save_for_backward(*saved)
        return output, lse

    @staticmethod
    @once_differentiable("selected_attention")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        grad_output, grad_lse = grads
        query, key, value, chosen_scores, dense_scores, output, lse, listed_lse = ctx.saved_tensors
        attend: BlockAttend | TokenAttend = ctx.attend
        selection = attend.selection
        # Kernels read a contiguous LSE: of concatenated samples where rows are blocks.
        rows_lse = lse if selection.per_token else fold(lse)
        query, key, value, output, rows_lse = readable(query, key, value, output, rows_lse)
        lse = rows_lse if selection.per_token else unfold(rows_lse, query)
        if grad_output is None and grad_lse is None:
            return (None,) * 8
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        grad_output = grad_output if grad_output.stride(-1) == 1 else grad_output.contiguous()
        result: tuple[Tensor | None, ...] = (None,) * 3
        if any(ctx.needs_input_grad[:3]):
            result = attend.backward(query, key, value, output, lse, grad_output, grad_lse)
        learned: tuple[Tensor | None, ...] = (None, None)
        if ctx.batch is not None:
            inputs = distill_inputs(query, key, selection, attend.scale, attend.key_padding_mask, listed_lse)
            learned = distill(inputs, ctx.batch, lse, grad_output, chosen_scores, dense_scores)
        return *result, *learned, *(None,) * 3


def weighted_attention(
    query: Query,
    key: Key,
    value: Value,
    selection: Selection,
    bias: Tensor,
    *,
    scale: float | None = None,
    key_padding_mask: KeyPadding | None = None,
) -> Tensor:
    """Dense attention over a selection with a bias (B, H, rows, T) on each block's scores, for n <= 8192.

    The gradient of the task's loss reaches the bias: the training signal of a scorer without distillation.
    """
    if selection.n > LONGEST_WEIGHTED:
        raise must(
            f"a weighted selection must have n <= {LONGEST_WEIGHTED}", selection.n, 'Use score_gradient="distill".'
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    token = torch.arange(selection.n, device=query.device)
    row = token if selection.per_token else token // selection.block_size
    block = token // selection.block_size
    seen = selection.allowed()[:, :, row][..., block]
    if selection.is_causal:
        seen = seen & (token <= token[:, None])
    if key_padding_mask is not None:
        seen = seen & ~key_padding_mask[:, None, None]
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = scale * query @ key.mT + bias[:, :, row][..., block]
    some = seen.any(-1, keepdim=True)
    weights = torch.where(seen, scores, -torch.inf).masked_fill(~some, 0.0).softmax(-1)
    return torch.where(seen & some, weights, 0.0).to(value.dtype) @ value
