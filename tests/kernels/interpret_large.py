"""Run the corners of launches for long sequences in Triton's interpreter, and print what `memory_check` finds.

A separate program like `interpret_triton`. Tensors use virtual memory that is not backed until it is written, so that
they may have more than 2^31 elements. Only the first and last programs of each grid axis run, and the first and last
steps of each loop: an offset that overflows its integer type is then outside of its tensor. Results are not compared,
because most of them are never computed.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from kernels.interpret_faults import Fault, fault_of
from kernels.interpreter import skip_repeated_work
from kernels.memory_check import check_memory
from torch import Tensor
from triton.runtime import interpreter

from dilated_attention_pytorch import parse
from dilated_attention_pytorch.kernels.call import AttentionCall, Forward, Gradients
from dilated_attention_pytorch.kernels.triton import launches as triton_launches
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.selection.attend import CallChoices, RowChunk
from dilated_attention_pytorch.selection.kernels import (
    block_mass,
    gather_index,
    gathered_attention,
    score_gradients,
    summaries,
)
from dilated_attention_pytorch.selection.types import Factors, GatherIndex, ScoreInputs

SMALL = 2**24
"""Bytes up to which memory is really there."""
NOT_RESERVED = 0x4000
ENDS = 2
"""Steps at either end of a loop that are run."""
PACKAGE = "dilated_attention_pytorch"
real_empty = torch.empty


def hollow(*shape: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    """Zeros in memory that is not there until it is written to; stands for `torch.empty` and `torch.zeros`."""
    shape = tuple(shape[0]) if shape and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    kind = dtype or torch.get_default_dtype()
    count = math.prod(shape) * kind.itemsize
    if count <= SMALL or (device is not None and str(device) != "cpu"):
        return real_empty(shape, dtype=kind, device=device).zero_()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NOT_RESERVED
    memory = torch.frombuffer(mmap.mmap(-1, count, flags=flags), dtype=torch.uint8)
    return memory.view(kind).view(shape)


def hollow_like(x: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return hollow(x.shape, dtype=dtype or x.dtype)


def ends_of(*bounds: Any) -> Iterator[int]:
    """The first and the last steps of a range."""
    steps = range(*map(int, bounds))
    short = len(steps) <= 2 * ENDS
    return iter(steps) if short else itertools.chain(steps[:ENDS], steps[-ENDS:])


def run_corners(self: Any, *args: Any, **kwargs: Any) -> None:
    """Replacement of `GridExecutor.__call__`: run the programs at the corners of the grid, with shortened loops."""
    args, kwargs = self._init_args_hst(args, {k: v for k, v in kwargs.items() if k in self.arg_names})
    interpreter._patch_lang(self.fn)
    self.fn.__globals__["range"] = ends_of
    for name, module in [*sys.modules.items()]:
        if name.startswith(PACKAGE) and name.endswith(("kernels", "primitives")):
            vars(module)["range"] = ends_of
    named = dict(zip(self.arg_names, args, strict=False)) | kwargs
    passed = {name: x if name in self.constexprs else interpreter._implicit_cvt(x) for name, x in named.items()}
    grid = (*self.grid, 1, 1)[:3]
    interpreter.interpreter_builder.set_grid_dim(*grid)
    for corner in itertools.product(*({0, side - 1} for side in grid)):
        if min(grid) > 0:
            interpreter.interpreter_builder.set_grid_idx(*corner)
            self.fn(**passed)


def attention(text: str, n: int, heads: int, key_heads: int, d: int) -> None:
    """Forward and backward pass of a pattern."""
    plan = make_plan(parse(text), n, heads, 128)
    query, grad = hollow(1, heads, n, d, dtype=torch.float16), hollow(1, n, heads, d, dtype=torch.float16)
    key, value = (hollow(1, n, key_heads, d, dtype=torch.float16).transpose(1, 2) for _ in range(2))
    call = AttentionCall(query, key, value, plan, d**-0.5)
    output, lse = triton_launches.forward(call)
    triton_launches.backward(call, output, lse, grad.transpose(1, 2), None)


def factors_of(n: int, heads: int, key_heads: int, size: int, unit: int, rows: int, rank: int, batch: int) -> None:
    """Summaries of blocks, factors of scores, and gradients of their parameters."""
    d, hidden, t, units = 128, 128, n // size, size // unit
    query = hollow(batch, n, heads, d, dtype=torch.float16).transpose(1, 2)
    key = hollow(batch, n, key_heads, d, dtype=torch.float16).transpose(1, 2)
    for before in (True, False):
        summaries.summarise(query, key, size, 1 if before else unit, unit, None, before)
    lead = batch, heads
    weights = [torch.zeros(heads, *shape) for shape in ((hidden,), (), (d, rank))]
    unit_rows, columns = hollow(*lead, hidden, t).mT, hollow(*lead, hidden, t).mT
    right = hollow(*lead, t, units, rank)
    factors = Factors(
        unit_rows, columns, weights[0], weights[1], query, weights[2], right, torch.zeros(heads), 0.1, None
    )
    inputs = ScoreInputs(hollow(*lead, t, d), hollow(batch, key_heads, t, 3 * d), hollow(batch, key_heads, t, units, d))
    ids = torch.linspace(0, n - 1, rows).long()
    scores = hollow(*lead, rows, t)
    first, mixture = hollow(heads, hidden, 2 * d), hollow(heads, 3 * d, d)
    score_gradients.parameter_gradients(scores, scores, ids, factors, inputs, first, mixture, size)


def matched(n: int, size: int, rank: int) -> None:
    """Factors of scores of single tokens."""
    d, hidden, t = 128, 16, n // size
    summary, units = hollow(1, 1, t, 3 * d), hollow(1, 1, t, size, d)
    parameters = [torch.zeros(1, *shape) for shape in ((hidden, 2 * d), (hidden,), (3 * d, d), (d, rank))]
    summaries.factor(hollow(1, 1, t, d), summary, units, *parameters)


def gathered(n: int, heads: int, key_heads: int, size: int, listed: int) -> None:
    """Inversion of lists by tokens, and attention of the queries that chose the last block."""
    d, blocks = 128, n // size
    query, key, value, output = (
        hollow(1, n, h, d, dtype=torch.float16).transpose(1, 2) for h in (heads, key_heads, key_heads, heads)
    )
    indices = hollow(1, heads, n, listed, dtype=torch.int32)
    indices[:, :, -1] = blocks - 1
    options = indices.device, indices.shape, indices.stride()[:2], size, blocks, heads // key_heads, 1, False
    chosen: GatherIndex = gather_index.SelectionInverter(*options)(indices)
    chosen.source[-1, -size:] = n - 1
    chosen.tile[-1, -1], chosen.order[-1, -1] = blocks - 1, blocks - 1
    chosen.first[-1, -1], chosen.first[-1, -2] = chosen.tile.shape[1], chosen.tile.shape[1] - 1
    chosen.place[-1, -1] = chosen.source.shape[1] - 1
    call = AttentionCall(query, key, value, make_plan(parse("window:1"), n, heads, size), d**-0.5)
    whole = RowChunk(slice(0, 1), slice(0, heads), slice(0, key_heads), slice(0, n), is_whole=True)
    lse, delta = hollow(1, heads, n), hollow(1, heads, n)
    gathered_attention.forward(call, chosen, None, Forward(output, lse), whole, CallChoices())
    near = Gradients(output, key, value)
    gathered_attention.backward(call, chosen, None, near, whole, lse, delta, output)


def distilled(n: int, heads: int, group: int, size: int, chosen: int, dense: int, slots: int) -> None:
    """Attention of blocks of queries on every block, and the gradients of their scores."""
    d, t, lists = 64, n // size, heads // group
    query, key, grad = (hollow(1, n, heads, d, dtype=torch.float16).transpose(1, 2) for _ in range(3))
    rows = torch.cat([torch.arange(chosen), t - dense + torch.arange(dense)])
    settings = {"block_size": size, "blocks": t, "per_token": False, "is_causal": False, "group": group}
    selection = SimpleNamespace(indices=hollow(1, lists, t, slots, dtype=torch.int32), **settings)
    scores, all_scores = hollow(1, lists, chosen, slots), hollow(1, lists, dense, t)
    visible, lse = hollow(1, lists, t, dtype=torch.bool), hollow(1, heads, n)
    block_mass.distill_gradients(
        query, key, selection, rows, chosen, scores, all_scores, False, visible, lse, grad, 1.0, None, (1.0, 1.0), None,
        None, True,
    )  # fmt: skip


CASES: dict[str, Callable[[], object]] = {
    "window over 1M tokens of 64 heads": lambda: attention("window:300 & causal", 2**20, 64, 8, 128),
    "LongNet's ladder over 1M tokens": lambda: attention("dilated:65536x1,1048576x64", 2**20, 64, 64, 128),
    "lists of 8 blocks for 1M tokens": lambda: gathered(2**20, 32, 4, 64, 8),
    "scores of single tokens, 128K": lambda: factors_of(2**17, 64, 64, 128, 1, 2**14, 128, 4),
    "distillation on blocks of 1M tokens": lambda: distilled(2**20, 2, 2, 128, 1, 2047, 4),
    "distillation on a quarter of the blocks of 1M tokens": lambda: distilled(2**20, 2, 2, 128, 1, 2048, 4),
    "factors of single tokens, 32M": lambda: matched(2**25, 128, 16),
    "scores of units of 16, 128K": lambda: factors_of(2**17, 64, 8, 128, 16, 2**15, 32, 4),
}

FAULTS = {
    "tokens of a tile in 32 bits": Fault(
        "kernels.triton.primitives", "        return tile.to(tl.int64) * BLOCK, length\n",
        "        return tile * BLOCK, length\n", CASES["window over 1M tokens of 64 heads"], "p_",
    ),
    "streams of scores in 32 bits": Fault(
        "selection.kernels.score_gradients_kernels",
        "    program = tl.program_id(0)\n    stream = tl.program_id(1).to(tl.int64)\n",
        "    program = tl.program_id(0)\n    stream = tl.program_id(1)\n", CASES["scores of single tokens, 128K"], "p_",
    ),
    "tokens of a match in 32 bits": Fault(
        "selection.kernels.summaries_kernels",
        "                p_units, p_match + head * s_match, o_i.to(tl.int64), o_i < units, o_r, D, D, RANK, RP, PRECISION\n",
        "                p_units, p_match + head * s_match, o_i, o_i < units, o_r, D, D, RANK, RP, PRECISION\n",
        CASES["factors of single tokens, 32M"], "p_",
    ),
    "gathered rows of heads in 32 bits": Fault(
        "selection.kernels.gathered_attention_kernels",
        "    CUT: tl.constexpr = HOLES or p_bounds is not None\n    head = tl.program_id(1).to(tl.int64)\n",
        "    CUT: tl.constexpr = HOLES or p_bounds is not None\n    head = tl.program_id(1)\n",
        CASES["lists of 8 blocks for 1M tokens"], "p_",
    ),
}  # fmt: skip


if __name__ == "__main__":
    skip_repeated_work()
    interpreter.GridExecutor.__call__ = run_corners
    check_memory()
    torch.empty, torch.zeros, torch.empty_like, torch.zeros_like = hollow, hollow, hollow_like, hollow_like
    np.seterr(all="ignore")
    for name in sys.argv[1:] or CASES:
        print(json.dumps({"case": name, "found": fault_of(CASES[name])}), flush=True)
    for name, fault in FAULTS.items() if not sys.argv[1:] else ():
        print(json.dumps({"case": name, "found": fault.found(), "where": fault.argument}), flush=True)
