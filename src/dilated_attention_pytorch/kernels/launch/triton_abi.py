"""Private interfaces of Triton. No other module of the library uses any.

A kernel is launched past Triton's own argument handling, by the function that Triton compiled for it. Triton 3.6
compiles a C launcher for each signature and takes the kernel's arguments one by one; releases from 3.7 on have one
launcher, which takes them as a tuple together with annotations of the signature. On other releases kernels are launched
through Triton's public interface.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

Grid = tuple[int, int, int]

MOST_COMPILERS = 8
"""Most kernels compiled at a time."""


class Box(NamedTuple):
    """Memory of a (B, H, N, D) tensor as a TMA descriptor sees it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int = 0
    """Offset of the box in the tensor, in bytes."""


class Entry:
    """Compiled entry of one kernel, for releases with one launcher."""

    __slots__ = ("_before", "_compiled", "_describe", "_descriptors", "_hooks", "_launch", "_runtime", "stream_of")

    def __init__(self, compiled: Any) -> None:
        from triton import knobs
        from triton.runtime import driver

        active: Any = driver.active
        # From Triton 3.8 on, a compiled kernel that is freed unloads its module.
        self._compiled = compiled
        self._runtime = knobs.runtime
        self._hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        self.stream_of = active.get_current_stream
        self._launch, self._describe, self._descriptors, rest = self._private(compiled, active.utils)
        function = compiled.function, compiled.run.launch_cooperative_grid
        self._before = [(*function, overlaps, *rest) for overlaps in (False, True)]

    def _private(self, compiled: Any, utils: Any) -> tuple[Any, Any, Any, tuple[Any, ...]]:
        """Launcher, encoder of descriptors, their metadata, and arguments in front of the kernel's."""
        descriptors = getattr(compiled.metadata, "tensordesc_meta", None) or []
        # No launch metadata, hooks or scratch memory.
        rest = compiled.packed_metadata, *(None,) * 5, compiled.run.arg_annotations, compiled.run.kernel_signature
        return utils.launch, utils.fill_tma_descriptor_tiled, descriptors, rest

    @property
    def has_hooks(self) -> bool:
        """Whether launch hooks are installed; then the public launch is required."""
        (enter, leave), runtime = self._hooks, self._runtime
        replaced = runtime.launch_enter_hook is not enter or runtime.launch_exit_hook is not leave
        return replaced or bool(enter.calls or leave.calls)

    def described(self, index: int, address: int, box: Box) -> tuple[object, ...]:
        """Descriptor `index` of a box of the tensor at `address`: the encoded descriptor, then sizes and strides."""
        meta = self._descriptors[index]
        # Host and device number the element types differently.
        number = {8: 10, 9: 8, 10: 9}.get(meta["elem_type"], meta["elem_type"])
        encoded = self._describe(
            address + box.begin, meta["swizzle"], meta["elem_size"], number, meta["block_size"], *box[:2], 0
        )
        return encoded, *box.shape, *box.strides

    def __call__(self, grid: Grid, stream: int, arguments: tuple[object, ...], overlaps: bool) -> None:
        self._launch(*grid, stream, *self._before[overlaps], arguments)


class SignatureEntry(Entry):
    """Compiled entry of one kernel, for releases with a launcher for each signature."""

    __slots__ = ()

    def _private(self, compiled: Any, utils: Any) -> tuple[Any, Any, Any, tuple[Any, ...]]:
        wrapped = _enclosed(compiled.run.launch)
        launcher = wrapped.get("launcher", compiled.run.launch)
        rest = None, None, compiled.packed_metadata, None, None, None
        return launcher, utils.fill_tma_descriptor, wrapped.get("tensordesc_meta", []), rest

    def __call__(self, grid: Grid, stream: int, arguments: tuple[object, ...], overlaps: bool) -> None:
        self._launch(*grid, stream, *self._before[overlaps], *arguments)


RELEASES: dict[tuple[int, int], type[Entry]] = {(3, 6): SignatureEntry, (3, 7): Entry, (3, 8): Entry, (3, 9): Entry}
"""Supported releases."""


def entry_class() -> type[Entry] | None:
    """Class of entries for the installed release of Triton, or None if it is not supported."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return None if torch.version.hip else RELEASES.get((int(major), int(minor)))


def why_not() -> str | None:
    """Reason why kernels are launched through Triton's public interface, or None."""
    if entry_class() is not None:
        return None
    import triton

    first, *_, last = (".".join(map(str, release)) for release in RELEASES)
    found = f"{triton.__version__}{' for ROCm' * bool(torch.version.hip)}"
    return f"direct launches need Triton {first} to {last} for CUDA, got {found}; every launch takes more host time"


def entry_of(compiled: Any) -> Entry | None:
    """Entry of a compiled kernel, or None if it must be launched through Triton's public interface."""
    make, launcher = entry_class(), compiled.run
    if make is None or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    return None if getattr(launcher, "gsan_enabled", False) else make(compiled)


class Compilers(ThreadPoolExecutor):
    """Thread pool for compiling kernels.

    On supported releases of Triton, kernels are traced one at a time: tracing runs in Python, so concurrent traces
    would all end late and delay the work outside of Python. The C compiler, which takes half a second for the launcher
    of a signature, runs beside the trace.
    """

    def __init__(self, kernels: int) -> None:
        # Twice the number of kernels, as half of the threads wait for the C compiler.
        super().__init__(2 * min(kernels, os.cpu_count() or 1, MOST_COMPILERS))
        self._trace_lock = Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        source, entry = _enclosed(fn).get("src"), entry_class()
        if source is None or entry is None:
            return super().submit(fn, *args, **kwargs)
        trace = source.make_ir

        def trace_in_turn(*given: Any) -> Any:
            with self._trace_lock:
                return trace(*given)

        source.make_ir = trace_in_turn
        compiling = super().submit(fn, *args, **kwargs)
        if entry is SignatureEntry:
            super().submit(make_launcher, source)
        return compiling


def make_launcher(source: Any) -> None:
    """Compile Triton's launcher of a signature, which Triton caches by the types of the arguments."""
    from triton.runtime import driver

    descriptors = sum(str(kind).startswith("tensordesc") for kind in source.signature.values())
    scratch = (f"{kind}_scratch_{what}" for kind in ("global", "profile") for what in ("size", "align"))
    unknown = dict.fromkeys((*scratch, "launch_cooperative_grid", "launch_pdl"))
    active: Any = driver.active
    active.launcher_cls(source, SimpleNamespace(tensordesc_meta=[{}] * descriptors, **unknown))


def hash_compiler(device: torch.device) -> None:
    """Hash Triton's files; Triton caches the result."""
    if entry_class() is not None:
        from triton.runtime.cache import triton_key

        triton_key()


def make_driver(device: torch.device) -> None:
    """Compile Triton's driver, and query the version of the assembler."""
    from triton.runtime import driver

    if driver.active is not None and entry_class() is not None:
        from triton.backends.nvidia.compiler import get_ptxas_version

        major, minor = torch.cuda.get_device_capability(device)
        get_ptxas_version(10 * major + minor)


def _enclosed(function: Any) -> dict[str, Any]:
    """Closure variables of a function, by name."""
    cells = getattr(function, "__closure__", None)
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells or (), strict=True)}
