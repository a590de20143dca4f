"""Dropout depends on coordinates and seed alone, and keeps the expectation."""

from __future__ import annotations

import pytest
import torch
from oracle import dense_attention, error, multiplicities

from dilated_attention_pytorch import attention, parse
from dilated_attention_pytorch.kernels.cpu import tiles as cpu
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.kernels.dropout import keep_mask

BACKENDS = [
    "reference",
    "cpu",
    pytest.param("native", marks=pytest.mark.skipif(not library_path().exists(), reason="C++ kernel not built")),
]
PATTERN = parse("dilated:32x1,64x2 & causal")


def mask(seed, batch, heads, n, p):
    index = torch.arange(batch * heads).view(batch, heads, 1, 1)
    return keep_mask(seed, index, torch.arange(n)[:, None], torch.arange(n)[None], p)


def drawn_seed():
    torch.manual_seed(5)
    seed = torch.randint(2**62, (1,), dtype=torch.int64)
    torch.manual_seed(5)
    return seed


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_drops_the_same_weights(backend):
    q, k, v = (torch.randn(2, 4, 100, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grad = torch.randn(2, 4, 100, 8, dtype=torch.float64)
    seed = drawn_seed()
    output = attention(q, k, v, PATTERN, dropout_p=0.3, backend=backend)
    options = {"kept": mask(seed, 2, 4, 100, 0.3), "dropout_p": 0.3}
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    wanted, _ = dense_attention(*leaves, multiplicities(PATTERN, 100, 4), **options)
    assert error(output, wanted) <= 1e-10
    found = torch.autograd.grad((output * grad).sum(), (q, k, v))
    for got, want in zip(found, torch.autograd.grad((wanted * grad).sum(), leaves), strict=True):
        assert error(got, want) <= 1e-10


def test_chunking_does_not_show(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 150, 8, dtype=torch.float64).unbind()
    results = []
    for budget in (2**14, 2**26):
        monkeypatch.setattr(cpu, "BUDGET", budget)
        torch.manual_seed(1)
        results.append(attention(q, k, v, PATTERN, dropout_p=0.5, backend="cpu"))
    assert error(results[0], results[1]) <= 1e-12


def test_kept_weights_are_as_many_as_asked_and_independent():
    seed = torch.tensor([123456789], dtype=torch.int64)
    grid = mask(seed, 2, 2, 300, 0.25).double()
    assert grid.mean().item() == pytest.approx(0.75, abs=0.005)
    flat = grid.flatten(2) - grid.flatten(2).mean(-1, keepdim=True)
    correlations = torch.corrcoef(flat.flatten(0, 1))
    assert (correlations - torch.eye(4)).abs().max() < 0.02
    assert (grid[0, 0, 1:] == grid[0, 0, :-1]).double().mean().item() == pytest.approx(0.75**2 + 0.25**2, abs=0.01)
    assert not torch.equal(mask(seed + 1, 1, 1, 50, 0.25), mask(seed, 1, 1, 50, 0.25))
