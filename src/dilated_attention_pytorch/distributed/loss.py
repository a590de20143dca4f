"""Loss of a sequence spread over ranks: the mean over all tokens, for shards of any lengths."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..errors import must
from .layout import SequenceLayout, shard_sequence
from .transport import check_everywhere, wire_device

IGNORED = -100
"""Label of an ignored token, as in torch."""


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
    """`F.cross_entropy` over the tokens of all ranks. Collective.

    The mean of the ranks' means is not the mean over tokens where shards have unequal lengths. This function returns
    the value of one process on every rank, and its gradients sum to those of one process.

    Args:
        logits: (..., classes) of this rank's tokens; there may be none.
        labels: (...) their classes, `ignore_index` where a token is ignored.
        group: all ranks whose tokens belong to one mean, also the data-parallel ones; the default group if None, and
            only this process if none is initialised.
        ignore_index: see `F.cross_entropy`, as `weight` and `label_smoothing`.
        gradients: reduction of parameter gradients after `backward`: "mean" over the group, as in DDP, FSDP and
            `GradientBuckets`, or "sum".

    >>> logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    >>> wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    >>> torch.allclose(context_parallel_loss(logits, labels), wanted)
    True
    """
    several = group is not None or (dist.is_available() and dist.is_initialized())
    own, parts, failure = logits, [0.0, 0.0], None
    try:
        if gradients not in ("mean", "sum"):
            raise must('gradients must be "mean" or "sum"', repr(gradients))
        own, mass = _summed(logits, labels, ignore_index, weight, label_smoothing)
        # Read here, so that a GPU's index error is raised before the collective.
        parts = torch.stack([own.detach().double(), mass.double()]).tolist()
    except Exception as error:
        if not several:
            raise
        failure = error
    members = 1
    if several:
        members = dist.get_world_size(group)
        together = torch.tensor([*parts, float(failure is not None)], dtype=torch.float64, device=wire_device(group))
        dist.all_reduce(together, group=group)
        *parts, failed = together.tolist()
        if failed:
            check_everywhere(failure, group)
    total, tokens = parts
    scale = (members if gradients == "mean" else 1) / tokens if tokens else float("nan")
    return _Shared.apply(own, total / tokens if tokens else float("nan"), scale)


def _summed(
    logits: Tensor, labels: Tensor, ignore_index: int, weight: Tensor | None, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of this rank's tokens, and of their weights."""
    if logits.shape[:-1] != labels.shape:
        raise must(f"labels must have shape {tuple(logits.shape[:-1])}", tuple(labels.shape))
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows, targets = logits.flatten(0, -2).to(wide), labels.flatten()
    own = F.cross_entropy(rows, targets, weight, None, ignore_index, None, "sum", label_smoothing)
    kept = targets != ignore_index
    return own, kept.sum() if weight is None else weight[targets[kept]].sum()


class _Shared(torch.autograd.Function):
    """The value over all ranks, with the gradient of this rank's part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, value: float, scale: float) -> Tensor:
        ctx.scale = scale
        return own.new_tensor(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        return grad * ctx.scale, None, None


def next_token_labels(tokens: Tensor, layout: SequenceLayout, rank: int, *, ignore_index: int = IGNORED) -> Tensor:
    """Next-token labels of a rank's tokens, (B, n), from the whole sequences (B, N).

    A shard's last token is followed by a token of another shard, so the labels are shifted before they are cut.
    """
    after = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], ignore_index)], 1)
    return shard_sequence(after, layout, rank, 1)
