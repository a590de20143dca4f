"""Turns of the additions to dQ on Hopper: the lists of the host, and the kernel under schedules of the emulator."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from kernels.test_hopper_split import emulated

from dilated_attention_pytorch.kernels.call import AttentionCall, Extent, saving_memory
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.kernels.hopper import backward as hopper_gradients
from dilated_attention_pytorch.kernels.hopper import turns
from dilated_attention_pytorch.kernels.hopper.backward import adds_in_turns
from dilated_attention_pytorch.kernels.hopper.lowering import ITEM_ROWS, lower
from dilated_attention_pytorch.kernels.hopper.split_rows import split
from dilated_attention_pytorch.kernels.hopper.turns import in_turns, suits
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan

PATTERNS = [
    ("window:200", 128),
    ("causal", 256),
    ("global:64 | window:100", 128),
    ("random:0.3;block=128;seed=1;per_head=1 & causal", 256),
    ("blocks:0,,1 2,,4;block=128", 128),
    ("dilated:128x1,256x2,640x5 & causal", 128),
    ("dilated:300x3,200x1", 128),
    ("dilated:128x1,256x2;heads=split;offset=block", 128),
    ("documents:130,1,300,209 & causal", 128),
]


def launches_of(lowered, plan, group, programs=None):
    """Works of a part before and after `in_turns`: one, or whole rows and pieces if rows are split."""
    work = lowered.backward_items(group, by_key=True)
    works, blocks = (work,), (lowered.part.keys.tiles,)
    if programs is not None:
        cut = split(lowered, work, 1, programs, group, by_key=True)
        works, blocks = (cut.rest, cut.pieces), (*blocks, cut.slots)
    return works, in_turns(works, blocks, lowered.part.queries.tiles, plan.block_size, group)


def entries_of(work, group):
    """Item number, its record, and every entry of it, in the order in which the kernel adds them."""
    for number, record in enumerate(work.items.tolist()):
        for entry in work.partial[record[-1] : record[-1] + record[2]].tolist():
            yield number, record, (record[0] * group + entry[4], *entry)


def walked(work, strided, block, group, are_pieces):
    """Entries (query head, held tile, tile, mask, band) of the lists that the kernel without turns reads."""
    found = Counter()
    classes = work.classes.view(len(work.classes), -1).tolist()
    blocks = len(work.rows) // (max(kind[0] for kind in classes) + 1)
    for record in work.items.tolist():
        held = record[1]
        row = record[4] if strided else (record[3] if are_pieces else held) * ITEM_ROWS // block
        for head in range(record[0] * group, (record[0] + 1) * group):
            if classes[head][0] < 0 or (strided and classes[head][1] != record[5]):
                continue
            begin, end, base, part_begin, part_end, part_base = work.rows[classes[head][0] * blocks + row].tolist()
            found.update((head, held, base + tile, -1, 0, 0) for tile in work.full[begin:end].tolist())
            partial = work.partial[part_begin:part_end].tolist()
            found.update((head, held, part_base + tile, *rest) for tile, *rest in partial)
    return found


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("pattern", "block"), PATTERNS)
def test_entries_in_turns_are_those_of_the_walk(pattern, block, group):
    plan = make_plan(parse(pattern), 640, 4, block_size=block)
    for lowered in lower(plan):
        (work,), (ordered,) = launches_of(lowered, plan, group)
        found = Counter((head, record[1], *entry[:4]) for _, record, (head, *entry) in entries_of(ordered, group))
        assert found == walked(work, lowered.strided, block, group, are_pieces=False)
        assert sorted(ordered.items[:, :-1].tolist()) == sorted(work.items.tolist())


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("pattern", "block"), PATTERNS)
def test_turns_follow_the_order_of_items(pattern, block, group):
    plan = make_plan(parse(pattern), 640, 4, block_size=block)
    for lowered in lower(plan):
        _, (ordered,) = launches_of(lowered, plan, group)
        counters = Counter()
        for _, _, (head, tile, *_, turn) in entries_of(ordered, group):
            assert turn == counters[head, tile]
            counters[head, tile] += 1


@pytest.mark.parametrize(("group", "block"), [(1, 128), (2, 128), (1, 256)])
def test_turns_of_pieces_follow_those_of_whole_rows(group, block):
    plan = make_plan(parse("global:200;queries=1 | window:60"), 16384, 4, block_size=block)
    (lowered,) = lower(plan)
    works, launches = launches_of(lowered, plan, group, programs=132)
    counters = Counter()
    for work, ordered, are_pieces in zip(works, launches, (False, True), strict=True):
        found = Counter((head, record[1], *entry[:4]) for _, record, (head, *entry) in entries_of(ordered, group))
        assert found == walked(work, False, block, group, are_pieces)
        for _, _, (head, tile, *_, turn) in entries_of(ordered, group):
            assert turn == counters[head, tile]
            counters[head, tile] += 1
    assert len(launches[1].items) > 1


def test_heads_with_equal_lists_share_their_entries():
    one, eight = (make_plan(parse("window:300"), 4096, heads) for heads in (1, 8))
    lists = [launches_of(lower(plan)[0], plan, 1)[1][0] for plan in (one, eight)]
    assert torch.equal(lists[0].partial, lists[1].partial) and len(lists[1].items) == 8 * len(lists[0].items)


def test_items_of_a_window_reach_tiles_in_sequence():
    plan = make_plan(parse("window:1000"), 16384, 1)
    _, (ordered,) = launches_of(lower(plan)[0], plan, 1)
    position, last = Counter(), {}
    for number, record, (_, tile, *_) in entries_of(ordered, 1):
        # If all items start together, the preceding item reached the tile a step earlier; the last lists are shorter.
        assert tile not in last or record[1] > 119 or last[tile] < position[number]
        last[tile] = position[number]
        position[number] += 1


@pytest.mark.parametrize("pattern", ["window:300", "dilated:512x1,2048x4", "dilated:300x3,700x7"])
def test_workspace_covers_sums_and_counters(pattern, monkeypatch):
    reason = hopper_backend.gluon_missing()
    if reason is not None:
        pytest.skip(reason)
    for module in (hopper_backend, hopper_gradients):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    configs = hopper_gradients.BACKWARD_CONFIGS
    config = configs[64]
    monkeypatch.setitem(configs, 64, replace(config, ordered=True))
    query, key = (torch.empty(2, heads, 2100, 64, dtype=torch.bfloat16) for heads in (4, 2))
    lse = torch.empty(2, 4, 2100)
    call = AttentionCall(query, key, key, make_plan(parse(pattern), 2100, 4), 0.125)
    launch = hopper_gradients.BackwardLaunch(
        call, (query, key, key, query, query, lse, lse), True, config, False, ordered=True
    )
    assert not any("attention_dq" in step.launch.kernel.__name__ for step in launch.launches.steps)
    counters = launch.cleared[1] - launch.cleared[0]
    assert counters >= 2 * 4 * 2100 // 128
    whole = Extent(8 * 2100, 4 * 2100, 2, 4)
    assert 4 * launch.floats <= hopper_backend.workspace(call, "backward", whole)
    monkeypatch.setitem(configs, 64, config)
    with saving_memory():
        assert 4 * launch.floats > hopper_backend.workspace(call, "backward", whole)


SUITABLE = ["window:200", "causal", "window:127,0", "full", "dilated:512x1,2048x4", "global:128 | window:300"]
UNSUITABLE = ["random:0.1;block=128;seed=0", "random:0.01;block=128;seed=0", "dilated:128x1"]


@pytest.mark.parametrize("pattern", [*SUITABLE, *UNSUITABLE])
def test_turns_are_taken_for_neighbouring_key_tiles(pattern):
    plan = make_plan(parse(pattern), 16384, 2)
    config = hopper_gradients.BACKWARD_CONFIGS[64]
    assert adds_in_turns(plan, config) == (pattern in SUITABLE)
    with saving_memory():
        assert not adds_in_turns(plan, config)
    for ordered in (True, False):
        assert adds_in_turns(plan, replace(config, ordered=ordered)) == ordered
    assert not adds_in_turns(plan, hopper_gradients.BACKWARD_CONFIGS[128])


def test_turns_are_not_taken_for_long_lists(monkeypatch):
    monkeypatch.setattr(turns, "MOST_ENTRIES", 200)
    assert suits(make_plan(parse("window:200"), 4096, 2)) and not suits(make_plan(parse("window:900"), 4096, 2))


@pytest.fixture(scope="module")
def found():
    """Lines of one run of the emulator."""
    lines = emulated("--turns")
    trials = {line.pop("trial"): line for line in lines if "trial" in line}
    (learned,) = (line["learned"] for line in lines if "learned" in line)
    padded = [line["padded"] for line in lines if "padded" in line]
    return trials, {line["fault"]: line["found"] for line in lines if "fault" in line}, padded, learned


@pytest.mark.slow
@pytest.mark.xdist_group("hopper turns")
def test_sums_in_turns_match_oracle_and_any_schedule(found):
    trials, *_ = found
    assert len(trials) == 8
    for name, line in trials.items():
        assert max(line["errors"]) <= 2e-6, name
        assert line["in turns"] is None, name
        # Without turns the bits of some schedule differ.
        assert line["any order"] is not None, name


@pytest.mark.slow
@pytest.mark.xdist_group("hopper turns")
def test_emulator_finds_faults_of_turns(found):
    _, faults, *_ = found
    assert len(faults) == 8
    assert [name for name, first in faults.items() if first is None] == []


@pytest.mark.slow
@pytest.mark.xdist_group("hopper turns")
def test_key_tiles_of_padding_alone_take_their_turns(found):
    *_, padded, _ = found
    assert len(padded) == 2
    assert max(max(errors.values()) for errors in padded) <= 2e-6


@pytest.mark.slow
@pytest.mark.xdist_group("hopper turns")
def test_learned_plans_compute_dq_by_rows(found):
    *_, learned = found
    del learned["launches"]
    assert max(learned.values()) <= 2e-6, learned
