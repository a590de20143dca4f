"""Direct access to the compiled entry of a Triton kernel, past Triton's own argument handling.

Triton's private interfaces are used in this module alone. Triton 3.6 compiles a C launcher for each signature and takes
the kernel's arguments one by one; releases from 3.7 on have one launcher, which takes them as a tuple together with
annotations of the signature. Other releases are launched through Triton's public interface.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Grid = tuple[int, int, int]


class Box(NamedTuple):
    """Memory of a (B, H, N, D) tensor as a TMA descriptor sees it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int = 0
    """Offset of the box in the tensor, in bytes."""


class Entry:
    """Compiled entry of one kernel."""

    __slots__ = (
        "_annotations", "_before", "_compiled", "_describe", "_descriptors", "_hooks", "_launch", "_runtime",
        "stream_of",
    )  # fmt: skip

    def __init__(self, compiled: Any) -> None:
        from triton import knobs
        from triton.runtime import driver

        active: Any = driver.active
        # From Triton 3.8 on, a compiled kernel that is freed unloads its module.
        self._compiled = compiled
        launcher, utils = compiled.run, active.utils
        function = compiled.function, launcher.launch_cooperative_grid
        # No scratch memory, no launch metadata and no hooks.
        if compiles_launchers():
            wrapped = enclosed(launcher.launch)
            self._launch = wrapped.get("launcher", launcher.launch)
            self._descriptors = wrapped.get("tensordesc_meta", [])
            self._annotations = None
            self._describe = utils.fill_tma_descriptor
            rest = None, None, compiled.packed_metadata, None, None, None
        else:
            self._launch = utils.launch
            self._descriptors = getattr(compiled.metadata, "tensordesc_meta", None) or []
            self._annotations = launcher.arg_annotations, launcher.kernel_signature
            self._describe = utils.fill_tma_descriptor_tiled
            rest = compiled.packed_metadata, None, None, None, None, None
        self._before = [(*function, overlaps, *rest) for overlaps in (False, True)]
        self._runtime = knobs.runtime
        self._hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        self.stream_of = active.get_current_stream

    @property
    def has_hooks(self) -> bool:
        """Whether launch hooks are installed; then the public launch is required."""
        enter, leave = self._hooks
        runtime = self._runtime
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
        if self._annotations is None:
            self._launch(*grid, stream, *self._before[overlaps], *arguments)
        else:
            self._launch(*grid, stream, *self._before[overlaps], *self._annotations, arguments)


def _release() -> tuple[int, int]:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def compiles_launchers() -> bool:
    """Whether Triton compiles a C launcher for each signature."""
    return _release() == (3, 6)


def knows_triton() -> bool:
    """Whether the direct launch supports the installed release of Triton."""
    return (3, 6) <= _release() <= (3, 9)


def entry_of(compiled: Any) -> Entry | None:
    """Entry of a compiled kernel, or None if it must be launched through Triton's public interface."""
    if not knows_triton():
        return None
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
        return None
    return Entry(compiled)


def enclosed(function: Any) -> dict[str, Any]:
    """Closure variables of a function, by name."""
    cells = getattr(function, "__closure__", None)
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells or (), strict=True)}
