"""Attention over blocks that a tensor lists: the public operation on indices, and attention over a selection.

`selected_attention` brings indices into the normal form of a `Selection`; learned layers make theirs themselves. Both
run the same implementations. Two torch operators make the public operation traceable.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ..errors import must
from ..kernels.call import Forward, empty_rows, laid_like
from ..kernels.dropout import fresh_seed
from ..ops import operators
from ..ops.attention import empty_attention, is_observed, needs_graph
from ..ops.checks import (
    autocasted,
    check_layout,
    check_masks,
    check_sink,
    check_tensors,
    unexpected,
    validate_cu_seqlens,
)
from ..ops.derivatives import OnceDifferentiable, check_reverse_mode, once_differentiable, scale_of
from ..ops.flops import FlopFormulas
from ..ops.merge import AttentionOutput
from ..ops.sink import apply_sink
from ..shapes import CuSeqlens, Key, KeyPadding, Query, Value
from . import backend as implementations
from .attend import BlockAttend, TokenAttend, fold, unfold
from .backend import choose_attend, distill, distill_inputs, score_rows
from .indices import check_indices, listed_pairs, selection_of, validate_indices
from .scores import BlockScores
from .types import DistillBatch, Selection

_SETTINGS = (
    "Tensor indices, Tensor? counts, Tensor? key_padding_mask, Tensor? cu_seqlens, "
    "int granularity, bool is_causal, float scale, str backend"
)
_library = torch.library.Library("dilated_attention", "FRAGMENT")
_library.define(f"selected_forward(Tensor query, Tensor key, Tensor value, {_SETTINGS}) -> (Tensor, Tensor)")
_library.define(
    "selected_backward(Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, Tensor grad_output, "
    f"Tensor? grad_lse, {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
)

LONGEST_WEIGHTED = 8192


class SelectedSettings(NamedTuple):
    """Arguments of the operators besides query, key and value, in the order of their schema."""

    indices: Tensor
    counts: Tensor | None
    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    granularity: int
    is_causal: bool
    scale: float
    backend: str


@overload
def selected_attention(
    query: Query,
    key: Key,
    value: Value,
    indices: Tensor,
    counts: Tensor | None = None,
    *,
    granularity: int = 128,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sink: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    key_padding_mask: KeyPadding | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def selected_attention(
    query: Query,
    key: Key,
    value: Value,
    indices: Tensor,
    counts: Tensor | None = None,
    *,
    granularity: int = 128,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sink: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    key_padding_mask: KeyPadding | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> AttentionOutput: ...
def selected_attention(
    query: Query,
    key: Key,
    value: Value,
    indices: Tensor,
    counts: Tensor | None = None,
    *,
    granularity: int = 128,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sink: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    key_padding_mask: KeyPadding | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **unknown: object,
) -> Tensor | AttentionOutput:
    """Exact attention over the key blocks that an index tensor lists for each row.

    Differentiable in query, key, value and sink. Queries and keys have equal length. Nothing is read back from a GPU:
    indices may change from call to call, under `torch.compile` and in a CUDA graph.

    Args:
        query: (B, H, N, D).
        key: (B, G, N, D) with G = H, or a divisor of H when `enable_gqa`.
        value: (B, G, N, E).
        indices: int32 or int64 (B, S, rows, K): numbers of key blocks, padded with -1. S is 1, G or H: lists for all
            query heads, for the query heads of each key head, or for each query head. `rows` is N, a list for each
            token, or ceil(N / granularity), a list for each block of queries. Order and duplicates do not matter.
            Other values raise an error on the CPU and are ignored on a GPU; see `validate_indices`.
        counts: int (B, S, rows): valid entries of each row, the first ones; entries after them are ignored.
        granularity: tokens of a block: 16, 32, 64, 128 or 256.
        is_causal: drop keys after the query: blocks after the row's own, and the upper triangle of its own block.
        scale: factor on the scores; 1 / sqrt(D) by default.
        enable_gqa: let query head h read key head h // (H / G).
        sink: (H,), a logit of each head in the softmax denominator, without a value; not part of the LSE.
        cu_seqlens: int32 or int64 (documents + 1) on the query's device: bounds of documents packed one after another
            (B must be 1). A row attends only to keys of its own document. Blocks are those of the packed sequence, so
            that one block may hold tokens of several documents; a row attends to its document's tokens in it.
            Wrong bounds raise on the CPU; on a GPU see `validate_cu_seqlens`.
        key_padding_mask: bool (B, N), True where a key is ignored.
        return_lse: also return the natural logarithm of each row's softmax denominator.
        backend: "auto", or a name from `dilated_attention_pytorch.backends()`, which then never falls back.

    Returns:
        (B, H, N, E), or with `return_lse` an `AttentionOutput` with the LSE (B, H, N). A row without keys has output 0
        and LSE -inf.

    >>> import torch
    >>> from dilated_attention_pytorch import selected_attention
    >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
    >>> indices = torch.randint(-1, 8, (1, 8, 8, 3), dtype=torch.int32)
    >>> selected_attention(q, k, v, indices, granularity=64, is_causal=True).shape
    torch.Size([1, 8, 512, 64])
    """
    if unknown:
        raise unexpected("selected_attention", unknown)
    query, key, value = autocasted(query, key, value)
    check_tensors(query, key, value, enable_gqa)
    check_layout(query)
    check_masks(query, key_padding_mask, cu_seqlens)
    check_indices(query, key, indices, counts, granularity)
    if cu_seqlens is not None and cu_seqlens.device != query.device:
        raise must(f"cu_seqlens must be on the query's device {query.device}", cu_seqlens.device)
    if sink is not None:
        check_sink(query, sink)
    scale = scale_of(scale, query.shape[-1])
    if not query.shape[0] or not query.shape[2]:
        output, lse = empty_attention(query, key, value)
    else:
        check_reverse_mode(query, key, value)
        masks = key_padding_mask, cu_seqlens
        settings = SelectedSettings(indices, counts, *masks, granularity, is_causal, scale, backend)
        output, lse = _selected(query, key, value, settings)
    if sink is not None:
        output = apply_sink(output, lse, sink)
    return AttentionOutput(output, lse) if return_lse else output


def _selected(query: Tensor, key: Tensor, value: Tensor, settings: SelectedSettings) -> tuple[Tensor, Tensor]:
    query, key, value = operators.kernel_inputs(query, key, value)
    graph = needs_graph(query, key, value)
    if is_observed(query, key, value):
        run = _ObservedSelected.apply if graph else torch.ops.dilated_attention.selected_forward
        return run(query, key, value, *settings)
    with torch.no_grad():
        attend = _attend_of(query, key, value, settings)
        result = attend.forward(query, key, value)
    return _Selected.apply(query, key, value, None, None, result, attend, None) if graph else result


def _attend_of(query: Tensor, key: Tensor, value: Tensor, settings: SelectedSettings) -> BlockAttend | TokenAttend:
    """Implementation for a call, with its indices checked where the host may read them."""
    indices, counts, padding, cu_seqlens, size, is_causal, scale, backend = settings
    _, heads, n, _ = query.shape
    if implementations.allows_host_sync(query.device):
        validate_indices(indices, -(-n // size), counts)
        if cu_seqlens is not None:
            validate_cu_seqlens(cu_seqlens, n)
    selection = selection_of(indices, counts, n, heads, size, is_causal, cu_seqlens)
    return choose_attend(query, key, value, selection, scale, padding, 0.0, None, backend, None)


@torch.library.impl(_library, "selected_forward", "CompositeExplicitAutograd")
def _forward(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    attend = _attend_of(query, key, value, SelectedSettings(*settings))
    output, lse = attend.forward(query, key, value)
    return laid_like(output, query), lse.contiguous()


@torch.library.impl(_library, "selected_backward", "CompositeExplicitAutograd")
def _backward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    output, lse, grad_output, grad_lse, *settings = rest
    attend = _attend_of(query, key, value, SelectedSettings(*settings))
    query, key, value, output, lse = _readable_rows(attend.selection, query, key, value, output, lse)
    grads = attend.backward(query, key, value, output, lse, grad_output, grad_lse)
    return tuple(laid_like(grad, like) for grad, like in zip(grads, (query, key, value), strict=True))


@torch.library.register_fake("dilated_attention::selected_forward", lib=_library)
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    return operators.empty_results(query, value)


@torch.library.register_fake("dilated_attention::selected_backward", lib=_library)
def _backward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(empty_rows(x, x.shape[-1]) for x in (query, key, value))


def _listed_pairs(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> int:
    given = SelectedSettings(*settings)
    # A fake tensor has no values.
    host_sync = implementations.allows_host_sync(query.device) and type(given.indices) is Tensor
    shape = query.shape[2], query.shape[1], given.granularity, given.is_causal
    return listed_pairs(given.indices, given.counts, *shape, host_sync)


_operators = torch.ops.dilated_attention
FlopFormulas(_operators.selected_forward, _operators.selected_backward, _listed_pairs)


class _ObservedSelected(torch.autograd.Function):
    """The operators as one differentiable function, for compilers, transforms, dispatch modes and profilers."""

    @staticmethod
    @operators.with_signature
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.dilated_attention.selected_forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors, ctx.settings = inputs[:7], inputs[7:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        query, key, value, *lists, output, lse = ctx.saved_tensors
        tensors = operators.saved_for_backward((query, key, value, output, lse), *grad_outputs)
        if tensors is None:
            return (None,) * 11
        run = torch.ops.dilated_attention.selected_backward
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            run = partial(OnceDifferentiable.apply, "selected_attention", run)
        grads = run(*tensors, *lists, *ctx.settings)
        return *grads, *(None,) * 8

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *arguments: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """A mapped dimension joins the batch."""
        if arguments[6] is not None:
            what, advice = "vmap must not map packed sequences", "Call selected_attention once for each packed batch."
            raise must(what, "cu_seqlens", advice)
        tensors = [operators.join_batch(arguments[i], in_dims[i], info.batch_size) for i in range(6)]
        return operators.split_batch(_ObservedSelected.apply(*tensors, *arguments[6:]), info.batch_size)


@torch.compiler.disable
def attend_selection(
    query: Query,
    key: Key,
    value: Value,
    selection: Selection,
    *,
    scale: float | None = None,
    key_padding_mask: KeyPadding | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    distill_batch: DistillBatch | None = None,
    scores: BlockScores | tuple[Tensor | None, Tensor | None] | None = None,
) -> AttentionOutput:
    """Exact attention over the blocks of a selection, differentiable in query, key and value.

    Args:
        query: (B, H, N, D).
        key: (B, G, N, D), G = H or a divisor of it.
        value: (B, G, N, E).
        selection: blocks that each row sees.
        scale: factor on the scores; 1 / sqrt(D) by default.
        key_padding_mask: bool (B, N), True where a key is ignored.
        dropout_p: probability of dropping a weight.
        backend: "auto" or a name from `backends()`.
        distill_batch: rows on which a scorer is distilled in the backward pass.
        scores: of the batch's rows: a `BlockScores`, evaluated after attention has been launched, or the scores
            (B, H, rows, k) of the blocks listed for the chosen rows and (B, H, rows, T) of all blocks for the dense
            rows. They receive gradients in the backward pass whatever the loss is.
    """
    _check_selection(query, selection)
    query, key, value = autocasted(query, key, value)
    check_tensors(query, key, value, enable_gqa=True)
    check_masks(query, key_padding_mask, None)
    check_reverse_mode(query, key, value)
    scale = scale_of(scale, query.shape[-1])
    seed = fresh_seed(query.device) if dropout_p > 0 else None
    if not query.shape[0] or not query.shape[2]:
        return AttentionOutput(*empty_attention(query, key, value))
    query, key, value = operators.kernel_inputs(query, key, value)
    distilled = None if distill_batch is None else distill_batch.rows[: distill_batch.chosen]
    settings = selection, scale, key_padding_mask, dropout_p, seed, backend, distilled
    attend = choose_attend(query, key, value, *settings)
    with torch.no_grad():
        result = attend.forward(query, key, value)
    if isinstance(scores, BlockScores):
        assert distill_batch is not None
        scores = score_rows(scores, distill_batch, selection.indices)
    given = (None, None) if scores is None else scores
    return AttentionOutput(*_Selected.apply(query, key, value, *given, result, attend, distill_batch))


def _check_selection(query: Tensor, selection: Selection) -> None:
    batch, heads, n, _ = query.shape
    rows = n if selection.per_token else -(-n // selection.block_size)
    listed = selection.indices.shape
    if (selection.n, listed[1] * selection.group) != (n, heads) or listed[::2] != (batch, rows):
        raise must(
            f"the selection must be for {batch} samples, {heads} heads and {n} tokens",
            f"indices {tuple(listed)} for {selection.n} tokens",
        )


class _Selected(torch.autograd.Function):
    """Attention already computed, with its backward; gradients of scores come from distillation, not from the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        chosen_scores: Tensor | None,
        dense_scores: Tensor | None,
        result: Forward,
        attend: BlockAttend | TokenAttend,
        batch: DistillBatch | None,
    ) -> tuple[Tensor, Tensor]:
        output, lse = result
        ctx.attend, ctx.batch = attend, batch
        ctx.set_materialize_grads(False)
        saved = query, key, value, chosen_scores, dense_scores, output, lse, attend.listed_lse
        ctx.save_for_backward(*saved)
        return output, lse

    @staticmethod
    @once_differentiable("selected_attention")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        grad_output, grad_lse = grads
        query, key, value, chosen_scores, dense_scores, output, lse, listed_lse = ctx.saved_tensors
        attend: BlockAttend | TokenAttend = ctx.attend
        selection = attend.selection
        query, key, value, output, lse = _readable_rows(selection, query, key, value, output, lse)
        if grad_output is None and grad_lse is None:
            return (None,) * 8
        grad_output = operators.readable_grad(output, grad_output)
        result: tuple[Tensor | None, ...] = (None,) * 3
        if any(ctx.needs_input_grad[:3]):
            result = attend.backward(query, key, value, output, lse, grad_output, grad_lse)
        learned: tuple[Tensor | None, ...] = (None, None)
        if ctx.batch is not None:
            inputs = distill_inputs(query, key, selection, attend.scale, attend.key_padding_mask, listed_lse)
            learned = distill(inputs, ctx.batch, lse, grad_output, chosen_scores, dense_scores)
        return *result, *learned, *(None,) * 3


def _readable_rows(selection: Selection, *saved: Tensor) -> tuple[Tensor, ...]:
    """`readable` query, key, value, output and LSE; kernels for query blocks read the LSE of concatenated samples."""
    *rows, lse = saved
    if selection.per_token:
        return operators.readable(*rows, lse)
    *rows, folded = operators.readable(*rows, fold(lse))
    return *rows, unfold(folded, rows[0])


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
    """Dense attention over a selection with a bias (B, H, rows, T) on each block's scores, for n <= 8192.

    The gradient of the task's loss reaches the bias: the training signal of a scorer without distillation.
    """
    if selection.n > LONGEST_WEIGHTED:
        raise must(
            f"a weighted selection must have n <= {LONGEST_WEIGHTED}", selection.n, 'Use score_gradient="distill".'
        )
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
