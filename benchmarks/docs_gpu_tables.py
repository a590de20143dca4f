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
"""Least accepted and hoped-for speed relative to a peer on the same blocks, over all cases."""
BOUND_BARS = {
    ("forward", "fa4"): (1.0, 1.1),
    ("forward", "flex"): (1.3, 1.5),
    ("backward", "fa4"): (0.92, 1.0),
    ("backward", "flex"): (1.3, 1.5),
}
"""The same for cases that the tensor cores limit: 64K tokens, densities of 5 and 10 %."""
BOUND_ANY_ORDER = {"fa4": (1.0, 1.05), "flex": (1.3, 1.5)}
"""The same for the backward of these cases with sums in any order, as the peers'."""
SMALL_BLOCK_BARS = {"forward": (1.0, 1.15), "backward": (1.0, 1.15)}
"""The same for blocks of 64 relative to cuDNN's block-sparse attention."""
SPARSE_PEERS = ("fa4", "flex", "cudnn-blocks", "cudnn-interval")
"""Peers on the same blocks, in the order of columns."""
DILATED_BARS = {"forward": (0.9, 0.95), "backward": (0.85, 0.95)}
"""The same for the rate of a LongNet ladder relative to that of dense cuDNN."""
DENSE_BARS = {0.1: (8.0, 8.5), 0.01: (50.0, 70.0)}
"""The same for the speed relative to dense FlashAttention-4 at 64K tokens, by share of blocks kept."""
LONG_ROWS = ("global_local",)
"""Kinds of cases with rows that one multiprocessor would be too long at; their pieces take memory of their own."""
ANY_ORDER = {"ours": "", OURS_ANY_ORDER: ", sums in any order"}
"""Gradients with the same bits every time, and without that; peers sum in any order."""
METHOD = """\
A ratio above 1 means that this library is faster; **bold** marks ratios below 1. All libraries run each case in one
process on the same random bfloat16 tensors, batch 1, and on the same blocks: windows and segments consist of whole
blocks, and causal attention masks only the diagonal blocks. Before a library is timed, sampled rows and columns
of its output and gradients are compared with float64; a library with wrong results is not timed. A time is the median
of single calls between CUDA events after warm-up calls. Before each call, 256 MiB are written to empty the L2 cache.
Backward passes are timed through autograd. TFLOP/s count the allowed pairs: 4 d operations per pair forward, 2.5 times
as many backward. The figures are of the commit above; README.md states how the kernels
changed since."""


@dataclass(frozen=True)
class Judged:
    """A promise, what was measured, the least and greatest value, and the number of cases."""

    bar: Bar
    goal: float | None
    least: float
    most: float
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
            found.append(Judged(Bar(what, measured, must, unit), goal, min(values), max(values), len(values)))

    def sparse(what: str, direction: str, peer: str, subject: str, must: float, goal: float, bound: bool) -> None:
        mine = [line for line in table.ours(direction, subject) if has_blocks(line)]
        values = [table.ratio(line, peer) for line in mine if not bound or is_compute_bound(line)]
        name = f"{what} {direction} vs {PEERS[peer]}{ANY_ORDER[subject]}"
        add(name, [v for v in values if v is not None], must, goal)

    for (direction, peer), bars in BOUND_BARS.items():
        sparse("64K tokens, densities 5 and 10 %,", direction, peer, "ours", *bars, bound=True)
    for peer, bars in BOUND_ANY_ORDER.items():
        sparse("64K tokens, densities 5 and 10 %,", "backward", peer, OURS_ANY_ORDER, *bars, bound=True)
    for (direction, peer), bars in SPARSE_BARS.items():
        for subject in ANY_ORDER if direction == "backward" else ("ours",):
            sparse("block-sparse", direction, peer, subject, *bars, bound=False)
    for direction, (must, goal) in SMALL_BLOCK_BARS.items():
        values = [table.ratio(line, "cudnn-blocks") for line in table.ours(direction) if has_blocks(line, 64)]
        what = f"blocks of 64, {direction} vs {PEERS['cudnn-blocks']}"
        add(what, [v for v in values if v is not None], must, goal)
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


def has_blocks(line: Line, block: int = 128) -> bool:
    """Whether a line is of a case on blocks of this size."""
    return line["asked_density"] is not None and line.get("block", 128) == block


def is_compute_bound(line: Line) -> bool:
    """Whether the tensor cores limit a case, and not launches, memory or the host."""
    return line["n"] == 2**16 and line["asked_density"] in (0.05, 0.1)


class Results:
    """Lines of the GPU suite by what they measured; of two lines for the same, the later counts."""

    @property
    def sparse_peers(self) -> list[str]:
        """Peers on blocks that were timed."""
        return [peer for peer in SPARSE_PEERS if any(line["subject"] == peer for line in self.timed.values())]

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
    yield Heading("Targets", 3)
    yield (
        "Speeds are geometric means over all cases that both libraries ran, with the smallest and largest ratio; "
        "memory and plans are worst cases. Means over all cases include small calls, where the library gains most. "
        "The cases at 64K tokens, which the tensor cores limit, come first."
    )
    yield _table(
        ("quantity", "measured", "smallest", "largest", "required", "goal", "cases", "verdict"),
        (
            (
                judged.bar.what,
                f"{judged.bar.measured:.2f}{judged.bar.unit}",
                times_text(judged.least) if judged.bar.unit == "x" else f"{judged.least:.2f}{judged.bar.unit}",
                f"{judged.most:.2f}{judged.bar.unit}",
                f"{'>=' if judged.bar.unit == 'x' else '<='} {judged.bar.wanted:g}",
                "" if judged.goal is None else f"{judged.goal:g}",
                str(judged.cases),
                "met" if judged.bar.passed else "**missed**",
            )
            for judged in judge(results.all.values())
        ),
    )
    yield Heading("Block-sparse", 3)
    yield (
        "Blocks of 128 x 128 unless a case names another size, with lists shared by the heads; `density` is the share "
        "of computed blocks. Gradients are bitwise reproducible, except in the last columns: "
        "`reproducible_gradients(False)` sums dQ in any order, as the other libraries do. Cases are sorted by their "
        "smallest ratio, losses first."
    )
    pairs = [f"vs {PEERS[peer]}" for peer in results.sparse_peers]
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
        (_sparse_row(results, line) for line in _losses_first(results)),
    )
    yield Heading("Dilated (LongNet)", 3)
    yield (
        "`longnet-ladder` is segments 2048, 4096, 8192, 16384, 32768 at rates 1, 2, 4, 6, 12; `longnet-ratio-4` is "
        "2048, 8192, 32768 at rates 1, 4, 16. The ratio is our rate divided by dense cuDNN's best rate at the same "
        "width and causality."
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
    yield "Microseconds per forward call without gradients in a sequence of 200 calls, and the host time of a call."
    yield _table(
        (*shape, "ours", "host", *(f"{PEERS[p]}{what}" for p in ("fa4", "flex") for what in ("", " host"))),
        (_call_row(results, line) for line in results.ours("forward") if "call_us" in line),
    )
    yield Heading("Memory, plans and first calls", 3)
    yield (
        "Extra memory is the peak beyond inputs, output and gradients, in multiples of the LSE (4 bytes per row and "
        "head); for patterns with long rows, the pieces of split rows take most of it. The first call includes "
        "planning and compilation."
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


GENERATED = """\
Kernels compile to PTX without a GPU, so that it can be compared. `benchmarks/generated_code.py` compiled three trees
for compute capability 9.0 with Triton {triton} and recorded every launch on a stub of the CUDA driver: that of the
comparison, {git}; that of {last}, the commit of `gpu_stamp.json`, whose smoke tests passed on a GPU; and that of a
later commit, {measured}, of which a GPU ran single calls with patterns. A commit that is not in the history is known
by the hashes of its code in generated_code.jsonl. `same code` counts launches whose code is, byte for byte except for
names and line numbers, what {last} compiles to, and `same as {measured}` the other launches whose code is that of a
call with a pattern there. {equal} of {matched} launches with the same code in the same call also have the same grid,
block, shared memory, parameters and, for patterns, tables. Nothing in this table was computed on a GPU."""


class Launches:
    """Recorded launches of one kind of call."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.total = len(lines)
        self.same = sum(line["code"] in ("identical", "known") for line in lines)
        self.measured = sum(line["code"] == "measured" for line in lines)
        other = [line for line in lines if line["code"] in ("changed", "new")]
        self.other = len(other)
        self.kernels = dict.fromkeys(line["kernel"] for line in other)
        """Kernels with other code."""


def recorded_launches(lines: Iterable[Line]) -> dict[str, Launches]:
    """Launches of `benchmarks/generated_code.py` by kind of call."""
    kinds: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("suite") == "generated code" and line["code"] != "gone":
            name = line["call"].split(",")[0]
            if name.startswith(("hopper", "triton", "selected", "packed")):
                name = name.split()[0] if not {"cap", "bias"} & {*name.split()} else "triton, soft cap or bias"
            kinds.setdefault(name, []).append(line)
    return {kind: Launches(own) for kind, own in kinds.items()}


def generated_code_parts(lines: Sequence[Line]) -> Iterator[Part]:
    """Which launches have the code of the last GPU run."""
    mine = [line for line in lines if line.get("suite") == "generated code"]
    if not mine:
        return
    yield Heading("Generated code", 3)
    matched = [line for line in mine if line["code"] == "identical"]
    equal = sum(line["launch"] == "identical" for line in matched)
    facts = {name: mine[0].get(name, "no commit") for name in ("git", "last", "measured", "triton")}
    yield " ".join(GENERATED.format(equal=equal, matched=len(matched), **facts).split())
    yield Table(
        ("calls", "kernels with other code", "launches", "same code", f"same as {facts['measured']}", "other code"),
        [
            [kind, ", ".join(own.kernels), *map(str, (own.total, own.same, own.measured, own.other))]
            for kind, own in recorded_launches(mine).items()
        ],
        words=2,
    )


def _both(results: Results, line: Line) -> list[str]:
    return [*_figures(line), *_figures(results.beside(line, direction="backward"))]


def _losses_first(results: Results) -> list[Line]:
    """Block-sparse cases by their smallest ratio to a peer; cases without a peer come last."""

    def least(line: Line) -> float:
        same = (results.beside(line, direction=d, subject=s) for d in DIRECTIONS for s in ANY_ORDER)
        ratios = [results.ratio(own, peer) for own in same if own is not None for peer in results.sparse_peers]
        return min((ratio for ratio in ratios if ratio is not None), default=math.inf)

    return sorted((x for x in results.ours("forward") if x["asked_density"] is not None), key=least)


def _sparse_row(results: Results, line: Line) -> list[str]:
    cells = [*shape_cells(line), line["backend"]]
    for direction in DIRECTIONS:
        own = results.beside(line, direction=direction)
        ratios = [times_text(results.ratio(own, peer)) if own is not None else "" for peer in results.sparse_peers]
        cells += [*_figures(own), *ratios]
    free = results.beside(line, direction="backward", subject=OURS_ANY_ORDER)
    return [*cells, *("" if free is None else times_text(results.ratio(free, p)) for p in results.sparse_peers)]


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
