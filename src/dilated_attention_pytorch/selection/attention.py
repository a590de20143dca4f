"""Attention over the key blocks that index tensors or a selection list: the public operation.

Index tensors are brought into the normal form of a `Selection` first. Two torch operators make the operation traceable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ..errors import must, must_be
from ..kernels.call import Forward, empty_rows, laid_like
from ..kernels.dropout import fresh_seed
from ..kernels.sink import apply_sink
from ..ops import operators
from ..ops.attention import PLAIN_TYPES, empty_attention, is_observed, needs_graph
from ..ops.checks import (
    autocasted,
    check_layout,
    check_masks,
    check_sink,
    check_tensors,
    full_precision,
    unexpected,
)
from ..ops.derivatives import OnceDifferentiable, check_reverse_mode, once_differentiable, scale_of
from ..ops.flops import FlopFormulas
from ..ops.merge import AttentionOutput
from ..shapes import CuSeqlens, Key, KeyPadding, Query, Value
from . import backend as implementations
from .attend import BlockAttend, CallChoices, TokenAttend, fold, unfold
from .backend import choose_attend, distill_inputs
from .backend import distill as distill_scores
from .indices import check_indices, check_unpacked, listed_pairs, normal_form
from .types import DistillBatch, Selection

_SETTINGS = (
    "Tensor indices, Tensor counts, Tensor? sharing_rows, Tensor? bounds, Tensor? key_padding_mask, Tensor? seed, "
    "int granularity, bool is_causal, bool per_token, int local_blocks, int sink_blocks, float scale, "
    "float dropout_p, str backend"
)
_library = torch.library.Library("dilated_attention", "FRAGMENT")
_library.define(f"selected_forward(Tensor query, Tensor key, Tensor value, {_SETTINGS}) -> (Tensor, Tensor)")
_library.define(
    "selected_backward(Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, Tensor grad_output, "
    f"Tensor? grad_lse, {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
)

LONGEST_WEIGHTED = 8192

DistillScores = Tensor | Callable[[DistillBatch, Tensor], tuple[Tensor | None, Tensor | None]]
"""Block scores of the rows of a `DistillBatch`; see `selected_attention`."""

AttendSettings = tuple[Selection, float, Tensor | None, float, Tensor | None, str]
"""Selection, scale, padding mask, dropout, its seed and the backend of a call."""


class SelectedSettings(NamedTuple):
    """Arguments of the operators besides query, key and value, in the order of their schema."""

    indices: Tensor
    counts: Tensor
    sharing_rows: Tensor | None
    bounds: Tensor | None
    key_padding_mask: Tensor | None
    seed: Tensor | None
    granularity: int
    is_causal: bool
    per_token: bool
    local_blocks: int
    sink_blocks: int
    scale: float
    dropout_p: float
    backend: str

    @staticmethod
    def of(
        selection: Selection,
        scale: float,
        key_padding_mask: Tensor | None,
        dropout_p: float,
        seed: Tensor | None,
        backend: str,
    ) -> SelectedSettings:
        """Arguments for a selection."""
        s = selection
        tensors = s.indices, s.counts, s.sharing_rows, s.bounds, key_padding_mask, seed
        shape = s.block_size, s.is_causal, s.per_token, s.local_blocks, s.sink_blocks
        return SelectedSettings(*tensors, *shape, scale, dropout_p, backend)

    def selection(self, query: Tensor) -> Selection:
        """The selection, for query heads and tokens of a call."""
        heads, n = query.shape[1:3]
        shape = n, self.granularity, self.is_causal, self.per_token, self.local_blocks, self.sink_blocks
        group = heads // self.indices.shape[1]
        return Selection(self.indices, self.counts, *shape, self.sharing_rows, self.bounds, group)

    def for_kernels(self, query: Tensor) -> AttendSettings:
        """The selection with the other settings of a call."""
        return self.selection(query), self.scale, self.key_padding_mask, self.dropout_p, self.seed, self.backend


@overload
def selected_attention(
    query: Query,
    key: Key,
    value: Value,
    indices: Tensor | Selection,
    counts: Tensor | None = None,
    *,
    granularity: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sink: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    key_padding_mask: KeyPadding | None = None,
    dropout_p: float = 0.0,
    distill: DistillBatch | None = None,
    scores: DistillScores | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def selected_attention(
    query: Query,
    key: Key,
    value: Value,
    indices: Tensor | Selection,
    counts: Tensor | None = None,
    *,
    granularity: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sink: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    key_padding_mask: KeyPadding | None = None,
    dropout_p: float = 0.0,
    distill: DistillBatch | None = None,
    scores: DistillScores | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> AttentionOutput: ...
def selected_attention(
    query: Query,
    key: Key,
    value: Value,
    indices: Tensor | Selection,
    counts: Tensor | None = None,
    *,
    granularity: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sink: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    key_padding_mask: KeyPadding | None = None,
    dropout_p: float = 0.0,
    distill: DistillBatch | None = None,
    scores: DistillScores | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **unknown: object,
) -> Tensor | AttentionOutput:
    """Exact attention over the key blocks that are listed for each row.

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
            A `Selection`, from `make_selection` or a learned layer, is used as it is: its lists are not sorted again,
            and it holds `granularity`, `is_causal` and packed documents.
        counts: int (B, S, rows): valid entries of each row, the first ones; entries after them are ignored.
        granularity: tokens of a block: 16, 32, 64, 128 (the default) or 256.
        is_causal: drop keys after the query: blocks after the row's own, and the upper triangle of its own block.
        scale: factor on the scores; 1 / sqrt(D) by default.
        enable_gqa: let query head h read key head h // (H / G).
        sink: (H,), a logit of each head in the softmax denominator, without a value; not part of the LSE.
        cu_seqlens: int32 or int64 (documents + 1) on the query's device: bounds of documents packed one after another
            (B must be 1). A row attends only to keys of its own document. Blocks are those of the packed sequence, so
            that one block may hold tokens of several documents; a row attends to its document's tokens in it.
            Wrong bounds raise on the CPU; on a GPU see `validate_cu_seqlens`.
        key_padding_mask: bool (B, N), True where a key is ignored.
        dropout_p: probability of dropping a weight.
        distill: rows on which `scores` learn the attention mass of blocks in the backward pass of this call, whatever
            the loss is. Requires a `Selection` with `local_blocks` >= 1.
        scores: (B, S, len(distill.rows), ceil(N / granularity)): predicted logits of all key blocks beside the row's
            own block, whose logit is 0. Or a function of `distill` and the lists of the selection, called once
            attention has been launched, that returns the scores (B, S, rows, K) of the blocks listed for the first
            `distill.chosen` rows, and (B, S, rows, T) of all blocks for the others, S lists or heads; None for no rows.
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
    given, optional = (query, key, value), (counts, sink, cu_seqlens, key_padding_mask)
    options = granularity, is_causal, scale, enable_gqa, dropout_p, backend
    cache_key = _cache_key(given, indices, optional, options)
    cached = None if cache_key is None else _cached.get(cache_key)
    if cached is None:
        query, key, value, scale = _checked(given, indices, optional, options)
        choices = None if cache_key is None else _store(cache_key, scale)
    else:
        scale, choices = cached
    if distill is not None or scores is not None:
        _check_distill(query, indices, distill, scores)
    if cache_key is None and not (query.shape[0] and query.shape[2]):
        output, lse = empty_attention(query, key, value)
    else:
        is_traced = cache_key is None and is_observed(query, key, value)
        if isinstance(indices, Selection):
            selection = indices
        else:
            shape = query.shape[1], query.shape[2], granularity or 128, is_causal
            selection = normal_form(indices, counts, cu_seqlens, *shape, is_counted=is_traced)
        seed = fresh_seed(query.device) if dropout_p > 0 else None
        settings = selection, scale, key_padding_mask, dropout_p, seed, backend
        if distill is not None:
            output, lse = _distilled(query, key, value, settings, choices, distill, scores)
        elif is_traced:
            run = _ObservedSelected.apply if needs_graph(query, key, value) else _operators.selected_forward
            output, lse = run(query, key, value, *SelectedSettings.of(*settings))
        else:
            output, lse = _selected(query, key, value, settings, choices)
    if sink is not None:
        output = apply_sink(output, lse, sink)
    return AttentionOutput(output, lse) if return_lse else output


OptionalTensors = tuple[Tensor | None, ...]
"""Counts, sink, bounds of packed sequences and padding mask of a call."""

MOST_CACHED = 256
_cached: dict[tuple[object, ...], tuple[float, CallChoices]] = {}
"""Scale and choices of eager calls by what their checks read."""


def _store(cache_key: tuple[object, ...], scale: float) -> CallChoices:
    """Cache a call whose arguments have been checked."""
    if len(_cached) >= MOST_CACHED:
        _cached.clear()
    return _cached.setdefault(cache_key, (scale, CallChoices()))[1]


def _cache_key(
    given: tuple[Tensor, Tensor, Tensor],
    indices: Tensor | Selection,
    optional: OptionalTensors,
    options: tuple[object, ...],
) -> tuple[object, ...] | None:
    """Everything but values that an eager call depends on; None if it is not eager, or if checks change it or warn."""
    shape, others = None, optional
    if isinstance(indices, Selection):
        s = indices
        shape = s.n, s.block_size, s.is_causal, s.per_token, s.local_blocks, s.sink_blocks, s.group
        others = s.indices, s.sharing_rows, s.bounds, *others
    else:
        others = indices, *others
    query, key, value = given
    if is_observed(*given, *[x for x in others if x is not None]) or not PLAIN_TYPES.issuperset(map(type, options)):
        return None
    device = query.device
    if key.is_nested or value.is_nested or not query.dim() == key.dim() == value.dim() == 4:
        return None
    strides = query.stride(), key.stride(), value.stride()
    batch, heads, n, _ = query.shape
    if not batch or not n or heads > n or device.type == "meta" or torch.is_autocast_enabled(device.type):
        return None
    if not strides[0][3] == strides[1][3] == strides[2][3] == 1:
        return None
    return (
        *(options, shape, query.shape, key.shape, value.shape, strides, query.dtype, key.dtype, value.dtype),
        *(device, key.device, value.device, (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16),
        implementations.allows_host_sync(device),
        *[None if x is None else (x.shape, x.dtype, x.device) for x in others],
    )


def _checked(
    given: tuple[Tensor, Tensor, Tensor],
    indices: Tensor | Selection,
    optional: OptionalTensors,
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Check the arguments of a call; return query, key and value as kernels read them, and the scale."""
    granularity, is_causal, scale, enable_gqa, dropout_p, _ = options
    counts, sink, cu_seqlens, key_padding_mask = optional
    query, key, value = autocasted(*given)
    check_tensors(query, key, value, enable_gqa)
    check_masks(query, key_padding_mask, cu_seqlens)
    scale = scale_of(scale, query.shape[-1])
    if query.shape[0] and query.shape[2]:
        check_reverse_mode(query, key, value)
        if torch.compiler.is_compiling() or not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
            query, key, value = operators.kernel_inputs(query, key, value)
    if isinstance(indices, Selection):
        _check_selection(query, indices, counts, granularity, is_causal, cu_seqlens)
    else:
        check_layout(query)
        _check_call(query, key, indices, counts, 128 if granularity is None else granularity, cu_seqlens)
    if sink is not None:
        check_sink(query, sink)
    if not 0.0 <= dropout_p < 1.0:
        raise must("dropout_p must lie in [0, 1)", dropout_p)
    return query, key, value, scale


def _check_call(
    query: Tensor, key: Tensor, indices: Tensor, counts: Tensor | None, granularity: int, cu_seqlens: Tensor | None
) -> None:
    """Check index tensors of a call; values are not read."""
    (batch, heads, n, _), groups = query.shape, key.shape[1]
    check_indices(indices, counts, n, granularity)
    if indices.device != query.device:
        raise must(f"indices must be on the query's device {query.device}", indices.device)
    if indices.shape[0] != batch:
        raise must(f"indices must have the query's batch size {batch}", indices.shape[0])
    scope = indices.shape[1]
    # Not by membership, which compares the symbols of a compiler and not their values.
    if scope != 1 and scope != groups and scope != heads:
        what = f"indices must be for 1 head, the {groups} key heads or the {heads} query heads"
        raise must(what, f"{scope} heads")
    if cu_seqlens is not None and cu_seqlens.device != query.device:
        raise must(f"cu_seqlens must be on the query's device {query.device}", cu_seqlens.device)


def _check_selection(
    query: Tensor,
    selection: Selection,
    counts: Tensor | None,
    granularity: int | None,
    is_causal: bool,
    cu_seqlens: Tensor | None,
) -> None:
    """Check a selection of a call, and that no argument repeats or contradicts it."""
    batch, heads, n, _ = query.shape
    rows = n if selection.per_token else -(-n // selection.block_size)
    listed = selection.indices.shape
    if selection.n != n or listed[1] * selection.group != heads or listed[0] != batch or listed[2] != rows:
        raise must(
            f"the selection must be for {batch} samples, {heads} heads and {n} tokens",
            f"indices {tuple(listed)} for {selection.n} tokens",
        )
    if selection.indices.device != query.device:
        raise must(f"the selection must be on the query's device {query.device}", selection.indices.device)
    if counts is not None or cu_seqlens is not None:
        came = "counts" if counts is not None else "cu_seqlens"
        raise must("counts and cu_seqlens must come with index tensors", f"{came} and a Selection", _OWN)
    if granularity is not None and granularity != selection.block_size:
        raise must(f"granularity must be that of the selection, {selection.block_size}", granularity, _OWN)
    if is_causal and not selection.is_causal:
        raise must("is_causal must be that of the selection, False", is_causal, _OWN)


_OWN = "A Selection has its own; pass them to make_selection."


def _check_distill(query: Tensor, indices: Any, distill: DistillBatch | None, scores: DistillScores | None) -> None:
    """Check that a call can distill scores, and complete the batch."""
    if not isinstance(distill, DistillBatch) or scores is None:
        came = f"distill {type(distill).__name__} and scores {type(scores).__name__}"
        raise must_be("distill must be a DistillBatch that comes with scores", came)
    if not isinstance(indices, Selection) or not indices.local_blocks or indices.sharing_rows is not None:
        advice = "Pass make_selection(indices, ..., local_blocks=1)."
        raise must("distill must come with a Selection whose rows see their own block", type(indices).__name__, advice)
    if torch._C._are_functorch_transforms_active():
        advice = "Use torch.autograd, and map samples by the batch dimension."
        raise must("distill must be used outside of torch.func transforms", "an active transform", advice)
    tokens = distill.row_tokens
    if tokens and indices.block_size % tokens:
        raise must(f"row_tokens of a DistillBatch must divide the block size {indices.block_size}", tokens)
    rows = -(-indices.n // tokens) if tokens else indices.indices.shape[2]
    if isinstance(scores, Tensor):
        _check_rows(query, indices, distill, scores, rows)
    distill.total = distill.total or rows


def _check_rows(query: Tensor, selection: Selection, distill: DistillBatch, scores: Tensor, total: int) -> None:
    if not isinstance(distill.rows, Tensor) or distill.rows.dtype != torch.int64 or distill.rows.dim() != 1:
        came = f"{distill.rows.dtype} {tuple(distill.rows.shape)}" if isinstance(distill.rows, Tensor) else distill.rows
        raise must("rows of a DistillBatch must be an int64 tensor (rows,)", came)
    rows, heads = len(distill.rows), query.shape[1]
    shape = f"({len(query)}, heads, {rows}, {selection.blocks})"
    fits = scores.dim() == 4 and scores.shape[1] > 0 and heads % scores.shape[1] == 0
    if not fits or (len(scores), *scores.shape[2:]) != (len(query), rows, selection.blocks):
        raise must(f"scores must have shape {shape}, heads a divisor of {heads}", tuple(scores.shape))
    if not scores.is_floating_point():
        raise must_be("scores must be floating-point", scores.dtype)
    for name, x in (("scores", scores), ("rows", distill.rows)):
        if x.device != query.device:
            raise must(f"{name} must be on the query's device {query.device}", x.device)
    if not 0 <= distill.chosen <= rows:
        raise must(f"chosen must lie in 0 to the {rows} rows of the batch", distill.chosen)
    if implementations.allows_host_sync(query.device):
        if rows and not 0 <= int(distill.rows.min()) <= int(distill.rows.max()) < total:
            came = f"{int(distill.rows.min())} to {int(distill.rows.max())}"
            raise must(f"rows of a DistillBatch must lie in 0 to {total - 1}", came)
    else:
        distill.rows = distill.rows.clamp(0, total - 1)


def _selected(
    query: Tensor, key: Tensor, value: Tensor, settings: AttendSettings, choices: CallChoices | None
) -> tuple[Tensor, Tensor]:
    """Output and LSE of an eager call."""
    attend = choose_attend(query, key, value, *settings, None, choices)
    if needs_graph(query, key, value):
        return _Selected.apply(query, key, value, None, None, None, attend, None)
    return attend.forward(query, key, value)


@torch.compiler.disable
def _distilled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    settings: AttendSettings,
    choices: CallChoices | None,
    batch: DistillBatch,
    scores: DistillScores,
) -> tuple[Tensor, Tensor]:
    """Attention whose backward pass distills scores; `torch.compile` runs it eagerly."""
    selection = settings[0]
    with torch.no_grad():
        attend = choose_attend(query, key, value, *settings, batch.rows[: batch.chosen], choices)
        result = attend.forward(query, key, value)
    given = _split_scores(scores, batch, selection) if isinstance(scores, Tensor) else scores(batch, selection.indices)
    return _Selected.apply(query, key, value, *given, result, attend, batch)


def _split_scores(scores: Tensor, batch: DistillBatch, selection: Selection) -> tuple[Tensor | None, Tensor | None]:
    """Scores of the blocks listed for the chosen rows of a batch, and of all blocks for its other rows."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.repeat_interleave(selection.heads // scores.shape[1], 1)
    chosen, dense = scores.split([batch.chosen, scores.shape[2] - batch.chosen], 2)
    rows = selection.list_of(batch.chosen_rows, batch.row_tokens)
    listed = selection.indices[:, :, rows].repeat_interleave(selection.group, 1)
    # Entries past the count are not compared.
    chosen = chosen.gather(-1, listed.long().clamp(max=selection.blocks - 1)) if batch.chosen else None
    return chosen, dense if dense.shape[2] else None


@torch.library.impl(_library, "selected_forward", "CompositeExplicitAutograd")
def _forward(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    attend = choose_attend(query, key, value, *SelectedSettings(*settings).for_kernels(query), None)
    output, lse = attend.forward(query, key, value)
    return laid_like(output, query), lse.contiguous()


@torch.library.impl(_library, "selected_backward", "CompositeExplicitAutograd")
def _backward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    output, lse, grad_output, grad_lse, *settings = rest
    attend = choose_attend(query, key, value, *SelectedSettings(*settings).for_kernels(query), None)
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
    selection = SelectedSettings(*settings).selection(query)
    # A fake tensor has no values.
    host_sync = implementations.allows_host_sync(query.device) and type(selection.indices) is Tensor
    return listed_pairs(selection, host_sync)


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
        tensors, ctx.settings = inputs[:9], inputs[9:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        query, key, value, *lists, output, lse = ctx.saved_tensors
        tensors = operators.saved_for_backward((query, key, value, output, lse), *grad_outputs)
        if tensors is None:
            return (None,) * 17
        run = torch.ops.dilated_attention.selected_backward
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            run = partial(OnceDifferentiable.apply, "selected_attention", run)
        grads = run(*tensors, *lists, *ctx.settings)
        return *grads, *(None,) * 14

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *arguments: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """A mapped dimension joins the batch; see `_Attention.vmap` for dropout."""
        check_unpacked(arguments[6])
        if arguments[8] is not None:
            return operators.one_by_one(_ObservedSelected.apply, info.batch_size, in_dims, arguments)
        tensors = [operators.join_batch(arguments[i], in_dims[i], info.batch_size) for i in range(8)]
        return operators.split_batch(_ObservedSelected.apply(*tensors, *arguments[8:]), info.batch_size)


torch.library.register_autograd(
    "dilated_attention::selected_forward",
    _ObservedSelected.backward,
    setup_context=_ObservedSelected.setup_context,
    lib=_library,
)


class _Selected(torch.autograd.Function):
    """Attention, unless already computed, and its backward; scores get gradients from distillation, not the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        chosen_scores: Tensor | None,
        dense_scores: Tensor | None,
        result: Forward | None,
        attend: BlockAttend | TokenAttend,
        batch: DistillBatch | None,
    ) -> tuple[Tensor, Tensor]:
        output, lse = attend.forward(query, key, value) if result is None else result
        ctx.attend, ctx.batch, ctx.versions = attend, batch, _versions(attend)
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
        if _versions(attend) != ctx.versions:
            raise must("lists and key_padding_mask must stay as they are until the backward pass", "a change in place")
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
            # Scores of heads that share a list are compared together, or head by head if each head has its own.
            given = dense_scores if chosen_scores is None else chosen_scores
            apart = given is not None and given.shape[1] > selection.indices.shape[1]
            lists = selection.per_head() if apart else selection
            masks = attend.key_padding_mask, listed_lse, ctx.batch.row_tokens
            inputs = distill_inputs(query, key, lists, attend.scale, *masks)
            learned = distill_scores(inputs, ctx.batch, lse, grad_output, chosen_scores, dense_scores)
        return *result, *learned, *(None,) * 3


def _versions(attend: BlockAttend | TokenAttend) -> list[int]:
    """Changes in place of the tensors that both passes read; they are not saved, and inference tensors count none."""
    s = attend.selection
    read = s.indices, s.sharing_rows, s.bounds, attend.key_padding_mask
    return [0 if x is None or x.is_inference() else x._version for x in read]


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
    query, key, value = autocasted(query, key, value)
    wide, some = torch.promote_types(query.dtype, torch.float32), seen.any(-1, keepdim=True)
    with full_precision(query.device):
        scores = scale * (query.to(wide) @ key.to(wide).mT) + bias[:, :, row][..., block]
        weights = torch.where(seen, scores, -torch.inf).masked_fill(~some, 0.0).softmax(-1)
        return torch.where(seen & some, weights, 0.0).to(value.dtype) @ value
