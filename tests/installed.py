"""The installed library as a newcomer has it: `.ci/wheel` names the interpreter, without it the one of the tests is used."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("DAP_INSTALLED_PYTHON", sys.executable))
"""Interpreter whose environment holds the library; `dap` lies beside it."""


def run(words: list[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in `folder`. Nothing leads to the source tree unless the library is installed from it."""
    # Variables of pytest would turn off the build of the C++ kernel at first use.
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PYTEST_"))}
    if "PYTEST_XDIST_WORKER" in os.environ:
        known["OMP_NUM_THREADS"] = "1"
    settings = {**known, "COLUMNS": "120", **environment}
    return subprocess.run(words, cwd=folder, env=settings, capture_output=True, text=True, check=False)


def python(program: Path | str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a file of Python, or code."""
    words: list[str | Path] = [PYTHON, program] if isinstance(program, Path) else [PYTHON, "-c", program]
    return run(words, folder, **environment)


def command(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line that begins with `dap`."""
    first, *words = shlex.split(line)
    assert first == "dap", line
    return run([PYTHON.with_name("dap"), *words], folder)
