"""The report tells what the lines tell: the same bytes for the same lines, nothing lost, nothing run as markup."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from docs_pages import docs_headlines, docs_page

from dilated_attention_pytorch.tools import html_page as page
from dilated_attention_pytorch.tools import report
from dilated_attention_pytorch.tools.bench.suite_tables import _record, drawn_names

FACTS = {
    "device": "a <fast> CPU",
    "threads": 2,
    "cores": 2,
    "git": "0123456789ab",
    "torch": "2.13.0",
    "triton": None,
    "python": "3.11.7",
}


def line(suite: str, case: str, n: int, direction: str, ms: float, **rest: object) -> dict:
    known = {
        "suite": suite,
        "case": case,
        "backend": "native",
        "direction": direction,
        "pattern": "p",
        "n": n,
        "d": 64,
        "heads": 8,
        "key_heads": 8,
        "dtype": "float32",
        "p50_ms": ms,
        "flops": 1e9,
        "density": 0.02,
        "relative_rate": {"sdpa": 1.1},
        "peak_bytes": 2048 * n,
        "gate_passed": True,
    }
    return {**known, **rest, **FACTS}


@pytest.fixture
def lines() -> list[dict]:
    found = []
    for n in (4096, 8192):
        for direction, dense, sparse in (("forward", n / 10, n / 100), ("backward", n / 5, n / 60)):
            found.append(
                line("long", "dense", n, direction, dense / 2, backend="sdpa", heads=4, density=1.0, relative_rate={})
            )
            found += [line("long", f"random-{p}%", n, direction, sparse * p, density=p / 100) for p in (2, 5, 10)]
    for name, ms, flops in (("2048x1", 10.0, 1.0), ("2048x1,4096x2,8192x4", 30.0, 2.5)):
        found.append(line("dilation", f"dilated {name}", 16384, "forward", ms, flops=flops))
    found += [line("variants", "DilatedAttention", 4096, way, 5.0) for way in ("forward", "backward")]
    for name, ms in (("RingDilated", 4.0), ("RingMultiheadDilated", 5.0)):
        found.append(line("variants", f"BlockSparse{name}Attention", 4096, "forward", ms, peak_bytes=int(ms) << 20))
    found.append(line("variants", "BlockSparseAdaptive", 4096, "forward", 6.0))
    found.append(
        line("distributed", "ladder | on 2 ranks", 4096, "forward", 9.0, ranks=2, received_bytes=100, ring_bytes=1000)
    )
    found.append({"suite": "long", "case": "plan cache", "hits": 90, "misses": 3, **FACTS})
    found.append(
        {"suite": "long", "case": "plan cache", "hits": 7, "misses": 0, "warm_hits": 6, "warm_misses": 0, **FACTS}
    )
    moved = {"suite": "context_parallel", "tokens_a_rank": 16384, "cores": 2}
    found += [{**moved, "world": world, "times_faster": 3.0 * world} for world in (2, 4)]
    extreme = {
        "case": "extreme",
        "direction": "forward",
        "cap_gib": 8.0,
        "limited_by": "memory",
        "tried": 9,
        "seconds": 1.5,
    }
    found.append({"suite": "extreme", "subject": "dilated", "n": 3_000_000, **extreme, **FACTS})
    found.append({"suite": "extreme", "subject": "dense flash", "n": 9_000_000, **extreme, **FACTS})
    found.append({"case": "billion", "tokens": 2**30, "rows_checked": 1024, "passed": True, "seconds": 60.0, **FACTS})
    return found


def written(folder: Path, lines: list[dict], *words: str) -> dict[str, bytes]:
    folder.mkdir()
    (folder / "lines.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert report.main([str(folder / "lines.jsonl"), "-o", str(folder / "out"), *words]) == 0
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


def test_the_same_lines_give_the_same_bytes_in_any_order(lines, tmp_path):
    first, second = written(tmp_path / "a", lines), written(tmp_path / "b", lines[::-1])
    assert first == second and {"report.md", "report.html"} < first.keys()


@pytest.mark.parametrize(
    ("measured", "by"),
    [
        (
            "3,000,000 tokens (dilated) within 8 GiB, limited by memory, a &lt;fast> CPU",
            "dap bench --suite extreme --memory 8",
        ),
        (
            "32.0 MiB for 16K tokens (dilated 2048x1,4096x2,8192x4, float32), so 2.0 GiB for a million, a &lt;fast> CPU",
            "dap bench --suite dilation",
        ),
        ("1.25x at 4K tokens, a &lt;fast> CPU", "dap bench --suite variants"),
        # (8192 / 10 + 8192 / 5) / (8192 / 50 + 8192 / 30)
        ("5.6x (2.0% of the blocks kept), a &lt;fast> CPU", "dap bench --suite long"),
        ("1.1x (geometric mean of 2 cases at 4K, 8K, the slowest 1.1x), a &lt;fast> CPU", "dap bench --suite long"),
        (
            "100.0% of 6 calls after the first call of each case, 97.0% of 100 calls with the first calls counted, "
            "a &lt;fast> CPU",
            "dap bench --suite long",
        ),
        ("dilated: 3.00x the time for 2.50x the work, a &lt;fast> CPU", "dap bench --suite dilation"),
        ("1.50x at 4K tokens, a &lt;fast> CPU", "dap bench --suite variants"),
        (
            "6.0x on 2 ranks, 12.0x on 4 ranks, 16K tokens a rank, 2 cores, gloo over loopback",
            "python benchmarks/context_parallel.py",
        ),
        (
            "1,073,741,824 tokens in 60.0 s (17.9 million a second), 1,024 rows checked, a &lt;fast> CPU",
            "dap billion --tokens 1073741824",
        ),
    ],
)
def test_headlines_stand_beside_what_was_measured_and_how(lines, measured: str, by: str):
    page = docs_page.page(lines)
    assert f"| {measured} | `{by}` |" in page
    assert docs_headlines.NOT_MEASURED not in page


def test_what_the_data_lack_is_said_to_be_not_measured(lines):
    page = docs_page.page([x for x in lines if x.get("suite") == "dilation"])
    assert page.count(f"| {docs_headlines.NOT_MEASURED} |  |") == len(docs_headlines.HEADLINES) - 2


def test_dense_time_counts_for_as_many_heads(lines):
    page = docs_page.page(lines)
    assert "| dense, torch | 410 | 819 |" in page
    assert "| dense, torch | 4096 | 4096 |" in page, "and its memory, 2048 bytes a token for half of the heads"


def test_a_report_names_the_files_it_is_made_from(lines, tmp_path):
    assert b"from `lines.jsonl`" in written(tmp_path / "a", lines)["report.md"]
    few = [x for x in lines if x.get("suite") in ("long", "dilation")]
    page = written(tmp_path / "b", few)["report.md"].decode()
    assert "benchmarks/results" not in page and docs_headlines.NOT_MEASURED not in page
    assert "Measured by `dap bench --suite dilation`, `dap bench --suite long`." in " ".join(page.split())


def test_a_chart_shows_dense_lines_and_a_case_beside_its_peers():
    names = [
        "dense, torch",
        "dense, cuDNN",
        "dense, SDPA flash",
        "dense-causal, cuDNN",
        "local-1%",
        "local-1%, FlexAttention",
    ]
    names += ["random-10%", "random-causal-10%"]
    known = [line("gpu", "x", n, "forward", 1.0 + names.index(name)) for name in names for n in (4096, 8192)]
    forward = {
        (name, n): record._replace(name=name, n=n)
        for (name, n), record in zip(
            ((name, n) for name in names for n in (4096, 8192)), map(_record, known), strict=True
        )
    }
    assert drawn_names(forward, names) == [
        "dense, torch",
        "dense, cuDNN",
        "local-1%",
        "local-1%, FlexAttention",
        "random-10%",
    ]


def test_tables_of_every_suite_are_there(lines):
    page = docs_page.page(lines)
    for title in (
        "By length: a &lt;fast> CPU",
        "Density: ",
        "Dilation",
        "Every class",
        "Ranks",
        "The longest sequence",
    ):
        assert title in page, title
    assert "ladder \\| on 2 ranks" in page
    assert "| 30 | 2048 | 3.00x | 2.50x | 1.20 |" in page
    assert "| 100 B | 10.0% |" in page


def test_names_are_escaped_in_html(lines, tmp_path):
    html = written(tmp_path / "a", lines)["report.html"].decode()
    assert "a &lt;fast&gt; CPU" in html and "<fast>" not in html and "http" not in html.replace("http-equiv", "")


def test_charts_are_files_and_well_formed(lines, tmp_path):
    files = written(tmp_path / "a", lines)
    charts = [name for name in files if name.endswith(".svg")]
    assert {"a-fast-cpu-time-8x64.svg", "a-fast-cpu-memory-8x64.svg"} < set(charts) and len(charts) == 3
    for name in charts:
        ElementTree.fromstring(files[name])
        assert f"]({name})" in files["report.md"].decode()
    assert b"stroke-dasharray" in files[next(name for name in charts if "density" in name)]


@pytest.mark.parametrize(("value", "text"), [(1657.3, "1,660"), (46812, "46,800"), (0.012345, "0.0123"), (12.0, "12")])
def test_figures_have_three_digits_and_no_powers_of_ten(value: float, text: str):
    assert page.figure_text(value) == text


def test_links_lead_to_pages_beside_and_nowhere_else():
    assert '<a href="more.html">more</a>' in page.as_html("title", ["[more](more.html)"])
    assert "<a " not in page.as_html("title", ["[more](javascript:alert)", "[more](https://x/more.html)"])


def test_a_page_of_many_sections_lists_them():
    parts = [page.Heading(f"<{name}>") for name in "abcd"]
    for index, name in enumerate("abcd"):
        assert f'<a href="#section{index}">&lt;{name}&gt;</a>' in page.as_html("title", parts)
        assert f'<h2 id="section{index}">&lt;{name}&gt;</h2>' in page.as_html("title", parts)
    assert "<nav>" not in page.as_html("title", parts[:3])


def test_a_time_without_what_it_is_a_time_of_is_told_and_skipped(lines, tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    cut = {name: value for name, value in lines[0].items() if name != "heads"} | {"n": "many"}
    path.write_text(f"{json.dumps(cut)}\n{json.dumps(lines[1])}\n")
    assert report.main([str(path), "-o", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert told.err == f"{path}:1: a time without n, heads, skipped\n" and told.out.startswith(
        "1 lines read, 1 skipped"
    )


def test_a_broken_line_is_told_with_its_number_and_skipped(lines, tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    path.write_text(f'{json.dumps(lines[0])}\n{{"case": "windo\n[1, 2]\n\n{json.dumps(lines[1])}\n')
    assert report.main([str(path), "-o", str(tmp_path / "out"), "--json"]) == 0
    told = capsys.readouterr()
    assert f"{path}:2: not a line of results, skipped\n{path}:3: not" in told.err
    assert json.loads(told.out)["lines"] == 2


def test_two_files_are_set_side_by_side(lines, tmp_path, capsys):
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    timed = [x for x in lines if x.get("suite") == "long" and "p50_ms" in x]
    first.write_text("".join(json.dumps(x) + "\n" for x in timed))
    faster = [{**x, "p50_ms": x["p50_ms"] / 2} for x in timed[1:]]
    second.write_text("".join(json.dumps(x) + "\n" for x in faster))
    assert report.main([str(first), str(second), "--compare", "-o", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.md").read_text()
    assert "geometric mean 2.00x" in page and "Only in the first: 1 figures." in page
    with pytest.raises(SystemExit):
        report.main([str(first), "--compare"])


def test_a_place_that_cannot_be_written_is_named(lines, tmp_path):
    (tmp_path / "lines.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ValueError, match=r"must go to a file that can be written, got .*report.md"):
        report.main([str(tmp_path / "lines.jsonl"), "-o", str(tmp_path / "lines.jsonl")])


def test_a_missing_file_is_said_to_be_missing(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        report.main([str(tmp_path / "none.jsonl")])
    assert left.value.code == 2 and "must be files that exist" in capsys.readouterr().err


def test_unknown_subjects_are_listed_by_their_name(lines: list[dict], tmp_path: Path):
    """A line of another program, or of a later version, is a row and no KeyError."""
    shape = {"kind": "dense", "subject": "sage", "asked_density": None, "causal": False, "tflops": 1.0, "skipped": None}
    foreign = [line("gpu", "dense", 4096, way, 2.0, **shape, gate=0.1) for way in ("forward", "backward")]
    foreign += [line("gpu", "random-10%", 4096, "forward", 1.0, **{**shape, "kind": "random"}, gate=0.1)]
    file = tmp_path / "gpu.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in [*lines, *foreign]))
    assert docs_page.main([str(file), "--out", str(tmp_path / "page.md")]) == 0
    assert "| sage | dense | 4K |" in (tmp_path / "page.md").read_text()


def test_markdown_shows_hostile_names_as_text():
    hostile = "<img src=x onerror=alert(1)> | [click](javascript:alert(1)) ![x](http://y/z.png) \\| `a\n\n# b"
    text = page.as_markdown("t", [page.Heading(hostile), hostile, page.Table(("case",), [[hostile]])])
    bare = re.sub(r"`[^`]+`", "", text)
    assert "<img" not in bare and not re.search(r"(?<!\\)\[", bare) and "\n# b" not in text and "\n\\# b" in text
    row = text.splitlines()[-1]
    assert len(re.findall(r"(?<!\\)\|", row)) == 2, "a name with a bar is one cell"
    assert (
        page.as_markdown("t", ["`code`, **bold**, [a page](other.html)"])
        == "# t\n\n`code`, **bold**, [a page](other.html)\n"
    )
