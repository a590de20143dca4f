"""Learned layers of a trained model beside controls: other choices of as many blocks, and dense attention.

A control keeps the forced blocks of a row and as many others as the scorer lists for it, so that all have one counted
density: "untrained" is the scorer as it was initialised, "oracle" takes the blocks with the largest attention mass,
"random" takes any. Heads that share a list share it in every choice. Shapes: b batch, h heads, s lists of a row,
n tokens, r rows, t blocks, k listed blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...selection.attention import selected_attention
from ...selection.backend import distill_inputs, select
from ...selection.distill import DistillInputs, dense_mass, spans, summed_by_list
from ...selection.types import Selection
from .config import AdaptiveConfig
from .fit import Moments, moments_of, world_size
from .guard import best, candidates, listed, query_weights
from .module import BlockSparseAdaptive

CHOICES = ("learned", "untrained", "oracle", "random")
HELD = 2**22
"""Scores of rows with blocks that a control holds at a time."""

ScorerState = Mapping[str, Tensor]


class LayerCall(NamedTuple):
    """Arguments of one call of a learned layer."""

    query: Tensor
    """(b, n, h, d)"""
    key: Tensor
    value: Tensor
    is_causal: bool
    padding: Tensor | None

    def run(self, core: BlockSparseAdaptive, **settings: Any) -> Tensor:
        """Output of the layer with other values of its attributes."""
        with adjusted(core, **settings):
            # The class's own: `intercepted` replaces the attribute of the instance.
            output = type(core).forward(core, *self[:4], key_padding_mask=self.padding)
        assert isinstance(output, Tensor)
        return output


@contextmanager
def intercepted(
    cores: Mapping[str, BlockSparseAdaptive], run: Callable[[str, BlockSparseAdaptive, LayerCall], Tensor]
) -> Iterator[None]:
    """Let a function compute the outputs of learned layers, from a layer's name, the layer and its call."""

    def forward(
        name: str,
        core: BlockSparseAdaptive,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        return_pattern: bool = False,
        *,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        return run(name, core, LayerCall(query, key, value, is_causal, key_padding_mask))

    try:
        for name, core in cores.items():
            core.__dict__["forward"] = partial(forward, name, core)
        yield
    finally:
        for core in cores.values():
            core.__dict__.pop("forward", None)


@contextmanager
def adjusted(core: BlockSparseAdaptive, **settings: Any) -> Iterator[None]:
    """Other values of a layer's attributes for a while."""
    before = {name: getattr(core, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(core, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(core, name, value)


@contextmanager
def scorer_of(core: BlockSparseAdaptive, state: ScorerState) -> Iterator[None]:
    """Other parameters of a layer's scorer for a while."""
    before = copied_state(core)
    try:
        core.scorer.load_state_dict(state)
        yield
    finally:
        core.scorer.load_state_dict(before)


def copied_state(core: BlockSparseAdaptive) -> dict[str, Tensor]:
    """Copy of the parameters of a layer's scorer."""
    return {name: x.clone() for name, x in core.scorer.state_dict().items()}


def dense_config(config: AdaptiveConfig) -> AdaptiveConfig:
    """Settings that keep every block."""
    return replace(config, base_sparsity=0.0, adaptive_ratio=None, k_max=None)


def distill_layer(core: BlockSparseAdaptive, call: LayerCall) -> None:
    """Add the gradient of distillation on one call to the scorer of a layer; nothing else gets a gradient.

    Rows weigh the same: the loss of the scorer does not depend on a loss of the task.
    """
    config = replace(
        core.config, score_gradient="distill", saliency_weighted=False, dense_steps=0, distill_start=0, dropout=0.0
    )
    detached = call._replace(query=call.query.detach(), key=call.key.detach(), value=call.value.detach())
    with torch.enable_grad():
        output = detached.run(core, config=config, training=True, attention_dropout=0.0)
        if output.requires_grad:
            output.backward(torch.ones_like(output))


@torch.no_grad()
def fit_scorers(model: nn.Module, run: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[str]:
    """Fit the untrained scorers of a model to the queries and keys of `run()`, which calls the model.

    Layers attend densely meanwhile. A match that was trained or fitted, has the full width, or is frozen stays as it
    is. With several ranks the call is collective: all fit the sum over `group`, by default all ranks. State that an
    optimizer has for the parameters stays; there is none before the scorer's first step.

    Returns:
        Names of the fitted layers.

    >>> layer = BlockSparseAdaptive([64], [1], 2, 16, AdaptiveConfig(match_rank=8), block_size=16)
    >>> fit_scorers(layer, lambda: layer(*torch.randn(3, 1, 64, 2, 16).unbind()))
    ['']
    """
    cores = {name: x for name, x in model.named_modules() if isinstance(x, BlockSparseAdaptive)}
    cores = {name: x for name, x in cores.items() if x.scorer.match_query.requires_grad and x.scorer.is_untrained()}
    sums: dict[str, Moments] = {}

    def attend(name: str, core: BlockSparseAdaptive, call: LayerCall) -> Tensor:
        q, k = call.query.transpose(1, 2), call.key.transpose(1, 2)
        settings = core.config.settings(core.block_size, call.is_causal)
        sums[name] = moments_of(q, k, settings, call.padding, core.scorer.lists).plus(sums.get(name))
        return attend_by("dense", core, call, {}, torch.default_generator)

    with intercepted(cores, attend):
        run()
    for name, moments in sums.items():
        cores[name].scorer.fit(_over_ranks(moments, group, cores[name].scorer.match_query.device))
    return list(sums)


def _over_ranks(moments: Moments, group: dist.ProcessGroup | None, device: torch.device) -> Moments:
    """Moments of the data of all ranks."""
    if world_size(group) == 1:
        return moments
    summed = [x.to(device) for x in moments]
    for x in summed:
        dist.all_reduce(x, group=group)
    return Moments(*(x.cpu() for x in summed))


def shares_of(sums: Tensor) -> dict[str, float]:
    """Counted density and captured shares of the attention by choice, from a sum of results of `captured_mass`."""
    *kept, total, density, calls = sums.tolist()
    return {"density": density / calls} | {name: x / total for name, x in zip(CHOICES, kept, strict=True)}


@torch.no_grad()
def captured_mass(core: BlockSparseAdaptive, call: LayerCall, untrained: ScorerState, tokens: int) -> Tensor:
    """Dense attention of a call on the blocks of each choice, on evenly spaced rows of about `tokens` queries.

    Random blocks are not drawn: the expectation of their mass is exact.

    Returns:
        float64 (7): mass by choice in the order of `CHOICES`, all mass, the counted density, and 1. Results add up.
    """
    selection, visible = _selected(core, call)
    inputs = _inputs(core, call, selection)
    rows = selection.indices.shape[2]
    wanted = min(rows, max(1, tokens if selection.per_token else -(-tokens // selection.block_size)))
    row = torch.linspace(0, rows - 1, wanted, device=visible.device).round().long().unique()
    mass = dense_mass(inputs, row, query_weights(call.query, call.padding))[0].double()
    mass = summed_by_list(mass, selection.group)
    forced, others = candidates(selection, inputs.blocks(row), visible)
    with scorer_of(core, untrained):
        before, _ = _selected(core, call)
    counts = selection.counts[:, :, row].long()
    oracle = best(mass, others, counts, selection.indices.shape[3], selection.blocks)
    lists = selection.indices[:, :, row], before.indices[:, :, row], oracle
    kept = [(mass * (forced | listed(x, selection.blocks))).sum() for x in lists]
    chance = counts / others.sum(-1).clamp(min=1)
    kept.append((mass * forced).sum() + (chance[..., None] * mass * others).sum())
    return torch.stack([*kept, mass.sum(), selection.density().to(mass), mass.new_ones(())])


@torch.no_grad()
def attend_by(
    choice: str, core: BlockSparseAdaptive, call: LayerCall, untrained: ScorerState, generator: torch.Generator
) -> Tensor:
    """Output of a layer whose blocks are those of a choice, or "dense", in evaluation mode."""
    if choice == "dense":
        return call.run(core, config=dense_config(core.config), training=False)
    if choice == "learned":
        return call.run(core, training=False)
    if choice == "untrained":
        with scorer_of(core, untrained):
            return call.run(core, training=False)
    selection, visible = _selected(core, call)
    inputs, weights, lists = _inputs(core, call, selection), query_weights(call.query, call.padding), []
    streams = visible.shape[0] * visible.shape[1]
    for begin, end in spans(selection.indices.shape[2], HELD // (streams * selection.blocks)):
        row = torch.arange(begin, end, device=visible.device)
        if choice == "oracle":
            scores = summed_by_list(dense_mass(inputs, row, weights)[0], selection.group)
        else:
            shape = *visible.shape[:2], len(row), selection.blocks
            scores = torch.rand(shape, generator=generator, device=generator.device).to(visible.device)
        _, others = candidates(selection, inputs.blocks(row), visible)
        counts = selection.counts[:, :, row]
        lists.append(best(scores, others, counts, selection.indices.shape[3], selection.blocks))
    chosen = replace(selection, indices=torch.cat(lists, 2))
    q, k, v = (x.transpose(1, 2) for x in call[:3])
    settings: dict[str, Any] = {"scale": core.softmax_scale, "key_padding_mask": call.padding, "backend": core.backend}
    return selected_attention(q, k, v, chosen, enable_gqa=True, **settings).transpose(1, 2)


def _selected(core: BlockSparseAdaptive, call: LayerCall) -> tuple[Selection, Tensor]:
    """Selection of a layer for a call, and the blocks with a visible key, bool (b, s, t)."""
    scores = core.score_blocks(call.query.transpose(1, 2), call.key.transpose(1, 2), call.is_causal, call.padding)
    return select(scores, call.query.shape[1]), scores.visible


def _inputs(core: BlockSparseAdaptive, call: LayerCall, selection: Selection) -> DistillInputs:
    scale = core.head_dim**-0.5 if core.softmax_scale is None else core.softmax_scale
    heads = call.query.transpose(1, 2), call.key.transpose(1, 2)
    return distill_inputs(*heads, selection, scale, call.padding)
