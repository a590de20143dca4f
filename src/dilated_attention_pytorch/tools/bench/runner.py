"""`dap bench`: measure attention on this machine; also `python -m dilated_attention_pytorch.tools.bench`.

Every case passes a correctness gate before it is timed. Ours and torch's dense attention run in the same process, turn
about, and what is compared is the rate on the flops each really computes. One line of JSON a case and direction goes to
the file as soon as it is known, so that an interrupted run keeps what it has and `--resume` measures the rest.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ... import attention_with_lse, parse, plan_cache
from ...kernels.registry import choose
from ...ops.attention import CallSettings, call_of
from . import ranks as ranked
from . import trials
from .cases import Case, Group, suite
from .gate import Computed, error_ratio, sample
from .measure import PeakMemory, clock, draw, facts, quantiles, timed
from .results import (
    DIRECTIONS,
    WORK,
    Bar,
    append,
    is_left_out,
    key_of,
    known_lines,
    progress,
)

BARS = {"forward": 0.8, "backward": 0.7, "both": 0.8}
"""Least accepted rate relative to torch's dense attention; `both` is for the LongNet ladder."""
MEMORY_BAR_GIB = 16.0
PEER_PATIENCE_S = 60.0
"""Time limit of dense attention in seconds, forward and backward; slower cases are not run."""
OVER = "because the time is up; --resume continues there"
PROBE_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Length at which the time of dense attention is estimated."""
Three = tuple[Tensor, Tensor, Tensor]
"""query, key, value"""


@dataclass(kw_only=True)
class Subject:
    """Subject of a measurement: the library on one case, or a dense peer."""

    case: str
    backend: str
    pattern: str
    flops: float
    """of the forward"""
    density: float
    run: dict[str, Callable[[], Any]]
    first_call_s: float
    peak: dict[str, PeakMemory]
    gate: float | None = None
    """Largest error relative to the accepted error; at most 1 passes."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of its lines."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in DIRECTIONS})

    def rates(self, direction: str) -> list[float]:
        """Flop/s of each round."""
        if direction == "both":
            times = [sum(pair) for pair in zip(*self.seconds.values(), strict=True)]
        else:
            times = self.seconds[direction]
        return [self.flops * WORK[direction] / seconds for seconds in times]


def prepare(
    group: Group,
    forward: Callable[[], tuple[Tensor, Tensor | None]],
    inputs: tuple[Tensor, ...],
    grad_output: Tensor | None,
) -> tuple[dict[str, Any], Computed | None]:
    """First calls of both directions: the fields of a `Subject`, and the inputs of the gate.

    Without a gradient of the output, a random one is drawn.
    """
    with PeakMemory(group.device) as forward_peak:
        (output, lse), first = timed(forward, group.device)
    grad = torch.randn_like(output) if grad_output is None else grad_output

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, inputs, grad, retain_graph=True)

    with PeakMemory(group.device) as backward_peak:
        gradients = backward()
    found = {
        "run": {"forward": forward, "backward": backward},
        "first_call_s": first,
        "peak": {"forward": forward_peak, "backward": backward_peak},
    }
    if lse is None:
        return found, None
    return found, Computed(*(x.detach() for x in (*inputs, output, lse, grad)), *gradients)


def peer(name: str, group: Group, inputs: Three, grad_output: Tensor) -> Subject:
    """Torch's dense attention."""
    group_heads = slice(0, group.peer_heads)
    query, key, value = (x[:, group_heads].detach().clone().requires_grad_() for x in inputs)

    def forward() -> tuple[Tensor, None]:
        return scaled_dot_product_attention(query, key, value), None

    found, _ = prepare(group, forward, (query, key, value), grad_output[:, group_heads].clone())
    flops = 4.0 * group.n**2 * group.d * group.peer_heads
    return Subject(case="dense", backend=name, pattern="full", flops=flops, density=1.0, **found)


def why_too_slow(group: Group) -> str | None:
    """Reason to skip the dense peers: their time, extrapolated from a short sequence."""
    n = min(group.n, PROBE_TOKENS[group.device])
    query = torch.randn(1, 1, n, group.d, dtype=getattr(torch, group.dtype), device=group.device)
    seconds = min(clock(lambda: scaled_dot_product_attention(query, query, query), group.device) for _ in range(3))
    seconds *= WORK["both"] * group.peer_heads * (group.n / n) ** 2
    if seconds <= PEER_PATIENCE_S:
        return None
    heads = "a head" if group.peer_heads == 1 else f"{group.peer_heads} heads"
    return f"forward and backward of {heads} would take about {seconds:.0f} s, more than {PEER_PATIENCE_S:.0f} s"


def absent(group: Group, name: str, reason: str) -> Iterator[tuple[dict[str, Any], list[Bar]]]:
    """Lines of a dense peer that is skipped."""
    for direction in DIRECTIONS:
        key = {"suite": group.suite, "case": "dense", "subject": None, **group.shape, "direction": direction}
        shape = {"heads": group.peer_heads, "backend": name, "p50_ms": None, "skipped": reason}
        yield {**key, **shape, **facts(group.device)}, []


def of_class(case: Case, backend: str, group: Group, inputs: Three) -> Subject:
    """A module class, checked at a short length against the same module in float64."""
    assert case.module is not None
    module = trials.build(case.module, group.n, group.heads, group.d, backend)
    module = module.to(group.device, getattr(torch, group.dtype))
    given = trials.arguments(module, inputs)
    error = trials.module_error(module, given)
    found, _ = prepare(group, lambda: (trials.call(module, given), None), trials.leaves(module, given), None)
    work = trials.work_of(module, group, backend, inputs)
    return Subject(case=case.name, gate=error, **work._asdict(), **found)


def ours(case: Case, backend: str, group: Group, inputs: Three, grad_output: Tensor, closing: ExitStack) -> Subject:
    """The library on one case, with the error from the gate."""
    if case.module is not None:
        return of_class(case, backend, group, inputs)
    pattern = parse(case.pattern)
    gqa = group.key_heads != group.heads

    def forward() -> tuple[Tensor, Tensor]:
        return attention_with_lse(*inputs, pattern, enable_gqa=gqa, backend=backend)

    if case.processes:
        ranks = ranked.Processes(case, group, inputs, grad_output, backend)
        closing.callback(ranks.close)
        found, computed = ranks.prepare()
    else:
        call_ranks = ranked.in_turn(case, group, inputs, backend)
        found, computed = prepare(group, call_ranks if case.ranks > 1 else forward, inputs, grad_output)
    assert computed is not None
    rows = sample(group.n, 64 if group.n <= 2**18 else 8)
    error = error_ratio(computed, pattern, rows, sorted({0, group.heads - 1}))
    call = call_of(*inputs, CallSettings(pattern=case.pattern, scale=group.d**-0.5, backend=backend))
    return Subject(
        case=case.name,
        backend=choose(call, backend)[0],
        pattern=case.pattern,
        flops=float(call.plan.flops(group.d)),
        density=call.plan.density,
        gate=error,
        more=ranked.exchanged(case, group) if case.ranks > 1 else {},
        **found,
    )


def take_turns(group: Group, subjects: list[Subject], say: Callable[[str], None]) -> None:
    """Time every subject once per round, so that a slow period of the machine affects all subjects."""
    calls = {}
    for subject in subjects:
        for direction in DIRECTIONS:
            # A GPU call shorter than the clock's jitter is timed as a stream of at least 20 ms.
            once = clock(subject.run[direction], group.device) if group.device == "cuda" else 1.0
            calls[subject.case, subject.backend, direction] = max(1, min(200, round(0.02 / once)))
    least, most = group.rounds
    begun = time.perf_counter()
    for number in range(most):
        spent = time.perf_counter() - begun
        if number >= least and spent * (number + 1) / number > group.budget_s:
            break
        if number and time.monotonic() > group.deadline:
            break
        say(f"{group.label}: round {number + 1}, {spent:.0f} s")
        for direction in DIRECTIONS:
            for subject in subjects:
                count = calls[subject.case, subject.backend, direction]
                subject.seconds[direction].append(clock(subject.run[direction], group.device, count))


def ratio(subject: Subject, dense: Subject, direction: str) -> float:
    """Median over the rounds of the library's rate relative to the dense rate of the same round."""
    pairs = zip(subject.rates(direction), dense.rates(direction), strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def row(group: Group, subject: Subject, direction: str, peers: list[Subject]) -> dict[str, Any]:
    """One line of the results."""
    times = subject.seconds[direction]
    rivals = peers if times and subject not in peers else []
    return {
        "suite": group.suite,
        "case": subject.case,
        "backend": subject.backend,
        "direction": direction,
        "pattern": subject.pattern,
        **group.shape,
        "heads": group.peer_heads if subject in peers else group.heads,
        **quantiles(times),
        "rounds": len(times),
        "flops": subject.flops * WORK[direction],
        "gflop_s": statistics.median(subject.rates(direction)) / 1e9 if times else None,
        "density": subject.density,
        "relative_rate": {p.backend: ratio(subject, p, direction) for p in rivals},
        "peak_bytes": subject.peak[direction].extra,
        "peak_total_bytes": subject.peak[direction].total,
        "first_call_s": subject.first_call_s if direction == "forward" else None,
        "gate": subject.gate,
        "gate_passed": passed_gate(subject),
        **subject.more,
        **facts(group.device),
    }


def passed_gate(subject: Subject) -> bool:
    """Whether the gate passed, so that the result may be timed."""
    return subject.gate is None or subject.gate <= 1.0


def measure_group(
    group: Group,
    backend: str,
    say: Callable[[str], None],
    done: Collection[tuple[Any, ...]] = (),
    plans: Counter[str] | None = None,
) -> Iterator[tuple[dict[str, Any], list[Bar]]]:
    """Unfinished rows of a group, each with the targets it decides.

    `plans` counts the calls of the timed rounds that found their plan, and those that did not.
    """
    lacking = [case for case in group.cases if any(_key(group, case.name, way) not in done for way in DIRECTIONS)]
    if not lacking:
        return
    shape = group.n, group.d, group.heads, group.key_heads
    query, key, value, grad_output = draw(*shape, group.dtype, group.device)
    inputs = query, key, value
    peers, subjects = [], []
    with ExitStack() as closing:
        for name in group.peers:
            say(f"{group.label}: dense {name}")
            reason = why_too_slow(group)
            if reason is None:
                peers.append(peer(name, group, inputs, grad_output))
            else:
                yield from (pair for pair in absent(group, name, reason) if key_of(pair[0]) not in done)
        for number, case in enumerate(lacking):
            if number and time.monotonic() > group.deadline:
                not_begun(f"{', '.join(c.name for c in lacking[number:])} at {group.label}, {OVER}")
                break
            say(f"{group.label}: gate of {case.name}")
            subjects.append(ours(case, backend, group, inputs, grad_output, closing))
        before, stopped = plan_cache.info(), None
        right = peers + [s for s in subjects if passed_gate(s)]
        try:
            take_turns(group, right, say)
        except KeyboardInterrupt as interruption:
            stopped = interruption
            if not cut_to_whole_rounds(group, right):
                raise
        if plans is not None:
            after = plan_cache.info()
            plans.update(warm_hits=after[0] - before[0], warm_misses=after[1] - before[1])
    for subject in peers + subjects:
        for direction in DIRECTIONS:
            line = row(group, subject, direction, peers)
            if key_of(line) not in done:
                yield line, list(bars(group, subject, direction, peers))
    if stopped is not None:
        raise stopped


def not_begun(what: str) -> None:
    """Print cases that are left out, with the reason."""
    progress("")
    print(f"Not started: {what}.", file=sys.stderr)


def cut_to_whole_rounds(group: Group, subjects: list[Subject]) -> bool:
    """Drop the times of an interrupted round; whether enough rounds are left to report a time."""
    whole = min((len(times) for subject in subjects for times in subject.seconds.values()), default=0)
    for subject in subjects:
        subject.seconds = {name: times[:whole] for name, times in subject.seconds.items()}
    return whole >= group.rounds[0]


def _key(group: Group, case: str, direction: str) -> tuple[Any, ...]:
    return key_of({"suite": group.suite, "case": case, "direction": direction, **group.shape})


def bars(group: Group, subject: Subject, direction: str, peers: list[Subject]) -> Iterator[Bar]:
    """Targets for the CPU with the measurement of one subject and direction."""
    if not group.judged or subject in peers or not subject.seconds[direction]:
        return
    what = f"{subject.case} n={group.n} d={group.d}"
    for dense in peers:
        if subject.case != "longnet-ladder":
            yield Bar(f"{what} {direction}", ratio(subject, dense, direction), BARS[direction])
        elif direction == "backward":
            yield Bar(f"{what} forward + backward", ratio(subject, dense, "both"), BARS["both"])
    total = subject.peak[direction].total
    if not peers and total is not None:
        yield Bar(f"{what} {direction}, memory of the process", total / 2**30, MEMORY_BAR_GIB, " GiB")


def describe(line: dict[str, Any]) -> str:
    """One result as text."""
    if line["case"] == "plan cache":
        return (
            f"plan cache: {line['hits']} hits, {line['misses']} misses, "
            f"{line['warm_misses']} of them after the first call"
        )
    if line["case"] == "extreme":
        from .extreme import describe as of_extreme

        return of_extreme(line)
    where = f"{line['case']:<30} {line['backend']:<9} {line['direction']:<8} {line['n']:>8} {line['d']:>4}"
    if "skipped" in line:
        return f"{where}  left out: {line['skipped']}"
    if not line["gate_passed"]:
        return f"{where}  WRONG, {line['gate']:.2g} times the accepted error: not timed"
    rate = max(line["relative_rate"].values(), default=None)
    # The rate counts the operations of the kept pairs; the speed-up is the time of dense attention on all pairs.
    dense = 4.0 * line["n"] ** 2 * line["d"] * line["heads"] * WORK[line["direction"]]
    beside = "" if rate is None else f" {rate * dense / line['flops']:>8.2f}x {rate:>7.2f}x"
    return f"{where} {line['p50_ms']:>10.2f}{beside}"


HEADER = f"{'case':<30} {'kernel':<9} {'pass':<8} {'tokens':>8} {'d':>4} {'ms':>10} {'speed-up':>9} {'rate':>8}"
"""Speed-up over dense attention in time, and rate on the kept operations relative to dense attention's rate."""


class Eta:
    """Progress of a run, as a prefix of messages."""

    def __init__(self, groups: list[Group], ahead: int = 0) -> None:
        self.work = [group.budget_s + 5.0 for group in groups] + [60.0] * ahead
        self.done, self.begun = 0, time.monotonic()

    def say(self, text: str) -> None:
        share = sum(self.work[: self.done]) / sum(self.work)
        left = ""
        if share > 0:
            left = f", about {(time.monotonic() - self.begun) * (1 - share) / share / 60:.0f} min left"
        progress(f"[{self.done + 1}/{len(self.work)}{left}] {text}" if text else "")


def run(
    name: str,
    out: Path,
    backend: str,
    device: str = "cpu",
    *,
    resume: bool = False,
    memory_gib: float | None = None,
    deadline: float = float("inf"),
    as_json: bool = False,
) -> int:
    """Measure a suite into `out`; the exit status is 1 if a gate failed.

    No case and no round is begun after the deadline, a time of `time.monotonic`; a group that is begun has one of each.
    """
    # Dense attention that was skipped, perhaps on a busy machine, is tried again.
    done = {key_of(line) for line in known_lines(out) if not is_left_out(line)} if resume else set()
    limit = trials.memory_limit(device, memory_gib)
    before = plan_cache.info()
    plans: Counter[str] = Counter(warm_hits=0, warm_misses=0)
    groups = suite(name, device)
    eta = Eta(groups, ahead=name == "extreme")
    shown: list[Bar] = []
    red = 0

    if not as_json:
        print(f"{HEADER}\nspeed-up: time of dense attention over ours; rate: per kept operation, dense = 1")

    def keep(line: dict[str, Any]) -> None:
        append(out, line)
        progress("")
        print(json.dumps(line) if as_json else describe(line), flush=True)

    for group in groups:
        reason = trials.why_too_large(group, limit)
        if time.monotonic() > deadline:
            reason = f"{group.label}, {OVER}"
        if reason is not None:
            not_begun(reason)
        group = replace(group, deadline=deadline)
        for line, decided in measure_group(group, backend, eta.say, done, plans) if reason is None else ():
            keep(line)
            shown += decided
            red += line.get("gate_passed") is False
        eta.done += 1
    if name == "extreme" and time.monotonic() < deadline:
        eta.say("the longest length")
        for line in trials.longest_lengths(device, limit, {key[2] for key in done if key[:2] == (name, "extreme")}):
            keep({"suite": name, **line})
            red += "skipped" in line
            if time.monotonic() > deadline:
                break
    if len(done) < len({key_of(line) for line in known_lines(out) if not is_left_out(line)}):
        hits, misses = (now - then for now, then in zip(plan_cache.info()[:2], before[:2], strict=True))
        keep({"suite": name, "case": "plan cache", "hits": hits, "misses": misses, **plans, **facts(device)})
    if shown and not as_json:
        print(f"\nTargets, {sum(bar.passed for bar in shown)} of {len(shown)} met (rate on kept flops / dense rate):")
        for bar in shown:
            print(f"  {bar}")
    if red:
        print(f"\n{red} results were wrong and not timed.", file=sys.stderr)
    return 1 if red else 0
