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
from .comm import ExchangePlan, agree, check_group, exchange, rank_in, request_for, same_everywhere, wire_device
from .restrict import RankPlan, restrict
from .shard import SequenceLayout

MOST_PREPARED = 64
"""Problems a group keeps its exchange plans of."""


@dataclass(frozen=True, eq=False, slots=True)
class Share:
    """Everything about one rank's part in a problem that does not depend on the numbers in its tensors."""

    rank_plan: RankPlan
    exchange: ExchangePlan
    key_index: Tensor
    """int64 [G, n]: which of [own rows, received rows, filler] each row of the key buffer is"""

    def to(self, device: torch.device) -> Share:
        """With everything the kernels read on the device."""
        return replace(
            self,
            rank_plan=map_tensors(self.rank_plan, lambda tensor: tensor.to(device)),
            key_index=self.key_index.to(device),
        )


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
    rows = pack(key, value)
    received = exchange(rows, share.exchange, group)
    padding = None
    if key_padding_mask is not None:
        own = pack_padding(key_padding_mask, key.shape[1])
        padding = own, exchange(own, share.exchange, group)
    return attend_locally(query, rows, received, padding, share, value.shape[-1], problem.scale, backend)


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
    return Share(plan, agreed, agreed.place(plan.key_codes))


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


def pack(key: Tensor, value: Tensor) -> Tensor:
    """Rows of K and V side by side, (key heads * tokens, batch * (D + E)); differentiable."""
    return torch.cat([key, value], -1).permute(1, 2, 0, 3).flatten(0, 1).flatten(1)


def pack_padding(key_padding_mask: Tensor, key_heads: int) -> Tensor:
    """The padding of each row, uint8 (key heads * tokens, batch)."""
    return key_padding_mask.T.repeat(key_heads, 1).to(torch.uint8)


def attend_locally(
    query: Tensor,
    rows: Tensor,
    received: Tensor,
    padding: tuple[Tensor, Tensor] | None,
    share: Share,
    value_width: int,
    scale: float,
    backend: str,
) -> AttentionOutput:
    """Attention of one rank's queries over its own and the received rows; differentiable in all three."""
    return AttentionOutput(*_LocalAttention.apply(query, rows, received, padding, share, value_width, scale, backend))


class _LocalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        rows: Tensor,
        received: Tensor,
        padding: tuple[Tensor, Tensor] | None,
        share: Share,
        value_width: int,
        scale: float,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.share, ctx.value_width, ctx.scale, ctx.backend, ctx.padding = share, value_width, scale, backend, padding
        dtype = torch.promote_types(query.dtype, torch.float32)
        batch, heads, n, _ = query.shape
        output = query.new_zeros(batch, heads * n, value_width, dtype=dtype)
        lse = query.new_full((batch, heads * n), -torch.inf, dtype=dtype)
        if share.rank_plan.plan.parts:
            buffers = _Buffers(share, query, rows, received, padding, value_width)
            found, found_lse = buffers.empty_output(value_width), query.new_empty(*buffers.query.shape[:3], dtype=dtype)
            for mine, call in buffers.calls(scale):
                result = choose(call, backend)[1].forward(call)
                found[:, mine], found_lse[:, mine] = result.output, result.lse
            for begin, end in share.rank_plan.spans:
                place, at = _places(share.rank_plan.query_rows[:, begin:end], n)
                part = found[:, :, begin:end].flatten(1, 2)[:, at].to(dtype)
                _merge(output, lse, place, part, found_lse[:, :, begin:end].flatten(1)[:, at])
        output, lse = output.to(query.dtype).unflatten(1, (heads, n)), lse.unflatten(1, (heads, n))
        ctx.save_for_backward(query, rows, received, output, lse)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        query, rows, received, output, lse = ctx.saved_tensors
        grad_output, grad_lse = grad_outputs
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        share: Share = ctx.share
        wide = lse.dtype
        batch, heads, n, _ = query.shape
        grad_query = query.new_zeros(batch, heads * n, query.shape[3], dtype=wide)
        grad_rows = rows.new_zeros(len(rows) + len(received) + 1, *rows.shape[1:], dtype=wide)
        if share.rank_plan.plan.parts:
            buffers = _Buffers(share, query, rows, received, ctx.padding, ctx.value_width)
            index = share.rank_plan.query_rows
            # Filler rows get an infinite denominator: their weights are 0, whatever keys their tile meets.
            rows_lse = _gather_rows(lse[..., None], index, torch.inf)[..., 0]
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
            grad_rows.index_add_(0, share.key_index.flatten(), buffers.grad_rows())
        grad_own, grad_received = grad_rows[:-1].to(rows.dtype).split([len(rows), len(received)])
        return grad_query.unflatten(1, (heads, n)).to(query.dtype), grad_own, grad_received, *(None,) * 5


class _Buffers:
    """Queries, and the keys and values they see, laid out as a rank's plan wants them."""

    def __init__(
        self,
        share: Share,
        query: Tensor,
        rows: Tensor,
        received: Tensor,
        padding: tuple[Tensor, Tensor] | None,
        value_width: int,
    ) -> None:
        self.share, self.dtype = share, torch.promote_types(query.dtype, torch.float32)
        width = query.shape[3] + value_width
        table = torch.cat([rows, received, rows.new_zeros(1, rows.shape[1])]).unflatten(1, (-1, width))
        both = table[share.key_index].permute(2, 0, 1, 3)
        self.query = _gather_rows(query, share.rank_plan.query_rows, 0.0)
        self.key, self.value = both.split([query.shape[3], value_width], -1)
        self.padding = None
        if padding is not None:
            own, remote = padding
            self.padding = torch.cat([own, remote, own.new_zeros(1, own.shape[1])]).bool()[share.key_index]
        self.grad_query = self.query.new_zeros(self.query.shape, dtype=self.dtype)
        self.grad_key, self.grad_value = (x.new_zeros(x.shape, dtype=self.dtype) for x in (self.key, self.value))

    def empty_output(self, value_width: int) -> Tensor:
        return self.query.new_empty(*self.query.shape[:3], value_width)

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

    def grad_rows(self) -> Tensor:
        """Gradients of the key buffer's rows, in the order of `key_index`."""
        return torch.cat([self.grad_key, self.grad_value], -1).permute(1, 2, 0, 3).flatten(0, 1).flatten(1)


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
