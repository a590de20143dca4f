"""Values that the steps of learned attention exchange.

Shapes: b batch, h heads, s lists of a row (h, unless heads share them), n tokens, t blocks of a sample, r rows (t query
blocks or n tokens), k listed blocks, u sub-blocks of a block, d width, m hidden units, p rank of the match, B block
size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..plan.cache import TensorMemo
from ..plan.plan import Plan, rebuild

if TYPE_CHECKING:
    from .rank import Budget


class SelectionSettings(NamedTuple):
    """Settings of scoring and ranking."""

    budget: Budget
    block_size: int
    score_unit: int
    """Tokens of a sub-block."""
    is_causal: bool
    per_token: bool
    """Rows are tokens; otherwise blocks of queries."""
    row_unit: int
    """Tokens of a scored row: 1 where tokens select; a block of queries selects by all of its scored rows."""
    local_blocks: int
    sink_blocks: int


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """Key blocks of each row: the row's own, near and first blocks, and the blocks listed for it.

    `make_selection` makes one from index tensors. The fields are not checked: kernels rely on them.
    """

    indices: Tensor
    """int32 (b, s, r, k): block numbers, ascending; entries past the row's count are t"""
    counts: Tensor
    """int32 (b, s, r)"""
    n: int
    block_size: int
    is_causal: bool
    per_token: bool
    """Rows are tokens; otherwise blocks of queries."""
    local_blocks: int
    """Every row sees blocks nearer than this; 1 is the row's own block, 0 no block."""
    sink_blocks: int
    """Number of first blocks that every row sees."""
    sharing_rows: Tensor | None = None
    """bool (b, s, r): rows that see their own block, if `local_blocks` is 1, `sink_blocks` is 0 and not all rows do"""
    bounds: Tensor | None = None
    """int64 (n, 2): first key and end of the keys that each token may see in its blocks, both ascending with the token.

    Given for packed documents of a batch of one, without shared blocks and without `is_causal`, which they contain."""
    group: int = 1
    """Query heads that share each of the s lists of a row"""
    memo: TensorMemo | None = field(default=None, init=False, repr=False)
    """Not part of copies and pickles; None if nothing is cached, see `with_memo`"""

    __reduce__ = rebuild

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.indices.shape[1] * self.group

    @property
    def blocks(self) -> int:
        return -(-self.n // self.block_size)

    def list_of(self, rows: Tensor, row_tokens: int | None) -> Tensor:
        """Rows of `indices` that list the blocks of distilled rows (r); see `DistillBatch.row_tokens`."""
        return rows if self.per_token or not row_tokens else rows * row_tokens // self.block_size

    def row_blocks(self) -> Tensor:
        """Block of each row, int64 (r)."""
        rows = torch.arange(self.indices.shape[2], device=self.indices.device)
        return rows // self.block_size if self.per_token else rows

    def shared(self) -> Tensor:
        """Blocks that a query block sees without listing them, bool (t, t)."""
        own = torch.arange(self.blocks, device=self.indices.device)
        return shared_blocks(own, self.blocks, self.local_blocks, self.sink_blocks, self.is_causal)

    def allowed(self) -> Tensor:
        """Blocks that each row sees, bool (b, s, r, t)."""
        listed = torch.zeros(*self.indices.shape[:3], self.blocks + 1, dtype=torch.bool, device=self.indices.device)
        listed.scatter_(-1, self.indices.long(), True)
        shared = self.shared()[self.row_blocks()]
        return listed[..., :-1] | (shared if self.sharing_rows is None else shared & self.sharing_rows[..., None])

    def per_head(self) -> Selection:
        """The selection with a list for every query head."""
        if self.group == 1:
            return self
        lists, counts = (x.repeat_interleave(self.group, 1) for x in (self.indices, self.counts))
        return replace(self, indices=lists, counts=counts, group=1, sharing_rows=self.sharing_heads())

    def sharing_heads(self) -> Tensor | None:
        """`sharing_rows` of every query head."""
        rows = self.sharing_rows
        return rows if rows is None or self.group == 1 else rows.repeat_interleave(self.group, 1)

    def without_lists(self) -> Selection:
        """The selection without its lists: enough for `density`, in far less memory."""
        return replace(self, indices=self.counts[..., None][..., :0])

    def density(self) -> Tensor:
        """Blocks seen over blocks that dense attention sees, a scalar tensor."""
        batch, heads, rows, _ = self.indices.shape
        by_row = self.block_size if self.per_token else 1
        near = self.local_blocks, self.sink_blocks
        shared, dense = _count_shared(rows, by_row, self.blocks, *near, self.is_causal)
        if self.sharing_rows is not None:
            shared = self.sharing_rows.sum(dtype=torch.float64) / (batch * heads)
        return (self.counts.sum(dtype=torch.float64) / (batch * heads) + shared) / dense


def with_memo(selection: Selection) -> Selection:
    """A new selection with a cache, unless changes of its lists cannot be noticed.

    A CUDA graph writes lists that it has captured whenever it is replayed, and inference tensors have no version.
    """
    lists = selection.indices, selection.sharing_rows, selection.bounds
    tensors = [x for x in lists if x is not None]
    captured = selection.indices.is_cuda and torch.cuda.is_current_stream_capturing()
    if not captured and not any(x.is_inference() for x in tensors):
        object.__setattr__(selection, "memo", TensorMemo(*tensors))
    return selection


@lru_cache(maxsize=256)
def _count_shared(rows: int, by_row: int, blocks: int, local: int, sink: int, is_causal: bool) -> tuple[int, int]:
    """Blocks that all rows see without listing them, and that dense attention sees; `by_row` rows share a block."""
    shared = dense = 0
    for own in range(blocks):
        many = min(by_row, rows - own * by_row)
        seen = min(own, local - 1) + 1 + min(max(own - local + 1, 0), sink)
        if not is_causal:
            seen += max(min(blocks - 1 - own, local - 1), 0) + max(min(sink, blocks) - own - max(local, 1), 0)
        shared += many * seen
        dense += many * (own + 1 if is_causal else blocks)
    return shared, dense


def shared_blocks(own: Tensor, blocks: int, local: int, sink: int, is_causal: bool) -> Tensor:
    """Blocks that rows in the blocks `own` see without listing them, bool (r, t)."""
    column = torch.arange(blocks, device=own.device)
    seen = ((own[:, None] - column).abs() < local) | (column < sink)
    return seen & (column <= own[:, None]) if is_causal else seen


class GatherIndex(NamedTuple):
    """Inverted selection: queries grouped by the key block they chose, in tiles of B rows.

    A tile of queries reads one key tile. Key tiles and tokens are numbered over all samples. All tensors are int64, or
    all int32.
    """

    source: Tensor
    """(h, rows): token copied to each row; -1 for filler, undefined in tiles of filler alone"""
    place: Tensor
    """(h, b * n, k): row of each listed choice; `rows` past the count"""
    tile: Tensor
    """(h, rows / B): key tile of each query tile; b * t for tiles of filler alone"""
    first: Tensor
    """(h, b * t + 1): first query tile of each key tile, and the end of the last one"""
    order: Tensor
    """(g, b * t): key tiles of each key head in starting order, most query tiles first"""


@dataclass(frozen=True, eq=False, slots=True)
class Gathered:
    """Gathered queries as a plan."""

    plan: Plan
    """For (1, h, rows, d) gathered queries on (1, h, b * n, d) keys"""
    source: Tensor
    """See `GatherIndex`, also for `place`; (s, ...) for lists that query heads share"""
    place: Tensor


class Factors(NamedTuple):
    """Scores in factored form: w . relu(rows + columns) + bias, plus the best match of a query with a sub-block.

    m or p may be 0. Tensors are float32, except queries, parameters and masks.
    """

    rows: Tensor
    """(b, h, t, m): by query block"""
    columns: Tensor
    """(b, h, t, m)"""
    weight: Tensor
    """(h, m)"""
    bias: Tensor
    """(h)"""
    own: Tensor
    """(b, h, r, d): queries of scored rows; without `project` the query side of the match, (b, h, r, p)"""
    project: Tensor | None
    """(h, d, p): projection of `own` to the query side of the match; None for lists that heads share"""
    right: Tensor
    """(b, h, t, u, p): key side of the match"""
    log_temperature: Tensor
    """(h): scores are divided by its exponential, at least `coldest`"""
    coldest: float
    keep: Tensor | None = None
    """(b, h, t, m): dropout factor of each hidden unit of a row"""
    right_there: Tensor | None = None
    """bool (b, h, t, u)"""
    halves: tuple[Tensor, Tensor, Tensor] | None = None
    """`block_scores.split(right)`, if already computed"""
    rounds: bool = False
    """Whether both sides of the match are `rounded` first"""


class ScoreInputs(NamedTuple):
    """Block summaries from which factors were computed."""

    means: Tensor
    """(b, h, t, d): of query blocks"""
    summary: Tensor
    """(b, g, t, 3 d): of key blocks"""
    units: Tensor
    """(b, g, t, u, d): of key blocks"""
    own: Tensor | None = None
    """(b, h, r, d): queries of scored rows, for lists that heads share"""


@dataclass(slots=True)
class DistillBatch:
    """Rows on which block scores are distilled in one call, and the statistics of the call.

    The scores of a row are logits, whose softmax learns the row's attention mass on blocks (Kullback-Leibler
    divergence); `with_own` adds 0 for its own block. The first `chosen` rows compare the blocks of the selection, the
    others all blocks.

    >>> batch = DistillBatch(torch.tensor([3, 17, 40]))
    """

    rows: Tensor
    """int64 (r): rows compared on their listed blocks, then rows compared on every visible block"""
    chosen: int = 0
    """Number of the former"""
    visible: Tensor | None = None
    """bool (b, h, t): blocks that may be predicted; by default those with a key that is not padding"""
    weight: float = 1.0
    """Factor on the gradients of the scores"""
    saliency: bool = False
    """Weight the queries of a row by the norm of their output's gradient, and rows by the mean norm."""
    total: int = 0
    """Rows of the sequence, from which both kinds were drawn; by default set by the call"""
    together: bool = False
    """Whether one tensor (b, h, r, t) holds the scores of all rows with all blocks"""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Entries of `results` after a backward pass by torch operations"""
    by_row: Tensor | None = None
    """float32 (5, b h, r): statistics of each row after a backward pass by kernels"""
    chosen_weight: float = 1.0
    """Factor on the gradients of the chosen rows, beside `weight`; not on their loss in `results`"""
    row_tokens: int | None = None
    """Adjacent queries of a row, a divisor of the block size; by default those of a row of the selection"""
    with_own: bool = True
    """Whether a row's own block, which it sees in any case, takes part, with the logit 0. Without it scores learn the
    shares of the other blocks alone, which is all that a choice of a fixed number of them needs"""

    @property
    def chosen_rows(self) -> Tensor:
        """Rows compared on their listed blocks."""
        return self.rows[: self.chosen]

    @property
    def dense_rows(self) -> Tensor:
        """Rows compared on every visible block."""
        return self.rows[self.chosen :]

    def factor(self, rows: int, streams: int) -> float:
        """Factor on the gradient of a row, of `rows` of its kind in each of `streams` samples and heads.

        With saliency the loss is the sum over all rows, estimated from the drawn ones, of the row's weight times its
        divergence: it scales with the gradient of the task. Otherwise it is the mean divergence.
        """
        return self.weight * self.total / max(rows, 1) if self.saliency else self.weight / max(rows * streams, 1)

    def results(self) -> dict[str, Tensor]:
        """After the backward pass: "loss", and if there are dense rows "coverage" and "entropy", scalars."""
        if self.by_row is None:
            return self.stats
        # Reduced on request: a training step does not need the sums.
        by_row = self.by_row
        if not self.saliency:
            # Kernels weight a row by its queries, but its gradient is that of any other row.
            queries = by_row[4]
            divergence, rows = by_row[0] / queries.clamp(min=1), (queries > 0).to(by_row.dtype)
            by_row = torch.stack([divergence, *by_row[1:4], rows])
        kinds = [x.flatten(1).sum(1) for x in by_row.split([self.chosen, by_row.shape[2] - self.chosen], 2)]
        stats = {"loss": self.weight * torch.stack([x[0] / x[4].clamp(min=1e-30) for x in kinds]).sum()}
        dense = (self.by_row.shape[2] - self.chosen) * self.by_row.shape[1]
        if dense:
            stats |= {"entropy": kinds[1][1] / dense, "coverage": kinds[1][2] / kinds[1][3].clamp(min=1)}
        return stats
