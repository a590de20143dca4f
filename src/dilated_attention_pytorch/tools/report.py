"""Pages for people: one self-contained HTML page of text, tables and charts, and the page of benchmark results.

python -m dilated_attention_pytorch.tools.report benchmarks/results/*.jsonl --docs docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from .bench import DIRECTIONS, Bar
from .measure import readable_bytes

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 168, 16, 48

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --faint: #d8dde4; --soft: #5b6674; --page: #ffffff;
  --line0: #0b62b4; --line1: #b4460b; --line2: #1a7f52; --line3: #7a3fa8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --faint: #333c48; --soft: #9aa5b3; --page: #14181e;
  --line0: #6cb2f5; --line1: #f59a5c; --line2: #62c99a; --line3: #c79af0; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 760px;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; } p { max-width: 65ch; }
.scroll { overflow-x: auto; } svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
pre { font: 12px/1.1 ui-monospace, monospace; overflow-x: auto; }
.grid { stroke: var(--faint); } .tick { fill: var(--soft); } .name { font-weight: 600; }
"""

Point = tuple[float, float]
Line = dict[str, Any]
"""One measured subject and direction, as the benchmark wrote it."""

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
PEERS = {"fa4": "FlashAttention-4", "flex": "FlexAttention", "sdpa-cudnn": "cuDNN", "sdpa-flash": "SDPA flash"}
METHOD = """\
Each case runs in one process on the same random bfloat16 tensors, batch 1, and peers are given the same blocks:
windows and segments are made of whole blocks of 128, and causal cuts only the diagonal blocks. Before anything is
timed, chosen rows and columns of output and gradients are compared with float64; a subject that is wrong is not timed.
A time is the median of single calls between CUDA events after warm-up calls, with 256 MiB written before each call to
empty the L2 cache, the same for all. Backward is timed through autograd for all. TFLOP/s count the allowed pairs: 4 d
operations a pair forward, 2.5 times as many backward. A ratio above 1 means this library is faster; **bold** marks
where it is slower."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as an HTML table."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def preformatted(text: str) -> str:
    """Text in which every character has the same width."""
    return f"<pre>{escape(text)}</pre>"


def paragraph(text: str) -> str:
    """Running text."""
    return f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """Title of a section."""
    return f"<h2>{escape(text)}</h2>"


def page(title: str, parts: Sequence[str]) -> str:
    """The whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def write(path: Path, text: str) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def tokens_text(n: float) -> str:
    """65536 -> 64K."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if n >= size:
            return f"{n / size:g}{unit}"
    return f"{n:g}"


def seconds_text(seconds: float) -> str:
    """0.0123 -> 12.3 ms."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def log_chart(
    series: dict[str, list[Point]],
    x_name: str,
    y_name: str,
    x_text: Callable[[float], str] = tokens_text,
    y_text: Callable[[float], str] = seconds_text,
) -> str:
    """Lines over two logarithmic axes, x in powers of two and y in powers of ten. Every value must be positive."""
    points = [point for line in series.values() for point in line]
    x_ticks = _powers([x for x, _ in points], 2)
    y_ticks = _powers([y for _, y in points], 10)
    x_at = _scale(x_ticks, LEFT, WIDTH - RIGHT)
    y_at = _scale(y_ticks, HEIGHT - BOTTOM, TOP)
    drawn = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_name)} against {escape(x_name)}">']
    for tick in y_ticks:
        y = y_at(tick)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{y_text(tick)}</text>')
    for tick in x_ticks:
        x = x_at(tick)
        drawn.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x_text(tick)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    labels = _spread_labels({name: y_at(line[-1][1]) for name, line in series.items() if line})
    for index, (name, line) in enumerate(series.items()):
        if line:
            drawn += _line(name, [(x_at(x), y_at(y)) for x, y in line], f"var(--line{index % 4})", labels[name])
            drawn += [
                f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3.5" fill="var(--line{index % 4})">'
                f"<title>{escape(name)}: {x_text(x)}, {y_text(y)}</title></circle>"
                for x, y in line
            ]
    return "\n".join([*drawn, "</svg>"])


def _line(name: str, points: list[Point], color: str, label_y: float) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    label_x = points[-1][0] + 10
    return [
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>',
        f'<text class="name" x="{label_x:.1f}" y="{label_y + 4:.1f}" fill="{color}">{escape(name)}</text>',
    ]


def _spread_labels(wanted: dict[str, float], apart: float = 16.0) -> dict[str, float]:
    """Heights of the labels, moved down where two would overlap."""
    placed: dict[str, float] = {}
    lowest = -math.inf
    for name, y in sorted(wanted.items(), key=lambda item: item[1]):
        lowest = max(y, lowest + apart)
        placed[name] = lowest
    return placed


def _powers(values: Sequence[float], base: int) -> list[float]:
    """Powers of the base that enclose the values; at least two, so that the axis has a length."""
    first = math.floor(round(math.log(min(values), base), 9))
    last = max(math.ceil(round(math.log(max(values), base), 9)), first + 1)
    return [float(base) ** power for power in range(first, last + 1)]


def _scale(ticks: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    begin, end = math.log(ticks[0]), math.log(ticks[-1])
    return lambda value: low + (high - low) * (math.log(value) - begin) / (end - begin)


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
        values = [table.ratio(line, peer) for line in table.ours(direction) if line["asked_density"] is not None]
        add(f"block-sparse {direction} vs {PEERS[peer]}", [v for v in values if v is not None], must, goal)
    for peer in ("fa4", "flex"):
        small = [x for x in table.ours("forward") if x["n"] == 2**14 and x["asked_density"] == 0.01]
        values = [table.ratio(line, peer, "call_us") for line in small]
        what = f"16K tokens, density 1 %, whole call forward vs {PEERS[peer]}"
        add(what, [v for v in values if v is not None], 3.0)
    for direction, (must, goal) in DILATED_BARS.items():
        values = [table.dilated_ratio(line) for line in table.ours(direction) if line["kind"].startswith("longnet")]
        add(f"dilated {direction}, rate vs dense cuDNN", [v for v in values if v is not None], must, goal)
    for direction, unit in (("forward", " LSE"), ("backward", " delta")):
        known = [x for x in table.ours(direction) if x.get("workspace_bytes") is not None]
        add(f"extra peak memory {direction}", [x["workspace_bytes"] / x["lse_bytes"] for x in known], 1.05, None, unit)
    plans = [x for x in table.ours("plan") if x["n"] == 2**20 and x["heads"] == 16]
    shape = "plan of 1M tokens x 16 heads x 64 blocks a row"
    add(f"{shape}: memory", [x["plan_bytes"] / 1e6 for x in plans], 100.0, None, " MB")
    add(f"{shape}: time", [x["p50_ms"] for x in plans], 50.0, 20.0, " ms")
    for share, (must, goal) in DENSE_BARS.items():
        values = [table.dense_speedup(line) for line in table.ours("forward") if line["asked_density"] == share]
        what = f"speed-up over dense FlashAttention-4 at 64K, density {share:.0%}, forward + backward"
        add(what, [v for v in values if v is not None], must, goal)
    return found


class Results:
    """Lines of the GPU suite by what they measured; of two lines for the same, the later counts."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.all = {_key(line): line for line in lines if line.get("suite") == "gpu"}
        self.timed = {key: line for key, line in self.all.items() if line["p50_ms"] is not None}

    def ours(self, direction: str) -> list[Line]:
        """Our timed lines of a direction, in the order of the tables."""
        mine = [x for x in self.timed.values() if x["subject"] == "ours" and x["direction"] == direction]
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


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, its first column text and the others figures."""
    ruler = [":--", *("--:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows))


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x" if value >= 1 else f"**{value:.2f}x**"


def _figures(line: Line | None) -> list[str]:
    if line is None:
        return ["", ""]
    return [f"{line['p50_ms']:.3g}", f"{line['tflops']:.0f}"]


def benchmark_page(lines: Sequence[Line]) -> str:
    """The whole document, the same for the same lines."""
    results = Results(lines)
    parts = [
        "# Benchmarks",
        "This page is written by `python -m dilated_attention_pytorch.tools.report benchmarks/results/*.jsonl "
        "--docs docs/benchmarks.md`; the figures are those of the files in `benchmarks/results`.",
    ]
    if results.all:
        parts += ["## One GPU", *_gpu_parts(results)]
    parts += _cpu_parts([line for line in lines if "relative_rate" in line])
    return "\n\n".join(parts) + "\n"


def _machine(lines: Iterable[Line], command: str) -> str:
    names = ("device", "torch", "triton", "flash_attn_4", "python", "git")
    known = {name: sorted({str(line[name]) for line in lines if line.get(name) is not None}) for name in names}
    words = [f"{name.replace('_', '-')} {' and '.join(values)}" for name, values in known.items() if values]
    return f"{', '.join(words).removeprefix('device ')}. Measured by `{command}`."


def _gpu_parts(results: Results) -> Iterator[str]:
    yield _machine(
        results.all.values(),
        "python -m dilated_attention_pytorch.tools.bench --suite gpu --out benchmarks/results/gpu.jsonl",
    )
    yield METHOD
    yield "### Promises"
    yield "Speeds are geometric means over all cases in which both ran; memory and plans are the worst case."
    yield markdown(
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
    yield "### Block-sparse"
    yield "Blocks of 128 x 128, lists shared by the heads; `density` is blocks computed over all blocks."
    pairs = [f"vs {PEERS[peer]}" for peer in ("fa4", "flex")]
    shape = ("case", "heads", "tokens", "d", "density")
    yield markdown(
        (*shape, "kernel", "forward ms", "TFLOP/s", *pairs, "backward ms", "TFLOP/s", *pairs),
        (_sparse_row(results, line) for line in results.ours("forward") if line["asked_density"] is not None),
    )
    yield "### Dilated (LongNet)"
    yield (
        "`longnet-ladder` is segments 2048, 4096, 8192, 16384, 32768 at rates 1, 2, 4, 6, 12; `longnet-ratio-4` is "
        "2048, 8192, 32768 at rates 1, 4, 16. The ratio is our rate over dense cuDNN's best rate at the same width and "
        "causality."
    )
    yield markdown(
        ("case", "tokens", "d", "kernel", "forward ms", "TFLOP/s", "vs cuDNN", "backward ms", "TFLOP/s", "vs cuDNN"),
        (_ladder_row(results, line) for line in results.ours("forward") if line["kind"].startswith("longnet")),
    )
    yield "### Dense peers"
    dense = sorted((x for x in results.timed.values() if x["kind"] == "dense"), key=_place)
    yield markdown(
        ("peer", "case", "tokens", "d", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s"),
        (
            (PEERS[x["subject"]], x["case"], tokens_text(x["n"]), str(x["d"]), *_both(results, x))
            for x in dense
            if x["direction"] == "forward"
        ),
    )
    yield "### Whole calls"
    yield "Microseconds of one forward call without gradients in a stream of 200, and of the host's part of it."
    yield markdown(
        (*shape, "ours", "host", *(f"{PEERS[p]}{what}" for p in ("fa4", "flex") for what in ("", " host"))),
        (_call_row(results, line) for line in results.ours("forward") if "call_us" in line),
    )
    yield "### Memory, plans and first calls"
    yield (
        "Extra memory is the peak beyond inputs, output and gradients, in multiples of the LSE (4 bytes a row and "
        "head). The first call plans and compiles what the process has not compiled yet."
    )
    yield markdown(
        (*shape, "extra forward", "extra backward", "plan ms", "plan", "first forward s", "first backward s"),
        (_cost_row(results, line) for line in results.ours("forward")),
    )
    missing = sorted((x for x in results.all.values() if x["p50_ms"] is None), key=_place)
    if missing:
        yield "### Not measured"
        reasons: dict[tuple[str, str, str], int] = {}
        for line in missing:
            why = line["skipped"] or f"wrong by {line['gate']:.1e}"
            name = PEERS.get(line["subject"], line["subject"])
            reasons[name, line["direction"], why] = reasons.get((name, line["direction"], why), 0) + 1
        yield markdown(
            ("subject", "direction", "why", "cases"),
            ((*reason, str(count)) for reason, count in sorted(reasons.items())),
        )


def _shape(line: Line) -> list[str]:
    heads = f"{line['heads']}" if line["heads"] == line["key_heads"] else f"{line['heads']}:{line['key_heads']}"
    return [line["case"], heads, tokens_text(line["n"]), str(line["d"]), f"{line['density']:.2%}"]


def _both(results: Results, line: Line) -> list[str]:
    return [*_figures(line), *_figures(results.beside(line, direction="backward"))]


def _sparse_row(results: Results, line: Line) -> list[str]:
    cells = [*_shape(line), line["backend"]]
    for direction in DIRECTIONS:
        own = results.beside(line, direction=direction)
        ratios = [_times(results.ratio(own, peer)) if own is not None else "" for peer in ("fa4", "flex")]
        cells += [*_figures(own), *ratios]
    return cells


def _ladder_row(results: Results, line: Line) -> list[str]:
    cells = [line["case"], tokens_text(line["n"]), str(line["d"]), line["backend"]]
    for direction in DIRECTIONS:
        own = results.beside(line, direction=direction)
        cells += [*_figures(own), "" if own is None else _times(results.dilated_ratio(own))]
    return cells


def _call_row(results: Results, line: Line) -> list[str]:
    cells = _shape(line)
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
    return [*_shape(line), *cells, *plan, *first]


def _cpu_parts(lines: Sequence[Line]) -> Iterator[str]:
    if not lines:
        return
    yield "## One CPU"
    yield _machine(
        lines, "python -m dilated_attention_pytorch.tools.bench --suite cpu --out benchmarks/results/cpu.jsonl"
    )
    yield (
        "Rate on the flops of the kept blocks relative to the rate of torch's dense attention, measured turn about in "
        "the same process: 1 means that a tenth of the blocks takes a tenth of the time."
    )
    ours = [line for line in lines if line["relative_rate"]]
    rows = {tuple(line[name] for name in ("case", "n", "d", "heads", "key_heads", "direction")): line for line in ours}
    yield markdown(
        ("case", "heads", "tokens", "d", "density", "kernel", "direction", "rate vs dense", "speed-up over dense"),
        (
            [
                *_shape(line),
                line["backend"],
                line["direction"],
                _times(rate := max(line["relative_rate"].values())),
                f"{rate / line['density']:.1f}x",
            ]
            for _, line in sorted(rows.items())
        ),
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="report", description="Write the page of benchmark results.")
    parser.add_argument("results", nargs="+", type=Path, help="files the benchmark wrote")
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks.md"))
    options = parser.parse_args(arguments)
    texts = [path.read_text(encoding="utf-8") for path in sorted(options.results)]
    write(options.docs, benchmark_page([json.loads(line) for text in texts for line in text.splitlines()]))
    print(f"The page is {options.docs}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
