"""The forecast of memory for Triton's kernels against what their launches allocate; the kernels themselves do nothing."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from live_memory import LiveMemory

from dilated_attention_pytorch import make_plan, parse
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.triton import launches
from dilated_attention_pytorch.tools.peak_memory import Shape, is_joined, peaks


class Idle:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("text", ["window:256 & causal", "dilated:512x1,2048x4", "dilated:512x4", "random:0.1"])
@pytest.mark.parametrize("key_heads", [4, 1])
def test_the_forecast_counts_what_the_launches_allocate(
    text: str, dtype: torch.dtype, key_heads: int, monkeypatch: pytest.MonkeyPatch
):
    for name in vars(launches):
        if name.endswith("_kernel"):
            monkeypatch.setattr(launches, name, Idle())
    n, heads, d = 4096, 4, 64
    plan = make_plan(parse(text), n, heads)
    shape = Shape(n=n, heads=heads, key_heads=key_heads, d=d, dtype=dtype, backend="triton", joined=is_joined(plan))
    with LiveMemory(floating_only=True) as memory:
        query, key, value = (torch.empty(1, count, n, d, dtype=dtype) for count in (heads, key_heads, key_heads))
        call = AttentionCall(query, key, value, plan, d**-0.5)
        output, lse = launches.forward(call)
        forward = memory.peak
        memory.peak = memory.now
        gradients = launches.backward(call, output, lse, torch.empty_like(output), None)
    assert gradients.query.shape == query.shape
    assert (forward, memory.peak) == pytest.approx(peaks(shape, 0), rel=0.02)
