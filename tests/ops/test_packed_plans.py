"""Plans of bounds on a device: made in every call, from tables that follow from shapes and are shared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from index_calls import same_document
from kernels.no_waiting import attention_op
from oracle import dense_attention, error
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention_pytorch import attention, parse
from dilated_attention_pytorch.kernels.cpu import tiles
from dilated_attention_pytorch.kernels.triton.lowering import schedule
from dilated_attention_pytorch.ops import varlen
from dilated_attention_pytorch.plan import cache, documents
from dilated_attention_pytorch.plan.documents import documents_plan, window_of

pytestmark = pytest.mark.usefixtures("on_device")

N = 70
BOUNDS = [[0, 20, 20, 70], [0, 1, 50, 70], [0, 0, 69, 70], [0, 35, 40, 70]]


@pytest.fixture
def on_device(monkeypatch):
    """Bounds stay where they are, as on a GPU, and calls run in torch."""
    for module in (attention_op, varlen):
        monkeypatch.setattr(module, "allows_host_sync", lambda device: False)
    monkeypatch.setattr(attention_op, "can_run", lambda call, backend: True)
    monkeypatch.setattr(attention_op, "choose", lambda call, backend: ("cpu", tiles))
    monkeypatch.setattr(documents, "_tables", cache.StreamCache(16))


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


def change_by_torch(bounds, values):
    bounds.copy_(values)


def change_uncounted(bounds, values):
    """As kernels and CUDA graphs do: torch counts no change."""
    bounds.data.copy_(values)


@pytest.mark.parametrize("change", [change_by_torch, change_uncounted])
def test_changed_bounds_are_planned_anew(change):
    bounds = bounds_of()
    for values in BOUNDS:
        change(bounds, torch.tensor(values, dtype=torch.int32))
        check(bounds, values)
        check(bounds, values, is_causal=True)
        check(bounds, values, "window:3,1")
        check(bounds, values, "full")
        check(bounds, values, leaves=inputs(heads=3))


def test_in_place_change_before_the_backward_pass_is_refused():
    bounds = bounds_of()
    output = attention(*inputs(), "window:20", cu_seqlens=bounds)
    bounds[1] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_tables_of_inference_mode_serve_training():
    with torch.inference_mode():
        attention(*inputs(), "window:20", cu_seqlens=bounds_of())
    check(bounds_of(), BOUNDS[0])


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_compiled_calls_follow_bounds_that_they_change():
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


def test_captures_and_streams_have_tables_of_their_own(monkeypatch):
    bounds, now, tables = bounds_of(), {"captured": False, "stream": 1}, documents._tables
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["captured"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: now["stream"], raising=False)
    gpu = torch.device("cuda", 0)
    on_gpu = SimpleNamespace(get=lambda device, *rest: tables.get(gpu, *rest))
    monkeypatch.setattr(documents, "_tables", on_gpu)

    def tables_of_a_plan(**changes):
        now.update(changes)
        plan = documents_plan(bounds, N, 2, 16, 5, 5)
        PLANS.append(plan)
        walk = plan.parts[0].by_query
        return {x.data_ptr() for x in (plan.masks.bits, plan.masks.band, walk.full, walk.mask)}

    first = tables_of_a_plan()
    assert tables_of_a_plan() == first
    # A graph reads nothing that is freed with a cache, and leaves nothing there that only a replay computes.
    captured = [tables_of_a_plan(captured=True), tables_of_a_plan()]
    assert first.isdisjoint(captured[0] | captured[1]) and captured[0].isdisjoint(captured[1])
    assert tables_of_a_plan(captured=False) == first
    other = tables_of_a_plan(stream=2)
    assert first.isdisjoint(other) and tables_of_a_plan() == other


PLANS = []
"""Plans of the test below: their tables are not freed, so that no others have their addresses."""


def test_fake_tensors_leave_no_tables_behind():
    with FakeTensorMode():
        documents_plan(torch.empty(4, dtype=torch.int32), N, 2, 16, 5, 5)
    assert not documents._tables._values
    check(bounds_of(), BOUNDS[0])


def test_tables_of_shapes_are_shared_and_bounded():
    plans = [documents_plan(bounds_of(which), N, 2, 16, 5, 5) for which in range(4)]
    assert all(plan.masks is plans[0].masks for plan in plans)
    for n in range(60, 100):
        documents_plan(torch.tensor([0, n]), n, 2, 16, 5, 5)
        assert len(documents._tables._values) <= 16
    again = documents_plan(bounds_of(), N, 2, 16, 5, 5)
    assert again.masks is not plans[0].masks and torch.equal(again.to_dense(), plans[0].to_dense())


@pytest.mark.parametrize("length", [0, 2**15])
def test_long_tables_are_not_cached(monkeypatch, length):
    monkeypatch.setattr(documents, "LONGEST", length)
    for _ in range(2):
        check(bounds_of(), BOUNDS[0])
    assert bool(documents._tables._values) == bool(length)


def test_bounds_are_shared_by_threads():
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
def test_other_bounds_are_planned_in_few_operations(monkeypatch, pattern):
    """A model packs other documents in every step; tables that follow from shapes are there."""
    monkeypatch.setattr(documents, "_is_intercepted", lambda: False)
    window = window_of(parse(pattern), N)
    for which in range(2):
        bounds = bounds_of(which)
        with Operations() as operations:
            schedule(documents_plan(bounds, N, 4, 16, *window), 2)
    assert operations.count <= 34
