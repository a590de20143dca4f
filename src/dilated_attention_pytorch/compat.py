"""Names and keywords of the original library: renamed classes, and the replacement of all that has none here."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

Kind = TypeVar("Kind")

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

_CACHE = "leave it out: plans are cached, see plan_cache.info()"
_MEASURE = "use torch.profiler, and `dap plan` for memory"
_BLOCKS = "leave it out: the kernels skip every block that is not kept"
_BALANCE = "use layout='zigzag', which balances causal patterns"
_CHECKPOINT = "use torch.utils.checkpoint.checkpoint around the module"

REPLACED_KEYWORDS = {
    "adaptive_sparsity_rate": "use BlockSparseAdaptive, which learns the blocks",
    "attention_scale": "use softmax_scale=",
    "block_size": "leave it out: ranks fetch only rows they need; transfer={'receive_budget': bytes} bounds them",
    "cache_size": _CACHE,
    "compile_model": "use torch.compile(module)",
    "compression_ratio": "use gradient_compression_ratio=",
    "dropout": "use attention_dropout=",
    "enable_apex_optimization": "leave it out: no apex is needed",
    "enable_async_communication": "use transfer={'overlap': 'local'} of the module",
    "enable_batched_ops": "leave it out: all blocks of a call run at once",
    "enable_deepspeed_integration": "leave it out: DDP, FSDP2 and DeepSpeed take the module as it is",
    "enable_error_recovery": "use distributed.attempt and distributed.regroup",
    "enable_gradient_compression": "use gradient_compression_ratio=",
    "enable_load_balancing": _BALANCE,
    "enable_memory_pool": _POOL,
    "enable_pinned_memory": _POOL,
    "enable_profiling": _MEASURE,
    "lightweight_pool": _POOL,
    "load_balance_threshold": _BALANCE,
    "local_window_size": "use window_size=",
    "log_memory_usage": _MEASURE,
    "max_cached_buffers": _POOL,
    "memory_pool_size": _POOL,
    "memory_pool_threshold_mb": _POOL,
    "mixed_precision": "use torch.autocast, or tensors in bfloat16",
    "monitoring_interval": _MEASURE,
    "op": "use backend=, a name from backends()",
    "pattern_cache_size": _CACHE,
    "pattern_type": "use sparse_config=SparsePatternConfig(pattern_type=...)",
    "sparse_config": "use distributed_config=DistributedSparseConfig(...)",
    "sparse_threshold": _BLOCKS,
    "sparsity_ratio": "use distributed_config=DistributedSparseConfig(sparsity_ratio=...), or for learned blocks "
    "adaptive_config=AdaptiveConfig(base_sparsity=...), the fraction dropped",
    "sparsity_reg_weight": "leave it out: base_sparsity, k_min and k_max set the number of blocks",
    "use_checkpointing": _CHECKPOINT,
    "use_flash_attention": "use backend=, a name from backends()",
    "use_gradient_checkpointing": _CHECKPOINT,
    "use_memory_pool": _POOL,
    "use_pattern_cache": _CACHE,
    "use_sparse_backend": _BLOCKS,
    "use_tf32": "use torch.set_float32_matmul_precision",
}
"""keyword of the original library -> replacement, in classes that do not take it"""


def names_replacements(kind: type[Kind]) -> type[Kind]:
    """Class decorator: the error for an unknown keyword of the original library has its replacement."""
    construct: Callable[..., None] = kind.__init__

    @wraps(construct)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        try:
            construct(self, *args, **options)
        except TypeError as error:
            found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if found is None or found[1] not in options or found[1] not in REPLACED_KEYWORDS:
                raise
            first = f"{type(self).__name__}() has no keyword {found[1]!r} of the original library"
            raise TypeError(f"{first}; {REPLACED_KEYWORDS[found[1]]} (docs/migration.md)") from None

    kind.__init__ = checked
    return kind


def older_name(name: str, public: list[str]) -> str:
    """Present name of an older one, with a `DeprecationWarning`; an error for names close to `public` ones.

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
    return present
