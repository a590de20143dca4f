"""Every tutorial is a complete notebook, appears on the site, and runs from its first cell to its last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from installed import ROOT, python

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def test_every_kind_of_tutorial_is_there():
    kinds = {"long_documents", "drop_in", "slide_encoder", "genome", "learned_sparsity", "two_processes"}
    assert {path.stem for path in NOTEBOOKS} == kinds


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_runs_from_start_to_end(path: Path, tmp_path: Path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4 and notebook["cells"][0]["source"][0].startswith("# ")
    assert [cell for cell in notebook["cells"] if cell.get("outputs")] == [], "outputs are not committed"
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    program = tmp_path / f"{path.stem}.py"
    program.write_text("\n".join(code))
    done = python(program, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout
