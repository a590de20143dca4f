"""Backward over gathered queries on Hopper GPUs: the calls it supports, and its launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.call import AttentionCall
from ...kernels.hopper import backend as hopper_backend
from ...kernels.hopper.layouts import LOG2_E, layout_problem
from ...kernels.launch.launcher import Launches, LaunchStep, PtrArg, Tensors, TmaArg, on_device
from ...kernels.launch.triton_abi import Grid
from ..types import GatherIndex

BLOCK = 128
MOST = 2**31
"""Limit of offsets of rows within a head, in units of 16 bytes, and of the number of gathered rows of all heads."""


class GatherConfig(NamedTuple):
    """How the kernel is built for one head width."""

    tile: int
    """Gathered rows of a step; with the width they must make 64 x 128."""
    stages: int = 3
    """Pipeline depth: one tile being consumed, one ready, one in flight."""
    registers: int = 232
    """Registers per thread of a consumer warpgroup."""
    loader_registers: int = 40
    """Registers per thread of the producer warpgroup; with fewer it spills the addresses of its rows."""


CONFIGS = {64: GatherConfig(128), 128: GatherConfig(64)}


def why_not(call: AttentionCall, chosen: GatherIndex, bounds: Tensor | None, *moved: Tensor) -> str | None:
    """Reason why the kernel cannot run the backward of a call and its inverted index; `moved` are its large tensors."""
    query = call.query
    problem = hopper_backend.device_problem(query.device)
    if problem is not None:
        return problem
    d, n = query.shape[3], query.shape[2]
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, got {query.dtype}"
    if d not in CONFIGS or call.value.shape[3] != d:
        return f"needs query and value width 64 or 128, the same for both, got {d} and {call.value.shape[3]}"
    if call.plan.block_size != BLOCK or n % BLOCK:
        return f"needs whole blocks of {BLOCK}, got {n} tokens in blocks of {call.plan.block_size}"
    if call.key_padding_mask is not None or call.dropout_p:
        return "has no key padding mask and no dropout"
    if bounds is not None:
        return "has no bounds of packed documents"
    if chosen.source.dtype is not torch.int32 or chosen.source.numel() >= MOST:
        return f"needs choices numbered in 32 bits, got {chosen.source.dtype} and {chosen.source.numel()} rows"
    for tensor in moved:
        problem = layout_problem("every tensor", tensor)
        if problem is not None:
            return problem
        if tensor.stride(2) // 8 * n >= MOST:
            return f"needs fewer than {MOST} times 16 bytes in a head"
    return None


QUERY, KEY, VALUE, GRAD, LSE, DELTA, PART, GRAD_KEY, GRAD_VALUE, SOURCE, FIRST, ORDER, AFTER = range(13)
"""Slots of the tensors of a launch, and their number."""


class ChosenBackward:
    """Launch of `hopper_gathered_kernel.chosen_bwd_kernel` for calls and inverted indices of one layout."""

    def __init__(self, call: AttentionCall, chosen: GatherIndex, first_head: int, tensors: Tensors) -> None:
        from .hopper_gathered_kernel import chosen_bwd_kernel

        query, grad = tensors[QUERY], tensors[GRAD]
        batch, heads, n, d = query.shape
        config, blocks = CONFIGS[d], n // BLOCK
        group = heads // tensors[KEY].shape[1]
        moved = (TmaArg(slot, 64, d) for slot in (KEY, VALUE, GRAD_KEY, GRAD_VALUE))
        read = GRAD_KEY, GRAD_VALUE, QUERY, GRAD, LSE, DELTA, PART, SOURCE, FIRST, ORDER
        places = (PtrArg(slot) for slot in read)
        sizes = chosen.source.shape[1], n, blocks, batch * blocks, call.query.shape[1], first_head, group
        strides = (stride // 8 for one in (query, grad) for stride in one.stride()[:3])
        scales = call.scale, call.scale * LOG2_E
        arguments = *moved, *places, *sizes, *strides, *scales, BLOCK, *config
        grid = batch * blocks, tensors[KEY].shape[1], 1
        launch = LaunchStep(chosen_bwd_kernel, grid, arguments, tensors[:AFTER])
        self._launches, self._device = Launches(query.device, [launch]), query.device

    def __call__(self, grid: Grid, tensors: Sequence[Tensor]) -> None:
        with on_device(self._device):
            self._launches(*tensors[:AFTER])
