"""Modules over the attention operation."""

from .adaptive.controls import fit_scorers
from .adaptive.module import (
    AdaptiveConfig,
    BlockSparseAdaptive,
    LearnedPattern,
    scorer_parameters,
    task_parameters,
)
from .adaptive.multihead import MultiheadBlockSparseAdaptive
from .adaptive.scorer import ImportanceScorer
from .attention import SparseAttention
from .block_sparse import BlockSparseHierarchical, BlockSparseRingDilatedAttention, BlockSparseTorchSparse
from .block_sparse_config import HierarchicalConfig, SparsePatternConfig
from .context_parallel import Ranks, RingDilatedAttention, set_process_group
from .dilated import DilatedAttention
from .factory import (
    create_adaptive_block_sparse,
    create_block_sparse_attention,
    create_dilated_attention,
    create_multihead_block_sparse,
    create_multihead_dilated_attention,
    get_block_sparse_preset,
)
from .kv_cache import KVCache
from .multihead import (
    BlockSparseRingMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    MultiheadSparseAttention,
    RingMultiheadDilatedAttention,
)
from .node_bounded import BlockSparseRingDistributedDilatedAttention
from .positional import Alibi, Position, Rotary, Xpos

# Names of the original library.
ImprovedDilatedAttention = DilatedAttention
ImprovedMultiheadDilatedAttention = MultiheadDilatedAttention

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
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "KVCache",
    "LearnedPattern",
    "MultiheadBlockSparseAdaptive",
    "MultiheadDilatedAttention",
    "MultiheadSparseAttention",
    "Position",
    "Ranks",
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
    "fit_scorers",
    "get_block_sparse_preset",
    "scorer_parameters",
    "set_process_group",
    "task_parameters",
]
