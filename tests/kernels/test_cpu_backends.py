"""CPU backends beyond the shared problems: tile sizes, layouts, bad input, extreme scores, steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BY_NAME, PROBLEMS, Problem
from oracle import answer, bias_of_pairs, dense_attention, error, multiplicities

from dilated_attention_pytorch import attention, make_plan, parse
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.cpu import tiles as cpu
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.kernels.dropout import keep_mask
from dilated_attention_pytorch.kernels.registry import backend_named

BACKENDS = [
    "reference",
    "cpu",
    pytest.param("native", marks=pytest.mark.skipif(not library_path().exists(), reason="C++ kernel not built")),
]
FAST = BACKENDS[1:]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 4e-6}


def call_of(problem, inputs, **changes):
    plan = make_plan(problem.pattern, problem.n, problem.heads, block_size=problem.block_size)
    settings = {"scale": problem.d**-0.5, "key_padding_mask": problem.key_padding_mask(), "pattern": problem.pattern}
    return AttentionCall(inputs.query, inputs.key, inputs.value, plan, **(settings | changes))


def everything(name, call, inputs, with_lse=True):
    """Output, LSE, dq, dk, dv of one backend."""
    backend = backend_named(name)
    assert backend.why_not(call) is None
    output, lse = backend.forward(call)
    grad_lse = inputs.grad_lse if with_lse else None
    return output, lse, *backend.backward(call, output, lse, inputs.grad_output, grad_lse)


def check(name, problem, dtype, inputs=None, **changes):
    inputs = inputs or problem.inputs(dtype)
    call = call_of(problem, inputs, **changes)
    wanted = answer(
        *inputs[:3],
        problem.pattern,
        grad_output=inputs.grad_output,
        grad_lse=inputs.grad_lse,
        scale=call.scale,
        key_padding_mask=call.key_padding_mask,
    )
    found = everything(name, call, inputs)
    for what, got, want in zip(("output", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert error(got, want) <= TOLERANCE[dtype], what
    return found


def modified(problem, dtype, width=33):
    """A soft cap and a bias by distance."""
    return {"softcap": 1.7, "bias": torch.linspace(-2, 3, problem.heads * width, dtype=dtype).view(-1, width).sin()}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_capped_and_biased_scores_match_the_oracle(name, problem, dtype):
    inputs = problem.inputs(dtype)
    call = call_of(problem, inputs, **modified(problem, dtype))
    output, lse = backend_named(name).forward(call)
    grads = backend_named(name).backward(call, output, lse, inputs.grad_output, inputs.grad_lse)
    leaves = [x.double().requires_grad_() for x in (*inputs[:3], call.bias)]
    counts, pairs = multiplicities(problem.pattern, problem.n, problem.heads), bias_of_pairs(leaves[3], problem.n)
    options = {"key_padding_mask": call.key_padding_mask, "softcap": call.softcap, "bias": pairs}
    wanted = dense_attention(*leaves[:3], counts, **options)
    slopes = [torch.where(wanted[1].isfinite(), inputs.grad_lse.double(), 0.0), inputs.grad_output.double()]
    expected = torch.autograd.grad(wanted[::-1], leaves, slopes)
    for what, got, want in zip("olqkvb", (output, lse, *grads, grads.bias), (*wanted, *expected), strict=True):
        assert error(got, want.detach()) <= TOLERANCE[dtype], what


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("softcap", [1e-3, 1.0, 50.0, 1e6])
def test_any_softcap_keeps_single_precision(name, softcap):
    """Scores far below the cap and far above it."""
    problem = BY_NAME["causal"]
    inputs = problem.inputs(torch.float32)
    output, lse = backend_named(name).forward(call_of(problem, inputs, softcap=softcap))
    counts = multiplicities(problem.pattern, problem.n, problem.heads)
    wanted = dense_attention(*(x.double() for x in inputs[:3]), counts, softcap=softcap)
    assert error(output, wanted[0]) <= 1e-6
    assert error(lse, wanted[1]) <= 1e-6


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(
    "text", ["window:37 & causal", "dilated:64x1,150x3,300x7", "random:0.3", "global:5 | window:9"]
)
def test_every_block_size_gives_the_dense_result(name, block_size, text):
    problem = Problem(name="", text=text, n=300, heads=3, key_heads=1, d=20, e=12, block_size=block_size)
    check(name, problem, torch.float64)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (80, 96), (256, 40), (1, 1), (33, 7)])
def test_every_width_gives_the_dense_result_in_single_precision(name, d, e):
    problem = Problem(name="", text="window:50 & causal", n=190, heads=4, key_heads=2, d=d, e=e, block_size=64, batch=2)
    check(name, problem, torch.float32)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", ["dilated-ladder-causal", "gqa", "padded"])
def test_layout_of_heads_inside_tokens_is_preserved(name, case):
    problem = BY_NAME[case]
    inputs = problem.inputs()
    *turned, grad_lse = inputs
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in turned]
    found = check(name, problem, torch.float64, type(inputs)(*turned, grad_lse))
    for got, like in zip((found[0], *found[2:]), (turned[0], *turned[:3]), strict=True):
        assert (got.stride(1) < got.stride(2)) == (like.stride(1) < like.stride(2))


@pytest.mark.parametrize("name", FAST)
def test_expanded_gradient_equals_dense_one(name):
    problem = BY_NAME["window-causal"]
    inputs = problem.inputs()
    inputs = inputs._replace(grad_output=torch.ones((), dtype=torch.float64).expand(inputs.grad_output.shape))
    check(name, problem, torch.float64, inputs)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("scale", [-0.7, 0.0, 40.0])
def test_any_scale_works(name, scale):
    # At 40 the scores reach several hundred: without subtracting the maximum they would overflow.
    check(name, BY_NAME["dilated-ladder"], torch.float64, scale=scale)


@pytest.mark.parametrize("name", BACKENDS)
def test_huge_scores_do_not_overflow_single_precision(name):
    problem = BY_NAME["causal"]
    inputs = problem.inputs(torch.float32)
    output, lse = backend_named(name).forward(call_of(problem, inputs, scale=1e4))
    wanted = answer(*inputs[:3], problem.pattern, scale=1e4)
    assert error(output, wanted.output) <= 1e-2
    assert error(lse, wanted.lse) <= 1e-6


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_error_is_rounding(name, dtype):
    problem = replace(BY_NAME["dilated-ladder-causal"], batch=2, padded=(141, 90))
    inputs = problem.inputs(dtype)
    call = call_of(problem, inputs)
    found = everything(name, call, inputs)
    exact = everything("reference", call_of(problem, type(inputs)(*(t.double() for t in inputs))), inputs)
    for got, want in zip(found, exact, strict=True):
        assert error(got, want) <= 2 * torch.finfo(dtype).eps
    assert [t.dtype for t in found] == [dtype, torch.float32, dtype, dtype, dtype]


@pytest.mark.parametrize("name", BACKENDS)
def test_dropout_drops_what_the_definition_says(name):
    problem = replace(BY_NAME["dilated-ladder-causal"], batch=2, key_heads=2)
    inputs, p, seed = problem.inputs(), 0.4, torch.tensor([2**61 + 12345])
    position = torch.arange(problem.n)
    stream = torch.arange(problem.batch * problem.heads).view(problem.batch, problem.heads, 1, 1)
    keep = keep_mask(seed, stream, position[:, None], position, p)
    wanted = answer(
        *inputs[:3],
        problem.pattern,
        grad_output=inputs.grad_output,
        grad_lse=inputs.grad_lse,
        kept=keep,
        dropout_p=p,
    )
    found = everything(name, call_of(problem, inputs, dropout_p=p, seed=seed), inputs)
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) <= 1e-10


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("case", ["window", "global-window", "dilated-ladder-causal", "padded"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "modified"])
def test_nan_stays_in_the_rows_that_see_it(name, case, which, bad, plain):
    problem = BY_NAME[case]
    inputs, token = problem.inputs(), 20
    getattr(inputs, which)[:, :, token] = bad
    call = call_of(problem, inputs, **({} if plain else modified(problem, torch.float64)))
    output, lse, dq, dk, dv = everything(name, call, inputs)
    sees = multiplicities(problem.pattern, problem.n, problem.heads) > 0
    sees = sees.expand(problem.batch, -1, -1, -1)
    if call.key_padding_mask is not None:
        sees = sees & ~call.key_padding_mask[:, None, None, :]
    reached = sees[..., token]
    assert reached.any()
    assert not reached.all()
    assert torch.equal(~output.isfinite().all(-1), reached)
    assert dq[~reached].isfinite().all()
    # A key is touched by the bad one only through a row that sees both.
    touched = (sees & reached[..., None]).any(2)
    assert dk[~touched].isfinite().all()
    assert dv[~touched].isfinite().all()
    if which == "key":
        assert torch.equal(~lse.isfinite() & ~lse.isinf(), reached) or bad == float("inf")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", ["window", "dilated-ladder-causal"])
def test_nan_query_reaches_its_own_row_and_its_keys_only(name, case):
    problem = BY_NAME[case]
    inputs, token = problem.inputs(), 33
    inputs.query[:, :, token] = float("nan")
    output, _, dq, dk, dv = everything(name, call_of(problem, inputs), inputs)
    other = torch.arange(problem.n) != token
    seen = multiplicities(problem.pattern, problem.n, problem.heads)[:, token] > 0
    assert output[:, :, other].isfinite().all()
    assert output[:, :, token].isnan().all()
    assert dq[:, :, other].isfinite().all()
    for grad in (dk, dv):
        assert torch.equal(grad[0].isnan().all(-1), seen)
        assert torch.equal(grad[0].isnan().any(-1), seen)


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_without_a_key_are_zero_without_gradients(name):
    problem = BY_NAME["all-padded"]
    inputs = problem.inputs()
    output, lse, dq, dk, dv = everything(name, call_of(problem, inputs), inputs)
    assert (output[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    for grad in (dq, dk, dv):
        assert (grad[1] == 0).all()


@pytest.mark.parametrize("budget", [1, 20_000])
@pytest.mark.parametrize("case", ["global-window", "dilated-odd-rates", "padded"])
def test_small_steps_of_the_torch_backend_give_the_same_result(monkeypatch, budget, case):
    monkeypatch.setattr(cpu, "BUDGET", budget)
    check("cpu", BY_NAME[case], torch.float64)


def test_reference_states_unsupported_calls():
    problem = BY_NAME["causal"]
    call = call_of(problem, problem.inputs())
    reference = backend_named("reference")
    assert reference.why_not(replace(call, pattern=None)) == "needs the pattern, got a plan alone"
    long = torch.empty(1, 1, 8193, 4)
    assert reference.why_not(replace(call, query=long)) == "n must be <= 8192, got 8193"


@pytest.mark.parametrize("name", ["cpu", "native"])
def test_tensor_on_another_device_is_refused(name):
    problem = BY_NAME["causal"]
    call = call_of(problem, problem.inputs())
    assert backend_named(name).why_not(replace(call, query=call.query.to("meta"))) == "needs a CPU tensor, got meta"


@pytest.mark.parametrize("text", ["full", "dilated:8x1,32x4", "window:9 | dilated:32x4"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_equal_scores_of_any_size_share_weights(backend: str, text: str):
    """Scores of 2^50 are exact in float32, their LSE is not: it has lost the number of equal scores."""
    q, k = (torch.randint(-3, 4, (2, 4, 50, 8), generator=torch.Generator().manual_seed(i)).float() for i in range(2))
    v = torch.randn(2, 4, 50, 8)
    for size in (1.0, 2.0**14, 2.0**50):
        output = attention(size * q, k, v, text, scale=1.0, backend=backend)
        exact = answer((size * q).double(), k.double(), v.double(), parse(text), scale=1.0).output
        assert error(output, exact) < 1e-6
        ones = attention(size * q, k, torch.ones_like(v), text, scale=1.0, backend=backend)
        seen = ones != 0
        assert (ones[seen] - 1).abs().max() < 1e-6
