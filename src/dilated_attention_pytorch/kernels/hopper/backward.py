"""Backward launches of the Hopper backend: lists, workspace and order of the Gluon kernels.

dQ is computed in one of two ways. The fused kernel computes it beside dK and dV with five products per tile pair and
accumulates it in float32 (4 bytes per element of the rows of each part; for a plain part twice the size of dQ), in no
fixed order if `reproducible_gradients(False)` is set. Otherwise it adds in the order of `turns`, or the row-wise kernel
takes its place, which recomputes the scores with seven products per tile pair and needs no copy; both are bitwise
reproducible. `adds_in_turns` decides between them.

Parts of a plan run one after another. Each uses the LSE and delta of whole rows, so its contribution is exact. dK and
dV of a plain part run first and write every row, and other parts add to them; without a plain part they start from
zeros. Row-wise dQ processes the parts from last to first. The first part adds the contributions of the others to its
own before rounding, so that the sum is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...plan.plan import Plan
from ..call import AttentionCall, DeltaGradients, Gradients, empty_rows, saves_memory
from ..launch.launcher import Launches, LaunchStep, PtrArg, Tensors, TmaArg, on_device
from .layouts import LOG2_E, columns_of, layout_of, layout_problem, processors, shared_registers, tile_width
from .lowering import BackwardItems, LoweredPart, Strides, launch_cache, lower
from .split_rows import Split, split
from .turns import in_turns, suits


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Compile-time configuration of the backward kernels for one width of tiles."""

    streamed_tile: int
    """Rows of a streamed tile; times the width 64 x 128, one 64 x 64 piece of dQ per warpgroup."""
    stages: int = 2
    stages_by_rows: int = 2
    """Pipeline stages of dK and dV if dQ is computed by rows, which leaves more shared memory."""
    held_stages: int = 2
    row_stages: int = 3
    """Pipeline stages of the row-wise dQ kernel, which uses each tile in two consecutive steps."""
    registers: int = 240
    """Registers per thread of a consumer warpgroup."""
    programs: int = 1
    """Programs that share a multiprocessor; if two do, dQ is always computed by rows."""
    ordered: bool | None = None
    """Whether reproducible dQ is accumulated beside dK and dV in turns; None decides by plan, see `adds_in_turns`."""


BACKWARD_CONFIGS = {64: BackwardConfig(128, stages_by_rows=3, row_stages=4), 128: BackwardConfig(64, ordered=False)}
SMALL_BLOCK_CONFIGS = {128: BackwardConfig(64, held_stages=1, row_stages=2, programs=2, ordered=False)}
"""Configurations for blocks of 64, where a program has one consumer warpgroup."""


def config_of(call: AttentionCall) -> BackwardConfig:
    """Configuration for a call."""
    return (SMALL_BLOCK_CONFIGS if call.plan.block_size == 64 else BACKWARD_CONFIGS)[tile_width(call)]


def adds_in_turns(plan: Plan, config: BackwardConfig) -> bool:
    """Whether reproducible dQ is accumulated in turns; never if memory is short, for its float32 copy of dQ."""
    if config.ordered is None:
        return not saves_memory() and suits(plan)
    return config.ordered and launch_cache(plan) is plan.memo


def run_backward(
    call: AttentionCall,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    config: BackwardConfig,
    fused: bool,
) -> Gradients:
    """Gradients of a call that `backend.why_not` accepts; dQ is accumulated beside dK and dV if `fused`."""
    return prepared(call, config)(call, output, lse, grad_output, grad_lse, fused)


def prepared(call: AttentionCall, config: BackwardConfig) -> PreparedBackward:
    """Runner of the backward for calls with the plan, layout, scale and configuration of this call."""
    key = "hopper backward", *layout_of(call.query, call.key, call.value), call.scale, config
    cache = launch_cache(call.plan)
    learned = cache is not call.plan.memo
    return cache.get(key) or cache.setdefault(key, PreparedBackward(config, learned))


def lists_of(call: AttentionCall, fused: bool) -> Tensors:
    """Lists of a learned plan, which are arguments of every call."""
    (lowered,) = lower(call.plan)
    group = call.query.shape[1] // call.key.shape[1]
    return *lowered.backward_items(group, by_key=True), *(() if fused else lowered.backward_items(group, by_key=False))


def _movable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if TMA cannot read it; a contiguous tensor may be misaligned, too."""
    if tensor.stride(-1) == 1 and layout_problem("", tensor) is None:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class PreparedBackward:
    """Runner of the backward for one layout, scale and config of a plan, or of learned plans of one shape.

    Launches are cached by the strides of every tensor: a saved-tensor hook such as `save_on_cpu` returns query, key
    and value with other strides than the forward had, and TMA boxes follow from strides.
    """

    def __init__(self, config: BackwardConfig, learned: bool) -> None:
        self._config, self._learned = config, learned
        self._launches: dict[tuple[object, ...], BackwardLaunch] = {}

    def __call__(
        self,
        call: AttentionCall,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        fused: bool,
    ) -> Gradients:
        fused = fused and self._config.programs == 1
        slope = lse if grad_lse is None else grad_lse
        query, key, value = call.query, call.key, call.value
        strides = query.stride(), key.stride(), value.stride(), output.stride(), grad_output.stride(), slope.stride()
        ordered = not fused and adds_in_turns(call.plan, self._config)
        layout = *strides, grad_lse is None, fused, ordered, call.key_padding_mask is None
        launch = self._launches.get(layout)
        tensors = query, key, value, output, grad_output, lse, slope
        if self._learned:
            tensors += lists_of(call, fused)
        tensors += call.padding_bytes
        addresses = query.data_ptr() | key.data_ptr() | value.data_ptr() | grad_output.data_ptr()
        if launch is None or addresses % 16:
            given = query, key, value, grad_output
            movable = [_movable(x) for x in given]
            if any(x is not y for x, y in zip(given, movable, strict=True)):
                *three, grad_output = movable
                call = replace(call, query=three[0], key=three[1], value=three[2])
                return self(call, output, lse, grad_output, grad_lse, fused)
            launch = self._launches[layout] = BackwardLaunch(
                call, tensors, grad_lse is not None, self._config, fused, ordered
            )
        with on_device(call.device):
            grads = launch(*tensors)
        # Delta refers to the whole workspace.
        return Gradients(*grads) if call.sink is None else grads


QUERY, KEY, VALUE, OUTPUT, GRAD_OUTPUT, LSE, SLOPE, SPACE, GRAD_QUERY, GRAD_KEY, GRAD_VALUE = range(11)
"""Slots of the tensors of the launches; then pieces of the gradients, or lists of a learned plan; then padding."""
TO_PIECES = 3
"""Distance from the slot of a gradient to the slot of its pieces."""


class BackwardLaunch:
    """Launches of the backward for calls of one plan, or of learned plans of one shape, of one layout and config.

    The lists of a learned plan and the padding mask follow the tensors of a call.
    """

    def __init__(
        self,
        call: AttentionCall,
        tensors: Tensors,
        lse_grad: bool,
        config: BackwardConfig,
        fused: bool,
        ordered: bool = False,
    ) -> None:
        query, plan = call.query, call.plan
        batch, heads, n, _ = query.shape
        rows = config.streamed_tile
        device = query.device
        all_lowered = lower(plan)
        fused = fused or ordered
        self.writes_all = bool(all_lowered) and all_lowered[0].writes_all
        # Whole blocks of the plan: a list may name sub-tiles of its last block past the end of the sequence.
        tiles = -(-n // plan.block_size) * (plan.block_size // rows)
        made = [empty_rows(t.to("meta"), t.shape[-1]) for t in tensors[:3]]
        self.made = [(t.shape, t.stride()) for t in made]
        group = heads // call.key.shape[1]
        self.joins = not fused and any(
            len(lowered.backward_items(group, by_key=False).items) for lowered in all_lowered[1:]
        )
        last = all_lowered[0] if self.joins else None
        parts = [
            PartBackward(call, config, lowered, tiles, fused, ordered, lowered is last, len(all_lowered) == 1)
            for lowered in all_lowered
        ]
        self.pieces = parts[0].pieces if len(parts) == 1 else []
        self.row_tiles = batch * heads * tiles
        # Accumulators are aligned to 16 bytes.
        o_sum = -(-batch * heads * n // 4) * 4
        sums = list(accumulate((part.sum_floats if fused else 0 for part in parts), initial=o_sum))
        turns = list(accumulate((part.sum_tiles if ordered else 0 for part in parts), initial=sums[-1]))
        o_claimed = turns[-1]
        self.cleared = sums[1 if self.writes_all else 0], o_claimed
        """Range of accumulators and turn counters zeroed before the launches; the first launch zeroes the accumulator
        of a plain part."""
        # Two counters per part, as its kernels may run concurrently; rounded up to a power of two.
        counters = 1 << (2 * len(parts)).bit_length()
        self.floats = o_claimed + counters
        pointers = PtrArg(SPACE), PtrArg(SPACE, o_sum, torch.float32), PtrArg(SPACE, o_claimed, torch.int32)
        like = *tensors[:SPACE], torch.empty(1, device=device), *made
        like += tuple(torch.empty(shape or (0,), dtype=query.dtype, device="meta") for shape in self.pieces)
        like += tensors[SPACE:]
        widths = tile_width(call), call.value.shape[-1]
        padding = None if call.key_padding_mask is None else PtrArg(len(like) - 1)
        prepare = self._prepare(like, pointers, (rows, *widths, lse_grad, fused and self.writes_all, counters))
        delta, _, claimed = pointers
        launches, later = [prepare], []
        for number, (part, begin, o_turns) in enumerate(zip(parts, sums, turns, strict=False)):
            total = PtrArg(SPACE, begin, torch.float32)
            turn = PtrArg(SPACE, o_turns, torch.int32) if ordered else None
            claims = [claimed._replace(begin=claimed.begin + 2 * number + place) for place in range(2)]
            launches += part.launches(part.by_key, like, (PtrArg(LSE), delta, total, turn, padding, claims[0]))
            if part.by_query is None:
                later.append(part.finish(like, total))
            else:
                # From the last part to the first, which adds the contributions of the others.
                later[:0] = part.launches(part.by_query, like, (PtrArg(LSE), delta, padding, claims[1]))
        self.launches = Launches(device, launches + later)

    def _prepare(self, like: Tensors, pointers: tuple[PtrArg, ...], constants: tuple[object, ...]) -> LaunchStep:
        from .pre_post_kernels import prepare_bwd_kernel

        query, output, grad_output, slope = (like[slot] for slot in (QUERY, OUTPUT, GRAD_OUTPUT, SLOPE))
        heads, n = query.shape[1:3]
        tiles = self.row_tiles // (query.shape[0] * heads)
        sizes = heads, tiles, n, *output.stride()[:3], *grad_output.stride()[:3], *slope.stride()
        arguments = PtrArg(OUTPUT), PtrArg(GRAD_OUTPUT), PtrArg(LSE), PtrArg(SLOPE), *pointers, *sizes, *constants
        return LaunchStep(prepare_bwd_kernel, self.row_tiles, arguments, like, plain=True)

    def __call__(self, *tensors: Tensor) -> DeltaGradients:
        dtype, device = tensors[QUERY].dtype, tensors[QUERY].device
        space = torch.empty(self.floats, dtype=torch.float32, device=device)
        gradients = DeltaGradients(*(torch.empty_strided(*one, dtype=dtype, device=device) for one in self.made))
        pieces = [torch.empty(shape, dtype=dtype, device=device) if shape else space for shape in self.pieces]
        if not self.writes_all:
            torch._foreach_zero_(gradients)
        elif self.joins:
            gradients[0].zero_()
        begin, end = self.cleared
        if begin < end:
            space[begin:end].zero_()
        self.launches(*tensors[:SPACE], space, *gradients, *pieces, *tensors[SPACE:])
        gradients.delta = space[: tensors[LSE].numel()].view_as(tensors[LSE])
        return gradients


class KernelArgs(NamedTuple):
    """Kernel of dK and dV, or of dQ, of a part, with its arguments except pointers."""

    kernel: Any
    tma_args: tuple[TmaArg, ...]
    """Tensors read by TMA."""
    written: tuple[TmaArg, ...]
    """Gradients written by TMA."""
    joined: tuple[PtrArg | int | None, ...]
    """For dQ: pointer to the gradient that the result is added to, or None, and its width for `row_pointers`."""
    work: BackwardItems
    cut: Split[BackwardItems] | None
    blocks: int
    """Rows of a head class in `work.rows`."""
    sizes: tuple[int, ...]
    """Integer arguments before `blocks`, except the number of items."""
    settings: tuple[Any, ...]
    """Arguments after `blocks`."""


def _tma_args(slots: tuple[int, ...], rows: int, width: int, axis: Strides | None) -> tuple[TmaArg, ...]:
    return tuple(TmaArg(slot, rows, width, axis) for slot in slots)


class PartBackward:
    """One part of a `BackwardLaunch`. It `joins` dQ of other parts or adds to it; long rows are split if `alone`."""

    def __init__(
        self,
        call: AttentionCall,
        config: BackwardConfig,
        lowered: LoweredPart,
        tiles: int,
        fused: bool,
        ordered: bool,
        joins: bool,
        alone: bool,
    ) -> None:
        from .dkv_kernel import attention_dkv_bwd_kernel
        from .dq_kernel import attention_dq_bwd_kernel

        query, plan = call.query, call.plan
        batch, heads, n, d = query.shape
        width = tile_width(call)
        group = heads // call.key.shape[1]
        self.batch = batch
        rows = config.streamed_tile
        strides = lowered.strides(call)
        queries, keys = strides if lowered.strided else (None, None)
        own_tiles = lowered.part.queries.tiles * (plan.block_size // rows) if lowered.strided else tiles
        self.sum_tiles = batch * heads * own_tiles
        self.sum_floats = self.sum_tiles * rows * width
        # Numbers of queries and of keys, None if both are equal.
        lengths = n, None if call.key.shape[2] == n else call.key.shape[2]
        axes = *lengths, *strides[0], *strides[1]
        scales = call.scale, call.scale * LOG2_E
        self.registers = config.registers
        self.programs = config.programs
        programs = processors(query.device) * config.programs
        sizes = heads, group
        stages = config.stages if fused else config.stages_by_rows
        settings = *scales, plan.block_size, stages, config.held_stages, fused
        work = lowered.backward_items(group, by_key=True)
        cut = split(lowered, work, batch, programs, group, by_key=True) if alone else None
        key_tiles, query_tiles = lowered.part.keys.tiles, lowered.part.queries.tiles
        if ordered and cut:
            works, blocks = (cut.rest, cut.pieces), (key_tiles, cut.slots)
            rest, pieces = in_turns(works, blocks, query_tiles, plan.block_size, group)
            cut = replace(cut, rest=rest, pieces=pieces)
        elif ordered:
            (work,) = in_turns((work,), (key_tiles,), query_tiles, plan.block_size, group)
        tma_args = (
            *_tma_args((QUERY, GRAD_OUTPUT), rows, width, queries),
            *_tma_args((KEY, VALUE), 64, width, keys),
        )
        written = _tma_args((GRAD_KEY, GRAD_VALUE), 64, width, keys)
        lists = work, cut, key_tiles, (*sizes, own_tiles), (*axes, *settings)
        self.by_key = KernelArgs(attention_dkv_bwd_kernel, tma_args, written, (), *lists)
        self.by_query: KernelArgs | None = None
        if not fused:
            work = lowered.backward_items(group, by_key=False)
            cut = split(lowered, work, batch, programs) if alone else None
            stages = config.row_stages, config.held_stages
            settings = *axes, *scales, plan.block_size, *stages
            tma_args = (
                *_tma_args((QUERY, GRAD_OUTPUT), 64, width, queries),
                *_tma_args((KEY, VALUE), rows, width, keys),
            )
            written = _tma_args((GRAD_QUERY,), 64, width, queries)
            joined = (PtrArg(GRAD_QUERY), columns_of(query, width)) if joins else (None, None)
            lists = work, cut, query_tiles, sizes, settings
            self.by_query = KernelArgs(attention_dq_bwd_kernel, tma_args, written, joined, *lists)
        cuts = self.by_query and self.by_query.cut, self.by_key.cut, self.by_key.cut
        widths = d, d, call.value.shape[-1]
        shapes = [cut.piece_shape(batch, one) if cut else () for cut, one in zip(cuts, widths, strict=True)]
        self.pieces = shapes if any(shapes) else []
        """Shapes of the pieces of dQ, dK and dV; empty for a gradient without split rows."""
        self.finish_numbers = heads, own_tiles, n, *empty_rows(query, d).stride()[:3], lowered.queries.rate, call.scale
        self.finish_constants = rows, width, d, plan.block_size, lowered.strided

    def launches(self, args: KernelArgs, like: Tensors, pointers: tuple[PtrArg | None, ...]) -> list[LaunchStep]:
        """Launches of a kernel: all rows; or, if rows are split, whole rows, pieces, and the sum of the pieces."""
        cut = args.cut
        if cut is None:
            return [self._launch(args, like, pointers)]
        from ..triton.backward_kernels import sum_pieces_bwd_kernel

        apart = tuple(one._replace(slot=one.slot + TO_PIECES) for one in args.written)
        pieces = args._replace(written=apart, work=cut.pieces, blocks=cut.slots)
        launches = [self._launch(one, like, pointers) for one in (args._replace(work=cut.rest), pieces)]
        for slot, *_ in args.written:
            joined = PtrArg(slot), PtrArg(slot), PtrArg(slot + TO_PIECES)
            launches.append(cut.join(sum_pieces_bwd_kernel, joined, like, like[slot]))
        return launches

    def _launch(self, args: KernelArgs, like: Tensors, pointers: tuple[PtrArg | None, ...]) -> LaunchStep:
        """Launch of a Gluon kernel; `pointers`: LSE, delta, for dK and dV sum and turns of dQ, padding, the counter."""
        work, items = args.work, len(args.work.items)
        pieces = args.cut is not None and work is args.cut.pieces
        numbers = self.batch * items, items, *args.sizes, args.blocks, *args.settings, pieces, self.registers
        arguments = *args.tma_args, *args.written, *args.joined, *pointers[:-2], *work, *pointers[-2:], *numbers
        grid = min(numbers[0], processors(like[QUERY].device) * self.programs)
        options = shared_registers(self.programs)
        return LaunchStep(args.kernel, grid, arguments, like, overlaps=args.cut is None, options=options)

    def finish(self, like: Tensors, total: PtrArg) -> LaunchStep:
        """Launch of the kernel that converts the accumulator to dQ."""
        from .pre_post_kernels import finish_dq_kernel

        lists = self.by_key.work.tiles, self.by_key.work.classes
        arguments = total, PtrArg(GRAD_QUERY), *lists, *self.finish_numbers, *self.finish_constants
        return LaunchStep(finish_dq_kernel, self.sum_tiles, arguments, like, plain=True)
