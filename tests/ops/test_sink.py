"""Learned sinks: every entry against dense float64 attention with an explicit extra column."""

from __future__ import annotations

import pytest
import torch
from calls import least_budget
from oracle import error, multiplicities, sink_gradient
from worlds import run_threads

from dilated_attention_pytorch import (
    SequenceLayout,
    attention,
    attention_step,
    attention_with_lse,
    context_parallel_attention,
    context_parallel_attention_with_lse,
    parse,
    shard_sequence,
)
from dilated_attention_pytorch.kernels import reference
from dilated_attention_pytorch.kernels.call import DeltaGradients
from dilated_attention_pytorch.kernels.sink import apply_sink, backward_with_sink, row_products
from dilated_attention_pytorch.ops.attention import CallSettings, call_of

HEADS = 4


def leaves(n=50, batch=2, key_heads=2, dtype=torch.float64):
    shapes = [(batch, h, n, w) for h, w in ((HEADS, 16), (key_heads, 16), (key_heads, 8))]
    tensors = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return [*tensors, torch.randn(HEADS, dtype=dtype).mul_(2).requires_grad_()]


def with_column(query, key, value, sink, counts, *, padding=None):
    """Softmax over the keys and one more column, which is then dropped: output and the LSE of the keys alone."""
    query, key, value, sink = (x.double() for x in (query, key, value, sink))
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = query.shape[-1] ** -0.5 * query @ key.mT + counts.log()
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None], -torch.inf)
    column = sink[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    seen = (scores > -torch.inf).any(-1)
    lse = torch.where(seen, torch.where(seen[..., None], scores, 0.0).logsumexp(-1), -torch.inf)
    return weights @ value, lse


def check(found, wanted, tensors, tolerance=1e-10):
    """Output, LSE and gradients of both through every tensor."""
    weights = torch.randn_like(wanted[0]), torch.randn_like(wanted[1])

    def grads(output, lse):
        lse = torch.where(lse.isfinite(), lse, 0.0)
        loss = (output.double() * weights[0]).sum() + (lse.double() * weights[1]).sum()
        return torch.autograd.grad(loss, tensors)

    assert error(found[0], wanted[0]) < tolerance
    assert error(found[1], wanted[1]) < tolerance
    for got, expected in zip(grads(*found), grads(*wanted), strict=True):
        assert error(got, expected) < tolerance


OPTIONS = {
    "plain": {},
    "padded": {"key_padding_mask": torch.arange(50)[None] >= torch.tensor([[50], [30]])},
    "budget": {"memory_budget": 2**21},
}


@pytest.mark.parametrize("backend", ["reference", "cpu", "native"])
@pytest.mark.parametrize("option", OPTIONS)
def test_sink_gradients_match_an_extra_column(option, backend):
    tensors = leaves(dtype=torch.float32 if backend == "native" else torch.float64)
    *inputs, sink = tensors
    options = OPTIONS[option]
    found = attention_with_lse(
        *inputs, "window:7 | global:2", is_causal=True, enable_gqa=True, sink=sink, backend=backend, **options
    )
    counts = multiplicities(parse("(window:7 | global:2) & causal"), 50, HEADS)
    wanted = with_column(*tensors, counts, padding=options.get("key_padding_mask"))
    check(found, wanted, tensors, 1e-5 if backend == "native" else 1e-10)


def test_packed_rows_each_have_the_sink():
    tensors = leaves(batch=1)
    *inputs, sink = tensors
    found = attention_with_lse(
        *inputs, "dilated:8x1,32x4", enable_gqa=True, sink=sink, cu_seqlens=torch.tensor([0, 20, 50])
    )
    counts = torch.zeros(HEADS, 50, 50, dtype=torch.float64)
    for begin, end in ((0, 20), (20, 50)):
        counts[:, begin:end, begin:end] = multiplicities(parse("dilated:8x1,32x4"), end - begin, HEADS)
    check(found, with_column(*tensors, counts), tensors)


def test_dropout_acts_on_the_weights_beside_the_sink():
    tensors = leaves()
    *inputs, sink = tensors
    torch.manual_seed(5)
    plain = attention(*inputs, "full", enable_gqa=True, dropout_p=0.4)
    torch.manual_seed(5)
    found = attention_with_lse(*inputs, "full", enable_gqa=True, dropout_p=0.4, sink=sink)
    ones = torch.ones(HEADS, 50, 50, dtype=torch.float64)
    lse = with_column(*tensors, ones)[1]
    # The mask follows from the seed alone, so the weights that stay are the same with and without a sink.
    wanted = plain * (lse.exp() / (lse.exp() + sink.exp()[:, None]))[..., None]
    assert error(found.output, wanted) < 1e-10
    check(found, (wanted, lse), tensors)


@pytest.mark.parametrize("backend", ["reference", "cpu", "native"])
def test_gradcheck_of_output_and_lse_with_a_sink(backend):
    *inputs, sink = leaves(n=9, batch=1)
    padding = torch.arange(9)[None] < 2

    def call(*tensors):
        output, lse = attention_with_lse(
            *tensors[:3], "window:2", is_causal=True, enable_gqa=True, sink=tensors[3], key_padding_mask=padding,
            backend=backend,
        )  # fmt: skip
        # The LSE of the first rows is -inf.
        return output, lse[:, :, 2:]

    tensors = [x.detach()[:, :, :, :3].requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(call, [*tensors, sink])
    # Without a gradient of the LSE, which the backward then does not shift.
    assert torch.autograd.gradcheck(lambda *x: call(*x)[0], [*tensors, sink])


@pytest.mark.parametrize("backend", ["reference", "cpu", "native"])
@pytest.mark.parametrize("value", [-torch.inf, -1e9, -100.0, 100.0, 1e9, torch.inf])
def test_gradients_of_extreme_sinks_are_those_of_the_limit(value, backend):
    *inputs, _ = leaves(batch=1, dtype=torch.float32)
    sink = torch.full((HEADS,), value, requires_grad=True)
    weights = torch.randn(1, HEADS, 50, 8), torch.randn(1, HEADS, 50)

    def grads(run, *tensors):
        output, lse = run(*tensors)
        return torch.autograd.grad((output * weights[0]).sum() + (lse * weights[1]).sum(), tensors, allow_unused=True)

    def call(*tensors):
        return attention_with_lse(*tensors[:3], "window:7", enable_gqa=True, backend=backend, sink=(*tensors, None)[3])

    found = grads(call, *inputs, sink)
    if value < 0:
        wanted = grads(call, *inputs)
    else:
        # The output is 0, and only the LSE has gradients.
        *wanted, _ = *grads(lambda *x: (0 * call(*x)[0], call(*x)[1]), *inputs), None
    for got, want in zip(found, wanted, strict=False):
        assert error(got, want) < 5e-6
    assert error(found[3], torch.zeros(HEADS)) < 1e-30


class WithDelta:
    """A backend that returns delta as the kernels of GPUs do, in the precision of the LSE."""

    forward = staticmethod(reference.forward)

    @staticmethod
    def backward(call, output, lse, grad_output, grad_lse):
        grads = DeltaGradients(*reference.backward(call, output, lse, grad_output, grad_lse))
        grads.delta = row_products(output, grad_output, lse.dtype) - grad_lse
        return grads


@pytest.mark.parametrize("above", [4.0, 9.0, 14.0, 40.0])
def test_large_sinks_and_a_gradient_of_the_lse_are_exact(above):
    query, key, value, _ = (x.detach() for x in leaves(batch=1, dtype=torch.float32))
    sink, grad_output = torch.full((HEADS,), above + 2.0), torch.rand(1, HEADS, 50, 8)
    call = call_of(query, key, value, CallSettings(pattern="window:7", scale=0.25, sink=sink))
    output, lse = WithDelta.forward(call)
    _, found = backward_with_sink(WithDelta, call, output, lse, grad_output, torch.ones_like(lse))
    wanted = sink_gradient(query, key, value, parse("window:7"), sink, grad_output=grad_output)
    # Relative to gradients that are small, as weights are under these sinks.
    assert error(found / wanted, torch.ones(HEADS)) < 1e-5


@pytest.mark.parametrize("backend", ["reference", "cpu", "native"])
def test_sink_gradients_in_a_tight_budget(backend):
    tensors = leaves(dtype=torch.float32)
    *inputs, sink = tensors
    settings = CallSettings(pattern="window:7", scale=0.25, backend=backend, sink=sink.detach())
    budget = least_budget(call_of(*(x.detach() for x in inputs), settings), backend)
    found = attention_with_lse(*inputs, "window:7", enable_gqa=True, sink=sink, backend=backend, memory_budget=budget)
    check(found, with_column(*tensors, multiplicities(parse("window:7"), 50, HEADS)), tensors, 1e-5)


def test_sums_of_chunks_are_rounded_to_the_sink_once():
    query, key, value = (torch.randn(1, 16, 600, 8) for _ in range(3))
    sink, grad_output = torch.zeros(16, dtype=torch.bfloat16, requires_grad=True), torch.randn(1, 16, 600, 8)
    settings = CallSettings(pattern="window:3", scale=8**-0.5, backend="cpu", sink=sink.detach())
    budget = least_budget(call_of(query, key, value, settings), "cpu")
    output = attention(query, key, value, "window:3", sink=sink, backend="cpu", memory_budget=budget)
    (found,) = torch.autograd.grad(output, sink, grad_output)
    wanted = sink_gradient(query, key, value, parse("window:3"), sink, grad_output=grad_output)
    assert torch.equal(found, wanted.bfloat16())


def test_mapped_sinks_are_computed_one_by_one():
    *inputs, _ = leaves(batch=1)
    sinks = torch.randn(3, HEADS, dtype=torch.float64, requires_grad=True)
    tensors = [x.detach() for x in inputs]

    def loss(sink):
        return attention(*tensors, "window:7", enable_gqa=True, sink=sink).square().sum()

    (found,) = torch.autograd.grad(torch.func.vmap(loss)(sinks).sum(), sinks)
    (wanted,) = torch.autograd.grad(sum(map(loss, sinks)), sinks)
    assert error(found, wanted) < 1e-10


def test_second_derivatives_of_a_sink_are_refused():
    *inputs, sink = leaves(n=20)
    output = attention(*inputs, "window:7", enable_gqa=True, sink=sink)
    (grad,) = torch.autograd.grad(output.square().sum(), sink, create_graph=True)
    with pytest.raises(NotImplementedError, match="derivative for the backward of attention"):
        torch.autograd.grad(grad.sum(), sink)


def test_no_pass_over_the_output_is_saved_for_a_sink():
    *inputs, sink = leaves(n=64, dtype=torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attention(*inputs, "window:7", enable_gqa=True, sink=sink)
    # Query, key, value, sink, output, LSE.
    assert [tuple(x.shape) for x in saved].count((2, HEADS, 64, 8)) == 1 and len(saved) == 6


def test_rows_without_a_slope_are_exact_below_a_large_sink():
    query, key, value, _ = leaves(dtype=torch.float32)
    sink = torch.full((HEADS,), 30.0)
    output, lse = attention_with_lse(query, key, value, "window:7", enable_gqa=True, sink=sink)
    for slope in (torch.zeros_like(lse), torch.zeros_like(lse).index_fill(2, torch.tensor(20), 1.0)):
        (found,) = torch.autograd.grad((output, lse), value, (torch.ones_like(output), slope), retain_graph=True)
        (wanted,) = torch.autograd.grad(output, value, torch.ones_like(output), retain_graph=True)
        far = torch.arange(50).sub(20).abs() > 7
        assert torch.allclose(found[:, :, far], wanted[:, :, far], rtol=1e-4, atol=0)


def test_outputs_with_a_sink_have_the_same_bits_in_chunks():
    for n in (50, 57, 61):
        *inputs, sink = (x.detach() for x in leaves(n=n, batch=3, dtype=torch.float32))
        whole = attention(*inputs, "dilated:8x1,32x4", enable_gqa=True, sink=sink, backend="native")
        for sample in range(3):
            one = (x[sample : sample + 1] for x in inputs)
            alone = attention(*one, "dilated:8x1,32x4", enable_gqa=True, sink=sink, backend="native")
            assert torch.equal(alone, whole[sample : sample + 1])


def test_lse_and_output_without_a_sink_are_unchanged():
    *inputs, sink = leaves()
    plain = attention_with_lse(*inputs, "window:9", enable_gqa=True)
    found = attention_with_lse(*inputs, "window:9", enable_gqa=True, sink=sink)
    assert torch.equal(plain.lse, found.lse)
    assert torch.equal(attention(*inputs, "window:9", enable_gqa=True, sink=sink), found.output)
    absent = attention(*inputs, "window:9", enable_gqa=True, sink=torch.full((HEADS,), -torch.inf))
    assert torch.equal(absent, plain.output)


@pytest.mark.parametrize("value", [0.0, -torch.inf, torch.inf])
def test_rows_without_keys_are_zero_with_any_sink(value):
    *inputs, _ = leaves(n=12, batch=1)
    sink = torch.full((HEADS,), value, dtype=torch.float64, requires_grad=True)
    padding = torch.arange(12)[None] < 5
    found = attention_with_lse(*inputs, "window:2", enable_gqa=True, key_padding_mask=padding, sink=sink)
    assert (found.output[:, :, :3] == 0).all() and (found.lse[:, :, :3] == -torch.inf).all()
    grads = torch.autograd.grad(found.output.sum(), [*inputs, sink])
    assert all(grad.isfinite().all() for grad in grads)
    assert (found.output[:, :, 5:] == 0).all() == (value == torch.inf)


def test_what_is_not_finite_stays_in_its_row():
    output = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    lse = torch.tensor([[[0.5, torch.inf, torch.nan]] * 2], dtype=torch.float64)
    found = apply_sink(output, lse, torch.zeros(2, dtype=torch.float64))
    assert torch.equal(found[:, :, 1], output[:, :, 1]) and found[:, :, 2].isnan().all()
    assert error(found[:, :, 0], output[:, :, 0] * torch.tensor(0.5).double().sigmoid()) < 1e-12
    assert (apply_sink(output, torch.full_like(lse, -torch.inf), torch.zeros(2)) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_computes_the_sink_in_float32(dtype):
    tensors = [x.detach().to(dtype).requires_grad_() for x in leaves()]
    *inputs, sink = tensors
    found = attention(*inputs, "window:7", enable_gqa=True, sink=sink)
    wanted = with_column(*tensors, multiplicities(parse("window:7"), 50, HEADS))[0]
    assert found.dtype == dtype
    assert error(found, wanted) < 8 * torch.finfo(dtype).eps
    # Near 100, bfloat16 has steps of 0.5.
    output, lse = torch.randn(1, HEADS, 5, 8, dtype=dtype), 100 + torch.randn(1, HEADS, 5)
    shift = torch.sigmoid(lse.double() - 100)[..., None]
    near = apply_sink(output, lse, torch.full((HEADS,), 100.0, dtype=dtype))
    assert error(near, output.double() * shift) < 4 * torch.finfo(dtype).eps + 1e-5
    huge = torch.full((HEADS,), 60_000.0, dtype=dtype)
    assert (attention(*inputs, "window:7", enable_gqa=True, sink=huge) == 0).all()


def test_autocast_takes_a_float32_sink():
    tensors = [x.detach().float() for x in leaves()]
    *inputs, sink = tensors
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(*inputs, "window:7", enable_gqa=True, sink=sink)
    wanted = with_column(*tensors, multiplicities(parse("window:7"), 50, HEADS))[0]
    assert found.dtype == torch.bfloat16 and error(found, wanted) < 0.03


@pytest.mark.parametrize("shape", [(0, 50), (2, 0)])
def test_empty_calls_give_the_sink_a_zero_gradient(shape):
    *inputs, sink = leaves(n=shape[1], batch=shape[0])
    found = attention(*inputs, "window:7", enable_gqa=True, sink=sink)
    assert found.shape == (shape[0], HEADS, shape[1], 8)
    (grad,) = torch.autograd.grad(found.sum(), [sink])
    assert (grad == 0).all()


@pytest.mark.parametrize("first", [[40, 40], [35, 41]])
@pytest.mark.parametrize("rows", [1, 3])
def test_steps_are_rows_of_the_whole_with_a_sink(rows, first):
    *inputs, sink = tensors = leaves()
    padding = torch.arange(50)[None] < torch.tensor([[0], [41]])
    whole = with_column(*tensors, multiplicities(parse("window:7 & causal"), 50, HEADS), padding=padding)[0]
    wanted = torch.stack([whole[b, :, t : t + rows] for b, t in enumerate(first)])
    query = torch.stack([inputs[0][b, :, t : t + rows] for b, t in enumerate(first)])
    found = attention_step(query, *inputs[1:], "window:7", first, enable_gqa=True, key_padding_mask=padding, sink=sink)
    assert error(found, wanted) < 1e-10
    weights = torch.randn_like(wanted)
    for got, expected in zip(
        torch.autograd.grad((found * weights).sum(), tensors),
        torch.autograd.grad((wanted * weights).sum(), tensors),
        strict=True,
    ):
        assert error(got, expected) < 1e-10


def test_a_long_step_has_the_sink():
    *inputs, sink = leaves(n=120, batch=1)
    whole = attention(*inputs, "window:7", is_causal=True, enable_gqa=True, sink=sink)
    found = attention_step(inputs[0][:, :, 40:], *inputs[1:], "window:7", 40, enable_gqa=True, sink=sink)
    assert error(found, whole[:, :, 40:].detach()) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sink_on_one_rank_is_that_of_attention(dtype):
    *inputs, sink = leaves(dtype=dtype)
    layout = SequenceLayout.contiguous(50, 1)
    whole = attention(*inputs, "window:7", enable_gqa=True, sink=sink)
    found = context_parallel_attention(*inputs, "window:7", layout, enable_gqa=True, sink=sink)
    assert torch.equal(found, whole)


@pytest.mark.parametrize("overlap", ["none", "local"])
def test_sink_gradients_sum_over_ranks(overlap):
    *inputs, sink = tensors = leaves()
    padding = torch.arange(50)[None] < torch.tensor([[0], [12]])
    wanted, lse = with_column(*tensors, multiplicities(parse("window:7 & causal"), 50, HEADS), padding=padding)
    weights = torch.randn_like(wanted)
    grads = torch.autograd.grad((wanted * weights).sum(), tensors)
    parts: dict[int, torch.Tensor] = {}

    def check_rank(rank, world):
        layout = SequenceLayout.zigzag(50, world)
        own = [shard_sequence(x.detach(), layout, rank).clone().requires_grad_() for x in inputs]
        own_sink = sink.detach().clone().requires_grad_()
        found = context_parallel_attention_with_lse(
            *own, "window:7", layout, is_causal=True, enable_gqa=True, sink=own_sink, overlap=overlap,
            key_padding_mask=shard_sequence(padding, layout, rank, 1),
        )  # fmt: skip
        assert error(found.output, shard_sequence(wanted.detach(), layout, rank)) < 1e-10
        assert error(found.lse, shard_sequence(lse.detach(), layout, rank)) < 1e-10
        objective = (found.output * shard_sequence(weights, layout, rank)).sum()
        *own_grads, parts[rank] = torch.autograd.grad(objective, [*own, own_sink])
        for got, expected in zip(own_grads, grads, strict=False):
            assert error(got, shard_sequence(expected, layout, rank)) < 1e-10

    run_threads(check_rank, 2)
    assert error(parts[0] + parts[1], grads[-1]) < 1e-10


def test_a_wrong_sink_on_one_rank_raises_on_all():
    def check_rank(rank, world):
        shard = torch.randn(1, 2, 12, 8)
        layout = SequenceLayout.contiguous(12 * world, world)
        says = "sink must have shape" if rank else "every rank must make the same call"
        with pytest.raises(ValueError, match=says):
            context_parallel_attention(shard, shard, shard, "window:4", layout, sink=torch.zeros(2 + rank))

    run_threads(check_rank, 2)


WRONG = {
    "number": (1.0, TypeError, "sink must be a Tensor"),
    "shape": (torch.zeros(3), ValueError, r"sink must have shape \(4,\)"),
    "matrix": (torch.zeros(4, 1), ValueError, r"sink must have shape \(4,\)"),
    "integers": (torch.zeros(4, dtype=torch.long), TypeError, "floating-point"),
    "device": (torch.zeros(4, device="meta"), ValueError, "sink must be on the query's device cpu"),
}


@pytest.mark.untyped
@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_sink_says_what_must_hold(which):
    *inputs, _ = leaves()
    sink, kind, says = WRONG[which]
    layout = SequenceLayout.contiguous(50, 1)
    for call in (
        lambda: attention(*inputs, "window:7", enable_gqa=True, sink=sink),
        lambda: attention_with_lse(*inputs, "window:7", enable_gqa=True, sink=sink),
        lambda: attention_step(inputs[0][:, :, :1], *inputs[1:], "window:7", 0, enable_gqa=True, sink=sink),
        lambda: context_parallel_attention(*inputs, "window:7", layout, enable_gqa=True, sink=sink),
    ):
        with pytest.raises(kind, match=says):
            call()
