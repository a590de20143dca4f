"""The one differentiable operation."""

from .attention import attention, attention_with_lse, plan_cache
from .merge import AttentionOutput, merge
from .rows import attention_rows

__all__ = ["AttentionOutput", "attention", "attention_rows", "attention_with_lse", "merge", "plan_cache"]
