"""Which backends there are, which can run a call, and why the others cannot."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ..errors import BackendUnsupported, must
from ..plan.plan import Plan


@dataclass(frozen=True, eq=False, slots=True)
class AttentionCall:
    """One validated call. Kernels compute `softmax(scale * q k^T + log m) v` over the plan's tiles.

    query (B, H, N, D) · key (B, G, N, D) · value (B, G, N, E), with H a multiple of G, any strides except that
    the last dimension is contiguous; one floating dtype and device. Query head `h` reads key head `h // (H // G)`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    plan: Plan
    scale: float
    key_padding_mask: Tensor | None = None
    """bool (B, N): True where the key takes no part"""
    dropout_p: float = 0.0
    seed: Tensor | None = None
    """int64 [1] on the query's device, given when dropout_p > 0; see kernels/dropout.py"""
    pattern: object | None = None
    """What the plan was made from; the reference reads its `multiplicity`."""

    @property
    def device(self) -> torch.device:
        return self.query.device

    def describe(self) -> str:
        batch, heads, n, d = self.query.shape
        words = [str(self.query.dtype).removeprefix("torch."), self.device.type, f"batch {batch}", f"heads {heads}"]
        if self.key.shape[1] != heads:
            words.append(f"key heads {self.key.shape[1]}")
        words += [f"n {n}", f"d {d}"]
        if self.dropout_p:
            words.append(f"dropout {self.dropout_p}")
        return ", ".join(words)


class Forward(NamedTuple):
    output: Tensor
    """(B, H, N, E), the query's dtype; rows without a key are 0"""
    lse: Tensor
    """(B, H, N), natural log, float32 (float64 for float64 input); rows without a key are -inf"""


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor


class Backend(Protocol):
    def why_not(self, call: AttentionCall) -> str | None:
        """Why this backend cannot run the call, or None when it can."""
        ...

    def forward(self, call: AttentionCall) -> Forward: ...

    def backward(
        self, call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
    ) -> Gradients: ...
