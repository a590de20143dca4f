"""Patterns of Python functions: FlexAttention's `mask_mod`."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from inspect import isfunction, signature
from typing import Any

from ..errors import must_be
from .base import CONSTRUCTORS, Pattern, value_key


class MaskMod(Pattern):
    """Pattern of a function `mask_mod(b, h, q_idx, kv_idx)`, evaluated on broadcast int64 tensors.

    lambda b, h, q, k: (q + k) % 2 == 0:   0 1 2
                                         0 # . #
                                         1 . # .
                                         2 # . #
    """

    __slots__ = ("_key", "function")

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise must_be("mask_mod must be a function of (b, h, q_idx, kv_idx)", type(function).__name__)
        if isfunction(function):
            try:
                signature(function).bind(*"bhqk")
            except TypeError:
                came = f"{function.__name__}{signature(function)}"
                raise must_be("mask_mod must be a function of (b, h, q_idx, kv_idx)", came) from None
        self.function = function
        self._key = value_key(function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskMod) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        # The key holds code and weak references, and is computed anew from the function.
        return MaskMod, (self.function,)

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        like = next((x for x in (q, k, head) if hasattr(x, "new_tensor")), None)
        if like is None:
            return bool(self.function(_Batch(None), head, q, k))
        query, key, own = (x if hasattr(x, "new_tensor") else like.new_tensor(x) for x in (q, k, head))
        allowed = self.function(_Batch(query), own, query, key)
        kind = str(getattr(allowed, "dtype", type(allowed).__name__))
        if kind != "torch.bool":
            raise must_be(
                "mask_mod must return a bool tensor",
                kind,
                "For a score_mod see docs/extending.md, biases.",
            )
        return allowed

    def describe(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        # The same on every rank, unlike the address in the function's repr.
        code = self.function.__code__.co_code if isfunction(self.function) else name.encode()
        return f"mask_mod({name}@{sha256(code).hexdigest()[:8]})"


class _Batch:
    """Batch index of a `mask_mod` call: any use raises but making new tensors, as `and_masks` does."""

    def __init__(self, like: Any) -> None:
        if like is not None:
            self.new_ones, self.new_zeros, self.device = like.new_ones, like.new_zeros, like.device

    def _refuse(self, *arguments: Any) -> Any:
        raise must_be(
            "mask_mod must not depend on the batch index b",
            "a function that reads it",
            "A plan holds for every sample: pass key_padding_mask for padding, cu_seqlens for packed sequences, or "
            "call attention once for each sample.",
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls._refuse(None)  # type: ignore[arg-type]

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __index__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __rand__ = __or__ = __ror__ = __bool__ = __getitem__ = _refuse
    __eq__ = __ne__ = __neg__ = __int__ = __float__ = _refuse
    __hash__ = None  # type: ignore[assignment]


CONSTRUCTORS["mask_mod"] = MaskMod
