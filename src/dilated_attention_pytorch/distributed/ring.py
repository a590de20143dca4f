"""Attention over a sequence spread over ranks: fetch the keys the pattern needs, then compute as on one device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import must, must_be
from ..kernels.registry import AttentionCall, choose
from ..ops import AttentionOutput, plan_cache
from ..ops.attention import check_masks, check_tensors
from ..patterns import Causal, Packed, Pattern, parse
from ..plan import Axis, Plan
from ..plan.plan import map_tensors
from .comm import (
    ExchangePlan,
    agree,
    check_group,
    exchange,
    exchange_pair,
    rank_in,
    request_for,
    same_everywhere,
    wire_device,
)
from .restrict import RankPlan, restrict
from .shard import SequenceLayout

MOST_PREPARED = 64
"""Problems a group keeps its exchange plans of."""


@dataclass(frozen=True, eq=False, slots=True)
class Share:
    """Everything about one rank's part in a problem that does not depend on the numbers in its tensors."""

    rank_plan: RankPlan
    exchange: ExchangePlan
    key_rows: Tensor
    """int64 [G, n]: the row of the rank's shard that a row of the key buffer holds, -1 where it is none of them"""
    received_at: Tensor
    """int64: flat rows of the key buffer that hold received rows"""
    received_from: Tensor
    """int64: which received row each of them holds"""

    def to(self, device: torch.device) -> Share:
        """With everything the kernels read on the device."""
        kept = replace(self, exchange=None)  # pyrefly: ignore[bad-argument-type]
        return replace(map_tensors(kept, lambda tensor: tensor.to(device)), exchange=self.exchange)


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | str,
    layout: SequenceLayout,
    group: dist.ProcessGroup | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`attention` for a sequence whose tokens are spread over the ranks of a group. Collective.

    Every rank gives its shard of query, key and value and receives its shard of the output: the rows that `attention`
    gives for the whole sequence. Only the rows of K and V that some query of this rank sees are sent to it.

    Args:
        query: (B, H, n, D), the tokens `layout.positions(rank)` of the sequence; n may be 0.
        key: (B, G, n, D).
        value: (B, G, n, E).
        pattern: who may see whom in the whole sequence; the same on every rank.
        layout: which rank holds which tokens; the same on every rank.
        group: who takes part; the default group if None. A layout of one rank needs none.
        is_causal: also require the key not to come after the query.
        scale: factor on the scores; 1 / sqrt(D) by default.
        enable_gqa: let query head h read key head h // (H / G).
        key_padding_mask: bool (B, n), True where a key of this shard takes no part; on all ranks or on none.
        backend: "auto", or the name of a backend, which then never falls back.

    >>> from dilated_attention_pytorch.distributed import SequenceLayout, context_parallel_attention
    >>> q, k, v = torch.randn(3, 1, 2, 100, 16).unbind()
    >>> context_parallel_attention(q, k, v, "window:8", SequenceLayout.contiguous(100, 1)).shape
    torch.Size([1, 2, 100, 16])
    """
    return context_parallel_attention_with_lse(
        query,
        key,
        value,
        pattern,
        layout,
        group,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        key_padding_mask=key_padding_mask,
        backend=backend,
    ).output


def context_parallel_attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | str,
    layout: SequenceLayout,
    group: dist.ProcessGroup | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: Tensor | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """`context_parallel_attention`, and the natural logarithm of each row's denominator; both differentiable."""
    rank = rank_in(group, layout.world)
    problem, failure = None, None
    try:
        if group is not None or layout.world > 1:
            check_group(group, layout.world)
        check_shard(query, key, value, layout, rank, enable_gqa, key_padding_mask)
        problem = _Problem.of(query, key, value, pattern, layout, is_causal, scale, key_padding_mask)
    except (TypeError, ValueError) as error:
        failure = error
    if group is not None or layout.world > 1:
        share = _agreed_share(problem, layout, rank, group, failure)
    elif problem is None:
        assert failure is not None
        raise failure
    else:
        share = _share(problem, layout, 0, None, torch.device("cpu"))
    assert problem is not None
    share = share.to(query.device) if query.device.type != "cpu" else share
    received = exchange_pair(key, value, share.exchange, group)
    padding = None
    if key_padding_mask is not None:
        own = pack_padding(key_padding_mask, key.shape[1])
        padding = own, exchange(own, share.exchange, group)
    return attend_locally(query, key, value, received, padding, share, problem.scale, backend)


def check_shard(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout,
    rank: int,
    enable_gqa: bool,
    key_padding_mask: Tensor | None,
) -> None:
    """What must hold of one rank's tensors."""
    held = layout.lengths[rank]
    for name, x in (("query", query), ("key", key), ("value", value)):
        if isinstance(x, Tensor) and x.dim() == 4 and x.shape[2] != held:
            raise must(f"{name} must hold the {held} tokens of rank {rank}", x.shape[2])
    if held:
        check_tensors(query, key, value, enable_gqa)
    else:
        # A rank may hold no token at all; everything else about its tensors must still be right.
        check_tensors(_one_token(query), _one_token(key), _one_token(value), enable_gqa)
    check_masks(query, key_padding_mask, None)


def _one_token(x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:2], 1, x.shape[3]) if isinstance(x, Tensor) and x.dim() == 4 else x


def resolved(pattern: Pattern | str, is_causal: bool, n: int, heads: int) -> Pattern:
    """The pattern of the whole sequence, with all it needs to know filled in."""
    if not isinstance(pattern, Pattern | str):
        raise must_be("pattern must be a Pattern or text", type(pattern).__name__, 'For example "window:512 & causal".')
    whole = parse(pattern) if isinstance(pattern, str) else pattern
    if is_causal:
        packed = isinstance(whole, Packed)
        whole = replace(whole, pattern=whole.pattern & Causal()) if packed else whole & Causal()
    return whole.resolve(n, heads)


class _Problem(NamedTuple):
    """What a call asks, apart from the numbers in its tensors."""

    pattern: Pattern
    heads: int
    key_heads: int
    scale: float
    words: str
    """All that must be the same on every rank."""

    @staticmethod
    def of(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern | str,
        layout: SequenceLayout,
        is_causal: bool,
        scale: float | None,
        padding: Tensor | None,
    ) -> _Problem:
        batch, heads, _, width = query.shape
        whole = resolved(pattern, is_causal, layout.n, heads)
        scale = width**-0.5 if scale is None else float(scale)
        if not math.isfinite(scale):
            raise must("scale must be finite", scale)
        # Where one rank wants gradients and another does not, the first would wait for the second in backward.
        wanted = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
        words = (
            f"{whole.describe()}, {layout}, batch {batch}, {heads} heads, {key.shape[1]} key heads, "
            f"widths {width} and {value.shape[-1]}, {query.dtype}, scale {scale}, "
            f"padding {'no' if padding is None else 'yes'}, gradients of K or V {'yes' if wanted else 'no'}"
        )
        return _Problem(whole, heads, key.shape[1], scale, words)


@lru_cache(maxsize=64)
def rank_plan(pattern: Pattern, layout: SequenceLayout, rank: int, heads: int, key_heads: int) -> RankPlan:
    """One rank's share of the plan of a resolved pattern."""
    plan = plan_cache.get(pattern, layout.n, heads)
    return restrict(plan, layout, rank, key_heads)


def share_of(plan: RankPlan, agreed: ExchangePlan) -> Share:
    """Both plans of one rank, and how they fit together."""
    place = agreed.place(plan.key_codes)
    own = place < agreed.local_rows
    local = agreed.layout.lengths[agreed.rank]
    first = local * torch.arange(agreed.key_heads)[:, None]
    received = (place.flatten() - agreed.local_rows).masked_fill(own.flatten() | (plan.key_codes.flatten() < 0), -1)
    at = (received >= 0).nonzero()[:, 0]
    return Share(plan, agreed, torch.where(own, place - first, -1), at, received[at])


def _share(
    problem: _Problem, layout: SequenceLayout, rank: int, group: dist.ProcessGroup | None, device: torch.device
) -> Share:
    plan = rank_plan(problem.pattern, layout, rank, problem.heads, problem.key_heads)
    request = request_for(plan.key_codes, layout, rank, problem.key_heads)
    return share_of(plan, agree(request, layout, rank, problem.key_heads, group, device))


_shares: WeakKeyDictionary[dist.ProcessGroup, dict[str, Share]] = WeakKeyDictionary()


def _agreed_share(
    problem: _Problem | None,
    layout: SequenceLayout,
    rank: int,
    group: dist.ProcessGroup | None,
    failure: Exception | None,
) -> Share:
    """The rank's share, from before if every rank still has it; raises on every rank where one differs or failed."""
    members = dist.group.WORLD if group is None else group
    assert members is not None
    kept = _shares.setdefault(members, {})
    device = wire_device(group)
    words = "" if problem is None else problem.words
    if same_everywhere(words, failure, words in kept, group, device):
        return kept[words]
    assert problem is not None
    while len(kept) >= MOST_PREPARED:
        kept.pop(next(iter(kept)))
    kept[words] = _share(problem, layout, rank, group, device)
    return kept[words]


def pack_padding(key_padding_mask: Tensor, key_heads: int) -> Tensor:
    """The padding of each row, uint8 (key heads * tokens, batch)."""
    return key_padding_mask.T.repeat(key_heads, 1).to(torch.uint8)


def attend_locally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    received: Tensor,
    padding: tuple[Tensor, Tensor] | None,
    share: Share,
    scale: float,
    backend: str,
) -> AttentionOutput:
    """Attention of one rank's queries over its own and the received rows; differentiable in all four tensors."""
    return AttentionOutput(*_LocalAttention.apply(query, key, value, received, padding, share, scale, backend))


class _LocalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        received: Tensor,
        padding: tuple[Tensor, Tensor] | None,
        share: Share,
        scale: float,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.share, ctx.scale, ctx.backend, ctx.padding = share, scale, backend, padding
        dtype = torch.promote_types(query.dtype, torch.float32)
        batch, heads, n, _ = query.shape
        output = query.new_zeros(batch, heads * n, value.shape[3], dtype=dtype)
        lse = query.new_full((batch, heads * n), -torch.inf, dtype=dtype)
        if share.rank_plan.plan.parts:
            buffers = _Buffers(share, query, key, value, received, padding)
            found, found_lse = buffers.empty_output(), query.new_empty(*buffers.query.shape[:3], dtype=dtype)
            for mine, call in buffers.calls(scale):
                result = choose(call, backend)[1].forward(call)
                found[:, mine], found_lse[:, mine] = result.output, result.lse
            for begin, end in share.rank_plan.spans:
                place, at = _places(share.rank_plan.query_rows[:, begin:end], n)
                part = found[:, :, begin:end].flatten(1, 2)[:, at].to(dtype)
                _merge(output, lse, place, part, found_lse[:, :, begin:end].flatten(1)[:, at])
        output, lse = output.to(query.dtype).unflatten(1, (heads, n)), lse.unflatten(1, (heads, n))
        ctx.save_for_backward(query, key, value, received, output, lse)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        query, key, value, received, output, lse = ctx.saved_tensors
        grad_output, grad_lse = grad_outputs
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        share: Share = ctx.share
        wide = lse.dtype
        batch, heads, n, _ = query.shape
        grad_query = query.new_zeros(batch, heads * n, query.shape[3], dtype=wide)
        grad_key, grad_value = (x.new_zeros(batch, x.shape[1] * n, x.shape[3], dtype=wide) for x in (key, value))
        grad_received = received.new_zeros(received.shape, dtype=wide)
        if share.rank_plan.plan.parts:
            buffers = _Buffers(share, query, key, value, received, ctx.padding)
            index = share.rank_plan.query_rows
            # Filler rows have zeros for query and gradient and a finite LSE: they add nothing to any key.
            rows_lse = _gather_rows(lse[..., None], index, 0.0)[..., 0]
            rows_output, rows_grad = (_gather_rows(x, index, 0.0) for x in (output, grad_output))
            rows_grad_lse = None if grad_lse is None else _gather_rows(grad_lse[..., None], index, 0.0)[..., 0]
            place, at = _places(index, n)
            for mine, call in buffers.calls(ctx.scale):
                lse_grad = None if rows_grad_lse is None else rows_grad_lse[:, mine]
                found = choose(call, ctx.backend)[1].backward(
                    call, rows_output[:, mine], rows_lse[:, mine], rows_grad[:, mine], lse_grad
                )
                buffers.add(mine, found.query, found.key, found.value)
            grad_query.index_add_(1, place, buffers.grad_query.flatten(1, 2)[:, at])
            place, at = _places(share.key_rows, n)
            grad_key.index_add_(1, place, buffers.grad_key.flatten(1, 2)[:, at])
            grad_value.index_add_(1, place, buffers.grad_value.flatten(1, 2)[:, at])
            grad_received.index_add_(0, share.received_from, buffers.grad_received())
        found = ((grad_query, query), (grad_key, key), (grad_value, value))
        own = [grad.unflatten(1, (x.shape[1], n)).to(x.dtype) for grad, x in found]
        return *own, grad_received.to(received.dtype), *(None,) * 4


class _Buffers:
    """Queries, and the keys and values they see, laid out as a rank's plan wants them."""

    def __init__(
        self,
        share: Share,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        received: Tensor,
        padding: tuple[Tensor, Tensor] | None,
    ) -> None:
        self.share, self.dtype = share, torch.promote_types(query.dtype, torch.float32)
        self.query = _gather_rows(query, share.rank_plan.query_rows, 0.0)
        self.key, self.value = (_gather_rows(x, share.key_rows, 0.0) for x in (key, value))
        widths = key.shape[3], value.shape[3]
        fetched = received.unflatten(1, (-1, sum(widths)))[share.received_from].transpose(0, 1).split(widths, -1)
        for buffer, rows in zip((self.key, self.value), fetched, strict=True):
            buffer.view(len(query), -1, rows.shape[-1])[:, share.received_at] = rows
        self.padding = None
        if padding is not None:
            own, remote = padding
            mask = _gather_rows(own.view(1, key.shape[1], -1, len(query)), share.key_rows, 0)[0]
            mask.view(-1, len(query))[share.received_at] = remote[share.received_from]
            self.padding = mask.bool()
        self.grad_query = self.query.new_zeros(self.query.shape, dtype=self.dtype)
        self.grad_key, self.grad_value = (x.new_zeros(x.shape, dtype=self.dtype) for x in (self.key, self.value))

    def empty_output(self) -> Tensor:
        return self.query.new_empty(*self.query.shape[:3], self.value.shape[3])

    def calls(self, scale: float) -> list[tuple[slice, AttentionCall]]:
        """What to compute, and for which query heads."""
        plan = self.share.rank_plan.plan
        heads, key_heads = self.query.shape[1], self.key.shape[1]
        if self.padding is None:
            return [(slice(0, heads), AttentionCall(self.query, self.key, self.value, plan, scale))]
        # Rows of the buffer are other tokens for each key head, so each has its own padding.
        shared = heads // key_heads
        found = []
        for group in range(key_heads):
            mine = slice(group * shared, (group + 1) * shared)
            key, value = self.key[:, group : group + 1], self.value[:, group : group + 1]
            padding = self.padding[group].T.contiguous()
            found.append((mine, AttentionCall(self.query[:, mine], key, value, _heads(plan, mine), scale, padding)))
        return found

    def add(self, mine: slice, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Take the gradients of one call."""
        shared = self.query.shape[1] // self.key.shape[1]
        groups = slice(mine.start // shared, mine.stop // shared)
        self.grad_query[:, mine] += query
        self.grad_key[:, groups] += key
        self.grad_value[:, groups] += value

    def grad_received(self) -> Tensor:
        """Gradients of the buffer rows that hold received rows, K and V side by side."""
        at = self.share.received_at
        both = [grad.flatten(1, 2)[:, at] for grad in (self.grad_key, self.grad_value)]
        return torch.cat(both, -1).transpose(0, 1).flatten(1)


def _heads(plan: Plan, mine: slice) -> Plan:
    """The plan of some of the heads."""

    def axis(whole: Axis) -> Axis:
        return replace(whole, offset=whole.offset[mine])

    parts = tuple(
        replace(part, queries=axis(part.queries), keys=axis(part.keys), head_class=part.head_class[mine])
        for part in plan.parts
    )
    return replace(plan, heads=mine.stop - mine.start, parts=parts)


def _places(rows: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Of the real rows of a buffer, (heads, rows): their place among heads * n queries, and in the flat buffer."""
    at = (rows.flatten() >= 0).nonzero()[:, 0]
    return at // rows.shape[1] * n + rows.flatten()[at], at


def _gather_rows(x: Tensor, rows: Tensor, filler: float) -> Tensor:
    """x (B, H, n, W) at rows (H, N), filler where they are -1: (B, H, N, W)."""
    if not x.shape[2]:
        return x.new_full((*x.shape[:2], rows.shape[1], x.shape[3]), filler)
    head = torch.arange(len(rows), device=rows.device)[:, None]
    return x[:, head, rows.clamp(min=0)].masked_fill_((rows < 0)[None, :, :, None], filler)


def _merge(output: Tensor, lse: Tensor, place: Tensor, found: Tensor, found_lse: Tensor) -> None:
    """Fold the keys of one part into the running softmax of the rows at `place`."""
    before = lse[:, place]
    top = torch.maximum(before, found_lse)
    top = torch.where(top == -torch.inf, 0.0, top)
    # torch.logaddexp rounds an element differently by where in memory it lies; a row's bits must not depend on that.
    old, added = (before - top).exp(), (found_lse - top).exp()
    total = old + added
    lse[:, place] = torch.where(total > 0, top + total.log(), -torch.inf)
    total = torch.where(total > 0, total, 1.0)
    output[:, place] = output[:, place] * (old / total)[..., None] + found * (added / total)[..., None]
