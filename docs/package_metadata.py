"""Metadata of the distribution that depend on the project's address: URLs, links of the README, badges.

The address is `DAP_PROJECT_URL`, otherwise the remote `origin` of the clone if it names a host. Without an address the
README of the distribution has no relative links, because none would work on a package index.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # The site and the tests use the functions below without the build backend.
    MetadataHookInterface = object

HOST = r"(?P<host>(?:[\w-]+\.)+[a-z]{2,}"
PATH = r"(?P<path>[\w.~-]+/[\w.~/-]+?)(?:\.git)?/?"
REMOTES = [
    # User names and tokens are left out; a port is that of the web server only in the first form.
    re.compile(rf"(?P<scheme>https?)://(?:[^@/]*@)?{HOST}(?::\d+)?)/{PATH}"),
    re.compile(rf"(?P<scheme>ssh)://(?:[^@/]*@)?{HOST})(?::\d+)?/{PATH}"),
    re.compile(rf"(?P<scheme>)(?:[^@/]*@)?{HOST}):/?{PATH}"),
]
"""Forms of git remotes on a host: https://host/path, ssh://host/path, user@host:path."""
PICTURE = re.compile(r"^!\[([^\]]*)\]\((?!https?:)([^)]*)\)\n\n?", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)]*)\)")


def project_url(root: Path, environment: Mapping[str, str] = os.environ) -> str | None:
    """Web address of the project. An empty `DAP_PROJECT_URL` means none, whatever the remote is."""
    if (given := environment.get("DAP_PROJECT_URL")) is not None:
        if given and not re.fullmatch(r"https?://[^\s/@]+/[^\s@]+", given):
            raise ValueError(f"DAP_PROJECT_URL must be like https://host/owner/project, got {given!r}")
        return given.rstrip("/") or None
    # A folder inside another project's clone has that project's remote.
    if not (root / ".git").exists():
        return None
    asked = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
    try:
        remote = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return None
    found = next((match for form in REMOTES if (match := form.fullmatch(remote))), None)
    if found is None:
        return None
    return f"{found['scheme'] if found['scheme'] == 'http' else 'https'}://{found['host']}/{found['path']}"


def urls(url: str | None, version: str) -> dict[str, str]:
    """Table `project.urls`; files are those of the version's tag."""
    if url is None:
        return {}
    files = f"{url}/blob/v{version}"
    return {
        "Homepage": url,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Source": f"{url}/tree/v{version}",
        "Issues": f"{url}/issues",
    }


def badges(url: str, metadata: Mapping[str, Any]) -> str:
    """One line: Python releases, licence, state of continuous integration."""
    releases = re.findall(r"Python :: (3\.\d+)", "\n".join(metadata["classifiers"]))
    workflow = f"{url}/actions/workflows/ci.yml"
    shown = {
        "python": ("https://img.shields.io/badge/python-" + quote(" | ".join(releases)) + "-blue", url),
        "license": (
            f"https://img.shields.io/badge/license-{metadata['license']}-blue",
            f"{url}/blob/v{metadata['version']}/LICENSE",
        ),
        "ci": (f"{workflow}/badge.svg", workflow),
    }
    return " ".join(f"[![{name}]({picture})]({target})" for name, (picture, target) in shown.items())


def package_readme(markdown: str, url: str | None, metadata: Mapping[str, Any]) -> str:
    """README as a package index shows it: absolute links and badges, or no relative links without an address."""
    if url is None:
        return LINK.sub(r"\1", PICTURE.sub("", markdown))
    tag = f"v{metadata['version']}"
    markdown = PICTURE.sub(rf"![\1]({url}/raw/{tag}/\2)\n\n", markdown)
    title, rest = LINK.sub(rf"[\1]({url}/blob/{tag}/\2)", markdown).split("\n", 1)
    return f"{title}\n\n{badges(url, metadata)}\n{rest}"


class PackageMetadata(MetadataHookInterface):
    """Sets the fields `readme` and `urls` when hatchling builds a distribution."""

    def update(self, metadata: dict[str, Any]) -> None:
        if "readme" in metadata:  # A source distribution holds both in PKG-INFO.
            metadata.setdefault("urls", {})
            return
        root = Path(self.root)
        url = project_url(root)
        text = package_readme((root / "README.md").read_text(encoding="utf-8"), url, metadata)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(url, metadata["version"])
