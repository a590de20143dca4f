"""The tools tell the truth: the gate sees a wrong number, results are whole lines, charts are well formed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import BY_NAME
from docs_pages import docs_page
from limits import scaled
from oracle import answer

from dilated_attention_pytorch import attention_with_lse, nn, parse
from dilated_attention_pytorch.tools import html_page as page
from dilated_attention_pytorch.tools.bench import command, extreme, trials
from dilated_attention_pytorch.tools.bench import runner as bench
from dilated_attention_pytorch.tools.bench.cases import ABOUT, CLASSES, MODELS, ON_THIS_MACHINE, suite
from dilated_attention_pytorch.tools.bench.gate import Computed, error_ratio, sample
from dilated_attention_pytorch.tools.bench.measure import PeakMemory
from dilated_attention_pytorch.tools.html_page import readable_bytes

GATED = ("causal", "dilated-ladder-causal", "dilated-empty-rows", "random", "gqa", "wide-value")


def exact(name: str) -> Computed:
    problem = BY_NAME[name]
    query, key, value, grad_output, _ = problem.inputs()
    wanted = answer(query, key, value, problem.pattern, grad_output=grad_output)
    return Computed(query, key, value, wanted.output, wanted.lse, grad_output, *wanted[2:])


@pytest.mark.parametrize("name", GATED)
def test_the_gate_accepts_the_oracle(name: str):
    problem, computed = BY_NAME[name], exact(name)
    error = error_ratio(computed, problem.pattern, torch.arange(problem.n), list(range(problem.heads)))
    assert error <= 1


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("what", ["output", "lse", "grad_query", "grad_key", "grad_value"])
@pytest.mark.parametrize("wrong", [1e-3, float("nan"), float("inf")])
def test_the_gate_sees_one_wrong_number(name: str, what: str, wrong: float):
    problem, computed = BY_NAME[name], exact(name)
    damaged = getattr(computed, what).clone()
    damaged[0, -1, computed.lse[0, -1].isfinite().nonzero()[-1]] += wrong
    computed = computed._replace(**{what: damaged})
    error = error_ratio(computed, problem.pattern, torch.arange(problem.n), list(range(problem.heads)))
    assert error > 1


@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf")])
def test_the_gate_sees_a_row_without_keys_that_claims_some(wrong: float):
    problem, computed = BY_NAME["dilated-empty-rows"], exact("dilated-empty-rows")
    lse = computed.lse.clone()
    lse[0, 0, lse[0, 0].isinf().nonzero()[0]] = wrong
    assert error_ratio(computed._replace(lse=lse), problem.pattern, torch.arange(problem.n), [0]) == float("inf")


def fused(inputs: list[torch.Tensor], kept: torch.Tensor, parts: int = 1) -> Computed:
    """Attention and gradients as a fused GPU kernel rounds them.

    Weights and the gradients of scores are rounded to the dtype of the inputs before each product, and so is the output
    of every part of the keys. `kept` marks the pairs that are computed.
    """
    dtype, (query, key, value, grad) = inputs[0].dtype, (x.float() for x in inputs)
    scale = query.shape[-1] ** -0.5
    scores = (query @ key.mT * scale).masked_fill(~kept, -torch.inf)
    lse = scores.logsumexp(-1)
    top = scores.amax(-1, keepdim=True)
    output, total = torch.zeros_like(query), torch.zeros_like(top)
    for keys in torch.arange(key.shape[2]).chunk(parts):
        weights = (scores[..., keys] - top).exp()
        carried = output * total + weights.to(dtype).float() @ value[:, :, keys]
        total = total + weights.sum(-1, keepdim=True)
        output = (carried / total).to(dtype).float()
    weights = (scores - lse[..., None]).exp()
    delta = (grad * output).sum(-1, keepdim=True)
    inner = (weights * (grad @ value.mT - delta)).to(dtype).float()
    results = output, inner @ key * scale, inner.mT @ query * scale, weights.to(dtype).float().mT @ grad
    output, *grads = (x.to(dtype) for x in results)
    return Computed(*inputs[:3], output, lse, inputs[3], *grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [1, 6])
def test_gate_passes_fused_rounding_and_fails_skipped_tiles(dtype: torch.dtype, parts: int):
    n, tiles = 2048, 128
    inputs = list(torch.randn(4, 1, 1, n, 64, dtype=torch.float32).to(dtype).unbind())
    right = fused(inputs, torch.ones(n, n, dtype=torch.bool), parts)
    rows, full = sample(n, 64), parse("full")
    assert error_ratio(right, full, rows, [0]) < 0.5, "no headroom is left for a GPU"
    skipped = torch.rand(tiles, tiles) < 0.01
    kept = ~skipped.repeat_interleave(n // tiles, 0).repeat_interleave(n // tiles, 1)
    wrong = fused(inputs, kept, parts)
    # Peers are checked with the library's LSE, so each result has to show the fault by itself.
    for name in ("output", "lse", "grad_query", "grad_key", "grad_value"):
        assert error_ratio(right._replace(**{name: getattr(wrong, name)}), full, rows, [0]) > 2, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pattern", ["full & causal", "dilated:256x1,512x2,1024x4", "random:0.2;block=64"])
def test_gate_passes_the_library_in_every_dtype(dtype: torch.dtype, pattern: str):
    query, key, value = (torch.randn(1, heads, 1024, 32).to(dtype).requires_grad_() for heads in (2, 1, 1))
    output, lse = attention_with_lse(query, key, value, pattern, enable_gqa=True)
    grad = torch.randn_like(output)
    grads = torch.autograd.grad(output, (query, key, value), grad)
    computed = Computed(*(x.detach() for x in (query, key, value, output, lse, grad)), *grads)
    assert error_ratio(computed, parse(pattern), sample(1024, 32), [0, 1]) < 0.5


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
    out = tmp_path / "small.jsonl"
    assert command.main(["--out", str(out)]) == 0
    *lines, plans = [json.loads(line) for line in out.read_text().splitlines()]
    assert plans["case"] == "plan cache" and plans["hits"] > plans["misses"] == 2
    assert plans["warm_hits"] == 4 and plans["warm_misses"] == 0, "two cases, two rounds, no plan made again"
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
    assert "Targets" in capsys.readouterr().out


def test_a_wrong_result_is_reported_and_not_timed(small: bench.Group, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "error_ratio", lambda *_: 1.5)
    out = tmp_path / "small.jsonl"
    assert command.main(["--out", str(out)]) == 1
    ours = [x for x in map(json.loads, out.read_text().splitlines()) if x["case"] not in ("dense", "plan cache")]
    assert len(ours) == 4
    assert all(line["p50_ms"] is None and not line["gate_passed"] for line in ours)
    assert "not timed" in capsys.readouterr().out


def test_ratio_is_our_rate_over_the_dense_rate_of_the_same_round():
    """Above 1 where this library is faster, by the flops each really computes."""

    def subject(flops: float, *seconds: float) -> bench.Subject:
        times = {"forward": list(seconds), "backward": [2 * each for each in seconds]}
        known: dict[str, Any] = {"case": "", "backend": "", "pattern": "", "density": 1.0, "run": {}, "peak": {}}
        return bench.Subject(flops=flops, first_call_s=0.0, seconds=times, **known)

    dense, tenth = subject(100.0, 1.0, 4.0, 2.0), subject(10.0, 0.05, 0.2, 0.1)
    assert bench.ratio(tenth, dense, "forward") == pytest.approx(2.0)
    assert bench.ratio(tenth, dense, "backward") == pytest.approx(2.0)
    assert bench.ratio(tenth, dense, "both") == pytest.approx(2.0)
    assert bench.ratio(dense, tenth, "forward") == pytest.approx(0.5)


def test_an_interruption_keeps_what_was_measured(small: bench.Group, tmp_path, monkeypatch):
    out = tmp_path / "small.jsonl"
    measured = bench.measure_group

    def interrupted(*arguments):
        yield next(measured(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure_group", interrupted)
    assert command.main(["--out", str(out)]) == 130
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 1


ENDLESS = """
import signal, sys
# Whatever is started by a shell in the background ignores it, children too.
signal.signal(signal.SIGINT, signal.default_int_handler)
from dataclasses import replace
from dilated_attention_pytorch.tools.bench import command
from dilated_attention_pytorch.tools.bench import runner as bench
case = bench.Case(name="window", pattern="window:64")
group = bench.Group(n=256, d=16, heads=1, key_heads=1, cases=(case,), peer_heads=1, rounds=(1, 1))
bench.suite = lambda name, device: [
    group, replace(group, n=512, rounds=(2, 10**9), budget_s=1e9), replace(group, n=1024)
]
sys.exit(command.main(["--out", sys.argv[1]]))
"""


def test_rounds_that_are_too_few_are_not_kept(small: bench.Group, tmp_path, monkeypatch):
    def interrupted(group: bench.Group, subjects: list[bench.Subject], say: Any) -> None:
        subjects[0].seconds["forward"] = [1.0, 1.0]
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "take_turns", interrupted)
    assert command.main(["--out", str(tmp_path / "small.jsonl")]) == 130
    assert bench.known_lines(tmp_path / "small.jsonl") == []


def test_control_c_keeps_what_is_done(tmp_path):
    out = tmp_path / "small.jsonl"
    # In a group of its own: the signal must not reach the tests.
    settings = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(out)], **settings) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "n=512" in line and "round 3" in line:
                break
        running.send_signal(signal.SIGINT)
        told = running.stderr.read()
        assert running.wait(timeout=scaled(60)) == 130 and "--resume" in told and "Traceback" not in told
    kept = bench.known_lines(out)
    assert [line["n"] for line in kept] == [256] * 4 + [512] * 4
    assert all(line["rounds"] == kept[-1]["rounds"] >= 2 for line in kept[4:]), "whole rounds, and enough of them"


def test_bars_pass_at_the_limit_and_fail_beyond_it():
    assert bench.Bar("rate", 0.8, 0.8).passed and not bench.Bar("rate", 0.79, 0.8).passed
    assert bench.Bar("memory", 16.0, 16.0, " GiB").passed and not bench.Bar("memory", 16.1, 16.0, " GiB").passed


def test_a_run_resumes_with_what_the_file_lacks(small: bench.Group, tmp_path, monkeypatch):
    out = tmp_path / "small.jsonl"
    assert command.main(["--out", str(out)]) == 0
    whole = out.read_text().splitlines()[:-1]
    # The last case lost its second line, and the disk was full in the middle of another.
    out.write_text("\n".join(whole[:-1]) + '\n{"case": "windo\n')
    timed: list[str] = []
    take_turns = bench.take_turns
    monkeypatch.setattr(bench, "take_turns", lambda g, s, say: (timed.extend(x.case for x in s), take_turns(g, s, say)))
    assert command.main(["--out", str(out), "--resume"]) == 0
    assert timed == ["dense", "longnet-ladder"]
    found = [bench.key_of(line) for line in bench.known_lines(out) if line["case"] != "plan cache"]
    assert sorted(map(str, found)) == sorted(str(bench.key_of(json.loads(line))) for line in whole)
    assert command.main(["--out", str(out), "--resume"]) == 0 and timed == ["dense", "longnet-ladder"]


def test_a_line_after_half_a_line_is_whole(tmp_path):
    out = tmp_path / "cut.jsonl"
    out.write_text('{"case": "windo')
    bench.append(out, {"case": "window"})
    assert bench.known_lines(out) == [{"case": "window"}]


def test_a_broken_line_is_told_when_a_run_goes_on(small: bench.Group, tmp_path, capsys):
    out = tmp_path / "small.jsonl"
    out.write_text('{"case": "plan cache"}\n{"case": "windo\n')
    assert command.main(["--out", str(out), "--resume", "--budget", "-1"]) == 0
    told = capsys.readouterr().err
    assert f"{out}:2: not a line of results, skipped" in told and "the time is up" in told


def test_a_budget_ends_after_one_case_and_one_round(small: bench.Group, tmp_path, monkeypatch, capsys):
    out, checked = tmp_path / "small.jsonl", []
    ours = bench.ours
    monkeypatch.setattr(bench, "ours", lambda case, *rest: (checked.append(case.name), ours(case, *rest))[1])
    # The first gate takes longer than the budget.
    late = SimpleNamespace(monotonic=lambda: time.monotonic() + 100 * len(checked), perf_counter=time.perf_counter)
    monkeypatch.setattr(bench, "time", late)
    assert command.main(["--out", str(out), "--budget", "50"]) == 0
    lines = [line for line in bench.known_lines(out) if line["case"] != "plan cache"]
    assert [(line["case"], line["rounds"]) for line in lines] == [("dense", 1)] * 2 + [("window", 1)] * 2
    assert "Not started: longnet-ladder at n=512" in capsys.readouterr().err
    assert command.main(["--out", str(out), "--resume"]) == 0 and checked == ["window", "longnet-ladder"]


def test_slow_dense_attention_is_skipped_with_its_reason(small: bench.Group, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "PEER_PATIENCE_S", 0.0)
    out = tmp_path / "small.jsonl"
    for _ in range(2):
        assert command.main(["--out", str(out), "--resume"]) == 0
    dense = [line for line in bench.known_lines(out) if line["case"] == "dense"]
    assert [line["direction"] for line in dense] == ["forward", "backward"]
    assert all("a head would take about 0 s, more than 0 s" in line["skipped"] for line in dense)
    assert "left out: forward and backward of a head" in capsys.readouterr().out
    longer = [{**line, "n": 2 * line["n"]} for line in bench.known_lines(out) if line["case"] == "window"]
    page = docs_page.page([*bench.known_lines(out), *longer])
    assert "Dense attention was not timed at 512: forward and backward of a head would take about 0 s" in page
    monkeypatch.undo()
    monkeypatch.setattr(
        bench, "suite", lambda name, device: [replace(small, cases=(bench.Case(name="w", pattern="window:64"),))]
    )
    assert command.main(["--out", str(out), "--resume"]) == 0
    lines = bench.known_lines(out)
    assert [line["p50_ms"] is None for line in lines if line["case"] == "dense"] == [True, True, False, False]
    assert "was not timed" not in docs_page.page([*lines, *longer])


@pytest.mark.parametrize("words", [["--suite", "standart"], ["--suite", "x"]])
def test_unknown_suite_error_lists_the_suites(words: list[str], capsys):
    with pytest.raises(SystemExit) as left:
        command.main(words)
    told = capsys.readouterr().err
    assert left.value.code == 2 and all(name in told for name in ABOUT)
    assert ("Did you mean standard?" in told) is (words[1] == "standart")


def test_nothing_is_measured_for_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "run", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"must be one that can be written, got .*folder.jsonl"):
        command.main(["--out", str(tmp_path / "folder.jsonl")])
    kept = tmp_path / "kept.jsonl"
    kept.write_text("{}\n")
    with pytest.raises(ValueError, match="backend must be one of"):
        command.main(["--out", str(kept), "--backend", "nativ"])
    assert kept.read_text() == "{}\n", "wrong use must not cost what was measured"


def test_a_group_that_would_not_fit_is_not_begun(small: bench.Group, tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "small.jsonl"), "--memory", "0.0001"]) == 0
    assert "Not started" in capsys.readouterr().err and not (tmp_path / "small.jsonl").read_text()


def test_lines_are_printed_as_they_are_written(small: bench.Group, tmp_path, capsys):
    out = tmp_path / "small.jsonl"
    command.main(["--out", str(out), "--json"])
    assert capsys.readouterr().out == out.read_text()


@pytest.mark.parametrize("name", ["quick", "cpu", "million", *ON_THIS_MACHINE])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suites_name_patterns_that_exist_and_cases_that_differ(name: str, device: str):
    for group in suite(name, device):
        assert group.device == device and group.suite == name
        assert len({case.name for case in group.cases}) == len(group.cases)
        for case in group.cases:
            assert (case.module in (*CLASSES, *MODELS)) != bool(case.pattern)
            if case.pattern:
                parse(case.pattern).resolve(group.n, group.heads)
        assert replace(group, n=1).label != group.label


def test_the_suite_of_variants_has_every_class():
    # Other names of a class are left out.
    classes = {name for name in nn.__all__ if isinstance(made := getattr(nn, name), type) and made.__name__ == name}
    attend = {name for name in classes if issubclass(getattr(nn, name), torch.nn.Module)}
    assert attend - set(CLASSES) == {"BlockSparseTorchSparse", "ImportanceScorer"}, "one refuses, one scores"
    assert {case.name for group in suite("variants") for case in group.cases} == {*CLASSES, *MODELS}


@pytest.mark.parametrize("name", [*CLASSES, *MODELS])
def test_every_class_passes_its_gate_and_a_wrong_one_does_not(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trials, "MODEL_LAYERS", 2)
    module = trials.build(name, 512, 4, 16, "cpu")
    given = trials.arguments(module, tuple(torch.randn(1, 4, 512, 16) for _ in range(3)))
    assert trials.module_error(module, given) <= 1.0 and module.training
    call = trials.call
    monkeypatch.setattr(trials, "call", lambda m, x: call(m, x) + (1e-3 if m is module else 0.0))
    assert trials.module_error(module, given) > 1.0


@pytest.mark.parametrize("name", ["BlockSparseAdaptive", "MultiheadBlockSparseAdaptive"])
def test_the_gate_of_a_learned_class_holds_its_choice(name: str, monkeypatch: pytest.MonkeyPatch):
    module = trials.build(name, 1024, 2, 16, "cpu")
    given = trials.arguments(module, tuple(torch.randn(1, 2, 1024, 16) for _ in range(3)))
    chosen_blocks, seen = trials.chosen_blocks, []

    def other_blocks(*call: Any) -> Any:
        seen.append(chosen_blocks(*call))
        return replace(seen[-1], indices=seen[-1].indices.flip(2))

    monkeypatch.setattr(trials, "chosen_blocks", other_blocks)
    assert trials.module_error(module, given) > 1.0
    assert seen[0].counts.any(), "rows choose"
    assert trials.learned_core(module).config == nn.AdaptiveConfig()


def test_what_a_model_loses_to_its_dtype_does_not_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trials, "MODEL_LAYERS", 2)
    module = trials.build("LongNetLM", 256, 2, 16, "cpu").bfloat16()
    given = trials.arguments(module, tuple(torch.randn(1, 2, 256, 16) for _ in range(3)))
    assert trials.module_error(module, given) <= 1.0
    call = trials.call
    # The reference is on another backend; what is wrong there alone must not excuse anything.
    monkeypatch.setattr(trials, "call", lambda m, x: call(m, x) * (1.5 if m is module else 1.0))
    assert trials.module_error(module, given) > 1.0


def test_classes_and_ranks_are_measured(tmp_path, monkeypatch):
    cases = (
        bench.Case(name="DilatedAttention", module="DilatedAttention"),
        bench.Case(name="MultiheadDilatedAttention", module="MultiheadDilatedAttention"),
        bench.Case(name="BlockSparseAdaptive", module="BlockSparseAdaptive"),
        bench.Case(name="LongNetLM", module="LongNetLM"),
        bench.Case(name="window on 2 ranks", pattern="window:64", ranks=2),
        bench.Case(name="window on 2 processes", pattern="window:64", ranks=2, processes=True),
    )
    group = bench.Group(n=256, d=16, heads=2, key_heads=2, cases=cases, peer_heads=1, rounds=(1, 1), suite="few")
    monkeypatch.setattr(bench, "suite", lambda name, device: [group])
    assert command.main(["--out", str(tmp_path / "few.jsonl")]) == 0
    *lines, _ = bench.known_lines(tmp_path / "few.jsonl")
    assert len(lines) == 14 and all(line["gate_passed"] and line["p50_ms"] > 0 for line in lines)
    for ranks in (line for line in lines if "ranks" in line):
        assert 0 < ranks["received_bytes"] < ranks["ring_bytes"]
    by_name = {line["case"]: line for line in lines}
    assert by_name["BlockSparseAdaptive"]["pattern"] == "learned" and 0 < by_name["BlockSparseAdaptive"]["density"] <= 1
    assert by_name["LongNetLM"]["pattern"].endswith("& causal")
    assert by_name["window on 2 processes"]["processes"] and by_name["window on 2 processes"]["peak_bytes"] is None


def test_lengths_beyond_memory_are_neither_tried_nor_counted():
    tried = []

    def attempt(n: int) -> extreme.Attempt:
        tried.append(n)
        return extreme.Attempt(n, 1.0, 2**31 if n > 2**16 else 2**20, 0.0)

    within = trials.within(attempt, 2**30, 8, 64)
    assert within(2**16).n == 2**16
    for n in (2**16 + 1, 2**24):
        with pytest.raises(torch.OutOfMemoryError):
            within(n)
    assert tried == [2**16, 2**16 + 1]


def test_the_longest_length_is_looked_for_where_it_is_not_known(tmp_path, monkeypatch):
    out = tmp_path / "extreme.jsonl"
    monkeypatch.setattr(bench, "suite", lambda name, device: [])
    found = extreme.Longest(extreme.Attempt(2**17, 1.0, 2**20, 1e-7), "memory", 3)
    monkeypatch.setattr(extreme, "longest", lambda *_: found)
    bench.append(out, {"suite": "extreme", "case": "extreme", "subject": "dilated", "direction": "forward", "n": 5})
    for _ in range(2):
        assert (
            command.main(["--suite", "extreme", "--out", str(out), "--resume", "--memory", "1", "--device", "cpu"]) == 0
        )
    lines = [line for line in bench.known_lines(out) if line["case"] == "extreme"]
    assert [line["subject"] for line in lines] == ["dilated", "block-sparse 1 %", "window"]
    assert lines[1]["n"] == 2**17 and lines[1]["cap_gib"] == 1.0


@pytest.mark.parametrize("name", ["dilated", "block-sparse 1 %", "window"])
def test_the_keys_of_an_extreme_subject_are_those_it_attends_to(name: str):
    subject = extreme.subjects()[name]
    query, key, value = torch.randn(3, 1, extreme.HEADS, 1280, extreme.WIDTH).unbind()
    output = subject.forward(query, key, value)
    assert extreme.rows_error(subject, output, query, key, value) <= 1.0
    assert extreme.rows_error(subject, output + 1e-3, query, key, value) > 1.0


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
    parts = [page.Chart("c", "c", chart), page.Table(["x"], [["<1>"]])]
    whole = page.as_html("t & u", parts)
    assert "&lt;1&gt;" in whole and "t &amp; u" in whole and "http" not in whole


@pytest.mark.parametrize(("count", "text"), [(12, "12 B"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB")])
def test_bytes_are_readable(count: int, text: str):
    assert readable_bytes(count) == text
