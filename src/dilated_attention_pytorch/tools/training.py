"""Training runs of `dap train`: corpus, steps, checkpoints, logs."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ..atomic_write import write_whole
from ..errors import must
from ..models import LongNetLM
from ..models.checkpoints import read_torch
from ..models.layers import DilatedTransformerLayer
from ..nn import MultiheadSparseAttention, scorer_parameters, set_process_group, task_parameters
from . import train_checkpoints
from .bench.results import append, read_lines
from .console import device_of
from .html_page import readable_bytes
from .train_settings import SAVED, TrainSettings, is_restarted

HELD_OUT = 0.05
"""Share of the file, at its end, that is never trained on."""
LEAST_BYTES = 64
DEMO_BYTES = 16 << 20


def demo_corpus(target: Path, most: int = DEMO_BYTES) -> Path:
    """A text that every Python installation has: the sources of its standard library, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))
    if not files:
        raise must("this Python must have the sources of its standard library", f"none in {root}", "Give --data FILE.")

    def write(temporary: str) -> None:
        left = most
        with open(temporary, "wb") as corpus:
            for path in files:
                text = path.read_bytes()[:left]
                left -= corpus.write(text)
                if left <= 0:
                    return

    write_whole(target, write)
    return target


class Corpus:
    """A memory-mapped file of bytes; its end is held out."""

    def __init__(self, path: Path, context: int, seed: int) -> None:
        if not path.is_file():
            raise must("data must be a file", path)
        size = path.stat().st_size
        if size < LEAST_BYTES:
            raise must(f"data must be at least {LEAST_BYTES} bytes", size)
        self.bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        self.trained = size - int(size * HELD_OUT)
        self.context, self.seed = context, seed

    @property
    def wraps(self) -> bool:
        """Whether a sequence is longer than the part of the file that it is read from."""
        return len(self.bytes) - self.trained < self.context + 2

    def window(self, index: int) -> Tensor:
        """Training sequence number `index`: int64 (context + 1), from a place drawn for it alone."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        starts = self.trained - self.context
        start = int(torch.randint(starts if starts > 0 else self.trained, (1,), generator=generator))
        return self._read(self.bytes[: self.trained], start)

    def held_out(self, index: int) -> Tensor:
        """Held-out sequence number `index`: one after another, and from the beginning again."""
        part = self.bytes[self.trained :]
        starts = len(part) - self.context
        return self._read(part, index * (self.context + 1) % (starts if starts > 0 else len(part)))

    def _read(self, part: Tensor, start: int) -> Tensor:
        """`context + 1` bytes of one part; a part that is too short is read from its beginning again."""
        if start + self.context < len(part):
            return part[start : start + self.context + 1].long()
        return part[(start + torch.arange(self.context + 1)) % len(part)].long()


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Up for `warmup` steps, then along a cosine to a tenth."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    along = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, along))))


def use_dense(model: torch.nn.Module) -> None:
    """Let every attention module of a model call torch's scaled_dot_product_attention; its pattern must be full."""

    def dense(
        q: Tensor, k: Tensor, v: Tensor, pattern: object, *, is_causal: bool, scale: float, **rest: Any
    ) -> Tensor:
        hidden = rest["key_padding_mask"]
        seen = None if hidden is None else ~hidden[:, None, None]
        if seen is not None and is_causal:
            seen = seen & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        settings = {"is_causal": is_causal and seen is None, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        return F.scaled_dot_product_attention(q, k, v, seen, rest["dropout_p"], **settings)

    for module in model.modules():
        if isinstance(module, MultiheadSparseAttention):
            module._operation = lambda *_: dense  # pyrefly: ignore


def shard(model: LongNetLM, device: torch.device) -> None:
    """Spread parameters, gradients and moments over all ranks by FSDP2; gradients are summed, not averaged."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = [module for module in model.modules() if isinstance(module, DilatedTransformerLayer)]
    for module in (*layers, model):
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


class Run:
    """A training run on this rank."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        self.device = torch.device(device_of(settings.device))
        if self.device.type == "cuda" and self.world > 1:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        self.half = settings.dtype == "bfloat16" or (settings.dtype == "auto" and self.device.type == "cuda")
        self.split = self.world if self.world > 1 and settings.parallel == "context" else 1
        if settings.batch % (self.world // self.split) or settings.context % self.split:
            what, came = ("context", settings.context) if self.split > 1 else ("batch", settings.batch)
            raise must(f"{what} must be a multiple of the {self.world} ranks", came)
        if self.split > 1 and settings.dense:
            raise must("dense must come with --parallel data", "context", "--pattern full is dense over ranks.")
        self.folder = Path(settings.out)
        torch.manual_seed(settings.seed)
        self.model = LongNetLM(settings.model(self.world), device=self.device)
        if settings.dense:
            use_dense(self.model)
        if self.split > 1:
            set_process_group(self.model, dist.group.WORLD)
        if self.world > 1:
            shard(self.model, self.device)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, settings.lr, betas=(0.9, 0.95), fused=self.device.type == "cuda")
        self.step = self.saved = 0
        # Ranks that take samples drop different units; one that goes on must not repeat what it dropped before.
        torch.manual_seed(settings.seed + 1 + self.rank)
        data = Path(settings.data) if settings.data else self._demo()
        self.corpus = Corpus(data, settings.context, settings.seed)

    def _demo(self) -> Path:
        path = self.folder / "corpus.bin"
        if self.rank == 0 and not path.is_file():
            demo_corpus(path)
        if self.world > 1:
            dist.barrier()
        return path

    @property
    def checkpoint(self) -> Path:
        return self.folder / SAVED

    def save(self) -> None:
        """Write a checkpoint, which the next step depends on alone."""
        if self.world > 1 and self.step == self.saved:
            return
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        if self.world > 1:
            every: list[Any] = [None] * self.world
            dist.all_gather_object(every, states)
        else:
            every = [states]
        about = {"step": self.step, "settings": asdict(self.settings), "bytes": len(self.corpus.bytes), "random": every}
        train_checkpoints.save(about, self.checkpoint, self.model, self.optimizer)
        self.saved = self.step

    def load(self) -> None:
        """Go on where the checkpoint was written."""
        if not self.checkpoint.is_file():
            raise must("--resume must have a checkpoint to continue from", f"none at {self.checkpoint}")
        state = read_torch(self.checkpoint, self.device)
        free = ("out", "resume", "sample", "log_every", "save_every", "json", "steps")
        fixed = [f.name for f in fields(TrainSettings) if f.name not in free]
        before = asdict(TrainSettings.stored(state["settings"]))
        other = [
            f"{n} {before[n]!r} (now {getattr(self.settings, n)!r})"
            for n in fixed
            if before[n] != getattr(self.settings, n)
        ]
        if other:
            raise must("--resume must have the settings of the run", ", ".join(other))
        if self.settings.steps < state["step"]:
            raise must(f"steps must be at least the {state['step']} already done", self.settings.steps)
        if state.get("bytes", len(self.corpus.bytes)) != len(self.corpus.bytes):
            raise must(f"resume must have the data of the run, {state['bytes']} bytes", len(self.corpus.bytes))
        train_checkpoints.load(state, self.folder, self.model, self.optimizer)
        self.step = self.saved = state["step"]
        states = state["random"][self.rank % len(state["random"])]
        torch.set_rng_state(states[0].cpu())
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1].cpu(), self.device)

    def _part(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and targets of this rank, from sequences (B, context + 1)."""
        length = self.settings.context // self.split
        first = self.rank * length if self.split > 1 else 0
        part = windows[:, first : first + length + 1].to(self.device)
        return part[:, :-1], part[:, 1:]

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext()

    def _total(self, value: Tensor) -> float:
        if self.world > 1:
            dist.all_reduce(value)
        return float(value)

    def train_step(self) -> tuple[float, float]:
        """One step of the optimizer: mean loss in nats, and the gradient's norm."""
        s = self.settings
        count = s.batch * s.accumulate * s.context
        total = torch.zeros((), device=self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(s, self.step)
        for micro in range(s.accumulate):
            first = (self.step * s.accumulate + micro) * s.batch
            takers = self.world // self.split
            own = range(first, first + s.batch)[self.rank % takers :: takers]
            tokens, targets = self._part(torch.stack([self.corpus.window(index) for index in own]))
            with self._autocast():
                loss = self.model(tokens, targets=targets, reduction="sum") / count
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(task_parameters(self.model), s.clip)
        # Scorers have a loss of their own.
        torch.nn.utils.clip_grad_norm_(scorer_parameters(self.model), s.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return self._total(total), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits per byte of held-out sequences."""
        self.model.eval()
        total = torch.zeros((), device=self.device)
        count = self.settings.eval_windows
        takers = self.world // self.split
        # Sharded weights are gathered in every forward, so that all ranks run as many.
        for first in range(0, count, takers):
            index = first + self.rank % takers
            tokens, targets = self._part(self.corpus.held_out(index)[None])
            with self._autocast():
                loss = self.model(tokens, targets=targets, reduction="sum")
            total += loss if index < count else 0.0
        self.model.train()
        return self._total(total) / (count * self.settings.context) / math.log(2)

    def sample(self) -> bytes:
        """Continuation of the beginning of the held-out text by the model."""
        model = self.model
        if self.world > 1:
            # Generation calls layers one by one, outside of the forward that gathers weights.
            weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if self.rank:
                return b""
            model = LongNetLM(self.settings.model(), device=self.device)
            model.load_state_dict(weights)
        prompt = self.corpus.held_out(0)[None, : min(256, self.settings.context)].to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.settings.seed)
        generated = model.generate(prompt, self.settings.sample, temperature=0.8, top_p=0.95, generator=generator)
        return bytes(generated[0].tolist())

    def train(self) -> int:
        """Train until the last step or an interrupt; 0 when all steps are done, 130 when not."""
        s, is_first = self.settings, self.rank == 0
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "log.jsonl"
        if s.resume:
            self.load()
        elif not is_restarted():
            refuse_run(self.checkpoint, log)
        if is_first:
            lines = [line for line in _lines(log) if s.resume and line["step"] <= self.step]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            write_whole(log, lambda temporary: Path(temporary).write_text(text))
            name = "dense" if s.dense else s.pattern or s.model().pattern(0)
            self._print(
                f"{self.model.num_parameters:,} parameters, {name}, {s.context:,} bytes of context, {self.device}"
            )
            if self.corpus.wraps:
                self._print(f"{len(self.corpus.bytes):,} bytes are few for this context: sequences wrap around")
        self.model.train()
        with interrupts() as stopped:
            while self.step < s.steps and not self._agreed(bool(stopped)):
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                begun = time.perf_counter()
                loss, norm = self.train_step()
                if not math.isfinite(loss):
                    raise must("the loss must stay finite", f"{loss} at step {self.step}", "Lower --lr.")
                took = time.perf_counter() - begun
                line: dict[str, Any] = {"step": self.step, "loss": loss, "lr": learning_rate(s, self.step - 1)}
                line |= {"grad_norm": norm, "seconds": took, "tokens_per_s": s.batch * s.accumulate * s.context / took}
                if self.device.type == "cuda":
                    line["peak_bytes"] = torch.cuda.max_memory_allocated()
                last = self.step == s.steps
                if last or (s.eval_every and self.step % s.eval_every == 0):
                    line["bits_per_byte"] = self.evaluate()
                if not math.isfinite(norm + line.get("bits_per_byte", 0.0)):
                    advice = "Lower --lr; the last checkpoint is of an earlier step."
                    raise must("gradients and weights must stay finite", f"they are not at step {self.step}", advice)
                if last or self.step % s.save_every == 0:
                    self.save()
                if is_first:
                    self._log_step(log, line, last)
        done = self.step >= s.steps
        if not done:
            self.save()
            if is_first:
                self._print(f"stopped after step {self.step}; go on with --resume")
        if is_first:
            _plot(log, self.folder / "loss.png")
        if done and s.sample:
            text = self.sample().decode("utf-8", "replace")
            if is_first:
                print(json.dumps({"sample": text}) if s.json else text)
        return 0 if done else 130

    def _agreed(self, stop: bool) -> bool:
        """Whether a rank received a request to stop."""
        return self._total(torch.tensor(float(stop), device=self.device)) > 0

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr if self.settings.json else sys.stdout, flush=True)

    def _log_step(self, log: Path, line: dict[str, Any], last: bool) -> None:
        append(log, line)
        if self.settings.json:
            print(json.dumps(line), flush=True)
        elif last or line["step"] % self.settings.log_every == 0 or "bits_per_byte" in line:
            left = (self.settings.steps - line["step"]) * line["seconds"]
            held_out = f"  held out {line['bits_per_byte']:.3f} bits/byte" if "bits_per_byte" in line else ""
            peak = f"  peak {readable_bytes(line['peak_bytes'])}" if "peak_bytes" in line else ""
            print(
                f"step {line['step']:>6}/{self.settings.steps}  loss {line['loss']:.4f} "
                f"({line['loss'] / math.log(2):.3f} bits/byte)  {line['tokens_per_s']:,.0f} tokens/s  "
                f"{left:,.0f} s left{peak}{held_out}",
                flush=True,
            )


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """List of the signals SIGINT and SIGTERM received so far; the second one takes effect at once."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: object) -> None:
        received.append(number)
        print("finishing this step, then saving; press Ctrl-C again to exit at once", file=sys.stderr)
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def refuse_run(checkpoint: Path, log: Path) -> None:
    """Raise where a folder holds a run, finished or not, which a new run would overwrite."""
    if checkpoint.exists():
        present = f"a run in {checkpoint.parent}"
        raise must("out must be a folder without a run", present, "Continue with --resume, or choose another --out.")
    if steps := _lines(log):
        present = f"the log of {len(steps)} steps in {log}"
        advice = "It has no checkpoint for --resume; choose another --out, or remove the log."
        raise must("out must be a folder without a run", present, advice)


def _lines(log: Path) -> list[dict[str, Any]]:
    """Complete lines of a log; the step of a truncated line is repeated."""
    lines = read_lines([log]) if log.is_file() else []
    return [line for line in lines if all(isinstance(line.get(name), int | float) for name in ("step", "loss"))]


def _plot(log: Path, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return
    lines = _lines(log)
    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot()
    axes.plot([line["step"] for line in lines], [line["loss"] / math.log(2) for line in lines], label="training")
    held_out = [line for line in lines if "bits_per_byte" in line]
    axes.plot([line["step"] for line in held_out], [line["bits_per_byte"] for line in held_out], "o", label="held out")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    figure.savefig(path)
