"""GPU suite: block-sparse and dilated attention and their peers, in one process on the same tensors and blocks.

    python -m dilated_attention_pytorch.tools.bench --suite gpu --out FILE [--budget SECONDS] [--resume]

A subject is timed when selected rows and columns of its output and gradients agree with float64. Calls are timed with
CUDA events, after 256 MiB were written to empty the L2 cache. A line of JSON is added as soon as it is known, and the
most decisive cases come first, so that a short budget measures what matters most.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import Dilated, Pattern, Random, attention_with_lse, make_plan, parse
from ...kernels.call import reproducible_gradients
from ...kernels.registry import choose
from ...ops.attention import CallSettings, call_of
from . import peers
from .gate import Computed, error_ratio, sample
from .grid import LADDERS, OURS, PLAN, GpuCase, K, cases, ladder_pairs, tiny_cases
from .measure import PeakMemory, clock, draw, facts, installed, quantiles, synchronize, timed
from .peers import BLOCK, BlockTable, PeerProblem, PeerRunner
from .results import DIRECTIONS, OURS_ANY_ORDER, WORK, append, known_lines, progress

MOST_EXACT_ROWS = 64 * K
"""Up to this length the LSE of every row is recomputed if a subject returns none."""
SECONDS_A_SUBJECT = 0.08
SLOW_S = 0.1
"""Calls that take longer are repeated only as often as their percentiles need."""
FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True, eq=False)
class OfBlocks(Pattern):
    """Block table as a pattern, for the gate."""

    blocks: BlockTable

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        inside = self.blocks.table[q // self.blocks.block, k // self.blocks.block]
        return inside & (k <= q) if self.blocks.causal else inside


@dataclass(kw_only=True)
class Session:
    """Output file of a run, its time limit, and the lines the file already has."""

    out: Path
    device: str
    backend: str = "auto"
    deadline: float = math.inf
    done: set[tuple[Any, ...]] = field(default_factory=set)
    """Keys of the lines in the file."""
    failed: set[tuple[Any, ...]] = field(default_factory=set)
    """Keys of lines that record an error; a case that broke the GPU is not retried."""

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def facts(self) -> dict[str, Any]:
        versions = {"flash_attn_4": installed("flash-attn-4"), "cudnn_frontend": installed("nvidia-cudnn-frontend")}
        return facts(self.device) | versions


def ours(case: GpuCase, problem: PeerProblem, session: Session) -> tuple[PeerRunner, Tensor, dict[str, Any]]:
    """The library on a case, with the LSE and duration of its first call and the cost of its plan."""
    inputs = problem.query, problem.key, problem.value

    def both() -> tuple[Tensor, Tensor]:
        return attention_with_lse(*inputs, case.pattern, enable_gqa=problem.grouped, backend=session.backend)

    lse, first = timed(lambda: both()[1].detach(), session.device)
    runner = PeerRunner(forward=lambda: both()[0], inputs=inputs, grad_output=problem.grad_output)
    return runner, lse, {"first_call_s": first, **describe_plan(case, problem, session)}


def exact_lse(query: Tensor, key: Tensor, oracle: Pattern, heads: list[int]) -> Tensor:
    """LSE of all rows of some heads in float32, a few rows at a time; 0 for the other heads."""
    _, heads_all, n, d = query.shape
    lse = torch.zeros(1, heads_all, n, device=query.device)
    position = torch.arange(n, device=query.device)
    for head in heads:
        keys = key[0, head // (heads_all // key.shape[1])].detach().float()
        for rows in position.split(2048):
            scores = query[0, head, rows].detach().float() @ keys.T * d**-0.5
            scores += oracle.multiplicity(rows[:, None], position[None, :], head).float().log()
            lse[0, head, rows] = scores.logsumexp(-1)
    return lse


def event_seconds(call: Callable[[], Any], device: str, once: float) -> list[float]:
    """Seconds of single calls, each after the L2 cache was flushed. On a CPU, wall-clock time.

    `once` is the approximate time of a call. Calls of `SLOW_S` and more need no further warm-up.
    """
    if device != "cuda":
        return [clock(call) for _ in range(3)]
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    if once < SLOW_S:
        call()
        call()
        once = clock(call, device)
    count = max(3 if once > 0.2 else 7, min(100, round(SECONDS_A_SUBJECT / once)))
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for begin, end in marks:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def host_seconds(call: Callable[[], Any], device: str, calls: int = 50) -> float:
    """Seconds of host time per call."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - begun
    synchronize(device)
    return spent / calls


def line_of(case: GpuCase, subject: str, direction: str, session: Session, **found: Any) -> dict[str, Any]:
    """One line of the results; unknown values are None."""
    blank = dict.fromkeys(("p20_ms", "p50_ms", "p80_ms", "tflops", "gate", "skipped"))
    shape = {name: getattr(case, name) for name in ("n", "d", "heads", "key_heads", "dtype", "causal", "block")}
    return {
        "suite": "gpu",
        "case": case.name,
        "kind": case.kind,
        "asked_density": case.density,
        "subject": subject,
        "backend": subject,
        "direction": direction,
        **shape,
        "gate_passed": True,
        **blank,
        **found,
        **session.facts(),
    }


def examine(case: GpuCase, runner: PeerRunner, lse: Tensor, oracle: Pattern) -> tuple[float, dict[str, float]]:
    """Largest error of a subject's first calls relative to its rounding bound, and their duration in seconds."""
    device = runner.grad_output.device.type
    output, forward = timed(runner.forward, device)
    gradients, backward = timed(lambda: torch.autograd.grad(output, runner.inputs, runner.grad_output), device)
    given = (*runner.inputs, output)
    query, key, value, output = (runner.standard(t.detach()) for t in given)
    grads = (runner.standard(t) for t in (runner.grad_output, *gradients))
    rows = sample(case.n, 64 if case.n <= 64 * K else 32 if case.n <= 256 * K else 8)
    computed = Computed(query, key, value, output, lse, *grads)
    error = error_ratio(computed, oracle, rows, sorted({0, case.heads - 1}))
    return error, {"forward": forward, "backward": backward}


def time_subject(case: GpuCase, runner: PeerRunner, device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Times and memory of both directions."""
    output = runner.forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, runner.inputs, runner.grad_output, retain_graph=True)

    for direction, call in zip(DIRECTIONS, (runner.forward, backward), strict=True):
        if device == "cuda":
            # The allocator hands out a cached block whole, and its unused rest would count as allocated.
            torch.cuda.empty_cache()
        with PeakMemory(device) as peak:
            results, once = timed(call, device)
        kept = results if isinstance(results, tuple) else (results,)
        extra = None
        if peak.extra is not None and device == "cuda":
            extra = peak.extra - sum(t.numel() * t.element_size() for t in kept)
        del results, kept
        seconds = event_seconds(call, device, once)
        found = {**quantiles(seconds), "repetitions": len(seconds), "peak_bytes": peak.extra, "workspace_bytes": extra}
        if direction == "forward" and case.has_whole_call:
            found |= time_whole_call(call, device)
        yield direction, found


def time_whole_call(call: Callable[[], Any], device: str) -> dict[str, float]:
    """Microseconds per call in a stream of calls without gradients, and of the host per call."""
    with torch.no_grad():
        call()
        whole = clock(call, device, 200 if device == "cuda" else 5)
        host = host_seconds(call, device, 50 if device == "cuda" else 5)
    return {"call_us": 1e6 * whole, "host_us": 1e6 * host}


def measure(case: GpuCase, session: Session) -> Iterator[dict[str, Any]]:
    """Measure the lines of a case that the file lacks."""
    wanted = [s for s in case.subjects if any(case.key(s, way) not in session.done for way in DIRECTIONS)]
    if not wanted:
        return
    device = session.device
    query, key, value, grad = draw(case.n, case.d, case.heads, case.key_heads, case.dtype, device)
    blocks = case.blocks(device) if case.is_blocks else None
    problem = PeerProblem(query=query, key=key, value=value, grad_output=grad, blocks=blocks, causal=case.causal)
    oracle = parse(case.pattern) if blocks is None else OfBlocks(blocks)
    work, runner, lse, mine = describe_work(case, problem), None, None, {}
    if OURS in case.subjects and case.key(OURS, "forward") not in session.failed:
        try:
            runner, lse, mine = ours(case, problem, session)
        except Exception as error:
            yield from skipped(case, OURS, session, error)
            wanted = [subject for subject in wanted if subject not in (OURS, OURS_ANY_ORDER)]
    if lse is None and case.n <= MOST_EXACT_ROWS:
        lse = exact_lse(query, key, oracle, sorted({0, case.heads - 1}))
    for subject in wanted:
        if session.is_late or not is_alive(device):
            return
        progress(f"{case.name} n={case.n} d={case.d}: {subject}")
        reason = "the gate needs an LSE and the library gave none" if lse is None else peers.why_not(subject, problem)
        if lse is None or reason is not None:
            yield from skipped(case, subject, session, str(reason))
            continue
        try:
            is_ours = subject in (OURS, OURS_ANY_ORDER)
            own = runner if is_ours and runner is not None else peers.build(subject, problem)
            about = {**work, **(mine if is_ours else {})}
            reproducible_gradients(subject != OURS_ANY_ORDER)
            yield from lines(case, subject, own, lse, oracle, about, session)
        except Exception as error:
            yield from skipped(case, subject, session, error)
        finally:
            reproducible_gradients(True)


def lines(
    case: GpuCase,
    subject: str,
    runner: PeerRunner,
    lse: Tensor,
    oracle: Pattern,
    about: dict[str, Any],
    session: Session,
) -> Iterator[dict[str, Any]]:
    """Both directions of one subject, timed if the gate passes."""
    error, first = examine(case, runner, lse, oracle)
    first["forward"] = about.pop("first_call_s", first["forward"])
    passed = error <= 1.0
    # A finite number keeps the file readable by every JSON reader.
    gate = {"gate": min(error, 1e30) if error == error else 1e30, "gate_passed": passed}
    timed = time_subject(case, runner, session.device) if passed else ((way, {}) for way in DIRECTIONS)
    for direction, found in timed:
        flops = about["flops"] * WORK[direction]
        known = {**about, "flops": flops, "first_call_s": first[direction], **gate, **found}
        if "p50_ms" in found:
            known["tflops"] = flops / found["p50_ms"] / 1e9
        yield line_of(case, subject, direction, session, **known)


def describe_work(case: GpuCase, problem: PeerProblem) -> dict[str, Any]:
    """Operations of a forward pass and the density in blocks."""
    if problem.blocks is not None:
        pairs, density = problem.blocks.pairs * case.heads, problem.blocks.density
    elif case.kind == "dense":
        pairs, density = (case.n * (case.n + 1) // 2 if case.causal else case.n**2) * case.heads, 1.0
    else:
        ladder = parse(LADDERS[case.kind])
        assert isinstance(ladder, Dilated)
        pairs = ladder_pairs(ladder, case.n, case.heads, case.causal)
        density = pairs / (case.heads * case.n**2)
    return {"pattern": case.pattern, "flops": 4.0 * pairs * case.d, "density": density}


def describe_plan(case: GpuCase, problem: PeerProblem, session: Session) -> dict[str, Any]:
    """Backend of a case, with time and size of its plan."""
    inputs = problem.query, problem.key, problem.value
    call = call_of(*inputs, CallSettings(pattern=case.pattern, scale=case.d**-0.5, backend=session.backend))
    seconds = clock(lambda: make_plan(parse(case.pattern), case.n, case.heads, device=session.device), session.device)
    name = choose(call, session.backend)[0]
    lse_bytes = 4 * case.heads * case.n
    return {"backend": name, "plan_ms": 1e3 * seconds, "plan_bytes": call.plan.nbytes, "lse_bytes": lse_bytes}


def measure_plan(case: GpuCase, session: Session) -> Iterator[dict[str, Any]]:
    """Time and bytes of a plan in which every head has its own 64 random blocks per row."""
    if case.key(OURS, "plan") in session.done:
        return
    pattern = Random(min(1.0, 64 * BLOCK / case.n), per_head=True)
    device = session.device
    plan = make_plan(pattern, case.n, case.heads, device=device)
    with PeakMemory(device) as peak:
        seconds = [clock(lambda: make_plan(pattern, case.n, case.heads, device=device), device) for _ in range(5)]
    sizes = {"plan_bytes": plan.nbytes, "peak_bytes": peak.extra, "density": plan.density, "pattern": str(pattern)}
    yield line_of(case, OURS, "plan", session, **quantiles(seconds), **sizes, repetitions=5)


def skipped(case: GpuCase, subject: str, session: Session, why: str | Exception) -> Iterator[dict[str, Any]]:
    """Lines with the reason why a figure is missing."""
    reason = why if isinstance(why, str) else f"{type(why).__name__}: {why}".splitlines()[0][:200]
    for direction in DIRECTIONS:
        yield line_of(case, subject, direction, session, skipped=reason, density=case.density)


def describe(line: dict[str, Any]) -> str:
    """One result as text."""
    shape = f"n={line['n']:<8} d={line['d']:<4} heads={line['heads']}:{line['key_heads']:<3}"
    where = f"{line['case']:<24} {shape} {line['direction']:<8} {line['subject']:<10}"
    if line["skipped"] is not None:
        return f"{where} skipped: {line['skipped']}"
    if not line["gate_passed"]:
        return f"{where} WRONG by {line['gate']:.1e}: not timed"
    rate = "" if line["tflops"] is None else f" {line['tflops']:7.1f} TFLOP/s"
    call = f"  whole call {line['call_us']:.0f} us, host {line['host_us']:.0f} us" if "call_us" in line else ""
    return f"{where} {line['p50_ms']:10.4f} ms{rate}  {line['backend']}{call}"


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """Key of a line, equal to `GpuCase.key`."""
    return tuple(line[name] for name in ("case", "n", "d", "heads", "key_heads", "subject", "direction"))


def is_alive(device: str) -> bool:
    """Whether the CUDA context works; an illegal access in a peer's kernel breaks it for the whole process."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


def run(out: Path, backend: str, device: str, budget: float, resume: bool, tiny: bool) -> int:
    """Measure into `out`; the exit status is 1 if a result of the library was wrong."""
    known = [line for line in known_lines(out) if line["skipped"] != peers.NOT_INSTALLED] if resume else []
    failed = {key_of(line) for line in known if line["skipped"] is not None}
    begun = time.monotonic()
    session = Session(out=out, device=device, backend=backend, deadline=begun + budget, failed=failed)
    session.done |= {key_of(line) for line in known}
    before = len(session.done)
    listed = tiny_cases() if tiny else cases()
    for number, case in enumerate(listed):
        if session.is_late:
            print(f"The budget of {budget:.0f} s is spent: cases {number + 1} to {len(listed)} are not measured.")
            break
        for line in measure_plan(case, session) if case.kind == PLAN else measure(case, session):
            if key_of(line) not in session.done:
                session.done.add(key_of(line))
                append(out, line)
                print(describe(line), flush=True)
        if not is_alive(device):
            print("The GPU stopped answering.", file=sys.stderr)
            if len(session.done) > before:
                restart(out, backend, device, budget - (time.monotonic() - begun), tiny)
            return 1
    lines = known_lines(out)
    return int(any(line["subject"] == OURS and not line["gate_passed"] for line in lines))


def restart(out: Path, backend: str, device: str, budget: float, tiny: bool) -> None:
    """Continue in a new process: an illegal access leaves this one without a CUDA context."""
    command = [sys.executable, "-m", str(__package__), "--suite", "gpu", "--resume", "--out", str(out)]
    command += ["--backend", backend, "--device", device, "--budget", str(budget), *(["--tiny"] if tiny else [])]
    sys.stdout.flush()
    os.execv(sys.executable, command)
