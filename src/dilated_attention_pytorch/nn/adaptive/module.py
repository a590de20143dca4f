"""Attention on blocks that a trained scorer selects by content, for every sample and head."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from warnings import warn

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import functional as F

from ...compat import names_replacements
from ...errors import must, must_be
from ...ops.attention import attention
from ...ops.checks import full_precision
from ...ops.derivatives import scale_of
from ...patterns import BlockDilated, Full
from ...plan import Plan
from ...plan.builder import BLOCK_SIZES
from ...selection.attention import selected_attention, weighted_attention
from ...selection.backend import distill_inputs, prefers_sdpa, score_blocks, score_rows, select
from ...selection.distill import DistillInputs, captured, dense_mass, draw_batch
from ...selection.scores import BlockScores
from ...selection.types import DistillBatch, Selection
from ..attention import probability
from ..block_sparse_config import SparsePatternConfig
from ..context_parallel import OverRanks, Ranks
from .config import AdaptiveConfig
from .fit import moments_of, world_size
from .guard import captured_more, query_weights
from .scorer import BlockScorer
from .traced import TORCH_OWN, is_traceable, traced_attention

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ...distributed import SequenceLayout

PROBES = 64
"""Tokens on which the captured share of attention is measured for `return_pattern`."""

_nothing = nullcontext()
_EVERYTHING = torch.ones((), device="cpu")
"""Density of a dense call. On the host, so that statistics of such calls launch nothing."""


class LearnedPattern(NamedTuple):
    """Blocks that one call attended to."""

    selection: Selection
    scores: Tensor
    """(b, s, rows, k): scores over temperature of the listed blocks"""
    captured: Tensor
    """scalar: mean share of attention on the kept blocks, measured exactly on a few tokens"""
    density: Tensor
    """scalar: kept blocks over visible blocks"""

    @property
    def indices(self) -> Tensor:
        """int32 (b, s, rows, k): blocks listed besides the forced ones; see `Selection`."""
        return self.selection.indices

    @property
    def counts(self) -> Tensor:
        """int32 (b, s, rows)"""
        return self.selection.counts

    def picture(self, sample: int = 0, head: int = 0) -> str:
        """Text with a row per query block: `#` forced, `+` chosen by most tokens of the block, `-` by fewer."""
        chosen = self.selection.allowed()[sample, head // self.selection.group].double()
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


@names_replacements
class BlockSparseAdaptive(OverRanks, nn.Module):
    """Attention over (B, N, H, D) on blocks that a scorer selects by content.

    The scorer trains with the module: each backward pass distills the measured attention of blocks into it and computes
    its parameters' gradients, whatever the loss is. Selection is per sample and per head; with `is_causal`, later
    tokens do not change the blocks of earlier ones. `torch.compile` traces the module in one graph. Calls with
    `return_pattern`, study modes or several ranks, and training with dropout, noise, `dense_steps` or `distill_start`
    run eagerly. `statistics` covers eager calls.

    Args:
        segment_lengths: validated but without effect, like `dilation_rates`: any block of the sequence may be selected.
        num_heads: query heads.
        head_dim: width of queries and keys.
        adaptive_config: an `AdaptiveConfig`; also accepted as `sparse_config`.
        sparse_config: a `SparsePatternConfig`, for its block size; without `adaptive_config` its `sparsity_ratio` is
            the fraction of visible blocks kept. Its pattern has no effect: any block may be selected.
        block_size: tokens in a block: 16, 32, 64, 128 or 256; 128 by default.
        num_kv_heads: key heads, a divisor of `num_heads`, by default as many; needed where heads select together
            (`AdaptiveConfig.select`).
        softmax_scale: factor on the attention scores; 1 / sqrt(D) by default.
        attention_dropout: probability of dropping a weight during training.
        process_group: see `Ranks`, also for `ring_size` and `layout`; each rank selects for its own tokens.

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
        sparse_config: SparsePatternConfig | AdaptiveConfig | None = None,
        block_size: int | None = None,
        num_kv_heads: int | None = None,
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
        config, block_size = _settings(adaptive_config, sparse_config, block_size)
        BlockDilated(tuple(segment_lengths), tuple(dilation_rates))
        if block_size not in BLOCK_SIZES:
            raise must(f"block_size must be one of {BLOCK_SIZES}", block_size)
        if block_size % min(config.score_unit, block_size):
            raise must(f"block_size must be a multiple of score_unit {config.score_unit}", block_size)
        if num_heads < 1 or head_dim < 1:
            raise must("num_heads and head_dim must be >= 1", f"{num_heads} and {head_dim}")
        if num_kv_heads is not None and (num_kv_heads < 1 or num_heads % num_kv_heads):
            raise must("num_heads must be a multiple of num_kv_heads", f"{num_heads} and {num_kv_heads}")
        self.segment_lengths, self.dilation_rates = tuple(segment_lengths), tuple(dilation_rates)
        self.num_heads, self.head_dim, self.block_size = num_heads, head_dim, block_size
        self.config, self.backend, self.softmax_scale = config, backend, softmax_scale
        self.attention_dropout = probability("attention_dropout", attention_dropout)
        self.scorer = BlockScorer(num_heads, head_dim, config, num_kv_heads, device=device, dtype=dtype)
        alone = process_group is None and ring_size is None
        self.ranks = Ranks(process_group, 1 if alone else ring_size, layout)
        self._selected: Selection | Tensor | None = None
        self._batch: DistillBatch | None = None
        self._steps, self._counted_task = 0, -1
        if config.dense_steps or config.distill_start:
            self.register_buffer("training_steps", torch.zeros((), dtype=torch.int64, device=device))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Settings may change between calls.
        self.__dict__.pop("_torch_below", None)

    @cached_property
    def _torch_below(self) -> int:
        """Tokens below which torch's dense attention may run, by the settings alone; 0: never."""
        drops = self.training and self.attention_dropout
        if drops or self.backend != "auto" or not self.ranks.alone:
            return 0
        if self.config.keeps_all:
            return TORCH_OWN + 1
        return 0 if self.is_weighted() else min(self.config.dense_below or 0, TORCH_OWN + 1)

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
            key_padding_mask: bool (B, N), True where a key is ignored.

        Returns:
            (B, N, H, E).
        """
        is_compiled = torch.compiler.is_dynamo_compiling()
        without_values = is_compiled or torch.compiler.is_exporting() or query.is_meta
        if without_values and is_traceable(self, return_pattern):
            return traced_attention(self, query, key, value, is_causal, key_padding_mask)
        if is_compiled:
            return self._untraced(query, key, value, is_causal, return_pattern, key_padding_mask=key_padding_mask)
        # Short dense calls take so little GPU time that host time counts: these checks stand for all others. Calls with
        # gradients do not use torch's attention, whose gradients may differ from run to run.
        if (
            not (return_pattern or torch.is_grad_enabled())
            and key_padding_mask is None
            and query.dim() == 4
            and query.shape[1] < self._torch_below
            and query.shape[2] == self.num_heads
            and query.shape[3] == self.head_dim
            and prefers_sdpa(query, key, value)
        ):
            if self._selected is not _EVERYTHING:
                self.store_statistics(_EVERYTHING, None)
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=self.softmax_scale)
            return output.transpose(1, 2)
        return self._forward(query, key, value, is_causal, return_pattern, key_padding_mask)

    # `torch.compile` runs other calls eagerly from here. Decorating `forward` would slow down every call.
    _untraced = torch.compiler.disable(forward)

    def _forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, return_pattern: bool, padding: Tensor | None
    ) -> Tensor | tuple[Tensor, LearnedPattern]:
        alone = self.ranks.group is None or self.ranks.alone
        with _nothing if alone else self.ranks.call():
            self._check(query, key, value, return_pattern, alone)
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            empty = not q.shape[0] or (alone and not q.shape[2])
            if empty and return_pattern:
                raise must("return_pattern must come with at least one sample and one token", tuple(query.shape))
            if empty or (not return_pattern and self._keeps_all(q.shape[2], alone)):
                self.store_statistics(_EVERYTHING, None)
                return self._counted(self._dense(q, k, v, is_causal, padding, alone)).transpose(1, 2)
            if not alone:
                from .context_parallel import attend_over_ranks

                return self._counted(attend_over_ranks(self, q, k, v, is_causal, padding)).transpose(1, 2)
            return self._attend_selected(q, k, v, is_causal, return_pattern, padding)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, return_pattern: bool, alone: bool) -> None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != 4:
                raise must(f"{name} must have shape (batch, n, heads, width)", tuple(tensor.shape))
        if query.shape[2:] != (self.num_heads, self.head_dim):
            raise must(f"query must have {self.num_heads} heads of {self.head_dim}", tuple(query.shape[2:]))
        scorer = self.scorer
        if scorer.group > 1 and max(key.shape[2], scorer.lists) != len(scorer.match_key):
            what = f"key must have {len(scorer.match_key)} heads, for which the scorer is made"
            raise must(what, key.shape[2], "Give num_kv_heads to the module.")
        if return_pattern and not alone:
            advice = "Gather the input and call a copy without a process group."
            raise must("return_pattern must come with one device", f"{self.ranks.world} ranks", advice)

    def _keeps_all(self, tokens: int, alone: bool) -> bool:
        """Whether a sequence with that many tokens on this rank gets dense attention."""
        config = self.config
        if (not config.base_sparsity and config.keeps_all) or self.is_dense_start():
            return True
        least = config.dense_below
        if least is None or self.is_weighted() or self.is_distilling():
            return False
        return (tokens if alone else self.ranks.layout_of(tokens).n) < least

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, padding: Tensor | None, alone: bool) -> Tensor:
        """Dense attention, for calls that keep every block."""
        settings: dict[str, Any] = {
            "is_causal": is_causal,
            "scale": self.softmax_scale,
            "enable_gqa": True,
            "key_padding_mask": padding,
            "dropout_p": self.attention_dropout if self.training else 0.0,
            "backend": self.backend,
        }
        if alone:
            return attention(q, k, v, Full(), **settings)
        return self._attend(q, k, v, Full(), **settings)

    def _attend_selected(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, return_pattern: bool, key_padding_mask: Tensor | None
    ) -> Tensor | tuple[Tensor, LearnedPattern]:
        """Attention over selected blocks, with the whole sequence on one device."""
        if self.training and self.config.fitted_start and 0 < self.config.dense_steps == self._steps:
            self._fit_start(q, k, is_causal, key_padding_mask)
        given = q, k, is_causal, key_padding_mask
        distills, explores = self.is_distilling(), self.explores()
        chooser = scores = self.score_blocks(*given, "stack" if distills else "selecting")
        if self.config.guarded and distills:
            self._check_one_process()
            chooser = self.score_blocks(*given)
        selection = select(chooser, q.shape[2], explores)
        stored, weighted, lse, compared = selection.without_lists(), self.is_weighted(), None, None
        rows = -(-q.shape[2] // scores.settings.row_unit)
        batch = self.draw_batch(scores, selection.indices, rows) if distills else None
        self.__dict__.update(_selected=stored, _batch=batch)
        if self.config.guarded and batch is not None:
            start = self.score_blocks(*given, "start")
            scale = scale_of(self.softmax_scale, self.head_dim)
            inputs = distill_inputs(q, k, selection, scale, key_padding_mask, row_tokens=batch.row_tokens)
            weights = query_weights(q.transpose(1, 2), key_padding_mask)
            compared = captured_more(scores, start, inputs, batch.dense_rows, weights)
        learned = None if batch is None else partial(score_rows, scores)
        weigh = partial(self._weighted, q, k, v, scores) if weighted else None
        listed_scores = chooser.of_each if return_pattern else None
        # Features of blocks take memory during attention, unless they are needed after it.
        del chooser, scores
        if weigh is not None:
            output = weigh(selection, key_padding_mask)
        else:
            output, lse = selected_attention(
                q,
                k,
                v,
                selection,
                scale=self.softmax_scale,
                enable_gqa=True,
                key_padding_mask=key_padding_mask,
                dropout_p=self.attention_dropout if self.training else 0.0,
                distill=batch,
                scores=learned,
                return_lse=True,
                backend=self.backend,
            )
        output = self._counted(output, compared).transpose(1, 2)
        if listed_scores is None:
            return output
        scale = self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale
        with torch.no_grad():
            if lse is None:
                masks = {"enable_gqa": True, "key_padding_mask": key_padding_mask}
                lse = selected_attention(q, k, v, selection, scale=scale, return_lse=True, **masks).lse
            share = self._captured(distill_inputs(q, k, selection, scale, key_padding_mask), lse)
            with full_precision(q.device):
                listed = listed_scores(selection.indices)
            return output, LearnedPattern(selection, listed, share, selection.density())

    def explores(self) -> bool:
        """Whether a call made now adds noise to the ranking of blocks."""
        return self.training and self.config.exploration

    def is_dense_start(self) -> bool:
        """Whether a training call made now attends to every block, because `dense_steps` are not over."""
        return self.training and self._steps < self.config.dense_steps

    def _fit_start(self, q: Tensor, k: Tensor, is_causal: bool, padding: Tensor | None) -> None:
        """Fit an untrained scorer to the queries and keys of this call."""
        if not (self.scorer.match_query.requires_grad and self.scorer.is_untrained()):
            return
        if world_size() > 1:
            # Ranks would fit their own data, and replicas would differ from then on.
            warn("the start of learned attention is not fitted over several ranks; call fit_scorers", stacklevel=2)
            return
        settings = self.config.settings(self.block_size, is_causal)
        self.scorer.fit(moments_of(q, k, settings, padding, self.scorer.lists))

    def _counted(self, output: Tensor, compared: Tensor | None = None) -> Tensor:
        """The output, whose backward pass counts as a training step, with the outcome of a comparison for the guard."""
        if self.training and output.requires_grad and ("training_steps" in self._buffers or compared is not None):
            output.register_hook(partial(self._finish_step, compared))
        return output

    def _finish_step(self, compared: Tensor | None, grad: Tensor) -> None:
        """Count a step at the end of the backward pass: activation checkpointing repeats forward passes within it."""
        # Calls for samples that are padded differently are one step.
        before, self._counted_task = self._counted_task, torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(partial(self._count_step, compared, before != self._counted_task))

    def _count_step(self, compared: Tensor | None, is_first: bool) -> None:
        self._counted_task = -1
        if compared is not None:
            self.scorer.compare(compared)
        if is_first and "training_steps" in self._buffers:
            # The number on the host decides; reading the buffer would stall the host.
            self.__dict__["_steps"] += 1
            self.training_steps.add_(1)

    def _load_from_state_dict(self, *args: Any) -> None:  # pyrefly: ignore[bad-override]
        super()._load_from_state_dict(*args)
        steps = self._buffers.get("training_steps")
        if steps is not None and not steps.is_meta:
            self._steps = int(steps)

    def score_blocks(
        self,
        query: Tensor,
        key: Tensor,
        is_causal: bool,
        padding: Tensor | None = None,
        which: Literal["selecting", "stack", "start"] = "selecting",
    ) -> BlockScores:
        """Scores of the blocks of (B, H, N, D) queries and (B, G, N, D) keys, by a method of `BlockScorer`."""
        config = self.config
        distills = config.hard_sparsity and config.score_gradient == "distill"
        settings = config.settings(self.block_size, is_causal)
        # selecting_parameters, stack_parameters or start_parameters
        parameters = getattr(self.scorer, f"{which}_parameters")()
        return score_blocks(query, key, parameters, settings, padding, distills=distills)

    def is_weighted(self) -> bool:
        """Whether scores weigh blocks in the forward pass, or get their gradient from the loss."""
        by_loss = self.training and self.config.score_gradient in ("prior", "straight_through")
        return by_loss or not self.config.hard_sparsity or self.config.score_gradient == "prior"

    def is_distilling(self) -> bool:
        """Whether the backward pass of a call made now trains the scorer by distillation."""
        distills = self.config.score_gradient == "distill" and not self.is_weighted()
        begun = self._steps >= max(self.config.distill_start, self.config.dense_steps)
        return self.training and torch.is_grad_enabled() and distills and begun

    @staticmethod
    def _check_one_process() -> None:
        """Raise in a job of several ranks, whose guards would compare other rows and choose other scores."""
        if world_size() > 1:
            raise must("guarded=True must be trained in one process", f"{world_size()} ranks", "Set guarded=False.")

    def draw_batch(self, scores: BlockScores, indices: Tensor, rows: int) -> DistillBatch:
        """Draw the rows, of `rows` scored ones in the sequence, on which the scorer is distilled in this step."""
        config = self.config
        dense = config.distill_rows, config.distill_min_tokens, config.distill_memory
        return draw_batch(scores, rows, indices.shape[-1], *dense, config.distill_weight, config.saliency_weighted)

    def store_statistics(self, selected: Selection | Tensor, batch: DistillBatch | None) -> None:
        """Store the selection without lists, or its density, and the batch for `statistics`."""
        # `nn.Module.__setattr__` takes as long as a short call.
        self.__dict__.update(_selected=selected, _batch=batch)

    def _weighted(
        self, q: Tensor, k: Tensor, v: Tensor, scores: BlockScores, selection: Selection, padding: Tensor | None
    ) -> Tensor:
        """Attention whose blocks are weighted by predicted shares, or that passes only their gradient."""
        if self.attention_dropout and self.training:
            raise must("attention_dropout must be 0 where scores weigh blocks", self.attention_dropout)
        allowed = selection.allowed()
        own = selection.row_blocks()[:, None]
        column = torch.arange(selection.blocks, device=q.device)
        with full_precision(q.device):
            logits = scores.of_selecting().masked_fill(column == own, 0.0)
        share = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1).masked_fill(~allowed, 0.0)
        if self.config.score_gradient == "none":
            share = share.detach()
        if self.config.hard_sparsity and self.config.score_gradient == "straight_through":
            share = share - share.detach()
        share = share.to(q.dtype).repeat_interleave(selection.group, 1)
        masks = {"scale": self.softmax_scale, "key_padding_mask": padding}
        return weighted_attention(q, k, v, selection.per_head(), share, **masks)

    def _captured(self, inputs: DistillInputs, lse: Tensor) -> Tensor:
        n = inputs.selection.n
        token = torch.linspace(0, n - 1, min(n, PROBES), device=lse.device).long()
        _, whole = dense_mass(inputs._replace(row_tokens=1), token, torch.ones_like(lse))
        return captured(lse, whole, token[:, None])

    def auxiliary_loss(self) -> Tensor:
        """Scorer loss of the last backward pass, a scalar without gradient, for logging; NaN before the first."""
        loss = None if self._batch is None else self._batch.results().get("loss")
        return torch.tensor(float("nan"), device="cpu") if loss is None else loss

    def statistics(self) -> dict[str, float]:
        """Statistics of the last call: density and the share of rows with dense statistics, and after a backward pass
        coverage, entropy and loss."""
        density = self._selected.density() if isinstance(self._selected, Selection) else self._selected
        stats = {} if density is None else {"density": float(density)}
        results = {} if self._batch is None else self._batch.results()
        if self._batch is not None:
            stats["dense_rows"] = len(self._batch.dense_rows) / self._batch.total
        return stats | {name: float(value) for name, value in results.items()}

    def plan(self, n: int, num_heads: int | None = None, is_causal: bool = False) -> Plan:
        """Raise: the blocks depend on the input."""
        raise must("a plan must follow from positions", "a learned selection", "Use return_pattern=True.")

    def explain(self, n: int, is_causal: bool = False) -> str:
        """Description of the blocks kept at a length."""
        words = self.config.explain(n, self.block_size, is_causal) + [f"  note   : {note}" for note in self.notes()]
        return "\n".join([f"{type(self).__name__} at {n:,} tokens, {self.extra_repr()}", *words])

    def notes(self) -> list[str]:
        """Properties that the settings do not show."""
        return [] if self.ranks.alone else [f"spread over {self.ranks.world} ranks, {self.ranks.layout}"]

    def extra_repr(self) -> str:
        kept = f"coverage {self.config.adaptive_ratio}" if self.config.adaptive_ratio else f"{self.config.kept:g} kept"
        heads = f"{self.num_heads} heads of {self.head_dim}"
        heads += f", {self.scorer.group} to a list" if self.scorer.group > 1 else ""
        return f"{heads}, blocks of {self.block_size}, {kept}"


def scorer_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the scorers of a model's learned attention, each once.

    Their gradients come from distillation. Clip them apart from those of the task, or give them their own rate:

    >>> model = nn.Sequential(nn.Linear(8, 8), BlockSparseAdaptive([64], [1], 2, 4, block_size=16))
    >>> len(scorer_parameters(model)), len(task_parameters(model))
    (8, 2)
    """
    scorers = (module for module in model.modules() if isinstance(module, BlockScorer))
    return list(dict.fromkeys(x for scorer in scorers for x in scorer.parameters()))


def task_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of a model other than `scorer_parameters`: those that the loss of the task trains."""
    scorers = set(scorer_parameters(model))
    return [x for x in model.parameters() if x not in scorers]


def _settings(
    adaptive_config: AdaptiveConfig | None,
    sparse_config: SparsePatternConfig | AdaptiveConfig | None,
    block_size: int | None,
) -> tuple[AdaptiveConfig, int]:
    """Settings of the scorer and block size, from the arguments of the constructor."""
    if isinstance(sparse_config, SparsePatternConfig):
        if block_size not in (None, sparse_config.block_size):
            raise must(f"block_size must be that of sparse_config, {sparse_config.block_size}", block_size)
        block_size, ratio = sparse_config.block_size, sparse_config.sparsity_ratio
        if adaptive_config is None and ratio is not None:
            adaptive_config = AdaptiveConfig(base_sparsity=1.0 - ratio)
    elif sparse_config is not None:
        if not isinstance(sparse_config, AdaptiveConfig):
            raise must_be("sparse_config must be a SparsePatternConfig", type(sparse_config).__name__)
        if adaptive_config is not None:
            raise must("settings of the scorer must be given once", "adaptive_config and a second AdaptiveConfig")
        adaptive_config = sparse_config
    config = AdaptiveConfig() if adaptive_config is None else adaptive_config
    if not isinstance(config, AdaptiveConfig):
        raise must_be("adaptive_config must be an AdaptiveConfig", type(config).__name__)
    return config, 128 if block_size is None else block_size
