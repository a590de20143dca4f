"""Settings of learned attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ...compat import names_replacements
from ...errors import must
from ...selection.rank import Budget
from ...selection.types import SelectionSettings
from ..attention import probability

Granularity = Literal["auto", "block", "token"]
ScoreGradient = Literal["distill", "prior", "straight_through", "none"]
Select = Literal["head", "group", "all"]


@names_replacements
@dataclass(frozen=True, slots=True)
class AdaptiveConfig:
    """Settings of scoring, selection and distillation.

    >>> AdaptiveConfig(base_sparsity=0.95).kept
    0.05
    """

    base_sparsity: float = 0.9
    """Fraction of a row's visible blocks that is dropped."""
    temperature: float = 1.0
    """Initial divisor of scores."""
    learnable_temperature: bool = True
    min_temperature: float = 0.1
    hidden_dim: int = 128
    num_layers: int = 2
    dropout: float = 0.0
    """Probability of dropping a hidden unit of the scorer for a whole row while training."""
    share_across_heads: bool = False
    """One scorer for all heads; heads still select separately, by their own queries."""
    select: Select = "head"
    """Query heads with one score and one list of blocks: each "head", a "group" of `group_size`, or "all"."""
    group_size: int | None = None
    """Query heads of a group; None: the heads that share a key head."""
    hard_sparsity: bool = True
    """Kept blocks are not weighted; otherwise each is weighted by its predicted share (n <= 8192)."""
    granularity: Granularity = "auto"
    """Rows that select: "block" of queries, "token", or "auto": tokens if causal, otherwise blocks."""
    adaptive_ratio: float | None = None
    """Keep blocks until they reach this predicted share of the attention, instead of a fixed number."""
    k_min: int = 2
    """Smallest number of blocks a row keeps, including its own, where it sees that many."""
    k_max: int | None = None
    """Largest number of blocks a row keeps, besides forced ones."""
    sink_blocks: int = 1
    """First blocks that every row keeps."""
    local_blocks: int = 2
    """Every row keeps blocks nearer than this; 1 is its own block alone."""
    match_rank: int = 32
    """Width of the match between sub-blocks, 0 for none."""
    score_unit: int = 1
    """Tokens of a sub-block of keys, and where blocks of queries select also of queries: the match compares means."""
    score_gradient: ScoreGradient = "distill"
    """Training signal of the scorer. Only "distill" is measured to work; the others need n <= 8192."""
    distill_rows: float = 0.02
    """Fraction of rows that get dense statistics in every step, as far as `distill_memory` reaches; 0 for none."""
    distill_min_tokens: int = 128
    """Tokens of the rows with dense statistics, at least: a fraction of a short sequence is too few to learn from."""
    distill_memory: int = 128 * 2**20
    """Bytes for the scores of distilled rows; fewer rows are drawn where they would take more."""
    distill_weight: float = 1.0
    """Factor on the gradient of the scorer."""
    saliency_weighted: bool = True
    """Weight the queries of a row by the norm of their output's gradient, and every row by the mean norm; otherwise the
    task's loss does not scale distillation."""
    exploration: bool = False
    """Add Gumbel noise to the ranking while training, as if blocks were drawn in proportion to their weight."""
    dense_steps: int = 0
    """Training steps with dense attention, before blocks are selected; a step is a backward pass of the module."""
    fitted_start: bool = True
    """After `dense_steps`, fit an untrained match to the queries and keys of the first call that selects blocks."""
    guarded: bool = False
    """Each head selects by its start as long as its trained score captures less attention; see `BlockScorer`."""
    distill_start: int = 0
    """Training steps before the scorer learns; never before the end of `dense_steps`."""
    dense_below: int | None = None
    """Dense attention in shorter sequences, except while distilling; None: never."""

    def __post_init__(self) -> None:
        advice = "It is the fraction of blocks dropped; sparsity_ratio elsewhere is the fraction kept."
        if not 0.0 <= self.base_sparsity < 1.0:
            raise must("base_sparsity must lie in [0, 1)", self.base_sparsity, advice)
        if not self.min_temperature > 0:
            raise must("min_temperature must be > 0", self.min_temperature)
        if not self.temperature >= self.min_temperature:
            raise must(f"temperature must be >= min_temperature {self.min_temperature}", self.temperature)
        positive = ("score_unit", "hidden_dim", "num_layers", "k_min", "local_blocks")
        for name, least in (dict.fromkeys(positive, 1) | {"sink_blocks": 0, "match_rank": 0}).items():
            if getattr(self, name) < least:
                raise must(f"{name} must be >= {least}", getattr(self, name))
        if self.k_max is not None and self.k_max < self.k_min:
            raise must(f"k_max must be >= k_min {self.k_min}", self.k_max)
        if self.dense_below is not None and self.dense_below < 1:
            raise must("dense_below must be >= 1, or None", self.dense_below)
        probability("dropout", self.dropout)
        if self.adaptive_ratio is not None and not 0.0 < self.adaptive_ratio < 1.0:
            raise must("adaptive_ratio must lie in (0, 1)", self.adaptive_ratio, "It is a share of attention.")
        if not 0.0 <= self.distill_rows <= 1.0:
            raise must("distill_rows must lie in [0, 1]", self.distill_rows)
        for name in ("distill_weight", "distill_memory", "distill_min_tokens", "dense_steps", "distill_start"):
            if not getattr(self, name) >= 0:
                raise must(f"{name} must be >= 0", getattr(self, name))
        by_loss = not self.hard_sparsity or self.score_gradient in ("prior", "straight_through")
        if self.guarded and (by_loss or not (self.distill_rows and self.match_rank)):
            raise must("guarded must come with distillation, distill_rows > 0 and match_rank > 0", "other settings")
        if self.group_size is not None and (self.select != "group" or self.group_size < 1):
            raise must('group_size must be >= 1 and come with select="group"', f"{self.group_size}, {self.select!r}")
        if self.share_across_heads and self.select != "head":
            advice = 'With select="all" one scorer selects for all heads.'
            raise must('share_across_heads must come with select="head"', repr(self.select), advice)
        kinds = {"granularity": Granularity, "score_gradient": ScoreGradient, "select": Select}
        for name, kind in kinds.items():
            if getattr(self, name) not in get_args(kind):
                raise must(f"{name} must be one of {', '.join(get_args(kind))}", repr(getattr(self, name)))

    @property
    def kept(self) -> float:
        """Fraction of a row's visible blocks that is kept."""
        return round(1.0 - self.base_sparsity, 12)

    @property
    def keeps_all(self) -> bool:
        """Whether every block is kept."""
        return not self.base_sparsity and self.adaptive_ratio is None and self.k_max is None

    def per_token(self, is_causal: bool) -> bool:
        """Whether rows are tokens."""
        return is_causal if self.granularity == "auto" else self.granularity == "token"

    def group_of(self, num_heads: int, num_kv_heads: int) -> int:
        """Query heads that share a list, of so many query and key heads."""
        if self.select == "head":
            return 1
        shared = num_heads // num_kv_heads
        if self.select == "group" and self.group_size is None and shared == 1:
            advice = "Give group_size, the query heads of a group."
            raise must("heads must share keys where group_size is None", f"{num_heads} key heads", advice)
        group = num_heads if self.select == "all" else self.group_size or shared
        if num_heads % group or (group % shared and shared % group):
            what = f"num_heads must be a multiple of group_size {group}, and group_size a multiple or a divisor of the "
            raise must(what + "heads that share a key head", f"{num_heads} heads, {shared} for each key head")
        return group

    def settings(self, block_size: int, is_causal: bool) -> SelectionSettings:
        """Settings of scoring and ranking for a call."""
        budget = Budget(self.kept, self.adaptive_ratio, self.k_min, self.k_max)
        per_token, unit = self.per_token(is_causal), self.score_unit
        row_unit = 1 if per_token else min(unit, block_size)
        near = self.local_blocks, self.sink_blocks
        return SelectionSettings(budget, block_size, unit, is_causal, per_token, row_unit, *near)

    def explain(self, n: int, block_size: int, is_causal: bool) -> list[str]:
        """Lines that describe the blocks kept of `n` tokens."""
        blocks = -(-n // block_size)
        chooser = "each token" if self.per_token(is_causal) else f"each block of {block_size} queries"
        least, most = min(self.k_min, blocks), self.settings(block_size, is_causal).budget.room(blocks) + 1
        share = f", as many as hold {self.adaptive_ratio:g} of its attention" if self.adaptive_ratio else ""
        forced = f"those less than {self.local_blocks} away and the first {self.sink_blocks}"
        return [
            f"  selects: {chooser}, by its queries and the keys of the blocks",
            f"  keeps  : {least} to {most} of the {blocks:,} blocks of {block_size} keys{share}; always {forced}",
            *([f"  dense  : below {self.dense_below:,} tokens in eval mode"] if self.dense_below else []),
        ]
