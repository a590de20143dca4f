"""Pages that the installed command writes, opened in a browser on a desktop and on a phone, light and dark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser import Browser
from installed import ROOT, command

LAYOUTS = [(width, scheme) for width in (1280, 400) for scheme in ("light", "dark")]
RESULTS = ROOT / "benchmarks" / "results" / "cpu.jsonl"


def brightness(browser: Browser, selector: str = "body") -> tuple[int, int]:
    """Sums of the colour channels of an element's background and text."""
    code = f"(s => [s.backgroundColor, s.color])(getComputedStyle(document.querySelector('{selector}')))"
    back, ink = (sum(map(int, colour[colour.index("(") + 1 : -1].split(",")[:3])) for colour in browser.run(code))
    return back, ink


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for line in (
        "dap show 'dilated:64x1,256x4 & causal' --beside 'grid:32x32;window=7x7' -o pattern.html",
        f"dap report {json.dumps(str(RESULTS))} -o report",
    ):
        done = command(line, folder)
        assert done.returncode == 0, done.stderr
    return {"pattern": folder / "pattern.html", "report": folder / "report" / "report.html"}


@pytest.mark.parametrize("name", ["pattern", "report"])
@pytest.mark.parametrize(("width", "scheme"), LAYOUTS)
def test_a_page_fits_and_follows_the_theme(
    chromium: Browser, pages: dict[str, Path], name: str, width: int, scheme: str
):
    chromium.open(pages[name], width, scheme)
    assert chromium.run("document.documentElement.scrollWidth") <= width
    back, ink = brightness(chromium)
    assert abs(back - ink) > 400 and (back > ink) == (scheme == "light")
    assert chromium.faults() == []


@pytest.mark.parametrize("width", [1280, 400])
def test_both_patterns_are_drawn_and_a_row_lists_its_keys(chromium: Browser, pages: dict[str, Path], width: int):
    chromium.open(pages["pattern"], width)
    assert chromium.run("[...document.querySelectorAll('.wrong')].map(e => e.textContent)") == []
    x, y, size = chromium.place(".map")
    if width == 400:
        chromium.touch("touchStart", (x + size / 2, y + size / 2))
        chromium.touch("touchEnd")
    else:
        chromium.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + size / 2, y=y + size / 2)
    assert chromium.run("document.querySelector('.keys').textContent").startswith("query 512 sees ")


@pytest.mark.parametrize("width", [1280, 400])
def test_a_report_shows_its_tables_and_plots(chromium: Browser, pages: dict[str, Path], width: int):
    chromium.open(pages["report"], width)
    assert chromium.run("document.querySelectorAll('table tr').length") > 20
    assert chromium.run("document.querySelectorAll('svg').length") >= 1
    assert chromium.run("document.querySelector('svg text').getBoundingClientRect().height") >= 9
    assert "largest speed-up over dense attention is" in chromium.run("document.body.textContent")


def test_case_names_stay_visible_on_a_phone(chromium: Browser, pages: dict[str, Path]):
    """A wide table scrolls under its first column."""
    chromium.open(pages["report"], 400)
    places = chromium.run(
        "(box => {box.scrollLeft = 9999; const row = box.querySelector('tbody tr');"
        " return [box.scrollLeft, ...[...row.cells].map(cell => cell.getBoundingClientRect().right)]})"
        "(document.querySelector('table').parentNode)"
    )
    assert places[0] > 0 and 0 < places[1] < 400 and 0 < places[-1] <= 400
