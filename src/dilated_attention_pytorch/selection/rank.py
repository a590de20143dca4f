"""Ranking of blocks in torch: forced blocks first, then the best, by a budget or by coverage.

Scores are computed and ranked in chunks of rows, so no array of all pairs exists.
Shapes: b batch, h heads, r rows (query blocks, or tokens), t key blocks, k listed blocks.
"""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.cpu import native
from ..kernels.dropout import GOLDEN, WORD, mix
from .scores import BlockScores
from .types import shared_blocks


@dataclass(frozen=True, slots=True)
class Budget:
    """Number of blocks a row keeps, including its own block and the forced ones."""

    kept: float
    """Fraction of the visible blocks."""
    coverage: float | None
    """If given, keep blocks until their predicted share of the attention reaches this value."""
    least: int
    most: int | None

    @property
    def fraction(self) -> float:
        """`kept` in float32, which kernels on GPUs take."""
        return c_float(self.kept).value

    def room(self, blocks: int) -> int:
        """Largest number of blocks a row can list besides its own."""
        most = blocks if self.most is None else min(self.most, blocks)
        if self.coverage is None:
            most = min(most, max(self.least, round(self.fraction * blocks), 1))
        return min(most, blocks) - 1

    def rooms(self, blocks: Tensor) -> Tensor:
        """`room` of each of (r) numbers of blocks, int64."""
        most = blocks if self.most is None else blocks.clamp(max=self.most)
        if self.coverage is None:
            most = torch.minimum(most, self.share(blocks).clamp(min=max(self.least, 1)))
        return most - 1

    def wanted(self, seen: Tensor) -> Tensor:
        """Number of blocks, int64, that rows with `seen` visible blocks keep by the fraction."""
        return self.share(seen).clamp(min=self.least, max=self.most)

    def share(self, blocks: Tensor) -> Tensor:
        """The fraction of numbers of blocks, int64: the exact product, rounded half to even."""
        return (blocks.double() * self.fraction).round().long()


def rank(scores: BlockScores, rows: Tensor, seed: Tensor | None, host_sync: bool) -> tuple[Tensor, Tensor]:
    """`Selection.indices` and `counts` of the best blocks of each row; the first of equals.

    Args:
        scores: of the rows.
        rows: int64 (r): rows of the sequence.
        seed: int64 [1]: adds Gumbel noise, as if blocks were drawn in proportion to their weight.
        host_sync: allow reading counts back to the host, to make lists no longer than needed.
    """
    visible, settings = scores.visible, scores.settings
    budget, near = settings.budget, (settings.local_blocks, settings.sink_blocks, settings.is_causal)
    t = visible.shape[-1]
    room, counted = budget.room(t), counted_blocks(visible, *near)
    grows = budget.coverage is not None and host_sync
    in_library = budget.coverage is None and host_sync
    indices = torch.full(
        (*visible.shape[:2], len(rows), 0 if grows else room), t, dtype=torch.int32, device=visible.device
    )
    counts = torch.zeros(indices.shape[:3], dtype=torch.int32, device=visible.device)
    chunk = scores.chunk()
    for begin in range(0, len(rows), chunk):
        end = min(begin + chunk, len(rows))
        row = rows[begin:end]
        own = row // settings.block_size if settings.per_token else row
        # Rows of a causal sequence list blocks before their own.
        width = max(int(own.max()), 1) if settings.is_causal and host_sync else t
        found = scores.ranked(begin, end, width)
        chosen = None
        if in_library:
            taken, seen = (x[:, :, own] for x in counted)
            ranked = _with_noise(found, seed, row)
            chosen = native.choose_blocks(ranked, own, budget.wanted(seen) - taken, visible, room, *near)
            # The next chunk has the same dtype and device.
            in_library = chosen is not None
        if chosen is None:
            shared = shared_blocks(own, t, *near)
            chosen = _rank_rows(found, row, own, shared, visible, counted, budget, room, near[2], seed, host_sync)
        listed, many = chosen
        # With coverage the scores decide the lengths; room for all blocks would be far more than is kept.
        listed = listed[..., : int(many.max())] if grows else listed
        if listed.shape[-1] > indices.shape[-1]:
            indices = torch.nn.functional.pad(indices, (0, listed.shape[-1] - indices.shape[-1]), value=t)
        indices[:, :, begin:end, : listed.shape[-1]] = listed
        counts[:, :, begin:end] = many
    if host_sync and counts.numel():
        indices = indices[..., : int(counts.max())]
    return indices, counts


def _rank_rows(
    scores: Tensor,
    row: Tensor,
    own: Tensor,
    shared: Tensor,
    visible: Tensor,
    counted: tuple[Tensor, Tensor],
    budget: Budget,
    room: int,
    is_causal: bool,
    seed: Tensor | None,
    host_sync: bool,
) -> tuple[Tensor, Tensor]:
    """Listed blocks int32 (b, h, r, k) of a chunk of rows, and their counts; `scores` are of the first blocks."""
    t, width = visible.shape[-1], scores.shape[-1]
    column = torch.arange(width, device=visible.device)
    within = column < own[:, None] if is_causal else column != own[:, None]
    within = within & visible[:, :, None, :width]
    forced = shared[:, :width] & within
    open_to_choice = within & ~forced
    # A block whose score is NaN comes last.
    scores = torch.where(within & ~scores.isnan(), scores, -torch.inf)
    ranked = _with_noise(scores, seed, row)
    room = min(room, width if is_causal else width - 1)
    best, indices = _best(ranked.masked_fill(~open_to_choice, -torch.inf), room, host_sync)
    taken, seen = (x[:, :, own] for x in counted)
    if budget.coverage is None:
        wanted = budget.wanted(seen)
    else:
        share = _shares(scores)
        # Forced blocks are kept in any case; blocks are added until the predicted share reaches the target.
        held = share[..., -1] + (share[..., :-1] * forced).sum(-1)
        reached = held[..., None] + share.gather(-1, indices).cumsum(-1)
        wanted = taken + ((reached < budget.coverage).sum(-1) + 1) * (held < budget.coverage)
        wanted = wanted.clamp(min=budget.least, max=budget.most)
    slot = torch.arange(room, device=visible.device)
    listed = (slot < (wanted - taken)[..., None]) & (best > -torch.inf)
    counts = listed.sum(-1, dtype=torch.int32)
    return indices.masked_fill(~listed, t).sort(-1).values.int(), counts


def counted_blocks(visible: Tensor, local: int, sink: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Blocks that rows of each block keep without listing them, and blocks they see, int64 (b, h, t)."""
    t = visible.shape[-1]
    own = torch.arange(t, device=visible.device)
    before = torch.nn.functional.pad(visible.cumsum(-1), (1, 0))
    first, last = (own - local + 1).clamp(min=0), (own + local).clamp(max=t)
    hidden = (~visible).long()
    if is_causal:
        taken = before[..., own] - before[..., first] + before[..., first.clamp(max=sink)]
        return taken + 1, before[..., 1:] + hidden
    # First blocks precede the near blocks, or follow them.
    taken = before[..., last.clamp(min=min(sink, t))] - before[..., first] + before[..., first.clamp(max=sink)]
    return taken + hidden, before[..., -1:] + hidden


def _best(ranked: Tensor, many: int, host_sync: bool) -> tuple[Tensor, Tensor]:
    """The `many` largest of (..., t), descending, and their indices; the first of equals."""
    if host_sync:
        best, indices = ranked.topk(min(many + 1, ranked.shape[-1]), -1)
        tied = (best[..., 1:] == best[..., :-1]) & (best[..., 1:] > -torch.inf)
        if not bool(tied.any()):
            return best[..., :many], indices[..., :many]
    best, indices = ranked.sort(dim=-1, descending=True, stable=True)
    return best[..., :many], indices[..., :many]


def _shares(scores: Tensor) -> Tensor:
    """Predicted share of attention of each block, last the row's own, whose logit is 0."""
    own = torch.zeros_like(scores[..., :1])
    return torch.cat([scores, own], -1).softmax(-1)


def _with_noise(scores: Tensor, seed: Tensor | None, row: Tensor) -> Tensor:
    """Scores (b, h, r, t) of rows of the sequence (r), with Gumbel noise if there is a seed."""
    if seed is None:
        return scores
    return scores + gumbel(seed, row, torch.arange(scores.shape[-1], device=scores.device), scores)


def gumbel(seed: Tensor, row: Tensor, column: Tensor, like: Tensor) -> Tensor:
    """Gumbel noise from (seed, batch, head, row, column) alone, in the shape (b, h, r, t) and dtype of `like`."""
    batch, heads = like.shape[:2]
    low, high = seed & WORD, (seed >> 32) & WORD
    stream = torch.arange(batch * heads, device=like.device).view(batch, heads, 1, 1)
    word = mix(mix((mix(low ^ mix((high + stream) & WORD)) + row[:, None]) & WORD) ^ ((column * GOLDEN) & WORD))
    # Undoes the last step of `mix`, which only changes the lowest of the bits used.
    word = word ^ (word >> 16)
    # 23 bits and a half: never 0 or 1, and exact in float32.
    uniform = ((word >> 9).to(like.dtype) + 0.5) / 2**23
    return -(-uniform.log()).log()
