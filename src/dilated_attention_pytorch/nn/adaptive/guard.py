"""Comparison of a scorer in training with its start, on rows whose attention is measured densely.

Shapes: b batch, h heads, s lists of a row, n tokens, r rows, t blocks, k listed blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.checks import full_precision
from ...selection.distill import DistillInputs, dense_mass, summed_by_list
from ...selection.scores import BlockScores
from ...selection.types import Selection, shared_blocks

MOST_ROWS = 64
"""Rows of a comparison."""


@torch.no_grad()
def captured_more(
    trained: BlockScores, start: BlockScores, inputs: DistillInputs, rows: Tensor, weights: Tensor
) -> Tensor:
    """Share of the attention (s) that blocks chosen by one score capture beyond those chosen by the other.

    Scored rows choose by themselves, as many blocks as the selection lists for them. -1 for lists whose trained scores
    are not finite.
    """
    rows, selection = rows[:: -(-len(rows) // MOST_ROWS)], inputs.selection
    mass = summed_by_list(dense_mass(inputs, rows, weights)[0], selection.group)
    _, others = candidates(selection, inputs.blocks(rows), trained.visible)
    counts = selection.counts[:, :, selection.list_of(rows, inputs.row_tokens)]
    slots = selection.indices.shape[3]
    with full_precision(rows.device):
        both, held = [scores.of_all(rows) for scores in (trained, start)], []
    for score in both:
        chosen = listed(best(score, others, counts, slots, selection.blocks), selection.blocks)
        held.append((mass * (chosen & others)).sum((0, 2, 3)))
    broken = (others & ~both[0].isfinite()).any(3).any(2).any(0)
    return torch.where(broken, -1.0, (held[0] - held[1]) / mass.sum((0, 2, 3)).clamp(min=1e-30))


def query_weights(query: Tensor, padding: Tensor | None) -> Tensor:
    """1 for each query (b, h, n) of (b, n, h, d), 0 for padding."""
    batch, n, heads, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    weights = torch.ones(batch, heads, n, dtype=dtype, device=query.device)
    return weights if padding is None else weights.masked_fill(padding[:, None], 0.0)


def candidates(selection: Selection, own: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks that rows in the blocks `own` (r) keep without a choice, bool (r, t), and blocks that they may list, bool
    (b, s, r, t)."""
    near = selection.local_blocks, selection.sink_blocks, selection.is_causal
    forced = shared_blocks(own, selection.blocks, *near)
    column = torch.arange(selection.blocks, device=own.device)
    within = column < own[:, None] if selection.is_causal else column != own[:, None]
    return forced, within & ~forced & visible[:, :, None]


def best(scores: Tensor, others: Tensor, counts: Tensor, slots: int, blocks: int) -> Tensor:
    """`Selection.indices` (b, s, r, k) of the `counts` best candidates of each row."""
    indices = scores.masked_fill(~others, -torch.inf).topk(slots, -1).indices
    slot = torch.arange(slots, device=scores.device)
    return indices.masked_fill(slot >= counts[..., None], blocks).sort(-1).values.int()


def listed(indices: Tensor, blocks: int) -> Tensor:
    """Listed blocks as bool (b, s, r, t)."""
    empty = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool, device=indices.device)
    return empty.scatter_(-1, indices.long(), True)[..., :-1]
