"""Attention sinks: one more logit for each head in the softmax denominator, without a value."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_sink(output: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Output of attention whose softmax denominators contain exp(sink): `output * sigmoid(lse - sink)`.

    Differentiable in all three, computed in float32 or float64.

    Args:
        output: (B, H, N, E), attention without the sink.
        lse: (B, H, N), its natural-log LSE; a row of -inf gives 0.
        sink: (H,), one logit for each query head.
    """
    dtype = torch.promote_types(lse.dtype, torch.float32)
    # The branch that `where` drops must be finite, or its gradient would be 0 * NaN.
    seen = lse != -torch.inf
    logit = torch.where(seen, lse, 0.0).to(dtype) - sink.to(dtype)[:, None]
    share = torch.where(seen, logit.sigmoid(), 0.0)
    return (output.to(dtype) * share[..., None]).to(output.dtype)
