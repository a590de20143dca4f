"""Hugging Face models built from small configurations: patterns, padding, packing, generation, refusals."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from oracle import error

from dilated_attention_pytorch import Pattern, integrate, parse, sparsify
from dilated_attention_pytorch.integrations import huggingface

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="needs the extra `hf`")
    load_file = pytest.importorskip("safetensors.torch").load_file

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = huggingface.register(
    {
        "full": "full",
        "dilated": "dilated:16x1,64x4",
        "block_sparse": "block_dilated:32x1,64x2;block=16",
        "window": "window:8",
    }
)
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 50}


@pytest.fixture
def llama():
    config = transformers.LlamaConfig(
        **SIZES,
        num_hidden_layers=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.fixture
def bert():
    config = transformers.BertConfig(**SIZES, num_hidden_layers=2, attn_implementation="sdpa")
    return transformers.BertModel(config, add_pooling_layer=False).double().eval()


def tokens(n=90, batch=2):
    return torch.randint(1, 50, (batch, n))


@pytest.mark.parametrize("padded", ["none", "left", "right"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_full_pattern_is_their_own_attention(kind, padded, request):
    model = request.getfixturevalue(kind)
    ids = tokens()
    real = torch.ones_like(ids)
    if padded == "left":
        real[1, :30] = 0
    elif padded == "right":
        real[1, 60:] = 0
    with torch.no_grad():
        theirs = model(ids, attention_mask=real)[0]
        model.set_attn_implementation("full")
        ours = model(ids, attention_mask=real)[0]
    assert error(ours[real.bool()], theirs[real.bool()]) < 1e-10


@pytest.mark.parametrize("name", ["dilated", "block_sparse", "window"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_padding_changes_nothing_before_it(kind, name, request):
    model = request.getfixturevalue(kind)
    model.set_attn_implementation(name)
    ids = tokens()
    real = torch.ones_like(ids)
    real[:, 60:] = 0
    other = ids.clone()
    other[:, 60:] = 7
    with torch.no_grad():
        first, second = (model(x, attention_mask=real)[0][:, :60] for x in (ids, other))
    assert torch.equal(first, second)


def test_switching_live_changes_who_is_seen(bert):
    ids = tokens()
    other = ids.clone()
    other[:, 80] = ids[:, 80] % 49 + 1
    moved = {}
    for name in ("sdpa", "window"):
        bert.set_attn_implementation(name)
        with torch.no_grad():
            moved[name] = (bert(ids)[0] - bert(other)[0]).abs().amax(-1)[0] > 0
    assert moved["sdpa"].all()
    # Two layers of a window of 8 reach 16 tokens.
    assert moved["window"].nonzero().min() == 64 and moved["window"][80]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", [False, True])
def test_generation_is_the_full_forward_step_by_step(llama, name, padded):
    llama.set_attn_implementation(name)
    ids = tokens(50)
    real = torch.ones_like(ids)
    if padded:
        real[1, :20] = 0
    out = llama.generate(
        ids,
        attention_mask=real,
        max_new_tokens=40,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    mask = torch.cat([real, torch.ones(2, 40, dtype=torch.long)], 1)
    with torch.no_grad():
        whole = llama(out.sequences, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    assert error(torch.stack(out.logits, 1), whole[:, 49:-1]) < 1e-6


def test_a_long_second_prompt(llama):
    llama.set_attn_implementation("dilated")
    ids = tokens(120)
    with torch.no_grad():
        whole = llama(ids).logits
        first = llama(ids[:, :40], use_cache=True)
        second = llama(ids[:, 40:], past_key_values=first.past_key_values).logits
    assert error(second, whole[:, 40:]) < 1e-10


@pytest.mark.parametrize("name", ["dilated", "block_sparse"])
def test_training(llama, name):
    llama.train().set_attn_implementation(name)
    ids = tokens()
    llama(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in llama.parameters())


def test_what_cannot_be_honoured_raises(llama):
    attend = huggingface.attention_function(parse("window:3"))
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    module = torch.nn.Module()
    for name in huggingface.UNSUPPORTED:
        with pytest.raises(ValueError, match=f"{name} must be absent"):
            attend(module, q, q, q, None, **{name: torch.zeros(1)})
    with pytest.raises(ValueError, match="output_attentions must come with"):
        attend(module, q, k, k, None, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions must come without softcap and position_bias, got softcap"):
        attend(module, q, q, q, None, output_attentions=True, softcap=3.0)
    with pytest.raises(TypeError, match="as a pattern"):
        attend(module, q, q, q, torch.ones(1, 1, 5, 5).tril().log())
    with pytest.raises(ValueError, match="query and key must have the same length"):
        attend(module, q, k, k, None, is_causal=False)
    with pytest.raises(ValueError, match="dropout"):
        attend(module, q, k, k, None, dropout=0.1)
    with pytest.raises(ValueError, match="length must be given"):
        huggingface.attention_function(parse("random:0.5"))(module, q, k, k, None)


LENGTHS = (30, 45, 15)


def packed(ids):
    """FlashAttention's arguments for documents of `LENGTHS`, as DataCollatorWithFlattening makes them."""
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    longest = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    starts = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **longest}, {"position_ids": starts}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["bounds", "positions", "both"])
def test_packed_documents_match_single_ones(llama, name, how):
    llama.set_attn_implementation(name)
    ids = tokens(sum(LENGTHS), 1)
    bounds, positions = packed(ids)
    given = {"bounds": bounds, "positions": positions, "both": {**bounds, **positions}}[how]
    with torch.no_grad():
        together = llama(ids, use_cache=False, **given).logits
        alone = [llama(one).logits for one in ids.split(LENGTHS, 1)]
    # Rotary positions are float32 in transformers, and differ where they do not start anew.
    assert error(together, torch.cat(alone, 1)) < 1e-6


def test_packed_documents_match_single_ones_in_an_encoder(bert):
    bert.set_attn_implementation("dilated")
    ids = tokens(sum(LENGTHS), 1)
    bounds, positions = packed(ids)
    with torch.no_grad():
        together = bert(ids, **bounds, **positions)[0]
        alone = [bert(one)[0] for one in ids.split(LENGTHS, 1)]
    assert error(together, torch.cat(alone, 1)) < 1e-10


def test_incomplete_packing_raises(llama):
    attend = huggingface.attention_function(parse("window:3"))
    q, module = torch.randn(1, 2, 6, 8), torch.nn.Module()
    bounds = torch.tensor([0, 2, 6])
    for name in huggingface.PACKING:
        with pytest.raises(ValueError, match=f"{name} must come with cu_seq_lens_q"):
            attend(module, q, q, q, None, **{name: bounds})
    with pytest.raises(ValueError, match="cu_seq_lens_k must give the documents of cu_seq_lens_q"):
        attend(module, q, q, q, None, cu_seq_lens_q=bounds, cu_seq_lens_k=torch.tensor([0, 3, 6]))
    with pytest.raises(ValueError, match="cu_seq_lens_q must come with batch size 1, got 2"):
        attend(module, *[torch.cat([q, q])] * 3, None, cu_seq_lens_q=bounds)
    with pytest.raises(ValueError, match="packed sequences"):
        attend(module, q[:, :, 5:], q, q, None, cu_seq_lens_q=bounds)


@pytest.mark.parametrize("encoded", [40, 25])
def test_cross_attention_stays_full(encoded):
    config = transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.BartModel(config).double().eval()
    ids, source = tokens(40), torch.randn(2, encoded, 32, dtype=torch.float64)
    real = torch.ones(2, encoded, dtype=torch.long)
    real[1, 20:] = 0
    cross = model.decoder.layers[0].encoder_attn
    assert huggingface._is_cross_attention(cross, False, True, False)
    assert not huggingface._is_cross_attention(model.encoder.layers[0].self_attn, False, True, False)
    seen = {}

    def keep(module, inputs, output):
        seen[model.config._attn_implementation] = output[0]

    # Self-attention follows the pattern; without it, both calls have the same queries.
    model.decoder.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    cross.register_forward_hook(keep)
    for name in ("sdpa", "window"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            model(decoder_input_ids=ids, encoder_outputs=(source,), attention_mask=real)
    assert error(seen["window"], seen["sdpa"]) < 1e-10


def test_attention_to_an_unknown_sequence_raises():
    class Either(torch.nn.Module):
        def forward(self, hidden_states, key_value_states=None): ...

    attend = huggingface.attention_function(parse("window:3"))
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match="told apart"):
        attend(Either(), q, q, q, None, is_causal=False)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k)
    assert error(attend(Either(), q, k, k, None, is_causal=False)[0].transpose(1, 2), wanted) < 1e-5


def test_function_patterns_of_two_models_stay_apart(bert):
    """Patterns of functions have the same text."""
    ids, other = tokens(), copy.deepcopy(bert)
    near, far = (Pattern.from_mask_mod(lambda b, h, q, k, w=w: (q - k).abs() < w) for w in (3, 40))
    integrate(bert, near)
    with torch.no_grad():
        before = bert(ids)[0]
        integrate(other, far)
        assert torch.equal(bert(ids)[0], before)
        assert error(other(ids)[0], before) > 1e-3


def test_the_default_names():
    assert huggingface.register() == ("dap", "dilated", "block_sparse")
    huggingface.register({"dilated": "dilated:16x1,64x4", "block_sparse": "block_dilated:32x1,64x2;block=16"})


LEARNED = "learned:0.3;block=16;score_unit=4;hidden_dim=8;sink_blocks=0;local_blocks=1"
GROUPED = f"{LEARNED};select=group"


@pytest.mark.parametrize("padded", ["none", "left", "right"])
def test_learned_attention_of_all_blocks_is_their_own(llama, padded):
    ids = tokens()
    real = torch.ones_like(ids)
    if padded != "none":
        real[1, slice(None, 30) if padded == "left" else slice(60, None)] = 0
    with torch.no_grad():
        theirs = llama(ids, attention_mask=real).logits
        integrate(llama, "learned:1;block=16")
        assert error(llama(ids, attention_mask=real).logits[real.bool()], theirs[real.bool()]) < 1e-10
        integrate(llama, LEARNED)
        sparse = llama(ids, attention_mask=real).logits
        assert error(sparse[real.bool()], theirs[real.bool()]) > 1e-3


@pytest.mark.parametrize("before", [1, 16, 37])
def test_left_padding_does_not_shift_learned_blocks(llama, before):
    integrate(llama, LEARNED)
    ids, padding = tokens(), torch.zeros(2, before, dtype=torch.int64)
    real = torch.cat([padding, torch.ones_like(ids)], 1)
    real[1] = 1
    with torch.no_grad():
        wanted = llama(ids).logits[0]
        other = llama(torch.cat([padding + 7, ids], 1)).logits[1]
        found = llama(torch.cat([padding + 7, ids], 1), attention_mask=real, position_ids=real.cumsum(1) - real).logits
    assert error(found[0, before:], wanted) < 1e-10
    assert error(found[1], other) < 1e-10


def test_learned_scorers_train_save_and_load(llama, tmp_path):
    integrate(llama, {0: GROUPED, 1: "window:16"})
    names = [name for name, _ in llama.named_parameters() if "scorer" in name]
    assert names and all(name.startswith("model.layers.0.self_attn.dap_learned.scorer") for name in names)
    ids = tokens()
    llama.train()(ids, labels=ids).loss.backward()
    optimizer = torch.optim.SGD(llama.parameters(), 0.1)
    assert all(llama.get_parameter(name).grad.abs().sum() > 0 for name in names if "bias_1" not in name)
    optimizer.step()
    llama.eval().save_pretrained(tmp_path)

    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    integrate(again, {0: GROUPED, 1: "window:16"})
    state = load_file(tmp_path / "model.safetensors")
    assert not again.load_state_dict(state, strict=False).unexpected_keys
    assert torch.equal(again(ids).logits, llama(ids).logits)
    # The scorer stays where other attention is tried.
    integrate(llama, "model's own")
    integrate(llama, {0: GROUPED, 1: "window:16"})
    assert torch.equal(again(ids).logits, llama(ids).logits)


def test_learned_layers_decode_with_all_keys(llama):
    integrate(llama, LEARNED)
    ids = tokens(64)
    with torch.no_grad():
        first = llama(ids[:, :-1], use_cache=True)
        step = llama(ids[:, -1:], past_key_values=copy.deepcopy(first.past_key_values)).logits
        llama.set_attn_implementation("full")
        expected = llama(ids[:, -1:], past_key_values=first.past_key_values).logits
    assert error(step, expected) < 1e-10
    integrate(llama, LEARNED)
    for cache in ("dynamic", "static"):
        assert llama.generate(ids, max_new_tokens=4, do_sample=False, cache_implementation=cache).shape == (2, 68)


def test_learned_causal_model_does_not_look_ahead(llama):
    integrate(llama, LEARNED)
    ids = tokens()
    other = ids.clone()
    other[:, 70:] = 7
    with torch.no_grad():
        assert torch.equal(llama(ids).logits[:, :70], llama(other).logits[:, :70])


def test_learned_attention_is_refused_with_reasons(llama, bert):
    with pytest.raises(ValueError, match=r"causal layers as Llama's, got encoder.layer.0.attention: BertAttention has"):
        integrate(bert, LEARNED)
    sizes = {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 2}
    mistral = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=8))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn: MistralAttention has a window"):
        integrate(mistral, LEARNED)
    assert not any("dap_learned" in name for name, _ in mistral.named_modules())
    with pytest.raises(ValueError, match="learned attention must be given to a model"):
        huggingface.register({"learned": LEARNED})
    integrate(llama, LEARNED)
    ids = tokens(60)
    with pytest.raises(ValueError, match="causal mask of a whole sequence, got packed or bidirectional tokens"):
        llama(ids[:1], cu_seq_lens_q=torch.tensor([0, 20, 60]), cu_seq_lens_k=torch.tensor([0, 20, 60]))
    with pytest.raises(ValueError, match="learned attention must come without s_aux, softcap, output_attentions"):
        llama(ids, output_attentions=True)


def test_padded_batches_run_on_the_meta_device(llama):
    integrate(llama, "window:8")
    ids = tokens().to("meta")
    assert llama.to("meta")(ids, attention_mask=torch.ones_like(ids)).logits.is_meta


@pytest.mark.parametrize("pattern", [{1: "window:8"}, LEARNED])
def test_a_pickled_model_brings_its_patterns(llama, pattern):
    name, ids = integrate(llama, pattern), tokens()
    pickled = pickle.dumps(llama)
    with torch.no_grad():
        wanted = llama(ids).logits
        # As in another process.
        for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
            del interface._global_mapping[name]
        assert torch.equal(pickle.loads(pickled)(ids).logits, wanted)


def test_sparsify_distills_a_causal_model(llama):
    llama = llama.float()
    batches = [{"input_ids": tokens(128)} for _ in range(4)]
    before = {name: parameter.clone() for name, parameter in llama.named_parameters()}
    report = sparsify(llama, batches, 3, pattern=LEARNED, keep=0.0, progress=False)
    assert [row.layer for row in report.layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(torch.equal(llama.get_parameter(name), value) for name, value in before.items())
    again = copy.deepcopy(llama)
    integrate(again, dict(enumerate(report.patterns.values())))
    assert torch.equal(again(**batches[0]).logits, llama(**batches[0]).logits)
