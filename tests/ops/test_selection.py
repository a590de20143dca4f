"""Which blocks are kept where scores are equal, and which weights dropout takes where tokens choose."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels.test_selection import LEARNED, GivenScores, drawn, inputs, seen_pairs
from oracle import dense_attention, error

from dilated_attention_pytorch import DistillBatch, make_selection
from dilated_attention_pytorch.kernels.cpu import native
from dilated_attention_pytorch.kernels.dropout import keep_mask
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive
from dilated_attention_pytorch.selection import attend, rank
from dilated_attention_pytorch.selection import scores as scoring
from dilated_attention_pytorch.selection.attention import selected_attention
from dilated_attention_pytorch.selection.backend import select
from dilated_attention_pytorch.selection.rank import Budget
from dilated_attention_pytorch.selection.types import SelectionSettings, shared_blocks

BACKENDS = [
    "cpu",
    pytest.param("native", marks=pytest.mark.skipif(not native.library_path().exists(), reason="C++ kernel not built")),
]


@pytest.mark.parametrize("host_sync", [True, False])
def test_of_equal_blocks_the_first_are_kept(host_sync):
    scores = torch.randint(3, (2, 3, 40, 40)).float()
    settings = SelectionSettings(Budget(0.3, None, 2, None), 16, 16, False, False, 16, 1, 0)
    found, _ = rank.rank(GivenScores(scores, settings), torch.arange(40), None, host_sync)
    own = torch.eye(40, dtype=torch.bool)
    order = scores.masked_fill(own, -1.0).sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(found, order[..., :11].sort(-1).values.int())


@pytest.mark.parametrize("coverage", [None, 0.8])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("kept", "sink"), [(0.3, 0), (1.0, 2)])
def test_causal_rows_rank_only_blocks_before_them(coverage, per_token, kept, sink):
    """A host that may read values ranks fewer columns; the lists are the same."""
    scores = torch.randn(2, 3, 36 if per_token else 12, 12, dtype=torch.float64)
    settings = SelectionSettings(Budget(kept, coverage, 2, None), 3, 3, True, per_token, 3, 2, sink)
    given = GivenScores(scores, settings, visible=torch.rand(2, 3, 12) > 0.2)
    for seed in (None, torch.tensor([5])):
        few, counts = rank.rank(given, torch.arange(scores.shape[2]), seed, True)
        all_, wanted = rank.rank(given, torch.arange(scores.shape[2]), seed, False)
        assert torch.equal(counts, wanted)
        assert torch.equal(few, all_[..., : few.shape[-1]]) and bool((all_[..., few.shape[-1] :] == 12).all())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("granularity", ["block", "token"])
@pytest.mark.parametrize("n", [192, 200])
def test_blocks_are_the_same_without_the_library(monkeypatch, is_causal, granularity, n):
    config = AdaptiveConfig(0.6, granularity=granularity, score_unit=2, sink_blocks=0)
    layer = BlockSparseAdaptive([n], [1], 2, 8, config, block_size=16).double().eval()
    q, k = torch.randn(2, 2, 2, n, 8, dtype=torch.float64)
    padding = torch.zeros(2, n, dtype=torch.bool)
    padding[1, :20] = True
    for mask in (None, padding):
        found = select(layer.score_blocks(q, k, is_causal, mask), n)
        with monkeypatch.context() as without:
            without.setattr(native, "device_problem", lambda device: "turned off")
            without.setattr(scoring, "CHUNK", 2000)
            wanted = select(layer.score_blocks(q, k, is_causal, mask), n)
        assert torch.equal(found.indices, wanted.indices) and torch.equal(found.counts, wanted.counts)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("t", [1, 2, 7])
def test_kept_and_visible_blocks_are_counted_without_pairs(t, is_causal):
    for local, sink in itertools.product((1, 2, 4, 9), (0, 1, 3, 9)):
        visible = torch.rand(2, 3, t) > 0.3
        own = column = torch.arange(t)
        shared = shared_blocks(own, t, local, sink, is_causal)
        others = column < own[:, None] if is_causal else column != own[:, None]
        taken, seen = rank.counted_blocks(visible, local, sink, is_causal)
        assert torch.equal(taken, (shared & others & visible[:, :, None]).sum(-1) + 1)
        reach = column <= own[:, None] if is_causal else torch.ones(t, t, dtype=torch.bool)
        assert torch.equal(seen, ((reach & visible[:, :, None]) | (column == own[:, None])).sum(-1))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("scope", [1, 2, 4])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_given_scores_learn_the_mass_of_blocks(is_causal, per_token, scope, apart, monkeypatch):
    monkeypatch.setattr(attend, "GATHERED", 1 if apart else 2**29)
    monkeypatch.setattr(attend, "OF_TENSORS", 2**40)
    n, size, t, chosen = 64, 16, 4, 2
    rows = n if per_token else t
    lists = torch.randint(-1, t, (2, 2, rows, 1))
    shape = {"n": n, "heads": 4, "granularity": size, "is_causal": is_causal}
    selection = make_selection(lists, **shape, local_blocks=1)
    q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h in (4, 2, 2))
    padding = torch.arange(n) >= torch.tensor([n, 40])[:, None]
    row = torch.arange(rows)[:: rows // 4]
    scores = torch.randn(2, scope, 4, t, dtype=torch.float64, requires_grad=True)
    batch = DistillBatch(row, chosen, weight=0.5)
    options = {"enable_gqa": True, "key_padding_mask": padding, "distill": batch, "scores": scores}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        output = selected_attention(q, k, v, selection, **options)
        (found,) = torch.autograd.grad(output.sum(), scores)

    seen = (torch.ones(n, n).tril() if is_causal else torch.ones(n, n)).bool() & ~padding[:, None, None]
    own, block = row // (size if per_token else 1), torch.arange(t)
    listed = selection.per_head().allowed()
    possible = block <= own[:, None] if is_causal else torch.ones(4, t, dtype=torch.bool)
    possible = possible & seen.any(2).unflatten(-1, (t, size)).any(-1)[:, :, None] | (block == own[:, None])
    loss = 0
    for part, which in ((slice(chosen), listed[:, :, row[:chosen]]), (slice(chosen, None), possible[..., chosen:, :])):
        logits = (q @ k.repeat_interleave(2, 1).mT * 8**-0.5).masked_fill(~seen, -torch.inf)
        mass = logits.exp().unflatten(-1, (t, size)).sum(-1)
        if part.start is None:
            token = torch.arange(n) if per_token else torch.arange(n) // size
            mass = mass * listed[:, :, token]
        mass = (mass / mass.sum(-1, keepdim=True)).masked_fill(padding[:, None, :, None], 0.0)
        mass = (mass if per_token else mass.unflatten(2, (t, size)).sum(3))[:, :, row[part]]
        some = mass.sum(-1, keepdim=True) > 0
        mass = torch.where(some, mass / mass.sum(-1, keepdim=True), 0.0)
        logits = scores.repeat_interleave(4 // scope, 1)[:, :, part].masked_fill(block == own[part, None], 0.0)
        logits = logits.masked_fill(~which, -torch.inf).log_softmax(-1)
        loss = loss - 0.5 * torch.where(mass > 0, mass * logits, 0.0).sum(-1).mean()
    (wanted,) = torch.autograd.grad(loss, scores)
    assert error(found, wanted) <= 1e-12


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_token_mode_dropout_depends_on_sample_and_head(backend, apart, monkeypatch):
    monkeypatch.setattr(attend, "GATHERED", 1 if apart else 2**29)
    chosen = drawn(batch=2, heads=4, n=70, is_causal=True, per_token=True, most=2)
    dtype = torch.float64 if backend == "cpu" else torch.float32
    tensors = [x.to(dtype).requires_grad_() for x in inputs(chosen, 2)]
    double = [x.detach().double().requires_grad_() for x in tensors]
    weights = torch.randn(2, 4, 70, 12, dtype=torch.float64)
    torch.manual_seed(3)
    seed = torch.randint(2**62, (1,))
    torch.manual_seed(3)
    output, lse = selected_attention(*tensors, chosen, dropout_p=0.4, backend=backend, **LEARNED)
    stream, token = torch.arange(8).view(2, 4, 1, 1), torch.arange(70)
    dropped = {"kept": keep_mask(seed, stream, token[:, None], token, 0.4), "dropout_p": 0.4}
    wanted, wanted_lse = dense_attention(*double, seen_pairs(chosen).double(), **dropped)
    grads = torch.autograd.grad((output * weights).sum(), tensors)
    wanted_grads = torch.autograd.grad((wanted * weights).sum(), double)
    for got, want in zip((output, lse, *grads), (wanted, wanted_lse, *wanted_grads), strict=True):
        assert error(got.detach(), want.detach()) < (1e-12 if backend == "cpu" else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_want_no_more_blocks_than_there_is_room_for(dtype):
    blocks = torch.arange(1, 400)
    torch.set_default_dtype(dtype)
    try:
        for kept in (0.7, 0.82, 0.575, 0.1, 1 / 3):
            budget = Budget(kept, None, 1, None)
            rooms, wanted = budget.rooms(blocks), budget.wanted(blocks)
            assert torch.equal(rooms + 1, wanted.clamp(min=1))
            assert [budget.room(n) for n in blocks.tolist()] == rooms.tolist()
    finally:
        torch.set_default_dtype(torch.float32)
