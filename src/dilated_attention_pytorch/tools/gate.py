"""Checks a result at any length: chosen query rows and key columns, recomputed densely in float64 from the pattern.

A row of the output, of the LSE and of dQ depends on that query alone; a row of dK and dV needs only the LSE and the
output of all queries besides. So a sample of rows costs O(rows * n), where a full oracle would cost O(n * n).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns import Pattern

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest accepted error, relative to the largest magnitude expected."""


class Computed(NamedTuple):
    """What one call took and gave, all of batch size 1; the gradients where a backward ran."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor
    grad_output: Tensor | None = None
    grad_query: Tensor | None = None
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None


def sample(n: int, count: int, seed: int = 0) -> Tensor:
    """Sorted positions: the first, the last, and others at random."""
    if n <= count:
        return torch.arange(n)
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: max(count - 2, 0)]
    return torch.cat([drawn, torch.tensor([0, n - 1])]).unique()


def largest_error(computed: Computed, pattern: Pattern, positions: Tensor, heads: list[int]) -> float:
    """Largest error over the given query rows and key columns of the given query heads, scale d ** -0.5."""
    heads_all, n = computed.query.shape[1:3]
    pattern = pattern.resolve(n, heads_all)
    device = computed.query.device
    positions = positions.to(device)
    errors = []
    for head in heads:
        errors += _row_errors(computed, pattern, positions, head)
    if computed.grad_output is not None:
        group = heads_all // computed.key.shape[1]
        for key_head in sorted({head // group for head in heads}):
            errors += _column_errors(computed, pattern, positions, key_head, group)
    return max(errors)


def _scores(query: Tensor, key: Tensor, counts: Tensor) -> Tensor:
    """Scaled scores plus the log of how often each pair counts, float64."""
    return query.double() @ key.double().T * query.shape[-1] ** -0.5 + counts.double().log()


def _row_errors(computed: Computed, pattern: Pattern, rows: Tensor, head: int) -> list[float]:
    n = computed.query.shape[2]
    key_head = head // (computed.query.shape[1] // computed.key.shape[1])
    key, value = computed.key[0, key_head], computed.value[0, key_head].double()
    counts = pattern.multiplicity(rows[:, None], torch.arange(n, device=rows.device)[None, :], head)
    scores = _scores(computed.query[0, head, rows], key, counts)
    lse = scores.logsumexp(-1)
    # Rows without a key have LSE -inf; their weights are 0, not -inf minus -inf.
    weights = torch.where(lse.isfinite()[:, None], (scores - lse[:, None]).exp(), 0.0)
    output = weights @ value
    errors = [_error(computed.output[0, head, rows], output), _error(computed.lse[0, head, rows], lse)]
    if computed.grad_output is not None and computed.grad_query is not None:
        grad = computed.grad_output[0, head, rows].double()
        inner = weights * (grad @ value.T - (grad * output).sum(-1, keepdim=True))
        errors.append(_error(computed.grad_query[0, head, rows], inner @ key.double() * key.shape[-1] ** -0.5))
    return errors


def _column_errors(computed: Computed, pattern: Pattern, columns: Tensor, key_head: int, group: int) -> list[float]:
    n, d = computed.query.shape[2:]
    assert computed.grad_output is not None and computed.grad_key is not None and computed.grad_value is not None
    key, value = computed.key[0, key_head, columns], computed.value[0, key_head, columns].double()
    grad_key, grad_value = torch.zeros_like(key, dtype=torch.float64), torch.zeros_like(value)
    for head in range(key_head * group, (key_head + 1) * group):
        counts = pattern.multiplicity(torch.arange(n, device=columns.device)[:, None], columns[None, :], head)
        lse = computed.lse[0, head].double()[:, None]
        scores = _scores(computed.query[0, head], key, counts)
        weights = torch.where(lse.isfinite(), (scores - lse).exp(), 0.0)
        grad = computed.grad_output[0, head].double()
        delta = (grad * computed.output[0, head].double()).sum(-1, keepdim=True)
        grad_value += weights.T @ grad
        grad_key += (weights * (grad @ value.T - delta)).T @ computed.query[0, head].double() * d**-0.5
    return [
        _error(computed.grad_key[0, key_head, columns], grad_key),
        _error(computed.grad_value[0, key_head, columns], grad_value),
    ]


def _error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.double().flatten(), wanted.flatten()
    finite = got.isfinite() & wanted.isfinite()
    if not (finite | (got == wanted)).all():
        return float("inf")
    if not finite.any():
        return 0.0
    return (got - wanted)[finite].abs().max().item() / max(wanted[finite].abs().max().item(), 1.0)
