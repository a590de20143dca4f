"""Check the Hopper backward against a float64 oracle, then time it. Needs one Hopper GPU, torch and triton.

    PYTHONPATH=src python3 benchmarks/check_hopper_backward.py --out backward.jsonl

Every case runs in a worker process that is killed after a minute, because a wrong barrier does not fail: it hangs.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from check_hopper import SMALL_BLOCKS, Case, build, host_microseconds, milliseconds, options, poisoned, run_cases
from torch import Tensor

from dilated_attention_pytorch.kernels.call import AttentionCall, Gradients
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.kernels.hopper import backward as hopper_gradients
from dilated_attention_pytorch.kernels.hopper.backward import BACKWARD_CONFIGS, SMALL_BLOCK_CONFIGS, BackwardConfig
from dilated_attention_pytorch.kernels.triton import backend as triton_backend


def variants(d: int, block: int) -> dict[str, tuple[BackwardConfig, bool]]:
    """Configurations worth timing, by name, and whether dQ is summed in any order."""
    if block == 64:
        return {"": (SMALL_BLOCK_CONFIGS[d], False)}
    base = BACKWARD_CONFIGS[d]
    return {
        "": (base, True),
        "by rows": (replace(base, ordered=False), False),
        "in turns": (replace(base, ordered=True), False),
        "stages 3 1": (replace(base, stages=3, held_stages=1), True),
    }


def checks() -> list[Case]:
    """Small problems, one for each thing that can go wrong."""
    kinds = [
        Case("one tile", "full", 128, heads=1, key_heads=1),
        Case("whole tiles", "full", 512),
        Case("causal, ragged", "causal", 1000),
        Case("causal, ragged by a tile", "causal", 900),
        Case("window, ragged", "window:200", 1000),
        Case("random by head, causal", "random:0.3;block=128;seed=1;per_head=1 & causal", 1100, key_heads=2),
        Case("bit masks", "global:64 | window:100", 1000),
        Case("rows without keys", "blocks:0,,1 2,,4;block=128", 640),
        Case("grouped heads, batch, (B, N, H, D)", "window:300", 900, heads=8, key_heads=2, batch=3, layout="bnhd"),
        Case("block 256, window", "window:333", 1111, block=256, batch=2),
        Case("many items a program", "random:0.05;block=128;seed=3 | window:128", 4096, heads=4, key_heads=2, batch=4),
    ]
    cases = [replace(case, d=d) for d in (128, 64) for case in kinds]
    cases += [replace(kinds[2], d=d, dtype="float16") for d in (128, 64)]
    cases += SMALL_BLOCKS
    for variant in ("by rows", "in turns"):
        cases += [replace(case, d=d, variant=variant) for d in (128, 64) for case in kinds[5:]]
    cases += [replace(kinds[-1], d=d, variant=name) for d in (128, 64) for name in ("stages 3 1",)]
    return cases


def timings() -> list[Case]:
    """The shapes the design speaks of."""
    cases = []
    for d in (128, 64):
        for n in (65536, 16384):
            for density in (0.1, 0.01):
                keep = max(1, round(density * n // 128))
                for kind, pattern in (
                    ("random", f"random:{density};block=128;seed=0"),
                    ("local", f"window:{keep * 64}"),
                ):
                    cases.append(Case(f"{kind} {density:g}", pattern, n, 8, 8, d=d, task="time"))
        cases.append(Case("causal", "causal", 16384, 8, 8, d=d, task="time"))
        cases.append(Case("ladder", "dilated:2048x1,4096x2,8192x4,16384x8,32768x16", 65536, 8, 8, d=d, task="time"))
    for density in (0.1, 0.01):
        for kind, pattern in (
            ("random", f"random:{density};block=64;seed=0"),
            ("local", f"window:{density * 32768:.0f}"),
        ):
            cases.append(Case(f"block 64, {kind} {density:g}", pattern, 65536, 8, 8, block=64, task="time"))
    cases.append(Case("block 64, causal", "causal", 16384, 8, 8, block=64, task="time"))
    return cases


def exact_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and LSE of dense attention, computed in float64."""
    group = call.query.shape[1] // call.key.shape[1]
    allowed = call.plan.to_dense() > 0
    output = torch.empty_like(call.query)
    lse = torch.empty(call.query.shape[:3], device=call.device)
    for batch in range(len(output)):
        key, value = (t[batch].double().repeat_interleave(group, 0) for t in (call.key, call.value))
        scores = (call.query[batch].double() @ key.mT * call.scale).masked_fill(~allowed, -math.inf)
        lse[batch] = scores.logsumexp(-1)
        output[batch] = (scores.softmax(-1).nan_to_num(0.0) @ value).to(output.dtype)
    return output, lse


def oracle(call: AttentionCall, grad_output: Tensor, grad_lse: Tensor) -> Gradients:
    """Gradients of dense attention in float64."""
    group = call.query.shape[1] // call.key.shape[1]
    leaves = [t.double().requires_grad_() for t in (call.query, call.key, call.value)]
    query, key, value = leaves[0], *(t.repeat_interleave(group, 1) for t in leaves[1:])
    allowed = call.plan.to_dense() > 0
    loss = query.new_zeros(())
    for batch in range(query.shape[0]):
        scores = (query[batch] @ key[batch].mT * call.scale).masked_fill(~allowed, -math.inf)
        met = allowed.any(-1)
        lse = torch.where(met[..., None], scores, 0.0).logsumexp(-1)
        weights = torch.where(allowed, (scores - lse[..., None]).exp(), 0.0)
        loss = loss + (weights @ value[batch] * grad_output[batch].double()).sum()
        loss = loss + torch.where(met, lse * grad_lse[batch].double(), 0.0).sum()
    return Gradients(*torch.autograd.grad(loss, leaves))


def check(case: Case) -> dict[str, Any]:
    """Relative error of every gradient, beside which two runs of a fixed order must agree."""
    call = build(case)
    reason = hopper_backend.why_not(call)
    if reason is not None:
        return {"ok": False, "why_not": reason}
    output, lse = exact_forward(call)
    grad_output, grad_lse = torch.randn_like(output), torch.randn_like(lse)
    config, fused = variants(case.d, case.block)[case.variant]
    with poisoned():
        got = hopper_gradients.run_backward(call, output, lse, grad_output, grad_lse, config, fused)
        again = hopper_gradients.run_backward(call, output, lse, grad_output, grad_lse, config, fused)
    torch.cuda.synchronize()
    want = oracle(call, grad_output, grad_lse)
    unit = 2.0**-8 if case.dtype == "bfloat16" else 2.0**-11
    same = torch.equal(got.key, again.key) and torch.equal(got.value, again.value)
    result: dict[str, Any] = {"ok": same and (fused or torch.equal(got.query, again.query)), "same": same}
    for name, ours, theirs in zip(("dq", "dk", "dv"), got, want, strict=True):
        error = (ours.double() - theirs).nan_to_num(math.inf)
        result[name] = (error.norm() / theirs.norm()).item()
        result[f"{name}_worst"] = (error.abs().max() / theirs.abs().max()).item()
        result["ok"] &= result[name] < 1.5 * unit and result[f"{name}_worst"] < 4 * unit
    return result


def measure(case: Case) -> dict[str, Any]:
    """Speed on the kept blocks of every variant and of the portable kernels, run by turns so that clocks are shared."""
    call = build(case)
    reason = hopper_backend.why_not(call)
    if reason is not None:
        return {"ok": False, "why_not": reason}
    output, lse = hopper_backend.forward(call)
    grad_output = torch.randn_like(output)
    work = 2.5 * case.batch * call.plan.flops(case.d) / 1e9

    def runner(config: BackwardConfig, fused: bool) -> Callable[[], Gradients]:
        return lambda: hopper_gradients.run_backward(call, output, lse, grad_output, None, config, fused)

    runs: dict[str, Callable[[], Gradients]] = {
        name: runner(*how) for name, how in variants(case.d, case.block).items()
    }
    runs["portable"] = lambda: triton_backend.backward(call, output, lse, grad_output, None)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name, run in runs.items():
            times[name] += milliseconds(run, 3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    result: dict[str, Any] = {"ok": True, "ms": medians[""]}
    result |= {name or "tflops": round(work / median, 1) for name, median in medians.items()}
    result["host_us"] = round(host_microseconds(runs[""], 20))
    return result | kernel_times(runs[""])


def kernel_times(run: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel of one run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return {
        event.key[:20]: round(event.device_time_total) for event in profile.key_averages() if event.device_time_total
    }


def main() -> int:
    """Run the cases asked for."""
    return run_cases(__file__, options(__doc__).parse_args(), [*checks(), *timings()], check, measure)


if __name__ == "__main__":
    sys.exit(main())
