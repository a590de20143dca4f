"""Hopper kernels in the emulator, and the pieces of their long rows."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention_pytorch.kernels.call import AttentionCall, Extent
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.kernels.hopper import lowering as hopper_lowering
from dilated_attention_pytorch.kernels.hopper import split_rows as hopper_split
from dilated_attention_pytorch.kernels.hopper.lowering import BackwardItems, lower
from dilated_attention_pytorch.kernels.hopper.split_rows import lengths_of_pieces, split
from dilated_attention_pytorch.ops.memory_budget import memory
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.plan.plan import map_tensors

TESTS = Path(__file__).resolve().parents[1]
PIECES = {
    "no long row": [0, 0, 0, 0],
    "global rows and columns": [4, 4, 4, 4],
    "a ragged last row": [8, 8, 8, 8],
    "causal, grouped heads": [0, 0, 8, 8],
    "a list a head": [6, 6, 8, 8],
    "groups of unlike heads": [6, 6, 0, 0],
    "blocks of 256": [3, 3, 3, 3],
    "blocks of 64": [4, 4, 8, 8],
    "half precision": [8, 8, 8, 8],
    "widths 96 and 80": [8, 8, 8, 8],
    "some rows see no key": [8, 8, 0, 0],
}
"""Slots of a head for the output, dQ, dK and dV."""
BOTH_ORDERS = pytest.mark.parametrize("order", ["ordered", "any-order"])
WIDTHS, PADDING = (pytest.mark.xdist_group(f"hopper {part}") for part in ("widths", "padding"))


@cache
def trials(part):
    """Errors and pieces of the trials of a part, from one run of the emulator."""
    return {line.pop("trial"): line for line in emulated(f"--{part}")}


@pytest.fixture(scope="module")
def found():
    """Errors and pieces of the trials of plans."""
    return trials("plans")


def emulated(*arguments):
    reason = hopper_backend.gluon_missing()
    if reason is not None:
        pytest.skip(reason)
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    program = TESTS / "kernels" / "interpret_hopper.py"
    done = subprocess.run([sys.executable, program, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.xdist_group("hopper interpreter")
@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("learned", 1),
        ("learned, other lists", 1),
        ("learned, causal", 2),
        ("learned, ragged", 3),
        ("learned by tokens", 3),
        ("learned, padded", 4),
        ("learned, padded, other lists", 4),
        ("learned, blocks of 64", 5),
    ],
)
def test_learned_plans_of_one_shape_share_a_launch(found, name, launches):
    errors = dict(found[name])
    assert errors.pop("launches") == launches
    assert max(errors.values()) <= (2e-3 if name == "learned by tokens" else 2e-6), errors


@pytest.mark.slow
@pytest.mark.xdist_group("hopper interpreter")
def test_attention_on_indices_matches_oracle(found):
    calls = {name: errors for name, errors in found.items() if name.startswith("indices")}
    assert len(calls) == 6
    for name, errors in calls.items():
        assert max(errors.values()) <= (2e-3 if "tokens" in name else 2e-6), (name, errors)


@pytest.mark.slow
@pytest.mark.xdist_group("hopper interpreter")
@pytest.mark.parametrize(("kind", "count"), [("ladder", 5), ("any order", 6)])
def test_strided_parts_and_atomic_sums_match_oracle(found, kind, count):
    parts = {name: errors for name, errors in found.items() if name.startswith(kind)}
    assert len(parts) == count
    for name, errors in parts.items():
        assert max(errors.values()) <= 2e-6, (name, errors)


def of_order(part, order):
    """Errors of the trials of a part, with sums of dQ in one order."""
    return {name: line for name, line in trials(part).items() if name.endswith("any order") == (order == "any-order")}


@pytest.mark.slow
@BOTH_ORDERS
@pytest.mark.parametrize(
    ("part", "kind", "counts"),
    [
        pytest.param("widths", "width", (11, 11), marks=WIDTHS),
        pytest.param("widths", "scale", (4, 4), marks=WIDTHS),
        pytest.param("padding", "padded", (12, 12), marks=PADDING),
        pytest.param("padding", "sink", (11, 4), marks=PADDING),
    ],
)
def test_widths_scales_padding_and_sinks_match_oracle(order, part, kind, counts):
    calls = {name: errors for name, errors in of_order(part, order).items() if name.startswith(kind)}
    assert len(calls) == counts[order == "any-order"]
    for name, errors in calls.items():
        assert max(errors.values()) <= (2e-3 if "half precision" in name else 2e-6), (name, errors)


@pytest.mark.slow
@BOTH_ORDERS
@WIDTHS
def test_runs_of_fewer_queries_than_keys_match_oracle(order):
    runs = {name: dict(errors) for name, errors in of_order("widths", order).items() if "fewer" in errors}
    assert len(runs) == 6
    for name, errors in runs.items():
        assert errors.pop("fewer"), name
        assert max(errors.values()) <= 2e-6, (name, errors)


@pytest.mark.slow
def test_emulator_finds_faults_of_synchronization():
    faults = {line["fault"]: line["found"] for line in emulated("--faults")}
    assert len(faults) == 28
    assert [name for name, found in faults.items() if isinstance(found, float) and found <= 1e-3] == []


@pytest.mark.slow
@pytest.mark.xdist_group("hopper interpreter")
@pytest.mark.parametrize("name", PIECES)
def test_joined_pieces_match_the_oracle(found, name):
    errors = dict(found[name])
    assert errors.pop("pieces") == PIECES[name]
    for what, error in errors.items():
        assert error <= (2e-3 if name == "half precision" else 2e-6), what


def entries(work, kinds, group, *, pieces=False):
    """Number of times that each tile of each holder reads each entry of the lists."""
    met = Counter()
    for record in work.items.tolist():
        holder, tile = record[:2]
        if isinstance(work, BackwardItems):
            rows = work.rows.view(max(kinds) + 1, -1, 6)
            row = rows[kinds[holder], record[3] if pieces else tile].tolist()
            assert group * (row[1] - row[0] + row[4] - row[3]) == record[2]
        else:
            begin, full, base, partial_begin, partial, partial_base = record[2:8]
            row = [begin, begin + full, base, partial_begin, partial_begin + partial, partial_base]
        for at in range(row[0], row[1]):
            met[holder, tile, "whole", row[2], at] += 1
        for at in range(row[3], row[4]):
            met[holder, tile, "partial", row[5], at] += 1
    return met


UNLIKE = "(random:0.8;block=128;seed=1;per_head=1 & global:128;queries=1) | window:60"


GLOBAL = "global:200;queries=1 | window:60"


@pytest.mark.parametrize(
    ("pattern", "direction"),
    [
        *((pattern, direction) for pattern in (GLOBAL, UNLIKE) for direction in ("forward", "dq", "dkv")),
        (f"({GLOBAL}) & causal", "dkv"),
    ],
)
def test_whole_rows_and_pieces_read_every_entry_once(pattern, direction, monkeypatch):
    monkeypatch.setattr(hopper_split, "SHORTEST_PIECE", 128**2)
    monkeypatch.setattr(hopper_split, "ROWS_A_PIECE", 1)
    n, heads, programs = 2800, 4, 40
    by_key = direction == "dkv"
    group = 2 if by_key and pattern != UNLIKE else 1
    (step,) = lower(make_plan(parse(pattern), n, heads, block_size=128))
    work = step.by_query if direction == "forward" else step.backward_items(group, by_key=by_key)
    cut = split(step, work, 1, programs, group, by_key=by_key)
    assert cut is not None
    kinds = step.part.head_class[::group].tolist()
    whole, pieces = entries(cut.rest, kinds, group), entries(cut.pieces, kinds, group, pieces=True)
    assert pieces and whole + pieces == entries(work, kinds, group)
    assert not {key[:2] for key in whole} & {key[:2] for key in pieces}
    records = cut.pieces.items.tolist()
    assert len(records) <= programs
    # The launch that sums the pieces of a tile reads exactly its slots, in order.
    slots = {(holder, tile): [] for holder, tile, *_ in records}
    for holder, tile, *_, slot in sorted(records, key=lambda record: record[-1]):
        slots[holder, tile].append(slot)
    heavy = cut.heavy.view(-1, cut.heavy_rows, 4).tolist()
    joined = {
        (holder, tile): list(range(first, first + count))
        for holder, kind in enumerate(kinds)
        for tile, first, count, _ in heavy[kind]
        if tile >= 0
    }
    assert slots == joined
    assert max(slot for own in slots.values() for slot in own) < cut.slots


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([50] * 512, None),
        ([512] + [4] * 2000, (80, 16)),
        ([128] * 24 + [70] * 160, (124, 26)),
        ([64] * 64, (47, 32)),
        ([96] * 96, None),
        ([512] + [100] * 100, (159, 16)),
    ],
    ids=["windows", "one row", "pieces fill one round", "few rows", "too many rows", "one among long ones"],
)
def test_rows_are_split_if_that_is_faster(lengths, expected):
    assert lengths_of_pieces(torch.tensor(lengths), 132, 1000, 16) == expected


@pytest.mark.parametrize(("n", "heads", "batch"), [(16384, 1, 1), (16384, 2, 3), (65536, 1, 1)])
def test_split_rows_take_at_most_an_eighth_of_the_output(n, heads, batch):
    (step,) = lower(make_plan(parse("global:500;queries=1 | window:60"), n, heads, block_size=128))
    cut = split(step, step.by_query, batch, 132)
    assert cut is not None and cut.slots * cut.block <= n / 8


def test_host_does_not_read_lists_of_a_learned_plan(monkeypatch):
    (step,) = lower(make_plan(parse("global:128;queries=1 | window:60"), 1400, 4, block_size=128))
    monkeypatch.setattr(step, "launches", {})
    monkeypatch.setattr(hopper_split, "lengths_of_pieces", pytest.fail)
    assert split(step, step.by_query, 1, 24) is None


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("pattern", "block"),
    [
        *(("global:500;queries=1 | window:60", block) for block in (64, 128)),
        ("random:0.3;block=128;per_head=1", 128),
        ("window:900", 128),
    ],
)
def test_workspace_covers_pieces_of_rows(pattern, block, batch, monkeypatch):
    monkeypatch.setattr(hopper_backend, "processors", lambda device: 132)
    n, heads, key_heads, d = 16384, 4, 2, 128 if block == 64 else 64
    plan = make_plan(parse(pattern), n, heads, block_size=block)
    query, key = (torch.empty(batch, count, n, d, dtype=torch.bfloat16) for count in (heads, key_heads))
    call = AttentionCall(query, key, key, plan, 0.125)
    whole = Extent(batch * heads * n, batch * key_heads * n, batch, heads)
    (step,) = lower(plan)
    programs = 264 if block == 64 else 132
    by_query = split(step, step.by_query, batch, programs)
    by_key = split(step, step.backward_items(2, by_key=True), batch, programs, 2, by_key=True)
    rows = [0 if cut is None else math.prod(cut.piece_shape(batch, 1)) for cut in (by_query, by_key)]
    assert hopper_backend.workspace(call, "forward", whole) >= rows[0] * (2 * d + 4)
    assert hopper_backend.workspace(call, "backward", whole) >= 2 * d * (rows[0] + 2 * rows[1]) + 4 * batch * heads * n


@pytest.mark.parametrize(("d", "width"), [(32, 64), (96, 128)])
def test_workspace_covers_narrow_heads_and_signed_queries(d, width, monkeypatch):
    monkeypatch.setattr(hopper_backend, "processors", lambda device: 132)
    n, heads = 1024, 2
    plan = make_plan(parse("window:100"), n, heads, block_size=128)
    query = torch.empty(1, heads, n, d, dtype=torch.bfloat16)
    whole = Extent(heads * n, heads * n, 1, heads)
    positive, negative = (AttentionCall(query, query, query, plan, scale) for scale in (0.1, -0.1))
    sizes = [memory(call, "hopper", "forward").sizes[heads * n] for call in (positive, negative)]
    assert sizes[1] >= sizes[0] + query.numel() * query.element_size()
    monkeypatch.setattr(hopper_backend, "reproducible_gradients", lambda: False)
    # dQ in float32 has the columns of tiles.
    assert hopper_backend.workspace(positive, "backward", whole) >= 4 * heads * n * (width + 1)


COPY = torch.ops.aten._to_copy.default
HOST, AWAY = torch.device("cpu"), torch.device("ipu", 0)


class Far(torch.Tensor):
    """A tensor on a fake device, whose only operation is a copy to the host."""

    @staticmethod
    def __new__(cls, near):
        far = torch.Tensor._make_wrapper_subclass(cls, near.shape, dtype=near.dtype, device=AWAY)
        far.near = near.contiguous()
        return far

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        if operation is not COPY or kwargs.get("device") != HOST:
            raise RuntimeError(f"{operation} on the device")
        return args[0].near.clone()


class CopiesToFar(TorchDispatchMode):
    """Lets tensors of the host be copied to that device."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operation is COPY and kwargs.get("device") == AWAY:
            return Far(args[0])
        return operation(*args, **kwargs)


def lists_of(plan, group):
    """All lists that the kernels read, with those of long rows if a plan has one part."""
    steps = lower(plan)
    for step in steps:
        by_query, by_key, by_row = step.by_query, *(step.backward_items(group, by_key=one) for one in (True, False))
        yield from (*by_query[:-1], *by_key, *by_row)
        if len(steps) == 1:
            for work, size, keys in ((by_query, 1, False), (by_key, group, True), (by_row, 1, False)):
                cut = split(step, work, 1, 40, size, by_key=keys)
                assert cut is not None
                lists = *cut.rest, *cut.pieces, cut.heavy, cut.owners
                yield from (one for one in lists if isinstance(one, torch.Tensor))


@pytest.mark.parametrize("pattern", ["dilated:128x1,256x2,640x5 & causal", "dilated:300x3,200x1", GLOBAL])
def test_small_plans_have_their_lists_built_on_the_host(pattern, monkeypatch):
    monkeypatch.setattr(hopper_split, "SHORTEST_PIECE", 128**2)
    monkeypatch.setattr(hopper_split, "ROWS_A_PIECE", 1)
    plan = make_plan(parse(pattern), 2800, 4, block_size=128)
    # Loading the code of an operation on a GPU takes longer than all of them on the host.
    with CopiesToFar():
        found = list(lists_of(map_tensors(plan, Far), 2))
    assert all(isinstance(one, Far) for one in found)
    for one, expected in zip(found, lists_of(plan, 2), strict=True):
        assert torch.equal(one.near, expected)
    monkeypatch.setattr(hopper_lowering, "HOST_NUMBERS", 0)
    with pytest.raises(RuntimeError, match="on the device"), CopiesToFar():
        list(lists_of(map_tensors(plan, Far), 2))
