"""Run Gluon kernels for Hopper on the CPU, with the synchronization of the GPU.

Triton's interpreter has no Gluon. Here the Python source of a kernel runs on torch tensors: every partition of
`warp_specialize` is a thread, one of which runs at a time, and a seeded scheduler switches between them at random.
Layouts are ignored; compilation checks those.

Asynchronous operations are as late as the hardware allows. A TMA load fills its destination with NaN when it is issued
and delivers at any time before its barrier completes. A product reads shared memory when it is issued and again when it
is waited for; a product or TMA store whose operand changed in between, or was written without a fence between the
generic and the asynchronous proxy, has the result NaN. Shared memory is NaN at the start. A kernel may compute such a
result if it does not use it; `Emulation.hazards` describes all of them for the message of a failed comparison. Waits
that never end, counts below zero, and stores that are not waited for raise.

Additions of floats to global memory are performed at any time before a release at the scope of the GPU that they
happen before: by the same thread, or by others whose barriers it has waited for. Some schedules give every thread a
priority, so that single programs fall far behind.
"""

from __future__ import annotations

import inspect
import math
import operator
import random
import re
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as real_gl
from triton.experimental.gluon.language.nvidia import hopper as real_hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy as real_async_copy
from triton.runtime.jit import ConstexprFunction, JITFunction

from dilated_attention_pytorch.kernels.hopper import primitives
from dilated_attention_pytorch.kernels.hopper.layouts import boxes_of

RESIDENT = 24
"""Programs that run at the same time."""


class EmulationError(AssertionError):
    """A kernel that would hang, or that uses a barrier or memory wrongly."""


class Scalar(int):
    """Integer of a kernel. Division and remainder round toward zero, as on the GPU."""

    def to(self, dtype: torch.dtype) -> Scalar:
        return Scalar(torch.tensor(int(self) & (2**64 - 1) if dtype == torch.uint64 else int(self)).to(dtype).item())

    def __floordiv__(self, other: Any) -> Any:
        return _apply(lambda a, b: Scalar(abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)), self, other)

    def __mod__(self, other: Any) -> Any:
        return _apply(lambda a, b: Scalar(abs(a) % abs(b) * (-1 if a < 0 else 1)), self, other)

    def __hash__(self) -> int:
        return hash(int(self))


def _apply(of: Callable[[int, int], Scalar], left: Any, right: Any) -> Any:
    return NotImplemented if isinstance(right, Block | Tensor) else of(int(left), int(right))


def _with_operators(cls: type, make: Callable[[Callable[..., Any], bool], Any], names: str) -> None:
    for name in names.split():
        of = getattr(operator, f"__{name.removeprefix('r')}__" if name in REFLECTED else f"__{name}__")
        setattr(cls, f"__{name}__", make(of, name in REFLECTED))


REFLECTED = {"radd", "rsub", "rmul", "rand", "ror", "rlshift", "rrshift", "rtruediv"}
ARITHMETIC = "add radd sub rsub mul rmul and rand or ror lshift rlshift rshift rrshift lt le gt ge eq ne"


def _scalar_operator(of: Callable[..., Any], reflected: bool) -> Any:
    def run(self: Scalar, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        left = int(self)
        number = of(other if isinstance(other, float) else int(other), left) if reflected else of(left, other)
        return number if isinstance(number, float) else Scalar(number)

    return run


_with_operators(Scalar, _scalar_operator, ARITHMETIC)


class Layout:
    """Any layout: positions in registers and shared memory do not change values."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def get_default_for(*_: Any, **__: Any) -> Layout:
        return LAYOUT

    @property
    def parent(self) -> Layout:
        return self


LAYOUT = Layout()


class Block:
    """Tensor in registers."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=LAYOUT, shape=list(self.data.shape))

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def to(self, dtype: torch.dtype) -> Block:
        return Block(self.data.to(dtype))

    def reshape(self, shape: list[int]) -> Block:
        return Block(self.data.reshape([int(x) for x in shape]))

    def permute(self, order: tuple[int, ...]) -> Block:
        return Block(self.data.permute(order))

    def __bool__(self) -> bool:
        raise EmulationError("a condition must be a scalar, got a block")


def _data(x: Any) -> Any:
    return x.data if isinstance(x, Block) else int(x) if isinstance(x, Scalar) else x


def _block_operator(of: Callable[..., Any], reflected: bool) -> Any:
    def run(self: Block, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        right = _data(other)
        return Block(of(right, self.data) if reflected else of(self.data, right))

    return run


_with_operators(Block, _block_operator, f"{ARITHMETIC} truediv rtruediv")
Block.__floordiv__ = lambda self, other: Block(torch.div(self.data, _data(other), rounding_mode="trunc"))
Block.__mod__ = lambda self, other: Block(torch.fmod(self.data, _data(other)))
Block.__hash__ = None  # type: ignore[assignment]


class Pointer:
    """Pointer into the memory of a tensor, of which elements from its first to its last may be accessed."""

    def __init__(self, memory: Tensor, offset: Any, own: tuple[int, int]) -> None:
        self.memory, self.offset, self.own = memory, offset, own

    @staticmethod
    def to(tensor: Tensor) -> Pointer:
        storage, first = tensor.untyped_storage(), tensor.storage_offset()
        size = len(storage) // tensor.element_size()
        memory = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, 0, (size,), (1,))
        last = sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return Pointer(memory, Scalar(first), (first, first + last + 1 if tensor.numel() else first))

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=LAYOUT)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + other, self.own)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Element numbers, and which of them are accessed."""
        offset = torch.as_tensor(_data(self.offset)).long()
        chosen = torch.as_tensor(True if mask is None else _data(mask)).bool()
        offset, chosen = torch.broadcast_tensors(offset, chosen)
        begin, end = self.own
        outside = chosen & ((offset < begin) | (offset >= end))
        if bool(outside.any()):
            raise EmulationError(f"an access must lie inside elements {begin} to {end - 1}, got {offset[outside]}")
        return offset, chosen


def _result(data: Tensor) -> Any:
    """Value of a load or a sum: scalars are numbers of Python."""
    return Block(data) if data.dim() else data.item() if data.is_floating_point() else Scalar(data.item())


class Shared:
    """Buffer in shared memory, or a part of one."""

    def __init__(self, data: Tensor, unfenced: Tensor) -> None:
        self.data, self.unfenced = data, unfenced

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def _view(self, of: Callable[[Tensor], Tensor]) -> Shared:
        return Shared(of(self.data), of(self.unfenced))

    def index(self, number: int) -> Shared:
        if not 0 <= number < len(self.data):
            raise EmulationError(f"index must lie in [0, {len(self.data)}), got {number}")
        return self._view(lambda x: x[int(number)])

    def slice(self, begin: int, length: int, dim: int = 0) -> Shared:
        return self._view(lambda x: x.narrow(dim, int(begin), int(length)))

    def reshape(self, shape: list[int]) -> Shared:
        return self._view(lambda x: x.view([int(side) for side in shape]))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._view(lambda x: x.permute(order))

    def store(self, value: Block) -> None:
        task = _task()
        self.data.copy_(value.data)
        self.unfenced.fill_(True)
        task.dirty.append(self.unfenced)
        task.step()

    def load(self, layout: Any) -> Block:
        return Block(self.data.clone())


class RowGroups:
    """Tile in shared memory as groups of eight rows of its columns of 64 elements; see `primitives.zero_rows`."""

    def __init__(self, tile: Shared, shape: list[int]) -> None:
        self.tile, self.columns = tile.reshape(tile.shape[-2:]), tile.shape[-1] // 64
        if math.prod(shape) * 2 != tile.data.numel() or shape[1:] != [8, 32]:
            raise EmulationError(f"groups must be [groups, 8, 32] words of a tile of 16 bits, got {shape}")

    def index(self, number: int) -> Shared:
        groups = self.tile.shape[0] // 8
        return self.tile.slice(number % groups * 8, 8).slice(number // groups * 64, 64, dim=1)


class Clock(dict["Task", int]):
    """Number of additions to global memory of each task that happen before a point."""

    def join(self, other: Clock) -> None:
        for task, count in other.items():
            self[task] = max(self.get(task, 0), count)


class Barrier:
    """mbarrier: a phase ends when the pending arrivals and bytes are 0."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.clock, self.ended = Clock(), Clock()

    def settle(self) -> None:
        if self.pending < 0:
            raise EmulationError(f"a barrier must get {self.count} arrivals a phase, got {self.count - self.pending}")
        if self.count and not self.pending and not self.bytes:
            self.phase, self.pending = self.phase + 1, self.count
            self.ended.join(self.clock)


class Barriers:
    """Array of mbarriers."""

    def __init__(self, count: int) -> None:
        self.shape, self._all = [count, 1], [Barrier() for _ in range(count)]

    def index(self, number: int) -> Barrier | None:
        # A predicated operation may compute a number outside.
        return self._all[int(number)] if 0 <= number < len(self._all) else None


class Descriptor:
    """TMA descriptor of a box of memory."""

    def __init__(self, tensor: Tensor, box: Any, rows: int, width: int) -> None:
        pointer = Pointer.to(tensor)
        begin = int(pointer.offset) + box.begin // tensor.element_size()
        self.memory = pointer.memory.as_strided(box.shape, box.strides, begin)
        self.shape, self.strides = ([Scalar(x) for x in sides] for sides in (box.shape, box.strides))
        self.block_shape = [*(1,) * (len(box.shape) - 2), rows, width]
        numel = rows * width
        self.block_type = SimpleNamespace(nbytes=numel * tensor.element_size(), numel=numel)
        self.dtype, self.layout = tensor.dtype, LAYOUT

    @staticmethod
    def of(tensor: Tensor, rows: int, width: int, axis: Any = None) -> tuple[Descriptor | None, ...]:
        """Descriptors of the boxes of a tensor; in the place of `layouts.describe`."""
        boxes = boxes_of(tensor, axis)
        return tuple(None if box is None else Descriptor(tensor, box, rows, width) for box in boxes)

    def parts(self, at: list[int]) -> tuple[Any, Any]:
        """Slices of the part of a tile that exists: in memory, and in the tile."""
        lows = [max(int(first), 0) for first in at]
        highs = [min(int(a) + b, c) for a, b, c in zip(at, self.block_shape, self.memory.shape, strict=True)]
        memory = tuple(slice(low, max(low, high)) for low, high in zip(lows, highs, strict=True))
        tile = tuple(slice(s.start - int(first), s.stop - int(first)) for s, first in zip(memory, at, strict=True))
        return memory, tile


class Product:
    """Asynchronous matrix product."""

    def __init__(self, left: Any, right: Shared, acc: Any, use_acc: Any) -> None:
        self.operands, self.acc, self.use_acc = (left, right), acc, bool(use_acc)
        self.before = [x.data.clone() for x in self.operands]
        self.fenced = not any(isinstance(x, Shared) and bool(x.unfenced.any()) for x in self.operands)
        self.value: Block | None = None

    def finish(self, emulation: Emulation) -> None:
        left, right = (x.double() for x in self.before)
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        result = (left @ right).float() + (acc.data if self.use_acc else 0.0)
        why = None if self.fenced else "reads shared memory that was written without fence_async_shared"
        for one, before in zip(self.operands, self.before, strict=True):
            if not torch.equal(one.data.nan_to_num(7.0), before.nan_to_num(7.0)):
                why = "reads shared memory that changed before the product was waited for"
        if why is not None:
            emulation.hazards.append(f"{_task().name}: a product {why}")
            result = torch.full_like(result, torch.nan)
        self.value = Block(result)


class Task:
    """Partition of a program: a thread that runs while the scheduler waits for it."""

    def __init__(self, emulation: Emulation, program: Program, run: Callable[[], None], warps: int, name: str) -> None:
        self.emulation, self.program, self.warps, self.name = emulation, program, warps, name
        self.dirty: list[Tensor] = []
        """Marks of elements that this thread wrote since its last fence"""
        self.products: list[Product] = []
        self.stores: list[tuple[Callable[[Tensor], None], Shared, Tensor]] = []
        self.copies: list[list[Callable[[], None]]] = [[]]
        self.additions: list[Callable[[], None]] = []
        """Additions to global memory that are not performed yet"""
        self.clock = Clock({self: 0})
        self.priority = emulation.random.random()
        self.ready: Callable[[], bool] = lambda: True
        self.done, self.error, self.where = False, None, "start"
        self.resume, self.paused = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._main, args=(run,), daemon=True)
        self.thread.start()

    def _main(self, run: Callable[[], None]) -> None:
        _local.task = self
        self.resume.acquire()
        try:
            if not self.emulation.stopped:
                run()
                if self.stores:
                    raise EmulationError("TMA stores must be waited for before a program ends")
        except BaseException as error:
            self.error = error
        self.done = True
        self.paused.release()

    def pause(self, ready: Callable[[], bool], where: str) -> None:
        """Let other threads run until the condition holds."""
        self.ready, self.where = ready, where
        self.paused.release()
        self.resume.acquire()
        if self.emulation.stopped:
            raise SystemExit

    def step(self, where: str = "running") -> None:
        """Point at which another thread may run."""
        if self.emulation.random.random() < 0.25:
            self.pause(lambda: True, where)

    def wait(self, ready: Callable[[], bool], where: str) -> None:
        if not ready() or self.emulation.random.random() < 0.25:
            self.pause(ready, where)

    def perform(self, count: int) -> None:
        """Perform additions to global memory until `count` of this task are done."""
        while self.clock[self] - len(self.additions) < count:
            self.additions.pop(0)()

    def finish_stores(self, left: int) -> None:
        while len(self.stores) > left:
            put, source, before = self.stores.pop(0)
            same = torch.equal(source.data.nan_to_num(7.0), before.nan_to_num(7.0))
            if not same:
                self.emulation.hazards.append(f"{self.name}: a TMA store reads shared memory that changed")
            put(before if same else torch.full_like(before, torch.nan))


_local = threading.local()


def _task() -> Task:
    return _local.task


class Program:
    """State that the partitions of a program share."""

    def __init__(self, number: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.number, self.grid = number, grid
        self.arrived: dict[int, int] = {}
        self.generation: dict[int, int] = {}
        self.clocks: dict[int, Clock] = {}

    def meet(self, task: Task, barrier: int, threads: int, waits: bool) -> None:
        """`bar.sync` or `bar.arrive` of all threads of a task."""
        before = self.generation.setdefault(barrier, 0)
        self.arrived[barrier] = self.arrived.get(barrier, 0) + 32 * task.warps
        self.clocks.setdefault(barrier, Clock()).join(task.clock)
        if self.arrived[barrier] > threads:
            raise EmulationError(f"hardware barrier {barrier} must get {threads} threads, got {self.arrived[barrier]}")
        if self.arrived[barrier] == threads:
            self.arrived[barrier], self.generation[barrier] = 0, before + 1
        if waits:
            task.wait(lambda: self.generation[barrier] > before, f"hardware barrier {barrier}")
            task.clock.join(self.clocks[barrier])
        else:
            task.step()


class Emulation:
    """One launch."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hazards: list[str] = []
        self.pending: list[Callable[[], None]] = []
        """TMA loads on their way"""
        self.stopped = False
        self.prefers = self.random.random() < 0.5
        """Whether threads run by priority most of the time"""

    def deliver(self) -> None:
        self.pending.pop(self.random.randrange(len(self.pending)))()

    def run(self, tasks: list[Task]) -> None:
        """Run threads in a random order until all have ended."""
        try:
            while alive := [task for task in tasks if not task.done]:
                if self.pending and self.random.random() < 0.25:
                    self.deliver()
                adding = [task for task in tasks if task.additions]
                if adding and self.random.random() < 0.25:
                    self.random.choice(adding).additions.pop(0)()
                able = [task for task in alive if task.ready()]
                if not able and self.pending:
                    self.deliver()
                    continue
                if not able:
                    waits = ", ".join(f"{task.name}: {task.where}" for task in alive)
                    raise EmulationError(f"no thread can go on ({waits})")
                task = self.random.choice(able)
                if self.prefers and self.random.random() < 0.9:
                    task = min(able, key=lambda one: one.priority)
                task.resume.release()
                task.paused.acquire()
                if task.error is not None:
                    raise task.error
            for task in tasks:
                task.perform(task.clock[task])
        finally:
            self.stopped = True
            for task in tasks:
                if not task.done:
                    task.resume.release()
                    task.paused.acquire()
                task.thread.join()


class Kernel:
    """A Gluon kernel that runs on the CPU: `kernel[grid](*arguments)`, with `Descriptor` for TMA descriptors.

    `changes` maps names of device functions to a text in their source and its replacement.
    """

    hazards: list[str]

    def __init__(self, kernel: Any, seed: int = 0, changes: dict[str, tuple[str, str]] | None = None) -> None:
        self.names, self.seed, self.changes = kernel.arg_names, seed, changes or {}
        self._functions: dict[int, FunctionType] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self.run = self.function(kernel)
        self.hazards = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self.launch(grid, arguments)

    def launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Run every program of a grid."""
        given = [_argument(x) for x in arguments]
        grid = (*grid, 1, 1)[:3]
        numbers = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        for first in range(0, len(numbers), RESIDENT):
            self.seed += 1
            emulation, tasks = Emulation(self.seed), []
            for number in numbers[first : first + RESIDENT]:
                program = Program(number, grid)
                # The body of a kernel allocates, and starts the partitions.
                _local.task = SimpleNamespace(emulation=emulation, program=program, tasks=tasks, warps=4)
                self.run(*given)
            self.hazards = emulation.hazards
            emulation.run(tasks)

    def function(self, jit: Any) -> FunctionType:
        """Device function as a function of Python."""
        fn = jit.fn
        if id(fn) not in self._functions:
            code, names = fn.__code__, self._emulated_globals(fn.__globals__)
            if fn.__name__ in self.changes:
                code = _changed(jit, *self.changes[fn.__name__])
            self._functions[id(fn)] = FunctionType(code, names, fn.__name__, fn.__defaults__, fn.__closure__)
        return self._functions[id(fn)]

    def _emulated_globals(self, names: dict[str, Any]) -> dict[str, Any]:
        if id(names) not in self._globals:
            own = self._globals[id(names)] = {"__builtins__": names["__builtins__"], "range": _range}
            for name, value in names.items():
                if isinstance(value, JITFunction):
                    own[name] = self.function(value)
                elif isinstance(value, ConstexprFunction):
                    own[name] = value.fn
                elif isinstance(value, real_gl.constexpr):
                    own[name] = value.value
                elif isinstance(value, ModuleType) or callable(value):
                    own[name] = EMULATED.get(id(value), value)
        return self._globals[id(names)]


def _range(*ends: int) -> Iterator[Scalar]:
    return map(Scalar, range(*ends))


def _changed(jit: Any, old: str, new: str) -> Any:
    """Code of a device function with a text of its source replaced."""
    source = inspect.getsource(jit.fn)
    if source.count(old) != 1:
        raise ValueError(f"{old!r} must stand once in {jit.fn.__name__}")
    source = source.replace(old, new)
    names: dict[str, Any] = {"gluon": SimpleNamespace(jit=lambda fn: fn), "gl": SimpleNamespace(constexpr=None)}
    exec("from __future__ import annotations\n" + source, names)
    return names[jit.fn.__name__].__code__


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer.to(x)
    return Scalar(x) if isinstance(x, int) and not isinstance(x, bool) else x


def _elementwise(of: Callable[..., Tensor], number: Callable[..., Any]) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        data = [_data(x) for x in operands]
        like = next((x for x in data if isinstance(x, Tensor)), None)
        if like is None:
            value = number(*data)
            return value if isinstance(value, float) else Scalar(value)
        return Block(of(*(x if isinstance(x, Tensor) else torch.tensor(x, dtype=like.dtype) for x in data)))

    return run


def _where(condition: Any, left: Any, right: Any) -> Any:
    if not any(isinstance(x, Block) for x in (condition, left, right)):
        return left if condition else right
    chosen = torch.as_tensor(_data(condition)).bool()
    sides = [_data(x) for x in (left, right)]
    if not any(isinstance(x, Tensor) for x in sides) and all(isinstance(x, int) for x in sides):
        sides = [torch.tensor(x, dtype=torch.int64) for x in sides]
    return Block(torch.where(chosen, *sides))


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Any:
    place, chosen = pointer.places(mask)
    data = pointer.memory[torch.where(chosen, place, 0)] if len(pointer.memory) else pointer.memory.new_zeros(())
    if other is None:
        other = torch.nan if data.is_floating_point() else -(2**30)
    return _result(torch.where(chosen, data, torch.tensor(other, dtype=data.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    place, chosen = pointer.places(mask)
    data = torch.as_tensor(_data(value)).to(pointer.memory.dtype).broadcast_to(place.shape)
    pointer.memory[place[chosen]] = data[chosen]
    _task().step()


def _atomic_add(pointer: Pointer, value: Any, mask: Any = None, sem: str = "relaxed") -> Any:
    place, chosen = pointer.places(mask)
    task = _task()
    if pointer.memory.is_floating_point():
        # The kernels do not use the previous values.
        places, numbers = place[chosen], _data(value).broadcast_to(place.shape)[chosen].clone()
        task.additions.append(lambda: pointer.memory.index_put_((places,), numbers, accumulate=True))
        task.clock[task] += 1
        task.step()
        return None
    old = torch.zeros_like(place, dtype=pointer.memory.dtype)
    old[chosen] = pointer.memory[place[chosen]]
    data = torch.as_tensor(_data(value)).to(pointer.memory.dtype).broadcast_to(place.shape)
    pointer.memory.index_put_((place[chosen],), data[chosen], accumulate=True)
    _task().step()
    return _result(old)


def _reduce(of: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda x, axis: _result(of(x.data, axis))


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if isinstance(layout, _BarrierLayout):
        return Barriers(int(shape[0]))
    sides = [int(x) for x in shape]
    empty = torch.nan if dtype.is_floating_point else -(2**30)
    return Shared(torch.full(sides, empty, dtype=dtype), torch.zeros(sides, dtype=torch.bool))


def _specialize(functions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    begun = _task()
    for number, ((function, arguments), count) in enumerate(zip(functions, [4, *warps], strict=True)):
        name = f"program {begun.program.number} partition {number}"
        run = lambda f=function, a=arguments: f(*a)  # noqa: E731
        begun.tasks.append(Task(begun.emulation, begun.program, run, count, name))


def _assembly(text: str, constraints: str, operands: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    """Effect of the inline assembly of the kernels."""
    task = _task()
    if "selp.f32 $0, $1, 0fFF800000" in text:
        scores, word, bit = (x.data for x in operands)
        return Block(torch.where((word & bit) != 0, scores, -torch.inf))
    barriers = re.findall(r"bar\.(arrive|sync) \$(\d), (\d+)", text)
    if barriers:
        for kind, which, threads in barriers:
            if "@yes" not in text or operands[1]:
                task.program.meet(task, int(operands[int(which) - 1]), int(threads), waits=kind == "sync")
    elif "ld.acquire.gpu" in text:
        pointer, turn = operands
        task.wait(lambda: _load(pointer) == turn, f"turn {turn}, now {_load(pointer)}")
    elif "red." in text:
        if "red.release.gpu" in text:
            for other, count in task.clock.items():
                other.perform(count)
        operands[0].memory[int(operands[0].offset)] += 1
        task.step()
    elif text == "mov.b32 $0, $1;":
        return operands[0]
    elif not any(word in text for word in ("griddepcontrol", "nanosleep", "bar.warp.sync")):
        raise EmulationError(f"inline assembly must be one that the emulator knows, got {text!r}")
    return None


class _BarrierLayout(Layout):
    pass


def _arrive(barrier: Barrier | None, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.clock.join(_task().clock)
        barrier.pending -= count
        barrier.settle()
        _task().step()


def _expect(barrier: Barrier, size: int, pred: Any = True) -> None:
    if pred:
        barrier.clock.join(_task().clock)
        barrier.bytes += size
        barrier.pending -= 1
        barrier.settle()
        _task().step()


def _wait(barrier: Barrier | None, phase: int, pred: Any = True) -> None:
    if pred:
        _task().wait(lambda: barrier.phase & 1 != phase, f"mbarrier in phase {barrier.phase}")
        _task().clock.join(barrier.ended)


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _tma_load(desc: Descriptor, at: list[int], barrier: Barrier, target: Shared, pred: Any = True) -> None:
    emulation, fenced = _task().emulation, not bool(target.unfenced.any())
    if not fenced:
        emulation.hazards.append(f"{_task().name}: a TMA load writes memory that was written without a fence")
        target.unfenced.fill_(False)
    memory, tile = desc.parts(at)
    target.data.fill_(torch.nan)

    def deliver() -> None:
        if fenced:
            target.data.zero_()
            target.data[tile] = desc.memory[memory]
        barrier.bytes -= desc.block_type.nbytes
        barrier.settle()

    emulation.pending.append(deliver)
    _task().step()


def _tma_write(add: bool) -> Callable[..., None]:
    def write(desc: Descriptor, at: list[int], source: Shared) -> None:
        task = _task()
        memory, tile = desc.parts(at)
        before = source.data.clone()
        if bool(source.unfenced.any()):
            task.emulation.hazards.append(f"{task.name}: a TMA store reads memory that was written without a fence")
            before.fill_(torch.nan)

        def put(data: Tensor) -> None:
            desc.memory[memory] = desc.memory[memory] + data[tile] if add else data[tile]

        task.stores.append((put, source if not before.isnan().all() else Shared(before, source.unfenced), before))
        task.step()

    return write


def _fence(*_: Any) -> None:
    task = _task()
    for marks in task.dirty:
        marks.fill_(False)
    task.dirty.clear()


def _multiply(left: Any, right: Shared, acc: Any, use_acc: Any = True, is_async: bool = False) -> Product:
    task = _task()
    product = Product(left, right, acc, use_acc)
    task.products.append(product)
    task.step()
    return product


def _wait_products(left: int, deps: tuple[Any, ...]) -> Any:
    task = _task()
    task.step()
    while len(task.products) > left:
        task.products.pop(0).finish(task.emulation)
    if any(one.value is None for one in deps):
        raise EmulationError("a product must be waited for before it is read")
    values = [one.value for one in deps]
    return values[0] if len(values) == 1 else tuple(values)


def _accumulator(value: Block) -> Product:
    product = Product.__new__(Product)
    product.value = value
    return product


def _copy_gathered(target: Shared, pointers: Pointer, mask: Any = None) -> None:
    task = _task()
    target.data.fill_(torch.nan)

    def deliver() -> None:
        target.data.copy_(_load(pointers, mask, 0.0).data)
        target.unfenced.fill_(True)
        task.dirty.append(target.unfenced)

    task.copies[-1].append(deliver)


def _commit_copies() -> None:
    _task().copies.append([])


def _wait_copies(left: int) -> None:
    copies = _task().copies
    while len(copies) - 1 > left:
        for deliver in copies.pop(0):
            deliver()


TYPES = ("int32", "int64", "float16", "bfloat16", "float32", "float64")
GL = SimpleNamespace(
    **{name: getattr(torch, name) for name in TYPES},
    **dict.fromkeys(
        [
            "SliceLayout",
            "BlockedLayout",
            "NVMMADistributedLayout",
            "DotOperandLayout",
            "NVMMASharedLayout",
            "SwizzledSharedLayout",
            "DistributedLinearLayout",
        ],
        Layout,
    ),
    constexpr=None,
    arange=lambda begin, end, layout=None: Block(torch.arange(int(begin), int(end), dtype=torch.int32)),
    full=lambda shape, value, dtype, layout=None: Block(torch.full([int(x) for x in shape], value, dtype=dtype)),
    full_like=lambda like, value: Block(torch.full_like(like.data, value)),
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    where=_where,
    maximum=_elementwise(torch.maximum, max),
    minimum=_elementwise(torch.minimum, min),
    max=_reduce(torch.amax),
    sum=_reduce(lambda x, axis: x.sum(axis, dtype=x.dtype)),
    exp2=lambda x: Block(x.data.exp2()),
    log2=lambda x: Block(x.data.log2()),
    expand_dims=lambda x, axis: (
        Pointer(x.memory, GL.expand_dims(x.offset, axis), x.own)
        if isinstance(x, Pointer)
        else Block(x.data.unsqueeze(axis))
    ),
    convert_layout=lambda x, layout: x,
    program_id=lambda axis: Scalar(_task().program.number[axis]),
    num_programs=lambda axis: Scalar(_task().program.grid[axis]),
    num_warps=lambda: _task().warps,
    static_range=range,
    inline_asm_elementwise=_assembly,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
)
MBARRIER = SimpleNamespace(MBarrierLayout=_BarrierLayout, init=_init, wait=_wait, arrive=_arrive, expect=_expect)
TMA = SimpleNamespace(store_wait=lambda left: _task().finish_stores(left))
ASYNC_COPY = SimpleNamespace(commit_group=_commit_copies, wait_group=_wait_copies)
COPIES = {
    **dict.fromkeys(("async_load", "async_copy_global_to_shared"), _tma_load),
    **dict.fromkeys(("async_store", "async_copy_shared_to_global"), _tma_write(add=False)),
}
EMULATED: dict[int, Any] = {
    id(real_gl): GL,
    id(real_hopper.mbarrier): MBARRIER,
    id(real_hopper.tma): TMA,
    id(real_async_copy): ASYNC_COPY,
    id(real_hopper.fence_async_shared): _fence,
    id(real_hopper.warpgroup_mma): _multiply,
    id(real_hopper.warpgroup_mma_wait): _wait_products,
    id(real_hopper.warpgroup_mma_init): _accumulator,
    id(primitives.add_out): _tma_write(add=True),
    id(primitives.reinterpret): lambda buffer, dtype, shape, layout: RowGroups(buffer, shape),
    **{id(getattr(real_hopper.tma, name)): of for name, of in COPIES.items() if hasattr(real_hopper.tma, name)},
    **{
        id(getattr(real_async_copy, name)): _copy_gathered
        for name in ("async_load", "async_copy_global_to_shared")
        if hasattr(real_async_copy, name)
    },
}
"""Replacements of functions of the language, by the identity of the function."""
