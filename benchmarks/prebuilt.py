"""Time of the C++ kernel as wheels hold it relative to the kernel built for this processor.

    python benchmarks/prebuilt.py        prints a table and writes benchmarks/results/prebuilt_cpu.jsonl

Both libraries run in one process on one thread, in turns. A round measures processor time, so that other programs
matter little, and the ratio of a case is the median over the rounds. The exit status is 1 if the geometric mean of the
ratios exceeds 1.05.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from dilated_attention_pytorch import attention  # noqa: E402
from dilated_attention_pytorch.kernels.cpu import native, toolchain  # noqa: E402
from dilated_attention_pytorch.tools.bench.measure import facts  # noqa: E402
from dilated_attention_pytorch.tools.html_page import write  # noqa: E402

CASES = [
    (pattern, d, dtype)
    for pattern in ("window:256 & causal", "dilated:1024x1,4096x4 & causal", "random:0.1")
    for d in (64, 128)
    for dtype in (torch.float32, torch.float64)
]
LARGEST = 1.05


def libraries(folder: Path) -> dict[str, ctypes.CDLL]:
    """Both libraries, compiled into `folder`."""
    compiler, level = os.environ.get("CXX", "g++"), toolchain.level_here()
    if level is None:
        sys.exit(f"wheels hold no kernel for this processor ({platform.machine()})")
    toolchain.build_for_wheel(compiler, folder, platform.machine())
    runtime = native._openmp_runtime()
    toolchain.build_here(compiler, folder / "local.so", (), runtime)
    if runtime is not None:
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    names = {"prebuilt": toolchain.wheel_name(platform.machine(), level), "local": "local.so"}
    return {kind: ctypes.CDLL(str(folder / name)) for kind, name in names.items()}


def seconds(library: ctypes.CDLL, inputs: list[torch.Tensor], pattern: str) -> tuple[float, float]:
    """Processor time of one forward and one backward pass."""
    native._library = lambda: library  # pyrefly: ignore
    begun = time.process_time()
    output = attention(*inputs, pattern, backend="native")
    between = time.process_time()
    output.backward(torch.ones_like(output))
    return between - begun, time.process_time() - between


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="length of the sequence")
    parser.add_argument("--heads", type=int, default=4, help="heads")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each case")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "benchmarks" / "results" / "prebuilt_cpu.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        both, level = libraries(Path(folder)), toolchain.level_here()
        # The name has a digest of the C++ sources.
        name = toolchain.wheel_name(platform.machine(), level)
        for pattern, d, dtype in CASES:
            inputs = [torch.randn(1, options.heads, options.tokens, d, dtype=dtype) for _ in range(3)]
            inputs = [x.requires_grad_() for x in inputs]
            for library in both.values():
                seconds(library, inputs, pattern)
            rounds = []
            for turn in range(options.rounds):
                order = list(both) if turn % 2 else list(both)[::-1]
                rounds.append({kind: seconds(both[kind], inputs, pattern) for kind in order})
            for index, direction in enumerate(("forward", "backward")):
                ratio = statistics.median(r["prebuilt"][index] / r["local"][index] for r in rounds)
                case = {"case": pattern, "n": options.tokens, "heads": options.heads, "d": d, "direction": direction}
                case |= {"dtype": str(dtype).removeprefix("torch."), "level": level, "library": name}
                times = {
                    f"{kind}_ms": round(1e3 * statistics.median(r[kind][index] for r in rounds), 2) for kind in both
                }
                lines.append({**case, **times, "prebuilt_over_local": round(ratio, 4), **facts("cpu")})
                print(f"{pattern:<32} d {d:<4}{case['dtype']:<8} {direction:<9}{ratio:.3f}", flush=True)
    mean = math.exp(statistics.fmean(math.log(line["prebuilt_over_local"]) for line in lines))
    print(f"geometric mean {mean:.3f}, largest {max(line['prebuilt_over_local'] for line in lines):.3f}")
    write(options.out, "".join(json.dumps(line) + "\n" for line in lines))
    return 0 if mean <= LARGEST else 1


if __name__ == "__main__":
    sys.exit(main())
