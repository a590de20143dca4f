"""Explanation of the backend choice for a call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import registry
from ..kernels.registry import Explanation
from ..patterns import Pattern, as_pattern
from ..patterns.parse import to_operand
from .attention import CallSettings, call_of
from .bias import kernel_bias
from .checks import check_masks, check_softcap, check_tensors


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | str,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    bias_positions: Tensor | None = None,
) -> Explanation:
    """Backend that `attention` selects for these arguments, and the reason why each other backend cannot run the call.

    Only the plan is computed. The result maps every backend to the reason why it cannot run the call, None if it can.
    `backend` is the selected backend, `because` the measurement behind the order, and `str` prints everything.

    >>> import torch
    >>> from dilated_attention_pytorch.ops.explain import explain
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16).unbind()
    >>> explain(q, k, v, "causal")["hopper"]
    'needs a CUDA tensor, got cpu'
    """
    check_tensors(query, key, value, enable_gqa)
    check_masks(query, key_padding_mask, cu_seqlens)
    check_softcap(softcap)
    bias, bias_positions = kernel_bias(query, bias, bias_positions)
    text = to_operand(as_pattern(pattern))
    seed = torch.zeros(1, dtype=torch.int64, device=query.device) if dropout_p else None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    settings = CallSettings(key_padding_mask, cu_seqlens, seed, text, is_causal, scale, dropout_p)
    settings = settings._replace(softcap=softcap or 0.0, bias=bias, bias_positions=bias_positions)
    call = call_of(query, key, value, settings)
    return registry.explain(call)
