"""The documents keep their promises: links lead somewhere, and code blocks and docstring examples run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import dilated_attention_pytorch

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MODULES = [
    module.name for module in pkgutil.walk_packages(dilated_attention_pytorch.__path__, "dilated_attention_pytorch.")
]
NEEDS_MORE = re.compile(r"\.kernels\.(triton|hopper)_|\.integrations\.")
"""Modules that import a package which may be missing; their docstrings hold no examples."""
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(path: Path):
    targets = [link.partition("#")[0] for link in LINK.findall(path.read_text()) if "://" not in link]
    assert [target for target in targets if target and not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_code_blocks_run(path: Path, capsys: pytest.CaptureFixture[str]):
    """The blocks of one document run in order, in one namespace, as a reader would type them."""
    namespace: dict[str, object] = {"__name__": "reader"}
    for code in BLOCK.findall(path.read_text()):
        # Without the future statements of this file: a reader has none.
        exec(compile(code, relative(path), "exec", dont_inherit=True), namespace)
    capsys.readouterr()


def broken_markup(text: str) -> list[str]:
    """Lines of tables and code fences that no longer parse as such, for example after a paragraph was re-wrapped."""
    pieces = re.split(r"^ *```.*$", text, flags=re.MULTILINE)
    broken = [] if len(pieces) % 2 else ["a code fence without an end"]
    for block in re.split(r"\n\s*\n", "\n\n".join(pieces[::2])):
        lines = block.splitlines()
        rows = [line.strip() for line in lines if line.lstrip().startswith("|")]
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
        divided = len(rows) > 1 and re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", rows[1])
        if rows and not divided:
            broken.append(rows[0])
        broken += [row for row, count in zip(rows, cells, strict=True) if count != cells[0] or not row.endswith("|")]
        # A code span may continue on the next line.
        prose = "\n".join(line for line in lines if not line.lstrip().startswith("|"))
        without_code = re.sub(r"`[^`]*`|\|\|", "", prose).splitlines()
        broken += [line for line in without_code if line.count("|") > 1 or "```" in line]
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_tables_and_code_fences_are_whole(path: Path):
    assert broken_markup(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "  | | 32K | 128K | |---|---|---| | blocks | 4x\n  | 6x | | tokens | 2x | 3x |",
        "| a | b |\n|---|---|\n| 1 | 2\n| 3 |",
        "Speeds: | a | b |",
        "Run ```\nmake test\n```",
        "```\nmake test",
    ],
)
def test_markup_broken_by_wrapping_is_noticed(text: str):
    assert broken_markup(text) != []


def test_nothing_installs_a_package_of_another_project():
    """A package index holds another project's `dilated-attention-pytorch`; this one is `dap-attention`."""
    assert 'name = "dap-attention"' in (ROOT / "pyproject.toml").read_text()
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py"), ROOT / "Makefile", *DOCUMENTS]
    wrong = re.compile(r"install[^\n]{0,40}['\"\s]dilated-attention-pytorch(?!` from a package index)")
    assert [relative(path) for path in sources if wrong.search(path.read_text())] == []


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_what_the_library_draws(site: ModuleType):
    for name in site.PICTURES:
        assert (ROOT / "docs" / "pictures" / name).read_text() == site.picture(name), f"make docs draws {name} anew"


def test_screenshots_are_small_and_shown():
    shots = sorted((ROOT / "docs" / "pictures").glob("screen-*.png"))
    expected = [f"screen-{page}-{width}-{scheme}.png" for page in ("pattern", "report", "site")
                for width in (1280, 400) for scheme in ("dark", "light")]  # fmt: skip
    assert [path.name for path in shots] == sorted(expected), "python docs/screenshots.py takes them"
    assert all(path.stat().st_size < 200_000 for path in shots)
    pages = "".join(path.read_text() for path in DOCUMENTS)
    assert [path.name for path in shots if path.name not in pages] == []


def test_the_backends_table_names_every_backend(site: ModuleType):
    table = site.backends_table()
    for name in dilated_attention_pytorch.backends():
        row = next(row for row in table.splitlines() if row.startswith(f"| `{name}` |"))
        assert len(row.split("|")[3].strip()) > 10


def test_the_reference_has_a_section_for_every_public_name(site: ModuleType):
    written = "\n".join(site.reference().values())
    assert set(re.findall(r"^## (\w+)$", written, re.MULTILINE)) == set(dilated_attention_pytorch.__all__)
    assert "\n    is_causal: bool = False,\n" in written and "```text\n>>> " in written
    signatures = re.findall(r"```python\n(.*?)```", written, re.DOTALL)
    assert max(len(code) for code in signatures if code.count("\n") == 1) <= 120, "one argument a line"


def test_the_gallery_draws_every_pattern_in_it(site: ModuleType):
    drawn = site.gallery()
    assert drawn.count("<svg") == len(site.GALLERY)
    for name in (
        "causal",
        "window",
        "global",
        "dilated",
        "strided",
        "random",
        "hierarchical",
        "grid",
        "documents",
        "heads",
    ):
        assert re.search(rf"^`.*\b{name}\b", drawn, re.MULTILINE), name


def test_the_site_builds_without_a_warning(site: ModuleType, tmp_path: Path):
    pytest.importorskip("zensical")
    assert site.build(tmp_path) == 0
    assert "Attention patterns" in (tmp_path / "site" / "play.html").read_text()
    assert 'href="play.html"' in (tmp_path / "site" / "patterns.html").read_text()
    for path in (tmp_path / "site").glob("*.html"):
        shown = re.findall(r'<img[^>]* src="?([^">\s]+)', path.read_text())
        missing = [name for name in shown if "://" not in name and not (path.parent / name).exists()]
        assert missing == [], path.name
    for name in ("index", "start", "api", "api-nn", "gallery", "tutorial-genome", "backends", "design"):
        page = (tmp_path / "site" / f"{name}.html").read_text()
        assert len(page) > 5000 and "<!-- reference" not in page and "fonts.googleapis" not in page


@pytest.mark.parametrize(
    "name", ["dilated_attention_pytorch", *(name for name in MODULES if not NEEDS_MORE.search(name))]
)
def test_examples_in_docstrings_come_out_as_written(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
