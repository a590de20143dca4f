"""Optimizer steps on learned layers along the parameter path of a GPU, with torch in place of the score kernels."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from oracle import dense_scores, error

from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive, MultiheadBlockSparseAdaptive
from dilated_attention_pytorch.selection import backend
from dilated_attention_pytorch.selection.distill import distill_gradients
from dilated_attention_pytorch.selection.types import Factors

KERNELS = "dilated_attention_pytorch.selection.kernels."
OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-2, foreach=False),
    "Adam foreach": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-2, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-2, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 1.0, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, 1.0, momentum=0.9, foreach=True),
}


def row_scores(factors, ids, size):
    """Scores of some rows with all blocks, as the kernels compute them from the factors."""
    return dense_scores(factors._replace(own=factors.own[:, :, ids]), ids // size)


def scoring(factors, size, is_causal):
    """Stand-in for `block_scores.scoring`."""
    del is_causal
    assert not torch.is_grad_enabled()
    factors = Factors(*(x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in factors))
    return lambda ids: row_scores(factors, ids, size)


def parameter_gradients(grad, scores, ids, factors, seen, first, mixture, size):
    """Stand-in for `score_gradients.parameter_gradients`."""
    assert not torch.is_grad_enabled()
    means, summary, units = seen
    first, mixture, names = first.float(), mixture.float(), ("rows", "columns", "weight", "bias", "project", "right")
    shared = len(first) < len(factors.log_temperature)
    leaves = [getattr(factors, name).float().detach().requires_grad_() for name in (*names, "log_temperature")]
    with torch.enable_grad():
        own = factors.own.float()
        again = factors._replace(**dict(zip((*names, "log_temperature"), leaves, strict=True)), own=own, rounds=False)
        found = row_scores(again, ids, size)
    assert error(found, scores) < 1e-6
    by_rows, by_columns, weight, bias, project, right, log = torch.autograd.grad(found, leaves, grad)
    joint = torch.einsum("bhtm,bhtw->hmw", by_columns, summary)
    match = torch.einsum("bhtud,bhtup->hdp", units, right)
    layers = [torch.einsum("bhtm,bhtd->hmd", by_rows, means), by_rows.sum((0, 2)), weight[:, None], bias[:, None]]
    both = [x.sum(0, keepdim=True) if shared else x for x in (*layers, joint, project, match)]
    *layers, joint, project, match = both
    layers[0] = torch.cat([layers[0], joint @ mixture], -1)
    return [*layers, joint.mT @ first[..., means.shape[-1] :], project, match, log]


def distill_together(inputs, batch, lse, grad_output, scores, none):
    """Stand-in for `block_mass.distill_gradients`: one gradient of the scores of all blocks, for both kinds of rows."""
    if not batch.together:
        return distill_gradients(inputs, batch, lse, grad_output, scores, none)
    blocks = inputs.lists(batch.chosen_rows)
    listed, at = blocks < scores.shape[-1], blocks.clamp(max=scores.shape[-1] - 1)
    some, others = scores.split([batch.chosen, scores.shape[2] - batch.chosen], 2)
    grads = distill_gradients(inputs, batch, lse, grad_output, some.gather(-1, at), others)
    grad = torch.zeros_like(some).scatter_add_(-1, at, torch.where(listed, grads[0], 0.0))
    return torch.cat([grad, grads[1]], 2), None


@pytest.fixture
def kernels(monkeypatch):
    """Scores and their gradients come from the stand-ins, without a graph, as on a GPU."""
    why_not = backend.why_not
    monkeypatch.setattr(backend, "why_not", lambda step, work: None if step == "score_rows" else why_not(step, work))
    monkeypatch.setattr(backend.Torch, "distill", staticmethod(distill_together))
    monkeypatch.setitem(sys.modules, KERNELS + "block_scores", SimpleNamespace(scoring=scoring))
    gradients = SimpleNamespace(parameter_gradients=parameter_gradients)
    monkeypatch.setitem(sys.modules, KERNELS + "score_gradients", gradients)


def trained(module, x, optimizer, is_causal, autocast, steps=3):
    """Parameters after some steps on one batch."""
    optimizer = optimizer(module.parameters())
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            output = module(*x, is_causal=is_causal)
        output = output[0] if isinstance(output, tuple) else output
        (3 * output.float().square().mean()).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def unchanged(found, before):
    """Parameters that training left as they were, besides biases that move all scores of a row alike."""
    names = [name for name, value in found.items() if torch.equal(value, before[name])]
    return [name for name in names if not name.endswith(("k_proj.bias", ".3.bias"))]


def made(share=False, dtype=torch.float32):
    torch.manual_seed(0)
    config = AdaptiveConfig(0.5, hidden_dim=8, match_rank=4, score_unit=4, distill_rows=0.5, share_across_heads=share)
    module = BlockSparseAdaptive([128], [1], 2, 8, config, block_size=16, dtype=dtype)
    with torch.no_grad():
        # Equal projections of both sides give equal matches of a block with itself.
        module.scorer.match_key.normal_()
    return module, list(torch.randn(3, 2, 100, 2, 8, dtype=dtype).unbind())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [(torch.float32, False, 1e-4), (torch.float32, True, 1e-4), (torch.bfloat16, False, 2e-2)],
    ids=["float32", "autocast", "bfloat16"],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_steps_match_the_torch_path(optimizer, dtype, autocast, tolerance, is_causal, request):
    module, x = made(dtype=dtype)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    wanted = trained(module, x, OPTIMIZERS[optimizer], is_causal, autocast)
    request.getfixturevalue("kernels")
    module.load_state_dict(before)
    found = trained(module, x, OPTIMIZERS[optimizer], is_causal, autocast)
    # Small steps are lost in bfloat16.
    assert all(dtype is torch.bfloat16 and name.endswith(".bias") for name in unchanged(found, before))
    for name, value in found.items():
        assert error(value, wanted[name]) < tolerance, name


@pytest.mark.usefixtures("kernels")
def test_shared_scorer_trains_without_a_graph():
    module, x = made(share=True)
    before = module.state_dict(keep_vars=False)
    before = {name: value.clone() for name, value in before.items()}
    found = trained(module, x, OPTIMIZERS["Adam"], True, False)
    assert unchanged(found, before) == []


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_multihead_form_trains_without_a_graph(optimizer):
    torch.manual_seed(0)
    config = AdaptiveConfig(0.5, hidden_dim=8, match_rank=4, score_unit=4, distill_rows=0.5)
    module = MultiheadBlockSparseAdaptive(16, 2, [128], [1], adaptive_config=config, block_size=16)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = trained(module, [torch.randn(2, 100, 16)], OPTIMIZERS[optimizer], True, True)
    assert unchanged(found, before) == []
