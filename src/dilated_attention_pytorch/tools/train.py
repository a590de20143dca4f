"""Train a byte-level LongNet on a file: `dap train --data FILE`, or `python -m dilated_attention_pytorch.tools.train`.

Under torchrun every rank takes its samples (`--parallel data`) or its part of every sequence (`--parallel context`).
A run writes to its folder: `log.jsonl`, `checkpoint.pt` (replaced in one step), and `loss.png` where matplotlib is.
Which bytes a step reads is a function of the seed and the step alone, so a run that was stopped goes on as if it had
not been.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..atomic_write import write_whole
from ..errors import must
from ..models import LongNetConfig, LongNetLM
from ..models.checkpoints import write_torch
from ..nn import MultiheadSparseAttention, scorer_parameters, set_process_group, task_parameters
from ..nn.adaptive.learned_text import LearnedText
from .bench.results import append, read_lines
from .console import Parser, device_of, dtype_name, leave
from .html_page import readable_bytes

HELD_OUT = 0.05
"""Share of the file, at its end, that is never trained on."""
LEAST_BYTES = 64
DENSE_START = 0.2
"""Fraction of the steps that learned attention begins with dense."""
DEMO_BYTES = 16 << 20
SAVED = "checkpoint.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What a run is; a field is an option of the command, its metadata the help."""

    data: str | None = None
    out: str = "run"
    size: str = "tiny"
    pattern: str | None = None
    dense: bool = False
    context: int = 32768
    batch: int = 1
    accumulate: int = 1
    steps: int = 100
    lr: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.1
    dropout: float = 0.0
    clip: float = 1.0
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    parallel: str = "data"
    checkpointing: bool = False
    save_every: int = 50
    eval_every: int = 50
    eval_windows: int = 4
    log_every: int = 1
    sample: int = 0
    resume: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        least = {"context": 2, "warmup": 0, "eval_every": 0, "sample": 0}
        for name in ("batch", "accumulate", "steps", "save_every", "log_every", "eval_windows", *least):
            if getattr(self, name) < least.get(name, 1):
                raise must(f"{name} must be >= {least.get(name, 1)}", getattr(self, name))
        for name, allowed in {"dtype": ("auto", "float32", "bfloat16"), "parallel": ("data", "context")}.items():
            if getattr(self, name) not in allowed:
                raise must(f"{name} must be one of {', '.join(allowed)}", repr(getattr(self, name)))
        for name in ("lr", "clip"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise must(f"{name} must be positive and finite", getattr(self, name))
        if self.dense and self.pattern is not None:
            raise must("--dense must come without a pattern", self.pattern)

    def model(self) -> LongNetConfig:
        """The model to train."""
        changes: dict[str, Any] = {"gradient_checkpointing": self.checkpointing, "dropout": self.dropout}
        if self.pattern is not None and LearnedText.matches(self.pattern):
            learned = LearnedText.parse(self.pattern)
            # A backward pass of attention is a micro-batch.
            dense = learned.config.dense_steps or round(DENSE_START * self.steps) * self.accumulate
            changes["adaptive"] = replace(learned.config, dense_steps=dense)
            changes["adaptive_block_size"] = learned.block_size
        elif self.dense or self.pattern is not None:
            changes["patterns"] = (self.pattern or "full",)
        return LongNetConfig.named(self.size, **changes)


HELP = {
    "data": "file of text or bytes; the sources of Python's standard library by default",
    "out": "folder of the run",
    "size": "tiny, small, base, large or 1b",
    "dense": "train with torch's dense attention instead, for comparison",
    "context": "bytes of a sequence",
    "batch": "sequences per batch; with --parallel data, over all ranks",
    "accumulate": "batches per step",
    "steps": "number of steps; with --resume, a larger number extends a run",
    "lr": "peak learning rate: linear warm-up, then cosine decay to a tenth",
    "warmup": "steps of warm-up",
    "weight_decay": "weight decay of matrices (AdamW)",
    "dropout": "dropout probability of activations",
    "clip": "maximal norm of the gradient",
    "seed": "seed of the weights and the order of the data",
    "dtype": "float32, bfloat16 (matrix products only; weights stay float32), or auto: bfloat16 on GPUs",
    "parallel": "under torchrun: data (samples are divided over ranks) or context (each sequence is divided)",
    "checkpointing": "store only the input of each layer and recompute layers in the backward pass",
    "save_every": "steps between checkpoints",
    "eval_every": "steps between evaluations on the held-out end of the file; 0 evaluates after the last step only",
    "eval_windows": "sequences per evaluation",
    "log_every": "steps between printed lines",
    "sample": "bytes to generate after training",
    "resume": "continue from the checkpoint in --out",
    "json": "print the lines of the log as JSON; other messages go to stderr",
}


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
            module._operation = lambda n, keys: dense  # pyrefly: ignore


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
        self.model = LongNetLM(settings.model(), device=self.device)
        if settings.dense:
            use_dense(self.model)
        if self.split > 1:
            set_process_group(self.model, dist.group.WORLD)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, settings.lr, betas=(0.9, 0.95), fused=self.device.type == "cuda")
        self.step = 0
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
        """Write all that the next step depends on, in one step; one rank does."""
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        if self.world > 1:
            every: list[Any] = [None] * self.world
            dist.all_gather_object(every, states)
        else:
            every = [states]
        if self.rank == 0:
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "settings": asdict(self.settings),
                "bytes": len(self.corpus.bytes),
                "random": every,
            }
            write_torch(state, self.checkpoint)

    def load(self) -> None:
        """Go on where the checkpoint was written."""
        if not self.checkpoint.is_file():
            raise must("--resume must have a checkpoint to continue from", f"none at {self.checkpoint}")
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        free = ("out", "resume", "sample", "log_every", "save_every", "json", "steps")
        fixed = [f.name for f in fields(TrainSettings) if f.name not in free]
        before = state["settings"]
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
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
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
                loss = self.model.loss(tokens, targets, reduction="sum") / count
            loss.backward()
            total += loss.detach()
        if self.world > 1:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        norm = torch.nn.utils.clip_grad_norm_(task_parameters(self.model), s.clip)
        # Scorers have a loss of their own.
        torch.nn.utils.clip_grad_norm_(scorer_parameters(self.model), s.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return self._total(total), float(norm)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits per byte of held-out sequences."""
        self.model.eval()
        total = torch.zeros((), device=self.device)
        count = self.settings.eval_windows
        for index in range(count):
            if self.split > 1 or index % self.world == self.rank:
                tokens, targets = self._part(self.corpus.held_out(index)[None])
                with self._autocast():
                    total += self.model.loss(tokens, targets, reduction="sum")
        self.model.train()
        return self._total(total) / (count * self.settings.context) / math.log(2)

    def sample(self) -> bytes:
        """What the model writes after the beginning of the held-out text."""
        set_process_group(self.model, None)
        prompt = self.corpus.held_out(0)[None, : min(256, self.settings.context)].to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.settings.seed)
        generated = self.model.generate(prompt, self.settings.sample, temperature=0.8, top_p=0.95, generator=generator)
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
                print(json.dumps({"sample": text}) if s.json else text)
        return 0 if done else 130

    def _agreed(self, stop: bool) -> bool:
        """Whether some rank was told to stop."""
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
    """A list that fills when Ctrl-C or a request to end comes; a second one acts at once."""
    met: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: object) -> None:
        met.append(number)
        print("finishing this step, then saving; press Ctrl-C again to exit at once", file=sys.stderr)
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield met
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_restarted() -> bool:
    """Whether torchrun started this process anew after a failure; such a job resumes, and overwrites its own log."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


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
    """Steps that a log tells of; a line cut short by a crash is left out, its step is done again."""
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


def main(arguments: list[str] | None = None) -> int:
    """Read options, train. Exit status: 0 done, 130 interrupted and saved."""
    parser = Parser("dap train", "Train a byte-level LongNet on a file.", "[PATTERN]")
    usual: dict[str, Any] = {field.name: field.default for field in fields(TrainSettings)}
    shared: dict[str, Callable[[], None]] = {
        "pattern": lambda: parser.pattern(
            more='; "learned:0.1;block=128" selects blocks by content; the size\'s own dilated pattern by default'
        ),
        "context": lambda: parser.tokens("--context", dest="context", default=usual["context"], help=HELP["context"]),
        "device": parser.device,
        "out": lambda: parser.out(HELP["out"], Path(usual["out"])),
        "json": lambda: parser.json(HELP["json"]),
        "dtype": lambda: parser.option("--dtype", read=dtype_name, default="auto", metavar="DTYPE", help=HELP["dtype"]),
    }
    for field in fields(TrainSettings):
        option, text = f"--{field.name.replace('_', '-')}", HELP.get(field.name, "")
        if field.name in shared:
            shared[field.name]()
        elif isinstance(field.default, bool):
            parser.option(option, action="store_true", help=text)
        else:
            kind: type = str if field.default is None else type(field.default)
            shown = "FILE" if field.name == "data" else {int: "N", float: "X"}.get(kind, "NAME")
            parser.option(option, type=kind, default=field.default, metavar=shown, help=text)
    given: dict[str, Any] = vars(parser.read(arguments))
    given["out"] = str(given["out"])
    settings = TrainSettings(**given)
    settings = replace(settings, resume=settings.resume or (is_restarted() and Path(settings.out, SAVED).is_file()))
    parallel = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if parallel:
        dist.init_process_group("nccl" if settings.device != "cpu" and torch.cuda.is_available() else "gloo")
    try:
        return Run(settings).train()
    finally:
        if parallel:
            dist.destroy_process_group()


if __name__ == "__main__":
    leave(main)
