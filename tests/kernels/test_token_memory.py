"""Memory of attention where every token selects its key blocks: allocations counted, as on a GPU and on the CPU."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import token_memory

from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive
from dilated_attention_pytorch.selection import attend
from dilated_attention_pytorch.selection.attend import TokenAttend
from dilated_attention_pytorch.selection.backend import select
from dilated_attention_pytorch.selection.types import Selection

PRODUCTION = token_memory.Shape(2**17)
"""64 query heads and 4 key heads of 128, 16 blocks of 128 a token, in bfloat16"""


def test_allocations_count_until_the_last_reference():
    with token_memory.Allocations(torch.device("cpu")) as counted:
        x = torch.zeros(256)
        y = x[:2]
        del x
        z = torch.zeros(128)
        del y, z
        torch.zeros(64)
    assert counted.peak == 1024 + 512
    assert sum(counted.at_peak.values()) == counted.peak


@pytest.mark.parametrize(
    ("call", "lists", "backward", "most"),
    [
        ("indices", 4, False, 0.15),
        ("indices", 4, True, 0.15),
        ("indices", 64, False, 0.25),
        ("layer", 4, False, 0.15),
        ("layer", 4, True, 0.2),
        ("layer", 64, False, 0.3),
        ("layer", 64, True, 0.35),
    ],
)
def test_production_shape_takes_little_more_than_its_tensors(call, lists, backward, most):
    counted = token_memory.count_call(call, PRODUCTION._replace(lists=lists), backward)
    assert 0 < counted["share"] <= most, counted


def test_keys_that_lists_share_are_summarised_once():
    layer = token_memory.Shape(4096, 16, heads=16, key_heads=1, width=64, block=16).layer()
    query, key = torch.randn(1, 16, 4096, 64), torch.randn(1, 1, 4096, 64)
    with torch.no_grad(), token_memory.Allocations(torch.device("cpu")) as counted:
        layer.score_blocks(query, key, is_causal=True)
    # Half of the width of a head is projected for every list; the rest is by block, or once.
    assert counted.peak < 1.5 * query.nbytes, counted.at_peak


@pytest.mark.parametrize(
    ("is_causal", "unit", "most"), [(False, 1, 112), (False, 4, 64), (True, 4, 64), (True, 1, 112)]
)
def test_selection_of_a_gpu_takes_little_memory(is_causal, unit, most):
    """As `tests/gpu/test_selection_gpu.py` measures it."""
    with token_memory.gpu_rules(), token_memory.seen_inside(), token_memory.META, torch.no_grad():
        layer = BlockSparseAdaptive([2**15], [1], 8, 64, AdaptiveConfig(score_unit=unit))
        query, key = torch.empty(2, 1, 8, 2**15, 64, dtype=torch.bfloat16).unbind()
        for _ in range(2):
            with token_memory.Allocations(token_memory.META) as counted:
                select(layer.score_blocks(query, key, is_causal), 2**15)
    assert 0.5 * most < counted.peak / 10**6 <= most, counted.at_peak


def test_extra_memory_does_not_grow_faster_than_tokens():
    extra = [token_memory.count_call("indices", PRODUCTION._replace(tokens=n))["extra"] for n in (2**17, 2**20)]
    assert extra[1] <= 8 * extra[0]


@pytest.mark.parametrize("backward", [False, True])
def test_cpu_call_in_chunks_takes_little_more_than_tensors(backward, monkeypatch):
    monkeypatch.setattr(attend, "GATHERED", 1)
    shape = token_memory.Shape(256, 2, heads=8, key_heads=2, width=32, block=16, listed=8, dtype=torch.float32)
    counted = token_memory.count_call("indices", shape, backward, torch.device("cpu"))
    assert counted["share"] <= 0.75, counted
    monkeypatch.setattr(attend, "GATHERED", 2**30)
    assert token_memory.count_call("indices", shape, backward, torch.device("cpu"))["share"] > 2


def attended(batch, lists, heads, n, listed, size=16, host_sync=False):
    indices = torch.empty(batch, lists, n, listed, dtype=torch.int32, device="meta")
    selection = Selection(indices, indices.sum(-1), n, size, True, True, 1, 0, group=heads // lists)
    return TokenAttend(selection, 1.0, None, 0.0, None, "auto", host_sync, None)


def rows_of(batch, heads, n, width, dtype=torch.bfloat16):
    return torch.empty(batch, heads, n, width, dtype=dtype, device="meta")


@pytest.mark.parametrize("rows", [16, 30, 100, 250, 500, 1000, 2**40])
@pytest.mark.parametrize(("lists", "key_heads"), [(12, 12), (1, 3), (3, 3), (4, 3), (12, 1), (6, 2)])
def test_chunks_have_every_row_once_and_no_part_of_two_lists(lists, key_heads, rows, monkeypatch):
    batch, heads, n = 2, 12, 100
    call = attended(batch, lists, heads, n, 4)
    monkeypatch.setattr(TokenAttend, "_most_rows", lambda *_: (0, rows))
    chunks = [*call.chunks(rows_of(batch, heads, n, 8), *(rows_of(batch, key_heads, n, 8) for _ in range(2)))]
    times, group, sharing = torch.zeros(batch, heads, n), heads // key_heads, heads // lists
    for chunk in chunks:
        chunk.rows(times).add_(1)
        assert chunk.rows(times).numel() <= max(rows, 16)
        some = range(chunk.heads.start, chunk.heads.stop)
        assert {head // group for head in some} == {*range(chunk.key_heads.start, chunk.key_heads.stop)}
        assert len({len([*run]) for _, run in groupby(some, lambda head: head // sharing)}) == 1
    assert torch.equal(times, torch.ones_like(times))
    # Gradients of a key head are summed over consecutive chunks.
    starts = [key_head for key_head, _ in groupby(chunks, lambda chunk: chunk.key_heads.start)]
    assert starts == sorted({*starts})


def test_usual_calls_run_whole():
    query = rows_of(1, 8, 2**15, 64)
    call = attended(1, 8, 8, 2**15, 26, 128)
    assert len([*call.chunks(query, query, query)]) == 1
