"""Launches of attention over listed blocks of tokens, added to that over shared blocks in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.call import AttentionCall, Forward, Gradients
from ...kernels.launch.launcher import CACHE_SIZE, Launch
from ...kernels.launch.triton_abi import Grid
from ...kernels.triton.launches import (
    LOG2E,
    Tiles,
    config,
    constants_of,
    delta_of,
    dropout_args,
    padded_width,
    shares_much,
)
from ..attend import TokenAttend
from ..plan import invert_selection
from ..types import GatherIndex, Selection
from . import gather_index, hopper_gathered
from .gathered_attention_kernels import add_tokens_kernel, chosen_bwd_kernel, chosen_fwd_kernel, join_tokens_kernel

__all__ = ["backward", "delta_of", "forward"]
JOINED, ASKED = 16, 512
"""Tokens of a program that joins what they found, and numbers of each that it asks for at once."""
RUN, ENOUGH = 16, 2048
"""Tiles of gathered queries that a program of the forward takes, where that leaves so many programs."""
WHOLE = {64: (Tiles(64, 128, 4, 2), Tiles(32, 128, 4, 2)), 128: (Tiles(64, 128, 4, 2), Tiles(64, 128, 8, 2))}
"""Tiles of both passes by width, which hold a whole block of 128 keys, in half precision where much is shared."""


class Prepared(NamedTuple):
    """The launches of one pass with their grids, for calls and choices of one layout."""

    launches: tuple[tuple[Launch | hopper_gathered.ChosenBackward, Grid], ...]
    part: tuple[int, ...]
    """Shape of what gathered queries get."""


_cache: dict[tuple[object, ...], Prepared] = {}


def _prepared(
    make: Callable[..., Prepared],
    call: AttentionCall,
    chosen: GatherIndex,
    bounds: Tensor | None,
    heads: slice,
    *tensors: Tensor,
) -> Prepared:
    """Launches that `make` builds for a call, cached by everything they depend on."""
    query, value = call.query, call.value
    options = query.get_device(), query.dtype, call.plan.block_size, call.scale, call.dropout_p
    masked = call.key_padding_mask is not None, bounds is not None
    shapes = query.shape, call.key.shape[1], value.shape[3], chosen.source.shape, chosen.place.shape[2], heads.start
    strides = query.stride(), call.key.stride(), value.stride(), *[x.stride() for x in tensors]
    # TMA and copies of 16 bytes begin at their multiples.
    begins = query.data_ptr() | call.key.data_ptr() | value.data_ptr() | tensors[0].data_ptr()
    layout = make, *options, *masked, begins % 16, *shapes, *strides
    cached = _cache.get(layout)
    if cached is None:
        if len(_cache) >= CACHE_SIZE:
            _cache.clear()
        cached = _cache[layout] = make(call, chosen, bounds, heads, *tensors)
    return cached


def _unbounded(bounds: Tensor | None) -> tuple[None, ...]:
    """Argument of kernels in place of bounds that a call does not have: compiled in, so that it changes no code."""
    return (None,) if bounds is None else ()


def _forward_launches(
    call: AttentionCall, chosen: GatherIndex, bounds: Tensor | None, heads: slice, output: Tensor, lse: Tensor
) -> Prepared:
    query, key, value = _of_heads(call, heads)
    batch, own, n, _ = query.shape
    e, rows, block = value.shape[3], chosen.source.shape[1], call.plan.block_size
    tiles, _ = _tiles(call)
    many = chosen.tile.shape[1]
    run = min(max(many * own // ENOUGH, 1), RUN)
    sign = (call.scale > 0) - (call.scale < 0)
    magnitude = abs(call.scale) or 1.0
    attend = Launch(
        chosen_fwd_kernel, query.device, *_unbounded(bounds), magnitude * LOG2E, *dropout_args(call), rows, many, run,
        *_sizes(call, heads), own // key.shape[1], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        SIGN=sign, RAGGED=n % block > 0, **constants_of(call, tiles),
    )  # fmt: skip
    join = Launch(
        join_tokens_kernel, query.device, rows, n, chosen.place.shape[2], *output.stride()[:3], *lse.stride(),
        BM=JOINED, E=e, EP=padded_width(e), TOGETHER=_together(e),
    )  # fmt: skip
    grids = (-(-many // run), own, 1), (-(-n // JOINED), own, batch)
    return Prepared(((attend, grids[0]), (join, grids[1])), (own, rows, e))


def forward(call: AttentionCall, chosen: GatherIndex, bounds: Tensor | None, near: Forward, heads: slice) -> None:
    """Join the choices of some query heads to what all rows share, in place.

    Args:
        call: of what all rows share: (b, h, n, d) queries and so on, and its plan's block size and masks.
        chosen: the choices of those heads.
        bounds: int64 (n, 2), first key and end of the keys that each token may see; None for all.
        near: output and LSE of the call.
        heads: which query heads, all of a key head's or none.
    """
    query, key, value = _of_heads(call, heads)
    output, lse = _some(near.output, heads), _some(near.lse, heads)
    launches, shape = _prepared(_forward_launches, call, chosen, bounds, heads, output, lse)
    (attend, attend_grid), (join, join_grid) = launches
    part = torch.empty(shape, dtype=query.dtype, device=query.device)
    part_lse = torch.empty(shape[:2], dtype=torch.float32, device=query.device)
    read = chosen.source, chosen.tile, chosen.first, *_read(call, chosen, bounds)
    attend(attend_grid, (query, key, value, part, part_lse, *read))
    join(join_grid, (output, lse, part, part_lse, chosen.place))


def _backward_launches(
    call: AttentionCall, chosen: GatherIndex, bounds: Tensor | None, heads: slice, grad: Tensor, grad_query: Tensor,
    grad_key: Tensor, grad_value: Tensor,
) -> Prepared:  # fmt: skip
    query, key, value = _of_heads(call, heads)
    batch, own, n, d = query.shape
    rows, block, device = chosen.source.shape[1], call.plan.block_size, query.device
    on_hopper = hopper_gathered.why_not(call, chosen, bounds, query, key, value, grad, grad_key, grad_value) is None
    if on_hopper:
        part = torch.empty(0, dtype=query.dtype, device=device)
        # Of LSE and delta only the types matter.
        numbers = torch.empty(0, device=device)
        tables = chosen.source, chosen.first, chosen.order
        like = query, key, value, grad, numbers, numbers, part, grad_key, grad_value, *tables
        by_key = hopper_gathered.ChosenBackward(call, chosen, heads.start, like)
    else:
        _, tiles = _tiles(call)
        by_key = Launch(
            chosen_bwd_kernel, device, *_unbounded(bounds), call.scale, call.scale * LOG2E, *dropout_args(call), rows,
            *_sizes(call, heads), *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3],
            *grad_key.stride()[:3], *grad_value.stride()[:3], GROUP=own // key.shape[1], RAGGED=n % block > 0,
            **constants_of(call, tiles),
        )  # fmt: skip
    add = Launch(
        add_tokens_kernel, device, call.scale, rows, n, chosen.place.shape[2], *grad_query.stride()[:3],
        BM=JOINED, D=d, DP=padded_width(d), TURNED=on_hopper, TOGETHER=_together(d),
    )  # fmt: skip
    keys, tokens = (chosen.order.shape[1], key.shape[1], 1), (-(-n // JOINED), own, batch)
    return Prepared(((by_key, keys), (add, tokens)), (own, rows, d))


def backward(
    call: AttentionCall,
    chosen: GatherIndex,
    bounds: Tensor | None,
    near: Gradients,
    heads: slice,
    lse: Tensor,
    delta: Tensor,
    grad_output: Tensor,
) -> None:
    """Add the gradients of those choices to the gradients of what all rows share, in place.

    Args:
        call: see `forward`, as `chosen`, `bounds` and `heads`.
        near: gradients of the call with the output and LSE of the whole rows.
        lse: of the whole rows, (b, h, n), contiguous.
        delta: see `delta_of`.
        grad_output: (b, h, n, e).
    """
    query, key, value = _of_heads(call, heads)
    key_heads = _key_heads(call, heads)
    grad, grad_query = _some(grad_output, heads), _some(near.query, heads)
    grad_key, grad_value = _some(near.key, key_heads), _some(near.value, key_heads)
    changed = grad, grad_query, grad_key, grad_value
    launches, shape = _prepared(_backward_launches, call, chosen, bounds, heads, *changed)
    (by_key, keys), (add, tokens) = launches
    part = torch.empty(shape, dtype=query.dtype, device=query.device)
    changed, read = (part, grad_key, grad_value), (chosen.source, chosen.first, chosen.order)
    by_key(keys, (query, key, value, grad, lse, delta, *changed, *read, *_read(call, chosen, bounds)))
    add(tokens, (grad_query, part, chosen.place))


def _tiles(call: AttentionCall) -> tuple[Tiles, Tiles]:
    """Tiles of the forward and of the backward."""
    query, block = call.query, call.plan.block_size
    d, e = query.shape[3], call.value.shape[3]
    usual = config(d, e, query.dtype, query.device, block)
    able = query.dtype.itemsize == 2 and shares_much(query.device)
    forward, backward = WHOLE.get(padded_width(max(d, e, 64)) if able else 0, (usual.forward, usual.dkv))
    return forward.within(block), backward.within(block)


def _together(width: int) -> int:
    """Choices of a token that are loaded at once."""
    return max(ASKED // padded_width(width), 1)


def _key_heads(call: AttentionCall, heads: slice) -> slice:
    group = call.query.shape[1] // call.key.shape[1]
    return slice(heads.start // group, heads.stop // group)


def _some(x: Tensor, heads: slice) -> Tensor:
    """Those heads of (b, h, ...); most often they are all."""
    return x if heads.stop - heads.start == x.shape[1] else x[:, heads]


def _of_heads(call: AttentionCall, heads: slice) -> tuple[Tensor, Tensor, Tensor]:
    key_heads = _key_heads(call, heads)
    return _some(call.query, heads), _some(call.key, key_heads), _some(call.value, key_heads)


def _read(call: AttentionCall, chosen: GatherIndex, bounds: Tensor | None) -> tuple[Tensor, ...]:
    """Padding, seed and, where given, bounds; what a call does not have is never read."""
    padding = call.key_padding_mask
    padding = chosen.source if padding is None else padding.contiguous().view(torch.uint8)
    seed = chosen.source if call.seed is None else call.seed
    return (padding, seed) if bounds is None else (padding, seed, bounds)


def _sizes(call: AttentionCall, heads: slice) -> tuple[int, ...]:
    batch, all_heads, n, _ = call.query.shape
    return n, -(-n // call.plan.block_size), batch, all_heads, heads.start


MOST_BITS = 2**31 - 1
"""Tokens times key blocks, over heads, up to which bits with 32-bit counts give the index; beyond, a sort."""


def _sorted_index(selection: Selection, group: int) -> GatherIndex:
    return invert_selection(selection.per_head(), group, 0, False)


@dataclass(slots=True)
class GatheredAttend(TokenAttend):
    """Attention over a selection by tokens whose listed blocks are added to the shared ones in place."""

    indices: list[tuple[slice, GatherIndex]] | None = field(default=None, init=False)
    """Inverted selection of each run of heads"""

    def _inverted(self, call: AttentionCall) -> list[tuple[slice, GatherIndex]]:
        """Inverted selection, computed once: a backward pass alone computes it, too."""
        if self.indices is not None:
            return self.indices
        selection, self.indices = self.selection, []
        (batch, _, n, listed), all_heads = selection.indices.shape, selection.heads
        group = all_heads // call.key.shape[1]
        # The run of each key block may leave part of a tile empty.
        bits = batch * (max(selection.blocks, listed + 1) * n + selection.block_size)
        for heads, _ in self.head_runs(call.query, call.key, call.value):
            many, every = heads.stop - heads.start, slice(None)
            own = selection if many == all_heads else self._of_heads(every, heads)
            by_bits = many * bits <= MOST_BITS
            run = gather_index.invert_selection if by_bits else _sorted_index
            index = run(own, group)
            self.indices.append((heads, index))
        return self.indices

    def _join(self, call: AttentionCall, shared: Forward) -> Forward:
        for heads, index in self._inverted(call):
            forward(call, index, self.selection.bounds, shared, heads)
        return shared

    def _add(
        self,
        call: AttentionCall,
        shared: Gradients,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, ...]:
        indices = self._inverted(call)
        if indices:
            delta = delta_of(output, lse, grad_output, grad_lse)
            for heads, index in indices:
                backward(call, index, self.selection.bounds, shared, heads, lse, delta, grad_output)
        return tuple(shared)
