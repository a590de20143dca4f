"""Attention over a sequence spread over ranks: fetch the keys that the pattern needs, then compute as on one device."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ..errors import must, must_be
from ..kernels.dropout import fresh_seed
from ..kernels.registry import backend_named
from ..kernels.sink import apply_sink
from ..ops import AttentionOutput, attention_with_lse
from ..ops.attention import empty_attention
from ..ops.bias import kernel_bias
from ..ops.checks import autocasted, check_masks, check_sink, check_softcap, check_tensors, lengths_of
from ..ops.derivatives import check_reverse_mode, scale_of
from ..patterns import Causal, Packed, Pattern, as_pattern
from .cost_model import Exchange, Machine, Overlap
from .exchange import compare_calls
from .executor import ContextParallel, Executor, bias_gradient, input_gradients, row_gradients
from .layout import SequenceLayout
from .local_attention import KernelSettings
from .receive_buffers import on_pressure
from .schedule import RankSchedule, ScheduleSpec, make_schedules
from .transport import GroupTransport, check_group, group_name, group_of, rank_in, together, wire_device

MOST_CACHED = 64
"""Schedules cached for a group."""


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
    cu_seqlens: Tensor | None = None,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    bias_positions: Tensor | None = None,
    overlap: Overlap = "none",
    exchange: Exchange = "auto",
    receive_budget: int | None = None,
    machine: Machine | None = None,
    backend: str = "auto",
) -> Tensor:
    """`attention` for a sequence sharded over the ranks of a group. Collective.

    Every rank passes its shard of query, key and value and receives its shard of the output: the rows that
    `attention` returns for the whole sequence. Only rows of K and V that its queries attend to are sent to a rank.
    A call on one rank is a plain call of `attention`.

    Args:
        query: (B, H, n, D), the tokens `layout.positions(rank)` of the sequence; n may be 0.
        key: (B, G, n, D).
        value: (B, G, n, E).
        pattern: pattern of the whole sequence; the same on every rank.
        layout: assignment of tokens to ranks; the same on every rank.
        group: ranks that take part; the default group if None. A layout of one rank needs none.
        is_causal: also require the key not to come after the query.
        scale: factor on the scores; 1 / sqrt(D) by default.
        enable_gqa: let query head h read key head h // (H / G).
        key_padding_mask: bool (B, n), True where a key of this shard is ignored; on all ranks or on none.
        cu_seqlens: int (documents + 1): bounds of sequences packed one after another in the whole sequence (B must be
            1); the same on every rank.
        dropout_p: probability of dropping a weight. All ranks use the first rank's seed.
        sink: (H,), see `attention`; the same on every rank. Its gradient is that of this rank's rows: sum it over the
            ranks, as for every replicated parameter.
        softcap: bound of the scores, see `attention`; the same on every rank.
        bias: table by the distance of tokens in the whole sequence, see `attention`; the same on every rank. Its
            gradient is this rank's share: sum it over the ranks.
        bias_positions: integers (N, axes), positions in the bias of all tokens of the sequence; the same on every rank.
        overlap: "none" computes after all rows have arrived, in the order of one device: on backends whose tiles do not
            depend on the cut ("cpu"; not "native" in float32) the output has the same bits for every number of ranks
            from two on. Gradients of keys and values are sums over ranks and differ in the last bits. "local" computes
            on own keys during the exchange, and sends queries that see all keys to the keys.
        exchange: "direct" (from each holder to each receiver), "butterfly" (few messages, for dilated ladders on equal
            shards), "ring" (rotation of whole shards) or "auto": by predicted time. A ring sums in another order.
        receive_budget: most bytes of received rows in memory at a time. An exchange of more rows is split into stages,
            which are repeated in the backward pass. Sums then depend on the stages.
        machine: assumptions of the predictions.
        backend: "auto", or the name of a backend, which then never falls back.

    >>> from dilated_attention_pytorch.distributed import SequenceLayout, context_parallel_attention
    >>> q, k, v = torch.randn(3, 1, 2, 100, 16).unbind()
    >>> context_parallel_attention(q, k, v, "window:8", SequenceLayout.contiguous(100, 1)).shape
    torch.Size([1, 2, 100, 16])
    """
    settings = is_causal, scale, enable_gqa, cu_seqlens, dropout_p, softcap
    call = Call(pattern, layout, *settings, overlap, exchange, receive_budget, machine, backend)
    return _attend_with_sink(
        call, group, Inputs(query, key, value, key_padding_mask, sink, bias, bias_positions)
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
    cu_seqlens: Tensor | None = None,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    bias_positions: Tensor | None = None,
    overlap: Overlap = "none",
    exchange: Exchange = "auto",
    receive_budget: int | None = None,
    machine: Machine | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """`context_parallel_attention`, and the natural logarithm of each row's denominator; both differentiable."""
    settings = is_causal, scale, enable_gqa, cu_seqlens, dropout_p, softcap
    call = Call(pattern, layout, *settings, overlap, exchange, receive_budget, machine, backend)
    return _attend_with_sink(call, group, Inputs(query, key, value, key_padding_mask, sink, bias, bias_positions))


class Inputs(NamedTuple):
    """Tensors of a call on one rank, as given by the caller, apart from `cu_seqlens`."""

    query: Tensor
    key: Tensor
    value: Tensor
    padding: Tensor | None = None
    sink: Tensor | None = None
    bias: Tensor | None = None
    bias_positions: Tensor | None = None

    def autocasted(self) -> Inputs:
        """The inputs with query, key and value in the dtype of autocast."""
        query, key, value = autocasted(*self[:3])
        return self._replace(query=query, key=key, value=value)

    def kernel_bias(self, n: int) -> tuple[Tensor | None, Tensor | None]:
        """Bias and positions as kernels read them, checked, for some rows of a sequence of `n` tokens."""
        table, positions = kernel_bias(self.query, self.bias, self.bias_positions, n)
        return None if table is None else table.detach(), positions


def _attend_with_sink(call: Call, group: dist.ProcessGroup | None, inputs: Inputs) -> AttentionOutput:
    inputs = inputs.autocasted()
    if call.is_alone(group):
        return call.on_one_device(inputs)
    result, sink = _attend(call, group, inputs), inputs.sink
    return result if sink is None else AttentionOutput(apply_sink(result.output, result.lse, sink), result.lse)


def _attend(call: Call, group: dist.ProcessGroup | None, inputs: Inputs) -> AttentionOutput:
    """Output and LSE before the sink, which is checked here with the other tensors."""
    query, key, value, padding, sink, bias, bias_positions = inputs
    seed = fresh_seed(query.device) if call.dropout_p and isinstance(query, Tensor) else None
    # A rank that computes gradients would wait in its backward pass for a rank that does not.
    differentiable = query, key, value, bias
    needs_grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in differentiable)
    if torch.compiler.is_compiling():
        if sink is not None:
            check_sink(query, sink)
        # As plain values: torch 2.11 accepts no object of this library's classes as a constant.
        pattern, layout, machine = call.pattern, call.layout, call.machine
        plain = {
            "pattern": pattern if isinstance(pattern, str) else pattern.describe(),
            "layout": (layout.world, layout.begins, layout.ranks, layout.n),
            "machine": None if machine is None else (machine.latency, machine.bandwidth, machine.flops),
            "cu_seqlens": None,
        }
        text = _to_text(tuple((call._asdict() | plain).items()), group, needs_grad)
        masks = padding, call.cu_seqlens, seed, bias_positions
        return AttentionOutput(*torch.ops.dilated_attention.context_parallel(query, key, value, bias, *masks, text))
    executor = _executor(call, group, inputs, seed, needs_grad)
    if executor is None:
        output, lse = empty_attention(query, key, value)
        return AttentionOutput(output if bias is None else output + 0 * bias.sum(), lse)
    if needs_grad:
        return AttentionOutput(*ContextParallel.apply(executor, bias, query, key, value))
    result = executor.forward(executor.shards([query], [key], [value]))
    return AttentionOutput(result.outputs[0], result.lses[0])


class Call(NamedTuple):
    """Arguments of a call, apart from its other tensors and its group."""

    pattern: Pattern | str
    layout: SequenceLayout
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    cu_seqlens: Tensor | None = None
    dropout_p: float = 0.0
    softcap: float | None = None
    overlap: Overlap = "none"
    exchange: Exchange = "auto"
    receive_budget: int | None = None
    machine: Machine | None = None
    backend: str = "auto"

    def is_alone(self, group: dist.ProcessGroup | None) -> bool:
        """Whether one rank holds the whole sequence, so that nothing is exchanged."""
        alone = isinstance(self.layout, SequenceLayout) and self.layout.world == 1
        return alone and (group is None or dist.get_world_size(group) == 1)

    def on_one_device(self, inputs: Inputs) -> AttentionOutput:
        """The call of `attention_with_lse` on the whole sequence."""
        self.check_options()
        self.check_lengths(0, inputs)
        return attention_with_lse(
            *inputs[:3],
            self.pattern,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
            key_padding_mask=inputs.padding,
            cu_seqlens=self.cu_seqlens,
            dropout_p=self.dropout_p,
            sink=inputs.sink,
            softcap=self.softcap,
            bias=inputs.bias,
            bias_positions=inputs.bias_positions,
            backend=self.backend,
        )

    def check_lengths(self, rank: int, inputs: Inputs) -> None:
        """Check that query, key and value hold the tokens of a rank."""
        expected = self.layout.lengths[rank]
        for name, x in zip(("query", "key", "value"), inputs[:3], strict=True):
            if isinstance(x, Tensor) and x.dim() == 4 and x.shape[2] != expected:
                raise must(f"{name} must hold the {expected} tokens of rank {rank}", x.shape[2])

    def check_shard(self, rank: int, inputs: Inputs) -> None:
        """Check query, key, value and padding of one rank."""
        self.check_lengths(rank, inputs)
        # A rank may hold no token at all; everything else about its tensors must still be right.
        query, key, value = inputs[:3] if self.layout.lengths[rank] else map(_one_token, inputs[:3])
        check_tensors(query, key, value, self.enable_gqa)
        check_masks(inputs.query, inputs.padding, self.cu_seqlens)
        check_reverse_mode(*inputs[:3])

    def check_options(self) -> None:
        """Check the options of the call that are not tensors."""
        if not 0.0 <= self.dropout_p < 1.0:
            raise must("dropout_p must lie in [0, 1)", self.dropout_p)
        check_softcap(self.softcap)
        for name, kinds in (("overlap", Overlap), ("exchange", Exchange)):
            if getattr(self, name) not in get_args(kinds):
                raise must(f"{name} must be one of {', '.join(get_args(kinds))}", repr(getattr(self, name)))
        if self.receive_budget is not None and self.receive_budget < 1:
            raise must("receive_budget must be a number of bytes, at least 1", self.receive_budget)

    def spec(self, query: Tensor, key: Tensor, value: Tensor) -> ScheduleSpec:
        """Resolved and checked input of the scheduler."""
        self.check_options()
        return ScheduleSpec(
            self.resolved(query.shape[1]),
            query.shape[1],
            key.shape[1],
            len(query),
            (key.shape[3], value.shape[3]),
            query.itemsize,
            self.overlap,
            self.exchange,
            self.receive_budget,
            self.machine or Machine(),
        )

    def resolved(self, heads: int) -> Pattern:
        """The resolved pattern of the whole sequence."""
        whole = as_pattern(self.pattern)
        if self.is_causal:
            packed = isinstance(whole, Packed)
            whole = replace(whole, pattern=whole.pattern & Causal()) if packed else whole & Causal()
        if self.cu_seqlens is not None:
            whole = Packed(whole, lengths_of(self.cu_seqlens, self.layout.n))
        return whole.resolve(self.layout.n, heads)

    def scale_for(self, width: int) -> float:
        """Factor on the scores for keys of a width."""
        return scale_of(self.scale, width)


def _one_token(x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:2], 1, x.shape[3]) if isinstance(x, Tensor) and x.dim() == 4 else x


def _executor(
    call: Call, group: dist.ProcessGroup | None, inputs: Inputs, seed: Tensor | None, needs_grad: bool
) -> Executor | None:
    """Check the call, compare it with the other ranks, and look up or make this rank's schedule. Collective.

    None for a call without samples or without tokens, which has an empty result.
    """
    query, key, value, padding, sink, *_ = inputs
    layout, device = call.layout, query.device if isinstance(query, Tensor) else torch.device("cpu")
    typed, members = isinstance(layout, SequenceLayout), _members(group)
    wrong = must_be("layout must be a SequenceLayout", type(layout).__name__)
    if not typed and members == 1:
        raise wrong
    rank = rank_in(group, layout.world if typed else members)
    spec, text, scale, failure = None, "", 1.0, None
    table, positions = None, None
    try:
        if not typed:
            raise wrong
        check_group(group, layout.world, device)
        call.check_shard(rank, inputs)
        if sink is not None:
            check_sink(query, sink)
        scale = call.scale_for(query.shape[3])
        table, positions = inputs.kernel_bias(layout.n)
        if call.backend != "auto":
            # A rank without tokens computes nothing; an unknown name must be an error on all ranks.
            backend_named(call.backend)
        pattern = call.pattern
        if layout.n:
            spec = call.spec(query, key, value)
            pattern = spec.pattern
        text = (
            f"{as_pattern(pattern).describe()}, {layout}, batch {len(query)}, {query.shape[1]} heads, "
            f"{key.shape[1]} key heads, widths {(key.shape[3], value.shape[3])}, "
            f"{query.dtype}, scale {scale}, dropout {call.dropout_p}, "
            f"padding {'no' if padding is None else 'yes'}, sink {'no' if sink is None else 'yes'}, "
            f"softcap {call.softcap}, bias {None if table is None else tuple(table.shape)}, "
            f"bias positions {'no' if positions is None else 'yes'}, gradients {'yes' if needs_grad else 'no'}, "
            f"overlap {call.overlap}, exchange {call.exchange}, receive budget {call.receive_budget}, "
            f"{call.machine or Machine()}, backend {call.backend}"
        )
    except Exception as error:
        failure = error
    cache, cache_key = _cache(group), (text, device)
    start = 0 if seed is None else int(seed)
    agreement = compare_calls(text, failure, cache_key in cache, start, group, wire_device(group))
    if spec is None or not spec.batch:
        return None
    transport = GroupTransport(group, rank)
    if not agreement.cached:
        (schedule,) = make_schedules(spec, layout, transport)
        with together(transport):
            while len(cache) >= MOST_CACHED:
                cache.pop(next(iter(cache)))
            cache[cache_key] = schedule.to(device)
    if seed is not None:
        seed = torch.tensor([agreement.seed], device=device)
    settings = KernelSettings(scale, call.backend, call.dropout_p, seed, call.softcap or 0.0, table, positions)
    return Executor(transport, [cache[cache_key]], settings, [padding], needs_grad)


def _members(group: dist.ProcessGroup | None) -> int:
    """Ranks of the group, or of the default one; 1 where none is initialised."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


Cache = dict[tuple[str, torch.device], RankSchedule]
"""Schedules by description of the call and device, with their tensors on that device."""
_caches: WeakKeyDictionary[dist.ProcessGroup, Cache] = WeakKeyDictionary()
"""Schedules by group. A rank may evict its own: `compare_calls` finds out whether all ranks have one."""


def _cache(group: dist.ProcessGroup | None) -> Cache:
    return _caches.setdefault(group_of(group), {})


def _evict_gpu_schedules() -> bool:
    """Release the cached schedules on GPUs; returns whether there were any."""
    evicted = [(cache, key) for cache in _caches.values() for key in cache if key[1].type != "cpu"]
    for cache, key in evicted:
        del cache[key]
    return bool(evicted)


on_pressure(_evict_gpu_schedules)


@torch.compiler.assume_constant_result
def _to_text(fields: tuple[tuple[str, Any], ...], group: dist.ProcessGroup | None, needs_grad: bool) -> str:
    """Arguments of a call that are not tensors, as text: fields of `Call`, group, gradients."""
    return json.dumps([dict(fields), group_name(group), needs_grad])


def _from_text(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: Any) -> Executor | None:
    """Executor of a call of the operators, whose last arguments are `_MASKS`."""
    *masks, text = rest
    fields, name, needs_grad = json.loads(text)
    world, begins, ranks, n = fields["layout"]
    padding, fields["cu_seqlens"], seed, positions = masks
    fields["layout"] = SequenceLayout(world, tuple(begins), tuple(ranks), n)
    fields["machine"] = None if fields["machine"] is None else Machine(*fields["machine"])
    inputs = Inputs(query, key, value, padding, None, bias, positions)
    return _executor(Call(**fields), _resolve_process_group(name), inputs, seed, needs_grad)


_MASKS = "Tensor? bias, Tensor? padding, Tensor? cu_seqlens, Tensor? seed, Tensor? bias_positions, str call"


@torch.library.custom_op(
    "dilated_attention::context_parallel",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_MASKS}) -> (Tensor, Tensor)",
)
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, key, value = arguments[:3]
    executor = _from_text(*arguments)
    if executor is None:
        return empty_attention(query, key, value)
    result = executor.forward(executor.shards([query], [key], [value]))
    return result.outputs[0], result.lses[0]


@torch.library.custom_op(
    "dilated_attention::context_parallel_backward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, Tensor grad_output, Tensor? grad_lse, "
    f"{_MASKS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, output, lse, grad_output, grad_lse, bias, *masks = arguments
    executor = _from_text(query, key, value, bias, *masks)
    # Operators return no optional tensors: without a bias its gradient is empty.
    table = query.new_empty(0) if bias is None else bias
    if executor is None:
        return tuple(torch.zeros_like(x) for x in (query, key, value, table))  # pyrefly: ignore[bad-return]
    shards = executor.shards([query], [key], [value])
    # A traced graph saves no received rows: they are fetched again.
    sums = executor.backward(shards, row_gradients([output], [lse], [grad_output], [grad_lse]), [])
    grad_bias = bias_gradient(bias, sums)
    return *input_gradients(shards, sums), table if grad_bias is None else grad_bias  # pyrefly: ignore[bad-return]


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:3], value.shape[3]), query.new_empty(query.shape[:3], dtype=lse_dtype)


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, *_, bias = arguments[:8]
    table = query.new_empty(0) if bias is None else bias
    return tuple(x.new_empty(x.shape) for x in (query, key, value, table))  # pyrefly: ignore[bad-return]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.call = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiated(ctx: Any, grad_output: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, bias, *masks, output, lse = ctx.saved_tensors
    *grads, grad_bias = torch.ops.dilated_attention.context_parallel_backward(
        query, key, value, output, lse, grad_output, grad_lse, bias, *masks, ctx.call
    )
    return *grads, None if bias is None else grad_bias, *(None,) * 5


_forward.register_autograd(_differentiated, setup_context=_save)
