"""Planned worlds: figures against the closed formula, a table for people, JSON for programs, ranks really run."""

from __future__ import annotations

import json

import pytest

from dilated_attention_pytorch import Causal, Dilated, parse
from dilated_attention_pytorch.distributed import Machine, SequenceLayout, forecast_rank, traffic
from dilated_attention_pytorch.plan import plan_rows
from dilated_attention_pytorch.tools.simulate import execute, main, pattern_of, simulate


def test_a_billion_tokens():
    ranks, most = simulate("longnet", 2**30, [1024, 16384], sample=3)
    assert ranks.bytes_received == 8 * 1024 * 10 * 2 * 128 * 2 <= 42e6
    assert ranks.looked_at == 3
    assert (ranks.messages, ranks.butterfly_messages) == (1023, 10)
    assert ranks.ring_bytes == (2**30 - 2**20) * 8 * 2 * 128 * 2
    assert ranks.all_gather_memory_bytes == 2**30 * 8 * 2 * 128 * 2
    assert ranks.memory_bytes == 2**20 * 8 * 2 * 128 * 2 + ranks.bytes_received, "own rows and received ones"
    assert ranks.balance == pytest.approx(1.0, abs=0.01)
    assert ranks.note is None and most.bytes_received > ranks.bytes_received
    assert ranks.exchange_seconds < ranks.compute_seconds < ranks.ring_seconds


def test_past_the_useful_limit_it_says_so():
    (far,) = simulate("longnet", 2**24, [2**12], sample=2)
    assert "past the useful limit" in far.note


@pytest.mark.parametrize("text", ["dilated:64x1,256x4", "dilated:64x1,256x4 & causal", "window:40 & causal"])
def test_forecasts_are_the_plans(text):
    pattern, layout = parse(text).resolve(2000, 4), SequenceLayout.contiguous(2000, 5)
    moved = traffic(pattern, layout, 4, row_bytes=1)
    for rank in range(5):
        told = forecast_rank(pattern, layout, rank, 4)
        assert (told.rows, told.peers) == (moved[rank].rows_received, moved[rank].peers)
        assert told.flops == plan_rows(pattern, 2000, 4, layout.runs(rank)).flops(1)


def test_assumptions_are_options_and_change_only_the_times():
    one, other = (simulate("longnet", 2**20, [8], sample=1, machine=Machine(bandwidth=b)) for b in (1e9, 1e12))
    assert one[0].bytes_received == other[0].bytes_received
    assert one[0].exchange_seconds > 10 * other[0].exchange_seconds


def test_ranks_really_run_and_their_rows_are_checked():
    done = execute(pattern_of("longnet", 2048, 256) & Causal(), 2048, 16, 2, 16, rows=20)
    assert done["ranks"] == 16 and done["rows"] >= 18
    assert done["error"] <= 0.5


@pytest.mark.slow
def test_256_ranks_really_run():
    assert execute(Dilated((64, 256), (1, 4)), 8192, 256, 2, 16)["error"] <= 0.5


def test_the_table_names_model_and_sample(capsys):
    assert main(["--tokens", "1M", "--ranks", "8,64", "--sample", "2", "--first", "1024"]) == 0
    told = capsys.readouterr().out
    assert "A model, not a measurement" in told
    assert "64 ranks: a sample of 2 was planned" in told


def test_json_and_execution(capsys):
    assert main(["--tokens", "64K", "--ranks", "4", "--run", "1024", "--heads", "2", "--causal", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["worlds"][0]["ranks"] == 4
    assert told["executed"]["error"] <= 1
    assert "GB/s" in told["seconds_are_a_model"]


def test_a_plot_is_drawn_where_asked(tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["--tokens", "64K", "--ranks", "2,4", "--plot", str(tmp_path / "bytes.png")]) == 0
    assert (tmp_path / "bytes.png").stat().st_size > 1000


def test_wrong_use_says_what_must_hold():
    with pytest.raises(ValueError, match="at most 16 ranks"):
        simulate("causal", 16, [17])
    with pytest.raises(ValueError, match="dtype must be one of"):
        simulate("causal", 16, [2], dtype="float8")
    with pytest.raises(ValueError, match="ranks must be whole numbers like 8,64,1024, got '8,0'"):
        main(["--ranks", "8,0"])
    with pytest.raises(ValueError, match="at most 256 ranks"):
        execute(Causal(), 1024, 512, 1, 8)
