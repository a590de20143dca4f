"""The script of a GPU session: its commands exist, fit into a call, and run in small form on a CPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("case", [x for x in gpu_calls.CALLS if not x.listed], ids=lambda x: x.name)
def test_calls_in_small_form_agree_with_float64(case: gpu_calls.Call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_calls, "by_turns", lambda runs, device: [float(run() is not ...) for run in runs])
    line = gpu_calls.measure(case.small, "cpu")
    assert line["error"] < 1e-5 and not line["not_run"]
    assert set(line["ratios"]) == set(line["ms"]) - {"ours"} and "sdpa" in line["ratios"]


@pytest.mark.parametrize("per_token", [False, True])
def test_listed_blocks_in_small_form_agree(per_token: bool):
    case = gpu_calls.Call("listed", heads=4, key_heads=2, listed=3, per_token=per_token).small
    problem = gpu_calls.Problem(case, "cpu")
    output = problem.runs()["ours"]()
    assert problem.error(output) < 1e-5
    assert problem.error(output.flip(2)) > 0.1


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
