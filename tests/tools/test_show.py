"""`dap show`: the map counts what the pattern allows, and the page of it works in a real browser without network."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from base64 import b64decode
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from browser import Browser

from dilated_attention_pytorch import parse
from dilated_attention_pytorch.tools.html_page import Chart, Heading, Table, log_chart
from dilated_attention_pytorch.tools.html_page import as_html as report_page
from dilated_attention_pytorch.tools.show import as_html, as_png, as_svg, as_text, draw_map

DRAWN = [
    "full",
    "causal",
    "window:5,2",
    "global:3;queries=1 | window:1",
    "documents:40,24",
    "strided:3;block=4",
    "dilated:16x1,32x3",
    "dilated:8x2,64x4;offset=block;overlap=union & causal",
    "dilated:16x1,64x4;heads=split",
    "random:0.3;block=4;seed=7",
    "random:0.25;block=2;per_head=1 & causal",
    "hierarchical:2x1,5x2,0x4;block=4",
    "block_dilated:32x2;block=4",
    "block_dilated:16x2;sparsity_ratio=0.5;block=4",
    "blocks:0,0 1,-,1 3;block=16",
    "block_columns:3;block=4",
    "grid:8x8;window=3x5",
    "grid:4x4x4;window=3x2x2;causal=1x0x0",
    "grid:7x9;window=3;dilation=2x3;prefix=1 & causal",
    "(window:3 | strided:8) & causal",
    "heads{window:2 / causal / full / strided:5}",
    "packed{global:3 | dilated:16x2 / documents:40,24}",
]


@pytest.mark.parametrize("text", DRAWN)
@pytest.mark.parametrize("head", [0, 3])
def test_cells_hold_the_share_of_allowed_pairs(text: str, head: int):
    pattern = parse(text).resolve(64, 4)
    drawn = draw_map(text, 64, 4, head, width=16)
    for i, j in ((0, 0), (3, 1), (15, 15), (7, 9)):
        allowed = [bool(pattern.allows(4 * i + a, 4 * j + b, head)) for a in range(4) for b in range(4)]
        assert drawn.share[i][j] == sum(allowed) / 16


def test_a_ragged_last_cell_counts_its_own_pairs():
    assert draw_map("full", 10, 1, 0, width=4).share == [[1.0] * 4] * 4


def test_a_long_map_comes_from_the_plan():
    drawn = draw_map("window:1024", 65536, 2, 0, width=16)
    assert drawn.cell == 4096 and drawn.share[0][0] > 0.2 and drawn.share[0][5] == 0
    assert as_text(drawn).splitlines()[1] == "++" + "." * 14


def test_the_svg_is_well_formed_and_escapes_its_title():
    drawn = draw_map("window:2 | global:1", 32, 1, 0, width=32)._replace(title="<window & more>")
    root = ElementTree.fromstring(as_svg([drawn, drawn]))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}g")) == 2
    assert "<window & more>" in root.find(f"{space}g/{space}text").text


def test_the_png_has_pixels():
    pytest.importorskip("matplotlib")
    assert as_png([draw_map("causal", 64, 1, 0, 32)]).startswith(b"\x89PNG")


def test_the_page_is_whole_and_data_cannot_end_its_script():
    page = as_html(["</script><script>alert(1)"], 64, 4, 0)
    assert page.count("</script>") == 1 and "http://" not in page and "https://" not in page


@pytest.fixture
def browser(chromium: Browser, tmp_path: Path) -> Browser:
    """The page as it first opens: no test sees what another one clicked, in whatever order and process they run."""
    page = tmp_path / "page.html"
    page.write_text(as_html(["dilated:16x1,64x4 & causal", "window:8 | global:4"], 256, 4, 0))
    chromium.open(page)
    return chromium


@pytest.mark.parametrize("text", DRAWN)
def test_the_page_computes_what_the_library_computes(browser: Browser, text: str):
    token = torch.arange(64)
    for head in (0, 3):
        wanted = parse(text).resolve(64, 4).multiplicity(token[:, None], token[None, :], head).expand(64, 64)
        code = f"(() => {{ const m = parse({json.dumps(text)})(64, 4); return Array.from({{length: 4096}}, (_, i) => m(i >> 6, i & 63, {head})); }})()"
        assert browser.run(code) == wanted.int().flatten().tolist()


def test_the_page_draws_and_asks_nobody(browser: Browser):
    def shot(visibility: str) -> bytes:
        browser.run(f"document.querySelectorAll('canvas').forEach(c => {{ c.style.visibility = '{visibility}'; }})")
        return browser.screenshot()

    # The same page without its maps compresses to fewer bytes: the maps are not blank.
    assert len(shot("visible")) > len(shot("hidden")) + 500
    shot("visible")
    assert browser.picture() != browser.picture("section:nth-child(2) .map")
    assert any(event["method"] == "Network.requestWillBeSent" for event in browser.events)
    assert browser.faults() == []


def test_sliders_and_families_change_the_drawing(browser: Browser):
    seen = {browser.picture()}
    for code in (
        "(s => { s.value = 'random'; s.dispatchEvent(new Event('input')); })(document.querySelector('select'))",
        "(s => { s.value = 60; s.dispatchEvent(new Event('input')); })(document.querySelector('[name=density]'))",
        "(s => { s.value = 'strided'; s.dispatchEvent(new Event('input')); })(document.querySelector('select'))",
        "(s => { s.value = 8; s.dispatchEvent(new Event('input')); })(document.querySelector('[name=rate]'))",
        "(s => { s.value = 'dilated'; s.dispatchEvent(new Event('input')); })(document.querySelector('select'))",
        "(s => { s.value = 3; s.dispatchEvent(new Event('input')); })(document.querySelector('[name=segment]'))",
        "(s => { s.value = 1; s.dispatchEvent(new Event('input')); })(document.querySelector('#head'))",
        "(s => { s.value = 9; s.dispatchEvent(new Event('input')); })(document.querySelector('#length'))",
    ):
        browser.run(code)
        assert browser.picture() not in seen, code
        seen.add(browser.picture())
    before = browser.picture()
    written = "document.querySelector('input[type=text]').value"
    assert browser.run(written) == "dilated:8x1,64x8 & causal", "the box was ticked by the text the page began with"
    browser.click("[name=causal]")
    assert browser.picture() != before and browser.run(written) == "dilated:8x1,64x8"
    shown = (
        "[...document.querySelectorAll('section')[1].querySelectorAll('label:not([hidden])')].map(l => l.textContent)"
    )
    assert browser.run(shown) == ["reach8", "causal"], "the sliders have the names of a window's arguments"
    browser.run(
        "(s => { s.value = 5; s.dispatchEvent(new Event('input')); })(document.querySelectorAll('[name=segment]')[1])"
    )
    assert browser.run(written.replace("querySelector", "querySelectorAll").replace(").", ")[1].")) == (
        "window:32 | global:8"
    )


def test_a_pattern_without_sliders_keeps_its_text(browser: Browser):
    typed = "document.querySelector('input[type=text]')"
    browser.run(f"(i => {{ i.value = 'grid:16x16;window=5'; i.dispatchEvent(new Event('input')); }})({typed})")
    shown = "[...document.querySelector('section').querySelectorAll('label:not([hidden])')].map(l => l.textContent)"
    assert browser.run(shown) == ["causal"]
    for text in ("grid:16x16;window=5 & causal", "grid:16x16;window=5"):
        browser.click("[name=causal]")
        assert browser.run(f"{typed}.value") == text
    assert browser.run("document.querySelectorAll('.wrong').length") == 0


def test_a_row_lights_its_keys_and_the_wheel_zooms(browser: Browser):
    browser.run(
        "(i => { i.value = 'window:3'; i.dispatchEvent(new Event('input')); })(document.querySelector('input[type=text]'))"
    )
    x, y, size = browser.place("canvas")
    before = browser.picture()
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + size / 2, y=y + size / 2)
    assert browser.run("document.querySelector('.keys').textContent") == "query 128 sees 7 keys: 125-131"
    assert browser.picture() != before
    browser.send("Input.dispatchMouseEvent", type="mouseWheel", x=x + size / 2, y=y + size / 2, deltaX=0, deltaY=-100)
    browser.run("new Promise(done => setTimeout(done, 60))")
    assert browser.run("state.view.span") < 256
    browser.click("#reset")
    assert browser.run("state.view.span") == 256


def test_axes_minimap_and_detail_follow_the_view(browser: Browser):
    ticks = "[...document.querySelectorAll('.across')[0].querySelectorAll('span')].map(t => t.textContent)"
    assert browser.run(ticks) == ["0", "64", "128", "192", "256"]
    minimap, detail = browser.picture(".minimap"), browser.picture(".detail")
    browser.run("zoom(1, 1, 64); new Promise(done => setTimeout(done, 60))")
    assert browser.run(ticks) == ["192", "208", "224", "240", "256"]
    assert browser.picture(".minimap") != minimap
    browser.click(".minimap")
    browser.run("new Promise(done => setTimeout(done, 60))")
    assert browser.run("state.view") == {"q": 96, "k": 96, "span": 64}
    x, y, size = browser.place(".map")
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + size / 4, y=y + size / 2)
    assert browser.run("document.querySelector('.where').textContent") == "32 tokens from query 112, key 96"
    assert browser.picture(".detail") != detail


def test_dilation_is_visible_when_the_page_opens(chromium: Browser, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text(as_html(["dilated:2048x1,8192x4"], 65536, 4, 0))
    chromium.open(page)
    single = (
        "(c => [...c.getContext('2d').getImageData(0, 0, 32, 32).data].filter((v, i) => i % 4 == 3 && v > 0).length)"
    )
    allowed = chromium.run(f"{single}(document.querySelector('.detail'))")
    assert 0 < allowed < 32 * 32


def test_a_pattern_is_copied_as_text_and_as_code(browser: Browser):
    browser.run("window.copied = []; document.execCommand = () => copied.push(document.activeElement.value)")
    browser.run("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    for what in ("text", "python"):
        browser.click(f"[data-copy={what}]")
    text, code = browser.run("copied")
    assert text == "dilated:16x1,64x4 & causal"
    names: dict[str, Any] = dict(zip(("query", "key", "value"), torch.randn(3, 1, 4, 64, 8), strict=True))
    exec(code, names)
    assert names["pattern"] == parse(text) and names["output"].shape == (1, 4, 64, 8)


def test_a_link_opens_what_the_page_showed(browser: Browser, tmp_path: Path):
    typed = "document.querySelector('input[type=text]')"
    browser.run(f"(i => {{ i.value = 'window:9'; i.dispatchEvent(new Event('input')); }})({typed})")
    browser.run("zoom(0.5, 0.5, 32); new Promise(done => setTimeout(done, 60))")
    view, link = browser.run("state.view"), browser.run("location.href")
    browser.run(f"{typed}.value = ''")
    browser.send("Page.navigate", url="about:blank")
    browser.go(link)
    assert browser.run("state.view") == view and browser.run(f"{typed}.value") == "window:9"
    browser.send("Page.navigate", url="about:blank")
    browser.go(link.split("#")[0] + "#%7B%22n%22%3A-1%7D")
    assert browser.run(f"{typed}.value") == "dilated:16x1,64x4 & causal", "a damaged link is ignored"


def test_maps_are_saved_as_png_and_svg(browser: Browser):
    browser.run(
        "window.saved = []; HTMLAnchorElement.prototype.click = function () { saved.push([this.download, this.href]); }"
    )
    for kind in ("png", "svg"):
        browser.click(f"[data-save={kind}]")
    (png_name, png), (svg_name, svg) = browser.run("saved")
    assert (png_name, svg_name) == ("pattern-1.png", "pattern-1.svg")
    assert b64decode(png.split(",")[1]).startswith(b"\x89PNG")
    root = ElementTree.fromstring(unquote(svg.split(",", 1)[1]))
    space = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{space}title").text == "dilated:16x1,64x4 & causal"
    allowed = sum(int(rect.get("width")) for rect in root.findall(f"{space}g/{space}rect"))
    token = torch.arange(256)
    wanted = parse("dilated:16x1,64x4 & causal").resolve(256, 4).multiplicity(token[:, None], token[None, :], 0)
    assert allowed == int((wanted > 0).sum())


def test_a_phone_fits_the_page_and_takes_taps_and_pinches(chromium: Browser, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text(as_html(["dilated:16x1,64x4 & causal", "window:8 | global:4"], 256, 4, 0))
    chromium.open(page, width=400)
    assert chromium.run("document.documentElement.scrollWidth") <= 400
    x, y, size = chromium.place(".map")

    def touch(kind: str, *fractions: float) -> None:
        chromium.touch(kind, *((x + f * size, y + f * size) for f in fractions))

    touch("touchStart", 0.5)
    touch("touchEnd")
    assert chromium.run("document.querySelector('.keys').textContent").startswith("query 128 sees")
    touch("touchStart", 0.4, 0.6)
    touch("touchMove", 0.2, 0.8)
    touch("touchEnd")
    chromium.run("new Promise(done => setTimeout(done, 60))")
    assert chromium.run("state.view.span") < 256


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_is_readable_on_a_phone(chromium: Browser, tmp_path: Path, scheme: str):
    page = tmp_path / "report.html"
    chart = Chart("times", "seconds by tokens", log_chart({"dense": [(1.0, 1.0), (8.0, 64.0)]}, "tokens", "seconds"))
    page.write_text(report_page("Report", [Heading("Times"), chart, Table(["pattern"], [["window:4 " * 30]], 1)]))
    chromium.open(page, width=400, scheme=scheme)
    assert chromium.run("document.documentElement.scrollWidth") <= 400
    assert chromium.run("document.querySelector('svg text').getBoundingClientRect().height") >= 9
    back, ink = chromium.run("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (back, ink)]
    assert abs(bright[0] - bright[1]) > 400 and (bright[0] > bright[1]) == (scheme == "light")


def test_the_theme_changes_and_a_wrong_text_is_explained(browser: Browser):
    before = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.click("#theme")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != before
    browser.run(
        "(i => { i.value = 'windo:3'; i.dispatchEvent(new Event('input')); })(document.querySelector('input[type=text]'))"
    )
    assert "unknown pattern" in browser.run("document.querySelector('.wrong').textContent")
