"""Counter-based dropout: a weight is kept as a function of (seed, batch, head, query, key) alone.

Every backend, chunking and rank therefore drops the same weights. This file is the definition; kernels in other
languages repeat its 32-bit arithmetic and are tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def mix(x: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64 (the `lowbias32` finalizer: two odd multipliers, three xor-shifts)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def threshold(dropout_p: float) -> int:
    """Words below this are dropped."""
    return min(int(dropout_p * 2**32), WORD)


def keep_mask(seed: Tensor, batch_head: Tensor, query: Tensor, key: Tensor, dropout_p: float) -> Tensor:
    """Mask of the weights that are kept, bool, by broadcasting the arguments (all int64).

    `batch_head` is `batch * heads + head` with the query's head; `query` and `key` are row numbers in the sequence.
    """
    low, high = seed & WORD, (seed >> 32) & WORD
    stream = mix(low ^ mix((high + batch_head) & WORD))
    row = mix((stream + query) & WORD)
    return mix(row ^ ((key * GOLDEN) & WORD)) >= threshold(dropout_p)


def fresh_seed(device: torch.device) -> Tensor:
    """Seed, int64 [1], from torch's generator of the device, so that `torch.manual_seed` determines the mask."""
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device)


def shifted(seed: Tensor, streams: int) -> Tensor:
    """Seed whose stream `batch_head` equals stream `batch_head + streams` of the original seed."""
    high = ((seed >> 32) + streams) & WORD
    return (high << 32) | (seed & WORD)
