"""Plant known bugs one at a time in a scratch copy of this repository and see which test catches each.

    python benchmarks/mutants.py                     every mutant, into benchmarks/results/mutants.jsonl
    python benchmarks/mutants.py --only causal-edge  some of them; the others' lines stay
    python benchmarks/mutants.py --check             only that every mutant still fits the code

A mutant is a replacement whose old text must stand exactly once in its file: when the code moves on, the script says so
and the list is brought into step. A mutant that no test catches is a test that is missing. The tests chosen for a
mutant must pass without it, which is checked first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The commit that is told must be that of the tree that is copied.
    sys.path.insert(0, str(ROOT / "src"))

from dilated_attention_pytorch.tools.measure import facts  # noqa: E402
from dilated_attention_pytorch.tools.page import write  # noqa: E402

PACKAGE = "src/dilated_attention_pytorch"
COPIED = ("src", "tests", "benchmarks", "pyproject.toml")
TIMEOUT = 130
"""Seconds of one try: two fit into what pytest-timeout gives a test."""
INTERPRETED = "tests/kernels/test_triton_interpreter.py::test_output_lse_and_gradients_match_the_oracle"
TOLERANCE = 2e-6
"""Of the trials in Triton's interpreter, which all run in float32 here."""


class Mutant(NamedTuple):
    """One bug."""

    name: str
    file: str
    """below the package"""
    old: str
    new: str
    what: str
    tests: tuple[str, ...]
    """what pytest is given below tests/; a name of a trial for a Triton kernel"""

    @property
    def path(self) -> str:
        return f"{PACKAGE}/{self.file}"

    @property
    def interpreted(self) -> bool:
        return "/triton_" in self.file


class Verdict(NamedTuple):
    """How a run of some tests ended."""

    failed: str | None
    """the first test that failed, None where all passed"""
    seconds: float


PROBLEMS = "ops/test_attention.py::test_every_problem_matches_the_oracle"
VIRTUAL = "distributed/test_virtual.py::test_every_problem_matches_the_oracle_on_every_layout"
PLANS = "hardening/test_patterns.py"
MUTANTS = (
    Mutant("causal-edge", "patterns/local.py", "return k <= q", "return k < q", "a token does not see itself",
           (PLANS,)),
    Mutant("window-edge", "patterns/local.py", "(k <= q + self.after)", "(k < q + self.after)",
           "the last key of a window is lost", (PLANS,)),
    Mutant("head-residue", "patterns/dilated.py", "return head % rate", "return (head + 1) % rate",
           "every head samples its neighbour's residue", (PLANS,)),
    Mutant("global-edge", "plan/cover.py", "seen, unseen = k1 < pattern.tokens, k0 >= pattern.tokens",
           "seen, unseen = k0 < pattern.tokens, k0 >= pattern.tokens", "a tile that holds the last sink is met whole",
           (PLANS,)),
    Mutant("causal-tile", "plan/cover.py", "return _verdict(k1 <= q0, k0 > q1)", "return _verdict(k0 <= q0, k0 > q1)",
           "tiles on the diagonal are met whole: the causal edge is missing", (PLANS,)),
    Mutant("last-block", "plan/planner.py", "(high - low + 1).clamp(min=0)), key", "(high - low).clamp(min=0)), key",
           "off by one: the last block of every stretch is dropped", (PLANS,)),
    Mutant("ragged-end", "plan/planner.py", "+ self.rate * (self.block_size - 1) >= self.axis.end",
           "+ self.rate * (self.block_size - 1) > self.axis.end", "a tile one element short counts as whole",
           (PLANS,)),
    Mutant("partial-shift", "plan/walks.py", "[stored, stored, 0, stored_partial, stored_partial, 0]",
           "[stored, stored, 0, stored, stored, 0]", "partial lists of a second head class are looked for elsewhere",
           (PLANS,)),
    Mutant("head-class", "plan/cover.py", "return head if pattern.by_head else None", "return None",
           "heads with lists of their own share the first one's", (PLANS,)),
    Mutant("packed-base", "plan/packing.py", "table[..., [FULL_BASE, PARTIAL_BASE]] += first_tile",
           "table[..., [FULL_BASE]] += first_tile", "partial tiles of a packed document lie in the first one",
           (PLANS,)),
    Mutant("counted-twice", "plan/terms.py", "exclude=term.exclude + earlier)", "exclude=term.exclude)",
           "a union counts a key once for each member that has it", (PLANS,)),
    Mutant("int32-pairs", "plan/planner.py", "    key = row * columns + column\n",
           "    key = (row * columns + column).int().long()\n",
           "int32 overflow: tile pairs of long sequences wrap around", (PLANS,)),
    Mutant("stale-plan", "plan/cache.py", "key = PlanKey(pattern, n, heads, block_size,",
           "key = PlanKey(pattern, n, 0, block_size,", "a cached plan is used for another number of heads",
           (PLANS,)),
    Mutant("cpu-group", "kernels/cpu.py", "group = head // (heads // call.key.shape[1])",
           "group = head % call.key.shape[1]", "query heads read the wrong key head", (PROBLEMS,)),
    Mutant("cpu-base", "kernels/cpu.py", "(found_lse - after).exp())", "(found_lse - after).exp2())",
           "steps merge in base 2 where the LSE is natural", (PROBLEMS,)),
    Mutant("cpu-scale", "kernels/cpu.py", ", 0.0) * call.scale\n", ", 0.0)\n",
           "the gradient of the scores lacks the scale", (PROBLEMS,)),
    Mutant("cpu-filler", "kernels/cpu.py", " & listed[..., None]", "", "tiles that fill a short list up are counted",
           (PROBLEMS,)),
    Mutant("cpu-streams", "kernels/cpu.py", "[:, None, None, None] * heads + head", "[:, None, None, None] + head",
           "dropout of sample 1, head 0 is that of sample 0, head 1",
           ("kernels/test_cpu_backends.py::test_dropout_drops_what_the_definition_says",)),
    Mutant("reference-group", "kernels/reference.py", "group = head // (heads // call.key.shape[1])",
           "group = head % call.key.shape[1]", "query heads read the wrong key head", (PROBLEMS,)),
    Mutant("native-lse", "kernels/native.cpp", "(w.top[i] + std::log2(total)) * T(kLn2)",
           "(w.top[i] + std::log2(total))", "the LSE comes in base 2", (PROBLEMS,)),
    Mutant("native-carry", "kernels/native.cpp", "w.top[i] = lse * T(kLog2E);\n    w.total",
           "w.top[i] = lse;\n    w.total", "a part resumes a natural LSE as one in base 2", (PROBLEMS,)),
    Mutant("native-split", "kernels/native.cpp", "item = s.first[head] + split;", "item = s.first[head];",
           "threads that share a key head add its gradient twice",
           ("kernels/test_native.py::test_any_number_of_threads_gives_the_same_result_twice",)),
    Mutant("native-stale", "kernels/native_tiles.h", "const bool there = slot.key == tile.key &&",
           "const bool there = slot.key != nullptr &&", "a copy of another tile's keys is used again", (PROBLEMS,)),
    Mutant("native-count", "kernels/native_tiles.h", " && slot.count >= tile.count;", ";",
           "a copy of fewer keys is used where more are met", (PLANS,)),
    Mutant("native-group", "kernels/native_tiles.h", "head / (call.heads / call.key_heads), row",
           "head % call.key_heads, row", "query heads read the wrong key head", (PROBLEMS,)),
    Mutant("native-band", "kernels/native_tiles.h", "std::clamp<Index>(j - band[0] + 1, from, q.lanes)",
           "std::clamp<Index>(j - band[0], from, q.lanes)", "the last query of a band loses its key", (PROBLEMS,)),
    Mutant("triton-step", "kernels/triton_primitives.py", "first += o_sub * axis[3]", "first += o_sub",
           "the second half of a dilated tile starts too early", ("whole tiles in pieces, dilated",)),
    Mutant("triton-carry", "kernels/triton_forward.py", "b_m = b_past * LOG2E", "b_m = b_past",
           "a part resumes a natural LSE as one in base 2", ("dilated ladder",)),
    Mutant("triton-pieces", "kernels/triton_forward.py", "tl.math.exp2((b_lse - b_ref) * LOG2E)",
           "tl.math.exp2(b_lse - b_ref)", "pieces of a row merge in base 2 where the LSE is natural", ("split rows",)),
    Mutant("triton-group", "kernels/triton_forward.py", "p_v += batch * sv_b + (head // group) * sv_h",
           "p_v += batch * sv_b + (head % group) * sv_h", "query heads read the values of the wrong key head",
           ("grouped key heads",)),
    Mutant("triton-int32", "kernels/triton_primitives.py", "return tile.to(tl.int64) * BLOCK, length",
           "return tile * BLOCK, length", "int32 overflow: rows beyond 2^31 elements are read elsewhere",
           ("rows far apart",)),
    Mutant("triton-delta", "kernels/triton_backward.py", "b_delta -= tl.load(p_dlse", "b_delta += tl.load(p_dlse",
           "the gradient through the LSE has the wrong sign", ("causal window",)),
    Mutant("merge-top", "ops/merge.py", "safe.log() + top", "safe.log()", "a merged LSE lacks the maximum taken out",
           ("ops/test_merge_and_rows.py",)),
    Mutant("decode-edge", "ops/decode.py", "return [past[max(0, t - pattern.before) :]]",
           "return [past[max(0, t - pattern.before + 1) :]]", "a decoded row loses the oldest key of its window",
           ("ops/test_decode.py",)),
    Mutant("decode-sinks", "ops/decode.py", "positions - self.begin + self.sinks)", "positions - self.begin)",
           "a shortened cache is read where the sinks lie", ("ops/test_decode.py",)),
    Mutant("dropout-seed", "kernels/dropout.py", "(seed >> 32) & WORD\n    stream", "0 * seed\n    stream",
           "half of the seed does nothing", ("ops/test_dropout.py", "kernels/test_positions.py")),
    Mutant("exchange-swapped", "distributed/moving.py", "for x in (self.shard.key, self.shard.value)]",
           "for x in (self.shard.value, self.shard.key)]", "K and V change places on their way", (VIRTUAL,)),
    Mutant("exchange-head", "distributed/comm.py", "send = codes // layout.n * layout.lengths[rank] + place",
           "send = place", "rows of the first key head are sent for every head", (VIRTUAL,)),
    Mutant("exchange-home", "distributed/engine.py", "total.key.add_(both[0])", "total.key.copy_(both[0])",
           "gradients that come home replace those found there", (VIRTUAL,)),
    Mutant("exchange-fold", "distributed/local.py", "(before - top).exp(), (found_lse - top).exp()",
           "(before - top).exp2(), (found_lse - top).exp2()", "stages fold in base 2 where the LSE is natural",
           ("distributed/test_ways.py::test_every_way_matches_the_oracle",)),
    Mutant("stale-arena", "distributed/memory.py", "torch._C._storage_Use_Count(storage._cdata) == 2",
           "torch._C._storage_Use_Count(storage._cdata) >= 2", "a buffer still in use is given out again",
           ("distributed/test_recovery.py::test_arenas_are_used_again_when_nothing_lies_in_them",)),
    Mutant("rotary-sign", "nn/position.py", "first * cos - second * sin", "first * cos + second * sin",
           "positions turn halves apart", ("nn/test_multihead.py",)),
    Mutant("eval-dropout", "nn/core.py", "self.attention_dropout if self.training else 0.0", "self.attention_dropout",
           "weights are dropped outside training", ("nn/test_core.py",)),
    Mutant("module-scale", "nn/core.py", "scale=self.softmax_scale,", "scale=None,", "a module ignores its scale",
           ("nn/test_core.py",)),
    Mutant("held-group", "distributed/recovery.py", "        _forget_frames(sys.exception())\n", "",
           "an error that is being handled keeps the connections of a broken group open",
           ("hardening/test_soak.py::test_no_rank_that_lives_is_left_behind",)),
    Mutant("unknown-backend", "distributed/ring.py", "            backend_named(backend)\n", "            pass\n",
           "a rank without tokens names a backend that does not exist",
           ("hardening/test_soak.py::test_a_backend_that_one_rank_alone_names_is_refused_by_all",)),
    Mutant("old-marker", "ops/sinks.py", "            self.marker.unlink(missing_ok=True)\n", "            pass\n",
           "a stream that was killed as it began leaves the marker of the one before", ("hardening/test_killed.py",)),
    Mutant("mask-meaning", "nn/masks.py", "return mask == -torch.inf", "return mask == 0",
           "a float mask hides what it should show", ("nn/test_multihead.py",)),
)  # fmt: skip
QUICK = ("merge-top", "module-scale", "last-block")
"""A few that continuous integration plants."""


def misfit(mutant: Mutant, root: Path = ROOT) -> str | None:
    """Why a mutant cannot be planted; None when it can."""
    times = (root / mutant.path).read_text(encoding="utf-8").count(mutant.old)
    return None if times == 1 else f"{mutant.name}: its text must stand once in {mutant.path}, found {times} times"


@contextmanager
def scratch() -> Iterator[Path]:
    """A copy of the code and its tests."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            else:
                shutil.copy(source, copy / name)
        yield copy


def run(mutant: Mutant, copy: Path) -> Verdict:
    """Run the tests of a mutant in the copy as it is."""
    began = time.perf_counter()
    paths = os.pathsep.join(str(copy / name) for name in ("src", "tests"))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment["HYPOTHESIS_PROFILE"] = "planted"
    environment.pop("PYTEST_ADDOPTS", None)
    if mutant.file.startswith("kernels/native"):
        # A library with a bug in it must not be found by anybody else.
        environment["XDG_CACHE_HOME"] = str(copy / "cache")
        build = [sys.executable, "-m", "dilated_attention_pytorch.kernels.native"]
        subprocess.run(build, cwd=copy, env=environment, check=True, capture_output=True)
    judge = _interpreted if mutant.interpreted else _tested
    failed = f"none ended within {TIMEOUT} s, twice"
    for _ in range(2):
        try:
            failed = judge(mutant, copy, environment)
        except subprocess.TimeoutExpired as expired:
            # A bug may loop for ever; a process that stalls once and not again tells nothing of the bug.
            said = expired.stderr or b""
            print(f"{mutant.name}: no end within {TIMEOUT} s\n{said.decode(errors='replace')}", file=sys.stderr)
        else:
            break
    return Verdict(failed, round(time.perf_counter() - began, 1))


def _ended(command: list[str], copy: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command; one that takes too long ends with all it started.

    A process that outlives its parent, as a rank of a distributed test may, holds the pipe open: to wait for the end of
    what is written there would be to wait for it.
    """
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    with child:
        try:
            out, err = child.communicate(timeout=TIMEOUT)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def _tested(mutant: Mutant, copy: Path, environment: dict[str, str]) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Where CI is set, pytest explains a failed comparison of two long lists in full, which takes minutes.
    command += ["--assert=plain", "-o", f"faulthandler_timeout={TIMEOUT - 10}"]
    chosen = [f"tests/{name}" for name in mutant.tests]
    done = _ended([*command, *chosen], copy, environment)
    if done.returncode == 0:
        return None
    found = re.search(r"^FAILED (\S+?\.py::.*?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or found is None:
        raise RuntimeError(
            f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return found.group(1)


def _interpreted(mutant: Mutant, copy: Path, environment: dict[str, str]) -> str | None:
    for trial in mutant.tests:
        done = _ended([sys.executable, "tests/kernels/interpret_triton.py", trial], copy, environment)
        if done.returncode:
            # A kernel that reads where nothing is may end the process.
            if "KeyError" in done.stderr:
                raise RuntimeError(f"{mutant.name}: there is no trial {trial!r}")
            return f"{INTERPRETED}[{trial}]"
        found = json.loads(done.stdout.splitlines()[-1])
        if any(not error <= TOLERANCE for what, error in found.items() if what != "trial"):
            return f"{INTERPRETED}[{trial}]"
    return None


def plant(mutant: Mutant, copy: Path) -> Verdict:
    """Run the tests of a mutant with its bug in the copy, which is mended again."""
    if (reason := misfit(mutant, copy)) is not None:
        raise RuntimeError(reason)
    file = copy / mutant.path
    sound = file.read_text(encoding="utf-8")
    file.write_text(sound.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return run(mutant, copy)
    finally:
        file.write_text(sound, encoding="utf-8")


def _keep(lines: list[dict[str, Any]], out: Path) -> None:
    """Write what was found, beside what is known of mutants that were not planted this time."""
    known = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    by_name = {line["mutant"]: line for line in [*known, *lines]}
    write(out, "".join(json.dumps(by_name[m.name]) + "\n" for m in MUTANTS if m.name in by_name))


def main() -> int:
    """Plant the mutants asked for; 0 when every one was caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[m.name for m in MUTANTS], metavar="NAME", help="names of mutants")
    parser.add_argument("--check", action="store_true", help="only see whether every mutant fits the code")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "mutants.jsonl")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only is None or m.name in options.only]
    reasons = [reason for m in chosen if (reason := misfit(m)) is not None]
    if reasons or options.check:
        print("\n".join(reasons) or f"all {len(chosen)} mutants fit the code")
        return bool(reasons)
    lines, sound = [], set[tuple[str, ...]]()
    # Tests have the one thread that `run` gives them.
    known = facts("cpu") | {"threads": 1}
    with scratch() as copy:
        for mutant in chosen:
            if mutant.tests not in sound:
                before = run(mutant, copy)
                if before.failed is not None:
                    raise RuntimeError(f"{mutant.name}: {before.failed} fails without the mutant too")
                sound.add(mutant.tests)
            verdict = plant(mutant, copy)
            caught = verdict.failed is not None
            line = {"mutant": mutant.name, "file": mutant.path, "what": mutant.what, "caught": caught}
            lines.append(line | {"by": verdict.failed, "seconds": verdict.seconds} | known)
            print(
                f"{'caught  ' if caught else 'SURVIVES'} {mutant.name:<17} {verdict.seconds:6.1f} s  {verdict.failed}",
                flush=True,
            )
    _keep(lines, options.out)
    survivors = [line["mutant"] for line in lines if not line["caught"]]
    print(
        f"{len(lines) - len(survivors)} of {len(lines)} caught"
        + (f"; missing tests: {', '.join(survivors)}" if survivors else "")
    )
    return bool(survivors)


if __name__ == "__main__":
    raise SystemExit(main())
