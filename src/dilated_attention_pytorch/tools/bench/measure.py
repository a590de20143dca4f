"""Clocks, memory meters and the facts that make a figure repeatable."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...kernels.triton import PACKAGE
from ...ops import memory_budget


def synchronize(device: str) -> None:
    """Wait until the device has done what was asked of it."""
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


class PeakMemory:
    """The highest use of memory inside a `with` block, in bytes; None where the system will not say."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.before: int | None = None
        self.total: int | None = None
        """all that was held at the highest point"""
        self.extra: int | None = None
        """what was held then beyond what was held at the start"""

    def __enter__(self) -> PeakMemory:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            _give_back_freed_memory()
            try:
                # Linux: 5 sets the high-water mark of resident memory back to what is resident now.
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
    """Return to the system what the allocator keeps: a call that takes it again would seem to need nothing."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        # Not the GNU C library; what is measured is then a lower bound.
        return


def memory_of(device: str) -> tuple[int, int]:
    """Bytes that can still be taken, and bytes in all; all of them where the system does not tell what is taken."""
    try:
        return memory_budget.memory_of(torch.device(device))
    except ValueError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total


def device_name(device: str) -> str:
    """What the machine calls the processor or the GPU."""
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
    """Commit of the source tree this file lies in, with a plus where it has been edited.

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


@cache
def facts(device: str) -> dict[str, Any]:
    """What to know of machine and software to believe a figure."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "cores": os.cpu_count(),
        "git": git_sha(),
        "torch": torch.__version__,
        PACKAGE: installed(PACKAGE),
        "python": platform.python_version(),
    }
