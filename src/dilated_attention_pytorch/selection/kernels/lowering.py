"""Work items of selections by query blocks for the GPU kernels, laid out without reading a value back.

A plan of positions is lowered once and used for long, so lowering may read values back. A learned plan lives for one
call: its tables have the sizes that shapes allow, and unused entries are marked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import must
from ...kernels.call import AttentionCall, Runner
from ...kernels.hopper import lowering as hopper_lowering
from ...kernels.hopper.lowering import FEW_ITEMS, ITEM_ROWS, BackwardItems, ForwardItems, LoweredPart
from ...kernels.launch.arena import Arena, Shape
from ...kernels.launch.launcher import Launch, prepared
from ...kernels.launch.triton_abi import Grid
from ...kernels.triton import backend as triton_backend
from ...kernels.triton import lowering as triton_lowering
from ...kernels.triton.launches import padded_width
from ...kernels.triton.lowering import PartSchedule, Schedule, WalkTables, share_of
from ...plan.plan import Axis, Part, Plan, Walk
from ..attend import BlockAttend, CallChoices
from ..plan import ground, plan_of
from ..types import Selection
from .block_lists_kernels import held_items_kernel, key_lists_kernel, mark_kernel, query_lists_kernel

MOST_ENTRIES = 2**31
"""Kernels number the entries of all lists in 32 bits."""


class ListedBlocks:
    """Launches that write the lists and work items of selections by query blocks, in two arenas: one per direction.

    A block has `halves` items for Hopper (one, or two of 128 rows), or 0 if Hopper does not run it. With `few` items
    the same row of all heads starts together, and items of dK and dV are sorted over all heads; otherwise heads start
    one after another. `shared` query heads share a list, but every head has its own rows.
    """

    def __init__(
        self, device: torch.device, shape: tuple[int, ...], shared: int, size: int, local: int, sinks: int,
        causal: bool, ragged: bool, halves: int, few: bool,
    ) -> None:  # fmt: skip
        batch, heads, t, listed = shape[0], shape[1] * shared, *shape[2:]
        # Without a block that every row sees, Hopper's items of rows without blocks need a masked tile.
        sinks, self.masked, words = min(sinks, t), ragged or causal or (not local and halves > 0), -(-t // 32)
        many = (local if causal or not local else 2 * local - 1) + sinks + listed
        self._device, self._halves, self._few = device, halves, few
        self._rows, self._tiles = heads * batch * t, batch * t
        self.entries = entries = self._rows * many
        if entries >= MOST_ENTRIES:
            hint = "Pass fewer heads or samples at a time, or shorter lists."
            raise must(f"rows times listed blocks must be < 2^31, {self._rows} times {many} here", entries, hint)
        in_lists, partial = entries * (1 + self.masked), entries * (self.masked and halves > 0)
        items = self._rows * halves
        lists: dict[str, Shape] = {"lists": (in_lists,), "rows": (self._rows, 6), "partial": (partial, 4)}
        work: dict[str, Shape] = {"work": (self._rows, 8), "items": (items, 8), "held": (items, 4)}
        self.by_query = Arena(torch.int32, device, lists | work)
        rest: dict[str, Shape] = {"bits": (self._rows * words,), "counters": (1,), "total": (self._rows,)}
        rest |= {"turned": (partial, 4), "items": (items, 4)}
        self.by_key = Arena(torch.int32, device, lists | rest)
        options = {"SIZE": size, "LOCAL": local, "CAUSAL": causal, "RAGGED": ragged, "HALVES": halves}
        begins = self.by_query.begin("lists", "rows", "work", "items", "held", "partial")
        self._to_queries = Launch(
            query_lists_kernel, device, *begins, batch, heads, t, listed, sinks, entries,
            P=padded_width(many), **options, BY_ROW=few, SHARED=shared, num_warps=4 if many > 256 else 1,
        )  # fmt: skip
        # Unused entries of the lists are read like the others, so they are set to 0.
        begins = self.by_key.begin("bits", "lists", "counters")
        self._mark = Launch(
            mark_kernel, device, *begins, t, heads, batch, listed, in_lists,
            P=min(padded_width(listed), 64), SHARED=shared, num_warps=4,
        )  # fmt: skip
        self._marks = words, batch * heads, 1
        begins = self.by_key.begin("bits", "counters", "lists", "rows", "total", "partial", "turned")
        self._to_keys = Launch(
            key_lists_kernel, device, *begins, batch, t, sinks, words, entries, many,
            P=min(padded_width(t), 1024), **options, num_warps=4,
        )  # fmt: skip
        self._to_items: dict[int, tuple[Launch, Grid, tuple[tuple[int, int], tuple[int, int], int]]] = {}

    @property
    def numbers(self) -> int:
        """Size of both arenas in int32 elements."""
        return self.by_query.total + self.by_key.total

    def queries(self, indices: Tensor) -> Tensor:
        """Arena `by_query` of block indices. It holds lists and then masks, `Walk.rows`, partial entries,
        `WalkTables.work`, and Hopper's items of the output and of dQ."""
        memory = self.by_query.made()
        self._to_queries((self._rows, 1, 1), (indices.contiguous(), memory))
        return memory

    def keys(self, indices: Tensor, by_query: Tensor) -> Tensor:
        """Arena `by_key` of block indices and their arena `by_query`. It holds the query blocks that read each key
        block: lists and then masks, rows, partial entries and counts; and the partial entries of dQ with the
        differences query minus key."""
        memory = self.by_key.made()
        self._mark(self._marks, (indices.contiguous(), memory))
        self._to_keys((self._rows, 1, 1), (memory, by_query))
        return memory

    def held_items(self, by_key: Tensor, group: int) -> Tensor:
        """`BackwardItems.items` of dK and dV, sorted by work within a head, or over all heads if items are `few`. Each
        row compares its work with all others, which costs as much as scoring all pairs of blocks once."""
        cached = self._to_items.get(group)
        if cached is None:
            rows = self._rows // group
            run = rows if self._few else self._tiles
            numbers = *self.by_key.begin("total", "items"), self._tiles, run
            sizes = {"P": min(padded_width(run), 1024), "HALVES": self._halves, "GROUP": group, "num_warps": 4}
            view = (rows * self._halves, 4), (4, 1), numbers[1]
            launch = Launch(held_items_kernel, self._device, *numbers, **sizes)
            cached = self._to_items[group] = launch, (rows, 1, 1), view
        launch, grid, view = cached
        launch(grid, (by_key,))
        return by_key.as_strided(*view)

    def walk(self, memory: Tensor, room: Arena, order: Tensor, nothing: Tensor) -> Walk:
        """Walk over an arena: lists and masks are views of one tensor."""
        (begin,), entries, rows = room.begin("lists"), self.entries, room.tensor(memory, "rows")
        full = memory.as_strided((entries,), (1,), begin)
        if not self.masked:
            return Walk(rows, full, nothing, nothing, order)
        mask = memory.as_strided((entries,), (1,), begin + entries)
        return Walk(rows, full, memory.as_strided((entries,), (1,), begin), mask, order)


class Frame:
    """Launches and constant tensors of selections of one size."""

    def __init__(
        self, device: torch.device, shape: tuple[int, ...], shared: int, n: int, size: int, local: int, sinks: int,
        is_causal: bool, few_items: int, on_hopper: bool,
    ) -> None:  # fmt: skip
        batch, heads, t = shape[0], shape[1] * shared, shape[2]
        self._device, self._shape, self._n, self._size, self._is_causal = device, (batch, heads, t), n, size, is_causal
        self.ragged = n % size > 0
        self.strided = self.ragged and batch > 1
        # The Hopper kernels do not check which items exist. They run smaller blocks only if they are requested by name.
        least = 64 if on_hopper else ITEM_ROWS
        plain = not self.strided and size >= least and (size <= ITEM_ROWS or not self.ragged)
        self.halves = size // min(size, ITEM_ROWS) if plain else 0
        few = heads * batch * t * self.halves <= few_items
        kinds = is_causal, self.ragged, self.halves, few
        self.lists: ListedBlocks = prepared(ListedBlocks, device, shape, shared, size, local, sinks, *kinds)
        self.launches: dict[Any, Any] = {}
        """Launches of the Hopper kernels"""
        self._owners: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def row_order(self) -> Tensor:
        """Query rows in starting order, int32: under a causal mask the last have the most tiles."""
        batch, heads, t = self._shape
        row = torch.arange(heads * batch * t, dtype=torch.int32, device=self._device).view(heads, batch, t)
        return (row.flip(2).transpose(1, 2) if self._is_causal else row).flatten()

    @cached_property
    def no_walk(self) -> Walk:
        """A walk without rows."""
        nothing = torch.empty(0, dtype=torch.int32, device=self._device)
        return Walk(nothing.view(0, 6), nothing, nothing, nothing, nothing)

    @cached_property
    def first_rows(self) -> Tensor:
        """First row of each head in a walk, int64 (h, 1)."""
        batch, heads, t = self._shape
        return torch.arange(heads, device=self._device)[:, None] * (batch * t)

    @cached_property
    def axis(self) -> Axis:
        """Axis of the concatenated samples."""
        batch, heads, _ = self._shape
        return ground(batch, self._n, heads, self._size, self._device)[0]

    @cached_property
    def tile_table(self) -> Tensor:
        """The axis as the Hopper kernels read it."""
        return hopper_lowering.tile_table(self.axis)

    @cached_property
    def bounds(self) -> Tensor:
        """The axis as the Triton kernels read it."""
        return torch.cat([self.axis.start, self.axis.end])

    def owners(self, group: int) -> tuple[Tensor, Tensor]:
        """Owners of queries and of keys, where `group` query heads read a key head."""
        if group not in self._owners:
            head = torch.arange(self._shape[1], dtype=torch.int32, device=self._device)
            nothing = torch.zeros_like(head)
            keys = torch.stack([head // group, head, nothing, nothing], 1)[::group].contiguous()
            self._owners[group] = torch.stack([head, head, nothing, nothing], 1), keys
        return self._owners[group]


_frame = lru_cache(maxsize=64)(Frame)


def _frame_of(selection: Selection, on_hopper: bool) -> Frame:
    """Launches and constant tensors of selections of this size; `on_hopper` if `hopper` is requested by name."""
    near = selection.local_blocks, selection.sink_blocks, selection.is_causal
    indices, sizes = selection.indices, (selection.group, selection.n, selection.block_size, *near)
    return _frame(indices.device, indices.shape, *sizes, FEW_ITEMS, on_hopper)


class Items(NamedTuple):
    """Tables of the Hopper kernels beside a plan's walks. Without a reference to the plan, which may be freed first."""

    frame: Frame
    by_query: Tensor
    """Result of `ListedBlocks.queries`"""
    by_key: Tensor | None = None
    """Result of `ListedBlocks.keys`"""


class Listed:
    """A selection by query blocks in the layout of the GPU kernels: samples are concatenated, each head has lists."""

    def __init__(self, selection: Selection, on_hopper: bool = False) -> None:
        self.frame, self._indices = _frame_of(selection, on_hopper), selection.indices
        self.lists = self.frame.lists
        self.items = Items(self.frame, self.lists.queries(selection.indices))
        walk = self._walk(self.items.by_query, self.lists.by_query)
        self.plan = self._with_parts(plan_of(selection, walk, self.frame.no_walk, self.lists.entries))
        """For the forward pass: its walk by key is empty."""

    def _walk(self, memory: Tensor, room: Arena) -> Walk:
        return self.lists.walk(memory, room, self.frame.row_order, self.frame.no_walk.mask)

    @cached_property
    def whole_plan(self) -> Plan:
        """`plan` with its walk by key, for gradients."""
        by_key = self.lists.keys(self._indices, self.items.by_query)
        self.items = self.items._replace(by_key=by_key)
        plan, (part,) = self.plan, self.plan.parts
        part = Part(part.queries, part.keys, part.head_class, part.by_query, self._walk(by_key, self.lists.by_key))
        return self._with_parts(Plan(plan.name, plan.n, plan.heads, plan.block_size, (part,), plan.masks, plan.blocks))

    def _with_parts(self, plan: Plan) -> Plan:
        """The plan with Hopper's work items, if its kernels run it."""
        if self.frame.halves:
            hopper_lowering.attach_parts(plan, (ListedPart(plan, self.items),))
        return plan

    def choose(self, call: AttentionCall, backend: str, choices: CallChoices) -> Runner:
        """Runner of a call over one of the plans; attaches the schedule that the chosen backend needs."""
        if not self.frame.halves and backend == "auto" and triton_backend.why_not(call) is None:
            # Saves the check whether Hopper can run the call.
            backend = "triton"
        name, runner = choices.choose(call, backend)
        group = call.query.shape[1] // call.key.shape[1]
        if name == "triton" and not triton_lowering.has_schedule(call.plan, group):
            triton_lowering.attach_schedule(call.plan, group, self._schedule(call.plan, group))
        return runner

    def _schedule(self, plan: Plan, group: int) -> Schedule:
        """Schedule of the Triton kernels for one of the plans."""
        (part,) = plan.parts
        (heads, key_owners), axis = self.frame.owners(group), self.frame.bounds
        tables, entries = self.lists, self.lists.entries
        work = tables.by_query.tensor(self.items.by_query, "work")
        by_query = by_key = WalkTables(
            work=work,
            items=part.queries.tiles,
            owners=heads,
            # Whole and partial entries are views of one tensor of lists.
            lists=tables.by_query.tensor(self.items.by_query, "lists"),
            mask_shift=entries,
            partial=len(part.by_query.mask) > 0,
        )
        if len(part.by_key.rows):
            limit = None if group > 1 else share_of(plan, len(part.by_key.full))
            memory = self.items.by_key
            assert memory is not None
            order = tables.by_key.tensor(memory, "total").view(plan.heads, -1).argsort(dim=1, descending=True)
            lists = tables.by_key.tensor(memory, "lists")
            by_key = _key_side(plan, part.by_key, self.frame.first_rows, order, lists, key_owners, limit)
        whole = PartSchedule(
            by_query=by_query,
            by_key=by_key,
            heads=heads,
            key_rows=part.by_key.rows,
            query_axis=axis,
            key_axis=axis,
            query_tiles=part.queries.tiles,
            key_tiles=part.keys.tiles,
            query_rate=1,
            key_rate=1,
            strided=self.frame.strided,
            per_head=True,
            bounded=self.frame.ragged,
        )
        return Schedule((whole,), (whole,) if len(part.by_key.rows) else (), plan.masks.band, bits=False)


@dataclass(slots=True)
class ListedAttend(BlockAttend):
    """Attention over a selection by query blocks, with work items written by kernels."""

    listed: Listed | None = field(default=None, init=False)
    captured: bool = field(default=False, init=False)
    """Whether the lists were written in a call that was captured by a CUDA graph"""

    def lowered(
        self, query: Tensor, key: Tensor, value: Tensor, *, backward: bool = False
    ) -> tuple[AttentionCall, Runner]:
        captured = query.is_cuda and torch.cuda.is_current_stream_capturing()
        # Lists that a captured backward pass writes exist only once the graph is replayed.
        if self.listed is None or captured > self.captured:
            on_hopper = self.backend == "hopper"
            numbers = 0 if self.selection.memo is None else _frame_of(self.selection, on_hopper).lists.numbers
            self.listed = self._derive(("listed", on_hopper), partial(Listed, self.selection, on_hopper), numbers)
            self.captured = captured
        call = self.call(query, key, value, self.listed.whole_plan if backward else self.listed.plan)
        return call, self.listed.choose(call, self.backend, self.choices)


def _key_side(
    plan: Plan, walk: Walk, first_rows: Tensor, tile: Tensor, lists: Tensor, owners: Tensor, limit: int | None
) -> WalkTables:
    """The direction of dK and dV, tiles (h, t) in starting order. Rows of more than `limit` entries are shared by
    several programs."""
    entries = len(walk.full) // plan.heads
    table = walk.rows[tile + first_rows].long()
    more = 0 if limit is None else entries // limit
    if more and limit is not None:
        work, heavy = _cut(table, tile, limit, more)
    else:
        work = torch.cat([tile[..., None], table, torch.full_like(tile, -1)[..., None]], -1)
        heavy = tile[..., :0, None].expand(-1, -1, 4)
    return WalkTables(
        work=work.flatten(0, 1).int(),
        items=work.shape[1],
        owners=owners,
        heavy=heavy.flatten(0, 1).int(),
        heavy_rows=heavy.shape[1],
        slots=2 * more,
        lists=lists,
        mask_shift=len(walk.full),
        partial=len(walk.mask) > 0,
        mixed=len(owners) < plan.heads,
    )


def _cut(table: Tensor, tile: Tensor, limit: int, more: int) -> tuple[Tensor, Tensor]:
    """Work (C, T + more, 8) of rows (C, T, 6) in pieces of at most `limit` entries, and the long rows (C, more, 4).
    Entries beyond whole multiples of the limit are fewer than `more` pieces, and a long row has two pieces or more."""
    classes, tiles = tile.shape
    full_begin, full_end, _, part_begin, part_end, _ = table.unbind(-1)
    full = full_end - full_begin
    total = full + part_end - part_begin
    pieces = (-(-total // limit)).clamp(min=1)
    last = pieces.cumsum(1)
    split = torch.where(pieces > 1, pieces, 0)
    first_slot = split.cumsum(1) - split

    item = torch.arange(tiles + more, device=tile.device).expand(classes, -1).contiguous()
    at = torch.searchsorted(last, item, right=True)
    used, at = at < tiles, at.clamp(max=tiles - 1)
    of = {name: x.gather(1, at) for name, x in (("full", full), ("total", total), ("pieces", pieces))}
    piece = item - (last - pieces).gather(1, at)
    begin, end = ((piece + side) * of["total"] // of["pieces"] for side in (0, 1))
    full_begin, _, full_base, part_begin, _, part_base = table.gather(1, at[..., None].expand(-1, -1, 6)).unbind(-1)
    columns = [
        torch.where(used, tile.gather(1, at), -1),
        full_begin + torch.minimum(begin, of["full"]),
        full_begin + torch.minimum(end, of["full"]),
        full_base,
        part_begin + (begin - of["full"]).clamp(min=0),
        part_begin + (end - of["full"]).clamp(min=0),
        part_base,
        torch.where(of["pieces"] > 1, first_slot.gather(1, at) + piece, -1),
    ]
    long = pieces > 1
    place = torch.where(long, long.cumsum(1) - 1, more)
    heavy = torch.full((classes, more + 1, 4), -1, dtype=torch.int64, device=tile.device)
    entry = torch.stack([tile, first_slot, pieces, torch.zeros_like(tile)], -1)
    heavy.scatter_(1, place[..., None].expand(-1, -1, 4), entry)
    return torch.stack(columns, -1), heavy[:, :-1]


class ListedPart(LoweredPart):
    """The part of a `Listed` plan for the Hopper kernels; every item has a tile, possibly without an allowed pair."""

    def __init__(self, plan: Plan, items: Items) -> None:
        self.items = items
        self.launches = items.frame.launches
        super().__init__(plan, plan.parts[0], strided=False)

    @cached_property
    def by_query(self) -> ForwardItems:  # pyrefly: ignore[bad-override]
        """The forward's work list."""
        frame, memory, _ = self.items
        items, partial = (frame.lists.by_query.tensor(memory, name) for name in ("items", "partial"))
        return ForwardItems(items, self.part.by_query.full, partial, frame.tile_table, covers=True)

    def _backward_items(self, group: int, by_key: bool) -> BackwardItems:
        part, (frame, memory, key_memory) = self.part, self.items
        assert key_memory is not None
        lists = frame.lists
        # All masks are bands, so that no kernel reads the bits.
        classes, bits = part.head_class, self.masks.bits
        if by_key:
            # Items of all groups share one part of the arena: earlier items of another group are overwritten.
            self._by_group = {key: items for key, items in self._by_group.items() if not key[1]}
            walk, items, partial = part.by_key, lists.held_items(key_memory, group), "partial"
        else:
            # A band holds differences key minus query, and the kernel needs held minus streamed: query minus key.
            walk, items, partial = part.by_query, lists.by_query.tensor(memory, "held"), "turned"
        entries = lists.by_key.tensor(key_memory, partial)
        return BackwardItems(items, classes, walk.rows, walk.full, entries, frame.tile_table, bits)
