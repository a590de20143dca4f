"""Limits of differentiation: first order, reverse mode, tensors only. Everything beyond raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import must, must_be

ONCE = (
    "derivative for the backward of {} is not implemented (create_graph=True or a nested torch.func transform); "
    "second-order gradients need dense attention, for example torch.nn.functional.scaled_dot_product_attention "
    "under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)
Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(name: str) -> Callable[[Backward], Backward]:
    """Make a second derivative through the backward of `name` raise.

    `torch.autograd.function.once_differentiable` attaches its error only where a grad_output requires a gradient. A
    gradient penalty on a plain loss has none there: its gradients were returned as constants, and the penalty was lost.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def run(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            check_reverse_mode(*grads)
            with torch.no_grad():
                grads_in = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return grads_in
            # Saved inputs connect the error to them: `torch.autograd.grad` would otherwise find gradients of the
            # gradients unused. The leaf connects it for functions that save none.
            leaf = torch.zeros((), device="cpu", requires_grad=True)
            return OnceDifferentiable.apply(name, lambda *_: grads_in, *ctx.saved_tensors, *grads, leaf)

        return run

    return decorate


def check_reverse_mode(*tensors: Tensor | None) -> None:
    """Refuse dual tensors of forward-mode AD, whose tangents the kernels do not compute."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "forward-mode AD is not implemented for sparse attention, got a dual tensor; use reverse mode "
                "(torch.autograd.grad, torch.func.vjp), or torch.autograd.forward_ad.unpack_dual to drop the tangent"
            )


def scale_of(scale: float | None, width: int) -> float:
    """Factor on the scores: 1 / sqrt(width) unless given, refused where not finite or differentiated."""
    if scale is None:
        return width**-0.5
    if isinstance(scale, Tensor):
        check_reverse_mode(scale)
        if scale.requires_grad and torch.is_grad_enabled():
            raise must_be(
                "scale must be a number",
                "a tensor that requires a gradient, which would be lost",
                "Multiply the query by it and pass scale=1.0 to train it, or pass scale.item().",
            )
        scale = float(scale)
    if not isinstance(scale, int | float | torch.SymFloat | torch.SymInt):
        raise must_be("scale must be a number", repr(scale))
    if not -torch.inf < scale < torch.inf:
        raise must("scale must be finite", scale)
    return scale


class OnceDifferentiable(torch.autograd.Function):
    """A backward operator whose own derivative raises: `create_graph=True` and nested transforms.

    Arguments are the public name of the operation, the operator and the operator's arguments.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, operator: Callable[..., Any], *arguments: Any) -> tuple[Tensor | None, ...]:
        return operator(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        raise NotImplementedError(ONCE.format(ctx.name))
