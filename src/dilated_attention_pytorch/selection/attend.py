"""Attention over a selection by plans and the backends of the registry.

A selection by query blocks is one plan. In a selection by tokens, the blocks that all rows share are one plan and the
listed blocks another, on copies of the queries grouped by key block; both are parts of one softmax and merge by LSE.
The backend `reference` evaluates the dense formula instead, on the pairs of the selection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.call import AttentionCall, Forward, Gradients, empty_rows
from ..kernels.dropout import shifted
from ..kernels.registry import Backend, can_run, choose
from ..ops.merge import shares_of
from ..plan.plan import Plan
from .plan import block_plan, dense_plan, token_plan
from .types import Gathered, Selection

GATHERED, GPU_ROOM = 512 * 2**20, 4
"""Bytes of gathered queries and outputs held at a time, unless one key head needs more, and its multiple on a GPU."""


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
    listed_lse: Tensor | None = field(default=None, init=False)
    """LSE of each listed block of those rows (b, h, r, k), where the forward pass computes it"""

    def call(self, query: Tensor, key: Tensor, value: Tensor, plan: Plan, folded: bool = True) -> AttentionCall:
        """Call of a backend; `folded` tensors have all samples on one token axis."""
        padding = self.key_padding_mask
        padding = padding.reshape(1, -1) if folded and padding is not None else padding
        return AttentionCall(query, key, value, plan, self.scale, padding, self.dropout_p, self.seed)


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
    ) -> tuple[AttentionCall, Backend]:
        """Call of folded tensors, and its backend."""
        self.plan = self.plan or block_plan(self.selection, self.host_sync)
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
    ) -> tuple[AttentionCall, Backend]:
        call = self.call(query, key, value, dense_plan(self.selection))
        call = replace(call, pattern=SelectedPairs(self.selection))
        return call, choose(call, self.backend)[1]


class GatheredHeads(NamedTuple):
    """Gathered queries of some heads in some samples, as a plan."""

    heads: slice
    key_heads: slice
    tokens: slice
    """Tokens of the samples, numbered over all samples."""
    streams: int
    """Dropout streams before the first of these heads."""
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
        """Rows of (1, h, b * n, ...) for each gathered row; 0 for filler, which adds nothing to any sum."""
        x, source = x[0, self.heads, self.tokens], self.gathered.source
        filler = (source < 0)[:, None]
        picked = self.pick(x, source.clamp(min=0))
        return picked.masked_fill_(filler if x.dim() == 2 else filler[..., None], 0.0).flatten(0, 1)[None]

    def positions(self) -> Tensor:
        """int64 (2, h, rows): token of the sample that gathered rows and keys have in dropout."""
        source = self.gathered.source.clamp(min=0)
        source = source.repeat_interleave((self.heads.stop - self.heads.start) // self.lists, 0)
        return torch.stack([source, torch.arange(source.shape[1], device=source.device).expand_as(source)])


@dataclass(slots=True)
class TokenAttend(Attend):
    """Attention over a selection by tokens: one plan of the shared blocks, and plans of gathered queries."""

    pieces: list[GatheredHeads] | None = field(default=None, init=False)

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
        shared, rows = choose(call, self.backend)[1].forward(call), self.selection.sharing_heads()
        if rows is not None:
            shared.output.masked_fill_(~rows[..., None], 0.0)
            shared.lse.masked_fill_(~rows, -torch.inf)
        return self._join(call, shared)

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
        rows = self.selection.sharing_heads()
        # An LSE of infinity makes every weight of a row 0.
        shared_lse = lse if rows is None else torch.where(rows, lse, torch.inf)
        shared = choose(call, self.backend)[1].backward(call, output, shared_lse, grad_output, grad_lse)
        if rows is not None and self.host_sync:
            # On the CPU a NaN stays in the rows that see it.
            shared.query.masked_fill_(~rows[..., None], 0.0)
        return self._add(call, shared, output, lse, grad_output, grad_lse)

    def head_runs(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[slice, slice]]:
        """Query and key heads whose gathered rows fit in memory at a time; none if nothing can be listed."""
        batch, heads, n, width = query.shape
        slots = self.selection.indices.shape[-1]
        if not slots:
            return
        group = heads // key.shape[1]
        bytes_a_head = batch * n * slots * (width + value.shape[-1]) * query.element_size() * group
        step = max(1, (GATHERED if self.host_sync else GPU_ROOM * GATHERED) // bytes_a_head)
        for first in range(0, key.shape[1], step):
            key_heads = slice(first, min(first + step, key.shape[1]))
            yield slice(first * group, key_heads.stop * group), key_heads

    def _of_heads(self, samples: slice, heads: slice) -> Selection:
        """Lists of some heads: all that share a list, or some of those that share the only one."""
        lists = slice(heads.start // self.selection.group, -(-heads.stop // self.selection.group))
        indices = self.selection.indices[samples, lists]
        return replace(self.selection, indices=indices, group=(heads.stop - heads.start) // indices.shape[1])

    def _gather(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[GatheredHeads]:
        """All choices, as many key heads at a time as fit; with dropout, which numbers rows, one sample at a time."""
        batch, all_heads, n, _ = query.shape
        apart = 1 if self.dropout_p else batch
        for heads, key_heads in self.head_runs(query, key, value):
            for first in range(0, batch, apart):
                samples = slice(first, first + apart)
                selection = self._of_heads(samples, heads)
                gathered = token_plan(selection, n if self.dropout_p else 0, self.host_sync)
                tokens = slice(first * n, samples.stop * n)
                yield GatheredHeads(heads, key_heads, tokens, first * all_heads + heads.start, gathered)

    def _all_pieces(self, call: AttentionCall) -> list[GatheredHeads]:
        """All choices, gathered once: a backward pass alone gathers them, too."""
        self.pieces = list(self._gather(call.query, call.key, call.value)) if self.pieces is None else self.pieces
        return self.pieces

    def _gathered_call(self, piece: GatheredHeads, folded: tuple[Tensor, ...]) -> AttentionCall:
        query, key, value = folded
        keys, values = (x[:, piece.key_heads, piece.tokens] for x in (key, value))
        call = self.call(piece.rows(query), keys, values, piece.gathered.plan)
        if call.key_padding_mask is not None:
            call = replace(call, key_padding_mask=call.key_padding_mask[:, piece.tokens])
        if call.seed is not None:
            call = replace(call, seed=shifted(call.seed, piece.streams), positions=piece.positions())
        return call

    def _join(self, call: AttentionCall, shared: Forward) -> Forward:
        """Output and LSE of shared and listed blocks together."""
        query, key, value = call.query, call.key, call.value
        folded = fold(query), fold(key), fold(value)
        # Sums run in the order of the slots on (h, b * n, e), independent of the choices of other tokens.
        total = fold(shared.output)[0].to(shared.lse.dtype)
        lse = fold(shared.lse)[0].clone()
        if total.data_ptr() == shared.output.data_ptr():
            total = total.clone()
        pieces = self._all_pieces(call)
        batch, heads, n, _ = query.shape
        distilled = torch.arange(0, device="cpu") if self.distilled_rows is None else self.distilled_rows
        listed_lse = lse.new_empty((batch, heads, len(distilled), self.selection.indices.shape[-1]))
        for piece in pieces:
            own = self._gathered_call(piece, folded)
            part = choose(own, self.backend)[1].forward(own)
            rows, place = piece.gathered.plan.n, piece.gathered.place
            logs = piece.by_list(torch.nn.functional.pad(part.lse[0], (0, 1), value=-torch.inf))
            logs = logs.gather(2, place.flatten(1)[:, None].expand(-1, logs.shape[1], -1))
            logs = logs.unflatten(2, place.shape[1:])
            before = piece.by_list(lse[piece.heads, piece.tokens])
            share, after = shares_of(torch.cat([before[..., None], logs], -1), -1)
            mine = piece.by_list(total[piece.heads, piece.tokens])
            mine *= share[..., :1]
            for slot in range(place.shape[-1]):
                listed = place[..., slot].clamp(max=rows - 1)
                weighted = piece.pick(part.output[0], listed).to(mine.dtype) * share[..., slot + 1, None]
                mine += torch.where((place[..., slot] < rows)[:, None, :, None], weighted, 0.0)
            lse[piece.heads, piece.tokens] = after.flatten(0, 1)
            samples = slice(piece.tokens.start // n, piece.tokens.stop // n)
            by_token = logs.flatten(0, 1).unflatten(1, (-1, n))
            listed_lse[samples, piece.heads] = by_token[:, :, distilled].transpose(0, 1)
        output = empty_rows(query, value.shape[-1]).copy_(unfold(total[None], query))
        self.listed_lse = listed_lse if pieces and len(distilled) else None
        return Forward(output, unfold(lse[None], query).contiguous())

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
        pieces = self._all_pieces(call)
        if not pieces:
            return tuple(shared)
        inputs = call.query, call.key, call.value
        sums = [fold(grad)[0].to(lse.dtype, copy=True) for grad in shared]
        folded = tuple(fold(x) for x in inputs)
        rows_of = [fold(x) for x in (output, lse, grad_output)]
        slope = None if grad_lse is None else fold(grad_lse)
        for piece in pieces:
            own = self._gathered_call(piece, folded)
            own_output, own_lse, own_grad = (piece.rows(x) for x in rows_of)
            own_slope = None if slope is None else piece.rows(slope)
            part = choose(own, self.backend)[1].backward(own, own_output, own_lse, own_grad, own_slope)
            place, rows = piece.gathered.place, piece.gathered.plan.n
            mine = piece.by_list(sums[0][piece.heads, piece.tokens])
            for slot in range(place.shape[-1]):
                listed = place[..., slot].clamp(max=rows - 1)
                gathered = piece.pick(part.query[0], listed).to(mine.dtype)
                mine += torch.where((place[..., slot] < rows)[:, None, :, None], gathered, 0.0)
            sums[1][piece.key_heads, piece.tokens] += part.key[0].to(lse.dtype)
            sums[2][piece.key_heads, piece.tokens] += part.value[0].to(lse.dtype)
        return tuple(
            empty_rows(like, like.shape[-1]).copy_(unfold(total[None], like))
            for total, like in zip(sums, inputs, strict=True)
        )
