"""Launches of the Triton kernels: tile sizes, and the arguments of each part of a plan.

A plan of one part is one launch, which writes the output. Several parts are launched one after another and carry their
joint softmax in float32; a part that covers every row runs last and writes the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import MOST_PROGRAMS, AttentionCall, BiasedGradients, DeltaGradients, Forward, Gradients, empty_rows
from ..dropout import shifted, threshold
from ..launch.launcher import Launch, launch, prepared
from .backward_kernels import attention_dkv_bwd_kernel, attention_dq_bwd_kernel, delta_bwd_kernel, sum_pieces_bwd_kernel
from .forward_kernels import attention_fwd_kernel, carry_to_output_kernel, merge_pieces_kernel
from .lowering import PartSchedule, Schedule, WalkTables, schedule

LOG2E = 1.4426950408889634
ROWS = 64
"""Rows of a program of the row-wise kernels."""
CAREFUL = 16
"""Rows streamed at a time if an input is not finite: the fewest of a product, for the smallest code."""


class Tiles(NamedTuple):
    """Tile sizes of a kernel: query rows, key rows, warps, pipeline stages."""

    m: int
    n: int
    warps: int
    stages: int

    def within(self, block: int) -> Tiles:
        """Tile sizes limited to the block size of a plan."""
        m, n = min(self.m, block), min(self.n, block)
        if (m, n) == (self.m, self.n):
            return self
        warps = self.warps if max(m, n) >= 64 else 2 if min(m, n) >= 32 else 1
        return Tiles(m, n, warps, self.stages)

    def thin(self, m: int, n: int, stages: int) -> Tiles:
        """Tile sizes and stages limited to these, with few elements per thread."""
        m, n = min(self.m, m), min(self.n, n)
        return Tiles(m, n, 8 if max(m, n) >= 64 else self.warps, min(self.stages, stages))


class Config(NamedTuple):
    """Tile sizes of each kernel."""

    forward: Tiles
    dq: Tiles
    dkv: Tiles

    def with_bias(self, width: int, *, by_position: bool) -> Config:
        """Tile sizes for calls with a bias: elements of tiles near the diagonal have an entry of the table each, and a
        sum in the dQ kernel. Positions are read in every step, which is not pipelined."""
        if width > 128:
            return Config(self.forward.thin(64, 32, 1), self.dq.thin(32, 32, 1), self.dkv.thin(32, 32, 1))
        if by_position:
            return Config(self.forward.thin(64, 32, 1), self.dq.thin(64, 32, 1), self.dkv.thin(32, 64, 1))
        return Config(self.forward.thin(128, 64, 2), self.dq.thin(64, 32, 2), self.dkv.thin(32, 128, 2))


LARGE_SHARED = 200 * 1024
"""Bytes of shared memory per program on data-centre GPUs, which `HALF` was measured on."""

HALF = {
    64: Config(Tiles(128, 64, 4, 2), Tiles(128, 64, 4, 2), Tiles(32, 128, 4, 3)),
    128: Config(Tiles(128, 128, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 2)),
    256: Config(Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 64, 8, 2)),
}
HALF_SMALL_SHARED = {
    64: Config(Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: Config(Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2)),
    256: Config(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
}
SINGLE = {
    64: Config(Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
    128: Config(Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
    256: Config(Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
}
"""Small tiles of many warps: code size, and with it the time of the first call, grows with the elements per thread."""

_configs: dict[tuple[int, torch.dtype, torch.device, int], Config] = {}


def forward(call: AttentionCall) -> Forward:
    """Output and LSE of a call that `why_not` accepts."""
    query, key, value = call.query, call.key, call.value
    if len(query) > MOST_PROGRAMS:
        output, lse = empty_rows(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=torch.float32)
        for samples, own in _by_samples(call):
            output[samples], lse[samples] = forward(own)
        return Forward(output, lse)
    batch, heads, n, _ = query.shape
    e = value.shape[3]
    block = call.plan.block_size
    tables = schedule(call.plan, heads // key.shape[1])
    tiles = _config_of(call).forward
    # For a scale of 0 the queries are multiplied by 0 and the scores by 1, so that masking by -inf still works.
    sign = (call.scale > 0) - (call.scale < 0)
    magnitude = abs(call.scale) or 1.0
    parts = tables.by_query
    finishes = bool(parts) and parts[-1].by_query.covers
    output = empty_rows(query, e)
    lse = torch.empty((batch, heads, n), dtype=torch.float32, device=query.device)
    if not parts or not parts[0].by_query.covers:
        lse.fill_(float("-inf"))
    alone = finishes and len(parts) == 1
    carry = lse if alone else torch.empty((batch, heads, n, e), dtype=torch.float32, device=query.device)
    for part, side, owners, ends in _with_work(parts, "by_query", "CARRY"):
        piece_out, piece_lse = _pieces(side, batch, block, e), _pieces(side, batch, block, 1)
        sink = None if ends["CARRY_OUT"] else call.sink
        launch(attention_fwd_kernel, (side.items * (block // tiles.m), owners, batch),
            query, key, value, output, lse, carry, piece_out, piece_lse, sink,
            *_tables(call, tables, part, side), *_score_scales(call, magnitude), *_bias_args(call), *dropout_args(call),
            *_sizes(call, part, side),
            *query.stride()[:3], *key.stride()[:2], *value.stride()[:2], *output.stride()[:3],
            SK_N=key.stride(2), SV_N=value.stride(2), SIGN=sign, **_constants(call, tables, part, side, tiles), **ends,
        )  # fmt: skip
        if side.slots:
            rows = min(ROWS, block)
            launch(merge_pieces_kernel, (side.heavy_rows * (block // rows), owners, batch),
                output, lse, carry, piece_out, piece_lse, sink, side.heavy, side.owners, part.query_axis,
                side.heavy_rows, side.slots, heads, part.query_tiles, n, part.query_rate, *output.stride()[:3],
                BLOCK=block, BM=rows, E=e, EP=padded_width(e), STRIDED=part.strided, PER_HEAD=part.per_head,
                **ends,
            )  # fmt: skip
    if not finishes:
        launch(carry_to_output_kernel, (-(-n // ROWS), heads, batch),
            output, lse, carry, call.sink, n, *output.stride()[:3], BM=ROWS, E=e, EP=padded_width(e),
        )  # fmt: skip
    return Forward(output, lse)


def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients of query, key, value and bias, from those of the output and, where given, of the LSE."""
    query = call.query
    if len(query) > MOST_PROGRAMS:
        return _backward_by_samples(call, output, lse, grad_output, grad_lse)
    delta = delta_of(output, lse, grad_output, grad_lse)
    tables = schedule(call.plan, query.shape[1] // call.key.shape[1])
    tiles = _config_of(call)
    grad_key, grad_value = _key_gradients(call, tables, tiles.dkv, lse, delta, grad_output)
    table = _table_sum(call, delta, grad_output)
    grad_query = _query_gradient(call, tables, tiles.dq, lse, delta, grad_output, table)
    three = grad_query, grad_key, grad_value
    grads = DeltaGradients(*three) if call.bias is None else BiasedGradients(*three, table.result())
    grads.delta = None if call.sink is None else delta
    return grads


def _by_samples(call: AttentionCall) -> Iterator[tuple[slice, AttentionCall]]:
    """Split a call into calls of at most MOST_PROGRAMS samples, the limit of a grid dimension."""
    for first in range(0, len(call.query), MOST_PROGRAMS):
        own, at = slice(first, first + MOST_PROGRAMS), call.bias_positions
        yield (
            own,
            replace(
                call,
                query=call.query[own],
                key=call.key[own],
                value=call.value[own],
                key_padding_mask=None if call.key_padding_mask is None else call.key_padding_mask[own],
                seed=None if call.seed is None else shifted(call.seed, first * call.query.shape[1]),
                bias_positions=at if at is None or len(at) == 1 else at[own],
            ),
        )


def _backward_by_samples(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    grads = Gradients(*(empty_rows(x, x.shape[3]) for x in (call.query, call.key, call.value)))
    table = None if call.bias is None else torch.zeros_like(call.bias, dtype=torch.float64)
    for samples, own in _by_samples(call):
        rows = output[samples], lse[samples], grad_output[samples]
        found = backward(own, *rows, None if grad_lse is None else grad_lse[samples])
        for whole, part in zip(grads, found, strict=True):
            whole[samples] = part
        if table is not None:
            assert isinstance(found, BiasedGradients)
            table += found.bias
    return grads if table is None or call.bias is None else BiasedGradients(*grads, table.to(call.bias.dtype))


def delta_of(output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None) -> Tensor:
    """delta = rowsum(dO * O) - dLSE, float32 (b, h, n)."""
    batch, heads, n, e = output.shape
    delta = torch.empty((batch, heads, n), dtype=torch.float32, device=output.device)
    slope = lse if grad_lse is None else grad_lse
    numbers = n, *output.stride()[:3], *grad_output.stride()[:3], *slope.stride()
    run = prepared(_delta_launch, output.device, e, grad_lse is not None, *numbers)
    run((-(-n // ROWS), heads, batch), (output, grad_output, lse, slope, delta))
    return delta


def _delta_launch(device: torch.device, e: int, slopes: bool, *numbers: int) -> Launch:
    constants = {"BM": ROWS, "E": e, "EP": padded_width(e), "LSE_GRAD": slopes}
    return Launch(delta_bwd_kernel, device, *numbers, **constants)


def _query_gradient(
    call: AttentionCall,
    tables: Schedule,
    tiles: Tiles,
    lse: Tensor,
    delta: Tensor,
    grad_output: Tensor,
    table: _TableSum,
) -> Tensor:
    query, key, value = call.query, call.key, call.value
    batch, _, _, d = query.shape
    block, parts = call.plan.block_size, tables.by_query
    finishes = bool(parts) and parts[-1].by_query.covers
    grad = empty_rows(query, d)
    partial_sum = grad if finishes and len(parts) == 1 else _float_sum(query, bool(parts) and parts[0].by_query.covers)
    for part, side, owners, ends in _with_work(parts, "by_query", "SUM"):
        piece = _pieces(side, batch, block, d)
        launch(attention_dq_bwd_kernel, (side.items * (block // tiles.m), owners, batch),
            query, key, value, grad_output, lse, delta, grad, partial_sum, piece,
            *_tables(call, tables, part, side), call.scale, *_score_scales(call, call.scale), *_bias_args(call), *table,
            *dropout_args(call), *_sizes(call, part, side), *query.stride()[:3], *key.stride()[:2], *value.stride()[:2],
            *grad_output.stride()[:3], *grad.stride()[:3], SK_N=key.stride(2), SV_N=value.stride(2),
            **_constants(call, tables, part, side, tiles), **ends,
        )  # fmt: skip
        if side.slots:
            _sum_pieces(block, part, side, grad, partial_sum, piece, ends)
    if not finishes:
        grad.copy_(partial_sum)
    return grad


def _key_gradients(
    call: AttentionCall, tables: Schedule, tiles: Tiles, lse: Tensor, delta: Tensor, grad_output: Tensor
) -> tuple[Tensor, Tensor]:
    query, key, value = call.query, call.key, call.value
    batch, heads, _, d = query.shape
    e, block, parts = value.shape[3], call.plan.block_size, tables.by_key
    finishes = bool(parts) and parts[-1].by_key.covers
    grad_key, grad_value = empty_rows(key, d), empty_rows(value, e)
    sum_key, sum_value = grad_key, grad_value
    if not (finishes and len(parts) == 1):
        fresh = bool(parts) and parts[0].by_key.covers
        sum_key, sum_value = _float_sum(key, fresh), _float_sum(value, fresh)
    for part, side, owners, ends in _with_work(parts, "by_key", "SUM"):
        piece_key, piece_value = _pieces(side, batch, block, d), _pieces(side, batch, block, e)
        work, owner_table, *rest = _tables(call, tables, part, side)
        launch(attention_dkv_bwd_kernel, (side.items * (block // tiles.n), owners, batch),
            query, key, value, grad_output, lse, delta, grad_key, grad_value, sum_key, sum_value, piece_key,
            piece_value, work, owner_table, part.heads, part.key_rows, *rest, call.scale,
            *_score_scales(call, call.scale), *_bias_args(call), *dropout_args(call), *_sizes(call, part, side),
            *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], *grad_output.stride()[:2],
            *grad_key.stride()[:3], *grad_value.stride()[:3],
            SQ_N=query.stride(2), SG_N=grad_output.stride(2), GROUP=heads // key.shape[1], MIXED=side.mixed,
            **_constants(call, tables, part, side, tiles), **ends,
        )  # fmt: skip
        if side.slots:
            for grad, total, piece in ((grad_key, sum_key, piece_key), (grad_value, sum_value, piece_value)):
                _sum_pieces(block, part, side, grad, total, piece, ends)
    if not finishes:
        grad_key.copy_(sum_key)
        grad_value.copy_(sum_value)
    return grad_key, grad_value


def _with_work(
    parts: Sequence[PartSchedule], direction: str, carried: str
) -> Iterator[tuple[PartSchedule, WalkTables, int, dict[str, bool]]]:
    """Parts with work items: part, tables of one direction, number of owners, carry-in and carry-out flags."""
    for index, part in enumerate(parts):
        side: WalkTables = getattr(part, direction)
        if side.items and len(side.owners):
            more = index < len(parts) - 1 or not side.covers
            yield part, side, len(side.owners), {f"{carried}_IN": index > 0, f"{carried}_OUT": more}


def _sum_pieces(
    block: int, part: PartSchedule, side: WalkTables, grad: Tensor, total: Tensor, piece: Tensor, ends: dict[str, bool]
) -> None:
    axis, rate = (part.query_axis, part.query_rate) if side is part.by_query else (part.key_axis, part.key_rate)
    rows, width = min(ROWS, block), grad.shape[3]
    launch(sum_pieces_bwd_kernel, (side.heavy_rows * (block // rows), len(side.owners), grad.shape[0]),
        grad, total, piece, side.heavy, side.owners, axis, side.heavy_rows, side.slots, grad.shape[1],
        len(axis) // 2, grad.shape[2], rate, *grad.stride()[:3],
        BLOCK=block, ROWS=rows, D=width, DP=padded_width(width),
        STRIDED=part.strided, PER_HEAD=part.per_head, **ends,
    )  # fmt: skip


def _tables(call: AttentionCall, tables: Schedule, part: PartSchedule, side: WalkTables) -> tuple[Tensor, ...]:
    """Tables and masks that the kernels read; unused pointers repeat the lists."""
    padding = call.padding_bytes
    return (
        side.work, side.owners, side.lists, tables.masks, part.query_axis, part.key_axis,
        padding[0] if padding else side.lists,
        side.lists if call.seed is None else call.seed,
        side.lists if call.positions is None else call.positions.contiguous(),
    )  # fmt: skip


def _score_scales(call: AttentionCall, scale: float) -> tuple[float, float | None]:
    """Scale of scores in log2 units, and with a soft cap the scale inside its tanh."""
    return (call.softcap * LOG2E, scale / call.softcap) if call.softcap else (scale * LOG2E, None)


def _bias_args(call: AttentionCall) -> tuple[Tensor | int | None, ...]:
    """Table, positions of queries and of keys, entries and columns of a bias, and the stride of its positions."""
    if call.bias is None:
        return (None,) * 6
    places, columns = call.bias_positions, call.bias.shape[2] if call.bias.dim() > 2 else None
    size = call.bias[0].numel()
    if places is not None and places.dim() == 4:
        return call.bias, places[0], places[1], size, columns, places.stride(1)
    stride = None if places is None else places.stride(0) if len(places) > 1 else 0
    return call.bias, places, None, size, columns, stride


class _TableSum(NamedTuple):
    """Sums of the gradient of a bias table; see `add_to_table`."""

    fixed: Tensor | None = None
    """int64: multiples of 1 / unit"""
    bad: Tensor | None = None
    """float32: terms that are not finite"""
    unit: Tensor | None = None
    """float32 scalar, a power of two"""

    def result(self) -> Tensor:
        assert self.fixed is not None and self.bad is not None and self.unit is not None
        return (self.fixed / self.unit.double()).to(self.bad.dtype) + self.bad


def _table_sum(call: AttentionCall, delta: Tensor, grad_output: Tensor) -> _TableSum:
    """Empty sums, with the largest unit for which no sum of gradients of scores can overflow."""
    if call.bias is None:
        return _TableSum()
    # The weights of a row sum to 1, so a sum is at most the number of rows times the largest |dP - delta|. Beside a
    # sink they sum to less: delta is at most |dP| and a slope, and weights times slope the gradient of the keys' LSE.
    spans = [torch.linalg.vector_norm(x, torch.inf, -1, dtype=torch.float32) for x in (grad_output, call.value)]
    many, slope = (1, delta) if call.keys_lse_grad is None else (2, call.keys_lse_grad)
    tops = [x.abs().nan_to_num(0.0, 0.0, 0.0).amax().double() for x in (*spans, slope)]
    largest = many * tops[0] * tops[1] * (call.value.shape[3] / (1 - call.dropout_p)) + tops[2]
    unit = (61 - (largest * delta[:, 0].numel()).log2().ceil()).clamp(-120, 120).exp2().float()
    return _TableSum(torch.zeros_like(call.bias, dtype=torch.int64), torch.zeros_like(call.bias), unit)


def dropout_args(call: AttentionCall) -> tuple[float, int]:
    """Scale of kept weights, and the threshold below which a random word drops one."""
    return 1.0 / (1.0 - call.dropout_p), threshold(call.dropout_p)


def _sizes(call: AttentionCall, part: PartSchedule, side: WalkTables) -> tuple[int, ...]:
    heads = call.query.shape[1]
    return (
        side.items, side.mask_shift, side.slots, heads, heads // call.key.shape[1], part.query_tiles, part.key_tiles,
        call.query.shape[2], call.key.shape[2], part.query_rate, part.key_rate,
    )  # fmt: skip


def _constants(
    call: AttentionCall, tables: Schedule, part: PartSchedule, side: WalkTables, tiles: Tiles
) -> dict[str, int | bool | str]:
    return constants_of(call, tiles,
        STRIDED=part.strided, PER_HEAD=part.per_head, BOUNDED=part.bounded, PARTIAL=side.partial, BITS=tables.bits,
        POSITIONS=call.dropout_p > 0 and call.positions is not None, SPLIT=side.slots > 0, CAREFUL=CAREFUL,
        # Containing NaNs costs a tenth of the time of short rows, so it is limited to anomaly detection.
        CONTAIN=side.partial and torch.is_anomaly_enabled(),
    )  # fmt: skip


def constants_of(call: AttentionCall, tiles: Tiles, **options: int | bool) -> dict[str, int | bool | str]:
    """Compile-time constants of the attention kernels, except for carry and sum flags."""
    sizes, padding = (call.plan.block_size, call.query.shape[3], call.value.shape[3]), call.key_padding_mask is not None
    return _named_constants(*sizes, padding, call.dropout_p > 0, dot_precision(call.query.dtype), tiles, **options)


@lru_cache(maxsize=1024)
def _named_constants(
    block: int, d: int, e: int, padding: bool, dropout: bool, precision: str, tiles: Tiles, **options: int | bool
) -> dict[str, int | bool | str]:
    """Cached: building the dictionary takes microseconds."""
    named = {"BLOCK": block, "BM": tiles.m, "BN": tiles.n, "D": d, "E": e, "DP": padded_width(d), "EP": padded_width(e)}
    named |= {"PADDING": padding, "DROPOUT": dropout, "num_warps": tiles.warps, "num_stages": tiles.stages}
    return {**named, **options, "PRECISION": precision}


def dot_precision(dtype: torch.dtype) -> str:
    """Input precision of products; it has no effect in half precision.

    Three tf32 products on the tensor cores are as exact as one float32 product, and compile in half the time.
    """
    return "tf32x3" if dtype is torch.float32 and torch.version.hip is None else "ieee"


def padded_width(width: int) -> int:
    """Width padded to a power of two, at least 16, the smallest dimension of a product."""
    return max(16, 1 << (width - 1).bit_length())


def launches_overlap(device: torch.device) -> bool:
    """Whether a launch may start while the programs of the launch before it end."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device)[0] >= 9


def shares_much(device: torch.device) -> bool:
    """Whether a program may use as much shared memory as on data-centre GPUs."""
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin >= LARGE_SHARED


def config(d: int, e: int, dtype: torch.dtype, device: torch.device, block: int) -> Config:
    """Tile sizes for a head width, dtype, device and block size."""
    key = (max(d, e), dtype, device, block)
    cached = _configs.get(key)
    if cached is None:
        table = SINGLE if dtype is torch.float32 else HALF if shares_much(device) else HALF_SMALL_SHARED
        width = next(width for width in table if width >= max(d, e))
        cached = _configs[key] = Config(*(tiles.within(block) for tiles in table[width]))
    return cached


def _config_of(call: AttentionCall) -> Config:
    query, widths = call.query, (call.query.shape[3], call.value.shape[3])
    own = config(*widths, query.dtype, query.device, call.plan.block_size)
    return own if call.bias is None else own.with_bias(max(widths), by_position=call.bias_positions is not None)


def _float_sum(rows: Tensor, fresh: bool) -> Tensor:
    """Float32 accumulator of rows, zeroed unless the first part writes every row (`fresh`)."""
    make = torch.empty if fresh else torch.zeros
    return make(rows.shape, dtype=torch.float32, device=rows.device)


def _pieces(side: WalkTables, batch: int, block: int, width: int) -> Tensor:
    """Buffer for the pieces of split rows, or a placeholder if no row is split."""
    if not side.slots:
        return side.work
    shape = (batch, len(side.owners), side.slots, block, width)
    return torch.empty(shape, dtype=torch.float32, device=side.work.device)
