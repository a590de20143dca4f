"""Soft caps and biases by distance in modules, against the same terms as dense masks in float64."""

from __future__ import annotations

import pytest
import torch
from oracle import bias_of_pairs, dense_attention, error, multiplicities

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.models.layers import LayerAttention

DOUBLE = {"dtype": torch.float64}


def same_gradients(found, wanted, leaves):
    assert error(found, wanted.detach()) < 1e-10
    grads = [torch.autograd.grad(out.square().sum(), leaves, retain_graph=True) for out in (found, wanted)]
    assert max(error(a, b) for a, b in zip(*grads, strict=True)) < 1e-9


@pytest.mark.parametrize("lengths", [(40, 40), (12, 40), (40, 12)])
@pytest.mark.parametrize("pattern", ["full", "dilated:8x1,32x4", "window:9"])
def test_multihead_bias_equals_a_dense_mask(pattern, lengths):
    module = dap.MultiheadSparseAttention(16, 4, pattern, num_kv_heads=2, **DOUBLE)
    q, k = (torch.randn(2, n, 16, **DOUBLE, requires_grad=True) for n in lengths)
    weight = torch.randn(8, 4, **DOUBLE, requires_grad=True)
    table = dap.t5_bias(weight, max_distance=16)
    mask = bias_of_pairs(table, 40, None)[..., : lengths[0], : lengths[1]].expand(2, -1, -1, -1).flatten(0, 1)
    same_gradients(module(q, k, bias=table)[0], module(q, k, attn_mask=mask)[0], [q, k, weight])


def test_core_module_caps_scores_and_adds_two_axes():
    module = dap.SparseAttention("window:9 | global:2")
    q, k, v = leaves = [torch.randn(2, 30, 4, 8, **DOUBLE, requires_grad=True) for _ in range(3)]
    table, tiles = torch.randn(4, 9, 5, **DOUBLE, requires_grad=True), torch.randint(0, 6, (30, 2))
    found = module(q, k, v, softcap=1.5, bias=table, bias_positions=tiles).transpose(1, 2)
    counts = multiplicities(module.pattern, 30, 4)
    heads = [x.transpose(1, 2) for x in leaves]
    wanted = dense_attention(*heads, counts, bias=bias_of_pairs(table, 30, tiles), softcap=1.5)[0]
    same_gradients(found, wanted, [*leaves, table])


def test_cached_steps_are_rows_of_the_biased_whole():
    module = dap.MultiheadDilatedAttention(16, 4, [16, 64], [1, 4], **DOUBLE).eval()
    x, terms = torch.randn(2, 30, 16, **DOUBLE), {"softcap": 2.0, "bias": torch.randn(4, 21, **DOUBLE)}
    with torch.no_grad():
        whole, cache = module(x, is_causal=True, **terms)[0], module.cache()
        rows = [module(part, is_causal=True, cache=cache, **terms)[0] for part in x.split([20, 1, 9], 1)]
    assert error(torch.cat(rows, 1), whole) < 1e-10
    with pytest.raises(ValueError, match="cache must come without bias_positions"):
        module(x, is_causal=True, cache=module.cache(), bias_positions=torch.zeros(30, 1), **terms)


def test_modules_name_terms_they_cannot_take():
    x, bias = torch.randn(1, 8, 16), torch.zeros(4, 3)
    with pytest.raises(ValueError, match="dense weights must come without bias"):
        dap.MultiheadSparseAttention(16, 4, "full")(x, bias=bias, need_weights=True)
    with pytest.raises(ValueError, match="dense weights must come without softcap"):
        dap.SparseAttention("full")(*torch.randn(3, 1, 8, 4, 4), softcap=2.0, return_attention_weights=True)
    with pytest.raises(ValueError, match=r"torchscale's attention must come without .*, got bias"):
        LayerAttention(16, 4, "dilated:8x2", zero_padding=True)(x, bias=bias)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_biased_modules_compile_whole():
    torch._dynamo.reset()
    module = dap.MultiheadSparseAttention(16, 2, "window:5", **DOUBLE)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, table = torch.randn(2, 20, 16, **DOUBLE, requires_grad=True), torch.randn(2, 7, **DOUBLE, requires_grad=True)
    found, wanted = (f(x, bias=table, softcap=3.0)[0] for f in (compiled, module))
    same_gradients(found, wanted, [x, table])


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_fixed_number_of_heads_compiles_with_dynamic_shapes():
    torch._dynamo.reset()
    module = dap.SparseAttention("window:5", sink=True, num_heads=4)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    rows = torch.randn(3, 2, 20, 4, 8).unbind()
    assert torch.allclose(compiled(*rows), module(*rows), atol=1e-6)
