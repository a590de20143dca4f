"""Scores of some rows with gradients in a handful of launches, where kernels compute what they are made of.

Shapes: b batch, h heads, t blocks, u sub-blocks of a block, r rows, k listed blocks, d width, p rank of the match.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.selection import WIDEST_MATCH, Factors, no_kernels
from ..plan.selected import may_read

MOST_BLOCKS = 1024
"""Blocks up to which all matches of the rows with every block are held at once."""


class Seen(NamedTuple):
    """What the factors of scores were made from."""

    means: Tensor
    """(b, h, t, d): of query blocks"""
    summary: Tensor
    """(b, h, t, 3 d): of key blocks"""
    units: Tensor
    """(b, h, t, u, d): of key blocks"""


def by_kernels(query: Tensor, rank: int, seen: Seen) -> bool:
    """Whether `RowScores` can be asked for."""
    able = not may_read(query.device) and no_kernels(query.device) is None and query.dtype is not torch.float64
    return able and 0 < rank <= WIDEST_MATCH and seen.means.shape[2] <= MOST_BLOCKS


def times(left: Tensor, right: Tensor, plus: Tensor | None = None) -> Tensor:
    """Products of (b, h, i, j) or (h, i, j) with (b, h, j, k) or (h, j, k), one operation where b is 1.

    One of both has a b; h may be 1 for all heads. `plus` (h, i, 1) is added.
    """
    if any(x.dim() == 4 and x.shape[0] > 1 for x in (left, right)):
        return left @ right if plus is None else left @ right + plus
    one, other = (x[0] if x.dim() == 4 else x for x in (left, right))
    heads = max(one.shape[0], other.shape[0])
    one, other = (x if x.shape[0] == heads else x.expand(heads, -1, -1) for x in (one, other))
    return (torch.bmm(one, other) if plus is None else torch.baddbmm(plus, one, other))[None]


class RowScores(torch.autograd.Function):
    """Scores over temperature (b, h, r, k) of the blocks listed for some rows, and (b, h, r, t) of all for others.

    Given are the weights of every head's first layer, their biases, those of the second, the mixture of summaries, both
    projections of the match and the logarithm of temperatures, to which alone gradients go; then the factors, what they
    were made from, the first layer's weights as one, the rows, the others, the lists int32 (b, h, all rows, k), tokens
    of a block, and whether rows are tokens.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        from ..kernels.triton_selection import scoring

        factors, _, _, chosen, dense, lists, block_size, per_token = ctx.told = given[-8:]
        ids, at = torch.cat([chosen, dense]), lists[:, :, chosen].long()
        scores = scoring(factors, block_size, per_token, is_causal=False)(ids)
        ctx.save_for_backward(*given[-12:-8], scores, ids, at)
        listed, every = scores.split([len(chosen), len(dense)], 2)
        return listed.gather(-1, at.clamp(max=scores.shape[3] - 1)), every.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from ..kernels.triton_selection import hidden_gradient

        mixture, _, _, _, scores, ids, at = ctx.saved_tensors
        factors, seen, first, chosen, _, _, block_size, per_token = ctx.told
        # What is not listed gathers in one column more.
        spread = scores.new_zeros((*scores.shape[:3], scores.shape[3] + 1))
        spread[:, :, : len(chosen)].scatter_(-1, at, grads[0])
        spread[:, :, len(chosen) :, :-1] = grads[1]
        spread = spread[..., :-1]
        free = factors.log_temperature.to(scores.dtype).exp()
        inverse = free.clamp(min=factors.coldest).reciprocal()
        by_temperature = -(spread * scores).sum((0, 2, 3)) * free * inverse
        spread = spread * inverse[:, None, None]
        own = ids // block_size if per_token else ids
        rows = factors.rows[:, :, own]
        by_row, by_last = hidden_gradient(rows, factors.columns, spread, factors.weight)
        by_block, _ = hidden_gradient(factors.columns, rows, spread.mT, factors.weight)
        mixed = times(seen.summary, mixture.to(scores.dtype))
        by_first = torch.cat([times(by_row.mT, seen.means[:, :, own]), times(by_block.mT, mixed)], -1)
        by_mixed = times(by_block, first[..., mixed.shape[3] :])
        found = [by_first, by_row.sum(2), by_last.sum(2)[:, :, None], spread.sum((2, 3))[..., None]]
        found += [times(seen.summary.mT, by_mixed), *_match_gradients(factors, seen, ids, spread, per_token)]
        for number, each in enumerate(found):
            # Over samples, and over heads that share a parameter.
            total = each[0] if each.shape[0] == 1 else each.sum(0)
            found[number] = total if total.shape[0] == first.shape[0] else total.sum(0, keepdim=True)
        layers = [one for total in found[:4] for one in total.unbind()]
        return *layers, *found[4:], by_temperature, *(None,) * 8


def _match_gradients(
    factors: Factors, seen: Seen, ids: Tensor, spread: Tensor, per_token: bool
) -> tuple[Tensor, Tensor]:
    """Gradients (b, h, d, p) of both projections of the match."""
    mine = factors.own[:, :, ids].flatten(2, 3).to(spread.dtype)
    mine = mine.nan_to_num(0.0, 0.0, 0.0) if per_token else mine
    left, right = times(mine, factors.project.to(spread.dtype)), factors.right.flatten(2, 3)
    pairs = times(left, right.mT).view(*spread.shape[:3], factors.own.shape[3], spread.shape[3], -1)
    if factors.right_there is not None:
        pairs = pairs.masked_fill(~factors.right_there[:, :, None, None], -torch.inf)
    if factors.left_there is not None:
        pairs = pairs.masked_fill(~factors.left_there[:, :, ids][..., None, None], -torch.inf)
    # The best of them, or all that are equally good alike; where nothing is there, nothing is good.
    best = pairs.amax((3, 5), keepdim=True)
    ties = pairs == (best if factors.right_there is None else torch.where(best > -torch.inf, best, torch.nan))
    share = (spread * right.shape[3] ** -0.5)[:, :, :, None, :, None] / ties.sum((3, 5), keepdim=True)
    share = torch.where(ties, share, 0.0).view(*spread.shape[:2], left.shape[2], right.shape[2])
    return times(mine.mT, times(share, right)), times(seen.units.flatten(2, 3).mT, times(share.mT, left))
