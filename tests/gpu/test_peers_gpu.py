"""Other projects' kernels as backends on a GPU: the same pairs, so the same result as the dense oracle."""

import pytest
import torch
from cases import Problem
from oracle import answer, error

from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.external import flash4, flex
from dilated_attention_pytorch.kernels.registry import explain
from dilated_attention_pytorch.plan import make_plan

# What other projects, and torch while it compiles, warn of is theirs to mend.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

PROBLEMS = [
    Problem(name="causal", text="causal", n=640, heads=4, key_heads=2, d=64, e=64, block_size=128),
    Problem(name="window", text="window:200 & causal", n=640, batch=2, d=128, e=128, block_size=128),
    Problem(name="window-ragged", text="window:150", n=600, d=64, e=64, block_size=128),
    Problem(name="random", text="random:0.4;block=128;per_head=1", n=768, d=128, e=128, block_size=128),
    Problem(name="empty-rows", text="blocks:0,,1 2;block=128", n=384, d=64, e=64, block_size=128),
]
BITS = Problem(name="bits", text="window:60 | global:70", n=500, d=64, e=64, block_size=128)


def check(backend, problem):
    query, key, value, grad_output, grad_lse = problem.inputs(torch.bfloat16, device="cuda")
    plan = make_plan(problem.pattern, problem.n, problem.heads, problem.block_size, "cuda")
    call = AttentionCall(query, key, value, plan, problem.d**-0.5, pattern=problem.pattern)
    reason = backend.why_not(call)
    if reason is not None and "not installed" in reason:
        pytest.skip(reason)
    assert reason is None
    output, lse = backend.forward(call)
    found = output, lse, *backend.backward(call, output, lse, grad_output, grad_lse.float())
    wanted = answer(query, key, value, problem.pattern, grad_output=grad_output, grad_lse=grad_lse)
    for name, got, want in zip(wanted._fields, found, wanted, strict=True):
        assert error(got, want) <= (1e-4 if name == "lse" else 2e-2), name
    for got, like in zip((output, *found[2:]), (query, query, key, value), strict=True):
        assert got.dtype == like.dtype
        assert got.stride() == torch.empty(got.shape).stride()


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_flash_attention_4_matches_the_oracle(problem):
    check(flash4, problem)


@pytest.mark.compile
@pytest.mark.parametrize("problem", [PROBLEMS[0], PROBLEMS[3], BITS], ids=lambda problem: problem.name)
def test_flex_matches_the_oracle(problem):
    check(flex, problem)


def test_the_explanation_names_what_runs():
    query = torch.randn(1, 2, 512, 128, device="cuda", dtype=torch.bfloat16)
    plan = make_plan(PROBLEMS[0].pattern, 512, 2, 128, "cuda")
    told = explain(AttentionCall(query, query, query, plan, 0.1))
    assert told.backend == told.order[0] or told[told.order[0]] is not None
    assert told["cpu"] == f"needs a CPU tensor, got {query.device}"
