"""The installed library as a newcomer has it: `.ci/wheel` names the interpreter, without it the one of the tests is used."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("DAP_INSTALLED_PYTHON", sys.executable))
"""Interpreter whose environment holds the library; `dap` lies beside it."""
IN_TURN = """
import json, os, runpy, sys, tempfile
said = []
for words in json.loads(sys.stdin.read()):
    kept, files = [os.dup(1), os.dup(2)], [tempfile.TemporaryFile() for _ in range(2)]
    for place, file in enumerate(files, 1):
        os.dup2(file.fileno(), place)
    status, sys.argv = 0, words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        import traceback
        status = traceback.print_exc() or 1
    for place, (stream, before) in enumerate(zip((sys.stdout, sys.stderr), kept), 1):
        stream.flush()
        os.dup2(before, place)
    texts = [file.seek(0) or file.read().decode() for file in files]
    said.append((status, *texts))
print(json.dumps(said))
"""


def run(
    words: list[str | Path], folder: Path, text: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in `folder`. Nothing leads to the source tree unless the library is installed from it."""
    # Variables of pytest would turn off the build of the C++ kernel at first use.
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PYTEST_"))}
    if "PYTEST_XDIST_WORKER" in os.environ:
        known["OMP_NUM_THREADS"] = "1"
    settings = {**known, "COLUMNS": "120", **environment}
    return subprocess.run(words, cwd=folder, env=settings, input=text, capture_output=True, text=True, check=False)


def python(program: Path | str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a file of Python, or code."""
    words: list[str | Path] = [PYTHON, program] if isinstance(program, Path) else [PYTHON, "-c", program]
    return run(words, folder, **environment)


def command(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line that begins with `dap`."""
    first, *words = shlex.split(line)
    assert first == "dap", line
    return run([PYTHON.with_name("dap"), *words], folder)


def commands(lines: list[str], folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run command lines in one process, which imports torch once; each ends with a status and its own output."""
    told = [[str(PYTHON.with_name("dap")), *shlex.split(line)[1:]] for line in lines]
    done = run([PYTHON, "-c", IN_TURN], folder, json.dumps(told))
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        subprocess.CompletedProcess(words, *said) for words, said in zip(told, json.loads(done.stdout), strict=True)
    ]
