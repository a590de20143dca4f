"""Learned attention on a GPU beside dense: forward and backward with the scorer learning, after a check in float64.

    python benchmarks/adaptive_gpu.py --out benchmarks/results/adaptive_h200.jsonl

A line of JSON a length, without a causal mask and with one, under which tokens choose, or blocks where `rows` says so:
seconds of choosing, of a forward pass and of a training step, choosing included; the same of torch's dense attention by
cuDNN and flash, and with the same selection of FlexAttention and FlashAttention-4. Calls follow one another in a
stream, as in training, and so the host may be what takes the time; `in_a_graph` are the same captured in a CUDA graph,
which the host only starts. What is divided by one another is timed by turns. Of lengths at which dense attention may
win, `dense_below` is a forward pass of a layer told so, beside what torch's attention chooses for the same tensors:
its function called by itself, and in a module, which is what a model would have in the layer's place. Lines after a
failed capture of a graph are measured by a new process, as the failure disables the generator of its own. `lists` says
which heads have a list: each of 8 ("head"), each 16 of 64 query heads that share a key head ("group"), or each of those
64 ("single"). To measure the latter two alone:

    python benchmarks/adaptive_gpu.py --out FILE --lists group single

`--chunk` sets the MiB of partial outputs in a chunk of a call in which tokens select, four of which run whole.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from dilated_attention_pytorch.kernels.external import flash4, flex
from dilated_attention_pytorch.kernels.external.block_lists import Band, Lists, lists_of
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive
from dilated_attention_pytorch.selection import attend
from dilated_attention_pytorch.selection.attention import selected_attention
from dilated_attention_pytorch.selection.backend import select
from dilated_attention_pytorch.selection.types import Selection
from dilated_attention_pytorch.tools.bench.measure import clock, facts
from dilated_attention_pytorch.tools.bench.peers import NOT_INSTALLED, SDPA
from dilated_attention_pytorch.tools.bench.results import append

LIMIT = 235
"""Seconds after which a GPU run ends itself, whatever hangs."""
LAST_START = 180
"""Seconds after which it begins nothing more."""
LENGTHS = (32768, 131072, 2**20, 16384, 8192, 4096, 2048)
"""What must be fast first, then down to where dense attention wins."""
UNITS = (1, 4, 16)
"""Tokens of a sub-block: the default where tokens select, where blocks select, and that of earlier figures."""
ROWS = "block", "token"
"""Who may choose."""


class ListedHeads(NamedTuple):
    """Heads of a layer, and which of them share a list."""

    heads: int
    key_heads: int
    config: dict[str, Any]
    units: tuple[int, ...] | None = None
    """Score units; None for those of the command"""
    lengths: tuple[int, ...] | None = None


LISTS = {
    "head": ListedHeads(8, 8, {}),
    "group": ListedHeads(64, 4, {"select": "group", "match_rank": 16}, (1,), (32768, 131072)),
    "single": ListedHeads(64, 4, {}, (4,), (32768, 131072)),
}
"""Each of 8 heads; all query heads of a key head, by fine scores; each of as many, by scores of four tokens."""
FORWARD_ONLY = 2**19
"""Tokens from which dense attention is timed without its backward, at 99 % sparsity."""
SHORT = 2**15
"""Tokens below which a layer is also told to attend to everything."""
GATE = 2e-2
"""Largest error of a checked row or column in bfloat16, over the norm of the exact one."""


def lines(
    lengths: Iterable[int],
    sparsity: float,
    device: str = "cuda",
    rows: Iterable[str] = ROWS,
    units: Iterable[int] = UNITS,
    lists: Iterable[str] = LISTS,
    rank: int | None = None,
    first: int = 0,
    elapsed: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """A line of results for each length and score unit, without and with a causal mask, until the time is up.

    `rank` replaces the `match_rank` of single heads. The first lines may be left to a process before this one, which
    ran for `elapsed` seconds.
    """
    begun, number = time.monotonic() - elapsed, 0
    masks = ((False, "block"), (True, "token"), (True, "block"))
    wanted = [(n, name, unit) for n in lengths for name in lists for unit in LISTS[name].units or units]
    for n, name, unit in wanted:
        listed = LISTS[name]
        if device == "cuda" and n not in (listed.lengths or (n,)):
            continue
        for is_causal, granularity in masks:
            if is_causal and (n >= FORWARD_ONLY or (granularity == "block" and n < SHORT)):
                continue
            if granularity not in rows:
                continue
            number += 1
            if number <= first:
                continue
            line: dict[str, Any] = {"n": n, "sparsity": 0.99 if n >= FORWARD_ONLY else sparsity, "causal": is_causal}
            line |= {"rows": granularity, "score_unit": unit, "lists": name, "heads": [listed.heads, listed.key_heads]}
            if time.monotonic() - begun > LAST_START:
                yield line | {"skipped": f"began nothing after {LAST_START} s"}
                continue
            try:
                options = {"base_sparsity": line["sparsity"], "granularity": granularity, "score_unit": unit}
                options |= listed.config if rank is None else {"match_rank": rank} | listed.config
                config = AdaptiveConfig(**options)
                line["match_rank"] = config.match_rank
                yield line | measured(n, config, is_causal, device, listed.heads, listed.key_heads)
            except torch.OutOfMemoryError as problem:
                yield line | {"skipped": str(problem).split(".")[0]}
            if device == "cuda":
                torch.cuda.empty_cache()


def measured(
    n: int, config: AdaptiveConfig, is_causal: bool, device: str, heads: int = 8, key_heads: int = 8
) -> dict[str, Any]:
    """Seconds of every way to compute one layer's attention, and how ours compares; nothing where the check fails."""
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    torch.manual_seed(0)
    layer = BlockSparseAdaptive([n], [1], heads, 64, config, num_kv_heads=key_heads).to(device).eval()
    learner = copy.deepcopy(layer).train()
    x = [torch.randn(1, n, many, 64, **made).requires_grad_() for many in (heads, key_heads, key_heads)]
    q, k, v = (t.transpose(1, 2) for t in x)
    selection = choose(layer, q, k, is_causal)
    errors = checked(q, k, v, selection)
    line: dict[str, Any] = {"errors": errors, "density": float(selection.density())}
    if not max(errors.values()) <= GATE:
        return line | {"skipped": "the check failed"}
    grad, leaves = torch.randn_like(x[0]), [*x, *learner.parameters()]
    with torch.no_grad():
        line["learned_seconds"] = timed(lambda: layer(*x, is_causal), device)
    steps = [
        lambda: choose(layer, q, k, is_causal),
        lambda: step(lambda: learner(*x, is_causal), leaves, grad),
    ]
    line["choosing_seconds"], line["learned_with_backward_seconds"] = by_turns(steps, device)
    runs = dense_runs(q, k, v, is_causal)
    same, reasons = same_selection_runs(q, k, v, selection)
    with torch.no_grad():
        ours = selected_attention(q, k, v, selection, enable_gqa=True)
        for name, run in tuple(same.items()):
            try:
                errors[name] = float((run() - ours).double().norm() / ours.double().norm())
            except Exception as problem:
                reasons[name] = told(problem)
            if not errors.get(name, 1.0) <= GATE:
                reasons.setdefault(name, "gives something else")
                del same[name]
    grad = grad.transpose(1, 2)
    for name, run in (runs | same).items():
        try:
            with torch.no_grad():
                line[f"{name}_seconds"] = timed(run, device)
            if n < FORWARD_ONLY:
                line[f"{name}_with_backward_seconds"] = timed(lambda run=run: step(run, x, grad), device)
        except Exception as problem:
            reasons[name] = told(problem)
    for kind in ("seconds", "with_backward_seconds"):
        dense = best_dense(line, kind)
        if dense is not None:
            faster = dense / line[f"learned_{kind}"]
            whole = kind.removesuffix("seconds")
            line |= {f"{whole}speedup": faster, f"{whole}efficiency": faster * line["density"]}
        line[f"choosing_share_of_{kind}"] = line["choosing_seconds"] / line[f"learned_{kind}"]
    if n < SHORT and heads == key_heads:
        line |= told_to_be_dense(x, replace(config, dense_below=n + 1), is_causal, device)
    if device == "cuda" and n < FORWARD_ONLY:
        try:
            line["in_a_graph"] = in_a_graph(learner, x, is_causal)
        except Exception as problem:
            reasons["in_a_graph"] = told(problem)
    return line | {"not_run": reasons}


@torch.no_grad()
def choose(layer: BlockSparseAdaptive, q: Tensor, k: Tensor, is_causal: bool) -> Selection:
    """Blocks that a layer selects for (B, H, N, D) queries and keys."""
    return select(layer.score_blocks(q, k, is_causal), q.shape[2], layer.explores())


class TorchOwn(torch.nn.Module):
    """Torch's attention as a module over (B, N, H, D)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)


@torch.no_grad()
def told_to_be_dense(x: list[Tensor], config: AdaptiveConfig, is_causal: bool, device: str) -> dict[str, float]:
    """Seconds of a layer told to attend to everything, and how torch's attention compares, also in CUDA graphs.

    Torch's is called by itself, and as a module: the host's time for a call of any module is in that, as in ours.
    """
    layer = BlockSparseAdaptive([x[0].shape[1]], [1], 8, 64, config).to(device).eval()

    def torch_own() -> Tensor:
        found = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in x), is_causal=is_causal)
        return found.transpose(1, 2)

    module = TorchOwn().eval()
    runs = [lambda: layer(*x, is_causal), torch_own, lambda: module(*x, is_causal)]
    ours, others, modules = by_turns(runs, device)
    found = {"dense_below_seconds": ours, "dense_below_torch_seconds": others, "dense_below_speedup": others / ours}
    found |= {"dense_below_module_seconds": modules, "dense_below_module_speedup": modules / ours}
    if device == "cuda":
        ours, others = by_turns([captured(run) for run in runs[:2]], device)
        found["dense_below_speedup_in_a_graph"] = others / ours
    return found


def best_dense(line: dict[str, Any], kind: str) -> float | None:
    """What the fastest of torch's dense attention took."""
    names = (f"{name}_{kind}" for name in ("sdpa-cudnn", "sdpa-flash", "sdpa"))
    return min((line[name] for name in names if name in line), default=None)


def in_a_graph(learner: BlockSparseAdaptive, x: list[Tensor], is_causal: bool) -> dict[str, float]:
    """Seconds of training steps and of choosing, with noise and without, in CUDA graphs, and how they compare.

    With leaves of their own, which nothing outside of the captures records in a graph: autograd accumulates a gradient
    on the stream on which its leaf was first used, and no capture may wait for the default stream.
    """
    learner, x = copy.deepcopy(learner), [t.detach().clone().requires_grad_() for t in x]
    leaves, grad = [*x, *learner.parameters()], torch.randn_like(x[0])
    choosers = copy.deepcopy(learner), copy.deepcopy(learner).eval()

    q, k = (t.detach().transpose(1, 2) for t in x[:2])
    heads, gqa = (q, k, is_causal), grouped(q, k)

    def learned() -> None:
        torch.autograd.grad(learner(*x, is_causal), leaves, grad, allow_unused=True)

    def dense() -> None:
        with sdpa_kernel(SDPA["sdpa-cudnn"]):
            output = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in x), is_causal=is_causal, **gqa)
        torch.autograd.grad(output.transpose(1, 2), x, grad)

    runs = learned, dense, *(partial(choose, chooser, *heads) for chooser in choosers)
    took = by_turns([captured(run) for run in runs], "cuda")
    names = "learned_with_backward_seconds", "sdpa-cudnn_with_backward_seconds", "choosing_seconds"
    found = dict(zip((*names, "choosing_without_noise_seconds"), took, strict=True))
    return found | {"speedup": took[1] / took[0], "choosing_share": took[2] / took[0]}


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """What replays a call, captured in a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def told(problem: BaseException) -> str:
    """Why a peer did not run, in a line: the first of several errors, as a graph that is left by one raises another."""
    while problem.__context__ is not None:
        problem = problem.__context__
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:200]


def step(run: Callable[[], Tensor], leaves: Iterable[Tensor], grad: Tensor) -> None:
    """A forward and backward pass; a scorer, where there is one, learns in it."""
    for tensor in leaves:
        tensor.grad = None
    run().backward(grad)


def grouped(q: Tensor, k: Tensor) -> dict[str, bool]:
    """Argument of torch's attention where query heads share key heads."""
    return {} if q.shape[1] == k.shape[1] else {"enable_gqa": True}


def dense_runs(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> dict[str, Callable[[], Tensor]]:
    """Torch's dense attention by each of its fast backends."""
    gqa = grouped(q, k)
    if not q.is_cuda:
        return {"sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **gqa)}

    def by(backend: Any) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **gqa)

        return run

    return {name: by(backend) for name, backend in SDPA.items()}


def same_selection_runs(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Others on the blocks we chose, their lists made beforehand, and why one is missing."""
    names = ("flex", "fa4")
    if q.shape[1] != k.shape[1]:
        return {}, dict.fromkeys(names, "not for this line: heads share keys")
    if selection.per_token or not q.is_cuda or selection.n >= FORWARD_ONLY:
        where = "tokens choose for themselves" if selection.per_token else "the CPU, or too long a mask"
        return {}, dict.fromkeys(names, f"not for this line: {where}")
    table = selection.allowed()[0]
    own = torch.eye(selection.blocks, dtype=torch.bool, device=q.device) & selection.is_causal
    mask = flex.mask_of(table & own, table & ~own, selection.block_size, selection.n, _past)
    # Each shape is a kernel of its own; past this limit torch would run the whole score matrix eagerly.
    torch._dynamo.config.recompile_limit = flex.SHAPES
    # A backward that gives its buffers away could not be repeated.
    torch._functorch.config.donated_buffer = False
    runs: dict[str, Callable[[], Tensor]] = {"flex": lambda: flex.compiled()(q, k, v, block_mask=mask)}
    if not flash4.installed():
        return runs, {"fa4": NOT_INSTALLED}
    from flash_attn.cute import flash_attn_func  # pyrefly: ignore[missing-import]

    by_query, by_key = (
        flash4.sparse_tensors(*(Lists(*(part[None] for part in lists_of(one))) for one in side))
        for side in ((table & own, table & ~own), ((table & own).mT, (table & ~own).mT))
    )
    options = {"block_sparse_tensors": by_query, "block_sparse_tensors_bwd": by_key}
    options |= flash4.band_rule(Band(-selection.n, 0 if selection.is_causal else selection.n), selection.n)
    tokens_first = [t.transpose(1, 2) for t in (q, k, v)]

    def run() -> Tensor:
        found = flash_attn_func(*tokens_first, **options)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return runs | {"fa4": run}, {}


def _past(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def timed(run: Callable[[], Any], device: str) -> float:
    """Seconds of one call: the best of some streams, after one that compiles; of a long call, one more."""
    return by_turns([run], device)[0]


def by_turns(runs: list[Callable[[], Any]], device: str) -> list[float]:
    """`timed` of each, their streams in turns: what the host takes differs from one moment to the next."""
    for run in runs:
        clock(run, device)
    took = [clock(run, device) for run in runs]
    calls = [min(20, max(1, int(0.1 / first))) for first in took]
    # What the host takes differs most.
    for _ in range(8 if min(took) < 0.01 else 3):
        took = [
            best if best > 0.5 else min(best, clock(run, device, many))
            for best, run, many in zip(took, runs, calls, strict=True)
        ]
    return took


def checked(q: Tensor, k: Tensor, v: Tensor, selection: Selection, head: int = 3) -> dict[str, float]:
    """Errors of some rows of output and dQ and some columns of dK and dV against float64, over their norms."""
    grad = torch.randn_like(q)
    output, lse = selected_attention(q, k, v, selection, enable_gqa=True, return_lse=True)
    found = torch.autograd.grad(output, (q, k, v), grad)
    n, size, scale = selection.n, selection.block_size, q.shape[-1] ** -0.5
    # Not the first tokens: what sees one key has no dQ.
    token = torch.linspace(n // 8, n - 1, 7, device=q.device).long()
    together = q.shape[1] // k.shape[1]
    one = head // together
    queries, outputs, grads, logs = (t[0].detach() for t in (q, output, grad, lse))
    keys, values, shared = k[0, one].detach(), v[0, one].detach(), selection.shared()
    every = selection.indices[0]
    worst = dict.fromkeys(("output", "query", "key", "value"), 0.0)

    def note(name: str, got: Tensor, wanted: Tensor) -> None:
        off = (got.double() - wanted).norm() / wanted.norm().clamp(min=1e-6)
        worst[name] = max(worst[name], float(off))

    for t in token.tolist():
        own = t // size
        row = every[head // selection.group, t if selection.per_token else own]
        blocks = shared[own].clone()
        blocks[row[row < selection.blocks].long()] = True
        seen = blocks.repeat_interleave(size)[:n]
        seen = seen & (torch.arange(n, device=q.device) <= t) if selection.is_causal else seen
        some_keys, some_values = keys[seen].double(), values[seen].double()
        weights = (scale * (some_keys @ queries[head, t].double())).softmax(0)
        exact = weights @ some_values
        note("output", outputs[head, t], exact)
        slope = weights * (some_values @ grads[head, t].double() - exact @ grads[head, t].double())
        note("query", found[0][0, head, t], scale * (slope @ some_keys))
        # The other way round: who sees the key t, in any head that reads it, and with what weight.
        by_key, by_value = torch.zeros_like(keys[t].double()), torch.zeros_like(values[t].double())
        for other in range(one * together, (one + 1) * together):
            met = shared[:, own] if not selection.per_token else shared[:, own].repeat_interleave(size)[:n]
            met = met | (every[other // selection.group] == own).any(-1)
            met = met if selection.per_token else met.repeat_interleave(size)[:n]
            met = met & (torch.arange(n, device=q.device) >= t) if selection.is_causal else met
            some, some_grads = queries[other, met].double(), grads[other, met].double()
            weights = (scale * (some @ keys[t].double()) - logs[other, met].double()).exp()
            by_value += weights @ some_grads
            slope = weights * (some_grads @ values[t].double() - (some_grads * outputs[other, met].double()).sum(-1))
            by_key += scale * (slope @ some)
        note("value", found[2][0, one, t], by_value)
        note("key", found[1][0, one, t], by_key)
    return worst


def main() -> None:
    """Measure, and append a line for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("adaptive.jsonl"))
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--rows", choices=ROWS, nargs="+", default=ROWS, help="who selects; both by default")
    parser.add_argument("--units", type=int, nargs="+", default=UNITS, help="score units of lists of 8 heads")
    parser.add_argument("--rank", type=int, help="width of the match, where lists do not have their own")
    parser.add_argument("--lists", choices=LISTS, nargs="+", default=[*LISTS], help="which heads have a list")
    parser.add_argument("--first", type=int, default=0, help="lines that an earlier process has measured")
    parser.add_argument("--elapsed", type=float, default=0.0, help="seconds that it ran")
    parser.add_argument("--chunk", type=int, help="MiB of partial outputs in a chunk of tokens that select")
    asked = parser.parse_args()
    if asked.chunk is not None:
        # Four chunks are the bytes up to which a call on a GPU runs whole.
        attend.GATHERED = 4 * asked.chunk * 2**20 // attend.GPU_ROOM
    begun = time.monotonic() - asked.elapsed
    faulthandler.dump_traceback_later(max(LIMIT - asked.elapsed, 1), exit=True)
    options = {"rows": asked.rows, "units": asked.units, "lists": asked.lists, "rank": asked.rank}
    made = lines(asked.lengths, asked.sparsity, first=asked.first, elapsed=asked.elapsed, **options)
    for number, found in enumerate(made, asked.first + 1):
        line = {"task": "speed", "chunk_mib": attend.GATHERED * attend.GPU_ROOM // 2**22} | found | facts("cuda")
        print(json.dumps(line), flush=True)
        append(asked.out, line)
        if "in_a_graph" in found.get("not_run", {}):
            # A capture that failed leaves the generator of the process in the graph.
            rest = "--first", str(number), "--elapsed", str(time.monotonic() - begun)
            os.execv(sys.executable, [sys.executable, *sys.argv, *rest])
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
