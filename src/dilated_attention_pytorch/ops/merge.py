"""Joining softmaxes over parts of the keys into the softmax over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import must


class AttentionOutput(NamedTuple):
    """Output of attention and the logarithm of its denominators."""

    output: Tensor
    """(B, H, N, E)"""
    lse: Tensor
    """(B, H, N), natural logarithm; -inf for a row that saw no key"""


def shares_of(logs: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Shares of parts of the keys from their LSEs along `dim`, and the LSE over all parts.

    Shares sum to 1 although an LSE of large scores is rounded; in a row without a key they are 0.
    """
    top = logs.amax(dim, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = (logs - top).exp_()
    total = weights.sum(dim, keepdim=True)
    # NaN and +inf are kept: only a row without a key has a total of 0.
    lse = torch.where(total != 0, top + total.log(), -torch.inf)
    lse = torch.where(top == torch.inf, top, lse).squeeze(dim)
    return weights.div_(torch.where(total != 0, total, 1.0)), lse


def softmax_of_seen(scores: Tensor) -> Tensor:
    """Softmax over the last axis; 0 in rows whose scores are all -inf."""
    seen = (scores != -torch.inf).any(-1, keepdim=True)
    return torch.where(seen, torch.where(seen, scores, 0.0).softmax(-1), 0.0)


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> AttentionOutput:
    """Merge results over disjoint sets of keys; differentiable, in any order and grouping.

    >>> from dilated_attention_pytorch import Full, attention_with_lse, merge
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16).unbind()
    >>> whole = attention_with_lse(q, k, v, Full())
    >>> alone = merge([whole.output], [whole.lse])
    >>> torch.allclose(alone.output, whole.output)
    True
    """
    if len(outputs) != len(lses) or not outputs:
        raise must("merge must have as many outputs as lses, at least one", f"{len(outputs)} and {len(lses)}")
    for output, lse in zip(outputs, lses, strict=True):
        if output.shape[:-1] != lse.shape or output.shape != outputs[0].shape:
            raise must(
                "each lse must have its output's shape without the last dimension",
                f"{tuple(lse.shape)} for {tuple(output.shape)}",
            )
    logs = torch.stack([lse.to(torch.promote_types(lse.dtype, torch.float32)) for lse in lses])
    # A shift that carries no gradient: it cancels, and -inf rows must not turn into NaN.
    top = logs.detach().amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = (logs - top).exp()
    total = weights.sum(0)
    # NaN is kept: only a row without a key has a total of 0.
    seen = total != 0
    safe = torch.where(seen, total, 1.0)
    stacked = torch.stack([output.to(logs.dtype) for output in outputs])
    output = (weights[..., None] * stacked).sum(0) / safe[..., None]
    lse = torch.where(seen, safe.log() + top, -torch.inf)
    lse = torch.where(top == torch.inf, top, lse)
    return AttentionOutput(output.to(outputs[0].dtype), lse)
