"""The script of a GPU session: its commands exist, fit into a call, and run in small form on a CPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import adaptive_gpu
import gpu_calls
import gpu_session


def test_steps_fit_into_a_call_of_ten_minutes(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    steps = [str(step) for step in gpu_session.STEPS]
    assert gpu_session.main(["--step", *steps, "--out", str(tmp_path / "none"), "--dry-run"]) == 0
    assert not (tmp_path / "none").exists()
    text = capsys.readouterr().out
    for commands in gpu_session.STEPS.values():
        assert sum(command.seconds for command in commands) <= 580
        assert all(command.script in text for command in commands)


@pytest.mark.parametrize("command", [x for step in gpu_session.STEPS.values() for x in step], ids=lambda x: x.script)
def test_scripts_know_their_arguments(command: gpu_session.Command):
    tools = gpu_session.ROOT / "src" / "dilated_attention_pytorch" / "tools"
    script = gpu_session.ROOT / "benchmarks" / command.script
    files = [script] if script.is_file() else [*tools.glob("*.py"), *tools.glob("bench/*.py")]
    if script.is_file():
        # Scripts that run cases share their options.
        names = re.findall(r"^from (\w+) import .*\boptions\b", script.read_text(), re.MULTILINE)
        files += [script.with_name(f"{name}.py") for name in names]
    text = "".join(x.read_text() for x in files)
    for word in " ".join(filter(None, (command.arguments, command.small))).split():
        assert not word.startswith("--") or f'"{word}"' in text, word
        assert not word.startswith("tests/") or (gpu_session.ROOT / word).is_file(), word


def test_sources_without_history_have_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("GIT_SHA", raising=False)
    monkeypatch.setattr(gpu_session, "ROOT", tmp_path)
    assert gpu_session.environment()["GIT_SHA"].startswith("sources ")
    assert gpu_session.environment()["PYTHONPATH"].startswith(str(tmp_path / "src"))
    monkeypatch.setenv("GIT_SHA", "abc")
    assert gpu_session.environment()["GIT_SHA"] == "abc"


def test_a_session_notes_every_command_and_failure(tmp_path: Path):
    seen = []

    def start(command: list[str], seconds: float) -> int:
        seen.append(command)
        return len(seen) - 1

    assert gpu_session.main(["--step", "1", "--out", str(tmp_path)], start) == 1
    lines = [json.loads(line) for line in (tmp_path / "session.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == [0, 1] and lines[0]["command"] == seen[0][1:]


def test_a_command_is_stopped_at_its_limit():
    assert gpu_session.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) == "stopped after 0 s"
    assert gpu_session.run([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3


@pytest.mark.parametrize("case", gpu_calls.CALLS, ids=lambda x: x.name)
def test_calls_in_small_form_agree_with_float64(case: gpu_calls.Call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_calls, "in_turns", lambda runs, device: [float(run() is not ...) for run in runs])
    monkeypatch.setattr(gpu_calls, "time_whole_call", lambda run, device: {"host_us": 1.0})
    line = gpu_calls.measure(case.small, "cpu")
    assert line["error"] < 1e-5 and {*line["not_run"]} <= {"nsa"}
    assert set(line["ratios"]) == set(line["ms"]) - {"ours"} and "sdpa" in line["ratios"]
    assert ("plan" in line["ratios"]) == (case.listed > 0 and not case.per_token)
    assert ("tflops" in line) == (case.listed > 0)


@pytest.mark.parametrize("case", [x for x in gpu_calls.CALLS if x.is_masked], ids=lambda x: x.name)
def test_a_mask_of_all_pairs_is_the_window_of_the_call(case: gpu_calls.Call):
    problem = gpu_calls.Problem(case.small, "cpu")
    problem.sink = None
    runs = problem.runs()
    (name,) = (name for name in runs if name.startswith("sdpa, mask"))
    assert problem.error(runs[name]()) < 1e-5 and problem.error(runs["sdpa"]()) > 0.1


@pytest.mark.parametrize("case", [x for x in gpu_calls.CALLS if x.listed], ids=lambda x: x.name)
def test_listed_blocks_of_a_call_are_checked_and_counted(case: gpu_calls.Call):
    problem = gpu_calls.Problem(case.small, "cpu")
    output = problem.runs()["ours"]()
    assert problem.error(output) < 1e-5 and problem.error(output.flip(2)) > 0.1
    chosen, token = problem.selection, torch.arange(1024)
    row = token if case.per_token else token // 128
    kept = chosen.allowed()[0][:, row][..., token // 128]
    kept = kept & (token <= token[:, None]) if case.is_causal else kept
    assert problem.flops == 4 * 32 * float(kept.sum()) * chosen.group


@pytest.mark.parametrize("rows", adaptive_gpu.ROWS)
def test_learned_lines_in_small_form_pass_their_check(rows: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adaptive_gpu, "by_turns", lambda runs, device: [float(run() is not ...) for run in runs])
    monkeypatch.setattr(adaptive_gpu, "SHORT", 512)
    small = adaptive_gpu.ListedHeads(8, 2, {"select": "group", "match_rank": 16}, (1,))
    monkeypatch.setitem(adaptive_gpu.LISTS, "group", small)
    lines = list(adaptive_gpu.lines((512,), 0.5, "cpu", (rows,), (4,), ("head", "group")))
    many = 1 if rows == "token" else 2
    assert [line["lists"] for line in lines] == ["head"] * many + ["group"] * many
    for line in lines:
        assert max(line["errors"].values()) < 1e-4 and line["score_unit"] == (1 if line["lists"] == "group" else 4)
        assert line["choosing_seconds"] == line["learned_with_backward_seconds"] == 1.0


def test_lines_after_a_failed_capture_run_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = [{"n": 1}, {"n": 2, "not_run": {"in_a_graph": "AcceleratorError"}}, {"n": 3}]
    started: list[list[str]] = []
    asked: list[int] = []

    def lines(*_: object, first: int = 0, **__: object):
        asked.append(first)
        return iter(found[first:])

    def replaced(_: str, arguments: list[str]) -> None:
        started.append(arguments)
        raise SystemExit

    monkeypatch.setattr(adaptive_gpu, "lines", lines)
    monkeypatch.setattr(adaptive_gpu, "facts", lambda device: {})
    monkeypatch.setattr(adaptive_gpu.os, "execv", replaced)
    out = tmp_path / "lines.jsonl"
    monkeypatch.setattr("sys.argv", ["adaptive_gpu.py", "--out", str(out)])
    with pytest.raises(SystemExit):
        adaptive_gpu.main()
    (arguments,) = started
    assert arguments[arguments.index("--first") + 1] == "2"
    monkeypatch.setattr("sys.argv", arguments[1:])
    adaptive_gpu.main()
    assert asked == [0, 2] and [json.loads(line)["n"] for line in out.read_text().splitlines()] == [1, 2, 3]


def test_a_failed_capture_is_reported_by_its_first_error():
    try:
        try:
            raise RuntimeError("legacy stream")
        finally:
            raise ValueError("previous error")
    except ValueError as problem:
        assert adaptive_gpu.told(problem) == "RuntimeError: legacy stream"
