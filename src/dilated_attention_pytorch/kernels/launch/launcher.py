"""Launches of plain Triton kernels at little more than the driver's own cost.

Triton's public launch binds, inspects and looks up every argument in every call, which takes as long as a short kernel
runs; a training step of a learned layer has dozens of those. Here a launch is cached by the properties that Triton
specializes a kernel on, and a repeated launch calls the compiled entry directly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import warmup
from .triton_abi import Entry, Grid, entry_of

CACHE_SIZE = 4096
"""Most cached launches, and most prepared launches of each kind."""
ALIGNED = 128
"""Alignment of sub-tensors inside an arena, in elements."""

_cache: dict[tuple[object, ...], tuple[Entry | None, tuple[None, ...]]] = {}
_unspecialized: dict[int, tuple[tuple[int, ...], Any]] = {}
"""Indices of the arguments that a kernel is not specialized on, and the kernel, by the kernel's id.

Hashing a kernel hashes its source, so the key is its id; the reference to the kernel keeps the id valid."""


def _unspecialized_of(kernel: Any) -> tuple[int, ...]:
    """Indices of the arguments that a kernel is not specialized on, except for their width of 32 or 64 bits."""
    cached = _unspecialized.get(id(kernel))
    if cached is None:
        indices = (index for index, one in enumerate(getattr(kernel, "params", ())) if one.do_not_specialize)
        cached = _unspecialized[id(kernel)] = tuple(indices), kernel
    return cached[0]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run `kernel[grid](*arguments, **options)`. The first argument is a tensor; only constants are passed by name."""
    passed: list[Any] = []
    specialization: list[object] = []
    for one in arguments:
        if isinstance(one, Tensor):
            address = one.data_ptr()
            passed.append(address)
            specialization.append((one.dtype, address % 16))
        else:
            passed.append(one)
            # The compiler treats all floats alike; integers may be specialized as 1 or as multiples of 16.
            specialization.append(float if isinstance(one, float) else one)
    for index in _unspecialized_of(kernel):
        if specialization[index] is not float:
            specialization[index] = arguments[index] >= 2**31
    device = arguments[0].device.index
    key = (id(kernel), device, *options, *options.values(), *specialization)
    entry, constants = _cache.get(key, (None, ()))
    if entry is None or not _may_run(entry, device):
        warmup.finish()
        compiled = kernel[grid](*arguments, **options)
        if compiled is not None and key not in _cache:
            if len(_cache) >= CACHE_SIZE:
                _cache.clear()
            # The entry ignores arguments that are compiled in, but expects their slots.
            _cache[key] = entry_of(compiled), (None,) * (len(kernel.arg_names) - len(arguments))
        return
    entry((*grid, 1, 1)[:3], entry.stream_of(device), (*passed, *constants), False)  # pyrefly: ignore[bad-argument-type]


def _may_run(entry: Entry, device: int | None) -> bool:
    """Whether an entry may be called on a device; otherwise the public launch is required."""
    return not entry.has_hooks and torch.cuda.current_device() == device


class Launch:
    """A kernel with all of its arguments except tensors, which come first, and the varying integers behind them.

    The kernel must not be specialized on the varying integers, which must be below 2^31. A launch is built once for
    tensors of given sizes; a call reads their addresses and dtypes alone and holds no reference to them. A number of
    None stands for a tensor that the kernel is compiled without. With `launch_pdl` the kernel may start before the
    launch in front of it has ended.
    """

    __slots__ = ("_device", "_entries", "_kernel", "_numbers", "_options", "_overlaps")

    def __init__(self, kernel: Any, device: torch.device, *numbers: int | float | None, **options: Any) -> None:
        self._kernel, self._device, self._numbers, self._options = kernel, device.index, numbers, options
        self._overlaps = bool(options.get("launch_pdl"))
        self._entries: dict[tuple[object, ...], tuple[Entry | None, tuple[object, ...]]] = {}

    def __call__(self, grid: Grid, tensors: Sequence[Tensor], *varying: int) -> None:
        """Run the kernel on the current stream."""
        addresses = [x.data_ptr() for x in tensors]
        key = *[x.dtype for x in tensors], *[address % 16 for address in addresses]
        entry, rest = self._entries.get(key, (None, ()))
        if entry is not None and _may_run(entry, self._device):
            entry(grid, entry.stream_of(self._device), (*addresses, *varying, *rest), self._overlaps)
            return
        warmup.finish()
        arguments = *tensors, *varying, *self._numbers
        compiled = self._kernel[grid](*arguments, **self._options)
        if compiled is not None and key not in self._entries:
            assert {*range(len(tensors), len(tensors) + len(varying))} <= {*_unspecialized_of(self._kernel)}
            # The entry ignores arguments that are compiled in, but expects their slots.
            rest = *self._numbers, *(None,) * (len(self._kernel.arg_names) - len(arguments))
            self._entries[key] = entry_of(compiled), rest


Shape = tuple[int, ...]


class Arena:
    """Tensors of one dtype in one allocation. On a GPU an allocation costs more host time than a view.

    Each tensor has a name, a shape and, unless it is contiguous, strides; it must lie within its first stride times
    the size of its first dimension.
    """

    __slots__ = ("_device", "_dtype", "_empty", "_parts", "total")

    def __init__(
        self, dtype: torch.dtype, device: torch.device, shapes: dict[str, Shape], apart: dict[str, Shape] | None = None
    ) -> None:
        self._dtype, self._device = dtype, device
        self.total = 0
        """Size of the arena in elements."""
        self._parts: dict[str, tuple[Shape, Shape, int]] = {}
        for name, shape in shapes.items():
            contiguous = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            strides = contiguous if apart is None else apart.get(name, contiguous)
            self._parts[name] = shape, strides, self.total
            self.total += -(-shape[0] * strides[0] // ALIGNED) * ALIGNED
        empty = {name: shape for name, shape in shapes.items() if not math.prod(shape)}
        self._empty = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in empty.items()}

    def begin(self, *names: str) -> tuple[int, ...]:
        """Offsets of tensors in elements, for kernels that receive the whole arena."""
        return tuple(self._parts[name][2] for name in names)

    def made(self) -> Tensor:
        """Allocate the arena, uninitialised."""
        return torch.empty(self.total, dtype=self._dtype, device=self._device)

    def tensor(self, memory: Tensor, name: str) -> Tensor:
        """View of one tensor in an allocated arena."""
        empty = self._empty.get(name)
        return memory.as_strided(*self._parts[name]) if empty is None else empty

    def __call__(self) -> list[Tensor]:
        """Allocate the arena and return a view of every tensor, uninitialised."""
        memory = self.made()
        return [memory.as_strided(*part) for part in self._parts.values()]
