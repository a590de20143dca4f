"""Forms of a block score and ways to train it, each changed alone, on the attention of trained dense models.

    python benchmarks/scorer_forms.py --out benchmarks/results/scorer_forms_cpu.jsonl

The models are the dense checkpoints of `dap quality --suite cpu`; their queries and keys stay as they are. A score is
distilled for 40 steps on 128 rows each. Measured on fresh sequences: the attention of tokens with a question that the
selected blocks hold, over that of the best possible blocks at the same counted density. Operations are multiply-adds
for each query, key and head while ranking.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
    WIDTH,
    Retriever,
    Starts,
    budget_of,
)

SUITE = SUITES["cpu"]
N, SIZE, DENSITIES, SEEDS = SUITE.n, SUITE.block, (0.125, 0.0625), (0, 1, 2)
T = N // SIZE
OWN, COLUMN = torch.arange(N) // SIZE, torch.arange(T)
EARLIER = OWN[:, None] > COLUMN


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
            settings = AdaptiveConfig(score_unit=variant.unit).settings(SIZE, True)
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
        found = found.unflatten(-1, (T, -1)) * variant.rank**-0.5
        found = found.amax(-1) if variant.best == "max" else found.logsumexp(-1)
        return (found / self.log_temperature.exp()).expand(-1, query.shape[1], -1, -1)


@torch.no_grad()
def drawn(model: Retriever, name: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys (b, h, n, d) of fresh sequences, and the tokens with a question, bool (b, n)."""
    tokens, answers = TASKS[name](SUITE, generator)
    x = model.embed(tokens)
    given = (model.query, x), (model.key, F.pad(x, (0, 0, 1, 0))[:, :-1])
    query, key = (f(y).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for f, y in given)
    return query, key, answers != IGNORED


def shares(query: Tensor, key: Tensor, rows: Tensor) -> Tensor:
    """Dense attention of rows on every block (b, h, r, t)."""
    logits = query[:, :, rows] @ key.mT * WIDTH**-0.5
    logits = logits.masked_fill(torch.arange(N) > rows[:, None], -torch.inf)
    return logits.softmax(-1).unflatten(-1, (T, SIZE)).sum(-1)


def loss(variant: Variant, scores: Tensor, mass: Tensor, rows: Tensor) -> Tensor:
    """Divergence (b, h, r) of predicted from measured shares, without constants."""
    seen = EARLIER[rows] | (OWN[rows][:, None] == COLUMN if variant.own else False)
    scores = torch.where(OWN[rows][:, None] == COLUMN, 0.0, scores)
    log = scores.masked_fill(~seen, -torch.inf).log_softmax(-1).clamp(min=-1e30)
    target = torch.where(seen, mass, 0.0)
    total = target.sum(-1, keepdim=True)
    target = target**variant.sharpen
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-30)
    if variant.loss == "reverse":
        terms = torch.where(seen, log.exp() * (log - target.clamp(min=1e-6).log()), 0.0)
        return terms.sum(-1) * total[..., 0]
    return -torch.where(seen, total * target * log, 0.0).sum(-1)


def train(score: Score, model: Retriever, name: str, seed: int) -> None:
    """Distil the attention of the model on fresh sequences."""
    variant, generator = score.variant, torch.Generator().manual_seed(2000 + seed)
    optimizer = torch.optim.Adam(score.parameters(), variant.rate)
    for _ in range(variant.steps):
        query, key, asked = drawn(model, name, generator)
        rows = torch.randperm(N, generator=generator)[: variant.rows].sort().values
        terms = loss(variant, score(query, key, rows), shares(query, key, rows), rows)
        weight = asked[:, None, rows].float() if variant.asked else torch.ones(1, 1, len(rows))
        found = (terms * weight).sum() / weight.expand_as(terms).sum().clamp(min=1)
        pull = sum((x - y).square().sum() for x, y in zip(score.parameters(), score.start, strict=True))
        optimizer.zero_grad()
        (found + variant.anchor * pull).backward()
        nn.utils.clip_grad_norm_(score.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def kept(score: Score, model: Retriever, name: str, seed: int) -> list[float]:
    """Attention that the selected blocks hold, over that of the best blocks, at each density."""
    query, key, asked = drawn(model, name, torch.Generator().manual_seed(10**6 + seed))
    rows = torch.arange(N)
    mass = shares(query, key, rows)
    given = [x.masked_fill(~EARLIER, -torch.inf) for x in (score(query, key, rows), mass)]
    found = []
    for density in DENSITIES:
        wanted = (budget_of(density, T).wanted(OWN + 1) - 1)[:, None]
        held = []
        for x in given:
            best = (x.argsort(-1, descending=True).argsort(-1) < wanted) & (x > -torch.inf)
            share = (mass * (best | (OWN[:, None] == COLUMN))).sum(-1)
            held.append(float(share.transpose(1, 2)[asked].mean()))
        found.append(held[0] / held[1])
    return found


def measure(models: Starts, name: str, seed: int, variant: Variant) -> dict[str, Any]:
    """A line of results."""
    model = models.model(name, seed)
    torch.manual_seed(3000 + seed)
    score = Score(variant, *drawn(model, name, torch.Generator().manual_seed(4000 + seed))[:2])
    start = kept(score, model, name, seed)
    train(score, model, name, seed)
    return {"operations": variant.operations, "start": start, "trained": kept(score, model, name, seed)}


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Markdown table: attention kept over the oracle's, mean and standard deviation over seeds and tasks."""
    text = [
        "| score | operations | "
        + " | ".join(f"{when}, {100 * d:g} %" for d in DENSITIES for when in ("start", "trained"))
        + " |"
    ]
    text.append("|---" * (2 + 2 * len(DENSITIES)) + "|")
    for name in VARIANTS:
        mine = [line for line in lines if line["variant"] == name]
        cells = [[x[when][i] for x in mine] for i in range(len(DENSITIES)) for when in ("start", "trained")]
        if mine:
            shown = " | ".join(f"{statistics.mean(x):.3f} ± {_over_seeds(mine, x):.3f}" for x in cells)
            text.append(f"| {name} | {mine[0]['operations']:g} | {shown} |")
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
    given = parser.parse_args()
    if not given.table:
        models, known = Starts(SUITE), facts("cpu")
        for seed in given.seeds:
            for name in SUITE.tasks:
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
