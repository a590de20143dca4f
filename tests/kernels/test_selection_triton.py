"""Learned selections as a GPU computes them, on the CPU in Triton's interpreter, and nothing read back on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernels.no_waiting import NoWaiting
from kernels.test_selection import drawn

from dilated_attention_pytorch.kernels.hopper_work import Ground, Step
from dilated_attention_pytorch.kernels.listed_schedule import ListedStep
from dilated_attention_pytorch.plan.selected import block_plan

TESTS = Path(__file__).resolve().parents[1]
QUICK = [
    "blocks, causal, ragged, padded samples",
    "blocks, long columns in pieces",
    "tokens of grouped heads, ragged, dropout",
    "choice of blocks by coverage, noise, holes",
    "choice among equals",
]
SLOW = [
    "blocks",
    "blocks of grouped heads, ragged",
    "tiles smaller than a block",
    "blocks in half precision",
    "tokens",
    "tokens, padded samples, heads apart",
    "tokens in half precision",
    "a step, blocks",
    "a step, tokens",
    "choice of blocks",
    "choice of causal tokens with noise",
    "choice of tokens by coverage, holes",
    "choice without a match",
    "choice without hidden units",
]
TOLERANCE = {"blocks in half precision": 2e-3, "tokens in half precision": 2e-3}


def errors_of(names):
    """Errors by trial, from one run of the interpreter."""
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent / "src")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    program = TESTS / "kernels" / "interpret_selection.py"
    done = subprocess.run([sys.executable, program, *names], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line.pop("trial"): line for line in lines}


@pytest.mark.xdist_group("triton interpreter")
@pytest.mark.parametrize("names", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "all others"])
def test_results_and_gradients_match_the_oracle_and_choices_the_torch_path(names):
    found = errors_of(names)
    assert list(found) == names
    for name, errors in found.items():
        for what, error in errors.items():
            assert error <= TOLERANCE.get(name, 2e-6), (name, what)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("n", "size", "batch"), [(1024, 128, 1), (1000, 128, 1), (2048, 256, 2)])
def test_hopper_reads_the_lists_it_would_have_made_by_looking(n, size, batch, is_causal, group):
    plan = block_plan(drawn(batch, 4, n, size, is_causal=is_causal, per_token=False, most=2))
    with NoWaiting():
        made = ListedStep(plan)
        works = [made.by_query, made.held(group, by_key=True), made.held(group, by_key=False)]
    looked = Step(Ground(plan), plan.parts[0], strided=False)
    wanted = [looked.by_query, looked.held(group, by_key=True), looked.held(group, by_key=False)]
    for got, want in zip(works, wanted, strict=True):
        for field in fields(got):
            one, other = getattr(got, field.name), getattr(want, field.name)
            same = torch.equal(one, other) and one.dtype == other.dtype if field.name != "covers" else one == other
            assert same, field.name


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
