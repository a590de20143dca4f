"""The list of known bugs fits the code, and a few of them are planted to see that the tests notice."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("mutants", ROOT / "benchmarks" / "mutants.py")
mutants = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = mutants
spec.loader.exec_module(mutants)


def test_every_mutant_can_be_planted():
    """When this fails, the code has moved on: bring the mutant's text in benchmarks/mutants.py into step."""
    assert [reason for mutant in mutants.MUTANTS if (reason := mutants.misfit(mutant)) is not None] == []


def test_every_mutant_was_caught_when_last_planted():
    lines = (ROOT / "benchmarks" / "results" / "mutants.jsonl").read_text(encoding="utf-8").splitlines()
    caught = {line["mutant"]: line["caught"] for line in map(json.loads, lines)}
    assert caught == {mutant.name: True for mutant in mutants.MUTANTS}
    assert len(caught) >= 20


@pytest.fixture(scope="module")
def copy():
    with mutants.scratch() as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("name", mutants.QUICK)
def test_a_planted_bug_is_noticed(copy, name):
    mutant = next(mutant for mutant in mutants.MUTANTS if mutant.name == name)
    assert mutants.plant(mutant, copy).failed is not None
