"""Attention of one rank on rows that have arrived: its queries over buffers of own and received keys.

Results fold into a running softmax of the rows, so the keys of a row may arrive in several stages.
Gradients depend on the output and LSE of the whole row only, and add up over the stages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.call import AttentionCall, BiasedGradients, Gradients
from ..kernels.dropout import shifted
from ..kernels.registry import choose
from ..ops.bias import filler_lse, positions_of
from ..ops.merge import shares_of
from ..plan import Plan
from ..plan.buffers import RankPlan
from ..plan.subset import of_heads


class KernelSettings(NamedTuple):
    """Settings of a call that every kernel call of it shares."""

    scale: float
    backend: str
    dropout_p: float = 0.0
    seed: Tensor | None = None
    """int64 [1], equal on every rank"""
    softcap: float = 0.0
    bias: Tensor | None = None
    """See `AttentionCall`."""
    bias_positions: Tensor | None = None
    """int64 (1, N, axes), positions of all tokens of the sequence; token numbers if None"""

    @property
    def reads_tokens(self) -> bool:
        """Whether kernel calls need the tokens of their rows."""
        return self.dropout_p > 0 or self.bias is not None

    def call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: Plan,
        padding: Tensor | None,
        positions: Tensor | None,
        stream: int = 0,
        heads: slice = slice(None),
    ) -> AttentionCall:
        """A kernel call on some query heads; `positions` are those of the heads.

        `stream` is the batch entry and head, `entry * heads + head`, of its first row.
        """
        seed = self.seed if self.seed is None or not stream else shifted(self.seed, stream)
        call = AttentionCall(query, key, value, plan, self.scale, padding, self.dropout_p, seed, positions=positions)
        call.softcap = self.softcap
        if self.bias is not None:
            assert positions is not None
            call.bias = self.bias[heads]
            call.bias_positions = positions_of(positions, self.bias_positions).contiguous()
        return call


class Shard(NamedTuple):
    """Tensors of one rank."""

    query: Tensor
    """(B, H, n, D)"""
    key: Tensor
    """(B, G, n, D)"""
    value: Tensor
    """(B, G, n, E)"""
    padding: Tensor | None
    """bool (B, n)"""


class Queries(NamedTuple):
    """Queries of a rank, or queries that were sent to it."""

    rows: Tensor
    """(B, H, m, D)"""
    tokens: Tensor
    """int64 [m]"""


class Keys(NamedTuple):
    """Shard of a rank and the tokens in it."""

    shard: Shard
    tokens: Tensor
    """int64 [n]"""
    n: int
    """Tokens of the sequence."""


class Received(NamedTuple):
    """Rows of other ranks."""

    rows: Tensor
    """(rows, B * (D + E)): K and V side by side"""
    padding: Tensor | None
    """uint8 (rows, B)"""
    source: Tensor
    """int64: received row for each place `RankPlan.far_at` of the key buffer"""


class RunningSoftmax(NamedTuple):
    """Output and LSE of rows over the keys so far, in the compute dtype."""

    output: Tensor
    """(B, H * n, E)"""
    lse: Tensor
    """(B, H * n)"""

    @staticmethod
    def start(query: Tensor, width: int) -> RunningSoftmax:
        dtype = torch.promote_types(query.dtype, torch.float32)
        batch, heads, n, _ = query.shape
        return RunningSoftmax(
            query.new_zeros(batch, heads * n, width, dtype=dtype),
            query.new_full((batch, heads * n), -torch.inf, dtype=dtype),
        )

    def fold_all(self, output: Tensor, lse: Tensor) -> None:
        """Store the result over the first keys of all rows, (B, H, n, E) and (B, H, n); must come first."""
        self.output.view(output.shape).copy_(output)
        self.lse.view(lse.shape).copy_(lse)

    def fold(self, place: Tensor, output: Tensor, lse: Tensor) -> None:
        """Merge the result over more keys of the rows at `place`, each row at most once."""
        # torch.logaddexp rounds an element by its place in memory; the bits of a row must not depend on it.
        (old, new), self.lse[:, place] = shares_of(torch.stack([self.lse[:, place], lse]), 0)
        self.output[:, place] = self.output[:, place] * old[..., None] + output * new[..., None]


class GradientSums(NamedTuple):
    """Gradients of one rank's tensors, in the compute dtype, rows counted over all heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    """float64, this rank's share of the gradient of a bias table"""

    @staticmethod
    def start(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> GradientSums:
        table = None if bias is None else torch.zeros_like(bias, dtype=torch.float64)
        return GradientSums(zeros_for(query), zeros_for(key), zeros_for(value), table)

    def add_bias(self, grads: Gradients, heads: slice = slice(None)) -> None:
        if self.bias is not None and isinstance(grads, BiasedGradients):
            self.bias[heads] += grads.bias


def zeros_for(x: Tensor) -> Tensor:
    """Zeros to sum the gradient of x (B, heads, n, W) in."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros(len(x), x.shape[1] * x.shape[2], x.shape[3], dtype=dtype)


class RowGradients(NamedTuple):
    """Results of the rows and the gradients of these results, each (B, H, n, ...)."""

    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None


def attend(
    work: RankPlan | Plan,
    queries: Queries,
    keys: Keys,
    received: Received | None,
    settings: KernelSettings,
    into: RunningSoftmax,
) -> None:
    """Fold the pairs of a plan into the softmax of the queries. A `Plan` is one over the shard itself."""
    if isinstance(work, Plan):
        if work.parts:
            call = _call_in_place(work, queries, keys.shard, settings)
            into.fold_all(*choose(call, settings.backend)[1].forward(call))
        return
    if not work.plan.parts:
        return
    buffers = _Buffers(work, queries, keys, received, settings)
    output = buffers.query.new_empty(*buffers.query.shape[:3], keys.shard.value.shape[3])
    lse = buffers.query.new_empty(buffers.query.shape[:3], dtype=into.lse.dtype)
    for entries, heads, call in buffers.calls():
        output[entries, heads], lse[entries, heads] = choose(call, settings.backend)[1].forward(call)
    for begin, end in work.spans:
        place, at = _places(work.query_rows[:, begin:end], queries.rows.shape[2])
        part = output[:, :, begin:end].flatten(1, 2)[:, at].to(into.lse.dtype)
        into.fold(place, part, lse[:, :, begin:end].flatten(1)[:, at])


def differentiate(
    work: RankPlan | Plan,
    queries: Queries,
    keys: Keys,
    received: Received | None,
    settings: KernelSettings,
    given: RowGradients,
    into: GradientSums,
) -> Tensor | None:
    """Add the gradients of the pairs of a plan; returns the gradients of the received rows, in their dtype."""
    if isinstance(work, Plan):
        if work.parts:
            call = _call_in_place(work, queries, keys.shard, settings)
            grads = choose(call, settings.backend)[1].backward(call, *given)
            for total, grad in zip(into[:3], grads, strict=True):
                total.view(grad.shape).add_(grad)
            into.add_bias(grads)
        return None
    grad_received = None
    if received is not None:
        grad_received = received.rows.new_zeros(received.rows.shape, dtype=into.query.dtype)
    if work.plan.parts:
        buffers = _Buffers(work, queries, keys, received, settings)
        # Filler rows have zeros for query and gradient and a finite LSE, at least their scores: they add nothing.
        output, grad_output = (_gather(x, work.query_rows) for x in (given.output, given.grad_output))
        lse = _gather(given.lse[..., None], work.query_rows)[..., 0]
        if settings.bias is not None:
            lse.masked_fill_(work.query_rows < 0, filler_lse(settings.bias))
        grad_lse = None if given.grad_lse is None else _gather(given.grad_lse[..., None], work.query_rows)[..., 0]
        sums = tuple(x.new_zeros(x.shape, dtype=into.query.dtype) for x in (buffers.query, buffers.key, buffers.value))
        shared = queries.rows.shape[1] // keys.shard.key.shape[1]
        for entries, heads, call in buffers.calls():
            groups = slice(heads.start // shared, heads.stop // shared)
            grads = choose(call, settings.backend)[1].backward(
                call,
                output[entries, heads],
                lse[entries, heads],
                grad_output[entries, heads],
                None if grad_lse is None else grad_lse[entries, heads],
            )
            for total, grad, some in zip(sums, grads, (heads, groups, groups), strict=True):
                total[entries, some] += grad
            into.add_bias(grads, heads)
        place, at = _places(work.query_rows, queries.rows.shape[2])
        into.query.index_add_(1, place, sums[0].flatten(1, 2)[:, at])
        place, at = _places(work.key_rows, keys.shard.key.shape[2])
        for total, grad in zip(into[1:3], sums[1:], strict=True):
            total.index_add_(1, place, grad.flatten(1, 2)[:, at])
        if received is not None and grad_received is not None:
            both = torch.cat([grad.flatten(1, 2)[:, work.far_at] for grad in sums[1:]], -1)
            grad_received.index_add_(0, received.source, both.transpose(0, 1).flatten(1))
    return None if received is None or grad_received is None else grad_received.to(received.rows.dtype)


def _call_in_place(plan: Plan, queries: Queries, shard: Shard, settings: KernelSettings) -> AttentionCall:
    """The call on the shard itself."""
    positions = None
    if settings.reads_tokens:
        positions = queries.tokens.expand(2, shard.query.shape[1], -1).contiguous()
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries.rows, shard.key, shard.value))
    return settings.call(query, key, value, plan, shard.padding, positions)


class _Buffers:
    """Queries, and the keys and values they see, in the order of a rank's buffer plan."""

    def __init__(
        self, work: RankPlan, queries: Queries, keys: Keys, received: Received | None, settings: KernelSettings
    ) -> None:
        self.plan, self.settings, shard = work.plan, settings, keys.shard
        batch, key_heads = len(queries.rows), shard.key.shape[1]
        self.query = _gather(queries.rows, work.query_rows)
        self.key, self.value = (_gather(x, work.key_rows) for x in (shard.key, shard.value))
        if received is not None:
            widths = self.key.shape[3], self.value.shape[3]
            rows = received.rows.unflatten(1, (-1, sum(widths)))[received.source].transpose(0, 1).split(widths, -1)
            for buffer, some in zip((self.key, self.value), rows, strict=True):
                buffer.view(batch, -1, some.shape[-1])[:, work.far_at] = some
        self.padding = None
        if shard.padding is not None:
            own = shard.padding.T[None, None].expand(1, key_heads, -1, -1)
            mask = _gather(own.to(torch.uint8), work.key_rows)[0]
            if received is not None and received.padding is not None:
                mask.view(-1, batch)[work.far_at] = received.padding[received.source]
            self.padding = mask.bool()
            """(G, n, B): rows of the buffer are other tokens for each key head, so each has its own padding"""
        self.positions = None
        if settings.reads_tokens:
            keys_at = work.key_tokens(keys.tokens, keys.n).clamp(min=0)
            keys_at = keys_at.repeat_interleave(queries.rows.shape[1] // key_heads, 0)
            rows = work.query_rows.clamp(min=0).long()
            self.positions = torch.stack([queries.tokens[rows] if len(queries.tokens) else rows, keys_at])

    def calls(self) -> list[tuple[slice, slice, AttentionCall]]:
        """Kernel calls, with the batch entries and query heads of each."""
        batch, heads, key_heads = len(self.query), self.query.shape[1], self.key.shape[1]
        if self.padding is None:
            call = self.settings.call(self.query, self.key, self.value, self.plan, None, self.positions)
            return [(slice(0, batch), slice(0, heads), call)]
        shared = heads // key_heads
        # The random stream of a row is its batch entry and head; a call on later ones starts at theirs.
        entries = [slice(i, i + 1) for i in range(batch)] if self.settings.dropout_p else [slice(0, batch)]
        calls = []
        for some in entries:
            for group in range(key_heads):
                mine = slice(group * shared, (group + 1) * shared)
                call = self.settings.call(
                    self.query[some, mine],
                    self.key[some, group : group + 1],
                    self.value[some, group : group + 1],
                    of_heads(self.plan, mine.start, mine.stop),
                    self.padding[group].T[some].contiguous(),
                    None if self.positions is None else self.positions[:, mine],
                    some.start * heads + mine.start,
                    mine,
                )
                calls.append((some, mine, call))
        return calls


def _places(rows: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Places of the real rows of a buffer (heads, rows): among heads * n rows, and in the flat buffer."""
    at = (rows.flatten() >= 0).nonzero()[:, 0]
    return at // max(rows.shape[1], 1) * n + rows.flatten()[at], at


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """x (B, H, n, W) at rows (H, N), 0 where a row is -1: (B, H, N, W)."""
    if not x.shape[2]:
        return x.new_zeros(*x.shape[:2], rows.shape[1], x.shape[3])
    head = torch.arange(len(rows), device=rows.device)[:, None]
    return x[:, head, rows.clamp(min=0).long()].masked_fill_((rows < 0)[None, :, :, None], 0)
