"""The command `dap`. Each command is a module of this package with a `main`, imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module

from .console import bold, leave

COMMANDS = {
    "doctor": ("doctor", "Machine, versions, and the state of every backend."),
    "plan": ("plan", "Cost of a pattern: tiles, memory, time, the longest sequence that fits."),
    "show": ("show", "Draw a pattern or a trained layer: text, SVG, PNG, or an interactive HTML page."),
    "bench": ("bench.command", "Measure this machine; every result is checked before it is timed."),
    "report": ("report", "Write tables and plots of benchmark results, or compare two results."),
    "tune": ("tune", "Measure and store the costs of dense and sparse attention on this machine."),
    "simulate": ("simulate", "Compute traffic, memory and balance of a sequence sharded over many ranks."),
    "billion": ("billion", "Stream attention over a billion tokens."),
    "train": ("train", "Train a small byte-level language model."),
    "generate": ("generate", "Continue a text with a model trained by `dap train`."),
    "quality": ("quality.command", "Measure how much quality patterns retain."),
}
"""name -> module, one line of help."""
ABOUT = "Exact sparse attention: inspect this machine, plan and draw patterns, measure speed, train small models."


def load(name: str) -> Callable[[list[str]], int]:
    """The entry point of a command."""
    return import_module(f".{COMMANDS[name][0]}", __package__).main


def overview() -> str:
    """Help of `dap` itself."""
    width = max(map(len, COMMANDS))
    lines = [f"  {bold(name.ljust(width))}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            f"{bold('usage:')} dap COMMAND [OPTIONS]\n",
            f"{ABOUT}\n",
            bold("commands:"),
            *lines,
            f"\n{bold('options:')}",
            "  -h, --help  this text; `dap COMMAND --help` lists the options of a command",
            "  --version   print the version",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 a result is wrong or does not fit, 2 wrong use, 130 interrupted."""
    given = sys.argv[1:] if arguments is None else arguments
    leave(lambda: _run(given))


def _run(given: list[str]) -> int:
    name, rest = (given[0], given[1:]) if given else ("--help", [])
    if name in ("-h", "--help"):
        print(overview())
        return 0 if given else 2
    if name == "--version":
        from .. import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Commands: {', '.join(COMMANDS)}."
        print(f"dap: no command {name!r}. {hint}", file=sys.stderr)
        return 2
    return load(name)(rest)


if __name__ == "__main__":
    main()
