"""Problems of the GPU suite, most decisive first.

Windows and segments are made of whole blocks, so that every peer computes exactly the pairs the library computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import Dilated, Random
from .cases import LADDER
from .peers import BLOCK, CUDNN_BLOCKS, CUDNN_INTERVAL, BlockTable
from .results import FLEX, OURS_ANY_ORDER

LADDERS = {"longnet-ladder": LADDER, "longnet-ratio-4": "dilated:2048x1,8192x4,32768x16"}
BLOCK_KINDS = ("random", "local", "global_local", "dilated")
PLAN = "plan-64-blocks-a-row"
OURS = "ours"
K = 1024


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """One problem of batch size 1."""

    kind: str
    n: int
    d: int
    density: float | None = None
    causal: bool = False
    heads: int = 8
    key_heads: int = 8
    dtype: str = "bfloat16"
    block: int = BLOCK
    source: str = ""
    """Published benchmark that the shape is from."""

    @property
    def name(self) -> str:
        share = "" if self.density is None else f"-{self.density:.0%}"
        block = "" if self.block == BLOCK else f"-blocks-of-{self.block}"
        return f"{self.source or self.kind}{'-causal' if self.causal else ''}{share}{block}"

    @property
    def is_blocks(self) -> bool:
        return self.kind in BLOCK_KINDS

    @property
    def subjects(self) -> tuple[str, ...]:
        """Subjects: the library, and the peers that can compute the same pairs."""
        if self.kind == "dense":
            return ("sdpa-cudnn", "sdpa-flash", "fa4")
        if not self.is_blocks:
            return (OURS, OURS_ANY_ORDER)
        # FlexAttention compiles ten seconds for each shape: other head counts are compared at one length.
        subjects = [OURS, OURS_ANY_ORDER, "fa4"]
        if self.heads <= 8 or (self.key_heads, self.n) == (4, 64 * K):
            subjects.append(FLEX)
        if not self.causal:
            subjects.append(CUDNN_BLOCKS)
        if self.kind == "local":
            subjects.append(CUDNN_INTERVAL)
        return tuple(subjects)

    @property
    def has_whole_call(self) -> bool:
        """Whether host time may exceed GPU time, so that whole calls are timed too."""
        return self.is_blocks and self.n <= 16 * K and not self.causal and self.kept < 4

    @property
    def kept(self) -> float:
        """Target number of blocks per row."""
        assert self.density is not None
        return self.density * self.n / self.block

    @property
    def reach(self) -> int:
        """Blocks from a row's own to the end of its window, its own included."""
        spare = self.kept - 2 * self.globals if self.kind == "global_local" else self.kept
        return max(1, round((spare + 1) / 2))

    @property
    def globals(self) -> int:
        """Leading blocks that attend to all blocks and that all blocks attend to."""
        return max(1, round(self.kept / 4))

    @property
    def pattern(self) -> str:
        """The pattern as text."""
        match self.kind:
            case "dense":
                text = "full"
            case "random":
                text = f"random:{self.density};block={self.block}"
                # An early block may have no random block before it; it then attends to its own block alone.
                text = f"({text} | hierarchical:1x1;block={self.block})" if self.causal else text
            case "local":
                text = f"hierarchical:{self.reach}x1;block={self.block}"
            case "global_local":
                text = (
                    f"(global:{self.globals * self.block};queries=1 | hierarchical:{self.reach}x1;block={self.block})"
                )
            case "dilated":
                text = f"block_dilated:{self.near * self.block}x1,{self.n}x{self.rate};block={self.block}"
            case _:
                text = LADDERS[self.kind]
        return f"{text} & causal" if self.causal else text

    @property
    def near(self) -> int:
        """Blocks of a dense segment of the dilated block pattern: half of what is kept."""
        return max(1, round(self.kept / 2))

    @property
    def rate(self) -> int:
        """Distance of the blocks that make up the other half."""
        assert self.density is not None
        return round(2 / self.density)

    def blocks(self, device: str) -> BlockTable:
        """The pattern as a table of blocks, written from its definition and not from the library's plan."""
        side = self.n // self.block
        row = torch.arange(side, device=device)[:, None]
        column = row.T
        match self.kind:
            case "random":
                assert self.density is not None
                random = Random(self.density, block=self.block, length=self.n)
                strata = torch.arange(random.kept, device=device)[None, :]
                table = torch.zeros(side, side, dtype=torch.bool, device=device)
                table.scatter_(1, random.drawn(row, strata), True)
                table |= (row == column) & self.causal
            case "local":
                table = (row - column).abs() < self.reach
            case "global_local":
                table = ((row - column).abs() < self.reach) | (row < self.globals) | (column < self.globals)
            case _:
                table = (row // self.near == column // self.near) | ((row - column) % self.rate == 0)
        return BlockTable(table.tril() if self.causal else table, self.causal, self.block)

    def key(self, subject: str, direction: str) -> tuple[Any, ...]:
        """Identity of a line of the results."""
        return self.name, self.n, self.d, self.heads, self.key_heads, subject, direction


def cases() -> list[GpuCase]:
    """Cases of the grid, most decisive first, each once."""
    shapes = [(n, d) for n in (16 * K, 64 * K) for d in (128, 64)]
    listed = []

    def grid(kinds: tuple[str, ...], densities: tuple[float, ...], where: list[tuple[int, int]], **rest: Any) -> None:
        for n, d in where:
            listed.extend(GpuCase(kind=kind, n=n, d=d, density=p, **rest) for p in densities for kind in kinds)

    for n, d in shapes:
        listed.append(GpuCase(kind="dense", n=n, d=d))
        grid(("random", "local"), (0.1, 0.01), [(n, d)])
    listed.append(GpuCase(kind=PLAN, n=2**20, d=64, heads=16, key_heads=16))
    listed += [GpuCase(kind=kind, n=n, d=d) for n in (64 * K, 256 * K) for kind in LADDERS for d in (128, 64)]
    for n, d in shapes:
        listed.append(GpuCase(kind="dense", n=n, d=d, causal=True))
        grid(("random", "local"), (0.1, 0.01), [(n, d)], causal=True)
    listed += [GpuCase(kind=kind, n=64 * K, d=d, causal=True) for kind in LADDERS for d in (128, 64)]
    grid(("global_local", "dilated"), (0.1, 0.01), shapes)
    grid(("random", "local"), (0.05,), shapes)
    grid(("random", "local"), (0.1, 0.01), shapes, heads=16, key_heads=4)
    far = [(256 * K, 128), (256 * K, 64)]
    grid(("random", "local"), (0.1, 0.01), far)
    grid(("random", "local"), (0.1, 0.01), [(4 * K, 128), (4 * K, 64)])
    grid(("random", "local"), (0.1, 0.01), shapes, heads=16, key_heads=16)
    grid(("global_local", "dilated"), (0.1, 0.01), shapes, causal=True)
    grid(("global_local", "dilated"), (0.05,), shapes)
    grid(("random", "local"), (0.05,), [*shapes, *far], causal=True)
    grid(("random", "local"), (0.1, 0.01), [(64 * K, 128)], block=64)
    listed += published()
    # Each takes as long as ten of the others.
    grid(("random", "local"), (0.01, 0.05), [(1024 * K, 64), (1024 * K, 128)])
    return list(dict.fromkeys(listed))


def published() -> list[GpuCase]:
    """Shapes of other projects' benchmarks with random blocks; lengths are rounded up to whole blocks."""

    def shape(source: str, n: int, heads: int, density: float, block: int = 64, **rest: Any) -> GpuCase:
        drawn: dict[str, Any] = {"kind": "random", "d": 128, "density": density, "block": block, "key_heads": heads}
        return GpuCase(source=source, n=n, heads=heads, **drawn | rest)

    # Video models of cuDNN-frontend's block-sparse benchmark.
    videos = ("wan-480p", 32 * K, 12), ("wan-720p", 75_648, 40), ("minimax-h3", 31 * K, 56), ("minimax-h3", 91_136, 56)
    listed = [shape(name, n, heads, 0.1, block) for block in (64, BLOCK) for name, n, heads in videos]
    # 64 blocks of 64 a row.
    listed.append(shape("flashinfer", 109_632, 7, 64 * 64 / 109_632))
    listed += [shape("infllm-v2", n, 32, 64 * 64 / n, key_heads=2, causal=True) for n in (32 * K, 64 * K, 128 * K)]
    return [*listed, shape("vsa", 40_768, 16, 0.1)]


def tiny_cases() -> list[GpuCase]:
    """One small case of each kind, to test the suite on any machine."""
    small: dict[str, Any] = {"n": 1024, "d": 32, "heads": 2, "key_heads": 2, "dtype": "float32"}
    listed = [GpuCase(kind=kind, causal=causal, **small) for kind in ("dense", *LADDERS) for causal in (False, True)]
    listed += [GpuCase(kind=kind, density=0.4, causal=c, **small) for kind in BLOCK_KINDS for c in (False, True)]
    listed.append(GpuCase(kind="local", density=0.4, block=64, **small))
    return [*listed, GpuCase(kind=PLAN, **small | {"n": 16 * K})]


def ladder_pairs(pattern: Dilated, n: int, heads: int, causal: bool) -> int:
    """Pairs of a ladder over all heads: all pairs of the samples of a head in each segment."""
    total = 0
    for index, (segment, rate) in enumerate(pattern.branches):
        for head in range(heads):
            residue = pattern.sampled_residue(index, head)
            for length, times in ((min(segment, n), n // segment or 1), (n % segment if n > segment else 0, 1)):
                samples = max(0, -(-(length - residue) // rate))
                total += times * (samples * (samples + 1) // 2 if causal else samples**2)
    return total
