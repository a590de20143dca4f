"""Cost of a plan: operations, memory traffic, peak memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Figures for one forward and one backward pass. Bytes moved count every tile as if no cache held it."""

    flops_forward: int
    flops_backward: int
    bytes_forward: int
    bytes_backward: int
    peak_forward: int
    """Queries, keys, values, output, LSE, the plan, and workspace."""
    peak_backward: int
    """The above with the gradients of all four and the row sums of the softmax's backward."""

    def __str__(self) -> str:
        def side(flops: int, traffic: int, peak: int) -> str:
            return f"{flops:.3g} flops, {traffic:.3g} bytes moved, {peak:.3g} bytes at peak"

        forward = side(self.flops_forward, self.bytes_forward, self.peak_forward)
        backward = side(self.flops_backward, self.bytes_backward, self.peak_backward)
        return f"forward {forward}; backward {backward}"


def cost_of(
    *,
    n: int,
    heads: int,
    key_heads: int,
    tiles: int,
    block_size: int,
    head_dim: int,
    value_dim: int,
    itemsize: int,
    batch: int,
    plan_bytes: int,
    several_parts: bool,
) -> Cost:
    """Arithmetic behind `Plan.cost`; `tiles` counts tile pairs of one batch element over all heads."""
    width = head_dim + value_dim
    forward = 2 * tiles * block_size**2 * width * batch
    # Backward recomputes the scores and multiplies four times more: dV, dP, dQ, dK.
    backward = 2 * tiles * block_size**2 * (3 * head_dim + 2 * value_dim) * batch
    rows = batch * heads * n
    inputs = itemsize * (rows * head_dim + batch * key_heads * n * width)
    output, lse = itemsize * rows * value_dim, max(4, itemsize) * rows
    # Several parts share their rows, whose running output stays in float32 until the last has been.
    running = 4 * rows * value_dim if several_parts and itemsize < 4 else 0
    streamed = itemsize * batch * tiles * block_size * width
    return Cost(
        flops_forward=forward,
        flops_backward=backward,
        bytes_forward=inputs // 2 + output + lse + streamed,
        bytes_backward=2 * (inputs + output + lse) + 2 * streamed,
        peak_forward=inputs + output + lse + running + plan_bytes,
        peak_backward=2 * (inputs + output) + 2 * lse + plan_bytes,
    )
