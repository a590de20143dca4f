"""Modules of benchmarks/ that write pages, for tests to import."""

from __future__ import annotations

import sys
from pathlib import Path

# At the end: no name there hides a module of the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import demo
import docs_gpu_tables
import docs_headlines
import docs_page
import longest
import quality_settings
import quality_suites

__all__ = [
    "demo",
    "docs_gpu_tables",
    "docs_headlines",
    "docs_page",
    "longest",
    "quality_settings",
    "quality_suites",
]
