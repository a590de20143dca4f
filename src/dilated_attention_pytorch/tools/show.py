"""`dap show`: a pattern or the selection of a trained layer, as text, SVG, PNG or one self-contained HTML page."""

from __future__ import annotations

import argparse
import json
from html import escape
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import must
from .console import MOST_HEADS, Parser, leave, print_json, whole

EXACT_TOKENS = 4096
"""Up to this length a cell counts the allowed pairs; beyond it, the pairs of the tiles that are computed."""
PIXELS = 640
MOST_LETTERS = 56
"""Longest title drawn at its natural width above a map; longer titles are condensed."""
KINDS = ("txt", "svg", "png", "html")
STYLE = (
    ".map .page{fill:#fff}.map .cell{fill:#0b62b4}.map text{font:20px system-ui,sans-serif;fill:#1c2430}"
    "@media(prefers-color-scheme:dark){.map .page{fill:#14181e}.map .cell{fill:#6cb2f5}.map text{fill:#e6eaf0}}"
)


class Map(NamedTuple):
    """A pattern, or the blocks that a layer selects, of one head cut into square cells."""

    title: str
    n: int
    head: int
    cell: int
    """Tokens along a cell; for a layer a multiple of the block size."""
    share: list[list[float]]
    """Share of allowed pairs in each cell (of computed pairs beyond `EXACT_TOKENS`)."""


def draw_map(text: str, n: int, heads: int, head: int, width: int) -> Map:
    """Cut the pattern into at most `width` squared cells."""
    import torch

    from .. import make_plan, parse

    pattern = parse(text)
    if not 0 <= head < heads:
        raise must(f"head must lie in 0 .. {heads - 1}", head)
    if n > EXACT_TOKENS:
        cell, share = make_plan(pattern, n, heads).cells(head, width)
        # Parts that overlap compute a pair twice.
        return Map(pattern.describe(), n, head, cell, share.clamp(max=1).tolist())
    token, cell = torch.arange(n), max(1, -(-n // width))
    side = -(-n // cell)
    allowed = pattern.resolve(n, heads).allows(token[:, None], token[None, :], head).expand(n, n)
    whole = torch.zeros(side * cell, side * cell, dtype=torch.float64)
    whole[:n, :n] = allowed
    exists = (torch.arange(side * cell) < n).double()
    pairs = (exists[:, None] * exists).view(side, cell, side, cell).sum((1, 3))
    counted = whole.view(side, cell, side, cell).sum((1, 3)) / pairs
    return Map(pattern.describe(), n, head, cell, counted.tolist())


def as_text(drawn: Map, few: float = 0.0) -> str:
    """`#` all, `+` some, `-` less than the share `few`, `.` none of the pairs of a cell."""
    rows = [
        "".join("#" if x > 0.99 else "." if x <= 0 else "-" if x < few else "+" for x in row) for row in drawn.share
    ]
    legend = "# all, + some, " + ("- few, " if few else "") + ". none of the pairs"
    return "\n".join(
        [f"{drawn.title}: head {drawn.head}, a cell is {drawn.cell} x {drawn.cell} tokens ({legend})", *rows]
    )


def as_svg(maps: list[Map]) -> str:
    """Squares, darker the more of their pairs are allowed; queries run down, keys across."""
    across = len(maps) * (PIXELS + 40)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="map" viewBox="0 0 {across} {PIXELS + 60}" role="img" '
        'shape-rendering="crispEdges">',
        f'<style>{STYLE}</style><rect class="page" width="100%" height="100%"/>',
    ]
    for index, drawn in enumerate(maps):
        scale = PIXELS / len(drawn.share)
        about = f"{drawn.title}: head {drawn.head}, {drawn.n:,} tokens"
        parts.append(f'<g transform="translate({20 + index * (PIXELS + 40)},40)"><title>{escape(about)}</title>')
        fitted = f' textLength="{PIXELS}" lengthAdjust="spacingAndGlyphs"' if len(about) > MOST_LETTERS else ""
        parts.append(f'<text y="-14"{fitted}>{escape(about)}</text>')
        # One path for each shade, with a rectangle for each run of equal cells.
        shades: dict[float, str] = {}
        for i, row in enumerate(drawn.share):
            at = 0.0
            for share, run in groupby(max(round(x, 2), 0.08) if x >= 0.005 else 0.0 for x in row):
                wide = scale * len(list(run))
                shades[share] = shades.get(share, "") + f"M{at:g} {i * scale:g}h{wide:g}v{scale:g}h-{wide:g}z"
                at += wide
        shown = sorted((share, runs) for share, runs in shades.items() if share > 0)
        parts += [f'<path class="cell" fill-opacity="{share:g}" d="{runs}"/>' for share, runs in shown]
        frame = f'<rect width="{PIXELS}" height="{PIXELS}" fill="none" stroke="currentColor" opacity="0.3"/>'
        parts.append(f"{frame}</g>")
    return "\n".join([*parts, "</svg>\n"])


def as_png(maps: list[Map]) -> bytes:
    """PNG of the same maps; needs matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError("a .png needs matplotlib. Install it with pip install matplotlib, or write .svg.") from None
    figure = Figure(figsize=(6.4 * len(maps), 6.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, drawn in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
        axes.imshow(drawn.share, cmap="Blues", vmin=0, vmax=1, extent=(0, drawn.n, drawn.n, 0), interpolation="nearest")
        axes.set_title(f"{drawn.title}: head {drawn.head}", wrap=True)
        axes.set(xlabel="key", ylabel="query")
    pixels = BytesIO()
    figure.savefig(pixels, metadata={"Software": None})
    return pixels.getvalue()


def as_html(texts: list[str], n: int, heads: int, head: int) -> str:
    """One self-contained page that computes the patterns itself."""
    start = {"patterns": texts, "n": n, "heads": heads, "head": head}
    # A closing tag inside the data would end the script that holds it.
    data = json.dumps(start).replace("<", "\\u003c")
    template = Path(__file__).with_name("pattern_page.html").read_text(encoding="utf-8")
    return template.replace("/*START*/null", data)


def learned_page(maps: list[Map]) -> str:
    """One self-contained page with the maps of a trained layer."""
    from .html_page import Chart, as_html

    title = maps[0].title
    return as_html("Attention patterns", [title, Chart("map", f"head {maps[0].head}", as_svg(maps))])


def read_settings(text: str | None) -> dict[str, Any] | None:
    """Settings of a layer, from JSON."""
    if text is None:
        return None
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise must("settings must be JSON", f"{text!r} ({error})") from None
    if not isinstance(settings, dict):
        raise must("settings must be a JSON object", text)
    return settings


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = Parser(
        "dap show", "Draw the keys that each query attends to, for a pattern or a trained layer.", "[PATTERN]"
    )
    parser.pattern()
    parser.tokens(help="length; 1024 by default, with --learned the whole input")
    parser.heads(None, "query heads of a pattern; 4 by default")
    parser.option("--head", read=whole(0, MOST_HEADS), default=0, help="head to draw")
    parser.option("--beside", metavar="PATTERN", help="a second pattern, drawn beside the first")
    text = "instead of a pattern: a checkpoint with adaptive layers, or the folder of `dap train`"
    parser.option("--learned", type=Path, metavar="FILE", help=text)
    parser.option("--layer", read=whole(0), help="adaptive layer of the checkpoint; the first by default")
    text = "input of the layer: hidden, or query and key, in a tensor file; or bytes"
    parser.option("--input", type=Path, metavar="FILE", help=text)
    text = 'settings for a checkpoint without them, as JSON: {"block_size": 64, "k_min": 4}'
    parser.option("--settings", metavar="JSON", help=text)
    parser.out(f"file that ends in .{', .'.join(KINDS)}; printed as text by default")
    parser.option("--width", read=whole(2, 512), help="largest number of cells per side")
    parser.json()
    options = parser.read(arguments)
    draw(options)
    return 0


def draw(options: argparse.Namespace) -> None:
    """Draw the maps, and write or print them."""
    from .html_page import write

    pattern, learned, out, n = options.pattern, options.learned, options.out, options.tokens
    kind = "txt" if out is None else out.suffix.removeprefix(".").lower()
    if kind not in KINDS:
        raise must(f"out must end in one of {', '.join(KINDS)}", str(out))
    if (pattern is None) == (learned is None):
        raise must("either a pattern or --learned must be given", "neither" if pattern is None else "both")
    if learned is None:
        for name in ("layer", "input", "settings"):
            if getattr(options, name) is not None:
                raise must(f"--{name} must come with --learned", "a pattern")
    elif options.heads is not None:
        raise must("--heads must come with a pattern: a checkpoint has its own", options.heads)
    # The page of a pattern draws its own maps.
    cells = options.width or (32 if kind == "txt" or (kind == "html" and learned is None) else 128)
    maps: list[Map] = []
    if learned is not None:
        from .learned_map import draw_learned

        settings = read_settings(options.settings)
        drawn = draw_learned(learned, options.layer or 0, options.head, options.input, n, cells, settings)
        title, n, cell, share = drawn
        maps = [Map(title, n, options.head, cell, share)]
    texts = [text for text in (pattern, options.beside) if text is not None]
    length, many = n or 1024, options.heads or (4 if learned is None else max(4, options.head + 1))
    maps += [draw_map(text, length, many, options.head, cells) for text in texts]
    # Tokens that select keys separately agree on few of them: a cell shows whether most tokens of a block do.
    drawn_text = "\n\n".join(as_text(drawn, 0.0 if learned is None else 0.5) for drawn in maps)
    if out is not None:
        made: Any = {"txt": lambda: drawn_text + "\n", "svg": lambda: as_svg(maps), "png": lambda: as_png(maps)}
        made["html"] = lambda: as_html(texts, length, many, options.head) if learned is None else learned_page(maps)
        write(out, made[kind]())
    if options.json:
        print_json({"out": None if out is None else str(out), "maps": [drawn._asdict() for drawn in maps]})
    elif out is None:
        print(drawn_text)
    else:
        print(f"Wrote {out}.")


if __name__ == "__main__":
    leave(main)
