"""Forms of a block score and ways to train it, each changed alone, on the attention of trained dense models.

    python benchmarks/scorer_forms.py --out benchmarks/results/scorer_forms_cpu.jsonl
    python benchmarks/scorer_forms.py --stages --out benchmarks/results/scorer_stages_cpu.jsonl

The models are the dense checkpoints of `dap quality --suite cpu`; their queries and keys stay as they are. A score is
distilled for 40 steps on 128 rows each. Measured on fresh sequences: the attention of tokens with a question that the
selected blocks hold, over that of the best possible blocks at the same counted density. Operations are multiply-adds
for each query, key and head while ranking.

With --stages, scores have two stages: a coarse one picks candidates, a multiple of the blocks that a row keeps, and a
fine one scores the candidates alone. The fine score is exact (q . k of single tokens, summed up as attention does, no
parameters) or a match of single tokens of rank 32. Operations count both stages, the fine one for the candidates.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention_pytorch.nn import AdaptiveConfig
from dilated_attention_pytorch.nn.adaptive.fit import fit_match, moments_of
from dilated_attention_pytorch.tools.bench.measure import facts
from dilated_attention_pytorch.tools.bench.results import append
from dilated_attention_pytorch.tools.quality.retrieval import (
    HEADS,
    IGNORED,
    SUITES,
    TASKS,
    RetrievalTask,
    Retriever,
    Starts,
    budget_of,
)

SEEDS = (0, 1, 2)


class Sequences:
    """Sequences on which scores are compared.

    Args:
        task: sizes of the sequences and of the models, which are trained at `trained_at` tokens.
        densities: counted densities of the selections.
    """

    def __init__(self, task: RetrievalTask, densities: tuple[float, ...], trained_at: int = 1024) -> None:
        self.task, self.densities, self.starts = task, densities, Starts(replace(task, n=trained_at, batch=2))
        self.n, self.size, self.blocks = task.n, task.block, task.n // task.block
        self.own, self.column = torch.arange(self.n) // self.size, torch.arange(self.blocks)
        self.earlier = self.own[:, None] > self.column

    def wanted(self, density: float) -> Tensor:
        """Earlier blocks that each token keeps (n, 1)."""
        return (budget_of(density, self.blocks).wanted(self.own + 1) - 1)[:, None]


NARROW = Sequences(SUITES["cpu"], (0.125, 0.0625))
WIDE = Sequences(replace(SUITES["cpu"], width=64), (0.125, 0.0625))
LONG = Sequences(
    replace(SUITES["cpu"], width=64, n=4096, batch=1, tasks=("recall", "needle")), (0.0625, 0.03125, 0.015625)
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A form of the score and its training."""

    pool: str = "mean"
    """Keys of a sub-block: "mean", "box" (least and largest features), "max", or "relu" (largest of positive ones)"""
    unit: int = 4
    rank: int = 32
    best: str = "max"
    """Sub-blocks of a block: "max" or "lse" """
    start: str = "sketch"
    """"sketch": a random projection; "fit": the best approximation of q.k on one batch"""
    together: bool = False
    """One list of blocks for all heads"""
    steps: int = 40
    rate: float = 1e-2
    rows: int = 128
    loss: str = "forward"
    """KL(measured || predicted), or "reverse" """
    sharpen: float = 1.0
    """Power of the measured shares"""
    own: bool = False
    """The row's own block takes part, with the logit 0"""
    asked: bool = False
    """Only rows with a question"""
    anchor: float = 0.0
    """Weight of the squared distance from the start"""

    @property
    def operations(self) -> float:
        """Multiply-adds for each query, key and head."""
        return self.rank / self.unit * (2 if self.pool == "box" else 1) / (HEADS if self.together else 1)


FINE = Variant(unit=1, rank=16)
VARIANTS: dict[str, Variant] = {
    "unit 4, rank 32": Variant(),
    "unit 2, rank 32": Variant(unit=2),
    "unit 1, rank 32": Variant(unit=1),
    "unit 1, rank 16": FINE,
    "unit 1, rank 12": replace(FINE, rank=12),
    "unit 1, rank 8": replace(FINE, rank=8),
    "unit 1, rank 4": replace(FINE, rank=4),
    "unit 2, rank 16": Variant(unit=2, rank=16),
    "unit 1, rank 16, one list for both heads": replace(FINE, together=True),
    "unit 1, rank 16, fitted start": replace(FINE, start="fit"),
    "unit 1, rank 8, fitted start": replace(FINE, rank=8, start="fit"),
    "unit 1, rank 16, one list for both heads, fitted start": replace(FINE, together=True, start="fit"),
    "unit 1, rank 32, one list for both heads, fitted start": replace(FINE, rank=32, together=True, start="fit"),
    "unit 2, rank 16, fitted start": Variant(unit=2, rank=16, start="fit"),
    "unit 4, rank 32, LSE of sub-blocks": Variant(best="lse"),
    "unit 1, rank 32, LSE of sub-blocks": Variant(unit=1, best="lse"),
    "boxes, unit 4, rank 32": Variant("box"),
    "boxes, unit 4, rank 16": Variant("box", rank=16),
    "boxes, unit 16, rank 32": Variant("box", 16),
    "largest features, unit 16, rank 64": Variant("max", 16, 64),
    "largest positive features, unit 16, rank 64": Variant("relu", 16, 64),
    "unit 4, rate 3e-2": Variant(rate=3e-2),
    "unit 4, rate 3e-3": Variant(rate=3e-3),
    "unit 4, 512 rows a step": Variant(rows=512),
    "unit 4, reverse divergence": Variant(loss="reverse"),
    "unit 4, shares squared": Variant(sharpen=2.0),
    "unit 4, square roots of shares": Variant(sharpen=0.5),
    "unit 4, own block with logit 0": Variant(own=True),
    "unit 4, rows with a question only": Variant(asked=True),
    "unit 4, pulled to the start": Variant(anchor=1e-2),
    "unit 1, rank 32, pulled to the start": Variant(unit=1, anchor=1e-2),
}


class Score(nn.Module):
    """Scores (b, h, r, t) of rows with all blocks."""

    def __init__(self, variant: Variant, query: Tensor, key: Tensor) -> None:
        super().__init__()
        self.variant, rank = variant, variant.rank
        query, key = self.heads(query), self.heads(key)
        heads, width = query.shape[1], query.shape[3]
        gain = (max(width, rank) / min(width, rank)) ** 0.25
        drawn = torch.stack([nn.init.orthogonal_(torch.zeros(width, rank), gain) for _ in range(heads)])
        both = drawn, drawn.clone()
        if variant.start == "fit":
            settings = AdaptiveConfig(score_unit=variant.unit).settings(16, True)
            moments = moments_of(query, key, settings, None, heads)
            both = [x.float() for x in fit_match(moments, rank, width)]
        self.left, self.right = (nn.Parameter(x) for x in both)
        self.log_temperature = nn.Parameter(torch.zeros(heads, 1, 1))
        self.start = [x.detach().clone() for x in self.parameters()]

    def heads(self, x: Tensor) -> Tensor:
        """Queries or keys (b, h, n, d), of all heads together as one where they share a list."""
        return x.transpose(1, 2).flatten(2)[:, None] if self.variant.together else x

    def forward(self, query: Tensor, key: Tensor, rows: Tensor) -> Tensor:
        variant = self.variant
        mine = self.heads(query)[:, :, rows] @ self.left
        units = (self.heads(key) @ self.right).unflatten(2, (-1, variant.unit))
        if variant.pool == "mean":
            found = mine @ units.mean(3).mT
        elif variant.pool == "box":
            found = mine.clamp(min=0) @ units.amax(3).mT + mine.clamp(max=0) @ units.amin(3).mT
        elif variant.pool == "max":
            found = mine @ units.amax(3).mT
        else:
            found = mine.relu() @ units.amax(3).relu().mT
        found = found.unflatten(-1, (-1, 16 // variant.unit)) * variant.rank**-0.5
        found = found.amax(-1) if variant.best == "max" else found.logsumexp(-1)
        return (found / self.log_temperature.exp()).expand(-1, query.shape[1], -1, -1)


@torch.no_grad()
def drawn(at: Sequences, model: Retriever, name: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys (b, h, n, d) of fresh sequences, and the tokens with a question, bool (b, n)."""
    tokens, answers = TASKS[name](at.task, generator)
    x = model.embed(tokens)
    given = (model.query, x), (model.key, F.pad(x, (0, 0, 1, 0))[:, :-1])
    query, key = (f(y).unflatten(-1, (at.task.heads, -1)).transpose(1, 2) for f, y in given)
    return query, key, answers != IGNORED


def shares(at: Sequences, query: Tensor, key: Tensor, rows: Tensor) -> Tensor:
    """Dense attention of rows on every block (b, h, r, t)."""
    logits = query[:, :, rows] @ key.mT * query.shape[3] ** -0.5
    logits = logits.masked_fill(torch.arange(at.n) > rows[:, None], -torch.inf)
    return logits.softmax(-1).unflatten(-1, (at.blocks, at.size)).sum(-1)


def loss(at: Sequences, variant: Variant, scores: Tensor, mass: Tensor, rows: Tensor) -> Tensor:
    """Divergence (b, h, r) of predicted from measured shares, without constants."""
    own = at.own[rows][:, None] == at.column
    seen = at.earlier[rows] | (own if variant.own else False)
    scores = torch.where(own, 0.0, scores)
    log = scores.masked_fill(~seen, -torch.inf).log_softmax(-1).clamp(min=-1e30)
    target = torch.where(seen, mass, 0.0)
    total = target.sum(-1, keepdim=True)
    target = target**variant.sharpen
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-30)
    if variant.loss == "reverse":
        terms = torch.where(seen, log.exp() * (log - target.clamp(min=1e-6).log()), 0.0)
        return terms.sum(-1) * total[..., 0]
    return -torch.where(seen, total * target * log, 0.0).sum(-1)


def train(at: Sequences, score: Score, model: Retriever, name: str, seed: int) -> None:
    """Distil the attention of the model on fresh sequences."""
    variant, generator = score.variant, torch.Generator().manual_seed(2000 + seed)
    optimizer = torch.optim.Adam(score.parameters(), variant.rate)
    for _ in range(variant.steps):
        query, key, asked = drawn(at, model, name, generator)
        rows = torch.randperm(at.n, generator=generator)[: variant.rows].sort().values
        terms = loss(at, variant, score(query, key, rows), shares(at, query, key, rows), rows)
        weight = asked[:, None, rows].float() if variant.asked else torch.ones(1, 1, len(rows))
        found = (terms * weight).sum() / weight.expand_as(terms).sum().clamp(min=1)
        pull = sum((x - y).square().sum() for x, y in zip(score.parameters(), score.start, strict=True))
        optimizer.zero_grad()
        (found + variant.anchor * pull).backward()
        nn.utils.clip_grad_norm_(score.parameters(), 1.0)
        optimizer.step()


def best(scores: Tensor, many: Tensor) -> Tensor:
    """The `many` (r, 1, 1) blocks with the largest scores (r, h, t) of each row, except those of -inf, bool."""
    return (scores.argsort(-1, descending=True).argsort(-1) < many) & (scores > -torch.inf)


class Fresh:
    """Sequences on which selections are measured, on the tokens with a question (r)."""

    @torch.no_grad()
    def __init__(self, at: Sequences, model: Retriever, name: str, seed: int) -> None:
        self.at = at
        self.query, self.key, asked = drawn(at, model, name, torch.Generator().manual_seed(10**6 + seed))
        self.sample, self.token = asked.nonzero().T
        self.earlier, self.own = (x[self.token][:, None] for x in (at.earlier, at.own[:, None] == at.column))
        self.mass = shares(at, self.query, self.key, torch.arange(at.n))[self.sample, :, self.token]
        self.exact = self.mass.masked_fill(~self.earlier, -torch.inf)
        self.most = [self.held(best(self.exact, self.wanted(density))) for density in at.densities]

    def wanted(self, density: float) -> Tensor:
        """Earlier blocks that each row keeps (r, 1, 1)."""
        return self.at.wanted(density)[self.token, None]

    @torch.no_grad()
    def of(self, score: Score) -> Tensor:
        """Scores of earlier blocks (r, h, t)."""
        scores = score(self.query, self.key, torch.arange(self.at.n))[self.sample, :, self.token]
        return scores.masked_fill(~self.earlier, -torch.inf)

    def held(self, kept: Tensor) -> float:
        """Attention that blocks hold, with each token's own block."""
        return float((self.mass * (kept | self.own)).sum(-1).mean())

    def kept(self, scores: Tensor) -> list[float]:
        """Attention that the best blocks by `scores` hold, over that of the best blocks, at each density."""
        held = [self.held(best(scores, self.wanted(density))) for density in self.at.densities]
        return [mine / most for mine, most in zip(held, self.most, strict=True)]


def measure(models: Starts, name: str, seed: int, variant: Variant) -> dict[str, Any]:
    """A line of results."""
    at, model = NARROW, models.model(name, seed)
    torch.manual_seed(3000 + seed)
    score = Score(variant, *drawn(at, model, name, torch.Generator().manual_seed(4000 + seed))[:2])
    fresh = Fresh(at, model, name, seed)
    start = fresh.kept(fresh.of(score))
    train(at, score, model, name, seed)
    return {"operations": variant.operations, "start": start, "trained": fresh.kept(fresh.of(score))}


SETTINGS = {"heads of 32": NARROW, "heads of 64": WIDE, "heads of 64, 4,096 tokens": LONG}
FITTED = Variant(start="fit")
FINEST = replace(FITTED, unit=1)
COARSE: dict[str, Variant] = {
    "unit 16, rank 32": replace(FITTED, unit=16),
    "unit 8, rank 32": replace(FITTED, unit=8),
    "unit 4, rank 32": FITTED,
    "unit 4, rank 16": replace(FITTED, rank=16),
    "unit 2, rank 32": replace(FITTED, unit=2),
    "unit 2, rank 16": replace(FITTED, unit=2, rank=16),
    "unit 1, rank 4": replace(FINEST, rank=4),
    "unit 1, rank 8": replace(FINEST, rank=8),
    "unit 1, rank 12": replace(FINEST, rank=12),
    "unit 1, rank 16": replace(FINEST, rank=16),
    "unit 1, rank 8, one list for both heads": replace(FINEST, rank=8, together=True),
    "unit 1, rank 16, one list for both heads": replace(FINEST, rank=16, together=True),
    "boxes, unit 16, rank 32": Variant("box", 16),
    "unit 1, rank 32": FINEST,
}
CANDIDATES = (2, 3, 4, 6, 8)
"""Candidates for each block that a row keeps."""


@torch.no_grad()
def staged(fresh: Fresh, coarse: Tensor, fine: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Attention kept over that of the best blocks at each density, by one stage and by two for each of `CANDIDATES`."""
    kept: dict[str, list[Any]] = {"one": fresh.kept(coarse), **{name: [] for name in fine}}
    for density, most in zip(fresh.at.densities, fresh.most, strict=True):
        wanted = fresh.wanted(density)
        candidates = [best(coarse, many * wanted) for many in CANDIDATES]
        for name, scores in fine.items():
            chosen = (best(scores.masked_fill(~x, -torch.inf), wanted) for x in candidates)
            kept[name].append([round(fresh.held(x) / most, 5) for x in chosen])
    return kept


def measure_stages(at: Sequences, name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Lines of results of a task and seed."""
    model = at.starts.model(name, seed)
    fresh, scores = Fresh(at, model, name, seed), {}
    for form, variant in COARSE.items():
        torch.manual_seed(3000 + seed)
        score = Score(variant, *drawn(at, model, name, torch.Generator().manual_seed(4000 + seed))[:2])
        start = fresh.of(score)
        train(at, score, model, name, seed)
        scores[form] = {"start": start, "trained": fresh.of(score)}
    for form in COARSE:
        for when, coarse in scores[form].items():
            fine = {"exact": fresh.exact, "rank 32": scores["unit 1, rank 32"][when]}
            yield {"coarse": form, "when": when, **staged(fresh, coarse, fine)}
    torch.manual_seed(3000 + seed)
    luck = torch.rand_like(fresh.exact).masked_fill(~fresh.earlier, -torch.inf)
    yield {"coarse": "random", "when": "start", **staged(fresh, luck, {})}


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Markdown table: attention kept over the oracle's, mean and standard deviation over seeds and tasks."""
    text = [
        "| score | operations | "
        + " | ".join(f"{when}, {100 * d:g} %" for d in NARROW.densities for when in ("start", "trained"))
        + " |"
    ]
    text.append("|---" * (2 + 2 * len(NARROW.densities)) + "|")
    for name in VARIANTS:
        mine = [line for line in lines if line["variant"] == name]
        cells = [[x[when][i] for x in mine] for i in range(len(NARROW.densities)) for when in ("start", "trained")]
        if mine:
            shown = " | ".join(f"{statistics.mean(x):.3f} ± {_over_seeds(mine, x):.3f}" for x in cells)
            text.append(f"| {name} | {mine[0]['operations']:g} | {shown} |")
    return text


SHOWN: tuple[tuple[str, int, str], ...] = (
    *((form, 1, "one") for form in ("random", "unit 4, rank 32", "unit 2, rank 32", "unit 1, rank 32")),
    *((form, 1, "one") for form in ("unit 1, rank 8", "unit 1, rank 12", "unit 1, rank 16")),
    ("unit 1, rank 16, one list for both heads", 1, "one"),
    ("unit 16, rank 32", 4, "rank 32"),
    ("boxes, unit 16, rank 32", 4, "rank 32"),
    ("unit 8, rank 32", 4, "rank 32"),
    ("unit 4, rank 32", 4, "rank 32"),
    ("unit 2, rank 16", 4, "rank 32"),
    ("unit 2, rank 16", 8, "rank 32"),
    ("unit 1, rank 8", 4, "rank 32"),
    ("unit 1, rank 12", 2, "rank 32"),
    ("unit 1, rank 16", 2, "rank 32"),
    ("unit 1, rank 16, one list for both heads", 2, "rank 32"),
    ("unit 1, rank 16, one list for both heads", 4, "rank 32"),
    ("unit 2, rank 32", 4, "exact"),
    ("unit 1, rank 16", 4, "exact"),
)
"""Rows of the table of stages: coarse score, candidates for each kept block, fine score."""


def stage_table(lines: list[dict[str, Any]]) -> list[str]:
    """Markdown table of scores of one and of two stages after training: attention kept, and operations."""
    places = [(name, i, d) for name in list(SETTINGS)[1:] for i, d in enumerate(SETTINGS[name].densities)][:2]
    places += [(name, i, d) for name in list(SETTINGS)[2:] for i, d in enumerate(SETTINGS[name].densities)][1:]
    heads = [f"{100 * density:.3g} % of {SETTINGS[name].n:,}" for name, _, density in places]
    text = ["| coarse score | candidates | fine score | " + " | ".join(heads) + " |", "|---" * (3 + len(places)) + "|"]
    for form, many, fine in SHOWN:
        cells = []
        for name, i, density in places:
            mine = [x for x in lines if x["setting"] == name and x["coarse"] == form]
            mine = [x for x in mine if x["when"] == "trained" or form == "random"]
            values = [x["one"][i] if many == 1 else x[fine][i][CANDIDATES.index(many)] for x in mine]
            each = 0 if many == 1 else 32 if fine == "rank 32" else SETTINGS[name].task.width
            operations = (COARSE[form].operations if form in COARSE else 0) + each * min(many * density, 1)
            cells.append(f"{statistics.mean(values):.3f} ± {_over_seeds(mine, values):.3f} ({operations:.3g})")
        shown = ("", "") if many == 1 else (str(many), fine)
        text.append(f"| {form} | {' | '.join((*shown, *cells))} |")
    return text


def _over_seeds(lines: list[dict[str, Any]], values: list[float]) -> float:
    """Standard deviation over seeds of the mean over tasks."""
    by_seed: dict[int, list[float]] = {}
    for line, value in zip(lines, values, strict=True):
        by_seed.setdefault(line["seed"], []).append(value)
    means = [statistics.mean(x) for x in by_seed.values()]
    return statistics.stdev(means) if len(means) > 1 else 0.0


def main() -> None:
    """Measure every variant on every task and seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    parser.add_argument("--stages", action="store_true", help="scores of two stages")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="NAME")
    given = parser.parse_args()
    if given.stages:
        known = facts("cpu")
        for seed in () if given.table else given.seeds:
            for setting in given.settings:
                for name in SETTINGS[setting].task.tasks:
                    for line in measure_stages(SETTINGS[setting], name, seed):
                        append(given.out, {"setting": setting, "task": name, "seed": seed, **line, **known})
        print("\n".join(stage_table([json.loads(line) for line in given.out.read_text().splitlines()])))
        return
    if not given.table:
        models, known = NARROW.starts, facts("cpu")
        for seed in given.seeds:
            for name in NARROW.task.tasks:
                for variant in given.variants:
                    line = {
                        "task": name,
                        "seed": seed,
                        "variant": variant,
                        **measure(models, name, seed, VARIANTS[variant]),
                        **known,
                    }
                    append(given.out, line)
    print("\n".join(table([json.loads(line) for line in given.out.read_text().splitlines()])))


if __name__ == "__main__":
    main()
