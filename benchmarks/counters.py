"""Hardware counters of the Hopper kernels on small ladders and windows, by ncu.

    PYTHONPATH=src GIT_SHA=$(git rev-parse HEAD) python benchmarks/counters.py --out FILE

The file gets one line of JSON a launch: how long it ran, and in percent of what the GPU can do how busy its arithmetic
(`compute`), shared memory and L1 (`l1`), L2 and memory were, and how often a scheduler had an instruction to issue.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch import attention, reproducible_gradients
from dilated_attention_pytorch.tools.measure import facts
from dilated_attention_pytorch.tools.results import append

CASES = [("dilated:2048x1", 128), ("dilated:2048x1 & causal", 128), ("dilated:8192x4", 128), ("dilated:8192x4", 64)]
"""Patterns, on 65,536 tokens and 8 heads, and head widths: one part that lies in place, and one that is strided."""
TOKENS, HEADS = 65536, 8
METRICS = {
    "Duration": "duration_us",
    "SM Frequency": "ghz",
    "Compute (SM) Throughput": "compute",
    "L1/TEX Cache Throughput": "l1",
    "L2 Cache Throughput": "l2",
    "DRAM Throughput": "memory",
    "One or More Eligible": "issuing",
    "Warp Cycles Per Issued Instruction": "cycles_an_instruction",
    "Registers Per Thread": "registers",
}
UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6, "Mhz": 1e-3, "hz": 1e-9}
"""To microseconds and GHz."""


def compute(pattern: str, d: int) -> None:
    """Forward and backward once, by rows and in any order."""
    made = (torch.randn(1, HEADS, TOKENS, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    query, key, value, grad = (t.requires_grad_() for t in made)
    for by_rows in (True, False):
        reproducible_gradients(by_rows)
        output = attention(query, key, value, pattern, backend="hopper")
        torch.autograd.grad(output, (query, key, value), grad.detach())
    torch.cuda.synchronize()


def counted(pattern: str, d: int, seconds: float) -> list[dict[str, Any]]:
    """What ncu says of every attention kernel of a case, in the order they ran."""
    found = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    sections = [f"--section={name}" for name in ("SpeedOfLight", "SchedulerStats", "WarpStateStats", "LaunchStats")]
    command = [found, "--clock-control=none", "--csv", "--page=details", *sections, "-k", "regex:attention_"]
    command += [sys.executable, __file__, "--only", pattern, str(d)]
    # Compiled before, so that nothing but kernels is waited for.
    subprocess.run(command[command.index(sys.executable) :], check=True, timeout=seconds)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds)
    table = csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"'))
    launches: dict[str, dict[str, Any]] = {}
    for row in table:
        line = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        if row["Metric Name"] in METRICS and row["Metric Value"]:
            value = float(row["Metric Value"].replace(",", "")) * UNITS.get(row["Metric Unit"], 1.0)
            line[METRICS[row["Metric Name"]]] = value
    return list(launches.values())


def main() -> None:
    """Every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("counters.jsonl"), help="JSONL file to append to")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one case")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="which of the cases, from 0 on")
    parser.add_argument("--only", nargs=2, metavar=("PATTERN", "WIDTH"), help="run one case and count nothing")
    asked = parser.parse_args()
    if asked.only:
        compute(asked.only[0], int(asked.only[1]))
        return
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    for pattern, d in (CASES[i] for i in asked.cases):
        for line in counted(pattern, d, asked.seconds):
            shown = {"pattern": pattern, "n": TOKENS, "heads": HEADS, "d": d} | line
            print(shown, flush=True)
            append(asked.out, shown | facts("cuda"))


if __name__ == "__main__":
    main()
