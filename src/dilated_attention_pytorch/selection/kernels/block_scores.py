"""Launches that score blocks from factors, tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.launch.launcher import CACHE_SIZE, Launch, launch, prepared
from ...kernels.triton.launches import dot_precision, padded_width
from ..types import Factors
from .block_scores_kernels import hidden_kernel, match_kernel, selecting_kernel, split_kernel

HIDDEN = {128: (8, 8, 3), 64: (4, 4, 1), 32: (2, 16, 1)}
"""Warps, hidden units per step and pipeline stages of `hidden_kernel`, by the rows (and blocks) of a program. Several
stages use shared memory. A thread holds 4 rows and 16, 8 or 4 blocks."""
HIDDEN_REGISTERS = 128
"""Register limit of `hidden_kernel`. With an explicit limit the assembler issues the loads of several units at once;
otherwise it uses fewer registers and loads unit by unit."""
UNITS_CHOSEN = 128
"""Sub-blocks of key blocks in one product of rank up to 32, half as many of rank 64, where scores are not stored."""
MATCHED, FEWEST, UNITS, BLOCKS = 64, 16, 64, 16
"""Most and fewest rows, and most sub-blocks of key blocks, in one product, and the blocks of a step, which has several
products if blocks have more sub-blocks. Registers hold five programs per multiprocessor, which hide each other's
barriers, products and loads."""
PROGRAMS, MATCH_PROGRAMS = 512, 2048
"""Programs that keep a large GPU busy; and of a launch for many rows, which has several waves of programs: enough for a
small share of idle time in the last wave."""
SELECTING = 4096
"""Scores that a program of `selecting_kernel` holds at a time."""
STAGES = 3
"""Pipeline stages of `match_kernel`."""
UNBOUND = 0, 0, 0, 0, 0, 0.0
"""`ToList.bounds` of a launch without lists."""
Halves = tuple[Tensor, Tensor, Tensor]
"""Result of `split`."""


class ToList(NamedTuple):
    """Arguments of `hidden_kernel` with LISTS: scores are NO_KEY for blocks that are not listed."""

    visible: Tensor
    """bool (b, h, t)"""
    may: Tensor
    """int32 (b, h, t): receives the list length and number of candidates of each block (`count_listable`)"""
    bounds: tuple[int | float, ...]
    """Capacity of a list; near and first blocks, which are not listed; fewest and most blocks of a row; fraction of its
    visible blocks that a row keeps"""


class ByBlock(NamedTuple):
    """Scores without the match, which the rows of a block share."""

    first: int
    """First block"""
    table: Tensor
    """(b, h, blocks, t)"""
    seed: Tensor | None = None
    """Seed of the noise; None without noise"""


def split(right: Tensor) -> Halves:
    """Split float32 (b, h, t, u, p) into scaled float16 halves; returns both and the inverse scales (b, h, t)."""
    right, many = right.contiguous(), right.shape[3] * right.shape[4]
    first, second = torch.empty((2, *right.shape), dtype=torch.float16, device=right.device).unbind()
    scale = torch.empty(right.shape[:3], dtype=torch.float32, device=right.device)
    launch(split_kernel, (scale.numel(),), right, first, second, scale, MANY=many, BM=padded_width(many))
    return first, second, scale


def matched_together(units: int, rank: int, most: int = UNITS_CHOSEN, fewest: int = FEWEST) -> tuple[int, int]:
    """Sub-blocks per key block, and blocks, of a product with up to `most` sub-blocks and at least `fewest` blocks."""
    together = min(UNITS_CHOSEN * 32 // padded_width(rank), most)
    grouped = min(units & -units, together // fewest)
    return grouped, together // grouped


def by_unit(x: Tensor) -> Tensor:
    """(b, h, t, m) stored by hidden unit, with t padded to a power of two."""
    heads, t, hidden = x.shape[1:]
    apart = padded_width(t)
    if x.stride() == (heads * hidden * apart, hidden * apart, 1, apart):
        return x
    return torch.nn.functional.pad(x.mT, (0, apart - t)).contiguous()


@lru_cache(maxsize=CACHE_SIZE)
def _hidden_side(most: int, streams: int, rows: int, width: int, seen: int) -> int:
    """Rows (and blocks) of a program: the largest tile with at least PROGRAMS programs, unless half fills much better.
    Rows see about `seen` of `width` blocks."""
    for side in (x for x in HIDDEN if 32 < x <= most):
        filled, closer = (-(-rows // x) * -(-width // x) * x**2 for x in (side, side // 2))
        if streams * -(-rows // side) * -(-seen // side) >= PROGRAMS and 8 * filled <= 9 * closer:
            return side
    return 32


def _hidden_launch(
    device: torch.device, t: int, hidden: int, size: int, is_causal: bool, keeps: bool, lists: bool, ids: bool,
    even: bool, side: int, *numbers: int | float,
) -> Launch:  # fmt: skip
    warps, units, stages = HIDDEN[side]
    constants = {"BM": side, "BN": side, "M": hidden, "UM": max(min(hidden & -hidden, units), 1), "T": padded_width(t)}
    constants |= {"STAGES": stages, "SIZE": size, "IDS": ids, "EVEN": even, "CAUSAL": is_causal, "KEEP": keeps}
    constants |= {"LISTS": lists, "num_warps": warps}
    return Launch(hidden_kernel, device, *numbers, **constants, maxnreg=HIDDEN_REGISTERS)


def hidden_scoring(
    factors: Factors, size: int, is_causal: bool, to_list: ToList | None = None
) -> Callable[..., Tensor]:
    """`scoring` without the match, for rows of which `size` belong to a block. With `to_list` the rows must be a range
    of blocks; scores are NO_KEY for blocks that are not listed."""
    (batch, heads, t, hidden), device = factors.rows.shape, factors.rows.device
    parts = [by_unit(x) for x in (factors.rows, factors.columns, factors.keep) if x is not None]
    read = parts[0], parts[1], factors.weight, factors.bias, parts[-1], factors.log_temperature
    numbers = heads, float(factors.coldest), factors.weight.stride(0), factors.bias.stride(0)
    numbers += UNBOUND if to_list is None else to_list.bounds
    listing = (parts[0], parts[0]) if to_list is None else to_list[:2]
    options = device, t, hidden, size, is_causal, factors.keep is not None, to_list is not None

    def run(rows: range | Tensor, width: int = t) -> Tensor:
        many = len(rows)
        ids, begin = (parts[0], rows.start) if isinstance(rows, range) else (rows, 0)
        scores = torch.empty((batch, heads, many, width), dtype=torch.float32, device=device)
        even = ids is not rows and size == 1 and begin % 4 == 0
        # Causal rows are usually the last of `width` blocks. The largest tiles have no registers for more addresses.
        seen = width - many // (2 * size) if is_causal else width
        side = _hidden_side(128 if even and factors.keep is None else 64, batch * heads, many, width, seen)
        launch = prepared(_hidden_launch, *options, ids is rows, even, side, width, *numbers)
        launch((-(-many // side), -(-width // side), batch * heads), (*read, ids, scores, *listing), begin, many)
        return scores

    return run


def projecting(factors: Factors) -> tuple[Tensor, int, int]:
    """Projection of `Factors.own`, its stride over heads, and the projected width; width 0 without a projection."""
    if factors.project is None:
        return factors.own, 0, 0
    return factors.project, factors.project.stride(0), factors.own.shape[3]


def _match_launch(
    device: torch.device, at_once: int, grouped: int, columns: int, d: int, rank: int, units: int, size: int,
    is_causal: bool, holes: bool, rounds: bool, ids: bool, together: bool, noise: bool, *numbers: int | float,
) -> Launch:  # fmt: skip
    constants = {"BM": at_once, "BN": columns, "D": d, "RANK": rank, "RP": padded_width(rank)}
    constants |= {"UK": units, "UG": grouped, "SIZE": size, "CAUSAL": is_causal, "HOLES": holes, "IDS": ids}
    constants["TOGETHER"] = together
    constants |= {"NOISE": noise, "ROUNDS": rounds, "PRECISION": dot_precision(torch.float32)}
    constants |= {"num_warps": max(at_once // 16, 4), "STAGES": STAGES, "num_stages": STAGES}
    width, t, *_ = numbers
    constants["WHOLE"] = width % columns == t % columns == 0
    return Launch(match_kernel, device, *numbers, **constants)


def matched_rows(size: int) -> int:
    """Rows of a program of `match_kernel` where `size` belong to a block: of one block, if a product takes so few."""
    return min(MATCHED, size) if size >= FEWEST else MATCHED


def scoring(factors: Factors, size: int, is_causal: bool) -> Callable[..., Tensor]:
    """Function that computes scores over temperature of rows, int64 (r), with all or the first `width` blocks.

    The result is (b, h, r, width). With `is_causal`, scores with a row's own and later blocks are undefined. `size`
    rows belong to a block. A range of rows may come with the scores that the rows of a block share (`ByBlock`), if
    `size` is at least `FEWEST`; if these leave out blocks that are not listed (`ToList`), the result is ready to be
    ranked.
    """
    hidden = hidden_scoring(factors, size, is_causal)
    batch, heads = factors.own.shape[:2]
    t, units, rank = factors.right.shape[2:]
    if not rank:
        return hidden
    project, project_stride, d = projecting(factors)
    at_once = matched_rows(size)
    grouped, columns = matched_together(units, rank, UNITS, BLOCKS)
    own, apart, device = factors.own, factors.own.stride()[:3], factors.own.device
    # Placeholders for absent tensors, which no program reads.
    right_there = own if factors.right_there is None else factors.right_there.contiguous()
    right = split(factors.right) if factors.halves is None else factors.halves
    read = own, project, *right, right_there, factors.log_temperature
    numbers = t, heads, float(factors.coldest), rank**0.5, *apart, project_stride
    options = device, at_once, grouped, columns, d, rank, units, size, is_causal, right_there is not own
    options += (factors.rounds,)

    def run(rows: range | Tensor, width: int = t, together: ByBlock | None = None) -> Tensor:
        many = len(rows)
        ids, begin = (own, rows.start) if isinstance(rows, range) else (rows, 0)
        if together is None:
            scores = hidden(rows, width)
            first, table, seed = 0, scores, None
        else:
            first, table, seed = together
            scores = torch.empty((batch, heads, many, width), dtype=torch.float32, device=device)
        # Many rows fill the GPU without a split over blocks, which would project the queries once per split.
        tiles = -(-many // at_once)
        spans = max((PROGRAMS if together is None else MATCH_PROGRAMS) // (tiles * batch * heads), 1)
        span = -(-width // (spans * columns)) * columns
        kinds = ids is rows, together is not None, seed is not None
        launch = prepared(_match_launch, *options, *kinds, width, *numbers)
        grid = tiles, -(-width // span), batch * heads
        also = ids, scores, own if seed is None else seed
        launch(grid, (table, *read, *also), begin, many, span, first, table.shape[2])
        return scores

    return run


def _selecting_launch(
    device: torch.device, size: int, is_causal: bool, with_own: bool, holes: bool, width: int, blocks: int, heads: int
) -> Launch:
    wide = max(padded_width(width), 32)
    at_once = min(max(SELECTING // wide, 1), size)
    warps = min(max(at_once * wide // 512, 4), 16)
    constants = {"BM": at_once, "T": wide, "SIZE": size, "CAUSAL": is_causal, "HOLES": holes, "OWN": with_own}
    constants |= {"num_warps": warps}
    return Launch(selecting_kernel, device, width, blocks, heads, **constants)


def of_selecting(
    scores: Tensor, first: int, size: int, visible: Tensor, present: Tensor | None, is_causal: bool, with_own: bool
) -> Tensor:
    """Scores (b, h, r, width) by which blocks of queries from block `first` on select, from those (b, h, r size, width)
    of their `size` rows each; see `BlockScores`. `present` is bool (b, t size)."""
    batch, heads, many, width = scores.shape
    rows = many // size
    result = torch.empty((batch, heads, rows, width), dtype=torch.float32, device=scores.device)
    options = scores.device, size, is_causal, with_own, present is not None, width, visible.shape[2], heads
    there = visible if present is None else present.contiguous()
    prepared(_selecting_launch, *options)((rows, batch * heads, 1), (scores, visible, there, result), first, rows)
    return result
