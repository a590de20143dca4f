"""Parameters that are alike in one piece of memory: as one tensor, without gathering them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def lay_together(layers: list[list[list[Tensor]]]) -> None:
    """Let parameters of one kind share a piece of memory, where each has its own and nobody else can mean that."""
    for alike in (alike for layer in layers for alike in layer):
        first = alike[0]
        kinds = {(type(x), x.shape, x.dtype, x.device) for x in alike}
        if len(alike) == 1 or len(kinds) > 1 or type(first) is not nn.Parameter:
            continue
        # Views of what others hold together, and memory of several processes, stay where they are.
        if not first.is_meta and all(_alone(x) for x in alike):
            for one, part in zip(alike, torch.stack(alike).unbind(), strict=True):
                one.data = part


def _alone(x: Tensor) -> bool:
    owned = x.untyped_storage().nbytes() == x.nbytes and not x.is_inference()
    return owned and (x.is_cuda or not x.is_shared())


def stacked(alike: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Parameters of one shape as one tensor: the memory they lie in, where they do so evenly, or else a copy."""
    first = alike[0]
    if len(alike) == 1:
        return first[None].to(dtype)
    # Gradients, and what is recorded, must find their way to each; and not every kind of tensor has an address.
    recorded = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing()
    if recorded or {*map(type, alike)} != {nn.Parameter}:
        return torch.stack(alike).to(dtype)
    places = [*map(Tensor.data_ptr, alike)]
    step, memory = places[1] - places[0], first.untyped_storage()
    evenly = step > 0 and places == [*range(places[0], places[0] + step * len(alike), step)]
    within = places[-1] + first.nbytes <= memory.data_ptr() + memory.nbytes()
    if not evenly or not within or not all(map(Tensor.is_contiguous, alike)):
        return torch.stack(alike).to(dtype)
    found = first.as_strided((len(alike), *first.shape), (step // first.element_size(), *first.stride()))
    return found if first.dtype is dtype else found.to(dtype)


def parameters(layers: Sequence[nn.Module], name: str) -> list[Any]:
    """That of each layer, where it can be without a module's way of looking up names: there are dozens in a call."""
    try:
        return [layer._parameters[name] for layer in layers]
    except KeyError:
        return [getattr(layer, name) for layer in layers]
