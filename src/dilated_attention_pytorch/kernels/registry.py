"""Which backends there are, which can run a call, and why the others cannot."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, resources
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from ..errors import BackendUnsupported, must
from ..plan.plan import Plan


# Never changed, but not frozen: every call makes one, and that would take four times as long.
@dataclass(eq=False, slots=True)
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
    positions: Tensor | None = None
    """int64 (2, H, N): the token that each query row, and each key row as a query head reads it, stands for in dropout.

    Row numbers where not given. A rank's buffers hold other tokens in each row, and for each head."""

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """In which softmax and sums are computed, and LSE is given."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

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
    """What a forward pass gives."""

    output: Tensor
    """(B, H, N, E), the query's dtype; rows without a key are 0"""
    lse: Tensor
    """(B, H, N), natural log, float32 (float64 for float64 input); rows without a key are -inf"""


class Gradients(NamedTuple):
    """What a backward pass gives, each in the dtype and shape of its input."""

    query: Tensor
    key: Tensor
    value: Tensor


@runtime_checkable
class Runner(Protocol):
    """What computes calls."""

    def forward(self, call: AttentionCall) -> Forward: ...

    def backward(
        self, call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
    ) -> Gradients: ...


@runtime_checkable
class Backend(Runner, Protocol):
    """What a module must offer to be a backend.

    It may also offer `prepare(call)`, a `Runner` for calls that differ from this one in the values and places of their
    tensors alone, kept as long as the plan is: it must not hold the plan itself.
    """

    def why_not(self, call: AttentionCall) -> str | None:
        """Why this backend cannot run the call, or None when it can."""
        ...


MODULES = {
    "hopper": "hopper_backend",
    "triton": "triton_backend",
    "native": "native",
    "cpu": "cpu",
    "reference": "reference",
    "cudnn": "cudnn",
    "flash4": "flash4",
    "flex": "flex",
}
"""Every backend by name, and the module it lives in."""


class Preference(NamedTuple):
    """Which backends `backend="auto"` asks, in this order; the others run only when asked for by name."""

    order: tuple[str, ...]
    because: str
    """The measurement the order follows, or that there is none."""


class Explanation(dict[str, str | None]):
    """Every backend with its reason against a call, None for those that can run it, and which of them is taken."""

    def __init__(self, reasons: dict[str, str | None], preference: Preference) -> None:
        super().__init__(reasons)
        self.order, self.because = preference
        self.backend = next((name for name in self.order if reasons[name] is None), None)
        """What `backend="auto"` runs, None when nothing can."""

    def __str__(self) -> str:
        width = max(map(len, self))
        taken = "no backend can run this call" if self.backend is None else f"auto takes {self.backend}"
        asked = "can run it" if self.backend is None else "can run it, and comes later in the order"
        lines = [f"{taken}: the order is {', '.join(self.order)} ({self.because})"]
        for name, reason in self.items():
            state = "takes it" if name == self.backend else asked if name in self.order else "can run it when named"
            lines.append(f"  {name:<{width}}: {state if reason is None else reason}")
        return "\n".join(lines)


_reproducible = True


def reproducible_gradients(enabled: bool | None = None) -> bool:
    """Whether gradients must come out with the same bits every time; give a value to change it.

    They do by default. `reproducible_gradients(False)` lets a backend add in any order where that is faster: on Hopper
    GPUs dQ is then summed beside dK and dV in a float32 copy. `torch.use_deterministic_algorithms(True)` overrules it.
    """
    global _reproducible
    if enabled is not None:
        _reproducible = bool(enabled)
    return _reproducible or torch.are_deterministic_algorithms_enabled()


def backend_named(name: str) -> Backend:
    """Load one backend. Nothing is imported before it is asked for, so optional packages stay optional."""
    if name not in MODULES:
        raise must(f"backend must be one of auto, {', '.join(MODULES)}", repr(name))
    return cast(Backend, import_module(f".{MODULES[name]}", __package__))


@lru_cache(maxsize=1)
def _preferences() -> dict[str, dict[str, Preference]]:
    """preference.json by kind of device and class of plan."""
    text = resources.files("dilated_attention_pytorch.kernels").joinpath("preference.json").read_text(encoding="utf-8")
    return {
        kind: {line["when"]: Preference(tuple(line["order"]), line["because"]) for line in lines}
        for kind, lines in json.loads(text).items()
    }


@lru_cache(maxsize=64)
def _preference(device: torch.device, when: str) -> Preference:
    kinds = [device.type, "any"]
    if device.type == "cuda":
        kinds.insert(0, "cuda sm_{}{}".format(*torch.cuda.get_device_capability(device)))
    known = (_preferences().get(kind, {}) for kind in kinds)
    return next(lines[name] for lines in known for name in (when, "any") if name in lines)


def preference(call: AttentionCall) -> Preference:
    """The order for a call's device and its class of plan, as preference.json gives it.

    A plan is "dilated" when it has several parts or a part that skips tokens, and "block-sparse" otherwise. A device
    is looked up as "cuda sm_90", then "cuda", then "any".
    """
    parts = call.plan.parts
    skips = len(parts) > 1 or any(part.queries.rate > 1 or part.keys.rate > 1 for part in parts)
    return _preference(call.device, "dilated" if skips else "block-sparse")


def choose(call: AttentionCall, backend: str = "auto") -> tuple[str, Backend]:
    """The first backend that can run the call; a backend asked for by name never falls back to another."""
    names: Iterable[str] = preference(call).order if backend == "auto" else (backend,)
    reasons = {}
    for name in names:
        candidate = backend_named(name)
        reason = candidate.why_not(call)
        if reason is None:
            return name, candidate
        reasons[name] = reason
    raise BackendUnsupported(call.describe(), reasons, backend)


def prepared(name: str, call: AttentionCall) -> Runner | None:
    """What a backend prepares for calls like this one, None where it does not."""
    prepare = getattr(backend_named(name), "prepare", None)
    return None if prepare is None else prepare(call)


def explain(call: AttentionCall) -> Explanation:
    """Which backend runs the call and why, and what speaks against each of the others."""
    return Explanation({name: backend_named(name).why_not(call) for name in MODULES}, preference(call))


def zero_gradients(call: AttentionCall) -> Gradients:
    """Accumulators in the compute dtype, each in the memory order of what it is the gradient of."""
    return Gradients(
        *(empty_rows(t, t.shape[-1], call.compute_dtype).zero_() for t in (call.query, call.key, call.value))
    )


def empty_rows(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised (B, H, N, width) in the memory order of `like`: heads inside tokens where it has them so."""
    batch, heads, n, _ = like.shape
    if heads > 1 and like.stride(1) < like.stride(2):
        return like.new_empty((batch, n, heads, width), dtype=dtype or like.dtype).transpose(1, 2)
    return like.new_empty((batch, heads, n, width), dtype=dtype or like.dtype)


def laid_like(rows: Tensor, like: Tensor) -> Tensor:
    """The same rows in the memory order of `like`, copied only where they are not."""
    wanted = empty_rows(like, rows.shape[-1])
    return rows if rows.stride() == wanted.stride() else wanted.copy_(rows)
