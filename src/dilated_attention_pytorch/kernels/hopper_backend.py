"""Attention on Hopper GPUs through the Gluon kernels: what they can run, and how they are launched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..plan.plan import (
    FULL_BASE,
    FULL_BEGIN,
    FULL_END,
    PARTIAL_BASE,
    PARTIAL_BEGIN,
    PARTIAL_END,
    Axis,
    Part,
    Plan,
    Walk,
)
from .hopper_launch import Entry, entry_of, item_counter
from .registry import AttentionCall, Forward, Gradients

QUERY_ROWS = 128
"""Query rows of one work item: two warpgroups of 64."""
LOG2_E = math.log2(math.e)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
"""How every kernel is compiled; fused multiply-add is asked for by name, as its default differs between releases."""


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """How the forward kernel is built for one head width."""

    key_tile: int = 128
    k_stages: int = 2
    v_stages: int = 2
    """Not above `k_stages`: the loader tells by one barrier a key slot that a value slot is free."""
    ping_pong: bool = True
    """Whether the two warpgroups take turns at the tensor cores."""
    registers: int = 240
    """Registers a thread of a multiplying warpgroup gets."""
    programs_a_processor: int = 1
    """Programs resident on a multiprocessor; the grid holds this many for each."""
    persistent: bool = True
    """Whether a program takes items as long as there are any, or one."""
    maxnreg: int | None = None
    """Registers a thread starts with, when the compiler's own choice is too many for the programs of a processor."""


FORWARD_CONFIGS = {
    64: ForwardConfig(k_stages=4, v_stages=4),
    128: ForwardConfig(k_stages=3, v_stages=2),
}


@dataclass(frozen=True, slots=True)
class Work:
    """A walk as the kernels read it: one record an item, in the order items start."""

    items: Tensor
    """int32 [I, 8]: see `hopper_forward.WORK_WIDTH`"""
    full: Tensor
    """int32 [F]"""
    partial: Tensor
    """int32 [P, 4]: tile, mask, first and last difference of the band"""
    covers: bool
    """Whether every row of the output belongs to an item."""


Layout = tuple[object, ...]
"""What distinguishes two calls of one plan, but for the values of their tensors and settings; see `_layout_of`."""

_work: WeakIdKeyDictionary = WeakIdKeyDictionary()
_regular: WeakIdKeyDictionary = WeakIdKeyDictionary()
_problems: WeakKeyDictionary[Plan, dict[Layout, str | None]] = WeakKeyDictionary()
_launches: WeakKeyDictionary[Plan, dict[Layout, ForwardLaunch]] = WeakKeyDictionary()
_compiled: dict[tuple[object, ...], tuple[Any, Entry | None]] = {}


@lru_cache(maxsize=1)
def gluon_missing() -> str | None:
    """Why the Gluon kernels cannot be imported here, or None when they can."""
    try:
        import triton
    except ImportError:
        return "needs triton, which is not installed"
    version = tuple(int(word) for word in triton.__version__.split(".")[:2])
    if version < (3, 6):
        return f"needs triton >= 3.6 for its Gluon language, got {triton.__version__}"
    try:
        from . import hopper_forward  # noqa: F401
    except (ImportError, AttributeError) as problem:
        return f"triton {triton.__version__} lacks part of the Gluon language: {problem}"
    return None


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=64)
def _device_problem(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"needs a GPU of compute capability 9.x, got {major}.{minor}"
    return gluon_missing()


def _layout_problem(name: str, tensor: Tensor) -> str | None:
    """TMA reads 16-byte aligned rows."""
    if tensor.data_ptr() % 16:
        return f"{name} must start at a multiple of 16 bytes"
    return _stride_problem(name, tensor)


def _stride_problem(name: str, tensor: Tensor) -> str | None:
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size > 1 and (stride <= 0 or stride % 8):
            return f"{name} must have positive strides that are multiples of 8 elements, got {tuple(tensor.stride())}"
    return None


def _is_regular(axis: Axis, block_size: int, n: int) -> bool:
    """Whether tile `t` is tokens `t * block_size` and on for every head, cut short only by the sequence's end."""
    key = axis.start
    if key not in _regular:
        start = torch.arange(axis.tiles, device=axis.start.device) * block_size
        whole = axis.end >= (start + block_size).clamp(max=n)
        unshifted = axis.rate == 1 and not bool(axis.offset.any())
        _regular[key] = unshifted and bool(((axis.start == start) & whole).all())
    return _regular[key]


def _layout_of(query: Tensor, key: Tensor, value: Tensor) -> Layout:
    shapes = query.shape, key.shape, value.shape
    return query.get_device(), query.dtype, shapes, query.stride(), key.stride(), value.stride()


def why_not(call: AttentionCall) -> str | None:
    """Why these kernels cannot run the call, or None when they can."""
    layout = _layout_of(call.query, call.key, call.value)
    known = _problems.get(call.plan)
    if known is None:
        known = _problems[call.plan] = {}
    if layout not in known:
        known[layout] = _lasting_problem(call)
    problem = known[layout]
    if problem is not None:
        return problem
    if call.key_padding_mask is not None:
        return "has no key padding mask"
    if call.dropout_p:
        return "has no dropout; pass dropout_p=0.0"
    if call.scale <= 0:
        return f"needs a positive scale, got {call.scale}"
    if (call.query.data_ptr() | call.key.data_ptr() | call.value.data_ptr()) % 16:
        return "needs tensors that start at multiples of 16 bytes"
    return None


def _lasting_problem(call: AttentionCall) -> str | None:
    """Why no call of this plan and layout can run, or None."""
    device = call.query.device
    if device.type != "cuda":
        return f"needs a CUDA tensor, got {device}"
    problem = _device_problem(device)
    if problem is not None:
        return problem
    if call.query.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, got {call.query.dtype}"
    d, e = call.query.shape[-1], call.value.shape[-1]
    if d not in FORWARD_CONFIGS or d != e:
        return f"needs query and value width 64 or 128, the same for both, got {d} and {e}"
    plan = call.plan
    if plan.block_size not in (128, 256):
        return f"needs block size 128 or 256, got {plan.block_size}"
    if len(plan.parts) != 1 or plan.parts[0].queries.rate != 1 or plan.parts[0].keys.rate != 1:
        return f"needs a plan of one part of rate 1, got {len(plan.parts)} parts"
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        problem = _stride_problem(name, tensor)
        if problem is not None:
            return problem
    part = plan.parts[0]
    for axis in (part.queries, part.keys):
        if not _is_regular(axis, plan.block_size, plan.n):
            return "needs segments that are multiples of the block size"
    return None


def _work_items(part: Part, walk: Walk, tiles: int, sub_tiles: int, rows_a_tile: int, n: int) -> tuple[Tensor, bool]:
    """Work records of every head, heads outermost and rows in the walk's order, and whether no row is left out."""
    device = walk.rows.device
    classes = walk.rows.shape[0] // tiles
    order = walk.order.long()
    by_class = order[torch.argsort(order // tiles, stable=True)].view(classes, tiles)
    head_class = part.head_class.long()
    heads = torch.arange(len(head_class), device=device)[head_class >= 0]
    row = by_class[head_class[heads]][:, :, None].expand(-1, -1, sub_tiles)
    tile = row % tiles * sub_tiles + torch.arange(sub_tiles, device=device)
    table = walk.rows.long()[row]
    full = table[..., FULL_END] - table[..., FULL_BEGIN]
    partial = table[..., PARTIAL_END] - table[..., PARTIAL_BEGIN]
    columns = (
        heads[:, None, None].expand_as(row),
        tile,
        table[..., FULL_BEGIN],
        full,
        table[..., FULL_BASE],
        table[..., PARTIAL_BEGIN],
        partial,
        table[..., PARTIAL_BASE],
    )
    kept = (full + partial > 0) & (tile * rows_a_tile < n)
    items = torch.stack(columns, dim=-1)[kept].int().contiguous()
    return items, len(items) == len(head_class) * -(-n // rows_a_tile)


def work_by_query(plan: Plan) -> Work:
    """The forward's work list, made once a plan."""
    part = plan.parts[0]
    walk = part.by_query
    work = _work.get(walk.rows)
    if work is None:
        items, covers = _work_items(part, walk, part.queries.tiles, plan.block_size // QUERY_ROWS, QUERY_ROWS, plan.n)
        band = plan.masks.band[walk.mask.long()]
        partial = torch.cat((torch.stack((walk.partial, walk.mask), dim=1), band), dim=1).int().contiguous()
        work = _work[walk.rows] = Work(items, walk.full, partial, covers)
    return work


def _tma_strides(tensor: Tensor) -> tuple[int, ...]:
    # A dimension of size one is never stepped over, but its stride must still be a legal one.
    d = tensor.shape[-1]
    return (*(stride if size > 1 else d for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False)), 1)


def describe(tensor: Tensor, rows: int, layout: object) -> Any:
    """A TMA descriptor of a (B, H, N, D) tensor that moves `rows` rows of one head."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [1, 1, rows, tensor.shape[-1]]
    return TensorDescriptor(tensor, list(tensor.shape), list(_tma_strides(tensor)), block, layout)


@lru_cache(maxsize=64)
def tile_layout(rows: int, d: int, dtype: torch.dtype) -> object:
    """How a tile of a (B, H, N, D) tensor lies in shared memory."""
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, d], element)


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
                address = argument.base.data_ptr()
                flat += entry.described(place, address, tuple(argument.shape), tuple(argument.strides))
                place += 1
            else:
                flat.append(argument)
        entry(grid, entry.stream_of(torch.cuda.current_device()), *flat)


def forward(call: AttentionCall) -> Forward:
    """Output and LSE of a call that `why_not` lets pass."""
    return run_forward(call, FORWARD_CONFIGS[call.query.shape[-1]])


def run_forward(call: AttentionCall, config: ForwardConfig) -> Forward:
    """`forward` with a configuration of one's own, for measuring."""
    layout = *_layout_of(call.query, call.key, call.value), id(config)
    known = _launches.get(call.plan)
    if known is None:
        known = _launches[call.plan] = {}
    found = known.get(layout)
    if found is None:
        found = known[layout] = ForwardLaunch(call, config)
    return found(call)


class ForwardLaunch:
    """All that calls of one plan, layout and configuration share, so that a call computes nothing twice."""

    def __init__(self, call: AttentionCall, config: ForwardConfig) -> None:
        query, key, plan = call.query, call.key, call.plan
        batch, heads, n, d = query.shape
        self.config = config
        self.work = work_by_query(plan)
        self.masks = plan.masks.bits
        # One number seen as a whole tensor: `empty_like` of it is cheaper than `empty` with its arguments.
        self.lse_like = torch.zeros(1, dtype=torch.float32, device=query.device).expand(batch, heads, n)
        self.device = query.device
        items_a_batch = self.work.items.shape[0]
        items = batch * items_a_batch
        self.sizes = items, items_a_batch, heads, heads // key.shape[1], n
        self.constants = (
            plan.block_size, config.k_stages, config.v_stages, config.ping_pong, config.persistent,
            config.registers,
        )  # fmt: skip
        resident = config.programs_a_processor * processors(query.device)
        self.grid = min(items, resident) if config.persistent else items
        self.lists = tuple(
            tensor.data_ptr() for tensor in (self.work.items, self.work.full, self.work.partial, self.masks)
        )
        self.identity = ("forward", query.device.index, query.dtype, d, plan.block_size, config)
        self.entry: Entry | None = None
        self.shapes = tuple(query.shape), tuple(key.shape)
        self.strides = tuple(_tma_strides(tensor) for tensor in (query, key, call.value, torch.empty_like(query)))

    def __call__(self, call: AttentionCall) -> Forward:
        query = call.query
        if self.work.covers:
            output = torch.empty_like(query)
            lse = torch.empty_like(self.lse_like, memory_format=torch.contiguous_format)
        else:
            output = torch.zeros_like(query)
            lse = torch.full_like(self.lse_like, -math.inf, memory_format=torch.contiguous_format)
        if self.grid:
            if torch.cuda.current_device() == self.device.index:
                self._launch(call, output, lse)
            else:
                with torch.cuda.device(self.device):
                    self._launch(call, output, lse)
        return Forward(output, lse)

    def _launch(self, call: AttentionCall, output: Tensor, lse: Tensor) -> None:
        index: int = self.device.index
        entry = self.entry
        if entry is None or entry.watched:
            self._launch_publicly(call, output, lse)
            self.entry = _compiled[self.identity][1]
            return
        stream = entry.stream_of(index)
        query_shape, key_shape = self.shapes
        query, key, value, out = self.strides
        entry(
            self.grid,
            stream,
            *entry.described(0, call.query.data_ptr(), query_shape, query),
            *entry.described(1, call.key.data_ptr(), key_shape, key),
            *entry.described(2, call.value.data_ptr(), key_shape, value),
            *entry.described(3, output.data_ptr(), query_shape, out),
            lse.data_ptr(),
            *self.lists,
            item_counter(index, stream).data_ptr(),
            *self.sizes,
            call.scale * LOG2_E,
            *self.constants,
        )

    def _launch_publicly(self, call: AttentionCall, output: Tensor, lse: Tensor) -> None:
        from .hopper_forward import attention_fwd_kernel

        query, config = call.query, self.config
        d = query.shape[-1]
        half = tile_layout(64, d, query.dtype)
        whole = tile_layout(config.key_tile, d, query.dtype)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        arguments = (
            describe(query, 64, half),
            describe(call.key, config.key_tile, whole),
            describe(call.value, config.key_tile, whole),
            describe(output, 64, half),
            lse,
            self.work.items,
            self.work.full,
            self.work.partial,
            self.masks,
            item_counter(self.device.index, stream),
            *self.sizes,
            call.scale * LOG2_E,
            *self.constants,
        )
        options = OPTIONS if config.maxnreg is None else OPTIONS | {"maxnreg": config.maxnreg}
        launch(attention_fwd_kernel, self.identity, self.grid, arguments, **options)


def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients of a call that `why_not` lets pass; see `hopper_gradients` for what they need."""
    from . import hopper_gradients

    return hopper_gradients.backward(call, output, lse, grad_output, grad_lse)
