"""Names of the original library: renamed classes, and the replacement of every name that has none here."""

from __future__ import annotations

import warnings
from difflib import get_close_matches
from typing import Any

from . import nn

ImprovedDilatedAttention = nn.DilatedAttention
ImprovedMultiheadDilatedAttention = nn.MultiheadDilatedAttention

OLDER_NAMES = {
    "BlockSparseAttention": "BlockSparseRingDilatedAttention",
    "BlockSparseDilatedAttention": "BlockSparseRingDilatedAttention",
    "BlockSparseMultiheadAttention": "BlockSparseRingMultiheadDilatedAttention",
    "BlockSparseOptimized": "BlockSparseRingDilatedAttention",
    "DistributedImprovedDilatedAttention": "RingDilatedAttention",
    "DistributedMultiheadDilatedAttention": "RingMultiheadDilatedAttention",
    "RingDilatedAttentionProduction": "RingDilatedAttention",
    "RingDilatedAttentionV2": "RingDilatedAttention",
    "RingDilatedAttentionV2Collective": "RingDilatedAttention",
    "create_production_ring_attention": "RingDilatedAttention",
}
"""older name -> present name"""

_POOL = "torch's caching allocator serves every buffer; limit a call with memory_budget=, read dap.plan_cache.info()"
_RANKS = "RingMultiheadDilatedAttention(embed_dim, num_heads, segment_lengths, dilation_rates, process_group=group)"
_RING = "RingDilatedAttention(segment_lengths, dilation_rates, process_group=group)"
_PATTERN = "a pattern as a value or as text, for example parse('window:256 | global:4')"

REPLACED = {
    "AdaptiveMemoryPool": _POOL,
    "AdaptiveSparsityTrainer": "AdaptiveConfig(temperature=..., min_temperature=...): temperatures are parameters and "
    "train with the model; MultiheadBlockSparseAdaptive(..., return_pattern=True) returns the chosen blocks",
    "BucketedMemoryPool": _POOL,
    "DilatedAttentionConfig": "the arguments of DilatedAttention",
    "DistributedRingAttention": _RING,
    "DistributedSparsePattern": "DistributedSparseConfig(pattern_type='hierarchical'), or 'node_local'",
    "DynamicDilatedAttention": "DilatedAttention, which takes any length",
    "EnhancedMemoryPool": _POOL,
    "FragmentAwareMemoryPool": _POOL,
    "HilbertRingAttention": f"{_RING} with layout='zigzag'",
    "MemoryPool": _POOL,
    "MemoryPoolConfig": _POOL,
    "MemoryProfiler": "`dap plan`, or torch.cuda.memory_stats",
    "MemoryVisualizer": "`dap plan`, or torch.cuda.memory_stats",
    "MultiheadConfig": "the arguments of MultiheadDilatedAttention",
    "NUMAAwareMemoryPool": _POOL,
    "PatternConfig": _PATTERN,
    "PatternOptimizer": "BlockSparseAdaptive, which learns the blocks, or `dap tune` for given patterns",
    "PatternQualityAnalyzer": "make_plan(pattern, n, heads).density, `dap show` and `dap quality`",
    "PatternType": _PATTERN,
    "PersistentPatternCache": "dap.plan_cache, which caches the plans of every call",
    "RingAttentionConfig": _RING,
    "RingBlockSparseAttention": "BlockSparseRingDilatedAttention(segment_lengths, dilation_rates, sparsity_ratio=...); "
    "sparsity_ratio is the fraction kept",
    "RingDilatedAttentionCorrect": _RANKS,
    "RingDilatedAttentionSDPA": _RANKS,
    "RingDistributedDilatedAttention": _RANKS,
    "SimplifiedMemoryPool": _POOL,
    "SparseAttentionConfig": "SparsePatternConfig",
    "SparsePatternGenerator": "make_plan(pattern, n, heads).to_dense(), or Pattern.allows for single pairs",
    "StandardRingAttention": _RING,
    "UnifiedMemoryPool": _POOL,
    "create_adaptive_sparse_attention": "create_adaptive_block_sparse(base_sparsity=..., embed_dim=..., num_heads=...) "
    "with AdaptiveConfig(k_min=..., k_max=...)",
    "create_hierarchical_attention": "create_block_sparse_attention('hierarchical', hierarchical_config=...)",
    "create_ring_attention": _RING,
    "get_global_memory_pool": _POOL,
    "get_hierarchical_presets": "get_block_sparse_preset('hierarchical_standard') or HierarchicalConfig(...)",
    "register_attention": "register_pattern: a new pattern works in every class",
    "register_multihead_attention": "register_pattern: a new pattern works in every class",
}
"""name of the original library without a counterpart -> replacement"""


def older_name(name: str, public: list[str]) -> Any:
    """Present object of an older name, with a `DeprecationWarning`; an error for names close to `public` ones.

    A replaced name raises `ImportError`: `from package import name` discards the text of an `AttributeError`.
    """
    if name in REPLACED:
        raise ImportError(
            f"{name} of the original library is not available here; use {REPLACED[name]} (docs/migration.md)",
            name="dilated_attention_pytorch",
        )
    if name not in OLDER_NAMES:
        near = get_close_matches(name, public, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module 'dilated_attention_pytorch' has no attribute {name!r}{hint}")
    present = OLDER_NAMES[name]
    warnings.warn(f"{name} is now called {present}", DeprecationWarning, stacklevel=3)
    return getattr(nn, present)
