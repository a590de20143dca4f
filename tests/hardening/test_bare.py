"""On a GPU machine nothing can be installed: what runs there needs torch, Triton, numpy and pytest alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import scaled

ROOT = Path(__file__).parents[2]
EXTRAS = ("beartype", "hypothesis", "matplotlib", "safetensors", "transformers")
TOOLS = ("bench.runner", "billion", "bench.extreme", "quality.runner")
BENCHMARKS = (
    "adaptive",
    "check_dilated",
    "check_hopper",
    "check_hopper_backward",
    "demo",
    "gpu_tests",
    "longest",
    "models",
    "modules",
)
BARE = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS}))"
IMPORT = """
from importlib import import_module
from runpy import run_path

for name in sys.argv[1:]:
    run_path(name) if name.endswith(".py") else import_module(name)
"""
PRINT = """
from dilated_attention_pytorch.tools.console import print_pairs, print_table, print_title

print_title("Facts")
print_table(("name", "bytes"), [("one", "7"), ("another", "12,345")], right=(1,))
print_pairs([("a", "b")])
"""


def bare(code: str, *arguments: str) -> str:
    """What a program prints where the extras are missing."""
    folders = (str(ROOT / name) for name in ("src", "tests", "benchmarks"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", BARE + code, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=scaled(120), check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_gpu_tests_benchmarks_and_tools_load():
    pytest.importorskip("triton")
    scripts = [
        *(ROOT / "tests" / "gpu").glob("test_*.py"),
        *(ROOT / "benchmarks" / f"{name}.py" for name in BENCHMARKS),
    ]
    bare(IMPORT, *map(str, scripts), *(f"dilated_attention_pytorch.tools.{name}" for name in TOOLS))


def test_tables_are_plain():
    assert bare(PRINT).splitlines() == ["", "Facts", "name      bytes", "one           7", "another  12,345", "  a  b"]
