"""Hardware counters of kernels, by ncu: of Hopper attention on small ladders and windows, and of choosing blocks.

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
from typing import Any, NamedTuple

import torch

from dilated_attention_pytorch import attention, reproducible_gradients
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive
from dilated_attention_pytorch.selection.backend import select
from dilated_attention_pytorch.tools.bench.measure import facts
from dilated_attention_pytorch.tools.bench.results import append

HEADS = 8


class Case(NamedTuple):
    """A pattern, or behind LEARNED what fraction of blocks a scorer drops; head width; tokens."""

    pattern: str
    d: int
    n: int = 65536


LEARNED = "learned:"
"""How a case begins in which a scorer chooses; nothing but the choice is computed."""
CASES = [
    # One part that lies in place, and one that is strided.
    Case("dilated:2048x1", 128),
    Case("dilated:2048x1 & causal", 128),
    Case("dilated:8192x4", 128),
    Case("dilated:8192x4", 64),
    # One percent of 16K: so short that a launch costs as much.
    Case("hierarchical:1x1;block=128", 128, 2**14),
    Case("hierarchical:1x1;block=128", 64, 2**14),
    Case("random:0.01;block=128", 128, 2**14),
    Case("random:0.01;block=128", 64, 2**14),
    Case(f"{LEARNED}0.99", 64, 2**20),
    Case(f"{LEARNED}0.9 & causal", 64, 2**17),
    Case(f"{LEARNED}0.9 & causal", 64, 2**15),
]
KERNELS = "attention_|hidden_kernel|match_kernel|rank_kernel|choice_kernel|summaries_kernel|factor_kernel"
"""Names of those that are counted."""
MOST_LAUNCHES = 24
"""Of a case; a choice has some hundred, which are much alike."""
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


def compute(case: Case) -> None:
    """Forward and backward once, by rows and in any order; of what is learned, the choice alone."""
    pattern, d, n = case
    made = (torch.randn(1, HEADS, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    query, key, value, grad = (t.requires_grad_() for t in made)
    if pattern.startswith(LEARNED):
        sparsity, _, causal = pattern.removeprefix(LEARNED).partition(" & ")
        layer = BlockSparseAdaptive(
            [n], [1], HEADS, d, AdaptiveConfig(base_sparsity=float(sparsity), score_unit=16)
        ).cuda()
        with torch.no_grad():
            select(layer.score_blocks(query, key, bool(causal)), n)
        torch.cuda.synchronize()
        return
    for by_rows in (True, False):
        reproducible_gradients(by_rows)
        output = attention(query, key, value, pattern, backend="hopper")
        torch.autograd.grad(output, (query, key, value), grad.detach())
    torch.cuda.synchronize()


def counted(case: Case, seconds: float) -> list[dict[str, Any]]:
    """What ncu says of every attention kernel of a case, in the order they ran."""
    found = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    sections = [f"--section={name}" for name in ("SpeedOfLight", "SchedulerStats", "WarpStateStats", "LaunchStats")]
    command = [found, "--clock-control=none", "--csv", "--page=details", *sections, "-k", f"regex:{KERNELS}"]
    command += ["-c", str(MOST_LAUNCHES), sys.executable, __file__, "--only", *map(str, case)]
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
    parser.add_argument("--only", nargs=3, metavar=("PATTERN", "D", "N"), help="run one case and count nothing")
    asked = parser.parse_args()
    if asked.only:
        compute(Case(asked.only[0], *map(int, asked.only[1:])))
        return
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    for case in (CASES[i] for i in asked.cases):
        for line in counted(case, asked.seconds):
            shown = {**case._asdict(), "heads": HEADS} | line
            print(shown, flush=True)
            append(asked.out, shown | facts("cuda"))


if __name__ == "__main__":
    main()
