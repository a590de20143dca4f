"""A GPU session in four calls of ten minutes: tests, suites, the language model, variants of the Hopper backward.

    GIT_SHA=COMMIT python benchmarks/gpu_session.py --step 1 --out OUT
    python benchmarks/gpu_session.py --step 1 2 3 4 --out OUT --dry-run

A step is a list of commands with a limit each; they run one after another and stop when `--seconds` are over, so that
the files of all that ran are complete. OUT gets a line of JSON a command in session.jsonl and the files they write.
`--dry-run` prints the commands with their limits. `--device cpu` runs the small forms of those that have one. Sources
that travel without their history need GIT_SHA in the environment; otherwise lines name the hash of the GPU sources.

Step 3 reads the tokens that `language_model.py prepare` wrote to build/lm on a machine with a network; carry that
folder. Its checkpoints stay there: the same step in a second call goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gpu_stamp

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Command:
    """A script of this folder, or the benchmark command, with its arguments; `{out}` is the folder of results."""

    script: str
    arguments: str
    seconds: float
    """limit, and what a dry run counts"""
    small: str | None = None
    """arguments of its form for a CPU; None: it needs a GPU"""

    def line(self, out: Path, is_small: bool) -> list[str]:
        """The command as the system gets it."""
        text = self.small if is_small else self.arguments
        assert text is not None
        first = ["-m", self.script] if self.script.startswith("dilated") else [str(ROOT / "benchmarks" / self.script)]
        return [sys.executable, *first, *shlex.split(text.format(out=shlex.quote(str(out))))]


BENCH = "dilated_attention_pytorch.tools.bench"
LEARNED = "--out {out}/adaptive.jsonl --lengths 131072 --rows token --lists head"
LM, LM_SMALL = "--folder build/lm --out {out}/language_model.jsonl", "--size small --device cpu --folder {out}/lm"
EXACT = [f"tests/gpu/test_{name}_gpu.py" for name in ("hopper", "selection", "triton", "fuzz", "saved_tensors")]
"""Test files of results alone, the kernels first: they may share the GPU."""
STEPS: dict[int, tuple[Command, ...]] = {
    1: (
        Command("gpu_stamp.py", "--run --write --workers 8 --seconds 300 --out {out}/gpu_stamp.json", 310),
        Command("gpu_tests.py", f"--out {{out}}/tests.jsonl --seconds 100 --workers 8 {' '.join(EXACT)}", 260),
    ),
    2: (
        Command("gpu_calls.py", "--out {out}/calls.jsonl --seconds 150", 180, "--out {out}/calls.jsonl --device cpu"),
        Command("adaptive_gpu.py", f"{LEARNED} --units 1 16", 80),
        Command("adaptive_gpu.py", f"{LEARNED} --units 1 16 --chunk 1024", 80),
        Command(
            BENCH,
            "--suite gpu --out {out}/gpu.jsonl --budget 210",
            230,
            "--suite gpu --out {out}/gpu.jsonl --device cpu --tiny --budget 30",
        ),
    ),
    3: (
        Command("language_model.py", f"train {LM} --seconds 200", 225, f"train {LM_SMALL}"),
        Command(
            "language_model.py",
            f"continue {LM} --seconds 240 --steps 100",
            345,
            f"continue {LM_SMALL} --out {{out}}/language_model.jsonl --rounds 1",
        ),
    ),
    4: (
        Command("check_hopper_backward.py", "--out {out}/backward_turns.jsonl --only check --match turns", 150),
        Command("check_hopper_backward.py", "--out {out}/backward.jsonl --only time --seconds 240", 260),
        Command(
            "check_dilated.py",
            "--out {out}/dilated.jsonl --backends hopper,hopper-in-turns,hopper-by-rows,hopper-any-order --seconds 140",
            160,
        ),
    ),
}
"""Commands by step, the most important first."""


def environment() -> dict[str, str]:
    """Environment of the commands: this tree's sources, and a name for them."""
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    named = {} if (ROOT / ".git").exists() else {"GIT_SHA": f"sources {gpu_stamp.digest(gpu_stamp.sources())[:12]}"}
    return named | os.environ | {"PYTHONPATH": paths}


def run(command: list[str], seconds: float) -> int | str:
    """Exit status of a command; it and its children end at the limit. SIGTERM comes first: checkpoints are written."""
    with subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True) as process:
        for word, limit in ((signal.SIGTERM, seconds), (signal.SIGKILL, 15.0)):
            try:
                status = process.wait(limit)
                return status if word == signal.SIGTERM else f"stopped after {seconds:.0f} s"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, word)
        return f"killed after {seconds:.0f} s"


def main(arguments: list[str] | None = None, start: Callable[[list[str], float], int | str] = run) -> int:
    """Exit status 1 where a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, nargs="+", choices=STEPS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=580.0, help="limit of the call")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and their limits")
    given = parser.parse_args(arguments)
    is_small, begun, failed = given.device == "cpu", time.monotonic(), False
    for step in given.step:
        total = 0.0
        for command in STEPS[step]:
            if is_small and command.small is None:
                print(f"step {step}: {command.script} needs a GPU", flush=True)
                continue
            line = command.line(given.out.resolve(), is_small)
            total += command.seconds
            print(f"step {step}, at most {command.seconds:.0f} s: {shlex.join(line[1:])}", flush=True)
            if given.dry_run:
                continue
            left = given.seconds - (time.monotonic() - begun)
            if left < 10:
                print("no time left", flush=True)
                return 1
            given.out.mkdir(parents=True, exist_ok=True)
            at = time.monotonic()
            # The last command may take what the others left.
            is_last = command is STEPS[given.step[-1]][-1]
            status = start(line, left - 5 if is_last else min(command.seconds, left - 5))
            took = round(time.monotonic() - at, 1)
            with open(given.out / "session.jsonl", "a") as file:
                told = {"step": step, "command": line[1:], "status": status, "seconds": took}
                file.write(json.dumps(told) + "\n")
            failed |= status != 0
        print(f"step {step}: {total:.0f} s at most", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
