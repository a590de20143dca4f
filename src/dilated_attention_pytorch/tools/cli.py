"""The command `dap`. A command is a module of this package, loaded when it is asked for.

A module that has `command` gives typer its parameters; one that has `main` alone reads its own arguments, so that it
also runs where typer is not installed (`python -m dilated_attention_pytorch.tools.bench`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

COMMANDS = {
    "doctor": ("doctor", "What this machine can run, and why not the rest."),
    "plan": ("forecast", "What a pattern will cost: tiles, memory, time, the longest sequence that fits."),
    "show": ("show", "Draw who sees whom: text, SVG, PNG, or one interactive HTML page."),
    "bench": ("bench", "Measure this machine; every result is checked before it is timed."),
    "report": ("report", "Tables and plots of what was measured, or two measurements side by side."),
    "tune": ("tune", "Measure what dense and sparse attention cost here, and remember it."),
    "simulate": ("simulate", "Run many ranks in one process and see what they would exchange."),
    "billion": ("billion", "Attention over a billion tokens, streamed."),
    "train": ("train", "Train a small model."),
    "quality": ("quality", "What a pattern costs in quality."),
}
"""name -> module, one line of help. A module that is not there is not offered."""
ABOUT = "Exact sparse attention: what this machine runs, what a pattern costs, who sees whom, how fast it is."
CLI_MISSING = "The command line needs typer and rich: pip install 'dilated-attention-pytorch[cli]'"


def offered() -> dict[str, tuple[str, str]]:
    """The commands whose modules exist."""
    return {name: entry for name, entry in COMMANDS.items() if find_spec(f"{__package__}.{entry[0]}") is not None}


def build(wanted: str | None) -> Callable[..., Any]:
    """The typer application, with the parameters of one command; the others are there for the list."""
    import typer

    app = typer.Typer(name="dap", help=ABOUT, no_args_is_help=True, pretty_exceptions_enable=False)

    @app.callback(invoke_without_command=True)
    def top(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
        if version:
            from .. import __version__

            print(__version__)
            raise typer.Exit

    for name, (module, about) in offered().items():
        if name != wanted:
            app.command(name, help=about)(lambda: None)
            continue
        loaded = import_module(f".{module}", __package__)
        if hasattr(loaded, "command"):
            app.command(name, short_help=about)(loaded.command)
        else:
            app.command(name, **_PASSED_ON)(_passing_on(loaded.main))
    return app


_PASSED_ON: Any = {
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
}


def _passing_on(run: Callable[[list[str]], int]) -> Callable[..., None]:
    import typer

    def command(context: typer.Context) -> None:
        raise typer.Exit(run(context.args))

    # The annotation must be the class itself: the name is not known where typer looks for it.
    command.__annotations__["context"] = typer.Context
    return command


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 a result is wrong or does not fit, 2 wrong use, 130 interrupted."""
    from ..errors import BackendUnsupported

    given = sys.argv[1:] if arguments is None else arguments
    wanted = next((word for word in given if not word.startswith("-")), None)
    try:
        build(wanted)(args=given, prog_name="dap")
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(CLI_MISSING)
    except KeyboardInterrupt:
        # Typer turns those of a command into this status; torch is imported before there is one.
        sys.exit(130)
    except (ValueError, BackendUnsupported, OSError) as error:
        print(f"dap: {error}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        print(f"dap: this takes more memory than there is ({reason})", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
