"""CPU backend in torch operations for any plan: gather tiles, compute them densely, sum by the largest score.

Rows of a part are processed in chunks of similar length, and long lists in pieces, so that a step stays within
`BUDGET` bytes. A step is dense attention on gathered tiles, whose result is added to the running sums of its rows; the
result is therefore independent of the order and size of the steps.

Shapes: b batch, r rows (query tiles) of a step, l list entries of a step, B block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...plan.plan import Masks, Part
from ...plan.subset import head_entries
from .. import dropout
from ..call import (
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
from .nan_safe import contained_matmul

RUNS_OF_ROWS = True
SOFTCAP = BIAS = True
BUDGET = 64 * 2**20
"""Most bytes of a step."""


class _TilePairs(NamedTuple):
    """Query tiles of one head, and some of the key tiles in the list of each."""

    head: int
    group: int
    rows: Tensor
    """int64 (r, B): query tokens, 0 for tokens that do not exist"""
    real: Tensor
    """bool (r, B): whether a query token exists"""
    columns: Tensor
    """int64 (r, l * B): key tokens, 0 for tokens that do not exist"""
    seen: Tensor
    """bool (b or 1, r, B, l * B)"""
    query: Tensor
    key: Tensor
    value: Tensor
    keep_scale: Tensor | None
    """(b, r, B, l * B): 1 / (1 - p) where dropout keeps the weight, else 0"""
    bias_index: Tensor | None
    """int64 (b or 1, r, B, l * B): entries of the bias table; None without one"""

    def products(self, call: AttentionCall) -> Tensor:
        return capped(call.scale * (self.query @ self.key.mT), call.softcap)

    def scores(self, call: AttentionCall, products: Tensor) -> Tensor:
        """Scores in the memory of the products, -inf where a pair is not seen."""
        if call.bias is not None:
            products += call.bias[self.head].flatten()[self.bias_index]
        return products.masked_fill_(~self.seen, -torch.inf)


def why_not(call: AttentionCall) -> str | None:
    """Reason why the torch operations cannot run the call, or None."""
    if call.device.type != "cpu":
        return f"needs a CPU tensor, got {call.device}"
    return None


def workspace(call: AttentionCall, direction: str, extent: Extent) -> int:
    """Upper bound of the bytes besides results; see `registry.Backend`."""
    tiles = extent.pairs
    if tiles is None:
        tiles = max((max(head_entries(part)) for part in call.plan.parts), default=0)
    a_tile = _tile_bytes(call, extent.samples)
    # Masks and intermediate products double the memory of a step.
    return wide_copies(call, direction, extent) + 2 * min(max(BUDGET, a_tile), tiles * a_tile)


def _tile_bytes(call: AttentionCall, batch: int) -> int:
    """Bytes of a tile pair: scores, weights and their gradients, and the gathered rows of K, V and their gradients."""
    size, width = call.plan.block_size, call.query.shape[3] + call.value.shape[3]
    squares = 4 + 2 * bool(call.softcap) + 4 * (call.bias is not None)
    return batch * size * (squares * size + 2 * width) * call.compute_dtype.itemsize


@without_autocast
def forward(call: AttentionCall) -> Forward:
    """Output and LSE, step by step."""
    batch, heads, n, _ = call.query.shape
    output = empty_rows(call.query, call.value.shape[-1], call.compute_dtype).zero_()
    # The largest score of each row and the sum of its weights: an LSE of large scores, and shares from it, are rounded.
    top = torch.full((batch, heads, n), -torch.inf, dtype=call.compute_dtype, device="cpu")
    total = torch.zeros_like(top)
    for pairs in _tile_pairs(call):
        scores = pairs.scores(call, pairs.products(call))
        own = (slice(None), pairs.head, pairs.rows[pairs.real])
        before = top[:, pairs.head, pairs.rows]
        after = torch.maximum(before, scores.amax(-1))
        # The maximum of a row without a key so far is -inf, and -inf - -inf is NaN.
        shift = torch.where(after == -torch.inf, 0.0, after)
        weights = torch.where(pairs.seen, scores.sub_(shift[..., None]).exp_(), 0.0)
        old_share = (before - shift).exp_()[:, pairs.real]
        top[own] = after[:, pairs.real]
        total[own] = total[own] * old_share + weights.sum(-1)[:, pairs.real]
        if pairs.keep_scale is not None:
            weights *= pairs.keep_scale
        part = contained_matmul(weights, pairs.value, pairs.seen)
        output[own] = output[own] * old_share[..., None] + part[:, pairs.real]
    lse = top + total.log()
    if call.sink is not None:
        total += (call.sink.to(total.dtype)[:, None] - top.masked_fill_(top == -torch.inf, 0.0)).exp_()
    output /= total.masked_fill_(total == 0, 1.0)[..., None]
    return Forward(output.to(call.query.dtype), lse)


@without_autocast
def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients from the joint LSE, step by step."""
    dtype = call.compute_dtype
    grads = grad_query, grad_key, grad_value = zero_gradients(call)
    grad_bias = None if call.bias is None else torch.zeros_like(call.bias, dtype=torch.float64)
    for pairs in _tile_pairs(call):
        index = (slice(None), pairs.head, pairs.rows)
        row_grad = torch.where(pairs.real[..., None], grad_output[index].to(dtype), 0.0)
        delta = (row_grad * output[index].to(dtype)).sum(-1)
        if grad_lse is not None:
            delta -= grad_lse[index].to(dtype)
        row_lse = lse[index]
        # Query elements past the end alias token 0, and an LSE of -inf marks a row without a key: the weights of both
        # are 0 and must not reach any key.
        seen = pairs.seen & (pairs.real & (row_lse != -torch.inf))[..., None]
        products = pairs.products(call)
        slope = cap_slope(products, seen, call.softcap) if call.softcap else None
        scores = pairs.scores(call, products)
        weights = torch.where(seen, (scores - row_lse[..., None]).exp_(), 0.0)
        grad_weights = row_grad @ pairs.value.mT
        dropped = weights
        if pairs.keep_scale is not None:
            dropped = weights * pairs.keep_scale
            grad_weights *= pairs.keep_scale
        grad_scores = torch.where(seen, weights * grad_weights.sub_(delta[..., None]), 0.0)
        if pairs.bias_index is not None and grad_bias is not None:
            add_bias_gradient(grad_bias[pairs.head], pairs.bias_index, grad_scores)
        grad_scores *= call.scale
        if slope is not None:
            grad_scores *= slope
        grad = contained_matmul(grad_scores, pairs.key, seen)[:, pairs.real]
        grad_query[:, pairs.head].index_add_(1, pairs.rows[pairs.real], grad)
        columns = pairs.columns.flatten()
        grad = contained_matmul(grad_scores.mT, pairs.query, seen.mT)
        grad_key[:, pairs.group].index_add_(1, columns, grad.flatten(1, 2))
        grad = contained_matmul(dropped.mT, row_grad, seen.mT)
        grad_value[:, pairs.group].index_add_(1, columns, grad.flatten(1, 2))
    grads = Gradients(*(grad.to(call.query.dtype) for grad in grads))
    return grads if grad_bias is None else BiasedGradients(*grads, grad_bias.to(call.compute_dtype))


def _tile_pairs(call: AttentionCall) -> Iterator[_TilePairs]:
    tiles = max(1, BUDGET // _tile_bytes(call, len(call.query)))
    for part in call.plan.parts:
        _, tile, mask = part.by_query.entries()
        count = torch.add(*part.by_query.counts())
        first = count.cumsum(0) - count
        for head, kind in enumerate(part.head_class.tolist()):
            if kind < 0:
                continue
            own = slice(kind * part.queries.tiles, (kind + 1) * part.queries.tiles)
            # Rows of similar length share a step, which limits padding. The padded length depends on the row's own
            # length alone, so that other rows do not affect the last bit of its sums.
            lengths = _rounded_up(count[own])
            for length in lengths[lengths > 0].unique().tolist():
                width = min(length, tiles)
                for rows in (lengths == length).nonzero()[:, 0].split(max(1, tiles // length)):
                    for begin in range(0, length, width):
                        slot = first[own][rows, None] + torch.arange(begin, min(begin + width, length), device="cpu")
                        listed = slot < (first + count)[own][rows, None]
                        slot = slot.where(listed, 0)
                        # Padding entries repeat a listed tile and are masked out.
                        yield _gather(call, part, head, rows, tile[slot], mask[slot], listed)


def _rounded_up(length: Tensor) -> Tensor:
    """Length rounded up to one of four values between powers of two."""
    unit = 2 ** ((length - 1).clamp(min=1).log2().floor().long() - 2).clamp(min=0)
    return (length + unit - 1) // unit * unit


def _gather(
    call: AttentionCall, part: Part, head: int, rows: Tensor, tile: Tensor, mask: Tensor, listed: Tensor
) -> _TilePairs:
    heads, size = call.query.shape[1], call.plan.block_size
    group = head // (heads // call.key.shape[1])
    dtype = call.compute_dtype
    reach = torch.arange(size, device="cpu")
    q_token = part.queries.start[rows, None] + part.queries.offset[head] + part.queries.rate * reach
    real = q_token < part.queries.end[rows, None]
    k_token = part.keys.start[tile, None] + part.keys.offset[head] + part.keys.rate * reach
    there = (k_token < part.keys.end[tile, None]) & listed[..., None]
    q_token, k_token = q_token.where(real, 0), k_token.where(there, 0).flatten(1)

    allowed = _expand(call.plan.masks, mask, size) & there[:, :, None, :]
    seen = allowed.transpose(1, 2).flatten(2)[None]
    if call.key_padding_mask is not None:
        seen = seen & ~call.key_padding_mask[:, k_token][:, :, None, :]
    keep_scale = None
    if call.dropout_p:
        assert call.seed is not None
        stream = torch.arange(call.query.shape[0], device="cpu")[:, None, None, None] * heads + head
        at, key_at = q_token, k_token
        if call.positions is not None:
            at, key_at = call.positions[0, head, q_token], call.positions[1, head, k_token]
        keep = dropout.keep_mask(call.seed, stream, at[..., None], key_at[:, None, :], call.dropout_p)
        keep_scale = keep.to(dtype) / (1 - call.dropout_p)
    query = call.query[:, head, q_token].to(dtype)
    key, value = (x[:, group, k_token].to(dtype) for x in (call.key, call.value))
    index = None if call.bias is None else bias_index(call, q_token[..., None], k_token[:, None, :], head)
    return _TilePairs(head, group, q_token, real, k_token, seen, query, key, value, keep_scale, index)


def _expand(masks: Masks, mask: Tensor, size: int) -> Tensor:
    """Allowed pairs of each list entry, bool (r, l, B, B); entries with mask -1 allow all."""
    whole = (mask < 0)[..., None, None]
    if bool(whole.all()):
        return whole.expand(*mask.shape, size, size)
    words = masks.bits[mask.clamp(min=0)]
    flat = ((words[..., None] >> torch.arange(32, dtype=torch.int32, device="cpu")) & 1).bool().flatten(-2)
    return flat[..., :size] | whole
