"""Parts of a page, and writers of Markdown and of one self-contained HTML page."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..atomic_write import write_whole
from ..errors import must

WIDTH, HEIGHT = 720, 400
COLORS = 8
LEFT, RIGHT, TOP, BOTTOM = 64, 208, 16, 48

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --faint: #d8dde4; --soft: #5b6674; --page: #ffffff;
  --line0: #0b62b4; --line1: #b4460b; --line2: #1a7f52; --line3: #7a3fa8; --line4: #8a6d00; --line5: #0b7f8c;
  --line6: #b81c62; --line7: #5b6674; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --faint: #333c48; --soft: #9aa5b3; --page: #14181e;
  --line0: #6cb2f5; --line1: #f59a5c; --line2: #62c99a; --line3: #c79af0; --line4: #d9bd4f; --line5: #5cc8d6;
  --line6: #f388b4; --line7: #9aa5b3; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1000px;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; } p { max-width: 65ch; }
.scroll { overflow-x: auto; background: linear-gradient(90deg, var(--page) 40%, transparent) local,
  linear-gradient(-90deg, var(--page) 40%, transparent) right local, linear-gradient(90deg, var(--faint), transparent),
  linear-gradient(-90deg, var(--faint), transparent) right; background-repeat: no-repeat;
  background-size: 48px 100%, 48px 100%, 16px 100%, 16px 100%; }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid var(--faint); white-space: nowrap; }
.words { text-align: left; } .wrapped { white-space: normal; vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
code { font: .9em ui-monospace, monospace; } a { color: var(--line0); } nav a { margin-right: 1rem; }
figure { margin: 1.5rem 0; } figcaption { color: var(--soft); }
.grid { stroke: var(--faint); } .ideal { stroke-dasharray: 6 5; }
.tick { fill: var(--soft); } .name { font-weight: 600; }
@media (max-width: 560px) { figure .scroll svg { max-width: none; width: 600px; } th, td { padding: .3rem .5rem; }
  th:first-child, td:first-child { position: sticky; left: 0; background: var(--page); } }
"""

Point = tuple[float, float]


@dataclass(frozen=True)
class Heading:
    """Title of a section; level 2 is the highest on a page."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Table:
    """Cells of text: columns of words, then columns of figures."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


@dataclass(frozen=True)
class Chart:
    """Lines over two logarithmic axes. `name` is that of its file beside a Markdown page."""

    name: str
    title: str
    svg: str


Part = str | Heading | Table | Chart
"""Text is a paragraph, in which `code`, **bold** and [pages beside it](page.html) are marked as in Markdown."""


def as_markdown(title: str, parts: Iterable[Part], beside: str = "") -> str:
    """The page as Markdown; charts are files next to it whose names begin with `beside`."""
    written = [f"# {_escaped(title)}"]
    for part in parts:
        match part:
            case Heading():
                written.append(f"{'#' * part.level} {_escaped(part.text)}")
            case Table():
                written.append(markdown(part))
            case Chart():
                written.append(f"![{_escaped(part.title)}]({beside}{part.name}.svg)")
            case _:
                lines = [line for given in part.splitlines() for line in wrapped(_escaped(given)).splitlines()]
                written.append("\n".join(re.sub(r"^(?=[#>+=~-]|\d+[.)] )", r"\\", line) for line in lines))
    return "\n\n".join(written) + "\n"


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 98 columns; code in backticks stays on one line."""
    whole = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), text)
    return "\n".join(textwrap.wrap(whole, 98, break_long_words=False, break_on_hyphens=False)).replace("\0", " ")


def as_html(title: str, parts: Iterable[Part]) -> str:
    """The page as HTML, with links to its sections if there are more than three."""
    parts = list(parts)
    sections = [part for part in parts if isinstance(part, Heading) and part.level == 2]
    links = (f'<a href="#section{index}">{_marked(part.text)}</a>' for index, part in enumerate(sections))
    written = [f"<nav>{' '.join(links)}</nav>"] if len(sections) > 3 else []
    for part in parts:
        match part:
            case Heading():
                anchor = f' id="section{sections.index(part)}"' if part in sections else ""
                written.append(f"<h{part.level}{anchor}>{_marked(part.text)}</h{part.level}>")
            case Table():
                written.append(table(part.header, part.rows, part.words))
            case Chart():
                caption = f"<figcaption>{escape(part.title)}</figcaption>"
                written.append(f'<figure>{caption}\n<div class="scroll">{part.svg}</div></figure>')
            case _:
                written.append(f"<p>{_marked(part)}</p>")
    return page(title, written)


def _marked(text: str) -> str:
    """Escaped text with its code, bold words and links to pages beside it."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
    text = re.sub(r"\[([^\]]+)\]\(([\w-]+\.html)\)", r'<a href="\2">\1</a>', text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


def _escaped(text: str) -> str:
    """One line of Markdown in which only the marks of a `Part` have a meaning."""
    pieces = re.split(r"(`[^`]+`)", re.sub("`+", "`", " ".join(text.split())))
    for index in range(0, len(pieces), 2):
        piece = re.sub(r"<(?=[\w/!?])", "&lt;", pieces[index].replace("\\", "&#92;").replace("`", "\\`"))
        pieces[index] = re.sub(r"\[(?![^\]]+\]\([\w-]+\.(?:html|md)\))", r"\[", piece)
    return "".join(pieces)


def markdown(table: Table) -> str:
    """A table in Markdown."""
    ruler = [":--" if column < table.words else "--:" for column in range(len(table.header))]
    cells = ([_escaped(cell).replace("|", "\\|") for cell in row] for row in (table.header, ruler, *table.rows))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Rows of text as an HTML table."""

    def cells(row: Sequence[str], tag: str) -> str:
        kind = ' class="words"' if words == 1 else ' class="words wrapped"'
        marks = (kind if column < words else "" for column in range(len(row)))
        return "".join(f"<{tag}{mark}>{_marked(cell)}</{tag}>" for cell, mark in zip(row, marks, strict=True))

    head, body = cells(header, "th"), "".join(f"<tr>{cells(row, 'td')}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def page(title: str, parts: Sequence[str]) -> str:
    """The whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def write(path: Path, content: str | bytes) -> None:
    """Replace a file atomically."""
    body = content.encode() if isinstance(content, str) else content
    try:
        write_whole(path, lambda temporary: Path(temporary).write_bytes(body))
    except OSError as error:
        raise must("a page must go to a file that can be written", f"{path} ({error.strerror})") from None


def tokens_text(n: float) -> str:
    """65536 -> 64K."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if n >= size:
            return f"{n / size:g}{unit}"
    return f"{n:g}"


def readable_bytes(count: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} PiB"


def figure_text(value: float) -> str:
    """1657.3 -> 1,660: three significant digits without an exponent."""
    return f"{float(f'{value:.3g}'):,.10g}"


def seconds_text(seconds: float) -> str:
    """0.0123 -> 12.3 ms."""
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def log_chart(
    series: dict[str, list[Point]],
    x_name: str,
    y_name: str,
    x_text: Callable[[float], str] = tokens_text,
    y_text: Callable[[float], str] = seconds_text,
    ideal: str | None = None,
    y_base: int = 10,
) -> str:
    """Lines over two logarithmic axes, x in powers of two and y in powers of `y_base`. Every value must be positive.

    The line called `ideal` is dashed.
    """
    points = [point for line in series.values() for point in line]
    x_ticks = _powers([x for x, _ in points], 2)
    y_ticks = _powers([y for _, y in points], y_base)
    x_at = _scale(x_ticks, LEFT, WIDTH - RIGHT)
    y_at = _scale(y_ticks, HEIGHT - BOTTOM, TOP)
    drawn = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_name)} against {escape(x_name)}">']
    for tick in y_ticks:
        y = y_at(tick)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{y_text(tick)}</text>')
    for tick in x_ticks:
        x = x_at(tick)
        drawn.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x_text(tick)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    labels = _spread_labels({name: y_at(line[-1][1]) for name, line in series.items() if line})
    for index, (name, line) in enumerate(series.items()):
        if line:
            path = [(x_at(x), y_at(y)) for x, y in line]
            drawn += _line(name, path, f"var(--line{index % COLORS})", labels[name], name == ideal)
            drawn += [
                f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3.5" fill="var(--line{index % COLORS})">'
                f"<title>{escape(name)}: {x_text(x)}, {y_text(y)}</title></circle>"
                for x, y in line
            ]
    return "\n".join([*drawn, "</svg>"])


def standalone(svg: str) -> str:
    """A chart as a file of its own."""
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        ">", f"><style>svg {{ background: var(--page); font: 12px system-ui, sans-serif; }}{STYLE}</style>", 1
    )


def _line(name: str, points: list[Point], color: str, label_y: float, is_ideal: bool) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = ' class="ideal"' if is_ideal else ""
    return [
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashed}/>',
        f'<text class="name" x="{WIDTH - RIGHT + 10}" y="{label_y + 4:.1f}" fill="{color}">{escape(name)}</text>',
    ]


def _spread_labels(positions: dict[str, float], apart: float = 16.0) -> dict[str, float]:
    """Heights of the labels beside the chart, moved apart where two would overlap and kept above its lower edge."""
    placed: dict[str, float] = {}
    lowest = -math.inf
    for name, y in sorted(positions.items(), key=lambda item: item[1]):
        lowest = max(y, lowest + apart)
        placed[name] = lowest
    highest = float(HEIGHT - BOTTOM) + apart
    for name, y in reversed(placed.items()):
        highest = min(y, highest - apart)
        placed[name] = highest
    return placed


def _powers(values: Sequence[float], base: int) -> list[float]:
    """Powers of the base that enclose the values; at least two, so that the axis has a length."""
    first = math.floor(round(math.log(min(values), base), 9))
    last = max(math.ceil(round(math.log(max(values), base), 9)), first + 1)
    return [float(base) ** power for power in range(first, last + 1)]


def _scale(ticks: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    begin, end = math.log(ticks[0]), math.log(ticks[-1])
    return lambda value: low + (high - low) * (math.log(value) - begin) / (end - begin)
