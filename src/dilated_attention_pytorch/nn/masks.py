"""torch.nn's masks, made into what the operation takes.

In `torch.nn.MultiheadAttention` a bool mask is True where a key is ignored, in `scaled_dot_product_attention` True
where it takes part, and a float mask is added to the scores. Here all become a key padding mask (True = ignore) or a
pattern; what can become neither raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import must, must_be
from ..ops.checks import require
from ..patterns import BlockLists, Causal, Full, Pattern

LONGEST_DENSE_MASK = 4096


def ignored(what: str, mask: Tensor) -> Tensor:
    """A bool mask, True where a key is ignored, from bool or from the floats 0 and -inf."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise must_be(f"{what} must be bool (True = ignore) or float (0 or -inf)", mask.dtype)
    hidden = mask == -torch.inf
    return require(
        hidden,
        (hidden | (mask == 0)).all(),
        f"a float {what} must hold 0 and -inf alone",
        lambda: "other values",
        'Scores take no added bias; for a bias by distance use position="alibi".',
    )


def check_causal(tensor: Tensor, attn_mask: Tensor, batch: int, heads: int, n: int) -> Tensor:
    """`tensor`, once `attn_mask` is known to be the causal mask; values stay on their device."""
    _check_shape(attn_mask, batch, heads, n)
    mask = ignored("attn_mask", attn_mask)
    causal = torch.ones(n, n, dtype=torch.bool, device=mask.device).triu(1)
    return require(
        tensor,
        (mask == causal).all(),
        "attn_mask given with is_causal=True must be the causal mask",
        lambda: "another",
        "Leave is_causal out.",
    )


def mask_pattern(attn_mask: Tensor, batch: int, heads: int, n: int) -> Pattern:
    """nn.MultiheadAttention's mask as a pattern: (n, n), or (batch * heads, n, n) alike in every sample."""
    if n > LONGEST_DENSE_MASK:
        raise must(
            f"a dense attn_mask must have n <= {LONGEST_DENSE_MASK}",
            n,
            'Say it as a pattern, for example SparseAttention("window:512 & causal"), or pass is_causal=True.',
        )
    _check_shape(attn_mask, batch, heads, n)
    mask = ignored("attn_mask", attn_mask)
    if mask.dim() == 3:
        each = mask.unflatten(0, (batch, heads))
        if not (each == each[:1]).all():
            raise must(
                "attn_mask must be the same for every sample of a batch",
                "different masks",
                "Use key_padding_mask for padding and cu_seqlens for packed sequences.",
            )
        mask = each[0, 0] if (each == each[:, :1]).all() else each[0]
    if not mask.any():
        return Full()
    if mask.dim() == 2 and torch.equal(mask, torch.ones_like(mask).triu(1)):
        return Causal()
    lists = (~mask).view(-1, n).cpu()
    pointers = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), lists.sum(1).cumsum(0)])
    columns = lists.nonzero()[:, 1]
    return BlockLists.from_csr(pointers.tolist(), columns.tolist(), n, len(lists) // n, block=1)


def _check_shape(attn_mask: Tensor, batch: int, heads: int, n: int) -> None:
    if attn_mask.shape not in ((n, n), (batch * heads, n, n)):
        raise must(f"attn_mask must have shape {(n, n)} or {(batch * heads, n, n)}", tuple(attn_mask.shape))
