"""Learned attention over ranks: ranks sum up block summaries together, then select, fetch and attend separately."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ...errors import must
from ...ops.checks import full_precision
from ...selection.backend import default_generator, select_rows
from ...selection.scores import BlockScores, cast_layers, features
from ...selection.summaries import BlockSummaries, Sums, score_dtype, sums_at

if TYPE_CHECKING:
    from ...distributed import SequenceLayout
    from ...distributed.learned import Choice
    from .module import BlockSparseAdaptive


def attend_over_ranks(
    layer: BlockSparseAdaptive, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, padding: Tensor | None
) -> Tensor:
    """Rows (b, h, n, e) of this rank, equal to those of one device with the whole sequence. Collective."""
    from ...distributed.learned import RankBatch, attend_chosen, distill
    from ...distributed.transport import check_group

    check_group(layer.ranks.group, layer.ranks.world, query.device)
    if layer.training and layer.attention_dropout:
        advice = "The scorer's own dropout, and that of activations, may be on."
        raise must("attention_dropout must be 0 over several ranks", layer.attention_dropout, advice)
    if layer.is_weighted():
        raise must("learned attention over several ranks must keep blocks as they are", "scores that weigh them",
                   'Use hard_sparsity=True and score_gradient="distill" or "none".')  # fmt: skip
    if layer.config.guarded and layer.is_distilling():
        raise must("guarded must be False while learning over several ranks", True, "The comparison needs whole rows.")
    fits = key.shape[0] == len(query) and key.shape[2:] == query.shape[2:] and query.shape[1] % key.shape[1] == 0
    if not fits or value.shape[:3] != key.shape[:3]:
        shapes = f"{tuple(key.shape)} and {tuple(value.shape)} for query {tuple(query.shape)}"
        raise must("key and value must fit the query", shapes)
    layout = layer.ranks.layout_of(query.shape[2])
    distills = _agree(layer, layout, query, key, value, is_causal, padding)
    scale = layer.head_dim**-0.5 if layer.softmax_scale is None else layer.softmax_scale
    whole_padding = None if padding is None else _whole(padding, layout, layer)
    with full_precision(query.device), _shared_generator(layer, query.device):
        scores, choice = _choose(layer, layout, query, key, is_causal, whole_padding)
        about = None
        given: tuple[Tensor, Tensor] | None = None
        if distills:
            unit = scores.settings.row_unit
            batch = layer.draw_batch(scores, choice.indices, -(-layout.n // unit))
            each = batch.chosen_rows, batch.dense_rows
            some, others = (_held(choice, rows * unit) for rows in each)
            about = RankBatch(choice, batch, some, others, whole_padding)
            together = scores.selecting_rows
            chosen, dense = (_local(choice, together, rows) for rows in (each[0][some], each[1][others]))
            lists = choice.indices[:, :: scores.group, chosen // together]
            given = scores.of(chosen, lists), scores.of_all(dense)
        layer.store_statistics(_density(choice), None if about is None else about.batch)
    result = attend_chosen(query, key, value, choice, scale=scale, padding=whole_padding, backend=layer.backend)
    if about is None or given is None:
        return result.output
    return distill(result, key, query, given[0], given[1], about)


def _agree(
    layer: BlockSparseAdaptive,
    layout: SequenceLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    padding: Tensor | None,
) -> bool:
    """Whether this call distills, after checking that all ranks make the same call. Collective."""
    from ...distributed.exchange import compare_calls
    from ...distributed.transport import wire_device

    distills = layer.is_distilling()
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    shapes = [(len(x), *x.shape[1::2]) for x in (query, key, value)]
    words = (
        f"{layer.config}, blocks of {layer.block_size}, {layout}, {shapes}, {query.dtype}, "
        f"scale {layer.softmax_scale}, causal {is_causal}, padding {padding is not None}, training {layer.training}, "
        f"gradients {wanted}, distillation {distills}"
    )
    layer.ranks.hand_over()
    compare_calls(words, None, True, 0, layer.ranks.group, wire_device(layer.ranks.group))
    return distills


@contextmanager
def _shared_generator(layer: BlockSparseAdaptive, device: torch.device) -> Iterator[None]:
    """In training, draw the random numbers of the first rank; other ranks' generators are restored afterwards."""
    if not layer.training:
        yield
        return
    from ...distributed.transport import wire_device

    generator, ranks = default_generator(device), layer.ranks
    own = generator.get_state()
    first = 0 if ranks.group is None else dist.get_global_rank(ranks.group, 0)
    state = own.clone().to(wire_device(ranks.group))
    dist.broadcast(state, first, group=ranks.group)
    generator.set_state(state.cpu())
    try:
        yield
    finally:
        if ranks.rank:
            generator.set_state(own)


def _whole(padding: Tensor, layout: SequenceLayout, layer: BlockSparseAdaptive) -> Tensor:
    """Padding of the whole sequence, bool (b, N)."""
    at = layout.positions(layer.ranks.rank).to(padding.device)
    every = torch.zeros(len(padding), layout.n, dtype=torch.uint8, device=padding.device)
    every[:, at] = padding.to(torch.uint8)
    dist.all_reduce(every, group=layer.ranks.group)
    return every.bool()


def _summed(sums: Sums, extremes: bool, group: dist.ProcessGroup | None) -> BlockSummaries:
    """Summaries of the whole sequence, from the partial sums of each rank."""
    for x in (sums.sums, sums.many):
        dist.all_reduce(x, group=group)
    if not extremes or sums.high is None or sums.low is None:
        return sums._replace(high=None, low=None).blocks()
    edges = torch.cat([sums.high, -sums.low], -1)
    dist.all_reduce(edges, dist.ReduceOp.MAX, group=group)
    high, low = edges.chunk(2, -1)
    return sums._replace(high=high, low=-low).blocks()


def _choose(
    layer: BlockSparseAdaptive,
    layout: SequenceLayout,
    query: Tensor,
    key: Tensor,
    is_causal: bool,
    padding: Tensor | None,
) -> tuple[BlockScores, Choice]:
    from ...distributed.learned import Choice

    size, ranks = layer.block_size, layer.ranks
    settings, parameters = layer.config.settings(size, is_causal), layer.scorer.selecting_parameters()
    at = layout.positions(ranks.rank).to(query.device)
    mine = None if padding is None else padding[:, at]
    query, key, dtype = query.detach(), key.detach(), score_dtype(query)
    # Queries of a block that selects may lie on other ranks.
    row_unit = size if settings.per_token else settings.row_unit
    row_sums = sums_at(query, at, layout.n, size, row_unit, mine, dtype)
    key_sums = sums_at(key, at, layout.n, size, settings.score_unit, mine, dtype)
    rows, keys = _summed(row_sums, False, ranks.group), _summed(key_sums, True, ranks.group)
    layers = cast_layers(parameters.stacks, dtype)
    ids = at if settings.per_token else torch.unique(at // size)
    whole = padding is None and layout.n % size == 0
    rows = rows.before() if is_causal else rows
    own, present = query, None
    if not settings.per_token:
        own, present = rows.units[:, :, ids].flatten(2, 3), rows.unit_there[:, 0, ids].flatten(1)
    parts, rounds = features(rows, keys, parameters, layers), query.dtype.itemsize == 2
    given = parameters, own, *parts, layers, settings, whole, ids
    scores = BlockScores(*given, rounds=rounds, present=None if whole else present)
    indices = select_rows(scores, ids, layer.explores())
    width = torch.tensor([indices.shape[-1]], device=query.device)
    dist.all_reduce(width, dist.ReduceOp.MAX, group=ranks.group)
    indices = F.pad(indices, (0, int(width) - indices.shape[-1]), value=scores.visible.shape[2])
    # A rank fetches the union of the lists, to which repeated ones add nothing.
    indices = indices.repeat_interleave(scores.group, 1)
    near = settings.per_token, settings.local_blocks, settings.sink_blocks
    return scores, Choice(layout, ranks.rank, ranks.group, ids, indices, size, is_causal, *near)


def _held(choice: Choice, tokens: Tensor) -> Tensor:
    """Tokens of the sequence that this rank holds, bool."""
    return (choice.layout.locate(tokens.cpu())[0] == choice.rank).to(tokens.device)


def _local(choice: Choice, together: int, rows: Tensor) -> Tensor:
    """Scored rows of the sequence, so many of which select together, as those of this rank."""
    return torch.searchsorted(choice.rows, rows // together) * together + rows % together


def _density(choice: Choice) -> Tensor:
    """Blocks seen over blocks that dense attention sees, of all ranks."""
    t, own = choice.blocks, choice.own
    answered = _held(choice, choice.rows if choice.per_token else own * choice.block_size).double()
    seen = 1 + (choice.forced() < t).sum(1) + (choice.indices < t).sum(-1).double().mean((0, 1))
    dense = own + 1 if choice.is_causal else torch.full_like(own, t)
    both = torch.stack([(seen * answered).sum(), (dense * answered).sum()])
    dist.all_reduce(both, group=choice.group)
    return both[0] / both[1]
