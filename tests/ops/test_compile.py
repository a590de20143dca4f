"""What torch asks of an operator: opcheck, torch.compile without graph breaks or recompile storms, torch.export."""

from __future__ import annotations

import warnings

import pytest
import torch
from oracle import answer, error

from dilated_attention_pytorch import (
    BlockColumns,
    BlockDilated,
    Causal,
    Dilated,
    Documents,
    Global,
    Grid,
    Hierarchical,
    Packed,
    PerHead,
    Random,
    SlidingWindow,
    Strided,
    attention,
    attention_with_lse,
    distance_bias,
    parse,
    t5_bias,
    varlen_attention,
)

pytestmark = pytest.mark.compile
PATTERN = Dilated((32, 64), (1, 2))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        # Dynamo instantiates autograd.Function itself and is warned about it.
        warnings.filterwarnings("ignore", ".*should not be instantiated.*", DeprecationWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.*")
        yield


def leaves(n, heads=4, key_heads=4, dtype=torch.float64, grad=True):
    shapes = (heads, key_heads, key_heads)
    return [torch.randn(2, h, n, 16, dtype=dtype, requires_grad=grad) for h in shapes]


OPTIONAL = ["plain", "padded", "dropout", "packed", "biased", "sink"]


@pytest.mark.parametrize("optional", OPTIONAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_both_operators(dtype, optional):
    q, k, v = leaves(40, dtype=dtype, grad=False)
    if optional == "packed":
        q, k, v = (t[:1] for t in (q, k, v))
    # Tokens come before heads in half of the calls, for every type and every optional input.
    if (OPTIONAL.index(optional) + (dtype == torch.bfloat16)) % 2:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    settings = (
        torch.arange(40)[None].expand(2, 40) > 30 if optional == "padded" else None,
        torch.tensor([0, 15, 40]) if optional == "packed" else None,
        torch.tensor([7]) if optional == "dropout" else None,
        PATTERN.describe(),
        True,
        0.25,
        0.1 if optional == "dropout" else 0.0,
        "auto",
    )
    if optional == "biased":
        settings += None, 2.0, torch.randn(4, 5, 7), torch.randint(9, (2, 40, 2))
    if optional == "sink":
        settings += None, 0.0, None, None, torch.randn(4).to(dtype)
    torch.library.opcheck(torch.ops.dilated_attention.forward.default, (q, k, v, *settings))
    output, lse = torch.ops.dilated_attention.forward(q, k, v, *settings)
    both = (q, k, v, output, lse, torch.randn_like(output), torch.randn_like(lse), *settings)
    torch.library.opcheck(torch.ops.dilated_attention.backward.default, both)


def check_compiled(compiled, eager, n, **options):
    tensors = leaves(n, **options)
    found, wanted = compiled(*tensors), eager(*tensors)
    assert error(found, wanted) <= 1e-12
    grad = torch.randn_like(found)
    for got, want in zip(
        torch.autograd.grad(found, tensors, grad), torch.autograd.grad(wanted, tensors, grad), strict=True
    ):
        assert error(got, want) <= 1e-12


def test_one_fullgraph_serves_several_lengths():
    def eager(q, k, v):
        return attention(q, k, v, PATTERN, is_causal=True) * 2

    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (40, 72, 100):
        check_compiled(compiled, eager, n)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_fullgraph_with_a_sink_matches_eager(softcap):
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def call(q, k, v):
        return attention_with_lse(q, k, v, PATTERN, is_causal=True, sink=sink, softcap=softcap)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (40, 72):
        tensors = [*leaves(n), sink]
        found, wanted = compiled(*tensors[:3]), call(*tensors[:3])
        for got, expected in zip(found, wanted, strict=True):
            assert error(got, expected.detach()) < 1e-12
        grads = [torch.autograd.grad(output.cos().sum() + lse.sum(), tensors) for output, lse in (found, wanted)]
        for got, expected in zip(*grads, strict=True):
            assert error(got, expected) < 1e-12
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_fullgraph_with_a_bias_matches_eager():
    weight = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    slopes = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def call(q, k, v):
        positions = torch.stack([torch.arange(q.shape[2]) // 9, torch.arange(q.shape[2]) % 9], -1)
        near = attention(q, k, v, PATTERN, is_causal=True, bias=t5_bias(weight, max_distance=20))
        return near + attention(q, k, v, PATTERN, bias=distance_bias(slopes, 3, 3), bias_positions=positions)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (40, 72):
        tensors = leaves(n)
        found, wanted = compiled(*tensors), call(*tensors)
        assert error(found, wanted.detach()) < 1e-12
        grads = [torch.autograd.grad(x.cos().sum(), [*tensors, weight, slopes]) for x in (found, wanted)]
        for got, expected in zip(*grads, strict=True):
            assert error(got, expected) < 1e-12
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_fullgraph_varlen_matches_eager():
    tensors = [torch.randn(40, 4, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bounds = torch.tensor([0, 15, 40])

    def call(q, k, v, cu_seq_q, cu_seq_k):
        return varlen_attention(q, k, v, cu_seq_q, cu_seq_k, 25, 25, window_size=(9, 0))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert error(compiled(*tensors, bounds, bounds.clone()), call(*tensors, bounds, bounds).detach()) < 1e-12
    with pytest.raises(ValueError, match="cu_seq_k must equal cu_seq_q"):
        compiled(*tensors, bounds, torch.tensor([0, 16, 40]))


def test_lengths_that_vary_by_themselves_compile_twice_at_most():
    def eager(q, k, v):
        return attention(q, k, v, PATTERN & Causal(), enable_gqa=True)

    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    for n in (40, 72, 100, 33):
        check_compiled(compiled, eager, n, key_heads=2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("grad", [True, False])
def test_one_tensor_may_be_query_key_and_value(grad):
    def eager(x):
        return attention(x, x, x, "window:9")

    x = torch.randn(1, 2, 30, 8, dtype=torch.float64, requires_grad=grad)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    assert error(compiled(x), eager(x)) <= 1e-12
    if grad:
        (found,), (wanted,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (compiled, eager))
        assert error(found, wanted) <= 1e-12


@pytest.mark.slow
def test_inductor_runs_it_inside_a_layer():
    layer = torch.nn.Linear(16, 48)

    def eager(x):
        q, k, v = layer(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        output, lse = attention_with_lse(q, k, v, "window:9", is_causal=True)
        return output.transpose(1, 2).flatten(2) + lse.transpose(1, 2).mean(-1, keepdim=True)

    x = torch.randn(2, 50, 16, requires_grad=True)
    compiled = torch.compile(eager, fullgraph=True)
    assert error(compiled(x), eager(x)) <= 1e-5
    grads = [torch.autograd.grad(f(x).square().sum(), [x, *layer.parameters()]) for f in (compiled, eager)]
    for got, want in zip(*grads, strict=True):
        assert error(got, want) <= 1e-5


def test_dropout_compiles_and_follows_the_seed():
    def eager(q, k, v):
        return attention(q, k, v, "window:9", dropout_p=0.4)

    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    tensors = leaves(30)
    outputs = []
    for function in (compiled, compiled, eager):
        torch.manual_seed(3)
        outputs.append(function(*tensors))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_export_with_a_dynamic_length():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, PATTERN, is_causal=True)

    n = torch.export.Dim("n", min=2, max=4096)
    program = torch.export.export(Layer(), tuple(leaves(40, grad=False)), dynamic_shapes=({2: n},) * 3)
    for length in (33, 90):
        tensors = leaves(length, grad=False)
        assert error(program.module()(*tensors), answer(*tensors, parse("dilated:32x1,64x2 & causal")).output) <= 1e-10


def test_an_exported_sink_needs_no_context():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sink = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))

        def forward(self, q, k, v):
            return attention(q, k, v, "window:9", sink=self.sink)

    layer, tensors = Layer(), leaves(40, grad=False)
    # Outside of `torch.no_grad()`, although the parameter of the program requires a gradient.
    assert torch.equal(torch.export.export(layer, tuple(tensors)).module()(*tensors), layer(*tensors))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_trains(strict):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, sink):
            return attention(q, k, v, "window:9", sink=sink)

    tensors = [*leaves(40), torch.randn(4, dtype=torch.float64, requires_grad=True)]
    program = torch.export.export(Layer(), tuple(tensors), strict=strict).module()
    found, wanted = (torch.autograd.grad(f(*tensors).square().sum(), tensors) for f in (program, Layer()))
    assert all(error(one, other) <= 1e-12 for one, other in zip(found, wanted, strict=True))


CONSTRUCTED = {
    "and": lambda: SlidingWindow(16) & Causal(),
    "or": lambda: SlidingWindow(8) | Global(2, queries=True) | Strided(5),
    "nested": lambda: (SlidingWindow(3) | Global(2)) & (Dilated((16, 32), (1, 2), overlap="union") | Causal()),
    "dilated": lambda: Dilated((32, 64), (1, 2), offset="block", heads="split"),
    "heads": lambda: PerHead((Causal(), SlidingWindow(3), Causal() & Strided(2), SlidingWindow(9, 0))),
    "packed": lambda: Packed(Dilated((16,), (2,)), (30, 34)) & Causal(),
    "documents": lambda: Documents((20, 44)) & Causal(),
    "random": lambda: Random(0.5, block=16, seed=3) | SlidingWindow(2),
    "hierarchical": lambda: Hierarchical(((2, 1), (4, 2), (0, 4)), block=16),
    "block dilated": lambda: BlockDilated((16, 64), (1, 2), block=16, sparsity_ratio=0.5),
    "columns": lambda: BlockColumns(2, block=16) & Causal(),
    "grid": lambda: Grid((8, 8), (3, 3)),
    "text": lambda: "window:16 & causal | global:2",
}


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_patterns_are_constructed_inside_one_graph(name: str):
    def call(query, key, value):
        return attention(query, key, value, CONSTRUCTED[name]()).sin()

    rows = leaves(64)
    got, wanted = (run(*rows) for run in (torch.compile(call, fullgraph=True, backend="aot_eager"), call))
    assert torch.equal(got, wanted)
    for own, other in zip(*(torch.autograd.grad(out.sum(), rows) for out in (got, wanted)), strict=True):
        assert torch.equal(own, other)


def test_a_constructed_pattern_follows_its_arguments():
    def call(query, key, value, width):
        return attention(query, key, value, SlidingWindow(width) & Causal())

    rows, compiled = leaves(64, grad=False), torch.compile(call, fullgraph=True, backend="aot_eager")
    for width in (4, 9, 30):
        assert torch.equal(compiled(*rows, width), call(*rows, width))
