"""Run problems through the launches of the Hopper backend on the CPU and print the errors against the oracle.

Gluon kernels run in `gluon_emulator`; the Triton kernels that join pieces of long rows and prepare the backward run in
Triton's interpreter. A program of its own: Triton decides when it is imported whether to interpret.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from cases import Problem
from conftest import ALLOCATORS, poisoned
from index_calls import IndexCall
from kernels.gluon_emulator import Descriptor, EmulationError, Kernel
from kernels.interpreter import skip_repeated_work
from kernels.test_selection import drawn, inputs, seen_pairs
from oracle import answer, dense_attention, error

from dilated_attention_pytorch.kernels.call import AttentionCall, reproducible_gradients
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.kernels.hopper import backward as hopper_gradients
from dilated_attention_pytorch.kernels.hopper import dkv_kernel as hopper_backward
from dilated_attention_pytorch.kernels.hopper import dq_kernel as hopper_backward_rows
from dilated_attention_pytorch.kernels.hopper import forward_kernel as hopper_forward
from dilated_attention_pytorch.kernels.hopper import split_rows as hopper_split
from dilated_attention_pytorch.kernels.launch import launcher as hopper_launch
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.selection import attention as selected
from dilated_attention_pytorch.selection import backend as selection_backend
from dilated_attention_pytorch.selection.kernels import gathered_attention, hopper_gathered
from dilated_attention_pytorch.selection.kernels import hopper_gathered_kernel as hopper_tokens

ROWS = 128
PROGRAMS = 20


def problem(text, n, block_size=128, d=64, **more):
    return Problem(name="", text=text, n=n, d=d, e=d, block_size=block_size, **more)


UNLIKE = "(random:0.8;block=128;seed=1;per_head=1 & global:128;queries=1) | window:60"
TRIALS = {
    "no long row": problem("window:100", 600, batch=3),
    "global rows and columns": problem("global:128;queries=1 | window:60", 1024, batch=2),
    "a ragged last row": problem("global:128 | blocks:,,,,,,,0 1 2 3 4 5 6 7;block=128", 1000),
    "causal, grouped heads": problem("(global:128;queries=1 | window:60) & causal", 1024, heads=4, key_heads=2),
    "a list a head": problem(UNLIKE, 1024),
    "groups of unlike heads": problem(UNLIKE, 1024, key_heads=1),
    "blocks of 256": problem("global:256;queries=1 | window:60", 1600, block_size=256),
    "half precision": problem("global:128;queries=1 | window:80", 1024),
    "some rows see no key": problem("blocks:,,,0 1,,,,0 1 2 3 4 5 6 7;block=128 & causal", 1000),
}
STRIDED = {
    "ladder": problem("dilated:128x1,512x4", 600),
    "ladder, causal, grouped heads": problem("dilated:256x1,640x2 & causal", 700, heads=4, key_heads=2),
    "ladder, residues of two lengths": problem("dilated:200x3,701x5", 701, heads=3, key_heads=3),
    "ladder, width 128": problem("dilated:256x1,1024x2", 1000, d=128, batch=2, heads=1, key_heads=1),
}
ANY_ORDER = {
    "any order": problem("window:100 | global:40", 600, key_heads=1),
    "any order, causal, width 128": problem("window:100 & causal", 400, d=128),
    "any order, blocks of 256, ragged": problem("random:0.6;block=256", 900, block_size=256),
    "any order, ladder": problem("dilated:128x1,512x4", 600),
    "any order, ladder, width 128": problem("dilated:200x3,701x5", 701, d=128, heads=3, key_heads=1),
}
"""With dQ summed by the kernel of dK and dV."""


INDICES = {
    "indices, rows without blocks": IndexCall(False, False, 512, 128, 2, 2, 1, 2, 2, wild=True),
    "indices, causal, rows without blocks": IndexCall(False, True, 512, 128, 2, 2, 1, 1, 2, wild=True),
    "indices, ragged, rows without blocks": IndexCall(False, False, 300, 128, 1, 2, 2, 2, 1, wild=True),
    "indices by tokens": IndexCall(True, False, 256, 128, 1, 2, 1, 1, 2, wild=True),
    "indices by causal tokens": IndexCall(True, True, 256, 128, 1, 2, 1, 1, 2, wild=True),
    "indices by causal tokens in chunks": IndexCall(True, True, 256, 128, 1, 2, 1, 1, 2, wild=True),
}
"""Calls on indices; of each by blocks, some rows list none. A chunk is 128 tokens of a query head."""


def run(trial, dtype):
    query, key, value, grad_output, grad_lse = trial.inputs(dtype)
    grad_lse = grad_lse.float()
    plan = make_plan(trial.pattern, trial.n, trial.heads, trial.block_size)
    call = AttentionCall(query, key, value, plan, trial.d**-0.5)
    runner = hopper_backend.prepare(call)
    output, lse = runner.forward(call)
    gradients = runner.backward(call, output, lse, grad_output, grad_lse)
    wanted = answer(query, key, value, trial.pattern, grad_output=grad_output, grad_lse=grad_lse)
    named = zip(wanted._fields, (output, lse, *gradients), wanted, strict=True)
    errors = {name: error(got, want) for name, got, want in named}
    if trial not in TRIALS.values():
        return errors
    (backward,) = runner._backward._launches.values()
    rooms = [room for room, _ in runner.forward.pieces[:1]] or [()], backward.pieces or [()] * 3
    pieces = [room[2] // trial.block_size if room else 0 for side in rooms for room in side]
    return errors | {"pieces": pieces}


def run_learned(seed, n, batch, per_token=False):
    """Attention over a drawn selection, as a GPU runs it; all of one shape have one launch."""
    # In float32, the kernel for tokens could not tell its accumulator from rows of dQ.
    dtype = torch.float16 if per_token else torch.float32
    chosen = drawn(batch, 2, n, 128, is_causal=seed % 2 > 0, per_token=per_token, most=2, local=1, seed=seed)
    given = [x.to(dtype).requires_grad_() for x in inputs(chosen, 1, 64, 64)]
    slopes = torch.randn(batch, 2, n, 64, dtype=dtype), torch.randn(batch, 2, n)
    exact = [x.detach().double().requires_grad_() for x in given]
    options = {"backend": "auto" if per_token else "hopper", "enable_gqa": True, "return_lse": True}
    found = selected.selected_attention(*given, chosen, **options)
    wanted = dense_attention(*exact, seen_pairs(chosen).double())
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
    "dK over keys that the sibling reads": ("gather_keys", "        meet()\n", ""),
    "tile free while dQ reads it": ("gather_row_step", "empty.index(behind)", "empty.index(slot)"),
    "claims not reset": ("next_item", "claimed == items - 1", "claimed == items"),
    "band of a mask moved": (
        "stream_head",
        "low = gl.load(p_entry + 2) - o_row + o_col",
        "low = gl.load(p_entry + 2) - o_row",
    ),
}
"""Faults of the kernels: a function, a text of its source, and its replacement."""


def run_fault(change):
    """Largest error of a call whose kernels have a fault, or the name of what it raised."""
    emulate({change[0]: change[1:]})
    trial = problem("window:150 & causal", 900, block_size=256)
    try:
        counters = torch.zeros(8, dtype=torch.int32)
        hopper_backend.item_counters = lambda device, count: counters[:count]
        reproducible_gradients(change[0] == "gather_row_step")
        return max(max(run(trial, torch.float32).values()) for _ in range(2))
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


def emulate(changes=None):
    for module, name, kernel in GLUON:
        setattr(module, name, Kernel(kernel, changes=changes))


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


if __name__ == "__main__":
    skip_repeated_work()
    replace_what_needs_a_gpu()
    for owner, name in ALLOCATORS:
        setattr(owner, name, poisoned(getattr(owner, name)))
    if sys.argv[1:] == ["--faults"]:
        hopper_backend.processors = hopper_gradients.processors = lambda device: 3
        hopper_split.SHORTEST_PIECE = 2**40
        for name, change in FAULTS.items():
            print(json.dumps({"fault": name, "found": run_fault(change)}), flush=True)
        sys.exit()
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
    ):
        print(json.dumps({"trial": name} | run_learned(*shape)), flush=True)
    for name, call in INDICES.items():
        backend = "auto" if call.per_token else "hopper"
        if name.endswith("in chunks"):
            gathered_attention.GatheredAttend._most_rows = lambda *_: (0, 128)
        errors = call.errors(backend, torch.float16 if call.per_token else torch.float32, widths=(64, 64))
        print(json.dumps({"trial": name} | errors), flush=True)
