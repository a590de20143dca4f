"""Models against themselves with dense attention.

    PYTHONPATH=src python benchmarks/models.py --device cpu --out benchmarks/results/models_cpu.jsonl

Both run in one process, turn about, with the same weights; dense attention is torch's scaled_dot_product_attention,
with whatever kernel it chooses. What is reported is the median over the rounds of the ratio of their times. A model is
timed after a short sequence agrees with its twin in float64 on the reference backend. Standard library and torch only.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.models import LongNetConfig, LongNetLM, SlideConfig, SlideEncoder
from dilated_attention_pytorch.nn import MultiheadSparseAttention
from dilated_attention_pytorch.tools.measure import PeakMemory, clock, facts
from dilated_attention_pytorch.tools.train import use_dense

GATE_TOKENS = 1024
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 5e-2}
Line = dict[str, Any]


def gate(model: nn.Module, call: Callable[[nn.Module, torch.dtype], Tensor], dtype: torch.dtype) -> float:
    """Largest error, relative to the largest output, of a model's output against its float64 twin."""
    twin = copy.deepcopy(model).double()
    for module in twin.modules():
        if isinstance(module, MultiheadSparseAttention):
            module.backend = "reference"
    with torch.no_grad():
        wanted, got = call(twin, torch.float64), call(model, dtype).double()
    return float((got - wanted).abs().max() / wanted.abs().max())


def dense_twin(model: nn.Module) -> nn.Module:
    """The same weights with dense attention."""
    twin = copy.deepcopy(model)
    use_dense(twin)
    return twin


def turn_about(runs: dict[str, Callable[[], object]], device: str, rounds: int) -> Line:
    """Seconds and peak bytes of each, and how many times as long the second takes."""
    line: Line = {}
    for name, run in runs.items():
        run()
        with PeakMemory(device) as peak:
            run()
        line[f"{name}_peak_bytes"] = peak.total if device == "cuda" else peak.extra
    times = [{name: clock(run, device) for name, run in runs.items()} for _ in range(rounds)]
    for name in runs:
        line[f"{name}_s"] = statistics.median(time[name] for time in times)
    if len(runs) == 2:
        ours, theirs = runs
        line["speedup"] = statistics.median(time[theirs] / time[ours] for time in times)
    return line


def language_model(device: str, n: int, rounds: int) -> Line:
    """Forward and backward of the tiny language model, float32."""
    torch.manual_seed(0)
    model = LongNetLM("tiny", device=device)
    tokens = torch.randint(256, (1, n), device=device)
    off = gate(model, lambda m, _: m(tokens[:, :GATE_TOKENS]), torch.float32)
    line: Line = {"case": "LongNetLM tiny, forward + backward", "n": n, "dtype": "float32", "gate": off}
    if off > TOLERANCE[torch.float32]:
        return {**line, "passed": False}
    dense = dense_twin(model)
    line |= turn_about(
        {"ours": lambda: model.loss(tokens).backward(), "dense": lambda: dense.loss(tokens).backward()}, device, rounds
    )
    return {**line, "bar": {"at_least": 3.0}, "passed": line["speedup"] >= 3.0}


def slide(device: str, tiles: int, with_dense: bool, rounds: int, dtype: torch.dtype = torch.bfloat16) -> Line:
    """Forward of the 12 x 768 slide encoder."""
    torch.manual_seed(0)
    model = SlideEncoder(device=device).eval()
    side = int(tiles**0.5) + 1
    cells = torch.stack([torch.arange(tiles) // side, torch.arange(tiles) % side], -1)
    x, coords = torch.randn(1, tiles, 1536, device=device, dtype=dtype), 256 * cells.to(device)[None]

    def short(encoder: nn.Module, work: torch.dtype) -> Tensor:
        return encoder(x[:, :GATE_TOKENS].to(work), coords[:, :GATE_TOKENS])

    model = model.to(dtype)
    off = gate(model, short, dtype)
    line: Line = {"case": "SlideEncoder 12 x 768, forward", "n": tiles, "dtype": str(dtype), "gate": off}
    if off > TOLERANCE[dtype]:
        return {**line, "passed": False}
    runs: dict[str, Callable[[], object]] = {"ours": torch.no_grad()(lambda: model(x, coords))}
    dense = dense_twin(model) if with_dense else None
    if dense is not None:
        runs["dense"] = torch.no_grad()(lambda: dense(x, coords))
    line |= turn_about(runs, device, rounds)
    if device == "cuda":
        # The twin's weights are held as well; they are not the model's to answer for.
        held = 0 if dense is None else sum(p.numel() * p.element_size() for p in dense.parameters())
        line["predicted_bytes"] = SlideConfig().memory(tiles, dtype.itemsize)
        line["peak_over_predicted"] = (line["ours_peak_bytes"] - held) / line["predicted_bytes"]
    if not with_dense:
        return {**line, "passed": True}
    near = abs(line.get("peak_over_predicted", 1.0) - 1) <= 0.05
    return {**line, "bar": {"at_least": 5.0, "memory": 0.05}, "passed": line["speedup"] >= 5.0 and near}


def training(device: str, n: int, dense: bool) -> Line:
    """A training step of the base model with checkpointed layers, bfloat16 products."""
    torch.manual_seed(0)
    config = LongNetConfig.named("base", gradient_checkpointing=True)
    model: Any = LongNetLM(config, device=device)
    if dense:
        use_dense(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.randint(256, (1, n), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    name = "dense" if dense else "ours"
    line: Line = {"case": f"LongNetLM base, training step, {name}", "n": n, "dtype": "bfloat16"}
    try:
        line |= turn_about({name: step}, device, 2)
    except torch.cuda.OutOfMemoryError:
        return {**line, "passed": True, "out_of_memory": True}
    return {**line, "tokens_per_s": n / line[f"{name}_s"], "passed": True}


def cases(device: str, small: bool, rounds: int) -> Iterator[Line]:
    """What is measured on a device; `small` is a rehearsal of every case."""
    yield language_model(device, 2048 if small else 16384, rounds)
    if device == "cuda" and not small:
        yield slide(device, 65536, True, rounds)
        yield slide(device, 1_000_000, False, 1)
        for n, dense in ((262144, False), (262144, True), (65536, True), (65536, False)):
            torch.cuda.empty_cache()
            yield training(device, n, dense)
    elif device == "cuda":
        yield slide(device, 4096, True, rounds)
        yield training(device, 4096, False)
    else:
        yield slide(device, 1024 if small else 10_000, not small, 1, torch.float32)


def main() -> int:
    """Measure, write a line each, say what passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="rehearse every case at a short length")
    arguments = parser.parse_args()
    passed = True
    for line in cases(arguments.device, arguments.small, arguments.rounds):
        line |= facts(arguments.device)
        text = json.dumps(line)
        print(text, flush=True)
        passed &= bool(line["passed"])
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            with arguments.out.open("a") as file:
                file.write(text + "\n")
    return 0 if passed or arguments.small else 1


if __name__ == "__main__":
    sys.exit(main())
