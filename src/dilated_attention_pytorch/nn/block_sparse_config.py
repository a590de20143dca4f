"""Configuration of block-sparse patterns, validated at construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..compat import names_replacements
from ..errors import must, must_be
from ..patterns import BlockDilated, Global, Hierarchical, Pattern, Random, SlidingWindow

PatternType = Literal["local_window", "dilated_sparse", "global_local", "strided", "random", "hierarchical", "adaptive"]

WHOLE = 1 << 40
"""A segment that holds any sequence."""


@names_replacements
@dataclass(frozen=True, slots=True)
class SparsePatternConfig:
    """Blocks of a block-sparse module.

    >>> SparsePatternConfig("local_window", sparsity_ratio=0.05).pattern()
    block_dilated:1099511627776x1;sparsity_ratio=0.05
    """

    pattern_type: PatternType = "local_window"
    sparsity_ratio: float | None = None
    """Fraction of blocks kept, 0.01 = 99 % sparse. 0.1 unless `window_size` is given and so decides alone.

    Blocks of `global_tokens` are part of it, except in pattern_type random. A row keeps its own block in any case.
    """
    block_size: int = 128
    window_size: int | None = None
    """Tokens a local window spans, half before and half after; with a ratio too, both hold."""
    global_tokens: int = 0
    """First tokens that see all and are seen by all, in any pattern."""
    dilation_rates: tuple[int, ...] | None = None
    """Rates that replace those of the module, one for each of its segments."""
    seed: int = 0
    """Seed of random blocks."""

    def __post_init__(self) -> None:
        if self.pattern_type not in get_args(PatternType):
            raise must(f"pattern_type must be one of {', '.join(get_args(PatternType))}", repr(self.pattern_type))
        windowed = self.pattern_type in ("local_window", "global_local")
        if self.window_size is not None and not windowed:
            raise must("window_size must come with pattern_type local_window or global_local", self.pattern_type)
        if self.window_size is not None and self.window_size < 1:
            raise must("window_size must be >= 1", self.window_size)
        if self.pattern_type == "global_local" and self.global_tokens < 1:
            raise must("global_local must have global_tokens >= 1", self.global_tokens, "For example global_tokens=64.")
        if self.global_tokens < 0:
            raise must("global_tokens must be >= 0", self.global_tokens)
        if self.dilation_rates is not None:
            if self.pattern_type != "dilated_sparse":
                raise must("dilation_rates must come with pattern_type dilated_sparse", self.pattern_type)
            object.__setattr__(self, "dilation_rates", tuple(self.dilation_rates))
        if self.seed and self.pattern_type != "random":
            raise must("seed must come with pattern_type random", self.pattern_type)
        if self.sparsity_ratio is None and self.window_size is None:
            object.__setattr__(self, "sparsity_ratio", 0.1)
        if self.sparsity_ratio is not None and not 0 < self.sparsity_ratio <= 1:
            advice = "0.01 keeps 1 % of the blocks."
            raise must("sparsity_ratio must be a fraction of blocks kept, 0 < ratio <= 1", self.sparsity_ratio, advice)
        if self.block_size < 1:
            raise must("block_size must be >= 1", self.block_size)

    def pattern(self, segment_lengths: Sequence[int] = (WHOLE,), dilation_rates: Sequence[int] = (1,)) -> Pattern:
        """The pattern; segments and rates take part in `dilated_sparse` alone, the others have no segments."""
        pattern = self._base_pattern(tuple(segment_lengths), tuple(dilation_rates))
        return pattern | Global(self.global_tokens, queries=True) if self.global_tokens else pattern

    def _base_pattern(self, segments: tuple[int, ...], rates: tuple[int, ...]) -> Pattern:
        ratio, block = self.sparsity_ratio, self.block_size
        # Every row sees the global blocks, and as many rows again are whole.
        reserved = 0 if ratio is None else 2 * -(-self.global_tokens // block)
        if self.pattern_type == "dilated_sparse":
            return BlockDilated(segments, self.dilation_rates or rates, ratio, reserved, block=block)
        if self.window_size is not None:
            window = SlidingWindow(self.window_size // 2)
            return window if ratio is None else BlockDilated((WHOLE,), (1,), ratio, reserved, block=block) & window
        assert ratio is not None
        match self.pattern_type:
            case "local_window" | "global_local":
                return BlockDilated((WHOLE,), (1,), ratio, reserved, block=block)
            case "strided":
                return BlockDilated((WHOLE,), (int(1 / ratio),), ratio, reserved, block=block)
            case "random":
                # A row always sees its own block, or a causal row early in the sequence might see nothing.
                return Random(ratio, self.seed, block=block) | Hierarchical(((1, 1),), block=block)
            case "hierarchical":
                return BlockDilated((8 * block,), (1,), ratio, reserved, block=block)
        raise must(
            "pattern_type must be one that positions alone decide",
            "adaptive",
            "Use BlockSparseAdaptive, which scores blocks by their content.",
        )


LEVELS = (
    {"stride": 64, "window_size": 256, "block_size": 64},
    {"stride": 256, "window_size": 1024, "block_size": 64},
    {"stride": 1024, "window_size": -1, "block_size": 64},
)


@dataclass(frozen=True, slots=True)
class HierarchicalConfig:
    """Levels of distance from a query: near levels are dense, far levels keep every `stride` tokens.

    >>> HierarchicalConfig().pattern()
    hierarchical:4x1,16x4,0x16;block=64
    """

    level_configs: Sequence[Mapping[str, int]] = LEVELS
    """For each level: `stride` and `window_size` in tokens (-1, for the last: to the end), and `block_size`."""

    def __post_init__(self) -> None:
        if not self.level_configs:
            raise must("level_configs must name at least one level", "none")
        for level in self.level_configs:
            if set(level) != {"stride", "window_size", "block_size"}:
                raise must_be("a level must have stride, window_size and block_size", sorted(level))
        sizes = {level["block_size"] for level in self.level_configs}
        if len(sizes) > 1:
            raise must("levels must share one block_size", sorted(sizes), "A coarse level is one with a larger stride.")
        block = self.block_size
        for level in self.level_configs:
            if level["stride"] % block or level["stride"] < 1:
                raise must(f"stride must be a multiple of the block size {block}", level["stride"])
            if level["window_size"] != -1 and (level["window_size"] % block or level["window_size"] < 1):
                raise must(f"window_size must be -1 or a multiple of the block size {block}", level["window_size"])

    @property
    def block_size(self) -> int:
        return self.level_configs[0]["block_size"]

    @property
    def num_levels(self) -> int:
        return len(self.level_configs)

    def pattern(self) -> Pattern:
        """The pattern of these levels."""
        block = self.block_size
        levels = tuple(
            (max(level["window_size"], 0) // block, level["stride"] // block) for level in self.level_configs
        )
        return Hierarchical(levels, block=block)
