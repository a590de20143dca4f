"""The command `dap` as people run it: in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import parse
from dilated_attention_pytorch.kernels import registry
from dilated_attention_pytorch.kernels.cpu import native
from dilated_attention_pytorch.nn import calibration as tuning
from dilated_attention_pytorch.tools import cli, doctor
from dilated_attention_pytorch.tools import peak_memory as memory
from dilated_attention_pytorch.tools import plan as forecast
from dilated_attention_pytorch.tools.bench import runner as bench
from dilated_attention_pytorch.tools.bench.measure import PeakMemory
from dilated_attention_pytorch.tools.console import tokens

MODULE = [sys.executable, "-m", "dilated_attention_pytorch"]
SCRIPT = Path(sys.executable).with_name("dap")


@pytest.fixture
def dap(tmp_path: Path):
    def run(*words: str, entry: list[str] = MODULE, **environment: str) -> subprocess.CompletedProcess[str]:
        places = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "120"}
        return subprocess.run(
            [*entry, *words], capture_output=True, text=True, env={**os.environ, **places, **environment}, check=False
        )

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The same in this process, which has paid for importing torch: exit status, stdout, stderr."""
    # The place of the built kernel is looked up once a process and must not be this one.
    native.library_path()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(list(words))
        return (left.value.code or 0, *capsys.readouterr())

    return run


def schema(value: Any) -> Any:
    """Names and kinds, without the values."""
    if isinstance(value, dict):
        return {name: schema(item) for name, item in value.items()}
    if isinstance(value, list):
        return [schema(value[0])] if value else []
    return type(value).__name__


def test_help_names_every_command(dap):
    found = dap("--help")
    for name in cli.COMMANDS:
        assert re.search(rf"\b{name}\b", found.stdout)


@pytest.mark.parametrize("name", ["", *cli.COMMANDS])
def test_help_loads_no_torch_and_is_quick(dap, name: str):
    """Help takes half a second of processor time at most, which the load of the machine does not change."""
    code = (
        f"import sys, time; sys.argv = ['dap', *{name!r}.split(), '-h']\n"
        "try: import dilated_attention_pytorch.tools.cli as c; c.main()\n"
        "except SystemExit: print('torch' in sys.modules, time.process_time())"
    )
    help_text, (loaded, seconds) = (lambda lines: (lines[:-1], lines[-1].split()))(
        dap(entry=[sys.executable, "-c", code]).stdout.splitlines()
    )
    assert help_text[0].startswith(f"usage: dap {name}".rstrip())
    assert loaded == "False" and float(seconds) < 0.5


def test_version_and_unknown_commands(dap):
    entry = [str(SCRIPT)] if SCRIPT.exists() else MODULE
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", dap("--version", entry=entry).stdout)
    for word, hint in (("nonsense", "doctor, plan"), ("plann", "Did you mean 'plan'?")):
        wrong = dap(word)
        assert wrong.returncode == 2 and word in wrong.stderr and hint in wrong.stderr


def test_a_pipe_gets_no_colours(dap):
    result = dap("doctor", "--device", "cpu")
    assert "\x1b" not in result.stdout + dap("--help").stdout and "native" in result.stdout


def test_the_installed_command_is_the_module():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'dap = "dilated_attention_pytorch.tools.cli:main"' in text


def test_doctor_says_why_not(here):
    found = json.loads(here("doctor", "--json", "--device", "cpu")[1])
    kinds = schema(found)
    assert set(kinds) == {"machine", "memory", "surroundings", "packages", "backends", "typical_calls"}
    assert (
        kinds["memory"] == {"free": "int", "total": "int"} and 0 < found["memory"]["free"] <= found["memory"]["total"]
    )
    by_name = {backend["name"]: backend for backend in found["backends"]}
    assert by_name["cpu"] == {"name": "cpu", "ready": True, "why_not": None}
    assert not by_name["triton"]["ready"] and "CUDA" in by_name["triton"]["why_not"]
    assert [call["backend"] in ("native", "cpu") for call in found["typical_calls"]] == [True] * 3


def test_doctor_asks_backends_after_the_build(here, monkeypatch):
    """The report builds the C++ kernel where it can; backends that were asked before would be out of date."""
    order, explain = [], registry.explain
    monkeypatch.setattr(doctor, "surroundings", lambda: order.append("build") or {})
    monkeypatch.setattr(registry, "explain", lambda call: order.append("explain") or explain(call))
    assert here("doctor", "--json", "--device", "cpu")[0] == 0
    assert order[:2] == ["build", "explain"]


def test_doctor_reports_an_unsupported_triton(here, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    found = json.loads(here("doctor", "--json", "--device", "cpu")[1])
    assert "direct launches need Triton 3.6 to 3.9 for CUDA, got 3.10.0" in found["surroundings"]["triton"]


def test_plan_has_a_fixed_schema(here):
    words = ("-p", "window:64 & causal", "-n", "4K", "--heads", "2", "--dtype", "fp32", "--device", "cpu", "--json")
    status, stdout, _ = here("plan", *words)
    assert status == 0
    assert schema(json.loads(stdout)) == {
        "pattern": "str",
        "shape": {
            "n": "int",
            "heads": "int",
            "key_heads": "int",
            "d": "int",
            "dtype": "str",
            "batch": "int",
            "backend": "str",
            "device": "str",
            "ranks": "int",
        },
        "tiles": "int",
        "block_size": "int",
        "density": "float",
        "flops": {"forward": "int", "training": "int"},
        "plan_bytes": "int",
        "peak_bytes": {"forward": "int", "training": "int"},
        "free_bytes": "int",
        "fits": {"forward": "bool", "training": "bool"},
        "longest": {"forward": "int", "training": "int"},
        "seconds": "NoneType",
        "dense": {"flops_forward": "int", "scores_bytes": "int", "seconds_forward": "NoneType"},
        "rank": "NoneType",
        "suggestions": ["str"],
    }


BENCH_LINE = [
    *("suite", "case", "backend", "direction", "pattern", "n", "d", "heads", "key_heads", "dtype", "p20_ms", "p50_ms"),
    *("p80_ms", "rounds", "flops", "gflop_s", "density", "relative_rate", "peak_bytes", "peak_total_bytes"),
    *("first_call_s", "gate", "gate_passed", "device", "threads", "cores", "git", "code", "torch", "triton", "python"),
]


def test_bench_and_report_have_a_fixed_schema(here, tmp_path, monkeypatch):
    case = bench.Case(name="window", pattern="window:64")
    group = bench.Group(n=256, d=16, heads=1, key_heads=1, cases=(case,), peer_heads=1, rounds=(1, 1), suite="quick")
    monkeypatch.setattr(bench, "suite", lambda name, device: [group])
    out = tmp_path / "quick.jsonl"
    status, stdout, stderr = here("bench", "--out", str(out), "--json")
    *lines, plans = [json.loads(line) for line in stdout.splitlines()]
    assert status == 0 and [list(line) for line in lines] == [BENCH_LINE] * 4
    assert list(plans)[:6] == ["suite", "case", "hits", "misses", "warm_hits", "warm_misses"]
    assert f"Results are in {out}." in stderr, "stdout is for the lines alone"
    status, stdout, _ = here("report", str(out), "-o", str(tmp_path / "report"), "--json")
    assert status == 0 and schema(json.loads(stdout)) == {"lines": "int", "skipped": [], "written": ["str"]}


def test_show_tune_and_simulate_have_a_fixed_schema(here):
    drawn = schema(json.loads(here("show", "-p", "causal", "-n", "8", "--json")[1]))
    assert drawn.items() >= {"out": "NoneType", "maps": [MAP]}.items()
    assert schema(json.loads(here("tune", "show", "--json")[1])) == {"file": "str", "models": {}}
    told = here("simulate", "-n", "4K", "--ranks", "2", "--heads", "1", "--first", "256", "--json")[1]
    assert schema(json.loads(told))["worlds"][0]["ranks"] == "int"


MAP = {"title": "str", "n": "int", "head": "int", "cell": "int", "share": [["float"]]}


def test_plan_that_does_not_fit_exits_1_with_advice(here):
    status, stdout, _ = here("plan", "-p", "window:64", "-n", "64K", "--device", "cpu", "--memory", "0.2")
    assert status == 1 and "Training fits up to" in stdout and "--ranks" in stdout


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "-p", "windo:64", "-n", "4K"),
        ("plan", "-p", "window:64", "-n", "some"),
        ("plan", "-p", "window:64", "-n", "4K", "--dtype", "int8"),
        ("plan", "-p", "window:64", "-n", "4K", "--memory", "inf"),
        ("plan", "-p", "window:64", "-n", "4K", "--heads", "3", "--key-heads", "2"),
        ("show", "-p", "causal", "-o", "picture.gif"),
        ("show", "-p", "causal", "--head", "9"),
        ("doctor", "--device", "tpu"),
        ("bench", "--suite", "standart"),
        ("bench", "--suite", "quick", "--out", "pyproject.toml/x.jsonl"),
        ("report", "none.jsonl"),
        ("show", "-p", "causal", "-o", "pyproject.toml/x.html"),
        ("show", "causal", "-o", "no/such/folder/x.svg"),
        ("report", "pyproject.toml", "-o", "no/such/folder"),
        ("bench", "-o", "no/such/folder/x.jsonl"),
        ("train", "-o", "no/such/folder"),
        ("plan", "window:64"),
        ("plan", "window:64", "-n", "4K", "--heads", "1e9"),
        ("plan", "window:64", "-n", "4KB"),
        ("plan", "window:64", "-n", "64B"),
        ("plan", "random:0.5", "-n", "64M"),
        ("plan", "dilated:" + ",".join(f"{16 + i}x1" for i in range(3000)), "-n", "4K"),
        ("show", "-p", "causal", "-o", "pyproject.toml/x.PNG"),
    ],
)
def test_wrong_use_is_explained_in_words_and_exits_with_2(here, words):
    status, _, stderr = here(*words)
    assert status == 2 and "Traceback" not in stderr and "must" in stderr


def test_figures_that_cannot_be_kept_are_not_passed_over(here, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "measure", lambda device: tuning.UNMEASURED)
    (tmp_path / "cache").write_text("a file where the folder should be")
    status, _, stderr = here("tune", "--device", "cpu")
    assert status == 2 and "can be written" in stderr and "XDG_CACHE_HOME" in stderr


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "more memory than there is"),
        (MemoryError(), 1, "more memory than there is"),
    ],
)
def test_what_ends_a_command_from_outside_is_no_traceback(here, monkeypatch, error, status, words):
    def interrupted(name):
        raise error

    monkeypatch.setattr(cli, "load", interrupted)
    found, _, stderr = here("doctor")
    assert found == status and words in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("command", [["--version"], ["plan", "--help"], ["show", "window:64", "-n", "256"]])
def test_a_stdout_that_takes_nothing_ends_a_command(command):
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for stdout, status, words in ((writer, 141, b""), (full, 2, b"dap: [Errno 28] No space left on device\n")):
        arguments = [sys.executable, "-m", "dilated_attention_pytorch", *command]
        environment = os.environ | {"PYTHONUNBUFFERED": ""}
        found = subprocess.run(arguments, stdout=stdout, stderr=subprocess.PIPE, env=environment, check=False)
        os.close(stdout)
        assert (found.returncode, found.stderr) == (status, words)


def test_tune_measures_shows_and_clears(here, tmp_path):
    made = json.loads(here("tune", "--json", "--device", "cpu")[1])
    assert made["file"] == str(tmp_path / "cache" / "dilated_attention_pytorch" / "costs.json")
    assert all(model["sparse_tile"] > 0 and model["measured"] for model in made["models"].values())
    assert json.loads(here("tune", "show", "--json")[1]) == made
    predicted = json.loads(here("plan", "-p", "window:64", "-n", "4K", "--device", "cpu", "--json")[1])
    assert predicted["seconds"]["training"] > predicted["seconds"]["forward"] > 0
    assert json.loads(here("tune", "clear", "--json")[1])["models"] == {}


@pytest.mark.parametrize("kind", ["txt", "svg", "png", "html"])
def test_show_writes_every_kind(here, tmp_path, kind):
    out = tmp_path / f"map.{kind}"
    assert here("show", "-p", "window:64 | global:8", "-n", "256", "-o", str(out))[0] == 0
    assert out.stat().st_size > 500


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("64K", 65536), ("4Ki", 4096), ("1.5k", 1536), ("1M", 2**20), ("1_000", 1000), ("1e3", 1000)],
)
def test_tokens_are_read_with_units(text: str, count: int):
    assert tokens(text) == count


@pytest.mark.parametrize(
    ("text", "reason"),
    [(word, "whole number") for word in ("inf", "nan", "1MK", "1KK", "4KB", "1.5", "0", "-1", "1e-3", "1e9999", "K")]
    + [("1e400", "at most 281,474,976,710,656"), ("300000000B", "at most")],
)
def test_lengths_that_are_none_are_refused(here, text: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        tokens(text)
    status, _, stderr = here("plan", "-p", "window:64", "-n", text)
    assert status == 2 and "Traceback" not in stderr and reason in stderr


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help(here, flag: str):
    for name in cli.COMMANDS:
        status, stdout, _ = here(name, flag)
        assert status == 0 and stdout.startswith(f"usage: dap {name}") and "--json" in stdout, name


def test_patterns_are_accepted_anywhere(here):
    words = ("-n", "64", "--heads", "1", "--device", "cpu", "--memory", "1", "--json")
    given = [("window:8", *words), (*words, "window:8"), (*words, "-p", "window:8")]
    assert len({here("plan", *line)[1] for line in given}) == 1


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_dtypes_have_two_names(here, name: str):
    told = json.loads(here("plan", "window:8", "-n", "64", "--dtype", name, "--device", "cpu", "--json")[1])
    assert told["shape"]["dtype"] == "bfloat16"


def test_json_of_show_is_the_map(here):
    assert json.loads(here("show", "-p", "causal", "-n", "4", "--json")[1])["maps"][0]["share"][1] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]


MEASURED = """
import json, sys, torch
import dilated_attention_pytorch as dap
from dilated_attention_pytorch.tools.console import dtype_name
from dilated_attention_pytorch.tools.plan import forecast
from dilated_attention_pytorch.tools.bench.measure import PeakMemory
def call(n, heads, key_heads, dtype, text, grad):
    q, k, v = (torch.randn(1, h, n, 64, dtype=dtype).requires_grad_(grad) for h in (heads, key_heads, key_heads))
    out = dap.attention(q, k, v, text, enable_gqa=True)
    return torch.autograd.grad(out, (q, k, v), torch.randn_like(out)) if grad else out
for text, n, heads, key_heads, kind in json.loads(sys.argv[1]):
    dtype, found = getattr(torch, dtype_name(kind)), []
    for grad in (False, True):
        call(256, heads, key_heads, dtype, text, grad)
        dap.plan_cache.clear()
        with PeakMemory("cpu") as peak:
            call(n, heads, key_heads, dtype, text, grad)
        found.append(peak.extra)
    told = forecast(text, n, heads, key_heads, 64, kind, 1, 1, "cpu", 2**40)["peak_bytes"]
    print(json.dumps([found, [told["forward"], told["training"]]]))
"""
PROBLEMS = [
    ["window:256 & causal", 32768, 4, 4, "fp32"],
    ["dilated:1024x1,4096x4", 32768, 4, 4, "fp32"],
    ["random:0.01", 32768, 8, 2, "fp32"],
    ["window:256 & causal", 32768, 4, 4, "bf16"],
]


def test_the_forecast_of_peak_memory_is_within_a_tenth():
    with PeakMemory("cpu") as supported:
        pass
    if supported.extra is None:
        pytest.skip("this system does not tell its peak memory")
    # Freed memory goes back at once, so that what is resident is what is held.
    settings = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", MEASURED, json.dumps(PROBLEMS)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, check=True)
    for problem, line in zip(PROBLEMS, run.stdout.splitlines(), strict=True):
        measured, told = json.loads(line)
        assert told == pytest.approx(measured, rel=0.1), problem


@pytest.mark.parametrize(
    ("backend", "joined", "more"),
    [
        # Bytes beyond q, k, v, the output, LSE, delta and all their gradients, for 4 query and 2 key heads of 64, bf16.
        ("triton", False, (0, 0)),
        ("triton", True, (4 * 4 * 64, 4 * 4 * 64)),
        ("hopper", True, (0, 4 * 4)),
    ],
)
def test_what_a_gpu_holds_besides_depends_on_the_backend(backend: str, joined: bool, more: tuple[int, int]):
    shape = memory.Shape(n=1024, heads=4, key_heads=2, d=64, dtype=torch.bfloat16, backend=backend, joined=joined)
    rows, row = 1024, 64 * 2
    forward = rows * ((4 + 2 + 2 + 4) * row + 4 * 4)
    training = rows * (2 * (4 + 2 + 2 + 4) * row + 2 * 4 * 4)
    assert memory.peaks(shape, 0) == (forward + rows * more[0], training + rows * more[1])


def test_plans_of_several_parts_or_skipped_rows_are_joined():
    from dilated_attention_pytorch import make_plan

    for text, joined in (("window:64", False), ("dilated:64x1,256x4", True), ("dilated:256x4", True)):
        assert memory.is_joined(make_plan(parse(text), 512, 2)) is joined


def test_the_longest_length_fits_and_a_tenth_more_does_not():
    shape = memory.Shape(n=4096, heads=4, key_heads=4, d=64, dtype=torch.float32, backend="native")
    for which, most in enumerate(memory.longest_that_fits(shape, (2**20, 1.0), 2**32)):
        for n, fits in ((most, True), (most * 11 // 10, False)):
            grown = replace(shape, n=n)
            assert (memory.peaks(grown, 2**20 * n // 4096)[which] <= 2**32) is fits
    assert memory.plan_growth(parse("documents:100,28"), forecast_plan()) is None


def forecast_plan():
    from dilated_attention_pytorch import make_plan

    return make_plan(parse("documents:100,28"), 128, 1)


def test_a_single_token_has_a_plan(here):
    assert here("plan", "-p", "window:64", "-n", "1", "--heads", "1", "--device", "cpu")[0] == 0


def test_what_fits_is_each_rank_where_there_are_several():
    needed = forecast.forecast("window:64", 32768, 2, 2, 64, "fp32", 1, 4, "cpu", 2**40)
    free = needed["rank"]["peak_bytes"]["training"]
    for room, fits in ((free, True), (free - 1, False)):
        found = forecast.forecast("window:64", 32768, 2, 2, 64, "fp32", 1, 4, "cpu", room)
        assert found["fits"]["training"] is fits and found["peak_bytes"]["training"] > free
        assert any("--ranks" in line for line in forecast.suggestions(found)) is not fits


def test_ranks_get_their_share():
    whole = forecast.forecast("window:64", 32768, 2, 2, 64, "fp32", 1, 4, "cpu", 2**40)
    rank = whole["rank"]
    assert rank["tokens"] == 8192 and rank["received_is"] == "counted"
    assert 0 < rank["received_bytes"] < whole["peak_bytes"]["forward"]
    assert rank["peak_bytes"]["forward"] < 0.7 * whole["peak_bytes"]["forward"]
