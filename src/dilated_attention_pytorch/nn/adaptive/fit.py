"""Start of a scorer fitted to queries and keys: the product of low rank that is nearest to their dot products."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.checks import full_precision
from ...selection.backend import summarise
from ...selection.scores import for_heads

if TYPE_CHECKING:
    from ...selection.types import SelectionSettings

LEAST = 1e-4
"""Least eigenvalue of second moments, over the largest: the data may lack directions."""


class Moments(NamedTuple):
    """Sums over the queries and keys that the match compares, float64 on the host; sums of several calls add up."""

    query: Tensor
    """(h, d, d): of outer products"""
    key: Tensor
    """(h, d, d)"""
    key_sum: Tensor
    """(h, d)"""
    keys: Tensor
    """(h, 1)"""

    def plus(self, other: Moments | None) -> Moments:
        """Moments of the data of both."""
        return self if other is None else Moments(*(a + b for a, b in zip(self, other, strict=True)))


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks of a group, by default of all; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


@torch.no_grad()
def moments_of(query: Tensor, key: Tensor, settings: SelectionSettings, padding: Tensor | None) -> Moments:
    """Moments of queries (b, h, n, d) and keys (b, g, n, d): of tokens, or of the means of sub-blocks."""
    with full_precision(query.device):
        rows, keys = summarise(query, key, settings, padding, before=False)
        keys = for_heads(keys, query.shape[1])
        own = rows.units.flatten(2, 3)
        if settings.per_token:
            own = query.to(own.dtype).nan_to_num(0.0, 0.0, 0.0)
            own = own if padding is None else own.masked_fill(padding[:, None, :, None], 0.0)
        # Sub-blocks without a visible token are 0 and take no part in the sums.
        units = keys.units.flatten(2, 3)
        sums = *((x.mT @ x).double().sum(0) for x in (own, units)), units.double().sum((0, 2))
        return Moments(*(x.cpu() for x in (*sums, keys.unit_there.flatten(2).sum((0, 2)).double()[:, None])))


def fit_match(moments: Moments, rank: int) -> tuple[Tensor, Tensor]:
    """Projections (h, d, rank) of queries and keys, nearest to dot products in the mean square over all pairs.

    Keys count from their mean, which adds the same to all scores of a row. With A = Cq^1/2 Ck^1/2 of the second moments
    and its singular vectors L and R, the projections are Cq^-1/2 L and Ck^-1/2 R, truncated and scaled as the random
    start is.
    """
    mean = moments.key_sum / moments.keys.clamp(min=1)
    spread = moments.key - moments.keys[..., None] * mean[:, :, None] * mean[:, None]
    roots = []
    for moment in (moments.query, spread):
        values, vectors = torch.linalg.eigh(moment)
        values = values.clamp(min=LEAST * values[:, -1:]).clamp(min=1e-30)
        roots.append([(vectors * values[:, None] ** power) @ vectors.mT for power in (0.5, -0.5)])
    left, sizes, right = torch.linalg.svd(roots[0][0] @ roots[1][0])
    width = left.shape[-1]
    scale = sizes[:, None, :rank].sqrt() * (rank / width) ** 0.25
    return roots[0][1] @ left[..., :rank] * scale, roots[1][1] @ right.mT[..., :rank] * scale
