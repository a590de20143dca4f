"""Random memory layouts of query, key, value and gradient, against the dense oracle, on every CPU backend.

DAP_FUZZ_CASES=10000 pytest --timeout 0 tests/hardening/test_layouts.py    the nightly form
"""

from __future__ import annotations

import os

import pytest
import torch
from calls import SHARED, Call, Menu, draw_call, failures
from strategies import VIEWS, Seeded, laid_out

from dilated_attention_pytorch.kernels.cpu.native import library_path

CASES = int(os.environ.get("DAP_FUZZ_CASES", "300"))
"""Calls of all backends together."""
SEED = os.environ.get("DAP_FUZZ_SEED", "layouts")
A_TEST = 50
"""Calls of one test, so that none takes long."""
BACKENDS = ["reference", "cpu", *(["native"] if library_path().exists() else [])]
TESTS = -(-CASES // (A_TEST * len(BACKENDS)))
MENU = Menu(
    longest=70,
    edges=(1, 2, 16, 64),
    d=(1, 3, 8, 16),
    e=(1, 8, 17),
    leaves=2,
    layouts=VIEWS,
    shared=(*("",) * 4, *SHARED[1:]),
    dropout=(0.0, 0.0, 0.0, 0.4),
    budgets=(None, None, None, "tight"),
)
LONG = Menu(
    longest=600, edges=(128, 256), batches=(1, 2), heads=(1, 2, 4), d=(8,), e=(8,), leaves=1, layouts=VIEWS,
    kinds=("full", "causal", "window", "dilated"), padded=(False,), dropout=(0.0,), budgets=(None,), shared=SHARED,
)  # fmt: skip


@pytest.mark.parametrize("number", range(TESTS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_layout_matches_oracle(backend: str, number: int):
    ran, failed = failures(backend, MENU, A_TEST, f"{SEED} {backend} {number}")
    assert failed == []
    assert ran == A_TEST


@pytest.mark.parametrize("number", range(-(-TESTS // 5)))
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_any_layout_of_several_tiles_matches_oracle(backend: str, number: int):
    ran, failed = failures(backend, LONG, 10, f"{SEED} long {backend} {number}")
    assert failed == []
    assert ran == 10


@pytest.mark.parametrize("number", range(-(-TESTS // 5)))
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_default_device_of_the_caller_matches_oracle(backend: str, device: str, number: int):
    menu = Menu(longest=70, layouts=VIEWS, shared=SHARED, default_devices=(device,))
    ran, failed = failures(backend, menu, 15, f"{SEED} {device} {backend} {number}")
    assert failed == []
    assert ran == 15


@pytest.mark.parametrize("layout", VIEWS)
def test_layouts_hold_the_rows_they_say(layout: str):
    rows = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)
    found = laid_out(rows, layout)
    assert found.shape == rows.shape
    repeated = {"one sample": 0, "one head": 1, "one head, tokens first": 1, "one token": 2}
    if layout in repeated:
        dim = repeated[layout]
        assert found.stride(dim) == 0
        assert torch.equal(found, rows.index_select(dim, torch.tensor([0])).expand_as(rows))
    elif layout == "one number":
        assert found.stride() == (0, 0, 0, 0) and (found == rows[0, 0, 0, 0]).all()
    else:
        assert torch.equal(found, rows)
        assert layout == "heads first" or found.stride() != rows.stride() or found.data_ptr() % 16


@pytest.mark.parametrize("shared", SHARED[1:])
def test_shared_tensors_lie_in_one_storage(shared: str):
    call = Call(
        pattern="full", n=6, heads=4, key_heads=2, batch=2, d=8, e=4, dtype=torch.float32, seed=0, shared=shared
    )
    three = [torch.zeros(2, heads, 6, width) for heads, width in ((4, 8), (2, 8), (2, 4))]
    found = call.in_one_storage(three, torch.Generator().manual_seed(0))
    assert [x.shape for x in found] == [x.shape for x in three]
    storages = {x.untyped_storage().data_ptr() for x in found[1 if shared == "value is key" else 0 :]}
    assert len(storages) == 1


def test_a_seed_reaches_every_layout():
    drawn = [draw_call(Seeded(f"all {number}"), MENU) for number in range(200)]
    assert {layout for call in drawn for layout in call.layouts} == set(VIEWS)
    assert {call.shared for call in drawn} == set(SHARED)
    assert {call.n for call in drawn} >= set(MENU.edges)
