"""Run named problems through the Triton kernels in Triton's interpreter and print the errors against the oracle.

A program of its own: Triton decides when it is imported whether to interpret, and the test session must not.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from calls import TIGHT, Call
from cases import BY_NAME, Problem
from kernels.interpreter import start_interpreting
from oracle import Answer, answer, bias_of_pairs, error, sink_gradient, table_gradient
from strategies import Seeded, draw_problem

from dilated_attention_pytorch import attention_with_lse, parse
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.cpu import tiles as cpu
from dilated_attention_pytorch.kernels.dropout import keep_mask
from dilated_attention_pytorch.kernels.sink import backward_with_sink
from dilated_attention_pytorch.kernels.triton import backend as triton_backend
from dilated_attention_pytorch.kernels.triton import launches as triton_launches
from dilated_attention_pytorch.kernels.triton import lowering as triton_lowering
from dilated_attention_pytorch.kernels.triton.primitives import tanh_and_slope
from dilated_attention_pytorch.plan import Plan, make_plan


class Trial(NamedTuple):
    problem: str | Problem
    dtype: torch.dtype = torch.float32
    block_size: int | None = None
    dropout_p: float = 0.0
    tokens_first: bool = False
    """(B, N, H, D) memory, with room between the rows"""
    far: bool = False
    """queries in a file with holes, more than 2^31 elements from first to last"""
    short_pieces: bool = False
    """split every row that can be split"""
    scale: float | None = None
    positions: bool = False
    """positions of rows in dropout, different for each head"""
    bad: tuple[str, int] | None = None
    """name of an input, and its token whose first half is NaN"""
    softcap: float = 0.0
    bias: tuple[int, ...] = ()
    """widths of a table by distance"""
    places: int = 0
    """samples with positions of their own for the bias; 0 for row numbers, -1 for positions by head and side"""
    masks: bool = False
    """entries of -inf for distances at and beyond the ends of the table"""
    sink: float | None = None
    """logit of the first head; other heads have random logits around 0"""


TRIALS = {
    "ragged end": Trial("full-ragged"),
    "causal window": Trial("window-causal"),
    "global rows and columns": Trial("global-window"),
    "dilated ladder": Trial("dilated-ladder-causal", block_size=32),
    "residues differ within a key head": Trial("dilated-block-offset", block_size=32),
    "heads that sit out a part": Trial("dilated-split-heads", block_size=32),
    "rows without a key": Trial("dilated-empty-rows"),
    "masks by bits": Trial("strided", block_size=32),
    "documents": Trial("documents", block_size=32),
    "a list a head": Trial("random-per-head-causal"),
    "grouped key heads": Trial("gqa"),
    "a pattern a head, one key head": Trial("one-pattern-a-head"),
    "values wider than keys": Trial("wide-value"),
    "padded keys": Trial("padded"),
    "nothing but padding": Trial("all-padded"),
    "one token": Trial("one-token"),
    "half precision": Trial("causal", dtype=torch.float16, block_size=32),
    "tiles smaller than a block": Trial("causal", block_size=128),
    "views with tokens first": Trial("window-causal", block_size=32, tokens_first=True),
    "dropout": Trial("gqa", block_size=32, dropout_p=0.3),
    "split rows": Trial("global-window", short_pieces=True),
    "negative scale": Trial("gqa", scale=-0.7),
    "no scale": Trial("gqa", scale=0.0),
    "dropout of rows elsewhere": Trial("gqa", block_size=32, dropout_p=0.3, positions=True),
    "bad value": Trial("window-causal", block_size=32, bad=("value", 20)),
    "bad value in a ladder": Trial("dilated-ladder-causal", block_size=32, bad=("value", 35)),
    "bad value of bits, half precision": Trial("global-window", dtype=torch.float16, bad=("value", 40)),
    "bad value of a split row": Trial("global-window", short_pieces=True, bad=("value", 40)),
    "bad key": Trial("window-causal", block_size=32, bad=("key", 20)),
    "bad query": Trial("gqa", block_size=32, bad=("query", 33)),
    "bad gradient": Trial("dilated-block-offset", block_size=32, bad=("grad_output", 33)),
    "bad padded key": Trial("padded", bad=("key", 40)),
    "split rows of a dilated ladder": Trial(
        Problem(name="", text="dilated:32x1,64x2,128x4", n=120), block_size=16, short_pieces=True
    ),
    "whole tiles in pieces, dilated": Trial(
        Problem(name="", text="dilated:256x2", n=256, heads=1, key_heads=1), block_size=128
    ),
    "rows far apart": Trial("full", far=True),
    "soft cap": Trial("causal", softcap=1.5),
    "wide soft cap": Trial("window-causal", softcap=50.0, scale=3.0),
    "tight soft cap, negative scale": Trial("gqa", softcap=0.25, scale=-0.7),
    "saturated soft cap": Trial("window-causal", softcap=0.5, scale=8.0),
    "soft cap without a scale": Trial("gqa", softcap=1.5, scale=0.0),
    "soft cap of a ladder with padding": Trial(
        Problem(name="", text="dilated:16x1,32x2,64x4", n=75, heads=4, key_heads=2, e=24, batch=2, padded=(75, 40)),
        block_size=32,
        softcap=1.5,
    ),
    "soft cap of residues within a key head": Trial("dilated-block-offset", block_size=32, softcap=1.5),
    "soft cap and dropout": Trial("gqa", block_size=32, dropout_p=0.3, positions=True, softcap=1.5),
    "soft cap of split rows": Trial("global-window", short_pieces=True, softcap=1.5),
    "soft cap, half precision": Trial("wide-value", dtype=torch.float16, softcap=1.5),
    "soft cap, bad key": Trial("window-causal", block_size=32, bad=("key", 20), softcap=1.5),
    "soft cap, bad query": Trial("gqa", block_size=32, bad=("query", 33), softcap=1.5),
    "bias": Trial("causal", bias=(31,)),
    "bias of one entry": Trial("window", bias=(1,)),
    "bias that masks whole tiles": Trial("full-ragged", block_size=16, bias=(31,), masks=True),
    "bias of a ladder with padding": Trial(
        Problem(name="", text="dilated:16x1,32x2,64x4", n=75, heads=4, key_heads=2, e=24, batch=2, padded=(75, 40)),
        block_size=32,
        bias=(41,),
        softcap=1.5,
    ),
    "bias of residues within a key head": Trial("dilated-block-offset", block_size=32, bias=(21,), scale=-0.7),
    "bias and dropout": Trial("gqa", block_size=32, dropout_p=0.3, positions=True, bias=(41,)),
    "bias of split rows": Trial("global-window", short_pieces=True, bias=(21,)),
    "bias by positions": Trial("gqa", bias=(41,), places=1, softcap=2.0),
    "bias by two distances": Trial("window-causal", bias=(5, 9), places=2),
    "bias of rows elsewhere": Trial("gqa", bias=(41,), places=-1, softcap=2.0),
    "bias by two distances of rows elsewhere": Trial("dilated-block-offset", block_size=32, bias=(5, 9), places=-1),
    "bias, half precision": Trial("wide-value", dtype=torch.float16, bias=(15, 3), places=1),
    "bias, bad key": Trial("window-causal", block_size=32, bad=("key", 20), bias=(9,)),
    "bias, bad gradient": Trial("dilated-block-offset", block_size=32, bad=("grad_output", 33), bias=(9,)),
    "sink": Trial("gqa", sink=1.0),
    "sink of a ladder": Trial("dilated-ladder-causal", block_size=32, sink=0.5),
    "sink of heads that sit out a part": Trial("dilated-split-heads", block_size=32, sink=-2.0),
    "sink of rows without a key": Trial("dilated-empty-rows", sink=2.0),
    "sink of split rows": Trial("global-window", short_pieces=True, sink=1.0),
    "sink of split rows of a ladder": Trial(
        Problem(name="", text="dilated:32x1,64x2,128x4", n=120), block_size=16, short_pieces=True, sink=1.0
    ),
    "sink and padding": Trial("padded", sink=1.0),
    "sink and dropout": Trial("gqa", block_size=32, dropout_p=0.3, sink=1.0),
    "sink, half precision": Trial("wide-value", dtype=torch.float16, sink=3.0),
    "sink, bias and soft cap": Trial("causal", bias=(31,), softcap=1.5, sink=1.0),
    "large sink and bias": Trial("causal", bias=(31,), sink=40.0),
    "sink that is everything": Trial("gqa", sink=torch.inf),
    "sink that is nothing": Trial("dilated-empty-rows", sink=-torch.inf),
    "sink that nears everything": Trial("window-causal", sink=1e9),
    "sink that nears nothing": Trial("dilated-empty-rows", sink=-1e9),
    "sink, bad value": Trial("window-causal", block_size=32, bad=("value", 20), sink=1.0),
}


def errors(trial: Trial) -> dict[str, float]:
    problem = trial.problem if isinstance(trial.problem, Problem) else BY_NAME[trial.problem]
    triton_lowering.SHORTEST_PIECE = 1 if trial.short_pieces else 16 * 128 * 128
    triton_lowering.PROGRAMS_PER_PROCESSOR = 1000 if trial.short_pieces else 4
    drawn = problem.inputs(trial.dtype)
    *rows, grad_lse = (apart(x) for x in drawn) if trial.tokens_first else drawn
    query, key, value, grad_output = rows
    query = far_apart(query) if trial.far else query
    if trial.bad is not None:
        name, token = trial.bad
        spoilt = dict(query=query, key=key, value=value, grad_output=grad_output)[name]
        spoilt[:, :, token, : spoilt.shape[3] // 2] = float("nan")
    plan = make_plan(problem.pattern, problem.n, problem.heads, trial.block_size or problem.block_size)
    if trial.short_pieces:
        check_pieces(plan, problem.heads // problem.key_heads)
    seed = torch.tensor([2**40 + 12345]) if trial.dropout_p else None
    padding = problem.key_padding_mask()
    scale = problem.d**-0.5 if trial.scale is None else trial.scale
    positions = None
    if trial.positions:
        order = [torch.randperm(3 * problem.n)[: problem.n] for _ in range(2 * problem.heads)]
        positions = torch.stack(order).view(2, problem.heads, problem.n)
    call = AttentionCall(query, key, value, plan, scale, padding, trial.dropout_p, seed, positions=positions)
    call = replace(call, softcap=trial.softcap)
    if trial.bias:
        generator = torch.Generator().manual_seed(1)
        lead = (2, problem.heads) if trial.places < 0 else (trial.places,)
        shape = *lead, problem.n, len(trial.bias)
        places = torch.randint(-20, 20, shape, generator=generator) if trial.places else None
        table = 2 * torch.randn(problem.heads, *trial.bias, generator=generator)
        if trial.masks:
            table[:, [0, -1]] = -torch.inf
        call = replace(call, bias=table, bias_positions=places)
    sink = None
    if trial.sink is not None:
        sink = torch.randn(problem.heads, generator=torch.Generator().manual_seed(2)).to(trial.dtype)
        sink[0] = trial.sink
        call = replace(call, sink=sink)
    reason = triton_backend.why_not(call)
    if reason is not None:
        raise RuntimeError(reason)
    grad_lse = grad_lse.float()
    with torch.autograd.set_detect_anomaly(trial.bad is not None, check_nan=False):
        output, lse = triton_backend.forward(call)
        gradients, sink_grad = backward_with_sink(triton_backend, call, output, lse, grad_output, grad_lse)
    options = {"key_padding_mask": padding, "scale": scale, "softcap": trial.softcap or None}
    if seed is not None:
        row = torch.arange(problem.n).expand(2, problem.heads, -1) if positions is None else positions
        batch_head = torch.arange(problem.batch * problem.heads).view(problem.batch, -1, 1, 1)
        options |= {
            "kept": keep_mask(seed, batch_head, row[0, :, :, None], row[1, :, None, :], trial.dropout_p),
            "dropout_p": trial.dropout_p,
        }
    wanted_bias = None
    wanted_sink = None
    if trial.bad is None:
        options["sink"] = sink
        if trial.bias:
            given = {"grad_output": grad_output, "grad_lse": grad_lse} | options
            wanted_bias = table_gradient(query, key, value, problem.pattern, table, places, **given)
            options["bias"] = bias_of_pairs(table.double(), problem.n, places)
        if sink is not None:
            wanted_sink = sink_gradient(query, key, value, problem.pattern, grad_output=grad_output, **options)
        wanted = answer(query, key, value, problem.pattern, grad_output=grad_output, grad_lse=grad_lse, **options)
    else:
        # The dense oracle multiplies by masked weights; the torch backend keeps a NaN where it belongs.
        exact = replace(call, query=query.double(), key=key.double(), value=value.double())
        if trial.bias:
            exact = replace(exact, bias=table.double())
        found = cpu.forward(exact)
        grads, wanted_sink = backward_with_sink(cpu, exact, *found, grad_output.double(), grad_lse.double())
        wanted, wanted_bias = Answer(*found, *grads), getattr(grads, "bias", None)
        reached = wanted.output.isnan().any(-1)
        assert trial.problem == "padded" or trial.bad[0] == "grad_output" or (reached.any() and not reached.all())
    named = zip(wanted._fields, (output, lse, *gradients), wanted, strict=True)
    measured = {name: error(got, want) for name, got, want in named}
    if wanted_bias is not None:
        measured["bias_grad"] = error(gradients.bias, wanted_bias)
    return measured if sink is None else measured | {"sink_grad": error(sink_grad, wanted_sink)}


@triton.jit
def tanh_kernel(p_x, p_tanh, p_slope, N: tl.constexpr):
    o_n = tl.program_id(0) * N + tl.arange(0, N)
    b_tanh, b_slope = tanh_and_slope(tl.load(p_x + o_n))
    tl.store(p_tanh + o_n, b_tanh)
    tl.store(p_slope + o_n, b_slope)


def tanh_errors() -> dict[str, float]:
    """Errors of tanh and its slope from 1e-30 to 40 and at infinity, over the bounds that the function states."""
    size = torch.cat([torch.logspace(-30, -2, 2**15), torch.linspace(0.01, 40, 2**16), torch.full((2**15,), torch.inf)])
    x = torch.cat([size, -size])
    tanh, slope = torch.empty_like(x), torch.empty_like(x)
    tanh_kernel[(len(x) // 2**15,)](x, tanh, slope, N=2**15)
    exact, finite = x.double(), x.isfinite()
    assert torch.equal(tanh[~finite], x[~finite].sign()) and not slope[~finite].any()
    bound = 5 * 2**-24 * exact.tanh().abs()
    slope_bound = (6 + 3 * exact.abs()) * 2**-24 / exact.cosh() ** 2
    wanted = 1 / exact.cosh() ** 2
    return {
        "tanh": ((tanh - exact.tanh()).abs() / bound)[finite].max().item(),
        "slope": ((slope - wanted).abs() / slope_bound)[finite].max().item(),
    }


def public_errors() -> dict[str, float]:
    """Errors of `attention_with_lse` for caps in turn."""
    problem = BY_NAME["causal"]
    *rows, grad_output, grad_lse = problem.inputs(torch.float32)
    leaves = [x.requires_grad_() for x in rows]
    found = {}
    for cap in (1.5, 0.4, None, 1.5):
        output = attention_with_lse(*leaves, problem.pattern, softcap=cap, backend="triton")
        grads = torch.autograd.grad(output, leaves, (grad_output, grad_lse.float()))
        wanted = answer(*rows, problem.pattern, grad_output=grad_output, grad_lse=grad_lse, softcap=cap)
        for name, got, want in zip(wanted._fields, (*output, *grads), wanted, strict=True):
            found[name] = max(found.get(name, 0.0), error(got, want))
    return found


def random_bias_errors() -> dict[str, float]:
    """Errors of `attention_with_lse` over the error bound of rounding, for random patterns, tables and positions."""
    found: dict[str, float] = {}
    for seed in range(6):
        draw = Seeded(f"bias {seed}")
        pattern, n, heads = draw_problem(draw, longest=40, heads=(1, 2))
        batch, groups, axes = draw.integer(1, 2), draw.choice([1, heads]), draw.integer(1, 2)
        torch.manual_seed(seed)
        shapes = [(batch, h, n, width) for h, width in ((heads, 16), (groups, 16), (groups, 8), (heads, 8))]
        *rows, grad_output = (torch.randn(shape) for shape in shapes)
        grad_lse, table = torch.randn(batch, heads, n), torch.randn(heads, *(2 * draw.integer(0, 9) + 1,) * axes)
        positions = torch.randint(-9, 9, (batch, n, axes)) if axes > 1 or draw.choice([False, True]) else None
        leaves = [x.requires_grad_() for x in (*rows, table)]
        options = {"softcap": draw.choice([None, 0.7, 20.0])}
        options["key_padding_mask"] = torch.rand(batch, n) < 0.3 if draw.choice([False, True]) else None
        output = attention_with_lse(
            *leaves[:3], pattern, bias=table, bias_positions=positions, enable_gqa=True, backend="triton", **options
        )
        grads = torch.autograd.grad(output, leaves, (grad_output, grad_lse))
        given = {"grad_output": grad_output, "grad_lse": grad_lse} | options
        pairs = bias_of_pairs(table.detach().double(), n, positions)
        wanted = *answer(*rows, pattern, bias=pairs, **given), table_gradient(*rows, pattern, table, positions, **given)
        for name, got, want in zip((*Answer._fields, "bias_grad"), (*output, *grads), wanted, strict=True):
            found[name] = max(found.get(name, 0.0), error(got, want))
    return found


def budget_errors() -> dict[str, float]:
    """Errors over the error bound of rounding, within the least memory budget, which splits the rows of a head."""
    return Call(
        pattern="window:9 | global:3", n=40, heads=2, key_heads=1, batch=2, d=8, e=8, dtype=torch.float32, seed=5,
        padded=True, scale=0.4, dropout_p=0.3, lse_grad=True, softcap=1.5, memory_budget=TIGHT,
    ).shares("triton")  # fmt: skip


def sample_errors() -> dict[str, float]:
    """Errors over the error bound of rounding, of more samples than a grid dimension: 5 samples, 2 per launch."""
    before, triton_launches.MOST_PROGRAMS = triton_launches.MOST_PROGRAMS, 2
    call = Call(
        pattern="window:9 | global:3", n=20, heads=2, key_heads=1, batch=5, d=8, e=8, dtype=torch.float32, seed=5,
        padded=True, scale=0.4, dropout_p=0.3, lse_grad=True, softcap=1.5,
    )  # fmt: skip
    try:
        found = call.shares("triton")
        rows = [torch.randn(5, 2, 20, 8).transpose(1, 2).contiguous().transpose(1, 2) for _ in range(4)]
        leaves = [x.requires_grad_() for x in (*rows[:3], torch.randn(2, 9, 3))]
        places = torch.randint(-4, 4, (5, 20, 2))
        output = attention_with_lse(*leaves[:3], "causal", bias=leaves[3], bias_positions=places, backend="triton")
        given = {"grad_output": rows[3], "grad_lse": torch.randn(5, 2, 20)}
        grads = torch.autograd.grad(output, leaves, tuple(given.values()))
    finally:
        triton_launches.MOST_PROGRAMS = before
    assert output.output.stride() == rows[0].stride() == grads[0].stride()
    pattern, table = parse("causal"), leaves[3].detach()
    inputs = [x.detach() for x in rows[:3]]
    wanted = answer(*inputs, pattern, bias=bias_of_pairs(table.double(), 20, places), **given)
    for name, got, want in zip(wanted._fields, (*output, *grads[:3]), wanted, strict=True):
        found[f"bias, {name}"] = error(got, want) / 2e-6
    table_grad = table_gradient(*inputs, pattern, table, places, **given)
    return found | {"bias_grad": error(grads[3], table_grad) / 2e-6}


def check_pieces(plan: Plan, group: int) -> None:
    """Assert that rows are split in both directions, in the first part of the softmax or sum and in later parts."""
    tables = triton_lowering.schedule(plan, group)
    slots = [part.by_query.slots for part in tables.by_query], [part.by_key.slots for part in tables.by_key]
    assert all(any(side) and all(side[1:]) for side in slots), slots


def apart(rows: torch.Tensor) -> torch.Tensor:
    if rows.dim() != 4:
        return rows
    batch, heads, n, width = rows.shape
    wider = torch.full((batch, n, heads, width + 8), float("nan"), dtype=rows.dtype)
    view = wider[..., :width].transpose(1, 2)
    return view.copy_(rows)


def far_apart(rows: torch.Tensor) -> torch.Tensor:
    stride = 2**31 // (rows.shape[2] // 2)
    with tempfile.NamedTemporaryFile() as file:
        held = torch.from_file(file.name, shared=True, size=rows.shape[2] * stride, dtype=rows.dtype)
    _, heads, _, width = rows.shape
    return held.as_strided(rows.shape, (heads * width, width, stride, 1)).copy_(rows)


if __name__ == "__main__":
    start_interpreting()
    functions = {"tanh": tanh_errors, "caps in turn": public_errors, "soft cap in a tight budget": budget_errors}
    functions |= {"random biases": random_bias_errors, "more samples than a grid counts": sample_errors}
    for name in sys.argv[1:] or [*TRIALS, *functions]:
        measured = functions[name]() if name in functions else errors(TRIALS[name])
        print(json.dumps({"trial": name} | measured), flush=True)
