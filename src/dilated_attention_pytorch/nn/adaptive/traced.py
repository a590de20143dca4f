"""Learned attention as two torch operators, so that `torch.compile` has it in one graph.

The operators take the parameters of the scorer as tensors and the settings as text. The backward operator selects the
blocks again instead of storing their lists, whose sizes depend on values on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...ops.attention import attention
from ...ops.derivatives import scale_of
from ...patterns import Full
from ...selection.attention import SelectedSettings, selected_attention
from ...selection.backend import distill, distill_inputs, prefers_sdpa, score_blocks, score_rows, select
from ...selection.distill import draw_batch
from ...selection.scores import BlockScores, ScorerParameters
from ...selection.types import Selection
from .config import AdaptiveConfig
from .learned_text import LearnedText

if TYPE_CHECKING:
    from .module import BlockSparseAdaptive

TORCH_OWN = 4096
"""Tokens up to which torch's dense attention is no slower on a GPU, and needs less host time."""

_SETTINGS = "Tensor? padding, str text, bool is_causal, float scale, str backend, bool distills"
_library = torch.library.Library("dilated_attention", "FRAGMENT")
_library.define(
    f"learned_forward(Tensor query, Tensor key, Tensor value, Tensor[] parameters, {_SETTINGS}) -> (Tensor, Tensor)"
)
_library.define(
    "learned_backward(Tensor query, Tensor key, Tensor value, Tensor[] parameters, Tensor output, Tensor lse, "
    f"Tensor grad_output, {_SETTINGS}) -> Tensor[]",
    # The rows of distillation are drawn.
    tags=torch.Tag.nondeterministic_seeded,
)


def is_traceable(core: BlockSparseAdaptive, return_pattern: bool) -> bool:
    """Whether the operators compute a call of a layer; otherwise the layer runs eagerly and breaks the graph."""
    config, drops = core.config, core.attention_dropout > 0 or core.config.dropout > 0
    counts = config.dense_steps > 0 or config.distill_start > 0 or config.guarded
    special = return_pattern or core.is_weighted() or not core.ranks.alone
    return not special and not (core.training and (drops or counts or config.exploration))


def traced_attention(
    core: BlockSparseAdaptive, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, padding: Tensor | None
) -> Tensor:
    """Output of a layer for (B, N, H, D), by operators that a compiler sees."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    config, scale = core.config, scale_of(core.softmax_scale, core.head_dim)
    distills = core.is_distilling()
    short = config.dense_below is not None and not distills and q.shape[2] < config.dense_below
    if config.keeps_all or short:
        few = q.shape[2] <= TORCH_OWN and padding is None and core.backend == "auto"
        if few and not torch.is_grad_enabled() and prefers_sdpa(query, key, value):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale).transpose(1, 2)
        masks = {"is_causal": is_causal, "key_padding_mask": padding}
        return attention(q, k, v, Full(), scale=scale, enable_gqa=True, backend=core.backend, **masks).transpose(1, 2)
    # `id` makes the compiler guard on the very object.
    text = _constant_text(config, core.block_size, id(config))
    stacked = core.scorer.selecting_parameters()
    parameters = *stacked.stacks, *stacked[1:5]
    settings = padding, text, is_causal, scale, core.backend, distills
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return torch.ops.dilated_attention.learned_forward(q, k, v, parameters, *settings)[0].transpose(1, 2)


def _constant_text(config: AdaptiveConfig, block_size: int, address: int) -> str:
    """Settings as a constant of a compiled graph."""
    return str(LearnedText(config, block_size))


# As `torch.compiler.assume_constant_result` does, which imports the compiler.
_constant_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _scored(
    query: Tensor,
    key: Tensor,
    parameters: list[Tensor],
    padding: Tensor | None,
    learned: LearnedText,
    is_causal: bool,
    distills: bool,
) -> tuple[BlockScores, Selection]:
    """Scores of a call, and the blocks that they select."""
    *stacks, summary, match_query, match_key, log_temperature = parameters
    config = learned.config
    own = summary, match_query, match_key, log_temperature, config.min_temperature, 0.0
    settings = config.settings(learned.block_size, is_causal)
    scores = score_blocks(query, key, ScorerParameters(stacks, *own), settings, padding, distills=distills)
    return scores, select(scores, query.shape[2])


@torch.library.impl(_library, "learned_forward", "CompositeExplicitAutograd")
def _forward(
    query: Tensor, key: Tensor, value: Tensor, parameters: list[Tensor], *settings: Any
) -> tuple[Tensor, Tensor]:
    padding, text, is_causal, scale, backend, _ = settings
    with torch.no_grad():
        _, selection = _scored(query, key, parameters, padding, LearnedText.parse(text), is_causal, True)
        given = {"scale": scale, "key_padding_mask": padding, "backend": backend}
        output, lse = selected_attention(query, key, value, selection, enable_gqa=True, return_lse=True, **given)
    return output.contiguous(), lse.contiguous()


@torch.library.impl(_library, "learned_backward", "CompositeExplicitAutograd")
def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: list[Tensor],
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    *settings: Any,
) -> list[Tensor]:
    padding, text, is_causal, scale, backend, distills = settings
    learned = LearnedText.parse(text)
    with torch.set_grad_enabled(distills):
        leaves = [x.detach().requires_grad_(distills) for x in parameters]
        scores, selection = _scored(query, key, leaves, padding, learned, is_causal, distills)
    with torch.no_grad():
        own = SelectedSettings.of(selection, scale, padding, 0.0, None, backend)
        given = query, key, value, output, lse, grad_output, None
        grads = [x.contiguous() for x in torch.ops.dilated_attention.selected_backward(*given, *own)]
    if not distills:
        return [*grads, *(torch.zeros_like(x) for x in parameters)]
    config = learned.config
    dense = config.distill_rows, config.distill_min_tokens, config.distill_memory
    rows = -(-query.shape[2] // scores.settings.row_unit), selection.indices.shape[-1]
    batch = draw_batch(scores, *rows, *dense, config.distill_weight, config.saliency_weighted)
    with torch.enable_grad():
        compared = score_rows(scores, batch, selection.indices)
    inputs = distill_inputs(query, key, selection, scale, padding, row_tokens=batch.row_tokens)
    score_grads = distill(inputs, batch, lse, grad_output, *compared)
    pairs = [(x, grad) for x, grad in zip(compared, score_grads, strict=True) if x is not None and grad is not None]
    heads, tails = zip(*pairs, strict=True)
    found = torch.autograd.grad(heads, leaves, tails, allow_unused=True)
    return [*grads, *(torch.zeros_like(x) if g is None else g for x, g in zip(parameters, found, strict=True))]


@torch.library.register_fake("dilated_attention::learned_forward", lib=_library)
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(*query.shape[:-1], value.shape[-1]), query.new_empty(query.shape[:-1], dtype=lse_dtype)


@torch.library.register_fake("dilated_attention::learned_backward", lib=_library)
def _backward_fake(query: Tensor, key: Tensor, value: Tensor, parameters: list[Tensor], *rest: Any) -> list[Tensor]:
    return [*(x.new_empty(x.shape) for x in (query, key, value)), *map(torch.empty_like, parameters)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, parameters, padding, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, padding, *parameters, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiated(ctx: Any, grad_output: Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, padding, *parameters, output, lse = ctx.saved_tensors
    grad_output = grad_output.contiguous()
    given = query, key, value, parameters, output, lse, grad_output, padding, *ctx.settings
    grads = torch.ops.dilated_attention.learned_backward(*given)
    return *grads[:3], grads[3:], *(None,) * 6


# The scorer learns in the backward pass.
torch.library.register_autograd(
    "dilated_attention::learned_forward", _differentiated, setup_context=_save, lib=_library
)
