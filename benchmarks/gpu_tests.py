"""Run the GPU tests and keep a summary: one line of JSON a test file.

    PYTHONPATH=src GIT_SHA=$(git rev-parse HEAD) python benchmarks/gpu_tests.py --out FILE

Files given by name replace their own lines in the summary; without names every file under tests/gpu runs. Arguments
after `--` go to pytest. Standard library and pytest; torch and triton are asked for their versions alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]


def run(file: Path, extra: list[str], seconds: float) -> dict[str, Any]:
    """One test file in a pytest of its own, and what came of it."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--junit-xml", str(report), *extra, str(file)]
        try:
            status: int | str = subprocess.run(command, cwd=ROOT, timeout=seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds:.0f} s"
        counts = {} if not report.exists() else dict(ElementTree.parse(report).getroot()[0].attrib)
    skipped, failed = int(counts.get("skipped", 0)), int(counts.get("failures", 0)) + int(counts.get("errors", 0))
    return {
        "file": str(file.relative_to(ROOT)),
        "passed": int(counts.get("tests", 0)) - skipped - failed,
        "failed": failed,
        "skipped": skipped,
        "status": status,
        "seconds": round(time.monotonic() - begun, 1),
    }


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
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    options, extra = parser.parse_args(given[:cut]), given[cut + 1 :]
    files = [path.resolve() for path in options.files] or sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    lines = [run(file, extra, options.seconds) | facts() for file in files]
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    fresh = {line["file"] for line in lines}
    lines += [line for line in known if line["file"] not in fresh]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in sorted(lines, key=lambda line: line["file"])))
    for line in lines:
        print(f"{line['file']}: {line['passed']} passed, {line['failed']} failed, {line['skipped']} skipped")
    return int(any(line["failed"] or line["status"] != 0 for line in lines if line["file"] in fresh))


if __name__ == "__main__":
    sys.exit(main())
