"""Projections around the operation, called as `torch.nn.MultiheadAttention` is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..compat import names_replacements
from ..errors import must
from ..ops.checks import check_dense, unexpected
from ..ops.memory_budget import check_budget
from ..ops.weights import attention_weights
from ..patterns import Causal, Dilated, Full, Pattern, as_pattern
from ..plan.closed_forms import closed_form
from .attention import Planned, check_no_sink, check_weights, probability
from .block_sparse import block_pattern, segments_unused
from .block_sparse_config import SparsePatternConfig
from .context_parallel import MultiheadOverRanks, TakesRanks
from .kv_cache import KVCache, check_cache_type
from .masks import check_causal, check_mask, mask_bias, mask_pattern, padding_mask
from .positional import Position, position_of
from .projections import Projections


def _each_once(change: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """The three changed, those that are one tensor still being one."""
    changed = change(query)
    changed_key = changed if key is query else change(key)
    return changed, changed_key, changed_key if value is key else change(value)


def _shards_equal(pattern: Pattern, n: int, heads: int, local: int) -> bool:
    """Whether head h of every shard of `local` heads follows the pattern as head h of the first does."""
    try:
        whole = pattern.resolve(n, heads)
        if pattern.resolve(n, local) != whole:
            return False
    except ValueError:
        # A pattern made for a number of heads refuses another.
        return False
    form = closed_form(whole)
    return all(form.head_key(head) == form.head_key(head % local) for head in range(heads))


@names_replacements
class MultiheadSparseAttention(Projections, Planned):
    """Multi-head attention with any pattern; a replacement for `torch.nn.MultiheadAttention`.

    Args:
        embed_dim: width of the model.
        num_heads: query heads.
        pattern: keys that each query attends to, as a value or as text.
        dropout: probability of dropping a weight during training.
        bias: whether the projections have biases.
        layer_norm: normalise the output of attention before the output projection (sub-LayerNorm).
        layer_norm_eps: its epsilon.
        gamma_init: initial gain of the value and output projections (MAGNETO).
        num_kv_heads: key and value heads, a divisor of `num_heads` (grouped-query attention).
        kdim: width of keys, `embed_dim` by default; `vdim` likewise for values.
        batch_first: inputs are (B, N, E) if True, (N, B, E) if False.
        position: "rotary", "xpos", "alibi", a `Position`, or None.
        add_bias_kv: learn one more key and value, `bias_k` and `bias_v`, which every query sees: whatever the pattern
            and the masks, and without a position.
        add_zero_attn: likewise a key and a value of zeros.
        sink: learn one logit per head in the softmax denominator, without a value: see `attention`. The parameter
            `sink` (num_heads,) starts at 0, the score of a key that is orthogonal to the query.
        backend: "auto" or a name from `backends()`.
        memory_budget: limit on the memory of attention, without the projections: see `attention`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    >>> x = torch.randn(2, 100, 64)
    >>> output, weights = MultiheadSparseAttention(64, 4, "window:16")(x, x, x)
    >>> output.shape, weights
    (torch.Size([2, 100, 64]), None)
    """

    num_heads: int  # pyrefly: ignore[bad-override-mutable-attribute]
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: Pattern | str,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        layer_norm: bool = False,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        num_kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        position: Position | str | None = None,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        sink: bool = False,
        backend: str = "auto",
        memory_budget: int | float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        norm_eps = layer_norm_eps if layer_norm else None
        super().__init__(embed_dim, num_heads, num_kv_heads, kdim, vdim, bias, norm_eps, gamma_init, device, dtype)
        self.pattern = as_pattern(pattern)
        self.dropout = probability("dropout", dropout)
        self.batch_first = batch_first
        self.backend = backend
        check_budget(memory_budget)
        self.memory_budget = memory_budget
        self.position = position_of(position)
        if self.position is not None:
            self.position.check(self.head_dim)
        zeros = torch.zeros(num_heads, device=device, dtype=dtype) if sink else None
        self.register_parameter("sink", None if zeros is None else nn.Parameter(zeros))
        self.add_zero_attn = add_zero_attn
        for name, projection in (("bias_k", self.k_proj), ("bias_v", self.v_proj)):
            extra = torch.empty(1, 1, projection.out_features, device=device, dtype=dtype) if add_bias_kv else None
            self.register_parameter(name, None if extra is None else nn.Parameter(nn.init.xavier_normal_(extra)))
        if sink and self.has_extra_keys:
            raise must(
                "a sink must come without extra keys", "add_bias_kv or add_zero_attn", "One zero key is a sink of 0."
            )

    @property
    def has_extra_keys(self) -> bool:
        """Whether every query also sees the keys of `add_bias_kv` or `add_zero_attn`."""
        return self.bias_k is not None or self.add_zero_attn

    def reset_parameters(self) -> None:
        """Draw the projections and the extra key and value anew, and set the sink to 0."""
        super().reset_parameters()
        # Not registered yet when the projections are made.
        draws = ("sink", nn.init.zeros_), ("bias_k", nn.init.xavier_normal_), ("bias_v", nn.init.xavier_normal_)
        for name, draw in draws:
            parameter = self._parameters.get(name)
            if parameter is not None:
                draw(parameter)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
        softcap: float | None = None,
        bias: Tensor | None = None,
        bias_positions: Tensor | None = None,
        **unknown: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: (B, N, E), (N, B, E) when not `batch_first`, or (N, E).
            key: the query by default; `value` is the key by default.
            key_padding_mask: (B, M): bool, True where a key is ignored, or float: -inf or at most -1e4 there, else 0.
                Other values, except in compiled code, are added to the scores; see `attn_mask`.
            need_weights: also return the weights, without dropout, up to 8192 tokens; off by default, since they are
                N x M.
            attn_mask: (N, M) or (B * H, N, M), up to 4096 tokens: bool, True where a pair is ignored, or float, added
                to the scores. A square bool mask, equal in all samples, restricts the pattern; any other mask
                makes attention dense.
            average_attn_weights: average the weights over heads.
            is_causal: also require the key not to come after the query. A mask passed with it must be causal.
            cu_seqlens: bounds of sequences packed one after another (B = 1), see `attention`.
            cache: keys and values of earlier calls, which these tokens follow. Causal self-attention only.
            softcap: bound of the scores, see `attention`. The keys of `add_bias_kv` and `add_zero_attn` have neither
                a bound nor a bias.
            bias: (H, 2 * R + 1), table by distance that is added to the scores, or one of two axes, see `attention`,
                as `bias_positions`. Without dense weights.

        Returns:
            The output, with the shape of the query, and the weights (B, N, M) or (B, H, N, M), or None. The keys of
            `add_bias_kv` and `add_zero_attn`, in this order, are further columns of the weights.
        """
        if unknown:
            raise unexpected(f"{type(self).__name__}.forward", unknown)
        key = query if key is None else key
        value = key if value is None else value
        check_cache_type(cache)
        self._check_call(need_weights, attn_mask, cache)
        unbatched, batched = query.dim() == 2, self.batch_first or query.dim() == 2
        if unbatched:
            query, key, value = _each_once(lambda tensor: tensor[None], query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        widths = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, tensor, width in widths:
            check_dense(name, tensor)
            if tensor.dim() != 3 or tensor.shape[2] != width:
                raise must(f"{name} must have shape (batch, n, {width})", tuple(tensor.shape))
        if not batched:
            query, key, value = _each_once(lambda tensor: tensor.transpose(0, 1), query, key, value)
        itself = key is query or (key.shape == query.shape and cache is None)
        q, k, v = self.project(query, key, value)
        extra = self._extra_scores(q) if self.has_extra_keys else None
        if self.position is not None:
            self._check_position(is_causal, q.shape[2] == k.shape[2])
            q, k = self.position.apply(q, k, self._positions(q, cu_seqlens, cache), self.head_dim**-0.5)
        finite = None
        if key_padding_mask is not None:
            key_padding_mask, finite = padding_mask(key_padding_mask, k.shape[0], k.shape[2])
        q, pattern, is_causal, added = self._masked(q, k, attn_mask, is_causal)
        if finite is not None:
            self._check_call(need_weights, finite, cache)
            added = finite if added is None else added + finite
        terms = self._score_terms(softcap, bias, bias_positions, need_weights or added is not None)
        if self.sink is not None:
            terms["sink"] = self.sink
        weights = None
        if need_weights or added is not None:
            masks = {"key_padding_mask": key_padding_mask, "bias": added, "extra": extra}
            self._check_dense(q, k, pattern, cu_seqlens, cache, added)
            weights = attention_weights(q, k, pattern, is_causal=is_causal, scale=self.head_dim**-0.5, **masks)
        if cache is not None:
            self._check_cache(cache, itself, is_causal, key_padding_mask, attn_mask, cu_seqlens)
            if bias_positions is not None:
                raise must("a cache must come without bias_positions", "both", "A bias by row distance needs none.")
            where = {"backend": self.backend, "memory_budget": self.memory_budget}
            attended = cache.attend(q, k, v, scale=self.head_dim**-0.5, **where, **terms)
        elif added is not None:
            assert weights is not None
            attended = self._attend_dense(weights, v)
        else:
            attended = self._operation(q.shape[2], k.shape[2], extra is not None)(
                q,
                k,
                v,
                pattern,
                is_causal=is_causal,
                scale=self.head_dim**-0.5,
                enable_gqa=True,
                key_padding_mask=key_padding_mask,
                cu_seqlens=cu_seqlens,
                dropout_p=self.dropout if self.training else 0.0,
                backend=self.backend,
                memory_budget=self.memory_budget,
                **terms,
            )
            if extra is not None:
                attended = self._with_extra_keys(attended, extra)
        if weights is not None:
            weights = None if not need_weights else weights.mean(1) if average_attn_weights else weights
        output = self.finish(attended)
        if unbatched:
            return output[0], None if weights is None else weights[0]
        return output if batched else output.transpose(0, 1), weights

    def _check_call(self, need_weights: bool, attn_mask: Tensor | None, cache: KVCache | None) -> None:
        """Refuse what a kind of module cannot do."""

    def _by_head(self, extra: Tensor) -> Tensor:
        """The extra key or value of each query head, (H, 1, D)."""
        return extra.view(-1, 1, self.head_dim).repeat_interleave(self.num_heads // self.num_kv_heads, 0)

    def _extra_scores(self, query: Tensor) -> Tensor:
        """Scores (B, H, N, 1 or 2) of the keys of `add_bias_kv` and `add_zero_attn`."""
        query = query.to(torch.promote_types(query.dtype, torch.float32))
        columns = [query.new_zeros(query.shape[:3])] if self.add_zero_attn else []
        if self.bias_k is not None:
            columns.insert(0, self.head_dim**-0.5 * (query * self._by_head(self.bias_k)).sum(-1))
        return torch.stack(columns, -1)

    def _attend_dense(self, weights: Tensor, value: Tensor) -> Tensor:
        """Output of dense weights (B, H, N, M), whose further columns belong to the extra keys."""
        keys = value.shape[2]
        dropped = F.dropout(weights, self.dropout, self.training).to(value.dtype)
        attended = dropped[..., :keys] @ value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
        if self.bias_v is not None:
            attended = attended + dropped[..., keys, None] * self._by_head(self.bias_v)
        return attended

    def _with_extra_keys(self, attended: Any, scores: Tensor) -> Tensor:
        """Output of the softmax with the extra keys, from the `AttentionOutput` of the pattern's."""
        output, lse = attended
        shares = torch.cat([lse[..., None], scores], -1).softmax(-1)
        both = shares[..., :1] * output
        if self.bias_v is not None:
            both = both + F.dropout(shares[..., 1:2], self.dropout, self.training) * self._by_head(self.bias_v)
        return both.to(output.dtype)

    def _check_shard(self, heads: int, kv_heads: int, n: int) -> None:
        super()._check_shard(heads, kv_heads, n)
        if self.bias_k is not None:
            raise must("add_bias_kv must come with all heads", f"{heads} local heads of a tensor-parallel plan")
        position = self.position is not None and self.position.by_head
        if not position and _shards_equal(self.pattern, n, self.num_heads, heads):
            return
        raise must(
            f"every shard of num_heads={self.num_heads} must be computed like the first",
            f"{heads} local heads with {type(self.position).__name__ if position else self.pattern}",
            "In a tensor-parallel plan, take local heads that are a multiple of every dilation rate, or a pattern and "
            "positions that are the same for all heads; or spread the sequence instead (context parallel).",
        )

    def _positions(self, query: Tensor, cu_seqlens: Tensor | None, cache: KVCache | None) -> Tensor:
        positions = self._tokens(query.shape[2], query.device)[None]
        if cache is not None:
            return positions + cache.positions(query.shape[0]).to(query.device)[:, None]
        if cu_seqlens is None:
            return positions
        starts = cu_seqlens.to(query.device)
        return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]

    def _tokens(self, n: int, device: torch.device) -> Tensor:
        """Positions of the tokens of a call in the sequence."""
        return torch.arange(n, device=device)

    def _check_position(self, is_causal: bool, same_length: bool) -> None:
        assert self.position is not None
        if not same_length:
            raise must("positions need queries and keys of the same length", "two lengths")
        if self.position.needs_causal and not is_causal:
            name = type(self.position).__name__
            raise must(f"{name} must come with is_causal=True", "is_causal=False", "Use rotary positions otherwise.")

    def _masked(
        self, query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Pattern, bool, Tensor | None]:
        """The (B, H, N, D) query, the pattern under a mask, whether it is causal besides, and a bias for the scores."""
        if attn_mask is None:
            return query, self.pattern, is_causal, None
        batch, heads, n, _ = query.shape
        check_mask(attn_mask, batch, heads, n, key.shape[2])
        if is_causal:
            return check_causal(query, attn_mask), self.pattern, True, None
        mask = mask_pattern(attn_mask, batch, heads)
        if mask is None:
            return query, self.pattern, False, mask_bias(attn_mask, batch, heads)
        if mask == Causal():
            return query, self.pattern, True, None
        return query, self.pattern if mask == Full() else self.pattern & mask, False, None

    def _check_dense(
        self,
        query: Tensor,
        key: Tensor,
        pattern: Pattern,
        cu_seqlens: Tensor | None,
        cache: KVCache | None,
        bias: Tensor | None,
    ) -> None:
        """Refuse weights, or a mask that needs them, where they cannot be formed."""
        what = "need_weights=True" if bias is None else "a mask added to the scores"
        if cache is not None:
            raise must(f"{what} must come with whole sequences", "a cache")
        check_no_sink(what, self.sink)
        check_weights(what, pattern, query.shape[2], key.shape[2], cu_seqlens)

    def _check_cache(
        self,
        cache: KVCache,
        itself: bool,
        is_causal: bool,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        if self.has_extra_keys:
            raise must("a cache must come without add_bias_kv and add_zero_attn", "one of them")
        if not itself or not is_causal:
            raise must(
                "a cache must come with causal self-attention", "cross-attention" if not itself else "is_causal=False"
            )
        if any(mask is not None for mask in (key_padding_mask, attn_mask, cu_seqlens)):
            raise must("a cache must come without masks", "one", "Samples of different lengths: cache.lengths.")
        if cache.pattern != self.pattern:
            raise must(f"the cache must be made for {self.pattern}", cache.pattern, "Use module.cache().")
        if self.training and self.dropout:
            raise must("a cache must come with dropout off", f"dropout {self.dropout}", "Call eval() first.")

    def cache(self, length: int | None = None) -> KVCache:
        """An empty cache for decoding with this module; see `KVCache` for `length`."""
        return KVCache(self.pattern, length)

    def default_device(self) -> torch.device:
        return self.out_proj.weight.device

    def extra_repr(self) -> str:
        grouped = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        position = "" if self.position is None else f", position={self.position}"
        given = {"add_bias_kv": self.bias_k, "add_zero_attn": self.add_zero_attn or None, "sink": self.sink}
        flags = "".join(f", {name}=True" for name, value in given.items() if value is not None)
        return f'{self.embed_dim}, {self.num_heads}, "{self.pattern}"{grouped}{position}{flags}'


class MultiheadDilatedAttention(MultiheadSparseAttention):
    """Multi-head dilated attention: `DilatedAttention` with projections.

    Args:
        embed_dim: width of the model.
        num_heads: query heads.
        segment_lengths: tokens in a segment, one for each branch.
        dilation_rates: distance between sampled tokens, one for each branch.
        dropout: see `MultiheadSparseAttention`.
        bias: see `MultiheadSparseAttention`.
        layer_norm: see `MultiheadSparseAttention`; on by default, as in MAGNETO.
        layer_norm_eps: see `MultiheadSparseAttention`.
        gamma_init: see `MultiheadSparseAttention`.
        offset: see `Dilated`, as `heads` and `overlap`.
        options: further arguments of `MultiheadSparseAttention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        *,
        offset: str = "mod",
        heads: str = "all",
        overlap: str = "count",
        **options: Any,
    ) -> None:
        pattern = Dilated(segment_lengths, dilation_rates, offset, overlap, heads)  # pyrefly: ignore[bad-argument-type]
        if all(rate > segment for segment, rate in pattern.branches):
            # The original took the rates first, which here would leave hardly a token to see.
            raise must(
                "some dilation rate must be within its segment",
                f"segment_lengths={list(segment_lengths)}, dilation_rates={list(dilation_rates)}",
                "Segment lengths come before dilation rates.",
            )
        super().__init__(
            embed_dim,
            num_heads,
            pattern,
            dropout,
            bias,
            layer_norm=layer_norm,
            layer_norm_eps=layer_norm_eps,
            gamma_init=gamma_init,
            **options,
        )
        self.segment_lengths, self.dilation_rates = pattern.segment_lengths, pattern.dilation_rates


class RingMultiheadDilatedAttention(TakesRanks, MultiheadOverRanks, MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` for sequences sharded over ranks; on one device, the same computation.

    Args:
        args: arguments of `MultiheadDilatedAttention`, as for `options`.
        process_group: see `Ranks`, as `ring_size`, `layout` and `transfer`.
    """


class BlockSparseRingMultiheadDilatedAttention(TakesRanks, MultiheadOverRanks, MultiheadSparseAttention):
    """Multi-head block-sparse attention: `BlockSparseRingDilatedAttention` with projections.

    Args:
        embed_dim: width of the model.
        num_heads: query heads.
        segment_lengths: see `BlockSparseRingDilatedAttention`, as `dilation_rates` and `sparse_config`.
        dropout: see `MultiheadSparseAttention`, as `bias` and `batch_first`.
        sparsity_ratio: fraction of blocks kept (0.01 = 99 % sparse).
        block_size: tokens in a block, 128 by default.
        options: `layer_norm`, `num_kv_heads`, `position` and the rest of `MultiheadSparseAttention`; `process_group`,
            `ring_size`, `layout` and `transfer`: see `Ranks`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        sparse_config: SparsePatternConfig | None = None,
        batch_first: bool = True,
        *,
        sparsity_ratio: float | None = None,
        block_size: int | None = None,
        **options: Any,
    ) -> None:
        pattern = block_pattern(segment_lengths, dilation_rates, sparse_config, sparsity_ratio, block_size)
        super().__init__(embed_dim, num_heads, pattern, dropout, bias, batch_first=batch_first, **options)
        self.segment_lengths, self.dilation_rates = tuple(segment_lengths), tuple(dilation_rates)
        self.sparse_config = sparse_config

    def notes(self) -> list[str]:
        return [*segments_unused(self.sparse_config), *super().notes()]
