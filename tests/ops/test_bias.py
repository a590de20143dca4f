"""Biases by distance: tables of one and two axes against dense float64 attention, gradients of the table included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import answer, bias_of_pairs, dense_attention, error, multiplicities, table_gradient
from strategies import Explored, draw_problem

from dilated_attention_pytorch import (
    BackendUnsupported,
    attention,
    attention_step,
    attention_with_lse,
    distance_bias,
    explain,
    t5_bias,
    varlen_attention,
)
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.kernels.registry import MODULES, backend_named
from dilated_attention_pytorch.ops import memory_budget
from dilated_attention_pytorch.patterns import as_pattern
from dilated_attention_pytorch.plan import make_plan

BACKENDS = [
    "reference",
    "cpu",
    pytest.param("native", marks=pytest.mark.skipif(not library_path().exists(), reason="C++ kernel not built")),
]
TEXTS = ["dilated:8x1,32x4 & causal", "window:3 | global:2", "full", "heads{window:4 / causal / full / strided:3}"]


def leaves(n=50, batch=2, dtype=torch.float64, heads=4, groups=2):
    shapes = [(batch, heads, n, 16), (batch, groups, n, 16), (batch, groups, n, 8)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def table_of(*widths, heads=4, dtype=torch.float64):
    return (2 * torch.randn(heads, *widths, dtype=dtype)).requires_grad_()


def wanted_of(inputs, table, pattern, positions=None, **options):
    n, heads = inputs[0].shape[2], inputs[0].shape[1]
    wide = [x.double() for x in inputs]
    pairs = bias_of_pairs(table.double(), n, positions)
    return dense_attention(*wide, multiplicities(as_pattern(pattern), n, heads), bias=pairs, **options)


def compare(found, wanted, inputs, tolerance):
    """Output, LSE and the gradients of all inputs."""
    weights = [torch.randn_like(x) for x in wanted]
    grads = []
    for output, lse in (found, wanted):
        lse = torch.where(lse.isfinite(), lse, 0.0)
        objective = (output.double() * weights[0]).sum() + (lse.double() * weights[1]).sum()
        grads.append(torch.autograd.grad(objective, inputs))
    for name, got, expected in zip("olqkvb", (*found, *grads[0]), (*wanted, *grads[1]), strict=True):
        assert error(got, expected.detach()) < tolerance, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("radius", [0, 3, 20, 60])
@pytest.mark.parametrize("pattern", TEXTS)
def test_table_gradients_match_dense(pattern, radius, softcap, backend):
    inputs, table = leaves(), table_of(2 * radius + 1)
    padding = torch.arange(50)[None] < torch.tensor([[0], [20]])
    options = {"key_padding_mask": padding, "softcap": softcap}
    found = attention_with_lse(*inputs, pattern, enable_gqa=True, bias=table, backend=backend, **options)
    compare(found, wanted_of(inputs, table, pattern, **options), [*inputs, table], 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_head_masked_by_its_table_moves_nothing(backend):
    inputs, table = leaves(n=20), table_of(9).detach()
    table[1] = -torch.inf
    output, lse = attention_with_lse(*inputs, "window:3", enable_gqa=True, bias=table, backend=backend)
    assert not output[:, 1].any() and (lse[:, 1] == -torch.inf).all()
    grads = torch.autograd.grad((output, lse), inputs, (torch.randn_like(output), torch.randn_like(lse)))
    assert not grads[0][:, 1].any() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("widths", [(5, 9), (1, 3), (31, 31)])
def test_tables_of_two_axes_match_dense(widths, by_sample, backend):
    inputs, table = leaves(), table_of(*widths)
    positions = torch.randint(-20, 20, (2, 50, 2) if by_sample else (50, 2))
    found = attention_with_lse(
        *inputs, "window:20", enable_gqa=True, bias=table, bias_positions=positions, backend=backend
    )
    compare(found, wanted_of(inputs, table, "window:20", positions), [*inputs, table], 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_of_one_axis_match_dense(backend):
    inputs, table = leaves(), table_of(41)
    positions = torch.randint(0, 1000, (50, 1), dtype=torch.int32).sort(0).values
    found = attention_with_lse(*inputs, "full", enable_gqa=True, bias=table, bias_positions=positions, backend=backend)
    compare(found, wanted_of(inputs, table, "full", positions), [*inputs, table], 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("widths", [(41,), (5, 9)])
@pytest.mark.parametrize("text", TEXTS)
def test_buffers_have_positions_by_head_and_side(text, widths, backend):
    """Rows of a buffer hold other tokens as queries than as keys, in each head."""
    query, key, value = (x.detach() for x in leaves())
    table, positions = table_of(*widths).detach(), torch.randint(0, 60, (2, 4, 50, len(widths)))
    pattern = as_pattern(text).resolve(50, 4)
    call = AttentionCall(query, key, value, make_plan(pattern, 50, 4), 0.25, pattern=pattern)
    call = replace(call, bias=table, bias_positions=positions)
    given = {"grad_output": torch.randn(2, 4, 50, 8), "grad_lse": torch.randn(2, 4, 50)}
    options = {"scale": 0.25, **given}
    wanted = answer(query, key, value, pattern, bias=bias_of_pairs(table, 50, positions), **options)
    run = backend_named(backend)
    output, lse = run.forward(call)
    grads = run.backward(call, output, lse, *(x.double() for x in given.values()))
    for got, want in zip((output, lse, *grads), wanted, strict=True):
        assert error(got, want) < 1e-10
    assert error(grads.bias, table_gradient(query, key, value, pattern, table, positions, **options)) < 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("positions", [None, 1, 2])
@pytest.mark.parametrize("rows", [1200, 600, 128])
@pytest.mark.parametrize("pattern", ["window:20 & causal", "dilated:64x1,256x4"])
def test_chunks_of_a_budget_match_dense(pattern, rows, positions, backend, monkeypatch):
    inputs, table = leaves(300), table_of(41 if positions != 2 else 9, *([7] if positions == 2 else []))
    options = {"softcap": 1.5, "key_padding_mask": torch.arange(300)[None] < torch.tensor([[0], [20]])}
    if positions is not None:
        options["bias_positions"] = torch.randint(0, 30, (2, 300, positions))

    def fitting(memory, budget):
        chunk = min((size for size in memory.sizes if size >= rows), default=None)
        assert chunk < 300 or rows > 300 or backend == "reference"
        return chunk

    monkeypatch.setattr(memory_budget.Memory, "fitting", fitting)
    found = attention_with_lse(*inputs, pattern, enable_gqa=True, bias=table, backend=backend, memory_budget=2**30, **options)  # fmt: skip
    wanted = wanted_of(inputs, table, pattern, options.pop("bias_positions", None), **options)
    compare(found, wanted, [*inputs, table], 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_err_by_rounding_alone(dtype, backend):
    inputs, table = leaves(300, dtype=dtype), table_of(31, dtype=torch.float32)
    found = attention_with_lse(*inputs, "window:90", enable_gqa=True, bias=table, softcap=3.0, backend=backend)
    assert found.output.dtype == dtype
    (grad,) = torch.autograd.grad(found.output.float().sum(), table, retain_graph=True)
    assert grad.dtype == torch.float32
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    compare(found, wanted_of(inputs, table, "window:90", softcap=3.0), [*inputs, table], tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_table_gradients_are_summed_wide(backend):
    """Each outermost entry holds for 10^5 pairs, whose terms have one sign."""
    n = 512
    query, key, value = (torch.randn(1, 1, n, 4) * 0.01 for _ in range(3))
    value[..., n // 2 :, :] += 1
    table = torch.zeros(1, 3, requires_grad=True)

    def grad(*tensors, run):
        return torch.autograd.grad(run(*tensors).sum(), table)[0]

    got = grad(query, key, value, run=lambda *x: attention(*x, "full", bias=table, backend=backend))
    wanted = grad(query, key, value, run=lambda *x: wanted_of(x, table, "full")[0])
    assert ((got - wanted) / wanted)[:, ::2].abs().max() < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_patterns_match_dense(backend, data):
    draw = Explored(data.draw)
    pattern, n, heads = draw_problem(draw)
    batch = draw.integer(1, 2)
    inputs = leaves(n, batch, heads=heads, groups=draw.choice([1, heads]))
    padding = torch.rand(batch, n) < 0.3 if draw.choice([False, True]) else None
    softcap = draw.choice([None, 0.7, 20.0])
    if draw.choice([True, False]):
        table, positions = table_of(2 * draw.integer(0, 2 * n) + 1, heads=heads), None
    else:
        table = table_of(2 * draw.integer(0, 9) + 1, 2 * draw.integer(0, 9) + 1, heads=heads)
        positions = torch.randint(-9, 9, (batch, n, 2))
    options = {"key_padding_mask": padding, "softcap": softcap}
    own = {"bias": table, "bias_positions": positions, "enable_gqa": True, "backend": backend}
    found = attention_with_lse(*inputs, pattern, **own, **options)
    compare(found, wanted_of(inputs, table, pattern, positions, **options), [*inputs, table], 1e-9)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_dropout_keeps_its_mask_under_a_bias(backend):
    inputs, table = leaves(), table_of(7)
    results = []
    for name in (backend, "reference"):
        torch.manual_seed(1)
        options = {"dropout_p": 0.3, "bias": table, "softcap": 2.0, "backend": name, "enable_gqa": True}
        results.append(attention_with_lse(*inputs, "dilated:9x1,30x3", **options))
    compare(*results, [*inputs, table], 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_leaves_the_table_wide(backend):
    inputs, table = leaves(dtype=torch.float32), table_of(7, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(*inputs, "window:9", enable_gqa=True, bias=table, backend=backend)
    assert output.dtype == torch.bfloat16
    rows = [x.bfloat16() for x in inputs]
    wanted = attention(*rows, "window:9", enable_gqa=True, bias=table, backend=backend)
    assert torch.equal(output, wanted)
    grads = [torch.autograd.grad(x.float().square().sum(), table)[0] for x in (output, wanted)]
    assert grads[0].dtype == torch.float32 and torch.equal(*grads)


def test_packed_documents_count_their_own_distances():
    query, key, value = leaves(60, batch=1)
    table = table_of(21)
    bounds = torch.tensor([0, 13, 14, 60])
    options = {"enable_gqa": True, "bias": table}
    packed = attention(query, key, value, "full", cu_seqlens=bounds, **options)
    alone = [
        attention(*(x[:, :, a:b] for x in (query, key, value)), "full", **options)
        for a, b in zip(bounds.tolist(), bounds.tolist()[1:], strict=False)
    ]
    assert error(packed, torch.cat(alone, 2).detach()) < 1e-12
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    flat = varlen_attention(*rows, bounds, None, 46, 46, **options)
    assert torch.equal(flat, packed[0].transpose(0, 1))


def test_left_padding_leaves_distances():
    inputs, table = leaves(40, batch=1), table_of(9)
    padding = torch.arange(40)[None] < 13
    padded = attention(*inputs, "causal", enable_gqa=True, bias=table, key_padding_mask=padding)[:, :, 13:]
    alone = attention(*(x[:, :, 13:] for x in inputs), "causal", enable_gqa=True, bias=table)
    assert error(padded, alone.detach()) < 1e-12


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_steps_are_rows_of_the_whole(rows):
    query, key, value = inputs = leaves(120)
    table = table_of(31)
    whole = attention(*inputs, "dilated:16x1,64x4", is_causal=True, enable_gqa=True, bias=table)[:, :, 40 : 40 + rows]
    step = attention_step(query[:, :, 40 : 40 + rows], key, value, "dilated:16x1,64x4", 40, enable_gqa=True, bias=table)
    grads = [torch.autograd.grad(x.sin().sum(), [*inputs, table]) for x in (step, whole)]
    for got, expected in ((step, whole), *zip(*grads, strict=True)):
        assert error(got, expected.detach()) < 1e-10


def test_steps_of_samples_at_different_positions():
    query, key, value = inputs = leaves(60)
    table = table_of(31)
    whole = attention(*inputs, "window:20", is_causal=True, enable_gqa=True, bias=table)
    rows = torch.stack([query[0, :, 50:51], query[1, :, 30:31]])
    step = attention_step(rows, key, value, "window:20", [50, 30], enable_gqa=True, bias=table)
    assert error(step[0], whole[0, :, 50:51].detach()) < 1e-10
    assert error(step[1], whole[1, :, 30:31].detach()) < 1e-10


def test_vmap_over_inputs_and_tables():
    inputs = [torch.stack([x.detach()] * 3) * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1, 1) for x in leaves()]
    tables, positions = torch.randn(3, 4, 5, 5), torch.randint(9, (3, 50, 2))

    def call(q, k, v, table, at):
        return attention(q, k, v, "window:9", enable_gqa=True, bias=table, bias_positions=at)

    for dims in ((0, 0, 0, None, None), (0, 0, 0, None, 0), (0, 0, 0, 0, None), (None, 0, 0, 0, 0)):
        given = (*inputs, tables, positions)
        args = [x if dim == 0 else x[0] for x, dim in zip(given, dims, strict=True)]
        found = torch.vmap(call, dims)(*args)
        for i in range(3):
            own = [x if dim is None else x[i] for x, dim in zip(args, dims, strict=True)]
            assert error(found[i], call(*own)) < 1e-12


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_per_sample_gradients_of_a_table():
    inputs, table = [x.detach() for x in leaves()], table_of(5).detach()

    def loss(table, *rows):
        return attention(*(x[None] for x in rows), "window:9", enable_gqa=True, bias=table).sin().sum()

    found = torch.vmap(torch.func.grad(loss), (None, 0, 0, 0))(table, *inputs)
    for i in range(2):
        assert error(found[i], torch.func.grad(loss)(table, *(x[i] for x in inputs))) < 1e-12


def test_a_second_derivative_raises():
    inputs, table = leaves(20), table_of(5)
    output = attention(*inputs, "full", enable_gqa=True, bias=table)
    (grad,) = torch.autograd.grad(output.sum(), table, create_graph=True)
    with pytest.raises(NotImplementedError, match="derivative for the backward"):
        grad.sum().backward()


def test_a_table_alone_may_require_a_gradient():
    inputs, table = [x.detach() for x in leaves()], table_of(5)
    output = attention(*inputs, "full", enable_gqa=True, bias=table)
    wanted = wanted_of(inputs, table, "full")[0]
    got, expected = (torch.autograd.grad(x.cos().sum(), table)[0] for x in (output, wanted))
    assert error(got, expected) < 1e-10
    empty = attention(*(x[:, :, :0] for x in inputs), "full", enable_gqa=True, bias=table)
    assert torch.autograd.grad(empty.sum(), table)[0].abs().max() == 0


def test_linear_tables_fall_with_the_distance():
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    line, plane = distance_bias(slopes, 4), distance_bias(slopes, 3, 4)
    assert line.shape == (2, 9)
    assert plane.shape == (2, 7, 9)
    assert line[0, 4] == plane[0, 3, 4] == 0
    assert plane[1, 0, 0] == -0.25 * 5
    (grad,) = torch.autograd.grad(line[1].sum(), slopes)
    assert grad.tolist() == [0, -20]


def test_backends_without_a_bias_are_skipped():
    query, table = torch.randn(1, 4, 20, 16), torch.zeros(4, 3)
    reasons = explain(query, query, query, "full", bias=table)
    assert reasons.backend is not None
    for name in MODULES:
        if not getattr(backend_named(name), "BIAS", False):
            assert reasons[name].startswith("has no bias by distance")
            with pytest.raises(BackendUnsupported, match="has no bias by distance"):
                attention(query, query, query, "full", bias=table, backend=name)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": torch.zeros(4, 4)}, r"bias must have shape \(4, 2 \* R \+ 1\)"),
        ({"bias": torch.zeros(3, 5)}, r"bias must have shape \(4, 2 \* R \+ 1\)"),
        ({"bias": torch.zeros(2, 4, 20, 20)}, "a bias by pair cannot be given"),
        ({"bias": torch.zeros(4, 5).long()}, "bias must be a floating-point Tensor"),
        ({"bias": 0.5}, "bias must be a floating-point Tensor"),
        ({"bias": torch.zeros(4, 5, 5)}, "must come with bias_positions"),
        ({"bias_positions": torch.zeros(20, 2).long()}, "bias_positions must come with bias"),
        ({"bias": torch.zeros(4, 5), "bias_positions": torch.zeros(20, 2).long()}, r"shape \(20, 1\)"),
        ({"bias": torch.zeros(4, 5), "bias_positions": torch.zeros(20, 1)}, "must be int32 or int64"),
    ],
)
def test_wrong_tables_raise(options, message):
    query = torch.randn(1, 4, 20, 16)
    with pytest.raises((ValueError, TypeError), match=message):
        attention(query, query, query, "full", **options)


def test_wrong_buckets_and_slopes_raise():
    with pytest.raises(ValueError, match="at least one and at most max_distance"):
        t5_bias(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="at least one and at most max_distance"):
        t5_bias(torch.zeros(32, 4), max_distance=8)
    with pytest.raises(ValueError, match="reach must be one or two numbers"):
        distance_bias(torch.ones(3))
    with pytest.raises(TypeError, match="slopes must be a Tensor"):
        distance_bias(torch.ones(3, 3), 4)
