"""Launches of attention over the listed blocks of tokens, added in place to the attention over shared blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
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
from ..attend import CallChoices, RowChunk, TokenAttend
from ..types import GatherIndex
from . import gather_index, hopper_gathered
from .gathered_attention_kernels import add_tokens_kernel, chosen_bwd_kernel, chosen_fwd_kernel, join_tokens_kernel

__all__ = ["backward", "delta_of", "forward"]
JOINED, ASKED = 16, 512
"""Tokens per program of `join_tokens_kernel` and `add_tokens_kernel`, and elements of each that are in flight."""
RUN, ENOUGH = 16, 2048
"""Most query tiles per program of the forward kernel, and programs from which on a program takes several."""
WHOLE = {64: (Tiles(64, 128, 4, 2), Tiles(32, 128, 4, 2)), 128: (Tiles(64, 128, 4, 2), Tiles(64, 128, 8, 2))}
"""Tiles of both passes by width, for half precision on GPUs with large shared memory; a tile holds a whole block."""


class Prepared(NamedTuple):
    """The launches of one pass with their grids, for calls and choices of one layout."""

    launches: tuple[tuple[Launch | hopper_gathered.ChosenBackward, Grid], ...]
    part: tuple[int, ...]
    """Shape of the partial output, or partial dQ, of gathered queries."""


_cache: dict[tuple[object, ...], Prepared] = {}


def _prepared(
    make: Callable[..., Prepared],
    call: AttentionCall,
    chosen: GatherIndex,
    bounds: Tensor | None,
    chunk: RowChunk,
    *tensors: Tensor,
) -> Prepared:
    """Launches that `make` builds for a call, cached by everything they depend on."""
    query, value = call.query, call.value
    options = query.get_device(), query.dtype, call.plan.block_size, call.scale, call.dropout_p
    masked = call.key_padding_mask is not None, bounds is not None
    shapes = query.shape, call.key.shape[1], value.shape[3], chosen.source.shape, chosen.place.shape
    strides = query.stride(), call.key.stride(), value.stride(), *[x.stride() for x in tensors]
    # TMA and vector copies need addresses that are multiples of 16 bytes.
    begins = query.data_ptr() | call.key.data_ptr() | value.data_ptr() | tensors[0].data_ptr()
    layout = make, *options, *masked, begins % 16, *shapes, _stream(call, chunk), *strides
    cached = _cache.get(layout)
    if cached is None:
        if len(_cache) >= CACHE_SIZE:
            _cache.clear()
        cached = _cache[layout] = make(call, chosen, bounds, chunk, *tensors)
    return cached


def _unbounded(bounds: Tensor | None) -> tuple[None, ...]:
    """None in place of absent bounds: a compile-time constant, which leaves the code without bounds unchanged."""
    return (None,) if bounds is None else ()


def _forward_launches(
    call: AttentionCall, chosen: GatherIndex, bounds: Tensor | None, chunk: RowChunk, output: Tensor, lse: Tensor
) -> Prepared:
    query, key, value = _of_chunk(call, chunk)
    batch, own, n, _ = query.shape
    tokens = output.shape[2]
    e, rows, block = value.shape[3], chosen.source.shape[1], call.plan.block_size
    tiles, _ = _tiles(call)
    many = chosen.tile.shape[1]
    run = min(max(many * own // ENOUGH, 1), RUN)
    sign = (call.scale > 0) - (call.scale < 0)
    magnitude = abs(call.scale) or 1.0
    attend = Launch(
        chosen_fwd_kernel, query.device, *_unbounded(bounds), magnitude * LOG2E, *dropout_args(call), rows, many, run,
        *_sizes(call, chunk), own // key.shape[1], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        SIGN=sign, RAGGED=n % block > 0, **constants_of(call, tiles),
    )  # fmt: skip
    join = Launch(
        join_tokens_kernel, query.device, rows, tokens, chosen.place.shape[2], *output.stride()[:3], *lse.stride(),
        BM=JOINED, E=e, EP=padded_width(e), TOGETHER=_together(e),
    )  # fmt: skip
    grids = (-(-many // run), own, 1), (-(-tokens // JOINED), own, batch)
    return Prepared(((attend, grids[0]), (join, grids[1])), (own, rows, e))


def forward(
    call: AttentionCall,
    chosen: GatherIndex,
    bounds: Tensor | None,
    near: Forward,
    chunk: RowChunk,
    choices: CallChoices,
) -> None:
    """Merge the attention over the listed blocks of a chunk into the output over shared blocks, in place.

    Args:
        call: call over the shared blocks, with (b, h, n, d) queries.
        chosen: inverted index of the chunk.
        bounds: int64 (n, 2), first key and end of the keys that each token may see; None for all keys.
        near: output and LSE of the call.
        chunk: samples, query heads and tokens.
        choices: choices of calls with the layout of this one.
    """
    query, key, value = _of_chunk(call, chunk)
    output, lse = chunk.rows(near.output), chunk.rows(near.lse)
    make = partial(_prepared, _forward_launches, call, chosen, bounds, chunk, output, lse)
    launches, shape = choices.derive(("forward", output.stride()), make) if chunk.is_whole else make()
    (attend, attend_grid), (join, join_grid) = launches
    part = torch.empty(shape, dtype=query.dtype, device=query.device)
    part_lse = torch.empty(shape[:2], dtype=torch.float32, device=query.device)
    read = chosen.source, chosen.tile, chosen.first, *_read(call, chosen, bounds, chunk)
    attend(attend_grid, (query, key, value, part, part_lse, *read))
    join(join_grid, (output, lse, part, part_lse, chosen.place))


def _backward_launches(
    call: AttentionCall, chosen: GatherIndex, bounds: Tensor | None, chunk: RowChunk, grad: Tensor, grad_query: Tensor,
    grad_key: Tensor, grad_value: Tensor,
) -> Prepared:  # fmt: skip
    query, key, value = _of_chunk(call, chunk)
    batch, own, n, d = query.shape
    rows, block, device = chosen.source.shape[1], call.plan.block_size, query.device
    tokens = grad_query.shape[2]
    on_hopper = hopper_gathered.why_not(call, chosen, bounds, query, key, value, grad, grad_key, grad_value) is None
    if on_hopper:
        part = torch.empty(0, dtype=query.dtype, device=device)
        # Only the dtypes of LSE and delta matter here.
        numbers = torch.empty(0, device=device)
        tables = chosen.source, chosen.first, chosen.order
        like = query, key, value, grad, numbers, numbers, part, grad_key, grad_value, *tables
        by_key = hopper_gathered.ChosenBackward(call, chosen, _stream(call, chunk), like)
    else:
        _, tiles = _tiles(call)
        by_key = Launch(
            chosen_bwd_kernel, device, *_unbounded(bounds), call.scale, call.scale * LOG2E, *dropout_args(call), rows,
            *_sizes(call, chunk), *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3],
            *grad_key.stride()[:3], *grad_value.stride()[:3], GROUP=own // key.shape[1], RAGGED=n % block > 0,
            **constants_of(call, tiles),
        )  # fmt: skip
    add = Launch(
        add_tokens_kernel, device, call.scale, rows, tokens, chosen.place.shape[2], *grad_query.stride()[:3],
        BM=JOINED, D=d, DP=padded_width(d), TURNED=on_hopper, TOGETHER=_together(d),
    )  # fmt: skip
    grids = (chosen.order.shape[1], key.shape[1], 1), (-(-tokens // JOINED), own, batch)
    return Prepared(((by_key, grids[0]), (add, grids[1])), (own, rows, d))


def backward(
    call: AttentionCall,
    chosen: GatherIndex,
    bounds: Tensor | None,
    near: Gradients,
    chunk: RowChunk,
    lse: Tensor,
    delta: Tensor,
    grad_output: Tensor,
) -> None:
    """Add the gradients over the listed blocks of a chunk to the gradients over shared blocks, in place.

    Args:
        call: see `forward`, also for `chosen`, `bounds` and `chunk`.
        near: gradients of the call's queries, computed with the output and LSE over all blocks, and of the keys and
            values of the chunk.
        lse: LSE over all blocks, (b, h, n), contiguous.
        delta: see `delta_of`.
        grad_output: (b, h, n, e).
    """
    query, key, value = _of_chunk(call, chunk)
    # Kernels number the tokens of whole samples, but add partial dQ by tokens of the chunk.
    grad, grad_query = chunk.all_tokens(grad_output), chunk.rows(near.query)
    changed = grad, grad_query, near.key, near.value
    launches, shape = _prepared(_backward_launches, call, chosen, bounds, chunk, *changed)
    (by_key, keys), (add, tokens) = launches
    part = torch.empty(shape, dtype=query.dtype, device=query.device)
    changed, read = (part, near.key, near.value), (chosen.source, chosen.first, chosen.order)
    by_key(keys, (query, key, value, grad, lse, delta, *changed, *read, *_read(call, chosen, bounds, chunk)))
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
    """List entries of a token that are loaded at once."""
    return max(ASKED // padded_width(width), 1)


def _of_chunk(call: AttentionCall, chunk: RowChunk) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of all tokens of a chunk's samples and heads, and their keys and values."""
    return chunk.all_tokens(call.query), chunk.keys(call.key), chunk.keys(call.value)


def _read(call: AttentionCall, chosen: GatherIndex, bounds: Tensor | None, chunk: RowChunk) -> tuple[Tensor, ...]:
    """Padding, seed and bounds, if any; `chosen.source` is a placeholder for absent ones, which no program reads."""
    padding = call.key_padding_mask
    padding = chosen.source if padding is None else padding[chunk.samples].contiguous().view(torch.uint8)
    seed = chosen.source if call.seed is None else call.seed
    return (padding, seed) if bounds is None else (padding, seed, bounds)


def _stream(call: AttentionCall, chunk: RowChunk) -> int:
    """Number of heads, over all samples, before the first head of a chunk."""
    return chunk.samples.start * call.query.shape[1] + chunk.heads.start


def _sizes(call: AttentionCall, chunk: RowChunk) -> tuple[int, ...]:
    all_heads, n = call.query.shape[1:3]
    samples = chunk.samples.stop - chunk.samples.start
    return n, -(-n // call.plan.block_size), samples, all_heads, _stream(call, chunk)


MOST_BITS = 2**31 - 1
"""Tokens times key blocks, over heads, that the index of a chunk has at most: it counts bits in 32-bit integers."""


@dataclass(slots=True)
class GatheredAttend(TokenAttend):
    """Attention over a selection by tokens whose listed blocks are added to the shared ones in place."""

    index: tuple[tuple[object, ...], GatherIndex] | None = field(default=None, init=False)
    """Latest inverted selection with its cache key (samples, lists, heads per list, tokens); kept for the backward pass
    if it covers a whole call"""

    def _most_rows(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
        s = self.selection
        # The run of each key block may leave part of a tile empty.
        bits = MOST_BITS // max(s.blocks, s.indices.shape[-1] + 1) - query.shape[0] * s.block_size
        whole, most = TokenAttend._most_rows(self, query, key, value)
        return min(whole, bits), min(most, bits)

    def _inverted(self, call: AttentionCall, chunk: RowChunk) -> GatherIndex:
        """Inverted selection of a chunk: chunks of the same lists share it."""
        own = self._of_chunk(chunk)
        first = chunk.heads.start // self.selection.group
        sizes = chunk.samples.start, first, own.indices.shape, own.group, chunk.tokens.start
        if self.index is None or self.index[0] != sizes:
            # Free the previous index before the next one is allocated.
            self.index = None
            heads, key_heads = (x.stop - x.start for x in (chunk.heads, chunk.key_heads))
            first = () if own.indices.shape[2] == own.n else (chunk.tokens.start,)
            invert = partial(gather_index.invert_selection, own, heads // key_heads, *first)
            if own is self.selection:
                numbers = self.choices.derive(
                    "numbers", lambda: gather_index.inverter_of(own, heads // key_heads)[0].numbers
                )
                self.index = sizes, self._derive(("index", heads // key_heads), invert, numbers)
            else:
                self.index = sizes, invert()
        return self.index[1]

    def _chunks(self, call: AttentionCall) -> list[RowChunk]:
        """`chunks` of the call, which follow from its layout."""
        return self.choices.derive("chunks", lambda: [*self.chunks(call.query, call.key, call.value)])

    def _skips_hidden(self) -> bool:
        # Every row is joined if anything can be listed.
        return self.selection.indices.shape[-1] > 0

    def _join(self, call: AttentionCall, shared: Forward) -> Forward:
        chunks = self._chunks(call)
        for chunk in chunks:
            forward(call, self._inverted(call, chunk), self.selection.bounds, shared, chunk, self.choices)
        self.index = self.index if len(chunks) == 1 else None
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
        chunks = self._chunks(call)
        if not chunks:
            return tuple(shared)
        rest = lse, delta_of(output, lse, grad_output, grad_lse), grad_output
        for _, run in groupby(chunks, lambda chunk: chunk.key_heads.start):
            self._add_key_heads(call, shared, [*run], rest)
        self.index = self.index if len(chunks) == 1 else None
        return tuple(shared)

    def _add_key_heads(
        self, call: AttentionCall, shared: Gradients, chunks: list[RowChunk], rest: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Add the gradients of all chunks of some key heads."""
        bounds = self.selection.bounds
        if len(chunks) == 1 or shared.key.dtype is rest[0].dtype:
            for chunk in chunks:
                grads = Gradients(shared.query, *(chunk.keys(x) for x in shared[1:]))
                backward(call, self._inverted(call, chunk), bounds, grads, chunk, *rest)
            return
        # Summed in float32: each chunk is rounded once, and their sum once.
        own = [x[:, chunks[0].key_heads] for x in shared[1:]]
        sums = [torch.zeros(x.shape, dtype=rest[0].dtype, device=x.device) for x in own]
        parts = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in own]
        for chunk in chunks:
            some = [x[chunk.samples].zero_() for x in parts]
            backward(call, self._inverted(call, chunk), bounds, Gradients(shared.query, *some), chunk, *rest)
            for total, part in zip(sums, some, strict=True):
                total[chunk.samples].add_(part)
        for grad, total in zip(own, sums, strict=True):
            grad.add_(total)
