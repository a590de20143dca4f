"""Files and names: round trips, strictness, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import MultiheadDilatedAttention
from dilated_attention_pytorch.models import (
    DilatedTransformerEncoderLayer,
    LongNet,
    LongNetLM,
    SlideEncoder,
    checkpoints,
    export_state,
    from_transformer_encoder,
    load_checkpoint,
    read_state,
    write_state,
)

SMALL = {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "segment_lengths": (8, 32), "dilation_rates": (1, 2)}
MODELS = {
    "decoder": lambda: LongNetLM(num_tokens=40, num_decoder_layers=2, **SMALL),
    "untied": lambda: LongNetLM(num_tokens=40, num_decoder_layers=1, tie_embeddings=False, bias=False, **SMALL),
    "encoder": lambda: LongNet(num_encoder_layers=2, num_decoder_layers=0, **SMALL),
    "encoder-decoder": lambda: LongNetLM(num_tokens=40, num_encoder_layers=1, num_decoder_layers=1, **SMALL),
    "translator": lambda: LongNetLM(
        num_tokens=40, num_source_tokens=30, num_encoder_layers=1, num_decoder_layers=1, memory_norm=False, **SMALL
    ),
    "slide": lambda: SlideEncoder(tile_width=12, d_model=32, num_layers=2, nhead=4),
}
NAMES = [
    *((model, "own") for model in MODELS),
    *((model, "torchscale") for model in MODELS if model != "encoder-decoder"),
    ("decoder", "original"),
    ("encoder-decoder", "original"),
]


def changed(model: nn.Module) -> nn.Module:
    """The same model with other weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize(("kind", "names"), NAMES)
def test_what_is_written_is_read_back(tmp_path: Path, kind: str, names: str, ending: str):
    model, other = changed(MODELS[kind]()), changed(MODELS[kind]())
    path = tmp_path / "deep" / f"weights.{ending}"
    write_state(export_state(model, names), path)
    load_checkpoint(other, path, names)
    assert same(model, other)
    assert os.listdir(path.parent) == [path.name]


def test_a_file_in_a_trainers_wrapping(tmp_path: Path):
    model, other = changed(MODELS["slide"]()), MODELS["slide"]()
    torch.save({"epoch": 3, "model": model.state_dict()}, tmp_path / "slide_encoder.pth")
    load_checkpoint(other, tmp_path / "slide_encoder.pth")
    assert same(model, other)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_torchs_encoder_comes_over_with_its_numbers(norm_first: bool, final: bool):
    layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, "gelu", batch_first=True, norm_first=norm_first)
    theirs = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32) if final else None, enable_nested_tensor=False)
    changed_theirs = theirs.double().train()
    ours = from_transformer_encoder(changed_theirs, patterns=("full",))
    x = torch.randn(2, 21, 32, dtype=torch.float64)
    mask = torch.arange(21) >= torch.tensor([[21], [15]])
    assert torch.allclose(ours(x), theirs(x), atol=1e-10)
    assert torch.allclose(ours(x, key_padding_mask=mask)[1, :15], theirs(x, src_key_padding_mask=mask)[1, :15])
    back = export_state(ours, "torch")
    assert set(back) == set(theirs.state_dict())
    theirs.load_state_dict(back)


def test_the_originals_modules_come_over():
    module = MultiheadDilatedAttention(32, 4, [8, 32], [1, 2])
    state = changed(MultiheadDilatedAttention(32, 4, [8, 32], [1, 2])).state_dict()
    load_checkpoint(module, state, "original")
    assert torch.equal(module.q_proj.weight, state["q_proj.weight"])
    fused = {name: tensor for name, tensor in state.items() if name[1:6] != "_proj"}
    for kind in ("weight", "bias"):
        fused[f"qkv_proj.{kind}"] = torch.cat([2 * state[f"{n}_proj.{kind}"] for n in "qkv"])
    load_checkpoint(module, fused, "original")
    assert torch.equal(module.v_proj.bias, 2 * state["v_proj.bias"])
    layer = DilatedTransformerEncoderLayer(32, 4, [8, 32], [1, 2], 48)
    load_checkpoint(layer, changed(DilatedTransformerEncoderLayer(32, 4, [8, 32], [1, 2], 48)).state_dict(), "original")


def test_the_originals_language_model_comes_over():
    """Its encoder has no last norm, and its positions are constants; the rest is there by name."""
    model = LongNetLM(num_tokens=40, num_encoder_layers=1, num_decoder_layers=1, tie_embeddings=False, **SMALL)
    state = export_state(changed(model), "original")
    state = {name: tensor for name, tensor in state.items() if "encoder.norm" not in name}
    state["pos_embedding.scale"] = torch.zeros(16)
    assert "norm.weight" in state and "long_net.encoder.layers.0.norm3.weight" in state
    load_checkpoint(model, state, "original")
    assert model.long_net.encoder.norm.weight.eq(1).all() and model.long_net.encoder.norm.bias.eq(0).all()


def test_wrong_entries_are_listed_and_nothing_is_loaded():
    model = changed(MODELS["decoder"]())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = export_state(changed(MODELS["decoder"]()))
    del state["long_net.decoder.layers.1.linear1.bias"]
    state["extra.weight"] = torch.zeros(3)
    state["long_net.decoder.norm.weight"] = torch.zeros(31)
    state["long_net.decoder.norm.bias"] = torch.zeros(32, dtype=torch.int64)
    with pytest.raises(ValueError, match="must hold what the model needs") as raised:
        load_checkpoint(model, state)
    for part in (
        "1 missing: long_net.decoder.layers.1.linear1.bias",
        "1 unexpected: extra.weight",
        "long_net.decoder.norm.weight (31,) for (32,)",
        "1 not floating: long_net.decoder.norm.bias",
        "Nothing was loaded",
    ):
        assert part in str(raised.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_tied_embeddings_must_be_equal():
    state = export_state(MODELS["decoder"]())
    load_checkpoint(MODELS["decoder"](), {name: t for name, t in state.items() if name != "out.weight"})
    state["out.weight"] = state["out.weight"] + 1
    with pytest.raises(ValueError, match="tied embeddings must be given equal ones"):
        load_checkpoint(MODELS["decoder"](), state)


class Malicious:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("harm", ["cut", "head", "flipped", "empty", "text"])
def test_damaged_files_are_refused(tmp_path: Path, ending: str, harm: str):
    path = tmp_path / f"weights.{ending}"
    write_state(export_state(MODELS["decoder"]()), path)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "head": whole[:5],
            "flipped": b"\xff" * 64 + whole[64:],
            "empty": b"",
            "text": b"not a checkpoint",
        }[harm]
    )
    model = MODELS["decoder"]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="a checkpoint must be a whole"):
        load_checkpoint(model, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_files_that_run_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"weight": torch.zeros(3)}, "hook": Malicious()}, tmp_path / "zip.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps({"weight": Malicious()}))
    for name in ("zip.pt", "bare.pt"):
        with pytest.raises(ValueError, match="of tensors alone"):
            read_state(tmp_path / name)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("content", [[1, 2], {}, {"weight": 3}, {"weight": torch.zeros(2), "epoch": 3}])
def test_files_that_hold_something_else_are_refused(tmp_path: Path, content: object):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises((ValueError, TypeError), match="a checkpoint must hold"):
        read_state(tmp_path / "other.pt")


def test_a_safetensors_header_that_lies(tmp_path: Path):
    header = json.dumps({"weight": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}).encode()
    (tmp_path / "lies.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        read_state(tmp_path / "lies.safetensors")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "weights.pt"
    write_state({"weight": torch.ones(3)}, path)

    def fail(temporary: str) -> None:
        Path(temporary).write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.write_whole(path, fail)
    assert torch.equal(read_state(path)["weight"], torch.ones(3))
    assert os.listdir(tmp_path) == ["weights.pt"]


def test_a_full_disk_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoints, "write_whole", lambda place, write: write("/dev/full"))
    with pytest.raises(OSError, match=r"No space left on device: .*weights\.pt"):
        write_state({"weight": torch.ones(30_000)}, tmp_path / "weights.pt")


def test_missing_files_and_unknown_names():
    with pytest.raises(ValueError, match="a checkpoint must be a file"):
        read_state("nowhere.pt")
    with pytest.raises(ValueError, match="names must be one of own, torchscale"):
        load_checkpoint(MODELS["decoder"](), {"weight": torch.zeros(1)}, "keras")
    with pytest.raises(TypeError, match="encoder must have"):
        from_transformer_encoder(
            nn.TransformerEncoder(DilatedTransformerEncoderLayer(32, 4, "full"), 1, enable_nested_tensor=False)
        )
