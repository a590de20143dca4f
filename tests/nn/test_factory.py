"""Factories, presets, the choice between dense and sparse, older names."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from torch import nn

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import compat
from dilated_attention_pytorch.nn import calibration as tuning
from dilated_attention_pytorch.nn import factory
from dilated_attention_pytorch.nn.calibration import CostModel, cost_model


@pytest.fixture(autouse=True)
def costs_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DAP_CALIBRATE", "0")


def attend(module, n=200):
    if hasattr(module, "out_proj"):
        x = torch.randn(1, n, module.embed_dim)
        output, weights = module(x, x, x)
        assert weights is None and output.shape == x.shape
    else:
        output = module(*torch.randn(3, 1, n, 4, 16).unbind())
        assert output.shape == (1, n, 4, 16)
    assert output.isfinite().all()
    return output


@pytest.mark.parametrize(
    ("make", "arguments", "kind"),
    [
        (dap.create_block_sparse_attention, {}, "BlockSparseRingDilatedAttention"),
        (
            dap.create_block_sparse_attention,
            {"embed_dim": 64, "num_heads": 4},
            "BlockSparseRingMultiheadDilatedAttention",
        ),
        (dap.create_block_sparse_attention, {"variant": "hierarchical"}, "BlockSparseHierarchical"),
        (dap.create_dilated_attention, {}, "DilatedAttention"),
        (dap.create_dilated_attention, {"kind": "ring", "segment_lengths": [64]}, "RingDilatedAttention"),
        (dap.create_dilated_attention, {"kind": "block_sparse"}, "BlockSparseRingDilatedAttention"),
        (dap.create_dilated_attention, {"kind": "dense"}, "SparseAttention"),
        (dap.create_multihead_dilated_attention, {"embed_dim": 64, "num_heads": 4}, "MultiheadDilatedAttention"),
        (
            dap.create_multihead_dilated_attention,
            {"kind": "ring", "embed_dim": 64, "num_heads": 4},
            "RingMultiheadDilatedAttention",
        ),
        (
            dap.create_multihead_dilated_attention,
            {"kind": "dense", "embed_dim": 64, "num_heads": 4},
            "MultiheadSparseAttention",
        ),
    ],
)
def test_factories_make_what_they_say(make, arguments, kind):
    module = make(**arguments)
    assert type(module).__name__ == kind
    attend(module)


def test_defaults_of_a_multihead_module():
    module = dap.create_block_sparse_attention("multihead")
    assert (module.embed_dim, module.num_heads) == (768, 12)
    assert module.segment_lengths == (2048, 4096, 8192) and module.dilation_rates == (1, 2, 4)
    assert sum(p.numel() for p in module.parameters()) == 4 * (768 * 768 + 768)


@pytest.mark.parametrize("name", [name for name in factory.PRESETS if name != "adaptive_standard"])
def test_presets_keep_what_they_promise(name, capsys):
    module = dap.get_block_sparse_preset(name)
    for n in (8192, 16384, 20000):
        density = module.plan(n, 1).density
        with capsys.disabled():
            print(f"\n{name:>22} {n:>6} tokens: {100 * density:.3f} % kept", end="")
        assert density <= {"ultra_sparse": 0.01, "hierarchical_standard": 0.16}.get(name, 0.13)
    attend(module)


@pytest.mark.parametrize("blocks", range(100, 700, 13))
def test_ultra_sparse_stays_below_one_percent_at_any_length(blocks):
    assert dap.get_block_sparse_preset("ultra_sparse").pattern.resolve(64 * blocks, 1).budget <= 0.01 * blocks


def test_a_preset_can_be_overridden():
    module = dap.get_block_sparse_preset("local", sparsity_ratio=0.5, block_size=16)
    assert module.plan(1600, 1).density == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dap.create_block_sparse_attention("fast"), "one of auto, base"),
        (lambda: dap.create_block_sparse_attention("base", sparsity=0.1), "unexpected keyword"),
        (lambda: dap.create_block_sparse_attention("base", embed_dim=64), 'variant="multihead"'),
        (lambda: dap.create_block_sparse_attention("base", length=64), 'variant="auto"'),
        (lambda: dap.create_block_sparse_attention("hierarchical", sparsity_ratio=0.1), "by its levels"),
        (lambda: dap.create_block_sparse_attention(adaptive_config=1, embed_dim=3), 'variant="multihead"'),
        (lambda: dap.create_multihead_block_sparse(64, 4, heads=3), "unexpected keyword"),
        (lambda: dap.get_block_sparse_preset("tiny"), "one of local"),
        (lambda: dap.get_block_sparse_preset("local", windows=3), "unexpected keyword"),
        (lambda: dap.create_dilated_attention("fast"), "one of auto"),
        (lambda: dap.create_dilated_attention("dense", [64]), "without segments"),
        (lambda: dap.create_dilated_attention("ring", length=3), 'kind="auto"'),
        (lambda: dap.create_dilated_attention(segments=[3]), "unexpected keyword"),
        (lambda: dap.create_block_sparse_attention("multihead", embed_dim=0), "multiple of num_heads"),
        (lambda: dap.create_multihead_block_sparse(64, 0), "multiple of num_heads"),
    ],
)
@pytest.mark.untyped
def test_nothing_unknown_is_swallowed(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


COSTS = CostModel(dense_call=0.0, dense_tile=1.0, sparse_call=100.0, sparse_tile=1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: dap.create_block_sparse_attention(sparsity_ratio=0.1, length=n, softmax_scale=0.5),
        lambda n: dap.create_block_sparse_attention(sparsity_ratio=0.1, length=n, embed_dim=64, num_heads=8),
        lambda n: dap.create_dilated_attention("auto", [512, 4096], [1, 8], length=n, dropout=0.25, memory_budget=0.5),
        lambda n: dap.create_multihead_dilated_attention("auto", 64, 8, [512, 4096], [1, 8], length=n),
    ],
)
def test_auto_takes_dense_below_the_crossover_and_says_why(make, monkeypatch):
    monkeypatch.setattr(factory, "cost_model", lambda device: COSTS)
    short, long = make(256), make(16384)
    assert short.pattern == dap.Full() and long.pattern != dap.Full() and type(short) is type(long)
    assert "auto took dense" in short.explain(256) and "at 256 tokens" in short.explain(256)
    assert "measured on this machine" in long.explain(16384) and "auto took dense" not in long.explain(16384)
    attend(short)
    for name in ("softmax_scale", "attention_dropout", "memory_budget"):
        assert getattr(short, name, None) == getattr(long, name, None)


def test_auto_without_a_length_says_so():
    assert "no length was given" in dap.create_block_sparse_attention().explain(4096)
    assert "no length was given" in dap.create_dilated_attention().explain(4096)


def test_costs_are_measured_once_and_read_back(monkeypatch, tmp_path):
    measured = []

    def measure(device):
        measured.append(device)
        return COSTS

    monkeypatch.setenv("DAP_CALIBRATE", "1")
    monkeypatch.setattr(tuning, "measure", measure)
    assert cost_model() == cost_model() == COSTS
    assert len(measured) == 1
    path = tuning.cache_path()
    assert path.is_relative_to(tmp_path) and len(json.loads(path.read_text())) == 1
    path.write_text('{"half": ')
    assert cost_model() == COSTS and len(measured) == 2
    assert list(path.parent.iterdir()) == [path]


def test_costs_of_another_torch_release_are_not_used(monkeypatch):
    measured = []
    monkeypatch.setenv("DAP_CALIBRATE", "1")
    monkeypatch.setattr(tuning, "measure", lambda device: measured.append(torch.__version__) or COSTS)
    cost_model()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert tuning.stored_model() is None
    cost_model()
    assert len(measured) == 2 and len(tuning.stored_models()) == 2


def test_measuring_leaves_the_global_generator_alone(monkeypatch):
    monkeypatch.setenv("DAP_CALIBRATE", "1")
    monkeypatch.setattr(tuning, "_best", lambda call, device: call() is None or 1.0)
    before = torch.get_rng_state()
    module = dap.create_dilated_attention("auto", [16], [1], length=64)
    assert "measured on this machine" in module.reason
    assert torch.equal(torch.get_rng_state(), before)


def test_calibration_can_be_disabled_and_needs_no_home(monkeypatch, tmp_path):
    assert not cost_model().measured and not tuning.cache_path().exists()
    (tmp_path / "dilated_attention_pytorch").write_text("a file where the folder should be")
    monkeypatch.setenv("DAP_CALIBRATE", "1")
    monkeypatch.setattr(tuning, "measure", lambda device: COSTS)
    assert cost_model() == COSTS


def test_a_measurement_is_positive_and_quick():
    model = tuning.measure(torch.device("cpu"))
    assert model.measured and min(model.dense_tile, model.sparse_tile) > 0
    plan = dap.make_plan(dap.Full(), 1024, 4)
    assert model.dense(plan) > 0 and model.sparse(plan) > 0


@pytest.mark.parametrize("name", compat.OLDER_NAMES)
def test_an_older_name_is_the_present_class_and_says_so(name):
    present = compat.OLDER_NAMES[name]
    with pytest.warns(DeprecationWarning, match=f"{name} is now called {present}"):
        assert getattr(dap, name) is getattr(dap, present)


def test_other_names_of_the_same_object_and_unknown_ones():
    assert dap.ImprovedDilatedAttention is dap.DilatedAttention
    assert dap.ImprovedMultiheadDilatedAttention is dap.MultiheadDilatedAttention
    attend(dap.ImprovedDilatedAttention([64], [1], dropout=0.1))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = dap.Nothing
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec("from dilated_attention_pytorch import *", {})


def model_with_attention():
    return nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_replacing_every_attention_of_a_model():
    model = model_with_attention().eval()
    x = torch.randn(1, 20, 32)
    before = model(x, x)
    report = dap.replace_attention(model, "full")
    assert [(entry.name, entry.replaced) for entry in report] == [
        ("encoder.layers.0.self_attn", True),
        ("decoder.layers.0.self_attn", True),
        ("decoder.layers.0.multihead_attn", True),
    ]
    assert not any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    with torch.no_grad():
        assert torch.allclose(model(x, x), before, atol=1e-5)


def test_what_cannot_be_replaced_stays_and_says_why():
    model = nn.ModuleList([Doubled(8, 2), nn.MultiheadAttention(8, 2)])
    shared = nn.ModuleDict({"a": model, "b": model[1]})
    report = {entry.name: entry for entry in dap.replace_attention(shared, "window:3", position="rotary")}
    assert not report["a.0"].replaced and "Doubled has a forward" in report["a.0"].why
    assert isinstance(shared["a"][0], nn.MultiheadAttention)
    assert shared["a"][1] is shared["b"] and shared["b"].position is not None
    with pytest.raises(ValueError, match="from_torch"):
        dap.replace_attention(nn.MultiheadAttention(8, 2), "full")


class Doubled(nn.MultiheadAttention):
    """A subclass that computes something else."""

    def forward(self, *args, **options):
        output, weights = super().forward(*args, **options)
        return 2 * output, weights


class Named(nn.MultiheadAttention):
    """A subclass that computes the same."""


def test_subclasses_with_their_own_forward_are_left():
    patched = nn.MultiheadAttention(8, 2)
    patched.forward = lambda *args, **options: (args[0], None)
    model = nn.ModuleDict({"doubled": Doubled(8, 2), "named": Named(8, 2), "patched": patched})
    x = torch.randn(3, 1, 8)
    before = model["doubled"](x, x, x)[0]
    report = {entry.name: entry for entry in dap.replace_attention(model, "full")}
    assert {name: entry.replaced for name, entry in report.items()} == {
        "doubled": False,
        "named": True,
        "patched": False,
    }
    assert report["doubled"].why == "Doubled has a forward of its own"
    assert torch.equal(model["doubled"](x, x, x)[0], before)
    with pytest.raises(ValueError, match="Doubled has a forward of its own"):
        dap.MultiheadSparseAttention.from_torch(model["doubled"], "full")


def test_replaced_attention_stays_frozen():
    model = model_with_attention().requires_grad_(False)
    model.encoder.layers[0].self_attn.in_proj_weight.requires_grad_(True)
    dap.replace_attention(model, "window:3")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"encoder.layers.0.self_attn.{n}_proj.weight" for n in "qkv"}


@pytest.mark.parametrize(("pattern", "options"), [("windo:3", {}), ("window:3", {"position": "rotary"})])
def test_failed_replacement_leaves_the_model_unchanged(pattern, options):
    model = nn.ModuleList([nn.MultiheadAttention(12, 6), nn.MultiheadAttention(12, 4)])
    with pytest.raises(ValueError, match="must"):
        dap.replace_attention(model, pattern, **options)
    assert all(type(module) is nn.MultiheadAttention for module in model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_replaced_encoder_keeps_its_padding():
    """In eval mode nn.TransformerEncoder reads in_proj_weight and nests padded sequences, which no module here takes."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 30, 32), torch.arange(30) >= torch.tensor([30, 12])[:, None]
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            wanted = copy.deepcopy(model)(x, src_key_padding_mask=padding)[~padding]
            replaced = copy.deepcopy(model)
            dap.replace_attention(replaced, "full")
            assert torch.allclose(replaced(x, src_key_padding_mask=padding)[~padding], wanted, atol=1e-5)
