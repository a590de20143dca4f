"""All ranks in one process against the dense float64 oracle: output, LSE, every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import BY_NAME, PROBLEMS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import answer, bias_of_pairs, dense_attention, error, multiplicities
from strategies import problems
from worlds import on_virtual_ranks as run

from dilated_attention_pytorch import Packed, attention, attention_with_lse, parse
from dilated_attention_pytorch.distributed import SequenceLayout, context_parallel_attention, virtual_attention
from dilated_attention_pytorch.distributed import attention as module
from dilated_attention_pytorch.distributed.attention import Call
from dilated_attention_pytorch.distributed.schedule import make_schedules
from dilated_attention_pytorch.distributed.transport import VirtualTransport
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.plan.plan import tensors_of


def layouts_of(n):
    return {
        "alone": SequenceLayout.contiguous(n, 1),
        "two": SequenceLayout.contiguous(n, 2),
        "three zigzag": SequenceLayout.zigzag(n, 3),
        "uneven, one empty": SequenceLayout.of_lengths([n // 5, 0, n - n // 5 - n // 3, n // 3]),
        "eight": SequenceLayout.contiguous(n, 8),
    }


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_every_problem_matches_the_oracle_on_every_layout(problem):
    inputs = problem.inputs()
    wanted = answer(
        *inputs[:3],
        problem.pattern,
        grad_output=inputs.grad_output,
        grad_lse=inputs.grad_lse,
        key_padding_mask=problem.key_padding_mask(),
    )
    for where, layout in layouts_of(problem.n).items():
        found = run(problem, layout)
        for name, got, want in zip(("output", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
            assert error(got, want) <= 1e-12, (where, name)


@pytest.mark.parametrize("name", ["dilated-block-offset", "random-per-head-causal", "padded"])
def test_the_torch_backend_agrees(name):
    problem = BY_NAME[name]
    layout = SequenceLayout.contiguous(problem.n, 3)
    for got, want in zip(run(problem, layout, "cpu"), run(problem, layout), strict=True):
        assert error(got, want) <= 1e-12


@given(problems(longest=90), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=30)
def test_any_pattern_on_any_owner_map(problem, world, seed):
    pattern, n, heads = problem
    try:
        multiplicities(pattern, n, heads)
    except ValueError:
        assume(False)
    generator = torch.Generator().manual_seed(seed)
    layout = SequenceLayout.of_owners(torch.randint(world, (n,), generator=generator), world)
    leaves = [torch.randn(1, heads, n, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    grad = torch.randn(1, heads, n, 8, generator=generator, dtype=torch.float64)
    output, lse = virtual_attention(*leaves, pattern, layout)
    found = output, lse, *torch.autograd.grad((output * grad).sum(), leaves)
    for got, want in zip(found, answer(*leaves, pattern, grad_output=grad), strict=True):
        assert error(got, want) <= 1e-12


@pytest.mark.parametrize(
    ("backend", "dtype"), [("native", torch.float64), ("native", torch.float32), ("cpu", torch.float32)]
)
@pytest.mark.parametrize("name", ["dilated-ladder-causal", "dilated-odd-rates", "global-window", "random", "padded"])
def test_output_has_the_same_bits_for_several_ranks(name, backend, dtype):
    if backend == "native" and not library_path().exists():
        pytest.skip("C++ kernel not built")
    problem = BY_NAME[name]
    several = [layout for layout in layouts_of(problem.n).values() if layout.world > 1]
    found = [run(problem, layout, backend, dtype)[:2] for layout in several]
    for output, lse in found[1:]:
        assert output.equal(found[0][0])
        assert lse.equal(found[0][1])


def test_a_nan_reaches_the_rows_that_see_it_and_no_other():
    problem = BY_NAME["dilated-ladder-causal"]
    query, key, value = problem.inputs()[:3]
    layout = SequenceLayout.contiguous(problem.n, 4)
    clean = virtual_attention(query, key, value, problem.pattern, layout).output
    bad_key, bad_value = key.clone(), value.clone()
    bad_key[:, 1, 70], bad_value[:, 1, 70] = torch.nan, torch.nan
    dirty = virtual_attention(query, bad_key, bad_value, problem.pattern, layout).output
    sees = multiplicities(problem.pattern, problem.n, problem.heads)[:, :, 70] > 0
    sees[[0, 2, 3]] = False
    assert dirty.isnan().any(-1)[0].equal(sees)
    assert dirty[0][~sees].equal(clean[0][~sees])


def test_packed_sequences_cross_shards():
    lengths, n = (40, 3, 57), 100
    query, key, value = torch.randn(3, 1, 2, n, 8, dtype=torch.float64).unbind()
    pattern = Packed(parse("dilated:16x1,32x2"), lengths)
    found = virtual_attention(query, key, value, pattern, SequenceLayout.contiguous(n, 3), is_causal=True).output
    bounds = torch.tensor([0, 40, 43, 100])
    wanted = attention(query, key, value, pattern.pattern, is_causal=True, cu_seqlens=bounds)
    assert error(found, wanted) <= 1e-12


def test_half_precision_error_is_independent_of_world_size():
    """Keys that every query sees: their gradients are sums over all ranks."""
    n = 512
    inputs = [torch.randn(1, 1, n, 16).bfloat16() for _ in range(3)]
    exact = [x.double().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(attention(*exact, "global:4").square().sum(), exact[1:])
    errors = {}
    for world in (2, 32):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output, _ = virtual_attention(*leaves, "global:4", SequenceLayout.contiguous(n, world))
        found = torch.autograd.grad(output.float().square().sum(), leaves[1:])
        errors[world] = max(error(got, want) for got, want in zip(found, wanted, strict=True))
    assert errors[32] <= errors[2] + 2**-9


@pytest.mark.parametrize("options", [{"is_causal": True}, {"dropout_p": 0.3}, {"overlap": "local", "exchange": "ring"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_returns_the_bits_of_attention(options, dtype):
    leaves = [torch.randn(1, 2, 70, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    single = {name: value for name, value in options.items() if name not in ("overlap", "exchange")}
    results = []
    for call, settings_ in (
        (lambda *x, **y: context_parallel_attention(*x, SequenceLayout.contiguous(70, 1), **y), options),
        (attention, single),
    ):
        torch.manual_seed(3)
        output = call(*leaves, "dilated:16x1,64x4", **settings_)
        results.append((output, *torch.autograd.grad(output.float().square().sum(), leaves)))
    for got, want in zip(*results, strict=True):
        assert got.equal(want)


def test_one_rank_runs_the_single_device_operation_once(monkeypatch, tmp_path):
    """Nothing is planned, agreed or copied for one rank, with a process group of one member or without."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return attention_with_lse(*args, **kwargs)

    def refused(*args, **kwargs):
        raise AssertionError("a single rank took the path of several")

    monkeypatch.setattr(module, "attention_with_lse", counted)
    monkeypatch.setattr(module, "_executor", refused)
    tensors = torch.randn(3, 1, 2, 70, 8).unbind()
    layout = SequenceLayout.contiguous(70, 1)
    context_parallel_attention(*tensors, "window:9", layout)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        context_parallel_attention(*tensors, "window:9", layout, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert [all(a is b for a, b in zip(args, tensors, strict=False)) for args in calls] == [True, True]


def test_several_ranks_without_a_process_group_say_so():
    shard = torch.randn(1, 2, 35, 8)
    with pytest.raises(ValueError, match=r"no initialised process group\nStart the script with torchrun"):
        context_parallel_attention(shard, shard, shard, "causal", SequenceLayout.contiguous(70, 2))


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"query": torch.zeros(1, 2, 69, 8)}, ValueError, "query must hold the 70 tokens of rank 0"),
        ({"key": torch.zeros(1, 2, 70, 4)}, ValueError, "key must have the query's width 8"),
        ({"value": torch.zeros(1, 2, 70, 8).half()}, TypeError, "value must have the query's dtype"),
        ({"key": torch.zeros(1, 1, 70, 8), "value": torch.zeros(1, 1, 70, 8)}, ValueError, "Pass enable_gqa=True"),
        ({"query": None}, TypeError, "query must be a Tensor"),
        ({"pattern": 7}, TypeError, "pattern must be a Pattern or text"),
        ({"scale": float("inf")}, ValueError, "scale must be finite"),
        ({"key_padding_mask": torch.zeros(1, 69, dtype=torch.bool)}, ValueError, r"shape \(1, 70\)"),
    ],
)
def test_wrong_input_says_what_must_hold(change, kind, says):
    given_ = {name: torch.zeros(1, 2, 70, 8) for name in ("query", "key", "value")}
    call = {**given_, "pattern": "causal", "layout": SequenceLayout.contiguous(70, 1), **change}
    with pytest.raises(kind, match=says):
        context_parallel_attention(**call)


def test_schedule_moves_with_all_tensors_that_kernels_read():
    problem = BY_NAME["global-window"].__class__(name="sees all", text="window:3 | global:2;queries=1", n=96)
    layout = SequenceLayout.contiguous(problem.n, 2)
    spec = Call(problem.pattern, layout, overlap="local").spec(*problem.inputs()[:3])
    for schedule in make_schedules(spec, layout, VirtualTransport(2)):
        moved = schedule.to(torch.device("meta"))
        assert moved.visit is not None
        read = [moved.tokens, moved.visit.place, *tensors_of(moved.visit.work)]
        for stage in moved.stages:
            read += [stage.source, *tensors_of(stage.work)]
        assert {x.device.type for x in read} == {"meta"}


def dense_with_bias(leaves, table, problem, positions=None, **options):
    n, padding = problem.n, problem.key_padding_mask()
    counts = multiplicities(problem.pattern, n, problem.heads)
    return dense_attention(
        *leaves, counts, bias=bias_of_pairs(table, n, positions), key_padding_mask=padding, **options
    )


@pytest.mark.parametrize("widths", [(41,), (5, 9)])
@pytest.mark.parametrize("name", ["dilated-block-offset", "global-window", "padded"])
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": "local"}, {"exchange": "ring"}, {"receive_budget": 4000}],
    ids=["direct", "local", "ring", "stages"],
)
def test_biases_and_soft_caps_match_the_oracle(name, widths, options):
    """The distance is that of tokens, wherever they lie; shares in the gradient of the table add up."""
    problem = BY_NAME[name]
    inputs, terms = problem.inputs(), {"softcap": 1.5}
    table = torch.randn(problem.heads, *widths, dtype=torch.float64).mul_(2).requires_grad_()
    positions = torch.randint(0, 20, (problem.n, 2)) if len(widths) > 1 else None
    leaves = [*(x.requires_grad_() for x in inputs[:3]), table]
    wanted = dense_with_bias(leaves[:3], table, problem, positions, **terms)
    layouts = layouts_of(problem.n)
    for where in ("alone", "three zigzag", "uneven, one empty"):
        if where == "alone" and options:
            continue
        found = virtual_attention(
            *leaves[:3], problem.pattern, layouts[where], enable_gqa=True, bias=table, bias_positions=positions,
            key_padding_mask=problem.key_padding_mask(), **terms, **options,
        )  # fmt: skip
        grads = []
        for output, lse in (found, wanted):
            objective = (output * inputs.grad_output).sum()
            objective = objective + torch.where(lse.isfinite(), lse * inputs.grad_lse, 0.0).sum()
            grads.append(torch.autograd.grad(objective, leaves, retain_graph=True))
        for got, want in zip((*found, *grads[0]), (*wanted, *grads[1]), strict=True):
            assert error(got, want.detach()) <= 1e-11, where


def test_large_biases_do_not_overflow_in_filler_rows():
    problem = BY_NAME["dilated-block-offset"]
    query, key, value = (x.float().requires_grad_() for x in problem.inputs()[:3])
    table = torch.full((problem.heads, 3), 500.0, requires_grad=True)
    layout = SequenceLayout.contiguous(problem.n, 3)
    terms = {"bias": table, "backend": "cpu"}
    output, _ = virtual_attention(query, key, value, problem.pattern, layout, enable_gqa=True, **terms)
    for grad in torch.autograd.grad(output.sum(), (query, key, value, table)):
        assert grad.isfinite().all()
