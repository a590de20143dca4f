"""Dilated attention through dense kernels on a GPU: no worse than twice torch's own error, whatever runs beside it."""

import pytest
import torch
from cases import Problem
from oracle import answer, error
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch.kernels import cudnn
from dilated_attention_pytorch.kernels.registry import AttentionCall
from dilated_attention_pytorch.plan import make_plan

pytestmark = pytest.mark.gpu

LADDER = "dilated:128x1,256x2,512x4"


def problem(name, text, n, heads=8, key_heads=None, d=64, batch=1):
    return Problem(
        name=name, text=text, n=n, heads=heads, key_heads=key_heads or heads, d=d, e=d, batch=batch, block_size=128
    )


PROBLEMS = [
    problem("causal-d128", "causal", 500, d=128, batch=2),
    problem("ladder-d64", LADDER, 1024),
    problem("ladder-causal-d128", f"{LADDER} & causal", 1024, d=128),
    problem("ragged-d40", f"{LADDER} & causal", 900, d=40),
    problem("odd-rates-d64", "dilated:128x1,250x3,500x6", 1000, heads=7),
    problem("short-segments-d64", "dilated:16x1,64x8,96x32", 300),
    problem("empty-rows-d128", "dilated:256x16", 512, d=128),
    problem("block-offset-d64", f"{LADDER};offset=block", 700),
    problem("split-heads-d64", f"{LADDER};heads=split", 700),
    problem("gqa-d64", f"{LADDER} & causal", 900, key_heads=2),
    problem("batch-d64", f"{LADDER} & causal", 1024, batch=3),
]


def call_of(problem, dtype, tokens_first=False):
    query, key, value, grad_output, grad_lse = problem.inputs(dtype, device="cuda")
    if tokens_first:
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    plan = make_plan(problem.pattern, problem.n, problem.heads, problem.block_size, "cuda")
    call = AttentionCall(query, key, value, plan, problem.d**-0.5)
    assert cudnn.why_not(call) is None
    return call, grad_output, grad_lse.float()


def run(call, grad_output, grad_lse=None):
    output, lse = cudnn.forward(call)
    return output, lse, *cudnn.backward(call, output, lse, grad_output, grad_lse)


def torch_errors(call, grad_output, wanted):
    """Errors of torch's own attention in the same dtype, on the dense form of the problem."""
    inputs = [t.detach().requires_grad_() for t in (call.query, call.key, call.value)]
    counts = call.plan.to_dense()[None]
    seen = (counts > 0).any(-1, keepdim=True)
    bias = torch.where(seen, counts.float().log(), 0.0).to(call.query.dtype)
    output = scaled_dot_product_attention(*inputs, attn_mask=bias, scale=call.scale, enable_gqa=True)
    output = torch.where(seen, output, 0.0)
    gradients = torch.autograd.grad(output, inputs, grad_output)
    return [error(a, b) for a, b in zip((output, *gradients), (wanted.output, *wanted[2:]), strict=True)]


def assert_close(call, grad_output, problem, results):
    wanted = answer(call.query, call.key, call.value, problem.pattern, grad_output=grad_output)
    output, lse, *gradients = results
    assert error(lse, wanted.lse) <= 1e-5
    bounds = torch_errors(call, grad_output, wanted)
    names = ("output", "query", "key", "value")
    for name, got, want, bound in zip(names, (output, *gradients), (wanted.output, *wanted[2:]), bounds, strict=True):
        assert error(got, want) <= max(2 * bound, torch.finfo(call.query.dtype).eps / 2), name


@pytest.mark.parametrize("tokens_first", [False, True], ids=["heads-outside", "tokens-outside"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_half_precision_is_no_worse_than_twice_torch(problem, tokens_first):
    call, grad_output, _ = call_of(problem, torch.bfloat16, tokens_first)
    assert_close(call, grad_output, problem, run(call, grad_output))


def test_float16():
    call, grad_output, _ = call_of(PROBLEMS[2], torch.float16)
    assert_close(call, grad_output, PROBLEMS[2], run(call, grad_output))


@pytest.mark.parametrize("problem", PROBLEMS[1:6], ids=lambda problem: problem.name)
def test_flash_kernels_where_there_is_no_cudnn(problem, monkeypatch):
    monkeypatch.setattr(cudnn, "engine", lambda device: "flash")
    call, grad_output, _ = call_of(problem, torch.bfloat16)
    assert_close(call, grad_output, problem, run(call, grad_output))


def test_plain_attention_on_the_same_views_does_not_disturb():
    """Torch keeps compiled graphs by the strides of the inputs alone."""
    problem = PROBLEMS[2]
    call, grad_output, _ = call_of(problem, torch.bfloat16)
    for piece in cudnn.layout_of(call).pieces:
        views = piece.view(call.query), piece.view(call.key, keys=True), piece.view(call.value, keys=True)
        inputs = [view.detach().requires_grad_() for view in views]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(*inputs, is_causal=piece.causal).sum().backward()
    assert_close(call, grad_output, problem, run(call, grad_output))


def test_the_gradient_of_the_lse():
    problem = PROBLEMS[1]
    call, grad_output, grad_lse = call_of(problem, torch.bfloat16)
    got = run(call, grad_output, grad_lse)
    wanted = answer(call.query, call.key, call.value, problem.pattern, grad_output=grad_output, grad_lse=grad_lse)
    for name, a, b in zip(wanted._fields, got, wanted, strict=True):
        assert error(a, b) <= 2e-2, name


def test_forward_and_backward_replay_in_a_cuda_graph():
    call, grad_output, _ = call_of(PROBLEMS[1], torch.bfloat16)
    expected = run(call, grad_output)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call, grad_output)
    call.query.copy_(torch.randn_like(call.query))
    graph.replay()
    replayed = [t.clone() for t in captured]
    for a, b in zip(replayed, run(call, grad_output), strict=True):
        assert error(a, b.double()) <= 1e-2
    assert not torch.equal(replayed[0], expected[0])
