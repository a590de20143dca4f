"""Out-of-bounds accesses in Triton's interpreter: planted ones are detected, and long sequences have none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).resolve().parents[1]


def interpreted(program: str) -> dict[str, dict[str, str]]:
    """Lines that a program prints, by their first field."""
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", TESTS / "kernels" / program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return {line.pop(next(iter(line))): line for line in map(json.loads, done.stdout.splitlines())}


def check_found(lines: dict[str, dict[str, str]]) -> None:
    """Assert that every fault is reported with its program and source line."""
    for fault, line in lines.items():
        assert line["where"] in line["found"], fault
        assert "program (" in line["found"] and ".py:" in line["found"], fault


@pytest.mark.slow
def test_accesses_outside_of_arguments_are_found():
    lines = interpreted("interpret_faults.py")
    assert lines.pop("none")["found"] == ""
    assert len(lines) >= 23
    check_found(lines)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is not there until it is written to")
def test_offsets_of_long_sequences_fit_their_integers():
    lines = interpreted("interpret_large.py")
    faults = {name: line for name, line in lines.items() if "where" in line}
    assert {name: line["found"] for name, line in lines.items() if name not in faults and line["found"]} == {}
    assert (len(lines) - len(faults), len(faults)) == (8, 4)
    check_found(faults)
