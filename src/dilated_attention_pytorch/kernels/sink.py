"""Learned sinks: one more logit per head in the denominator of every row, without a value.

Rows of the output are `sum e^s v / (sum e^s + e^sink)`; the LSE of a call excludes the sink. The backward kernels of
calls without a sink compute the gradients of query, key and value, given the output with the sink and the LSE with the
sink: the weights `e^(s - total)` and `delta = rowsum(dO * O)` are then those of the call. The gradient of the sink is
`-sum e^(sink - total) delta`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .call import AttentionCall, DeltaGradients, Gradients, Runner


def sink_share(lse: Tensor, sink: Tensor) -> Tensor:
    """Share of the keys in the denominators, (B, H, N): `sigmoid(lse - sink)`, 0 for rows without keys."""
    dtype = torch.promote_types(lse.dtype, torch.float32)
    seen = lse != -torch.inf
    # Without the inner `where`, -inf minus a sink of -inf is NaN, and so is its gradient.
    distance = torch.where(seen, lse, 0.0).to(dtype) - sink.to(dtype)[:, None]
    # On a CPU the last bit of torch's sigmoid depends on the place in the tensor, so chunks and shards would differ.
    share = distance.double().sigmoid().to(dtype) if lse.device.type == "cpu" else distance.sigmoid()
    return torch.where(seen, share, 0.0)


def apply_sink(output: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Output of a softmax with one more logit per head, from the output and LSE of the softmax without it.

    For results that several calls contribute to; `attention` itself hands the sink to the backend.

    Args:
        output: (B, H, N, E).
        lse: (B, H, N), natural logarithm; -inf for a row without keys, whose result is 0.
        sink: (H,).

    Returns:
        (B, H, N, E) in the dtype of `output`, computed in float32 (float64 for float64).
    """
    share = sink_share(lse.to(torch.promote_types(output.dtype, torch.float32)), sink)
    return (output.to(share.dtype) * share[..., None]).to(output.dtype)


def scale_by_sink(output: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """`apply_sink` in the memory of the output."""
    share = sink_share(lse, sink)[..., None]
    if output.is_cuda:
        return torch.mul(output, share, out=output)
    # A CPU converts whole tensors, here those of a head.
    for rows, own in zip(output.unbind(1), share.unbind(1), strict=True):
        torch.mul(rows, own, out=rows)
    return output


class CallGradients(NamedTuple):
    """Results of the backward pass of a call with its sink."""

    inputs: Gradients
    sink: Tensor | None
    """(H,), in the dtype of the sink; None for a call without a sink"""


def backward_with_sink(
    runner: Runner, call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> CallGradients:
    """`runner.backward` of a call that may have a sink, from its output and the LSE that excludes the sink."""
    if call.sink is None:
        return CallGradients(runner.backward(call, output, lse, grad_output, grad_lse), None)
    # Finite from below: in rows without keys, whose LSE is -inf, a difference of infinities would be NaN.
    sink = call.sink.to(lse.dtype).clamp(min=torch.finfo(lse.dtype).min)[:, None]
    if grad_lse is None:
        total, slope = torch.logaddexp(lse, sink), None
    else:
        # A large sink makes the weights small and the slope large. The distance of the sink is bounded in rows with a
        # slope, so that neither leaves the range of the dtype.
        has_slope = (lse != -torch.inf) & (grad_lse != 0)
        nearer = torch.minimum(sink, lse - 0.5 * math.log(torch.finfo(lse.dtype).tiny))
        total = torch.logaddexp(lse, torch.where(has_slope, nearer, sink))
        slope = torch.where(has_slope, grad_lse * (total - lse).exp(), 0.0)
        call = call if call.bias is None else replace(call, keys_lse_grad=grad_lse)
    grads = runner.backward(call, output, total, grad_output, slope)
    delta = grads.delta if isinstance(grads, DeltaGradients) else None
    if delta is None or slope is not None:
        # Delta contains the slope; beside a large one, rowsum(dO * O) is lost in rounding.
        delta = row_products(output, grad_output, lse.dtype)
    # The output of a row without keys is 0, and so is its delta.
    share = torch.sub(sink, lse).sigmoid_()
    return CallGradients(grads, share.mul_(delta).sum((0, 2)).neg_().to(call.sink.dtype))


def row_products(output: Tensor, grad_output: Tensor, dtype: torch.dtype) -> Tensor:
    """rowsum(dO * O), (B, H, N), in a dtype; one head at a time, as both are converted."""
    pairs = zip(output.unbind(1), grad_output.unbind(1), strict=True)
    return torch.stack([torch.linalg.vecdot(rows.to(dtype), grads.to(dtype)) for rows, grads in pairs], 1)
