"""Attention over a selection by plans and the backends of the registry.

A selection by query blocks is one plan. In a selection by tokens, the blocks that all rows share are one plan and the
listed blocks another, on copies of the queries grouped by key block; both are parts of one softmax and merge by LSE.
The backend `reference` evaluates the dense formula instead, on the pairs of the selection.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.call import AttentionCall, Forward, Gradients, Runner, empty_rows
from ..kernels.dropout import shifted
from ..kernels.registry import can_prepare, can_run, choose, preference, prepared
from ..ops.merge import shares_of
from ..plan.cache import Result
from ..plan.plan import Plan
from .plan import block_plan, dense_plan, token_plan
from .types import Gathered, Selection

GATHERED, GPU_ROOM, OF_TENSORS = 64 * 2**20, 16, 10
"""Bytes of gathered rows up to which a call runs whole, and their multiple on a GPU. A larger call runs in chunks of a
quarter of these bytes, or of this fraction of query, key, value and output if that is more."""
MOST_CACHED, NUMBERS = 2**23, 16
"""Most numbers of a value that is cached with a selection, 32 MiB in 32 bits; numbers of a plan for each entry."""


def fold(x: Tensor) -> Tensor:
    """(b, h, n, ...) as (1, h, b * n, ...): no copy where heads lie inside tokens, or of a single sample."""
    return x if x.shape[0] == 1 else x.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)


def unfold(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `fold`, for the batch size of `like`."""
    return x if like.shape[0] == 1 else x[0].unflatten(1, (like.shape[0], -1)).transpose(0, 1)


@lru_cache(maxsize=64)
def shared_plan(
    n: int, heads: int, block_size: int, local: int, sink: int, is_causal: bool, device: torch.device
) -> Plan:
    """Plan of the blocks that every token of a block sees, for any batch size."""
    t = -(-n // block_size)
    nothing = torch.empty(1, 1, t, 0, dtype=torch.int32, device=device)
    plan = block_plan(Selection(nothing, nothing.sum(-1), n, block_size, is_causal, False, local, sink))
    (part,) = plan.parts
    none = torch.zeros(heads, dtype=torch.int32, device=device)
    axis = replace(part.queries, offset=none)
    part = replace(part, queries=axis, keys=axis, head_class=none)
    return replace(plan, heads=heads, parts=(part,), blocks=plan.blocks * heads)


@dataclass(slots=True)
class CallChoices:
    """Choices that GPU calls of one layout with the same settings share."""

    implementation: type[BlockAttend | TokenAttend] | None = None
    backend: tuple[str, Runner] | None = None
    """Name and runner of the backend of plans whose sizes follow from the layout"""
    _derived: dict[Hashable, Any] = field(default_factory=dict)

    def derive(self, name: Hashable, make: Callable[[], Result]) -> Result:
        """`make()`, or its cached result: a value that follows from the layout and the settings."""
        made = self._derived.get(name)
        return self._derived.setdefault(name, make()) if made is None else made

    def choose(self, call: AttentionCall, backend: str) -> tuple[str, Runner]:
        """`registry.choose` of the first of these calls, prepared if the backend can prepare calls."""
        if self.backend is not None:
            return self.backend
        name, runner = choose(call, backend)
        chosen = name, prepared(name, call) if can_prepare(name) else runner
        if name in preference(call).order:
            # Other libraries also look at the gradients that a call needs, and whether they must be reproducible.
            self.backend = chosen
        return chosen


# Not frozen: a forward pass stores the state that its backward pass reuses.
@dataclass(slots=True)
class Attend:
    """Settings of one call, and state for its backward pass."""

    selection: Selection
    scale: float
    key_padding_mask: Tensor | None
    dropout_p: float
    seed: Tensor | None
    backend: str
    host_sync: bool
    """Whether sizes of plans may be read back from the device"""
    distilled_rows: Tensor | None
    """int64: rows whose listed blocks are compared in the backward pass"""
    choices: CallChoices = field(default_factory=CallChoices)
    listed_lse: Tensor | None = field(default=None, init=False)
    """LSE of each listed block of those rows (b, h, r, k), where the forward pass computes it"""

    def call(self, query: Tensor, key: Tensor, value: Tensor, plan: Plan, folded: bool = True) -> AttentionCall:
        """Call of a backend; `folded` tensors have all samples on one token axis."""
        padding = self.key_padding_mask
        padding = padding.reshape(1, -1) if folded and padding is not None else padding
        return AttentionCall(query, key, value, plan, self.scale, padding, self.dropout_p, self.seed)

    def _derive(self, name: Hashable, make: Callable[[], Result], numbers: int = 0) -> Result:
        """`make()`, or its cached result: a value that depends on the selection alone.

        It has so many numbers, or at most those of a plan.
        """
        memo, entries = self.selection.memo, self.selection.indices.numel()
        return make() if memo is None or max(numbers, NUMBERS * entries) > MOST_CACHED else memo.derive(name, make)


class SelectedPairs:
    """Pairs of a selection with samples concatenated, in the form in which the dense formula reads a pattern."""

    def __init__(self, selection: Selection) -> None:
        self.selection, self.allowed = selection, selection.allowed()

    def resolve(self, n: int, heads: int) -> SelectedPairs:
        """The pairs themselves: a selection is made for one length."""
        return self

    def multiplicity(self, q: Tensor, k: Tensor, head: int) -> Tensor:
        """1 for each pair of the selection, otherwise 0."""
        s = self.selection
        token, block = q % s.n, k % s.n // s.block_size
        row = token if s.per_token else token // s.block_size
        seen = self.allowed[q // s.n, head // s.group, row, block] & (q // s.n == k // s.n)
        if s.bounds is not None:
            seen = seen & (k >= s.bounds[q, 0]) & (k < s.bounds[q, 1])
        return (seen & (k <= q) if s.is_causal else seen).long()


@dataclass(slots=True)
class BlockAttend(Attend):
    """Attention over a selection by query blocks, as one plan."""

    plan: Plan | None = field(default=None, init=False)

    def lowered(
        self, query: Tensor, key: Tensor, value: Tensor, *, backward: bool = False
    ) -> tuple[AttentionCall, Runner]:
        """Call of folded tensors, and its backend."""
        if self.plan is None:
            self.plan = self._derive("plan", lambda: block_plan(self.selection, self.host_sync))
        call = self.call(query, key, value, self.plan)
        if self.plan.device_tables is not None and not can_run(call, self.backend):
            # Other backends read the tables on the host.
            call = replace(call, plan=replace(self.plan, device_tables=None))
        return call, choose(call, self.backend)[1]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Forward:
        """Output and LSE."""
        call, backend = self.lowered(fold(query), fold(key), fold(value))
        output, lse = backend.forward(call)
        return Forward(unfold(output, query), unfold(lse, query))

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Gradients of query, key and value."""
        call, backend = self.lowered(fold(query), fold(key), fold(value), backward=True)
        slope = None if grad_lse is None else fold(grad_lse)
        grads = backend.backward(call, fold(output), fold(lse), fold(grad_output), slope)
        return tuple(unfold(x, query) for x in grads)


@dataclass(slots=True)
class DenseAttend(BlockAttend):
    """Attention over a selection by the dense formula: the specification."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Forward:
        """Output and LSE."""
        if not self._is_by_sample(query):
            return BlockAttend.forward(self, query, key, value)
        each = zip(self._samples(), *(x.split(1) for x in (query, key, value)), strict=True)
        return Forward(*(torch.cat(x) for x in zip(*(one.forward(*given) for one, *given in each), strict=True)))

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Gradients of query, key and value."""
        rows = query, key, value, output, lse, grad_output
        if not self._is_by_sample(query):
            return BlockAttend.backward(self, *rows, grad_lse)
        slopes = [None] * len(query) if grad_lse is None else grad_lse.split(1)
        each = zip(self._samples(), *(x.split(1) for x in rows), slopes, strict=True)
        return tuple(torch.cat(x) for x in zip(*(one.backward(*given) for one, *given in each), strict=True))

    def _is_by_sample(self, query: Tensor) -> bool:
        """Whether dropout numbers the tokens of each sample, as `TokenAttend` does."""
        return self.selection.per_token and self.dropout_p > 0 and len(query) > 1

    def _samples(self) -> Iterator[DenseAttend]:
        s, padding, seed = self.selection, self.key_padding_mask, self.seed
        assert seed is not None
        for i in range(len(s.indices)):
            rows = None if s.sharing_rows is None else s.sharing_rows[i : i + 1]
            own = replace(s, indices=s.indices[i : i + 1], counts=s.counts[i : i + 1], sharing_rows=rows)
            mask = None if padding is None else padding[i : i + 1]
            yield replace(self, selection=own, key_padding_mask=mask, seed=shifted(seed, i * s.heads))

    def lowered(
        self, query: Tensor, key: Tensor, value: Tensor, *, backward: bool = False
    ) -> tuple[AttentionCall, Runner]:
        call = self.call(query, key, value, dense_plan(self.selection))
        call = replace(call, pattern=SelectedPairs(self.selection))
        return call, choose(call, self.backend)[1]


class RowChunk(NamedTuple):
    """Rows whose listed blocks are gathered at a time: whole key heads, query heads of one, or tokens of one of them.

    A chunk of tokens is one of a single sample.
    """

    samples: slice
    heads: slice
    key_heads: slice
    tokens: slice
    is_whole: bool = False
    """Whether it is the whole call, of which views would take the host's time"""

    def rows(self, x: Tensor) -> Tensor:
        """Rows of (b, h, n, ...), a view."""
        return x if self.is_whole else x[self.samples, self.heads, self.tokens]

    def all_tokens(self, x: Tensor) -> Tensor:
        """Heads of (b, h, n, ...) with all tokens, a view."""
        return x if self.is_whole else x[self.samples, self.heads]

    def keys(self, x: Tensor) -> Tensor:
        """Key heads of (b, g, n, ...), a view."""
        return x if self.is_whole else x[self.samples, self.key_heads]


def by_list(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(b, h, n, ...) and rows of lists (b, s, n, ...) as views that broadcast together."""
    if rows.shape[1] in (1, x.shape[1]):
        return x, rows
    return x.view(x.shape[0], rows.shape[1], -1, *x.shape[2:]), rows[:, :, None]


def by_head(x: Tensor) -> Tensor:
    """(b, h, n, ...) as (h, b * n, ...): no copy of a single sample."""
    return x.transpose(0, 1).flatten(1, 2)


class GatheredHeads(NamedTuple):
    """Gathered queries of a chunk, as a plan."""

    chunk: RowChunk
    streams: int
    """Dropout streams before the first of the chunk's heads"""
    gathered: Gathered

    @property
    def lists(self) -> int:
        """Lists of these heads."""
        return len(self.gathered.source)

    def by_list(self, x: Tensor) -> Tensor:
        """(h, ...) as (lists, heads of a list, ...)."""
        return x.unflatten(0, (self.lists, -1))

    def pick(self, x: Tensor, index: Tensor) -> Tensor:
        """Rows of (h, rows, ...) by an index (lists, m), (lists, heads of a list, m, ...)."""
        x, (one, member) = self.by_list(x), self._heads_of(x)
        return x[one, member, index[:, None]]

    def _heads_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, member = (torch.arange(many, device=x.device) for many in (self.lists, len(x) // self.lists))
        return one[:, None, None], member[:, None]

    def rows(self, x: Tensor) -> Tensor:
        """Rows of (b, h, n, ...) for each gathered row; 0 for filler, which adds nothing to any sum."""
        x, source = by_head(self.chunk.rows(x)), self.gathered.source
        filler = (source < 0)[:, None]
        picked = self.pick(x, source.clamp(min=0))
        return picked.masked_fill_(filler if x.dim() == 2 else filler[..., None], 0.0).flatten(0, 1)[None]

    def positions(self) -> Tensor:
        """int64 (2, h, rows): token of the sample that gathered rows and keys have in dropout."""
        source = self.gathered.source.clamp(min=0) + self.chunk.tokens.start
        source = source.repeat_interleave((self.chunk.heads.stop - self.chunk.heads.start) // self.lists, 0)
        return torch.stack([source, torch.arange(source.shape[1], device=source.device).expand_as(source)])


@dataclass(slots=True)
class TokenAttend(Attend):
    """Attention over a selection by tokens: one plan of the shared blocks, and plans of gathered queries."""

    piece: GatheredHeads | None = field(default=None, init=False)
    """All choices, if they are a single piece"""
    hidden: Tensor | None = field(default=None, init=False)
    """bool (b, s, n): rows that do not see the shared blocks, if not all do"""

    def shared_call(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        """Call of the blocks that all rows share."""
        s = self.selection
        near = (s.local_blocks, s.sink_blocks, s.is_causal)
        plan = shared_plan(s.n, query.shape[1], s.block_size, *near, query.device)
        return self.call(query, key, value, plan, folded=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Forward:
        """Output and LSE."""
        call = self.shared_call(query, key, value)
        if not self._shares():
            output = empty_rows(query, value.shape[-1]).zero_()
            lse = query.new_full(query.shape[:3], -torch.inf, dtype=call.compute_dtype)
            return self._join(call, Forward(output, lse))
        shared, rows = self._runner(call).forward(call), self.selection.sharing_rows
        if rows is not None:
            self.hidden = self._derive("hidden", lambda: ~rows)
            own, hidden = by_list(shared.lse, self.hidden)
            own.masked_fill_(hidden, -torch.inf)
            if not self._skips_hidden():
                own, hidden = by_list(shared.output, self.hidden[..., None])
                own.masked_fill_(hidden, 0.0)
        return self._join(call, shared)

    def _skips_hidden(self) -> bool:
        """Whether `_join` does not read rows whose LSE is -inf."""
        return False

    def _runner(self, call: AttentionCall) -> Runner:
        """Backend of the shared blocks."""
        return choose(call, self.backend)[1] if self.host_sync else self.choices.choose(call, self.backend)[1]

    def _shares(self) -> bool:
        return self.selection.local_blocks + self.selection.sink_blocks > 0

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Gradients of query, key and value."""
        call = self.shared_call(query, key, value)
        if not self._shares():
            shared = Gradients(*(empty_rows(x, x.shape[-1]).zero_() for x in (query, key, value)))
            return self._add(call, shared, output, lse, grad_output, grad_lse)
        rows, shared_lse = self.selection.sharing_rows, lse
        if rows is not None:
            self.hidden = ~rows if self.hidden is None else self.hidden
            # An LSE of infinity makes every weight of a row 0.
            own, hidden = by_list(lse, self.hidden)
            shared_lse = own.masked_fill(hidden, torch.inf).view(lse.shape)
        shared = self._runner(call).backward(call, output, shared_lse, grad_output, grad_lse)
        if rows is not None and self.hidden is not None and self.host_sync:
            # On the CPU a NaN stays in the rows that see it.
            own, hidden = by_list(shared.query, self.hidden[..., None])
            own.masked_fill_(hidden, 0.0)
        return self._add(call, shared, output, lse, grad_output, grad_lse)

    def _most_rows(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
        """Rows, tokens of single heads, up to which a call runs whole, and rows of a chunk of a larger call."""
        slots, wide = self.selection.indices.shape[-1], (query.shape[-1], value.shape[-1])
        # Kernels gather rows without a copy, and write what they get.
        a_row = slots * (sum(wide) if self.host_sync else max(wide)) * query.element_size()
        tensors = query.nbytes + key.nbytes + value.nbytes + query.nbytes // wide[0] * wide[1]
        whole = GATHERED * (1 if self.host_sync else GPU_ROOM)
        return whole // a_row, max(whole // 4, tensors // OF_TENSORS) // a_row

    def chunks(self, query: Tensor, key: Tensor, value: Tensor, by_sample: bool = False) -> Iterator[RowChunk]:
        """Chunks of a call, those of a key head in succession; none if nothing can be listed.

        Chunks with the same lists follow one another. With `by_sample` no chunk has more than one sample.
        """
        batch, heads, n, _ = query.shape
        if not self.selection.indices.shape[-1]:
            return
        group, sharing = heads // key.shape[1], self.selection.group
        whole, most = self._most_rows(query, key, value)
        rows = batch * n
        if heads * rows <= whole and not (by_sample and batch > 1):
            yield RowChunk(slice(0, batch), slice(0, heads), slice(0, key.shape[1]), slice(0, n), is_whole=True)
            return
        # A chunk has whole key heads or part of one, and whole lists or some heads of one.
        sizes = [x for x in range(1, heads + 1) if heads % x == 0 and _nested(x, group) and _nested(x, sharing)]
        many = heads if heads * rows <= whole else max((x for x in sizes if x * rows <= most), default=0)
        size, apart = self.selection.block_size, 1 if by_sample or not many else batch
        pieces = 1 if many else -(-n // (max(most // size, 1) * size))
        step = -(-n // (pieces * size)) * size
        run = many or gcd(group, sharing)
        for first in range(0, heads, run):
            for sample in range(0, batch, apart):
                for begin in range(0, n, step):
                    for head in range(first, first + run, many or 1):
                        own = slice(head, head + (many or 1))
                        key_heads = slice(own.start // group, -(-own.stop // group))
                        tokens = slice(begin, min(begin + step, n))
                        yield RowChunk(slice(sample, sample + apart), own, key_heads, tokens)

    def _of_chunk(self, chunk: RowChunk) -> Selection:
        """Lists of a chunk: all lists of its heads, or the only one; the selection itself for a whole call."""
        if chunk.is_whole:
            return self.selection
        sharing, heads = self.selection.group, chunk.heads
        lists = slice(heads.start // sharing, -(-heads.stop // sharing))
        indices = self.selection.indices[chunk.samples, lists, chunk.tokens]
        return replace(self.selection, indices=indices, group=(heads.stop - heads.start) // indices.shape[1])

    def _gather(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[GatheredHeads]:
        """All choices, a chunk at a time; dropout numbers the rows of each sample."""
        all_heads, n = query.shape[1:3]
        for chunk in self.chunks(query, key, value, self.dropout_p > 0):
            selection = self._of_chunk(chunk)
            if selection.bounds is not None and selection is not self.selection:
                selection = replace(selection, bounds=selection.bounds[chunk.tokens])
            least = n if self.dropout_p else 0
            make = partial(token_plan, selection, least, self.host_sync)
            gathered = self._derive(("gathered", least), make) if selection is self.selection else make()
            yield GatheredHeads(chunk, chunk.samples.start * all_heads + chunk.heads.start, gathered)

    def _each_piece(self, call: AttentionCall) -> Iterator[GatheredHeads]:
        """All choices; a single piece is gathered once for both passes."""
        if self.piece is not None:
            yield self.piece
            return
        for piece in self._gather(call.query, call.key, call.value):
            chunk = piece.chunk
            if chunk.rows(call.query).shape == call.query.shape:
                self.piece = piece
            yield piece

    def _gathered_call(self, piece: GatheredHeads, call: AttentionCall) -> AttentionCall:
        keys, values = (by_head(piece.chunk.keys(x))[None] for x in (call.key, call.value))
        own = self.call(piece.rows(call.query), keys, values, piece.gathered.plan, folded=False)
        if own.key_padding_mask is not None:
            own = replace(own, key_padding_mask=own.key_padding_mask[piece.chunk.samples].reshape(1, -1))
        if own.seed is not None:
            own = replace(own, seed=shifted(own.seed, piece.streams), positions=piece.positions())
        return own

    def _join(self, call: AttentionCall, shared: Forward) -> Forward:
        """Output and LSE of shared and listed blocks together, in place."""
        batch, heads, _, _ = call.query.shape
        distilled = torch.arange(0, device="cpu") if self.distilled_rows is None else self.distilled_rows
        listed_lse = shared.lse.new_empty((batch, heads, len(distilled), self.selection.indices.shape[-1]))
        for piece in self._each_piece(call):
            self._join_piece(call, shared, piece, distilled, listed_lse)
        self.listed_lse = listed_lse if self.selection.indices.shape[-1] and len(distilled) else None
        return shared

    def _join_piece(
        self, call: AttentionCall, shared: Forward, piece: GatheredHeads, distilled: Tensor, listed_lse: Tensor
    ) -> None:
        """Join the listed blocks of a chunk, and store the LSE of each for distilled rows."""
        chunk, own = piece.chunk, self._gathered_call(piece, call)
        part = choose(own, self.backend)[1].forward(own)
        rows, place = piece.gathered.plan.n, piece.gathered.place
        output, lse = chunk.rows(shared.output), chunk.rows(shared.lse)
        logs = piece.by_list(torch.nn.functional.pad(part.lse[0], (0, 1), value=-torch.inf))
        logs = logs.gather(2, place.flatten(1)[:, None].expand(-1, logs.shape[1], -1))
        logs = logs.unflatten(2, place.shape[1:])
        before = piece.by_list(by_head(lse))
        share, after = shares_of(torch.cat([before[..., None], logs], -1), -1)
        # Sums run in the order of the slots on (h, b * n, e), independent of the choices of other tokens.
        total = piece.by_list(by_head(output)) * share[..., :1]
        for slot in range(place.shape[-1]):
            listed = place[..., slot].clamp(max=rows - 1)
            weighted = piece.pick(part.output[0], listed).to(total.dtype) * share[..., slot + 1, None]
            total += torch.where((place[..., slot] < rows)[:, None, :, None], weighted, 0.0)
        many, n = output.shape[0], output.shape[2]
        output.copy_(total.flatten(0, 1).unflatten(1, (many, n)).transpose(0, 1))
        lse.copy_(after.flatten(0, 1).unflatten(1, (many, n)).transpose(0, 1))
        at = distilled - chunk.tokens.start
        by_token = logs.flatten(0, 1).unflatten(1, (many, n))[:, :, at.clamp(0, n - 1)].transpose(0, 1)
        mine = listed_lse[chunk.samples, chunk.heads]
        mine.copy_(torch.where(((at >= 0) & (at < n))[:, None], by_token, mine))

    def _add(
        self,
        call: AttentionCall,
        shared: Gradients,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Gradients of shared and listed blocks together; each part's are exact given output and LSE of whole rows."""
        sums = [grad.to(lse.dtype) for grad in shared[1:]]
        for piece in self._each_piece(call):
            own = self._gathered_call(piece, call)
            own_output, own_lse, own_grad = (piece.rows(x) for x in (output, lse, grad_output))
            own_slope = None if grad_lse is None else piece.rows(grad_lse)
            part = choose(own, self.backend)[1].backward(own, own_output, own_lse, own_grad, own_slope)
            place, rows = piece.gathered.place, piece.gathered.plan.n
            mine = piece.chunk.rows(shared.query)
            total = piece.by_list(by_head(mine)).to(lse.dtype, copy=True)
            for slot in range(place.shape[-1]):
                listed = place[..., slot].clamp(max=rows - 1)
                gathered = piece.pick(part.query[0], listed).to(total.dtype)
                total += torch.where((place[..., slot] < rows)[:, None, :, None], gathered, 0.0)
            mine.copy_(total.flatten(0, 1).unflatten(1, (len(mine), -1)).transpose(0, 1))
            for whole, added in zip(sums, part[1:], strict=True):
                some = piece.chunk.keys(whole)
                some += added[0].unflatten(1, (len(some), -1)).transpose(0, 1)
        for grad, total in zip(shared[1:], sums, strict=True):
            if total is not grad:
                grad.copy_(total)
        return tuple(shared)


def _nested(a: int, b: int) -> bool:
    """Whether one of two numbers is a multiple of the other."""
    return a % b == 0 or b % a == 0
