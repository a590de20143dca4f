"""Steps of learned attention, in torch and in Triton, and the choice between them.

A call summarises blocks, factors their scores, ranks blocks, attends, and in training scores the rows of a distillation
batch and computes their gradients. `why_not` decides about every step; a step runs in torch where Triton cannot run it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.call import MOST_PROGRAMS, allows_host_sync
from ..kernels.dropout import fresh_seed
from ..kernels.triton import backend as triton_backend
from ..ops.checks import full_precision
from . import rank as ranking
from . import scores as scoring
from . import summaries
from .attend import BlockAttend, CallChoices, DenseAttend, TokenAttend
from .distill import DistillInputs, distill_gradients, mean_norms, visible_blocks
from .rank import Budget
from .row_scores import RowScores
from .scores import BlockScores, Layer, ScorerParameters
from .summaries import BlockSummaries
from .types import DistillBatch, ScoreInputs, Selection, SelectionSettings

STEP, GPU_STEP = 2**22, 2**26
"""Scores, and elements of gathered keys, that distillation in torch holds at a time."""
WIDEST_MATCH = 128
MOST_RANKED = scoring.ALL_PAIRS
"""Blocks up to which kernels score every pair; beyond, torch scores long rows by super-blocks."""
MOST_SCORED = 1024
"""Blocks up to which the matches of a batch's rows with every block are held at once."""
MOST_DISTILLED = 2**16 - 1
"""Blocks that the grid of a launch can count."""


def default_generator(device: torch.device) -> torch.Generator:
    """Torch's default generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def prefers_sdpa(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's dense attention is faster on short inputs: on a GPU, in 16 bits, of one shape."""
    return (
        query.is_cuda
        and (dtype := query.dtype) is key.dtype is value.dtype
        and dtype.itemsize == 2
        and query.shape == key.shape == value.shape
    )


class Workload(NamedTuple):
    """Properties of a call that decide which implementation runs a step."""

    device: torch.device
    dtype: torch.dtype
    """Of queries"""
    width: int
    """Of queries and keys"""
    blocks: int
    match_rank: int = 0
    layers: int = 2
    budget: Budget | None = None
    uniform: bool = True
    """Whether queries and keys have one length, width and dtype"""
    records_graph: bool = False
    """Whether scores need a graph, because gradients other than those of distillation reach them"""
    streams: int = 1
    """Samples times heads"""


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton is installed and compiles, or interprets, kernels for a device."""
    return triton_backend.installed() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def why_not(step: str, work: Workload) -> str | None:
    """Reason why Triton cannot run a step of a call, None if it can.

    Steps are "summarise", "factor", "rank", "score_rows", "attend" (the lists of a selection by blocks) and "distill".
    """
    if allows_host_sync(work.device):
        return f"needs a CUDA tensor, got {work.device.type}"
    if not triton_backend.installed():
        return "needs triton, which is not installed; CUDA builds of torch bring it"
    if step != "summarise" and work.streams > MOST_PROGRAMS:
        return f"samples times heads must be <= {MOST_PROGRAMS}, got {work.streams}"
    if step == "attend":
        return None
    if work.dtype not in triton_backend.DTYPES:
        return f"dtype must be float16, bfloat16 or float32, got {str(work.dtype).removeprefix('torch.')}"
    if step == "summarise":
        return None if work.uniform else "needs queries and keys of one length, width and dtype"
    if step != "rank" and work.width > triton_backend.WIDEST:
        return f"head width must be <= {triton_backend.WIDEST}, got {work.width}"
    if step == "factor":
        if work.records_graph:
            return "records no graph"
        return None if work.match_rank else "needs a match of rank >= 1, got 0"
    most = {"rank": MOST_RANKED, "score_rows": MOST_SCORED, "distill": MOST_DISTILLED}[step]
    if work.blocks > most:
        return f"needs at most {most} blocks, got {work.blocks}"
    if step == "distill":
        return None
    if work.layers != 2:
        return f"needs a scorer of 2 layers, got {work.layers}"
    if work.match_rank > WIDEST_MATCH:
        return f"needs a match of rank <= {WIDEST_MATCH}, got {work.match_rank}"
    if step == "score_rows":
        return None if work.match_rank else "needs a match of rank >= 1, got 0"
    if work.budget is not None and work.budget.room(work.blocks) < 1:
        return "must list 1 block or more, got 0"
    return None


class Torch:
    """Steps in torch: any device, dtype and size."""

    summarise = staticmethod(summaries.summarise)
    factor = staticmethod(scoring.factor)

    @staticmethod
    def rank(scores: BlockScores, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """`Selection.indices` and `counts` of all rows."""
        assert scores.steps is not None
        rows = torch.arange(scores.row_count, device=scores.visible.device)
        return ranking.rank(scores, rows, seed, scores.steps.host_sync)

    @staticmethod
    def score_rows(scores: BlockScores, batch: DistillBatch, listed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores of listed blocks for the batch's chosen rows, and of all blocks for its dense rows, if any."""
        chosen, dense = batch.rows[: batch.chosen], batch.rows[batch.chosen :]
        lists = listed[:, :, chosen // scores.selecting_rows]
        return scores.of(chosen, lists), scores.of_all(dense) if len(dense) else None

    distill = staticmethod(distill_gradients)


class Triton:
    """Steps in Triton: what `why_not` accepts."""

    @staticmethod
    def summarise(
        query: Tensor, key: Tensor, size: int, row_unit: int, unit: int, padding: Tensor | None, before: bool
    ) -> tuple[BlockSummaries, BlockSummaries]:
        """See `summaries.summarise`."""
        from .kernels.summaries import summarise

        rows, keys = summarise(query, key, size, min(row_unit, size), min(unit, size), padding, before)
        return BlockSummaries(*rows), BlockSummaries(*keys)

    @staticmethod
    def factor(
        rows: BlockSummaries, keys: BlockSummaries, own: Tensor, parameters: ScorerParameters, layers: list[Layer]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None, Tensor | None]:
        """See `scores.factor`; also `halves` of `Factors`, and for groups of heads the query side of the match."""
        from .kernels.summaries import factor

        inputs = rows.summary, keys.summary, keys.units
        grouped = () if own.shape[1] == len(parameters.log_temperature) else (own, parameters.match_query)
        return factor(*inputs, *layers[0], parameters.summary, parameters.match_key, *grouped)

    @staticmethod
    def rank(scores: BlockScores, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """`Selection.indices` and `counts` of all rows."""
        from .kernels.choose_blocks import listed_blocks

        assert scores.factors is not None
        return listed_blocks(scores.factors, scores.visible, scores.settings, seed, scores.present)

    @staticmethod
    def score_rows(scores: BlockScores, batch: DistillBatch, listed: Tensor) -> tuple[Tensor, None]:
        """Scores of all blocks for all rows of the batch."""
        parameters, batch.together = scores.parameters, True
        leaves = *parameters.stacks, parameters.summary, parameters.match_query, parameters.match_key
        rest = scores.factors, scores.inputs, batch.rows, scores.block_rows
        return RowScores.apply(*leaves, parameters.log_temperature, *rest), None

    @staticmethod
    def distill(
        inputs: DistillInputs,
        batch: DistillBatch,
        lse: Tensor,
        grad_output: Tensor,
        chosen_scores: Tensor | None,
        dense_scores: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `distill.distill_gradients`."""
        if chosen_scores is None and dense_scores is None:
            return None, None
        from .kernels.block_mass import distill_gradients

        chosen = 0 if chosen_scores is None else batch.chosen
        rows = batch.rows if chosen else batch.dense_rows
        rows = rows if batch.together or dense_scores is not None else batch.chosen_rows
        given = rows, chosen, chosen_scores, dense_scores, batch.together
        streams = lse.shape[0] * lse.shape[1] // inputs.selection.group
        factors = batch.chosen_weight * batch.factor(chosen, streams), batch.factor(len(rows) - chosen, streams)
        mean = None
        if batch.saliency:
            norms = torch.linalg.vector_norm(grad_output, dim=-1, dtype=lse.dtype)
            mean = mean_norms(norms, inputs.key_padding_mask)
        settings = inputs.scale, inputs.key_padding_mask, factors, mean, inputs.row_tokens, batch.with_own
        seen = visible_blocks(inputs, batch), lse.contiguous(), grad_output
        *grads, batch.by_row = distill_gradients(inputs.query, inputs.key, inputs.selection, *given, *seen, *settings)
        return grads[0], grads[1]


def implementation(step: str, work: Workload) -> Callable[..., Any]:
    """Implementation of a step for a call."""
    return getattr(Torch if why_not(step, work) else Triton, step)


class ScoringSteps(NamedTuple):
    """Implementations of the steps that score blocks, chosen for one call."""

    summarise: Callable[..., Any]
    factor: Callable[..., Any]
    rank: Callable[..., Any]
    score_rows: Callable[..., Any]
    records_graph: bool
    precision: AbstractContextManager[object]
    """Context without autocast in which they run."""
    host_sync: bool
    """Whether ranking may read values back to the host."""


def choose_steps(work: Workload, distills: bool) -> ScoringSteps:
    """Implementations for a call whose scorer learns by distillation alone, or otherwise needs a graph."""
    if allows_host_sync(work.device):
        steps = Torch.summarise, Torch.factor, Torch.rank, Torch.score_rows
        return ScoringSteps(*steps, work.records_graph, full_precision(work.device), True)
    score_rows = implementation("score_rows", work) if distills else Torch.score_rows
    graph = work.records_graph and score_rows is Torch.score_rows
    work = work._replace(records_graph=graph)
    summarise, factor, rank = (implementation(step, work) for step in ("summarise", "factor", "rank"))
    return ScoringSteps(summarise, factor, rank, score_rows, graph, full_precision(work.device), False)


def summarise(
    query: Tensor, key: Tensor, settings: SelectionSettings, padding: Tensor | None, *, before: bool
) -> tuple[BlockSummaries, BlockSummaries]:
    """Summaries of blocks of queries (b, h, n, d) and keys (b, g, n, d); see `summaries.summarise`."""
    run = implementation("summarise", _workload(query, key, settings))
    return run(query, key, settings.block_size, _mean_unit(settings), settings.score_unit, padding, before)


def _mean_unit(settings: SelectionSettings) -> int:
    """Tokens of a sub-block of queries for which summaries hold a mean: single tokens need none, so a whole block."""
    return settings.block_size if settings.row_unit == 1 else settings.row_unit


def _workload(query: Tensor, key: Tensor, settings: SelectionSettings, **more: Any) -> Workload:
    uniform = query.shape[2:] == key.shape[2:] and key.dtype in triton_backend.DTYPES
    blocks = -(-query.shape[2] // settings.block_size)
    streams = query.shape[:2].numel()
    return Workload(query.device, query.dtype, query.shape[-1], blocks, uniform=uniform, streams=streams, **more)


def score_blocks(
    query: Tensor,
    key: Tensor,
    parameters: ScorerParameters,
    settings: SelectionSettings,
    padding: Tensor | None,
    *,
    distills: bool,
) -> BlockScores:
    """Scores of the blocks of (b, h, n, d) queries and (b, g, n, d) keys, computed on request.

    Args:
        query: also supplies the scored rows.
        key: as long as the query.
        parameters: of the scorer.
        settings: of scoring and ranking.
        padding: bool (b, n), True where a key is ignored.
        distills: gradients reach the scores by distillation alone.
    """
    query, key, size = query.detach(), key.detach(), settings.block_size
    units = _mean_unit(settings), settings.score_unit
    layers, rank = len(parameters.stacks) // 2, parameters.match_key.shape[2]
    graph = torch.is_grad_enabled()
    given = {"match_rank": rank, "layers": layers, "records_graph": graph}
    work = _workload(query, key, settings, budget=settings.budget, **given)
    steps = choose_steps(work, distills and layers == 2 and not parameters.dropout)
    with steps.precision:
        rows, keys = steps.summarise(query, key, size, *units, padding, settings.is_causal)
        own, present = scoring.scored_queries(query, rows.units, settings, padding)
        whole = padding is None and query.shape[2] % size == 0
        with torch.set_grad_enabled(steps.records_graph):
            cast = scoring.cast_layers(parameters.stacks, rows.summary.dtype)
            hidden, columns, matched, halves, left = steps.factor(rows, keys, own, parameters, cast)
            # Only gradients need them.
            inputs = ScoreInputs(rows.summary, keys.summary, keys.units, None if left is None else own)
            inputs = inputs if graph else None
            of_rows, of_keys, visible = scoring.features_of_lists(keys, hidden, columns, matched, parameters)
    rounds = query.dtype.itemsize == 2
    scores = BlockScores(parameters, own, of_rows, of_keys, cast, settings, whole, rounds=rounds, present=present)
    scores.steps, scores.visible, scores.halves, scores.left, scores.inputs = steps, visible, halves, left, inputs
    return scores


@torch.no_grad()
def select(scores: BlockScores, n: int, explore: bool = False) -> Selection:
    """Best blocks of every row of a sequence of n tokens; the first of equals.

    With `explore`, Gumbel noise is added, as if blocks were drawn in proportion to their weight.
    """
    assert scores.steps is not None
    settings, device = scores.settings, scores.visible.device
    with scores.steps.precision:
        indices, counts = scores.steps.rank(scores, fresh_seed(device) if explore else None)
    sizes = n, settings.block_size, settings.is_causal, settings.per_token
    return Selection(indices, counts, *sizes, settings.local_blocks, settings.sink_blocks, group=scores.group)


@torch.no_grad()
def select_rows(scores: BlockScores, rows: Tensor, explore: bool = False) -> Tensor:
    """`Selection.indices` of some rows of a sequence."""
    device = scores.visible.device
    with full_precision(device):
        seed = fresh_seed(device) if explore else None
        return ranking.rank(scores, rows, seed, allows_host_sync(device))[0]


def score_rows(scores: BlockScores, batch: DistillBatch, listed: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scores of a batch's rows, with gradients."""
    assert scores.steps is not None
    with scores.steps.precision:
        return scores.steps.score_rows(scores, batch, listed)


def choose_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selection: Selection,
    scale: float,
    key_padding_mask: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    backend: str,
    distilled_rows: Tensor | None,
    choices: CallChoices | None = None,
) -> BlockAttend | TokenAttend:
    """Implementation of attention over a selection for one call, or for all calls that share `choices`."""
    options = selection, scale, key_padding_mask, dropout_p, seed, backend
    if choices is not None and choices.implementation is not None:
        return choices.implementation(*options, False, distilled_rows, choices)
    streams, choices = query.shape[:2].numel(), CallChoices() if choices is None else choices
    problem = why_not("attend", Workload(query.device, query.dtype, query.shape[-1], 0, streams=streams))
    host_sync = allows_host_sync(query.device)
    options = *options, host_sync, distilled_rows, choices
    if backend == "reference":
        return DenseAttend(*options)
    attend = BlockAttend(*options)
    if selection.per_token:
        attend = TokenAttend(*options)
        if problem is None and backend in ("auto", "triton"):
            problem = triton_backend.why_not(attend.shared_call(query, key, value))
            if problem is None:
                from .kernels.gathered_attention import GatheredAttend

                attend = GatheredAttend(*options)
    elif problem is None and selection.bounds is None:
        from .kernels.lowering import ListedAttend

        attend = ListedAttend(*options)
    if not host_sync:
        choices.implementation = type(attend)
    return attend


def distill_inputs(
    query: Tensor,
    key: Tensor,
    selection: Selection,
    scale: float,
    key_padding_mask: Tensor | None,
    listed_lse: Tensor | None = None,
    row_tokens: int | None = None,
) -> DistillInputs:
    """Attention whose block mass is measured, with the step size of its device."""
    step = STEP if allows_host_sync(query.device) else GPU_STEP
    return DistillInputs(query, key, selection, scale, key_padding_mask, step, listed_lse, row_tokens)


def distill(
    inputs: DistillInputs, batch: DistillBatch, lse: Tensor, grad_output: Tensor, *scores: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the scores of a batch's rows; see `distill.distill_gradients`."""
    query, selection = inputs.query, inputs.selection
    streams = query.shape[:2].numel()
    work = Workload(query.device, query.dtype, query.shape[-1], selection.blocks, streams=streams)
    run = implementation("distill", work)
    return run(inputs, batch, lse, grad_output, *scores)
