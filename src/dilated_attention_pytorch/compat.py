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
    "DistributedImprovedMultiheadDilatedAttention": "RingMultiheadDilatedAttention",
    "DistributedMultiheadDilatedAttention": "RingMultiheadDilatedAttention",
    "RingDilatedAttentionProduction": "RingDilatedAttention",
    "RingDilatedAttentionV2": "RingDilatedAttention",
    "RingDilatedAttentionV2Collective": "RingDilatedAttention",
    "create_production_ring_attention": "RingDilatedAttention",
}
"""older name -> present name"""

_POOL = "torch's caching allocator serves every buffer; limit a call with memory_budget=, read dap.plan_cache.info()"
_RING = "RingDilatedAttention(segment_lengths, dilation_rates, process_group=group)"
_HILBERT = f"{_RING} with layout='zigzag' over ranks, DilatedAttention on one device"

_BY_REPLACEMENT = {
    "`dap doctor`, which lists the backends of a machine": """
        flash_attention_forward get_flash_attention_support get_flash_attention_version get_gpu_compute_capability
        get_gpu_info get_optimal_dtype GPU_TYPE HAS_APEX HAS_DEEPSPEED HAS_FAIRSCALE HAS_FLASH_ATTN HAS_FLASH_ATTN_3
        HAS_FLASH_RING HAS_SDPA HAS_SDPA_KERNEL HAS_XFORMERS is_flash_attention_3_available select_attention_backend
    """,
    _POOL: """
        AdaptiveMemoryPool AttentionBufferManager BucketConfig BucketedMemoryPool BufferConfig BufferType
        create_attention_buffer_manager EnhancedMemoryPool FragmentationStats FragmentAwareMemoryPool
        get_enhanced_memory_pool get_global_memory_pool get_numa_aware_pool MemoryBlock MemoryBucket MemoryPool
        MemoryPoolConfig NUMAAwareMemoryPool NUMANode NUMATopologyDetector reset_global_memory_pool reset_numa_pool
        SimplifiedMemoryPool UnifiedMemoryPool
    """,
    _HILBERT: """
        create_hilbert_mapping HilbertAttention HilbertAttentionCore HilbertRingAttention
        RingDilatedAttentionHilbertCore RingDilatedAttentionHilbertGPUOptimized
        RingDilatedAttentionHilbertOptimizedFixed RingDilatedAttentionHilbertProper UnifiedHilbertAttention
    """,
    _RING: """
        AsyncRingCommunicator create_ring_attention create_ring_config create_standardized_ring_attention
        DistributedRingAttention get_preset_config HeadParallelDilatedAttention HeadParallelDilatedAttentionOptimized
        memory_efficient_ring_attention RingAttentionConfig RingAttentionFunction RingAttentionWrapper
        RingCommunicationMixin RingDilatedAttentionFixedSimple RingDilatedAttentionHybrid
        RingDilatedAttentionHybridOptimizedV2 RingDilatedAttentionMemoryEfficient RingDilatedAttentionV3
        StandardizedRingConfig StandardRingAttention
    """,
    "DilatedAttention, which takes any length; `dap tune` measures segments": """
        create_dynamic_dilated_attention DynamicDilatedAttention DynamicSegmentSelector HardwareAnalyzer
        MemoryEstimator SegmentSelectionConfig SequenceAnalyzer
    """,
    "dap.plan_cache, which caches the plans of every call": """
        DilatedPatternCache get_global_pattern_cache get_optimized_pattern_cache OptimizedPatternCache PatternCache
        PersistentPatternCache
    """,
    "attention(query, key, value, pattern), with bias=distance_bias(...) or position= of a module": """
        apply_dilated_attention_pattern compute_alibi_bias compute_attention_scores optimize_attention_computation
        standard_attention
    """,
    "RingMultiheadDilatedAttention(embed_dim, num_heads, segment_lengths, dilation_rates, process_group=group)": """
        EnterpriseDistributedDilatedAttention RingDilatedAttentionCorrect RingDilatedAttentionSDPA
        RingDistributedDilatedAttention RingMultiheadDilatedAttentionHybrid
    """,
    "a pattern as a value or as text, for example parse('window:256 | global:4')": """
        create_block_diagonal_mask create_dilated_mask PatternConfig PatternType
    """,
    "torch.nn.Module and a call of attention(); register_pattern adds a pattern to every class": """
        BaseDilatedAttention BaseMultiheadDilatedAttention ValidationMixin
    """,
    "dap.plan_cache.clear()": "clear_global_cache clear_optimized_cache",
    "position='rotary' of a multihead module": "apply_rotary_embeddings compute_rotary_embeddings",
    "`dap plan`, or torch.cuda.memory_stats": """
        AllocationEvent get_memory_profiler MemoryProfiler MemorySnapshot MemoryVisualizer profile_memory
        reset_memory_profiler
    """,
    "register_pattern: a new pattern works in every class": "register_attention register_multihead_attention",
    "Tensor.unflatten and Tensor.flatten": "merge_attention_heads split_attention_heads",
    "merge, and context_parallel_attention": "all_ring_pass StableRingAccumulator",
    "AdaptiveConfig(temperature=..., min_temperature=...): temperatures are parameters and train with the model; "
    "MultiheadBlockSparseAdaptive(..., return_pattern=True) returns the chosen blocks": "AdaptiveSparsityTrainer",
    "make_plan(pattern, n, heads).density": "analyze_pattern_statistics",
    "create_adaptive_block_sparse(base_sparsity=..., embed_dim=..., num_heads=...) "
    "with AdaptiveConfig(k_min=..., k_max=...)": "create_adaptive_sparse_attention",
    "create_block_sparse_attention('hierarchical', hierarchical_config=...)": "create_hierarchical_attention",
    "the arguments of DilatedAttention": "DilatedAttentionConfig",
    "process_group=, layout= and transfer= of the ring classes": "DistributedConfig",
    "DistributedSparseConfig(pattern_type='hierarchical'), or 'node_local'": "DistributedSparsePattern",
    "MultiheadDilatedAttention, which takes any length": "DynamicMultiheadDilatedAttention",
    "get_block_sparse_preset('hierarchical_standard') or HierarchicalConfig(...)": "get_hierarchical_presets",
    "DistributedSparseConfig(pattern_type='hierarchical')": "HierarchicalSparsePatternGenerator",
    "DilatedAttention": "ImprovedDilatedAttentionV2",
    "the arguments of MultiheadDilatedAttention": "MultiheadConfig",
    "BlockSparseAdaptive, which learns the blocks, or `dap tune` for given patterns": "PatternOptimizer",
    "make_plan(pattern, n, heads).density, `dap show` and `dap quality`": "PatternQualityAnalyzer",
    "make_plan(pattern, n, heads).picture(), or `dap show`": "PatternVisualizer",
    "BlockSparseRingDilatedAttention(segment_lengths, dilation_rates, sparsity_ratio=...); "
    "sparsity_ratio is the fraction kept": "BlockSparseRingAttention RingBlockSparseAttention",
    "SparsePatternConfig": "SparseAttentionConfig",
    "make_plan(pattern, n, heads).to_dense(), or Pattern.allows for single pairs": "SparsePatternGenerator",
    "shard_sequence": "split_by_rank",
}
"""replacement -> names of the original library without a counterpart"""

REPLACED = {name: replacement for replacement, names in _BY_REPLACEMENT.items() for name in names.split()}
"""name of the original library without a counterpart -> replacement"""

OLDER_MODULES = re.compile(
    r"attention_utils|base|core|dilated_attention|long_net|memory_pool|models\.(long_net|transformer)|ring|sparse|"
    r"transformer|utils|(block_sparse|distributed|dynamic|head_parallel|improved|multihead|ring|sparse_pattern)_\w+|"
    r"(kernels\.)?hilbert_\w+"
)
"""Names of the original library's modules"""

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

REPLACED_METHODS = {
    "get_memory_estimate": "use `dap plan`",
    "get_memory_info": _MEASURE,
    "get_optimization_stats": "use get_pattern_stats()",
    "get_sparsity_loss": "leave it out: base_sparsity, k_min and k_max set the number of blocks",
}
"""method of the original library's modules -> replacement"""


def _refusing(name: str) -> Callable[..., None]:
    def refuse(self: Any, *args: Any, **options: Any) -> None:
        first = f"{type(self).__name__} has no method {name!r} of the original library"
        raise AttributeError(f"{first}; {REPLACED_METHODS[name]} (docs/migration.md)")

    return refuse


def names_replacements(kind: type[Kind]) -> type[Kind]:
    """Class decorator: errors for other keywords and methods of the original library name the replacement."""
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
    if hasattr(kind, "forward"):
        for name in REPLACED_METHODS:
            setattr(kind, name, _refusing(name))
    return kind


def refuse_module(name: str) -> None:
    """Raise for a module of the original library, given by its name inside the package.

    The error names the package: `from package import name` discards an error that names the module.
    """
    if OLDER_MODULES.fullmatch(name):
        package = __package__ or ""
        raise ModuleNotFoundError(
            f"the original library's module {name} is not available here; import its names from {package} itself "
            "(docs/migration.md)",
            name=package,
        )


def older_name(name: str, public: list[str]) -> str:
    """Present name of an older one, with a `DeprecationWarning`; an error for names close to `public` ones.

    A replaced name raises `ImportError`: `from package import name` discards the text of an `AttributeError`.
    """
    if replacement := REPLACED.get(name) or (_HILBERT if "hilbert" in name.lower() else None):
        raise ImportError(
            f"{name} of the original library is not available here; use {replacement} (docs/migration.md)",
            name="dilated_attention_pytorch",
        )
    if name not in OLDER_NAMES:
        near = get_close_matches(name, public, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module 'dilated_attention_pytorch' has no attribute {name!r}{hint}")
    present = OLDER_NAMES[name]
    warnings.warn(f"{name} is now called {present}", DeprecationWarning, stacklevel=3)
    return present
