"""The language-model benchmark in its small form, on a text that the test makes."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import language_model as lm
import language_model_data as data

SMALL = lm.SIZES["small"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared tokens and a dense checkpoint."""
    root, draw = tmp_path_factory.mktemp("lm"), random.Random(0)
    for part in ("a", "b"):
        (root / "text" / part).mkdir(parents=True)
        functions = (f"int f{draw.randrange(99)}(int x) {{ return x + {draw.randrange(99)}; }}\n" for _ in range(400))
        (root / "text" / part / "x.c").write_text("".join(functions))
    common = ["--size", "small", "--folder", str(root)]
    lm.main(["prepare", *common, "--sources", str(root / "text"), "--trained", "a", "--held-out", "b"])
    assert lm.main(["train", *common, "--device", "cpu"]) == 0
    return root


def test_rows_continue_from_one_checkpoint_at_one_density(folder: Path, capsys: pytest.CaptureFixture[str]):
    out = folder / "out.jsonl"
    command = ["continue", "--size", "small", "--folder", str(folder), "--out", str(out), "--rounds", "1"]
    # No time at first: nothing is measured, and the next command goes on.
    assert lm.main([*command, "--device", "cpu", "--seconds", "0"]) == 0 and not out.exists()
    assert lm.main([*command, "--device", "cpu"]) == 0
    lines = {line["row"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert tuple(lines) == lm.ROWS and {line["long_tokens"] for line in lines.values()} == {2 * SMALL.long}
    for row in ("learned", "frozen", "window"):
        for name in ("density", "training_density"):
            assert lines[row][name] == pytest.approx(SMALL.density, rel=0.03), (row, name)
    assert lines["dense"]["density"] == 1.0
    assert lines["learned"]["parameters"] == lines["frozen"]["parameters"] > lines["dense"]["parameters"]
    assert lines["learned"]["loss"] != lines["frozen"]["loss"] != lines["window"]["loss"]
    assert lm.main([*command, "--device", "cpu"]) == 0 and len(out.read_text().splitlines()) == 4
    assert lm.main(["report", str(out)]) == 0
    assert "| window | 25.0 % |" in capsys.readouterr().out


def test_training_stopped_and_resumed_gives_the_same_weights(folder: Path, tmp_path: Path):
    for name in ("train.xz", "held_out.xz", "vocabulary.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    for steps in ("1", "4"):
        command = ["train", "--size", "small", "--folder", str(tmp_path), "--steps", steps, "--device", "cpu"]
        assert lm.main(command) == 0
    whole, resumed = (torch.load(x / "dense-256-0.pt", weights_only=True)["model"] for x in (folder, tmp_path))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_far_tokens_match_a_search():
    draw = np.random.default_rng(0)
    tokens = np.concatenate([part := draw.integers(0, 3, 60), draw.integers(0, 3, 40), part])
    grams = [tuple(tokens[max(i - 7, 0) : i + 1]) for i in range(len(tokens))]
    expected = []
    for i, gram in enumerate(grams):
        before = [j for j in range(7, i) if grams[j] == gram] if i >= 7 else []
        expected.append(bool(before) and i - before[-1] > 64)
    assert data.far_tokens(tokens, 64).tolist() == expected and 40 < sum(expected) < 60


def test_needles_are_defined_early_and_asked_at_the_end():
    needles = [([1000 + i, 2000 + i], [3000 + i]) for i in range(8)]
    read, places = data.with_needles(torch.zeros(200, dtype=torch.int64), needles, 4, random.Random(0))
    assert len(places) == 4 and int(torch.cat(places).max()) == 199
    for place in places:
        where = (read == read[place]).nonzero().flatten().tolist()
        assert len(where) == 2 and where[0] < 100 and where[1] == int(place)
        assert read[where[0] - 2 : where[0] + 1].tolist() == read[where[1] - 2 : where[1] + 1].tolist()


@pytest.mark.parametrize("n, sink", [(512, 16), (1000, 1)])
def test_window_density_counts_pairs(n: int, sink: int):
    width = lm.window_width(0.1, n, sink)
    q, k = torch.arange(n)[:, None], torch.arange(n)[None]
    allowed = (k <= q) & ((q - k <= width) | (k < sink))
    density = float(allowed.sum()) / (n * (n + 1) / 2)
    assert lm.window_density(width, n, sink) == pytest.approx(density) and density == pytest.approx(0.1, abs=0.005)


def test_published_table_is_written_from_the_results():
    root = Path(__file__).resolve().parents[1]
    lines = lm.read_lines([root / "benchmarks/results/language_model_cpu.jsonl"])
    assert {line["row"] for line in lines} == set(lm.ROWS)
    assert "\n".join(lm.table(lines)) in (root / "docs/quality.md").read_text()


def test_nothing_is_retained_where_dense_is_not_better():
    def retained(dense: float, window: float) -> list[str]:
        common = {"loss": 1.0, "loss_by_position": {"0-4": 1.0}, "density": 1.0, "needle_accuracy": 0.0}
        common |= {"step_speedup": 1.0, "attention_speedup": 1.0}
        losses = {"dense": dense, "learned": 2.25, "window": window}
        lines = [common | {"row": row, "far_loss": loss} for row, loss in losses.items()]
        return [row.split(" | ")[5].strip() for row in lm.table(lines)[2:]]

    assert retained(2.0, 3.0) == ["1.00", "0.75", "0.00"]
    assert retained(3.0, 2.0) == ["", "", ""]
