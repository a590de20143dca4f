"""Run the GPU smoke tests and stamp the sources they ran on.

    PYTHONPATH=src python benchmarks/gpu_stamp.py --run --write --workers 8
    python benchmarks/gpu_stamp.py --check

`--run` runs tests/gpu/test_smoke_gpu.py in several processes that take tests from one list, and fails where one fails.
`--write` then writes benchmarks/results/gpu_stamp.json: the hash of each source that a GPU runs, and what it ran on.
`--check` fails where the sources differ from the stamp. Standard library, and for `--run` pytest, torch and triton.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/dilated_attention_pytorch"
SOURCES = (
    f"{PACKAGE}/kernels/**/*",
    f"{PACKAGE}/selection/**/*",
    f"{PACKAGE}/nn/adaptive/*.py",
    "tests/gpu/test_smoke_gpu.py",
)
"""Globs of what decides how a GPU computes, and of the tests that were run."""
WITHOUT = ("**/__pycache__/*", "**/kernels/cpu/*")
"""Of those, what no GPU runs."""
STAMP = ROOT / "benchmarks" / "results" / "gpu_stamp.json"
TESTS = "tests/gpu/test_smoke_gpu.py"
CLAIMS = "DAP_GPU_STAMP_CLAIMS"
"""Variable that tells a worker, whose pytest loads this file as a plugin, the folder where tests are claimed."""


def sources(root: Path = ROOT) -> dict[str, str]:
    """The sha256 of each source, by its path from the root."""
    places = {place for pattern in SOURCES for place in root.glob(pattern) if place.is_file()}
    places -= {place for pattern in WITHOUT for place in root.glob(f"{PACKAGE}/{pattern}")}
    return {str(place.relative_to(root)): hashlib.sha256(place.read_bytes()).hexdigest() for place in sorted(places)}


def digest(found: dict[str, str]) -> str:
    """One sha256 of all sources and their paths."""
    return hashlib.sha256("".join(f"{path} {sha}\n" for path, sha in sorted(found.items())).encode()).hexdigest()


def changed(root: Path = ROOT, stamp: Path = STAMP) -> list[str]:
    """Sources that differ from the stamp; all of them where there is none."""
    found = sources(root)
    known = json.loads(stamp.read_text())["sources"] if stamp.is_file() else {}
    return sorted(path for path in found.keys() | known.keys() if found.get(path) != known.get(path))


def pytest_runtest_protocol(item: Any, nextitem: Any) -> bool | None:
    """Run a test unless another worker has begun it."""
    folder = os.environ.get(CLAIMS)
    if folder is None:
        return None
    try:
        os.close(os.open(Path(folder) / hashlib.sha256(item.nodeid.encode()).hexdigest(), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    return None


def pytest_runtest_logreport(report: Any) -> None:
    """Note each outcome at once, so that a worker that dies still leaves those before."""
    folder = os.environ.get(CLAIMS)
    if folder is not None and (report.when == "call" or report.outcome != "passed"):
        with open(Path(folder) / f"outcomes.{os.getpid()}", "a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, report.longreprtext[-3000:]]) + "\n")


def run(workers: int, seconds: float) -> Counter[str] | None:
    """Outcomes of the smoke tests, or None where one failed or a worker did not end well."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        paths = (ROOT / "src", ROOT / "tests", ROOT / "benchmarks", os.environ.get("PYTHONPATH"))
        known = {CLAIMS: folder, "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", Path(__file__).stem]
        command += ["-p", "no:cacheprovider", TESTS]
        outputs = [open(Path(folder) / f"worker.{number}", "w+") for number in range(workers)]  # noqa: SIM115
        members = [
            subprocess.Popen(command, cwd=ROOT, env=os.environ | known, stdout=out, stderr=subprocess.STDOUT)
            for out in outputs
        ]
        failed = False
        for number, (member, out) in enumerate(zip(members, outputs, strict=True)):
            try:
                # 5: every test was taken by others.
                status: int | str = member.wait(max(1.0, begun + seconds - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.kill()
                status = f"stopped after {seconds:.0f} s"
            if status not in (0, 5):
                out.seek(0)
                print(f"worker {number}: {status}\n{out.read()[-3000:]}", flush=True)
                failed = True
            out.close()
        lines = [json.loads(line) for path in Path(folder).glob("outcomes.*") for line in path.read_text().splitlines()]
    found: Counter[str] = Counter({name: outcome for name, outcome, _ in lines}.values())
    for name, outcome, text in lines:
        if outcome != "passed":
            print(f"{outcome.upper()} {name}\n{text}", flush=True)
    words = ", ".join(f"{found[one]} {one}" for one in ("passed", "failed", "skipped"))
    print(f"{words} in {time.monotonic() - begun:.0f} s", flush=True)
    return None if failed or found["failed"] or not found["passed"] else found


def facts() -> dict[str, Any]:
    """What the result depends on besides the sources."""
    import torch
    import triton

    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done and unchanged, 1 a test failed or sources changed, 2 wrong use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the smoke tests on this machine's GPU")
    parser.add_argument("--write", action="store_true", help="write the stamp after a run that passed; needs --run")
    parser.add_argument("--check", action="store_true", help="fail where sources differ from the stamp")
    parser.add_argument("--workers", type=int, default=8, help="processes of a run")
    parser.add_argument("--seconds", type=float, default=540.0, help="limit of a run")
    parser.add_argument("--out", type=Path, default=STAMP, help="the stamp")
    given = parser.parse_args(arguments)
    if given.write and not given.run:
        parser.error("--write needs --run: a stamp says that the tests passed on these sources")
    if not given.run and not given.check:
        parser.error("expected --run or --check")
    if given.run:
        found = sources()
        outcomes = run(given.workers, given.seconds)
        if outcomes is None:
            return 1
        if given.write:
            stamp = {"hash": digest(found), **facts(), "tests": dict(sorted(outcomes.items())), "sources": found}
            given.out.write_text(json.dumps(stamp, indent=2) + "\n")
            print(f"{given.out} written")
    if given.check:
        different = changed(stamp=given.out)
        print("\n".join(["changed since the last GPU run:", *different]) if different else "as the last GPU run had it")
        return int(bool(different))
    return 0


if __name__ == "__main__":
    sys.exit(main())
