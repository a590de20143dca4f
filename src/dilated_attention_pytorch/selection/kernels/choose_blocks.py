"""Launches that list the top-k blocks of every row, from scores computed for some rows at a time."""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
from torch import Tensor

from ...kernels.launch.launcher import Launch, prepared
from ...kernels.triton.launches import dot_precision, launches_overlap, padded_width
from ..types import Factors, SelectionSettings
from .block_scores import (
    FEWEST,
    ByBlock,
    Halves,
    ToList,
    hidden_scoring,
    matched_together,
    of_selecting,
    projecting,
    scoring,
    split,
)
from .choose_blocks_kernels import choice_kernel, rank_kernel

RANKED, MOST_RANKED, MOST_WARPS = 1024, 2048, 8
"""Scores of several rows per warp, most scores of one row per warp (half with coverage), and most warps of a row.
Scores are held in registers, and noise needs further registers."""
READY_REGISTERS = 64, 72, 128
"""Register limits of a thread that only ranks: one row with up to 32 scores per thread, several rows with up to 32, or
more than 32. The limits allow many warps without spills."""
SCORE_BYTES, OF_LISTS, MOST_SCORE_BYTES = 9 * 2**21, 2, 2**29
"""Bytes of scores held at a time (selection for 32K tokens and 8 heads takes at most 64 MB, lists included, where
sub-blocks have four tokens), and the divisor of the lists' bytes that replaces it where lists are long, up to a limit:
fewer launches with more work each."""
CHOSEN, CHOSEN_AMONG, NARROWEST = 64, 256, 128
"""Tokens of a program that holds all their scores in registers, most blocks that it ranks (two programs fit a
multiprocessor), and fewest blocks for which it is compiled."""
NARROW_REGISTERS = 168
"""Register limit of a program that ranks fewer blocks: three programs fit a multiprocessor."""


def _choice_launch(
    device: torch.device, wide: int, at_once: int, columns: int, grouped: int, d: int, rank: int, units: int,
    block_size: int, is_causal: bool, noise: bool, holes: bool, rounds: bool, room: int,
    numbers: tuple[int | float, ...], goes_on: bool, after: bool,
) -> Launch:  # fmt: skip
    _, t, *_ = numbers
    constants: dict[str, Any] = {"BM": at_once, "BN": columns, "T": wide, "K": padded_width(room), "D": d}
    constants |= {
        "RANK": rank,
        "RP": padded_width(rank),
        "UK": units,
        "UG": grouped,
        "SIZE": block_size,
        "CAUSAL": is_causal,
        "NOISE": noise,
        "HOLES": holes,
    }
    constants |= {"ROUNDS": rounds, "FEW": wide == NARROWEST, "WHOLE": t % columns == 0}
    constants["PRECISION"] = dot_precision(torch.float32)
    constants |= {"num_warps": 4, "num_stages": 3}
    constants |= {"maxnreg": NARROW_REGISTERS} if wide < CHOSEN_AMONG else {}
    overlaps = launches_overlap(device)
    constants |= {"NEXT": goes_on and overlaps, "AFTER": after and overlaps}
    constants |= {"launch_pdl": True} if after and overlaps else {}
    return Launch(choice_kernel, device, *numbers, **constants)


def choose(
    factors: Factors, together: ByBlock, right: Halves, may: Tensor, indices: Tensor, counts: Tensor, block_size: int,
    is_causal: bool,
) -> None:  # fmt: skip
    """List blocks for the tokens that are scored `together`; their scores are never stored."""
    batch, heads, total = factors.own.shape[:3]
    t, units, rank = factors.right.shape[2:]
    project, project_stride, d = projecting(factors)
    own, apart, there = factors.own, factors.own.stride()[:3], factors.right_there
    grouped, columns = matched_together(units, rank)
    columns = min(columns, NARROWEST // 8)
    first, lines, room = together.first, together.table.shape[2], indices.shape[3]
    read = together.table, own, project, *right, may if there is None else there.contiguous()
    read += factors.log_temperature, may, may if together.seed is None else together.seed, indices, counts
    numbers = total, t, heads, room, float(factors.coldest), rank**0.5, *apart, project_stride
    options = columns, grouped, d, rank, units, block_size, is_causal, together.seed is not None, there is not None
    options += factors.rounds, room, numbers
    last, least = first + lines, NARROWEST
    while last > first:
        # Causal rows see earlier blocks only, so that the first half of the rows rank half as many blocks.
        wide = max(padded_width(last - 1 if is_causal else t), least)
        begin = max(wide // 2 + 1, first) if is_causal and wide > least else first
        tiles = -(-(min(last * block_size, total) - begin * block_size) // CHOSEN)
        launch = prepared(_choice_launch, own.device, wide, CHOSEN, *options, begin > first, last < first + lines)
        launch((batch * heads, tiles, 1), read, first, begin, lines)
        last = begin


def _rank_launch(
    device: torch.device, at_once: int, wide: int, size: int, is_causal: bool, ready: bool, noise: bool, covers: bool,
    room: int, *numbers: int | float,
) -> Launch:  # fmt: skip
    warps = min(max(wide // (MOST_RANKED // 2 if covers else MOST_RANKED), 1), MOST_WARPS)
    # A thread reads four scores at a time if all rows are aligned to 16 bytes.
    side = 4 if numbers[0] % 16 == 0 else 1
    constants = {"BM": at_once, "T": wide, "W": min(32 * warps * side // at_once, wide), "V": side}
    constants |= {"K": padded_width(room)}
    constants |= {"SIZE": size, "CAUSAL": is_causal, "READY": ready, "NOISE": noise, "COVERAGE": covers}
    constants |= {"num_warps": warps}
    if ready:
        constants["maxnreg"] = READY_REGISTERS[2 if at_once * wide > 1024 * warps else int(at_once > 1)]
    return Launch(rank_kernel, device, *numbers, **constants)


def listed_blocks(
    factors: Factors, visible: Tensor, settings: SelectionSettings, seed: Tensor | None, present: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Best blocks of every row, int32 (b, h, r, room), ascending and then t, and their counts, int32 (b, h, r).

    `present` is bool (b, scored rows): those with a visible token, where blocks select; None if all have one.
    """
    budget, per_token, is_causal = settings.budget, settings.per_token, settings.is_causal
    # Scored rows of a block.
    size = settings.block_size // settings.row_unit
    (batch, heads, total), device = factors.own.shape[:3], visible.device
    t, _, rank = factors.right.shape[2:]
    # Rows of a block that are ranked.
    ranked, total = (size, total) if per_token else (1, t)
    room, coverage = budget.room(t), budget.coverage
    indices = torch.empty((batch, heads, total, room), dtype=torch.int32, device=device)
    counts = torch.empty((batch, heads, total), dtype=torch.int32, device=device)
    held_bytes = max(SCORE_BYTES, min(indices.nbytes // OF_LISTS, MOST_SCORE_BYTES))
    held_scores = held_bytes // (4 * batch * heads)
    bounds = settings.local_blocks, settings.sink_blocks, budget.least, t if budget.most is None else budget.most
    bounds = *bounds, budget.fraction
    in_registers = per_token and coverage is None and 0 < rank <= 64 and size >= CHOSEN and t <= CHOSEN_AMONG
    if rank and factors.halves is None:
        factors = factors._replace(halves=split(factors.right))
    right = factors.halves
    # For tokens, the match kernel adds the noise and omits blocks that are not listed. Coverage needs the scores of all
    # blocks, without noise.
    ready = per_token and rank > 0 and coverage is None
    may = torch.empty(visible.shape, dtype=torch.int32, device=device) if ready else visible
    to_list = ToList(visible, may, (room, *bounds)) if ready else None
    # The rows of a block share all of their scores except the match.
    shared = hidden_scoring(factors, 1, is_causal, to_list) if size >= FEWEST and rank else None
    scored = None if shared is not None and in_registers else scoring(factors, size, is_causal)
    read = may, counts if seed is None else seed, indices, counts
    noise = seed is not None and not ready
    first = made = 0
    together: tuple[ByBlock, ...] = ()
    while first < t:
        if shared is not None and right is not None and first == made:
            # As many blocks as fit the memory of the scores that are held at a time.
            made = min(first + max(held_scores // t, 1), t)
            together = (ByBlock(first, shared(range(first, made)), seed if ready else None),)
        if scored is None and right is not None:
            choose(factors, together[0], right, may, indices, counts, size, is_causal)
            first = made
            continue
        # Causal rows see earlier blocks only, so that more of the first rows fit at a time. Widths are multiples of 16,
        # because scores are read four at a time.
        fit = (isqrt(first**2 + 4 * held_scores // size) - first) // 2 if is_causal else held_scores // (size * t)
        last = min(first + max(fit, 1), made if together else t)
        width = min(-(-last // 16) * 16, t) if is_causal else t
        begin, end = first * ranked, min(last * ranked, total)
        wide = max(padded_width(width), 32)
        at_once = min(max(RANKED // (wide if coverage is None else 2 * wide), 1), 16, ranked)
        assert scored is not None
        scores = scored(range(first * size, end if per_token else last * size), width, *together)
        if not per_token:
            scores = of_selecting(scores, first, size, visible, present, is_causal, coverage is not None)
        options = device, at_once, wide, ranked, is_causal, ready, noise, coverage is not None, room
        sizes = width, total, t, room, *bounds, 0.0 if coverage is None else coverage
        launch = prepared(_rank_launch, *options, *sizes)
        launch((-(-(end - begin) // at_once), batch * heads, 1), (scores, *read), begin, end - begin)
        # Freed before the next scores are allocated.
        del scores
        first = last
    return indices, counts
