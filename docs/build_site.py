"""Builds the site of the documents into build/site: `make docs`, or `python docs/build_site.py`.

What is generated (pictures, the backends table, the reference) is written beside copies of the documents into
build/docs, so that the builder sees plain Markdown and any other that reads mkdocs.yml would do.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.ipynb"))
KERNELS = ROOT / "src" / "dilated_attention_pytorch" / "kernels"
SECTIONS = {
    "Get started": {
        "index.md": "Overview",
        "start.md": "Install and first call",
        "concepts.md": "Concepts",
        "gallery.md": "Pattern gallery",
    },
    "Tutorials": {
        "tutorial-long_documents.md": "Long documents",
        "tutorial-drop_in.md": "A model you have",
        "tutorial-slide_encoder.md": "Slide encoder and heat map",
        "tutorial-genome.md": "Genomes",
        "tutorial-learned_sparsity.md": "Learned sparsity",
        "tutorial-two_processes.md": "Two processes",
    },
    "How-to": {
        "grids.md": "Grids: images, video, slides",
        "ecosystem.md": "Modules",
        "huggingface.md": "Hugging Face models",
        "models.md": "Models and training",
        "adaptive.md": "Learned patterns",
        "distributed.md": "Several ranks",
        "billion.md": "A billion tokens",
        "tools.md": "The command line",
        "extending.md": "Patterns and backends of your own",
        "migration.md": "Coming from elsewhere",
    },
    "Reference": {"patterns.md": "Patterns", "backends.md": "Backends", "api.md": "Public names"},
    "Explanation": {
        "benchmarks.md": "Benchmarks",
        "quality.md": "Quality",
        "kernels.md": "Kernels",
        "hardening.md": "Hardening",
        "design.md": "Design",
        "changelog.md": "Changes",
    },
}
"""Section -> page -> title. Pages of the reference follow `api.md`; other pages come last in "How-to", by name."""
TITLES = {"nn": "Modules", "ops": "Operations", "kernels": "Backends", "plan": "Plans", "distributed": "Ranks"}
"""Sections of the reference that are not called as their folder is."""
FROM_THE_ROOT = {"design.md": "DESIGN.md", "changelog.md": "CHANGELOG.md"}
PICTURES = {
    "longnet.svg": ("dilated:64x1,256x4 & causal", "dilated:64x1,256x4;offset=block"),
    "window.svg": ("window:64 & causal", "window:64 | global:16;queries=1"),
    "blocks.svg": ("random:0.2;block=32", "hierarchical:2x1,0x4;block=32"),
    "strided.svg": ("strided:8;block=16", "block_dilated:256x2;sparsity_ratio=0.15;block=16"),
}
"""File in docs/pictures -> the two patterns it shows, 512 tokens, head 0 of 4; what `dap show` draws."""


GALLERY = {
    "Causal": "causal",
    "Sliding window": "window:64",
    "Sliding window, causal": "window:64 & causal",
    "Window and global tokens": "window:48 | global:16;queries=1",
    "LongNet": "dilated:64x1,256x4",
    "LongNet, causal": "dilated:64x1,256x4 & causal",
    "Strided": "strided:8;block=16",
    "Random blocks": "random:0.2;block=32",
    "Random blocks and a window": "random:0.1;block=32 | window:32",
    "Hierarchical": "hierarchical:2x1,0x4;block=32",
    "Budgeted dilated blocks": "block_dilated:256x2;sparsity_ratio=0.15;block=16",
    "Neighbourhoods on a grid": "grid:16x32;window=5x7",
    "Packed documents": "documents:100,200,212 & causal",
    "A pattern for each head": "heads{window:32 / strided:4;block=32 / causal / full}",
}
"""Title -> pattern text."""


def picture(texts: tuple[str, ...]) -> str:
    """Two patterns beside each other, as SVG."""
    from dilated_attention_pytorch.tools.show import as_svg, draw_map

    return as_svg([draw_map(text, 512, 4, 0, 64) for text in texts])


def interactive() -> str:
    """The page of `dap show -o play.html`."""
    from dilated_attention_pytorch.tools.show import as_html

    return as_html(["dilated:64x1,256x4 & causal", "window:64 | global:16"], 1024, 4, 0)


def backends_table() -> str:
    """Every backend of the registry with what its module says of itself, and the orders in which `auto` asks."""
    from dilated_attention_pytorch.kernels.registry import MODULES

    rows = ["| backend | module | what it is |", "|---|---|---|"]
    for name, module in MODULES.items():
        # Read and not imported: some need a package that is not everywhere.
        says = ast.get_docstring(ast.parse((KERNELS / f"{module.replace('.', '/')}.py").read_text())) or ""
        rows.append(f"| `{name}` | `kernels/{module.replace('.', '/')}.py` | {says.splitlines()[0]} |")
    rows += ["", "| device | plans | `auto` asks in this order | because |", "|---|---|---|---|"]
    for device, lines in json.loads((KERNELS / "preference.json").read_text()).items():
        rows += [f"| {device} | {x['when']} | {', '.join(x['order'])} | {x['because']} |" for x in lines]
    return "\n".join(rows)


def reference() -> dict[str, str]:
    """A page for each room, with a section for each public name from its docstring, by the page's file name."""
    import dilated_attention_pytorch as library

    rooms: dict[str, list[str]] = {}
    for name in sorted(library.__all__):
        value = getattr(library, name)
        module = value.__module__ if hasattr(value, "__name__") else type(value).__module__
        rooms.setdefault(module.removeprefix(f"{library.__name__}.").split(".")[0], []).append(name)
    pages = {}
    for room, names in sorted(rooms.items()):
        written = [f"# {room_title(room)}"]
        for name in names:
            value = getattr(library, name)
            written += [f"## {name}", _signature(name, value), _readable(inspect.getdoc(value) or "")]
            for method, code in sorted(vars(value).items()) if inspect.isclass(value) else ():
                text = inspect.getdoc(code) if inspect.isfunction(code) else None
                if text and not method.startswith(("_", "extra_repr")):
                    written += [f"### {name}.{method}", _signature(method, code), _readable(text)]
        pages[f"api-{room}.md"] = "\n\n".join(part for part in written if part)
    return pages


def room_title(room: str) -> str:
    """Title of a room's page in the reference."""
    return TITLES.get(room, "Package" if room == "dilated_attention_pytorch" else room.capitalize())


def reference_index() -> str:
    """Links to the names of every page of the reference."""
    lines = []
    for name, text in reference().items():
        names = re.findall(r"^## (\w+)$", text, re.MULTILINE)
        lines.append(
            f"**[{room_title(name[4:-3])}]({name})**: " + ", ".join(f"[{n}]({name}#{n.lower()})" for n in names)
        )
    return "\n\n".join(lines)


def gallery() -> str:
    """Every kind of pattern with its picture, text and share of dense attention."""
    from dilated_attention_pytorch import make_plan, parse
    from dilated_attention_pytorch.tools.show import as_svg, draw_map

    written = ["# Pattern gallery", "512 tokens, head 0 of 4. [An interactive page](play.html) draws any of them."]
    for title, text in GALLERY.items():
        dense = make_plan(parse(text), n=512, heads=4, block_size=16).density
        drawn = re.sub(r"<title>.*?</title>", "", as_svg([draw_map(text, 512, 4, 0, 64)]))
        written.append(f"## {title}\n\n`{text}`: {100 * dense:.1f} % of the tiles")
        written.append(f'<div style="max-width: 24rem">{drawn}</div>')
    return "\n\n".join(written)


def tutorial(path: Path) -> str:
    """A notebook as a page: text, and code in blocks."""
    pages = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        pages.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    pages.insert(1, f"This page is the notebook `docs/tutorials/{path.name}` of the repository.")
    return "\n\n".join(pages)


ANNOTATION = re.compile(r"(?<=: )'([^']*)'|(?<=-> )'([^']*)'")


def _signature(name: str, value: Any) -> str:
    if not callable(value):
        return ""
    try:
        shown = str(inspect.signature(value))
    except ValueError:
        return ""
    # Postponed annotations print as quoted text.
    shown = ANNOTATION.sub(r"\1\2", shown)
    if len(name + shown) > 90:
        arguments, _, returned = shown[1:].rpartition(")")
        shown = "(\n" + "".join(f"    {argument},\n" for argument in _split(arguments)) + f"){returned}"
    return f"```python\n{name}{shown}\n```"


def _split(arguments: str) -> list[str]:
    """Arguments of a signature: split at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in arguments:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _readable(text: str) -> str:
    """A docstring as Markdown: pictures and examples keep their columns, arguments become a list."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if lines[0].strip() in ("Args:", "Returns:", "Raises:"):
            items = re.split(r"\n(?= {4}\S)", "\n".join(lines[1:]))
            blocks.append(f"**{lines[0].strip()}**\n")
            blocks[-1] += "".join(f"\n- {' '.join(item.split())}" for item in items if item.strip())
        elif block.lstrip().startswith(">>>") or re.search(r"[#.] [#.] [#.]|^ {4}", block, re.MULTILINE):
            blocks.append(f"```text\n{block}\n```")
        else:
            blocks.append(block)
    return "\n\n".join(blocks)


def invitation() -> str:
    """Where the site has the interactive page."""
    return "[An interactive page](play.html) draws any two of them side by side."


FILLED = {"<!-- backends -->": backends_table, "<!-- reference -->": reference_index, "<!-- play -->": invitation}


def page(markdown: str) -> str:
    """A document as the site shows it: generated parts filled in, links that lead to pages."""
    for mark, make in FILLED.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    for name, source in FROM_THE_ROOT.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(source)}", f"]({name}", markdown)
    markdown = re.sub(r"\]\(docs/", "](", markdown)
    markdown = re.sub(r"\]\(tutorials/(\w+)\.ipynb\)", r"](tutorial-\1.md)", markdown)
    # What is neither a page nor a picture is a file of the repository: its name stands, without a link.
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)(?![\w-]+\.md|play\.html)[^)]*\)", r"\1", markdown)


def write_sources(folder: Path) -> list[dict[str, list[dict[str, str]]]]:
    """Write pages and pictures as the builder reads them; return the navigation."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pictures").mkdir(parents=True)
    for name, texts in PICTURES.items():
        path, wanted = DOCS / "pictures" / name, picture(texts)
        if not path.exists() or path.read_text() != wanted:
            path.write_text(wanted)
    (folder / "play.html").write_text(interactive())
    for path in DOCS.rglob("*.svg"):
        shutil.copy(path, folder / path.relative_to(DOCS))
    pages = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    pages |= {name: (ROOT / source).read_text() for name, source in FROM_THE_ROOT.items()}
    pages |= {f"tutorial-{path.stem}.md": tutorial(path) for path in TUTORIALS}
    by_room = reference()
    pages |= by_room | {"gallery.md": gallery()}
    for name, text in pages.items():
        (folder / name).write_text(page(text))
    sections = {section: dict(titles) for section, titles in SECTIONS.items()}
    sections["Reference"] |= {name: room_title(name[4:-3]) for name in by_room}
    listed = {name for titles in sections.values() for name in titles}
    sections["How-to"] |= {name: name.removesuffix(".md").capitalize() for name in sorted(pages.keys() - listed)}
    return [
        {section: [{title: name} for name, title in titles.items() if name in pages]}
        for section, titles in sections.items()
    ]


def build(folder: Path) -> int:
    """Write sources and configuration into a folder and build its `site`; the builder's exit status."""
    settings = {
        "site_name": "dilated-attention-pytorch",
        "docs_dir": "docs",
        "site_dir": "site",
        "use_directory_urls": False,
        # No fonts from elsewhere: the site makes no request to another host.
        "theme": {
            "font": False,
            "palette": [
                {
                    "media": f"(prefers-color-scheme: {scheme})",
                    "scheme": palette,
                    "toggle": {"icon": f"lucide/{icon}", "name": f"Switch to the {other} theme"},
                }
                for scheme, palette, icon, other in (
                    ("light", "default", "sun", "dark"),
                    ("dark", "slate", "moon", "light"),
                )
            ],
            "features": ["content.code.copy", "toc.follow", "navigation.sections"],
        },
        "markdown_extensions": [
            "tables",
            {"toc": {"permalink": True, "toc_depth": 3}},
            "pymdownx.highlight",
            "pymdownx.superfences",
        ],
        "nav": write_sources(folder / "docs"),
    }
    # JSON is YAML.
    (folder / "mkdocs.yml").write_text(json.dumps(settings, indent=1))
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", "mkdocs.yml"]
    return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(build(ROOT / "build"))
