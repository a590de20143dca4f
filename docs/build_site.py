"""Build the site of the documents into build/site: `make docs`, or `python docs/build_site.py`.

Generated parts (pictures, the gallery, the backends table, the reference) are written beside copies of the documents
into build/docs. The builder reads plain Markdown and an mkdocs.yml.
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

from package_metadata import project_url

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
        "tutorial-drop_in.md": "An existing model",
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
        "trainers.md": "Trainers",
        "adaptive.md": "Learned patterns",
        "indices.md": "Attention on indices",
        "distributed.md": "Several ranks",
        "billion.md": "A billion tokens",
        "tools.md": "The command line",
        "extending.md": "Extending",
        "migration.md": "Migration",
    },
    "Reference": {"patterns.md": "Pattern texts", "backends.md": "Backends", "api.md": "Public names"},
    "Explanation": {
        "benchmarks.md": "Benchmarks",
        "quality.md": "Quality",
        "kernels.md": "Kernels",
        "hardening.md": "Hardening",
        "design.md": "Design",
        "changelog.md": "Changes",
    },
}
"""Section -> page -> title. The reference by room follows `api.md`; other pages come last in "How-to", by name."""
TITLES = {"nn": "Modules", "ops": "Operations", "kernels": "Registry", "plan": "Plans", "distributed": "Ranks"}
"""Titles of the rooms in the reference; other rooms have the name of their folder."""
FROM_THE_ROOT = {"design.md": "DESIGN.md", "changelog.md": "CHANGELOG.md"}
PICTURES = {
    "longnet.svg": (64, (("dilated:8x1,32x4 & causal", 0), ("dilated:8x1,32x4", 1))),
    "window.svg": (512, (("window:64 & causal", 0), ("window:64 | global:16;queries=1", 0))),
    "blocks.svg": (512, (("random:0.2;block=32", 0), ("hierarchical:2x1,0x4;block=32", 0))),
    "strided.svg": (512, (("strided:8;block=16", 0), ("block_dilated:256x2;sparsity_ratio=0.15;block=16", 0))),
}
"""File in docs/pictures -> tokens, and two patterns with the head that is drawn, of 4; the drawings of `dap show`."""

STYLE = """
/* Names in the first column of a table are not broken inside a word. */
.md-typeset table td:first-child code { white-space: nowrap; }
"""

GALLERY = {
    "Causal": "causal",
    "Sliding window": "window:64",
    "Sliding window, causal": "window:64 & causal",
    "Window and global tokens": "window:48 | global:16;queries=1",
    "LongNet": "dilated:8x1,32x4",
    "LongNet, causal": "dilated:8x1,32x4 & causal",
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
FEW_TOKENS = 64
"""Length at which the gallery draws dilated patterns, so that single tokens are visible; others have 512 tokens."""


def picture(name: str) -> str:
    """A file of `PICTURES`: two patterns beside each other, as SVG."""
    from dilated_attention_pytorch.tools.show import as_svg, draw_map

    n, drawn = PICTURES[name]
    return as_svg([draw_map(text, n, 4, head, 64) for text, head in drawn])


def interactive() -> str:
    """The page of `dap show -o play.html`."""
    from dilated_attention_pytorch.tools.show import as_html

    return as_html(["dilated:64x1,256x4 & causal", "window:64 | global:16"], 1024, 4, 0)


def backends_table() -> str:
    """Tables of every backend with the first line of its docstring, and of the orders in which `auto` tries them."""
    from dilated_attention_pytorch.kernels.registry import MODULES

    rows = ["| backend | module | description |", "|---|---|---|"]
    for name, module in MODULES.items():
        # Parsed and not imported: some modules need an optional package.
        described = ast.get_docstring(ast.parse((KERNELS / f"{module.replace('.', '/')}.py").read_text())) or ""
        rows.append(f"| `{name}` | `kernels/{module.replace('.', '/')}.py` | {described.splitlines()[0]} |")
    rows += ["", "| device | plans | order of `auto` | reason |", "|---|---|---|---|"]
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
    """Every kind of pattern with its picture, text and share of allowed pairs."""
    from dilated_attention_pytorch.tools.show import as_svg, draw_map

    written = ["# Pattern gallery", "Head 0 of 4. Rows are queries, columns are keys. " + invitation()]
    for title, text in GALLERY.items():
        drawn = draw_map(text, FEW_TOKENS if text.startswith("dilated") else 512, 4, 0, 64)
        share = sum(map(sum, drawn.share)) / len(drawn.share) ** 2
        written.append(f"## {title}\n\n`{text}`: {100 * share:.1f} % of the pairs of {drawn.n} tokens")
        written.append(f'<div style="max-width: 22rem">{re.sub(r"<title>.*?</title>", "", as_svg([drawn]))}</div>')
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
        signature = inspect.signature(value)
        # Arguments that are accepted only to name the right one in an error.
        known = [p for p in signature.parameters.values() if p.name != "unknown"]
        shown = str(signature.replace(parameters=known))
    except ValueError:
        return ""
    # Postponed annotations print as quoted text.
    shown = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", ANNOTATION.sub(r"\1\2", shown))
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
    """Link to the interactive page of the site."""
    return "[An interactive page](play.html) draws any two patterns side by side."


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
    # A link that shows the name of a file shows the title of its page instead.
    titles = {name: title for pages in SECTIONS.values() for name, title in pages.items()}
    markdown = re.sub(
        r"\[[\w./-]+\.md\]\(([\w-]+\.md)(#[\w-]+)?\)",
        lambda link: f"[{titles.get(link[1], link[1])}]({link[1]}{link[2] or ''})",
        markdown,
    )
    # Neither a page nor a picture but a file of the repository: its name without a link.
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)(?![\w-]+\.md|play\.html)[^)]*\)", r"\1", markdown)


def write_sources(folder: Path) -> list[dict[str, list[Any]]]:
    """Write pages and pictures as the builder reads them; return the navigation."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pictures").mkdir(parents=True)
    for name in PICTURES:
        path, wanted = DOCS / "pictures" / name, picture(name)
        if not path.exists() or path.read_text() != wanted:
            path.write_text(wanted)
    (folder / "play.html").write_text(interactive())
    (folder / "site.css").write_text(STYLE)
    for path in (*DOCS.rglob("*.svg"), *DOCS.rglob("*.png")):
        shutil.copy(path, folder / path.relative_to(DOCS))
    pages = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    pages |= {name: (ROOT / source).read_text() for name, source in FROM_THE_ROOT.items()}
    pages |= {f"tutorial-{path.stem}.md": tutorial(path) for path in TUTORIALS}
    by_room = reference()
    pages |= by_room | {"gallery.md": gallery()}
    for name, text in pages.items():
        (folder / name).write_text(page(text))
    sections = {section: dict(titles) for section, titles in SECTIONS.items()}
    listed = {name for titles in sections.values() for name in titles}
    others = sorted(pages.keys() - by_room.keys() - listed)
    sections["How-to"] |= {name: name.removesuffix(".md").capitalize() for name in others}
    navigation: list[dict[str, list[Any]]] = [
        {section: [{title: name} for name, title in titles.items() if name in pages]}
        for section, titles in sections.items()
    ]
    reference_section = next(entry["Reference"] for entry in navigation if "Reference" in entry)
    reference_section.append({"Python API": [{room_title(name[4:-3]): name} for name in by_room]})
    return navigation


def build(folder: Path) -> int:
    """Write sources and configuration into a folder and build its `site`; the builder's exit status."""
    settings: dict[str, Any] = {
        "site_name": "dilated-attention-pytorch",
        "docs_dir": "docs",
        "site_dir": "site",
        "use_directory_urls": False,
        "extra_css": ["site.css"],
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
    if url := project_url(ROOT):
        # A plain link: the theme's own setting for a repository would make the page request its statistics.
        settings["extra"] = {"social": [{"icon": "lucide/folder-git-2", "link": url, "name": "Source"}]}
    # JSON is YAML.
    (folder / "mkdocs.yml").write_text(json.dumps(settings, indent=1))
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", "mkdocs.yml"]
    return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(build(ROOT / "build"))
