"""The Triton kernels against the dense float64 oracle, on the CPU in Triton's interpreter."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from dilated_attention_pytorch import attention
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.cpu import tiles as cpu
from dilated_attention_pytorch.kernels.triton import backend as triton_backend
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.selection import backend as selection_backend

TESTS = Path(__file__).resolve().parents[1]
HALF = ("half precision", "bad value of bits, half precision", "soft cap, half precision", "bias, half precision")
HALF += ("sink, half precision",)
TOLERANCE = dict.fromkeys(HALF, 2e-3) | {"tanh": 1.0, "soft cap in a tight budget": 1.0}
# Rounded scores of up to 50, or of 8 times the usual slope: torch in float32 errs by 2.6e-6 and 1.3e-6 there.
TOLERANCE |= {"wide soft cap": 1e-5, "saturated soft cap": 5e-6, "more samples than a grid counts": 1.0}
NAMES = [
    "ragged end",
    "causal window",
    "global rows and columns",
    "dilated ladder",
    "residues differ within a key head",
    "heads that sit out a part",
    "rows without a key",
    "masks by bits",
    "documents",
    "a list a head",
    "grouped key heads",
    "a pattern a head, one key head",
    "values wider than keys",
    "padded keys",
    "nothing but padding",
    "one token",
    "half precision",
    "tiles smaller than a block",
    "views with tokens first",
    "dropout",
    "split rows",
    "split rows of a dilated ladder",
    "negative scale",
    "no scale",
    "dropout of rows elsewhere",
    "bad value",
    "bad value in a ladder",
    "bad value of bits, half precision",
    "bad value of a split row",
    "bad key",
    "bad query",
    "bad gradient",
    "bad padded key",
    "whole tiles in pieces, dilated",
    "rows far apart",
    "soft cap",
    "wide soft cap",
    "tight soft cap, negative scale",
    "saturated soft cap",
    "soft cap without a scale",
    "soft cap of a ladder with padding",
    "soft cap of residues within a key head",
    "soft cap and dropout",
    "soft cap of split rows",
    "soft cap, half precision",
    "soft cap, bad key",
    "soft cap, bad query",
    "bias",
    "bias of one entry",
    "bias that masks whole tiles",
    "bias of a ladder with padding",
    "bias of residues within a key head",
    "bias and dropout",
    "bias of split rows",
    "bias by positions",
    "bias by two distances",
    "bias of rows elsewhere",
    "bias by two distances of rows elsewhere",
    "bias, half precision",
    "bias, bad key",
    "bias, bad gradient",
    "sink",
    "sink of a ladder",
    "sink of heads that sit out a part",
    "sink of rows without a key",
    "sink of split rows",
    "sink of split rows of a ladder",
    "sink and padding",
    "sink and dropout",
    "sink, half precision",
    "sink, bias and soft cap",
    "large sink and bias",
    "sink that is everything",
    "sink that is nothing",
    "sink that nears everything",
    "sink that nears nothing",
    "sink, bad value",
    "tanh",
    "random biases",
    "caps in turn",
    "soft cap in a tight budget",
    "more samples than a grid counts",
]

pytestmark = pytest.mark.xdist_group("triton interpreter")


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, float]]:
    """Errors of every trial, from one run of the interpreter."""
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    program = TESTS / "kernels" / "interpret_triton.py"
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-4000:]
    return {line.pop("trial"): line for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_output_lse_and_gradients_match_the_oracle(errors, name):
    for what, error in errors[name].items():
        assert error <= TOLERANCE.get(name, 2e-6), what


def call_on_cpu(**changes):
    query = torch.randn(1, 2, 32, 16)
    plan = make_plan(parse("causal"), 32, 2, 16)
    return AttentionCall(query, query, query, plan, 0.25, **changes)


def test_a_cpu_tensor_is_refused_with_its_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert triton_backend.why_not(call_on_cpu()) == "needs a CUDA tensor, got cpu"


def test_a_grid_counts_65535_heads_and_streams(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    call = call_on_cpu()
    many = [call.query[:, :1].expand(-1, heads, -1, -1) for heads in (65_535, 65_536)]
    assert triton_backend.why_not(replace(call, query=many[0])) is None
    assert triton_backend.why_not(replace(call, query=many[1])) == "heads must be <= 65535, got 65536"
    monkeypatch.setattr(selection_backend, "allows_host_sync", lambda device: False)
    work = selection_backend.Workload(call.device, torch.float32, 16, 8, match_rank=4)
    for step in ("factor", "rank", "score_rows", "attend", "distill"):
        assert selection_backend.why_not(step, work._replace(streams=65_535)) is None
        reason = "samples times heads must be <= 65535, got 65536"
        assert selection_backend.why_not(step, work._replace(streams=65_536)) == reason


def test_the_backend_answers_without_loading_triton():
    program = (
        "import sys\n"
        "from dilated_attention_pytorch.kernels.triton import backend as triton_backend\n"
        "loaded = [name for name in sys.modules if name.startswith('dilated_attention_pytorch.kernels.triton.')]\n"
        "assert loaded == ['dilated_attention_pytorch.kernels.triton.backend'], loaded\n"
    )
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent / "src")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_repeated_calls_reuse_their_launches(monkeypatch):
    from dilated_attention_pytorch.kernels.triton import launches

    asked, ran = [], []

    def standing_in(name):
        def run(call, *found):
            ran.append(name)
            return getattr(cpu, name)(call, *found)

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(launches, name, standing_in(name))
    monkeypatch.setattr(triton_backend, "why_not", asked.append)
    monkeypatch.setattr(sys.modules["dilated_attention_pytorch.ops.attention"], "_cached", {})
    results = []
    for _ in range(2):
        tensors = [torch.ones(1, 2, 32, 16, requires_grad=True) for _ in range(3)]
        output = attention(*tensors, "causal", backend="triton")
        results.append(torch.autograd.grad(output.sum(), tensors))
    assert len(asked) == 1
    assert ran == ["forward", "backward"] * 2
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
