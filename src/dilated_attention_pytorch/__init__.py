"""Exact, fast, sparse attention for sequences of thousands to a billion tokens.

>>> import dilated_attention_pytorch as dap
>>> dap.make_plan(dap.parse("dilated:2048x1,8192x4 & causal"), n=65536, heads=8).blocks
160256
"""

from .errors import BackendUnsupported
from .kernels.registry import PREFERENCE
from .ops import AttentionOutput, attention, attention_rows, attention_with_lse, merge, plan_cache
from .patterns import (
    BlockDilated,
    BlockLists,
    Causal,
    Dilated,
    Documents,
    Full,
    Global,
    Hierarchical,
    Packed,
    Pattern,
    PerHead,
    Random,
    SlidingWindow,
    Strided,
    parse,
)
from .plan import Plan, PlanCache, make_plan

__version__ = "0.1.0"


def backends() -> tuple[str, ...]:
    """Names for `backend=`, in the order `backend="auto"` prefers them."""
    return PREFERENCE


__all__ = [
    "AttentionOutput",
    "BackendUnsupported",
    "BlockDilated",
    "BlockLists",
    "Causal",
    "Dilated",
    "Documents",
    "Full",
    "Global",
    "Hierarchical",
    "Packed",
    "Pattern",
    "PerHead",
    "Plan",
    "PlanCache",
    "Random",
    "SlidingWindow",
    "Strided",
    "attention",
    "attention_rows",
    "attention_with_lse",
    "backends",
    "make_plan",
    "merge",
    "parse",
    "plan_cache",
]
