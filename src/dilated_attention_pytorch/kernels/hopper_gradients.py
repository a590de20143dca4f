"""Gradients on Hopper GPUs through the Gluon kernels: the lists they read, the memory they need, and their launches.

Two ways lead to dQ. The fused one computes it beside dK and dV, five products a tile pair, and adds it up in a float32
copy of dQ (4 bytes an element, twice the size of dQ) in an order that is not fixed. The other computes it again by
rows, seven products a tile pair, needs no copy, and gives the same bits every time; it is taken when
`torch.are_deterministic_algorithms_enabled()`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..plan.plan import Plan, Walk
from . import hopper_backend
from .hopper_backend import LOG2_E, OPTIONS, describe, launch, processors, tile_layout
from .registry import AttentionCall, Gradients, empty_rows

KEY_ROWS = 128
"""Keys of one work item: two warpgroups of 64."""


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """How the kernel for dK and dV is built for one head width."""

    query_tile: int
    """Query rows of a step; with the head width it must make 64 x 128, one 64 x 64 piece of dQ a warpgroup."""
    stages: int = 2
    key_stages: int = 2
    registers: int = 240
    """Registers a thread of a multiplying warpgroup gets."""


BACKWARD_CONFIGS = {64: BackwardConfig(128), 128: BackwardConfig(64)}


@dataclass(frozen=True, slots=True)
class KeyWork:
    """A walk by key as the kernel reads it: one record an item, in the order items start."""

    items: Tensor
    """int32 [I, 4]: key head, 128-key tile, query tiles of the plan it meets over all heads of its group, 0"""
    classes: Tensor
    """int32 [H]: head class"""
    rows: Tensor
    """int32 [C * T, 6]: the walk's rows"""
    full: Tensor
    """int32 [F]"""
    partial: Tensor
    """int32 [P, 4]: tile, mask, first and last difference of the band"""
    bits: Tensor
    """int32 [M, B, W]: the element masks by key; word `i // 32` of `bits[m, j]` tells about query element i"""
    covers: bool
    """Whether every key belongs to an item."""


_work: WeakIdKeyDictionary = WeakIdKeyDictionary()


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


def _key_items(plan: Plan, walk: Walk, group: int) -> tuple[Tensor, bool]:
    """Work records of every key head, heads outermost, rows in the walk's order, and whether no key is left out."""
    part = plan.parts[0]
    device = walk.rows.device
    tiles = part.keys.tiles
    sub_tiles = plan.block_size // KEY_ROWS
    head_class = part.head_class.long().view(-1, group)
    order = walk.order.long()
    by_class = order[torch.argsort(order // tiles, stable=True)].view(-1, tiles) % tiles
    key_heads = torch.arange(len(head_class), device=device)
    # The heads of a group may have lists of their own; the order of one of them has to do for all.
    block = by_class[head_class.amax(1).clamp(min=0)]
    whole, partly = walk.counts()
    met = (whole + partly).view(-1, tiles)
    total = torch.where((head_class >= 0)[..., None], met[head_class.clamp(min=0)], 0).sum(1)
    steps = total.gather(1, block)[:, :, None].expand(-1, -1, sub_tiles)
    tile = block[:, :, None] * sub_tiles + torch.arange(sub_tiles, device=device)
    columns = (key_heads[:, None, None].expand_as(tile), tile, steps, torch.zeros_like(tile))
    kept = (steps > 0) & (tile * KEY_ROWS < plan.n)
    items = torch.stack(columns, dim=-1)[kept].int().contiguous()
    return items, len(items) == len(head_class) * -(-plan.n // KEY_ROWS)


def work_by_key(plan: Plan, group: int) -> KeyWork:
    """The work list of dK and dV, made once a plan and group size."""
    part = plan.parts[0]
    walk = part.by_key
    known = _work.setdefault(walk.rows, {})
    if group not in known:
        items, covers = _key_items(plan, walk, group)
        band = plan.masks.band[walk.mask.long()]
        partial = torch.cat((torch.stack((walk.partial, walk.mask), dim=1), band), dim=1).int().contiguous()
        bits = transposed_bits(plan)
        known[group] = KeyWork(items, part.head_class.int(), walk.rows.contiguous(), walk.full, partial, bits, covers)
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

    query, key, value, plan = call.query, call.key, call.value, call.plan
    batch, heads, n, d = query.shape
    key_heads = key.shape[1]
    group = heads // key_heads
    if hopper_backend._layout_problem("grad_output", grad_output) is not None:
        grad_output = grad_output.contiguous()
    rows = config.query_tile
    # Whole blocks of the plan, so that a list may name the part of its last block that lies past the end.
    query_tiles = -(-n // plan.block_size) * (plan.block_size // rows)
    device = query.device
    stats = torch.empty((batch, heads, query_tiles, 2, rows), dtype=torch.float32, device=device)
    total = torch.empty((batch, heads, query_tiles, rows * d) if fused else (4,), dtype=torch.float32, device=device)
    slope = lse if grad_lse is None else grad_lse
    prepare_bwd_kernel[(query_tiles, heads, batch)](
        output, grad_output, lse, slope, stats, total, n,
        *output.stride()[:3], *grad_output.stride()[:3], *slope.stride(),
        BM=rows, D=d, LSE_GRAD=grad_lse is not None, ZERO=fused,
    )  # fmt: skip

    work = work_by_key(plan, group)
    if work.covers:
        grad_key, grad_value = empty_rows(key, d), empty_rows(value, d)
    else:
        grad_key, grad_value = empty_rows(key, d).zero_(), empty_rows(value, d).zero_()
    items_a_batch = work.items.shape[0]
    items = batch * items_a_batch
    if items:
        half = tile_layout(64, d, query.dtype)
        tile = tile_layout(rows, d, query.dtype)
        arguments = (
            describe(query, rows, tile),
            describe(grad_output, rows, tile),
            describe(key, 64, half),
            describe(value, 64, half),
            describe(grad_key, 64, half),
            describe(grad_value, 64, half),
            stats,
            total,
            work.items,
            work.classes,
            work.rows,
            work.full,
            work.partial,
            work.bits,
            items,
            items_a_batch,
            heads,
            group,
            query_tiles,
            plan.parts[0].keys.tiles,
            n,
            call.scale,
            call.scale * LOG2_E,
            plan.block_size,
            config.stages,
            config.key_stages,
            fused,
            config.registers,
        )
        identity = ("backward", device.index, query.dtype, d, plan.block_size, config, fused)
        launch(attention_dkv_bwd_kernel, identity, min(items, processors(device)), arguments, **OPTIONS)
    if fused:
        grad_query = empty_rows(query, d)
        finish_dq_kernel[(query_tiles, heads, batch)](
            total, grad_query, n, call.scale, *grad_query.stride()[:3], BM=rows, D=d
        )
    else:
        grad_query = _query_gradient(call, output, lse, grad_output, grad_lse)
    return Gradients(grad_query, grad_key, grad_value)


def _query_gradient(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Tensor:
    from . import triton_launch

    return triton_launch.backward(call, output, lse, grad_output, grad_lse).query
