"""Run the GPU tests and keep a summary: one line of JSON a test file.

    PYTHONPATH=src GIT_SHA=$(git rev-parse HEAD) python benchmarks/gpu_tests.py --out FILE

Files given by name replace their own lines in the summary; without names every file under tests/gpu runs. With
`--workers` the tests of a file run in several processes, which compile at the same time; tests that measure memory or
time need one. Arguments after `--` go to pytest; a run of some tests alone (`-k`) has a line of its own, which says so.
Standard library and pytest; torch and triton are asked for their versions alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_stamp import CLAIMS, pytest_runtest_protocol

__all__ = ["main", "pytest_runtest_logreport", "pytest_runtest_protocol"]
ROOT = Path(__file__).resolve().parents[1]
NOTES = "DAP_GPU_TESTS_NOTES"
"""Variable that tells pytest, which loads this file as a plugin, where outcomes are noted."""


def pytest_runtest_logreport(report: Any) -> None:
    """Keep each outcome as soon as it is known, so that a file stopped at its limit still tells what it found."""
    notes = os.environ.get(NOTES)
    if notes is None or "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    if report.outcome == "failed":
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)
    with open(notes, "a") as file:
        file.write(json.dumps([report.nodeid, report.outcome]) + "\n")


def run(file: Path, extra: list[str], seconds: float, workers: int = 1) -> dict[str, Any]:
    """One test file in processes of its own that take tests from one list, and what came of it."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes.jsonl"
        notes.touch()
        here = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", Path(__file__).stem, *extra, str(file)]
        surroundings = os.environ | {NOTES: str(notes), CLAIMS: folder, "PYTHONPATH": here}
        members = [
            subprocess.Popen(command, cwd=ROOT, env=surroundings, start_new_session=True) for _ in range(workers)
        ]
        statuses: list[int | str] = []
        try:
            for process in members:
                try:
                    # 5: other processes took every test.
                    status = process.wait(max(0.0, begun + seconds - time.monotonic()))
                    statuses.append(0 if status == 5 and workers > 1 else status)
                except subprocess.TimeoutExpired:
                    statuses.append(f"stopped after {seconds:.0f} s")
        finally:
            # Their children too, which may be in the middle of compiling.
            for process in members:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        # A test that passed and then failed in its teardown is there twice; the last word counts.
        outcomes = Counter(dict(json.loads(line) for line in notes.read_text().splitlines()).values())
    return {
        "file": str(file.relative_to(ROOT)),
        "only": extra[extra.index("-k") + 1] if "-k" in extra else None,
        **{outcome: outcomes[outcome] for outcome in ("passed", "failed", "skipped")},
        "status": next((status for status in statuses if status != 0), 0),
        "seconds": round(time.monotonic() - begun, 1),
    }


def key_of(line: dict[str, Any]) -> tuple[str, str]:
    """What a later run replaces."""
    return line["file"], line.get("only") or ""


def facts() -> dict[str, Any]:
    """What the result depends on besides the code."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "git": os.environ.get("GIT_SHA"),
    }


def main() -> int:
    """Run, then write the summary with the lines of other files kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="test files; all of tests/gpu by default")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of one file")
    parser.add_argument("--workers", type=int, default=1, help="processes of a file")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    options, extra = parser.parse_args(given[:cut]), given[cut + 1 :]
    files = [path.resolve() for path in options.files] or sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    # Stopped from outside, the pytest of the moment ends too, and the lines of the files before it are there.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    lines, fresh = {key_of(line): line for line in known}, set()
    for file in files:
        line = run(file, extra, options.seconds, options.workers) | facts()
        fresh.add(key_of(line))
        lines[key_of(line)] = line
        options.out.write_text("".join(json.dumps(lines[key]) + "\n" for key in sorted(lines)))
    for line in lines.values():
        print(f"{line['file']}: {line['passed']} passed, {line['failed']} failed, {line['skipped']} skipped")
    return int(any(lines[key]["failed"] or lines[key]["status"] != 0 for key in fresh))


if __name__ == "__main__":
    sys.exit(main())
