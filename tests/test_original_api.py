"""Every public name and documented call of the original library: it works, or an error names the replacement."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from processes import start
from torch.nn import functional as F

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import compat


def names(text: str) -> list[str]:
    return text.split()


EXPORTED = names("""
BlockSparseRingDilatedAttention BlockSparseRingDistributedDilatedAttention BlockSparseRingMultiheadDilatedAttention
BlockSparseAdaptive AdaptiveConfig ImportanceScorer AdaptiveSparsityTrainer create_block_sparse_attention
get_block_sparse_preset create_adaptive_block_sparse create_multihead_block_sparse RingDilatedAttention
RingAttentionConfig create_production_ring_attention DilatedAttention MultiheadDilatedAttention ImprovedDilatedAttention
ImprovedMultiheadDilatedAttention DilatedTransformerEncoderLayer DilatedTransformerDecoderLayer LongNet LongNetLM
DistributedSparseConfig DistributedSparsePattern PatternConfig PatternOptimizer PatternQualityAnalyzer PatternType
SparsePatternConfig SparsePatternGenerator create_dilated_attention create_multihead_dilated_attention
create_adaptive_sparse_attention BlockSparseHierarchical
""")
"""`__all__` of both lines of the original library."""
EXPORTED_LATER = names("""
RingDilatedAttentionHilbertGPUOptimized EnterpriseDistributedDilatedAttention DynamicMultiheadDilatedAttention
create_dynamic_dilated_attention DynamicSegmentSelector SegmentSelectionConfig
DistributedImprovedMultiheadDilatedAttention HAS_FLASH_RING
""")
"""`__all__` at other commits, and a constant beside it."""
TESTED = names("""
BaseDilatedAttention BaseMultiheadDilatedAttention DistributedConfig ValidationMixin PatternCache DilatedPatternCache
OptimizedPatternCache get_global_pattern_cache clear_global_cache get_optimized_pattern_cache clear_optimized_cache
reset_global_memory_pool get_enhanced_memory_pool compute_attention_scores apply_dilated_attention_pattern
create_dilated_mask create_block_diagonal_mask optimize_attention_computation standard_attention compute_alibi_bias
compute_rotary_embeddings apply_rotary_embeddings merge_attention_heads split_attention_heads HAS_SDPA HAS_SDPA_KERNEL
HAS_FLASH_ATTN HAS_FLASH_ATTN_3 HAS_XFORMERS HAS_DEEPSPEED HAS_FAIRSCALE HAS_APEX GPU_TYPE RingAttentionWrapper
RingDilatedAttentionV3 RingDilatedAttentionMemoryEfficient RingDilatedAttentionFixedSimple RingDilatedAttentionHybrid
RingMultiheadDilatedAttentionHybrid RingDilatedAttentionHilbertCore RingDilatedAttentionHilbertOptimizedFixed
RingDilatedAttentionHilbertProper all_ring_pass split_by_rank RingAttentionFunction StableRingAccumulator
memory_efficient_ring_attention HilbertAttention HilbertAttentionCore UnifiedHilbertAttention create_hilbert_mapping
HierarchicalSparsePatternGenerator PatternVisualizer analyze_pattern_statistics get_flash_attention_support
select_attention_backend flash_attention_forward get_gpu_info get_optimal_dtype get_flash_attention_version
is_flash_attention_3_available MemoryEstimator HardwareAnalyzer SequenceAnalyzer ImprovedDilatedAttentionV2
AttentionBufferManager BufferConfig BufferType create_attention_buffer_manager NUMANode NUMATopologyDetector
get_numa_aware_pool reset_numa_pool FragmentationStats MemoryBlock BucketConfig MemoryBucket AllocationEvent
MemorySnapshot get_memory_profiler reset_memory_profiler profile_memory RingCommunicationMixin AsyncRingCommunicator
BlockSparseRingAttention get_gpu_compute_capability
""")
"""Names that its tests import from submodules."""
DOCUMENTED = names("""
RingDilatedAttentionProduction PersistentPatternCache register_attention register_multihead_attention
DilatedAttentionConfig MultiheadConfig SparseAttentionConfig UnifiedMemoryPool SimplifiedMemoryPool EnhancedMemoryPool
BucketedMemoryPool FragmentAwareMemoryPool NUMAAwareMemoryPool AdaptiveMemoryPool MemoryPool MemoryPoolConfig
MemoryProfiler MemoryVisualizer get_global_memory_pool RingDilatedAttentionV2 RingDilatedAttentionV2Collective
RingMultiheadDilatedAttention BlockSparseOptimized BlockSparseTorchSparse HierarchicalConfig
create_hierarchical_attention get_hierarchical_presets DistributedImprovedDilatedAttention
DistributedMultiheadDilatedAttention RingDistributedDilatedAttention BlockSparseAttention BlockSparseMultiheadAttention
BlockSparseDilatedAttention StandardRingAttention DistributedRingAttention HilbertRingAttention RingBlockSparseAttention
RingDilatedAttentionCorrect RingDilatedAttentionSDPA create_ring_attention DynamicDilatedAttention
StandardizedRingConfig create_standardized_ring_attention create_ring_config get_preset_config
HeadParallelDilatedAttention HeadParallelDilatedAttentionOptimized RingDilatedAttentionHybridOptimizedV2
""")
NAMES = [*EXPORTED, *EXPORTED_LATER, *DOCUMENTED, *TESTED]
MIGRATION = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()


@pytest.mark.filterwarnings("ignore:.* is now called:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_original_names_work_or_name_a_replacement(name):
    assert re.search(rf"^\|[^|]*`{name}[`(]", MIGRATION, re.MULTILINE), "no row in docs/migration.md"
    if name not in compat.REPLACED:
        assert callable(getattr(dap, name))
        return
    with pytest.raises(ImportError, match=rf"^{name} of the original library .*; use .* \(docs/migration.md\)$"):
        exec(f"from dilated_attention_pytorch import {name}", {})
    with pytest.raises(ImportError, match=name):
        getattr(dap, name)


def test_replaced_names_are_those_of_the_original():
    assert compat.REPLACED.keys() | compat.OLDER_NAMES.keys() <= {*NAMES}
    assert not {*compat.REPLACED, *compat.OLDER_NAMES} & {*dap.__all__}


@pytest.mark.parametrize(
    "statement",
    [
        "from dilated_attention_pytorch.dilated_attention import DilatedAttention",
        "from dilated_attention_pytorch.long_net import LongNet",
        "from dilated_attention_pytorch.core.factory import create_dilated_attention",
        "from dilated_attention_pytorch import core",
        "from dilated_attention_pytorch.head_parallel_dilated_attention import HeadParallelDilatedAttention",
        "import dilated_attention_pytorch.models.long_net",
        "from dilated_attention_pytorch.kernels.hilbert_attention_core import HilbertAttentionCore",
    ],
)
def test_original_modules_name_the_package(statement):
    with pytest.raises(ModuleNotFoundError, match=r"module .* is not available here; import its names from dilated_"):
        exec(statement, {})


def test_original_modules_are_no_attributes():
    assert not hasattr(dap, "core") and not hasattr(dap, "ring_attention")
    with pytest.raises(AttributeError, match="the original library's module core is not available here"):
        _ = dap.core


def test_other_missing_modules_keep_python_s_error():
    assert find_spec("dilated_attention_pytorch.nothing") is None
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'dilated_attention_pytorch\.nothing'$"):
        exec("import dilated_attention_pytorch.nothing", {})
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from dilated_attention_pytorch import nothing", {})
    with pytest.raises(ImportError, match=r"AnyHilbertAttention of the original library .* use RingDilatedAttention"):
        _ = dap.AnyHilbertAttention


def test_a_misspelled_name_leads_to_the_closest_one():
    with pytest.raises(AttributeError, match="no attribute 'SlidngWindow'; did you mean 'SlidingWindow'"):
        _ = dap.SlidngWindow


def test_replacements_exist():
    words = set(
        re.findall(r"(?<![.\w])(?:[A-Z]\w+[a-z]\w*|[a-z]+(?:_[a-z]+)+)(?=\()", " ".join(compat.REPLACED.values()))
    )
    assert words and not [word for word in words if not hasattr(dap, word)]


@pytest.mark.parametrize(
    "kind", ["auto", "standard", "improved", "ring", "distributed", "block_sparse", "block_sparse_ring"]
)
def test_factories_take_attention_type_and_its_kinds(kind):
    branches = {"segment_lengths": [64, 128], "dilation_rates": [1, 2]}
    core = dap.create_dilated_attention(attention_type=kind, **branches)
    assert core(*torch.randn(3, 1, 100, 4, 8).unbind()).shape == (1, 100, 4, 8)
    x = torch.randn(1, 100, 32)
    layer = dap.create_multihead_dilated_attention(attention_type=kind, embed_dim=32, num_heads=4, **branches)
    assert layer(x, x, x)[0].shape == x.shape
    assert type(dap.create_dilated_attention(kind, **branches)) is type(core)
    with pytest.raises(ValueError, match="without attention_type"):
        dap.create_dilated_attention("ring", attention_type=kind, **branches)


def test_block_sparse_modules_return_attention_weights():
    attention = dap.BlockSparseRingDilatedAttention([64], [1], sparsity_ratio=0.5, block_size=16)
    q, k, v = torch.randn(3, 1, 100, 4, 8).unbind()
    output, weights = attention(q, k, v, is_causal=True, return_attention_weights=True)
    assert torch.allclose((weights @ v.transpose(1, 2)).transpose(1, 2), output, atol=1e-5)
    assert torch.equal(output, attention(q, k, v, is_causal=True, return_attention_weights=False))


def test_weights_have_the_name_of_the_module_s_kind():
    x, rows = torch.randn(1, 20, 32), torch.randn(3, 1, 20, 4, 8).unbind()
    distributed = dap.BlockSparseRingDistributedDilatedAttention(32, 4, [64], [1])
    with pytest.raises(
        TypeError, match="'return_attention_weights'; the argument of a multihead module is need_weights"
    ):
        distributed(x, x, x, return_attention_weights=True)
    assert distributed(x, x, x, need_weights=True)[1].shape == (1, 20, 20)
    with pytest.raises(
        TypeError, match=r"'need_weights'; the argument of a module without proj.* is return_attention_w"
    ):
        dap.DilatedAttention([64], [1])(*rows, need_weights=True)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("BlockSparseAdaptive", "get_sparsity_loss"),
        ("BlockSparseRingDilatedAttention", "get_optimization_stats"),
        ("RingDilatedAttention", "get_memory_estimate"),
        ("RingDilatedAttention", "get_memory_info"),
    ],
)
def test_original_methods_name_a_replacement(name, method):
    module = getattr(dap, name)(**LADDER, **({"num_heads": 4, "head_dim": 8} if "Adaptive" in name else {}))
    with pytest.raises(AttributeError, match=rf"{name} has no method '{method}' .*; .* \(docs/migration.md\)$"):
        getattr(module, method)()
    assert f"`{method}()`" in MIGRATION, "no row in docs/migration.md"


@pytest.mark.parametrize("activation", [F.relu, F.gelu, F.silu])
def test_longnet_takes_an_activation_as_the_original_does(activation):
    sizes = {"d_model": 32, "nhead": 4, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 64}
    models = [dap.LongNet(**sizes, **LADDER, activation=act) for act in (activation, activation.__name__)]
    assert models[0].config == models[1].config and models[0].config.activation == activation.__name__
    with pytest.raises(ValueError, match="activation must be one of relu, gelu, silu, got <"):
        dap.LongNet(**sizes, **LADDER, activation=torch.tanh)


@pytest.mark.untyped
def test_causality_by_position_names_the_keyword():
    """The original modules took it second or third, where torch's modules have masks."""
    sizes = {"d_model": 32, "nhead": 4, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 64}
    model = dap.LongNetLM(num_tokens=40, **sizes, **LADDER)
    x, tokens = torch.randn(1, 20, 32), torch.randint(40, (1, 20))
    encoder = dap.DilatedTransformerEncoderLayer(32, 4, **LADDER)
    decoder = dap.DilatedTransformerDecoderLayer(32, 4, **LADDER)
    calls = [lambda: model(tokens, False), lambda: model.long_net(x, True), lambda: encoder(x, True)]
    for call in [*calls, lambda: decoder(x, x, True, True), lambda: encoder.self_attn(x, x, x, True)]:
        with pytest.raises(TypeError, match=r"must be a Tensor.*, got bool\nPass is_causal= by its name"):
            call()


def test_longnet_of_two_stacks_takes_one_input():
    sizes = {"d_model": 32, "nhead": 4, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 64}
    ladder = {"segment_lengths": [16, 32], "dilation_rates": [1, 2]}
    x = torch.randn(2, 50, 32)
    assert dap.LongNet(**sizes, **ladder)(x).shape == x.shape
    assert dap.LongNet(**sizes, **ladder)(x, is_causal=False).shape == x.shape
    assert dap.LongNetLM(num_tokens=40, **sizes, **ladder)(torch.randint(40, (2, 50))).shape == (2, 50, 40)


LADDER = {"segment_lengths": [64, 128], "dilation_rates": [1, 2]}
HEADS = {"embed_dim": 32, "num_heads": 4}
POOL = "enable_memory_pool enable_profiling lightweight_pool"
RING = "use_gradient_checkpointing use_memory_pool memory_pool_size enable_error_recovery mixed_precision "
RING += "log_memory_usage attention_scale use_tf32 block_size use_checkpointing use_pattern_cache "
RING += "memory_pool_threshold_mb max_cached_buffers"
BLOCKS = "enable_batched_ops cache_size use_sparse_backend sparse_threshold use_tf32"
CONFIG = "compression_ratio load_balance_threshold adaptive_sparsity_rate enable_async_communication "
CONFIG += "enable_gradient_compression enable_load_balancing enable_memory_pool enable_pinned_memory"
KEYWORDS = {
    "DilatedAttention": (LADDER, f"op use_tf32 {POOL}"),
    "ImprovedMultiheadDilatedAttention": (HEADS | LADDER, "op use_tf32 enable_memory_pool enable_profiling"),
    "RingDilatedAttention": (LADDER, f"{RING} {POOL}"),
    "RingMultiheadDilatedAttention": (
        HEADS | LADDER,
        "block_size use_checkpointing use_tf32 use_flash_attention compile_model",
    ),
    "BlockSparseRingDilatedAttention": (LADDER, f"{BLOCKS} dropout {POOL}"),
    "BlockSparseRingMultiheadDilatedAttention": (HEADS | LADDER, f"{BLOCKS} pattern_cache_size {POOL}"),
    "BlockSparseRingDistributedDilatedAttention": (
        HEADS | LADDER,
        "enable_deepspeed_integration enable_apex_optimization monitoring_interval sparsity_ratio sparse_config",
    ),
    "BlockSparseAdaptive": (LADDER | {"num_heads": 4, "head_dim": 8}, f"{BLOCKS} dropout sparsity_ratio {POOL}"),
    "create_block_sparse_attention": ({}, "pattern_type enable_memory_pool"),
    "SparsePatternConfig": ({}, "local_window_size"),
    "DistributedSparseConfig": ({}, CONFIG),
    "AdaptiveConfig": ({}, "sparsity_reg_weight"),
}
"""class of the original library -> arguments, keywords it had that no class here takes"""


def write_error(name, arguments, keyword, file):
    """Write the error of a call, in a process without the run-time checker."""
    with pytest.raises(TypeError) as error:
        getattr(dap, name)(**arguments, **{keyword: 1})
    file.write_text(str(error.value))
    return 0


@pytest.mark.parametrize(
    ("name", "keyword"), [(n, word) for n, (_, words) in KEYWORDS.items() for word in names(words)]
)
def test_original_keywords_name_a_replacement(name, keyword, tmp_path):
    make, (arguments, _) = getattr(dap, name), KEYWORDS[name]
    if is_dataclass(make):
        # Where shapes are checked at run time, the checker binds the arguments of a dataclass before it does.
        process = start(write_error, name, arguments, keyword, tmp_path / "error")
        process.join()
        assert process.exitcode == 0
        text = (tmp_path / "error").read_text()
    else:
        with pytest.raises(TypeError) as error:
            make(**arguments, **{keyword: 1})
        text = str(error.value)
    replacement = re.escape(compat.REPLACED_KEYWORDS[keyword])
    assert re.search(rf"no keyword '{keyword}' .*; {replacement} \(docs/migration.md\)$", text.strip()), text
    assert f"`{keyword}=" in MIGRATION, "no row in docs/migration.md"


def test_keywords_in_the_table_are_those_of_the_original():
    assert {*compat.REPLACED_KEYWORDS} == {word for _, words in KEYWORDS.values() for word in names(words)}


@pytest.mark.parametrize("kind", ["DilatedAttention", "MultiheadDilatedAttention"])
def test_attention_mask_of_a_call_names_key_padding_mask(kind):
    module = getattr(dap, kind)(**(LADDER if kind == "DilatedAttention" else HEADS | LADDER))
    rows = torch.randn(3, 1, 8, 4, 8) if kind == "DilatedAttention" else torch.randn(3, 1, 8, 32)
    with pytest.raises(TypeError, match=rf"{kind}.forward\(\) got .* 'attention_mask'; padding goes into key_padding"):
        module(*rows, attention_mask=None)


def test_other_wrong_keywords_keep_python_s_error():
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'segments'"):
        dap.DilatedAttention([64], [1], segments=3)
