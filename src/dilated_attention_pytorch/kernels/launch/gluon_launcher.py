"""Launches of sequences of Gluon kernels at the cost of the driver's own launch.

Triton's public launch prepares every argument in Python in every call: 60 microseconds for a kernel with four TMA
descriptors, more than a short kernel runs. Here whole argument lists are cached by the addresses in them, which repeat
because the allocator reuses memory, and Triton's compiled entry is called directly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hopper.lowering import Strides
from . import warmup
from .triton_abi import Box, Entry, Grid, compiles_launchers, enclosed, entry_of, knows_triton

CACHED_ADDRESSES = 256
"""Most cached argument lists of a sequence of launches."""
CACHED_KERNELS = 1024
"""Most cached kernels, with the sizes that a plain Triton kernel is specialized on; Triton itself evicts none."""
MOST_COMPILERS = 8
"""Most kernels compiled at a time."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
"""Compiler options of every kernel. Fused multiply-add is explicit, as its default differs between releases."""

Tensors = tuple[Tensor, ...]

_NO_SWITCH = nullcontext()
_sequence = Lock()
"""Lock of a sequence of launches. Launches of one call have separate counters and may overlap; a call of another thread
on the same stream uses the same counters and must not come between."""
_counters: dict[tuple[int, int], Tensor] = {}
_compiled: dict[tuple[object, ...], tuple[Any, Entry | None]] = {}


def tma_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a (B, H, N, D) tensor that TMA accepts."""
    # The stride of a dimension of size one is never used, but must be valid.
    d = tensor.shape[-1]
    return (*(stride if size > 1 else d for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False)), 1)


def boxes_of(tensor: Tensor, axis: Strides | None) -> tuple[Box, Box | None]:
    """Box of a tensor; on a strided axis two boxes (B, H, residues, rows per residue, D).

    The first box has the residues with fewer rows; the second, if any, the residues with one row more. Neither exceeds
    the tensor.
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
    # A descriptor must not be empty; an empty box is never read.
    return (short if rows else long), (long if axis.longer else None)


class _Address(NamedTuple):
    """Base address and dtype, as a `TensorDescriptor` reads them from a tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def describe(tensor: Tensor, rows: int, axis: Strides | None = None) -> tuple[Any, Any]:
    """TMA descriptors of the boxes of a (B, H, N, D) tensor, for tiles of `rows` rows of one head; see `boxes_of`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    d = tensor.shape[-1]

    def described(box: Box) -> Any:
        layout = tile_layout(rows, d, tensor.dtype, len(box.shape))
        block = [*(1,) * (len(box.shape) - 2), rows, d]
        base = _Address(tensor.data_ptr() + box.begin, tensor.dtype)
        return TensorDescriptor(base, list(box.shape), list(box.strides), block, layout)

    short, long = boxes_of(tensor, axis)
    return described(short), None if long is None else described(long)


def tile_layout(rows: int, d: int, dtype: torch.dtype, rank: int = 4) -> Any:
    """Shared-memory layout of a tile of a descriptor of the given rank."""
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([*(1,) * (rank - 2), rows, d], element)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which a device is the current one."""
    return _NO_SWITCH if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def item_counters(device: torch.device, count: int) -> Tensor:
    """`count` int32 counters, zero between launches: every kernel resets its own. Calls on one stream share them."""
    if torch.cuda.is_current_stream_capturing():
        # A captured call may be replayed beside any other, so it has its own counters.
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    counters = _counters.get(key)
    if counters is None or counters.numel() < count:
        counters = _counters[key] = torch.zeros(count, dtype=torch.int32, device=device)
    return counters


class TmaArg(NamedTuple):
    """Argument: TMA descriptors of a tensor of the call, for tiles of `rows` rows; see `boxes_of`."""

    slot: int
    rows: int
    axis: Strides | None = None


class PtrArg(NamedTuple):
    """Argument: pointer to a tensor of the call, or to memory inside it viewed as another dtype."""

    slot: int
    begin: int = 0
    """Offset in elements."""
    dtype: torch.dtype | None = None

    def of(self, tensors: Tensors) -> Tensor:
        tensor = tensors[self.slot]
        return tensor if self.dtype is None else tensor[self.begin :].view(self.dtype)


class GluonLaunch:
    """One kernel with all of its arguments except the addresses of the tensors of a call.

    `arguments` are `TmaArg`, `PtrArg`, tensors and numbers. Slots index the tensors of a call, whose layouts are those
    of `like`. A tensor of `like` among the arguments becomes the `PtrArg` of its slot; any other tensor is constant.
    `plain` kernels are Triton kernels, which are specialized on the alignment of pointers.

    A launch that `overlaps` may start before the overlapping launch in front of it has ended: a program of these
    kernels occupies a multiprocessor, so none is idle while the last items of the earlier launch run. Before
    `primitives.wait_for_launch` it must not touch memory that earlier launches write. The public launch never overlaps.
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
        arguments = tuple(PtrArg(slots[id(one)]) if id(one) in slots else one for one in arguments)
        self.overlaps = overlaps
        self._kernel, self._identity, self._arguments, self._options = kernel, identity, arguments, options
        self.grid = (grid, 1, 1) if isinstance(grid, int) else grid
        self._sizes = [tensor.element_size() for tensor in like]
        self._boxes = [boxes_of(like[one.slot], one.axis) for one in arguments if isinstance(one, TmaArg)]
        if plain:
            # A plain Triton kernel is specialized on the alignment of its pointers.
            staying = (one.data_ptr() % 16 == 0 for one in arguments if isinstance(one, Tensor))
            self._identity = *identity, *staying
        self._read = [one.slot for one in arguments if isinstance(one, PtrArg)] if plain else []

    def launch_public(self, *tensors: Tensor) -> None:
        """Run the kernel through Triton's public launch, which compiles it if needed."""
        key = self.key(tuple(tensor.data_ptr() for tensor in tensors))
        cached = _compiled.get(key)
        if cached is not None:
            cached[0][self.grid](*self._public_arguments(tensors))
            return
        if len(_compiled) >= CACHED_KERNELS:
            _compiled.clear()
        compiled = self._kernel[self.grid](*self._public_arguments(tensors), **self._options)
        _compiled[key] = compiled, entry_of(compiled)

    def compile(self, *tensors: Tensor) -> Any:
        """Compile the kernel without running it; return the compiled kernel or its future."""
        return self._kernel.warmup(*self._public_arguments(tensors), grid=self.grid, **self._options)

    def _public_arguments(self, tensors: Tensors) -> list[Any]:
        arguments: list[Any] = []
        for one in self._arguments:
            if isinstance(one, TmaArg):
                arguments += describe(tensors[one.slot], one.rows, one.axis)
            else:
                arguments.append(one.of(tensors) if isinstance(one, PtrArg) else one)
        return arguments

    def bind(self, addresses: tuple[int, ...]) -> tuple[Entry, tuple[object, ...]] | None:
        """Entry and arguments for tensors at the given addresses, or None if the public launch is required."""
        entry = _compiled.get(self.key(addresses), (None, None))[1]
        if entry is None:
            return None
        arguments: list[object] = []
        boxes, index = iter(self._boxes), 0
        for one in self._arguments:
            if isinstance(one, TmaArg):
                for box in next(boxes):
                    if box is None:
                        arguments.append(None)
                    else:
                        arguments += entry.described(index, addresses[one.slot], box)
                        index += 1
            elif isinstance(one, PtrArg):
                arguments.append(addresses[one.slot] + one.begin * self._sizes[one.slot])
            else:
                arguments.append(one.data_ptr() if isinstance(one, Tensor) else one)
        return entry, tuple(arguments)

    def key(self, addresses: tuple[int, ...]) -> tuple[object, ...]:
        """Cache key of the compiled kernel. Gluon kernels are specialized on types and constants alone."""
        return *self._identity, *(addresses[slot] % 16 == 0 for slot in self._read)


class _Compilers(ThreadPoolExecutor):
    """Thread pool for compiling kernels.

    On supported releases of Triton, kernels are traced one at a time: tracing runs in Python, so concurrent traces
    would all end late and delay the work outside of Python. The C compiler, which takes half a second for the launcher
    of a kernel, runs beside the trace.
    """

    def __init__(self, kernels: int) -> None:
        # Twice the number of kernels, as half of the threads wait for the C compiler.
        super().__init__(2 * min(kernels, os.cpu_count() or 1, MOST_COMPILERS))
        self._trace_lock = Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        source = enclosed(fn).get("src")
        if source is None or not knows_triton():
            return super().submit(fn, *args, **kwargs)
        trace = source.make_ir

        def trace_in_turn(*given: Any) -> Any:
            with self._trace_lock:
                return trace(*given)

        source.make_ir = trace_in_turn
        compiling = super().submit(fn, *args, **kwargs)
        if compiles_launchers():
            super().submit(_make_launcher, source)
        return compiling


def _make_launcher(source: Any) -> None:
    """Compile Triton's launcher of a kernel, which Triton caches by the types of the arguments."""
    from triton.runtime import driver

    descriptors = sum(str(kind).startswith("tensordesc") for kind in source.signature.values())
    scratch = (f"{kind}_scratch_{what}" for kind in ("global", "profile") for what in ("size", "align"))
    unknown = dict.fromkeys((*scratch, "launch_cooperative_grid", "launch_pdl"))
    active: Any = driver.active
    active.launcher_cls(source, SimpleNamespace(tensordesc_meta=[{}] * descriptors, **unknown))


def compile_together(launches: Sequence[GluonLaunch], tensors: Tensors) -> None:
    """Compile missing kernels on threads; most of the time of the compiler is spent outside of Python.

    A compilation error is raised when the kernel is launched.
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
    """Load a compiled kernel, or the kernel of a future, together with its launcher."""
    with on_device(device):
        _ = (compiled.result() if hasattr(compiled, "result") else compiled).run


class Launches:
    """Sequence of kernels on the tensors of a call; all are compiled before the first of them runs."""

    def __init__(self, device: torch.device, launches: list[GluonLaunch]) -> None:
        self._index = device.index
        self._launches = [launch for launch in launches if launch.grid[0]]
        self._cache: dict[tuple[int, ...], list[tuple[Grid, Entry, tuple[object, ...], bool]]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Run the kernels; every call passes tensors of the same layouts in the same order."""
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        bound_launches = self._cache.get(addresses)
        if bound_launches is None:
            bound_launches = self._bind(addresses)
        if not bound_launches:
            compile_together(self._launches, tensors)
        if not bound_launches or bound_launches[0][1].has_hooks:
            for launch in self._launches:
                launch.launch_public(*tensors)
            return
        stream = bound_launches[0][1].stream_of(self._index)
        with _sequence:
            for grid, entry, arguments, overlaps in bound_launches:
                entry(grid, stream, arguments, overlaps)

    def _bind(self, addresses: tuple[int, ...]) -> list[tuple[Grid, Entry, tuple[object, ...], bool]]:
        bound = [launch.bind(addresses) for launch in self._launches]
        if None in bound:
            return []
        if len(self._cache) >= CACHED_ADDRESSES:
            self._cache.clear()
        bound_launches = [
            (launch.grid, *one, launch.overlaps and before is not None and before.overlaps)
            for before, launch, one in zip((None, *self._launches), self._launches, bound, strict=False)
            if one is not None
        ]
        self._cache[addresses] = bound_launches
        return bound_launches
