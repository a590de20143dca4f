"""Packed sequences in the layout of `torch.nn.attention.varlen`: each against dense attention of its own."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_calls import same_document
from kernels.no_waiting import attention_op
from oracle import dense_attention, error, multiplicities
from strategies import strategy
from torch.nn.attention import varlen

from dilated_attention_pytorch import parse, varlen_attention
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.ops import varlen as varlen_op

LENGTHS = (7, 30, 1, 13)
BOUNDS = torch.tensor([0, 7, 37, 38, 51])
LSE = varlen.AuxRequest(lse=True)


def leaves(heads=4, key_heads=2):
    shapes = [(51, heads, 16), (51, key_heads, 16), (51, key_heads, 8)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def by_document(query, key, value, pattern, sink=None):
    outputs, lses = [], []
    for parts in zip(*(x.split(LENGTHS) for x in (query, key, value)), strict=True):
        counts = multiplicities(parse(pattern), len(parts[0]), query.shape[1])
        output, lse = dense_attention(*(x.transpose(0, 1)[None] for x in parts), counts)
        if sink is not None:
            output = output * (lse.exp() / (lse.exp() + sink.exp()[:, None]))[..., None]
        outputs.append(output[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return torch.cat(outputs), torch.cat(lses)


WINDOWS = {
    (-1, -1): "full",
    (-1, 0): "causal",
    (5, 0): "window:5,0",
    (3, 2): "window:3,2",
    (-1, 2): "window:100,2",
    (4, -1): "window:4,100",
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("pattern", ["full", "dilated:4x1,16x4"])
def test_each_sequence_is_alone(pattern, window):
    tensors = [*leaves(), torch.randn(4, dtype=torch.float64, requires_grad=True)]
    *inputs, sink = tensors
    found = varlen_attention(
        *inputs, BOUNDS, BOUNDS.int(), 30, 30,
        pattern=pattern, window_size=window, enable_gqa=True, sink=sink, return_aux=LSE,
    )  # fmt: skip
    wanted = by_document(*inputs, f"({pattern}) & ({WINDOWS[window]})", sink)
    weights = [torch.randn_like(x) for x in wanted]
    for got, expected in zip(found, wanted, strict=True):
        assert error(got, expected.detach()) < 1e-10
    grads = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(both, weights, strict=True)), tensors)
        for both in (found, wanted)
    ]
    for got, expected in zip(*grads, strict=True):
        assert error(got, expected) < 1e-10


@settings(max_examples=40)
@given(
    strategy(lambda draw: [draw.integer(0, 40) for _ in range(draw.integer(1, 5))] + [1]),
    st.integers(0, len(WINDOWS) - 1),
)
def test_drawn_documents_match_oracle_on_every_backend(lengths, which):
    window = list(WINDOWS)[which]
    n = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    tensors = [torch.randn(n, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
    before, after = (n if side == -1 else side for side in window)
    ahead = torch.arange(n) - torch.arange(n)[:, None]
    seen = same_document(bounds, n) & (ahead >= -before) & (ahead <= after)
    wanted = dense_attention(*(x.transpose(0, 1)[None] for x in tensors), seen.expand(2, -1, -1).double())
    grads = torch.autograd.grad(sum(x.sin().sum() for x in wanted), tensors)
    wanted = [x[0].transpose(0, 1).detach() for x in wanted]
    for backend in ("reference", "cpu", "native") if library_path().exists() else ("reference", "cpu"):
        options = {"window_size": window, "enable_gqa": True, "return_aux": LSE, "backend": backend}
        found = varlen_attention(*tensors, bounds, bounds, max(lengths), n, **options)
        own = torch.autograd.grad(sum(x.sin().sum() for x in found), tensors)
        for got, expected in zip([*found, *own], [*wanted, *grads], strict=True):
            assert error(got.detach(), expected) < 1e-10


@pytest.mark.parametrize(("pattern", "backend"), [("full", "cpu"), ("dilated:4x1,16x4", "auto")])
def test_calls_that_plan_on_the_host_read_device_bounds(pattern, backend):
    inputs = leaves()
    wanted = varlen_attention(*inputs, BOUNDS, BOUNDS, 30, 30, pattern=pattern, enable_gqa=True)
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention_op, varlen_op):
            patch.setattr(module, "allows_host_sync", lambda device: False)
        found = varlen_attention(*inputs, BOUNDS, None, 0, 0, pattern=pattern, enable_gqa=True, backend=backend)
        with pytest.raises(ValueError, match="cu_seq_k must equal cu_seq_q"):
            varlen_attention(*inputs, BOUNDS, BOUNDS + 1, 30, 30, pattern=pattern, enable_gqa=True)
    assert error(found.detach(), wanted.detach()) < 1e-12


def test_arguments_stand_in_the_order_of_torch():
    theirs, ours = (inspect.signature(f).parameters for f in (varlen.varlen_attn, varlen_attention))
    positional = [name for name, one in theirs.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    shared = ("return_aux", "scale", "window_size", "enable_gqa")
    assert all(theirs[name].default == ours[name].default for name in shared)


def test_empty_sequences_and_no_tokens():
    inputs = leaves()
    plain = varlen_attention(*inputs, BOUNDS, None, 30, 30, enable_gqa=True)
    assert isinstance(plain, torch.Tensor)
    gaps = torch.tensor([0, 0, 7, 37, 37, 37, 38, 51, 51])
    assert torch.equal(varlen_attention(*inputs, gaps, gaps, 30, 30, enable_gqa=True), plain)
    none = varlen_attention(*(x[:0] for x in inputs), torch.tensor([0, 0]), None, 0, 0, enable_gqa=True)
    assert none.shape == (0, 4, 8)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"cu_seq_k": torch.tensor([0, 8, 37, 38, 51])}, ValueError, "cu_seq_k must equal cu_seq_q"),
        ({"cu_seq_k": torch.tensor([0, 51])}, ValueError, "cu_seq_k must equal cu_seq_q, got 2 and 5 bounds"),
        ({"cu_seq_q": [0, 51]}, TypeError, "cu_seq_q must be a Tensor"),
        ({"cu_seq_q": torch.tensor([0, 50]), "cu_seq_k": None, "max_q": 50, "max_k": 50}, ValueError, "51"),
        ({"max_q": 29}, ValueError, "length of the longest sequence, got 29 for 30"),
        ({"query": torch.randn(1, 4, 51, 16)}, ValueError, r"query must have shape \(tokens, heads, width\)"),
        ({"window_size": (-2, 0)}, ValueError, "window_size must be two integers"),
        ({"key": torch.randn(50, 2, 16, dtype=torch.float64)}, ValueError, "key must have the query's length 51"),
    ],
)
def test_wrong_arguments_say_what_must_hold(change, kind, says):
    query, key, value = leaves()
    given = {"query": query, "key": key, "value": value, "cu_seq_q": BOUNDS, "cu_seq_k": BOUNDS}
    given |= {"max_q": 30, "max_k": 30, "enable_gqa": True}
    with pytest.raises(kind, match=says):
        varlen_attention(**(given | change))
