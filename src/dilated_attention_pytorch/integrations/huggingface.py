"""Attention implementations for Hugging Face models.

    >>> from dilated_attention_pytorch.integrations import huggingface          # doctest: +SKIP
    >>> huggingface.register()                                                  # doctest: +SKIP
    >>> model.set_attn_implementation("dilated")                                # doctest: +SKIP

Positions are those of the padded batch: a sample padded on the left meets the pattern from where its padding begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import must, must_be
from ..ops import attention
from ..ops.decode import attention_step, check_decodable
from ..patterns import BlockDilated, Dilated, Pattern, parse

PATTERNS: dict[str, Pattern | str] = {
    "dilated": Dilated((2048, 4096, 8192), (1, 2, 4)),
    "block_sparse": BlockDilated((2048, 4096, 8192), (1, 2, 4)),
}

UNSUPPORTED = ("softcap", "position_bias", "s_aux", "head_mask", "sliding_window", "cache")
"""Arguments some models pass that change the result; each must be absent or None."""


def register(patterns: dict[str, Pattern | str] | None = None) -> tuple[str, ...]:
    """Add implementations to transformers' attention and mask interfaces, and return their names.

    Args:
        patterns: name -> pattern; "dilated" and "block_sparse" by default. Registering a name again replaces it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # pyrefly: ignore[missing-import]

    given = {
        name: parse(one) if isinstance(one, str) else one
        for name, one in (PATTERNS if patterns is None else patterns).items()
    }
    for name, pattern in given.items():
        AttentionInterface.register(name, attention_function(pattern))
        # A name that only the attention interface knows is given no mask at all, and padding would be seen.
        AttentionMaskInterface.register(name, padding_mask)
    return tuple(given)


def attention_function(pattern: Pattern) -> Callable[..., tuple[Tensor, None]]:
    """The pattern as transformers calls it."""

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        _check_others(others)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        ignored = None if attention_mask is None else _ignored(attention_mask, key)
        before = key.shape[2] - query.shape[2]
        if before == 0:
            output = attention(
                query,
                key,
                value,
                pattern,
                is_causal=causal,
                scale=scaling,
                enable_gqa=True,
                key_padding_mask=ignored,
                dropout_p=dropout,
            )
        else:
            output = _follow_on(query, key, value, pattern, causal, before, scaling, ignored, dropout)
        return output.transpose(1, 2), None

    return attend


def padding_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """The padding mask as it is, (B, kv_length), True for real tokens; the pattern does the rest."""
    from transformers.masking_utils import (  # pyrefly: ignore[missing-import]
        bidirectional_mask_function,
        causal_mask_function,
    )

    if mask_function not in (None, causal_mask_function, bidirectional_mask_function):
        raise must(
            "the model must ask for a plain causal or bidirectional mask",
            "another (a sliding window, packed sequences, or a mask of its own)",
            'Use attn_implementation="sdpa" for it, or say the window as a pattern.',
        )
    cached = mask_function is causal_mask_function and int(q_offset) + q_length != kv_length
    if kv_offset or cached:
        raise must(
            "the cache must grow with the tokens and drop none",
            f"{kv_length} keys from {kv_offset} on for {q_length} queries from {q_offset} on",
            'Use the dynamic cache: generate(cache_implementation="dynamic").',
        )
    if attention_mask is None or attention_mask.shape[-1] == kv_length:
        return attention_mask
    raise must(f"attention_mask must cover the {kv_length} keys", tuple(attention_mask.shape))


def _ignored(attention_mask: Tensor, key: Tensor) -> Tensor:
    if attention_mask.dim() != 2 or attention_mask.is_floating_point():
        raise must_be(
            "attention_mask must be (batch, tokens), 1 for real tokens",
            f"{attention_mask.dtype} {tuple(attention_mask.shape)}",
            "Dense masks cannot be honoured here; say them as a pattern.",
        )
    return ~attention_mask.bool().to(key.device)


def _follow_on(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    causal: bool,
    before: int,
    scaling: float | None,
    ignored: Tensor | None,
    dropout: float,
) -> Tensor:
    """New tokens against cached ones."""
    if not causal or before < 0:
        raise must(
            "query and key must have one length, or the query must follow on a causal cache",
            f"{query.shape[2]} queries and {key.shape[2]} keys",
            "Cross-attention has no positions a pattern could speak of.",
        )
    if dropout:
        raise must("decoding must come with dropout off", dropout, "Call model.eval() first.")
    check_decodable(pattern, None)
    return attention_step(query, key, value, pattern, before, scale=scaling, enable_gqa=True, key_padding_mask=ignored)


def _check_others(others: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise must(f"{name} must be absent: this implementation has none", name, 'Use attn_implementation="eager".')
    if others.get("output_attentions"):
        advice = "attention_rows gives the weights of chosen rows."
        raise must("output_attentions must be off: weights are never all in memory", True, advice)
