"""Attention on index tensors against the dense formula, on every CPU backend, and wrong calls with their messages."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from index_calls import IndexCall, drawn_call, seen_pairs
from oracle import dense_attention, error
from strategies import strategy
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention_pytorch import (
    AttentionOutput,
    BackendUnsupported,
    DistillBatch,
    attention_with_lse,
    make_selection,
    selected_attention,
    validate_cu_seqlens,
    validate_indices,
)
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.kernels.dropout import keep_mask
from dilated_attention_pytorch.kernels.sink import apply_sink
from dilated_attention_pytorch.selection import attend
from dilated_attention_pytorch.selection import backend as implementations
from dilated_attention_pytorch.selection import indices as lists
from dilated_attention_pytorch.selection.indices import GRANULARITIES, normalise_indices
from dilated_attention_pytorch.selection.plan import block_plan, token_plan

NATIVE = pytest.param("native", marks=pytest.mark.skipif(not library_path().exists(), reason="C++ kernel not built"))
BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu", NATIVE, "auto"])
ROWS = pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
CAUSAL = pytest.mark.parametrize("is_causal", [False, True])


@BACKENDS
@settings(max_examples=60)
@example(IndexCall(True, True, 1, entries=1))
@example(IndexCall(False, False, 33, entries=0))
@example(IndexCall(True, False, 50, scope=4, counted=True, padded=True))
@example(IndexCall(True, True, 50, scope=2, counted=True, padded=True))
@example(IndexCall(False, False, 90, batch=1, entries=6, documents=1))
@example(IndexCall(False, True, 90, batch=1, entries=6, documents=4))
@example(IndexCall(True, False, 90, batch=1, scope=4, entries=6, documents=4))
@example(IndexCall(True, True, 90, batch=1, entries=6, padded=True, documents=6))
@given(strategy(drawn_call))
def test_drawn_indices_match_oracle(backend: str, call: IndexCall):
    for what, wrong in call.errors(backend).items():
        assert wrong <= 1e-12, what


@BACKENDS
@CAUSAL
@ROWS
@pytest.mark.parametrize("size", GRANULARITIES)
def test_every_granularity_matches_oracle(size: int, per_token: bool, is_causal: bool, backend: str):
    call = IndexCall(per_token, is_causal, 3 * size - 5, size, 1, 2, 1, 1, 2)
    for what, wrong in call.errors(backend, torch.float32).items():
        assert wrong <= 2e-5, what


def three(n=50, heads=4, key_heads=4, batch=1, dtype=torch.float64):
    shapes = (heads, 8), (key_heads, 8), (key_heads, 6)
    return [torch.randn(batch, h, n, d, dtype=dtype) for h, d in shapes]


@ROWS
def test_order_and_duplicates_do_not_matter(per_token):
    q, k, v = three()
    indices = torch.randint(-1, 4, (1, 4, 50 if per_token else 4, 6), dtype=torch.int32)
    wanted = selected_attention(q, k, v, indices, granularity=16)
    shuffled = torch.cat([indices.flip(-1), indices[..., 2:4]], -1)
    assert torch.equal(selected_attention(q, k, v, shuffled, granularity=16), wanted)
    assert torch.equal(selected_attention(q, k, v, indices.long(), granularity=16), wanted)


@ROWS
@CAUSAL
def test_all_blocks_are_dense_attention(per_token, is_causal):
    q, k, v = three()
    indices = torch.arange(4, dtype=torch.int32).expand(1, 1, 50 if per_token else 4, 4)
    output, lse = selected_attention(q, k, v, indices, granularity=16, is_causal=is_causal, return_lse=True)
    wanted = attention_with_lse(q, k, v, "full", is_causal=is_causal)
    assert error(output, wanted.output) <= 1e-12 and error(lse, wanted.lse) <= 1e-12


@ROWS
def test_no_row_of_a_causal_call_sees_later_tokens(per_token):
    q, k, v = three()
    indices = torch.randint(-1, 4, (1, 1, 50 if per_token else 4, 4), dtype=torch.int32)
    before = selected_attention(q, k, v, indices, granularity=16, is_causal=True)
    for x in (k, v):
        x[:, :, 37:] += 1
    after = selected_attention(q, k, v, indices, granularity=16, is_causal=True)
    assert torch.equal(before[:, :, :37], after[:, :, :37]) and not torch.equal(before, after)


@ROWS
@CAUSAL
def test_rows_without_keys_are_zero(per_token, is_causal):
    leaves = [x.requires_grad_() for x in three()]
    sink = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    indices = torch.full((1, 4, 50 if per_token else 4, 3), -1, dtype=torch.int32)
    options = {"granularity": 16, "is_causal": is_causal, "sink": sink, "return_lse": True}
    output, lse = selected_attention(*leaves, indices, **options)
    assert torch.equal(output, torch.zeros_like(output)) and (lse == -torch.inf).all()
    for grad in torch.autograd.grad(output.sum(), [*leaves, sink]):
        assert torch.equal(grad, torch.zeros_like(grad))


@ROWS
@pytest.mark.parametrize("scope", [1, 2, 4])
@pytest.mark.parametrize(("batch", "n"), [(0, 32), (2, 0)])
def test_empty_calls_have_results_and_gradients(batch, n, scope, per_token):
    leaves = [x.requires_grad_() for x in three(n, 4, 2, batch)]
    indices = torch.zeros(batch, scope, n if per_token else -(-n // 16), 2, dtype=torch.int32)
    sink = torch.zeros(4, requires_grad=True)
    options = {"granularity": 16, "enable_gqa": True, "sink": sink, "return_lse": True}
    output, lse = selected_attention(*leaves, indices, **options)
    assert output.shape == (batch, 4, n, 6) and lse.shape == (batch, 4, n)
    grads = torch.autograd.grad(output.sum() + lse.sum(), [*leaves, sink])
    assert [grad.shape for grad in grads] == [x.shape for x in (*leaves, sink)]


@ROWS
def test_layouts_and_autocast_give_the_same_numbers(per_token):
    q, k, v = three(n=50, heads=4, key_heads=2, batch=2, dtype=torch.float32)
    indices = torch.randint(-1, 4, (2, 2, 50 if per_token else 4, 4), dtype=torch.int32)
    options = {"granularity": 16, "enable_gqa": True, "is_causal": True}
    wanted = selected_attention(q, k, v, indices, **options)
    apart = [x.mT.contiguous().mT for x in (q, k, v)], indices.transpose(2, 3).contiguous().transpose(2, 3)
    assert error(selected_attention(*apart[0], apart[1], **options), wanted) <= 1e-6
    tokens_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert error(selected_attention(*tokens_first, indices, **options), wanted) <= 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        half = selected_attention(q, k, v, indices, **options)
    assert half.dtype == torch.bfloat16 and error(half, wanted) <= 2e-2


CONTEXTS = {
    "default device": lambda: torch.device("meta"),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "profiler": lambda: torch.autograd.profiler.profile(),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("context", CONTEXTS)
@CAUSAL
@ROWS
def test_contexts_give_the_same_numbers(per_token, is_causal, context):
    leaves = [x.requires_grad_() for x in three(n=50, heads=4, key_heads=2, batch=2)]
    indices = torch.randint(-1, 4, (2, 2, 50 if per_token else 4, 4), dtype=torch.int32)
    options = {"granularity": 16, "enable_gqa": True, "is_causal": is_causal}
    found = []
    for inside in (nullcontext, CONTEXTS[context]):
        with inside():
            output = selected_attention(*leaves, indices, **options)
            found.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
    for got, want in zip(*found, strict=True):
        assert error(got.detach(), want.detach()) <= 1e-12
    with torch.inference_mode():
        assert error(selected_attention(*leaves, indices, **options), found[0][0].detach()) <= 1e-12


@pytest.mark.parametrize("backend", ["reference", "cpu", NATIVE])
@CAUSAL
@ROWS
def test_nan_stays_in_rows_that_see_it(per_token, is_causal, backend):
    query, key, value = three(n=50)
    key[:, :, 36] = torch.nan
    indices = torch.randint(-1, 4, (1, 4, 50 if per_token else 4, 2), dtype=torch.int32)
    output = selected_attention(
        query.requires_grad_(), key, value, indices, granularity=16, is_causal=is_causal, backend=backend
    )
    (grad,) = torch.autograd.grad(output.sum(), query)
    sees = seen_pairs(indices, 50, 16, 4, is_causal)[..., 36]
    assert sees.any() and not sees.all()
    for x in (output, grad):
        assert torch.equal(x.isnan().any(-1), sees)


PACKED = torch.tensor([0, 20, 20, 37, 50], dtype=torch.int32)


@pytest.mark.parametrize("backend", ["reference", "cpu", NATIVE])
@CAUSAL
@ROWS
def test_nan_stays_in_its_document(per_token, is_causal, backend):
    query, key, value = three(n=50)
    key[:, :, 36] = torch.nan
    indices = torch.arange(4, dtype=torch.int32).expand(1, 1, 50 if per_token else 4, 4)
    options = {"granularity": 16, "is_causal": is_causal, "cu_seqlens": PACKED, "backend": backend}
    output = selected_attention(query.requires_grad_(), key, value, indices, **options)
    (grad,) = torch.autograd.grad(output.sum(), query)
    token = torch.arange(50)
    sees = (token >= (36 if is_causal else 20)) & (token < 37)
    for x in (output, grad):
        assert torch.equal(x.isnan().any(-1), sees.expand(1, 4, 50))


@BACKENDS
@ROWS
@CAUSAL
def test_all_blocks_of_packed_documents_are_packed_attention(per_token, is_causal, backend):
    leaves = [x.requires_grad_() for x in three(n=120)]
    indices = torch.arange(8, dtype=torch.int32).expand(1, 1, 120 if per_token else 8, 8)
    # A document that starts and ends inside blocks, with whole blocks of its own between them.
    options = {"is_causal": is_causal, "cu_seqlens": torch.tensor([0, 20, 20, 107, 120]), "backend": backend}
    found = selected_attention(*leaves, indices, granularity=16, return_lse=True, **options)
    wanted = attention_with_lse(*leaves, "full", **options)
    grads = (torch.autograd.grad(sum(x.sin().sum() for x in results), leaves) for results in (found, wanted))
    for got, want in zip([*found, *next(grads)], [*wanted, *next(grads)], strict=True):
        assert error(got.detach(), want.detach()) <= 1e-12


def test_return_lse_decides_the_type():
    q, k, v = three()
    indices = torch.zeros(1, 1, 4, 1, dtype=torch.int32)
    assert isinstance(selected_attention(q, k, v, indices, granularity=16), torch.Tensor)
    assert isinstance(selected_attention(q, k, v, indices, granularity=16, return_lse=True), AttentionOutput)


@ROWS
def test_gradients_are_those_of_finite_differences(per_token):
    leaves = [x.requires_grad_() for x in three(20, 2, 1)]
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(-1, 2, (1, 2, 20 if per_token else 2, 1), dtype=torch.int32)

    def run(*x):
        return selected_attention(*x[:3], indices, granularity=16, is_causal=True, enable_gqa=True, sink=x[3])

    assert torch.autograd.gradcheck(run, (*leaves, sink), fast_mode=True)


def test_sink_is_one_more_key_without_a_value():
    q, k, v = three()
    sink = torch.randn(4, dtype=torch.float64)
    scores = q @ k.mT
    weights = torch.cat([scores, sink[:, None, None].expand(1, 4, 50, 1)], -1).softmax(-1)[..., :-1]
    assert error(apply_sink(scores.softmax(-1) @ v, scores.logsumexp(-1), sink), weights @ v) <= 1e-12


@pytest.mark.parametrize("value", [-torch.inf, -1e30, 1e30, torch.inf])
def test_extreme_sinks_have_finite_gradients(value):
    output = torch.randn(1, 2, 3, 4, requires_grad=True)
    lse = torch.tensor([[[0.0, -torch.inf, 50.0]] * 2], requires_grad=True)
    sink = torch.full((2,), value, requires_grad=True)
    result = apply_sink(output, lse, sink)
    assert torch.equal(result[:, :, 1], torch.zeros(1, 2, 4))
    wanted = output if value < 0 else torch.zeros_like(output)
    assert torch.equal(result[:, :, ::2], wanted[:, :, ::2])
    for grad in torch.autograd.grad(result.sum(), (output, lse, sink)):
        assert grad.isfinite().all()


def test_sink_keeps_the_dtype_of_the_output():
    output, lse = torch.randn(1, 2, 3, 4).bfloat16(), torch.randn(1, 2, 3)
    assert apply_sink(output, lse, torch.zeros(2).bfloat16()).dtype == torch.bfloat16
    assert apply_sink(output.double(), lse.double(), torch.zeros(2)).dtype == torch.float64


@pytest.mark.parametrize("host_sync", [False, True])
@settings(max_examples=60)
@given(strategy(drawn_call))
def test_normal_form_holds_blocks_once_and_nothing_else(host_sync, call: IndexCall):
    indices, counts, held = call._replace(wild=not host_sync).lists()
    blocks = -(-call.n // call.size)
    with mock.patch.object(lists, "ROWS_PER_ENTRY", 0 if call.seed % 2 else 64):
        listed = normalise_indices(indices, counts, blocks, host_sync=host_sync)
    assert listed.dtype == torch.int32 and listed.shape[-1] == min(max(call.entries, 1), blocks)
    for row, wanted in zip(listed.flatten(0, 2).tolist(), held.flatten(0, 2).tolist(), strict=True):
        inside = sorted({block for block in wanted if 0 <= block < blocks})
        assert row == inside + [blocks] * (len(row) - len(inside))
    shape = {"n": call.n, "heads": call.heads, "granularity": call.size, "is_causal": call.is_causal}
    with mock.patch.object(implementations, "allows_host_sync", lambda device: host_sync):
        selection = make_selection(indices, counts, **shape)
    assert selection.indices.shape[1] == call.scope and selection.heads == call.heads
    selection = selection.per_head()
    token = torch.arange(call.n)
    row = token if selection.per_token else token // call.size
    seen = selection.allowed()[:, :, row][..., token // call.size]
    seen = seen & (token <= token[:, None]) if call.is_causal else seen
    assert torch.equal(seen, seen_pairs(held, call.n, call.size, call.heads, call.is_causal))
    own = selection.row_blocks()
    dense = int((own + 1).sum()) if call.is_causal else len(own) * blocks
    assert float(selection.density()) == pytest.approx(
        float(selection.allowed().sum()) / (seen.shape[0] * seen.shape[1] * dense)
    )


class Operations(TorchDispatchMode):
    """Names of operations, but for views."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function._schema.returns[0].alias_info or function._schema.is_mutable:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


SORTED = ["sort", "eq", "masked_fill_", "sort"]


@pytest.mark.parametrize(
    ("per_token", "is_causal", "before"),
    [
        (False, False, ["clamp", "threshold"]),
        (False, True, ["arange", "floor_divide", "sub", "gt", "masked_fill", "threshold"]),
        (True, True, ["arange", "floor_divide", "sub", "eq", "any", "gt", "masked_fill", "threshold"]),
    ],
)
def test_normal_form_of_long_lists_takes_few_operations(per_token, is_causal, before, monkeypatch):
    monkeypatch.setattr(implementations, "allows_host_sync", lambda device: False)
    monkeypatch.setattr(lists, "is_observed", lambda *tensors: False)
    indices = IndexCall(per_token, is_causal, n=100).lists()[0]
    with Operations() as operations:
        lists.normal_form(indices, None, None, 4, 100, 16, is_causal)
    # Tests fill memory that the library allocates.
    computed = [name for name in operations.names if "empty" not in name and name != "fill_"]
    assert computed == [*before, *SORTED]


@pytest.mark.parametrize(("local", "sink"), [(0, 0), (1, 0), (2, 0), (1, 2), (3, 1)])
@CAUSAL
@ROWS
def test_implied_blocks_equal_listed_ones(per_token, is_causal, local, sink):
    call = IndexCall(per_token, is_causal, n=100, scope=2, entries=3)
    indices, blocks = call.lists()[0], 7
    own = torch.arange(indices.shape[2])[:, None] // (16 if per_token else 1)
    near = [own + step for step in range(1 - local, local)] + [torch.full_like(own, block) for block in range(sink)]
    near = [x.masked_fill((x < 0) | (x >= blocks), -1).expand(*indices.shape[:3], 1) for x in near]
    leaves = [torch.randn(2, h, 100, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    shape = {"n": 100, "heads": 4, "granularity": 16, "is_causal": is_causal}
    selection = make_selection(indices, **shape, local_blocks=local, sink_blocks=sink)
    seen = seen_pairs(torch.cat([indices, *near], -1), 100, 16, 4, is_causal)
    found = selected_attention(*leaves, selection, enable_gqa=True, return_lse=True)
    wanted = dense_attention(*leaves, seen.double())
    grads = (torch.autograd.grad(x.output.square().sum(), leaves) for x in (found, AttentionOutput(*wanted)))
    for got, want in zip([*found, *next(grads)], [*wanted, *next(grads)], strict=True):
        assert error(got.detach(), want.detach()) <= 1e-12


@BACKENDS
@pytest.mark.parametrize("scope", [1, 4])
@ROWS
def test_dropped_weights_are_those_of_the_seed(per_token, scope, backend):
    call = IndexCall(per_token, True, n=60, scope=scope)
    indices, options = call.lists()[0], {"granularity": 16, "is_causal": True, "enable_gqa": True}
    leaves = [torch.randn(2, h, 60, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    torch.manual_seed(7)
    seed = torch.randint(2**62, (1,))
    torch.manual_seed(7)
    found = selected_attention(*leaves, indices, dropout_p=0.3, backend=backend, **options)
    sample, head, token = torch.arange(2).view(2, 1, 1, 1), torch.arange(4).view(4, 1, 1), torch.arange(60)
    # Lists by blocks concatenate the samples.
    ahead, stream = (0, sample * 4 + head) if per_token else (sample * 60, head)
    kept = keep_mask(seed, stream, token[:, None] + ahead, token + ahead, 0.3)
    seen = seen_pairs(indices, 60, 16, 4, is_causal=True).double()
    wanted, _ = dense_attention(*leaves, seen, kept=kept, dropout_p=0.3)
    grads = (torch.autograd.grad(x.square().sum(), leaves) for x in (found, wanted))
    for got, want in zip([found, *next(grads)], [wanted, *next(grads)], strict=True):
        assert error(got.detach(), want.detach()) <= 1e-12


@pytest.mark.parametrize("scope", [1, 2, 4])
@pytest.mark.parametrize("per_token", [False, True])
def test_heads_of_a_list_share_one_class_of_the_plan(per_token, scope):
    call = IndexCall(per_token, n=64, batch=2, heads=4, scope=scope)
    selection = make_selection(*call.lists()[:2], n=call.n, heads=call.heads, granularity=call.size)
    plan = token_plan(selection).plan if per_token else block_plan(selection)
    (part,) = plan.parts
    assert plan.heads == 4 and len(part.by_query.rows) == scope * part.queries.tiles
    assert part.head_class.tolist() == [head * scope // 4 for head in range(4)]


@pytest.mark.parametrize("of_tensors", [10, 2**40])
@pytest.mark.parametrize("scope", [1, 2, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lists_of_tokens_run_in_chunks(is_causal, scope, of_tensors, monkeypatch):
    monkeypatch.setattr(attend, "GATHERED", 1)
    monkeypatch.setattr(attend, "OF_TENSORS", of_tensors)
    errors = IndexCall(True, is_causal, scope=scope, counted=True, padded=True).errors()
    assert max(errors.values()) < 1e-12, errors


def call_with(**changes):
    q, k, v = (torch.randn(2, h, 50, 8) for h in (4, 2, 2))
    indices = torch.zeros(2, 1, 4, 3, dtype=torch.int32)
    arguments = {"query": q, "key": k, "value": v, "indices": indices, "granularity": 16, "enable_gqa": True}
    return selected_attention(**(arguments | changes))


def integers(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def selection_of(n=50, **more):
    return make_selection(integers(2, 1, 4, 3), n=n, heads=4, granularity=16, **more)


def lesson(rows=(0, 1), chosen=0, entries=4, local_blocks=1):
    scores = torch.zeros(2, 1, len(rows), entries)
    batch = DistillBatch(torch.tensor(rows), chosen)
    return {"indices": selection_of(local_blocks=local_blocks), "distill": batch, "scores": scores}


WRONG = [
    ({"granularity": 48}, "granularity must be one of 16, 32, 64, 128, 256, got 48"),
    ({"indices": [0]}, "indices must be a Tensor, got list"),
    ({"indices": torch.zeros(2, 1, 4, 3)}, "indices must be int32 or int64, got torch.float32"),
    ({"indices": integers(2, 1, 4)}, "indices must have shape (batch, heads, rows, entries), got (2, 1, 4)"),
    ({"indices": integers(1, 1, 4, 3)}, "indices must have the query's batch size 2, got 1"),
    (
        {"indices": integers(2, 3, 4, 3)},
        "indices must be for 1 head, the 2 key heads or the 4 query heads, got 3 heads",
    ),
    (
        {"indices": integers(2, 1, 5, 3)},
        "indices must have 50 rows, one for each token, or 4, one for each block of 16 tokens, got 5 rows",
    ),
    ({"indices": integers(2, 1, 4, 3, dtype=torch.int16)}, "indices must be int32 or int64, got torch.int16"),
    ({"indices": integers(2, 1, 4, 3).to("meta")}, "indices must be on the query's device cpu, got meta"),
    (
        {"indices": integers(2, 1, 4, 3) + 4},
        "indices must be block numbers in 0 to 3, or -1 for no block, got 4 at [0, 0, 0, 0]",
    ),
    (
        {"indices": integers(2, 1, 4, 3) - 2},
        "indices must be block numbers in 0 to 3, or -1 for no block, got -2 at [0, 0, 0, 0]",
    ),
    ({"counts": integers(2, 4)}, "counts must have shape (2, 1, 4), got (2, 4)"),
    ({"counts": torch.ones(2, 1, 4)}, "counts must be int32 or int64, got torch.float32"),
    ({"counts": integers(2, 1, 4) + 4}, "counts must lie in 0 to 3, got 4 at [0, 0, 0]"),
    ({"counts": integers(2, 1, 4) - 1}, "counts must lie in 0 to 3, got -1 at [0, 0, 0]"),
    ({"cu_seqlens": [0, 50]}, "cu_seqlens must be a Tensor, got list"),
    ({"cu_seqlens": torch.tensor([0.0, 50.0])}, "cu_seqlens must be int32 or int64 of shape (documents + 1,), got"),
    ({"cu_seqlens": integers(2, dtype=torch.int16)}, "cu_seqlens must be int32 or int64 of shape (documents + 1,)"),
    ({"cu_seqlens": torch.tensor([0, 50])}, "packed sequences must have batch size 1, got 2"),
    ({"sink": 0.0}, "sink must be a Tensor, got float"),
    ({"sink": torch.zeros(2)}, "sink must have shape (4,), one logit per query head, got (2,)"),
    ({"sink": integers(4)}, "sink must be floating-point, got torch.int32"),
    ({"sink": torch.zeros(4, device="meta")}, "sink must be on the query's device cpu, got meta"),
    ({"key": torch.randn(2, 2, 66, 8)}, "key must have the query's length 50, got 66"),
    ({"enable_gqa": False}, "key must have as many heads as query, got 4 query heads and 2 key heads"),
    ({"backend": "cuda"}, "backend must be one of auto"),
    ({"indices": selection_of(), "granularity": 32}, "granularity must be that of the selection, 16, got 32"),
    ({"indices": selection_of(), "is_causal": True}, "is_causal must be that of the selection, False, got True"),
    ({"indices": selection_of(), "counts": integers(2, 1, 4)}, "counts and cu_seqlens must come with index tensors"),
    ({"indices": selection_of(n=49)}, "the selection must be for 2 samples, 4 heads and 50 tokens, got indices"),
    ({"dropout_p": 1.0}, "dropout_p must lie in [0, 1), got 1.0"),
    ({"scores": torch.zeros(2, 1, 3, 4)}, "distill must be a DistillBatch that comes with scores, got distill None"),
    (lesson() | {"indices": integers(2, 1, 4, 3)}, "distill must come with a Selection whose rows see their own block"),
    (lesson(local_blocks=0), "distill must come with a Selection whose rows see their own block, got"),
    (lesson(rows=[0, 4]), "rows of a DistillBatch must lie in 0 to 3, got 0 to 4"),
    (lesson(rows=[0], entries=5), "scores must have shape (2, heads, 1, 4), heads a divisor of 4, got (2, 1, 1, 5)"),
    (lesson(chosen=3), "chosen must lie in 0 to the 2 rows of the batch, got 3"),
    ({"pattern": "full"}, "selected_attention() got an unexpected keyword argument 'pattern'"),
    ({"causal": True}, "selected_attention() got an unexpected keyword argument 'causal'; the argument is is_causal"),
]


@pytest.mark.untyped
@pytest.mark.parametrize(("changes", "first_line"), WRONG, ids=[line for _, line in WRONG])
def test_wrong_arguments_have_a_message(changes, first_line):
    with pytest.raises((TypeError, ValueError)) as caught:
        call_with(**changes)
    assert str(caught.value).splitlines()[0].startswith(first_line)


@pytest.mark.parametrize("bounds", [[0, 30], [1, 50], [0, 30, 20, 50], [0, 51, 50], [-1, 50]])
@ROWS
def test_wrong_bounds_are_refused_on_the_cpu(per_token, bounds):
    q, k, v = three()
    indices, wrong = integers(1, 1, 50 if per_token else 4, 3), torch.tensor(bounds)
    message = rf"cu_seqlens must ascend from 0 to the sequence length 50, got \[{bounds[0]}, "
    with pytest.raises(ValueError, match=message):
        selected_attention(q, k, v, indices, granularity=16, cu_seqlens=wrong)
    with pytest.raises(ValueError, match=message):
        validate_cu_seqlens(wrong, 50)
    with pytest.raises(ValueError, match="query's device cpu, got meta"):
        selected_attention(q, k, v, indices, granularity=16, cu_seqlens=wrong.to("meta"))


@pytest.mark.parametrize("backend", ["reference", "cpu", NATIVE])
@CAUSAL
@ROWS
def test_backends_that_plan_on_the_host_run_device_bounds(per_token, is_causal, backend, monkeypatch):
    monkeypatch.setattr(implementations, "allows_host_sync", lambda device: False)
    call = IndexCall(per_token, is_causal, 75, batch=1, scope=2, entries=5, documents=4)
    for what, wrong in call.errors(backend).items():
        assert wrong <= 1e-12, what


def test_packed_sequences_are_not_mapped():
    q, k, v = three()
    many = torch.stack([q, q])
    options = {"granularity": 16, "cu_seqlens": PACKED}
    with pytest.raises(ValueError, match="vmap must not map packed sequences"):
        torch.vmap(lambda x: selected_attention(x, k, v, integers(1, 1, 4, 3), **options))(many.requires_grad_())


def test_a_backend_by_name_never_falls_back():
    for rows in (4, 50):
        with pytest.raises(BackendUnsupported, match="CUDA"):
            call_with(indices=integers(2, 1, rows, 3), backend="triton")


def test_validation_ignores_entries_past_the_count():
    indices = torch.tensor([[0, 99], [-1, -5]], dtype=torch.int32)
    validate_indices(indices, 3, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"got -5 at \[1, 1\]"):
        validate_indices(indices, 3, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"counts must have shape \(2,\)"):
        validate_indices(indices, 3, torch.tensor([[1, 1]]))


def test_transforms_see_the_operation():
    q, k, v = three(20, 2, 2)
    indices = torch.randint(-1, 2, (1, 1, 20, 2), dtype=torch.int32)
    seen = seen_pairs(indices, 20, 16, 2, False).double()

    def ours(x):
        return selected_attention(x, k, v, indices, granularity=16).sin().sum()

    def dense(x):
        return dense_attention(x, k, v, seen)[0].sin().sum()

    assert error(torch.func.grad(ours)(q), torch.func.grad(dense)(q)) <= 1e-12
    many = torch.randn(3, *q.shape, dtype=torch.float64)
    mapped = torch.vmap(lambda x: selected_attention(x, k, v, indices, granularity=16))(many)
    for one, got in zip(many, mapped, strict=True):
        assert error(got, dense_attention(one, k, v, seen)[0]) <= 1e-12
    several = torch.randint(-1, 2, (3, 1, 1, 20, 2), dtype=torch.int32)
    for is_causal in (False, True):
        options = {"granularity": 16, "is_causal": is_causal}
        mapped = torch.vmap(lambda i, k, options=options: selected_attention(q, k, v, i, **options))(several, many)
        for one, key, got in zip(several, many, mapped, strict=True):
            assert error(got, dense_attention(q, key, v, seen_pairs(one, 20, 16, 2, is_causal).double())[0]) <= 1e-12
    with pytest.raises(NotImplementedError, match="is not implemented"):
        torch.func.grad(lambda x: torch.func.grad(ours)(x).square().sum())(q)


@pytest.mark.parametrize("local", [0, 1])
@ROWS
def test_mapped_calls_drop_weights_of_their_own(per_token, local):
    q, k, v = three(40, 2, 2)
    rows = 40 if per_token else 3
    selection = make_selection(integers(1, 1, rows, 2), n=40, heads=2, granularity=16, local_blocks=local)

    def drop(x):
        return selected_attention(x, k, v, selection, dropout_p=0.5)

    for randomness in ("same", "different"):
        first, second = torch.vmap(drop, randomness=randomness)(torch.stack([q, q]))
        assert torch.equal(first, second) == (randomness == "same")
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(drop)(torch.stack([q, q]))


def test_transforms_of_distillation_are_refused():
    options = {"query": torch.randn(2, 4, 50, 8), "granularity": None} | lesson()
    with pytest.raises(ValueError, match=r"outside of torch\.func transforms"):
        torch.func.grad(lambda scores: call_with(**(options | {"scores": scores})).sum())(options["scores"])


@pytest.mark.parametrize("k", [1, 2, 3, 7, 16, 33])
def test_the_network_sorts_rows_of_any_length(k, monkeypatch):
    monkeypatch.setattr(lists, "ROWS_PER_ENTRY", 0)
    # Networks that sort all rows of two values sort all rows.
    rows = torch.randint(2, (1, 2, 4096, k), dtype=torch.int32)
    assert torch.equal(lists._sorted_by_network(rows), rows.sort(-1).values)


@pytest.mark.parametrize("host_sync", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_normal_form_in_parts_equals_the_whole(counted, host_sync, monkeypatch):
    indices, counts, _ = IndexCall(True, scope=2, counted=counted, n=70).lists()
    first, last = torch.arange(70) // 32, torch.arange(70) // 16
    given = indices, counts, 5, last, first
    whole = normalise_indices(*given, host_sync=host_sync)
    monkeypatch.setattr(lists, "NORMALISED", 100)
    assert torch.equal(normalise_indices(*given, host_sync=host_sync), whole)


@pytest.mark.parametrize("order", ["ascending", "descending", "holes", "duplicates"])
def test_normal_form_of_a_list_in_any_order(order):
    lists = {
        "ascending": [[0, 2, 3, -1], [1, -1, -1, -1]],
        "descending": [[3, 2, 0, -1], [1, -1, -1, -1]],
        "holes": [[0, -1, 2, 3], [-1, -1, 1, -1]],
        "duplicates": [[0, 2, 2, 3], [1, 1, 1, 1]],
    }
    given = torch.tensor([[lists[order]]], dtype=torch.int32)
    for host_sync in (False, True):
        found = normalise_indices(given, None, 4, host_sync=host_sync)
        assert found.tolist() == [[[[0, 2, 3, 4], [1, 4, 4, 4]]]]
    last, first = torch.tensor([2, 0]), torch.tensor([1, 0])
    assert normalise_indices(given, None, 4, last, first).tolist() == [[[[2, 4, 4, 4], [4, 4, 4, 4]]]]


@pytest.mark.parametrize("scope", [1, 2])
@ROWS
def test_lists_of_packed_documents_are_stored_once(per_token, scope):
    indices = torch.zeros(1, scope, 50 if per_token else 4, 3, dtype=torch.int32)
    selection = make_selection(indices, n=50, heads=4, granularity=16, is_causal=True, cu_seqlens=PACKED)
    assert (selection.indices.shape[1], selection.heads) == (scope, 4)
