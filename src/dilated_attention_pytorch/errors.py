"""Errors with the broken rule, the value received, and a remedy."""

from __future__ import annotations

from collections.abc import Mapping


def must(what: str, got: object, do: str | None = None) -> ValueError:
    """Build the `ValueError` for a broken rule: `raise must("rate must be >= 1", rate)`.

    The first line is `<what must hold>, got <value>`; the second, if any, is advice.
    """
    return ValueError(_sentence(what, got, do))


def must_be(what: str, got: object, do: str | None = None) -> TypeError:
    """Build the `TypeError` for a value of the wrong kind, worded as by `must`."""
    return TypeError(_sentence(what, got, do))


def _sentence(what: str, got: object, do: str | None) -> str:
    first = f"{what}, got {got}"
    return first if do is None else f"{first}\n{do}"


class BackendUnsupported(RuntimeError):
    """Raised if no backend, or not the requested backend, can run a call."""

    def __init__(self, call: str, reasons: Mapping[str, str], backend: str = "auto") -> None:
        self.reasons = dict(reasons)
        if backend == "auto":
            first = f"no backend can run this call ({call})"
        else:
            first = f"backend {backend!r} cannot run this call ({call})"
        width = max((len(name) for name in reasons), default=0)
        lines = [f"  {name:<{width}}: {reason}" for name, reason in reasons.items()]
        super().__init__("\n".join([first, *lines]))
