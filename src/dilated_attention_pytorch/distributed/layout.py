"""Layouts: assignment of the tokens of a sequence to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from ..errors import must
from ..patterns.base import integer, integers
from ..plan.buffers import TokenRuns


@dataclass(frozen=True)
class SequenceLayout:
    """Assignment of runs of consecutive tokens to ranks. Build a layout with the class methods.

    contiguous, 8 tokens, 2 ranks:   0 0 0 0 1 1 1 1
    zigzag, 8 tokens, 2 ranks:       0 0 1 1 1 1 0 0

    A shard holds its rank's runs in the order of the sequence. Ranks may hold different numbers of tokens, or none.
    """

    world: int
    """Number of ranks."""
    begins: tuple[int, ...]
    """First token of each run, ascending from 0."""
    ranks: tuple[int, ...]
    """Holder of each run; neighbouring runs have different holders."""
    n: int
    """Tokens in the sequence."""

    @classmethod
    def contiguous(cls, n: int, world: int) -> SequenceLayout:
        """One run per rank, of equal lengths; the first ranks hold one more token if `n` is not divisible.

        >>> SequenceLayout.contiguous(10, 4).lengths
        (3, 3, 2, 2)
        """
        n, world = integer("n", n, 0), integer("world", world, 1)
        return cls.of_lengths([n // world + (rank < n % world) for rank in range(world)])

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> SequenceLayout:
        """One run per rank, of the given lengths; a length may be 0."""
        lengths = integers("shard length", lengths, 0)
        return cls._of_runs(range(len(lengths)), lengths, len(lengths))

    @classmethod
    def zigzag(cls, n: int, world: int) -> SequenceLayout:
        """Two runs per rank, one from each end, so that causal attention costs every rank about the same.

        >>> SequenceLayout.zigzag(8, 2).positions(0).tolist()
        [0, 1, 6, 7]
        """
        n, world = integer("n", n, 0), integer("world", world, 1)
        pieces = 2 * world
        lengths = [n // pieces + (piece < n % pieces) for piece in range(pieces)]
        return cls._of_runs([*range(world), *reversed(range(world))], lengths, world)

    @classmethod
    def of_owners(
        cls, owners: Sequence[int] | Tensor, world: int, block: int = 1, n: int | None = None
    ) -> SequenceLayout:
        """Rank `owners[i]` holds the i-th block of `block` tokens; the last block may be shorter."""
        holders = integers("owner", owners.tolist() if isinstance(owners, Tensor) else owners, 0)
        world, block = integer("world", world, 1), integer("block", block, 1)
        n = len(holders) * block if n is None else integer("n", n, 1)
        if max(holders) >= world:
            raise must(f"owners must be ranks below {world}", max(holders))
        if not (len(holders) - 1) * block < n <= len(holders) * block:
            raise must(f"{len(holders)} blocks of {block} must cover n tokens, the last at least in part", n)
        lengths = [block] * (len(holders) - 1) + [n - (len(holders) - 1) * block]
        return cls._of_runs(holders, lengths, world)

    @classmethod
    def _of_runs(cls, ranks: Sequence[int], lengths: Sequence[int], world: int) -> SequenceLayout:
        starts = [0, *accumulate(lengths)]
        runs = [(rank, start) for rank, start, length in zip(ranks, starts[:-1], lengths, strict=True) if length]
        joined = [next(same) for _, same in groupby(runs, key=lambda run: run[0])]
        return cls(world, tuple(start for _, start in joined), tuple(rank for rank, _ in joined), starts[-1])

    def runs(self, rank: int) -> list[tuple[int, int]]:
        """Begin and end of each run of the rank."""
        if not 0 <= rank < self.world:
            raise must(f"rank must lie in 0 .. {self.world - 1}", rank)
        own = (self._tables[1] == rank).nonzero()[:, 0].tolist()
        ends = (*self.begins[1:], self.n)
        return [(self.begins[run], ends[run]) for run in own]

    def token_runs(self, rank: int) -> TokenRuns:
        """The rank's runs, for buffer plans."""
        return TokenRuns(self.runs(rank))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        held = [0] * self.world
        for (begin, end), rank in zip(pairwise((*self.begins, self.n)), self.ranks, strict=True):
            held[rank] += end - begin
        return tuple(held)

    def positions(self, rank: int) -> Tensor:
        """Tokens of a rank's shard, in its order, int64: for rotary embeddings, masks and labels."""
        runs = [torch.arange(begin, end, device="cpu") for begin, end in self.runs(rank)]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device="cpu")

    def locate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Holder of each token and its place in the holder's shard, int64 each."""
        begins, ranks, before = self._tables
        run = torch.searchsorted(begins, tokens, right=True) - 1
        return ranks[run], tokens - begins[run] + before[run]

    def key_order(self, codes: Tensor, key_heads: int) -> Tensor:
        """Sort keys that order rows `key head * n + token` by holder, then by code."""
        holder, _ = self.locate(codes % self.n)
        return holder * (key_heads * self.n) + codes

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """First token, holder and place in the holder's shard of every run."""
        held, before = [0] * self.world, []
        for (begin, end), rank in zip(pairwise((*self.begins, self.n)), self.ranks, strict=True):
            before.append(held[rank])
            held[rank] += end - begin
        begins, ranks, places = (
            torch.tensor(x, dtype=torch.int64, device="cpu") for x in (self.begins, self.ranks, before)
        )
        return begins, ranks, places


def shard_sequence(x: Tensor, layout: SequenceLayout, rank: int, dim: int = 2) -> Tensor:
    """The rank's tokens of a whole sequence along `dim`, in the order of `layout.positions(rank)`; differentiable."""
    if x.shape[dim] != layout.n:
        raise must(f"dimension {dim} must hold the layout's {layout.n} tokens", x.shape[dim])
    runs = [x.narrow(dim, begin, end - begin) for begin, end in layout.runs(rank)]
    if not runs:
        return x.narrow(dim, 0, 0)
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim)


def unshard_sequence(shards: Sequence[Tensor], layout: SequenceLayout, dim: int = 2) -> Tensor:
    """The whole sequence from the shards of all ranks; differentiable."""
    if len(shards) != layout.world:
        raise must(f"there must be {layout.world} shards, one of each rank", len(shards))
    for rank, (shard, length) in enumerate(zip(shards, layout.lengths, strict=True)):
        if shard.shape[dim] != length:
            raise must(f"the shard of rank {rank} must hold {length} tokens along dimension {dim}", shard.shape[dim])
    parts = [
        iter(shard.split([end - begin for begin, end in layout.runs(rank)], dim)) for rank, shard in enumerate(shards)
    ]
    return torch.cat([next(parts[rank]) for rank in layout.ranks], dim) if layout.ranks else shards[0]
