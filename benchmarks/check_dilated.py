"""Check dilated attention against a float64 oracle, then time it. Needs one NVIDIA GPU, torch and triton.

Rates are floating-point operations of the plan's tiles over time. Each case is set against cuDNN's dense attention of
as many heads, that wide, in the same process. `hopper-any-order` is `hopper` with `reproducible_gradients(False)`,
`hopper-in-turns` and `hopper-by-rows` force `BackwardConfig.ordered`, which `hopper` leaves to the plan.

    PYTHONPATH=src python3 benchmarks/check_dilated.py --out dilated.jsonl --backends hopper,triton
    PYTHONPATH=src python3 benchmarks/check_dilated.py --out widths.jsonl --match "narrow heads"
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch.kernels.call import AttentionCall, reproducible_gradients
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.kernels.hopper.backward import BACKWARD_CONFIGS
from dilated_attention_pytorch.kernels.registry import Backend
from dilated_attention_pytorch.kernels.triton import backend as triton_backend
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.tools.bench.measure import facts

BACKENDS: dict[str, Backend] = {
    "hopper": hopper_backend,
    "hopper-any-order": hopper_backend,
    "hopper-in-turns": hopper_backend,
    "hopper-by-rows": hopper_backend,
    "triton": triton_backend,
}
ORDERED = {"hopper-in-turns": True, "hopper-by-rows": False}
"""`BackwardConfig.ordered` of backends that do not leave it to the plan."""
LADDERS = {
    "powers of two": "dilated:2048x1,4096x2,8192x4,16384x8,32768x16",
    "ratio 2": "dilated:2048x1,4096x2,8192x4,16384x6,32768x12",
    "ratio 4": "dilated:2048x1,8192x4,32768x16",
}
DENSE_TOKENS = 32768
"""Length of the dense peer: long enough for its best rate, short enough to time."""
BACKWARD = 2.5
"""Operations of a backward pass over those of a forward pass."""


@dataclass(frozen=True)
class Case:
    """One problem."""

    name: str
    pattern: str
    n: int
    heads: int = 8
    key_heads: int | None = None
    batch: int = 1
    d: int = 64
    dtype: str = "bfloat16"
    layout: str = "bhnd"
    backend: str = ""
    """Which to check; when timing, all asked for are."""
    task: str = "check"


def checks() -> list[Case]:
    """Small problems, one for each thing that can go wrong."""
    small = "dilated:256x1,512x2,1024x4"
    kinds = [
        Case("dense", "full", 700),
        Case("causal", "causal", 1000, batch=2),
        Case("ladder", small, 2048),
        Case("ladder, causal", f"{small} & causal", 2048),
        Case("ladder, ragged", small, 1900),
        Case("ladder, (B, N, H, D)", f"{small} & causal", 2048, layout="bnhd"),
        Case("rates that do not divide", "dilated:256x1,500x3,1000x6 & causal", 2000, heads=16),
        Case("short segments", "dilated:16x1,64x8,96x32", 300),
        Case("rows without keys", "dilated:512x16", 1024),
        Case("residues in blocks", f"{small};offset=block", 1500),
        Case("heads divided", f"{small};heads=split", 1500),
        Case("batch, heads outside", f"{small} & causal", 2048, batch=3),
        Case("batch, tokens outside", small, 1900, batch=3, layout="bnhd"),
        Case("batch, fused projections", small, 2048, batch=2, layout="fused"),
        Case("grouped heads", f"{small} & causal", 1900, key_heads=2),
        Case("grouped heads, fused projections", small, 2048, key_heads=4, batch=2, layout="fused"),
        Case("documents", "documents:300,300,1,45,1000 & causal", 1646),
    ]
    cases = [replace(case, d=d) for case in kinds for d in (64, 128)]
    cases += [replace(kinds[3], dtype="float16"), replace(kinds[3], dtype="float16", d=128)]
    cases += [replace(case, name=f"{case.name}, narrow heads", d=d) for case in kinds[3::5] for d in (96, 80, 32)]
    return [replace(case, backend=name) for name in BACKENDS for case in cases]


def timings() -> list[Case]:
    """Published ladders, the ones that tell most first."""
    cases = []
    for n in (65536, 16384, 262144, 1048576):
        for heads, d in ((8, 128), (8, 64), (16, 64), (16, 128)):
            for name, pattern in LADDERS.items():
                for end in ("", " & causal"):
                    cases.append(Case(f"{name}{', causal' * bool(end)}", pattern + end, n, heads, d=d, task="time"))
    cases += [
        Case("ratio 2, (B, N, H, D)", LADDERS["ratio 2"], 262144, 8, d=d, layout="bnhd", task="time") for d in (64, 128)
    ]
    ends = "", " & causal"
    cases += [
        Case(f"ratio 2{', causal' * bool(end)}, narrow heads", LADDERS["ratio 2"] + end, 65536, 8, d=d, task="time")
        for d in (96, 80, 32)
        for end in ends
    ]
    return cases


def build(case: Case) -> AttentionCall:
    """Fresh random inputs and the plan."""
    dtype = getattr(torch, case.dtype)
    key_heads = case.key_heads or case.heads
    counts = (case.heads, key_heads, key_heads)

    def rows(heads: int) -> Tensor:
        if case.layout == "bhnd":
            return torch.randn(case.batch, heads, case.n, case.d, device="cuda", dtype=dtype)
        return torch.randn(case.batch, case.n, heads, case.d, device="cuda", dtype=dtype).transpose(1, 2)

    if case.layout == "fused":
        tensors = rows(sum(counts)).split(counts, dim=1)
    else:
        tensors = tuple(rows(heads) for heads in counts)
    plan = make_plan(parse(case.pattern), case.n, case.heads, device="cuda")
    return AttentionCall(*tensors, plan, case.d**-0.5)


def oracle(call: AttentionCall, grad: Tensor) -> tuple[Tensor, ...]:
    """Output, LSE and gradients in float64, a head at a time."""
    counts = call.plan.to_dense()
    group = call.query.shape[1] // call.key.shape[1]
    inputs = [t.detach().double().requires_grad_() for t in (call.query, call.key, call.value)]
    outputs, lses = [], []
    grads = [torch.zeros_like(t) for t in inputs]
    for head in range(call.query.shape[1]):
        q, k, v = inputs[0][:, head], inputs[1][:, head // group], inputs[2][:, head // group]
        weights = call.scale * q @ k.transpose(-1, -2) + counts[head].double().log()
        lse = weights.logsumexp(-1)
        seen = (lse > -math.inf)[..., None]
        output = torch.where(seen, torch.where(seen, weights, 0.0).softmax(-1) @ v, 0.0)
        for total, share in zip(grads, torch.autograd.grad(output, inputs, grad[:, head].double()), strict=True):
            total += share
        outputs.append(output.detach())
        lses.append(lse.detach())
    return torch.stack(outputs, 1), torch.stack(lses, 1), *grads


@contextmanager
def poisoned() -> Iterator[None]:
    """Make memory nobody wrote show up as NaN."""
    names = ("empty", "empty_like", "empty_strided")
    before = {name: getattr(torch, name) for name in names}

    def filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*arguments: Any, **options: Any) -> Tensor:
            made = make(*arguments, **options)
            return made.fill_(math.nan) if made.is_floating_point() else made

        return allocate

    for name in names:
        setattr(torch, name, filling(before[name]))
    try:
        yield
    finally:
        for name in names:
            setattr(torch, name, before[name])


@contextmanager
def order_of(name: str) -> Iterator[None]:
    """Order of the sums of dQ of a backend of this script."""
    configs = dict(BACKWARD_CONFIGS)
    BACKWARD_CONFIGS.update({d: replace(one, ordered=ORDERED.get(name, one.ordered)) for d, one in configs.items()})
    reproducible_gradients(name != "hopper-any-order")
    try:
        yield
    finally:
        reproducible_gradients(True)
        BACKWARD_CONFIGS.update(configs)


def check(case: Case) -> dict[str, Any]:
    """Norm of each error over the norm of what was wanted."""
    call = build(case)
    backend = BACKENDS[case.backend]
    reason = backend.why_not(call)
    if reason is not None:
        return {"ok": False, "why_not": reason}
    grad = torch.randn_like(call.query)
    with order_of(case.backend), poisoned():
        began = time.perf_counter()
        output, lse = backend.forward(call)
        gradients = backend.backward(call, output, lse, grad, None)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        again = backend.forward(call)
        repeated = (*again, *backend.backward(call, output, lse, grad, None))
    fixed = 2 if case.backend == "hopper-any-order" else 5
    pairs = list(zip((output, lse, *gradients), repeated, strict=True))[:fixed]
    result: dict[str, Any] = {"ok": all(torch.equal(one, other) for one, other in pairs)}
    result |= {"parts": len(call.plan.parts), "first_s": seconds}
    unit = 2.0**-8 if case.dtype == "bfloat16" else 2.0**-11
    wanted = oracle(call, grad)
    for name, got, want in zip(("output", "lse", "dq", "dk", "dv"), (output, lse, *gradients), wanted, strict=True):
        empty = want == -math.inf
        result["ok"] &= bool((empty == (got == -math.inf)).all())
        got, want = torch.where(empty, 0.0, got.double()), torch.where(empty, 0.0, want)
        result[name] = ((got - want).norm() / want.norm()).item()
        # NaN must fail, so the comparison asks for what is good.
        result["ok"] &= result[name] < (1e-5 if name == "lse" else 1.25 * unit)
    return result


def milliseconds(run: Callable[[], object], budget: float = 400.0) -> float:
    """Median device time of single runs after a warm-up, as many as fit the budget."""
    run()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget and len(times) < 15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def dense_rates(case: Case, known: dict[tuple[object, ...], tuple[float, float]]) -> tuple[float, float]:
    """Forward and backward TFLOP/s of dense cuDNN attention of the same width, heads and causality."""
    causal = "causal" in case.pattern
    key = (case.heads, case.d, causal)
    if key not in known:
        call = build(replace(case, pattern="causal" if causal else "full", n=DENSE_TOKENS))
        inputs = tuple(t.detach().requires_grad_() for t in (call.query, call.key, call.value))

        def attend() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(*inputs, is_causal=causal, scale=call.scale)

        output = attend()
        work = 4 * case.heads * DENSE_TOKENS**2 * case.d / (2 if causal else 1) / 1e9
        grad = torch.randn_like(output)
        forward = milliseconds(attend)
        backward = milliseconds(lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True))
        known[key] = work / forward, BACKWARD * work / backward
    return known[key]


def passes(name: str, backend: Backend, call: AttentionCall, grad: Tensor, work: float) -> dict[str, float]:
    """Times, rates and workspace of one backend's forward and backward; `work` in millions of operations."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    output, lse = backend.forward(call)
    backend.backward(call, output, lse, grad, None)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    forward = milliseconds(lambda: backend.forward(call))
    forward_bytes = torch.cuda.max_memory_allocated() - held
    backward = milliseconds(lambda: backend.backward(call, output, lse, grad, None))
    return {
        f"{name}_first_s": first,
        f"{name}_forward_ms": forward,
        f"{name}_backward_ms": backward,
        f"{name}_forward": work / forward,
        f"{name}_backward": BACKWARD * work / backward,
        f"{name}_forward_bytes": forward_bytes,
        f"{name}_backward_bytes": torch.cuda.max_memory_allocated() - held,
    }


def measure(case: Case, known: dict[tuple[object, ...], tuple[float, float]], backends: list[str]) -> dict[str, Any]:
    """Rates of both passes on the tiles of the plan, and those of the first backend over dense cuDNN's."""
    call = build(case)
    work = case.batch * call.plan.flops(case.d) / 1e9
    grad = torch.randn_like(call.query)
    dense = dense_rates(case, known)
    result: dict[str, Any] = {"ok": True, "parts": len(call.plan.parts)}
    for name in backends:
        reason = BACKENDS[name].why_not(call)
        if reason is not None:
            result |= {f"{name}_why_not": reason}
            continue
        with order_of(name):
            result |= passes(name, BACKENDS[name], call, grad, work)
        for index, way in enumerate(("forward", "backward")):
            result[f"{name}_{way}_of_dense"] = result[f"{name}_{way}"] / dense[index]
    return result | {"dense_forward": dense[0], "dense_backward": dense[1]}


def main() -> int:
    """Run the cases asked for and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSONL file to write")
    parser.add_argument("--only", choices=("check", "time"), help="run one half")
    parser.add_argument("--match", default="", help="run the cases whose description contains this")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="which to check and time, by commas")
    parser.add_argument("--seconds", type=float, default=420.0, help="stop starting cases after this long")
    arguments = parser.parse_args()
    backends = arguments.backends.split(",")
    began = time.perf_counter()
    failures, rows = 0, []
    known: dict[tuple[object, ...], tuple[float, float]] = {}
    for case in [*checks(), *timings()]:
        label = f"{case.task:5} d{case.d} {case.dtype} n {case.n} heads {case.heads} {case.name} {case.backend}"
        if arguments.match not in label or arguments.only not in (None, case.task):
            continue
        if case.backend not in ("", *backends):
            continue
        if time.perf_counter() - began > arguments.seconds:
            print("out of time; the remaining cases are not run", flush=True)
            break
        if failures and case.task == "time" and arguments.only is None:
            print("a check failed; nothing is timed", flush=True)
            break
        try:
            result = check(case) if case.task == "check" else measure(case, known, backends)
        except Exception as problem:
            result = {"ok": False, "error": f"{type(problem).__name__}: {str(problem)[:600]}"}
        failures += not result["ok"]
        rows.append({**asdict(case), **result, **facts("cuda")})
        shown = " ".join(
            f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in result.items()
            if k != "ok" and not k.endswith("_bytes")
        )
        print(f"{'ok  ' if result['ok'] else 'FAIL'} {label:68} {shown}", flush=True)
        if arguments.out is not None:
            arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{failures} failures in {time.perf_counter() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
