"""`dap billion`: one attention layer over a billion tokens, every row computed, chosen rows checked in float64.

    python -m dilated_attention_pytorch.tools.billion --tokens 1073741824 --out FILE

The oracle lists a row's keys from the definition of dilated attention, recomputes them from the token ids and evaluates
their softmax in float64, without plans or chunks. Printed figures are measured in the same run, never extrapolated.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from .bench.results import append
from .console import Parser, device_of, leave, positive, tokens, usual_dtype, whole

if TYPE_CHECKING:
    from torch import Tensor

    from ..nn.streamed import StreamedLayer
    from ..patterns import Dilated

SEGMENT, GROWTH = 2048, 4
"""The first segment, and the factor of segments and rates from branch to branch."""
BUDGET = {"cuda": 16 * 2**30, "cpu": 2**28}
"""Bytes of a chunk's rows by default."""
LARGEST_ERROR = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Accepted error of a checked row, relative to its norm."""


def ladder(n: int) -> Dilated:
    """Segments of 2048 * 4^i at rates of 4^i, up to the first that holds the whole sequence."""
    from ..patterns import Dilated

    steps = 1 + max(0, math.ceil(math.log(n / SEGMENT, GROWTH)))
    rates = tuple(GROWTH**i for i in range(steps))
    return Dilated(tuple(SEGMENT * rate for rate in rates), rates)


def token_ids(n: int, device: str) -> Tensor:
    """Pseudorandom bytes, uint8 (n), equal on all machines."""
    import torch

    from ..patterns.blocks import scramble

    ids = torch.empty(n, dtype=torch.uint8, device=device)
    for begin in range(0, n, 2**24):
        end = min(begin + 2**24, n)
        ids[begin:end] = scramble(torch.arange(begin, end, device=device)) & 255
    return ids


def sample_rows(pattern: Dilated, n: int, heads: int, count: int) -> list[int]:
    """Tokens to check: the edges of first, middle and last segments of every branch, then others evenly spread."""
    from ..patterns.blocks import scramble

    rows = {0, n - 1}
    for index, (segment, rate) in enumerate(pattern.branches):
        last = (n - 1) // segment
        residues = {int(pattern.sampled_residue(index, head)) for head in (0, heads - 1)}
        for number in {0, 1, last // 2, last - 1, last}:
            begin, end = number * segment, min((number + 1) * segment, n)
            # The first and the last token, and the first and the last that a head samples.
            rows |= {begin - 1, begin, end - 1}
            rows |= {begin + residue for residue in residues}
            rows |= {begin + residue + (end - begin - 1 - residue) // rate * rate for residue in residues}
    count = min(count, n)
    # Even steps alone would share their factors with the rates, and so cover few residues.
    rows |= {i * n // count + scramble(i) % max(n // count, 1) for i in range(count)}
    return sorted(row for row in rows if 0 <= row < n)


def keys_of(pattern: Dilated, row: int, head: int, n: int, causal: bool) -> list[range]:
    """Keys of one row by definition, branch by branch: a key of several branches occurs several times."""
    keys = []
    for index, (segment, rate) in enumerate(pattern.branches):
        residue = int(pattern.sampled_residue(index, head))
        begin = row // segment * segment
        if (row - begin) % rate == residue:
            keys.append(range(begin + residue, min(begin + segment, row + 1 if causal else n), rate))
    return keys


class Watch:
    """Sink that stores selected rows of a stream."""

    def __init__(self, rows: list[int], device: str) -> None:
        import torch

        self.rows = rows
        self.index = torch.tensor(rows, device=device)
        self.outputs: list[Tensor] = []
        self.lses: list[Tensor] = []
        self.seen = 0

    def __call__(self, begin: int, output: Tensor, lse: Tensor) -> None:
        m = output.shape[2]
        low, high = bisect_left(self.rows, begin), bisect_left(self.rows, begin + m)
        at = self.index[low:high] - begin
        self.outputs.append(output[0, :, at])
        self.lses.append(lse[0, :, at])
        self.seen += m


def check(layer: StreamedLayer, ids: Tensor, pattern: Dilated, watch: Watch) -> dict[str, float]:
    """Largest errors of the watched rows against float64, and those of torch's dense attention on the same keys."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    output, lse = torch.cat(watch.outputs, 1), torch.cat(watch.lses, 1)
    device, n = output.device, len(ids)
    worst = {"largest_error": 0.0, "sdpa_error": 0.0, "lse_error": 0.0}

    def made(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return layer.heads(layer.embed(ids[tokens.to(ids.device)].to(device), tokens))

    errors: dict[str, list[Tensor]] = {name: [] for name in worst}
    for index, row in enumerate(watch.rows):
        query = made(torch.tensor([row], device=device))[0][0]
        lists = [keys_of(pattern, row, head, n, layer.is_causal) for head in range(layer.num_heads)]
        # Heads share many of their keys, so those of a branch are made once.
        spans = dict.fromkeys(span for spans in lists for span in spans)
        tokens = torch.cat([torch.arange(s.start, s.stop, s.step, device=device) for s in spans])
        first, at = {}, 0
        for span in spans:
            first[span], at = at, at + len(span)
        _, key, value = made(tokens)
        for head, spans_of_head in enumerate(lists):
            own = [slice(first[span], first[span] + len(span)) for span in spans_of_head]
            k, v = (torch.cat([t[0, head, part] for part in own]) for t in (key, value))
            scores = (query[head].double() @ k.double().T) * k.shape[1] ** -0.5
            expected = (scores.softmax(-1) @ v.double())[0]
            norm = expected.norm()
            # Other backends would compile a kernel for every number of keys.
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                dense = scaled_dot_product_attention(query[None, head, None], k[None, None], v[None, None])[0, 0, 0]
            errors["largest_error"].append((output[head, index] - expected).norm() / norm)
            errors["sdpa_error"].append((dense - expected).norm() / norm)
            errors["lse_error"].append((lse[head, index] - scores.logsumexp(-1)[0]).abs())
    for name, values in errors.items():
        all_of_it = torch.stack(values)
        worst[name] = float(all_of_it.max()) if bool(all_of_it.isfinite().all()) else math.inf
    return worst


def identity_gaps(layer: StreamedLayer, grad: Tensor, pooled: Tensor) -> dict[str, float]:
    """Violation of identities that the gradients of the projections satisfy for any inputs.

    A dimension of a head may be scaled in the queries or in the keys, with the same scores: along the scale the two
    gradients are equal, dimension by dimension. So they are for the values and the output projection, where they add up
    to the loss, which is linear in both.
    """

    def along(weight: Tensor, dim: int) -> Tensor:
        assert weight.grad is not None
        return (weight.detach().double() * weight.grad.double()).sum(dim)

    by_query, by_key, by_value = along(layer.projection.weight, 1).view(3, -1)
    by_output = along(layer.output.weight, 0)
    loss = (grad.double() * pooled.double()).sum()
    return {
        "query_key_gap": float((by_query - by_key).norm() / by_key.norm()),
        "value_output_gap": float((by_value - by_output).norm() / by_output.norm()),
        "loss_gap": float((by_output.sum() - loss).abs() / loss.abs()),
    }


def layer_of(options: argparse.Namespace, device: str, dtype: str) -> StreamedLayer:
    """Layer of a run; with `--backward` its projections require gradients."""
    import torch

    from ..nn.streamed import StreamedLayer

    torch.manual_seed(options.seed)
    layer = StreamedLayer(
        options.heads * options.head_dim,
        options.heads,
        ladder(options.tokens),
        max_tokens=options.tokens,
        is_causal=options.causal,
        backend=options.backend,
        device=device,
        dtype=getattr(torch, dtype),
    )
    layer.requires_grad_(False)
    for linear in (layer.projection, layer.output):
        linear.requires_grad_(options.backward)
    return layer


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the layer, check it, and return the measurements."""
    import torch

    from .bench.measure import PeakMemory, facts, synchronize

    device = device_of(options.device)
    dtype = options.dtype or usual_dtype(device)
    pattern = ladder(options.tokens)
    layer = layer_of(options, device, dtype)
    budget = int((options.memory or 0) * 2**30) or BUDGET[device]
    how = {"memory_budget": budget} if options.chunk is None else {"chunk": options.chunk}
    watch = Watch(sample_rows(pattern, options.tokens, options.heads, options.rows), device)
    result: dict[str, Any] = {}
    with PeakMemory(device) as peak:
        ids = token_ids(options.tokens, device)
        synchronize(device)
        began = time.perf_counter()
        pooled = layer(ids, progress=True, observe=watch, **how)
        synchronize(device)
        result["seconds"] = time.perf_counter() - began
        if options.backward:
            grad = pooled.detach() / pooled.detach().norm()
            began = time.perf_counter()
            pooled.backward(grad)
            synchronize(device)
            result["backward_seconds"] = time.perf_counter() - began
            result |= identity_gaps(layer, grad, pooled.detach())
    result["peak_bytes"] = peak.total
    result["finite"] = bool(pooled.isfinite().all())
    began = time.perf_counter()
    with torch.no_grad():
        result |= check(layer, ids, pattern, watch)
    result["check_seconds"] = time.perf_counter() - began
    result["rows_computed"], result["rows_checked"] = watch.seen, len(watch.rows)
    result["tokens_per_second"] = options.tokens / result["seconds"]
    result["error_allowed"] = LARGEST_ERROR[dtype]
    if dtype in ("bfloat16", "float16"):
        # Rounding of the inputs dominates there, for dense attention as well.
        result["error_allowed"] = min(LARGEST_ERROR[dtype], 2 * result["sdpa_error"])
    result["passed"] = (
        result["finite"]
        and watch.seen == options.tokens
        and result["largest_error"] <= result["error_allowed"]
        and all(result[name] <= LARGEST_ERROR[dtype] for name in result if name.endswith("_gap"))
    )
    return {
        "case": "billion",
        "tokens": options.tokens,
        "heads": options.heads,
        "head_dim": options.head_dim,
        "dtype": dtype,
        "causal": options.causal,
        "backend": options.backend,
        "pattern": str(pattern),
        **how,
        **result,
        **facts(device),
    }


def describe(line: dict[str, Any]) -> str:
    """A result as text."""
    from .html_page import readable_bytes

    most = line["error_allowed"]
    words = [
        f"{line['tokens']:,} tokens, {line['heads']} heads x {line['head_dim']}, {line['dtype']}, {line['device']}",
        f"forward       {line['seconds']:.1f} s, {line['tokens_per_second']:,.0f} tokens per second",
        f"peak memory   {'unknown' if line['peak_bytes'] is None else readable_bytes(line['peak_bytes'])}",
        f"rows          {line['rows_computed']:,} computed, {line['rows_checked']:,} checked in float64, every head",
        f"largest error {line['largest_error']:.2e} of a row's norm (at most {most:.1e}), LSE {line['lse_error']:.1e}",
        f"dense SDPA    {line['sdpa_error']:.2e} on the same rows and keys",
    ]
    if "backward_seconds" in line:
        gaps = ", ".join(f"{name[:-4].replace('_', ' / ')} {line[name]:.1e}" for name in line if name.endswith("_gap"))
        words.append(f"backward      {line['backward_seconds']:.1f} s; identities of the gradients hold to {gaps}")
    return "\n".join([*words, "passed" if line["passed"] else "FAILED"])


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 if a check failed."""
    parser = Parser("dap billion", "Stream one attention layer over a billion tokens; check sampled rows in float64.")
    parser.tokens(default=2**30)
    parser.heads()
    parser.option("--head-dim", read=whole(1), default=64, help="width of a head")
    parser.device()
    parser.dtype()
    parser.option("--backend", default="auto", metavar="NAME", help="auto, or the name of a backend")
    parser.option("--causal", action="store_true", help="also require the key not to come after the query")
    parser.option("--backward", action="store_true", help="stream a second time for the projections' gradients")
    parser.option("--rows", read=tokens, default=1024, help="rows to check, of every head")
    parser.option("--chunk", read=tokens, help="rows computed at a time")
    parser.option("--memory", read=positive, metavar="GIB", help="memory of a chunk's rows, when --chunk is not given")
    parser.option("--seed", type=int, default=0, metavar="N", help="seed of the weights")
    parser.out("JSONL file to add the result to")
    parser.json("print the result as JSON")
    options = parser.read(arguments)
    line = run(options)
    if options.out is not None:
        append(options.out, line)
    print(json.dumps(line) if options.json else describe(line))
    return 0 if line["passed"] else 1


if __name__ == "__main__":
    leave(main)
