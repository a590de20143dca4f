"""Attention within a memory budget: some samples and heads at a time.

A chunk is a run of samples, or of one sample's key heads, with all the queries that read them. No sum runs across
chunks then, in either direction, so that their size does not show in the result.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import must, must_be
from ..kernels.registry import AttentionCall, Backend, Forward, Gradients, empty_rows
from ..plan.cut import head_entries, of_heads

MOST_REMEMBERED = 256
WORDS = {"forward": "output", "backward": "gradients"}

Found = TypeVar("Found", Forward, Gradients)


class Memory(NamedTuple):
    """What one direction of a call takes, in bytes."""

    units: int
    """Key heads over all samples: what chunks consist of."""
    results: int
    """Output and LSE, or the gradients, of one unit."""
    workspace: int
    """The most a backend takes besides for one unit."""
    a_step: int
    """The most it takes whatever the size of a chunk."""

    def of(self, size: int) -> int:
        """The most it all takes in chunks of a size, whose results lie apart until they are copied to the others."""
        apart = 0 if size == self.units else size * self.results
        return self.units * self.results + apart + size * self.workspace + self.a_step

    def fitting(self, budget: int) -> int:
        """The largest chunk that fits, 0 when none does."""
        if self.of(self.units) <= budget:
            return self.units
        some = (budget - self.of(0)) // (self.results + self.workspace)
        return max(0, min(some, self.units - 1))


def check_budget(memory_budget: int | float | None) -> None:
    """What must hold of a budget."""
    if memory_budget is None:
        return
    advice = "Give bytes as an int, or a fraction of the free memory as a float."
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, int | float):
        raise must_be("memory_budget must be a number", type(memory_budget).__name__, advice)
    fraction = isinstance(memory_budget, float) and memory_budget <= 1
    if not (0 if fraction else 4095) < memory_budget < float("inf"):
        raise must("memory_budget must be bytes, or a fraction in (0, 1]", memory_budget, advice)


def forward(call: AttentionCall, name: str, backend: Backend, memory_budget: int | float) -> Forward:
    """`backend.forward` in as many chunks as the budget needs."""
    batch, heads, n, _ = call.query.shape

    def run(size: int) -> Forward:
        if size == call.key.shape[0] * call.key.shape[1]:
            return backend.forward(call)
        output = empty_rows(call.query, call.value.shape[-1])
        lse = call.query.new_empty((batch, heads, n), dtype=call.compute_dtype)
        for place, _, chunk in _chunks(call, size):
            output[place], lse[place] = backend.forward(chunk)
        return Forward(output, lse)

    return _within("forward", call, name, memory_budget, run)


def backward(
    call: AttentionCall,
    name: str,
    backend: Backend,
    memory_budget: int | float,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
) -> Gradients:
    """`backend.backward` in as many chunks as the budget needs."""

    def run(size: int) -> Gradients:
        if size == call.key.shape[0] * call.key.shape[1]:
            return backend.backward(call, output, lse, grad_output, grad_lse)
        whole = Gradients(*(empty_rows(t, t.shape[-1]) for t in (call.query, call.key, call.value)))
        for place, key_place, chunk in _chunks(call, size):
            slope = None if grad_lse is None else grad_lse[place]
            # Without a name, the results of one chunk are gone before the next is computed.
            whole.query[place], whole.key[key_place], whole.value[key_place] = backend.backward(
                chunk, output[place], lse[place], grad_output[place], slope
            )
        return whole

    return _within("backward", call, name, memory_budget, run)


Place = tuple[slice, slice]


def _chunks(call: AttentionCall, size: int) -> Iterator[tuple[Place, Place, AttentionCall]]:
    """Chunks of at most `size` key heads: where their queries and their keys are, and their call."""
    batch, heads = call.query.shape[:2]
    key_heads = call.key.shape[1]
    shared, samples = heads // key_heads, max(1, size // key_heads)
    group = min(size, key_heads)
    for sample in range(0, batch, samples):
        for first in range(0, key_heads, group):
            key_place = slice(sample, sample + samples), slice(first, first + group)
            own_heads = first * shared, min(first + group, key_heads) * shared
            place = key_place[0], slice(*own_heads)
            yield place, key_place, _cut(call, place, key_place, sample * heads + own_heads[0])


def _cut(call: AttentionCall, place: Place, key_place: Place, stream: int) -> AttentionCall:
    begin, end = place[1].start, place[1].stop
    mask, seed, pattern = call.key_padding_mask, call.seed, call.pattern
    return replace(
        call,
        query=call.query[place],
        key=call.key[key_place],
        value=call.value[key_place],
        plan=of_heads(call.plan, begin, end),
        key_padding_mask=None if mask is None else mask[place[0]],
        # Dropout adds the number of the sample and head to the seed's upper half, which thus may start anywhere.
        seed=None if seed is None else seed + (stream << 32),
        positions=None if call.positions is None else call.positions[:, begin:end],
        pattern=pattern if pattern is None or end - begin == call.plan.heads else _OfHeads(pattern, begin),
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
    """What a direction of a call takes on a backend, from above."""
    batch, heads, n, d = call.query.shape
    key_heads, e = call.value.shape[1], call.value.shape[3]
    item, wide, shared = call.query.dtype.itemsize, call.compute_dtype.itemsize, heads // key_heads
    query_rows, key_rows = n * shared, n
    if direction == "forward":
        results = query_rows * (item * e + wide)
        # Everything once more in the dtype of the sums.
        workspace = wide * (query_rows * (d + e + 1) + key_rows * (d + e))
    else:
        results = item * (query_rows * d + key_rows * (d + e))
        copies = max(2, torch.get_num_threads()) if call.device.type == "cpu" else 2
        workspace = wide * (query_rows * (3 * d + 2 * e + 3) + (1 + copies) * key_rows * (_lanes(d) + _lanes(e)))
    step = 0
    if name == "cpu":
        from ..kernels import cpu

        tiles = max((max(head_entries(part)) for part in call.plan.parts), default=0)
        block = call.plan.block_size
        # As cpu.py reckons; its masks, and what a product holds meanwhile, come to as much again.
        step = 2 * min(cpu.BUDGET, tiles * batch * block * (4 * block + 2 * (d + e)) * wide)
    elif name == "reference":
        from ..kernels import reference

        step = 8 * wide * batch * min(n, reference.ROWS) * n
    return Memory(batch * key_heads, results, workspace, step)


def _lanes(width: int) -> int:
    return -(-width // 16) * 16


def free_bytes(device: torch.device) -> int:
    """Memory that could be had on a device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        raise must("memory_budget must be in bytes where free memory is unknown", f"a fraction on {device}") from None


_remembered: OrderedDict[tuple[object, ...], int] = OrderedDict()
"""Chunk sizes of calls that once ran out of memory, by direction, device and shape."""
_lock = threading.Lock()


def forget() -> None:
    """Forget which calls ran out of memory."""
    with _lock:
        _remembered.clear()


def _within(
    direction: str, call: AttentionCall, name: str, memory_budget: int | float, run: Callable[[int], Found]
) -> Found:
    """Run with the largest chunks that fit; out of memory all the same, with half as much until it goes."""
    kind = direction, name, call.device, call.query.dtype, call.query.shape, call.value.shape, call.plan.name
    budget = int(memory_budget) if memory_budget > 1 else int(memory_budget * free_bytes(call.device))
    need = memory(call, name, direction)
    size = need.fitting(budget)
    if size < 1:
        raise must(
            f"memory_budget must be at least {need.of(1):,} bytes for the "
            f"{WORDS[direction]} of this call ({call.describe()})",
            f"{budget:,}",
            "Give more, or call with fewer samples, heads or tokens.",
        )
    with _lock:
        size = min(size, _remembered.get(kind, size))
    while True:
        try:
            return run(size)
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        # Outside the handler, whose traceback would keep the tensors of the attempt.
        size = _halved(kind, size, call)


def _halved(kind: tuple[object, ...], size: int, call: AttentionCall) -> int:
    if call.device.type == "cuda":
        torch.cuda.empty_cache()
    with _lock:
        first = kind[1:] not in {known[1:] for known in _remembered}
        _remembered[kind] = size // 2
        _remembered.move_to_end(kind)
        while len(_remembered) > MOST_REMEMBERED:
            _remembered.popitem(last=False)
    if first:
        warnings.warn(
            f"out of memory in attention ({call.describe()}): going on with smaller chunks, and remembering them",
            RuntimeWarning,
            stacklevel=2,
        )
    return size // 2
