"""Patterns: which keys a query attends to."""

from .base import And, Or, Pattern, PerHead
from .blocks import BlockColumns, BlockDilated, BlockLists, BlockPattern, Hierarchical, Random
from .dilated import Branch, Dilated, Strided
from .functions import MaskMod as MaskMod
from .grid import Grid
from .packed import Packed
from .parse import as_pattern, parse, register_pattern
from .positions import Causal, Documents, Full, Global, SlidingWindow

__all__ = [
    "And",
    "BlockColumns",
    "BlockDilated",
    "BlockLists",
    "BlockPattern",
    "Branch",
    "Causal",
    "Dilated",
    "Documents",
    "Full",
    "Global",
    "Grid",
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
    "register_pattern",
]
