"""Partial files of killed writers: removed by the next write, unless their writer lives or they are somebody's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dilated_attention_pytorch import atomic_write as files

SOURCE = Path(__file__).resolve().parents[2] / "src"
WRITER = """
import sys, time
from pathlib import Path
from dilated_attention_pytorch.atomic_write import write_whole

def write(temporary):
    Path(temporary).write_bytes(b"half")
    print(temporary, flush=True)
    time.sleep(300)

write_whole(Path(sys.argv[1]), write)
"""


def aged(path: Path) -> Path:
    os.utime(path, (time.time() - 2 * files.SETTLED_S,) * 2)
    return path


def write(place: Path) -> None:
    files.write_whole(place, lambda temporary: Path(temporary).write_bytes(b"whole"))


@pytest.fixture
def writer(tmp_path: Path):
    """A process in the middle of writing, and its partial file."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", WRITER, str(tmp_path / "a.pt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_partial_file_of_a_killed_writer_is_removed(writer, tmp_path: Path):
    process, partial = writer
    write(tmp_path / "a.pt")
    aged(partial)
    write(tmp_path / "a.pt")
    assert partial.read_bytes() == b"half", "its writer lives"
    process.send_signal(signal.SIGKILL)
    process.wait()
    write(tmp_path / "other.pt")
    assert partial.exists(), "it belongs to another file"
    write(tmp_path / "a.pt")
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "other.pt"]


def test_files_that_are_not_abandoned_stay(tmp_path: Path):
    kept = {
        "young": tmp_path / f".a.pt.young{files.PARTIAL}",
        "own": aged_file(tmp_path / ".a.pt.original"),
        "like": aged_file(tmp_path / f".aXpt.x{files.PARTIAL}"),
    }
    kept["young"].write_bytes(b"")
    target = aged_file(tmp_path / "target")
    link = tmp_path / f".a.pt.link{files.PARTIAL}"
    link.symlink_to(target)
    os.mkfifo(tmp_path / f".a.pt.pipe{files.PARTIAL}")
    write(tmp_path / "a.pt")
    assert all(path.exists() for path in kept.values()) and link.is_symlink() and target.exists()


def aged_file(path: Path) -> Path:
    path.write_bytes(b"x")
    return aged(path)


def test_file_is_closed_before_it_is_renamed(tmp_path: Path, monkeypatch):
    """Windows replaces no file that is open."""
    opened, closed, real = [], [], (os.open, os.close, os.replace)

    def replace(*args):
        assert opened and set(opened) <= set(closed)
        real[2](*args)

    monkeypatch.setattr(files.os, "open", lambda *args: opened.append(real[0](*args)) or opened[-1])
    monkeypatch.setattr(files.os, "close", lambda handle: closed.append(handle) or real[1](handle))
    monkeypatch.setattr(files.os, "replace", replace)
    write(tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == b"whole"
