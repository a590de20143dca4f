"""Calls that no suite times: sinks, other widths, padding, soft caps, biases, packed bounds, index tensors.

    PYTHONPATH=src python benchmarks/gpu_calls.py --out calls.jsonl [--seconds 300] [--only NAME ...]

Each case is timed in turns with its peers, forward and forward + backward, after chosen rows of its output agree with
float64. Peers are torch's dense attention and FlexAttention with the same mask, and the same call without the property
that is measured. `--device cpu` runs small forms, without FlexAttention, to test the script.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from adaptive_gpu import by_turns, told
from language_model import dense_first
from torch import Tensor
from torch.nn import functional as F

from dilated_attention_pytorch import attention, distance_bias, parse, selected_attention
from dilated_attention_pytorch.kernels.external import flex
from dilated_attention_pytorch.tools.bench.gpu import time_whole_call
from dilated_attention_pytorch.tools.bench.measure import facts
from dilated_attention_pytorch.tools.bench.results import append

GATE = 2e-2
"""Largest error of checked rows in bfloat16, over their norm."""
ROWS = 32
Run = Callable[[], Tensor]
Line = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One case: a pattern with its settings, or blocks listed by an index tensor."""

    name: str
    n: int = 65536
    heads: int = 8
    key_heads: int = 8
    d: int = 128
    pattern: str = "window:4095,0"
    sink: bool = False
    softcap: float | None = None
    bias: bool = False
    documents: int = 0
    """packed sequences, whose bounds are on the GPU in one run and on the host in another"""
    listed: int = 0
    """blocks a row, by `selected_attention`"""
    per_token: bool = True
    has_host_time: bool = False
    padded: float = 0.0
    """share of tokens at the end that are padding"""
    backend: str = "auto"
    """a GPU backend that `auto` does not select for the call, timed against its choice"""

    @property
    def small(self) -> Call:
        """The form for a CPU."""
        window = "window:63,0" if self.pattern.startswith("window") else self.pattern
        share = self.heads // self.key_heads
        shape: Line = {"n": 1024, "heads": 2 * share, "key_heads": 2, "d": 32}
        return replace(self, **shape, pattern=window, listed=min(self.listed, 3), backend="auto")


CALLS = (
    Call("host time of a small call", n=16384, d=64, pattern="random:0.01;block=128", has_host_time=True),
    Call("GPT-OSS: window 128, sink", heads=64, key_heads=8, d=64, pattern="window:127,0", sink=True),
    Call("Gemma: window 4096, d 256", heads=8, key_heads=4, d=256),
    Call("window 4096"),
    *(Call(f"window 4096, width {d}, hopper", d=d, backend="hopper") for d in (96, 80, 32)),
    Call("window 4096, soft cap", softcap=50.0),
    Call("window 4096, bias", bias=True),
    Call("window 4096, 16 packed sequences", documents=16),
    *(Call(f"window 4096, {share:.0%} padded, hopper", padded=share, backend="hopper") for share in (0.01, 0.2)),
    Call("ladder, 20% padded, hopper", pattern="dilated:2048x1,8192x4,32768x16", padded=0.2, backend="hopper"),
    Call("16 blocks a token, 32K", n=32768, heads=64, key_heads=4, listed=16),
    Call("16 blocks a block, 32K", n=32768, heads=64, key_heads=4, listed=16, per_token=False),
    Call("16 blocks a token, 128K", n=131072, heads=64, key_heads=4, listed=16),
)


class Problem:
    """Tensors of a case, its runs by name, and a float64 definition of some rows."""

    def __init__(self, case: Call, device: str) -> None:
        self.case, self.device = case, device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        options: Line = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
        shapes = [(1, heads, case.n, case.d) for heads in (case.heads, case.key_heads, case.key_heads)]
        self.inputs = [torch.randn(*shape, **options).to(dtype).requires_grad_() for shape in shapes]
        self.gradient = torch.randn(*shapes[0], **options).to(dtype)
        self.sink = torch.randn(case.heads, **options) if case.sink else None
        slopes = 2.0 ** -torch.arange(1, case.heads + 1, device=device).float()
        self.bias = distance_bias(slopes, 127) if case.bias else None
        self.bounds = None
        if case.documents:
            cuts = torch.arange(1, case.documents, device=device) * (case.n // case.documents) + 7
            self.bounds = F.pad(cuts, (1, 1)).int()
            self.bounds[-1] = case.n
        self.padding = None
        if case.padded:
            self.padding = torch.arange(case.n, device=device)[None] >= int(case.n * (1 - case.padded))
        self.indices = None
        if case.listed:
            own = torch.arange(case.n, device=device) // 128
            own = own if case.per_token else own[::128]
            drawn = torch.rand(len(own), case.listed, device=device, generator=options["generator"])
            lists = (drawn * (own[:, None] + 1)).long()
            # The own block, so that no row is empty.
            lists[:, 0] = own
            self.indices = lists[None, None].int()

    def runs(self) -> dict[str, Run]:
        """The library first, then its own variants and peers."""
        case, given = self.case, self.inputs

        def dense() -> Tensor:
            with dense_first(self.device):
                return F.scaled_dot_product_attention(*given, is_causal=not case.has_host_time, enable_gqa=True)

        if self.indices is not None:
            settings: Line = {"is_causal": True, "enable_gqa": True}
            return {"ours": lambda: selected_attention(*given, self.indices, **settings), "sdpa": dense}
        ours = partial(attention, *given, case.pattern, enable_gqa=True, is_causal=not case.has_host_time)
        extra: Line = {"softcap": case.softcap, "bias": self.bias, "sink": self.sink, "cu_seqlens": self.bounds}
        extra["key_padding_mask"] = self.padding
        runs: dict[str, Run] = {"ours": partial(ours, **extra, backend=case.backend)}
        if case.backend != "auto":
            runs["auto"] = partial(ours, **extra)
        if case.padded:
            runs["without padding"] = partial(ours, backend=case.backend)
        if self.bounds is not None:
            runs["bounds on the host"] = partial(ours, cu_seqlens=self.bounds.cpu())
        if case.softcap or case.bias:
            names = ("triton",) if self.device == "cuda" else ("native",)
            runs |= {f"{name}, without it": partial(ours, backend=name) for name in names}
        runs["sdpa"] = dense
        if self.device == "cuda" and case.pattern.startswith("window"):
            runs["flex, without the sink" if case.sink else "flex"] = self.flex()
        return runs

    def flex(self) -> Run:
        """FlexAttention with the same mask, soft cap and bias; it has no sink."""
        from torch.nn.attention.flex_attention import create_block_mask

        case, bias, bounds = self.case, self.bias, self.bounds
        kept = case.n if self.padding is None else int((~self.padding).sum())
        width = int(case.pattern.partition(":")[2].split(",")[0])
        document = torch.zeros(case.n, dtype=torch.int32, device=self.device)
        if bounds is not None:
            document = torch.searchsorted(bounds, torch.arange(case.n, device=self.device), right=True).int()

        def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q - k <= width) & (document[q] == document[k]) & (k < kept)

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if case.softcap is not None:
                s = case.softcap * torch.tanh(s / case.softcap)
            if bias is not None:
                reach = bias.shape[1] // 2
                s = s + bias[h, (k - q + reach).clamp(0, 2 * reach)]
            return s

        # Made by the first call, so that running out of memory is a reason against this peer alone.
        blocks = cache(lambda: create_block_mask(mask, None, None, case.n, case.n, device=self.device))
        changes = {"score_mod": score} if case.softcap is not None or bias is not None else {}
        return lambda: flex.compiled()(*self.inputs, block_mask=blocks(), enable_gqa=True, **changes)

    @torch.no_grad()
    def error(self, output: Tensor) -> float:
        """Largest relative error of some rows of two heads against float64."""
        case, worst = self.case, 0.0
        key_at = torch.arange(case.n, device=self.device)
        pattern = parse(case.pattern).resolve(case.n, case.heads)
        for head in (0, case.heads - 1):
            q, k, v = (x[0, head * x.shape[1] // case.heads].double() for x in self.inputs)
            for row in torch.linspace(0, case.n - 1, ROWS).long().tolist():
                if self.indices is not None:
                    blocks = self.indices[0, 0, row if case.per_token else row // 128]
                    allowed = torch.isin(key_at // 128, blocks) & (key_at <= row)
                else:
                    counts = pattern.multiplicity(torch.tensor(row, device=self.device), key_at, head)
                    allowed = (counts > 0) & (key_at <= row) if not case.has_host_time else counts > 0
                if self.bounds is not None:
                    allowed = allowed & (key_at >= self.bounds[self.bounds <= row].max())
                if self.padding is not None:
                    allowed = allowed & ~self.padding[0]
                if not allowed.any():
                    worst = max(worst, float(output[0, head, row].norm()))
                    continue
                scores = k @ q[row] * case.d**-0.5
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                if self.bias is not None:
                    reach = self.bias.shape[1] // 2
                    scores = scores + self.bias[head, (key_at - row + reach).clamp(0, 2 * reach)].double()
                if self.indices is None:
                    scores = scores + counts.double().log()
                scores = scores.masked_fill(~allowed, -torch.inf)
                lse = scores.logsumexp(0)
                exact = (scores - lse).exp() @ v
                if self.sink is not None:
                    exact = exact * torch.sigmoid(lse - self.sink[head].double())
                worst = max(worst, float((output[0, head, row].double() - exact).norm() / exact.norm()))
        return worst


def measure(case: Call, device: str) -> Line:
    """Milliseconds of every run in turns; nothing is timed where the check fails."""
    problem = Problem(case, device)
    runs, reasons = problem.runs(), {}
    line: Line = {"error": problem.error(runs["ours"]())}
    if not line["error"] <= GATE:
        return line | {"skipped": "the check failed"}

    def both(run: Run) -> None:
        torch.autograd.grad(run(), problem.inputs, problem.gradient)

    for name in [x for x in runs if x != "ours"]:
        try:
            both(runs[name])
        except Exception as problem_of_peer:
            reasons[name] = told(problem_of_peer)
            del runs[name]
    for key, calls in (("ms", [torch.no_grad()(x) for x in runs.values()]), ("with_backward_ms", None)):
        took = by_turns(calls or [partial(both, run) for run in runs.values()], device)
        line[key] = dict(zip(runs, (1e3 * x for x in took), strict=True))
        line[key.replace("ms", "ratios")] = {x: t / took[0] for x, t in zip(runs, took, strict=True) if x != "ours"}
    if case.has_host_time:
        line |= time_whole_call(runs["ours"], device)
    return line | {"not_run": reasons}


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 where a check failed or a case raised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[x.name for x in CALLS], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    deadline, status = time.monotonic() + given.seconds, 0
    for case in CALLS:
        if given.only and case.name not in given.only:
            continue
        line: Line = {"task": "call", "case": case.name, "n": case.n if given.device == "cuda" else case.small.n}
        if time.monotonic() > deadline:
            line["skipped"] = f"not begun after {given.seconds:.0f} s"
        else:
            try:
                line |= measure(case if given.device == "cuda" else case.small, given.device)
            except Exception as problem:
                line["skipped"] = told(problem)
            status |= "skipped" in line
        line |= facts(given.device)
        append(given.out, line)
        print(
            json.dumps({k: line[k] for k in ("case", "error", "ms", "ratios", "host_us", "skipped") if k in line}),
            flush=True,
        )
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
