"""Launch that brings index tensors into their normal form."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.launch.launcher import Launch, prepared
from ...kernels.launch.triton_abi import Grid
from ...kernels.triton.launches import padded_width
from .block_lists_kernels import normal_lists_kernel

COMPARED = 4096
"""Pairs of entries that a program compares at a time, if the lists of several rows have so few."""


def _normal_lists_launch(
    device: torch.device, shape: tuple[int, ...], blocks: int, size: int, first: int, local: int, causal: bool,
    splits: bool, counted: bool, counts: bool, *strides: int,
) -> tuple[Launch, Grid, tuple[int, ...], Tensor]:  # fmt: skip
    batch, lists, rows, entries = shape
    lines, listed, wide = batch * lists * rows, min(entries, blocks), padded_width(entries)
    together = max(COMPARED // wide**2, 1)
    launch = Launch(
        normal_lists_kernel, device, *(() if counts else (None,)), lines, rows, lists, entries, listed, blocks, first,
        *strides, R=together, P=wide, SIZE=size, LOCAL=local, CAUSAL=causal, COUNTED=counted, SHARING=splits,
        num_warps=8 if wide**2 > COMPARED else 4,
    )  # fmt: skip
    # Calls outside of inference mode read it, too.
    with torch.inference_mode(False):
        no_counts = torch.empty(0, dtype=torch.int32, device=device)
    return launch, (-(-lines // together), 1, 1), (batch, lists, rows, listed), no_counts


def normal_lists(
    indices: Tensor, counts: Tensor | None, blocks: int, size: int, first: int, local: int, causal: bool, splits: bool,
    is_counted: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`Selection.indices`, `counts` (empty unless `is_counted`) and with `splits` the `sharing_rows`.

    `size` rows share their own block. Lists keep blocks from `first` on that are at least `local` away from the row's
    own, and with `causal` before it.
    """
    device, shape = indices.device, indices.shape
    strides = *indices.stride(), *((0, 0, 0) if counts is None else counts.stride())
    sizes = blocks, size, first, local, causal, splits, counts is not None, is_counted, *strides
    launch, grid, listed_shape, many = prepared(_normal_lists_launch, device, shape, *sizes)
    listed = torch.empty(listed_shape, dtype=torch.int32, device=device)
    if is_counted:
        many = torch.empty(shape[:3], dtype=torch.int32, device=device)
    sharing = torch.empty(shape[:3], dtype=torch.bool, device=device) if splits else None
    read = indices, indices if counts is None else counts
    launch(grid, (*read, listed, listed if sharing is None else sharing, *((many,) if is_counted else ())))
    return listed, many, sharing
