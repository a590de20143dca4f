"""Settings of training, each changed alone, on the retrieval tasks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from .retrieval import HEADS, SUITES, Line, Starts, sources
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
SHARED = 'score_unit=1, match_rank=16, select="all"'
GROUP_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen, `score_unit=2, match_rank=32`": ("frozen", {"score_unit": 2, "match_rank": 32}),
    "learned, `score_unit=2, match_rank=32`": ("learned", {"score_unit": 2, "match_rank": 32}),
    f"frozen, `{SHARED}`, fitted": (
        "frozen",
        {"score_unit": 1, "match_rank": 16, "select": "all", "fitted": True},
    ),
    f"learned, `{SHARED}`, fitted": (
        "learned",
        {"score_unit": 1, "match_rank": 16, "select": "all", "fitted": True},
    ),
    'learned, `score_unit=1, match_rank=8, select="all"`, fitted': (
        "learned",
        {"score_unit": 1, "match_rank": 8, "select": "all", "fitted": True},
    ),
    "oracle, one list for both heads": ("oracle", {"group": HEADS}),
}
"""Rows of the suite "group": one list of blocks for both heads, beside pairs of tokens with a list for each head."""
FOUR = "4 heads: "
FOUR_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    FOUR + name: row
    for name, row in (START_NAMES | GROUP_NAMES).items()
    if name in ("learned, `score_unit=1, match_rank=16`, fitted", "learned, `score_unit=2, match_rank=32`")
    or SHARED in name
} | {f"{FOUR}oracle": ("oracle", {}), f"{FOUR}oracle, one list for all heads": ("oracle", {"group": 4})}
"""Rows of the suite "heads": models of four heads, with one list for all of them or a list for each."""
Run = tuple[str, str, float, int]
"""Task, name, wanted density and seed."""


def runs() -> list[Run]:
    """All runs; those of one checkpoint follow one another."""
    made = [(task, name, DENSITY, seed) for seed in SEEDS for task in TASKS for name in CHANGES]
    made += [("recall", name, DENSITY, seed) for seed in SEEDS for name in SCRATCH]
    fine = [(task, name, x, seed) for seed in SEEDS for task in ALL for x in (DENSITY, LOW_DENSITY) for name in FINE]
    return list(dict.fromkeys(made + fine))


def _runs_of(names: dict[str, Any]) -> list[Run]:
    return [(task, name, x, seed) for seed in SEEDS for task in ALL for x in (DENSITY, LOW_DENSITY) for name in names]


SUITE_RUNS: dict[str, Callable[[], list[Run]]] = {
    "recipe": runs,
    "start": partial(_runs_of, START_NAMES),
    "group": partial(_runs_of, GROUP_NAMES),
    "heads": lambda: [(task, name, DENSITY, seed) for seed in SEEDS for task in TASKS for name in FOUR_NAMES],
}
"""Runs by the name of a suite that changes settings."""


def measure(left: list[Run], heads: int = HEADS) -> Iterator[Line]:
    """A line for each run. Without a dense start, a row takes all steps with its own blocks."""
    suite = replace(SUITES["cpu"], heads=heads)
    starts, code = Starts(suite), sources()
    scratch = Starts(replace(suite, dense_steps=0, steps=suite.dense_steps + suite.steps))
    for task, name, density, seed in left:
        row, settings = (CHANGES | START_NAMES | GROUP_NAMES | FOUR_NAMES).get(name, (name.partition(",")[0], {}))
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
    """Markdown table of right answers by the unit, rank and lists of scores, beside oracles, at each density.

    Operations are multiply-adds for each query, key and head while ranking.
    """
    unit = "`score_unit=4, match_rank=32`"
    named = {name: CHANGES[name] for name in FINE} | START_NAMES | GROUP_NAMES
    coarse = {"score_unit": 4, "match_rank": 32}
    rows = {"frozen": (f"frozen, {unit}", coarse), "learned": (f"learned, {unit}", coarse)}
    rows |= {name: (name, settings) for name, (row, settings) in named.items() if row != "oracle"}
    rows |= {"oracle": ("oracle", {})} | {x: (x, {}) for x, (row, _) in named.items() if row == "oracle"}
    text = [f"| counted density | row | operations | {' | '.join(ALL)} |", "|---" * (len(ALL) + 3) + "|"]
    for density in (DENSITY, LOW_DENSITY):
        for name, (shown, settings) in rows.items():
            mine = [x for x in lines if x["wanted"] == density and name == x.get("setting", x["pattern"])]
            mine = [x for x in mine if name in named or x["suite"] == "cpu"]
            if mine:
                values = [[x["quality"] for x in mine if x["task"] == task] for task in ALL]
                cost = f"{operations(settings):g}" if settings else ""
                text.append(f"| {100 * density:g} % | {shown} | {cost} | {' | '.join(map(spread, values))} |")
    return text


def heads_table(lines: list[Line]) -> list[str]:
    """Markdown table of right answers of models of four heads."""
    text = [f"| row | operations | {' | '.join(TASKS)} |", "|---" * (len(TASKS) + 2) + "|"]
    for name, (_, settings) in FOUR_NAMES.items():
        mine = [x for x in lines if x.get("setting") == name]
        if mine:
            values = [[x["quality"] for x in mine if x["task"] == task] for task in TASKS]
            cost = f"{operations(settings, 4):g}" if "match_rank" in settings else ""
            text.append(f"| {name.removeprefix(FOUR)} | {cost} | {' | '.join(map(spread, values))} |")
    return text


def operations(settings: dict[str, Any], heads: int = HEADS) -> float:
    """Multiply-adds for each query, key and head while ranking by a scorer with these settings."""
    return settings["match_rank"] / settings["score_unit"] / (heads if settings.get("select") == "all" else 1)


def spread(values: list[float]) -> str:
    """Mean and standard deviation, as text."""
    if not values:
        return ""
    return f"{statistics.mean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")
