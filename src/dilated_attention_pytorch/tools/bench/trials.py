"""Trials of the benchmark besides plain calls: module classes, and the longest length that fits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import models
from ... import nn as modules
from ...errors import must
from ...kernels import reference
from ...kernels.call import AttentionCall
from ...kernels.registry import choose
from ...patterns import Causal, Full
from ...plan import Plan
from ...selection.types import Selection
from ..peak_memory import NATIVE, Shape, backend_name, peaks
from .cases import CLASSES, MODEL_LAYERS, MODELS, Group
from .measure import memory_of
from .results import DIRECTIONS

GATE_TOKENS = 1024
"""Length at which a class is compared with the same module on the reference backend in float64."""
REFERENCE = backend_name(reference)
SLACK = 4.0
"""Accepted error of a class relative to the reference backend in the same dtype; at most 2 was measured."""
PATIENCE_S = {"cpu": 12.0, "cuda": 4.0}
"""Time limit of a call in seconds; longer lengths are not tried."""
BISECTED = {"cpu": ("dilated", "block-sparse 1 %", "window"), "cuda": None}
"""Subjects of the search for the longest length; all if None."""


def build(name: str, n: int, heads: int, d: int, backend: str) -> nn.Module:
    """A class for `n` tokens: segments of a quarter at rate 1 and of all at rate 4, where it has segments."""
    ladder: dict[str, Any] = {"segment_lengths": [max(n // 4, 1), n], "dilation_rates": [1, 4]}
    if name == "BlockSparseHierarchical":
        ladder["segment_lengths"] = [max(n // 16, 128), n]
    elif name in ("SparseAttention", "MultiheadSparseAttention"):
        ladder = {}
    width = {"embed_dim": heads * d, "num_heads": heads} if "Multihead" in name or "Distributed" in name else {}
    match name:
        case "LongNetLM":
            size = {"d_model": heads * d, "nhead": heads, "num_decoder_layers": MODEL_LAYERS}
            module: nn.Module = models.LongNetLM("tiny", **size, **ladder)
        case "SlideEncoder":
            size = {"d_model": heads * d, "nhead": heads, "num_layers": MODEL_LAYERS, "tile_width": heads * d}
            module = models.SlideEncoder(**size, **ladder)
        case "BlockSparseAdaptive":
            module = modules.BlockSparseAdaptive(num_heads=heads, head_dim=d, **ladder)
        case _:
            module = getattr(modules, name)(**width, **ladder, **CLASSES[name])
    return run_on(module, backend)


def run_on(module: nn.Module, backend: str) -> nn.Module:
    """The module, with every attention in it on one backend."""
    for part in module.modules():
        if hasattr(part, "backend"):
            setattr(part, "backend", backend)  # noqa: B010
    return module


def is_multihead(module: nn.Module) -> bool:
    """Whether a module has projections over all heads."""
    return hasattr(module, "embed_dim")


def arguments(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Arguments of a module, from (1, heads, n, d) tensors."""
    query = inputs[0].detach()
    rows = query.transpose(1, 2).flatten(2)
    n = query.shape[2]
    if isinstance(module, models.LongNetLM):
        return (torch.randint(module.config.num_tokens, (1, n), device=query.device),)
    if isinstance(module, models.SlideEncoder):
        place = torch.arange(n, device=query.device)
        return rows, module.config.tile_size * torch.stack([place % 64, place // 64], -1)[None]
    if is_multihead(module):
        return (rows.requires_grad_(),)
    return tuple(x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs)


def leaves(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors to differentiate: parameters of a model, inputs of any other class."""
    return tuple(module.parameters()) if isinstance(module, MODEL_CLASSES) else given


MODEL_CLASSES = tuple(getattr(models, name) for name in MODELS)


def call(module: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    """The output of a module, without its other results."""
    return module(*given * 3)[0] if is_multihead(module) else module(*given)


def module_error(module: nn.Module, given: tuple[Tensor, ...]) -> float:
    """Largest error of output and gradients relative to the accepted error; at most 1 passes.

    Errors are measured against the same module in float64 on the reference backend. Accepted are `SLACK` times the
    errors of the reference backend in the dtype of the module. A module that chooses blocks by content would choose
    others in float64: both references compute dense attention on the blocks that the module chose.
    """
    was_training = module.training
    # In training mode, learned selection adds noise.
    module.eval()
    short = tuple(x.detach()[:, :GATE_TOKENS].clone().requires_grad_(x.requires_grad) for x in given)
    exact = tuple((x.detach().double() if x.is_floating_point() else x).requires_grad_(x.requires_grad) for x in short)
    twin, rounded = copy.deepcopy(module).double(), copy.deepcopy(module)
    core = learned_core(module)
    usual = None if core is None else core.config
    if core is None:
        run_on(twin, REFERENCE)
        run_on(rounded, REFERENCE)
    else:
        # With so few blocks, the blocks that every row keeps exhaust a budget of a tenth.
        core.config = replace(core.config, base_sparsity=0.5)
        chosen = partial(on_chosen_blocks, chosen_blocks(module, short))
        for part in (learned_core(twin), learned_core(rounded)):
            setattr(part, "forward", chosen)  # noqa: B010
    wanted = call(twin, exact)
    weight = torch.randn_like(wanted)
    expected = wanted, *torch.autograd.grad(wanted, leaves(twin, exact), weight)

    def errors(of: nn.Module) -> list[float]:
        output = call(of, short)
        found = output, *torch.autograd.grad(output, leaves(of, short), weight.to(output.dtype))
        pairs = zip(found, expected, strict=True)
        return [float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1.0)) for a, b in pairs]

    least = torch.finfo(next(x.dtype for x in (*short, *module.parameters()) if x.is_floating_point())).eps
    largest = max(a / (SLACK * max(b, least)) for a, b in zip(errors(module), errors(rounded), strict=True))
    if core is not None and usual is not None:
        core.config = usual
    module.train(was_training)
    return largest


def learned_core(module: nn.Module) -> modules.BlockSparseAdaptive | None:
    """Learned selection of a module, or None."""
    return next((part for part in module.modules() if isinstance(part, modules.BlockSparseAdaptive)), None)


@torch.no_grad()
def chosen_blocks(module: nn.Module, given: tuple[Tensor, ...]) -> Selection:
    """Blocks that a learned module selects without exploration."""
    core = learned_core(module)
    assert core is not None
    if isinstance(module, modules.MultiheadBlockSparseAdaptive):
        given = tuple(x.transpose(1, 2) for x in module.project(*given * 3))
    return core(*given, return_pattern=True)[1].selection


def on_chosen_blocks(
    selection: Selection, query: Tensor, key: Tensor, value: Tensor, *flags: bool, **masks: Tensor | None
) -> Tensor:
    """Dense attention over (B, N, H, D) on given blocks, with the interface of a learned core."""
    if any(flags) or any(mask is not None for mask in masks.values()):
        raise must("selected blocks must be attended to with the arguments of their selection", "a flag or a mask")
    allowed = selection.allowed()
    for axis in (3,) if selection.per_token else (2, 3):
        allowed = allowed.repeat_interleave(selection.block_size, axis).narrow(axis, 0, selection.n)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


class ClassWork(NamedTuple):
    """Work of a class at a length."""

    pattern: str
    density: float
    flops: float
    """of a forward pass, with projections and without the scorer"""
    backend: str


def work_of(module: nn.Module, group: Group, backend: str, inputs: tuple[Tensor, Tensor, Tensor]) -> ClassWork:
    """Work of a class that has been called at this length."""
    core = learned_core(module)
    plan, text = _plan_of(module, group)
    density = plan.density if core is None else core.statistics()["density"]
    if isinstance(module, MODEL_CLASSES):
        flops = float(module.config.flops(group.n))
    else:
        attended = plan.flops(group.d) if core is None else 4.0 * density * group.heads * group.n**2 * group.d
        # Four projections of all heads together.
        flops = attended + (8.0 * group.n * (group.heads * group.d) ** 2 if is_multihead(module) else 0.0)
    taken = choose(AttentionCall(*inputs, plan, group.d**-0.5), backend)[0]
    return ClassWork(text, density, flops, taken)


def _plan_of(module: nn.Module, group: Group) -> tuple[Plan, str]:
    if learned_core(module) is not None:
        return modules.SparseAttention(Full()).plan(group.n, group.heads), "learned"
    attention: Any = next(part for part in module.modules() if hasattr(part, "pattern"))
    causal = isinstance(module, models.LongNetLM)
    pattern = attention.pattern & Causal() if causal else attention.pattern
    return attention.plan(group.n, group.heads, causal), pattern.describe()


def why_too_large(group: Group, limit: int) -> str | None:
    """Reason to skip a group: its forecast exceeds the memory limit."""
    shape = Shape(n=group.n, heads=group.heads, key_heads=group.key_heads, d=group.d, dtype=getattr(torch, group.dtype))
    # The peers are measured in turns with it and need the same memory again.
    wanted = peaks(shape, 0)[1] * (2 if group.peers else 1)
    if wanted > limit:
        return f"{group.label} takes about {wanted / 2**30:.1f} GiB of {limit / 2**30:.1f} GiB"
    return None


def longest_lengths(device: str, limit: int, known: set[str]) -> Iterator[dict[str, Any]]:
    """Longest resident lengths of the subjects without a result, by bisection.

    On a CPU no length is tried that is forecast not to fit, and none counts that took more than the limit.
    """
    from . import extreme

    subjects = extreme.subjects()
    listed = [subjects[name] for name in BISECTED[device] or subjects if name not in known]
    if device == "cuda":
        yield from extreme.measure(device, listed, DIRECTIONS, 2**18, PATIENCE_S[device])
        return
    for subject in listed:
        attempt = within(extreme.attempt_of(subject, "forward", device), limit, extreme.HEADS, extreme.WIDTH)
        found = extreme.longest(attempt, 2**16, extreme.UNIT, subject.power, PATIENCE_S[device])
        yield extreme.line_of(subject.name, "forward", limit / 2**30, device, **found.fields())


def within(attempt: Callable[[int], Any], limit: int, heads: int, d: int) -> Callable[[int], Any]:
    """`attempt`, out of memory if its forecast or use exceeds the limit; a CPU process would be killed."""

    def guarded(n: int) -> Any:
        shape = Shape(n=n, heads=heads, key_heads=heads, d=d, dtype=torch.float32, backend=NATIVE)
        found = attempt(n) if peaks(shape, 0)[0] <= limit else None
        if found is None or (found.peak_bytes or 0) > limit:
            raise torch.OutOfMemoryError(f"{n} tokens take more than {limit} bytes")
        return found

    return guarded


def memory_limit(device: str, asked_gib: float | None) -> int:
    """Memory limit of a suite in bytes: as given, or four fifths of the free memory."""
    return int(asked_gib * 2**30) if asked_gib else int(0.8 * memory_of(device)[0])
