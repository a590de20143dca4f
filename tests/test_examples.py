"""Every example runs, small, as a user would run it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_the_example_runs(path):
    imported = set(re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE))
    for package in imported & {"transformers", "lightning", "accelerate"}:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, which is not installed")
    assert len(path.read_text().splitlines()) < 80
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        [sys.executable, str(path), *SMALL.get(path.name, [])],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout
