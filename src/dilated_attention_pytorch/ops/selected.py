"""Attention over a selection: the one operation on plans that a tensor decided.

By query blocks, the selection is one plan. By tokens, what all rows share is one plan and what each token chose is
another, on copies of the queries laid out by the block they chose; both are parts of one softmax and merge by LSE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import must
from ..kernels import triton_backend
from ..kernels.dropout import fresh_seed, shifted
from ..kernels.listed_schedule import Listed
from ..kernels.registry import AttentionCall, Backend, Forward, Gradients, choose, empty_rows
from ..kernels.selection import no_kernels
from ..plan.plan import Plan
from ..plan.selected import (
    Chosen,
    Gathered,
    Selection,
    block_plan,
    chosen_tokens,
    may_read,
    token_plan,
)
from ..shapes import Key, KeyPadding, Query, Value
from .attention import autocasted
from .checks import check_masks, check_tensors
from .merge import AttentionOutput
from .selection_mass import Lesson, Scene, learn

GATHERED, GPU_ROOM = 512 * 2**20, 4
"""Bytes of gathered queries and outputs held at a time, unless one key head needs more; on a GPU times as many."""
MOST_BITS = 2**31 - 1
"""Tokens times key blocks, over heads, up to which a bit for each tells who chose what, and 32 bits count the choices;
beyond, they are sorted."""
LONGEST_STUDY = 8192


@torch.compiler.disable
def selected_attention(
    query: Query,
    key: Key,
    value: Value,
    selection: Selection,
    *,
    scale: float | None = None,
    key_padding_mask: KeyPadding | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    lesson: Lesson | None = None,
    scores: Callable[[], tuple[Tensor | None, Tensor | None]] | None = None,
) -> AttentionOutput:
    """Exact attention over the blocks of a selection, differentiable in query, key and value.

    Args:
        query: (B, H, N, D).
        key: (B, G, N, D), G = H or a divisor of it.
        value: (B, G, N, E).
        selection: which blocks each row sees.
        scale: factor on the scores; 1 / sqrt(D) by default.
        key_padding_mask: bool (B, N), True where a key takes no part.
        dropout_p: probability of dropping a weight.
        backend: "auto" or a name from `backends()`.
        lesson: rows that teach a scorer in the backward pass (see `learn`).
        scores: gives the scores (B, H, rows, k) of the blocks listed for the lesson's chosen rows, and (B, H, rows, T)
            of all blocks for its dense rows; they get gradients in the backward pass whatever the loss is. Asked for
            once the device has attention to compute.
    """
    query, key, value = autocasted(query, key, value)
    check_tensors(query, key, value, enable_gqa=True)
    check_masks(query, key_padding_mask, None)
    _check_selection(query, selection)
    seed = fresh_seed(query.device) if dropout_p > 0 else None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    work = _Work(selection, scale, key_padding_mask, dropout_p, seed, backend, lesson)
    with torch.no_grad():
        found = _attended(work, query, key, value)
    given = (None, None) if scores is None else scores()
    return AttentionOutput(*_Selected.apply(query, key, value, *given, work, found))


def _check_selection(query: Tensor, selection: Selection) -> None:
    batch, heads, n, _ = query.shape
    rows = n if selection.per_token else selection.blocks
    if selection.n != n or selection.indices.shape[:3] != (batch, heads, rows):
        raise must(
            f"the selection must be for {batch} samples, {heads} heads and {n} tokens",
            f"indices {tuple(selection.indices.shape)} for {selection.n} tokens",
        )


# Never changed, but not frozen: every call makes one.
@dataclass(slots=True)
class _Work:
    """What a call is told beside its tensors."""

    selection: Selection
    scale: float
    key_padding_mask: Tensor | None
    dropout_p: float
    seed: Tensor | None
    backend: str
    lesson: Lesson | None

    def call(self, query: Tensor, key: Tensor, value: Tensor, plan: Plan, folded: bool = True) -> AttentionCall:
        padding = self.key_padding_mask
        padding = padding.reshape(1, -1) if folded and padding is not None else padding
        return AttentionCall(query, key, value, plan, self.scale, padding, self.dropout_p, self.seed)

    def listed(self) -> Listed | Plan:
        """A selection by query blocks as kernels read it: on a GPU nothing is looked at."""
        device = self.selection.indices.device
        return block_plan(self.selection) if may_read(device) or no_kernels(device) else Listed(self.selection)

    def block_call(
        self, query: Tensor, key: Tensor, value: Tensor, listed: Listed | Plan, *, backward: bool = False
    ) -> tuple[AttentionCall, str, Backend]:
        """The call of a selection by query blocks, and what runs it."""
        folded = _fold(query), _fold(key), _fold(value)
        if isinstance(listed, Plan):
            call = self.call(*folded, listed)
            return call, *choose(call, self.backend)
        call = self.call(*folded, listed.whole_plan if backward else listed.plan)
        return call, *listed.choose(call, self.backend)

    def shared_call(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        s = self.selection
        near = (s.local_blocks, s.sink_blocks, s.is_causal)
        plan = _shared_plan(s.n, query.shape[1], s.block_size, *near, query.device)
        return self.call(query, key, value, plan, folded=False)


class _Piece(NamedTuple):
    """The choices of some heads in some samples, as a plan."""

    heads: slice
    key_heads: slice
    tokens: slice
    """Those of the samples, counted over all."""
    streams: int
    """Of dropout, before the first of this piece."""
    gathered: Gathered

    def rows(self, x: Tensor) -> Tensor:
        """What (1, h, b * n, ...) holds for each gathered row, 0 for filler, which so adds nothing to any sum."""
        x, source = x[0, self.heads, self.tokens], self.gathered.source
        head = torch.arange(len(source), device=source.device)[:, None]
        filler = source < 0
        return x[head, source.clamp(min=0)].masked_fill_(filler if x.dim() == 2 else filler[..., None], 0.0)[None]

    def positions(self) -> Tensor:
        """int64 (2, h, rows): tokens of one sample, which gathered rows and keys stand for in dropout."""
        source = self.gathered.source.clamp(min=0)
        return torch.stack([source, torch.arange(source.shape[1], device=source.device).expand_as(source)])


class _Found(NamedTuple):
    """What a forward pass gave, and what the backward pass needs of it."""

    output: Tensor
    lse: Tensor
    listed: Listed | Plan | None = None
    pieces: list[_Piece] | None = None
    chosen: list[tuple[slice, Chosen]] | None = None
    listed_lse: Tensor | None = None


def _attended(work: _Work, query: Tensor, key: Tensor, value: Tensor) -> _Found:
    if work.selection.per_token:
        call = work.shared_call(query, key, value)
        near = choose(call, work.backend)[1].forward(call)
        if _joins_in_place(work, call):
            return _Found(*near, chosen=_join_chosen(work, call, near))
        output, lse, pieces, listed_lse = _forward_tokens(work, query, key, value, near)
        return _Found(output, lse, pieces=pieces, listed_lse=listed_lse)
    listed = work.listed()
    call, _, backend = work.block_call(query, key, value, listed)
    found = backend.forward(call)
    return _Found(_unfold(found.output, query), _unfold(found.lse, query), listed)


class _Selected(torch.autograd.Function):
    """What was found, with its backward; the scores' gradient comes from the lesson and not from the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        chosen_scores: Tensor | None,
        dense_scores: Tensor | None,
        work: _Work,
        found: _Found,
    ) -> tuple[Tensor, Tensor]:
        output, lse, ctx.listed, ctx.pieces, ctx.chosen, listed_lse = found
        ctx.work = work
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, chosen_scores, dense_scores, output, lse, listed_lse)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        grad_output, grad_lse = grads
        query, key, value, chosen_scores, dense_scores, output, lse, listed_lse = ctx.saved_tensors
        work: _Work = ctx.work
        if grad_output is None and grad_lse is None:
            return (None,) * 7
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        grad_output = grad_output if grad_output.stride(-1) == 1 else grad_output.contiguous()
        found: tuple[Tensor | None, ...] = (None,) * 3
        if any(ctx.needs_input_grad[:3]):
            if work.selection.per_token:
                call = work.shared_call(query, key, value)
                near = choose(call, work.backend)[1].backward(call, output, lse, grad_output, grad_lse)
                if ctx.chosen is not None:
                    found = _add_chosen(call, ctx.chosen, near, output, lse, grad_output, grad_lse)
                else:
                    found = _backward_tokens(
                        work, ctx.pieces, near, query, key, value, output, lse, grad_output, grad_lse
                    )
            else:
                call, _, backend = work.block_call(query, key, value, ctx.listed, backward=True)
                slope = None if grad_lse is None else _fold(grad_lse)
                folded = backend.backward(call, _fold(output), _fold(lse), _fold(grad_output), slope)
                found = tuple(_unfold(x, query) for x in folded)
        learned: tuple[Tensor | None, ...] = (None, None)
        if work.lesson is not None:
            scene = Scene(query, key, work.selection, work.scale, work.key_padding_mask, listed_lse)
            learned = learn(scene, work.lesson, lse, grad_output, chosen_scores, dense_scores)
        return *found, *learned, None, None


def _fold(x: Tensor) -> Tensor:
    """(b, h, n, ...) as (1, h, b * n, ...): no copy where heads lie inside tokens, or of a single sample."""
    return x if x.shape[0] == 1 else x.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)


def _unfold(x: Tensor, like: Tensor) -> Tensor:
    return x if like.shape[0] == 1 else x[0].unflatten(1, (like.shape[0], -1)).transpose(0, 1)


@lru_cache(maxsize=64)
def _shared_plan(
    n: int, heads: int, block_size: int, local: int, sink: int, is_causal: bool, device: torch.device
) -> Plan:
    """The plan of what every token of a block sees, for any batch."""
    t = -(-n // block_size)
    nothing = torch.empty(1, 1, t, 0, dtype=torch.int32, device=device)
    plan = block_plan(Selection(nothing, nothing.sum(-1), n, block_size, is_causal, False, local, sink))
    (part,) = plan.parts
    none = torch.zeros(heads, dtype=torch.int32, device=device)
    axis = replace(part.queries, offset=none)
    part = replace(part, queries=axis, keys=axis, head_class=none)
    return replace(plan, heads=heads, parts=(part,), blocks=plan.blocks * heads)


def _head_runs(work: _Work, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[slice, slice]]:
    """Query and key heads whose choices fit into memory at a time; none where nothing can be listed."""
    batch, heads, n, width = query.shape
    slots = work.selection.indices.shape[-1]
    if not slots:
        return
    shared = heads // key.shape[1]
    bytes_a_head = batch * n * slots * (width + value.shape[-1]) * query.element_size() * shared
    step = max(1, (GATHERED if may_read(query.device) else GPU_ROOM * GATHERED) // bytes_a_head)
    for first in range(0, key.shape[1], step):
        key_heads = slice(first, min(first + step, key.shape[1]))
        yield slice(first * shared, key_heads.stop * shared), key_heads


def _joins_in_place(work: _Work, call: AttentionCall) -> bool:
    """Whether kernels gather the queries where they lie, and nothing is read back."""
    able = work.backend in ("auto", "triton") and triton_backend.why_not(call) is None
    return able and not may_read(call.device)


def _join_chosen(work: _Work, call: AttentionCall, near: Forward) -> list[tuple[slice, Chosen]]:
    """The choices by heads, joined to what all rows share in place."""
    from ..kernels import triton_tokens, triton_turned

    found, selection = [], work.selection
    indices = selection.indices
    batch, all_heads, n, listed = indices.shape
    group = all_heads // call.key.shape[1]
    # Every run of a key block's queries may leave a part of a tile empty.
    bits = batch * (max(selection.blocks, listed + 1) * n + selection.block_size)
    for heads, _ in _head_runs(work, call.query, call.key, call.value):
        many = heads.stop - heads.start
        own = selection if many == all_heads else replace(selection, indices=indices[:, heads])
        turn = triton_turned.chosen_tokens if many * bits <= MOST_BITS else chosen_tokens
        chosen = turn(own, group)
        triton_tokens.forward(call, chosen, near, heads)
        found.append((heads, chosen))
    return found


def _add_chosen(
    call: AttentionCall,
    chosen: list[tuple[slice, Chosen]],
    near: Gradients,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients, added to those of what all rows share in place."""
    from ..kernels import triton_tokens

    if chosen:
        delta = triton_tokens.delta_of(output, lse, grad_output, grad_lse)
        for heads, own in chosen:
            triton_tokens.backward(call, own, near, heads, lse, delta, grad_output)
    return tuple(near)


def _pieces(work: _Work, query: Tensor, key: Tensor, value: Tensor) -> Iterator[_Piece]:
    """All choices, of as many key heads at a time as fit; samples apart where dropout has to tell them apart."""
    batch, all_heads, n, _ = query.shape
    apart = 1 if work.dropout_p else batch
    for heads, key_heads in _head_runs(work, query, key, value):
        for first in range(0, batch, apart):
            samples = slice(first, first + apart)
            selection = replace(work.selection, indices=work.selection.indices[samples, heads])
            gathered = token_plan(selection, n if work.dropout_p else 0)
            tokens = slice(first * n, samples.stop * n)
            yield _Piece(heads, key_heads, tokens, first * all_heads + heads.start, gathered)


def _gathered_call(work: _Work, piece: _Piece, folded: tuple[Tensor, Tensor, Tensor]) -> AttentionCall:
    query, key, value = folded
    keys, values = (x[:, piece.key_heads, piece.tokens] for x in (key, value))
    call = work.call(piece.rows(query), keys, values, piece.gathered.plan)
    if call.key_padding_mask is not None:
        call = replace(call, key_padding_mask=call.key_padding_mask[:, piece.tokens])
    if call.seed is not None:
        call = replace(call, seed=shifted(call.seed, piece.streams), positions=piece.positions())
    return call


def _forward_tokens(
    work: _Work, query: Tensor, key: Tensor, value: Tensor, near: Forward
) -> tuple[Tensor, Tensor, list[_Piece], Tensor | None]:
    """Output, LSE, what the backward pass needs, and for a lesson the LSE of listed blocks of its rows (b, h, r, k)."""
    folded = (_fold(query), _fold(key), _fold(value))
    # Sums run in the order of the slots on (h, b * n, e), whatever the other tokens chose.
    total = _fold(near.output)[0].to(near.lse.dtype)
    lse = _fold(near.lse)[0].clone()
    if total.data_ptr() == near.output.data_ptr():
        total = total.clone()
    pieces = list(_pieces(work, query, key, value))
    batch, heads, n, _ = query.shape
    asked = torch.arange(0) if work.lesson is None else work.lesson.chosen_rows
    listed_lse = lse.new_empty((batch, heads, len(asked), work.selection.indices.shape[-1]))
    for piece in pieces:
        call = _gathered_call(work, piece, folded)
        found = choose(call, work.backend)[1].forward(call)
        rows = piece.gathered.plan.n
        logs = torch.nn.functional.pad(found.lse[0], (0, 1), value=-torch.inf)
        place = piece.gathered.place
        parts = logs.gather(1, place.flatten(1)).view_as(place)
        before = lse[piece.heads, piece.tokens]
        after = torch.logaddexp(before, parts.logsumexp(-1))
        seen = after > -torch.inf
        mine = total[piece.heads, piece.tokens]
        mine *= torch.where(seen, (before - after).exp(), 0.0)[..., None]
        share = torch.where(seen[..., None], (parts - after[..., None]).exp(), 0.0)
        head = torch.arange(len(place), device=place.device)[:, None]
        for slot in range(place.shape[-1]):
            listed = place[..., slot].clamp(max=rows - 1)
            part = found.output[0][head, listed].to(mine.dtype) * share[..., slot, None]
            mine += torch.where((place[..., slot] < rows)[..., None], part, 0.0)
        lse[piece.heads, piece.tokens] = after
        samples = slice(piece.tokens.start // n, piece.tokens.stop // n)
        listed_lse[samples, piece.heads] = parts.unflatten(1, (-1, n))[:, :, asked].transpose(0, 1)
    output = empty_rows(query, value.shape[-1]).copy_(_unfold(total[None], query))
    return output, _unfold(lse[None], query).contiguous(), pieces, listed_lse if pieces and len(asked) else None


def _backward_tokens(
    work: _Work,
    pieces: list[_Piece],
    near: Gradients,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, ...]:
    """Each part's gradient is exact by itself, from the output and LSE of the whole row."""
    if not pieces:
        return tuple(near)
    sums = [_fold(grad)[0].to(lse.dtype, copy=True) for grad in near]
    folded = (_fold(query), _fold(key), _fold(value))
    rows_of = [_fold(x) for x in (output, lse, grad_output)]
    slope = None if grad_lse is None else _fold(grad_lse)
    for piece in pieces:
        call = _gathered_call(work, piece, folded)
        own_output, own_lse, own_grad = (piece.rows(x) for x in rows_of)
        own_slope = None if slope is None else piece.rows(slope)
        found = choose(call, work.backend)[1].backward(call, own_output, own_lse, own_grad, own_slope)
        place, rows = piece.gathered.place, piece.gathered.plan.n
        head = torch.arange(len(place), device=place.device)[:, None]
        mine = sums[0][piece.heads, piece.tokens]
        for slot in range(place.shape[-1]):
            listed = place[..., slot].clamp(max=rows - 1)
            part = found.query[0][head, listed].to(mine.dtype)
            mine += torch.where((place[..., slot] < rows)[..., None], part, 0.0)
        sums[1][piece.key_heads, piece.tokens] += found.key[0].to(lse.dtype)
        sums[2][piece.key_heads, piece.tokens] += found.value[0].to(lse.dtype)
    likes = (query, key, value)
    return tuple(
        empty_rows(like, like.shape[-1]).copy_(_unfold(total[None], like))
        for total, like in zip(sums, likes, strict=True)
    )


def weighted_attention(
    query: Query,
    key: Key,
    value: Value,
    selection: Selection,
    bias: Tensor,
    *,
    scale: float | None = None,
    key_padding_mask: KeyPadding | None = None,
) -> Tensor:
    """Attention over a selection with a bias (B, H, rows, T) on each block's scores, dense: for studies, n <= 8192.

    The gradient of the task's loss reaches the bias, which is what a scorer would learn from without a lesson.
    """
    if selection.n > LONGEST_STUDY:
        raise must(f"a weighted selection must have n <= {LONGEST_STUDY}", selection.n, 'Use score_gradient="distill".')
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    token = torch.arange(selection.n, device=query.device)
    row = token if selection.per_token else token // selection.block_size
    block = token // selection.block_size
    seen = selection.allowed()[:, :, row][..., block]
    if selection.is_causal:
        seen = seen & (token <= token[:, None])
    if key_padding_mask is not None:
        seen = seen & ~key_padding_mask[:, None, None]
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = scale * query @ key.mT + bias[:, :, row][..., block]
    some = seen.any(-1, keepdim=True)
    weights = torch.where(seen, scores, -torch.inf).masked_fill(~some, 0.0).softmax(-1)
    return torch.where(seen & some, weights, 0.0).to(value.dtype) @ value
