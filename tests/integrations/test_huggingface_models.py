"""Hugging Face architectures with random weights: the masks of each model as patterns, against its eager attention."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from oracle import error

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import integrate
from dilated_attention_pytorch.integrations import huggingface

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="needs the extra `hf`")
    from transformers import masking_utils

pytestmark = pytest.mark.filterwarnings("ignore")
huggingface.register()

WINDOW = 8
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
TEXT = {**SIZES, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**TEXT, "num_key_value_heads": 2}
LOCAL = {**GROUPED, "head_dim": 8, "sliding_window": WINDOW}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}

DECODERS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**GROUPED, sliding_window=WINDOW)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**LOCAL, use_sliding_window=True, max_window_layers=1)
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**GROUPED, sliding_window=WINDOW)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**LOCAL, **MIXED, attn_logit_softcapping=0.5)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**LOCAL, **MIXED)),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(transformers.GptOssConfig(**LOCAL, **MIXED, **EXPERTS)),
    "llama4": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **GROUPED, head_dim=8, attention_chunk_size=WINDOW, intermediate_size_mlp=32, moe_layers=[],
            layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
        )
    ),
}  # fmt: skip
OTHERS = {
    # Both build a mask that no layer uses: of all keys after a cache dropped some, of a window of 0.
    "gemma3-local": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**LOCAL, layer_types=["sliding_attention"] * 2)
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(**GROUPED, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
    ),
    # Does not pass `output_attentions` to its layers.
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
}
ENCODERS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**TEXT), add_pooling_layer=False),
    "modernbert": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(
            **TEXT, local_attention=WINDOW, cls_token_id=1, sep_token_id=2,
            layer_types=["full_attention", "sliding_attention"],
        )
    ),
}  # fmt: skip


@cache
def model_of(name):
    """A model whose attention weights differ: usual initial values make attention nearly uniform."""
    torch.manual_seed(len(name))
    model = {**DECODERS, **ENCODERS, **OTHERS}[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
            elif parameter.numel() == 4:
                parameter.normal_(std=2.0)
    return model


def tokens(n=40, batch=2):
    return torch.randint(3, 50, (batch, n))


def padded(ids, side):
    real = torch.ones_like(ids)
    if side == "left":
        real[1, :13] = 0
    elif side == "right":
        real[1, 27:] = 0
    return real


def outputs_and_gradients(model, name, real, *arguments, **options):
    model.set_attn_implementation(name)
    model.zero_grad()
    found = model(*arguments, **options)[0]
    found = found if real is None else found[real.bool()]
    torch.manual_seed(3)
    (found * torch.randn_like(found)).sum().backward()
    return [found, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def compare(model, real, *arguments, **options):
    both = [outputs_and_gradients(model, name, real, *arguments, **options) for name in ("eager", "dap")]
    for wanted, got in zip(*both, strict=True):
        assert error(got, wanted) < 5e-5


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_own_masks_match_eager(name, side):
    ids = tokens()
    real = padded(ids, side)
    compare(model_of(name), real, ids, attention_mask=real)


@pytest.mark.parametrize("name", [*DECODERS])
def test_packed_documents_match_eager(name):
    lengths = (15, 3, 22)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    if name == "llama4":
        model_of(name).set_attn_implementation("dap")
        with pytest.raises(ValueError, match="packed documents must come with a causal mask or a window"):
            model_of(name)(tokens(40, 1), position_ids=positions, use_cache=False)
        return
    compare(model_of(name), None, tokens(40, 1), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_documents_of_bounds_match_single_ones(name):
    """GPT-OSS, BERT and ModernBERT ignore `position_ids` in their masks: bounds alone pack their documents."""
    model, ids, lengths = model_of(name), tokens(40, 1), (15, 3, 22)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packing = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 22, "max_length_k": 22}
    packing |= {"use_cache": False} if name in DECODERS else {}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        single = torch.cat([model(own)[0] for own in ids.split(lengths, 1)], 1)
        model.set_attn_implementation("dap")
        # Llama 4's mask refuses position ids that start again.
        place = {} if name == "llama4" else {"position_ids": positions}
        assert error(model(ids, **place, **packing)[0], single) < 5e-5


def test_rows_may_pack_different_documents():
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ((15, 25), (10, 10, 20))])
    compare(model_of("mistral"), None, tokens(), position_ids=positions, use_cache=False)
    compare(model_of("mistral"), None, tokens(), position_ids=positions[:1].expand(2, -1), use_cache=False)


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, cache) for name in DECODERS for cache in ("dynamic", "static")), *((name, "dynamic") for name in OTHERS)],
)
def test_generation_matches_eager(name, cache):
    model, ids = model_of(name), tokens(20)
    real = torch.ones_like(ids)
    real[1, :5] = 0
    logits = {}
    for implementation in ("eager", "dap"):
        model.set_attn_implementation(implementation)
        found = model.generate(
            ids, attention_mask=real, max_new_tokens=12, do_sample=False, output_logits=True, eos_token_id=None,
            return_dict_in_generate=True, cache_implementation=cache, disable_compile=True,
        )  # fmt: skip
        logits[implementation] = torch.stack(found.logits)
    assert error(logits["dap"], logits["eager"]) < 5e-5


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "llama4"])
def test_a_second_prompt_matches_eager(name):
    model, ids = model_of(name), tokens(60)
    logits = {}
    for implementation in ("eager", "dap"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            first = model(ids[:, :30], use_cache=True)
            logits[implementation] = model(ids[:, 30:], past_key_values=first.past_key_values).logits
    assert error(logits["dap"], logits["eager"]) < 5e-5


@pytest.mark.parametrize("name", ["gpt_oss", "mistral", "bert", "gpt2"])
def test_attention_weights_match_eager(name):
    model, ids = model_of(name), tokens()
    real = padded(ids, "right")
    found = {}
    for implementation in ("eager", "dap"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found[implementation] = model(ids, attention_mask=real, output_attentions=True).attentions
    for got, wanted in zip(found["dap"], found["eager"], strict=True):
        assert error(got * real[:, None, :, None], wanted * real[:, None, :, None]) < 1e-5


def test_vit_matches_eager():
    config = transformers.ViTConfig(**{**SIZES, "image_size": 16, "patch_size": 4})
    model = transformers.ViTModel(config, add_pooling_layer=False).eval()
    images = torch.randn(2, 3, 16, 16)
    compare(model, None, images)
    integrate(model, {1: "window:0"})
    with torch.no_grad():
        by_layer = model(images)[0]
        integrate(model, {0: "full", 1: "window:0"})
        assert torch.equal(model(images)[0], by_layer)
        integrate(model, "window:0")
        assert not torch.equal(model(images)[0], by_layer)
        integrate(model)
        assert not torch.equal(model(images)[0], by_layer)


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=20,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperModel(config).eval()


def test_whisper_matches_eager():
    model = whisper()
    compare(model.encoder, None, torch.randn(2, 8, 40))
    compare(model, None, torch.randn(2, 8, 40), decoder_input_ids=tokens(20))


T5_SIZES = {
    "vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 1,
    "eos_token_id": 2, "dropout_rate": 0.0,
}  # fmt: skip


@cache
def t5(name="T5"):
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**T5_SIZES)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # T5 does not scale scores.
            parameter.normal_(std=2.0 if "relative" in key else 0.2)
    return model


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["T5", "MT5", "UMT5"])
def test_t5_matches_eager(name, side):
    model, ids, targets = t5(name), tokens(), tokens(23)
    real = padded(ids, side)
    compare(model.encoder, real, ids, attention_mask=real)
    assert all(p.grad is not None for key, p in model.encoder.named_parameters() if "relative" in key)
    seen = torch.ones_like(targets)
    seen[1, 20:] = 0
    compare(model, seen, ids, attention_mask=real, decoder_input_ids=targets, decoder_attention_mask=seen)
    weights = [p.grad for key, p in model.named_parameters() if "relative_attention_bias" in key]
    assert len(weights) > 1 and all(grad.abs().max() > 0 for grad in weights)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_t5_generation_matches_eager(cache):
    model, ids = t5(), tokens(20)
    real = padded(ids, "none")
    real[1, 15:] = 0
    logits = {}
    for implementation in ("eager", "dap", integrate(model)):
        model.set_attn_implementation(implementation)
        found = model.generate(
            ids, attention_mask=real, max_new_tokens=24, do_sample=False, output_logits=True, eos_token_id=None,
            return_dict_in_generate=True, cache_implementation=cache, disable_compile=True,
        )  # fmt: skip
        logits[implementation] = torch.stack(found.logits)
        assert error(logits[implementation], logits["eager"]) < 5e-5


def test_patterns_restrict_t5_and_leave_its_bias():
    model, ids = t5(), tokens(40, 1)
    attend = huggingface.attention_function(huggingface.as_pattern("window:5"))
    module = model.encoder.block[0].layer[0].SelfAttention
    query, key, value = torch.randn(3, 1, 4, 40, 8).unbind()
    bias = type(module).compute_bias(module, 40, 40)
    found = attend(module, query, key, value, None, scaling=1.0, position_bias=bias)[0]
    distance = torch.arange(40)[:, None] - torch.arange(40)
    mask = bias.masked_fill(distance.abs() > 5, -torch.inf)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=1.0)
    assert error(found, wanted.transpose(1, 2).detach()) < 1e-5
    table = dap.t5_bias(module.relative_attention_bias.weight, max_distance=16)
    same = dap.attention(query, key, value, "window:5", scale=1.0, bias=table)
    assert error(found, same.transpose(1, 2).detach()) < 1e-6
    integrate(model, "window:5")
    assert model(ids, decoder_input_ids=ids).logits.isfinite().all()


def test_integrated_t5_has_no_bias_of_pairs():
    model, ids, targets = t5(), tokens(40), tokens(23)
    arguments = {"input_ids": ids, "decoder_input_ids": targets}
    wanted = outputs_and_gradients(model, "eager", None, **arguments)
    name = integrate(model)
    both = [model, copy.deepcopy(model)]
    for own in both:
        for got, expected in zip(outputs_and_gradients(own, name, None, **arguments), wanted, strict=True):
            assert error(got, expected) < 5e-5
        module = own.encoder.block[0].layer[0].SelfAttention
        assert module.compute_bias.__self__ is module
        assert module.compute_bias(100, 100).shape == (1, 4, 1, 199)
    logits = {}
    for implementation in ("eager", name):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            first = model(input_ids=ids, decoder_input_ids=targets, use_cache=True)
            cached = {"encoder_outputs": (first.encoder_last_hidden_state,), "past_key_values": first.past_key_values}
            logits[implementation] = model(decoder_input_ids=tokens(9).fill_(7), **cached).logits
    assert error(logits[name], logits["eager"]) < 5e-5
    model.set_attn_implementation("eager")
    assert model.encoder.block[0].layer[0].SelfAttention.compute_bias(100, 100).shape == (1, 4, 100, 100)


@pytest.mark.parametrize("is_bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 16), (12, 50)])
def test_t5_tables_hold_its_buckets(is_bidirectional, buckets, max_distance):
    weight = torch.randn(buckets, 3)
    distance = torch.arange(-300, 301)
    bucket = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket(
        distance, is_bidirectional, buckets, max_distance
    )
    table = dap.t5_bias(weight, is_bidirectional=is_bidirectional, max_distance=max_distance)
    found = table[:, (distance + max_distance).clamp(0, 2 * max_distance)]
    assert torch.equal(found, weight[bucket].t())


def test_biases_that_are_not_by_distance_raise():
    attend = huggingface.attention_function(huggingface.as_pattern("full"))
    module, query = torch.nn.Module(), torch.randn(1, 4, 10, 8)
    module.is_causal = module.is_decoder = False
    with pytest.raises(ValueError, match="position_bias must depend on the distance of query and key alone"):
        attend(module, query, query, query, None, position_bias=torch.randn(1, 4, 10, 10))
    with pytest.raises(ValueError, match=r"position_bias must have shape \(1, 4, 10, 10\)"):
        attend(module, query, query, query, None, position_bias=torch.zeros(2, 4, 10, 10))
    with pytest.raises(ValueError, match="output_attentions must come without softcap and position_bias"):
        attend(module, query, query, query, None, position_bias=torch.zeros(1, 4, 10, 10), output_attentions=True)
    module.is_decoder = True
    with pytest.raises(ValueError, match="position_bias of cross-attention must be 0"):
        attend(module, query, query, query, None, position_bias=torch.ones(1, 4, 10, 10))


def test_masks_of_the_model_code_are_refused():
    config = transformers.LlamaConfig(**GROUPED, attn_implementation="dap")
    embeds = torch.zeros(2, 40, 32)
    masks = (
        {"or_mask_function": lambda b, h, q, k: q == k},
        {"and_mask_function": lambda b, h, q, k: q == k},
    )
    for mask in masks:
        with pytest.raises(ValueError, match="a mask function of its own"):
            masking_utils.create_causal_mask(config, embeds, attention_mask=None, past_key_values=None, **mask)
    model = model_of("llama")
    model.set_attn_implementation("dap")
    with pytest.raises(TypeError, match="write them as a pattern"):
        model(tokens(), attention_mask=torch.ones(2, 1, 40, 40).tril().log())


def test_masks_are_for_attention_functions_alone():
    """Code of a model that computes with the values of a mask would take each query to see every key."""
    real = padded(tokens(), "left")
    mask = huggingface.model_mask(q_length=40, kv_length=40, attention_mask=real)
    for copied in (mask.contiguous(), mask.detach(), mask.clone(), mask.to("cpu", torch.bool)):
        assert copied.dap_mask is mask.dap_mask
    assert mask.dim() == 4 and mask.shape[-1] == 40 and not mask.is_floating_point()
    for compute in (lambda: mask + 0.0, lambda: mask[:, 0], lambda: torch.where(mask, 1, 0), mask.any):
        with pytest.raises(ValueError, match="mask must be read by attention functions alone"):
            compute()
    vision = {**SIZES, "image_size": 16, "patch_size": 4}
    model = transformers.GitForCausalLM(transformers.GitConfig(**TEXT, vision_config=vision)).eval()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"other code in .*GitSelfAttention"):
        integrate(model, "window:3")
    assert model.config._attn_implementation == before
    integrate(model)
    with pytest.raises(ValueError, match=r"attention functions alone|mask function of its own"):
        model(tokens())


def test_models_need_attention_of_the_interface():
    config = transformers.MambaConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, state_size=2)
    model = transformers.MambaModel(config)
    for pattern in ("window:3", "model's own"):
        with pytest.raises(ValueError, match="AttentionInterface, got no such module in MambaModel"):
            integrate(model, pattern)


HARMLESS = {"output_attentions", "position_ids", "deterministic", "max_length_q", "max_length_k"}
HARMLESS |= {"query_states", "key_states", "value_states", "module", "kwargs"}


def test_no_argument_of_a_model_is_ignored():
    """Arguments of attention functions in transformers' sources are honoured, refused or without effect."""
    arguments = set(inspect.signature(huggingface.attention_function(dap.Full())).parameters)
    arguments |= {*huggingface.UNSUPPORTED, *huggingface.PACKING, "cu_seq_lens_q", *HARMLESS}
    called = re.compile(
        r"^( *)\S[^\n]*= (?:attention_interface|attn_function)\(\n(.*?)\n\1\)", re.DOTALL | re.MULTILINE
    )
    declared = re.compile(r"^def \w*eager_attention\w*\((.*?)\)(?: ->[^\n]*)?:\n", re.DOTALL | re.MULTILINE)
    unknown = set()
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text()
        lines = "\n".join([*(call for _, call in called.findall(text)), *declared.findall(text)])
        names = re.findall(r"^ +(\w+) ?[=:]", lines, re.MULTILINE)
        unknown |= {(path.parent.name, name) for name in names if name not in arguments}
    assert not unknown


@pytest.mark.skipif(not hasattr(masking_utils, "blockwise_overlay"), reason="this transformers has no block ids")
@pytest.mark.parametrize("make", ["create_causal_mask", "create_sliding_window_causal_mask"])
def test_bidirectional_prefixes_match_eager(make):
    """As models of images and text mask them: blocks of an image see each other, text is causal."""
    blocks = torch.full((2, 40), -1)
    blocks[0, :12], blocks[1, 3:9], blocks[1, 20:30] = 0, 0, 1
    query, key, value = torch.randn(3, 2, 4, 40, 8).unbind()
    real = padded(blocks, "right")
    module, found = torch.nn.Module(), {}
    module.num_key_value_groups, module.training = 1, False
    for name in ("sdpa", "dap"):
        config = transformers.MistralConfig(**GROUPED, sliding_window=WINDOW, attn_implementation=name)
        mask = getattr(masking_utils, make)(
            config, torch.zeros(2, 40, 32), attention_mask=real, past_key_values=None, block_sequence_ids=blocks
        )
        found[name] = transformers.AttentionInterface()[name](module, query, key, value, mask)[0]
    assert error(found["dap"][real.bool()], found["sdpa"][real.bool()]) < 1e-5


PATTERNS = ["dilated:4x1,16x4", "window:5 | global:2", "dilated:4x1,16x4 & window:9"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_left_padding_does_not_shift_patterns(name, pattern):
    model, ids = model_of(name), tokens()
    integrate(model, pattern)
    real = padded(ids, "left")
    with torch.no_grad():
        batch = model(ids, attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0))[0]
        alone = model(ids[1:, 13:])[0]
    assert error(batch[1:, 13:], alone) < 1e-5
    assert error(batch[:1], model(ids[:1])[0].detach()) < 1e-5


def test_samples_keep_their_order():
    model, ids = model_of("llama"), tokens(40, 4)
    integrate(model, PATTERNS[0])
    starts = torch.tensor([0, 13, 7, 0])
    real = (torch.arange(40) >= starts[:, None]).long()
    with torch.no_grad():
        batch = model(ids, attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0))[0]
        for b, start in enumerate(starts.tolist()):
            assert error(batch[b : b + 1, start:], model(ids[b : b + 1, start:])[0]) < 1e-5


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_patterns_generate_what_the_forward_gives(name, cache):
    model, ids = model_of(name), tokens(20)
    integrate(model, "dilated:4x1,16x4")
    real = torch.ones_like(ids)
    real[1, :5] = 0
    found = model.generate(
        ids, attention_mask=real, max_new_tokens=12, do_sample=False, output_logits=True, eos_token_id=None,
        return_dict_in_generate=True, cache_implementation=cache, disable_compile=True,
    )  # fmt: skip
    with torch.no_grad():
        whole = [model(found.sequences[:1])[0], model(found.sequences[1:, 5:])[0]]
    wanted = torch.cat([logits[:, -13:-1] for logits in whole])
    assert error(torch.stack(found.logits, 1), wanted) < 1e-5


def reach(model, ids, layer):
    """Tokens that change with token 20, after the layers up to one."""
    other = ids.clone()
    other[:, 20] = ids[:, 20] % 40 + 3
    with torch.no_grad():
        states = [model(x, output_hidden_states=True).hidden_states[layer + 1] for x in (ids, other)]
    return (states[0] - states[1]).abs().amax(-1)[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_layers_take_patterns_of_their_own(name):
    model, ids = model_of(name), tokens()
    integrate(model, {0: "window:2"})
    around = range(20, 23) if name == "llama" else range(18, 23)
    assert reach(model, ids, 0) == list(around)
    assert len(reach(model, ids, 1)) == (20 if name == "llama" else 40)
    integrate(model, {1: "window:2"})
    assert len(reach(model, ids, 0)) == (20 if name == "llama" else 40)
    with pytest.raises(ValueError, match=r"layer indices must be among \[0, 1\], got \[2\]"):
        integrate(model, {2: "window:2"})


def test_a_pattern_stays_within_the_window_of_a_model():
    model, ids = model_of("mistral"), tokens()
    integrate(model, "window:20")
    assert reach(model, ids, 0) == list(range(20, 20 + WINDOW))
    integrate(model, "window:3")
    assert reach(model, ids, 0) == list(range(20, 24))


def test_only_hugging_face_models_are_integrated():
    with pytest.raises(TypeError, match=r"must be a transformers\.PreTrainedModel, got Linear"):
        integrate(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="pattern"):
        integrate(model_of("llama"), "no such pattern")


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "fullgraph"), [("llama", True), ("bert", True), ("t5", True), ("mistral", False), ("gpt_oss", False)]
)
def test_compiled_models_match_eager_mode(name, fullgraph):
    """Dynamo reads no variable that a mask function captured, so that masks of windows break the graph."""
    torch._dynamo.reset()
    model, ids = t5().encoder if name == "t5" else model_of(name), tokens()
    integrate(model)
    options = {"attention_mask": padded(ids, "right")} | ({} if name in ("bert", "t5") else {"use_cache": False})
    compiled = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")
    with torch.no_grad():
        assert error(compiled(ids, **options)[0], model(ids, **options)[0]) < 1e-5
