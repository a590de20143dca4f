"""Ring and distributed modules on real gloo processes: this rank's rows of what one device computes, and its gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from oracle import error, multiplicities
from processes import all_pass

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.distributed import SequenceLayout, shard_sequence, traffic
from dilated_attention_pytorch.distributed.config import DistributedSparseConfig, NodeBounded
from dilated_attention_pytorch.nn import BlockSparseRingDistributedDilatedAttention, set_process_group

N = 150
UNEVEN = SequenceLayout.of_lengths([60, 0, 13, 77])


def same_rows(over, alone, shape, layout, rank: int, **settings) -> None:
    """Output, gradients of the input and, summed over ranks, those of the parameters and of a bias."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(*shape, generator=generator, dtype=torch.float64)
    grad = torch.randn(*shape, generator=generator, dtype=torch.float64)
    alone.load_state_dict(over.state_dict())
    wanted = _answer(alone, whole, grad, settings)
    found = _answer(over, *(shard_sequence(x, layout, rank, 1) for x in (whole, grad)), settings)
    for got, want in zip(found[:2], wanted[:2], strict=True):
        assert error(got, shard_sequence(want, layout, rank, 1)) <= 1e-12
    for got, want in zip(found[2], wanted[2], strict=True):
        total = got.clone()
        dist.all_reduce(total, group=over.process_group)
        assert error(total, want) <= 1e-12


def _answer(module, x, grad, settings):
    x = x.detach().clone().requires_grad_()
    shared = [*module.parameters()]
    if "bias" in settings:
        settings = settings | {"bias": settings["bias"].clone().requires_grad_()}
        shared.append(settings["bias"])
    torch.manual_seed(1)
    output = module(x, x, x, **settings)
    output = output[0] if isinstance(output, tuple) else output
    (output * grad).sum().backward()
    return output.detach(), x.grad, [p.grad for p in shared]


def modules_over_ranks(rank: int, world: int) -> None:
    group = dist.group.WORLD
    torch.manual_seed(0)
    ladder, sparse = ([16, 64], [1, 4]), {"sparsity_ratio": 0.2, "block_size": 16}
    contiguous, zigzag = SequenceLayout.contiguous(N, world), SequenceLayout.zigzag(N, world)
    core = (1, N, 4, 8)
    for layout in (contiguous, UNEVEN):
        over = dap.RingDilatedAttention(*ladder, process_group=group)
        same_rows(over, dap.DilatedAttention(*ladder), core, layout, rank, is_causal=True)
    sinks = {"sink": True, "num_heads": 4, "dtype": torch.float64}
    over = dap.RingDilatedAttention(*ladder, ring_size=world, layout="zigzag", **sinks)
    torch.nn.init.normal_(over.sink)
    same_rows(over, dap.DilatedAttention(*ladder, **sinks), core, zigzag, rank, is_causal=True)
    over = dap.BlockSparseRingDilatedAttention([64], [1], process_group=group, **sparse)
    same_rows(over, dap.BlockSparseRingDilatedAttention([64], [1], ring_size=1, **sparse), core, UNEVEN, rank)

    options = {"attention_dropout": 0.3}
    over = dap.RingDilatedAttention(*ladder, process_group=group, transfer={"overlap": "local"}, **options)
    same_rows(over, dap.DilatedAttention(*ladder, **options), core, contiguous, rank)

    heads = {"position": "rotary", "num_kv_heads": 2, "dtype": torch.float64}
    over = dap.RingMultiheadDilatedAttention(32, 4, *ladder, process_group=group, layout=zigzag, **heads)
    alone = dap.MultiheadDilatedAttention(32, 4, *ladder, **heads)
    same_rows(over, alone, (2, N, 32), zigzag, rank, is_causal=True)
    for module in (over, alone):
        module.zero_grad()
    terms = {"softcap": 2.0, "bias": torch.randn(4, 41, generator=torch.Generator().manual_seed(2)).double()}
    same_rows(over, alone, (2, N, 32), zigzag, rank, is_causal=True, **terms)
    over, alone = copy.deepcopy(over), copy.deepcopy(alone)
    over.ranks.layout = "contiguous"
    bounds = torch.tensor([0, 40, 90, N])
    for module in (over, alone):
        module.zero_grad()
    same_rows(over, alone, (1, N, 32), UNEVEN, rank, is_causal=True, cu_seqlens=bounds)
    heads |= {"add_bias_kv": True, "add_zero_attn": True}
    over = dap.BlockSparseRingMultiheadDilatedAttention(32, 4, [64], [1], process_group=group, **sparse, **heads)
    alone = dap.BlockSparseRingMultiheadDilatedAttention(32, 4, [64], [1], ring_size=1, **sparse, **heads)
    same_rows(over, alone, (2, N, 32), UNEVEN, rank)
    assert "spread over 4 ranks" in over.explain(N)

    the_axis_of_a_mesh(rank, alone, sparse, heads)
    density_by_distance(rank, world)
    refusals(rank, world, over)
    assert copy.deepcopy(over).process_group is group
    with pytest.raises(ValueError, match="Save its state_dict"):
        pickle.dumps(over)
    assert set_process_group(torch.nn.Sequential(over, torch.nn.ReLU()), None) == 1
    assert over.ranks.alone
    pickle.dumps(over)


def the_axis_of_a_mesh(rank: int, alone, sparse, heads) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    over = dap.BlockSparseRingMultiheadDilatedAttention(32, 4, [64], [1], process_group=mesh["cp"], **sparse, **heads)
    assert over.ranks.world == 2
    alone.zero_grad()
    same_rows(over, alone, (1, N, 32), SequenceLayout.of_lengths([70, 80]), rank % 2)
    with pytest.raises(ValueError, match='mesh\\["cp"\\]'):
        dap.RingDilatedAttention([16], [1], process_group=mesh)


def density_by_distance(rank: int, world: int) -> None:
    config = DistributedSparseConfig(block_size=16, node_size=2, inter_node_sparsity=0.15, global_sparsity=0.3)
    options = {"process_group": dist.group.WORLD, "dtype": torch.float64}
    over = BlockSparseRingDistributedDilatedAttention(32, 4, [64], [1], config, **options)
    assert over.ranks.world == world
    for layout in (SequenceLayout.contiguous(N, world), UNEVEN):
        pattern = NodeBounded((64,), (1,), 0.4, 0.3, 0.15, world=4, ranks_per_node=2, block=16, lengths=layout.lengths)
        alone = dap.MultiheadSparseAttention(32, 4, pattern.resolve(N, 4), dtype=torch.float64)
        over.zero_grad()
        same_rows(over, alone, (1, N, 32), layout, rank)
    assert over.gradient_buckets().group is over.process_group
    over.process_group = dist.new_group([0, 1]) if rank < 2 else (dist.new_group([0, 1]), None)[1]
    assert over.pattern.world == (2 if rank < 2 else 1)


def refusals(rank: int, world: int, over) -> None:
    x = torch.randn(1, 10, 32, dtype=torch.float64)
    odd = rank == 1
    with pytest.raises(
        (ValueError, RuntimeError), match="mat1 and mat2|31" if odd else "rank 1: ValueError: query must"
    ):
        over(x[..., :31] if odd else x)
    for settings, says in (
        ({"need_weights": True}, "need_weights must come with one device"),
        ({"attn_mask": torch.zeros(10, 10, dtype=torch.bool)}, "attn_mask must come with one device"),
        ({"cache": over.cache(64), "is_causal": True}, "a cache must come with one device"),
    ):
        with pytest.raises(ValueError, match=says):
            over(x, **settings)
    with pytest.raises(ValueError, match="ring_size must be the number of ranks, 4"):
        dap.RingDilatedAttention([16], [1], process_group=dist.group.WORLD, ring_size=3)
    with pytest.raises(ValueError, match=r"shards must hold \[3, 3, 2, 2\] tokens"):
        dap.RingDilatedAttention([16], [1], ring_size=4, layout=SequenceLayout.contiguous(10, 4))(
            *[torch.randn(1, 4 if odd else 2, 1, 8)] * 3
        )
    with pytest.raises(ValueError, match="must make the same call"):
        over(x if odd else torch.cat([x, x]))
    assert over(x)[0].isfinite().all()


@pytest.mark.timeout(120)
def test_modules_over_four_ranks_compute_what_one_device_does():
    all_pass(modules_over_ranks, 4)


@pytest.mark.parametrize("lengths", [(128,) * 8, (100, 0, 200, 51, 73, 300, 9, 291)], ids=["equal", "uneven"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_comes_from_other_nodes_is_bounded(lengths, is_causal):
    """Whatever the number of queries, and exactly the pairs the levels name."""
    n, world, heads, far = sum(lengths), 8, 2, 0.1
    layout = SequenceLayout.of_lengths(lengths)
    pattern = NodeBounded((256,), (1,), 0.4, 0.3, far, world=world, ranks_per_node=4, block=16, lengths=lengths)
    whole = (pattern & dap.Causal() if is_causal else pattern).resolve(n, heads)
    holder, _ = layout.locate(torch.arange(n))
    seen = multiplicities(whole, n, heads)[0] > 0
    moved = traffic(whole, layout, heads, row_bytes=1, ranks_per_node=4)
    for rank, own in enumerate(moved):
        assert own.bytes_between_nodes <= far * n * heads
        needed = (seen[holder == rank].any(0) & (holder // 4 != rank // 4)).sum() * heads
        assert own.bytes_between_nodes == needed
    columns = seen[(holder < 4) & (torch.arange(n) == n // 4), :][:, holder >= 4]
    assert is_causal or columns.sum() > 0


def test_one_rank_or_one_node_leaves_the_outer_levels_out():
    base = NodeBounded((64,), (1,), 0.4, 0.3, 0.2, block=16)
    assert str(base.resolve(256, 1)) == "block_dilated:64x1;sparsity_ratio=0.4;block=16;length=256"
    one_node = NodeBounded((64,), (1,), 0.4, 0.3, 0.2, block=16, world=4, ranks_per_node=4).resolve(256, 1)
    assert str(one_node).count("block_columns:") == 1


def test_far_blocks_are_not_written_out_for_every_row():
    """The text that the ranks compare in every call is short, at 16M tokens on 64 ranks too."""
    pattern = DistributedSparseConfig(node_size=8).pattern([2048], [1], 64).resolve(2**24, 2)
    assert len(pattern.describe()) < 1000
    assert dap.parse(pattern.describe()) == pattern


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"pattern_type": "adaptive_load_balanced"}, "pattern_type must be one of hierarchical, node_local"),
        ({"sparsity_ratio": 0}, "sparsity_ratio must be a fraction"),
        ({"pattern_type": "node_local", "inter_node_sparsity": 0.1}, "must come with a pattern_type that has it"),
        ({"pattern_type": "dilated_sparse", "local_sparsity": 0.1}, "must come with a pattern_type that has it"),
        ({"pattern_type": "dilated_sparse", "node_size": 2}, "node_size must come with"),
        (
            {"sparsity_ratio": 0.1, "local_sparsity": 0.1, "global_sparsity": 0.1, "inter_node_sparsity": 0.1},
            "leave a level to decide",
        ),
        ({"gradient_compression_ratio": 2.0}, "ratio must be a fraction of the gradient"),
        ({"gradient_compression": "topk"}, "must come with gradient_compression_ratio"),
        ({"gradient_compression": "power_sgd", "gradient_compression_ratio": 0.1}, "one of block_topk, topk"),
        ({"gradient_bucket_size_mb": 0}, "size_mb must be > 0"),
        ({"gradient_bucket_count": 0}, "count must be >= 1"),
        ({"block_size": 0}, "block_size must be >= 1"),
        ({"node_size": 0}, "node_size must be >= 1"),
    ],
)
def test_a_setting_that_cannot_act_raises(arguments, says):
    with pytest.raises(ValueError, match=says):
        DistributedSparseConfig(**arguments)


def test_settings_reach_what_they_set():
    config = DistributedSparseConfig(
        sparsity_ratio=0.2, gradient_compression_ratio=0.1, gradient_bucket_count=1, gradient_compression="topk"
    )
    module = BlockSparseRingDistributedDilatedAttention(32, 4, [64], [1], config, bias=False)
    assert module.pattern == NodeBounded((64,), (1,), 0.2, 0.2, 0.2)
    buckets = module.gradient_buckets()
    assert type(buckets.compression).__name__ == "TopK"
    assert buckets.compression.ratio == 0.1
    assert [len(bucket) for bucket in buckets.buckets] == [1] * 4
    plain = DistributedSparseConfig("dilated_sparse", sparsity_ratio=0.2, block_size=16)
    assert plain.pattern([64], [1], 8) == dap.BlockDilated((64,), (1,), 0.2, block=16)
    assert DistributedSparseConfig("node_local").pattern([64], [1], 8).far == 0


@pytest.mark.parametrize(
    ("started", "members", "on_a_node"),
    [(4, range(8), 4), (4, (0, 2, 4, 6), 2), (4, (4, 5, 6, 7), 4), (8, (1, 5), 2), (4, range(6), 4)],
)
def test_nodes_follow_from_what_was_started_on_a_machine(monkeypatch, started, members, on_a_node):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(started))
    pattern = DistributedSparseConfig().pattern([64], [1], len(members), members)
    assert pattern.ranks_per_node == on_a_node
    with pytest.raises(
        ValueError, match=r"every node must hold the same number of ranks of the group, got \[1, 4, 1\]"
    ):
        DistributedSparseConfig().pattern([64], [1], 6, (0, *range(4, 8), 8) if started == 4 else (0, 8, 9, 10, 11, 16))


def test_distributed_module_has_weights_masks_and_a_plan():
    module = BlockSparseRingDistributedDilatedAttention(32, 4, [64], [1], DistributedSparseConfig(block_size=16))
    x = torch.randn(1, 80, 32)
    _, weights = module(x, need_weights=True, average_attn_weights=False)
    seen = multiplicities(module.pattern, 80, 4) > 0
    assert weights[0].gt(0).equal(seen)
    later = torch.ones(80, 80, dtype=torch.bool).triu(1)
    assert error(module(x, attn_mask=later)[0], module(x, is_causal=True)[0]) < 1e-6
    assert module.plan(80).density == pytest.approx(0.4)
    with pytest.raises(ValueError, match="a cache must come with a pattern that knows no ranks"):
        module.cache()


def test_a_transfer_takes_known_keywords_alone():
    with pytest.raises(
        ValueError, match="transfer must have keywords among exchange, machine, overlap, receive_budget"
    ):
        dap.RingDilatedAttention([16], [1], transfer={"speed": 9})
