"""Files and names: round trips, strictness, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import BlockSparseAdaptive, MultiheadDilatedAttention
from dilated_attention_pytorch.models import (
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    LongNet,
    LongNetLM,
    SlideEncoder,
    checkpoints,
    export_state,
    from_transformer_encoder,
    load_checkpoint,
    load_slide_encoder,
    load_torchscale,
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


def test_sinks_are_this_librarys_alone():
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    ours = from_transformer_encoder(theirs, patterns=("full",), sink=True)
    assert all(torch.equal(own.self_attn.sink, torch.zeros(4)) for own in ours.encoder.layers)
    with pytest.raises(ValueError, match="must have no sinks, got encoder"):
        export_state(ours, "torch")
    changed(ours)
    fresh = from_transformer_encoder(theirs, patterns=("full",), sink=True)
    load_checkpoint(fresh, export_state(ours))
    assert torch.equal(fresh.encoder.layers[1].self_attn.sink, ours.encoder.layers[1].self_attn.sink)


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


def original_entries(line: str, lm: bool) -> dict[str, torch.Tensor]:
    """A state dict with the entries of an original LongNet, one encoder and two decoder layers wide as `SMALL`.

    Lines: "first" (fkodom, whose decoders have no norm in self-attention), "first releases" (where they have), and
    "second" (DarcStar, with norms of queries and keys). The names are those of the modules that the sources construct.
    """
    d, wide, tokens = 32, 48, 40
    shapes: dict[str, tuple[int, ...]] = {}

    def add(name: str, *shape: int) -> None:
        shapes.update({f"{name}.weight": shape, f"{name}.bias": shape[:1]})

    def attention(name: str, normed: bool) -> None:
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            add(f"{name}.{projection}", d, d)
        for norm in () if not normed else ("q_ln", "k_ln") if line == "second" else ("norm",):
            add(f"{name}.{norm}", d)

    at = "long_net." if lm else ""
    for side, count, norms in (("encoder", 1, (d, d, wide)), ("decoder", 2, (d, d, d, wide))):
        for number in range(count):
            layer = f"{at}{side}.layers.{number}"
            attention(f"{layer}.self_attn", side == "encoder" or line == "first releases")
            if side == "decoder":
                attention(f"{layer}.multihead_attn", True)
            for index, width in enumerate(norms, 1):
                add(f"{layer}.norm{index}", width)
            add(f"{layer}.linear1", wide, d)
            add(f"{layer}.linear2", d, wide)
    if lm:
        add("norm", d)
        add("out", tokens, d)
        shapes |= {"token_embedding.weight": (tokens, d), "pos_embedding.scale": (d // 2,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("lm", [False, True])
@pytest.mark.parametrize("line", ["first", "first releases", "second"])
def test_original_state_dicts_load(line: str, lm: bool):
    state = original_entries(line, lm)
    made = LongNetLM if lm else LongNet
    model = changed(
        made(num_tokens=40, num_encoder_layers=1, num_decoder_layers=2, tie_embeddings=False, position=None, **SMALL)
    )
    with pytest.warns(UserWarning, match="original LongNet is not reproduced") as caught:
        load_checkpoint(model, state, "original")
    assert [each.filename for each in caught] == [__file__]
    own = model.state_dict()
    lacking = 2 if lm else 4
    for name, tensor in state.items():
        ours = name if not lm or not name.startswith("norm.") else f"long_net.decoder.{name}"
        ours = ours.replace("q_ln", "norm")
        if "k_ln" in name or name == "pos_embedding.scale":
            assert ours not in own
        else:
            assert torch.equal(own.pop(ours), tensor), name
    left = 0 if line == "first releases" else 4
    assert len(own) == lacking + left, "norms that the original does not have"
    assert all(tensor.eq(name.endswith("weight")).all() for name, tensor in own.items())
    del state[f"{'long_net.' * lm}encoder.layers.0.linear1.bias"]
    with pytest.raises(ValueError, match="1 missing"), pytest.warns(UserWarning):
        load_checkpoint(model, state, "original")


def test_original_layers_load_with_norms_of_queries_and_keys():
    whole = original_entries("second", False)
    state = {name.removeprefix("decoder.layers.0."): t for name, t in whole.items() if "decoder.layers.0." in name}
    layer = DilatedTransformerDecoderLayer(32, 4, [8, 32], [1, 2], 48)
    with pytest.warns(UserWarning, match="2 entries of norms of keys are left out, and 2 entries of norms"):
        load_checkpoint(layer, state, "original")
    assert torch.equal(layer.multihead_attn.norm.weight, state["multihead_attn.q_ln.weight"])
    encoder = {name.removeprefix("encoder.layers.0."): t for name, t in whole.items() if name.startswith("encoder")}
    del encoder["self_attn.q_ln.weight"]
    with pytest.raises(ValueError, match=r"1 missing: self_attn\.norm\.weight"), pytest.warns(UserWarning):
        load_checkpoint(DilatedTransformerEncoderLayer(32, 4, [8, 32], [1, 2], 48), encoder, "original")


TORCHSCALE = {"nhead": 4, "segment_lengths": [8, 32], "dilation_rates": [1, 2]}


def test_slide_encoders_of_other_sizes_need_the_number_of_heads():
    model = MODELS["slide"]()
    state = export_state(model, "torchscale")
    with pytest.raises(ValueError, match=r"nhead must be given[^$]*nhead=\.\.\."):
        load_slide_encoder(state)
    sizes = {"slide_size": model.config.slide_size, "segment_lengths": model.config.segment_lengths}
    assert load_slide_encoder(state, nhead=model.config.nhead, **sizes).config.nhead == model.config.nhead


@pytest.mark.parametrize("kind", ["decoder", "slide"])
def test_sizes_a_checkpoint_only_claims_are_not_built(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Kilobytes that ask for terabytes: refused before a parameter is made."""
    load = partial(load_torchscale, **TORCHSCALE) if kind == "decoder" else partial(load_slide_encoder, nhead=16)
    if kind == "decoder":
        good = export_state(LongNetLM(num_tokens=40, num_decoder_layers=1, position=None, **SMALL), "torchscale")
    else:
        good = export_state(MODELS["slide"](), "torchscale")
    for made in (LongNetLM, SlideEncoder):
        monkeypatch.setattr(made, "__init__", lambda *_, **__: pytest.fail("the model was built"))
    prefix = "" if kind == "decoder" else "encoder."
    wide = "embed_tokens.weight" if kind == "decoder" else "patch_embed.proj.weight"
    d = good[wide].shape[1] if kind == "decoder" else good[wide].shape[0]
    huge = torch.zeros(1).expand(2**33, d) if kind == "decoder" else torch.zeros(1).expand(d, 2**33)
    with pytest.raises(ValueError, match=r"layers must be numbered from .*, got \d up to 200000000"):
        load({**good, f"{prefix}layers.200000000.x": torch.zeros(1)})
    with pytest.raises(ValueError, match="tensors of a checkpoint must be stored whole, got expanded ones"):
        load({**good, wide: huge})
    sparse = torch.sparse_coo_tensor(torch.zeros(2, 0), torch.zeros(0), huge.shape, check_invariants=True)
    for empty in (huge.to("meta"), sparse):
        with pytest.raises(ValueError, match="must be dense and have values, got others"):
            load({**good, wide: empty})
    with pytest.raises(ValueError, match=r"a checkpoint for .* parameters must hold as many"):
        load({**good, f"{prefix}layers.0.ffn.fc1.weight": torch.zeros(1, 4096)})


def test_wrong_entries_are_listed_and_nothing_is_loaded():
    model = changed(MODELS["decoder"]())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = export_state(changed(MODELS["decoder"]()))
    del state["long_net.decoder.layers.1.linear1.bias"]
    state["extra.weight"] = torch.zeros(3)
    state["extra.in_proj_weight"] = torch.zeros(())
    state["long_net.decoder.norm.weight"] = torch.zeros(31)
    state["long_net.decoder.norm.bias"] = torch.zeros(32, dtype=torch.int64)
    with pytest.raises(ValueError, match="must hold what the model needs") as raised:
        load_checkpoint(model, state)
    for part in (
        "1 missing: long_net.decoder.layers.1.linear1.bias",
        "2 unexpected: extra.in_proj_weight, extra.weight",
        "long_net.decoder.norm.weight (31,) for (32,)",
        "1 of another kind: long_net.decoder.norm.bias torch.int64 for torch.float32",
        "Nothing was loaded",
    ):
        assert part in str(raised.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("left_out", ["out.weight", "token_embedding.weight"])
def test_either_name_of_tied_embeddings_suffices(left_out: str):
    model, again = (LongNetLM(num_tokens=40, num_decoder_layers=1, **SMALL) for _ in range(2))
    load_checkpoint(again, {name: x for name, x in model.state_dict().items() if name != left_out})
    assert torch.equal(again.out.weight, model.out.weight) and again.out.weight is again.token_embedding.weight


def test_tied_embeddings_must_be_equal():
    state = export_state(MODELS["decoder"]())
    state["out.weight"] = state["out.weight"] + 1
    with pytest.raises(ValueError, match="tied embeddings must be given equal embeddings"):
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


def test_loaded_steps_end_a_dense_start():
    settings = {"num_decoder_layers": 1, "num_tokens": 50, "d_model": 32, "nhead": 2, "dim_feedforward": 32}
    first, second = (LongNetLM(**settings, adaptive={"dense_steps": 3}) for _ in range(2))
    for _ in range(4):
        first.loss(torch.randint(50, (1, 300))).backward()
    load_checkpoint(second, first.state_dict())
    cores = [module for module in second.train().modules() if isinstance(module, BlockSparseAdaptive)]
    assert cores and not any(core.is_dense_start() for core in cores)


def test_a_model_without_memory_is_refused():
    state = MODELS["decoder"]().state_dict()
    with torch.device("meta"):
        model = MODELS["decoder"]()
    with pytest.raises(ValueError, match=r"(?s)must have memory for its weights.*to_empty"):
        load_checkpoint(model, state)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch_first": False}, "batch_first=True"),
        ({"activation": nn.GELU("tanh")}, "exact GELU"),
        ({"last": 0.1}, "one epsilon"),
    ],
)
def test_encoders_of_another_form_are_refused(change, reason):
    options = {"batch_first": True, **{name: x for name, x in change.items() if name != "last"}}
    layer = nn.TransformerEncoderLayer(32, 4, 48, **options)
    norm = nn.LayerNorm(32, eps=change["last"]) if "last" in change else None
    with pytest.raises(ValueError, match=reason):
        from_transformer_encoder(nn.TransformerEncoder(layer, 1, norm, enable_nested_tensor=False), patterns=("full",))
