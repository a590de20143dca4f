"""Settings of training, each changed alone, on the retrieval tasks."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from dilated_attention_pytorch.tools.quality.retrieval import HEADS, SUITES, Line, Starts, sources
from dilated_attention_pytorch.tools.quality.retrieval import TASKS as ALL
from dilated_attention_pytorch.tools.quality.retrieval_report import spread

DENSITY, LOW_DENSITY = 0.125, 0.0625
TASKS = ("recall", "needle")
SEEDS = (0, 1, 2)
CHANGES = (
    "frozen",
    "learned",
    "learned, `exploration=True`",
    "frozen, `exploration=True`",
    "learned, `distill_min_tokens=1` (2 % of rows)",
    "learned, `distill_min_tokens=512`",
    "learned, `saliency_weighted=False`",
    "learned, `distill_start=20`",
    "frozen, `score_unit=1`",
    "learned, `score_unit=1`",
    "frozen, `score_unit=1, match_rank=16`",
    "learned, `score_unit=1, match_rank=16`",
    "frozen, `score_unit=1, match_rank=8`",
    "learned, `score_unit=1, match_rank=8`",
    "frozen, `score_unit=16`",
    "learned, `score_unit=16`",
)
"""Rows with settings; see `settings_of`."""
SCRATCH = ("frozen, no dense start", "learned, no dense start")
BY_GRADIENT = ", rows weighted by their own gradients"
"""End of the names of measured rows of earlier sources, whose scorers learned nothing from tokens without a loss."""
FINE = ("frozen, `score_unit=1, match_rank=16`", "learned, `score_unit=1, match_rank=16`")
"""Names that are also measured on the other task, and at the low density."""
START_NAMES = (
    "frozen, `score_unit=1, match_rank=16`, fitted",
    "learned, `score_unit=1, match_rank=16`, fitted",
    "learned, `score_unit=1, match_rank=16`, fitted, guarded",
    "frozen, `score_unit=1, match_rank=8`, fitted",
    "learned, `score_unit=1, match_rank=8`, fitted",
)
"""Rows of the suite "start": scorers whose start is fitted to queries and keys. Their controls are those of `FINE`."""
GROUP_NAMES = (
    "frozen, `score_unit=2, match_rank=32`",
    "learned, `score_unit=2, match_rank=32`",
    'frozen, `score_unit=1, match_rank=16, select="all"`, fitted',
    'learned, `score_unit=1, match_rank=16, select="all"`, fitted',
    'learned, `score_unit=1, match_rank=8, select="all"`, fitted',
    "oracle, one list for both heads",
)
"""Rows of the suite "group": one list of blocks for both heads, beside pairs of tokens with a list for each head."""
FOUR, WIDE = "4 heads: ", "64 wide: "
FOUR_NAMES = tuple(
    FOUR + name for name in (START_NAMES[1], *GROUP_NAMES[1:4], "oracle", "oracle, one list for all heads")
)
"""Rows of the suite "heads": models of four heads, with one list for all of them or a list for each."""
COARSE = "`score_unit=4, match_rank=32`"
FULL_RANK = "`score_unit=1, match_rank=32`"
WIDE_NAMES = tuple(
    WIDE + name
    for name in (
        "dense",
        *(f"{row}, {form}" for form in (COARSE, FULL_RANK) for row in ("frozen", "learned")),
        *GROUP_NAMES[:2],
        *FINE,
        *START_NAMES[:2],
        "oracle",
    )
)
"""Rows of the suite "width": models with heads of 64, where a rank of 32 is no longer all of a head."""
BLOCKS = "blocks choose: "
BLOCK_NAMES = tuple(
    BLOCKS + name
    for name in (
        "dense",
        "random",
        *(f"{row}, {form}" for form in (COARSE, FULL_RANK) for row in ("frozen", "learned")),
        *START_NAMES[:2],
        "oracle",
        f"learned, {FULL_RANK}, guarded",
    )
)
"""Rows of the suite "blocks": models with heads of 64 and without a causal mask, where blocks of queries choose. The
last is measured at the first density alone."""
SHAPES: dict[str, dict[str, Any]] = {
    "heads": {"heads": 4},
    "width": {"width": 64},
    "blocks": {"width": 64, "is_causal": False},
}
"""Models of the suites whose models are not those of the suite "cpu"."""
INTRODUCTION = (
    f"Right answers at a counted density of {100 * DENSITY:g} %, with one setting changed at a time. Rows "
    "without a dense start train all steps with their own blocks. Rows weighted by their own gradients are a control "
    "measured with earlier sources; otherwise every row of a distillation batch has the weight of the mean gradient. "
    f"Rows that name no score unit use {COARSE}. `python benchmarks/quality_suites.py` measures these tables: its "
    "suites recipe, start, group, heads, width and blocks change one setting of the suite cpu at a time. Rows of all "
    "suites but width and blocks are of sources in which a row's own block took part in distillation."
)
STARTS = (
    "Right answers by the unit, rank, start and lists of scores. A fitted start is the best approximation of dot "
    "products on one batch (`fit_scorers`), otherwise the start is a random projection; a guarded scorer selects by "
    'its start in heads where training made it worse. With `select="all"` both heads have one score and one list. '
    "Operations are multiply-adds for each query, key and head while ranking."
)
SHAPE_NAMES = {"heads": FOUR_NAMES, "width": WIDE_NAMES, "blocks": BLOCK_NAMES}
SHAPE_INTRODUCTIONS = {
    "heads": f"Right answers of models with four heads of 32 at a counted density of {100 * DENSITY:g} %, where "
    '`select="all"` is one list for all four:',
    "width": f"Right answers of models with two heads of 64 at a counted density of {100 * DENSITY:g} %. The "
    "models above have heads of 32, for which a match of rank 32 is exact:",
    "blocks": "Right answers of models with two heads of 64 and without a causal mask, where blocks of 16 queries "
    "choose among all blocks. Tokens with a question give no key to the token after them, as that key would equal "
    "the question; otherwise the tasks are the same:",
}
Run = tuple[str, str, float, int]
"""Task, name, wanted density and seed."""


def settings_of(name: str, heads: int) -> tuple[str, dict[str, Any]]:
    """Kind and settings of a row from its name, for models of so many heads.

    >>> settings_of("learned, `score_unit=1, match_rank=16`, fitted", 2)
    ('learned', {'score_unit': 1, 'match_rank': 16, 'fitted': True})
    """
    row, _, rest = (name.partition(": ")[2] or name).partition(",")
    _, inside, flags = rest.split("`") if "`" in rest else ("", "", rest)
    found = {key: ast.literal_eval(value) for key, value in (x.split("=") for x in inside.split(", ") if x)}
    found |= {flag: True for flag in ("fitted", "guarded") if flag in flags}
    return row, found | ({"group": heads} if "one list" in flags else {})


def runs() -> list[Run]:
    """All runs; those of one checkpoint follow one another."""
    made = [(task, name, DENSITY, seed) for seed in SEEDS for task in TASKS for name in CHANGES]
    made += [("recall", name, DENSITY, seed) for seed in SEEDS for name in SCRATCH]
    fine = [(task, name, x, seed) for seed in SEEDS for task in ALL for x in (DENSITY, LOW_DENSITY) for name in FINE]
    return list(dict.fromkeys(made + fine))


def _runs_of(names: tuple[str, ...]) -> list[Run]:
    return [(task, name, x, seed) for seed in SEEDS for task in ALL for x in (DENSITY, LOW_DENSITY) for name in names]


SUITE_RUNS: dict[str, Callable[[], list[Run]]] = {
    "recipe": runs,
    "start": partial(_runs_of, START_NAMES),
    "group": partial(_runs_of, GROUP_NAMES),
    "heads": lambda: [("recall", name, DENSITY, seed) for seed in SEEDS for name in FOUR_NAMES],
    "width": lambda: [
        (task, name, 1.0 if name == f"{WIDE}dense" else DENSITY, seed)
        for seed in SEEDS
        for task in ALL
        for name in WIDE_NAMES
    ],
    "blocks": lambda: [
        (task, name, x, seed)
        for seed in SEEDS
        for task in ALL
        for name in BLOCK_NAMES
        for x in (
            (1.0,) if name == BLOCK_NAMES[0] else (DENSITY,) if name == BLOCK_NAMES[-1] else (DENSITY, LOW_DENSITY)
        )
    ],
}
"""Runs by the name of a suite that changes settings."""


def measure(left: Iterable[Run], shape: dict[str, Any]) -> Iterator[Line]:
    """A line for each run of models of a shape. Without a dense start, a row takes all steps with its own blocks."""
    suite = replace(SUITES["cpu"], **shape)
    starts, code = Starts(suite), sources()
    scratch = Starts(replace(suite, dense_steps=0, steps=suite.dense_steps + suite.steps))
    for task, name, density, seed in left:
        row, settings = settings_of(name, suite.heads)
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
    named = FINE + START_NAMES + GROUP_NAMES[:-1]
    rows = {"frozen": f"frozen, {COARSE}", "learned": f"learned, {COARSE}"} | {name: name for name in named}
    rows |= {"oracle": "oracle", GROUP_NAMES[-1]: GROUP_NAMES[-1]}
    text = [f"| counted density | row | operations | {' | '.join(ALL)} |", "|---" * (len(ALL) + 3) + "|"]
    for density in (DENSITY, LOW_DENSITY):
        for name, shown in rows.items():
            mine = [x for x in lines if x["wanted"] == density and name == x.get("setting", x["pattern"])]
            mine = [x for x in mine if name != shown.partition(",")[0] or x["suite"] == "cpu"]
            if mine:
                values = [[x["quality"] for x in mine if x["task"] == task] for task in ALL]
                cost = operations(shown)
                text.append(f"| {100 * density:g} % | {shown} | {cost} | {' | '.join(map(spread, values))} |")
    return text


def shape_table(lines: list[Line], suite: str) -> list[str]:
    """Markdown table of right answers of the models of a suite in `SHAPES`, by density if there are several."""
    mine = [x for x in lines if x["suite"] == suite]
    tasks = [task for task in ALL if any(x["task"] == task for x in mine)]
    several = any(x["wanted"] == LOW_DENSITY for x in mine)
    head = f"{'| counted density ' * several}| row | operations | {' | '.join(tasks)} |"
    text = [head, "|---" * (len(tasks) + 2 + several) + "|"]
    for density in (1.0, DENSITY, LOW_DENSITY):
        for name in SHAPE_NAMES[suite]:
            rows = [x for x in mine if (x["setting"], x["wanted"]) == (name, density)]
            if rows:
                values = [[x["quality"] for x in rows if x["task"] == task] for task in tasks]
                counted = f"| {100 * density:g} % " * several
                cost = operations(name, suite)
                text.append(f"{counted}| {name.partition(': ')[2]} | {cost} | {' | '.join(map(spread, values))} |")
    return text


def operations(name: str, suite: str = "cpu") -> str:
    """Multiply-adds for each query, key and head while ranking by the scorer of a row, if it has one."""
    shape = SHAPES.get(suite, {})
    heads = shape.get("heads", HEADS)
    row, settings = settings_of(name, heads)
    if row not in ("frozen", "learned"):
        return ""
    shared = heads if settings.get("select") == "all" else 1
    # Blocks of queries match their sub-blocks, tokens themselves.
    units = settings["score_unit"] ** (1 if shape.get("is_causal", True) else 2)
    return f"{settings['match_rank'] / units / shared:g}"


def report(lines: list[Line]) -> list[str]:
    """Sections of the page for the suites that change settings, between the rows of the suite "cpu"."""
    text = []
    if any("setting" in line for line in lines):
        text += ["## Training settings of learned attention", "", INTRODUCTION, "", *table(lines), ""]
        text += [STARTS, "", *fine_table(lines), ""]
    for suite, introduction in SHAPE_INTRODUCTIONS.items():
        if any(line["suite"] == suite for line in lines):
            text += [introduction, "", *shape_table(lines, suite), ""]
    return text
