"""Models against themselves with dense attention.

    PYTHONPATH=src python benchmarks/models.py --device cpu --only language --out benchmarks/results/models_cpu.jsonl

Both run in one process, turn about, with the same weights; dense attention is torch's scaled_dot_product_attention, on
a GPU with cuDNN's kernel where that takes the call, else FlashAttention's. What is reported is the median over the
rounds of the ratio of their times; on a CPU that others use too, the ratio of processor times says more than the one
of wall times, and both are told. A model is timed after a short sequence agrees with its twin in float64 on the
reference backend. A case that fails leaves a line and the others run. Standard library and torch only.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention_pytorch.models import LongNetConfig, LongNetLM, SlideConfig, SlideEncoder
from dilated_attention_pytorch.nn import MultiheadSparseAttention
from dilated_attention_pytorch.tools.bench.measure import PeakMemory, clock, facts
from dilated_attention_pytorch.tools.training import use_dense

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


def dense_kernel(device: str, width: int, dtype: torch.dtype) -> SDPBackend | None:
    """The kernel that dense attention is held to on a GPU; None for torch's own choice."""
    if device != "cuda":
        return None
    trial = torch.zeros(1, 1, 256, width, device=device, dtype=dtype, requires_grad=True)
    for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(kernel):
                F.scaled_dot_product_attention(trial, trial, trial).sum().backward()
        except RuntimeError:
            continue
        return kernel
    return None


def held_to(kernel: SDPBackend | None, run: Callable[[], object]) -> Callable[[], object]:
    """`run` with one kernel of scaled_dot_product_attention."""
    if kernel is None:
        return run

    def alone() -> None:
        with sdpa_kernel(kernel):
            run()

    return alone


def turn_about(runs: dict[str, Callable[[], object]], device: str, rounds: int) -> Line:
    """Seconds and peak bytes of each, and how many times as long the second takes."""
    line: Line = {"rounds": rounds}
    times: dict[str, list[float]] = {name: [] for name in runs}
    busy: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for index in range(rounds):
        for name, run in runs.items():
            with PeakMemory(device) as peak:
                begun = time.process_time()
                times[name].append(clock(run, device))
                busy[name].append(time.process_time() - begun)
            if not index:
                line[f"{name}_peak_bytes"] = peak.total if device == "cuda" else peak.extra
    for name in runs:
        line[f"{name}_s"] = statistics.median(times[name])
    if len(runs) == 2:
        for what, taken in (("speedup", times), ("processor_speedup", busy)):
            ours, theirs = taken.values()
            if taken is times or device == "cpu":
                line[what] = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
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
    # The smallest square that holds them: a million fill the encoder's grid to the last cell.
    side = math.isqrt(tiles - 1) + 1
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
        kernel = dense_kernel(device, model.config.d_model // model.config.nhead, dtype)
        line["dense_kernel"] = kernel and kernel.name
        runs["dense"] = held_to(kernel, torch.no_grad()(lambda: dense(x, coords)))
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


def training(device: str, n: int, dense: bool, rounds: int, size: str = "base") -> Line:
    """A training step of a language model with checkpointed layers, bfloat16 products."""
    torch.manual_seed(0)
    config = LongNetConfig.named(size, gradient_checkpointing=True)
    model: Any = LongNetLM(config, device=device)
    if dense:
        use_dense(model)
    kernel = dense_kernel(device, config.head_dim, torch.bfloat16) if dense else None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.randint(256, (1, n), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    name = "dense" if dense else "ours"
    line: Line = {"case": f"LongNetLM {size}, training step, {name}", "n": n, "dtype": "bfloat16"}
    line["dense_kernel"] = kernel and kernel.name
    line |= turn_about({name: held_to(kernel, step)}, device, rounds)
    return {**line, "tokens_per_s": n / line[f"{name}_s"], "passed": True}


def attempt(case: Callable[[], Line], about: Line) -> Line:
    """What a case tells, or that it failed."""
    try:
        return case()
    except torch.OutOfMemoryError:
        failed: Line = {"out_of_memory": True}
    except Exception as error:
        # Whatever stopped it, the cases after it can still be measured.
        traceback.print_exc()
        failed = {"error": f"{type(error).__name__}: {error}"[:400]}
    return {**about, **failed, "passed": False}


def slides(device: str, small: bool) -> dict[int, bool]:
    """Tiles of each slide, and whether dense attention is run on it as well."""
    if device == "cuda":
        return {1024: True, 2048: False} if small else {65536: True, 1_000_000: False}
    return {256: True, 512: False} if small else {10_000: True}


def cases(device: str, small: bool, rounds: int, only: str | None, only_tiles: int | None) -> Iterator[Line]:
    """What is measured on a device; `small` is a rehearsal of every case."""
    cuda = device == "cuda"
    if only == "language" or (only is None and not cuda):
        n = 2048 if small else 16384
        yield attempt(lambda: language_model(device, n, rounds), {"case": "LongNetLM tiny", "n": n})
    if only in (None, "slide"):
        kind = torch.bfloat16 if cuda else torch.float32
        for tiles, dense in slides(device, small).items():
            if only_tiles not in (None, tiles):
                continue
            about = {"case": "SlideEncoder 12 x 768, forward", "n": tiles}
            yield attempt(partial(slide, device, tiles, dense, rounds if dense else 1, kind), about)
            _forget(device)
    if only == "training" or (only is None and (cuda or small)):
        yield from _trainings(device, small)


def _trainings(device: str, small: bool) -> Iterator[Line]:
    """Training at the longest length, and dense attention's: as long, or the longest that it can do."""
    longest, size = (512, "tiny") if small else (262144, "base")
    for dense in (False, True):
        for n in (longest, longest // 2, longest // 4):
            about = {"case": f"LongNetLM {size}, training step, {'dense' if dense else 'ours'}", "n": n}
            line = attempt(partial(training, device, n, dense, 1 if dense else 2, size), about)
            _forget(device)
            # Dense attention may run out of memory where ours must not.
            yield {**line, "passed": line["passed"] or (dense and "out_of_memory" in line)}
            if "out_of_memory" not in line:
                break


def _forget(device: str) -> None:
    """Give back what a case held."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main() -> int:
    """Measure, write a line each, say what passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("language", "slide", "training"), help="this case alone")
    parser.add_argument("--tiles", type=int, help="with --only slide, the slide of this many tiles alone")
    parser.add_argument("--small", action="store_true", help="rehearse every case at a short length")
    arguments = parser.parse_args()
    known = slides(arguments.device, arguments.small)
    if arguments.tiles is not None and (arguments.only != "slide" or arguments.tiles not in known):
        parser.error(f"--tiles must come with --only slide and be one of {[*known]}, got {arguments.tiles}")
    passed = True
    for line in cases(arguments.device, arguments.small, arguments.rounds, arguments.only, arguments.tiles):
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
