"""Time tile choices of the Triton kernels on this GPU, to fill in the tables in `kernels/triton/launches.py`.

    PYTHONPATH=src python benchmarks/tune_triton.py --out tune.jsonl

Each choice must first agree with dense float64 attention on a short sequence. Standard library, torch and triton only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.triton import launches
from dilated_attention_pytorch.kernels.triton.launches import Config, Tiles
from dilated_attention_pytorch.kernels.triton.lowering import schedule
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.tools.bench.measure import facts

PATTERNS = {
    "local 10 %": {16384: "window:768", 65536: "window:3200"},
    "local 1 %": {16384: "window:128", 65536: "window:256"},
    "random 10 %": {16384: "random:0.1;block=128", 65536: "random:0.1;block=128"},
    "random 1 %": {16384: "random:0.01;block=128", 65536: "random:0.01;block=128"},
}
CHOICES = {
    ("forward", 128): [
        "128,64,4,2",
        "128,64,4,3",
        "128,64,8,3",
        "128,64,8,4",
        "128,128,8,2",
        "128,128,8,3",
        "64,64,4,3",
    ],
    ("dq", 128): ["128,64,8,2", "128,64,8,3", "128,128,8,1", "64,64,4,2", "64,64,4,3", "64,128,4,2", "128,32,4,3"],
    ("dkv", 128): [
        "64,128,8,2",
        "64,128,8,3",
        "32,128,8,2",
        "32,128,8,3",
        "64,64,4,2",
        "64,64,4,3",
        "32,64,4,3",
        "128,64,8,2",
    ],
    ("forward", 64): [
        "128,64,4,2",
        "128,64,4,3",
        "128,64,4,4",
        "128,128,4,2",
        "128,128,8,2",
        "128,128,8,3",
        "128,64,8,3",
    ],
    ("dq", 64): ["128,64,4,2", "128,64,4,3", "128,64,8,3", "128,128,8,2", "128,128,8,3", "64,64,4,3", "64,128,4,2"],
    ("dkv", 64): [
        "64,128,8,2",
        "64,128,8,3",
        "64,128,4,2",
        "64,64,4,2",
        "64,64,4,3",
        "32,128,4,3",
        "128,64,8,2",
        "32,128,8,3",
    ],
    ("dq", 256): ["64,64,8,1", "64,64,8,2", "64,64,4,1", "64,32,4,2", "64,32,8,2", "128,32,8,1", "128,32,8,2"],
    ("dkv", 256): ["64,64,8,1", "64,64,8,2", "32,64,8,2", "32,64,4,2", "32,64,8,3", "32,128,8,1", "32,128,8,2"],
}
"""Query rows, key rows, warps, stages."""
PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4}
"""Matrix products of a tile, two of which are `plan.flops`."""
HEADS = 8
TOLERANCE = 2e-2


def tiles_of(text: str) -> Tiles:
    """Query rows, key rows, warps and stages, as written in `CHOICES`."""
    return Tiles(*map(int, text.split(",")))


@cache
def problem(pattern: str, n: int, d: int) -> tuple[AttentionCall, torch.Tensor]:
    """A call on random inputs, and a gradient for its output."""
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, HEADS, n, d, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    plan = make_plan(parse(pattern), n, HEADS, 128, "cuda")
    return AttentionCall(query, key, value, plan, d**-0.5), grad


def runner(kind: str, tiles: Tiles, call: AttentionCall, grad: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
    """One kernel on one problem, with the results it should be judged by."""
    d, block = call.query.shape[3], call.plan.block_size
    known = (d, call.query.dtype, call.query.device, block)
    default = launches.config(d, d, *known[1:3], block)
    if kind == "forward":

        def forward() -> tuple[torch.Tensor, ...]:
            launches._configs[known] = Config(tiles, default.dq, default.dkv)
            try:
                return tuple(launches.forward(call))
            finally:
                launches._configs[known] = default

        return forward
    output, lse = launches.forward(call)
    delta = (output.float() * grad.float()).sum(-1)
    tables = schedule(call.plan, 1)
    if kind == "dq":
        return lambda: (launches._query_gradient(call, tables, tiles, lse, delta, grad, launches._TableSum()),)
    return lambda: launches._key_gradients(call, tables, tiles, lse, delta, grad)


def gate(kind: str, tiles: Tiles, pattern: str, d: int) -> float:
    """Largest error against dense float64 attention over 2048 tokens, relative to the largest value."""
    call, grad = problem(pattern, 2048, d)
    got = runner(kind, tiles, call, grad)()
    inputs = [t.double().requires_grad_() for t in (call.query, call.key, call.value)]
    scores = call.scale * inputs[0] @ inputs[1].transpose(-1, -2) + call.plan.to_dense().double().log()
    output, lse = scores.softmax(-1).nan_to_num() @ inputs[2], scores.logsumexp(-1)
    gradients = torch.autograd.grad(output, inputs, grad.double())
    wanted = {"forward": (output, lse), "dq": gradients[:1], "dkv": gradients[1:]}[kind]
    return max(error(a, b) for a, b in zip(got, wanted, strict=True))


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference relative to the largest value; infinite where what is not finite disagrees."""
    got, wanted = got.detach().double(), wanted.detach()
    finite = wanted.isfinite()
    if not torch.equal(got[~finite], wanted[~finite]) or not bool(got[finite].isfinite().all()):
        return float("inf")
    return float((got - wanted)[finite].abs().max() / wanted[finite].abs().max())


def milliseconds(run: Callable[[], Any], budget: float = 60.0) -> float:
    """Median over repetitions that fill the budget."""
    run()
    torch.cuda.synchronize()
    times: list[float] = []
    while sum(times) < budget and len(times) < 30:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def choices(widths: list[int]) -> Iterator[tuple[str, int, Tiles]]:
    """Kernel, width and tiles of everything to time."""
    for (kind, d), texts in CHOICES.items():
        if d in widths:
            for text in texts:
                yield kind, d, tiles_of(text)


def warm(widths: list[int], share: int, shares: int) -> None:
    """Compile this share of the choices, so that the timing process finds them in Triton's cache."""
    for kind, d, tiles in list(choices(widths))[share::shares]:
        for pattern in ("window:256", "random:0.1;block=128"):
            try:
                gate(kind, tiles, pattern, d)
            except Exception as problem_met:
                print(f"{kind} d{d} {tuple(tiles)}: {type(problem_met).__name__}", file=sys.stderr)


def main() -> None:
    """Compile in parallel, then check and time one choice after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSONL file to write")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 16384])
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 64, 256], help="head widths to time")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        warm(options.widths, options.share, options.jobs)
        return
    same = ["--jobs", str(options.jobs), "--widths", *map(str, options.widths)]
    commands = [[sys.executable, __file__, *same, "--share", str(i)] for i in range(options.jobs)]
    for process in [subprocess.Popen(command) for command in commands]:
        process.wait()
    lines = []
    for kind, d, tiles in choices(options.widths):
        try:
            wrong = max(gate(kind, tiles, pattern, d) for pattern in ("window:256", "random:0.1;block=128"))
        except Exception as problem_met:
            print(
                f"{kind:8} d{d:<4} {tuple(tiles)!s:20} {type(problem_met).__name__}: {str(problem_met)[:80]}",
                flush=True,
            )
            continue
        if not wrong <= TOLERANCE:
            print(f"{kind:8} d{d:<4} {tuple(tiles)!s:20} wrong by {wrong:.2g}", flush=True)
            continue
        cells = []
        for n in options.lengths:
            for name, texts in PATTERNS.items():
                call, grad = problem(texts.get(n) or texts[65536], n, d)
                time = milliseconds(runner(kind, tiles, call, grad))
                rate = call.plan.flops(d) * PRODUCTS[kind] / 2 / time * 1e-9
                lines.append(
                    {
                        "kernel": kind,
                        "d": d,
                        "tiles": tuple(tiles),
                        "n": n,
                        "pattern": name,
                        "ms": time,
                        "tflops": rate,
                        "error": wrong,
                        **facts("cuda"),
                    }
                )
                cells.append(f"{rate:4.0f}" if n > 16384 or "10" in name else f"{time * 1e3:4.0f}us")
        print(f"{kind:8} d{d:<4} {tuple(tiles)!s:20} {' '.join(cells)}", flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
