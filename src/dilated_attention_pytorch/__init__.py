"""Exact, fast, sparse attention for sequences of thousands to a billion tokens.

>>> import dilated_attention_pytorch as dap
>>> dap.make_plan(dap.parse("dilated:2048x1,8192x4 & causal"), n=65536, heads=8).blocks
43520
"""

from .compat import ImprovedDilatedAttention, ImprovedMultiheadDilatedAttention, older_name
from .errors import BackendUnsupported
from .kernels.registry import MODULES, reproducible_gradients
from .nn import (
    Alibi,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    BlockSparseTorchSparse,
    DilatedAttention,
    HierarchicalConfig,
    KVCache,
    MultiheadDilatedAttention,
    MultiheadSparseAttention,
    Position,
    Replacement,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
    Rotary,
    SparseAttention,
    SparsePatternConfig,
    Xpos,
    create_block_sparse_attention,
    create_dilated_attention,
    create_multihead_block_sparse,
    create_multihead_dilated_attention,
    get_block_sparse_preset,
    replace_attention,
)
from .ops import AttentionOutput, attention, attention_rows, attention_with_lse, merge, plan_cache
from .ops.decode import attention_step
from .patterns import (
    BlockDilated,
    BlockLists,
    Causal,
    Dilated,
    Documents,
    Full,
    Global,
    Hierarchical,
    Packed,
    Pattern,
    PerHead,
    Random,
    SlidingWindow,
    Strided,
    parse,
)
from .plan import Plan, PlanCache, make_plan

__version__ = "0.1.0"


def backends() -> tuple[str, ...]:
    """Names for `backend=`, besides "auto"."""
    return tuple(MODULES)


def __getattr__(name: str) -> object:
    return older_name(name)


__all__ = [
    "Alibi",
    "AttentionOutput",
    "BackendUnsupported",
    "BlockDilated",
    "BlockLists",
    "BlockSparseHierarchical",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "BlockSparseTorchSparse",
    "Causal",
    "Dilated",
    "DilatedAttention",
    "Documents",
    "Full",
    "Global",
    "Hierarchical",
    "HierarchicalConfig",
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "KVCache",
    "MultiheadDilatedAttention",
    "MultiheadSparseAttention",
    "Packed",
    "Pattern",
    "PerHead",
    "Plan",
    "PlanCache",
    "Position",
    "Random",
    "Replacement",
    "RingDilatedAttention",
    "RingMultiheadDilatedAttention",
    "Rotary",
    "SlidingWindow",
    "SparseAttention",
    "SparsePatternConfig",
    "Strided",
    "Xpos",
    "attention",
    "attention_rows",
    "attention_step",
    "attention_with_lse",
    "backends",
    "create_block_sparse_attention",
    "create_dilated_attention",
    "create_multihead_block_sparse",
    "create_multihead_dilated_attention",
    "get_block_sparse_preset",
    "make_plan",
    "merge",
    "parse",
    "plan_cache",
    "replace_attention",
    "reproducible_gradients",
]
