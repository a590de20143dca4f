"""Grid neighbourhoods against a brute-force construction, their text, their plans and the cost of planning."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import multiplicities

from dilated_attention_pytorch import BlockLists, Grid, attention, make_plan, parse
from dilated_attention_pytorch.plan import closed_forms, plan_rows


def neighbours(size: int, window: int, rate: int, causal: bool, at: int) -> list[int]:
    """Coordinates that one coordinate of an axis sees, by listing its residue class."""
    line = list(range(at % rate, size, rate))
    place = line.index(at)
    if causal:
        return line[max(0, place - window + 1) : place + 1]
    start = min(max(place - window // 2, 0), len(line) - window)
    return line[start : start + window]


def brute_force(grid: Grid) -> torch.Tensor:
    """The dense mask of a grid, token by token."""
    places = {place: index + grid.prefix for index, place in enumerate(product(*map(range, grid.shape)))}
    mask = torch.zeros((len(places) + grid.prefix,) * 2, dtype=torch.bool)
    mask[: grid.prefix] = mask[:, : grid.prefix] = True
    settings = grid.shape, grid.windows, grid.dilations, grid.causal_axes
    for place, index in places.items():
        axes = [neighbours(*axis, at) for *axis, at in zip(*settings, place, strict=True)]
        for near in product(*axes):
            mask[index, places[near]] = True
    return mask


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    axes = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, (90, 13, 6)[axes - 1])) for _ in range(axes)]
    rates = [draw(st.integers(1, min(3, size))) for size in shape]
    windows = [draw(st.integers(1, size // rate)) for size, rate in zip(shape, rates, strict=True)]
    causal = [draw(st.booleans()) for _ in shape]
    return Grid(tuple(shape), tuple(windows), tuple(rates), tuple(causal), draw(st.sampled_from([0, 0, 1, 20])))


@given(grids(), st.sampled_from(["", " & causal", " | window:3", " & dilated:16x2", " | dilated:16x3"]))
@example(Grid((65,), (5,)), "")
@example(Grid((4, 65), (3, 5)), "")
@settings(max_examples=60, deadline=None)
def test_allows_and_plans_match_brute_force(grid: Grid, other: str):
    mask = brute_force(grid)
    token = torch.arange(len(mask))
    assert torch.equal(grid.allows(token[:, None], token), mask)
    pattern = parse(f"{grid}{other}")
    wanted = multiplicities(pattern, len(mask), 2)
    assert torch.equal(make_plan(pattern, len(mask), 2, block_size=16).to_dense().long(), wanted.long())


@given(grids())
@settings(max_examples=40, deadline=None)
def test_text_comes_back_equal(grid: Grid):
    assert parse(str(grid)) == grid


def test_every_query_sees_as_many_keys():
    token = torch.arange(12 * 9)
    seen = Grid((12, 9), (5, 4), (2, 1)).allows(token[:, None], token).sum(1)
    assert seen.tolist() == [20] * len(token)


def test_one_number_stands_for_all_axes():
    assert parse("grid:8x8;window=3;dilation=2") == Grid((8, 8), 3, 2) == Grid((8, 8), (3, 3), (2, 2))


def test_causal_axis_sees_no_later_frame():
    grid, token = Grid((4, 3, 3), (2, 3, 3), causal=(True, False, False)), torch.arange(36)
    frame = token // 9
    assert torch.equal(grid.allows(token[:, None], token), (frame <= frame[:, None]) & (frame > frame[:, None] - 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid((4, 4), (5, 3)), "must fit the grid's 4 tokens on axis 0, got 5 times 1"),
        (lambda: Grid((4, 4), 2, 3), "must fit the grid's 4 tokens on axis 0, got 2 times 3"),
        (lambda: Grid((4, 4), (3,)), "must have one value for each of 2 axes"),
        (lambda: make_plan(Grid((4, 4), 3), 17, 1), "must have 16 tokens, got 17\nTokens before the grid"),
        (lambda: parse("grid:4x4;window=3;dilation=2xa"), "dilation of grid must be integers joined by x"),
    ],
)
def test_wrong_grids_are_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "text", ["grid:96x96;window=7", "grid:8x32x32;window=3x5x5", "grid:128x128;window=5;dilation=3"]
)
def test_planning_evaluates_kept_tiles_alone(text: str, monkeypatch: pytest.MonkeyPatch):
    grid, evaluated = parse(text), []
    form, count = closed_forms.GridForm, closed_forms.GridForm.count
    monkeypatch.setattr(form, "count", lambda self, q, *rest: evaluated.append(len(q)) or count(self, q, *rest))
    n = grid.shape[0] * grid.strides[0]
    plan = make_plan(grid, n, 1)
    assert sum(evaluated) <= 2 * plan.blocks < (n // 128) ** 2


def test_rows_of_a_grid_are_planned_alone():
    grid, n = parse("grid:20x16;window=5x3;prefix=2").resolve(322, 2), 322
    mask = brute_force(grid)
    plan = plan_rows(grid, n, 2, [(100, 140)], block_size=16)
    assert torch.equal(plan.to_dense()[0].bool()[100:140], mask[100:140])


def test_sliding_tiles_of_a_video_match_a_dense_mask():
    """Blocks of frames, rows and columns as docs/grids.md lays them out, against a mask by coordinates."""
    shape, block, window = (4, 8, 6), (2, 2, 3), (1, 3, 2)
    tiles = [size // width for size, width in zip(shape, block, strict=True)]
    tile = torch.arange(tiles[0] * tiles[1] * tiles[2])
    near = Grid(tuple(tiles), window).allows(tile[:, None], tile)
    sliding = BlockLists.of([row.nonzero().flatten().tolist() for row in near], block=12)
    order = torch.arange(4 * 8 * 6).view(2, 2, 4, 2, 2, 3).permute(0, 2, 4, 1, 3, 5).flatten()
    query, key, value = torch.randn(3, 1, 2, 4 * 8 * 6, 8, dtype=torch.float64).unbind()
    output = torch.empty_like(query)
    output[:, :, order] = attention(*(x[:, :, order] for x in (query, key, value)), sliding)
    seen = torch.ones(len(order), len(order), dtype=torch.bool)
    for places in product(enumerate(product(*map(range, shape))), repeat=2):
        (q, of_query), (k, of_key) = places
        for size, width, reach, a, b in zip(tiles, block, window, of_query, of_key, strict=True):
            seen[q, k] &= b // width in neighbours(size, reach, 1, False, a // width)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    assert (output - wanted).abs().max() < 1e-12
