"""README of the distribution: links and pictures that only work inside the repository become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def without_relative_links(markdown: str) -> str:
    """Drop pictures with a relative address and keep the text of links with one."""
    markdown = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n?", "", markdown, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", markdown)


class ReadmeHook(MetadataHookInterface):
    """Sets the field `readme` of the metadata when hatchling builds a distribution."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = without_relative_links(Path(self.root, "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
