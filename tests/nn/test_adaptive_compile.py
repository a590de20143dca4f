"""Learned attention under `torch.compile`: one graph in evaluation and in training, and what breaks it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive

pytestmark = [
    pytest.mark.compile,
    # torch's own, where it traces autograd functions and where inductor is imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TEXT = "learned:0.25;block=16;score_unit=4;hidden_dim=8;sink_blocks=0;local_blocks=1"


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch.compiler.reset()


def models() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 32, 0.0, batch_first=True), 2)
    sizes = {"d_model": 32, "nhead": 4, "num_kv_heads": 2, "dim_feedforward": 32, "num_decoder_layers": 2}
    found = {
        "torch": (encoder, torch.randn(2, 120, 32)),
        "longnet": (dap.LongNetLM(**sizes, patterns=["full"]), torch.randint(256, (2, 120))),
    }
    for name, (model, _) in found.items():
        dap.replace_attention(model, TEXT + (";select=group" if name == "longnet" else ""))
    return found


@pytest.mark.parametrize("name", ["torch", "longnet"])
def test_evaluation_is_one_graph(name):
    model, x = models()[name]
    model.eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-6)
        # Another length, and other settings of the layer.
        assert torch.allclose(compiled(x[:, :75]), model(x[:, :75]), atol=1e-6)
        before = model(x)
        for module in model.modules():
            if isinstance(module, BlockSparseAdaptive):
                module.config = AdaptiveConfig(base_sparsity=0.0, hidden_dim=8)
        assert torch.allclose(compiled(x), model(x), atol=1e-6) and not torch.allclose(before, model(x), atol=1e-3)


@pytest.mark.parametrize("train", [False, True])
def test_models_run_on_the_meta_device(train):
    for model, x in models().values():
        output = model.train(train).to("meta")(x.to("meta"))
        assert output.is_meta and output.shape[:2] == x.shape[:2]
        output.sum().backward()


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_runs_and_trains(strict):
    eager, x = models()["longnet"]
    model = copy.deepcopy(eager)
    program = torch.export.export(model, (x,), strict=strict).module()
    for each in (program, eager):
        torch.manual_seed(3)
        each(x).square().mean().backward()
    for name, parameter in program.named_parameters():
        assert torch.allclose(parameter.grad, eager.get_parameter(name).grad, atol=1e-6), name


@pytest.mark.parametrize(("name", "backend"), [("torch", "inductor"), ("longnet", "aot_eager")])
def test_training_is_one_graph_with_equal_gradients(name, backend):
    eager, x = models()[name]
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for each in (eager, compiled):
        torch.manual_seed(3)
        each(x).square().mean().backward()
    for (entry, one), other in zip(eager.named_parameters(), model.parameters(), strict=True):
        assert one.grad is not None and torch.allclose(one.grad, other.grad, atol=1e-5, rtol=1e-3), entry
    assert any(parameter.grad.abs().max() > 0 for parameter in dap.scorer_parameters(model))


def test_padding_and_frozen_scorers_compile():
    torch.manual_seed(0)
    config = AdaptiveConfig(base_sparsity=0.7, score_unit=4, hidden_dim=8, score_gradient="none")
    layer = BlockSparseAdaptive([1], [1], 4, 8, config, block_size=16).double()
    padding = torch.arange(100) >= torch.tensor([[100], [70]])
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        given = [
            x.requires_grad_() for x in torch.randn(3, 2, 100, 4, 8, dtype=torch.float64, generator=gen()).unbind()
        ]
        output = run(*given, True, key_padding_mask=padding)
        results.append([output, *torch.autograd.grad(output[~padding].square().sum(), given)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def gen() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    "config", [{"exploration": True}, {"dropout": 0.1}, {"dense_steps": 2}, {"score_gradient": "straight_through"}]
)
def test_training_settings_that_break_the_graph(config):
    layer = BlockSparseAdaptive([1], [1], 2, 8, AdaptiveConfig(hidden_dim=8, **config), block_size=16)
    given = torch.randn(3, 1, 64, 2, 8).unbind()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(*given, True)
    assert torch.compile(layer, backend="aot_eager")(*given, True).shape == (1, 64, 2, 8)
    if "score_gradient" not in config:
        with torch.no_grad():
            assert torch.compile(layer.eval(), fullgraph=True, backend="aot_eager")(*given, True).shape == (1, 64, 2, 8)
