"""Calls without samples or without tokens: empty results and gradients of zero, as torch's own attention gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention_pytorch import (
    BlockSparseAdaptive,
    DilatedAttention,
    KVCache,
    MultiheadBlockSparseAdaptive,
    MultiheadDilatedAttention,
    MultiheadSparseAttention,
    RingDilatedAttention,
    SparseAttention,
    attention,
    attention_rows,
    attention_step,
    attention_with_lse,
    merge,
)
from dilated_attention_pytorch.distributed import SequenceLayout, context_parallel_attention
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.models import LongNet
from dilated_attention_pytorch.ops.streaming.sinks import TensorSink
from dilated_attention_pytorch.ops.streaming.sources import TensorSource
from dilated_attention_pytorch.ops.streaming.stream import streamed_attention, streamed_gradients
from dilated_attention_pytorch.selection.attention import selected_attention
from dilated_attention_pytorch.selection.types import Selection

BACKENDS = ["auto", "reference", "cpu", *(["native"] if library_path().exists() else [])]
SIZES = [(0, 5), (2, 0), (0, 0)]
PATTERNS = ["full", "window:3 & causal", "dilated:4x1,8x2", "random:0.5;block=16"]


def three(batch: int, n: int, dtype: torch.dtype = torch.float32, key_heads: int = 2) -> list[Tensor]:
    shapes = (batch, 4, n, 8), (batch, key_heads, n, 8), (batch, key_heads, n, 6)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def check(output: Tensor, shape: tuple[int, ...], leaves: list[Tensor]) -> None:
    assert output.shape == shape
    for leaf, grad in zip(leaves, torch.autograd.grad(output.sum(), leaves, retain_graph=True), strict=True):
        assert grad.shape == leaf.shape and grad.dtype == leaf.dtype and not grad.any()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_attention_of_nothing(pattern: str, backend: str, size: tuple[int, int]):
    batch, n = size
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        leaves = three(batch, n, dtype)
        mask = torch.zeros(batch, n, dtype=torch.bool)
        more = {"enable_gqa": True, "backend": backend, "key_padding_mask": mask, "dropout_p": 0.5}
        for budget in (None, 2**20):
            found = attention_with_lse(*leaves, pattern, is_causal=True, memory_budget=budget, **more)
            check(found.output, (batch, 4, n, 6), leaves)
            check(found.lse, (batch, 4, n), leaves[:2])
            assert found.output.dtype == dtype
            assert found.lse.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("size", SIZES)
def test_shapes_are_those_of_torch(size: tuple[int, int]):
    batch, n = size
    leaves = three(batch, n, key_heads=4)
    wanted = F.scaled_dot_product_attention(*leaves)
    assert attention(*leaves, "full").shape == wanted.shape


@pytest.mark.untyped
def test_wrong_calls_of_nothing_still_raise():
    query, key, value = (x.detach() for x in three(0, 5))
    with pytest.raises(ValueError, match="enable_gqa"):
        attention(query, key, value, "full")
    with pytest.raises(ValueError, match="pattern"):
        attention(query, key, value, "no such pattern", enable_gqa=True)
    with pytest.raises(ValueError, match="length"):
        attention(query, key[:, :, 1:], value, "full", enable_gqa=True)
    with pytest.raises(ValueError, match="heads and widths must be at least 1"):
        attention(query[..., :0], key[..., :0], value, "full", enable_gqa=True)


@pytest.mark.parametrize("size", SIZES)
def test_other_entries_take_nothing(size: tuple[int, int]):
    batch, n = size
    leaves = query, key, value = three(batch, n)
    rows = attention_rows(query, key, "window:3", [0, n - 1] if n else [], enable_gqa=True)
    check(rows, (batch, 4, 2 if n else 0, n), [query, key])
    if batch == 0:
        check(attention_step(query[:, :, :1], key, value, "window:3", 4, enable_gqa=True), (0, 4, min(n, 1), 6), leaves)
    check(attention_step(query[:, :, :0], key, value, "window:3", n, enable_gqa=True), (batch, 4, 0, 6), leaves)
    layout = SequenceLayout.contiguous(max(n, 1), 1)
    if n:
        check(context_parallel_attention(*leaves, "window:3", layout, enable_gqa=True), (batch, 4, n, 6), leaves)
    for per_token in (False, True):
        blocks = n if per_token else -(-n // 16)
        indices = torch.zeros(batch, 4, blocks, 1, dtype=torch.int32)
        selection = Selection(indices, indices[..., 0], n, 16, False, per_token, 1, 0)
        check(selected_attention(*leaves, selection, enable_gqa=True), (batch, 4, n, 6), leaves)
    merged = merge([value, value], [value[..., 0], value[..., 0]])
    check(merged.output, tuple(value.shape), [value])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"chunk": 2}, {"memory_budget": 2**20}])
def test_a_stream_of_nothing_ends(size: tuple[int, int], options: dict[str, int]):
    batch, n = size
    source = TensorSource(*(x.detach() for x in three(batch, n)), gradients=True)
    output, lse = torch.empty(batch, 4, n, 6), torch.empty(batch, 4, n)
    for pattern in PATTERNS:
        assert streamed_attention(source, pattern, TensorSink(output, lse), enable_gqa=True, **options).end == n
        streamed_gradients(source, pattern, lambda begin, output, lse: output, enable_gqa=True, **options)
    assert [tuple(grad.shape) for grad in source.grads] == [tuple(t.shape) for t in source.tensors]


def test_a_cache_takes_nothing():
    cache = KVCache("window:3")
    query, key, value = (x.detach() for x in three(2, 6))
    cache.attend(query, key, value)
    assert cache.attend(query[:, :, :0], key[:, :, :0], value[:, :, :0]).shape == (2, 4, 0, 6)
    after = cache.attend(query[:, :, :1], key[:, :, :1], value[:, :, :1])
    whole = [torch.cat([x, x[:, :, :1]], 2) for x in (query, key, value)]
    wanted = attention(*whole, "window:3", is_causal=True, enable_gqa=True)[:, :, 6:]
    torch.testing.assert_close(after, wanted)


HEADS: dict[str, nn.Module] = {
    "SparseAttention": SparseAttention("window:3"),
    "DilatedAttention": DilatedAttention([4, 8], [1, 2]),
    "RingDilatedAttention": RingDilatedAttention([4, 8], [1, 2]),
    "BlockSparseAdaptive": BlockSparseAdaptive([4, 8], [1, 2], num_heads=4, head_dim=8),
}
WIDE: dict[str, nn.Module] = {
    "MultiheadSparseAttention": MultiheadSparseAttention(32, 4, "window:3"),
    **{
        f"MultiheadDilatedAttention {position}": MultiheadDilatedAttention(32, 4, [4, 8], [1, 2], position=position)
        for position in (None, "rotary", "xpos", "alibi")
    },
    "MultiheadBlockSparseAdaptive": MultiheadBlockSparseAdaptive(32, 4, [4, 8], [1, 2]),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*HEADS, *WIDE])
def test_modules_take_nothing(name: str, size: tuple[int, int]):
    batch, n = size
    module = (HEADS | WIDE)[name]
    for training in (False, True):
        module.train(training)
        if name in HEADS:
            leaves = [torch.randn(batch, n, 4, 8, requires_grad=True) for _ in range(3)]
            check(module(*leaves, is_causal=True), (batch, n, 4, 8), leaves)
        else:
            x = torch.randn(batch, n, 32, requires_grad=True)
            output = module(x, is_causal=True)
            check(output[0] if isinstance(output, tuple) else output, (batch, n, 32), [x])


@pytest.mark.parametrize("size", SIZES)
def test_a_model_takes_nothing(size: tuple[int, int]):
    model = LongNet("tiny", num_encoder_layers=1, num_decoder_layers=0, segment_lengths=[4], dilation_rates=[1])
    x = torch.randn(*size, model.config.d_model, requires_grad=True)
    check(model(x), tuple(x.shape), [x])
