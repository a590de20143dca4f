"""Run small problems under compute-sanitizer: no access outside its memory, no race in shared memory.

    PYTHONPATH=src GIT_SHA=$(git rev-parse HEAD) python benchmarks/sanitize.py --out FILE

Each tool takes each backend in a process of its own, with torch's memory cache off so that tensors have neighbours that
are not theirs. The problems run once without a tool first, so that no tool watches the compiler. The file gets one line
of JSON a pair.

Warps of a Hopper kernel learn what they are for through a byte in shared memory, in code that triton's compiler puts in
front of the kernel; racecheck does not follow the barriers it uses, and reports it. Such races are counted apart.

What a Hopper kernel's loader hands over to the warps that compute is counted apart too, but only where racecheck, in
the same run, reports every case of a control (handover.py) that hands numbers over in that way and comes out right.
Such a report does not tell right from wrong: what is counted apart is not thereby free of races.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dilated_attention_pytorch.kernels import registry
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.hopper.backend import gluon_missing
from dilated_attention_pytorch.kernels.registry import backend_named
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.tools.bench.measure import facts

TOOLS = ("memcheck", "racecheck")
CONTROL, HANDOVERS = "control", ("plain", "bytes")
"""The control as a backend, and its cases."""
CLEAN, ERRORS = "clean", "errors"
APART = "clean apart from what the tool reports of the control"
REPORTED = "reported although right"
HANDOVER = Path(__file__).with_name("handover.py")
SOURCES = {path.name: path for path in (*sorted((Path(registry.__file__).parent / "hopper").glob("*.py")), HANDOVER)}
"""Files with kernels, by the name that a report gives."""


class Case(NamedTuple):
    """One small problem."""

    pattern: str
    n: int
    heads: int = 2
    key_heads: int = 2
    d: int = 64
    block: int = 128
    dtype: torch.dtype = torch.bfloat16
    dropout_p: float = 0.0


CASES = {
    "triton": [
        Case("window:40 & causal", 150, block=64),
        Case("dilated:32x1,90x3 & causal", 130, block=32, d=40),
        Case("window:3 | global:5", 90, block=32, d=32, dtype=torch.float32, dropout_p=0.2),
    ],
    "hopper": [
        Case("window:200 & causal", 300),
        Case("random:0.5;block=128;per_head=1", 384, d=128),
        Case("window:60 | global:70", 300),
        Case("dilated:128x1,300x2,300x3 & causal", 600, key_heads=1, d=128),
    ],
}


def compute(backend: str, case: Case) -> None:
    """Forward and backward once."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, heads, case.n, case.d) for heads in (case.heads, case.key_heads, case.key_heads, case.heads)]
    query, key, value, grad = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(case.dtype) for shape in shapes
    )
    seed = torch.tensor([7], device="cuda") if case.dropout_p else None
    plan = make_plan(parse(case.pattern), case.n, case.heads, case.block).to("cuda")
    call = AttentionCall(query, key, value, plan, case.d**-0.5, dropout_p=case.dropout_p, seed=seed)
    module = backend_named(backend)
    reason = module.why_not(call)
    if reason is not None:
        raise RuntimeError(f"{backend} cannot run {case}: {reason}")
    output, lse = module.forward(call)
    module.backward(call, output, lse, grad, torch.ones_like(lse))
    torch.cuda.synchronize()


def control_missing() -> str | None:
    """Why the control cannot run here, or None when it can."""
    if not torch.cuda.is_available():
        return "needs a GPU of compute capability 9.x, got none"
    major, minor = torch.cuda.get_device_capability()
    return gluon_missing() if major == 9 else f"needs a GPU of compute capability 9.x, got {major}.{minor}"


def run(backend: str) -> None:
    """Every problem of a backend once; of the control also whether it came out right, for whoever reads the log."""
    if backend != CONTROL:
        for case in CASES[backend]:
            compute(backend, case)
        return
    reason = control_missing()
    if reason is not None:
        print(f"control did not run: {reason}")
        return
    from handover import is_right

    for case in HANDOVERS:
        print(f"control {case}: {'right' if is_right(case) else 'wrong'}", flush=True)


class Access(NamedTuple):
    """One side of a race that racecheck reports."""

    kind: str
    kernel: str
    file: str
    line: int


Function = tuple[str, str]
"""File and name."""


@cache
def source_of(file: str) -> ast.Module | None:
    """Syntax of a file with kernels, by the name that a report gives."""
    path = SOURCES.get(file)
    return None if path is None else ast.parse(path.read_text())


@cache
def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    """Functions of a file by name."""
    source = source_of(file)
    return {one.name: one for one in ast.walk(source) if isinstance(one, ast.FunctionDef)} if source else {}


def function_at(file: str, line: int) -> Function | None:
    """The innermost function that holds a line."""
    holding = [one for one in functions_of(file).values() if one.lineno <= line <= (one.end_lineno or 0)]
    return (file, max(holding, key=lambda one: one.lineno).name) if holding else None


@cache
def named(file: str, name: str) -> Function | None:
    """The function of a file with kernels that a name in a file means."""
    if name in functions_of(file):
        return file, name
    for one in ast.walk(source_of(file) or ast.Module([], [])):
        if isinstance(one, ast.ImportFrom):
            origin = f"{(one.module or '').split('.')[-1]}.py"
            for alias in one.names:
                if (alias.asname or alias.name) == name and alias.name in functions_of(origin):
                    return origin, alias.name
    return None


@cache
def reached(function: Function) -> frozenset[Function]:
    """A function and all that it calls, and they call."""
    found, waiting = {function}, [function]
    while waiting:
        file, name = waiting.pop()
        words = {one.id for one in ast.walk(functions_of(file)[name]) if isinstance(one, ast.Name)}
        called = {named(file, word) for word in words} - found - {None}
        found |= called
        waiting += called
    return frozenset(found)


def parting(tree: ast.AST) -> list[ast.Call]:
    """Where warps of a kernel part."""
    calls = (one for one in ast.walk(tree) if isinstance(one, ast.Call))
    return [one for one in calls if ast.unparse(one.func) == "gl.warp_specialize"]


@cache
def parts_of(kernel: str) -> tuple[Function, ...]:
    """The functions that the warps of a kernel run; none where its warps do not part."""
    for path in SOURCES.values():
        own = functions_of(path.name).get(kernel)
        for call in parting(own) if own else ():
            return tuple(dict.fromkeys(named(path.name, ast.unparse(one.elts[0])) for one in call.args[0].elts))
    return ()


def side_of(access: Access) -> str | None:
    """Side of a kernel that alone can have made an access, "loader" or "compute"; None where that is not sure."""
    function, parts = function_at(access.file, access.line), parts_of(access.kernel)
    made = [part for part in parts if function in reached(part)]
    if not made:
        return None
    # The warp that keeps turns comes after the loader; the control's loader is its last part.
    loader = next((part for part in parts if part[1].startswith("load")), parts[-1])
    return "compute" if loader not in made else "loader" if made == [loader] else None


def in_front(access: Access) -> bool:
    """Whether an access is where the compiler tells warps what they are for: a kernel's head, or where they part."""
    heads = (one for one in functions_of(access.file).values() if one.decorator_list)
    if any(one.decorator_list[0].lineno <= access.line < one.body[0].lineno for one in heads):
        return True
    source = source_of(access.file)
    return source is not None and access.line in [one.lineno for one in parting(source)]


def between_parts(one: Access, other: Access) -> bool:
    """Whether one of two accesses writes and one reads, one in the loader and one in a part that computes."""
    sides = {side_of(one), side_of(other)}
    return one.kernel == other.kernel and one.kind != other.kind and sides == {"loader", "compute"}


class Reports(NamedTuple):
    """What racecheck reports, by where it lies."""

    races: list[str]
    between: list[tuple[str, str]]
    """Kernel and accesses of each."""
    in_front: int


def read_reports(log: str) -> Reports:
    """Reports of racecheck in a log; what is counted but not shown is a race."""
    reports = Reports([], [], 0)
    texts = re.split(r"=+ (?:Error|Warning): Race reported between ", log)[1:]
    for text in texts:
        where = [
            Access(kind, kernel, file, int(line))
            for kind, kernel, file, line in re.findall(r"(Read|Write) access at (\w+)\S* in (\S+):(\d+)", text)
        ]
        shown = ", ".join(dict.fromkeys(f"{one.kind} {one.file}:{one.line}" for one in where))
        if where and all(map(in_front, where)):
            reports = reports._replace(in_front=reports.in_front + 1)
        elif len(where) > 1 and all(between_parts(where[0], other) for other in where[1:]):
            reports.between.append((where[0].kernel, shown))
        else:
            reports.races.append(shown or text[:200])
    counted = re.findall(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)", log)
    missing = sum(map(int, counted[-1])) - len(texts) if counted else 0
    if missing > 0:
        reports.races.append(f"{missing} reports that the log does not show")
    return reports


def judged(backend: str, log: str, verdict: str, excused: bool) -> dict[str, Any]:
    """Verdict and counts of a log of racecheck.

    `excused`: the control of this run was reported although right, so that reports between parts are counted apart.
    """
    races, between, front = read_reports(log)
    excused = excused or backend == CONTROL
    if not excused:
        races, between = races + [shown for _, shown in between], []
    if verdict == ERRORS and not races and (between or front):
        verdict = APART if between else CLEAN
    line: dict[str, Any] = {"verdict": verdict, "races": races}
    if backend == CONTROL:
        by_kernel = Counter(kernel for kernel, _ in between)
        right = {case: f"control {case}: right" in log for case in HANDOVERS}
        reported = {case: by_kernel[f"handover_{case}_kernel"] for case in HANDOVERS}
        line |= {"right": right, "reported": reported}
        if verdict in (CLEAN, ERRORS, APART) and not all(right.values()):
            line["verdict"] = "wrong result"
        elif verdict == APART:
            line["verdict"] = REPORTED if all(reported.values()) else "reported in part"
    return line | {
        "races_in_front_of_kernels": front,
        "races_between_parts": len(between),
        "places_between_parts": list(dict.fromkeys(shown for _, shown in between)),
    }


def sanitize(tool: str, backend: str, seconds: float, excused: bool) -> dict[str, Any]:
    """What a tool says of a backend."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [found, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--only", backend]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begun = time.monotonic()
    reason = control_missing() if backend == CONTROL else None
    try:
        if reason is not None:
            log, verdict = "", f"did not run: {reason}"
        else:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
            )
            log, status = done.stdout + done.stderr, done.returncode
            verdict = {0: CLEAN, 9: ERRORS}.get(status, f"exit status {status}")
    except FileNotFoundError:
        log, verdict = "", "compute-sanitizer is not on this machine"
    except subprocess.TimeoutExpired:
        log, verdict = "", f"stopped after {seconds:.0f} s"
    summary = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (.*)", log)
    cases = HANDOVERS if backend == CONTROL else [f"{case.pattern} n {case.n} d {case.d}" for case in CASES[backend]]
    line = {"tool": tool, "backend": backend, "cases": list(cases), "summary": summary[-1] if summary else None}
    line |= judged(backend, log, verdict, excused)
    line["log"] = None if line["verdict"] == CLEAN else log[-600:]
    return line | {"seconds": round(time.monotonic() - begun, 1)} | facts("cuda")


def main() -> int:
    """Every tool on every backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSONL file to write")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one tool on one backend")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--only", choices=[CONTROL, *CASES], help="run the problems of one backend and nothing else")
    options = parser.parse_args()
    for backend in [options.only] if options.only else [CONTROL, *CASES]:
        run(backend)
    if options.only:
        return 0
    clean = True
    if options.out:
        options.out.write_text("")
    for tool in options.tools:
        excused = False
        for backend in [CONTROL, *CASES] if tool == "racecheck" else CASES:
            line = sanitize(tool, backend, options.seconds, excused)
            excused = excused or line["verdict"] == REPORTED
            clean = clean and line["verdict"] in (CLEAN, APART, REPORTED)
            print(f"{tool} {backend}: {line['verdict']} ({line['seconds']} s)", flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return int(not clean)


if __name__ == "__main__":
    sys.exit(main())
