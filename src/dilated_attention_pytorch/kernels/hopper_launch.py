"""Launching a compiled Gluon kernel for the price of the driver's own launch.

The public way prepares every argument anew in Python: 60 microseconds for a kernel with four TMA descriptors, more than
a short kernel runs. Here descriptors are kept by address, and triton's compiled entry is called with what it expects.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .hopper_work import Strides

Described = tuple[object, ...]
"""A descriptor as the entry takes it: the encoded map, then sizes and strides."""

MAPS_A_LAYOUT = 256
"""Descriptors kept for one place among the arguments; addresses repeat, as the allocator hands out the same ones."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
"""How every kernel is compiled; fused multiply-add is asked for by name, as its default differs between releases."""

_counters: dict[tuple[int, int], Tensor] = {}
_compiled: dict[tuple[object, ...], tuple[Any, Entry | None]] = {}


def tma_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a (B, H, N, D) tensor that TMA accepts."""
    # A dimension of size one is never stepped over, but its stride must still be a legal one.
    d = tensor.shape[-1]
    return (*(stride if size > 1 else d for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False)), 1)


class Box(NamedTuple):
    """Memory of a (B, H, N, D) tensor as a TMA descriptor sees it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int = 0
    """Bytes from the tensor's beginning to the box's."""


def boxes_of(tensor: Tensor, axis: Strides | None) -> tuple[Box, Box | None]:
    """A tensor as its own box; on a strided axis as two (B, H, residues, rows of each, D).

    The first has the residues with fewer rows, the second those with one more, where there are any; neither reaches out
    of the tensor.
    """
    strides = tma_strides(tensor)
    if axis is None:
        return Box(tuple(tensor.shape), strides), None
    batch, heads, n, d = tensor.shape
    step = strides[2]
    strides = *strides[:2], step, axis.rate * step, 1
    fewer, rows = axis.rate - axis.longer, n // axis.rate
    short = Box((batch, heads, fewer, rows, d), strides, axis.longer * step * tensor.element_size())
    long = Box((batch, heads, axis.longer, rows + 1, d), strides)
    # A descriptor must not be empty; one that would be is never used.
    return (short if rows else long), (long if axis.longer else None)


class _Place(NamedTuple):
    """Memory from an address on, as a descriptor asks for it."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def describe(tensor: Tensor, rows: int, axis: Strides | None = None) -> tuple[Any, Any]:
    """TMA descriptors of a (B, H, N, D) tensor that move `rows` rows of one head, for the two of `boxes_of`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    d = tensor.shape[-1]

    def described(box: Box) -> Any:
        layout = tile_layout(rows, d, tensor.dtype, len(box.shape))
        block = [*(1,) * (len(box.shape) - 2), rows, d]
        base = _Place(tensor.data_ptr() + box.begin, tensor.dtype)
        return TensorDescriptor(base, list(box.shape), list(box.strides), block, layout)

    short, long = boxes_of(tensor, axis)
    return described(short), None if long is None else described(long)


@lru_cache(maxsize=64)
def tile_layout(rows: int, d: int, dtype: torch.dtype, rank: int = 4) -> object:
    """How a tile moved by a descriptor of that rank lies in shared memory."""
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([*(1,) * (rank - 2), rows, d], element)


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

    def described(self, place: int, address: int, box: Box) -> Described:
        """The descriptor argument number `place` for a tensor at that address, seen as that box."""
        meta, kept = self._places[place]
        key = address, box
        found = kept.get(key)
        if found is None:
            if len(kept) >= MAPS_A_LAYOUT:
                kept.clear()
            # The element types of the host and of the device are numbered differently.
            number = {8: 10, 9: 8, 10: 9}.get(meta["elem_type"], meta["elem_type"])
            shape, strides = box.shape, box.strides
            encoded = self._describe(
                address + box.begin, meta["swizzle"], meta["elem_size"], number, meta["block_size"], shape, strides, 0
            )
            found = kept[key] = (encoded, *shape, *strides)
        return found

    def __call__(self, grid: int, stream: int, *arguments: object) -> None:
        self._launch(grid, 1, 1, stream, self._function, *self._between, *arguments)


class Maps:
    """Descriptor arguments of tensors of one layout, kept by where the tensors lie."""

    def __init__(self, boxes: tuple[tuple[Box, Box | None], ...]) -> None:
        self.boxes = boxes
        self._kept: dict[tuple[int, ...], list[object]] = {}

    def __call__(self, entry: Entry, *tensors: Tensor) -> list[object]:
        """Two for each tensor; None in place of a second box that there is not."""
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        found = self._kept.get(addresses)
        if found is None:
            if len(self._kept) >= MAPS_A_LAYOUT:
                self._kept.clear()
            found = self._kept[addresses] = []
            place = 0
            for address, pair in zip(addresses, self.boxes, strict=True):
                for box in pair:
                    if box is None:
                        found.append(None)
                    else:
                        found += entry.described(place, address, box)
                        place += 1
        return found


def entry_of(compiled: Any) -> Entry | None:
    """The entry of a compiled kernel, or None when this triton is not one whose insides are known."""
    import triton

    if not triton.__version__.startswith("3.6."):
        return None
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    return Entry(compiled)


def launch(kernel: Any, key: tuple[object, ...], grid: int, arguments: tuple[Any, ...], **options: object) -> None:
    """Run a kernel, going past the argument inspection of `triton.jit` once it has been compiled for `key`.

    The kernels specialize on nothing but types and their constants, so `key` holds those.
    """
    compiled, entry = _compiled.get(key, (None, None))
    if compiled is None:
        compiled = kernel[(grid,)](*arguments, **options)
        _compiled[key] = compiled, entry_of(compiled)
    elif entry is None or entry.watched:
        compiled[(grid, 1, 1)](*arguments)
    else:
        flat: list[Any] = []
        place = 0
        for argument in arguments:
            if isinstance(argument, Tensor):
                flat.append(argument.data_ptr())
            elif hasattr(argument, "block_shape"):
                box = Box(tuple(argument.shape), tuple(argument.strides))
                flat += entry.described(place, argument.base.data_ptr(), box)
                place += 1
            else:
                flat.append(argument)
        entry(grid, entry.stream_of(torch.cuda.current_device()), *flat)


def compiled_entry(key: tuple[object, ...]) -> Entry | None:
    """The entry of the kernel that `launch` compiled for a key."""
    return _compiled[key][1]
