"""Dense attention in float64, straight from the definition; all it takes from the library is what a pattern answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Answer(NamedTuple):
    output: Tensor
    lse: Tensor
    query_grad: Tensor | None = None
    key_grad: Tensor | None = None
    value_grad: Tensor | None = None


def multiplicities(pattern: Any, n: int, heads: int) -> Tensor:
    """How often each pair counts, float64 (heads, n, n)."""
    pattern = pattern.resolve(n, heads)
    position = torch.arange(n)
    planes = [pattern.multiplicity(position[:, None], position[None, :], head) for head in range(heads)]
    return torch.stack([torch.as_tensor(plane).expand(n, n) for plane in planes]).double()


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    counts: Tensor,
    *,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    kept: Tensor | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and natural-log LSE, differentiable.

    `counts` (heads, n, n) multiplies each weight before the softmax; `kept` says which survive dropout after it.
    `bias` is one of every pair, as `bias_of_pairs` gives it. `sink` (heads,) is one more column, without a value, which
    the LSE leaves out.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * query @ key.transpose(-1, -2)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores + counts.log() + (0.0 if bias is None else bias)
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
    seen = (scores > float("-inf")).any(-1, keepdim=True)
    # A row without a key would be -inf minus -inf; it takes part as zeros and is masked out of the answer.
    scores = torch.where(seen, scores, 0.0)
    columns = scores
    if sink is not None:
        # Finite: the softmax of an infinite column is NaN.
        column = sink.double().clamp(-1e300, 1e300)[:, None, None].expand(*scores.shape[:-1], 1)
        columns = torch.cat([scores, column], -1)
    weights = torch.where(seen, columns.softmax(-1)[..., : scores.shape[-1]], 0.0)
    lse = torch.where(seen[..., 0], scores.logsumexp(-1), float("-inf"))
    if kept is not None:
        weights = weights * kept / (1 - dropout_p)
    return weights @ value, lse


def bias_of_pairs(table: Tensor, n: int, positions: Tensor | None = None) -> Tensor:
    """Entries of a table (heads, *widths) for all pairs, (batch or 1, heads, n, n), differentiable.

    Positions (2, heads, n, axes) are those of queries and of keys, by head.
    """
    if positions is None:
        positions = torch.arange(n)[:, None]
    positions = positions[None] if positions.dim() == 2 else positions
    by_head = positions.dim() == 4
    at, key_at = positions if by_head else (positions, positions)
    steps = key_at[:, None, :, :] - at[:, :, None, :]
    entry = [torch.arange(len(table))[:, None, None] if by_head else slice(None)]
    for axis, width in enumerate(table.shape[1:]):
        reach = (width - 1) // 2
        entry.append(steps[..., axis].clip(-reach, reach) + reach)
    return table[tuple(entry)][None] if by_head else table[tuple(entry)].movedim(0, 1)


def answer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Any,
    *,
    grad_output: Tensor | None = None,
    grad_lse: Tensor | None = None,
    **options: Any,
) -> Answer:
    """Outputs, and gradients of `<output, grad_output> + <lse, grad_lse>` where those are given. All in float64."""
    inputs = [x.detach().double().cpu().requires_grad_() for x in (query, key, value)]
    counts = multiplicities(pattern, query.shape[2], query.shape[1])
    output, lse = dense_attention(*inputs, counts, **options)
    if grad_output is None:
        return Answer(output.detach(), lse.detach())
    objective = (output * grad_output.double().cpu()).sum()
    if grad_lse is not None:
        objective = objective + torch.where(lse.isfinite(), lse * grad_lse.double().cpu(), 0.0).sum()
    return Answer(output.detach(), lse.detach(), *torch.autograd.grad(objective, inputs))


def table_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Any,
    table: Tensor,
    positions: Tensor | None = None,
    *,
    grad_output: Tensor,
    grad_lse: Tensor,
    **options: Any,
) -> Tensor:
    """Gradient of a table by distance in what `answer` differentiates, float64."""
    wide = table.detach().double().cpu().requires_grad_()
    counts = multiplicities(pattern, query.shape[2], query.shape[1])
    rows = (x.detach().double().cpu() for x in (query, key, value))
    output, lse = dense_attention(*rows, counts, bias=bias_of_pairs(wide, query.shape[2], positions), **options)
    lse = torch.where(lse.isfinite(), lse * grad_lse.double().cpu(), 0.0)
    return torch.autograd.grad((output * grad_output.double().cpu()).sum() + lse.sum(), wide)[0]


def sink_gradient(
    query: Tensor, key: Tensor, value: Tensor, pattern: Any, sink: Tensor, *, grad_output: Tensor, **options: Any
) -> Tensor:
    """Gradient of a sink in what `answer` differentiates, float64."""
    wide = sink.detach().double().cpu().requires_grad_()
    counts = multiplicities(pattern, query.shape[2], query.shape[1])
    rows = (x.detach().double().cpu() for x in (query, key, value))
    output, _ = dense_attention(*rows, counts, sink=wide, **options)
    return torch.autograd.grad((output * grad_output.double().cpu()).sum(), wide)[0]


def error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest wanted magnitude (at least 1); infinite where inf or NaN disagree."""
    got, wanted = got.detach().double().cpu(), wanted.double().cpu()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    if not (same | (got.isfinite() & wanted.isfinite())).all():
        return float("inf")
    largest = wanted[wanted.isfinite()].abs().max().item() if wanted.isfinite().any() else 0.0
    return torch.where(same, 0.0, got - wanted).abs().max().item() / max(largest, 1.0) if got.numel() else 0.0


def _as_float16_has_it(x: Tensor) -> Tensor:
    """Rows, or blocks, of (b, h, r, u, p) with the digits of float16 beside the largest of each."""
    size = 2.0 ** (x.abs().amax(tuple(range(3, x.dim())), keepdim=True).log2().floor() - 14)
    return (x / size).half().to(x.dtype) * size


def dense_scores(factors: Any, own: Tensor) -> Tensor:
    """Scores of a learned choice by its `Factors`, (b, h, rows, t), for scored rows in those blocks."""
    hidden = (factors.rows[:, :, own, None] + factors.columns[:, :, None]).relu()
    hidden = hidden if factors.keep is None else hidden * factors.keep[:, :, own, None]
    scores = (hidden * factors.weight[:, None, None]).sum(-1) + factors.bias[:, None, None]
    rank = factors.right.shape[-1]
    if rank:
        own = factors.own.to(scores.dtype).nan_to_num(0.0, 0.0, 0.0)
        left = own if factors.project is None else torch.einsum("bhrd,hdp->bhrp", own, factors.project)
        left, right = (_as_float16_has_it(x) if factors.rounds else x for x in (left, factors.right))
        pairs = torch.einsum("bhrd,bhtud->bhrtu", left, right)
        if factors.right_there is not None:
            pairs = pairs.masked_fill(~factors.right_there[:, :, None], -torch.inf)
        best = pairs.amax(-1)
        scores = scores + torch.where(best > -torch.inf, best, 0.0) / rank**0.5
    return scores / factors.log_temperature.exp().clamp(min=factors.coldest)[:, None, None]


def selecting_scores(scores: Any, each: Tensor, with_own: bool | None = None) -> Tensor:
    """Scores by which rows select (b, h, rows, t), from those of all scored rows; -inf for blocks that rows of queries
    cannot list. The own block takes part `with_own`, by default where the budget is a coverage."""
    if scores.per_token:
        return each
    t, together = each.shape[3], scores.selecting_rows
    own, column = torch.arange(t)[:, None], torch.arange(t)
    others = (column < own if scores.is_causal else column != own) & scores.visible[:, :, None]
    logits = each.unflatten(2, (t, together))
    logits = logits.masked_fill(~(others[:, :, :, None] & logits.isfinite()), -torch.inf)
    with_own = scores.settings.budget.coverage is not None if with_own is None else with_own
    share = logits.masked_fill((column == own)[:, None], 0.0) if with_own else logits
    share = share.softmax(-1).nan_to_num(0.0)
    if scores.present is not None:
        share = share.masked_fill(~scores.present.unflatten(1, (t, together))[:, None, ..., None], 0.0)
    share = share.sum(3).log()
    share = share - share.gather(-1, own.expand(*share.shape[:2], -1, 1)) if with_own else share
    return share.nan_to_num(-torch.inf, neginf=-torch.inf).masked_fill(~others, -torch.inf)
