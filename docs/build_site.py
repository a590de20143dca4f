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
KERNELS = ROOT / "src" / "dilated_attention_pytorch" / "kernels"
ORDER = {
    "index.md": "Overview",
    "start.md": "Start",
    "concepts.md": "Concepts",
    "patterns.md": "Patterns",
    "backends.md": "Backends",
    "ecosystem.md": "Modules and models",
    "models.md": "Models",
    "adaptive.md": "Learned patterns",
    "distributed.md": "Several ranks",
    "billion.md": "A billion tokens",
    "tools.md": "The command line",
    "benchmarks.md": "Benchmarks",
    "migration.md": "Coming from elsewhere",
    "extending.md": "Adding a pattern or a backend",
    "kernels.md": "Kernels",
    "api.md": "Reference",
    "design.md": "Design",
    "changelog.md": "Changes",
}
"""Page -> title. Pages not named here come last, in the order of their names."""
TITLES = {"nn": "Modules", "ops": "Operations", "kernels": "Backends", "plan": "Plans"}
"""Sections of the reference that are not called as their folder is."""
FROM_THE_ROOT = {"design.md": "DESIGN.md", "changelog.md": "CHANGELOG.md"}
PICTURES = {
    "longnet.svg": ("dilated:64x1,256x4 & causal", "dilated:64x1,256x4;offset=block"),
    "window.svg": ("window:64 & causal", "window:64 | global:16;queries=1"),
    "blocks.svg": ("random:0.2;block=32", "hierarchical:2x1,0x4;block=32"),
    "strided.svg": ("strided:8;block=16", "block_dilated:256x2;sparsity_ratio=0.15;block=16"),
}
"""File in docs/pictures -> the two patterns it shows, 512 tokens, head 0 of 4; what `dap show` draws."""


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
        says = ast.get_docstring(ast.parse((KERNELS / f"{module}.py").read_text())) or ""
        rows.append(f"| `{name}` | `kernels/{module}.py` | {says.splitlines()[0]} |")
    rows += ["", "| device | plans | `auto` asks in this order | because |", "|---|---|---|---|"]
    for device, lines in json.loads((KERNELS / "preference.json").read_text()).items():
        rows += [f"| {device} | {x['when']} | {', '.join(x['order'])} | {x['because']} |" for x in lines]
    return "\n".join(rows)


def reference() -> str:
    """A section for each public name, from its docstring."""
    import dilated_attention_pytorch as library

    homes: dict[str, list[str]] = {}
    for name in sorted(library.__all__):
        value = getattr(library, name)
        module = value.__module__ if hasattr(value, "__name__") else type(value).__module__
        homes.setdefault(module.removeprefix(f"{library.__name__}.").split(".")[0], []).append(name)
    written = []
    for home, names in sorted(homes.items()):
        written.append(f"## {TITLES.get(home, home.capitalize())}")
        for name in names:
            value = getattr(library, name)
            written += [f"### {name}", _signature(name, value), _readable(inspect.getdoc(value) or "")]
            for method, code in sorted(vars(value).items()) if inspect.isclass(value) else ():
                says = inspect.getdoc(code) if inspect.isfunction(code) else None
                if says and not method.startswith(("_", "extra_repr")):
                    written += [f"#### {name}.{method}", _signature(method, code), _readable(says)]
    return "\n\n".join(part for part in written if part)


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
    return f"```python\n{name}{shown}\n```"


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


FILLED = {"<!-- backends -->": backends_table, "<!-- reference -->": reference, "<!-- play -->": invitation}


def page(markdown: str) -> str:
    """A document as the site shows it: generated parts filled in, links that lead to pages."""
    for mark, make in FILLED.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    for name, source in FROM_THE_ROOT.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(source)}", f"]({name}", markdown)
    markdown = re.sub(r"\]\(docs/", "](", markdown)
    # What is neither a page nor a picture is a file of the repository: its name stands, without a link.
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)(?![\w-]+\.md|play\.html)[^)]*\)", r"\1", markdown)


def write_sources(folder: Path) -> list[dict[str, str]]:
    """Pages and pictures as the builder gets them; the order of the pages, with their titles."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pictures").mkdir(parents=True)
    for name, texts in PICTURES.items():
        path, wanted = DOCS / "pictures" / name, picture(texts)
        if not path.exists() or path.read_text() != wanted:
            path.write_text(wanted)
    (folder / "play.html").write_text(interactive())
    for path in DOCS.rglob("*.svg"):
        shutil.copy(path, folder / path.relative_to(DOCS))
    sources = {path.name: path for path in DOCS.glob("*.md")}
    sources |= {name: ROOT / source for name, source in FROM_THE_ROOT.items()}
    for name, path in sources.items():
        (folder / name).write_text(page(path.read_text()))
    listed = [name for name in ORDER if name in sources] + sorted(sources.keys() - ORDER.keys())
    return [{ORDER.get(name, name.removesuffix(".md").capitalize()): name} for name in listed]


def build(folder: Path) -> int:
    """Write sources and configuration into a folder and build its `site`; the builder's exit status."""
    settings = {
        "site_name": "dilated-attention-pytorch",
        "docs_dir": "docs",
        "site_dir": "site",
        "use_directory_urls": False,
        # No fonts from elsewhere: the site asks nobody.
        "theme": {"font": False, "palette": {"scheme": "default"}, "features": ["content.code.copy", "toc.follow"]},
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
