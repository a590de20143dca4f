"""Where a token stands, told to queries and keys: rotary, XPOS, ALiBi.

Each is a frozen value with `apply(query, key, positions, scale)` over (B, H, N, D) and (B, G, N, D), where `scale` is
the factor on the scores. Positions are int64 (B or 1, N), so that a cache, a packed batch or a batch of different
lengths passes offsets of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import must, must_be


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How queries and keys learn their positions."""

    needs_causal = False
    """Whether the scores come out right only where no key comes after its query."""

    def check(self, head_dim: int) -> None:
        """Refuse a head width this cannot serve."""

    def apply(self, query: Tensor, key: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Queries and keys whose products tell how far apart they stand."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary(Position):
    """RoPE: the two halves of a head turn by angles that grow with the position."""

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
    """Rotary positions that also fade with distance; right only where no key comes after its query."""

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
        self._check_range(power, query.dtype)
        grown, faded = power.exp(), (-power).exp()
        return _turn(query, cos * grown, sin * grown), _turn(key, cos * faded, sin * faded)

    def _check_range(self, power: Tensor, dtype: torch.dtype) -> None:
        if torch.compiler.is_compiling() or power.is_meta:
            return
        # Half of the exponent's range is left to the query and key themselves.
        room = math.log(torch.finfo(dtype).max) / 2
        if power.abs().max() > room:
            raise must(
                f"XPOS must stay within exp(+-{room:.0f}) in {dtype}",
                f"exp(+-{float(power.abs().max()):.0f})",
                "Set center to half of the longest length, or raise scale_base.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alibi(Position):
    """ALiBi: scores fall by `slope x distance`, with slopes 2^(-8 (h + 1) / H); causal only.

    In a causal row `-slope x (t - u)` is `slope x u` and a constant, and a softmax does not see constants. So the bias
    is three more columns: the key's position in three bytes, each exact in every dtype, against the query's slope.
    """

    needs_causal = True

    def apply(self, query: Tensor, key: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        heads = query.shape[1]
        if not torch.compiler.is_compiling() and not positions.is_meta and int(positions.max()) >= 1 << 24:
            raise must("ALiBi positions must be below 2^24", int(positions.max()))
        slope = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=query.device) / heads) / scale
        # The highest byte's 65536 is split over both sides, for float16 holds no such number.
        weight = slope[:, None] * torch.tensor([256.0, 256.0, 1.0], device=query.device)
        digits = torch.stack([(positions >> 16) * 256, positions >> 8 & 255, positions & 255], -1)
        batch, _, n, _ = query.shape
        own = weight[None, :, None].expand(batch, heads, n, 3).to(query.dtype)
        seen = digits[:, None].expand(batch, key.shape[1], n, 3).to(key.dtype)
        return torch.cat([query, own], -1), torch.cat([key, seen], -1)


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
