"""Hugging Face models built from small configurations: padding, grouped heads, generation, switching live."""

from __future__ import annotations

import warnings

import pytest
import torch
from oracle import error

from dilated_attention_pytorch.integrations import huggingface

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="needs the extra `hf`")

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
    attend = huggingface.attention_function(huggingface.parse("window:3"))
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    module = torch.nn.Module()
    with pytest.raises(ValueError, match="softcap"):
        attend(module, q, q, q, None, softcap=3.0)
    with pytest.raises(ValueError, match="output_attentions"):
        attend(module, q, q, q, None, output_attentions=True)
    with pytest.raises(TypeError, match="as a pattern"):
        attend(module, q, q, q, torch.zeros(1, 1, 5, 5))
    with pytest.raises(ValueError, match="Cross-attention"):
        attend(module, q, k, k, None, is_causal=False)
    with pytest.raises(ValueError, match="dropout"):
        attend(module, q, k, k, None, dropout=0.1)
    with pytest.raises(ValueError, match="length must be given"):
        huggingface.attention_function(huggingface.parse("random:0.5"))(module, q, k, k, None)
    llama.set_attn_implementation("dilated")
    with pytest.raises(ValueError, match="dynamic"):
        llama.generate(tokens(20), max_new_tokens=3, cache_implementation="static", pad_token_id=0)


def test_a_sliding_window_model_is_refused():
    config = transformers.MistralConfig(
        **SIZES, num_hidden_layers=1, num_key_value_heads=2, sliding_window=8, attn_implementation="dilated"
    )
    with pytest.raises(ValueError, match="sliding"):
        transformers.MistralForCausalLM(config)(tokens())


def test_the_default_names():
    assert huggingface.register() == ("dilated", "block_sparse")
    huggingface.register({"dilated": "dilated:16x1,64x4", "block_sparse": "block_dilated:32x1,64x2;block=16"})
