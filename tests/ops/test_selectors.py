"""Rules that choose key blocks: budgets, planted needles, nothing from the future, and the oracle above all."""

from __future__ import annotations

import pytest
import torch
from index_calls import seen_pairs

from dilated_attention_pytorch import select_blocks, selected_attention, validate_indices
from dilated_attention_pytorch.selection.selectors import RULES, STRIDE

SIZE = 16
EVERY = pytest.mark.parametrize("rule", RULES)
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["blocks", "tokens"])


def pair(n=90, heads=4, key_heads=2, batch=2, d=16):
    return torch.randn(batch, heads, n, d), torch.randn(batch, key_heads, n, d)


def rows_of(indices, n):
    """Own block of each row."""
    row = torch.arange(indices.shape[2])
    return row // SIZE if indices.shape[2] == n else row


@EVERY
@CAUSAL
@pytest.mark.parametrize("budget", [1, 3, 100])
def test_count_is_honoured_and_blocks_are_distinct(rule, is_causal, budget):
    query, key = pair()
    indices = select_blocks(query, key, rule, budget, granularity=SIZE, is_causal=is_causal)
    rows = 90 if is_causal else 6
    assert indices.shape == (2, 4, rows, min(budget, 6)) and indices.dtype == torch.int32
    validate_indices(indices, 6)
    own = rows_of(indices, 90)
    assert (indices[..., 0] == own).all()
    visible = (own + 1 if is_causal else torch.full_like(own, 6)).clamp(max=budget)
    listed = torch.zeros(2, 4, rows, 7, dtype=torch.int64).scatter_add_(
        -1, torch.where(indices < 0, 6, indices).long(), torch.ones_like(indices, dtype=torch.int64)
    )[..., :6]
    assert int(listed.max()) == 1 and torch.equal(listed.sum(-1), visible.expand(2, 4, rows))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "random"])
@CAUSAL
def test_planted_needle_is_kept(rule, is_causal):
    direction = torch.zeros(16)
    direction[3] = 1.0
    query, key = 16 * direction.expand(1, 2, 96, 16), 0.1 * torch.randn(1, 2, 96, 16)
    key[:, :, 37] = 8 * direction
    indices = select_blocks(query, key, rule, 2, granularity=SIZE, is_causal=is_causal)
    kept = (indices == 37 // SIZE).any(-1)
    row = torch.arange(indices.shape[2])
    must = row // SIZE >= 37 // SIZE if is_causal else row >= 0
    if rule == "antidiagonal" and is_causal:
        must &= row % STRIDE == STRIDE - 1 - 37 % STRIDE
    assert must.any() and kept[:, :, must].all()


@EVERY
@pytest.mark.parametrize("budget", [2, 0.7])
@pytest.mark.parametrize("share", [False, True])
def test_choice_of_a_token_ignores_later_tokens(rule, budget, share):
    query, key = pair()
    options = {"granularity": SIZE, "is_causal": True, "share_groups": share}
    for at in (1, 40, 64, 89):
        other_query, other_key = query.clone(), key.clone()
        other_query[:, :, at:] += 3 * torch.randn(16)
        other_key[:, :, at:] *= -4
        choices = []
        for x in ((query, key), (other_query, other_key)):
            torch.manual_seed(0)
            choices.append(select_blocks(*x, rule, budget, **options)[:, :, :at])
        assert torch.equal(*choices)


def captured(query, key, indices, is_causal):
    """Attention mass on listed blocks, (b, h, n)."""
    n, heads = query.shape[2], query.shape[1]
    scores = query @ key.repeat_interleave(heads // key.shape[1], 1).mT * query.shape[-1] ** -0.5
    token = torch.arange(n)
    scores = scores.masked_fill(token > token[:, None], -torch.inf) if is_causal else scores
    return (scores.softmax(-1) * seen_pairs(indices, n, SIZE, heads, is_causal)).sum(-1)


@CAUSAL
def test_oracle_captures_most_mass(is_causal):
    query, key = pair()
    options = {"granularity": SIZE, "is_causal": is_causal}
    mass = {}
    for rule in RULES:
        rows = captured(query, key, select_blocks(query, key, rule, 3, **options), is_causal)
        # The choice of a block of queries serves its mean.
        mass[rule] = rows if is_causal else torch.stack([x.mean(-1) for x in rows.split(SIZE, -1)], -1)
    for rule, found in mass.items():
        assert (mass["oracle"] >= found - 1e-5).all(), rule
    assert mass["oracle"].mean() > mass["random"].mean() + 0.02


@CAUSAL
def test_oracle_within_a_share_captures_it(is_causal):
    query, key = pair()
    for share in (0.5, 0.9):
        indices = select_blocks(query, key, "oracle", share, granularity=SIZE, is_causal=is_causal)
        mass = captured(query, key, indices, is_causal)
        mass = mass if is_causal else torch.stack([x.mean(-1) for x in mass.split(SIZE, -1)], -1)
        assert (mass >= share - 1e-5).all()
    least = select_blocks(query, key, "oracle", 1e-9, granularity=SIZE, is_causal=is_causal, k_min=3)
    visible = (rows_of(least, 90) + 1 if is_causal else torch.full((6,), 6)).clamp(max=3)
    assert torch.equal((least >= 0).sum(-1), visible.expand(2, 4, -1))


@CAUSAL
def test_peaked_attention_needs_fewer_blocks(is_causal):
    query, key = pair()
    counts = [
        (select_blocks(query * factor, key, "oracle", 0.9, granularity=SIZE, is_causal=is_causal) >= 0).sum()
        for factor in (0.1, 10)
    ]
    assert counts[1] < 0.9 * counts[0]


def test_groups_share_one_choice():
    query, key = pair()
    indices = select_blocks(query, key, "mean", 3, granularity=SIZE, is_causal=True, share_groups=True)
    assert indices.shape == (2, 2, 90, 3)
    value = torch.randn(2, 2, 90, 8)
    assert (
        selected_attention(query, key, value, indices, granularity=SIZE, is_causal=True, enable_gqa=True)
        .isfinite()
        .all()
    )


def test_all_blocks_by_a_budget_are_dense():
    query, key = pair()
    indices = select_blocks(query, key, "box", 6, granularity=SIZE)
    assert seen_pairs(indices, 90, SIZE, 4, False).all()


@pytest.mark.parametrize(("batch", "n"), [(0, 40), (1, 0)])
def test_nothing_to_choose_from(batch, n):
    query, key = pair(n, batch=batch)
    assert select_blocks(query, key, granularity=SIZE).shape == (batch, 4, -(-n // SIZE), 0)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("changes", "first_line"),
    [
        ({"rule": "best"}, "rule must be one of mean, box, antidiagonal, sub_blocks, oracle, random, got 'best'"),
        ({"budget": 0}, "budget must be a count >= 1, or a share in (0, 1], got 0"),
        ({"budget": 1.5}, "budget must be a count >= 1, or a share in (0, 1], got 1.5"),
        ({"k_min": 0}, "k_min must be >= 1, got 0"),
        ({"granularity": 10}, "granularity must be one of 16, 32, 64, 128, 256, got 10"),
    ],
)
def test_wrong_choices_have_a_message(changes, first_line):
    query, key = pair()
    with pytest.raises(ValueError) as caught:
        select_blocks(query, key, **changes)
    assert str(caught.value).splitlines()[0] == first_line
