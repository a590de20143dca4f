"""Plans of bounds on a device: made once for eager calls on the same bounds, and never used for others."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from index_calls import same_document
from kernels.no_waiting import attention_op
from oracle import dense_attention, error
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention_pytorch import attention, parse, varlen_attention
from dilated_attention_pytorch.kernels.cpu import tiles
from dilated_attention_pytorch.kernels.triton.lowering import schedule
from dilated_attention_pytorch.ops import varlen
from dilated_attention_pytorch.plan import cache, documents
from dilated_attention_pytorch.plan.documents import documents_plan, memo_of, window_of
from dilated_attention_pytorch.plan.plan import tensors_of

N = 70
BOUNDS = [[0, 20, 20, 70], [0, 1, 50, 70], [0, 0, 69, 70], [0, 35, 40, 70]]


@pytest.fixture
def planned(monkeypatch):
    """Shapes of the plans that are made. Bounds stay where they are, and calls run in torch."""
    made, plan = [], documents._plan
    monkeypatch.setattr(documents, "_plan", lambda *given: made.append(given[1:4]) or plan(*given))
    for module in (attention_op, varlen):
        monkeypatch.setattr(module, "allows_host_sync", lambda device: False)
    monkeypatch.setattr(attention_op, "can_run", lambda call, backend: True)
    monkeypatch.setattr(attention_op, "choose", lambda call, backend: ("cpu", tiles))
    monkeypatch.setattr(documents, "_memos", {})
    monkeypatch.setattr(documents, "_tables", cache.StreamCache(16))
    return made


def bounds_of(which=0, dtype=torch.int32):
    return torch.tensor(BOUNDS[which], dtype=dtype)


def inputs(n=N, heads=2):
    generator = torch.Generator().manual_seed(n)
    shape = 1, heads, n, 8
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def step(run, leaves):
    output = run(*leaves)
    return output, *torch.autograd.grad(output.sin().sum(), leaves)


def check(bounds, values, pattern="window:20", leaves=None, **options):
    """Compare a call on bounds with dense attention in the documents of `values`, output and gradients."""
    leaves = inputs() if leaves is None else leaves
    n, heads = leaves[0].shape[2], leaves[0].shape[1]
    before, after = window_of(parse(pattern), n)
    after = 0 if options.get("is_causal") else after
    ahead = torch.arange(n) - torch.arange(n)[:, None]
    seen = same_document(torch.tensor(values), n) & (ahead >= -before) & (ahead <= after)
    found = step(lambda *x: attention(*x, pattern, cu_seqlens=bounds, **options), leaves)
    wanted = step(lambda *x: dense_attention(*x, seen.expand(heads, -1, -1).double())[0], leaves)
    for got, want in zip(found, wanted, strict=True):
        assert error(got.detach(), want.detach()) < 1e-12


def test_layers_and_passes_share_a_plan(planned):
    bounds = bounds_of()
    for _ in range(3):
        check(bounds, BOUNDS[0])
    assert len(planned) == 1
    rows = [x[0].transpose(0, 1).detach() for x in inputs()]
    for _ in range(2):
        varlen_attention(*rows, bounds, bounds, N, N, window_size=(20, 20))
        varlen_attention(*rows, bounds, None, N, N, window_size=(20, 20))
    assert len(planned) == 1


def test_other_calls_have_plans_of_their_own(planned):
    bounds, seven = bounds_of(), [x[:, :, :7].detach().requires_grad_() for x in inputs(heads=3)]
    for _ in range(2):
        check(bounds, BOUNDS[0])
        check(bounds, BOUNDS[0], is_causal=True)
        check(bounds, BOUNDS[0], "window:3,1")
        check(bounds, BOUNDS[0], "full")
        check(bounds, BOUNDS[0], leaves=inputs(heads=3))
        # Bounds past the end are cut.
        check(bounds, [0, 7, 7, 7], leaves=seven)
    assert len(planned) == 6
    plans = [documents_plan(bounds, N, 2, size, 5, 5, is_eager=True) for size in (16, 32, 16)]
    assert [plan.block_size for plan in plans] == [16, 32, 16] and plans[0] is plans[2]


def changed_by_copy(bounds, values):
    bounds.copy_(values)


def changed_by_entry(bounds, values):
    for i, value in enumerate(values.tolist()):
        bounds[i] = value


def changed_in_inference_mode(bounds, values):
    with torch.inference_mode():
        bounds.copy_(values)


def changed_by_out(bounds, values):
    torch.add(values, 0, out=bounds)


def changed_through_a_view(bounds, values):
    bounds.view(-1)[:].copy_(values)


def changed_by_data(bounds, values):
    bounds.data = values.clone()


def changed_by_set(bounds, values):
    bounds.set_(values.clone())


@pytest.mark.parametrize(
    "change",
    [
        changed_by_copy,
        changed_by_entry,
        changed_in_inference_mode,
        changed_by_out,
        changed_through_a_view,
        changed_by_data,
        changed_by_set,
    ],
)
def test_changed_bounds_are_planned_anew(planned, change):
    bounds = bounds_of()
    for which, values in enumerate(BOUNDS):
        if which:
            change(bounds, torch.tensor(values, dtype=torch.int32))
        for _ in range(2):
            check(bounds, values)
    assert len(planned) == len(BOUNDS)


def test_change_of_the_base_of_bounds_is_noticed(planned):
    base = torch.tensor([[9, *x] for x in BOUNDS[:2]], dtype=torch.int32)
    bounds = base[0, 1:]
    check(bounds, BOUNDS[0])
    base.copy_(base.flip(0))
    check(bounds, BOUNDS[1])
    assert len(planned) == 2


def test_other_strides_of_the_same_memory_are_noticed(planned):
    base = torch.tensor([0, 1, 50, 60, N], dtype=torch.int32)
    bounds = base[:3]
    check(bounds, [0, 1, N])
    bounds.data = base[::2]
    check(bounds, [0, 50, N])
    bounds.data = base[:4]
    check(bounds, [0, 1, 50, N])
    assert bounds._version == 0 and len(planned) == 3


def test_bounds_at_an_address_used_before_are_planned(planned):
    addresses = set()
    for i in range(50):
        bounds = bounds_of(i % 4)
        addresses.add((id(bounds), bounds.data_ptr()))
        plan = documents_plan(bounds, N, 2, 16, 5, 5, is_eager=True)
        assert torch.equal(plan.to_dense(), documents_plan(bounds, N, 2, 16, 5, 5).to_dense())
        del plan, bounds
        assert not documents._memos
    assert len(addresses) < 50
    # Memory that bounds had before belongs to the cache until it notices the change.
    bounds = bounds_of()
    check(bounds, BOUNDS[0])
    memory = StorageWeakRef(bounds.untyped_storage())
    bounds.data = bounds_of(1)
    assert not memory.expired()
    check(bounds, BOUNDS[1])
    assert memory.expired()


def test_in_place_change_before_the_backward_pass_is_refused(planned):
    bounds = bounds_of()
    output = attention(*inputs(), "window:20", cu_seqlens=bounds)
    bounds[1] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


class OwnTensor(torch.Tensor):
    """A kind of tensor that may change its values in its own way."""


REPLAYED = bounds_of()


def unversioned():
    with torch.inference_mode():
        return bounds_of()


def of_a_replayed_graph():
    """As the CUDA graphs of `torch.compile` return their outputs: one tensor, which every replay writes to."""
    memory = torch._C._construct_storage_from_data_pointer(REPLAYED.data_ptr(), REPLAYED.device, REPLAYED.nbytes)
    return torch.empty(0, dtype=torch.int32).set_(memory)


@pytest.mark.parametrize(
    "make",
    [
        unversioned,
        lambda: torch.from_numpy(bounds_of().numpy()),
        lambda: torch.from_dlpack(bounds_of()),
        lambda: bounds_of().as_subclass(OwnTensor),
        of_a_replayed_graph,
    ],
    ids=["inference", "numpy", "dlpack", "subclass", "replayed"],
)
def test_bounds_that_others_write_are_planned_in_every_call(planned, make):
    bounds = make()
    assert memo_of(bounds) is None
    with torch.inference_mode():
        for values in BOUNDS[:2]:
            bounds.copy_(torch.tensor(values, dtype=torch.int32))
            plan = documents_plan(bounds, N, 2, 16, 5, 5, is_eager=True)
            exact = documents_plan(torch.tensor(values), N, 2, 16, 5, 5)
            assert torch.equal(plan.to_dense(), exact.to_dense())
    assert len(planned) == 4 and not documents._memos


def test_plans_of_inference_mode_serve_training(planned):
    bounds = bounds_of()
    with torch.inference_mode():
        attention(*inputs(), "window:20", cu_seqlens=bounds)
    check(bounds, BOUNDS[0])
    assert len(planned) == 1


def test_operators_do_not_use_cached_plans(planned):
    """A compiler may write to a buffer again without counting the change, and passes the same tensor."""
    bounds = bounds_of()
    rows = [x.detach() for x in inputs()]
    for values in BOUNDS:
        # Of these, torch counts none.
        bounds.data.copy_(torch.tensor(values, dtype=torch.int32))
        settings = attention_op.CallSettings(cu_seqlens=bounds, pattern="window:20", scale=0.3)
        found, _ = torch.ops.dilated_attention.forward(*rows, *settings)
        wanted = attention(*rows, "window:20", cu_seqlens=bounds.clone(), scale=0.3)
        assert torch.equal(found, wanted)
    assert bounds._version == 0 and len(planned) == 8


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_compiled_calls_follow_bounds_that_they_change(planned):
    def run(query, key, value, bounds, values):
        bounds.copy_(values)
        return attention(query, key, value, "window:20", cu_seqlens=bounds)

    torch._dynamo.reset()
    compiled, bounds, leaves = torch.compile(run, fullgraph=True, backend="aot_eager"), bounds_of(), inputs()
    for values in BOUNDS:
        found = step(lambda *x, values=values: compiled(*x, bounds, torch.tensor(values, dtype=torch.int32)), leaves)
        wanted = step(lambda *x: attention(*x, "window:20", cu_seqlens=bounds.clone()), leaves)
        for got, want in zip(found, wanted, strict=True):
            assert error(got.detach(), want.detach()) < 1e-12
        check(bounds, values)


def test_captures_and_streams_have_plans_of_their_own(planned, monkeypatch):
    bounds, now, tables = bounds_of(), {"captured": False, "stream": 1}, documents._tables
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["captured"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: now["stream"], raising=False)
    memo_of(bounds)._device = gpu = torch.device("cuda", 0)
    on_gpu = SimpleNamespace(get=lambda device, *rest: tables.get(gpu, *rest))
    monkeypatch.setattr(documents, "_tables", on_gpu)

    def tables_of_a_plan(**changes):
        now.update(changes)
        return memory_of(documents_plan(bounds, N, 2, 16, 5, 5, is_eager=True))

    first = tables_of_a_plan()
    assert tables_of_a_plan() == first
    # A graph reads nothing that is freed with a cache, and leaves nothing there that only a replay computes.
    captured = [tables_of_a_plan(captured=True), tables_of_a_plan()]
    assert first.isdisjoint(captured[0] | captured[1]) and captured[0].isdisjoint(captured[1])
    assert tables_of_a_plan(captured=False) == first
    other = tables_of_a_plan(stream=2)
    assert first.isdisjoint(other) and tables_of_a_plan() == other
    assert len(planned) == 4


PLANS = []
"""Plans of the test below: their tables are not freed, so that no others have their addresses."""


def memory_of(plan):
    """Addresses of the tables of a plan."""
    PLANS.append(plan)
    return {x.data_ptr() for x in tensors_of(plan) if x.numel()}


def test_fake_tensors_leave_no_tables_behind(planned):
    with FakeTensorMode():
        documents_plan(torch.empty(4, dtype=torch.int32), N, 2, 16, 5, 5)
    assert not documents._tables._values
    check(bounds_of(), BOUNDS[0])


def test_tables_of_shapes_are_shared_and_bounded(planned):
    plans = [documents_plan(bounds_of(which), N, 2, 16, 5, 5) for which in range(4)]
    assert all(plan.masks is plans[0].masks for plan in plans)
    for n in range(60, 100):
        documents_plan(torch.tensor([0, n]), n, 2, 16, 5, 5)
        assert len(documents._tables._values) <= 16
    again = documents_plan(bounds_of(), N, 2, 16, 5, 5)
    assert again.masks is not plans[0].masks and torch.equal(again.to_dense(), plans[0].to_dense())


@pytest.mark.parametrize("length", [0, 2**15])
def test_long_plans_are_not_cached(planned, monkeypatch, length):
    monkeypatch.setattr(documents, "LONGEST", length)
    bounds = bounds_of()
    for _ in range(2):
        check(bounds, BOUNDS[0])
    assert len(planned) == (1 if length else 2) and bool(documents._tables._values) == bool(length)


def test_plans_are_freed_with_their_bounds(planned):
    bounds = bounds_of()
    plan = weakref.ref(documents_plan(bounds, N, 2, 16, 5, 5, is_eager=True))
    assert plan() is not None
    gc.disable()
    try:
        del bounds
        assert plan() is None and not documents._memos
    finally:
        gc.enable()


def test_bounds_are_shared_by_threads(planned):
    bounds, rows = bounds_of(), [x.detach() for x in inputs()]
    wanted = attention(*rows, "window:20", cu_seqlens=bounds_of())
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: attention(*rows, "window:20", cu_seqlens=bounds), range(16)):
            assert torch.equal(found, wanted)


class Operations(TorchDispatchMode):
    """Counts operations apart from views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = func._schema.returns
        self.count += not (returns and returns[0].alias_info is not None and not func._schema.is_mutable)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pattern", ["window:20", "window:20,0", "full", "causal"])
def test_other_bounds_are_planned_in_few_operations(planned, monkeypatch, pattern):
    """A model packs other documents in every step; tables that follow from shapes are there."""
    monkeypatch.setattr(documents, "is_intercepted", lambda: False)
    window = window_of(parse(pattern), N)
    for which in range(2):
        bounds = bounds_of(which)
        with Operations() as operations:
            schedule(documents_plan(bounds, N, 4, 16, *window, is_eager=True), 2)
    assert operations.count <= 34
    with Operations() as operations:
        schedule(documents_plan(bounds, N, 4, 16, *window, is_eager=True), 2)
    assert operations.count == 0
