"""One pattern over one source, chunk after chunk of query rows, with the keys they see and no others.

Branches of a dilated pattern whose segments lie inside a chunk are one call on the chunk itself. What reaches further
is computed on buffers that hold the chunk's sampled queries and their segment's sampled keys (see plan/buffers.py), and
merges by LSE.

Legend: B batch, H query heads, G key heads, m rows of a chunk, n rows of a buffer, R queries of an excerpt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import must
from ...kernels.call import AttentionCall, BiasedGradients, Forward, Gradients, empty_rows
from ...kernels.registry import choose
from ...patterns import And, Causal, Dilated, Pattern, as_pattern
from ...patterns.base import integer
from ...plan import own_block
from ...plan.buffers import Excerpt, excerpts
from ...plan.closed_forms import Domain, closed_form
from ..attention import CallSettings, call_of, empty_attention
from ..bias import filler_lse, kernel_bias, positions_of
from ..checks import check_softcap, check_tensors
from ..derivatives import check_reverse_mode, scale_of
from ..memory_budget import free_bytes
from ..merge import AttentionOutput, shares_of
from .sinks import StreamShape
from .sources import DifferentiableSource, Source

FEW_KEYS = 4096
"""Keys a head that a branch may always hold at a time, however short a chunk is."""
DEFAULT_BUDGET = 2**30
"""Default memory budget of a stream on the CPU, in bytes."""


class _Run(NamedTuple):
    """Rows of a chunk under a pattern that reaches beyond them, in coordinates that equal chunks share."""

    pattern: Pattern
    n: int
    begin: int
    end: int
    origin: int
    """Token of position 0."""
    recurs: bool
    """Whether other chunks need the same excerpt at another origin; its keys are few enough to cache."""
    keys: tuple[int, int] | None = None
    """Range of keys that is computed at a time, if all of them are too many."""


_Slots = tuple[tuple[Tensor, Tensor], list[tuple[Tensor, Tensor]]]
"""Head and row of queries that reach beyond a chunk, and for each part its slots in the buffer and their indices."""


@dataclass(eq=False, slots=True)
class _KeyBuffer:
    """Keys of one excerpt on the device, cached while chunks use them."""

    excerpt: Excerpt
    origin: int
    key: Tensor
    value: Tensor
    grads: tuple[Tensor, Tensor] | None = None

    @property
    def tokens(self) -> Tensor:
        """int64 [G, n] on the CPU, -1 for filler"""
        return torch.where(self.excerpt.key_tokens < 0, -1, self.excerpt.key_tokens + self.origin)


@dataclass(eq=False, slots=True)
class Chunk:
    """Chunk of rows of the stream, with its inner call and outer runs."""

    begin: int
    end: int
    query: Tensor
    key: Tensor
    value: Tensor
    ready: torch.Event | None = None
    """Event at the end of a copy to the device."""
    inner: AttentionCall | None = None
    runs: list[_Run] = field(default_factory=list)
    """Runs of keys beyond the chunk."""


class Streamer:
    """One pattern over one source: chunks forward and backward, and the keys that outlast a chunk."""

    def __init__(
        self,
        source: Source,
        pattern: Pattern | str,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        device: torch.device | str | None,
        backend: str,
        softcap: float | None = None,
        bias: Tensor | None = None,
        bias_positions: Tensor | None = None,
    ) -> None:
        check_softcap(softcap)
        self.source, self.backend, self.softcap = source, backend, softcap or 0.0
        self.n = integer("n of the source", source.n, 0)
        query, key, value = source.rows(0, min(self.n, 1))
        check_tensors(query, key, value, enable_gqa)
        self.device = query.device if device is None else torch.device(device)
        self.dtype, self.origin = query.dtype, query.device
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.batch, self.heads, _, self.width = query.shape
        self.key_heads, self.value_width = key.shape[1], value.shape[3]
        self.scale = scale_of(scale, self.width)
        self.bias, self.bias_positions = kernel_bias(query.to(self.device), bias, bias_positions, self.n)
        self.grad_bias = None if self.bias is None else torch.zeros_like(self.bias, dtype=torch.float64)
        whole = as_pattern(pattern)
        whole = whole & Causal() if is_causal else whole
        self.pattern = whole.resolve(self.n, self.heads) if self.n else whole
        self.block = own_block(self.pattern)
        self.ladder, self.causal = _ladder(self.pattern)
        self.domain = Domain(self.n, torch.device("cpu"))
        self.buffers: dict[int | None, _KeyBuffer] = {}
        self.slots: dict[tuple[tuple[Excerpt, ...], int], _Slots] = {}
        self._copies: torch.cuda.Stream | None = None
        shape = (self.batch, self.heads, self.n, self.value_width)
        terms = f" and softcap {softcap!r}" if softcap else ""
        for name, tensor in (("bias", self.bias), ("bias_positions", self.bias_positions)):
            if tensor is not None:
                terms += f", {name} {sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest()[:12]}"
        self.about = StreamShape(shape, self.dtype, f"{self.pattern.describe()} at scale {self.scale!r}{terms}")

    @property
    def uploads(self) -> bool:
        """Whether rows must be copied to the device."""
        return self.origin.type != self.device.type

    def copies(self) -> torch.cuda.Stream:
        """The stream of copies between host and device."""
        if self._copies is None:
            self._copies = torch.cuda.Stream(self.device)
        return self._copies

    def chunk_rows(self, chunk: int | None, memory_budget: int | None, backward: bool = False) -> int:
        """Rows of a chunk: as requested or as many as fit, aligned so that segments lie inside."""
        if chunk is not None:
            if memory_budget is not None:
                raise must("chunk and memory_budget must not both be given", f"{chunk} and {memory_budget}")
            return min(integer("chunk", chunk, 1), self.n)
        if memory_budget is None:
            memory_budget = free_bytes(self.device) // 4 if self.device.type == "cuda" else DEFAULT_BUDGET
        fitting = integer("memory_budget", memory_budget, 1) // self.bytes_a_row(backward)
        if fitting < 1:
            raise must(f"memory_budget must hold a row, {self.bytes_a_row(backward):,} bytes", f"{memory_budget:,}")
        if fitting >= self.n:
            return self.n
        step = self.block if fitting >= self.block else 1
        for segment in sorted(self.ladder.segment_lengths) if self.ladder is not None else ():
            if (wider := math.lcm(step, segment)) <= fitting:
                step = wider
        return fitting // step * step

    def bytes_a_row(self, backward: bool = False) -> int:
        """Device memory of one row: what comes in, what goes out, and what kernels carry between parts."""
        given = self.heads * self.width + self.key_heads * (self.width + self.value_width)
        found = self.heads * self.value_width
        wide = self.wide.itemsize
        once = self.dtype.itemsize * ((2 if self.uploads else 1) * given + 2 * found) + wide * (found + self.heads)
        if self.ladder is None:
            # Queries and keys are laid out anew, up to twice as many keys as the chunk has rows.
            keys = self.key_heads * (self.width + self.value_width)
            once += self.dtype.itemsize * (self.heads * self.width + 2 * keys + found) + 2 * wide * found
        more = self.dtype.itemsize * (given + found) + wide * given if backward else 0
        # Tokens of queries and keys by head, which are made from a copy.
        places = 0 if self.bias is None else 4 * 8 * self.heads * (self.bias.dim() - 1)
        return max(1, self.batch) * (once + more) + places

    def chunks(self, begin: int, end: int, rows: int) -> Iterator[Chunk]:
        """The rows in order. One chunk is on its way to the device while the one before is computed."""
        bounds = []
        while begin < end:
            # Chunks end at multiples of their length, wherever the stream begins, so that segments lie inside.
            stop = min(begin // rows * rows + rows, end)
            bounds.append((begin, stop))
            begin = stop
        if not self.uploads:
            yield from (self._chunk(*one) for one in bounds)
            return
        ahead = self._chunk(*bounds[0]) if bounds else None
        for index in range(len(bounds)):
            own = ahead
            assert own is not None
            if own.ready is not None:
                torch.cuda.current_stream(self.device).wait_event(own.ready)
            yield own
            ahead = self._chunk(*bounds[index + 1]) if index + 1 < len(bounds) else None

    def _chunk(self, begin: int, end: int) -> Chunk:
        given = self.source.rows(begin, end)
        shapes = (
            (self.batch, self.heads, end - begin, self.width),
            (self.batch, self.key_heads, end - begin, self.width),
            (self.batch, self.key_heads, end - begin, self.value_width),
        )
        for name, tensor, shape in zip(("query", "key", "value"), given, shapes, strict=True):
            self._check(f"{name} of rows {begin} to {end - 1}", tensor, shape)
        ready = None
        if self.uploads and self.device.type == "cuda":
            with torch.cuda.stream(self.copies()):
                given = tuple(t.pin_memory().to(self.device, non_blocking=True) for t in given)
                ready = self.copies().record_event()
            for tensor in given:
                tensor.record_stream(torch.cuda.current_stream(self.device))
        else:
            given = tuple(t.to(self.device) for t in given)
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in given)
        return Chunk(begin, end, query, key, value, ready)

    def _check(self, what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise must(f"{what} must have shape {shape} and dtype {self.dtype}", got, "The source is short or wrong.")
        check_reverse_mode(tensor)

    def forward(self, chunk: Chunk) -> AttentionOutput:
        """Final rows of a chunk."""
        if not self.batch:
            return AttentionOutput(*empty_attention(chunk.query, chunk.key, chunk.value))
        inside, chunk.runs = self._split(chunk.begin, chunk.end)
        found = None
        if inside is not None:
            places = None if self.bias_positions is None else self.bias_positions[:, chunk.begin : chunk.end]
            own = {"scale": self.scale, "softcap": self.softcap, "backend": self.backend, "bias": self.bias}
            settings = CallSettings(pattern=inside.describe(), bias_positions=places, **own)
            chunk.inner = call_of(chunk.query, chunk.key, chunk.value, settings)
            found = choose(chunk.inner, self.backend)[1].forward(chunk.inner)
            if not chunk.runs:
                return AttentionOutput(*found)
        return self._merged(chunk, found)

    def _split(self, begin: int, end: int) -> tuple[Pattern | None, list[_Run]]:
        """Inner call on the chunk's own keys, and the runs beyond them."""
        if self.ladder is None:
            run = _Run(self.pattern, self.n, begin, end, 0, False)
            return None, [run._replace(keys=keys) for keys in self._stretches(begin, end)]
        closed = [i for i, w in enumerate(self.ladder.segment_lengths) if self._closed(w, begin, end)]
        inner = self._branches(closed) if closed else None
        open_ = [i for i in range(len(self.ladder.segment_lengths)) if i not in closed]
        return inner, [run for i in open_ for run in self._branch_runs(i, begin, end)]

    def _stretches(self, begin: int, end: int) -> list[tuple[int, int] | None]:
        """Ranges of keys, each small relative to a chunk, that cover every key its rows attend to."""
        first, last = (torch.tensor([token], device="cpu") for token in (begin, end - 1))
        form = closed_form(self.pattern)
        kinds = {form.head_key(head): head for head in range(self.heads)}
        spans = [form.reach(first, last, head, self.domain) for head in kinds.values()]
        low, order = torch.cat([span.first for span in spans]).sort()
        high = torch.cat([span.last for span in spans])[order]
        top = high.cummax(0).values
        if not len(low):
            return []
        # Keys between two disjoint ranges are not reached.
        gap = (low[1:] - top[:-1] - 1).clamp(min=0)
        most = max(2 * (end - begin), FEW_KEYS)
        if int(top[-1] - low[0] + 1 - gap.sum()) <= most:
            return [None]
        cuts = range(int(low[0]) // most * most, int(top[-1]) + 1, most)
        met = torch.zeros(len(cuts) + 1, dtype=torch.int64, device="cpu")
        met.index_add_(0, low // most - cuts[0] // most, torch.ones_like(low))
        met.index_add_(0, high // most - cuts[0] // most + 1, -torch.ones_like(low))
        return [(at, at + most) for at, some in zip(cuts, met.cumsum(0).tolist(), strict=False) if some > 0]

    def _closed(self, segment: int, begin: int, end: int) -> bool:
        return begin % segment == 0 and (end % segment == 0 or end == self.n)

    def _branches(self, indices: list[int], length: int | None = None) -> Pattern:
        assert self.ladder is not None
        lengths = tuple(length or self.ladder.segment_lengths[i] for i in indices)
        rates = tuple(self.ladder.dilation_rates[i] for i in indices)
        some = replace(self.ladder, segment_lengths=lengths, dilation_rates=rates)
        return some & Causal() if self.causal else some

    def _branch_runs(self, index: int, begin: int, end: int) -> list[_Run]:
        assert self.ladder is not None
        segment, rate = self.ladder.branches[index]
        origin, rows = begin // segment * segment, end - begin
        few, most = max(rows // 4, FEW_KEYS), max(2 * rows, FEW_KEYS) * rate
        if end > origin + segment:
            # Segments that the chunk's edges cut: those at the edges reach beyond it.
            whole = _Run(self._branches([index]), self.n, begin, end, 0, False)
            stop = min(-(-end // segment) * segment, self.n)
            return [whole._replace(keys=(at, min(at + most, stop))) for at in range(origin, stop, most)]
        # A segment is planned as a sequence of its own, and so once for all segments.
        length, offset = min(segment, self.n - origin), begin - origin
        if not self.causal and offset % rate + rows <= length:
            # All keys are seen from anywhere: only which rows are sampled matters.
            offset %= rate
        run = _Run(self._branches([index], length), length, offset, offset + rows, origin, length <= few * rate)
        if run.recurs:
            return [run]
        return [run._replace(keys=(at, min(at + most, length))) for at in range(0, length, most)]

    def _parts(self, chunk: Chunk) -> Iterator[tuple[int, AttentionCall, _KeyBuffer]]:
        """Calls for keys beyond the chunk, numbered by part. Keys that recur stay in memory after their call."""
        recurring, parts = -1, ((run, excerpt) for run in chunk.runs for excerpt in self._excerpts(run))
        for index, (run, excerpt) in enumerate(parts):
            recurring += run.recurs
            if excerpt.plan.parts:
                buffer = self._hold(chunk, recurring if run.recurs else None, excerpt, run.origin)
                query = self._gathered(chunk.query, excerpt)
                call = AttentionCall(query, buffer.key, buffer.value, excerpt.plan, self.scale, softcap=self.softcap)
                if self.bias is not None:
                    call.bias, call.bias_positions = self.bias, self._places(chunk, buffer)
                yield index, call, buffer

    def _places(self, chunk: Chunk, buffer: _KeyBuffer) -> Tensor:
        """Positions of queries and of keys in the bias, (2, H, n, axes)."""
        (keys,) = self._to_device(buffer.tokens.clamp(min=0))
        keys = keys.repeat_interleave(self.heads // self.key_heads, 0)
        tokens = torch.stack([chunk.begin + buffer.excerpt.query_rows.clamp(min=0), keys])
        return positions_of(tokens, self.bias_positions).contiguous()

    def _excerpts(self, run: _Run) -> tuple[Excerpt, ...]:
        make = _recurring if run.recurs else excerpts
        shape = run.pattern, run.n, self.heads, self.key_heads, run.begin, run.end
        return make(*shape, self.block, self.device, run.keys)

    def _gathered(self, rows: Tensor, excerpt: Excerpt, filler_value: float | Tensor = 0.0) -> Tensor:
        """Rows of the chunk (B, H, m, ...) in the order of an excerpt's buffer, (B, H, n, ...), and filler.

        A filler row may see keys that no row of the chunk sees. With zeros for its query, output and gradient and an
        LSE of at least its scores, its weights are finite and it adds 0 to their gradients.
        """
        head = torch.arange(self.heads, device=self.device)[:, None]
        filler = excerpt.query_rows < 0
        gathered = rows[:, head, excerpt.query_rows.clamp(min=0)]
        return gathered.masked_fill_(filler if rows.dim() == 3 else filler[..., None], filler_value)

    def _hold(self, chunk: Chunk, index: int | None, excerpt: Excerpt, origin: int) -> _KeyBuffer:
        """The keys of an excerpt: those held already, those of the chunk, and the rest from the source."""
        before = self.buffers.get(index)
        if before is not None and before.excerpt.key_tokens is excerpt.key_tokens and before.origin == origin:
            return before
        shape = self.batch, self.key_heads, excerpt.plan.n
        now = _KeyBuffer(
            excerpt,
            origin,
            torch.zeros(*shape, self.width, dtype=self.dtype, device=self.device),
            torch.zeros(*shape, self.value_width, dtype=self.dtype, device=self.device),
        )
        tokens = now.tokens
        missing = tokens >= 0
        own = (tokens >= chunk.begin) & (tokens < chunk.end)
        self._take(now, own, tokens - chunk.begin, chunk.key, chunk.value)
        missing &= ~own
        if before is not None:
            at, present = _lookup_tokens(before.tokens, tokens)
            self._take(now, present & missing, at, before.key, before.value)
            missing &= ~present
        if missing.any():
            # Heads miss different numbers of tokens; short rows repeat one of their own, or token 0.
            width = int(missing.sum(1).max())
            order = torch.argsort((~missing).to(torch.uint8), dim=1, stable=True)[:, :width]
            tokens_in = tokens.gather(1, order).clamp(min=0)
            real = missing.gather(1, order)
            key, value = self.source.keys(tokens_in)
            for name, tensor, last in (("key", key, self.width), ("value", value, self.value_width)):
                self._check(f"{name} of {width} scattered tokens", tensor, (*shape[:2], width, last))
            back = torch.zeros_like(tokens).scatter_(1, order, torch.arange(width, device="cpu").expand_as(order))
            filled = torch.zeros_like(missing).scatter_(1, order, real)
            self._take(now, filled, back, key.to(self.device), value.to(self.device))
        if index is not None:
            self._flush(before)
            self.buffers[index] = now
        return now

    def _take(self, buffer: _KeyBuffer, where: Tensor, row: Tensor, key: Tensor, value: Tensor) -> None:
        """Copy rows of key and value to the places of a buffer that `where` (G, n) marks."""
        head, slot = where.nonzero(as_tuple=True)
        if len(head):
            head, slot, row = self._to_device(head, slot, row[where])
            buffer.key[:, head, slot] = key[:, head, row]
            buffer.value[:, head, slot] = value[:, head, row]

    def _to_device(self, *indices: Tensor) -> tuple[Tensor, ...]:
        """Indices on the device, without waiting for what it is doing."""
        if self.device.type != "cuda":
            return tuple(index.to(self.device) for index in indices)
        return tuple(index.pin_memory().to(self.device, non_blocking=True) for index in indices)

    def _rows(self, chunk: Chunk) -> tuple[tuple[Tensor, Tensor], Callable[[int, Excerpt], tuple[Tensor, Tensor]]]:
        """Head and row of queries that reach beyond the chunk, and a function to the slots and rows of a part."""
        m = chunk.end - chunk.begin
        if chunk.runs and all(run.recurs for run in chunk.runs):
            parts = tuple(excerpt for run in chunk.runs for excerpt in self._excerpts(run))
            if (parts, m) not in self.slots:
                self.slots[parts, m] = _recurring_slots(parts, m, self.device)
            touched, slots = self.slots[parts, m]
            return touched, lambda index, _: slots[index]
        every = torch.arange(self.heads * m, device=self.device)
        return (every // m, every % m), lambda _, part: (part.slots.to(self.device), part.queries.to(self.device))

    def _merged(self, chunk: Chunk, found: Forward | None) -> AttentionOutput:
        """Merge results of the excerpts into their rows in the compute dtype, and round once."""
        if found is None:
            output = empty_rows(chunk.query, self.value_width).zero_()
            lse = torch.full(chunk.query.shape[:3], -torch.inf, dtype=self.wide, device=self.device)
        else:
            output, lse = found
        (head, row), lies = self._rows(chunk)
        total, logs = output[:, head, row].to(self.wide), lse[:, head, row]
        for index, call, buffer in self._parts(chunk):
            slot, at = lies(index, buffer.excerpt)
            part, part_lse = (t.flatten(1, 2)[:, slot] for t in choose(call, self.backend)[1].forward(call))
            (old, share), logs[:, at] = shares_of(torch.stack([logs[:, at], part_lse]), 0)
            total[:, at] = total[:, at] * old[..., None] + part * share[..., None]
        output[:, head, row] = total.to(output.dtype)
        lse[:, head, row] = logs
        return AttentionOutput(output, lse)

    def backward(self, chunk: Chunk, found: AttentionOutput, grad_output: Tensor) -> Gradients:
        """Gradients of a chunk's rows by its own queries; gradients of other keys accumulate until their last chunk."""
        if chunk.inner is not None:
            grads = self._differentiated(chunk.inner, *found, grad_output)
        else:
            grads = Gradients(*(torch.zeros_like(t) for t in (chunk.query, chunk.key, chunk.value)))
        if not chunk.runs:
            return grads
        (head, row), lies = self._rows(chunk)
        total = grads.query[:, head, row].to(self.wide)
        for index, call, buffer in self._parts(chunk):
            slot, at = lies(index, buffer.excerpt)
            output, grad = (self._gathered(t, buffer.excerpt) for t in (found.output, grad_output))
            lse = self._gathered(found.lse, buffer.excerpt, filler_lse(self.bias))
            part = self._differentiated(call, output, lse, grad)
            total[:, at] += part.query.flatten(1, 2)[:, slot].to(self.wide)
            if buffer.grads is None:
                key, value = (torch.zeros_like(x, dtype=self.wide) for x in (buffer.key, buffer.value))
                buffer.grads = key, value
            for sum_, one in zip(buffer.grads, part[1:], strict=True):
                sum_ += one
            if buffer not in self.buffers.values():
                self._flush(buffer)
        grads.query[:, head, row] = total.to(grads.query.dtype)
        return grads

    def _differentiated(self, call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor) -> Gradients:
        grads = choose(call, self.backend)[1].backward(call, output, lse, grad_output, None)
        if isinstance(grads, BiasedGradients) and self.grad_bias is not None:
            self.grad_bias += grads.bias
        return grads

    def _flush(self, buffer: _KeyBuffer | None) -> None:
        """Pass gradients of keys that leave the cache to the source."""
        if buffer is not None and buffer.grads is not None:
            assert isinstance(self.source, DifferentiableSource)
            self.source.add_key_gradients(buffer.tokens.clamp(min=0), *buffer.grads)
            buffer.grads = None

    def flush(self) -> None:
        """Pass all remaining gradients to the source."""
        for buffer in self.buffers.values():
            self._flush(buffer)


def _ladder(pattern: Pattern) -> tuple[Dilated | None, bool]:
    """The pattern as dilated branches that can be computed apart, and whether it is causal; None for any other."""
    match pattern:
        case Dilated(heads="all", overlap="count"):
            return pattern, False
        case And(Dilated(heads="all", overlap="count") as dilated, Causal()):
            return dilated, True
        case And(Causal(), Dilated(heads="all", overlap="count") as dilated):
            return dilated, True
        case _:
            return None, False


_recurring = lru_cache(maxsize=128)(excerpts)
"""Excerpts of segments, planned once for all equal segments."""


def _recurring_slots(parts: tuple[Excerpt, ...], m: int, device: torch.device) -> _Slots:
    queries = torch.unique(torch.cat([part.queries for part in parts]))
    slots = [(part.slots.to(device), torch.searchsorted(queries, part.queries).to(device)) for part in parts]
    return ((queries // m).to(device), (queries % m).to(device)), slots


def _lookup_tokens(buffer: Tensor, tokens_in: Tensor) -> tuple[Tensor, Tensor]:
    """Index of tokens (G, n) in the rows of a buffer (G, k), and a mask of those present; the last of equal tokens."""
    ordered, at = buffer.sort(dim=1)
    slot = torch.searchsorted(ordered, tokens_in).clamp(max=buffer.shape[1] - 1)
    return at.gather(1, slot), (ordered.gather(1, slot) == tokens_in) & (tokens_in >= 0)
