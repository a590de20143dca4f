"""Exact, fast, sparse attention for sequences of thousands to a billion tokens.

>>> import dilated_attention_pytorch as dap
>>> dap.make_plan(dap.parse("dilated:2048x1,8192x4 & causal"), n=65536, heads=8).blocks
43520
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .compat import ImprovedDilatedAttention, ImprovedMultiheadDilatedAttention
    from .distributed import (
        DistributedSparseConfig,
        SequenceLayout,
        context_parallel_attention,
        context_parallel_attention_with_lse,
        context_parallel_loss,
        shard_sequence,
        unshard_sequence,
    )
    from .errors import BackendUnsupported
    from .kernels.registry import reproducible_gradients
    from .models import (
        DilatedTransformerDecoderLayer,
        DilatedTransformerEncoderLayer,
        LongNet,
        LongNetConfig,
        LongNetLM,
        SlideConfig,
        SlideEncoder,
    )
    from .nn import (
        AdaptiveConfig,
        Alibi,
        BlockSparseAdaptive,
        BlockSparseHierarchical,
        BlockSparseRingDilatedAttention,
        BlockSparseRingDistributedDilatedAttention,
        BlockSparseRingMultiheadDilatedAttention,
        BlockSparseTorchSparse,
        DilatedAttention,
        HierarchicalConfig,
        ImportanceScorer,
        KVCache,
        MultiheadBlockSparseAdaptive,
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
        create_adaptive_block_sparse,
        create_block_sparse_attention,
        create_dilated_attention,
        create_multihead_block_sparse,
        create_multihead_dilated_attention,
        get_block_sparse_preset,
        replace_attention,
    )
    from .nn.streamed import StreamedLayer
    from .ops import AttentionOutput, attention, attention_rows, attention_with_lse, merge, plan_cache
    from .ops.decode import attention_step
    from .ops.explain import explain
    from .ops.streamed import streamed_attention
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

# Importing torch takes seconds, and `dap --help` needs none of it: a name is looked up in these when it is asked for.
_HOMES = (
    *("errors", "patterns", "plan", "ops.explain", "ops.decode", "ops.streamed", "ops", "kernels.registry"),
    *("nn", "nn.streamed", "compat", "distributed", "models"),
)


def backends() -> tuple[str, ...]:
    """Names for `backend=`, besides "auto"."""
    from .kernels.registry import MODULES

    return tuple(MODULES)


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in __all__:
        is_room = find_spec(f"{__name__}.{name}") is not None
        return import_module(f".{name}", __name__) if is_room else import_module(".compat", __name__).older_name(name)
    for home in _HOMES:
        found = getattr(import_module(f".{home}", __name__), name, None)
        if found is not None:
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} lists {name!r} and has no home for it")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AdaptiveConfig",
    "Alibi",
    "AttentionOutput",
    "BackendUnsupported",
    "BlockDilated",
    "BlockLists",
    "BlockSparseAdaptive",
    "BlockSparseHierarchical",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingDistributedDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "BlockSparseTorchSparse",
    "Causal",
    "Dilated",
    "DilatedAttention",
    "DilatedTransformerDecoderLayer",
    "DilatedTransformerEncoderLayer",
    "DistributedSparseConfig",
    "Documents",
    "Full",
    "Global",
    "Hierarchical",
    "HierarchicalConfig",
    "ImportanceScorer",
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "KVCache",
    "LongNet",
    "LongNetConfig",
    "LongNetLM",
    "MultiheadBlockSparseAdaptive",
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
    "SequenceLayout",
    "SlideConfig",
    "SlideEncoder",
    "SlidingWindow",
    "SparseAttention",
    "SparsePatternConfig",
    "StreamedLayer",
    "Strided",
    "Xpos",
    "attention",
    "attention_rows",
    "attention_step",
    "attention_with_lse",
    "backends",
    "context_parallel_attention",
    "context_parallel_attention_with_lse",
    "context_parallel_loss",
    "create_adaptive_block_sparse",
    "create_block_sparse_attention",
    "create_dilated_attention",
    "create_multihead_block_sparse",
    "create_multihead_dilated_attention",
    "explain",
    "get_block_sparse_preset",
    "make_plan",
    "merge",
    "parse",
    "plan_cache",
    "replace_attention",
    "reproducible_gradients",
    "shard_sequence",
    "streamed_attention",
    "unshard_sequence",
]
