"""Take the screenshots of the documents: `python docs/screenshots.py`, after `make docs`. Needs Chromium and Pillow.

The front page of the site, the page of `dap show` and the page of `dap report`, each 1280 and 400 px wide, light and
dark, as docs/pictures/screen-*.png.
"""

from __future__ import annotations

import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
# At the end: no name there hides a module of this folder.
sys.path.append(str(ROOT / "tests"))

from browser import CHROMIUM, Browser  # noqa: E402

PATTERNS = ["dilated:64x1,256x4 & causal", "window:64 | global:16"]
LARGEST = 200_000
"""Bytes of a screenshot."""


def pages(folder: Path) -> dict[str, Path]:
    """Write the pages of the two commands; the site must have been built."""
    from dilated_attention_pytorch.tools import report
    from dilated_attention_pytorch.tools.show import as_html

    site, pattern = ROOT / "build" / "site" / "index.html", folder / "pattern.html"
    if not site.exists():
        sys.exit("build/site is missing; run `make docs` first")
    pattern.write_text(as_html(PATTERNS, 1024, 4, 0))
    report.main([str(ROOT / "benchmarks" / "results" / "cpu.jsonl"), "-o", str(folder)])
    return {"site": site, "pattern": pattern, "report": folder / "report.html"}


def reduced(png: bytes) -> bytes:
    """The same picture with a palette of at most 256 colours, which suits flat pages."""
    small = BytesIO()
    Image.open(BytesIO(png)).convert("RGB").quantize(256).save(small, "PNG", optimize=True)
    return small.getvalue()


def main() -> int:
    """Write every screenshot; the exit status is 1 if one is too large."""
    if CHROMIUM is None:
        sys.exit("Chromium is not installed (Debian: apt-get install chromium)")
    status = 0
    with tempfile.TemporaryDirectory() as name:
        browser = Browser(Path(name) / "profile")
        try:
            for page, path in pages(Path(name)).items():
                for width in (1280, 400):
                    for scheme in ("light", "dark"):
                        browser.open(path, width, scheme)
                        # The site stores the theme of the first visit.
                        browser.run("localStorage.clear()")
                        browser.go(path.as_uri())
                        browser.run("new Promise(done => setTimeout(done, 300))")
                        picture = reduced(browser.screenshot())
                        out = ROOT / "docs" / "pictures" / f"screen-{page}-{width}-{scheme}.png"
                        out.write_bytes(picture)
                        print(f"{out.relative_to(ROOT)}: {len(picture):,} bytes")
                        status |= len(picture) > LARGEST
        finally:
            browser.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
