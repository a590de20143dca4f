"""Plant out-of-bounds accesses in kernels, run them in Triton's interpreter, and print the reports of `memory_check`.

A separate program like `interpret_triton`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from kernels import interpret_scores, interpret_selection, interpret_triton
from kernels.interpreter import start_interpreting
from kernels.memory_check import MemoryFault
from triton.runtime.interpreter import InterpretedFunction

from dilated_attention_pytorch.kernels.launch import launcher
from dilated_attention_pytorch.kernels.launch.arena import Arena
from dilated_attention_pytorch.selection.kernels import gathered_attention

PACKAGE = "dilated_attention_pytorch"


@triton.jit
def copy_kernel(
    p_x, p_y, p_index, p_sum, rows, sx_n, sy_n, begin, FAULT: tl.constexpr, BM: tl.constexpr, D: tl.constexpr
):
    """Copy the rows that are listed, and add up the first number of each."""
    o_i, o_d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    b_mask = o_i < rows
    if FAULT == "mask dropped":
        b_mask = o_i >= 0
    o_row = tl.load(p_index + o_i, mask=b_mask, other=0)
    if FAULT == "negative index":
        o_row -= 1
    if FAULT == "read of the next row":
        o_row += 1
    if FAULT == "read through another argument":
        p_x = p_y + begin
    o_read = o_row[:, None] * sx_n + o_d[None, :]
    if FAULT == "read before":
        o_read -= 1
    if FAULT == "read behind":
        o_read += 1
    if FAULT == "offset beyond 32 bits":
        o_read = o_i[:, None] * (1 << 29) + o_d[None, :]
    b_x = tl.load(p_x + o_read, mask=b_mask[:, None], other=0.0)
    if FAULT == "half of an element":
        p_half = (p_x + o_read).to(tl.pointer_type(tl.uint8), bitcast=True) + 2
        b_x = tl.load(p_half.to(tl.pointer_type(tl.float32), bitcast=True), mask=(b_mask & (o_row == 0))[:, None])
    o_write = o_i[:, None] * sy_n + o_d[None, :]
    if FAULT == "write behind":
        o_write += sy_n
    if FAULT == "write into a gap":
        o_write += 1
    if FAULT == "wrong stride of the last row":
        o_write += tl.where(o_i == rows - 1, 4, 0)[:, None]
    tl.store(p_y + o_write, b_x, mask=b_mask[:, None])
    tl.atomic_add(p_sum + (1 if FAULT == "atomic behind" else 0), tl.sum(tl.where(b_mask, tl.sum(b_x, 1), 0.0), 0))


COPIES = {
    "none": "", "mask dropped": "p_index", "negative index": "p_x", "read of the next row": "p_x",
    "read through another argument": "p_y", "read before": "p_x", "read behind": "p_x",
    "offset beyond 32 bits": "p_x", "half of an element": "p_x", "write behind": "p_y", "write into a gap": "p_y",
    "wrong stride of the last row": "p_y", "atomic behind": "p_sum", "index that is not written": "far from",
    "between tensors of an arena": "p_y",
}  # fmt: skip
"""Faults of `copy_kernel`, and the argument that a message must name."""


def copy(fault: str) -> None:
    """Copy rows with a fault; arguments are surrounded by other tensors, and output rows are not adjacent."""
    memory, index = torch.zeros(64, 8), torch.arange(5)
    x, y, total = memory[8:13], memory[16:].as_strided((5, 8), (12, 1)), memory[63, :1]
    if fault == "index that is not written":
        index = torch.full((5,), torch.iinfo(torch.int64).max // 3 * 2)
    if fault == "between tensors of an arena":
        room = Arena(torch.float32, torch.device("cpu"), {"one": (5, 8), "other": (5, 8)})
        y = room.made()
        # Rows with stride 16 leave the first tensor of the arena.
        copy_kernel[(1,)](x, y, index, total, 5, 8, 16, 0, FAULT=fault, BM=8, D=8)
    else:
        begin = int(x.data_ptr() - y.data_ptr()) // 4
        copy_kernel[(1,)](x, y, index, total, 5, 8, 12, begin, FAULT=fault, BM=8, D=8)


class Fault:
    """A change of a kernel, and a trial that it makes access memory which is not its own."""

    def __init__(self, module: str, before: str, after: str, trial: Callable[[], object], argument: str) -> None:
        self.module, self.before, self.after, self.trial, self.argument = module, before, after, trial, argument

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Replace the functions of the module everywhere in the library by those of a changed copy."""
        original = import_module(f"{PACKAGE}.{self.module}")
        source = Path(str(original.__file__))
        text = source.read_text()
        assert text.count(self.before) == 1, (self.before, text.count(self.before))
        copied = ModuleType(original.__name__)
        copied.__package__ = original.__package__
        # The interpreter reads the source of a kernel when it first runs.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / source.name
            path.write_text(text.replace(self.before, self.after))
            # `inspect` reads the source of a class or function from this file.
            copied.__file__ = str(path)
            exec(compile(path.read_text(), path, "exec"), copied.__dict__)
            kernels = {id(x): (x, name) for name, x in vars(original).items() if isinstance(x, InterpretedFunction)}
            users = [module for name, module in sys.modules.items() if name.startswith(PACKAGE)]
            places = [(x, name, y) for x in users for name, y in vars(x).items() if id(y) in kernels]
            for module, name, kernel in places:
                setattr(module, name, getattr(copied, kernels[id(kernel)][1]))
            forget_launches()
            try:
                yield
            finally:
                for module, name, kernel in places:
                    setattr(module, name, kernel)
                forget_launches()

    def found(self) -> str:
        with self.planted():
            return fault_of(self.trial)


def forget_launches() -> None:
    """Drop launches of kernels that are replaced."""
    launcher.prepared.cache_clear()
    launcher._launches.clear()
    gathered_attention._cache.clear()


def fault_of(run: Callable[[], object]) -> str:
    """Message of the memory fault of a run, empty without one."""
    try:
        run()
    except Exception as problem:
        cause: BaseException | None = problem
        while cause is not None:
            if isinstance(cause, MemoryFault):
                return str(cause)
            cause = cause.__cause__
        raise
    return ""


def portable(name: str) -> Callable[[], object]:
    return lambda: interpret_triton.errors(interpret_triton.TRIALS[name])


def selected(name: str) -> Callable[[], object]:
    return interpret_selection.TRIALS[name].errors


def scored(name: str) -> Callable[[], object]:
    return interpret_scores.TRIALS[name].errors


ROWS_READ = "            return tl.load(p_rows, mask=b_exist[:, None], other=0.0)\n"
FAULTS = {
    "attention reads rows behind the last": Fault(
        "kernels.triton.primitives", ROWS_READ, "            return tl.load(p_rows)\n", portable("ragged end"), "p_"
    ),
    "attention writes rows behind the last": Fault(
        "kernels.triton.primitives", "        tl.store(p_rows, b_value, mask=b_exist[:, None])\n",
        "        tl.store(p_rows, b_value)\n", portable("ragged end"), "store",
    ),
    "work items with a wrong stride": Fault(
        "kernels.triton.primitives", "    p_item = p_work + item * 8\n", "    p_item = p_work + item * 9\n",
        portable("causal window"), "p_",
    ),
    "sides of a match behind the last row": Fault(
        "selection.kernels.score_gradients_kernels", "    b_left_real = o_i < rows\n    b_right_real",
        "    b_left_real = o_i <= rows\n    b_right_real", selected("parameters by tokens among equals, holes"), "p_",
    ),
    "gradients of a match behind the last block": Fault(
        "selection.kernels.score_gradients_kernels", "    b_mask = (o_j < blocks * U)[:, None] & (o_r < RANK)[None, :]\n",
        "    b_mask = (o_j < blocks * U + 1)[:, None] & (o_r < RANK)[None, :]\n", selected("parameters by blocks"), "p_room",
    ),
    "lists cleared behind the last": Fault(
        "selection.kernels.topk_kernels", "    b_rest = o_k < room * tl.sum(b_exist.to(tl.int32), 0)\n",
        "    b_rest = o_k <= room * tl.sum(b_exist.to(tl.int32), 0)\n", selected("choice in registers, noise, rounded"),
        "p_indices",
    ),
    "gathered rows that are filler": Fault(
        "selection.kernels.gathered_attention_kernels", "    return b_source.to(tl.int64) - sample * n, b_source >= 0\n",
        "    return b_source.to(tl.int64) - sample * n, b_source >= -1\n", selected("tokens"), "p_",
    ),
    "places of a selection behind the last": Fault(
        "selection.kernels.gather_index_kernels",
        "            b_next += popcount(b_bits)\n", "            b_next += popcount(b_bits) + SIZE * rows\n",
        selected("tokens turned round"), "p_room",
    ),
    "factors of hidden units behind the last": Fault(
        "selection.kernels.block_scores_kernels", "            weight = tl.load(p_weight + first + m)\n",
        "            weight = tl.load(p_weight + first + m + 1)\n", scored("32 by 32, ragged"), "p_weight",
    ),
}  # fmt: skip


if __name__ == "__main__":
    start_interpreting()
    interpret_selection.use_small_tiles()
    for name, where in COPIES.items():
        found = fault_of(lambda name=name: copy(name))
        print(json.dumps({"fault": name, "found": found, "where": where}), flush=True)
    for name, fault in FAULTS.items():
        print(json.dumps({"fault": name, "found": fault.found(), "where": fault.argument}), flush=True)
