"""Projections around the operation, called as `torch.nn.MultiheadAttention` is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import must, must_be
from ..ops import attention, attention_rows
from ..patterns import Causal, Dilated, Full, Pattern, parse
from .block_sparse import block_pattern
from .cache import KVCache
from .config import SparsePatternConfig
from .core import Planned, alone, probability
from .masks import ignored, mask_pattern
from .position import Position, position_of

LONGEST_WEIGHTS = 8192

Own = TypeVar("Own", bound="MultiheadSparseAttention")


class MultiheadSparseAttention(nn.Module, Planned):
    """Multi-head attention by any pattern, in the place of `torch.nn.MultiheadAttention`.

    Args:
        embed_dim: width of the model.
        num_heads: query heads.
        pattern: who may see whom, as a value or as text.
        dropout: probability of dropping a weight while training.
        bias: whether the projections have biases.
        layer_norm: normalise what attention found before the output projection (sub-LayerNorm).
        layer_norm_eps: its epsilon.
        gamma_init: gain of the value and output projections at the start (MAGNETO).
        num_kv_heads: key and value heads, a divisor of `num_heads` (grouped-query attention).
        kdim: width of keys, `embed_dim` by default; likewise `vdim`.
        batch_first: (B, N, E) when true, (N, B, E) when not.
        position: "rotary", "xpos", "alibi", a `Position`, or None.
        backend: "auto" or a name from `backends()`.
        device: where the parameters are made.
        dtype: what they are made of.

    >>> x = torch.randn(2, 100, 64)
    >>> output, weights = MultiheadSparseAttention(64, 4, "window:16")(x, x, x)
    >>> output.shape, weights
    (torch.Size([2, 100, 64]), None)
    """

    # nn.TransformerEncoderLayer has a fused path for inference that reads nn.MultiheadAttention's weights and never
    # calls a module put in its place. These two keep it off that path.
    in_proj_bias = None
    _qkv_same_embed_dim = False
    num_heads: int  # pyrefly: ignore[bad-override-mutable-attribute]

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
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise must("embed_dim must be a multiple of num_heads", f"{embed_dim} and {num_heads}")
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if kv_heads < 1 or num_heads % kv_heads:
            raise must("num_heads must be a multiple of num_kv_heads", f"{num_heads} and {kv_heads}")
        self.pattern = parse(pattern) if isinstance(pattern, str) else pattern
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = probability("dropout", dropout)
        self.batch_first = batch_first
        self.gamma_init = gamma_init
        self.backend = backend
        self.position = position_of(position)
        if self.position is not None:
            self.position.check(self.head_dim)
        kept: dict[str, Any] = {"device": device, "dtype": dtype}
        kv_width = kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, **kept)
        self.k_proj = nn.Linear(kdim or embed_dim, kv_width, bias, **kept)
        self.v_proj = nn.Linear(vdim or embed_dim, kv_width, bias, **kept)
        self.norm = nn.LayerNorm(embed_dim, layer_norm_eps, bias=bias, **kept) if layer_norm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **kept)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections anew."""
        gains = (
            (self.q_proj, 1.0),
            (self.k_proj, 1.0),
            (self.v_proj, self.gamma_init),
            (self.out_proj, self.gamma_init),
        )
        for projection, gain in gains:
            nn.init.xavier_uniform_(projection.weight, gain)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.norm is not None:
            self.norm.reset_parameters()

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
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: (B, N, E), (N, B, E) when not `batch_first`, or (N, E).
            key: the query when not given; likewise `value` the key.
            key_padding_mask: (B, N): bool, True where a key is ignored, or float, -inf there and else 0.
            need_weights: also return the weights, up to 8192 tokens; off by default, for they are N x N.
            attn_mask: (N, N) or (B * H, N, N), bool or float as above, the same in every sample, up to 4096 tokens.
            average_attn_weights: average the weights over heads.
            is_causal: also require the key not to come after the query. A mask given with it must be the causal one.
            cu_seqlens: bounds of sequences packed one after another (B = 1), see `attention`.
            cache: what earlier calls left; these tokens follow on it. Causal self-attention only.

        Returns:
            The output, shaped as the query, and the weights (B, N, N) or (B, H, N, N), or None.
        """
        key = query if key is None else key
        value = key if value is None else value
        unbatched, batched = query.dim() == 2, self.batch_first or query.dim() == 2
        if unbatched:
            query, key, value = (tensor[None] for tensor in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != 3:
                raise must(f"{name} must have shape (batch, n, width)", tuple(tensor.shape))
        if not batched:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        itself = key is query or (key.shape == query.shape and cache is None)
        q, k, v = (
            projection(tensor).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection, tensor in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        if self.position is not None:
            self._check_position(is_causal, q.shape[2] == k.shape[2])
            q, k = self.position.apply(q, k, self._positions(q, cu_seqlens, cache), self.head_dim**-0.5)
        if key_padding_mask is not None:
            key_padding_mask = ignored("key_padding_mask", key_padding_mask)
        pattern, is_causal = self._masked(attn_mask, is_causal, q.shape[0], q.shape[2])
        weights = None
        if need_weights:
            weights = self._weights(q, k, pattern, is_causal, key_padding_mask, cu_seqlens, cache)
            weights = weights.mean(1) if average_attn_weights else weights
        if cache is not None:
            self._check_cache(cache, itself, is_causal, key_padding_mask, attn_mask, cu_seqlens)
            found = cache.attend(q, k, v, scale=self.head_dim**-0.5, backend=self.backend)
        elif q.shape[2] != k.shape[2]:
            found = self._across(q, k, v, pattern, is_causal, key_padding_mask, cu_seqlens)
        else:
            found = attention(
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
            )
        output = found.transpose(1, 2).flatten(2)
        output = self.out_proj(output if self.norm is None else self.norm(output))
        if unbatched:
            return output[0], None if weights is None else weights[0]
        return output if batched else output.transpose(0, 1), weights

    def _positions(self, query: Tensor, cu_seqlens: Tensor | None, cache: KVCache | None) -> Tensor:
        positions = torch.arange(query.shape[2], device=query.device)[None]
        if cache is not None:
            return positions + cache.positions(query.shape[0]).to(query.device)[:, None]
        if cu_seqlens is None:
            return positions
        starts = cu_seqlens.to(query.device)
        return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]

    def _check_position(self, is_causal: bool, same_length: bool) -> None:
        assert self.position is not None
        if not same_length:
            raise must("positions must come with queries and keys of one length", "two lengths")
        if self.position.needs_causal and not is_causal:
            name = type(self.position).__name__
            raise must(f"{name} must come with is_causal=True", "is_causal=False", "Use rotary positions otherwise.")

    def _masked(self, attn_mask: Tensor | None, is_causal: bool, batch: int, n: int) -> tuple[Pattern, bool]:
        """This module's pattern under a mask."""
        if attn_mask is None:
            return self.pattern, is_causal
        if is_causal and torch.compiler.is_compiling():
            return self.pattern, True
        told = mask_pattern(attn_mask, batch, self.num_heads, n)
        if is_causal and told != Causal():
            raise must("attn_mask given with is_causal=True must be the causal mask", "another", "Leave is_causal out.")
        if told == Causal():
            return self.pattern, True
        return self.pattern if told == Full() else self.pattern & told, is_causal

    def _weights(
        self,
        query: Tensor,
        key: Tensor,
        pattern: Pattern,
        is_causal: bool,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: KVCache | None,
    ) -> Tensor:
        n = query.shape[2]
        if n > LONGEST_WEIGHTS:
            advice = "attention_rows gives the weights of chosen rows at any length."
            raise must(f"need_weights=True must have n <= {LONGEST_WEIGHTS}", n, advice)
        if cu_seqlens is not None or cache is not None or n != key.shape[2]:
            came = "cu_seqlens" if cu_seqlens is not None else "a cache" if cache is not None else "two lengths"
            raise must("need_weights=True must come with one whole sequence", came)
        return attention_rows(
            query,
            key,
            pattern,
            range(n),
            is_causal=is_causal,
            scale=self.head_dim**-0.5,
            enable_gqa=True,
            key_padding_mask=key_padding_mask,
        )

    def _across(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern,
        is_causal: bool,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        """Cross-attention between sequences of two lengths."""
        if pattern != Full() or is_causal or cu_seqlens is not None:
            raise must(
                "query and key must have one length unless the pattern is Full()",
                f"{query.shape[2]} and {key.shape[2]} with {pattern}{' & causal' if is_causal else ''}",
                "A pattern speaks of positions in one sequence.",
            )
        seen = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, seen, dropout, scale=self.head_dim**-0.5, enable_gqa=True
        )

    def _check_cache(
        self,
        cache: KVCache,
        itself: bool,
        is_causal: bool,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
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

    def place(self) -> torch.device:
        return self.out_proj.weight.device

    @classmethod
    def from_torch(cls: type[Own], mha: nn.MultiheadAttention, *pattern: Any, **options: Any) -> Own:
        """A module with the weights of a `torch.nn.MultiheadAttention`; `pattern` is what `cls` takes after the heads.

        >>> mha = nn.MultiheadAttention(64, 4, batch_first=True)
        >>> MultiheadDilatedAttention.from_torch(mha, [32, 64], [1, 2]).num_heads
        4
        """
        if not isinstance(mha, nn.MultiheadAttention):
            raise must_be("from_torch must be given a torch.nn.MultiheadAttention", type(mha).__name__)
        if mha.bias_k is not None or mha.add_zero_attn:
            raise must("from_torch must be given a module without add_bias_kv and add_zero_attn", "one with them")
        taken: dict[str, Any] = {
            "dropout": mha.dropout,
            "bias": mha.out_proj.bias is not None,
            "layer_norm": False,
            "kdim": mha.kdim,
            "vdim": mha.vdim,
            "batch_first": mha.batch_first,
            "device": mha.out_proj.weight.device,
            "dtype": mha.out_proj.weight.dtype,
        }
        own = cls(mha.embed_dim, mha.num_heads, *pattern, **{**taken, **options})
        # Only a LayerNorm that was asked for here has nothing to load.
        own.load_state_dict({**own.state_dict(), **_renamed(mha.state_dict(), "")})
        return own.train(mha.training)

    def torch_state_dict(self) -> dict[str, Tensor]:
        """The weights as `torch.nn.MultiheadAttention` names them."""
        if self.norm is not None or self.num_kv_heads != self.num_heads:
            came = "sub-LayerNorm" if self.norm is not None else f"{self.num_kv_heads} key heads"
            raise must("nn.MultiheadAttention must find all it needs and nothing more", came)
        three = (self.q_proj, self.k_proj, self.v_proj)
        state = {"out_proj.weight": self.out_proj.weight}
        if len({projection.in_features for projection in three}) == 1:
            state["in_proj_weight"] = torch.cat([projection.weight for projection in three])
        else:
            state |= {f"{n}_proj_weight": projection.weight for n, projection in zip("qkv", three, strict=True)}
        if self.out_proj.bias is not None:
            state["in_proj_bias"] = torch.cat([projection.bias for projection in three])
            state["out_proj.bias"] = self.out_proj.bias
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def _load_from_state_dict(  # pyrefly: ignore[bad-override]
        self, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        state = _renamed(state_dict, prefix)
        state_dict.clear()
        state_dict.update(state)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        grouped = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        position = "" if self.position is None else f", position={self.position}"
        return f'{self.embed_dim}, {self.num_heads}, "{self.pattern}"{grouped}{position}'


def _renamed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """nn.MultiheadAttention's names for the projections turned into ours; every other entry as it is."""
    names: dict[str, tuple[str, ...]] = {f"{n}_proj_weight": (f"{n}_proj.weight",) for n in "qkv"}
    names["in_proj_weight"] = tuple(f"{n}_proj.weight" for n in "qkv")
    names["in_proj_bias"] = tuple(f"{n}_proj.bias" for n in "qkv")
    renamed = {}
    for name, tensor in state.items():
        own = names.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if own is None:
            renamed[name] = tensor
        else:
            renamed |= {prefix + part: piece for part, piece in zip(own, tensor.chunk(len(own)), strict=True)}
    return renamed


class MultiheadDilatedAttention(MultiheadSparseAttention):
    """Multi-head dilated attention, as `DilatedAttention` between projections.

    Args:
        embed_dim: width of the model.
        num_heads: query heads.
        segment_lengths: tokens in a segment, one for each branch.
        dilation_rates: distance between two tokens that meet, one for each branch.
        dropout: see `MultiheadSparseAttention`, as all that follow.
        bias: likewise.
        layer_norm: likewise, on by default as in MAGNETO.
        layer_norm_eps: likewise.
        gamma_init: likewise.
        offset: see `Dilated`, as `heads` and `overlap`.
        options: `num_kv_heads`, `kdim`, `vdim`, `batch_first`, `position`, `backend`, `device`, `dtype`.
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


class RingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` for sequences spread over ranks; on one device, that computation itself."""

    def __init__(self, *args: Any, process_group: object = None, ring_size: int | None = None, **options: Any) -> None:
        alone(process_group, ring_size)
        super().__init__(*args, **options)


class BlockSparseRingMultiheadDilatedAttention(MultiheadSparseAttention):
    """Multi-head block-sparse attention, as `BlockSparseRingDilatedAttention` between projections.

    Args:
        embed_dim: width of the model.
        num_heads: query heads.
        segment_lengths: see `BlockSparseRingDilatedAttention`, as `dilation_rates` and `sparse_config`.
        dropout: see `MultiheadSparseAttention`, as `bias` and `batch_first`.
        sparsity_ratio: fraction of blocks kept (0.01 = 99 % sparse).
        block_size: tokens in a block, 128 by default.
        process_group: must be None; likewise `ring_size`.
        options: `layer_norm`, `num_kv_heads`, `position` and the rest of `MultiheadSparseAttention`.
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
        process_group: object = None,
        ring_size: int | None = None,
        **options: Any,
    ) -> None:
        alone(process_group, ring_size)
        pattern = block_pattern(segment_lengths, dilation_rates, sparse_config, sparsity_ratio, block_size)
        super().__init__(embed_dim, num_heads, pattern, dropout, bias, batch_first=batch_first, **options)
        self.segment_lengths, self.dilation_rates = tuple(segment_lengths), tuple(dilation_rates)
        self.sparse_config = sparse_config
