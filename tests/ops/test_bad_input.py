"""Wrong calls: each with the first line of its error, or its defined result."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import BackendUnsupported, Full, PerHead, attention, attention_rows, backends, merge

pytestmark = pytest.mark.untyped


def tensors(**changes):
    shapes = {"query": (1, 4, 10, 8), "key": (1, 4, 10, 8), "value": (1, 4, 10, 8)}
    return {name: torch.randn(changes.get(name, shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("changes", "first_line"),
    [
        ({"query": (4, 10, 8)}, "query must have shape (batch, heads, n, width), got 3 dimensions (4, 10, 8)"),
        ({"key": (1, 4, 11, 8)}, "key must have the query's length 10, got 11"),
        ({"value": (1, 4, 11, 8)}, "value must have the query's length 10, got 11"),
        ({"key": (2, 4, 10, 8)}, "key must have the query's batch size 1, got 2"),
        ({"key": (1, 4, 10, 6)}, "key must have the query's width 8, got 6"),
        ({"value": (1, 2, 10, 8)}, "value must have the key's 4 heads, got 2"),
        (
            {"key": (1, 2, 10, 8), "value": (1, 2, 10, 8)},
            "key must have as many heads as query, got 4 query heads and 2 key heads",
        ),
        (
            {"query": (1, 0, 10, 8), "key": (1, 0, 10, 8), "value": (1, 0, 10, 8)},
            "heads and widths must be at least 1, got query (1, 0, 10, 8), value (1, 0, 10, 8)",
        ),
        (
            {"value": (1, 4, 10, 0)},
            "heads and widths must be at least 1, got query (1, 4, 10, 8), value (1, 4, 10, 0)",
        ),
    ],
)
def test_shapes_that_do_not_fit(changes, first_line):
    with pytest.raises(ValueError) as caught:
        attention(**tensors(**changes), pattern=Full())
    assert str(caught.value).splitlines()[0] == first_line


@pytest.mark.parametrize(
    ("options", "first_line"),
    [
        ({"dropout_p": 1.0}, "dropout_p must lie in [0, 1), got 1.0"),
        ({"dropout_p": -0.1}, "dropout_p must lie in [0, 1), got -0.1"),
        ({"scale": float("nan")}, "scale must be finite, got nan"),
        ({"scale": float("inf")}, "scale must be finite, got inf"),
        ({"pattern": 3}, "pattern must be a Pattern or text, got int"),
        ({"pattern": "window:-4"}, "window must be >= 0, got -4"),
        ({"pattern": PerHead((Full(),))}, "the call must have the pattern's 1 heads, got 4"),
        ({"pattern": "random:0.5;length=11"}, "the sequence must have the pattern's 11 tokens, got 10"),
        ({"backend": "cuda"}, f"backend must be one of auto, {', '.join(backends())}, got 'cuda'"),
        ({"key_padding_mask": torch.zeros(1, 10)}, "key_padding_mask must be bool, True where a key is ignored, got torch.float32"),
        ({"key_padding_mask": torch.zeros(1, 9, dtype=torch.bool)}, "key_padding_mask must have shape (1, 10), got (1, 9)"),
        ({"cu_seqlens": torch.tensor([0, 4, 9])}, "cu_seqlens must ascend from 0 to the sequence length 10, got [0, 4, 9]"),
        ({"cu_seqlens": torch.tensor([0, 7, 4, 10])}, "cu_seqlens must ascend from 0 to the sequence length 10, got [0, 7, 4, 10]"),
        ({"cu_seqlens": torch.tensor([0.0, 10.0])}, "cu_seqlens must be int32 or int64 of shape (documents + 1,), got torch.float32 (2,)"),
        ({"enable_gqa": True, "key": torch.randn(1, 3, 10, 8), "value": torch.randn(1, 3, 10, 8)}, "query heads must be a multiple of key heads, got 4 query heads and 3 key heads"),
        ({"query": torch.randn(1, 4, 10, 8).long()}, "query must be float16, bfloat16, float32 or float64, got torch.int64"),
        ({"key": torch.randn(1, 4, 10, 8).double()}, "key must have the query's dtype torch.float32, got torch.float64"),
        ({"key": torch.empty(1, 4, 10, 8, device="meta")}, "key must be on the query's device cpu, got meta"),
        ({"query": [[1.0]]}, "query must be a Tensor, got list"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be(options, first_line):
    with pytest.raises((ValueError, TypeError)) as caught:
        attention(**{**tensors(), "pattern": Full(), **options})
    assert str(caught.value).splitlines()[0] == first_line


def test_packed_sequences_want_one_batch_entry():
    q = torch.randn(2, 1, 10, 4)
    with pytest.raises(ValueError, match="packed sequences must have batch size 1, got 2"):
        attention(q, q, q, Full(), cu_seqlens=torch.tensor([0, 10]))


def test_advice_names_the_missing_flag():
    with pytest.raises(ValueError, match="Pass enable_gqa=True"):
        attention(**tensors(key=(1, 2, 10, 8), value=(1, 2, 10, 8)), pattern=Full())


def test_a_named_backend_says_why_it_cannot():
    with pytest.raises(BackendUnsupported) as caught:
        attention(**tensors(), pattern=Full(), backend="triton")
    first, reason = str(caught.value).splitlines()
    assert first == "backend 'triton' cannot run this call (float32, cpu, batch 1, heads 4, n 10, d 8)"
    assert reason == "  triton: needs a CUDA tensor, got cpu"


def test_the_reference_refuses_long_sequences():
    q = torch.randn(1, 1, 8193, 4)
    with pytest.raises(BackendUnsupported, match="n must be <= 8192, got 8193"):
        attention(q, q, q, "window:2", backend="reference")


def test_one_token_sees_itself():
    q, k, v = torch.randn(3, 1, 2, 1, 4).unbind()
    for pattern in ("causal", "dilated:4x1", "window:0", "random:0.1"):
        assert torch.allclose(attention(q, k, v, pattern), v)


@pytest.mark.parametrize(
    ("call", "first_line"),
    [
        (lambda: merge([], []), "merge must have as many outputs as lses, at least one, got 0 and 0"),
        (
            lambda: merge([torch.zeros(1, 1, 3, 2)], [torch.zeros(1, 1, 4)]),
            "each lse must have its output's shape without the last dimension, got (1, 1, 4) for (1, 1, 3, 2)",
        ),
        (
            lambda: attention_rows(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), "causal", [3]),
            "rows must lie in 0 .. 2, got 3 .. 3",
        ),
        (
            lambda: attention_rows(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), "causal", [0.5]),
            "rows must be a list of row numbers, got torch.float32 (1,)",
        ),
    ],
)
def test_merge_and_rows_check_their_arguments(call, first_line):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert str(caught.value).splitlines()[0] == first_line
