"""Kernels of other projects as backends: they receive exactly the pairs of the plan, and state unsupported calls."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from cases import BY_NAME, PROBLEMS, Problem
from oracle import answer, error, sink_gradient
from strategies import laid_out

from dilated_attention_pytorch import reproducible_gradients
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.external import flash4, flex
from dilated_attention_pytorch.kernels.external.block_lists import Band, lists_of_pairs, tables_of, why_not_blocks
from dilated_attention_pytorch.kernels.sink import backward_with_sink
from dilated_attention_pytorch.plan import make_plan

ONE_PART = [
    problem
    for problem in PROBLEMS
    if not problem.padded
    and why_not_blocks(make_plan(problem.pattern, problem.n, problem.heads, problem.block_size)) is None
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
NAMES = ("output", "lse", "dq", "dk", "dv")


def plan_of(problem):
    return make_plan(problem.pattern, problem.n, problem.heads, problem.block_size)


def call_of(problem, dtype=torch.float64, **changes):
    inputs = problem.inputs(dtype)
    settings = {"scale": problem.d**-0.5, "key_padding_mask": problem.key_padding_mask()} | changes
    return AttentionCall(*inputs[:3], plan_of(problem), **settings), inputs


def wanted_of(problem, inputs, scale):
    return answer(*inputs[:3], problem.pattern, scale=scale, grad_output=inputs.grad_output, grad_lse=inputs.grad_lse)


def dense_of(counts, indices, columns):
    """Lists [1, H, Q] and [1, H, Q, K] as a table [H, Q, columns]."""
    place = torch.arange(indices.shape[-1]).expand_as(indices)
    table = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.int32)
    table.scatter_(-1, torch.where(place < counts[..., None], indices, columns).long(), 1)
    return table[0, ..., :columns].bool()


def blocks_in(dense, block):
    """Whole and partial blocks of a dense plan [H, n, n], bool [H, tiles, tiles]; blocks past the end are partial."""
    heads, n, _ = dense.shape
    tiles = -(-n // block)
    room = torch.full((heads, tiles * block, tiles * block), -1, dtype=torch.int32)
    room[:, :n, :n] = dense
    cells = room.view(heads, tiles, block, tiles, block).transpose(2, 3).flatten(3)
    return (cells == 1).all(-1), (cells == 1).any(-1) & ~(cells == 1).all(-1)


@pytest.mark.parametrize("problem", ONE_PART, ids=lambda problem: problem.name)
def test_lists_hold_the_plan_s_blocks_by_query_and_by_key(problem):
    plan = plan_of(problem)
    whole, partial = blocks_in(plan.to_dense(), plan.block_size)
    tables = tables_of(plan)
    tiles = whole.shape[-1]
    for got, want in (
        (tables.whole, whole),
        (tables.partial, partial),
        (tables.whole_by_key, whole.transpose(1, 2)),
        (tables.partial_by_key, partial.transpose(1, 2)),
    ):
        assert torch.equal(dense_of(*got, tiles).expand_as(want), want)


def test_lists_are_ascending_with_the_requested_width():
    row, column = torch.tensor([2, 0, 2, 2]), torch.tensor([5, 1, 0, 3])
    counts, indices = lists_of_pairs(row, column, rows=4)
    assert counts.tolist() == [1, 0, 3, 0]
    assert indices.tolist() == [[1, 0, 0], [0, 0, 0], [0, 3, 5], [0, 0, 0]]
    assert lists_of_pairs(row, column, rows=4, width=6).indices.shape == (4, 6)
    assert lists_of_pairs(row[:0], column[:0], rows=2).counts.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("text", "band"),
    [
        ("causal", Band(-200, 0)),
        ("window:20", Band(-20, 20)),
        ("window:37 & causal", Band(-37, 0)),
        ("random:0.4;block=16", Band(-200, 200)),
        ("random:0.5;block=16 & causal", Band(-200, 0)),
        ("window:20 | global:5", None),
    ],
)
def test_partial_blocks_of_one_band_are_recognized(text, band):
    problem = Problem(name="", text=text, n=200, block_size=16)
    assert tables_of(plan_of(problem)).band == band


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dilated-ladder", "needs a plan of one part, got 3"),
        ("dilated-one-branch", "needs a part of rate 1, got 4"),
    ],
)
def test_plans_that_are_no_lists_of_blocks_are_refused(name, reason):
    assert why_not_blocks(plan_of(BY_NAME[name])) == reason
    assert flex.why_not(call_of(BY_NAME[name])[0]) == reason


@pytest.mark.compile
@pytest.mark.parametrize(
    ("problem", "dtype"),
    [*((problem, torch.float64) for problem in ONE_PART), (BY_NAME["gqa"], torch.float32)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_flex_on_the_cpu_gives_the_dense_output_and_lse(problem, dtype):
    call, inputs = call_of(problem, dtype)
    assert flex.why_not(call) is None
    wanted = wanted_of(problem, inputs, call.scale)
    for name, got, want in zip(NAMES, flex.forward(call), wanted, strict=False):
        assert error(got, want) <= TOLERANCE[dtype], name


@pytest.mark.compile
@pytest.mark.parametrize("name", ["window-causal", "random-per-head-causal", "gqa", "global-window"])
def test_flex_gives_the_dense_gradients(name, monkeypatch):
    # Torch rejects gradients on the CPU by a check only; the formulas are the same as on a GPU.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    problem = BY_NAME[name]
    call, inputs = call_of(problem, scale=-0.3)
    output, lse = flex.forward(call)
    found = output, lse, *flex.backward(call, output, lse, inputs.grad_output, inputs.grad_lse)
    for what, got, want in zip(NAMES, found, wanted_of(problem, inputs, -0.3), strict=True):
        assert error(got, want) <= 1e-12, what


@pytest.mark.compile
def test_flex_gives_the_dense_gradients_with_a_sink(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    sink = torch.tensor([0.5, -1.0, 2.0, torch.inf], dtype=torch.float64)
    problem = replace(BY_NAME["window-causal"], heads=4)
    call, inputs = call_of(problem, sink=sink)
    output, lse = flex.forward(call)
    grads, sink_grad = backward_with_sink(flex, call, output, lse, inputs.grad_output, inputs.grad_lse)
    options = {"grad_output": inputs.grad_output, "sink": sink}
    wanted = answer(*inputs[:3], problem.pattern, grad_lse=inputs.grad_lse, **options)
    for what, got, want in zip(NAMES, (output, lse, *grads), wanted, strict=True):
        assert error(got, want) <= 1e-12, what
    assert error(sink_grad, sink_gradient(*inputs[:3], problem.pattern, **options)) <= 1e-12


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key_padding_mask": torch.zeros(1, 67, dtype=torch.bool)}, "has no key padding mask"),
        ({"dropout_p": 0.1}, "has no dropout; pass dropout_p=0.0"),
        ({"query": torch.empty(1, 2, 67, 16, device="meta")}, "needs a CUDA or CPU tensor, got meta"),
    ],
)
def test_flex_states_unsupported_calls(changes, reason):
    call, _ = call_of(BY_NAME["causal"])
    assert flex.why_not(replace(call, **changes)) == reason


def test_flex_refuses_gradients_and_long_sequences_on_the_cpu(monkeypatch):
    call, _ = call_of(BY_NAME["causal"])
    for learnt in ({"query": call.query.clone().requires_grad_()}, {"sink": torch.zeros(2, requires_grad=True)}):
        assert flex.why_not(replace(call, **learnt)).startswith("torch has no backward of FlexAttention on the CPU")
    monkeypatch.setattr(flex, "LONGEST_DENSE", 66)
    assert flex.why_not(call) == "n must be <= 66 on the CPU, where torch computes it densely, got 67"
    monkeypatch.setattr(flex, "LONGEST_DENSE", 67)
    monkeypatch.setattr(flex, "LARGEST_TABLE", 24)
    assert "needs a table of all 25 blocks" in flex.why_not(call)


class Sparse(SimpleNamespace):
    """Stands in for FlashAttention-4's own record of lists."""

    def __init__(self, *lists, block_size):
        super().__init__(lists=lists, block_size=block_size)


def pairs(sparse, mask_mod, heads, n, transposed):
    """Pairs allowed by block lists and a `mask_mod`, bool [H, n, n]."""
    block = sparse.block_size[0]
    tiles = -(-n // block)
    partial, whole = (dense_of(*sparse.lists[i : i + 2], tiles).expand(heads, -1, -1) for i in (0, 2))
    if transposed:
        partial, whole = partial.transpose(1, 2), whole.transpose(1, 2)
    position = torch.arange(n)
    rule = torch.ones(n, n, dtype=torch.bool)
    if mask_mod is not None:
        rule = mask_mod(None, None, position[:, None], position[None, :], None, None)
    spread = [t.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :n, :n] for t in (partial, whole)]
    return (spread[0] & rule) | spread[1]


def dense_forward(q, k, v, allowed, scale):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (scale * q @ k.transpose(-1, -2)).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.fixture
def flash_attention_4(monkeypatch):
    """Calls of FlashAttention-4 by the backend, computed densely from their arguments.

    As the kernels do, the backward pass computes weights from the LSE and delta from the output.
    """

    def forward(q, k, v, *, softmax_scale, return_lse, out, lse, block_sparse_tensors, mask_mod=None):
        assert return_lse
        allowed = pairs(block_sparse_tensors, mask_mod, q.shape[2], q.shape[1], transposed=False)
        for into, value in zip((out, lse), dense_forward(q, k, v, allowed, softmax_scale), strict=True):
            into.copy_(value)

    def backward(q, k, v, out, dout, lse, *, softmax_scale, dlse, dq, dk, dv, block_sparse_tensors, mask_mod=None):
        allowed = pairs(block_sparse_tensors, mask_mod, q.shape[2], q.shape[1], transposed=True)
        q, k, v, out, dout = (t.transpose(1, 2) for t in (q, k, v, out, dout))
        group = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
        weights = torch.where(allowed, (softmax_scale * q @ keys.mT - lse[..., None]).exp(), 0.0)
        delta = (dout * out).sum(-1) - (0 if dlse is None else dlse)
        grad = softmax_scale * weights * (dout @ values.mT - delta[..., None])
        grads = grad @ keys, *((x.mT @ y).unflatten(1, (-1, group)).sum(2) for x, y in ((grad, q), (weights, dout)))
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad.transpose(1, 2))

    modules = {
        "flash_attn.cute.interface": {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward},
        "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": Sparse},
        "cutlass.cute": {"jit": lambda function: function},
    }
    for name, content in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            known = sys.modules.get(".".join(parts[:depth])) or ModuleType(parts[depth - 1])
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), known)
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], known)
        vars(sys.modules[name]).update(content)
    flash4._band_in_cute.cache_clear()
    yield
    flash4._band_in_cute.cache_clear()


@pytest.mark.parametrize("tokens_first", [False, True], ids=["bhnd", "bnhd"])
@pytest.mark.parametrize(
    "text",
    ["full", "causal", "window:150", "window:40 & causal", "random:0.5;block=128;per_head=1", "window:300 & causal"],
)
def test_flash_attention_4_receives_the_pairs_of_the_plan(flash_attention_4, text, tokens_first):
    problem = Problem(name="", text=text, n=512, heads=4, key_heads=2, d=8, e=8, block_size=128)
    call, inputs = call_of(problem)
    if tokens_first:
        turned = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs[:3])
        call = AttentionCall(*turned, call.plan, call.scale)
    output, lse = flash4.forward(call)
    found = output, lse, *flash4.backward(call, output, lse, inputs.grad_output, inputs.grad_lse)
    for name, got, want in zip(NAMES, found, wanted_of(problem, inputs, call.scale), strict=True):
        # LSE is float32, as in the real kernels, which limits the precision of gradients.
        assert error(got, want) <= (1e-12 if name == "output" else 1e-6), name
    assert (output.stride(1) < output.stride(2)) is tokens_first


def test_flash_attention_4_receives_the_sink(flash_attention_4):
    sink = torch.tensor([0.5, -1.0, 2.0, torch.inf], dtype=torch.float64)
    problem = Problem(name="", text="window:40 & causal", n=512, heads=4, key_heads=2, d=8, e=8, block_size=128)
    call, inputs = call_of(problem, sink=sink)
    output, lse = flash4.forward(call)
    grads, sink_grad = backward_with_sink(flash4, call, output, lse, inputs.grad_output, inputs.grad_lse)
    options = {"grad_output": inputs.grad_output, "sink": sink}
    wanted = answer(*inputs[:3], problem.pattern, grad_lse=inputs.grad_lse, **options)
    for name, got, want in zip(NAMES, (output, lse, *grads), wanted, strict=True):
        assert error(got, want) <= 1e-6, name
    assert error(sink_grad, sink_gradient(*inputs[:3], problem.pattern, **options)) <= 1e-6


@pytest.fixture
def on_hopper(monkeypatch):
    """Make CPU tensors appear as tensors of a Hopper GPU with FlashAttention-4 installed."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(flash4, "installed", lambda: True)


HALF = Problem(name="", text="causal", n=512, heads=2, d=64, e=64, block_size=128)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("problem", "changes", "reason"),
    [
        (HALF, {}, None),
        (replace(HALF, d=32, e=32), {}, "query and value width must be 64 or 128, the same for both, got 32 and 32"),
        (replace(HALF, e=128), {}, "query and value width must be 64 or 128, the same for both, got 64 and 128"),
        (replace(HALF, block_size=64), {}, "block_size must be 128, got 64"),
        (HALF, {"scale": -1.0}, "scale must be > 0, got -1.0"),
        (HALF, {"dropout_p": 0.5}, "has no dropout; pass dropout_p=0.0"),
        (HALF, {"key_padding_mask": torch.zeros(1, 512, dtype=torch.bool)}, "has no key padding mask"),
        (replace(HALF, text="dilated:128x1,256x2"), {}, "needs a plan of one part, got 2"),
        (
            replace(HALF, text="strided:7"),
            {},
            "needs a part of rate 1, got 7",
        ),
        (
            replace(HALF, text="window:20 | global:5"),
            {},
            "needs partial blocks that are cut out of one band, such as a window or the causal triangle",
        ),
    ],
)
def test_flash_attention_4_states_unsupported_calls(problem, changes, reason):
    call, _ = call_of(problem, torch.bfloat16, **changes)
    assert flash4.why_not(call) == reason


@pytest.mark.usefixtures("on_hopper")
def test_flash_attention_4_refuses_rows_off_the_grid():
    call, _ = call_of(HALF, torch.bfloat16)
    key = laid_out(call.key, "off the grid")
    assert flash4.why_not(replace(call, key=key)) == "needs tensors that start at multiples of 16 bytes"


@pytest.mark.usefixtures("on_hopper")
def test_flash4_needs_reproducible_gradients_off():
    call, _ = call_of(HALF, torch.bfloat16)
    learnt = replace(call, query=call.query.clone().requires_grad_())
    assert flash4.why_not(learnt) == "sums dQ in any order; allow that with reproducible_gradients(False)"
    try:
        reproducible_gradients(False)
        assert flash4.why_not(learnt) is None
    finally:
        reproducible_gradients(True)


def test_flash_attention_4_needs_its_gpu_and_its_package(monkeypatch):
    call, _ = call_of(HALF, torch.bfloat16)
    assert flash4.why_not(call) == "needs a CUDA tensor, got cpu"
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert flash4.why_not(call) == "needs a GPU of compute capability 9.x, got 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(flash4, "installed", lambda: False)
    assert flash4.why_not(call).startswith("needs FlashAttention-4, which is not installed")
