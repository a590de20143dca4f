"""Hopper backend: supported calls, and launches of the Gluon forward kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...plan.subset import head_entries, longest_row
from ..call import AttentionCall, Extent, Forward, Gradients, empty_rows, reproducible_gradients
from ..launch.launcher import Launches, LaunchStep, PtrArg, Tensors, TmaArg, on_device
from ..sink import scale_by_sink
from .layouts import (
    LOG2_E,
    TILE_WIDTHS,
    columns_of,
    layout_of,
    processors,
    shared_registers,
    stride_problem,
    tile_width,
    tma_strides,
)
from .lowering import ForwardItems, LoweredPart, launch_cache, lower
from .split_rows import ROWS_A_PIECE, split

if TYPE_CHECKING:
    from .backward import PreparedBackward

RUNS_OF_ROWS = True
MOST_TOKENS = 2**30
"""Longest sequence: token numbers are 32-bit, and a tile of a strided axis may reach past the end of the sequence."""


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """Compile-time configuration of the forward kernel for one width of tiles."""

    key_tile: int = 128
    k_stages: int = 2
    v_stages: int = 2
    """At most `k_stages`: the barrier of a key slot also signals that a value slot is free."""
    ping_pong: bool = True
    """Whether the two consumer warpgroups alternate on the tensor cores."""
    registers: int = 240
    """Registers per thread of a consumer warpgroup."""
    persistent: bool = True
    """Whether a program processes items until none is left, or a single item."""
    programs: int = 1
    """Programs that share a multiprocessor, and its registers and shared memory."""


FORWARD_CONFIGS = {
    64: ForwardConfig(k_stages=4, v_stages=4),
    128: ForwardConfig(k_stages=3, v_stages=2),
}
SMALL_BLOCK_CONFIGS = {128: ForwardConfig(64, k_stages=3, v_stages=2, ping_pong=False, programs=2)}
"""Configurations for blocks of 64, where a program has one consumer warpgroup."""
STRIDED_CONFIGS = {64: FORWARD_CONFIGS[64], 128: ForwardConfig(k_stages=2, v_stages=2)}
SMALL_STRIDED_CONFIGS = {128: replace(SMALL_BLOCK_CONFIGS[128], k_stages=2)}
"""Configurations for strided parts, which also hold the rows of the previous output in shared memory."""


def gluon_missing() -> str | None:
    """Reason why the Gluon kernels cannot be imported, or None."""
    try:
        import triton
    except ImportError:
        return "needs triton, which is not installed"
    version = tuple(int(word) for word in triton.__version__.split(".")[:2])
    if version < (3, 6):
        return f"needs triton >= 3.6 for its Gluon language, got {triton.__version__}"
    try:
        from . import forward_kernel as hopper_forward  # noqa: F401
    except (ImportError, AttributeError) as problem:
        return f"triton {triton.__version__} lacks part of the Gluon language: {problem}"
    return None


@lru_cache(maxsize=64)
def device_problem(device: torch.device) -> str | None:
    """Reason why the kernels cannot run on a device, or None."""
    if device.type != "cuda":
        return f"needs a CUDA tensor, got {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"needs a GPU of compute capability 9.x, got {major}.{minor}"
    return gluon_missing()


def why_not(call: AttentionCall) -> str | None:
    """Reason why the Hopper kernels cannot run the call, or None."""
    cache = launch_cache(call.plan)
    key = "hopper why_not", *layout_of(call.query, call.key, call.value)
    if key not in cache:
        cache[key] = _lasting_problem(call)
    problem = cache[key]
    if problem is not None:
        return problem
    if call.dropout_p:
        return "has no dropout; pass dropout_p=0.0"
    if (call.query.data_ptr() | call.key.data_ptr() | call.value.data_ptr()) % 16:
        return "needs tensors that start at multiples of 16 bytes"
    return None


def _lasting_problem(call: AttentionCall) -> str | None:
    """Reason why no call of this plan and layout can run, or None."""
    n, keys = call.query.shape[2], call.key.shape[2]
    if n != keys and (n > keys or keys != call.plan.n):
        # Queries gathered by selected block: their plan lists keys of another axis, which the host may not read here.
        return f"needs as many keys as queries, got {keys} and {n}"
    problem = device_problem(call.query.device)
    if problem is not None:
        return problem
    if call.query.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, got {call.query.dtype}"
    d, e = call.query.shape[-1], call.value.shape[-1]
    if d % 8 or e % 8 or max(d, e) > TILE_WIDTHS[-1]:
        return f"needs query and value widths that are multiples of 8 up to {TILE_WIDTHS[-1]}, got {d} and {e}"
    plan = call.plan
    strided = any(lowered.strided for lowered in lower(plan))
    if plan.block_size not in ((64, 128) if strided else (64, 128, 256)):
        return f"needs block size 64 or 128, or 256 where tiles lie at its multiples, got {plan.block_size}"
    if plan.block_size == 64 and max(d, e) <= 64:
        return f"needs a query or value width above 64 for blocks of 64, got {d} and {e}"
    if plan.n > MOST_TOKENS:
        return f"needs n <= {MOST_TOKENS}, got {plan.n}"
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        problem = stride_problem(name, tensor)
        if problem is not None:
            return problem
    return None


def workspace(call: AttentionCall, direction: str, extent: Extent) -> int:
    """Upper bound of the bytes besides results; see `registry.Backend`."""
    d, e, block, parts = call.query.shape[3], call.value.shape[3], call.plan.block_size, call.plan.parts
    item, wide = call.query.dtype.itemsize, call.compute_dtype.itemsize
    width = wide + item * (e if direction == "forward" else 2 * d + e)
    pieces = _most_pieces(call, extent) * block * width
    if direction == "forward":
        signed = 0 if call.scale > 0 else item * d * extent.queries
        return pieces + signed
    from .backward import adds_in_turns, config_of

    # Delta of every row of whole blocks; for sums beside dK and dV also dQ in float32, once per part, and its turns.
    tile, config = tile_width(call), config_of(call)
    in_turns = reproducible_gradients() and adds_in_turns(call.plan, config)
    sums = tile + 1 if in_turns else 0 if reproducible_gradients() or config.programs > 1 else tile
    tiles = [part.queries.tiles for part in parts]
    blocks = max(-(-call.plan.n // block), sum(tiles) if sums else max(tiles, default=0))
    padded = -(-blocks * block * 4 // call.plan.n)
    if extent.pairs is not None:
        # Every tile of a run has a pair, except for those of rows without keys.
        blocks = min(blocks, extent.pairs + -(-extent.queries // block))
        padded = -(-blocks * block * 4 // extent.queries)
    return (padded * (sums + 1) + item * e + 4) * extent.queries + pieces


def _most_pieces(call: AttentionCall, extent: Extent) -> int:
    """Upper bound of the blocks of all pieces of long rows."""
    parts, block = call.plan.parts, call.plan.block_size
    programs = processors(call.device) * config_of(call).programs
    rows = extent.samples * extent.heads
    tiles = max((max(part.queries.tiles, part.keys.tiles) for part in parts), default=0)
    if extent.pairs is not None:
        # A run of rows may have tiles of one part only, and has less work to share.
        tiles = min(tiles, -(-max(extent.queries, extent.keys) // block))
    elif len(parts) != 1 or longest_row(parts[0]) <= rows * min(head_entries(parts[0])) // programs:
        return 0
    return rows * min(programs, tiles // ROWS_A_PIECE)


def forward(call: AttentionCall) -> Forward:
    """Output and LSE of a call that `why_not` accepts."""
    return run_forward(call, config_of(call))


def config_of(call: AttentionCall, strided: bool = False) -> ForwardConfig:
    """Configuration for the plain or strided parts of a call."""
    configs = (FORWARD_CONFIGS, STRIDED_CONFIGS), (SMALL_BLOCK_CONFIGS, SMALL_STRIDED_CONFIGS)
    return configs[call.plan.block_size == 64][strided][tile_width(call)]


def run_forward(call: AttentionCall, config: ForwardConfig) -> Forward:
    """`forward` with an explicit configuration for plain parts, for benchmarks."""
    return _launch_of(call, config)(call)


def _launch_of(call: AttentionCall, config: ForwardConfig) -> ForwardLaunch:
    padded = call.key_padding_mask is not None
    key = "hopper forward", *layout_of(call.query, call.key, call.value), call.scale, id(config), padded
    key += (None if call.sink is None else call.sink.dtype,)
    cache = launch_cache(call.plan)
    return cache.get(key) or cache.setdefault(key, ForwardLaunch(call, config))


class ForwardLaunch:
    """Launches of the forward for one layout, scale and config of a plan, or of learned plans of one shape."""

    def __init__(self, call: AttentionCall, config: ForwardConfig) -> None:
        # The maximum of a row of scores commutes with a positive scale alone: the queries carry the sign. The backward
        # has no maximum, and its kernels multiply by the scale itself.
        self.sign = (call.scale > 0) - (call.scale < 0)
        query = self._signed(call.query)
        parts = lower(call.plan)
        self.device, self.width = query.device, call.value.shape[-1]
        # An expanded scalar: `empty_like` of it is cheaper than `empty` with its arguments.
        self.lse_like = torch.zeros(1, dtype=torch.float32, device=query.device).expand(query.shape[:3])
        self.covers = bool(parts) and not parts[0].strided and parts[0].by_query.covers
        self.learned = bool(parts) and parts[0].launches is not None
        self.counters = max(len(parts), 1)
        # Later parts add to the output of earlier ones, so that the sink joins behind the last.
        self.scales = call.sink is not None and not (len(parts) == 1 and not parts[0].strided)
        self.pieces: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
        programs = processors(query.device) * config.programs
        cut = split(parts[0], parts[0].by_query, len(query), programs) if len(parts) == 1 else None
        if cut is not None:
            shape = cut.piece_shape(len(query), call.value.shape[-1])
            self.pieces = (shape, query.dtype), (shape[:3], torch.float32)
        # Of LSE and counters only the element sizes matter.
        output = self._empty_output(torch.empty_like(query, device="meta"))
        made = output, *(torch.empty(0, device="meta") for _ in range(2))
        pieces = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self.pieces)
        like = query, call.key, call.value, *made, *pieces, *self._given(call)
        sink = None if call.sink is None or self.scales else PtrArg(len(like) - 1)
        padding = None if call.key_padding_mask is None else PtrArg(len(like) - (1 if call.sink is None else 2))
        if cut is None:
            strided = config_of(call, strided=True)
            launches = [
                _part_launch(
                    call, strided if lowered.strided else config, lowered, lowered.by_query, like, padding, sink, number
                )
                for number, lowered in enumerate(parts)
            ]
        else:
            from ..triton.forward_kernels import merge_pieces_kernel

            places = PtrArg(OUTPUT), PtrArg(LSE), PtrArg(LSE), PtrArg(PIECES), PtrArg(PIECE_LSE), sink
            launches = [
                _part_launch(call, config, parts[0], work, like, padding, added)
                for work, added in ((cut.rest, sink), (cut.pieces, None))
            ]
            launches.append(cut.join(merge_pieces_kernel, places, like, like[OUTPUT]))
        self.launches = Launches(query.device, launches)

    def _given(self, call: AttentionCall) -> tuple[Tensor, ...]:
        """Lists of a learned plan, the padding mask and the sink, which are arguments of every call."""
        lists = (*lower(call.plan)[0].by_query[:-1], call.plan.masks.bits) if self.learned else ()
        return *lists, *call.padding_bytes, *(() if call.sink is None else (call.sink,))

    def _signed(self, query: Tensor) -> Tensor:
        """Queries times the sign of the scale, so that its magnitude gives the same scores."""
        return query if self.sign == 1 else query.detach() * self.sign

    def _empty_output(self, query: Tensor) -> Tensor:
        """Uninitialised output, densely in the memory order of the query."""
        return torch.empty_like(query) if query.shape[-1] == self.width else empty_rows(query, self.width)

    def __call__(self, call: AttentionCall) -> Forward:
        query = self._signed(call.query)
        output = self._empty_output(query)
        if self.covers:
            lse = torch.empty_like(self.lse_like, memory_format=torch.contiguous_format)
        else:
            output.zero_()
            lse = torch.full_like(self.lse_like, -math.inf, memory_format=torch.contiguous_format)
        with on_device(self.device):
            counters = item_counters(self.device, self.counters)
            pieces = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.pieces]
            self.launches(query, call.key, call.value, output, lse, counters, *pieces, *self._given(call))
        if self.scales and call.sink is not None:
            scale_by_sink(output, lse, call.sink)
        return Forward(output, lse)


_counters: dict[tuple[int, int], Tensor] = {}


def item_counters(device: torch.device, count: int) -> Tensor:
    """`count` int32 counters, zero between launches: every kernel resets its own. Calls on one stream share them."""
    if torch.cuda.is_current_stream_capturing():
        # A captured call may be replayed beside any other, so it has its own counters.
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    counters = _counters.get(key)
    if counters is None or counters.numel() < count:
        counters = _counters[key] = torch.zeros(count, dtype=torch.int32, device=device)
    return counters


QUERY, KEY, VALUE, OUTPUT, LSE, COUNTERS, PIECES, PIECE_LSE = range(8)
"""Slots of the tensors of a forward launch; then pieces of split rows, or the lists of a learned plan; then padding."""


def _part_launch(
    call: AttentionCall,
    config: ForwardConfig,
    lowered: LoweredPart,
    work: ForwardItems,
    like: Tensors,
    padding: PtrArg | None,
    sink: PtrArg | None,
    number: int | None = None,
) -> LaunchStep:
    """Launch of one part of a plan (`number` is its index among several), or of the pieces of its long rows."""
    from .forward_kernel import WORK_WIDTH, attention_fwd_kernel

    query, key, plan = call.query, call.key, call.plan
    batch, heads, n, _ = query.shape
    items_a_batch = work.items.shape[0]
    items = batch * items_a_batch
    # The record of a piece also holds the tile that it is stored to.
    pieces = not lowered.strided and work.items.shape[1] > WORK_WIDTH.value
    axes = lowered.strides(call)
    queries, keys = axes if lowered.strided else (None, None)
    width = tile_width(call)
    arguments = (
        TmaArg(QUERY, 64, width, queries),
        TmaArg(KEY, config.key_tile, width, keys),
        TmaArg(VALUE, config.key_tile, width, keys),
        TmaArg(PIECES if pieces else OUTPUT, 64, width, queries),
        PtrArg(OUTPUT) if lowered.strided else None,
        PtrArg(PIECE_LSE if pieces else LSE),
        sink,
        *(*work[:-1], plan.masks.bits, padding, PtrArg(COUNTERS, number or 0, torch.int32)),
        *(items, items_a_batch, heads, heads // key.shape[1], n, None if key.shape[2] == n else key.shape[2]),
        *(stride // 8 for stride in tma_strides(like[OUTPUT])[:3]),
        columns_of(like[OUTPUT], width) if lowered.strided else None,
        *(*axes[0], *axes[1], (abs(call.scale) or 1.0) * LOG2_E),
        *(plan.block_size, config.k_stages, config.v_stages, config.ping_pong, config.persistent),
        *(pieces, config.registers),
    )
    grid = min(items, processors(query.device) * config.programs) if config.persistent else items
    options = shared_registers(config.programs)
    return LaunchStep(attention_fwd_kernel, grid, arguments, like, overlaps=number is not None, options=options)


class PreparedAttention:
    """Runner for calls of one plan, layout and scale; see `registry.Backend`."""

    def __init__(self, forward: ForwardLaunch, backward: PreparedBackward) -> None:
        self.forward = forward
        self._backward = backward

    def backward(
        self, call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        return self._backward(call, output, lse, grad_output, grad_lse, not reproducible_gradients())


def prepare(call: AttentionCall) -> PreparedAttention:
    """Runner for calls like this one, which `why_not` must accept."""
    from . import backward

    return PreparedAttention(_launch_of(call, config_of(call)), backward.prepared(call, backward.config_of(call)))


def import_kernels() -> None:
    """Import the kernels and hash the one that every first call compiles; see `launch.warmup`."""
    from .forward_kernel import attention_fwd_kernel

    _ = attention_fwd_kernel.cache_key


def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients of a call that `why_not` accepts; see the module `backward`."""
    from .backward import config_of, run_backward

    config = config_of(call)
    return run_backward(call, output, lse, grad_output, grad_lse, config, not reproducible_gradients())
