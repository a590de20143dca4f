"""Configuration of a LongNet: a frozen value, named sizes, and cost estimates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from torch.nn import functional as F

from ..errors import must, must_be
from ..nn import AdaptiveConfig, Alibi, Position, Rotary, SparseAttention, Xpos
from ..patterns import Dilated, Full, Pattern, parse

ACTIVATIONS = ("relu", "gelu", "silu")
POSITIONS: dict[str, type[Position]] = {"rotary": Rotary, "xpos": Xpos, "alibi": Alibi}


@dataclass(frozen=True, slots=True, kw_only=True)
class LongNetConfig:
    """A decoder (`num_encoder_layers=0`), an encoder (`num_decoder_layers=0`), or both.

    >>> LongNetConfig.named("base").num_parameters
    85344768
    """

    num_tokens: int = 256
    """Vocabulary of a language model; 256 for bytes."""
    d_model: int = 768
    nhead: int = 12
    num_kv_heads: int | None = None
    """Key and value heads, a divisor of `nhead`; as many as query heads by default."""
    num_encoder_layers: int = 0
    num_decoder_layers: int = 12
    dim_feedforward: int = 3072
    segment_lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
    dilation_rates: tuple[int, ...] = (1, 2, 4, 6, 12)
    offset: str = "mod"
    """Residue that a head samples; see `Dilated`."""
    patterns: tuple[str, ...] = ()
    """Patterns of the layers instead, as text, taken in turn from the first layer on."""
    adaptive: AdaptiveConfig | Mapping[str, Any] | None = None
    """Settings of learned attention, in place of patterns: every self-attention selects its blocks by content."""
    adaptive_block_size: int = 128
    """Tokens of a block of learned attention."""
    memory_pattern: str = "full"
    """Pattern of a decoder token over the output of the encoder."""
    memory_norm: bool = True
    """Whether `sub_norm`, with its gain, holds for cross-attention too; torchscale's has neither."""
    num_source_tokens: int | None = None
    """Vocabulary of what an encoder-decoder's encoder reads, with its own embedding; the decoder's by default."""
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation: str = "gelu"
    layer_norm_eps: float = 1e-5
    norm_first: bool = True
    sub_norm: bool = True
    """A second LayerNorm inside each block, before its last projection, with MAGNETO's gains at the start."""
    final_norm: bool | None = None
    """A LayerNorm after the last layer; where `norm_first` by default."""
    bias: bool = True
    position: Position | str | None = "rotary"
    """Position encoding of self-attention. XPOS and ALiBi require causal layers."""
    sink: bool = False
    """Learn a logit of each head in the softmax denominator of self-attention: `self_attn.sink` of each layer.
    Not with learned or torchscale's attention."""
    scale_embedding: bool = False
    """Multiply embeddings by sqrt(d_model), fairseq's default."""
    sinusoids: bool = False
    """Add fairseq's sinusoids to the embeddings, for whole sequences on one device; its tokens count from 2."""
    tie_embeddings: bool = True
    """Logits come from the transposed embedding, without a bias of their own."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass, and compute the layer again there."""
    zero_padding: bool = False
    """torchscale's padding: zero keys fill up ragged segments of an encoder and take part in the softmax."""
    shifted_segments: bool = False
    """torchscale's placement: if a rate does not divide its segment, outputs of later segments are shifted."""
    detach_mixing: bool = False
    """torchscale's gradient: none through the weights that mix the branches."""

    def __post_init__(self) -> None:
        for name in ("segment_lengths", "dilation_rates", "patterns"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ACTIVATIONS:
            if self.activation is getattr(F, name):
                object.__setattr__(self, "activation", name)
        if isinstance(self.adaptive, Mapping):
            object.__setattr__(self, "adaptive", AdaptiveConfig(**self.adaptive))
        if self.adaptive is not None and self.patterns:
            raise must("adaptive must come without patterns", ", ".join(self.patterns), "Learned layers have none.")
        if self.adaptive is not None and (self.sink or self.position == "alibi" or isinstance(self.position, Alibi)):
            came = "sink=True" if self.sink else "position='alibi'"
            raise must("adaptive must come without sinks and ALiBi", came, "Learned attention has neither.")
        if self.adaptive is not None and (self.zero_padding or self.shifted_segments or self.detach_mixing):
            raise must("torchscale's attention must follow a pattern", "adaptive", "Set adaptive=None.")
        least = {"num_tokens": 1, "d_model": 1, "nhead": 1, "dim_feedforward": 1}
        for name in ("num_encoder_layers", "num_decoder_layers", *least):
            if getattr(self, name) < least.get(name, 0):
                raise must(f"{name} must be >= {least.get(name, 0)}", getattr(self, name))
        if not self.num_encoder_layers + self.num_decoder_layers:
            raise must("a model must have a layer", "none", "Set num_decoder_layers or num_encoder_layers.")
        if self.form != "encoder-decoder" and (self.num_source_tokens is not None or not self.memory_norm):
            raise must("num_source_tokens and memory_norm=False must come with an encoder-decoder", f"a {self.form}")
        if self.num_source_tokens is not None and self.num_source_tokens < 1:
            raise must("num_source_tokens must be >= 1, or None", self.num_source_tokens)
        if self.activation not in ACTIVATIONS:
            raise must(f"activation must be one of {', '.join(ACTIVATIONS)}", repr(self.activation))
        if self.sub_norm and not self.norm_first:
            raise must("sub_norm must come with norm_first", "norm_first=False", "Set sub_norm=False as well.")
        if isinstance(self.position, str) and self.position not in POSITIONS:
            raise must(f"position must be one of {', '.join(POSITIONS)}", repr(self.position))
        for layer in range(max(1, len(self.patterns))):
            self.pattern(layer)
        parse(self.memory_pattern)

    @classmethod
    def named(cls, size: str, **changes: Any) -> LongNetConfig:
        """A size from `SIZES`, with other values where they are given.

        >>> LongNetConfig.named("tiny", num_tokens=1000).d_model
        256
        """
        if size not in SIZES:
            raise must(f"size must be one of {', '.join(SIZES)}", repr(size))
        return cls(**{**SIZES[size], **changes})

    def pattern(self, layer: int) -> Pattern:
        """The pattern of a layer; full for learned attention, which may select any block."""
        if self.adaptive is not None:
            return Full()
        if self.patterns:
            return parse(self.patterns[layer % len(self.patterns)])
        return Dilated(self.segment_lengths, self.dilation_rates, self.offset)  # pyrefly: ignore[bad-argument-type]

    @property
    def head_dim(self) -> int:
        return self.d_model // self.nhead

    @property
    def form(self) -> str:
        """ "decoder", "encoder" or "encoder-decoder"."""
        if not self.num_encoder_layers:
            return "decoder"
        return "encoder-decoder" if self.num_decoder_layers else "encoder"

    @property
    def has_final_norm(self) -> bool:
        return self.norm_first if self.final_norm is None else self.final_norm

    def gamma(self, of: str) -> float:
        """MAGNETO's gain of the value, output and feed-forward projections of the "encoder" or "decoder"."""
        if not self.sub_norm:
            return 1.0
        if self.form != "encoder-decoder":
            return math.sqrt(math.log(2 * max(self.num_encoder_layers, self.num_decoder_layers)) or 1.0)
        squared = math.log(3 * self.num_decoder_layers)
        return math.sqrt(squared * math.log(2 * self.num_encoder_layers) / 3 if of == "encoder" else squared)

    def _weights(self, cross: bool) -> tuple[int, int]:
        """Entries of a layer's matrices, and of its biases and norms."""
        d, ff = self.d_model, self.dim_feedforward
        kv = (self.num_kv_heads or self.nhead) * self.head_dim
        attention, biases = 2 * d * d + 2 * d * kv, 2 * d + 2 * kv
        attentions = 2 if cross else 1
        inner = attentions if self.memory_norm else 1
        norms = (attentions + 1) * d + (inner * d + ff if self.sub_norm else 0)
        vectors = (attentions * biases + d + ff + 2 * norms) if self.bias else norms
        return attentions * attention + 2 * d * ff, vectors + self.sink * self.nhead + self._scorer_weights()

    def _scorer_weights(self) -> int:
        """Parameters of the scorer of a layer with learned attention, temperatures included."""
        chosen, width = self.adaptive, self.head_dim
        if not isinstance(chosen, AdaptiveConfig):
            return 0
        widths = [2 * width, *[chosen.hidden_dim] * (chosen.num_layers - 1), 1]
        mlp = sum((before + 1) * after for before, after in pairwise(widths))
        each = mlp + 3 * width * width + 2 * width * chosen.match_rank
        return each * (1 if chosen.share_across_heads else self.nhead) + chosen.learnable_temperature * self.nhead

    @property
    def num_parameters(self) -> int:
        """Parameters of the language model."""
        cross = self.form == "encoder-decoder"
        total = self.num_encoder_layers * sum(self._weights(False)) + self.num_decoder_layers * sum(
            self._weights(cross)
        )
        ends = (self.num_encoder_layers > 0) + (self.num_decoder_layers > 0)
        total += ends * self.d_model * (2 if self.bias else 1) * self.has_final_norm
        head = 0 if self.tie_embeddings else self.num_tokens * (self.d_model + self.bias)
        return total + (self.num_tokens + (self.num_source_tokens or 0)) * self.d_model + head

    def flops(self, n: int) -> int:
        """Floating-point operations of a forward pass over `n` tokens (and `n` more for an encoder's, if both).

        The backward pass takes twice as many for the projections and 2.5 times as many for attention.
        """
        cross = self.form == "encoder-decoder"
        total = 2 * n * self.num_tokens * self.d_model
        for count, causal in ((self.num_encoder_layers, False), (self.num_decoder_layers, True)):
            matrices, _ = self._weights(cross and causal)
            total += count * 2 * n * matrices
            seen = [self.pattern(layer) for layer in range(count)]
            total += sum(self._attention_flops(p, seen.count(p), n, causal) for p in set(seen))
        if cross:
            total += self._attention_flops(parse(self.memory_pattern), self.num_decoder_layers, n, False)
        return total

    def _attention_flops(self, pattern: Pattern, layers: int, n: int, is_causal: bool) -> int:
        dense = layers * SparseAttention(pattern).plan(n, self.nhead, is_causal).flops(self.head_dim)
        return round(self.adaptive.kept * dense) if isinstance(self.adaptive, AdaptiveConfig) else dense

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` reads them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["position"] = position_facts(self.position)
        values["adaptive"] = asdict(self.adaptive) if isinstance(self.adaptive, AdaptiveConfig) else None
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LongNetConfig:
        """Config from the result of `to_dict`."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise must("a model's configuration must hold known settings", ", ".join(unknown))
        if "position" in values:
            values = {**values, "position": position_from(values["position"])}
        return cls(**values)


def position_facts(position: Position | str | None) -> Any:
    """A position as plain values; a name, or none, stays what it is."""
    if not isinstance(position, Position):
        return position
    kind = next((name for name, made in POSITIONS.items() if type(position) is made), None)
    if kind is None:
        raise must_be(f"position must be of a kind among {', '.join(POSITIONS)}", type(position).__name__)
    return {"kind": kind, **asdict(position)}


def position_from(facts: Any) -> Position | str | None:
    """Position encoding from the result of `position_facts`."""
    if not isinstance(facts, Mapping):
        return facts
    settings = dict(facts)
    kind = settings.pop("kind", None)
    if kind not in POSITIONS:
        raise must_be(f"position must be of a kind among {', '.join(POSITIONS)}", repr(kind))
    return POSITIONS[kind](**settings)


_SHORT_LADDER = {"segment_lengths": (512, 2048, 8192, 32768), "dilation_rates": (1, 2, 4, 8)}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 256, "nhead": 4, "num_decoder_layers": 4, "dim_feedforward": 1024, **_SHORT_LADDER},
    "small": {"d_model": 512, "nhead": 8, "num_decoder_layers": 8, "dim_feedforward": 2048, **_SHORT_LADDER},
    "base": {"d_model": 768, "nhead": 12, "num_decoder_layers": 12, "dim_feedforward": 3072},
    "large": {"d_model": 1024, "nhead": 16, "num_decoder_layers": 24, "dim_feedforward": 4096},
    "1b": {"d_model": 2048, "nhead": 16, "num_decoder_layers": 24, "dim_feedforward": 8192},
}
"""Named sizes. "base" is the paper's; heads are 64 wide, 128 in "1b"."""
