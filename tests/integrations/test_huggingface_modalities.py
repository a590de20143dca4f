"""Models of images, layouts and audio by `integrate`, against their eager attention: masks of their own making."""

from __future__ import annotations

import warnings

import pytest
import torch
from oracle import error

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.integrations.huggingface_masks import given_mask, model_mask

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="needs the extra `hf`")

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}
TEXT |= {"eos_token_id": 2}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
VISION = {**SIZES, "image_size": 32, "patch_size": 8}
SPEECH = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
IMAGE = 95


def words(image_tokens=0, n=30):
    ids = torch.randint(5, 90, (2, n))
    ids[:, 2 : 2 + image_tokens] = IMAGE
    return ids


def real_of(ids, side="left"):
    real = torch.ones_like(ids)
    real[1, slice(0, 2) if side == "left" else slice(-7, None)] = 0
    return real


def pictures():
    return torch.randn(2, 3, 32, 32)


def siglip2():
    """Attention pooling with a mask of padding."""
    sizes = {**SIZES, "patch_size": 8, "num_patches": 16}
    model = transformers.Siglip2Model(transformers.Siglip2Config(text_config=TEXT, vision_config=sizes))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    images = {"pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[4, 4], [4, 3]])}
    return model, {"input_ids": words(), "pixel_values": torch.randn(2, 16, 192), **images}


def gemma3():
    """Images see each other within the window of a layer."""
    layers = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
    config = transformers.Gemma3Config(
        text_config={**GROUPED, **layers}, vision_config=vision, image_token_id=IMAGE, mm_tokens_per_image=16
    )
    ids = words(16)
    options = {"token_type_ids": (ids == IMAGE).long(), "attention_mask": real_of(ids)}
    return transformers.Gemma3ForConditionalGeneration(config), {
        "input_ids": ids, "pixel_values": pictures(), **options,
    }  # fmt: skip


def pixtral():
    """Images of a batch in one row, each in a block of a dense mask."""
    model = transformers.PixtralVisionModel(transformers.PixtralVisionConfig(**VISION, head_dim=8))
    return model, {"pixel_values": pictures(), "image_sizes": torch.tensor([[32, 32], [32, 24]])}


def blip2():
    """Self-attention and cross-attention in modules of one class."""
    text = {**TEXT, "model_type": "opt", "ffn_dim": 32, "word_embed_proj_dim": 32}
    config = transformers.Blip2Config(
        vision_config=VISION, qformer_config={**TEXT, "encoder_hidden_size": 32, "cross_attention_frequency": 1},
        text_config=text, num_query_tokens=4, image_token_index=IMAGE,
    )  # fmt: skip
    ids = words(4)
    options = {"input_ids": ids, "attention_mask": real_of(ids), "pixel_values": pictures()}
    return transformers.Blip2ForConditionalGeneration(config), options


def layoutlm():
    """A mask (B, 1, 1, keys) that the model makes itself."""
    model = transformers.LayoutLMModel(transformers.LayoutLMConfig(**TEXT, max_2d_position_embeddings=64))
    ids = words()
    boxes = torch.randint(0, 30, (2, 30, 4)).sort(-1).values
    return model, {"input_ids": ids, "attention_mask": real_of(ids, "right"), "bbox": boxes}


def segformer():
    """Fewer keys than queries."""
    sizes = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_attention_heads": [2, 4], "sr_ratios": [4, 2]}
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, **sizes, patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], drop_path_rate=0.0
    )
    return transformers.SegformerModel(config), {"pixel_values": pictures()}


def moonshine_streaming():
    """Windows by a mask function of the model's own."""
    encoder = {**SIZES, "num_key_value_heads": 4, "sliding_windows": ((6, 3), (6, 0))}
    config = transformers.MoonshineStreamingConfig(encoder_config=encoder, **SIZES, num_key_value_heads=4, **SPEECH)
    real = torch.ones(2, 4000, dtype=torch.long)
    real[1, 2400:] = 0
    options = {"input_values": torch.randn(2, 4000), "attention_mask": real, "decoder_input_ids": words(n=12)}
    return transformers.MoonshineStreamingForConditionalGeneration(config), options


MODELS = [siglip2, gemma3, pixtral, blip2, layoutlm, segformer, moonshine_streaming]


def made(build):
    torch.manual_seed(1)
    model, inputs = build()
    with torch.no_grad():
        for parameter in model.eval().parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    return model, inputs


def rows_of(model, inputs):
    output = model(**inputs)
    names = ("logits", "logits_per_image", "last_hidden_state")
    rows = next(output[name] for name in names if output.get(name) is not None)
    real = inputs.get("attention_mask")
    return rows[real.bool()] if real is not None and real.shape == rows.shape[:2] else rows


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_outputs_and_gradients_match_eager(build):
    model, inputs = made(build)
    found = []
    for implementation in ("eager", None):
        model.set_attn_implementation(implementation) if implementation else dap.integrate(model)
        model.zero_grad()
        rows = rows_of(model, inputs)
        (rows * torch.linspace(-1, 1, rows.numel()).view_as(rows)).sum().backward()
        found.append([rows.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert error(found[1][0], found[0][0]) < 5e-5
    # Gradients of key biases are 0 up to the rounding of their terms.
    largest = max(float(grad.abs().max()) for grad in found[0][1:])
    for wanted, got in zip(found[0][1:], found[1][1:], strict=True):
        assert float((got - wanted).abs().max()) < 5e-5 * largest


@pytest.mark.parametrize("name", ["Siglip", "Aimv2"])
def test_patterns_leave_attention_pooling_alone(name):
    """The query of a pooling head attends to all tokens."""
    config = getattr(transformers, f"{name}VisionConfig")(**VISION)
    model = getattr(transformers, f"{name}VisionModel")(config).eval()
    with torch.no_grad():
        before = model(pictures())
        dap.integrate(model, "window:2")
        after = model(pictures())
    assert after.pooler_output.shape == before.pooler_output.shape
    assert error(after.last_hidden_state, before.last_hidden_state) > 1e-4


def test_models_that_join_masks_are_refused():
    """DeepSeek-V4 and T5Gemma 2 concatenate masks, whose values for pairs do not exist."""
    mask = model_mask(q_length=8, kv_length=8, batch_size=1)
    with pytest.raises(ValueError, match="attention functions alone, got cat in the model's code"):
        torch.cat([mask, torch.ones(1, 1, 8, 4, dtype=torch.bool)], -1)


def test_dense_masks_other_than_documents_are_refused():
    causal = torch.ones(1, 1, 8, 8).tril().log()
    with pytest.raises(TypeError, match="Dense masks cannot be honoured"):
        given_mask(causal, True, None, 8, 8)
    with pytest.raises(ValueError, match="must be 0, or at most -1e4 where a key is ignored"):
        given_mask(torch.full((1, 1, 1, 8), -1.0), False, None, 8, 8)
    documents = torch.block_diag(torch.ones(3, 3), torch.ones(5, 5))[None, None].log()
    assert given_mask(documents, True, None, 8, 8).documents == ((3, 5),)
