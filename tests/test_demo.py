"""The tour ends with a page, or stops where a result is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs_pages import demo


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MILLION", "window:128")
    monkeypatch.setattr(demo, "plan_a_million", lambda device: [["window <1>", "1 s", "1 KiB", "1", "1%"]])
    monkeypatch.setattr(demo, "CHECKED", ("window:64",))
    monkeypatch.setattr(demo, "TRAINED_CONTEXT", 1024)
    race = demo.race
    monkeypatch.setattr(demo, "race", lambda device, dtype, lengths, *shape: race(device, dtype, [256, 512], *shape))


def test_the_tour_writes_its_pages(short: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "demo" / "report.html"
    assert demo.main(["--out", str(out)]) == 0
    page = out.read_text()
    assert 'href="pattern.html"' in page
    assert "window &lt;1&gt;" in page and page.count("<svg") == 2 and "dense" in page
    assert "Attention patterns" in out.with_name("pattern.html").read_text()
    told = capsys.readouterr().out
    for step in ("Backends", "a million tokens", "peak memory", "agrees", "faster by", "Wrote"):
        assert step in told, step


def test_nothing_is_timed_where_a_result_is_wrong(short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "error_ratio", lambda *_: 1.5)
    assert demo.main(["--out", str(tmp_path / "report.html")]) == 1
    assert not (tmp_path / "report.html").exists()
