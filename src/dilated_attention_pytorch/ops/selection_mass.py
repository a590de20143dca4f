"""How much attention each block holds, and what a scorer learns from it.

A scorer's distribution over a row's blocks is pulled to the blocks' shares of attention: with the loss
KL(p || softmax(z)) of a row, the gradient is softmax(z) - p, which needs no graph. A row's own block is kept whatever
it scores; it takes part with the logit 0, so that scores say how much a block holds relative to it.

Shapes: b batch, h heads, r sampled rows (query blocks of q = B tokens, or tokens, q = 1), l blocks, n tokens, t blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import triton_backend
from ..plan.selected import Selection, may_read
from .selection import spans

STEP, GPU_STEP = 2**22, 2**26
"""Scores, and numbers of gathered keys, held at a time."""
MOST_BLOCKS = 2**16 - 1
"""Blocks that a launch can count."""


@dataclass(slots=True)
class Lesson:
    """Which rows teach the scorer in one step, and what was found."""

    rows: Tensor
    """int64 (r): those whose listed blocks are compared with one another, then those of which every visible block is"""
    chosen: int
    """How many are the first"""
    visible: Tensor
    """bool (b, h, t)"""
    weight: float
    saliency: bool
    """Weigh each query by the norm of its output's gradient: what the task cares about counts."""
    together: bool = False
    """Whether the scores given are of all blocks for all rows, (b, h, r, t), in the place of those of listed blocks"""
    found: dict[str, Tensor] = field(default_factory=dict)
    """After the backward pass, unless `by_row` has it: what `results` tells"""
    by_row: Tensor | None = None
    """float32 (4, b h, r): what kernels tell of each row"""

    @property
    def chosen_rows(self) -> Tensor:
        """Rows whose listed blocks are compared with one another."""
        return self.rows[: self.chosen]

    @property
    def dense_rows(self) -> Tensor:
        """Rows for which every visible block is computed."""
        return self.rows[self.chosen :]

    def results(self) -> dict[str, Tensor]:
        """After the backward pass: "loss", and where there are dense rows "coverage" and "entropy", scalars."""
        if self.by_row is None:
            return self.found
        # Summed up where somebody asks: a step of training need not.
        loss, entropy, kept, queries = self.by_row.flatten(1).sum(1).unbind()
        dense = (len(self.rows) - self.chosen) * self.by_row.shape[1]
        told = {"entropy": entropy / dense, "coverage": kept / queries.clamp(min=1)} if dense else {}
        return told | {"loss": loss}


@lru_cache(maxsize=64)
def _spacing(total: int, many: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Multiples of `total`, from 0 on, as many as each says, and of each what they are divided by."""
    # Tensors of inference mode could not serve training later.
    with torch.inference_mode(False):
        multiples = torch.cat([torch.arange(one, device=device) * total for one in many])
        return multiples, torch.cat([torch.full((one,), one, device=device) for one in many])


def sampled(total: int, many: int, start: Tensor, others: int = 0) -> Tensor:
    """Rows drawn without repetition, ascending, int64; all where there are no more. `start` is drawn from [0, total).

    Evenly spaced, and each with the same probability: no permutation of a million rows for a dozen of them. Behind them
    come `others`, drawn alike.
    """
    multiples, parts = _spacing(total, (min(many, total), min(others, total)), start.device)
    return (multiples + start).floor_divide_(parts)


class Scene(NamedTuple):
    """What the rows attend to."""

    query: Tensor
    key: Tensor
    selection: Selection
    scale: float
    key_padding_mask: Tensor | None
    listed_lse: Tensor | None = None
    """(b, h, r, k): the LSE of each listed block of the lesson's chosen rows by itself, where it is known"""

    def tokens(self, rows: Tensor) -> Tensor:
        """Query tokens of rows, int64 (r, q); past the end where a block is ragged."""
        if self.selection.per_token:
            return rows[:, None]
        size = self.selection.block_size
        return rows[:, None] * size + torch.arange(size, device=rows.device)


def query_weights(lesson: Lesson, lse: Tensor, grad_output: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """How much each query counts, (b, h, n) in the dtype of the LSE: nothing where it is padding."""
    weights = grad_output.to(lse.dtype).norm(dim=-1) if lesson.saliency else torch.ones_like(lse)
    return weights if key_padding_mask is None else weights.masked_fill(key_padding_mask[:, None], 0.0)


def learn(
    scene: Scene,
    lesson: Lesson,
    lse: Tensor,
    grad_output: Tensor,
    chosen_scores: Tensor | None,
    dense_scores: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the scores (b, h, r, k) of listed blocks and (b, h, r, t) of all blocks of the dense rows.

    The loss is the mean over rows, samples and heads of each of both, times the lesson's weight, summed.
    """
    if _by_kernel(scene):
        if chosen_scores is None and dense_scores is None:
            return None, None
        from ..kernels.triton_mass import taught

        chosen = 0 if chosen_scores is None else lesson.chosen
        rows = lesson.rows if chosen else lesson.dense_rows
        rows = rows if lesson.together or dense_scores is not None else lesson.chosen_rows
        given = rows, chosen, chosen_scores, dense_scores, lesson.together
        told = scene.scale, scene.key_padding_mask, lesson.weight, lesson.saliency
        seen = lesson.visible, lse.contiguous(), grad_output
        found = taught(scene.query, scene.key, scene.selection, *given, *seen, *told)
        lesson.by_row = found[2]
        return found[:2]
    losses, grads = [], []
    weights = query_weights(lesson, lse, grad_output, scene.key_padding_mask)
    if chosen_scores is None:
        grads.append(None)
    else:
        rows = lesson.chosen_rows
        blocks = scene.selection.indices[:, :, rows].long()
        own = scene.selection.row_blocks()[rows].expand(blocks.shape[:3])
        if scene.listed_lse is None:
            both = listed_mass(scene, rows, torch.cat([own[..., None], blocks], -1), lse, weights)
            own_mass, mass = both.split([1, blocks.shape[-1]], -1)
        else:
            own_mass = listed_mass(scene, rows, own[..., None], lse, weights)
            share = (scene.listed_lse - lse[:, :, rows, None]).exp()
            mass = share * weights[:, :, rows, None]
        listed = blocks < scene.selection.blocks
        losses.append(compare_scores(chosen_scores, mass, own_mass, listed, lesson.weight, grads))
    if dense_scores is None:
        grads.append(None)
    else:
        rows = lesson.dense_rows
        mass, whole = dense_mass(scene, rows, weights)
        own = scene.selection.row_blocks()[rows]
        column = torch.arange(mass.shape[-1], device=mass.device)
        others = column < own[:, None] if scene.selection.is_causal else column != own[:, None]
        others = others & lesson.visible[:, :, None]
        own_mass = mass.gather(-1, own.expand(mass.shape[:3])[..., None])
        losses.append(compare_scores(dense_scores, mass, own_mass, others, lesson.weight, grads, lesson.found))
        lesson.found["coverage"] = captured(lse, whole, scene.tokens(rows))
    if losses:
        lesson.found["loss"] = torch.stack(losses).sum()
    return grads[0], grads[1]


def compare_scores(
    scores: Tensor,
    mass: Tensor,
    own_mass: Tensor,
    compared: Tensor,
    weight: float,
    grads: list[Tensor | None],
    found: dict[str, Tensor] | None = None,
) -> Tensor:
    """The loss of rows (b, h, r, l), and, appended to `grads`, its gradient by the scores."""
    logits = torch.cat([torch.where(compared, scores.to(mass.dtype), -torch.inf), torch.zeros_like(own_mass)], -1)
    predicted = logits.log_softmax(-1)
    target = torch.cat([torch.where(compared, mass, 0.0), own_mass], -1)
    total = target.sum(-1, keepdim=True)
    # A row that weighs nothing, or is not finite, teaches nothing.
    teaches = (total > 0) & (total < torch.inf)
    target = torch.where(teaches, target / total, 0.0)
    share = predicted.exp()
    # What is not compared is predicted never, and weighs nothing.
    log = predicted.clamp(min=-1e30)
    terms = torch.xlogy(target, target) - target * log
    rows = math.prod(scores.shape[:-1])
    grad = torch.where(teaches, share - target, 0.0)[..., :-1]
    grads.append((grad * (weight / rows)).to(scores.dtype))
    if found is not None:
        found["entropy"] = -(share * log).sum(-1).mean()
    return weight * terms.sum() / rows


def _steps(like: Tensor, rows: int, each: int) -> Iterator[tuple[int, int]]:
    return spans(rows, max(1, (GPU_STEP if like.is_cuda else STEP) // each))


def listed_mass(scene: Scene, rows: Tensor, blocks: Tensor, lse: Tensor, weights: Tensor) -> Tensor:
    """Weighted attention of each row on each of its blocks (b, h, r, l), the first being its own; t lists nothing."""
    selection, key = scene.selection, scene.key
    batch, heads, r, l = blocks.shape
    size, n = selection.block_size, selection.n
    reach = torch.arange(size, device=key.device)
    sample = torch.arange(batch, device=key.device).view(-1, 1, 1, 1)
    group = (torch.arange(heads, device=key.device) // (heads // key.shape[1])).view(-1, 1, 1)
    found = []
    width = 1 if selection.per_token else size
    for begin, end in _steps(key, r, batch * heads * l * size * (width + key.shape[-1])):
        token = scene.tokens(rows[begin:end])
        real, token = token < n, token.clamp(max=n - 1)
        column = (blocks[:, :, begin:end, :, None] * size + reach).flatten(3)
        seen, column = column < n, column.clamp(max=n - 1)
        if scene.key_padding_mask is not None:
            seen = seen & ~scene.key_padding_mask[sample, column]
        seen = seen[..., None, :]
        if selection.is_causal:
            seen = seen & (column[..., None, :] <= token[..., None])
        keys = key[sample, group, column].to(lse.dtype)
        scores = scene.scale * (scene.query[:, :, token].to(lse.dtype) @ keys.mT)
        share = torch.where(seen, (scores - lse[:, :, token][..., None]).exp(), 0.0).unflatten(-1, (l, size)).sum(-1)
        weight = (weights[:, :, token] * real)[..., None]
        found.append(torch.where(weight > 0, share * weight, 0.0).sum(-2))
    return torch.cat(found, 2)


def _by_kernel(scene: Scene) -> bool:
    """Whether kernels tell what blocks hold, without forming scores."""
    query, able = scene.query, not may_read(scene.query.device) and triton_backend._installed()
    able = able and query.dtype in triton_backend.DTYPES and query.shape[-1] <= triton_backend.WIDEST
    return able and scene.selection.blocks <= MOST_BLOCKS


def dense_mass(scene: Scene, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted attention of rows on every block (b, h, r, t), were none left out, and the LSE (b, h, r, q) of that."""
    selection, dtype = scene.selection, weights.dtype
    batch, heads = scene.query.shape[:2]
    n, size, t = selection.n, selection.block_size, selection.blocks
    width = 1 if selection.per_token else size
    found, logs = [], []
    for begin, end in _steps(weights, len(rows), batch * heads * width * n):
        token = scene.tokens(rows[begin:end])
        real, token = token < n, token.clamp(max=n - 1)
        scores = dense_scores(scene, token, dtype)
        log = scores.logsumexp(-1)
        share = torch.where(scores > -torch.inf, (scores - log[..., None]).exp(), 0.0)
        share = torch.nn.functional.pad(share, (0, t * size - n)).unflatten(-1, (t, size)).sum(-1)
        weight = (weights[:, :, token] * real)[..., None]
        found.append(torch.where(weight > 0, share * weight, 0.0).sum(-2))
        logs.append(log)
    return torch.cat(found, 2), torch.cat(logs, 2)


def dense_scores(scene: Scene, token: Tensor, dtype: torch.dtype) -> Tensor:
    """Scores of query tokens (r, q) with every key, (b, h, r, q, n), -inf where one is not seen."""
    key = scene.key
    query = scene.query[:, :, token].to(dtype)
    batch, heads = query.shape[:2]
    grouped = query.reshape(batch, key.shape[1], -1, query.shape[-1])
    scores = (scene.scale * (grouped @ key.to(dtype).mT)).view(batch, heads, *token.shape, -1)
    if scene.selection.is_causal:
        later = torch.arange(key.shape[2], device=key.device) > token[..., None]
        scores = scores.masked_fill_(later, -torch.inf)
    if scene.key_padding_mask is not None:
        scores = scores.masked_fill_(scene.key_padding_mask[:, None, None, None], -torch.inf)
    return scores


def captured(lse: Tensor, whole: Tensor, token: Tensor) -> Tensor:
    """Mean share of a token's attention that its kept blocks hold, from the LSE with (b, h, n) and without choice."""
    kept = lse[:, :, token.clamp(max=lse.shape[-1] - 1)]
    seen = (whole > -torch.inf) & (token < lse.shape[-1])
    share = torch.where(seen, (kept - whole).exp(), 0.0)
    return share.sum() / seen.sum().clamp(min=1)
