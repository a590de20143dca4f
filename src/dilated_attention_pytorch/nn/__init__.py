"""What people build: modules over the one operation."""

from .block_sparse import BlockSparseHierarchical, BlockSparseRingDilatedAttention, BlockSparseTorchSparse
from .cache import KVCache
from .config import HierarchicalConfig, SparsePatternConfig
from .core import SparseAttention
from .dilated import DilatedAttention, RingDilatedAttention
from .factory import (
    create_block_sparse_attention,
    create_dilated_attention,
    create_multihead_block_sparse,
    create_multihead_dilated_attention,
    get_block_sparse_preset,
)
from .multihead import (
    BlockSparseRingMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    MultiheadSparseAttention,
    RingMultiheadDilatedAttention,
)
from .position import Alibi, Position, Rotary, Xpos
from .replace import Replacement, replace_attention

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
    "Replacement",
    "RingDilatedAttention",
    "RingMultiheadDilatedAttention",
    "Rotary",
    "SparseAttention",
    "SparsePatternConfig",
    "Xpos",
    "create_block_sparse_attention",
    "create_dilated_attention",
    "create_multihead_block_sparse",
    "create_multihead_dilated_attention",
    "get_block_sparse_preset",
    "replace_attention",
]
