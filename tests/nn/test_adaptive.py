"""Learned selection as modules: what is kept, what must not leak, what bad input gives."""

from __future__ import annotations

import copy
from dataclasses import fields, replace

import pytest
import torch
from oracle import dense_scores, error, selecting_scores
from torch.nn import functional as F

from dilated_attention_pytorch.kernels.cpu import native
from dilated_attention_pytorch.nn import (
    AdaptiveConfig,
    BlockSparseAdaptive,
    ImportanceScorer,
)
from dilated_attention_pytorch.selection import scores as scores_module
from dilated_attention_pytorch.selection.rank import gumbel

BOTH = pytest.mark.parametrize("is_causal", [False, True])
ROWS = pytest.mark.parametrize("granularity", ["block", "token"])


def layer(heads=2, width=16, size=16, backend="cpu", **config):
    settings = {"base_sparsity": 0.6, "local_blocks": 1, "sink_blocks": 0, **config}
    return BlockSparseAdaptive(
        [256], [1], heads, width, AdaptiveConfig(**settings), block_size=size, backend=backend
    ).double()


def tensors(batch=2, n=200, heads=2, key_heads=None, width=16):
    shapes = (heads, key_heads or heads, key_heads or heads)
    return [torch.randn(batch, n, h, width, dtype=torch.float64) for h in shapes]


def dense(q, k, v, is_causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True).transpose(1, 2)


def test_config_fields_and_defaults():
    wanted = {
        "base_sparsity": 0.9,
        "temperature": 1.0,
        "learnable_temperature": True,
        "min_temperature": 0.1,
        "hidden_dim": 128,
        "num_layers": 2,
        "dropout": 0.0,
        "share_across_heads": False,
        "select": "head",
        "group_size": None,
        "hard_sparsity": True,
        "granularity": "auto",
        "adaptive_ratio": None,
        "k_min": 2,
        "k_max": None,
        "sink_blocks": 1,
        "local_blocks": 2,
        "match_rank": 32,
        "score_unit": 1,
        "score_gradient": "distill",
        "distill_rows": 0.02,
        "distill_min_tokens": 128,
        "distill_memory": 2**27,
        "distill_weight": 1.0,
        "saliency_weighted": True,
        "exploration": False,
        "dense_steps": 0,
        "fitted_start": True,
        "guarded": False,
        "distill_start": 0,
        "dense_below": None,
    }
    assert {f.name: f.default for f in fields(AdaptiveConfig)} == wanted


@pytest.mark.parametrize(
    ("granularity", "is_causal", "row_unit"),
    [("auto", True, 1), ("auto", False, 4), ("token", False, 1), ("block", True, 4)],
)
def test_blocks_of_queries_are_scored_by_sub_blocks(granularity, is_causal, row_unit):
    config = AdaptiveConfig(granularity=granularity, score_unit=4)
    assert config.settings(64, is_causal).row_unit == row_unit
    assert replace(config, score_unit=1).settings(64, is_causal).row_unit == 1


@pytest.mark.parametrize(("shared", "own"), [(False, 4), (True, 1)])
def test_parameters_are_the_known_ones(shared, own):
    module = BlockSparseAdaptive([4096], [1], 4, 16, AdaptiveConfig(share_across_heads=shared))
    shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    for head in range(own):
        at = f"scorer.importance.scorers.{head}"
        assert shapes[f"{at}.0.weight"] == (128, 32)
        assert shapes[f"{at}.0.bias"] == (128,)
        assert shapes[f"{at}.3.weight"] == (1, 128)
        assert shapes[f"{at}.3.bias"] == (1,)
    assert shapes["scorer.log_temperature"] == (4,)
    assert len(shapes) == 4 * own + 4
    assert len(list(module.parameters())) == 8
    clone = BlockSparseAdaptive([4096], [1], 4, 16, AdaptiveConfig(share_across_heads=shared))
    clone.load_state_dict(module.state_dict())
    x = torch.randn(3, 1, 600, 4, 16).unbind()
    assert torch.equal(clone.eval()(*x), module.eval()(*x))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_split_scorer_is_the_mlp_on_pairs(layers):
    scorer = ImportanceScorer(8, 32, layers, 3).double()
    queries, keys = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randn(2, 3, 7, 8, dtype=torch.float64)
    pairs = torch.cat(
        [queries[:, :, :, None].expand(-1, -1, -1, 7, -1), keys[:, :, None].expand(-1, -1, 5, -1, -1)], -1
    )
    wanted = torch.stack([scorer.scorers[head](pairs[:, head])[..., 0] for head in range(3)], 1)
    assert error(scorer(queries, keys), wanted) < 1e-10
    assert error(scorer(queries[:, 1], keys[:, 1], head_idx=1), wanted[:, 1]) < 1e-10
    with pytest.raises(ValueError, match="head_idx"):
        scorer(queries[:, 1], keys[:, 1])


@BOTH
@ROWS
def test_chosen_scores_are_those_ranked(granularity, is_causal):
    """One formula, evaluated in chunks without gradients and at chosen pairs with them."""
    module = layer(granularity=granularity, score_unit=4, temperature=0.7)
    q, k, _ = (x.transpose(1, 2) for x in tensors(n=100))
    scores = module.score_blocks(q, k, is_causal)
    rows, many = torch.arange(scores.query.shape[2]), scores.row_count
    each, ranked = scores.of_all(rows), scores.ranked(0, many)
    wanted = selecting_scores(scores, each)
    finite = wanted > -torch.inf
    assert error(ranked[finite], wanted[finite]) < 1e-12
    assert (ranked[~finite] == -torch.inf).all()
    beside_own = selecting_scores(scores, each, with_own=True)
    assert error(scores.of_selecting()[finite], beside_own[finite]) < 1e-12
    at = torch.randint(7, (2, 2, len(rows), 3))
    assert error(scores.of(rows, at), each.gather(-1, at)) < 1e-12
    at = torch.randint(7, (2, 2, many, 3))
    ranked = ranked.nan_to_num(neginf=0.0)
    assert error(scores.of_each(at).nan_to_num(neginf=0.0), ranked.gather(-1, at)) < 1e-12
    parts = torch.cat([scores.ranked(0, 5), scores.ranked(5, many)], 2)
    assert error(parts.nan_to_num(neginf=0.0), ranked) < 1e-12


@BOTH
@ROWS
@pytest.mark.parametrize("padded", [False, True])
def test_factors_make_up_the_scores(granularity, is_causal, padded):
    """What a GPU ranks by is what is ranked here."""
    module = layer(granularity=granularity, score_unit=4, dropout=0.3)
    n, per_token = 96, granularity == "token"
    q, k, _ = (x.transpose(1, 2) for x in tensors(n=n))
    padding = torch.arange(n) >= torch.tensor([n, 50])[:, None] if padded else None
    scores = module.score_blocks(q, k, is_causal, padding)
    made = scores.factors
    own = torch.arange(scores.query.shape[2]) // (16 if per_token else 4)
    hidden = (made.rows[:, :, own, None] + made.columns[:, :, None]).relu() * made.keep[:, :, own, None]
    left = torch.einsum("bhrd,hdp->bhrp", made.own, made.project)
    pairs = torch.einsum("bhrd,bhtud->bhrtu", left, made.right)
    if padded:
        pairs = pairs.masked_fill(~made.right_there[:, :, None], -torch.inf)
    best = pairs.amax(-1) / made.right.shape[-1] ** 0.5
    found = (hidden * made.weight[:, None, None]).sum(-1) + made.bias[:, None, None]
    temperature = made.log_temperature.exp().clamp(min=made.coldest)[:, None, None]
    found = (found + torch.where(best > -torch.inf, best, 0.0)) / temperature
    assert error(found, scores.of_all(torch.arange(len(own)))) < 1e-12
    assert layer(num_layers=3).score_blocks(q, k, is_causal).factors is None


def test_what_inference_made_first_serves_training():
    module, (q, k, v) = layer(distill_rows=1.0), tensors(n=77)
    with torch.inference_mode():
        module.eval()(q, k, v, False, True)
    module.train()(q, k, v).sum().backward()
    assert (module.scorer.match_key.grad != 0).any()


def test_super_blocks_keep_the_best_matches(monkeypatch):
    module = layer(base_sparsity=0.9, score_unit=4)
    q, k, v = tensors(batch=1, n=1600)
    wanted = module.eval()(q, k, v, False, True)[1].selection.allowed()
    monkeypatch.setattr(scores_module, "ALL_PAIRS", 16)
    found = module(q, k, v, False, True)[1].selection.allowed()
    assert (found & wanted).sum() >= 0.6 * wanted.sum()
    assert found.sum() == wanted.sum()


@BOTH
@ROWS
@pytest.mark.parametrize("layers", [2, 3])
def test_super_block_bounds_hold(granularity, is_causal, layers, monkeypatch):
    monkeypatch.setattr(scores_module, "SUPER", 4)
    module = layer(granularity=granularity, score_unit=4, num_layers=layers, dropout=0.3)
    with torch.no_grad():
        for weight in module.scorer.importance.stacks():
            weight.normal_()
    q, k, _ = (x.transpose(1, 2) for x in tensors(n=300))
    padding = torch.arange(300) >= torch.tensor([300, 130])[:, None]
    scores = module.score_blocks(q, k, is_causal, padding)
    rows = torch.arange(scores.query.shape[2])
    exact = scores.of_all(rows).masked_fill(~scores.visible[:, :, None], -torch.inf)
    best = torch.nn.functional.pad(exact, (0, 1), value=-torch.inf).unflatten(-1, (5, 4)).amax(-1)
    bounds = scores.super_bounds(0, scores.row_count)
    assert ((best <= bounds + 1e-9) | (bounds == -torch.inf)).all()
    before = (torch.arange(5) < scores.block_of(rows)[:, None] // 4) | (not is_causal)
    assert torch.equal(bounds > -torch.inf, (before & (best > -torch.inf)).expand_as(bounds))
    # A box of one block is that block.
    monkeypatch.setattr(scores_module, "SUPER", 1)
    whole = layer(granularity=granularity, score_unit=16).score_blocks(q, k, False)
    rows = torch.arange(whole.query.shape[2])
    assert error(whole.super_bounds(0, whole.row_count), whole.of_all(rows)) < 1e-12


@ROWS
def test_a_needle_survives_super_blocks(granularity, monkeypatch):
    """A key token that holds all of the attention is found below and above the limit of exact ranking."""
    torch.manual_seed(0)
    monkeypatch.setattr(scores_module, "SUPER", 8)
    module = layer(granularity=granularity, base_sparsity=0.985, score_unit=1, k_min=1).eval()
    q, k, v = tensors(batch=4, n=16 * 192)
    block = torch.tensor([3, 40, 77, 101])
    # Rows that are causal blocks select by the queries of the block before.
    q[:, -32:] = q[:, -1:]
    last = q[:, -1]
    k[torch.arange(4), 16 * block + 5] = 64 * last / last.square().sum(-1, keepdim=True)
    share = (q[:, -1, :, None] * k.transpose(1, 2)).sum(-1).mul(0.25).softmax(-1)
    assert share.amax(-1).min() > 0.9
    for most in (16384, 64):
        monkeypatch.setattr(scores_module, "ALL_PAIRS", most)
        allowed = module(q, k, v, True, True)[1].selection.allowed()[:, :, -1]
        assert allowed.gather(-1, block.view(4, 1, 1).expand(4, 2, 1)).all(), most


@ROWS
def test_choices_do_not_depend_on_the_length(granularity, monkeypatch):
    """Rows choose the same blocks however many blocks follow, below and above every limit."""
    monkeypatch.setattr(scores_module, "ALL_PAIRS", 12)
    monkeypatch.setattr(scores_module, "SUPER", 2)
    module = layer(granularity=granularity, base_sparsity=0.9, score_unit=4).eval()
    with torch.no_grad():
        for weight in module.scorer.importance.stacks():
            weight.normal_()
    q, k, v = tensors(n=16 * 40)
    whole = module(q, k, v, True, True)[1].selection.allowed()
    for blocks in (11, 12, 13, 14, 25, 39):
        n = 16 * blocks
        part = module(q[:, :n], k[:, :n], v[:, :n], True, True)[1].selection.allowed()
        assert torch.equal(part, whole[:, :, : part.shape[2], :blocks]), blocks


@BOTH
def test_short_sequences_run_dense_in_eval_mode(is_causal):
    module = layer(dense_below=200)
    assert "below 200 tokens" in module.explain(100)
    short, long = tensors(n=199), tensors(n=200)
    module.eval()
    assert error(module(*short, is_causal), dense(*short, is_causal)) < 1e-12
    assert module.statistics() == {"density": 1.0}
    assert error(module(*long, is_causal), dense(*long, is_causal)) > 1e-3
    # What is asked for is what was learned, and what learns must be tried.
    assert float(module(*short, is_causal, True)[1].density) < 0.7
    module.train()(*short, is_causal).sum().backward()
    assert module.statistics()["density"] < 0.7
    assert (module.scorer.match_key.grad != 0).any()
    with torch.no_grad():
        assert error(module(*short, is_causal), dense(*short, is_causal)) < 1e-12
    weighing = layer(dense_below=200, hard_sparsity=False).eval()
    assert error(weighing(*short, is_causal), dense(*short, is_causal)) > 1e-3


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
@BOTH
@ROWS
def test_the_budget_is_kept(granularity, is_causal, sparsity):
    module = layer(granularity=granularity, base_sparsity=sparsity, k_min=1, sink_blocks=1)
    _, pattern = module(*tensors(n=320), is_causal, True)
    own = pattern.selection.row_blocks()
    visible = own + 1 if is_causal else torch.full_like(own, 20)
    forced = 1 + (own > 0).long()
    wanted = torch.maximum(((1 - sparsity) * visible).round().long(), forced)
    assert torch.equal(pattern.selection.allowed().sum(-1), wanted.expand(2, 2, -1))
    assert float(pattern.density) == pytest.approx(float(wanted.sum() / visible.sum()))


@BOTH
@ROWS
def test_coverage_is_reached_by_the_fewest_blocks(granularity, is_causal):
    module = layer(granularity=granularity, adaptive_ratio=0.7, k_min=1, score_unit=4).eval()
    q, k, v = tensors(batch=1, n=160)
    _, pattern = module(4 * q, k, v, is_causal, True)
    scores = module.score_blocks(4 * q.transpose(1, 2), k.transpose(1, 2), is_causal)
    own = pattern.selection.row_blocks()[:, None]
    column = torch.arange(10)
    logits = scores.of_selecting().masked_fill(column == own, 0.0)
    share = logits.masked_fill(column > own, -torch.inf).softmax(-1) if is_causal else logits.softmax(-1)
    kept = pattern.selection.allowed()
    held = torch.where(kept, share, 0.0).sum(-1)
    assert (held >= 0.7 - 1e-9).all()
    # Without the least of those it chose, a row would fall short.
    chosen = kept & (column != own)
    least = torch.where(chosen, share, torch.inf).amin(-1)
    assert (~chosen.any(-1) | (held - least < 0.7)).all()
    assert (kept.sum(-1) < 10).any()


@pytest.mark.parametrize("kept", [{"base_sparsity": 0.0}, {"k_min": 10_000}])
@pytest.mark.parametrize("n", [160, 131, 7])
@BOTH
@ROWS
def test_keeping_everything_is_dense_attention(granularity, is_causal, n, kept):
    module = layer(heads=4, granularity=granularity, **kept)
    q, k, v = (x.requires_grad_() for x in tensors(n=n, heads=4, key_heads=2))
    output, wanted = module(q, k, v, is_causal), dense(q, k, v, is_causal)
    assert error(output, wanted) < 1e-10
    weights = torch.randn_like(output)
    grads = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (output, wanted))
    for got, expected in zip(*grads, strict=True):
        assert error(got, expected) < 1e-10


@BOTH
@ROWS
def test_samples_do_not_see_their_batch_mates(granularity, is_causal):
    module = layer(granularity=granularity).eval()
    q, k, v = tensors(batch=3)
    whole = module(q, k, v, is_causal)
    assert torch.equal(module(q.flip(0), k.flip(0), v.flip(0), is_causal), whole.flip(0))
    alone = torch.cat([module(q[i : i + 1], k[i : i + 1], v[i : i + 1], is_causal) for i in range(3)])
    assert error(alone, whole) < 1e-12


@pytest.mark.parametrize("backend", ["cpu", "native"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("more", [{}, {"adaptive_ratio": 0.6}, {"sink_blocks": 1, "local_blocks": 2}])
@ROWS
def test_nothing_after_a_token_changes_its_output(granularity, more, mode, backend):
    if backend == "native" and not native.library_path().exists():
        pytest.skip("the C++ kernel is not built")
    module = layer(backend=backend, granularity=granularity, score_unit=4, **more)
    getattr(module, mode)()
    q, k, v = tensors(n=150)
    torch.manual_seed(1)
    before = module(q, k, v, is_causal=True)
    for at in (1, 17, 32, 100, 149):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, at:] = 3 * torch.randn_like(x[:, at:])
        torch.manual_seed(1)
        after = module(*changed, is_causal=True)
        assert torch.equal(after[:, :at], before[:, :at])
        assert not torch.equal(after[:, at:], before[:, at:])


@ROWS
def test_nothing_later_crowds_out_a_candidate(granularity, monkeypatch):
    monkeypatch.setattr(scores_module, "ALL_PAIRS", 4)
    monkeypatch.setattr(scores_module, "SUPER", 2)
    module = layer(granularity=granularity, base_sparsity=0.92, score_unit=4).eval()
    q, k, v = tensors(n=400)
    before, pattern = module(q, k, v, True, True)
    assert (pattern.selection.allowed().sum(-1) <= 3).all()
    assert (pattern.counts[:, :, -1] == 1).all()
    for at in (100, 250, 390):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, at:] = 5 * torch.randn_like(x[:, at:])
        assert torch.equal(module(*changed, is_causal=True)[:, :at], before[:, :at])


def test_one_seed_gives_one_pattern():
    module = layer(exploration=True)
    x = tensors()

    def pattern(seed):
        torch.manual_seed(seed)
        return module(*x, False, True)[1].selection.allowed()

    assert torch.equal(pattern(0), pattern(0))
    assert not torch.equal(pattern(0), pattern(1))
    module.eval()
    assert torch.equal(pattern(0), pattern(1))
    assert torch.equal(module(*x), module(*x))
    still = layer()
    assert torch.equal(*(still(*x, False, True)[1].indices for _ in range(2)))


def test_noise_is_gumbel_and_depends_on_coordinates_alone():
    seed = torch.tensor([1 << 40])
    like = torch.empty(2, 3, 400, 50)
    noise = gumbel(seed, torch.arange(400), torch.arange(50), like)
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - 1.6449) < 0.05
    part = gumbel(seed, torch.arange(100, 200), torch.arange(50), like[:, :, :100])
    assert torch.equal(part, noise[:, :, 100:200])
    assert not torch.equal(noise[0, 0], noise[1, 2])


@BOTH
@ROWS
def test_what_is_dropped_bounds_the_error(granularity, is_causal):
    module = layer(granularity=granularity, base_sparsity=0.5).eval()
    q, k, v = tensors(batch=1, n=160)
    output, pattern = module(3 * q, k, v, is_causal, True)
    token = torch.arange(160)
    seen = pattern.selection.allowed()[:, :, token if granularity == "token" else token // 16][..., token // 16]
    scores = 3 * q.transpose(1, 2) @ k.transpose(1, 2).mT / 4
    scores = scores.masked_fill(token > token[:, None], -torch.inf) if is_causal else scores
    held = torch.where(seen, scores.softmax(-1), 0.0).sum(-1)
    gap = (output - dense(3 * q, k, v, is_causal)).norm(dim=-1).transpose(1, 2)
    assert (gap <= 2 * (1 - held) * v.norm(dim=-1).max() + 1e-9).all()
    probes = torch.linspace(0, 159, 64).long()
    assert float(pattern.captured) == pytest.approx(float(held[:, :, probes].mean()))


@BOTH
@ROWS
def test_padding_takes_no_part_in_the_choice(granularity, is_causal):
    module = layer(granularity=granularity).eval()
    q, k, v = tensors(n=160)
    padding = torch.arange(160) >= torch.tensor([160, 90])[:, None]
    output, pattern = module(q, k, v, is_causal, True, key_padding_mask=padding)
    assert (pattern.indices[1].masked_fill(pattern.indices[1] == 10, 0) <= 5).all()
    noisy = [x.clone() for x in (q, k, v)]
    for x in noisy:
        x[1, 90:] = float("nan")
    again = module(*noisy, is_causal, key_padding_mask=padding)
    assert torch.equal(again[0], output[0])
    assert torch.equal(again[1, :90], output[1, :90])


@BOTH
@ROWS
def test_padded_sample_gives_zeros_and_no_scorer_gradient(granularity, is_causal):
    module = layer(granularity=granularity)
    q, k, v = (x.requires_grad_() for x in tensors(n=100))
    padding = torch.zeros(2, 100, dtype=torch.bool)
    padding[1] = True
    output, pattern = module(q, k, v, is_causal, True, key_padding_mask=padding)
    assert (output[1] == 0).all()
    assert pattern.counts[1].sum() == 0
    output.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, *module.parameters()))


@BOTH
@ROWS
def test_what_is_not_a_number_is_not_chosen_and_does_not_spread(granularity, is_causal):
    module = layer(granularity=granularity)
    q, k, v = tensors(batch=1, n=160)
    k[:, 20] = float("nan")
    q[:, 70] = float("inf")
    output, pattern = module(q, k, v, is_causal, True)
    chosen = pattern.selection.allowed()[0, :, :, 1]
    assert not chosen[:, pattern.selection.row_blocks() != 1].any()
    token = torch.arange(160)
    clean = (token // 16 != 1) & (token != 70)
    assert output[0, clean].isfinite().all()
    output[0, clean].sum().backward()
    assert all(x.grad.isfinite().all() for x in module.parameters())


@BOTH
@ROWS
@pytest.mark.parametrize("coverage", [None, 0.8])
def test_scores_that_are_no_numbers_choose_nothing(granularity, is_causal, coverage):
    """A scorer that diverged in one head leaves that head what every row keeps, and the others as they were."""
    module = layer(granularity=granularity, adaptive_ratio=coverage, sink_blocks=1)
    q, k, v = (x.requires_grad_() for x in tensors(batch=1, n=160))
    torch.manual_seed(1)
    wanted, _ = module(q, k, v, is_causal, True)
    with torch.no_grad():
        module.scorer.match_query[1] = float("nan")
    torch.manual_seed(1)
    output, pattern = module(q, k, v, is_causal, True)
    assert pattern.counts[:, 1].sum() == 0
    assert torch.equal(output[:, :, 0], wanted[:, :, 0])
    output.square().sum().backward()
    assert all(x.isfinite().all() for x in (output, q.grad, k.grad, v.grad))


def test_one_block_is_dense_attention():
    module = layer()
    q, k, v = tensors(n=11)
    for is_causal in (False, True):
        output, pattern = module(q, k, v, is_causal, True)
        assert error(output, dense(q, k, v, is_causal)) < 1e-12
        assert float(pattern.density) == 1.0
        output.sum().backward()


def test_a_temperature_at_its_floor_stays_there_and_can_rise():
    module = layer(temperature=0.5, min_temperature=0.5)
    with torch.no_grad():
        module.scorer.log_temperature.fill_(-5.0)
    assert torch.equal(module.scorer.temperature, torch.full((2,), 0.5, dtype=torch.float64))
    module(*tensors()).sum().backward()
    assert (module.scorer.log_temperature.grad != 0).all()
    fixed = layer(learnable_temperature=False)
    assert "scorer.log_temperature" not in dict(fixed.named_parameters())
    assert "scorer.log_temperature" in fixed.state_dict()


def test_shared_scorers_choose_for_each_query_head():
    module = layer(heads=4, share_across_heads=True)
    q, k, v = tensors(heads=4, key_heads=1)
    _, pattern = module(q, k, v, True, True)
    allowed = pattern.selection.allowed()
    assert not torch.equal(allowed[:, 0], allowed[:, 1])


def test_before_any_training_it_finds_what_matches():
    """The match starts as a projection of attention's own scores."""
    module = layer(heads=1, width=16, base_sparsity=0.7).eval()
    codes = F.normalize(torch.randn(10, 16, dtype=torch.float64), dim=1)
    k = 6 * codes.repeat_interleave(16, 0)[None, :, None]
    _, pattern = module(k.flip(1), k, k, False, True)
    assert pattern.selection.allowed()[0, 0, torch.arange(10), torch.arange(9, -1, -1)].all()
    assert module.statistics().keys() == {"density"}
    assert module.auxiliary_loss().isnan()


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: AdaptiveConfig(base_sparsity=1.0), ValueError, "base_sparsity"),
        (lambda: AdaptiveConfig(base_sparsity=-0.1), ValueError, "base_sparsity"),
        (lambda: AdaptiveConfig(temperature=0.01), ValueError, "min_temperature 0.1, got 0.01"),
        (lambda: AdaptiveConfig(min_temperature=0.0), ValueError, "min_temperature"),
        (lambda: AdaptiveConfig(dense_below=0), ValueError, "dense_below must be >= 1, or None, got 0"),
        (lambda: AdaptiveConfig(k_min=0), ValueError, "k_min"),
        (lambda: AdaptiveConfig(k_min=4, k_max=3), ValueError, "k_max"),
        (lambda: AdaptiveConfig(adaptive_ratio=1.0), ValueError, "adaptive_ratio"),
        (lambda: AdaptiveConfig(granularity="row"), ValueError, "granularity"),
        (lambda: AdaptiveConfig(score_gradient="task"), ValueError, "score_gradient"),
        (lambda: AdaptiveConfig(local_blocks=0), ValueError, "local_blocks"),
        (lambda: AdaptiveConfig(distill_rows=2.0), ValueError, "distill_rows"),
        (lambda: AdaptiveConfig(distill_weight=-1.0), ValueError, "distill_weight"),
        (lambda: AdaptiveConfig(dropout=1.0), ValueError, "dropout"),
        (lambda: layer(size=48), ValueError, "block_size"),
        (lambda: layer(score_unit=5), ValueError, "score_unit 5"),
        (lambda: layer(score_unit=0), ValueError, "score_unit must be >= 1, got 0"),
        (lambda: BlockSparseAdaptive([4096], [1], 0, 8), ValueError, "num_heads"),
        (lambda: BlockSparseAdaptive([4096, 1], [1], 2, 8), ValueError, "equally long|dilation"),
        (lambda: BlockSparseAdaptive([4096], [1], 2, 8, {"base_sparsity": 0.5}), TypeError, "AdaptiveConfig"),
        (lambda: BlockSparseAdaptive([4096], [1], ring_size=2), ValueError, "ring_size=2 needs a process group"),
        (lambda: BlockSparseAdaptive([4096], [1], process_group=object()), TypeError, "process_group must be"),
        (lambda: layer()(*torch.randn(3, 1, 32, 4, 16)), ValueError, "2 heads of 16"),
        (lambda: layer()(*torch.randn(3, 32, 2, 16)), ValueError, "batch, n, heads, width"),
        (lambda: layer(size=256, score_gradient="prior")(*tensors(1, 8193, 2)), ValueError, "n <= 8192"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_copies_give_the_same_numbers():
    module = layer().eval()
    x = tensors()
    assert torch.equal(copy.deepcopy(module)(*x), module(*x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@BOTH
def test_16_bit_scores_are_ranked_at_float16_precision(is_causal, dtype):
    module = layer().float()
    q, k = (x.to(dtype).transpose(1, 2) for x in tensors()[:2])
    with torch.no_grad():
        scores = module.score_blocks(q, k, is_causal)
        rows = torch.arange(scores.query.shape[2])
        wanted, exact = dense_scores(scores.factors, scores.block_of(rows)), scores.of_all(rows)
        ranked = scores.ranked(0, scores.row_count)
    assert error(*(x.nan_to_num(neginf=0.0) for x in (ranked, selecting_scores(scores, wanted)))) < 1e-5
    assert (error(exact, wanted) < 1e-5) == (dtype is torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@BOTH
def test_half_precision_learns(is_causal, dtype):
    module = layer().to(dtype)
    q, k, v = (x.to(dtype).requires_grad_() for x in tensors())
    output = module(q, k, v, is_causal)
    assert output.dtype == dtype
    output.sum().backward()
    assert all(x.grad.isfinite().all() and x.grad.dtype == dtype for x in (q, k, v, *module.parameters()))
    assert layer(match_rank=0).to(dtype)(q, k, v, is_causal).isfinite().all()


@ROWS
def test_half_precision_scores_have_float16_matches(granularity):
    torch.manual_seed(0)
    config = AdaptiveConfig(granularity=granularity, score_unit=2, match_rank=4)
    layer = BlockSparseAdaptive([128], [1], 2, 8, config, block_size=16)
    q, k = torch.randn(2, 1, 2, 128, 8, dtype=torch.bfloat16).unbind()
    with torch.no_grad():
        scores = layer.score_blocks(q, k, False)
        own = scores.block_of(torch.arange(scores.query.shape[2]))
        ranked, errors = scores.ranked(0, scores.row_count).nan_to_num(neginf=0.0), []
        for rounds in (True, False):
            each = dense_scores(scores.factors._replace(rounds=rounds), own)
            errors.append(error(ranked, selecting_scores(scores, each).nan_to_num(neginf=0.0)))
        assert errors[0] < 2e-6 and errors[1] > 1e-5
