"""The sheet of `dap`: for every command its help, a call that works, and calls that are refused in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from installed import command, commands

SHEET: dict[str, list[tuple[str, int, str]]] = {
    "overview": [
        ("dap", 2, "usage: dap COMMAND"),
        ("dap -h", 0, "usage: dap COMMAND"),
        ("dap --version", 0, "."),
        ("dap plann", 2, "no command 'plann'. Did you mean 'plan'?"),
    ],
    "doctor": [
        ("dap doctor --device cpu", 0, "native"),
        ("dap doctor --device tpu", 2, "must be one of auto, cpu, cuda, got 'tpu'"),
    ],
    "plan": [
        ("dap plan 'window:64 & causal' -n 4K --heads 2 --device cpu", 0, "density"),
        ("dap plan window:64 -n 64K --memory 0.2 --device cpu", 1, "Training fits up to"),
        ("dap plan windw:64 -n 4K", 2, "Did you mean 'window'?"),
        ("dap plan window:64 --context 2K --dtype bf16 --device cpu", 0, "bfloat16"),
        ("dap plan window:64 -n 4KB", 2, "at most one unit, got '4KB'"),
    ],
    "show": [
        ("dap show 'window:8 | global:2' -n 64", 0, "#.+"),
        ("dap show 'window:64 | global:16' -o pattern.html", 0, "Wrote pattern.html."),
        ("dap show causal -o missing/x.svg", 2, "Make it: mkdir -p missing"),
    ],
    "bench and report": [
        ("dap bench --suite quick --budget 1 --device cpu -o quick.jsonl", 0, "Results are in quick.jsonl."),
        ("dap bench --suite quikc", 2, "Did you mean quick?"),
        ("dap report quick.jsonl -o report", 0, "Wrote report/report.md"),
        ("dap report missing.jsonl", 2, "must be files that exist, got missing.jsonl"),
    ],
    "tune": [
        ("dap tune show", 0, "costs.json"),
        ("dap tune shwo", 2, "Did you mean show?"),
    ],
    "simulate": [
        ("dap simulate -n 4K --ranks 2 --heads 1 --first 256", 0, "exchange"),
        ("dap simulate --ranks x", 2, "must be whole numbers like 8,64,1024, got 'x'"),
    ],
    "billion": [
        ("dap billion -n 16K --heads 1 --rows 2 --chunk 4096 --device cpu", 0, "passed"),
        ("dap billion -n 1.5", 2, "must be a whole number like 4096, 64K"),
    ],
    "train and generate": [
        ("dap train --context 256 --steps 1 --eval-windows 1 --device cpu -o run", 0, "held out"),
        ("dap train --data missing.txt", 2, "must be a file, got missing.txt"),
        ("dap train --steps 1 -o run", 2, "--resume"),
        ("dap generate run -n 8 --json", 0, '"text"'),
        ("dap generate missing", 2, "got missing"),
        ("dap generate run/log.jsonl", 2, "a checkpoint must be a whole torch file of tensors alone, got log.jsonl"),
    ],
    "quality": [
        ("dap quality --suite rehearsal --tasks speed -o quality", 0, ""),
        ("dap quality --suite smal", 2, "Did you mean small?"),
    ],
}
"""Calls in one folder, in order: command line, exit status, text of stdout (status 0 and 1) or stderr (status 2)."""


def listed() -> list[str]:
    return [name for title in SHEET for name in title.split(" and ") if title != "overview"]


def test_every_command_has_help_and_a_place_on_the_sheet(tmp_path: Path):
    overview = command("dap --help", tmp_path).stdout
    names = re.findall(r"^  ([a-z]+)  ", overview, re.MULTILINE)
    assert names == listed()
    for name in names:
        done = command(f"dap {name} -h", tmp_path)
        assert done.returncode == 0 and done.stdout.startswith(f"usage: dap {name}"), done.stderr
        assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("title", SHEET)
def test_calls_end_as_the_sheet_lists(title: str, tmp_path: Path):
    lines = [line for line, _, _ in SHEET[title]]
    for (line, status, text), done in zip(SHEET[title], commands(lines, tmp_path), strict=True):
        said = done.stderr if status == 2 and line != "dap" else done.stdout
        assert (done.returncode, "Traceback" in done.stderr) == (status, False), f"{line}\n{done.stderr[-3000:]}"
        assert text in said, f"{line}\n{said[-3000:]}"
        if status == 2 and line != "dap":
            assert done.stdout == "", line
