"""Settings of a training run: the options of `dap train`, stored in its checkpoint."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import must

if TYPE_CHECKING:
    from ..models import LongNetConfig

DENSE_START = 0.2
"""Fraction of the steps that learned attention begins with dense."""
SAVED = "checkpoint.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Settings of a run; each field is an option of the command."""

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
        if _lacks_unit(self.pattern):
            from ..nn.adaptive.learned_text import LearnedText

            # Checkpoints name the score unit, whose default has changed.
            unit = LearnedText.parse(self.pattern or "").config.unit(is_causal=True)
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
