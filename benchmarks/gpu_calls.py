"""Calls that no suite times: sinks, other widths, padding, soft caps, biases, packed bounds, index tensors.

    PYTHONPATH=src python benchmarks/gpu_calls.py --out calls.jsonl [--seconds 300] [--only NAME ...]

Each case is timed in turns with its peers, forward and forward + backward, after chosen rows of its output agree with
float64. Peers are torch's dense attention and FlexAttention with the same mask, and the same call without the property
that is measured. Peers of blocks that an index tensor lists are a plan of the same lists, and NSA's kernels where
flash-linear-attention is installed; TFLOP/s count the kept pairs. `--device cpu` runs small forms, without
FlexAttention, to test the script.
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
from adaptive_gpu import captured, told
from language_model import dense_first
from torch import Tensor
from torch.nn import functional as F

from dilated_attention_pytorch import attention, distance_bias, make_selection, parse, selected_attention
from dilated_attention_pytorch.kernels.external import flex
from dilated_attention_pytorch.patterns.blocks import BlockLists
from dilated_attention_pytorch.tools.bench.gpu import time_whole_call
from dilated_attention_pytorch.tools.bench.measure import clock, facts
from dilated_attention_pytorch.tools.bench.results import append

GATE = 2e-2
"""Largest error of checked rows in bfloat16, over their norm."""
ROWS = 32
BLOCK = 128
ROUNDS, SECONDS, LONG = 4, 0.04, 0.4
"""Rounds of a timing, seconds of a stream of calls in a round, and of a call that is timed in two rounds."""
DENSE_UP_TO = 65536
"""Tokens up to which dense attention is timed beside listed blocks."""
PRINTED = "case", "error", "ms", "ratios", "with_backward_tflops", "host_us", "selection", "in_a_graph", "skipped"
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
    lists: int = 1
    """lists a row: one for all heads, one for each key head or one for each query head"""
    per_token: bool = True
    is_causal: bool = True
    has_host_time: bool = False
    is_captured: bool = False
    """also timed in a CUDA graph"""
    padded: float = 0.0
    """share of tokens at the end that are padding"""
    backend: str = "auto"
    """a GPU backend, timed against `triton`"""
    is_masked: bool = False
    """also timed against torch's attention with the window as a mask of all pairs"""

    @property
    def small(self) -> Call:
        """The form for a CPU."""
        window = "window:63,0" if self.pattern.startswith("window") else self.pattern
        share = self.heads // self.key_heads
        shape: Line = {"n": 1024, "heads": 2 * share, "key_heads": 2, "d": 32}
        lists = 1 if self.lists == 1 else 2 if self.lists == self.key_heads else 2 * share
        return replace(self, **shape, pattern=window, listed=min(self.listed, 3), lists=lists, backend="auto")


SMALL: Line = {"n": 16384, "d": 64, "listed": 4, "has_host_time": True, "is_captured": True}
GROUPED: Line = {"heads": 64, "key_heads": 4, "listed": 16}
CALLS = (
    Call(
        "host time of a small call", n=16384, d=64, pattern="random:0.01;block=128", is_causal=False, has_host_time=True
    ),
    Call("GPT-OSS: window 128, sink", heads=64, key_heads=8, d=64, pattern="window:127,0", sink=True, is_masked=True),
    Call("Gemma: window 4096, d 256", heads=8, key_heads=4, d=256, is_masked=True),
    Call("window 4096"),
    *(Call(f"window 4096, width {d}, hopper", d=d, backend="hopper") for d in (96, 80, 32)),
    Call("window 4096, soft cap", softcap=50.0),
    Call("window 4096, bias", bias=True),
    Call("window 4096, 16 packed sequences", documents=16),
    *(Call(f"window 4096, {share:.0%} padded, hopper", padded=share, backend="hopper") for share in (0.01, 0.2)),
    Call("ladder, 20% padded, hopper", pattern="dilated:2048x1,8192x4,32768x16", padded=0.2, backend="hopper"),
    *(
        Call(f"host time, 4 blocks a {row}", **SMALL, per_token=per_token)
        for row, per_token in (("block", False), ("token", True))
    ),
    Call("51 blocks a block, 64K", lists=8, listed=51, per_token=False, is_causal=False),
    Call("16 blocks a block, 32K", n=32768, **GROUPED, per_token=False),
    Call("16 blocks a token, 32K", n=32768, **GROUPED),
    Call("16 blocks a token, 128K", n=131072, **GROUPED),
    Call("16 blocks a token, 128K, lists of key heads", n=131072, **GROUPED, lists=4),
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
        self.leaves: dict[str, tuple[list[Tensor], Tensor]] = {}
        """Inputs and gradient of the output of peers that read tensors of their own"""
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
        self.indices = self.selection = None
        if case.listed:
            self.indices = torch.stack([self.drawn(options["generator"]) for _ in range(case.lists)])[None]
            shape: Line = {"n": case.n, "heads": case.heads, "is_causal": case.is_causal}
            self.select = partial(make_selection, self.indices, **shape)
            self.selection = self.select()

    def drawn(self, generator: torch.Generator) -> Tensor:
        """Blocks of each row, int32 (rows, listed), without duplicates; the own block is one of them."""
        case, blocks = self.case, -(-self.case.n // BLOCK)
        block, made = torch.arange(blocks, device=self.device), []
        for own in block.repeat_interleave(BLOCK if case.per_token else 1)[: case.n].split(32768):
            order = torch.rand(len(own), blocks, device=self.device, generator=generator)
            if case.is_causal:
                order.masked_fill_(block > own[:, None], -1.0)
            best = order.scatter_(1, own[:, None], 2.0).topk(case.listed, 1)
            made.append(torch.where(best.values < 0, -1, best.indices).int())
        return torch.cat(made)

    @property
    def flops(self) -> float | None:
        """Operations of a forward pass over listed blocks: 4 a kept pair and element of a head."""
        if self.indices is None:
            return None
        case = self.case
        listed = float((self.indices >= 0).sum()) * (case.heads // case.lists)
        pairs = listed * BLOCK * (1 if case.per_token else BLOCK)
        # Rows do not see the keys after them in their own block.
        return 4 * case.d * (pairs - case.is_causal * case.heads * case.n * (BLOCK - 1) / 2)

    def runs(self) -> dict[str, Run]:
        """The library first, then its own variants and peers."""
        case, given = self.case, self.inputs

        def dense() -> Tensor:
            with dense_first(self.device):
                return F.scaled_dot_product_attention(*given, is_causal=case.is_causal, enable_gqa=True)

        if self.indices is not None:
            settings: Line = {"is_causal": case.is_causal, "enable_gqa": True}
            made: dict[str, Run] = {
                "ours": lambda: selected_attention(*given, self.indices, **settings),
                "selection": lambda: selected_attention(*given, self.selection, enable_gqa=True),
            }
            if not case.per_token:
                made["plan"] = partial(attention, *given, self.pattern(), **settings)
            elif case.heads >= 16 * case.key_heads:
                made["nsa"] = self.nsa()
            return made | ({"sdpa": dense} if case.n <= DENSE_UP_TO else {})
        ours = partial(attention, *given, case.pattern, enable_gqa=True, is_causal=case.is_causal)
        extra: Line = {"softcap": case.softcap, "bias": self.bias, "sink": self.sink, "cu_seqlens": self.bounds}
        extra["key_padding_mask"] = self.padding
        runs: dict[str, Run] = {"ours": partial(ours, **extra, backend=case.backend)}
        if case.backend != "auto":
            runs["triton"] = partial(ours, **extra, backend="triton")
        if case.padded:
            runs["without padding"] = partial(ours, backend=case.backend)
        if self.bounds is not None:
            runs["bounds on the host"] = partial(ours, cu_seqlens=self.bounds.cpu())
        if case.softcap or case.bias:
            names = ("triton",) if self.device == "cuda" else ("native",)
            runs |= {f"{name}, without it": partial(ours, backend=name) for name in names}
        runs["sdpa"] = dense
        without = ", without the sink" if case.sink else ""
        if case.is_masked:
            runs[f"sdpa, mask{without}"] = self.masked()
        if self.device == "cuda" and case.pattern.startswith("window"):
            runs[f"flex{without}"] = self.flex()
        return runs

    def pattern(self) -> BlockLists:
        """The listed blocks as a pattern."""
        assert self.indices is not None
        every = self.indices[0].repeat_interleave(self.case.heads // self.case.lists, 0)
        lists = [
            [[x for x in row if x >= 0] for row in head]
            for head in every[: 1 if self.case.lists == 1 else None].tolist()
        ]
        return BlockLists.of(lists, BLOCK)

    def nsa(self) -> Run:
        """The kernels of Native Sparse Attention for tokens that list blocks; they read tokens before heads."""
        assert self.indices is not None
        given = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in self.inputs]
        lists = self.indices.expand(-1, self.case.key_heads, -1, -1).transpose(1, 2).long().contiguous()
        self.leaves["nsa"] = given, self.gradient.transpose(1, 2).contiguous()

        def run() -> Tensor:
            from fla.ops.nsa import parallel_nsa  # pyrefly: ignore[missing-import]

            return parallel_nsa(*given, block_indices=lists, block_counts=self.case.listed, block_size=BLOCK)

        return run

    def masked(self) -> Run:
        """Torch's attention with the window as a mask, (N, N); it has no sink."""
        case = self.case
        token = torch.arange(case.n, device=self.device)
        # Made by the first call: 4 GiB at 64K.
        mask = cache(lambda: parse(case.pattern).allows(token[:, None], token) & (token <= token[:, None]))

        def run() -> Tensor:
            # Torch's kernels for a mask take no grouped heads.
            query, *grouped = self.inputs
            key, value = (x.repeat_interleave(case.heads // case.key_heads, 1) for x in grouped)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask())

        return run

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

        # Each mask is a graph of its own, of one function.
        torch._dynamo.config.recompile_limit = flex.SHAPES
        # Made by the first call, so that running out of memory is a reason against this peer alone.
        blocks = cache(lambda: create_block_mask(mask, None, None, case.n, case.n, device=self.device))
        changes = {"score_mod": score} if case.softcap is not None or bias is not None else {}
        return lambda: flex.compiled()(*self.inputs, block_mask=blocks(), enable_gqa=True, **changes)

    def gradients(self, run: Run, name: str = "ours") -> tuple[Tensor, ...]:
        """Gradients of the inputs of a run."""
        inputs, gradient = self.leaves.get(name, (self.inputs, self.gradient))
        return torch.autograd.grad(run(), inputs, gradient)

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
                    own = head * case.lists // case.heads
                    blocks = self.indices[0, own, row if case.per_token else row // BLOCK]
                    allowed = torch.isin(key_at // BLOCK, blocks)
                else:
                    counts = pattern.multiplicity(torch.tensor(row, device=self.device), key_at, head)
                    allowed = counts > 0
                if case.is_causal:
                    allowed = allowed & (key_at <= row)
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

    def both(name: str) -> None:
        problem.gradients(runs[name], name)

    for name in [x for x in runs if x != "ours"]:
        try:
            both(name)
        except Exception as problem_of_peer:
            reasons[name] = told(problem_of_peer)
            del runs[name]
    for key, calls in (("ms", [torch.no_grad()(x) for x in runs.values()]), ("with_backward_ms", None)):
        took = in_turns(calls or [partial(both, name) for name in runs], device)
        line[key] = dict(zip(runs, (1e3 * x for x in took), strict=True))
        line[key.replace("ms", "ratios")] = {x: t / took[0] for x, t in zip(runs, took, strict=True) if x != "ours"}
        if problem.flops is not None:
            flops = problem.flops * (1.0 if calls else 3.5)
            line[key.replace("ms", "tflops")] = {x: 1e-12 * flops / t for x, t in zip(runs, took, strict=True)}
    if problem.flops is not None:
        line["choosing_ms"] = 1e3 * in_turns([problem.select], device)[0]
    if case.has_host_time:
        line |= time_whole_call(runs["ours"], device)
        if "selection" in runs:
            line["selection"] = time_whole_call(runs["selection"], device)
    if case.is_captured and device == "cuda":
        line["in_a_graph"] = in_a_graph(case)
    return line | {"not_run": reasons}


def in_turns(runs: list[Callable[[], Any]], device: str) -> list[float]:
    """Seconds of one call of each, the least of some streams of calls in turns."""
    took = [clock(run, device, 1 + (clock(run, device) < LONG)) for run in runs]
    calls = [min(20, max(1, int(SECONDS / first))) for first in took]
    for i in range(ROUNDS):
        took = [
            best if i and best > LONG else min(best, clock(run, device, many))
            for best, run, many in zip(took, runs, calls, strict=True)
        ]
    return took


def in_a_graph(case: Call) -> Line:
    """Milliseconds of the library's call, captured in a CUDA graph, or why it cannot be."""
    # With leaves of its own: autograd keeps to the stream on which a leaf was first used.
    problem, found = Problem(case, "cuda"), {}
    ours = problem.runs()["ours"]
    passes: dict[str, Run] = {"ms": torch.no_grad()(ours), "with_backward_ms": lambda: problem.gradients(ours)[0]}
    for name, run in passes.items():
        try:
            found[name] = 1e3 * in_turns([captured(run)], "cuda")[0]
        except Exception as reason:
            found[name.replace("ms", "problem")] = told(reason)
    return found


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
            json.dumps({k: line[k] for k in PRINTED if k in line}),
            flush=True,
        )
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
