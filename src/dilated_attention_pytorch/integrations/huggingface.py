"""Attention implementations for Hugging Face models.

    >>> import dilated_attention_pytorch as dap                                 # doctest: +SKIP
    >>> dap.integrate(model)                                                    # doctest: +SKIP
    >>> dap.integrate(model, "dilated:2048x1,8192x4")                           # doctest: +SKIP
    >>> dap.integrate(model, {0: "window:512", 1: "dilated:2048x1,8192x4"})     # doctest: +SKIP
    >>> dap.integrate(model, "learned:0.1;block=64")                            # doctest: +SKIP

The mask that a model builds becomes a pattern, which the pattern of a layer restricts further. Positions count from the
first real token of a sample. Documents packed into one row do not see each other. Cross-attention stays full.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import must, must_be
from ..nn import BlockSparseAdaptive
from ..nn.adaptive.learned_text import LearnedText
from ..nn.cross_attention import attention_across
from ..ops import attention, attention_rows, attention_with_lse
from ..ops.checks import require
from ..ops.decode import attention_step, check_decodable
from ..patterns import BlockDilated, Causal, Dilated, Documents, Full, Packed, Pattern, SlidingWindow, as_pattern
from ..patterns.parse import to_operand
from .huggingface_adapters import ADAPTED, adapt
from .huggingface_masks import ModelMask, Samples, both, given_mask, is_relative, model_mask
from .learned_layers import adopt_scorer, new_core

OWN = "model's own"
"""Pattern that leaves the masks of a model as they are."""

Layers = Pattern | str | Mapping[int, Pattern | str]
"""Pattern of every layer, or of some layers by index; the others keep their own mask."""

Resolved = Pattern | LearnedText | Mapping[int, Pattern | LearnedText]

PATTERNS: dict[str, Layers] = {
    "dap": OWN,
    "dilated": Dilated((2048, 4096, 8192), (1, 2, 4)),
    "block_sparse": BlockDilated((2048, 4096, 8192), (1, 2, 4)),
}

UNSUPPORTED = ("head_mask", "cache", "indices", "block_indices", "sinks")
"""Arguments of some models that change the result; each must be absent or None."""

PACKING = ("cu_seq_lens", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
PACKING += ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k")
"""Arguments about packed documents; each must come with `cu_seq_lens_q`, which alone is read."""

OTHER_SEQUENCE = frozenset({"key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "key"})
"""Parameters of a `forward` that can attend to another sequence."""

LONGEST_WEIGHTS = 8192
"""Tokens up to which `output_attentions` returns weights, which are N x N."""

PLAIN = (None, None, None, False)
"""Sink, soft cap, bias and weights of a call without any."""

EAGER = 'Use attn_implementation="eager".'
CHECKED = "dap_by_distance"
"""Attribute of biases that were found to depend on the distance alone."""

_registered: set[str] = set()
"""Names of this library's implementations."""

LAYER = "dap_layer"
"""Attribute with the layer index of attention modules without `layer_idx`."""

CORE = "dap_learned"
"""Submodule of attention modules with learned attention; its scorer is part of the model."""


def register(patterns: Mapping[str, Layers] | None = None) -> tuple[str, ...]:
    """Add implementations to transformers' attention and mask interfaces, and return their names.

    Args:
        patterns: name -> pattern, {layer index: pattern} or "model's own"; "dap" (the model's own masks), "dilated" and
            "block_sparse" by default. Registering a name again replaces it.
    """
    given = {name: _resolved(layers) for name, layers in (PATTERNS if patterns is None else patterns).items()}
    for name, layers in given.items():
        if any(isinstance(one, LearnedText) for one in _each(layers)):
            raise must("learned attention must be given to a model, which holds its scorers", name, "Use integrate.")
    return _register(given)


def _register(given: Mapping[str, Resolved]) -> tuple[str, ...]:
    from transformers import AttentionInterface, AttentionMaskInterface  # pyrefly: ignore[missing-import]

    for name, layers in given.items():
        AttentionInterface.register(name, attention_function(layers))
        # A name without a mask function receives no mask at all, and padding would be seen.
        AttentionMaskInterface.register(name, model_mask)
    _registered.update(given)
    return tuple(given)


def integrate(model: nn.Module, pattern: Layers = OWN) -> str:
    """Make a Hugging Face model use this library's attention; return the name of the implementation.

    The masks of the model (causal, bidirectional, windows, chunks, packed documents, padding), its sinks and its caches
    are kept. A pattern restricts attention further: queries attend to keys that both the pattern and the mask allow.

    With "learned:0.1;block=64" the layers of a causal model select blocks by content. Each gets a submodule
    `dap_learned` with a scorer, whose parameters train, save and load with the model; see `sparsify`. Steps with a
    cache attend to all keys.

    Args:
        model: a `transformers.PreTrainedModel`, changed in place by `set_attn_implementation`.
        pattern: pattern of every layer; {layer index: pattern} for some layers, the others keep the model's mask; or
            "model's own", the default. In an encoder-decoder model, an index refers to the layer in both stacks.
    """
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "config"):
        raise must_be("model must be a transformers.PreTrainedModel", type(model).__name__, "See replace_attention.")
    layers = _resolved(pattern)
    if isinstance(layers, Mapping):
        _number_layers(model, layers)
        text = "; ".join(f"{layer}: {_text(one)}" for layer, one in sorted(layers.items()))
    else:
        # Patterns of functions differ by identity alone; their text is the same.
        text = _text(layers)
    cores = _learned_cores(model, layers)
    name = f"dap_{sha256(text.encode()).hexdigest()[:12]}"
    implementation = _Implementation(name, layers)
    before = getattr(model.config, "_attn_implementation", None)
    adapt(model, name)
    model.set_attn_implementation(name)  # pyrefly: ignore[not-callable]
    if getattr(model.config, "_attn_implementation", None) != name:
        raise must(
            "the model must compute attention by transformers' AttentionInterface",
            f"{type(model).__name__}, which does not",
            "replace_attention takes modules of torch and timm.",
        )
    try:
        _check_reached(model, layers, name)
    except ValueError:
        model.set_attn_implementation(before)  # pyrefly: ignore[not-callable]
        raise
    for module in model.modules():
        method = getattr(type(module), "compute_bias", None)
        if method is not None and "past_seen_tokens" in inspect.signature(method).parameters:
            # A bound method, which a copy of the module binds to the copy.
            module.compute_bias = MethodType(compute_bias, module)  # pyrefly: ignore[bad-argument-type]
    for module, core in cores.items():
        setattr(module, CORE, core)
    model.dap_implementation = implementation  # pyrefly: ignore[bad-argument-type]
    return name


class _Implementation:
    """Registration that a pickled model takes along: another process does not know the name."""

    def __init__(self, name: str, layers: Resolved) -> None:
        self.named = name, layers
        _register({name: layers})

    def __reduce__(self) -> tuple[type[_Implementation], tuple[str, Resolved]]:
        return _Implementation, self.named


def compute_bias(
    self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
) -> Tensor:
    """Bias of T5's attention by distance, (1, H, 1, queries + keys - 1), where the model runs on this library.

    Entries are those of the last row, from its first key on, followed by those of the first row. The method of the
    class, which gives all pairs, is called for a single row and for other implementations.
    """
    of_class = type(self).compute_bias
    if self.config._attn_implementation not in _registered or query_length == 1:
        return of_class(self, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
    last, first = (
        of_class(self, 1, key_length, device=device, past_seen_tokens=past_seen_tokens + row)
        for row in (query_length - 1, 0)
    )
    return torch.cat([last[..., : query_length - 1], first], -1)


def _resolved(layers: Layers) -> Resolved:
    if isinstance(layers, Mapping):
        return {layer: _resolved(one) for layer, one in layers.items()}  # pyrefly: ignore[bad-return]
    if isinstance(layers, str) and LearnedText.matches(layers):
        return LearnedText.parse(layers)
    return Full() if isinstance(layers, str) and layers == OWN else as_pattern(layers)


def _each(layers: Resolved) -> list[Pattern | LearnedText]:
    return list(layers.values()) if isinstance(layers, Mapping) else [layers]


def _text(pattern: Pattern | LearnedText) -> str:
    return str(pattern) if isinstance(pattern, LearnedText) else to_operand(pattern)


def _learned_cores(model: nn.Module, layers: Resolved) -> dict[nn.Module, BlockSparseAdaptive]:
    """Cores for the attention modules whose pattern is learned, with the scorers that these have already."""
    cores: dict[nn.Module, BlockSparseAdaptive] = {}
    if not any(isinstance(one, LearnedText) for one in _each(layers)):
        return cores
    for name, module in model.named_modules():
        wanted = _pattern_of(module, layers)
        if "attention" not in type(module).__name__.lower() or not isinstance(wanted, LearnedText):
            continue
        if (reason := _why_not_learned(module)) is not None:
            advice = "Name the layers that shall be learned by index: {layer: pattern}."
            raise must("learned attention must have causal layers as Llama's", f"{name}: {reason}", advice)
        module: Any
        heads, key_heads = module.config.num_attention_heads, getattr(module.config, "num_key_value_heads", None)
        core = new_core(wanted, heads, module.head_dim, module.q_proj.weight, num_kv_heads=key_heads)
        adopt_scorer(core, getattr(module, CORE, None))
        cores[module] = core.train(module.training)
    if not cores:
        raise must("learned attention must have attention modules", f"none in {type(model).__name__}")
    return cores


def _why_not_learned(module: Any) -> str | None:
    """Reason why a module's attention cannot be learned."""
    kind = type(module).__name__
    parts = ("q_proj", "head_dim", "config")
    if lacking := [part for part in parts if getattr(module, part, None) is None]:
        return f"{kind} has no {', '.join(lacking)}"
    if not getattr(module, "is_causal", False):
        return f"{kind} is not causal"
    own = {"sliding_window": "a window", "sinks": "sinks", "attn_logit_softcapping": "a soft cap"}
    # Where a window differs by layer, modules have it; otherwise the configuration may.
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    present = {name: getattr(module, name, None) for name in own} | {"sliding_window": window}
    return next((f"{kind} has {own[name]}" for name, value in present.items() if value is not None), None)


def _check_reached(model: nn.Module, layers: Resolved, name: str) -> None:
    """Raise where `integrate` has no effect: on a pattern of attention in code of the model's own, or everywhere."""
    reached, others = False, []
    codes = {kind: _code(kind) for kind in {type(module) for module in model.modules()}}
    for place, module in model.named_modules():
        kind = type(module).__name__
        code = codes[type(module)]
        if kind in ADAPTED or "ALL_ATTENTION_FUNCTIONS" in code or "AttentionInterface" in code:
            implementation = getattr(getattr(module, "config", None), "_attn_implementation", name)
            is_outside = implementation != name
        else:
            # Pooling has queries of its own, which attend to all tokens as in cross-attention.
            is_attention = "attention" in kind.lower() and "pooling" not in kind.lower()
            is_attention = is_attention and ("softmax" in code or "scaled_dot_product" in code)
            is_outside = True if is_attention else None
        reached = reached or is_outside is False
        if is_outside and not isinstance(_pattern_of(module, layers), Full):
            others.append(f"{place} ({kind})")
    if others or not reached:
        raise must(
            f"{'all attention under a pattern' if others else 'attention'} must be computed by transformers' "
            "AttentionInterface",
            f"other code in {', '.join(others[:4])}" if others else f"no such module in {type(model).__name__}",
            "Integrate a part of the model, or name the layers: {layer: pattern}." if others else None,
        )


def _code(kind: type) -> str:
    """Source of a module's class and of its base classes below `nn.Module`; empty where there is none."""
    if kind.__module__.startswith("torch.") or hasattr(kind, "set_attn_implementation"):
        return ""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    try:
        return "".join(inspect.getsource(one) for one in own)
    except (OSError, TypeError):
        return "AttentionInterface"


def _number_layers(model: nn.Module, layers: Mapping[int, Any]) -> None:
    """Set the layer index of attention modules without one, from their place in the model."""
    found = set()
    for name, module in model.named_modules():
        if "attention" not in type(module).__name__.lower():
            continue
        if getattr(module, "layer_idx", None) is None:
            places = [int(part) for part in name.split(".") if part.isdecimal()]
            setattr(module, LAYER, places[0] if places else None)
        found.add(_layer_of(module))
    unknown = set(layers) - found
    if unknown:
        raise must(f"layer indices must be among {sorted(x for x in found if x is not None)}", sorted(unknown, key=str))


def _layer_of(module: nn.Module) -> int | None:
    layer = getattr(module, "layer_idx", None)
    return getattr(module, LAYER, None) if layer is None else layer


def _pattern_of(module: nn.Module, layers: Resolved) -> Pattern | LearnedText:
    if not isinstance(layers, Mapping):
        return layers
    layer = _layer_of(module)
    return Full() if layer is None else layers.get(layer, Full())


def attention_function(layers: Resolved) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Attention of a pattern, or of a pattern for each layer, with the signature of transformers' interface."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        position_bias: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        _check_others(others)
        pattern = _pattern_of(module, layers)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        lengths = query.shape[2], key.shape[2]
        mask = _with_bounds(given_mask(attention_mask, causal, sliding_window, *lengths), others, len(query))
        settings = {"scale": scaling, "enable_gqa": True, "dropout_p": dropout}
        wants_weights = _wants_weights(module, others)
        if isinstance(pattern, LearnedText):
            refused = {"s_aux": s_aux, "softcap": softcap, "output_attentions": wants_weights or None}
            refused["position_bias"] = others.get("position_bias")
            if given := [name for name, value in refused.items() if value is not None]:
                raise must(f"learned attention must come without {', '.join(refused)}", ", ".join(given))
            return learned_attention(module, query, key, value, mask, **settings).transpose(1, 2), None
        is_full = not mask.is_causal and isinstance(mask.pattern, Full) and mask.documents is mask.blocks is None
        is_full = is_full and isinstance(pattern, Full) and (s_aux, softcap, position_bias, wants_weights) == PLAIN
        is_square = lengths[0] == lengths[1]
        is_cross = _is_cross_attention(module, mask.is_causal, is_square, is_full)
        if is_cross or (is_full and not is_square):
            if s_aux is not None or softcap is not None or wants_weights:
                raise must(
                    "cross-attention must come without s_aux, softcap and output_attentions", type(module).__name__
                )
            if position_bias is not None:
                # T5 passes zeros here.
                query = require(
                    query, ~position_bias.any(), "position_bias of cross-attention must be 0", lambda: "more"
                )
            if mask.documents is not None:
                raise must("packed documents must come with self-attention", type(module).__name__)
            ignored = None if mask.real is None else ~mask.real.to(key.device)
            whole = {"is_causal": False, "cu_seqlens": None, "key_padding_mask": ignored}
            return attention_across(attention, query, key, value, Full(), **whole, **settings).transpose(1, 2), None
        if wants_weights and not softcap is position_bias is None:
            given = "softcap" if position_bias is None else "position_bias"
            raise must("output_attentions must come without softcap and position_bias", given, EAGER)
        bias = None if position_bias is None else _bias_table(position_bias, query, key, mask)
        weights = _weights(query, key, pattern, mask, scaling, s_aux) if wants_weights else None
        output = self_attention(query, key, value, pattern, mask, sink=s_aux, softcap=softcap, bias=bias, **settings)
        return output.transpose(1, 2), weights

    return attend


def learned_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: ModelMask, **settings: Any
) -> Tensor:
    """Attention of a whole sequence on the blocks that a module's scorer selects, (B, H, N, E).

    Rows that follow on a cache attend to all keys: the scorer of a token needs the queries before it, which caches of
    transformers do not hold.
    """
    if not mask.is_causal or mask.pattern != Full() or mask.documents is not None or mask.blocks is not None:
        came = (
            f"causal {mask.pattern}" if mask.is_causal and mask.pattern != Full() else "packed or bidirectional tokens"
        )
        raise must(
            "learned attention must have the causal mask of a whole sequence", came, "Give such layers a pattern."
        )
    key, value = _in_use(query, key, mask), _in_use(query, value, mask)
    if query.shape[2] != key.shape[2]:
        return self_attention(query, key, value, Full(), mask, **settings)
    core = getattr(module, CORE, None)
    if core is None:
        raise must("learned attention must be given to a model by integrate", f"{type(module).__name__} without it")
    for name, given in (("softmax_scale", settings["scale"]), ("attention_dropout", settings["dropout_p"])):
        if getattr(core, name) != given:
            setattr(core, name, given)
    padding = None if mask.real is None else ~mask.real[:, : key.shape[2]].to(key.device)
    parts, order = [], []
    # Blocks begin at the first real token of a sample; rows before it are 0.
    for index, start, _, _ in mask.samples(len(query), shifts=True):
        rows = (x[index, :, start:].transpose(1, 2) for x in (query, key, value))
        output = core(*rows, True, key_padding_mask=None if padding is None else padding[index, start:])
        parts.append(F.pad(output.transpose(1, 2), (0, 0, start, 0)))
        order += index if isinstance(index, list) else range(len(query))[index]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)[torch.tensor(order, device="cpu").argsort().to(query.device)]


def self_attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, mask: ModelMask, **settings: Any
) -> Tensor:
    """Attention of a pattern within the mask of a model, (B, H, queries, E); rows of padding before a sample are 0.

    Args:
        query: (B, H, queries, D), at the positions from `mask.first_query` on.
        key: (B, G, keys, D), at the positions from `mask.first_key` on; static caches have more than are in use.
        value: (B, G, keys, E).
        pattern: of this layer.
        mask: of the model.
        settings: `scale`, `enable_gqa`, `dropout_p`, `sink`, `softcap` and `bias`.
    """
    key, value = _in_use(query, key, mask), _in_use(query, value, mask)
    parts, order = [], []
    for samples in _samples(query, pattern, mask):
        rows, keys, position, first_key = _excerpt(samples, query, mask, is_relative(both(pattern, mask.pattern)))
        if rows >= query.shape[2]:
            own = query.new_zeros(len(query[samples.index]), *query.shape[1:3], value.shape[3])
        else:
            own_query = query[samples.index, :, rows:]
            own_key, own_value = key[samples.index, :, keys:], value[samples.index, :, keys:]
            padding = None if mask.real is None else ~mask.real[samples.index, keys : key.shape[2]].to(key.device)
            place = mask, samples, position, first_key, padding
            own = _attend(own_query, own_key, own_value, pattern, *place, **settings)
            own = F.pad(own, (0, 0, rows, 0)) if rows else own
        if isinstance(samples.index, slice) and samples.index == slice(None):
            return own
        parts.append(own)
        order += range(len(query))[samples.index] if isinstance(samples.index, slice) else samples.index
    back = torch.tensor(order, device="cpu").argsort().to(query.device)
    return torch.cat(parts)[back]


def _bias_table(position_bias: Tensor, query: Tensor, key: Tensor, mask: ModelMask) -> Tensor:
    """Table by distance from that of `compute_bias`, or from a bias of all pairs, (1, H, queries, keys)."""
    heads, rows, keys = query.shape[1], query.shape[2], key.shape[2]
    if tuple(position_bias.shape) not in ((1, heads, rows, keys), (1, heads, 1, keys + rows - 1)):
        raise must(f"position_bias must have shape (1, {heads}, {rows}, {keys})", tuple(position_bias.shape), EAGER)
    table = torch.cat([position_bias[0, :, 1:, 0].flip(-1), position_bias[0, :, 0]], -1)
    if position_bias.shape[2] > 1 and not getattr(position_bias, CHECKED, False):
        same = (position_bias[:, :, 1:, 1:] == position_bias[:, :, :-1, :-1]).all()
        what = "position_bias must depend on the distance of query and key alone"
        table = require(table, same, what, lambda: "another bias", EAGER)
        if not torch.compiler.is_compiling():
            # The layers of a stack share the tensor.
            setattr(position_bias, CHECKED, True)
    before = mask.first_query - mask.first_key + rows - 1
    after = keys + rows - 2 - before
    # Distances in the padding do not occur.
    return F.pad(table, (max(after - before, 0), max(before - after, 0)), mode="replicate")


def _samples(query: Tensor, pattern: Pattern, mask: ModelMask) -> list[Samples]:
    shifts = not is_relative(both(pattern, mask.pattern)) or mask.blocks is not None
    return mask.samples(len(query), shifts)


def _in_use(query: Tensor, x: Tensor, mask: ModelMask) -> Tensor:
    """Keys or values up to the last query; those behind it are free slots of a static cache."""
    if not mask.is_causal:
        return x
    end = mask.first_query - mask.first_key + query.shape[2]
    if not query.shape[2] <= end <= x.shape[2]:
        raise must(
            "query and key must have the same length, or the query must follow a causal cache",
            f"{query.shape[2]} queries from {mask.first_query} on and {x.shape[2]} keys from {mask.first_key} on",
        )
    return x[:, :, :end]


def _excerpt(samples: Samples, query: Tensor, mask: ModelMask, relative: bool) -> tuple[int, int, int, int]:
    """Rows and keys of padding to skip, position of the first query that stays, position of the first key."""
    if relative and mask.blocks is None:
        return 0, 0, mask.first_query - mask.first_key, 0
    rows, keys = (max(samples.start - first, 0) for first in (mask.first_query, mask.first_key))
    return rows, keys, mask.first_query + rows - samples.start, mask.first_key + keys - samples.start


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    mask: ModelMask,
    samples: Samples,
    position: int,
    first_key: int,
    padding: Tensor | None,
    dropout_p: float,
    **settings: Any,
) -> Tensor:
    """Attention of samples that share everything besides padding."""
    settings = {**settings, "key_padding_mask": padding}
    if position == 0 and query.shape[2] == key.shape[2]:
        seen, is_causal = _seen(pattern, mask, samples)
        return attention(query, key, value, seen, is_causal=is_causal, dropout_p=dropout_p, **settings)
    if not mask.is_causal or samples.documents is not None:
        raise must(
            "query and key must have the same length, or the query must follow a causal cache",
            f"{query.shape[2]} queries and {key.shape[2]} keys{' of packed sequences' if samples.documents else ''}",
        )
    if dropout_p:
        raise must("decoding must come with dropout off", dropout_p, "Call model.eval() first.")
    seen = both(pattern, mask.pattern)
    check_decodable(seen, None)
    return attention_step(query, key, value, seen, position, live=first_key, **settings)


def _seen(pattern: Pattern, mask: ModelMask, samples: Samples) -> tuple[Pattern, bool]:
    """Pattern and causality of samples without a cache."""
    if samples.blocks is not None:
        blocks = Documents(samples.blocks)
        if mask.is_bounded and isinstance(mask.pattern, SlidingWindow):
            # The window is open to later keys, among which a block has some.
            window = SlidingWindow(mask.pattern.before, sum(samples.blocks))
            return both(pattern, (Causal() | blocks) & window), False
        return both(pattern, both(mask.pattern, Causal()) | blocks), False
    seen = both(pattern, mask.pattern)
    if samples.documents is None:
        return seen, mask.is_causal
    return Packed(both(seen, Causal()) if mask.is_causal else seen, samples.documents), False


def _wants_weights(module: nn.Module, others: dict[str, Any]) -> bool:
    given = others.get("output_attentions")
    if given is None:
        given = getattr(getattr(module, "config", None), "output_attentions", False) or _records_weights()
    return bool(given)


def _records_weights() -> bool:
    """Whether transformers collects weights by hooks: some models do not pass `output_attentions` to their layers."""
    hooks = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(hooks, "_active_collector", None)
    if collector is None or torch.compiler.is_compiling():
        return False
    return any("attentions" in key for key in collector.get() or ())


def _weights(
    query: Tensor, key: Tensor, pattern: Pattern, mask: ModelMask, scale: float | None, sink: Tensor | None
) -> Tensor:
    """Softmax weights (B, H, N, N) before dropout, without the column of a sink."""
    n = query.shape[2]
    samples = _samples(query, pattern, mask)
    if n > LONGEST_WEIGHTS or n != key.shape[2] or mask.first_query or len(samples) > 1 or samples[0].start:
        raise must(
            f"output_attentions must come with at most {LONGEST_WEIGHTS} tokens, without a cache, left padding of an "
            "absolute pattern or different documents by sample",
            f"{n} queries and {key.shape[2]} keys",
            "attention_rows gives the weights of chosen rows.",
        )
    seen, is_causal = _seen(pattern, mask, samples[0])
    padding = None if mask.real is None else ~mask.real.to(key.device)
    settings = {"is_causal": is_causal, "scale": scale, "enable_gqa": True, "key_padding_mask": padding}
    weights = attention_rows(query, key, seen, range(n), **settings).to(query.dtype)
    if sink is None:
        return weights
    lse = attention_with_lse(query, key, key, seen, **settings).lse
    return weights * torch.sigmoid(lse - sink.to(lse.dtype)[:, None])[..., None].to(weights.dtype)


def _with_bounds(mask: ModelMask, others: dict[str, Any], batch: int) -> ModelMask:
    """The mask with the packed documents of FlashAttention's arguments, which are read by the host."""
    bounds = others.get("cu_seq_lens_q")
    if bounds is None:
        for name in PACKING:
            if others.get(name) is not None:
                raise must(f"{name} must come with cu_seq_lens_q", "none", "Pass cu_seq_lens_q and cu_seq_lens_k.")
        return mask
    if batch != 1:
        raise must("cu_seq_lens_q must come with batch size 1", batch, "Concatenate the sequences.")
    documents = tuple(bounds.diff().tolist())
    keys = others.get("cu_seq_lens_k")
    if keys is not None and bounds.tolist() != keys.tolist():
        raise must("cu_seq_lens_k must give the documents of cu_seq_lens_q", keys.tolist())
    if mask.documents is not None and mask.documents != (documents,):
        raise must("position_ids must give the documents of cu_seq_lens_q", mask.documents)
    return mask._replace(documents=(documents,))


def _is_cross_attention(module: nn.Module, causal: bool, same_length: bool, is_full: bool) -> bool:
    """Whether the keys of a module come from another sequence, by the marks that transformers' modules carry.

    Modules without marks are left alone where attention is full, which does not depend on it.
    """
    named = "Cross" in type(module).__name__
    if named or getattr(module, "is_cross_attention", False) or getattr(module, "is_cross", False):
        return True
    if causal:
        return False
    if hasattr(module, "is_decoder"):
        return bool(module.is_decoder)
    if OTHER_SEQUENCE.isdisjoint(inspect.signature(module.forward).parameters):
        return False
    if same_length and is_full:
        return False
    if same_length:
        raise must(
            "self-attention and cross-attention must be told apart by is_decoder or is_cross_attention",
            f"{type(module).__name__} without either, and queries and keys of one length",
            'Use attn_implementation="sdpa" for this model.',
        )
    return True


def _check_others(others: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise must(f"{name} must be absent: this implementation has none", name, EAGER)
