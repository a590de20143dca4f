"""Launching a compiled Gluon kernel for the price of the driver's own launch.

The public way prepares every argument anew in Python: 60 microseconds for a kernel with four TMA descriptors, more than
a short kernel runs. Here whole argument lists are kept by the addresses in them, which repeat, as the allocator hands
out the same ones, and triton's compiled entry is called with what it expects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hopper.lowering import Strides
from . import warmup
from .triton_abi import Box, Entry, Grid, compiles_launchers, enclosed, entry_of, knows_triton

KEPT_ADDRESSES = 256
"""Argument lists kept for one launch."""
KEPT_KERNELS = 1024
"""Compiled kernels kept, with the sizes a plain one was compiled for; triton itself forgets none."""
MOST_COMPILERS = 8
"""Kernels compiled at a time."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
"""How every kernel is compiled; fused multiply-add is asked for by name, as its default differs between releases."""

Tensors = tuple[Tensor, ...]

_HERE = nullcontext()
_turn = Lock()
"""Held while the launches of a call follow one another. They may overlap, for they count apart; a call of another
thread on the same stream counts in the same places, and must not come between."""
_counters: dict[tuple[int, int], Tensor] = {}
_compiled: dict[tuple[object, ...], tuple[Any, Entry | None]] = {}


def tma_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a (B, H, N, D) tensor that TMA accepts."""
    # A dimension of size one is never stepped over, but its stride must still be a legal one.
    d = tensor.shape[-1]
    return (*(stride if size > 1 else d for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False)), 1)


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
def tile_layout(rows: int, d: int, dtype: torch.dtype, rank: int = 4) -> Any:
    """How a tile moved by a descriptor of that rank lies in shared memory."""
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([*(1,) * (rank - 2), rows, d], element)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one, where it is not."""
    return _HERE if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def item_counters(device: torch.device, count: int) -> Tensor:
    """That many int32 zeros for kernels to count with, if each leaves a zero again; calls on one stream take turns."""
    if torch.cuda.is_current_stream_capturing():
        # A captured call may be replayed beside any other, so it brings counters of its own.
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    counters = _counters.get(key)
    if counters is None or counters.numel() < count:
        counters = _counters[key] = torch.zeros(count, dtype=torch.int32, device=device)
    return counters


class Moved(NamedTuple):
    """An argument: a tensor of the call that TMA moves so many rows at a time, as the two boxes of `boxes_of`."""

    slot: int
    rows: int
    axis: Strides | None = None


class Place(NamedTuple):
    """An argument: where a tensor of the call lies, or memory inside it, seen as another type."""

    slot: int
    begin: int = 0
    """In elements."""
    dtype: torch.dtype | None = None

    def of(self, tensors: Tensors) -> Tensor:
        tensor = tensors[self.slot]
        return tensor if self.dtype is None else tensor[self.begin :].view(self.dtype)


class Launch:
    """One kernel with all its arguments, but for where the tensors of a call lie.

    `arguments` are `Moved`, `Place`, tensors and numbers; slots count the tensors given with each call, whose layout is
    always that of `like`. A tensor that is one of `like` stands for its place, and any other stays where it is.

    One that `overlaps` may start before another such launch in front of it has ended: a program of these kernels has a
    whole multiprocessor, and so none stands idle while the last items of that one run. Until
    `primitives.wait_for_launch` it must not touch what those before it write. The public way knows nothing of it.
    """

    def __init__(
        self,
        kernel: Any,
        identity: tuple[object, ...],
        grid: int | Grid,
        arguments: tuple[Any, ...],
        like: Tensors,
        plain: bool = False,
        overlaps: bool = False,
        **options: object,
    ) -> None:
        slots = {id(tensor): slot for slot, tensor in enumerate(like)}
        arguments = tuple(Place(slots[id(one)]) if id(one) in slots else one for one in arguments)
        self.overlaps = overlaps
        self._kernel, self._identity, self._arguments, self._options = kernel, identity, arguments, options
        self.grid = (grid, 1, 1) if isinstance(grid, int) else grid
        self._sizes = [tensor.element_size() for tensor in like]
        self._boxes = [boxes_of(like[one.slot], one.axis) for one in arguments if isinstance(one, Moved)]
        if plain:
            # A plain triton kernel, compiled apart for the alignment of what it is given.
            staying = (one.data_ptr() % 16 == 0 for one in arguments if isinstance(one, Tensor))
            self._identity = *identity, *staying
        self._read = [one.slot for one in arguments if isinstance(one, Place)] if plain else []

    def publicly(self, *tensors: Tensor) -> None:
        """Run it as triton means it, compiled first where it has to be."""
        key = self.key(tuple(tensor.data_ptr() for tensor in tensors))
        known = _compiled.get(key)
        if known is not None:
            known[0][self.grid](*self._public_arguments(tensors))
            return
        if len(_compiled) >= KEPT_KERNELS:
            _compiled.clear()
        compiled = self._kernel[self.grid](*self._public_arguments(tensors), **self._options)
        _compiled[key] = compiled, entry_of(compiled)

    def compile(self, *tensors: Tensor) -> Any:
        """Have triton compile it without running it: what it gives, or will."""
        return self._kernel.warmup(*self._public_arguments(tensors), grid=self.grid, **self._options)

    def _public_arguments(self, tensors: Tensors) -> list[Any]:
        arguments: list[Any] = []
        for one in self._arguments:
            if isinstance(one, Moved):
                arguments += describe(tensors[one.slot], one.rows, one.axis)
            else:
                arguments.append(one.of(tensors) if isinstance(one, Place) else one)
        return arguments

    def settle(self, addresses: tuple[int, ...]) -> tuple[Entry, tuple[object, ...]] | None:
        """The entry and its arguments for tensors at those addresses, None where the public way must be taken."""
        entry = _compiled.get(self.key(addresses), (None, None))[1]
        if entry is None:
            return None
        arguments: list[object] = []
        boxes, place = iter(self._boxes), 0
        for one in self._arguments:
            if isinstance(one, Moved):
                for box in next(boxes):
                    if box is None:
                        arguments.append(None)
                    else:
                        arguments += entry.described(place, addresses[one.slot], box)
                        place += 1
            elif isinstance(one, Place):
                arguments.append(addresses[one.slot] + one.begin * self._sizes[one.slot])
            else:
                arguments.append(one.data_ptr() if isinstance(one, Tensor) else one)
        return entry, tuple(arguments)

    def key(self, addresses: tuple[int, ...]) -> tuple[object, ...]:
        """What a compiled kernel is known by; the Gluon kernels specialize on nothing but types and constants."""
        return *self._identity, *(addresses[slot] % 16 == 0 for slot in self._read)


class _Compilers(ThreadPoolExecutor):
    """Threads that kernels are compiled on.

    Where triton's insides are known, kernels are traced one after another: that is done in Python, so together none
    would be done before all of them are, and the first would be late for what is done outside of it. And a C compiler,
    which takes half a second for what launches a kernel, runs beside rather than after.
    """

    def __init__(self, kernels: int) -> None:
        # As many again wait for the other compiler, which is a process of its own.
        super().__init__(2 * min(kernels, os.cpu_count() or 1, MOST_COMPILERS))
        self._turn = Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        source = enclosed(fn).get("src")
        if source is None or not knows_triton():
            return super().submit(fn, *args, **kwargs)
        trace = source.make_ir

        def trace_in_turn(*given: Any) -> Any:
            with self._turn:
                return trace(*given)

        source.make_ir = trace_in_turn
        compiling = super().submit(fn, *args, **kwargs)
        if compiles_launchers():
            super().submit(_make_launcher, source)
        return compiling


def _make_launcher(source: Any) -> None:
    """Have triton make what launches a kernel, which it keeps by the types of arguments alone."""
    from triton.runtime import driver

    descriptors = sum(str(kind).startswith("tensordesc") for kind in source.signature.values())
    scratch = (f"{kind}_scratch_{what}" for kind in ("global", "profile") for what in ("size", "align"))
    unknown = dict.fromkeys((*scratch, "launch_cooperative_grid", "launch_pdl"))
    active: Any = driver.active
    active.launcher_cls(source, SimpleNamespace(tensordesc_meta=[{}] * descriptors, **unknown))


def compile_together(launches: Sequence[Launch], tensors: Tensors) -> None:
    """Compile on threads what is not compiled; most of the time of a compiler is spent outside of Python.

    A kernel that does not compile says so when it is launched.
    """
    import triton

    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    keyed = {launch.key(addresses): launch for launch in launches}
    lacking = [launch for key, launch in keyed.items() if key not in _compiled]
    if not lacking:
        return
    warmup.finish()
    with _Compilers(len(lacking)) as pool:
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            # Kernels of strided parts come last and take longest.
            compiling = [launch.compile(*tensors) for launch in reversed(lacking)]
        for one in dict.fromkeys(compiling):
            pool.submit(_make_ready, one, tensors[0].device)


def _make_ready(compiled: Any, device: torch.device) -> None:
    """Have triton load a kernel, or one compiled on a thread, with what launches it."""
    with on_device(device):
        _ = (compiled.result() if hasattr(compiled, "result") else compiled).run


class Launches:
    """Several kernels, one after another, on the tensors of a call; all are compiled before the first of them runs."""

    def __init__(self, device: torch.device, launches: list[Launch]) -> None:
        self._index = device.index
        self._launches = [launch for launch in launches if launch.grid[0]]
        self._kept: dict[tuple[int, ...], list[tuple[Grid, Entry, tuple[object, ...], bool]]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Run them; every call gives tensors of the same layouts in the same order."""
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        kept = self._kept.get(addresses)
        if kept is None:
            kept = self._settle(addresses)
        if not kept:
            compile_together(self._launches, tensors)
        if not kept or kept[0][1].watched:
            for launch in self._launches:
                launch.publicly(*tensors)
            return
        stream = kept[0][1].stream_of(self._index)
        with _turn:
            for grid, entry, arguments, overlaps in kept:
                entry(grid, stream, arguments, overlaps)

    def _settle(self, addresses: tuple[int, ...]) -> list[tuple[Grid, Entry, tuple[object, ...], bool]]:
        settled = [launch.settle(addresses) for launch in self._launches]
        if None in settled:
            return []
        if len(self._kept) >= KEPT_ADDRESSES:
            self._kept.clear()
        kept = [
            (launch.grid, *one, launch.overlaps and before is not None and before.overlaps)
            for before, launch, one in zip((None, *self._launches), self._launches, settled, strict=False)
            if one is not None
        ]
        self._kept[addresses] = kept
        return kept
