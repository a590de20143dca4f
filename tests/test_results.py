"""Every figure that is kept says on what machine, with which software and from which commit it came."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from dilated_attention_pytorch.tools.bench.measure import attention_code

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("*.jsonl"))


def test_there_are_results():
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_names_device_commit_and_versions(path: Path):
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    assert lines
    assert Counter(name for line in lines for name in ("device", "git", "torch", "python") if not line.get(name)) == {}
    # The kind of device, as torch calls it, does not tell which one it was.
    assert {"cpu", "cuda"}.isdisjoint(line["device"] for line in lines)


def test_prebuilt_kernels_are_as_fast_as_local_ones():
    """Written by `python benchmarks/prebuilt.py`, which takes the times in turns in one process."""
    (path,) = (path for path in FILES if path.stem == "prebuilt_cpu")
    ratios = [json.loads(line)["prebuilt_over_local"] for line in path.read_text().splitlines()]
    assert len(ratios) >= 24
    assert max(ratios) <= 1.05


def test_readme_says_whether_cpu_figures_are_current():
    lines = [json.loads(line) for line in (RESULTS / "cpu.jsonl").read_text().splitlines()]
    current = {line.get("code") for line in lines} == {attention_code("cpu")}
    assert ("CPU code changed since this measurement" in (ROOT / "README.md").read_text()) != current
