"""Retrieval tasks of seconds on a CPU, and attention rows that share one budget of blocks.

Tasks of the retrieval suites:

- recall, a multi-query recall: the first half of a sequence contains 48 pairs of a key and a
  value, the second half 96 queries, each for any of them;
- needle: the first quarter contains 25 pairs; each query in the last quarter is for one of them,
  and the other 24 are distractors;
- induction: runs of 32 tokens are repeated from random positions; the model predicts the next
  token of each run.

A model of one layer first learns a task with dense attention. Every row continues from that
checkpoint with its own choice of blocks, on the same data and for the same number of steps. All
rows keep a token's own block and the same number of earlier blocks, so only the choice differs:

- nearest: the last blocks; random: new random blocks in every call;
- frozen: the scorer of `BlockSparseAdaptive` as initialised, a projection of queries and keys;
  learned: the same scorer, trained;
- oracle: the blocks with most of a token's attention, measured with dense attention.

Density is counted in the calls that ran: kept blocks over blocks visible to a causal token. At
1,024 tokens a token's own block alone is 3.1 %, so 6.25 % is the lowest density with a choice.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...nn import AdaptiveConfig, BlockSparseAdaptive, fit_scorers, scorer_parameters, task_parameters
from ...selection.rank import Budget
from ..bench.measure import digest

HEADS, WIDTH = 2, 32
NAMES = 256
"""Keys, as many values, and as many tokens of no meaning."""
ROWS = ("nearest", "random", "frozen", "oracle", "learned")
IGNORED = -100


Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalTask:
    """Sizes of the retrieval tasks, of which `width` is that of a head, and the runs of a suite."""

    tasks: tuple[str, ...] = ("recall", "needle", "induction")
    densities: tuple[float, ...] = (0.25, 0.125, 0.0625)
    seeds: tuple[int, ...] = (0, 1, 2)
    rows: tuple[str, ...] = ROWS

    is_causal: bool = True
    """tokens choose among earlier blocks; otherwise blocks of queries among all blocks"""
    heads: int = HEADS
    width: int = WIDTH
    n: int = 1024
    block: int = 16
    batch: int = 2
    dense_steps: int = 240
    """steps with dense attention that all rows share, before `steps` of each row"""
    steps: int = 40
    score_unit: int = 4
    hidden_dim: int = 16
    rate: float = 1e-2
    fresh: int = 6
    """batches on which accuracy is measured"""


def _filled(batch: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens of no meaning, and answers to nothing."""
    tokens = torch.randint(2 * NAMES, 3 * NAMES, (batch, n), generator=generator)
    return tokens, torch.full_like(tokens, IGNORED)


def _pairs(many: int, asked: int, first: float, later: float, task: RetrievalTask, generator: torch.Generator) -> Any:
    """`many` pairs of a key and a value before `first` of the sequence; queries after `later` for the first `asked`."""
    batch, n = task.batch, task.n
    tokens, answers = _filled(batch, n, generator)
    row = torch.arange(batch)[:, None]
    keys = torch.rand(batch, NAMES, generator=generator).argsort(1)[:, :many]
    values = torch.randint(NAMES, 2 * NAMES, (batch, many), generator=generator)
    at = 2 * torch.rand(batch, int(first * n) // 2, generator=generator).argsort(1)[:, :many]
    tokens[row, at], tokens[row, at + 1] = keys, values
    begin = int(later * n)
    place = begin + torch.rand(batch, n - begin, generator=generator).argsort(1)[:, : 2 * 48]
    which = torch.randint(asked, place.shape, generator=generator)
    tokens[row, place], answers[row, place] = keys.gather(1, which), values.gather(1, which)
    return tokens, answers


def recall(task: RetrievalTask, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """48 pairs of a key and a value in the first half; questions for any of them in the second."""
    return _pairs(48, 48, 0.5, 0.5, task, generator)


def needle(task: RetrievalTask, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """25 pairs in the first quarter; questions in the last quarter, for each of which 24 pairs are distractors."""
    return _pairs(25, 25, 0.25, 0.75, task, generator)


def induction(task: RetrievalTask, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Runs of 32 tokens of the first half again, from random places: what followed a token follows it again."""
    batch, half, run = task.batch, task.n // 2, 32
    tokens = torch.rand(batch, 3 * NAMES, generator=generator).argsort(1)[:, :half]
    begin = torch.randint(half - run, (batch, half // run), generator=generator)
    copied = tokens.gather(1, (begin[..., None] + torch.arange(run)).flatten(1))
    answers = torch.full((batch, task.n), IGNORED)
    answers[:, half:-1] = copied[:, 1:]
    # The last token of a run is followed by another run.
    answers[:, half + run - 1 :: run] = IGNORED
    return torch.cat([tokens, copied], 1), answers


TASKS: dict[str, Callable[[RetrievalTask, torch.Generator], tuple[Tensor, Tensor]]] = {
    "recall": recall,
    "needle": needle,
    "induction": induction,
}


class Retriever(nn.Module):
    """One attention layer: queries of the tokens, keys of the previous tokens, values of the tokens."""

    def __init__(self, attend: nn.Module, heads: int = HEADS, width: int = WIDTH, is_causal: bool = True) -> None:
        super().__init__()
        self.heads, self.is_causal, wide = heads, is_causal, heads * width
        self.embed = nn.Embedding(3 * NAMES, wide)
        self.query, self.key, self.value, self.out = (nn.Linear(wide, wide, bias=False) for _ in range(4))
        self.attend = attend

    def forward(self, tokens: Tensor, asked: Tensor) -> Tensor:
        """Logits of the tokens where `asked`, bool (b, n), is True."""
        x = self.embed(tokens)
        # Without a causal mask the token after a query would match the query better than the pair that answers it.
        keys = x if self.is_causal else x.masked_fill(asked[..., None], 0.0)
        before = F.pad(keys, (0, 0, 1, 0))[:, :-1]
        given = ((self.query, x), (self.key, before), (self.value, x))
        output = self.attend(*(f(h).unflatten(-1, (self.heads, -1)) for f, h in given), is_causal=self.is_causal)
        return F.linear(self.out(output.flatten(2)[asked]), self.embed.weight)


class DenseAttention(nn.Module):
    """torch's attention on (B, N, H, D)."""

    density = 1.0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        """Attend."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)


class RuleAttention(nn.Module):
    """Attention of tokens, or without a causal mask of blocks of queries, on their own block and the best by a rule.

    The rule is "nearest", "random" or "oracle"; `group` heads share their blocks.
    """

    def __init__(self, rule: str, block: int, budget: Budget, group: int = 1) -> None:
        super().__init__()
        self.rule, self.block, self.budget, self.group, self.density = rule, block, budget, group, 0.0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        """Attend over (B, N, H, D), with the same blocks that a row of `BlockSparseAdaptive` may list."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        n, size = q.shape[2], self.block
        t = n // size
        token, column = torch.arange(n), torch.arange(t)
        past = token <= token[:, None] if is_causal else torch.ones(n, n, dtype=torch.bool)
        own = token // size if is_causal else column
        seen = own + 1 if is_causal else torch.full((t,), t)
        with torch.no_grad():
            if self.rule == "nearest":
                score = -(column - own[:, None]).abs().double().expand(*q.shape[:2], -1, t)
            elif self.rule == "random":
                score = torch.rand(*q.shape[:2], len(own), t)
            else:
                logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~past, -torch.inf)
                score = logits.softmax(-1).unflatten(-1, (t, size)).sum(-1)
                score = score if is_causal else score.unflatten(2, (t, size)).sum(3)
            if self.group > 1:
                score = score.unflatten(1, (-1, self.group)).sum(2).repeat_interleave(self.group, 1)
            hidden = column >= own[:, None] if is_causal else column == own[:, None]
            score = score.masked_fill(hidden, -torch.inf)
            rank = score.argsort(-1, descending=True).argsort(-1)
            wanted = self.budget.wanted(seen) - 1
            kept = ((rank < wanted[:, None]) & (score > -torch.inf)) | (column == own[:, None])
            self.density = float(kept.double().mean((0, 1)).sum() / seen.sum())
            mask = kept.repeat_interleave(size, -1)
            mask = (mask if is_causal else mask.repeat_interleave(size, -2)) & past
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def budget_of(density: float, blocks: int, is_causal: bool = True) -> Budget:
    """Budget whose counted density over a sequence is nearest to a given density."""
    seen = torch.arange(1, blocks + 1) if is_causal else torch.tensor([blocks])

    def counted(kept: float) -> float:
        return float(Budget(kept, None, 1, None).wanted(seen).sum() / seen.sum())

    fractions = [density * x / 1000 for x in range(1001)]
    return Budget(min(fractions, key=lambda kept: abs(counted(kept) - density)), None, 1, None)


def attend(row: str, task: RetrievalTask, density: float, **settings: Any) -> nn.Module:
    """Attention of a row at a counted density."""
    if row == "dense":
        return DenseAttention()
    budget = budget_of(density, task.n // task.block, task.is_causal)
    if row not in ("frozen", "learned"):
        return RuleAttention(row, task.block, budget, **settings)
    config = AdaptiveConfig(
        base_sparsity=1 - budget.kept,
        k_min=1,
        local_blocks=1,
        sink_blocks=0,
        hidden_dim=task.hidden_dim,
        score_unit=task.score_unit,
        score_gradient="distill" if row == "learned" else "none",
    )
    config = replace(config, **settings)
    return BlockSparseAdaptive([task.n], [1], task.heads, task.width, config, block_size=task.block)


def density_of(module: nn.Module) -> float:
    """Counted density of a module's last call: blocks kept over blocks that its rows see."""
    if isinstance(module, BlockSparseAdaptive):
        return module.statistics()["density"]
    assert isinstance(module, DenseAttention | RuleAttention)
    return module.density


def train(model: Retriever, name: str, task: RetrievalTask, steps: int, generator: torch.Generator) -> list[float]:
    """Train on fresh sequences; the counted density of every step."""
    groups = [x for x in (task_parameters(model), scorer_parameters(model)) if x]
    optimizer = torch.optim.Adam([{"params": x} for x in groups], task.rate)
    densities = []
    model.train()
    for _ in range(steps):
        tokens, answers = TASKS[name](task, generator)
        optimizer.zero_grad()
        asked = answers != IGNORED
        F.cross_entropy(model(tokens, asked), answers[asked]).backward()
        for group in groups:
            nn.utils.clip_grad_norm_(group, 1.0)
        optimizer.step()
        densities.append(density_of(model.attend))
    return densities


@torch.no_grad()
def accuracy(model: Retriever, name: str, task: RetrievalTask, seed: int) -> float:
    """Share of right answers on fresh sequences."""
    fresh = torch.Generator().manual_seed(10**6 + seed)
    right = total = 0
    model.eval()
    for _ in range(task.fresh):
        tokens, answers = TASKS[name](task, fresh)
        asked = answers != IGNORED
        right += int((model(tokens, asked).argmax(-1) == answers[asked]).sum())
        total += int(asked.sum())
    return right / total


class Starts:
    """Dense checkpoints that rows continue from, one for each task and seed."""

    def __init__(self, task: RetrievalTask) -> None:
        self.task = task
        self._models: dict[tuple[str, int], Retriever] = {}

    def model(self, name: str, seed: int) -> Retriever:
        """A copy of the checkpoint."""
        if (name, seed) not in self._models:
            torch.manual_seed(seed)
            model = Retriever(DenseAttention(), self.task.heads, self.task.width, self.task.is_causal)
            train(model, name, self.task, self.task.dense_steps, torch.Generator().manual_seed(seed))
            self._models = {(name, seed): model}
        return copy.deepcopy(self._models[name, seed])

    def run(
        self, name: str, row: str, density: float, seed: int, fitted: bool = False, **settings: Any
    ) -> dict[str, Any]:
        """Accuracy of a row after its own steps, with the densities that ran; `fitted`: see `fit_scorers`."""
        task = self.task
        model = self.model(name, seed)
        torch.manual_seed(1000 + seed)
        model.attend = attend(row, task, density, **settings)
        if fitted:
            tokens, answers = TASKS[name](task, torch.Generator().manual_seed(5000 + seed))
            fit_scorers(model, lambda: model(tokens, answers != IGNORED))
        begun = time.perf_counter()
        ran = train(model, name, task, task.steps, torch.Generator().manual_seed(2000 + seed))
        took = time.perf_counter() - begun
        quality = accuracy(model, name, task, seed)
        return {
            "quality": quality,
            "density": density_of(model.attend),
            "training_density": (task.dense_steps + sum(ran)) / (task.dense_steps + task.steps),
            "n": task.n,
            "steps": task.steps,
            "dense_steps": task.dense_steps,
            "parameters": sum(p.numel() for p in model.parameters()),
            "scorer_parameters": sum(p.numel() for p in scorer_parameters(model)),
            "seconds": took,
        }


SUITES = {
    "cpu": RetrievalTask(),
    "ci": RetrievalTask(
        tasks=("recall", "needle"),
        densities=(0.125,),
        seeds=(0,),
        rows=("frozen", "learned"),
        dense_steps=200,
        width=64,
        score_unit=1,
    ),
    "tiny": RetrievalTask(
        n=256, batch=1, dense_steps=2, steps=2, fresh=1, tasks=("recall", "induction"), densities=(0.5,), seeds=(0, 1)
    ),
}


def runs(suite: RetrievalTask) -> list[tuple[str, str, float, int]]:
    """Task, row, wanted density and seed of every run; those of one checkpoint follow one another."""
    return [
        (task, row, density, seed)
        for seed in suite.seeds
        for task in suite.tasks
        for density in (1.0, *suite.densities)
        for row in (("dense",) if density == 1.0 else suite.rows)
    ]


def sources() -> str:
    """Hash of the code that the results are about, without comments and docstrings: selection, learned attention, and
    this file."""
    package = Path(__file__).resolve().parents[2]
    folders = (package / "selection", package / "nn" / "adaptive")
    return digest([*sorted(path for folder in folders for path in folder.rglob("*.py")), Path(__file__)])


def measure(suite: RetrievalTask, left: Iterable[tuple[str, str, float, int]]) -> Iterator[Line]:
    """A line for each run."""
    starts, code = Starts(suite), sources()
    for task, row, density, seed in left:
        line = {"task": task, "pattern": row, "wanted": density, "seed": seed, "sources": code}
        yield line | starts.run(task, row, density, seed)
