"""Scores of blocks from factors, tile by tile.

Names as in `triton_primitives`. A program takes BM rows: query blocks, or tokens, SIZE to a block. BN are the blocks of
a step, M the hidden units, RANK the width of the match and RP the power of two that holds it, D the width of what it
projects, UQ and UK the sub-blocks of a row and of a key block, of which a product takes UG.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quick_launch import KEPT, Launch, launch
from .selection import Factors
from .triton_launch import OPTIONS, _precision, held
from .triton_primitives import NO_KEY, dropout_rows, projected
from .triton_ranking import may_list, noisy, sight

HIDDEN = {128: (8, 8, 3), 64: (4, 4, 1), 32: (2, 16, 1)}
"""By the rows, and blocks, of a program that matches nothing: its warps, the hidden units it takes at once, and how
many such steps are on their way, through shared memory where they are more than one. A thread has 4 rows and 16, 8 or 4
blocks."""
HIDDEN_REGISTERS = 128
"""Told, the assembler asks for the factors of several units at once, in place of one after the other with fewer."""
MATCHED, UNITS_TOGETHER = 64, 128
"""Sub-blocks of rows and sub-blocks of blocks of a product, or of rank 64 half as many: registers hold two programs or
more."""
MATCHED_TOGETHER, TOKEN_UNITS, TOKEN_BLOCKS = 64, 64, 16
"""The same of tokens, whose steps have several products where blocks have more sub-blocks: registers hold five
programs, of which one counts on while others wait for one another, for products, or for memory. And the blocks of a
step."""
UNROLLED = tl.constexpr(8192)
"""Numbers of the right side that a step may take for its products to be written out, and thus asked for steps ahead:
three of those steps have 48 KiB of shared memory."""
PROGRAMS, TOKEN_PROGRAMS = 512, 2048
"""So many keep a large GPU busy, those that begin late and end soon among them. Of tokens, where a launch has more than
fit at once: so many that the last of them leave little of it idle."""
STAGES = 3
"""Steps of matching on their way."""
UNBOUND = 0, 0, 0, 0, 0, 0.0
"""`ToList.bounds` where nothing is listed."""
SIGHTED = tl.constexpr(64)
"""Blocks at a time of which rows are asked whether they see them."""


@triton.jit
def scale_of(b_most):
    """The power of two that brings numbers up to `b_most` below 2^15, and what undoes it."""
    b_bits = tl.maximum(b_most.to(tl.uint32, bitcast=True) & 0x7F800000, 0x0D800000)
    return (0x86000000 - b_bits).to(tl.float32, bitcast=True), (b_bits - 0x07000000).to(tl.float32, bitcast=True)


@triton.jit
def halves(b_x):
    """Two of float16 that add up to numbers below 2^15, but for what float32 would not show beside the largest."""
    b_first = b_x.to(tl.float16)
    return b_first, (b_x - b_first.to(tl.float32)).to(tl.float16)


@triton.jit
def halved(b_x, BM: tl.constexpr, UQ: tl.constexpr):
    """The BM * UQ sub-blocks of rows in halves, each row by a scale of its own, and what undoes that, [BM]."""
    b_scale, b_undone = scale_of(tl.max(tl.reshape(tl.max(tl.abs(b_x), 1), [BM, UQ]), 1))
    b_scale = tl.reshape(tl.broadcast_to(b_scale[:, None], [BM, UQ]), [BM * UQ])
    b_first, b_second = halves(b_x * b_scale[:, None])
    return b_first, b_second, b_undone


@triton.jit
def split_kernel(p_x, p_first, p_second, p_scale, MANY: tl.constexpr, BM: tl.constexpr):
    """The numbers of a block in halves, and what undoes their scale."""
    block = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, BM)
    b_x = tl.load(p_x + block * MANY + o_i, mask=o_i < MANY, other=0.0)
    scale, undone = scale_of(tl.max(tl.abs(b_x), 0))
    b_first, b_second = halves(b_x * scale)
    tl.store(p_first + block * MANY + o_i, b_first, mask=o_i < MANY)
    tl.store(p_second + block * MANY + o_i, b_second, mask=o_i < MANY)
    tl.store(p_scale + block, undone)


@triton.jit
def larger(x, y):
    """The larger one, or what is not a number."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def matched_units(
    b_left, b_rest, b_left_there, p_right, p_rest, p_right_there, begun, unit, blocks, o_r,
    BM: tl.constexpr, BN: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, UQ: tl.constexpr, UK: tl.constexpr,
    UG: tl.constexpr, HOLES: tl.constexpr, ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`match_scores` with UG sub-blocks of every key block, from `unit` on, or NO_KEY."""
    o_n = tl.arange(0, UG * BN)
    b_there = (begun + o_n % BN < blocks) | WHOLE
    # All blocks of a head: at most 2^14 of 2^7 units of rank 2^7.
    o_unit = (begun + o_n % BN) * UK + unit + o_n // BN
    b_mask = b_there[:, None]
    if RANK < RP:
        b_mask = b_mask & (o_r < RANK)[None, :]
    o_right = o_unit[:, None] * RANK + o_r[None, :]
    b_right = tl.load(p_right + o_right, mask=b_mask, other=0.0)  # [UG * BN, RP]
    # [BM * UQ, UG * BN]
    if ROUNDS:
        b_pair = tl.dot(b_left, tl.trans(b_right))
    else:
        # Three products of halves are as exact as one in float32, and of twice the pace of tf32.
        b_pair = tl.dot(b_rest, tl.trans(b_right))
        b_pair = tl.dot(b_left, tl.trans(tl.load(p_rest + o_right, mask=b_mask, other=0.0)), b_pair)
        b_pair = tl.dot(b_left, tl.trans(b_right), b_pair)
    if HOLES:
        b_seen = tl.load(p_right_there + o_unit, mask=b_there, other=0) != 0
        b_pair = tl.where(b_left_there[:, None] & b_seen[None, :], b_pair, NO_KEY)
    return tl.reduce(tl.reshape(b_pair, [BM, UQ * UG, BN]), 1, larger)


@triton.jit
def match_scores(
    b_left, b_rest, b_left_there, p_right, p_rest, p_right_there, begun, blocks, o_r,
    BM: tl.constexpr, BN: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, UQ: tl.constexpr, UK: tl.constexpr,
    UG: tl.constexpr, HOLES: tl.constexpr, ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The best match of a sub-block of each row with one of each key block, [BM, BN], of both sides in halves, or with
    ROUNDS of the first alone, still without 1 / sqrt(rank). A product takes UG sub-blocks of every key block. WHOLE
    are steps of which all blocks are there, without a question."""
    b_best = tl.full([BM, BN], NO_KEY, tl.float32)
    # A loop within the caller's would keep the compiler from asking for what later steps of that need.
    AT_ONCE: tl.constexpr = UK if UK * BN * RP * (1 if ROUNDS else 2) <= UNROLLED else UG
    for unit in range(0, UK, AT_ONCE):
        for more in tl.static_range(0, AT_ONCE, UG):
            b_best = larger(b_best, matched_units(
                b_left, b_rest, b_left_there, p_right, p_rest, p_right_there, begun, unit + more, blocks, o_r,
                BM, BN, RANK, RP, UQ, UK, UG, HOLES, ROUNDS, WHOLE,
            ))  # fmt: skip
    if HOLES:
        # Nothing there on either side: as the torch path has it.
        b_best = tl.where(b_best == NO_KEY, 0.0, b_best)
    return b_best


@triton.jit
def down(b_x, BM: tl.constexpr):
    """Of rows, [BM], what a tile of `hidden_kernel` takes: four that follow one another in a thread."""
    return tl.reshape(tl.permute(tl.reshape(b_x, [BM // 16, 4, 4]), (2, 0, 1)), [1, 1, 4, BM // 16, 4, 1])


@triton.jit
def across(b_x, BN: tl.constexpr):
    """The same of blocks, [BN]."""
    return tl.reshape(tl.permute(tl.reshape(b_x, [BN // 32, 8, 4]), (0, 2, 1)), [BN // 32, 4, 1, 1, 1, 8])


@triton.jit(do_not_specialize=["begin", "rows", "room", "local", "sink", "least", "most"])
def hidden_kernel(
    p_rows, p_columns, p_weight, p_bias, p_keep, p_log, p_ids, p_scores, p_visible, p_may, begin, rows, width, heads,
    coldest, s_weight, s_bias, room, local, sink, least, most, kept, BM: tl.constexpr, BN: tl.constexpr,
    M: tl.constexpr, UM: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, IDS: tl.constexpr,
    EVEN: tl.constexpr, CAUSAL: tl.constexpr, KEEP: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """Scores without any match of BM rows, SIZE to a block, from `begin` on or with IDS any, with BN blocks.

    With CAUSAL maybe not of later ones. UM hidden units are taken at once, and T is how far apart they lie. A tile is
    [BN / 32, 4, 4, BM / 16, 4, 8], whose last two are the lanes of a warp: a thread has rows and blocks by fours, each
    read at once, of rows only with EVEN, where `begin` is a multiple of four, and what it reads serves all it has. BM
    and BN are below the number of threads, or the compiler would read each number once and pass it on in shared memory.
    With LISTS rows are all blocks, and have NO_KEY with what they do not see or need not list: tokens of a block, who
    share these scores, need not ask again. How many those may list is left where `p_may` points to.
    """
    stream = tl.program_id(2).to(tl.int64)
    head = stream % heads
    first_row, first_column = tl.program_id(0) * BM, tl.program_id(1) * BN
    o_i = first_row + tl.arange(0, BM)
    o_j = first_column + tl.arange(0, BN)
    # Rows and blocks past the last are computed like others, and not stored: a mask would take a register each. T is a
    # power of two, and what lies within is there to be read.
    o_row = tl.load(p_ids + tl.minimum(o_i, rows - 1)).to(tl.int32) if IDS else begin + o_i
    o_row = o_row // SIZE % T
    if EVEN:
        o_row = tl.max_contiguous(tl.multiple_of(o_row, 4), 4)
    p_row = p_rows + stream * M * T + o_row
    p_each = p_row
    p_kept = p_keep + stream * M * T + o_row
    # What differs from thread to thread is small and known, so that one address serves all loads.
    p_column = p_columns + (stream * M * T + first_column) + tl.arange(0, BN) % T
    p_weight += head * s_weight
    b_sum = tl.zeros([BN // 32, 4, 4, BM // 16, 4, 8], tl.float32)
    b_own = tl.zeros([BM], tl.float32) + tl.load(p_bias + head * s_bias)
    # None where all of a tile comes later; rows that are not listed follow one another.
    units = tl.where(first_column >= (begin + first_row + BM - 1) // SIZE, 0, M) if CAUSAL else M
    # w . relu(row + column), whose factors lie unit by unit: relu(x + y) is max(-x, y) + x.
    for first in tl.range(0, units, UM, num_stages=STAGES):
        for m in tl.static_range(UM):
            weight = tl.load(p_weight + first + m)
            b_row = down(tl.load(p_row + m * T), BM)
            b_most = larger(-b_row, across(tl.load(p_column + m * T), BN))
            if KEEP:
                b_sum += (b_most + b_row) * (weight * down(tl.load(p_kept + m * T), BM))
            else:
                b_sum += b_most * weight
                b_own += tl.load(p_each + m * T) * weight
        p_row += UM * T
        p_each += UM * T
        p_kept += UM * T
        p_column += UM * T
    b_score = tl.reshape(tl.permute(b_sum, (3, 4, 2, 0, 5, 1)), [BM, BN]) + b_own[:, None]
    b_score *= 1.0 / tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest)
    # Scores of a head are held to some bytes, or a few rows.
    o_i, o_j = o_i[:, None], o_j[None, :]
    if LISTS:
        p_visible += stream * width
        b_seen, b_near = sight(p_visible, begin + o_i, width, local, sink, o_j, CAUSAL)
        # The least number counts as none, and must not be taken for what is not listed.
        b_score = tl.where(b_score == NO_KEY, float("nan"), b_score)
        b_score = tl.where(b_seen & (b_near == 0), b_score, NO_KEY)
    tl.store(p_scores + stream * rows * width + o_i * width + o_j, b_score, mask=(o_i < rows) & (o_j < width))
    # Causal rows of the first tile have nothing to do with later blocks: each such program asks for a tile of rows, and
    # for those of the one that has, the last of the next tile's.
    spare = (tl.program_id(0) == 1) & (tl.program_id(1) == tl.num_programs(1) - 1)
    asks = (tl.program_id(0) == 0) & ((first_column > 0) | (tl.num_programs(0) == 1))
    if LISTS and (asks | spare):
        first_asked = tl.where(spare, 0, first_column)
        o_own = first_asked + tl.arange(0, BM)
        end = tl.minimum(begin + first_asked + BM, width) if CAUSAL else width
        b_may = may_list(p_visible, begin + o_own, end, local, sink, room, least, most, kept, SIGHTED, CAUSAL)
        tl.store(p_may + stream * width + begin + o_own, b_may, mask=o_own < rows)


@triton.jit(do_not_specialize=["begin", "rows", "span", "first", "lines", "total"])
def match_kernel(
    p_table, p_own, p_project, p_left_there, p_right, p_rest, p_scale, p_right_there, p_log, p_ids, p_scores, p_seed,
    begin, rows, span, first, lines, width, total, blocks, heads, coldest, root, so_b, so_h, so_n, s_project,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, UQ: tl.constexpr,
    UK: tl.constexpr, UG: tl.constexpr, SIZE: tl.constexpr, IDS: tl.constexpr, TOGETHER: tl.constexpr,
    NOISE: tl.constexpr, CAUSAL: tl.constexpr, HOLES: tl.constexpr, ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the scores of BM rows with `span` of the first `width` blocks what their sub-blocks match.

    Rows as `hidden_kernel` has them. TOGETHER are those of one block a program, whose scores so far are a line of
    `p_table`, which has `lines` of `blocks` each, from block `first` on. NOISE is in those: it costs less here than
    where they are ranked, as nothing is made for what comes later.
    """
    # Those that see most begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    o_i = tile * BM + tl.arange(0, BM)  # [BM]
    stream = tl.program_id(2).to(tl.int64)
    head = stream % heads
    b_exist = o_i < rows
    own = (begin + tile * BM) // SIZE
    o_unit = tile * (BM * UQ) + tl.arange(0, BM * UQ)
    b_real = o_unit < rows * UQ
    o_left = tl.load(p_ids + o_unit // UQ, mask=b_real, other=0).to(tl.int32) if IDS else begin + o_unit // UQ
    o_left = o_left * UQ + o_unit % UQ
    o_r = tl.arange(0, RP)
    p_own += (stream // heads) * so_b + head * so_h
    p_project += head * s_project
    b_left = projected(p_own, p_project, o_left.to(tl.int64), b_real, o_r, so_n, D, RANK, RP, PRECISION)
    b_left, b_rest, b_undone = halved(b_left, BM, UQ)
    b_undone *= 1.0 / tl.maximum(tl.exp(tl.load(p_log + head).to(tl.float32)), coldest) / root
    b_left_there = b_real
    if HOLES and SIZE == 1:
        b_left_there = tl.load(p_left_there + stream * total * UQ + o_left, mask=b_real, other=0) != 0
    p_right += stream * blocks * UK * RANK
    p_rest += stream * blocks * UK * RANK
    p_right_there += stream * blocks * UK
    p_scale += stream * blocks
    p_scores += stream * rows * width
    p_table += (stream * lines + own - first) * blocks
    b_name = begin + o_i
    if NOISE:
        b_name = dropout_rows(p_seed, stream, b_name)
    # Spans are whole steps: without that known, scores would be stored one by one.
    start = tl.multiple_of(tl.program_id(1) * span, BN)
    end = tl.minimum(start + span, width)
    if CAUSAL:
        end = tl.minimum(end, own if TOGETHER else begin + tile * BM + BM)
    # Told the stages, the compiler asks steps ahead for what lies beside the products too, which comes from far away.
    for begun in tl.range(start, end, BN, num_stages=STAGES):
        o_column = begun + tl.arange(0, BN)
        b_there = (o_column < width) | WHOLE
        # Scores of a head are held to some bytes, or a few rows.
        p_tile = p_scores + o_i[:, None] * width + o_column[None, :]
        b_mask = b_exist[:, None] & b_there[None, :]
        if TOGETHER:
            b_score = tl.load(p_table + o_column, mask=b_there, other=0.0)[None, :]
        else:
            b_score = tl.load(p_tile, mask=b_mask, other=0.0)
        b_scale = tl.load(p_scale + o_column, mask=b_there, other=0.0)[None, :]
        b_match = match_scores(
            b_left, b_rest, b_left_there, p_right, p_rest, p_right_there, begun, blocks, o_r,
            BM, BN, RANK, RP, UQ, UK, UG, HOLES, ROUNDS, WHOLE,
        )  # fmt: skip
        b_match = b_score + b_undone[:, None] * b_match * b_scale
        if NOISE:
            b_match = noisy(b_match, b_name[:, None], o_column[None, :])
        tl.store(p_tile, b_match, mask=b_mask)


Halves = tuple[Tensor, Tensor, Tensor]
"""What `split` gives."""


class ToList(NamedTuple):
    """For scores that leave out what is not listed, as `hidden_kernel` has them."""

    visible: Tensor
    """bool (b, h, t)"""
    may: Tensor
    """int32 (b, h, t): where to say how many blocks rows of a block may list, and among how many (`may_list`)"""
    bounds: tuple[int | float, ...]
    """the most that a row may list, blocks that need no listing (local, sink), the fewest and the most, and the part of
    what it sees"""


class ByToken(NamedTuple):
    """For tokens that follow one another: scores (b, h, blocks, t) of blocks from the first on, without any match."""

    first: int
    table: Tensor
    seed: Tensor | None = None
    """of the noise, where there is some"""


def split(right: Tensor) -> Halves:
    """Halves of (b, h, t, u, p), float16, and what undoes the scale of each block, (b, h, t)."""
    right, many = right.contiguous(), right.shape[3] * right.shape[4]
    first, second = torch.empty((2, *right.shape), dtype=torch.float16, device=right.device).unbind()
    scale = torch.empty(right.shape[:3], dtype=torch.float32, device=right.device)
    launch(split_kernel, (scale.numel(),), right, first, second, scale, MANY=many, BM=held(many), **OPTIONS)
    return first, second, scale


def matched_together(units: int, rank: int, most: int = 0, fewest: int = 16) -> tuple[int, int]:
    """How many sub-blocks of a key block a product of at most so many takes, and of how many blocks, or more."""
    together = min(UNITS_TOGETHER * 32 // held(rank), most or UNITS_TOGETHER)
    grouped = min(units & -units, together // fewest)
    return grouped, together // grouped


def by_unit(x: Tensor) -> Tensor:
    """(b, h, t, m) so that what belongs to one hidden unit lies together, a power of two from that of the next."""
    heads, t, hidden = x.shape[1:]
    apart = held(t)
    if x.stride() == (heads * hidden * apart, hidden * apart, 1, apart):
        return x
    return torch.nn.functional.pad(x.mT, (0, apart - t)).contiguous()


@lru_cache(maxsize=KEPT)
def _hidden_side(most: int, streams: int, rows: int, width: int, seen: int) -> int:
    """Rows and blocks of a program: the most that leave programs enough, unless half as many fill tiles much better.

    Of `width` blocks rows see about `seen`.
    """
    for side in (x for x in HIDDEN if 32 < x <= most):
        filled, closer = (-(-rows // x) * -(-width // x) * x**2 for x in (side, side // 2))
        if streams * -(-rows // side) * -(-seen // side) >= PROGRAMS and 8 * filled <= 9 * closer:
            return side
    return 32


@lru_cache(maxsize=KEPT)
def _hidden_launch(
    device: torch.device, t: int, hidden: int, size: int, is_causal: bool, keeps: bool, lists: bool, ids: bool,
    even: bool, side: int, *numbers: int | float,
) -> Launch:  # fmt: skip
    warps, units, stages = HIDDEN[side]
    constants = {"BM": side, "BN": side, "M": hidden, "UM": max(min(hidden & -hidden, units), 1), "T": held(t)}
    constants |= {"STAGES": stages, "SIZE": size, "IDS": ids, "EVEN": even, "CAUSAL": is_causal, "KEEP": keeps}
    constants |= {"LISTS": lists, "num_warps": warps}
    return Launch(hidden_kernel, device, *numbers, **constants, maxnreg=HIDDEN_REGISTERS, **OPTIONS)


def hidden_scoring(
    factors: Factors, size: int, is_causal: bool, to_list: ToList | None = None
) -> Callable[..., Tensor]:
    """`scoring` without any match, of rows that are `size` to a block.

    With `to_list`, for rows that are all blocks of a range: NO_KEY with what is not listed.
    """
    (batch, heads, t, hidden), device = factors.rows.shape, factors.rows.device
    parts = [by_unit(x) for x in (factors.rows, factors.columns, factors.keep) if x is not None]
    read = parts[0], parts[1], factors.weight, factors.bias, parts[-1], factors.log_temperature
    numbers = heads, float(factors.coldest), factors.weight.stride(0), factors.bias.stride(0)
    numbers += UNBOUND if to_list is None else to_list.bounds
    listing = (parts[0], parts[0]) if to_list is None else to_list[:2]
    told = device, t, hidden, size, is_causal, factors.keep is not None, to_list is not None

    def run(rows: range | Tensor, width: int = t) -> Tensor:
        many = len(rows)
        ids, begin = (parts[0], rows.start) if isinstance(rows, range) else (rows, 0)
        scores = torch.empty((batch, heads, many, width), dtype=torch.float32, device=device)
        even = ids is not rows and size == 1 and begin % 4 == 0
        # Causal rows are most often the last of as many blocks; the largest tiles have no registers for more addresses.
        seen = width - many // (2 * size) if is_causal else width
        side = _hidden_side(128 if even and factors.keep is None else 64, batch * heads, many, width, seen)
        launch = _hidden_launch(*told, ids is rows, even, side, width, *numbers)
        launch((-(-many // side), -(-width // side), batch * heads), (*read, ids, scores, *listing), begin, many)
        return scores

    return run


def own_rows(own: Tensor) -> tuple[Tensor, int, int, int]:
    """`Factors.own` as kernels read it, and how far apart samples, heads and sub-blocks, or tokens, lie in it."""
    *apart, a_row, a_unit, _ = own.stride()
    units = own.shape[3]
    if units > 1 and a_row != units * a_unit:
        return own_rows(own.contiguous())
    return own, *apart, a_unit if units > 1 else a_row


@lru_cache(maxsize=KEPT)
def _match_launch(
    device: torch.device, at_once: int, grouped: int, columns: int, d: int, rank: int, own_units: int, units: int,
    size: int, is_causal: bool, holes: bool, rounds: bool, ids: bool, together: bool, noise: bool,
    *numbers: int | float,
) -> Launch:  # fmt: skip
    constants = {"BM": at_once, "BN": columns, "D": d, "RANK": rank, "RP": held(rank), "UQ": own_units, "UK": units}
    constants |= {"UG": grouped, "SIZE": size, "CAUSAL": is_causal, "HOLES": holes, "IDS": ids, "TOGETHER": together}
    constants |= {"NOISE": noise, "ROUNDS": rounds, "PRECISION": _precision(torch.float32)}
    constants |= {"num_warps": max(at_once * own_units // 16, 4), "STAGES": STAGES, "num_stages": STAGES}
    width, _, t, *_ = numbers
    constants["WHOLE"] = width % columns == t % columns == 0
    return Launch(match_kernel, device, *numbers, **constants, **OPTIONS)


def scoring(factors: Factors, block_size: int, per_token: bool, is_causal: bool) -> Callable[..., Tensor]:
    """What gives scores over temperature of rows, int64 (r), with every block or the first so many, (b, h, r, t).

    With `is_causal` those with a row's own and later blocks may be anything. Tokens of a range must come with what they
    have in common (`ByToken`), and are ready to be ranked where that leaves out what is not listed (`ToList`).
    """
    size = block_size if per_token else 1
    hidden = hidden_scoring(factors, size, is_causal)
    batch, heads, total, own_units, d = factors.own.shape
    t, units, rank = factors.right.shape[2:]
    if not rank:
        return hidden
    at_once = min(MATCHED_TOGETHER, size) if per_token else max(MATCHED // own_units, 1)
    grouped, columns = matched_together(units, rank, *((TOKEN_UNITS, TOKEN_BLOCKS) if per_token else ()))
    own, *apart = own_rows(factors.own)
    device = own.device
    # Where one of these is not given, no program reads it.
    left_there, right_there = (own if x is None else x.contiguous() for x in (factors.left_there, factors.right_there))
    right = split(factors.right) if factors.halves is None else factors.halves
    read = own, factors.project, left_there, *right, right_there, factors.log_temperature
    numbers = total, t, heads, float(factors.coldest), rank**0.5, *apart, factors.project.stride(0)
    told = device, at_once, grouped, columns, d, rank, own_units, units, size, is_causal, right_there is not own
    told += (factors.rounds,)

    def run(rows: range | Tensor, width: int = t, together: ByToken | None = None) -> Tensor:
        many = len(rows)
        ids, begin = (own, rows.start) if isinstance(rows, range) else (rows, 0)
        if together is None:
            scores = hidden(rows, width)
            first, table, seed = 0, scores, None
        else:
            first, table, seed = together
            scores = torch.empty((batch, heads, many, width), dtype=torch.float32, device=device)
        # Rows that are many fill the machine by themselves, and then project their queries but once.
        tiles = -(-many // at_once)
        spans = max((PROGRAMS if together is None else TOKEN_PROGRAMS) // (tiles * batch * heads), 1)
        span = -(-width // (spans * columns)) * columns
        launch = _match_launch(*told, ids is rows, together is not None, seed is not None, width, *numbers)
        grid = tiles, -(-width // span), batch * heads
        also = ids, scores, own if seed is None else seed
        launch(grid, (table, *read, *also), begin, many, span, first, table.shape[2])
        return scores

    return run
