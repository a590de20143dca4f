"""Choice of a layout by the predicted time of exchange and computation together.

Blocks dealt out by work alone balance a causal window perfectly and make every rank fetch nearly all keys; contiguous
shards of a causal ramp leave one rank with twice the average work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..patterns import Pattern
from ..plan import make_plan, own_block
from .attention import Call
from .cost_model import Machine
from .layout import SequenceLayout
from .schedule import rank_plan

MOST_DEALT = 2**22
"""Tokens beyond which blocks are not dealt out by cost: listing the costs would take longer than it saves."""


class LayoutChoice(NamedTuple):
    """A layout, and the predictions it was chosen by."""

    layout: SequenceLayout
    name: str
    seconds: dict[str, float]
    """Predicted seconds of the slowest rank, by layout."""
    machine: Machine

    def __str__(self) -> str:
        times = ", ".join(f"{name} {time * 1e3:.3g} ms" for name, time in self.seconds.items())
        return f"{self.name}: predicted {times} for the slowest rank ({self.machine})"


def choose_layout(
    pattern: Pattern | str,
    n: int,
    world: int,
    heads: int,
    key_heads: int | None = None,
    *,
    head_dim: int = 64,
    itemsize: int = 2,
    batch: int = 1,
    is_causal: bool = False,
    machine: Machine | None = None,
) -> LayoutChoice:
    """The layout with the least predicted time of its slowest rank: contiguous, zigzag, or blocks dealt out by cost.

    >>> from dilated_attention_pytorch.distributed import choose_layout
    >>> choose_layout("window:64 & causal", 4096, 4, heads=2).name
    'contiguous'
    """
    machine = machine or Machine()
    key_heads = key_heads or heads
    contiguous = SequenceLayout.contiguous(n, world)
    whole = Call(pattern, contiguous, is_causal).resolved(heads)
    candidates = {"contiguous": contiguous, "zigzag": SequenceLayout.zigzag(n, world)}
    if n <= MOST_DEALT:
        candidates["dealt out"] = _dealt_out(whole, n, world, heads)
    row_bytes = 2 * batch * head_dim * itemsize

    def predicted(layout: SequenceLayout, rank: int) -> float:
        work = rank_plan(whole, layout, rank, heads, key_heads)
        codes = torch.unique(work.far_codes)
        peers = len(torch.unique(layout.locate(codes % layout.n)[0]))
        fetch = machine.transfer(len(codes) * row_bytes, peers)
        return max(fetch, batch * work.plan.flops(head_dim) / machine.flops)

    seconds = {name: max(predicted(layout, rank) for rank in range(world)) for name, layout in candidates.items()}
    best = min(seconds, key=lambda name: seconds[name])
    return LayoutChoice(candidates[best], best, seconds, machine)


def _dealt_out(pattern: Pattern, n: int, world: int, heads: int) -> SequenceLayout:
    """Blocks in order of their cost, dealt to the ranks forth and back."""
    block = own_block(pattern)
    blocks = -(-n // block)
    cost = torch.zeros(blocks, dtype=torch.float64, device="cpu")
    plan = make_plan(pattern, n, heads, block)
    for part in plan.parts:
        counts = torch.add(*part.by_query.counts()).double().view(-1, part.queries.tiles)
        for head, kind in enumerate(part.head_class.tolist()):
            if kind >= 0:
                token, exists = part.queries.tokens(block, head)
                share = counts[kind][:, None] * exists
                cost.index_add_(0, token.clamp(max=n - 1).flatten() // block, share.flatten())
    order = torch.argsort(cost, descending=True, stable=True)
    place = torch.arange(blocks, device="cpu") % (2 * world)
    owners = torch.empty(blocks, dtype=torch.int64, device="cpu")
    owners[order] = torch.minimum(place, 2 * world - 1 - place)
    return SequenceLayout.of_owners(owners, world, block, n)
