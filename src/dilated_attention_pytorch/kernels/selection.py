"""Ranking blocks on a GPU: what the scores are made of, and what a program takes at once."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from . import triton_backend

MOST_UNITS = 256
"""Sub-blocks of a row."""
WIDEST_MATCH = 128
MOST_BLOCKS = 16384
"""Blocks up to which every pair is scored; beyond, a level of super-blocks costs less."""


def no_kernels(device: torch.device) -> str | None:
    """Why the kernels of selections cannot run on a device, or None when they can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA tensor, got {device.type}"
    if not triton_backend._installed():
        return "needs triton, which is not installed; CUDA builds of torch bring it"
    return None


def rounded(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """To the digits of float16, which inputs of 16 bits have no more of, beside the largest number along `dims`.

    A match is then one product of float16 instead of three.
    """
    most = x.abs().amax(dims, keepdim=True).clamp(2.0**-100, 2.0**127)
    power = 15 - most.frexp().exponent
    return x.ldexp(power).half().to(x.dtype).ldexp(-power)


class Factors(NamedTuple):
    """Scores as what they are made of: w . relu(rows + columns) + bias, and the best match of sub-blocks.

    Shapes: b batch, h heads, t blocks, m hidden units, r rows that choose (t, or tokens), a sub-blocks of a row, u of a
    key block, d width, p rank of the match; m or p may be 0. Float32 but for the queries, the parameters and what says
    what is there.
    """

    rows: Tensor
    """(b, h, t, m): by query block, whatever the rows are"""
    columns: Tensor
    """(b, h, t, m)"""
    weight: Tensor
    """(h, m)"""
    bias: Tensor
    """(h)"""
    own: Tensor
    """(b, h, r, a, d): queries or their means, in rows without gaps"""
    project: Tensor
    """(h, d, p): what makes them the query's side of the match"""
    right: Tensor
    """(b, h, t, u, p)"""
    log_temperature: Tensor
    """(h): scores are divided by its exponential, or by `coldest`"""
    coldest: float
    keep: Tensor | None = None
    """(b, h, t, m): a factor on each hidden unit of a row"""
    left_there: Tensor | None = None
    """bool (b, h, r, a): sub-blocks with something to see, where rows are blocks; None where all have"""
    right_there: Tensor | None = None
    """bool (b, h, t, u)"""
    halves: tuple[Tensor, Tensor, Tensor] | None = None
    """What `triton_selection.split` gives of `right`, where it is known"""
    rounds: bool = False
    """Whether both sides of the match are `rounded` before it"""

    def why_not(self, room: int) -> str | None:
        """Why the kernel cannot rank by these factors, to list up to `room` blocks; None when it can."""
        rows, (own_units, rank) = self.rows, (self.own.shape[3], self.right.shape[4])
        if (problem := no_kernels(rows.device)) is not None:
            return problem
        if rows.dtype is not torch.float32:
            return f"needs float32 factors, got {rows.dtype}"
        if rank > WIDEST_MATCH:
            return f"needs a match of rank <= {WIDEST_MATCH}, got {rank}"
        if rows.shape[2] > MOST_BLOCKS:
            return f"scores every pair of up to {MOST_BLOCKS} blocks, got {rows.shape[2]}"
        if room < 1:
            return f"must list 1 block or more, got {room}"
        if own_units > MOST_UNITS:
            return f"needs rows of <= {MOST_UNITS} sub-blocks, got {own_units}"
        return None
