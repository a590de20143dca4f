"""Query heads that share one score and one list of blocks."""

from __future__ import annotations

import pytest
import torch
from oracle import dense_attention, error

from dilated_attention_pytorch import make_selection, selected_attention
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive, MultiheadBlockSparseAdaptive, fit_scorers
from dilated_attention_pytorch.nn.adaptive.controls import LayerCall, attend_by, captured_mass, copied_state, shares_of
from dilated_attention_pytorch.selection import scores as scores_module
from dilated_attention_pytorch.selection.backend import select
from dilated_attention_pytorch.selection.types import DistillBatch

GROUPS = {
    "two heads with keys of their own": (4, 4, {"select": "group", "group_size": 2}),
    "heads of a key head": (4, 2, {"select": "group"}),
    "half of the heads of a key head": (8, 2, {"select": "group", "group_size": 2}),
    "all heads": (4, 2, {"select": "all"}),
}
SHARED = pytest.mark.parametrize("name", GROUPS)
ROWS = pytest.mark.parametrize("granularity", ["block", "token"])


def grouped(name, width=8, **settings):
    heads, key_heads, config = GROUPS[name]
    usual = {"base_sparsity": 0.6, "local_blocks": 1, "sink_blocks": 0, "score_unit": 4, "hidden_dim": 8}
    torch.manual_seed(0)
    config = AdaptiveConfig(**(usual | {"match_rank": 6} | config | settings))
    return BlockSparseAdaptive([64], [1], heads, width, config, block_size=16, num_kv_heads=key_heads).double()


def drawn(name, n=100, width=8, **more):
    heads, key_heads, _ = GROUPS[name]
    torch.manual_seed(1)
    return [torch.randn(2, n, h, width, dtype=torch.float64, **more) for h in (heads, key_heads, key_heads)]


@ROWS
@pytest.mark.parametrize("share", [False, True])
def test_lists_of_one_key_head_score_as_with_repeated_keys(granularity, share):
    torch.manual_seed(0)
    config = AdaptiveConfig(0.5, granularity=granularity, hidden_dim=8, match_rank=6, share_across_heads=share)
    one, each = (BlockSparseAdaptive([64], [1], 6, 8, config, block_size=16, num_kv_heads=g).double() for g in (2, 6))
    each.load_state_dict(one.state_dict())
    query, key = torch.randn(2, 6, 100, 8).double(), torch.randn(2, 2, 100, 8).double()
    repeated = key.repeat_interleave(3, 1)
    scores = [module.score_blocks(query, keys, True) for module, keys in ((one, key), (each, repeated))]
    found, wanted = (x.of_all(torch.arange(x.row_count)) for x in scores)
    assert error(found, wanted) < 1e-12
    slope = torch.randn_like(found)
    (found * slope).sum().backward()
    (wanted * slope).sum().backward()
    for mine, other in zip(one.parameters(), each.parameters(), strict=True):
        assert error(mine.grad, other.grad) < 1e-12
    fits = [
        fit_scorers(m, lambda m=m, k=k: m(*(x.transpose(1, 2) for x in (query, k, k)), True))
        for m, k in ((one, key), (each, repeated))
    ]
    assert fits[0] == fits[1] and error(one.scorer.match_key, each.scorer.match_key) < 1e-9


@SHARED
def test_scores_are_those_of_the_formula(name):
    """Per token, against projections summed head by head, and for a GPU's factors."""
    module, (q, k, _) = grouped(name, temperature=0.7), drawn(name, 96)
    scorer = module.scorer
    scorer.requires_grad_(False)
    torch.nn.init.normal_(scorer.match_query)
    torch.nn.init.normal_(scorer.match_key)
    lists, group, shared = scorer.lists, scorer.group, q.shape[2] // k.shape[2]
    scores = module.score_blocks(q.transpose(1, 2), k.transpose(1, 2), True)
    found = scores.ranked(0, 96)
    units = k.unflatten(1, (6, 4, 4)).mean(3)
    for one in range(lists):
        heads = range(one * group, (one + 1) * group)
        keys = sorted({head // shared for head in heads})
        # Lists that read one key head have a projection each.
        projections = {key: (one if lists >= k.shape[2] else key) for key in keys}
        left = sum(q[:, :, head] @ scorer.match_query[head] for head in heads)
        right = sum(units[:, :, :, key] @ scorer.match_key[projections[key]] for key in keys)
        match = torch.einsum("bnp,btup->bntu", left, right).amax(-1) / 6**0.5
        blocks = k[:, :, keys].unflatten(1, (6, 16))
        summary = torch.cat([blocks.mean(2), blocks.amax(2), blocks.amin(2)], -1).mean(2) @ scorer.summary[one]
        means = q[:, :, list(heads)].unflatten(1, (6, 16)).mean((2, 3)).roll(1, 1)
        mlp = scorer.importance(means, summary, one).repeat_interleave(16, 1)
        assert error(found[:, one], (mlp + match) / scorer.temperature[one]) < 1e-12
    made = scores.factors
    match = torch.einsum("bhrp,bhtup->bhrtu", made.own, made.right).amax(-1) / 6**0.5
    assert made.project is None and error(match, scores._match(*_all_pairs(scores)) / 6**0.5) < 1e-12


def _all_pairs(scores):
    return torch.arange(96), scores.matched[:, :, None], None


@ROWS
@pytest.mark.parametrize("is_causal", [False, True])
@SHARED
def test_output_and_gradients_are_those_of_the_shared_lists(name, is_causal, granularity):
    module = grouped(name, granularity=granularity)
    inputs = drawn(name, requires_grad=True)
    output, pattern = module(*inputs, is_causal, True)
    chosen = pattern.selection
    assert chosen.group == module.scorer.group and chosen.indices.shape[1] == module.scorer.lists
    row = torch.arange(100)
    row = row if chosen.per_token else row // 16
    pairs = chosen.allowed().repeat_interleave(chosen.group, 1)[:, :, row][..., torch.arange(100) // 16]
    pairs = pairs & torch.ones(100, 100, dtype=torch.bool).tril() if is_causal else pairs
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in inputs]
    wanted, _ = dense_attention(*leaves, pairs.double())
    assert error(output.transpose(1, 2), wanted) < 1e-12
    slope = torch.randn_like(wanted)
    got = torch.autograd.grad(output, inputs, slope.transpose(1, 2))
    for mine, other in zip(got, torch.autograd.grad(wanted, leaves, slope), strict=True):
        assert error(mine.transpose(1, 2), other) < 1e-12
    seen = (
        torch.ones(100, 7, dtype=torch.bool) if not is_causal else torch.arange(7) <= (torch.arange(100) // 16)[:, None]
    )
    counted = chosen.allowed()[:, :, row].double().mean((0, 1)).sum() / seen.sum()
    weights = float(pattern.density) - float(counted)
    assert abs(weights) < (1e-12 if chosen.per_token else 0.02)  # A last block of 4 queries counts as a block.


@SHARED
def test_training_and_controls_of_shared_lists(name):
    """A fitted start captures more than the sketch, the best shared lists the most; distillation lowers the loss."""
    torch.manual_seed(0)
    axes = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0] * 6.0 * 0.6 ** torch.arange(8)
    module = grouped(name, score_unit=1, match_rank=2, distill_rows=1.0)
    sketch = copied_state(module)
    # Heads agree in part.
    inputs = [x.lerp(x[:, :, :1].expand_as(x), 0.5) @ axes for x in drawn(name, 192)]
    call = LayerCall(*inputs, True, None)
    assert fit_scorers(module, lambda: module(*inputs, is_causal=True)) == [""]
    found = shares_of(captured_mass(module, call, sketch, 256))
    assert max(found["random"], found["untrained"]) + 0.05 < found["learned"] < found["oracle"]
    optimizer, losses = torch.optim.Adam(module.parameters(), 2e-2), []
    # The last bias moves all scores of a row alike.
    moved = [x for name, x in module.named_parameters() if not name.endswith("bias_1")]
    for _ in range(8):
        optimizer.zero_grad()
        module(*(x.requires_grad_() for x in inputs), is_causal=True).square().mean().backward()
        assert all(x.grad.isfinite().all() and (x.grad.abs() > 1e-12).any() for x in moved)
        optimizer.step()
        losses.append(module.statistics()["loss"])
    assert losses[-1] < 0.6 * losses[0] and module.statistics()["density"] == pytest.approx(found["density"])
    made = [attend_by(x, module, call, sketch, torch.Generator()) for x in ("oracle", "random", "learned", "dense")]
    errors = [float((x - made[3]).square().mean()) for x in made]
    assert errors[0] < errors[2] < errors[1]


@SHARED
def test_long_rows_and_loss_of_weighted_blocks(name, monkeypatch):
    """Super-blocks rank by bounds of the shared score; study modes weigh the blocks of a list in all its heads."""
    module, (q, k, v) = grouped(name, granularity="token", base_sparsity=0.9), drawn(name, 640)
    heads = q.transpose(1, 2), k.transpose(1, 2)
    whole = module.score_blocks(*heads, True).ranked(600, 640)
    monkeypatch.setattr(scores_module, "ALL_PAIRS", 16)
    monkeypatch.setattr(scores_module, "SUPER", 4)
    scores = module.score_blocks(*heads, True)
    found = scores.ranked(600, 640)
    seen = found > -torch.inf
    assert 0 < seen.sum() < seen.numel() and error(found[seen], whole[seen]) < 1e-12
    bounds = scores.super_bounds(600, 640)[..., :9]
    assert (bounds >= whole.unflatten(-1, (-1, 4)).amax(-1)[..., :9] * 0.999 - 1e-9).all()
    monkeypatch.undo()
    study = grouped(name, hard_sparsity=False)
    study(q[:, :100], k[:, :100], v[:, :100], True).sum().backward()
    assert (study.scorer.match_query.grad != 0).any()


def test_a_key_of_one_head_that_is_not_finite_empties_the_block():
    module, (q, k, _) = grouped("all heads").eval(), drawn("all heads", 128)
    k[0, 20, 1, 3] = torch.nan
    scores = module.score_blocks(q.transpose(1, 2), k.transpose(1, 2), True)
    assert not scores.visible[0, 0, 1] and scores.visible.sum() == 15
    assert not (select(scores, 128).indices[0] == 1).any()


@pytest.mark.parametrize("padded", [False, True])
def test_scores_of_shared_lists_learn_without_visible_blocks(padded):
    """Blocks that may be predicted are by default those with a key that is not padding, for every list."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 40, 8, dtype=torch.float64), torch.randn(2, 2, 40, 8, dtype=torch.float64)
    chosen = make_selection(torch.randint(3, (2, 2, 3, 1)), n=40, heads=4, granularity=16, local_blocks=1)
    padding = torch.arange(40).expand(2, 40) >= 30 if padded else None
    visible = torch.ones(2, 2, 3, dtype=torch.bool)
    visible[..., 2] = not padded
    found = []
    for given in (None, visible):
        leaves = query.clone().requires_grad_(), torch.zeros(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
        batch = DistillBatch(torch.arange(3), visible=given)
        options = {"enable_gqa": True, "key_padding_mask": padding, "distill": batch}
        output = selected_attention(leaves[0], key, key, chosen, scores=lambda *_: (None, leaves[1]), **options)  # noqa: B023
        output.sum().backward()
        found.append(leaves[1].grad)
    assert found[1].abs().max() > 0 and torch.equal(*found)


def test_state_dict_and_repr_of_shared_lists():
    module = grouped("heads of a key head")
    shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    assert shapes["scorer.match_query"] == (4, 8, 6) and shapes["scorer.match_key"] == (2, 8, 6)
    assert shapes["scorer.log_temperature"] == (2,) and shapes["scorer.summary"] == (2, 24, 8)
    assert len([x for x in shapes if "importance" in x]) == 2 * 4
    other = grouped("heads of a key head")
    torch.nn.init.normal_(module.scorer.match_query)
    other.load_state_dict(module.state_dict())
    x = drawn("heads of a key head")
    assert torch.equal(other(*x), module(*x))
    assert "4 heads of 8, 2 to a list" in repr(module) and "2 to a list" in module.explain(1024)
    layer = MultiheadBlockSparseAdaptive(
        32, 4, [64], [1], adaptive_config=AdaptiveConfig(select="group"), num_kv_heads=1
    )
    assert layer.core.scorer.lists == 1 and len(layer.core.scorer.match_key) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AdaptiveConfig(group_size=2), 'group_size must be >= 1 and come with select="group"'),
        (lambda: AdaptiveConfig(select="all", share_across_heads=True), 'share_across_heads must come with select="head"'),
        (lambda: BlockSparseAdaptive([64], [1], 4, 8, AdaptiveConfig(select="group")), "Give group_size"),
        (
            lambda: BlockSparseAdaptive([64], [1], 4, 8, AdaptiveConfig(select="group", group_size=3)),
            "num_heads must be a multiple of group_size 3",
        ),
        (
            lambda: BlockSparseAdaptive([64], [1], 12, 8, AdaptiveConfig(select="group", group_size=4), num_kv_heads=2),
            "a multiple or a divisor of the heads that share a key head",
        ),
        (
            lambda: BlockSparseAdaptive([64], [1], 4, 8, AdaptiveConfig(select="group"), num_kv_heads=3),
            "num_heads must be a multiple of num_kv_heads",
        ),
        (
            lambda: grouped("all heads")(*drawn("two heads with keys of their own")),
            "key must have 2 heads, for which the scorer is made, got 4",
        ),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_meant_are_refused(make, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        make()
