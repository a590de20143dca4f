"""Scores of block pairs from their content: what a query block, or a token, is likely to attend to.

    s(I, J) = w2 . relu(Wq q_I + Wk k_J + b1) + b2  +  max (U q_a) . (V k_b) / sqrt(rank) over sub-blocks a of I, b of J

q_I is the mean of a block's queries, k_J a learned mixture of the mean, maximum and minimum of a block's keys. The
first term is an MLP on [q_I ; k_J] whose first layer splits into a part of I and a part of J: pairs of inputs are never
formed. The second keeps what a mean loses. Inputs are detached: what a scorer learns does not bend what it looks at.

Shapes: b batch, h heads, g key heads, n tokens, t blocks, u sub-blocks of a block, r rows, k chosen blocks, d width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import must
from ..ops.scores import RowScores, Seen, by_kernels
from ..ops.selection import Factors, factored, rounded
from ..ops.selection_mass import Lesson
from .alike import lay_together, parameters, stacked
from .summaries import CHUNK, Blocks, Columns, Rows, blocks_of

ALL_PAIRS = 2048
"""Blocks up to which the MLP scores every pair; beyond, those that match best."""
ALL_MATCHES = 16384
"""Blocks up to which every pair is matched; beyond, those in the super-blocks that match best."""
SUPER = 16
"""Blocks of a super-block."""
CANDIDATES = 4
"""Candidates for each block to be kept."""

Layer = tuple[Tensor, Tensor]
"""A linear layer of every head: weight (h or 1, after, before), bias (h or 1, after)."""


class ImportanceScorer(nn.Module):
    """An MLP on pairs of summaries, one for each head unless shared, evaluated without forming the pairs.

    Args:
        input_dim: width of a summary.
        hidden_dim: hidden units.
        num_layers: linear layers; only the first is free of pairs, so two is cheap and more is not.
        num_heads: heads.
        share_across_heads: one MLP for all heads.
        dropout: probability of dropping a hidden unit, for a whole row of pairs at once.

    >>> scorer = ImportanceScorer(16, 32, 2, num_heads=4)
    >>> scorer(torch.randn(2, 4, 10, 16), torch.randn(2, 4, 7, 16)).shape
    torch.Size([2, 4, 10, 7])
    """

    def __init__(
        self,
        input_dim: int,
        hidden_dim: int = 128,
        num_layers: int = 2,
        num_heads: int = 1,
        share_across_heads: bool = False,
        dropout: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"input_dim": input_dim, "hidden_dim": hidden_dim, "num_layers": num_layers, "num_heads": num_heads}
        for name, value in sizes.items():
            if value < 1:
                raise must(f"{name} must be >= 1", value)
        if not 0.0 <= dropout < 1.0:
            raise must("dropout must lie in [0, 1)", dropout)
        self.input_dim, self.hidden_dim, self.num_heads = input_dim, hidden_dim, num_heads
        self.dropout = dropout
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        widths = [2 * input_dim, *[hidden_dim] * (num_layers - 1), 1]

        def mlp() -> nn.Sequential:
            layers: list[nn.Module] = []
            for before, after in pairwise(widths[:-1]):
                layers += [nn.Linear(before, after, **made), nn.ReLU(), nn.Dropout(dropout)]
            return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1], **made))

        self.scorers = nn.ModuleList(mlp() for _ in range(1 if share_across_heads else num_heads))
        lay_together(self.leaves())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ImportanceScorer:
        super()._apply(fn, recurse)
        lay_together(self.leaves())
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        lay_together(self.leaves())

    def forward(self, q_summary: Tensor, k_summary: Tensor, head_idx: int | None = None) -> Tensor:
        """Scores of all pairs.

        Args:
            q_summary: (b, h, rows, d), or (b, rows, d) of one head.
            k_summary: (b, h, t, d), or (b, t, d).
            head_idx: which head, where one is given.

        Returns:
            (b, h, rows, t), or (b, rows, t).
        """
        one = q_summary.dim() == 3
        if one:
            if head_idx is None and len(self.scorers) > 1:
                raise must(f"head_idx must be one of 0 .. {self.num_heads - 1} for the summaries of one head", None)
            heads = slice(0, 1) if len(self.scorers) == 1 else slice(head_idx, (head_idx or 0) + 1)
            q_summary, k_summary = q_summary[:, None], k_summary[:, None]
        else:
            heads = slice(None)
        layers = self.layers(q_summary.dtype, heads)
        rows, columns = self.query_part(q_summary, layers), self.key_part(k_summary, layers)
        scores = self.join(rows[:, :, :, None], columns[:, :, None], None, layers)
        return scores[:, 0] if one else scores

    def layers(self, dtype: torch.dtype, heads: slice = slice(None)) -> list[Layer]:
        """Every linear layer of those heads, or of the one MLP for all."""
        found = stacked(self, self.leaves(), dtype)
        if heads != slice(None):
            found = [each[heads] if len(each) > 1 else each for each in found]
        return [*zip(found[::2], found[1::2], strict=True)]

    def leaves(self) -> list[list[Tensor]]:
        """Of one linear layer after the other the weights of all heads, and then their biases."""
        every = [[*mlp._modules.values()][::3] for mlp in self.scorers._modules.values()]
        return [parameters(same, name) for same in zip(*every, strict=True) for name in ("weight", "bias")]

    def query_part(self, queries: Tensor, layers: list[Layer]) -> Tensor:
        """The first layer's part of the queries, with its bias, (b, h, rows, hidden)."""
        weight, bias = layers[0]
        return queries @ weight[..., : self.input_dim].mT + bias[:, None]

    def key_part(self, keys: Tensor, layers: list[Layer]) -> Tensor:
        """The first layer's part of the keys, (b, h, t, hidden)."""
        return keys @ layers[0][0][..., self.input_dim :].mT

    def join(self, rows: Tensor, columns: Tensor, keep: Tensor | None, layers: list[Layer]) -> Tensor:
        """Scores of broadcast pairs, without the last dimension; `keep` scales hidden units."""
        hidden = rows + columns
        for weight, bias in layers[1:]:
            hidden = hidden.relu() if hidden.requires_grad else hidden.relu_()
            if keep is not None:
                hidden = hidden * keep
            flat = hidden.flatten(2, -2) @ weight.mT + bias[:, None]
            hidden = flat.unflatten(2, hidden.shape[2:-1])
        return hidden.squeeze(-1)

    def channels(self, queries: Tensor) -> Tensor | None:
        """Which hidden units each of (b, h, rows, d) keeps while training, scaled, (b, h, rows, hidden)."""
        if not self.training or not self.dropout:
            return None
        ones = queries.new_ones(len(queries), self.num_heads, queries.shape[2], self.hidden_dim)
        return F.dropout(ones, self.dropout)


class BlockScorer(nn.Module):
    """Everything that learns: the MLP, the mixture of key summaries, the match, a temperature for each head.

    Args:
        num_heads: heads.
        head_dim: width of queries and keys.
        config: an `AdaptiveConfig`.
    """

    def __init__(self, num_heads: int, head_dim: int, config: Any, **made: Any) -> None:
        super().__init__()
        self.config, self.num_heads = config, num_heads
        sizes = head_dim, config.hidden_dim, config.num_layers, num_heads
        self.importance = ImportanceScorer(*sizes, config.share_across_heads, config.dropout, **made)
        own = 1 if config.share_across_heads else num_heads
        self.summary = nn.Parameter(torch.empty(own, 3 * head_dim, head_dim, **made))
        self.match_query = nn.Parameter(torch.empty(own, head_dim, config.match_rank, **made))
        self.match_key = nn.Parameter(torch.empty(own, head_dim, config.match_rank, **made))
        log = torch.full((num_heads,), math.log(config.temperature), **made)
        if config.learnable_temperature:
            self.log_temperature = nn.Parameter(log)
        else:
            self.register_buffer("log_temperature", log)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters anew. Before any training a block's score is a projection of the scores of its parts."""
        width, rank = self.match_query.shape[1:]
        self.summary.zero_()
        self.summary[:, :width] = torch.eye(width)
        self.log_temperature.fill_(math.log(self.config.temperature))
        if rank:
            # So that the product of the projections is, on average, q . k / sqrt(d).
            size = (max(width, rank) / min(width, rank)) ** 0.25
            drawn = [nn.init.orthogonal_(torch.zeros(width, rank), size) for _ in self.match_query]
            self.match_query.copy_(torch.stack(drawn))
        self.match_key.copy_(self.match_query)
        for mlp in self.importance.scorers:
            for layer in mlp:  # pyrefly: ignore[not-iterable]
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()
            # The match alone decides at first; a random MLP would only add noise to it.
            mlp[-1].weight *= 0.1  # pyrefly: ignore[bad-index, unsupported-operation]
            nn.init.zeros_(mlp[-1].bias)  # pyrefly: ignore[bad-index, bad-argument-type]

    @property
    def temperature(self) -> Tensor:
        """One for each head, never below the floor; there the gradient still passes, so that it can rise again."""
        free = self.log_temperature.exp()
        return free + (free.clamp(min=self.config.min_temperature) - free).detach()

    def look(
        self, query: Tensor, key: Tensor, block_size: int, is_causal: bool, per_token: bool, padding: Tensor | None
    ) -> Scores:
        """Summaries of (b, h, n, d) queries and (b, g, n, d) keys, ready to be scored."""
        config, dtype = self.config, torch.float64 if query.dtype == torch.float64 else torch.float32
        query, key, unit = query.detach(), key.detach(), config.score_unit
        told = block_size, block_size if per_token else unit, unit, padding, dtype
        rows, keys = blocks_of(query, key, *told, before=is_causal)
        whole = padding is None and query.shape[2] % block_size == 0
        plain = config.num_layers == 2 and not (self.training and config.dropout)
        by_lesson = plain and config.hard_sparsity and config.score_gradient == "distill"
        keys = self._for_heads(keys)
        seen = Seen(rows.summary, keys.summary, keys.units)
        by_lesson = by_lesson and by_kernels(query, config.match_rank, seen)
        # Where a lesson alone asks for gradients, and kernels compute them, there is no graph to be kept.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not by_lesson):
            layers = self.importance.layers(dtype)
            made = factored(*seen, *layers[0], self.summary, self.match_key)
            if made is None:
                speaking, columns = self.speaking(rows, layers), self.columns(keys, layers)
            else:
                speaking = Rows(made[0], rows.units, rows.unit_there, self.importance.channels(rows.summary))
                columns = Columns(made[1], made[2], keys.unit_there)
        scores = Scores(self, query, speaking, columns, layers, block_size, is_causal, per_token, whole)
        scores.seen, scores.visible = seen if by_lesson else None, keys.there
        scores.halves = None if made is None else made[3]
        return scores

    def _for_heads(self, blocks: Blocks) -> Blocks:
        """Key blocks (b, g, t, ...), for every query head."""
        groups = self.num_heads // blocks.summary.shape[1]
        return blocks if groups == 1 else Blocks(*(x.repeat_interleave(groups, 1) for x in blocks))

    def columns(self, blocks: Blocks, layers: list[Layer]) -> Columns:
        """What scores need of key blocks (b, g, t, ...), for every query head."""
        blocks = self._for_heads(blocks)
        mixed = blocks.summary @ self.summary.to(blocks.summary.dtype)
        matched = blocks.units.flatten(2, 3) @ self.match_key.to(mixed.dtype)
        matched = matched.unflatten(2, blocks.units.shape[2:4])
        return Columns(self.importance.key_part(mixed, layers), matched, blocks.unit_there)

    def speaking(self, blocks: Blocks, layers: list[Layer]) -> Rows:
        """What scores need of the query blocks that speak for rows."""
        keep = self.importance.channels(blocks.summary)
        return Rows(self.importance.query_part(blocks.summary, layers), blocks.units, blocks.unit_there, keep)


class Scores:
    """Scores of the rows of one sequence, or of some of them, computed where they are asked for.

    Args:
        scorer: who scores.
        query: (b, h, r, d): the rows' own queries, where tokens choose; otherwise only its device and dtype matter.
        rows: the blocks that speak for the rows.
        columns: all key blocks.
        layers: of the MLP, in the dtype of the scores.
        block_size: tokens in a block.
        is_causal: only blocks before a row's own matter.
        per_token: rows are tokens.
        whole: no sub-block is empty; one that is not finite belongs to a block that is not visible.
        ids: int64 (r): which rows of the sequence these are, ascending; all of them if None.
        first: the block for which the first of `rows` speaks.
    """

    def __init__(
        self,
        scorer: BlockScorer,
        query: Tensor,
        rows: Rows,
        columns: Columns,
        layers: list[Layer],
        block_size: int,
        is_causal: bool,
        per_token: bool,
        whole: bool,
        ids: Tensor | None = None,
        first: int = 0,
    ) -> None:
        self.scorer, self.query, self.layers, self.whole = scorer, query, layers, whole
        self.block_size, self.is_causal, self.per_token = block_size, is_causal, per_token
        self.rows, self.units, self.units_there, self.keep = rows
        self.hidden, self.matched, self.unit_there = columns
        self.rank = self.matched.shape[-1]
        self.root = max(self.rank, 1) ** -0.5
        self.ids, self.first = ids, first
        self.rounds = query.dtype.itemsize == 2
        self.learns = torch.is_grad_enabled()
        self.seen: Seen | None = None
        self.halves: tuple[Tensor, Tensor, Tensor] | None = None

    @cached_property
    def inverse(self) -> Tensor:
        """What scores are multiplied by, (h, 1, 1)."""
        # Asked for first where ranks are made without gradients, and then where scores are to have them.
        with torch.set_grad_enabled(self.learns):
            return self.scorer.temperature.to(self.rows.dtype).reciprocal().view(-1, 1, 1)

    @cached_property
    def ranked_keys(self) -> Tensor:
        """`matched`, as ranking takes it."""
        return rounded(self.matched, (3, 4)) if self.rounds else self.matched

    @cached_property
    def visible(self) -> Tensor:
        """Blocks with something to see, bool (b, h, t)."""
        return self.unit_there.any(-1)

    @property
    def row_count(self) -> int:
        """Rows there are here."""
        if self.ids is not None:
            return len(self.ids)
        return self.query.shape[2] if self.per_token else self.visible.shape[2]

    def block_rows(self, rows: Tensor) -> Tensor:
        """The blocks of the sequence in which rows, counted among those here, lie."""
        rows = rows if self.ids is None else self.ids[rows]
        return rows // self.block_size if self.per_token else rows

    def chunk(self, kept: int) -> int:
        """Rows whose ranking fits `CHUNK`."""
        batch, heads, t, units = self.unit_there.shape
        hidden = self.rows.shape[-1]
        within = min(t, CANDIDATES * kept) if t > ALL_PAIRS else t
        own_units = 1 if self.per_token else self.units.shape[3]
        # Of each pair: matches of sub-blocks, hidden units, a few words of noise and order.
        matched = min(t, CANDIDATES * kept * SUPER) if t > ALL_MATCHES else t
        each = matched * own_units * units + (within * hidden // self.block_size if self.per_token else within * hidden)
        return max(1, CHUNK // (batch * heads * (each + 8 * t) * self.rows.dtype.itemsize))

    @torch.no_grad()
    def ranked(self, begin: int, end: int, kept: int) -> Tensor:
        """Scores over temperature (b, h, rows, t) of some rows; -inf for pairs ruled out beforehand."""
        rows = torch.arange(begin, end, device=self.query.device)
        t = self.visible.shape[2]
        wanted = min(t, max(CANDIDATES * kept, 1))
        if t > ALL_MATCHES and self.rank:
            return self._from_supers(rows, wanted)
        match = None
        if self.rank:
            match = self._match(rows, self.ranked_keys[:, :, None], self.unit_there[:, :, None], self.rounds)
        if t <= ALL_PAIRS or self.per_token or match is None:
            blocks = self.block_rows(rows)
            if self.per_token and self.ids is None:
                # Tokens of a block share what speaks for them.
                every = torch.arange(begin // self.block_size, (end - 1) // self.block_size + 1, device=rows.device)
                scores = self._mlp(every, self.hidden[:, :, None])[:, :, blocks - begin // self.block_size]
            elif self.per_token:
                every, which = torch.unique(blocks, return_inverse=True)
                scores = self._mlp(every, self.hidden[:, :, None])[:, :, which]
            else:
                scores = self._mlp(blocks, self.hidden[:, :, None])
            return (scores if match is None else scores.add(match, alpha=self.root)) * self.inverse
        if self.is_causal:
            # Candidates too: what comes later must not crowd out what came before.
            match = match.masked_fill(torch.arange(t, device=rows.device) >= self.block_rows(rows)[:, None], -torch.inf)
        best, at = match.topk(wanted, -1)
        scores = self._mlp(self.block_rows(rows), self._take(self.hidden, at)).add(best, alpha=self.root)
        return torch.full_like(match, -torch.inf).scatter_(-1, at, scores * self.inverse)

    @cached_property
    @torch.no_grad()
    def factors(self) -> Factors | None:
        """What the scores of all rows are made of, for one pass without gradients; None where that is not so few."""
        if len(self.layers) != 2 or self.ids is not None:
            return None
        holes = (None, None) if self.whole else (None if self.per_token else self.units_there, self.unit_there)
        own = self.query.unsqueeze(3) if self.per_token else self.units
        heads, scorer = self.scorer.num_heads, self.scorer
        weight, bias, project = *(x.select(1, 0) for x in self.layers[1]), scorer.match_query
        if len(project) < heads:
            weight, bias, project = (x.expand(heads, *x.shape[1:]) for x in (weight, bias, project))
        made = self.rows, self.hidden, weight, bias, own, project, self.matched, scorer.log_temperature
        return Factors(*made, scorer.config.min_temperature, self.keep, *holes, self.halves, self.rounds)

    def of_lesson(self, lesson: Lesson, listed: Tensor) -> tuple[Tensor, Tensor | None]:
        """What `selected_attention` asks of a lesson, with gradients: scores of the blocks listed for its chosen rows,
        and of all blocks for its dense rows, if any; or of all blocks for both, as the lesson then says."""
        if self.seen is None:
            chosen, dense = lesson.chosen_rows, lesson.dense_rows
            return self.of(chosen, listed[:, :, chosen]), self.of_all(dense) if len(dense) else None
        scorer, lesson.together = self.scorer, True
        leaves = [leaf for alike in scorer.importance.leaves() for leaf in alike]
        leaves += [scorer.summary, scorer.match_query, scorer.match_key, scorer.log_temperature]
        asked = self.factors, self.seen, self.layers[0][0], lesson.rows, self.block_size, self.per_token
        return RowScores.apply(*leaves, *asked), None

    def of(self, rows: Tensor, blocks: Tensor) -> Tensor:
        """Scores over temperature of chosen pairs (b, h, r, k), with gradients; blocks past the last score anything."""
        own, at = self.block_rows(rows), blocks.long()
        # Gradients of one block are added up one after another, so that what is not listed must not all be the same.
        at = torch.where(at < self.visible.shape[2], at, own[:, None])
        scores = self._mlp(own, self._take(self.hidden, at))
        if self.rank:
            match = self._match(rows, self._take(self.matched, at), self._seen(at))
            scores = scores.add(match, alpha=self.root)
        return scores * self.inverse

    @torch.no_grad()
    def of_each(self, blocks: Tensor) -> Tensor:
        """`of` for every row, without gradients, in chunks."""
        batch, heads, rows, k = blocks.shape
        each = batch * heads * max(k, 1) * (self.rows.shape[-1] + self.unit_there.shape[3] * (self.rank + 1))
        step = max(1, CHUNK // (each * self.rows.dtype.itemsize))
        every = torch.arange(rows, device=blocks.device)
        return torch.cat([self.of(every[i : i + step], blocks[:, :, i : i + step]) for i in range(0, rows, step)], 2)

    def of_all(self, rows: Tensor) -> Tensor:
        """Scores over temperature of some rows with every block (b, h, r, t), with gradients."""
        scores = self._mlp(self.block_rows(rows), self.hidden[:, :, None])
        if self.rank:
            match = self._match(rows, self.matched[:, :, None], self.unit_there[:, :, None])
            scores = scores.add(match, alpha=self.root)
        return scores * self.inverse

    def _mlp(self, blocks: Tensor, hidden: Tensor) -> Tensor:
        at = blocks - self.first if self.first else blocks
        keep = None if self.keep is None else self.keep[:, :, at, None]
        return self.scorer.importance.join(self.rows[:, :, at, None], hidden, keep, self.layers)

    def _seen(self, at: Tensor) -> Tensor | None:
        """Which sub-blocks of blocks (b, h, r, k) have something to see; None where all have."""
        return None if self.whole else self._take(self.unit_there, at)

    def _match(self, rows: Tensor, matched: Tensor, there: Tensor | None, rounds: bool = False) -> Tensor:
        """Best match of sub-blocks (b, h, r, k) still without 1 / sqrt(rank), with keys (b, h, r or 1, k, u, rank)."""
        speaking = None if self.per_token else self.block_rows(rows)
        speaking = speaking - self.first if speaking is not None and self.first else speaking
        mine = self._queries(self.query[:, :, rows, None] if speaking is None else self.units[:, :, speaking])
        mine = rounded(mine, (3, 4)) if rounds else mine
        k, units = matched.shape[3:5]
        # One product for all rows where they share their keys.
        if matched.shape[2] == 1:
            pairs = (mine.flatten(2, 3) @ matched.flatten(2, 4).mT).unflatten(2, mine.shape[2:4])
        else:
            pairs = mine @ matched.flatten(3, 4).mT
        pairs = pairs.unflatten(-1, (k, units))
        if self.whole or there is None:
            return pairs.amax(-1).amax(3)
        pairs = pairs.masked_fill(~there[:, :, :, None], -torch.inf)
        if speaking is not None:
            pairs = pairs.masked_fill(~self.units_there[:, :, speaking, :, None, None], -torch.inf)
        best = pairs.amax(-1).amax(3)
        # Nothing there on either side: ruled out elsewhere, and a finite number keeps gradients finite.
        return torch.where(best > -torch.inf, best, 0.0)

    def _queries(self, mine: Tensor) -> Tensor:
        """The query's side of the match (b, h, r, a, rank), of (b, h, r, a, d)."""
        mine = mine.to(self.rows.dtype)
        # Means are finite.
        mine = mine.nan_to_num(0.0, 0.0, 0.0) if self.per_token else mine
        found = mine.flatten(2, 3) @ self.scorer.match_query.to(mine.dtype)
        return found.unflatten(2, mine.shape[2:4])

    def _take(self, x: Tensor, at: Tensor) -> Tensor:
        """x (b, h, t, ...) at blocks (b, h, r, k), (b, h, r, k, ...)."""
        sample, head = (torch.arange(many, device=at.device) for many in at.shape[:2])
        return x[sample.view(-1, 1, 1, 1), head.view(-1, 1, 1), at]

    def _from_supers(self, rows: Tensor, wanted: int) -> Tensor:
        """Scores as `ranked` gives them, of the blocks in the super-blocks that match best."""
        t = self.visible.shape[2]
        coarse = F.pad(self.matched.mean(3), (0, 0, 0, -t % SUPER)).unflatten(2, (-1, SUPER)).mean(3)
        there = F.pad(self.visible, (0, -t % SUPER)).unflatten(2, (-1, SUPER)).any(3)
        match = self._match(rows, coarse[:, :, None, :, None], there[:, :, None, :, None])
        own = self.block_rows(rows)[:, None]
        if self.is_causal:
            # A super-block that holds later blocks is summed up from them; a row's own is looked at block by block.
            match = match.masked_fill(torch.arange(coarse.shape[2], device=own.device) >= own // SUPER, -torch.inf)
        _, supers = match.topk(min(-(-wanted // SUPER) * 2, coarse.shape[2]), -1)
        supers = torch.cat([supers, (own // SUPER).expand(*supers.shape[:3], 1)], -1)
        at = (supers[..., None] * SUPER + torch.arange(SUPER, device=supers.device)).flatten(3)
        outside, at = at >= (own if self.is_causal else t), at.clamp(max=t - 1)
        fine = self._match(rows, self._take(self.ranked_keys, at), self._seen(at), self.rounds)
        best, place = fine.masked_fill(outside, -torch.inf).topk(min(wanted, at.shape[-1]), -1)
        at = at.gather(-1, place)
        scores = self._mlp(self.block_rows(rows), self._take(self.hidden, at)).add(best, alpha=self.root)
        empty = torch.full((*at.shape[:3], t), -torch.inf, dtype=scores.dtype, device=scores.device)
        return empty.scatter_reduce_(-1, at, scores * self.inverse, "amax")
