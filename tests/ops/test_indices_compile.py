"""Operators of attention on index tensors: opcheck, and torch.compile in one graph, with indices computed inside."""

from __future__ import annotations

import warnings

import pytest
import torch
from index_calls import same_document, seen_pairs, with_sink
from oracle import dense_attention, error

from dilated_attention_pytorch import DistillBatch, make_selection, selected_attention, varlen_attention
from dilated_attention_pytorch.selection.attention import SelectedSettings

pytestmark = pytest.mark.compile
ROWS = pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
CAUSAL = pytest.mark.parametrize("is_causal", [False, True])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # Dynamo instantiates autograd.Function itself and is warned about it.
        warnings.filterwarnings("ignore", ".*should not be instantiated.*", DeprecationWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.*")
        # After a graph break it looks for gradients of tensors that are not leaves.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield


def leaves(n, grad=True, dtype=torch.float64):
    return [torch.randn(2, h, n, d, dtype=dtype, requires_grad=grad) for h, d in ((4, 16), (2, 16), (2, 12))]


OPTIONAL = ["plain", "counted", "padded", "packed"]


@pytest.mark.parametrize("optional", OPTIONAL)
@CAUSAL
@ROWS
def test_opcheck_of_both_index_operators(per_token, is_causal, optional):
    tensors = leaves(40, grad=False, dtype=torch.float32)
    # Tokens come before heads in half of the calls, with each value of every other setting.
    if (OPTIONAL.index(optional) + per_token + is_causal) % 2:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    rows = 40 if per_token else 3
    indices = torch.randint(-1, 3, (2, 2, rows, 4), dtype=torch.int32)
    counts = torch.randint(5, (2, 2, rows), dtype=torch.int32) if optional == "counted" else None
    padding = torch.arange(40)[None].expand(2, 40) > 30 if optional == "padded" else None
    bounds = torch.tensor([0, 9, 9, 40], dtype=torch.int32) if optional == "packed" else None
    if bounds is not None:
        tensors, indices = [x[:1] for x in tensors], indices[:1]
    lists = indices, counts, bounds, 40, 16, is_causal, 0, 0
    torch.library.opcheck(torch.ops.dilated_attention.normal_lists.default, lists)
    shape = {"n": 40, "heads": 4, "granularity": 16, "is_causal": is_causal, "cu_seqlens": bounds}
    selection, seed = make_selection(indices, counts, **shape), torch.randint(2**62, (1,))
    rest = SelectedSettings.of(selection, 0.25, padding, 0.2, seed, "auto")
    torch.library.opcheck(torch.ops.dilated_attention.selected_forward.default, (*tensors, *rest))
    output, lse = torch.ops.dilated_attention.selected_forward(*tensors, *rest)
    both = *tensors, output, lse, torch.randn_like(output), torch.randn_like(lse), *rest
    torch.library.opcheck(torch.ops.dilated_attention.selected_backward.default, both)


def chosen(q, k, rows):
    """Lists that the compiled graph computes."""
    means = torch.nn.functional.pad(k, (0, 0, 0, -k.shape[2] % 16)).unflatten(2, (-1, 16)).mean(3)
    scores = q.unflatten(1, (2, -1)).sum(2) @ means.mT
    scores = scores if rows == "tokens" else scores[:, :, ::16]
    return scores.topk(2).indices.int()


@CAUSAL
@pytest.mark.parametrize("rows", ["blocks", "tokens"])
def test_one_graph_serves_several_lengths(rows, is_causal):
    options = {"granularity": 16, "is_causal": is_causal, "enable_gqa": True}

    def eager(q, k, v, sink):
        indices = chosen(q, k, rows)
        output, lse = selected_attention(q, k, v, indices, sink=sink, return_lse=True, **options)
        return 2 * output, lse.clamp(min=-30).sin(), indices

    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager", dynamic=True)
    torch._dynamo.utils.counters.clear()
    for n in (40, 72, 100):
        tensors = [*leaves(n), torch.randn(4, dtype=torch.float64, requires_grad=True)]
        *found, indices = compiled(*tensors)
        output, lse = dense_attention(*tensors[:3], seen_pairs(indices, n, 16, 4, is_causal).double())
        wanted = 2 * with_sink(output, lse, tensors[3]), lse.clamp(min=-30).sin()
        grad = [torch.randn_like(x) for x in wanted]
        grads = (torch.autograd.grad(results, tensors, grad) for results in (found, wanted))
        for got, want in zip([*found, *next(grads)], [*wanted, *next(grads)], strict=True):
            assert error(got.detach(), want.detach()) <= 1e-12
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@CAUSAL
@pytest.mark.parametrize("rows", ["blocks", "tokens"])
def test_one_graph_makes_and_takes_a_selection(rows, is_causal):
    shape = {"heads": 4, "granularity": 16, "is_causal": is_causal, "local_blocks": 1}

    def make(q, k):
        return make_selection(chosen(q, k, rows), n=q.shape[2], **shape)

    def both(q, k, v):
        return selected_attention(q, k, v, make(q, k), enable_gqa=True)

    tensors = leaves(40)
    selection = make(*tensors[:2])
    compiled = [torch.compile(f, fullgraph=True, backend="aot_eager") for f in (both, selected_attention)]
    wanted = selected_attention(*tensors, selection, enable_gqa=True)
    wanted = wanted, *torch.autograd.grad(wanted.square().sum(), tensors)
    for output in (compiled[0](*tensors), compiled[1](*tensors, selection, enable_gqa=True)):
        found = output, *torch.autograd.grad(output.square().sum(), tensors)
        for got, want in zip(found, wanted, strict=True):
            assert error(got.detach(), want.detach()) <= 1e-12
    # Distillation runs eagerly, between two graphs.
    scores = torch.randn(2, 1, 3, 3, dtype=torch.float64, requires_grad=True)

    def distilled(q, k, v, scores):
        batch = DistillBatch(torch.arange(3) * (19 if rows == "tokens" else 1))
        return 2 * selected_attention(q, k, v, selection, enable_gqa=True, distill=batch, scores=scores)

    grads = [
        torch.autograd.grad(f(*tensors, scores).sum(), scores)[0]
        for f in (distilled, torch.compile(distilled, backend="aot_eager"))
    ]
    assert torch.equal(*grads) and grads[0].any()


@CAUSAL
@pytest.mark.parametrize("rows", ["blocks", "tokens"])
def test_one_graph_serves_other_bounds(rows, is_causal):
    options = {"granularity": 16, "is_causal": is_causal, "enable_gqa": True}

    def eager(q, k, v, indices, bounds):
        return selected_attention(q, k, v, indices, cu_seqlens=bounds, **options).sin()

    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for bounds in ([0, 20, 60, 72], [0, 0, 71, 72], [0, 33, 34, 72]):
        tensors = [x[:1].detach().requires_grad_() for x in leaves(72)]
        bounds = torch.tensor(bounds, dtype=torch.int32)
        indices = torch.randint(-1, 5, (1, 2, 72 if rows == "tokens" else 5, 3), dtype=torch.int32)
        seen = seen_pairs(indices, 72, 16, 4, is_causal) & same_document(bounds, 72)
        found, wanted = compiled(*tensors, indices, bounds), dense_attention(*tensors, seen.double())[0].sin()
        grads = (torch.autograd.grad(x.square().sum(), tensors) for x in (found, wanted))
        for got, want in zip([found, *next(grads)], [wanted, *next(grads)], strict=True):
            assert error(got.detach(), want.detach()) <= 1e-12
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("two", [False, True], ids=["one tensor", "two tensors"])
def test_one_graph_of_varlen_serves_other_bounds(two):
    def eager(q, k, v, bounds, others):
        return varlen_attention(q, k, v, bounds, others, 72, 72, pattern="window:9", window_size=(-1, 0))

    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for bounds in ([0, 20, 60, 72], [0, 0, 71, 72], [0, 33, 34, 72]):
        tensors = [torch.randn(72, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        bounds = torch.tensor(bounds, dtype=torch.int32)
        found = compiled(*tensors, bounds, bounds.clone() if two else bounds)
        ahead = torch.arange(72) - torch.arange(72)[:, None]
        seen = same_document(bounds, 72) & (ahead <= 0) & (ahead >= -9)
        wanted = dense_attention(*(x.transpose(0, 1)[None] for x in tensors), seen.expand(2, -1, -1).double())[0]
        wanted = wanted[0].transpose(0, 1)
        grads = (torch.autograd.grad(x.square().sum(), tensors) for x in (found, wanted))
        for got, want in zip([found, *next(grads)], [wanted, *next(grads)], strict=True):
            assert error(got.detach(), want.detach()) <= 1e-12
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_inductor_runs_an_indexed_layer():
    layer = torch.nn.Linear(16, 48)

    def eager(x):
        q, k, v = layer(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        indices = (q.mean(1, keepdim=True) @ k.mean(1, keepdim=True).mT)[..., :3].argsort(-1)[..., :2]
        return selected_attention(q, k, v, indices, granularity=16, is_causal=True).transpose(1, 2).flatten(2)

    x = torch.randn(2, 50, 16, requires_grad=True)
    compiled = torch.compile(eager, fullgraph=True)
    assert error(compiled(x), eager(x)) <= 1e-5
    grads = [torch.autograd.grad(f(x).square().sum(), [x, *layer.parameters()]) for f in (compiled, eager)]
    for got, want in zip(*grads, strict=True):
        assert error(got, want) <= 1e-5


def test_compiled_calls_refuse_wrong_indices():
    compiled = torch.compile(selected_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="indices must be block numbers"):
        compiled(*leaves(40, grad=False), torch.full((2, 1, 3, 1), 3), granularity=16, enable_gqa=True)


@pytest.mark.parametrize("grad", [True, False])
def test_one_tensor_may_be_all_inputs_of_an_indexed_call(grad):
    indices = torch.randint(-1, 2, (1, 1, 2, 2), dtype=torch.int32)

    def eager(x):
        return selected_attention(x, x, x, indices, granularity=16)

    x = torch.randn(1, 2, 30, 8, dtype=torch.float64, requires_grad=grad)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    assert error(compiled(x), eager(x)) <= 1e-12
    if grad:
        (found,), (wanted,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (compiled, eager))
        assert error(found, wanted) <= 1e-12


def test_exported_program_gives_the_same_numbers_and_gradients():
    class Indexed(torch.nn.Module):
        def forward(self, q, k, v, indices):
            return selected_attention(q, k, v, indices, granularity=16, is_causal=True, enable_gqa=True)

    inputs = *leaves(40), torch.randint(-1, 3, (2, 1, 40, 2), dtype=torch.int32)
    program = torch.export.export(Indexed(), inputs).module()
    assert error(program(*inputs), Indexed()(*inputs)) <= 1e-12
    found, wanted = (torch.autograd.grad(f(*inputs).square().sum(), inputs[:3]) for f in (program, Indexed()))
    assert all(error(one, other) <= 1e-12 for one, other in zip(found, wanted, strict=True))
