"""Neighbourhoods on a grid: images, video and slides as sequences of tokens in row-major order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from ..errors import must
from .base import Pattern, flag, integer, integers


@dataclass(frozen=True, slots=True, repr=False)
class Grid(Pattern):
    """Neighbourhood attention: each token of a grid attends to a window around itself, `window` tokens on each axis.

    Tokens are numbered in row-major order. At a border the window is shifted to stay inside the grid, as in NATTEN,
    so every query has the same number of keys. With `dilation` r on an axis, neighbours are r apart. On an axis with
    `causal`, a token attends to itself and the `window` - 1 neighbours before it, fewer at the beginning. `prefix`
    tokens before the grid (class tokens, registers) attend to every token, and every token to them. A single number
    applies to all axes.

    Grid((1, 5), (1, 3)):   0 1 2 3 4
                          0 # # # . .
                          1 # # # . .
                          2 . # # # .
                          3 . . # # #
                          4 . . # # #
    """

    shape: tuple[int, ...]
    window: tuple[int, ...] | int
    dilation: tuple[int, ...] | int = 1
    causal: tuple[bool, ...] | bool = False
    prefix: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", integers("grid shape", self.shape, 1))
        for name, kind in (("window", "grid window"), ("dilation", "grid dilation")):
            object.__setattr__(self, name, integers(kind, self._by_axis(kind, getattr(self, name)), 1))
        causal = tuple(flag("causal", value) for value in self._by_axis("grid causal", self.causal))
        object.__setattr__(self, "causal", causal)
        object.__setattr__(self, "prefix", integer("prefix", self.prefix, 0))
        for axis, (size, window, rate) in enumerate(zip(self.shape, self.windows, self.dilations, strict=True)):
            if window * rate > size:
                raise must(
                    f"window times dilation must fit the grid's {size} tokens on axis {axis}",
                    f"{window} times {rate}",
                )

    def _by_axis(self, what: str, value: Any) -> Sequence[Any]:
        values = tuple(value) if isinstance(value, Sequence) else (value,) * len(self.shape)
        if len(values) != len(self.shape):
            raise must(f"{what} must have one value for each of {len(self.shape)} axes", values)
        return values

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of each axis."""
        return self.window  # type: ignore[return-value]

    @property
    def dilations(self) -> tuple[int, ...]:
        """Dilation of each axis."""
        return self.dilation  # type: ignore[return-value]

    @property
    def causal_axes(self) -> tuple[bool, ...]:
        """Whether each axis is causal."""
        return self.causal  # type: ignore[return-value]

    @property
    def strides(self) -> tuple[int, ...]:
        """Tokens from one coordinate of an axis to the next."""
        return tuple(accumulate(reversed(self.shape[1:]), mul, initial=1))[::-1]

    def resolve(self, n: int, heads: int) -> Pattern:
        tokens = self.prefix + prod(self.shape)
        if tokens != n:
            shape = "x".join(map(str, self.shape))
            advice = "Tokens before the grid, such as a class token, are given by prefix=." if n > tokens else None
            raise must(
                f"a sequence for the grid {shape} with prefix {self.prefix} must have {tokens} tokens", n, advice
            )
        return self

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        near: Any = (q >= 0) & (k >= 0)
        for axis, (stride, size) in enumerate(zip(self.strides, self.shape, strict=True)):
            # Axis 0 needs no remainder; positions past the sequence are undefined.
            of_query, of_key = (q - self.prefix) // stride, (k - self.prefix) // stride
            near = near & self.near(axis, *((of_query % size, of_key % size) if axis else (of_query, of_key)))
        return near | (q < self.prefix) | (k < self.prefix) if self.prefix else near

    def near(self, axis: int, q: Any, k: Any) -> Any:
        """Whether coordinate `k` of an axis lies in the window of coordinate `q`."""
        window, rate = self.windows[axis], self.dilations[axis]
        aligned = (q - k) % rate == 0
        if self.causal_axes[axis]:
            return aligned & (k <= q) & (k > q - window * rate)
        # Positions and length inside the residue class, where the window is contiguous.
        own, other = q // rate, k // rate
        length = (self.shape[axis] - q % rate + rate - 1) // rate
        before, after = window // 2, window - 1 - window // 2
        from_start = (other >= own - before) | (other >= length - window)
        return aligned & from_start & ((other <= own + after) | (other < window))

    def describe(self) -> str:
        text = "grid:" + "x".join(map(str, self.shape)) + ";window=" + "x".join(map(str, self.windows))
        for name, values in (("dilation", self.dilations), ("causal", self.causal_axes)):
            if any(value != (name == "dilation") for value in values):
                text += f";{name}=" + "x".join(str(int(value)) for value in values)
        return text + (f";prefix={self.prefix}" if self.prefix else "")
