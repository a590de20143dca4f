"""Shared parts of the commands: options, exit statuses, tables for people and JSON for programs."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

from ..errors import BackendUnsupported, must

UNITS = {"": 1, "K": 2**10, "KI": 2**10, "M": 2**20, "MI": 2**20, "B": 2**30, "G": 2**30, "GI": 2**30}
"""Factors of a count of tokens; all are binary."""
MOST_TOKENS = 2**48
"""Longest sequence of any command; positions and their products stay below 2**63."""
MOST_HEADS = 65_536
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Short names of dtypes and torch's own; options accept both."""


def tokens(text: str | int) -> int:
    """Read a count of tokens: 4096, 64K or 64Ki (65,536), 1M, 1B, 1_000_000 or 1e6."""
    word = str(text).strip().upper().replace("_", "").replace(",", "")
    match = re.fullmatch(rf"(\d+(?:\.\d*)?(?:E\+?\d{{1,3}})?)({'|'.join(UNITS)})", word)
    count = Fraction(match[1]) * UNITS[match[2]] if match else Fraction(0)
    if count < 1 or count.denominator > 1:
        what = "tokens must be a whole number like 4096, 64K, 64Ki, 1M or 1B, with at most one unit"
        raise must(what, repr(text))
    if count > MOST_TOKENS:
        raise must(f"tokens must be at most {MOST_TOKENS:,}", repr(text))
    return int(count)


def dtype_name(text: str) -> str:
    """Torch's name of a dtype: bfloat16 for bf16; any other word stays."""
    return DTYPES.get(text, text)


def device_of(device: str) -> str:
    """The device a command runs on: cpu or cuda."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise must("device must be auto, cpu or cuda", repr(device))
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device is available to this build of torch. Use --device cpu.")
    return device


def usual_dtype(device: str) -> str:
    """Dtype of a command that has no `--dtype`: bfloat16 on GPUs, float32 elsewhere."""
    return "bfloat16" if device == "cuda" else "float32"


def whole(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """Reader of a whole number within bounds."""
    bounds = f"from {least:,} to {most:,}" if most < 2**63 - 1 else f">= {least:,}"

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,18}", text.strip()) or not least <= int(text) <= most:
            raise must(f"the value must be a whole number {bounds}", repr(text))
        return int(text)

    return read


def positive(text: str) -> float:
    """Read a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise must("the value must be a positive number", repr(text))
    return number


def one_of(allowed: Iterable[str], read: Callable[[str], str] = str) -> Callable[[str], str]:
    """Reader of one of several words."""
    from difflib import get_close_matches

    words = tuple(allowed)

    def choose(text: str) -> str:
        word = read(text)
        if word not in words:
            near = get_close_matches(word, words, 1)
            hint = f"Did you mean {near[0]}?" if near else None
            raise must(f"the value must be one of {', '.join(words)}", repr(text), hint)
        return word

    return choose


def new_path(text: str) -> Path:
    """Read a file or folder to write, whose parent folder must exist."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise must("the output must go into a folder that exists", repr(text), f"Make it: mkdir -p {path.parent}")
    return path


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with the defaults of options that have one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _get_help_string(self, action: argparse.Action) -> str:
        unset = action.default in (None, False, argparse.SUPPRESS, math.inf) or "default" in (action.help or "")
        return (action.help or "") + ("" if unset else " [%(default)s]")


class Parser(argparse.ArgumentParser):
    """Options of one command, with those that several commands share."""

    def __init__(self, prog: str, description: str, given: str = "", epilog: str | None = None) -> None:
        usage = " ".join(filter(None, (prog, given, "[OPTIONS]")))
        described = {"description": description, "epilog": epilog, "usage": usage}
        super().__init__(prog=prog, **described, formatter_class=_Help, allow_abbrev=False)

    def read(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parse a command line; without one, that of the process."""
        # Python before 3.13 accepts an optional positional before the first option or not at all.
        return self.parse_intermixed_args(arguments)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists the options.\n")

    def option(self, *names: str, read: Callable[[str], Any] | None = None, **more: Any) -> None:
        """Add an option; a `ValueError` of `read` becomes the message of the command."""

        def typed(text: str) -> Any:
            assert read is not None
            try:
                return read(text)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None

        if read is not None:
            more = {"type": typed, "metavar": "N", **more}
        self.add_argument(*names, **more)

    def pattern(self, default: str | None = None, more: str = "") -> None:
        """Add PATTERN as an argument and as `-p`."""
        text = f'keys that each query attends to, such as "dilated:2048x1,8192x4 & causal"{more}'
        self.add_argument("pattern", nargs="?", metavar="PATTERN", default=argparse.SUPPRESS, help=text)
        self.add_argument("-p", "--pattern", metavar="PATTERN", default=default, help="the pattern, as an option")

    def tokens(self, default: int | None = None, **more: Any) -> None:
        """Add `-n`, `--tokens` and `--context`, one option."""
        more = {"help": "length of the sequence: 4096, 64K, 1M", "metavar": "COUNT", **more}
        self.option("-n", "--tokens", "--context", read=tokens, default=default, **more)

    def heads(self, default: int | None = 8, text: str = "query heads") -> None:
        """Add `--heads`."""
        self.option("--heads", read=whole(1, MOST_HEADS), default=default, metavar="COUNT", help=text)

    def dtype(self, *allowed: str, default: str | None = None, text: str = "") -> None:
        """Add `--dtype` with short and long names."""
        names = ", ".join(allowed or DTYPES.values())
        text = text or f"{names}; short forms such as bf16 are accepted" + (
            "" if default else "; bfloat16 on GPUs and float32 elsewhere by default"
        )
        read = one_of(allowed or DTYPES.values(), dtype_name)
        self.option("--dtype", read=read, default=default, metavar="DTYPE", help=text)

    def device(self) -> None:
        """Add `--device`."""
        text = "cpu, cuda, or auto: the GPU if there is one"
        self.option("--device", read=one_of(("auto", "cpu", "cuda")), default="auto", metavar="DEVICE", help=text)

    def out(self, text: str, default: Path | None = None) -> None:
        """Add `-o` and `--out`."""
        self.option("-o", "--out", read=new_path, default=default, metavar="PATH", help=text)

    def json(self, text: str = "print one JSON object instead of tables") -> None:
        """Add `--json`."""
        self.add_argument("--json", action="store_true", help=text)


def leave(command: Callable[[], int]) -> NoReturn:
    """Run a command and exit: 0 done, 1 a result is wrong or does not fit, 2 wrong use, 130 interrupted, 141 unread."""
    try:
        try:
            status = command()
        finally:
            print(end="", flush=True)
    except KeyboardInterrupt:
        status = 130
    except OSError as error:
        # The interpreter must not write again what stdout has not taken.
        sys.stdout = None  # pyrefly: ignore[bad-assignment]
        status = 141 if isinstance(error, BrokenPipeError) else 2
        if status == 2:
            print(f"dap: {error}", file=sys.stderr)
    except (ValueError, BackendUnsupported) as error:
        print(f"dap: {error}", file=sys.stderr)
        status = 2
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        print(f"dap: out of memory; this takes more memory than there is ({reason})", file=sys.stderr)
        status = 1
    sys.exit(status)


def print_json(data: Any) -> None:
    """Print one object."""
    print(json.dumps(data, indent=1, allow_nan=False))


def bold(text: str) -> str:
    """Text in bold on a terminal, unchanged in a file or a pipe."""
    plain = not (sys.stdout and sys.stdout.isatty()) or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[1m{text}\x1b[0m"


def print_title(text: str) -> None:
    """Begin a section."""
    print(f"\n{bold(text)}")


def print_pairs(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair a line; long values continue under their beginning."""
    listed = list(facts)
    begin = 4 + max((len(name) for name, _ in listed), default=0)
    columns = max(begin + 20, shutil.get_terminal_size((120, 24)).columns)
    for name, value in listed:
        lines = textwrap.wrap(value, columns - begin, break_long_words=False, break_on_hyphens=False) or [""]
        print(f"  {name}".ljust(begin) + f"\n{' ' * begin}".join(lines))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print rows of cells; `right` lists the columns of figures."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(header))]
    for number, line in enumerate(lines):
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        text = "  ".join(cells).rstrip()
        print(text if number else bold(text))
