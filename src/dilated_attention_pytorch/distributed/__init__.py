"""Attention over a sequence that is spread over ranks."""

from .comm import ExchangePlan, Traffic
from .ring import context_parallel_attention, context_parallel_attention_with_lse
from .shard import SequenceLayout, shard_sequence, unshard_sequence
from .simulate import dilated_request, traffic, virtual_attention

__all__ = [
    "ExchangePlan",
    "SequenceLayout",
    "Traffic",
    "context_parallel_attention",
    "context_parallel_attention_with_lse",
    "dilated_request",
    "shard_sequence",
    "traffic",
    "unshard_sequence",
    "virtual_attention",
]
