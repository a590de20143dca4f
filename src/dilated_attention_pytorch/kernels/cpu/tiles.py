"""Any plan in plain torch: gather a few tiles, compute them densely, merge by LSE.

The rows of a part are taken in chunks of similar length, and long lists in pieces, so that one step stays within
`BUDGET` bytes. A step is ordinary attention on gathered tiles; what it finds merges into the rows' running
(output, LSE), which is why neither the order nor the size of the steps shows in the result.

Shapes: b batch, r rows (query tiles) of a step, l list entries of a step, B block size, x real query tokens of a step.
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
    Extent,
    Forward,
    Gradients,
    cap_slope,
    capped,
    empty_rows,
    wide_copies,
    zero_gradients,
)
from .nan_safe import contained_matmul

RUNS_OF_ROWS = True
SOFTCAP = True
BUDGET = 64 * 2**20
"""Bytes one step may take."""


class _Step(NamedTuple):
    """Some query tiles of one head and some of the key tiles each of them meets."""

    head: int
    group: int
    rows: Tensor
    """int64 (r, B): query tokens, 0 where they do not exist"""
    real: Tensor
    """bool (r, B): which of them exist"""
    columns: Tensor
    """int64 (r, l * B): key tokens, 0 where they do not exist"""
    seen: Tensor
    """bool (b or 1, r, B, l * B)"""
    query: Tensor
    key: Tensor
    value: Tensor
    kept: Tensor | None
    """(b, r, B, l * B): 1 / (1 - p) where dropout keeps the weight, else 0"""

    def scores(self, call: AttentionCall) -> Tensor:
        return capped(call.scale * (self.query @ self.key.mT), call.softcap).masked_fill_(~self.seen, -torch.inf)


def why_not(call: AttentionCall) -> str | None:
    """Why plain torch on the CPU cannot run the call."""
    if call.device.type != "cpu":
        return f"needs a CPU tensor, got {call.device}"
    return None


def workspace(call: AttentionCall, direction: str, extent: Extent) -> int:
    """Upper bound of the bytes besides results; see `registry.Backend`."""
    tiles = extent.pairs
    if tiles is None:
        tiles = max((max(head_entries(part)) for part in call.plan.parts), default=0)
    a_tile = _tile_bytes(call, extent.samples)
    # Masks and intermediate products take as much again as a step.
    return wide_copies(call, direction, extent) + 2 * min(max(BUDGET, a_tile), tiles * a_tile)


def _tile_bytes(call: AttentionCall, batch: int) -> int:
    """Bytes of a tile pair: scores, weights and their gradients, and the gathered rows of K, V and their gradients."""
    size, width = call.plan.block_size, call.query.shape[3] + call.value.shape[3]
    squares = 6 if call.softcap else 4
    return batch * size * (squares * size + 2 * width) * call.compute_dtype.itemsize


def forward(call: AttentionCall) -> Forward:
    """Output and LSE, step by step."""
    batch, heads, n, _ = call.query.shape
    output = empty_rows(call.query, call.value.shape[-1], call.compute_dtype).zero_()
    lse = torch.full((batch, heads, n), -torch.inf, dtype=call.compute_dtype, device="cpu")
    for step in _steps(call):
        scores = step.scores(call)
        found_lse = scores.logsumexp(-1)
        weights = torch.where(step.seen, (scores - found_lse[..., None]).exp_(), 0.0)
        if step.kept is not None:
            weights *= step.kept
        found = contained_matmul(weights, step.value, step.seen)
        place = (slice(None), step.head, step.rows[step.real])
        _merge(output, lse, place, found[:, step.real], found_lse[:, step.real])
    return Forward(output.to(call.query.dtype), lse)


def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients from the joint LSE, step by step."""
    dtype = call.compute_dtype
    grads = grad_query, grad_key, grad_value = zero_gradients(call)
    for step in _steps(call):
        place = (slice(None), step.head, step.rows)
        row_grad = torch.where(step.real[..., None], grad_output[place].to(dtype), 0.0)
        delta = (row_grad * output[place].to(dtype)).sum(-1)
        if grad_lse is not None:
            delta -= grad_lse[place].to(dtype)
        row_lse = lse[place]
        # Query elements past the end stand in for token 0, and an LSE of -inf marks a row without a key, as in the
        # other kernels: the weights of both are 0 and must not reach any key.
        seen = step.seen & (step.real & (row_lse != -torch.inf))[..., None]
        scores = step.scores(call)
        weights = torch.where(seen, (scores - row_lse[..., None]).exp_(), 0.0)
        grad_weights = row_grad @ step.value.mT
        dropped = weights
        if step.kept is not None:
            dropped = weights * step.kept
            grad_weights *= step.kept
        grad_scores = torch.where(seen, weights * grad_weights.sub_(delta[..., None]), 0.0) * call.scale
        if call.softcap:
            grad_scores *= cap_slope(scores, seen, call.softcap)
        found = contained_matmul(grad_scores, step.key, seen)[:, step.real]
        grad_query[:, step.head].index_add_(1, step.rows[step.real], found)
        columns = step.columns.flatten()
        found = contained_matmul(grad_scores.mT, step.query, seen.mT)
        grad_key[:, step.group].index_add_(1, columns, found.flatten(1, 2))
        found = contained_matmul(dropped.mT, row_grad, seen.mT)
        grad_value[:, step.group].index_add_(1, columns, found.flatten(1, 2))
    return Gradients(*(grad.to(call.query.dtype) for grad in grads))


def _merge(output: Tensor, lse: Tensor, place: tuple[slice, int, Tensor], found: Tensor, found_lse: Tensor) -> None:
    """Fold one more group of keys, (b, x, e) and (b, x), into the running softmax of the rows at `place`."""
    before = lse[place]
    after = torch.logaddexp(before, found_lse)
    empty = after == -torch.inf
    old_share = torch.where(empty, 0.0, (before - after).exp())
    share = torch.where(empty, 0.0, (found_lse - after).exp())
    output[place] = output[place] * old_share[..., None] + found * share[..., None]
    lse[place] = after


def _steps(call: AttentionCall) -> Iterator[_Step]:
    tiles = max(1, BUDGET // _tile_bytes(call, len(call.query)))
    for part in call.plan.parts:
        _, tile, mask = part.by_query.entries()
        count = torch.add(*part.by_query.counts())
        first = count.cumsum(0) - count
        for head, kind in enumerate(part.head_class.tolist()):
            if kind < 0:
                continue
            own = slice(kind * part.queries.tiles, (kind + 1) * part.queries.tiles)
            # Rows of similar length share a step, so that little of it is filler. How much is up to a row's own length:
            # the others', which what comes later may change, must not show in the last bit of its sums.
            lengths = _rounded_up(count[own])
            for length in lengths[lengths > 0].unique().tolist():
                width = min(length, tiles)
                for rows in (lengths == length).nonzero()[:, 0].split(max(1, tiles // length)):
                    for begin in range(0, length, width):
                        slot = first[own][rows, None] + torch.arange(begin, min(begin + width, length), device="cpu")
                        listed = slot < (first + count)[own][rows, None]
                        slot = slot.where(listed, 0)
                        # Filler entries repeat some listed tile and are masked out whole.
                        yield _gather(call, part, head, rows, tile[slot], mask[slot], listed)


def _rounded_up(length: Tensor) -> Tensor:
    """To one of four lengths between powers of two."""
    step = 2 ** ((length - 1).clamp(min=1).log2().floor().long() - 2).clamp(min=0)
    return (length + step - 1) // step * step


def _gather(
    call: AttentionCall, part: Part, head: int, rows: Tensor, tile: Tensor, mask: Tensor, listed: Tensor
) -> _Step:
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
    kept = None
    if call.dropout_p:
        assert call.seed is not None
        stream = torch.arange(call.query.shape[0], device="cpu")[:, None, None, None] * heads + head
        at, key_at = q_token, k_token
        if call.positions is not None:
            at, key_at = call.positions[0, head, q_token], call.positions[1, head, k_token]
        keep = dropout.kept(call.seed, stream, at[..., None], key_at[:, None, :], call.dropout_p)
        kept = keep.to(dtype) / (1 - call.dropout_p)
    query = call.query[:, head, q_token].to(dtype)
    key, value = (x[:, group, k_token].to(dtype) for x in (call.key, call.value))
    return _Step(head, group, q_token, real, k_token, seen, query, key, value, kept)


def _expand(masks: Masks, mask: Tensor, size: int) -> Tensor:
    """Which pairs each list entry allows, bool (r, l, B, B); entries met whole (mask -1) allow all."""
    whole = (mask < 0)[..., None, None]
    if bool(whole.all()):
        return whole.expand(*mask.shape, size, size)
    words = masks.bits[mask.clamp(min=0)]
    flat = ((words[..., None] >> torch.arange(32, dtype=torch.int32, device="cpu")) & 1).bool().flatten(-2)
    return flat[..., :size] | whole
