"""Scorers that start from a fit to queries and keys, and that select by their start where training made them worse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.nn import (
    AdaptiveConfig,
    BlockSparseAdaptive,
    MultiheadBlockSparseAdaptive,
    fit_scorers,
    scorer_parameters,
)
from dilated_attention_pytorch.nn.adaptive.controls import LayerCall, captured_mass, copied_state, shares_of
from dilated_attention_pytorch.nn.adaptive.fit import fit_match, moments_of
from dilated_attention_pytorch.nn.adaptive.guard import captured_more, query_weights
from dilated_attention_pytorch.selection.backend import distill_inputs
from dilated_attention_pytorch.selection.scores import join_heads
from dilated_attention_pytorch.selection.types import Selection

HEADS, WIDTH, RANK = 4, 16, 4
CONFIG = AdaptiveConfig(
    0.75, score_unit=1, match_rank=RANK, hidden_dim=8, local_blocks=1, sink_blocks=0, k_min=1, distill_rows=0.5
)


def layer(**changes: Any) -> BlockSparseAdaptive:
    torch.manual_seed(0)
    return BlockSparseAdaptive([64], [1], HEADS, WIDTH, replace(CONFIG, **changes), block_size=16)


def skewed(seed: int, n: int = 256, keys: int = HEADS) -> list[Tensor]:
    """Queries, keys and values (2, n, h, d) whose products come from few directions, and whose keys have a mean."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7)))[0]
    sizes = 3.0 * 0.7 ** torch.arange(WIDTH)
    q, k = (torch.randn(2, n, many, WIDTH, generator=generator) for many in (HEADS, keys))
    return [q * sizes @ axes, k * sizes @ axes + axes[0], torch.randn(2, n, keys, WIDTH, generator=generator)]


def shares(module: BlockSparseAdaptive, other: dict[str, Tensor], seed: int = 9) -> dict[str, float]:
    call = LayerCall(*skewed(seed), True, None)
    return shares_of(captured_mass(module.eval(), call, other, 256))


def match_of(module: BlockSparseAdaptive) -> Tensor:
    """Products (h, d, d) of the projections of queries and keys."""
    return (module.scorer.match_query @ module.scorer.match_key.mT).detach()


@pytest.mark.parametrize("lists", [HEADS, 2, 1])
@pytest.mark.parametrize("keys", [HEADS, 2])
@pytest.mark.parametrize("unit", [1, 4])
def test_the_fit_is_the_best_match_of_its_rank(unit, keys, lists):
    """Error of scores up to a constant of each row, in float64, against the optimum of every pair by Eckart-Young.

    The exact scores of heads that share a list are summed.
    """
    q, k, _ = (x.double().transpose(1, 2) for x in skewed(0, 128, keys))
    settings = replace(CONFIG, score_unit=unit).settings(16, True)
    left, right = fit_match(moments_of(q, k, settings, None, lists), RANK, WIDTH)
    k = k.unflatten(2, (-1, unit)).mean(3)
    each = k.repeat_interleave(HEADS // keys, 1)
    joined = join_heads(k, lists) if keys > lists else k.repeat_interleave(lists // keys, 1)
    heads, each, q, k = (x.transpose(0, 1).flatten(1, 2) for x in (q, each, join_heads(q, lists), joined))
    each, k = (x - x.mean(1, keepdim=True) for x in (each, k))
    exact = (heads @ each.mT).unflatten(0, (lists, -1)).sum(1) * (RANK * lists / WIDTH / HEADS) ** 0.5
    error = (exact - (q @ left) @ (k @ right).mT).square().sum((1, 2))
    least = torch.linalg.svdvals(exact)[:, RANK:].square().sum(1)
    assert torch.allclose(error, least, rtol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_a_fitted_start_captures_more_than_the_sketch(shared):
    module = layer(share_across_heads=shared)
    sketch = copied_state(module)
    assert fit_scorers(module, lambda: module(*skewed(1), is_causal=True)) == [""]
    found = shares(module, sketch)
    assert found["learned"] > found["untrained"] + 0.05 and found["oracle"] > found["learned"]


def test_fitting_twice_or_frozen_or_trained_changes_nothing():
    module = layer()

    def fit() -> list[str]:
        return fit_scorers(module, lambda: module(*skewed(1), is_causal=True))

    module.scorer.match_query.requires_grad_(False)
    assert fit() == []
    module.scorer.match_query.requires_grad_(True)
    assert fit() == [""]
    fitted = copied_state(module)
    assert fit() == []
    assert all(torch.equal(x, fitted[name]) for name, x in module.scorer.state_dict().items())


def test_scorers_are_made_under_a_half_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert layer().scorer.match_query.dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(before)


def test_a_match_of_the_full_width_stays():
    module = layer(match_rank=WIDTH)
    before = module.scorer.match_query.clone()
    fit_scorers(module, lambda: module(*skewed(1)))
    assert torch.equal(module.scorer.match_query, before)


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_does_not_change_the_fit(is_causal):
    q, k, v = skewed(1, 160)
    padding = torch.zeros(2, 160, dtype=torch.bool)
    padding[:, 128:] = True
    found = []
    for noise in (1.0, 100.0):
        module = layer(score_unit=4)
        garbled = [torch.where(padding[..., None, None], noise * x, x) for x in (q, k, v)]
        fit_scorers(
            module, lambda garbled=garbled, module=module: module(*garbled, is_causal, key_padding_mask=padding)
        )
        found.append(module.scorer.match_key.detach())
    assert torch.equal(*found)
    alone = layer(score_unit=4)
    fit_scorers(alone, lambda: alone(*(x[:, :128] for x in (q, k, v)), is_causal))
    assert torch.allclose(match_of(module), match_of(alone), atol=1e-5)


def test_a_shared_fit_counts_every_head():
    forwards, backwards = (layer(share_across_heads=True) for _ in range(2))
    fit_scorers(forwards, lambda: forwards(*skewed(1), is_causal=True))
    fit_scorers(backwards, lambda: backwards(*(x.flip(2) for x in skewed(1)), is_causal=True))
    assert torch.allclose(match_of(forwards), match_of(backwards), atol=1e-5)


def test_the_fit_follows_the_dense_steps_once():
    module = layer(dense_steps=2)
    sketch = module.scorer.match_query.detach().clone()
    optimizer = torch.optim.Adam(module.parameters(), 0.0)
    for step in range(4):
        inputs = [x.requires_grad_() for x in skewed(step)]
        module(*inputs, is_causal=True).square().mean().backward()
        assert torch.equal(module.scorer.match_query, sketch) == (step < 2)
        assert (module.scorer.match_query in optimizer.state) == (step > 2)
        optimizer.step()
        if step == 2:
            fitted = module.scorer.match_query.detach().clone()
    assert torch.equal(module.scorer.match_query, fitted)
    other = layer()
    fit_scorers(other, lambda: other(*skewed(2), is_causal=True))
    assert torch.equal(other.scorer.match_query, fitted)
    plain = layer(dense_steps=1, fitted_start=False)
    plain._steps = 1
    plain(*skewed(0), is_causal=True)
    assert plain.scorer.is_untrained()


def test_fit_scorers_reaches_all_layers_of_a_model():
    torch.manual_seed(0)
    settings = {"adaptive_config": CONFIG, "block_size": 16, "batch_first": True}
    model = nn.ModuleList(MultiheadBlockSparseAdaptive(64, 4, [64], [1], **settings) for _ in range(2))

    def run() -> None:
        x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0))
        for block in model:
            x = x + block(x, is_causal=True)[0]

    assert fit_scorers(model, run) == ["0.core", "1.core"]
    assert fit_scorers(model, run) == []


def corrupt(module: BlockSparseAdaptive, how: str) -> None:
    with torch.no_grad():
        for parameter in scorer_parameters(module):
            if how == "nan":
                parameter.fill_(torch.nan)
            elif how == "noise":
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
        if how == "opposite":
            module.scorer.match_query.neg_()


@pytest.mark.parametrize(
    ("how", "more"), [("opposite", {}), ("noise", {}), ("nan", {}), ("opposite", {"select": "group", "group_size": 2})]
)
def test_a_corrupted_scorer_selects_as_its_start(how, more):
    module = layer(guarded=True, **more)
    fit_scorers(module, lambda: module(*skewed(1), is_causal=True))
    start = copied_state(module)
    corrupt(module, how)
    plain = layer(**more)
    plain.scorer.load_state_dict({name: module.scorer.state_dict()[name] for name in plain.scorer.state_dict()})
    assert how == "nan" or shares(plain, copied_state(plain))["learned"] < shares(module, start)["untrained"] - 0.08
    for seed in range(3):
        module.train()(*skewed(seed), is_causal=True).sum().backward()
    assert bool((module.scorer.advantage < 0).all())
    found = shares(module, start)
    assert found["learned"] >= found["untrained"] - 1e-3
    again = layer(guarded=True, **more)
    again.load_state_dict(module.state_dict())
    q, k, v = skewed(5)
    assert torch.equal(again.eval()(q, k, v, True).isfinite(), torch.ones_like(q, dtype=torch.bool))


def test_a_scorer_trained_backwards_is_not_below_its_start():
    """Gradients with the wrong sign."""
    ends = {}
    for guarded in (False, True):
        module = layer(guarded=guarded)
        fit_scorers(module, lambda module=module: module(*skewed(1), is_causal=True))
        start = copied_state(module)
        optimizer = torch.optim.Adam(module.parameters(), 0.05, maximize=True)
        for step in range(12):
            optimizer.zero_grad()
            inputs = [x.requires_grad_() for x in skewed(step)]
            module.train()(*inputs, is_causal=True).square().mean().backward()
            optimizer.step()
        ends[guarded] = shares(module, start)
    assert ends[False]["learned"] < ends[False]["untrained"] - 0.05
    assert ends[True]["learned"] >= ends[True]["untrained"] - 1e-2


def test_a_head_recovers_when_training_overtakes_the_start():
    module = layer(guarded=True)
    corrupt(module, "opposite")
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    signs = []
    for step in range(60):
        optimizer.zero_grad()
        inputs = [x.requires_grad_() for x in skewed(step)]
        module(*inputs, is_causal=True).square().mean().backward()
        optimizer.step()
        signs.append(float((module.scorer.advantage < 0).double().mean()))
    assert signs[0] == 1.0 and signs[-1] == 0.0


def test_checkpointing_repeats_the_selection_of_a_guard():
    plain, repeated = layer(guarded=True), layer(guarded=True)
    for step in range(6):
        grads = []
        for module in (plain, repeated):
            inputs = [x.requires_grad_() for x in skewed(step)]
            torch.manual_seed(step)
            call = checkpoint if module is repeated else lambda run, *rows, use_reentrant: run(*rows)
            call(module, *inputs, True, use_reentrant=False).square().mean().backward()
            grads.append([x.grad for x in inputs])
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= parameter.grad.sign() * 0.05
            module.zero_grad()
        assert all(map(torch.equal, *grads))
    assert torch.equal(plain.scorer.advantage, repeated.scorer.advantage) and bool((plain.scorer.advantage != 0).all())


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shared", [1, 2])
def test_a_guard_compares_what_a_loop_counts(is_causal, shared):
    """Padding, forced blocks and the counts of rows, against loops over blocks in float64."""
    settings = {"local_blocks": 2 if is_causal else 1, "sink_blocks": int(is_causal)}
    module = layer(guarded=True, **settings, **({"select": "group", "group_size": shared} if shared > 1 else {}))
    q, k, _ = (x.double().transpose(1, 2) for x in skewed(1, n=150))
    padding = torch.zeros(2, 150, dtype=torch.bool)
    padding[0, 100:] = padding[1, 32:48] = padding[1, 3] = True
    corrupt(module.double(), "noise")
    trained, start = (module.score_blocks(q, k, is_causal, padding, which) for which in ("stack", "start"))
    lists, t = HEADS // shared, 10
    counts = torch.arange(t).clamp(max=3).expand(2, lists, t).contiguous().int()
    indices = torch.zeros(2, lists, t, 3, dtype=torch.int32)
    near = is_causal, False, settings["local_blocks"], settings["sink_blocks"]
    selection = Selection(indices, counts, 150, 16, *near, group=shared)
    inputs = distill_inputs(q, k, selection, 0.25, padding)
    rows = torch.arange(t)
    weights = query_weights(q.transpose(1, 2), padding)
    found = captured_more(trained, start, inputs, rows, weights)
    gained, total = torch.zeros(lists, dtype=torch.float64), torch.zeros(lists, dtype=torch.float64)
    both = [scores.of_all(rows).detach() for scores in (trained, start)]
    for b in range(2):
        scores = 0.25 * q[b] @ k[b].mT
        scores = scores.masked_fill(padding[b], -torch.inf)
        if is_causal:
            scores = scores.masked_fill(~torch.ones(150, 150, dtype=torch.bool).tril(), -torch.inf)
        shares = (scores.softmax(-1) * ~padding[b][:, None]).view(lists, shared, 150, 150).sum(1)
        for head in range(lists):
            for row in range(t):
                mass = [shares[head, row * 16 : row * 16 + 16, at * 16 : at * 16 + 16].sum() for at in range(t)]
                total[head] += sum(mass)
                real = [not bool(padding[b, at * 16 : at * 16 + 16].all()) for at in range(t)]
                forced = {0, row - 1, row} if is_causal else {row}
                may = [at for at in range(t) if real[at] and at not in forced and not (is_causal and at > row)]
                for sign, score in zip((1, -1), both, strict=True):
                    kept = sorted(may, key=lambda at: -float(score[b, head, row, at]))[: int(counts[b, head, row])]
                    gained[head] += sign * sum(mass[at] for at in kept)
    torch.testing.assert_close(found, gained / total, rtol=0, atol=1e-9)
    assert bool((found.abs() > 1e-3).all())


def test_without_training_a_guard_changes_nothing():
    plain, guarded = layer().eval(), layer(guarded=True).eval()
    given = skewed(0)
    assert torch.equal(plain(*given, is_causal=True), guarded(*given, is_causal=True))


@pytest.mark.parametrize("setting", [{"distill_rows": 0.0}, {"match_rank": 0}, {"score_gradient": "prior"}], ids=str)
def test_a_guard_needs_rows_to_compare(setting):
    with pytest.raises(ValueError, match="guarded must come with distillation"):
        AdaptiveConfig(guarded=True, **setting)
