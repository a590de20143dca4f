"""Result files, one line of JSON per figure. Writers append whole lines; readers report invalid lines by number."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import must
from ...kernels.external import FLEX

DIRECTIONS = ("forward", "backward")
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""Operations relative to the forward: five matrix products of the backward against two of the forward."""
KEY = ("suite", "case", "subject", "n", "d", "heads", "key_heads", "dtype", "direction")
"""Fields that identify a line of the benchmark."""
Line = dict[str, Any]
OURS_ANY_ORDER = "ours-any-order"
"""Subject of lines with `reproducible_gradients(False)`."""
PEERS = {
    "fa4": "FlashAttention-4",
    FLEX: "FlexAttention",
    "sdpa-cudnn": "cuDNN",
    "sdpa-flash": "SDPA flash",
    "cudnn-blocks": "cuDNN block-sparse",
    "cudnn-interval": "cuDNN interval",
}
"""Subjects of lines that time other libraries, and their names."""
TIMED = {
    **dict.fromkeys(("case", "backend", "device"), str),
    **dict.fromkeys(("n", "d", "heads", "key_heads"), int),
    **dict.fromkeys(("p50_ms", "density"), int | float),
}
"""Other fields of a line with a time, and their types."""


@dataclass(frozen=True)
class Bar:
    """One target and its measurement."""

    what: str
    measured: float
    wanted: float
    unit: str = "x"

    @property
    def passed(self) -> bool:
        return self.measured >= self.wanted if self.unit == "x" else self.measured <= self.wanted

    def __str__(self) -> str:
        word, sign = "pass" if self.passed else "FAIL", ">=" if self.unit == "x" else "<="
        return f"{word}  {self.measured:6.2f}{self.unit} {sign} {self.wanted:.2f}{self.unit}  {self.what}"


def key_of(line: Line) -> tuple[Any, ...]:
    """The values of `KEY`."""
    return tuple(line.get(name) for name in KEY)


def is_left_out(line: Line) -> bool:
    """Whether the line gives the reason why dense attention was not timed."""
    return line.get("case") == "dense" and "skipped" in line


def begin(out: Path, keep: bool) -> None:
    """Create the folder of a file and check that it is writable, before a measurement."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a" if keep else "w"):
            pass
    except OSError as error:
        raise must("the file of results must be one that can be written", f"{out} ({error.strerror})") from None


def append(out: Path, line: Line) -> None:
    """Append a line in one write: an interruption leaves whole lines, a kill at worst one truncated line."""
    handle = os.open(out, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        # A line truncated by a full disk must not absorb this one.
        cut = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, ("\n" * cut + json.dumps(line) + "\n").encode())
    finally:
        os.close(handle)


def read_lines(paths: Sequence[Path], complain: Callable[[str], None] | None = None) -> list[Line]:
    """Valid lines of the files, in order of file names; invalid lines are reported by number and skipped."""
    found: list[Line] = []
    for path in sorted(paths):
        for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            why = _why_not(line)
            if isinstance(line, dict) and why is None:
                found.append(line)
            elif complain is not None and text.strip():
                complain(f"{path}:{number}: {why}, skipped")
    return found


def _why_not(line: object) -> str | None:
    """Reason why a value read from a file is not a line of results."""
    if not isinstance(line, dict):
        return "not a line of results"
    if line.get("p50_ms") is None or line.get("direction") not in DIRECTIONS:
        return None
    lacking = [name for name, kind in TIMED.items() if not isinstance(line.get(name), kind) or line[name] in (0, "")]
    return f"a time without {', '.join(lacking)}" if lacking else None


def known_lines(out: Path, complain: Callable[[str], None] | None = None) -> list[Line]:
    """Lines of a benchmark file; empty if there is no file."""
    return [line for line in read_lines([out], complain) if "case" in line] if out.exists() else []


def complaints_about(out: Path) -> list[str]:
    """Invalid lines of a file that is appended to."""
    problems: list[str] = []
    known_lines(out, problems.append)
    return problems


def progress(text: str) -> None:
    """Progress on stderr: one changing line on a terminal, plain lines in a log."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)
