"""Scores of key blocks for queries from their content, in torch.

    s(a, J) = w2 . relu(Wq q_I + Wk k_J + b1) + b2  +  max (U q_a) . (V k_b) / sqrt(rank) over sub-blocks b of J

q_a is a query, or the mean of a few adjacent queries, of block I: a scored row. q_I is the mean of the block's queries,
k_J a learned mixture of the mean, maximum and minimum of a block's keys. The first layer of the MLP on [q_I ; k_J]
splits into a part of I and a part of J, so pairs of inputs are never formed. Inputs are detached: training the scorer
does not change queries and keys.

The scores of a row over temperature are logits of its predicted attention on other blocks. Tokens that select rank
blocks by their scores. A block of queries ranks them by the sum of the predicted shares of its rows:

    z(I, J) = log sum_a share(a, J),     share(a, .) = softmax(s(a, .) / temperature)

With a coverage budget the own block takes part with the logit 0, and z(I, J) is relative to z(I, I).

Heads that share a list of blocks share its score: the match is that of their queries and keys side by side,
(sum of U q) . (sum of V k), and the MLP reads the means of their summaries.

Shapes: b batch, h heads, s lists of a row (h, unless heads share them), g key heads, n tokens, t blocks, u sub-blocks
of a block, r scored rows, k chosen blocks, d width. Features and scores have a head for each list.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.cpu import native
from .summaries import CHUNK, BlockSummaries
from .types import Factors, ScoreInputs, SelectionSettings

if TYPE_CHECKING:
    from .backend import ScoringSteps

ALL_PAIRS = 16384
"""Blocks up to which a row is scored with every block it sees; a longer row, with blocks of the best super-blocks."""
SUPER = 16
"""Blocks of a super-block."""
CANDIDATES = 8
"""Blocks that a longer row is scored with, for each block that it keeps."""
NONE = -1e30
"""Score of blocks that a row cannot list: finite, for the gradients of rows without any other block."""

Layer = tuple[Tensor, Tensor]
"""A linear layer of every head: weight (h or 1, after, before), bias (h or 1, after)."""


class ScorerParameters(NamedTuple):
    """Parameters of a scorer, stacked over lists and heads; a single one where all share them."""

    stacks: Sequence[Tensor]
    """Weights (s, after, before) and biases (s, after) of one linear layer of the MLP after another"""
    summary: Tensor
    """(s, 3 d, d): mixture of key summaries"""
    match_query: Tensor
    """(h, d, p)"""
    match_key: Tensor
    """(max(s, g), d, p)"""
    log_temperature: Tensor
    """(s), never shared"""
    min_temperature: float
    dropout: float
    """Probability of dropping a hidden unit for a whole row of pairs; 0 in evaluation"""


class QueryFeatures(NamedTuple):
    """Query blocks as scores use them."""

    hidden: Tensor
    """(b, h, t, hidden): the first layer's part"""
    keep: Tensor | None
    """(b, h, t, hidden): scaled dropout mask of hidden units"""


class KeyFeatures(NamedTuple):
    """Key blocks as scores use them."""

    hidden: Tensor
    """(b, h, t, hidden): the first layer's part"""
    matched: Tensor
    """(b, h, t, u, rank)"""
    unit_there: Tensor
    """bool (b, h, t, u)"""


class SuperBoxes(NamedTuple):
    """Least and largest features of the key blocks in each of s super-blocks."""

    low: Tensor
    """(b, h, s, rank): of the match"""
    high: Tensor
    hidden_low: Tensor
    """(b, h, s, hidden): of the first layer's part"""
    hidden_high: Tensor
    there: Tensor
    """bool (b, h, s): super-blocks with a visible token"""


def cast_layers(stacks: Sequence[Tensor], dtype: torch.dtype) -> list[Layer]:
    """Linear layers of the MLP in the dtype of the scores."""
    cast = [x.to(dtype) for x in stacks]
    return [*zip(cast[::2], cast[1::2], strict=True)]


def floored_temperature(log_temperature: Tensor, floor: float) -> Tensor:
    """Temperature of each head, at least `floor`; the gradient passes at the floor, so that it can rise again."""
    free = log_temperature.exp()
    return free + (free.clamp(min=floor) - free).detach()


def hidden_parts(query: Tensor, key: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """Parts of the first layer of query summaries, with its bias, and of key summaries, (b, h, t, hidden)."""
    weight, bias = layer
    width = query.shape[-1]
    return query @ weight[..., :width].mT + bias[:, None], key @ weight[..., width:].mT


def pair_scores(rows: Tensor, columns: Tensor, keep: Tensor | None, layers: list[Layer]) -> Tensor:
    """MLP output of broadcast pairs, without the last dimension; `keep` scales hidden units."""
    hidden = rows + columns
    for weight, bias in layers[1:]:
        hidden = hidden.relu() if hidden.requires_grad else hidden.relu_()
        if keep is not None:
            hidden = hidden * keep
        flat = hidden.flatten(2, -2) @ weight.mT + bias[:, None]
        hidden = flat.unflatten(2, hidden.shape[2:-1])
    return hidden.squeeze(-1)


def bound_scores(rows: Tensor, low: Tensor, high: Tensor, keep: Tensor | None, layers: list[Layer]) -> Tensor:
    """Upper bound of `pair_scores(rows, x, keep, layers)` over every x with `low <= x <= high`."""
    low, high = rows + low, rows + high
    for weight, bias in layers[1:]:
        low, high = low.relu(), high.relu()
        if keep is not None:
            low, high = low * keep, high * keep
        flat = [x.flatten(2, -2) for x in (low, high)]
        up, down = weight.clamp(min=0).mT, weight.clamp(max=0).mT
        low, high = ((a @ up + b @ down + bias[:, None]).unflatten(2, low.shape[2:-1]) for a, b in (flat, flat[::-1]))
    return high.squeeze(-1)


def hidden_mask(hidden: Tensor, parameters: ScorerParameters) -> Tensor | None:
    """Scaled dropout mask (b, h, t, hidden) of the hidden units of query blocks; None without dropout."""
    if not parameters.dropout:
        return None
    heads = len(parameters.log_temperature)
    return F.dropout(hidden.new_ones(len(hidden), heads, *hidden.shape[2:]), parameters.dropout)


def join_heads(x: Tensor, lists: int) -> Tensor:
    """(b, h, ..., d) with the heads of each list side by side, (b, s, ..., h / s d)."""
    if x.shape[1] == lists:
        return x
    return x.unflatten(1, (lists, -1)).movedim(2, -2).flatten(-2)


def join_projections(x: Tensor, many: int) -> Tensor:
    """Projections (h, d, p) of heads as those of `many` heads side by side, (h / many, many d, p)."""
    return x if many == 1 else x.unflatten(0, (-1, many)).flatten(1, 2)


def for_lists(x: BlockSummaries, lists: int) -> BlockSummaries:
    """Summaries of blocks (b, h or g, t, ...) for every list.

    Sub-blocks of heads that share a list stand side by side, and their summaries are averaged. A block that is empty
    for one of them is empty for the list. `units` of a key head that several lists read are not repeated: of single
    tokens they are as large as the keys.
    """
    heads = x.summary.shape[1]
    if heads == lists:
        return x
    if heads < lists:
        summary, *there = (one.repeat_interleave(lists // heads, 1) for one in (x.summary, x.unit_there, x.there))
        return BlockSummaries(summary, x.units, *there)
    mean = x.summary.unflatten(1, (lists, -1)).mean(2)
    there = flags_of_lists(x.unit_there, lists), flags_of_lists(x.there, lists)
    return BlockSummaries(mean, join_heads(x.units, lists), *there)


def flags_of_lists(there: Tensor, lists: int) -> Tensor:
    """Blocks, or sub-blocks, with a visible token (b, h or g, t, ...), for every list; see `for_lists`."""
    heads = there.shape[1]
    if heads <= lists:
        return there if heads == lists else there.repeat_interleave(lists // heads, 1)
    return there.unflatten(1, (lists, -1)).all(2)


def factor(
    rows: BlockSummaries, keys: BlockSummaries, own: Tensor, parameters: ScorerParameters, layers: list[Layer]
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    """`rows`, `columns` and `right` of `Factors`, with gradients, from summaries of heads or of lists."""
    rows, keys = (for_lists(x, len(parameters.log_temperature)) for x in (rows, keys))
    mixed = keys.summary @ parameters.summary.to(keys.summary.dtype)
    hidden, columns = hidden_parts(rows.summary, mixed, layers[0])
    matched = _project_units(keys.units, parameters.match_key, len(parameters.log_temperature))
    return hidden, columns, matched, None, None


def _project_units(units: Tensor, match_key: Tensor, lists: int) -> Tensor:
    """Key side of the match (b, s, t, u, p) of units (b, g or s, t, u, d), by projections of every list or one."""
    sharing, flat = lists // units.shape[1], units.flatten(2, 3)
    project = join_projections(match_key, units.shape[-1] // match_key.shape[1]).to(units.dtype)
    if sharing > 1 and len(project) > 1:
        # Projections of the lists of a key head side by side.
        projected = flat @ project.unflatten(0, (-1, sharing)).movedim(1, 2).flatten(2)
        projected = projected.unflatten(3, (sharing, -1)).movedim(3, 2).flatten(1, 2)
    else:
        projected = flat @ project
        projected = projected if sharing == 1 else projected.repeat_interleave(sharing, 1)
    return projected.unflatten(2, units.shape[2:4])


def scored_queries(
    query: Tensor, units: Tensor, settings: SelectionSettings, padding: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Queries (b, h, r, d) of scored rows, and rows with a visible token, bool (b, r); None if all have one.

    `units` (b, h, t, u, d) are the means of `row_unit` queries, if that is more than one. Where blocks select under a
    causal mask, the rows of a block are those of the block before, as the units are already.
    """
    if settings.per_token:
        return query, None
    missing, own = -query.shape[2] % settings.block_size, units.flatten(2, 3)
    if settings.row_unit == 1:
        # `pad` copies in any case.
        own = F.pad(query, (0, 0, 0, missing)) if missing else query
        own = own.roll(settings.block_size, 2) if settings.is_causal else own
    if padding is None and not missing:
        return own, None
    real = torch.ones_like(query[:, 0, :, 0], dtype=torch.bool) if padding is None else ~padding
    present = F.pad(real, (0, missing)).unflatten(1, (-1, settings.row_unit)).any(-1)
    return own, present.roll(settings.block_size // settings.row_unit, 1) if settings.is_causal else present


def features_of_lists(
    keys: BlockSummaries, hidden: Tensor, columns: Tensor, matched: Tensor, parameters: ScorerParameters
) -> tuple[QueryFeatures, KeyFeatures, Tensor]:
    """Features of query and key blocks from what `factor` computed, and blocks with a visible token, bool (b, s, t)."""
    lists = len(parameters.log_temperature)
    key_features = KeyFeatures(columns, matched, flags_of_lists(keys.unit_there, lists))
    rows = QueryFeatures(hidden, hidden_mask(hidden, parameters))
    return rows, key_features, flags_of_lists(keys.there, lists)


def features(
    rows: BlockSummaries, keys: BlockSummaries, parameters: ScorerParameters, layers: list[Layer]
) -> tuple[QueryFeatures, KeyFeatures]:
    """Features of query and key blocks (b, h, t, ...) and (b, g, t, ...), for every list."""
    rows, keys = (for_lists(x, len(parameters.log_temperature)) for x in (rows, keys))
    hidden, columns, matched, *_ = factor(rows, keys, rows.units, parameters, layers)
    return QueryFeatures(hidden, hidden_mask(hidden, parameters)), KeyFeatures(columns, matched, keys.unit_there)


def scaled_halves(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Float16 with all its digits at the largest value along `dims`, and the powers of two that undo the scale."""
    most = x.abs().amax(dims, keepdim=True).clamp(2.0**-100, 2.0**127)
    power = most.frexp().exponent - 15
    return x.ldexp(-power).half(), power


def rounded(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Values rounded to the digits of float16 relative to the largest along `dims`.

    16-bit inputs have no more digits, and a match of rounded sides is one float16 product instead of three.
    """
    halves, power = scaled_halves(x, dims)
    return halves.to(x.dtype).ldexp(power)


def best_match(queries: Tensor, keys: Tensor, there: Tensor | None) -> Tensor:
    """Largest product of rows (b, h, r, p) with the sub-blocks of each block (b, h, t, u, p), (b, h, r, t).

    Only the sub-blocks in `there`, bool (b, h, t, u), count, all if None; a block without any gives -inf. Runs in C++
    where it can: torch needs an array of all pairs of sub-blocks, and makes it in chunks of rows.
    """
    if not torch.is_grad_enabled():
        best = native.best_match(queries, keys, there)
        if best is not None:
            return best
    batch, heads, t, units, _ = keys.shape
    flat, found = keys.flatten(2, 3).mT, []
    for some in queries.split(max(1, CHUNK // max(batch * heads * t * units * keys.itemsize, 1)), 2):
        pairs = (some @ flat).unflatten(-1, (t, units))
        found.append((pairs if there is None else pairs.masked_fill(~there[:, :, None], -torch.inf)).amax(-1))
    return found[0] if len(found) == 1 else torch.cat(found, 2)


class BlockScores:
    """Scores of the rows of one sequence, or of some of its rows, computed on request, in `full_precision`.

    Methods number scored rows, `selecting_rows` of which select together; those that rank number rows that select.

    Args:
        parameters: of the scorer.
        query: (b, h, r, d): queries of the scored rows.
        rows: features of query blocks.
        columns: features of all key blocks.
        layers: of the MLP, in the dtype of the scores.
        settings: of scoring and ranking.
        whole: no sub-block is empty; a sub-block that is not finite belongs to a block that is not visible.
        ids: int64: the rows of the sequence that select, ascending; all rows if None.
        first: block of the first of `rows`.
        rounds: ranking rounds both sides of the match, as for 16-bit queries.
        present: bool (b, r): scored rows with a visible token, where blocks select; None if all have one.
    """

    def __init__(
        self,
        parameters: ScorerParameters,
        query: Tensor,
        rows: QueryFeatures,
        columns: KeyFeatures,
        layers: list[Layer],
        settings: SelectionSettings,
        whole: bool,
        ids: Tensor | None = None,
        first: int = 0,
        *,
        rounds: bool,
        present: Tensor | None = None,
    ) -> None:
        self.parameters, self.query, self.layers, self.whole = parameters, query, layers, whole
        self.group = query.shape[1] // len(parameters.log_temperature)
        self.settings, self.per_token, self.is_causal = settings, settings.per_token, settings.is_causal
        self.block_size, self.block_rows = settings.block_size, settings.block_size // settings.row_unit
        self.selecting_rows = 1 if settings.per_token else self.block_rows
        """Scored rows that select together"""
        self.row_count = query.shape[2] // self.selecting_rows
        """Rows that select"""
        self.rows, self.keep = rows
        self.hidden, self.matched, self.unit_there = columns
        self.rank = self.matched.shape[-1]
        self.root = max(self.rank, 1) ** -0.5
        self.ids, self.first, self.present = ids, first, present
        self.rounds, self.covers = rounds, settings.budget.coverage is not None
        self.records_graph = torch.is_grad_enabled()
        self.steps: ScoringSteps | None = None
        self.inputs: ScoreInputs | None = None
        self.halves: tuple[Tensor, Tensor, Tensor] | None = None
        self.left: Tensor | None = None
        """(b, h, r, rank): query side of the match of all scored rows, if already computed"""

    @cached_property
    def inverse(self) -> Tensor:
        """Reciprocal of the temperature, (h, 1, 1)."""
        # First used by ranking, without gradients, and later by scores that need them.
        with torch.set_grad_enabled(self.records_graph):
            temperature = floored_temperature(self.parameters.log_temperature, self.parameters.min_temperature)
            return temperature.to(self.rows.dtype).reciprocal().view(-1, 1, 1)

    @cached_property
    def ranked_keys(self) -> Tensor:
        """`matched` in the precision of ranking."""
        return rounded(self.matched, (3, 4)) if self.rounds else self.matched

    @cached_property
    def visible(self) -> Tensor:
        """Blocks with a visible token, bool (b, h, t)."""
        return self.unit_there.any(-1)

    def block_of(self, rows: Tensor) -> Tensor:
        """Blocks of the sequence that contain the given scored rows."""
        if self.per_token:
            return (rows if self.ids is None else self.ids[rows]) // self.block_size
        own = rows // self.block_rows
        return own if self.ids is None else self.ids[own]

    def chunk(self) -> int:
        """Number of rows that select whose ranking fits `CHUNK`."""
        batch, heads, t, units = self.unit_there.shape
        hidden, queries = self.rows.shape[-1], self.selecting_rows
        # For each pair: the score and its share, hidden units, a few words of noise and order.
        within = min(t, ALL_PAIRS)
        each = within * (1 if self.per_token else 3) * queries
        each += within * hidden * queries // self.block_rows
        if t > ALL_PAIRS and self.rank:
            # Long rows hold copies of their candidates' keys.
            candidates = (self._most_supers + 1) * SUPER
            each = max(each, candidates * (units * (self.rank + queries) + hidden))
        return max(1, CHUNK // (batch * heads * (each + 8 * t) * self.rows.dtype.itemsize))

    @torch.no_grad()
    def ranked(self, begin: int, end: int, width: int | None = None) -> Tensor:
        """Scores (b, h, rows, t) by which a range of rows selects; -inf for pairs ruled out beforehand.

        With `width`, the scores of rows that are compared with every block are those of the first `width` blocks.

        A row that sees at most `ALL_PAIRS` blocks is scored with all of them. A longer row is scored with the blocks of
        the super-blocks whose upper bounds are largest. Both the choice and the number of super-blocks depend on the
        row alone, not on the length of the sequence.
        """
        t = self.visible.shape[2]
        if t <= ALL_PAIRS or not self.rank:
            return self._from_all(begin, end, width or t)
        if not self.is_causal:
            return self._from_supers(begin, end)
        middle = self._first_long(begin, end)
        parts = []
        if begin < middle:
            short = self._from_all(begin, middle, ALL_PAIRS)
            parts.append(F.pad(short, (0, t - ALL_PAIRS), value=-torch.inf))
        if middle < end:
            parts.append(self._from_supers(middle, end))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _first_long(self, begin: int, end: int) -> int:
        """First of the rows [begin, end) of a causal sequence that sees more than `ALL_PAIRS` blocks, or the end."""
        if self.ids is None:
            return min(max(begin, (ALL_PAIRS + 1) * (self.block_size if self.per_token else 1)), end)
        own = self.block_of(self._scored_rows(begin, end)[:: self.selecting_rows])
        return begin + int((own <= ALL_PAIRS).sum())

    def _scored_rows(self, begin: int, end: int) -> Tensor:
        """Scored rows of the rows [begin, end) that select."""
        return torch.arange(begin * self.selecting_rows, end * self.selecting_rows, device=self.query.device)

    def _from_all(self, begin: int, end: int, width: int) -> Tensor:
        """Scores in the form of `ranked` with each of the first `width` blocks."""
        rows = self._scored_rows(begin, end)
        every, which = self._distinct_blocks(begin, end)
        scores = self._mlp(every, self.hidden[:, :, None, :width])[:, :, which]
        if self.rank:
            keys, there = self.ranked_keys[:, :, None, :width], self.unit_there[:, :, None, :width]
            scores = scores.add(self._match(rows, keys, there, self.rounds), alpha=self.root)
        column = torch.arange(width, device=rows.device)
        scores = self._of_selecting(scores * self.inverse, rows, column, self.covers)
        return scores.masked_fill(scores <= NONE / 2, -torch.inf)

    def _of_selecting(self, scores: Tensor, rows: Tensor, column: Tensor, with_own: bool) -> Tensor:
        """Scores by which rows select, from those of all of their scored rows (b, h, r, k) with the blocks `column`,
        (k) or (b, h, rows that select, k). A score that is not finite predicts no attention. `with_own`: the own block
        takes part, with the logit 0."""
        if self.per_token:
            return scores
        queries = self.selecting_rows
        own = self.block_of(rows[::queries])[:, None]
        others = column < own if self.is_causal else column != own
        shared = column.dim() == 1
        others = others & (self.visible[:, :, None, : len(column)] if shared else self._take(self.visible, column))
        return self._mean_shares(scores, rows, others, with_own)

    def _mean_shares(self, scores: Tensor, rows: Tensor, others: Tensor, with_own: bool) -> Tensor:
        """Logarithm of the shares of blocks summed over the scored rows of each row that selects; `NONE` or less where
        not in `others` (b, h, rows that select, k), or where no scored row has a query and finite scores."""
        queries = self.selecting_rows
        scores = scores.unflatten(2, (-1, queries))
        scores = scores.masked_fill(~(others[..., None, :] & scores.isfinite()), NONE)
        total = (F.pad(scores, (0, 1)) if with_own else scores).logsumexp(-1, keepdim=True)
        absent = total < NONE / 2
        if self.present is not None:
            absent = absent | ~self.present[:, rows].unflatten(1, (-1, queries))[:, None, ..., None]
        total = total.masked_fill(absent, -NONE)
        shares = (scores - total).logsumexp(3)
        shares = shares - (-total).logsumexp(3) if with_own else shares
        return torch.where(others & ~absent.all(3), shares, NONE)

    def _distinct_blocks(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Blocks of the rows [begin, end) that select, and the index of each scored row's block in them."""
        blocks = self.block_of(self._scored_rows(begin, end))
        if self.ids is not None:
            return torch.unique(blocks, return_inverse=True)
        size = self.block_size if self.per_token else 1
        return torch.arange(begin // size, (end - 1) // size + 1, device=blocks.device), blocks - begin // size

    @cached_property
    @torch.no_grad()
    def factors(self) -> Factors | None:
        """Factored form of the scores of all rows; None if there is none, or only some rows are here."""
        if len(self.layers) != 2 or self.ids is not None:
            return None
        own = self.query
        parameters, heads = self.parameters, len(self.parameters.log_temperature)
        weight, bias, project = *(x.select(1, 0) for x in self.layers[1]), parameters.match_query
        if self.group > 1:
            own, project = self._projected_rows() if self.left is None else self.left, None
        elif len(project) < heads:
            weight, bias, project = (x.expand(heads, *x.shape[1:]) for x in (weight, bias, project))
        made = self.rows, self.hidden, weight, bias, own, project, self.matched, parameters.log_temperature
        there = None if self.whole else self.unit_there
        return Factors(*made, parameters.min_temperature, self.keep, there, self.halves, self.rounds)

    def _projected_rows(self) -> Tensor:
        """Query side of the match of all scored rows (b, h, r, rank), in chunks: heads side by side are a copy."""
        count, one = self.query.shape[2], self.query[:, :, 0]
        parts = torch.arange(count, device=one.device).split(max(1, CHUNK // (one.nbytes + 1)))
        return torch.cat([self._row_queries(rows, False) for rows in parts], 2)

    def of(self, rows: Tensor, blocks: Tensor) -> Tensor:
        """Scores over temperature of pairs (b, h, r, k), with gradients; undefined for blocks >= t."""
        own, at = self.block_of(rows), blocks.long()
        # Gradients of one block are summed serially, so padding entries must not all name the same block.
        at = torch.where(at < self.visible.shape[2], at, own[:, None])
        scores = self._mlp(own, self._take(self.hidden, at))
        if self.rank:
            match = self._match(rows, self._take(self.matched, at), self._seen(at))
            scores = scores.add(match, alpha=self.root)
        return scores * self.inverse

    @torch.no_grad()
    def of_each(self, blocks: Tensor) -> Tensor:
        """Scores by which every row selects, of blocks (b, h, rows, k), without gradients, in chunks."""
        batch, heads, rows, k = blocks.shape
        if not self.per_token:
            step, at = self.chunk(), blocks.long().clamp(max=self.visible.shape[2] - 1)
            ends = [(i, min(i + step, rows)) for i in range(0, rows, step)]
            return torch.cat([self.ranked(*end).gather(-1, at[:, :, slice(*end)]) for end in ends], 2)
        each = batch * heads * max(k, 1) * (self.rows.shape[-1] + self.unit_there.shape[3] * (self.rank + 1))
        step = max(1, CHUNK // (each * self.rows.dtype.itemsize))
        every = torch.arange(rows, device=blocks.device)
        return torch.cat([self.of(every[i : i + step], blocks[:, :, i : i + step]) for i in range(0, rows, step)], 2)

    def of_all(self, rows: Tensor) -> Tensor:
        """Scores over temperature of rows with every block (b, h, r, t), with gradients."""
        scores = self._mlp(self.block_of(rows), self.hidden[:, :, None])
        if self.rank:
            match = self._match(rows, self.matched[:, :, None], self.unit_there[:, :, None])
            scores = scores.add(match, alpha=self.root)
        return scores * self.inverse

    def of_selecting(self) -> Tensor:
        """Scores (b, h, rows, t) of all rows that select, beside 0 for the own block, with gradients."""
        rows = torch.arange(self.query.shape[2], device=self.query.device)
        column = torch.arange(self.visible.shape[2], device=rows.device)
        return self._of_selecting(self.of_all(rows), rows, column, True)

    def _mlp(self, blocks: Tensor, hidden: Tensor) -> Tensor:
        at = blocks - self.first if self.first else blocks
        keep = None if self.keep is None else self.keep[:, :, at, None]
        return pair_scores(self.rows[:, :, at, None], hidden, keep, self.layers)

    def _seen(self, at: Tensor) -> Tensor | None:
        """Sub-blocks of blocks (b, h, r, k) with a visible token; None if all have one."""
        return None if self.whole else self._take(self.unit_there, at)

    def _match(self, rows: Tensor, matched: Tensor, there: Tensor | None, rounds: bool = False) -> Tensor:
        """Best match with a sub-block (b, h, r, k) before 1 / sqrt(rank), with keys (b, h, r, k, u, rank), which
        adjacent rows may share: one line of keys for several rows, or for all."""
        mine = self._row_queries(rows, rounds)
        there = None if self.whole else there
        if matched.shape[2] == 1:
            best = best_match(mine, matched[:, :, 0], None if there is None else there[:, :, 0])
        else:
            grouped = mine.unflatten(2, (matched.shape[2], len(rows) // max(matched.shape[2], 1)))
            pairs = (grouped @ matched.flatten(3, 4).mT).unflatten(-1, matched.shape[3:5])
            pairs = pairs if there is None else pairs.masked_fill(~there[:, :, :, None], -torch.inf)
            best = pairs.amax(-1).flatten(2, 3)
        # Pairs without a visible sub-block are ruled out elsewhere; a finite value keeps gradients finite.
        return best if there is None else torch.where(best > -torch.inf, best, 0.0)

    def _row_queries(self, rows: Tensor, rounds: bool) -> Tensor:
        """Query side of the match (b, h, r, rank) of scored rows."""
        mine = self.query[:, :, rows].to(self.rows.dtype).nan_to_num(0.0, 0.0, 0.0)
        mine = join_heads(mine, len(self.parameters.log_temperature))
        projected = mine @ join_projections(self.parameters.match_query, self.group).to(mine.dtype)
        return rounded(projected, (3,)) if rounds else projected

    def _take(self, x: Tensor, at: Tensor) -> Tensor:
        """x (b, h, t, ...) at blocks (b, h, r, k), (b, h, r, k, ...)."""
        sample, head = (torch.arange(many, device=at.device) for many in at.shape[:2])
        return x[sample.view(-1, 1, 1, 1), head.view(-1, 1, 1), at]

    @property
    def _most_supers(self) -> int:
        """Super-blocks that the longest row is scored with, at most."""
        t = self.visible.shape[2]
        return min(-(-CANDIDATES * (self.settings.budget.room(t) + 1) // SUPER), -(-t // SUPER))

    @cached_property
    def super_boxes(self) -> SuperBoxes:
        """Boxes that contain the features of each super-block's key blocks."""

        missing = -self.visible.shape[2] % SUPER
        some = F.pad(self.visible, (0, missing)).unflatten(2, (-1, SUPER)).any(3)

        def edge(x: Tensor, there: Tensor, sign: int) -> Tensor:
            """Largest of (b, h, t, u, ...) where `there`, times the sign, over each super-block."""
            x = torch.where(there[..., None], sign * x, -torch.inf).amax(3)
            x = F.pad(x, (0, 0, 0, missing), value=-torch.inf).unflatten(2, (-1, SUPER)).amax(3)
            return torch.where(some[..., None], sign * x, 0.0)

        match, hidden = (self.ranked_keys, self.unit_there), (self.hidden[:, :, :, None], self.visible[..., None])
        boxes = [edge(*each, sign) for each in (match, hidden) for sign in (-1, 1)]
        return SuperBoxes(boxes[0], boxes[1], boxes[2], boxes[3], some)

    def super_bounds(self, begin: int, end: int) -> Tensor:
        """Upper bounds (b, h, r, s) of the scores over temperature of the scored rows of the rows [begin, end) that
        select, with the blocks of each super-block; -inf for later super-blocks, and for the own one of a causal row.
        """
        boxes, rows = self.super_boxes, self._scored_rows(begin, end)
        own = self.block_of(rows)
        mine = self._row_queries(rows, self.rounds)
        match = mine.clamp(min=0) @ boxes.high.mT + mine.clamp(max=0) @ boxes.low.mT
        every, which = self._distinct_blocks(begin, end)
        at = every - self.first
        keep = None if self.keep is None else self.keep[:, :, at, None]
        hidden = boxes.hidden_low[:, :, None], boxes.hidden_high[:, :, None]
        scores = bound_scores(self.rows[:, :, at, None], *hidden, keep, self.layers)[:, :, which]
        there = boxes.there[:, :, None]
        if self.is_causal:
            # The super-block of the row itself holds later blocks too: it is scored in any case, up to the row.
            there = there & (torch.arange(there.shape[3], device=own.device) < own[:, None] // SUPER)
        return (scores.add(match, alpha=self.root) * self.inverse).masked_fill(~there, -torch.inf)

    def _best_bounds(self, begin: int, end: int) -> Tensor:
        """`super_bounds` of rows that select. For a block of queries the largest of its scored rows, each relative to
        their sum over super-blocks: one with most of a single query's attention comes first."""
        bounds = self.super_bounds(begin, end)
        if self.per_token:
            return bounds
        bounds = bounds - F.pad(bounds.nan_to_num(NONE, neginf=NONE), (0, 1)).logsumexp(-1, keepdim=True)
        if self.present is not None:
            present = self.present[:, None, self._scored_rows(begin, end), None]
            bounds = bounds.masked_fill(~present, -torch.inf)
        return bounds.unflatten(2, (-1, self.selecting_rows)).amax(3)

    def _from_supers(self, begin: int, end: int) -> Tensor:
        """Scores in the form of `ranked` with the blocks of the super-blocks whose bounds are largest."""
        t, rows, queries = self.visible.shape[2], self._scored_rows(begin, end), self.selecting_rows
        own, bounds = self.block_of(rows[::queries])[:, None], self._best_bounds(begin, end)
        seen = own[:, 0] + 1 if self.is_causal else torch.full_like(own[:, 0], t)
        best, supers = bounds.topk(self._most_supers, -1)
        wanted = -(-CANDIDATES * (self.settings.budget.rooms(seen) + 1) // SUPER)
        rank = torch.arange(supers.shape[3], device=own.device)
        supers = torch.where((best > -torch.inf) & (rank < wanted[:, None]), supers, -(-t // SUPER))
        if self.is_causal:
            supers = torch.cat([supers, (own // SUPER).expand(*supers.shape[:3], 1)], -1)
        at = (supers[..., None] * SUPER + torch.arange(SUPER, device=supers.device)).flatten(3)
        outside, at = at >= (own if self.is_causal else t), at.clamp(max=t - 1)
        match = self._match(rows, self._take(self.ranked_keys, at), self._seen(at), self.rounds)
        scores = self._mlp(own[:, 0], self._take(self.hidden, at)).repeat_interleave(queries, 2)
        scores = self._of_selecting(scores.add(match, alpha=self.root) * self.inverse, rows, at, self.covers)
        scores = scores.masked_fill(outside | (scores <= NONE / 2), -torch.inf)
        empty = torch.full((*at.shape[:3], t), -torch.inf, dtype=scores.dtype, device=scores.device)
        return empty.scatter_reduce_(-1, at, scores, "amax")
