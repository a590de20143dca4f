"""Core modules over (B, N, H, D): each is the operation with its own pattern, and nothing else."""

from __future__ import annotations

import copy
import io
import json
import threading
from pathlib import Path

import pytest
import torch
from oracle import answer, dense_attention, error, multiplicities

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.nn import (
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseTorchSparse,
    DilatedAttention,
    HierarchicalConfig,
    MultiheadSparseAttention,
    RingDilatedAttention,
    SparseAttention,
    SparsePatternConfig,
)

PATTERN_TYPES = ("local_window", "dilated_sparse", "strided", "random", "hierarchical")
LEVELS = [
    {"stride": 16, "window_size": 32, "block_size": 16},
    {"stride": 32, "window_size": -1, "block_size": 16},
]


def sparse(pattern_type: str, **options):
    return BlockSparseRingDilatedAttention(
        [64, 128], [1, 2], SparsePatternConfig(pattern_type, 0.3, block_size=16, **options)
    )


MODULES = {
    "any": lambda: SparseAttention("window:9 | global:3"),
    "dilated": lambda: DilatedAttention([16, 64], [1, 4]),
    "dilated-split": lambda: DilatedAttention([16, 64], [1, 4], heads="split", overlap="union"),
    "ring": lambda: RingDilatedAttention([16, 64], [1, 4], ring_size=1),
    "block": lambda: BlockSparseRingDilatedAttention([64, 128], [1, 2], block_size=16),
    "block-ratio": lambda: BlockSparseRingDilatedAttention([64], [1], sparsity_ratio=0.2, block_size=16),
    **{f"block-{kind}": lambda kind=kind: sparse(kind) for kind in PATTERN_TYPES},
    "block-global": lambda: sparse("global_local", global_tokens=5),
    "block-window": lambda: BlockSparseRingDilatedAttention(
        [64], [1], SparsePatternConfig("local_window", window_size=20)
    ),
    "hierarchical": lambda: BlockSparseHierarchical([32, 128], [1, 2], block_size=16),
    "hierarchical-levels": lambda: BlockSparseHierarchical([32], [1], HierarchicalConfig(LEVELS)),
}


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param]()


def tensors(n=131, heads=4, key_heads=4, batch=2, dtype=torch.float64, grad=False):
    shapes = ((batch, n, heads, 8), (batch, n, key_heads, 8), (batch, n, key_heads, 8))
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def expected(module, q, k, v, is_causal, grad_output=None, **options):
    pattern = module.pattern & dap.Causal() if is_causal else module.pattern
    turned = (t.transpose(1, 2) for t in (q, k, v))
    grad_output = None if grad_output is None else grad_output.transpose(1, 2)
    return [
        None if t is None else t.transpose(1, 2) if t.dim() == 4 else t
        for t in answer(*turned, pattern, grad_output=grad_output, **options)
    ]


@pytest.mark.parametrize("is_causal", [False, True])
def test_output_and_gradients_are_those_of_dense_attention(module, is_causal):
    q, k, v = tensors(grad=True, key_heads=4)
    output = module(q, k, v, is_causal=is_causal)
    grad_output = torch.randn_like(output)
    wanted = expected(module, q, k, v, is_causal, grad_output)
    output.backward(grad_output)
    assert error(output, wanted[0]) < 1e-10
    for tensor, grad in zip((q, k, v), wanted[2:], strict=True):
        assert error(tensor.grad, grad) < 1e-10


def test_grouped_heads_and_padding(module):
    q, k, v = tensors(key_heads=2)
    padding = torch.arange(131) >= torch.tensor([131, 40])[:, None]
    output = module(q, k, v, key_padding_mask=padding)
    assert error(output, expected(module, q, k, v, False, key_padding_mask=padding)[0]) < 1e-10


@pytest.mark.parametrize("is_causal", [False, True])
def test_ones_give_ones_where_a_row_has_a_key(module, is_causal):
    q, k, _ = tensors()
    value = torch.ones(2, 131, 4, 8, dtype=torch.float64)
    output = module(q, k, value, is_causal=is_causal)
    seen = module.plan(131, 4, is_causal).to_dense().any(-1).T[None, :, :, None].expand_as(output)
    assert error(output, seen.double()) < 1e-12


def test_influence_is_the_pattern(module):
    q, k, v = tensors(n=70, heads=2, key_heads=2, batch=1, grad=True)
    output = module(q, k, v, is_causal=True)
    moved = torch.stack([torch.autograd.grad(row.sum(), v, retain_graph=True)[0][0] for row in output[0, :, 0]])
    allowed = module.plan(70, 2, is_causal=True).to_dense()[0] > 0
    assert torch.equal(moved[:, :, 0].abs().sum(-1) > 0, allowed)
    assert not torch.triu(allowed, 1).any()


def test_a_batch_is_its_samples(module):
    q, k, v = tensors()
    alone = torch.cat([module(*(t[i : i + 1] for t in (q, k, v))) for i in range(2)])
    assert error(module(q, k, v), alone) < 1e-12


def test_two_lengths_copies_and_pickles_give_the_same(module):
    q, k, v = tensors()
    first = module(q, k, v)
    module(*tensors(n=77))
    module.plan(131, 4)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (module, copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(other(q, k, v), first)


SINKS = {"sink": True, "num_heads": 4}
WITH_SINKS = {
    "any": lambda: SparseAttention("window:9 | global:3", **SINKS),
    "dilated": lambda: DilatedAttention([16, 64], [1, 4], **SINKS),
    "ring": lambda: RingDilatedAttention([16, 64], [1, 4], ring_size=1, **SINKS),
    "block": lambda: dap.create_block_sparse_attention("base", [64, 128], [1, 2], block_size=16, **SINKS),
    "hierarchical": lambda: dap.create_block_sparse_attention("hierarchical", [32, 128], block_size=16, **SINKS),
}


@pytest.mark.parametrize("name", WITH_SINKS)
def test_learned_sink_matches_an_extra_column(name):
    module = WITH_SINKS[name]().double()
    assert torch.equal(module.sink, torch.zeros(4).double()) and list(module.state_dict()) == ["sink"]
    module.load_state_dict({"sink": torch.randn(4).double()})
    q, k, v = tensors(key_heads=2, grad=True)
    padding = torch.arange(131) < torch.tensor([0, 20])[:, None]
    output = module(q, k, v, is_causal=True, key_padding_mask=padding)
    counts = multiplicities(module.pattern & dap.Causal(), 131, 4)
    plain, lse = dense_attention(*(x.transpose(1, 2) for x in (q, k, v)), counts, key_padding_mask=padding)
    seen = lse > -torch.inf
    share = torch.where(seen, lse, 0.0).exp()
    share = torch.where(seen, share / (share + module.sink.exp()[:, None]), 0.0)
    wanted = (plain * share[..., None]).transpose(1, 2)
    assert error(output, wanted) < 1e-10
    leaves, grad_output = [q, k, v, module.sink], torch.randn_like(output)
    wanted_grads = torch.autograd.grad(wanted, leaves, grad_output)
    for grad, expect in zip(torch.autograd.grad(output, leaves, grad_output), wanted_grads, strict=True):
        assert error(grad, expect) < 1e-10
    module.reset_parameters()
    assert not module.sink.any() and "num_heads=4, sink=True" in repr(module)


def test_a_sink_holds_for_queries_of_another_length():
    module = SparseAttention("full", **SINKS).double()
    torch.nn.init.normal_(module.sink)
    q, (_, k, v) = tensors(n=20)[0], tensors(n=31)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * 8**-0.5
    column = module.sink[:, None, None].expand(2, 4, 20, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    assert error(module(q, k, v), torch.einsum("bhnm,bmhe->bnhe", weights, v)) < 1e-10


def test_no_parameters_and_an_empty_state(module):
    assert list(module.parameters()) == []
    assert module.state_dict() == {}


def test_eight_threads_share_a_module():
    module = DilatedAttention([16, 64], [1, 4])
    inputs = [tensors(n=50 + i) for i in range(8)]
    wanted = [module(*one) for one in inputs]
    dap.plan_cache.clear()
    found = [None] * 8

    def work(i):
        found[i] = module(*inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_packed_sequences():
    module = DilatedAttention([16, 64], [1, 4])
    q, k, v = tensors(n=90, batch=1)
    output = module(q, k, v, is_causal=True, cu_seqlens=torch.tensor([0, 37, 90]))
    pieces = [module(*(t[:, a:b] for t in (q, k, v)), is_causal=True) for a, b in ((0, 37), (37, 90))]
    assert error(output, torch.cat(pieces, 1)) < 1e-12


@pytest.mark.parametrize("kind", ["attention_dropout", "dropout"])
def test_dropout_acts_in_training_alone(kind):
    module = DilatedAttention([64], [1], **{kind: 0.5})
    q, k, v = tensors()
    assert not torch.equal(module(q, k, v), module(q, k, v))
    module.eval()
    assert torch.equal(module(q, k, v), module(q, k, v))


def test_the_scale_is_used():
    q, k, v = tensors()
    assert (
        error(
            DilatedAttention([64], [1], 0.0)(q, k, v),
            expected(DilatedAttention([64], [1]), q, k, v, False, scale=0.0)[0],
        )
        < 1e-10
    )


@pytest.mark.parametrize("pattern_type", PATTERN_TYPES)
@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.31])
@pytest.mark.parametrize("n", [4096, 5000])
def test_the_ratio_is_kept_to_within_a_block_a_row(pattern_type, ratio, n):
    config = SparsePatternConfig(pattern_type, ratio, block_size=32)
    plan = BlockSparseRingDilatedAttention([512, 1024], [1, 2], config).plan(n, 1)
    rows = -(-n // 32)
    forced = 1 if pattern_type == "random" else 0
    assert (round(ratio * rows) - 1) / rows <= plan.density <= (round(ratio * rows) + 1 + forced) / rows


def test_explain_says_what_is_kept():
    module = BlockSparseRingDilatedAttention([2048], [1], SparsePatternConfig("random", 0.05))
    text = module.explain(8192)
    assert "8,192 tokens" in text and "random:0.05" in text and "play no part" in text
    assert f"{100 * module.plan(8192, 8).density:.3g} %" in text


def test_pattern_stats_and_the_plans_a_module_holds():
    module = BlockSparseRingDilatedAttention([64], [1], sparsity_ratio=0.5, block_size=16, pattern_cache_size=2)
    for n in (64, 128, 256):
        plan = module.plan(n, 2)
        assert module.plan(n, 2) is plan
    stats = module.get_pattern_stats(256, 2)
    assert stats["density"] == plan.density and stats["plans_held"] == 2
    module.clear_pattern_cache()
    assert module.get_pattern_stats()["plans_held"] == 0


def test_levels_within_one_block_are_one_level():
    module, first = BlockSparseHierarchical([64, 128, 512], [1, 2, 2]), BlockSparseHierarchical([128, 512], [1, 2])
    assert module.pattern == first.pattern


def test_levels_of_a_hierarchy_do_not_overlap():
    module = BlockSparseHierarchical([256], [1], HierarchicalConfig())
    assert module.plan(2048, 1).to_dense().max() == 1
    assert "#" in module.visualize_pattern()
    assert HierarchicalConfig().num_levels == 3


def test_a_module_on_the_meta_device_knows_its_plan():
    module = DilatedAttention([16], [1], device="meta")
    assert module.plan(64, 2).density > 0
    with pytest.raises(ValueError, match="device meta"):
        module(*tensors())


def test_device_and_dtype_given_must_hold_and_follow_the_module():
    module = DilatedAttention([16], [1], device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"dtype torch.float32, got torch.float64"):
        module(*tensors())
    assert module.double()(*tensors()).dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DilatedAttention([16, 32], [1]), "equally long"),
        (lambda: DilatedAttention([16], [1], unknown=3), "unexpected keyword"),
        (lambda: DilatedAttention([16], [1], 1.0, 0.1, dropout=0.2), "given once"),
        (lambda: DilatedAttention([16], [1], attention_dropout=1.0), r"\[0, 1\)"),
        (lambda: BlockSparseRingDilatedAttention([16], [1], sparsity_ratio=0), "fraction"),
        (
            lambda: BlockSparseRingDilatedAttention([16], [1], process_group=object()),
            "must be a ProcessGroup or a DeviceMesh",
        ),
        (lambda: RingDilatedAttention([16], [1], ring_size=4), "no initialised process group"),
        (lambda: BlockSparseRingDilatedAttention([16], [1], pattern_cache_size=0), ">= 1"),
        (lambda: BlockSparseTorchSparse([16], [1]), "BlockSparseRingDilatedAttention"),
        (lambda: BlockSparseHierarchical([16, 32], [1]), "equally long"),
        (lambda: BlockSparseHierarchical([16], [1], HierarchicalConfig(), block_size=32), "that of the levels"),
        (lambda: HierarchicalConfig([{"stride": 64}]), "must have stride"),
        (lambda: HierarchicalConfig([LEVELS[0], {**LEVELS[1], "block_size": 32}]), "share one block_size"),
        (lambda: SparsePatternConfig("dense"), "one of local_window"),
        (lambda: SparsePatternConfig(sparsity_ratio=1.5), "fraction"),
        (lambda: SparsePatternConfig("random", window_size=3), "local_window or global_local"),
        (lambda: SparsePatternConfig("global_local"), "global_tokens >= 1"),
        (lambda: SparsePatternConfig("local_window", seed=3), "random"),
        (lambda: sparse("adaptive"), "BlockSparseAdaptive"),
        (
            lambda: BlockSparseRingDilatedAttention([16], [1], {"pattern_type": "random"}),
            "a SparsePatternConfig, got dict",
        ),
        (lambda: BlockSparseRingDilatedAttention([16], [1], block_size=0), ">= 1"),
        (lambda: BlockSparseHierarchical([16], [1], block_size=0), ">= 1"),
        (lambda: SparseAttention(None), "pattern must be given, got none"),
        (lambda: DilatedAttention([16], [1]).plan(100, 0), ">= 1"),
        (lambda: SparseAttention("full", sink=True), "sink=True must come with num_heads"),
        (lambda: SparseAttention("full", num_heads=0), "num_heads must be >= 1, or None, got 0"),
        (lambda: SparseAttention("full", num_heads=2)(*tensors()), "query must have this module's 2 heads, got 4"),
        (
            lambda: SparseAttention("full", **SINKS)(*tensors(), return_attention_weights=True),
            "return_attention_weights must come without a sink",
        ),
    ],
)
@pytest.mark.untyped
def test_what_cannot_be_raises(make, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        make()


def test_a_config_has_the_defaults_it_promises():
    config = SparsePatternConfig()
    assert (config.pattern_type, config.sparsity_ratio, config.block_size) == ("local_window", 0.1, 128)
    assert (config.window_size, config.global_tokens, config.dilation_rates, config.seed) == (None, 0, None, 0)


def test_the_reason_against_torch_sparse_is_measured():
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "torch_sparse.jsonl"
    measured = json.loads(results.read_text().splitlines()[0])
    with pytest.raises(NotImplementedError, match="takes 11 times as long") as told:
        BlockSparseTorchSparse([16], [1])
    assert "8192 tokens" in str(told.value) and "8192 tokens" in measured["case"]
    assert measured["times_as_long"] == pytest.approx(11, rel=0.3)


@pytest.mark.parametrize("pattern_type", ["local_window", "dilated_sparse", "global_local", "strided", "hierarchical"])
@pytest.mark.parametrize(("ratio", "tokens"), [(0.1, 64), (0.25, 100), (0.25, 300)])
def test_sparsity_ratio_counts_global_tokens(pattern_type, ratio, tokens):
    config = SparsePatternConfig(pattern_type, ratio, block_size=32, global_tokens=tokens)
    pattern = config.pattern([2048], [1])
    assert dap.parse(str(pattern)) == pattern
    assert dap.make_plan(pattern, 8192, 1).density == pytest.approx(ratio, rel=0.05)


def test_a_row_keeps_its_own_block_beside_global_tokens():
    pattern = SparsePatternConfig("global_local", 0.1, block_size=16, global_tokens=64).pattern()
    query, key, value = torch.randn(3, 1, 2, 160, 8, dtype=torch.float64)
    assert error(dap.attention(query, key, value, pattern), answer(query, key, value, pattern).output) < 1e-12
    resolved = pattern.resolve(160, 2)
    assert all(resolved.allows(i, i) and not resolved.allows(i, 159) for i in range(64, 144))


MISMATCHED = {
    "value length": ((1, 3, 4, 8), (1, 2000, 4, 8), "value must have the key's length 3, got 2000"),
    "batch": ((2, 3, 4, 8), (2, 3, 4, 8), "key must have the query's batch size 1, got 2"),
    "value batch": ((1, 3, 4, 8), (2, 3, 4, 8), "value must have the query's batch size 1, got 2"),
    "key heads": ((1, 3, 3, 8), (1, 3, 3, 8), "query heads must be a multiple of key heads"),
    "value heads": ((1, 3, 4, 8), (1, 3, 1, 8), "value must have the key's 4 heads, got 1"),
    "key width": ((1, 3, 4, 9), (1, 3, 4, 9), "key must have the query's width 8, got 9"),
}


@pytest.mark.parametrize("name", MISMATCHED)
@pytest.mark.parametrize("pattern", ["full", "window:8"])
def test_mismatched_cross_attention_raises(name, pattern):
    key, value, message = MISMATCHED[name]
    with pytest.raises(ValueError, match=message):
        SparseAttention(pattern)(torch.randn(1, 64, 4, 8), torch.randn(key), torch.randn(value))


@pytest.mark.parametrize("pattern", ["full", "window:8"])
def test_mismatched_multihead_cross_attention_raises(pattern):
    module = MultiheadSparseAttention(32, 4, pattern)
    with pytest.raises(ValueError, match="value must have the key's length 3, got 2000"):
        module(torch.randn(1, 64, 32), torch.randn(1, 3, 32), torch.randn(1, 2000, 32))
    with pytest.raises(ValueError, match="key must have the query's batch size 1, got 2"):
        module(torch.randn(1, 64, 32), torch.randn(2, 3, 32))


def test_full_cross_attention_of_mixed_dtypes_raises():
    with pytest.raises(TypeError, match=r"key must have the query's dtype torch\.float32"):
        SparseAttention("full")(torch.randn(1, 64, 4, 8), *torch.randn(2, 1, 3, 4, 8).double())
    with torch.autocast("cpu", torch.bfloat16):
        found = SparseAttention("full")(torch.randn(1, 64, 4, 8), *torch.randn(2, 1, 3, 4, 8).bfloat16())
    assert found.dtype == torch.bfloat16
