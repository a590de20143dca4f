"""Learned selection in the places modules have: between projections, in factories, under autocast and a compiler."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace

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


class SaidToBeOnGpu(torch.Tensor):
    """A tensor that is taken for one on a GPU, and computed with where it is."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True


def on_gpu(*shapes, dtype=torch.bfloat16):
    return [torch.randn(shape, dtype=dtype).as_subclass(SaidToBeOnGpu) for shape in shapes]


def told_dense(**options):
    return BlockSparseAdaptive([256], [1], 2, 16, AdaptiveConfig(dense_below=101), **options).eval()


class Torchs(Exception):
    """Raised in place of torch's attention."""


def is_torchs(layer, *x, **options):
    """Whether a call is answered by torch's attention, which the tests let raise `Torchs`."""
    try:
        layer(*x, **options)
    except Torchs:
        return True
    return False


@pytest.fixture
def torch_raises(monkeypatch):
    def attend(*_, **__):
        raise Torchs

    monkeypatch.setattr(adaptive_module.F, "scaled_dot_product_attention", attend)


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_what_torch_is_quicker_at_comes_out_the_same(is_causal, monkeypatch):
    layer = told_dense(softmax_scale=0.7)
    x = on_gpu(*[(1, 100, 2, 16)] * 3)
    wanted = layer(*(t.as_subclass(torch.Tensor).double() for t in x), is_causal)
    monkeypatch.setattr(adaptive_module, "attention", None)
    layer.remember(torch.zeros(()), None)
    assert error(layer(*x, is_causal), wanted) < 1e-2
    assert layer.statistics() == {"density": 1.0}
    assert copy.deepcopy(layer).statistics() == {"density": 1.0}


@torch.no_grad()
def test_torch_is_asked_for_no_more_than_it_gives(torch_raises):
    layer, shape = told_dense(), (1, 100, 2, 16)
    x = on_gpu(shape, shape, shape)
    assert is_torchs(layer, *x)
    assert is_torchs(layer, *x, is_causal=True)
    assert not is_torchs(layer, *x, return_pattern=True)
    assert not is_torchs(layer, *x, key_padding_mask=torch.zeros(1, 100, dtype=torch.bool))
    assert not is_torchs(layer, *on_gpu(shape, shape, shape, dtype=torch.float32))
    assert not is_torchs(layer, *on_gpu(*[(1, 101, 2, 16)] * 3))
    assert not is_torchs(layer, *on_gpu(shape, *[(1, 100, 1, 16)] * 2))
    with torch.enable_grad():
        assert not is_torchs(layer, *x)
    # What cannot be meant is refused in our words.
    for wrong, words in (((1, 100, 3, 16), "2 heads of 16"), ((100, 2, 16), "batch, n, heads, width")):
        with pytest.raises(ValueError, match=words):
            layer(*on_gpu(wrong, wrong, wrong))
    with pytest.raises((TypeError, ValueError), match="dtype"):
        layer(*x[:2], *on_gpu(shape, dtype=torch.float16))


@torch.no_grad()
def test_settings_that_change_later_decide_who_attends(torch_raises):
    layer, x = told_dense(attention_dropout=0.1), on_gpu(*[(1, 100, 2, 16)] * 3)
    assert is_torchs(layer, *x)
    assert not is_torchs(layer.train(), *x)
    layer.attention_dropout = 0.0
    assert is_torchs(layer, *x)
    layer.backend = "cpu"
    assert not is_torchs(layer, *x)
    layer.backend = "auto"
    for changed, torchs in (
        ({"dense_below": 100}, False),
        ({"dense_below": None, "base_sparsity": 0.0}, True),
        ({"dense_below": 5000, "score_gradient": "straight_through"}, False),
        ({"dense_below": 5000}, True),
    ):
        layer.config = AdaptiveConfig(**changed)
        assert is_torchs(layer, *x) == torchs
    layer.config = AdaptiveConfig(dense_below=5000, score_gradient="straight_through")
    assert is_torchs(layer.eval(), *x)
    limit = adaptive_module.TORCH_OWN
    assert is_torchs(layer, *on_gpu(*[(1, limit, 2, 16)] * 3))
    layer._otherwise = lambda query, *_: query
    layer.ranks, alone = SimpleNamespace(alone=False), layer.ranks
    assert not is_torchs(layer, *x)
    layer.ranks = alone
    assert is_torchs(layer, *x)
    assert not is_torchs(layer, *on_gpu(*[(1, limit + 1, 2, 16)] * 3))


@pytest.mark.compile
@torch.no_grad()
def test_a_compiler_leaves_the_layer_as_it_is():
    layer, x = told_dense(), torch.randn(3, 1, 120, 2, 16).unbind()
    graphs = []

    def kept(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    for n in (100, 120):
        some = [t[:, :n] for t in x]
        assert torch.equal(torch.compile(layer, backend=kept)(*some, True), layer(*some, True))
        around = torch.compile(lambda *x: layer(*(2 * t for t in x), True) + 1, backend=kept)
        assert torch.equal(around(*some), layer(*(2 * t for t in some), True) + 1)
    # What stands before it, and after it.
    assert {len(graph) for graph in graphs} == {1, 3}


@pytest.mark.compile
@torch.no_grad()
def test_what_is_torchs_is_so_under_a_compiler(torch_raises):
    compiled = torch.compile(told_dense(), backend="eager")
    assert is_torchs(compiled, *on_gpu(*[(1, 100, 2, 16)] * 3))
    assert not is_torchs(compiled, *on_gpu(*[(1, 101, 2, 16)] * 3))


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
