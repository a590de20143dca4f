"""The dense ring: whole shards of K and V go round, whatever the pattern. Baseline, and best where all is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .local import Fetched, Shard, Totals
from .transport import Pending, Transport


class Ring:
    """Every rank passes what it has to the next; the shard of rank r - j is here at hop j. Gradients go round with it.

    Args:
        transport: how shards go round.
        shards: the tensors of the ranks here.
        which: for each rank here, the fetched rows that the stage of each hop takes.
        lengths: tokens of every rank.
    """

    def __init__(
        self, transport: Transport, shards: list[Shard], which: list[list[Tensor]], lengths: tuple[int, ...]
    ) -> None:
        self.transport, self.shards, self.which = transport, shards, which
        self.world, self.longest = len(lengths), max(lengths)

    def hops(self) -> Iterator[tuple[int, list[Fetched] | None]]:
        """Each hop with the shards that are here; None for the ranks' own."""
        rows = [self._packed(shard) for shard in self.shards]
        masks = None if self.shards[0].padding is None else [self._packed_padding(shard) for shard in self.shards]
        for hop in range(self.world):
            last = hop == self.world - 1
            moving = None if last else self._rotate(rows)
            moving_masks = None if last or masks is None else self._rotate(masks)
            own = [None] * len(rows) if masks is None else masks
            fetched = [Fetched(x, mask, which[hop]) for x, mask, which in zip(rows, own, self.which, strict=True)]
            yield hop, fetched if hop else None
            if moving is not None:
                rows = moving.wait()
            if moving_masks is not None:
                masks = moving_masks.wait()

    def differentiate(
        self, gradients: Callable[[int, list[Fetched] | None], list[Tensor | None]], into: list[Totals]
    ) -> None:
        """Add all gradients, given those of one hop; the gradients of a shard grow in float32 while it goes round."""
        totals: list[Tensor] | None = None
        for hop, fetched in self.hops():
            found = gradients(hop, fetched)
            if not hop:
                continue
            grads = [grad.to(into[0].query.dtype) for grad in found if grad is not None]
            if totals is None:
                totals = grads
            else:
                totals = [before + grad for before, grad in zip(self._rotate(totals).wait(), grads, strict=True)]
        if totals is None:
            return
        for rows, shard, total in zip(self._rotate(totals).wait(), self.shards, into, strict=True):
            widths = shard.key.shape[3], shard.value.shape[3]
            heads, n = shard.key.shape[1:3]
            own = rows.view(heads, self.longest, len(shard.key), sum(widths))[:, :n].permute(2, 0, 1, 3).flatten(1, 2)
            for one, grad in zip(total[1:], own.split(widths, -1), strict=True):
                one.add_(grad)

    def _packed(self, shard: Shard) -> Tensor:
        """A whole shard as rows, with room for the longest."""
        batch, heads, n, width = shard.key.shape
        room = (heads, self.longest - n, batch, width + shard.value.shape[3])
        rows = torch.cat([shard.key, shard.value], -1).permute(1, 2, 0, 3)
        return torch.cat([rows, rows.new_zeros(room)], 1).flatten(0, 1).flatten(1)

    def _packed_padding(self, shard: Shard) -> Tensor:
        assert shard.padding is not None
        heads, n = shard.key.shape[1:3]
        mask = torch.cat([shard.padding.T, shard.padding.new_zeros(self.longest - n, len(shard.padding))])
        return mask.to(torch.uint8).repeat(heads, 1)

    def _rotate(self, rows: list[Tensor]) -> Pending[list[Tensor]]:
        ranks = self.transport.ranks
        outgoing = [{(rank + 1) % self.world: one} for rank, one in zip(ranks, rows, strict=True)]
        into = [{(rank - 1) % self.world: len(one)} for rank, one in zip(ranks, rows, strict=True)]
        moving = self.transport.swap(outgoing, into)
        return Pending(lambda: [next(iter(messages.values())) for messages in moving.wait()])
