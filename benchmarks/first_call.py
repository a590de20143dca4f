"""Seconds of the first forward and backward of a process, compiler included.

    PYTHONPATH=src GIT_SHA=$(git rev-parse HEAD) python benchmarks/first_call.py --out FILE

Each is measured in a process of its own: with triton's cache empty (`cold`), then once more with what that one left in
it. The file gets a line of JSON a process. `import_torch_s` tells how fast the machine reads its files: the first
process on one that has just started reads triton, the C compiler and the assembler from its disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LADDER = "dilated:2048x1,4096x2,8192x4,16384x8,32768x16"
TOKENS, HEADS = 65536, 8
WIDTHS = (128, 64)


def measure(width: int, in_any_order: bool) -> dict[str, Any]:
    """This process's first calls, and those that follow."""
    begun = time.perf_counter()
    import torch

    found: dict[str, Any] = {"import_torch_s": time.perf_counter() - begun}
    import dilated_attention_pytorch as dap

    dap.reproducible_gradients(not in_any_order)
    shape = (1, HEADS, TOKENS, width)
    made = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    query, key, value = made
    torch.cuda.synchronize()
    for name in ("first", "second"):
        begun = time.perf_counter()
        output = dap.attention(query, key, value, LADDER)
        torch.cuda.synchronize()
        found[f"{name}_forward_s"] = time.perf_counter() - begun
        loss = output.sum()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        loss.backward()
        torch.cuda.synchronize()
        found[f"{name}_backward_s"] = time.perf_counter() - begun
    return found


def main() -> None:
    """Every width, with an empty cache and then with a full one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first_call.jsonl"), help="JSONL file to append to")
    parser.add_argument("--any-order", action="store_true", help="gradients in any order, not by rows")
    parser.add_argument("--only", type=int, metavar="WIDTH", help="measure this process")
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(measure(asked.only, asked.any_order)))
        return
    from dilated_attention_pytorch.tools.bench.measure import facts
    from dilated_attention_pytorch.tools.bench.results import append

    order = ["--any-order"] if asked.any_order else []
    for width in WIDTHS:
        with tempfile.TemporaryDirectory() as cache:
            for cold in (True, False):
                command = [sys.executable, __file__, "--only", str(width), *order]
                environment = os.environ | {"TRITON_CACHE_DIR": cache}
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                line = {"pattern": LADDER, "n": TOKENS, "heads": HEADS, "d": width, "by_rows": not asked.any_order}
                line |= {"cold": cold} | json.loads(done.stdout.splitlines()[-1])
                print(json.dumps(line), flush=True)
                append(asked.out, line | facts("cuda"))


if __name__ == "__main__":
    main()
