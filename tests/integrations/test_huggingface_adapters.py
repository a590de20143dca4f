"""BLOOM, MPT and Falcon by `integrate`, against their own attention."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from oracle import error

import dilated_attention_pytorch as dap

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="needs the extra `hf`")

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 36}
FALCON = {**WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    # Six heads: slopes of two sequences.
    "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**WORDS, n_layer=2, n_head=6)),
    "mpt": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(**{**WORDS, "d_model": 36}, n_layers=2, n_heads=6, max_seq_len=64)
    ),
    "falcon-7b": lambda: transformers.FalconForCausalLM(transformers.FalconConfig(**FALCON)),
    "falcon-40b": lambda: transformers.FalconForCausalLM(
        transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2)
    ),
}


def both_of(name, pattern="model's own"):
    torch.manual_seed(len(name))
    eager = MODELS[name]().eval()
    for parameter in eager.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    eager.config._attn_implementation = "eager"
    ours = copy.deepcopy(eager)
    dap.integrate(ours, pattern)
    return eager, ours


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_match_eager(name, side):
    ids = torch.randint(3, 50, (2, 40))
    real = torch.ones_like(ids)
    real[1, slice(0, 13) if side == "left" else slice(40 if side == "none" else 27, 40)] = 0
    found = []
    for model in both_of(name):
        logits = model(ids, attention_mask=None if side == "none" else real).logits[real.bool()]
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        found.append([logits, *(p.grad for p in model.parameters())])
    for wanted, got in zip(*found, strict=True):
        assert error(got, wanted.detach()) < 5e-5


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_matches_eager(name, cache):
    ids = torch.randint(3, 50, (2, 20))
    real = torch.ones_like(ids)
    real[1, :5] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"cache_implementation": cache, "disable_compile": True, "eos_token_id": None}
    wanted, found = (torch.stack(m.generate(ids, attention_mask=real, **options).logits) for m in both_of(name))
    assert error(found, wanted) < 5e-5


@pytest.mark.parametrize("name", MODELS)
def test_patterns_restrict_by_layer_and_copies_keep_them(name):
    eager, ours = both_of(name, {1: "window:3"})
    ids = torch.randint(3, 50, (1, 30))
    with torch.no_grad():
        assert error(ours(ids[:, :4]).logits, eager(ids[:, :4]).logits) < 5e-5
        assert error(ours(ids).logits, eager(ids).logits) > 1e-2
        assert torch.equal(copy.deepcopy(ours)(ids).logits, ours(ids).logits)


@pytest.mark.parametrize("name", MODELS)
def test_other_implementations_restore_the_model(name):
    eager, ours = both_of(name, "window:3")
    integrated = pickle.loads(pickle.dumps(ours))
    ids = torch.randint(3, 50, (1, 30))
    with torch.no_grad():
        assert torch.equal(integrated(ids).logits, ours(ids).logits)
        dap.integrate(ours)
        ours.set_attn_implementation("eager")
        assert torch.equal(ours(ids).logits, eager(ids).logits)
        assert not torch.equal(integrated(ids).logits, eager(ids).logits)


def test_gaps_in_the_padding_of_bloom_are_refused():
    _, ours = both_of("bloom")
    real = torch.ones(1, 30, dtype=torch.long)
    real[0, 10:12] = 0
    with pytest.raises(ValueError, match="must ignore tokens at the sides alone, got gaps"):
        ours(torch.randint(3, 50, (1, 30)), attention_mask=real)


def test_empty_batches_give_empty_logits():
    _, ours = both_of("falcon-7b")
    assert ours(torch.zeros(0, 30, dtype=torch.long)).logits.shape == (0, 30, 50)


def test_rounded_alibi_of_falcon_is_refused():
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**FALCON, alibi=True))
    with pytest.raises(ValueError, match="AttentionInterface"):
        dap.integrate(model)
