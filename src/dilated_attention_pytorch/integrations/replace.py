"""Sparse attention in the place of the attention that a model has."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import must
from ..nn.attention import Planned
from ..nn.multihead import MultiheadSparseAttention
from ..nn.projections import why_not_replaced
from ..ops import attention
from ..patterns import Pattern, as_pattern
from .huggingface import integrate

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
        pattern: which keys a query attends to.
    """

    def __init__(self, module: Any, pattern: Pattern) -> None:
        super().__init__()
        self.pattern = pattern
        self.num_heads: int = module.num_heads  # pyrefly: ignore[bad-override-mutable-attribute]
        self.head_dim = module.qkv.out_features // (3 * module.num_heads)
        self.scale = float(getattr(module, "scale", self.head_dim**-0.5))
        self.qkv, self.proj = module.qkv, module.proj
        self.q_norm, self.k_norm = _part(module, "q_norm"), _part(module, "k_norm")
        self.attn_drop, self.norm = _part(module, "attn_drop"), _part(module, "norm")
        self.proj_drop = _part(module, "proj_drop")
        self.gate: nn.Linear | None = getattr(module, "gate", None)
        self.train(module.training)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend: (B, N, C) to (B, N, C)."""
        if attn_mask is not None:
            raise must("attn_mask must be None", "a mask", "Intersect the pattern with Pattern.from_mask(mask).")
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        output = attention(
            self.q_norm(query),
            self.k_norm(key),
            value,
            self.pattern,
            is_causal=is_causal,
            scale=self.scale,
            dropout_p=getattr(self.attn_drop, "p", 0.0) if self.training else 0.0,
        )
        output = self.norm(output.transpose(1, 2).flatten(2))
        return self.proj_drop(self.proj(output if self.gate is None else output * self.gate(x).sigmoid()))

    def extra_repr(self) -> str:
        return f'{self.num_heads} heads of {self.head_dim}, "{self.pattern}"'


def _part(module: nn.Module, name: str) -> nn.Module:
    """Submodule of a name; the identity where releases of timm have none."""
    part = getattr(module, name, None)
    return nn.Identity() if part is None else part


def replace_attention(model: nn.Module, pattern: Pattern | str, **options: Any) -> list[Replacement]:
    """Give a model sparse attention with the weights it has.

    | attention | becomes |
    |---|---|
    | `torch.nn.MultiheadAttention` | `MultiheadSparseAttention` of the same weights |
    | timm's `Attention` (one `qkv` projection) | the same submodules around this library's attention |
    | a Hugging Face model | the same model by `integrate`, the pattern within its own masks |
    | modules replaced before | the same modules with this pattern |

    Frozen parameters stay frozen. Subclasses with a `forward` of their own are left in place. A `UserWarning` lists
    the modules and the reasons where nothing was replaced.

    Args:
        model: changed in place.
        pattern: which keys a query attends to.
        options: for `MultiheadSparseAttention.from_torch`; other kinds of attention take none.

    Returns:
        One entry for each module that is attention by its class or its name, with the reason where it was left.

    >>> model = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> for entry in replace_attention(model, "window:128"):
    ...     print(entry)
    Replacement(name='self_attn', replaced=True, why='window:128')
    """
    if isinstance(model, nn.MultiheadAttention) or (not isinstance(model, Planned) and _has_fused_projection(model)):
        raise must(
            "model must contain attention",
            "the attention module itself",
            "Use MultiheadSparseAttention.from_torch, or pass the module that holds it.",
        )
    pattern = as_pattern(pattern)
    found = _attention_in(model)
    reasons = {id(module): _why_not(module, options) for module in found.values()}
    # All are made before the first is put in place: a wrong option leaves the model as it was. A module in two places
    # stays one module.
    made = {
        id(module): _made(module, pattern, options)
        for module in dict.fromkeys(found.values())
        if reasons[id(module)] is None
    }
    report = []
    for name, module in found.items():
        reason = reasons[id(module)]
        if reason is None:
            _put(model, name, module, made[id(module)], pattern)
        report.append(Replacement(name, reason is None, str(pattern) if reason is None else reason))
    if not any(entry.replaced for entry in report):
        left = "; ".join(f"{entry.name or 'the model'}: {entry.why}" for entry in report[:8])
        count = sum(1 for _ in model.modules())
        nothing = f"none of the {count} modules of {type(model).__name__} is attention by its class or name"
        warnings.warn(f"replace_attention changed nothing: {left or nothing}", stacklevel=2)
    return report


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


def _why_not(module: nn.Module, options: dict[str, Any]) -> str | None:
    """Reason against replacing a module; None if it can be replaced."""
    kind = type(module)
    if isinstance(module, nn.MultiheadAttention):
        return why_not_replaced(module)
    if isinstance(module, Planned) and kind not in (MultiheadSparseAttention, FusedProjectionAttention):
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


def _made(module: Any, pattern: Pattern, options: dict[str, Any]) -> Any:
    if isinstance(module, nn.MultiheadAttention):
        return MultiheadSparseAttention.from_torch(module, pattern, **options)
    if _is_hugging_face(module):
        return module
    return module if isinstance(module, Planned) else FusedProjectionAttention(module, pattern)


def _put(model: nn.Module, name: str, module: Any, made: Any, pattern: Pattern) -> None:
    if _is_hugging_face(module):
        integrate(module, pattern)
    elif made is module:
        module.pattern = pattern
    else:
        holder, _, last = name.rpartition(".")
        setattr(model.get_submodule(holder), last, made)
