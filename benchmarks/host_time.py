"""Time of the host in repeated calls of `selected_attention`, without a GPU.

    PYTHONPATH=src python benchmarks/host_time.py --out host.jsonl [--commit COMMIT]

On a stub of the CUDA driver (tests/kernels/stub_cuda.c) small CPU tensors stand for those of a GPU: the library's
launches take the time that they take on a GPU except for the driver's, compute nothing, and torch's operations compute
on the CPU instead of being launched. So a line also counts what a GPU would add its own time to: launches, operations
of torch that launch kernels, allocations and views. Lines with "on": "cpu" are small calls that are computed. Times are
microseconds of a call, the least and the median of rounds in which all cases take turns. `--commit` measures the
sources of a commit instead of the present ones, and needs git. Needs a C compiler and triton.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, REPEATS = 100, 5
STUB = {"n": 1024, "heads": 2, "granularity": 128, "dtype": "bfloat16"}
CPU = {"n": 512, "heads": 4, "granularity": 64, "dtype": "float32"}
WIDTH, LISTED = 64, 4
VIEWS = {"view", "as_strided", "slice", "select", "unsqueeze", "expand", "transpose", "permute", "detach", "alias"}
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


def cases(n: int, heads: int, granularity: int, dtype: str) -> dict[str, Callable[[], object]]:
    """Calls by name: rows that choose, how their blocks are given, and the passes."""
    import torch

    import dilated_attention_pytorch as dap

    torch.manual_seed(0)
    shape = 1, heads, n, WIDTH
    plain = [torch.zeros(shape, dtype=getattr(torch, dtype)) for _ in range(3)]
    leaves, gradient = [x.clone().requires_grad_() for x in plain], torch.zeros_like(plain[0])
    options = {"granularity": granularity, "is_causal": True}

    def both(call: Callable[[list[Any]], Any]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(leaves), leaves, gradient)

    found: dict[str, Callable[[], object]] = {}
    for rows in ("blocks", "tokens"):
        many, blocks = n if rows == "tokens" else n // granularity, n // granularity
        own = torch.arange(many)[:, None] // (many // blocks)
        order = torch.rand(many, blocks).masked_fill(torch.arange(blocks) > own, -1.0).scatter_(1, own, 2.0)
        best = order.topk(LISTED, 1)
        indices = torch.where(best.values < 0, -1, best.indices).int()[None, None]
        selection = dap.make_selection(indices, n=n, heads=heads, **options)
        given = {"selection": (selection, {}), "indices": (indices, options)}
        if rows == "tokens":
            near = dap.make_selection(indices, n=n, heads=heads, local_blocks=1, **options)
            given["selection that implies the own block"] = near, {}
        found[f"{rows} choose, make_selection"] = lambda x=indices: dap.make_selection(x, n=n, heads=heads, **options)
        for name, (lists, more) in given.items():
            call = lambda x, lists=lists, more=more: dap.selected_attention(*x, lists, **more)  # noqa: E731
            found[f"{rows} choose, {name}, forward"] = lambda call=call: call(plain)
            found[f"{rows} choose, {name}, forward and backward"] = both(call)
    call = lambda x: dap.attention(*x, f"random:0.3;block={granularity}")  # noqa: E731
    return found | {"pattern, forward": lambda: call(plain), "pattern, forward and backward": both(call)}


def pretend_gpu() -> Any:
    """Make CPU tensors stand for those of an H200; return the stub."""
    import generated_code
    import torch
    from triton.backends.nvidia.compiler import CUDABackend

    owners = (torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")
    made = [getattr(*one) for one in owners]
    generated_code.pretend_gpu()
    # Unlike there, memory is not filled, which would take time.
    for one, make in zip(owners, made, strict=True):
        setattr(*one, make)
    CUDABackend.make_cubin = lambda backend, ptx, *_: ptx.encode()
    stub = ctypes.CDLL("libcuda.so.1")
    stub.stub_launches.restype = ctypes.c_long
    return stub


def counts(call: Callable[[], object], stub: Any) -> dict[str, int]:
    """Launches of the library in a call, and what it does in torch."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function.overloadpacket.__name__
            seen["views" if name in VIEWS else "allocations" if name in ALLOCATIONS else "torch_kernels"] += 1
            return function(*args, **(kwargs or {}))

    stub.stub_clear()
    # Under a mode that it notices, a call would run as operators and use no cache of tensors.
    noticed, torch._C._len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack, lambda: 0
    with Count():
        call()
    torch._C._len_torch_dispatch_stack = noticed
    return {"launches": stub.stub_launches(), **{x: seen[x] for x in ("torch_kernels", "allocations", "views")}}


def measure(on: str, out: Path) -> None:
    """Measure all cases in this process."""
    stub = pretend_gpu() if on == "stub" else None

    from dilated_attention_pytorch.tools.bench.measure import facts

    calls = cases(**(CPU if stub is None else STUB))
    for call in calls.values():
        for _ in range(3):
            call()
    took: dict[str, list[float]] = {name: [] for name in calls}
    if stub is not None:
        stub.stub_record(0)
    gc.disable()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begun = time.perf_counter()
            for _ in range(REPEATS):
                call()
            took[name].append(1e6 * (time.perf_counter() - begun) / REPEATS)
    gc.enable()
    with open(out, "a") as file:
        for name, call in calls.items():
            line = {"task": "host time", "on": on, "case": name}
            line |= {"us": round(min(took[name]), 1), "median_us": round(statistics.median(took[name]), 1)}
            line |= {} if stub is None else counts(call, stub)
            file.write(json.dumps(line | facts("cpu")) + "\n")
            print(json.dumps(line), flush=True)


def run(root: Path, commit: str | None, on: str, out: Path) -> None:
    """Measure the sources of a tree in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(root / "src"), str(ROOT / "benchmarks")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAXTYPING_DISABLE": "1"}
        # As a GPU's allocator does, malloc then takes memory that was freed.
        environment |= dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**32))
        environment |= {"OMP_NUM_THREADS": "1"} | ({"GIT_SHA": commit} if commit else {})
        if on == "stub":
            headers = Path(str(find_spec("triton").origin)).parent / "backends" / "nvidia" / "include"  # pyrefly: ignore
            build = ["-O1", "-shared", "-fPIC", f"-I{headers}", "-Wl,-soname,libcuda.so.1"]
            source = ROOT / "tests" / "kernels" / "stub_cuda.c"
            subprocess.run([shutil.which("cc") or "cc", source, *build, "-o", f"{folder}/libcuda.so.1"], check=True)
            environment |= dict.fromkeys(("TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH", "TRITON_CACHE_DIR"), folder)
            environment["DISABLE_LLVM_OPT"] = "1"
        program = [sys.executable, __file__, "--on", on, "--out", str(out.resolve()), "--here"]
        subprocess.run(program, env=environment, check=True, cwd=folder)


def main() -> None:
    """Measure the present sources or those of a commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--on", nargs="+", choices=("stub", "cpu"), default=["stub", "cpu"])
    parser.add_argument("--commit", help="commit whose sources are measured; default: the present sources")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        measure(given.on[0], given.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        root = ROOT
        if given.commit:
            archive = subprocess.run(["git", "archive", given.commit, "src"], cwd=ROOT, check=True, capture_output=True)
            subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
            root, name = Path(folder), ["git", "rev-parse", "--short=12", given.commit]
            given.commit = subprocess.run(name, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
        for on in given.on:
            run(root, given.commit, on, given.out)


if __name__ == "__main__":
    main()
