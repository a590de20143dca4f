"""Attention implementations for Hugging Face models.

    >>> from dilated_attention_pytorch.integrations import huggingface          # doctest: +SKIP
    >>> huggingface.register()                                                  # doctest: +SKIP
    >>> model.set_attn_implementation("dilated")                                # doctest: +SKIP

Positions are those of the padded batch: a sample padded on the left meets the pattern from where its padding begins.
Documents packed into one row (`position_ids` that start anew, or `cu_seq_lens_q`) do not see each other. The pattern
restricts self-attention; cross-attention stays full.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import must, must_be
from ..nn.cross_attention import attention_across
from ..ops import attention
from ..ops.decode import attention_step, check_decodable
from ..patterns import BlockDilated, Dilated, Full, Pattern, parse

PATTERNS: dict[str, Pattern | str] = {
    "dilated": Dilated((2048, 4096, 8192), (1, 2, 4)),
    "block_sparse": BlockDilated((2048, 4096, 8192), (1, 2, 4)),
}

UNSUPPORTED = ("softcap", "position_bias", "s_aux", "head_mask", "sliding_window", "cache")
"""Arguments some models pass that change the result; each must be absent or None."""

PACKING = ("cu_seq_lens", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
PACKING += ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k")
"""Arguments about packed documents; each must come with `cu_seq_lens_q`, which alone is read."""

OTHER_SEQUENCE = frozenset({"key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "key"})
"""Parameters of a `forward` that can attend to another sequence."""


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
        ignored, cu_seqlens = (None, None) if attention_mask is None else _masks(attention_mask, key)
        cu_seqlens = _bounds(others, cu_seqlens)
        before = key.shape[2] - query.shape[2]
        cross = _is_cross_attention(module, causal, before == 0)
        settings = {"scale": scaling, "enable_gqa": True, "key_padding_mask": ignored, "dropout_p": dropout}
        if before and (cu_seqlens is not None or not cross):
            output = _follow_on(query, key, value, pattern, causal, before, cu_seqlens, **settings)
        elif before:
            output = attention_across(query, key, value, Full(), is_causal=False, cu_seqlens=None, **settings)
        else:
            seen, causal = (Full(), False) if cross else (pattern, causal)
            output = attention(query, key, value, seen, is_causal=causal, cu_seqlens=cu_seqlens, **settings)
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
    """Mask of a whole batch in one row per sample, (B, kv_length): True for real tokens, or the number of a document.

    Causality is left to `attention_function`.
    """
    from transformers.masking_utils import (  # pyrefly: ignore[missing-import]
        bidirectional_mask_function,
        causal_mask_function,
    )

    documents = _packed_documents(mask_function)
    if documents is not None:
        return documents + 1
    if mask_function not in (None, causal_mask_function, bidirectional_mask_function):
        raise must(
            "the model must ask for a plain causal or bidirectional mask",
            "another (a sliding window, or a mask of its own)",
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


def _packed_documents(mask_function: Callable[..., Any] | None) -> Tensor | None:
    """Document numbers (B, N) of transformers' causal mask of packed sequences; None for every other mask function."""
    from transformers.masking_utils import (  # pyrefly: ignore[missing-import]
        and_masks,
        causal_mask_function,
        packed_sequence_mask_function,
    )

    both = _captured(mask_function, and_masks(), "mask_functions")
    if both is None or len(both) != 2 or both[0] is not causal_mask_function:
        return None
    return _captured(both[1], packed_sequence_mask_function(torch.empty(0, device="cpu")), "packed_sequence_mask")


def _captured(function: Any, like: Any, name: str) -> Any:
    """The variable that a closure captured, if it runs the code of `like`."""
    if getattr(function, "__code__", None) is not like.__code__:
        return None
    return inspect.getclosurevars(function).nonlocals[name]


def _masks(attention_mask: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The key padding mask, or the bounds of documents, from one row per sample."""
    if attention_mask.dim() != 2 or attention_mask.is_floating_point():
        raise must_be(
            "attention_mask must be (batch, tokens), 1 for real tokens",
            f"{attention_mask.dtype} {tuple(attention_mask.shape)}",
            "Dense masks cannot be honoured here; say them as a pattern.",
        )
    if attention_mask.dtype == torch.bool or int(attention_mask.max()) <= 1:
        return ~attention_mask.bool().to(key.device), None
    if len(attention_mask) != 1:
        raise must(
            "packed sequences must have batch size 1",
            len(attention_mask),
            "Lay the sequences one after another: DataCollatorWithFlattening does.",
        )
    starts = attention_mask[0].diff().nonzero()[:, 0] + 1
    return None, torch.nn.functional.pad(torch.nn.functional.pad(starts, (1, 0)), (0, 1), value=key.shape[2]).cpu()


def _bounds(others: dict[str, Any], documents: Tensor | None) -> Tensor | None:
    """Bounds of packed documents on the CPU, from FlashAttention's arguments or from the mask."""
    bounds = others.get("cu_seq_lens_q")
    if bounds is None:
        for name in PACKING:
            if others.get(name) is not None:
                raise must(f"{name} must come with cu_seq_lens_q", "none", "Pass cu_seq_lens_q and cu_seq_lens_k.")
        return documents
    bounds = bounds.cpu()
    keys = others.get("cu_seq_lens_k")
    for name, other in (("cu_seq_lens_k", keys), ("position_ids", documents)):
        if other is not None and bounds.tolist() != other.tolist():
            raise must(f"{name} must give the documents of cu_seq_lens_q", other.tolist())
    return bounds


def _is_cross_attention(module: torch.nn.Module, causal: bool, same_length: bool) -> bool:
    """Whether the keys of a module come from another sequence, by the marks that transformers' modules carry."""
    named = "Cross" in type(module).__name__
    if named or getattr(module, "is_cross_attention", False) or getattr(module, "is_cross", False):
        return True
    if causal:
        return False
    if hasattr(module, "is_decoder"):
        return bool(module.is_decoder)
    if OTHER_SEQUENCE.isdisjoint(inspect.signature(module.forward).parameters):
        return False
    if same_length:
        raise must(
            "self-attention and cross-attention must be told apart by is_decoder or is_cross_attention",
            f"{type(module).__name__} without either, and queries and keys of one length",
            'Use attn_implementation="sdpa" for this model.',
        )
    return True


def _follow_on(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    causal: bool,
    before: int,
    cu_seqlens: Tensor | None,
    dropout_p: float,
    **settings: Any,
) -> Tensor:
    """Attention of new tokens to cached ones."""
    if not causal or before < 0 or cu_seqlens is not None:
        raise must(
            "query and key must have one length, or the query must follow on a causal cache",
            f"{query.shape[2]} queries and {key.shape[2]} keys{'' if cu_seqlens is None else ' of packed sequences'}",
        )
    if dropout_p:
        raise must("decoding must come with dropout off", dropout_p, "Call model.eval() first.")
    check_decodable(pattern, None)
    return attention_step(query, key, value, pattern, before, **settings)


def _check_others(others: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise must(f"{name} must be absent: this implementation has none", name, 'Use attn_implementation="eager".')
    if others.get("output_attentions"):
        advice = "attention_rows gives the weights of chosen rows."
        raise must("output_attentions must be off: weights are never all in memory", True, advice)
