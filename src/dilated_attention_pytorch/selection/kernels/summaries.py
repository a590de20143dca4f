"""Launches that summarise blocks of a sequence and factor their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.launch.arena import Arena, Shape
from ...kernels.launch.launcher import Launch, prepared
from ...kernels.launch.triton_abi import Grid
from ...kernels.triton.launches import dot_precision, padded_width
from .block_scores import Halves
from .summaries_kernels import factor_kernel, summaries_kernel

ROWS = 4
"""Tokens that a program of `summaries_kernel` reads in parallel, from as many units if a block has them."""
ASKED = 8
"""Consecutive loads in flight per thread, enough to saturate the memory bandwidth."""
LINE = 512
"""Bytes that a warp loads with one instruction."""
PROJECTED = 32
"""Blocks, or sub-blocks, that a program of `factor_kernel` projects, and hidden units per step. Its products are small
and dependent, so that few warps with pipelined loads are faster than many."""


def _factoring(
    device: torch.device, batch: int, heads: int, t: int, many: int, d: int, hidden: int, rank: int,
    steps: tuple[int, ...], key_heads: int, own: tuple[int, ...], own_apart: tuple[int, ...],
) -> tuple[Launch, Grid, Arena, Arena]:  # fmt: skip
    group = own[1] // heads if own else 1
    constants = {"BM": PROJECTED, "M": hidden, "D": d, "DP": padded_width(d)}
    constants |= {"RANK": rank, "RP": padded_width(rank), "UNITS": many}
    constants |= {"GROUP": group, "KEYS": max(key_heads // heads, 1) if own else 1}
    constants |= {"PRECISION": dot_precision(torch.float32), "num_warps": 2, "num_stages": 3}
    tiles, apart = 2 * -(-t // PROJECTED) + -(-t * many // PROJECTED), padded_width(t)
    right, side = (batch, heads, t, many, rank), (batch, heads, t, hidden)
    by_unit = heads * hidden * apart, hidden * apart, 1, apart
    shapes: dict[str, Shape] = {"rows": side, "columns": side, "right": right, "scale": (batch, heads, t)}
    absent = (None,) * 3
    rest = None, key_heads if key_heads < heads else None, *absent
    if own:
        shapes |= {"left": (batch, heads, own[2], rank)}
        absent, rest = (), (own[2], key_heads, *own_apart)
        tiles += -(-own[2] // PROJECTED)
    launch = Launch(factor_kernel, device, *absent, t, t * many, heads, *steps, apart, *rest, **constants)
    whole = Arena(torch.float32, device, shapes, {"rows": by_unit, "columns": by_unit})
    halves = Arena(torch.float16, device, {"half": right, "rest": right})
    return launch, (tiles, batch * heads, 1), whole, halves


def factor(
    means: Tensor, summary: Tensor, units: Tensor, first: Tensor, bias: Tensor, mixture: Tensor, match: Tensor,
    own: Tensor | None = None, project: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Halves | None, Tensor | None]:  # fmt: skip
    """`rows`, `columns`, `right` and `halves` of `Factors`; no halves unless units per block divide PROJECTED.

    Inputs are the means of query blocks (b, h, t, d) and the summaries and units of key blocks, which have key heads.
    Parameters are (h or 1, ...): first layer and its bias, mixture of summaries, projection of keys. `rows` and
    `columns` have the layout of `block_scores.by_unit`. If groups of heads share lists, `first` has a scorer per group,
    and the last result is the query side of the match (b, s, r, p) of the rows `own` (b, h, r, d) with the
    projections `project` (h, d, p).
    """
    (batch, key_heads, t, many, d), parameters = units.shape, (first, bias, mixture, match)
    heads, grouped, apart = means.shape[1], (), ()
    if own is not None and project is not None:
        heads, apart = len(first), own.stride()[:3]
        grouped = own, project.contiguous()
        parameters = *parameters[:3], match.contiguous()
    steps = tuple(x.stride(0) if x.shape[0] == heads else 0 for x in parameters)
    options = batch, heads, t, many, d, first.shape[1], match.shape[2], steps, key_heads
    sizes = tuple(own.shape) if own is not None else (), apart
    launch, grid, whole, half = prepared(_factoring, units.device, *options, *sizes)
    rows, columns, right, scale, *left = whole()
    halves = None
    if PROJECTED % many == 0:
        leading, rest = half()
        halves = leading, rest, scale
    results = rows, columns, right, *(halves or (right,) * 3)
    launch(grid, (means, summary, units, *parameters, *results, *grouped, *left))
    return rows, columns, right, halves, left[0] if left else None


Summary = tuple[Tensor, Tensor, Tensor, Tensor]
"""Per block (b, h, t, ...): mean, for keys followed by maximum and minimum; means of its units; whether each unit has
tokens; whether the block has tokens and all are finite. A block with a non-finite token counts as empty and is 0."""


def _steps(units: int, unit: int, rows: int, in_flight: int) -> tuple[int, int, int, int, int]:
    """Units per block, tokens per unit, units read at a time, parts of a unit, tokens of a part loaded at once."""
    together = min(rows, units)
    parts = min(rows // together, unit)
    return units, unit, together, parts, min(in_flight, unit // parts)


def _summing(
    device: torch.device, shape: tuple[int, ...], key_heads: int, apart: tuple[int, ...], key_apart: tuple[int, ...],
    itemsize: int, size: int, own_unit: int, unit: int, before: bool, padded: bool, rows: int, in_flight: int,
) -> tuple[Launch, Grid, Arena, Arena, Arena]:  # fmt: skip
    batch, heads, n, d = shape
    t, units, own_units, row = -(-n // size), size // unit, size // own_unit, padded_width(d) * itemsize
    warps = min(max(rows * row // LINE, 1), 8)
    options = max(warps * LINE // row, 1), in_flight
    named = "OWN_UNITS", "OWN_UNIT", "OWN_BU", "OWN_PARTS", "OWN_RUN", "UNITS", "UNIT", "BU", "PARTS", "RUN"
    constants = dict(zip(named, (*_steps(own_units, own_unit, *options), *_steps(units, unit, *options)), strict=True))
    constants |= {"D": d, "DP": padded_width(d), "BEFORE": before, "PADDING": padded, "num_warps": warps}
    sizes = n, t, heads, key_heads, *apart[:3], *key_apart[:3]
    launch = Launch(summaries_kernel, device, *sizes, **constants)
    lead, key_lead = (batch, heads, t), (batch, key_heads, t)
    numbers: dict[str, Shape] = {"means": (*lead, d), "own": (*lead, own_units, d)}
    numbers |= {"summary": (*key_lead, 3 * d)}
    flags: dict[str, Shape] = {
        "own_there": (*lead, own_units),
        "own_visible": lead,
        "there": (*key_lead, units),
        "visible": key_lead,
    }
    # A separate allocation: the units of keys are large, and freed before the rest if no gradients are needed.
    large = Arena(torch.float32, device, {"units": (*key_lead, units, d)})
    rooms = Arena(torch.float32, device, numbers), large, Arena(torch.bool, device, flags)
    return launch, (t * batch * (heads + key_heads), 1, 1), *rooms


def summarise(
    query: Tensor, key: Tensor, size: int, own_unit: int, unit: int, padding: Tensor | None, before: bool
) -> tuple[Summary, Summary]:
    """Summaries of the blocks of `size` queries and of `size` keys, with units of `own_unit` and of `unit` tokens.
    Queries and keys have one shape except for their heads. With `before` a query block has the summary of the block
    before."""
    # Kernels compute the offset of a token within its block in 32 bits.
    query, key = (x if x.stride(3) == 1 and x.stride(2) * size < 2**31 else x.contiguous() for x in (query, key))
    options = query.itemsize, size, own_unit, unit, before, padding is not None, ROWS, ASKED
    sides = query.shape, key.shape[1], query.stride(), key.stride()
    launch, grid, numbers, large, flags = prepared(_summing, query.device, *sides, *options)
    (means, own, summary), (units,), (own_there, own_visible, there, visible) = numbers(), large(), flags()
    rows, keys = (means, own, own_there, own_visible), (summary, units, there, visible)
    launch(grid, (query, *rows, key, *keys, there if padding is None else padding.contiguous()))
    return rows, keys
