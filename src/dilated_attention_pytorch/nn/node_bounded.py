"""Block-sparse attention with densities by the distance between the machines of query and key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ..errors import must
from ..patterns import Pattern
from .context_parallel import MultiheadOverRanks, TakesRanks
from .kv_cache import KVCache
from .multihead import MultiheadSparseAttention

if TYPE_CHECKING:
    from ..distributed.config import DistributedSparseConfig
    from ..distributed.gradient_compression import GradientBuckets


class BlockSparseRingDistributedDilatedAttention(TakesRanks, MultiheadOverRanks, MultiheadSparseAttention):
    """Multi-head attention over ranks and nodes, dense near and sparse far.

    Args:
        embed_dim: width of the model.
        num_heads: query heads.
        segment_lengths: blocks of its own rank that a query may keep, see `BlockDilated`, as for `dilation_rates`.
        distributed_config: densities by distance, gradients, memory, recovery.
        options: `dropout`, `bias`, `layer_norm`, `num_kv_heads`, `position` and the rest of `MultiheadSparseAttention`;
            `process_group`, `ring_size`, `layout` and `transfer`: see `Ranks`.

    >>> import torch
    >>> module = BlockSparseRingDistributedDilatedAttention(64, 4, [256], [1])
    >>> module(torch.randn(1, 300, 64))[0].shape
    torch.Size([1, 300, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        distributed_config: DistributedSparseConfig | None = None,
        **options: Any,
    ) -> None:
        from ..distributed.config import DistributedSparseConfig

        config = DistributedSparseConfig() if distributed_config is None else distributed_config
        super().__init__(embed_dim, num_heads, config.pattern(segment_lengths, dilation_rates), **options)
        self.segment_lengths, self.dilation_rates = tuple(segment_lengths), tuple(dilation_rates)
        self.distributed_config = config
        self.pattern = self._pattern()
        self._halvings = 0

    def _regrouped(self) -> None:
        # The pattern depends on the nodes and the shards.
        self.pattern = self._pattern()

    def _pattern(self) -> Pattern:
        members = None if self.ranks.group is None else dist.get_process_group_ranks(self.ranks.group)
        return self.distributed_config.pattern(self.segment_lengths, self.dilation_rates, self.ranks.world, members)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Attend as on one device; tensors hold this rank's tokens."""
        self.ranks.check()
        if self.ranks.alone:
            return super().forward(*args, **kwargs)
        from ..distributed.receive_buffers import free_on, shared_arenas
        from ..distributed.recovery import faults, voters_of

        config = self.distributed_config
        if config.enable_error_recovery:
            # Created before a rank can fail: creation is collective.
            voters_of(self.ranks.group)
        self.ranks.meter = partial(free_on, self.default_device()) if config.enable_memory_optimization else None
        with (
            faults() if config.enable_error_recovery else nullcontext(),
            shared_arenas.lent() if config.enable_memory_optimization else nullcontext(),
        ):
            return super().forward(*args, **kwargs)

    def _operation(self, n: int, keys: int, with_lse: bool = False) -> Callable[..., Any]:
        attend = super()._operation(n, keys, with_lse)
        if self.ranks.alone:
            return lambda q, k, v, pattern, **options: attend(q, k, v, pattern.resolve(n, self.num_heads), **options)
        return partial(self._attend_together, attend)

    def _attend_together(
        self,
        attend: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern,
        **settings: Any,
    ) -> Any:
        from ..distributed.config import with_lengths
        from ..distributed.recovery import attempt

        layout = self.ranks.layout_of(query.shape[2])
        resolved = with_lengths(pattern, layout).resolve(layout.n, self.num_heads)
        batch, key_heads, _, width = key.shape
        row = batch * key_heads * (width + value.shape[3]) * key.element_size()
        remote = (layout.n - min(layout.lengths)) * row

        def step() -> Any:
            return attend(query, key, value, resolved, receive_budget=self._receive_budget(remote), **settings)

        if not self.distributed_config.enable_error_recovery:
            return step()
        return attempt(step, self.ranks.group, lighten=self._lighten)

    def _receive_budget(self, remote: int) -> int | None:
        """Bytes to fetch at a time, the same on every rank; None for all that is needed of the `remote` ones."""
        from ..distributed.receive_buffers import FRACTION

        budget, free = self.ranks.transfer.get("receive_budget"), self.ranks.least_free
        most = budget if budget is not None else remote if free is None else min(remote, int(FRACTION * free))
        if not self._halvings and most in (budget, remote):
            return budget
        # A power of two, so that plans stay the same while free memory varies.
        return max(1, 1 << max(0, (most >> self._halvings).bit_length() - 1))

    def _lighten(self) -> bool:
        """Fetch half as much at a time from now on."""
        from ..distributed.receive_buffers import relieve

        relieve()
        self._halvings += 1
        return True

    def cache(self, length: int | None = None) -> KVCache:
        """Empty cache for decoding, if the pattern depends only on positions; see `KVCache` for `length`."""
        if self.distributed_config.pattern_type != "dilated_sparse":
            advice = 'Use pattern_type="dilated_sparse", or BlockSparseRingMultiheadDilatedAttention.'
            raise must("a cache must come with a pattern that knows no ranks", self.pattern, advice)
        return super().cache(length)

    def gradient_buckets(self, parameters: Any = None) -> GradientBuckets:
        """Buckets that average gradients over the ranks as configured; of this module if no parameters are given.

        Call its `synchronize` after `backward`. Under DDP register `distributed_config.gradient_buckets` with
        `ddp_hook` instead.
        """
        given = self.parameters() if parameters is None else parameters
        return self.distributed_config.gradient_buckets(given, self.ranks.group)
