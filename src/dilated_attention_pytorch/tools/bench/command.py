"""Options of `dap bench`; torch is imported after they are read."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..console import Parser, one_of, positive
from .cases import ABOUT, ON_THIS_MACHINE
from .results import begin, complaints_about


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    width = max(map(len, ABOUT))
    about = "Measure attention on this machine; every result is checked against float64 before it is timed."
    suites = "suites:\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in ABOUT.items())
    parser = Parser("dap bench", about, epilog=suites)
    parser.option("--suite", read=one_of(ABOUT), default="quick", metavar="NAME", help="suite to run, see below")
    parser.out("JSONL file of the results; SUITE.jsonl by default")
    parser.option("--backend", default="auto", metavar="NAME", help="auto, or the name of a backend")
    parser.device()
    parser.option("--memory", read=positive, metavar="GIB", help="memory limit; 4/5 of the free memory by default")
    text = "start no case and no further round after this many seconds"
    parser.option("--budget", type=float, default=float("inf"), metavar="SECONDS", help=text)
    parser.option("--append", action="store_true", help="add to the file instead of replacing it")
    parser.option("--resume", action="store_true", help="keep the results in the file, measure the rest")
    parser.json("print the lines as they are written to the file")
    parser.option("--tiny", action="store_true", help="gpu suite only: small cases that run on any machine")
    options = parser.read(arguments)
    import torch

    from ...kernels.registry import backend_named
    from . import runner

    out = options.out or Path(f"{options.suite}.jsonl")
    for name in () if options.backend == "auto" else (options.backend,):
        backend_named(name)
    begin(out, keep=options.append or options.resume)
    for complaint in complaints_about(out):
        print(complaint, file=sys.stderr)
    deadline = time.monotonic() + options.budget
    there = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = [options.suite]
    if options.suite == "all":
        wanted = [*ON_THIS_MACHINE, *(["gpu"] if there == "cuda" else [])]
    status = 0
    try:
        for name in wanted:
            if name == "gpu":
                from . import gpu

                # Its lines have other fields, so they have a file of their own.
                own = out if len(wanted) == 1 else out.with_name(f"{out.stem}-gpu{out.suffix}")
                device = "cuda" if options.device == "auto" else options.device
                left = deadline - time.monotonic()
                status |= gpu.run(own, options.backend, device, left, options.resume, options.tiny)
                continue
            device = "cpu" if name in ("cpu", "million") else there if options.device == "auto" else options.device
            limits: dict[str, Any] = {"memory_gib": options.memory, "deadline": deadline}
            status |= runner.run(
                name, out, options.backend, device, resume=options.resume, as_json=options.json, **limits
            )
        if options.suite == "cpu":
            # A separate process, so that the reported memory is that of the case alone.
            child = [sys.executable, "-m", str(__package__), "--suite", "million", "--append"]
            child += ["--out", str(out), "--backend", options.backend, *(["--resume"] if options.resume else [])]
            child += ["--budget", str(deadline - time.monotonic())]
            status |= subprocess.run(child, check=False).returncode
    except KeyboardInterrupt:
        print(f"\nStopped; the results so far are in {out}. --resume continues there.", file=sys.stderr)
        return 130
    print(f"Results are in {out}.", file=sys.stderr if options.json else sys.stdout)
    return status
