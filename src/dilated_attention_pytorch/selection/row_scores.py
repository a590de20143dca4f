"""Scores of the rows of a distillation batch by Triton kernels, with gradients and without a graph.

Shapes: b batch, h heads, t blocks, r rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.derivatives import once_differentiable


class RowScores(torch.autograd.Function):
    """Scores over temperature (b, h, r, t) of rows with all blocks.

    Inputs with gradients, stacked over heads: weights and biases of the first layer and of the second, the mixture of
    summaries, both projections of the match, logarithms of temperatures. Inputs without gradients: `Factors`, the
    `ScoreInputs` of the factors, the scored rows, and how many of them belong to a block.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        from .kernels.block_scores import scoring

        factors, _, rows, block_rows = ctx.settings = given[8:]
        # Few rows are distilled, and their scores are not rounded.
        scores = scoring(factors._replace(rounds=False), block_rows, is_causal=False)(rows)
        # Saved, so that autograd detects an update of the parameters between both passes.
        ctx.save_for_backward(*given[:8], scores, rows)
        return scores

    @staticmethod
    @once_differentiable("the scorer")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from .kernels.score_gradients import parameter_gradients

        first, _, _, _, mixture, _, _, _, scores, rows = ctx.saved_tensors
        factors, inputs, _, block_rows = ctx.settings
        return *parameter_gradients(grads[0], scores, rows, factors, inputs, first, mixture, block_rows), *(None,) * 4
