"""The Hopper kernels on a GPU: no worse than twice torch's own error, every gradient, the same bits every time."""

from dataclasses import replace

import pytest
import torch
from cases import PROBLEMS, Problem
from oracle import answer, error
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch.kernels.call import AttentionCall, reproducible_gradients
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.kernels.hopper import backward as hopper_gradients
from dilated_attention_pytorch.kernels.hopper import split_rows as hopper_split
from dilated_attention_pytorch.ops import memory_budget
from dilated_attention_pytorch.plan import make_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or hopper_backend.device_problem(torch.device("cuda", torch.cuda.current_device())) is not None,
        reason="needs a Hopper GPU and the Gluon language",
    ),
]


def wide(name, text, n, heads=4, key_heads=4, d=64, e=None, **more):
    return Problem(name=name, text=text, n=n, heads=heads, key_heads=key_heads, d=d, e=e or d, block_size=128, **more)


SHARED = [
    replace(problem, d=64, e=64, block_size=128)
    for problem in PROBLEMS
    if not problem.padded and problem.d == problem.e
]
SMALL = "dilated:256x1,512x2,1024x4"
LADDERS = [
    wide("ladder", SMALL, 2048),
    wide("ladder-causal", f"{SMALL} & causal", 2048, d=128),
    wide("ladder-ragged", SMALL, 1901, d=128),
    wide("ladder-gqa", f"{SMALL} & causal", 2000, heads=8, key_heads=2, d=128, batch=2),
    wide("ladder-rates-that-do-not-divide", "dilated:256x1,500x3,1000x6 & causal", 1999, heads=8, key_heads=4),
    wide("ladder-residues-in-blocks", f"{SMALL};offset=block", 1500, heads=6, key_heads=3, d=128),
    wide("ladder-heads-divided", f"{SMALL};heads=split", 1500, heads=6, key_heads=3),
    wide("ladder-counted-once", f"{SMALL};overlap=union", 1300, d=128),
    wide("largest-rate-first", "dilated:2048x8,512x2,128x1", 2048),
    wide("rows-without-keys", "dilated:512x16", 1024, d=128),
    wide("short-segments", "dilated:48x1,96x5", 700),
    wide("documents", "documents:300,300,1,45,1000 & causal", 1646, d=128, key_heads=2),
    wide("a-pattern-a-head", "heads{window:200 / dilated:512x4 / causal / dilated:300x2}", 1000),
    wide("window-and-stride", "window:100 | strided:8", 1100, d=128),
    wide("many-items", "dilated:128x1,512x2,2048x8 & causal", 8192, heads=16, key_heads=4, batch=1),
]
GLOBAL = "global:128;queries=1 | window:100"
UNLIKE = "(random:0.8;block=128;seed=1;per_head=1 & global:128;queries=1) | window:100"
LONG = [
    wide("global", GLOBAL, 2048),
    wide("global-ragged", "global:200;queries=1 | window:100", 1901, d=128, batch=2),
    wide("global-causal-gqa", f"({GLOBAL}) & causal", 2000, heads=8, key_heads=2, d=128, batch=2),
    wide("last-rows-are-long", "window:100 | blocks:,,,,,,,,,0 1 2 3 4 5 6 7 8 9;block=128", 1200, key_heads=2, d=128),
    wide("a-list-a-head", UNLIKE, 2000, d=128),
    wide("unlike-heads-of-a-group", UNLIKE, 2000, key_heads=2),
    wide("every-row-is-long", "full", 1500, heads=2, key_heads=1, d=128),
    wide("rows-without-keys", "blocks:,,,0 1,,,,0 1 2 3 4 5 6 7;block=128 & causal", 1000, d=128),
]
NARROW = [
    wide("causal-32", "causal", 1000, d=32),
    wide("window-8", "window:200", 900, d=8),
    wide("window-72-gqa", "window:200", 900, heads=8, key_heads=2, d=72, batch=2),
    wide("widths-64-and-128", "window:200 & causal", 1000, d=64, e=128),
    wide("widths-112-and-40", "global:64 | window:100", 1000, d=112, e=40),
    wide("ladder-96", f"{SMALL} & causal", 2000, heads=8, key_heads=2, d=96, batch=2),
    wide("ladder-80-rates-that-do-not-divide", "dilated:256x1,500x3,1000x6 & causal", 1999, d=80),
    wide("ladder-widths-32-and-96", SMALL, 1901, d=32, e=96),
]
NARROW_LONG = [
    wide("global-96", GLOBAL, 1901, d=96, batch=2),
    wide("global-causal-gqa-widths-80-and-32", f"({GLOBAL}) & causal", 2000, heads=8, key_heads=2, d=80, e=32),
]
SMALL_BLOCKS = [
    replace(problem, name=f"{problem.name}-blocks-of-64", block_size=64)
    for problem in (
        wide("random-causal-gqa", "random:0.3;block=64;seed=1;per_head=1 & causal", 1100, key_heads=2, d=128, batch=2),
        wide("window-ragged", "window:150", 777, d=128),
        *(LADDERS[place] for place in (1, 3)),
        *(LONG[place] for place in (1, 7)),
        NARROW[4],
    )
]
DTYPES = [torch.bfloat16, torch.float16]
PADDED = [
    wide("window", "window:200", 1000, batch=3, padded=(1000, 333, 0)),
    wide("causal-gqa", "causal", 900, heads=8, key_heads=2, d=128, batch=3, padded=(899, 128, 700)),
    wide("blocks", "random:0.4;block=128;seed=1 | window:60", 1100, key_heads=2, batch=2, padded=(1, 900)),
    wide("ladder-gqa", f"{SMALL} & causal", 2000, heads=8, key_heads=2, d=128, batch=3, padded=(2000, 1400, 0)),
    wide("ladder-rates-that-do-not-divide", "dilated:256x1,500x3,1000x6 & causal", 1999, batch=2, padded=(1500, 7)),
    wide("global-ragged", "global:200;queries=1 | window:100", 1901, d=128, batch=2, padded=(1901, 1000)),
]
PADDED.append(replace(PADDED[1], name="causal-gqa-blocks-of-64", block_size=64))
"""Padding on the right; tests also pad on the left, and at random."""
SIDES = ["right", "left", "random"]


def call_of(problem, dtype, scale=None):
    query, key, value, grad_output, grad_lse = problem.inputs(dtype, device="cuda")
    plan = make_plan(problem.pattern, problem.n, problem.heads, problem.block_size, "cuda")
    call = AttentionCall(query, key, value, plan, problem.d**-0.5 if scale is None else scale)
    assert hopper_backend.why_not(call) is None
    return call, grad_output, grad_lse.float()


def padding_of(problem, side):
    padding = problem.key_padding_mask("cuda")
    if side == "random":
        return torch.rand(padding.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) < 0.3
    return padding.flip(1) if side == "left" else padding


def padded_call(problem, side, dtype=torch.bfloat16):
    """A call whose padded keys and values are not finite, gradients of its results, and the answer."""
    call, grad_output, grad_lse = call_of(problem, dtype)
    padding = padding_of(problem, side)
    slopes = {"grad_output": grad_output, "grad_lse": grad_lse}
    given = call.query, call.key, call.value
    wanted = answer(*given, problem.pattern, key_padding_mask=padding.cpu(), **slopes)
    hidden = padding[:, None, :, None]
    key, value = torch.where(hidden, torch.nan, call.key), torch.where(hidden, torch.inf, call.value)
    return replace(call, key=key, value=value, key_padding_mask=padding), grad_output, grad_lse, wanted


def run(call, grad_output, grad_lse):
    output, lse = hopper_backend.forward(call)
    return output, lse, *hopper_backend.backward(call, output, lse, grad_output, grad_lse)


def torch_errors(call, grad_output, wanted):
    """Errors of torch's own attention in the same dtype, with keys and values repeated for every part."""
    plan = call.plan
    allowed = torch.cat([replace(plan, parts=(part,)).to_dense() for part in plan.parts], dim=2)[None] > 0
    seen = allowed.any(-1, keepdim=True)
    inputs = [t.detach().requires_grad_() for t in (call.query, call.key, call.value)]
    key, value = (torch.cat([t] * len(plan.parts), dim=2) for t in inputs[1:])
    mask = torch.where(seen, allowed, True)
    output = scaled_dot_product_attention(inputs[0], key, value, attn_mask=mask, scale=call.scale, enable_gqa=True)
    output = torch.where(seen, output, 0.0)
    gradients = torch.autograd.grad(output, inputs, grad_output)
    return [error(a, b) for a, b in zip((output, *gradients), (wanted.output, *wanted[2:]), strict=True)]


def assert_close(problem, dtype, grad_lse_given=False, scale=None):
    call, grad_output, grad_lse = call_of(problem, dtype, scale)
    grad_lse = grad_lse if grad_lse_given else None
    given = call.query, call.key, call.value, problem.pattern
    wanted = answer(*given, grad_output=grad_output, grad_lse=grad_lse, scale=call.scale)
    output, lse, *gradients = run(call, grad_output, grad_lse)
    assert error(lse, wanted.lse) <= 1e-5
    wanted_by_torch = wanted
    if grad_lse is not None:
        wanted_by_torch = answer(*given, grad_output=grad_output, scale=call.scale)
    named = zip(
        ("output", "query", "key", "value"),
        (output, *gradients),
        (wanted.output, *wanted[2:]),
        torch_errors(call, grad_output, wanted_by_torch),
        strict=True,
    )
    for name, got, want, bound in named:
        assert error(got, want) <= max(2 * bound, torch.finfo(dtype).eps / 2), name


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("problem", SHARED + LADDERS[:-1] + SMALL_BLOCKS, ids=lambda problem: problem.name)
def test_half_precision_is_no_worse_than_twice_torch(problem, dtype):
    assert_close(problem, dtype)


@pytest.mark.parametrize("problem", [LADDERS[3], LADDERS[4], LADDERS[7]], ids=lambda problem: problem.name)
def test_the_gradient_of_the_lse_flows(problem):
    assert_close(problem, torch.bfloat16, grad_lse_given=True)


@pytest.mark.parametrize("problem", [LADDERS[2], LADDERS[3], LADDERS[8]], ids=lambda problem: problem.name)
def test_gradients_summed_in_any_order_are_as_good(problem):
    reproducible_gradients(False)
    try:
        assert_close(problem, torch.bfloat16)
    finally:
        reproducible_gradients(True)


@pytest.mark.parametrize("ordered", [True, False], ids=["reproducible", "any order"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("problem", NARROW, ids=lambda problem: problem.name)
def test_narrow_heads_error_is_at_most_twice_torch(problem, dtype, ordered):
    reproducible_gradients(ordered)
    try:
        assert_close(problem, dtype, grad_lse_given=problem.batch == 2)
    finally:
        reproducible_gradients(True)


@pytest.mark.parametrize("problem", NARROW_LONG, ids=lambda problem: problem.name)
def test_long_rows_of_narrow_heads_match_oracle(problem, short_pieces):
    assert_close(problem, torch.bfloat16)
    call, grad_output, grad_lse = call_of(problem, torch.bfloat16)
    run(call, grad_output, grad_lse)
    assert pieces_of(call)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
@pytest.mark.parametrize("problem", [LADDERS[2], LONG[1], NARROW[5]], ids=lambda problem: problem.name)
def test_scales_that_are_not_positive_match_oracle(problem, scale):
    assert_close(problem, torch.bfloat16, scale=scale)


@pytest.mark.parametrize(
    ("problem", "rows"),
    [(NARROW[0], 128), (LADDERS[2], 1024), (LONG[2], 256), (NARROW[5], 1024), (SMALL_BLOCKS[1], 128)],
    ids=lambda value: getattr(value, "name", value),
)
def test_runs_of_fewer_queries_than_keys_match_oracle(problem, rows, monkeypatch):
    call, grad_output, grad_lse = call_of(problem, torch.bfloat16)
    call = replace(call, pattern=problem.pattern.resolve(problem.n, problem.heads))
    monkeypatch.setattr(memory_budget, "_within", lambda direction, call, name, budget, run: run(rows))
    output, lse = memory_budget.forward(call, "hopper", hopper_backend, 1)
    gradients = memory_budget.backward(call, "hopper", hopper_backend, 1, output, lse, grad_output, grad_lse).inputs
    expected = run(call, grad_output, grad_lse)
    assert error(lse, expected[1]) <= 1e-5
    for a, b in zip((output, *gradients), (expected[0], *expected[2:]), strict=True):
        assert error(a, b) <= 2 * torch.finfo(torch.bfloat16).eps


def test_memory_beside_narrow_rows_is_untouched():
    """Rows of 96 columns in rows of 160: descriptors and stores must not leave them."""
    call, grad_output, grad_lse = call_of(NARROW[5], torch.bfloat16)
    expected = run(call, grad_output, grad_lse)
    apart = []
    for x in (call.query, call.key, call.value):
        room = torch.full((*x.shape[:3], 160), float("nan"), dtype=x.dtype, device="cuda")
        apart.append(room[..., 32:128].copy_(x))
    apart = AttentionCall(*apart, call.plan, call.scale)
    for a, b in zip(expected, run(apart, grad_output, grad_lse), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("problem", [*LADDERS, *NARROW, *SMALL_BLOCKS], ids=lambda problem: problem.name)
def test_the_same_call_gives_the_same_bits(problem):
    call, grad_output, grad_lse = call_of(problem, torch.bfloat16)
    first = run(call, grad_output, grad_lse)
    assert all(bool(t.isfinite().all()) for t in (first[0], *first[2:]))
    for _ in range(3):
        for a, b in zip(first, run(call, grad_output, grad_lse), strict=True):
            assert torch.equal(a, b)


@pytest.fixture
def short_pieces(monkeypatch):
    """Rows of few tiles are cut as those of many would be, whatever memory that takes."""
    monkeypatch.setattr(hopper_split, "SHORTEST_PIECE", 128**2)
    monkeypatch.setattr(hopper_split, "ROWS_A_PIECE", 2**-6)


def pieces_of(call):
    """Shapes of the pieces of the output, and of dQ, dK and dV, of the calls made so far."""
    forward = hopper_backend._launch_of(call, hopper_backend.config_of(call))
    known = hopper_gradients.prepared(call, hopper_gradients.config_of(call))._launches
    return [*forward.pieces[:1], *(room for launch in known.values() for room in launch.pieces if room)]


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("problem", LONG, ids=lambda problem: problem.name)
def test_split_rows_error_is_at_most_twice_torch(problem, dtype, short_pieces):
    assert_close(problem, dtype)


@pytest.mark.parametrize("problem", LONG[1:3], ids=lambda problem: problem.name)
def test_long_rows_pass_on_the_gradient_of_the_lse(problem, short_pieces):
    assert_close(problem, torch.bfloat16, grad_lse_given=True)


@pytest.mark.parametrize("problem", LONG[1:3], ids=lambda problem: problem.name)
def test_long_rows_summed_in_any_order_are_as_good(problem, short_pieces):
    reproducible_gradients(False)
    try:
        assert_close(problem, torch.bfloat16)
    finally:
        reproducible_gradients(True)


@pytest.mark.parametrize("problem", LONG, ids=lambda problem: problem.name)
def test_pieces_give_the_same_bits_every_time(problem, short_pieces):
    call, grad_output, grad_lse = call_of(problem, torch.bfloat16)
    first = run(call, grad_output, grad_lse)
    assert pieces_of(call)
    for _ in range(3):
        for a, b in zip(first, run(call, grad_output, grad_lse), strict=True):
            assert torch.equal(a, b)


def test_pieces_of_a_long_sequence_are_its_whole_rows(monkeypatch):
    problem = wide("", "global:128;queries=1 | hierarchical:2x1;block=128", 16384, heads=8, key_heads=4, d=128)
    call, grad_output, grad_lse = call_of(problem, torch.bfloat16)
    cut = run(call, grad_output, grad_lse)
    assert len(pieces_of(call)) == 4
    for module in (hopper_backend, hopper_gradients):
        monkeypatch.setattr(module, "split", lambda *args, **kwargs: None)
    call, *_ = call_of(problem, torch.bfloat16)
    whole = run(call, grad_output, grad_lse)
    assert not pieces_of(call)
    assert error(cut[1], whole[1]) <= 1e-5
    for a, b in zip((cut[0], *cut[2:]), (whole[0], *whole[2:]), strict=True):
        assert error(a, b) <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("problem", PADDED, ids=lambda problem: problem.name)
def test_padded_calls_match_oracle(problem, side, reproducible, short_pieces):
    *given, wanted = padded_call(problem, side)
    assert hopper_backend.why_not(given[0]) is None
    reproducible_gradients(reproducible)
    try:
        results = run(*given)
    finally:
        reproducible_gradients(True)
    for name, got, want in zip(wanted._fields, results, wanted, strict=True):
        assert error(got, want) <= (1e-5 if name == "lse" else 8e-3), name
    hidden = given[0].key_padding_mask[:, None, :, None].expand_as(given[0].key)
    assert not results[3][hidden].any() and not results[4][hidden].any()


@pytest.mark.parametrize("problem", PADDED, ids=lambda problem: problem.name)
def test_padded_calls_give_the_same_bits(problem, short_pieces):
    *given, _ = padded_call(problem, "random")
    first = run(*given)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(*given), strict=True))


@pytest.mark.parametrize("problem", PADDED, ids=lambda problem: problem.name)
def test_a_mask_without_padding_changes_nothing(problem, short_pieces):
    call, grad_output, grad_lse = call_of(problem, torch.bfloat16)
    mask = torch.zeros(problem.batch, problem.n, dtype=torch.bool, device="cuda")
    results = run(replace(call, key_padding_mask=mask), grad_output, grad_lse)
    for a, b in zip(results, run(call, grad_output, grad_lse), strict=True):
        # The compiler may order the operations of the two kernels differently.
        assert error(a, b) <= torch.finfo(torch.bfloat16).eps / 4


def test_views_with_tokens_first_are_read_and_written_in_place():
    call, grad_output, grad_lse = call_of(LADDERS[3], torch.bfloat16)
    fused = torch.cat([t.transpose(1, 2) for t in (call.query, call.key, call.value)], dim=2)
    query, key, value = (t.transpose(1, 2) for t in fused.split([8, 2, 2], dim=2))
    got = run(AttentionCall(query, key, value, call.plan, call.scale), grad_output, grad_lse)
    assert got[0].transpose(1, 2).is_contiguous()
    for a, b in zip(got, run(call, grad_output, grad_lse), strict=True):
        assert torch.equal(a, b)


def test_nothing_outside_the_tensors_is_touched():
    """Strided descriptors begin before the sequence and tiles reach past it: what lies there must not matter."""
    problem = LADDERS[4]
    call, grad_output, _ = call_of(problem, torch.bfloat16)
    expected = run(call, grad_output, None)
    fenced = []
    for tensor in (call.query, call.key, call.value):
        room = torch.full((tensor.numel() + 2 * 64 * 64,), float("nan"), dtype=tensor.dtype, device="cuda")
        room[64 * 64 : -64 * 64] = tensor.flatten()
        fenced.append(room[64 * 64 : -64 * 64].view(tensor.shape))
    for a, b in zip(expected, run(AttentionCall(*fenced, call.plan, call.scale), grad_output, None), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("problem", [LADDERS[3], LADDERS[8], LONG[1]], ids=lambda problem: problem.name)
def test_forward_and_backward_replay_in_a_cuda_graph(problem, short_pieces):
    call, grad_output, grad_lse = call_of(problem, torch.bfloat16)
    expected = run(call, grad_output, grad_lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call, grad_output, grad_lse)
    call.query.copy_(torch.randn_like(call.query))
    graph.replay()
    replayed = [t.clone() for t in captured]
    for a, b in zip(replayed, run(call, grad_output, grad_lse), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(replayed[0], expected[0])
