"""What the commands share: their options, tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Annotated, Any

from ..errors import must

try:
    import typer
except ModuleNotFoundError:
    # What a command computes is also asked for where nothing can be installed, and its options are not read there.
    typer: Any = SimpleNamespace(Option=lambda *_, **__: None, BadParameter=ValueError, Exit=SystemExit)

UNITS = {"K": 2**10, "M": 2**20, "B": 2**30}
"""Of tokens."""


def tokens(text: str | int) -> int:
    """A count of tokens: 4096, 64K (65,536), 1M, 1B or 1_000_000."""
    word = str(text).strip().upper().replace("_", "").replace(",", "")
    unit = UNITS.get(word[-1:], 1)
    try:
        count = float(word.rstrip("KMB")) * unit
    except ValueError:
        count = 0.0
    if count < 1 or count != int(count):
        raise must("tokens must be a whole number like 4096, 64K or 1M", repr(text))
    return int(count)


def _tokens_option(text: str | int) -> int:
    try:
        return tokens(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
PatternText = Annotated[
    str, typer.Option("--pattern", "-p", help='Who may see whom, like "dilated:2048x1,8192x4 & causal".')
]
Tokens = Annotated[
    int, typer.Option("--tokens", "-n", parser=_tokens_option, metavar="COUNT", help="Length: 4096, 64K, 1M.")
]
Heads = Annotated[int, typer.Option("--heads", min=1, help="Query heads.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto for the GPU where there is one.")]


def device_of(asked: str) -> str:
    """The device a command works on."""
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked not in ("cpu", "cuda"):
        raise must("device must be auto, cpu or cuda", repr(asked))
    if asked == "cuda" and not torch.cuda.is_available():
        raise must("device cuda must be there", "a machine or a torch build without it", "Use --device cpu.")
    return asked


def print_json(data: Any) -> None:
    """One object on stdout."""
    print(json.dumps(data, indent=1, allow_nan=False))


class Screen:
    """Text for people: colours on a terminal, plain words in a file, a pipe, or where rich is not installed."""

    def __init__(self) -> None:
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            self.console = None
        else:
            self.console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)

    def title(self, text: str) -> None:
        """Begin a section."""
        self.text(f"\n{text}", "bold")

    def text(self, text: str, style: str | None = None) -> None:
        """A line."""
        if self.console is None:
            print(text)
        else:
            self.console.print(text, style=style, markup=False)

    def pairs(self, facts: Iterable[tuple[str, str]]) -> None:
        """Names and values, one pair a line."""
        self.table((), [(f"  {name}", value) for name, value in facts])

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
        """Rows of cells; `right` are the columns of figures."""
        listed = [tuple(row) for row in rows]
        columns = range(len(header) or max(map(len, listed), default=0))
        if self.console is None:
            lines = [tuple(header), *listed] if header else listed
            widths = [max((len(line[index]) for line in lines if index < len(line)), default=0) for index in columns]
            for line in lines:
                cells = zip(line, widths, range(len(line)), strict=False)
                print("  ".join(cell.rjust(w) if i in right else cell.ljust(w) for cell, w, i in cells).rstrip())
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD if header else None, show_header=bool(header), pad_edge=False)
        for index in columns:
            side = "right" if index in right else "left"
            table.add_column(header[index] if header else "", justify=side, overflow="fold")
        for row in listed:
            table.add_row(*(Text(cell) for cell in row))
        self.console.print(table)
