"""Plans cut down to a run of rows: tiles inside the stretches of tokens that the run is given, and no others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from strategies import problems

from dilated_attention_pytorch import parse
from dilated_attention_pytorch.patterns import Dilated, Pattern
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.plan.plan import Axis, Plan
from dilated_attention_pytorch.plan.subset import Span, of_rows, spans, widest_tile

COVERED = (
    "hierarchical:0x1;block=32 | dilated:100x2",
    "block_dilated:397x1;block=32 | dilated:77x8",
    "blocks:0 1 2,0 1 2,0 1 2;block=128 | dilated:100x2",
)
"""Unions whose first member holds every pair of the dilated branch: the branch has no tile pair left."""


def outside(axis: Axis, tiles: torch.Tensor, head: int, block: int, length: int) -> int:
    """Existing elements of some tiles that lie outside a buffer of `length` tokens."""
    token, exists = (x[tiles] for x in axis.tokens(block, head))
    return int((exists & ((token < 0) | (token >= length))).sum())


def pairs(plan: Plan, head: int, first: int = 0, key_first: int = 0) -> list[tuple[int, ...]]:
    """Tile pairs of one head as rate, first token and segment end of the query tile, then of the key tile."""
    found = []
    for part in plan.parts:
        row, tile, _ = part.by_query.entries()
        mine = row // part.queries.tiles == int(part.head_class[head])
        row, tile = row[mine] % part.queries.tiles, tile[mine]
        columns = (
            part.queries.start[row] + first,
            part.queries.end[row] + first,
            part.keys.start[tile] + key_first,
            part.keys.end[tile] + key_first,
        )
        found += [(part.queries.rate, *line) for line in torch.stack(columns, 1).tolist()]
    return sorted(found)


def reaches(pair: tuple[int, ...], span: Span, block: int) -> bool:
    rate, start, end = pair[:3]
    return start < span.end and min(start + rate * block, end) > span.begin


def check_spans(pattern: Pattern, n: int, heads: int, block: int | None, rows: int) -> None:
    resolved = pattern.resolve(n, heads)
    plan = make_plan(resolved, n, heads, block_size=block)
    for span in spans(plan, rows):
        cut = of_rows(plan, resolved, span)
        queries, keys = span.last - span.first, span.key_last - span.key_first
        assert 0 <= span.first <= span.begin < span.end <= span.last <= n
        assert span.key_first >= 0 and span.key_last <= n
        assert queries <= keys == cut.n
        for head in range(heads):
            for part in cut.parts:
                row, tile, _ = part.by_query.entries()
                mine = row // part.queries.tiles == int(part.head_class[head])
                row, tile = row[mine] % part.queries.tiles, tile[mine]
                assert outside(part.queries, row, head, plan.block_size, queries) == 0, span
                assert outside(part.keys, tile, head, plan.block_size, keys) == 0, span
            own = pairs(cut, head, span.first, span.key_first)
            assert own == [pair for pair in pairs(plan, head) if reaches(pair, span, plan.block_size)], span
            assert len(own) <= span.pairs


def planned(pattern: Pattern, n: int, heads: int, block: int | None) -> Plan:
    """The whole plan; patterns that need more heads than the problem has are left out."""
    try:
        return make_plan(pattern, n, heads, block_size=block)
    except ValueError:
        assume(False)
        raise


@pytest.mark.parametrize("rows", [32, 64, 100, 128])
@pytest.mark.parametrize("text", COVERED)
def test_spans_hold_every_tile_of_a_covered_branch(text, rows):
    check_spans(parse(text), 257, 2, None, rows)


@given(problems(longest=160), st.sampled_from([16, 32, None]), st.integers(1, 160))
@example((parse(COVERED[0]), 160, 1), None, 64)
@example((parse("hierarchical:0x1;block=4 | dilated:9x5"), 28, 3), 16, 8)
@settings(max_examples=60)
def test_spans_hold_every_tile_of_any_pattern(problem, block, rows):
    pattern, n, heads = problem
    planned(pattern, n, heads, block)
    check_spans(pattern, n, heads, block, rows)


@given(problems(longest=160, leaves=3), st.sampled_from([16, 32, None]))
@settings(max_examples=40)
def test_spans_of_whole_tiles_hold_every_tile_of_a_union(problem, block):
    pattern, n, heads = problem
    united = pattern | Dilated((37, n), (2, 3))
    check_spans(united, n, heads, block, widest_tile(planned(united, n, heads, block)))
