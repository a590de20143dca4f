"""Scorer of pairs of blocks: its parameters, stacked over heads. `selection/scores.py` computes the scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import must
from ...selection.scores import ScorerParameters, cast_layers, floored_temperature, hidden_parts, pair_scores
from .fit import Moments, fit_match

if TYPE_CHECKING:
    from .config import AdaptiveConfig


class ImportanceScorer(nn.Module):
    """MLP on pairs of summaries, one per head unless shared, evaluated without forming the pairs.

    Args:
        input_dim: width of a summary.
        hidden_dim: hidden units.
        num_layers: linear layers; layers after the first are evaluated on all pairs, so more than two are expensive.
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
        self.own_heads, self.num_layers = 1 if share_across_heads else num_heads, num_layers
        for index, (before, after) in enumerate(pairwise(widths)):
            setattr(self, f"weight_{index}", nn.Parameter(torch.empty(self.own_heads, after, before, **made)))
            setattr(self, f"bias_{index}", nn.Parameter(torch.empty(self.own_heads, after, **made)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each head's layers as `nn.Linear` does, head after head."""
        stacks = self.stacks()
        for head in range(self.own_heads):
            for weight, bias in zip(stacks[::2], stacks[1::2], strict=True):
                nn.init.kaiming_uniform_(weight[head], math.sqrt(5))
                bound = 1 / math.sqrt(weight.shape[2])
                nn.init.uniform_(bias[head], -bound, bound)

    def stacks(self) -> list[Tensor]:
        """Parameters of all heads, (h or 1, after, before) and (h or 1, after) of one linear layer after another."""
        return [getattr(self, f"{kind}_{index}") for index in range(self.num_layers) for kind in ("weight", "bias")]

    @property
    def scorers(self) -> nn.ModuleList:
        """The MLP of each head as a module on views of the stacked parameters, built anew on every access."""
        stacks = self.stacks()

        def mlp(head: int) -> nn.Sequential:
            modules: list[nn.Module] = []
            for weight, bias in zip(stacks[::2], stacks[1::2], strict=True):
                layer = nn.Linear(weight.shape[2], weight.shape[1], device="meta")
                for name, value in (("weight", weight[head]), ("bias", bias[head])):
                    delattr(layer, name)
                    setattr(layer, name, value)
                modules += [layer, nn.ReLU(), nn.Dropout(self.dropout)]
            return nn.Sequential(*modules[:-2])

        return nn.ModuleList(mlp(head) for head in range(self.own_heads)).train(self.training)

    def _names(self, index: int) -> list[str]:
        """Entries of a state dict that hold the heads of `stacks()[index]`."""
        kind = ("weight", "bias")[index % 2]
        # A ReLU and a dropout stand between linear layers.
        return [f"scorers.{head}.{3 * (index // 2)}.{kind}" for head in range(self.own_heads)]

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers; without `recurse`, also an empty tensor for each per-head entry of the state dict.

        torch.distributed.checkpoint collects the entries to load from the direct parameters and buffers of every
        module. On ranks that receive a state dict by broadcast it drops all other entries.
        """
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        for index, stack in enumerate([] if recurse else self.stacks()):
            for name in self._names(index):
                empty = torch.empty(stack.shape[1:], dtype=stack.dtype, device=stack.device)
                yield f"{prefix}.{name}" if prefix else name, empty

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        stacks = [x if keep_vars else x.detach() for x in self.stacks()]
        names = [self._names(index) for index in range(len(stacks))]
        for head in range(self.own_heads):
            for name, stack in zip(names, stacks, strict=True):
                # By index: a DTensor that is sharded over heads has no `unbind`.
                destination[prefix + name[head]] = stack[head]

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state, absent = dict(state_dict), []
        for index, (own, stack) in enumerate(zip(self._parameters, self.stacks(), strict=True)):
            names = [prefix + name for name in self._names(index)]
            heads = [state.pop(name) for name in names if name in state]
            if len(heads) < len(names):
                absent += [name for name in names if name not in state_dict]
                continue
            shapes = {tuple(x.shape) for x in heads}
            if shapes != {tuple(stack.shape[1:])}:
                error_msgs.append(
                    f"size mismatch for {names[0]} and the same entry of other heads: copying parameters with shapes "
                    f"{sorted(shapes)} from checkpoint, the shape in current model is {tuple(stack.shape[1:])}."
                )
                continue
            state[prefix + own] = _placed(torch.stack(heads), stack)
        loaded = [], unexpected_keys, error_msgs
        super()._load_from_state_dict(state, prefix, local_metadata, strict, *loaded)
        missing_keys += absent

    def forward(self, q_summary: Tensor, k_summary: Tensor, head_idx: int | None = None) -> Tensor:
        """Scores of all pairs.

        Args:
            q_summary: (b, h, rows, d), or (b, rows, d) of one head.
            k_summary: (b, h, t, d), or (b, t, d).
            head_idx: index of the head, for summaries of one head.

        Returns:
            (b, h, rows, t), or (b, rows, t).
        """
        one, stacks = q_summary.dim() == 3, self.stacks()
        if one:
            if head_idx is None and self.own_heads > 1:
                raise must(f"head_idx must be one of 0 .. {self.num_heads - 1} for the summaries of one head", None)
            if self.own_heads > 1:
                stacks = [x[head_idx : (head_idx or 0) + 1] for x in stacks]
            q_summary, k_summary = q_summary[:, None], k_summary[:, None]
        layers = cast_layers(stacks, q_summary.dtype)
        rows, columns = hidden_parts(q_summary, k_summary, layers[0])
        scores = pair_scores(rows[:, :, :, None], columns[:, :, None], None, layers)
        return scores[:, 0] if one else scores


def _placed(x: Tensor, like: Any) -> Tensor:
    """`x` with the placements of `like`, where that is a DTensor and `x` is not.

    torch.distributed's loaders place only entries with the name of a parameter; stacks have none in a state dict.
    """
    if not hasattr(like, "placements") or hasattr(x, "placements"):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


RECENT = 0.2
"""Weight of the last step in the average that compares a trained scorer with its start."""


class BlockScorer(nn.Module):
    """Trainable parts of learned attention: the MLP, the mixture of key summaries, the match and the temperatures.

    Heads that share a list of blocks share all of it but the projections of the match: each query head and each key
    head of a list has its own, and the projected queries, and keys, are summed.

    With `guarded`, buffers hold the match as it started and `advantage`: how much more attention the trained score
    captures, a moving average for each list over steps of distillation. Where it is negative, the start selects and the
    trained score learns on.

    Args:
        num_heads: query heads.
        head_dim: width of queries and keys.
        config: an `AdaptiveConfig`.
        num_kv_heads: key heads, `num_heads` by default; matters only where heads share a list.
    """

    def __init__(
        self, num_heads: int, head_dim: int, config: AdaptiveConfig, num_kv_heads: int | None = None, **made: Any
    ) -> None:
        super().__init__()
        self.config, self.num_heads = config, num_heads
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.group = config.group_of(num_heads, num_kv_heads)
        self.lists = num_heads // self.group
        sizes = head_dim, config.hidden_dim, config.num_layers, self.lists
        self.importance = ImportanceScorer(*sizes, config.share_across_heads, config.dropout, **made)
        shared = config.share_across_heads
        own, heads, key_heads = (1 if shared else x for x in (self.lists, num_heads, max(self.lists, num_kv_heads)))
        self.summary = nn.Parameter(torch.empty(own, 3 * head_dim, head_dim, **made))
        self.match_query = nn.Parameter(torch.empty(heads, head_dim, config.match_rank, **made))
        self.match_key = nn.Parameter(torch.empty(key_heads, head_dim, config.match_rank, **made))
        log = torch.full((self.lists,), math.log(config.temperature), **made)
        if config.learnable_temperature:
            self.log_temperature = nn.Parameter(log)
        else:
            self.register_buffer("log_temperature", log)
        if config.guarded:
            self.register_buffer("start_query", torch.empty_like(self.match_query))
            self.register_buffer("start_key", torch.empty_like(self.match_key))
            self.register_buffer("advantage", torch.zeros(own, device=made.get("device")))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters anew. Before any training a block's score is a projection of the scores of its parts."""
        width, rank = self.match_query.shape[1:]
        self.summary.zero_()
        self.summary[:, :width] = torch.eye(width, device="cpu")
        self.log_temperature.fill_(math.log(self.config.temperature))
        if rank:
            # So that the product of the projections is, on average, q . k / sqrt(d); for heads that share a list, the
            # sum of the products over the square root of their number.
            joined = len(self.match_key) // len(self.summary) * width
            size = (max(joined, rank) / min(joined, rank) / self._key_sharers) ** 0.25
            # torch has no decomposition in the half precisions, which may be the default.
            wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
            zeros = torch.zeros(joined, rank, device="cpu", dtype=wide)
            drawn = [nn.init.orthogonal_(zeros.clone(), size) for _ in self.summary]
            self.match_key.copy_(torch.stack(drawn).view_as(self.match_key))
        self.match_query.copy_(self._for_queries(self.match_key))
        self.importance.reset_parameters()
        # The match alone decides at first; a random MLP would only add noise to it.
        *_, weight, bias = self.importance.stacks()
        weight.mul_(0.1)
        bias.zero_()
        self._store_start()

    @property
    def _key_sharers(self) -> int:
        """Heads of a list that share a projection of keys."""
        return len(self.match_query) // len(self.match_key)

    def _for_queries(self, match_key: Tensor) -> Tensor:
        """Projections of keys for each head of `match_query`."""
        return match_key if self._key_sharers == 1 else match_key.repeat_interleave(self._key_sharers, 0)

    @torch.no_grad()
    def _store_start(self) -> None:
        """Make the present match the start, where scores are guarded."""
        if self.config.guarded:
            self.start_query.copy_(self.match_query)
            self.start_key.copy_(self.match_key)
            self.advantage.zero_()

    def is_untrained(self) -> bool:
        """Whether the match is the random start, which has one projection for queries and keys."""
        return torch.equal(self.match_query, self._for_queries(self.match_key))

    @torch.no_grad()
    def fit(self, moments: Moments) -> None:
        """Replace the match by the best approximation of q . k for data with these moments, summed over the heads of a
        list.

        A match of the full width is exact already, and stays.
        """
        width, rank = self.match_query.shape[1:]
        if not 0 < rank < moments.key.shape[-1]:
            return
        if self.config.share_across_heads:
            moments = Moments(*(x.sum(0, keepdim=True) for x in moments))
        for own, fitted in zip((self.match_query, self.match_key), fit_match(moments, rank, width), strict=True):
            own.copy_(_placed(fitted.to(own.dtype).view(own.shape), own))
        self._store_start()

    @property
    def temperature(self) -> Tensor:
        """Temperature of each list, at least the floor of the config."""
        return floored_temperature(self.log_temperature, self.config.min_temperature)

    def selecting_parameters(self) -> ScorerParameters:
        """Parameters that select blocks: those in training, or the start in lists that it serves better."""
        return self._from_start(self.advantage < 0) if self.config.guarded else self.stack_parameters()

    def start_parameters(self) -> ScorerParameters:
        """Parameters of the start of all lists: the match alone."""
        return self._from_start(torch.ones_like(self.advantage, dtype=torch.bool))

    @torch.no_grad()
    def _from_start(self, lists: Tensor) -> ScorerParameters:
        given = self.stack_parameters()
        back, started = lists[:, None, None], math.log(self.config.temperature)
        queries, keys = (back.repeat_interleave(len(x) // len(lists), 0) for x in (given.match_query, given.match_key))
        return given._replace(
            stacks=[x.masked_fill(lists.view(-1, *[1] * (x.dim() - 1)), 0.0) for x in given.stacks],
            summary=given.summary.masked_fill(back, 0.0),
            match_query=torch.where(queries, self.start_query, given.match_query),
            match_key=torch.where(keys, self.start_key, given.match_key),
            log_temperature=given.log_temperature.masked_fill(lists.expand(self.lists), started),
        )

    @torch.no_grad()
    def compare(self, captured_more: Tensor) -> None:
        """Add the outcome (s) of a step to `advantage`."""
        more = captured_more.mean(0, keepdim=True) if len(self.advantage) == 1 else captured_more
        self.advantage.lerp_(more.to(self.advantage), RECENT)

    def stack_parameters(self) -> ScorerParameters:
        """Parameters in training of all heads, as `selection` takes them."""
        importance, config = self.importance, self.config
        dropout = importance.dropout if importance.training else 0.0
        own = self.summary, self.match_query, self.match_key, self.log_temperature
        return ScorerParameters(importance.stacks(), *own, config.min_temperature, dropout)
