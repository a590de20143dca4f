"""The training job: it learns, resumes exactly, stops cleanly, and gives the same losses over ranks."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from limits import scaled
from processes import start
from torch.distributed.checkpoint.state_dict import get_state_dict

from dilated_attention_pytorch.models import LongNetConfig, LongNetLM, config
from dilated_attention_pytorch.tools import generate, show, train, train_checkpoints, training

SMALL = {
    "d_model": 32,
    "nhead": 4,
    "num_decoder_layers": 2,
    "dim_feedforward": 64,
    "segment_lengths": (16, 64),
    "dilation_rates": (1, 2),
}
OPTIONS = [
    "--context",
    "64",
    "--steps",
    "6",
    "--warmup",
    "2",
    "--batch",
    "2",
    "--eval-every",
    "3",
    "--eval-windows",
    "2",
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(config.SIZES, "tiny", SMALL)
    (tmp_path / "text").write_bytes(b"".join(b"%d squared is %d.\n" % (i, i * i) for i in range(600)))
    monkeypatch.chdir(tmp_path)


def run(*more: str, out: str = "run") -> int:
    return train.main(["--data", "text", "--out", out, "--device", "cpu", *OPTIONS, *more])


def log(out: str = "run") -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def losses(out: str) -> list[float]:
    return [line["loss"] for line in log(out)]


def test_it_learns_and_says_so(capsys: pytest.CaptureFixture[str]):
    assert run("--steps", "30", "--lr", "3e-3", "--sample", "20") == 0
    lines = log()
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert lines[-1]["bits_per_byte"] < 8
    said = capsys.readouterr().out
    assert "tokens/s" in said and "bits/byte" in said and "parameters" in said
    assert Path("run", "checkpoint.pt").is_file() and Path("run", "loss.png").stat().st_size > 1000


def test_a_resumed_run_is_an_uninterrupted_one():
    dropping = ["--dropout", "0.2", "--accumulate", "2", "--save-every", "3"]
    assert run(*dropping, out="whole") == 0
    assert stop_after(3, *dropping, out="part") == 130
    assert len(losses("part")) == 3
    assert run(*dropping, "--resume", out="part") == 0
    assert losses("part") == losses("whole")
    assert [line.get("bits_per_byte") for line in log("part")] == [line.get("bits_per_byte") for line in log("whole")]
    one, other = (torch.load(f"{out}/checkpoint.pt", weights_only=True) for out in ("whole", "part"))
    assert all(torch.equal(tensor, other["model"][name]) for name, tensor in one["model"].items())


def stop_after(step: int | None, *more: str, out: str) -> int:
    """Run, with a Ctrl-C while that step is under way."""
    original = training.Run.train_step

    def interrupted(self: training.Run) -> tuple[float, float]:
        if self.step + 1 == step:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.Run, "train_step", interrupted)
        return run(*more, out=out)


def test_json_is_the_log(capsys: pytest.CaptureFixture[str]):
    assert run("--json", "--sample", "8") == 0
    *lines, sample = map(json.loads, capsys.readouterr().out.splitlines())
    assert lines == log()
    assert isinstance(sample["sample"], str)


def test_ctrl_c_saves_and_leaves(capsys: pytest.CaptureFixture[str]):
    handler = signal.getsignal(signal.SIGINT)
    assert stop_after(2, out="cut") == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert "stopped after step 2; go on with --resume" in capsys.readouterr().out
    assert run("--resume", out="cut") == 0
    assert run(out="whole") == 0
    assert losses("cut") == losses("whole")


def test_a_crash_after_a_checkpoint_loses_only_what_came_after(monkeypatch: pytest.MonkeyPatch):
    assert run("--save-every", "2", out="whole") == 0
    original = training.Run.train_step

    def crashing(self: training.Run) -> tuple[float, float]:
        if self.step == 5:
            raise RuntimeError("out of luck")
        return original(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        patch.setattr(training.Run, "train_step", crashing)
        run("--save-every", "2", out="crashed")
    with Path("crashed", "log.jsonl").open("a") as file:
        # What is no step of a run, and what a crash cut short.
        file.write("[1, 2]\n" + "[" * 5000 + '\n{"loss": 1.0}\n\x00\n{"step": 6, "lo')
    # So torchrun starts it anew; without a checkpoint yet, it would begin at the beginning.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run("--save-every", "2", out="crashed") == 0
    assert losses("crashed") == losses("whole")
    assert run(out="fresh") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "--resume must have a checkpoint"),
        (["--data", "nowhere"], "data must be a file"),
        (["--dtype", "int8"], "dtype must be one of auto, float32, bfloat16"),
        (["--parallel", "pipeline"], "parallel must be one of data, context"),
        (["--dense", "--pattern", "window:8"], "dense must come without a pattern"),
        (["--batch", "0"], "batch must be >= 1"),
        (["--eval-every", "-1"], "eval_every must be >= 0"),
        (["--clip", "0"], "clip must be positive and finite"),
        (["--lr", "nan"], "lr must be positive and finite"),
        (["--device", "cuda"], "no CUDA device is available"),
        (["--size", "huge"], "size must be one of tiny"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        run(*options)


def test_dense_attention_knows_no_ranks(monkeypatch: pytest.MonkeyPatch):
    """Each rank would attend to its own part of the sequence and say nothing."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="dense must come with --parallel data"):
        training.Run(train.TrainSettings(data="text", context=64, dense=True, parallel="context"))


def test_a_resumed_run_keeps_its_settings():
    assert run() == 0
    with pytest.raises(ValueError, match="resume must have the settings of the run, got lr"):
        run("--resume", "--lr", "0.5")
    with Path("text").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="resume must have the data of the run"):
        run("--resume")


def test_a_finished_run_is_extended():
    assert run() == 0
    assert run("--resume", "--steps", "9") == 0
    assert [line["step"] for line in log()] == list(range(1, 10))
    with pytest.raises(ValueError, match="steps must be at least the 9 already done, got 4"):
        run("--resume", "--steps", "4")


def test_small_files_wrap_around(capsys: pytest.CaptureFixture[str]):
    Path("few").write_bytes(bytes(range(100)))
    assert run("--data", "few", "--context", "64", "--steps", "2") == 0
    assert "sequences wrap around" in capsys.readouterr().out
    corpus = training.Corpus(Path("few"), 200, 0)
    window, held = corpus.window(3), corpus.held_out(0)
    assert len(window) == len(held) == 201
    assert torch.equal(window[:106], window[95:]) and set(window.tolist()) == set(range(95))
    assert set(held.tolist()) == set(range(95, 100))
    Path("less").write_bytes(bytes(10))
    with pytest.raises(ValueError, match="data must be at least 64 bytes, got 10"):
        run("--data", "less")


def test_a_trained_model_continues_a_text(capsys: pytest.CaptureFixture[str]):
    assert run("--context", "1K", "--steps", "2") == 0
    capsys.readouterr()
    given = ["run", "--prompt", "12 squared", "-n", "20", "--device", "cpu", "--json"]
    told = []
    for words in (given, given, [*given, "--seed", "1"]):
        assert generate.main(words) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1] != told[2] and told[0]["prompt"] == "12 squared"
    with pytest.raises(ValueError, match="a checkpoint must be a file or a folder"):
        generate.main(["nowhere"])


def test_accumulation_is_a_larger_batch():
    assert run("--batch", "4", out="large") == 0
    assert run("--batch", "2", "--accumulate", "2", out="small") == 0
    assert losses("small") == pytest.approx(losses("large"), rel=1e-5)


def test_windows_are_a_function_of_seed_and_number():
    corpus = training.Corpus(Path("text"), 64, 3)
    again = training.Corpus(Path("text"), 64, 3)
    assert all(torch.equal(corpus.window(i), again.window(i)) for i in range(20))
    assert not torch.equal(corpus.window(0), training.Corpus(Path("text"), 64, 4).window(0))
    text = Path("text").read_bytes()
    held = bytes(corpus.held_out(0).tolist())
    assert text.index(held) >= corpus.trained
    assert all(text.index(bytes(corpus.window(i).tolist())) + 65 <= corpus.trained for i in range(50))


def test_the_learning_rate_rises_and_falls():
    settings = train.TrainSettings(steps=100, warmup=10, lr=1.0)
    rates = [training.learning_rate(settings, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.1)


def test_the_demo_corpus_is_python_text_and_always_the_same(tmp_path: Path):
    first = training.demo_corpus(tmp_path / "a", 200_000).read_bytes()
    assert first == training.demo_corpus(tmp_path / "b", 200_000).read_bytes()
    assert len(first) == 200_000 and first.count(b"def ") > 50


def test_dense_twins_compute_full_attention():
    model = LongNetLM(LongNetConfig.named("tiny", patterns=("full",)), dtype=torch.float64)
    tokens = torch.randint(256, (2, 50))
    wanted = model.loss(tokens)
    training.use_dense(model)
    assert model.loss(tokens).item() == pytest.approx(wanted.item(), rel=1e-10)


def run_rank(arguments: list[str], environment: dict[str, str], killed_at: int | None) -> int:
    """Exit status of a run in a process of its own."""
    os.environ.update(environment)
    warnings.simplefilter("error", UserWarning)
    config.SIZES["tiny"] = SMALL
    step = training.Run.train_step
    training.Run.train_step = lambda run: os.kill(os.getpid(), 9) if run.step == killed_at else step(run)
    return train.main(arguments)


def run_ranks(
    world: int, *more: str, out: str, killed_at: int | None = None, each: Callable[..., int] = run_rank
) -> list[int]:
    """Exit statuses of a run in processes; each kills itself at the beginning of the step after `killed_at`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = ["--data", "text", "--out", out, "--device", "cpu", *OPTIONS, *more]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    ranks = [start(each, given, shared | place, killed_at) for place in places]
    for rank in ranks:
        rank.join(scaled(200))
        assert rank.exitcode is not None, "a rank still runs"
    return [rank.exitcode for rank in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["data", "context"])
def test_two_ranks_train_as_one(parallel: str):
    few = ["--steps", "3", "--eval-windows", "3"]
    assert run(*few, out="one") == 0
    assert run_ranks(2, *few, "--parallel", parallel, "--sample", "8", out="two") == [0, 0]
    assert losses("two") == pytest.approx(losses("one"), rel=1e-4)
    for name in ("bits_per_byte", "grad_norm"):
        assert log("two")[-1][name] == pytest.approx(log("one")[-1][name], rel=1e-4)
    # Each rank wrote its part of the weights, and one process reads them.
    assert {path.name for path in Path("two", "checkpoint-3").iterdir()} >= {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    }
    one, two = (generate.load_model(Path(out)).state_dict() for out in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)


def run_slow_first(arguments: list[str], environment: dict[str, str], _: None) -> int:
    """A run whose first rank takes longer to end; writes the time at which the rank ended."""
    plot = training._plot

    def slow_plot(*paths: Path) -> None:
        time.sleep(2)
        Path("plotted").write_text(repr(time.time()))
        plot(*paths)

    training._plot = slow_plot
    status = run_rank(arguments, environment, None)
    Path(f"ended-{environment['RANK']}").write_text(repr(time.time()))
    return status


@pytest.mark.slow
def test_no_rank_ends_before_the_others():
    assert run_ranks(2, "--steps", "1", "--eval-windows", "1", out="two", each=run_slow_first) == [0, 0]
    plotted, first, second = (float(Path(name).read_text()) for name in ("plotted", "ended-0", "ended-1"))
    assert min(first, second) >= plotted


class Planted:
    """An object whose unpickling calls a function."""

    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("where", ["index", "values"])
def test_shards_with_foreign_classes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    if where == "values":
        moments["param_groups"][0]["lr"] = Planted()
    with warnings.catch_warnings():
        # One process writes without a process group; torch warns about it.
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "checkpoint-1", no_dist=True)
    if where == "index":
        (tmp_path / "checkpoint-1" / ".metadata").write_bytes(pickle.dumps(Planted()))
    with pytest.raises((ValueError, dcp.CheckpointException), match=r"classes of checkpoints|Weights only load failed"):
        train_checkpoints.load({"shards": "checkpoint-1"}, tmp_path, model, optimizer)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_killed_runs_resume_on_other_ranks(before: int, after: int):
    few = ["--save-every", "2", "--steps", "5"]
    assert run(*few, out="whole") == 0
    assert run_ranks(before, *few, out="part", killed_at=3) == [-signal.SIGKILL] * before
    assert torch.load("part/checkpoint.pt", weights_only=True)["step"] == 2
    assert run_ranks(after, *few, "--resume", out="part") == [0] * after
    assert losses("part") == pytest.approx(losses("whole"), rel=1e-4)
    # One checkpoint is left: the last one, of the ranks that wrote it.
    assert [path.name for path in Path("part").glob("checkpoint*/")] == ["checkpoint-5"] * (after > 1)


@pytest.mark.slow
def test_learned_attention_trains_on_two_ranks():
    learned = ("learned:0.5;block=16", "--steps", "4", "--save-every", "2")
    assert run_ranks(2, *learned, out="whole") == [0, 0]
    assert run_ranks(2, *learned, out="part", killed_at=3) == [-signal.SIGKILL] * 2
    assert run_ranks(2, *learned, "--resume", out="part") == [0, 0]
    assert losses("part") == losses("whole")


def test_a_second_run_into_one_folder_is_refused(monkeypatch: pytest.MonkeyPatch):
    assert run() == 0
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    with pytest.raises(ValueError, match=r"out must be a folder without a run(.|\n)*--resume(.|\n)*another --out"):
        run("--seed", "7")
    assert {path.name: path.read_bytes() for path in Path("run").iterdir()} == before
    Path("run", train.SAVED).unlink()
    with pytest.raises(ValueError, match=r"the log of 6 steps(.|\n)*no checkpoint for --resume"):
        run()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run() == 0, "a job that failed before its first checkpoint starts anew"


def test_checkpoints_keep_the_score_unit_they_were_trained_with():
    assert run("learned:0.5;block=16") == 0
    path = Path("run/checkpoint.pt")
    saved = torch.load(path, weights_only=True)
    assert saved["settings"]["pattern"] == "learned:0.5;block=16;score_unit=1"
    assert generate.load_model(path).config.adaptive.score_unit == 1
    # As written when the default was 4.
    torch.save(saved | {"settings": saved["settings"] | {"pattern": "learned:0.5;block=16"}}, path)
    assert generate.load_model(path).config.adaptive.score_unit == 4
    with pytest.raises(ValueError, match=r"pattern 'learned:0.5;block=16;score_unit=4' \(now '.*score_unit=1'\)"):
        run("learned:0.5;block=16", "--steps", "8", "--resume")
    assert run("learned:0.5;block=16;score_unit=4", "--steps", "8", "--resume") == 0


def test_learned_attention_trains_resumes_and_generates(capsys: pytest.CaptureFixture[str]):
    learned = ("learned:0.5;block=16", "--steps", "10", "--save-every", "5", "--accumulate", "2")
    assert run(*learned) == 0
    assert losses("run")[-1] < losses("run")[0]
    assert stop_after(7, *learned, out="part") == 130
    assert run(*learned, "--resume", out="part") == 0
    assert losses("part") == losses("run")
    saved = torch.load("run/checkpoint.pt", weights_only=True)
    model = train.TrainSettings(pattern=learned[0], steps=10, accumulate=2).model()
    assert model.adaptive is not None and model.adaptive_block_size == 16
    # A fifth of the steps is dense, counted in micro-batches.
    assert model.adaptive.dense_steps == 4
    steps = [value for name, value in saved["model"].items() if name.endswith("training_steps")]
    assert [int(x) for x in steps] == [20, 20]
    for more in ([], ["--temperature", "0"]):
        assert generate.main(["run", "--prompt", "3 squared", "-n", "8", "--device", "cpu", *more]) == 0
    Path("notes.txt").write_text("3 squared is 9. " * 8)
    capsys.readouterr()
    for where in ("run", "run/checkpoint.pt"):
        assert show.main(["--learned", where, "--input", "notes.txt", "--layer", "1"]) == 0
        title, *rows = capsys.readouterr().out.splitlines()
        assert "layers.1.self_attn) on bytes of notes.txt" in title and len(rows) == 8


def test_ruined_weights_are_not_saved():
    with pytest.raises(ValueError, match="must stay finite"):
        run("--steps", "1", "--lr", "1e30")
    assert not Path("run", "checkpoint.pt").exists()
