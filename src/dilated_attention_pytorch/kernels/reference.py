"""Reference backend: the dense formula as defined, which every other backend is tested against.

It does not use tiles. The multiplicity m(q, k, head) comes from the pattern, and

    output = softmax(cap(scale * q k^T) + b + log m) v

is computed for a band of query rows at a time, so that memory is linear in n.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from . import dropout
from .call import (
    AttentionCall,
    BiasedGradients,
    Extent,
    Forward,
    Gradients,
    add_bias_gradient,
    bias_index,
    cap_slope,
    capped,
    empty_rows,
    wide_copies,
    without_autocast,
    zero_gradients,
)
from .cpu.nan_safe import contained_matmul

SOFTCAP = BIAS = True
LONGEST = 8192
ROWS = 1024
"""Query rows computed together."""


class _Counted(Protocol):
    def resolve(self, n: int, heads: int) -> _Counted: ...

    def multiplicity(self, q: Tensor, k: Tensor, head: int) -> Tensor: ...


class _Band(NamedTuple):
    """Band of query rows of one head. Shapes: b batch, r rows, n keys."""

    head: int
    group: int
    rows: slice
    query: Tensor
    """(b, r, d)"""
    key: Tensor
    """(b, n, d)"""
    value: Tensor
    """(b, n, e)"""
    seen: Tensor
    """bool (b, r, n)"""
    count: Tensor
    """(r, n): multiplicities"""
    scores: Tensor
    """(b, r, n), -inf where not seen"""
    keep_scale: Tensor | None
    """(b, r, n): 1 / (1 - p) where dropout keeps the weight, else 0"""
    slope: Tensor | None
    """(b, r, n): derivative of the softcap; None without one"""
    bias_index: Tensor | None
    """int64 (b or 1, r, n): entries of the bias table; None without one"""


def why_not(call: AttentionCall) -> str | None:
    """Reason why the dense computation cannot run the call, or None."""
    n = call.query.shape[2]
    if n > LONGEST:
        return f"n must be <= {LONGEST}, got {n}"
    if call.pattern is None:
        return "needs the pattern, got a plan alone"
    return None


def workspace(call: AttentionCall, direction: str, extent: Extent) -> int:
    """Upper bound of the bytes besides results; see `registry.Backend`."""
    n, wide = call.plan.n, call.compute_dtype.itemsize
    squares = 9 + 2 * bool(call.softcap) + 6 * (call.bias is not None)
    # A band is made while tensors of the one before it are alive, and 64-bit multiplicities beside it.
    squares *= 1 if extent.heads == 1 and n <= ROWS else 2
    return wide_copies(call, direction, extent) + squares * wide * extent.samples * min(n, ROWS) * n


@without_autocast
def forward(call: AttentionCall) -> Forward:
    """Output and LSE, a band of rows at a time."""
    batch, heads, n, _ = call.query.shape
    output = empty_rows(call.query, call.value.shape[-1])
    lse = call.query.new_empty(batch, heads, n, dtype=call.compute_dtype)
    for band in _bands(call):
        # Divided by their sum: an LSE of large scores is rounded, and with it every weight.
        top = band.scores.amax(-1)
        weights = _weights(band, top)
        total = weights.sum(-1)
        row_lse = torch.where(top == -torch.inf, top, top + total.log())
        if call.sink is not None:
            total = total + (call.sink[band.head] - torch.where(top == -torch.inf, 0.0, top)).exp()
        weights = weights / torch.where(total == 0, 1.0, total)[..., None]
        if band.keep_scale is not None:
            weights = weights * band.keep_scale
        output[:, band.head, band.rows] = contained_matmul(weights, band.value, band.seen).to(output.dtype)
        lse[:, band.head, band.rows] = row_lse
    return Forward(output, lse)


@without_autocast
def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients by the textbook formulas, a band of rows at a time."""
    dtype = call.compute_dtype
    grads = grad_query, grad_key, grad_value = zero_gradients(call)
    grad_bias = None if call.bias is None else torch.zeros_like(call.bias, dtype=torch.float64)
    for band in _bands(call):
        index = (slice(None), band.head, band.rows)
        row_grad = grad_output[index].to(dtype)
        delta = (row_grad * output[index].to(dtype)).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse[index].to(dtype)
        weights = _weights(band, lse[index])
        grad_weights = row_grad @ band.value.mT
        dropped = weights
        if band.keep_scale is not None:
            dropped = weights * band.keep_scale
            grad_weights = grad_weights * band.keep_scale
        grad_scores = torch.where(band.seen, weights * (grad_weights - delta[..., None]), 0.0)
        if band.bias_index is not None and grad_bias is not None:
            add_bias_gradient(grad_bias[band.head], band.bias_index, grad_scores)
        grad_scores *= call.scale
        if band.slope is not None:
            grad_scores *= band.slope
        grad_query[index] = contained_matmul(grad_scores, band.key, band.seen)
        grad_key[:, band.group] += contained_matmul(grad_scores.mT, band.query, band.seen.mT)
        grad_value[:, band.group] += contained_matmul(dropped.mT, row_grad, band.seen.mT)
    grads = Gradients(*(grad.to(call.query.dtype) for grad in grads))
    return grads if grad_bias is None else BiasedGradients(*grads, grad_bias.to(call.compute_dtype))


def _weights(band: _Band, row_lse: Tensor) -> Tensor:
    """count * exp(score - LSE), exactly 0 for masked pairs and in rows whose scores are all -inf (LSE -inf)."""
    row_lse = torch.where(row_lse == -torch.inf, 0.0, row_lse)
    return torch.where(band.seen, band.count * (band.scores - row_lse[..., None]).exp(), 0.0)


def _bands(call: AttentionCall) -> Iterator[_Band]:
    batch, heads, n, _ = call.query.shape
    dtype, device = call.compute_dtype, call.device
    pattern = cast(_Counted, call.pattern).resolve(n, heads)
    k = torch.arange(n, device=device)
    sample = torch.arange(batch, device=device)[:, None, None]
    for head in range(heads):
        group = head // (heads // call.key.shape[1])
        key, value = call.key[:, group].to(dtype), call.value[:, group].to(dtype)
        for first in range(0, n, ROWS):
            q = torch.arange(first, min(first + ROWS, n), device=device)
            rows = slice(first, first + len(q))
            count = torch.as_tensor(pattern.multiplicity(q[:, None], k[None, :], head), device=device)
            count = count.expand(len(q), n)
            seen = (count > 0).expand(batch, -1, -1)
            if call.key_padding_mask is not None:
                seen = seen & ~call.key_padding_mask[:, None, :]
            query = call.query[:, head, rows].to(dtype)
            scores = capped(call.scale * (query @ key.mT), call.softcap)
            slope = cap_slope(scores, seen, call.softcap) if call.softcap else None
            index = None
            if call.bias is not None:
                index = bias_index(call, q[:, None], k[None, :], head)
                scores = scores + call.bias[head].flatten()[index]
            scores = scores.masked_fill(~seen, -torch.inf)
            keep_scale = None
            if call.dropout_p:
                assert call.seed is not None
                at, key_at = (q, k) if call.positions is None else (call.positions[0, head, q], call.positions[1, head])
                keep = dropout.keep_mask(call.seed, sample * heads + head, at[:, None], key_at[None, :], call.dropout_p)
                keep_scale = keep.to(dtype) / (1 - call.dropout_p)
            yield _Band(head, group, rows, query, key, value, seen, count.to(dtype), scores, keep_scale, slope, index)
