"""Attention weights of chosen rows, for heat maps at any length."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import must, must_be
from ..patterns import Causal, Pattern, as_pattern
from ..plan.closed_forms import Domain, closed_form
from ..shapes import Key, KeyPadding, Query
from .checks import autocasted, check_masks, check_tensors, full_precision
from .derivatives import scale_of
from .merge import softmax_of_seen


def attention_rows(
    query: Query,
    key: Key,
    pattern: Pattern | str,
    rows: Tensor | list[int] | range,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: KeyPadding | None = None,
) -> Tensor:
    """Softmax weights of selected query rows over all keys, (B, H, rows, N), float32 or float64.

    Memory is that of the result; a row without keys is 0.

    >>> import torch
    >>> from dilated_attention_pytorch import attention_rows
    >>> q, k = torch.randn(2, 1, 4, 100_000, 32).unbind()
    >>> attention_rows(q, k, "window:2", [50_000]).count_nonzero(-1)
    tensor([[[5],
             [5],
             [5],
             [5]]])
    """
    check_tensors(query, key, key, enable_gqa)
    check_masks(query, key_padding_mask, None)
    query, key = autocasted(query, key)
    batch, heads, n, width = query.shape
    index = torch.as_tensor(rows, device=query.device)
    # An empty list has no element type.
    index = index.long() if index.shape == (0,) else index
    if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
        raise must_be("rows must be a list of row numbers", f"{index.dtype} {tuple(index.shape)}")
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < n:
        raise must(f"rows must lie in 0 .. {n - 1}", f"{int(index.min())} .. {int(index.max())}")
    whole = as_pattern(pattern)
    dtype = torch.promote_types(query.dtype, torch.float32)
    scale = scale_of(scale, width)
    if not n:
        return query[:, :, index].to(dtype) @ key.repeat_interleave(heads // key.shape[1], 1).mT.to(dtype)
    whole = (whole & Causal() if is_causal else whole).resolve(n, heads)
    domain = Domain(n, query.device)
    weights = torch.empty(batch, heads, len(index), n, dtype=dtype, device=query.device)
    positions = torch.arange(n, device=query.device)
    for head in range(heads):
        keys = key[:, head // (heads // key.shape[1])].to(dtype)
        with full_precision(query.device):
            scores = scale * (query[:, head, index].to(dtype) @ keys.mT)
        times = closed_form(whole).count(index[:, None], positions, head, domain)
        scores = torch.where(times > 0, scores + times.to(dtype).log(), -torch.inf)
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None], -torch.inf)
        weights[:, head] = softmax_of_seen(scores)
    return weights
