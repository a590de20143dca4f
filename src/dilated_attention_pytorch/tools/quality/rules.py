"""Published rules of `select_blocks` at one counted density, on the retrieval tasks.

All rows use the checkpoint trained with dense attention, without further training. Tokens choose
among the blocks up to their own block, which is always kept. A rule with a count keeps the same
number of blocks for every token. The share of a top-p row is found by bisection on other
sequences, so that it keeps the same number on average. With top-p a token keeps at least two
blocks, so an average of two blocks is the same choice as a count of two.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...selection import selectors
from ...selection.attention import selected_attention
from ..bench.measure import digest
from . import retrieval
from .retrieval import IGNORED, SUITES, TASKS, Line, RetrievalTask, Retriever, Starts, accuracy
from .retrieval_report import spread

RULES: dict[str, tuple[str, bool]] = {
    "random": ("random", False),
    "mean (MoBA)": ("mean", False),
    "mean, top-p (FlexPrefill)": ("mean", True),
    "box (Quest)": ("box", False),
    "antidiagonal (XAttention)": ("antidiagonal", False),
    "sub_blocks": ("sub_blocks", False),
    "sub_blocks, top-p": ("sub_blocks", True),
    "oracle": ("oracle", False),
}
"""Rule, and whether its budget is a share, by the name of a row."""
BISECTIONS = 10
CALIBRATION = 2
"""Batches on which a share is found."""

Run = tuple[str, str, int, int]
"""Task, row, blocks that a token keeps (0 for dense attention) and seed"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSuite:
    """Runs of the suite "rules"."""

    task: RetrievalTask = SUITES["cpu"]
    budgets: tuple[int, ...] = (8, 4, 2)
    """Blocks that a token keeps, its own included"""

    def runs(self) -> list[Run]:
        """Every run; those of one checkpoint follow one another."""
        rows = [("dense", 0), *((row, budget) for budget in self.budgets for row in RULES)]
        return [(task, *row, seed) for seed in self.task.seeds for task in self.task.tasks for row in rows]


def counted_density(kept: int, blocks: int) -> float:
    """Blocks that a count keeps in a causal sequence, over blocks that tokens see."""
    seen = torch.arange(1, blocks + 1)
    return int(seen.clamp(max=kept).sum()) / int(seen.sum())


class SelectorAttention(nn.Module):
    """Causal attention of tokens on the blocks of `select_blocks`.

    Args:
        rule: of `select_blocks`.
        block: tokens of a block.
        budget: blocks that a token keeps, or the share of predicted attention.
    """

    def __init__(self, rule: str, block: int, budget: int | float) -> None:
        super().__init__()
        self.rule, self.block, self.budget = rule, block, budget
        self.densities: list[float] = []
        """Counted in every call: blocks kept over blocks that a causal token sees."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        """Attend over (B, N, H, D)."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        indices = selectors.select_blocks(q, k, self.rule, self.budget, granularity=self.block, is_causal=is_causal)
        seen = int((torch.arange(q.shape[2]) // self.block + 1).sum()) * q.shape[0] * q.shape[1]
        self.densities.append(int((indices >= 0).sum()) / seen)
        output = selected_attention(q, k, v, indices, granularity=self.block, is_causal=is_causal)
        return output.transpose(1, 2)


def sources() -> str:
    """Hash of the code that the results are about: the rules, the tasks and this file."""
    return digest([Path(selectors.__file__), Path(retrieval.__file__), Path(__file__)])


def measure(suite: RuleSuite, left: Iterable[Run]) -> Iterator[Line]:
    """A line for each run."""
    task, starts = suite.task, Starts(suite.task)
    code = sources()
    for name, row, budget, seed in left:
        model, density = starts.model(name, seed), 1.0
        torch.manual_seed(1000 + seed)
        if budget:
            rule, top_p = RULES[row]
            attend = model.attend = SelectorAttention(rule, task.block, budget)
            if top_p:
                attend.budget = _share(model, attend, name, task, counted_density(budget, task.n // task.block), seed)
            attend.densities.clear()
        quality = accuracy(model, name, task, seed)
        if isinstance(model.attend, SelectorAttention):
            density = statistics.mean(model.attend.densities)
        line = {"task": name, "pattern": row, "budget": budget, "seed": seed, "sources": code, "quality": quality}
        yield line | {"density": density, "n": task.n, "block": task.block, "dense_steps": task.dense_steps}


@torch.no_grad()
def _share(
    model: Retriever, attend: SelectorAttention, name: str, task: RetrievalTask, wanted: float, seed: int
) -> float:
    """Share of predicted attention at which a model keeps the wanted density of blocks."""
    fresh = torch.Generator().manual_seed(3000 + seed)
    batches = [TASKS[name](task, fresh) for _ in range(CALIBRATION)]
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        attend.budget, attend.densities = (low + high) / 2, []
        for tokens, answers in batches:
            model(tokens, answers != IGNORED)
        dense = statistics.mean(attend.densities) > wanted
        low, high = (low, attend.budget) if dense else (attend.budget, high)
    return (low + high) / 2


def table(lines: list[Line]) -> list[str]:
    """Markdown table: right answers by row and task, mean and standard deviation over seeds."""
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    text = [f"| counted density | rule | {' | '.join(tasks)} |", "|---" * (len(tasks) + 2) + "|"]
    for row in dict.fromkeys((line["budget"], line["pattern"]) for line in lines):
        mine = [line for line in lines if (line["budget"], line["pattern"]) == row]
        values = [[line["quality"] for line in mine if line["task"] == task] for task in tasks]
        counted = statistics.mean(line["density"] for line in mine)
        text.append(f"| {100 * counted:.1f} % | {row[1]} | {' | '.join(map(spread, values))} |")
    return text


def report(lines: list[Line]) -> list[str]:
    """Section of the page for the suites of rules in the results."""
    text: list[str] = []
    for suite in dict.fromkeys(line["suite"] for line in lines):
        rows = [line for line in lines if line["suite"] == suite]
        first, seeds = rows[0], len({line["seed"] for line in rows})
        text += [f"## Rules that choose blocks, suite {suite}: sequences of {first['n']:,}", ""]
        text += [*(__doc__ or "").partition("\n\n")[2].strip().split("\n"), ""]
        text += [
            f"Share of right answers after {first['dense_steps']} steps with dense attention, mean and standard "
            f"deviation over {seeds} seeds; blocks of {first['block']} tokens.",
            "",
            *table(rows),
            "",
            f"Measured on {first.get('device', '')}; the results name the seeds and a hash of the sources.",
            "",
        ]
    return text


RULE_SUITES = {
    "rules": RuleSuite(),
    "rules-tiny": RuleSuite(
        task=RetrievalTask(
            n=256, batch=1, dense_steps=2, steps=0, fresh=2, tasks=("recall",), densities=(), seeds=(0, 1)
        ),
        budgets=(4,),
    ),
}
