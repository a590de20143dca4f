"""Run problems through the launches of the Hopper backend on the CPU and print the errors against the oracle.

The Gluon kernels, which need their GPU, are written out in torch, from the arguments they are launched with. What joins
pieces of long rows, and what prepares the backward, are the kernels themselves in Triton's interpreter. A program of its
own: Triton decides when it is imported whether to interpret.
"""

import json
import math
import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch
from cases import Problem
from conftest import ALLOCATORS, poisoned
from index_calls import IndexCall
from kernels.interpreter import skip_repeated_work
from kernels.test_selection import drawn, inputs, seen_pairs
from oracle import answer, dense_attention, error
from torch.nn.functional import pad

from dilated_attention_pytorch.kernels.call import AttentionCall
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
from dilated_attention_pytorch.selection.kernels import hopper_gathered
from dilated_attention_pytorch.selection.kernels import hopper_gathered_kernel as hopper_tokens

ROWS = 128
PROGRAMS = 20


def problem(text, n, block_size=128, **more):
    return Problem(name="", text=text, n=n, d=64, e=64, block_size=block_size, **more)


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


class Kernel:
    """A kernel written out in torch: `run` is given its arguments by name."""

    def __init__(self, kernel, run):
        self.names, self.run = kernel.arg_names, run

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.run(SimpleNamespace(**dict(zip(self.names, arguments, strict=True))))


def tile_of(tensor, batch, head, first, rows):
    """Rows of a head, float64, with zeros past the end, as TMA reads them."""
    found = tensor[batch, head, first : first + rows].double()
    return torch.cat((found, found.new_zeros(rows - len(found), found.shape[1])))


def put(tensor, batch, head, first, values):
    """Write rows of a head but for those past the end, as TMA does."""
    room = tensor[batch, head, first : first + len(values)]
    room.copy_(values[: len(room)])


def pairs_of(a, row, o_row, whole, partial, sign=1):
    """Streamed tiles of a row of a walk, and which of the pairs with the 128 rows held count, float64.

    A band is of the difference held minus streamed, and of its negative where `sign` is -1.
    """
    shifts = torch.arange(32, dtype=torch.int32)
    full_begin, full_end, full_base, begin, end, base = row
    for entry in whole[full_begin:full_end].tolist():
        yield full_base + entry, torch.ones(ROWS, a.BLOCK, dtype=torch.float64)
    for entry, mask, low, high in partial[begin:end].tolist():
        difference = sign * (o_row + torch.arange(ROWS)[:, None] - torch.arange(a.BLOCK))
        bits = ((a.p_bits[mask, o_row : o_row + ROWS, :, None] >> shifts) & 1).flatten(1)
        band = (difference >= low) & (difference <= high)
        yield base + entry, (band if low <= high else bits[..., : a.BLOCK]).double()


def forward(a):
    assert a.p_work.shape[1] == (9 if a.SPLIT else 8)
    stored_rows = a.o_desc.shape[2] if a.SPLIT else a.n
    for item in range(a.items):
        batch = item // a.items_a_batch
        head, tile, begin, full, base, partial_begin, partial, partial_base, *slot = a.p_work[
            item % a.items_a_batch
        ].tolist()
        assert full + partial > 0
        first = tile * ROWS
        row = begin, begin + full, base, partial_begin, partial_begin + partial, partial_base
        query = tile_of(a.q_desc, batch, head, first, ROWS)
        scores, values = [], []
        for block, seen in pairs_of(a, row, first % a.BLOCK, a.p_full, a.p_partial, -1):
            key, value = (tile_of(t, batch, head // a.group, block * a.BLOCK, a.BLOCK) for t in (a.k_desc, a.v_desc))
            seen = seen * (block * a.BLOCK + torch.arange(a.BLOCK) < a.n)
            scores.append(query @ key.T * a.scale * math.log(2) + seen.log())
            values.append(value)
        lse = torch.cat(scores, 1).logsumexp(1)
        weights = (torch.cat(scores, 1) - torch.where(lse.isinf(), 0.0, lse)[:, None]).exp()
        stored = slot[0] * ROWS if a.SPLIT else first
        put(a.o_desc, batch, head, stored, weights @ torch.cat(values))
        lse_of_head = a.p_lse.flatten()[(batch * a.heads + head) * stored_rows :][:stored_rows]
        lse_of_head[stored : stored + ROWS] = lse[: stored_rows - stored]


def held_items(a, blocks, by_key):
    """Of every item: batch, head, first row, where it is stored, and for each head the row of its walk."""
    for item in range(a.items):
        batch = item // a.items_a_batch
        held, tile, steps, slot = a.p_work[item % a.items_a_batch].tolist()
        stored = slot * ROWS if a.SPLIT else tile * ROWS
        heads = range(held * a.group, (held + 1) * a.group) if by_key else [held]
        block = (stored if a.SPLIT else tile * ROWS) // a.BLOCK
        rows = [(head, a.p_walk[int(a.p_class[head]) * blocks + block].tolist()) for head in heads]
        assert sum(row[1] - row[0] + row[4] - row[3] for _, row in rows) == steps
        yield batch, held, tile * ROWS, stored, rows


def stats_of(a):
    """LSE in log2 units, +inf of a row that does not exist or has no key, and delta, (B, H, rows of whole blocks)."""
    size = len(a.q_desc), a.heads, a.n
    lse = torch.where(a.p_lse.isinf(), math.inf, a.p_lse.double() / math.log(2)).view(size)
    delta = a.p_delta[: math.prod(size)].view(size).double()
    return pad(lse, (0, a.BLOCK), value=math.inf), pad(delta, (0, a.BLOCK))


def key_gradients(a):
    assert not a.DQ
    lse, delta = stats_of(a)
    for batch, held, first, stored, rows in held_items(a, a.key_blocks, True):
        key, value = (tile_of(t, batch, held, first, ROWS) for t in (a.k_desc, a.v_desc))
        dk, dv = torch.zeros_like(key), torch.zeros_like(value)
        exist = (first + torch.arange(ROWS) < a.n)[:, None]
        for head, row in rows:
            for block, seen in pairs_of(a, row, first % a.BLOCK, a.p_whole, a.p_partial):
                here = slice(block * a.BLOCK, (block + 1) * a.BLOCK)
                query, grad = (tile_of(t, batch, head, here.start, a.BLOCK) for t in (a.q_desc, a.do_desc))
                weights = (key @ query.T * a.scale_log2 - lse[batch, head, here]).exp2() * seen * exist
                ds = weights * (value @ grad.T - delta[batch, head, here])
                dk += ds @ query * a.scale
                dv += weights @ grad
        put(a.dk_desc, batch, held, stored, dk)
        put(a.dv_desc, batch, held, stored, dv)


def query_gradient(a):
    lse, delta = stats_of(a)
    for batch, head, first, stored, ((_, row),) in held_items(a, a.query_blocks, False):
        query, grad = (tile_of(t, batch, head, first, ROWS) for t in (a.q_desc, a.do_desc))
        own = slice(first, first + ROWS)
        dq = torch.zeros_like(query)
        for block, seen in pairs_of(a, row, first % a.BLOCK, a.p_whole, a.p_partial):
            key, value = (tile_of(t, batch, head // a.group, block * a.BLOCK, a.BLOCK) for t in (a.k_desc, a.v_desc))
            seen = seen * (block * a.BLOCK + torch.arange(a.BLOCK) < a.n)
            weights = (query @ key.T * a.scale_log2 - lse[batch, head, own, None]).exp2() * seen
            dq += weights * (grad @ value.T - delta[batch, head, own, None]) @ key * a.scale
        put(a.dq_desc, batch, head, stored, dq)


def chosen_gradients(a):
    """dK and dV are added, and what gathered rows get is stored with its columns in the order of the registers."""
    assert [stride * 8 for stride in (a.sq_b, a.sq_h, a.sq_n)] == list(a.p_q.stride()[:3])
    assert [stride * 8 for stride in (a.sg_b, a.sg_h, a.sg_n)] == list(a.p_do.stride()[:3])
    assert a.p_source.shape[1] == a.rows
    for key_head, order in enumerate(a.p_order.tolist()):
        assert sorted(order) == [*range(a.key_tiles)]
        for tile in order:
            sample, first = tile // a.blocks, tile % a.blocks * a.BLOCK
            key, value = (tile_of(t, sample, key_head, first, a.BLOCK) for t in (a.k_desc, a.v_desc))
            dk, dv = torch.zeros_like(key), torch.zeros_like(value)
            for head in range(key_head * a.group, (key_head + 1) * a.group):
                begin, end = (a.p_first[head, tile : tile + 2] * a.BLOCK).tolist()
                source = a.p_source[head, begin:end].long()
                some = begin + (source >= 0).nonzero()[:, 0]
                token = a.p_source[head, some].long() - sample * a.n
                query, grad = (t[sample, head, token].double() for t in (a.p_q, a.p_do))
                lse, delta = (t[sample, a.first_head + head, token].double() for t in (a.p_lse, a.p_delta))
                weights = (key @ query.T * a.scale_log2 - lse / math.log(2)).exp2()
                ds = weights * (value @ grad.T - delta)
                dk += ds @ query * a.scale
                dv += weights @ grad
                got = (ds.T @ key).unflatten(1, (-1, 8, 4, 2)).transpose(2, 3).flatten(1)
                a.p_part[head, some] = got.to(a.p_part.dtype)
            for total, more in ((a.dk_desc, dk), (a.dv_desc, dv)):
                put(total, sample, key_head, first, more + tile_of(total, sample, key_head, first, a.BLOCK))


INDICES = {
    "indices, rows without blocks": IndexCall(False, False, 512, 128, 2, 2, 1, 2, 2, wild=True),
    "indices, causal, rows without blocks": IndexCall(False, True, 512, 128, 2, 2, 1, 1, 2, wild=True),
    "indices, ragged, rows without blocks": IndexCall(False, False, 300, 128, 1, 2, 2, 2, 1, wild=True),
    "indices by tokens": IndexCall(True, False, 256, 128, 1, 2, 1, 1, 2, wild=True),
    "indices by causal tokens": IndexCall(True, True, 256, 128, 1, 2, 1, 1, 2, wild=True),
}
"""Calls on indices; of each by blocks, some rows list none."""


def run(trial, dtype):
    query, key, value, grad_output, grad_lse = trial.inputs(dtype)
    grad_lse = grad_lse.float()
    plan = make_plan(trial.pattern, trial.n, trial.heads, trial.block_size)
    call = AttentionCall(query, key, value, plan, 0.125)
    runner = hopper_backend.prepare(call)
    output, lse = runner.forward(call)
    gradients = runner.backward(call, output, lse, grad_output, grad_lse)
    wanted = answer(query, key, value, trial.pattern, grad_output=grad_output, grad_lse=grad_lse)
    named = zip(wanted._fields, (output, lse, *gradients), wanted, strict=True)
    (backward,) = runner._backward._launches.values()
    rooms = [room for room, _ in runner.forward.pieces[:1]] or [()], backward.pieces or [()] * 3
    pieces = [room[2] // trial.block_size if room else 0 for side in rooms for room in side]
    return {name: error(got, want) for name, got, want in named} | {"pieces": pieces}


def run_learned(seed, n, batch, per_token=False):
    """Attention over a drawn selection, as a GPU runs it; all of one shape have one launch."""
    chosen = drawn(batch, 2, n, 128, is_causal=seed % 2 > 0, per_token=per_token, most=2, local=1, seed=seed)
    given = [x.float().requires_grad_() for x in inputs(chosen, 1, 64, 64)]
    slopes = torch.randn(batch, 2, n, 64), torch.randn(batch, 2, n)
    exact = [x.detach().double().requires_grad_() for x in given]
    options = {"backend": "auto" if per_token else "hopper", "enable_gqa": True, "return_lse": True}
    found = selected.selected_attention(*given, chosen, **options)
    wanted = dense_attention(*exact, seen_pairs(chosen).double())
    grads = (torch.autograd.grad(one, leaves, slopes) for one, leaves in ((found, given), (wanted, exact)))
    found, wanted = ([*one, *more] for one, more in zip((found, wanted), grads, strict=True))
    names = "output", "lse", "query", "key", "value"
    launches = BUILT["forward"]
    return {name: error(a, b) for name, a, b in zip(names, found, wanted, strict=True)} | {"launches": launches}


BUILT = {"forward": 0}


def count_launches():
    build = hopper_backend.ForwardLaunch.__init__

    def counted(*arguments):
        BUILT["forward"] += 1
        build(*arguments)

    hopper_backend.ForwardLaunch.__init__ = counted


def replace_what_needs_a_gpu():
    hopper_forward.attention_fwd_kernel = Kernel(hopper_forward.attention_fwd_kernel, forward)
    hopper_backward.attention_dkv_bwd_kernel = Kernel(hopper_backward.attention_dkv_bwd_kernel, key_gradients)
    hopper_backward_rows.attention_dq_bwd_kernel = Kernel(hopper_backward_rows.attention_dq_bwd_kernel, query_gradient)
    hopper_tokens.chosen_bwd_kernel = Kernel(hopper_tokens.chosen_bwd_kernel, chosen_gradients)
    hopper_launch.describe = lambda tensor, rows, axis=None: (tensor, None)
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
    for name, trial in TRIALS.items():
        print(
            json.dumps({"trial": name} | run(trial, torch.float16 if name == "half precision" else torch.float32)),
            flush=True,
        )
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
        errors = call.errors(backend, torch.float32, widths=(64, 64))
        print(json.dumps({"trial": name} | errors), flush=True)
