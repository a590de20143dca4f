"""Settings of training, each changed alone, on the retrieval tasks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .retrieval import SUITES, Line, RetrievalTask, Starts, sources

DENSITY = 0.125
TASKS = ("recall", "needle")
SEEDS = (0, 1, 2)
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen": ("frozen", {}),
    "learned": ("learned", {}),
    "learned, `exploration=True`": ("learned", {"exploration": True}),
    "frozen, `exploration=True`": ("frozen", {"exploration": True}),
    "learned, `distill_min_tokens=1` (2 % of rows)": ("learned", {"distill_min_tokens": 1}),
    "learned, `distill_min_tokens=512`": ("learned", {"distill_min_tokens": 512}),
    "learned, `saliency_weighted=False`": ("learned", {"saliency_weighted": False}),
    "learned, `distill_start=20`": ("learned", {"distill_start": 20}),
    "frozen, `score_unit=1`": ("frozen", {"score_unit": 1}),
    "learned, `score_unit=1`": ("learned", {"score_unit": 1}),
    "frozen, `score_unit=1, match_rank=16`": ("frozen", {"score_unit": 1, "match_rank": 16}),
    "learned, `score_unit=1, match_rank=16`": ("learned", {"score_unit": 1, "match_rank": 16}),
    "frozen, `score_unit=1, match_rank=8`": ("frozen", {"score_unit": 1, "match_rank": 8}),
    "learned, `score_unit=1, match_rank=8`": ("learned", {"score_unit": 1, "match_rank": 8}),
    "frozen, `score_unit=16`": ("frozen", {"score_unit": 16}),
    "learned, `score_unit=16`": ("learned", {"score_unit": 16}),
}
"""Row and settings by name."""
SCRATCH = ("frozen, no dense start", "learned, no dense start")


def runs() -> list[tuple[str, str, int]]:
    """Task, name and seed of every run; those of one checkpoint follow one another."""
    made = [(task, name, seed) for seed in SEEDS for task in TASKS for name in CHANGES]
    return made + [("recall", name, seed) for seed in SEEDS for name in SCRATCH]


def measure(left: list[tuple[str, str, int]], suite: RetrievalTask = SUITES["cpu"]) -> Iterator[Line]:
    """A line for each run. Without a dense start, a row takes all steps with its own blocks."""
    starts, code = Starts(suite), sources()
    scratch = Starts(replace(suite, dense_steps=0, steps=suite.dense_steps + suite.steps))
    for task, name, seed in left:
        row, settings = CHANGES.get(name, (name.partition(",")[0], {}))
        line = {"task": task, "pattern": row, "setting": name, "wanted": DENSITY, "seed": seed, "sources": code}
        yield line | (scratch if name in SCRATCH else starts).run(task, row, DENSITY, seed, **settings)


def table(lines: list[Line]) -> list[str]:
    """Markdown table of right answers, mean and standard deviation over seeds.

    Rows of other suites do not take part.
    """
    lines = [x for x in lines if "setting" in x]
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    text = [f"| setting | {' | '.join(tasks)} | seeds |", "|---" * (len(tasks) + 2) + "|"]
    for name in [*CHANGES, *SCRATCH]:
        mine = [line for line in lines if line["setting"] == name]
        if mine:
            values = [[x["quality"] for x in mine if x["task"] == task] for task in tasks]
            text.append(f"| {name} | {' | '.join(map(_spread, values))} | {len({x['seed'] for x in mine})} |")
    return text


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.mean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")
