"""Triton's interpreter without repeated work, for processes that interpret to their end."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

PATCHED = SimpleNamespace(restore=lambda: None)
"""Stands for the scope that would undo the replacements in `triton.language`."""


def skip_repeated_work() -> None:
    """Halve the time of interpreted kernels; results are unchanged.

    Each call of a device function searches `triton.language` for functions to replace, each operation builds a table of
    types, and each integer operation is repeated in 64 bits for an assertion that is off unless debugging. A Triton
    release without one of these parts runs as it is.
    """
    for name, wrap in (("_patch_lang", patch_once), ("_get_np_dtype", types_once)):
        if hasattr(interpreter, name):
            setattr(interpreter, name, wrap(getattr(interpreter, name)))
    if not interpreter.interpreter_builder.options.debug:
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def patch_once(patch: Any) -> Any:
    """`_patch_lang` that searches once for each set of language modules that a function refers to."""
    done: set[tuple[bool, ...]] = set()

    def patched(fn: FunctionType) -> SimpleNamespace:
        values = fn.__globals__.values()
        visible = tuple(any(value is module for value in values) for module in (tl, tl.core))
        if visible not in done:
            patch(fn)
            done.add(visible)
        return PATCHED

    return patched


def types_once(find: Any) -> Any:
    """`_get_np_dtype` that looks up each scalar type once."""
    cached: dict[str, Any] = {}

    def cached_type(ty: Any) -> Any:
        name = (ty.element_ty if ty.is_block() else ty).name
        if name not in cached:
            cached[name] = find(ty)
        return cached[name]

    return cached_type
