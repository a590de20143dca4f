"""Reports of racecheck are counted by where they lie; those between the parts of a kernel are set apart by a control."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


sanitize = loaded("sanitize")


def access(kind, kernel, file, text, nth=0):
    """A line of a report for an access where a text stands in a source."""
    lines = [i for i, line in enumerate(sanitize.SOURCES[file].read_text().splitlines(), 1) if text in line]
    return f"{kind} access at {kernel}+0x{nth:x}0 in {file}:{lines[nth]}"


def log_of(*reports, errors=None):
    """What racecheck prints of reports, each an access and those that it races with."""
    shown = [
        f"========= Error: Race reported between {first}\n"
        + "".join(f"=========     and {other} [21 hazards]\n" for other in others)
        + "========= \n"
        for first, *others in reports
    ]
    errors = len(reports) if errors is None else errors
    summary = f"========= RACECHECK SUMMARY: {len(reports)} hazards displayed ({errors} errors, 0 warnings)\n"
    return "========= COMPUTE-SANITIZER\n" + "".join(shown) + summary


DKV, DQ = "attention_dkv_bwd_kernel", "attention_dq_bwd_kernel"
LSE_WRITTEN = access("Write", DKV, "dkv_kernel.py", "store(base_2(lse))")
LSE_READ = access("Read", DKV, "dkv_kernel.py", "lse = b_rows.index(slot)")
DS_WRITTEN = access("Write", DKV, "dkv_kernel.py", "b_ds.index(parity * 2 + C).store(ds)")
NOTE_WRITTEN = access("Write", DKV, "primitives.py", "slot.store(gl.where(at == 0")
NOTE_READ = access("Read", DKV, "primitives.py", "slot.load(layout)")
HEAD_READ = access("Read", DKV, "dkv_kernel.py", "def attention_dkv_bwd_kernel(")
PARTING_WRITTEN = access("Write", DKV, "dkv_kernel.py", "gl.warp_specialize(")
# Called by the loader and by what computes.
SHARED_WRITTEN = access("Write", DQ, "primitives.py", "row = token // rate")
LOADER_READ = access("Read", DQ, "dkv_kernel.py", "post(b_item.index(slot), held_head")
ROWS_READ = access("Read", DQ, "dq_kernel.py", "mbarrier.wait(full.index(slot)")


def handed_over(case):
    kernel = f"handover_{case}_kernel"
    return [
        access("Write", kernel, "handover.py", "b_numbers.store("),
        access("Read", kernel, "handover.py", "b_numbers.load("),
    ]


BETWEEN = [
    [LSE_WRITTEN, LSE_READ],
    [LSE_READ, LSE_WRITTEN],
    [NOTE_WRITTEN, NOTE_READ, NOTE_READ],
    # Racing in the other direction.
    [DS_WRITTEN, LSE_WRITTEN.replace("Write", "Read")],
]
RACES = {
    "within what computes": [DS_WRITTEN, LSE_READ],
    "within the loader": [LSE_WRITTEN, NOTE_WRITTEN.replace("Write", "Read")],
    "one of two within a part": [LSE_READ, LSE_WRITTEN, DS_WRITTEN],
    "two writes": [LSE_WRITTEN, DS_WRITTEN],
    "in what both parts call, and what computes": [SHARED_WRITTEN, ROWS_READ],
    "in what both parts call, and the loader": [SHARED_WRITTEN, LOADER_READ],
    "of two kernels": [LSE_WRITTEN, ROWS_READ],
    "of one access": [LSE_WRITTEN],
    "in front of a kernel and in the loader": [HEAD_READ, LSE_WRITTEN],
    "elsewhere": [LSE_WRITTEN, "Read access at attention_dkv_bwd_kernel+0x10 in standard.py:290"],
}


@pytest.mark.parametrize("report", BETWEEN, ids=range(len(BETWEEN)))
def test_between_parts_counts_apart_only_with_a_control(report):
    log = log_of(report, [HEAD_READ, PARTING_WRITTEN])
    line = sanitize.judged("hopper", log, "errors", excused=True)
    assert line["verdict"] == "clean apart from what the tool reports of the control"
    assert (line["races"], line["races_between_parts"], line["races_in_front_of_kernels"]) == ([], 1, 1)
    assert len(line["places_between_parts"]) == 1
    line = sanitize.judged("hopper", log, "errors", excused=False)
    assert line["verdict"] == "errors"
    assert (len(line["races"]), line["races_between_parts"], line["races_in_front_of_kernels"]) == (1, 0, 1)


@pytest.mark.parametrize("report", RACES.values(), ids=RACES)
def test_any_other_race_is_an_error(report):
    line = sanitize.judged("hopper", log_of([LSE_WRITTEN, LSE_READ], report), "errors", excused=True)
    assert (line["verdict"], len(line["races"]), line["races_between_parts"]) == ("errors", 1, 1)


def test_reports_that_are_not_shown_are_errors():
    line = sanitize.judged("hopper", log_of([LSE_WRITTEN, LSE_READ], errors=2), "errors", excused=True)
    assert (line["verdict"], line["races"]) == ("errors", ["1 reports that the log does not show"])


def test_in_front_of_kernels_needs_no_control():
    line = sanitize.judged("hopper", log_of([HEAD_READ, PARTING_WRITTEN]), "errors", excused=False)
    assert (line["verdict"], line["races"], line["races_in_front_of_kernels"]) == ("clean", [], 1)


def test_a_run_that_broke_off_is_not_clean():
    log = log_of([LSE_WRITTEN, LSE_READ])
    assert sanitize.judged("hopper", log, "exit status 1", excused=True)["verdict"] == "exit status 1"
    assert sanitize.judged("hopper", "", "errors", excused=True)["verdict"] == "errors"


RIGHT = "control plain: right\ncontrol bytes: right\n"


@pytest.mark.parametrize(
    ("said", "reports", "verdict"),
    [
        (RIGHT, [handed_over("plain"), handed_over("bytes")], "reported although right"),
        (RIGHT, [handed_over("plain")], "reported in part"),
        (RIGHT, [], "clean"),
        (RIGHT.replace("bytes: right", "bytes: wrong"), [handed_over("plain"), handed_over("bytes")], "wrong result"),
        ("", [handed_over("plain"), handed_over("bytes")], "wrong result"),
    ],
)
def test_control_excuses_only_correct_reported_cases(said, reports, verdict, monkeypatch, tmp_path):
    logs = {
        "control": (said + log_of(*reports), 9 if reports else 0),
        "triton": (log_of(), 0),
        "hopper": (log_of([LSE_WRITTEN, LSE_READ]), 9),
    }

    def answer(command, **_):
        log, status = logs[command[-1]]
        return subprocess.CompletedProcess(command, status if "racecheck" in command else 0, log, "")

    monkeypatch.setattr(sanitize.subprocess, "run", answer)
    monkeypatch.setattr(sanitize, "run", lambda backend: None)
    monkeypatch.setattr(sanitize, "control_missing", lambda: None)
    monkeypatch.setattr(sanitize, "facts", lambda device: {})
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--tools", "racecheck", "--out", str(tmp_path / "lines.jsonl")])
    excused = verdict == "reported although right"
    assert sanitize.main() == int(not excused)
    lines = {line["backend"]: line for line in map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())}
    assert list(lines) == ["control", "triton", "hopper"]
    assert lines["control"]["verdict"] == verdict
    assert lines["control"]["races_between_parts"] == len(reports)
    assert lines["hopper"]["verdict"] == (sanitize.APART if excused else "errors")
    assert lines["hopper"]["races_between_parts"] == int(excused)


def test_the_control_says_why_it_does_not_run(monkeypatch, capsys):
    monkeypatch.setattr(sanitize.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sanitize, "facts", lambda device: {})
    sanitize.run("control")
    assert capsys.readouterr().out == "control did not run: needs a GPU of compute capability 9.x, got none\n"
    line = sanitize.sanitize("racecheck", "control", 1.0, excused=False)
    assert line["verdict"] == "did not run: needs a GPU of compute capability 9.x, got none"


def test_the_control_tells_nothing_too_early():
    from kernels.test_hopper_compile import compile_kernel, unordered_signals

    from dilated_attention_pytorch.kernels.hopper.backend import gluon_missing

    reason = gluon_missing()
    if reason is not None:
        pytest.skip(reason)
    import torch

    from dilated_attention_pytorch.kernels.hopper.layouts import tile_layout

    handover = loaded("handover")
    side = handover.SIDE
    tile = f"tensordesc<bf16[{side},{side}],{tile_layout(side, side, torch.bfloat16, rank=2)!r}>"
    assert tuple(handover.KERNELS) == sanitize.HANDOVERS
    for case, kernel in handover.KERNELS.items():
        compiled = compile_kernel(kernel, {"desc": tile, "p_sums": "*i32"}, {"STEPS": handover.STEPS})
        assert compiled.metadata.name == f"handover_{case}_kernel"
        assert ("expect_tx" in compiled.asm["ptx"]) == (case == "bytes")
        assert not unordered_signals(compiled.asm["ptx"])
