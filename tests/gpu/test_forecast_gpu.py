"""What `dap plan` foretells on a GPU: peak memory within a tenth, time within a factor of two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.nn import calibration as tuning
from dilated_attention_pytorch.tools.bench.measure import PeakMemory, clock
from dilated_attention_pytorch.tools.console import DTYPES
from dilated_attention_pytorch.tools.plan import forecast

pytestmark = pytest.mark.gpu

PROBLEMS = [
    ("window:1024 & causal", 131072, 8, 8, "bf16"),
    ("dilated:2048x1,8192x4,32768x16", 131072, 8, 8, "bf16"),
    ("random:0.01;block=128", 131072, 16, 4, "bf16"),
    ("dilated:2048x1,8192x4", 65536, 4, 4, "fp32"),
]


def call(text: str, n: int, heads: int, key_heads: int, kind: str, training: bool) -> object:
    dtype = getattr(torch, DTYPES[kind])
    made = (torch.randn(1, count, n, 64, device="cuda", dtype=dtype) for count in (heads, key_heads, key_heads))
    query, key, value = (tensor.requires_grad_(training) for tensor in made)
    output = dap.attention(query, key, value, text, enable_gqa=True)
    return torch.autograd.grad(output, (query, key, value), torch.randn_like(output)) if training else output


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize(("text", "n", "heads", "key_heads", "kind"), PROBLEMS)
def test_the_forecast_of_peak_memory_is_within_a_tenth(
    text: str, n: int, heads: int, key_heads: int, kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
):
    if backend != "auto":
        attention = dap.attention
        monkeypatch.setattr(dap, "attention", lambda *given, **options: attention(*given, **options, backend=backend))
        monkeypatch.setattr("dilated_attention_pytorch.tools.plan.backend_for", lambda *_: backend)
    told = forecast(text, n, heads, key_heads, 64, kind, 1, 1, "cuda", 2**40)["peak_bytes"]
    for training, wanted in ((False, told["forward"]), (True, told["training"])):
        dap.plan_cache.clear()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        # Compiling and planning are over after the first call; the plan and its tables stay and count.
        call(text, n, heads, key_heads, kind, training)
        with PeakMemory("cuda") as peak:
            call(text, n, heads, key_heads, kind, training)
        assert peak.total is not None
        assert peak.total - before == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize(("text", "n"), [("window:1024 & causal", 65536), ("random:0.1;block=128", 32768)])
def test_the_forecast_of_time_is_within_a_factor_of_two(
    text: str, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.calibrate("cuda")
    told = forecast(text, n, 8, 8, 64, "bf16", 1, 1, "cuda", 2**40)["seconds"]
    query, key, value = (torch.randn(1, 8, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def forward() -> None:
        dap.attention(query, key, value, text)

    forward()
    measured = min(clock(forward, "cuda", 5) for _ in range(3))
    assert 0.5 < told["forward"] / measured < 2.0
