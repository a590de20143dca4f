"""Launches that compute the gradients of a scorer's parameters from the gradients of the scores of some rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.launch.arena import Arena, Shape
from ...kernels.launch.launcher import Launch, prepared
from ...kernels.launch.triton_abi import Grid
from ...kernels.triton.launches import dot_precision, padded_width
from ..types import Factors, ScoreInputs
from .block_scores import projecting
from .score_gradients_kernels import best_kernel, mixture_kernel, own_kernel, sides_bwd_kernel, sums_kernel

PROJECTED = 32
"""Rows per program of `own_kernel`."""
TILE = 4096
"""Elements (streamed rows or blocks, times hidden units) that a program holds at once."""
HELD, STREAMED = 16, 128
"""Rows, or sub-blocks of key blocks, that a program of matches holds, and those of the other side per step; fewer per
step if a block has more sub-blocks than HELD, so that all pairs fit registers."""
LARGEST_TILE = 128 * 128
"""Most pairs of a row and a sub-block that fit a program of matches of rank 32, fewer for larger ranks. If a block has
more, `best_kernel` computes the best matches in a launch of its own."""
CHUNK = 64
"""Rows and sub-blocks per product if `best_kernel` runs."""
SUMMED, STEP = (32, 64), 64
"""Tile (rows, columns) of a program of `sums_kernel`, and the lines it sums per step."""
RUN, PART = 2048, 512
"""Sub-blocks of key blocks that a program of `sums_kernel` sums, and elements of such partial sums per program of
`mixture_kernel`."""


class _Launches(NamedTuple):
    own: Launch
    best: Launch | None
    """None if a program can hold all matches of a row with a block"""
    sides: Launch
    sums: Launch
    mixture: Launch
    grids: tuple[Grid, ...]
    held: Arena
    """Intermediate results"""
    found: Arena
    """Gradients of the parameters, per sample"""


def _launches(
    device: torch.device, batch: int, heads: int, scorers: int, rows: int, t: int, hidden: int, d: int, units: int,
    rank: int, size: int, holes: bool, coldest: float, tile: int,
    s_weight: int, s_project: int, s_first: int, s_mixture: int, apart: tuple[int, ...], rows_apart: tuple[int, ...],
    columns_apart: tuple[int, ...], width: int, group: int, key_heads: int, query_apart: tuple[int, ...],
) -> _Launches:  # fmt: skip
    streams, wide = batch * heads, padded_width(rank)
    a_row, a_left, a_block = (streams * rows * hidden,), (streams * rows * rank,), (streams * t * hidden,)
    shapes: dict[str, Shape] = {"rows": a_row, "left": a_left, "by_row": a_row, "by_weight": a_row, "by_block": a_block}
    shapes |= {"sums": (2 * streams * rows,), "by_left": a_left, "by_right": (streams * t * units * rank,)}
    # Tensor core products need at least 16 rows and columns.
    met = max(min(tile // HELD, STREAMED), HELD)
    held_left, held_right = HELD, max(HELD // units, 1) * units
    met_left, met_right = max(HELD * met // held_right, HELD), max(met // units, 1) * units
    pairs = max(held_left * met_right, held_right * met_left)
    stores_best = max(held_left, held_right) * max(met, units) * max(wide, 32) > 32 * LARGEST_TILE
    if stores_best:
        held_left = held_right = met_left = met_right = CHUNK
        pairs = CHUNK * CHUNK
    splits, keys = -(-t * units // RUN), max(key_heads // heads, 1)
    shapes |= {"parts": (streams * keys * splits * d * rank,)}
    shapes |= {"best": (streams * rows * t * 2,)} if stores_best else {}
    between = Arena(torch.float32, device, shapes)
    (at_left,), at = between.begin("left"), between.begin(*tuple(shapes)[2:8])
    (at_parts,) = between.begin("parts")
    (at_best,) = between.begin("best") if stores_best else (0,)
    # Gradients of the first layers; by_block^T summary, the common factor of their key part and of the mixture; both
    # projections of the match, first biases, second layers; temperatures and then second biases; the mixture.
    shapes = {"first": (scorers, hidden, 2 * d), "joint": (scorers, hidden, 3 * d)}
    shapes |= {
        "project": (scorers * group, d, rank),
        "match": (scorers * keys, d, rank),
        "bias": (scorers, hidden),
        "last": (scorers, 1, hidden),
        "two": (2, scorers),
    }
    found = Arena(torch.float32, device, shapes | {"mixture": (scorers, 3 * d, d)})
    to = found.begin("joint", "project", "bias", "last", "two")
    precise = {"PRECISION": dot_precision(torch.float32)}
    shape = {"M": hidden, "RANK": rank}
    own = Launch(
        own_kernel, device, rows, heads, at_left, *rows_apart, *apart, s_project, BM=PROJECTED,
        BH=min(padded_width(hidden), 64), D=width, RP=wide, SIZE=size, num_warps=4, **shape, **precise,
    )  # fmt: skip
    best, by_best = None, (0, 0, 0)
    if stores_best:
        best = Launch(
            best_kernel, device, rows, t, at_left, at_best, U=units, RP=wide, num_warps=4, num_stages=2, RANK=rank,
            BR=HELD, BU=min(units, CHUNK), HOLES=holes, **precise,
        )  # fmt: skip
        by_best = (-(-rows // HELD), t, streams)
    sides = Launch(
        sides_bwd_kernel, device, rows, t, heads, coldest, rank**-0.5, at_left, *at, at_best, s_weight,
        *columns_apart, MP=padded_width(hidden), BN=max(tile // padded_width(hidden), 1), HELD_LEFT=held_left,
        HELD_RIGHT=held_right, MET_LEFT=met_left, MET_RIGHT=met_right, U=units, RP=wide, KNOWN=stores_best,
        num_stages=2, num_warps=min(max(pairs // 2048, 4), 16), HOLES=holes, **shape, **precise,
    )  # fmt: skip
    tiles = {"BM": SUMMED[0], "BN": min(SUMMED[1], padded_width(d)), "BK": STEP, "num_warps": 4, "num_stages": 2}
    narrow = min(SUMMED[1], wide)
    sums = Launch(
        sums_kernel, device, rows, t, heads, scorers, found.total, splits, RUN, *at, at_parts, *to, *query_apart,
        None if group == 1 and key_heads == heads else key_heads, U=units, D=d, BR=narrow, SIZE=size, GROUP=group,
        KEYS=keys, **tiles, **shape, **precise,
    )  # fmt: skip
    steps = at_parts, *found.begin("joint", "mixture", "match"), s_first, s_mixture
    mixture = Launch(
        mixture_kernel, device, streams, scorers, splits, *steps, M=hidden, D=d, RANK=rank, KEYS=keys, BP=PART, **tiles,
        **precise,
    )  # fmt: skip
    tall, broad, across = -(-hidden // SUMMED[0]), -(-3 * d // SUMMED[0]), -(-d // tiles["BN"])
    added = (group + keys * splits) * -(-d // SUMMED[0]) * -(-rank // narrow)
    added += tall * (-(-3 * d // tiles["BN"]) + across + 1)
    grids = (
        (-(-rows // PROJECTED), streams, 1),
        by_best,
        (-(-rows // held_left) + -(-t * units // held_right) + rows + t, streams, 1),
        (added, streams, 1),
        ((tall + broad) * across + keys * -(-d * rank // PART), scorers, 1),
    )
    return _Launches(own, best, sides, sums, mixture, grids, between, found)


def parameter_gradients(
    grad: Tensor, scores: Tensor, ids: Tensor, factors: Factors, inputs: ScoreInputs, first: Tensor, mixture: Tensor,
    size: int,
) -> list[Tensor]:  # fmt: skip
    """Gradients of parameters (h or 1, ...) from the gradients (b, h, r, t) of scores over temperature.

    The parameters are first layers (.., m, 2 d), their biases (.., m), second layers (.., 1, m), their biases (.., 1),
    the mixture (.., 3 d, d), projections of queries and keys (.., d, p), and the logarithms of temperatures (h).

    The rows are `ids`, of which `size` belong to a block. The factors have no dropout on hidden units, and were
    computed from `inputs` with the first layers `first` (h or 1, m, 2 d) and the `mixture` of summaries. If heads share
    lists, scores and gradients have a list in place of a head, and projections have every query head or key head.
    """
    (batch, heads, many, t), device, scorers = scores.shape, scores.device, len(first)
    own = factors.own
    query = own if inputs.own is None else inputs.own
    group, key_heads = query.shape[1] // heads, inputs.units.shape[1]
    project, project_stride, width = projecting(factors)
    right, rows, columns = factors.right.contiguous(), factors.rows, factors.columns
    right_there = factors.right_there
    made: _Launches = prepared(
        _launches, device, batch, heads, scorers, many, t, rows.shape[3], query.shape[3], *right.shape[3:], size,
        right_there is not None, float(factors.coldest), TILE, factors.weight.stride(0),
        project_stride, first.stride(0), mixture.stride(0), own.stride()[:3], rows.stride()[1:],
        columns.stride()[1:], width, group, key_heads, query.stride()[:3],
    )  # fmt: skip
    memory = made.held.made()
    # A separate allocation, because gradients outlive the rest. Heads that share a scorer have their own temperatures.
    each = torch.empty((batch * heads // scorers, made.found.total), dtype=torch.float32, device=device)
    # Placeholders for absent tensors, which no program reads.
    there = ids if right_there is None else right_there.contiguous()
    grad, log = grad.contiguous(), factors.log_temperature
    means, summary, units = (x.contiguous() for x in (inputs.means, inputs.summary, inputs.units))
    by_own, by_best, by_sides, by_sums, by_mixture = made.grids
    made.own(by_own, (rows, own, project, ids, memory))
    if made.best is not None:
        made.best(by_best, (memory, right, grad, there))
    made.sides(by_sides, (memory, columns, right, grad, scores, there, factors.weight, log))
    made.sums(by_sums, (query, units, means, summary, memory, ids, each))
    total = each[0] if len(each) == 1 else each.sum(0)
    made.mixture(by_mixture, (first, mixture, memory, total))
    names = "first", "bias", "last", "mixture", "project", "match"
    *layers, by_mixed, by_project, by_match = (made.found.tensor(total, name) for name in names)
    (two,) = made.found.begin("two")
    apart = (made.found.total, 1) if scorers == heads else (heads * made.found.total, made.found.total)
    by_temperature = each.as_strided((batch, heads), apart, two)
    by_temperature = by_temperature[0] if batch == 1 else by_temperature.sum(0)
    by_second = total.as_strided((scorers, 1), (1, 1), two + scorers)
    return [*layers, by_second, by_mixed, by_project, by_match, by_temperature]
