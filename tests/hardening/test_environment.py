"""Machines that lack something: the library runs with what is there and says what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
ATTEND = """
import torch
from dilated_attention_pytorch import attention
from dilated_attention_pytorch.nn.tuning import cost_model
query, key, value = torch.randn(3, 1, 2, 300, 16, requires_grad=True).unbind()
output = attention(query, key, value, "dilated:64x1,256x4 & causal")
output.sum().backward()
assert output.isfinite().all()
assert cost_model().dense_tile > 0
print("attended", flush=True)
"""
HIDE_TRITON = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
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
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
"""
ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
"""
LITTLE_MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))
"""


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
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        (HIDE_TRITON, {"LC_ALL": "tr_TR.UTF-8", "TERM": "dumb", "COLUMNS": "1"}),
        ("", {"XDG_CACHE_HOME": "/proc/nowhere", "DAP_CALIBRATE": "1"}),
        ("", {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        (NO_HOME, {"HOME": None, "XDG_CACHE_HOME": None, "DAP_CALIBRATE": "1", "PATH": "/nowhere"}),
        (NO_NETWORK + ONE_CORE, {"OMP_NUM_THREADS": None}),
        (LITTLE_MEMORY, {}),
    ],
    ids=[
        "no triton, another locale",
        "no writable cache",
        "ascii",
        "no home, no compiler",
        "no network, one core",
        "two gigabytes",
    ],
)
def test_attention_runs_without_it(tmp_path, before, changes):
    """What is missing costs time or a backend, never the answer; nothing is fetched."""
    assert run(before + ATTEND, changes, tmp_path).strip() == "attended"


BUILD = """
from dilated_attention_pytorch.kernels import native
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


def test_importing_writes_nothing_and_prints_nothing(tmp_path):
    program = "import dilated_attention_pytorch"
    assert run(program, {"PYTHONDONTWRITEBYTECODE": "1"}, tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
