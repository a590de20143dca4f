"""Merging parts of the keys, and looking at single rows."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import answer, dense_attention, error, multiplicities

from dilated_attention_pytorch import (
    Full,
    SparseAttention,
    attention,
    attention_rows,
    attention_with_lse,
    merge,
    parse,
    selected_attention,
    streamed_attention,
)


def parts(n=40, pieces=3):
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bounds = [0, *sorted(torch.randperm(n - 1)[: pieces - 1].add(1).tolist()), n]
    found = []
    for begin, end in pairwise(bounds):
        outside = (torch.arange(n) < begin) | (torch.arange(n) >= end)
        found.append(attention_with_lse(q, k, v, Full(), key_padding_mask=outside[None]))
    return (q, k, v), found


def test_parts_of_the_keys_merge_to_the_whole_with_its_gradients():
    leaves, found = parts()
    merged = merge([part.output for part in found], [part.lse for part in found])
    grad, grad_lse = torch.randn(1, 2, 40, 8, dtype=torch.float64), torch.randn(1, 2, 40, dtype=torch.float64)
    got = *merged, *torch.autograd.grad((merged.output * grad).sum() + (merged.lse * grad_lse).sum(), leaves)
    wanted = answer(*leaves, Full(), grad_output=grad, grad_lse=grad_lse)
    for one, other in zip(got, wanted, strict=True):
        assert error(one, other) <= 1e-12


@given(st.permutations(range(4)), st.integers(1, 3))
def test_merge_is_associative_and_commutative(order, cut):
    _, found = parts(pieces=4)
    whole = merge(*zip(*found, strict=True))
    shuffled = [found[i] for i in order]
    left, right = merge(*zip(*shuffled[:cut], strict=True)), merge(*zip(*shuffled[cut:], strict=True))
    nested = merge(*zip(left, right, strict=True))
    assert error(nested.output, whole.output) <= 1e-12 and error(nested.lse, whole.lse) <= 1e-12


def test_a_part_that_saw_nothing_changes_nothing():
    (q, *_), (first, *_) = parts()
    nothing = torch.full_like(first.lse, -math.inf)
    merged = merge([first.output, torch.zeros_like(first.output)], [first.lse, nothing])
    assert torch.equal(merged.output, first.output) and torch.equal(merged.lse, first.lse)
    empty = merge([torch.zeros_like(first.output)] * 2, [nothing] * 2)
    assert (empty.output == 0).all() and (empty.lse == -math.inf).all()
    (grad,) = torch.autograd.grad(merged.output.sum(), q)
    assert grad.isfinite().all()


def test_rows_are_the_weights_of_attention():
    pattern = parse("dilated:16x1,32x2;offset=block | global:3")
    q, k = torch.randn(2, 2, 4, 50, 8, dtype=torch.float64).unbind()
    k = k[:, :2]
    padding = torch.zeros(2, 50, dtype=torch.bool)
    padding[1, 30:] = True
    rows = [0, 7, 49]
    weights = attention_rows(q, k, pattern, rows, enable_gqa=True, key_padding_mask=padding, is_causal=True)
    identity = torch.eye(50, dtype=torch.float64).expand(2, 2, 50, 50)
    whole, _ = dense_attention(
        q, k, identity, multiplicities(pattern & parse("causal"), 50, 4), key_padding_mask=padding
    )
    assert error(weights, whole[:, :, rows]) <= 1e-12
    output = attention(q, k, identity, pattern, enable_gqa=True, key_padding_mask=padding, is_causal=True)
    assert error(weights, output[:, :, rows]) <= 1e-12


def test_autocast_rounds_inputs_of_weights_and_not_scores():
    query, key = (4 * torch.randn(2, 1, 4, 30, 16)).unbind()
    narrow, module = (query.bfloat16(), key.bfloat16()), SparseAttention("window:9")
    wanted = attention_rows(*(x.float() for x in narrow), "window:9", list(range(30)))
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_rows(query, key, "window:9", list(range(30)))
        tensors = (x.transpose(1, 2) for x in (query, key, key))
        weights = module(*tensors, return_attention_weights=True)[1]
    for got in (found, weights):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted)


def test_rows_of_a_long_sequence_cost_only_themselves():
    q, k = torch.randn(2, 1, 2, 300_000, 8).unbind()
    weights = attention_rows(q, k, "random:0.01;per_head=1 | window:10", torch.tensor([5, 200_000]))
    assert weights.shape == (1, 2, 2, 300_000)
    assert torch.allclose(weights.sum(-1), torch.ones(1, 2, 2), atol=1e-4)
    assert 0.009 < (weights > 0).double().mean() < 0.012


@pytest.mark.untyped
def test_no_rows_are_none_and_wrong_patterns_are_named():
    query, key = torch.randn(2, 1, 2, 9, 4).unbind()
    assert attention_rows(query, key, "window:3", []).shape == (1, 2, 0, 9)
    with pytest.raises(TypeError, match="a Pattern or text, got list"):
        attention_rows(query, key, ["window:3"], [0])


def test_a_row_that_sees_nothing_has_no_weights():
    q = torch.randn(1, 1, 16, 4)
    assert (attention_rows(q, q, "dilated:8x4", [1, 2]) == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("at", [0, -1])
def test_merge_keeps_an_lse_that_is_not_finite(bad, parts, at):
    outputs = [torch.randn(1, 1, 4, 2, requires_grad=True) for _ in range(parts)]
    lses = [torch.randn(1, 1, 4) for _ in range(parts)]
    lses[at][0, 0, 1] = bad
    for lse in lses:
        lse[0, 0, 3] = -torch.inf
    output, lse = merge(outputs, [x.requires_grad_() for x in lses])
    wanted = torch.stack(lses).detach().logsumexp(0)
    torch.testing.assert_close(lse.detach(), wanted, equal_nan=True)
    assert (output[0, 0, 3] == 0).all()
    assert output[0, 0, 1].isnan().all() and output[0, 0, [0, 2]].isfinite().all()
    grads = torch.autograd.grad(output[0, 0, [0, 2]].sum() + lse[0, 0, [0, 2]].sum(), [*outputs, *lses])
    assert all(grad[0, 0, [0, 2, 3]].isfinite().all() for grad in grads)


@pytest.mark.parametrize("size", [2.0**7, 2.0**20, 2.0**50])
def test_parts_share_rows_of_large_scores(size: float):
    """Values of 1 give an output of 1, although the LSE of parts has lost the number of their equal scores."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-3, 4, (1, 2, 96, 8), generator=generator).float() for _ in range(2))
    q, v, settings = size * q, torch.ones(1, 2, 96, 4), {"scale": 1.0}
    outputs = [torch.empty_like(v) for _ in range(2)]
    for output, text in zip(outputs, ("dilated:16x1,96x4", "full"), strict=True):
        streamed_attention((q, k, v), text, output, chunk=16, **settings)
    for rows in (6, 96):
        picks = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(2 * rows)]).view(1, 2, rows, 3)
        for backend in ("cpu", "native"):
            outputs.append(selected_attention(q, k, v, picks, granularity=16, backend=backend, **settings))
    assert all((output - 1).abs().max() < 2e-6 for output in outputs)
