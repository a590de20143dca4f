"""Does the scorer learn? Needles, look-ups, coverage and time, written as JSON lines.

    python benchmarks/adaptive.py --out benchmarks/results/adaptive_cpu.jsonl
    python benchmarks/adaptive.py --out benchmarks/results/adaptive_cpu.jsonl --draw docs/pictures

Tasks:
    needle    32 blocks, the queries of each match the keys of one; 4 are kept. Every teacher, those that fail included.
    lookup    the task of examples/adaptive_retrieval.py: 4 of 16 blocks are kept.
    coverage  blocks kept at a coverage of 0.9 on concentrated and on diffuse attention.
    crossover a forward pass with chosen blocks and with all, by length, for `AdaptiveConfig.dense_below`.
    units     a causal forward pass by the unit and rank of scores, and with all blocks.
    block_units  the same without a causal mask, where blocks of queries choose.
    choosing  choosing blocks alone, by the unit, rank and lists of scores, in turns.
    speed     a forward pass against torch's dense attention, in turns. On a GPU: adaptive_gpu.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive, SparseAttention
from dilated_attention_pytorch.selection.attention import selected_attention
from dilated_attention_pytorch.selection.backend import select
from dilated_attention_pytorch.selection.types import Selection
from dilated_attention_pytorch.tools.bench.measure import clock, facts
from dilated_attention_pytorch.tools.bench.results import append

BLOCKS, SIZE, WIDTH = 32, 32, 32
CODES = F.normalize(torch.randn(BLOCKS, WIDTH, generator=torch.Generator().manual_seed(0)), dim=1)
ALONE: dict[str, Any] = {"local_blocks": 1, "sink_blocks": 0}
UNIT = 16
"""Tokens of a sub-block in all published figures but the look-ups."""
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
    settings = AdaptiveConfig(
        base_sparsity=1 - 4 / BLOCKS, match_rank=rank, k_min=4, k_max=4, **ALONE, score_unit=UNIT, **config
    )
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
    settings = AdaptiveConfig(adaptive_ratio=0.9, match_rank=WIDTH, score_unit=UNIT, **ALONE)
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
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return selected_attention(q, k, v, selection, enable_gqa=True).transpose(1, 2)


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
    layer = BlockSparseAdaptive([n], [1], 8, 64, AdaptiveConfig(base_sparsity=sparsity, score_unit=UNIT)).eval()
    x = torch.randn(3, 1, n, 8, 64).unbind()
    heads = [t.transpose(1, 2) for t in x]
    runs: dict[str, Callable[[], Any]] = {
        "learned": lambda: layer(*x, is_causal),
        "choosing": lambda: select(layer.score_blocks(heads[0], heads[1], is_causal), n),
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


def crossover(
    lengths: Iterable[int], sparsity: float, is_causal: bool, unit: int = UNIT, rank: int = 32
) -> Iterator[dict[str, Any]]:
    """Processor seconds, as in `speed`, of a forward pass with chosen blocks and with all."""
    for n in lengths:
        x = torch.randn(3, 1, n, 8, 64).unbind()
        took = {}
        for name, least in (("chosen", None), ("dense", n + 1)):
            config = AdaptiveConfig(sparsity, dense_below=least, score_unit=unit, match_rank=rank)
            layer = BlockSparseAdaptive([n], [1], 8, 64, config).eval()
            took[name] = float("inf")
            with torch.no_grad():
                for _ in range(4):
                    busy = time.process_time()
                    layer(*x, is_causal)
                    took[name] = min(took[name], time.process_time() - busy)
        yield {"n": n, "sparsity": sparsity, "causal": is_causal, **took}


FORMS: dict[str, dict[str, Any]] = {
    "unit 4, rank 32": {"score_unit": 4},
    "unit 2, rank 32": {"score_unit": 2},
    "unit 1, rank 32": {"score_unit": 1},
    "unit 1, rank 16": {"score_unit": 1, "match_rank": 16},
    "unit 1, rank 16, a list for 2 heads": {"score_unit": 1, "match_rank": 16, "select": "group", "group_size": 2},
    "unit 1, rank 16, a list for 4 heads": {"score_unit": 1, "match_rank": 16, "select": "group", "group_size": 4},
    "unit 1, rank 16, a list for 8 heads": {"score_unit": 1, "match_rank": 16, "select": "all"},
}
"""Settings of scores by name."""


def choosing(n: int, sparsity: float, rounds: int = 7) -> Iterator[dict[str, Any]]:
    """Processor seconds, median over rounds, that causal tokens with 8 heads of 64 take to choose blocks, and the
    median over rounds of the ratio to unit 2, rank 32. Forms take turns."""
    q, k = torch.randn(2, 1, 8, n, 64)
    layers = {
        name: BlockSparseAdaptive([n], [1], 8, 64, AdaptiveConfig(sparsity, **form)).eval()
        for name, form in FORMS.items()
    }
    took: dict[str, list[float]] = {name: [] for name in layers}
    with torch.no_grad():
        for _ in range(rounds + 1):
            for name, layer in layers.items():
                busy = time.process_time()
                select(layer.score_blocks(q, k, True), n)
                took[name].append(time.process_time() - busy)
    for name, layer in layers.items():
        each, base = took[name][1:], took["unit 2, rank 32"][1:]
        operations = layer.config.match_rank / layer.config.score_unit / layer.scorer.group
        ratio = statistics.median(a / b for a, b in zip(each, base, strict=True))
        line = {"form": name, "operations": operations, "seconds": statistics.median(each), "of_unit_2": ratio}
        yield line | {"n": n, "sparsity": sparsity, "rounds": rounds}


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
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["needle", "lookup", "coverage", "crossover", "units", "block_units", "choosing", "speed"],
    )
    parser.add_argument("--needle-steps", type=int, default=200)
    parser.add_argument("--lookup-steps", type=int, default=300)
    parser.add_argument("--lengths", type=int, nargs="+", help="of the speed and crossover tasks")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="draw the curves of --out there, and run nothing")
    asked = parser.parse_args()
    if asked.draw is not None:
        draw(asked.out, asked.draw)
        return

    def tell(**found: Any) -> None:
        line = found | facts("cpu")
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
            found = list(crossover(asked.lengths or CROSSOVER, asked.sparsity, is_causal))
            for line in found:
                tell(task="crossover", **line)
            # From the end: a single lucky short run is no rule.
            slower = [line["n"] for line in found if line["chosen"] > line["dense"]]
            print(f"causal {is_causal}: dense_below should lie above {max(slower, default=0)}", flush=True)
    for name, is_causal in (("units", True), ("block_units", False)):
        if name in asked.tasks:
            for unit, rank in ((16, 32), (4, 32), (2, 32), (1, 16), (1, 32)):
                for line in crossover(asked.lengths or [8192], asked.sparsity, is_causal, unit, rank):
                    tell(task=name, unit=unit, rank=rank, **line)
    if "choosing" in asked.tasks:
        for n in asked.lengths or [8192]:
            for line in choosing(n, asked.sparsity):
                tell(task="choosing", **line)
    if "speed" in asked.tasks:
        for n in asked.lengths or [32768]:
            for is_causal in (False, True):
                tell(task="speed", **speed(n, asked.sparsity, is_causal))


if __name__ == "__main__":
    main()
