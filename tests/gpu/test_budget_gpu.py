"""A memory budget on a GPU: what it bounds is measured, and memory that really runs out is got along with."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from oracle import error

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.kernels.registry import choose
from dilated_attention_pytorch.kernels.triton import backend as triton_backend
from dilated_attention_pytorch.ops import memory_budget
from dilated_attention_pytorch.ops.attention import CallSettings, call_of

pytestmark = pytest.mark.gpu

LADDER = "dilated:2048x1,4096x2,8192x4,16384x8"
WINDOW = "window:1024 & causal"
LONG = "global:300;queries=1 | window:200"


@pytest.fixture(autouse=True)
def as_before():
    yield
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
    memory_budget.clear_chunk_sizes()


def inputs(n, heads, key_heads, dtype):
    """Query, key and value that want gradients, and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(5)
    shapes = ((1, count, n, 64) for count in (heads, key_heads, key_heads, heads))
    *tensors, grad_output = (torch.randn(s, generator=generator, device="cuda", dtype=dtype) for s in shapes)
    return [tensor.requires_grad_() for tensor in tensors], grad_output


def reckoned(tensors, pattern, backend):
    """Bytes by size of chunk, forward and backward."""
    call = call_of(*tensors, CallSettings(pattern=pattern, scale=0.125, backend=backend))
    name, _ = choose(call, backend)
    return [memory_budget.memory(call, name, direction).sizes for direction in memory_budget.WORDS]


def both_ways(tensors, pattern, grad_output, **options):
    output = dap.attention(*tensors, pattern, enable_gqa=True, **options)
    return output.detach(), *torch.autograd.grad(output, tensors, grad_output)


def peak(run):
    """The most bytes allocated at a time, above what was there before, and what the run gave."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, found


@pytest.mark.parametrize("n", [16384, 65536])
@pytest.mark.parametrize("pattern", [LADDER, WINDOW, LONG])
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_the_measured_peak_stays_under_the_budget(backend, pattern, n):
    tensors, grad_output = inputs(n, 4, 2, torch.bfloat16)
    plain = [tensor.detach() for tensor in tensors]
    wanted = both_ways(tensors, pattern, grad_output, backend=backend)
    forward, backward = reckoned(tensors, pattern, backend)
    options = {"enable_gqa": True, "backend": backend}
    rows = [size for size in forward if size >= n // 8]
    for size in {max(forward), 2 * n, min(rows)}:
        enough = forward[size], max(backward[size], min(forward.values()))
        # Plans of chunks are made in the first call, and kept as all plans are.
        found = both_ways(tensors, pattern, grad_output, backend=backend, memory_budget=enough[1])
        limits = (1e-2, *(2e-2,) * 3)
        assert all(error(a, b) < limit for a, b, limit in zip(found, wanted, limits, strict=True))
        del found
        run = partial(dap.attention, *plain, pattern, memory_budget=enough[0], **options)
        assert error(run(), wanted[0]) < 1e-2
        assert peak(run)[0] <= enough[0]
        output = dap.attention(*tensors, pattern, memory_budget=enough[1], **options)
        assert peak(partial(torch.autograd.grad, output, tensors, grad_output))[0] <= enough[1]


@pytest.mark.parametrize("pattern", [LADDER, WINDOW, LONG])
def test_the_reckoning_is_not_far_above(pattern):
    tensors, grad_output = inputs(65536, 4, 2, torch.bfloat16)
    for backend in ("triton", "auto"):
        forward, backward = reckoned(tensors, pattern, backend)
        both_ways(tensors, pattern, grad_output, backend=backend)
        output = dap.attention(*tensors, pattern, enable_gqa=True, backend=backend)
        taken, _ = peak(partial(torch.autograd.grad, output, tensors, grad_output))
        assert backward[max(backward)] < 2 * taken + 32 * 2**20
        plain = [tensor.detach() for tensor in tensors]
        taken, _ = peak(partial(dap.attention, *plain, pattern, enable_gqa=True, backend=backend))
        assert forward[max(forward)] < 2 * taken + 32 * 2**20


def leave(extra):
    """Let this process have only so many bytes more."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra) / total)


def between(run, whole, unit):
    """Bytes that one head at a time does with and all at once do not."""
    run(whole), run(unit)
    return sum(peak(partial(run, enough))[0] for enough in (whole, unit)) // 2


@pytest.mark.parametrize(("backend", "dtype"), [("triton", torch.bfloat16), ("auto", torch.float32)])
def test_memory_that_runs_out_is_got_along_with(backend, dtype, monkeypatch):
    """In float32 the default backend is the one with something to save, too."""
    n, heads = 65536, 8
    tensors, grad_output = inputs(n, heads, heads, dtype)
    wanted = [found.cpu() for found in both_ways(tensors, LADDER, grad_output, backend=backend)]
    attend = partial(dap.attention, *tensors, LADDER, backend=backend)
    forward, backward = reckoned(tensors, LADDER, backend)

    def gradients_within(enough):
        output = attend(memory_budget=enough)
        torch.cuda.reset_peak_memory_stats()
        return torch.autograd.grad(output, tensors, grad_output)

    output_bytes = heads * n * (64 * dtype.itemsize + 4)
    enough_forward = between(lambda enough: attend(memory_budget=enough), forward[heads * n], forward[n])
    # What the output takes was there before.
    enough_backward = between(gradients_within, backward[heads * n], backward[n]) - output_bytes
    tried = []

    def counted(real, call, *rest):
        tried.append(call.query[..., 0].numel())
        return real(call, *rest)

    for name in ("forward", "backward"):
        monkeypatch.setattr(triton_backend, name, partial(counted, getattr(triton_backend, name)))

    leave(enough_forward)
    with pytest.warns(RuntimeWarning, match="retrying with smaller chunks") as told:
        output = attend(memory_budget=2**45)
    assert len(told) == 1 and tried[0] == heads * n > tried[-1]
    forward_sizes = tried[tried.index(tried[-1]) :]
    tried.clear()

    leave(enough_backward)
    with warnings.catch_warnings():
        # One warning a call, not one a direction.
        warnings.simplefilter("error")
        gradients = torch.autograd.grad(output, tensors, grad_output)
    assert tried[0] == heads * n > tried[-1]
    backward_sizes = tried[tried.index(tried[-1]) :]
    found = [output.detach().cpu(), *(gradient.cpu() for gradient in gradients)]
    limits = (1e-2, *(2e-2,) * 3)
    assert all(error(a, b) < limit for a, b, limit in zip(found, wanted, limits, strict=True))
    del output, gradients
    tried.clear()

    torch.cuda.set_per_process_memory_fraction(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = both_ways(tensors, LADDER, grad_output, backend=backend, memory_budget=2**45)
    assert tried == forward_sizes + backward_sizes
    assert all(torch.equal(a.cpu(), b) for a, b in zip(again, found, strict=True))


def test_one_head_goes_on_with_rows(monkeypatch):
    """What halving of heads cannot save, runs of rows do: float32 sums of the parts of a ladder."""
    n = 262144
    tensors, _ = inputs(n, 1, 1, torch.bfloat16)
    plain = [tensor.detach() for tensor in tensors]
    attend = partial(dap.attention, *plain, LADDER, backend="triton")
    wanted = attend().cpu()
    taken, _ = peak(attend)
    tried, real = [], triton_backend.forward

    def counted(call):
        tried.append(call.query.shape[2])
        return real(call)

    monkeypatch.setattr(triton_backend, "forward", counted)
    results = n * (64 * 2 + 4)
    leave((taken + results) // 2)
    with pytest.warns(RuntimeWarning, match="retrying with smaller chunks"):
        output = attend(memory_budget=2**45)
    assert tried[0] == n > tried[-1] and error(output.cpu(), wanted) < 1e-2
