"""Attention on Hopper GPUs through the Gluon kernels: what they can run, and how they are launched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

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
    ping_pong: bool = True
    """Whether the two warpgroups take turns at the tensor cores."""
    shared_exp: bool = False
    """Whether the multipliers compute a quarter of the exponentials."""
    registers: int = 240
    """Registers a thread of a multiplying warpgroup gets."""
    programs_a_processor: int = 1
    """Programs resident on a multiprocessor; the grid holds this many for each."""
    persistent: bool = True
    """Whether a program takes many items, or one."""
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


_work: WeakIdKeyDictionary = WeakIdKeyDictionary()
_regular: WeakIdKeyDictionary = WeakIdKeyDictionary()
_compiled: dict[tuple[object, ...], Any] = {}


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
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size > 1 and (stride <= 0 or stride % 8):
            return f"{name} must have positive strides that are multiples of 8 elements, got {tuple(tensor.stride())}"
    return None


def _is_regular(axis: Axis, block_size: int, n: int) -> bool:
    """Whether tile `t` is tokens `t * block_size` and on, cut short by nothing but the end of the sequence."""
    key = axis.start
    if key not in _regular:
        start = torch.arange(axis.tiles, device=axis.start.device) * block_size
        whole = axis.end >= (start + block_size).clamp(max=n)
        _regular[key] = axis.rate == 1 and bool(((axis.start == start) & whole).all())
    return _regular[key]


def why_not(call: AttentionCall) -> str | None:
    """Why these kernels cannot run the call, or None when they can."""
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
    if call.key_padding_mask is not None:
        return "has no key padding mask"
    if call.dropout_p:
        return "has no dropout; pass dropout_p=0.0"
    if call.scale <= 0:
        return f"needs a positive scale, got {call.scale}"
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        problem = _layout_problem(name, tensor)
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


def describe(tensor: Tensor, rows: int, layout: object) -> Any:
    """A TMA descriptor of a (B, H, N, D) tensor that moves `rows` rows of one head."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    d = tensor.shape[-1]
    # A dimension of size one is never stepped over, but its stride must still be a legal one.
    strides = [stride if size > 1 else d for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides[-1] = 1
    return TensorDescriptor(tensor, list(tensor.shape), strides, [1, 1, rows, d], layout)


@lru_cache(maxsize=64)
def tile_layout(rows: int, d: int, dtype: torch.dtype) -> object:
    """How a tile of a (B, H, N, D) tensor lies in shared memory."""
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, d], element)


def launch(kernel: Any, key: tuple[object, ...], grid: int, arguments: tuple[object, ...], **options: object) -> None:
    """Run a kernel, going past the argument inspection of `triton.jit` once it has been compiled for `key`.

    The kernels specialize on nothing but types and their constants, so `key` holds those.
    """
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(grid,)](*arguments, **options)
    else:
        compiled[(grid, 1, 1)](*arguments)


def forward(call: AttentionCall) -> Forward:
    """Output and LSE of a call that `why_not` lets pass."""
    return run_forward(call, FORWARD_CONFIGS[call.query.shape[-1]])


def run_forward(call: AttentionCall, config: ForwardConfig) -> Forward:
    """`forward` with a configuration of one's own, for measuring."""
    from .hopper_forward import attention_fwd_kernel

    query, key, value, plan = call.query, call.key, call.value, call.plan
    batch, heads, n, d = query.shape
    work = work_by_query(plan)
    if work.covers:
        output = torch.empty_like(query)
        lse = torch.empty((batch, heads, n), dtype=torch.float32, device=query.device)
    else:
        output = torch.zeros_like(query)
        lse = torch.full((batch, heads, n), -math.inf, dtype=torch.float32, device=query.device)
    items_a_batch = work.items.shape[0]
    items = batch * items_a_batch
    if items == 0:
        return Forward(output, lse)
    half = tile_layout(64, d, query.dtype)
    whole = tile_layout(config.key_tile, d, query.dtype)
    arguments = (
        describe(query, 64, half),
        describe(key, config.key_tile, whole),
        describe(value, config.key_tile, whole),
        describe(output, 64, half),
        lse,
        work.items,
        work.full,
        work.partial,
        plan.masks.bits,
        items,
        items_a_batch,
        heads,
        heads // key.shape[1],
        n,
        call.scale * LOG2_E,
        plan.block_size,
        config.k_stages,
        config.v_stages,
        config.ping_pong,
        config.shared_exp,
        config.registers,
    )
    grid = min(items, config.programs_a_processor * processors(query.device)) if config.persistent else items
    options = OPTIONS if config.maxnreg is None else OPTIONS | {"maxnreg": config.maxnreg}
    identity = ("forward", query.device.index, query.dtype, d, plan.block_size, config)
    launch(attention_fwd_kernel, identity, grid, arguments, **options)
    return Forward(output, lse)


def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients of a call that `why_not` lets pass; see `hopper_gradients` for what they need."""
    from . import hopper_gradients

    return hopper_gradients.backward(call, output, lse, grad_output, grad_lse)
