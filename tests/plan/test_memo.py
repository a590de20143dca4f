"""Values derived from a plan live in its memo: built once, left out of copies, freed with the plan."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import replace
from weakref import ref

import pytest
import torch

from dilated_attention_pytorch import make_plan, parse
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.external.block_lists import tables_of
from dilated_attention_pytorch.kernels.external.flex import block_mask
from dilated_attention_pytorch.kernels.hopper import lowering as hopper_lowering
from dilated_attention_pytorch.kernels.triton import lowering as triton_lowering
from dilated_attention_pytorch.ops.memory_budget import memory
from dilated_attention_pytorch.plan.plan import tensors_of
from dilated_attention_pytorch.plan.subset import of_heads, of_rows, spans

PATTERN = parse("window:100 | global:8")


def new_plan():
    return make_plan(PATTERN, 512, 2, block_size=128)


def budgeted(plan):
    query = torch.zeros(1, 2, 512, 8)
    call = AttentionCall(query, query, query, plan, 1.0, pattern=PATTERN)
    return memory(call, "cpu", "backward")


def hopper_items(plan):
    (part,) = hopper_lowering.lower(plan)
    part.backward_items(1, by_key=True)
    return part.by_query


DERIVED: dict[str, Callable] = {
    "heads": lambda plan: of_heads(plan, 0, 1),
    "rows": lambda plan: of_rows(plan, PATTERN, spans(plan, 256)[0]),
    "memory": budgeted,
    "triton": lambda plan: triton_lowering.schedule(plan, 1),
    "hopper": hopper_items,
    "block tables": tables_of,
    "flex": block_mask,
}


@pytest.mark.parametrize("name", DERIVED)
def test_derived_value_is_built_once(name):
    plan = new_plan()
    assert DERIVED[name](plan) is DERIVED[name](plan)
    assert DERIVED[name](plan) is not DERIVED[name](new_plan())


@pytest.mark.parametrize("name", DERIVED)
def test_plan_and_derived_tensors_are_freed_at_once(name):
    plan = new_plan()
    derived = DERIVED[name](plan)
    alive = [ref(plan), *(ref(tensor) for tensor in (*tensors_of(plan), *tensors_of(derived)))]
    gc.disable()
    try:
        del plan, derived
        assert [one() for one in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_memo_is_not_part_of_size_or_repr():
    plan = new_plan()
    size, text = plan.nbytes, repr(plan)
    for derive in DERIVED.values():
        derive(plan)
    assert plan.memo
    assert (plan.nbytes, repr(plan)) == (size, text)


@pytest.mark.parametrize(
    "change", [copy.copy, copy.deepcopy, replace, lambda plan: plan.to("meta"), lambda p: pickle.loads(pickle.dumps(p))]
)
def test_copies_begin_with_an_empty_memo(change):
    plan = new_plan()
    for derive in DERIVED.values():
        derive(plan)
    other = change(plan)
    assert other.memo == {} and plan.memo
    assert "transposed" not in vars(other.masks) or other.masks is plan.masks
    assert other.blocks == plan.blocks and other.masks.bits.shape == plan.masks.bits.shape
