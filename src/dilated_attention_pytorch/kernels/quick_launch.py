"""Launching a plain Triton kernel for little more than the driver's own price.

The public way binds, inspects and looks up every argument anew, which takes as long as a short kernel runs; a learned
step has dozens of those. Here a launch is known by what Triton compiles a kernel for, and goes straight to its entry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .hopper_launch import Entry, entry_of

KEPT = 4096
"""Launches that are known at a time."""

_known: dict[tuple[object, ...], tuple[Entry | None, tuple[None, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)`, with every constant given by name and nothing else."""
    told: list[object] = [kernel, *options.items()]
    passed: list[object] = []
    index = None
    for one in arguments:
        if isinstance(one, Tensor):
            place = one.data_ptr()
            passed.append(place)
            told.append((one.dtype, place % 16))
            index = one.device.index
        else:
            passed.append(one)
            # Numbers that are not whole are the same to the compiler; whole ones may be 1, or multiples of 16.
            told.append(float if isinstance(one, float) else one)
    key = (*told, index)
    entry, constants = _known.get(key, (None, ()))
    if entry is None or entry.watched or torch.cuda.current_device() != index:
        compiled = kernel[grid](*arguments, **options)
        if compiled is not None and key not in _known:
            if len(_known) >= KEPT:
                _known.clear()
            # What is compiled in is not looked at, but has its place.
            _known[key] = entry_of(compiled), (None,) * (len(kernel.arg_names) - len(arguments))
        return
    entry((*grid, 1, 1)[:3], entry.stream_of(index), (*passed, *constants), False)  # pyrefly: ignore[bad-argument-type]
