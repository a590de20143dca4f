"""Learned sinks: one more logit per head in the denominator of every row, without a value."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_sink(output: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Output of a softmax with one more logit per head, from the output and LSE of the softmax without it.

    With `total = exp(lse)`, a row becomes `output * total / (total + exp(sink))`. The LSE stays that of the keys.

    Args:
        output: (B, H, N, E).
        lse: (B, H, N), natural logarithm; -inf for a row without keys, whose result is 0.
        sink: (H,).

    Returns:
        (B, H, N, E) in the dtype of `output`, computed in float32 (float64 for float64).
    """
    dtype = torch.promote_types(output.dtype, torch.float32)
    seen = lse != -torch.inf
    # Without the inner `where`, -inf minus a sink of -inf is NaN, and so is its gradient.
    share = torch.sigmoid(torch.where(seen, lse, 0.0).to(dtype) - sink.to(dtype)[:, None])
    return (output.to(dtype) * torch.where(seen, share, 0.0)[..., None]).to(output.dtype)
