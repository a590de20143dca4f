"""User-defined patterns and patterns without text through every way to run attention, against the dense oracle."""

from __future__ import annotations

import gc
import sys
from weakref import ref

import pytest
import torch
from oracle import answer, error
from own_patterns import ByLength, HeadBlocks, HeadResidues, Levels, Table

from dilated_attention_pytorch import (
    BlockLists,
    Causal,
    Dilated,
    Packed,
    Pattern,
    SlidingWindow,
    attention,
    attention_with_lse,
    plan_cache,
)
from dilated_attention_pytorch.distributed import SequenceLayout, virtual_attention
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.ops.decode import attention_step
from dilated_attention_pytorch.ops.explain import explain
from dilated_attention_pytorch.ops.streaming import executor as streamer
from dilated_attention_pytorch.ops.streaming.sources import TensorSource
from dilated_attention_pytorch.ops.streaming.stream import streamed_attention, streamed_gradients
from dilated_attention_pytorch.patterns.parse import from_operand, to_operand

N, HEADS = 70, 3
BACKENDS = ["native", "cpu", "reference"]
LISTS = BlockLists.of([[j for j in range(N) if (i * i + 3 * j) % 9] for i in range(N)], block=1)
PATTERNS = {
    "heads": HeadResidues(),
    "counts": Levels(),
    "table": Table(*(token * token % 3 for token in range(N))),
    "blocks": HeadBlocks(block=16),
    "by length": ByLength(),
    "long lists": LISTS,
    "and": HeadResidues() & SlidingWindow(20),
    "or": HeadResidues(5) | Dilated((16,), (2,)),
    "counted and": Levels(3) & Dilated((16, 32), (1, 2)),
    "packed": Packed(HeadResidues(), (30, 40)),
    "packed or": Packed(Dilated((8, 16), (1, 2)), (30, 40)) | HeadResidues(),
}


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, HEADS, N, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def skip_missing(backend: str) -> None:
    if backend == "native" and not library_path().exists():
        pytest.skip("the native library is not built")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", PATTERNS)
def test_user_patterns_match_oracle(name: str, is_causal: bool, backend: str, tensors: list[torch.Tensor]):
    skip_missing(backend)
    pattern = PATTERNS[name]
    grad_output, grad_lse = torch.randn_like(tensors[0]), torch.randn(2, HEADS, N, dtype=torch.float64)
    whole = pattern & Causal() if is_causal else pattern
    wanted = answer(*tensors, whole, grad_output=grad_output, grad_lse=grad_lse)
    output, lse = attention_with_lse(*tensors, pattern, is_causal=is_causal, backend=backend)
    grads = torch.autograd.grad((output, lse), tensors, (grad_output, grad_lse.where(lse.isfinite(), 0.0)))
    for got, want in zip((output, lse, *grads), wanted, strict=True):
        assert error(got, want) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("name", ["heads", "counts", "and", "packed or"])
def test_user_patterns_keep_rows_under_a_budget(name: str, backend: str, tensors: list[torch.Tensor]):
    skip_missing(backend)
    wanted = answer(*tensors, PATTERNS[name]).output
    budget = 40_000 if backend == "native" else 1_200_000
    assert error(attention(*tensors, PATTERNS[name], backend=backend, memory_budget=budget), wanted) <= 1e-12


@pytest.mark.parametrize("overlap", ["none", "local"])
@pytest.mark.parametrize("name", PATTERNS)
def test_user_patterns_match_oracle_over_ranks(name: str, overlap: str, tensors: list[torch.Tensor]):
    grad_output = torch.randn_like(tensors[0])
    wanted = answer(*tensors, PATTERNS[name], grad_output=grad_output)
    for layout in (SequenceLayout.contiguous(N, 3), SequenceLayout.zigzag(N, 2)):
        output, lse = virtual_attention(*tensors, PATTERNS[name], layout, overlap=overlap)
        grads = torch.autograd.grad(output, tensors, grad_output)
        for got, want in zip((output, lse, *grads), wanted, strict=True):
            assert error(got, want) <= 1e-12


@pytest.mark.parametrize("few", [streamer.FEW_KEYS, 8], ids=["keys at once", "keys in stretches"])
@pytest.mark.parametrize("name", PATTERNS)
def test_user_patterns_match_oracle_in_streams(name, few, tensors, monkeypatch):
    monkeypatch.setattr(streamer, "FEW_KEYS", few)
    rows = [tensor.detach() for tensor in tensors]
    grad_output = torch.randn_like(rows[0])
    wanted = answer(*rows, PATTERNS[name], grad_output=grad_output)
    output, source = torch.full_like(rows[0], torch.nan), TensorSource(*rows, gradients=True)
    streamed_attention(source, PATTERNS[name], output, chunk=29)
    assert error(output, wanted.output) <= 1e-12
    streamed_gradients(
        source, PATTERNS[name], lambda begin, found, _: grad_output[:, :, begin : begin + found.shape[2]], chunk=29
    )
    for got, want in zip(source.grads, wanted[2:], strict=True):
        assert error(got, want) <= 1e-12


@pytest.mark.parametrize("name", ["heads", "counts", "table", "and", "or", "counted and"])
def test_user_patterns_match_oracle_in_decoding(name: str, tensors: list[torch.Tensor]):
    query, key, value = (tensor.detach() for tensor in tensors)
    wanted = answer(query, key, value, PATTERNS[name] & Causal()).output
    for t in (0, 31, N - 1):
        found = attention_step(query[:, :, t : t + 1], key, value, PATTERNS[name], t, length=N)
        assert error(found, wanted[:, :, t : t + 1]) <= 1e-12


@pytest.mark.parametrize("pattern", [ByLength(), HeadBlocks(block=16)], ids=["resolve", "rows"])
def test_decoding_needs_the_length_that_a_pattern_reads(pattern: Pattern, tensors: list[torch.Tensor]):
    query, key, value = (tensor.detach() for tensor in tensors)
    wanted = answer(query, key, value, pattern & Causal()).output
    for first, rows in ((40, 1), (2, 66)):
        step = query[:, :, first : first + rows], key, value, pattern, first
        with pytest.raises(ValueError, match="length must be given"):
            attention_step(*step)
        assert error(attention_step(*step, length=N), wanted[:, :, first : first + rows]) <= 1e-12


def test_gradients_outlive_the_pattern(tensors: list[torch.Tensor]):
    grad_output = torch.randn_like(tensors[0])
    wanted = answer(*tensors, HeadResidues(11), grad_output=grad_output)
    with torch.profiler.profile():
        output = attention(*tensors, HeadResidues(11))
    plan_cache.clear()
    gc.collect()
    for got, want in zip(torch.autograd.grad(output, tensors, grad_output), wanted[2:], strict=True):
        assert error(got, want) <= 1e-12


def test_patterns_without_text_are_released(tensors: list[torch.Tensor]):
    query, key, value = (tensor.detach() for tensor in tensors)
    alive = []
    for skipped in range(6):
        lists = BlockLists.of([[j for j in range(N) if (i + j + skipped) % 31] for i in range(N)], block=1)
        assert not lists.is_writable
        attention(query, key, value, lists, is_causal=bool(skipped % 2))
        explain(query, key, value, lists)
        alive.append(ref(lists))
    plan_cache.clear()
    sys.modules["dilated_attention_pytorch.ops.attention"]._cached.clear()
    del lists
    gc.collect()
    assert [pattern() for pattern in alive] == [None] * 6


def test_equal_patterns_share_a_handle():
    first, second = to_operand(HeadResidues(7) & LISTS), to_operand(HeadResidues(7) & LISTS)
    assert first == second and from_operand(first) == HeadResidues(7) & LISTS
    assert to_operand(HeadResidues(8) & LISTS) != first
    assert to_operand(SlidingWindow(3) & Causal()) == "window:3 & causal"


def test_a_handle_of_a_dropped_pattern_is_refused():
    name = str(to_operand(HeadResidues(9)))
    gc.collect()
    with pytest.raises(ValueError, match="must be alive in the process that runs the operator, got @"):
        from_operand(name)
