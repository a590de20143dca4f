"""A tour in under five minutes: the machine, plans of a million tokens, a drawing, a check against float64, sparse
against dense attention, a few training steps, and a page with the results.

Run by `make demo`, or as `PYTHONPATH=src python benchmarks/demo.py`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch import attention, attention_with_lse, make_plan, parse
from dilated_attention_pytorch.tools import doctor, show, train
from dilated_attention_pytorch.tools import plan as forecast
from dilated_attention_pytorch.tools.bench.gate import Computed, error_ratio, sample
from dilated_attention_pytorch.tools.bench.measure import clock, memory_of
from dilated_attention_pytorch.tools.console import Parser, leave
from dilated_attention_pytorch.tools.html_page import (
    Chart,
    Heading,
    Table,
    as_html,
    log_chart,
    readable_bytes,
    seconds_text,
    tokens_text,
    write,
)

PICTURE = "dilated:64x1,256x4 & causal"
BESIDE = "window:64 | global:16"
LADDER = "dilated:1024x1,4096x4,16384x16,65536x64"
MILLION = "dilated:2048x1,4096x2,8192x4,16384x6,32768x12"
RACERS = {"dilated": LADDER, "window of 1024": "window:512"}
CHECKED = (LADDER, "window:512 & causal", "random:0.1;block=128", "window:128 | global:16")
ROWS_A_HEAD = 256
TRAINED_CONTEXT = 32768
PATIENCE_S = 25.0
"""Time limit of one length in seconds; a subject stops before a length that would exceed it."""
Laps = dict[str, dict[int, float]]
"""Seconds of a forward and backward pass by subject and length."""
RACE_S = 110.0
"""Time limit of the comparison in seconds."""


class Progress:
    """Progress bar on a terminal; one line per step in a log."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0

    def step(self, text: str) -> None:
        filled = 30 * self.done // self.steps
        bar = f"[{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.steps} {text}"
        if sys.stdout.isatty():
            print(f"\r\x1b[K{bar}", end="", flush=True)
        else:
            print(bar, flush=True)
        self.done += 1

    def close(self) -> None:
        if sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)


def draw(device: str, dtype: torch.dtype, n: int, heads: int, d: int) -> list[Tensor]:
    """Random query, key, value and gradient of the output."""
    return [torch.randn(1, heads, n, d, device=device, dtype=dtype) for _ in range(4)]


def plan_a_million(device: str) -> list[list[str]]:
    """Time and bytes of plans for sequences whose table of block pairs would not fit."""
    million = 2**20
    panels = {
        "64 random blocks a row, 16 heads": (f"random:{64 * 128 / million};block=128", 16),
        "LongNet ladder, 16 heads": (MILLION, 16),
        "sliding window, 16 heads": ("window:4096 & causal", 16),
    }
    rows = []
    for name, (text, heads) in panels.items():
        begun = time.perf_counter()
        plan = make_plan(parse(text), million, heads, device=device)
        seconds = time.perf_counter() - begun
        cells = [
            name,
            seconds_text(seconds),
            readable_bytes(plan.nbytes),
            f"{plan.blocks:,}",
            f"{plan.density:.2%}",
        ]
        rows.append(cells)
        print("  {:<34} {:>9}  {:>10}  {:>13} tiles  density {}".format(*cells))
    return rows


def check_rows(device: str, dtype: torch.dtype) -> tuple[list[list[str]], bool]:
    """Outputs, LSE and gradients on thousands of rows against float64."""
    n, heads, d = 8192, 4, 64
    rows, good = [], True
    for text in CHECKED:
        query, key, value, grad = draw(device, dtype, n, heads, d)
        inputs = [x.requires_grad_() for x in (query, key, value)]
        output, lse = attention_with_lse(query, key, value, parse(text))
        gradients = torch.autograd.grad(output, inputs, grad)
        computed = Computed(*(x.detach() for x in (*inputs, output, lse, grad)), *gradients)
        error = error_ratio(computed, parse(text), sample(n, ROWS_A_HEAD), list(range(heads)))
        good &= error <= 1.0
        rows.append([text, f"{ROWS_A_HEAD * heads}", f"{error:.2f}", "agrees" if error <= 1.0 else "DIFFERS"])
        checked = f"{rows[-1][1]} rows and columns, largest error {error:.2f} of its rounding bound"
        print(f"  {rows[-1][3]}  {checked}  {text}", flush=True)
    return rows, good


def lap(call: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor, device: str) -> float:
    """Seconds of a forward and backward: the better of two, after one that warms up where it is short."""

    def both() -> None:
        torch.autograd.grad(call(), inputs, grad)

    first = clock(both, device)
    return first if first > 5.0 else min(clock(both, device) for _ in range(2))


def race(device: str, dtype: torch.dtype, lengths: list[int], heads: int, d: int) -> Laps:
    """Sparse against dense at growing length."""
    laps: Laps = {name: {} for name in ("dense", *RACERS)}
    progress = Progress(len(lengths) * (1 + len(RACERS)))
    begun = time.perf_counter()
    for n in lengths:
        query, key, value, grad = draw(device, dtype, n, heads, d)
        inputs = [x.requires_grad_() for x in (query, key, value)]
        runners: dict[str, Callable[[], Tensor]] = {"dense": partial(scaled_dot_product_attention, query, key, value)}
        for name, text in RACERS.items():
            runners[name] = partial(attention, query, key, value, parse(text))
        for name, call in runners.items():
            progress.step(f"{name}, {tokens_text(n)} tokens")
            # Twice the tokens: four times the work for dense attention, twice for sparse patterns.
            expected = (4 if name == "dense" else 2) * max(laps[name].values(), default=0.0)
            if expected < PATIENCE_S and time.perf_counter() - begun + expected < RACE_S:
                laps[name][n] = lap(call, inputs, grad, device)
    progress.close()
    return laps


def race_table(laps: Laps, lengths: list[int]) -> tuple[list[str], list[list[str]]]:
    """Times, and speed-up over dense attention where it ran."""
    header = ["tokens", "dense", *(cell for name in RACERS for cell in (name, "faster by"))]
    rows = []
    for n in lengths:
        dense, *others = (laps[name].get(n) for name in ("dense", *RACERS))
        cells = [tokens_text(n), _time(dense)]
        for own in others:
            cells += [_time(own), f"{dense / own:.1f}x" if dense and own else ""]
        rows.append(cells)
    return header, rows


def _time(seconds: float | None) -> str:
    return "too long" if seconds is None else seconds_text(seconds)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = Parser("python benchmarks/demo.py", "A tour of the library on this machine.")
    parser.option(
        "-o", "--out", type=Path, default=Path("demo/report.html"), metavar="PATH", help="the page, or a folder for it"
    )
    options = parser.read(arguments)
    if options.out.is_dir():
        options.out /= "report.html"
    begun = time.perf_counter()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads, d = (8, 128) if device == "cuda" else (4, 64)
    lengths = [2**power for power in (range(12, 19) if device == "cuda" else range(11, 18))]
    print("dap doctor")
    machine = doctor.examine(device)
    doctor.show(machine)

    print("\ndap plan, a million tokens")
    free = memory_of(device)[0]
    kind = str(dtype).removeprefix("torch.")
    forecast.show(forecast.forecast(MILLION, 2**20, 16, 16, 64, kind, 1, 1, device, free))
    print("\nTime and memory of planning:")
    plan_rows = plan_a_million(device)

    maps = [show.draw_map(text, 1024, 4, 0, 64) for text in (PICTURE, BESIDE)]
    picture = show.as_text(show.draw_map(PICTURE, 1024, 4, 0, 32))
    interactive = options.out.with_name("pattern.html")
    write(interactive, show.as_html([PICTURE, BESIDE], 1024, 4, 0))
    print(f"\ndap show, one pattern (interactive: {interactive}):\n{picture}")

    print("\nAgainst dense attention in float64 (8192 tokens):")
    check_table, good = check_rows(device, dtype)
    if not good:
        print("A result is wrong, so nothing is timed.")
        return 1
    print(f"\nForward and backward, {heads} heads of {d}, {str(dtype).removeprefix('torch.')}:", flush=True)
    laps = race(device, dtype, lengths, heads, d)
    header, rows = race_table(laps, lengths)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for cells in (header, *rows):
        print("  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))

    print(
        f"\ndap train, a small language model on Python's own sources, {TRAINED_CONTEXT:,} tokens of context:",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        few = ["--steps", "3", "--eval-every", "0", "--eval-windows", "1", "--out", folder]
        status = train.main(["--context", str(TRAINED_CONTEXT), *few])
    if status:
        return status

    lines = {name: [(float(n), seconds) for n, seconds in by_n.items()] for name, by_n in laps.items()}
    facts = machine["machine"]
    parts = [
        f"{facts['device']}; torch {facts['torch']}, Python {facts['python']}, {heads} heads of {d}.",
        Heading("Time of a forward and backward pass"),
        "Dense is torch's own attention. The work of both sparse patterns is proportional to the tokens.",
        Chart("time", "Time of a forward and backward pass", log_chart(lines, "tokens", "time")),
        Table(header, rows),
        Heading("Checked against dense float64"),
        Table(["pattern", "rows", "largest error / bound", ""], check_table),
        Heading("Plans for a million tokens"),
        Table(["pattern", "time", "memory", "tiles", "density"], plan_rows),
        Heading("Attention patterns"),
        f"[An interactive page]({interactive.name}) beside this one has sliders for both patterns.",
        Chart("map", f"{PICTURE} and {BESIDE}", show.as_svg(maps)),
        Heading("Backends on this machine"),
        Table(["backend", "state"], [[b["name"], b["why_not"] or "ready"] for b in machine["backends"]], words=2),
    ]
    write(options.out, as_html("dilated-attention-pytorch on this machine", parts))
    print(f"\nWrote {options.out} and {interactive}. The tour took {time.perf_counter() - begun:.0f} s.")
    return 0


if __name__ == "__main__":
    leave(main)
