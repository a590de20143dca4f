"""The headlines of the original reports, beside what the same words mean here, what was measured and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from dilated_attention_pytorch.tools.bench.results import Line
from dilated_attention_pytorch.tools.bench.suite_tables import Record, records, speedups
from dilated_attention_pytorch.tools.html_page import Heading, Part, Table, readable_bytes, tokens_text

NOT_MEASURED = "not measured"
MILLION = 2**20


class Found(NamedTuple):
    """A figure in words, and the commands that measured it."""

    text: str
    commands: list[str]


Finding = Callable[[Sequence[Line], Sequence[Record]], list[Found]]


def longest(lines: Sequence[Line], timed: Sequence[Record]) -> list[Found]:
    """The longest forward a device ran, within 8 GiB and within all its memory."""
    best: dict[tuple[str, float], Line] = {}
    for line in lines:
        if line.get("case") == "extreme" and line.get("direction") == "forward" and "n" in line:
            if line["subject"] not in ("dilated", "block-sparse 1 %", "window"):
                continue
            key = line["device"], line["cap_gib"] or 0.0
            best[key] = max(best.get(key, line), line, key=lambda x: x["n"])
    found = []
    for (device, cap), line in sorted(best.items()):
        if "suite" in line:
            command = f"dap bench --suite extreme --memory {cap:.3g}"
        else:
            command = "python benchmarks/longest.py --out FILE" + (f" --cap {cap:.3g}" if cap else "")
        within = f"{cap:.3g} GiB" if cap else "all memory"
        text = f"{line['n']:,} tokens ({line['subject']}) within {within}, limited by {line['limited_by']}, {device}"
        found.append(Found(text, [command]))
    return found


def memory(lines: Sequence[Line], timed: Sequence[Record]) -> list[Found]:
    """What a forward adds to its inputs at the longest length measured with 8 heads of 64."""
    found = []
    for device, own in _by_device(timed):
        here = [r for r in own if r.direction == "forward" and not r.is_dense and r.heads == 8 and r.d == 64 and r.peak]
        here = [r for r in here if r.n >= 2**13 and r.line.get("subject", "ours") == "ours"]
        if here:
            r = max(here, key=lambda r: (r.n, -r.density, r.name))
            peak = r.peak or 0
            what = f"{readable_bytes(peak)} for {tokens_text(r.n)} tokens ({r.name}, {r.line['dtype']})"
            if r.n != MILLION:
                what += f", so {readable_bytes(peak * MILLION / r.n)} for a million"
            found.append(Found(f"{what}, {device}", [_command(r)]))
    return found


def multihead_memory(lines: Sequence[Line], timed: Sequence[Record]) -> list[Found]:
    """What projections add: a multihead class beside the class without them."""
    return _beside(
        timed, ("BlockSparseRingMultiheadDilatedAttention", "BlockSparseRingDilatedAttention"), lambda r: r.peak
    )


def adaptive(lines: Sequence[Line], timed: Sequence[Record]) -> list[Found]:
    """What it costs to choose blocks by content: learned beside fixed ones, a tenth of them each."""
    return _beside(timed, ("BlockSparseAdaptive", "BlockSparseRingDilatedAttention"), lambda r: r.ms)


def _beside(timed: Sequence[Record], names: tuple[str, str], value: Callable[[Record], float | None]) -> list[Found]:
    """How many times as much the first class takes in a forward as the second, at the longest length of both."""
    found = []
    for device, own in _by_device(timed):
        here = {(r.name, r.n): r for r in own if r.suite in ("standard", "variants") and r.direction == "forward"}
        lengths = [n for name, n in here if name == names[0] and (names[1], n) in here]
        for n in sorted(lengths)[-1:]:
            first, second = (here[name, n] for name in names)
            a, b = value(first), value(second)
            if a and b:
                found.append(Found(f"{a / b:.2f}x at {tokens_text(n)} tokens, {device}", [_command(first)]))
    return found


def at_eight_thousand(lines: Sequence[Line], timed: Sequence[Record]) -> list[Found]:
    """Speed-up over dense at 8K tokens with 98 % of the blocks left out."""
    found = []
    for device, own in _by_device(timed):
        here = [(t, r) for r, t in speedups(own) if r.n == 2**13 and 0.015 <= r.density <= 0.025]
        if here:
            least, most = min(t for t, _ in here), max(t for t, _ in here)
            times = f"{least:.1f}x" if len(here) == 1 else f"{least:.1f}x to {most:.1f}x in {len(here)} measurements"
            kept = " and ".join(sorted({f"{r.density:.1%}" for _, r in here}))
            commands = sorted({_command(r) for _, r in here})
            found.append(Found(f"{times} ({kept} of the blocks kept), {device}", commands))
    return found


def on_average(lines: Sequence[Line], timed: Sequence[Record]) -> list[Found]:
    """Mean speed-up over dense with a tenth of the blocks, over all lengths from 4K to 64K."""
    found = []
    for device, own in _by_device(timed):
        here = [(r, t) for r, t in speedups(own) if 2**12 <= r.n <= 2**16 and 0.08 <= r.density <= 0.13]
        if here:
            mean = math.exp(sum(math.log(times) for _, times in here) / len(here))
            lengths = ", ".join(tokens_text(n) for n in sorted({r.n for r, _ in here}))
            commands = sorted({_command(r) for r, _ in here})
            least = min(times for _, times in here)
            text = f"{mean:.1f}x (geometric mean of {len(here)} cases at {lengths}, the slowest {least:.1f}x), {device}"
            found.append(Found(text, commands))
    return found


def cache_hits(lines: Sequence[Line], timed: Sequence[Record]) -> list[Found]:
    """Share of the calls of whole suites whose plan was there."""
    told = [line for line in lines if line.get("case") == "plan cache"]
    found = []
    for device in sorted({line["device"] for line in told}):
        own = [line for line in told if line["device"] == device]
        warm, cold = (_share(own, prefix) for prefix in ("warm_", ""))
        texts = [f"{warm} after the first call of each case"] if warm else []
        texts += [f"{cold} with the first calls counted"] if cold else []
        if texts:
            commands = [f"dap bench --suite {name}" for name in sorted({line["suite"] for line in own})]
            found.append(Found(f"{', '.join(texts)}, {device}", commands))
    return found


def _share(told: Sequence[Line], prefix: str) -> str:
    hits, misses = (sum(line.get(prefix + name, 0) for line in told) for name in ("hits", "misses"))
    return f"{hits / (hits + misses):.1%} of {hits + misses:,} calls" if hits + misses else ""


def dilation(lines: Sequence[Line], timed: Sequence[Record]) -> list[Found]:
    """Time of three branches relative to one, beside the operations they compute."""
    found = []
    for device, own in _by_device(timed):
        here = {r.name: r for r in own if r.suite == "dilation" and r.direction == "forward" and r.n == 2**14}
        for kind in ("dilated", "block_dilated"):
            one, three = here.get(f"{kind} 2048x1"), here.get(f"{kind} 2048x1,4096x2,8192x4")
            if one and three:
                work = three.line["flops"] / one.line["flops"]
                text = f"{kind}: {three.ms / one.ms:.2f}x the time for {work:.2f}x the work, {device}"
                found.append(Found(text, [_command(one)]))
    return found


def exchanges(lines: Sequence[Line], timed: Sequence[Record]) -> list[Found]:
    """Time of moving the rows of K and V that ranks need, against passing all of them round a ring."""
    own = {line["world"]: line for line in lines if line.get("suite") == "context_parallel"}
    if not own:
        return []
    times = ", ".join(f"{line['times_faster']:.1f}x on {world} ranks" for world, line in sorted(own.items()))
    least = own[min(own)]
    text = f"{times}, {tokens_text(least['tokens_a_rank'])} tokens a rank, {least['cores']} cores, gloo over loopback"
    return [Found(text, ["python benchmarks/context_parallel.py"])]


def billion(lines: Sequence[Line], timed: Sequence[Record]) -> list[Found]:
    """Sequences that were streamed, checked row by row."""
    told = [line for line in lines if "rows_checked" in line and line.get("passed") and line.get("tokens")]
    found = []
    for line in sorted(told, key=lambda line: (-line["tokens"], line["device"]))[:2]:
        rate = f"{line['tokens'] / line['seconds'] / 1e6:.1f} million a second"
        text = f"{line['tokens']:,} tokens in {line['seconds']:.1f} s ({rate}), {line['rows_checked']:,} rows checked"
        found.append(Found(f"{text}, {line['device']}", [f"dap billion --tokens {line['tokens']}"]))
    return found


HEADLINES: tuple[tuple[str, str, Finding], ...] = (
    ("maximum length 131K on an 8 GB GPU", "longest forward with q, k, v resident, 8 heads of 64", longest),
    (
        "4.06 GB for a million tokens",
        "memory of a forward pass besides its inputs, output included, at the longest measured length, 8 heads of 64",
        memory,
    ),
    (
        "multihead takes 8.3x the memory",
        "the same for a multihead class, relative to the class without projections",
        multihead_memory,
    ),
    ("9.55x at 8K tokens, 98 % sparse", "forward and backward relative to torch's dense attention", at_eight_thousand),
    ("2.88x on average, 4K to 64K", "the same with a tenth of the blocks, mean over lengths", on_average),
    ("97 % cache hits after warm-up", "calls with a cached plan, over whole benchmark suites", cache_hits),
    ("three dilation levels take 4.3x as long", "forward at 16K tokens, and the work of the branches", dilation),
    (
        "adaptive takes 25x as long",
        "forward on blocks chosen by content relative to fixed blocks, a tenth of the blocks each",
        adaptive,
    ),
    (
        "50x to 200x over distributed attention",
        "exchange of K and V relative to a dense ring of the same shards",
        exchanges,
    ),
    ("a billion tokens, devices simulated", "streamed through one device, rows checked against float64", billion),
)
"""Words of the original reports, what they mean here, and where the figure comes from."""


def headline_parts(lines: Sequence[Line]) -> Iterator[Part]:
    """The table of headlines, if any of them was measured."""
    timed = records(lines)
    rows = []
    for said, means, find in HEADLINES:
        found = find(lines, timed)
        commands = dict.fromkeys(f"`{command}`" for one in found for command in one.commands)
        rows.append([said, means, "; ".join(one.text for one in found) or NOT_MEASURED, ", ".join(commands)])
    if all(row[2] == NOT_MEASURED for row in rows):
        return
    yield Heading("The headlines of the original reports")
    yield (
        "The original library, whose class names this library keeps, published the figures in the first column, "
        "measured on a GTX 1080. The other columns define each quantity here, its measured value and the command."
    )
    yield Table(("published", "definition here", "measured here", "command"), rows, words=4)


def _command(record: Record) -> str:
    return f"dap bench --suite {record.suite}"


def _by_device(timed: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    devices = sorted({record.device for record in timed})
    return [(device, [record for record in timed if record.device == device]) for device in devices]
