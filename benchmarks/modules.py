"""Modules against the bare operation and against torch's own.

    PYTHONPATH=src python benchmarks/modules.py --device cpu

Each pair runs forward and backward in one process, turn about; what is reported is the median over the rounds of the
ratio of their times. A module is timed after chosen rows of its attention and of every gradient agree with float64.
Standard library and torch only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.tools.bench.gate import Computed, error_ratio, sample
from dilated_attention_pytorch.tools.bench.measure import clock, facts

HEADS, HEAD_DIM = 8, 64
WIDTH = HEADS * HEAD_DIM
LADDER = [2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12]
Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two ways to compute something alike, and what their times must be to each other."""

    name: str
    ours: Run
    theirs: Run
    error: float
    tolerance: float
    density: float
    at_least: float | None = None
    """How many times as long theirs must take."""
    at_most: float | None = None
    """How many times as long ours may take."""

    def measure(self, device: str, rounds: int) -> dict[str, object]:
        """One line of results; nothing is timed that fails its gate."""
        line: dict[str, object] = {"case": self.name, "density": self.density, "gate": self.error}
        if not self.error <= self.tolerance:
            return {**line, "passed": False}
        calls = {run: max(1, min(100, round(0.05 / clock(run, device)))) for run in (self.ours, self.theirs)}
        times = [[clock(run, device, calls[run]) for run in (self.ours, self.theirs)] for _ in range(rounds)]
        speedup = statistics.median(theirs / ours for ours, theirs in times)
        passed = speedup >= self.at_least if self.at_least is not None else 1 / speedup <= (self.at_most or 0)
        return {
            **line,
            "ours_s": statistics.median(ours for ours, _ in times),
            "theirs_s": statistics.median(theirs for _, theirs in times),
            "speedup": speedup,
            "bar": {"at_least": self.at_least, "at_most": self.at_most},
            "passed": passed,
            "rounds": rounds,
            **facts(device),
        }


def both_ways(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad_output: Tensor) -> Run:
    """Forward and backward as one call."""
    return lambda: torch.autograd.grad(forward(), leaves, grad_output)


def gate(query: Tensor, key: Tensor, value: Tensor, pattern: dap.Pattern) -> float:
    """Largest error of attention at chosen rows and columns, gradients too, over its rounding bound."""
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    output, lse = dap.attention_with_lse(*leaves, pattern)
    grad_output = torch.randn_like(output)
    grads = torch.autograd.grad(output, leaves, grad_output)
    computed = Computed(*(t.detach() for t in (*leaves, output, lse, grad_output, *grads)))
    return error_ratio(computed, pattern, sample(query.shape[2], 32), [0, HEADS - 1])


def core_overhead(name: str, module: dap.SparseAttention, n: int, device: str, dtype: torch.dtype) -> Pair:
    """A core module against `attention` on the same views."""
    leaves = tuple(torch.randn(1, n, HEADS, HEAD_DIM, device=device, dtype=dtype, requires_grad=True) for _ in "qkv")
    turned = [tensor.transpose(1, 2) for tensor in leaves]
    grad_output = torch.randn_like(leaves[0])
    return Pair(
        name=f"overhead of {name}, {n} tokens",
        ours=both_ways(lambda: module(*leaves), leaves, grad_output),
        theirs=both_ways(
            lambda: dap.attention(*(t.transpose(1, 2) for t in leaves), module.pattern).transpose(1, 2),
            leaves,
            grad_output,
        ),
        error=gate(*turned, module.pattern),
        tolerance=1.0,
        density=module.plan(n, HEADS).density,
        at_most=1.05,
    )


def joined_projections(n: int, device: str, dtype: torch.dtype) -> Pair:
    """Queries, keys and values of one tensor in one product against three."""
    module = dap.MultiheadSparseAttention(WIDTH, HEADS, "full", device=device, dtype=dtype)
    x = torch.randn(1, n, WIDTH, device=device, dtype=dtype, requires_grad=True)
    leaves = (x, *(p for name, p in module.named_parameters() if "out" not in name))
    grads = tuple(torch.randn(1, n, HEADS, HEAD_DIM, device=device, dtype=dtype).transpose(1, 2) for _ in "qkv")
    both = [torch.stack(module.project(x, key, x)).detach() for key in (x, x.view_as(x))]
    return Pair(
        name=f"one projection vs three, {n} tokens",
        ours=lambda: torch.autograd.grad(module.project(x, x, x), leaves, grads),
        theirs=lambda: torch.autograd.grad(module.project(x, x.view_as(x), x), leaves, grads),
        error=float((both[0] - both[1]).abs().max()),
        # Two products of the same terms, rounded once each.
        tolerance=8 * torch.finfo(dtype).eps * float(both[0].abs().max()),
        density=1.0,
        at_most=1.05,
    )


def against_torch(
    name: str, module: dap.MultiheadSparseAttention, n: int, device: str, dtype: torch.dtype, at_least: float
) -> Pair:
    """A multihead module against `nn.MultiheadAttention(need_weights=False)`, gradients of every parameter."""
    module = module.to(device, dtype)
    mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device=device, dtype=dtype)
    x = torch.randn(1, n, WIDTH, device=device, dtype=dtype, requires_grad=True)
    grad_output = torch.randn_like(x)
    error = gate(*module.project(x, x, x), module.pattern)
    whole = module.finish(dap.attention(*module.project(x, x, x), module.pattern))
    error = max(error, float((module(x, x, x)[0] - whole).detach().abs().max()))
    return Pair(
        name=f"{name} vs nn.MultiheadAttention, {n} tokens",
        ours=both_ways(lambda: module(x, x, x)[0], (x, *module.parameters()), grad_output),
        theirs=both_ways(lambda: mha(x, x, x, need_weights=False)[0], (x, *mha.parameters()), grad_output),
        error=error,
        tolerance=1.0,
        density=module.plan(n).density,
        at_least=at_least,
    )


def pairs(device: str, n: int, dtype: torch.dtype) -> Iterator[Pair]:
    """What is promised of modules on a kind of device."""
    share, least = (0.05, 5.0) if device == "cpu" else (0.01, 20.0)
    block = {"sparsity_ratio": share}
    yield core_overhead("DilatedAttention", dap.DilatedAttention(*LADDER), n, device, dtype)
    yield core_overhead(
        "BlockSparseRingDilatedAttention", dap.BlockSparseRingDilatedAttention([2048], [1], **block), n, device, dtype
    )
    yield joined_projections(n, device, dtype)
    sparse = dap.BlockSparseRingMultiheadDilatedAttention(WIDTH, HEADS, [2048], [1], **block)
    yield against_torch(f"BlockSparseRingMultihead at {100 * share:g} %", sparse, n, device, dtype, least)
    if device == "cuda":
        ladder = dap.MultiheadDilatedAttention(WIDTH, HEADS, *LADDER)
        yield against_torch("MultiheadDilatedAttention, LongNet ladder", ladder, n, device, dtype, 8.0)


def main() -> None:
    """Measure and write one line a pair, as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="16384 on a CPU and 65536 on a GPU by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="benchmarks/results/modules_DEVICE.jsonl by default")
    arguments = parser.parse_args()
    device = arguments.device
    n = arguments.tokens or (16384 if device == "cpu" else 65536)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    out = arguments.out or Path(f"benchmarks/results/modules_{device}.jsonl")
    torch.manual_seed(0)
    out.write_text("")
    for pair in pairs(device, n, dtype):
        line = pair.measure(device, arguments.rounds)
        print(pair.name, f"{line['speedup']:.2f}x" if "speedup" in line else "GATE", line["passed"], flush=True)
        with out.open("a") as file:
            file.write(json.dumps({**line, "dtype": str(dtype).removeprefix("torch."), "n": n}) + "\n")


if __name__ == "__main__":
    main()
