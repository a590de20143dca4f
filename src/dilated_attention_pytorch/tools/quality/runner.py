"""Training and timing of `dap quality`, and its page of results."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import make_plan, parse
from ...errors import must
from ...nn import AdaptiveConfig, BlockSparseAdaptive, SparseAttention
from ..bench.measure import clock, facts
from ..bench.results import append, read_lines
from ..html_page import wrapped, write
from . import __doc__ as about
from . import retrieval, retrieval_report, rules
from .editions import HEADS, OutOfTime, Play, Task, compare

WIDTH = 64
LEARNED = {"recall": 0.95, "editions": 0.5}
"""Required of dense attention: share of right answers; bits per byte saved on the second edition."""
Line = dict[str, Any]
Run = tuple[str, str, int, str]
"""Task, pattern and seed, and of a speed-up the task it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Sizes and amount of training of a suite."""

    device: str
    recall_n: int
    recall_block: int
    recall_steps: int
    keep: float
    """share of the blocks that a sparse row may see"""
    speed_n: int
    """length at which attention of the recall task is timed; editions is timed at its own length"""
    seeds: tuple[int, ...]
    """of the recall task"""
    editions: Task


SUITES = {
    "small": Suite(
        device="cpu", recall_n=256, recall_block=16, recall_steps=250, keep=0.25, speed_n=4096, seeds=(0,),
        editions=Task(n=4096, warm_n=1024, steps=60, width=128, fresh=4),
    ),
    "gpu": Suite(
        device="cuda", recall_n=4096, recall_block=32, recall_steps=600, keep=0.125, speed_n=65536, seeds=(0, 1, 2),
        editions=Task(n=196608, warm_n=8192, steps=300, width=256),
    ),
    "rehearsal": Suite(
        device="cpu", recall_n=64, recall_block=16, recall_steps=3, keep=0.5, speed_n=256, seeds=(0,),
        editions=Task(n=256, warm_n=128, steps=2, width=32, fresh=1),
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
    """Tokens (B, n) and answers, -100 where none: each block holds a pair and a query for an earlier key."""
    blocks, size = suite.recall_n // suite.recall_block, suite.recall_block
    names = 4 * blocks
    row, block = torch.arange(batch)[:, None], torch.arange(blocks)

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    keys = torch.rand(batch, names, generator=generator).argsort(1)[:, :blocks]
    values = drawn(names, 2 * names, batch, blocks)
    tokens = drawn(2 * names, 3 * names, batch, blocks, size)
    given, question = drawn(0, size // 2 - 1, batch, blocks), drawn(size // 2, size, batch, blocks)
    tokens[row, block, given], tokens[row, block, given + 1] = keys, values
    asked = (torch.rand(batch, blocks, generator=generator) * block).long()
    tokens[row, block, question] = keys.gather(1, asked)
    answers = torch.full_like(tokens, -100)
    answers[row, block, question] = values.gather(1, asked)
    answers[:, 0] = -100
    return tokens.flatten(1), answers.flatten(1)


class Reader(nn.Module):
    """One attention layer: queries of the tokens, keys of the previous tokens, values of the tokens."""

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


def attend(name: str, n: int, block: int, keep: float, width: int) -> nn.Module:
    """Attention on (B, N, H, D) by the name of a row, for sequences up to a length."""
    if name == "dense":
        return retrieval.DenseAttention()
    if name != "adaptive":
        return SparseAttention(parse(patterns(n, block, keep)[name]))
    kept = max(2, round(keep * n / block))
    config = AdaptiveConfig(
        base_sparsity=1 - keep, k_min=kept, k_max=kept, local_blocks=1, sink_blocks=0, score_unit=min(2, block)
    )
    return BlockSparseAdaptive([n], [1], HEADS, width, config, block_size=block)


def block_at(n: int) -> int:
    """Tokens in a block of sequences of a length."""
    return 128 if n >= 1024 else 16


def recall(suite: Suite, name: str, seed: int) -> Line:
    """Accuracy on fresh sequences after training."""
    torch.manual_seed(seed)
    blocks = suite.recall_n // suite.recall_block
    module = attend(name, suite.recall_n, suite.recall_block, suite.keep, WIDTH)
    model = Reader(module, 4 * blocks).to(suite.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(seed)
    batch = 16
    begun, busy = time.perf_counter(), time.process_time()
    for _ in range(suite.recall_steps):
        tokens, answers = (t.to(suite.device) for t in draw_recall(suite, batch, generator))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).transpose(1, 2), answers).backward()
        optimizer.step()
    took, busy = time.perf_counter() - begun, time.process_time() - busy
    fresh = torch.Generator().manual_seed(10**6 + seed)
    right = asked = 0
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            tokens, answers = (t.to(suite.device) for t in draw_recall(suite, batch, fresh))
            right += int((model(tokens).argmax(-1) == answers).sum())
            asked += int((answers >= 0).sum())
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "quality": right / asked,
        "n": suite.recall_n,
        "parameters": parameters,
        "seconds": took,
        "processor_seconds": busy,
        "steps": suite.recall_steps,
        "tokens": suite.recall_steps * batch * suite.recall_n,
    }


def speedup(suite: Suite, name: str, n: int, width: int) -> Line:
    """Speed-up over torch's dense attention, forward and backward, at a length."""
    if name == "dense":
        return {"speedup": 1.0, "density": 1.0, "speed_n": n}
    device = suite.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    place: Any = {"device": device, "dtype": dtype, "requires_grad": True}
    given = tuple(torch.randn(1, n, HEADS, width, **place) for _ in range(3))
    seed = torch.randn_like(given[0])
    block = block_at(n)
    density = None
    if name != "adaptive":
        text = patterns(n, block, suite.keep)[name]
        kept, every = (make_plan(parse(each) & parse("causal"), n, HEADS).flops(width) for each in (text, "full"))
        density = kept / every

    def both(module: nn.Module) -> Callable[[], object]:
        return lambda: torch.autograd.grad(module(*given, is_causal=True), given, seed, allow_unused=True)

    theirs = both(retrieval.DenseAttention())
    module = attend(name, n, block, suite.keep, width).to(device=device, dtype=dtype)
    mine = both(module)
    for run in (mine, theirs):
        run()
    if isinstance(module, BlockSparseAdaptive):
        # A budget is a number of blocks, which is most of what an early token may see.
        density = module.statistics()["density"]
    ratios = [clock(theirs, device) / clock(mine, device) for _ in range(5)]
    return {"speedup": statistics.median(ratios), "density": density, "speed_n": n}


def runs(suite: Suite, plays: list[Play] | None) -> list[Run]:
    """Runs of a suite, speed-ups last."""
    names = [*patterns(suite.recall_n, suite.recall_block, suite.keep), "adaptive"]
    seeds = {"recall": suite.seeds} if plays is None else {"recall": suite.seeds, "editions": (0,)}
    found = [(task, name, seed, "") for task in seeds for seed in seeds[task] for name in names]
    return found + [("speed", name, 0, task) for task in seeds for name in names]


def measure(suite: Suite, plays: list[Play] | None, deadline: float, left: Iterable[Run]) -> Iterator[Line]:
    """A row for each run; `OutOfTime` where the next would end too late."""
    long, width = suite.editions.n, suite.editions.width // HEADS
    for task, name, seed, of in left:
        line = {"task": task, "pattern": name, "seed": seed}
        if task == "recall":
            yield line | recall(suite, name, seed)
        elif task == "editions":
            module = partial(attend, name, long, block_at(long), suite.keep, width)
            yield line | compare(suite.editions, plays or [], module, suite.device, seed, deadline)
        else:
            at = (suite.speed_n, WIDTH) if of == "recall" else (long, width)
            yield line | {"of": of} | speedup(suite, name, *at)


def judged(lines: list[Line]) -> list[Line]:
    """One row for each task and pattern, seeds averaged: quality retained, speed-up, and whether the row counts."""
    found = []
    speeds = {(line["suite"], line["of"], line["pattern"]): line for line in lines if line["task"] == "speed"}
    for suite, task in trained(lines):
        rows = [line for line in lines if (line["suite"], line["task"]) == (suite, task)]
        means: dict[str, Line] = {}
        for row in rows:
            same = [other["quality"] for other in rows if other["pattern"] == row["pattern"]]
            means[row["pattern"]] = {**row, "quality": statistics.mean(same), "seeds": len(same)}
        learned, best, floor = False, 0.0, 0.0
        # A run that was cut short may have neither end of the scale yet.
        if "dense" in means and "near" in means:
            best, floor = means["dense"]["quality"], means["near"]["quality"]
            gained = best if task == "recall" else best + means["dense"]["first_edition"]
            learned = gained >= LEARNED[task] and best > floor
        for row in means.values():
            retained = (row["quality"] - floor) / (best - floor) if learned else None
            speed = speeds.get((suite, task, row["pattern"]), {})
            timed = {each: speed.get(each) for each in ("speedup", "density", "speed_n")}
            found.append({**row, **timed, "speed_git": speed.get("git"), "retained": retained, "counts": learned})
    return found


def trained(lines: list[Line]) -> list[tuple[str, str]]:
    """Suites and tasks with measured quality."""
    return list(dict.fromkeys((line["suite"], line["task"]) for line in lines if line["task"] != "speed"))


def report(
    lines: list[Line], logs: str = "", command: str = "dap quality --report", sections: Sequence[str] = ()
) -> str:
    """The rows as a page, which names the files they were read from.

    `sections` are lines of other sections after those of the retrieval tasks.
    """
    small, chosen, lines = (of_suites(lines, each) for each in (retrieval.SUITES, rules.RULE_SUITES, SUITES))
    text = ["# What a pattern costs in quality", "", *(about or "").partition("\n\n")[2].strip().split("\n"), ""]
    text += [f"`{command}` wrote this page and the picture; the rows are in {logs}.", ""]
    if small:
        text += [
            *(retrieval.__doc__ or "").partition("\n\n")[2].strip().split("\n"),
            "",
            *retrieval_report.report(small),
        ]
    text += [*sections, *rules.report(chosen)]
    if lines:
        text += ["![Quality retained against speed-up](quality.png)", ""]
    for suite, task in trained(lines):
        rows = [row for row in judged(lines) if (row["suite"], row["task"]) == (suite, task)]
        first = rows[0]
        unit = "answers right" if task == "recall" else "bits/byte on the second edition"
        text += [f"## {task.capitalize()}, suite {suite}: sequences of {first['n']:,}", ""]
        if not first["counts"]:
            text += ["Dense attention did not learn the task in this run, so no row counts.", ""]
        at = "" if first["speed_n"] is None else f" at {first['speed_n']:,}"
        text += [f"| pattern | {unit} | retained | of dense's work | speed-up{at} | parameters |"]
        text += ["|---|---|---|---|---|---|"]
        for row in rows:
            kept = "" if row["retained"] is None else f"{100 * row['retained']:.2f} %"
            # A run that was cut short has no speed-ups yet.
            speed = " | " if row["speedup"] is None else f"{100 * row['density']:.0f} % | {row['speedup']:.2f}x"
            text.append(f"| {row['pattern']} | {abs(row['quality']):.3f} | {kept} | {speed} | {row['parameters']:,} |")
        if summary := headline(rows):
            text += ["", summary]
        if task == "editions":
            text += ["", *_by_distance(rows)]
        size = f"{first['steps']} steps of {first['tokens'] // first['steps']:,} tokens"
        seeds = "1 seed, so without an error bar" if first["seeds"] == 1 else f"{first['seeds']} seeds"
        timed = f" and timed at {first['speed_git']}" if first["speed_git"] else ""
        commits = f", trained at commit {first['git']}{timed}" if first.get("git") else ""
        text += ["", f"{size}, {seeds}, {first.get('device', '')}{commits}.", ""]
    return "\n".join(wrapped(line) if line and line[0] not in "|!#" else line for line in text)


def headline(rows: list[Line]) -> str:
    """S@99 and S@95 of a task: the largest speed-up of a row that retains so much, trained at the timed length."""
    if rows[0]["speed_n"] is None or not rows[0]["counts"]:
        return ""
    if rows[0]["speed_n"] != rows[0]["n"]:
        return "S@99 and S@95 are not given: rows were trained and timed at different lengths."
    found = []
    for share in (0.99, 0.95):
        kept = [x for x in rows if x["pattern"] != "dense" and x["speedup"] is not None and x["retained"] >= share]
        best = max(kept, key=lambda row: row["speedup"], default=None)
        found.append(f"S@{100 * share:.0f} = " + (f"{best['speedup']:.2f}x ({best['pattern']})" if best else "none"))
    return f"{' and '.join(found)}: the largest speed-up of a row that retains 99 % or 95 %."


def _by_distance(rows: list[Line]) -> list[str]:
    """A table of bits per byte."""
    far = [f"{each['from']:,} to {each['to']:,}" for each in rows[0]["by_distance"]]
    text = ["Bits per byte of the first edition, and of the second by its distance in bytes from the same lines:", ""]
    text += [f"| pattern | first edition | {' | '.join(far)} |", "|---" * (len(far) + 2) + "|"]
    for row in rows:
        bits = " | ".join(f"{each['bits']:.3f}" for each in row["by_distance"])
        text.append(f"| {row['pattern']} | {row['first_edition']:.3f} | {bits} |")
    return text


def plot(lines: list[Line], place: Path) -> None:
    """Quality retained against speed-up, where matplotlib is."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return
    kinds = trained(lines)
    figure = Figure(figsize=(5 * max(1, len(kinds)), 4.5), layout="constrained")
    for index, (suite, task) in enumerate(kinds, 1):
        rows = [row for row in judged(lines) if (row["suite"], row["task"]) == (suite, task)]
        rows = [row for row in rows if row["counts"] and row["speedup"] is not None]
        axes = figure.add_subplot(1, len(kinds), index)
        axes.set(title=f"{task}, {suite}", ylim=(-0.1, 1.1))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.set(xlabel="speed-up over dense attention", ylabel="quality retained")
        axes.plot([row["speedup"] for row in rows], [row["retained"] for row in rows], "o")
        axes.margins(x=0.25)
        for row in rows:
            here = (row["speedup"], row["retained"])
            axes.annotate(row["pattern"], here, (4, 4), textcoords="offset points", fontsize=7)
    figure.savefig(place)


def read_log(log: Path) -> list[Line]:
    """Read the rows of a log; none where there is no file."""
    return [line for line in read_lines([log]) if line.keys() >= {"suite", "task"}] if log.is_file() else []


def of_suites(lines: list[Line], suites: Collection[str]) -> list[Line]:
    """Rows of some suites."""
    return [line for line in lines if line["suite"] in suites]


@dataclass(frozen=True, kw_only=True)
class MeasuredSuite:
    """Runs of a suite, and the fields of a line that identify its run."""

    name: str
    fields: tuple[str, ...]
    runs: Sequence[tuple[Any, ...]]
    measure: Callable[[Iterable[Any]], Iterator[Line]]
    """A line for each of the given runs."""
    stamp: Line
    """Fields that lines of this version have; other lines of the suite are measured again."""
    device: str = "cpu"


def suite_named(name: str, plays: list[Play] | None, tasks: Collection[str], deadline: float) -> MeasuredSuite:
    """A suite by its name; `plays` and `tasks` select the runs of a suite that compares patterns."""
    if name in rules.RULE_SUITES:
        chosen = rules.RULE_SUITES[name]
        return MeasuredSuite(
            name=name,
            fields=("task", "pattern", "budget", "seed"),
            runs=chosen.runs(),
            measure=partial(rules.measure, chosen),
            stamp={"sources": rules.sources()},
        )
    if name in retrieval.SUITES:
        task = retrieval.SUITES[name]
        return MeasuredSuite(
            name=name,
            fields=("task", "pattern", "wanted", "seed"),
            runs=retrieval.runs(task),
            measure=partial(retrieval.measure, task),
            stamp={"sources": retrieval.sources()},
        )
    suite = SUITES[name]
    if suite.device == "cuda" and not torch.cuda.is_available():
        raise must(f"suite {name} must have a GPU", "a machine or a torch build without it", "Use --suite small.")
    return MeasuredSuite(
        name=name,
        fields=("task", "pattern", "seed", "of"),
        runs=[run for run in runs(suite, plays) if run[0] in tasks],
        measure=partial(measure, suite, plays, deadline),
        stamp={fact: facts(suite.device)[fact] for fact in ("device", "git")},
        device=suite.device,
    )


def run_suite(
    suite: MeasuredSuite, log: Path, deadline: float, resume: bool, as_json: bool = False
) -> OutOfTime | None:
    """Measure the runs that are not in the log; why the rest was left."""
    old = read_log(log)
    kept = [line for line in old if line["suite"] == suite.name and resume and line.items() >= suite.stamp.items()]
    write(log, "".join(json.dumps(line) + "\n" for line in old if line["suite"] != suite.name or line in kept))
    keys = {tuple(line.get(field, "") for field in suite.fields) for line in kept}

    def left() -> Iterator[tuple[Any, ...]]:
        for run in suite.runs:
            if run not in keys:
                if time.monotonic() > deadline:
                    raise OutOfTime("the time given is over")
                yield run

    try:
        for measured in suite.measure(left()):
            line = {"suite": suite.name, **measured, **facts(suite.device)}
            append(log, line)
            print(json.dumps(line) if as_json else describe(line), flush=True)
    except OutOfTime as why:
        return why
    except KeyboardInterrupt:
        return OutOfTime("interrupted")
    return None


def describe(line: Line) -> str:
    """One row as text."""
    what = f"{line.get('of', ''):>9} {line['task']:<9} {line.get('setting', line['pattern']):<15}".lstrip()
    if line["task"] == "speed":
        return f"{what} {line['speedup']:.2f}x"
    kept = f" {100 * line['density']:.1f} %," if "density" in line else ""
    return f"{what}{kept} quality {line['quality']:.3f}"
