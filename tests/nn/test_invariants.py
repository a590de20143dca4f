"""What must hold of every class, core and multihead, besides agreeing with the dense formula."""

from __future__ import annotations

import io
import threading

import pytest
import torch
from oracle import answer, error
from torch.nn import functional as F

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.nn import (
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    HierarchicalConfig,
    MultiheadDilatedAttention,
    MultiheadSparseAttention,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
    SparseAttention,
    SparsePatternConfig,
)

DOUBLE = {"dtype": torch.float64}
LEVELS = [
    {"stride": 8, "window_size": 16, "block_size": 8},
    {"stride": 16, "window_size": -1, "block_size": 8},
]
CORES = {
    "any": lambda: SparseAttention("window:5 | global:3"),
    "dilated": lambda: DilatedAttention([8, 32], [1, 4]),
    "ring": lambda: RingDilatedAttention([8, 32], [1, 4]),
    "block": lambda: BlockSparseRingDilatedAttention([32], [2], block_size=8),
    "block-ratio": lambda: BlockSparseRingDilatedAttention([32], [1], sparsity_ratio=0.4, block_size=8),
    "block-random": lambda: BlockSparseRingDilatedAttention(
        [32], [1], SparsePatternConfig("random", 0.4, block_size=8)
    ),
    "hierarchical": lambda: BlockSparseHierarchical([16, 64], [1, 2], block_size=8),
    "hierarchical-levels": lambda: BlockSparseHierarchical([16], [1], HierarchicalConfig(LEVELS)),
}
MULTIHEADS = {
    "any": lambda **k: MultiheadSparseAttention(32, 4, "window:5 | global:3", **k),
    "dilated": lambda **k: MultiheadDilatedAttention(32, 4, [8, 32], [1, 4], **k),
    "ring": lambda **k: RingMultiheadDilatedAttention(32, 4, [8, 32], [1, 4], **k),
    "block": lambda **k: BlockSparseRingMultiheadDilatedAttention(
        32, 4, [32], [1], sparsity_ratio=0.4, block_size=8, **k
    ),
}


@pytest.fixture(params=CORES)
def core(request):
    return CORES[request.param]()


@pytest.fixture(params=MULTIHEADS)
def make(request):
    return MULTIHEADS[request.param]


def tensors(n, heads=4, dtype=torch.float64):
    return [torch.randn(1, n, heads, 16, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("n", [1, 7, 67])
@pytest.mark.parametrize("is_causal", [False, True])
def test_single_precision_to_two_in_a_million(core, n, is_causal):
    q, k, v = tensors(n, dtype=torch.float32)
    pattern = core.pattern & dap.Causal() if is_causal else core.pattern
    wanted = answer(*(t.transpose(1, 2) for t in (q, k, v)), pattern).output.transpose(1, 2)
    assert error(core(q, k, v, is_causal=is_causal), wanted) < 2e-6


def test_half_precision_as_well_as_torch_twice(core):
    q, k, v = tensors(67, dtype=torch.bfloat16)
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    wanted = answer(*turned, core.pattern).output.transpose(1, 2)
    counts = core.plan(67, 4).to_dense()
    bias = counts.to(torch.bfloat16).log()
    theirs = F.scaled_dot_product_attention(*turned, attn_mask=bias).transpose(1, 2)
    theirs = torch.where((counts > 0).any(-1).T[None, :, :, None], theirs, 0.0)
    assert error(core(q, k, v), wanted) <= 2 * error(theirs, wanted)


def test_gradcheck_of_every_core(core):
    q, k, v = (torch.randn(1, 13, 2, 3, **DOUBLE, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda *given: core(*given, is_causal=True), (q, k, v), fast_mode=True)


def test_permuting_heads_permutes_outputs(core):
    # Four heads on, a head samples the same residues.
    q, k, v = tensors(67, heads=8)
    moved = core(*(t.roll(4, 2) for t in (q, k, v)))
    assert error(moved.roll(-4, 2), core(q, k, v)) < 1e-12


def test_gradcheck_of_every_multihead(make):
    module = make(**DOUBLE)
    x = torch.randn(1, 11, 32, **DOUBLE, requires_grad=True)
    inputs = (x, *module.parameters())
    assert torch.autograd.gradcheck(lambda t, *_: module(t, is_causal=True)[0], inputs, fast_mode=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_ones_give_ones(make, is_causal):
    module = make(layer_norm=False, **DOUBLE)
    with torch.no_grad():
        module.v_proj.weight.zero_()
        module.v_proj.bias.fill_(1.0)
        module.out_proj.weight.copy_(torch.eye(32))
    output = module(torch.randn(2, 67, 32, **DOUBLE), is_causal=is_causal)[0]
    seen = module.plan(67, is_causal=is_causal).to_dense().any(-1).T.repeat_interleave(8, -1)
    assert error(output, seen.double().expand_as(output)) < 1e-12


def test_a_batch_is_its_samples(make):
    module = make(**DOUBLE)
    x = torch.randn(3, 67, 32, **DOUBLE)
    assert error(module(x)[0], torch.cat([module(one[None])[0] for one in x]).detach()) < 1e-12


@pytest.mark.parametrize("is_causal", [False, True])
def test_influence_is_the_pattern(make, is_causal):
    module = make(**DOUBLE)
    x = torch.randn(1, 41, 32, **DOUBLE, requires_grad=True)
    output = module(x, is_causal=is_causal)[0]
    weight = torch.randn(32, **DOUBLE)
    moved = torch.stack([torch.autograd.grad(row @ weight, x, retain_graph=True)[0][0] for row in output[0]])
    allowed = (module.plan(41, is_causal=is_causal).to_dense() > 0).any(0)
    # A row moves with its own token anyhow, as a query.
    own = torch.eye(41, dtype=torch.bool)
    assert torch.equal((moved.abs().sum(-1) > 0) | own, allowed | own)
    assert not is_causal or not torch.triu(allowed, 1).any()


def test_every_parameter_receives_gradient(make):
    module = make(**DOUBLE)
    module(torch.randn(2, 67, 32, **DOUBLE), is_causal=True)[0].square().sum().backward()
    # What is added to every key alike does not show after a softmax.
    still = {name for name, p in module.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-12}
    assert still <= {"k_proj.bias"}


def test_two_lengths_and_pickles_give_the_same(make):
    module = make()
    x = torch.randn(1, 67, 32)
    first = module(x)[0]
    module(torch.randn(2, 131, 32))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (module, torch.load(file, weights_only=False)):
        assert torch.equal(other(x)[0], first)


def test_eight_threads_share_a_module(make):
    module = make()
    inputs = [torch.randn(1, 50 + i, 32) for i in range(8)]
    wanted = [module(x)[0] for x in inputs]
    dap.plan_cache.clear()
    found = [None] * 8

    def work(i):
        found[i] = module(inputs[i])[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert max(error(a, b.detach()) for a, b in zip(found, wanted, strict=True)) < 1e-6
