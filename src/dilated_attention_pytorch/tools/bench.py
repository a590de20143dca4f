"""Measures attention on this machine: `python -m dilated_attention_pytorch.tools.bench --suite cpu --out FILE`.

Every case passes a correctness gate before it is timed. Ours and torch's dense attention run in the same process, turn
about, and what is compared is the rate on the flops each really computes. One line of JSON a case and direction goes to
the file as soon as it is known, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import attention_with_lse, parse
from ..kernels.registry import choose
from ..ops.attention import call_of
from .gate import TOLERANCE, Computed, largest_error, sample
from .measure import PeakMemory, clock, facts, synchronize

BLOCK = 128
LADDER = "dilated:2048x1,4096x2,8192x4,16384x6,32768x12"
DIRECTIONS = ("forward", "backward")
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""Flops relative to the forward: five matrix products of the backward against two of the forward."""
BARS = {"forward": 0.8, "backward": 0.7, "both": 0.8}
"""Least accepted rate relative to torch's dense attention; `both` is for the LongNet ladder."""
MEMORY_BAR_GIB = 16.0
Three = tuple[Tensor, Tensor, Tensor]
"""query, key, value"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One sparse problem, batch 1."""

    name: str
    pattern: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases of one shape, timed turn about with the dense peers."""

    n: int
    d: int
    cases: tuple[Case, ...]
    heads: int = 8
    key_heads: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    peers: tuple[str, ...] = ("sdpa",)
    peer_heads: int = 8
    """Heads of the dense peers: their rate does not depend on it, and dense attention on all heads takes long."""
    budget_s: float = 60.0
    rounds: tuple[int, int] = (3, 12)
    """Least and most rounds; in between, as many as the budget has time for."""
    judged: bool = False
    """Whether the bars speak of this group."""

    @property
    def label(self) -> str:
        return f"n={self.n} d={self.d} heads={self.heads}:{self.key_heads} {self.dtype}"


@dataclass(kw_only=True)
class Subject:
    """Something timed: the library on one case, or a dense peer."""

    case: str
    backend: str
    pattern: str
    flops: float
    """of the forward"""
    density: float
    run: dict[str, Callable[[], Any]]
    first_call_s: float
    peak: dict[str, PeakMemory]
    gate: float | None = None
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in DIRECTIONS})

    def rates(self, direction: str) -> list[float]:
        """Flop/s of each round."""
        if direction == "both":
            times = [sum(pair) for pair in zip(*self.seconds.values(), strict=True)]
        else:
            times = self.seconds[direction]
        return [self.flops * WORK[direction] / seconds for seconds in times]


@dataclass(frozen=True)
class Bar:
    """One promise and what was measured."""

    what: str
    measured: float
    wanted: float
    unit: str = "x"

    @property
    def passed(self) -> bool:
        return self.measured >= self.wanted if self.unit == "x" else self.measured <= self.wanted

    def __str__(self) -> str:
        word, sign = "pass" if self.passed else "FAIL", ">=" if self.unit == "x" else "<="
        return f"{word}  {self.measured:6.2f}{self.unit} {sign} {self.wanted:.2f}{self.unit}  {self.what}"


def window_of(density: float, n: int) -> str:
    """A sliding window of whole blocks that keeps about this share of them."""
    return f"window:{max(1, round((density * n / BLOCK - 1) / 2)) * BLOCK}"


def sparse_cases(n: int, densities: tuple[float, ...]) -> tuple[Case, ...]:
    """Random block lists and a local window at each density."""
    return tuple(
        Case(name=f"{kind}-{density:.0%}", pattern=text)
        for density in densities
        for kind, text in (("random", f"random:{density};block={BLOCK}"), ("local", window_of(density, n)))
    )


def suite(name: str) -> list[Group]:
    """The groups of a suite on the CPU. Those of `cpu` are the ones the bars speak of."""
    ladder = Case(name="longnet-ladder", pattern=LADDER)
    if name == "quick":
        return [Group(n=4096, d=64, cases=(*sparse_cases(4096, (0.1,)), ladder), budget_s=5.0)]
    if name == "cpu":
        shapes = [(n, d, heads) for n, heads in ((8192, 8), (16384, 4), (32768, 2)) for d in (64, 128)]
        kept = (0.25, 0.1, 0.05)
        groups = [Group(n=n, d=d, cases=sparse_cases(n, kept), peer_heads=heads) for n, d, heads in shapes]
        groups += [Group(n=32768, d=d, cases=(ladder,), peer_heads=2) for d in (64, 128)]
        return [replace(group, judged=True) for group in groups]
    case = Case(name="million-64-blocks-a-row", pattern=f"random:{64 * BLOCK / 2**20};block={BLOCK}")
    # Four heads: q, k, v, output and their gradients alone take 8 GiB, and dense attention is out of reach.
    return [Group(n=2**20, d=64, heads=4, key_heads=4, cases=(case,), peers=(), rounds=(1, 1), judged=True)]


def prepare(
    group: Group,
    forward: Callable[[], tuple[Tensor, Tensor | None]],
    inputs: Three,
    grad_output: Tensor,
) -> tuple[dict[str, Any], Computed | None]:
    """First calls of both directions: what a `Subject` needs from them, and what the gate looks at."""
    begun = time.perf_counter()
    with PeakMemory(group.device) as forward_peak:
        output, lse = forward()
        synchronize(group.device)
    first = time.perf_counter() - begun

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, inputs, grad_output, retain_graph=True)

    with PeakMemory(group.device) as backward_peak:
        gradients = backward()
    found = {
        "run": {"forward": forward, "backward": backward},
        "first_call_s": first,
        "peak": {"forward": forward_peak, "backward": backward_peak},
    }
    if lse is None:
        return found, None
    return found, Computed(*(x.detach() for x in (*inputs, output, lse, grad_output)), *gradients)


def peer(name: str, group: Group, inputs: Three, grad_output: Tensor) -> Subject:
    """Torch's dense attention as a yardstick."""
    group_heads = slice(0, group.peer_heads)
    query, key, value = (x[:, group_heads].detach().clone().requires_grad_() for x in inputs)

    def forward() -> tuple[Tensor, None]:
        return scaled_dot_product_attention(query, key, value), None

    found, _ = prepare(group, forward, (query, key, value), grad_output[:, group_heads].clone())
    flops = 4.0 * group.n**2 * group.d * group.peer_heads
    return Subject(case="dense", backend=name, pattern="full", flops=flops, density=1.0, **found)


def ours(case: Case, backend: str, group: Group, inputs: Three, grad_output: Tensor) -> Subject:
    """The library on one case, with the error its gate found."""
    pattern = parse(case.pattern)
    gqa = group.key_heads != group.heads

    def forward() -> tuple[Tensor, Tensor]:
        return attention_with_lse(*inputs, pattern, enable_gqa=gqa, backend=backend)

    found, computed = prepare(group, forward, inputs, grad_output)
    assert computed is not None
    rows = sample(group.n, 64 if group.n <= 2**18 else 8)
    error = largest_error(computed, pattern, rows, sorted({0, group.heads - 1}))
    call, _ = call_of(*inputs, None, None, None, case.pattern, False, group.d**-0.5, 0.0, backend)
    return Subject(
        case=case.name,
        backend=choose(call, backend)[0],
        pattern=case.pattern,
        flops=float(call.plan.flops(group.d)),
        density=call.plan.density,
        gate=error,
        **found,
    )


def draw(group: Group) -> tuple[Three, Tensor]:
    """Fresh random inputs that require gradients, and the gradient of the output."""
    generator = torch.Generator(group.device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": getattr(torch, group.dtype), "device": group.device}
    shapes = [(1, heads, group.n, group.d) for heads in (group.heads, group.key_heads, group.key_heads, group.heads)]
    query, key, value, grad_output = (torch.randn(shape, **options) for shape in shapes)
    return (query.requires_grad_(), key.requires_grad_(), value.requires_grad_()), grad_output


def take_turns(group: Group, subjects: list[Subject], say: Callable[[str], None]) -> None:
    """Time every subject once a round, so that a slow minute of the machine hurts all alike."""
    calls = {}
    for subject in subjects:
        for direction in DIRECTIONS:
            # A GPU call shorter than the clock's jitter is timed as a stream of at least 20 ms.
            once = clock(subject.run[direction], group.device) if group.device == "cuda" else 1.0
            calls[subject.case, subject.backend, direction] = max(1, min(200, round(0.02 / once)))
    least, most = group.rounds
    begun = time.perf_counter()
    for number in range(most):
        spent = time.perf_counter() - begun
        if number >= least and spent * (number + 1) / number > group.budget_s:
            break
        say(f"{group.label}: round {number + 1}, {spent:.0f} s")
        for direction in DIRECTIONS:
            for subject in subjects:
                count = calls[subject.case, subject.backend, direction]
                subject.seconds[direction].append(clock(subject.run[direction], group.device, count))


def ratio(subject: Subject, dense: Subject, direction: str) -> float:
    """Median over the rounds of our rate against the dense rate of the same round."""
    pairs = zip(subject.rates(direction), dense.rates(direction), strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def row(group: Group, subject: Subject, direction: str, peers: list[Subject]) -> dict[str, Any]:
    """One line of the results."""
    times = sorted(1e3 * seconds for seconds in subject.seconds[direction])
    p20, p50, p80 = (times[round(share * (len(times) - 1))] if times else None for share in (0.2, 0.5, 0.8))
    rivals = peers if times and subject not in peers else []
    shape = {"n": group.n, "d": group.d, "heads": group.heads, "key_heads": group.key_heads, "dtype": group.dtype}
    return {
        "case": subject.case,
        "backend": subject.backend,
        "direction": direction,
        "pattern": subject.pattern,
        **shape,
        "heads": group.peer_heads if subject in peers else group.heads,
        "p20_ms": p20,
        "p50_ms": p50,
        "p80_ms": p80,
        "rounds": len(times),
        "flops": subject.flops * WORK[direction],
        "gflop_s": statistics.median(subject.rates(direction)) / 1e9 if times else None,
        "density": subject.density,
        "relative_rate": {p.backend: ratio(subject, p, direction) for p in rivals},
        "peak_bytes": subject.peak[direction].extra,
        "peak_total_bytes": subject.peak[direction].total,
        "first_call_s": subject.first_call_s if direction == "forward" else None,
        "gate": subject.gate,
        "gate_passed": passed_gate(group, subject),
        **facts(group.device),
    }


def passed_gate(group: Group, subject: Subject) -> bool:
    """Whether the result may be timed at all."""
    return subject.gate is None or subject.gate <= TOLERANCE[getattr(torch, group.dtype)]


def measure_group(group: Group, backend: str, say: Callable[[str], None]) -> Iterator[tuple[dict[str, Any], list[Bar]]]:
    """Rows of a group, each with the bars it decides."""
    inputs, grad_output = draw(group)
    peers = []
    for name in group.peers:
        say(f"{group.label}: dense {name}")
        peers.append(peer(name, group, inputs, grad_output))
    subjects = []
    for case in group.cases:
        say(f"{group.label}: gate of {case.name}")
        subjects.append(ours(case, backend, group, inputs, grad_output))
    take_turns(group, peers + [s for s in subjects if passed_gate(group, s)], say)
    for subject in peers + subjects:
        for direction in DIRECTIONS:
            yield row(group, subject, direction, peers), list(bars(group, subject, direction, peers))


def bars(group: Group, subject: Subject, direction: str, peers: list[Subject]) -> Iterator[Bar]:
    """What one subject and direction has to show for the promises made for the CPU."""
    if not group.judged or subject in peers or not subject.seconds[direction]:
        return
    what = f"{subject.case} n={group.n} d={group.d}"
    for dense in peers:
        if subject.case != "longnet-ladder":
            yield Bar(f"{what} {direction}", ratio(subject, dense, direction), BARS[direction])
        elif direction == "backward":
            yield Bar(f"{what} forward + backward", ratio(subject, dense, "both"), BARS["both"])
    total = subject.peak[direction].total
    if not peers and total is not None:
        yield Bar(f"{what} {direction}, memory of the process", total / 2**30, MEMORY_BAR_GIB, " GiB")


def append(out: Path, line: dict[str, Any]) -> None:
    """Add one line in one write, so that readers and an interruption see whole lines only."""
    handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, (json.dumps(line) + "\n").encode())
    finally:
        os.close(handle)


def progress(text: str) -> None:
    """What is going on, on stderr: one changing line for a person, plain lines for a log."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def describe(line: dict[str, Any]) -> str:
    """One result for a person."""
    where = f"{line['case']:<24} {line['backend']:<11} {line['direction']:<8} n={line['n']:<8} d={line['d']:<4}"
    if not line["gate_passed"]:
        return f"{where} WRONG by {line['gate']:.1e}: not timed"
    relative = "".join(f"  {value:.2f}x {name}" for name, value in line["relative_rate"].items())
    return f"{where} {line['p50_ms']:10.2f} ms {line['gflop_s']:9.1f} GFLOP/s{relative}"


def run(name: str, out: Path, backend: str) -> int:
    """Measure a suite into `out`; the exit status is 1 when a gate was red."""
    shown: list[Bar] = []
    red = 0
    for group in suite(name):
        for line, decided in measure_group(group, backend, progress):
            append(out, line)
            progress("")
            print(describe(line), flush=True)
            shown += decided
            red += not line["gate_passed"]
    if shown:
        print(f"\nBars, {sum(bar.passed for bar in shown)} of {len(shown)} pass (rate on the kept flops / dense rate):")
        for bar in shown:
            print(f"  {bar}")
    if red:
        print(f"\n{red} results were wrong and not timed.")
    return 1 if red else 0


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="bench", description="Measure attention on this machine.")
    parser.add_argument("--suite", choices=("quick", "cpu", "million", "gpu"), default="quick")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quick.jsonl"))
    parser.add_argument("--backend", default="auto", help="auto, or the name of a backend")
    parser.add_argument("--append", action="store_true", help="keep the lines that are in the file")
    gpu_only = parser.add_argument_group("the gpu suite")
    gpu_only.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no case is begun")
    gpu_only.add_argument("--resume", action="store_true", help="keep the lines in the file and measure what it lacks")
    gpu_only.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    gpu_only.add_argument("--tiny", action="store_true", help="small cases, to see on any machine that the suite works")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not options.append and not options.resume:
        options.out.unlink(missing_ok=True)
    try:
        if options.suite == "gpu":
            from . import gpu

            status = gpu.run(options.out, options.backend, options.device, options.budget, options.resume, options.tiny)
        else:
            status = run(options.suite, options.out, options.backend)
        if options.suite == "cpu":
            # In a process of its own, so that the memory it reports is its own.
            child = [sys.executable, "-m", f"{__package__}.bench", "--suite", "million", "--append"]
            child += ["--out", str(options.out), "--backend", options.backend]
            status |= subprocess.run(child, check=False).returncode
    except KeyboardInterrupt:
        print(f"\nStopped; what was measured is in {options.out}.", file=sys.stderr)
        return 130
    print(f"Results are in {options.out}.")
    return status


if __name__ == "__main__":
    sys.exit(main())
