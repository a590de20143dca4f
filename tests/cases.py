"""Named problems: small enough for the dense oracle, odd enough to reach every branch of a planner and a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import Pattern, parse


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    grad_lse: Tensor


@dataclass(frozen=True, kw_only=True)
class Problem:
    name: str
    text: str
    """the pattern, as `parse` reads it"""
    n: int
    heads: int = 2
    key_heads: int = 2
    d: int = 16
    e: int = 16
    """width of a value"""
    batch: int = 1
    block_size: int = 16
    padded: tuple[int, ...] = ()
    """real tokens of each batch entry; the rest is padding"""

    @property
    def pattern(self) -> Pattern:
        return parse(self.text)

    def inputs(self, dtype: torch.dtype = torch.float64, seed: int = 0, device: str = "cpu") -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        shapes = (
            (self.batch, self.heads, self.n, self.d),
            (self.batch, self.key_heads, self.n, self.d),
            (self.batch, self.key_heads, self.n, self.e),
            (self.batch, self.heads, self.n, self.e),
            (self.batch, self.heads, self.n),
        )
        drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return Inputs(*(x.to(device=device, dtype=dtype) for x in drawn))

    def key_padding_mask(self, device: str = "cpu") -> Tensor | None:
        if not self.padded:
            return None
        return torch.arange(self.n, device=device) >= torch.tensor(self.padded, device=device)[:, None]


PROBLEMS = [
    Problem(name="one-token", text="causal", n=1),
    Problem(name="full", text="full", n=48),
    Problem(name="full-ragged", text="full", n=37),
    Problem(name="causal", text="causal", n=67),
    Problem(name="window", text="window:5", n=83),
    Problem(name="window-causal", text="window:20 & causal", n=95, batch=2),
    Problem(name="global-window", text="window:3 | global:5", n=90),
    Problem(name="strided", text="strided:7", n=70),
    Problem(name="dilated-one-branch", text="dilated:32x4", n=96, heads=4, key_heads=4),
    Problem(name="dilated-ladder", text="dilated:16x1,32x2,64x4", n=150, heads=4, key_heads=4),
    Problem(name="dilated-ladder-causal", text="dilated:16x1,32x2,64x4 & causal", n=141, heads=4, key_heads=4),
    Problem(name="dilated-odd-rates", text="dilated:24x1,50x3,90x7", n=131, heads=3, key_heads=3),
    Problem(name="dilated-empty-rows", text="dilated:32x8", n=64, heads=2),
    Problem(name="dilated-block-offset", text="dilated:16x1,64x4;offset=block", n=100, heads=6, key_heads=3),
    Problem(name="dilated-union", text="dilated:16x1,32x2;overlap=union", n=80),
    Problem(name="dilated-split-heads", text="dilated:16x1,32x2;heads=split", n=80, heads=3, key_heads=3),
    Problem(name="documents", text="documents:30,1,45,20 & causal", n=96),
    Problem(name="random", text="random:0.4;block=16", n=128),
    Problem(name="random-per-head-causal", text="random:0.5;block=16;seed=3;per_head=1 & causal", n=120),
    Problem(name="hierarchical", text="hierarchical:2x1,4x2,0x4;block=16", n=160),
    Problem(name="block-dilated", text="block_dilated:64x1,128x2;sparsity_ratio=0.3;block=16", n=192),
    Problem(name="grid-image", text="grid:9x11;window=3x5;prefix=1", n=100),
    Problem(name="grid-video", text="grid:4x5x6;window=2x3x3;dilation=1x1x2;causal=1x0x0", n=120),
    Problem(name="one-pattern-a-head", text="heads{window:4 / causal}", n=72),
    Problem(name="gqa", text="window:9 & causal", n=61, heads=6, key_heads=2),
    Problem(name="wide-value", text="causal", n=45, d=8, e=24),
    Problem(name="padded", text="window:12", n=64, batch=3, padded=(64, 29, 1)),
    Problem(name="all-padded", text="causal", n=33, batch=2, padded=(33, 0)),
]

BY_NAME = {problem.name: problem for problem in PROBLEMS}
