"""Steps that the differentiable functions over torch operators share: attention by pattern and attention by indices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.call import empty_rows
from .derivatives import check_reverse_mode


def kernel_inputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with contiguous rows; three different tensors while `torch.compile` traces."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if torch.compiler.is_compiling() and (value is key or value is query):
        # A traced autograd function takes each of its tensors once.
        value = value.view_as(value)
    if torch.compiler.is_compiling() and key is query:
        key = key.view_as(key)
    return query, key, value


def readable(*saved: Tensor) -> tuple[Tensor, ...]:
    """Saved query, key, value, output and LSE in layouts that kernels read.

    A saved-tensor hook keeps shapes and values, not strides: rows must be contiguous again, and the whole LSE.
    """
    *rows, lse = saved
    return *(x if x.stride(-1) == 1 else x.contiguous() for x in rows), lse.contiguous()


def readable_grad(output: Tensor, grad_output: Tensor | None) -> Tensor:
    """Gradient of the output with contiguous rows; zeros where only the LSE has one."""
    if grad_output is None:
        return torch.zeros_like(output)
    return grad_output if grad_output.stride(-1) == 1 else grad_output.contiguous()


def saved_for_backward(saved: Sequence[Tensor], *grads: Tensor | None) -> tuple[Any, ...] | None:
    """First arguments of a backward operator, from query, key, value, output and LSE; None without a gradient."""
    check_reverse_mode(*grads)
    grad_output, grad_lse = grads
    if grad_output is None and grad_lse is None:
        return None
    tensors = readable(*saved)
    return *tensors, readable_grad(tensors[3], grad_output), grad_lse


def empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE without values: the fake result of a forward operator."""
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return empty_rows(query, value.shape[-1]), query.new_empty(query.shape[:-1], dtype=lse_dtype)


def join_batch(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Tensor whose dimension mapped by `vmap` has joined the batch; one that is not mapped is repeated."""
    if tensor is None:
        return None
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1)


def one_by_one(
    call: Callable[..., tuple[Tensor, Tensor]], size: int, in_dims: Sequence[int | None], arguments: Sequence[Any]
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Results of a mapped call and their mapped dimensions; each entry is a call of its own."""
    mapped = zip(arguments, in_dims, strict=True)
    each = zip(*([x] * size if dim is None else x.unbind(dim) for x, dim in mapped), strict=True)
    output, lse = zip(*(call(*own) for own in each), strict=True)
    return (torch.stack(output), torch.stack(lse)), (0, 0)


def split_batch(results: Sequence[Tensor], size: int) -> tuple[Any, tuple[int, int]]:
    """Output and LSE of a joined batch as the result of a `vmap` rule."""
    return tuple(x.unflatten(0, (size, -1)) for x in results), (0, 0)


def with_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    """Store the signature of a function, to which autograd binds the arguments of every call."""
    # Finding it anew would take longer than all the rest.
    function.__signature__ = inspect.signature(function)  # pyrefly: ignore[missing-attribute]
    return function
