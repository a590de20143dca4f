"""What the benchmark runs besides a plain call: classes of the library, virtual ranks, the longest length that fits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import nn as modules
from .. import parse
from ..distributed import SequenceLayout, traffic, virtual_attention
from .measure import facts, memory_of
from .memory import Shape, peaks
from .suites import CLASSES, Case, Group

GATE_TOKENS = 1024
"""Length at which a class is compared with its twin on the reference backend in float64."""
PATIENCE_S = {"cpu": 20.0, "cuda": 4.0}
"""A length is not tried when a call would take longer."""


def build(name: str, n: int, heads: int, d: int, backend: str) -> nn.Module:
    """A class for `n` tokens: segments of a quarter at rate 1 and of all at rate 4."""
    ladder = {"segment_lengths": [max(n // 4, 1), n], "dilation_rates": [1, 4]}
    if name == "BlockSparseHierarchical":
        ladder = {"segment_lengths": [max(n // 16, 128), n], "dilation_rates": [1, 4]}
    width = {"embed_dim": heads * d, "num_heads": heads} if "Multihead" in name or "Distributed" in name else {}
    return getattr(modules, name)(**width, **ladder, **CLASSES[name], backend=backend)


def is_multihead(module: nn.Module) -> bool:
    """Whether it projects rows of all heads together."""
    return hasattr(module, "embed_dim")


def arguments(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """What a module is called with, from (1, heads, n, d) tensors: a leaf for each gradient asked for."""
    query = inputs[0]
    if is_multihead(module):
        return (query.detach().transpose(1, 2).flatten(2).requires_grad_(),)
    return tuple(x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs)


def call(module: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    """The output, whatever else the module returns."""
    return module(*given * 3)[0] if is_multihead(module) else module(*given)


def module_error(module: nn.Module, given: tuple[Tensor, ...]) -> float:
    """Largest error of output and input gradients against the same module in float64 on the reference backend."""
    short = tuple(x.detach()[:, :GATE_TOKENS].clone().requires_grad_() for x in given)
    exact = tuple(x.detach().double().requires_grad_() for x in short)
    twin: Any = copy.deepcopy(module).double()
    twin.backend = "reference"
    found, wanted = call(module, short), call(twin, exact)
    weight = torch.randn_like(wanted)
    pairs = [(found, wanted)]
    gradients = (torch.autograd.grad(y, x, weight.to(y.dtype)) for y, x in ((found, short), (wanted, exact)))
    pairs += zip(*gradients, strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1.0)) for a, b in pairs)


def projection_flops(module: nn.Module, n: int, heads: int, d: int) -> float:
    """Operations of a forward's four projections, where the module has them."""
    return 8.0 * n * (heads * d) ** 2 if is_multihead(module) else 0.0


def over_ranks(case: Case, group: Group, inputs: tuple[Tensor, Tensor, Tensor], backend: str) -> Callable[[], Any]:
    """All ranks one after another; the time is what one device takes for the work of all."""
    layout = SequenceLayout.contiguous(group.n, case.ranks)
    return lambda: virtual_attention(*inputs, parse(case.pattern), layout, backend=backend)


def rank_facts(case: Case, group: Group) -> dict[str, Any]:
    """What the ranks exchange in a forward, beside what a ring would move."""
    layout = SequenceLayout.contiguous(group.n, case.ranks)
    row_bytes = 2 * group.d * getattr(torch, group.dtype).itemsize
    moved = traffic(case.pattern, layout, group.heads, group.key_heads, row_bytes=row_bytes)
    most = max(moved, key=lambda rank: rank.bytes_received)
    return {"ranks": case.ranks, "received_bytes": most.bytes_received, "ring_bytes": most.ring_bytes}


def why_too_large(group: Group, limit: int) -> str | None:
    """Why a group is not begun: its forecast exceeds the memory it may take."""
    shape = Shape(n=group.n, heads=group.heads, key_heads=group.key_heads, d=group.d, dtype=getattr(torch, group.dtype))
    # The peers are measured beside it and hold as much again.
    wanted = peaks(shape, 0)[1] * (2 if group.peers else 1)
    if wanted > limit:
        return f"{group.label} takes about {wanted / 2**30:.1f} GiB of {limit / 2**30:.1f} GiB"
    return None


def longest_lengths(device: str, limit: int, patience: float) -> Iterator[dict[str, Any]]:
    """The longest resident lengths, found by bisection. On a CPU no length is tried that is forecast not to fit."""
    from . import extreme

    if device == "cuda":
        yield from extreme.measure(device, list(extreme.subjects()), ["forward", "backward"], None, 2**18, patience)
        return
    for name in ("dilated", "block-sparse 1 %"):
        subject = extreme.subjects()[name]
        line = {"case": "extreme", "subject": name, "direction": "forward", "cap_gib": limit / 2**30}
        attempt = within(extreme.attempt_of(subject, "forward", device), limit, extreme.HEADS, extreme.WIDTH)
        found = extreme.longest(attempt, 2**16, extreme.UNIT, subject.power, patience)
        line |= {"limited_by": found.limited_by, "tried": found.tried}
        line |= {} if found.attempt is None else found.attempt._asdict()
        yield {**line, "heads": extreme.HEADS, "head_dim": extreme.WIDTH, **facts(device)}


def within(attempt: Callable[[int], Any], limit: int, heads: int, d: int) -> Callable[[int], Any]:
    """`attempt`, refused as out of memory where the forecast exceeds the limit: a CPU would be killed instead."""

    def guarded(n: int) -> Any:
        shape = Shape(n=n, heads=heads, key_heads=heads, d=d, dtype=torch.float32, backend="cpu")
        if peaks(shape, 0)[0] > limit:
            raise torch.OutOfMemoryError(f"{n} tokens are forecast to take more than {limit} bytes")
        return attempt(n)

    return guarded


def memory_limit(device: str, asked_gib: float | None) -> int:
    """Bytes a suite may take: what was asked for, or four fifths of what is free."""
    return int(asked_gib * 2**30) if asked_gib else int(0.8 * memory_of(device)[0])
