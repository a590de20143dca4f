"""Timing, memory measurement, and the description of a machine and its software."""

from __future__ import annotations

import ast
import ctypes
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...kernels.triton import PACKAGE
from ...ops import memory_budget

Result = TypeVar("Result")


def synchronize(device: str) -> None:
    """Wait until the device has finished its queued work."""
    if device == "cuda":
        torch.cuda.synchronize()


def clock(call: Callable[[], Any], device: str = "cpu", calls: int = 1) -> float:
    """Seconds of one call, as the mean of a stream of calls."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - begun) / calls


def timed(call: Callable[[], Result], device: str) -> tuple[Result, float]:
    """Result and seconds of one call, until the device has finished."""
    begun = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - begun


def quantiles(seconds: Iterable[float]) -> dict[str, float | None]:
    """p20, p50 and p80 in milliseconds; None without times."""
    ordered = sorted(seconds)
    at = {share: round(share / 100 * (len(ordered) - 1)) for share in (20, 50, 80)}
    return {f"p{share}_ms": 1e3 * ordered[index] if ordered else None for share, index in at.items()}


def draw(n: int, d: int, heads: int, key_heads: int, dtype: str, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random query, key and value that require gradients, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": getattr(torch, dtype), "device": device}
    query, key, value, grad = (torch.randn(1, h, n, d, **options) for h in (heads, key_heads, key_heads, heads))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad


class PeakMemory:
    """Peak memory inside a `with` block, in bytes; None where the system does not report it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.before: int | None = None
        self.total: int | None = None
        """bytes allocated at the peak"""
        self.extra: int | None = None
        """bytes at the peak beyond those at the start"""

    def __enter__(self) -> PeakMemory:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            _give_back_freed_memory()
            try:
                # Linux: 5 resets the peak of resident memory to its present value.
                Path("/proc/self/clear_refs").write_text("5")
                self.before = memory_budget.status_bytes("VmRSS")
            except OSError:
                self.before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            return
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.total = torch.cuda.max_memory_allocated()
        else:
            self.total = memory_budget.status_bytes("VmHWM")
        self.extra = max(self.total - self.before, 0)


def _give_back_freed_memory() -> None:
    """Release cached memory to the system; a call that reused it would seem to need none."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        # Not the GNU C library: the measurement is a lower bound.
        return


def memory_of(device: str) -> tuple[int, int]:
    """Free and total bytes of memory; the total twice where the system does not report usage."""
    try:
        return memory_budget.memory_of(torch.device(device))
    except ValueError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total


def device_name(device: str) -> str:
    """Name of the processor or GPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def installed(package: str) -> str | None:
    """Version of a package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_sha() -> str | None:
    """Commit of the source tree of this file, with a plus if the tree was edited.

    GIT_SHA in the environment comes first, for sources that travel without their history.
    """
    if "GIT_SHA" in os.environ:
        return os.environ["GIT_SHA"]
    here = Path(__file__).parent
    try:
        sha = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True)
        edited = subprocess.run(["git", "status", "--porcelain", "--", ".."], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    if sha.returncode:
        return None
    return sha.stdout.strip() + ("+" if edited.stdout.strip() else "")


def digest(files: list[Path]) -> str:
    """Hash of source files; comments and docstrings of Python files do not count."""
    total = sha256()
    for path in files:
        if path.suffix != ".py":
            total.update(path.read_bytes())
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(body := getattr(node, "body", None), list):
                body[:] = [x for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
        total.update(ast.dump(tree).encode())
    return total.hexdigest()[:16]


def attention_code(device: str) -> str:
    """Hash of the code that computes attention on a device: plans, kernels and ops."""
    package = Path(__file__).resolve().parents[2]
    kernels = package / "kernels"
    own = {*kernels.glob("*"), *(kernels / "cpu").glob("*")}
    own = own if device == "cpu" else {*kernels.rglob("*")} - {*(kernels / "cpu").glob("*")}
    files = {*(package / "plan").rglob("*"), *(package / "ops").rglob("*"), *own}
    return digest(sorted(path for path in files if path.suffix in (".py", ".cpp", ".h")))


@cache
def facts(device: str) -> dict[str, Any]:
    """Machine and software of a measurement."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "cores": os.cpu_count(),
        "git": git_sha(),
        "code": attention_code(device),
        "torch": torch.__version__,
        PACKAGE: installed(PACKAGE),
        "python": platform.python_version(),
    }
