"""Longest sequences whose query, key and value fit in memory: forward, and forward with backward, by bisection.

Every length is tried, never computed from memory sizes: a length counts when the call came back and chosen rows agree
with float64. Where a call would take longer than a bound, the longest that was measured is given, limited by time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...ops.attention import attention
from ...ops.streaming.sinks import TensorSink
from ...ops.streaming.sources import TensorSource
from ...ops.streaming.stream import streamed_attention
from ...patterns import BlockPattern, Random, SlidingWindow
from ..billion import keys_of, ladder
from .gate import bound_output, largest_ratio, sample, units
from .measure import PeakMemory, clock, facts
from .results import progress

HEADS, WIDTH, BLOCK = 8, 64, 128
UNIT = 2**16
"""Lengths are multiples of this."""
MOST_TOKENS = 2**40
"""Longest length that is tried."""
DENSITY = 0.01
WINDOW = SlidingWindow(128)
CHUNK_BYTES = 2**30
"""Memory of the chunks of a stream over resident tensors, in bytes."""
CHECKED_ROWS = 8


class Attempt(NamedTuple):
    """Measurements of a call that succeeded."""

    n: int
    seconds: float
    peak_bytes: int | None
    error: float


class Longest(NamedTuple):
    """The longest call that succeeded, and the reason why the next did not."""

    attempt: Attempt | None
    limited_by: str
    tried: int

    def fields(self) -> dict[str, Any]:
        """Fields of a line of results."""
        found = {} if self.attempt is None else self.attempt._asdict()
        return {"limited_by": self.limited_by, "tried": self.tried, **found}


class ExtremeSubject(NamedTuple):
    """Implementation of attention over resident tensors."""

    name: str
    power: int
    """Exponent of the time as a function of the length."""
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The exponent with a backward pass."""
    keys: Callable[[int, int, int], Tensor]
    """Keys of a row, from (row, head, n)."""


def longest(attempt: Callable[[int], Attempt], first: int, unit: int, power: int, most_seconds: float) -> Longest:
    """Double the length from `first` until memory or time runs out, then bisect."""
    best, limit, tried, length = None, MOST_TOKENS, 0, first
    while True:
        if best is not None and best.seconds * (length / best.n) ** power > most_seconds:
            return Longest(best, "time", tried)
        tried += 1
        progress(f"{length:,} tokens")
        try:
            best = attempt(length)
        except torch.OutOfMemoryError:
            limit = length
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        low = 0 if best is None else best.n
        if limit - low <= max(unit, low // 64):
            return Longest(best, "memory" if limit < MOST_TOKENS else "nothing", tried)
        length = 2 * length if limit == MOST_TOKENS else (low + limit) // 2 // unit * unit
        if length in (low, limit):
            return Longest(best, "memory", tried)


def block_keys(row: int, head: int, n: int) -> Tensor:
    """Keys of a row under random blocks."""
    pattern = Random(DENSITY).resolve(n, HEADS)
    assert isinstance(pattern, BlockPattern)
    blocks = torch.tensor(pattern.row(row // BLOCK, head))
    return (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()


def subjects() -> dict[str, ExtremeSubject]:
    """Subjects of the comparison, on one set of tensors."""

    def streamed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        source = TensorSource(query, key, value)
        streamed_attention(source, ladder(query.shape[2]), TensorSink(output), memory_budget=CHUNK_BYTES)
        return output

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(query, key, value)

    def ladder_keys(row: int, head: int, n: int) -> Tensor:
        return torch.cat([torch.arange(s.start, s.stop, s.step) for s in keys_of(ladder(n), row, head, n, False)])

    def window_keys(row: int, head: int, n: int) -> Tensor:
        return torch.arange(max(0, row - WINDOW.before), min(n, row + WINDOW.after + 1))

    window, sparse = (partial(attention, pattern=pattern) for pattern in (WINDOW, Random(DENSITY)))
    listed = (
        ExtremeSubject("dilated", 1, streamed, lambda q, k, v: attention(q, k, v, ladder(q.shape[2])), ladder_keys),
        ExtremeSubject("window", 1, window, window, window_keys),
        ExtremeSubject("block-sparse 1 %", 2, sparse, sparse, block_keys),
        ExtremeSubject("dense flash", 2, dense, dense, lambda row, head, n: torch.arange(n)),
    )
    return {subject.name: subject for subject in listed}


def attempt_of(subject: ExtremeSubject, direction: str, device: str, heads: int = HEADS) -> Callable[[int], Attempt]:
    """Function that tries one length: fresh tensors, one timed call, selected rows checked."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    backward = direction == "backward"
    warm: set[str] = set()

    def attempt(n: int) -> Attempt:
        generator = torch.Generator(device).manual_seed(0)
        with PeakMemory(device) as peak:
            made = (torch.randn(1, heads, n, WIDTH, generator=generator, dtype=dtype, device=device) for _ in range(3))
            query, key, value = (tensor.requires_grad_(backward) for tensor in made)
            found: list[Tensor] = []

            def call() -> None:
                output = (subject.backward if backward else subject.forward)(query, key, value)
                found.append(output.detach())
                if backward:
                    # A gradient of the output's size, as a loss would give; memory does not depend on its values.
                    output.backward(torch.ones_like(output))

            if not warm:
                # The first call compiles.
                call()
                found.clear()
                warm.add(direction)
            seconds = clock(call, device)
        error = rows_error(subject, found[0], query.detach(), key.detach(), value.detach())
        if not error <= 1.0:
            raise AssertionError(f"{subject.name} at {n} tokens is off by {error:.2g} times the rounding bound")
        return Attempt(n, seconds, peak.total, error)

    return attempt


def rows_error(subject: ExtremeSubject, output: Tensor, query: Tensor, key: Tensor, value: Tensor) -> float:
    """Largest error of selected rows of the first and last head, relative to its rounding bound; at most 1 passes."""
    heads, n = query.shape[1:3]
    unit, fine, least = units(query.dtype)
    ratios = []
    for row in sample(n, CHECKED_ROWS).tolist():
        for head in {0, heads - 1}:
            # A few keys at a time: the oracle must fit beside the tensors that filled the memory.
            parts = [keys.to(query.device) for keys in subject.keys(row, head, n).split(2**18)]
            mine = query[0, head, row].double() * WIDTH**-0.5
            scores = [key[0, head, at].double() @ mine for at in parts]
            lse = torch.stack([part.logsumexp(0) for part in scores]).logsumexp(0)
            wanted, errors, terms = torch.zeros(3, 1, WIDTH, dtype=torch.float64, device=query.device).unbind()
            for at, part in zip(parts, scores, strict=True):
                weights, values = (part - lse).exp(), value[0, head, at].double()
                sizes = key[0, head, at].double().abs() @ mine.abs()
                wanted += weights @ values
                errors += (weights * (unit + 4 * fine * (1 + sizes)) + least).square() @ values.square()
                terms += weights.square() @ values.square()
            count = torch.tensor([float(sum(map(len, parts)))], dtype=torch.float64, device=query.device)
            bound = bound_output(query.dtype, wanted, errors, terms, count)
            ratios.append(largest_ratio(output[0, head, row][None], wanted, bound))
    return max(ratios)


def measure(
    device: str,
    chosen: Iterable[ExtremeSubject],
    directions: Iterable[str],
    first: int,
    most_seconds: float,
    cap: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Results by subject and direction, up to the first that breaks the device; `cap` is the memory it has, in GiB."""
    for subject, direction in product(chosen, directions):
        broken = False
        try:
            found = longest(attempt_of(subject, direction, device), first, UNIT, subject.power, most_seconds).fields()
        except (RuntimeError, AssertionError, TypeError) as error:
            # Every later CUDA call of this process fails with the same error.
            broken = isinstance(error, torch.AcceleratorError)
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            found = {"skipped": reason + "; nothing after it was tried" * broken}
        yield line_of(subject.name, direction, cap, device, **found)
        if broken:
            return


def line_of(name: str, direction: str, cap: float | None, device: str, **found: Any) -> dict[str, Any]:
    """A line of results."""
    about = {"case": "extreme", "subject": name, "direction": direction, "cap_gib": cap}
    return {**about, **found, "heads": HEADS, "head_dim": WIDTH, **facts(device)}


def describe(line: dict[str, Any]) -> str:
    """A result as text."""
    what = f"{line['subject']:<18} {line['direction']:<9}"
    if "n" not in line:
        return f"{what} {line.get('skipped', 'does not fit')}"
    return f"{what} {line['n']:>12,} tokens in {line['seconds']:.2f} s, limited by {line['limited_by']}"
