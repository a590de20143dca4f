"""Launches that compute the attention mass of blocks, and from it the gradients of a scorer's scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.launch.arena import ALIGNED
from ...kernels.launch.launcher import Launch, prepared
from ...kernels.launch.triton_abi import Grid
from ...kernels.triton.launches import LOG2E, dot_precision, padded_width
from ..distill import FLOOR
from ..types import Selection
from .block_mass_kernels import block_lse_kernel, distill_kernel

TILE = 4096
"""Elements that a program of `distill_kernel` holds at once."""


def _launches(
    device: torch.device, shape: tuple[int, ...], key_heads: int, dtype: torch.dtype, e: int, size: int, t: int,
    slots: int, chosen: int, dense: int, wide: int, each: int, is_causal: bool, together: bool, padded: bool,
    saliency: bool, with_own: bool, scale: float, factors: tuple[float, float], tile: int, group: int,
    *apart: tuple[int, ...],
) -> tuple[Launch, Grid, Launch, Grid, int, tuple[tuple[int, ...], ...]]:  # fmt: skip
    batch, heads, n, d = shape
    streams, lists, rows = batch * heads, heads // group, chosen + dense
    total, most = -(-n // (wide * each)), 32 if dtype is torch.float32 else 64
    few, many = min(padded_width(wide), most), min(padded_width(max(dense * wide, 1)), most)
    programs = chosen * -(-wide // few) * (slots + 1)
    at_all = -(-streams * chosen * wide * (slots + 1) // ALIGNED) * ALIGNED
    constants = {"BLOCK": size, "W": wide, "EACH": each, "LISTED": group, "CAUSAL": is_causal, "PADDING": padded}
    query_apart, key_apart, grad_apart = apart
    logs = Launch(
        block_lse_kernel, device, scale * LOG2E, n, t, chosen, dense, slots, total, programs, at_all, heads,
        heads // key_heads, *query_apart[:3], *key_apart[:3], BM=few, BMA=many, BN=min(most, size), D=d,
        DP=padded_width(d), PRECISION=dot_precision(dtype), num_warps=4, num_stages=1, **constants,
    )  # fmt: skip
    length, all_length = padded_width(slots + 1), padded_width(t)
    by_row = Launch(
        distill_kernel, device, n, t, chosen, slots, total, at_all, lists, *factors, *grad_apart[:3],
        BM=min(wide, max(tile // length, 1)), L=length, BMA=min(wide, max(tile // all_length, 1)), LA=all_length,
        T=padded_width(t) if together else 0, E=e, EP=padded_width(e), SALIENCY=saliency, FLOOR=FLOOR, OWN=with_own,
        num_warps=min(max((all_length if dense else length) // 1024, 8), 16), **constants,
    )  # fmt: skip
    shapes = ((batch, lists, rows, t),) if together else ((batch, lists, chosen, slots), (batch, lists, dense, t))
    grid = programs + -(-dense * wide // many) * t, streams, 1
    return logs, grid, by_row, (rows, batch * lists, 1), at_all + streams * dense * wide * t, shapes


def distill_gradients(
    query: Tensor, key: Tensor, selection: Selection, rows: Tensor, chosen: int, scores: Tensor | None,
    all_scores: Tensor | None, together: bool, visible: Tensor, lse: Tensor, grad_output: Tensor, scale: float,
    key_padding_mask: Tensor | None, factors: tuple[float, float], mean: Tensor | None, row_tokens: int | None,
    with_own: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of both kinds of scores, and statistics of each row, float32 (5, b s, r).

    The statistics are divergence times weight, entropy, kept share of attention, number of queries, and weight. `rows`
    are int64 (r). The first c = `chosen` rows have `scores` (b, s, c, k) of their listed blocks, the others have
    `all_scores` (b, s, r - c, t) of all blocks; with `together` both are one tensor (b, s, r, t) of all blocks. `lse`
    (b, h, n), contiguous, and `grad_output` (b, h, n, e) belong to the attention over the selection. `factors` are the
    values of `DistillBatch.factor` for both kinds of rows, and `mean` (b, h) is `QueryWeights.mean`. `row_tokens` and
    `with_own`: see `DistillBatch`.
    """
    lists, padding = selection.indices.contiguous(), key_padding_mask
    shape, dense, slots = query.shape, len(rows) - chosen, lists.shape[3]
    of_list = 1 if selection.per_token else selection.block_size
    wide = row_tokens or of_list
    read, log_grid, by_row, grid, room, shapes = prepared(
        _launches, query.device, shape, key.shape[1], query.dtype, grad_output.shape[3], selection.block_size,
        selection.blocks, slots, chosen, dense, wide, max(of_list // wide, 1), selection.is_causal, together,
        padding is not None, mean is not None, with_own, float(scale), factors, TILE, selection.group, query.stride(),
        key.stride(), grad_output.stride(),
    )  # fmt: skip
    logs = torch.empty(room, dtype=torch.float32, device=query.device)
    grads = [torch.empty(shape, dtype=torch.float32, device=query.device) for shape in shapes]
    # Outlives the gradients: statistics are reduced on request.
    found = torch.empty((5, *grid[1::-1]), dtype=torch.float32, device=query.device)
    padding = rows if padding is None else padding.contiguous()
    read(log_grid, (query, key, rows, lists, padding, logs))
    # Placeholders for absent tensors, which no program reads.
    given = [x.contiguous() for x in (scores, all_scores) if x is not None]
    mean = lse if mean is None else mean.contiguous()
    tensors = logs, given[0], given[-1], lists, visible, rows, lse, grad_output, mean, padding
    by_row(grid, (*tensors, grads[0], grads[-1], found))
    return grads[0] if scores is not None else None, grads[-1] if all_scores is not None else None, found
