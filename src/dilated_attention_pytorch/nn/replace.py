"""Putting sparse attention into a model that has torch's own."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ..errors import must
from ..patterns import Pattern, as_pattern
from .multihead import MultiheadSparseAttention
from .projections import has_keys_of_its_own


class Replacement(NamedTuple):
    """What `replace_attention` did with one module."""

    name: str
    """Where it stands in the model."""
    replaced: bool
    why: str
    """What it became, or why it was left alone."""


def replace_attention(model: nn.Module, pattern: Pattern | str, **options: Any) -> list[Replacement]:
    """Put `MultiheadSparseAttention` with the same weights in the place of every `torch.nn.MultiheadAttention`.

    Args:
        model: changed in place.
        pattern: who may see whom.
        options: for `MultiheadSparseAttention.from_torch`.

    Returns:
        One entry for each module found; those that cannot be replaced are left, and say why.

    >>> model = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> for entry in replace_attention(model, "window:128"):
    ...     print(entry)
    Replacement(name='self_attn', replaced=True, why='window:128')
    """
    if isinstance(model, nn.MultiheadAttention):
        raise must(
            "model must contain attention",
            "the attention module itself",
            "Use MultiheadSparseAttention.from_torch.",
        )
    pattern = as_pattern(pattern)
    modules = model.named_modules(remove_duplicate=False)
    found = {name: module for name, module in modules if isinstance(module, nn.MultiheadAttention)}
    # All are made before the first is put in place: a wrong option leaves the model as it was. One that stands in two
    # places stays one module.
    made = {
        id(module): MultiheadSparseAttention.from_torch(module, pattern, **options)
        for module in dict.fromkeys(found.values())
        if not has_keys_of_its_own(module)
    }
    report = []
    for name, module in found.items():
        if id(module) not in made:
            report.append(Replacement(name, False, "no pattern speaks of the keys of add_bias_kv and add_zero_attn"))
            continue
        holder, _, last = name.rpartition(".")
        setattr(model.get_submodule(holder), last, made[id(module)])
        report.append(Replacement(name, True, str(pattern)))
    return report
