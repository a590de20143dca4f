"""Layouts are a partition of the tokens, and shards go together again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.distributed import SequenceLayout, shard_sequence, unshard_sequence


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    n, world = draw(st.integers(1, 60)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["contiguous", "zigzag", "lengths", "owners", "owned blocks"]))
    if kind == "contiguous":
        return SequenceLayout.contiguous(n, world)
    if kind == "zigzag":
        return SequenceLayout.zigzag(n, world)
    if kind == "lengths":
        lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any))
        return SequenceLayout.of_lengths(lengths)
    block = 1 if kind == "owners" else draw(st.integers(1, 8))
    blocks = -(-n // block)
    owners = draw(st.lists(st.integers(0, world - 1), min_size=blocks, max_size=blocks))
    return SequenceLayout.of_owners(owners, world, block, n)


@given(layouts())
def test_every_token_has_one_place(layout: SequenceLayout):
    shards = [layout.positions(rank) for rank in range(layout.world)]
    assert tuple(map(len, shards)) == layout.lengths
    assert torch.cat(shards).sort().values.equal(torch.arange(layout.n))
    for rank, tokens in enumerate(shards):
        assert bool((tokens.diff() > 0).all())
        holder, place = layout.locate(tokens)
        assert bool((holder == rank).all())
        assert place.equal(torch.arange(len(tokens)))


@given(layouts(), st.integers(0, 2))
def test_shards_go_together_again(layout: SequenceLayout, dim: int):
    shape = [2, 3, 4]
    shape[dim] = layout.n
    x = torch.randn(shape)
    shards = [shard_sequence(x, layout, rank, dim) for rank in range(layout.world)]
    for rank, shard in enumerate(shards):
        assert shard.equal(x.index_select(dim, layout.positions(rank)))
    assert unshard_sequence(shards, layout, dim).equal(x)


@given(layouts())
def test_runs_are_as_long_as_they_can_be(layout: SequenceLayout):
    assert all(a != b for a, b in zip(layout.ranks[:-1], layout.ranks[1:], strict=True))
    assert layout == SequenceLayout.of_owners(layout.locate(torch.arange(layout.n))[0], layout.world)


def test_contiguous_and_zigzag_shards_differ_by_few_tokens():
    for n in range(1, 40):
        assert max(SequenceLayout.contiguous(n, 7).lengths) - min(SequenceLayout.contiguous(n, 7).lengths) <= 1
        assert max(SequenceLayout.zigzag(n, 3).lengths) - min(SequenceLayout.zigzag(n, 3).lengths) <= 2


def test_gradients_pass_through_sharding():
    layout = SequenceLayout.zigzag(11, 2)
    x = torch.randn(11, dtype=torch.float64, requires_grad=True)
    whole = unshard_sequence([shard_sequence(x, layout, rank, 0) for rank in range(2)], layout, 0)
    weight = torch.randn(11, dtype=torch.float64)
    assert torch.autograd.grad((whole * weight).sum(), x)[0].equal(weight)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: SequenceLayout.contiguous(4, 0), "world must be >= 1"),
        (lambda: SequenceLayout.of_lengths([3, -1]), "shard length must be >= 0"),
        (lambda: SequenceLayout.of_owners([0, 2], 2), "ranks below 2"),
        (lambda: SequenceLayout.of_owners([0, 1], 2, block=4, n=9), "must cover n tokens"),
        (lambda: SequenceLayout.of_owners([0, 1], 2, block=4, n=4), "must cover n tokens"),
        (lambda: SequenceLayout.contiguous(4, 2).positions(2), "rank must lie in 0 .. 1"),
        (lambda: shard_sequence(torch.zeros(3), SequenceLayout.contiguous(4, 2), 0, 0), "the layout's 4 tokens"),
        (lambda: unshard_sequence([torch.zeros(4)], SequenceLayout.contiguous(4, 2), 0), "there must be 2 shards"),
        (lambda: unshard_sequence([torch.zeros(1)] * 2, SequenceLayout.contiguous(4, 2), 0), "must hold 2 tokens"),
    ],
)
def test_wrong_layouts_say_what_must_hold(build, says):
    with pytest.raises(ValueError, match=says):
        build()
