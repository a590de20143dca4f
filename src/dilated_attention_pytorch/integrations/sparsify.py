"""Learned sparsity for a trained dense model: distill scorers, measure them beside controls, keep what pays."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from ..atomic_write import write_whole
from ..errors import must, must_be
from ..nn import BlockSparseAdaptive, scorer_parameters
from ..nn.adaptive.controls import (
    CHOICES,
    LayerCall,
    ScorerState,
    adjusted,
    attend_by,
    captured_mass,
    copied_state,
    dense_config,
    distill_layer,
    fit_scorers,
    intercepted,
    shares_of,
)
from ..nn.adaptive.learned_text import LearnedText
from .replace import replace_attention

PATTERN = "learned:0.06;block=64"
LINES = 10
"""Lines of progress, besides the last."""

Call = Callable[[nn.Module, Any], Any]
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class LayerShares:
    """Shares of a layer's dense attention that choices of equally many blocks capture."""

    layer: str
    kept: float
    """Requested fraction of blocks."""
    density: float
    """Blocks kept over blocks visible, as counted."""
    learned: float
    untrained: float
    oracle: float
    random: float


@dataclass(frozen=True, slots=True)
class ModelLoss:
    """Mean loss of a model on held-out batches, by choice of blocks in all layers."""

    kept: float
    dense: float
    learned: float
    untrained: float
    oracle: float
    random: float


@dataclass(slots=True)
class SparsifyReport:
    """Outcome of `sparsify`; `str` formats it as a table."""

    steps: int
    """Steps of distillation that were done."""
    interrupted: bool
    held_out: bool
    """Whether the measured batches were not trained on."""
    seconds: float
    patterns: dict[str, str] = field(default_factory=dict)
    """Text of each learned layer, "learned:1;..." where it was kept dense; `replace_attention` takes it."""
    layers: list[LayerShares] = field(default_factory=list)
    losses: list[ModelLoss] = field(default_factory=list)
    loss: float | None = None
    """Loss of the model as it was left, with its dense layers."""
    dense_layers: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    """Layers whose trained scorer captured less than the untrained one, which was put back."""
    uncalled: list[str] = field(default_factory=list)
    """Learned layers that no measured batch reached."""

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as JSON, also written to a file if a path is given."""
        text = json.dumps(asdict(self), indent=1)
        if path is not None:
            write_whole(Path(path), lambda temporary: Path(temporary).write_text(text + "\n"))
        return text

    def __str__(self) -> str:
        stopped = ", interrupted" if self.interrupted else ""
        where = "held-out batches" if self.held_out else "batches of the training"
        lines = [f"{self.steps} steps of distillation{stopped}, {self.seconds:.1f} s; measured on {where}", ""]
        rows = [["captured attention", "density", *CHOICES, "left"]]
        for row in self.layers:
            left = "dense" if row.layer in self.dense_layers else "untrained" if row.layer in self.restored else ""
            rows.append([row.layer, f"{100 * row.density:.1f} %", *(f"{getattr(row, x):.4f}" for x in CHOICES), left])
        lines += _table(rows)
        if self.losses:
            rows = [["loss", "kept", "dense", *CHOICES]]
            for loss in self.losses:
                values = (f"{getattr(loss, x):.4f}" for x in ("dense", *CHOICES))
                rows.append(["all layers sparse", f"{100 * loss.kept:.3g} %", *values])
            lines += ["", *_table(rows), f"loss of the model as left: {self.loss:.4f}"]
        if self.uncalled:
            lines += ["", f"not called: {', '.join(self.uncalled)}"]
        return "\n".join(lines)


def _table(rows: list[list[str]]) -> list[str]:
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ([x.rjust(width) for x, width in zip(row[1:], widths, strict=True)] for row in rows)
    return ["  ".join([row[0].ljust(first), *line]).rstrip() for row, line in zip(rows, lines, strict=True)]


def sparsify(
    model: nn.Module,
    batches: Iterable[Any],
    steps: int = 300,
    *,
    pattern: str | None = None,
    call: Call | None = None,
    loss: Loss | None = None,
    densities: Sequence[float] = (),
    keep: float = 0.97,
    lr: float = 3e-3,
    measured_batches: int = 2,
    measured_tokens: int = 256,
    progress: bool | Callable[[str], None] = True,
) -> SparsifyReport:
    """Give a trained dense model learned attention: distill scorers, measure, keep weak layers dense.

    The model runs with dense attention and without gradients; every layer distills its own attention into its own
    scorer. The weights of the task do not change, and neither does any `requires_grad`. Ctrl-C ends the distillation
    early; the measurement follows. A second Ctrl-C raises and leaves a model with learned layers.

    Untrained scorers start from a fit to the queries and keys of the first batch; see `fit_scorers`. A layer reverts
    to its untrained scorer if the trained one captures less attention, and stays dense if the better of the two
    captures less than `keep`. A dense layer keeps its scorer in the state dict.

    Args:
        model: changed in place, on its device. Without learned layers, `replace_attention(model, pattern)` comes first.
        batches: inputs of the model. A tensor is passed as `model(x)`, a tuple as `model(*x)`, a mapping as
            `model(**x)`. Iterables that end are read again, and a generator that ends ends the distillation.
        steps: steps of distillation, one batch each.
        pattern: learned attention; "learned:0.06;block=64" by default. None for a model with learned layers.
        call: `call(model, batch)` runs the model instead.
        loss: `loss(output, batch)`, a scalar; if given, the report has the model's loss with each choice of blocks.
        densities: further fractions of blocks at which the report compares choices.
        keep: smallest captured share of a layer that becomes sparse. 0 leaves all layers sparse.
        lr: learning rate of Adam at the start; it decays to a tenth along a cosine.
        measured_batches: first batches, which are measured and not trained on, unless there are no others.
        measured_tokens: queries of a sequence on which captured attention is measured.
        progress: print lines to stderr, or a function that receives them.

    Returns:
        A `SparsifyReport`: `print(report)` shows captured attention by layer and density, and losses.

    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1)
    >>> batches = [torch.randn(1, 128, 32) for _ in range(4)]
    >>> report = sparsify(model, batches, 2, pattern="learned:0.5;block=16", keep=0, progress=False)
    >>> report.patterns
    {'layers.0.self_attn': 'learned:0.5;block=16'}
    """
    if steps < 0 or measured_batches < 1 or measured_tokens < 1:
        came = f"{steps}, {measured_batches} and {measured_tokens}"
        raise must("steps must be >= 0, measured_batches and measured_tokens >= 1", came)
    for share in densities:
        if not 0.0 < share <= 1.0:
            raise must("densities must lie in (0, 1]", share)
    cores = _learned_layers(model, pattern)
    begun, show = time.perf_counter(), _printer(progress)
    source, run_model = _Batches(batches, measured_batches), call or _call_model
    with _evaluation_mode(model), torch.no_grad():
        training = source.training()
        first = [batch for _, batch in zip(range(min(steps, 1)), training, strict=False)]
        for batch in first:
            fit_scorers(model, partial(run_model, model, batch))
        untrained: dict[str, ScorerState] = {name: copied_state(core) for name, core in cores.items()}
        run = _Runs(model, run_model, loss, cores, untrained)
        done, interrupted = _distill(run, chain(first, training), steps, lr, show)
        report = SparsifyReport(done, interrupted, source.held_out, 0.0)
        show(f"measuring {len(cores)} layers on {len(source.measured)} batches")
        _measure(run, source.measured, report, densities, keep, measured_tokens)
    report.seconds = time.perf_counter() - begun
    return report


def learned_layers(model: nn.Module) -> dict[str, BlockSparseAdaptive]:
    """Learned layers of a model by the names of the modules that hold them, or their own."""
    return {
        name.removesuffix(".core").removesuffix(".dap_learned"): module
        for name, module in model.named_modules()
        if isinstance(module, BlockSparseAdaptive)
    }


def _learned_layers(model: nn.Module, pattern: str | None) -> dict[str, BlockSparseAdaptive]:
    """Learned layers of a model that can be sparsified, put in place by `pattern` where there are none."""
    cores = learned_layers(model)
    if cores and pattern is not None:
        came = f"{pattern!r} and {len(cores)} learned layers"
        raise must("pattern must be None for a model with learned layers", came, "Their own settings are used.")
    if not cores:
        text = PATTERN if pattern is None else pattern
        if not LearnedText.matches(text):
            raise must('pattern must be learned attention, such as "learned:0.06;block=64"', repr(text))
        _check_settings(LearnedText.parse(text).config)
        replaced = replace_attention(model, text)
        cores = learned_layers(model)
        if not cores:
            left = "; ".join(f"{entry.name or 'the model'}: {entry.why}" for entry in replaced)
            raise must("model must have attention that learned attention can replace", left or type(model).__name__)
    for name, core in cores.items():
        _check_settings(core.config)
        if not core.ranks.alone:
            came = f"{name} over {core.ranks.world} ranks"
            raise must("sparsify must have whole sequences on one device", came, "Use set_process_group(model, None).")
    return cores


def _check_settings(config: Any) -> None:
    if config.adaptive_ratio is not None:
        raise must("adaptive_ratio must be None: controls keep as many blocks as the scorer", config.adaptive_ratio)
    if not config.hard_sparsity:
        raise must("hard_sparsity must be True: scores that weigh blocks are not distilled", False)


def _call_model(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _printer(progress: bool | Callable[[str], None]) -> Callable[[str], None]:
    if callable(progress):
        return progress
    return (lambda text: print(f"sparsify: {text}", file=sys.stderr, flush=True)) if progress else lambda text: None


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, with scorers that take gradients; flags of all modules and parameters come back."""
    training = {module: module.training for module in model.modules()}
    scorers = {parameter: parameter.requires_grad for parameter in scorer_parameters(model)}
    try:
        model.eval()
        for parameter in scorers:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, flag in scorers.items():
            parameter.grad = None
            parameter.requires_grad_(flag)
        for module, mode in training.items():
            module.training = mode


class _Batches:
    """Batches to measure, and an endless or ending sequence of batches to train on."""

    def __init__(self, batches: Iterable[Any], measured: int) -> None:
        if isinstance(batches, Tensor | Mapping):
            raise must_be("batches must be an iterable of the model's inputs", type(batches).__name__, "Pass [batch].")
        self._batches, self._iterator, self._skip = batches, iter(batches), measured
        self.measured = [batch for _, batch in zip(range(measured), self._iterator, strict=False)]
        if not self.measured:
            raise must("batches must have a batch", "none")
        self.held_out = True

    def training(self) -> Iterator[Any]:
        """Batches other than the measured ones; these too, where there are no others."""
        some = True
        while some:
            some = False
            for batch in self._iterator:
                some = True
                yield batch
            again = iter(self._batches)
            if again is self._iterator:
                break
            self._iterator = again
            if isinstance(getattr(self._batches, "sampler", None), RandomSampler):
                # The batches of another order are not those that were skipped.
                self.held_out = False
            for _ in zip(range(self._skip), self._iterator, strict=False):
                pass
        if not some and len(self.measured) <= self._skip:
            self.held_out = False
            while True:
                yield from self.measured


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of a model whose learned layers are intercepted."""

    model: nn.Module
    call: Call
    loss: Loss | None
    cores: dict[str, BlockSparseAdaptive]
    untrained: dict[str, ScorerState]

    def distill(self, batch: Any) -> None:
        """Run with dense attention; every layer adds the gradient of its scorer."""

        def run(name: str, core: BlockSparseAdaptive, given: LayerCall) -> Tensor:
            output = attend_by("dense", core, given, {}, torch.default_generator)
            # Last, so that the statistics of the layer are those of the distillation.
            distill_layer(core, given)
            return output

        with intercepted(self.cores, run):
            self.call(self.model, batch)

    def captured(self, batch: Any, tokens: int, kept: Sequence[float]) -> dict[tuple[str, float], Tensor]:
        """Captured attention by layer and fraction of blocks, with dense attention in all layers."""
        found: dict[tuple[str, float], Tensor] = {}

        def run(name: str, core: BlockSparseAdaptive, given: LayerCall) -> Tensor:
            for share in dict.fromkeys((core.config.kept, *kept)):
                with adjusted(core, config=replace(core.config, base_sparsity=1.0 - share)):
                    mass = captured_mass(core, given, self.untrained[name], tokens)
                found[name, share] = found[name, share] + mass if (name, share) in found else mass
            return attend_by("dense", core, given, {}, torch.default_generator)

        with intercepted(self.cores, run):
            self.call(self.model, batch)
        return found

    def mean_loss(self, measured: list[Any], choice: str | None, kept: float | None) -> float:
        """Mean loss with the blocks of a choice in all layers; with None, of the model as it is."""
        assert self.loss is not None
        generator, losses = torch.Generator().manual_seed(0), []

        def run(name: str, core: BlockSparseAdaptive, given: LayerCall) -> Tensor:
            return attend_by(choice or "learned", core, given, self.untrained[name], generator)

        with ExitStack() as stack:
            for core in self.cores.values():
                config = core.config if kept is None else replace(core.config, base_sparsity=1.0 - kept)
                stack.enter_context(adjusted(core, config=config))
            stack.enter_context(intercepted(self.cores, run))
            for batch in measured:
                losses.append(float(self.loss(self.call(self.model, batch), batch)))
        return sum(losses) / len(losses)


def _distill(
    run: _Runs, batches: Iterator[Any], steps: int, lr: float, show: Callable[[str], None]
) -> tuple[int, bool]:
    """Train the scorers; the steps that were done, and whether Ctrl-C ended them."""
    groups = [list(core.scorer.parameters()) for core in run.cores.values()]
    optimizer = torch.optim.Adam([{"params": group} for group in groups], lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1), lr / 10)
    begun, done = time.perf_counter(), 0
    try:
        while done < steps and (batch := next(batches, run)) is not run:
            # A step is whole or not done: gradients of a pass that Ctrl-C ended are dropped with it.
            optimizer.zero_grad()
            run.distill(batch)
            for group in groups:
                nn.utils.clip_grad_norm_([x for x in group if x.grad is not None], 1.0)
            optimizer.step()
            schedule.step()
            done += 1
            if done == steps or done % max(1, steps // LINES) == 0:
                # Layers that keep every block, or were not called, have none.
                losses = [x for core in run.cores.values() if math.isfinite(x := float(core.auxiliary_loss()))]
                loss = sum(losses) / max(len(losses), 1)
                left = (time.perf_counter() - begun) / done * (steps - done)
                show(f"step {done}/{steps}, mean divergence {loss:.4f}, {left:.0f} s left")
    except KeyboardInterrupt:
        show(f"interrupted after {done} steps")
        return done, True
    if done < steps:
        show(f"the batches ended after {done} steps")
    return done, False


def _measure(
    run: _Runs,
    measured: list[Any],
    report: SparsifyReport,
    densities: Sequence[float],
    keep: float,
    tokens: int,
) -> None:
    """Fill in a report, put back scorers that learned nothing, and make layers dense that do not pay."""
    sums: dict[tuple[str, float], Tensor] = {}
    for batch in measured:
        for key, mass in run.captured(batch, tokens, densities).items():
            sums[key] = sums[key] + mass if key in sums else mass
    for name, share in sorted(sums, key=lambda key: (list(run.cores).index(key[0]), key[1])):
        report.layers.append(LayerShares(name, share, **shares_of(sums[name, share])))
    own = {row.layer: row for row in report.layers if row.kept == run.cores[row.layer].config.kept}
    report.uncalled = [name for name in run.cores if name not in own]
    if run.loss is not None:
        everywhere = {core.config.kept for core in run.cores.values()} | set(densities)
        for share in sorted(everywhere):
            values = {x: run.mean_loss(measured, x, share) for x in ("dense", *CHOICES)}
            report.losses.append(ModelLoss(share, **values))
    for name, row in own.items():
        core = run.cores[name]
        if row.learned < row.untrained:
            core.scorer.load_state_dict(run.untrained[name])
            report.restored.append(name)
        if max(row.learned, row.untrained) < keep:
            core.config = dense_config(core.config)
            report.dense_layers.append(name)
    report.patterns = {name: str(LearnedText(core.config, core.block_size)) for name, core in run.cores.items()}
    if run.loss is not None:
        report.loss = run.mean_loss(measured, None, None)
