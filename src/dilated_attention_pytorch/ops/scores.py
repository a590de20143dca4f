"""Scores of some rows with gradients in a handful of launches, where kernels compute what they are made of.

Shapes: b batch, h heads, t blocks, u sub-blocks of a block, r rows, d width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import triton_backend
from ..kernels.selection import WIDEST_MATCH, no_kernels
from ..plan.selected import may_read

MOST_BLOCKS = 1024
"""Blocks up to which all matches of the rows with every block are held at once."""


class Seen(NamedTuple):
    """What the factors of scores were made from."""

    means: Tensor
    """(b, h, t, d): of query blocks"""
    summary: Tensor
    """(b, h, t, 3 d): of key blocks"""
    units: Tensor
    """(b, h, t, u, d): of key blocks"""


def by_kernels(query: Tensor, rank: int, seen: Seen) -> bool:
    """Whether `RowScores` can be asked for."""
    able = not may_read(query.device) and no_kernels(query.device) is None and query.dtype in triton_backend.DTYPES
    # What kernels teach is of all blocks; who cannot be taught by kernels is asked for listed ones.
    able = able and query.shape[-1] <= triton_backend.WIDEST
    return able and 0 < rank <= WIDEST_MATCH and seen.means.shape[2] <= MOST_BLOCKS


class RowScores(torch.autograd.Function):
    """Scores over temperature (b, h, r, t) of some rows with all blocks.

    Given are the weights of every head's first layer, their biases, those of the second, the mixture of summaries, both
    projections of the match and the logarithm of temperatures, to which alone gradients go; then the factors, what they
    were made from, the first layer's weights as one, the rows, tokens of a block, and whether rows are tokens.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        from ..kernels.triton_selection import scoring

        factors, _, _, rows, block_size, per_token = ctx.told = given[-6:]
        # Lessons are on few rows, and what is learned from is not rounded.
        scores = scoring(factors._replace(rounds=False), block_size, per_token, is_causal=False)(rows)
        ctx.save_for_backward(*given[-10:-6], scores, rows)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from ..kernels.triton_row_scores import parameter_gradients

        mixture, _, _, _, scores, rows = ctx.saved_tensors
        factors, seen, first, _, block_size, per_token = ctx.told
        size = block_size if per_token else 1
        found = parameter_gradients(grads[0], scores, rows, factors, seen, first, mixture, size)
        layers = [one for alike in found[:4] for one in alike.unbind()]
        return *layers, *found[4:], *(None,) * 6
