"""Tensors that share one allocation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGNED = 128
"""Alignment of sub-tensors inside an arena, in elements."""

Shape = tuple[int, ...]


class Arena:
    """Tensors of one dtype in one allocation. On a GPU an allocation costs more host time than a view.

    Each tensor has a name, a shape and, unless it is contiguous, strides; its elements must fit its first stride times
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
