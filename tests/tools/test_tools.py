"""The tools tell the truth: the gate sees a wrong number, results are whole lines, charts are well formed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from cases import BY_NAME
from oracle import answer

from dilated_attention_pytorch import parse
from dilated_attention_pytorch.tools import bench, page, trials
from dilated_attention_pytorch.tools.gate import TOLERANCE, Computed, largest_error, sample
from dilated_attention_pytorch.tools.measure import PeakMemory, readable_bytes
from dilated_attention_pytorch.tools.suites import CLASSES, ON_THIS_MACHINE, suite

GATED = ("causal", "dilated-ladder-causal", "dilated-empty-rows", "random", "gqa", "wide-value")


def exact(name: str) -> Computed:
    problem = BY_NAME[name]
    query, key, value, grad_output, _ = problem.inputs()
    wanted = answer(query, key, value, problem.pattern, grad_output=grad_output)
    return Computed(query, key, value, wanted.output, wanted.lse, grad_output, *wanted[2:])


@pytest.mark.parametrize("name", GATED)
def test_the_gate_accepts_the_oracle(name: str):
    problem, computed = BY_NAME[name], exact(name)
    error = largest_error(computed, problem.pattern, torch.arange(problem.n), list(range(problem.heads)))
    assert error <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("what", ["output", "lse", "grad_query", "grad_key", "grad_value"])
@pytest.mark.parametrize("wrong", [1e-3, float("nan"), float("inf")])
def test_the_gate_sees_one_wrong_number(name: str, what: str, wrong: float):
    problem, computed = BY_NAME[name], exact(name)
    damaged = getattr(computed, what).clone()
    damaged[0, -1, computed.lse[0, -1].isfinite().nonzero()[-1]] += wrong
    computed = computed._replace(**{what: damaged})
    error = largest_error(computed, problem.pattern, torch.arange(problem.n), list(range(problem.heads)))
    assert error > 1e-5


@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf")])
def test_the_gate_sees_a_row_without_keys_that_claims_some(wrong: float):
    problem, computed = BY_NAME["dilated-empty-rows"], exact("dilated-empty-rows")
    lse = computed.lse.clone()
    lse[0, 0, lse[0, 0].isinf().nonzero()[0]] = wrong
    assert largest_error(computed._replace(lse=lse), problem.pattern, torch.arange(problem.n), [0]) == float("inf")


def test_samples_hold_both_ends_and_no_position_twice():
    positions = sample(1000, 16)
    assert positions[0] == 0 and positions[-1] == 999 and len(positions) == len(positions.unique()) >= 15
    assert sample(5, 16).tolist() == [0, 1, 2, 3, 4]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> bench.Group:
    cases = (
        bench.Case(name="window", pattern="window:128"),
        bench.Case(name="longnet-ladder", pattern="dilated:256x2"),
    )
    group = bench.Group(n=512, d=16, heads=2, key_heads=2, cases=cases, peer_heads=1, rounds=(2, 2), judged=True)
    monkeypatch.setattr(bench, "suite", lambda name, device: [group])
    return group


def test_results_are_one_line_a_subject_and_direction(small: bench.Group, tmp_path, capsys):
    out = tmp_path / "results" / "small.jsonl"
    assert bench.main(["--out", str(out)]) == 0
    *lines, plans = [json.loads(line) for line in out.read_text().splitlines()]
    assert plans["case"] == "plan cache" and plans["hits"] > plans["misses"]
    assert [(line["case"], line["direction"]) for line in lines] == [
        (case, direction) for case in ("dense", "window", "longnet-ladder") for direction in ("forward", "backward")
    ]
    for line in lines:
        assert line["p20_ms"] <= line["p50_ms"] <= line["p80_ms"]
        assert line["gate_passed"] and line["rounds"] == 2
        assert line["gflop_s"] > 0
    window = next(line for line in lines if line["case"] == "window")
    assert window["density"] == 10 / 16
    assert window["flops"] == 4 * 10 * 128**2 * 16 * small.heads
    assert "Bars" in capsys.readouterr().out


def test_a_wrong_result_is_reported_and_not_timed(small: bench.Group, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "largest_error", lambda *_: 1.0)
    out = tmp_path / "small.jsonl"
    assert bench.main(["--out", str(out)]) == 1
    ours = [x for x in map(json.loads, out.read_text().splitlines()) if x["case"] not in ("dense", "plan cache")]
    assert len(ours) == 4
    assert all(line["p50_ms"] is None and not line["gate_passed"] for line in ours)
    assert "not timed" in capsys.readouterr().out


def test_an_interruption_keeps_what_was_measured(small: bench.Group, tmp_path, monkeypatch):
    out = tmp_path / "small.jsonl"
    measured = bench.measure_group

    def interrupted(*arguments):
        yield next(measured(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure_group", interrupted)
    assert bench.main(["--out", str(out)]) == 130
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 1


def test_bars_pass_at_the_limit_and_fail_beyond_it():
    assert bench.Bar("rate", 0.8, 0.8).passed and not bench.Bar("rate", 0.79, 0.8).passed
    assert bench.Bar("memory", 16.0, 16.0, " GiB").passed and not bench.Bar("memory", 16.1, 16.0, " GiB").passed


def test_a_run_resumes_with_what_the_file_lacks(small: bench.Group, tmp_path, monkeypatch):
    out = tmp_path / "small.jsonl"
    assert bench.main(["--out", str(out)]) == 0
    whole = out.read_text().splitlines()[:-1]
    # The last case lost its second line, and the disk was full in the middle of another.
    out.write_text("\n".join(whole[:-1]) + '\n{"case": "windo\n')
    timed: list[str] = []
    take_turns = bench.take_turns
    monkeypatch.setattr(bench, "take_turns", lambda g, s, say: (timed.extend(x.case for x in s), take_turns(g, s, say)))
    assert bench.main(["--out", str(out), "--resume"]) == 0
    assert timed == ["dense", "longnet-ladder"]
    found = [bench.key_of(line) for line in bench.known_lines(out) if line["case"] != "plan cache"]
    assert sorted(map(str, found)) == sorted(str(bench.key_of(json.loads(line))) for line in whole)
    assert bench.main(["--out", str(out), "--resume"]) == 0 and timed == ["dense", "longnet-ladder"]


def test_a_line_after_half_a_line_is_whole(tmp_path):
    out = tmp_path / "cut.jsonl"
    out.write_text('{"case": "windo')
    bench.append(out, {"case": "window"})
    assert bench.known_lines(out) == [{"case": "window"}]


def test_a_group_that_would_not_fit_is_not_begun(small: bench.Group, tmp_path, capsys):
    assert bench.main(["--out", str(tmp_path / "small.jsonl"), "--memory", "0.0001"]) == 0
    assert "Not begun" in capsys.readouterr().err and not (tmp_path / "small.jsonl").exists()


def test_lines_are_printed_as_they_are_written(small: bench.Group, tmp_path, capsys):
    out = tmp_path / "small.jsonl"
    bench.main(["--out", str(out), "--json"])
    assert capsys.readouterr().out == out.read_text()


@pytest.mark.parametrize("name", ["quick", "cpu", "million", *ON_THIS_MACHINE])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suites_name_patterns_that_exist_and_cases_that_differ(name: str, device: str):
    for group in suite(name, device):
        assert group.device == device and group.suite == name
        assert len({case.name for case in group.cases}) == len(group.cases)
        for case in group.cases:
            assert (case.module in CLASSES) != bool(case.pattern)
            if case.pattern:
                parse(case.pattern).resolve(group.n, group.heads)
        assert replace(group, n=1).label != group.label


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_passes_its_gate_and_a_wrong_one_does_not(name: str, monkeypatch: pytest.MonkeyPatch):
    module = trials.build(name, 512, 4, 16, "cpu")
    given = trials.arguments(module, tuple(torch.randn(1, 4, 512, 16) for _ in range(3)))
    assert trials.module_error(module, given) < TOLERANCE[torch.float32]
    call = trials.call
    monkeypatch.setattr(trials, "call", lambda m, x: call(m, x) + (1e-3 if x[0].dtype == torch.float32 else 0.0))
    assert trials.module_error(module, given) > TOLERANCE[torch.float32]


def test_classes_and_ranks_are_measured(tmp_path, monkeypatch):
    cases = (
        bench.Case(name="DilatedAttention", module="DilatedAttention"),
        bench.Case(name="MultiheadDilatedAttention", module="MultiheadDilatedAttention"),
        bench.Case(name="window on 2 ranks", pattern="window:64", ranks=2),
    )
    group = bench.Group(n=512, d=16, heads=2, key_heads=2, cases=cases, peer_heads=1, rounds=(1, 1), suite="few")
    monkeypatch.setattr(bench, "suite", lambda name, device: [group])
    assert bench.main(["--out", str(tmp_path / "few.jsonl")]) == 0
    *lines, _ = bench.known_lines(tmp_path / "few.jsonl")
    assert len(lines) == 8 and all(line["gate_passed"] and line["p50_ms"] > 0 for line in lines)
    ranks = next(line for line in lines if "ranks" in line)
    assert 0 < ranks["received_bytes"] < ranks["ring_bytes"]


def test_no_length_is_tried_that_is_forecast_not_to_fit():
    tried = []
    attempt = trials.within(tried.append, 2**30, 8, 64)
    attempt(2**16)
    with pytest.raises(torch.OutOfMemoryError):
        attempt(2**24)
    assert tried == [2**16]


def test_peak_memory_counts_what_was_allocated():
    with PeakMemory("cpu") as peak:
        torch.ones(2**24).sum()
    if peak.extra is None:
        pytest.skip(reason="this system does not tell its peak memory")
    assert 2**26 * 0.9 <= peak.extra <= 2**26 * 2


def test_charts_are_well_formed_and_hold_every_point():
    chart = page.log_chart({"a < b": [(1024.0, 0.01), (2048.0, 2.0)], "none": []}, "tokens", "time")
    root = ElementTree.fromstring(chart)
    assert len(root.findall("circle")) == 2
    parts = [page.Chart("c", "c", chart), page.Table(["x"], [["<1>"]]), page.Preformatted("a<b")]
    whole = page.as_html("t & u", parts)
    assert "&lt;1&gt;" in whole and "t &amp; u" in whole and "http" not in whole


@pytest.mark.parametrize(("count", "text"), [(12, "12 B"), (1536, "1.5 KiB"), (3 * 2**40, "3072.0 GiB")])
def test_bytes_are_readable(count: int, text: str):
    assert readable_bytes(count) == text
