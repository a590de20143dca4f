"""Predicted peak memory of a call by backend, and the longest sequence that fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from .. import Pattern, Plan, make_plan
from ..kernels.cpu import native
from ..kernels.cpu import tiles as cpu
from ..kernels.hopper import backend as hopper
from ..kernels.registry import MODULES
from ..kernels.triton import backend as triton
from ..plan.cost import cost_of

MOST_TOKENS = 2**40


def backend_name(module: ModuleType) -> str:
    """The registered name of a backend, from its module."""
    return next(name for name, path in MODULES.items() if module.__name__.endswith(f".kernels.{path}"))


NATIVE, CPU, TRITON, HOPPER = (backend_name(module) for module in (native, cpu, triton, hopper))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Properties of a call that determine its memory, besides the plan."""

    n: int
    heads: int
    key_heads: int
    d: int
    dtype: torch.dtype
    batch: int = 1
    backend: str = "auto"
    joined: bool = False
    """See `is_joined`."""


def peaks(shape: Shape, plan_bytes: int) -> tuple[int, int]:
    """Bytes at the highest point of a forward without gradients, and of a forward and backward, inputs included."""
    cost = cost_of(
        n=shape.n,
        heads=shape.heads,
        key_heads=shape.key_heads,
        tiles=0,
        block_size=128,
        head_dim=shape.d,
        value_dim=shape.d,
        itemsize=shape.dtype.itemsize,
        batch=shape.batch,
        plan_bytes=plan_bytes,
        several_parts=False,
    )
    forward, backward = workspace(shape)
    return cost.peak_forward + forward, cost.peak_backward + backward


def workspace(shape: Shape) -> tuple[int, int]:
    """Bytes a backend holds beyond inputs, results and their gradients, forward and backward."""
    queries, keys = (shape.batch * heads * shape.n * shape.d for heads in (shape.heads, shape.key_heads))
    narrow = shape.dtype.itemsize < 4
    if shape.backend == CPU:
        # Half precision sums in float32 and is rounded at the end.
        wide = (2 * queries, 2 * (queries + 2 * keys)) if narrow else (0, 0)
        return wide[0] + cpu.BUDGET, wide[1] + int(1.2 * cpu.BUDGET)
    if shape.backend == TRITON and shape.joined:
        # The running output, and the sums of dK and dV before there is a dQ or that of dQ beside all three, in float32.
        return 4 * queries, max(8 * keys - shape.dtype.itemsize * queries, 4 * queries)
    if shape.backend != NATIVE:
        # Hopper carries its results in their own dtype; its row statistics are one more LSE.
        return 0, 4 * shape.batch * shape.heads * shape.n if shape.backend == HOPPER else 0
    tasks, threads = shape.batch * shape.key_heads, torch.get_num_threads()
    copies = next(c for c in range(1, threads + 1) if tasks * c / (-(-tasks * c // threads) * threads) >= 0.9)
    if not narrow:
        return 0, (copies - 1) * 2 * keys * shape.dtype.itemsize
    if 8 * (queries + 2 * keys) <= native.WIDE_BUDGET:
        return 4 * (2 * queries + 2 * keys), 4 * (4 * queries + 4 * keys)
    # One key head at a time; the copies of the one before are still there while the next are made.
    pieces = shape.batch * shape.key_heads
    queries, keys = queries // pieces, keys // pieces
    return 4 * (3 * queries + 4 * keys), 5 * (4 * queries + 4 * keys)


def is_joined(plan: Plan) -> bool:
    """Whether the result needs several parts of the plan, or one that skips rows."""
    return len(plan.parts) != 1 or plan.parts[0].queries.rate > 1


def longest_that_fits(shape: Shape, growth: tuple[int, float], free: int) -> tuple[int, int]:
    """Most tokens that fit forward and in training, when plan bytes follow `bytes * (n / shape.n) ** power`."""

    def fits(n: int, which: int) -> bool:
        grown = growth[0] * (n / shape.n) ** growth[1]
        return peaks(replace(shape, n=n), int(grown))[which] <= free

    return _last(lambda n: fits(n, 0)), _last(lambda n: fits(n, 1))


def _last(fits: Callable[[int], bool]) -> int:
    low, high = 0, 1
    while high < MOST_TOKENS and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 4096):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plan_growth(pattern: Pattern, plan: Plan) -> tuple[int, float] | None:
    """Bytes of a plan and the power of n with which they grow; None for a pattern that exists at one length only."""
    part = max(plan.n // 8, 1)
    try:
        # A single token has no shorter plan, so a longer one gives the growth.
        other = make_plan(pattern, part if plan.n > 1 else 8, plan.heads, plan.block_size)
    except ValueError:
        return None
    return plan.nbytes, min(max(math.log(plan.nbytes / other.nbytes, plan.n / other.n), 0.0), 2.0)
