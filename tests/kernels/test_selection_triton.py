"""Learned selections as a GPU computes them, on the CPU in Triton's interpreter, and nothing read back on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernels.no_waiting import NoWaiting

TESTS = Path(__file__).resolve().parents[1]
QUICK = [
    "blocks, causal, ragged, padded samples",
    "blocks, long columns in pieces",
    "tokens of grouped heads, ragged, dropout",
    "tokens, tiles smaller than a block",
    "choice of blocks by coverage, noise, holes",
    "choice among equals",
    "choice of tokens by wild scores",
    "choice of tokens, noise, holes, both ways",
    "choice in registers, noise, rounded",
    "lists of ragged blocks, causal",
    "tokens turned round",
    "parameters by blocks",
    "parameters by tokens, too cold, one scorer",
    "parameters by blocks with holes, few at a time",
    "parameters by blocks among equals",
    "a step, blocks",
]
SLOW = [
    "blocks",
    "blocks of grouped heads, ragged",
    "tiles smaller than a block",
    "blocks in half precision",
    "tokens",
    "tokens, padded samples, heads apart",
    "tokens in half precision",
    "a step, tokens",
    "a step, ragged blocks, one scorer",
    "a step, padded tokens",
    "choice of blocks",
    "choice of causal tokens with noise",
    "choice of many causal tokens, rounded",
    "choice of all by causal tokens, eight units, holes",
    "choice of tokens by many units, holes",
    "choice of causal tokens among equals",
    "choice of tokens by coverage, holes",
    "choice in registers, many causal tokens",
    "choice in registers, holes, both ways",
    "choice in registers among equals",
    "choice in registers by wild scores",
    "choice in registers of most by wild scores",
    "choice of most tokens by wild scores",
    "choice without a match",
    "choice of rounded blocks without hidden units",
    "parameters by tokens among equals, holes",
    "lists of whole blocks",
    "lists of large blocks of two samples",
    "many causal tokens turned round",
    "tokens with long lists turned round in windows",
]
SCORES = [
    "noise",
    "summaries of whole blocks, two units at a time",
    "summaries of ragged blocks, padded samples",
    "means of the blocks before, in pieces",
    "means of tokens of a ragged block",
    "parts of scores",
    "parts of causal scores of grouped heads, one scorer",
    "32 by 32, ragged",
    "32 by 32, of one tile",
    "32 by 32, any rows",
    "32 by 32, tokens, factors on units",
    "64 by 64, causal",
    "64 by 64, odd rows up to the last",
    "64 by 64, any rows, factors on units",
    "128 by 128",
    "128 by 128, causal, up to the last",
]
TOLERANCE = {"blocks in half precision": 2e-3, "tokens in half precision": 2e-3}


def errors_of(program, names):
    """Errors by trial, from one run of the interpreter."""
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent / "src")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    path = TESTS / "kernels" / program
    done = subprocess.run([sys.executable, path, *names], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line.pop("trial"): line for line in lines}


@pytest.mark.xdist_group("triton interpreter")
@pytest.mark.parametrize(
    ("program", "names"),
    [
        ("interpret_selection.py", QUICK),
        pytest.param("interpret_selection.py", SLOW, marks=pytest.mark.slow),
        ("interpret_scores.py", SCORES),
    ],
    ids=["quick", "all others", "scores"],
)
def test_results_and_gradients_match_the_oracle_and_choices_the_torch_path(program, names):
    found = errors_of(program, names)
    assert list(found) == names
    for name, errors in found.items():
        for what, error in errors.items():
            assert error <= TOLERANCE.get(name, 2e-6), (name, what)


def test_programs_are_as_large_as_leave_enough_of_them_and_little_over():
    from dilated_attention_pytorch.kernels.triton_selection import _hidden_side as side

    assert [side(128, 8, n, n, n) for n in (1024, 512, 256)] == [128, 64, 32]
    assert side(128, 8, 128, 8192, 8192) == 128
    assert side(64, 8, 128, 8192, 8192) == 64
    # Causal, half of the large ones would have nothing to do.
    assert side(128, 8, 1024, 1024, 512) == 64
    assert side(128, 8, 64, 16384, 16384) == 64
    assert side(128, 8, 1, 16384, 16384) == 32
    assert side(128, 8, 30, 16384, 16384) == 32


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: bool(x.any()),
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.arange(4).repeat_interleave(x),
        lambda x: x.bincount(),
    ],
)
def test_waiting_is_noticed(wait):
    x = torch.tensor([1, 0, 2, 3])
    with NoWaiting(), pytest.raises(AssertionError, match="waits"):
        wait(x)
