"""Every kind of module trains on a GPU, every backend gives the oracle's numbers, and the commands run.

`python benchmarks/gpu_stamp.py --run --write --workers 8` runs this file before anything about GPUs lands.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import answer, error, sink_gradient
from torch import nn

from dilated_attention_pytorch import attention_with_lse, parse, selected_attention
from dilated_attention_pytorch.kernels.registry import MODULES, backend_named
from dilated_attention_pytorch.models import LongNetConfig, LongNetLM, SlideEncoder
from dilated_attention_pytorch.nn import (
    AdaptiveConfig,
    BlockSparseAdaptive,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    MultiheadBlockSparseAdaptive,
    MultiheadDilatedAttention,
    MultiheadSparseAttention,
    RingDilatedAttention,
    SparseAttention,
    SparsePatternConfig,
)
from dilated_attention_pytorch.ops.attention import CallSettings, call_of
from dilated_attention_pytorch.tools.quality import command
from dilated_attention_pytorch.tools.quality import runner as quality

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HEADS, KEY_HEADS, WIDTH, N = 4, 2, 64, 512
BRANCHES = (128, 512), (1, 4)
SIZES = (256, 128, 64, 32, 16)


class Around(nn.Module):
    """A module on (B, N, H, D) between projections, so that it has parameters to train."""

    def __init__(self, core: nn.Module, key_heads: int = HEADS, is_causal: bool = False) -> None:
        super().__init__()
        self.core, self.heads, self.is_causal = core, [HEADS, key_heads, key_heads], is_causal
        self.before = nn.Linear(WIDTH, sum(self.heads) * WIDTH, bias=False)
        self.after = nn.Linear(HEADS * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.before(x).unflatten(-1, (-1, WIDTH)).split(self.heads, 2)
        return self.after(self.core(*heads, is_causal=self.is_causal).flatten(2))


class First(nn.Module):
    """The output of a module that also returns weights."""

    def __init__(self, module: nn.Module, **options: bool) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x, **self.options)[0]


class Slides(nn.Module):
    """A small slide encoder on tiles of a square slide."""

    def __init__(self) -> None:
        super().__init__()
        shape = {"d_model": 128, "num_layers": 2, "nhead": HEADS, "dim_feedforward": 128}
        segments = {"segment_lengths": BRANCHES[0], "dilation_rates": BRANCHES[1]}
        self.encoder = SlideEncoder(tile_width=WIDTH, **shape, **segments)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(N, device=x.device)
        return self.encoder(x, (torch.stack([place // 32, place % 32], -1) * 256).expand(len(x), N, 2))[:, None]


def lm() -> LongNetLM:
    shape = {"num_tokens": 64, "d_model": 256, "nhead": HEADS, "num_decoder_layers": 2, "dim_feedforward": 256}
    return LongNetLM(LongNetConfig(**shape, segment_lengths=BRANCHES[0], dilation_rates=BRANCHES[1]))


def block_sparse(kind: str, **more: int) -> Around:
    config = SparsePatternConfig(pattern_type=kind, sparsity_ratio=0.25, block_size=64, **more)
    return Around(BlockSparseRingDilatedAttention(*BRANCHES, config))


class Indexed(nn.Module):
    """Attention of (B, N, H, D) on blocks by their mean keys, listed for tokens or for blocks of queries."""

    def __init__(self, per_token: bool) -> None:
        super().__init__()
        self.per_token, self.sink = per_token, nn.Parameter(torch.zeros(HEADS))

    def forward(self, *heads: torch.Tensor, is_causal: bool) -> torch.Tensor:
        query, key, value = (x.transpose(1, 2) for x in heads)
        means = key.detach().unflatten(2, (-1, 64)).mean(3)
        rows = query.detach().unflatten(1, (KEY_HEADS, -1)).mean(2)
        rows = rows if self.per_token else rows.unflatten(2, (-1, 64)).mean(3)
        own = torch.arange(rows.shape[2], device=query.device) // (64 if self.per_token else 1)
        near = own[:, None].expand(*rows.shape[:3], 1)
        indices = torch.cat([near, (rows @ means.mT).topk(3).indices], -1)
        options = {"granularity": 64, "enable_gqa": True, "sink": self.sink}
        return selected_attention(query, key, value, indices, is_causal=is_causal, **options).transpose(1, 2)


def adaptive(size: int = 64, unit: int = 16, is_causal: bool = False, heads: int = HEADS, **options: Any) -> Around:
    config = AdaptiveConfig(0.5, score_unit=unit, **options)
    module = BlockSparseAdaptive([N], [1], HEADS, WIDTH, config, block_size=size, num_kv_heads=heads)
    return Around(module, heads, is_causal=is_causal)


def adaptive_multihead(is_causal: bool, **options: int) -> First:
    config = AdaptiveConfig(0.5)
    module = MultiheadBlockSparseAdaptive(
        WIDTH * HEADS, HEADS, [N], [1], adaptive_config=config, block_size=64, **options
    )
    return First(module, is_causal=is_causal)


KINDS = {
    "dilated": lambda: Around(DilatedAttention(*BRANCHES)),
    "dilated, causal": lambda: Around(DilatedAttention(*BRANCHES), is_causal=True),
    "dilated, grouped heads": lambda: Around(DilatedAttention(*BRANCHES), KEY_HEADS),
    "ring dilated": lambda: Around(RingDilatedAttention(*BRANCHES)),
    "any pattern": lambda: Around(SparseAttention("window:64 | global:16")),
    "block sparse, dilated": lambda: block_sparse("dilated_sparse"),
    "block sparse, window": lambda: block_sparse("local_window"),
    "block sparse, global and window": lambda: block_sparse("global_local", global_tokens=64),
    "hierarchical": lambda: Around(BlockSparseHierarchical(*BRANCHES, block_size=64)),
    "multihead dilated": lambda: First(MultiheadDilatedAttention(256, HEADS, *BRANCHES), is_causal=True),
    "multihead, grouped heads": lambda: First(MultiheadSparseAttention(256, HEADS, "window:64", num_kv_heads=2)),
    "multihead block sparse": lambda: First(BlockSparseRingMultiheadDilatedAttention(256, HEADS, *BRANCHES)),
    "learned, blocks": adaptive,
    "learned, tokens": lambda: adaptive(is_causal=True),
    "learned, blocks, one list for all heads": lambda: adaptive(select="all", heads=KEY_HEADS),
    "learned, tokens, a list for a key head": lambda: adaptive(
        unit=1, is_causal=True, heads=KEY_HEADS, select="group", match_rank=16
    ),
    "learned, multihead by blocks": lambda: adaptive_multihead(False),
    "learned, multihead by tokens, grouped heads": lambda: adaptive_multihead(True, num_kv_heads=2),
    "indices by blocks, grouped heads": lambda: Around(Indexed(False), KEY_HEADS),
    "indices by tokens, grouped heads": lambda: Around(Indexed(True), KEY_HEADS, is_causal=True),
    "language model": lm,
    "slide encoder": Slides,
}
OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 1e-1, momentum=0.9),
}
PRECISIONS = {"float32": (torch.float32, False), "autocast": (torch.float32, True), "bfloat16": (torch.bfloat16, False)}


def batch_of(module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(module, LongNetLM):
        return torch.randint(64, (2, N), generator=generator).to(DEVICE)
    width = 256 if isinstance(module, First) else WIDTH
    return torch.randn(2, N, width, generator=generator).to(DEVICE, dtype)


def train(module: nn.Module, optimizer: str, autocast: bool, steps: int) -> list[float]:
    """Losses of some steps on one batch; every parameter must stay finite and change."""
    dtype = next(module.parameters()).dtype
    x, chosen = batch_of(module, dtype), OPTIMIZERS[optimizer](module.parameters())
    before, losses = {name: p.detach().clone() for name, p in module.named_parameters()}, []
    for _ in range(steps):
        chosen.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16) if autocast else nullcontext():
            loss = module.loss(x) if isinstance(module, LongNetLM) else (module(x).float() - 1).square().mean()
        loss.backward()
        chosen.step()
        losses.append(loss.item())
    assert all(p.isfinite().all() for p in module.parameters())
    still = [name for name, p in module.named_parameters() if torch.equal(p, before[name])]
    # Biases that move all scores of a row alike. Small steps of SGD are lost in bfloat16.
    still = [name for name in still if not name.endswith(("k_proj.bias", "importance.bias_1"))]
    assert not still or (optimizer == "SGD" and dtype is torch.bfloat16 and len(still) < len(before)), still
    return losses


def test_doctor_runs():
    command = [sys.executable, "-m", "dilated_attention_pytorch", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    backends = {one["name"]: one["ready"] for one in json.loads(done.stdout)["backends"]}
    assert backends["triton"]


def test_quick_benchmark_runs(tmp_path):
    out = tmp_path / "quick.jsonl"
    command = [sys.executable, "-m", "dilated_attention_pytorch.tools.bench", "--suite", "quick", "--device", DEVICE]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(out.read_text().splitlines()) > 3


def test_quality_suite_trains_every_pattern(tmp_path, monkeypatch):
    short = replace(quality.SUITES["gpu"], recall_steps=3, seeds=(0,))
    monkeypatch.setitem(quality.SUITES, "gpu", short)
    # 1: dense attention does not learn the task in three steps.
    assert command.main(["--suite", "gpu", "--out", str(tmp_path), "--tasks", "recall"]) == 1
    rows = [json.loads(line) for line in (tmp_path / "quality.jsonl").read_text().splitlines()]
    assert {row["pattern"] for row in rows} >= {"dense", "local", "adaptive"}
    assert all(0 <= row["quality"] <= 1 for row in rows)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_five_steps_of_every_optimizer(kind, precision):
    dtype, autocast = PRECISIONS[precision]
    for optimizer in OPTIMIZERS:
        torch.manual_seed(0)
        losses = train(KINDS[kind]().to(DEVICE, dtype), optimizer, autocast, 5)
        assert torch.tensor(losses).isfinite().all(), (optimizer, losses)
        assert losses[-1] < losses[0] or len(set(losses)) > 1, (optimizer, losses)


@pytest.mark.parametrize("is_causal", [True, False], ids=["tokens", "blocks"])
@pytest.mark.parametrize(("size", "unit"), [(size, 2**power) for size in SIZES for power in range(size.bit_length())])
def test_two_steps_of_every_score_unit(size, unit, is_causal):
    torch.manual_seed(0)
    losses = train(adaptive(size, unit, is_causal).to(DEVICE), "Adam", True, 2)
    assert torch.tensor(losses).isfinite().all()


@pytest.mark.parametrize("text", ["window:100 & causal", "dilated:128x1,512x4", "random:0.4;block=128"])
# Deprecations inside torch.compile are torch's own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("cpu", "native")])
def test_every_backend_gives_the_oracles_numbers(name, text):
    torch.manual_seed(0)
    shapes = (1, HEADS, N, WIDTH), (1, HEADS, N, WIDTH), (1, HEADS, N, WIDTH), (1, HEADS, N, WIDTH)
    *inputs, grad = (torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes)
    pattern, leaves = parse(text), [x.requires_grad_() for x in inputs]
    call = call_of(*leaves, CallSettings(pattern=text, scale=WIDTH**-0.5, backend=name))
    reason = backend_named(name).why_not(call)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    wanted = answer(*inputs, pattern, grad_output=grad)
    output, lse = attention_with_lse(*leaves, pattern, backend=name)
    found = output, lse, *torch.autograd.grad(output, leaves, grad)
    for what, got, want in zip(("output", "lse", "query", "key", "value"), found, wanted, strict=True):
        assert error(got, want) < 1.5e-2, what


@pytest.mark.parametrize("text", ["window:100 & causal", "dilated:128x1,512x4", "global:20;queries=1 | window:100"])
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_sinks_give_the_oracles_numbers(name, text):
    torch.manual_seed(0)
    *inputs, grad = (torch.randn(1, HEADS, N, WIDTH, device=DEVICE).bfloat16() for _ in range(4))
    sink, grad_lse = torch.randn(HEADS, device=DEVICE), torch.randn(1, HEADS, N, device=DEVICE)
    pattern, leaves = parse(text), [x.requires_grad_() for x in (*inputs, sink)]
    call = call_of(*leaves[:3], CallSettings(pattern=text, scale=WIDTH**-0.5, backend=name))
    reason = backend_named(name).why_not(call)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    options = {"grad_output": grad, "sink": sink.cpu()}
    wanted = answer(*inputs, pattern, grad_lse=grad_lse, **options)
    wanted = *wanted, sink_gradient(*inputs, pattern, **options)
    # The second call is prepared.
    for _ in range(2):
        output, lse = attention_with_lse(*leaves[:3], pattern, sink=sink, backend=name)
        found = output, lse, *torch.autograd.grad((output, lse), leaves, (grad, grad_lse))
        for what, got, want in zip(("output", "lse", "query", "key", "value", "sink"), found, wanted, strict=True):
            assert error(got, want) < 1.5e-2, what
