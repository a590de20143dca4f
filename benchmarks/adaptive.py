"""Does the scorer learn? Needles, look-ups, coverage and time, written as JSON lines.

    python benchmarks/adaptive.py --out benchmarks/results/adaptive_cpu.jsonl
    python benchmarks/adaptive.py --out benchmarks/results/adaptive_cpu.jsonl --draw docs/pictures

Tasks:
    needle    32 blocks, the queries of each match the keys of one; 4 are kept. Every teacher, those that fail included.
    lookup    the task of examples/adaptive_retrieval.py: 4 of 16 blocks are kept.
    coverage  blocks kept at a coverage of 0.9 on concentrated and on diffuse attention.
    crossover a forward pass with chosen blocks and with all, by length, for `AdaptiveConfig.dense_below`.
    speed     against torch's dense attention. On a CPU a forward pass, in turns. On a GPU forward and backward with the
              scorer learning, after a check in float64, beside cuDNN, flash, and with the same selection FlexAttention
              and FlashAttention-4:

    python benchmarks/adaptive.py --tasks speed --device cuda --out benchmarks/results/adaptive_h200.jsonl
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from dilated_attention_pytorch.kernels import flash4, flex
from dilated_attention_pytorch.kernels.block_tables import Band, Lists, lists_of
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive, SparseAttention
from dilated_attention_pytorch.ops.selected import selected_attention
from dilated_attention_pytorch.ops.selection import Selection
from dilated_attention_pytorch.tools.measure import clock, facts
from dilated_attention_pytorch.tools.peers import NOT_INSTALLED, SDPA
from dilated_attention_pytorch.tools.results import append

BLOCKS, SIZE, WIDTH = 32, 32, 32
CODES = F.normalize(torch.randn(BLOCKS, WIDTH, generator=torch.Generator().manual_seed(0)), dim=1)
ALONE: dict[str, Any] = {"local_blocks": 1, "sink_blocks": 0}
CROSSOVER = [2**power for power in range(9, 15)]
TEACHERS = ("distill", "straight_through", "prior")


def needle(batch: int, peak: float, is_causal: bool) -> tuple[list[Tensor], Tensor]:
    """Query, key and value (batch, 1024, 1, 32), and the block that each query block matches, (batch, 32)."""
    code = torch.rand(batch, BLOCKS).argsort(1)
    reach = torch.arange(BLOCKS).clamp(min=1) if is_causal else BLOCKS
    target = (torch.rand(batch, BLOCKS) * reach).long()
    keys, queries = CODES[code], CODES[code.gather(1, target)]
    blur = 0.5 * torch.randn(2, batch, BLOCKS * SIZE, WIDTH)
    q = peak * queries.repeat_interleave(SIZE, 1) + blur[0]
    k = WIDTH**0.5 * keys.repeat_interleave(SIZE, 1) + blur[1]
    return [q[:, :, None], k[:, :, None], torch.randn(batch, BLOCKS * SIZE, 1, WIDTH)], target


def needle_layer(is_causal: bool, **config: Any) -> BlockSparseAdaptive:
    """A layer whose scorer knows nothing at first: its match is unrelated to attention's, or there is none."""
    rank = WIDTH if config.pop("match", is_causal) else 0
    settings = AdaptiveConfig(base_sparsity=1 - 4 / BLOCKS, match_rank=rank, k_min=4, k_max=4, **ALONE, **config)
    layer = BlockSparseAdaptive([1024], [1], 1, WIDTH, settings, block_size=SIZE)
    if rank:
        nn.init.orthogonal_(layer.scorer.match_key.data[0])
    return layer


def recall(layer: BlockSparseAdaptive, peak: float, is_causal: bool) -> float:
    """How many rows keep the block they match, of those that could miss it."""
    x, target = needle(4, peak, is_causal)
    with torch.no_grad():
        pattern = layer.eval()(*x, is_causal, True)[1]
    layer.train()
    own = pattern.selection.row_blocks()
    kept = pattern.selection.allowed()[:, 0].gather(2, target[:, own, None])[..., 0]
    # The first rows of a causal sequence keep all there is.
    open_to_choice = (target[:, own] != own) & ((own > 4) if is_causal else torch.ones_like(own, dtype=torch.bool))
    return kept[open_to_choice].double().mean().item()


def teach_needle(layer: BlockSparseAdaptive, peak: float, is_causal: bool, steps: int) -> Iterator[int]:
    """Train the scorer alone; the task is to give what dense attention gives."""
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    for step in range(steps):
        yield step
        x, _ = needle(2, peak, is_causal)
        wanted = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in x), is_causal=is_causal).transpose(1, 2)
        optimizer.zero_grad()
        (layer(*x, is_causal) - wanted).square().mean().backward()
        optimizer.step()


def adaptivity(steps: int = 150) -> tuple[dict[str, float], dict[str, float]]:
    """Blocks kept a row, and the attention they hold, at a coverage of 0.9, after learning both kinds of input."""
    settings = AdaptiveConfig(adaptive_ratio=0.9, match_rank=WIDTH, **ALONE)
    layer = BlockSparseAdaptive([1024], [1], 1, WIDTH, settings, block_size=SIZE)
    nn.init.orthogonal_(layer.scorer.match_key.data[0])
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    peaks = {"needle": 10.0, "diffuse": 0.5}
    for step in range(steps):
        x, _ = needle(2, peaks["needle" if step % 2 else "diffuse"], False)
        optimizer.zero_grad()
        layer(*x).square().mean().backward()
        optimizer.step()
    kept, held = {}, {}
    for name, peak in peaks.items():
        with torch.no_grad():
            pattern = layer.eval()(*needle(4, peak, False)[0], False, True)[1]
        kept[name] = BLOCKS * float(pattern.density)
        held[name] = float(pattern.captured)
    return kept, held


class RandomBlocks(nn.Module):
    """Three earlier blocks beside a row's own, drawn anew in every call."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        """Attend over (B, N, H, D)."""
        batch, n, heads, _ = query.shape
        t = n // 16
        luck = torch.rand(batch, heads, t, t).masked_fill(~torch.ones(t, t).tril(-1).bool(), -1.0)
        best, indices = luck.topk(3, -1)
        indices = indices.masked_fill(best < 0, t).sort(-1).values.int()
        selection = Selection(indices, (best >= 0).sum(-1).int(), n, 16, is_causal, False, 1, 0)
        return selected_attention(*(x.transpose(1, 2) for x in (query, key, value)), selection).output.transpose(1, 2)


def lookup_layer(name: str) -> nn.Module:
    """Attention that keeps 4 of 16 blocks, or all, by the name of how."""
    if name in ("dense", "local"):
        return SparseAttention("full" if name == "dense" else "hierarchical:4x1;block=16")
    if name == "random":
        return RandomBlocks()
    config = AdaptiveConfig(base_sparsity=0.75, k_min=4, k_max=4, score_unit=2, granularity=name, **ALONE)
    return BlockSparseAdaptive([256], [1], 1, 64, config, block_size=16)


def lookup(names: Iterable[str], steps: int, seed: int = 0) -> Iterator[tuple[str, dict[int, float]]]:
    """Accuracy by step for each way of keeping blocks."""
    place = Path(__file__).resolve().parents[1] / "examples" / "adaptive_retrieval.py"
    spec = importlib.util.spec_from_file_location("adaptive_retrieval", place)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for name in names:
        torch.manual_seed(seed)
        yield name, dict(example.train(example.Reader(lookup_layer(name)), steps))


def speed(n: int, sparsity: float, is_causal: bool, repeats: int = 2) -> dict[str, Any]:
    """Seconds of torch's dense attention and of ours on a CPU, choosing included: the best of turns.

    Processor seconds stand beside those of the clock: on a busy machine they alone can be compared.
    """
    layer = BlockSparseAdaptive([n], [1], 8, 64, AdaptiveConfig(base_sparsity=sparsity)).eval()
    x = torch.randn(3, 1, n, 8, 64).unbind()
    heads = [t.transpose(1, 2) for t in x]
    runs: dict[str, Callable[[], Any]] = {
        "learned": lambda: layer(*x, is_causal),
        "choosing": lambda: layer._choose(heads[0], heads[1], is_causal, None),
        "dense": lambda: F.scaled_dot_product_attention(*heads, is_causal=is_causal),
    }
    best = {f"{name}_{kind}": float("inf") for name in runs for kind in ("seconds", "processor_seconds")}
    with torch.no_grad():
        for _ in range(repeats):
            for name, run in runs.items():
                busy = time.process_time()
                took = clock(run, "cpu")
                for kind, value in (("seconds", took), ("processor_seconds", time.process_time() - busy)):
                    best[f"{name}_{kind}"] = min(best[f"{name}_{kind}"], value)
    return {"n": n, "sparsity": sparsity, "causal": is_causal, **best}


def crossover(lengths: Iterable[int], sparsity: float, is_causal: bool, device: str) -> Iterator[dict[str, Any]]:
    """Seconds of a forward pass with chosen blocks and with all; on a CPU processor seconds, as in `speed`."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for n in lengths:
        x = torch.randn(3, 1, n, 8, 64, device=device, dtype=dtype).unbind()
        took = {}
        for name, least in (("chosen", None), ("dense", n + 1)):
            config = AdaptiveConfig(base_sparsity=sparsity, dense_below=least)
            layer = BlockSparseAdaptive([n], [1], 8, 64, config).to(device).eval()
            with torch.no_grad():
                if device == "cuda":
                    took[name] = timed(lambda layer=layer, x=x: layer(*x, is_causal), device)
                    continue
                took[name] = float("inf")
                for _ in range(4):
                    busy = time.process_time()
                    layer(*x, is_causal)
                    took[name] = min(took[name], time.process_time() - busy)
        yield {"n": n, "sparsity": sparsity, "causal": is_causal, **took}


LIMIT = 235
"""Seconds after which a GPU run ends itself, whatever hangs."""
LAST_START = 180
"""Seconds after which it begins nothing more."""
GPU_LENGTHS = (32768, 131072, 2**20, 16384, 8192, 4096)
"""What must be fast first, then down to where dense attention wins."""
FORWARD_ONLY = 2**19
"""Tokens from which a pass is timed without its backward, at 99 % sparsity."""
GATE = 2e-2
"""Largest error of a checked row or column in bfloat16, over the norm of the exact one."""


def gpu_lines(lengths: Iterable[int], sparsity: float, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """A line of results for each length, without and with a causal mask, until the time is up."""
    begun = time.monotonic()
    for n in lengths:
        for is_causal in (False, True):
            if is_causal and n >= FORWARD_ONLY:
                continue
            line: dict[str, Any] = {"n": n, "sparsity": 0.99 if n >= FORWARD_ONLY else sparsity, "causal": is_causal}
            if time.monotonic() - begun > LAST_START:
                yield line | {"skipped": f"began nothing after {LAST_START} s"}
                continue
            try:
                yield line | measured(n, line["sparsity"], is_causal, device)
            except torch.OutOfMemoryError as problem:
                yield line | {"skipped": str(problem).split(".")[0]}
            if device == "cuda":
                torch.cuda.empty_cache()


def measured(n: int, sparsity: float, is_causal: bool, device: str) -> dict[str, Any]:
    """Seconds of every way to compute one layer's attention, and how ours compares; nothing where the check fails."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    layer = BlockSparseAdaptive([n], [1], 8, 64, AdaptiveConfig(base_sparsity=sparsity)).to(device)
    x = [t.requires_grad_() for t in torch.randn(3, 1, n, 8, 64, device=device, dtype=dtype).unbind()]
    q, k, v = (t.transpose(1, 2) for t in x)
    with torch.no_grad():
        selection = layer.eval()._choose(q, k, is_causal, None)[1]
    errors = checked(q, k, v, selection)
    line: dict[str, Any] = {"rows": "token" if selection.per_token else "block", "errors": errors}
    line["density"] = float(selection.density())
    if not max(errors.values()) <= GATE:
        return line | {"skipped": "the check failed"}
    grad, leaves = torch.randn_like(q), [*x, *layer.parameters()]
    runs = {"learned": lambda: layer(*x, is_causal).transpose(1, 2)} | dense_runs(q, k, v, is_causal)
    same, reasons = same_selection_runs(q, k, v, selection)
    with torch.no_grad():
        line["choosing_seconds"] = timed(lambda: layer._choose(q, k, is_causal, None), device)
        ours = selected_attention(q, k, v, selection).output
        for name, run in tuple(same.items()):
            try:
                errors[name] = float((run() - ours).double().norm() / ours.double().norm())
            except Exception as problem:
                reasons[name] = told(problem)
            if not errors.get(name, 1.0) <= GATE:
                reasons.setdefault(name, "gives something else")
                del same[name]
    for name, run in (runs | same).items():
        try:
            with torch.no_grad():
                layer.eval()
                line[f"{name}_seconds"] = timed(run, device)
            layer.train()
            if n < FORWARD_ONLY:
                line[f"{name}_with_backward_seconds"] = timed(lambda run=run: step(run, leaves, grad), device)
        except Exception as problem:
            if name == "learned":
                raise
            reasons[name] = told(problem)
    for kind in ("seconds", "with_backward_seconds"):
        known = [line[f"{name}_{kind}"] for name in ("sdpa-cudnn", "sdpa-flash", "sdpa") if f"{name}_{kind}" in line]
        if known and f"learned_{kind}" in line:
            faster = min(known) / line[f"learned_{kind}"]
            whole = kind.removesuffix("seconds")
            line |= {f"{whole}speedup": faster, f"{whole}efficiency": faster * line["density"]}
        if f"learned_{kind}" in line:
            line[f"choosing_share_of_{kind}"] = line["choosing_seconds"] / line[f"learned_{kind}"]
    return line | {"not_run": reasons}


def told(problem: Exception) -> str:
    """Why a peer did not run, in a line."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:200]


def step(run: Callable[[], Tensor], leaves: Iterable[Tensor], grad: Tensor) -> None:
    """A forward and backward pass; a scorer, where there is one, learns in it."""
    for tensor in leaves:
        tensor.grad = None
    run().backward(grad)


def dense_runs(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> dict[str, Callable[[], Tensor]]:
    """Torch's dense attention by each of its fast backends."""
    if not q.is_cuda:
        return {"sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)}

    def by(backend: Any) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

        return run

    return {name: by(backend) for name, backend in SDPA.items()}


def same_selection_runs(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Others on the blocks we chose, their lists made beforehand, and why one is missing."""
    names = ("flex", "fa4")
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
    """Seconds of one call: the best of three streams, after one that compiles; of a long call, one more."""
    clock(run, device)
    first = clock(run, device)
    calls = min(20, max(1, int(0.1 / first)))
    return first if first > 0.5 else min(clock(run, device, calls) for _ in range(3))


def checked(q: Tensor, k: Tensor, v: Tensor, selection: Selection, head: int = 3) -> dict[str, float]:
    """Errors of some rows of output and dQ and some columns of dK and dV against float64, over their norms."""
    grad = torch.randn_like(q)
    output, lse = selected_attention(q, k, v, selection)
    found = torch.autograd.grad(output, (q, k, v), grad)
    n, size, scale = selection.n, selection.block_size, q.shape[-1] ** -0.5
    # Not the first tokens: what sees one key has no dQ.
    token = torch.linspace(n // 8, n - 1, 7, device=q.device).long()
    queries, keys, values, outputs, grads, logs = (t[0, head].detach() for t in (q, k, v, output, grad, lse))
    listed, shared = selection.indices[0, head], selection.shared()
    worst = dict.fromkeys(("output", "query", "key", "value"), 0.0)

    def note(name: str, got: Tensor, wanted: Tensor) -> None:
        off = (got.double() - wanted).norm() / wanted.norm().clamp(min=1e-6)
        worst[name] = max(worst[name], float(off))

    for t in token.tolist():
        own = t // size
        row = listed[t if selection.per_token else own]
        blocks = shared[own].clone()
        blocks[row[row < selection.blocks].long()] = True
        seen = blocks.repeat_interleave(size)[:n]
        seen = seen & (torch.arange(n, device=q.device) <= t) if selection.is_causal else seen
        some_keys, some_values = keys[seen].double(), values[seen].double()
        weights = (scale * (some_keys @ queries[t].double())).softmax(0)
        exact = weights @ some_values
        note("output", outputs[t], exact)
        slope = weights * (some_values @ grads[t].double() - exact @ grads[t].double())
        note("query", found[0][0, head, t], scale * (slope @ some_keys))
        # The other way round: who sees the key t, and with what weight.
        met = shared[:, own] if not selection.per_token else shared[:, own].repeat_interleave(size)[:n]
        met = met | (listed == own).any(-1)
        met = met if selection.per_token else met.repeat_interleave(size)[:n]
        met = met & (torch.arange(n, device=q.device) >= t) if selection.is_causal else met
        some, some_grads = queries[met].double(), grads[met].double()
        weights = (scale * (some @ keys[t].double()) - logs[met].double()).exp()
        note("value", found[2][0, head, t], weights @ some_grads)
        slope = weights * (some_grads @ values[t].double() - (some_grads * outputs[met].double()).sum(-1))
        note("key", found[1][0, head, t], scale * (slope @ some))
    return worst


COLORS = ("#2a6fbb", "#c8452d", "#3a8f4d", "#8a5ab5", "#8c7a2b")


def curves(lines: dict[str, dict[int, float]], what: str) -> str:
    """Lines from 0 to 1 over training steps, as an SVG."""
    last = max(step for line in lines.values() for step in line)
    drawn = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 300" font-family="sans-serif" font-size="12">']
    drawn.append('<rect width="640" height="300" fill="white"/>')
    for tick in range(5):
        y = 260 - 60 * tick
        drawn.append(
            f'<path d="M40 {y}H480" stroke="#ddd"/><text x="34" y="{y + 4}" text-anchor="end">{tick / 4}</text>'
        )
        drawn.append(f'<text x="{40 + 110 * tick}" y="278" text-anchor="middle">{last * tick // 4}</text>')
    drawn.append(f'<text x="40" y="12">{what}</text><text x="260" y="294" text-anchor="middle">training steps</text>')
    ends = sorted(lines, key=lambda name: -lines[name][max(lines[name])])
    below = 0.0
    for name in ends:
        line, color = lines[name], COLORS[list(lines).index(name) % len(COLORS)]
        points = " ".join(f"{40 + 440 * step / last:.1f},{260 - 240 * value:.1f}" for step, value in line.items())
        below = max(below + 14, 264 - 240 * line[max(line)])
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        drawn.append(f'<text x="488" y="{below:.0f}" fill="{color}">{name}</text>')
    return "\n".join([*drawn, "</svg>", ""])


def draw(data: Path, folder: Path) -> None:
    """The needle and look-up curves of a file of results."""
    found: dict[str, dict[str, dict[int, float]]] = {"needle": {}, "lookup": {}}
    for line in map(json.loads, data.read_text().splitlines()):
        if line["task"] == "needle":
            name = f"{line['teacher'].replace('_', '-')}, logit {line['peak']:g}"
            found["needle"].setdefault(name, {})[line["step"]] = line["recall"]
        elif line["task"] == "lookup":
            found["lookup"].setdefault(line["kept"], {})[line["step"]] = line["accuracy"]
    for task, what in (("needle", "rows that keep the block they match"), ("lookup", "answers that are right")):
        if found[task]:
            (folder / f"adaptive_{task}.svg").write_text(curves(found[task], what))


def main() -> None:
    """Run the tasks named and append what they give."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("adaptive.jsonl"))
    parser.add_argument("--tasks", nargs="+", default=["needle", "lookup", "coverage", "crossover", "speed"])
    parser.add_argument("--needle-steps", type=int, default=200)
    parser.add_argument("--lookup-steps", type=int, default=300)
    parser.add_argument("--lengths", type=int, nargs="+", help="of the speed and crossover tasks")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the speed and crossover tasks")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="draw the curves of --out there, and run nothing")
    asked = parser.parse_args()
    if asked.draw is not None:
        draw(asked.out, asked.draw)
        return

    def tell(device: str = "cpu", **found: Any) -> None:
        line = found | facts(device)
        print(json.dumps(line), flush=True)
        append(asked.out, line)

    if "needle" in asked.tasks:
        for teacher in TEACHERS:
            for peak in (8.0, 4.0):
                torch.manual_seed(0)
                layer = needle_layer(False, score_gradient=teacher)
                for step in teach_needle(layer, peak, False, asked.needle_steps + 1):
                    if step % 25 == 0:
                        found = recall(layer, peak, False)
                        tell(task="needle", teacher=teacher, peak=peak, step=step, recall=found)
    if "lookup" in asked.tasks:
        for name, curve in lookup(("dense", "token", "block", "local", "random"), asked.lookup_steps):
            for step, accuracy in curve.items():
                tell(task="lookup", kept=name, step=step, accuracy=accuracy)
    if "coverage" in asked.tasks:
        kept, held = adaptivity()
        for name in kept:
            tell(task="coverage", input=name, kept=kept[name], of=BLOCKS, captured=held[name])
    if "crossover" in asked.tasks:
        for is_causal in (False, True):
            found = list(crossover(asked.lengths or CROSSOVER, asked.sparsity, is_causal, asked.device))
            for line in found:
                tell(asked.device, task="crossover", **line)
            # From the end: a single lucky short run is no rule.
            slower = [line["n"] for line in found if line["chosen"] > line["dense"]]
            print(f"causal {is_causal}: dense_below should lie above {max(slower, default=0)}", flush=True)
    if "speed" in asked.tasks:
        if asked.device == "cuda":
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            for line in gpu_lines(asked.lengths or GPU_LENGTHS, asked.sparsity):
                tell("cuda", task="speed", **line)
            faulthandler.cancel_dump_traceback_later()
        else:
            for n in asked.lengths or [32768]:
                for is_causal in (False, True):
                    tell(task="speed", **speed(n, asked.sparsity, is_causal))


if __name__ == "__main__":
    main()
