"""Attention calls as backends see them, their results, and helpers that backends share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ..plan.plan import Plan

Result = TypeVar("Result")
MOST_PROGRAMS = 2**16 - 1
"""Programs along the second and third dimension of a CUDA grid: heads, and samples of one launch."""


# Not frozen, although never modified: an instance is built in every call, and freezing quadruples its cost.
@dataclass(eq=False, slots=True)
class AttentionCall:
    """One validated call. Kernels compute `softmax(cap(scale * q k^T) + b + log m) v` over the plan's tiles.

    `cap` is the identity, or `softcap * tanh(x / softcap)` on backends with `SOFTCAP = True`. `b` is 0, or an entry of
    `bias` by the distance of query and key on backends with `BIAS = True`.

    query (B, H, N, D) · key (B, G, N, D) · value (B, G, N, E), with H a multiple of G, any strides except that
    the last dimension is contiguous; one floating dtype and device. Query head `h` reads key head `h // (H // G)`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    plan: Plan
    scale: float
    key_padding_mask: Tensor | None = None
    """bool (B, N): True where the key is ignored"""
    dropout_p: float = 0.0
    seed: Tensor | None = None
    """int64 [1] on the query's device, given when dropout_p > 0; see kernels/dropout.py"""
    pattern: object | None = None
    """Pattern of the plan; the reference backend reads its `multiplicity`."""
    positions: Tensor | None = None
    """int64 (2, H, N): token of each query row, and of each key row by query head, for dropout.

    Row numbers by default; the rows of a rank's buffer hold other tokens, which differ by head."""
    softcap: float = 0.0
    """Bound of the scores; 0 for none"""
    bias: Tensor | None = None
    """(H, W) or (H, W1, W2), odd widths, contiguous, in the compute dtype: table by distance, see `bias_index`"""
    bias_positions: Tensor | None = None
    """int64 (B or 1, N, axes of the table), contiguous; row numbers are the positions of one axis by default.

    Rows of a buffer hold other tokens as queries than as keys: (2, H, N, axes) by query head, as `positions`."""
    sink: Tensor | None = None
    """(H,), contiguous, no wider than the LSE: a logit of each head in the denominators of the output, not of the LSE.

    A backward pass does not read it. It is given the LSE of these denominators, and may return `DeltaGradients`."""
    keys_lse_grad: Tensor | None = None
    """(B, H, N), for the backward pass of a call with a sink and a bias: gradient of the LSE of the keys alone.

    Where the sink is large, that of the LSE of the denominators is far larger than what it adds to any gradient."""

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the softmax, of sums and of the LSE."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def padding_bytes(self) -> tuple[Tensor, ...]:
        """The padding mask as kernels read it, uint8 (B, N), contiguous; empty without a mask."""
        mask = self.key_padding_mask
        return () if mask is None else (mask.contiguous().view(torch.uint8),)

    def describe(self) -> str:
        batch, heads, n, d = self.query.shape
        words = [str(self.query.dtype).removeprefix("torch."), self.device.type, f"batch {batch}", f"heads {heads}"]
        if self.key.shape[1] != heads:
            words.append(f"key heads {self.key.shape[1]}")
        words += [f"n {n}", f"d {d}"]
        if self.dropout_p:
            words.append(f"dropout {self.dropout_p}")
        if self.softcap:
            words.append(f"softcap {self.softcap}")
        if self.bias is not None:
            words.append(f"bias {'x'.join(map(str, self.bias.shape[1:]))}")
        if self.sink is not None:
            words.append("sink")
        return ", ".join(words)


def allows_host_sync(device: torch.device) -> bool:
    """Whether the host may read values of a device: a GPU would stall the host."""
    return device.type != "cuda"


class Forward(NamedTuple):
    """Results of a forward pass."""

    output: Tensor
    """(B, H, N, E), the query's dtype; rows without a key are 0"""
    lse: Tensor
    """(B, H, N), natural log, float32 (float64 for float64 input); rows without a key are -inf"""


class Gradients(NamedTuple):
    """Results of a backward pass, each in the dtype and shape of its input."""

    query: Tensor
    key: Tensor
    value: Tensor


class DeltaGradients(Gradients):
    """Results of a backward pass that also returns a number of every row; iterates as `Gradients`."""

    delta: Tensor | None = None
    """rowsum(dO * O) - dLSE, (B, H, N) in the compute dtype; without a dLSE the gradient of a sink is a sum over it"""


class BiasedGradients(DeltaGradients):
    """Results of a backward pass of a call with a bias; iterates as `Gradients`."""

    bias: Tensor
    """Gradient of the table, in its dtype."""

    def __new__(cls, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> BiasedGradients:
        """Attach the gradient of the table to those of query, key and value."""
        grads = super().__new__(cls, query, key, value)
        grads.bias = bias
        return grads


@runtime_checkable
class Runner(Protocol):
    """Forward and backward of calls."""

    def forward(self, call: AttentionCall) -> Forward: ...

    def backward(
        self, call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
    ) -> Gradients: ...


class Extent(NamedTuple):
    """Portion of a call that is computed at a time; see `Backend.workspace`."""

    queries: int
    """Query rows over all samples and heads."""
    keys: int
    samples: int
    heads: int
    """Query heads of a sample."""
    pairs: int | None = None
    """Upper bound of tile pairs, given if the portion is a run of rows of one head."""


_reproducible = True


def reproducible_gradients(enabled: bool | None = None) -> bool:
    """Whether gradients are bitwise equal in every run; pass a value to change the setting.

    The default is True. `reproducible_gradients(False)` allows sums in any order if that is faster: on Hopper GPUs
    dQ is then summed with dK and dV, in a float32 copy. `torch.use_deterministic_algorithms(True)` takes precedence.
    """
    global _reproducible
    if enabled is not None:
        _reproducible = bool(enabled)
    return _reproducible or torch.are_deterministic_algorithms_enabled()


_memory = threading.local()


@contextmanager
def saving_memory(enabled: bool = True) -> Iterator[None]:
    """Context in which backends of this thread prefer a small workspace to speed."""
    before = saves_memory()
    _memory.is_short = enabled or before
    try:
        yield
    finally:
        _memory.is_short = before


def saves_memory() -> bool:
    """Whether this thread is in the context `saving_memory`."""
    return getattr(_memory, "is_short", False)


def without_autocast(run: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a forward or backward of torch operations: autocast would round its float32 products."""

    @wraps(run)
    def exact(call: AttentionCall, *rows: Tensor | None) -> Result:
        with torch.autocast(call.device.type, enabled=False):
            return run(call, *rows)

    return exact


def capped(scores: Tensor, softcap: float) -> Tensor:
    """`softcap * tanh(scores / softcap)` in the memory of the scores; the scores themselves for a softcap of 0."""
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap else scores


def cap_slope(scores: Tensor, seen: Tensor, softcap: float) -> Tensor:
    """Derivative of `capped` from its result; 0 where a pair is not seen."""
    return torch.where(seen, 1 - (scores / softcap).square(), 0.0)


def bias_index(call: AttentionCall, rows: Tensor, columns: Tensor, head: int) -> Tensor:
    """Entry of `call.bias[head].flatten()` for query rows and key rows that broadcast, int64 (B or 1, ...).

    On each axis it is `clamp(position[column] - position[row] + W // 2, 0, W - 1)`: the entry in the middle is that of
    distance 0, and the outermost entries hold beyond the table.
    """
    assert call.bias is not None
    positions = call.bias_positions
    if positions is None:
        at, key_at = rows[None, ..., None], columns[None, ..., None]
    elif positions.dim() == 4:
        at, key_at = positions[0, head, rows][None], positions[1, head, columns][None]
    else:
        at, key_at = positions[:, rows], positions[:, columns]
    index = torch.zeros((), dtype=torch.int64, device=rows.device)
    for axis, width in enumerate(call.bias.shape[1:]):
        distance = key_at[..., axis] - at[..., axis]
        index = index * width + (distance + width // 2).clamp(0, width - 1)
    return index


def add_bias_gradient(total: Tensor, index: Tensor, grad_scores: Tensor) -> None:
    """Add gradients of scores (B, ...) to the float64 sums of one head's table, at the entries of `bias_index`."""
    if len(index) != len(grad_scores):
        grad_scores = grad_scores.sum(0, keepdim=True, dtype=total.dtype)
    total.view(-1).index_add_(0, index.flatten(), grad_scores.flatten().to(total.dtype))


def zero_gradients(call: AttentionCall) -> Gradients:
    """Zero accumulators of the gradients in the compute dtype, each in the memory order of its input."""
    return Gradients(
        *(empty_rows(t, t.shape[-1], call.compute_dtype).zero_() for t in (call.query, call.key, call.value))
    )


def empty_rows(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised (B, H, N, width) in the memory order of `like`: (B, H, N) or (B, N, H)."""
    batch, heads, n, _ = like.shape
    if heads > 1 and like.stride(1) < like.stride(2):
        return like.new_empty((batch, n, heads, width), dtype=dtype or like.dtype).transpose(1, 2)
    return like.new_empty((batch, heads, n, width), dtype=dtype or like.dtype)


def laid_like(rows: Tensor, like: Tensor) -> Tensor:
    """Rows in the memory order of `like`, copied if theirs differs."""
    target = empty_rows(like, rows.shape[-1])
    return rows if rows.stride() == target.stride() else target.copy_(rows)


def wide_copies(call: AttentionCall, direction: str, extent: Extent) -> int:
    """Upper bound of the bytes of inputs, results and sums in the compute dtype, as the CPU backends hold them."""
    d, e, wide = call.query.shape[3], call.value.shape[3], call.compute_dtype.itemsize
    if direction == "forward":
        return wide * ((d + e + 1) * extent.queries + (d + e) * extent.keys)
    return wide * (3 * d + 2 * e + 3) * extent.queries + (1 + key_copies(call)) * key_sums(call) * extent.keys


def key_copies(call: AttentionCall) -> int:
    """Upper bound of the copies of dK and dV that threads sum separately."""
    return max(2, torch.get_num_threads()) if call.device.type == "cpu" else 2


def key_sums(call: AttentionCall) -> int:
    """Bytes of a row of dK and dV in the compute dtype, each padded to 16 elements."""
    d, e = call.query.shape[3], call.value.shape[3]
    return call.compute_dtype.itemsize * (-(-d // 16) * 16 + -(-e // 16) * 16)
