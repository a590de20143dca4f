"""Configuration of distributed modules: densities by distance, gradients, memory, recovery."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn

from ..compat import names_replacements
from ..errors import must
from ..patterns import BlockColumns, BlockDilated, Documents, Pattern
from ..patterns.base import integer
from ..patterns.dilated import check_branches
from .gradient_compression import BlockTopK, Compression, GradientBuckets, TopK
from .layout import SequenceLayout

PatternType = Literal["hierarchical", "node_local", "dilated_sparse"]
CompressionType = Literal["block_topk", "topk"]

LOCAL, GLOBAL, INTER_NODE = 0.4, 0.1, 0.05
"""Default densities of the levels."""


@dataclass(frozen=True, slots=True, repr=False)
class NodeBounded(Pattern):
    """Density by the place of the keys: on the query's rank, on its node, on another node.

    | keys | kept |
    |---|---|
    | of the query's rank | the blocks that segments and rates offer, nearest first, up to `local` of the rank's |
    | of its node | every 1 / `node`-th block, the same ones for every query |
    | of other nodes | every 1 / `far`-th block, the same ones for every query |

    Because all queries share their far blocks, a rank fetches at most `far` of the sequence from other nodes, whatever
    the number of its queries. One softmax runs over all levels. `resolve` expresses the pattern by other patterns.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    local: float = LOCAL
    node: float = GLOBAL
    far: float = INTER_NODE
    world: int = field(default=1, kw_only=True)
    """Ranks, with equal shards unless `lengths` is given."""
    ranks_per_node: int = field(default=1, kw_only=True)
    block: int = field(default=128, kw_only=True)
    lengths: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Tokens of each rank."""

    def __post_init__(self) -> None:
        check_branches(self)
        for name in ("world", "ranks_per_node", "block"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        for name in ("local", "node", "far"):
            value = getattr(self, name)
            if not 0 <= value <= 1 or (name == "local" and not value):
                raise must(f"{name} must be a fraction of blocks kept", value, "0.01 keeps 1 % of the blocks.")

    def resolve(self, n: int, heads: int) -> Pattern:
        return self.written(n).resolve(n, heads)

    def written(self, n: int) -> Pattern:
        """The pattern at a length, expressed by other patterns."""
        lengths = self.lengths or SequenceLayout.contiguous(n, self.world).lengths
        if sum(lengths) != n:
            raise must(f"lengths of the ranks must add up to the sequence length {n}", sum(lengths))
        share = self.local * max(lengths) / n
        kept: Pattern = BlockDilated(self.segment_lengths, self.dilation_rates, share, block=self.block)
        nodes = [sum(lengths[at : at + self.ranks_per_node]) for at in range(0, len(lengths), self.ranks_per_node)]
        if len(lengths) > 1:
            kept = kept & _shares(lengths)
            near = self._columns(n, self.node)
            kept = kept if near is None or self.ranks_per_node == 1 else kept | (near & _shares(nodes))
        far = self._columns(n, self.far) if len(nodes) > 1 else None
        return kept if far is None else kept | far

    def _columns(self, n: int, density: float) -> Pattern | None:
        """Evenly spread key blocks that every query sees, `density` of all blocks, rounded down."""
        count = int(density * -(-n // self.block))
        return BlockColumns(count, block=self.block) if count else None

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        raise must("this pattern must know the length", "none", "Call pattern.resolve(n, heads) first.")

    def describe(self) -> str:
        body = ",".join(f"{w}x{r}" for w, r in zip(self.segment_lengths, self.dilation_rates, strict=True))
        levels = f"local={self.local:g};node={self.node:g};far={self.far:g}"
        ranks = f"world={self.world};ranks_per_node={self.ranks_per_node};block={self.block}"
        return f"node_bounded:{body};{levels};{ranks}"


def _shares(lengths: Sequence[int]) -> Pattern:
    return Documents(tuple(length for length in lengths if length))


@names_replacements
@dataclass(frozen=True, slots=True)
class DistributedSparseConfig:
    """Configuration of `BlockSparseRingDistributedDilatedAttention`. Densities are fractions of blocks kept.

    >>> DistributedSparseConfig(inter_node_sparsity=0.01).pattern([2048], [1], world=16)
    node_bounded:2048x1;local=0.4;node=0.1;far=0.01;world=16;ranks_per_node=16;block=128
    """

    pattern_type: PatternType = "hierarchical"
    """"hierarchical" for `NodeBounded`, "node_local" for that without other nodes, "dilated_sparse" for the segments
    and rates alone, within `sparsity_ratio` and without a bound on what is fetched."""
    sparsity_ratio: float | None = None
    """Fraction of blocks kept; in a hierarchy, of each level that is not given its own."""
    block_size: int = 128
    local_sparsity: float | None = None
    """Fraction kept of the blocks on the query's own rank; 0.4 by default."""
    global_sparsity: float | None = None
    """Fraction kept of the blocks on its node; 0.1 by default."""
    inter_node_sparsity: float | None = None
    """Fraction kept of the blocks on other nodes, and so a bound on what is fetched from there; 0.05 by default."""
    node_size: int | None = None
    """Ranks on a node; by default the number that torchrun started there, or all ranks."""
    gradient_compression_ratio: float | None = None
    """Fraction of the gradients that `gradient_buckets` sends; all of them if None."""
    gradient_compression: CompressionType = "block_topk"
    gradient_bucket_size_mb: float = 25.0
    gradient_bucket_count: int = 32
    enable_memory_optimization: bool = True
    """Compare the free memory of all ranks before an exchange, and split it if a rank has too little."""
    enable_error_recovery: bool = True
    """Raise typed errors for faults on every rank, and compute again in smaller parts if memory ran out on one."""

    def __post_init__(self) -> None:
        for name, known in (("pattern_type", PatternType), ("gradient_compression", CompressionType)):
            if getattr(self, name) not in get_args(known):
                raise must(f"{name} must be one of {', '.join(get_args(known))}", repr(getattr(self, name)))
        levels = {
            "hierarchical": ("local_sparsity", "global_sparsity", "inter_node_sparsity"),
            "node_local": ("local_sparsity", "global_sparsity"),
            "dilated_sparse": (),
        }[self.pattern_type]
        for name in ("local_sparsity", "global_sparsity", "inter_node_sparsity", "sparsity_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise must(f"{name} must be a fraction of blocks kept, 0 < {name} <= 1", value, "0.01 keeps 1 %.")
            if value is not None and name != "sparsity_ratio" and name not in levels:
                raise must(f"{name} must come with a pattern_type that has it", self.pattern_type)
        if levels and self.sparsity_ratio is not None and all(getattr(self, name) is not None for name in levels):
            raise must("sparsity_ratio must leave a level to decide", f"all of {', '.join(levels)} as well")
        if self.node_size is not None and self.pattern_type == "dilated_sparse":
            raise must("node_size must come with a pattern_type that has nodes", self.pattern_type)
        if self.gradient_compression != "block_topk" and self.gradient_compression_ratio is None:
            raise must("gradient_compression must come with gradient_compression_ratio", "none")
        # Checked here, not at the first gradients.
        self.compression()
        GradientBuckets([nn.Parameter()], size_mb=self.gradient_bucket_size_mb, count=self.gradient_bucket_count)
        integer("block_size", self.block_size, 1)
        if self.node_size is not None:
            integer("node_size", self.node_size, 1)

    def pattern(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        world: int = 1,
        members: Sequence[int] | None = None,
    ) -> Pattern:
        """The pattern over `world` ranks, which are `members` among all that torchrun started; the first if None."""
        segments, rates = tuple(segment_lengths), tuple(dilation_rates)
        if self.pattern_type == "dilated_sparse":
            return BlockDilated(segments, rates, self.sparsity_ratio, block=self.block_size)
        local, node, far = (
            given if given is not None else self.sparsity_ratio or usual
            for given, usual in (
                (self.local_sparsity, LOCAL),
                (self.global_sparsity, GLOBAL),
                (self.inter_node_sparsity, INTER_NODE),
            )
        )
        return NodeBounded(
            segments,
            rates,
            local,
            node,
            far if self.pattern_type == "hierarchical" else 0.0,
            world=world,
            ranks_per_node=min(self.node_size or _on_a_node(range(world) if members is None else members), world),
            block=self.block_size,
        )

    def compression(self, group: dist.ProcessGroup | None = None) -> Compression | None:
        """Configured compression of gradients, for example for `compress_fsdp`; None if there is none."""
        if self.gradient_compression_ratio is None:
            return None
        kind = BlockTopK if self.gradient_compression == "block_topk" else TopK
        return kind(self.gradient_compression_ratio, group=group)

    def gradient_buckets(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None
    ) -> GradientBuckets:
        """Buckets that average gradients over the group as configured.

        Call `synchronize` after `backward`, or `ddp.register_comm_hook(config.gradient_buckets(ddp.parameters()),
        ddp_hook)` under DDP.
        """
        return GradientBuckets(
            parameters,
            self.compression(group),
            group=group,
            size_mb=self.gradient_bucket_size_mb,
            count=self.gradient_bucket_count,
        )


def _on_a_node(members: Sequence[int]) -> int:
    """Number of these ranks, in this order, on one node."""
    started = int(os.environ.get("LOCAL_WORLD_SIZE", max(members) + 1))
    runs = [len(list(run)) for _, run in groupby(rank // started for rank in members)]
    if any(run != runs[0] for run in runs[:-1]) or runs[-1] > runs[0]:
        advice = "Give node_size, or make the group of ranks that follow one another."
        raise must("every node must hold the same number of ranks of the group", runs, advice)
    return runs[0]


def with_lengths(pattern: Pattern, layout: SequenceLayout) -> Pattern:
    """A `NodeBounded` pattern for the ranks of a layout; any other as it is."""
    if not isinstance(pattern, NodeBounded):
        return pattern
    if list(layout.ranks) != sorted(layout.ranks):
        raise must("a pattern bounded by nodes needs contiguous shards in order", "a zigzag or an owner map")
    return replace(pattern, lengths=layout.lengths)
