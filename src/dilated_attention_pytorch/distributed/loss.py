"""The loss of a sequence spread over ranks: the mean over all tokens, however unevenly ranks hold them."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..errors import must
from .shard import SequenceLayout, shard_sequence

IGNORED = -100
"""The label of a token that takes no part, as in torch."""


def context_parallel_loss(
    logits: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int = IGNORED,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    gradients: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """`F.cross_entropy` over the tokens of all ranks together. Collective.

    The mean of the ranks' means is not the mean over tokens where ranks hold unequal numbers of them. Here every rank
    gets the value one process would, and gradients that add up to those of one process.

    Args:
        logits: (..., classes) of this rank's tokens; there may be none.
        labels: (...) their classes, `ignore_index` where a token takes no part.
        group: all ranks whose tokens belong to one mean, also the data-parallel ones; the default group if None, and
            this process alone where none is initialised.
        ignore_index: see `F.cross_entropy`, as `weight` and `label_smoothing`.
        gradients: what happens to gradients of parameters afterwards: "mean" over the group, as in DDP, FSDP and
            `GradientBuckets`, or "sum".

    >>> logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    >>> wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    >>> torch.allclose(context_parallel_loss(logits, labels), wanted)
    True
    """
    if gradients not in ("mean", "sum"):
        raise must('gradients must be "mean" or "sum"', repr(gradients))
    if logits.shape[:-1] != labels.shape:
        raise must(f"labels must have shape {tuple(logits.shape[:-1])}", tuple(labels.shape))
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows, targets = logits.flatten(0, -2).to(wide), labels.flatten()
    own = F.cross_entropy(rows, targets, weight, None, ignore_index, None, "sum", label_smoothing)
    kept = targets != ignore_index
    mass = kept.sum() if weight is None else weight[targets[kept]].sum()
    together = torch.stack([own.detach().double(), mass.double()])
    members = 1
    if group is not None or (dist.is_available() and dist.is_initialized()):
        members = dist.get_world_size(group)
        dist.all_reduce(together, group=group)
    total, tokens = together.tolist()
    scale = (members if gradients == "mean" else 1) / tokens if tokens else float("nan")
    return _Shared.apply(own, total / tokens if tokens else float("nan"), scale)


class _Shared(torch.autograd.Function):
    """The value of all ranks, through which this rank's part of the gradient flows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, value: float, scale: float) -> Tensor:
        ctx.scale = scale
        return own.new_tensor(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        return grad * ctx.scale, None, None


def next_token_labels(tokens: Tensor, layout: SequenceLayout, rank: int, *, ignore_index: int = IGNORED) -> Tensor:
    """What a rank's tokens should predict, (B, n), from the whole sequences (B, N).

    A shard's last token is followed by a token of another shard, so the labels are shifted before they are cut.
    """
    after = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], ignore_index)], 1)
    return shard_sequence(after, layout, rank, 1)
