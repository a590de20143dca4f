"""Published rules that choose key blocks from queries and keys, as index tensors for `selected_attention`.

A rule scores every pair of a row and a key block; `select_blocks` keeps the best blocks of each row within a budget.
Rows are blocks of queries, or under a causal mask tokens, since a summary of a query block would contain later tokens.
The own block of a row is always listed and never scored: to a token it may hold later tokens.

Shapes: b batch, h query heads, g key heads, n tokens, d width, t blocks, r rows, B block size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import must, must_be
from ..ops.checks import check_tensors
from ..ops.derivatives import scale_of
from .indices import GRANULARITIES

CHUNK = 2**24
"""Scores of tokens with tokens that a rule holds at a time."""
SUB_BLOCKS = 4
"""Sub-blocks of a block in the rule "sub_blocks"."""
STRIDE = 8
"""Tokens of a stride in the rule "antidiagonal"."""


def select_blocks(
    query: Tensor,
    key: Tensor,
    rule: str = "mean",
    budget: int | float = 16,
    *,
    granularity: int = 128,
    is_causal: bool = False,
    scale: float | None = None,
    k_min: int = 1,
    share_groups: bool = False,
) -> Tensor:
    """Indices for `selected_attention`: key blocks that a published rule chooses for each row.

    Args:
        query: (B, H, N, D).
        key: (B, G, N, D), H a multiple of G.
        rule: "mean" (MoBA: mean keys), "box" (Quest: bound from the minimum and maximum of each key coordinate),
            "antidiagonal" (XAttention: sums along strided antidiagonals of the scores), "sub_blocks" (log-sum-exp of
            scores of sub-block means), "oracle" (attention mass of each block, from all scores) or "random".
        budget: blocks of each row, its own included; or as a float in (0, 1] the share of predicted attention outside
            its own block that the kept blocks must hold: FlexPrefill's top-p.
        granularity: tokens of a block: 16, 32, 64, 128 or 256.
        is_causal: choose for tokens, among blocks up to the token's own; otherwise for blocks of queries.
        scale: factor on the scores; 1 / sqrt(D) by default.
        k_min: fewest blocks of a row, if as many are visible.
        share_groups: one choice for the query heads of a key head, by the mean of their predicted shares.

    Returns:
        int32 (B, H or G, rows, K), padded with -1. A row's own block comes first. Not differentiable.

    >>> import torch
    >>> from dilated_attention_pytorch import select_blocks, selected_attention
    >>> q, k, v = torch.randn(3, 1, 4, 256, 32).unbind()
    >>> indices = select_blocks(q, k, "box", 3, granularity=32, is_causal=True)
    >>> indices.shape, selected_attention(q, k, v, indices, granularity=32, is_causal=True).shape
    (torch.Size([1, 4, 256, 3]), torch.Size([1, 4, 256, 32]))
    """
    check_tensors(query, key, key, enable_gqa=True)
    if rule not in RULES:
        raise must(f"rule must be one of {', '.join(RULES)}", repr(rule))
    if granularity not in GRANULARITIES:
        raise must(f"granularity must be one of {', '.join(map(str, GRANULARITIES))}", granularity)
    top_p = isinstance(budget, float)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise must_be("budget must be a number of blocks, or a share as a float", repr(budget))
    if not (0 < budget <= 1 if top_p else budget >= 1):
        raise must("budget must be a count >= 1, or a share in (0, 1]", budget)
    if k_min < 1:
        raise must("k_min must be >= 1", k_min)
    (batch, heads, n, _), groups = query.shape, key.shape[1]
    if not batch or not n:
        shape = batch, groups if share_groups else heads, n if is_causal else -(-n // granularity), 0
        return torch.empty(shape, dtype=torch.int32, device=query.device)
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.no_grad():
        query = query.to(dtype) * scale_of(scale, query.shape[-1])
        key = key.to(dtype).repeat_interleave(heads // groups, 1)
        scores = RULES[rule](query, key, granularity, is_causal)
        return _best(scores, budget, granularity, is_causal, k_min, groups if share_groups else None)


def _best(scores: Tensor, budget: int | float, size: int, is_causal: bool, k_min: int, groups: int | None) -> Tensor:
    """Best blocks of each row by scores (b, h, r, t), which estimate the logarithm of attention mass."""
    rows, t = scores.shape[2:]
    row, column = (torch.arange(many, device=scores.device) for many in (rows, t))
    own = (row // size if is_causal else row)[:, None]
    others = column < own if is_causal else column != own
    scores = scores.masked_fill(~others, -torch.inf)
    shares = scores.softmax(-1).nan_to_num(0.0)
    if groups is not None:
        scores = shares = shares.unflatten(1, (groups, -1)).mean(2)
    order = scores.masked_fill(column == own, torch.inf).sort(dim=-1, descending=True, stable=True).indices
    most = t if isinstance(budget, float) else min(max(budget, k_min), t)
    kept = column < most
    if isinstance(budget, float):
        before = pad(shares.gather(-1, order).cumsum(-1), (1, -1))
        kept = (before < budget) | (column < k_min)
    listed = order.expand_as(scores)
    kept = kept & ((listed == own) | others.expand_as(scores).gather(-1, listed))
    return torch.where(kept, listed, -1)[..., :most].int()


def _blocks(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """(b, h, n, d) as (b, h, t, B, d), the last block filled up."""
    return pad(x, (0, 0, 0, -x.shape[2] % size), value=fill).unflatten(2, (-1, size))


def _means(x: Tensor, size: int) -> Tensor:
    """Means of the tokens of each block, (b, h, t, d)."""
    many = _blocks(torch.ones_like(x[:1, :1, :, :1]), size).sum(3)
    return _blocks(x, size).sum(3) / many


def _by_mean(query: Tensor, key: Tensor, size: int, is_causal: bool) -> Tensor:
    """Mean query, or a token, with mean keys."""
    return (query if is_causal else _means(query, size)) @ _means(key, size).mT


def _by_box(query: Tensor, key: Tensor, size: int, is_causal: bool) -> Tensor:
    """Upper bound of the scores of a token with a block; of a block of queries the mean of its tokens' bounds."""
    least, most = (reduce(_blocks(key, size, fill), 3) for reduce, fill in _BOX)
    # max(q l, q u) summed over coordinates: positive parts meet the largest key, negative parts the least.
    bound = query.clamp(min=0) @ most.mT + query.clamp(max=0) @ least.mT
    return bound if is_causal else _means(bound, size)


_BOX = ((torch.amin, torch.inf), (torch.amax, -torch.inf))


def _by_antidiagonal(query: Tensor, key: Tensor, size: int, is_causal: bool) -> Tensor:
    """Scores on antidiagonals: place i of a stride of queries meets place STRIDE - 1 - i of every stride of keys."""
    rows, columns = _blocks(query, STRIDE), _blocks(key, STRIDE).flip(3)
    if not is_causal:
        return _by_mass(rows.flatten(3) / STRIDE, columns.flatten(3), size // STRIDE, False)
    pairs = torch.einsum("bhmsd,bhksd->bhmsk", rows, columns).flatten(2, 3)[:, :, : query.shape[2]]
    return _blocks(pairs.mT, size // STRIDE, -torch.inf).logsumexp(3).mT


def _by_sub_blocks(query: Tensor, key: Tensor, size: int, is_causal: bool) -> Tensor:
    """Logarithm of the summed exponentials of scores of sub-block means."""
    unit = size // SUB_BLOCKS
    there = _blocks(torch.ones_like(_means(query[:1, :1, :, :1], unit)), SUB_BLOCKS)[..., 0] > 0
    rows = query[:, :, :, None] if is_causal else _blocks(_means(query, unit), SUB_BLOCKS)
    pairs = torch.einsum("bhrad,bhtud->bhratu", rows, _blocks(_means(key, unit), SUB_BLOCKS))
    pairs = pairs.masked_fill(~there[:, :, None, None], -torch.inf)
    if not is_causal:
        pairs = pairs.masked_fill(~there[..., None, None], -torch.inf)
    return pairs.logsumexp((3, 5))


def _by_mass(query: Tensor, key: Tensor, size: int, is_causal: bool) -> Tensor:
    """Logarithm of the attention mass of each block in dense attention; of a block of queries the mean mass."""
    n, found = query.shape[2], []
    step = max(1, CHUNK // max(1, n * query.shape[0] * query.shape[1]))
    token = torch.arange(n, device=query.device)
    for first in range(0, n, step):
        scores = query[:, :, first : first + step] @ key.mT
        if is_causal:
            scores = scores.masked_fill(token > token[first : first + step, None], -torch.inf)
        found.append(_blocks(scores.softmax(-1).mT, size).sum(3).mT)
    mass = torch.cat(found, 2)
    return (mass if is_causal else _means(mass, size)).log()


def _by_chance(query: Tensor, key: Tensor, size: int, is_causal: bool) -> Tensor:
    """Random scores, from torch's generator of the device."""
    blocks = -(-key.shape[2] // size)
    rows = query.shape[2] if is_causal else blocks
    return torch.rand(*query.shape[:2], rows, blocks, device=query.device)


RULES: dict[str, Callable[[Tensor, Tensor, int, bool], Tensor]] = {
    "mean": _by_mean,
    "box": _by_box,
    "antidiagonal": _by_antidiagonal,
    "sub_blocks": _by_sub_blocks,
    "oracle": _by_mass,
    "random": _by_chance,
}
"""Rule -> scores (b, h, r, t) of (b, h, n, d) queries, already scaled, and keys."""
