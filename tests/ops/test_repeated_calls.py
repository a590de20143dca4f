"""A call seen before goes straight to what its backend prepared, and gives what the first call gave."""

import copy
import gc
import pickle
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from cases import PROBLEMS
from oracle import answer, error

from dilated_attention_pytorch import (
    BackendUnsupported,
    attention,
    attention_with_lse,
    make_plan,
    make_selection,
    parse,
    selected_attention,
)
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.cpu import tiles as cpu
from dilated_attention_pytorch.kernels.sink import apply_sink
from dilated_attention_pytorch.ops import plan_cache
from dilated_attention_pytorch.plan.cache import TensorMemo
from dilated_attention_pytorch.selection import attend
from dilated_attention_pytorch.selection import attention as selected
from dilated_attention_pytorch.selection.attend import CallChoices

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


def test_calls_with_sinks_share_a_prepared_call(prepared):
    query, key, value = inputs()
    exact = answer(query, key, value, parse(PATTERN))
    for _ in range(2):
        # Each call reads its own sink, in the backward pass too.
        tensors = [x.detach().requires_grad_() for x in (query, key, value, torch.randn(2, dtype=torch.float64))]
        output = attention(*tensors[:3], PATTERN, sink=tensors[3], backend="cpu")
        assert error(output, apply_sink(exact.output, exact.lse, tensors[3].detach())) <= 1e-12
        wanted = apply_sink(*attention_with_lse(*tensors[:3], PATTERN, backend="reference"), tensors[3])
        grads = [torch.autograd.grad(x.square().sum(), tensors) for x in (output, wanted)]
        assert all(error(got, want) <= 1e-12 for got, want in zip(*grads, strict=True))
    attention(query, key, value, PATTERN, backend="cpu")
    # The runner of sinks, the reference, and the runner without a sink.
    assert [(runner.forwards, runner.backwards) for runner in prepared] == [(2, 2), (2, 2), (1, 0)]


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


ROWS = pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
SIZE = 16


def listed(per_token, n=70, scope=2, seed=0):
    """Indices (1, scope, rows, 3) with holes and duplicates."""
    rows, generator = n if per_token else -(-n // SIZE), torch.Generator().manual_seed(seed)
    return torch.randint(-1, -(-n // SIZE), (1, scope, rows, 3), generator=generator, dtype=torch.int32)


def selection_of(per_token, n=70, is_causal=True, **options):
    return make_selection(listed(per_token, n), n=n, heads=2, granularity=SIZE, is_causal=is_causal, **options)


def step(selection, tensors=None, **options):
    """Output, LSE and gradients of a call with a selection."""
    tensors = inputs(requires_grad=True) if tensors is None else tensors
    output, lse = selected_attention(*tensors, selection, return_lse=True, **options)
    return output, lse, *torch.autograd.grad(output.square().sum() + lse.clamp(min=-9.0).sum(), tensors)


def assert_same(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.fixture
def planned(monkeypatch):
    """Names of the plans of selections that were made."""
    names = []
    for name in ("block_plan", "token_plan"):
        make = getattr(attend, name)
        run = lambda *given, name=name, make=make: names.append(name) or make(*given)  # noqa: E731
        monkeypatch.setattr(attend, name, run)
    # Its plans are built by `block_plan`, too.
    attend.shared_plan(70, 2, SIZE, 1, 0, True, torch.device("cpu"))
    attend.shared_plan(70, 2, SIZE, 0, 0, False, torch.device("cpu"))
    names.clear()
    return names


@pytest.mark.parametrize("options", [{}, {"is_causal": False}, {"cu_seqlens": torch.tensor([0, 20, 70])}], ids=str)
@ROWS
def test_selection_is_planned_once(planned, per_token, options):
    selection = selection_of(per_token, **options)
    first = step(selection)
    assert len(planned) == 1
    for _ in range(2):
        assert_same(step(selection), first)
    assert len(planned) == 1
    assert_same(step(selection_of(per_token, **options)), first)
    assert len(planned) == 2


@ROWS
def test_large_selection_is_planned_in_every_call(planned, per_token, monkeypatch):
    monkeypatch.setattr(attend, "MOST_CACHED", 10)
    selection = selection_of(per_token)
    assert_same(step(selection), step(selection))
    assert len(planned) == 2


@pytest.mark.parametrize("change", ["in place", "data"])
@ROWS
def test_changed_lists_are_planned_in_every_call(planned, per_token, change):
    selection, other = selection_of(per_token), listed(per_token, seed=1)
    step(selection)
    wanted = make_selection(other, n=70, heads=2, granularity=SIZE, is_causal=True)
    for name in ("indices", "sharing_rows"):
        own, new = getattr(selection, name), getattr(wanted, name)
        if own is None:
            continue
        if change == "data":
            own.data = new.clone()
        else:
            own.copy_(new)
    exact = step(wanted)
    planned.clear()
    for _ in range(2):
        assert_same(step(selection), exact)
    assert len(planned) == 2


@pytest.mark.parametrize(
    ("per_token", "changed"),
    [
        *((rows, name) for rows in (False, True) for name in ("indices", "bounds", "key_padding_mask")),
        (True, "sharing_rows"),
    ],
)
def test_a_change_before_the_backward_pass_is_refused(per_token, changed):
    options = {"cu_seqlens": torch.tensor([0, 20, 70])} if changed == "bounds" else {}
    selection, mask = selection_of(per_token, **options), torch.zeros(1, 70, dtype=torch.bool)
    output = selected_attention(*inputs(requires_grad=True), selection, key_padding_mask=mask)
    output.sum().backward(retain_graph=True)
    (mask if changed == "key_padding_mask" else getattr(selection, changed))[0] = 1
    with pytest.raises(ValueError, match="must stay as they are until the backward pass"):
        output.sum().backward()


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float32},
        {"width": 16},
        {"key_heads": 1},
        {"scale": 0.3},
        {"key_padding_mask": torch.arange(70)[None] > 60},
        {"dropout_p": 0.4},
        {"sink": torch.tensor([0.3, -0.2], dtype=torch.float64)},
        {"backend": "reference"},
    ],
    ids=lambda other: next(iter(other)),
)
@ROWS
def test_other_calls_share_what_depends_on_lists_alone(per_token, other):
    selection, other = selection_of(per_token), dict(other)
    step(selection)
    dtype, width = other.pop("dtype", torch.float64), other.pop("width", 8)
    heads = 2, *(other.pop("key_heads", 2),) * 2
    tensors = [torch.randn(1, h, 70, width, dtype=dtype, requires_grad=True) for h in heads]
    for _ in range(2):
        results = []
        for each in (selection, selection_of(per_token)):
            torch.manual_seed(3)
            results.append(step(each, tensors, enable_gqa=True, **other))
        assert_same(*results)


def test_dropout_numbers_the_rows_of_a_cached_plan():
    lists = torch.full((1, 2, 70, 1), -1, dtype=torch.int32)
    lists[:, :, -1] = 3
    options = {"n": 70, "heads": 2, "granularity": SIZE, "is_causal": True}
    selection, results = make_selection(lists, **options), []
    step(selection)
    for each in (selection, make_selection(lists, **options)):
        torch.manual_seed(3)
        results.append(step(each, dropout_p=0.4))
    assert_same(*results)


def test_chunks_of_tokens_use_no_cached_plan(planned, monkeypatch):
    selection = selection_of(True)
    wanted = step(selection)
    monkeypatch.setattr(attend, "GATHERED", 1)
    monkeypatch.setattr(attend, "OF_TENSORS", 2)
    planned.clear()
    for got, want in zip(step(selection), wanted, strict=True):
        assert error(got.detach(), want.detach()) <= 1e-12
    assert len(planned) > 2


@ROWS
def test_cached_plans_of_inference_mode_serve_training(per_token):
    wanted = step(selection_of(per_token))
    with torch.inference_mode():
        unversioned = selection_of(per_token)
    selection = selection_of(per_token)
    with torch.inference_mode():
        selected_attention(*inputs(), selection)
    assert_same(step(selection), wanted)
    assert unversioned.memo is None
    assert_same(step(unversioned), wanted)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), replace],
    ids=["copy", "deepcopy", "pickle", "replace"],
)
@ROWS
def test_copies_of_a_selection_cache_nothing(planned, per_token, copied):
    selection = selection_of(per_token)
    wanted = step(selection)
    other = copied(selection)
    assert other.memo is None and selection.memo is not None
    for _ in range(2):
        assert_same(step(other), wanted)
    assert len(planned) == 3


@ROWS
def test_cached_plans_are_freed_with_the_selection(per_token):
    selection = selection_of(per_token)
    step(selection)
    made = [value for _, value in selection.memo._values.values()]
    plans = [weakref.ref(getattr(x, "plan", x)) for x in made if not isinstance(x, torch.Tensor)]
    assert len(plans) == 1
    del made
    gc.disable()
    try:
        del selection
        assert plans[0]() is None
    finally:
        gc.enable()


@ROWS
def test_selection_is_shared_by_threads(per_token):
    selection, tensors = selection_of(per_token), inputs()
    wanted = selected_attention(*tensors, selection_of(per_token))
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: selected_attention(*tensors, selection), range(16)):
            assert torch.equal(found, wanted)


class OnGpu:
    """Stands for a list in the memory of a GPU."""

    device, _version, shape = torch.device("cuda", 0), 0, (4,)

    def data_ptr(self):
        return 512

    def stride(self):
        return (1,)

    def untyped_storage(self):
        return torch.zeros(4).untyped_storage()


def test_cached_values_are_those_of_a_stream(monkeypatch):
    current = {"stream": 1, "captured": False}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: current["stream"], raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current["captured"])
    lists = OnGpu()
    memo, made = TensorMemo(lists), []

    def derived(**now):
        current.update(now)
        value = memo.derive("plan", lambda: made.append(len(made)) or made[-1])
        assert value in made
        return value

    assert [derived(), derived(), derived(stream=2), derived(), derived(stream=1)] == [0, 0, 1, 1, 2]
    # A graph must not read memory that is freed with the cache, nor leave memory in it that only a replay fills.
    assert [derived(captured=True), derived(), derived(captured=False)] == [3, 4, 2]
    lists._version = 1
    assert [derived(), derived()] == [5, 6]
    lists._version = 0
    assert [derived(), derived()] == [7, 7]


def test_captured_selections_cache_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert selection_of(True).memo is not None
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert selection_of(True).memo is None


@pytest.fixture
def checked(monkeypatch):
    """Calls of `selected_attention` whose arguments were checked."""
    calls, check = [], selected._checked
    monkeypatch.setattr(selected, "_checked", lambda *given: calls.append(given) or check(*given))
    monkeypatch.setattr(selected, "_cached", {})
    return calls


@pytest.mark.parametrize("given", ["selection", "indices"])
@ROWS
def test_arguments_of_equal_calls_are_checked_once(checked, per_token, given):
    options = {} if given == "selection" else {"granularity": SIZE, "is_causal": True}
    for seed in range(3):
        lists = listed(per_token, seed=seed)
        what = make_selection(lists, n=70, heads=2, granularity=SIZE, is_causal=True) if given == "selection" else lists
        found = selected_attention(*inputs(), what, **options)
        # Under a profiler a call runs by the operators.
        with torch.autograd.profiler.profile():
            assert torch.equal(found, selected_attention(*inputs(), what, **options))
    assert len(checked) == 4


WRONG = {
    "value's dtype": (lambda q, k, v, x: ((q, k, v.float(), x), {}), TypeError, "value must have the query's dtype"),
    "length": (lambda q, k, v, x: ((q[:, :, 1:], k, v, x), {}), ValueError, "key must have the query's length"),
    "heads": (lambda q, k, v, x: ((q, k[:, :1], v[:, :1], x), {}), ValueError, "key must have as many heads"),
    "nested": (lambda q, k, v, x: ((q, k, torch.nested.nested_tensor([v[0]]), x), {}), TypeError, "dense tensor"),
    "list": (lambda q, k, v, x: ((q, k, v, x.tolist()), {}), TypeError, "indices must be a Tensor"),
    "float": (lambda q, k, v, x: ((q, k, v, x.float()), {}), TypeError, "indices must be int32 or int64"),
    "rows": (lambda q, k, v, x: ((q, k, v, x[:, :, 1:]), {}), ValueError, "indices must have 70 rows"),
    "value": (lambda q, k, v, x: ((q, k, v, x + 9), {}), ValueError, "indices must be block numbers"),
    "counts": (lambda q, k, v, x: ((q, k, v, x, x[..., 0, 0]), {}), ValueError, "counts must have shape"),
    "granularity": (lambda q, k, v, x: ((q, k, v, x), {"granularity": 17}), ValueError, "granularity must be one of"),
    "sink": (lambda q, k, v, x: ((q, k, v, x), {"sink": torch.zeros(3)}), ValueError, "sink must have shape"),
    "scale": (lambda q, k, v, x: ((q, k, v, x), {"scale": "1"}), TypeError, "scale must be a number"),
    "dropout": (lambda q, k, v, x: ((q, k, v, x), {"dropout_p": 1.0}), ValueError, "dropout_p must lie in"),
    "backend": (lambda q, k, v, x: ((q, k, v, x), {"backend": "cup"}), ValueError, "backend must be one of"),
    "mask": (lambda q, k, v, x: ((q, k, v, x), {"key_padding_mask": x[:, 0, :, 0]}), TypeError, "must be bool"),
    "distill": (lambda q, k, v, x: ((q, k, v, x), {"distill": 1, "scores": 2}), TypeError, "distill must be a"),
}


@pytest.mark.untyped
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_after_an_equal_call(name):
    tensors, (change, kind, message) = (*inputs(), listed(True)), WRONG[name]
    for _ in range(2):
        selected_attention(*tensors, granularity=SIZE)
        given, more = change(*tensors)
        with pytest.raises(kind, match=message):
            selected_attention(*given, **{"granularity": SIZE} | more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"granularity": 32}, "granularity must be that of the selection"),
        ({"is_causal": True}, "is_causal must be that of the selection"),
        ({"counts": torch.zeros(1, 2, 70, dtype=torch.int32)}, "counts and cu_seqlens must come with index tensors"),
    ],
)
def test_contradictions_are_refused_after_an_equal_call(more, message):
    selection = selection_of(True, is_causal=False)
    for _ in range(2):
        selected_attention(*inputs(), selection)
        with pytest.raises(ValueError, match=message):
            selected_attention(*inputs(), selection, **more)


def test_swapped_axes_warn_in_every_call():
    tensors, lists = [torch.zeros(1, 140, 32, 8) for _ in range(3)], torch.zeros(1, 1, 32, 1, dtype=torch.int32)
    for _ in range(2):
        with pytest.warns(UserWarning, match="are the axes swapped"):
            selected_attention(*tensors, lists, granularity=SIZE)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@ROWS
def test_selected_calls_follow_autocast_and_forward_mode(per_token):
    selection, tensors = selection_of(per_token), inputs(dtype=torch.float32)
    for _ in range(2):
        assert selected_attention(*tensors, selection).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert selected_attention(*tensors, selection).dtype == torch.bfloat16
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
            with pytest.raises(NotImplementedError, match="forward-mode AD"):
                selected_attention(dual, *tensors[1:], selection)


def test_choices_follow_the_gradients_that_other_libraries_lack():
    tensors, choices = inputs(128, torch.float32), CallChoices()
    call = AttentionCall(*tensors, make_plan("causal", 128, 2), 0.3)
    assert choices.choose(call, "flex")[0] == "flex"
    with pytest.raises(BackendUnsupported, match="no backward of FlexAttention"):
        choices.choose(replace(call, query=tensors[0].requires_grad_()), "flex")


def test_only_so_many_selected_calls_are_cached(monkeypatch):
    monkeypatch.setattr(selected, "MOST_CACHED", 3)
    for n in range(20, 30):
        selected_attention(*inputs(n), listed(True, n), granularity=SIZE, is_causal=True)
    assert len(selected._cached) <= 3
