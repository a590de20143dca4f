"""Write docs/benchmarks.md and its pictures from benchmarks/results.

python benchmarks/docs_page.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from docs_gpu_tables import Results, generated_code_parts, gpu_parts
from docs_headlines import headline_parts

from dilated_attention_pytorch.tools.bench.results import Line, read_lines
from dilated_attention_pytorch.tools.bench.suite_tables import suite_parts
from dilated_attention_pytorch.tools.html_page import Heading, Part, as_markdown
from dilated_attention_pytorch.tools.report import TITLE, rate_parts, save

ROOT = Path(__file__).resolve().parents[1]
SOURCE = """\
Measured speed and memory, by device. "One GPU" compares this library with FlashAttention-4, FlexAttention and cuDNN on
the same blocks and starts with the targets. "One CPU" gives rates relative to torch's dense attention. "By length" has
times, memory and speed-ups for each sequence length. `dap bench --suite all` measures your machine; `python
benchmarks/docs_page.py` writes this page from the files in `benchmarks/results`."""


def page_parts(lines: Sequence[Line]) -> Iterator[Part]:
    """All tables and plots of the documentation."""
    yield " ".join(SOURCE.split())
    results = Results(lines)
    if results.all:
        yield Heading("One GPU")
        yield from gpu_parts(results)
        yield from generated_code_parts(lines)
    yield from rate_parts([line for line in lines if line.get("relative_rate")])
    yield from suite_parts(lines)
    yield from headline_parts(lines)


def page(lines: Sequence[Line]) -> str:
    """The page in Markdown, the same for the same lines."""
    return as_markdown(TITLE, page_parts(lines), "pictures/benchmarks-")


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 when no line could be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, default=sorted((ROOT / "benchmarks/results").glob("*.jsonl")))
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks.md", help="page to write")
    options = parser.parse_args(arguments)
    lines = read_lines(options.results, print)
    written = save(list(page_parts(lines)), TITLE, options.out, None, f"pictures/{options.out.stem}-")
    print(f"{len(lines)} lines read, {len(written)} files written.")
    return 0 if lines else 1


if __name__ == "__main__":
    raise SystemExit(main())
