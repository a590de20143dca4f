"""The documents keep their promises: links lead somewhere, and code blocks and docstring examples run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

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
        exec(compile(code, relative(path), "exec"), namespace)
    capsys.readouterr()


@pytest.mark.parametrize(
    "name", ["dilated_attention_pytorch", *(name for name in MODULES if not NEEDS_MORE.search(name))]
)
def test_examples_in_docstrings_come_out_as_written(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
