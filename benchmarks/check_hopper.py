"""Check the Hopper kernels against a float64 oracle, then time their variants. Needs one Hopper GPU, torch and triton.

Every case runs in a worker process that is killed after a minute, because a wrong barrier does not fail: it hangs.

    PYTHONPATH=src python3 benchmarks/check_hopper.py --out hopper.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.tools.bench.measure import facts


@dataclass(frozen=True)
class Case:
    """One problem; `variant` names a configuration, "" the default of the head width."""

    name: str
    pattern: str
    n: int
    heads: int = 4
    key_heads: int = 4
    batch: int = 1
    d: int = 128
    dtype: str = "bfloat16"
    block: int = 128
    layout: str = "bhnd"
    variant: str = ""
    task: str = "check"


Task = Callable[[Case], dict[str, Any]]
"""What a script does with a case: "ok", and what it found."""


def configurations(d: int, block: int = 128) -> dict[str, hopper_backend.ForwardConfig]:
    """Variants of the forward kernel worth timing, by name."""
    if block == 64:
        return {"": hopper_backend.SMALL_BLOCK_CONFIGS[d]}
    base = hopper_backend.FORWARD_CONFIGS[d]
    return {
        "": base,
        "no turns": replace(base, ping_pong=not base.ping_pong),
        "a program an item": replace(base, persistent=False),
        "stages 2 2": replace(base, k_stages=2, v_stages=2),
    }


SMALL_BLOCKS = [
    Case("block 64", "random:0.3;block=64;seed=1;per_head=1 & causal", 1100, key_heads=2, block=64),
    Case("block 64, window, ragged", "window:150", 777, block=64, batch=2),
    Case("block 64, rows without keys", "blocks:0,,1 2,,4;block=64", 320, block=64),
]


def checks() -> list[Case]:
    """Small problems, one for each thing that can go wrong."""
    kinds = [
        Case("whole tiles", "full", 512),
        Case("one tile", "full", 128, heads=1, key_heads=1),
        Case("causal, ragged", "causal", 1000),
        Case("window, ragged", "window:200", 1000),
        Case("random", "random:0.3;block=128;seed=1", 2048),
        Case("random by head, causal", "random:0.3;block=128;seed=1;per_head=1 & causal", 1100),
        Case("bit masks", "global:64 | window:100", 1000),
        Case("bit masks, causal", "causal & (window:50 | global:10)", 700),
        Case("rows without keys", "blocks:0,,1 2,,4;block=128", 640),
        Case("grouped heads, batch, (B, N, H, D)", "window:300", 900, heads=8, key_heads=2, batch=3, layout="bnhd"),
        Case("block 256", "causal", 1300, block=256),
        Case("block 256, window", "window:333", 1111, block=256, batch=2),
        Case("many items a program", "random:0.05;block=128;seed=3 | window:128", 8192, heads=4, key_heads=2, batch=4),
    ]
    cases = [replace(case, d=d) for d in (64, 128) for case in kinds]
    cases += [replace(case, d=d, dtype="float16") for d in (64, 128) for case in kinds[2:3]]
    cases += SMALL_BLOCKS
    for d in (64, 128):
        for variant in configurations(d):
            if variant:
                cases.append(replace(kinds[-1], d=d, variant=variant))
    return cases


def timings(variants: bool) -> list[Case]:
    """The shapes the design speaks of; the variants on random lists, where asked for."""
    cases = []
    for d in (128, 64):
        for n in (65536, 16384):
            blocks = n // 128
            for density in (0.1, 0.01):
                keep = max(1, round(density * blocks))
                window = f"window:{keep * 64}"
                for kind, pattern in (("random", f"random:{density};block=128;seed=0"), ("local", window)):
                    for variant in configurations(d) if variants and kind == "random" else ("",):
                        name = f"{kind} {density:g}"
                        cases.append(Case(name, pattern, n, 8, 8, d=d, variant=variant, task="time"))
    for density in (0.1, 0.01):
        for kind, pattern in (
            ("random", f"random:{density};block=64;seed=0"),
            ("local", f"window:{density * 32768:.0f}"),
        ):
            name = f"block 64, {kind} {density:g}"
            cases.append(Case(name, pattern, 65536, 8, 8, block=64, task="time"))
    cases.append(Case("block 64, causal", "causal", 16384, 8, 8, block=64, task="time"))
    cases.append(Case("causal", "causal", 16384, 8, 8, d=128, task="time"))
    cases.append(Case("causal", "causal", 16384, 8, 8, d=64, task="time"))
    return cases


def build(case: Case) -> AttentionCall:
    """The call of a case, on the GPU, from seeded inputs."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def tensor(heads: int) -> Tensor:
        if case.layout == "bnhd":
            return torch.randn(case.batch, case.n, heads, case.d, device="cuda", dtype=dtype).transpose(1, 2)
        return torch.randn(case.batch, heads, case.n, case.d, device="cuda", dtype=dtype)

    plan = make_plan(parse(case.pattern), case.n, case.heads, block_size=case.block, device="cuda")
    query, key, value = tensor(case.heads), tensor(case.key_heads), tensor(case.key_heads)
    return AttentionCall(query, key, value, plan, case.d**-0.5)


def oracle(call: AttentionCall, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Dense attention of each batch element and head: (batch, head, output, lse)."""
    allowed = call.plan.to_dense() > 0
    group = call.query.shape[1] // call.key.shape[1]
    for batch in range(call.query.shape[0]):
        for head in range(call.query.shape[1]):
            q, k, v = (
                t[batch, h].to(dtype)
                for t, h in ((call.query, head), (call.key, head // group), (call.value, head // group))
            )
            scores = (q @ k.T * call.scale).masked_fill(~allowed[head], -math.inf)
            lse = scores.logsumexp(-1)
            weights = torch.where(torch.isneginf(lse)[:, None], 0.0, (scores - lse[:, None]).exp()).nan_to_num(0.0)
            yield batch, head, weights @ v, lse


@contextmanager
def poisoned() -> Iterator[None]:
    """Make memory nobody wrote show up as NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(made: Tensor) -> Tensor:
        return made.fill_(math.nan) if made.is_floating_point() else made

    torch.empty = lambda *a, **k: fill(empty(*a, **k))
    torch.empty_like = lambda *a, **k: fill(empty_like(*a, **k))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


def check(case: Case) -> dict[str, Any]:
    """Largest error of the output and the LSE, beside the error rounding the weights alone would bring."""
    call = build(case)
    reason = hopper_backend.why_not(call)
    if reason is not None:
        return {"ok": False, "why_not": reason}
    config = configurations(case.d, case.block)[case.variant]
    with poisoned():
        output, lse = hopper_backend.run_forward(call, config)
        again = hopper_backend.run_forward(call, config)
    torch.cuda.synchronize()
    worst = {"output": 0.0, "lse": 0.0, "norm": 0.0}
    precision = torch.float64 if case.n <= 2048 else torch.float32
    unit = 2.0**-8 if case.dtype == "bfloat16" else 2.0**-11
    ok = bool(torch.equal(output, again.output) and torch.equal(lse, again.lse))
    for batch, head, want, want_lse in oracle(call, precision):
        got, got_lse = output[batch, head].to(precision), lse[batch, head].to(precision)
        error = (got - want).abs()
        empty = torch.isneginf(want_lse)
        ok &= bool((torch.isneginf(got_lse) == empty).all()) and not bool(got.isnan().any())
        lse_error = torch.where(empty, 0.0, (got_lse - want_lse).abs()).max().item()
        worst["output"] = max(worst["output"], error.nan_to_num(math.inf).max().item())
        worst["lse"] = max(worst["lse"], lse_error)
        worst["norm"] = max(worst["norm"], (error.norm() / want.norm()).nan_to_num(math.inf).item())
    ok &= worst["norm"] < 1.5 * unit and worst["lse"] < 2e-3 and worst["output"] < 8 * unit
    return {"ok": ok, **worst}


def milliseconds(run: Callable[[], object], repeats: int = 12) -> list[float]:
    """Device times of single runs after a warm-up."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def back_to_back(run: Callable[[], object], repeats: int = 20) -> float:
    """Milliseconds a run takes when the next one is already waiting."""
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(2_000_000)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def host_microseconds(run: Callable[[], object], repeats: int = 50) -> float:
    """Time the host needs to submit one call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / repeats * 1e6


def measure(case: Case) -> dict[str, Any]:
    """Speed on the kept blocks."""
    call = build(case)
    reason = hopper_backend.why_not(call)
    if reason is not None:
        return {"ok": False, "why_not": reason}
    config = configurations(case.d, case.block)[case.variant]
    times = milliseconds(lambda: hopper_backend.run_forward(call, config))
    median = statistics.median(times)
    result = {"ok": True, "ms": median, "fastest": min(times)}
    result["tflops"] = case.batch * call.plan.flops(case.d) / median / 1e9
    result["kernel_ms"] = back_to_back(lambda: hopper_backend.run_forward(call, config))
    result["kernel_tflops"] = case.batch * call.plan.flops(case.d) / result["kernel_ms"] / 1e9
    result["density"] = call.plan.density
    if median < 0.2:
        result["host_us"] = host_microseconds(lambda: hopper_backend.run_forward(call, config))
    return result


def answer(check: Task, measure: Task) -> None:
    """Run the cases that arrive on standard input, one JSON line each, and answer on standard output."""
    for line in sys.stdin:
        case = Case(**json.loads(line))
        try:
            result = check(case) if case.task == "check" else measure(case)
        except Exception as problem:
            result = {"ok": False, "error": f"{type(problem).__name__}: {str(problem)[:600]}"}
        print(json.dumps(result), flush=True)


class Worker:
    """A process of a script that answers cases, replaced when it hangs or dies."""

    def __init__(self, script: str, seconds: float) -> None:
        self.script, self.seconds = script, seconds
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str] = queue.Queue()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, self.script, "--worker"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines = queue.Queue()
        threading.Thread(target=self._read, args=(process, self.lines), daemon=True).start()
        return process

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    def run(self, case: Case) -> dict[str, Any]:
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(case)) + "\n")
        self.process.stdin.flush()
        try:
            line = self.lines.get(timeout=self.seconds)
        except queue.Empty:
            self.stop()
            return {"ok": False, "error": f"no answer within {self.seconds:g} s"}
        if not line:
            self.stop()
            return {"ok": False, "error": "the worker died"}
        return json.loads(line)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def options(description: str | None) -> argparse.ArgumentParser:
    """What every script that runs cases understands."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSONL file to write")
    parser.add_argument("--only", choices=("check", "time"), help="run one half")
    parser.add_argument("--match", default="", help="run the cases whose description contains one of these, by commas")
    parser.add_argument("--seconds", type=float, default=420.0, help="stop starting cases after this long")
    parser.add_argument("--case-seconds", type=float, default=60.0, help="kill a case after this long")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def run_cases(script: str, arguments: argparse.Namespace, cases: list[Case], check: Task, measure: Task) -> int:
    """Run the cases asked for, each in a process of the script, and print one line each; 1 if some failed."""
    if arguments.worker:
        answer(check, measure)
        return 0
    began = time.perf_counter()
    failures = 0
    hands = Worker(script, arguments.case_seconds)
    rows, known = [], facts("cuda")
    for case in cases:
        label = f"{case.task:5} d{case.d} {case.dtype} n {case.n} {case.name}" + (
            f" [{case.variant}]" if case.variant else ""
        )
        if arguments.only not in (None, case.task) or not any(w in label for w in arguments.match.split(",")):
            continue
        if time.perf_counter() - began > arguments.seconds:
            print("out of time; the remaining cases are not run", flush=True)
            break
        result = hands.run(case)
        failures += not result["ok"]
        rows.append({**asdict(case), **result, **known})
        shown = " ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items() if k != "ok")
        print(f"{'ok  ' if result['ok'] else 'FAIL'} {label:78} {shown}", flush=True)
        if arguments.out is not None:
            arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    hands.stop()
    print(f"{failures} failures in {time.perf_counter() - began:.0f} s")
    return 1 if failures else 0


def main() -> int:
    """Run the cases asked for."""
    parser = options(__doc__)
    parser.add_argument("--variants", action="store_true", help="time the variants too")
    arguments = parser.parse_args()
    return run_cases(__file__, arguments, [*checks(), *timings(arguments.variants)], check, measure)


if __name__ == "__main__":
    sys.exit(main())
