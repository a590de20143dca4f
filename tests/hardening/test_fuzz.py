"""Random patterns, shapes, dtypes, layouts, masks, budgets and dropout, against the dense oracle.

On every CPU backend, and on the Triton kernels in their interpreter, which a process must be started with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import calls
import pytest
import torch
from calls import Call, Menu, draw_call, failures, share
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import scaled
from strategies import Seeded, strategy

from dilated_attention_pytorch import attention_with_lse, parse, patterns
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.kernels.registry import backend_named
from dilated_attention_pytorch.patterns import And, BlockPattern, Or, Packed, Pattern, PerHead

EXAMPLES = int(os.environ.get("DAP_FUZZ_EXAMPLES", "60"))
"""Continuous integration tries some dozen; a night has time for thousands."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if INTERPRETED else ["reference", "cpu", *(["native"] if library_path().exists() else [])]
MENU = Menu(softcaps=(0.0, 0.0, 2.0))
if INTERPRETED:
    from kernels.interpreter import check_memory, skip_repeated_work

    skip_repeated_work()
    check_memory()
    # An interpreted kernel takes seconds, and a tight budget cuts a call into many.
    MENU = replace(MENU, longest=40, heads=(1, 2), dtypes=(torch.float32, torch.float16), budgets=(None, 2**30))
SMALL = Call(
    pattern="window:9 | global:3", n=40, heads=2, key_heads=1, batch=2, d=8, e=8, dtype=torch.float32, seed=5,
    padded=True, scale=0.4, dropout_p=0.3, lse_grad=True,
)  # fmt: skip


@settings(max_examples=EXAMPLES)
@given(call=strategy(draw_call, MENU), backend=st.sampled_from(BACKENDS))
def test_any_call_on_any_backend_is_that_of_the_oracle(call, backend):
    if not getattr(backend_named(backend), "SOFTCAP", False):
        call = replace(call, softcap=0.0)
    assert max(call.shares(backend).values()) <= 1, call.told(backend)


@pytest.mark.slow
def test_the_triton_kernels_take_any_call_too():
    pytest.importorskip("triton")
    examples = {"DAP_FUZZ_EXAMPLES": os.environ.get("DAP_FUZZ_EXAMPLES", "5")}
    # A smaller example takes longer to find than a test may take.
    environment = os.environ | examples | {"TRITON_INTERPRET": "1", "HYPOTHESIS_PROFILE": "planted"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short"]
    # The interpreter computes with numpy, which warns where a GPU gives inf.
    command += ["-W", "ignore::RuntimeWarning"]
    chosen = f"{__file__}::test_any_call_on_any_backend_is_that_of_the_oracle"
    folder = Path(__file__).parents[2]
    done = subprocess.run(
        [*command, chosen],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(280),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def kinds_in(pattern: Pattern) -> set[type[Pattern]]:
    match pattern:
        case And() | Or():
            inner = (pattern.left, pattern.right)
        case PerHead():
            inner = pattern.patterns
        case Packed():
            inner = (pattern.pattern,)
        case _:
            inner = ()
    return {type(pattern)}.union(*map(kinds_in, inner))


def test_a_seed_reaches_every_kind_of_pattern_and_every_choice():
    drawn = [draw_call(Seeded(number), Menu()) for number in range(120)]
    assert drawn[:20] == [draw_call(Seeded(number), Menu()) for number in range(20)]
    named = (getattr(patterns, name) for name in patterns.__all__)
    kinds = {kind for kind in named if isinstance(kind, type) and issubclass(kind, Pattern)}
    assert set().union(*(kinds_in(parse(call.pattern)) for call in drawn)) == kinds - {Pattern, BlockPattern}
    menu = Menu()
    for name, offered in {
        "batch": menu.batches, "d": menu.d, "e": menu.e, "dtype": menu.dtypes, "padded": menu.padded,
        "scale": menu.scales, "dropout_p": menu.dropout, "memory_budget": menu.budgets, "lse_grad": menu.lse_grad,
    }.items():  # fmt: skip
        assert {getattr(call, name) for call in drawn} == set(offered), name
    assert {layout for call in drawn for layout in call.layouts} == set(menu.layouts)
    assert {call.heads // call.key_heads for call in drawn} == set(menu.groups)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_calls_from_a_seed_are_those_of_the_oracle(backend):
    ran, failed = failures(backend, Menu(longest=300, edges=(127, 128, 129, 256), d=(8, 64)), 12, f"ci {backend}")
    assert failed == []
    assert ran == 12


def wrong_weights(output, lse):
    return output * 1.001, lse


def wrong_sum(output, lse):
    return output, lse + 2e-5


def one_row_lost(output, lse):
    return output.index_fill(2, torch.tensor([7]), 0.0), lse


PLANTED = {
    "a scale": lambda leaves, given: (leaves, given | {"scale": given["scale"] * 1.0005}),
    "no padding": lambda leaves, given: (leaves, given | {"key_padding_mask": None}),
    "another pattern": lambda leaves, given: (leaves, given | {"is_causal": True}),
    "other dropped weights": lambda leaves, given: (leaves, given | {"dropout_p": 0.31}),
    "a row of keys": lambda leaves, given: ([leaves[0], leaves[1].roll(1, 2), leaves[2]], given),
    "a value": lambda leaves, given: ([*leaves[:2], leaves[2] * 1.0001], given),
}
SPOILT = [wrong_weights, wrong_sum, one_row_lost]


@pytest.mark.parametrize("planted", [*PLANTED, *SPOILT])
def test_what_is_wrong_is_noticed(planted, monkeypatch):
    def wrong(*given, **options):
        *leaves, pattern = given
        if planted in SPOILT:
            return planted(*attention_with_lse(*leaves, pattern, **options))
        leaves, options = PLANTED[planted](leaves, options)
        return attention_with_lse(*leaves, pattern, **options)

    assert max(SMALL.shares("cpu").values()) <= 1
    monkeypatch.setattr(calls, "attention_with_lse", wrong)
    assert max(SMALL.shares("cpu").values()) > 1
    monkeypatch.setattr(calls, "draw_call", lambda draw, menu: SMALL)
    ran, failed = failures("cpu", Menu(), 2, "any")
    assert ran == 2
    assert len(failed) == 2 and SMALL.told("cpu") in failed[0]


def test_a_reproduction_is_the_call_itself():
    assert eval(repr(SMALL), {"Call": Call, "torch": torch}) == SMALL


def test_an_element_that_nothing_adds_to_must_be_exact():
    nothing, exact = torch.zeros(3), torch.tensor([0.0, 1.0, float("-inf")], dtype=torch.float64)
    assert share(exact, exact, nothing) == 0.0
    assert share(exact + torch.tensor([0.0, 1e-300, 0.0]), exact, nothing) == 0.0
    assert share(torch.tensor([1e-300, 1.0, float("-inf")], dtype=torch.float64), exact, nothing) == float("inf")
    assert share(torch.tensor([0.0, float("nan"), float("-inf")]), exact, nothing + 1) == float("inf")
    assert share(torch.tensor([0.0, 1.0, 0.0]), exact, nothing + 1) == float("inf")


def test_a_call_that_a_backend_refuses_is_counted_apart():
    assert failures("flash4", Menu(longest=20), 2, "any") == (0, [])
