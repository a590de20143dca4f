"""A call seen before goes straight to what its backend prepared, and gives what the first call gave."""

import gc
import sys
import weakref

import pytest
import torch
from cases import PROBLEMS
from oracle import answer, error

from dilated_attention_pytorch import attention, attention_with_lse
from dilated_attention_pytorch.kernels.cpu import tiles as cpu
from dilated_attention_pytorch.ops import plan_cache

MODULE = sys.modules["dilated_attention_pytorch.ops.attention"]
PATTERN = "window:20 | global:3"


class Prepared:
    """A runner that counts what it is asked for."""

    def __init__(self):
        self.forwards = self.backwards = 0

    def forward(self, call):
        self.forwards += 1
        return cpu.forward(call)

    def backward(self, call, *found):
        self.backwards += 1
        return cpu.backward(call, *found)


@pytest.fixture
def prepared(monkeypatch):
    """Every runner that was prepared."""
    made = []

    def prepare(name, call):
        made.append(Prepared())
        return made[-1]

    monkeypatch.setattr(MODULE, "prepared", prepare)
    monkeypatch.setattr(MODULE, "can_prepare", lambda name: True)
    monkeypatch.setattr(MODULE, "_cached", {})
    monkeypatch.setattr(MODULE, "_prepared_devices", set())
    return made


def inputs(n=70, dtype=torch.float64, requires_grad=False):
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(1, 2, n, 8, generator=generator, dtype=dtype).requires_grad_(requires_grad) for _ in range(3)]


def test_a_second_call_is_run_by_what_was_prepared_for_the_first(prepared):
    for query, key, value in (inputs(), inputs()):
        attention(query, key, value, PATTERN, backend="cpu")
    (runner,) = prepared
    assert runner.forwards == 2


@pytest.mark.parametrize("problem", PROBLEMS[::6], ids=lambda problem: problem.name)
def test_every_problem_comes_out_right_twice(prepared, problem):
    query, key, value, *_ = problem.inputs()
    exact = answer(query, key, value, problem.pattern)
    for _ in range(2):
        output, lse = attention_with_lse(query, key, value, problem.pattern, enable_gqa=True, backend="cpu")
        assert error(output, exact.output) <= 1e-12
        assert error(lse, exact.lse) <= 1e-12
    assert [runner.forwards for runner in prepared] == [2]


def test_gradients_are_computed_by_it_too(prepared):
    grads = []
    for _ in range(2):
        tensors = inputs(requires_grad=True)
        output, lse = attention_with_lse(*tensors, PATTERN, backend="cpu")
        grads.append(torch.autograd.grad(output.square().sum() + lse.sum(), tensors))
    (runner,) = prepared
    assert runner.backwards == 2
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


def tokens_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def off_the_grid(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)


CHANGES = {
    "length": lambda q, k, v: (inputs(71), {}),
    "dtype": lambda q, k, v: (inputs(dtype=torch.float32), {}),
    "strides": lambda q, k, v: ([x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)], {}),
    "scale": lambda q, k, v: ([q, k, v], {"scale": 0.5}),
    "causal": lambda q, k, v: ([q, k, v], {"is_causal": True}),
    **{
        f"{name} {what}": lambda *three, place=place, lay=lay: (
            [lay(x) if at == place else x for at, x in enumerate(three)],
            {},
        )
        for place, name in enumerate(("query", "key", "value"))
        for what, lay in (("strides", tokens_first), ("alignment", off_the_grid))
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_call_is_prepared_anew(prepared, change):
    tensors = inputs()
    attention(*tensors, PATTERN, backend="cpu")
    others, settings = CHANGES[change](*tensors)
    attention(*others, PATTERN, backend="cpu", **settings)
    assert [runner.forwards for runner in prepared] == [1, 1]


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("change", [torch.Tensor.float, lambda x: x.to("meta")], ids=["dtype", "device"])
def test_wrong_tensor_is_refused_after_a_prepared_call(prepared, change, name):
    tensors = dict(zip(("query", "key", "value"), inputs(), strict=True))
    attention(**tensors, pattern=PATTERN, backend="cpu")
    with pytest.raises((TypeError, ValueError), match=r"must have the query's dtype|must be on the query's device"):
        attention(**tensors | {name: change(tensors[name])}, pattern=PATTERN, backend="cpu")
    assert [runner.forwards for runner in prepared] == [1]


def test_grouped_heads_need_enable_gqa_in_every_call(prepared):
    query, key, value = inputs()
    for _ in range(2):
        attention(query, key[:, :1], value[:, :1], PATTERN, enable_gqa=True, backend="cpu")
    with pytest.raises(ValueError, match="key must have as many heads as query"):
        attention(query, key[:, :1], value[:, :1], PATTERN, backend="cpu")
    assert [runner.forwards for runner in prepared] == [2]


@pytest.mark.parametrize(
    "settings",
    [{"key_padding_mask": torch.zeros(1, 70, dtype=torch.bool)}, {"dropout_p": 0.5}, {"memory_budget": 2**30}],
    ids=lambda settings: next(iter(settings)),
)
def test_masks_dropout_and_budgets_are_looked_at_every_time(prepared, settings):
    for _ in range(2):
        attention(*inputs(), PATTERN, backend="cpu", **settings)
    assert prepared == []


def test_what_must_be_observed_goes_through_the_operators(prepared):
    tensors = inputs()
    attention(*tensors, PATTERN, backend="cpu")
    with torch.profiler.profile() as profile:
        attention(*tensors, PATTERN, backend="cpu")
    torch.func.grad(lambda q: attention(q, *tensors[1:], PATTERN, backend="cpu").sum())(tensors[0])
    assert any("dilated_attention::forward" in event.key for event in profile.key_averages())
    assert prepared[0].forwards == 1


def test_autocast_is_seen(prepared):
    tensors = inputs(dtype=torch.float32)
    attention(*tensors, PATTERN, backend="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*tensors, PATTERN, backend="cpu").dtype == torch.bfloat16


def test_a_plan_that_left_the_cache_is_not_held(prepared):
    tensors = inputs()
    attention(*tensors, PATTERN, backend="cpu")
    runner = weakref.ref(prepared.pop())
    plan_cache.clear()
    gc.collect()
    assert runner() is None
    attention(*tensors, PATTERN, backend="cpu")
    assert len(prepared) == 1


def test_calls_are_counted_by_the_plan_cache(prepared):
    attention(*inputs(), PATTERN, backend="cpu")
    before = plan_cache.info().hits
    for _ in range(3):
        attention(*inputs(), PATTERN, backend="cpu")
    assert plan_cache.info().hits == before + 3


def test_so_many_calls_are_remembered_and_no_more(prepared, monkeypatch):
    monkeypatch.setattr(MODULE, "MOST_CACHED", 3)
    for n in range(20, 30):
        attention(*inputs(n), PATTERN, backend="cpu")
    assert len(MODULE._cached) <= 3


def test_calls_on_the_cpu_build_no_cache_key(monkeypatch):
    monkeypatch.setattr(MODULE, "_prepared_devices", set())
    monkeypatch.setattr(MODULE, "_cache_key", pytest.fail)
    for _ in range(2):
        attention(*inputs(), PATTERN)
    assert not MODULE._prepared_devices


def test_a_gradient_after_a_mask_was_changed_is_refused():
    query, key, value = inputs(requires_grad=True)
    mask = torch.zeros(1, 70, dtype=torch.bool)
    output = attention(query, key, value, PATTERN, key_padding_mask=mask)
    mask[0, 3] = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
