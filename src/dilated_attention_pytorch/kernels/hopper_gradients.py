"""Gradients on Hopper GPUs through the Gluon kernels: the lists they read, the memory they need, and their launches.

Two ways lead to dQ. The fused one computes it beside dK and dV, five products a tile pair, and adds it up in a float32
copy of dQ (4 bytes an element, twice the size of dQ) in an order that is not fixed. The other computes it again by
rows, seven products a tile pair, needs no copy, and gives the same bits every time; it is taken unless
`reproducible_gradients(False)` was said.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..plan.plan import Plan, Walk
from . import hopper_backend
from .hopper_backend import LOG2_E, OPTIONS, describe, launch, processors, tile_layout
from .hopper_launch import Entry
from .registry import AttentionCall, Gradients, empty_rows, reproducible_gradients

HELD_ROWS = 128
"""Rows of one work item: two warpgroups of 64."""


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


@dataclass(frozen=True, slots=True)
class HeldWork:
    """A walk as the backward kernels read it: one record an item, in the order items start."""

    items: Tensor
    """int32 [I, 4]: head, 128-row tile, tiles of the plan it meets over all heads of its group, 0"""
    classes: Tensor
    """int32 [H]: head class"""
    rows: Tensor
    """int32 [C * T, 6]: the walk's rows"""
    full: Tensor
    """int32 [F]"""
    partial: Tensor
    """int32 [P, 4]: tile, mask, first and last difference, held minus streamed, of the band"""
    bits: Tensor
    """int32 [M, B, W]: bit `j % 32` of `bits[m, i, j // 32]` allows held element i, streamed element j"""


KEPT_LAUNCHES = 1024
"""Compiled row kernels remembered with the sizes they were called with; triton itself forgets none."""

_work: WeakIdKeyDictionary = WeakIdKeyDictionary()
_launches: WeakKeyDictionary[Plan, dict[tuple[object, ...], BackwardLaunch]] = WeakKeyDictionary()
_compiled: dict[tuple[object, ...], Any] = {}


def transposed_bits(plan: Plan, chunk: int = 1024) -> Tensor:
    """`Masks.bits` with keys and queries exchanged; nothing to read when bands tell all."""
    masks = plan.masks
    if bool((masks.band[:, 0] <= masks.band[:, 1]).all()):
        return masks.bits
    shifts = torch.arange(32, dtype=torch.int32, device=masks.bits.device)
    turned = torch.empty_like(masks.bits)
    for first in range(0, len(turned), chunk):
        some = masks.bits[first : first + chunk]
        dense = ((some[..., None] >> shifts) & 1).flatten(2)[..., : plan.block_size]
        words = dense.transpose(1, 2).unflatten(2, (-1, 32))
        turned[first : first + chunk] = (words << shifts).sum(-1, dtype=torch.int64).to(torch.int32)
    return turned


def _held_items(plan: Plan, walk: Walk, tiles: int, group: int) -> Tensor:
    """Work records of every head that holds, heads outermost, rows in the walk's order; those without a pair too."""
    device = walk.rows.device
    sub_tiles = plan.block_size // HELD_ROWS
    head_class = plan.parts[0].head_class.long().view(-1, group)
    order = walk.order.long()
    by_class = order[torch.argsort(order // tiles, stable=True)].view(-1, tiles) % tiles
    # The heads of a group may have lists of their own; the order of one of them has to do for all.
    block = by_class[head_class.amax(1).clamp(min=0)]
    whole, partly = walk.counts()
    met = (whole + partly).view(-1, tiles)
    total = torch.where((head_class >= 0)[..., None], met[head_class.clamp(min=0)], 0).sum(1)
    steps = total.gather(1, block)[:, :, None].expand(-1, -1, sub_tiles)
    tile = block[:, :, None] * sub_tiles + torch.arange(sub_tiles, device=device)
    heads = torch.arange(len(head_class), device=device)[:, None, None].expand_as(tile)
    columns = heads, tile, steps, torch.zeros_like(tile)
    return torch.stack(columns, dim=-1)[tile * HELD_ROWS < plan.n].int().contiguous()


def held_work(plan: Plan, group: int, *, by_key: bool) -> HeldWork:
    """The work list of dK and dV, or of dQ, made once a plan and group size."""
    part = plan.parts[0]
    walk, axis = (part.by_key, part.keys) if by_key else (part.by_query, part.queries)
    known = _work.setdefault(walk.rows, {})
    if group not in known:
        band = plan.masks.band[walk.mask.long()]
        if not by_key:
            # A band counts keys minus queries, and the kernel what is held minus what is streamed.
            band = torch.where(band[:, :1] <= band[:, 1:], -band.flip(1), band)
        partial = torch.cat((torch.stack((walk.partial, walk.mask), dim=1), band), dim=1).int().contiguous()
        items = _held_items(plan, walk, axis.tiles, group if by_key else 1)
        bits = transposed_bits(plan) if by_key else plan.masks.bits
        known[group] = HeldWork(items, part.head_class.int(), walk.rows.contiguous(), walk.full, partial, bits)
    return known[group]


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
        query, key, plan = call.query, call.key, call.plan
        batch, heads, n, d = query.shape
        group = heads // key.shape[1]
        rows = config.streamed_tile
        self.device = query.device
        self.config = config
        self.fused = fused
        self.d = d
        self.dtype = query.dtype
        # Whole blocks of the plan, so that a list may name the part of its last block that lies past the end.
        tiles = -(-n // plan.block_size) * (plan.block_size // rows)
        self.row_tiles = batch * heads * tiles
        self.o_sum = self.row_tiles * 2 * rows
        self.o_claimed = self.o_sum + (self.row_tiles * rows * d if fused else 0)
        self.prepare_sizes = heads, tiles, n, *output.stride()[:3], *grad_output.stride()[:3], *slope.stride()
        self.prepare_constants = rows, d, not plain, fused
        self.finish_constants = rows, d
        self.finish_sizes = heads, tiles, n
        self.identity = self.device.index, query.dtype, d, plan.block_size, config, fused
        self.entries: dict[str, Entry | None] = {}
        self.shapes: dict[str, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = {}
        self.by_key = held_work(plan, group, by_key=True)
        self.by_query = None if fused else held_work(plan, group, by_key=False)
        scales = call.scale, call.scale * LOG2_E
        stages = config.stages, config.held_stages
        part = plan.parts[0]
        self.key_numbers = (
            *(batch * len(self.by_key.items), len(self.by_key.items), heads, group, tiles, part.keys.tiles, n, *scales),
            *(plan.block_size, *stages, fused, config.skew, config.registers),
        )
        if self.by_query is not None:
            items = len(self.by_query.items)
            self.query_numbers = (
                *(batch * items, items, heads, group, tiles, part.queries.tiles, n, *scales),
                *(plan.block_size, *stages, config.registers),
            )

    def __call__(
        self, call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, slope: Tensor
    ) -> Gradients:
        from .hopper_backward import attention_dkv_bwd_kernel, finish_dq_kernel, prepare_bwd_kernel

        query, key, value = call.query, call.key, call.value
        space = torch.empty(self.o_claimed + 4, dtype=torch.float32, device=self.device)
        stats, total, claimed = space, space[self.o_sum :], space[self.o_claimed :].view(torch.int32)
        _launch_rows(
            prepare_bwd_kernel,
            self.row_tiles,
            (output, grad_output, lse, slope, stats, total, claimed),
            self.prepare_sizes,
            self.prepare_constants,
        )
        # Only now, while the GPU is busy with the first kernel.
        d, rows = self.d, self.config.streamed_tile
        grad_query, grad_key, grad_value = empty_rows(query, d), empty_rows(key, d), empty_rows(value, d)
        work = self.by_key
        moved = (query, rows), (grad_output, rows), (key, 64), (value, 64), (grad_key, 64), (grad_value, 64)
        lists = stats, total, work.items, work.classes, work.rows, work.full, work.partial, work.bits, claimed
        self._launch("dkv", attention_dkv_bwd_kernel, moved, lists, self.key_numbers)
        if self.fused:
            sizes = *self.finish_sizes, *grad_query.stride()[:3]
            _launch_rows(
                finish_dq_kernel, self.row_tiles, (total, grad_query), sizes, self.finish_constants, call.scale
            )
        else:
            from .hopper_backward_rows import attention_dq_bwd_kernel

            work = self.by_query
            assert work is not None
            moved = (query, 64), (grad_output, 64), (key, rows), (value, rows), (grad_query, 64)
            lists = stats, work.items, work.classes, work.rows, work.full, work.partial, work.bits, claimed
            self._launch("dq", attention_dq_bwd_kernel, moved, lists, self.query_numbers)
        return Gradients(grad_query, grad_key, grad_value)

    def _launch(
        self,
        name: str,
        kernel: Any,
        moved: tuple[tuple[Tensor, int], ...],
        lists: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
    ) -> None:
        """Run a Gluon kernel: tensors it moves by TMA with the rows of a move, tensors it reads, and numbers."""
        grid = min(numbers[0], processors(self.device))
        entry = self.entries.get(name)
        if entry is None or entry.watched:
            identity = (name, *self.identity)
            described = (describe(tensor, rows, tile_layout(rows, self.d, self.dtype)) for tensor, rows in moved)
            launch(kernel, identity, grid, (*described, *lists, *numbers), **OPTIONS)
            self.entries[name] = hopper_backend._compiled[identity][1]
            self.shapes[name] = tuple((tuple(t.shape), hopper_backend._tma_strides(t)) for t, _ in moved)
            return
        maps: list[object] = []
        for place, ((tensor, _), (shape, strides)) in enumerate(zip(moved, self.shapes[name], strict=True)):
            maps += entry.described(place, tensor.data_ptr(), shape, strides)
        entry(grid, entry.stream_of(self.device.index), *maps, *(t.data_ptr() for t in lists), *numbers)


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
