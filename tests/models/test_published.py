"""torchscale's LongNet and the slide encoder built on it: our models with their weights against a slow oracle."""

from __future__ import annotations

import pytest
import torch
import torchscale_oracle as torchscale
from oracle import error

from dilated_attention_pytorch import MultiheadDilatedAttention
from dilated_attention_pytorch.models import (
    DilatedTransformerEncoderLayer,
    LongNetConfig,
    LongNetLM,
    SlideEncoder,
    export_state,
    load_checkpoint,
    load_slide_encoder,
    load_torchscale,
)
from dilated_attention_pytorch.models.torchscale import published_attention, real_lengths
from dilated_attention_pytorch.patterns import Dilated

LADDER = [8, 20, 64], [1, 2, 4]


def heads_of(n: int, heads: int, d: int = 8) -> list[torch.Tensor]:
    return [torch.randn(n, heads, d, dtype=torch.float64).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "heads"), [(16, 4), (21, 4), (50, 6), (5, 3), (67, 5)])
def test_attention_and_its_gradient_are_torchscales(n: int, heads: int, causal: bool):
    query, key, value = heads_of(n, heads)
    seed = torch.randn(n, heads, 8, dtype=torch.float64)
    wanted = torchscale.attention(query, key, value, *LADDER, causal)
    wanted_grads = torch.autograd.grad(wanted, (query, key, value), seed)
    got = published_attention(
        *(x.transpose(0, 1)[None] for x in (query, key, value)), Dilated(*LADDER, "block"),
        zero_padding=True, detach_mixing=True, is_causal=causal, key_padding_mask=None, cu_seqlens=None,
    )[0].transpose(0, 1)  # fmt: skip
    assert error(got, wanted) < 1e-12
    for grad, wanted_grad in zip(torch.autograd.grad(got, (query, key, value), seed), wanted_grads, strict=True):
        assert error(grad, wanted_grad) < 1e-11


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "heads"), [(21, 4), (50, 6), (67, 5), (9, 3)])
def test_shifted_segments_are_torchscales(n: int, heads: int, causal: bool):
    """Rates that do not divide their segments: torchscale places later segments too late."""
    ladder = [7, 10, 22], [2, 3, 4]
    query, key, value = heads_of(n, heads)
    seed = torch.randn(n, heads, 8, dtype=torch.float64)
    wanted = torchscale.attention(query, key, value, *ladder, causal)
    wanted_grads = torch.autograd.grad(wanted, (query, key, value), seed)
    turned = [x.transpose(0, 1)[None] for x in (query, key, value)]
    given = {"zero_padding": True, "detach_mixing": True, "is_causal": causal, "cu_seqlens": None}
    pattern = Dilated(*ladder, "block")
    got = published_attention(*turned, pattern, shifted_segments=True, key_padding_mask=None, **given)[0].transpose(
        0, 1
    )
    assert error(got, wanted) < 1e-12
    for grad, wanted_grad in zip(torch.autograd.grad(got, (query, key, value), seed), wanted_grads, strict=True):
        assert error(grad, wanted_grad) < 1e-11
    straight = published_attention(*turned, pattern, key_padding_mask=None, **given)[0].transpose(0, 1)
    assert error(straight, wanted) > 1e-2, "without the flag every output stands at its own token"
    # A shorter sample beside it is computed as if it were alone.
    short = n - 2
    mask = torch.arange(n)[None] >= short
    beside = published_attention(*turned, pattern, shifted_segments=True, key_padding_mask=mask, **given)
    alone = torchscale.attention(query[:short], key[:short], value[:short], *ladder, causal)
    assert error(beside[0].transpose(0, 1)[:short], alone) < 1e-12


def test_shifted_segments_without_detached_mixing_have_gradients():
    pattern = Dilated((7, 10), (4, 4), "block")
    given = {"zero_padding": True, "detach_mixing": False, "shifted_segments": True, "is_causal": False}
    inputs = [torch.randn(1, 2, 25, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(
        lambda *x: published_attention(*x, pattern, key_padding_mask=None, cu_seqlens=None, **given), inputs
    )


def test_ragged_segments_follow_the_published_encoder():
    """What 185,363 tokens at rate 8 are to the published encoder, 10 at rate 4 are here."""
    state = torchscale.slide_state(32, 48, layers=2, tile_width=12)
    ladder = {"segment_lengths": (8, 10, 64), "dilation_rates": (1, 4, 4)}
    settings = {"nhead": 8, **ladder, "grid": 10, "global_pool": True, "dtype": torch.float64}
    tiles, coords = slide_of(47, 12, 10)
    wanted = torchscale.slide(state, tiles, coords, 8, *map(list, ladder.values()), grid=10, pool=True)
    straight, shifted = (load_slide_encoder(state, shifted_segments=flag, **settings) for flag in (False, True))
    with torch.no_grad():
        assert error(shifted(tiles[None], coords[None])[0], wanted) < 1e-11
        assert error(straight(tiles[None], coords[None])[0], wanted) > 1e-4
        few = tiles[None, :9], coords[None, :9]
        assert torch.equal(shifted(*few), straight(*few)), "one segment is never shifted"


def test_a_bare_module_loads_torchscales_names_and_rotation():
    """XPOS turns neighbours there and halves here; its buffer follows from the width."""
    state = torchscale.drawn(torchscale.layer_shapes(32, 48, "", 8))
    state = {n.removeprefix("self_attn."): t for n, t in state.items() if n.startswith("self_attn.")}
    module = MultiheadDilatedAttention(32, 4, *LADDER, offset="block", position="xpos", dtype=torch.float64)
    load_checkpoint(module, state, "torchscale")
    x = torch.randn(45, 32, dtype=torch.float64)
    q, k, v = (torchscale.linear(state, f"{n}_proj", x).unflatten(-1, (4, -1)) for n in "qkv")
    q, k = torchscale.xpos(q, 512, False), torchscale.xpos(k, 512, True)
    mixed = torchscale.attention(q, k, v, *LADDER, True).flatten(1)
    wanted = torchscale.linear(state, "out_proj", torchscale.norm(state, "inner_attn_ln", mixed))
    with torch.no_grad():
        assert error(module(x[None], x[None], x[None], is_causal=True)[0][0], wanted) < 1e-11
    back = export_state(module, "torchscale")
    assert set(back) == set(state)
    assert all(torch.allclose(back[name].double(), state[name], rtol=1e-6, atol=0) for name in back)


def test_the_flags_change_what_they_say():
    n, pattern = 21, Dilated(*LADDER, "block")
    query, key, value = (x.transpose(0, 1)[None] for x in heads_of(n, 4))
    given = {"is_causal": False, "key_padding_mask": None, "cu_seqlens": None}
    outputs = {
        (zeros, detach): published_attention(
            query, key, value, pattern, zero_padding=zeros, detach_mixing=detach, **given
        )
        for zeros in (False, True)
        for detach in (False, True)
    }
    assert error(outputs[False, True], outputs[False, False]) < 1e-12
    assert error(outputs[True, True], outputs[True, False]) < 1e-12
    assert error(outputs[True, False], outputs[False, False]) > 1e-2


def test_the_flags_are_refused_where_they_mean_nothing():
    with pytest.raises(ValueError, match="zero_padding and detach_mixing must come with a dilated pattern"):
        DilatedTransformerEncoderLayer(16, 2, "window:4", zero_padding=True)


def slide_of(n: int, width: int, grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    cells = torch.stack([torch.arange(n) % grid, torch.arange(n) * 7 // grid % grid], -1)
    return torch.randn(n, width, dtype=torch.float64), cells * 256 + 3


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("n", [1, 23, 60])
def test_a_slide_encoder_gives_what_the_published_one_gives(n: int, pool: bool):
    state = torchscale.slide_state(32, 48, layers=2, tile_width=12)
    model = load_slide_encoder(
        {"model": state}, global_pool=pool, nhead=8, segment_lengths=(8, 20, 64), dilation_rates=(1, 2, 4),
        grid=10, dtype=torch.float64,
    )  # fmt: skip
    tiles, coords = slide_of(n, 12, 10)
    wanted = torchscale.slide(state, tiles, coords, 8, *LADDER, grid=10, pool=pool)
    with torch.no_grad():
        assert error(model(tiles[None], coords[None])[0], wanted) < 1e-11


def test_published_slides_batch_like_single_ones():
    state = torchscale.slide_state(32, 48, layers=2, tile_width=12)
    model = load_slide_encoder(
        state, nhead=8, segment_lengths=(8, 20, 64), dilation_rates=(1, 2, 4), grid=10, dtype=torch.float64
    )
    slides = [slide_of(n, 12, 10) for n in (40, 23, 5)]
    tiles, coords = (torch.nn.utils.rnn.pad_sequence([s[i] for s in slides], batch_first=True) for i in (0, 1))
    mask = torch.arange(40) >= torch.tensor([[40], [23], [5]])
    with torch.no_grad():
        together = model(tiles, coords, mask)
        for row, (one, where) in zip(together, slides, strict=True):
            assert error(row, model(one[None], where[None])[0]) < 1e-11
    with pytest.raises(ValueError, match="key_padding_mask must hide the end of each sample"):
        model(tiles, coords, mask.flip(1))


@pytest.mark.parametrize("with_xpos", [False, True])
def test_a_decoder_gives_torchscales_logits(with_xpos: bool):
    state = torchscale.decoder_state(32, 64, layers=2, heads=4, vocabulary=50, with_xpos=with_xpos)
    model = load_torchscale(state, nhead=4, segment_lengths=LADDER[0], dilation_rates=LADDER[1], dtype=torch.float64)
    tokens = torch.randint(50, (45,))
    with torch.no_grad():
        assert error(model(tokens[None])[0], torchscale.decoder(state, tokens, 4, *LADDER)) < 1e-10


@pytest.mark.parametrize("with_xpos", [False, True])
def test_torchscale_names_come_back_as_they_went(with_xpos: bool):
    state = torchscale.decoder_state(32, 64, layers=2, heads=4, vocabulary=50, with_xpos=with_xpos)
    model = load_torchscale(state, nhead=4, segment_lengths=LADDER[0], dilation_rates=LADDER[1], dtype=torch.float64)
    back = export_state(model, "torchscale")
    assert set(back) == set(state)
    assert all(torch.allclose(back[name].double(), state[name], rtol=1e-6, atol=0) for name in back)
    assert all(torch.equal(back[name], state[name]) for name in back if not name.endswith("xpos.scale"))


def test_the_fairseq_recipe_of_torchscale_loads():
    """arch lm_base: names after `decoder.`, no sub-LayerNorm, scaled embeddings, sinusoids, a shared output."""
    state = torchscale.decoder_state(32, 64, layers=2, heads=4, vocabulary=50, with_xpos=False)
    state = {name: tensor for name, tensor in state.items() if "inner_attn_ln" not in name and "ffn_l" not in name}
    wrapped = {f"decoder.{name}": tensor for name, tensor in state.items()}
    wrapped |= {"decoder.version": torch.tensor([3.0]), "decoder.embed_positions._float_tensor": torch.zeros(1)}
    model = load_torchscale(
        {"model": wrapped}, nhead=4, segment_lengths=LADDER[0], dilation_rates=LADDER[1], dtype=torch.float64
    )
    assert model.config.sinusoids and model.config.scale_embedding and not model.config.sub_norm
    tokens = torch.randint(50, (45,))
    with torch.no_grad():
        wanted = torchscale.decoder(state, tokens, 4, *LADDER, fairseq=True)
        assert error(model(tokens[None])[0], wanted) < 1e-10
    found = model.generate(tokens[None, :20], 6)
    ids = tokens[None, :20]
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, ids[:, 20:])
    with pytest.raises(ValueError, match="whole sequences on one device"):
        model(tokens[None], cu_seqlens=torch.tensor([0, 20, 45]))


def translator_of(shared: str) -> dict[str, torch.Tensor]:
    """Weights of an encoder-decoder with all embeddings in one, the decoder's two in one, or none."""
    state = torchscale.encoder_decoder_state(32, 64, layers=(2, 3), vocabularies=(50 if shared == "all" else 40, 50))
    if shared != "none":
        state["decoder.output_projection.weight"] = state["decoder.embed_tokens.weight"]
    if shared == "all":
        state["encoder.embed_tokens.weight"] = state["decoder.embed_tokens.weight"]
    return state


@pytest.mark.parametrize("shared", ["all", "decoder", "none"])
def test_encoder_decoder_round_trips_torchscale_logits(shared: str):
    state = translator_of(shared)
    model = load_torchscale(state, nhead=4, segment_lengths=LADDER[0], dilation_rates=LADDER[1], dtype=torch.float64)
    src, tgt = torch.randint(40, (45,)), torch.randint(50, (27,))
    with torch.no_grad():
        assert error(model(src[None], tgt[None])[0], torchscale.encoder_decoder(state, src, tgt, 4, *LADDER)) < 1e-10
        padding = torch.arange(45) >= torch.tensor([[45], [23]])
        both = model(*(x.expand(2, -1) for x in (src, tgt)), key_padding_mask=padding)
        assert error(both[1], model(src[None, :23], tgt[None])[0]) < 1e-10
    back = export_state(model, "torchscale")
    assert set(back) == set(state)
    assert all(torch.equal(back[name], state[name]) for name in back)
    assert model.num_parameters == model.config.num_parameters


def test_a_decoder_with_an_output_of_its_own_comes_over():
    """torchscale's default, whose output projection has no bias."""
    state = torchscale.decoder_state(32, 64, layers=1, heads=4, vocabulary=50, with_xpos=False)
    state["output_projection.weight"] = torch.randn(50, 32, dtype=torch.float64)
    model = load_torchscale(state, nhead=4, segment_lengths=LADDER[0], dilation_rates=LADDER[1], dtype=torch.float64)
    tokens = torch.randint(50, (21,))
    with torch.no_grad():
        assert error(model(tokens[None])[0], torchscale.decoder(state, tokens, 4, *LADDER)) < 1e-10
        assert set(export_state(model, "torchscale")) == set(state)
        model.out.bias.add_(1)
    with pytest.raises(ValueError, match="output projection must have no bias"):
        export_state(model, "torchscale")


def test_an_encoder_decoder_of_another_kind_is_refused():
    settings = {"nhead": 4, "segment_lengths": LADDER[0], "dilation_rates": LADDER[1]}
    state = translator_of("all")
    model = load_torchscale(state, **settings)
    before = export_state(model)
    wrong = {name: tensor for name, tensor in state.items() if name != "decoder.layers.1.encoder_attn.k_proj.bias"}
    wrong["decoder.layers.0.encoder_attn.inner_attn_ln.weight"] = torch.zeros(32)
    with pytest.raises(ValueError, match="must hold what the model needs") as raised:
        load_checkpoint(model, wrong, "torchscale")
    assert "1 missing: decoder.layers.1.encoder_attn.k_proj.bias" in str(raised.value)
    assert "1 unexpected: decoder.layers.0.encoder_attn.inner_attn_ln.weight" in str(raised.value)
    with pytest.raises(ValueError, match=r"one embedding must be given equal embeddings.*\n?.*num_source_tokens"):
        load_checkpoint(model, {**state, "encoder.embed_tokens.weight": torch.zeros(50, 32)}, "torchscale")
    assert all(torch.equal(tensor, before[name]) for name, tensor in export_state(model).items())
    with pytest.raises(ValueError, match="XPOS must be in causal layers"):
        load_torchscale({**state, "encoder.layers.0.self_attn.xpos.scale": torch.zeros(4)}, **settings)
    with pytest.raises(
        ValueError, match=r"torchscale's cross-attention must have no LayerNorm(.|\n)*memory_norm=False"
    ):
        export_state(LongNetLM(num_encoder_layers=1, num_decoder_layers=1, d_model=32, **settings), "torchscale")
    with pytest.raises(ValueError, match="must come with an encoder-decoder"):
        LongNetLM(num_decoder_layers=1, memory_norm=False)


def test_cross_attention_without_its_norm_has_no_gain():
    config = LongNetConfig(d_model=64, nhead=4, num_encoder_layers=4, num_decoder_layers=40, memory_norm=False)
    with torch.device("meta"):
        layer = LongNetLM(config).long_net.decoder.layers[0]
    assert layer.self_attn.gamma_init == config.gamma("decoder") > 2
    assert (layer.multihead_attn.gamma_init, layer.multihead_attn.norm) == (1.0, None)


def test_the_published_sizes_load_by_their_true_names():
    """Shapes of the 12 x 768 encoder, on a device that holds none of them."""
    with torch.device("meta"):
        model = SlideEncoder()
    shapes = {name: tuple(t.shape) for name, t in export_state(model, "torchscale").items()}
    wanted = {
        "cls_token": (1, 1, 768),
        "patch_embed.proj.weight": (768, 1536),
        "patch_embed.proj.bias": (768,),
        "norm.weight": (768,),
        "norm.bias": (768,),
        "encoder.layer_norm.weight": (768,),
        "encoder.layer_norm.bias": (768,),
    }
    for number in range(12):
        wanted |= torchscale.layer_shapes(768, 3072, f"encoder.layers.{number}.")
    assert shapes == wanted


def test_exact_attention_can_be_asked_for():
    state = torchscale.slide_state(32, 48, layers=1, tile_width=12)
    settings = {"nhead": 8, "segment_lengths": (8, 20), "dilation_rates": (1, 2), "grid": 10, "dtype": torch.float64}
    settings["global_pool"] = True
    tiles, coords = slide_of(23, 12, 10)
    published, exact = (load_slide_encoder(state, exact=exact, **settings) for exact in (False, True))
    with torch.no_grad():
        assert error(published(tiles[None], coords[None]), exact(tiles[None], coords[None])) > 1e-4


def test_extra_entries_are_listed_and_can_be_left_out():
    state = torchscale.slide_state(32, 48, layers=1, tile_width=12)
    state["mask_token"] = torch.zeros(1, 1, 32)
    settings = {"nhead": 8, "segment_lengths": (8, 20), "dilation_rates": (1, 2), "dtype": torch.float64}
    with pytest.raises(ValueError, match="1 unexpected: mask_token"):
        load_slide_encoder(state, **settings)
    model = load_slide_encoder(state, ignore=["^mask_token$"], **settings)
    load_checkpoint(model, {**state, "pos_embed": torch.zeros(1, 4, 32)}, "torchscale", ignore=["mask_token"])


@pytest.mark.compile
def test_padding_before_tokens_is_refused_when_compiled():
    call = torch.compile(lambda mask: real_lengths(mask, 2, 8, mask.device) * 1, fullgraph=True, backend="aot_eager")
    assert call(torch.arange(8) >= torch.tensor([[8], [5]])).tolist() == [8, 5]
    with pytest.raises(ValueError, match="key_padding_mask must hide the end of each sample"):
        call(torch.arange(8) < torch.tensor([[0], [3]]))
