"""Launches of Triton and Gluon kernels at little more than the driver's own cost.

Triton's public launch binds, inspects and looks up every argument in every call: 60 microseconds for a kernel with four
TMA descriptors, more than a short kernel runs. Here a launch is cached by the properties that Triton specializes a
kernel on, and a repeated launch calls the compiled entry directly. Sequences of launches cache whole argument lists by
the addresses in them, which repeat because the allocator reuses memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import count
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hopper.layouts import boxes_of, describe
from ..hopper.lowering import Strides
from . import warmup
from .triton_abi import Compilers, Entry, Grid, entry_of

CACHE_SIZE, PREPARED = 4096, 2**14
"""Most cached launches, and most prepared ones; Triton itself evicts no kernel."""
CACHED_ADDRESSES = 256
"""Most cached argument lists of a sequence of launches."""

OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every kernel; the default differs between releases of Triton."""

Tensors = tuple[Tensor, ...]
Key = tuple[object, ...]

_NO_SWITCH = nullcontext()
_NOT_COMPILED = None, None, ()
_sequence = Lock()
"""Lock of a sequence of launches. Launches of one call have separate counters and may overlap; a call of another thread
on the same stream uses the same counters and must not come between."""
_launches: dict[Key, Launch] = {}
"""Launches by identity: whatever a kernel is specialized on, except for the keys of `Launch.compiled`."""
_unspecialized: dict[int, tuple[tuple[int, ...], Any]] = {}
"""By the kernel's id, as hashing a kernel hashes its source; the reference to the kernel keeps the id valid."""


def _unspecialized_of(kernel: Any) -> tuple[int, ...]:
    """Indices of the arguments that a kernel is not specialized on, except for their width of 32 or 64 bits."""
    cached = _unspecialized.get(id(kernel))
    if cached is None:
        indices = (index for index, one in enumerate(getattr(kernel, "params", ())) if one.do_not_specialize)
        cached = _unspecialized[id(kernel)] = tuple(indices), kernel
    return cached[0]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which a device is the current one."""
    return _NO_SWITCH if torch.cuda.current_device() == device.index else torch.cuda.device(device)


class Launch:
    """A kernel with all of its arguments except tensors, which come first, and the varying integers behind them.

    The kernel must not be specialized on the varying integers, which must be below 2^31. A launch is built once for
    tensors of given sizes; a call reads their addresses and dtypes alone and holds no reference to them. A number of
    None stands for a tensor that the kernel is compiled without. With `launch_pdl` the kernel may start before the
    launch in front of it has ended.
    """

    __slots__ = ("_numbers", "compiled", "device", "kernel", "options", "overlaps")

    def __init__(self, kernel: Any, device: torch.device, *numbers: int | float | None, **options: Any) -> None:
        self.kernel, self.options = kernel, OPTIONS | options
        self.device, self._numbers, self.overlaps = device.index, numbers, bool(options.get("launch_pdl"))
        self.compiled: dict[Key, tuple[Any, Entry | None, tuple[None, ...]]] = {}
        """Compiled kernel, its entry, and slots of constants, which the entry ignores; by properties of the tensors."""

    def __call__(self, grid: Grid, tensors: Sequence[Tensor], *varying: int) -> None:
        """Run the kernel on the current stream."""
        addresses = [x.data_ptr() for x in tensors]
        key = *[x.dtype for x in tensors], *[address % 16 for address in addresses]
        entry, slots = self.ready(key)
        if entry is not None:
            passed = *addresses, *varying, *self._numbers, *slots
            entry(grid, entry.stream_of(self.device), passed, self.overlaps)
        elif self.run_public(key, grid, (*tensors, *varying, *self._numbers)):
            assert {*range(len(tensors), len(tensors) + len(varying))} <= {*_unspecialized_of(self.kernel)}

    def ready(self, key: Key) -> tuple[Entry | None, tuple[None, ...]]:
        """Entry and slots of constants; no entry if the public launch is required, which may have to compile."""
        _, entry, slots = self.compiled.get(key, _NOT_COMPILED)
        if entry is not None and not entry.has_hooks and torch.cuda.current_device() == self.device:
            return entry, slots
        warmup.finish()
        return None, ()

    def run_public(self, key: Key, grid: Grid, arguments: Sequence[Any]) -> bool:
        """Run the kernel through Triton's public launch; return whether its entry is new."""
        # Triton compiles for the current device and launches there, wherever the tensors are.
        with _NO_SWITCH if self.device is None else torch.cuda.device(self.device):
            compiled = self.kernel[grid](*arguments, **self.options)
        if compiled is None or key in self.compiled:
            return False
        self.compiled[key] = compiled, entry_of(compiled), (None,) * (len(self.kernel.arg_names) - len(arguments))
        return True


def _launch_of(kernel: Any, device: torch.device, specialized: list[object], options: dict[str, Any]) -> Launch:
    """Cached launch of a kernel; the key holds numbers by value, and the specialized property of other arguments."""
    for index in _unspecialized_of(kernel):
        number = specialized[index]
        if isinstance(number, int):
            specialized[index] = number >= 2**31
    identity = id(kernel), device.index, *options, *options.values(), *specialized
    cached = _launches.get(identity)
    if cached is None:
        if len(_launches) >= CACHE_SIZE:
            _launches.clear()
        cached = _launches[identity] = Launch(kernel, device, **options)
    return cached


@lru_cache(maxsize=PREPARED)
def prepared(make: Callable[..., Any], *sizes: Any) -> Any:
    """Result of `make(*sizes)`, made once: launches and arenas for tensors of given sizes."""
    return make(*sizes)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run `kernel[grid](*arguments, **options)`. The first argument is a tensor; only constants are passed by name."""
    passed, specialized = [], []
    for one in arguments:
        if isinstance(one, Tensor):
            address = one.data_ptr()
            passed.append(address)
            specialized.append((one.dtype, address % 16))
        else:
            passed.append(one)
            # The compiler treats all floats alike; integers may be specialized as 1 or as multiples of 16.
            specialized.append(float if isinstance(one, float) else one)
    device = arguments[0].device
    made = _launch_of(kernel, device, specialized, options)
    x, y, z = (*grid, 1, 1)[:3]
    entry, slots = made.ready(())
    if entry is None:
        made.run_public((), (x, y, z), arguments)
    else:
        entry((x, y, z), entry.stream_of(device.index), (*passed, *slots), made.overlaps)


class TmaArg(NamedTuple):
    """Argument: TMA descriptors of a tensor of the call, for tiles of `rows` rows and `width` columns; see `boxes_of`.

    Columns past the width of the tensor are loaded as zeros and never stored.
    """

    slot: int
    rows: int
    width: int
    axis: Strides | None = None


class PtrArg(NamedTuple):
    """Argument: pointer to a tensor of the call, or to memory inside it viewed as another dtype."""

    slot: int
    begin: int = 0
    """Offset in elements."""
    dtype: torch.dtype | None = None


class LaunchStep:
    """One kernel of a sequence, with all of its arguments except the addresses of the tensors of a call.

    `arguments` are `TmaArg`, `PtrArg`, tensors and numbers. Slots index the tensors of a call, whose layouts are those
    of `like`. A tensor of `like` among the arguments becomes the `PtrArg` of its slot; any other tensor is constant.
    Gluon kernels are specialized on types and constants alone, `plain` Triton kernels on the alignment of pointers too.

    A step that `overlaps` may start before the overlapping step in front of it has ended: one or two programs of these
    kernels occupy a multiprocessor, so none is idle while the last items of the earlier step run. Before
    `primitives.wait_for_launch` it must not touch memory that earlier steps write. The public launch never overlaps.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int | Grid,
        arguments: tuple[Any, ...],
        like: Tensors,
        plain: bool = False,
        overlaps: bool = False,
        options: dict[str, int] | None = None,
    ) -> None:
        slots = {id(tensor): slot for slot, tensor in enumerate(like)}
        self._arguments = tuple(PtrArg(slots[id(one)]) if id(one) in slots else one for one in arguments)
        self.overlaps = overlaps
        self.grid = (grid, 1, 1) if isinstance(grid, int) else grid
        self._sizes = [tensor.element_size() for tensor in like]
        self._boxes = [boxes_of(like[one.slot], one.axis) for one in arguments if isinstance(one, TmaArg)]
        self._read = [one.slot for one in self._arguments if plain and isinstance(one, PtrArg)]
        self.launch = _launch_of(kernel, like[0].device, self._specialized(like, plain), options or {})

    def _specialized(self, like: Tensors, plain: bool) -> list[object]:
        """Properties of the arguments that the kernel is specialized on, except for those of `key`."""
        specialized: list[object] = []
        boxes = iter(self._boxes)
        for one in self._arguments:
            if isinstance(one, TmaArg):
                tile = like[one.slot].dtype, one.rows, one.width
                specialized += (box and (*tile, len(box.shape)) for box in next(boxes))
            elif isinstance(one, PtrArg):
                specialized.append(one.dtype or like[one.slot].dtype)
            elif isinstance(one, Tensor):
                specialized.append((one.dtype, plain and one.data_ptr() % 16 == 0))
            else:
                specialized.append(float if isinstance(one, float) else one)
        return specialized

    def run_public(self, *tensors: Tensor) -> None:
        """Run the kernel through Triton's public launch, which compiles it if needed."""
        key, arguments = self.key(tuple(tensor.data_ptr() for tensor in tensors)), self.public_arguments(tensors)
        if key in self.launch.compiled:
            self.launch.compiled[key][0][self.grid](*arguments)
        else:
            self.launch.run_public(key, self.grid, arguments)

    def public_arguments(self, tensors: Tensors) -> list[Any]:
        """Arguments of Triton's public launch."""
        arguments: list[Any] = []
        for one in self._arguments:
            if isinstance(one, TmaArg):
                arguments += describe(tensors[one.slot], one.rows, one.width, one.axis)
            elif isinstance(one, PtrArg):
                tensor = tensors[one.slot]
                arguments.append(tensor if one.dtype is None else tensor[one.begin :].view(one.dtype))
            else:
                arguments.append(one)
        return arguments

    def bind(self, addresses: tuple[int, ...]) -> tuple[Entry, tuple[object, ...]] | None:
        """Entry and arguments for tensors at the given addresses, or None if the public launch is required."""
        entry = self.launch.compiled.get(self.key(addresses), _NOT_COMPILED)[1]
        if entry is None:
            return None
        arguments: list[object] = []
        boxes, index = iter(self._boxes), count()
        for one in self._arguments:
            if isinstance(one, TmaArg):
                for box in next(boxes):
                    arguments += (None,) if box is None else entry.described(next(index), addresses[one.slot], box)
            elif isinstance(one, PtrArg):
                arguments.append(addresses[one.slot] + one.begin * self._sizes[one.slot])
            else:
                arguments.append(one.data_ptr() if isinstance(one, Tensor) else one)
        return entry, tuple(arguments)

    def key(self, addresses: tuple[int, ...]) -> tuple[bool, ...]:
        """Properties of the tensors that the kernel is specialized on."""
        return tuple(addresses[slot] % 16 == 0 for slot in self._read)


def compile_together(steps: Sequence[LaunchStep], tensors: Tensors) -> None:
    """Compile missing kernels on threads; most of the time of the compiler is spent outside of Python.

    A compilation error is raised when the kernel is launched.
    """
    import triton

    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    keyed = {(id(step.launch), step.key(addresses)): step for step in steps}
    lacking = [step for (_, key), step in keyed.items() if key not in step.launch.compiled]
    if not lacking:
        return
    warmup.finish()
    with Compilers(len(lacking)) as pool:
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            # Kernels of strided parts come last and take longest.
            compiling = [
                step.launch.kernel.warmup(*step.public_arguments(tensors), grid=step.grid, **step.launch.options)
                for step in reversed(lacking)
            ]
        for one in dict.fromkeys(compiling):
            pool.submit(_make_ready, one, tensors[0].device)


def _make_ready(compiled: Any, device: torch.device) -> None:
    """Load a compiled kernel, or the kernel of a future, together with its launcher."""
    with on_device(device):
        _ = (compiled.result() if hasattr(compiled, "result") else compiled).run


class Launches:
    """Sequence of kernels on the tensors of a call; all are compiled before the first of them runs."""

    def __init__(self, device: torch.device, steps: list[LaunchStep]) -> None:
        self._device, self._index = device, device.index
        self.steps = [step for step in steps if step.grid[0]]
        self._cache: dict[tuple[int, ...], list[tuple[Grid, Entry, tuple[object, ...], bool]]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Run the kernels; every call passes tensors of the same layouts in the same order."""
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        bound = self._cache.get(addresses) or self._bind(addresses)
        if not bound:
            compile_together(self.steps, tensors)
        if not bound or bound[0][1].has_hooks:
            for step in self.steps:
                step.run_public(*tensors)
            return
        stream = bound[0][1].stream_of(self._index)
        with _sequence:
            for grid, entry, arguments, overlaps in bound:
                entry(grid, stream, arguments, overlaps)

    def _bind(self, addresses: tuple[int, ...]) -> list[tuple[Grid, Entry, tuple[object, ...], bool]]:
        try:
            bound = [step.bind(addresses) for step in self.steps]
        except RuntimeError:
            # A thread that has launched nothing yet has no CUDA context, without which descriptors are not encoded.
            torch.zeros(1, device=self._device)
            bound = [step.bind(addresses) for step in self.steps]
        if None in bound:
            return []
        if len(self._cache) >= CACHED_ADDRESSES:
            self._cache.clear()
        self._cache[addresses] = [
            (step.grid, *one, step.overlaps and before is not None and before.overlaps)
            for before, step, one in zip((None, *self.steps), self.steps, bound, strict=False)
            if one is not None
        ]
        return self._cache[addresses]
