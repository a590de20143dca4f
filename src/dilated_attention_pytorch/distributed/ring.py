"""The dense ring: whole shards of K and V pass through all ranks. Best for patterns that need nearly all keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .local_attention import Received, Shard
from .transport import Pending, Transport


class Ring:
    """Shards in rotation: at hop j rank r has the shard of rank r - j. Gradients rotate with their shard.

    Args:
        transport: carries the shards.
        shards: tensors of the ranks of this process.
        sources: for each of these ranks and each hop, `Received.source`.
        lengths: tokens of every rank.
    """

    def __init__(
        self, transport: Transport, shards: list[Shard], sources: list[list[Tensor]], lengths: tuple[int, ...]
    ) -> None:
        self.transport, self.shards, self.sources = transport, shards, sources
        self.world, self.longest = len(lengths), max(lengths)

    def hops(self) -> Iterator[tuple[int, list[Received] | None]]:
        """Each hop with the present shards; None for the ranks' own."""
        rows = [self._packed(shard) for shard in self.shards]
        masks = None if self.shards[0].padding is None else [self._packed_padding(shard) for shard in self.shards]
        for hop in range(self.world):
            last = hop == self.world - 1
            moving = None if last else self._rotate(rows)
            moving_masks = None if last or masks is None else self._rotate(masks)
            own = [None] * len(rows) if masks is None else masks
            present = [Received(x, mask, at[hop]) for x, mask, at in zip(rows, own, self.sources, strict=True)]
            yield hop, present if hop else None
            if moving is not None:
                rows = moving.wait()
            if moving_masks is not None:
                masks = moving_masks.wait()

    def differentiate(
        self, gradients: Callable[[int, list[Received] | None], list[Tensor | None]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Gradients of own keys and values by other ranks, given a function for one hop; summed in float32."""
        totals: list[Tensor] | None = None
        for hop, received in self.hops():
            wide = torch.promote_types(self.shards[0].key.dtype, torch.float32)
            grads = [grad.to(wide) for grad in gradients(hop, received) if grad is not None]
            if totals is not None:
                arrived = self._rotate(totals).wait()
                grads = [before + grad for before, grad in zip(arrived, grads, strict=True)]
            totals = grads if hop else None
        assert totals is not None, "a ring has at least two ranks"
        returned = []
        for rows, shard in zip(self._rotate(totals).wait(), self.shards, strict=True):
            widths = shard.key.shape[3], shard.value.shape[3]
            heads, n = shard.key.shape[1:3]
            own = rows.view(heads, self.longest, len(shard.key), sum(widths))[:, :n].permute(2, 0, 1, 3).flatten(1, 2)
            key, value = own.split(widths, -1)
            returned.append((key, value))
        return returned

    def _packed(self, shard: Shard) -> Tensor:
        """Rows of a whole shard, padded to the longest shard."""
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
