"""Parameters that are alike in one piece of memory: as one tensor, without gathering them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


@torch.no_grad()
def lay_together(kinds: list[list[Tensor]]) -> None:
    """Let parameters of one kind share a piece of memory, where each has its own and nobody else can mean that."""
    for alike in kinds:
        first = alike[0]
        differ = len({(type(x), x.shape, x.dtype, x.device) for x in alike}) > 1
        if len(alike) == 1 or differ or type(first) is not nn.Parameter:
            continue
        # Views of what others hold together, and memory of several processes, stay where they are.
        if not first.is_meta and all(_alone(x) for x in alike):
            for one, part in zip(alike, torch.stack(alike).unbind(), strict=True):
                one.data = part


def _alone(x: Tensor) -> bool:
    owned = x.untyped_storage().nbytes() == x.nbytes and not x.is_inference()
    return owned and (x.is_cuda or not x.is_shared())


_found: WeakKeyDictionary[nn.Module, tuple[torch.dtype, list[int], list[Tensor]]] = WeakKeyDictionary()
"""By whose they are, and as what: where parameters lie and how many numbers each has; and what `stacked` gave."""


def stacked(owner: nn.Module, kinds: list[list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Parameters of one shape as one tensor: the memory they lie in, where they do so evenly, or else a copy."""
    every = [one for alike in kinds for one in alike]
    # Gradients, and what is recorded, must find their way to each; and not every kind of tensor has an address.
    recorded = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing()
    if recorded or {*map(type, every)} != {nn.Parameter} or not all(map(Tensor.is_contiguous, every)):
        return [torch.stack(alike).to(dtype) for alike in kinds]
    places = [*map(Tensor.data_ptr, every), *map(Tensor.numel, every)]
    known = _found.get(owner)
    if known is not None and known[0] is dtype and known[1] == places:
        return known[2]
    found = [_evenly(alike).to(dtype) for alike in kinds]
    if all(one.data_ptr() == alike[0].data_ptr() for one, alike in zip(found, kinds, strict=True)):
        # Memory that is held here is given to nobody else, so that what lies there is still the same.
        _found[owner] = dtype, places, found
    return found


def _evenly(alike: list[Tensor]) -> Tensor:
    """The memory that parameters lie in as one tensor, if they do so evenly, or else a copy."""
    first = alike[0]
    if len(alike) == 1:
        return first[None]
    places = [*map(Tensor.data_ptr, alike)]
    step, memory = places[1] - places[0], first.untyped_storage()
    evenly = step > 0 and places == [*range(places[0], places[0] + step * len(alike), step)]
    within = places[-1] + first.nbytes <= memory.data_ptr() + memory.nbytes()
    if not evenly or not within:
        return torch.stack(alike)
    return first.as_strided((len(alike), *first.shape), (step // first.element_size(), *first.stride()))


def parameters(layers: Sequence[nn.Module], name: str) -> list[Any]:
    """That of each layer, where it can be without a module's way of looking up names: there are dozens in a call."""
    try:
        return [layer._parameters[name] for layer in layers]
    except KeyError:
        return [getattr(layer, name) for layer in layers]
