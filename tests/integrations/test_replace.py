"""`replace_attention` in models of timm's structure and of Hugging Face, and its report."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import Pattern
from dilated_attention_pytorch.integrations.replace import FusedProjectionAttention


class Attention(nn.Module):
    """Stand-in for `timm.layers.Attention`, with the same submodules and forward.

    timm imports torchvision, which needs a build for the installed torch; `test_timm_models_keep_their_results` runs
    where both are installed.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        scale_norm: bool = False,
        gated: bool = False,
    ):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale, self.fused_attn = self.head_dim**-0.5, True
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(dim) if scale_norm else nn.Identity()
        self.gate = nn.Linear(dim, dim, bias=qkv_bias) if gated else None
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, n, width = x.shape
        gate = 1.0 if self.gate is None else self.gate(x).sigmoid()
        qkv = self.qkv(x).reshape(batch, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        dropout = self.attn_drop.p if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout)
        return self.proj_drop(self.proj(self.norm(x.transpose(1, 2).reshape(batch, n, width)) * gate))


class AttentionRope(Attention):
    """Attention with another argument, which is left."""

    def forward(self, x, rope=None, attn_mask=None):
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, attn: nn.Module):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(48), attn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.norm1(x))


def test_timm_models_keep_their_results():
    timm = pytest.importorskip("timm", reason="timm and torchvision are not installed", exc_type=ImportError)
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=64).double().eval()
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    before, names = model(x), model.state_dict().keys()
    report = dap.replace_attention(model, "full")
    assert len(report) == 12 and all(entry.replaced for entry in report)
    assert torch.allclose(model(x), before, atol=1e-12) and model.state_dict().keys() == names


@pytest.mark.parametrize("options", [{}, {"qkv_bias": False}, {"qk_norm": True}, {"scale_norm": True}, {"gated": True}])
def test_vision_transformers_keep_weights_and_results(options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(Attention(48, 4, **options)) for _ in range(2))).double().eval()
    x = torch.randn(2, 1 + 6 * 6, 48, dtype=torch.float64)
    before, names = model(x), model.state_dict().keys()
    report = dap.replace_attention(model, "full")
    assert [(entry.name, entry.replaced) for entry in report] == [("0.attn", True), ("1.attn", True)]
    assert torch.allclose(model(x), before, atol=1e-12) and model.state_dict().keys() == names

    pattern = dap.Grid((6, 6), 3, prefix=1)
    assert all(entry.replaced for entry in dap.replace_attention(model, pattern))
    token = torch.arange(37)
    dense = copy.deepcopy(model)
    for block in dense:
        attention = Attention(48, 4, **options).double().eval()
        attention.load_state_dict(block.attn.state_dict())
        mask = pattern.allows(token[:, None], token)
        block.attn = type("Masked", (nn.Module,), {"forward": lambda self, x, a=attention, m=mask: a(x, attn_mask=m)})()
    assert torch.allclose(model(x), dense(x), atol=1e-12)


def test_replaced_vision_transformers_train_and_explain():
    model = Block(Attention(48, 4)).train()
    dap.replace_attention(model, "window:5")
    model(torch.randn(2, 20, 48)).sum().backward()
    assert model.attn.qkv.weight.grad is not None and isinstance(model.attn, FusedProjectionAttention)
    assert "4 heads of 12" in model.attn.explain(100)
    with pytest.raises(ValueError, match=r"attn_mask must be None[^$]*Pattern.from_mask"):
        model.attn(torch.randn(1, 20, 48), attn_mask=torch.ones(20, 20, dtype=torch.bool))


class Unknown(nn.Module):
    pass


class LinearAttention(nn.Module):
    """Attention by its name, of no known structure."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 4), "none of the 1 modules of Linear is attention by its class or name"),
        (nn.ModuleDict({"a": LinearAttention()}), "a: LinearAttention is not known here; torch.nn.MultiheadAttention"),
        (Block(AttentionRope(48, 4)), "attn: AttentionRope also computes with rope"),
        (
            nn.ModuleDict({"a": dap.DilatedAttention([4], [1])}),
            "a: DilatedAttention is sparse attention of this library",
        ),
    ],
)
def test_nothing_replaced_is_a_warning_with_reasons(model, message):
    with pytest.warns(UserWarning, match=message):
        report = dap.replace_attention(model, "full")
    assert not any(entry.replaced for entry in report)


def test_modules_replaced_before_take_the_new_pattern():
    model = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    dap.replace_attention(model, "window:3")
    first = model.self_attn
    assert dap.replace_attention(model, "window:5")[0].replaced
    assert model.self_attn is first and first.pattern == dap.SlidingWindow(5)


def test_attention_inside_a_module_named_attention_is_found():
    class MyAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = nn.MultiheadAttention(8, 2)

    assert [entry.name for entry in dap.replace_attention(MyAttention(), "full")] == ["mha"]


def test_options_are_for_torch_attention_alone():
    model = nn.ModuleDict({"a": Attention(48, 4), "b": nn.MultiheadAttention(48, 4)})
    report = {entry.name: entry for entry in dap.replace_attention(model, "full", position="rotary")}
    assert report["b"].replaced and report["a"].why == "Attention takes no options, got position"


def test_an_attention_module_itself_is_refused():
    with pytest.raises(ValueError, match="model must contain attention"):
        dap.replace_attention(Attention(48, 4), "full")


def test_hugging_face_models_take_the_pattern():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        before = model(tokens).last_hidden_state
        (entry,) = dap.replace_attention(model, "full")
        assert entry.replaced and torch.allclose(model(tokens).last_hidden_state, before, atol=1e-5)
        holder = nn.ModuleDict({"encoder": model})
        (entry,) = dap.replace_attention(holder, "window:3")
        assert entry.name == "encoder" and not torch.allclose(model(tokens).last_hidden_state, before, atol=1e-3)


LEARNED = "learned:0.25;block=16;score_unit=4;hidden_dim=8"


def longnet(**changes) -> dap.LongNetLM:
    sizes = {"d_model": 32, "nhead": 4, "num_kv_heads": 2, "dim_feedforward": 32, "num_decoder_layers": 2}
    torch.manual_seed(0)
    return dap.LongNetLM(**{**sizes, "patterns": ["full"], **changes}).double().eval()


def cores_of(model: nn.Module) -> list[dap.BlockSparseAdaptive]:
    return [module for module in model.modules() if isinstance(module, dap.BlockSparseAdaptive)]


def learnable_models() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(2, 100, 48, dtype=torch.float64)
    torch_own = nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 48, batch_first=True), 2)
    timm_own = nn.Sequential(*(Block(Attention(48, 4, qk_norm=True, gated=True)) for _ in range(2)))
    return {
        "torch": (torch_own.double().eval(), x),
        "timm": (timm_own.double().eval(), x),
        "longnet": (longnet(), torch.randint(256, (2, 100))),
        "longnet encoder": (longnet(num_encoder_layers=2, num_decoder_layers=0), torch.randint(256, (2, 100))),
    }


@pytest.mark.parametrize("name", learnable_models())
def test_learned_attention_takes_over_weights_and_flags(name):
    model, x = learnable_models()[name]
    before = model(x)
    parameters = {entry: parameter for entry, parameter in model.named_parameters()}
    frozen = [entry for entry in parameters if entry.endswith(("out_proj.weight", "proj.weight"))]
    for entry in frozen:
        parameters[entry].requires_grad_(False)
    report = dap.replace_attention(model, "learned:1;block=16;hidden_dim=8")
    assert len(report) == 2 and all(entry.replaced for entry in report)
    assert torch.allclose(model(x), before, atol=1e-12), "all blocks are dense attention"
    for entry in frozen:
        assert not model.get_parameter(entry).requires_grad
    assert all(parameter.requires_grad for parameter in dap.scorer_parameters(model))
    assert len(dap.scorer_parameters(model)) == 2 * len(list(cores_of(model)[0].parameters()))

    scorer = cores_of(model)[0].scorer
    with torch.no_grad():
        scorer.log_temperature.fill_(0.25)
    dap.replace_attention(model, LEARNED)
    assert all(core.config.kept == 0.25 and core.config.score_unit == 4 for core in cores_of(model))
    assert cores_of(model)[0].scorer.log_temperature[0].item() == 0.25, "a scorer of the same sizes stays"
    assert not torch.allclose(model(x), before, atol=1e-3)
    model.train()
    model(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in dap.scorer_parameters(model))

    again, _ = learnable_models()[name]
    dap.replace_attention(again, LEARNED)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_learned_longnet_generates_as_it_computes():
    model = longnet()
    dap.replace_attention(model, LEARNED)
    prompt = torch.randint(256, (2, 70), generator=torch.Generator().manual_seed(0))
    generated = model.generate(prompt, 20)
    tokens = prompt
    for step in range(20):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        assert torch.equal(tokens[:, 70:], generated[:, : step + 1])


def test_names_choose_the_modules():
    model = longnet()
    first, second = (f"long_net.decoder.layers.{i}.self_attn" for i in range(2))
    assert [entry.name for entry in dap.replace_attention(model, {second: LEARNED})] == [second]
    assert len(cores_of(model)) == 1 and cores_of(model)[0] is model.get_submodule(second).core
    with pytest.raises(ValueError, match=rf"names must be those of attention modules, {first}, .*got other"):
        dap.replace_attention(model, {"other": LEARNED})


def test_learned_attention_says_what_it_leaves():
    model = nn.TransformerDecoderLayer(32, 4, batch_first=True)
    report = dap.replace_attention(model, LEARNED)
    assert [entry.replaced for entry in report] == [True, False] and "another sequence" in report[1].why
    kept = nn.ModuleDict(
        {
            "a": dap.MultiheadSparseAttention(32, 4, "window:4 & causal"),
            "b": nn.MultiheadAttention(32, 4, kdim=16),
            "c": nn.MultiheadAttention(32, 4, add_bias_kv=True),
            "d": LinearAttention(),
            "e": nn.MultiheadAttention(32, 4),
            "f": dap.MultiheadSparseAttention(32, 4, "full", sink=True),
            "g": dap.MultiheadSparseAttention(32, 4, "full", position="alibi"),
        }
    )
    reasons = {entry.name: entry.why for entry in dap.replace_attention(kept, LEARNED)}
    wanted = {"a": "is causal; learned", "b": "other widths", "c": "add_bias_kv", "d": "not known"}
    for name, reason in {**wanted, "f": "has no sink", "g": "has no ALiBi"}.items():
        assert reason in reasons[name], name
    assert isinstance(kept["e"], dap.MultiheadBlockSparseAdaptive) and isinstance(kept["a"].pattern, Pattern)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learned:2", r"fraction of blocks kept must lie in \(0, 1\], got 2"),
        ("learned:many", "fraction of blocks kept must lie in"),
        ("learned:0.1;blok=64", "options of learned attention must be among block, temperature"),
        ("learned:0.1;block=many", "block must be of type int, got 'many'"),
        ("learned:0.1;score_unit=0.5", "score_unit must be of type int"),
        ("learned:0.1;k_max=2.5", "k_max must be of type int"),
        ("learned:0.1;block=48", "block_size must be one of"),
        ("learned:0.1;k_min=0", "k_min must be >= 1, got 0"),
        ('learned:0.1;select="group"', "select must be one of head, group, all"),
    ],
)
def test_wrong_learned_text_leaves_the_model(text, message):
    model = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    with pytest.raises(ValueError, match=message):
        dap.replace_attention(model, text)
    assert type(model.self_attn) is nn.MultiheadAttention


def test_scorers_of_16_bit_models_have_32():
    model = nn.TransformerEncoderLayer(32, 4, batch_first=True).bfloat16()
    dap.replace_attention(model, LEARNED)
    model(torch.randn(1, 100, 32, dtype=torch.bfloat16)).sum().backward()
    for parameter in dap.scorer_parameters(model):
        assert parameter.dtype == torch.float32 and parameter.grad.isfinite().all()
