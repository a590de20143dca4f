"""Soft caps: bounded scores on the backends that have them, against dense float64 attention."""

from __future__ import annotations

import pytest
import torch
from oracle import dense_attention, error, multiplicities

from dilated_attention_pytorch import BackendUnsupported, attention, attention_step, attention_with_lse, parse
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.kernels.registry import MODULES, backend_named

CAP = 1.5


def leaves(n=50, batch=2, dtype=torch.float64):
    shapes = [(batch, 4, n, 16), (batch, 2, n, 16), (batch, 2, n, 8)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def capped_attention(query, key, value, counts, padding=None):
    return dense_attention(query, key, value, counts, key_padding_mask=padding, softcap=CAP)


def check(found, wanted, inputs, tolerance):
    weights = torch.randn_like(wanted[0]), torch.randn_like(wanted[1])

    def grads(output, lse):
        lse = torch.where(lse.isfinite(), lse, 0.0)
        return torch.autograd.grad((output * weights[0]).sum() + (lse * weights[1]).sum(), inputs)

    pairs = [*zip(found, wanted, strict=True), *zip(grads(*found), grads(*wanted), strict=True)]
    for got, expected in pairs:
        assert error(got, expected.detach()) < tolerance


@pytest.mark.parametrize("backend", ["reference", "cpu", "native", "auto"])
@pytest.mark.parametrize("pattern", ["dilated:8x1,32x4", "window:3 | global:2", "full"])
def test_capped_gradients_match_dense(pattern, backend):
    if backend == "native" and not library_path().exists():
        pytest.skip("C++ kernel not built")
    inputs = leaves()
    padding = torch.arange(50)[None] < torch.tensor([[0], [20]])
    found = attention_with_lse(
        *inputs, pattern, is_causal=True, enable_gqa=True, key_padding_mask=padding, softcap=CAP, backend=backend
    )
    counts = multiplicities(parse(f"({pattern}) & causal"), 50, 4)
    check(found, capped_attention(*inputs, counts, padding), inputs, 1e-10)


def test_a_memory_budget_leaves_capped_results():
    inputs = leaves(n=200)
    whole = attention_with_lse(*inputs, "window:40", enable_gqa=True, softcap=CAP)
    split = attention_with_lse(*inputs, "window:40", enable_gqa=True, softcap=CAP, memory_budget=2**23)
    check(split, whole, inputs, 1e-10)


def test_capped_steps_are_rows_of_the_whole():
    query, key, value = inputs = leaves()
    whole = attention(*inputs, "window:9", is_causal=True, enable_gqa=True, softcap=CAP)
    found = attention_step(query[:, :, 40:42], key, value, "window:9", 40, enable_gqa=True, softcap=CAP)
    assert error(found, whole[:, :, 40:42].detach()) < 1e-10
    assert error(found, attention(*inputs, "window:9", is_causal=True, enable_gqa=True)[:, :, 40:42].detach()) > 1e-3


def test_backends_without_a_softcap_are_skipped():
    query = torch.randn(1, 2, 20, 16)
    for name in MODULES:
        if not getattr(backend_named(name), "SOFTCAP", False):
            with pytest.raises(BackendUnsupported, match="has no softcap"):
                attention(query, query, query, "full", softcap=CAP, backend=name)


@pytest.mark.untyped
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), "1"])
def test_a_wrong_softcap_says_what_must_hold(value):
    query = torch.randn(1, 2, 20, 16)
    with pytest.raises(ValueError, match="softcap must be a positive number"):
        attention(query, query, query, "full", softcap=value)
    with pytest.raises(ValueError, match="softcap must be a positive number"):
        attention_step(query[:, :, :1], query, query, "full", 0, softcap=value)
