"""What must hold of the tensors of a call, before anything is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import must, must_be


def check_tensors(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, *, one_length: bool = True, one_dtype: bool = True
) -> None:
    """What must hold of query, key and value; a cache may be longer than what follows on it, and of another dtype."""
    named = (("query", query), ("key", key), ("value", value))
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise must_be(f"{name} must be a Tensor", type(tensor).__name__)
        if tensor.dim() != 4:
            raise must(
                f"{name} must have shape (batch, heads, n, width)", f"{tensor.dim()} dimensions {tuple(tensor.shape)}"
            )
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise must_be(f"{name} must be float16, bfloat16, float32 or float64", tensor.dtype)
    for name, tensor in named[1:]:
        if one_dtype and tensor.dtype != query.dtype:
            raise must_be(f"{name} must have the query's dtype {query.dtype}", tensor.dtype)
        if tensor.device != query.device:
            raise must(f"{name} must be on the query's device {query.device}", tensor.device)
        if tensor.shape[0] != query.shape[0]:
            raise must(f"{name} must have the query's batch size {query.shape[0]}", tensor.shape[0])
        if one_length and tensor.shape[2] != query.shape[2]:
            raise must(f"{name} must have the query's length {query.shape[2]}", tensor.shape[2])
    if value.shape[2] != key.shape[2]:
        raise must(f"value must have the key's length {key.shape[2]}", value.shape[2])
    if key.shape[3] != query.shape[3]:
        raise must(f"key must have the query's width {query.shape[3]}", key.shape[3])
    if value.shape[1] != key.shape[1]:
        raise must(f"value must have the key's {key.shape[1]} heads", value.shape[1])
    if min(*query.shape, value.shape[3], key.shape[1]) < 1:
        raise must(
            "batch, heads, n and widths must be at least 1", f"query {tuple(query.shape)}, value {tuple(value.shape)}"
        )
    if key.shape[1] != query.shape[1] and (not enable_gqa or query.shape[1] % key.shape[1]):
        advice = "Pass enable_gqa=True." if query.shape[1] % key.shape[1] == 0 else None
        what = "query heads must be a multiple of key heads" if enable_gqa else "key must have as many heads as query"
        raise must(what, f"{query.shape[1]} query heads and {key.shape[1]} key heads", advice)


def check_masks(query: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """What must hold of the masks."""
    batch, _, n, _ = query.shape
    if key_padding_mask is not None:
        if key_padding_mask.dtype != torch.bool:
            raise must_be("key_padding_mask must be bool, True where a key takes no part", key_padding_mask.dtype)
        if tuple(key_padding_mask.shape) != (batch, n):
            raise must(f"key_padding_mask must have shape ({batch}, {n})", tuple(key_padding_mask.shape))
        if key_padding_mask.device != query.device:
            raise must(f"key_padding_mask must be on the query's device {query.device}", key_padding_mask.device)
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
            raise must(
                "cu_seqlens must be integers of shape (documents + 1,)", f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
            )
        if batch != 1:
            raise must("packed sequences must have batch size 1", batch, "Lay the sequences one after another along n.")
