"""Older names of what is here, in one table."""

from __future__ import annotations

import warnings
from typing import Any

from . import nn

ImprovedDilatedAttention = nn.DilatedAttention
ImprovedMultiheadDilatedAttention = nn.MultiheadDilatedAttention

OLDER_NAMES = {
    "BlockSparseAttention": "BlockSparseRingDilatedAttention",
    "BlockSparseDilatedAttention": "BlockSparseRingDilatedAttention",
    "BlockSparseMultiheadAttention": "BlockSparseRingMultiheadDilatedAttention",
    "BlockSparseOptimized": "BlockSparseRingDilatedAttention",
    "RingDilatedAttentionProduction": "RingDilatedAttention",
    "RingDilatedAttentionV2": "RingDilatedAttention",
    "RingDilatedAttentionV2Collective": "RingDilatedAttention",
}
"""older name -> present name"""


def older_name(name: str) -> Any:
    """What an older name stands for, with a warning that says the present one."""
    if name not in OLDER_NAMES:
        raise AttributeError(f"module 'dilated_attention_pytorch' has no attribute {name!r}")
    present = OLDER_NAMES[name]
    warnings.warn(f"{name} is now called {present}", DeprecationWarning, stacklevel=3)
    return getattr(nn, present)
