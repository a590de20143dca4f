"""Metadata of a distribution, with and without an address of the project."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import package_metadata as package
import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URL = "https://git.example.org/owner/project"
TAG = f"v{PROJECT['version']}"


@pytest.mark.parametrize(
    ("remote", "url"),
    [
        ("https://git.example.org/owner/project.git", URL),
        ("https://name:token@git.example.org/owner/project", URL),
        ("http://git.example.org:8080/owner/project/", "http://git.example.org:8080/owner/project"),
        ("git@git.example.org:owner/project.git", URL),
        ("ssh://git@git.example.org:2222/owner/project.git", URL),
        ("/srv/git/owner/project.git", None),
        ("../git.example.org/owner/project", None),
        ("git.example.org/owner/project", None),
        ("file:///srv/git/owner/project.git", None),
        ("http://localhost:3000/owner/project", None),
        ("C:\\owner\\project", None),
        ("", None),
    ],
)
def test_the_address_is_the_remote_if_it_names_a_host(tmp_path: Path, remote: str, url: str | None):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    if remote:
        subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", remote], check=True)
    assert package.project_url(tmp_path, {}) == url
    assert package.project_url(tmp_path, {"DAP_PROJECT_URL": "https://other.org/a/b/"}) == "https://other.org/a/b"
    assert package.project_url(tmp_path, {"DAP_PROJECT_URL": ""}) is None
    (tmp_path / "part").mkdir()
    assert package.project_url(tmp_path / "part", {}) is None, "a folder inside another project's clone"
    with pytest.raises(ValueError, match="must be like https://host/owner/project, got 'owner/project'"):
        package.project_url(tmp_path, {"DAP_PROJECT_URL": "owner/project"})


def built(monkeypatch: pytest.MonkeyPatch, url: str, metadata: dict | None = None) -> dict:
    monkeypatch.setenv("DAP_PROJECT_URL", url)
    metadata = dict(PROJECT) if metadata is None else metadata
    hook = object.__new__(package.PackageMetadata)
    # hatchling's base class has the property `root`.
    monkeypatch.setattr(type(hook), "root", str(ROOT), raising=False)
    hook.update(metadata)
    return metadata


def test_links_of_the_package_are_absolute_and_lead_to_files(monkeypatch: pytest.MonkeyPatch):
    metadata = built(monkeypatch, URL)
    text = metadata["readme"]["text"]
    targets = re.findall(r"\]\(([^)#][^)]*)\)", text)
    kinds = {f"{URL}/blob/{TAG}/", f"{URL}/raw/{TAG}/", f"{URL}/tree/{TAG}"}
    for target in [*targets, *metadata["urls"].values()]:
        prefix = next((kind for kind in kinds if target.startswith(kind)), None)
        assert target.startswith("https://"), target
        assert prefix is None or (ROOT / target.removeprefix(prefix).partition("#")[0]).exists(), target
    assert "![LongNet's pattern" in text and f"]({URL}/raw/{TAG}/docs/pictures/longnet.svg)" in text
    title, _, row, _ = text.split("\n", 3)
    assert title == "# dilated-attention-pytorch"
    assert [*re.findall(r"!\[(\w+)\]", row)] == ["python", "license", "ci"]
    assert "3.11%20%7C%203.12" in row and "license-MIT" in row and "/actions/workflows/ci.yml/badge.svg" in row
    workflows = ROOT / ".github" / "workflows"  # not in the source distribution
    assert not workflows.exists() or (workflows / "ci.yml").exists()
    assert list(metadata["urls"]) == ["Homepage", "Documentation", "Changelog", "Source", "Issues"]


def test_a_package_without_an_address_has_no_dead_links(monkeypatch: pytest.MonkeyPatch):
    metadata = built(monkeypatch, "")
    assert metadata["urls"] == {}
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", metadata["readme"]["text"]) == []
    assert "docs/start.md" in metadata["readme"]["text"] and "![" not in metadata["readme"]["text"]


def test_a_wheel_has_the_address_of_its_source_distribution(monkeypatch: pytest.MonkeyPatch):
    held = {**PROJECT, "readme": {"text": "held"}, "urls": {"Homepage": URL}}
    assert built(monkeypatch, "https://other.org/a/b", dict(held)) == held
    assert built(monkeypatch, "", {**PROJECT, "readme": {"text": "held"}})["urls"] == {}
