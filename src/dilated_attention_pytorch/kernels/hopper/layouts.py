"""Layouts of tensors that the Hopper kernels read by TMA, and constants of their launches."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall
from ..launch.triton_abi import Box
from .lowering import Strides

LOG2_E = math.log2(math.e)

Layout = tuple[object, ...]
"""Cache key of calls of one plan: device, dtype, shapes and strides."""


TILE_WIDTHS = 64, 128
"""Widths of tiles in shared memory. The columns of narrower heads are padded with zeros by TMA."""


def tile_width(call: AttentionCall) -> int:
    """Width of the tiles of a call, one for queries, keys and values."""
    widest = max(call.query.shape[-1], call.value.shape[-1])
    return next(width for width in TILE_WIDTHS if widest <= width)


def columns_of(tensor: Tensor, width: int) -> int | None:
    """Columns of a row in units of 16 bytes, for kernels that store by pointers; None if a row fills its tile."""
    return None if tensor.shape[-1] == width else tensor.shape[-1] // 8


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_registers(programs: int) -> dict[str, int]:
    """Compiler options of a kernel of which `programs` share a multiprocessor; several have two warpgroups each."""
    return {} if programs == 1 else {"maxnreg": 2**16 // (256 * programs) // 8 * 8}


def layout_problem(name: str, tensor: Tensor) -> str | None:
    """Reason why TMA cannot read a tensor, or None: rows must be aligned to 16 bytes."""
    if tensor.data_ptr() % 16:
        return f"{name} must start at a multiple of 16 bytes"
    return stride_problem(name, tensor)


def stride_problem(name: str, tensor: Tensor) -> str | None:
    """Reason why TMA cannot read the strides of a tensor, or None."""
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size > 1 and (stride <= 0 or stride % 8):
            return f"{name} must have positive strides that are multiples of 8 elements, got {tuple(tensor.stride())}"
    return None


def layout_of(query: Tensor, key: Tensor, value: Tensor) -> Layout:
    """Device, dtype, shapes and strides of the tensors of a call."""
    shapes = query.shape, key.shape, value.shape
    return query.get_device(), query.dtype, shapes, query.stride(), key.stride(), value.stride()


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


def describe(tensor: Tensor, rows: int, width: int, axis: Strides | None = None) -> tuple[Any, Any]:
    """TMA descriptors of the boxes of a (B, H, N, D) tensor, for tiles [rows, width] of one head; see `boxes_of`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    def described(box: Box | None) -> Any:
        if box is None:
            return None
        block = [*(1,) * (len(box.shape) - 2), rows, width]
        layout = tile_layout(rows, width, tensor.dtype, len(box.shape))
        address = tensor.data_ptr() + box.begin
        # A `TensorDescriptor` reads nothing else of a tensor.
        base: Any = SimpleNamespace(data_ptr=lambda: address, dtype=tensor.dtype)
        return TensorDescriptor(base, list(box.shape), list(box.strides), block, layout)

    short, long = boxes_of(tensor, axis)
    return described(short), described(long)


def tile_layout(rows: int, d: int, dtype: torch.dtype, rank: int = 4) -> Any:
    """Shared-memory layout of a tile of a descriptor of the given rank."""
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([*(1,) * (rank - 2), rows, d], element)
