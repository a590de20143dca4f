"""Sizes and counts of the package only go down: present values against tests/sizes.json, written by `make sizes`."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("sizes", ROOT / "benchmarks" / "sizes.py")
sizes = importlib.util.module_from_spec(spec)
sys.modules["sizes"] = sizes
spec.loader.exec_module(sizes)

STORED = json.loads(sizes.FILE.read_text(encoding="utf-8"))


def test_rooms_grow_only_with_a_reason_in_design():
    """Run `make sizes`; for a room that must grow, add a line to the section "Size" of DESIGN.md."""
    allowed = sizes.allowed()
    now = sizes.lines()
    assert set(now) <= set(STORED["lines"]), "make sizes adds rooms"
    assert {room: n for room, n in now.items() if n > max(STORED["lines"][room], allowed.get(room, 0))} == {}


def test_reasons_in_design_are_of_rooms_that_grew():
    """A line whose room is no larger than its stored value has served its purpose: remove it."""
    assert {room: n for room, n in sizes.allowed().items() if n <= STORED["lines"].get(room, n)} == {}


def test_no_folder_holds_more_modules():
    most = STORED["modules"]
    assert {folder: n for folder, n in sizes.modules().items() if n > most.get(folder, sizes.MODULES_A_FOLDER)} == {}


def test_counts_only_go_down():
    above = {what: found for what, found in sizes.offences().items() if len(found) > STORED["counts"][what]}
    assert above == {}


def test_make_sizes_lowers_and_never_raises():
    before = {"lines": {"plan": 10, "gone": 5}, "counts": {"caches": 3}}
    now = {"lines": {"plan": 12, "fresh": 7}, "counts": {"caches": 2}}
    assert sizes.lowered(before, now) == {"lines": {"plan": 10, "fresh": 7}, "counts": {"caches": 2}}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A package of two modules that shows every offence once."""
    package = tmp_path / "src" / sizes.NAME
    (package / "nn").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (package / "nn" / "one.py").write_text(
        "from functools import lru_cache\nfrom weakref import WeakKeyDictionary\nfrom . import two\n"
        "class Same: ...\nkept: WeakKeyDictionary[Plan, int]\nuse = two._hidden, 'triton'\n@lru_cache\ndef f(): ...\n"
    )
    (package / "nn" / "two.py").write_text("class Same: ...\ndef late():\n    from .one import Same\n")
    (tmp_path / "README.md").write_text("word " * 30)
    (tmp_path / "DESIGN.md").write_text("## Size\n\n- nn: 1,200 lines: a reason\n\n## Next\n\n- ops: 9 lines: no\n")
    monkeypatch.setattr(sizes, "ROOT", tmp_path)
    monkeypatch.setattr(sizes, "PACKAGE", package)


def test_every_offence_is_found(small):
    assert {what: len(places) for what, places in sizes.offences().items()} == dict.fromkeys(STORED["counts"], 1)


def test_lines_and_reasons_are_read_by_room(small):
    assert sizes.lines() == {"nn": 11, "total": 11}
    assert sizes.allowed() == {"nn": 1200}
