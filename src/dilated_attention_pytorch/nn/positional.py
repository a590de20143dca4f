"""Position encodings of queries and keys: rotary, XPOS, ALiBi.

Each is a frozen value with `apply(query, key, positions, scale)` over (B, H, N, D) and (B, G, N, D), where `scale` is
the factor on the scores. Positions are int64 (B or 1, N), so that a cache, a packed batch or a batch of different
lengths passes offsets of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import must, must_be
from ..ops.checks import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position encoding of queries and keys."""

    needs_causal = False
    """Whether the scores are valid only for keys up to the query."""
    by_head = False
    """Whether positions depend on the number of the head in the whole module."""

    def check(self, head_dim: int) -> None:
        """Raise if the head width is not supported."""

    def apply(self, query: Tensor, key: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Encode positions into queries and keys, so that their products depend on the distance."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary(Position):
    """RoPE: the two halves of a head are rotated by angles proportional to the position."""

    base: float = 10000.0
    """The slowest pair turns once in about 2 pi x base tokens."""

    def check(self, head_dim: int) -> None:
        if head_dim % 2:
            raise must("rotary positions must have an even head width", head_dim)

    def apply(self, query: Tensor, key: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        cos, sin = self.turns(positions, query.shape[-1])
        return _turn(query, cos, sin), _turn(key, cos, sin)

    def turns(self, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every angle, (B or 1, 1, N, D / 2); in float64, for angles reach a billion turns."""
        half = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
        angle = positions[:, None, :, None] * self.base ** (-half / head_dim)
        return angle.cos(), angle.sin()


@dataclass(frozen=True, slots=True, kw_only=True)
class Xpos(Rotary):
    """Rotary positions whose scores also decay with distance; causal attention only."""

    scale_base: float = 512.0
    """Tokens over which a pair fades by its own rate."""
    center: int = 0
    """Position at which nothing is scaled; half of the longest length keeps the numbers smallest."""

    needs_causal = True

    def apply(self, query: Tensor, key: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        head_dim = query.shape[-1]
        cos, sin = self.turns(positions, head_dim)
        half = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
        fade = ((half + 0.4 * head_dim) / (1.4 * head_dim)).log()
        power = (positions - self.center)[:, None, :, None] / self.scale_base * fade
        power = self._in_range(power, query.dtype)
        grown, faded = power.exp(), (-power).exp()
        return _turn(query, cos * grown, sin * grown), _turn(key, cos * faded, sin * faded)

    def _in_range(self, power: Tensor, dtype: torch.dtype) -> Tensor:
        # Half of the exponent's range is left to the query and key themselves.
        limit = math.log(torch.finfo(dtype).max) / 2
        return require(
            power,
            (power.abs() <= limit).all(),
            f"XPOS must stay within exp(+-{limit:.0f}) in {dtype}",
            lambda: f"exp(+-{float(power.abs().max()):.0f})",
            "Set center to half of the longest length, or raise scale_base.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alibi(Position):
    """ALiBi: scores fall by `slope x distance`, with slopes 2^(-8 (h + 1) / H); causal only.

    The bias is `COLUMNS` more columns of query and key, whose products sum to `slope x (key - query)`. Positions are
    cut into three bytes, and a column with the key's byte is followed by one with the query's: every product is exact
    in the dtype of the scores, and a pair cancels before the next one is added. The columns come first, so that the sum
    is as large as the distance, not as the position, when the content is added.
    """

    needs_causal = True
    by_head = True

    def apply(self, query: Tensor, key: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        below = (positions < 1 << 24).all()
        positions = require(positions, below, "ALiBi positions must be below 2^24", lambda: int(positions.max()))
        (batch, heads, n, _), dtype = query.shape, query.dtype
        head = torch.arange(1, heads + 1, device=query.device, dtype=torch.float64)
        slope = (2.0 ** (-8.0 * head / heads) / scale)[None, :, None]
        own: list[Tensor] = []
        seen: list[Tensor] = []
        for weight in _exact_parts(slope, dtype):
            for shift in (16, 8, 0):
                byte, size = (positions >> shift & 255)[:, None], float(1 << shift)
                # float16 ends at 65504: factors are split over both sides.
                own.append((weight * (size / min(size, 256.0))).to(dtype))
                seen.append((byte * min(size, 256.0)).to(dtype))
                # Against the same number in every key. In half precision the product of two bytes takes two columns.
                most = min(size, 32768.0)
                product = weight * (size / most) * byte
                for column in _exact_parts(product, dtype, 2) if dtype.itemsize == 2 else (product,):
                    own.append(-column.to(dtype))
                    seen.append(torch.full((1, 1, 1), most, dtype=dtype, device=key.device))
        widths = (0, COLUMNS - len(own))
        left, right = (
            F.pad(torch.stack([column.expand(batch, many, n) for column in columns], -1), widths)
            for columns, many in ((own, heads), (seen, key.shape[1]))
        )
        return torch.cat([left, query], -1), torch.cat([right, key], -1)


COLUMNS = 16
"""Columns of ALiBi: a step of a tensor core, which adds the products of a step to each other first."""


def _exact_parts(x: Tensor, dtype: torch.dtype, parts: int | None = None) -> tuple[Tensor, ...]:
    """Split float64 numbers into addends of few enough bits that their products with a byte are exact in a score.

    In half precision a slope is one part, rounded; in float32 and float64 it is two, of 12 and 26 bits.
    """
    if dtype.itemsize == 2:
        terms = []
        for _ in range(parts or 1):
            terms.append(x.to(dtype).double())
            x = x - terms[-1]
        return tuple(terms)
    lost = 29 if dtype == torch.float64 else 41
    first = (x.view(torch.int64) >> lost << lost).view(torch.float64)
    return first, x - first


KINDS = {"rotary": Rotary, "rope": Rotary, "xpos": Xpos, "alibi": Alibi}


def position_of(value: Position | str | None) -> Position | None:
    """A position from its name, or itself."""
    if value is None or isinstance(value, Position):
        return value
    if not isinstance(value, str):
        raise must_be("position must be a Position, a name or None", type(value).__name__)
    if value not in KINDS:
        raise must(f"position must be one of {', '.join(KINDS)}", repr(value))
    return KINDS[value]()


def _turn(tensor: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = tensor.chunk(2, -1)
    work = torch.promote_types(tensor.dtype, torch.float32)
    cos, sin = cos.to(work), sin.to(work)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(tensor.dtype)
