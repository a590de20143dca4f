"""Attention over block lists that a tensor holds, by query blocks and by tokens, against the dense formula."""

from __future__ import annotations

import pytest
import torch
from oracle import dense_attention, error, selecting_scores

from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.cpu import native
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.selection import attend as attend_module
from dilated_attention_pytorch.selection.attention import selected_attention, weighted_attention
from dilated_attention_pytorch.selection.plan import block_plan, token_plan
from dilated_attention_pytorch.selection.scores import BlockScores
from dilated_attention_pytorch.selection.types import Selection, shared_blocks


def drawn(batch=2, heads=4, n=150, size=16, *, is_causal, per_token, local=2, sink=1, most=5, seed=0):
    """A selection of random blocks, of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    t = -(-n // size)
    rows = n if per_token else t
    own = torch.arange(rows) // size if per_token else torch.arange(rows)
    shared = shared_blocks(own, t, local, sink, is_causal)
    open_to_choice = ~shared & (torch.arange(t) < own[:, None] if is_causal else torch.ones(rows, t, dtype=torch.bool))
    luck = torch.rand(batch, heads, rows, t, generator=generator).masked_fill(~open_to_choice, -1.0)
    best, indices = luck.topk(min(most, t))
    listed = (best >= 0) & (
        torch.arange(min(most, t)) < torch.randint(most + 1, (batch, heads, rows, 1), generator=generator)
    )
    indices = indices.masked_fill(~listed, t).sort(-1).values.int()
    return Selection(indices, listed.sum(-1).int(), n, size, is_causal, per_token, local, sink)


LEARNED = {"enable_gqa": True, "return_lse": True}


class GivenScores(BlockScores):
    """Scores (b, h, scored rows, t) that are given, in chunks of 7 rows."""

    def __init__(self, scores, settings, visible=None, factors=None, present=None):
        self.settings, self.factors, self.present = settings, factors, present
        self.per_token, self.is_causal = settings.per_token, settings.is_causal
        self.selecting_rows = 1 if settings.per_token else settings.block_size // settings.row_unit
        self.visible = torch.ones(*scores.shape[:2], scores.shape[3], dtype=torch.bool) if visible is None else visible
        self.scores = selecting_scores(self, scores)

    def chunk(self):
        return 7

    def ranked(self, begin, end, width=None):
        return self.scores[:, :, begin:end, :width]


def seen_pairs(selection):
    """bool (b, h, n, n)"""
    token = torch.arange(selection.n)
    block = token // selection.block_size
    seen = selection.allowed()[:, :, token if selection.per_token else block][..., block]
    return seen & (token <= token[:, None]) if selection.is_causal else seen


def inputs(selection, key_heads, width=8, value_width=12):
    batch, heads = selection.indices.shape[:2]
    shapes = [(batch, heads, width), (batch, key_heads, width), (batch, key_heads, value_width)]
    # Heads inside tokens, as modules have them.
    return [torch.randn(b, selection.n, h, d, dtype=torch.float64).transpose(1, 2) for b, h, d in shapes]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("n", [160, 150, 9])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_output_lse_and_gradients_match_the_dense_formula(per_token, is_causal, n, key_heads, padded):
    selection = drawn(n=n, is_causal=is_causal, per_token=per_token)
    tensors = [x.requires_grad_() for x in inputs(selection, key_heads)]
    padding = torch.arange(n) >= torch.tensor([n, n // 2])[:, None] if padded else None
    grad_output, grad_lse = torch.randn(2, 4, n, 12, dtype=torch.float64), torch.randn(2, 4, n, dtype=torch.float64)
    outcomes = []
    for attend in (
        lambda *x: selected_attention(*x, selection, key_padding_mask=padding, backend="cpu", **LEARNED),
        lambda *x: dense_attention(*x, seen_pairs(selection).double(), key_padding_mask=padding),
    ):
        output, lse = attend(*tensors)
        finite = torch.where(lse.isfinite(), lse, 0.0)
        grads = torch.autograd.grad((output * grad_output).sum() + (finite * grad_lse).sum(), tensors)
        outcomes.append((output, lse, *grads))
    for got, wanted in zip(*outcomes, strict=True):
        assert got.shape == wanted.shape
        assert error(got, wanted) < 1e-12


BOTH = pytest.mark.parametrize("is_causal", [False, True])
ROWS = pytest.mark.parametrize("per_token", [False, True])


@pytest.mark.parametrize("n", [96, 90, 5])
@BOTH
def test_plan_has_the_pairs_of_the_selection(is_causal, n):
    selection = drawn(batch=2, heads=3, n=n, is_causal=is_causal, per_token=False)
    plan = block_plan(selection)
    dense = plan.to_dense().view(3, 2, n, 2, n)
    for sample in range(2):
        assert torch.equal(dense[:, sample, :, sample].bool(), seen_pairs(selection)[sample])
        assert not dense[:, sample, :, 1 - sample].any()
    assert dense.max() == 1
    assert plan.blocks == int(selection.allowed().sum())
    (part,) = plan.parts
    met = {tuple(entry) for entry in zip(*(x.tolist() for x in part.by_query.entries()[:2]), strict=True)}
    tiles = part.queries.tiles
    back = {
        (row // tiles * tiles + tile, row % tiles)
        for row, tile in zip(*(x.tolist() for x in part.by_key.entries()[:2]), strict=True)
    }
    assert met == back


def test_pairs_of_a_last_block_with_rows_missing_are_masked():
    selection = drawn(batch=2, heads=3, n=150, is_causal=False, per_token=False)
    (part,), last = block_plan(selection).parts, -(-150 // 16) - 1
    blocks = last + 1
    for walk, also_row in ((part.by_query, False), (part.by_key, True)):
        row, tile, mask = walk.entries()
        cut = (tile % blocks == last) | ((row % blocks == last) & also_row)
        assert torch.equal(mask >= 0, cut) and cut.any()


@BOTH
@ROWS
def test_density_counts_blocks(per_token, is_causal):
    for local, sink in ((1, 0), (2, 1), (3, 4), (20, 20)):
        selection = drawn(n=150, is_causal=is_causal, per_token=per_token, local=local, sink=sink)
        own = selection.row_blocks()
        visible = (own + 1).sum() if is_causal else len(own) * selection.blocks
        wanted = selection.allowed().sum() / (8 * visible)
        assert float(selection.density()) == pytest.approx(float(wanted))


def test_gathered_rows_are_the_tokens_that_list_their_tile():
    selection = drawn(batch=2, heads=2, n=70, is_causal=False, per_token=True)
    gathered = token_plan(selection)
    (part,) = gathered.plan.parts
    row, tile, _ = part.by_query.entries()
    met = {(int(r) // part.queries.tiles, int(r) % part.queries.tiles): int(x) for r, x in zip(row, tile, strict=True)}
    chosen = set()
    for head in range(2):
        for place, source in enumerate(gathered.source[head].tolist()):
            if source >= 0:
                sample, token = divmod(source, 70)
                block = met[head, place // 16] - sample * selection.blocks
                chosen.add((sample, head, token, block))
    listed = selection.indices < selection.blocks
    wanted = {(*at[:3], int(selection.indices[at])) for at in map(tuple, listed.nonzero().tolist())}
    assert chosen == wanted


def test_hopper_refuses_queries_gathered_by_their_choice():
    selection = drawn(batch=2, heads=2, n=70, is_causal=True, per_token=True)
    plan = token_plan(selection).plan
    query, key = torch.randn(1, 2, plan.n, 64), torch.randn(1, 2, 140, 64)
    reason = hopper_backend.why_not(AttentionCall(query, key, key, plan, 0.1))
    assert reason == f"needs as many keys as queries, got 140 and {plan.n}"


@BOTH
@ROWS
def test_split_heads_with_dropout_pass_gradcheck(per_token, is_causal, monkeypatch):
    monkeypatch.setattr(attend_module, "GATHERED", 1)
    selection = drawn(batch=2, heads=2, n=20, is_causal=is_causal, per_token=per_token, local=1, most=1)
    tensors = [x.requires_grad_() for x in inputs(selection, 1, 4, 3)]

    def attend(*x):
        torch.manual_seed(0)
        return selected_attention(*x, selection, dropout_p=0.3, backend="cpu", **LEARNED)

    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)


@BOTH
@ROWS
def test_zero_bias_changes_nothing(per_token, is_causal):
    selection = drawn(is_causal=is_causal, per_token=per_token)
    x = inputs(selection, 2)
    none = torch.zeros(*selection.indices.shape[:3], selection.blocks, dtype=torch.float64)
    padding = torch.arange(150) >= torch.tensor([150, 0])[:, None]
    wanted = selected_attention(*x, selection, key_padding_mask=padding, backend="cpu", enable_gqa=True)
    assert error(weighted_attention(*x, selection, none, key_padding_mask=padding), wanted) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@BOTH
@ROWS
def test_native_kernel_matches_torch(per_token, is_causal, dtype):
    if not native.library_path().exists():
        pytest.skip("the C++ kernel is not built")
    selection = drawn(is_causal=is_causal, per_token=per_token)
    tensors = [x.to(dtype).requires_grad_() for x in inputs(selection, 2)]
    weights = torch.randn(2, 4, 150, 12)
    found = []
    for backend in ("native", "cpu"):
        output, lse = selected_attention(*tensors, selection, backend=backend, **LEARNED)
        found.append((output, lse, *torch.autograd.grad((output * weights).sum(), tensors)))
    for got, wanted in zip(*found, strict=True):
        assert error(got, wanted) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_a_selection_for_other_tensors_is_refused():
    selection = drawn(n=64, is_causal=False, per_token=False)
    with pytest.raises(ValueError, match="64 tokens"):
        selected_attention(*torch.randn(3, 2, 4, 65, 8).unbind(), selection)
    with pytest.raises(ValueError, match="n <= 8192"):
        weighted_attention(
            *torch.randn(3, 1, 1, 8200, 2).unbind(),
            drawn(1, 1, 8200, 256, is_causal=False, per_token=False),
            torch.zeros(1, 1, 33, 33),
        )
