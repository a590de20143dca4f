"""Block-sparse attention as modules over (B, N, H, D)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import must, must_be
from ..ops import plan_cache
from ..patterns import BlockDilated, Hierarchical, Pattern
from ..patterns.base import integer
from ..plan import Plan
from .attention import SparseAttention
from .block_sparse_config import HierarchicalConfig, SparsePatternConfig
from .context_parallel import TakesRanks

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


def block_pattern(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    sparse_config: SparsePatternConfig | None,
    sparsity_ratio: float | None,
    block_size: int | None,
) -> Pattern:
    """The pattern of a block-sparse module; a ratio or block size of its own replaces the config's."""
    if sparse_config is None:
        size = 128 if block_size is None else block_size
        return BlockDilated(tuple(segment_lengths), tuple(dilation_rates), sparsity_ratio, block=size)
    if not isinstance(sparse_config, SparsePatternConfig):
        raise must_be("sparse_config must be a SparsePatternConfig", type(sparse_config).__name__)
    # Checked here because a pattern without segments does not read them.
    BlockDilated(tuple(segment_lengths), tuple(dilation_rates))
    if sparsity_ratio is not None:
        sparse_config = replace(sparse_config, sparsity_ratio=sparsity_ratio)
    if block_size is not None:
        sparse_config = replace(sparse_config, block_size=block_size)
    return sparse_config.pattern(segment_lengths, dilation_rates)


def segments_unused(sparse_config: SparsePatternConfig | None) -> list[str]:
    """A note where a module's segments do not show in its pattern."""
    if sparse_config is None or sparse_config.pattern_type == "dilated_sparse":
        return []
    return [f"a {sparse_config.pattern_type} pattern has no segments: they and the rates play no part"]


def _density_stats(plan: Plan) -> dict[str, Any]:
    return {"block_size": plan.block_size, "blocks": plan.blocks, "density": plan.density}


class BlockSparseRingDilatedAttention(TakesRanks, SparseAttention):
    """Block-sparse attention: one softmax per row over all kept blocks of the score matrix.

    Args:
        segment_lengths: tokens in a segment, one for each branch.
        dilation_rates: within a segment, a query block attends to every `rate`-th block counted from itself.
        sparse_config: pattern that replaces the segments; only its "dilated_sparse" uses segments and rates.
        sparsity_ratio: fraction of blocks kept (0.01 = 99 % sparse); all blocks of the branches if None.
        block_size: tokens in a block, 128 by default.
        process_group: ranks that hold the sequence together, see `Ranks`; each calls the module with its tokens and
            gets its rows.
        pattern_cache_size: number of plans from `plan` and `explain` that this module keeps.
        options: `softmax_scale`, `attention_dropout`, `sink`, `num_heads`, `backend`, `device`, `dtype`: see
            `SparseAttention`; `ring_size`, `layout` and `transfer`: see `Ranks`.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        sparse_config: SparsePatternConfig | None = None,
        sparsity_ratio: float | None = None,
        block_size: int | None = None,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        pattern_cache_size: int = 100,
        **options: Any,
    ) -> None:
        pattern = block_pattern(segment_lengths, dilation_rates, sparse_config, sparsity_ratio, block_size)
        super().__init__(pattern, process_group=process_group, **options)
        self.segment_lengths, self.dilation_rates = tuple(segment_lengths), tuple(dilation_rates)
        self.sparse_config = sparse_config
        self.pattern_cache_size = integer("pattern_cache_size", pattern_cache_size, 1)
        self._plans: OrderedDict[tuple[int, int | None, bool], Plan] = OrderedDict()

    def plan(self, n: int, num_heads: int | None = None, is_causal: bool = False) -> Plan:
        """Plan of this module at a length."""
        plan = self._plans.pop((n, num_heads, is_causal), None) or super().plan(n, num_heads, is_causal)
        self._plans[n, num_heads, is_causal] = plan
        while len(self._plans) > self.pattern_cache_size:
            self._plans.popitem(last=False)
        return plan

    def clear_pattern_cache(self) -> None:
        """Release the plans that this module keeps."""
        self._plans.clear()

    def get_pattern_stats(self, n: int | None = None, num_heads: int = 8, is_causal: bool = False) -> dict[str, Any]:
        """Pattern and cached plans of this module and of the process; with a length `n` also the density."""
        stats: dict[str, Any] = {"pattern": str(self.pattern)}
        if n is not None:
            stats |= _density_stats(self.plan(n, num_heads, is_causal))
        return stats | {"plans_held": len(self._plans), "plan_cache": plan_cache.info()._asdict()}

    def notes(self) -> list[str]:
        return [*segments_unused(self.sparse_config), *super().notes()]


class BlockSparseHierarchical(SparseAttention):
    """Hierarchical block-sparse attention: dense near the query, sparser with distance, no key block covered twice.

    Args:
        segment_lengths: reach of each level in tokens, ascending; ignored if `hierarchical_config` is given.
        dilation_rates: distance in blocks between the key blocks that a level keeps.
        hierarchical_config: explicit levels.
        block_size: tokens in a block, 128 by default; a config has its own.
        options: `softmax_scale`, `attention_dropout`, `sink`, `num_heads`, `backend`, `device`, `dtype`: see
            `SparseAttention`.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        hierarchical_config: HierarchicalConfig | None = None,
        *,
        block_size: int | None = None,
        **options: Any,
    ) -> None:
        # Checked here because the levels of a config do not read them.
        given = BlockDilated(tuple(segment_lengths), tuple(dilation_rates))
        if hierarchical_config is None:
            block = 128 if block_size is None else integer("block_size", block_size, 1)
            levels: dict[int, int] = {}
            for reach, rate in zip(given.segment_lengths, given.dilation_rates, strict=True):
                # A level that ends in the same block as the level before has no block of its own.
                levels.setdefault(-(-reach // block), rate)
            pattern: Pattern = Hierarchical(tuple(levels.items()), block=block)
        elif block_size not in (None, hierarchical_config.block_size):
            raise must(f"block_size must be that of the levels, {hierarchical_config.block_size}", block_size)
        else:
            pattern = hierarchical_config.pattern()
        super().__init__(pattern, **options)
        self.hierarchical_config = hierarchical_config

    def get_pattern_stats(self, n: int, num_heads: int = 8, is_causal: bool = False) -> dict[str, Any]:
        """Pattern and density at a length."""
        return {"pattern": str(self.pattern), **_density_stats(self.plan(n, num_heads, is_causal))}

    def visualize_pattern(self, n: int = 1024) -> str:
        """Picture of the plan."""
        return self.plan(n, 1).picture()

    def notes(self) -> list[str]:
        given = self.hierarchical_config is not None
        return ["the levels of hierarchical_config stand: segments and rates play no part"] if given else []


class BlockSparseTorchSparse(SparseAttention):
    """Raises on construction: torch.sparse has no block kernel for attention; its element kernels are far slower."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "BlockSparseTorchSparse does not exist because attention by torch.sparse takes 11 times as long as ours at "
            "8192 tokens and a tenth of the blocks on a CPU (benchmarks/results/torch_sparse.jsonl); use "
            "BlockSparseRingDilatedAttention, which takes the same arguments."
        )
