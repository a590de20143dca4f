"""Machines that lack something: the library runs with what is there and says what is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from limits import scaled

from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.tools.doctor import surroundings

SOURCE = Path(__file__).resolve().parents[2] / "src"
ATTEND = """
import torch
from dilated_attention_pytorch import attention
from dilated_attention_pytorch.nn.calibration import cost_model
query, key, value = torch.randn(3, 1, 2, 300, 16, requires_grad=True).unbind()
output = attention(query, key, value, "dilated:64x1,256x4 & causal")
output.sum().backward()
assert output.isfinite().all()
assert cost_model().dense_tile > 0
from dilated_attention_pytorch.tools.doctor import surroundings
print("attended", surroundings(), flush=True)
"""
HIDE_TRITON = """
import sys
sys.modules["triton"] = None
"""
NO_HOME = """
import pathlib
def home(cls):
    raise RuntimeError("Could not determine home directory.")
pathlib.Path.home = classmethod(home)
"""
NO_NETWORK = """
import socket
def refuse(*_, **__):
    raise OSError("the library must not reach for the network")
socket.socket.__init__ = socket.create_connection = socket.getaddrinfo = refuse
"""
ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
"""
LITTLE_MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))
"""


small_torch = pytest.mark.skipif(
    torch.version.cuda is not None, reason="the libraries of a CUDA build alone take more than two gigabytes to map"
)


def run(program: str, changes: dict[str, str | None], folder: Path, seconds: float = 120) -> str:
    """Run it as a process of its own, in this environment but for the changes; what it wrote."""
    environment = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "DAP_CALIBRATE": "0"}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder)}
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", program],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(seconds),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize(
    ("before", "changes", "explained"),
    [
        (HIDE_TRITON, {"LC_ALL": "tr_TR.UTF-8", "TERM": "dumb", "COLUMNS": "1"}, ["'triton': 'none: the GPU kernels"]),
        ("", {"XDG_CACHE_HOME": "/proc/nowhere", "DAP_CALIBRATE": "1"}, ["name a place in XDG_CACHE_HOME"]),
        (
            NO_HOME,
            {"HOME": None, "XDG_CACHE_HOME": None, "DAP_CALIBRATE": "1", "PATH": "/nowhere"},
            ["'compiler': 'none: there is no g++"],
        ),
        (
            NO_NETWORK + ONE_CORE,
            {"OMP_NUM_THREADS": None, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            ["everything runs on one core", "can be written"],
        ),
        pytest.param(LITTLE_MEMORY, {}, ["'cores'"], marks=small_torch),
    ],
    ids=[
        "no triton, another locale",
        "no writable cache",
        "no home, no compiler",
        "no network, one core, ascii",
        "two gigabytes",
    ],
)
def test_attention_runs_in_restricted_environments(tmp_path, before, changes, explained):
    """What is missing costs time or a backend, never the answer; nothing is fetched, no socket is opened."""
    if before != LITTLE_MEMORY and "XDG_CACHE_HOME" not in changes and library_path().exists():
        # The environment with little memory builds it.
        cache = tmp_path / "cache" / "dilated_attention_pytorch"
        cache.mkdir(parents=True, mode=0o700)
        shutil.copy(library_path(), cache)
    told = run(before + ATTEND, changes, tmp_path)
    assert told.startswith("attended")
    for words in explained:
        assert words in told


DOCTOR = """
from dilated_attention_pytorch.tools.cli import main
main(["doctor", "--device", "cpu"])
"""


@small_torch
def test_doctor_runs_where_everything_is_missing(tmp_path):
    """No home, no compiler, no triton, no terminal, no letters but those of ASCII, one core, two gigabytes."""
    changes = {"HOME": None, "XDG_CACHE_HOME": None, "PATH": "/nowhere", "LC_ALL": "POSIX", "PYTHONUTF8": "0"}
    changes |= {"PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": None}
    told = run(NO_HOME + HIDE_TRITON + ONE_CORE + LITTLE_MEMORY + DOCTOR, changes, tmp_path)
    words = " ".join(told.split())
    for explained in (
        "GiB free of 2.0 GiB",
        "compiler none: there is no g++",
        "cache none: Could not determine home directory.",
        "triton none: the GPU kernels",
        "everything runs on one core",
        "native cannot be loaded (Could not determine home directory.)",
    ):
        assert explained in words, told


@pytest.mark.parametrize(
    ("raised", "explained"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040). Please update", "found version 11040"),
        ("Found no NVIDIA driver on your system. Please check", "Found no NVIDIA driver"),
        (None, "see nvidia-smi and CUDA_VISIBLE_DEVICES"),
    ],
    ids=["old driver", "no driver", "hidden devices"],
)
def test_doctor_says_why_a_cuda_build_finds_no_gpu(monkeypatch, raised, explained):
    """In the words of torch 2.11 to 2.15, which say this where libcuda reports version 11040."""

    def init():
        if raised is not None:
            raise RuntimeError(f"{raised}\nmore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    told = surroundings()["GPU"]
    assert told.startswith("none: torch is built for CUDA 13.0, but ")
    assert explained in told
    assert "\n" not in told


BUILD = """
from dilated_attention_pytorch.kernels.cpu import native
print(native.build())
"""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"PATH": "/nowhere", "CXX": None}, "needs g++"),
        ({"XDG_CACHE_HOME": "/proc/nowhere"}, "needs a place to write to"),
    ],
    ids=["no compiler", "no writable cache"],
)
def test_building_says_what_is_missing(tmp_path, changes, says):
    *told, status = run(BUILD, changes, tmp_path).splitlines()
    assert says in "\n".join(told)
    assert status == "1"


def test_import_has_no_side_effects(tmp_path):
    program = NO_NETWORK + "import dilated_attention_pytorch"
    assert run(program, {"PYTHONDONTWRITEBYTECODE": "1"}, tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
