"""Attention between sequences of different lengths, for patterns that define it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import AttentionOutput, attention_with_lse
from ..ops.checks import autocasted, check_masks, check_tensors
from ..ops.weights import check_two_lengths
from ..patterns import Full, Pattern


def attention_across(
    attend: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    dropout_p: float,
    **options: Any,
) -> Any:
    """`attend` (B, H, N, D) queries to (B, G, M, D) keys, the positions of both counted from the same start.

    `attend` is `attention` or `attention_with_lse`.
    """
    lengths = query.shape[2], key.shape[2]
    check_two_lengths(pattern, *lengths, cu_seqlens)
    query, key, value = autocasted(query, key, value)
    check_tensors(query, key, value, enable_gqa, one_length=False)
    check_masks(key, key_padding_mask, None)
    given = any(options.get(name) is not None for name in ("memory_budget", "sink", "softcap", "bias"))
    explicit = given or attend is attention_with_lse or options.get("backend", "auto") != "auto"
    if pattern == Full() and not is_causal and not explicit:
        seen = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
        return F.scaled_dot_product_attention(query, key, value, seen, dropout_p, scale=scale, enable_gqa=enable_gqa)
    if key_padding_mask is None:
        key_padding_mask = torch.zeros(key.shape[0], lengths[1], dtype=torch.bool, device=key.device)
    longest = max(lengths)
    more = longest - lengths[1]
    result = attend(
        F.pad(query, (0, 0, 0, longest - lengths[0])),
        F.pad(key, (0, 0, 0, more)),
        F.pad(value, (0, 0, 0, more)),
        pattern,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        key_padding_mask=F.pad(key_padding_mask, (0, more), value=True),
        dropout_p=dropout_p,
        **options,
    )
    if isinstance(result, Tensor):
        return result[:, :, : lengths[0]]
    return AttentionOutput(*(x[:, :, : lengths[0]] for x in result))
