"""Table of backends and the choice of one for a call."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module, resources
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch

from ..errors import BackendUnsupported, must
from ..plan.plan import Plan
from .call import AttentionCall, Extent, Runner


@runtime_checkable
class Backend(Runner, Protocol):
    """Interface of a backend module.

    Six members are optional. `prepare(call)` returns a `Runner` for calls that differ from this one in the values and
    addresses of their tensors alone; it is cached with the plan and must not refer to it. `RUNS_OF_ROWS = True` states
    that a call may have fewer queries than keys, so that a memory budget may split the rows of a head. `SOFTCAP = True`
    states that scores can be bounded, `BIAS = True` that a bias by distance can be added; calls with either skip all
    other backends. `DEVICE_TABLES = True` states that plans are lowered without reading their tables.
    `prepare_first_use(call)` builds a backend that needs it and returns True if `why_not` may have changed.
    """

    def why_not(self, call: AttentionCall) -> str | None:
        """Reason why this backend cannot run the call, or None."""

    def workspace(self, call: AttentionCall, direction: str, extent: Extent) -> int:
        """Upper bound of the bytes that a "forward" or "backward" of a portion of a call takes besides its results."""


MODULES = {
    "hopper": "hopper.backend",
    "triton": "triton.backend",
    "native": "cpu.native",
    "cpu": "cpu.tiles",
    "reference": "reference",
    "flash4": "external.flash4",
    "flex": "external.flex",
}
"""Module of each backend, by name."""


NARROWEST = 40
"""Least width of queries and values for which `hopper` was measured to be faster than `triton`."""
USUAL_WIDTHS = 64, 128
"""Widths of queries and values, equal, that ran on `hopper` with every kind of plan."""


class Preference(NamedTuple):
    """Order in which `backend="auto"` tries backends; other backends run only by name."""

    order: tuple[str, ...]
    because: str
    """Measurement that the order follows, or a note that there is none."""


class Explanation(dict[str, str | None]):
    """Reasons why each backend cannot run a call, None for those that can, and the backend that runs it."""

    def __init__(self, reasons: dict[str, str | None], preference: Preference) -> None:
        super().__init__(reasons)
        self.order, self.because = preference
        self.backend = next((name for name in self.order if reasons[name] is None), None)
        """Backend that `backend="auto"` selects, None if no backend can run the call."""

    def __str__(self) -> str:
        width = max(map(len, self))
        taken = "no backend can run this call" if self.backend is None else f"auto selects {self.backend}"
        able = "can run it" if self.backend is None else "can run it, later in the order"
        lines = [f"{taken}: the order is {', '.join(self.order)} ({self.because})"]
        for name, reason in self.items():
            state = "selected" if name == self.backend else able if name in self.order else "can run it by name"
            lines.append(f"  {name:<{width}}: {state if reason is None else reason}")
        return "\n".join(lines)


def backend_named(name: str) -> Backend:
    """Import a backend by name. Imports are deferred until here, so that optional packages stay optional."""
    if name not in MODULES:
        near = get_close_matches(name, ("auto", *MODULES), 1)
        hint = f"Did you mean {near[0]!r}?" if near else None
        raise must(f"backend must be one of auto, {', '.join(MODULES)}", repr(name), hint)
    return cast(Backend, import_module(f".{MODULES[name]}", __package__))


def _preferences() -> dict[str, dict[str, Preference]]:
    """preference.json by kind of device and class of call."""
    text = resources.files(str(__package__)).joinpath("preference.json").read_text(encoding="utf-8")
    return {
        kind: {line["when"]: Preference(tuple(line["order"]), line["because"]) for line in lines}
        for kind, lines in json.loads(text).items()
    }


PREFERENCES = _preferences()


def _preference(device: torch.device, *classes: str) -> Preference:
    """Order of the first of some classes that the file has for a device."""
    kinds = [device.type, "any"]
    if device.type == "cuda":
        kinds.insert(0, "cuda sm_{}{}".format(*torch.cuda.get_device_capability(device)))
    tables = map(PREFERENCES.get, kinds)
    return next(lines[name] for lines in tables if lines for name in (*classes, "any") if name in lines)


def preference(call: AttentionCall) -> Preference:
    """Order of backends for the device and class of a call, from preference.json.

    A call is "dilated" when its plan has several parts or a part that skips tokens, and "block-sparse" otherwise. An
    "uncommon" call (see `is_uncommon`) has its own order on devices for which the file gives one. A device is looked up
    as "cuda sm_90", then "cuda", then "any".
    """
    when = "dilated" if is_dilated(call.plan) else "block-sparse"
    return _preference(call.device, "uncommon", when) if is_uncommon(call) else _preference(call.device, when)


def is_dilated(plan: Plan) -> bool:
    """Whether a plan has several parts or a part that skips tokens."""
    return len(plan.parts) > 1 or any(part.queries.rate > 1 or part.keys.rate > 1 for part in plan.parts)


def is_uncommon(call: AttentionCall) -> bool:
    """Whether the orders "block-sparse" and "dilated" of a GPU do not hold for a call or were not measured for it."""
    (*_, n, d), (*_, keys, e) = call.query.shape, call.value.shape
    if min(d, e) < NARROWEST or n != keys or call.scale <= 0:
        return True
    # Each of these ran on a GPU alone, and the combinations in an emulator.
    is_small, is_other_width = call.plan.block_size == 64, d != e or d not in USUAL_WIDTHS
    is_varied = is_other_width or call.key_padding_mask is not None
    listed_on_device = call.pattern is None
    return (is_small and (is_varied or listed_on_device)) or ((is_small or is_varied) and is_dilated(call.plan))


def choose(call: AttentionCall, backend: str = "auto") -> tuple[str, Backend]:
    """First backend that can run the call; a backend requested by name never falls back to another."""
    names: Iterable[str] = preference(call).order if backend == "auto" else (backend,)
    reasons = {}
    for name in names:
        candidate = backend_named(name)
        reason = _why_not(candidate, call)
        prepare_first_use = None if reason is None else getattr(candidate, "prepare_first_use", None)
        if prepare_first_use is not None and prepare_first_use(call):
            reason = _why_not(candidate, call)
        if reason is None:
            return name, candidate
        reasons[name] = reason
    raise BackendUnsupported(call.describe(), reasons, backend)


def _why_not(backend: Backend, call: AttentionCall) -> str | None:
    if call.softcap and not getattr(backend, "SOFTCAP", False):
        return f"has no softcap{_instead(call, 'SOFTCAP')}"
    if call.bias is not None and not getattr(backend, "BIAS", False):
        return f"has no bias by distance{_instead(call, 'BIAS')}"
    if call.plan.device_tables is not None and not getattr(backend, "DEVICE_TABLES", False):
        return "reads the tables of a plan on the host, which this call leaves on the device"
    return backend.why_not(call)


def _instead(call: AttentionCall, feature: str) -> str:
    """Hint at the first backend for the call's device that declares a feature."""
    able = (name for name in preference(call).order if getattr(backend_named(name), feature, False))
    name = next(able, None)
    return f"; {name} has one" if name else ""


def can_run(call: AttentionCall, backend: str) -> bool:
    """Whether a backend by name, or with "auto" one of the order, can run the call."""
    names = preference(call).order if backend == "auto" else (backend,)
    return any(_why_not(backend_named(name), call) is None for name in names)


def can_prepare(name: str) -> bool:
    """Whether a backend prepares calls."""
    return hasattr(backend_named(name), "prepare")


def prepared(name: str, call: AttentionCall) -> Runner:
    """Runner of a backend that `can_prepare`, for calls like this one."""
    return backend_named(name).prepare(call)  # pyrefly: ignore[missing-attribute]


def explain(call: AttentionCall) -> Explanation:
    """Backend that runs the call, and the reason against each of the others."""
    return Explanation({name: _why_not(backend_named(name), call) for name in MODULES}, preference(call))
