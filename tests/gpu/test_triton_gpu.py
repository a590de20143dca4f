"""The Triton kernels on a GPU: no worse than twice torch's own error, every gradient, the same bits every time."""

from dataclasses import replace

import pytest
import torch
from cases import PROBLEMS, Problem
from oracle import answer, bias_of_pairs, error, table_gradient
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.cpu import tiles as cpu
from dilated_attention_pytorch.kernels.dropout import keep_mask
from dilated_attention_pytorch.kernels.triton import backend as triton_backend
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan

pytestmark = pytest.mark.gpu

WIDE = [
    Problem(name="window-d64", text="window:200 & causal", n=1000, heads=4, key_heads=2, d=64, e=64, block_size=128),
    Problem(name="window-d128", text="window:300", n=1024, heads=2, key_heads=2, d=128, e=128, block_size=128),
    Problem(
        name="random-d128", text="random:0.3;block=128", n=2048, heads=4, key_heads=1, d=128, e=128, block_size=128
    ),
    Problem(name="global-d64", text="window:50 | global:70", n=1500, heads=2, key_heads=2, d=64, e=64, block_size=64),
    Problem(
        name="dilated-d64", text="dilated:256x1,512x2,1024x4", n=2048, heads=4, key_heads=4, d=64, e=64, block_size=64
    ),
    Problem(
        name="dilated-gqa-d128",
        text="dilated:256x1,600x3 & causal",
        n=1300,
        heads=6,
        key_heads=2,
        d=128,
        e=128,
        block_size=64,
    ),
    Problem(name="strided-bits-d96", text="strided:7", n=700, d=96, e=96, block_size=128),
    Problem(name="causal-d256", text="causal", n=600, d=256, e=256, block_size=128),
    Problem(name="causal-d32-block256", text="causal", n=900, d=32, e=32, block_size=256),
    Problem(name="causal-d80-e48", text="causal", n=500, d=80, e=48, block_size=128),
]


def call_of(problem, dtype, **changes):
    query, key, value, grad_output, grad_lse = problem.inputs(dtype, device="cuda")
    plan = make_plan(problem.pattern, problem.n, problem.heads, problem.block_size, "cuda")
    padding = problem.key_padding_mask("cuda")
    call = AttentionCall(query, key, value, plan, problem.d**-0.5, padding, **changes)
    assert triton_backend.why_not(call) is None
    return call, grad_output, grad_lse.float()


def run(call, grad_output, grad_lse):
    output, lse = triton_backend.forward(call)
    return output, lse, *triton_backend.backward(call, output, lse, grad_output, grad_lse)


def torch_errors(call, grad_output, wanted):
    """Errors of torch's own attention in the same dtype, on the dense form of the problem."""
    inputs = [t.detach().requires_grad_() for t in (call.query, call.key, call.value)]
    counts = call.plan.to_dense()[None]
    if call.key_padding_mask is not None:
        counts = counts * ~call.key_padding_mask[:, None, None, :]
    seen = (counts > 0).any(-1, keepdim=True)
    bias = torch.where(seen, counts.float().log(), 0.0).to(call.query.dtype)
    output = scaled_dot_product_attention(*inputs, attn_mask=bias, scale=call.scale, enable_gqa=True)
    output = torch.where(seen, output, 0.0)
    gradients = torch.autograd.grad(output, inputs, grad_output)
    return [error(a, b) for a, b in zip((output, *gradients), (wanted.output, *wanted[2:]), strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("problem", PROBLEMS + WIDE, ids=lambda problem: problem.name)
def test_half_precision_is_no_worse_than_twice_torch(problem, dtype):
    call, grad_output, _ = call_of(problem, dtype)
    padding = None if call.key_padding_mask is None else call.key_padding_mask.cpu()
    wanted = answer(
        call.query, call.key, call.value, problem.pattern, grad_output=grad_output, key_padding_mask=padding
    )
    output, lse, *gradients = run(call, grad_output, None)
    assert error(lse, wanted.lse) <= 1e-5
    bounds = torch_errors(call, grad_output, wanted)
    named = zip(
        ("output", "query", "key", "value"), (output, *gradients), (wanted.output, *wanted[2:]), bounds, strict=True
    )
    for name, got, want, bound in named:
        assert error(got, want) <= max(2 * bound, torch.finfo(dtype).eps / 2), name


@pytest.mark.parametrize("problem", PROBLEMS + WIDE[:6], ids=lambda problem: problem.name)
def test_single_precision_matches_the_oracle(problem):
    call, grad_output, grad_lse = call_of(problem, torch.float32)
    wanted = answer(
        call.query, call.key, call.value, problem.pattern, grad_output=grad_output, grad_lse=grad_lse,
        key_padding_mask=None if call.key_padding_mask is None else call.key_padding_mask.cpu(),
    )  # fmt: skip
    for name, got, want in zip(wanted._fields, run(call, grad_output, grad_lse), wanted, strict=True):
        assert error(got, want) <= 5e-6, name


@pytest.mark.parametrize("elsewhere", [False, True], ids=["own-rows", "rows-elsewhere"])
@pytest.mark.parametrize("problem", [WIDE[0], WIDE[5]], ids=lambda problem: problem.name)
def test_dropout_drops_the_weights_its_definition_names(problem, elsewhere):
    seed = torch.tensor([2**45 + 99], device="cuda")
    rows = (
        torch.randint(2**33, (2, problem.heads, problem.n)) if elsewhere else torch.arange(problem.n).expand(2, 1, -1)
    )
    positions = rows.cuda() if elsewhere else None
    call, grad_output, grad_lse = call_of(problem, torch.float32, dropout_p=0.2, seed=seed, positions=positions)
    batch_head = torch.arange(problem.batch * problem.heads).view(problem.batch, -1, 1, 1)
    mask = keep_mask(seed.cpu(), batch_head, rows[0, :, :, None], rows[1, :, None, :], 0.2)
    wanted = answer(
        call.query, call.key, call.value, problem.pattern, grad_output=grad_output, grad_lse=grad_lse,
        kept=mask, dropout_p=0.2,
    )  # fmt: skip
    for name, got, want in zip(wanted._fields, run(call, grad_output, grad_lse), wanted, strict=True):
        assert error(got, want) <= 5e-6, name


@pytest.mark.parametrize("problem", [WIDE[0], WIDE[5]], ids=lambda problem: problem.name)
@pytest.mark.parametrize(("which", "token"), [("value", 410), ("key", 410), ("query", 333)])
def test_a_nan_stays_where_it_belongs(problem, which, token):
    call, grad_output, grad_lse = call_of(problem, torch.bfloat16)
    getattr(call, which)[:, :, token, :8] = float("nan")
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        found = run(call, grad_output, grad_lse)
    plan = make_plan(problem.pattern, problem.n, problem.heads, problem.block_size)
    exact = AttentionCall(*(t.double().cpu() for t in (call.query, call.key, call.value)), plan, call.scale)
    output, lse = cpu.forward(exact)
    wanted = output, lse, *cpu.backward(exact, output, lse, grad_output.double().cpu(), grad_lse.double().cpu())
    assert output.isnan().any()
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got.cpu().isnan(), want.isnan())
        assert error(got, want) <= 2e-2


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_any_scale_works(scale, dtype):
    call, grad_output, grad_lse = call_of(WIDE[0], dtype)
    call = replace(call, scale=scale)
    wanted = answer(
        call.query, call.key, call.value, WIDE[0].pattern, scale=scale, grad_output=grad_output, grad_lse=grad_lse
    )
    for name, got, want in zip(wanted._fields, run(call, grad_output, grad_lse), wanted, strict=True):
        assert error(got, want) <= (5e-6 if dtype is torch.float32 else 2e-2), name


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("problem", WIDE, ids=lambda problem: problem.name)
def test_capped_gradients_match_oracle(problem, dtype, softcap):
    call, grad_output, grad_lse = call_of(problem, dtype, softcap=softcap)
    wanted = answer(
        call.query, call.key, call.value, problem.pattern, grad_output=grad_output, grad_lse=grad_lse, softcap=softcap
    )
    for name, got, want in zip(wanted._fields, run(call, grad_output, grad_lse), wanted, strict=True):
        assert error(got, want) <= (5e-6 if dtype is torch.float32 else 2e-2), name


@pytest.mark.parametrize("widths", [(257,), (9, 31)], ids=["one-axis", "two-axes"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("problem", WIDE, ids=lambda problem: problem.name)
def test_bias_gradients_match_oracle(problem, dtype, widths):
    table = torch.randn(problem.heads, *widths)
    places = torch.randint(0, 40, (problem.batch, problem.n, 2)) if len(widths) > 1 else None
    changes = {"bias": table.cuda(), "bias_positions": None if places is None else places.cuda()}
    call, grad_output, grad_lse = call_of(problem, dtype, **changes)
    rows, given = (call.query, call.key, call.value), {"grad_output": grad_output, "grad_lse": grad_lse}
    wanted_bias = table_gradient(*rows, problem.pattern, table, places, **given)
    wanted = answer(*rows, problem.pattern, bias=bias_of_pairs(table.double(), problem.n, places), **given)
    found = run(call, grad_output, grad_lse)
    tables = [triton_backend.backward(call, *found[:2], grad_output, grad_lse).bias for _ in range(3)]
    assert all(torch.equal(tables[0], other) for other in tables[1:]), "sums must not depend on the order of programs"
    tolerance = 5e-6 if dtype is torch.float32 else 2e-2
    assert error(tables[0], wanted_bias) <= tolerance
    for name, got, want in zip(wanted._fields, found, wanted, strict=True):
        assert error(got, want) <= tolerance, name


def test_caps_in_turn_give_their_own_results():
    call, grad_output, grad_lse = call_of(WIDE[0], torch.float32)
    first = {}
    for softcap in (0.5, 2.0, 0.0) * 2:
        found = run(replace(call, softcap=softcap), grad_output, grad_lse)
        for a, b in zip(first.setdefault(softcap, found), found, strict=True):
            assert torch.equal(a, b)
    assert all(error(first[0.5][0], first[other][0]) > 1e-3 for other in (2.0, 0.0))


@pytest.mark.parametrize("problem", WIDE, ids=lambda problem: problem.name)
def test_the_same_call_gives_the_same_bits(problem):
    call, grad_output, grad_lse = call_of(problem, torch.bfloat16)
    first = run(call, grad_output, grad_lse)
    for _ in range(3):
        for a, b in zip(first, run(call, grad_output, grad_lse), strict=True):
            assert torch.equal(a, b)


def test_views_with_tokens_first_are_read_and_written_in_place():
    problem = WIDE[0]
    call, grad_output, grad_lse = call_of(problem, torch.bfloat16)
    fused = torch.cat([t.transpose(1, 2) for t in (call.query, call.key, call.value)], dim=2)
    query, key, value = (t.transpose(1, 2) for t in fused.split([4, 2, 2], dim=2))
    viewed = AttentionCall(query, key, value, call.plan, call.scale)
    got = run(viewed, grad_output, grad_lse)
    assert got[0].transpose(1, 2).is_contiguous()
    for a, b in zip(got, run(call, grad_output, grad_lse), strict=True):
        assert torch.equal(a, b)


def test_long_rows_shared_by_several_programs_match_the_oracle():
    problem = Problem(
        name="one-long-row",
        text="window:1 | global:1;queries=1",
        n=8192,
        heads=1,
        key_heads=1,
        d=64,
        e=64,
        block_size=64,
    )
    call, grad_output, grad_lse = call_of(problem, torch.float32)
    wanted = answer(call.query, call.key, call.value, problem.pattern, grad_output=grad_output, grad_lse=grad_lse)
    for name, got, want in zip(wanted._fields, run(call, grad_output, grad_lse), wanted, strict=True):
        assert error(got, want) <= 1e-5, name


def test_addresses_beyond_two_to_the_31():
    n, heads, d = 2**20 + 64, 17, 128
    plan = make_plan(parse("window:100 & causal"), n, heads, 128, "cuda")
    query, key, value, grad = (torch.randn(1, heads, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    call = AttentionCall(query, key, value, plan, d**-0.5)
    output, lse, *gradients = run(call, grad, None)
    tail = slice(n - 400, n)
    short = make_plan(parse("window:100 & causal"), 400, 1, 128, "cuda")
    last = [t[:, -1:, tail] for t in (query, key, value, grad)]
    near = AttentionCall(*last[:3], short, d**-0.5)
    wanted = run(near, last[3], None)
    # Rows and columns more than a window from the cut see the same keys and queries in both.
    for got, want in zip((output, lse, *gradients), wanted, strict=True):
        assert error(got[:, -1:, tail][:, :, 200:300], want[:, :, 200:300]) <= 1e-2
    assert all(bool(t.isfinite().all()) for t in (output, lse, *gradients))


def test_forward_and_backward_replay_in_a_cuda_graph():
    call, grad_output, grad_lse = call_of(WIDE[0], torch.bfloat16)
    expected = run(call, grad_output, grad_lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call, grad_output, grad_lse)
    fresh = torch.randn_like(call.query)
    call.query.copy_(fresh)
    graph.replay()
    replayed = [t.clone() for t in captured]
    for a, b in zip(replayed, run(call, grad_output, grad_lse), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(replayed[0], expected[0])
