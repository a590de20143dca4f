"""Time and memory of planning FlexAttention functions: `python benchmarks/plan_functions.py 4096 16384`.

Each case runs in a process of its own, on one CPU thread, with two heads and tiles of 128 tokens. The second of two
plans is timed, so that the first call's imports and allocations are not. Seconds are CPU time, which other processes on
the machine change little.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import torch

import dilated_attention_pytorch as dap

CASES = ("window", "causal", "documents", "prefix", "dilated", "polynomial")


def function_of(case: str, n: int) -> Callable[..., Any]:
    """A FlexAttention function over `n` tokens."""
    document = torch.arange(n) // 1500
    return {
        "window": lambda b, h, q, k: (q - k).abs() <= 512,
        "causal": lambda b, h, q, k: q >= k,
        "documents": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
        "prefix": lambda b, h, q, k: (k < 1000) | (q >= k),
        "dilated": lambda b, h, q, k: (q - k) % 4 == 0,
        "polynomial": lambda b, h, q, k: (q * k) % 7 < 3,
    }[case]


def measure(case: str, n: int) -> str:
    """One line: time, growth of the peak memory of this process, and tiles of the plan."""
    torch.set_num_threads(1)
    dap.make_plan(dap.Pattern.from_mask_mod(function_of(case, 4096)), 4096, 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = process_time()
    plan = dap.make_plan(dap.Pattern.from_mask_mod(function_of(case, n)), n, 2)
    seconds = process_time() - start
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return f"{case:10} {n:>9,} tokens  {seconds:8.3f} s  {memory:7.0f} MiB  {plan.blocks:>10,} tiles"


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in CASES:
        print(measure(sys.argv[1], int(sys.argv[2])))
    else:
        for n in sys.argv[1:]:
            for case in CASES:
                print(subprocess.check_output([sys.executable, __file__, case, n], text=True).strip(), flush=True)
