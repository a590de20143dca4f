"""Learned selection in the places modules have: between projections, in factories, under autocast and a compiler."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracle import error

from dilated_attention_pytorch.nn import (
    AdaptiveConfig,
    BlockSparseAdaptive,
    MultiheadBlockSparseAdaptive,
    SparsePatternConfig,
    create_adaptive_block_sparse,
    create_block_sparse_attention,
    get_block_sparse_preset,
)
from dilated_attention_pytorch.nn.adaptive import module as adaptive_module
from dilated_attention_pytorch.selection.scores import cast_layers


def adaptive_of(**options):
    return BlockSparseAdaptive([256], [1], 4, 8, **options)


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


def test_a_pattern_config_gives_the_block_size():
    pattern, learned = SparsePatternConfig(block_size=16, sparsity_ratio=0.25), AdaptiveConfig(0.5)
    both = {"sparse_config": pattern, "adaptive_config": learned}
    made = [
        BlockSparseAdaptive([256], [1], 4, 8, **both),
        MultiheadBlockSparseAdaptive(32, 4, [256], [1], **both).core,
        create_block_sparse_attention("adaptive", num_heads=4, **both),
        create_block_sparse_attention("adaptive", embed_dim=32, num_heads=4, **both).core,
    ]
    assert [(one.block_size, one.config) for one in made] == [(16, learned)] * 4
    alone = BlockSparseAdaptive([256], [1], 4, 8, sparse_config=pattern, block_size=16)
    assert (alone.block_size, alone.config) == (16, AdaptiveConfig(0.75))
    assert BlockSparseAdaptive([256], [1], 4, 8, sparse_config=learned).config is learned


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: adaptive_of(sparse_config=SparsePatternConfig(block_size=16), block_size=32), ValueError, "sparse_config, 16"),
        (lambda: adaptive_of(sparse_config=AdaptiveConfig(), adaptive_config=AdaptiveConfig()), ValueError, "given once"),
        (lambda: adaptive_of(sparse_config="random:0.1"), TypeError, "a SparsePatternConfig"),
        (lambda: adaptive_of(adaptive_config=SparsePatternConfig()), TypeError, "an AdaptiveConfig"),
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


@pytest.mark.parametrize("n", [256, 241])
def test_scores_under_autocast_are_those_without(n):
    layer = BlockSparseAdaptive([256], [1], 2, 16, AdaptiveConfig(0.5), block_size=16).eval()
    x = torch.randn(3, 1, n, 2, 16).bfloat16().float().unbind()
    with torch.no_grad():
        wanted = layer(*x, is_causal=True, return_pattern=True)[1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = layer(*x, is_causal=True, return_pattern=True)[1]
    assert torch.equal(found.indices, wanted.indices)
    assert torch.allclose(found.scores, wanted.scores, atol=1e-2) and found.scores.dtype == torch.float32


@pytest.mark.parametrize("config", [{"guarded": True}, {"hard_sparsity": False}, {"score_gradient": "prior"}])
def test_every_study_mode_runs_under_autocast(config):
    layer = BlockSparseAdaptive([256], [1], 2, 16, AdaptiveConfig(0.5, **config), block_size=16)
    x = torch.randn(3, 1, 256, 2, 16).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            layer(*x.unbind(), is_causal=True).float().sum().backward()
        layer.eval()
        with torch.no_grad():
            output = layer(*x.unbind(), is_causal=True)
    assert output.isfinite().all() and x.grad.isfinite().all()


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
    layer.store_statistics(torch.zeros(()), None)
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
    layer._forward = lambda query, *_: query
    layer.ranks, alone = SimpleNamespace(alone=False), layer.ranks
    assert not is_torchs(layer, *x)
    layer.ranks = alone
    assert is_torchs(layer, *x)
    assert not is_torchs(layer, *on_gpu(*[(1, limit + 1, 2, 16)] * 3))


@pytest.mark.compile
@torch.no_grad()
def test_a_compiler_has_the_layer_in_one_graph():
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
    assert len(graphs) == 4


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


def adaptive(**options):
    return BlockSparseAdaptive([256], [1], 4, 8, AdaptiveConfig(0.5, hidden_dim=16, **options), block_size=16)


def known(scorer, state, prefix=""):
    """Asserts that a state dict holds the layers of every head under their known names."""
    at = "0.weight", "0.bias", "3.weight", "3.bias"
    names = [f"{prefix}scorers.{head}.{one}" for head in range(len(scorer.weight_0)) for one in at]
    assert [name for name in state if name.startswith(f"{prefix}scorers")] == names
    for index, stack in enumerate(scorer.stacks()):
        for head, value in enumerate(stack):
            assert torch.equal(state[names[4 * head + index]], value)


@pytest.mark.parametrize("share", [False, True])
def test_state_dict_keeps_the_names_of_every_head(share):
    layer = adaptive(share_across_heads=share)
    scorer = layer.scorer.importance
    known(scorer, layer.state_dict(), "scorer.importance.")
    known(scorer, scorer.state_dict(keep_vars=True))
    assert not any(value.requires_grad for value in scorer.state_dict().values())
    assert {name for name, _ in scorer.named_parameters()} == {"weight_0", "bias_0", "weight_1", "bias_1"}
    drawn = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    for assign in (False, True):
        clone = adaptive(share_across_heads=share)
        parameters = list(clone.parameters())
        assert str(clone.load_state_dict(drawn, assign=assign)) == "<All keys matched successfully>"
        assert all(torch.equal(value, drawn[name]) for name, value in clone.state_dict().items())
        kept = all(one is other for one, other in zip(clone.parameters(), parameters, strict=True))
        assert kept != assign
        assert all(type(x) is torch.nn.Parameter and x.requires_grad for x in clone.parameters())
    meta = adaptive(share_across_heads=share).to("meta")
    meta.load_state_dict(drawn, assign=True)
    assert all(torch.equal(value, drawn[name]) for name, value in meta.state_dict().items())
    half = adaptive(share_across_heads=share)
    half.load_state_dict({name: value.half() for name, value in drawn.items()}, assign=True)
    assert {x.dtype for x in half.parameters()} == {torch.float16}


def test_state_dicts_that_do_not_fit_are_refused():
    scorer = adaptive().scorer.importance
    given = scorer.state_dict()
    before = {name: value.clone() for name, value in given.items()}
    changed = {name: value + 1 for name, value in given.items() if name != "scorers.2.0.weight"}
    result = scorer.load_state_dict(changed | {"scorers.4.0.weight": torch.ones(1)}, strict=False)
    assert result.missing_keys == ["scorers.2.0.weight"]
    assert result.unexpected_keys == ["scorers.4.0.weight"]
    # One head alone cannot be replaced, so that the others of its kind stay.
    assert torch.equal(scorer.state_dict()["scorers.1.0.weight"], before["scorers.1.0.weight"])
    assert torch.equal(scorer.state_dict()["scorers.1.0.bias"], before["scorers.1.0.bias"] + 1)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "scorers.2.0.weight"'):
        scorer.load_state_dict(changed)
    with pytest.raises(RuntimeError, match=r"size mismatch for scorers.0.3.weight"):
        scorer.load_state_dict(before | {"scorers.1.3.weight": torch.ones(1, 15)})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "scorers.4.0.weight"'):
        scorer.load_state_dict(before | {"scorers.4.0.weight": torch.ones(1)})


def test_parameters_of_all_heads_stay_stacked():
    layer = adaptive()
    kept = {name: value.clone() for name, value in layer.state_dict().items()}
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for one in (copy.deepcopy(layer), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(layer))):
        assert all(torch.equal(value, kept[name]) for name, value in one.state_dict().items())
        assert len(list(one.parameters())) == 8
    parameters = list(layer.parameters())
    layer.double().float()
    assert all(one is other for one, other in zip(layer.parameters(), parameters, strict=True))
    with torch.no_grad():
        found = [x for each in cast_layers(layer.scorer.importance.stacks(), torch.float32) for x in each]
    # Read in place: no copy is gathered.
    assert all(one is other for one, other in zip(found, layer.scorer.importance.stacks(), strict=True))
    assert {x.dtype for x in layer.half().parameters()} == {torch.float16}
    shared = adaptive().share_memory()
    assert all(x.is_shared() for x in shared.parameters())


def test_layers_of_one_head_are_views_with_gradients():
    scorer = adaptive().scorer.importance
    scorer.scorers[2][0].weight.sum().backward()
    assert [float(grad.mean()) for grad in scorer.weight_0.grad] == [0.0, 0.0, 1.0, 0.0]
    with torch.no_grad():
        scorer.scorers[1][3].bias.fill_(5.0)
    assert scorer.bias_1[1].item() == 5.0
    assert isinstance(scorer.scorers[0][2], torch.nn.Dropout)
    assert not scorer.eval().scorers[0].training


def test_scorers_of_several_models_run_in_one_vmap():
    scorer = adaptive().scorer.importance
    x = torch.randn(2, 4, 5, 8)
    given = {name: torch.stack([value, value + 1]) for name, value in scorer.named_parameters()}
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


def files_called(call):
    """Source files of the package in the order in which a call enters their functions, without repetitions."""
    root, files = str(Path(adaptive_module.__file__).parents[2]), []

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root) and files[-1:] != [name]:
            files.append(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return files


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_forward_changes_source_file_at_most_40_times(is_causal, training):
    layer = BlockSparseAdaptive([256], [1], 2, 16, block_size=16).train(training)
    x = torch.randn(3, 1, 256, 2, 16).unbind()
    layer(*x, is_causal)
    files = files_called(lambda: layer(*x, is_causal))
    assert 10 < len(files) - 1 <= 40, files
