"""Exchange random sequences between ranks, break something now and then, and compare what comes out with one device.

    python benchmarks/soak.py                          500 exchanges, into benchmarks/results/soak.jsonl
    python benchmarks/soak.py --exchanges 5000 --seed 7 --out soak.jsonl

Patterns, lengths, heads, dtypes, layouts, ways to exchange, budgets, padding and dropout are drawn from the seed; two
exchanges in five run on gloo processes, one on threads with real collectives, two on virtual ranks. A world of
processes lives through a dozen exchanges and its faults: a rank that dies or stalls is given up and those left go on;
a rank that differs in pattern, dtype, shape or settings makes all raise; a rank that fails or runs out of memory is
told of; NaN lies in rows that nobody needs. Output, LSE and every gradient are compared with dense float64 attention.
A world that is not done in time is killed and counts as a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import processes  # noqa: E402
from oracle import answer, error, multiplicities  # noqa: E402
from strategies import problems  # noqa: E402
from worlds import run_threads  # noqa: E402

from dilated_attention_pytorch import make_plan, parse  # noqa: E402
from dilated_attention_pytorch.distributed import (  # noqa: E402
    LeftBehind,
    RankFault,
    SequenceLayout,
    StepFailed,
    attempt,
    context_parallel_attention_with_lse,
    faults,
    regroup,
    shard_sequence,
    virtual_attention,
)
from dilated_attention_pytorch.distributed.butterfly import why_no_butterfly  # noqa: E402
from dilated_attention_pytorch.kernels.dropout import fresh_seed, keep_mask  # noqa: E402
from dilated_attention_pytorch.tools.bench.measure import facts  # noqa: E402
from dilated_attention_pytorch.tools.html_page import write  # noqa: E402

ROUNDING = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 6e-2}
"""Largest error of a result; a gradient that is a sum over all ranks may be off by eight times that."""
PATIENCE = 6.0
"""Seconds after which a collective gives a silent rank up."""
LIFE = 12
"""Exchanges a world of processes is asked for."""
DIFFERENCES = ("pattern", "dtype", "tokens", "overlap", "backend")
TOLD = ("raises", "memory")
GONE = ("dies before", "dies between", "stalls")
FAULTS = {
    "virtual": ("nan",),
    "threads": ("nan", *DIFFERENCES),
    "processes": ("nan", *DIFFERENCES, *TOLD, *GONE),
}


class Drawn(NamedTuple):
    """What every rank knows of one exchange before it knows how many ranks there are."""

    number: int
    seed: int
    way: str
    pattern: str
    n: int
    heads: int
    fault: str


class Exchange:
    """One exchange on a world of ranks: its inputs, its settings and what one device says; the same on every rank."""

    def __init__(self, drawn: Drawn, world: int) -> None:
        draw = random.Random(drawn.seed * 1009 + world)
        self.drawn, self.world, n, heads = drawn, world, drawn.n, drawn.heads
        self.pattern = parse(drawn.pattern)
        self.layout = self._layout(draw)
        self.dtype = draw.choice([*ROUNDING, "float64", "float64"])
        self.culprit = draw.randrange(world)
        key_heads = draw.choice([g for g in (1, 2, heads) if heads % g == 0])
        batch, width, out = draw.choice([1, 2]), draw.choice([4, 8, 19]), draw.choice([4, 8])
        self.options: dict[str, Any] = {
            "enable_gqa": True,
            "scale": draw.choice([None, None, 0.3]),
            "overlap": draw.choice(["none", "local"]),
            "exchange": draw.choice(["auto", "direct", "ring", "butterfly"]),
            "receive_budget": draw.choice([None, None, 2048, 65536]),
            "dropout_p": draw.choice([0.0, 0.0, 0.0, 0.3]),
        }
        if drawn.way == "threads":
            # torch's group of threads has collectives and no messages between two ranks, and one generator for all.
            self.options |= {"exchange": "direct", "dropout_p": 0.0}
        elif self.options["exchange"] == "butterfly" and why_no_butterfly(self.pattern.resolve(n, heads), self.layout):
            self.options["exchange"] = "auto"
        numbers = torch.Generator().manual_seed(drawn.seed)
        shapes = [(batch, h, n, d) for h, d in ((heads, width), (key_heads, width), (key_heads, out), (heads, out))]
        dtype = getattr(torch, self.dtype)
        self.inputs = [torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype) for shape in shapes]
        self.padding = torch.rand(batch, n, generator=numbers) < 0.3 if draw.random() < 0.3 else None
        self.wanted = self._wanted()
        if drawn.fault == "nan":
            self._spoil(heads // key_heads)

    def _layout(self, draw: random.Random) -> SequenceLayout:
        n, world = self.drawn.n, self.world
        match draw.choice(["contiguous", "zigzag", "lengths", "owners"]):
            case "contiguous":
                return SequenceLayout.contiguous(n, world)
            case "zigzag":
                return SequenceLayout.zigzag(n, world)
            case "lengths":
                cuts = sorted(draw.randint(0, n) for _ in range(world - 1))
                return SequenceLayout.of_lengths([b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)])
            case _:
                block = draw.choice([1, 5, 16])
                owners = [draw.randrange(world) for _ in range(-(-n // block))]
                return SequenceLayout.of_owners(owners, world, block, n)

    def _wanted(self) -> tuple[torch.Tensor, ...]:
        query, key, value, grad = self.inputs
        known: dict[str, Any] = {"scale": self.options["scale"], "key_padding_mask": self.padding}
        if dropped := self.options["dropout_p"]:
            torch.manual_seed(self.drawn.seed)
            batch, heads, n = query.shape[:3]
            stream, token = torch.arange(batch * heads).view(batch, heads, 1, 1), torch.arange(n)
            kept_weights = keep_mask(fresh_seed(query.device), stream, token[:, None], token, dropped)
            known |= {"kept": kept_weights, "dropout_p": dropped}
        return answer(query, key, value, self.pattern, grad_output=grad, **known)

    def _spoil(self, group: int) -> None:
        """NaN in every row of K and V that no query sees: nothing that is compared may change."""
        _, key, value, _ = self.inputs
        counts = multiplicities(self.pattern, self.drawn.n, self.drawn.heads)
        unseen = counts.sum(1).unflatten(0, (-1, group)).sum(1) == 0
        unseen = unseen.expand(len(key), -1, -1)
        if self.padding is not None:
            unseen = unseen | self.padding[:, None]
        for rows in (key, value):
            rows[unseen] = torch.nan

    def difference(self, found: tuple[torch.Tensor, ...], rank: int | None) -> float:
        """The largest error, as a share of what is allowed."""
        worst = 0.0
        for name, got, whole in zip(("output", "lse", "dq", "dk", "dv"), found, self.wanted, strict=True):
            want = whole if rank is None else shard_sequence(whole, self.layout, rank)
            allowed = ROUNDING[self.dtype] * (8 if name.startswith("d") else 1)
            worst = max(worst, error(got, want) / allowed)
        return worst

    def on_virtual_ranks(self) -> float:
        """All ranks in this process."""
        leaves = [x.clone().requires_grad_() for x in self.inputs[:3]]
        torch.manual_seed(self.drawn.seed)
        found = virtual_attention(*leaves, self.pattern, self.layout, key_padding_mask=self.padding, **self.options)
        grads = torch.autograd.grad((found.output * self.inputs[3]).sum(), leaves)
        return self.difference((*found, *grads), None)

    def step(self, rank: int, between: Callable[[], None] = lambda: None, **changes: Any) -> float:
        """This rank's part, forward and backward, with something done between the two."""
        own = [shard_sequence(x, self.layout, rank).clone() for x in self.inputs]
        asked = {"pattern": self.pattern, "layout": self.layout, **self.options, **changes}
        cut, dtype = asked.pop("cut", 0), asked.pop("dtype", None)
        leaves = [x[:, :, cut:].to(dtype or x.dtype).requires_grad_() for x in own[:3]]
        padding = None if self.padding is None else shard_sequence(self.padding, self.layout, rank, 1)
        # The first rank's seed decides, so the others may be anywhere.
        torch.manual_seed(self.drawn.seed if rank == 0 else rank)
        found = context_parallel_attention_with_lse(*leaves, key_padding_mask=padding, **asked)
        between()
        return self.difference((*found, *torch.autograd.grad((found.output * own[3]).sum(), leaves)), rank)

    def changes(self, rank: int) -> dict[str, Any]:
        """How the culprit's call differs from the others'."""
        if rank != self.culprit:
            return {}
        match self.drawn.fault:
            case "pattern":
                other = parse("window:1")
                return {"pattern": other if self.pattern != other else parse("full")}
            case "dtype":
                return {"dtype": torch.float32 if self.dtype != "float32" else torch.float64}
            case "tokens":
                return {"cut": 1} if self.layout.lengths[rank] else {"scale": float("nan")}
            case "overlap":
                return {"overlap": "local" if self.options["overlap"] == "none" else "none"}
            case "backend":
                return {"backend": "abacus"}
            case _:
                return {}


def one(exchange: Exchange, rank: int, world: int) -> tuple[str, float]:
    """What came of an exchange on one of several ranks, and its error as a share of what is allowed."""
    fault, culprit = exchange.drawn.fault, exchange.culprit
    if world == 1 and fault != "nan":
        fault = "none"
    if fault in DIFFERENCES:
        try:
            exchange.step(rank, **exchange.changes(rank))
        except (TypeError, ValueError):
            return "refused", exchange.step(rank)
        return "ACCEPTED", 0.0
    if fault in TOLD:
        return _told(exchange, rank, fault)

    def between() -> None:
        if fault == "dies between" and rank == culprit:
            os._exit(1)

    if fault == "dies before" and rank == culprit:
        os._exit(1)
    if fault == "stalls" and rank == culprit:
        time.sleep(2 * PATIENCE + 1)
    with faults():
        return "computed", exchange.step(rank, between)


def _told(exchange: Exchange, rank: int, fault: str) -> tuple[str, float]:
    """A rank fails after its exchange, once: all hear of it, or all compute again."""
    runs = []

    def step() -> float:
        runs.append(1)
        found = exchange.step(rank)
        if rank == exchange.culprit and len(runs) == 1:
            raise torch.OutOfMemoryError("out of memory") if fault == "memory" else KeyError("lost")
        return found

    try:
        found = attempt(step, lighten=lambda: True)
    except (StepFailed, KeyError) as told:
        expected = isinstance(told, KeyError) == (rank == exchange.culprit)
        return "told" if fault == "raises" and expected else "MISTOLD", exchange.step(rank)
    return "again" if fault == "memory" and len(runs) == 2 else "UNTOLD", found


def live(rank: int, world: int, drawn: list[tuple[Any, ...]], folder: str, patience: float) -> None:
    """A rank of a world of processes: exchange after exchange, with whoever is left.

    What came of each is written before the next begins: a rank that dies has told what it found until then.
    """
    global PATIENCE
    PATIENCE = patience
    generation, notes = 0, Path(folder, f"{rank}.jsonl")
    for each in drawn:
        exchange, began = Exchange(Drawn(*each), world), time.perf_counter()
        line = describe(exchange)
        try:
            outcome, share = one(exchange, rank, world)
            line |= {"outcome": outcome, "error": share}
        except RankFault as fault:
            line |= {"outcome": type(fault).__name__, "error": 0.0}
            generation += 1
            try:
                left = regroup(
                    processes.store, generation, rank, world, settle=PATIENCE / 2, timeout=timedelta(seconds=PATIENCE)
                )
                rank, world = left.rank, left.world
            except LeftBehind:
                line["outcome"] = "LeftBehind"
        line["seconds"] = round(time.perf_counter() - began, 3)
        with notes.open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)
        if line["outcome"] == "LeftBehind":
            break


def describe(exchange: Exchange, **more: Any) -> dict[str, Any]:
    """What was exchanged, for the record."""
    told = exchange.drawn._asdict() | {"world": exchange.world, "runs": len(exchange.layout.begins)}
    told |= {"dtype": exchange.dtype, "shape": list(exchange.inputs[1].shape), "padded": exchange.padding is not None}
    asked = {name: exchange.options[name] for name in ("overlap", "exchange", "receive_budget", "dropout_p")}
    return told | asked | more


def drawn_exchanges(count: int, base: int) -> list[Drawn]:
    """`count` exchanges: patterns from the strategies of the tests, the rest from the seed."""
    found: list[Drawn] = []
    draw = random.Random(base)

    def collect(problem: tuple[Any, int, int]) -> None:
        pattern, n, heads = problem
        # Strategies like small examples; a few of those are enough.
        if len(found) == count or (n < 8 and draw.random() < 0.8):
            return
        try:
            make_plan(pattern, n, heads)
        except ValueError:
            # Branches dealt out to fewer heads than there are branches.
            return
        number = len(found)
        way = ("processes", "virtual", "threads", "processes", "virtual")[number % 5]
        fault = draw.choice(FAULTS[way]) if draw.random() < 0.4 else "none"
        found.append(Drawn(number, draw.randrange(2**31), way, pattern.describe(), n, heads, fault))

    quiet = settings(
        max_examples=count,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    while len(found) < count:
        seed(base + len(found))(quiet(given(problems(longest=120, heads=(1, 2, 4)))(collect)))()
    return found


def on_threads(drawn: Drawn, world: int) -> Iterator[dict[str, Any]]:
    """The lines of all ranks of one exchange between threads."""
    exchange, lines = Exchange(drawn, world), {}

    def check(rank: int, _: int) -> None:
        outcome, share = one(exchange, rank, world)
        lines[rank] = describe(exchange, outcome=outcome, error=share)

    began = time.perf_counter()
    run_threads(check, world, seconds=60)
    seconds = round(time.perf_counter() - began, 3)
    yield from (line | {"seconds": seconds} for _, line in sorted(lines.items()))


def on_processes(drawn: list[Drawn], world: int) -> Iterator[dict[str, Any]]:
    """The lines of all ranks, those of a rank that died up to then."""
    limit = 60 + 4 * PATIENCE * len(drawn)
    with tempfile.TemporaryDirectory() as folder:
        plain = [tuple(each) for each in drawn]
        answers = processes.run_ranks(live, world, plain, folder, PATIENCE, seconds=limit, timeout=PATIENCE)
        failed = [f"rank {rank}: {told}" for rank, told in sorted(answers.items()) if told is not None]
        assert not failed, "\n".join(failed)
        for notes in sorted(Path(folder).iterdir()):
            yield from map(json.loads, notes.read_text(encoding="utf-8").splitlines())


def verdict(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of an exchange from those of its ranks: what came of it, and whether that is right."""
    fault = lines[0]["fault"] if lines[0]["world"] > 1 or lines[0]["fault"] == "nan" else "none"
    outcomes = sorted({line["outcome"] for line in lines})
    lost = {"RankLost", "RankStalled"}
    allowed = {"raises": {"told"}, "memory": {"again"}, "stalls": lost | {"LeftBehind"}}
    allowed |= {"dies before": lost, "dies between": lost, **{name: {"refused"} for name in DIFFERENCES}}
    worst = max(line["error"] for line in lines)
    gone = 1 if fault.startswith("dies") else 0
    whole = len(lines) == (1 if lines[0]["way"] == "virtual" else lines[0]["world"] - gone)
    right = whole and worst <= 1 and set(outcomes) <= allowed.get(fault, {"computed"})
    line = {name: value for name, value in lines[0].items() if name not in ("outcome", "error")}
    return line | {"fault": fault, "outcomes": outcomes, "error": round(worst, 4), "right": right}


def soak(count: int, base: int, say: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """A line for each exchange; one that hung or ended in an error that nobody planned is not `right`."""
    exchanges = drawn_exchanges(count, base)
    by_way = {way: [each for each in exchanges if each.way == way] for way in FAULTS}
    draw, lines = random.Random(base + 1), []
    lives = by_way["processes"]
    batches = [lives[i : i + LIFE] for i in range(0, len(lives), LIFE)]
    batches += [[each] for each in (*by_way["threads"], *by_way["virtual"])]
    for batch in batches:
        way, told = batch[0].way, []
        world = draw.randint(2, 6 if way == "virtual" else 5)
        try:
            if way == "virtual":
                began, exchange = time.perf_counter(), Exchange(batch[0], world)
                told = [describe(exchange, outcome="computed", error=exchange.on_virtual_ranks())]
                told[0]["seconds"] = round(time.perf_counter() - began, 3)
            else:
                told = list(on_threads(batch[0], world) if way == "threads" else on_processes(batch, world))
        except Exception as trouble:
            failed = {"right": False, "outcomes": [f"{type(trouble).__name__}: {trouble}"]}
            lines += [each._asdict() | {"world": world} | failed for each in batch]
            say(f"exchanges {batch[0].number} to {batch[-1].number} ({way}, {world} ranks): {trouble}")
            continue
        for each in batch:
            of_ranks = [line for line in told if line["number"] == each.number]
            if not of_ranks:
                failed = {"right": False, "outcomes": ["nobody was left"]}
            lines.append(verdict(of_ranks) if of_ranks else each._asdict() | {"world": world} | failed)
        wrong = sum(not line["right"] for line in lines)
        say(f"{len(lines)} of {count} exchanges, {wrong} wrong")
    return sorted(lines, key=lambda line: line["number"])


def main() -> int:
    """Soak, write the lines, sum them up; 0 when every exchange came out right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "soak.jsonl")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    lines = soak(asked.exchanges, asked.seed, lambda text: print(text, flush=True))
    about = {"seed": asked.seed, **facts("cpu")}
    write(asked.out, "".join(json.dumps(line | about) + "\n" for line in lines))
    for what in ("way", "world", "fault"):
        print(f"{what}:", ", ".join(f"{name} {many}" for name, many in sorted(Counter(x[what] for x in lines).items())))
    wrong = [line for line in lines if not line["right"]]
    for line in wrong:
        print("WRONG", json.dumps(line)[:2000])
    print(f"{len(lines)} exchanges, {len(wrong)} wrong, {time.perf_counter() - began:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
