"""Choices and lessons for some rows of a sequence, for those who hold no more of it: ranks, and a decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.selected import shared_blocks
from .selection import Budget, counted_blocks, rank_blocks, spans
from .selection_mass import compare_scores


def select_rows(
    scores: Callable[[int, int], Tensor],
    chunk: int,
    rows: Tensor,
    visible: Tensor,
    budget: Budget,
    *,
    block_size: int,
    is_causal: bool,
    per_token: bool,
    local_blocks: int,
    sink_blocks: int,
    seed: Tensor | None = None,
) -> Tensor:
    """What `select` lists for some rows, int32 (b, h, r, k), ascending, the number of blocks where nothing is listed.

    Args:
        scores: as for `select`, of rows counted among those here.
        chunk: rows to ask for at a time.
        rows: int64 (r): which rows of the sequence they are.
        visible: see `select`, as everything else.
    """
    t = visible.shape[-1]
    counted = counted_blocks(visible, local_blocks, sink_blocks, is_causal)
    found = [torch.empty(*visible.shape[:2], 0, 0, dtype=torch.int32, device=visible.device)]
    for begin, end in spans(len(rows), chunk):
        row = rows[begin:end]
        own = row // block_size if per_token else row
        shared = shared_blocks(own, t, local_blocks, sink_blocks, is_causal)
        listed, many = rank_blocks(scores(begin, end), row, own, shared, visible, counted, budget, is_causal, seed)
        found.append(listed[..., : int(many.max())])
    return torch.cat([padded(x, max(y.shape[-1] for y in found), t) for x in found], 2)


def padded(listed: Tensor, width: int, nothing: int) -> Tensor:
    """Lists with room for so many blocks."""
    return torch.nn.functional.pad(listed, (0, width - listed.shape[-1]), value=nothing)


class Learned(NamedTuple):
    """What comparing some rows gave."""

    grad: Tensor
    """(b, h, r, l): the gradient of the scores"""
    loss: Tensor
    """scalar: their part in the loss"""
    entropy: Tensor
    """scalar: their part in the mean entropy of what is predicted"""


def compare_rows(
    scores: Tensor, mass: Tensor, own_mass: Tensor, compared: Tensor, weight: float, of_rows: int
) -> Learned:
    """Compare the scores of some rows, of `of_rows` in all, with the mass that their blocks hold.

    Args:
        scores: (b, h, r, l), r may be 0.
        mass: (b, h, r, l), attention of each row on each block.
        own_mass: (b, h, r, 1), on its own.
        compared: bool (b, h, r, l), which blocks take part.
        weight: of the whole loss.
        of_rows: rows of all those who compare.
    """
    part = scores.shape[2] / max(of_rows, 1)
    if not scores.shape[2]:
        nothing = mass.new_zeros(())
        return Learned(torch.zeros_like(scores), nothing, nothing)
    grads: list[Tensor | None] = []
    found: dict[str, Tensor] = {}
    loss = compare_scores(scores, mass, own_mass, compared, weight * part, grads, found)
    assert grads[0] is not None
    return Learned(grads[0], loss, found["entropy"] * part)
