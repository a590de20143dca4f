"""The operation against the dense float64 oracle, for every backend of this machine: output, LSE, every gradient."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from cases import BY_NAME, PROBLEMS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import answer, error, multiplicities
from strategies import problems

from dilated_attention_pytorch import Causal, Dilated, Full, Packed, attention, attention_with_lse, parse
from dilated_attention_pytorch.kernels.cpu.native import library_path

BACKENDS = [
    "reference",
    "cpu",
    pytest.param("native", marks=pytest.mark.skipif(not library_path().exists(), reason="C++ kernel not built")),
]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6}


def run(problem, backend, dtype=torch.float64, layout="bhnd", **options):
    inputs = problem.inputs(dtype)
    if layout == "bnhd":
        inputs = type(inputs)(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs[:4]), inputs.grad_lse)
    leaves = [t.requires_grad_() for t in inputs[:3]]
    padding = problem.key_padding_mask()
    output, lse = attention_with_lse(
        *leaves, problem.pattern, enable_gqa=True, key_padding_mask=padding, backend=backend, **options
    )
    objective = (output * inputs.grad_output).sum() + torch.where(lse.isfinite(), lse * inputs.grad_lse, 0.0).sum()
    found = output, lse, *torch.autograd.grad(objective, leaves)
    wanted = answer(
        *leaves,
        problem.pattern,
        grad_output=inputs.grad_output,
        grad_lse=inputs.grad_lse,
        key_padding_mask=padding,
        **{key: value for key, value in options.items() if key == "scale"},
    )
    return found, wanted


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_every_problem_matches_the_oracle(problem, dtype, backend):
    found, wanted = run(problem, backend, dtype)
    for name, got, want in zip(("output", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert error(got, want) <= TOLERANCE[dtype] * (1 if name in ("output", "lse") else 4), name


@pytest.mark.parametrize("backend", BACKENDS)
@given(problems(longest=100), st.integers(0, 2**31))
@settings(max_examples=40)
def test_any_pattern_matches_the_oracle(backend, problem, seed):
    pattern, n, heads = problem
    try:
        counts = multiplicities(pattern, n, heads)
    except ValueError:
        assume(False)
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(1, heads, n, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    grad = torch.randn(1, heads, n, 8, generator=generator, dtype=torch.float64)
    output, lse = attention_with_lse(*leaves, pattern, backend=backend)
    found = output, lse, *torch.autograd.grad((output * grad).sum(), leaves)
    for got, want in zip(found, answer(*leaves, pattern, grad_output=grad), strict=True):
        assert error(got, want) <= 1e-10
    ones = attention(leaves[0], leaves[1], torch.ones_like(leaves[2]), pattern, backend=backend)
    assert error(ones[0, ..., 0], (counts.sum(-1) > 0).double()) <= 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["full-ragged", "window-causal", "dilated-ladder-causal", "gqa", "padded"])
def test_low_precision_errs_no_more_than_twice_sdpa(name, dtype, backend):
    problem = BY_NAME[name]
    found, wanted = run(problem, backend, dtype)
    inputs = problem.inputs(dtype)
    leaves = [t.requires_grad_() for t in inputs[:3]]
    # torch's own attention with the same pairs as an additive mask, in the same dtype.
    bias = multiplicities(problem.pattern, problem.n, problem.heads).log()[None]
    padding = problem.key_padding_mask()
    if padding is not None:
        bias = bias.masked_fill(padding[:, None, None], -math.inf)
    theirs = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=bias.to(dtype), enable_gqa=True)
    theirs = theirs, None, *torch.autograd.grad((theirs * inputs.grad_output).sum(), leaves)
    no_lse = answer(*leaves, problem.pattern, grad_output=inputs.grad_output, key_padding_mask=padding)
    seen = wanted.lse.isfinite()[..., None]
    for got, want, their, plain in zip(found, wanted, theirs, no_lse, strict=True):
        if their is None:
            assert error(got, want) <= 2e-6
        else:
            same_rows = (
                seen if their.shape[1] == seen.shape[1] and their is theirs[0] else torch.ones(1, dtype=torch.bool)
            )
            allowed = 2 * error(torch.where(same_rows, their, 0.0), torch.where(same_rows, plain, 0.0))
            assert error(got, want) <= max(allowed, torch.finfo(dtype).eps)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-3, 30.0])
def test_any_finite_scale(backend, scale):
    found, wanted = run(BY_NAME["window-causal"], backend, scale=scale)
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) <= 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gqa", "dilated-ladder", "random", "wide-value"])
def test_heads_inside_tokens_give_the_same_in_the_same_layout(backend, name):
    problem = BY_NAME[name]
    found, wanted = run(problem, backend, layout="bnhd")
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) <= 1e-10
    assert found[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_any_kind(backend):
    wide = torch.randn(2, 3, 70, 40, dtype=torch.float64)
    query, key, value = wide[:, :, ::2, 3:19], wide.flip(2)[:, :, ::2, 5:21], wide[..., ::2][:, :, 35:, :16]
    found = attention(query, key, value, "window:4", backend=backend)
    assert error(found, answer(query, key, value, parse("window:4")).output) <= 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", ["dilated:16x1,48x3 & causal", "window:9 | global:2", "random:0.5;block=16"])
def test_a_batch_is_its_entries_and_heads_may_be_permuted(backend, pattern):
    q, k, v = torch.randn(3, 3, 4, 75, 16).unbind()
    whole = attention(q, k, v, pattern, backend=backend)
    for entry in range(3):
        alone = attention(*(t[entry : entry + 1] for t in (q, k, v)), pattern, backend=backend)
        assert torch.allclose(whole[entry], alone[0], atol=2e-6)
    if "dilated" not in pattern:
        order = [2, 0, 3, 1]
        permuted = attention(*(t[:, order] for t in (q, k, v)), pattern, backend=backend)
        assert torch.allclose(whole[:, order], permuted, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_influence_is_the_pattern(backend):
    pattern = Dilated((12, 20), (2, 3)) & Causal()
    n = 37
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    output = attention(q, k, v, pattern, backend=backend)
    allowed = multiplicities(pattern, n, 2) > 0
    for row in range(n):
        for leaf in (k, v):
            (grad,) = torch.autograd.grad(output[0, :, row].sum(), leaf, retain_graph=True)
            moved = grad[0].abs().amax(-1) > 0
            assert not (moved & ~allowed[:, row]).any()
            if leaf is v:
                assert torch.equal(moved, allowed[:, row])


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_equal_a_loop(backend):
    lengths = [40, 1, 40, 23]
    pattern = Dilated((16, 32), (1, 2), offset="block")
    q, k, v = torch.randn(3, 1, 4, sum(lengths), 8, dtype=torch.float64).unbind()
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    packed = attention(q, k, v, pattern, is_causal=True, cu_seqlens=bounds, backend=backend)
    pieces = zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True)
    alone = torch.cat([attention(*piece, pattern, is_causal=True, backend=backend) for piece in pieces], 2)
    assert error(packed, alone) <= 1e-12
    assert error(attention(q, k, v, Packed(pattern & Causal(), tuple(lengths)), backend=backend), alone) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_equals_the_shorter_sequence(backend):
    q, k, v = torch.randn(3, 1, 2, 60, 8, dtype=torch.float64).unbind()
    mask = torch.arange(60)[None] >= 41
    padded = attention(q, k, v, "window:7", key_padding_mask=mask, backend=backend)
    short = attention(*(t[:, :, :41] for t in (q, k, v)), "window:7", backend=backend)
    assert error(padded[:, :, :41], short) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_keys_are_zero_and_pass_no_gradient(backend):
    q, k, v = (torch.randn(1, 2, 20, 4, requires_grad=True) for _ in range(3))
    everything_padded = torch.ones(1, 20, dtype=torch.bool)
    output, lse = attention_with_lse(q, k, v, Full(), key_padding_mask=everything_padded, backend=backend)
    assert (output == 0).all() and (lse == -math.inf).all()
    (output.sum() + torch.where(lse.isfinite(), lse, 0.0).sum()).backward()
    assert all((t.grad == 0).all() for t in (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_what_is_not_finite_stays_where_it_is_seen(backend, poison, where):
    pattern, n = parse("window:3 | dilated:20x4"), 45
    tensors = {name: torch.randn(1, 2, n, 4) for name in ("query", "key", "value")}
    clean = attention(**tensors, pattern=pattern, backend=backend)
    tensors[where][0, 0, 17] = poison
    dirty = attention(**tensors, pattern=pattern, backend=backend)
    sees = multiplicities(pattern, n, 2)[0, :, 17] > 0 if where != "query" else torch.arange(n) == 17
    assert torch.allclose(clean[0, 1], dirty[0, 1], atol=1e-6)
    assert torch.allclose(clean[0, 0][~sees], dirty[0, 0][~sees], atol=1e-6)
    if math.isnan(poison):
        assert dirty[0, 0][sees].isnan().any(-1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_huge_logits_do_not_overflow(backend):
    q, k, v = torch.randn(3, 1, 2, 50, 8).unbind()
    found = attention_with_lse(1e4 * q, 1e4 * k, v, "window:6", backend=backend)
    wanted = answer(1e4 * q, 1e4 * k, v, parse("window:6"))
    assert error(found.output, wanted.output) <= 2e-5
    assert error(found.lse, wanted.lse) <= 2e-6


def test_gradcheck_through_output_and_lse():
    leaves = [torch.randn(1, 2, 9, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    pattern = Dilated((3, 6), (1, 2)) & Causal()
    for backend in ("cpu", "auto"):
        assert torch.autograd.gradcheck(lambda *t, b=backend: tuple(attention_with_lse(*t, pattern, backend=b)), leaves)


def test_two_runs_a_copy_and_a_checkpoint_give_the_same_numbers():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = torch.nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.projection(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return attention(q, k, v, "dilated:16x1,32x2 & causal")

    block, x = Block(), torch.randn(2, 50, 8, requires_grad=True)
    first = block(x)
    assert torch.equal(first, block(x))
    assert torch.equal(first, copy.deepcopy(block)(x))
    first.sum().backward()
    plain = x.grad.clone()
    x.grad = None
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert torch.equal(plain, x.grad)


def test_autocast_computes_in_its_dtype():
    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, lse = attention_with_lse(q, k, v, "window:8")
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    output.float().sum().backward()
    assert q.grad.dtype == torch.float32
    assert error(output, answer(q, k, v, parse("window:8")).output) <= 2e-2


def test_vmap_joins_the_batch():
    q, k, v = torch.randn(3, 5, 2, 2, 30, 8).unbind()
    mapped = torch.func.vmap(lambda *t: attention(*t, "window:4"))(q, k, v)
    loop = torch.stack([attention(*t, "window:4") for t in zip(q, k, v, strict=True)])
    assert torch.allclose(mapped, loop, atol=1e-6)
    one_key = torch.func.vmap(lambda a, b: attention(a, b, b, "window:4"), in_dims=(0, None))(q, k[0])
    assert torch.allclose(one_key[3], attention(q[3], k[0], k[0], "window:4"), atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "cpu", "native"])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_entries_of_vmap_drop_the_same_pairs_only_if_asked_to(randomness, backend):
    q, k, v = torch.randn(3, 2, 2, 5, 8).unbind()

    def drop(query):
        return attention(query, k, v, "full", dropout_p=0.5, backend=backend)

    first, *others = torch.func.vmap(drop, randomness=randomness)(q.expand(5, *q.shape))
    assert all(torch.equal(first, other) == (randomness == "same") for other in others)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11, about its own default
def test_who_looks_on_sees_the_operators():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.add(func.name())
            return func(*args, **(kwargs or {}))

    query = torch.randn(1, 2, 64, 16, requires_grad=True)
    with Names() as names:
        attention(query, query, query, "window:8").sum().backward()
    both = {"dilated_attention::forward", "dilated_attention::backward"}
    assert both <= names.seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(query, query, query, "window:8").sum().backward()
    assert both <= {event.name for event in profile.events()}
