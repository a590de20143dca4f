"""Correctness gate at any length: chosen query rows and key columns, recomputed densely in float64 from the pattern.

A row of the output, of the LSE and of dQ depends on that query alone; a row of dK and dV needs only the LSE and the
output of all queries besides. So a sample of rows costs O(rows * n), where a full oracle would cost O(n * n).

Every element is held to a bound on the rounding of a fused kernel. With u the unit roundoff of the inputs' dtype, w
that of the float32 accumulators (of float64 for float64 inputs), and weights p, the kernel

- rounds p to the dtype of the inputs before P @ V and dP^T @ dO, and dS before the products for dQ and dK (u each),
- computes scores and exponentials in float32: a relative error of 4 w (1 + sum |q k| scale) of each weight,
- rounds each result to the dtype of the inputs, once for every part of a plan (u),
- sums K terms in float32 (8 w sqrt(K)), and takes delta = sum dO * O from the rounded output.

The errors of single terms are independent and have mean 0, so that the error of a sum of terms x is below
`SPREAD` * u * sqrt(sum x**2): by Hoeffding's inequality a spread of 8 is exceeded with a probability below 3e-14, and
the other half of `SPREAD` is for partial results that are carried in the inputs' dtype. The worst case, u * sum |x|,
is larger by sqrt(K), which is where a skipped tile hides. A kernel that skips a share f of the keys of a row errs by
about sqrt(f) * sqrt(sum x**2) in every element: 1 % is 0.1, and the bound in bfloat16 16 / 256 = 0.06, with the
largest of the checked elements two to four times the typical one. The LSE is float32 in every kernel and has no u.

The bound assumes random inputs, as the benchmarks draw them: equal scores round alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...patterns import Pattern

SPREAD = 16.0
"""Accepted error of a sum, in units of the root of the summed squares of its terms' rounding errors."""


class Computed(NamedTuple):
    """Arguments and results of one call of batch size 1; gradients if a backward pass ran."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor
    grad_output: Tensor | None = None
    grad_query: Tensor | None = None
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None


class Units(NamedTuple):
    """Rounding errors of a dtype."""

    result: float
    """Unit roundoff of the inputs and results."""
    sums: float
    """Unit roundoff of the accumulators; in float64 four times that, as the recomputation rounds as well."""
    least: float
    """Absolute error of a subnormal number."""


def units(dtype: torch.dtype) -> Units:
    """Rounding errors of a kernel whose inputs have this dtype."""
    inputs, sums = torch.finfo(dtype), torch.finfo(torch.promote_types(dtype, torch.float32))
    widest = 4 if dtype == torch.float64 else 1
    return Units(inputs.eps / 2 * widest, sums.eps / 2 * widest, inputs.smallest_normal * inputs.eps / 2)


def sample(n: int, count: int) -> Tensor:
    """Sorted positions: the first, the last, and others at random."""
    if n <= count:
        return torch.arange(n)
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: max(count - 2, 0)]
    return torch.cat([drawn, torch.tensor([0, n - 1])]).unique()


def error_ratio(computed: Computed, pattern: Pattern, positions: Tensor, heads: list[int]) -> float:
    """Largest ratio of an error to its bound, over the given query rows and key columns of the given query heads.

    A right kernel gives at most 1, in any dtype. The scale is d ** -0.5.
    """
    heads_all, n = computed.query.shape[1:3]
    pattern = pattern.resolve(n, heads_all)
    device = computed.query.device
    positions = positions.to(device)
    ratios = []
    for head in heads:
        ratios += _row_ratios(computed, pattern, positions, head)
    if computed.grad_output is not None:
        group = heads_all // computed.key.shape[1]
        for key_head in sorted({head // group for head in heads}):
            ratios += _column_ratios(computed, pattern, positions, key_head, group)
    return max(ratios)


def _scores(query: Tensor, key: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled scores plus the log of the multiplicities, and the scaled sums of absolute products, float64."""
    query, key, scale = query.double(), key.double(), query.shape[-1] ** -0.5
    return query @ key.T * scale + counts.double().log(), query.abs() @ key.abs().T * scale


def _spread(errors: Tensor, factors: Tensor) -> Tensor:
    """Bound on sums over the last axis of `errors` times `factors`, whose signs are independent."""
    return SPREAD * (errors.square() @ factors.square()).sqrt()


def bound_output(dtype: torch.dtype, output: Tensor, errors: Tensor, terms: Tensor, keys: Tensor) -> Tensor:
    """Bound on the error of output rows, from sums over their keys.

    Args:
        dtype: of the inputs.
        output: rows in float64 (rows, d).
        errors: squared rounding errors of weights times squared values, summed.
        terms: squared weights times squared values, summed.
        keys: number of keys of each row.
    """
    unit, fine, least = units(dtype)
    sums = 8 * fine * keys[:, None].sqrt()
    rounded = unit * output.abs() + least * (keys[:, None] > 0)
    return rounded + SPREAD * errors.sqrt() + sums * (output.abs() + 4 * terms.sqrt())


def _row_ratios(computed: Computed, pattern: Pattern, rows: Tensor, head: int) -> list[float]:
    n, d = computed.query.shape[2:]
    unit, fine, least = units(computed.query.dtype)
    key_head = head // (computed.query.shape[1] // computed.key.shape[1])
    key, value = computed.key[0, key_head].double(), computed.value[0, key_head].double()
    counts = pattern.multiplicity(rows[:, None], torch.arange(n, device=rows.device)[None, :], head)
    scores, sizes = _scores(computed.query[0, head, rows], key, counts)
    lse = scores.logsumexp(-1)
    # Rows without a key have LSE -inf; their weights are 0, not -inf minus -inf.
    weights = torch.where(lse.isfinite()[:, None], (scores - lse[:, None]).exp(), 0.0)
    seen = (counts > 0).double()
    sums = 8 * fine * seen.sum(-1, keepdim=True).sqrt()
    relative = unit + 4 * fine * (1 + sizes)
    output = weights @ value
    errors = (weights * relative + least * seen).square() @ value.square()
    output_bound = bound_output(computed.query.dtype, output, errors, weights.square() @ value.square(), seen.sum(-1))
    lse_bound = sums[:, 0] + 16 * fine * (1 + lse.abs() + (weights * sizes).sum(-1))
    ratios = [
        largest_ratio(computed.output[0, head, rows], output, output_bound),
        largest_ratio(computed.lse[0, head, rows], lse, lse_bound),
    ]
    if computed.grad_output is not None and computed.grad_query is not None:
        grad = computed.grad_output[0, head, rows].double()
        inner = weights * (grad @ value.T - (grad * output).sum(-1, keepdim=True))
        errors = inner.abs() * relative + 4 * fine * weights * (grad.abs() @ value.abs().T) + least * seen
        delta_error = (grad * output_bound).square().sum(-1, keepdim=True).sqrt()
        grad_query = inner @ key * d**-0.5
        bound = _spread(errors, key) + delta_error * (weights @ key).abs()
        bound = d**-0.5 * (bound + 4 * sums * (inner.square() @ key.square()).sqrt())
        bound += (unit + sums) * grad_query.abs() + least * seen.amax(-1, keepdim=True)
        ratios.append(largest_ratio(computed.grad_query[0, head, rows], grad_query, bound))
    return ratios


def _column_ratios(computed: Computed, pattern: Pattern, columns: Tensor, key_head: int, group: int) -> list[float]:
    n, d = computed.query.shape[2:]
    unit, fine, least = units(computed.query.dtype)
    assert computed.grad_output is not None and computed.grad_key is not None and computed.grad_value is not None
    key, value = computed.key[0, key_head, columns], computed.value[0, key_head, columns].double()
    grad_key, grad_value = torch.zeros_like(key, dtype=torch.float64), torch.zeros_like(value)
    key_errors, key_terms = torch.zeros_like(grad_key), torch.zeros_like(grad_key)
    value_errors, value_terms = torch.zeros_like(value), torch.zeros_like(value)
    queries = torch.zeros_like(grad_key[:, :1])
    for head in range(key_head * group, (key_head + 1) * group):
        counts = pattern.multiplicity(torch.arange(n, device=columns.device)[:, None], columns[None, :], head)
        lse = computed.lse[0, head].double()[:, None]
        query, grad = computed.query[0, head].double(), computed.grad_output[0, head].double()
        output = computed.output[0, head].double()
        scores, sizes = _scores(query, key, counts)
        weights = torch.where(lse.isfinite(), (scores - lse).exp(), 0.0)
        seen = (counts > 0).double()
        inner = weights * (grad @ value.T - (grad * output).sum(-1, keepdim=True))
        grad_value += weights.T @ grad
        grad_key += inner.T @ query * d**-0.5
        queries += seen.sum(0)[:, None]
        relative = unit + 4 * fine * (1 + sizes)
        # A kernel may take delta from the output before or after it is rounded.
        delta_error = unit * (grad * output).square().sum(-1, keepdim=True).sqrt()
        steps = 4 * fine * (grad.abs() @ value.abs().T) + delta_error
        value_errors += (weights * relative + least * seen).square().T @ grad.square()
        key_errors += (inner.abs() * relative + weights * steps + least * seen).square().T @ query.square()
        value_terms += weights.square().T @ grad.square()
        key_terms += inner.square().T @ query.square()
    sums = 8 * fine * queries.sqrt()
    ratios = []
    for got, wanted, errors, terms, scale in (
        (computed.grad_key, grad_key, key_errors, key_terms, d**-0.5),
        (computed.grad_value, grad_value, value_errors, value_terms, 1.0),
    ):
        bound = (unit + sums) * wanted.abs() + least * (queries > 0)
        bound += scale * (SPREAD * errors.sqrt() + 4 * sums * terms.sqrt())
        ratios.append(largest_ratio(got[0, key_head, columns], wanted, bound))
    return ratios


def largest_ratio(got: Tensor, wanted: Tensor, bound: Tensor) -> float:
    """Largest difference over its bound; infinite where inf or NaN differ, or where nothing may differ."""
    got = got.double()
    ratios = torch.where(got == wanted, 0.0, (got - wanted).abs() / bound)
    return ratios.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
