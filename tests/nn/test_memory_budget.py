"""A memory budget: what it bounds is measured, and nothing of it shows in the results."""

from __future__ import annotations

import warnings
from functools import partial
from importlib import import_module

import pytest
import torch
from oracle import answer, error
from torch.profiler import ProfilerActivity, profile

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.kernels.registry import backend_named
from dilated_attention_pytorch.nn import DilatedAttention, MultiheadDilatedAttention, SparseAttention
from dilated_attention_pytorch.ops import budget
from dilated_attention_pytorch.ops.attention import call_of

PATTERNS = ("dilated:64x1,256x4", "window:40 & causal", "heads{window:30 / causal / dilated:64x2 / global:9}")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    budget.forget()


def inputs(dtype=torch.float32, key_heads=4, n=300, batch=2, d=16):
    return [
        torch.randn(batch, n, heads, d, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (4, key_heads, key_heads)
    ]


def need(tensors, pattern, backend, direction):
    return budget.memory(call_of(*tensors, None, None, None, pattern, False, 0.25, 0.0, backend)[0], backend, direction)


def everything(tensors, pattern, grad_output, memory_budget, **options):
    """Output and gradients; dropout, where there is any, from one seed."""
    torch.manual_seed(3)
    output = dap.attention(*tensors, pattern, enable_gqa=True, memory_budget=memory_budget, **options)
    return output, *torch.autograd.grad(output, tensors, grad_output)


@pytest.mark.parametrize("backend", ["native", "cpu", "reference"])
@pytest.mark.parametrize(("key_heads", "pattern"), [(4, PATTERNS[0]), (2, PATTERNS[1]), (2, PATTERNS[2])])
def test_results_have_the_same_bits_whatever_the_chunks(backend, key_heads, pattern):
    if backend not in available(backend):
        pytest.skip("the native kernel is not built")
    tensors = inputs(torch.float64, key_heads)
    grad_output = torch.randn_like(tensors[0])
    padding = torch.arange(300) >= torch.tensor([300, 211])[:, None]
    options = {"key_padding_mask": padding, "dropout_p": 0.1, "backend": backend}
    whole = everything(tensors, pattern, grad_output, None, **options)
    least = max(need(tensors, pattern, backend, way).of(1) for way in budget.WORDS)
    for enough in (least, least + (need(tensors, pattern, backend, "backward").of(2) - least) * 2):
        found = everything(tensors, pattern, grad_output, enough, **options)
        # Plain torch gathers as many tiles a step as a sample leaves room for, and so merges them in other groups.
        same = torch.equal if backend != "cpu" else lambda a, b: error(a, b) < 1e-13
        assert all(same(a, b.detach()) for a, b in zip(found, whole, strict=True))


def available(backend):
    q, k, v = inputs()
    call, _ = call_of(q, k, v, None, None, None, "causal", False, 1.0, 0.0, backend)
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
    ("backend", "dtype", "key_heads"),
    [
        ("native", torch.float32, 4),
        ("native", torch.bfloat16, 4),
        ("native", torch.bfloat16, 2),
        ("cpu", torch.float32, 2),
        ("cpu", torch.bfloat16, 4),
    ],
)
def test_the_measured_peak_stays_under_the_budget(backend, dtype, key_heads):
    if backend not in available(backend):
        pytest.skip("the native kernel is not built")
    pattern = "dilated:64x1,256x4"
    tensors = inputs(dtype, key_heads, n=1000, d=32)
    grad_output = torch.randn_like(tensors[0])
    plain = [tensor.detach() for tensor in tensors]
    options = {"enable_gqa": True, "backend": backend}
    forward, backward = (need(tensors, pattern, backend, way) for way in ("forward", "backward"))
    for size in (1, 2, forward.units):
        enough = forward.of(size), max(backward.of(size), forward.of(1))
        assert peak(partial(dap.attention, *plain, pattern, memory_budget=enough[0], **options)) <= enough[0]
        output = dap.attention(*tensors, pattern, memory_budget=enough[1], **options)
        assert peak(partial(torch.autograd.grad, output, tensors, grad_output)) <= enough[1]
    if backend == "native" and dtype == torch.bfloat16:
        # Without one, float32 copies of everything lie side by side.
        assert peak(lambda: dap.attention(*plain, pattern, **options)) > 1.5 * forward.of(1)


def test_a_budget_too_small_says_how_much_is_enough():
    module = DilatedAttention([64, 256], [1, 4], memory_budget=4096)
    q, k, v = (torch.randn(2, 300, 4, 16) for _ in range(3))
    with pytest.raises(ValueError, match=r"memory_budget must be at least [\d,]+ bytes for the output") as told:
        module(q, k, v)
    module.memory_budget = int(str(told.value).split(" at least ")[1].split()[0].replace(",", ""))
    assert torch.equal(module(q, k, v), DilatedAttention([64, 256], [1, 4])(q, k, v))


def test_a_fraction_is_of_the_free_memory(monkeypatch):
    asked = []
    monkeypatch.setattr(budget, "free_bytes", lambda device: asked.append(device) or 4 * 10**9)
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    SparseAttention("causal", memory_budget=0.5)(q, k, v)
    assert asked == [torch.device("cpu")]
    monkeypatch.setattr(budget, "free_bytes", lambda device: 10)
    with pytest.raises(ValueError, match="got 5"):
        SparseAttention("causal", memory_budget=0.5)(q, k, v)


def test_free_memory_is_told():
    assert budget.free_bytes(torch.device("cpu")) > 2**20


class Narrow:
    """A backend that runs out of memory above some heads a call."""

    def __init__(self, real, most):
        self.real, self.most, self.tried = real, most, []

    def why_not(self, call):
        return None

    def limited(self, call):
        self.tried.append(call.key.shape[0] * call.key.shape[1])
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
    backend = Narrow(backend_named("cpu"), 2)
    monkeypatch.setattr(
        import_module("dilated_attention_pytorch.ops.attention"), "choose", lambda call, name: ("cpu", backend)
    )
    return backend


def test_out_of_memory_halves_warns_once_and_remembers(narrow):
    module = MultiheadDilatedAttention(64, 8, [16, 64], [1, 4], memory_budget=2**30)
    plain = MultiheadDilatedAttention(64, 8, [16, 64], [1, 4], backend="cpu")
    plain.load_state_dict(module.state_dict())
    x = torch.randn(1, 100, 64, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="going on with smaller chunks"):
        output = module(x)[0]
    assert narrow.tried == [8, 4, 2, 2, 2, 2]
    narrow.tried.clear()
    gradient = torch.autograd.grad(output.sum(), x)[0]
    assert narrow.tried == [8, 4, 2, 2, 2, 2]
    narrow.tried.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = module(x)[0]
        gradient_again = torch.autograd.grad(again.sum(), x)[0]
    assert narrow.tried == [2] * 8
    narrow.most = 8
    wanted = plain(x)[0]
    assert error(output, wanted.detach()) < 1e-6 and torch.equal(output, again)
    assert error(gradient, torch.autograd.grad(wanted.sum(), x)[0]) < 1e-5 and torch.equal(gradient, gradient_again)


@pytest.mark.filterwarnings("ignore:out of memory in attention")
def test_out_of_memory_with_the_smallest_chunk_is_told(narrow):
    narrow.most = 0
    q, k, v = (torch.randn(1, 40, 4, 8) for _ in range(3))
    with pytest.raises(torch.OutOfMemoryError):
        SparseAttention("causal", memory_budget=2**30)(q, k, v)
    assert narrow.tried == [4, 2, 1]


def test_without_a_budget_out_of_memory_is_not_caught(narrow):
    q, k, v = (torch.randn(1, 40, 4, 8) for _ in range(3))
    with pytest.raises(torch.OutOfMemoryError):
        SparseAttention("causal")(q, k, v)
    assert narrow.tried == [4]


def test_a_prompt_stays_within_the_budget_too(monkeypatch):
    module = MultiheadDilatedAttention(32, 4, [16, 64], [1, 4]).eval()
    x = torch.randn(1, 90, 32)
    asked = []
    real = budget.forward
    monkeypatch.setattr(budget, "forward", lambda *given: asked.append(given[-1]) or real(*given))
    with torch.no_grad():
        wanted = module(x, is_causal=True)[0]
        module.memory_budget = 2**30
        found = module(x, is_causal=True, cache=module.cache())[0]
    assert asked == [2**30] and torch.equal(found, wanted)


def test_packed_sequences_and_the_oracle():
    tensors = inputs(torch.float64, 2, n=200, batch=1)
    grad_output = torch.randn_like(tensors[0])
    bounds = torch.tensor([0, 90, 200])
    pattern = "dilated:64x1,256x4"
    enough = max(need(tensors, pattern, "cpu", way).of(1) for way in ("forward", "backward"))
    found = everything(tensors, pattern, grad_output, enough, cu_seqlens=bounds, scale=0.3, backend="cpu")
    packed = dap.Packed(dap.parse(pattern), (90, 110))
    output, _, *grads = answer(*tensors, packed, grad_output=grad_output, scale=0.3)
    assert max(error(a, b) for a, b in zip(found, (output, *grads), strict=True)) < 1e-10


@pytest.mark.untyped
@pytest.mark.parametrize("value", [0, -5, 1, 100, 1.5, float("nan"), float("inf"), True, "1GB"])
def test_what_is_no_budget_raises(value):
    with pytest.raises((ValueError, TypeError), match="memory_budget must be"):
        SparseAttention("causal", memory_budget=value)
    with pytest.raises((ValueError, TypeError), match="memory_budget must be"):
        dap.attention(*torch.randn(3, 1, 1, 4, 4).unbind(), "causal", memory_budget=value)
