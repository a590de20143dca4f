"""Layouts of tensors that the Hopper kernels read by TMA, and constants of their launches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)

Layout = tuple[object, ...]
"""Cache key of calls of one plan: device, dtype, shapes and strides."""


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


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
