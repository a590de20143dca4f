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


def selected_counts(pairs) -> dict:
    """Counts of a call of the selected operators on `tensors()`."""
    operators = torch.ops.dilated_attention
    return {operators.selected_forward: 2 * pairs * 40, operators.selected_backward: 2 * pairs * 96}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("scope", [1, 2, 4])
def test_selected_attention_counts_pairs_of_listed_blocks(is_causal, per_token, scope):
    n, size = 300, 64
    q, k, v = tensors(n, key_heads=2)
    indices = torch.randint(-1, 5, (2, scope, n if per_token else 5, 4), dtype=torch.int32)
    counts = torch.randint(0, 5, indices.shape[:3])
    options = {"granularity": size, "is_causal": is_causal, "enable_gqa": True}
    ours = counted(lambda: dap.selected_attention(q, k, v, indices, counts, **options).sum().backward())
    pairs = 0
    for sample in range(2):
        for head in range(4):
            for token in range(n):
                row = sample, head * scope // 4, token if per_token else token // size
                listed = set(indices[row][: counts[row]].tolist()) - {-1}
                seen = [block for block in listed if not is_causal or block <= token // size]
                pairs += sum(min(size, n - size * block) for block in seen)
    assert ours == selected_counts(pairs)


def test_listed_blocks_count_from_shapes_without_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    n, size = 300, 64
    with FakeTensorMode():
        q, k, v = tensors(n)
        for rows, entries, is_causal, pairs in [
            (5, 2, False, n * 128),
            (n, 2, False, n * 128),
            (n, 9, False, n * n),
            (5, 2, True, 64 * 64 + (n - 64) * 128),
            (n, 9, True, sum(64 * 64 * (i + 1) for i in range(4)) + 44 * n),
        ]:
            indices = torch.empty(2, 1, rows, entries, dtype=torch.int32)
            options = {"granularity": size, "is_causal": is_causal}
            call = lambda: dap.selected_attention(q, k, v, indices, **options).sum().backward()  # noqa: B023, E731
            assert counted(call) == selected_counts(2 * 4 * pairs)


def test_profiler_names_the_operators():
    q, k, v = tensors()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dap.attention(q, k, v, "window:64").sum().backward()
    names = {event.name for event in profile.events()}
    assert {"dilated_attention::forward", "dilated_attention::backward"} <= names
