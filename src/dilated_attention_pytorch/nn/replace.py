"""Putting sparse attention into a model that has torch's own."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ..errors import must
from ..patterns import Pattern
from .multihead import MultiheadSparseAttention


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
    report = []
    made: dict[int, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, nn.MultiheadAttention):
            continue
        try:
            # A module that stands in two places stays one module.
            own = made.get(id(module)) or MultiheadSparseAttention.from_torch(module, pattern, **options)
        except ValueError as error:
            report.append(Replacement(name, False, str(error)))
            continue
        made[id(module)] = own
        holder, _, last = name.rpartition(".")
        setattr(model.get_submodule(holder), last, own)
        report.append(Replacement(name, True, str(own.pattern)))
    return report
