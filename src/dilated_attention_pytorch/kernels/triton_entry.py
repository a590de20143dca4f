"""The compiled entry of a kernel, called without Triton's own preparations where its insides are known."""

from __future__ import annotations

from typing import Any, NamedTuple

Grid = tuple[int, int, int]


class Box(NamedTuple):
    """Memory of a (B, H, N, D) tensor as a TMA descriptor sees it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int = 0
    """Bytes from the tensor's beginning to the box's."""


class Entry:
    """The compiled entry of one kernel."""

    __slots__ = ("_before", "_describe", "_hooks", "_launch", "_places", "_runtime", "stream_of")

    def __init__(self, compiled: Any) -> None:
        from triton import knobs
        from triton.runtime import driver

        launcher = compiled.run
        wrapper = launcher.launch
        # Kernels that take descriptors are launched through a function that encodes them anew each time.
        inner = enclosed(wrapper)
        self._launch, self._places = inner.get("launcher", wrapper), inner.get("tensordesc_meta", [])
        # No scratch memory, no record of the launch and no hooks.
        rest = None, None, compiled.packed_metadata, None, None, None
        alone = compiled.function, launcher.launch_cooperative_grid
        self._before = [(*alone, overlaps, *rest) for overlaps in (False, True)]
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

    def described(self, place: int, address: int, box: Box) -> tuple[object, ...]:
        """Descriptor number `place` for a tensor at that address, seen as that box: encoded, then sizes and strides."""
        meta = self._places[place]
        # The element types of the host and of the device are numbered differently.
        number = {8: 10, 9: 8, 10: 9}.get(meta["elem_type"], meta["elem_type"])
        encoded = self._describe(
            address + box.begin, meta["swizzle"], meta["elem_size"], number, meta["block_size"], *box[:2], 0
        )
        return encoded, *box.shape, *box.strides

    def __call__(self, grid: Grid, stream: int, arguments: tuple[object, ...], overlaps: bool) -> None:
        self._launch(*grid, stream, *self._before[overlaps], *arguments)


def knows_triton() -> bool:
    """Whether this triton is one whose insides are known."""
    import triton

    return triton.__version__.startswith("3.6.")


def entry_of(compiled: Any) -> Entry | None:
    """The entry of a compiled kernel, or None when this triton is not one whose insides are known."""
    if not knows_triton():
        return None
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    return Entry(compiled)


def enclosed(function: Any) -> dict[str, Any]:
    """What a function takes from those around it, by name."""
    cells = getattr(function, "__closure__", None)
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells or (), strict=True)}
