"""Work tables of the Triton kernels equal the plan, for whole rows and for pieces of rows."""

import pytest
from cases import PROBLEMS

from dilated_attention_pytorch.kernels.triton import lowering as triton_lowering
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan


def entries_of(side):
    """Every (class, stationary tile, streamed tile, mask) in the work table, with mask -1 for whole tiles."""
    found = []
    for index, item in enumerate(side.work.tolist()):
        tile, full_begin, full_end, full_base, partial_begin, partial_end, partial_base, _ = item
        if tile < 0:
            continue
        kind = index // side.items
        lists = side.lists.tolist()
        found += [(kind, tile, full_base + lists[j], -1) for j in range(full_begin, full_end)]
        found += [
            (kind, tile, partial_base + lists[j], lists[j + side.mask_shift]) for j in range(partial_begin, partial_end)
        ]
    return sorted(found)


def entries_in(walk, tiles):
    row, tile, mask = (column.tolist() for column in walk.entries())
    return sorted((r // tiles, r % tiles, t, m) for r, t, m in zip(row, tile, mask, strict=True))


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_work_table_has_every_entry_of_the_plan_once(problem, pieces, monkeypatch):
    if pieces:
        monkeypatch.setattr(triton_lowering, "SHORTEST_PIECE", 1)
        monkeypatch.setattr(triton_lowering, "PROGRAMS_PER_PROCESSOR", 1000)
    plan = make_plan(problem.pattern, problem.n, problem.heads, problem.block_size)
    tables = triton_lowering.schedule(plan, problem.heads // problem.key_heads)
    assert len(tables.by_query) == len(tables.by_key) == len(plan.parts)
    for direction in ("by_query", "by_key"):
        axis = "queries" if direction == "by_query" else "keys"
        done = sorted((entries_of(getattr(part, direction)) for part in getattr(tables, direction)), key=str)
        wanted = sorted(
            (entries_in(getattr(part, direction), getattr(part, axis).tiles) for part in plan.parts), key=str
        )
        assert done == wanted


def test_long_rows_are_split_into_pieces_with_a_slot_each(monkeypatch):
    monkeypatch.setattr(triton_lowering, "SHORTEST_PIECE", 1)
    monkeypatch.setattr(triton_lowering, "PROGRAMS_PER_PROCESSOR", 16)
    plan = make_plan(parse("window:1 | global:1"), 512, 1, 16)
    side = triton_lowering.schedule(plan, 1).by_key[0].by_key
    (tile, first_slot, pieces, _), *rest = [row for row in side.heavy.tolist() if row[0] >= 0]
    assert (tile, first_slot) == (0, 0) and pieces > 1 and not rest
    assert sorted(side.work[:, 7][side.work[:, 0] == 0].tolist()) == list(range(pieces))
    assert side.slots == pieces


def test_only_a_part_that_writes_every_row_comes_last():
    covering = triton_lowering.schedule(make_plan(parse("dilated:16x1,32x2,64x4"), 128, 4, 16), 1)
    assert [part.by_query.covers for part in covering.by_query] == [False, False, True]
    assert covering.by_query[-1].query_rate == 1
    sparse = triton_lowering.schedule(make_plan(parse("dilated:32x4"), 128, 4, 16), 1)
    assert not sparse.by_query[0].by_query.covers


def test_query_heads_on_other_residues_become_other_owners():
    plan = make_plan(parse("dilated:64x4"), 128, 4, 16)
    together = triton_lowering.schedule(plan, 4).by_key[0]
    assert together.by_key.mixed
    assert together.by_key.owners[:, [0, 2]].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert together.by_key.covers
    assert not triton_lowering.schedule(plan, 1).by_key[0].by_key.mixed


def test_schedule_is_built_once_for_a_plan():
    plan = make_plan(parse("causal"), 64, 2, 16)
    assert triton_lowering.schedule(plan, 1) is triton_lowering.schedule(plan, 1)
