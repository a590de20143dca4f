"""Gradients on Hopper GPUs through the Gluon kernels: the lists they read, the memory they need, and their launches.

Two ways lead to dQ. The fused one computes it beside dK and dV, five products a tile pair, and adds it up in a float32
copy of dQ (4 bytes an element, twice the size of dQ) in an order that is not fixed. The other computes it again by
rows, seven products a tile pair, needs no copy, and gives the same bits every time; it is taken unless
`reproducible_gradients(False)` was said.

Parts of a plan run one after another, each with the LSE and delta of the whole rows, which makes its share exact alone.
A plan of one plain part writes every row. Else gradients begin as zeros and every part adds to them, in the order of
the forward turned round: the part that reaches most rows is the last, and adds before it rounds.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..plan.plan import Plan
from . import hopper_backend
from .hopper_backend import LOG2_E, processors
from .hopper_launch import OPTIONS, Entry, Maps, boxes_of, compiled_entry, describe, launch
from .hopper_work import HeldWork, Step, Strides, steps_of
from .registry import AttentionCall, Gradients, empty_rows, reproducible_gradients


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """How the kernels are built for one head width."""

    streamed_tile: int
    """Rows of a step; with the head width they must make 64 x 128, one 64 x 64 piece of dQ a warpgroup."""
    stages: int = 2
    held_stages: int = 2
    skew: bool = False
    """Whether the second warpgroup starts its step after the first, so that they multiply by turns."""
    registers: int = 240
    """Registers a thread of a multiplying warpgroup gets."""


BACKWARD_CONFIGS = {64: BackwardConfig(128), 128: BackwardConfig(64)}


KEPT_LAUNCHES = 1024
"""Compiled row kernels remembered with the sizes they were called with; triton itself forgets none."""

_launches: WeakKeyDictionary[Plan, dict[tuple[object, ...], BackwardLaunch]] = WeakKeyDictionary()
_compiled: dict[tuple[object, ...], Any] = {}


def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients of a call that `hopper_backend.why_not` lets pass."""
    config = BACKWARD_CONFIGS[call.query.shape[-1]]
    fused = not reproducible_gradients()
    return run_backward(call, output, lse, grad_output, grad_lse, config, fused)


def run_backward(
    call: AttentionCall,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    config: BackwardConfig,
    fused: bool,
) -> Gradients:
    """`backward` with a configuration of one's own, for measuring."""
    if hopper_backend._layout_problem("grad_output", grad_output) is not None:
        grad_output = grad_output.contiguous()
    slope = lse if grad_lse is None else grad_lse
    tensors = call.query, call.key, call.value, output, grad_output, slope
    layout = (
        *((tensor.shape, tensor.stride()) for tensor in tensors),
        *(call.query.dtype, call.device, call.scale, config, fused, grad_lse is None, output.data_ptr() % 16),
    )
    known = _launches.setdefault(call.plan, {})
    found = known.get(layout)
    if found is None:
        found = known[layout] = BackwardLaunch(call, output, grad_output, slope, grad_lse is None, config, fused)
    with nullcontext() if torch.cuda.current_device() == call.device.index else torch.cuda.device(call.device):
        return found(call, output, lse, grad_output, slope)


class BackwardLaunch:
    """All that backward calls of one plan, layout and configuration share, so that a call computes nothing twice."""

    def __init__(
        self,
        call: AttentionCall,
        output: Tensor,
        grad_output: Tensor,
        slope: Tensor,
        plain: bool,
        config: BackwardConfig,
        fused: bool,
    ) -> None:
        query, plan = call.query, call.plan
        batch, heads, n, d = query.shape
        rows = config.streamed_tile
        self.device = query.device
        self.fused = fused
        steps = steps_of(plan)
        self.writes_all = len(steps) == 1 and not steps[0].strided
        # Whole blocks of the plan, so that a list may name the part of its last block that lies past the end.
        tiles = -(-n // plan.block_size) * (plan.block_size // rows)
        last = steps[0] if len(steps) > 1 else None
        self.parts = [PartBackward(call, config, step, tiles, fused, step is last) for step in reversed(steps)]
        self.row_tiles = batch * heads * tiles
        self.o_sum = self.row_tiles * 2 * rows
        most = max((part.sum_tiles for part in self.parts), default=0)
        self.o_claimed = self.o_sum + (most * rows * d if fused else 0)
        self.prepare_sizes = heads, tiles, n, *output.stride()[:3], *grad_output.stride()[:3], *slope.stride()
        self.prepare_constants = rows, d, not plain, fused and self.writes_all

    def __call__(
        self, call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, slope: Tensor
    ) -> Gradients:
        from .hopper_prepare import prepare_bwd_kernel

        space = torch.empty(self.o_claimed + 4, dtype=torch.float32, device=self.device)
        stats, total, claimed = space, space[self.o_sum : self.o_claimed], space[self.o_claimed :].view(torch.int32)
        _launch_rows(
            prepare_bwd_kernel,
            self.row_tiles,
            (output, grad_output, lse, slope, stats, total, claimed),
            self.prepare_sizes,
            self.prepare_constants,
        )
        # Only now, while the GPU is busy with the first kernel.
        gradients = Gradients(*(empty_rows(t, t.shape[-1]) for t in (call.query, call.key, call.value)))
        if not self.writes_all:
            for gradient in gradients:
                gradient.zero_()
        for part in self.parts:
            part(call, grad_output, gradients, stats, total, claimed)
        return gradients


class PartBackward:
    """One part of a `BackwardLaunch`."""

    def __init__(
        self, call: AttentionCall, config: BackwardConfig, step: Step, tiles: int, fused: bool, joins: bool
    ) -> None:
        query, key, plan = call.query, call.key, call.plan
        batch, heads, n, self.d = query.shape
        group = heads // key.shape[1]
        self.device = query.device
        self.rows = config.streamed_tile
        self.fused = fused
        self.joins = joins
        self.adds = joins or step.strided
        self.axes = (step.queries, step.keys) if step.strided else (None, None)
        self.identity = self.device.index, query.dtype, self.d, plan.block_size, config, fused, step.shape, joins
        self.entries: dict[str, Entry | None] = {}
        self.maps: dict[str, Maps] = {}
        self.by_key = step.held(group, by_key=True)
        self.by_query = None if fused else step.held(group, by_key=False)
        own_tiles = step.part.queries.tiles * (plan.block_size // self.rows) if step.strided else tiles
        self.sum_tiles = batch * heads * own_tiles
        axes = *step.queries, *step.keys
        like = (empty_rows(t, self.d).stride()[:3] for t in (query, key, call.value))
        query_strides, *key_strides = (tuple(stride // 8 for stride in strides) for strides in like)
        scales = call.scale, call.scale * LOG2_E
        stages = plan.block_size, config.stages, config.held_stages
        items = len(self.by_key.items)
        self.key_numbers = (
            *(batch * items, items, heads, group, tiles, own_tiles, step.part.keys.tiles, n, *axes),
            *(*key_strides[0], *key_strides[1], *scales, *stages, fused, config.skew, joins, config.registers),
        )
        self.finish_sizes = heads, own_tiles, n
        self.finish_constants = self.rows, self.d, plan.block_size, step.strided, self.adds
        self.rate = step.queries.rate
        if self.by_query is not None:
            items = len(self.by_query.items)
            self.query_numbers = (
                *(batch * items, items, heads, group, tiles, step.part.queries.tiles, n, *axes),
                *(*query_strides, *scales, *stages, joins, config.registers),
            )

    def __call__(
        self,
        call: AttentionCall,
        grad_output: Tensor,
        gradients: Gradients,
        stats: Tensor,
        total: Tensor,
        claimed: Tensor,
    ) -> None:
        from .hopper_backward import attention_dkv_bwd_kernel
        from .hopper_prepare import finish_dq_kernel

        query, key, value = call.query, call.key, call.value
        rows, (queries, keys) = self.rows, self.axes
        if self.fused and self.adds:
            total[: self.sum_tiles * rows * self.d].zero_()
        work = self.by_key
        read = (query, rows, queries), (grad_output, rows, queries), (key, 64, keys), (value, 64, keys)
        lists = stats, total, *_lists(work), claimed
        written = (gradients.key, keys), (gradients.value, keys)
        self._launch("dkv", attention_dkv_bwd_kernel, read, written, lists, self.key_numbers)
        if self.fused:
            sizes = *self.finish_sizes, *gradients.query.stride()[:3], self.rate
            tensors = total, gradients.query, work.tiles, work.classes
            _launch_rows(finish_dq_kernel, self.sum_tiles, tensors, sizes, self.finish_constants, call.scale)
        else:
            from .hopper_backward_rows import attention_dq_bwd_kernel

            assert self.by_query is not None
            read = (query, 64, queries), (grad_output, 64, queries), (key, rows, keys), (value, rows, keys)
            lists = stats, *_lists(self.by_query), claimed
            written = ((gradients.query, queries),)
            self._launch("dq", attention_dq_bwd_kernel, read, written, lists, self.query_numbers)

    def _launch(
        self,
        name: str,
        kernel: Any,
        read: tuple[tuple[Tensor, int, Strides | None], ...],
        written: tuple[tuple[Tensor, Strides | None], ...],
        lists: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
    ) -> None:
        """Run a Gluon kernel: tensors it reads by TMA with the rows of a move, gradients, lists, and numbers.

        A gradient is given by descriptors, or where the part joins what is there, by its address.
        """
        grid = min(numbers[0], processors(self.device))
        if not grid:
            return
        moved = read if self.joins else (*read, *((tensor, 64, axis) for tensor, axis in written))
        places: tuple[Tensor | None, ...] = tuple(tensor if self.joins else None for tensor, _ in written)
        holes = (None,) * (2 * len(written)) if self.joins else ()
        entry = self.entries.get(name)
        if entry is None or entry.watched:
            identity = (name, *self.identity)
            described = (one for tensor, rows, axis in moved for one in describe(tensor, rows, axis))
            launch(kernel, identity, grid, (*described, *holes, *places, *lists, *numbers), **OPTIONS)
            self.entries[name] = compiled_entry(identity)
            self.maps[name] = Maps(tuple(boxes_of(tensor, axis) for tensor, _, axis in moved))
            return
        maps = self.maps[name](entry, *(tensor for tensor, *_ in moved))
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in (*places, *lists))
        entry(grid, entry.stream_of(self.device.index), *maps, *holes, *addresses, *numbers)


def _lists(work: HeldWork) -> tuple[Tensor, ...]:
    return work.items, work.classes, work.rows, work.full, work.partial, work.tiles, work.bits


def _launch_rows(
    kernel: Any,
    grid: int,
    tensors: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    constants: tuple[object, ...],
    *numbers: float,
) -> None:
    """Run a plain triton kernel, going past the argument inspection of `triton.jit` once it has been compiled.

    Triton compiles apart for the types and alignments of tensors, and for sizes that are 1, multiples of 16, or long.
    """
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    aligned = tuple(address % 16 == 0 for address in addresses)
    key = kernel, tensors[0].device.index, tensors[0].dtype, tensors[1].dtype, aligned, sizes, constants
    compiled = _compiled.get(key)
    if compiled is None:
        if len(_compiled) >= KEPT_LAUNCHES:
            _compiled.clear()
        _compiled[key] = kernel[(grid,)](*tensors, *sizes, *numbers, *constants)
    else:
        compiled[(grid, 1, 1)](*addresses, *sizes, *numbers, *constants)
