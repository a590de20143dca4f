"""`BlockSparseAdaptive` between the projections of multi-head attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...errors import must
from ...ops.checks import check_dense
from ...patterns import Full
from ...plan import Plan
from ..block_sparse_config import SparsePatternConfig
from ..context_parallel import MultiheadOverRanks, Ranks
from ..kv_cache import KVCache, check_cache_type
from ..masks import ignored
from ..multihead import MultiheadSparseAttention
from ..positional import Alibi
from .config import AdaptiveConfig
from .module import BlockSparseAdaptive, LearnedPattern

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ...distributed import SequenceLayout


class MultiheadBlockSparseAdaptive(MultiheadOverRanks, MultiheadSparseAttention):
    """Multi-head attention on learned blocks: `BlockSparseAdaptive` between projections.

    Args:
        embed_dim: width of the model.
        num_heads: query heads.
        segment_lengths: see `BlockSparseAdaptive`, as `dilation_rates`, `adaptive_config`, `sparse_config` and
            `block_size`.
        dropout: see `MultiheadSparseAttention`, as `bias` and `options`.
        process_group: see `Ranks`, as `ring_size` and `layout`.

    >>> import torch
    >>> x = torch.randn(2, 200, 64)
    >>> MultiheadBlockSparseAdaptive(64, 4, [4096], [1], block_size=16)(x)[0].shape
    torch.Size([2, 200, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        adaptive_config: AdaptiveConfig | None = None,
        *,
        sparse_config: SparsePatternConfig | AdaptiveConfig | None = None,
        block_size: int | None = None,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        ring_size: int | None = None,
        layout: SequenceLayout | str = "contiguous",
        **options: Any,
    ) -> None:
        for name in ("a sink", "add_bias_kv", "add_zero_attn"):
            if options.get(name.removeprefix("a ")):
                raise must(f"learned attention must come without {name}", f"{name.removeprefix('a ')}=True")
        super().__init__(embed_dim, num_heads, Full(), dropout, bias, **options)
        if isinstance(self.position, Alibi):
            raise must("learned attention must come without ALiBi", "position='alibi'", "Use 'rotary' or 'xpos'.")
        self.core = BlockSparseAdaptive(
            segment_lengths,
            dilation_rates,
            num_heads,
            self.head_dim,
            adaptive_config,
            sparse_config=sparse_config,
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            attention_dropout=dropout,
            backend=self.backend,
            process_group=process_group,
            ring_size=ring_size,
            layout=layout,
            device=options.get("device"),
            dtype=options.get("dtype"),
        )

    @property
    def ranks(self) -> Ranks:  # pyrefly: ignore[bad-override]
        """Ranks of the sequence, shared with the core."""
        return self.core.ranks

    @ranks.setter
    def ranks(self, ranks: Ranks) -> None:
        self.core.ranks = ranks

    def forward(  # pyrefly: ignore[bad-override]
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: KVCache | None = None,
        return_pattern: bool = False,
    ) -> tuple[Tensor, LearnedPattern | None]:
        """Attend within one sequence; see `MultiheadSparseAttention`.

        The second result is a `LearnedPattern` with `return_pattern`, otherwise None; weights are never formed.
        """
        del average_attn_weights
        with nullcontext() if self.ranks.alone else self.ranks.call():
            if need_weights:
                advice = "return_pattern=True tells what was looked at."
                raise must("need_weights must be False: learned attention forms no weights", True, advice)
            check_cache_type(cache)
            self._check_call(need_weights, attn_mask, cache)
            if return_pattern and cache is not None:
                raise must("return_pattern must come with one whole sequence", "a cache")
            key = query if key is None else key
            value = key if value is None else value
            check_dense("query", query)
            if query.dim() != 3 or key.shape[:2] != query.shape[:2]:
                came = (tuple(query.shape), tuple(key.shape))
                raise must("query and key must have one shape (batch, n, width)", came)
            tensors = (query, key, value) if self.batch_first else (x.transpose(0, 1) for x in (query, key, value))
            q, k, v = self.project(*tensors)
            q, pattern, is_causal, bias = self._masked(q, k, attn_mask, is_causal)
            if pattern != Full() or bias is not None:
                raise must(
                    "attn_mask must be the causal mask or none", "another", "Use key_padding_mask, or is_causal."
                )
            if self.position is not None:
                self._check_position(is_causal, True)
                q, k = self.position.apply(q, k, self._positions(q, None, cache), self.head_dim**-0.5)
            padding = None if key_padding_mask is None else ignored("key_padding_mask", key_padding_mask)
            found: Any
            looked_at: LearnedPattern | None = None
            if cache is not None:
                self._check_cache(cache, key is query, is_causal, padding, attn_mask, None)
                if getattr(cache, "layer", None) is not self.core:
                    raise must("the cache must be made by this module", type(cache).__name__, "Use module.cache().")
                found = cache.attend(q, k, v).transpose(1, 2)
            else:
                heads = (x.transpose(1, 2) for x in (q, k, v))
                found = self.core(*heads, is_causal, return_pattern, key_padding_mask=padding)
            if return_pattern:
                found, looked_at = found
            output = self.finish(found.transpose(1, 2))
            return output if self.batch_first else output.transpose(0, 1), looked_at

    def plan(self, n: int, num_heads: int | None = None, is_causal: bool = False) -> Plan:
        """Raise: the blocks depend on the input."""
        return self.core.plan(n, num_heads, is_causal)

    def explain(self, n: int, is_causal: bool = False) -> str:  # pyrefly: ignore[bad-override]
        """Description of the blocks kept at a length."""
        return self.core.explain(n, is_causal)

    def cache(self, length: int | None = None) -> KVCache:
        """Empty cache for decoding: every step selects for its token as the whole computation does."""
        from .decoding import AdaptiveCache

        return AdaptiveCache(self.core, length)
