"""Attention mass of blocks and its distillation into a scorer, in torch.

A scorer's distribution over a row's blocks is pulled towards the blocks' shares of attention: the gradient of the loss
KL(p || softmax(z)) of a row is softmax(z) - p, which needs no graph. A row's own block is always kept. It takes part,
with the logit 0, only where a coverage budget needs its share: otherwise the loss would be spent on the level of all
scores of a row, which does not change the choice.

The queries of a row weigh as much as the gradients of their outputs. Rows weigh the same, the mean norm of those
gradients in their sample and head: rows without a loss teach the scorer too. The gradient of a scorer is therefore
linear in that of the task: a loss divided by the number of micro-batches, or multiplied by a gradient scaler, acts on a
scorer as on every other parameter.

Shapes: b batch, h heads, r sampled rows (query blocks of q = B tokens, or tokens, q = 1), l blocks, n tokens, t blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.checks import full_precision
from .scores import BlockScores
from .types import DistillBatch, Selection

MOST_ROWS = 1024
"""Rows of all samples that are compared on their listed blocks in one step."""
ENOUGH = 256
"""Tokens of such rows that weigh as much as the rows compared on every block. Fewer weigh less in proportion: their
gradient would be noise to that of the others."""
FLOOR = 2.0**-10
"""Least weight of a query beside the mean: a row without gradients has a target, the mean of its queries'."""


@lru_cache(maxsize=64)
def _spacing(total: int, many: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Multiples of `total` for each count in `many`, and the count that divides each."""
    # Cached tensors created in inference mode could not be used in training.
    with torch.inference_mode(False):
        multiples = torch.cat([torch.arange(one, device=device) * total for one in many])
        return multiples, torch.cat([torch.full((one,), one, device=device) for one in many])


def sampled(total: int, many: int, start: Tensor, others: int = 0) -> Tensor:
    """`many` rows, then `others` rows, each drawn without repetition, ascending, int64.

    Rows are evenly spaced from `start`, itself drawn from [0, total), so each has the same probability.
    """
    multiples, parts = _spacing(total, (min(many, total), min(others, total)), start.device)
    return (multiples + start).floor_divide_(parts)


def draw_batch(
    scores: BlockScores,
    total: int,
    slots: int,
    dense_fraction: float,
    min_tokens: int,
    memory: int,
    weight: float,
    saliency: bool,
) -> DistillBatch:
    """Draw the rows on which the scorer is distilled in one step.

    Args:
        scores: of the rows.
        total: scored rows of the sequence.
        slots: blocks a row lists at most.
        dense_fraction: fraction of rows compared on every block; 0 for none.
        min_tokens: tokens of those rows, at least.
        memory: bytes for the scores of either kind of rows; fewer rows are drawn where they would take more.
        weight: of the loss.
        saliency: see `DistillBatch`.
    """
    batch, heads, t, units = scores.unit_there.shape
    hidden, kernels = scores.rows.shape[-1], scores.steps is not None and not scores.steps.records_graph
    # Hidden units and sub-blocks of a pair, and their gradients; each listed block has its own copy of the keys.
    a_listed, a_pair = (8 * batch * heads * (hidden + units * each) for each in (scores.rank, 1))
    size = scores.settings.row_unit
    if kernels:
        # Kernels hold a pair's score, its gradient, the best match, and the LSE of each query of a row.
        a_pair = 4 * batch * heads * (4 + size * scores.group)
    most = MOST_ROWS // batch
    start = torch.randint(total, (1,), device=scores.unit_there.device)
    chosen = min(total, max(1, min(most, memory // (a_listed * max(slots, 1)))))
    wanted = max(math.ceil(dense_fraction * total), min(total, -(-min_tokens // size))) if dense_fraction else 0
    dense = min(wanted, max(1, memory // (a_pair * t)))
    enough = min(1.0, batch * chosen * size / ENOUGH) if dense and chosen < total else 1.0
    rows = sampled(total, chosen, start, dense)
    more = {"chosen_weight": enough, "row_tokens": size, "with_own": scores.settings.budget.coverage is not None}
    return DistillBatch(rows, chosen, scores.visible, weight, saliency, total, **more)


class DistillInputs(NamedTuple):
    """Attention whose block mass is measured."""

    query: Tensor
    key: Tensor
    selection: Selection
    scale: float
    key_padding_mask: Tensor | None
    step: int
    """Scores, and elements of gathered keys, held at a time"""
    listed_lse: Tensor | None = None
    """(b, h, r, k): LSE of each listed block of the batch's chosen rows, if already computed"""
    row_tokens: int | None = None
    """See `DistillBatch`"""

    def tokens(self, rows: Tensor) -> Tensor:
        """Query tokens of rows, int64 (r, q); past the end in a ragged block."""
        size = self.row_queries
        return rows[:, None] * size + torch.arange(size, device=rows.device)

    def blocks(self, rows: Tensor) -> Tensor:
        """Block of each row."""
        return rows * self.row_queries // self.selection.block_size

    def lists(self, rows: Tensor) -> Tensor:
        """Listed blocks of rows, int64 (b, s, r, k)."""
        return self.selection.indices[:, :, self.selection.list_of(rows, self.row_tokens)].long()

    @property
    def row_queries(self) -> int:
        """Queries of a row."""
        return self.row_tokens or (1 if self.selection.per_token else self.selection.block_size)


class QueryWeights(NamedTuple):
    """Weights of queries, 0 for padding."""

    each: Tensor
    """(b, h, n): norm of the gradient of a query's output, plus `FLOOR` of the mean; 1 without saliency"""
    mean: Tensor | None
    """(b, h): mean norm; None without saliency"""

    def of_rows(self, sums: Tensor, queries: int, group: int) -> Tensor:
        """Weights of rows (b, s, r) of so many queries each, from the sums (b, h, r) of `each` over their queries.

        Rows of a sample and head weigh the same, as in the gradient, also where a ragged block has fewer queries.
        """
        same = torch.ones_like(sums) if self.mean is None else queries * self.mean[..., None]
        return summed_by_list(torch.where(sums > 0, same, 0.0), group)


def summed_by_list(x: Tensor, group: int) -> Tensor:
    """(b, h, ...) summed over the heads that share a list, (b, s, ...)."""
    return x if group == 1 else x.unflatten(1, (-1, group)).sum(2)


def query_weights(
    batch: DistillBatch,
    lse: Tensor,
    grad_output: Tensor,
    key_padding_mask: Tensor | None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> QueryWeights:
    """Weights of queries in the dtype of the LSE; `reduce` sums over the ranks that hold the other queries."""
    weights, mean = torch.ones_like(lse), None
    if batch.saliency:
        weights = torch.linalg.vector_norm(grad_output, dim=-1, dtype=lse.dtype)
        mean = mean_norms(weights, key_padding_mask, reduce)
        weights = weights + FLOOR * mean[..., None]
    weights = weights if key_padding_mask is None else weights.masked_fill(key_padding_mask[:, None], 0.0)
    return QueryWeights(weights, mean)


def mean_norms(
    norms: Tensor, key_padding_mask: Tensor | None, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Mean (b, h) of the norms (b, h, n) that are not of padding."""
    if key_padding_mask is None and reduce is None:
        return norms.mean(-1)
    real = torch.ones_like(norms)
    if key_padding_mask is not None:
        norms, real = (x.masked_fill(key_padding_mask[:, None], 0.0) for x in (norms, real))
    sums = torch.stack([norms.sum(-1), real.sum(-1)])
    total, many = (sums if reduce is None else reduce(sums)).unbind()
    return total / many.clamp(min=1)


def visible_blocks(inputs: DistillInputs, batch: DistillBatch) -> Tensor:
    """Blocks that may be predicted, bool (b, h, t): those of the batch, or with a key that is not padding."""
    if batch.visible is not None:
        return batch.visible
    s, padding = inputs.selection, inputs.key_padding_mask
    many, heads = s.indices.shape[:2]
    if padding is None:
        return torch.ones(many, heads, s.blocks, dtype=torch.bool, device=inputs.query.device)
    real = torch.nn.functional.pad(~padding, (0, s.blocks * s.block_size - s.n)).unflatten(1, (-1, s.block_size))
    return real.any(-1)[:, None].repeat(1, heads, 1)


def row_weights(inputs: DistillInputs, rows: Tensor, weights: Tensor) -> Tensor:
    """Sum of the weights of each row's queries (b, h, r); 0 where it is not finite."""
    token, n = inputs.tokens(rows), inputs.selection.n
    found = torch.where(token < n, weights[:, :, token.clamp(max=n - 1)], 0.0).sum(-1)
    return torch.where(found.isfinite(), found, 0.0)


def distill_gradients(
    inputs: DistillInputs,
    batch: DistillBatch,
    lse: Tensor,
    grad_output: Tensor,
    chosen_scores: Tensor | None,
    dense_scores: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the scores (b, s, r, k) of listed blocks and (b, s, r, t) of all blocks of the dense rows.

    The target of a row is the mass of its blocks in all heads that share its list. The loss is the sum of those of both
    kinds of rows, as recorded without `DistillBatch.chosen_weight`; see `DistillBatch.factor`.
    """
    losses: list[Tensor] = []
    grads: list[Tensor | None] = [None, None]
    given = query_weights(batch, lse, grad_output, inputs.key_padding_mask)
    weights, group = given.each, inputs.selection.group
    if chosen_scores is not None:
        rows = batch.chosen_rows
        lists = inputs.lists(rows)
        blocks = lists if group == 1 else lists.repeat_interleave(group, 1)
        own = inputs.blocks(rows).expand(blocks.shape[:3])
        if inputs.listed_lse is None:
            both = listed_mass(inputs, rows, torch.cat([own[..., None], blocks], -1), lse, weights)
            own_mass, mass = both.split([1, blocks.shape[-1]], -1)
        else:
            own_mass = listed_mass(inputs, rows, own[..., None], lse, weights)
            share = (inputs.listed_lse - lse[:, :, rows, None]).exp()
            mass = share * weights[:, :, rows, None]
        listed = lists < inputs.selection.blocks
        mass, own_mass = (summed_by_list(x, group) for x in (mass, own_mass))
        of_rows = given.of_rows(row_weights(inputs, rows, weights), inputs.row_queries, group)
        compared = compare_rows(
            chosen_scores,
            mass,
            own_mass if batch.with_own else None,
            listed,
            batch.chosen_weight * row_factors(batch, of_rows, len(rows)),
        )
        grads[0] = compared.grad
        losses.append(mean_divergence(compared, of_rows))
    if dense_scores is not None:
        rows = batch.dense_rows
        mass, whole = dense_mass(inputs, rows, weights)
        mass, own = summed_by_list(mass, group), inputs.blocks(rows)
        column = torch.arange(mass.shape[-1], device=mass.device)
        others = column < own[:, None] if inputs.selection.is_causal else column != own[:, None]
        others = others & visible_blocks(inputs, batch)[:, :, None]
        own_mass = mass.gather(-1, own.expand(mass.shape[:3])[..., None]) if batch.with_own else None
        of_rows = given.of_rows(row_weights(inputs, rows, weights), inputs.row_queries, group)
        compared = compare_rows(dense_scores, mass, own_mass, others, row_factors(batch, of_rows, len(rows)))
        grads[1] = compared.grad
        losses.append(mean_divergence(compared, of_rows))
        batch.stats["entropy"] = compared.entropy.mean()
        batch.stats["coverage"] = captured(lse, whole, inputs.tokens(rows))
    if losses:
        batch.stats["loss"] = batch.weight * torch.stack(losses).sum()
    return grads[0], grads[1]


def row_factors(batch: DistillBatch, weights: Tensor, rows: int) -> Tensor:
    """Factor on the gradient of each row (b, h, r), of `rows` of its kind, from the weights of the rows."""
    factor = batch.factor(rows, math.prod(weights.shape[:2]))
    return factor * (weights if batch.saliency else torch.ones_like(weights))


class RowComparison(NamedTuple):
    """Predicted and measured shares of rows, compared."""

    grad: Tensor
    """(b, h, r, l): gradient of the scores"""
    divergence: Tensor
    """(b, h, r): KL(measured || predicted)"""
    entropy: Tensor
    """(b, h, r): of the predicted shares"""


def mean_divergence(compared: RowComparison, weights: Tensor) -> Tensor:
    """Weighted mean divergence of rows."""
    return (compared.divergence * weights).sum() / weights.sum().clamp(min=1e-30)


def compare_rows(
    scores: Tensor, mass: Tensor, own_mass: Tensor | None, compared: Tensor, factor: Tensor
) -> RowComparison:
    """Compare rows (b, h, r, l) on the blocks where `compared` is True, and on their own blocks with `own_mass`
    (b, h, r, 1); `factor` (b, h, r) multiplies gradients."""
    logits, target = torch.where(compared, scores.to(mass.dtype), -torch.inf), torch.where(compared, mass, 0.0)
    if own_mass is None:
        # Rows that see no other block have neither a target nor a prediction.
        own_mass, logit = torch.zeros_like(target[..., :1]), torch.where(compared.any(-1, keepdim=True), -torch.inf, 0)
    else:
        logit = torch.zeros_like(own_mass)
    predicted = torch.cat([logits, logit.to(logits.dtype).expand_as(own_mass)], -1).log_softmax(-1)
    target = torch.cat([target, own_mass], -1)
    total = target.sum(-1, keepdim=True)
    # A row without weight, or with a weight that is not finite, has no gradient.
    valid = (total > 0) & (total < torch.inf)
    target = torch.where(valid, target / total, 0.0)
    share = predicted.exp()
    # Blocks that are not compared have probability 0 in both distributions.
    log = predicted.clamp(min=-1e30)
    divergence = (torch.xlogy(target, target) - target * log).sum(-1)
    grad = torch.where(valid, share - target, 0.0)[..., :-1] * factor[..., None]
    return RowComparison(grad.to(scores.dtype), divergence, -(share * log).sum(-1))


def spans(total: int, chunk: int) -> Iterator[tuple[int, int]]:
    """[0, total) in runs of at most `chunk`, and at least 1."""
    for begin in range(0, total, max(chunk, 1)):
        yield begin, min(begin + max(chunk, 1), total)


def listed_mass(inputs: DistillInputs, rows: Tensor, blocks: Tensor, lse: Tensor, weights: Tensor) -> Tensor:
    """Weighted attention of each row on its blocks (b, h, r, l), the first being its own; entries t are unused."""
    selection, key = inputs.selection, inputs.key
    batch, heads, r, l = blocks.shape
    size, n = selection.block_size, selection.n
    reach = torch.arange(size, device=key.device)
    sample = torch.arange(batch, device=key.device).view(-1, 1, 1, 1)
    group = (torch.arange(heads, device=key.device) // (heads // key.shape[1])).view(-1, 1, 1)
    found = []
    width = inputs.row_queries
    for begin, end in spans(r, inputs.step // (batch * heads * l * size * (width + key.shape[-1]))):
        token = inputs.tokens(rows[begin:end])
        real, token = token < n, token.clamp(max=n - 1)
        column = (blocks[:, :, begin:end, :, None] * size + reach).flatten(3)
        seen, column = column < n, column.clamp(max=n - 1)
        if inputs.key_padding_mask is not None:
            seen = seen & ~inputs.key_padding_mask[sample, column]
        seen = seen[..., None, :]
        if selection.is_causal:
            seen = seen & (column[..., None, :] <= token[..., None])
        keys = key[sample, group, column].to(lse.dtype)
        with full_precision(key.device):
            scores = inputs.scale * (inputs.query[:, :, token].to(lse.dtype) @ keys.mT)
        share = torch.where(seen, (scores - lse[:, :, token][..., None]).exp(), 0.0).unflatten(-1, (l, size)).sum(-1)
        weight = (weights[:, :, token] * real)[..., None]
        found.append(torch.where(weight > 0, share * weight, 0.0).sum(-2))
    return torch.cat(found, 2)


def dense_mass(inputs: DistillInputs, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted dense attention of rows on every block (b, h, r, t), and its LSE (b, h, r, q)."""
    selection, dtype = inputs.selection, weights.dtype
    batch, heads = inputs.query.shape[:2]
    n, size, t = selection.n, selection.block_size, selection.blocks
    width = inputs.row_queries
    found, logs = [], []
    for begin, end in spans(len(rows), inputs.step // (batch * heads * width * n)):
        token = inputs.tokens(rows[begin:end])
        real, token = token < n, token.clamp(max=n - 1)
        scores = dense_scores(inputs, token, dtype)
        log = scores.logsumexp(-1)
        share = torch.where(scores > -torch.inf, (scores - log[..., None]).exp(), 0.0)
        share = torch.nn.functional.pad(share, (0, t * size - n)).unflatten(-1, (t, size)).sum(-1)
        weight = (weights[:, :, token] * real)[..., None]
        found.append(torch.where(weight > 0, share * weight, 0.0).sum(-2))
        logs.append(log)
    return torch.cat(found, 2), torch.cat(logs, 2)


def dense_scores(inputs: DistillInputs, token: Tensor, dtype: torch.dtype) -> Tensor:
    """Scores of query tokens (r, q) with every key, (b, h, r, q, n), -inf where the key is masked."""
    key = inputs.key
    query = inputs.query[:, :, token].to(dtype)
    batch, heads = query.shape[:2]
    grouped = query.reshape(batch, key.shape[1], -1, query.shape[-1])
    with full_precision(key.device):
        scores = (inputs.scale * (grouped @ key.to(dtype).mT)).view(batch, heads, *token.shape, -1)
    if inputs.selection.is_causal:
        later = torch.arange(key.shape[2], device=key.device) > token[..., None]
        scores = scores.masked_fill_(later, -torch.inf)
    if inputs.key_padding_mask is not None:
        scores = scores.masked_fill_(inputs.key_padding_mask[:, None, None, None], -torch.inf)
    return scores


def captured(lse: Tensor, whole: Tensor, token: Tensor) -> Tensor:
    """Mean share of a token's dense attention that its kept blocks hold, from both LSEs; `lse` is (b, h, n)."""
    kept = lse[:, :, token.clamp(max=lse.shape[-1] - 1)]
    seen = (whole > -torch.inf) & (token < lse.shape[-1])
    share = torch.where(seen, (kept - whole).exp(), 0.0)
    return share.sum() / seen.sum().clamp(min=1)
