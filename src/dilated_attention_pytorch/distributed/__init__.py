"""Attention over a sequence that is spread over ranks."""

from .attention import context_parallel_attention, context_parallel_attention_with_lse
from .config import DistributedSparseConfig, NodeBounded
from .cost_model import Machine
from .exchange import ExchangePlan, Traffic
from .gradient_compression import BlockTopK, GradientBuckets, PowerSGD, TopK, compress_fsdp, ddp_hook
from .layout import SequenceLayout, shard_sequence, unshard_sequence
from .layout_choice import LayoutChoice, choose_layout
from .loss import context_parallel_loss, next_token_labels
from .receive_buffers import on_pressure, relieve
from .recovery import (
    LeftBehind,
    RankFault,
    RankLost,
    RankStalled,
    StepFailed,
    Survivors,
    attempt,
    faults,
    regroup,
    vote,
)
from .simulate import Forecast, dilated_request, explain_exchange, forecast_rank, traffic, virtual_attention
from .transport import least_free

__all__ = [
    "BlockTopK",
    "DistributedSparseConfig",
    "ExchangePlan",
    "Forecast",
    "GradientBuckets",
    "LayoutChoice",
    "LeftBehind",
    "Machine",
    "NodeBounded",
    "PowerSGD",
    "RankFault",
    "RankLost",
    "RankStalled",
    "SequenceLayout",
    "StepFailed",
    "Survivors",
    "TopK",
    "Traffic",
    "attempt",
    "choose_layout",
    "compress_fsdp",
    "context_parallel_attention",
    "context_parallel_attention_with_lse",
    "context_parallel_loss",
    "ddp_hook",
    "dilated_request",
    "explain_exchange",
    "faults",
    "forecast_rank",
    "least_free",
    "next_token_labels",
    "on_pressure",
    "regroup",
    "relieve",
    "shard_sequence",
    "traffic",
    "unshard_sequence",
    "virtual_attention",
    "vote",
]
