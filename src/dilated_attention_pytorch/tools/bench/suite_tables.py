"""Tables and charts of the suites that run on any device, in the form of the original reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ...kernels.triton import PACKAGE
from ..html_page import Chart, Heading, Part, Table, figure_text, log_chart, readable_bytes, seconds_text, tokens_text
from .cases import MODEL_LAYERS, MODELS
from .results import OURS_ANY_ORDER, PEERS, Line, is_left_out

MOST_LINES_IN_A_CHART = 7
MOST_DENSE_LINES = 2


class Record(NamedTuple):
    """One timed line of any suite."""

    device: str
    suite: str
    name: str
    is_dense: bool
    n: int
    d: int
    heads: int
    direction: str
    ms: float
    """Median time. Time and memory of dense attention are scaled to the heads of the cases in its table."""
    peak: int | None
    density: float
    line: Line

    @property
    def place(self) -> tuple[str, int, int]:
        """Key of the table that a line belongs to."""
        return self.device, self.d, self.heads


def records(lines: Iterable[Line]) -> list[Record]:
    """Timed forward and backward passes, sorted; the later of two lines with one key counts."""
    found: dict[tuple[object, ...], Record] = {}
    for line in lines:
        if line.get("p50_ms") is None or line.get("direction") not in ("forward", "backward"):
            continue
        if line.get("subject") == OURS_ANY_ORDER:
            # Shown in the GPU tables; here it would repeat a case.
            continue
        made = _record(line)
        found[made[:8]] = made
    return sorted(found.values(), key=lambda record: tuple(map(str, record[:3])) + record[4:8])


def _record(line: Line) -> Record:
    subject, case, heads, ms = line.get("subject", "ours"), line["case"], line["heads"], line["p50_ms"]
    is_dense = case.startswith("dense")
    name = case
    if is_dense:
        name = f"{case}, {PEERS.get(line['backend'], 'torch')}"
    elif subject != "ours":
        name = f"{case}, {PEERS.get(subject, subject)}"
    # Lines without a suite were measured before reused memory was counted.
    peak = line.get("peak_bytes") if line.get("suite") else None
    if is_dense and heads < line["key_heads"]:
        more = line["key_heads"] / heads
        heads, ms, peak = line["key_heads"], ms * more, None if peak is None else round(peak * more)
    return Record(
        line["device"],
        line.get("suite") or "cpu",
        name,
        is_dense,
        line["n"],
        line["d"],
        heads,
        line["direction"],
        ms,
        peak,
        line["density"],
        line,
    )


def times_text(value: float | None) -> str:
    """A ratio; bold where it is below 1."""
    return "" if value is None else f"{value:.2f}x" if value >= 1 else f"**{value:.2f}x**"


def machine(lines: Iterable[Line], command: str | None = None) -> str:
    """Machine, versions, and the command that measured; by default the suites of the lines."""
    lines = list(lines)
    names = ("device", "torch", PACKAGE, "flash_attn_4", "python", "git")
    known = {name: sorted({str(line[name]) for line in lines if line.get(name) is not None}) for name in names}
    words = [f"{name.replace('_', '-')} {' and '.join(values)}" for name, values in known.items() if values]
    suites = sorted({str(line["suite"]) for line in lines if line.get("suite")})
    commands = [command] if command else [f"dap bench --suite {name}" for name in suites]
    measured = " Measured by " + ", ".join(f"`{each}`" for each in commands) + "." if commands else ""
    return f"{', '.join(words).removeprefix('device ')}.{measured}"


def shape_cells(line: Line) -> list[str]:
    """Case, heads, tokens, width and density."""
    heads = f"{line['heads']}" if line["heads"] == line["key_heads"] else f"{line['heads']}:{line['key_heads']}"
    return [line["case"], heads, tokens_text(line["n"]), str(line["d"]), f"{line['density']:.2%}"]


def _case_parts(own: list[Record]) -> Iterator[Part]:
    """Patterns by the names of the cases."""
    patterns = {
        r.name: r.line["pattern"] for r in own if not r.is_dense and r.line.get("pattern") and ", " not in r.name
    }
    if patterns:
        yield "Patterns of the cases; if the pattern depends on the length, that of the longest sequence."
        yield Table(("case", "pattern"), [[name, f"`{text}`"] for name, text in sorted(patterns.items())], words=2)


def suite_parts(lines: Sequence[Line]) -> Iterator[Part]:
    """A section for each device."""
    timed = records(lines)
    known = {(*record.place, record.n) for record in timed if record.is_dense}
    left_out = [line for line in lines if is_left_out(line)]
    left_out = [line for line in left_out if (*_place(line), line["n"]) not in known]
    for device in sorted({record.device for record in timed}):
        own = [record for record in timed if record.device == device]
        yield Heading(f"By length: {device}")
        yield machine(record.line for record in own)
        yield from _case_parts(own)
        for place in sorted({record.place for record in own}):
            absent = [line for line in left_out if _place(line) == place]
            yield from _by_length([record for record in own if record.place == place], absent)
        yield from _density_parts(own)
        yield from _dilation_parts(own)
        yield from _class_parts(own)
        yield from _rank_parts(own)
    yield from longest_parts(lines)


def _place(line: Line) -> tuple[str, int, int]:
    return line["device"], line["d"], line["key_heads"]


def _by_length(own: list[Record], absent: Iterable[Line]) -> Iterator[Part]:
    varied = [r for r in own if r.suite not in ("dilation", "density", "variants", "distributed")]
    lengths = sorted({record.n for record in varied})
    forward = {(r.name, r.n): r for r in varied if r.direction == "forward"}
    names = [name for name in sorted({name for name, _ in forward}) if sum((name, n) in forward for n in lengths) > 1]
    if not names or len(lengths) < 2:
        return
    _, d, heads = own[0].place
    yield Heading(f"{heads} head{'s' * (heads > 1)} of {d}", 3)
    header = [tokens_text(n) for n in lengths]

    def cells(text: Callable[[Record], str | None]) -> list[list[str]]:
        return [[name, *((text(r) or "" if (r := forward.get((name, n))) else "") for n in lengths)] for name in names]

    yield "Milliseconds of a forward pass."
    yield Table(("case", *header), cells(lambda r: figure_text(r.ms)))
    yield _chart(f"time-{heads}x{d}", "Time of a forward pass", forward, names, lambda r: r.ms / 1e3)
    for n, why in sorted({(line["n"], line["skipped"]) for line in absent}):
        yield f"Dense attention was not timed at {tokens_text(n)}: {why}."
    yield "Million tokens per second, forward."
    yield Table(("case", *header), cells(lambda r: figure_text(r.n / r.ms / 1e3)))
    if any(r.peak for r in forward.values()):
        yield "Bytes per token that a forward pass allocates, including its output."
        yield Table(("case", *header), cells(lambda r: None if r.peak is None else f"{r.peak / r.n:.0f}"))
        a_token = f"memory-{heads}x{d}", "Memory per token"
        yield _chart(*a_token, forward, names, lambda r: (r.peak or 0) / r.n, readable_bytes, 2)
    dense = {n: min((r.ms for r in forward.values() if r.is_dense and r.n == n), default=None) for n in lengths}
    if any(dense.values()):
        yield "Speed-up of a forward pass over dense attention on the same machine."
        rows = cells(lambda r: times_text(dense[r.n] / r.ms) if dense[r.n] else None)  # pyrefly: ignore
        yield Table(("case", *header), [row for row in rows if not row[0].startswith("dense")])


def _chart(
    name: str,
    title: str,
    forward: dict[tuple[str, int], Record],
    names: Sequence[str],
    value: Callable[[Record], float],
    text: Callable[[float], str] = seconds_text,
    y_base: int = 10,
) -> Chart:
    device = next(iter(forward.values())).device
    series = {}
    for own in drawn_names(forward, names):
        points = sorted((float(n), value(r)) for (which, n), r in forward.items() if which == own and value(r) > 0)
        series[own] = points
    drawn = log_chart(series, "tokens", title, y_text=text, y_base=y_base)
    return Chart(f"{_slug(device)}-{name}", f"{title}, {device}", drawn)


def drawn_names(forward: dict[tuple[str, int], Record], names: Sequence[str]) -> list[str]:
    """Series of a chart: the fastest dense ones, one sparse case with its peers on the same blocks, and others."""
    lengths = {name: [n for which, n in forward if which == name] for name in names}
    ranked = sorted(names, key=lambda name: (-len(lengths[name]), name))
    dense = [name for name in ranked if name.startswith("dense, ")]
    dense.sort(key=lambda name: (-len(lengths[name]), forward[name, max(lengths[name])].ms))
    own = [name for name in ranked if ", " not in name and "-causal" not in name]
    # A plain name first: its peers stand beside it.
    own.sort(key=lambda name: -sum(other.startswith(f"{name}, ") for other in names))
    peers = [name for name in ranked if own and name.startswith(f"{own[0]}, ")]
    return [*dense[:MOST_DENSE_LINES], *own[:1], *peers, *own[1:]][:MOST_LINES_IN_A_CHART]


def _slug(text: str) -> str:
    return "-".join("".join(c.lower() if c.isalnum() else " " for c in text).split())


def both_directions(own: Iterable[Record]) -> dict[tuple[str, str, int, int, int], float]:
    """Milliseconds forward and backward together, by suite, name, length, width and heads, where both were timed."""
    times: dict[tuple[str, str, int, int, int], list[float]] = {}
    for record in own:
        key = record.suite, record.name, record.n, record.d, record.heads
        times.setdefault(key, []).append(record.ms)
    return {key: sum(pair) for key, pair in times.items() if len(pair) == 2}


def speedups(own: Sequence[Record]) -> list[tuple[Record, float]]:
    """Forward records of block patterns, with the speed-up over dense of both directions together."""
    together = both_directions(own)
    found = []
    for record in own:
        if record.direction != "forward" or record.is_dense or not record.name.startswith(("random", "local")):
            continue
        if record.line.get("subject", "ours") != "ours":
            continue
        shape = record.n, record.d, record.heads
        causal = bool(record.line.get("causal"))
        dense = [
            ms
            for (suite, name, *other), ms in together.items()
            if name.startswith("dense") and name.startswith("dense-causal") == causal
            if suite == record.suite and tuple(other) == shape
        ]
        mine = together.get((record.suite, record.name, *shape))
        if dense and mine:
            found.append((record, min(dense) / mine))
    return found


def _density_parts(own: list[Record]) -> Iterator[Part]:
    found = [pair for pair in speedups(own) if pair[0].line.get("causal") in (None, False)]
    shapes: dict[tuple[str, int, int, int], set[float]] = {}
    for r, _ in found:
        shapes.setdefault((r.suite, r.n, r.d, r.heads), set()).add(round(r.density, 3))
    # The shape with the most densities represents the others.
    for suite, n, d, heads in sorted(shapes, key=lambda shape: (-len(shapes[shape]), shape))[:1]:
        here = [(r, times) for r, times in found if (r.suite, r.n, r.d, r.heads) == (suite, n, d, heads)]
        yield Heading(f"Density: {tokens_text(n)} tokens, {heads} heads of {d}", 3)
        yield "Forward and backward together; the ideal speed-up over dense attention is one over the density."
        here.sort(key=lambda pair: (-pair[0].density, pair[0].name))
        yield Table(
            ("case", "density", "speed-up", "of the ideal"),
            [[r.name, f"{r.density:.2%}", f"{times:.1f}x", f"{times * r.density:.0%}"] for r, times in here],
        )
        series: dict[str, list[tuple[float, float]]] = {}
        for r, times in here:
            series.setdefault(r.name.split("-")[0], []).append((r.density, times))
        series["ideal"] = [(r.density, 1 / r.density) for r, _ in here]
        series = {name: sorted(points) for name, points in series.items()}
        drawn = log_chart(series, "density", "speed-up", lambda x: f"{x:.2%}", lambda y: f"{y:g}x", ideal="ideal")
        name = f"{_slug(here[0][0].device)}-density-{n}-{heads}x{d}"
        yield Chart(name, f"Speed-up over dense against density, {tokens_text(n)} tokens, {here[0][0].device}", drawn)


def _dilation_parts(own: list[Record]) -> Iterator[Part]:
    here = [r for r in own if r.suite == "dilation" and r.direction == "forward" and not r.is_dense]
    if not here:
        return
    yield Heading("Dilation", 3)
    yield (
        f"{tokens_text(here[0].n)} tokens, forward. `work` is the number of operations relative to the first line of "
        "its kind. A ratio of time to work near 1 means that an additional branch has no overhead."
    )
    rows = []
    for kind in ("dilated", "block_dilated"):
        mine = sorted((r for r in here if r.name.split()[0] == kind), key=lambda r: (len(r.name), r.name))
        for r in mine:
            time, work = r.ms / mine[0].ms, r.line["flops"] / mine[0].line["flops"]
            peak = "" if r.peak is None else f"{r.peak / r.n:.0f}"
            rows.append([r.name, figure_text(r.ms), peak, f"{time:.2f}x", f"{work:.2f}x", f"{time / work:.2f}"])
    yield Table(("configuration", "ms", "bytes per token", "time", "work", "time / work"), rows)


def _class_parts(own: list[Record]) -> Iterator[Part]:
    here = [r for r in own if r.suite in ("standard", "variants") and not r.is_dense]
    lengths = sorted({r.n for r in here})
    together = both_directions(here)
    if not together:
        return
    yield Heading("Every class", 3)
    yield (
        "Milliseconds of a forward and backward pass, 8 heads of 64. Multihead classes include projections; "
        f"{' and '.join(MODELS)} are {MODEL_LAYERS} layers of 4 heads of 64, with the gradients of all parameters."
    )
    names = sorted({key[1] for key in together})
    time = {(key[1], key[2]): ms for key, ms in together.items()}
    rows = [[name, *(figure_text(time[name, n]) if (name, n) in time else "" for n in lengths)] for name in names]
    yield Table(("class", *map(tokens_text, lengths)), rows)


def _rank_parts(own: list[Record]) -> Iterator[Part]:
    here = [r for r in own if "ranks" in r.line and r.direction == "forward"]
    if not here:
        return
    yield Heading("Ranks", 3)
    yield (
        "Ranks run one after another on one device, so the time is the sum over all ranks. Processes run concurrently "
        "and exchange over gloo, so the time is that of the slowest. `received` is the largest amount that one rank "
        "receives in a forward pass; with a ring or an all-gather it receives all of K and V."
    )
    yield Table(
        ("case", "tokens", "ms", "received", "of a ring"),
        [
            [
                r.name,
                tokens_text(r.n),
                figure_text(r.ms),
                readable_bytes(r.line["received_bytes"]),
                f"{r.line['received_bytes'] / max(r.line['ring_bytes'], 1):.1%}",
            ]
            for r in here
        ],
    )


def longest_parts(lines: Iterable[Line]) -> Iterator[Part]:
    """Longest lengths measured."""
    found = {
        (line["device"], line["subject"], line["direction"], line["cap_gib"] or 0.0): line
        for line in lines
        if line.get("case") == "extreme" and "n" in line
    }
    if not found:
        return
    yield Heading("The longest sequence")
    yield (
        "8 heads of 64, with query, key and value resident. Every length was run and checked; the last column gives "
        "the limit that ended the search, `memory` or `time`."
    )
    rows = []
    for (device, subject, direction, cap), line in sorted(found.items()):
        within = f"{cap:.3g} GiB" if cap else "all memory"
        took = f"{line['seconds']:.2f}" if math.isfinite(line["seconds"]) else ""
        rows.append([f"{subject}, {direction}", device, within, f"{line['n']:,}", took, line["limited_by"]])
    yield Table(("subject", "device", "within", "tokens", "seconds", "limited by"), rows)
