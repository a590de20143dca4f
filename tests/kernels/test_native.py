"""The C++ backend: threads, pieces, repeatability, and how it is built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BY_NAME, Problem
from oracle import error

from dilated_attention_pytorch import make_plan
from dilated_attention_pytorch.kernels import native, reference
from dilated_attention_pytorch.kernels.registry import AttentionCall

built = pytest.mark.skipif(not native.library_path().exists(), reason="C++ kernel not built")
PROBLEM = Problem(
    name="", text="dilated:64x1,128x3 & causal", n=230, heads=6, key_heads=3, d=24, e=40, batch=2, padded=(230, 100)
)


def run(problem, dtype=torch.float64, **changes):
    inputs = problem.inputs(dtype)
    plan = make_plan(problem.pattern, problem.n, problem.heads, block_size=problem.block_size)
    call = AttentionCall(*inputs[:3], plan, problem.d**-0.5, problem.key_padding_mask(), pattern=problem.pattern)
    call = replace(call, **changes)
    output, lse = native.forward(call)
    found = output, lse, *native.backward(call, output, lse, inputs.grad_output, inputs.grad_lse)
    output, lse = reference.forward(call)
    wanted = output, lse, *reference.backward(call, output, lse, inputs.grad_output, inputs.grad_lse)
    return found, wanted


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@built
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("key_heads", [1, 3, 6])
def test_any_number_of_threads_gives_the_same_result_twice(threads, count, key_heads):
    threads(count)
    problem = replace(PROBLEM, key_heads=key_heads, batch=1, padded=())
    found, wanted = run(problem)
    again, _ = run(problem)
    for got, repeated, want in zip(found, again, wanted, strict=True):
        assert error(got, want) <= 1e-12
        assert torch.equal(got, repeated)


@built
def test_extra_threads_beyond_the_memory_they_may_take_stay_idle(threads, monkeypatch):
    threads(4)
    monkeypatch.setattr(native, "SPLIT_BUDGET", 0)
    found, wanted = run(replace(PROBLEM, key_heads=1, batch=1, padded=()))
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) <= 1e-12


@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_head_by_head_equals_all_at_once(monkeypatch, dtype):
    changes = {"dropout_p": 0.2, "seed": torch.tensor([77])}
    whole, _ = run(PROBLEM, dtype, **changes)
    monkeypatch.setattr(native, "WIDE_BUDGET", 0)
    pieces, _ = run(PROBLEM, dtype, **changes)
    for got, want in zip(pieces, whole, strict=True):
        assert error(got, want) <= torch.finfo(dtype).eps
        assert got.stride() == want.stride()


@built
@pytest.mark.parametrize("n", [128, 640])
def test_single_precision_stays_within_two_millionths_of_float64(n):
    problem = Problem(name="", text="full", n=n, heads=2, d=64, e=64, block_size=128)
    inputs = problem.inputs(torch.float32)
    plan = make_plan(problem.pattern, n, 2, block_size=128)
    call = AttentionCall(*inputs[:3], plan, 0.125, pattern=problem.pattern)
    exact = replace(call, query=call.query.double(), key=call.key.double(), value=call.value.double())
    for got, want in zip(native.forward(call), reference.forward(exact), strict=True):
        assert error(got, want) <= 2e-6


def test_a_missing_library_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "none.so")
    problem = BY_NAME["causal"]
    inputs = problem.inputs()
    call = AttentionCall(*inputs[:3], make_plan(problem.pattern, problem.n, problem.heads), 1.0)
    reason = "not built; run `python -m dilated_attention_pytorch.kernels.native` (needs g++)"
    assert native.why_not(call) == reason


def test_a_broken_library_says_so(monkeypatch, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native, "library_path", lambda: broken)
    monkeypatch.setattr(native, "_library", native._library.__wrapped__)
    problem = BY_NAME["causal"]
    inputs = problem.inputs()
    call = AttentionCall(*inputs[:3], make_plan(problem.pattern, problem.n, problem.heads), 1.0)
    reason = native.why_not(call)
    assert reason is not None
    assert reason.startswith("cannot be loaded (")


def test_building_without_a_compiler_names_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "native.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.build() == 1
    assert "needs g++" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_failed_compilation_shows_the_error_and_leaves_nothing(monkeypatch, tmp_path, capsys):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'error: cannot compile' >&2\nexit 3\n")
    compiler.chmod(0o755)
    target = tmp_path / "cache" / "native.so"
    monkeypatch.setattr(native, "library_path", lambda: target)
    monkeypatch.setenv("CXX", str(compiler))
    assert native.build() == 1
    assert "error: cannot compile" in capsys.readouterr().out
    assert list(target.parent.iterdir()) == []


@built
def test_building_again_does_nothing(capsys):
    before = native.library_path().stat().st_mtime_ns
    assert native.build() == 0
    assert "already built" in capsys.readouterr().out
    assert native.library_path().stat().st_mtime_ns == before
