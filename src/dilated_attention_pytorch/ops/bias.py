"""Biases by distance: tables that are added to scores, and the functions that make them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import must, must_be


def t5_bias(weight: Tensor, *, is_bidirectional: bool = True, max_distance: int = 128) -> Tensor:
    """Table for `bias=` of `attention` from the bucketed relative positions of T5; differentiable.

    Half of the buckets of a direction hold one distance each, the other half ranges that grow with the distance, up to
    `max_distance`; the last bucket applies to all larger distances.

    Args:
        weight: (buckets, H), as in T5's `relative_attention_bias.weight`.
        is_bidirectional: give half of the buckets to later keys, as T5's encoder does.
        max_distance: distance from which the last bucket applies.

    Returns:
        (H, 2 * max_distance + 1).

    >>> import torch
    >>> t5_bias(torch.randn(32, 8)).shape
    torch.Size([8, 257])
    """
    buckets = weight.shape[0] // 2 if is_bidirectional else weight.shape[0]
    exact = buckets // 2
    if not 1 <= exact < max_distance:
        raise must("T5 buckets must hold at least one and at most max_distance exact distances", f"{exact} of them")
    distance = torch.arange(-max_distance, max_distance + 1, device=weight.device)
    ahead = distance.clamp(max=0).neg() if not is_bidirectional else distance.abs()
    # In float32, as T5 computes it: where a range begins depends on the last bit.
    large = (ahead.float() / exact).log() / math.log(max_distance / exact) * (buckets - exact)
    bucket = torch.where(ahead < exact, ahead, (exact + large.clamp(min=0).long()).clamp(max=buckets - 1))
    if is_bidirectional:
        bucket = bucket + buckets * (distance > 0)
    return weight[bucket].t()


def distance_bias(slopes: Tensor, *reach: int) -> Tensor:
    """Table for `bias=` of `attention` that is linear in the distance: `-slopes[h] * distance`; differentiable.

    With one reach it is ALiBi on both sides. With two, distances are Euclidean, of tiles of an image for instance.

    Args:
        slopes: (H,).
        reach: largest distance on each axis; the bias is constant beyond it.

    Returns:
        (H, 2 * reach + 1) for one axis, (H, 2 * rows + 1, 2 * columns + 1) for two.

    >>> import torch
    >>> distance_bias(torch.tensor([0.5]), 2)
    tensor([[-1.0000, -0.5000, -0.0000, -0.5000, -1.0000]])
    """
    if not isinstance(slopes, Tensor) or slopes.dim() != 1:
        raise must_be("slopes must be a Tensor of shape (heads,)", getattr(slopes, "shape", type(slopes).__name__))
    if len(reach) not in (1, 2) or min(reach) < 0:
        raise must("reach must be one or two numbers, each at least 0", reach)
    axes = [torch.arange(-far, far + 1, device=slopes.device, dtype=torch.float64).square() for far in reach]
    squares = axes[0] if len(axes) == 1 else axes[0][:, None] + axes[1]
    return -slopes.view(-1, *(1 for _ in reach)) * squares.sqrt().to(slopes.dtype)


def kernel_bias(
    query: Tensor, bias: Tensor | None, positions: Tensor | None, tokens: int | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Check a bias and its positions, and return them as kernels read them: see `AttentionCall`.

    With `tokens`, the query holds some rows of a sequence of that length, and positions are those of all its tokens.
    """
    if bias is None:
        if positions is not None:
            raise must("bias_positions must come with bias", "none", "See the argument bias of attention.")
        return None, None
    batch, heads, rows, _ = query.shape
    n = rows if tokens is None else tokens
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise must_be("bias must be a floating-point Tensor", getattr(bias, "dtype", type(bias).__name__))
    if bias.dim() not in (2, 3) or bias.shape[0] != heads or any(width % 2 == 0 for width in bias.shape[1:]):
        raise must(
            f"bias must have shape ({heads}, 2 * R + 1) or ({heads}, 2 * R1 + 1, 2 * R2 + 1)",
            tuple(bias.shape),
            "The entry in the middle is that of distance 0; a bias by pair cannot be given.",
        )
    if bias.device != query.device:
        raise must(f"bias must be on the query's device {query.device}", bias.device)
    axes = bias.dim() - 1
    if positions is None:
        if axes > 1:
            raise must("a bias by two distances must come with bias_positions", "none", "Pass (N, 2) integers.")
    else:
        if not isinstance(positions, Tensor) or positions.dtype not in (torch.int32, torch.int64):
            raise must_be(
                "bias_positions must be int32 or int64", getattr(positions, "dtype", type(positions).__name__)
            )
        shapes = [(n, axes), *([(batch, n, axes)] if tokens is None else [])]
        if tuple(positions.shape) not in shapes:
            raise must(f"bias_positions must have shape {' or '.join(map(str, shapes))}", tuple(positions.shape))
        if positions.device != query.device:
            raise must(f"bias_positions must be on the query's device {query.device}", positions.device)
        positions = (positions if positions.dim() == 3 else positions[None]).long().contiguous()
    return bias.to(torch.promote_types(query.dtype, torch.float32)).contiguous(), positions


def positions_of(tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Positions of tokens in a bias, int64 (..., axes), from those of all tokens, (1, N, axes); tokens by default."""
    return tokens[..., None] if positions is None else positions[0][tokens]


def filler_lse(bias: Tensor | None) -> Tensor | float:
    """LSE for filler rows of a buffer, whose scores are entries of the bias: no weight exceeds 1."""
    return 0.0 if bias is None else bias.amax().clamp(min=0)
