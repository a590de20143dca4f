"""Plans of packed documents from bounds on a device: the pairs of their windows, no value read, nothing out of range."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from index_calls import same_document
from kernels.no_waiting import GpuRules, NoWaiting
from strategies import Draw, strategy
from torch._subclasses import FakeTensorMode

from dilated_attention_pytorch import parse
from dilated_attention_pytorch.kernels.triton.lowering import schedule
from dilated_attention_pytorch.plan.documents import documents_plan, interval_bits, row_bounds, window_of
from dilated_attention_pytorch.plan.plan import Masks, Plan, Walk
from dilated_attention_pytorch.selection.indices import make_selection
from dilated_attention_pytorch.selection.plan import block_plan


class NoCopies(NoWaiting):
    """Raises also where a value would be copied from the host, which no CUDA graph captures."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name != "aten::lift_fresh", "a value is copied from the host"
        return super().__torch_dispatch__(func, types, args, kwargs)


class PackedCall(NamedTuple):
    """A window in documents, some of them empty."""

    bounds: tuple[int, ...]
    size: int = 16
    before: int = 1000
    after: int = 1000

    def window(self) -> tuple[int, int]:
        return min(self.before, self.bounds[-1]), min(self.after, self.bounds[-1])

    def plan(self, heads: int = 2) -> Plan:
        bounds = torch.tensor(self.bounds, dtype=torch.int32)
        with NoCopies():
            return documents_plan(bounds, self.bounds[-1], heads, self.size, *self.window())

    def seen(self) -> torch.Tensor:
        """Pairs that the window allows, bool (n, n)."""
        token = torch.arange(self.bounds[-1])
        ahead = token - token[:, None]
        return same_document(torch.tensor(self.bounds), len(token)) & (ahead >= -self.before) & (ahead <= self.after)


def drawn(draw: Draw) -> PackedCall:
    n = draw.integer(1, 150)
    inner = sorted(draw.integer(0, n) for _ in range(draw.integer(0, 6)))
    near = [draw.choice([0, 1, 15, 16, 17, 31, 40, 1000]) for _ in range(2)]
    return PackedCall((0, *inner, n), draw.choice([16, 32]), *near)


def pairs_by_key(plan: Plan) -> torch.Tensor:
    """Pairs of the walk by key, each as often as it is met, int (n, n)."""
    (part,), size = plan.parts, plan.block_size
    token, exists = part.queries.tokens(size, 0)
    masks = plan.masks.dense(size)
    pairs = torch.zeros(plan.n, plan.n, dtype=torch.int32)
    for key, query, mask in zip(*(x.tolist() for x in part.by_key.entries()), strict=True):
        assert mask >= 0 or exists[query].all()
        allowed = masks[mask] if mask >= 0 else torch.ones(size, size, dtype=torch.bool)
        allowed = allowed[exists[query]][:, exists[key]].int()
        pairs[token[query][exists[query], None], token[key][exists[key]]] += allowed
    return pairs


@settings(max_examples=80)
@example(PackedCall((0, 1)))
@example(PackedCall((0, 0, 64, 64, 64), before=0, after=0))
@example(PackedCall((0, 40, 100), after=0))
@given(strategy(drawn))
def test_plan_holds_the_pairs_of_the_window(call: PackedCall):
    plan = call.plan()
    assert torch.equal(plan.to_dense(), call.seen().int().expand(2, -1, -1))
    assert torch.equal(pairs_by_key(plan), call.seen().int())
    band = plan.masks.band
    assert (band[:, 0] <= band[:, 1]).all()
    element = torch.arange(call.size)
    ahead = element - element[:, None]
    by_band = (ahead >= band[:, 0, None, None]) & (ahead <= band[:, 1, None, None])
    assert torch.equal(by_band, plan.masks.dense(call.size))


@settings(max_examples=40)
@given(strategy(drawn))
def test_row_bounds_are_the_keys_of_the_document(call: PackedCall):
    n, bounds = call.bounds[-1], torch.tensor(call.bounds)
    key = torch.arange(n)
    for is_causal in (False, True):
        with NoCopies():
            low, high = row_bounds(bounds, n, is_causal)[..., None].unbind(1)
        seen = call._replace(before=n, after=0 if is_causal else n).seen()
        assert torch.equal((key >= low) & (key < high), seen)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_interval_bits_cut_what_lies_outside(size):
    low, high = torch.randint(-9, size + 9, (2, 200, 1))
    element = torch.arange(size)
    bits = interval_bits(low, high, size)
    assert torch.equal(Masks(bits, bits[:, 0]).dense(size)[:, 0], (element >= low) & (element < high))


BAD = [[5, 3, 900, -7, 1], [0, 2**31 - 1, -(2**31), 50], [9, 9], [50, 0], [-1, 20, 10, 30], [0, 40, 10, 50]]
BAD += [[0, 48, 2, 45, 5, 50]]


def check_walk(walk: Walk, tiles: int, masks: int) -> None:
    row, tile, mask = walk.entries()
    assert row.numel() and int(tile.min()) >= 0 and int(tile.max()) < tiles
    assert int(mask.max()) < masks


@pytest.mark.parametrize("bad", BAD)
def test_bad_bounds_lead_to_no_key_outside(bad):
    bounds = torch.tensor(bad, dtype=torch.int32)
    low, high = row_bounds(bounds, 50, False).unbind(1)
    token = torch.arange(50)
    assert (low >= 0).all() and (low <= token).all() and (high > token).all() and (high <= 50).all()
    indices = torch.arange(4, dtype=torch.int32).expand(1, 1, 4, 4)
    with GpuRules():
        selection = make_selection(indices, n=50, heads=1, granularity=16, cu_seqlens=bounds)
    listed = block_plan(selection, False)
    for plan in (documents_plan(bounds, 50, 1, 16, 50, 50), listed):
        (part,) = plan.parts
        assert (part.queries.start >= 0).all() and (part.queries.end <= 50).all()
        for walk in (part.by_query, part.by_key):
            check_walk(walk, part.queries.tiles, len(plan.masks.bits))
        whole = part.by_query.entries()
        whole = whole[1][whole[2] < 0]
        assert (part.keys.start[whole] + 16 <= part.keys.end[whole]).all()
        # Every row is written once, and sees itself.
        token, exists = part.queries.tokens(16, 0)
        assert torch.equal(token[exists].sort().values, torch.arange(50))
        assert plan.to_dense().diagonal(dim1=1, dim2=2).all()


def test_windows_are_found_in_patterns():
    patterns = {
        "full": (50, 50),
        "causal": (50, 0),
        "window:7": (7, 7),
        "window:7,3 & causal": (7, 0),
        "window:7,3 & window:2,9": (2, 3),
        "window:900": (50, 50),
        "global:4": None,
        "window:7 | global:4": None,
        "causal & strided:4": None,
        "dilated:16x1": None,
    }
    for text, window in patterns.items():
        assert window_of(parse(text), 50) == window


def test_windows_are_planned_where_tensors_have_no_values():
    with FakeTensorMode():
        plan = documents_plan(torch.empty(4, dtype=torch.int32), 300, 4, 16, 40, 0)
        lowered = schedule(plan, 2)
    assert lowered.by_query[0].strided and not lowered.bits


@pytest.mark.parametrize("per_token", [False, True])
def test_no_value_is_read_or_copied_for_lists(per_token):
    bounds = torch.tensor([0, 30, 31, 90], dtype=torch.int32)
    indices = torch.randint(-1, 6, (1, 2, 90 if per_token else 6, 5), dtype=torch.int32)
    # Tables that follow from shapes alone are cached by the first call.
    for rules in (NoWaiting(), NoCopies()):
        with GpuRules(), rules:
            selection = make_selection(indices, n=90, heads=4, granularity=16, is_causal=True, cu_seqlens=bounds)
            if not per_token:
                schedule(block_plan(selection, host_sync=False), 2)
