"""Suites of `dap quality` that only the documentation needs, and its page of results.

    python benchmarks/quality_suites.py --suite width --out FOLDER [--resume] [--minutes M]
    python benchmarks/quality_suites.py --page benchmarks/results/quality_{h200,cpu}.jsonl

The suites recipe, start, group, heads, width and blocks change one setting of the learned choice of
the suite cpu at a time.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import quality_settings as settings

from dilated_attention_pytorch.tools.html_page import write
from dilated_attention_pytorch.tools.quality import retrieval, runner

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quality.md"
COMMAND = "python benchmarks/quality_suites.py --page LOG..."
LAST_SECTION = "\n## Language model"
"""Section at the end of the page, which `language_model.py` measures."""


def suites() -> dict[str, runner.MeasuredSuite]:
    """All suites by name."""
    stamp, found = {"sources": retrieval.sources()}, {}
    for name, runs in settings.SUITE_RUNS.items():
        measure = partial(settings.measure, shape=settings.SHAPES.get(name, {}))
        options: dict[str, Any] = {"runs": runs(), "measure": measure, "stamp": stamp}
        found[name] = runner.MeasuredSuite(name=name, fields=("task", "setting", "wanted", "seed"), **options)
    return found


def page(lines: list[runner.Line], logs: str) -> str:
    """The page of the documentation, without its last section."""
    return runner.report(lines, logs, COMMAND, settings.report([line for line in lines if "wanted" in line]))


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 130 where the suite was stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=settings.SUITE_RUNS)
    parser.add_argument("--out", type=Path, default=Path("quality"), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this many minutes")
    parser.add_argument("--resume", action="store_true", help="keep the rows of these sources")
    parser.add_argument("--page", type=Path, nargs="+", metavar="LOG", help="write docs/quality.md from these results")
    given = parser.parse_args(arguments)
    if given.page:
        last = "".join(PAGE.read_text(encoding="utf-8").partition(LAST_SECTION)[1:])
        lines = [line for log in given.page for line in runner.read_log(log)]
        write(PAGE, page(lines, ", ".join(log.name for log in given.page)) + last)
        runner.plot(runner.of_suites(lines, runner.SUITES), PAGE.with_suffix(".png"))
    if given.suite is None:
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    log = given.out / "quality.jsonl"
    deadline = time.monotonic() + 60 * given.minutes
    stopped = runner.run_suite(suites()[given.suite], log, deadline, given.resume)
    if stopped is not None:
        print(f"stopped: {stopped}; go on with --resume", flush=True)
    return 0 if stopped is None else 130


if __name__ == "__main__":
    raise SystemExit(main())
