"""Cores of learned attention for the attention modules of other libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nn import BlockSparseAdaptive, MultiheadBlockSparseAdaptive
from ..nn.adaptive.learned_text import LearnedText


def new_core(text: LearnedText, num_heads: int, head_dim: int, like: Tensor, **settings: Any) -> BlockSparseAdaptive:
    """A core with a new scorer on the device of a weight, in float32 where the weight has 16 bits."""
    made = {"device": like.device, "dtype": scorer_dtype(like)}
    return BlockSparseAdaptive(
        [1], [1], num_heads, head_dim, text.config, block_size=text.block_size, **made, **settings
    )


def scorer_dtype(like: Tensor) -> torch.dtype:
    """Type of a scorer: steps of an optimizer are lost in the rounding of 16 bits."""
    return torch.promote_types(like.dtype, torch.float32)


def widened(module: MultiheadBlockSparseAdaptive) -> MultiheadBlockSparseAdaptive:
    """The module, with a scorer of at least 32 bits."""
    module.core.scorer.to(scorer_dtype(module.out_proj.weight))
    return module


def adopt_scorer(core: BlockSparseAdaptive, other: Any) -> None:
    """Take over the scorer of another core, if there is one of the same sizes."""
    if isinstance(other, BlockSparseAdaptive):
        sizes = ({name: x.shape for name, x in each.scorer.state_dict().items()} for each in (core, other))
        if next(sizes) == next(sizes):
            core.scorer.load_state_dict(other.scorer.state_dict())
