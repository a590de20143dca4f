"""Masks of torch.nn as arguments of the operation.

In `torch.nn.MultiheadAttention` a bool mask is True where a key is ignored, in `scaled_dot_product_attention` True
where it takes part, and a float mask is added to the scores. A key padding mask becomes bool (True = ignore). An
attention mask becomes a pattern where it is one, otherwise a bias for dense attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import must, must_be
from ..ops.checks import require
from ..patterns import BlockLists, Causal, Full, Pattern

LONGEST_DENSE_MASK = 4096
AS_GOOD_AS_INF = -1e4
"""Values of a float padding mask from here down ignore a key: exp(-1e4) is 0 in every dtype."""


def ignored(what: str, mask: Tensor) -> Tensor:
    """A bool mask, True where a key is ignored, from bool or from floats that are 0 or at most -1e4."""
    check_dtype(what, mask)
    if mask.dtype == torch.bool:
        return mask
    hidden, is_exact = _hidden(mask)
    return require(
        hidden,
        is_exact,
        f"a float {what} must hold 0, and -inf or at most {AS_GOOD_AS_INF:g} where a key is ignored",
        lambda: "other values",
        'Pass a bias as attn_mask; for a bias by distance use position="alibi".',
    )


def _hidden(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Keys that a float mask ignores, and whether it is 0 for all others, a bool scalar."""
    hidden = mask <= AS_GOOD_AS_INF
    return hidden, (hidden | (mask == 0)).all()


def padding_mask(mask: Tensor, batch: int, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """A (B, M) padding mask as a bool mask or, if it adds other values than those of `ignored`, as a bias.

    While `torch.compile` traces or a CUDA graph is captured, values are unknown and `ignored` checks them.
    """
    check_dtype("key_padding_mask", mask)
    is_captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if mask.dtype == torch.bool or mask.is_meta or is_captured or torch.compiler.is_compiling():
        return ignored("key_padding_mask", mask), None
    hidden, is_exact = _hidden(mask)
    if is_exact:
        return hidden, None
    if tuple(mask.shape) != (batch, keys) or keys > LONGEST_DENSE_MASK:
        what = f"a float key_padding_mask with other values must have shape ({batch}, {min(keys, LONGEST_DENSE_MASK)})"
        raise must(what, tuple(mask.shape), "Pass 0, and -inf where a key is ignored, for any length.")
    return None, mask[:, None, None]


def check_dtype(what: str, mask: Tensor) -> None:
    """Refuse a mask that is neither bool nor float."""
    if not isinstance(mask, Tensor):
        raise must_be(f"{what} must be a Tensor", type(mask).__name__, "Pass is_causal= by its name.")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise must_be(f"{what} must be bool (True = ignore) or float (added to the scores)", mask.dtype)


def check_causal(tensor: Tensor, attn_mask: Tensor) -> Tensor:
    """`tensor`, once an (N, M) or (B * H, N, M) mask is known to be the causal one; values stay on their device."""
    mask = ignored("attn_mask", attn_mask)
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    return require(
        tensor,
        (mask == causal).all(),
        "attn_mask given with is_causal=True must be the causal mask",
        lambda: "another",
        "Leave is_causal out.",
    )


def check_mask(attn_mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> None:
    """Check length, dtype and shape of an attention mask."""
    check_dtype("attn_mask", attn_mask)
    if max(queries, keys) > LONGEST_DENSE_MASK:
        raise must(
            f"a dense attn_mask must have n <= {LONGEST_DENSE_MASK}",
            max(queries, keys),
            'Write it as a pattern, for example SparseAttention("window:512 & causal"), or pass is_causal=True.',
        )
    wanted = (queries, keys), (batch * heads, queries, keys)
    if tuple(attn_mask.shape) not in wanted:
        raise must(f"attn_mask must have shape {wanted[0]} or {wanted[1]}", tuple(attn_mask.shape))


def mask_pattern(attn_mask: Tensor, batch: int, heads: int) -> Pattern | None:
    """An attention mask as a pattern; None if it adds finite values, differs by sample or joins two lengths.

    While `torch.compile` traces and on the meta device, values are unknown and every mask is None.
    """
    n, is_unknown = attn_mask.shape[-1], torch.compiler.is_compiling() or attn_mask.is_meta
    if is_unknown or attn_mask.requires_grad or attn_mask.shape[-2] != n or not attn_mask.numel():
        return None
    mask = attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
    if mask is not attn_mask and not (mask | (attn_mask == 0)).all():
        return None
    if mask.dim() == 3:
        each = mask.unflatten(0, (batch, heads))
        if not (each == each[:1]).all():
            return None
        mask = each[0, 0] if (each == each[:, :1]).all() else each[0]
    if not mask.any():
        return Full()
    if mask.dim() == 2 and torch.equal(mask, torch.ones_like(mask).triu(1)):
        return Causal()
    lists = (~mask).view(-1, n).cpu()
    pointers = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), lists.sum(1).cumsum(0)])
    columns = lists.nonzero()[:, 1]
    return BlockLists.from_csr(pointers.tolist(), columns.tolist(), n, len(lists) // n, block=1)


def mask_bias(attn_mask: Tensor, batch: int, heads: int) -> Tensor:
    """An attention mask as a bias that broadcasts to (B, H, N, M)."""
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=torch.float32).masked_fill(attn_mask, -torch.inf)
    return attn_mask.unflatten(0, (batch, heads)) if attn_mask.dim() == 3 else attn_mask
