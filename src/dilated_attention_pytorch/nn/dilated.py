"""LongNet's dilated attention as modules over (B, N, H, D)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import must
from ..patterns import Dilated
from .attention import SparseAttention


class DilatedAttention(SparseAttention):
    """Dilated attention: in every segment, sampled tokens, `rate` apart, attend to each other.

    Args:
        segment_lengths: tokens in a segment, one for each branch.
        dilation_rates: distance between sampled tokens, one for each branch.
        softmax_scale: factor on the scores; 1 / sqrt(D) by default.
        attention_dropout: probability of dropping a weight during training; `dropout` is an alias.
        offset: residue that a head samples, see `Dilated`, as for `heads` and `overlap`.
        factory_options: `sink`, `num_heads`, `backend`, `memory_budget`, `device`, `dtype`: see `SparseAttention`.

    Any length is allowed; it need not be a multiple of a segment.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        dropout: float | None = None,
        offset: str = "mod",
        heads: str = "all",
        overlap: str = "count",
        **factory_options: Any,
    ) -> None:
        if dropout is not None and attention_dropout:
            raise must("dropout must be given once", f"attention_dropout={attention_dropout}, dropout={dropout}")
        pattern = Dilated(segment_lengths, dilation_rates, offset, overlap, heads)  # pyrefly: ignore[bad-argument-type]
        super().__init__(pattern, softmax_scale, attention_dropout if dropout is None else dropout, **factory_options)
        self.segment_lengths, self.dilation_rates = pattern.segment_lengths, pattern.dilation_rates
