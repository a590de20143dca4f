"""Tables of the retrieval suites."""

from __future__ import annotations

import statistics

from .retrieval import ROWS, SUITES, Line

LEARNED_TASK = 0.75
"""Share of right answers that dense attention must reach for a task to count."""


def spread(values: list[float]) -> str:
    """Mean and standard deviation, as text."""
    if not values:
        return ""
    return f"{statistics.mean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def table(lines: list[Line]) -> list[str]:
    """Markdown table of a suite: share of right answers, mean and standard deviation over seeds, by task and row."""
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    head = f"| counted density | row | {' | '.join(tasks)} | parameters | work of the whole training |"
    text = [head, "|---" * (len(tasks) + 4) + "|"]
    for density in sorted({line["wanted"] for line in lines}, reverse=True):
        for row in ("dense", *ROWS):
            mine = [line for line in lines if (line["wanted"], line["pattern"]) == (density, row)]
            if mine:
                counted = statistics.mean(line["density"] for line in mine)
                cells = [spread([x["quality"] for x in mine if x["task"] == task]) for task in tasks]
                work = f"{100 * statistics.mean(x['training_density'] for x in mine):.0f} %"
                last = f"{mine[0]['parameters']:,} | {work}"
                text.append(f"| {100 * counted:.3g} % | {row} | {' | '.join(cells)} | {last} |")
    return text


def learned_all(lines: list[Line]) -> bool:
    """Whether dense attention learned every task, so that the rows can be compared."""
    dense: dict[str, list[float]] = {}
    for line in lines:
        if line["pattern"] == "dense":
            dense.setdefault(line["task"], []).append(line["quality"])
    return all(statistics.mean(values) >= LEARNED_TASK for values in dense.values())


def gains(lines: list[Line]) -> dict[tuple[str, float], float]:
    """Mean over seeds of the answers that learning adds to the frozen scorer, by task and density."""
    answers = {(x["task"], x["wanted"], x["seed"], x["pattern"]): x["quality"] for x in lines}
    found: dict[tuple[str, float], list[float]] = {}
    for (task, density, seed, row), quality in answers.items():
        frozen = answers.get((task, density, seed, "frozen"))
        if row == "learned" and frozen is not None:
            found.setdefault((task, density), []).append(quality - frozen)
    return {key: statistics.mean(values) for key, values in found.items()}


def report(lines: list[Line]) -> list[str]:
    """Section of the page for the retrieval suites in the results."""
    text = []
    for suite in dict.fromkeys(line["suite"] for line in lines):
        rows = [line for line in lines if line["suite"] == suite]
        first = rows[0]
        seeds = len({x["seed"] for x in rows})
        text += [f"## Retrieval, suite {suite}: sequences of {first['n']:,}", ""]
        if not learned_all(rows):
            text += ["Dense attention did not learn every task in this run.", ""]
        text += [
            f"Share of right answers, mean and standard deviation over {seeds} seeds. All rows share "
            f"{first['dense_steps']} steps of dense attention and train another {first['steps']} steps with their own "
            "choice; the last column counts the blocks of both, relative to dense attention. The scorer has "
            f"{max(x['scorer_parameters'] for x in rows):,} of the parameters and scores sub-blocks of "
            f"{SUITES[suite].score_unit} tokens.",
            "",
            *table(rows),
            "",
        ]
        found = gains(rows)
        if found:
            tasks, densities = sorted({task for task, _ in found}), sorted({density for _, density in found})
            text += ["Right answers that training adds to the frozen scorer, mean over seeds:", ""]
            text += [f"| counted density | {' | '.join(tasks)} |", "|---" * (len(tasks) + 1) + "|"]
            for density in reversed(densities):
                cells = [f"{found[task, density]:+.3f}" for task in tasks if (task, density) in found]
                text.append(f"| {100 * density:g} % | {' | '.join(cells)} |")
            text.append("")
        text += [f"Measured on {first.get('device', '')}; the results name the seeds and a hash of the sources.", ""]
    return text
