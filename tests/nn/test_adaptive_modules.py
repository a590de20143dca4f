"""Learned selection in the places modules have: between projections, in factories, under autocast and a compiler."""

from __future__ import annotations

import copy
import io

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
from dilated_attention_pytorch.nn import adaptive as adaptive_module


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


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_torch_is_quicker_at_comes_out_the_same(is_causal, monkeypatch):
    layer = BlockSparseAdaptive([256], [1], 2, 16, AdaptiveConfig(dense_below=101), softmax_scale=0.7).double().eval()
    x = torch.randn(3, 1, 100, 2, 16, dtype=torch.float64).unbind()
    wanted = layer(*x, is_causal)
    monkeypatch.setattr(adaptive_module, "_for_torch", lambda *_: True)
    monkeypatch.setattr(adaptive_module, "attention", None)
    assert error(layer(*x, is_causal), wanted) < 1e-12


@pytest.mark.compile
def test_compiled_models_may_hold_it():
    module = multihead(adaptive_config=AdaptiveConfig(base_sparsity=0.5)).eval()
    x = torch.randn(1, 100, 32)
    # Where a graph breaks, the tracer looks at gradients in a way that warns.
    with torch.no_grad():
        found = torch.compile(module, backend="eager")(x, is_causal=True)[0]
        assert error(found, module(x, is_causal=True)[0]) < 1e-6


def together(layer):
    """Whether the heads' parameters are read where they lie; what is read must be those parameters in any case."""
    scorer = layer.scorer.importance
    where = []
    with torch.no_grad():
        found = [part for layer in scorer.layers(torch.float32) for part in layer]
        for own, made in zip(scorer.leaves(), found, strict=True):
            assert torch.equal(made, torch.stack([x.float() for x in own]))
            where.append(made.data_ptr() == own[0].data_ptr())
    assert len(set(where)) == 1
    return where[0]


def adaptive(**options):
    return BlockSparseAdaptive([256], [1], 4, 8, AdaptiveConfig(0.5, hidden_dim=16, **options), block_size=16)


def test_parameters_of_all_heads_are_read_where_they_lie():
    layer = adaptive()
    kept = {name: value.clone() for name, value in layer.state_dict().items()}
    assert together(layer)
    assert together(copy.deepcopy(layer))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert together(torch.load(file, weights_only=False))
    parameters = list(layer.parameters())
    assert together(layer.double().float())
    assert all(one is other for one, other in zip(layer.parameters(), parameters, strict=True))
    assert all(torch.equal(value, kept[name]) for name, value in layer.state_dict().items())
    output = layer(*torch.randn(3, 1, 64, 4, 8).unbind())
    output.sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    assert together(layer)
    assert not torch.equal(layer.scorer.importance.scorers[3][0].weight, kept["scorer.importance.scorers.3.0.weight"])


@pytest.mark.parametrize("share", [False, True])
def test_parameters_that_lie_elsewhere_are_gathered(share):
    layer = adaptive(share_across_heads=share)
    state = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    layer.load_state_dict(state)
    assert together(layer)
    layer.load_state_dict(state, assign=True)
    # One for all heads lies wherever it lies.
    assert together(layer) == share
    assert together(layer.to("cpu"))
    for own in layer.scorer.importance.scorers:
        # Square, so that its other memory order is a view in the same place.
        own[0].weight.data = own[0].weight.data.T
    with torch.no_grad():
        found = layer.scorer.importance.layers(torch.float32)[0][0]
    assert torch.equal(found, torch.stack([own[0].weight for own in layer.scorer.importance.scorers]))


def test_parameters_that_become_shorter_in_place_are_seen():
    layer = adaptive()
    assert together(layer)
    for own in layer.scorer.importance.scorers:
        own[0].weight.data = own[0].weight.data[:8]
    with torch.no_grad():
        assert layer.scorer.importance.layers(torch.float32)[0][0].shape[1] == 8


def test_memory_that_others_share_is_not_left():
    layer = adaptive()
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    leaf = layer.scorer.importance.scorers[1][0].weight
    flat = torch.zeros(2 * leaf.numel())
    leaf.data = flat[: leaf.numel()].view_as(leaf)
    layer.to("cpu")
    flat += 1
    assert bool((leaf == 1).all())
    with torch.no_grad():
        assert bool((layer.scorer.importance.layers(torch.float32)[0][0][1] == 1).all())
    shared = adaptive().share_memory()
    assert all(x.is_shared() for x in shared.float().parameters())
    assert together(shared)


def test_parameters_without_memory_or_with_gradients_are_gathered():
    scorer = adaptive().scorer.importance
    weight, bias = copy.deepcopy(scorer).to("meta").layers(torch.float32)[0]
    assert (weight.shape, bias.shape) == ((4, 16, 16), (4, 16))
    scorer.layers(torch.float32)[0][0][2].sum().backward()
    grads = [own[0].weight.grad for own in scorer.scorers]
    assert [float(grad.mean()) for grad in grads] == [0.0, 0.0, 1.0, 0.0]
    x = torch.randn(2, 4, 5, 8)
    given = {name: torch.stack([value, value + 1]) for name, value in scorer.state_dict().items()}
    with torch.no_grad():
        called = torch.func.vmap(lambda one: torch.func.functional_call(scorer, one, (x, x)))(given)
        assert error(called[0], scorer(x, x)) < 1e-6
        for parameter in scorer.parameters():
            parameter += 1
        assert error(called[1], scorer(x, x)) < 1e-6


@pytest.mark.compile
def test_what_is_exported_depends_on_every_parameter():
    scorer = adaptive().scorer.importance
    x = torch.randn(2, 4, 5, 8)
    with torch.no_grad():
        exported = torch.export.export(scorer, (x, x)).module()
        for one, other in zip(exported.parameters(), scorer.parameters(), strict=True):
            drawn = torch.randn_like(one)
            one.data, other.data = drawn, drawn.clone()
        assert error(exported(x, x), scorer(x, x)) < 1e-6
