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
from dilated_attention_pytorch.tools import bench, report
from dilated_attention_pytorch.tools.gate import TOLERANCE, Computed, largest_error, sample
from dilated_attention_pytorch.tools.measure import PeakMemory, readable_bytes

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
    monkeypatch.setattr(bench, "suite", lambda name: [group])
    return group


def test_results_are_one_line_a_subject_and_direction(small: bench.Group, tmp_path, capsys):
    out = tmp_path / "results" / "small.jsonl"
    assert bench.main(["--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
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
    ours = [line for line in map(json.loads, out.read_text().splitlines()) if line["case"] != "dense"]
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


@pytest.mark.parametrize("name", ["quick", "cpu", "million"])
def test_suites_name_patterns_that_exist_and_cases_that_differ(name: str):
    for group in bench.suite(name):
        assert len({case.name for case in group.cases}) == len(group.cases)
        for case in group.cases:
            parse(case.pattern).resolve(group.n, group.heads)
        assert replace(group, n=1).label != group.label


def test_peak_memory_counts_what_was_allocated():
    with PeakMemory("cpu") as peak:
        torch.ones(2**24).sum()
    if peak.extra is None:
        pytest.skip(reason="this system does not tell its peak memory")
    assert 2**26 * 0.9 <= peak.extra <= 2**26 * 2


def test_charts_are_well_formed_and_hold_every_point():
    chart = report.log_chart({"a < b": [(1024.0, 0.01), (2048.0, 2.0)], "none": []}, "tokens", "time")
    root = ElementTree.fromstring(chart)
    assert len(root.findall("circle")) == 2
    page = report.page("t & u", [chart, report.table(["x"], [["<1>"]]), report.preformatted("a<b")])
    assert "&lt;1&gt;" in page and "t &amp; u" in page and "http" not in page


@pytest.mark.parametrize(("count", "text"), [(12, "12 B"), (1536, "1.5 KiB"), (3 * 2**40, "3072.0 GiB")])
def test_bytes_are_readable(count: int, text: str):
    assert readable_bytes(count) == text
