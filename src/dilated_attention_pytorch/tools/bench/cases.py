"""Problems of each benchmark suite, on a CPU and on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

BLOCK = 128
LADDER = "dilated:2048x1,4096x2,8192x4,16384x6,32768x12"
K = 1024


@dataclass(frozen=True, kw_only=True)
class Case:
    """One sparse problem of batch size 1: a pattern, or a module class with one."""

    name: str
    pattern: str = ""
    module: str | None = None
    """Name of a module class; its pattern depends on the length."""
    ranks: int = 1
    """Above 1, all ranks of a contiguous layout run one after another in this process."""
    processes: bool = False
    """Whether each rank is a process of its own instead."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases of one shape, timed in turns with the dense peers."""

    n: int
    d: int
    cases: tuple[Case, ...]
    suite: str = ""
    heads: int = 8
    key_heads: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    peers: tuple[str, ...] = ("sdpa",)
    peer_heads: int = 8
    """Heads of the dense peers. Their rate does not depend on the number of heads; fewer heads save time."""
    budget_s: float = 60.0
    rounds: tuple[int, int] = (3, 12)
    """Minimum and maximum number of rounds; the time budget decides in between."""
    judged: bool = False
    """Whether targets apply to this group."""
    deadline: float = math.inf
    """Time of `time.monotonic` after which no further case or round is begun."""

    @property
    def shape(self) -> dict[str, Any]:
        """Shape of all cases, as fields of a line."""
        return {name: getattr(self, name) for name in ("n", "d", "heads", "key_heads", "dtype")}

    @property
    def label(self) -> str:
        return f"n={self.n} d={self.d} heads={self.heads}:{self.key_heads} {self.dtype}"


CLASSES: dict[str, dict[str, Any]] = {
    "SparseAttention": {"pattern": "window:256"},
    "DilatedAttention": {},
    "RingDilatedAttention": {},
    "BlockSparseRingDilatedAttention": {"sparsity_ratio": 0.1},
    "BlockSparseHierarchical": {},
    "BlockSparseAdaptive": {},
    "MultiheadSparseAttention": {"pattern": "window:256"},
    "MultiheadDilatedAttention": {},
    "RingMultiheadDilatedAttention": {},
    "BlockSparseRingMultiheadDilatedAttention": {"sparsity_ratio": 0.1},
    "BlockSparseRingDistributedDilatedAttention": {},
    "MultiheadBlockSparseAdaptive": {},
}
"""Attention classes, with their arguments besides segment lengths, dilation rates and width."""
MODELS = ("LongNetLM", "SlideEncoder")
MODEL_LAYERS = 4
CONFIGURATIONS = ("2048x1", "2048x1,4096x2", "4096x1", "8192x1", "2048x1,4096x2,8192x4")
"""Segments and rates of the dilation suite, from the original report."""
ON_THIS_MACHINE = ("standard", "long", "extreme", "dilation", "density", "variants", "distributed")
"""Suites that run on any device."""
ABOUT = {
    "quick": "4K tokens, three patterns, seconds",
    "standard": "1K and 2K tokens, patterns and every class",
    "long": "8K to 64K, random and local blocks at 10 % and 1 %, the LongNet ladder, dense attention",
    "extreme": "128K to 512K, then the longest length, by bisection below a memory limit",
    "dilation": "segment lengths and rates at 16K",
    "density": "50 % to 1 % of the blocks",
    "variants": "every class and two models at 4K and 8K",
    "distributed": "2, 4 and 8 ranks in turn, 2 and 4 as processes, and what they exchange",
    "cpu": "the targets for the CPU, a quarter of an hour",
    "million": "a million tokens on the CPU",
    "gpu": "comparison with FlashAttention-4, FlexAttention and cuDNN on a GPU",
    "all": "all but quick, cpu and million; gpu only if there is a GPU",
}
"""Names of all suites, with a description."""


def window_of(density: float, n: int) -> str:
    """Sliding window of whole blocks with about this density."""
    return f"window:{max(1, round((density * n / BLOCK - 1) / 2)) * BLOCK}"


def sparse_cases(n: int, densities: tuple[float, ...]) -> tuple[Case, ...]:
    """Random block lists and a local window at each density."""
    return tuple(
        Case(name=f"{kind}-{density:.0%}", pattern=text)
        for density in densities
        for kind, text in (("random", f"random:{density};block={BLOCK}"), ("local", window_of(density, n)))
    )


def suite(name: str, device: str = "cpu") -> list[Group]:
    """Groups of a suite. Targets for the CPU apply to the suites `cpu` and `million`."""
    gpu = device == "cuda"
    ladder = Case(name="longnet-ladder", pattern=LADDER)
    classes = tuple(Case(name=title, module=title) for title in CLASSES)
    groups: list[Group]
    match name:
        case "quick":
            groups = [Group(n=4096, d=64, cases=(*sparse_cases(4096, (0.1,)), ladder), budget_s=5.0)]
        case "cpu":
            shapes = [(n, d, heads) for n, heads in ((8192, 8), (16384, 4), (32768, 2)) for d in (64, 128)]
            kept = (0.25, 0.1, 0.05)
            groups = [Group(n=n, d=d, cases=sparse_cases(n, kept), peer_heads=heads) for n, d, heads in shapes]
            groups += [Group(n=32768, d=d, cases=(ladder,), peer_heads=2) for d in (64, 128)]
            groups = [replace(group, judged=True) for group in groups]
        case "million":
            case = Case(name="million-64-blocks-a-row", pattern=f"random:{64 * BLOCK / 2**20};block={BLOCK}")
            # Four heads: q, k, v, output and their gradients alone take 8 GiB, and dense attention is out of reach.
            groups = [Group(n=2**20, d=64, heads=4, key_heads=4, cases=(case,), peers=(), rounds=(1, 1), judged=True)]
        case "standard":
            patterns = (Case(name="dilated", pattern="dilated:256x1,1024x4"), Case(name="window", pattern="window:128"))
            groups = [Group(n=n, d=64, cases=(*patterns, *classes), budget_s=8.0) for n in (K, 2 * K)]
        case "variants":
            models = tuple(Case(name=title, module=title) for title in MODELS)
            half: dict[str, Any] = {"heads": 4, "key_heads": 4, "peers": ()}
            groups = [Group(n=n, d=64, cases=classes, budget_s=15.0) for n in (4 * K, 8 * K)]
            groups += [Group(n=n, d=64, cases=models, budget_s=10.0, **half) for n in (4 * K, 8 * K)]
        case "long":
            # A round takes a minute and more from 32K on.
            lengths = ((8 * K, 8, 3), (16 * K, 4, 3), (32 * K, 2, 1), (64 * K, 1, 1))
            groups = [
                Group(
                    n=n,
                    d=64,
                    cases=(*sparse_cases(n, (0.1, 0.01)), ladder),
                    budget_s=30.0,
                    peer_heads=heads,
                    rounds=(least, 12),
                )
                for n, heads, least in lengths
            ]
        case "extreme":
            cases = (ladder, Case(name="window-2048", pattern="window:1024"))
            heads = 8 if gpu else 1
            shape: dict[str, Any] = {"d": 64, "heads": heads, "key_heads": heads, "peer_heads": 1, "budget_s": 10.0}
            groups = [Group(n=n * K, cases=cases, rounds=(1, 5), **shape) for n in (128, 256, 512)]
        case "dilation":
            kinds = ("dilated", "block_dilated")
            cases = tuple(Case(name=f"{kind} {c}", pattern=f"{kind}:{c}") for kind in kinds for c in CONFIGURATIONS)
            groups = [Group(n=16 * K, d=64, cases=cases, budget_s=60.0, peer_heads=8 if gpu else 2)]
        case "density":
            n = 64 * K if gpu else 8 * K
            kept = (0.5, 0.25, 0.1, 0.05, 0.02, 0.01)
            groups = [Group(n=n, d=64, cases=sparse_cases(n, kept), budget_s=60.0)]
        case "distributed":
            cases = tuple(
                Case(name=f"{case.name} on {ranks} ranks", pattern=case.pattern, ranks=ranks)
                for case in (ladder, Case(name="window-2048", pattern="window:1024 & causal"))
                for ranks in (2, 4, 8)
            )
            worlds = () if gpu else (2, 4)
            cases += tuple(
                Case(name=f"longnet-ladder on {ranks} processes", pattern=LADDER, ranks=ranks, processes=True)
                for ranks in worlds
            )
            groups = [Group(n=16 * K, d=64, cases=cases, budget_s=30.0, rounds=(1, 12), peers=())]
        case _:
            raise KeyError(name)
    placed: dict[str, Any] = {"device": device, "dtype": "bfloat16", "peer_heads": 8} if gpu else {}
    return [replace(group, suite=name, **placed) for group in groups]
