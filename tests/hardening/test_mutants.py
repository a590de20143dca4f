"""Known bugs fit the code, name tests that exist, and are caught; a few are planted here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from limits import scaled

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("mutants", ROOT / "benchmarks" / "mutants.py")
mutants = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = mutants
spec.loader.exec_module(mutants)


def test_every_mutant_can_be_planted():
    """When this fails, the code has changed: update the mutant's text in benchmarks/mutants.py."""
    assert [reason for mutant in mutants.MUTANTS if (reason := mutants.misfit(mutant)) is not None] == []


def test_mutant_names_are_unique_and_texts_differ():
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert sorted(set(names)) == sorted(names)
    assert [mutant.name for mutant in mutants.MUTANTS if mutant.old == mutant.new] == []


def test_mutants_name_tests_that_exist():
    trials = (ROOT / "tests" / "kernels" / "interpret_triton.py").read_text(encoding="utf-8")
    missing = []
    for mutant in mutants.MUTANTS:
        for test in mutant.tests:
            file, *function = test.removesuffix("]").split("[")[0].split("::")
            if mutant.interpreted:
                exists = f'    "{test}": Trial(' in trials
            else:
                path = ROOT / "tests" / file
                exists = path.is_file() and all(f"def {name}(" in path.read_text(encoding="utf-8") for name in function)
            missing += [] if exists else [f"{mutant.name}: {test}"]
    assert missing == []


def test_a_half_depends_on_its_seed_alone():
    chosen = mutants.half("0123456789ab")
    assert len(chosen) == -(-len(mutants.MUTANTS) // 2)
    assert mutants.half("0123456789ab") == chosen != mutants.half("ba9876543210")


def test_halves_cover_every_mutant_in_few_seeds():
    seen = {mutant.name for seed in range(20) for mutant in mutants.half(str(seed))}
    assert seen == {mutant.name for mutant in mutants.MUTANTS}


def test_every_mutant_was_caught_when_last_planted():
    lines = (ROOT / "benchmarks" / "results" / "mutants.jsonl").read_text(encoding="utf-8").splitlines()
    caught = {line["mutant"]: line["caught"] for line in map(json.loads, lines)}
    assert caught == {mutant.name: True for mutant in mutants.MUTANTS}
    assert len(caught) >= 20


@pytest.fixture
def patience(monkeypatch):
    monkeypatch.setattr(mutants, "TIMEOUT", scaled(mutants.TIMEOUT))


@pytest.fixture(scope="module")
def copy():
    with mutants.scratch() as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("name", mutants.QUICK)
def test_a_planted_bug_is_noticed(copy, patience, name):
    mutant = next(mutant for mutant in mutants.MUTANTS if mutant.name == name)
    assert mutants.plant(mutant, copy).failed is not None
