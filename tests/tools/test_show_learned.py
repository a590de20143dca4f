"""`dap show --learned`: a checkpoint with adaptive layers becomes a map of what a head keeps."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from dilated_attention_pytorch.models import load_adaptive, save_adaptive, write_state
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive, MultiheadBlockSparseAdaptive, Rotary
from dilated_attention_pytorch.tools import cli

CONFIG = AdaptiveConfig(base_sparsity=0.6, score_unit=4, sink_blocks=0, local_blocks=1)


class Model(nn.Module):
    """Two layers behind an embedding of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.first = MultiheadBlockSparseAdaptive(
            32, 4, [256], [1], 0.0, True, CONFIG, block_size=16, num_kv_heads=2, position=Rotary(base=500.0)
        )
        self.second = BlockSparseAdaptive([256], [1], 2, 16, CONFIG, block_size=32)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Model().eval()
    for ending in ("pt", "safetensors"):
        save_adaptive(model, tmp_path / f"model.{ending}", is_causal=True)
    save_adaptive(model.second, tmp_path / "core.pt", is_causal=False)
    torch.save({"model": model.state_dict()}, tmp_path / "bare.pt")
    write_state({"query": torch.randn(100, 2, 16), "key": torch.randn(1, 100, 1, 16)}, tmp_path / "heads.pt")
    write_state({"hidden": torch.randn(3, 90, 32)}, tmp_path / "hidden.safetensors")
    (tmp_path / "notes.txt").write_bytes(bytes(range(256)))
    (tmp_path / "empty.txt").write_bytes(b"")
    torch.save(model, tmp_path / "code.pt")
    return tmp_path


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]):
    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(["show", *words])
        return (left.value.code or 0, *capsys.readouterr())

    return run


def test_the_command_draws_a_checkpoint(saved: Path):
    words = ["--learned", "model.pt", "--input", "notes.txt", "--head", "3", "-n", "160"]
    found = subprocess.run(
        [sys.executable, "-m", "dilated_attention_pytorch", "show", *words],
        cwd=saved,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    title, *rows = found.stdout.splitlines()
    assert title.startswith("model.pt layer 0 (first) on bytes of notes.txt through embed.weight")
    assert "head 3, a cell is 16 x 16 tokens" in title
    assert len(rows) == 10 and all(set(row[i + 1 :]) <= {"."} and row[i] == "+" for i, row in enumerate(rows))


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_cells_are_what_the_module_keeps(saved: Path, here, ending: str):
    status, stdout, stderr = here(
        "--learned", f"{saved}/model.{ending}", "--input", f"{saved}/hidden.safetensors", "--head", "2", "--json"
    )
    assert status == 0, stderr
    (drawn,) = json.loads(stdout)["maps"]
    torch.manual_seed(0)
    model = Model().eval()
    hidden = load_hidden(saved)
    allowed = model.first(hidden, is_causal=True, return_pattern=True)[1].selection.allowed()[0, 2]
    token = torch.arange(90)
    kept = allowed[:, token // 16] & (token <= token[:, None])
    assert drawn["n"] == 90 and drawn["cell"] == 16
    for i, j in ((0, 0), (5, 1), (5, 5), (3, 2), (2, 4)):
        wanted = kept[16 * i : 16 * i + 16, 16 * j : 16 * j + 16].double().mean()
        assert drawn["share"][i][j] == pytest.approx(float(wanted))


def test_heads_of_a_list_have_one_map(tmp_path: Path, here):
    shared = replace(CONFIG, select="group")
    layers = [
        MultiheadBlockSparseAdaptive(32, 4, [256], [1], adaptive_config=shared, block_size=16, num_kv_heads=2),
        BlockSparseAdaptive([256], [1], 8, 8, replace(shared, group_size=2), block_size=16, num_kv_heads=2),
        BlockSparseAdaptive([256], [1], 4, 8, replace(CONFIG, select="all"), block_size=16, num_kv_heads=2),
    ]
    save_adaptive(nn.Sequential(*layers), tmp_path / "model.pt", is_causal=True)
    loaded, _ = load_adaptive(tmp_path / "model.pt")
    inputs = [(torch.randn(1, 90, 32),), *([torch.randn(1, 90, heads, 8) for heads in (8, 2, 2)],)]
    inputs.append([torch.randn(1, 90, heads, 8) for heads in (4, 2, 2)])
    for layer, again, given in zip(layers, loaded, inputs, strict=True):
        found, wanted = (x.eval()(*given, is_causal=True) for x in (again.module, layer))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True) if a is not None)
    for layer, groups in ((0, ((0, 1), (2, 3))), (1, ((0, 1), (6, 7))), (2, ((0, 3),))):
        maps = {}
        for head in {head for group in groups for head in group}:
            words = ("--learned", f"{tmp_path}/model.pt", "--layer", str(layer), "--head", str(head), "--json")
            maps[head] = json.loads(here(*words)[1])["maps"][0]["share"]
        assert all(maps[a] == maps[b] for a, b in groups)
        assert len(groups) == 1 or maps[groups[0][0]] != maps[groups[1][0]]


def load_hidden(saved: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(saved / "hidden.safetensors")["hidden"][:1]


def test_blocks_are_joined_where_cells_are_few(saved: Path, here):
    words = ("--learned", f"{saved}/core.pt", "-n", "300", "--json")
    fine, coarse = (json.loads(here(*words, "--width", width)[1])["maps"][0] for width in ("10", "5"))
    assert (fine["cell"], coarse["cell"]) == (32, 64)
    share = torch.tensor(fine["share"], dtype=torch.float64)
    assert share.unique().tolist() == [0.0, 1.0]
    assert coarse["share"][1][2] == share[2:4, 4:6].mean()
    assert "synthetic normal queries and keys" in fine["title"]


def test_embeddings_without_a_name_are_found(saved: Path, here):
    """The model of docs/adaptive.md: an embedding and adaptive layers in a Sequential."""
    layers = (MultiheadBlockSparseAdaptive(32, 4, [256], [1], adaptive_config=CONFIG, block_size=16) for _ in range(2))
    save_adaptive(nn.Sequential(nn.Embedding(256, 32), *layers), saved / "plain.pt", is_causal=True)
    status, stdout, stderr = here("--learned", f"{saved}/plain.pt", "--input", f"{saved}/notes.txt", "--head", "2")
    assert status == 0 and "bytes of notes.txt through 0.weight" in stdout, stderr


@pytest.mark.parametrize("kind", ["txt", "svg", "png", "html"])
def test_every_kind_is_written(saved: Path, here, kind: str):
    if kind == "png":
        pytest.importorskip("matplotlib")
    out = saved / f"map.{kind}"
    words = ("--learned", f"{saved}/model.pt", "--layer", "1", "--input", f"{saved}/heads.pt", "--beside", "causal")
    assert here(*words, "-o", str(out))[0] == 0
    assert out.stat().st_size > 500
    if kind == "svg":
        assert "model.pt layer 1 (second)" in ElementTree.parse(out).find(".//{*}title").text
    if kind == "html":
        page = out.read_text()
        assert (
            "query and key of heads.pt" in page
            and "<svg" in page
            and "http" not in page.replace("http://www.w3.org/2000/svg", "")
        )


def test_settings_may_be_told(saved: Path, here):
    told = json.dumps(
        {**asdict(CONFIG), "block_size": 16, "is_causal": True, "position": {"kind": "rotary", "base": 500.0}}
    )
    words = ("--input", f"{saved}/hidden.safetensors", "--json")
    wanted = json.loads(here("--learned", f"{saved}/model.pt", *words)[1])["maps"][0]["share"]
    assert (
        json.loads(here("--learned", f"{saved}/bare.pt", "--settings", told, *words)[1])["maps"][0]["share"] == wanted
    )


def test_a_layer_is_built_as_it_was(saved: Path):
    torch.manual_seed(0)
    model = Model().eval()
    layers, state = load_adaptive(saved / "model.safetensors")
    assert [layer.name for layer in layers] == ["first", "second"] and "embed.weight" in state
    x = torch.randn(1, 70, 32)
    assert torch.equal(layers[0].module(x, is_causal=True)[0], model.first(x, is_causal=True)[0])
    assert layers[1].module.config == CONFIG and layers[1].is_causal
    with pytest.raises(ValueError, match="must hold an adaptive layer"):
        save_adaptive(nn.Linear(2, 2), saved / "other.pt", is_causal=True)


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_scales_norms_layouts_and_steps_are_stored(tmp_path: Path, ending: str):
    config, path = replace(CONFIG, dense_steps=3), tmp_path / f"model.{ending}"
    core = BlockSparseAdaptive([64], [1], 2, 8, config, block_size=16, softmax_scale=1.0)
    around = {"block_size": 16, "layer_norm_eps": 0.5, "batch_first": False, "layer_norm": True}
    whole = MultiheadBlockSparseAdaptive(32, 4, [64], [1], adaptive_config=config, **around)
    core.training_steps.fill_(2)
    for model, given in ((core, torch.randn(3, 1, 70, 2, 8).unbind()), (whole, torch.randn(3, 70, 1, 32).unbind())):
        save_adaptive(model, path, is_causal=True)
        ((_, found, _),), _ = load_adaptive(path)
        pairs = zip(found.state_dict().values(), model.state_dict().values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        outputs = found(*given, is_causal=True), model.eval()(*given, is_causal=True)
        one, other = (x[0] if isinstance(x, tuple) else x for x in outputs)
        assert torch.equal(one, other)
    facts = {"block_size": 16, "softmax_scale": "warm", **asdict(config)}
    with pytest.raises(TypeError, match="softmax_scale of an adaptive layer must be a number"):
        write_state(core.state_dict(), path)
        load_adaptive(path, facts)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "either a pattern or --learned must be given, got neither"),
        (["-p", "causal", "--learned", "core.pt"], "got both"),
        (["-p", "causal", "--layer", "1"], "--layer must come with --learned"),
        (["--learned", "core.pt", "--heads", "2"], "--heads must come with a pattern"),
        (["--learned", "nowhere.pt"], "must be a file"),
        (["--learned", "notes.txt"], "whole torch file"),
        (["--learned", "code.pt"], "tensors alone"),
        (["--learned", "heads.pt"], "must hold an adaptive layer"),
        (["--learned", "bare.pt"], "must contain the settings"),
        (["--learned", "bare.pt", "--settings", "{"], "settings must be JSON"),
        (["--learned", "bare.pt", "--settings", "[]"], "JSON object"),
        (["--learned", "bare.pt", "--settings", '{"warmth": 1}'], "warmth"),
        (["--learned", "bare.pt", "--settings", '{"k_min": 3}'], "no block_size"),
        (["--learned", "bare.pt", "--settings", '{"block_size": 16, "hidden_dim": 8}'], "must be those of its tensors"),
        (["--learned", "core.pt", "--settings", '{"block_size": 16}'], "given once"),
        (["--learned", "model.pt", "--layer", "2"], "layer must be one of 0 (first), 1 (second)"),
        (["--learned", "model.pt", "--head", "4"], "head must lie in 0 .. 3"),
        (["--learned", "model.pt", "--input", "nowhere"], "input must be a file"),
        (["--learned", "model.pt", "--input", "empty.txt"], "must have at least one byte"),
        (["--learned", "model.pt", "--input", "heads.pt"], "must hold hidden"),
        (["--learned", "model.pt", "--input", "notes.txt", "-n", "300"], "tokens must be <= the 256"),
        (["--learned", "model.pt", "--layer", "1", "--input", "hidden.safetensors"], "must hold query and key"),
        (["--learned", "core.pt", "--input", "notes.txt"], "layer with projections"),
    ],
)
def test_wrong_use_is_explained(saved: Path, here, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str):
    monkeypatch.chdir(saved)
    status, _, stderr = here(*words)
    assert status == 2 and told in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("setting", [{"hidden_dim": 2**40}, {"num_layers": 10**9}, {"match_rank": 2**40}])
def test_sizes_that_settings_only_claim_are_not_built(tmp_path: Path, setting: dict[str, int]):
    """A file of kilobytes whose settings ask for terabytes is refused by its shapes."""
    core = BlockSparseAdaptive([64], [1], 2, 8, block_size=16)
    save_adaptive(core, tmp_path / "core.pt", is_causal=True)
    held = torch.load(tmp_path / "core.pt", weights_only=True)
    held["adaptive"][""] |= setting
    torch.save(held, tmp_path / "core.pt")
    with pytest.raises(ValueError, match="must be those of its tensors"):
        load_adaptive(tmp_path / "core.pt")
