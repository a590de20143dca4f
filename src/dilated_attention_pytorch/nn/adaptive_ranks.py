"""Learned attention over ranks: blocks are summed up together, then each chooses, fetches and attends for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..errors import must
from ..ops.selection import fresh_seed
from .scorer import Scores
from .summaries import Blocks, Sums, sums_at

if TYPE_CHECKING:
    from ..distributed import SequenceLayout
    from ..distributed.selected import Choice
    from .adaptive import BlockSparseAdaptive


def attend_over_ranks(
    layer: BlockSparseAdaptive, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, padding: Tensor | None
) -> Tensor:
    """The rank's rows (b, h, n, e) of what one device computes from the whole sequence. Collective."""
    from ..distributed.selected import RankLesson, attend_chosen, taught
    from ..distributed.transport import check_group

    check_group(layer.ranks.group, layer.ranks.world, query.device)
    if layer.training and layer.attention_dropout:
        advice = "The scorer's own dropout, and that of activations, may be on."
        raise must("attention_dropout must be 0 over several ranks", layer.attention_dropout, advice)
    if layer.studies():
        raise must("learned attention over several ranks must keep blocks as they are", "scores that weigh them",
                   'Use hard_sparsity=True and score_gradient="distill" or "none".')  # fmt: skip
    fits = key.shape[0] == len(query) and key.shape[2:] == query.shape[2:] and query.shape[1] % key.shape[1] == 0
    if not fits or value.shape[:3] != key.shape[:3]:
        shapes = f"{tuple(key.shape)} and {tuple(value.shape)} for query {tuple(query.shape)}"
        raise must("key and value must fit the query", shapes)
    layout = layer.ranks.layout_of(query.shape[2])
    learns = _compared(layer, layout, query, key, value, is_causal, padding)
    scale = layer.head_dim**-0.5 if layer.softmax_scale is None else layer.softmax_scale
    whole_padding = None if padding is None else _whole(padding, layout, layer)
    with torch.autocast(query.device.type, enabled=False), _luck_of_the_first(layer, query.device):
        scores, choice = _choose(layer, layout, query, key, is_causal, whole_padding)
        about = None
        given: tuple[Tensor, Tensor] | None = None
        if learns:
            rows = layout.n if choice.per_token else choice.blocks
            lesson = layer.sample(scores, choice.indices.shape[-1], rows)
            some, others = (_held(choice, rows) for rows in (lesson.chosen_rows, lesson.dense_rows))
            about = RankLesson(choice, lesson, some, others, whole_padding)
            chosen = torch.searchsorted(choice.rows, lesson.chosen_rows[some])
            dense = torch.searchsorted(choice.rows, lesson.dense_rows[others])
            given = scores.of(chosen, choice.indices[:, :, chosen]), scores.of_all(dense)
        layer.remember(_density(choice), None if about is None else about.lesson)
    found = attend_chosen(query, key, value, choice, scale=scale, padding=whole_padding, backend=layer.backend)
    if about is None or given is None:
        return found.output
    return taught(found, key, query, given[0], given[1], about)


def _compared(
    layer: BlockSparseAdaptive,
    layout: SequenceLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    padding: Tensor | None,
) -> bool:
    """Whether this call teaches the scorer, once all ranks have found that they make the same call. Collective."""
    from ..distributed.comm import same_everywhere
    from ..distributed.transport import wire_device

    learns = layer.teaches()
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    shapes = [(len(x), *x.shape[1::2]) for x in (query, key, value)]
    words = (
        f"{layer.config}, blocks of {layer.block_size}, {layout}, {shapes}, {query.dtype}, "
        f"scale {layer.softmax_scale}, causal {is_causal}, padding {padding is not None}, training {layer.training}, "
        f"gradients {wanted}, lessons {learns}"
    )
    same_everywhere(words, None, True, 0, layer.ranks.group, wire_device(layer.ranks.group))
    return learns


@contextmanager
def _luck_of_the_first(layer: BlockSparseAdaptive, device: torch.device) -> Iterator[None]:
    """Draw what the first rank would, while training; the others then go on with their own numbers."""
    if not layer.training:
        yield
        return
    from ..distributed.transport import wire_device

    cuda = device.type == "cuda"
    own = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
    ranks = layer.ranks
    first = 0 if ranks.group is None else dist.get_global_rank(ranks.group, 0)
    state = own.clone().to(wire_device(ranks.group))
    dist.broadcast(state, first, group=ranks.group)

    def follow(numbers: Tensor) -> None:
        torch.cuda.set_rng_state(numbers, device) if cuda else torch.set_rng_state(numbers)

    follow(state.cpu())
    try:
        yield
    finally:
        if ranks.rank:
            follow(own)


def _whole(padding: Tensor, layout: SequenceLayout, layer: BlockSparseAdaptive) -> Tensor:
    """The padding of all ranks, bool (b, N)."""
    at = layout.positions(layer.ranks.rank).to(padding.device)
    every = torch.zeros(len(padding), layout.n, dtype=torch.uint8, device=padding.device)
    every[:, at] = padding.to(torch.uint8)
    dist.all_reduce(every, group=layer.ranks.group)
    return every.bool()


def _summed(sums: Sums, extremes: bool, group: dist.ProcessGroup | None) -> Blocks:
    """Summaries of the whole sequence, from what each rank's tokens add to them."""
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
) -> tuple[Scores, Choice]:
    from ..distributed.selected import Choice

    config, scorer, size, ranks = layer.config, layer.scorer, layer.block_size, layer.ranks
    per_token = config.per_token(is_causal)
    at = layout.positions(ranks.rank).to(query.device)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    mine = None if padding is None else padding[:, at]
    query, key = query.detach(), key.detach()
    row_sums = sums_at(query, at, layout.n, size, size if per_token else config.score_unit, mine, dtype)
    key_sums = sums_at(key, at, layout.n, size, config.score_unit, mine, dtype)
    rows = _summed(row_sums, False, ranks.group)
    layers = scorer.importance.layers(dtype)
    columns = scorer.columns(_summed(key_sums, True, ranks.group), layers)
    ids = at if per_token else torch.unique(at // size)
    whole = padding is None and layout.n % size == 0
    speaking = scorer.speaking(rows.before() if is_causal else rows, layers)
    scores = Scores(scorer, query, speaking, columns, layers, size, is_causal, per_token, whole, ids)
    with torch.no_grad():
        indices = layer.listed(scores, ids, is_causal, fresh_seed(query.device) if layer.training else None)
    width = torch.tensor([indices.shape[-1]], device=query.device)
    dist.all_reduce(width, dist.ReduceOp.MAX, group=ranks.group)
    indices = F.pad(indices, (0, int(width) - indices.shape[-1]), value=scores.visible.shape[2])
    near = (config.local_blocks, config.sink_blocks)
    return scores, Choice(layout, ranks.rank, ranks.group, ids, indices, size, is_causal, per_token, *near)


def _held(choice: Choice, rows: Tensor) -> Tensor:
    """Which of these rows of the sequence this rank answers for: those whose first token it holds."""
    first = rows if choice.per_token else rows * choice.block_size
    return (choice.layout.locate(first.cpu())[0] == choice.rank).to(rows.device)


def _density(choice: Choice) -> Tensor:
    """Blocks seen over blocks that dense attention sees, of all ranks."""
    t, own = choice.blocks, choice.own
    answered = _held(choice, choice.rows).double()
    seen = 1 + (choice.forced() < t).sum(1) + (choice.indices < t).sum(-1).double().mean((0, 1))
    dense = own + 1 if choice.is_causal else torch.full_like(own, t)
    both = torch.stack([(seen * answered).sum(), (dense * answered).sum()])
    dist.all_reduce(both, group=choice.group)
    return both[0] / both[1]
