"""The attention operation: two registered operators, an autograd function, and the validated entry."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import must
from ..kernels.call import (
    AttentionCall,
    BiasedGradients,
    Forward,
    Runner,
    allows_host_sync,
    empty_rows,
)
from ..kernels.dropout import fresh_seed
from ..kernels.launch import warmup
from ..kernels.registry import can_prepare, can_run, choose, prepared
from ..kernels.sink import CallGradients, apply_sink, backward_with_sink
from ..patterns import Causal, Packed, Pattern, as_pattern, parse
from ..patterns.parse import from_operand, is_library_text, not_a_pattern, registrations, to_operand
from ..plan import Plan, PlanCache, PlanKey, own_block
from ..plan.documents import documents_plan, window_of
from ..shapes import Bias, CuSeqlens, Key, KeyPadding, Output, Query, Sink, Value
from . import memory_budget, operators
from .bias import kernel_bias
from .checks import (
    autocasted,
    check_layout,
    check_masks,
    check_sink,
    check_softcap,
    check_tensors,
    lengths_of,
    unexpected,
)
from .derivatives import OnceDifferentiable, check_reverse_mode, scale_of
from .flops import FlopFormulas, kept_pairs
from .memory_budget import check_budget
from .merge import AttentionOutput

plan_cache = PlanCache()
"""Plans of every call in this process; `plan_cache.info()` counts hits, misses, evictions and bytes."""

_SETTINGS = (
    "Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor? seed, "
    "str pattern, bool is_causal, float scale, float dropout_p, str backend, float? memory_budget=None, "
    "float softcap=0.0, Tensor? bias=None, Tensor? bias_positions=None, Tensor? sink=None"
)
_PATTERNS = (str, Pattern)
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
PLAIN_TYPES = frozenset((bool, float, int, str, type(None)))
"""Immutable types of settings."""
_library = torch.library.Library("dilated_attention", "DEF")
_library.define(f"forward(Tensor query, Tensor key, Tensor value, {_SETTINGS}) -> (Tensor, Tensor)")
_library.define(
    "backward(Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, Tensor grad_output, Tensor? grad_lse, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class CallSettings(NamedTuple):
    """Arguments of the operators besides query, key and value, in the order of their schema."""

    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    seed: Tensor | None = None
    pattern: str = "full"
    is_causal: bool = False
    scale: float = 1.0
    dropout_p: float = 0.0
    backend: str = "auto"
    memory_budget: float | None = None
    softcap: float = 0.0
    bias: Tensor | None = None
    bias_positions: Tensor | None = None
    sink: Tensor | None = None

    def call(self, query: Tensor, key: Tensor, value: Tensor, plan: Plan, pattern: Any = None) -> AttentionCall:
        """Call as a backend sees it."""
        masks = self.key_padding_mask, self.dropout_p, self.seed
        terms = self.softcap, self.bias, self.bias_positions, self.sink
        return AttentionCall(query, key, value, plan, self.scale, *masks, pattern, None, *terms)


def attention(
    query: Query,
    key: Key,
    value: Value,
    pattern: Pattern | str | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: KeyPadding | None = None,
    cu_seqlens: CuSeqlens | None = None,
    dropout_p: float = 0.0,
    sink: Sink | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    bias_positions: Tensor | None = None,
    backend: str = "auto",
    memory_budget: int | float | None = None,
    **unknown: object,
) -> Output:
    """Exact attention over the pairs that a pattern allows.

    Args:
        query: (B, H, N, D).
        key: (B, G, N, D) with G = H, or a divisor of H when `enable_gqa`.
        value: (B, G, N, E).
        pattern: keys that each query attends to, as a value or as text for `parse`; required.
        is_causal: also require the key not to come after the query.
        scale: factor on the scores; 1 / sqrt(D) by default.
        enable_gqa: let query head h read key head h // (H / G).
        key_padding_mask: bool (B, N), True where a key is ignored.
        cu_seqlens: int (documents + 1): bounds of sequences packed one after another (B must be 1); the pattern
            applies to each separately. On the query's GPU, bounds of full, causal and window patterns and
            their `&` stay there, in float16, bfloat16 and float32 without `memory_budget`: they may change under a
            CUDA graph; `validate_cu_seqlens` checks them. Other calls read bounds on the host.
        dropout_p: probability of dropping a weight.
        sink: (H,), one more logit in the softmax of every row of a head, without a value: rows are scaled by
            `sigmoid(lse - sink)`. Differentiable. The LSE excludes it.
        softcap: bound of the scores: `softcap * tanh(score / softcap)` before the softmax. Supported by the CPU
            backends, `triton` and `reference`.
        bias: (H, 2 * R + 1) with finite values: `bias[h, clamp(u - t + R, 0, 2 * R)]` is added to the score of query t
            and key u, after the soft cap; the outermost entries hold for larger distances. (H, 2 * R1 + 1, 2 * R2 + 1)
            is a table by two distances, which needs `bias_positions`. Differentiable, and summed in 64 bits. See
            `t5_bias` and `distance_bias`. Supported by the same backends as `softcap`.
        bias_positions: integers (N, axes) or (B, N, axes), positions whose differences are the distances of `bias`:
            for a table with two axes, the row and column of a tile of an image. Row numbers by default.
        backend: "auto", or a name from `dilated_attention_pytorch.backends()`, which then never falls back.
        memory_budget: limit on the memory of either pass, including its results: bytes, or as a float a fraction of
            the free memory. Some samples and heads, or some rows of one head, are then computed at a time. Results are
            equal up to rounding; on the backend `native` outputs are bitwise equal (float64 with a sink: up to the
            last bit).

    Returns:
        (B, H, N, E). A row without keys is 0.

    >>> import torch
    >>> from dilated_attention_pytorch import Dilated, attention
    >>> q, k, v = torch.randn(3, 1, 8, 1000, 64).unbind()
    >>> attention(q, k, v, Dilated((256, 1024), (1, 4)), is_causal=True).shape
    torch.Size([1, 8, 1000, 64])
    """
    if unknown:
        raise unexpected("attention", unknown)
    settings = is_causal, scale, enable_gqa, key_padding_mask, cu_seqlens, dropout_p, softcap
    settings += bias, bias_positions, backend, memory_budget
    return _attend(query, key, value, pattern, sink, *settings)[0]


def attention_with_lse(
    query: Query,
    key: Key,
    value: Value,
    pattern: Pattern | str | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: KeyPadding | None = None,
    cu_seqlens: CuSeqlens | None = None,
    dropout_p: float = 0.0,
    sink: Sink | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    bias_positions: Tensor | None = None,
    backend: str = "auto",
    memory_budget: int | float | None = None,
    **unknown: object,
) -> AttentionOutput:
    """`attention`, and the natural logarithm of each row's softmax denominator, (B, H, N); both are differentiable."""
    if unknown:
        raise unexpected("attention_with_lse", unknown)
    settings = is_causal, scale, enable_gqa, key_padding_mask, cu_seqlens, dropout_p, softcap
    settings += bias, bias_positions, backend, memory_budget
    return AttentionOutput(*_attend(query, key, value, pattern, sink, *settings))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | str | None,
    sink: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    dropout_p: float,
    softcap: float | None,
    bias: Tensor | None,
    bias_positions: Tensor | None,
    backend: str,
    memory_budget: int | float | None,
) -> tuple[Tensor, Tensor]:
    if sink is not None:
        check_sink(query, sink)
    given, options = (query, key, value), (is_causal, scale, enable_gqa, backend)
    is_plain = key_padding_mask is cu_seqlens is softcap is bias is memory_budget is None and not dropout_p
    # A lookup can hit only where some backend prepared a call; CPU backends prepare none.
    is_eager = not torch.compiler.is_compiling() and isinstance(query, Tensor)
    if is_plain and is_eager and query.device.type in _prepared_devices:
        resolved = _lookup(_cache_key(*given, sink, pattern, *options), sink)
        if resolved is not None:
            return _run(resolved, query, key, value)
    query, key, value = autocasted(query, key, value)
    check_tensors(query, key, value, enable_gqa)
    check_layout(query)
    check_masks(query, key_padding_mask, cu_seqlens)
    if not isinstance(pattern, Pattern | str):
        raise not_a_pattern(pattern)
    if not 0.0 <= dropout_p < 1.0:
        raise must("dropout_p must lie in [0, 1)", dropout_p)
    check_budget(memory_budget)
    check_softcap(softcap)
    bias, bias_positions = kernel_bias(query, bias, bias_positions)
    scale = scale_of(scale, query.shape[-1])
    if not query.shape[0] or not query.shape[2]:
        as_pattern(pattern)
        output, lse = empty_attention(query, key, value)
        output = output if sink is None else apply_sink(output, lse, sink)
        return output if bias is None else output + 0 * bias.sum(), lse
    check_reverse_mode(query, key, value, bias, sink)
    seed = fresh_seed(query.device) if dropout_p > 0 else None
    query, key, value = operators.kernel_inputs(query, key, value)
    settings = CallSettings(
        key_padding_mask,
        cu_seqlens,
        seed,
        operand_of(pattern),
        is_causal,
        scale,
        dropout_p,
        backend,
        memory_budget,
        softcap or 0.0,
        bias,
        bias_positions,
        None if sink is None else _readable_sink(query, sink),
    )
    learned = bias, settings.sink
    if is_observed(query, key, value, *(x for x in learned if x is not None)):
        run = _Attention.apply if needs_graph(query, key, value, *learned) else torch.ops.dilated_attention.forward
        return run(query, key, value, *settings)
    resolved = resolve_call(query, key, value, settings)
    # A prepared call runs on tensors with the strides that it was given.
    same = all(x.stride() == y.stride() for x, y in zip(given, (query, key, value), strict=True))
    if is_plain and same and settings.sink is sink:
        resolved = _store(resolved, *given, sink, pattern, *options)
    return _run(resolved, query, key, value)


def _readable_sink(query: Tensor, sink: Tensor) -> Tensor:
    """Sink as kernels read it: contiguous, and not wider than the LSE."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (sink.to(wide) if sink.dtype.itemsize > wide.itemsize else sink).contiguous()


def empty_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE of a call without samples or without queries, made of torch's own operators."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.mT
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    return scores @ value, scores.to(lse_dtype).logsumexp(-1)


def _run(resolved: ResolvedCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    *_, bias, _, sink = resolved.settings
    if needs_graph(query, key, value, bias, sink):
        return _EagerAttention.apply(query, key, value, bias, sink, resolved)
    return resolved.forward(resolved.call(query, key, value))


class ResolvedCall(NamedTuple):
    """Settings of a call with its plan, resolved pattern and backend; query, key and value are left out."""

    settings: CallSettings
    plan: Plan
    pattern: Any
    name: str
    runner: Runner

    def call(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        return self.settings.call(query, key, value, self.plan, self.pattern)

    def forward(self, call: AttentionCall) -> Forward:
        limit = self.settings.memory_budget
        if limit is None:
            return self.runner.forward(call)
        return memory_budget.forward(call, self.name, self.runner, limit)

    def backward(
        self, call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
    ) -> CallGradients:
        limit = self.settings.memory_budget
        if limit is None:
            return backward_with_sink(self.runner, call, output, lse, grad_output, grad_lse)
        return memory_budget.backward(call, self.name, self.runner, limit, output, lse, grad_output, grad_lse)


class _CachedCall(NamedTuple):
    """A prepared call. `plan_cache` owns its plan; the entry is removed with the plan."""

    settings: CallSettings
    plan_key: PlanKey
    name: str
    plan: ref[Plan]
    runner: Runner


MOST_CACHED = 1024
_cached: dict[tuple[object, ...], _CachedCall] = {}
_prepared_devices: set[str] = set()
"""Types of devices on which some call was prepared."""


def _cache_key(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, pattern: Pattern | str | None, *settings: object
) -> tuple[object, ...] | None:
    """Everything but values that a plain eager call depends on; None if the call is not plain or not eager."""
    if is_observed(query, key, value, *(() if sink is None else (sink,))) or not (
        isinstance(pattern, _PATTERNS) and pattern.__hash__ is not None and PLAIN_TYPES.issuperset(map(type, settings))
    ):
        return None
    device = query.device
    if torch.is_autocast_enabled(device.type):
        return None
    return (
        *(pattern, settings, query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride()),
        *(query.dtype, key.dtype, value.dtype, device, key.device, value.device),
        None if sink is None else (sink.dtype, sink.stride()),
        (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16,
    )


def _lookup(cache_key: tuple[object, ...] | None, sink: Tensor | None) -> ResolvedCall | None:
    cached = _cached.get(cache_key) if cache_key is not None else None
    if cached is None:
        return None
    plan = plan_cache.find(cached.plan_key)
    if plan is None or cached.plan() is not plan:
        return None
    settings = cached.settings if sink is None else cached.settings._replace(sink=sink)
    return ResolvedCall(settings, plan, cached.plan_key.pattern, cached.name, cached.runner)


def _store(resolved: ResolvedCall, query: Tensor, key: Tensor, value: Tensor, *about: Any) -> ResolvedCall:
    """Prepare and cache a call if its backend can; `about` are the sink and further arguments of `_cache_key`."""
    cache_key = _cache_key(query, key, value, *about) if can_prepare(resolved.name) else None
    if cache_key is None:
        return resolved
    runner = prepared(resolved.name, resolved.call(query, key, value))
    if len(_cached) >= MOST_CACHED:
        _cached.clear()
    plan, device = resolved.plan, query.device
    plan_key = PlanKey(resolved.pattern, plan.n, plan.heads, plan.block_size, device)
    owned = ref(plan, lambda _, cached=_cached: cached.pop(cache_key, None))
    settings = resolved.settings._replace(sink=None)
    _cached[cache_key] = _CachedCall(settings, plan_key, resolved.name, owned, runner)
    _prepared_devices.add(device.type)
    return resolved._replace(runner=runner)


def operand_of(pattern: Pattern | str) -> str:
    """The pattern as an argument of the operators, also while `torch.compile` traces."""
    if isinstance(pattern, str):
        return pattern
    if not torch.compiler.is_compiling():
        return to_operand(pattern)
    if is_library_text(pattern):
        return pattern.describe()
    # `id` makes the compiler guard on the very object.
    return _traced_operand(pattern, id(pattern)) or to_operand(pattern)


_traced: dict[str, Pattern] = {}
"""Patterns without text in compiled graphs, which hold their handles only."""


def _traced_operand(pattern: Pattern, address: int) -> str:
    """Operand of a pattern as a constant of a compiled graph; empty for a pattern that the traced code constructs.

    The compiler passes such a pattern without its fields; `to_operand` breaks the graph then.
    """
    if id(pattern) != address:
        return ""
    operand = to_operand(pattern)
    if operand.startswith("@"):
        _traced[str(operand)] = from_operand(operand)
    return str(operand)


# As `torch.compiler.assume_constant_result` does, which imports the compiler.
_traced_operand._dynamo_marked_constant = True  # type: ignore[attr-defined]


def needs_graph(*tensors: Tensor | None) -> bool:
    """Whether autograd or a function transform must record the call; in exported programs the operators do."""
    if torch.compiler.is_exporting():
        return False
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])


def is_observed(*tensors: Tensor) -> bool:
    """Whether a compiler, a transform, a dispatch mode, a profiler or a kind of tensor must see the operators.

    Where none does, the way through torch's dispatcher is host time for nothing.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or (torch._C._len_torch_dispatch_stack() > 0 and FlopFormulas.register())
        or torch.autograd._profiler_enabled()
        or forward_ad._current_level >= 0
        or not _TENSORS.issuperset(map(type, tensors))
        or tensors[0].is_meta
        or tensors[0].is_nested
    )


class _Attention(torch.autograd.Function):
    """Forward and backward as one differentiable function of query, key, value, bias and sink."""

    @staticmethod
    @operators.with_signature
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.dilated_attention.forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors, ctx.settings = inputs[:6], inputs[6:-3]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *inputs[-3:], *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        query, key, value, key_padding_mask, cu_seqlens, seed, *terms, output, lse = ctx.saved_tensors
        tensors = operators.saved_for_backward((query, key, value, output, lse), *grad_outputs)
        if tensors is None:
            return (None,) * 16
        settings = key_padding_mask, cu_seqlens, seed, *ctx.settings, *terms
        *grads, grad_bias, grad_sink = _backward_for(tensors)(*tensors, *settings)
        bias, _, sink = terms
        learned = None if bias is None else grad_bias, None, None if sink is None else grad_sink
        return *grads, *(None,) * 10, *learned

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *arguments: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """A mapped dimension joins the batch; with dropout, a mapped bias or a mapped sink, entries are computed one by
        one, so that entries with the same seed drop the same pairs."""
        if in_dims[4] is not None or arguments[4] is not None:
            raise must("vmap must not map packed sequences", "cu_seqlens", "Call attention once for each packed batch.")
        has_dropout = arguments[5] is not None
        if has_dropout or in_dims[13] is not None or in_dims[15] is not None:
            return operators.one_by_one(_Attention.apply, info.batch_size, in_dims, arguments)
        tensors = [operators.join_batch(arguments[i], in_dims[i], info.batch_size) for i in range(4)]
        positions = arguments[14]
        if positions is not None and positions.dim() > 3:
            batch = len(tensors[0]) // info.batch_size  # pyrefly: ignore[bad-argument-type]
            positions = positions.movedim(in_dims[14], 0).expand(-1, batch, -1, -1).flatten(0, 1)
        elif positions is not None and len(positions) > 1:
            positions = operators.join_batch(positions, None, info.batch_size)
        return operators.split_batch(
            _Attention.apply(*tensors, *arguments[4:14], positions, arguments[15]), info.batch_size
        )


def _backward_for(tensors: tuple[Any, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """The backward as autograd must see it: with a derivative that raises, as an operator, or as a plain function."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return partial(OnceDifferentiable.apply, "attention", torch.ops.dilated_attention.backward)
    query, *_, grad_output, _ = tensors
    return torch.ops.dilated_attention.backward if is_observed(query, grad_output) else _backward


class _EagerAttention(torch.autograd.Function):
    """`_Attention` where nothing but autograd looks on: binding its arguments to a signature takes time, too."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        resolved: ResolvedCall,
    ) -> tuple[Tensor, Tensor]:
        output, lse = resolved.forward(resolved.call(query, key, value))
        ctx.resolved = resolved
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, *resolved.settings[:3], bias, sink, output, lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        query, key, value, *_, output, lse = ctx.saved_tensors
        tensors = operators.saved_for_backward((query, key, value, output, lse), *grad_outputs)
        if tensors is None:
            return (None,) * 6
        resolved = ctx.resolved
        run = _backward_for(tensors)
        if run is not _backward:
            *grads, grad_bias, grad_sink = run(*tensors, *resolved.settings)
            *_, bias, _, sink = resolved.settings
            return *grads, None if bias is None else grad_bias, None if sink is None else grad_sink, None
        grads, grad_sink = resolved.backward(resolved.call(*tensors[:3]), *tensors[3:])
        return *grads, grads.bias if isinstance(grads, BiasedGradients) else None, grad_sink, None


@torch.library.impl(_library, "forward", "CompositeExplicitAutograd")
def _forward(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    resolved = resolve_call(query, key, value, CallSettings(*settings))
    return tuple(resolved.forward(resolved.call(query, key, value)))  # pyrefly: ignore[bad-return]


@torch.library.impl(_library, "backward", "CompositeExplicitAutograd")
def _backward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    output, lse, grad_output, grad_lse, *settings = rest
    resolved = resolve_call(query, key, value, CallSettings(*settings))
    grads, grad_sink = resolved.backward(resolved.call(query, key, value), output, lse, grad_output, grad_lse)
    # An operator returns no optional tensor.
    grad_bias = grads.bias if isinstance(grads, BiasedGradients) else query.new_empty(0)
    return *grads, grad_bias, query.new_empty(0) if grad_sink is None else grad_sink


def resolve_call(query: Tensor, key: Tensor, value: Tensor, settings: CallSettings) -> ResolvedCall:
    """Plan a call and choose its backend."""
    warmup.begin(query, settings.backend)
    call = call_of(query, key, value, settings)
    name, runner = choose(call, settings.backend)
    return ResolvedCall(settings, call.plan, call.pattern, name, runner)


# An exported program calls the operator itself, also in training.
torch.library.register_autograd(
    "dilated_attention::forward", _Attention.backward, setup_context=_Attention.setup_context, lib=_library
)


@torch.library.register_fake("dilated_attention::forward", lib=_library)
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    return operators.empty_results(query, value)


@torch.library.register_fake("dilated_attention::backward", lib=_library)
def _backward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, bias, _, sink = CallSettings(*rest[4:])
    grads = (empty_rows(t, t.shape[-1]) for t in (query, key, value))
    return *grads, *(query.new_empty(0) if x is None else torch.empty_like(x) for x in (bias, sink))


def call_of(
    query: Tensor, key: Tensor, value: Tensor, settings: CallSettings, device: torch.device | None = None
) -> AttentionCall:
    """Call as a backend sees it, with its plan from the cache, on the query's device or another."""
    cu_seqlens = settings.cu_seqlens
    if device is None and cu_seqlens is not None and not allows_host_sync(cu_seqlens.device):
        call = _call_on_device(query, key, value, settings)
        if call is not None:
            return call
    lengths = None if cu_seqlens is None else lengths_of(cu_seqlens, query.shape[2])
    resolved, block_size = _resolved_pattern(query, settings, lengths)
    plan = plan_cache.get(resolved, query.shape[2], query.shape[1], block_size, device or query.device)
    return settings.call(query, key, value, plan, resolved)


def _call_on_device(query: Tensor, key: Tensor, value: Tensor, settings: CallSettings) -> AttentionCall | None:
    """Call whose documents are planned on their device; None if the host must read their bounds."""
    cu_seqlens = settings.cu_seqlens
    resolved, block_size = _resolved_pattern(query, settings, None)
    n, heads = query.shape[2], query.shape[1]
    window = window_of(resolved, n)
    if cu_seqlens is None or cu_seqlens.device != query.device or window is None or settings.memory_budget is not None:
        return None
    plan = documents_plan(cu_seqlens, n, heads, block_size, *window)
    call = settings.call(query, key, value, plan)
    return call if can_run(call, settings.backend) else None


def _resolved_pattern(query: Tensor, settings: CallSettings, lengths: tuple[int, ...] | None) -> tuple[Pattern, int]:
    """Pattern of a call for its length and heads, in documents of the given lengths if any, and its block size."""
    pattern, is_causal, shape = settings.pattern, settings.is_causal, (query.shape[2], query.shape[1])
    # A cache entry would keep a pattern without text alive, which may hold megabytes.
    if pattern.startswith("@"):
        return _resolve(from_operand(pattern), is_causal, lengths, *shape)
    return _resolved(pattern, is_causal, lengths, *shape, registrations())


def _kept_pairs(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> int:
    plan = call_of(query, key, value, CallSettings(*settings), torch.device("cpu")).plan
    return query.shape[0] * kept_pairs(plan)


FlopFormulas(torch.ops.dilated_attention.forward, torch.ops.dilated_attention.backward, _kept_pairs)


@lru_cache(maxsize=1024)
def _resolved(
    text: str, is_causal: bool, lengths: tuple[int, ...] | None, n: int, heads: int, registered: int
) -> tuple[Pattern, int]:
    return _resolve(parse(text), is_causal, lengths, n, heads)


def _resolve(
    pattern: Pattern, is_causal: bool, lengths: tuple[int, ...] | None, n: int, heads: int
) -> tuple[Pattern, int]:
    pattern = pattern & Causal() if is_causal else pattern
    pattern = (pattern if lengths is None else Packed(pattern, lengths)).resolve(n, heads)
    return pattern, own_block(pattern)
