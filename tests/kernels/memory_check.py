"""Bounds of every access of a Triton kernel in Triton's interpreter.

The interpreter reads and writes at addresses: an access outside of the memory of an argument returns or changes what
is stored there, and most tests would pass. Here an address carries the number of the argument from which it is derived
in the bits from 2^48 on, which arithmetic on addresses preserves. Every load, store and atomic compares its unmasked
addresses with the elements of that argument. Tensors of an arena are kept apart, and no access may fall between them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.runtime import interpreter

from dilated_attention_pytorch.kernels.launch.arena import ALIGNED, Arena

BITS = 48
"""Bits of an address, below the number of its argument."""
ADDRESS = np.uint64(2**BITS - 1)
LARGEST_MAP = 2**24
"""Most elements from the first to the last of a strided tensor whose gaps are checked."""
WHOLE = {"hidden_kernel": ("p_rows", "p_columns", "p_keep")}
"""Arguments by kernel that stand for the whole memory that they are views of: T of `hidden_kernel` is its size."""


class MemoryFault(AssertionError):
    """An access outside of its argument, or at an address that is no multiple of the size of an element."""


class Argument:
    """Elements that a kernel may access through one pointer."""

    def __init__(self, name: str, number: int, tensor: Tensor, whole: bool = False, arena: Arena | None = None) -> None:
        self.name, self.tensor, self.size = name, tensor, tensor.element_size()
        self.address = self.begin = tensor.data_ptr() + (number << BITS)
        last = sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
        elements = last + 1 if tensor.numel() else 0
        if whole:
            self.begin -= tensor.storage_offset() * self.size
            elements = tensor.untyped_storage().nbytes() // self.size
        self.end = self.begin + elements * self.size
        self.parts = [(tensor.shape, tensor.stride(), 0)] if arena is None else [*arena._parts.values()]
        strided = not whole and tensor.numel() < elements
        self.has_gaps = elements <= LARGEST_MAP and (strided or arena is not None)
        self.gaps: np.ndarray | None = None

    def in_gap(self, addresses: np.ndarray) -> np.ndarray:
        """Which addresses between the first and the last element belong to none."""
        if self.gaps is None:
            gaps = torch.ones((self.end - self.begin) // self.size, dtype=torch.bool)
            for part in self.parts:
                gaps.as_strided(*part).fill_(False)
            self.gaps = gaps.numpy()
        return self.gaps[(addresses - np.uint64(self.begin)) // np.uint64(self.size)]

    def outside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which addresses are no elements."""
        outside = (addresses < np.uint64(self.begin)) | (addresses + np.uint64(size) > np.uint64(self.end))
        if self.has_gaps:
            outside[~outside] = self.in_gap(addresses[~outside])
        return outside | (addresses % np.uint64(size) != 0)


class Launch:
    """A kernel that runs, with its pointers."""

    def __init__(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.executor, self.kernel = executor, executor.fn.__name__
        passed = dict(zip(executor.arg_names, args, strict=False)) | kwargs
        given = [(name, passed[name]) for name in executor.arg_names if name in passed]
        self.pointers = [x for pair in given if pair[0] not in executor.constexprs for x in pointers_in(*pair)]
        self.arguments = [Argument("", 0, torch.empty(0))]

    def add(self, tensor: Tensor) -> int:
        """Address of the next pointer, with its number."""
        number = len(self.arguments)
        name, passed = self.pointers[number - 1]
        arena = getattr(passed, "arena", None)
        self.arguments.append(Argument(name, number, tensor, name in WHOLE.get(self.kernel, ()), arena))
        return self.arguments[number].address

    def resolve(self, kind: str, addresses: np.ndarray, mask: np.ndarray | None, size: int) -> np.ndarray:
        """Addresses without argument numbers, for an access to elements of `size` bytes."""
        low, high = int(addresses.min()), int(addresses.max())
        argument = self.arguments[min(low >> BITS, len(self.arguments) - 1)]
        whole = argument.begin <= low and high + size <= argument.end and not (low | high) % size
        if not whole or (argument.has_gaps and argument.in_gap(addresses).any()):
            self.check(kind, addresses.ravel() if mask is None else addresses[mask], size)
        return addresses & ADDRESS

    def check(self, kind: str, addresses: np.ndarray, size: int) -> None:
        """Raise unless every address is the address of an element."""
        numbers = addresses >> np.uint64(BITS)
        for number in map(int, np.unique(numbers)):
            some = addresses[numbers == number]
            if not 0 < number < len(self.arguments):
                raise MemoryFault(f"{kind} at {int(some[0]):#x}, an address far from every argument; {self.place()}")
            argument = self.arguments[number]
            outside = argument.outside(some, size)
            if outside.any():
                tensor, first = argument.tensor, int(some[outside][0]) - argument.address
                shape, strides, count = tuple(tensor.shape), tensor.stride(), int(outside.sum())
                raise MemoryFault(
                    f"{kind} of {size} bytes at byte {first} of {argument.name}, and {count - 1} more, outside of "
                    f"{tensor.dtype} {shape} with strides {strides}; {self.place()}"
                )

    def place(self) -> str:
        """Kernel, program and line that run."""
        frame: FrameType | None = sys._getframe(1)
        skipped = __file__, str(Path(triton.__file__).parent)
        while frame is not None and frame.f_code.co_filename.startswith(skipped):
            frame = frame.f_back
        line = "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return f"{self.kernel}, program {interpreter.interpreter_builder.grid_idx}{line}"


class Accesses:
    """Wrapper of the compiled part of the interpreter, which checks every access first."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.running: list[Launch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)

    def load(self, at: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return self.compiled.load(self.running[-1].resolve("load", at, mask, dtype.itemsize), mask, other, dtype)

    def store(self, at: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        self.compiled.store(self.running[-1].resolve("store", at, mask, value.dtype.itemsize), value, mask)

    def atomic_rmw(self, op: Any, at: np.ndarray, value: np.ndarray, mask: np.ndarray, order: Any) -> np.ndarray:
        at = self.running[-1].resolve("atomic", at, mask, value.dtype.itemsize)
        return self.compiled.atomic_rmw(op, at, value, mask, order)

    def atomic_cas(self, at: np.ndarray, expected: np.ndarray, value: np.ndarray, order: Any) -> np.ndarray:
        at = self.running[-1].resolve("atomic", at, None, value.dtype.itemsize)
        return self.compiled.atomic_cas(at, expected, value, order)


def set_tensors_apart() -> None:
    """Leave unused memory behind every tensor of an arena, and note the arena with its memory."""
    initialize, allocate = Arena.__init__, Arena.made

    def initialize_apart(self: Arena, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        parts = enumerate(self._parts.items())
        self._parts = {name: (shape, strides, begin + at * ALIGNED) for at, (name, (shape, strides, begin)) in parts}
        self.total += ALIGNED * len(self._parts)

    def allocate_known(self: Arena) -> Tensor:
        memory = allocate(self)
        memory.arena = self
        return memory

    Arena.__init__, Arena.made = initialize_apart, allocate_known


def pointers_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Pointers in an argument, by name."""
    if hasattr(value, "data_ptr"):
        yield name, value
    elif hasattr(value, "block_shape"):
        yield f"the tensor of {name}", value.base
    elif isinstance(value, tuple):
        for at, one in enumerate(value):
            yield from pointers_in(f"{name}[{at}]", one)


def check_memory() -> None:
    """Check the accesses of kernels from now on."""
    set_tensors_apart()
    accesses = interpreter._interpreter = Accesses(interpreter._interpreter)
    execute, convert = interpreter.GridExecutor.__call__, interpreter._implicit_cvt

    def execute_checked(self: Any, *args: Any, **kwargs: Any) -> None:
        accesses.running.append(Launch(self, args, kwargs))
        try:
            execute(self, *args, **kwargs)
        finally:
            accesses.running.pop()

    def convert_numbered(arg: Any) -> Any:
        made = convert(arg)
        if hasattr(arg, "data_ptr"):
            made.handle.data[...] = accesses.running[-1].add(arg)
        return made

    interpreter.GridExecutor.__call__ = execute_checked
    interpreter._implicit_cvt = convert_numbered
