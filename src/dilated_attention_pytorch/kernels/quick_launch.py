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
_plain: dict[int, tuple[tuple[int, ...], Any]] = {}
"""By the id of a kernel, for its hash is made of its source: which arguments it is not compiled for, but for whether
they need 64 bits; and the kernel, so that the id stays its own."""


def _plain_places(kernel: Any) -> tuple[int, ...]:
    known = _plain.get(id(kernel))
    if known is None:
        places = (place for place, one in enumerate(getattr(kernel, "params", ())) if one.do_not_specialize)
        known = _plain[id(kernel)] = tuple(places), kernel
    return known[0]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)`: a tensor first, every constant by name, and nothing else by name."""
    passed: list[Any] = []
    told: list[object] = []
    for one in arguments:
        if isinstance(one, Tensor):
            place = one.data_ptr()
            passed.append(place)
            told.append((one.dtype, place % 16))
        else:
            passed.append(one)
            # Numbers that are not whole are the same to the compiler; whole ones may be 1, or multiples of 16.
            told.append(float if isinstance(one, float) else one)
    for place in _plain_places(kernel):
        told[place] = told[place] if told[place] is float else arguments[place] >= 2**31
    index = arguments[0].device.index
    key = (id(kernel), index, *options, *options.values(), *told)
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
