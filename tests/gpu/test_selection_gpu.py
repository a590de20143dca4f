"""Learned selections on a GPU: exact, every gradient, the same choices as the torch path, and no waiting for the device."""

from __future__ import annotations

import pytest
import torch
from index_calls import IndexCall, drawn_call
from kernels.test_selection import drawn, inputs, seen_pairs
from oracle import dense_attention, error
from strategies import Seeded
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch import (
    attention_with_lse,
    make_selection,
    selected_attention,
    validate_cu_seqlens,
    validate_indices,
)
from dilated_attention_pytorch.kernels.dropout import keep_mask
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive
from dilated_attention_pytorch.selection import attention as selected
from dilated_attention_pytorch.selection import backend
from dilated_attention_pytorch.selection import indices as lists
from dilated_attention_pytorch.selection.indices import GRANULARITIES
from dilated_attention_pytorch.selection.kernels.lowering import Listed
from dilated_attention_pytorch.selection.plan import block_plan, invert_selection
from dilated_attention_pytorch.selection.types import Selection

pytestmark = pytest.mark.gpu

SIZES = [
    (128, 64, 1, 1024),
    (128, 128, 1, 1000),
    (64, 64, 2, 700),
    (128, 64, 2, 512),
    (32, 80, 1, 500),
    (128, 128, 2, 768),
]
"""Block size, head width, batch, tokens."""
SHARED = [{"select": "all"}, {"select": "group", "group_size": 2, "score_unit": 1, "match_rank": 16}]
"""Lists that heads share."""


def on_gpu(chosen):
    moved = (chosen.indices.cuda(), chosen.counts.cuda())
    rest = (chosen.n, chosen.block_size, chosen.is_causal, chosen.per_token, chosen.local_blocks, chosen.sink_blocks)
    return Selection(*moved, *rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(("size", "width", "batch", "n"), SIZES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_output_and_gradients_are_no_worse_than_twice_torch(
    per_token, is_causal, size, width, batch, n, key_heads, dtype
):
    chosen = drawn(batch, 4, n, size, is_causal=is_causal, per_token=per_token, most=3)
    given = [x.to(dtype).cuda() for x in inputs(chosen, key_heads, width, width)]
    grad = torch.randn(batch, 4, n, width).to(dtype).cuda()
    seen = seen_pairs(chosen).cuda()
    single = [x.detach().requires_grad_() for x in given]
    output, lse = selected_attention(*single, on_gpu(chosen), enable_gqa=True, return_lse=True)
    found = (output, *torch.autograd.grad(output, single, grad))
    exact = [x.detach().double().requires_grad_() for x in given]
    wanted, wanted_lse = dense_attention(*exact, seen.double())
    wanted = (wanted, *torch.autograd.grad(wanted, exact, grad.double()))
    torchs = [x.detach().requires_grad_() for x in given]
    other = scaled_dot_product_attention(*torchs, attn_mask=seen, enable_gqa=True)
    others = (other, *torch.autograd.grad(other, torchs, grad))
    assert error(lse.detach(), wanted_lse.detach()) < 1e-3
    # What a token gets from each block, output and dQ, is rounded before it is added up: where tokens choose, once more.
    once_more = per_token and dtype is torch.bfloat16
    for times, got, want, peer in zip((2 + once_more, 2 + once_more, 2, 2), found, wanted, others, strict=True):
        assert error(got.detach(), want.detach()) <= max(times * error(peer.detach(), want.detach()), 1e-5)


@pytest.mark.parametrize("rows", [512, 2048])
def test_chunks_of_tokens_equal_the_whole_call(rows, monkeypatch):
    from dilated_attention_pytorch.selection.kernels.gathered_attention import GatheredAttend

    chosen = on_gpu(drawn(1, 4, 2048, 128, is_causal=True, per_token=True, most=4))
    x = [t.bfloat16().cuda().requires_grad_() for t in inputs(chosen, 2, 128, 128)]
    runs = []
    for limits in ((2**30, 2**30), (0, rows)):
        monkeypatch.setattr(GatheredAttend, "_most_rows", lambda *_, limits=limits: limits)
        monkeypatch.setattr(selected, "_cached", {})
        output = selected_attention(*x, chosen, enable_gqa=True)
        runs.append([output, *torch.autograd.grad(output.square().sum(), x)])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][:2], runs[1][:2], strict=True))
    assert all(error(a.float(), b.float()) < 1e-2 for a, b in zip(runs[0][2:], runs[1][2:], strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("entries", [1, 4, 16, 51, 128])
@pytest.mark.parametrize("per_token", [False, True])
def test_normal_form_of_short_lists_equals_that_of_long_ones(per_token, entries, dtype, monkeypatch):
    for is_causal, local in ((False, 0), (True, 0), (False, 2), (True, 1)):
        call = IndexCall(per_token, is_causal, 1000, 16, scope=2, entries=entries, counted=True, wild=True)
        indices, counts, _ = call.lists()
        given, shape = (indices.to("cuda", dtype), counts.cuda()), {"n": 1000, "heads": 4, "granularity": 16}
        made = make_selection(*given, **shape, is_causal=is_causal, local_blocks=local)
        with monkeypatch.context() as sorting:
            sorting.setattr(lists, "LONGEST_COMPARED", 0)
            wanted = make_selection(*given, **shape, is_causal=is_causal, local_blocks=local)
        assert torch.equal(made.indices, wanted.indices) and torch.equal(made.counts, wanted.counts)
        assert (made.sharing_rows is None) == (wanted.sharing_rows is None)
        assert made.sharing_rows is None or torch.equal(made.sharing_rows, wanted.sharing_rows)


def test_tokens_take_half_more_memory_than_their_tensors():
    query = torch.randn(1, 64, 2**16, 128, dtype=torch.bfloat16, device="cuda")
    key, value = torch.randn(2, 1, 4, 2**16, 128, dtype=torch.bfloat16, device="cuda").unbind()
    own = torch.arange(2**16, device="cuda")[:, None] // 128
    indices = (torch.rand(1, 4, 2**16, 16, device="cuda") * (own + 1)).int()
    options = {"is_causal": True, "enable_gqa": True}
    selected_attention(query, key, value, indices, **options)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = selected_attention(query, key, value, indices, **options)
    tensors = sum(x.nbytes for x in (query, key, value, output))
    assert torch.cuda.max_memory_allocated() - before - output.nbytes <= 0.5 * tensors


@pytest.mark.parametrize("per_token", [False, True])
def test_gradients_have_the_same_bits_every_time(per_token):
    chosen = on_gpu(drawn(1, 4, 2048, 128, is_causal=per_token, per_token=per_token, most=4))
    x = [t.bfloat16().cuda().requires_grad_() for t in inputs(chosen, 2, 64, 64)]
    outputs = [selected_attention(*x, chosen, enable_gqa=True) for _ in range(3)]
    runs = [torch.autograd.grad(output.square().sum(), x) for output in outputs]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("padded", [False, True])
def test_where_tokens_choose_dropout_goes_by_coordinates(padded):
    chosen = drawn(2, 4, 300, 64, is_causal=True, per_token=True, most=2)
    x = [t.float().cuda().requires_grad_() for t in inputs(chosen, 2, 32, 32)]
    padding = (torch.arange(300) >= torch.tensor([300, 200])[:, None]).cuda() if padded else None
    torch.manual_seed(3)
    seed = torch.randint(2**62, (1,), dtype=torch.int64, device="cuda")
    torch.manual_seed(3)
    options = {"dropout_p": 0.3, "key_padding_mask": padding, "enable_gqa": True}
    output = selected_attention(*x, on_gpu(chosen), **options)
    stream, token = torch.arange(8).view(2, 4, 1, 1).cuda(), torch.arange(300).cuda()
    dropped = {"kept": keep_mask(seed, stream, token[:, None], token, 0.3), "dropout_p": 0.3}
    exact = [t.detach().double().requires_grad_() for t in x]
    wanted, _ = dense_attention(*exact, seen_pairs(chosen).cuda().double(), key_padding_mask=padding, **dropped)
    grads = torch.autograd.grad(output.square().sum(), x), torch.autograd.grad(wanted.square().sum(), exact)
    for got, want in ((output, wanted), *zip(*grads, strict=True)):
        assert error(got.detach(), want.detach()) < 1e-4


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("size", "batch", "n"), [(128, 1, 1024), (128, 1, 1000), (64, 2, 700), (256, 2, 1024)])
def test_lists_laid_out_by_kernels_are_those_laid_out_in_torch(size, batch, n, is_causal):
    chosen = drawn(batch, 2, n, size, is_causal=is_causal, per_token=False, most=3)
    plan, wanted = Listed(on_gpu(chosen)).whole_plan.to("cpu"), block_plan(chosen)
    assert torch.equal(plan.to_dense(), wanted.to_dense())
    for got, want in zip(
        (plan.parts[0].by_query, plan.parts[0].by_key), (wanted.parts[0].by_query, wanted.parts[0].by_key), strict=True
    ):
        assert sorted(zip(*(x.tolist() for x in got.entries()), strict=True)) == sorted(
            zip(*(x.tolist() for x in want.entries()), strict=True)
        )


@pytest.mark.parametrize(
    ("batch", "n", "group", "window"), [(1, 3000, 1, 1024), (2, 333, 2, 1024), (1, 20_000, 4, 1024), (2, 2000, 1, 16)]
)
def test_inverted_selection_by_bits_matches_a_sort(batch, n, group, window, monkeypatch):
    from dilated_attention_pytorch.selection.kernels import gather_index

    monkeypatch.setattr(gather_index, "WINDOW", window)
    chosen = on_gpu(drawn(batch, 4, n, 64, is_causal=True, per_token=True, most=7))
    found, wanted = (gather_index.invert_selection(chosen, group), invert_selection(chosen, group, 0, False))
    # Nobody reads where the rows of tiles that hold nothing but filler come from.
    nowhere = (wanted.tile == batch * chosen.blocks).repeat_interleave(chosen.block_size, 1)
    found = found._replace(source=found.source.masked_fill(nowhere, -1))
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got.long(), want)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("own_unit", "unit", "width", "dtype"),
    [
        (16, 16, 64, torch.bfloat16),
        (128, 16, 80, torch.bfloat16),
        (64, 1, 256, torch.float32),
        (1, 128, 32, torch.float16),
    ],
)
def test_blocks_are_summed_up_as_on_the_cpu(own_unit, unit, width, dtype, padded):
    query, key = (torch.randn(2, 1000, heads, width).transpose(1, 2).to(dtype) for heads in (4, 2))
    query[1, 2, 500] = key[0, 1, 999] = torch.inf
    padding = torch.arange(1000) >= torch.tensor([1000, 300])[:, None] if padded else None
    sizes = 128, own_unit, unit
    wanted = backend.Torch.summarise(query, key, *sizes, padding, True)
    padding = None if padding is None else padding.cuda()
    found = backend.Triton.summarise(query.cuda(), key.cuda(), *sizes, padding, True)
    for got, want in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
        assert error(got.cpu(), want) < 1e-5


@pytest.mark.parametrize(("width", "share"), [(64, False), (80, True), (256, False)])
def test_parts_of_scores_are_those_of_the_cpu(width, share):
    torch.manual_seed(0)
    config = AdaptiveConfig(0.8, hidden_dim=100, match_rank=24, share_across_heads=share, granularity="block")
    layer = BlockSparseAdaptive([4096], [1], 4, width, config)
    given = torch.randn(2, 4, 3000, width), torch.randn(2, 2, 3000, width)
    with torch.no_grad():
        wanted = layer.score_blocks(*given, True).factors
        found = layer.cuda().score_blocks(*(x.cuda() for x in given), True).factors
    for name in ("rows", "columns", "right"):
        assert error(getattr(found, name).cpu(), getattr(wanted, name)) < 1e-5


@pytest.mark.parametrize("granularity", ["block", "token"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "group"), [(16, 1, 16), (8, 8, 2), (8, 2, 2), (64, 4, 16), (6, 2, 6)], ids=str
)
def test_parts_of_shared_scores_are_those_of_the_cpu(heads, key_heads, group, granularity):
    torch.manual_seed(0)
    options = {"select": "group", "group_size": group, "granularity": granularity}
    config = AdaptiveConfig(0.8, hidden_dim=100, match_rank=24, score_unit=1, **options)
    layer = BlockSparseAdaptive([4096], [1], heads, 80, config, num_kv_heads=key_heads)
    given = torch.randn(2, heads, 1000, 80), torch.randn(2, key_heads, 1000, 80)
    with torch.no_grad():
        wanted = layer.score_blocks(*given, True).factors
        found = layer.cuda().score_blocks(*(x.cuda() for x in given), True).factors
    for name in ("rows", "columns", "right", "own"):
        assert error(getattr(found, name).cpu(), getattr(wanted, name)) < 1e-5


def without_kernels(monkeypatch, refused):
    """Run one step in torch."""
    why_not = backend.why_not
    monkeypatch.setattr(backend, "why_not", lambda step, work: "refused" if step == refused else why_not(step, work))


@pytest.fixture
def layer_and_input():
    def make(is_causal, **config):
        torch.manual_seed(0)
        layer = BlockSparseAdaptive([4096], [1], 4, 64, AdaptiveConfig(0.8, **config)).cuda()
        return layer, torch.randn(3, 2, 3000, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()

    return make


@pytest.mark.parametrize("config", [{}, {"adaptive_ratio": 0.7}, {"match_rank": 0}, {"dropout": 0.2}, *SHARED], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_kernel_keeps_what_the_torch_path_keeps(is_causal, config, layer_and_input, monkeypatch):
    layer, x = layer_and_input(is_causal, **config)
    q, k, _ = (t.detach().transpose(1, 2) for t in x.unbind())
    found = []
    for by_kernel in (True, False):
        if not by_kernel:
            without_kernels(monkeypatch, "rank")
        torch.manual_seed(1)
        with torch.no_grad():
            found.append(backend.select(layer.train().score_blocks(q, k, is_causal), q.shape[2], explore=True))
    one, other = (x.allowed() for x in found)
    # Scores that differ by rounding alone may change places.
    assert float((one != other).sum()) <= 1e-3 * float(other.sum())


@pytest.mark.parametrize("config", [{}, *SHARED], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_scorer_learns_the_same_by_kernels_and_by_a_graph(is_causal, config, layer_and_input, monkeypatch):
    layer, x = layer_and_input(is_causal, **config)
    found = []
    for by_kernels in (True, False):
        if not by_kernels:
            without_kernels(monkeypatch, "score_rows")
        layer.zero_grad()
        torch.manual_seed(1)
        layer(*x.unbind(), is_causal).backward(torch.ones_like(x[0]))
        found.append({name: parameter.grad for name, parameter in layer.named_parameters()})
    for name, wanted in found[1].items():
        # The last bias moves all scores of a row alike, and has no gradient but rounding.
        assert name.endswith("bias_1") or float((found[0][name] - wanted).norm() / wanted.norm()) < 1e-3, name


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("config", [{}, *SHARED], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_training_step_never_waits_for_the_device(is_causal, config, layer_and_input):
    layer, x = layer_and_input(is_causal, **config)
    for waits in (True, False):
        # The first step of a shape compiles, and plans what all rows share.
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        try:
            layer(*x.unbind(), is_causal).backward(torch.ones_like(x[0]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("config", [{}, SHARED[1]], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_training_step_replays_in_a_cuda_graph(is_causal, config, layer_and_input):
    layer, x = layer_and_input(is_causal, **config)
    leaves = x, *layer.parameters()

    def step():
        for tensor in leaves:
            tensor.grad = None
        output = layer(*x.unbind(), is_causal)
        output.backward(torch.ones_like(output))
        return output

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    captured = output, *(tensor.grad for tensor in leaves)
    found = []
    # Other seeds, and so other choices, than while it was captured.
    for seed in (1, 2):
        torch.manual_seed(seed)
        graph.replay()
        found.append([tensor.detach().clone() for tensor in captured])
        torch.manual_seed(seed)
        wanted = step().detach(), *(tensor.grad for tensor in leaves)
        for got, want in zip(found[-1], wanted, strict=True):
            assert error(got, want) <= 1e-5
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("is_causal", [False, True])
def test_short_sequences_are_attended_to_whole_and_exactly(is_causal):
    layer = BlockSparseAdaptive([2048], [1], 4, 64, AdaptiveConfig(dense_below=2048), softmax_scale=0.3).cuda().eval()
    x = [t.requires_grad_() for t in torch.randn(3, 2, 1000, 4, 64, device="cuda", dtype=torch.bfloat16).unbind()]
    exact, torchs = (
        scaled_dot_product_attention(*(t.transpose(1, 2) for t in given), is_causal=is_causal, scale=0.3)
        for given in ([t.detach().double() for t in x], [t.detach() for t in x])
    )
    bound = 2 * error(torchs, exact)
    with torch.no_grad():
        assert error(layer(*x, is_causal).transpose(1, 2), exact) <= bound
    runs = [layer(*x, is_causal) for _ in range(2)]
    assert error(runs[0].detach().transpose(1, 2), exact) <= bound
    grads = [torch.autograd.grad(run.square().sum(), x) for run in runs]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(("is_causal", "most"), [(False, 64), (True, 112)])
def test_choosing_takes_little_memory(is_causal, most):
    """Keys are summarised in float32: where tokens select, each of them."""
    layer = BlockSparseAdaptive([32768], [1], 8, 64, AdaptiveConfig(0.9)).cuda()
    q, k = torch.randn(2, 1, 8, 32768, 64, device="cuda", dtype=torch.bfloat16).unbind()
    for _ in range(2):
        # Once, so that what is kept for all calls is there.
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            backend.select(layer.score_blocks(q, k, is_causal), q.shape[2])
    assert torch.cuda.max_memory_allocated() - before <= most * 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("size", GRANULARITIES)
@pytest.mark.parametrize("seed", range(6))
def test_drawn_indices_match_oracle_on_a_gpu(seed, size, dtype):
    call = drawn_call(Seeded(f"{seed} {size}"), (size,))
    call = call._replace(n=3 * size + call.n, wild=True, entries=call.entries + 1)
    for width in (64, 128, 80):
        for name in ("auto", "triton"):
            for what, wrong in call.errors(name, dtype, "cuda", widths=(width, width)).items():
                assert wrong <= (3e-2 if dtype is torch.bfloat16 else 2e-5), (width, name, what)


@pytest.mark.parametrize("key_heads", [2, 1])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_whole_blocks_of_indices_match_oracle_on_a_gpu(per_token, is_causal, key_heads):
    call = IndexCall(per_token, is_causal, 1024, 128, 2, 4, key_heads, 1, 4, wild=True)
    for what, wrong in call.errors("auto", torch.bfloat16, "cuda", widths=(64, 64)).items():
        assert wrong <= 3e-2, what


def indexed_step(leaves, indices, is_causal):
    output, lse = selected_attention(*leaves[:3], indices, is_causal=is_causal, sink=leaves[3], return_lse=True)
    finite = torch.where(lse > -torch.inf, lse, 0.0)
    return output, lse, *torch.autograd.grad(output.float().square().sum() + finite.sum(), leaves)


def indexed_inputs(per_token):
    leaves = [torch.randn(1, 4, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    leaves = [x.requires_grad_() for x in (*leaves, torch.zeros(4, device="cuda"))]
    shape = 1, 4, 1024 if per_token else 8, 3
    return leaves, [torch.randint(-1, 8, shape, device="cuda", dtype=torch.int32) for _ in range(3)]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_indices_are_never_read_back(per_token, is_causal):
    leaves, (first, second, _) = indexed_inputs(per_token)
    indexed_step(leaves, first, is_causal)
    torch.cuda.set_sync_debug_mode("error")
    try:
        indexed_step(leaves, second, is_causal)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_cuda_graph_replays_on_other_indices(per_token, is_causal):
    leaves, (first, *others) = indexed_inputs(per_token)
    indices = first.clone()
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            indexed_step(leaves, indices, is_causal)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = indexed_step(leaves, indices, is_causal)
    for other in others:
        indices.copy_(other)
        graph.replay()
        for got, want in zip(captured, indexed_step(leaves, other, is_causal), strict=True):
            assert error(got.detach(), want.detach()) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_selection_serves_calls_on_every_stream(per_token, is_causal):
    leaves, (first, second, _) = indexed_inputs(per_token)
    options = {"n": 1024, "heads": 4, "granularity": 128, "is_causal": is_causal}
    selection, other = (make_selection(x, **options) for x in (first, second))
    wanted = indexed_step(leaves, selection, is_causal)
    aside = torch.cuda.Stream()
    for _ in range(2):
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            found = indexed_step(leaves, selection, is_causal)
        torch.cuda.current_stream().wait_stream(aside)
        for each in (found, indexed_step(leaves, selection, is_causal)):
            assert all(torch.equal(got, want) for got, want in zip(each, wanted, strict=True))
    # Lists that were changed are read again.
    wanted = indexed_step(leaves, other, is_causal)
    for name in ("indices", "counts", "sharing_rows"):
        if getattr(selection, name) is not None:
            getattr(selection, name).copy_(getattr(other, name))
    for _ in range(2):
        found = indexed_step(leaves, selection, is_causal)
        assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_cuda_graph_reads_the_lists_of_a_selection_again(per_token, is_causal):
    leaves, (first, *others) = indexed_inputs(per_token)
    options = {"n": 1024, "heads": 4, "granularity": 128, "is_causal": is_causal}
    selection = make_selection(first, **options)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            indexed_step(leaves, selection, is_causal)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = indexed_step(leaves, selection, is_causal)
        made = make_selection(first, **options)
    assert made.memo is None
    for other in others:
        wanted = make_selection(other, **options)
        for name in ("indices", "sharing_rows"):
            if getattr(selection, name) is not None:
                getattr(selection, name).copy_(getattr(wanted, name))
        first.copy_(other)
        graph.replay()
        exact = indexed_step(leaves, wanted, is_causal)
        for found in (captured, indexed_step(leaves, selection, is_causal), indexed_step(leaves, made, is_causal)):
            for got, want in zip(found, exact, strict=True):
                assert error(got.detach(), want.detach()) <= 1e-5


BOUNDS = [[0, 100, 100, 640, 1000], [0, 1, 2, 999, 1000], [0, 300, 500, 700, 1000], [0, 0, 0, 0, 1000]]


def packed_step(leaves, what, bounds, is_causal):
    """Output, LSE and gradients of documents that lie one after another, by indices or a window."""
    if isinstance(what, torch.Tensor):
        options = {"granularity": 64, "is_causal": is_causal, "enable_gqa": True, "cu_seqlens": bounds}
        output, lse = selected_attention(*leaves, what, return_lse=True, **options)
    else:
        options = {"is_causal": is_causal, "enable_gqa": True, "cu_seqlens": bounds}
        output, lse = attention_with_lse(*leaves, what, **options)
    return output, lse, *torch.autograd.grad(output.square().sum() + lse.clamp(min=-30).sum(), leaves)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("what", ["blocks", "tokens", "full", "window:150"])
def test_a_cuda_graph_replays_on_other_bounds(what, is_causal):
    leaves = [torch.randn(1, h, 1000, 64, device="cuda", requires_grad=True) for h in (4, 2, 2)]
    given = what
    if what in ("blocks", "tokens"):
        rows = 1000 if what == "tokens" else 16
        given = torch.randint(-1, 16, (1, 2, rows, 4), dtype=torch.int32, device="cuda")
    bounds = torch.tensor(BOUNDS[0], dtype=torch.int32, device="cuda")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            packed_step(leaves, given, bounds, is_causal)
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed_step(leaves, given, bounds, is_causal)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = packed_step(leaves, given, bounds, is_causal)
    on_cpu = [x.detach().double().cpu().requires_grad_() for x in leaves]
    for other in BOUNDS:
        bounds.copy_(torch.tensor(other, dtype=torch.int32))
        graph.replay()
        held = given if isinstance(given, str) else given.cpu()
        wanted = packed_step(on_cpu, held, torch.tensor(other), is_causal)
        # Eager calls read the present bounds, too.
        for found in (captured, *(packed_step(leaves, given, bounds, is_causal) for _ in range(2))):
            for got, want in zip(found, wanted, strict=True):
                assert error(got.detach().cpu(), want.detach()) <= 1e-4


def test_validation_reads_bounds_on_a_gpu():
    with pytest.raises(ValueError, match="cu_seqlens must ascend"):
        validate_cu_seqlens(torch.tensor([0, 9], device="cuda"), 10)


def test_validation_reads_indices_on_a_gpu():
    indices = torch.tensor([[0, 9]], device="cuda", dtype=torch.int32)
    with pytest.raises(ValueError, match=r"got 9 at \[0, 1\]"):
        validate_indices(indices, 9)
