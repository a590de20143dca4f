"""Run small problems under compute-sanitizer: no access outside its memory, no race in shared memory.

    PYTHONPATH=src GIT_SHA=$(git rev-parse HEAD) python benchmarks/sanitize.py --out FILE

Each tool takes each backend in a process of its own, with torch's memory cache off so that tensors have neighbours that
are not theirs. The problems run once without a tool first, so that no tool watches the compiler. The file gets one line
of JSON a pair.

Warps of a Hopper kernel learn what they are for through a byte in shared memory, in code that triton's compiler puts in
front of the kernel; racecheck does not follow the barriers it uses, and reports it. Such races are counted apart.
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
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dilated_attention_pytorch.kernels import registry
from dilated_attention_pytorch.kernels.registry import AttentionCall, backend_named
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.tools.measure import facts

TOOLS = ("memcheck", "racecheck")


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


def in_front(file: str, line: int) -> bool:
    """Whether a line of a kernel is where the compiler tells warps what they are for: its head, or where they part."""
    source = Path(registry.__file__).parent / file
    if not source.exists():
        return False
    for one in ast.walk(ast.parse(source.read_text())):
        if isinstance(one, ast.FunctionDef) and one.decorator_list:
            if one.decorator_list[0].lineno <= line < one.body[0].lineno:
                return True
        elif isinstance(one, ast.Call) and ast.unparse(one.func) == "gl.warp_specialize" and one.lineno == line:
            return True
    return False


def places(log: str) -> tuple[list[str], int]:
    """Accesses that racecheck names, without those in front of kernels, and how many pairs those are."""
    found, apart = [], 0
    for report in re.split(r"=+ (?:Error|Warning): Race reported between ", log)[1:]:
        where = re.findall(r"(Read|Write) access at \S+ in (\S+):(\d+)", report)
        if where and all(in_front(file, int(line)) for _, file, line in where):
            apart += 1
        else:
            named = dict.fromkeys(f"{kind} {file}:{line}" for kind, file, line in where)
            found.append(", ".join(named) or report[:200])
    return found, apart


def sanitize(tool: str, backend: str, seconds: float) -> dict[str, Any]:
    """What a tool says of a backend."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [found, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--only", backend]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
        log, status = done.stdout + done.stderr, done.returncode
        verdict = {0: "clean", 9: "errors"}.get(status, f"exit status {status}")
    except FileNotFoundError:
        log, verdict = "", "compute-sanitizer is not on this machine"
    except subprocess.TimeoutExpired:
        log, verdict = "", f"stopped after {seconds:.0f} s"
    summary = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (.*)", log)
    races, apart = places(log)
    if tool == "racecheck" and verdict == "errors" and apart and not races:
        verdict = "clean"
    return {
        "tool": tool,
        "backend": backend,
        "cases": [f"{case.pattern} n {case.n} d {case.d}" for case in CASES[backend]],
        "verdict": verdict,
        "summary": summary[-1] if summary else None,
        "races": races,
        "races_in_front_of_kernels": apart,
        "log": None if verdict == "clean" else log[-600:],
        "seconds": round(time.monotonic() - begun, 1),
    } | facts("cuda")


def main() -> int:
    """Every tool on every backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSONL file to write")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one tool on one backend")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--only", choices=list(CASES), help="run the problems of one backend and nothing else")
    options = parser.parse_args()
    for backend in [options.only] if options.only else list(CASES):
        for case in CASES[backend]:
            compute(backend, case)
    if options.only:
        return 0
    clean = True
    if options.out:
        options.out.write_text("")
    for tool in options.tools:
        for backend in CASES:
            line = sanitize(tool, backend, options.seconds)
            clean = clean and line["verdict"] == "clean"
            print(f"{tool} {backend}: {line['verdict']} ({line['seconds']} s)", flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return int(not clean)


if __name__ == "__main__":
    sys.exit(main())
