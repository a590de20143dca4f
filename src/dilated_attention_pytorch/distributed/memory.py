"""Memory for what ranks receive: how much every rank has, buffers that are used again, and who gives way first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.budget import free_bytes

FRACTION = 0.5
"""Of the free memory, what received rows may take; the rest is for what is computed from them."""

_callbacks: list[Callable[[], bool]] = []


def free_on(device: torch.device) -> int:
    """Free bytes of a device, -1 where they are not known."""
    try:
        return free_bytes(device)
    except ValueError:
        return -1


class Handle(NamedTuple):
    """Takes a callback back."""

    callback: Callable[[], bool]

    def remove(self) -> None:
        """No longer call it."""
        if self.callback in _callbacks:
            _callbacks.remove(self.callback)


def on_pressure(callback: Callable[[], bool]) -> Handle:
    """Call this when memory runs short; it gives memory back and says whether it had any to give."""
    _callbacks.append(callback)
    return Handle(callback)


def relieve() -> bool:
    """Ask everybody for memory; whether anything was given. The caching allocator gives back what it holds."""
    given = [callback() for callback in tuple(_callbacks)]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return any(given)


def least_free(device: torch.device, group: dist.ProcessGroup | None = None) -> int | None:
    """Free bytes of the poorest rank, None where one does not know. Collective, the same on every rank.

    `receive_budget=int(FRACTION * least)` makes an exchange fit everywhere.
    """
    # Transport takes its buffers from this file.
    from .transport import wire_device

    least = torch.tensor([free_on(device)], device=wire_device(group))
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return int(least) if int(least) >= 0 else None


class Arenas:
    """Buffers that received rows lie in, used again by all layers; the largest plan decides their size.

    A buffer is given out again once no tensor lies in it. Who comes while all are taken gets memory of its own.
    """

    def __init__(self, count: int = 2) -> None:
        self.count, self._buffers = count, list[Tensor]()

    @property
    def nbytes(self) -> int:
        """What they hold now."""
        return sum(buffer.numel() for buffer in self._buffers)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor, in a buffer if one is free."""
        size = torch.Size(shape).numel() * dtype.itemsize
        free = [buffer for buffer in self._buffers if buffer.device == device and _unused(buffer)]
        fitting = next((buffer for buffer in free if buffer.numel() >= size), None)
        if fitting is None:
            if free:
                # One that became too small is let go first, so that both need not be there at once.
                self._buffers = [buffer for buffer in self._buffers if buffer is not free[0]]
                free.clear()
            fitting = torch.empty(size, dtype=torch.uint8, device=device)
            if len(self._buffers) < self.count:
                self._buffers.append(fitting)
        return fitting[:size].view(dtype).view(shape)

    def drop(self) -> bool:
        """Let go of all buffers; whether there were any. For `on_pressure`."""
        held = self.nbytes > 0
        self._buffers.clear()
        return held

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Receive into these buffers meanwhile."""
        before = _lent.set(self)
        try:
            yield
        finally:
            _lent.reset(before)


_lent: ContextVar[Arenas | None] = ContextVar("arenas", default=None)


def _unused(buffer: Tensor) -> bool:
    """Whether no tensor but this one shares the memory."""
    storage = buffer.untyped_storage()
    # The tensor and `storage` itself.
    return torch._C._storage_Use_Count(storage._cdata) == 2


def receive_buffer(like: Tensor, rows: int) -> Tensor:
    """Where `rows` rows as wide as those of `like` are received."""
    shape, arenas = (rows, like.shape[1]), _lent.get()
    return like.new_empty(shape) if arenas is None else arenas.take(shape, like.dtype, like.device)


shared_arenas = Arenas()
"""Those of all modules in this process."""
on_pressure(shared_arenas.drop)
