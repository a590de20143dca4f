"""Sparse attention in the place of the attention that a model has."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import must, must_be
from ..models.layers import DilatedTransformerLayer, LayerAttention
from ..nn import Alibi, MultiheadBlockSparseAdaptive
from ..nn.adaptive.learned_text import LearnedText
from ..nn.attention import Planned
from ..nn.multihead import MultiheadSparseAttention
from ..nn.projections import why_not_replaced
from ..ops import attention
from ..patterns import Causal, Full, Pattern, as_pattern
from .huggingface import integrate
from .learned_layers import adopt_scorer, new_core, widened

TIMM_ARGUMENTS = {"x", "attn_mask", "is_causal"}
"""Arguments of `forward` in timm's `Attention`; classes with more (rotary tables, shared positions) differ."""


class Replacement(NamedTuple):
    """Outcome of `replace_attention` for one module."""

    name: str
    """Place of the module in the model."""
    replaced: bool
    why: str
    """The pattern, or the reason why the module was left alone."""


class FusedProjectionAttention(nn.Module, Planned):
    """Sparse attention with the submodules of timm's `Attention`: state dicts keep their names.

    Args:
        module: has `qkv`, `proj`, `num_heads`; may have `q_norm`, `k_norm`, `norm`, `gate`, `attn_drop`, `proj_drop`.
        pattern: which keys a query attends to. Learned attention adds a `core` with a scorer.
    """

    def __init__(self, module: Any, pattern: Pattern | LearnedText) -> None:
        super().__init__()
        self.pattern = Full() if isinstance(pattern, LearnedText) else pattern
        self.num_heads: int = module.num_heads  # pyrefly: ignore[bad-override-mutable-attribute]
        self.head_dim = module.qkv.out_features // (3 * module.num_heads)
        self.scale = float(getattr(module, "scale", self.head_dim**-0.5))
        self.qkv, self.proj = module.qkv, module.proj
        self.q_norm, self.k_norm = _part(module, "q_norm"), _part(module, "k_norm")
        self.attn_drop, self.norm = _part(module, "attn_drop"), _part(module, "norm")
        self.proj_drop = _part(module, "proj_drop")
        self.gate: nn.Linear | None = getattr(module, "gate", None)
        self.core = None
        if isinstance(pattern, LearnedText):
            settings = {"softmax_scale": self.scale, "attention_dropout": getattr(self.attn_drop, "p", 0.0)}
            self.core = new_core(pattern, self.num_heads, self.head_dim, self.qkv.weight, **settings)
            adopt_scorer(self.core, getattr(module, "core", None))
        self.train(module.training)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend: (B, N, C) to (B, N, C)."""
        if attn_mask is not None:
            raise must("attn_mask must be None", "a mask", "Intersect the pattern with Pattern.from_mask(mask).")
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        query, key = self.q_norm(query), self.k_norm(key)
        if self.core is None:
            dropout = getattr(self.attn_drop, "p", 0.0) if self.training else 0.0
            settings: dict[str, Any] = {"is_causal": is_causal, "scale": self.scale, "dropout_p": dropout}
            output = attention(query, key, value, self.pattern, **settings).transpose(1, 2)
        else:
            output = self.core(*(x.transpose(1, 2) for x in (query, key, value)), is_causal)
        output = self.norm(output.flatten(2))
        return self.proj_drop(self.proj(output if self.gate is None else output * self.gate(x).sigmoid()))

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads of {self.head_dim}" + ("" if self.core else f', "{self.pattern}"')


def _part(module: nn.Module, name: str) -> nn.Module:
    """Submodule of a name; the identity where releases of timm have none."""
    part = getattr(module, name, None)
    return nn.Identity() if part is None else part


def replace_attention(
    model: nn.Module, pattern: Pattern | str | Mapping[str, Pattern | str], **options: Any
) -> list[Replacement]:
    """Replace the attention of a model by sparse attention with the same weights.

    | attention | becomes |
    |---|---|
    | `torch.nn.MultiheadAttention` | `MultiheadSparseAttention` of the same weights |
    | timm's `Attention` (one `qkv` projection) | the same submodules around this library's attention |
    | a Hugging Face model | the same model by `integrate`, the pattern within its own masks |
    | modules replaced before | the same modules with this pattern |

    With "learned:0.1;block=64", blocks are selected by content: `MultiheadBlockSparseAdaptive` takes the place of
    torch's attention, `MultiheadSparseAttention` and self-attention of `LongNetLM`; other kinds get a scorer besides
    their own submodules. Scorers are new and are trained with the model or by `sparsify`.

    Frozen parameters stay frozen. Subclasses that override `forward` are not replaced. A `UserWarning` lists
    the modules and the reasons where nothing was replaced.

    Args:
        model: changed in place.
        pattern: which keys a query attends to; {name of a module: pattern} for some modules, the others as they are.
        options: for `MultiheadSparseAttention.from_torch`; other kinds of attention take none.

    Returns:
        One entry for each module that is attention by its class or name, with the reason if it was not replaced.

    >>> model = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> for entry in replace_attention(model, "window:128"):
    ...     print(entry)
    Replacement(name='self_attn', replaced=True, why='window:128')
    """
    if not isinstance(model, nn.Module):
        raise must_be("model must be an nn.Module", type(model).__name__)
    if isinstance(model, nn.MultiheadAttention) or (not isinstance(model, Planned) and _has_fused_projection(model)):
        raise must(
            "model must contain attention",
            "the attention module itself",
            "Use MultiheadSparseAttention.from_torch, or pass the module that holds it.",
        )
    found = _attention_in(model)
    if isinstance(pattern, Mapping):
        if unknown := [name for name in pattern if name not in found]:
            raise must(f"names must be those of attention modules, {', '.join(found) or 'of which there are none'}",
                       ", ".join(unknown))  # fmt: skip
        found = {name: module for name, module in found.items() if name in pattern}
    wanted = {name: _wanted(pattern[name] if isinstance(pattern, Mapping) else pattern) for name in found}
    reasons = {name: _why_not(model, name, module, wanted[name], options) for name, module in found.items()}
    # All are made before the first is put in place: a wrong option leaves the model as it was. A module in two places
    # stays one module.
    made: dict[int, Any] = {}
    for name, module in found.items():
        if reasons[name] is None and id(module) not in made:
            made[id(module)] = _made(module, wanted[name], options)
    report = []
    for name, module in found.items():
        reason = reasons[name]
        if reason is None:
            _put(model, name, module, made[id(module)], wanted[name])
        report.append(Replacement(name, reason is None, str(wanted[name]) if reason is None else reason))
    if not any(entry.replaced for entry in report):
        left = "; ".join(f"{entry.name or 'the model'}: {entry.why}" for entry in report[:8])
        count = sum(1 for _ in model.modules())
        nothing = f"none of the {count} modules of {type(model).__name__} is attention by its class or name"
        warnings.warn(f"replace_attention changed nothing: {left or nothing}", stacklevel=2)
    return report


def _wanted(pattern: Pattern | str) -> Pattern | LearnedText:
    return LearnedText.parse(pattern) if LearnedText.matches(pattern) else as_pattern(pattern)  # pyrefly: ignore


def _attention_in(model: nn.Module) -> dict[str, nn.Module]:
    """Outermost modules of a known kind, and innermost others that are attention by the name of their class."""
    known: dict[str, nn.Module] = {}
    named: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if any(outer == "" or name.startswith(f"{outer}.") for outer in known):
            continue
        if _is_known(module):
            known[name] = module
        elif "attention" in type(module).__name__.lower():
            named[name] = module
    both = {**named, **known}
    around = {
        name for name in named for other in both if other != name and other.startswith(f"{name}." if name else "")
    }
    return {name: module for name, module in both.items() if name not in around}


def _is_known(module: nn.Module) -> bool:
    kinds = nn.MultiheadAttention, Planned
    return isinstance(module, kinds) or _is_hugging_face(module) or _has_fused_projection(module)


def _has_fused_projection(module: nn.Module) -> bool:
    """Whether a module has the parts of timm's `Attention`."""
    parts = (getattr(module, name, None) for name in ("qkv", "proj"))
    heads = getattr(module, "num_heads", None)
    return all(isinstance(part, nn.Linear) for part in parts) and isinstance(heads, int)


def _is_hugging_face(module: nn.Module) -> bool:
    return hasattr(module, "set_attn_implementation") and hasattr(module, "config")


def _why_not(
    model: nn.Module, name: str, module: nn.Module, wanted: Pattern | LearnedText, options: dict[str, Any]
) -> str | None:
    """Reason against replacing a module; None if it can be replaced."""
    kind, is_learned = type(module), isinstance(wanted, LearnedText)
    if is_learned and (reason := _why_not_learned(model, name, module)) is not None:
        return reason
    if isinstance(module, nn.MultiheadAttention):
        return why_not_replaced(module)
    own = (MultiheadSparseAttention, FusedProjectionAttention, *(LEARNABLE if is_learned else ()))
    if isinstance(module, Planned) and kind not in own:
        return f"{kind.__name__} is sparse attention of this library, with a pattern of its own"
    if options:
        return f"{kind.__name__} takes no options, got {', '.join(options)}"
    if isinstance(module, Planned) or _is_hugging_face(module):
        return None
    if not _has_fused_projection(module):
        known = "torch.nn.MultiheadAttention, timm's Attention and Hugging Face models are"
        return f"{kind.__name__} is not known here; {known}"
    extra = set(inspect.signature(module.forward).parameters) - TIMM_ARGUMENTS
    # timm from 1.0.30 on has a linear gate, or None in its place.
    positions = ("relative_position_bias_table", "rel_pos", "rope")
    extra |= {name for name in positions if getattr(module, name, None) is not None}
    extra |= set() if isinstance(getattr(module, "gate", None), nn.Linear | None) else {"gate"}
    return f"{kind.__name__} also computes with {', '.join(sorted(extra))}" if extra else None


LEARNABLE = (LayerAttention, MultiheadBlockSparseAdaptive)
"""Modules of this library whose place learned attention takes, besides those that take any pattern."""


def _why_not_learned(model: nn.Module, name: str, module: Any) -> str | None:
    """Reason against learned attention in the place of a module."""
    holder, _, last = name.rpartition(".")
    crosses = isinstance(model.get_submodule(holder), nn.TransformerDecoderLayer | DilatedTransformerLayer)
    if crosses and last == "multihead_attn":
        return "it attends to another sequence; learned attention selects blocks of its own sequence"
    if getattr(module, "bias_k", None) is not None or getattr(module, "add_zero_attn", False):
        return "learned attention selects blocks of its sequence, without the keys of add_bias_kv and add_zero_attn"
    if getattr(module, "sink", None) is not None:
        return "learned attention has no sink"
    if isinstance(getattr(module, "position", None), Alibi):
        return "learned attention has no ALiBi"
    width = getattr(module, "embed_dim", None)
    if width is not None and (module.kdim, module.vdim) != (width, width):
        return "its keys and values have other widths than its queries, so they are of another sequence"
    if getattr(module, "is_published", False):
        return "torchscale's attention follows a pattern"
    if isinstance(module, Planned) and _has_causal(getattr(module, "pattern", Full())):
        return f'its pattern "{module.pattern}" is causal; learned attention is causal by is_causal=True in the call'
    return None


def _has_causal(pattern: Pattern) -> bool:
    return isinstance(pattern, Causal) or any(_has_causal(child) for child in pattern.children)


def _made(module: Any, wanted: Pattern | LearnedText, options: dict[str, Any]) -> Any:
    if _is_hugging_face(module):
        return module
    if isinstance(wanted, LearnedText):
        if isinstance(module, MultiheadSparseAttention):
            return _made_learned(module, wanted)
        if isinstance(module, nn.MultiheadAttention):
            settings = {"adaptive_config": wanted.config, "block_size": wanted.block_size, **options}
            return widened(MultiheadBlockSparseAdaptive.from_torch(module, [1], [1], **settings))
        return FusedProjectionAttention(module, wanted)
    if isinstance(module, nn.MultiheadAttention):
        return MultiheadSparseAttention.from_torch(module, wanted, **options)
    learned = getattr(module, "core", None) is not None
    return module if isinstance(module, Planned) and not learned else FusedProjectionAttention(module, wanted)


def _made_learned(module: MultiheadSparseAttention, wanted: LearnedText) -> MultiheadBlockSparseAdaptive:
    """Learned attention around the submodules of a module, with its scorer if there is one that fits."""
    weight = module.out_proj.weight
    made = MultiheadBlockSparseAdaptive(
        module.embed_dim,
        module.num_heads,
        [1],
        [1],
        module.dropout,
        module.out_proj.bias is not None,
        wanted.config,
        block_size=wanted.block_size,
        num_kv_heads=module.num_kv_heads,
        batch_first=module.batch_first,
        position=module.position,
        backend=module.backend,
        memory_budget=module.memory_budget,
        device=weight.device,
        dtype=weight.dtype,
    )
    for part in ("q_proj", "k_proj", "v_proj", "norm", "out_proj"):
        setattr(made, part, getattr(module, part))
    if isinstance(module, LayerAttention | MultiheadBlockSparseAdaptive):
        made.ranks = module.ranks
    adopt_scorer(widened(made).core, getattr(module, "core", None))
    return made.train(module.training)


def _put(model: nn.Module, name: str, module: Any, made: Any, wanted: Pattern | LearnedText) -> None:
    if _is_hugging_face(module):
        integrate(module, str(wanted) if isinstance(wanted, LearnedText) else wanted)
    elif made is module:
        module.pattern = wanted
    else:
        holder, _, last = name.rpartition(".")
        setattr(model.get_submodule(holder), last, made)
