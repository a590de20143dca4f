"""Checks of the arguments of a call, before anything is computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import must, must_be

MOST_USUAL_HEADS = 128
_library = torch.library.Library("dilated_attention", "FRAGMENT")
_library.define("require(Tensor holds, str message) -> Tensor")


def cast_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype of a tensor once autocast has been applied to it."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensor.dtype
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    return torch.get_autocast_dtype(kind) if tensor.dtype in narrow else tensor.dtype


def autocasted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, inputs of at most 32 bits take its dtype; kernels still accumulate in float32."""
    return tuple([t.to(cast_dtype(t)) if isinstance(t, Tensor) else t for t in tensors])


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Context without autocast, which would round float32 products."""
    rounds = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if rounds else _nothing


_nothing = nullcontext()


def check_dense(name: str, tensor: Tensor) -> None:
    """Refuse a nested tensor, whose shape torch does not give."""
    if tensor.is_nested:
        advice = "Concatenate the sequences along n in a batch of one and pass cu_seqlens."
        raise must_be(f"{name} must be a dense tensor", "a nested one", advice)


def check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, *, one_length: bool = True) -> None:
    """Check shapes, dtypes and devices of query, key and value; without `one_length` keys may outnumber queries."""
    named = (("query", query), ("key", key), ("value", value))
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise must_be(f"{name} must be a Tensor", type(tensor).__name__)
        check_dense(name, tensor)
        if tensor.dim() != 4:
            raise must(
                f"{name} must have shape (batch, heads, n, width)", f"{tensor.dim()} dimensions {tuple(tensor.shape)}"
            )
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise must_be(f"{name} must be float16, bfloat16, float32 or float64", tensor.dtype)
    for name, tensor in named[1:]:
        if cast_dtype(tensor) != cast_dtype(query):
            raise must_be(f"{name} must have the query's dtype {query.dtype}", tensor.dtype)
        if tensor.device != query.device:
            raise must(f"{name} must be on the query's device {query.device}", tensor.device)
        if tensor.shape[0] != query.shape[0]:
            raise must(f"{name} must have the query's batch size {query.shape[0]}", tensor.shape[0])
        if one_length and tensor.shape[2] != query.shape[2]:
            raise must(f"{name} must have the query's length {query.shape[2]}", tensor.shape[2])
    if value.shape[2] != key.shape[2]:
        raise must(f"value must have the key's length {key.shape[2]}", value.shape[2])
    if key.shape[3] != query.shape[3]:
        raise must(f"key must have the query's width {query.shape[3]}", key.shape[3])
    if value.shape[1] != key.shape[1]:
        raise must(f"value must have the key's {key.shape[1]} heads", value.shape[1])
    if min(query.shape[1], query.shape[3], value.shape[3], key.shape[1]) < 1:
        raise must("heads and widths must be at least 1", f"query {tuple(query.shape)}, value {tuple(value.shape)}")
    if key.shape[1] != query.shape[1] and (not enable_gqa or query.shape[1] % key.shape[1]):
        advice = "Pass enable_gqa=True." if query.shape[1] % key.shape[1] == 0 else None
        what = "query heads must be a multiple of key heads" if enable_gqa else "key must have as many heads as query"
        raise must(what, f"{query.shape[1]} query heads and {key.shape[1]} key heads", advice)


def check_layout(query: Tensor) -> None:
    """Warn where the axes of heads and tokens look swapped: more heads than any model has, and fewer tokens."""
    heads, n = query.shape[1:3]
    if not torch.compiler.is_compiling() and heads > MOST_USUAL_HEADS and heads > n:
        warnings.warn(
            f"query has {heads} heads of {n} tokens: are the axes swapped? attention takes (batch, heads, tokens, "
            "width), as scaled_dot_product_attention does; modules such as SparseAttention take (batch, tokens, heads, "
            "width)",
            stacklevel=4,
        )


WRONG_NAMES = {
    "attn_mask": "pass Pattern.from_mask(mask) as the pattern, or intersect it with yours by &",
    "mask": "pass Pattern.from_mask(mask) as the pattern, or intersect it with yours by &",
    "block_mask": "pass Pattern.from_mask_mod(mask_mod) as the pattern",
    "mask_mod": "pass Pattern.from_mask_mod(mask_mod) as the pattern",
    "attention_mask": "padding goes into key_padding_mask, True where a key takes no part",
    "causal": "the argument is is_causal",
    "softmax_scale": "the argument is scale",
    "dropout": "the argument is dropout_p",
    "window_size": 'pass the pattern "window:512"',
    "logits_soft_cap": "the argument is softcap",
    "s_aux": "the argument is sink",
    "learnable_sink": "the argument is sink",
    "sinks": "the argument is sink",
    "score_mod": "softcap bounds scores, bias adds a table by distance, position of a multihead module rotates",
    "attn_bias": "bias adds a table by distance; a mask is a pattern, Pattern.from_mask(mask)",
    "alibi_slopes": "the argument is bias=distance_bias(slopes, n - 1)",
    "return_attention_weights": "the argument of a multihead module is need_weights",
    "need_weights": "the argument of a module without projections is return_attention_weights",
    "position_bias": "the argument is bias, a table by distance; t5_bias makes it from the weight of the buckets",
}
"""Arguments of other libraries -> their equivalents here."""


def unexpected(function: str, given: dict[str, object]) -> TypeError:
    """Error for unknown keyword arguments, with the equivalent argument if the name is one of another library."""
    name = next(iter(given))
    advice = f"; {WRONG_NAMES[name]}" if name in WRONG_NAMES else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{advice}")


def check_masks(query: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Check types, shapes and devices of the masks."""
    batch, _, n, _ = query.shape
    if key_padding_mask is not None:
        if not isinstance(key_padding_mask, Tensor):
            came, advice = type(key_padding_mask).__name__, "key_padding_mask=torch.tensor(...)."
            raise must_be("key_padding_mask must be a Tensor", came, advice)
        if key_padding_mask.dtype != torch.bool:
            raise must_be("key_padding_mask must be bool, True where a key is ignored", key_padding_mask.dtype)
        if tuple(key_padding_mask.shape) != (batch, n):
            raise must(f"key_padding_mask must have shape ({batch}, {n})", tuple(key_padding_mask.shape))
        if key_padding_mask.device != query.device:
            raise must(f"key_padding_mask must be on the query's device {query.device}", key_padding_mask.device)
    if cu_seqlens is not None:
        check_bounds(cu_seqlens)
        if batch != 1:
            raise must("packed sequences must have batch size 1", batch, "Concatenate the sequences along n.")


def lengths_of(cu_seqlens: Tensor, n: int) -> tuple[int, ...]:
    """Lengths of the documents that bounds enclose, without those of no token."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != n or any(a > b for a, b in pairwise(bounds)):
        raise must(f"cu_seqlens must ascend from 0 to the sequence length {n}", bounds)
    return tuple(b - a for a, b in pairwise(bounds) if a < b)


def validate_cu_seqlens(cu_seqlens: Tensor, n: int) -> None:
    """Raise unless bounds of packed sequences ascend from 0 to n.

    Reads values back to the host: a check for debugging on a GPU, where operations that leave the bounds on the device
    read no key outside the sequence for wrong bounds, and give wrong results. On the CPU they check it themselves.

    Args:
        cu_seqlens: int32 or int64 (documents + 1). A document may be empty.
        n: tokens of the packed sequence.

    >>> import torch
    >>> from dilated_attention_pytorch import validate_cu_seqlens
    >>> validate_cu_seqlens(torch.tensor([0, 300, 300, 512], dtype=torch.int32), 512)
    """
    check_bounds(cu_seqlens)
    lengths_of(cu_seqlens, n)


def check_bounds(cu_seqlens: Tensor) -> None:
    """Check type, dtype and shape of the bounds of packed sequences."""
    if not isinstance(cu_seqlens, Tensor):
        raise must_be("cu_seqlens must be a Tensor", type(cu_seqlens).__name__, "cu_seqlens=torch.tensor(...).")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or len(cu_seqlens) < 2:
        came = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        raise must("cu_seqlens must be int32 or int64 of shape (documents + 1,)", came)


def check_sink(query: Tensor, sink: Tensor) -> None:
    """Check type, shape, dtype and device of a learned sink."""
    if not isinstance(sink, Tensor):
        raise must_be("sink must be a Tensor", type(sink).__name__, "sink=torch.tensor([...]), one logit per head.")
    if not isinstance(query, Tensor) or query.dim() != 4:
        return
    if tuple(sink.shape) != (query.shape[1],):
        raise must(f"sink must have shape ({query.shape[1]},), one logit per query head", tuple(sink.shape))
    if not sink.is_floating_point():
        raise must_be("sink must be floating-point", sink.dtype)
    if sink.device != query.device:
        raise must(f"sink must be on the query's device {query.device}", sink.device)


def check_softcap(softcap: float | None) -> None:
    """Check that a bound of the scores is a positive number."""
    if softcap is not None and not (isinstance(softcap, int | float) and 0 < softcap < float("inf")):
        raise must("softcap must be a positive number, or None", softcap)


def require(tensor: Tensor, holds: Tensor, what: str, got: Callable[[], object], do: str | None = None) -> Tensor:
    """Return `tensor` after checking a condition on the values of a call.

    Raises in eager mode. Under `torch.compile` the check is an operator whose result flows into `tensor`, so that no
    compiler pass can remove it. On a GPU a compiled or captured check is a device assertion, without a host sync.

    Args:
        tensor: the result must be used in its place.
        holds: bool scalar.
        what: the condition in words, as for `must`.
        got: describes the values that were received; eager mode only.
        do: advice, as for `must`.
    """
    if torch.compiler.is_compiling():
        return tensor + torch.ops.dilated_attention.require(holds, str(must(what, "other values", do)))
    if holds.is_meta:
        return tensor
    if holds.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(holds, str(must(what, "other values", do)))
    elif not holds:
        raise must(what, got(), do)
    return tensor


@torch.library.impl(_library, "require", "CompositeExplicitAutograd")
def _require(holds: Tensor, message: str) -> Tensor:
    if holds.is_cuda:
        torch._assert_async(holds, message)
    elif not holds:
        raise ValueError(message)
    return torch.zeros_like(holds)


@torch.library.register_fake("dilated_attention::require", lib=_library)
def _require_fake(holds: Tensor, message: str) -> Tensor:
    return torch.empty_like(holds)
