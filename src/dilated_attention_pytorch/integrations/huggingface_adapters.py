"""Attention modules of Hugging Face models outside transformers' `AttentionInterface`: BLOOM, MPT, Falcon.

Each function is the `forward` of such a module around the attention function of its model's implementation.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import must
from ..ops.checks import require
from .huggingface_masks import ATTRIBUTE, REFUSED, given_mask


def _bloom(
    self: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, **others: Any
) -> tuple[Tensor, Tensor | None]:
    if self.pretraining_tp > 1 and self.slow_but_exact:
        raise must("BLOOM must be computed at once", "pretraining_tp > 1 with slow_but_exact")
    tokens = torch.ones(1, 2, device=alibi.device)
    slopes = sys.modules[type(self).__module__].build_alibi_tensor(tokens, self.num_heads, torch.float32)[:, 0, 1]
    known = getattr(getattr(attention_mask, ATTRIBUTE, None), "known", None)
    if known is not None:
        # BLOOM counts real tokens, so that a gap is no distance.
        begins = known & ~F.pad(known, (1, 0))[:, :-1]
        what = "attention_mask of BLOOM must ignore tokens at the sides alone"
        slopes = require(slopes, (begins.sum(-1) <= 1).all(), what, lambda: "gaps", REFUSED)
    heads = self._reshape(self.query_key_value(hidden_states))
    settings = {"scaling": self.inv_norm_factor, "dropout": self.attention_dropout.p, **others}
    output, weights = _attend(self, heads, slopes, attention_mask, others.get("layer_past"), settings)
    return residual + F.dropout(self.dense(output), self.hidden_dropout, self.training), weights


def _mpt(
    self: Any, hidden_states: Tensor, position_bias: Tensor, past_key_values: Any = None, attention_mask: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    mixed = self.Wqkv(hidden_states)
    mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv) if self.clip_qkv else mixed
    heads = [x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, -1)]
    settings = {"scaling": self.softmax_scale, "dropout": self.attn_dropout_p, **others}
    # The last entries are those of distances -1 and 0.
    slopes = position_bias[:, 0, -1] - position_bias[:, 0, -2]
    output, weights = _attend(self, heads, slopes, attention_mask, past_key_values, settings)
    return self.out_proj(output), weights


def _falcon(
    self: Any, hidden_states: Tensor, alibi: None, attention_mask: Any, position_embeddings: Any = None, **others: Any
) -> tuple[Tensor, Tensor | None]:
    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    query, key = sys.modules[type(self).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    # Falcon has no dropout of weights with rotary positions.
    settings = {"scaling": self.inv_norm_factor, **others}
    output, weights = _attend(self, (query, key, value), None, attention_mask, others.get("layer_past"), settings)
    return self.dense(output), weights


def _attend(
    self: Any, heads: Any, slopes: Tensor | None, attention_mask: Tensor | None, cache: Any, settings: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of (B, H, N, D) heads with ALiBi of the slopes, (B, N, H * D), and the weights or None."""
    from transformers import AttentionInterface  # pyrefly: ignore[missing-import]

    query, key, value = heads
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    if slopes is not None:
        rows, keys = query.shape[2], key.shape[2]
        mask = given_mask(attention_mask, True, None, rows, keys)
        last = mask.first_query - mask.first_key + rows - 1
        distance = torch.arange(keys + rows - 1, device=query.device) - last
        settings["position_bias"] = (slopes[:, None] * distance)[None, :, None]
    settings["dropout"] = settings.get("dropout", 0.0) if self.training else 0.0
    attend = AttentionInterface()[self.config._attn_implementation]
    output, weights = attend(self, query, key, value, attention_mask, is_causal=True, **settings)
    return output.flatten(2), weights


ADAPTED = {"BloomAttention": _bloom, "MptAttention": _mpt, "FalconAttention": _falcon}


def adapt(model: nn.Module, name: str) -> None:
    """Let the modules of BLOOM, MPT and Falcon attend by an implementation; other models are left alone."""
    config: Any = model.config
    known = [module for module in model.modules() if type(module).__name__ in ADAPTED]
    # Falcon rounds its ALiBi to bfloat16, so that it does not depend on the distance alone.
    if not known or getattr(config, "alibi", False):
        return
    own = config._attn_implementation
    for module in known:
        module.config = config
        # A partial binds the copy in a copy of the module, and can be pickled.
        module.forward = partial(ADAPTED[type(module).__name__], module)
    if not isinstance(vars(model).get("set_attn_implementation"), partial):
        model.set_attn_implementation = partial(_restore, model, own)  # pyrefly: ignore[bad-argument-type]
    config._attn_implementation = name


def _restore(self: Any, own: str, attn_implementation: Any, **options: Any) -> None:
    """`set_attn_implementation` of an adapted model: other names give its modules their own `forward` back."""
    if attn_implementation == self.config._attn_implementation:
        return
    for module in self.modules():
        if type(module).__name__ in ADAPTED:
            vars(module).pop("forward", None)
    del self.set_attn_implementation
    self.config._attn_implementation = own
    self.set_attn_implementation(attn_implementation, **options)
