"""Attention as a module: a pattern, a scale, a dropout rate, and no parameters besides a learned sink."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import names_replacements
from ..errors import must
from ..ops import attention, attention_with_lse, plan_cache
from ..ops.checks import unexpected
from ..ops.memory_budget import check_budget
from ..ops.weights import attention_weights, check_two_lengths
from ..patterns import Causal, Pattern, as_pattern
from ..plan import Plan
from .cross_attention import attention_across


def probability(what: str, value: float) -> float:
    """`value` if it is a dropout rate."""
    if not 0.0 <= value < 1.0:
        raise must(f"{what} must lie in [0, 1)", value)
    return float(value)


LONGEST_WEIGHTS = 8192


def check_weights(what: str, pattern: Pattern, queries: int, keys: int, cu_seqlens: Tensor | None) -> None:
    """Refuse dense weights of a call that is too long, or packed."""
    if max(queries, keys) > LONGEST_WEIGHTS:
        advice = "attention_rows gives the weights of chosen rows at any length."
        raise must(f"{what} must have n <= {LONGEST_WEIGHTS}", max(queries, keys), advice)
    if cu_seqlens is not None:
        raise must(f"{what} must come with whole sequences", "cu_seqlens")
    if queries != keys:
        check_two_lengths(pattern, queries, keys)


def check_no_sink(what: str, sink: Tensor | None) -> None:
    """Refuse dense weights of a module with a sink."""
    if sink is not None:
        raise must(f"{what} must come without a sink", "sink=True", "Dense weights have no column for a sink.")


class Planned:
    """Common interface of attention modules: plan, explanation, device."""

    pattern: Pattern
    num_heads: int | None = None
    """Heads of a module, if fixed."""
    reason: str | None = None
    """Reason of a factory for choosing this module."""

    def default_device(self) -> torch.device:
        """Device that plans are built for."""
        return torch.device("cpu")

    def plan(self, n: int, num_heads: int | None = None, is_causal: bool = False) -> Plan:
        """The plan this module follows at a length."""
        heads = self.num_heads if num_heads is None else num_heads
        if heads is None:
            raise must("plan must know the number of heads", "none", "Call plan(n, num_heads).")
        pattern = self.pattern & Causal() if is_causal else self.pattern
        own_device = self.default_device()
        # A module built on the meta device still has a plan to show.
        device = torch.device("cpu") if own_device.type == "meta" else own_device
        return plan_cache.get(pattern.resolve(n, heads), n, heads, device=device)

    def explain(
        self, n: int, num_heads: int | None = None, is_causal: bool = False, head_dim: int | None = None
    ) -> str:
        """Description of the computation at a length: pattern, share of the dense work, cost.

        `head_dim` is the module's own where it has one, else 64.
        """
        head_dim = getattr(self, "head_dim", 64) if head_dim is None else head_dim
        heads = (self.num_heads or 8) if num_heads is None else num_heads
        plan = self.plan(n, heads, is_causal)
        return "\n".join(
            [
                f"{type(self).__name__} at {n:,} tokens, {plan.heads} heads of {head_dim}",
                f"  pattern: {plan.name}",
                f"  keeps  : {plan.blocks:,} tiles of {plan.block_size} x {plan.block_size}, "
                f"{100 * plan.density:.3g} % of dense attention's",
                f"  costs  : {plan.cost(head_dim)}",
                *(f"  note   : {note}" for note in self.notes()),
                *([f"  because: {self.reason}"] if self.reason else []),
            ]
        )

    def notes(self) -> list[str]:
        """Additional lines of the explanation."""
        return []

    def _check_whole(self, what: str) -> None:
        """Refuse an argument that needs the whole sequence; modules over several ranks do."""

    def _score_terms(
        self, softcap: float | None, bias: Tensor | None, bias_positions: Tensor | None, dense: bool
    ) -> dict[str, Any]:
        """Given terms of the scores as arguments of the operation; `dense` weights support none."""
        named = {"softcap": softcap, "bias": bias, "bias_positions": bias_positions}
        terms = {name: term for name, term in named.items() if term is not None}
        if terms and dense:
            raise must(f"dense weights must come without {' and '.join(terms)}", "both", "Leave the weights out.")
        return terms

    def _operation(self, n: int, keys: int, with_lse: bool = False) -> Callable[..., Any]:
        """Function that computes attention of `n` queries and `keys` keys: a Tensor, or an `AttentionOutput`."""
        attend = attention_with_lse if with_lse else attention
        return attend if n == keys else partial(attention_across, attend)


@names_replacements
class SparseAttention(nn.Module, Planned):
    """Attention over (B, N, H, D) with any pattern.

    Args:
        pattern: keys that each query attends to, as a value or as text.
        softmax_scale: factor on the scores; 1 / sqrt(D) by default.
        attention_dropout: probability of dropping a weight during training.
        backend: "auto" or a name from `backends()`.
        memory_budget: limit on the memory of attention, see `attention`.
        sink: learn a logit of each head in the softmax denominator, without a value: see `attention`. The parameter
            `sink` (num_heads,) starts at 0, as that of `MultiheadSparseAttention`.
        num_heads: query heads that calls must have; any number when not given, which `sink` does not allow.
        device: required device of tensors, and device of `plan`; any device if None.
        dtype: required dtype of tensors, outside autocast; any dtype if None.

    >>> SparseAttention("window:64 & causal")(*torch.randn(3, 2, 100, 4, 16).unbind()).shape
    torch.Size([2, 100, 4, 16])
    """

    def __init__(
        self,
        pattern: Pattern | str,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        backend: str = "auto",
        memory_budget: int | float | None = None,
        sink: bool = False,
        num_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.pattern = as_pattern(pattern)
        self.softmax_scale = softmax_scale
        self.attention_dropout = probability("attention_dropout", attention_dropout)
        self.backend = backend
        check_budget(memory_budget)
        self.memory_budget = memory_budget
        # Carries the place a user named through .to(), so that the check in forward stays true.
        self.register_buffer("_marker", torch.zeros(0, device=device, dtype=dtype), persistent=False)
        self._fixed = (device is not None, dtype is not None)
        if num_heads is not None and num_heads < 1:
            raise must("num_heads must be >= 1, or None", num_heads)
        self.num_heads = num_heads
        self.register_parameter("sink", None)
        if sink:
            if num_heads is None:
                raise must("sink=True must come with num_heads", "none", "A sink has one logit for each query head.")
            self.sink = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the sink to 0."""
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        softcap: float | None = None,
        bias: Tensor | None = None,
        bias_positions: Tensor | None = None,
        return_attention_weights: bool = False,
        **unknown: object,
    ) -> Any:
        """Attend.

        Args:
            query: (B, N, H, D).
            key: (B, N, G, D), G = H or a divisor of it; N may differ if the pattern depends only on positions.
            value: (B, N, G, E).
            is_causal: also require the key not to come after the query.
            key_padding_mask: bool (B, N), True where a key is ignored.
            cu_seqlens: bounds of sequences packed one after another, see `attention`.
            softcap: bound of the scores, see `attention`.
            bias: table by distance that is added to the scores, see `attention`, as `bias_positions`.
            return_attention_weights: also return the weights (B, H, N, M), without dropout, up to 8192 tokens.

        Returns:
            (B, N, H, E), or a pair of it and the weights.
        """
        if unknown:
            raise unexpected(f"{type(self).__name__}.forward", unknown)
        self._check_device(query)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != 4:
                raise must(f"{name} must have shape (batch, n, heads, width)", tuple(tensor.shape))
        # Not `in`: the compiler compares a symbolic size by identity there.
        if self.num_heads is not None and query.shape[2] != self.num_heads:
            raise must(f"query must have this module's {self.num_heads} heads", query.shape[2])
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        terms = self._score_terms(softcap, bias, bias_positions, return_attention_weights)
        if self.sink is not None:
            terms["sink"] = self.sink
        output = self._operation(q.shape[2], k.shape[2])(
            q,
            k,
            v,
            self.pattern,
            is_causal=is_causal,
            scale=self.softmax_scale,
            enable_gqa=True,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            dropout_p=self.attention_dropout if self.training else 0.0,
            backend=self.backend,
            memory_budget=self.memory_budget,
            **terms,
        )
        if not return_attention_weights:
            return output.transpose(1, 2)
        self._check_whole("return_attention_weights")
        check_no_sink("return_attention_weights", self.sink)
        check_weights("return_attention_weights", self.pattern, q.shape[2], k.shape[2], cu_seqlens)
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        options = {"is_causal": is_causal, "scale": scale, "key_padding_mask": key_padding_mask}
        return output.transpose(1, 2), attention_weights(q, k, self.pattern, **options)

    def default_device(self) -> torch.device:
        marker = self._buffers["_marker"]
        assert marker is not None
        return marker.device if self._fixed[0] else torch.device("cpu")

    def _check_device(self, query: Tensor) -> None:
        marker = self._buffers["_marker"]
        assert marker is not None
        if self._fixed[0] and query.device != marker.device:
            raise must(f"query must be on this module's device {marker.device}", query.device)
        if self._fixed[1] and query.dtype != marker.dtype and not torch.is_autocast_enabled(query.device.type):
            raise must(f"query must have this module's dtype {marker.dtype}", query.dtype)

    def extra_repr(self) -> str:
        scale = "" if self.softmax_scale is None else f", softmax_scale={self.softmax_scale}"
        dropout = f", attention_dropout={self.attention_dropout}" if self.attention_dropout else ""
        heads = "" if self.num_heads is None else f", num_heads={self.num_heads}"
        sink = "" if self.sink is None else ", sink=True"
        return f'"{self.pattern}"{scale}{dropout}{heads}{sink}'
