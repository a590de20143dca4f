"""Launches that invert a selection by tokens: an index of the queries that list each key block."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.launch.arena import Arena, Shape
from ...kernels.launch.launcher import Launch, prepared
from ...kernels.triton.launches import padded_width
from ..types import GatherIndex, Selection
from .gather_index_kernels import mark_tokens_kernel, place_kernel, runs_kernel

WORDS = 4
"""Words of 32 tokens per program, which writes one count per key block for all of them."""
TOGETHER = 64
"""List entries of each of 32 tokens that are loaded at once."""
WINDOW = 1024
"""Key blocks whose next rows a program holds at once."""
COLUMNS = 8
"""Key tiles per program of `runs_kernel`, whose counts are loaded as one vector."""


class SelectionInverter:
    """Launches that invert selections by tokens of one shape.

    `group` query heads read a key head, and `shared` query heads share a list. `some` tokens of one sample are numbered
    from a first one on.
    """

    def __init__(
        self, device: torch.device, shape: tuple[int, ...], apart: tuple[int, ...], size: int, t: int, group: int,
        shared: int, some: bool,
    ) -> None:  # fmt: skip
        batch, lists, n, listed = shape
        heads = lists * shared
        key_tiles, shares, each = batch * t, -(-n // (32 * WORDS)), batch * n * listed
        # A multiple of 16, for which the compiler is specialized, so that threads read and write vectors of four.
        wide = -(-t // 16) * 16
        query_tiles = max(each // size + min(key_tiles, each), 1)
        rows = query_tiles * size
        shapes: dict[str, Shape] = {
            "source": (heads, rows),
            "place": (heads, batch * n, listed),
            "tile": (heads, query_tiles),
        }
        shapes |= {"first": (heads, key_tiles + 1), "order": (heads // group, key_tiles), "counters": (heads,)}
        shapes |= {"total": (heads, key_tiles), "before": (heads, batch, shares, wide)}
        self._room = Arena(torch.int32, device, shapes | {"bits": (heads, batch, shares, WORDS, wide)})
        begin, sizes = self._room.begin, (n, t, heads, batch, listed, wide)
        together, window = min(padded_width(listed), TOGETHER), min(padded_width(t), WINDOW)
        # With equal lengths the compiler would give the table of blocks and the list entries one layout, and exchange
        # both between threads.
        window *= 1 + (window == 32 * together)
        once = {"WORDS": WORDS, "P": together, "T": window, "SHARED": shared, "num_warps": 8}
        self._mark = Launch(
            mark_tokens_kernel, device, *begin("bits", "before", "counters"), *sizes, *apart, **once,
        )  # fmt: skip
        self._count = Launch(
            runs_kernel, device, *begin("before", "first", "total", "counters"), shares, t, wide,
            SIZE=size, BS=min(padded_width(shares), 512), BT=COLUMNS, P=min(padded_width(key_tiles), 1024),
            num_warps=4,
        )  # fmt: skip
        begins = begin("bits", "before", "first", "total", "source", "place", "tile", "order")
        self._place = Launch(
            place_kernel, device, *(() if some else (None,)), *begins, *sizes, rows, *apart,
            SIZE=size, R=min(padded_width(key_tiles), 1024), GROUP=group, **once,
        )  # fmt: skip
        self._choices, self._runs = (shares, batch * heads, 1), (batch * (wide // COLUMNS), heads, 1)

    @property
    def numbers(self) -> int:
        """Size of an inverted selection in int32 elements, intermediate counts included."""
        return self._room.total

    def __call__(self, indices: Tensor, *first_token: int) -> GatherIndex:
        memory = self._room.made()
        self._mark(self._choices, (indices, memory))
        self._count(self._runs, (memory,))
        self._place(self._choices, (indices, memory), *first_token)
        return GatherIndex(*[self._room.tensor(memory, name) for name in GatherIndex._fields])


def inverter_of(selection: Selection, group: int, some: bool = False) -> tuple[SelectionInverter, Tensor]:
    """Launches that invert a selection, and its lists in the layout that they read; see `invert_selection`."""
    indices = selection.indices
    apart = indices.stride()
    # A slice of heads is read in place.
    if apart[2:] != (indices.shape[3], 1):
        indices = indices.contiguous()
        apart = indices.stride()
    options = selection.block_size, selection.blocks, group, selection.group, some
    return prepared(SelectionInverter, indices.device, indices.shape, apart[:2], *options), indices


def invert_selection(selection: Selection, group: int = 1, first_token: int | None = None) -> GatherIndex:
    """`plan.invert_selection` with one bit for each token and key tile instead of a sort, in 32-bit integers. With
    `first_token` the lists belong to some tokens of one sample, from that token on."""
    first = () if first_token is None else (first_token,)
    run, indices = inverter_of(selection, group, bool(first))
    return run(indices, *first)
