"""Launching a plain Triton kernel for little more than the driver's own price.

The public way binds, inspects and looks up every argument anew, which takes as long as a short kernel runs; a learned
step has dozens of those. Here a launch is known by what Triton compiles a kernel for, and goes straight to its entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import warmup
from .triton_abi import Entry, Grid, entry_of

KEPT = 4096
"""Launches that are known at a time, and prepared ones of each kind."""
ALIGNED = 128
"""Elements, at multiples of which tensors in one piece of memory begin."""

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
    if entry is None or not _may_run(entry, index):
        warmup.finish()
        compiled = kernel[grid](*arguments, **options)
        if compiled is not None and key not in _known:
            if len(_known) >= KEPT:
                _known.clear()
            # What is compiled in is not looked at, but has its place.
            _known[key] = entry_of(compiled), (None,) * (len(kernel.arg_names) - len(arguments))
        return
    entry((*grid, 1, 1)[:3], entry.stream_of(index), (*passed, *constants), False)  # pyrefly: ignore[bad-argument-type]


def _may_run(entry: Entry, index: int | None) -> bool:
    """Whether an entry may be called for a device, or the public way must be taken."""
    return not entry.watched and torch.cuda.current_device() == index


class Launch:
    """A kernel with everything but its tensors, which come first, and the numbers behind them that change.

    Those it must not be compiled for, and they must be below 2^31. Made once for all tensors of some sizes, it looks at
    nothing but where they lie and of what type they are, and keeps none of them. One with `launch_pdl` may start before
    the launch in front of it has ended.
    """

    __slots__ = ("_entries", "_index", "_kernel", "_numbers", "_options", "_overlaps")

    def __init__(self, kernel: Any, device: torch.device, *numbers: int | float, **options: Any) -> None:
        self._kernel, self._index, self._numbers, self._options = kernel, device.index, numbers, options
        self._overlaps = bool(options.get("launch_pdl"))
        self._entries: dict[tuple[object, ...], tuple[Entry | None, tuple[object, ...]]] = {}

    def __call__(self, grid: Grid, tensors: Sequence[Tensor], *changing: int) -> None:
        """Run it on the current stream."""
        places = [x.data_ptr() for x in tensors]
        key = *[x.dtype for x in tensors], *[place % 16 for place in places]
        entry, rest = self._entries.get(key, (None, ()))
        if entry is not None and _may_run(entry, self._index):
            entry(grid, entry.stream_of(self._index), (*places, *changing, *rest), self._overlaps)
            return
        warmup.finish()
        arguments = *tensors, *changing, *self._numbers
        compiled = self._kernel[grid](*arguments, **self._options)
        if compiled is not None and key not in self._entries:
            assert {*range(len(tensors), len(tensors) + len(changing))} <= {*_plain_places(self._kernel)}
            # What is compiled in is not looked at, but has its place.
            rest = *self._numbers, *(None,) * (len(self._kernel.arg_names) - len(arguments))
            self._entries[key] = entry_of(compiled), rest


Shape = tuple[int, ...]


class Room:
    """Tensors of one type in one piece of memory: on a GPU an allocation takes longer than a view, and that than none.

    Each has a name and a shape, and where it does not lie closely how far apart what it holds lies; all of it is within
    as many times its first stride as its first dimension is long.
    """

    __slots__ = ("_device", "_dtype", "_nothing", "_parts", "total")

    def __init__(
        self, dtype: torch.dtype, device: torch.device, shapes: dict[str, Shape], apart: dict[str, Shape] | None = None
    ) -> None:
        self._dtype, self._device = dtype, device
        self.total = 0
        """Numbers that it holds."""
        self._parts: dict[str, tuple[Shape, Shape, int]] = {}
        for name, shape in shapes.items():
            closely = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
            own = closely if apart is None else apart.get(name, closely)
            self._parts[name] = shape, own, self.total
            self.total += -(-shape[0] * own[0] // ALIGNED) * ALIGNED
        empty = {name: shape for name, shape in shapes.items() if not math.prod(shape)}
        self._nothing = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in empty.items()}

    def begin(self, *names: str) -> tuple[int, ...]:
        """Where tensors begin, for kernels that are told the memory alone."""
        return tuple(self._parts[name][2] for name in names)

    def made(self) -> Tensor:
        """The memory, unwritten."""
        return torch.empty(self.total, dtype=self._dtype, device=self._device)

    def tensor(self, memory: Tensor, name: str) -> Tensor:
        """One of the tensors in such memory."""
        nothing = self._nothing.get(name)
        return memory.as_strided(*self._parts[name]) if nothing is None else nothing

    def __call__(self) -> list[Tensor]:
        """All tensors, unwritten."""
        memory = self.made()
        return [memory.as_strided(*part) for part in self._parts.values()]
