"""Matrix products that contain NaN and infinity.

A masked weight is exactly 0, but 0 * NaN is NaN: a plain matrix product would spread one bad row of `values` to every
row of the result. Here it reaches only the rows that see it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def contained_matmul(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """`weights @ values` where entry (i, k) of `weights` counts only if `seen[i, k]`; weights not seen must be 0.

    weights (..., I, K) · values (..., K, E) · seen bool, broadcastable to weights
    """
    product = weights @ values
    bad = ~values.isfinite()
    if not bool(bad.any()):
        return product
    reached = seen.expand_as(weights).to(weights.dtype) @ bad.to(weights.dtype)
    return torch.where(reached > 0, float("nan"), weights @ values.masked_fill(bad, 0.0))
