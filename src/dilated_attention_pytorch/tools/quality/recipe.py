"""Settings of training, each changed alone, on the retrieval tasks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .retrieval import SUITES, Line, RetrievalTask, Starts, sources
from .retrieval import TASKS as ALL

DENSITY, LOW_DENSITY = 0.125, 0.0625
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
BY_GRADIENT = ", rows weighted by their own gradients"
"""End of the names of measured rows of earlier sources, whose scorers learned nothing from tokens without a loss."""


FINE = ("frozen, `score_unit=1, match_rank=16`", "learned, `score_unit=1, match_rank=16`")
"""Names that are also measured on the other task, and at the low density."""
START_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen, `score_unit=1, match_rank=16`, fitted": ("frozen", {"score_unit": 1, "match_rank": 16, "fitted": True}),
    "learned, `score_unit=1, match_rank=16`, fitted": ("learned", {"score_unit": 1, "match_rank": 16, "fitted": True}),
    "learned, `score_unit=1, match_rank=16`, fitted, guarded": (
        "learned",
        {"score_unit": 1, "match_rank": 16, "fitted": True, "guarded": True},
    ),
    "frozen, `score_unit=1, match_rank=8`, fitted": ("frozen", {"score_unit": 1, "match_rank": 8, "fitted": True}),
    "learned, `score_unit=1, match_rank=8`, fitted": ("learned", {"score_unit": 1, "match_rank": 8, "fitted": True}),
}
"""Rows of the suite "start": scorers whose start is fitted to queries and keys. Their controls are those of `FINE`."""
Run = tuple[str, str, float, int]
"""Task, name, wanted density and seed."""


def runs() -> list[Run]:
    """All runs; those of one checkpoint follow one another."""
    made = [(task, name, DENSITY, seed) for seed in SEEDS for task in TASKS for name in CHANGES]
    made += [("recall", name, DENSITY, seed) for seed in SEEDS for name in SCRATCH]
    fine = [(task, name, x, seed) for seed in SEEDS for task in ALL for x in (DENSITY, LOW_DENSITY) for name in FINE]
    return list(dict.fromkeys(made + fine))


def start_runs() -> list[Run]:
    """Runs of the suite "start"."""
    return [
        (task, name, x, seed) for seed in SEEDS for task in ALL for x in (DENSITY, LOW_DENSITY) for name in START_NAMES
    ]


def measure(left: list[Run], suite: RetrievalTask = SUITES["cpu"]) -> Iterator[Line]:
    """A line for each run. Without a dense start, a row takes all steps with its own blocks."""
    starts, code = Starts(suite), sources()
    scratch = Starts(replace(suite, dense_steps=0, steps=suite.dense_steps + suite.steps))
    for task, name, density, seed in left:
        row, settings = (CHANGES | START_NAMES).get(name, (name.partition(",")[0], {}))
        line = {"task": task, "pattern": row, "setting": name, "wanted": density, "seed": seed, "sources": code}
        yield line | (scratch if name in SCRATCH else starts).run(task, row, density, seed, **settings)


def table(lines: list[Line]) -> list[str]:
    """Markdown table of right answers, mean and standard deviation over seeds.

    Rows of other suites do not take part.
    """
    lines = [x for x in lines if "setting" in x and x["wanted"] == DENSITY and x["task"] in TASKS]
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    text = [f"| setting | {' | '.join(tasks)} | seeds |", "|---" * (len(tasks) + 2) + "|"]
    for name in [x + end for end in ("", BY_GRADIENT) for x in (*CHANGES, *SCRATCH)]:
        mine = [line for line in lines if line["setting"] == name]
        if mine:
            values = [[x["quality"] for x in mine if x["task"] == task] for task in tasks]
            text.append(f"| {name} | {' | '.join(map(spread, values))} | {len({x['seed'] for x in mine})} |")
    return text


def fine_table(lines: list[Line]) -> list[str]:
    """Markdown table of right answers by the unit and rank of scores, beside the oracle, at each density."""
    unit = "`score_unit=4, match_rank=32`"
    names = {"frozen": f"frozen, {unit}", "learned": f"learned, {unit}"} | {x: x for x in (*FINE, *START_NAMES)}
    names |= {"oracle": "oracle"}
    text = [f"| counted density | row | {' | '.join(ALL)} |", "|---" * (len(ALL) + 2) + "|"]
    for density in (DENSITY, LOW_DENSITY):
        for name, shown in names.items():
            mine = [x for x in lines if x["wanted"] == density and name == x.get("setting", x["pattern"])]
            mine = [x for x in mine if name in (*FINE, *START_NAMES) or x["suite"] == "cpu"]
            if mine:
                values = [[x["quality"] for x in mine if x["task"] == task] for task in ALL]
                text.append(f"| {100 * density:g} % | {shown} | {' | '.join(map(spread, values))} |")
    return text


def spread(values: list[float]) -> str:
    """Mean and standard deviation, as text."""
    if not values:
        return ""
    return f"{statistics.mean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")
