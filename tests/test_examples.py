"""Every example runs, small, as a user would run it."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from processes import start

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SMALL = {
    "slide_heatmap.py": ["--side", "32"],
    "train_longnet.py": ["--context", "512", "--steps", "3"],
    "adaptive_retrieval.py": ["--steps", "4"],
    "context_parallel.py": ["--ranks", "2", "--tokens", "150", "--steps", "3"],
    "custom_pattern.py": ["--tokens", "256"],
    "decode.py": ["--prompt", "50", "--steps", "120"],
    "hf_llama.py": ["--prompt", "40", "--steps", "5"],
    "replace_mha.py": ["--tokens", "512"],
    "torchtitan_attention.py": ["--tokens", "512", "--steps", "3"],
    "fsdp_context_parallel.py": ["--tokens", "300", "--steps", "3"],
    "lightning_longnet.py": ["--tokens", "256", "--steps", "3"],
    "accelerate_longnet.py": ["--tokens", "256", "--steps", "3"],
}


def test_no_example_is_lost():
    assert {path.name for path in EXAMPLES} >= set(SMALL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_example_runs(path, tmp_path):
    assert len(path.read_text().splitlines()) < 80
    words = [str(path), *SMALL.get(path.name, [])]
    status, output, errors = run_with_torch_loaded(words, tmp_path)
    assert status == 0, errors
    assert output


def run_with_torch_loaded(words: list[str], folder: Path) -> tuple[int, str, str]:
    process = start(run_program, words, folder)
    process.join()
    return process.exitcode, (folder / "output").read_text(), (folder / "errors").read_text()


def run_program(words: list[str], folder: Path) -> int:
    sys.argv = words
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    output, errors = ((folder / name).open("w") for name in ("output", "errors"))
    # An example that starts torchrun passes its output on by file descriptors.
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    with output, errors, redirect_stdout(output), redirect_stderr(errors):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            return 1
    return 0
