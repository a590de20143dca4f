"""Language model on C sources: dense at a short length, then the same checkpoint at a long one under four attentions.

    python benchmarks/language_model.py prepare --package linux-source-6.1 --folder build/lm
    python benchmarks/language_model.py train    --folder build/lm --seconds 280
    python benchmarks/language_model.py continue --folder build/lm --seconds 280 --out lm.jsonl
    python benchmarks/language_model.py report   lm.jsonl

`train` uses dense attention. `continue` takes the same number of steps on the same long sequences from that checkpoint
for each row: dense (torch's attention, cuDNN on a GPU), learned (`BlockSparseAdaptive`), frozen (the same with an
untrained scorer) and window (a sliding window and the first block). The last three have one density, counted in pairs
of tokens from the calls that ran. A row is measured on held-out subsystems: loss by position, loss of far tokens
(those whose 8-gram last stood more than `far` tokens back), needles (`#define NAME value` placed early, its value asked
at the end), and seconds of a training step and of attention, in turns with dense.

Every stage goes on where it stopped: checkpoints are in `--folder`, results are lines of JSON in `--out`. The size
"small" takes seconds on a CPU, "medium" minutes; "gpu" has 88 M parameters and sequences of 65,536.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from language_model_data import HELD_OUT, TRAINED, drawn, far_tokens, prepare, tokens_of, with_needles
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention_pytorch import attention
from dilated_attention_pytorch.models import LongNetLM
from dilated_attention_pytorch.nn import (
    AdaptiveConfig,
    BlockSparseAdaptive,
    MultiheadBlockSparseAdaptive,
    MultiheadSparseAttention,
    Rotary,
    scorer_parameters,
    task_parameters,
)
from dilated_attention_pytorch.tools.bench.measure import PeakMemory, clock, digest, facts
from dilated_attention_pytorch.tools.bench.results import append, read_lines
from dilated_attention_pytorch.tools.quality.retrieval import sources
from dilated_attention_pytorch.tools.quality.retrieval_report import spread
from dilated_attention_pytorch.tools.training import use_dense

ROWS = ("dense", "learned", "frozen", "window")
Line = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Model, lengths and settings of one size."""

    vocabulary: int = 16384
    layers: int = 12
    width: int = 768
    heads: int = 12
    key_heads: int = 4
    short: int = 4096
    long: int = 65536
    batch: int = 16
    """sequences of a step at the short length; at the long one it is 1"""
    steps: int = 4000
    long_steps: int = 150
    rate: float = 6e-4
    scorer_rate: float = 1e-3
    warmup: int = 100
    block: int = 128
    score_unit: int = 4
    match_rank: int = 32
    density: float = 0.1
    far: int = 8192
    held_out: int = 16
    """held-out sequences; as many again with needles"""
    needles: int = 12
    """needles of a sequence"""


SIZES = {
    "gpu": Size(),
    "medium": Size(
        vocabulary=1024, layers=4, width=128, heads=4, key_heads=2, short=512, long=4096, batch=8, steps=600,
        long_steps=60, rate=3e-3, block=32, density=0.125, far=1024, held_out=6, needles=6,
    ),
    "small": Size(
        vocabulary=256, layers=1, width=16, heads=2, key_heads=1, short=256, long=1024, batch=2, steps=4, long_steps=2,
        rate=3e-3, warmup=2, block=16, match_rank=8, density=0.25, far=256, held_out=1, needles=2,
    ),
}  # fmt: skip


# model -------------------------------------------------------------------------------------------------------------


@cache
def kept_fraction(density: float, n: int, block: int) -> float:
    """Fraction of blocks to keep for a density in pairs of tokens; early tokens keep their forced blocks anyway."""
    seen = torch.arange(1, n // block + 1).double()

    def counted(kept: float) -> float:
        # Own and first block are forced; of its own block a token sees half in the mean.
        many = torch.minimum(seen, (kept * seen).round().clamp(min=2))
        return float((many - 0.5).sum() / (seen - 0.5).sum())

    return min((x / 1024 for x in range(1, 1024)), key=lambda kept: abs(counted(kept) - density))


@cache
def window_width(density: float, n: int, sink: int) -> int:
    """Window whose pairs, with those of `sink` first tokens, are the density of a causal sequence."""
    return min(range(1, n), key=lambda width: abs(window_density(width, n, sink) - density))


def window_density(width: int, n: int, sink: int) -> float:
    """Pairs of `window:width,0 | global:sink`, causal, over those of causal attention."""
    token = np.arange(n)
    near = np.minimum(token, width) + 1
    return float((near + np.minimum(token + 1 - near, sink)).sum() / (n * (n + 1) / 2))


def model_of(row: str, size: Size, device: str) -> LongNetLM:
    """Model of a row. Parameters have the same names in all rows; learned and frozen have scorers besides."""
    config: Line = {"patterns": ("full",)}
    if row == "window":
        config = {"patterns": (f"window:{window_width(size.density, size.long, size.block)},0 | global:{size.block}",)}
    if row in ("learned", "frozen"):
        settings = AdaptiveConfig(
            base_sparsity=1 - kept_fraction(size.density, size.long, size.block),
            local_blocks=1,
            score_unit=size.score_unit,
            match_rank=size.match_rank,
            score_gradient="distill" if row == "learned" else "none",
        )
        config = {"adaptive": settings, "adaptive_block_size": size.block}
    model = LongNetLM(
        num_tokens=size.vocabulary,
        d_model=size.width,
        nhead=size.heads,
        num_kv_heads=size.key_heads,
        num_decoder_layers=size.layers,
        dim_feedforward=4 * size.width,
        # One base for both lengths, so that rows continue from unchanged positions.
        position=Rotary(base=500_000.0),
        device=device,
        **config,
    )
    if row == "dense":
        use_dense(model)
    return model


def precision(device: str) -> Any:
    """bfloat16 with float32 parameters on a GPU; cuDNN before flash for torch's attention."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


def dense_first(device: str) -> Any:
    """Order of torch's attention backends."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True) if device == "cuda" else nullcontext()


def counted_density(model: nn.Module, row: str, size: Size) -> float:
    """Pairs of tokens that the last call of a model attended to, over those of causal attention; mean over layers."""
    if row == "dense":
        return 1.0
    if row == "window":
        return window_density(window_width(size.density, size.long, size.block), size.long, size.block)
    cores = [x for x in model.modules() if isinstance(x, BlockSparseAdaptive)]
    blocks = statistics.mean(core.statistics()["density"] for core in cores)
    # Every token lacks the same pairs of its own block in both counts.
    visible, lacking = sum(range(1, size.long // size.block + 1)) * size.block**2, size.long * (size.block - 1) / 2
    return (blocks * visible - lacking) / (visible - lacking)


class Trainer:
    """A model, its optimizer and its checkpoint."""

    def __init__(self, row: str, size: Size, path: Path, device: str) -> None:
        self.row, self.size, self.path, self.device, self.step_count, self.tokens = row, size, path, device, 0, 0
        self.densities: list[float] = []
        self.model = model_of(row, size, device)
        self.groups = [x for x in (task_parameters(self.model), scorer_parameters(self.model)) if x]
        rates = (size.rate, size.scorer_rate)
        groups = [{"params": x, "lr": rate, "rate": rate} for x, rate in zip(self.groups, rates, strict=False)]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")

    def save(self) -> None:
        """Write the checkpoint as a whole."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state = parts | {"step": self.step_count, "tokens": self.tokens, "densities": self.densities}
        torch.save(state, self.path.with_suffix(".part"))
        self.path.with_suffix(".part").replace(self.path)

    def load(self, start: Path | None = None) -> Trainer:
        """Go on from the checkpoint where there is one, otherwise from the weights of another."""
        if self.path.exists():
            state = torch.load(self.path, weights_only=True, map_location=self.device)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step_count, self.tokens, self.densities = state["step"], state["tokens"], state["densities"]
        elif start is not None:
            state = torch.load(start, weights_only=True, map_location=self.device)["model"]
            missing, unexpected = self.model.load_state_dict(state, strict=False)
            assert not unexpected and all("scorer" in name for name in missing), (missing, unexpected)
        return self

    def step(self, batch: Tensor, factor: float = 1.0) -> float:
        """One step; the loss in nats."""
        self.model.train()
        self.optimizer.zero_grad()
        with precision(self.device), dense_first(self.device):
            loss = self.model.loss(batch[:, :-1], batch[:, 1:])
            loss.backward()
        for group in self.groups:
            nn.utils.clip_grad_norm_(group, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * factor
        self.optimizer.step()
        return float(loss.detach())

    def run(self, steps: int, deadline: float, batch: Callable[[int], Tensor], rate: Callable[[int], float]) -> bool:
        """Step until the number of steps or the deadline; whether all steps were taken. Saves in both cases."""
        begun, first, loss = time.monotonic(), self.step_count, float("nan")
        try:
            while self.step_count < steps and time.monotonic() < deadline:
                loss = self.step(drawn_batch := batch(self.step_count), rate(self.step_count))
                self.step_count += 1
                self.tokens += drawn_batch.numel() - len(drawn_batch)
                if drawn_batch.shape[1] > self.size.short + 1:
                    self.densities.append(counted_density(self.model, self.row, self.size))
                if self.step_count % 20 == 0 or self.step_count == steps:
                    took = (time.monotonic() - begun) / (self.step_count - first)
                    print(
                        f"{self.path.stem}: step {self.step_count}/{steps} loss {loss:.3f}, {took:.3f} s/step",
                        flush=True,
                    )
        finally:
            if self.step_count > first:
                self.save()
        return self.step_count >= steps


# measurements ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measured(trainer: Trainer, held_out: Tensor, needles: list[Any]) -> Line:
    """Losses on held-out sequences, and right answers to needles."""
    size, device, model = trainer.size, trainer.device, trainer.model.eval()
    n, edges = size.long, [0, size.short]
    while edges[-1] < n:
        edges.append(min(2 * edges[-1], n))
    places = torch.linspace(0, len(held_out) - n - 1, size.held_out).long().tolist()
    losses, far, right, asked, draw = [], [], 0, 0, random.Random(7)
    with precision(device), dense_first(device):
        for at in places:
            batch = held_out[None, at : at + n + 1].long().to(device)
            losses.append(model.loss(batch[:, :-1], batch[:, 1:], reduction="none")[0].double().cpu().numpy())
            far.append(far_tokens(batch[0].cpu().numpy(), size.far)[1:])
            read, answers = with_needles(batch[0, :-1], needles, size.needles, draw)
            hidden = model.hidden(read[None])[0]
            for place in answers:
                guess = model.out(hidden[place - 1]).argmax(-1)
                right, asked = right + int((guess == read[place]).all()), asked + 1
    loss, is_far = np.stack(losses), np.stack(far)
    by_position = {f"{low}-{high}": float(loss[:, low:high].mean()) for low, high in pairwise(edges)}
    result: Line = {"loss": float(loss.mean()), "loss_by_position": by_position, "far_tokens": int(is_far.sum())}
    result["far_loss"] = float(loss[is_far].mean()) if is_far.any() else None
    return result | {
        "needle_accuracy": right / asked,
        "needles": asked,
        "density": counted_density(model, trainer.row, size),
    }


def attention_call(trainer: Trainer, batch: Tensor) -> Callable[[], None]:
    """Forward and backward of the middle layer's attention alone, on the queries, keys and values of a model."""
    modules = [x for x in trainer.model.modules() if isinstance(x, MultiheadSparseAttention)]
    module, inputs = modules[len(modules) // 2], []
    handle = module.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with torch.no_grad(), precision(trainer.device), dense_first(trainer.device):
        trainer.model.train().hidden(batch[:, :-1])
        handle.remove()
        q, k, v = module.project(*[inputs[0]] * 3)
        assert module.position is not None
        q, k = module.position.apply(q, k, torch.arange(q.shape[2], device=q.device)[None], q.shape[-1] ** -0.5)
    dtype = torch.bfloat16 if trainer.device == "cuda" else q.dtype
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    gradient = torch.randn_like(q)

    def call() -> None:
        if isinstance(module, MultiheadBlockSparseAdaptive):
            output = module.core(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
        elif trainer.row == "dense":
            with dense_first(trainer.device):
                output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            output = attention(q, k, v, module.pattern, is_causal=True, enable_gqa=True)
        output.backward(gradient)

    return call


def timed(trainer: Trainer, dense: Trainer, batch: Tensor, rounds: int) -> Line:
    """Seconds of steps and of attention, medians of calls in turns with dense attention, and peak memory of a step."""
    result: Line = {}
    pairs = {"step": [lambda x=x: x.step(batch, 0.0) for x in (trainer, dense)]}
    with PeakMemory(trainer.device) as peak:
        trainer.step(batch, 0.0)
    pairs["attention"] = [attention_call(x, batch) for x in (trainer, dense)]
    for name, calls in pairs.items():
        for call in calls:
            call()
        took = [[clock(call, trainer.device) for call in calls] for _ in range(rounds)]
        ours, others = (statistics.median(x) for x in zip(*took, strict=True))
        result |= {f"{name}_seconds": ours, f"dense_{name}_seconds": others, f"{name}_speedup": others / ours}
    return result | {"peak_bytes": peak.total}


# stages ------------------------------------------------------------------------------------------------------------


def train(given: argparse.Namespace, size: Size) -> int:
    """Dense attention at the short length, at a constant rate, so that it may end at any step."""
    tokens, deadline = tokens_of(given.folder / "train.xz"), time.monotonic() + given.seconds
    torch.manual_seed(given.seed)
    trainer = Trainer("dense", size, given.folder / f"dense-{size.short}-{given.seed}.pt", given.device).load()
    print(f"{trainer.model.num_parameters:,} parameters, {len(tokens):,} tokens", flush=True)
    trainer.run(
        given.steps or size.steps,
        deadline,
        lambda step: drawn(tokens, size.short, size.batch, 10**6 * (given.seed + 1) + step, given.device),
        lambda step: min(1.0, (step + 1) / size.warmup),
    )
    print(f"{trainer.step_count} steps, {trainer.tokens:,} tokens", flush=True)
    return 0


def go_on(given: argparse.Namespace, size: Size) -> int:
    """Every row from the dense checkpoint: the same steps at the long length, then the measurements."""
    deadline, start = time.monotonic() + given.seconds, given.folder / f"dense-{size.short}-{given.seed}.pt"
    if not start.exists():
        sys.exit(f"expected the checkpoint {start}; run train first")
    tokens, held_out = (tokens_of(given.folder / f"{name}.xz") for name in ("train", "held_out"))
    needles = json.loads((given.folder / "vocabulary.json").read_text())["needles"]
    steps = given.steps or size.long_steps
    size = replace(size, long_steps=steps)
    known = {(x["row"], x["seed"], x["size"]) for x in (read_lines([given.out]) if given.out.exists() else [])}
    code = {
        "sources": sources(),
        "script": digest([Path(__file__), Path(__file__).with_name("language_model_data.py")]),
    }
    for row in given.rows:
        if (row, given.seed, given.size) in known:
            continue
        torch.manual_seed(given.seed)
        trainer = Trainer(row, size, given.folder / f"{row}-{size.long}-{given.seed}.pt", given.device).load(start)
        batches = lambda step: drawn(tokens, size.long, 1, 10**9 + 10**6 * given.seed + step, given.device)  # noqa: E731
        done = trainer.run(steps, deadline, batches, lambda step: 0.5 * (1 - 0.9 * step / steps))
        if not done:
            print(f"{row}: {trainer.step_count} of {steps} steps; run the same command again", flush=True)
            return 0
        line: Line = {"task": "language model", "size": given.size, "row": row, "seed": given.seed}
        line |= {"settings": asdict(size), "parameters": trainer.model.num_parameters, "long_tokens": trainer.tokens}
        line["training_density"] = statistics.mean(trainer.densities)
        line |= measured(trainer, held_out, needles)
        other = Trainer("dense", size, start, given.device).load()
        line["short_tokens"] = other.tokens
        line |= timed(trainer, other, batches(steps), given.rounds)
        line |= code | facts(given.device)
        append(given.out, line)
        shown = ("density", "loss", "far_loss", "needle_accuracy", "step_speedup", "attention_speedup")
        print(row, {name: line[name] and round(line[name], 4) for name in shown}, flush=True)
        del trainer, other
    return 0


def table(lines: list[Line]) -> list[str]:
    """Markdown table of one size: means over seeds; retained is 0 for the window and 1 for dense on far tokens."""
    first = lines[0]
    last = list(first["loss_by_position"])[-1]
    head = f"| row | counted density | loss | loss, tokens {last} | loss, far tokens | retained | needles |"
    text = [f"{head} step | attention |"]
    text += ["|---" * 9 + "|"]

    def mean(row: str, name: str) -> float:
        values = [x["loss_by_position"][last] if name == last else x[name] for x in lines if x["row"] == row]
        return statistics.mean(values) if values else float("nan")

    low, high = mean("window", "far_loss"), mean("dense", "far_loss")
    for row in dict.fromkeys(x["row"] for x in lines):
        mine = [x for x in lines if x["row"] == row]
        losses = [spread([x["loss"] for x in mine]), spread([x["loss_by_position"][last] for x in mine])]
        losses.append(spread([x["far_loss"] for x in mine]))
        density, right = f"{100 * mean(row, 'density'):.1f} %", f"{mean(row, 'needle_accuracy'):.3f}"
        # Where dense attention is not better than a window, there is nothing to retain.
        kept = f"{(low - mean(row, 'far_loss')) / (low - high):.2f}" if high < low else ""
        speed = [f"{mean(row, f'{name}_speedup'):.2f}x" for name in ("step", "attention")]
        cells = [row, density, *losses, kept, right, *speed]
        text.append(f"| {' | '.join(cells)} |")
    return text


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("prepare", "train", "continue", "report"))
    parser.add_argument("results", nargs="*", type=Path, help="files of results, for report")
    parser.add_argument("--size", choices=SIZES, default="gpu")
    parser.add_argument("--folder", type=Path, default=Path("build/lm"), help="data and checkpoints; not under git")
    parser.add_argument("--out", type=Path, default=Path("language_model.jsonl"), help="lines of results")
    parser.add_argument("--package", default="linux-source-6.1", help="Debian package that apt-get downloads")
    parser.add_argument("--sources", type=Path, help="folder of C sources instead of a package")
    parser.add_argument("--trained", nargs="+", default=TRAINED, help="folders of the sources")
    parser.add_argument("--held-out", nargs="+", default=HELD_OUT, help="folders that are never trained on")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--steps", type=int, help="steps of the stage; those of the size by default")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no step after so long")
    parser.add_argument("--rounds", type=int, default=5, help="timings in turns with dense")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    size = SIZES[given.size]
    if given.stage == "report":
        lines = read_lines(given.results)
        for name in dict.fromkeys(x["size"] for x in lines):
            print("\n".join(table([x for x in lines if x["size"] == name])), end="\n\n")
        return 0
    if given.stage == "prepare":
        prepare(given, size.vocabulary)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return {"train": train, "continue": go_on}[given.stage](given, size)
    except KeyboardInterrupt:
        print("stopped; run the same command again to go on", flush=True)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
