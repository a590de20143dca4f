"""Gradients on Hopper GPUs through the Gluon kernels: the lists they read, the memory they need, and their launches.

Two ways lead to dQ. The fused one computes it beside dK and dV, five products a tile pair, and adds it up in a float32
copy of dQ (4 bytes an element, twice the size of dQ) in an order that is not fixed. The other computes it again by
rows, seven products a tile pair, needs no copy, and gives the same bits every time; it is taken unless
`reproducible_gradients(False)` was said.

Parts of a plan run one after another, each with the LSE and delta of the whole rows, which makes its share exact alone.
A plan of one plain part writes every row. Else gradients begin as zeros and every part adds to them, in the order of
the forward turned round: the part that reaches most rows is the last, and adds before it rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..plan.plan import Plan
from . import hopper_backend
from .hopper_backend import LOG2_E, processors
from .hopper_launch import OPTIONS, Launch, Launches, Moved, Place, on_device
from .hopper_split import Split, split
from .hopper_work import HeldWork, Step, Strides, steps_of
from .registry import AttentionCall, Gradients, empty_rows


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """How the kernels are built for one head width."""

    streamed_tile: int
    """Rows of a step; with the head width they must make 64 x 128, one 64 x 64 piece of dQ a warpgroup."""
    stages: int = 2
    stages_by_rows: int = 2
    """Tiles in the ring of dK and dV where dQ is computed by rows, which leaves room for more."""
    held_stages: int = 2
    row_stages: int = 3
    """Tiles in the ring of the kernel that sums dQ by rows, which keeps each a step longer than its first use."""
    registers: int = 240
    """Registers a thread of a multiplying warpgroup gets."""


BACKWARD_CONFIGS = {64: BackwardConfig(128, stages_by_rows=3, row_stages=4), 128: BackwardConfig(64)}


_prepared: WeakKeyDictionary[Plan, dict[tuple[object, ...], PreparedBackward]] = WeakKeyDictionary()


def run_backward(
    call: AttentionCall,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    config: BackwardConfig,
    fused: bool,
) -> Gradients:
    """Gradients of a call that `hopper_backend.why_not` lets pass, with dQ summed beside dK and dV where `fused`."""
    return prepared(call, config)(call, output, lse, grad_output, grad_lse, fused)


def prepared(call: AttentionCall, config: BackwardConfig) -> PreparedBackward:
    """What runs the backward of calls like this one."""
    layout = *hopper_backend.layout_of(call.query, call.key, call.value), call.scale, config
    known = _prepared.setdefault(call.plan, {})
    return known.get(layout) or known.setdefault(layout, PreparedBackward(config))


class PreparedBackward:
    """Backward calls of one plan, scale, configuration and layout of query, key and value.

    Of what they may still differ in so little is left to look up that the host is soon done.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self._config = config
        self._known: dict[tuple[object, ...], BackwardLaunch] = {}

    def __call__(
        self,
        call: AttentionCall,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        fused: bool,
    ) -> Gradients:
        slope = lse if grad_lse is None else grad_lse
        layout = output.stride(), grad_output.stride(), slope.stride(), grad_lse is None, fused
        launch = self._known.get(layout)
        tensors = call.query, call.key, call.value, output, grad_output, lse, slope
        if launch is None or grad_output.data_ptr() % 16:
            if hopper_backend.layout_problem("grad_output", grad_output) is not None:
                # A copy even of what is contiguous, as it may begin where TMA cannot.
                copied = grad_output.clone(memory_format=torch.contiguous_format)
                return self(call, output, lse, copied, grad_lse, fused)
            launch = self._known[layout] = BackwardLaunch(call, tensors, grad_lse is not None, self._config, fused)
        with on_device(call.device):
            return launch(*tensors)


QUERY, KEY, VALUE, OUTPUT, GRAD_OUTPUT, LSE, SLOPE, SPACE, GRAD_QUERY, GRAD_KEY, GRAD_VALUE = range(11)
"""Slots of the tensors that the launches are given; then the pieces of the three gradients, where rows are cut."""
TO_PIECES = 3
"""From the slot of a gradient to that of its pieces."""


class BackwardLaunch:
    """All that backward calls of one plan, layout and configuration share, so that a call computes nothing twice."""

    def __init__(
        self, call: AttentionCall, tensors: tuple[Tensor, ...], lse_grad: bool, config: BackwardConfig, fused: bool
    ) -> None:
        query, plan = call.query, call.plan
        batch, heads, n, d = query.shape
        rows = config.streamed_tile
        device = query.device
        steps = steps_of(plan)
        self.writes_all = len(steps) == 1 and not steps[0].strided
        # Whole blocks of the plan, so that a list may name the part of its last block that lies past the end.
        tiles = -(-n // plan.block_size) * (plan.block_size // rows)
        made = [empty_rows(t, t.shape[-1]) for t in tensors[:3]]
        self.made = [(t.shape, t.stride(), t.dtype, device) for t in made]
        last = steps[0] if len(steps) > 1 else None
        parts = [
            PartBackward(call, config, step, tiles, fused, step is last, self.writes_all) for step in reversed(steps)
        ]
        self.pieces = parts[0].pieces if self.writes_all else []
        self.row_tiles = batch * heads * tiles
        # The sum begins at a multiple of 16 bytes.
        self.o_sum = -(-batch * heads * n // 4) * 4
        o_claimed = self.o_sum + (max((part.sum_floats for part in parts), default=0) if fused else 0)
        self.space = o_claimed + 4, torch.float32, device
        places = Place(SPACE), Place(SPACE, self.o_sum, torch.float32), Place(SPACE, o_claimed, torch.int32)
        like = *tensors, torch.empty(1, device=device), *made
        like += tuple(torch.empty(shape or (0,), dtype=query.dtype, device="meta") for shape in self.pieces)
        prepare = self._prepare(like, places, (rows, d, lse_grad, fused and self.writes_all))
        lists: list[tuple[int, list[Launch]]] = [(0, [prepare])]
        for part in parts:
            if fused and part.adds:
                lists.append((part.sum_floats, []))
            lists[-1][1].extend(part.launches(like, places))
        every = [launch for _, launches in lists for launch in launches]
        self.groups = [
            (clear, Launches(device, launches, () if number else every))
            for number, (clear, launches) in enumerate(lists)
        ]
        """Launches in order, before each group so many floats of the sum to be cleared."""

    def _prepare(self, like: tuple[Tensor, ...], places: tuple[Place, ...], constants: tuple[object, ...]) -> Launch:
        from .hopper_prepare import prepare_bwd_kernel

        query, output, grad_output, slope = (like[slot] for slot in (QUERY, OUTPUT, GRAD_OUTPUT, SLOPE))
        heads, n = query.shape[1:3]
        tiles = self.row_tiles // (query.shape[0] * heads)
        sizes = heads, tiles, n, *output.stride()[:3], *grad_output.stride()[:3], *slope.stride()
        arguments = Place(OUTPUT), Place(GRAD_OUTPUT), Place(LSE), Place(SLOPE), *places, *sizes, *constants
        identity = "prepare", query.device.index, output.dtype, slope.dtype, sizes, constants
        return Launch(prepare_bwd_kernel, identity, self.row_tiles, arguments, like, plain=True)

    def __call__(self, *tensors: Tensor) -> Gradients:
        floats, dtype, device = self.space
        space = torch.empty(floats, dtype=dtype, device=device)
        gradients = Gradients(
            *(torch.empty_strided(shape, strides, dtype=own, device=on) for shape, strides, own, on in self.made)
        )
        pieces = [
            torch.empty(shape, dtype=tensors[QUERY].dtype, device=device) if shape else space for shape in self.pieces
        ]
        if not self.writes_all:
            torch._foreach_zero_(gradients)
        for clear, launches in self.groups:
            if clear:
                space[self.o_sum : self.o_sum + clear].zero_()
            launches(*tensors, space, *gradients, *pieces)
        return gradients


class Side(NamedTuple):
    """dK and dV of a part, or its dQ."""

    work: HeldWork
    cut: Split[HeldWork] | None
    blocks: int
    """Rows of a class in `work.rows`."""
    sizes: tuple[int, ...]
    """What a kernel is given before them, but for its items."""
    settings: tuple[Any, ...]
    """And after."""


class PartBackward:
    """One part of a `BackwardLaunch`; `alone`, it is the only one, so that its long rows may be cut."""

    def __init__(
        self, call: AttentionCall, config: BackwardConfig, step: Step, tiles: int, fused: bool, joins: bool, alone: bool
    ) -> None:
        query, plan = call.query, call.plan
        batch, heads, n, d = query.shape
        group = heads // call.key.shape[1]
        self.batch, self.n = batch, n
        self.rows = config.streamed_tile
        self.joins = joins
        self.adds = joins or step.strided
        self.axes = (step.queries, step.keys) if step.strided else (None, None)
        self.identity = query.device.index, query.dtype, d, plan.block_size, config, fused, step.shape, joins
        own_tiles = step.part.queries.tiles * (plan.block_size // self.rows) if step.strided else tiles
        self.sum_tiles = batch * heads * own_tiles
        self.sum_floats = self.sum_tiles * self.rows * d
        axes = *step.queries, *step.keys
        like = (empty_rows(t, d).stride()[:3] for t in (query, call.key, call.value))
        query_strides, *key_strides = (tuple(stride // 8 for stride in strides) for strides in like)
        scales = call.scale, call.scale * LOG2_E
        self.registers = config.registers
        programs = processors(query.device)
        sizes = heads, group
        stages = config.stages if fused else config.stages_by_rows
        settings = *key_strides[0], *key_strides[1], *scales, plan.block_size, stages, config.held_stages, fused, joins
        work = step.held(group, by_key=True)
        cut = split(step, work, batch, programs, group, by_key=True) if alone else None
        self.by_key = Side(work, cut, step.part.keys.tiles, (*sizes, own_tiles), (n, *axes, *settings))
        self.by_query: Side | None = None
        if not fused:
            work = step.held(group, by_key=False)
            cut = split(step, work, batch, programs) if alone else None
            stages = config.row_stages, config.held_stages
            settings = n, *axes, *query_strides, *scales, plan.block_size, *stages, joins
            self.by_query = Side(work, cut, step.part.queries.tiles, sizes, settings)
        cuts = self.by_query and self.by_query.cut, self.by_key.cut, self.by_key.cut
        rooms = [cut.room(batch, d) if cut else () for cut in cuts]
        self.pieces = rooms if any(rooms) else []
        """Shapes of the pieces of dQ, dK and dV; a gradient whose rows stay whole has none."""
        finish_strides = empty_rows(query, d).stride()[:3]
        self.finish_numbers = heads, own_tiles, n, *finish_strides, step.queries.rate, call.scale
        self.finish_constants = self.rows, d, plan.block_size, step.strided, self.adds

    def launches(self, like: tuple[Tensor, ...], places: tuple[Place, ...]) -> list[Launch]:
        """Its kernels in order; `places` are those of delta, of the sum of dQ, and of the claimed items."""
        from .hopper_backward import attention_dkv_bwd_kernel

        rows, (queries, keys) = self.rows, self.axes
        delta, total, claimed = places
        read = (QUERY, rows, queries), (GRAD_OUTPUT, rows, queries), (KEY, 64, keys), (VALUE, 64, keys)
        written = (GRAD_KEY, keys), (GRAD_VALUE, keys)
        places = Place(LSE), delta, total, claimed
        first = self._side("dkv", attention_dkv_bwd_kernel, read, written, places, self.by_key, like)
        if self.by_query is None:
            return [*first, self._finish(like, total)]
        from .hopper_backward_rows import attention_dq_bwd_kernel

        read = (QUERY, 64, queries), (GRAD_OUTPUT, 64, queries), (KEY, rows, keys), (VALUE, rows, keys)
        written = ((GRAD_QUERY, queries),)
        places = Place(LSE), delta, claimed
        return first + self._side("dq", attention_dq_bwd_kernel, read, written, places, self.by_query, like)

    def _side(
        self,
        name: str,
        kernel: Any,
        read: tuple[tuple[int, int, Strides | None], ...],
        written: tuple[tuple[int, Strides | None], ...],
        places: tuple[Place, ...],
        side: Side,
        like: tuple[Tensor, ...],
    ) -> list[Launch]:
        """A Gluon kernel on all rows; where some are cut, on the others, then on their pieces, which are joined."""
        cut = side.cut
        if cut is None:
            return [self._launch(name, kernel, read, written, places, side, like)]
        from .triton_backward import sum_pieces_bwd_kernel

        apart = tuple((slot + TO_PIECES, axis) for slot, axis in written)
        pieces = side._replace(work=cut.pieces, blocks=cut.slots)
        launches = [
            self._launch(name, kernel, read, written, places, side._replace(work=cut.rest), like),
            self._launch(name, kernel, read, apart, places, pieces, like, pieces=True),
        ]
        for slot, _ in written:
            joined = Place(slot), Place(slot), Place(slot + TO_PIECES)
            launches.append(cut.join(sum_pieces_bwd_kernel, joined, self.batch, self.n, like, like[slot]))
        return launches

    def _launch(
        self,
        name: str,
        kernel: Any,
        read: tuple[tuple[int, int, Strides | None], ...],
        written: tuple[tuple[int, Strides | None], ...],
        places: tuple[Place, ...],
        side: Side,
        like: tuple[Tensor, ...],
        pieces: bool = False,
    ) -> Launch:
        """A Gluon kernel: tensors it reads by TMA with the rows of a move, gradients, places, lists, and numbers.

        A gradient is given by descriptors, or where the part joins what is there, by its address.
        """
        moved = tuple(Moved(*one) for one in read)
        work, items = side.work, len(side.work.items)
        lists = *places[:-1], *_lists(work), places[-1]
        numbers = self.batch * items, items, *side.sizes, side.blocks, *side.settings, pieces, self.registers
        if self.joins:
            gradients = *(None,) * (2 * len(written)), *(Place(slot) for slot, _ in written)
        else:
            gradients = *(Moved(slot, 64, axis) for slot, axis in written), *(None,) * len(written)
        grid = min(numbers[0], processors(like[QUERY].device))
        arguments = *moved, *gradients, *lists, *numbers
        return Launch(kernel, (name, *self.identity, pieces), grid, arguments, like, **OPTIONS)

    def _finish(self, like: tuple[Tensor, ...], total: Place) -> Launch:
        from .hopper_prepare import finish_dq_kernel

        lists = self.by_key.work.tiles, self.by_key.work.classes
        arguments = total, Place(GRAD_QUERY), *lists, *self.finish_numbers, *self.finish_constants
        identity = (
            "finish",
            like[QUERY].device.index,
            like[QUERY].dtype,
            self.finish_numbers[:-1],
            self.finish_constants,
        )
        return Launch(finish_dq_kernel, identity, self.sum_tiles, arguments, like, plain=True)


def _lists(work: HeldWork) -> tuple[Tensor, ...]:
    return work.items, work.classes, work.rows, work.full, work.partial, work.tiles, work.bits
