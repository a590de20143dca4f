"""The README says so where GPU kernels differ from those that the last run on a GPU had."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORDS = "GPU kernels changed since the last GPU run"


@pytest.fixture
def stamp():
    spec = importlib.util.spec_from_file_location("gpu_stamp", ROOT / "benchmarks" / "gpu_stamp.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_says_whether_a_gpu_ran_these_kernels(stamp):
    assert (WORDS in (ROOT / "README.md").read_text()) == bool(stamp.changed()), stamp.changed()


def test_readme_counts_launches_with_the_code_of_that_run(stamp):
    from docs_pages import docs_gpu_tables

    lines = map(json.loads, (ROOT / "benchmarks" / "results" / "generated_code.jsonl").read_text().splitlines())
    kinds = docs_gpu_tables.recorded_launches(lines).values()
    same, total = sum(kind.same + kind.measured for kind in kinds), sum(kind.total for kind in kinds)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert (f"{same} of {total} recorded launches" in text) == bool(stamp.changed())


def test_every_glob_finds_sources(stamp):
    for pattern in stamp.SOURCES:
        assert any(ROOT.glob(pattern)), pattern
    found = stamp.sources()
    assert "src/dilated_attention_pytorch/selection/kernels/score_gradients.py" in found
    assert "src/dilated_attention_pytorch/kernels/preference.json" in found
    assert not any("kernels/cpu/" in path or "__pycache__" in path for path in found)


def test_a_changed_source_is_noticed(stamp, tmp_path):
    place = tmp_path / stamp.PACKAGE / "kernels" / "triton" / "forward_kernels.py"
    place.parent.mkdir(parents=True)
    place.write_text("one")
    known = tmp_path / "stamp.json"
    assert stamp.changed(tmp_path, known) == [f"{stamp.PACKAGE}/kernels/triton/forward_kernels.py"]
    found = stamp.sources(tmp_path)
    known.write_text(json.dumps({"hash": stamp.digest(found), "sources": found}))
    assert stamp.changed(tmp_path, known) == []
    place.write_text("two")
    assert stamp.changed(tmp_path, known) == [f"{stamp.PACKAGE}/kernels/triton/forward_kernels.py"]
    assert stamp.digest(stamp.sources(tmp_path)) != stamp.digest(found)
    place.rename(place.with_name("moved.py"))
    assert len(stamp.changed(tmp_path, known)) == 2


def test_a_stamp_needs_a_run(stamp, capsys):
    with pytest.raises(SystemExit, match="2"):
        stamp.main(["--write"])
    assert "--write needs --run" in capsys.readouterr().err
