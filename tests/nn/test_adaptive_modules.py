"""Learned selection in the places modules have: between projections, in factories, under autocast and a compiler."""

from __future__ import annotations

import pytest
import torch
from oracle import error

from dilated_attention_pytorch.nn import (
    AdaptiveConfig,
    BlockSparseAdaptive,
    MultiheadBlockSparseAdaptive,
    create_adaptive_block_sparse,
    create_block_sparse_attention,
    get_block_sparse_preset,
)


def multihead(**options):
    return MultiheadBlockSparseAdaptive(32, 4, [256], [1], block_size=16, **options)


def test_the_multihead_form_is_the_core_between_projections():
    module = multihead(adaptive_config=AdaptiveConfig(base_sparsity=0.5), position="rotary", num_kv_heads=2).eval()
    x = torch.randn(2, 100, 32)
    output, weights = module(x, is_causal=True)
    assert weights is None
    assert output.shape == x.shape
    late = x.clone()
    late[:, 60:] += 1
    assert torch.equal(module(late, is_causal=True)[0][:, :60], output[:, :60])
    swapped = multihead(
        adaptive_config=AdaptiveConfig(base_sparsity=0.5), position="rotary", num_kv_heads=2, batch_first=False
    )
    swapped.load_state_dict(module.state_dict())
    assert torch.equal(swapped.eval()(x.transpose(0, 1), is_causal=True)[0].transpose(0, 1), output)
    causal_mask = torch.ones(100, 100, dtype=torch.bool).triu(1)
    assert torch.equal(module(x, attn_mask=causal_mask)[0], output)


def test_factories_and_the_preset():
    assert get_block_sparse_preset("adaptive_standard").config == AdaptiveConfig()
    made = create_adaptive_block_sparse(base_sparsity=0.8, temperature=2.0, learnable_temperature=True, head_dim=32)
    assert isinstance(made, BlockSparseAdaptive)
    assert (made.num_heads, made.head_dim, made.config.base_sparsity, made.config.temperature) == (8, 32, 0.8, 2.0)
    assert create_block_sparse_attention("adaptive", sparsity_ratio=0.25).config.kept == 0.25
    assert isinstance(
        create_block_sparse_attention("adaptive", embed_dim=64, num_heads=4), MultiheadBlockSparseAdaptive
    )
    assert create_block_sparse_attention(adaptive_config=AdaptiveConfig(k_min=3), num_heads=4).config.k_min == 3


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: create_adaptive_block_sparse(warmth=1), TypeError, "warmth"),
        (lambda: create_adaptive_block_sparse(k_min=1, adaptive_config=AdaptiveConfig()), ValueError, "k_min"),
        (lambda: create_block_sparse_attention("adaptive", sparsity_ratio=0.1, adaptive_config=AdaptiveConfig()), ValueError, "both"),
        (lambda: create_block_sparse_attention(adaptive_config=AdaptiveConfig(), length=64), ValueError, "length"),
        (lambda: multihead()(torch.randn(1, 8, 32), need_weights=True), ValueError, "return_pattern"),
        (lambda: multihead()(torch.randn(1, 8, 32), attn_mask=torch.eye(8).bool()), ValueError, "attn_mask"),
        (lambda: multihead().plan(64), ValueError, "learned"),
        (lambda: multihead().core.plan(64), ValueError, "learned"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_it_says_what_it_would_keep():
    layer = BlockSparseAdaptive([256], [1], 2, 16, AdaptiveConfig(base_sparsity=0.75, dense_below=512), block_size=64)
    said = layer.explain(1024)
    assert "each block of 64 queries" in said and "2 to 4 of the 16 blocks" in said and "below 512 tokens" in said
    assert "each token" in layer.explain(1024, is_causal=True)
    x = torch.randn(1, 1024, 2, 16)
    _, pattern = layer.eval()(x, x, x, return_pattern=True)
    kept = pattern.selection.allowed().sum(-1)
    assert kept.min() >= 2 and kept.max() <= 4
    cover = BlockSparseAdaptive([256], [1], 2, 16, AdaptiveConfig(adaptive_ratio=0.9), block_size=64)
    assert "2 to 16 of the 16 blocks of 64 keys, as many as hold 0.9" in cover.explain(1024)
    assert "BlockSparseAdaptive at 64 tokens" in multihead().explain(64)


def test_it_is_made_where_and_of_what_is_asked():
    module = BlockSparseAdaptive([256], [1], 2, 16, dtype=torch.bfloat16)
    assert {x.dtype for x in module.parameters()} == {torch.bfloat16}
    assert BlockSparseAdaptive([256], [1], 2, 16, device="meta").scorer.summary.is_meta
    assert "8 heads of 64" in repr(BlockSparseAdaptive([256], [1]))


def test_autocast_chooses_as_without():
    module = multihead(adaptive_config=AdaptiveConfig(base_sparsity=0.5)).eval()
    x = torch.randn(1, 100, 32)
    wanted = module(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module(x)[0]
    assert found.dtype == torch.bfloat16
    assert error(found, wanted) < 0.1
    core = module.core
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert core(*torch.randn(3, 1, 100, 4, 8)).dtype == torch.bfloat16


@pytest.mark.compile
def test_compiled_models_may_hold_it():
    module = multihead(adaptive_config=AdaptiveConfig(base_sparsity=0.5)).eval()
    x = torch.randn(1, 100, 32)
    # Where a graph breaks, the tracer looks at gradients in a way that warns.
    with torch.no_grad():
        found = torch.compile(module, backend="eager")(x, is_causal=True)[0]
        assert error(found, module(x, is_causal=True)[0]) < 1e-6
