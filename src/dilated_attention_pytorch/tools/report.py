"""`dap report`: tables and plots of benchmark results, or two results side by side."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .bench.results import Line, read_lines
from .bench.suite_tables import Record, machine, records, shape_cells, suite_parts, times_text
from .console import Parser, leave
from .html_page import Chart as Chart
from .html_page import Heading, Part, Table, as_html, as_markdown, figure_text, standalone, tokens_text, write

TITLE = "Benchmarks"


def benchmark_parts(lines: Sequence[Line], source: str) -> Iterator[Part]:
    """Tables and plots of the lines, after a sentence on their source."""
    yield source
    yield from rate_parts([line for line in lines if line.get("relative_rate")])
    yield from suite_parts(lines)


def speedup(line: Line) -> float:
    """Time of dense attention relative to the time of a case, from its rate on the kept blocks."""
    return max(line["relative_rate"].values()) / line["density"]


def rate_parts(lines: Sequence[Line]) -> Iterator[Part]:
    """Rate and speed-up of every case that ran beside dense attention on a CPU."""
    lines = [line for line in lines if line.get("suite", "cpu") in ("cpu", "million", "quick")]
    if not lines:
        return
    yield Heading("One CPU")
    yield machine(lines)
    yield (
        "Rate on the operations of the kept blocks, relative to torch's dense attention, with both measured "
        "alternately in one process. A rate of 1 means that a tenth of the blocks takes a tenth of the time."
    )
    best = max(lines, key=lambda line: (speedup(line), line["case"], line["n"], line["direction"]))
    yield (
        f"The largest speed-up over dense attention is {speedup(best):.1f}x: {best['case']}, "
        f"{tokens_text(best['n'])} tokens, {best['direction']}."
    )
    rows = {tuple(line[name] for name in ("case", "n", "d", "heads", "key_heads", "direction")): line for line in lines}
    yield Table(
        ("case", "heads", "tokens", "d", "density", "kernel", "direction", "rate vs dense", "speed-up over dense"),
        [
            [
                *shape_cells(line),
                line["backend"],
                line["direction"],
                times_text(max(line["relative_rate"].values())),
                f"{speedup(line):.1f}x",
            ]
            for _, line in sorted(rows.items())
        ],
    )


def comparison_parts(before: Sequence[Line], after: Sequence[Line], names: tuple[str, str]) -> Iterator[Part]:
    """Two measurements of the same problems, case by case."""

    def keyed(lines: Sequence[Line]) -> dict[tuple[Any, ...], Record]:
        return {(r.device, r.name, r.n, r.d, r.heads, r.direction): r for r in records(lines)}

    old, fresh = keyed(before), keyed(after)
    shared = [key for key in fresh if key in old]
    yield f"`{names[0]}` against `{names[1]}`: above 1, the second is faster; **bold** marks ratios below 1."
    if shared:
        ratios = [old[key].ms / fresh[key].ms for key in shared]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        yield f"{len(shared)} figures in both, geometric mean {times_text(mean)}."
    yield Table(
        ("case", "tokens", "d", "heads", "direction", "first ms", "second ms", "faster by"),
        [
            [
                key[1],
                tokens_text(key[2]),
                str(key[3]),
                str(key[4]),
                key[5],
                figure_text(old[key].ms),
                figure_text(fresh[key].ms),
                times_text(old[key].ms / fresh[key].ms),
            ]
            for key in shared
        ],
    )
    for which, mine, other in (("first", old, fresh), ("second", fresh, old)):
        if mine.keys() - other.keys():
            yield f"Only in the {which}: {len(mine.keys() - other.keys())} figures."


def save(parts: Sequence[Part], title: str, markdown: Path, html: Path | None, beside: str) -> list[Path]:
    """Write the pages and their charts; which files were written."""
    charts = [part for part in parts if isinstance(part, Chart)]
    files = {markdown: as_markdown(title, parts, beside)}
    files |= {markdown.parent / f"{beside}{chart.name}.svg": standalone(chart.svg) for chart in charts}
    if html is not None:
        files[html] = as_html(title, parts)
    for path, text in files.items():
        write(path, text)
    return list(files)


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 when no line could be read."""
    parser = Parser("dap report", "Tables and plots of benchmark results.", "RESULTS...")
    parser.option("results", nargs="+", type=Path, metavar="RESULTS", help="files written by `dap bench`")
    parser.out("folder for report.md, report.html and the plots", Path("report"))
    parser.option("--compare", action="store_true", help="compare two files")
    parser.json("print what was read and written as JSON")
    options = parser.read(arguments)
    if options.compare and len(options.results) != 2:
        parser.error(f"--compare must have two files, got {len(options.results)}")
    missing = [str(path) for path in options.results if not path.is_file()]
    if missing:
        parser.error(f"results must be files that exist, got {', '.join(missing)}")
    complaints: list[str] = []
    lines = read_lines(options.results, complaints.append)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    if options.compare:
        title, names = "Two measurements", (options.results[0].name, options.results[1].name)
        first, second = (read_lines([path]) for path in options.results)
        parts = list(comparison_parts(first, second, names))
    else:
        named = ", ".join(f"`{name}`" for name in sorted({path.name for path in options.results}))
        title, parts = TITLE, list(benchmark_parts(lines, f"Written by `dap report` from {named}."))
    written = save(parts, title, options.out / "report.md", options.out / "report.html", "")
    if options.json:
        print(json.dumps({"lines": len(lines), "skipped": complaints, "written": [str(path) for path in written]}))
    else:
        more = f" and {len(written) - 1} more file{'s' * (len(written) > 2)}" if len(written) > 1 else ""
        print(f"{len(lines)} lines read, {len(complaints)} skipped. Wrote {written[0]}{more}.")
    return 0 if lines else 1


if __name__ == "__main__":
    leave(main)
