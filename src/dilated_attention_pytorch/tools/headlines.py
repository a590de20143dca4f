"""The headlines of the original reports, beside what the same words mean here and what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from .gpu_tables import Line
from .measure import readable_bytes
from .page import Heading, Part, Table, tokens_text
from .suite_tables import Record, records, speedups

NOT_MEASURED = "not measured"
Finding = Callable[[Sequence[Line], Sequence[Record]], list[str]]


def longest(lines: Sequence[Line], timed: Sequence[Record]) -> list[str]:
    """The longest forward a device ran, within 8 GiB and within all its memory."""
    best: dict[tuple[str, float], Line] = {}
    for line in lines:
        if line.get("case") == "extreme" and line.get("direction") == "forward" and "n" in line:
            if line["subject"] not in ("dilated", "block-sparse 1 %"):
                continue
            key = line["device"], line["cap_gib"] or 0.0
            best[key] = max(best.get(key, line), line, key=lambda x: x["n"])
    return [
        f"{line['n']:,} tokens ({line['subject']}) within {f'{cap:.3g} GiB' if cap else 'all memory'}, "
        f"limited by {line['limited_by']}, {device}"
        for (device, cap), line in sorted(best.items())
    ]


def memory(lines: Sequence[Line], timed: Sequence[Record]) -> list[str]:
    """What a forward adds to its inputs at the longest length measured with 8 heads of 64."""
    found = []
    for device, own in _by_device(timed):
        here = [r for r in own if r.direction == "forward" and not r.is_dense and r.heads == 8 and r.d == 64 and r.peak]
        here = [r for r in here if r.n >= 2**13 and r.line.get("subject", "ours") == "ours"]
        if here:
            r = max(here, key=lambda r: (r.n, -r.density, r.name))
            what = f"{r.name}, {r.line['dtype']}, output included"
            found.append(f"{readable_bytes(r.peak or 0)} for {tokens_text(r.n)} tokens ({what}), {device}")
    return found


def at_eight_thousand(lines: Sequence[Line], timed: Sequence[Record]) -> list[str]:
    """Speed-up over dense at 8K tokens with 98 % of the blocks left out."""
    return [
        f"{times:.1f}x ({r.name}, {r.density:.1%} kept), {device}"
        for device, own in _by_device(timed)
        for r, times in speedups(own)
        if r.n == 2**13 and 0.015 <= r.density <= 0.025
    ]


def on_average(lines: Sequence[Line], timed: Sequence[Record]) -> list[str]:
    """Mean speed-up over dense with a tenth of the blocks, over all lengths from 4K to 64K."""
    found = []
    for device, own in _by_device(timed):
        here = [(r, t) for r, t in speedups(own) if 2**12 <= r.n <= 2**16 and 0.08 <= r.density <= 0.13]
        if here:
            mean = math.exp(sum(math.log(times) for _, times in here) / len(here))
            lengths = ", ".join(tokens_text(n) for n in sorted({r.n for r, _ in here}))
            found.append(f"{mean:.1f}x (geometric mean of {len(here)} cases at {lengths}), {device}")
    return found


def cache_hits(lines: Sequence[Line], timed: Sequence[Record]) -> list[str]:
    """Share of the calls of whole suites whose plan was there."""
    told: dict[tuple[str, str], Line] = {}
    for line in lines:
        if line.get("case") == "plan cache":
            told[line["device"], line["suite"]] = line
    found = []
    for device in sorted({device for device, _ in told}):
        own = [line for (where, _), line in told.items() if where == device]
        hits, asked = sum(line["hits"] for line in own), sum(line["hits"] + line["misses"] for line in own)
        if asked:
            found.append(f"{hits / asked:.1%} of {asked:,} calls, {device}")
    return found


def dilation(lines: Sequence[Line], timed: Sequence[Record]) -> list[str]:
    """Time of three branches relative to one, beside the operations they compute."""
    found = []
    for device, own in _by_device(timed):
        here = {r.name: r for r in own if r.suite == "dilation" and r.direction == "forward" and r.n == 2**14}
        for kind in ("dilated", "block_dilated"):
            one, three = here.get(f"{kind} 2048x1"), here.get(f"{kind} 2048x1,4096x2,8192x4")
            if one and three:
                work = three.line["flops"] / one.line["flops"]
                found.append(f"{kind}: {three.ms / one.ms:.2f}x the time for {work:.2f}x the work, {device}")
    return found


def billion(lines: Sequence[Line], timed: Sequence[Record]) -> list[str]:
    """Sequences that were streamed, checked row by row."""
    found = [line for line in lines if "rows_checked" in line and line.get("passed") and line.get("tokens")]
    return [
        f"{line['tokens']:,} tokens in {line['seconds']:.1f} s, {line['rows_checked']:,} rows checked, {line['device']}"
        for line in sorted(found, key=lambda line: (-line["tokens"], line["device"]))[:2]
    ]


HEADLINES: tuple[tuple[str, str, Finding], ...] = (
    ("maximum length 131K on an 8 GB GPU", "longest forward with q, k, v resident, 8 heads of 64", longest),
    (
        "4.06 GB for a million tokens",
        "what a forward adds to its inputs at the longest length in these files, 8 heads of 64",
        memory,
    ),
    ("9.55x at 8K tokens, 98 % sparse", "forward and backward against torch's dense attention", at_eight_thousand),
    ("2.88x on average", "the same with a tenth of the blocks, mean over lengths", on_average),
    ("97 % cache hits", "calls that found their plan, over whole benchmark suites", cache_hits),
    ("three dilation levels take 4.3x as long", "forward at 16K tokens, beside the work of the branches", dilation),
    ("a billion tokens, devices simulated", "streamed through one device, rows checked against float64", billion),
)
"""Words of the original reports, what they mean here, and where the figure comes from."""


def headline_parts(lines: Sequence[Line]) -> Iterator[Part]:
    """The table of headlines, if any of them was measured."""
    timed = records(lines)
    rows = [[said, means, "; ".join(find(lines, timed)) or NOT_MEASURED] for said, means, find in HEADLINES]
    if all(row[2] == NOT_MEASURED for row in rows):
        return
    yield Heading("The headlines of the original reports")
    yield (
        "The reports this library takes its names from headline these figures, measured on a GTX 1080. The second "
        "column says what the same words mean here, the third what was measured."
    )
    yield Table(("said there", "means here", "measured here"), rows, words=3)


def _by_device(timed: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    devices = sorted({record.device for record in timed})
    return [(device, [record for record in timed if record.device == device]) for device in devices]
