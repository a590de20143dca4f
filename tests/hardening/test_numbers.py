"""Numbers at the edges of a dtype: scores of every size, equal rows, lone keys, denormals, infinities, NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BY_NAME, Problem
from oracle import answer, error

from dilated_attention_pytorch import attention_rows, attention_with_lse, merge
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.nn import KVCache
from dilated_attention_pytorch.ops.decode import attention_step
from dilated_attention_pytorch.patterns import parse

native = pytest.param(
    "native", marks=pytest.mark.skipif(not library_path().exists(), reason="the C++ kernel is not built")
)
BACKENDS = ["reference", "cpu", native]
SINGLE = torch.finfo(torch.float32).eps
PROBLEMS = ["window-causal", "dilated-ladder-causal", "gqa"]


def found(backend, problem, inputs, scale=None):
    """Output, LSE and the gradients of query, key and value."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    output, lse = attention_with_lse(*leaves, problem.pattern, scale=scale, enable_gqa=True, backend=backend)
    seen = lse > -torch.inf
    objective = (output * inputs.grad_output).sum() + (lse * inputs.grad_lse.to(lse.dtype))[seen].sum()
    return output.detach(), lse.detach(), *torch.autograd.grad(objective, leaves)


def wanted(problem, inputs, scale=None):
    gradients = {"grad_output": inputs.grad_output, "grad_lse": inputs.grad_lse}
    return answer(*inputs[:3], problem.pattern, scale=scale, **gradients)


def largest_score(problem, inputs, scale):
    groups = problem.heads // problem.key_heads
    key = inputs.key.double().repeat_interleave(groups, 1)
    return (scale * inputs.query.double() @ key.mT).abs().max().item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("scale", [0.0, 1e-45, -1e-3, 30.0, -3e3, 1e6])
def test_scores_of_any_size_err_by_their_own_rounding(backend, name, scale):
    problem = BY_NAME[name]
    inputs = problem.inputs(torch.float32)
    size = max(1.0, largest_score(problem, inputs, scale))
    exact = wanted(problem, inputs, scale)
    output, lse, *gradients = found(backend, problem, inputs, scale)
    # A score of size s is known to s * eps, and so is the logarithm of every weight.
    allowed = 4 * size * SINGLE
    assert error(output, exact.output) <= allowed
    assert error(lse, exact.lse) <= 8 * SINGLE
    for got, want in zip(gradients, exact[2:], strict=True):
        assert got.isfinite().all()
        assert error(got, want) <= 4 * allowed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_products_beyond_the_range_of_the_dtype_are_computed(backend, dtype):
    # 16 * 2000 * 2000 is a thousand times what float16 holds.
    problem = BY_NAME["window-causal"]
    inputs = problem.inputs(dtype)
    inputs = inputs._replace(query=(inputs.query * 1000).to(dtype), key=(inputs.key * 1000).to(dtype))
    exact = wanted(problem, inputs, 1e-6)
    output, lse, *gradients = found(backend, problem, inputs, 1e-6)
    compute = torch.finfo(lse.dtype).eps
    allowed = torch.finfo(dtype).eps + 4 * compute * largest_score(problem, inputs, 1e-6)
    assert error(lse, exact.lse) <= 8 * compute
    for got, want in zip((output, *gradients), (exact.output, *exact[2:]), strict=True):
        assert error(got, want) <= 4 * allowed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_largest_value_is_averaged_to_itself(backend, dtype):
    problem = BY_NAME["dilated-ladder-causal"]
    inputs = problem.inputs(dtype)
    # Weights are summed before they are divided by their total, so a wide exponent needs room for the keys of a row.
    largest = torch.finfo(dtype).max / (1 if dtype == torch.float16 else 4 * problem.n)
    value = torch.full_like(inputs.value, largest)
    output, lse = attention_with_lse(inputs.query, inputs.key, value, problem.pattern, backend=backend)
    seen = lse > -torch.inf
    assert (output[seen].double() / largest - 1).abs().max() <= 16 * torch.finfo(dtype).eps
    assert (output[~seen] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_equal_scores_average_and_count(backend, name):
    problem = BY_NAME[name]
    inputs = problem.inputs(torch.float32)
    inputs = inputs._replace(query=torch.zeros_like(inputs.query))
    exact = wanted(problem, inputs)
    output, lse, *gradients = found(backend, problem, inputs)
    assert error(output, exact.output) <= 4 * SINGLE
    assert error(lse, exact.lse) <= 4 * SINGLE
    for got, want in zip(gradients, exact[2:], strict=True):
        assert error(got, want) <= 16 * SINGLE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_a_row_with_one_key_is_its_value(backend, dtype, size):
    problem = replace(BY_NAME["full-ragged"], text="window:0")
    inputs = problem.inputs(dtype)
    inputs = inputs._replace(query=inputs.query * size)
    output, lse, dq, _, dv = found(backend, problem, inputs)
    assert torch.equal(output, inputs.value)
    score = (inputs.query.double() * inputs.key.double()).sum(-1) * problem.d**-0.5
    compute = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert (lse.double() - score).abs().max() <= 8 * compute * max(1.0, float(score.abs().max()))
    assert error(dv, inputs.grad_output) <= max(torch.finfo(dtype).eps, 64 * compute * size)
    assert error(dq, wanted(problem, inputs).query_grad) <= max(torch.finfo(dtype).eps, 64 * compute * size) * 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "tiny"), [(torch.float32, 1e-41), (torch.float16, 3e-7), (torch.float64, 1e-312)])
def test_denormal_values_are_not_flushed(backend, dtype, tiny):
    problem = BY_NAME["causal"]
    inputs = problem.inputs(dtype)
    value = torch.full_like(inputs.value, tiny)
    output, _ = attention_with_lse(inputs.query, inputs.key, value, problem.pattern, backend=backend)
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    # Each of up to 67 products rounds to a step of the denormals.
    assert (output - value).abs().max() <= 67 * step
    assert (output > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_score_of_minus_infinity_is_a_key_that_takes_no_part(backend):
    problem = Problem(name="", text="window:20 & causal", n=70, d=1)
    inputs = problem.inputs(torch.float32)
    query, masked = inputs.query.abs() + 1, inputs.key.clone()
    masked[:, :, 30] = -torch.inf
    padding = torch.arange(problem.n)[None] == 30
    output, lse = attention_with_lse(query, masked, inputs.value, problem.pattern, backend=backend)
    hidden, hidden_lse = attention_with_lse(
        query, inputs.key, inputs.value, problem.pattern, key_padding_mask=padding, backend=backend
    )
    assert error(output, hidden) <= 4 * SINGLE
    assert error(lse, hidden_lse) <= 4 * SINGLE


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_score_far_above_all_others_takes_the_row(backend):
    problem = BY_NAME["causal"]
    inputs = problem.inputs(torch.float32)
    key = inputs.key * 1e-3
    key[:, :, 5] = inputs.query[:, :, 40] * 1e4
    query = inputs.query.clone()
    query[:, :, 6:] = inputs.query[:, :, 40:41]
    output, lse = attention_with_lse(query, key, inputs.value, problem.pattern, backend=backend)
    assert error(output[:, :, 6:], inputs.value[:, :, 5:6].expand_as(output[:, :, 6:])) <= SINGLE
    exact = answer(query, key, inputs.value, problem.pattern)
    assert error(lse, exact.lse) <= 4 * SINGLE


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("text", ["window:3", "heads{window:3 / causal}", "dilated:8x1,32x4"])
def test_a_decoded_row_is_not_spoilt_by_keys_it_does_not_see(which, bad, text):
    query, key, value = torch.randn(3, 1, 2, 40, 8).unbind()
    sound = attention_step(query[:, :, 39:], key, value, text, 39)
    assert not parse(text).resolve(40, 2).allows(39, 0, 0)
    spoilt = {"key": key.clone(), "value": value.clone()}
    # Token 0 stands in for the keys of a head that sees fewer than another.
    spoilt[which][:, 0, 0] = bad
    row = attention_step(query[:, :, 39:], spoilt["key"], spoilt["value"], text, 39)
    assert torch.equal(row[:, 0], sound[:, 0])


@pytest.mark.parametrize("which", ["key", "value"])
def test_a_decoded_row_knows_nothing_of_padding(which):
    rows = dict(zip(("query", "key", "value"), torch.randn(3, 1, 2, 40, 8).unbind(), strict=True))
    query, padding = rows.pop("query")[:, :, 39:], torch.arange(40)[None] < 10
    sound = attention_step(query, **rows, pattern="causal", positions=39, key_padding_mask=padding)
    rows[which][:, :, :10] = float("nan")
    assert torch.equal(attention_step(query, **rows, pattern="causal", positions=39, key_padding_mask=padding), sound)


def test_samples_of_a_cache_do_not_spoil_each_other():
    pattern = "window:3"
    query, key, value = torch.randn(3, 2, 2, 21, 8).unbind()
    caches = [KVCache(pattern, prompt_lengths=[20, 5]) for _ in range(2)]
    for cache, first in zip(caches, (key, key.clone()), strict=True):
        if cache is caches[1]:
            first[1, :, 0] = float("nan")
        cache.attend(query[:, :, :20], first[:, :, :20], value[:, :, :20])
    sound, spoilt = (cache.attend(query[:, :, 20:], key[:, :, 20:], value[:, :, 20:]) for cache in caches)
    assert torch.equal(sound, spoilt)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_of_a_row_know_nothing_of_keys_it_does_not_see(bad):
    query, key = torch.randn(2, 1, 2, 40, 8).unbind()
    sound = attention_rows(query, key, "window:3", [10, 39])
    key[:, :, 20] = bad
    assert torch.equal(attention_rows(query, key, "window:3", [10, 39]), sound)


def test_merging_keeps_a_bad_row_to_itself():
    output, lse = torch.randn(2, 1, 1, 4, 8), torch.randn(2, 1, 1, 4)
    sound = merge(list(output), list(lse))
    output[0, :, :, 2] = float("nan")
    spoilt = merge(list(output), list(lse))
    rows = torch.tensor([0, 1, 3])
    assert torch.equal(spoilt.output[:, :, rows], sound.output[:, :, rows])
    assert torch.equal(spoilt.lse, sound.lse)
    assert spoilt.output[:, :, 2].isnan().all()


@pytest.mark.parametrize("bad", ["query", "key"])
def test_row_of_nan_scores_is_nan_and_not_empty(bad):
    rows = dict(zip(("query", "key", "value"), torch.randn(3, 1, 2, 40, 8).unbind(), strict=True))
    rows[bad][:, :, 39] = float("nan")
    row = attention_step(rows["query"][:, :, 39:], rows["key"], rows["value"], "window:0", 39)
    assert row.isnan().all()
    assert attention_rows(rows["query"], rows["key"], "window:0", [39]).isnan().any(-1).all()
    output, lse = attention_with_lse(**rows, pattern="window:0")
    assert output[:, :, 39].isnan().all()
    assert lse[:, :, 39].isnan().all()
