"""Transformer layers, called as torch's own are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import must
from ..nn import AdaptiveConfig, KVCache, MultiheadBlockSparseAdaptive, MultiheadSparseAttention, Position
from ..nn.context_parallel import MultiheadOverRanks, OverRanks, Ranks
from ..patterns import Dilated, Full, Pattern, parse
from .config import ACTIVATIONS
from .torchscale import check_published, published_attention

Activation = Callable[[Tensor], Tensor]


def pattern_of(segments: Sequence[int] | Pattern | str, rates: Sequence[int] | None, offset: str = "mod") -> Pattern:
    """A pattern from segment lengths and dilation rates, or from itself."""
    if isinstance(segments, Pattern | str):
        if rates is not None:
            raise must("a pattern must come without dilation_rates", f"{segments} and {list(rates)}")
        return parse(segments) if isinstance(segments, str) else segments
    if rates is None:
        raise must("segment_lengths must come with dilation_rates", "none", "Or give a pattern in their place.")
    return Dilated(tuple(segments), tuple(rates), offset)  # pyrefly: ignore[bad-argument-type]


class LayerAttention(MultiheadOverRanks, MultiheadSparseAttention):
    """`MultiheadSparseAttention` that also runs over ranks (`set_process_group`), and as published weights need it.

    Args:
        args: those of `MultiheadSparseAttention`, as `options`.
        zero_padding: torchscale's padding, see `published`; likewise `shifted_segments` for torchscale's placement of
            outputs and `detach_mixing` for torchscale's gradient.
    """

    def __init__(
        self,
        *args: Any,
        zero_padding: bool = False,
        shifted_segments: bool = False,
        detach_mixing: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        # Alone until `set_process_group`: a model of plain layers is trained by data parallelism too.
        self.ranks = Ranks(ring_size=1)
        self.zero_padding, self.shifted_segments, self.detach_mixing = zero_padding, shifted_segments, detach_mixing
        if self.is_published:
            check_published(self.pattern)
            if self.sink is not None:
                raise must("torchscale's attention must come without a sink", "sink=True")

    @property
    def is_published(self) -> bool:
        """Whether attention differs from the pattern's own as torchscale's does."""
        return self.zero_padding or self.shifted_segments or self.detach_mixing

    def _check_dense(self, *call: Any) -> None:  # pyrefly: ignore[bad-override]
        super()._check_dense(*call)
        if self.is_published and call[-1] is not None:
            advice = "Pass a bool mask alike in all samples, or key_padding_mask."
            raise must("torchscale's attention must come without a bias on the scores", "attn_mask", advice)

    def _operation(self, n: int, keys: int, with_lse: bool = False) -> Callable[..., Any]:
        if not self.is_published:
            return super()._operation(n, keys, with_lse)
        if with_lse:
            raise must("torchscale's attention must come without extra keys", "add_bias_kv or add_zero_attn")
        self._check_whole("zero_padding, shifted_segments or detach_mixing")
        if n != keys:
            raise must("torchscale's attention must be self-attention", f"{n} queries and {keys} keys")
        names = ("zero_padding", "shifted_segments", "detach_mixing")
        return partial(published_attention, **{name: getattr(self, name) for name in names})


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the context; every module then gets back the mode it had."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


def world_of(model: nn.Module) -> int:
    """Over how many ranks a model's sequences are spread."""
    return max([1, *(module.ranks.world for module in model.modules() if isinstance(module, OverRanks))])


class DilatedTransformerLayer(nn.Module):
    """Common base of both layers: arguments, the feed-forward block, and the position of the norms.

    Args:
        d_model: width of the model.
        nhead: heads.
        segment_lengths: tokens in a segment, one for each branch; or a pattern, as a value or as text.
        dilation_rates: distance between two tokens that meet, one for each branch; None with a pattern.
        dim_feedforward: width of the feed-forward block.
        dropout: probability of dropping, of activations and, unless `attention_dropout` says otherwise, of weights.
        activation: "relu", "gelu", "silu" or a function.
        layer_norm_eps: epsilon of every LayerNorm.
        gamma_init: gain of the value, output and feed-forward projections at the start (MAGNETO).
        norm_first: normalise what goes into a block rather than what comes out.
        sub_norm: also normalise inside each block, before its last projection (sub-LayerNorm).
        bias: whether projections and norms have biases.
        batch_first: (B, N, E) when true, (N, B, E) when not.
        num_kv_heads: key and value heads, a divisor of `nhead`.
        position: "rotary", "xpos", "alibi", a `Position`, or None.
        attention_dropout: probability of dropping a weight; `dropout` by default.
        sink: learn a logit of each head in the softmax denominator of self-attention, `self_attn.sink`.
        offset: which residue a head samples, see `Dilated`.
        zero_padding: torchscale's padding, see `published`; likewise `shifted_segments` and `detach_mixing`.
        adaptive: settings of learned self-attention, with blocks of `adaptive_block_size`, in place of a pattern.
        backend: see `attention`, as `memory_budget`.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    norms = 2
    """Blocks, each with its LayerNorm; the feed-forward block of a `sub_norm` layer contains another."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        segment_lengths: Sequence[int] | Pattern | str,
        dilation_rates: Sequence[int] | None = None,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = "relu",
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        *,
        norm_first: bool = True,
        sub_norm: bool = True,
        bias: bool = True,
        batch_first: bool = True,
        num_kv_heads: int | None = None,
        position: Position | str | None = None,
        attention_dropout: float | None = None,
        sink: bool = False,
        offset: str = "mod",
        zero_padding: bool = False,
        shifted_segments: bool = False,
        detach_mixing: bool = False,
        adaptive: AdaptiveConfig | None = None,
        adaptive_block_size: int = 128,
        backend: str = "auto",
        memory_budget: int | float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if sub_norm and not norm_first:
            raise must("sub_norm must come with norm_first", "norm_first=False", "Set sub_norm=False as well.")
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise must(f"activation must be a function or one of {', '.join(ACTIVATIONS)}", repr(activation))
        self.activation: Activation = getattr(F, activation) if isinstance(activation, str) else activation
        self.norm_first, self.sub_norm, self.gamma_init = norm_first, sub_norm, gamma_init
        self.dropout = nn.Dropout(dropout)
        factory_options: dict[str, Any] = {"device": device, "dtype": dtype}
        self._heads: dict[str, Any] = {
            "embed_dim": d_model,
            "num_heads": nhead,
            "dropout": dropout if attention_dropout is None else attention_dropout,
            "bias": bias,
            "layer_norm": sub_norm,
            "layer_norm_eps": layer_norm_eps,
            "gamma_init": gamma_init,
            "num_kv_heads": num_kv_heads,
            "batch_first": batch_first,
            "backend": backend,
            "memory_budget": memory_budget,
            **factory_options,
        }
        pattern = pattern_of(segment_lengths, dilation_rates, offset)
        flags = {
            "zero_padding": zero_padding,
            "shifted_segments": shifted_segments,
            "detach_mixing": detach_mixing,
        }
        if adaptive is None:
            self.self_attn = LayerAttention(pattern=pattern, position=position, sink=sink, **flags, **self._heads)
        else:
            learned = {"adaptive_config": adaptive, "block_size": adaptive_block_size, "position": position}
            self.self_attn = MultiheadBlockSparseAdaptive(
                **self._heads, segment_lengths=[1], dilation_rates=[1], sink=sink, **learned
            )
        for block in range(1, self.norms + 1):
            self.add_module(f"norm{block}", nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **factory_options))
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias, **factory_options)
        inner = nn.LayerNorm(dim_feedforward, layer_norm_eps, bias=bias, **factory_options) if sub_norm else None
        self.register_module(f"norm{self.norms + 1}", inner)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias, **factory_options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the feed-forward projections anew, with this layer's gain; attention has drawn its own."""
        for linear in (self.linear1, self.linear2):
            nn.init.xavier_uniform_(linear.weight, self.gamma_init)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def _block(self, x: Tensor, number: int, block: Callable[[Tensor], Tensor]) -> Tensor:
        norm = self.get_submodule(f"norm{number}")
        return x + self.dropout(block(norm(x))) if self.norm_first else norm(x + self.dropout(block(x)))

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.activation(self.linear1(x)))
        if self.sub_norm:
            # Under the same name: without gradients, what it was made of is let go before the last product.
            hidden = self.get_submodule(f"norm{self.norms + 1}")(hidden)
        return self.linear2(hidden)


class DilatedTransformerEncoderLayer(DilatedTransformerLayer):
    """`torch.nn.TransformerEncoderLayer` whose attention follows a pattern; also the layer of a decoder-only model.

    Arguments are those of `DilatedTransformerLayer`.

    >>> layer = DilatedTransformerEncoderLayer(64, 4, [16, 64], [1, 4], dim_feedforward=128)
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Output for tokens (B, N, E); masks, `cu_seqlens` and `cache` as for `MultiheadSparseAttention`."""

        def attend(x: Tensor) -> Tensor:
            masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}
            masks |= {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
            return self.self_attn(x, x, x, is_causal=is_causal, cache=cache, **masks)[0]

        return self._block(self._block(src, 1, attend), 2, self._feed_forward)


class DilatedTransformerDecoderLayer(DilatedTransformerLayer):
    """`torch.nn.TransformerDecoderLayer` whose attention follows patterns.

    Args:
        args: arguments of `DilatedTransformerLayer`, as for `options`.
        memory_pattern: keys of the encoder's output that a token attends to, counted from the same start; that of
            self-attention by default. Use "full" if positions of the two sequences do not correspond.
        memory_norm: whether `sub_norm` and `gamma_init` also apply to attention to the encoder's output.
    """

    norms = 3

    def __init__(
        self, *args: Any, memory_pattern: Pattern | str | None = None, memory_norm: bool = True, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        pattern = self.self_attn.pattern if memory_pattern is None else memory_pattern
        heads = self._heads if memory_norm else {**self._heads, "layer_norm": False, "gamma_init": 1.0}
        self.multihead_attn = LayerAttention(pattern=pattern, **heads)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Output for tokens (B, N, E), which also attend to `memory` (B, M, E); `cache` is that of self-attention."""
        # Patterns count positions from the start, so tokens of earlier calls are replaced by zeros.
        first = 0 if cache is None or self.multihead_attn.pattern == Full() else max(cache.lengths, default=0)
        along = 1 if self.self_attn.batch_first else 0

        def attend(x: Tensor) -> Tensor:
            masks = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask}
            return self.self_attn(x, x, x, is_causal=tgt_is_causal, cache=cache, **masks)[0]

        def look(x: Tensor) -> Tensor:
            masks = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask}
            here = F.pad(x, (0, 0, first, 0) if along else (0, 0, 0, 0, first, 0)) if first else x
            attended, _ = self.multihead_attn(here, memory, memory, is_causal=memory_is_causal, **masks)
            return attended.narrow(along, first, x.shape[along])

        return self._block(self._block(self._block(tgt, 1, attend), 2, look), 3, self._feed_forward)
