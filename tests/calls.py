"""Random calls of the one operation, and how far each element of what it gives may lie from the dense oracle."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from oracle import Answer, answer, multiplicities
from strategies import BLOCKS, LAYOUTS, LEAVES, Draw, Seeded, draw_problem, laid_out
from torch import Tensor

from dilated_attention_pytorch import BackendUnsupported, attention_with_lse, make_plan, parse
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.dropout import fresh_seed, keep_mask
from dilated_attention_pytorch.kernels.registry import choose
from dilated_attention_pytorch.ops.attention import CallSettings, call_of
from dilated_attention_pytorch.ops.memory_budget import memory

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHARED = ("", "one tensor", "value is key", "packed", "one token apart")
"""Ways in which query, key and value share one storage."""
TIGHT = "tight"
"""A memory budget: the least that both passes can do with."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """All that a call depends on. Its repr makes it again."""

    pattern: str
    n: int
    heads: int
    key_heads: int
    batch: int
    d: int
    e: int
    dtype: torch.dtype
    seed: int
    layouts: tuple[str, ...] = LAYOUTS[:1] * 4
    """of query, key, value and the output's gradient"""
    shared: str = ""
    """how query, key and value share one storage, see `SHARED`; its layout is that of the query"""
    default_device: str | None = None
    """context of `torch.device` in which the call and its backward run"""
    padded: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    memory_budget: int | str | None = None
    lse_grad: bool = False
    softcap: float = 0.0

    def told(self, backend: str, device: str = "cpu") -> str:
        """A command that runs this call alone."""
        command = f"from calls import *; print({self!r}.shares({backend!r}, {device!r}))"
        return f'PYTHONPATH=src:tests python -c "{command}"'

    def shares(self, backend: str, device: str = "cpu") -> dict[str, float]:
        """Run it and compare: of output, LSE and gradients, the largest error over what rounding explains there."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [(self.heads, self.d), (self.key_heads, self.d), (self.key_heads, self.e), (self.heads, self.e)]
        shapes = [(self.batch, heads, self.n, width) for heads, width in sizes]
        rows = [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]
        *leaves, grad = (laid_out(x.to(device), how) for x, how in zip(rows, self.layouts, strict=True))
        leaves = [x.detach().requires_grad_() for x in self.in_one_storage(leaves, generator)]
        # Expanded views and shared storage hold other numbers than were drawn.
        rows = [x.detach().cpu().clone(memory_format=torch.contiguous_format) for x in (*leaves, grad)]
        padding = torch.rand(self.batch, self.n, generator=generator) < 0.3 if self.padded else None
        grad_lse = torch.randn(shapes[0][:3], generator=generator, dtype=torch.float64) if self.lse_grad else None
        scale = self.d**-0.5 if self.scale is None else self.scale
        mask = None if padding is None else padding.to(device)
        torch.manual_seed(self.seed)
        seed = fresh_seed(torch.device(device)) if self.dropout_p else None
        plain = [x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in leaves]
        same = call_of(
            *plain,
            CallSettings(
                key_padding_mask=mask,
                seed=seed,
                pattern=self.pattern,
                scale=scale,
                dropout_p=self.dropout_p,
                backend=backend,
                softcap=self.softcap,
            ),
        )
        torch.manual_seed(self.seed)
        budget = least_budget(same, backend) if self.memory_budget == TIGHT else self.memory_budget
        with nullcontext() if self.default_device is None else torch.device(self.default_device):
            output, lse = attention_with_lse(
                *leaves,
                self.pattern,
                scale=self.scale,
                enable_gqa=True,
                key_padding_mask=mask,
                dropout_p=self.dropout_p,
                softcap=self.softcap or None,
                backend=backend,
                memory_budget=budget,
            )
            found, slopes = ((output,), (grad,)) if grad_lse is None else ((output, lse), (grad, grad_lse.to(lse)))
            gradients = torch.autograd.grad(found, leaves, slopes)
        for got, like in zip((output, *gradients), (leaves[0], *leaves), strict=True):
            assert got.dtype == like.dtype
        keep = None
        if seed is not None:
            stream = torch.arange(self.batch * self.heads).view(self.batch, self.heads, 1, 1)
            position = torch.arange(self.n)
            keep = keep_mask(seed.cpu(), stream, position[:, None], position, self.dropout_p)
        grad_lse = None if grad_lse is None else slopes[1].cpu()
        options = {"scale": scale, "key_padding_mask": padding, "kept": keep, "dropout_p": self.dropout_p}
        options["softcap"] = self.softcap or None
        pattern = parse(self.pattern)
        wanted = answer(*rows[:3], pattern, grad_output=rows[3], grad_lse=grad_lse, **options)
        bounds = rounding(rows, pattern, wanted, len(same.plan.parts), grad_lse, **options)
        return {
            name: share(got, want, bound)
            for name, got, want, bound in zip(Answer._fields, (output, lse, *gradients), wanted, bounds, strict=True)
        }

    def in_one_storage(self, three: list[Tensor], generator: torch.Generator) -> list[Tensor]:
        """Query, key and value, or views of one storage with their shapes."""
        query, width = three[0], max(self.d, self.e)
        if not self.shared:
            return three

        def storage(heads: int, n: int) -> Tensor:
            drawn = torch.randn(self.batch, heads, n, width, generator=generator, dtype=torch.float64)
            return laid_out(drawn.to(query), self.layouts[0])

        h, g, n, d, e = self.heads, self.key_heads, self.n, self.d, self.e
        match self.shared:
            case "one tensor":
                whole = storage(h, n)
                return [whole[..., :d], whole[:, :g, :, :d], whole[:, :g, :, :e]]
            case "value is key":
                whole = storage(g, n)
                return [query, whole[..., :d], whole[..., :e]]
            case "packed":
                whole = storage(h + 2 * g, n)
                return [whole[:, :h, :, :d], whole[:, h : h + g, :, :d], whole[:, h + g :, :, :e]]
            case "one token apart":
                whole = storage(h, n + 2)
                return [whole[:, :, 2:, :d], whole[:, :g, 1:-1, :d], whole[:, :g, :-2, :e]]
        raise ValueError(f"expected shared to be one of {SHARED}, got {self.shared!r}")


def least_budget(call: AttentionCall, backend: str) -> int:
    """The fewest bytes that both passes of a call can do with."""
    name, _ = choose(call, backend)
    return max(4096, *(min(memory(call, name, way).sizes.values()) for way in ("forward", "backward")))


@dataclass(frozen=True, kw_only=True)
class Menu:
    """What calls are drawn from; what stands twice comes twice as often."""

    longest: int = 100
    edges: Sequence[int] = ()
    """lengths to be had often"""
    heads: Sequence[int] = (1, 2, 4)
    groups: Sequence[int] = (1, 2, 4)
    """query heads to a key head, where they divide"""
    batches: Sequence[int] = (1, 2)
    d: Sequence[int] = (1, 8, 19)
    e: Sequence[int] | None = (1, 8, 24)
    """None: the same as d"""
    dtypes: Sequence[torch.dtype] = DTYPES
    layouts: Sequence[str] = LAYOUTS
    kinds: Sequence[str] = tuple(LEAVES)
    leaves: int = 4
    blocks: Sequence[int] = BLOCKS
    padded: Sequence[bool] = (False, True)
    scales: Sequence[float | None] = (None, 0.0, -0.3, 1.5)
    dropout: Sequence[float] = (0.0, 0.0, 0.4)
    budgets: Sequence[int | str | None] = (None, None, 2**30, TIGHT)
    lse_grad: Sequence[bool] = (False, True)
    shared: Sequence[str] = ("",)
    default_devices: Sequence[str | None] = (None,)
    softcaps: Sequence[float] = (0.0,)


def draw_call(draw: Draw, menu: Menu) -> Call:
    """Any call of the menu that the library plans."""
    while True:
        pattern, n, heads = draw_problem(
            draw, menu.longest, menu.heads, menu.edges, leaves=menu.leaves, kinds=menu.kinds, blocks=menu.blocks
        )
        try:
            make_plan(pattern, n, heads)
            break
        except ValueError as refusal:
            # Branches dealt out to fewer heads than there are branches: refused, as it should be.
            assert "must have a head for each" in str(refusal)
    d = draw.choice(menu.d)
    return Call(
        pattern=pattern.describe(),
        n=n,
        heads=heads,
        key_heads=heads // draw.choice([group for group in menu.groups if heads % group == 0]),
        batch=draw.choice(menu.batches),
        d=d,
        e=d if menu.e is None else draw.choice(menu.e),
        dtype=draw.choice(menu.dtypes),
        seed=draw.integer(0, 2**31),
        layouts=tuple(draw.choice(menu.layouts) for _ in range(4)),
        padded=draw.choice(menu.padded),
        scale=draw.choice(menu.scales),
        dropout_p=draw.choice(menu.dropout),
        memory_budget=draw.choice(menu.budgets),
        lse_grad=draw.choice(menu.lse_grad),
        shared=draw.choice(menu.shared),
        default_device=draw.choice(menu.default_devices),
        softcap=draw.choice(menu.softcaps),
    )


def failures(backend: str, menu: Menu, count: int, seed: str, device: str = "cpu") -> tuple[int, list[str]]:
    """Draw until a backend took `count` calls, or refused three of four: how many it took, and what was wrong with them.

    What is wrong with a call comes with a command that runs it alone.
    """
    ran, failed = 0, []
    for index in range(4 * count):
        if ran == count:
            break
        call = draw_call(Seeded(f"{seed} {index}"), menu)
        try:
            shares = call.shares(backend, device)
        except BackendUnsupported:
            continue
        except Exception as problem:
            wrong = repr(problem)[:500]
        else:
            wrong = ", ".join(f"{name} {size:.3g}" for name, size in shares.items() if size > 1)
        ran += 1
        if wrong:
            failed.append(f"{wrong} (seed {seed} {index})\n{call.told(backend, device)}")
    return ran, failed


def rounding(
    rows: list[Tensor],
    pattern: Any,
    wanted: Answer,
    parts: int,
    grad_lse: Tensor | None,
    *,
    scale: float,
    key_padding_mask: Tensor | None,
    kept: Tensor | None,
    dropout_p: float,
    softcap: float | None,
) -> Answer:
    """How far each element may lie from the exact one: sums of absolute values times the roundings along the way.

    Products and sums run in float32 or wider; weights, their gradients, and what each part of a plan gives are
    rounded to the dtype of the inputs. An element that nothing adds to must come out exact.
    """
    dtype = rows[0].dtype
    inputs, sums = torch.finfo(dtype), torch.finfo(torch.promote_types(dtype, torch.float32))
    unit, fine = inputs.eps / 2, sums.eps
    # Half precision has steps between its least normal number and 0; wider sums may go to 0 at once.
    least = 2 * max(inputs.smallest_normal * inputs.eps, sums.smallest_normal)
    query, key, value, grad = (x.double() for x in rows)
    heads, n = query.shape[1:3]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    counts = multiplicities(pattern, n, heads)
    if key_padding_mask is not None:
        counts = counts * ~key_padding_mask[:, None, None, :]
    seen = (counts > 0).double()
    survives = 1.0 if kept is None else kept / (1 - dropout_p)
    lse = wanted.lse[..., None].nan_to_num(neginf=0.0)
    scores = scale * query @ key.mT
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = counts * torch.where(seen > 0, scores - lse, 0.0).exp()
    largest = (abs(scale) * (query.abs() @ key.abs().mT) * seen).amax(-1, keepdim=True)
    exponent = 4 * fine * (4 + largest + lse.abs())
    weight_error = (2 * (unit + exponent) * weights + least * seen) * survives
    output_error = parts * (
        weight_error @ value.abs() + unit * wanted.output.abs() + least * seen.amax(-1, keepdim=True)
    )
    product, sizes = grad @ value.mT * survives, grad.abs() @ value.abs().mT * survives
    slope = 0.0 if grad_lse is None else grad_lse[..., None].double()
    delta = (grad * wanted.output).sum(-1, keepdim=True) - slope
    delta_error = (grad.abs() * (output_error + 16 * fine * wanted.output.abs())).sum(-1, keepdim=True)
    steps = 3 * (unit + exponent) * (product.abs() + delta.abs()) + 16 * fine * sizes + delta_error
    score_error = parts * abs(scale) * (weights * steps) + least * seen * (scale != 0)

    def summed(errors: Tensor, exact: Tensor | None) -> Tensor:
        assert exact is not None
        errors = errors.unflatten(1, (exact.shape[1], -1)).sum(2)
        return errors + unit * exact.abs() + least * (errors > 0)

    return Answer(
        output_error,
        2 * exponent[..., 0],
        summed(score_error @ key.abs(), wanted.query_grad),
        summed(score_error.mT @ query.abs(), wanted.key_grad),
        summed(parts * weight_error.mT @ grad.abs(), wanted.value_grad),
    )


def share(got: Tensor, wanted: Tensor, bound: Tensor) -> float:
    """The largest difference over its bound; infinite where nothing may differ, or inf and NaN do."""
    got = got.detach().double().cpu()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    return (
        torch.where(same, 0.0, (got - wanted).abs() / bound)
        .nan_to_num(nan=float("inf"), posinf=float("inf"))
        .max()
        .item()
    )
