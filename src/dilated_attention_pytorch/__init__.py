"""Exact, fast, sparse attention for sequences of thousands to a billion tokens.

>>> import dilated_attention_pytorch as dap
>>> dap.make_plan(dap.parse("dilated:2048x1,8192x4 & causal"), n=65536, heads=8).blocks
43520
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

__version__ = "0.2.0"

_MODULES = {
    "BackendUnsupported": "errors",
    "BlockColumns": "patterns",
    "BlockDilated": "patterns",
    "BlockLists": "patterns",
    "Causal": "patterns",
    "Dilated": "patterns",
    "Documents": "patterns",
    "Full": "patterns",
    "Global": "patterns",
    "Grid": "patterns",
    "Hierarchical": "patterns",
    "Packed": "patterns",
    "Pattern": "patterns",
    "PerHead": "patterns",
    "Random": "patterns",
    "SlidingWindow": "patterns",
    "Strided": "patterns",
    "parse": "patterns",
    "register_pattern": "patterns",
    "Plan": "plan",
    "PlanCache": "plan",
    "make_plan": "plan",
    "reproducible_gradients": "kernels.call",
    "AttentionOutput": "ops",
    "attention": "ops",
    "attention_rows": "ops",
    "attention_with_lse": "ops",
    "merge": "ops",
    "plan_cache": "ops",
    "attention_step": "ops.decode",
    "distance_bias": "ops.bias",
    "t5_bias": "ops.bias",
    "explain": "ops.explain",
    "streamed_attention": "ops.streaming.stream",
    "varlen_attention": "ops.varlen",
    "DistillBatch": "selection.types",
    "Selection": "selection.types",
    "selected_attention": "selection.attention",
    "make_selection": "selection.indices",
    "validate_cu_seqlens": "ops.checks",
    "validate_indices": "selection.indices",
    "select_blocks": "selection.selectors",
    "AdaptiveConfig": "nn",
    "Alibi": "nn",
    "BlockSparseAdaptive": "nn",
    "BlockSparseHierarchical": "nn",
    "BlockSparseRingDilatedAttention": "nn",
    "BlockSparseRingDistributedDilatedAttention": "nn",
    "BlockSparseRingMultiheadDilatedAttention": "nn",
    "BlockSparseTorchSparse": "nn",
    "DilatedAttention": "nn",
    "HierarchicalConfig": "nn",
    "ImportanceScorer": "nn",
    "KVCache": "nn",
    "MultiheadBlockSparseAdaptive": "nn",
    "MultiheadDilatedAttention": "nn",
    "MultiheadSparseAttention": "nn",
    "Position": "nn",
    "Replacement": "integrations.replace",
    "RingDilatedAttention": "nn",
    "RingMultiheadDilatedAttention": "nn",
    "Rotary": "nn",
    "SparseAttention": "nn",
    "SparsePatternConfig": "nn",
    "Xpos": "nn",
    "create_adaptive_block_sparse": "nn",
    "create_block_sparse_attention": "nn",
    "create_dilated_attention": "nn",
    "create_multihead_block_sparse": "nn",
    "create_multihead_dilated_attention": "nn",
    "get_block_sparse_preset": "nn",
    "integrate": "integrations.huggingface",
    "replace_attention": "integrations.replace",
    "SparsifyReport": "integrations.sparsify",
    "sparsify": "integrations.sparsify",
    "fit_scorers": "nn",
    "scorer_parameters": "nn",
    "task_parameters": "nn",
    "StreamedLayer": "nn.streamed",
    "DistributedSparseConfig": "distributed",
    "SequenceLayout": "distributed",
    "context_parallel_attention": "distributed",
    "context_parallel_attention_with_lse": "distributed",
    "context_parallel_loss": "distributed",
    "shard_sequence": "distributed",
    "unshard_sequence": "distributed",
    "DilatedTransformerDecoderLayer": "models",
    "DilatedTransformerEncoderLayer": "models",
    "LongNet": "models",
    "LongNetConfig": "models",
    "LongNetLM": "models",
    "SlideConfig": "models",
    "SlideEncoder": "models",
    "ImprovedDilatedAttention": "nn",
    "ImprovedMultiheadDilatedAttention": "nn",
}
"""Public name -> module that has it. `__init__.pyi` holds the same names for type checkers.

A module is imported when one of its names is first used: `dap --help` needs no torch, which takes seconds to import."""

__all__ = sorted([*_MODULES, "backends"])


def backends() -> tuple[str, ...]:
    """Names for `backend=`, besides "auto"."""
    from .kernels.registry import MODULES

    return tuple(MODULES)


def __getattr__(name: str) -> object:
    if name in _MODULES:
        globals()[name] = value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        return value
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        is_module = find_spec(f"{__name__}.{name}") is not None
    except ModuleNotFoundError as error:
        # `hasattr` expects this kind; an import statement asks the finder itself.
        raise AttributeError(str(error)) from None
    if is_module:
        return import_module(f".{name}", __name__)
    return __getattr__(import_module(".compat", __name__).older_name(name, __all__))


class _OlderModules:
    """Finder of last resort, which names the replacement of modules of the original library."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, module = name.partition(".")
        if package == __name__:
            import_module(".compat", package).refuse_module(module)


sys.meta_path.append(_OlderModules)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
