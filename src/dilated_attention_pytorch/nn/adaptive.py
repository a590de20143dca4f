"""Attention on blocks that a scorer chose by their content, for every sample and head, and learns to choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..errors import must, must_be
from ..ops.attention import attention
from ..ops.selected import selected_attention, weighted_attention
from ..ops.selection import Budget, Selection, fresh_seed, select
from ..ops.selection_mass import Lesson, Scene, captured, dense_mass
from ..patterns import BlockDilated, Full
from ..plan import Plan
from ..plan.planner import BLOCK_SIZES
from .cache import KVCache
from .core import probability
from .masks import ignored
from .multihead import MultiheadSparseAttention
from .scorer import BlockScorer, Scores, sampled

Granularity = Literal["auto", "block", "token"]
ScoreGradient = Literal["distill", "prior", "straight_through", "none"]

LESSON_BYTES = 128 * 2**20
"""Memory that the scores of a lesson's rows may take, of each kind."""
MOST_ROWS = {"block": 64, "token": 1024}
"""Rows of all samples whose listed blocks are compared in one step."""
PROBES = 64
"""Tokens on which the captured share of attention is measured when a pattern is asked for."""


@dataclass(frozen=True, slots=True)
class AdaptiveConfig:
    """How blocks are scored, kept and learned.

    >>> AdaptiveConfig(base_sparsity=0.95).kept
    0.05
    """

    base_sparsity: float = 0.9
    """Fraction of a row's visible blocks that is dropped."""
    temperature: float = 1.0
    """What scores are divided by at the start."""
    learnable_temperature: bool = True
    min_temperature: float = 0.1
    hidden_dim: int = 128
    num_layers: int = 2
    dropout: float = 0.0
    """Probability of dropping a hidden unit of the scorer for a whole row while training."""
    share_across_heads: bool = False
    """One scorer for all heads; heads still choose for themselves, by their own queries."""
    hard_sparsity: bool = True
    """Kept blocks attend as they are; otherwise each also weighs what the scorer predicts for it (n <= 8192)."""
    granularity: Granularity = "auto"
    """Rows that choose: "block" of queries, "token", or "auto": tokens when causal, blocks when not."""
    adaptive_ratio: float | None = None
    """Keep as many blocks as it takes to reach this predicted share of the attention, instead of a fixed number."""
    k_min: int = 2
    """Blocks a row keeps at least, its own counted, where it sees as many."""
    k_max: int | None = None
    """And at most, but for forced ones."""
    sink_blocks: int = 1
    """First blocks that every row keeps."""
    local_blocks: int = 2
    """Every row keeps blocks nearer than this; 1 is its own alone."""
    match_rank: int = 32
    """Width of the match between sub-blocks, 0 for none."""
    score_unit: int = 16
    """Tokens of a sub-block."""
    score_gradient: ScoreGradient = "distill"
    """What teaches the scorer. Only "distill" is known to work; the others are for study and need n <= 8192."""
    distill_rows: float = 0.02
    """Fraction of rows that get dense statistics in every step."""
    distill_weight: float = 1.0
    saliency_weighted: bool = True
    """Weigh queries by the norm of their output's gradient."""

    def __post_init__(self) -> None:
        advice = "It is the fraction of blocks dropped; sparsity_ratio elsewhere is the fraction kept."
        if not 0.0 <= self.base_sparsity < 1.0:
            raise must("base_sparsity must lie in [0, 1)", self.base_sparsity, advice)
        if not self.min_temperature > 0:
            raise must("min_temperature must be > 0", self.min_temperature)
        if not self.temperature >= self.min_temperature:
            raise must(f"temperature must be >= min_temperature {self.min_temperature}", self.temperature)
        for name, least in (
            ("hidden_dim", 1),
            ("num_layers", 1),
            ("k_min", 1),
            ("sink_blocks", 0),
            ("local_blocks", 1),
            ("match_rank", 0),
            ("score_unit", 1),
        ):
            if getattr(self, name) < least:
                raise must(f"{name} must be >= {least}", getattr(self, name))
        if self.k_max is not None and self.k_max < self.k_min:
            raise must(f"k_max must be >= k_min {self.k_min}", self.k_max)
        probability("dropout", self.dropout)
        if self.adaptive_ratio is not None and not 0.0 < self.adaptive_ratio < 1.0:
            raise must("adaptive_ratio must lie in (0, 1)", self.adaptive_ratio, "It is a share of attention.")
        if not 0.0 <= self.distill_rows <= 1.0:
            raise must("distill_rows must lie in [0, 1]", self.distill_rows)
        if not self.distill_weight >= 0.0:
            raise must("distill_weight must be >= 0", self.distill_weight)
        for name, kind in (("granularity", Granularity), ("score_gradient", ScoreGradient)):
            if getattr(self, name) not in get_args(kind):
                raise must(f"{name} must be one of {', '.join(get_args(kind))}", repr(getattr(self, name)))

    @property
    def kept(self) -> float:
        """Fraction of a row's visible blocks that is kept."""
        return round(1.0 - self.base_sparsity, 12)

    def per_token(self, is_causal: bool) -> bool:
        """Whether tokens choose for themselves."""
        return is_causal if self.granularity == "auto" else self.granularity == "token"


class LearnedPattern(NamedTuple):
    """What one call looked at."""

    selection: Selection
    scores: Tensor
    """(b, h, rows, k): scores over temperature of the listed blocks"""
    captured: Tensor
    """scalar: mean share of attention that the kept blocks hold, measured exactly on a few tokens"""
    density: Tensor
    """scalar: blocks kept over blocks visible"""

    @property
    def indices(self) -> Tensor:
        """int32 (b, h, rows, k): blocks listed beside those every row keeps; see `Selection`."""
        return self.selection.indices

    @property
    def counts(self) -> Tensor:
        """int32 (b, h, rows)"""
        return self.selection.counts

    def picture(self, sample: int = 0, head: int = 0) -> str:
        """Query blocks down, key blocks across: `#` forced, `+` chosen (by most tokens of the block), `-` by some."""
        chosen = self.selection.allowed()[sample, head].double()
        t, size = self.selection.blocks, self.selection.block_size
        if self.selection.per_token:
            own = self.selection.row_blocks()
            many = torch.zeros(t, dtype=chosen.dtype, device=chosen.device).index_add_(
                0, own, torch.ones_like(chosen[:, 0])
            )
            chosen = (
                torch.zeros(t, t, dtype=chosen.dtype, device=chosen.device).index_add_(0, own, chosen) / many[:, None]
            )
        shared = self.selection.shared()
        lines = [
            "".join("#" if s else "+" if x > 0.5 else "-" if x > 0 else "." for s, x in zip(*row, strict=True))
            for row in zip(shared.tolist(), chosen.tolist(), strict=True)
        ]
        return "\n".join([f"learned: sample {sample}, head {head}, a cell is {size} x {size} tokens", *lines])


class BlockSparseAdaptive(nn.Module):
    """Attention over (B, N, H, D) on the blocks a scorer chose by content.

    The scorer learns while the module trains: in each backward pass it is pulled towards the attention that blocks turn
    out to hold, and its parameters get their gradients there, whatever the loss is. Selection is per sample and per
    head, and with `is_causal` nothing after a token changes what that token sees. `torch.compile` leaves it as it is.

    Args:
        segment_lengths: checked, and without effect: any block of the sequence may be chosen. So are `dilation_rates`.
        num_heads: query heads.
        head_dim: width of queries and keys.
        adaptive_config: an `AdaptiveConfig`; also accepted as `sparse_config`.
        block_size: tokens in a block: 16, 32, 64, 128 or 256.
        softmax_scale: factor on attention's scores; 1 / sqrt(D) by default.
        attention_dropout: probability of dropping a weight while training.
        process_group: must be None; likewise `ring_size`: a selection needs the whole sequence in one place.

    >>> layer = BlockSparseAdaptive([4096], [1], num_heads=4, head_dim=16, block_size=16)
    >>> layer(*torch.randn(3, 2, 200, 4, 16).unbind(), is_causal=True).shape
    torch.Size([2, 200, 4, 16])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        num_heads: int = 8,
        head_dim: int = 64,
        adaptive_config: AdaptiveConfig | None = None,
        *,
        sparse_config: AdaptiveConfig | None = None,
        block_size: int = 128,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        backend: str = "auto",
        process_group: object = None,
        ring_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if process_group is not None or ring_size not in (None, 1):
            raise must(
                "learned attention must run on one device",
                "a process group" if process_group is not None else f"ring_size={ring_size}",
                "A selection needs the whole sequence in one place; patterns of positions run on several ranks.",
            )
        if adaptive_config is not None and sparse_config is not None:
            raise must("adaptive_config and sparse_config must not both be given", "both", "They are one.")
        config = adaptive_config or sparse_config or AdaptiveConfig()
        if not isinstance(config, AdaptiveConfig):
            raise must_be("adaptive_config must be an AdaptiveConfig", type(config).__name__)
        BlockDilated(tuple(segment_lengths), tuple(dilation_rates))
        if block_size not in BLOCK_SIZES:
            raise must(f"block_size must be one of {BLOCK_SIZES}", block_size)
        if block_size % min(config.score_unit, block_size):
            raise must(f"block_size must be a multiple of score_unit {config.score_unit}", block_size)
        if num_heads < 1 or head_dim < 1:
            raise must("num_heads and head_dim must be >= 1", f"{num_heads} and {head_dim}")
        self.segment_lengths, self.dilation_rates = tuple(segment_lengths), tuple(dilation_rates)
        self.num_heads, self.head_dim, self.block_size = num_heads, head_dim, block_size
        self.config, self.backend, self.softmax_scale = config, backend, softmax_scale
        self.attention_dropout = probability("attention_dropout", attention_dropout)
        self.scorer = BlockScorer(num_heads, head_dim, config, device=device, dtype=dtype)
        self._density: Tensor | None = None
        self._lesson: Lesson | None = None

    @torch.compiler.disable
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        return_pattern: bool = False,
        *,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, LearnedPattern]:
        """Attend.

        Args:
            query: (B, N, H, D).
            key: (B, N, G, D), G = H or a divisor of it.
            value: (B, N, G, E).
            is_causal: also require the key not to come after the query.
            return_pattern: also return a `LearnedPattern`.
            key_padding_mask: bool (B, N), True where a key takes no part.

        Returns:
            (B, N, H, E).
        """
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != 4:
                raise must(f"{name} must have shape (batch, n, heads, width)", tuple(tensor.shape))
        if query.shape[2:] != (self.num_heads, self.head_dim):
            raise must(f"query must have {self.num_heads} heads of {self.head_dim}", tuple(query.shape[2:]))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        everything = not self.config.base_sparsity and self.config.adaptive_ratio is None
        if everything and not return_pattern and self.config.k_max is None:
            dropout = self.attention_dropout if self.training else 0.0
            found = attention(
                q, k, v, Full(), is_causal=is_causal, scale=self.softmax_scale, enable_gqa=True, dropout_p=dropout,
                key_padding_mask=key_padding_mask, backend=self.backend,
            )  # fmt: skip
            return found.transpose(1, 2)
        # Choices are made in full precision, whatever attention runs in.
        with torch.autocast(q.device.type, enabled=False):
            scores, selection = self._choose(q, k, is_causal, key_padding_mask)
            lessons = self._lessons(scores, selection)
        self._density = selection.density()
        lse = None
        if self._studies():
            output = self._weighted(q, k, v, scores, selection, key_padding_mask)
        else:
            output, lse = self._attend(q, k, v, selection, key_padding_mask, lessons)
        output = output.transpose(1, 2)
        if not return_pattern:
            return output
        scale = self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale
        with torch.no_grad():
            if lse is None:
                lse = selected_attention(q, k, v, selection, scale=scale, key_padding_mask=key_padding_mask).lse
            shown = self._captured(Scene(q, k, selection, scale, key_padding_mask), lse)
            return output, LearnedPattern(selection, scores.of_each(selection.indices), shown, self._density)

    def _choose(self, q: Tensor, k: Tensor, is_causal: bool, padding: Tensor | None) -> tuple[Scores, Selection]:
        config = self.config
        per_token = config.per_token(is_causal)
        scores = self.scorer.look(q, k, self.block_size, is_causal, per_token, padding)
        budget = Budget(config.kept, config.adaptive_ratio, config.k_min, config.k_max)
        kept = budget.room(scores.visible.shape[2]) + 1
        with torch.no_grad():
            selection = select(
                lambda begin, end: scores.ranked(begin, end, kept),
                scores.chunk(kept),
                scores.visible,
                budget,
                n=q.shape[2],
                block_size=self.block_size,
                is_causal=is_causal,
                per_token=per_token,
                local_blocks=config.local_blocks,
                sink_blocks=config.sink_blocks,
                seed=fresh_seed(q.device) if self.training else None,
            )
        return scores, selection

    def _studies(self) -> bool:
        """Whether the scores take part in the forward pass, or their gradient comes from the loss."""
        learns = self.training and self.config.score_gradient in ("prior", "straight_through")
        return learns or not self.config.hard_sparsity or self.config.score_gradient == "prior"

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Selection,
        padding: Tensor | None,
        lessons: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        found = selected_attention(
            q,
            k,
            v,
            selection,
            scale=self.softmax_scale,
            key_padding_mask=padding,
            dropout_p=self.attention_dropout if self.training else 0.0,
            backend=self.backend,
            **lessons,
        )
        return found.output, found.lse

    def _lessons(self, scores: Scores, selection: Selection) -> dict[str, Any]:
        """Rows that teach the scorer in this step, and its scores for them; nothing where it is not taught so."""
        self._lesson = None
        teaches = self.config.score_gradient == "distill" and not self._studies()
        if not (self.training and torch.is_grad_enabled() and teaches):
            return {}
        config, device = self.config, selection.indices.device
        batch, heads, t = scores.visible.shape
        units, rank = scores.columns.units.shape[3], config.match_rank
        # Hidden units and sub-blocks of a row with a block, and their gradients; each listed block has its own keys.
        a_listed, a_pair = (8 * batch * heads * (config.hidden_dim + units * each) for each in (rank, 1))
        slots = max(selection.indices.shape[-1], 1)
        most = min(MOST_ROWS["token" if selection.per_token else "block"] // batch, LESSON_BYTES // (a_listed * slots))
        chosen = sampled(scores.row_count, max(1, most), device)
        asked = math.ceil(config.distill_rows * scores.row_count)
        dense = sampled(scores.row_count, min(asked, max(1, LESSON_BYTES // (a_pair * t))), device)
        lesson = Lesson(chosen, dense, scores.visible, config.distill_weight, config.saliency_weighted)
        self._lesson = lesson
        return {
            "lesson": lesson,
            "chosen_scores": scores.of(chosen, selection.indices[:, :, chosen]),
            "dense_scores": scores.of_all(dense) if len(dense) else None,
        }

    def _weighted(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, selection: Selection, padding: Tensor | None
    ) -> Tensor:
        """The study modes: predicted shares weigh the blocks, or only their gradient passes."""
        if self.attention_dropout and self.training:
            raise must("attention_dropout must be 0 where scores weigh blocks", self.attention_dropout)
        allowed = selection.allowed()
        own = selection.row_blocks()[:, None]
        column = torch.arange(selection.blocks, device=q.device)
        logits = scores.of_all(torch.arange(scores.row_count, device=q.device)).masked_fill(column == own, 0.0)
        share = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1).masked_fill(~allowed, 0.0)
        if self.config.score_gradient == "none":
            share = share.detach()
        if self.config.hard_sparsity and self.config.score_gradient == "straight_through":
            share = share - share.detach()
        return weighted_attention(
            q, k, v, selection, share.to(q.dtype), scale=self.softmax_scale, key_padding_mask=padding
        )

    def _captured(self, scene: Scene, lse: Tensor) -> Tensor:
        n = scene.selection.n
        token = torch.linspace(0, n - 1, min(n, PROBES), device=lse.device).long()
        by_token = scene._replace(selection=replace(scene.selection, per_token=True))
        _, whole = dense_mass(by_token, token, torch.ones_like(lse))
        return captured(lse, whole, token[:, None])

    def auxiliary_loss(self) -> Tensor:
        """The scorer's loss in the last backward pass, a scalar without gradient, for logging; NaN before one."""
        found = None if self._lesson is None else self._lesson.found.get("loss")
        return torch.tensor(float("nan")) if found is None else found

    def statistics(self) -> dict[str, float]:
        """What the last call kept, for logging: density, and after a backward pass coverage, entropy and loss."""
        stats = {} if self._density is None else {"density": float(self._density)}
        found = {} if self._lesson is None else self._lesson.found
        return stats | {name: float(value) for name, value in found.items()}

    def extra_repr(self) -> str:
        kept = f"coverage {self.config.adaptive_ratio}" if self.config.adaptive_ratio else f"{self.config.kept:g} kept"
        return f"{self.num_heads} heads of {self.head_dim}, blocks of {self.block_size}, {kept}"


class MultiheadBlockSparseAdaptive(MultiheadSparseAttention):
    """Multi-head attention on learned blocks: `BlockSparseAdaptive` between projections.

    Args:
        embed_dim: width of the model.
        num_heads: query heads.
        segment_lengths: see `BlockSparseAdaptive`, as `dilation_rates`, `adaptive_config` and `block_size`.
        dropout: see `MultiheadSparseAttention`, as `bias` and `options`.

    >>> x = torch.randn(2, 200, 64)
    >>> MultiheadBlockSparseAdaptive(64, 4, [4096], [1], block_size=16)(x)[0].shape
    torch.Size([2, 200, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        adaptive_config: AdaptiveConfig | None = None,
        *,
        block_size: int = 128,
        process_group: object = None,
        ring_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, Full(), dropout, bias, **options)
        self.core = BlockSparseAdaptive(
            segment_lengths,
            dilation_rates,
            num_heads,
            self.head_dim,
            adaptive_config,
            block_size=block_size,
            attention_dropout=dropout,
            backend=self.backend,
            process_group=process_group,
            ring_size=ring_size,
            device=options.get("device"),
            dtype=options.get("dtype"),
        )

    def forward(  # pyrefly: ignore[bad-override]
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend within one sequence; see `MultiheadSparseAttention`. The second result is None, never weights."""
        del average_attn_weights
        if need_weights:
            advice = "core(..., return_pattern=True) tells what was looked at."
            raise must("need_weights must be False: learned attention forms no weights", True, advice)
        key = query if key is None else key
        value = key if value is None else value
        if query.dim() != 3 or key.shape[:2] != query.shape[:2]:
            raise must("query and key must have one shape (batch, n, width)", (tuple(query.shape), tuple(key.shape)))
        tensors = (query, key, value) if self.batch_first else (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self.project(*tensors)
        pattern, is_causal = self._masked(attn_mask, is_causal, q.shape[0], q.shape[2])
        if pattern != Full():
            raise must("attn_mask must be the causal mask or none", "another", "Use key_padding_mask, or is_causal.")
        if self.position is not None:
            self._check_position(is_causal, True)
            q, k = self.position.apply(q, k, self._positions(q, None, None), self.head_dim**-0.5)
        padding = None if key_padding_mask is None else ignored("key_padding_mask", key_padding_mask)
        found = self.core(*(x.transpose(1, 2) for x in (q, k, v)), is_causal, key_padding_mask=padding)
        output = self.finish(found.transpose(1, 2))
        return output if self.batch_first else output.transpose(0, 1), None

    def plan(self, n: int, num_heads: int | None = None, is_causal: bool = False) -> Plan:
        """Refuses: what is kept depends on the input."""
        raise must("a plan must follow from positions", "a learned selection", "See core(..., return_pattern=True).")

    def cache(self, length: int | None = None) -> KVCache:
        """Refuses: decoding step by step would have to score blocks anew in every step."""
        raise must("a cache must come with a pattern of positions", "a learned selection")
