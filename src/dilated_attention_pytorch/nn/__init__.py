"""What people build: modules over the one operation."""

from .block_sparse import BlockSparseHierarchical, BlockSparseRingDilatedAttention, BlockSparseTorchSparse
from .cache import KVCache
from .config import HierarchicalConfig, SparsePatternConfig
from .core import SparseAttention
from .dilated import DilatedAttention, RingDilatedAttention
from .multihead import (
    BlockSparseRingMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    MultiheadSparseAttention,
    RingMultiheadDilatedAttention,
)
from .position import Alibi, Position, Rotary, Xpos

__all__ = [
    "Alibi",
    "BlockSparseHierarchical",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "BlockSparseTorchSparse",
    "DilatedAttention",
    "HierarchicalConfig",
    "KVCache",
    "MultiheadDilatedAttention",
    "MultiheadSparseAttention",
    "Position",
    "RingDilatedAttention",
    "RingMultiheadDilatedAttention",
    "Rotary",
    "SparseAttention",
    "SparsePatternConfig",
    "Xpos",
]
