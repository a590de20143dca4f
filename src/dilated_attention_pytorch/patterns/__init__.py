"""Who may see whom."""

from .blocks import BlockDilated, BlockLists, BlockPattern, Hierarchical, Random
from .dilated import Branch, Dilated, Strided
from .local import Causal, Documents, Full, Global, SlidingWindow
from .packed import Packed
from .pattern import And, Or, Pattern, PerHead
from .text import as_pattern, parse

__all__ = [
    "And",
    "BlockDilated",
    "BlockLists",
    "BlockPattern",
    "Branch",
    "Causal",
    "Dilated",
    "Documents",
    "Full",
    "Global",
    "Hierarchical",
    "Or",
    "Packed",
    "Pattern",
    "PerHead",
    "Random",
    "SlidingWindow",
    "Strided",
    "as_pattern",
    "parse",
]
