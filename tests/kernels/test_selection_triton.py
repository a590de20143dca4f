"""Kernels of learned selections in Triton's interpreter on the CPU, without host reads of device values."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernels.no_waiting import NoWaiting

TESTS = Path(__file__).resolve().parents[1]
GROUPS = {
    "attention by blocks": [
        "blocks",
        "blocks, causal, ragged, padded samples",
        "blocks of grouped heads, ragged",
        "blocks, long columns in pieces",
        "blocks in half precision",
        "tiles smaller than a block",
        "lists of whole blocks",
        "lists of ragged blocks, causal",
        "lists of large blocks of two samples",
        "parameters by blocks",
        "parameters by blocks with holes, few at a time",
        "parameters by blocks among equals",
        "parameters by blocks of many units",
        "parameters by tokens, blocks of many units",
        "parameters by blocks in chunks, holes",
        "parameters by blocks in chunks among equals, holes",
        "parameters by tokens in chunks among equals",
        "parameters by tokens, too cold, one scorer",
        "parameters by tokens among equals, holes",
        "a step, blocks",
    ],
    "attention by tokens": [
        "tokens",
        "tokens of grouped heads, ragged, dropout",
        "tokens, padded samples, heads apart",
        "tokens, tiles smaller than a block",
        "chunks of query heads, ragged",
        "chunks of tokens, one list, dropout",
        "chunks of tokens of two samples",
        "chunks of packed tokens",
        "chunks of query heads in half precision",
        "tokens in half precision",
        "tokens turned round",
        "many causal tokens turned round",
        "tokens with long lists turned round in windows",
    ],
    "attention on indices": [
        "normal form of lists",
        "calls beside equal calls, blocks",
        "calls beside equal calls, tokens",
        "indices by blocks, causal",
        "indices by blocks of two samples, padded",
        "indices by tokens, causal, padded",
        "indices by tokens",
        "a selection by blocks, repeated",
        "a selection by tokens, repeated",
        "indices by blocks, traced",
        "indices by tokens, causal, traced",
    ],
    "packed sequences": [
        "packed indices by blocks",
        "packed indices by blocks, one list",
        "packed indices by blocks, causal, padded, traced",
        "packed indices by tokens",
        "packed indices by tokens, causal, tiles smaller than a block",
        "packed indices by tokens, causal, traced",
        "packed documents",
        "packed causal documents, traced",
        "packed windows of grouped heads, dropout",
        "packed windows ahead in half precision",
        "packed windows with capped and biased scores",
        "packed windows of wrong bounds",
    ],
    "training steps": [
        "a step, tokens",
        "a step, ragged blocks, one scorer",
        "a step, padded tokens",
        "a step, one list for heads with a key head",
        "a step, blocks, one list for all heads",
        "a step, tokens of single units, a list for each of four heads of two key heads",
    ],
    "training steps of shared lists": [
        "a step, blocks, two of four heads of a key head",
        "a step, padded causal blocks, lists of two key heads",
        "a step, tokens both ways, one list for three heads",
    ],
    "training steps in pieces": [
        "a step, tokens of single units in pieces",
        "a step, tokens of two units in pieces, two samples",
        "a step, padded tokens of four units in pieces",
    ],
    "optimizer steps": [
        "three steps of Adam, blocks",
        "three steps of SGD, tokens",
        "three steps of Adam, one list for all heads",
    ],
    "choice": [
        "choice of blocks",
        "choice of blocks by sixteen rows each, absent rows",
        "choice of causal blocks by sixteen rows each",
        "choice of blocks by coverage, noise, holes",
        "choice without a match",
        "choice of rounded blocks without hidden units",
        "choice of causal tokens with noise",
        "choice of tokens, noise, holes, both ways",
        "choice of all by causal tokens, eight units, holes",
        "choice of tokens by many units, holes",
        "choice of many causal tokens, rounded",
        "choice of tokens by coverage, holes",
    ],
    "choice among equals and wild scores": [
        "choice among equals",
        "choice of causal tokens among equals",
        "choice of tokens by wild scores",
        "choice of most tokens by wild scores",
        "choice in registers, noise, rounded",
        "choice in registers, many causal tokens",
        "choice in registers, holes, both ways",
        "choice of causal tokens by projected rows, rounded",
        "choice of blocks by projected rows, holes",
        "choice in registers by projected rows, noise",
        "choice in registers among equals",
        "choice in registers by wild scores",
        "choice in registers of most by wild scores",
    ],
}
"""Trials by the test that runs them: one interpreter process each, of at most half a minute on a quiet core."""
SCORES = [
    "noise",
    "summaries of whole blocks, two units at a time",
    "summaries of ragged blocks, padded samples",
    "means of the blocks before, in pieces",
    "means of tokens of a ragged block",
    "parts of scores",
    "parts of causal scores of grouped heads, one scorer",
    "parts of lists of two heads, two key heads each",
    "parts of lists of three of six heads of a key head",
    "parts of one list for all heads, causal",
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
TOLERANCE |= {"chunks of query heads in half precision": 1e-3}
TOLERANCE |= {"packed windows ahead in half precision": 2e-3}
# Scores of float32 features: 2.4e-6 on an AMD EPYC, where products round differently.
TOLERANCE |= {"blocks": 5e-6}
TOLERANCE |= {"three steps of Adam, blocks": 1e-5, "three steps of SGD, tokens": 1e-5}
TOLERANCE |= {"three steps of Adam, one list for all heads": 1e-5}
# Gradients of a row's scores sum to zero, so that those of parameters are differences.
for steps in ("training steps", "training steps of shared lists", "training steps in pieces"):
    TOLERANCE |= dict.fromkeys(GROUPS[steps], 1e-5)


def errors_of(program, names):
    """Errors by trial, from one run of the interpreter."""
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent / "src")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    path = TESTS / "kernels" / program
    done = subprocess.run([sys.executable, path, *names], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line.pop("trial"): line for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("group", [*GROUPS, "scores"])
def test_selection_kernels_match_oracle_and_torch(group):
    program = "interpret_scores.py" if group == "scores" else "interpret_selection.py"
    names = SCORES if group == "scores" else GROUPS[group]
    results = errors_of(program, names)
    assert list(results) == names
    for name, errors in results.items():
        for what, error in errors.items():
            assert error <= TOLERANCE.get(name, 2e-6), (name, what)


def test_every_selection_trial_is_in_one_group():
    trials = re.findall(
        r'^    "(.+?)": \w+\(', (TESTS / "kernels" / "interpret_selection.py").read_text(), re.MULTILINE
    )
    assert sorted(trials) == sorted(name for names in GROUPS.values() for name in names)


def test_program_size_fills_the_multiprocessors():
    from dilated_attention_pytorch.selection.kernels.block_scores import _hidden_side as side

    assert [side(128, 8, n, n, n) for n in (1024, 512, 256)] == [128, 64, 32]
    assert side(128, 8, 128, 8192, 8192) == 128
    assert side(64, 8, 128, 8192, 8192) == 64
    # Under a causal mask half of the large tiles would be empty.
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
def test_host_waits_are_detected(wait):
    x = torch.tensor([1, 0, 2, 3])
    with NoWaiting(), pytest.raises(AssertionError, match="waits"):
        wait(x)
