"""Dense attention weights under a pattern and an added bias, differentiable and traceable by `torch.compile`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import must
from ..patterns import Causal, Pattern
from ..patterns.parse import from_operand
from ..plan.closed_forms import Domain, closed_form
from .attention import operand_of
from .checks import autocasted, full_precision
from .merge import softmax_of_seen

_library = torch.library.Library("dilated_attention", "FRAGMENT")
_library.define("log_counts(Tensor query, Tensor key, str pattern, bool is_causal) -> Tensor")


def check_two_lengths(pattern: Pattern, queries: int, keys: int, cu_seqlens: Tensor | None = None) -> None:
    """Refuse two lengths where a pattern needs to know a single one."""
    if cu_seqlens is not None or not closed_form(pattern).is_positional:
        came = "cu_seqlens" if cu_seqlens is not None else pattern
        raise must(
            "query and key must have the same length unless the pattern is defined by positions",
            f"{queries} and {keys} with {came}",
            "Windows, causal, global, strided, dilated, hierarchical patterns and full have two lengths; "
            "a share of all blocks, block lists, random blocks and packed sequences have one.",
        )


def attention_weights(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool,
    scale: float,
    key_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    extra: Tensor | None = None,
) -> Tensor:
    """Softmax weights (B, H, N, M) of (B, H, N, D) queries over (B, G, M, D) keys, float32 or float64.

    `bias` is added to the scores; a row that sees no key is 0. `extra` (B, H, N, X) are scores of further keys that
    every row sees, the last columns of the weights.
    """
    query, key = autocasted(query, key)
    dtype = torch.promote_types(query.dtype, torch.float32)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    with full_precision(query.device):
        scores = scale * (query.to(dtype) @ key.mT.to(dtype))
    shapes = query.detach(), key.detach()
    scores = scores + torch.ops.dilated_attention.log_counts(*shapes, operand_of(pattern), is_causal)
    if bias is not None:
        scores = scores + bias.to(dtype)
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], -torch.inf)
    if extra is not None:
        scores = torch.cat([scores, extra], -1)
    # `softmax` over no keys keeps the shape and the graph.
    return softmax_of_seen(scores) if scores.numel() else scores.softmax(-1)


@torch.library.impl(_library, "log_counts", "CompositeExplicitAutograd")
def _log_counts(query: Tensor, key: Tensor, pattern: str, is_causal: bool) -> Tensor:
    """Logarithm of the number of times a pattern counts each pair, (H, N, M)."""
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    counts = torch.empty(heads, queries, keys, dtype=_dtype(query), device=query.device)
    n = max(queries, keys)
    if not n:
        return counts
    whole = from_operand(pattern)
    form = closed_form((whole & Causal() if is_causal else whole).resolve(n, heads))
    domain = Domain(n, query.device)
    rows, columns = domain.arange(queries)[:, None], domain.arange(keys)
    for head in range(heads):
        counts[head] = torch.as_tensor(form.count(rows, columns, head, domain), device=query.device)
    return counts.log_()


@torch.library.register_fake("dilated_attention::log_counts", lib=_library)
def _log_counts_fake(query: Tensor, key: Tensor, pattern: str, is_causal: bool) -> Tensor:
    return query.new_empty(query.shape[1], query.shape[2], key.shape[2], dtype=_dtype(query))


def _dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)
