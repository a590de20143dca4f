"""Settings of a training run: the options of `dap train`, stored in its checkpoint."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import must

if TYPE_CHECKING:
    from ..models import LongNetConfig

DENSE_START = 0.2
"""Fraction of the steps that learned attention begins with dense."""
SAVED = "checkpoint.pt"


Value = TypeVar("Value")


def option(default: Value, text: str) -> Value:
    """Field with the help text of its option."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Settings of a run; each field is an option of the command."""

    data: str | None = option(None, "file of text or bytes; the sources of Python's standard library by default")
    out: str = option("run", "folder of the run")
    size: str = option("tiny", "tiny, small, base, large or 1b")
    pattern: str | None = None
    dense: bool = option(False, "train with torch's dense attention instead, for comparison")
    context: int = option(32768, "bytes of a sequence")
    batch: int = option(1, "sequences per batch; with --parallel data, over all ranks")
    accumulate: int = option(1, "batches per step")
    steps: int = option(100, "number of steps; with --resume, a larger number extends a run")
    lr: float = option(1e-3, "peak learning rate: linear warm-up, then cosine decay to a tenth")
    warmup: int = option(20, "steps of warm-up")
    weight_decay: float = option(0.1, "weight decay of matrices (AdamW)")
    dropout: float = option(0.0, "dropout probability of activations")
    clip: float = option(1.0, "maximal norm of the gradient")
    seed: int = option(0, "seed of the weights and the order of the data")
    dtype: str = option(
        "auto", "float32, bfloat16 (matrix products only; weights stay float32), or auto: bfloat16 on GPUs"
    )
    device: str = "auto"
    parallel: str = option(
        "data", "under torchrun: data (samples are divided over ranks) or context (each sequence is divided)"
    )
    checkpointing: bool = option(False, "store only the input of each layer and recompute layers in the backward pass")
    save_every: int = option(50, "steps between checkpoints")
    eval_every: int = option(
        50, "steps between evaluations on the held-out end of the file; 0 evaluates after the last step only"
    )
    eval_windows: int = option(4, "sequences per evaluation")
    log_every: int = option(1, "steps between printed lines")
    sample: int = option(0, "bytes to generate after training")
    resume: bool = option(False, "continue from the checkpoint in --out")
    json: bool = option(False, "print the lines of the log as JSON; other messages go to stderr")

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
        if _lacks_unit(self.pattern):
            from ..nn.adaptive.learned_text import LearnedText

            # Checkpoints name the score unit, whose default has changed.
            unit = LearnedText.parse(self.pattern or "").config.score_unit
            object.__setattr__(self, "pattern", f"{self.pattern};score_unit={unit}")

    @classmethod
    def stored(cls, values: dict[str, Any]) -> TrainSettings:
        """Settings of a checkpoint. Learned attention without a score unit is older than its default of 1 and had 4."""
        if _lacks_unit(values["pattern"]):
            values = values | {"pattern": f"{values['pattern']};score_unit=4"}
        return cls(**values)

    def model(self, ranks: int = 1) -> LongNetConfig:
        """The model to train on some ranks."""
        from ..models import LongNetConfig
        from ..nn.adaptive.learned_text import LearnedText

        changes: dict[str, Any] = {"gradient_checkpointing": self.checkpointing, "dropout": self.dropout}
        if self.pattern is not None and LearnedText.matches(self.pattern):
            learned = LearnedText.parse(self.pattern)
            # A backward pass of attention is a micro-batch.
            dense = learned.config.dense_steps or round(DENSE_START * self.steps) * self.accumulate
            # A module fits its scorer to the data of its own rank; replicas would differ.
            fitted = learned.config.fitted_start and ranks == 1
            changes["adaptive"] = replace(learned.config, dense_steps=dense, fitted_start=fitted)
            changes["adaptive_block_size"] = learned.block_size
        elif self.dense or self.pattern is not None:
            changes["patterns"] = (self.pattern or "full",)
        return LongNetConfig.named(self.size, **changes)


def _lacks_unit(pattern: str | None) -> bool:
    """Whether a pattern is learned attention without a score unit."""
    if pattern is None or "learned" not in pattern or "score_unit" in pattern:
        return False
    from ..nn.adaptive.learned_text import LearnedText

    return LearnedText.matches(pattern)


def is_restarted() -> bool:
    """Whether torchrun started this process anew after a failure; such a job resumes, and overwrites its own log."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
