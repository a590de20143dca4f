"""A memory budget: what it bounds is measured, and nothing of it shows in the results."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from cases import BY_NAME, PROBLEMS
from oracle import answer, error
from torch.profiler import ProfilerActivity, profile

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.kernels.call import AttentionCall, saves_memory
from dilated_attention_pytorch.kernels.registry import backend_named
from dilated_attention_pytorch.nn import DilatedAttention, MultiheadDilatedAttention, SparseAttention
from dilated_attention_pytorch.ops import memory_budget
from dilated_attention_pytorch.ops.attention import CallSettings, call_of
from dilated_attention_pytorch.plan import make_plan

PATTERNS = ("dilated:64x1,256x4", "window:40 & causal", "heads{window:30 / causal / dilated:64x2 / global:9}")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    memory_budget.clear_chunk_sizes()


def inputs(dtype=torch.float32, key_heads=4, n=300, batch=2, d=16):
    return [
        torch.randn(batch, n, heads, d, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (4, key_heads, key_heads)
    ]


def need(tensors, pattern, backend, direction, bias=None):
    call = call_of(*tensors, CallSettings(pattern=pattern, scale=0.25, backend=backend, bias=bias))
    return memory_budget.memory(call, backend, direction).sizes


def problem_call(problem, dtype=torch.float64, **changes):
    """A problem's call with tiles smaller than its rows, and the gradients of what it gives."""
    *inputs, grad_output, grad_lse = problem.inputs(dtype)
    pattern = problem.pattern.resolve(problem.n, problem.heads)
    plan = make_plan(pattern, problem.n, problem.heads, problem.block_size)
    call = AttentionCall(*inputs, plan, 0.3, problem.key_padding_mask(), pattern=pattern)
    return replace(call, **changes), grad_output, grad_lse.to(call.compute_dtype)


def in_chunks(monkeypatch, size):
    monkeypatch.setattr(memory_budget, "memory", lambda call, name, direction: memory_budget.Memory({size: 0}))


def both_ways(call, backend, grad_output, grad_lse):
    run = call, backend, backend_named(backend), 2**30
    found = memory_budget.forward(*run)
    return *found, *memory_budget.backward(*run, *found, grad_output, grad_lse).inputs


def everything(tensors, pattern, grad_output, memory_budget, **options):
    """Output and gradients; dropout, where there is any, from one seed."""
    torch.manual_seed(3)
    output = dap.attention(*tensors, pattern, enable_gqa=True, memory_budget=memory_budget, **options)
    return output, *torch.autograd.grad(output, tensors, grad_output)


@pytest.mark.parametrize("backend", ["native", "cpu", "reference"])
@pytest.mark.parametrize(("key_heads", "pattern"), [(4, PATTERNS[0]), (2, PATTERNS[1]), (2, PATTERNS[2])])
def test_results_have_the_same_bits_whatever_the_chunks(backend, key_heads, pattern, monkeypatch):
    if backend not in available(backend):
        pytest.skip("the native kernel is not built")
    tensors = inputs(torch.float64, key_heads)
    grad_output = torch.randn_like(tensors[0])
    padding = torch.arange(300) >= torch.tensor([300, 211])[:, None]
    options = {"key_padding_mask": padding, "dropout_p": 0.1, "backend": backend}
    whole = everything(tensors, pattern, grad_output, None, **options)
    unit, sizes = 300 * 4 // key_heads, need(tensors, pattern, backend, "backward")
    for size in {2 * unit, unit, min(sizes)}:
        in_chunks(monkeypatch, size)
        output, *grads = everything(tensors, pattern, grad_output, 2**30, **options)
        # Plain torch gathers as many tiles a step as a sample leaves room for, and so merges them in other groups.
        close = lambda a, b: error(a, b) < 1e-13  # noqa: E731
        same = torch.equal if backend != "cpu" else close
        assert same(output, whole[0].detach()) and same(grads[0], whole[1])
        # Rows add up the gradients of their keys.
        same = same if size >= unit else close
        assert all(same(a, b) for a, b in zip(grads[1:], whole[2:], strict=True))


ON_THE_CPU = ("dilated-odd-rates", "dilated-block-offset", "random-per-head-causal", "gqa")


@pytest.mark.parametrize(
    ("problem", "backend"),
    [(problem, "native") for problem in PROBLEMS] + [(BY_NAME[name], "cpu") for name in ON_THE_CPU],
    ids=lambda value: getattr(value, "name", value),
)
def test_rows_at_a_time_give_what_all_give(problem, backend, monkeypatch):
    if backend not in available(backend):
        pytest.skip("the native kernel is not built")
    call, *grads = problem_call(problem)
    least = min(memory_budget.memory(call, backend, "forward").sizes)
    in_chunks(monkeypatch, least)
    found = both_ways(call, backend, *grads)
    padding = {"key_padding_mask": call.key_padding_mask, "scale": call.scale}
    inputs = call.query, call.key, call.value
    wanted = answer(*inputs, problem.pattern, grad_output=grads[0], grad_lse=grads[1], **padding)
    assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-10
    dropping = replace(call, dropout_p=0.3, seed=torch.tensor([2**40 + 7]))
    found, again = (both_ways(dropping, backend, *grads) for _ in range(2))
    assert all(map(torch.equal, found, again))
    in_chunks(monkeypatch, call.query[..., 0].numel())
    wanted = both_ways(dropping, backend, *grads)
    assert all(map(torch.equal, found[:2], wanted))
    assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-13


@pytest.mark.parametrize("backend", ["cpu", "native", "triton"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_dropout_counts_its_tokens_whichever_call_comes_first(backend, direction):
    dropped = {"dropout_p": 0.3, "seed": torch.tensor([7])}
    for first, second in (({}, dropped), (dropped, {})):
        call, *_ = problem_call(BY_NAME["window"], torch.float32)
        sizes = [memory_budget.memory(replace(call, **more), backend, direction).sizes for more in (first, second)]
        plain, dropping = sizes if first == {} else sizes[::-1]
        rows = min(plain)
        assert rows < call.plan.n and dropping[rows] - plain[rows] >= 48 * call.plan.n


def test_half_precision_sums_rows_in_float32(monkeypatch):
    problem = BY_NAME["full"]
    call, *grads = problem_call(replace(problem, n=320, heads=1, key_heads=1), torch.bfloat16)
    call = replace(call, query=call.query * 0.0)
    in_chunks(monkeypatch, 16)
    found = both_ways(call, "cpu", *grads)
    in_chunks(monkeypatch, call.query[..., 0].numel())
    wanted = both_ways(call, "cpu", *grads)
    # Weights are alike: dV is the mean of the gradients, of which bfloat16 sums of 20 shares would lose more.
    assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) < 2**-8


def available(backend):
    q, k, v = inputs()
    call = call_of(q, k, v, CallSettings(pattern="causal", scale=1.0, backend=backend))
    return [backend] if backend_named(backend).why_not(call) is None else []


def peak(run):
    """The most bytes allocated at a time, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    found = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = most = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


@pytest.mark.parametrize(
    ("backend", "dtype", "key_heads", "radius"),
    [
        ("native", torch.float32, 4, None),
        ("native", torch.bfloat16, 4, None),
        ("native", torch.bfloat16, 2, None),
        ("cpu", torch.bfloat16, 2, None),
        ("native", torch.float32, 4, 5),
        ("native", torch.bfloat16, 2, 3000),
        ("cpu", torch.bfloat16, 2, 900),
        ("reference", torch.float32, 4, None),
    ],
)
def test_the_measured_peak_stays_under_the_budget(backend, dtype, key_heads, radius):
    if backend not in available(backend):
        pytest.skip("the native kernel is not built")
    pattern = "dilated:64x1,256x4"
    tensors = inputs(dtype, key_heads, n=1000, batch=1, d=32)
    grad_output = torch.randn_like(tensors[0])
    plain = [tensor.detach() for tensor in tensors]
    bias = None if radius is None else torch.randn(4, 2 * radius + 1, requires_grad=True)
    options = {"enable_gqa": True, "backend": backend, "bias": bias}
    forward, backward = (need(tensors, pattern, backend, way, bias) for way in ("forward", "backward"))
    assert min(forward) < 300 or backend == "reference"
    for size in (max(forward), 2000, min(forward)):
        enough = forward[size], max(backward[size], min(forward.values()))
        # Plans of rows are made in the first call, and kept as all plans are.
        everything(tensors, pattern, grad_output, enough[1], backend=backend, bias=bias)
        dap.attention(*plain, pattern, memory_budget=enough[0], **options)
        assert peak(partial(dap.attention, *plain, pattern, memory_budget=enough[0], **options)) <= enough[0]
        output = dap.attention(*tensors, pattern, memory_budget=enough[1], **options)
        leaves = [*tensors, *([] if bias is None else [bias])]
        assert peak(partial(torch.autograd.grad, output, leaves, grad_output)) <= enough[1]
    if backend == "native" and dtype == torch.bfloat16 and bias is None:
        # Without one, float32 copies of everything lie side by side.
        assert peak(lambda: dap.attention(*plain, pattern, **options)) > 1.5 * min(forward.values())


class Idle:
    """A kernel that does nothing."""

    def __getitem__(self, grid):
        return lambda *given, **named: None


@pytest.mark.parametrize(
    ("dtype", "pieces", "sink"),
    [(torch.float32, False, False), (torch.bfloat16, True, False), (torch.bfloat16, False, True)],
    ids=["whole rows", "rows in pieces", "sink"],
)
def test_what_triton_allocates_stays_under_the_reckoning(dtype, pieces, sink, monkeypatch):
    launch = pytest.importorskip("dilated_attention_pytorch.kernels.triton.launches")
    schedule = import_module("dilated_attention_pytorch.kernels.triton.lowering")
    for name in vars(launch).copy():
        if name.endswith("_kernel"):
            monkeypatch.setattr(launch, name, Idle())
    if pieces:
        monkeypatch.setattr(schedule, "SHORTEST_PIECE", 512)
        monkeypatch.setattr(schedule, "PROGRAMS_PER_PROCESSOR", 16)
    reckoned = memory_budget.memory
    for name in ("dilated-odd-rates", "gqa", "hierarchical"):
        problem = BY_NAME[name]
        problem = replace(problem, e=200, batch=2) if sink else problem
        call, *grads = problem_call(problem, dtype, sink=torch.randn(problem.heads) if sink else None)
        for size in reckoned(call, "triton", "backward").sizes:
            in_chunks(monkeypatch, size)
            backend = backend_named("triton")
            found = memory_budget.forward(call, "triton", backend, 2**30)
            ways = {
                "forward": partial(memory_budget.forward, call, "triton", backend, 2**30),
                "backward": partial(memory_budget.backward, call, "triton", backend, 2**30, *found, *grads),
            }
            for direction, way in ways.items():
                # Plans and what is derived from them are kept, and are no part of it.
                way()
                most = reckoned(call, "triton", direction).sizes[size]
                assert peak(way) <= most, (name, size, direction)


def test_a_budget_too_small_says_how_much_is_enough():
    module = DilatedAttention([64, 256], [1, 4], memory_budget=4096)
    q, k, v = (torch.randn(2, 300, 4, 16) for _ in range(3))
    with pytest.raises(ValueError, match=r"memory_budget must be at least [\d,]+ bytes for the output") as told:
        module(q, k, v)
    module.memory_budget = int(str(told.value).split(" at least ")[1].split()[0].replace(",", ""))
    assert torch.equal(module(q, k, v), DilatedAttention([64, 256], [1, 4])(q, k, v))


def test_a_fraction_is_of_the_free_memory(monkeypatch):
    asked = []
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: asked.append(device) or 4 * 10**9)
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    SparseAttention("causal", memory_budget=0.5)(q, k, v)
    assert asked == [torch.device("cpu")]
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 10)
    with pytest.raises(ValueError, match="got 5"):
        SparseAttention("causal", memory_budget=0.5)(q, k, v)


def test_free_memory_is_told(monkeypatch):
    free, total = memory_budget.memory_of(torch.device("cpu"))
    assert 2**20 < free <= total
    monkeypatch.setattr(memory_budget, "_limits", lambda: iter([(10**6, 10**5)]))
    assert memory_budget.memory_of(torch.device("cpu")) == (9 * 10**5, 10**6), (
        "a container's limit, not the machine's memory"
    )


def test_one_head_too_much_is_cut_by_rows():
    query, key, value, grad_output = torch.randn(4, 1, 1, 1000, 16, dtype=torch.float64).unbind()
    tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
    sizes = [need(tensors, "window:100 & causal", "cpu", way) for way in ("forward", "backward")]
    enough = max(min(some.values()) for some in sizes)
    assert enough < min(some[1000] for some in sizes) / 2
    found = everything(tensors, "window:100 & causal", grad_output, enough, backend="cpu")
    output, _, *grads = answer(*tensors, dap.parse("window:100 & causal"), grad_output=grad_output)
    assert max(error(a, b) for a, b in zip(found, (output, *grads), strict=True)) < 1e-10


class Narrow:
    """A backend that runs out of memory above some query rows a call."""

    def __init__(self, real, most):
        self.real, self.most, self.tried = real, most, []

    def why_not(self, call):
        return None

    def limited(self, call):
        self.tried.append(call.query[..., 0].numel())
        if self.tried[-1] > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def forward(self, call):
        self.limited(call)
        return self.real.forward(call)

    def backward(self, call, *rest):
        self.limited(call)
        return self.real.backward(call, *rest)


@pytest.fixture
def narrow(monkeypatch):
    backend = Narrow(backend_named("cpu"), 200)
    monkeypatch.setattr(
        import_module("dilated_attention_pytorch.ops.attention"), "choose", lambda call, name: ("cpu", backend)
    )
    return backend


def test_out_of_memory_halves_warns_once_and_remembers(narrow):
    module = MultiheadDilatedAttention(64, 8, [16, 64], [1, 4], memory_budget=2**30)
    plain = MultiheadDilatedAttention(64, 8, [16, 64], [1, 4], backend="cpu")
    plain.load_state_dict(module.state_dict())
    x = torch.randn(1, 100, 64, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="retrying with smaller chunks"):
        output = module(x)[0]
    assert narrow.tried == [800, 400, 200, 200, 200, 200]
    narrow.tried.clear()
    gradient = torch.autograd.grad(output.sum(), x)[0]
    assert narrow.tried == [800, 400, 200, 200, 200, 200]
    narrow.tried.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = module(x)[0]
        gradient_again = torch.autograd.grad(again.sum(), x)[0]
    assert narrow.tried == [200] * 8
    narrow.most = 800
    wanted = plain(x)[0]
    assert error(output, wanted.detach()) < 1e-6 and torch.equal(output, again)
    assert error(gradient, torch.autograd.grad(wanted.sum(), x)[0]) < 1e-5 and torch.equal(gradient, gradient_again)


@pytest.mark.filterwarnings("ignore:out of memory in attention")
def test_out_of_memory_with_the_smallest_chunk_is_told(narrow):
    narrow.most = 0
    q, k, v = (torch.randn(1, 40, 4, 8) for _ in range(3))
    with pytest.raises(torch.OutOfMemoryError):
        SparseAttention("causal", memory_budget=2**30)(q, k, v)
    assert narrow.tried == [160, 80, 40]


@pytest.mark.filterwarnings("ignore:out of memory in attention")
def test_backends_save_memory_in_chunks_alone(narrow, monkeypatch):
    saved, limited = [], narrow.limited
    monkeypatch.setattr(narrow, "limited", lambda call: (saved.append(saves_memory()), limited(call)))
    q, k, v = (torch.randn(1, 40, 8, 8) for _ in range(3))
    module = SparseAttention("causal", memory_budget=2**30)
    module(q, k, v)
    assert narrow.tried == [320, 160, 160] and saved == [False, True, True]
    module(q, k, v)
    assert saved[3:] == [True, True] and not saves_memory()


def test_a_small_workspace_keeps_a_call_whole(narrow, monkeypatch):
    narrow.most = 320
    sizes = {320: 2**20, 160: 2**19}
    smaller = {rows: size // 2 for rows, size in sizes.items()}
    monkeypatch.setattr(memory_budget, "memory", lambda *_: memory_budget.Memory(smaller if saves_memory() else sizes))
    q, k, v = (torch.randn(1, 40, 8, 8) for _ in range(3))
    SparseAttention("causal", memory_budget=2**19)(q, k, v)
    assert narrow.tried == [320]


def test_without_a_budget_out_of_memory_is_not_caught(narrow):
    narrow.most = 100
    q, k, v = (torch.randn(1, 40, 4, 8) for _ in range(3))
    with pytest.raises(torch.OutOfMemoryError):
        SparseAttention("causal")(q, k, v)
    assert narrow.tried == [160]


def test_out_of_memory_goes_on_with_rows(narrow):
    narrow.most = 150
    tensors = inputs(torch.float64, 1, n=300, batch=1)
    grad_output = torch.randn_like(tensors[0])
    runs = [128, 128, 44]
    with pytest.warns(RuntimeWarning, match="retrying with smaller chunks") as told:
        found = everything(tensors, "window:40 & causal", grad_output, 2**30)
    assert len(told) == 1
    assert narrow.tried == 2 * [1200, 300, 256, *4 * runs]
    narrow.tried.clear()
    again = everything(tensors, "window:40 & causal", grad_output, 2**30)
    assert narrow.tried == 2 * [*4 * runs] and all(map(torch.equal, found, again))
    output, _, *grads = answer(*tensors, dap.parse("window:40 & causal"), grad_output=grad_output)
    assert max(error(a, b) for a, b in zip(found, (output, *grads), strict=True)) < 1e-10
    narrow.most = 100
    with pytest.raises(torch.OutOfMemoryError):
        everything(tensors, "window:40 & causal", grad_output, 2**30)


def test_a_prompt_stays_within_the_budget_too(monkeypatch):
    module = MultiheadDilatedAttention(32, 4, [16, 64], [1, 4]).eval()
    x = torch.randn(1, 90, 32)
    asked = []
    real = memory_budget.forward
    monkeypatch.setattr(memory_budget, "forward", lambda *given: asked.append(given[-1]) or real(*given))
    with torch.no_grad():
        wanted = module(x, is_causal=True)[0]
        module.memory_budget = 2**30
        found = module(x, is_causal=True, cache=module.cache())[0]
    assert asked == [2**30] and torch.equal(found, wanted)


def test_packed_sequences_and_the_oracle(monkeypatch):
    tensors = inputs(torch.float64, 2, n=200, batch=1)
    grad_output = torch.randn_like(tensors[0])
    bounds = torch.tensor([0, 90, 200])
    pattern = "dilated:64x1,256x4"
    packed = dap.Packed(dap.parse(pattern), (90, 110))
    output, _, *grads = answer(*tensors, packed, grad_output=grad_output, scale=0.3)
    for size in (400, 200, 128):
        in_chunks(monkeypatch, size)
        found = everything(tensors, pattern, grad_output, 2**30, cu_seqlens=bounds, scale=0.3, backend="cpu")
        assert max(error(a, b) for a, b in zip(found, (output, *grads), strict=True)) < 1e-10


@pytest.mark.untyped
@pytest.mark.parametrize("value", [0, -5, 1, 100, 1.5, float("nan"), float("inf"), True, "1GB"])
def test_what_is_no_budget_raises(value):
    with pytest.raises((ValueError, TypeError), match="memory_budget must be"):
        SparseAttention("causal", memory_budget=value)
    with pytest.raises((ValueError, TypeError), match="memory_budget must be"):
        dap.attention(*torch.randn(3, 1, 1, 4, 4).unbind(), "causal", memory_budget=value)
