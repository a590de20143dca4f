"""The one operation, as torch sees it: two registered operators, one autograd function, one validated entrance."""

from __future__ import annotations

import inspect
import math
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import must, must_be
from ..kernels import first_call
from ..kernels.dropout import fresh_seed
from ..kernels.registry import AttentionCall, Forward, Gradients, Runner, choose, empty_rows, prepared
from ..patterns import Causal, Packed, Pattern, parse
from ..plan import Plan, PlanCache, PlanKey, own_block
from ..shapes import CuSeqlens, Key, KeyPadding, Output, Query, Value
from . import budget
from .budget import check_budget
from .checks import check_masks, check_tensors
from .merge import AttentionOutput

plan_cache = PlanCache()
"""Plans of every call in this process; `plan_cache.info()` tells hits, misses, evictions and bytes."""

_SETTINGS = (
    "Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor? seed, "
    "str pattern, bool is_causal, float scale, float dropout_p, str backend, float? memory_budget=None"
)
_PATTERNS = (str, Pattern)
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_PLAIN = frozenset((bool, float, int, str, type(None)))
"""Kinds of settings that do not change once they are given."""
_library = torch.library.Library("dilated_attention", "DEF")
_library.define(f"forward(Tensor query, Tensor key, Tensor value, {_SETTINGS}) -> (Tensor, Tensor)")
_library.define(
    "backward(Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, Tensor grad_output, Tensor? grad_lse, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor)"
)


def attention(
    query: Query,
    key: Key,
    value: Value,
    pattern: Pattern | str,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: KeyPadding | None = None,
    cu_seqlens: CuSeqlens | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    memory_budget: int | float | None = None,
) -> Output:
    """Exact attention over the pairs a pattern allows.

    Args:
        query: (B, H, N, D).
        key: (B, G, N, D) with G = H, or a divisor of H when `enable_gqa`.
        value: (B, G, N, E).
        pattern: who may see whom, as a value or as text for `parse`.
        is_causal: also require the key not to come after the query.
        scale: factor on the scores; 1 / sqrt(D) by default.
        enable_gqa: let query head h read key head h // (H / G).
        key_padding_mask: bool (B, N), True where a key takes no part.
        cu_seqlens: int (documents + 1): bounds of sequences packed one after another (B must be 1); the pattern
            holds in each as if it were alone. Keep it on the CPU: its values shape the plan.
        dropout_p: probability of dropping a weight.
        backend: "auto", or a name from `dilated_attention_pytorch.backends()`, which then never falls back.
        memory_budget: the most memory that either pass may take, its results included: bytes, or as a float a fraction
            of what is free. The queries of some samples and heads, or some rows of one head, are then computed at a
            time; outputs stay the same, and gradients within rounding.

    Returns:
        (B, H, N, E). A row that may see no key is 0.

    >>> import torch
    >>> from dilated_attention_pytorch import Dilated, attention
    >>> q, k, v = torch.randn(3, 1, 8, 1000, 64).unbind()
    >>> attention(q, k, v, Dilated((256, 1024), (1, 4)), is_causal=True).shape
    torch.Size([1, 8, 1000, 64])
    """
    masks = key_padding_mask, cu_seqlens
    return _attend(query, key, value, pattern, is_causal, scale, enable_gqa, *masks, dropout_p, backend, memory_budget)[
        0
    ]


def attention_with_lse(
    query: Query,
    key: Key,
    value: Value,
    pattern: Pattern | str,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: KeyPadding | None = None,
    cu_seqlens: CuSeqlens | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    memory_budget: int | float | None = None,
) -> AttentionOutput:
    """`attention`, and the natural logarithm of each row's softmax denominator, (B, H, N); both are differentiable."""
    masks = key_padding_mask, cu_seqlens
    found = _attend(query, key, value, pattern, is_causal, scale, enable_gqa, *masks, dropout_p, backend, memory_budget)
    return AttentionOutput(*found)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | str,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    dropout_p: float,
    backend: str,
    memory_budget: int | float | None,
) -> tuple[Tensor, Tensor]:
    asked = None
    if key_padding_mask is None and cu_seqlens is None and not dropout_p and memory_budget is None:
        asked = _asked(query, key, value, pattern, is_causal, scale, enable_gqa, backend)
        settled = None if asked is None else _recall(asked)
        if settled is not None:
            return _run(settled, query, key, value)
    query, key, value = autocasted(query, key, value)
    check_tensors(query, key, value, enable_gqa)
    check_masks(query, key_padding_mask, cu_seqlens)
    if not isinstance(pattern, Pattern | str):
        raise must_be("pattern must be a Pattern or text", type(pattern).__name__, 'For example "window:512 & causal".')
    if not 0.0 <= dropout_p < 1.0:
        raise must("dropout_p must lie in [0, 1)", dropout_p)
    check_budget(memory_budget)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    elif not -math.inf < scale < math.inf:
        raise must("scale must be finite", scale)
    seed = fresh_seed(query.device) if dropout_p > 0 else None
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    if torch.compiler.is_compiling() and (value is key or value is query):
        # A traced autograd function takes each of its tensors once.
        value = value.view_as(value)
    if torch.compiler.is_compiling() and key is query:
        key = key.view_as(key)
    settings = (
        key_padding_mask,
        cu_seqlens,
        seed,
        _text(pattern),
        is_causal,
        scale,
        dropout_p,
        backend,
        memory_budget,
    )
    if _is_observed(query, key, value):
        run = _Attention.apply if _needs_graph(query, key, value) else torch.ops.dilated_attention.forward
        return run(query, key, value, *settings)
    settled = _settle(query, key, value, *settings)
    if asked is not None:
        settled = _remember(asked, settled, query, key, value)
    return _run(settled, query, key, value)


def _run(settled: _Settled, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    if _needs_graph(query, key, value):
        return _EagerAttention.apply(query, key, value, settled)
    return settled.forward(settled.call(query, key, value))


class _Settled(NamedTuple):
    """A call but for query, key and value: its plan, and who runs it."""

    settings: tuple[Any, ...]
    """As the operators take them."""
    plan: Plan
    pattern: Any
    name: str
    runner: Runner

    def call(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        mask, _, seed, _, _, scale, dropout_p, *_ = self.settings
        return AttentionCall(query, key, value, self.plan, scale, mask, dropout_p, seed, self.pattern)

    def forward(self, call: AttentionCall) -> Forward:
        limit = self.settings[8]
        return self.runner.forward(call) if limit is None else budget.forward(call, self.name, self.runner, limit)

    def backward(
        self, call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        found = output, lse, grad_output, grad_lse
        limit = self.settings[8]
        if limit is None:
            return self.runner.backward(call, *found)
        return budget.backward(call, self.name, self.runner, limit, *found)


class _Known(NamedTuple):
    """What a call seen before needs no second look at; its plan is the cache's to keep or to drop."""

    settings: tuple[Any, ...]
    plan_key: PlanKey
    name: str
    plan: ref[Plan]
    runner: Runner


MOST_KNOWN = 1024
_known: dict[tuple[object, ...], _Known] = {}


def _asked(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern | str, *settings: object
) -> tuple[object, ...] | None:
    """Everything but values that a plain eager call depends on; None where more than that must be looked at."""
    if _is_observed(query, key, value) or not (
        isinstance(pattern, _PATTERNS) and _PLAIN.issuperset(map(type, settings))
    ):
        return None
    device = query.device
    if torch.is_autocast_enabled(device.type):
        return None
    return (
        *(pattern, settings, query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride()),
        *(query.dtype, key.dtype, value.dtype, device, key.device, value.device),
        (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16,
    )


def _recall(asked: tuple[object, ...]) -> _Settled | None:
    known = _known.get(asked)
    if known is None:
        return None
    plan = plan_cache.find(known.plan_key)
    if plan is None or known.plan() is not plan:
        return None
    return _Settled(known.settings, plan, known.plan_key.pattern, known.name, known.runner)


def _remember(asked: tuple[object, ...], settled: _Settled, query: Tensor, key: Tensor, value: Tensor) -> _Settled:
    """Have the backend prepare for calls like this one, where it can and would be asked with these very strides."""
    call = settled.call(query, key, value)
    runner = prepared(settled.name, call) if asked[5:8] == (query.stride(), key.stride(), value.stride()) else None
    if runner is None:
        return settled
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    plan = settled.plan
    plan_key = PlanKey(settled.pattern, plan.n, plan.heads, plan.block_size, query.device)
    # What was prepared for a plan goes with it.
    kept = ref(plan, lambda _, known=_known: known.pop(asked, None))
    _known[asked] = _Known(settled.settings, plan_key, settled.name, kept, runner)
    return settled._replace(runner=runner)


def _text(pattern: Pattern | str) -> str:
    if isinstance(pattern, str):
        return pattern
    return pattern.describe() if torch.compiler.is_compiling() else _described(pattern)


@lru_cache(maxsize=1024)
def _described(pattern: Pattern) -> str:
    return pattern.describe()


def _needs_graph(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether autograd or a function transform must see the call; otherwise its bookkeeping is time for nothing."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


def _is_observed(*tensors: Tensor) -> bool:
    """Whether a compiler, a transform, a dispatch mode, a profiler or a kind of tensor must see the operators.

    Where none does, the way through torch's dispatcher is host time for nothing.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd._profiler_enabled()
        or not _TENSORS.issuperset(map(type, tensors))
        or tensors[0].is_meta
    )


class _Attention(torch.autograd.Function):
    """Forward and backward as one differentiable function of query, key and value."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.dilated_attention.forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors, ctx.settings = inputs[:6], inputs[6:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        grad_output, grad_lse = grad_outputs
        query, key, value, key_padding_mask, cu_seqlens, seed, output, lse = ctx.saved_tensors
        if grad_output is None and grad_lse is None:
            return (None,) * 12
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        if grad_output.stride(-1) != 1:
            grad_output = grad_output.contiguous()
        masks = key_padding_mask, cu_seqlens, seed
        run = torch.ops.dilated_attention.backward if _is_observed(query, grad_output) else _backward
        found = run(query, key, value, output, lse, grad_output, grad_lse, *masks, *ctx.settings)
        return *found, *(None,) * 9

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *arguments: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """A mapped dimension joins the batch."""
        if in_dims[4] is not None or arguments[4] is not None:
            raise must("vmap must not map packed sequences", "cu_seqlens", "Call attention once for each packed batch.")

        def joined(tensor: Tensor | None, dim: int | None) -> Tensor | None:
            if tensor is None:
                return None
            mapped = (
                tensor.unsqueeze(0).expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            )
            return mapped.flatten(0, 1)

        tensors = [joined(arguments[i], in_dims[i]) for i in range(4)]
        output, lse = _Attention.apply(*tensors, *arguments[4:])
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in (output, lse)), (0, 0)  # pyrefly: ignore[bad-return]


class _EagerAttention(torch.autograd.Function):
    """`_Attention` where nothing but autograd looks on: binding its arguments to a signature takes time, too."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, settled: _Settled) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]
        output, lse = settled.forward(settled.call(query, key, value))
        ctx.settled = settled
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, *settled.settings[:3], output, lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        # Where no graph of the gradients is asked for, forbidding one takes time for nothing.
        run = _eager_gradients_once if torch.is_grad_enabled() else _eager_gradients
        return run(ctx, *grad_outputs)


def _eager_gradients(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_output, grad_lse = grad_outputs
    query, key, value, *_, output, lse = ctx.saved_tensors
    if grad_output is None and grad_lse is None:
        return None, None, None, None
    grad_output = torch.zeros_like(output) if grad_output is None else grad_output
    if grad_output.stride(-1) != 1:
        grad_output = grad_output.contiguous()
    settled = ctx.settled
    if _is_observed(query, grad_output):
        found = query, key, value, output, lse, grad_output, grad_lse
        return *torch.ops.dilated_attention.backward(*found, *settled.settings), None
    return *settled.backward(settled.call(query, key, value), output, lse, grad_output, grad_lse), None


_eager_gradients_once = once_differentiable(_eager_gradients)

# Autograd binds the arguments to this signature in every call; finding it anew would take longer than all the rest.
_Attention.forward.__signature__ = inspect.signature(_Attention.forward)  # pyrefly: ignore[missing-attribute]


@torch.library.impl(_library, "forward", "CompositeExplicitAutograd")
def _forward(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    settled = _settle(query, key, value, *settings)
    return tuple(settled.forward(settled.call(query, key, value)))  # pyrefly: ignore[bad-return]


@torch.library.impl(_library, "backward", "CompositeExplicitAutograd")
def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    settled = _settle(query, key, value, *settings)
    found = output, lse, grad_output, grad_lse
    return tuple(settled.backward(settled.call(query, key, value), *found))  # pyrefly: ignore[bad-return]


def _settle(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> _Settled:
    first_call.begin(query, settings[7])
    # The dispatcher leaves out what has its default.
    call, backend = call_of(query, key, value, *settings[:8])
    name, runner = choose(call, backend)
    settings = settings if len(settings) > 8 else (*settings, None)
    return _Settled(settings, call.plan, call.pattern, name, runner)


@torch.library.register_fake("dilated_attention::forward", lib=_library)
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return empty_rows(query, value.shape[-1]), query.new_empty(query.shape[:-1], dtype=lse_dtype)


@torch.library.register_fake("dilated_attention::backward", lib=_library)
def _backward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(empty_rows(t, t.shape[-1]) for t in (query, key, value))  # pyrefly: ignore[bad-return]


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    backend: str,
) -> tuple[AttentionCall, str]:
    """The call a backend sees, with its plan from the cache."""
    lengths = None if cu_seqlens is None else lengths_of(cu_seqlens, query.shape[2])
    resolved, block_size = _resolved(pattern, is_causal, lengths, query.shape[2], query.shape[1])
    plan = plan_cache.get(resolved, query.shape[2], query.shape[1], block_size, query.device)
    return AttentionCall(query, key, value, plan, scale, key_padding_mask, dropout_p, seed, resolved), backend


@lru_cache(maxsize=1024)
def _resolved(text: str, is_causal: bool, lengths: tuple[int, ...] | None, n: int, heads: int) -> tuple[Pattern, int]:
    pattern = parse(text)
    pattern = pattern & Causal() if is_causal else pattern
    pattern = (pattern if lengths is None else Packed(pattern, lengths)).resolve(n, heads)
    return pattern, own_block(pattern)


def lengths_of(cu_seqlens: Tensor, n: int) -> tuple[int, ...]:
    """Lengths of the documents that the bounds enclose."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != n or any(a >= b for a, b in pairwise(bounds)):
        raise must(f"cu_seqlens must grow strictly from 0 to the sequence length {n}", bounds)
    return tuple(b - a for a, b in pairwise(bounds))


def autocasted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, 32-bit inputs take its dtype; accumulation stays in float32 inside the kernels."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t for t in tensors)
