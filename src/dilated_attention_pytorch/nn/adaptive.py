"""Attention on blocks that a scorer chose by their content, for every sample and head, and learns to choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import must, must_be
from ..ops.attention import attention
from ..ops.selected import selected_attention, weighted_attention
from ..ops.selection import Budget, Selection, fresh_seed, select, select_rows
from ..ops.selection_mass import Lesson, Scene, captured, dense_mass, sampled
from ..patterns import BlockDilated, Full
from ..plan import Plan
from ..plan.planner import BLOCK_SIZES
from ..plan.selected import may_read
from .adaptive_config import AdaptiveConfig
from .core import probability
from .ring import OverRanks, Ranks
from .scorer import BlockScorer, Scores

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed import SequenceLayout

LESSON_BYTES = 128 * 2**20
"""Memory that the scores of a lesson's rows may take, of each kind."""
MOST_ROWS = {"block": 64, "token": 1024}
"""Rows of all samples whose listed blocks are compared in one step."""
PROBES = 64
"""Tokens on which the captured share of attention is measured when a pattern is asked for."""
TORCH_OWN = 4096
"""Tokens up to which torch's dense attention takes no longer on a GPU than ours, and its call less of the host."""

_HERE = nullcontext()
_EVERYTHING = torch.ones(())
"""The density of a call that keeps all. On the host: nothing is launched for what is only told when asked."""


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


class BlockSparseAdaptive(OverRanks, nn.Module):
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
        process_group: see `Ranks`, as `ring_size` and `layout`: over ranks, each chooses for its own tokens.

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
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        ring_size: int | None = None,
        layout: SequenceLayout | str = "contiguous",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
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
        self.ranks = Ranks(process_group, ring_size, layout)
        self._kept: Selection | Tensor | None = None
        self._lesson: Lesson | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Any setting may be given another value later, and what was decided by the one before is decided again.
        self.__dict__.pop("_torch_below", None)

    @cached_property
    def _torch_below(self) -> int:
        """Tokens below which torch may attend, by the settings alone; 0: it never does."""
        drops = self.training and self.attention_dropout
        if drops or self.backend != "auto" or not self.ranks.alone:
            return 0
        if self.config.keeps_all:
            return TORCH_OWN + 1
        return 0 if self.studies() else min(self.config.dense_below or 0, TORCH_OWN + 1)

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
        if torch.compiler.is_dynamo_compiling():
            return self._untraced(query, key, value, is_causal, return_pattern, key_padding_mask=key_padding_mask)
        # What torch is quicker at takes the GPU so short a time that every question of the host counts: these stand for
        # all that other calls are asked. With gradients it is not torch's: they need not come out the same twice.
        if (
            query.is_cuda
            and not (return_pattern or torch.is_grad_enabled())
            and key_padding_mask is None
            and (dtype := query.dtype) is key.dtype is value.dtype
            and dtype.itemsize == 2
            and (shape := query.shape) == key.shape == value.shape
            and len(shape) == 4
            and shape[2] == self.num_heads
            and shape[3] == self.head_dim
            and shape[1] < self._torch_below
        ):
            if self._kept is not _EVERYTHING:
                self.remember(_EVERYTHING, None)
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=self.softmax_scale)
            return output.transpose(1, 2)
        return self._otherwise(query, key, value, is_causal, return_pattern, key_padding_mask)

    # Where a compiler is sent, which so leaves all of it as it is. Around `forward`, every call would take the longer.
    _untraced = torch.compiler.disable(forward)

    def _otherwise(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, return_pattern: bool, padding: Tensor | None
    ) -> Tensor | tuple[Tensor, LearnedPattern]:
        """A call that is not torch's."""
        with _HERE if self.ranks.alone else self.ranks.call():
            self._check(query, key, value, return_pattern)
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            if not return_pattern and (self.config.keeps_all or self._is_short(q.shape[2])):
                self.remember(_EVERYTHING, None)
                return self._dense(q, k, v, is_causal, padding).transpose(1, 2)
            if not self.ranks.alone:
                from .adaptive_ranks import attend_over_ranks

                return attend_over_ranks(self, q, k, v, is_causal, padding).transpose(1, 2)
            return self._here(q, k, v, is_causal, return_pattern, padding)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, return_pattern: bool) -> None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != 4:
                raise must(f"{name} must have shape (batch, n, heads, width)", tuple(tensor.shape))
        if query.shape[2:] != (self.num_heads, self.head_dim):
            raise must(f"query must have {self.num_heads} heads of {self.head_dim}", tuple(query.shape[2:]))
        if return_pattern and not self.ranks.alone:
            advice = "Gather the input and ask a copy without a process group."
            raise must("return_pattern must come with one device", f"{self.ranks.world} ranks", advice)

    def _is_short(self, tokens: int) -> bool:
        """Whether a sequence, of which so many tokens are here, is attended to whole."""
        least = self.config.dense_below
        if least is None or self.studies() or self.teaches():
            return False
        return (tokens if self.ranks.alone else self.ranks.layout_of(tokens).n) < least

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, padding: Tensor | None) -> Tensor:
        """Keeping everything is attention without a choice."""
        told: dict[str, Any] = {
            "is_causal": is_causal,
            "scale": self.softmax_scale,
            "enable_gqa": True,
            "key_padding_mask": padding,
            "dropout_p": self.attention_dropout if self.training else 0.0,
            "backend": self.backend,
        }
        if self.ranks.alone:
            return attention(q, k, v, Full(), **told)
        return self._attend(q, k, v, Full(), **told)

    def _here(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, return_pattern: bool, key_padding_mask: Tensor | None
    ) -> Tensor | tuple[Tensor, LearnedPattern]:
        """Attend where the whole sequence is in one place."""
        with _in_full(q.device):
            scores, selection = self._choose(q, k, is_causal, key_padding_mask)
            lesson = self.sample(scores, selection.indices.shape[-1], scores.row_count) if self.teaches() else None
        self.remember(selection, lesson)
        lse = None
        if self.studies():
            output = self._weighted(q, k, v, scores, selection, key_padding_mask)
        else:
            output, lse = selected_attention(
                q,
                k,
                v,
                selection,
                scale=self.softmax_scale,
                key_padding_mask=key_padding_mask,
                dropout_p=self.attention_dropout if self.training else 0.0,
                backend=self.backend,
                lesson=lesson,
                scores=None if lesson is None else partial(_lesson_scores, scores, selection.indices, lesson),
            )
        output = output.transpose(1, 2)
        if not return_pattern:
            return output
        scale = self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale
        with torch.no_grad():
            if lse is None:
                lse = selected_attention(q, k, v, selection, scale=scale, key_padding_mask=key_padding_mask).lse
            shown = self._captured(Scene(q, k, selection, scale, key_padding_mask), lse)
            density = selection.density()
            return output, LearnedPattern(selection, scores.of_each(selection.indices), shown, density)

    def _choose(self, q: Tensor, k: Tensor, is_causal: bool, padding: Tensor | None) -> tuple[Scores, Selection]:
        scores = self.scorer.look(q, k, self.block_size, is_causal, self.config.per_token(is_causal), padding)
        budget = self.config.budget()
        with torch.set_grad_enabled(False):
            selection = select(
                *self._ranking(scores, budget),
                scores.visible,
                budget,
                n=q.shape[2],
                **self._told(scores, is_causal),
                seed=fresh_seed(q.device) if self.training else None,
                factors=None if may_read(q.device) else scores.factors,
            )
        return scores, selection

    def listed(self, scores: Scores, rows: Tensor, is_causal: bool, seed: Tensor | None = None) -> Tensor:
        """What `select_rows` lists for some rows of a sequence, by their scores."""
        told, budget = self._told(scores, is_causal), self.config.budget()
        return select_rows(*self._ranking(scores, budget), rows, scores.visible, budget, **told, seed=seed)[0]

    def _ranking(self, scores: Scores, budget: Budget) -> tuple[Callable[[int, int], Tensor], Callable[[], int]]:
        """What gives the scores of some rows, and what tells how many rows at a time."""
        kept = budget.room(scores.unit_there.shape[2]) + 1
        return lambda begin, end: scores.ranked(begin, end, kept), lambda: scores.chunk(kept)

    def _told(self, scores: Scores, is_causal: bool) -> dict[str, Any]:
        config = self.config
        near = {"local_blocks": config.local_blocks, "sink_blocks": config.sink_blocks}
        return {"block_size": self.block_size, "is_causal": is_causal, "per_token": scores.per_token, **near}

    def studies(self) -> bool:
        """Whether the scores take part in the forward pass, or their gradient comes from the loss."""
        learns = self.training and self.config.score_gradient in ("prior", "straight_through")
        return learns or not self.config.hard_sparsity or self.config.score_gradient == "prior"

    def teaches(self) -> bool:
        """Whether the scorer learns in the backward pass of a call made now."""
        by_mass = self.config.score_gradient == "distill" and not self.studies()
        return self.training and torch.is_grad_enabled() and by_mass

    def sample(self, scores: Scores, slots: int, rows: int) -> Lesson:
        """Which of so many rows teach the scorer in this step, where a row lists up to `slots` blocks."""
        config, device = self.config, scores.unit_there.device
        batch, heads, t, units = scores.unit_there.shape
        # Hidden units and sub-blocks of a row with a block, and their gradients; each listed block has its own keys.
        a_listed, a_pair = (8 * batch * heads * (config.hidden_dim + units * each) for each in (config.match_rank, 1))
        most = MOST_ROWS["token" if scores.per_token else "block"] // batch
        start = torch.randint(rows, (1,), device=device)
        chosen = min(rows, max(1, min(most, LESSON_BYTES // (a_listed * max(slots, 1)))))
        dense = min(math.ceil(config.distill_rows * rows), max(1, LESSON_BYTES // (a_pair * t)))
        drawn = sampled(rows, chosen, start, dense)
        return Lesson(drawn, chosen, scores.visible, config.distill_weight, config.saliency_weighted)

    def remember(self, kept: Selection | Tensor, lesson: Lesson | None) -> None:
        """Keep what `statistics` tells: what was kept, or its density."""
        # A module looks at each of its kinds of attributes before it sets one, which takes as long as a short call.
        found = kept.without_lists() if isinstance(kept, Selection) else kept
        self.__dict__.update(_kept=found, _lesson=lesson)

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
        found = None if self._lesson is None else self._lesson.results().get("loss")
        return torch.tensor(float("nan")) if found is None else found

    def statistics(self) -> dict[str, float]:
        """What the last call kept, for logging: density, and after a backward pass coverage, entropy and loss."""
        kept = self._kept.density() if isinstance(self._kept, Selection) else self._kept
        stats = {} if kept is None else {"density": float(kept)}
        found = {} if self._lesson is None else self._lesson.results()
        return stats | {name: float(value) for name, value in found.items()}

    def plan(self, n: int, num_heads: int | None = None, is_causal: bool = False) -> Plan:
        """Refuses: what is kept depends on the input."""
        raise must("a plan must follow from positions", "a learned selection", "Use return_pattern=True.")

    def explain(self, n: int, is_causal: bool = False) -> str:
        """What happens at a length, in words."""
        words = self.config.explain(n, self.block_size, is_causal) + [f"  note   : {note}" for note in self.notes()]
        return "\n".join([f"{type(self).__name__} at {n:,} tokens, {self.extra_repr()}", *words])

    def notes(self) -> list[str]:
        """What is not to be seen in the settings."""
        return [] if self.ranks.alone else [f"spread over {self.ranks.world} ranks, {self.ranks.layout}"]

    def extra_repr(self) -> str:
        kept = f"coverage {self.config.adaptive_ratio}" if self.config.adaptive_ratio else f"{self.config.kept:g} kept"
        return f"{self.num_heads} heads of {self.head_dim}, blocks of {self.block_size}, {kept}"


def _lesson_scores(scores: Scores, listed: Tensor, lesson: Lesson) -> tuple[Tensor, Tensor | None]:
    with _in_full(listed.device):
        return scores.of_lesson(lesson, listed)


def _in_full(device: torch.device) -> AbstractContextManager[object]:
    """Choices are made in full precision, whatever attention runs in."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else _HERE
