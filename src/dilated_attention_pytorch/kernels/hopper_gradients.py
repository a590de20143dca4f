"""Gradients on Hopper GPUs through the Gluon kernels: the lists they read, the memory they need, and their launches.

Two ways lead to dQ. The fused one computes it beside dK and dV, five products a tile pair, and adds it up in a float32
copy of dQ (4 bytes an element, twice the size of dQ) in an order that is not fixed. The other computes it again by
rows, seven products a tile pair, needs no copy, and gives the same bits every time; it is taken when
`torch.are_deterministic_algorithms_enabled()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..plan.plan import Plan, Walk
from . import hopper_backend
from .hopper_backend import LOG2_E, OPTIONS, describe, launch, processors, tile_layout
from .registry import AttentionCall, Gradients, empty_rows

HELD_ROWS = 128
"""Rows of one work item: two warpgroups of 64."""


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """How the kernels are built for one head width."""

    streamed_tile: int
    """Rows of a step; with the head width they must make 64 x 128, one 64 x 64 piece of dQ a warpgroup."""
    stages: int = 2
    held_stages: int = 2
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


_work: WeakIdKeyDictionary = WeakIdKeyDictionary()
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
    """Work records of every head that holds, heads outermost, rows in the walk's order, also those that meet nothing."""
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
    fused = not torch.are_deterministic_algorithms_enabled()
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
    from .hopper_backward import attention_dkv_bwd_kernel, finish_dq_kernel, prepare_bwd_kernel
    from .hopper_backward_rows import attention_dq_bwd_kernel

    query, key, value, plan = call.query, call.key, call.value, call.plan
    batch, heads, n, d = query.shape
    group = heads // key.shape[1]
    if hopper_backend._layout_problem("grad_output", grad_output) is not None:
        grad_output = grad_output.contiguous()
    rows = config.streamed_tile
    # Whole blocks of the plan, so that a list may name the part of its last block that lies past the end.
    query_tiles = -(-n // plan.block_size) * (plan.block_size // rows)
    row_tiles = batch * heads * query_tiles
    device = query.device
    stats = torch.empty((row_tiles, 2, rows), dtype=torch.float32, device=device)
    total = torch.empty((row_tiles, rows * d) if fused else (4,), dtype=torch.float32, device=device)
    claimed = torch.empty(1, dtype=torch.int32, device=device)
    slope = lse if grad_lse is None else grad_lse
    strides = *output.stride()[:3], *grad_output.stride()[:3], *slope.stride()
    _launch_rows(
        prepare_bwd_kernel,
        row_tiles,
        (output, grad_output, lse, slope, stats, total, claimed),
        (heads, query_tiles, n, *strides),
        (rows, d, grad_lse is not None, fused),
    )

    half = tile_layout(64, d, query.dtype)
    tile = tile_layout(rows, d, query.dtype)
    scales = call.scale, call.scale * LOG2_E
    grad_query, grad_key, grad_value = empty_rows(query, d), empty_rows(key, d), empty_rows(value, d)
    identity = (device.index, query.dtype, d, plan.block_size, config)

    work = held_work(plan, group, by_key=True)
    items = batch * len(work.items)
    arguments = (
        *(describe(tensor, rows, tile) for tensor in (query, grad_output)),
        *(describe(tensor, 64, half) for tensor in (key, value, grad_key, grad_value)),
        *(stats, total, work.items, work.classes, work.rows, work.full, work.partial, work.bits, claimed),
        *(items, len(work.items), heads, group, query_tiles, plan.parts[0].keys.tiles, n, *scales),
        *(plan.block_size, config.stages, config.held_stages, fused, config.registers),
    )
    grid = min(items, processors(device))
    launch(attention_dkv_bwd_kernel, ("dkv", fused, *identity), grid, arguments, **OPTIONS)
    if fused:
        sizes = heads, query_tiles, n, *grad_query.stride()[:3]
        _launch_rows(finish_dq_kernel, row_tiles, (total, grad_query), sizes, (rows, d), call.scale)
        return Gradients(grad_query, grad_key, grad_value)

    work = held_work(plan, group, by_key=False)
    items = batch * len(work.items)
    arguments = (
        *(describe(tensor, 64, half) for tensor in (query, grad_output)),
        *(describe(tensor, rows, tile) for tensor in (key, value)),
        describe(grad_query, 64, half),
        *(stats, work.items, work.classes, work.rows, work.full, work.partial, work.bits, claimed),
        *(items, len(work.items), heads, group, query_tiles, plan.parts[0].queries.tiles, n, *scales),
        *(plan.block_size, config.stages, config.held_stages, config.registers),
    )
    launch(attention_dq_bwd_kernel, ("dq", *identity), min(items, processors(device)), arguments, **OPTIONS)
    return Gradients(grad_query, grad_key, grad_value)


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
    kinds = tuple((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors)
    ranges = tuple((size == 1, size % 16 == 0, size >= 2**31) for size in sizes)
    key = kernel, tensors[0].device.index, kinds, ranges, constants
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(grid,)](*tensors, *sizes, *numbers, *constants)
    else:
        compiled[(grid, 1, 1)](*tensors, *sizes, *numbers, *constants)
