"""Memory for received rows: free memory, reusable buffers, and callbacks that release memory under pressure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.memory_budget import free_bytes

FRACTION = 0.5
"""Share of the free memory for received rows; the rest is for the computation on them."""

_callbacks: list[Callable[[], bool]] = []


def free_on(device: torch.device) -> int:
    """Free bytes of a device, -1 if unknown."""
    try:
        return free_bytes(device)
    except ValueError:
        return -1


class CallbackHandle(NamedTuple):
    """Handle of a registered callback."""

    callback: Callable[[], bool]

    def remove(self) -> None:
        """Unregister the callback."""
        if self.callback in _callbacks:
            _callbacks.remove(self.callback)


def on_pressure(callback: Callable[[], bool]) -> CallbackHandle:
    """Register a callback for memory pressure; it releases memory and returns whether it released any."""
    _callbacks.append(callback)
    return CallbackHandle(callback)


def relieve() -> bool:
    """Run all callbacks and empty the caching allocator; returns whether a callback released memory."""
    released = [callback() for callback in tuple(_callbacks)]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return any(released)


class Arenas:
    """Receive buffers shared by all layers, as large as the largest exchange.

    A buffer is reused once no tensor refers to its storage. While all buffers are in use, `take` allocates.
    """

    def __init__(self, count: int = 2) -> None:
        self.count, self._buffers = count, list[Tensor]()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised tensor, in a buffer if one is free."""
        size = torch.Size(shape).numel() * dtype.itemsize
        free = [buffer for buffer in self._buffers if buffer.device == device and _unused(buffer)]
        fitting = next((buffer for buffer in free if buffer.numel() >= size), None)
        if fitting is None:
            if free:
                # A buffer that is too small is released first, so that both are never in memory at once.
                self._buffers = [buffer for buffer in self._buffers if buffer is not free[0]]
                free.clear()
            fitting = torch.empty(size, dtype=torch.uint8, device=device)
            if len(self._buffers) < self.count:
                self._buffers.append(fitting)
        return fitting[:size].view(dtype).view(shape)

    def drop(self) -> bool:
        """Release all buffers; returns whether there were any. For `on_pressure`."""
        any_held = self.nbytes > 0
        self._buffers.clear()
        return any_held

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Receive into these buffers inside the context."""
        before = _lent.set(self)
        try:
            yield
        finally:
            _lent.reset(before)


_lent: ContextVar[Arenas | None] = ContextVar("arenas", default=None)


def _unused(buffer: Tensor) -> bool:
    """Whether no other tensor shares the storage."""
    storage = buffer.untyped_storage()
    # The tensor and `storage` itself.
    return torch._C._storage_Use_Count(storage._cdata) == 2


def receive_buffer(like: Tensor, rows: int) -> Tensor:
    """Uninitialised tensor for `rows` rows of the width and dtype of `like`."""
    shape, arenas = (rows, like.shape[1]), _lent.get()
    return like.new_empty(shape) if arenas is None else arenas.take(shape, like.dtype, like.device)


shared_arenas = Arenas()
"""Arenas of all modules in this process."""
on_pressure(shared_arenas.drop)
