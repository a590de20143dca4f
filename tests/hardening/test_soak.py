"""Exchanges between ranks with faults among them, and what the soak itself would notice."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import processes
import pytest
import torch
from limits import scaled, slowdown

from dilated_attention_pytorch.distributed import (
    RankFault,
    SequenceLayout,
    context_parallel_attention,
    faults,
    regroup,
)

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("soak", ROOT / "benchmarks" / "soak.py")
soak = importlib.util.module_from_spec(spec)
sys.modules["soak"] = soak
spec.loader.exec_module(soak)


@pytest.mark.timeout(200)
def test_exchanges_with_faults_among_them_come_out_right(monkeypatch):
    monkeypatch.setattr(soak, "PATIENCE", scaled(soak.PATIENCE))
    lines = soak.soak(20, 5)
    assert "\n".join(str(line) for line in lines if not line["right"]) == ""
    assert len(lines) == 20
    assert len({line["fault"] for line in lines}) >= 5


def test_the_last_long_soak_came_out_right():
    text = (ROOT / "benchmarks" / "results" / "soak.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) >= 500
    assert all(line["right"] for line in lines)
    faulty = Counter(line["fault"] for line in lines)
    assert set(faulty) == {"none", "nan", *soak.DIFFERENCES, *soak.TOLD, *soak.GONE}


def test_a_mismatch_is_noticed(monkeypatch):
    """Rows of a neighbour instead of the own ones."""
    real = soak.virtual_attention

    def shifted(query, *rest, **options):
        found = real(query, *rest, **options)
        return found._replace(output=found.output.roll(1, 2))

    monkeypatch.setattr(soak, "virtual_attention", shifted)
    drawn = soak.Drawn(0, 1, "virtual", "window:3", 40, 2, "none")
    exchange = soak.Exchange(drawn, 3)
    line = soak.describe(exchange, outcome="computed", error=exchange.on_virtual_ranks())
    assert not soak.verdict([line])["right"]


def left_after_a_death(rank: int, world: int, slower: float) -> tuple[int, ...]:
    """Rank 2 dies between forward and backward; the others regroup where they handle the error, as one would."""
    shard = torch.randn(1, 1, 8, 4, requires_grad=True)
    layout = SequenceLayout.contiguous(8 * world, world)
    try:
        with faults():
            output = context_parallel_attention(shard, shard, shard, "full", layout, exchange="ring")
            if rank == 2:
                os._exit(1)
            output.sum().backward()
    except RankFault:
        return regroup(
            processes.store, 1, rank, world, settle=4 * slower, timeout=timedelta(seconds=20 * slower)
        ).members
    return ()


@pytest.mark.timeout(120)
def test_no_rank_that_lives_is_left_behind():
    """Those that do not border on the lost rank hear of it from the others, long before their own timeout."""
    slower = slowdown()
    answers = processes.run_ranks(left_after_a_death, 5, slower, timeout=40 * slower)
    assert answers == dict.fromkeys((0, 1, 3, 4), (0, 1, 3, 4))


def unknown_backend(rank: int, world: int) -> str:
    """The rank that errs holds no token, and so computes nothing with it."""
    shard = torch.randn(1, 1, 0 if rank == 1 else 12, 4)
    layout = SequenceLayout.of_lengths([12, 0])
    try:
        context_parallel_attention(shard, shard, shard, "full", layout, backend="abacus" if rank == 1 else "auto")
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.timeout(120)
def test_a_backend_that_one_rank_alone_names_is_refused_by_all():
    answers = processes.run_ranks(unknown_backend, 2)
    assert "every rank must make the same call" in answers[0]
    assert "backend must be one of auto" in answers[1]
