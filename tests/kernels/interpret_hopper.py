"""Run problems through the launches of the Hopper backend on the CPU and print the errors against the oracle.

Gluon kernels run in `gluon_emulator`; the Triton kernels that join pieces of long rows and prepare the backward run in
Triton's interpreter. A program of its own: Triton decides when it is imported whether to interpret.
"""

import json
import os
import sys
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

import torch
from cases import Problem
from index_calls import IndexCall
from kernels import gluon_emulator
from kernels.gluon_emulator import Descriptor, EmulationError, Kernel
from kernels.interpreter import start_interpreting
from kernels.test_selection import drawn, inputs, seen_pairs
from oracle import answer, dense_attention, error, sink_gradient

from dilated_attention_pytorch.kernels.call import AttentionCall, reproducible_gradients
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.kernels.hopper import backward as hopper_gradients
from dilated_attention_pytorch.kernels.hopper import dkv_kernel as hopper_backward
from dilated_attention_pytorch.kernels.hopper import dq_kernel as hopper_backward_rows
from dilated_attention_pytorch.kernels.hopper import forward_kernel as hopper_forward
from dilated_attention_pytorch.kernels.hopper import split_rows as hopper_split
from dilated_attention_pytorch.kernels.launch import launcher as hopper_launch
from dilated_attention_pytorch.kernels.sink import backward_with_sink
from dilated_attention_pytorch.ops import memory_budget
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.selection import attention as selected
from dilated_attention_pytorch.selection import backend as selection_backend
from dilated_attention_pytorch.selection.kernels import gathered_attention, hopper_gathered
from dilated_attention_pytorch.selection.kernels import hopper_gathered_kernel as hopper_tokens

ROWS = 128
PROGRAMS = 20
ORDERS = True, False
"""Whether gradients are reproducible, or dQ is summed in any order."""


def problem(text, n, block_size=128, d=64, e=None, **more):
    return Problem(name="", text=text, n=n, d=d, e=e or d, block_size=block_size, **more)


UNLIKE = "(random:0.8;block=128;seed=1;per_head=1 & global:128;queries=1) | window:60"
TRIALS = {
    "no long row": problem("window:100", 600, batch=3),
    "global rows and columns": problem("global:128;queries=1 | window:60", 1024, batch=2),
    "a ragged last row": problem("global:128 | blocks:,,,,,,,0 1 2 3 4 5 6 7;block=128", 1000),
    "causal, grouped heads": problem("(global:128;queries=1 | window:60) & causal", 1024, heads=4, key_heads=2),
    "a list a head": problem(UNLIKE, 1024),
    "groups of unlike heads": problem(UNLIKE, 1024, key_heads=1),
    "blocks of 256": problem("global:256;queries=1 | window:60", 1600, block_size=256),
    "blocks of 64": problem("global:64;queries=1 | window:60", 1000, block_size=64, d=128, key_heads=1),
    "half precision": problem("global:128;queries=1 | window:80", 1024),
    "widths 96 and 80": problem("global:128;queries=1 | window:60", 1000, d=96, e=80),
    "some rows see no key": problem("blocks:,,,0 1,,,,0 1 2 3 4 5 6 7;block=128 & causal", 1000),
}
STRIDED = {
    "ladder": problem("dilated:128x1,512x4", 600),
    "ladder, causal, grouped heads": problem("dilated:256x1,640x2 & causal", 700, heads=4, key_heads=2),
    "ladder, residues of two lengths": problem("dilated:200x3,701x5", 701, heads=3, key_heads=3),
    "ladder, width 128": problem("dilated:256x1,1024x2", 1000, d=128, batch=2, heads=1, key_heads=1),
    "ladder, blocks of 64": problem("dilated:128x1,512x3 & causal", 701, block_size=64, d=128, key_heads=1),
}
ANY_ORDER = {
    "any order": problem("window:100 | global:40", 600, key_heads=1),
    "any order, causal, width 128": problem("window:100 & causal", 400, d=128),
    "any order, blocks of 256, ragged": problem("random:0.6;block=256", 900, block_size=256),
    "any order, blocks of 64": problem("window:100 & causal", 300, block_size=64, d=128, key_heads=1),
    "any order, ladder": problem("dilated:128x1,512x4", 600),
    "any order, ladder, width 128": problem("dilated:200x3,701x5", 701, d=128, heads=3, key_heads=1),
}
"""With dQ summed by the kernel of dK and dV."""
WIDTHS = {
    "width 8": problem("causal", 200, d=8),
    "width 32, ragged, grouped heads": problem("window:100 | global:40", 300, d=32, key_heads=1),
    "width 96, causal, blocks of 256": problem("window:100 & causal", 600, block_size=256, d=96),
    "width 72, half precision": problem("window:150", 400, d=72),
    "widths 32 and 128": problem("window:100", 300, d=32, e=128),
    "widths 128 and 64": problem("window:100", 300, d=128, e=64),
    "width 128, random blocks of 64": problem("random:0.4;block=64;seed=1;per_head=1", 600, block_size=64, d=128),
    "width 80, ladder": problem("dilated:128x1,512x4", 600, d=80),
    "width 32, ladder, grouped heads": problem("dilated:256x1,640x2 & causal", 700, d=32, heads=4, key_heads=2),
    "widths 96 and 40, ladder, residues of two lengths": problem(
        "dilated:200x3,701x5", 701, d=96, e=40, heads=3, key_heads=1
    ),
    "widths 104 and 72, ladder, blocks of 64": problem(
        "dilated:200x3,701x5", 701, block_size=64, d=104, e=72, heads=3, key_heads=1
    ),
}
"""Rows that do not fill their tiles, with both ways to sum dQ."""
RUNS = {
    "rows of a window": (problem("window:100", 600), 128),
    "rows of a causal pattern, grouped heads": (problem("causal", 500, key_heads=1), 128),
    "rows of a ladder, width 80": (problem("dilated:101x1,909x2 & causal", 909, d=80, key_heads=1), 256),
    "rows of documents": (problem("documents:130,1,300,209 & causal", 640), 128),
    "rows of blocks of 64": (problem("window:100", 600, block_size=64, d=128), 128),
    "long rows": (problem("global:128;queries=1 | window:60", 1000), 256),
}
"""Problems, and the rows of a run of one head, as within a memory budget."""
SCALES = {
    "scale -0.2": (problem("window:100 & causal", 300), -0.2),
    "scale -0.1, ladder, width 80": (problem("dilated:128x1,512x4", 600, d=80), -0.1),
    "scale 0": (problem("window:100 & causal", 300, key_heads=1), 0.0),
    "scale 0, ladder": (problem("dilated:128x1,512x4", 600), 0.0),
}


PADDED = {
    "padded, lengths": (problem("window:100", 600, batch=4), "lengths"),
    "padded, left": (problem("window:150 & causal", 500, batch=2, key_heads=1), "left"),
    "padded, random keys": (problem("window:200 | global:40", 500, batch=2, d=128), "random"),
    "padded, expanded mask": (problem("window:100", 400, batch=2), "expanded"),
    "padded, blocks of 256": (problem("random:0.6;block=256", 900, block_size=256), "random"),
    "padded, blocks of 64": (problem("window:100 | global:40", 500, block_size=64, batch=2, d=128), "random"),
    "padded, split rows": (problem("global:128;queries=1 | window:60", 1000, batch=2), "lengths"),
    "padded, ladder": (problem("dilated:128x1,512x4", 600, batch=3, key_heads=1), "lengths"),
    "padded, ladder, random keys": (problem("dilated:200x3,701x5", 701, d=128, heads=3, key_heads=3), "random"),
    "padded, ladder, blocks of 64": (problem("dilated:128x1,512x4", 600, block_size=64, batch=2, d=128), "random"),
    "padded, width 96": (problem("window:150 & causal", 400, batch=2, d=96), "random"),
    "padded, half precision": (problem("window:100 | global:40", 500, batch=2), "random"),
}
"""Problems with a kind of padding; padded keys and values are NaN or infinite."""


SINKS = {
    "sink, causal window, grouped heads": (problem("window:127,0", 500, key_heads=1), 1.0),
    "sink, rows without keys, width 128": (problem("blocks:,,,0 1;block=128 & causal", 500, d=128), 0.5),
    "sink, blocks of 256": (problem("window:150 & causal", 600, block_size=256), -2.0),
    "sink, split rows": (problem("global:128;queries=1 | window:60", 1000, batch=2), 1.0),
    "sink, split rows, blocks of 64": (problem("global:64;queries=1 | window:60", 1000, block_size=64, d=128), 1.0),
    "sink, ladder": (problem("dilated:128x1,512x4", 600), 1.0),
    "sink, padded": (problem("window:100", 400, batch=2), 1.0),
    "sink, half precision": (problem("window:100 & causal", 400, key_heads=1), 2.0),
    "sink, infinite": (problem("window:100 & causal", 400), torch.inf),
    "sink, minus infinity, rows without keys": (problem("blocks:,,,0 1;block=128 & causal", 500), -torch.inf),
    "sink, large": (problem("window:100 & causal", 400), 1e9),
}
"""Problems, and the sink of the first head; other sinks are random."""
SINKS_IN_ANY_ORDER = ("sink, split rows, blocks of 64", "sink, ladder", "sink, infinite")
SINKS_IN_ANY_ORDER += ("sink, minus infinity, rows without keys",)
"""With dQ in any order, whose sum reads no sink: rows that are split, strided, masked whole and without keys."""


def padding_of(trial, kind):
    token = torch.arange(trial.n)
    if kind == "random":
        return torch.rand(trial.batch, trial.n, generator=torch.Generator().manual_seed(3)) < 0.3
    if kind == "expanded":
        return (token % 5 > 2).expand(trial.batch, -1)
    # No padding, some, whole tiles, and a sample without any key.
    lengths = torch.tensor([trial.n, trial.n // 3, 0, trial.n - 1][: trial.batch])[:, None]
    return token >= lengths if kind == "lengths" else token < trial.n - lengths


INDICES = {
    "indices, rows without blocks": IndexCall(False, False, 512, 128, 2, 2, 1, 2, 2, wild=True),
    "indices, causal, rows without blocks": IndexCall(False, True, 512, 128, 2, 2, 1, 1, 2, wild=True),
    "indices, ragged, rows without blocks": IndexCall(False, False, 300, 128, 1, 2, 2, 2, 1, wild=True),
    "indices by tokens": IndexCall(True, False, 256, 128, 1, 2, 1, 1, 2, wild=True),
    "indices by causal tokens": IndexCall(True, True, 256, 128, 1, 2, 1, 1, 2, wild=True),
    "indices by causal tokens in chunks": IndexCall(True, True, 256, 128, 1, 2, 1, 1, 2, wild=True),
}
"""Calls on indices; of each by blocks, some rows list none. A chunk is 128 tokens of a query head."""


def run_by_rows(trial, rows):
    """Errors by order of a call in runs of rows of one head, and whether some run had fewer queries than keys."""
    query, key, value, grad_output, grad_lse = trial.inputs(torch.float32)
    plan = make_plan(trial.pattern, trial.n, trial.heads, trial.block_size)
    pattern = trial.pattern.resolve(trial.n, trial.heads)
    call = AttentionCall(query, key, value, plan, trial.d**-0.5, pattern=pattern)
    lengths = [chunk.call.query.shape[2] - chunk.call.key.shape[2] for chunk in memory_budget._chunks(call, rows)]
    memory_budget._within = lambda direction, call, name, budget, run: run(rows)
    output, lse = memory_budget.forward(call, "hopper", hopper_backend, 1)
    wanted = answer(query, key, value, trial.pattern, grad_output=grad_output, grad_lse=grad_lse)
    errors = {}
    for order in ORDERS:
        reproducible_gradients(order)
        rest = output, lse, grad_output, grad_lse
        gradients = memory_budget.backward(call, "hopper", hopper_backend, 1, *rest).inputs
        named = zip(wanted._fields, (output, lse, *gradients), wanted, strict=True)
        errors[order] = {name: error(got, want) for name, got, want in named} | {"fewer": min(lengths) < 0}
    return errors


def run(trial, dtype, scale=None, padding=None, sink=None):
    """Errors of a call, with dQ in the present order."""
    return run_orders(trial, dtype, scale, padding, sink, orders=(reproducible_gradients(),))[reproducible_gradients()]


def run_orders(trial, dtype, scale=None, padding=None, sink=None, orders=ORDERS):
    """Errors of a call by order of the sums of dQ, after one forward pass."""
    query, key, value, grad_output, grad_lse = trial.inputs(dtype)
    grad_lse = grad_lse.float()
    plan = make_plan(trial.pattern, trial.n, trial.heads, trial.block_size)
    scale = trial.d**-0.5 if scale is None else scale
    given = key, value
    if padding is not None:
        hidden = padding[:, None, :, None]
        given = torch.where(hidden, torch.nan, key), torch.where(hidden, torch.inf, value)
    call = AttentionCall(query, *given, plan, scale, padding, sink=sink)
    options = {"key_padding_mask": padding, "scale": scale, "sink": sink, "grad_output": grad_output}
    wanted = answer(query, key, value, trial.pattern, grad_lse=grad_lse, **options)
    wanted_sink = None if sink is None else sink_gradient(query, key, value, trial.pattern, **options)
    runner = hopper_backend.prepare(call)
    output, lse = runner.forward(call)
    errors = {}
    for order in orders:
        reproducible_gradients(order)
        gradients, sink_grad = backward_with_sink(runner, call, output, lse, grad_output, grad_lse)
        named = zip(wanted._fields, (output, lse, *gradients), wanted, strict=True)
        errors[order] = {name: error(got, want) for name, got, want in named}
        if sink is not None:
            errors[order]["sink_grad"] = error(sink_grad, wanted_sink)
    if trial in TRIALS.values():
        (backward,) = runner._backward._launches.values()
        rooms = [room for room, _ in runner.forward.pieces[:1]] or [()], backward.pieces or [()] * 3
        pieces = [room[2] // trial.block_size if room else 0 for side in rooms for room in side]
        errors[order] |= {"pieces": pieces}
    return errors


def run_learned(seed, n, batch, per_token=False, padded=False, size=128):
    """Attention over a drawn selection, as a GPU runs it; all of one shape have one launch."""
    # With float32 inputs the token kernel could not distinguish its float32 accumulator from rows of dQ.
    dtype = torch.float16 if per_token else torch.float32
    chosen = drawn(batch, 2, n, size, is_causal=seed % 2 > 0, per_token=per_token, most=2, local=1, seed=seed)
    width = 128 if size == 64 else 64
    given = [x.to(dtype).requires_grad_() for x in inputs(chosen, 1, width, width)]
    slopes = torch.randn(batch, 2, n, width, dtype=dtype), torch.randn(batch, 2, n)
    exact = [x.detach().double().requires_grad_() for x in given]
    options = {"backend": "auto" if per_token else "hopper", "enable_gqa": True, "return_lse": True}
    padding = torch.arange(n) % 3 == 0 if padded else torch.zeros(n, dtype=torch.bool)
    padding = padding.expand(batch, n)
    options |= {"key_padding_mask": padding} if padded else {}
    found = selected.selected_attention(*given, chosen, **options)
    wanted = dense_attention(*exact, seen_pairs(chosen).double(), key_padding_mask=padding)
    grads = (torch.autograd.grad(one, leaves, slopes) for one, leaves in ((found, given), (wanted, exact)))
    found, wanted = ([*one, *more] for one, more in zip((found, wanted), grads, strict=True))
    names = "output", "lse", "query", "key", "value"
    launches = BUILT["forward"]
    return {name: error(a, b) for name, a, b in zip(names, found, wanted, strict=True)} | {"launches": launches}


FAULTS = {
    "no fence before the output is stored": (
        "attend_rows",
        "            fence_async_shared()\n            copy_out(o_desc",
        "            copy_out(o_desc",
    ),
    "query buffer free before its output is stored": (
        "attend_rows",
        "        tma.store_wait(0)\n        mbarrier",
        "        mbarrier",
    ),
    "value buffer free before its product": (
        "attend_tile",
        "    acc = warpgroup_mma_wait(0, deps=(acc_token,))\n    mbarrier.arrive(used.index(ahead % K_STAGES), count=1)\n",
        "    mbarrier.arrive(used.index(ahead % K_STAGES), count=1)\n    acc = warpgroup_mma_wait(0, deps=(acc_token,))\n",
    ),
    "weights read before their product": (
        "attend_tile",
        "warpgroup_mma_wait(1, deps=(scores",
        "warpgroup_mma_wait(2, deps=(scores",
    ),
    "no barrier before the keys": ("load_tile", "full.index(slot), desc.block_type.nbytes", "full.index(slot), 0"),
    "no fence after dS": ("gather_step", "store(ds)\n    fence_async_shared()", "store(ds)"),
    "dS of the sibling not waited for": ("gather_step", "take_over(C, 1 - parity, (step > 0).to(gl.int32))", "pass"),
    "dK over keys that the sibling reads": ("gather_keys", "            meet()\n", "            pass\n"),
    "tile free while dQ reads it": (
        "gather_row_step",
        "warpgroup_mma_wait(0, deps=(dq_token,))\n        mbarrier.arrive(empty.index(behind)",
        "warpgroup_mma_wait(0, deps=(dq_token,))\n        mbarrier.arrive(empty.index(slot)",
    ),
    "claims not reset": ("next_item", "claimed == items - 1", "claimed == items"),
    "band of a mask moved": (
        "stream_head",
        "low = gl.load(p_entry + 2) - o_row + o_col",
        "low = gl.load(p_entry + 2) - o_row",
    ),
}
"""Faults of the kernels: a function, a text of its source, and its replacement."""
SMALL_FAULTS = {
    "keys of blocks of 64 free before their product": (
        "gather_row_step",
        "        dq = warpgroup_mma_wait(2, deps=(dq_token,))\n"
        "        mbarrier.arrive(empty.index(behind), count=1, pred=step > 0)\n",
        "        mbarrier.arrive(empty.index(behind), count=1, pred=step > 0)\n"
        "        dq = warpgroup_mma_wait(2, deps=(dq_token,))\n",
    ),
    "query buffer of a block of 64 free too early": (
        "attend_rows",
        "        tma.store_wait(0)\n        mbarrier",
        "        mbarrier",
    ),
    "row of another block of 64": ("load_tiles", "o_query *= WORKERS * ROWS", "o_query *= 2 * ROWS"),
}
"""Faults that show in blocks of 64 of width 128."""
PADDING_FAULTS = {
    "padding ignored in a step": (
        "attend_tile",
        'scores = drop_columns(scores, b_kept.index(k_slot), -float("inf"))',
        "pass",
    ),
    "padding ignored in the first step": (
        "attend_rows",
        'scores = drop_columns(scores, b_kept.index(tile_count % K_STAGES), -float("inf"))',
        "pass",
    ),
    "padded values not zeroed": ("load_keys", "        zero_rows(b_values, a, b, c, d)\n", ""),
    "padded values not waited for": ("load_keys", "        mbarrier.wait(whole.index(0), count & 1)\n", ""),
    "values signalled before they are zeroed": (
        "load_keys",
        "        zero_rows(b_values, a, b, c, d)\n        mbarrier.arrive(v_full.index(count % V_STAGES), count=1)\n",
        "        mbarrier.arrive(v_full.index(count % V_STAGES), count=1)\n        zero_rows(b_values, a, b, c, d)\n",
    ),
    "no fence after zeroing": ("zero_rows", "    fence_async_shared()\n", ""),
    "padding of another sample": ("kept_words", "batch.to(gl.int64) * n", "0"),
    "padding of adjacent tokens": ("load_keys", "rate if len(k_desc.block_shape) == 5 else 1", "1"),
    "padding ignored in dQ by rows": ("gather_row_step", "ds = drop_columns(ds, b_kept.index(slot), 0.0)", "pass"),
    "padded keys not zeroed for dQ by rows": ("stream_tile", "            zero_rows(b_keys, a, b, c, d)\n", ""),
    "padding ignored in dQ": ("gather_step", "ds = drop_rows(ds, b_kept.index(kv_slot), C)", "pass"),
    "padded keys not zeroed for dQ": ("hold_keys", "        zero_rows(buffer.index(slot * 2), a, b, a, b)\n", ""),
    "padding ignored in dK": ("gather_keys", "dk = drop_rows(dk, b_kept.index(kv_slot), C)", "pass"),
    "padding ignored in dV": ("gather_keys", "dv = drop_rows(dv, b_kept.index(kv_slot), C)", "pass"),
}
"""Faults that show in a call with padding."""


def run_fault(name, change):
    """Error of a call whose kernels have a fault, under a second schedule if small; or the exception it raised."""
    emulate({change[0]: change[1:]})
    trial = problem("window:150 & causal", 900, block_size=256)
    if name in SMALL_FAULTS:
        trial = problem("window:150 & causal", 700, block_size=64, d=128)
    padding, padded = None, name in PADDING_FAULTS
    if padded:
        trial = problem("dilated:256x1,512x4", 600, batch=2)
        padding = padding_of(trial, "random")
    try:
        counters = torch.zeros(8, dtype=torch.int32)
        hopper_backend.item_counters = lambda device, count: counters[:count]
        reproducible_gradients(change[0] in ("gather_row_step", "stream_tile", "gather_keys" if padded else None))
        errors = (max(run(trial, torch.float32, padding=padding).values()) for _ in range(2))
        return next((error for error in errors if not error <= 1e-3), 0.0)
    except EmulationError as error:
        return str(error)


BUILT = {"forward": 0}


def count_launches():
    build = hopper_backend.ForwardLaunch.__init__

    def counted(*arguments):
        BUILT["forward"] += 1
        build(*arguments)

    hopper_backend.ForwardLaunch.__init__ = counted


GLUON = [
    (hopper_forward, "attention_fwd_kernel"),
    (hopper_backward, "attention_dkv_bwd_kernel"),
    (hopper_backward_rows, "attention_dq_bwd_kernel"),
    (hopper_tokens, "chosen_bwd_kernel"),
]
GLUON = [(module, name, getattr(module, name)) for module, name in GLUON]


def emulate(changes=None, seed=0):
    for module, name, kernel in GLUON:
        setattr(module, name, Kernel(kernel, seed, changes))


IN_TURNS = {
    "dense": problem("full", 512, heads=1, key_heads=1),
    "window": problem("window:150", 700),
    "causal, grouped heads, width 128": problem("window:300 & causal", 640, d=128, key_heads=1),
    "random, a list a head": problem("random:0.7;block=128;seed=1;per_head=1", 768),
    "blocks of 256, ragged, batch": problem("full", 600, block_size=256, heads=1, key_heads=1, batch=2),
    "split rows": problem("global:128;queries=1 | window:60", 1024, heads=1, key_heads=1),
    "ladder, grouped heads": problem("dilated:512x1,640x2 & causal", 700, heads=2, key_heads=1),
    "ladder, heads of two offsets": problem("dilated:384x1,768x2;heads=split", 768, heads=4, key_heads=2),
}
"""With at least three entries at some tile of dQ, so that their order shows."""
SCHEDULES = [(3, 3, 100), (5, 2, 100), (5, 2, 200), (20, 24, 100), (20, 24, 200), (20, 24, 300)]
"""Number of programs, number that run at a time, and seed."""


class InTurns:
    """Backward of a trial with dQ summed in turns, or in any order, under schedules of the emulator."""

    def __init__(self, trial):
        query, key, value, self.grad_output, grad_lse = trial.inputs(torch.float32)
        self.trial, self.grad_lse = trial, grad_lse.float()
        plan = make_plan(trial.pattern, trial.n, trial.heads, trial.block_size)
        self.call = AttentionCall(query, key, value, plan, trial.d**-0.5)
        emulate()
        self.forward = hopper_backend.prepare(self.call).forward(self.call)
        config = hopper_gradients.BACKWARD_CONFIGS[trial.d]
        self.runner = hopper_gradients.PreparedBackward(replace(config, ordered=True), False)

    def gradients(self, programs, resident, seed, any_order=False, changes=None):
        emulate(changes, seed)
        gluon_emulator.RESIDENT = resident
        hopper_gradients.processors = lambda device: programs
        self.runner._launches.clear()
        return self.runner(self.call, *self.forward, self.grad_output, self.grad_lse, any_order)

    def first_difference(self, any_order=False, changes=None):
        """First schedule whose gradients differ from those of a single program, or its error; None if all agree."""
        expected = self.gradients(1, 1, 0, any_order)
        for schedule in SCHEDULES:
            try:
                gradients = self.gradients(*schedule, any_order, changes)
            except EmulationError as error:
                return str(error)
            if not all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True)):
                return schedule
        return None

    def errors(self):
        grads = {"grad_output": self.grad_output, "grad_lse": self.grad_lse}
        wanted = answer(self.call.query, self.call.key, self.call.value, self.trial.pattern, **grads)
        return [error(a, b) for a, b in zip(self.gradients(*SCHEDULES[0]), wanted[2:], strict=True)]


FAULTS_OF_TURNS = {
    "turn one too high": {"stream_in_turn": ("gl.load(p_entry + 5), ", "gl.load(p_entry + 5) + 1, ")},
    "turn not waited for": {"sum_piece": ("bar.sync $1, 160", "bar.arrive $1, 160")},
    "any turn passes": {"keep_turns": ("ld.acquire.gpu", "bar.warp.sync")},
    "counted before it is added": {"keep_turns": ("bar.sync $1, 288", "bar.arrive $1, 288")},
    "counted without a release": {"keep_turns": ("red.release.gpu", "red.relaxed.gpu")},
    "added after it is counted": {
        "sum_piece": (
            "    leave_piece(p_sum, tile, piece, C, D)\n    if TURNS:\n"
            "        gl.inline_asm_elementwise(\n"
            '            "bar.arrive $1, 288; mov.b32 $0, 0;", "=r,n", [ADDED], dtype=gl.int32, is_pure=False, pack=1\n'
            "        )\n",
            "    if TURNS:\n"
            "        gl.inline_asm_elementwise(\n"
            '            "bar.arrive $1, 288; mov.b32 $0, 0;", "=r,n", [ADDED], dtype=gl.int32, is_pure=False, pack=1\n'
            "        )\n"
            "    leave_piece(p_sum, tile, piece, C, D)\n",
        )
    },
    "slot free before its turn is read": {
        "keep_turns": (
            "        p_turn = p_turns + read(b_tile.index(slot), TILE_SUM)\n        sync_warp()\n"
            "        mbarrier.arrive(empty.index(slot), count=1)\n",
            "        mbarrier.arrive(empty.index(slot), count=1)\n        sync_warp()\n"
            "        p_turn = p_turns + read(b_tile.index(slot), TILE_SUM)\n",
        )
    },
    "first item of a program fixed": {
        "load_backward_tiles": (
            "item = claim_in_order(p_next, items) if TURNS else gl.program_id(0)",
            "item = gl.program_id(0)",
        ),
        "claim_in_order": ("    return item", "    return item + gl.num_programs(0)"),
    },
}
"""Faults in the order of additions, each detected by some schedule."""


def order_sums(ordered):
    """Sum reproducible dQ in turns for every plan, or for none."""
    configs = hopper_gradients.BACKWARD_CONFIGS
    configs.update({d: replace(config, ordered=ordered) for d, config in configs.items()})


def run_in_turns():
    """Trials in turns, each beside its control in any order, then faults."""
    # Rows are split for one number of programs, whatever number runs.
    hopper_gradients.split = lambda lowered, work, batch, _, *rest, **more: hopper_split.split(
        lowered, work, batch, PROGRAMS, *rest, **more
    )
    for name, trial in IN_TURNS.items():
        case = InTurns(trial)
        line = {"errors": case.errors(), "in turns": case.first_difference(), "any order": case.first_difference(True)}
        print(json.dumps({"trial": name} | line), flush=True)
    order_sums(True)
    # The host may not read the lists of learned plans; they compute dQ by rows.
    print(json.dumps({"learned": run_learned(0, 256, 2)}), flush=True)
    for name in ("padded, lengths", "padded, ladder"):
        trial, kind = PADDED[name]
        print(json.dumps({"padded": run(trial, torch.float32, padding=padding_of(trial, kind))}), flush=True)
    case = InTurns(IN_TURNS["window"])
    for name, changes in FAULTS_OF_TURNS.items():
        print(json.dumps({"fault": name, "found": case.first_difference(changes=changes)}), flush=True)


def replace_what_needs_a_gpu():
    emulate()
    hopper_launch.describe = Descriptor.of
    hopper_launch.entry_of = lambda compiled: None
    hopper_launch.compile_together = lambda launches, tensors: None
    hopper_launch.LaunchStep.run_public = lambda self, *tensors: self.launch.kernel[self.grid](
        *self.public_arguments(tensors), **({} if isinstance(self.launch.kernel, Kernel) else self.launch.options)
    )
    hopper_backend.processors = hopper_gradients.processors = lambda device: PROGRAMS
    hopper_backend.item_counters = lambda device, count: torch.zeros(count, dtype=torch.int32)
    torch.cuda.current_device = lambda: None
    hopper_split.SHORTEST_PIECE = ROWS**2
    hopper_split.ROWS_A_PIECE = 1
    selection_backend.allows_host_sync = lambda device: False
    hopper_backend.why_not = lambda call: None
    hopper_gathered.why_not = lambda *about: None


def run_plans():
    """Parts and pieces of plans, learned plans and lists."""
    for name, trial in TRIALS.items():
        print(
            json.dumps({"trial": name} | run(trial, torch.float16 if name == "half precision" else torch.float32)),
            flush=True,
        )
    for name, trial in STRIDED.items():
        print(json.dumps({"trial": name} | run(trial, torch.float32)), flush=True)
    reproducible_gradients(False)
    for name, trial in ANY_ORDER.items():
        print(json.dumps({"trial": name} | run(trial, torch.float32)), flush=True)
    reproducible_gradients(True)
    count_launches()
    for name, *shape in (
        ("learned", 0, 256, 2),
        ("learned, other lists", 4, 256, 2),
        ("learned, causal", 1, 256, 2),
        ("learned, ragged", 2, 300, 1),
        ("learned by tokens", 3, 384, 2, True),
        ("learned, padded", 0, 256, 2, False, True),
        ("learned, padded, other lists", 4, 256, 2, False, True),
        ("learned, blocks of 64", 1, 300, 1, False, False, 64),
    ):
        print(json.dumps({"trial": name} | run_learned(*shape)), flush=True)
    for name, call in INDICES.items():
        backend = "auto" if call.per_token else "hopper"
        if name.endswith("in chunks"):
            gathered_attention.GatheredAttend._most_rows = lambda *_: (0, 128)
            selected._cached.clear()
        errors = call.errors(backend, torch.float16 if call.per_token else torch.float32, widths=(64, 64))
        print(json.dumps({"trial": name} | errors), flush=True)


def print_orders(name, errors):
    for order, one in errors.items():
        print(json.dumps({"trial": name if order else f"{name}, dQ in any order"} | one), flush=True)


def run_widths():
    """Widths and scales, with either order of the sums of dQ."""
    for name, trial in WIDTHS.items():
        dtype = torch.float16 if "half precision" in name else torch.float32
        print_orders(name, run_orders(trial, dtype))
    for name, (trial, scale) in SCALES.items():
        print_orders(name, run_orders(trial, torch.float32, scale))
    for name, (trial, rows) in RUNS.items():
        print_orders(name, run_by_rows(trial, rows))


def run_padding():
    """Padding and sinks, with either order of the sums of dQ."""
    for name, (trial, kind) in PADDED.items():
        dtype = torch.float16 if "half" in name else torch.float32
        print_orders(name, run_orders(trial, dtype, padding=padding_of(trial, kind)))
    for name, (trial, first) in SINKS.items():
        dtype = torch.float16 if "half" in name else torch.float32
        sink = torch.randn(trial.heads, generator=torch.Generator().manual_seed(2)).to(dtype)
        sink[0] = first
        padding = padding_of(trial, "random") if "padded" in name else None
        orders = ORDERS if name in SINKS_IN_ANY_ORDER else (True,)
        print_orders(name, run_orders(trial, dtype, padding=padding, sink=sink, orders=orders))


if __name__ == "__main__":
    start_interpreting()
    replace_what_needs_a_gpu()
    if sys.argv[1:] == ["--turns"]:
        run_in_turns()
        sys.exit()
    order_sums(False)
    if sys.argv[1:] == ["--faults"]:
        hopper_backend.processors = hopper_gradients.processors = lambda device: 3
        hopper_split.SHORTEST_PIECE = 2**40
        for name, change in (FAULTS | SMALL_FAULTS | PADDING_FAULTS).items():
            print(json.dumps({"fault": name, "found": run_fault(name, change)}), flush=True)
        sys.exit()
    {"--plans": run_plans, "--widths": run_widths, "--padding": run_padding}[sys.argv[1]]()
