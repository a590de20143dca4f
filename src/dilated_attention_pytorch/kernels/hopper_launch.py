"""Launching a compiled Gluon kernel for the price of the driver's own launch.

The public way prepares every argument anew in Python: 60 microseconds for a kernel with four TMA descriptors, more than
a short kernel runs. Here descriptors are kept by address, and triton's compiled entry is called with what it expects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Described = tuple[object, ...]
"""A descriptor as the entry takes it: the encoded map, then sizes and strides."""

MAPS_A_LAYOUT = 256
"""Descriptors kept for one place among the arguments; addresses repeat, as the allocator hands out the same ones."""

_counters: dict[tuple[int, int], Tensor] = {}


def item_counter(device: int, stream: int) -> Tensor:
    """An int32 zero that a kernel may count with, if it leaves a zero again; calls on one stream take turns at it."""
    if torch.cuda.is_current_stream_capturing():
        # A captured call may be replayed beside any other, so it brings a counter of its own.
        return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
    counter = _counters.get((device, stream))
    if counter is None:
        counter = _counters[device, stream] = torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
    return counter


class Entry:
    """The compiled entry of one kernel, for the releases of triton whose insides are known."""

    __slots__ = ("_between", "_describe", "_function", "_hooks", "_launch", "_places", "_runtime", "stream_of")

    def __init__(self, compiled: Any) -> None:
        from triton import knobs
        from triton.runtime import driver

        launcher = compiled.run
        wrapper = launcher.launch
        inner = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
        self._launch = inner["launcher"].cell_contents
        self._places = [(meta, {}) for meta in inner["tensordesc_meta"].cell_contents]
        self._function = compiled.function
        # No scratch memory, no record of the launch and no hooks.
        flags = launcher.launch_cooperative_grid, launcher.launch_pdl
        self._between = (*flags, None, None, compiled.packed_metadata, None, None, None)
        self._runtime = knobs.runtime
        self._hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        self._describe = driver.active.utils.fill_tma_descriptor
        self.stream_of = driver.active.get_current_stream

    @property
    def watched(self) -> bool:
        """Whether somebody asked to be told of launches; then the public way must be taken."""
        enter, leave = self._hooks
        runtime = self._runtime
        replaced = runtime.launch_enter_hook is not enter or runtime.launch_exit_hook is not leave
        return replaced or bool(enter.calls or leave.calls)

    def described(self, place: int, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Described:
        """The descriptor argument number `place` for a tensor of that address, shape and strides."""
        meta, kept = self._places[place]
        key = address, shape, strides
        found = kept.get(key)
        if found is None:
            if len(kept) >= MAPS_A_LAYOUT:
                kept.clear()
            # The element types of the host and of the device are numbered differently.
            number = {8: 10, 9: 8, 10: 9}.get(meta["elem_type"], meta["elem_type"])
            encoded = self._describe(
                address, meta["swizzle"], meta["elem_size"], number, meta["block_size"], shape, strides, 0
            )
            found = kept[key] = (encoded, *shape, *strides)
        return found

    def __call__(self, grid: int, stream: int, *arguments: object) -> None:
        self._launch(grid, 1, 1, stream, self._function, *self._between, *arguments)


def entry_of(compiled: Any) -> Entry | None:
    """The entry of a compiled kernel, or None when this triton is not one whose insides are known."""
    import triton

    if not triton.__version__.startswith("3.6."):
        return None
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    return Entry(compiled)
