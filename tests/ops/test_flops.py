"""Counts of `FlopCounterMode` and names in the profiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.ops.flops import kept_pairs

FORWARD, BACKWARD = torch.ops.dilated_attention.forward, torch.ops.dilated_attention.backward


def counted(call) -> dict:
    with FlopCounterMode(display=False) as counter:
        call()
    return dict(counter.get_flop_counts()["Global"])


def tensors(n=300, heads=4, key_heads=4, width=16, value=24):
    shapes = ((2, heads, n, width), (2, key_heads, n, width), (2, key_heads, n, value))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("n", [256, 300])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_full_pattern_counts_as_sdpa(n, key_heads):
    q, k, v = tensors(n, key_heads=key_heads)
    ours = counted(lambda: dap.attention(q, k, v, "full", enable_gqa=True).sum().backward())
    shapes = q.shape, k.shape, v.shape
    assert ours[FORWARD] == sdpa_flop_count(*shapes)
    assert ours[BACKWARD] == sdpa_backward_flop_count((2, 4, n, 24), *shapes)


def test_window_counts_its_kept_tiles():
    q, k, v = tensors(1000)
    ours = counted(lambda: dap.attention(q, k, v, "window:64").sum().backward())
    # Tiles of 128: each row of tiles keeps itself and a neighbour on both sides; the last has 104 tokens.
    sizes = torch.tensor([128] * 7 + [104])
    pairs = int((sizes * sizes).sum() + 2 * (sizes[1:] * sizes[:-1]).sum())
    assert ours == {FORWARD: 2 * 2 * 4 * pairs * 40, BACKWARD: 2 * 2 * 4 * pairs * 96}


@pytest.mark.parametrize("pattern", ["dilated:64x1,256x4", "causal", "heads{window:5 / causal / full / global:2}"])
def test_kept_pairs_cover_every_pair(pattern):
    plan = dap.make_plan(dap.parse(pattern), 300, 4, block_size=16)
    counts = plan.to_dense()
    assert int(counts.sum()) <= kept_pairs(plan) <= plan.blocks * 16 * 16


def test_packed_calls_and_modules_are_counted():
    layer = dap.MultiheadSparseAttention(32, 4, "full")
    x = torch.randn(1, 100, 32)
    counts = counted(lambda: layer(x, cu_seqlens=torch.tensor([0, 60, 100])))
    assert counts[FORWARD] == 2 * 4 * (60 * 60 + 40 * 40) * 16
    assert counts[torch.ops.aten.addmm] == 4 * 2 * 100 * 32 * 32


def test_counter_imported_after_the_library_counts():
    code = """
import torch, dilated_attention_pytorch as dap
q = torch.randn(1, 1, 128, 8, requires_grad=True)
output = dap.attention(q, q, q, "full")
import sys
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    output.sum().backward()
print(counter.get_total_flops())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == str(2 * 128 * 128 * 5 * 8), run.stderr


def test_fake_tensors_are_counted():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(1, 2, 256, 16)
        assert counted(lambda: dap.attention(q, q, q, "full")) == {FORWARD: 2 * 2 * 256 * 256 * 32}
    real = torch.randn(1, 2, 256, 16)
    assert dap.attention(real, real, real, "full").isfinite().all()


def test_profiler_names_the_operators():
    q, k, v = tensors()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dap.attention(q, k, v, "window:64").sum().backward()
    names = {event.name for event in profile.events()}
    assert {"dilated_attention::forward", "dilated_attention::backward"} <= names
