"""Which blocks are kept where scores are equal, and which weights dropout takes where tokens choose."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels.test_selection import GivenScores, drawn, inputs, seen_pairs
from oracle import dense_attention, error

from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.kernels.dropout import keep_mask
from dilated_attention_pytorch.selection import attend, rank
from dilated_attention_pytorch.selection.attention import attend_selection
from dilated_attention_pytorch.selection.rank import Budget
from dilated_attention_pytorch.selection.types import SelectionSettings, shared_blocks

BACKENDS = [
    "cpu",
    pytest.param("native", marks=pytest.mark.skipif(not library_path().exists(), reason="C++ kernel not built")),
]


@pytest.mark.parametrize("host_sync", [True, False])
def test_of_equal_blocks_the_first_are_kept(host_sync):
    scores = torch.randint(3, (2, 3, 40, 40)).float()
    settings = SelectionSettings(Budget(0.3, None, 2, None), 16, 16, False, False, 16, 1, 0)
    found, _ = rank.rank(GivenScores(scores, settings), torch.arange(40), None, host_sync)
    own = torch.eye(40, dtype=torch.bool)
    order = scores.masked_fill(own, -1.0).sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(found, order[..., :11].sort(-1).values.int())


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
    output, lse = attend_selection(*tensors, chosen, dropout_p=0.4, backend=backend)
    stream, token = torch.arange(8).view(2, 4, 1, 1), torch.arange(70)
    dropped = {"kept": keep_mask(seed, stream, token[:, None], token, 0.4), "dropout_p": 0.4}
    wanted, wanted_lse = dense_attention(*double, seen_pairs(chosen).double(), **dropped)
    grads = torch.autograd.grad((output * weights).sum(), tensors)
    wanted_grads = torch.autograd.grad((wanted * weights).sum(), double)
    for got, want in zip((output, lse, *grads), (wanted, wanted_lse, *wanted_grads), strict=True):
        assert error(got.detach(), want.detach()) < (1e-12 if backend == "cpu" else 1e-5)
