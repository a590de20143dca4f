"""Factories of attention modules: variants, presets, and an automatic choice with its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import must
from ..patterns import Full
from .adaptive.module import AdaptiveConfig, BlockSparseAdaptive
from .adaptive.multihead import MultiheadBlockSparseAdaptive
from .attention import SparseAttention
from .block_sparse import BlockSparseHierarchical, BlockSparseRingDilatedAttention
from .block_sparse_config import HierarchicalConfig, SparsePatternConfig
from .calibration import cost_model
from .context_parallel import RingDilatedAttention
from .dilated import DilatedAttention
from .multihead import (
    BlockSparseRingMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    MultiheadSparseAttention,
    RingMultiheadDilatedAttention,
)
from .node_bounded import BlockSparseRingDistributedDilatedAttention

if TYPE_CHECKING:
    from ..distributed.config import DistributedSparseConfig

SEGMENTS = (2048, 4096, 8192)
EMBED_DIM, NUM_HEADS = 768, 12
VARIANTS = ("auto", "base", "multihead", "adaptive", "distributed", "hierarchical")
KINDS = ("auto", "dilated", "ring", "block_sparse", "dense")
OLDER_KINDS = {"standard": "dilated", "improved": "dilated", "distributed": "ring", "block_sparse_ring": "block_sparse"}
"""Kinds of the original library -> present kinds."""


def create_block_sparse_attention(
    variant: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    sparse_config: SparsePatternConfig | None = None,
    sparsity_ratio: float | None = None,
    block_size: int | None = None,
    adaptive_config: AdaptiveConfig | None = None,
    distributed_config: DistributedSparseConfig | None = None,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    *,
    hierarchical_config: HierarchicalConfig | None = None,
    length: int | None = None,
    **options: Any,
) -> nn.Module:
    """A block-sparse module.

    Args:
        variant: "base" (B, N, H, D), "multihead" (B, N, E), "distributed" (the same over ranks and nodes),
            "hierarchical", "adaptive" (learned; (B, N, E) where `embed_dim` is given), or "auto": the
            variant that fits the other arguments, or dense attention if it is faster at `length`.
        segment_lengths: (2048, 4096, 8192) by default.
        dilation_rates: 1, 2, 4, ... by default.
        sparse_config: see `BlockSparseRingDilatedAttention`, as `sparsity_ratio` and `block_size`.
        adaptive_config: for "adaptive".
        distributed_config: for "distributed".
        embed_dim: width of the model, for "multihead" and "distributed"; 768 by default.
        num_heads: heads, for "multihead" and "distributed", 12 by default, and for "adaptive", 8 by default; of "base"
            and "hierarchical" by name, any number when not given.
        hierarchical_config: levels, for "hierarchical".
        length: expected number of tokens, for "auto".
        options: further arguments of the module; an unknown keyword raises.
    """
    if variant not in VARIANTS:
        raise must(f"variant must be one of {', '.join(VARIANTS)}", repr(variant))
    segments, rates = _branches(segment_lengths, dilation_rates)
    owners = {
        "adaptive": adaptive_config,
        "distributed": distributed_config,
        "hierarchical": hierarchical_config,
        "multihead": _default(embed_dim, num_heads),
    }
    called_for = next((name for name, given in owners.items() if given is not None), "base")
    kind = called_for if variant == "auto" else variant
    for name, given in owners.items():
        own_heads = embed_dim is None or kind == "distributed" or variant == kind == "adaptive"
        if given is not None and name != kind and not (name == "multihead" and own_heads):
            what = {"multihead": "embed_dim and num_heads"}.get(name, f"{name}_config")
            raise must(f'{what} must come with variant="{name}"', f'variant="{kind}"')
    if length is not None and variant != "auto":
        raise must('length must come with variant="auto"', f'variant="{variant}"')
    base: dict[str, Any] = {"sparse_config": sparse_config, "sparsity_ratio": sparsity_ratio, "block_size": block_size}
    if kind == "adaptive":
        if length is not None:
            raise must("length must come with a pattern of positions", "a learned one")
        return _adaptive(segments, rates, adaptive_config, base, embed_dim, num_heads, options)
    if kind == "hierarchical":
        if sparse_config is not None or sparsity_ratio is not None:
            raise must("a hierarchy must be given by its levels", "a sparsity ratio", "Use hierarchical_config.")
        made: Any = BlockSparseHierarchical(
            segments, rates, hierarchical_config, block_size=block_size, num_heads=num_heads, **options
        )
    elif kind == "distributed":
        if sparse_config is not None:
            raise must("a distributed module must be given its densities", "a sparse_config", "Use distributed_config.")
        made = BlockSparseRingDistributedDilatedAttention(
            _default(embed_dim, EMBED_DIM),
            _default(num_heads, NUM_HEADS),
            segments,
            rates,
            _with_densities(distributed_config, sparsity_ratio, block_size),
            **options,
        )
    elif kind == "multihead":
        width, heads = _default(embed_dim, EMBED_DIM), _default(num_heads, NUM_HEADS)
        made = BlockSparseRingMultiheadDilatedAttention(width, heads, segments, rates, **base, **options)
    else:
        made = BlockSparseRingDilatedAttention(segments, rates, num_heads=num_heads, **base, **options)
    if variant != "auto":
        return made
    return _where_it_pays(made, length, f"auto took variant {kind}")


def _default(value: int | None, otherwise: int | None) -> Any:
    return otherwise if value is None else value


def _with_densities(
    config: DistributedSparseConfig | None, sparsity_ratio: float | None, block_size: int | None
) -> DistributedSparseConfig:
    """Config with the arguments given beside it."""
    from ..distributed.config import DistributedSparseConfig

    densities: dict[str, Any] = {"sparsity_ratio": sparsity_ratio, "block_size": block_size}
    given = {name: value for name, value in densities.items() if value is not None}
    return replace(DistributedSparseConfig() if config is None else config, **given)


def _adaptive(
    segments: tuple[int, ...],
    rates: tuple[int, ...],
    config: AdaptiveConfig | None,
    base: dict[str, Any],
    embed_dim: int | None,
    num_heads: int | None,
    options: dict[str, Any],
) -> nn.Module:
    ratio = base.pop("sparsity_ratio")
    if ratio is not None:
        if config is not None:
            raise must("adaptive_config must come without sparsity_ratio", "both", "It has base_sparsity.")
        config = AdaptiveConfig(base_sparsity=1.0 - ratio)
    if embed_dim is not None:
        heads = _default(num_heads, NUM_HEADS)
        return MultiheadBlockSparseAdaptive(
            embed_dim, heads, segments, rates, adaptive_config=config, **base, **options
        )
    return BlockSparseAdaptive(segments, rates, _default(num_heads, 8), adaptive_config=config, **base, **options)


def create_adaptive_block_sparse(base_sparsity: float = 0.9, **options: Any) -> nn.Module:
    """`create_block_sparse_attention("adaptive", ...)`, with the fields of `AdaptiveConfig` among the keywords.

    >>> create_adaptive_block_sparse(0.95, temperature=0.5, num_heads=4).config.temperature
    0.5
    """
    names = {field.name for field in fields(AdaptiveConfig)}
    given = {name: options.pop(name) for name in list(options) if name in names}
    if given and options.get("adaptive_config") is not None:
        raise must("adaptive_config must come without its fields", ", ".join(given))
    options.setdefault("adaptive_config", AdaptiveConfig(base_sparsity=base_sparsity, **given))
    return create_block_sparse_attention("adaptive", **options)


def create_multihead_block_sparse(
    embed_dim: int = EMBED_DIM, num_heads: int = NUM_HEADS, sparsity_ratio: float = 0.1, **options: Any
) -> nn.Module:
    """`create_block_sparse_attention("multihead", ...)`."""
    return create_block_sparse_attention(
        "multihead", embed_dim=embed_dim, num_heads=num_heads, sparsity_ratio=sparsity_ratio, **options
    )


PRESETS: dict[str, dict[str, Any]] = {
    "local": {"variant": "base", "sparse_config": SparsePatternConfig("local_window", 0.1)},
    "dilated": {"variant": "base", "sparsity_ratio": 0.1},
    "global_local": {"variant": "base", "sparse_config": SparsePatternConfig("global_local", 0.1, global_tokens=64)},
    # For half a percent, rounding to whole blocks stays within one percent from 100 blocks on.
    "ultra_sparse": {"variant": "base", "sparsity_ratio": 0.005, "block_size": 64},
    "adaptive_standard": {"variant": "adaptive"},
    "hierarchical_standard": {"variant": "hierarchical", "hierarchical_config": HierarchicalConfig()},
}
"""Arguments of `create_block_sparse_attention` by name."""


def get_block_sparse_preset(name: str, **override: Any) -> nn.Module:
    """Module by the name of its preset; keywords override the preset.

    >>> get_block_sparse_preset("ultra_sparse").plan(65536, 8).density < 0.01
    True
    """
    if name not in PRESETS:
        raise must(f"preset must be one of {', '.join(PRESETS)}", repr(name))
    return create_block_sparse_attention(**{**PRESETS[name], **override})


def create_dilated_attention(
    kind: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    length: int | None = None,
    **options: Any,
) -> nn.Module:
    """A module over (B, N, H, D).

    Args:
        kind: "dilated", "ring", "block_sparse", "dense", or "auto": dilated, or dense if that is faster at
            `length`.
        segment_lengths: (2048, 4096, 8192) by default.
        dilation_rates: 1, 2, 4, ... by default.
        length: expected number of tokens, for "auto".
        options: further arguments of the module; an unknown keyword raises. `attention_type` is the original library's
            name of `kind`; its kinds "standard" and "improved" are "dilated", and "distributed" is "ring".
    """
    makers: dict[str, Callable[..., nn.Module]] = {
        "dilated": DilatedAttention,
        "ring": RingDilatedAttention,
        "block_sparse": BlockSparseRingDilatedAttention,
        "dense": partial(SparseAttention, pattern=Full()),
    }
    return _of_kind(makers, kind, segment_lengths, dilation_rates, length, options)


def create_multihead_dilated_attention(
    kind: str = "auto",
    embed_dim: int = EMBED_DIM,
    num_heads: int = NUM_HEADS,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    length: int | None = None,
    **options: Any,
) -> nn.Module:
    """Multi-head module over (B, N, E); see `create_dilated_attention` for `kind` and the arguments after the heads."""
    makers: dict[str, Callable[..., nn.Module]] = {
        "dilated": MultiheadDilatedAttention,
        "ring": RingMultiheadDilatedAttention,
        "block_sparse": BlockSparseRingMultiheadDilatedAttention,
        "dense": partial(MultiheadSparseAttention, pattern=Full()),
    }
    own = {"embed_dim": embed_dim, "num_heads": num_heads, **options}
    return _of_kind(makers, kind, segment_lengths, dilation_rates, length, own)


def _of_kind(
    makers: dict[str, Callable[..., nn.Module]],
    kind: str,
    segment_lengths: Sequence[int] | None,
    dilation_rates: Sequence[int] | None,
    length: int | None,
    options: dict[str, Any],
) -> nn.Module:
    if "attention_type" in options:
        if kind != "auto":
            raise must("kind must come without attention_type, its older name", "both")
        kind = options.pop("attention_type")
    kind = OLDER_KINDS.get(kind, kind)
    if kind not in KINDS:
        raise must(f"kind must be one of {', '.join(KINDS)}", repr(kind))
    if length is not None and kind != "auto":
        raise must('length must come with kind="auto"', f'kind="{kind}"')
    if kind == "dense":
        if segment_lengths is not None or dilation_rates is not None:
            raise must("dense attention must come without segments and rates", "one of them")
        return makers[kind](**options)
    segments, rates = _branches(segment_lengths, dilation_rates)
    made = makers["dilated" if kind == "auto" else kind](segment_lengths=segments, dilation_rates=rates, **options)
    return _where_it_pays(made, length, "auto took kind dilated") if kind == "auto" else made


def _branches(
    segment_lengths: Sequence[int] | None, dilation_rates: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    segments = tuple(segment_lengths) if segment_lengths is not None else SEGMENTS[: len(dilation_rates or SEGMENTS)]
    rates = tuple(dilation_rates) if dilation_rates is not None else tuple(2**i for i in range(len(segments)))
    return segments, rates


def _where_it_pays(made: Any, length: int | None, kind: str) -> nn.Module:
    """`made`, with dense attention where the cost model finds that faster at this length."""
    if length is None:
        made.reason = f"{kind}; no length was given, so dense attention was not weighed against it"
        return made
    plan = made.plan(length, made.num_heads or 8)
    costs = cost_model(made.default_device())
    sparse, dense = costs.sparse(plan), costs.dense(plan)
    source = "measured on this machine" if costs.measured else "assumed, for measuring is switched off"
    summary = f"at {length:,} tokens sparse takes about {sparse:.2g} s and dense {dense:.2g} s ({source})"
    if sparse <= dense:
        made.reason = f"{kind}; {summary}"
        return made
    made.pattern, made.reason = Full(), f"auto took dense attention; {summary}"
    if isinstance(made, BlockSparseRingDilatedAttention):
        made.clear_pattern_cache()
    return made
