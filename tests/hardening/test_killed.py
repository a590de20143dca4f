"""Every file the library writes, with its writer killed at every line of the code that writes it, and in between."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import scaled

SOURCE = Path(__file__).resolve().parents[2] / "src"
KILLED = """
import json, os, random, signal, sys, tempfile, time
from pathlib import Path
import torch
import dilated_attention_pytorch
from dilated_attention_pytorch.models import read_state
from dilated_attention_pytorch.models.checkpoints import write_state
from dilated_attention_pytorch.nn import calibration
from dilated_attention_pytorch.ops.streaming.sinks import FileSink
from dilated_attention_pytorch.ops.streaming.stream import streamed_attention
from dilated_attention_pytorch.tools import html_page as page
from dilated_attention_pytorch.tools.bench import results

torch.set_num_threads(1)
LIBRARY = Path(dilated_attention_pytorch.__file__).parent
WRITING = ("atomic_write", "nn/calibration", "models/checkpoints", "tools/html_page", "tools/bench/results", "ops/streaming/sinks")
WRITING = {str(LIBRARY / f"{name}.py") for name in WRITING}
assert all(map(os.path.exists, WRITING))
folder = Path(tempfile.mkdtemp())
os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
generator = torch.Generator().manual_seed(0)
source = {which: [torch.randn(1, 1, 48, 4, generator=generator) for _ in range(3)] for which in ("old", "new")}
rows = {which: torch.empty(1, 1, 48, 4) for which in source}
for which, tensors in source.items():
    streamed_attention(tensors, "window:4", rows[which], chunk=16)
costs = {"old": {"a machine": calibration.UNMEASURED}, "new": {f"machine {i}": calibration.UNMEASURED for i in range(9)}}


def state(path):
    (value,) = {float(x) for x in read_state(path)["weight"].flatten()}
    return "old" if value == 1 else "new"


def stream(path, which, resume=False):
    streamed_attention(source[which], "window:4", FileSink(path, resume=resume), chunk=16)


def streamed(path):
    return torch.frombuffer(bytearray(path.read_bytes()[-48 * 16 :]), dtype=torch.float32).view(1, 1, 48, 4)


def resumed(path):
    # Before the first line that touches it, the older stream is whole; after that, going on must give the newer one.
    if path.with_name(path.name + ".progress").exists() and streamed(path).equal(rows["old"]):
        return "old"
    stream(path, "new", resume=True)
    return "new" if streamed(path).equal(rows["new"]) else "other rows"


def appended(path):
    # A line may be torn where the kernel was amid copying it; it costs no other line, and whoever reads is told.
    told = []
    lines = results.read_lines([path], told.append)
    assert all(set(line) == {"which", "filler"} for line in lines), lines
    assert len(lines) >= known.get("lines", 0) and len(told) <= ROUNDS, told
    known["lines"] = len(lines)
    return lines[-1]["which"]


known = {}
WRITERS = {
    "costs": (
        lambda path, which: calibration._write(costs[which]),
        lambda path: {1: "old", 9: "new"}[len(calibration.stored_models())],
        "costs",
    ),
    "safetensors": (
        lambda path, which: write_state({"weight": torch.full((64, 64), float(which == "old"))}, path, {"step": 1}),
        state,
        "state.safetensors",
    ),
    "torch": (lambda path, which: write_state({"weight": torch.full((64, 64), float(which == "old"))}, path), state, "state.pt"),
    "page": (
        lambda path, which: page.write(path, page.page(which, ["<p>" + "words " * 2000 + "</p>"])),
        lambda path: ("old" if ">old<" in path.read_text() else "new") if path.read_text().endswith("</html>\\n") else "half",
        "page.html",
    ),
    "lines": (
        lambda path, which: results.append(path, {"which": which, "filler": "x" * 5000}),
        appended,
        "lines.jsonl",
    ),
    "stream": (lambda path, which: stream(path, which), resumed, "stream.npy"),
}


def traced(write, stop):
    # Kill this process before the `stop`-th line of what writes; gives how many there were.
    count = 0

    def line(frame, event, argument):
        nonlocal count
        if event == "line":
            count += 1
            if count == stop:
                os.kill(os.getpid(), signal.SIGKILL)
        return line

    sys.settrace(lambda frame, event, argument: line if frame.f_code.co_filename in WRITING else None)
    write()
    sys.settrace(None)
    return count


def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def prepare(name):
    write, read, file = WRITERS[name]
    path = folder / file
    write(path, "old")
    return write, read, path


for name in WRITERS:
    write, read, path = prepare(name)
    lines = traced(lambda: write(path, "new"), 0)
    seen = set()
    for stop in range(1, lines + 2, max(1, lines // MOMENTS)):
        write(path, "old")
        os.waitpid(child(lambda: traced(lambda: write(path, "new"), stop)), 0)
        found = read(path)
        assert found in ("old", "new"), (name, stop, found)
        seen.add(found)
    write(path, "new")
    assert read(path) == "new", name
    print(name, lines, sorted(seen), flush=True)

# Within a line too, where the time goes into C: many writes, and an end at any moment.
random.seed(0)
for name in WRITERS:
    write, read, path = prepare(name)
    for _ in range(ROUNDS):
        def work():
            while True:
                write(path, "new")
        pid = child(work)
        time.sleep(random.uniform(0.002, 0.06))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert read(path) in ("old", "new"), name
print("all whole")
"""


@pytest.mark.timeout(250)
def test_a_writer_killed_at_any_moment_leaves_a_whole_file():
    """Plans, costs, checkpoints, pages, lines of results and streams: the old file, the new one, or one that resumes."""
    program = KILLED.replace("MOMENTS", os.environ.get("DAP_KILLS", "15")).replace("ROUNDS", "2")
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "DAP_CALIBRATE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(240),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-3000:]}"
    assert done.stdout.endswith("all whole\n")
