"""Attention within a memory budget: chunks of samples and heads, or of the rows of one head.

A chunk is a run of samples, or of the key heads of one sample, with all the queries that read them; a *unit* is one key
head of one sample. No sum crosses such chunks in either direction. The size of a chunk may still change the last bit on
the backends `cpu` and `reference`, which use torch's matrix products, and on `hopper`, which sums dQ by query tile to
save memory. A chunk smaller than a unit is a run of rows of one query head; the gradients of its keys are then summed
over the runs.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import must, must_be
from ..kernels.call import (
    AttentionCall,
    BiasedGradients,
    Extent,
    Forward,
    Gradients,
    Runner,
    empty_rows,
    reproducible_gradients,
    saves_memory,
    saving_memory,
)
from ..kernels.registry import backend_named
from ..kernels.sink import CallGradients, backward_with_sink
from ..patterns import Pattern
from ..plan.subset import Span, of_heads, of_rows, spans, widest_tile

CACHE_SIZE = 256
WORDS = {"forward": "output", "backward": "gradients"}
UNSPLIT = 2**20
"""Most bytes by which torch's CUDA allocator exceeds the size of a large tensor."""

Result = TypeVar("Result", Forward, CallGradients)


class Memory(NamedTuple):
    """Upper bound of the memory of one direction of a call on a backend."""

    sizes: dict[int, int]
    """Bytes by chunk size in query rows; each size is about half of the one before."""

    def fitting(self, budget: int) -> int | None:
        """Largest chunk size that fits a budget, or None."""
        return next((size for size, most in self.sizes.items() if most <= budget), None)


def check_budget(memory_budget: int | float | None) -> None:
    """Validate a memory budget."""
    if memory_budget is None:
        return
    advice = "Give bytes as an int, or a fraction of the free memory as a float."
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, int | float):
        raise must_be("memory_budget must be a number", type(memory_budget).__name__, advice)
    fraction = isinstance(memory_budget, float) and memory_budget <= 1
    if not (0 if fraction else 4095) < memory_budget < float("inf"):
        raise must("memory_budget must be bytes, or a fraction in (0, 1]", memory_budget, advice)


def forward(call: AttentionCall, name: str, runner: Runner, memory_budget: int | float) -> Forward:
    """`runner.forward` in as many chunks as the budget needs."""

    def run(size: int) -> Forward:
        if size == _rows(call):
            return runner.forward(call)
        output = empty_rows(call.query, call.value.shape[-1])
        lse = call.query.new_empty(call.query.shape[:3], dtype=call.compute_dtype)
        for chunk in _chunks(call, size):
            result = runner.forward(chunk.call)
            output[chunk.own], lse[chunk.own] = (t[:, :, chunk.inside] for t in result)
            # Free the results of one chunk before the next is computed.
            del result
        return Forward(output, lse)

    return _within("forward", call, name, memory_budget, run)


def backward(
    call: AttentionCall,
    name: str,
    runner: Runner,
    memory_budget: int | float,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
) -> CallGradients:
    """`backward_with_sink` in as many chunks as the budget needs."""

    bias_sum, sink_sum = (
        None if x is None else torch.zeros_like(x, dtype=torch.float64) for x in (call.bias, call.sink)
    )

    def of(chunk: _Chunk) -> Gradients:
        at = chunk.queries
        slope = None if grad_lse is None else chunk.alone(grad_lse[at])
        # Kernels require a contiguous LSE.
        tensors = output[at], lse[at].contiguous(), chunk.alone(grad_output[at]), slope
        sink = chunk.call.sink
        # Its gradient has the dtype of the LSE: the sum alone is rounded to that of the sink.
        one = chunk.call if sink is None else replace(chunk.call, sink=sink.to(call.compute_dtype))
        grads, grad_sink = backward_with_sink(runner, one, *tensors)
        if sink_sum is not None and grad_sink is not None:
            sink_sum[at[1]] += grad_sink
        if bias_sum is not None:
            assert isinstance(grads, BiasedGradients)
            own, table = bias_sum[at[1]], grads.bias.to(bias_sum.dtype)
            own.add_(table) if chunk.entries is None else own.index_add_(1, chunk.entries, table)
        return grads

    def by_rows(whole: Gradients, unit: tuple[slice, ...], chunks: Iterator[_Chunk]) -> None:
        sums = [_zeros(grad[unit], call.compute_dtype) for grad in whole[1:]]
        for chunk in chunks:
            result = of(chunk)
            whole.query[chunk.own] = result.query[:, :, chunk.inside]
            for index, total in enumerate(sums, 1):
                total[:, :, chunk.keys[2]] += result[index]
            del result
        for grad, total in zip(whole[1:], sums, strict=True):
            grad[unit] = total

    def run(size: int) -> CallGradients:
        if size == _rows(call):
            return backward_with_sink(runner, call, output, lse, grad_output, grad_lse)
        whole = Gradients(*(empty_rows(t, t.shape[-1]) for t in (call.query, call.key, call.value)))
        for total in (bias_sum, sink_sum):
            if total is not None:
                total.zero_()
        if size >= _unit_rows(call):
            for chunk in _chunks(call, size):
                whole.query[chunk.own], whole.key[chunk.keys], whole.value[chunk.keys] = of(chunk)
        else:
            for unit, chunks in groupby(_chunks(call, size), lambda chunk: chunk.keys[:2]):
                by_rows(whole, unit, chunks)
        if bias_sum is not None:
            whole = BiasedGradients(*whole, bias_sum.to(call.compute_dtype))
        return CallGradients(whole, None if sink_sum is None or call.sink is None else sink_sum.to(call.sink.dtype))

    return _within("backward", call, name, memory_budget, run)


def _zeros(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero accumulator of rows: the rows themselves if they have the dtype of sums."""
    return rows.zero_() if rows.dtype == dtype else torch.zeros_like(rows, dtype=dtype)


Slices = tuple[slice, slice, slice]
"""Samples, heads, rows."""


class _Chunk(NamedTuple):
    """Portion of a call that is computed at a time."""

    call: AttentionCall
    queries: Slices
    """Queries that are read."""
    keys: Slices
    """Keys that are read."""
    own: Slices
    """Queries whose results are stored; others are read because they share tiles with them."""
    entries: Tensor | None = None
    """Entries of the bias table that make up the chunk's table; None if it is the whole one of its heads."""

    @property
    def inside(self) -> slice:
        """Own rows relative to the rows that are read."""
        begin = self.queries[2].start
        return slice(self.own[2].start - begin, self.own[2].stop - begin)

    def alone(self, grads: Tensor) -> Tensor:
        """Gradients of the rows that are read, 0 for rows that are not own."""
        if self.own == self.queries:
            return grads
        own = torch.zeros_like(grads, memory_format=torch.contiguous_format)
        own[:, :, self.inside] = grads[:, :, self.inside]
        return own


def _rows(call: AttentionCall) -> int:
    return call.query.shape[:3].numel()


def _unit_rows(call: AttentionCall) -> int:
    return _rows(call) // call.key.shape[:2].numel()


def _chunks(call: AttentionCall, size: int) -> Iterator[_Chunk]:
    """Chunks of at most `size` query rows; chunks of one key head are consecutive."""
    batch, heads, n, _ = call.query.shape
    key_heads = call.key.shape[1]
    shared, units = heads // key_heads, size // _unit_rows(call)
    samples, group = max(1, units // key_heads), min(max(1, units), key_heads)
    every = slice(0, n)
    for sample in range(0, batch, samples):
        some = slice(sample, min(sample + samples, batch))
        for first in range(0, key_heads, group):
            keys = some, slice(first, min(first + group, key_heads)), every
            own = slice(first * shared, keys[1].stop * shared)
            if units:
                queries = some, own, every
                yield _Chunk(_cut(call, queries, keys), queries, keys, queries)
                continue
            for head in range(own.start, own.stop):
                one = slice(head, head + 1)
                alone = _cut(call, (some, one, every), keys)
                for span in spans(call.plan, size):
                    by_row = call.bias if call.bias_positions is None and size < n else None
                    entries = None if by_row is None else _entries(by_row, span)
                    yield _Chunk(
                        _of_span(call, alone, span, head, entries),
                        (some, one, slice(span.first, span.last)),
                        (*keys[:2], slice(span.key_first, span.key_last)),
                        (some, one, slice(span.begin, span.end)),
                        entries,
                    )


def _cut(call: AttentionCall, queries: Slices, keys: Slices) -> AttentionCall:
    begin, end = queries[1].start, queries[1].stop
    mask, seed, pattern, at = call.key_padding_mask, call.seed, call.pattern, call.bias_positions
    stream = queries[0].start * call.plan.heads + begin
    return replace(
        call,
        query=call.query[queries],
        key=call.key[keys],
        value=call.value[keys],
        plan=of_heads(call.plan, begin, end),
        key_padding_mask=None if mask is None else mask[queries[0]],
        # Dropout adds the index of sample and head to the upper half of the seed, so the seed is shifted by it.
        seed=None if seed is None else seed + (stream << 32),
        positions=None if call.positions is None else call.positions[:, begin:end],
        bias=None if call.bias is None else call.bias[begin:end],
        bias_positions=at if at is None or len(at) == 1 else at[queries[0]],
        sink=None if call.sink is None else call.sink[begin:end],
        pattern=pattern if pattern is None or end - begin == call.plan.heads else _OfHeads(pattern, begin),
    )


def _entries(bias: Tensor, span: Span) -> Tensor:
    """Entries of a bias table by distances of row numbers in a span, whose queries and keys begin at two tokens."""
    shift, radius = span.key_first - span.first, bias.shape[1] // 2
    reach = min(radius + abs(shift), span.key_last - span.key_first)
    return (torch.arange(-reach, reach + 1, device=bias.device) + shift + radius).clamp_(0, 2 * radius)


def _of_span(call: AttentionCall, alone: AttentionCall, span: Span, head: int, entries: Tensor | None) -> AttentionCall:
    """A run of rows of one head's call."""
    if span.end - span.begin == call.plan.n:
        return alone
    assert isinstance(call.pattern, Pattern)
    queries, keys = slice(span.first, span.last), slice(span.key_first, span.key_last)
    positions = None
    if call.dropout_p:
        token = torch.arange(call.plan.n, device=call.device)
        at, key_at = (token, token) if alone.positions is None else alone.positions[:, 0]
        positions = torch.stack([torch.zeros_like(key_at[keys]), key_at[keys]])[:, None]
        positions[0, 0, : span.last - span.first] = at[queries]
    places = alone.bias_positions
    if places is not None:
        # Rows of a span are other tokens as queries than as keys. Spans belong to one sample and one head.
        at = F.pad(places[:, queries], (0, 0, 0, span.key_last - span.key_first - (span.last - span.first)))
        places = torch.stack([at, places[:, keys]])
    return replace(
        alone,
        query=alone.query[:, :, queries],
        key=alone.key[:, :, keys],
        value=alone.value[:, :, keys],
        plan=of_heads(of_rows(call.plan, call.pattern, span), head, head + 1),
        key_padding_mask=None if alone.key_padding_mask is None else alone.key_padding_mask[:, keys],
        positions=positions,
        bias=alone.bias if alone.bias is None or entries is None else alone.bias[:, entries],
        bias_positions=places,
        pattern=None,
    )


class _OfHeads(NamedTuple):
    """A resolved pattern whose heads are counted from one of the whole pattern's."""

    pattern: Any
    first: int

    def resolve(self, n: int, heads: int) -> _OfHeads:
        return self

    def multiplicity(self, q: Tensor, k: Tensor, head: int) -> Tensor:
        return self.pattern.multiplicity(q, k, self.first + head)


def memory(call: AttentionCall, name: str, direction: str) -> Memory:
    """Upper bound of the memory of a direction of a call on a backend; cached in the plan."""
    shapes = call.query.shape, call.value.shape, call.query.dtype, call.dropout_p > 0, call.pattern is None
    shapes += call.softcap > 0, None if call.bias is None else call.bias.shape, call.bias_positions is None
    shapes += (call.sink is None,)
    key = "memory", direction, name, *shapes, call.scale > 0, torch.get_num_threads()
    key += reproducible_gradients(), saves_memory()
    if key not in call.plan.memo:
        call.plan.memo[key] = Memory(_sizes(call, name, direction))
    return call.plan.memo[key]


def _sizes(call: AttentionCall, name: str, direction: str) -> dict[int, int]:
    backend = backend_named(name)
    batch, heads, n, d = call.query.shape
    key_heads, e = call.value.shape[1], call.value.shape[3]
    item, wide = call.query.dtype.itemsize, call.compute_dtype.itemsize
    units, unit, shared = batch * key_heads, _unit_rows(call), heads // key_heads
    a_row, a_key = (item * e + wide, 0) if direction == "forward" else (item * d, item * (d + e))
    results = units * (unit * a_row + n * a_key)
    if call.bias is not None and direction == "backward":
        # Float64 sums of the table, the sums of a chunk in both dtypes, and the result.
        results += (16 + 2 * wide) * call.bias.numel()

    def in_chunks(chunk: Extent, *more: int, call: AttentionCall = call) -> int:
        # Results of a chunk are separate until they are copied; a seed and other small tensors are negligible.
        apart = chunk.queries * a_row + chunk.keys * a_key if chunk.queries < units * unit else 0
        total = results + apart + backend.workspace(call, direction, chunk) + sum(more) + 1024
        if call.sink is not None:
            # The LSE and its gradient with the sink, delta, and what they are computed from: for the products of rows,
            # three tensors of one head.
            total += 8 * wide * chunk.queries
            total += 3 * wide * e * (chunk.queries // chunk.heads) if direction == "backward" else 0
        return total + min(total, 10 * UNSPLIT) if call.device.type == "cuda" else total

    sizes = {}
    some = units
    while some:
        extent = Extent(some * unit, some * n, -(-some // key_heads), min(some, key_heads) * shared)
        sizes[some * unit] = in_chunks(extent)
        some //= 2
    by_rows = getattr(backend, "RUNS_OF_ROWS", False) and isinstance(call.pattern, Pattern)
    least = widest_tile(call.plan) if by_rows else n
    rows = n if shared > 1 else _halved(n, least)
    while rows:
        runs = spans(call.plan, rows)
        queries, keys = max(s.last - s.first for s in runs), max(s.key_last - s.key_first for s in runs)
        pairs = max(s.pairs for s in runs) if rows < n else None
        # Tokens for dropout; sums of dK and dV of a key head, to which a CPU adds a share in another dtype by way of a
        # copy; gradients and LSE of the rows without their neighbours'.
        tokens = 48 * n if call.dropout_p else 0
        sums = wide * (n * (d + e) + keys * max(d, e)) if direction == "backward" and item != wide else 0
        edges = queries * (item * e + 2 * wide) if direction == "backward" else 0
        own, tables = call, 0
        if call.bias_positions is not None and rows < n:
            tables = 3 * 8 * keys * call.bias_positions.shape[-1]
        elif call.bias is not None and rows < n:
            own = replace(call, bias=call.bias.new_empty(1, 2 * keys + 1, device="meta"))
            tables = (16 + 2 * wide) * (2 * keys + 1)
        sizes[rows] = in_chunks(Extent(queries, keys, 1, 1, pairs), tokens, sums, edges, tables, call=own)
        rows = _halved(rows, least)
    return sizes


def _halved(rows: int, least: int) -> int:
    """Half of `rows` in multiples of `least`, 0 if `rows` is at most `least`."""
    return -(-rows // (2 * least)) * least if rows > least else 0


def memory_of(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a device; on a CPU within the limits of the container and of `ulimit`."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        free, total = fields["MemAvailable"], fields["MemTotal"]
    except (OSError, KeyError, IndexError, ValueError):
        raise must("memory_budget must be in bytes where free memory is unknown", f"a fraction on {device}") from None
    for limit, used in _limits():
        free, total = min(free, max(limit - used, 0)), min(total, limit)
    return free, total


def _limits() -> Iterator[tuple[int, int]]:
    """Limits on the memory of this process, each with its current use."""
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        yield int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
    with suppress(ImportError, OSError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            yield limit, status_bytes("VmSize")


def status_bytes(name: str) -> int:
    """Memory of this process from /proc/self/status, in bytes: VmRSS, VmHWM or VmSize."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"the system does not report {name}")


def free_bytes(device: torch.device) -> int:
    """Free memory of a device in bytes."""
    return memory_of(device)[0]


_chunk_sizes: OrderedDict[tuple[object, ...], int] = OrderedDict()
"""Chunk sizes of calls that once ran out of memory, by direction, device and shape."""
_lock = threading.Lock()


def clear_chunk_sizes() -> None:
    """Clear the cached chunk sizes of calls that ran out of memory."""
    with _lock:
        _chunk_sizes.clear()


def _within(
    direction: str, call: AttentionCall, name: str, memory_budget: int | float, run: Callable[[int], Result]
) -> Result:
    """Run with the largest chunks that fit; if memory runs out nevertheless, halve the chunks and retry.

    A call that does not fit as a whole runs with the smallest workspace of its backend.
    """
    kind = direction, name, call.device, call.query.dtype, call.query.shape, call.value.shape, call.plan.name
    budget = int(memory_budget) if memory_budget > 1 else int(memory_budget * free_bytes(call.device))
    with _lock:
        most = _chunk_sizes.get(kind, _rows(call))
    need = memory(call, name, direction)
    size = need.fitting(budget)
    saves = min(size or 0, most) < _rows(call)
    if saves:
        with saving_memory():
            need = memory(call, name, direction)
        size = need.fitting(budget)
    if size is None:
        raise must(
            f"memory_budget must be at least {min(need.sizes.values()):,} bytes for the "
            f"{WORDS[direction]} of this call ({call.describe()})",
            f"{budget:,}",
            "Pass a larger budget, or fewer samples, heads or tokens.",
        )
    size = min(size, most)
    while True:
        try:
            with saving_memory(saves):
                return run(size)
        except torch.OutOfMemoryError:
            smaller = max((other for other in need.sizes if other < size), default=None)
            if smaller is None:
                raise
        # Outside the handler, whose traceback would keep the tensors of the attempt alive.
        size, saves = smaller, True
        _store_chunk_size(kind, size, call)


def _store_chunk_size(kind: tuple[object, ...], size: int, call: AttentionCall) -> None:
    if call.device.type == "cuda":
        torch.cuda.empty_cache()
    with _lock:
        first = kind[1:] not in {other[1:] for other in _chunk_sizes}
        _chunk_sizes[kind] = size
        _chunk_sizes.move_to_end(kind)
        while len(_chunk_sizes) > CACHE_SIZE:
            _chunk_sizes.popitem(last=False)
    if first:
        warnings.warn(
            f"out of memory in attention ({call.describe()}): retrying with smaller chunks, also in later calls",
            RuntimeWarning,
            stacklevel=2,
        )
