"""Start of a scorer fitted to queries and keys: the product of low rank that is nearest to their dot products."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.checks import full_precision
from ...selection.backend import summarise
from ...selection.scores import for_lists, join_heads

if TYPE_CHECKING:
    from ...selection.types import SelectionSettings

LEAST = 1e-4
"""Least eigenvalue of second moments, over the largest: the data may lack directions."""


class Moments(NamedTuple):
    """Sums over the queries and keys that the match compares, float64 on the host; sums of several calls add up.

    One for each list: queries and keys of heads that share it stand side by side. They are c and e wide, multiples of
    the width of a head; c is more than e where heads share keys.
    """

    query: Tensor
    """(s, c, c): of outer products"""
    key: Tensor
    """(s, e, e)"""
    key_sum: Tensor
    """(s, e)"""
    keys: Tensor
    """(s, 1)"""

    def plus(self, other: Moments | None) -> Moments:
        """Moments of the data of both."""
        return self if other is None else Moments(*(a + b for a, b in zip(self, other, strict=True)))


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks of a group, by default of all; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


@torch.no_grad()
def moments_of(query: Tensor, key: Tensor, settings: SelectionSettings, padding: Tensor | None, lists: int) -> Moments:
    """Moments of queries (b, h, n, d) and keys (b, g, n, d): of tokens, or of the means of sub-blocks."""
    with full_precision(query.device):
        rows, keys = (for_lists(x, lists) for x in summarise(query, key, settings, padding, before=False))
        own = rows.units.flatten(2, 3)
        if settings.row_unit == 1:
            own = join_heads(query.to(own.dtype).nan_to_num(0.0, 0.0, 0.0), lists)
            own = own if padding is None else own.masked_fill(padding[:, None, :, None], 0.0)
        # Sub-blocks without a visible token are 0 and take no part in the sums.
        units = keys.units.flatten(2, 3)
        sums = *((x.mT @ x).double().sum(0) for x in (own, units)), units.double().sum((0, 2))
        # Several lists may read a key head.
        sums = sums[0], *(x.repeat_interleave(lists // len(x), 0) for x in sums[1:])
        return Moments(*(x.cpu() for x in (*sums, keys.unit_there.flatten(2).sum((0, 2)).double()[:, None])))


def fit_match(moments: Moments, rank: int, width: int) -> tuple[Tensor, Tensor]:
    """Projections (s, c, rank) of queries and (s, e, rank) of keys, nearest to dot products in the mean square over all
    pairs, summed over the heads of a list, which are `width` wide.

    Keys count from their mean, which adds the same to all scores of a row. With A = Cq^1/2 P Ck^1/2 of the second
    moments, where P assigns keys to heads, and its singular vectors L and R, the projections are Cq^-1/2 L and
    Ck^-1/2 R, truncated and scaled as the random start is.
    """
    mean = moments.key_sum / moments.keys.clamp(min=1)
    spread = moments.key - moments.keys[..., None] * mean[:, :, None] * mean[:, None]
    roots = []
    for moment in (moments.query, spread):
        values, vectors = torch.linalg.eigh(moment)
        values = values.clamp(min=LEAST * values[:, -1:]).clamp(min=1e-30)
        roots.append([(vectors * values[:, None] ** power) @ vectors.mT for power in (0.5, -0.5)])
    root = roots[0][0]
    queries, keys = root.shape[-1], roots[1][0].shape[-1]
    if queries > keys:
        # Consecutive heads read the same key.
        root = root.unflatten(-1, (keys // width, queries // keys, width)).sum(-2).flatten(-2)
    left, sizes, right = torch.linalg.svd(root @ roots[1][0])
    scale = sizes[:, None, :rank].sqrt() * (rank / queries) ** 0.25
    return roots[0][1] @ left[..., :rank] * scale, roots[1][1] @ right.mT[..., :rank] * scale
