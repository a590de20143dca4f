"""Time limits scaled to the machine: a limit ends tests that hang, not tests that are slow."""

from __future__ import annotations

import os
import time

QUIET = 0.02
"""Seconds of `burst` on a quiet core of the machine that limits are written for."""
FRESH = 20.0
"""Seconds for which a measured slowdown is used again."""
MOST = 20.0

_measured: tuple[float, float] | None = None
"""Time of the last measurement and its slowdown."""


def burst() -> int:
    """Fixed work in one thread."""
    total = 0
    for number in range(300_000):
        total += number * number % 7
    return total


def slowdown() -> float:
    """Factor by which work takes longer here and now than on two quiet cores, from 1 to `MOST`.

    The larger of the wall time of a burst, which grows with other processes and with a limit on processor time, and of
    the load for each core, which covers threads and subprocesses that a test starts.
    """
    global _measured
    now = time.monotonic()
    if _measured is None or now - _measured[0] > FRESH:
        begin = time.perf_counter()
        burst()
        factor = (time.perf_counter() - begin) / QUIET
        if hasattr(os, "getloadavg"):
            factor = max(factor, os.getloadavg()[0] / (os.cpu_count() or 1))
        _measured = now, min(max(factor, 1.0), MOST)
    return _measured[1]


def scaled(seconds: float) -> float:
    """A limit for two quiet cores as a limit for this machine at its present load."""
    return seconds * slowdown()
