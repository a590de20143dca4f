"""What people build: modules over the one operation."""

from .adaptive import AdaptiveConfig, BlockSparseAdaptive, LearnedPattern
from .adaptive_multihead import MultiheadBlockSparseAdaptive
from .block_sparse import BlockSparseHierarchical, BlockSparseRingDilatedAttention, BlockSparseTorchSparse
from .cache import KVCache
from .config import HierarchicalConfig, SparsePatternConfig
from .core import SparseAttention
from .dilated import DilatedAttention
from .distributed import BlockSparseRingDistributedDilatedAttention
from .factory import (
    create_adaptive_block_sparse,
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
from .ring import Ranks, RingDilatedAttention, set_process_group
from .scorer import ImportanceScorer

__all__ = [
    "AdaptiveConfig",
    "Alibi",
    "BlockSparseAdaptive",
    "BlockSparseHierarchical",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingDistributedDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "BlockSparseTorchSparse",
    "DilatedAttention",
    "HierarchicalConfig",
    "ImportanceScorer",
    "KVCache",
    "LearnedPattern",
    "MultiheadBlockSparseAdaptive",
    "MultiheadDilatedAttention",
    "MultiheadSparseAttention",
    "Position",
    "Ranks",
    "Replacement",
    "RingDilatedAttention",
    "RingMultiheadDilatedAttention",
    "Rotary",
    "SparseAttention",
    "SparsePatternConfig",
    "Xpos",
    "create_adaptive_block_sparse",
    "create_block_sparse_attention",
    "create_dilated_attention",
    "create_multihead_block_sparse",
    "create_multihead_dilated_attention",
    "get_block_sparse_preset",
    "replace_attention",
    "set_process_group",
]
