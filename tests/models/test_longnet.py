"""LongNet: shapes, gradients, causality through the whole model, decoding, memory of the loss."""

from __future__ import annotations

import json
import math

import pytest
import torch
from live_memory import LiveMemory
from oracle import dense_attention, error, multiplicities
from torch import nn

from dilated_attention_pytorch import Dilated, KVCache, SlidingWindow, Xpos
from dilated_attention_pytorch.models import (
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    LongNet,
    LongNetConfig,
    LongNetLM,
    longnet,
)

SMALL = {
    "num_tokens": 40,
    "d_model": 32,
    "nhead": 4,
    "num_decoder_layers": 2,
    "dim_feedforward": 48,
    "segment_lengths": (8, 32),
    "dilation_rates": (1, 2),
}
FORMS = {
    "decoder": {},
    "encoder": {"num_encoder_layers": 2, "num_decoder_layers": 0},
    "encoder-decoder": {"num_encoder_layers": 1, "num_decoder_layers": 2},
}
VARIANTS = {
    "sub-norm": {},
    "pre-norm": {"sub_norm": False},
    "post-norm": {"sub_norm": False, "norm_first": False},
    "grouped": {"num_kv_heads": 2},
    "xpos": {"position": Xpos(center=30)},
    "untied": {"tie_embeddings": False},
    "no-bias": {"bias": False, "tie_embeddings": False},
    "patterns": {"patterns": ("window:6", "dilated:32x4")},
    "sink": {"sink": True, "num_kv_heads": 2},
}


def model_of(**changes: object) -> LongNetLM:
    return LongNetLM(LongNetConfig(**{**SMALL, **changes}), dtype=torch.float64)


def draw_sinks(model: LongNetLM) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(".sink"):
            nn.init.normal_(parameter, std=2.0)


def batch_of(model: LongNetLM, n: int = 41, batch: int = 2) -> dict[str, torch.Tensor]:
    tokens = torch.randint(model.config.num_tokens, (batch, n))
    if model.config.form == "encoder":
        return {"tokens": tokens, "targets": tokens.flip(1)}
    if model.config.form == "encoder-decoder":
        return {"tokens": tokens, "tgt": torch.randint(model.config.num_tokens, (batch, n - 9))}
    return {"tokens": tokens}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_steps_train_every_parameter(form: str, variant: str):
    if variant == "xpos" and form != "decoder":
        pytest.skip("XPOS is causal")
    model = model_of(**FORMS[form], **VARIANTS[variant])
    assert model.config.form == form
    assert model.num_parameters == model.config.num_parameters
    batch = batch_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.loss(**batch)
        loss.backward()
        still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        # A constant added to every key changes no weight, so its gradient is nothing but rounding; and one token of the
        # vocabulary may not have come up.
        assert [name for name in still if not name.endswith("k_proj.bias")] == []
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("sub_norm", [False, True])
def test_a_model_is_its_layers_by_the_dense_formula(sub_norm: bool):
    """The decoder written out with the dense float64 oracle: norms, projections, sinks, residuals, logits."""
    model = model_of(position=None, sub_norm=sub_norm, sink=True)
    draw_sinks(model)
    tokens = torch.randint(40, (2, 41))
    x = model.token_embedding(tokens)
    counts = multiplicities(Dilated((8, 32), (1, 2)), 41, 4) * torch.ones(41, 41).tril()
    for layer in model.long_net.decoder.layers:
        y, attn = layer.norm1(x), layer.self_attn
        q, k, v = (p(y).unflatten(-1, (4, 8)).transpose(1, 2) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        y, lse = dense_attention(q, k, v, counts)
        y = (y * (lse.exp() / (lse.exp() + attn.sink.exp()[:, None]))[..., None]).transpose(1, 2).flatten(2)
        x = x + attn.out_proj(attn.norm(y) if sub_norm else y)
        y = nn.functional.gelu(layer.linear1(layer.norm2(x)))
        x = x + layer.linear2(layer.norm3(y) if sub_norm else y)
    wanted = model.long_net.decoder.norm(x) @ model.token_embedding.weight.T
    assert error(model(tokens), wanted) < 1e-12
    picked = wanted[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    assert error(model.loss(tokens), -picked.mean()) < 1e-12
    assert model.loss(tokens, reduction="none").shape == tokens.shape
    assert error(model.loss(tokens, reduction="sum"), -picked.sum()) < 1e-12


@pytest.mark.parametrize("variant", ["sub-norm", "post-norm", "grouped", "patterns", "xpos"])
def test_no_token_moves_an_earlier_output(variant: str):
    model = model_of(**VARIANTS[variant])
    x = torch.randn(1, 37, 32, dtype=torch.float64)
    moved = torch.autograd.functional.jacobian(lambda e: model.long_net(e)[0].sum(-1), x)[:, 0].abs().sum(-1)
    # LayerNorm's output sums to a constant, so look at one entry of it instead where the sum hides all.
    first = torch.autograd.functional.jacobian(lambda e: model.long_net(e)[0, :, 0], x)[:, 0].abs().sum(-1)
    influence = moved + first
    reached = torch.eye(37, dtype=torch.bool)
    for layer in model.long_net.decoder.layers:
        seen = (multiplicities(layer.self_attn.pattern, 37, 4).sum(0) > 0).tril() | torch.eye(37, dtype=torch.bool)
        reached = (seen.double() @ reached.double()) > 0
    assert torch.equal(influence > 0, reached)


def test_an_encoder_sees_both_ways_and_not_what_is_padding():
    model = LongNet(**{**SMALL, **FORMS["encoder"]}, dtype=torch.float64)
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    mask = torch.arange(30) >= torch.tensor([[30], [17]])
    found = model(x, key_padding_mask=mask)
    assert error(found[1, :17], model(x[1:, :17])[0]) < 1e-12
    changed = x.clone()
    changed[0, -1] += 1
    assert (model(changed)[0, 24] != model(x)[0, 24]).any()


def test_packed_sequences_are_separate_ones():
    model = LongNet(**SMALL, dtype=torch.float64)
    x = torch.randn(1, 30, 32, dtype=torch.float64)
    packed = model(x, cu_seqlens=torch.tensor([0, 11, 30]))
    assert error(packed, torch.cat([model(x[:, :11]), model(x[:, 11:])], 1)) < 1e-12


def test_it_overfits_64_tokens():
    torch.manual_seed(0)
    model = LongNetLM(**{**SMALL, "d_model": 64, "dim_feedforward": 128})
    tokens = torch.randint(40, (1, 64))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05 < math.log(40) / 2


@pytest.mark.parametrize("variant", ["sub-norm", "pre-norm", "grouped", "patterns", "xpos", "sink"])
def test_greedy_generation_matches_the_full_forward(variant: str):
    model = model_of(**VARIANTS[variant])
    draw_sinks(model)
    prompt = torch.randint(40, (2, 13))
    tokens = model.generate(prompt, 40)
    whole = model(torch.cat([prompt, tokens], 1)).argmax(-1)
    assert torch.equal(tokens, whole[:, 12:-1])


@pytest.mark.parametrize(("memory_pattern", "read"), [("full", None), ("window:7", 60)])
def test_an_encoder_decoder_generates_what_it_computes(memory_pattern: str, read: int | None):
    model = model_of(**FORMS["encoder-decoder"], memory_pattern=memory_pattern, num_source_tokens=read)
    src, prompt = torch.randint(read or 40, (2, 29)), torch.randint(40, (2, 5))
    tokens = model.generate(prompt, 20, src=src)
    whole = model(src, torch.cat([prompt, tokens], 1)).argmax(-1)
    assert torch.equal(tokens, whole[:, 4:-1])


def test_sampling_draws_from_what_was_asked_for():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -1.0]])
    draw = longnet.Sampler(0.5, 3, None, None).probabilities(logits)[0]
    assert torch.allclose(draw, nn.functional.pad((2 * logits[0, :3]).softmax(-1), (0, 2)))
    chances = logits[0].softmax(-1)
    kept = longnet.Sampler(1.0, None, float(chances[0]) + 1e-4, None).probabilities(logits)[0]
    assert torch.allclose(kept, nn.functional.pad(chances[:2] / chances[:2].sum(), (0, 3)))
    assert longnet.Sampler(1.0, None, 1e-9, None)(logits).item() == 0
    for temperature in (1e-40, 1e-300):
        assert longnet.Sampler(temperature, 3, 0.9, None).probabilities(logits)[0].tolist() == [1, 0, 0, 0, 0]
    model = model_of()
    prompt = torch.randint(40, (2, 6))
    drawn = [model.generate(prompt, 12, temperature=1.0, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], model.generate(prompt, 12))


def test_generation_stops_and_leaves_the_mode_alone():
    model = model_of(dropout=0.5).train()
    prompt = torch.randint(40, (1, 6))
    first = int(model.generate(prompt, 1))
    assert model.generate(prompt, 30, stop=first).tolist() == [[first]]
    assert model.training
    assert model.generate(prompt, 0).shape == (1, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature must be >= 0"),
        ({"top_k": 3}, "top_k and top_p must come with a temperature"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be >= 1"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p must lie in"),
        ({"src": torch.zeros(1, 3, dtype=torch.int64)}, "src must be given to an encoder-decoder, and"),
        ({"stop": 40}, r"stop must be a token, 0 \.\. 39"),
        ({"prompt": torch.zeros(3, dtype=torch.int64)}, r"a prompt \(batch, n\) that is not empty"),
    ],
)
def test_bad_wishes_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        model_of().generate(**{"prompt": torch.zeros(1, 3, dtype=torch.int64), "max_new_tokens": 3, **settings})


def test_both_sequences_have_as_many_samples():
    model, two = model_of(**FORMS["encoder-decoder"]), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="source and target must have the same batch size, got 2 and 1"):
        model(two, two[:1])
    with pytest.raises(ValueError, match="got one and form 'decoder'"):
        model_of()(two, two)


def test_both_stacks_read_one_sequence_causally():
    model = model_of(**FORMS["encoder-decoder"])
    tokens = torch.randint(40, (2, 30))
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 40
    found, other = model(tokens), model(changed)
    assert error(found[:, :20], other[:, :20].detach()) < 1e-12 and error(found[:, 20:], other[:, 20:].detach()) > 1e-3
    assert error(model.long_net(model.hidden(tokens)), model.long_net(model.hidden(tokens), is_causal=False)) > 1e-3
    padding = torch.arange(30) >= torch.tensor([[30], [17]])
    assert error(model(tokens, key_padding_mask=padding)[1, :17], model(tokens[1:, :17])[0].detach()) < 1e-10
    model.loss(tokens).backward()
    with pytest.raises(ValueError, match="tgt_key_padding_mask must come with tgt"):
        model(tokens, tgt_key_padding_mask=padding)
    with pytest.raises(ValueError, match="tgt must be given to a model with num_source_tokens"):
        model_of(**FORMS["encoder-decoder"], num_source_tokens=30)(tokens)


@pytest.mark.parametrize("form", FORMS)
def test_checkpointing_changes_no_gradient(form: str):
    plain = model_of(**FORMS[form])
    again = model_of(**FORMS[form], gradient_checkpointing=True)
    again.load_state_dict(plain.state_dict())
    batch = batch_of(plain)
    for model in (plain, again):
        model.loss(**batch).backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        assert error(other.grad, one.grad) < 1e-12, name


def test_chunked_loss_is_the_whole_loss(monkeypatch: pytest.MonkeyPatch):
    model = model_of()
    tokens = torch.randint(40, (2, 41))
    whole = model.loss(tokens)
    grads = torch.autograd.grad(whole, list(model.parameters()))
    monkeypatch.setattr(longnet, "LOGITS_AT_A_TIME", 40 * 7)
    chunked = model.loss(tokens)
    assert error(chunked, whole) < 1e-12
    for one, other in zip(grads, torch.autograd.grad(chunked, list(model.parameters())), strict=True):
        assert error(other, one) < 1e-12


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sample_by_transforms():
    model, tokens = model_of(), torch.randint(40, (2, 30))
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        given = {"targets": sample[None, 1:]}
        return torch.func.functional_call(model, parameters, (sample[None, :-1],), given)

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, tokens)
    for i in range(2):
        wanted = torch.autograd.grad(model.loss(tokens[i : i + 1]), list(parameters.values()))
        assert all(error(found[name][i], grad) < 1e-6 for name, grad in zip(parameters, wanted, strict=True))


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_loss_is_one_graph():
    model, tokens = model_of(num_decoder_layers=1), torch.randint(40, (2, 41))
    losses = [f(tokens) for f in (torch.compile(model.loss, fullgraph=True, backend="aot_eager"), model.loss)]
    grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for got, want in zip((losses[0], *grads[0]), (losses[1], *grads[1]), strict=True):
        assert error(got, want.detach()) < 1e-12


def test_the_logits_of_a_long_sequence_never_exist_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(longnet, "LOGITS_AT_A_TIME", 1 << 21)
    size = {"num_tokens": 8192, "d_model": 16, "num_decoder_layers": 1, "dim_feedforward": 16}
    model = LongNetLM(LongNetConfig(**{**SMALL, **size}))
    tokens = torch.randint(8192, (1, 16384))
    with LiveMemory() as memory:
        model.loss(tokens).backward()
    assert memory.peak < tokens.numel() * 8192 * 4 / 4


def test_layers_work_in_torchs_own_stack():
    layer = DilatedTransformerEncoderLayer(32, 4, [8, 32], [1, 2], 48, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 41, 32)
    mask = torch.arange(41) >= torch.tensor([[41], [30]])
    assert encoder(x, src_key_padding_mask=mask).shape == x.shape
    causal = nn.Transformer.generate_square_subsequent_mask(41)
    assert torch.allclose(encoder(x, mask=causal, is_causal=True), encoder(x, mask=causal))
    decoder = nn.TransformerDecoder(DilatedTransformerDecoderLayer(32, 4, "window:8", None, 48, dropout=0.0), 2)
    assert decoder(x, torch.randn(2, 23, 32)).shape == x.shape


def test_a_full_layer_is_torchs_layer():
    ours = DilatedTransformerEncoderLayer(32, 4, "full", None, 48, 0.0, norm_first=False, sub_norm=False)
    theirs = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 25, 32)
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)


def test_sequence_first_layers_are_batch_first_ones_turned():
    layer = DilatedTransformerDecoderLayer(32, 4, "window:8", None, 48, 0.0).double()
    turned = DilatedTransformerDecoderLayer(32, 4, "window:8", None, 48, 0.0, batch_first=False).double()
    turned.load_state_dict(layer.state_dict())
    x, memory = torch.randn(2, 20, 32, dtype=torch.float64), torch.randn(2, 15, 32, dtype=torch.float64)
    assert error(turned(x.transpose(0, 1), memory.transpose(0, 1)).transpose(0, 1), layer(x, memory)) < 1e-12


def test_a_cache_belongs_to_its_layer():
    layer = DilatedTransformerEncoderLayer(32, 4, SlidingWindow(8), None, 48, 0.0).eval()
    with pytest.raises(ValueError, match="the cache must be made for"), torch.no_grad():
        layer(torch.randn(1, 4, 32), is_causal=True, cache=KVCache("window:9"))


def test_a_config_goes_through_json():
    for variant in VARIANTS.values():
        config = LongNetConfig(**{**SMALL, **variant})
        assert LongNetConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="must hold known settings, got d_modell"):
        LongNetConfig.from_dict({"d_modell": 3})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_decoder_layers": 0}, "a model must have a layer"),
        ({"activation": "tanh"}, "activation must be one of"),
        ({"norm_first": False}, "sub_norm must come with norm_first"),
        ({"position": "learned"}, "position must be one of"),
        ({"patterns": ("window:",)}, "window"),
        ({"d_model": 0}, "d_model must be >= 1"),
    ],
)
def test_bad_configs_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        LongNetConfig(**settings)


def test_older_configs_have_no_sinks():
    older = {name: value for name, value in LongNetConfig(**SMALL).to_dict().items() if name != "sink"}
    assert not LongNetConfig.from_dict(older).sink
    state = model_of(sink=True).state_dict()
    assert [name for name in state if name.endswith("sink")] == [
        f"long_net.decoder.layers.{layer}.self_attn.sink" for layer in range(2)
    ]
    plain = {name: tensor for name, tensor in state.items() if not name.endswith("sink")}
    model_of().load_state_dict(plain)
    with pytest.raises(RuntimeError, match=r"self_attn\.sink"):
        model_of(sink=True).load_state_dict(plain)


@pytest.mark.parametrize("flags", [{"detach_mixing": True}, {"zero_padding": True, "num_encoder_layers": 1}])
def test_torchscales_attention_has_no_sink(flags):
    with pytest.raises(ValueError, match="torchscale's attention must come without a sink"):
        model_of(sink=True, **flags)


def test_named_sizes():
    counts = {name: LongNetConfig.named(name).num_parameters for name in ("tiny", "small", "base", "large", "1b")}
    assert sorted(counts.values()) == list(counts.values())
    assert counts["tiny"] < 4e6
    assert 1.0e9 < counts["1b"] < 1.5e9
    with pytest.raises(ValueError, match="size must be one of tiny"):
        LongNetConfig.named("huge")


def test_flops_count_products_and_attention():
    config = LongNetConfig(**{**SMALL, "patterns": ("full",), "num_decoder_layers": 1, "nhead": 1})
    n = 128
    matrices = 4 * 32 * 32 + 2 * 32 * 48 + 40 * 32
    assert config.flops(n) == 2 * n * matrices + 4 * n * n * 32


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_layer_compiles_whole():
    layer = DilatedTransformerEncoderLayer(32, 4, [8, 32], [1, 2], 48, 0.0)
    x = torch.randn(1, 64, 32)
    compiled = torch.compile(lambda t: layer(t, is_causal=True), backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), layer(x, is_causal=True), atol=1e-5)


LEARNED = {"base_sparsity": 0.7, "score_unit": 4, "local_blocks": 1, "dense_steps": 3}


@pytest.mark.parametrize("form", FORMS)
def test_learned_attention_in_every_form(form):
    config = LongNetConfig(**{**SMALL, **FORMS[form]}, adaptive=LEARNED, adaptive_block_size=16)
    model = LongNetLM(config)
    assert model.num_parameters == config.num_parameters
    assert LongNetConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    tokens = torch.randint(40, (1, 100))
    both = (tokens, tokens) if form == "encoder-decoder" else (tokens,)
    assert model(*both).shape == (1, 100, 40)
    dense = LongNetConfig(**{**SMALL, **FORMS[form]}, patterns=["full"])
    assert config.flops(256) < dense.flops(256)


def test_learned_attention_trains_and_generates():
    torch.manual_seed(0)
    model = LongNetLM(LongNetConfig(**SMALL, adaptive=LEARNED, adaptive_block_size=16))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tokens = torch.randint(40, (2, 40)).repeat(1, 4)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    assert int(model.state_dict()["long_net.decoder.layers.0.self_attn.core.training_steps"]) == 10
    model.eval()
    told = model.generate(tokens[:, :90], 12)
    whole = tokens[:, :90]
    for _ in range(12):
        whole = torch.cat([whole, model(whole)[:, -1:].argmax(-1)], 1)
    assert torch.equal(told, whole[:, 90:])


def test_learned_attention_must_be_meant():
    with pytest.raises(ValueError, match="without patterns"):
        LongNetConfig(**SMALL, patterns=["full"], adaptive=LEARNED)
    with pytest.raises(ValueError, match="follow a pattern"):
        LongNetConfig(**SMALL, zero_padding=True, adaptive=LEARNED)


def test_ids_beyond_the_type_of_the_prompt_are_generated_whole():
    model = LongNetLM(LongNetConfig(**{**SMALL, "num_tokens": 1000})).eval()
    prompt = torch.randint(200, (2, 9))
    wanted = model.generate(prompt, 12, temperature=0.0)
    assert wanted.max() > 255
    assert torch.equal(model.generate(prompt.to(torch.uint8), 12, temperature=0.0), wanted)
    small = model.generate(prompt.to(torch.uint16), 12, temperature=0.0, stop=999)
    assert small.dtype == torch.uint16 and torch.equal(small.long(), model.generate(prompt, 12, stop=999))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32])
def test_the_loss_accepts_the_tokens_that_the_model_accepts(dtype):
    model = LongNetLM(LongNetConfig(**SMALL))
    tokens = torch.randint(40, (2, 30))
    assert torch.equal(model.loss(tokens.to(dtype)), model.loss(tokens))
    model.loss(tokens, tokens.masked_fill(tokens < 20, 4000), ignore_index=4000).backward()
    assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)


def test_generation_leaves_the_mode_of_every_module():
    model = LongNetLM(LongNetConfig(**SMALL)).train()
    model.long_net.decoder.eval()
    before = [module.training for module in model.modules()]
    model.generate(torch.zeros(1, 3, dtype=torch.int64), 2)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("more", [{"sink": True}, {"position": "alibi"}])
def test_learned_attention_without_sinks_and_alibi(more):
    with pytest.raises(ValueError, match="adaptive must come without sinks and ALiBi"):
        LongNetConfig(**{**SMALL, "segment_lengths": (), "dilation_rates": (), **more}, adaptive={})
