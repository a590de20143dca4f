"""Tables of the GPU suite: what was promised, what was measured, beside which peers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dilated_attention_pytorch.tools.bench.results import DIRECTIONS, OURS_ANY_ORDER, PEERS, Bar, Line
from dilated_attention_pytorch.tools.bench.suite_tables import machine, shape_cells, times_text
from dilated_attention_pytorch.tools.html_page import Heading, Part, Table, figure_text, readable_bytes, tokens_text

SPARSE_BARS = {
    ("forward", "fa4"): (1.0, 1.1),
    ("forward", "flex"): (1.3, 1.5),
    ("backward", "fa4"): (0.9, 1.1),
    ("backward", "flex"): (1.3, 1.5),
}
"""Least accepted and hoped-for speed relative to a peer on the same blocks."""
DILATED_BARS = {"forward": (0.9, 0.95), "backward": (0.85, 0.95)}
"""The same for the rate of a LongNet ladder relative to that of dense cuDNN."""
DENSE_BARS = {0.1: (8.0, 8.5), 0.01: (50.0, 70.0)}
"""The same for the speed relative to dense FlashAttention-4 at 64K tokens, by share of blocks kept."""
LONG_ROWS = ("global_local",)
"""Kinds of cases with rows that one multiprocessor would be too long at; their pieces take memory of their own."""
ANY_ORDER = {"ours": "", OURS_ANY_ORDER: ", sums in any order"}
"""Gradients with the same bits every time, and without that; peers sum in any order."""
METHOD = """\
Each case runs in one process on the same random bfloat16 tensors, batch 1, and peers are given the same blocks:
windows and segments are made of whole blocks of 128, and causal cuts only the diagonal blocks. Before anything is
timed, chosen rows and columns of output and gradients are compared with float64; a subject that is wrong is not timed.
A time is the median of single calls between CUDA events after warm-up calls, with 256 MiB written before each call to
empty the L2 cache, the same for all. Backward is timed through autograd for all. TFLOP/s count the allowed pairs: 4 d
operations a pair forward, 2.5 times as many backward. A ratio above 1 means this library is faster; **bold** marks
where it is slower."""


@dataclass(frozen=True)
class Judged:
    """A promise, what was measured, and over how many cases."""

    bar: Bar
    goal: float | None
    cases: int

    def __str__(self) -> str:
        return f"{self.bar} ({self.cases} {'case' if self.cases == 1 else 'cases'})"


def judge(lines: Iterable[Line]) -> list[Judged]:
    """Every promise made for the GPU that these lines can decide."""
    table = Results(lines)
    found: list[Judged] = []

    def add(what: str, values: list[float], must: float, goal: float | None = None, unit: str = "x") -> None:
        if values:
            # Of speeds the mean counts; of bytes and milliseconds the worst.
            measured = math.exp(sum(map(math.log, values)) / len(values)) if unit == "x" else max(values)
            found.append(Judged(Bar(what, measured, must, unit), goal, len(values)))

    for (direction, peer), (must, goal) in SPARSE_BARS.items():
        for subject, how in ANY_ORDER.items() if direction == "backward" else [("ours", "")]:
            mine = table.ours(direction, subject)
            values = [table.ratio(line, peer) for line in mine if line["asked_density"] is not None]
            add(f"block-sparse {direction} vs {PEERS[peer]}{how}", [v for v in values if v is not None], must, goal)
    for peer in ("fa4", "flex"):
        small = [x for x in table.ours("forward") if x["n"] == 2**14 and x["asked_density"] == 0.01]
        values = [table.ratio(line, peer, "call_us") for line in small]
        what = f"16K tokens, density 1 %, whole call forward vs {PEERS[peer]}"
        add(what, [v for v in values if v is not None], 3.0)
    for direction, (must, goal) in DILATED_BARS.items():
        for subject, how in ANY_ORDER.items() if direction == "backward" else [("ours", "")]:
            mine = table.ours(direction, subject)
            values = [table.dilated_ratio(line) for line in mine if line["kind"].startswith("longnet")]
            add(f"dilated {direction}, rate vs dense cuDNN{how}", [v for v in values if v is not None], must, goal)
    for direction, unit in (("forward", " LSE"), ("backward", " delta")):
        known = [x for x in table.ours(direction) if x.get("workspace_bytes") is not None]
        whole = [x["workspace_bytes"] / x["lse_bytes"] for x in known if x["kind"] not in LONG_ROWS]
        add(f"extra peak memory {direction}", whole, 1.05, None, unit)
        cut = [_pieces_share(x) for x in known if x["kind"] in LONG_ROWS]
        add(f"extra peak memory {direction}, pieces of long rows, of the call's tensors", cut, 5.0, None, " %")
    plans = [x for x in table.ours("plan") if x["n"] == 2**20 and x["heads"] == 16]
    shape = "plan of 1M tokens x 16 heads x 64 blocks a row"
    add(f"{shape}: memory", [x["plan_bytes"] / 1e6 for x in plans], 100.0, None, " MB")
    add(f"{shape}: time", [x["p50_ms"] for x in plans], 50.0, 20.0, " ms")
    for share, (must, goal) in DENSE_BARS.items():
        for subject, how in ANY_ORDER.items():
            mine = [line for line in table.ours("forward", subject) if line["asked_density"] == share]
            values = [table.dense_speedup(line) for line in mine]
            what = f"speed-up over dense FlashAttention-4 at 64K, density {share:.0%}, forward + backward{how}"
            add(what, [v for v in values if v is not None], must, goal)
    return found


class Results:
    """Lines of the GPU suite by what they measured; of two lines for the same, the later counts."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.all = {_key(line): line for line in lines if line.get("suite") == "gpu" and "subject" in line}
        self.timed = {key: line for key, line in self.all.items() if line["p50_ms"] is not None}

    def ours(self, direction: str, subject: str = "ours") -> list[Line]:
        """Our timed lines of a direction, in the order of the tables."""
        mine = [x for x in self.timed.values() if x["subject"] == subject and x["direction"] == direction]
        return sorted(mine, key=_place)

    def beside(self, line: Line, **changes: Any) -> Line | None:
        """The timed line that differs from this one in the given fields alone."""
        return self.timed.get(_key({**line, **changes}))

    def ratio(self, line: Line, peer: str, what: str = "p50_ms") -> float | None:
        """How many times faster ours is than a peer on the same case."""
        other = self.beside(line, subject=peer)
        return None if other is None or what not in other or what not in line else other[what] / line[what]

    def dilated_ratio(self, line: Line) -> float | None:
        """Our rate on a ladder relative to dense cuDNN's best rate at the same width and causality."""
        rates = [
            x["tflops"]
            for x in self.timed.values()
            if x["subject"] == "sdpa-cudnn" and all(x[f] == line[f] for f in ("d", "causal", "direction"))
        ]
        return line["tflops"] / max(rates) if rates else None

    def dense_speedup(self, line: Line) -> float | None:
        """How many times faster forward and backward together are than dense FlashAttention-4 at 64K tokens."""
        if line["n"] != 2**16 or line["causal"] or line["kind"] not in ("random", "local"):
            return None
        times = []
        for name in ({"subject": "fa4", "case": "dense"}, {}):
            both = [self.beside(line, direction=direction, **name) for direction in DIRECTIONS]
            times.append(sum(x["p50_ms"] if x is not None else math.nan for x in both))
        return None if math.isnan(sum(times)) else times[0] / times[1]


def _key(line: Line) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("case", "n", "d", "heads", "key_heads", "subject", "direction"))


def _place(line: Line) -> tuple[Any, ...]:
    shape = line["heads"], line["key_heads"], line["causal"], line["kind"], line["n"], -line["d"]
    return *shape, -(line["asked_density"] or 0), line["subject"], line["direction"]


def _figures(line: Line | None) -> list[str]:
    if line is None:
        return ["", ""]
    return [figure_text(line["p50_ms"]), f"{line['tflops']:.0f}"]


def gpu_parts(results: Results) -> Iterator[Part]:
    """All that the GPU suite tells."""
    yield machine(
        results.all.values(),
        "python -m dilated_attention_pytorch.tools.bench --suite gpu --out benchmarks/results/gpu.jsonl",
    )
    yield " ".join(METHOD.split())
    yield Heading("Promises", 3)
    yield "Speeds are geometric means over all cases in which both ran; memory and plans are the worst case."
    yield _table(
        ("promise", "measured", "must", "goal", "cases", "verdict"),
        (
            (
                judged.bar.what,
                f"{judged.bar.measured:.2f}{judged.bar.unit}",
                f"{'>=' if judged.bar.unit == 'x' else '<='} {judged.bar.wanted:g}",
                "" if judged.goal is None else f"{judged.goal:g}",
                str(judged.cases),
                "kept" if judged.bar.passed else "**broken**",
            )
            for judged in judge(results.all.values())
        ),
    )
    yield Heading("Block-sparse", 3)
    yield (
        "Blocks of 128 x 128, lists shared by the heads; `density` is blocks computed over all blocks. Gradients have "
        "the same bits every time; the last columns are those of `reproducible_gradients(False)`, which sums dQ in any "
        "order as the peers do."
    )
    pairs = [f"vs {PEERS[peer]}" for peer in ("fa4", "flex")]
    shape = ("case", "heads", "tokens", "d", "density")
    yield _table(
        (
            *shape,
            "kernel",
            "forward ms",
            "TFLOP/s",
            *pairs,
            "backward ms",
            "TFLOP/s",
            *pairs,
            *(f"any order {p}" for p in pairs),
        ),
        (_sparse_row(results, line) for line in results.ours("forward") if line["asked_density"] is not None),
    )
    yield Heading("Dilated (LongNet)", 3)
    yield (
        "`longnet-ladder` is segments 2048, 4096, 8192, 16384, 32768 at rates 1, 2, 4, 6, 12; `longnet-ratio-4` is "
        "2048, 8192, 32768 at rates 1, 4, 16. The ratio is our rate over dense cuDNN's best rate at the same width and "
        "causality."
    )
    yield _table(
        (
            *("case", "tokens", "d", "kernel", "forward ms", "TFLOP/s", "vs cuDNN"),
            *("backward ms", "TFLOP/s", "vs cuDNN", "any order vs cuDNN"),
        ),
        (_ladder_row(results, line) for line in results.ours("forward") if line["kind"].startswith("longnet")),
    )
    yield Heading("Dense peers", 3)
    dense = sorted((x for x in results.timed.values() if x["kind"] == "dense"), key=_place)
    yield _table(
        ("peer", "case", "tokens", "d", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s"),
        (
            (PEERS.get(x["subject"], x["subject"]), x["case"], tokens_text(x["n"]), str(x["d"]), *_both(results, x))
            for x in dense
            if x["direction"] == "forward"
        ),
    )
    yield Heading("Whole calls", 3)
    yield "Microseconds of one forward call without gradients in a stream of 200, and of the host's part of it."
    yield _table(
        (*shape, "ours", "host", *(f"{PEERS[p]}{what}" for p in ("fa4", "flex") for what in ("", " host"))),
        (_call_row(results, line) for line in results.ours("forward") if "call_us" in line),
    )
    yield Heading("Memory, plans and first calls", 3)
    yield (
        "Extra memory is the peak beyond inputs, output and gradients, in multiples of the LSE (4 bytes a row and "
        "head); where rows are long, their pieces are most of it. The first call plans, and compiles what the process "
        "has not compiled yet."
    )
    yield _table(
        (*shape, "extra forward", "extra backward", "plan ms", "plan", "first forward s", "first backward s"),
        (_cost_row(results, line) for line in results.ours("forward")),
    )
    missing = sorted((x for x in results.all.values() if x["p50_ms"] is None), key=_place)
    if missing:
        yield Heading("Not measured", 3)
        reasons: dict[tuple[str, str, str], int] = {}
        for line in missing:
            why = line["skipped"] or f"wrong, {line['gate']:.2g} times the accepted error"
            name = PEERS.get(line["subject"], line["subject"])
            reasons[name, line["direction"], why] = reasons.get((name, line["direction"], why), 0) + 1
        yield _table(
            ("subject", "direction", "why", "cases"),
            ((*reason, str(count)) for reason, count in sorted(reasons.items())),
        )


def _both(results: Results, line: Line) -> list[str]:
    return [*_figures(line), *_figures(results.beside(line, direction="backward"))]


def _sparse_row(results: Results, line: Line) -> list[str]:
    cells = [*shape_cells(line), line["backend"]]
    for direction in DIRECTIONS:
        own = results.beside(line, direction=direction)
        ratios = [times_text(results.ratio(own, peer)) if own is not None else "" for peer in ("fa4", "flex")]
        cells += [*_figures(own), *ratios]
    free = results.beside(line, direction="backward", subject=OURS_ANY_ORDER)
    return [*cells, *("" if free is None else times_text(results.ratio(free, peer)) for peer in ("fa4", "flex"))]


def _ladder_row(results: Results, line: Line) -> list[str]:
    cells = [line["case"], tokens_text(line["n"]), str(line["d"]), line["backend"]]
    for direction in DIRECTIONS:
        own = results.beside(line, direction=direction)
        cells += [*_figures(own), "" if own is None else times_text(results.dilated_ratio(own))]
    free = results.beside(line, direction="backward", subject=OURS_ANY_ORDER)
    return [*cells, "" if free is None else times_text(results.dilated_ratio(free))]


def _pieces_share(line: Line) -> float:
    """Percent of the tensors a call is given and gives that it takes beside LSE or delta."""
    tensors = 4 * line["n"] * line["d"] * (line["heads"] + line["key_heads"])
    tensors *= 2 if line["direction"] == "backward" else 1
    return 100 * (line["workspace_bytes"] - line["lse_bytes"]) / tensors


def _call_row(results: Results, line: Line) -> list[str]:
    cells = shape_cells(line)
    for subject in ("ours", "fa4", "flex"):
        own = results.beside(line, subject=subject) or {}
        cells += [f"{own[name]:.0f}" if name in own else "" for name in ("call_us", "host_us")]
    return cells


def _cost_row(results: Results, line: Line) -> list[str]:
    back = results.beside(line, direction="backward") or {}
    extra = [x.get("workspace_bytes") for x in (line, back)]
    cells = ["" if bytes_ is None else f"{bytes_ / line['lse_bytes']:.2f}" for bytes_ in extra]
    plan = [f"{line['plan_ms']:.1f}", readable_bytes(line["plan_bytes"])]
    first = ["" if "first_call_s" not in x else f"{x['first_call_s']:.2f}" for x in (line, back)]
    return [*shape_cells(line), *cells, *plan, *first]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    return Table(header, [list(row) for row in rows])
