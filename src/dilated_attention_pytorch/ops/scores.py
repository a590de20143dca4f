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
        ids, at = torch.cat([chosen, dense]), lists.index_select(2, chosen).long()
        # Lessons are on few rows, and what is learned from is not rounded.
        scores = scoring(factors._replace(rounds=False), block_size, per_token, is_causal=False)(ids)
        ctx.save_for_backward(*given[-12:-8], scores, ids)
        listed, every = scores.split([len(chosen), len(dense)], 2)
        return listed.gather(-1, at.clamp(max=scores.shape[3] - 1)), every.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from ..kernels.triton_mass import spread_out
        from ..kernels.triton_selection import hidden_gradient

        mixture, _, _, _, scores, ids = ctx.saved_tensors
        factors, seen, first, _, _, lists, block_size, per_token = ctx.told
        spread, sums = spread_out(grads, lists, ids, scores, factors)
        by_temperature, by_bias = sums.unbind()
        own = ids // block_size if per_token else ids
        rows = factors.rows.index_select(2, own)
        both = hidden_gradient(rows, factors.columns, spread, factors.weight)
        by_row, (by_first_bias, by_last) = both[0], both.sum(2).unbind()
        by_block = hidden_gradient(factors.columns, rows, spread.mT, factors.weight)[0]
        means, summary = seen.means.index_select(2, own).flatten(0, 1), seen.summary.flatten(0, 1)
        mixed = torch.bmm(summary, _for_all(mixture.to(scores.dtype), spread))
        by_first = torch.cat([torch.bmm(by_row.mT, means), torch.bmm(by_block.mT, mixed)], -1)
        by_mixed = torch.bmm(by_block, _for_all(first[..., mixed.shape[2] :], spread))
        found = [by_first, by_first_bias, by_last[:, None], by_bias[:, None]]
        found += [torch.bmm(summary.mT, by_mixed), *_match_gradients(factors, seen, ids, spread, per_token)]
        found = [_of_each(by_stream, len(first)) for by_stream in found]
        layers = [one for total in found[:4] for one in total.unbind()]
        return *layers, *found[4:], _of_each(by_temperature, scores.shape[1]), *(None,) * 8


def _for_all(parameter: Tensor, streams: Tensor) -> Tensor:
    """A parameter (h or 1, ...) for each of b h."""
    alike = len(streams) // len(parameter)
    return parameter if alike == 1 else parameter.repeat(alike, 1, 1)


def _of_each(by_stream: Tensor, many: int) -> Tensor:
    """What b h give, summed over samples, and over heads that share a parameter."""
    return by_stream if len(by_stream) == many else by_stream.unflatten(0, (-1, many)).sum(0)


def _match_gradients(
    factors: Factors, seen: Seen, ids: Tensor, spread: Tensor, per_token: bool
) -> tuple[Tensor, Tensor]:
    """Gradients (b h, d, p) of both projections of the match."""
    from ..kernels.triton_mass import match_gradient_

    def by_stream(x: Tensor) -> Tensor:
        return x.reshape(len(spread), -1, x.shape[-1])

    mine = by_stream(factors.own.index_select(2, ids)).to(spread.dtype)
    mine = mine.nan_to_num(0.0, 0.0, 0.0) if per_token else mine
    right, units = by_stream(factors.right), by_stream(seen.units)
    left = torch.bmm(mine, _for_all(factors.project.to(spread.dtype), spread))
    share = match_gradient_(torch.bmm(left, right.mT), spread, ids, factors)
    return torch.bmm(mine.mT, torch.bmm(share, right)), torch.bmm(units.mT, torch.bmm(share.mT, left))
