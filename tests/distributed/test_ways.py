"""Every way to bring rows and queries together gives the same result: overlap, stages, ring, butterfly, visits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import BY_NAME, Problem
from oracle import answer, error, multiplicities
from worlds import on_virtual_ranks as run

from dilated_attention_pytorch import attention_with_lse, parse
from dilated_attention_pytorch.distributed import (
    Machine,
    SequenceLayout,
    choose_layout,
    context_parallel_attention,
    traffic,
    virtual_attention,
)
from dilated_attention_pytorch.distributed.attention import Call
from dilated_attention_pytorch.distributed.schedule import make_schedules
from dilated_attention_pytorch.distributed.transport import VirtualTransport, check_group
from dilated_attention_pytorch.kernels.cpu.native import library_path

LADDER = Problem(name="even ladder", text="dilated:16x1,32x2,64x4,128x8", n=128, heads=8, key_heads=4)
SEES_ALL = Problem(name="sees all", text="window:3 | global:5;queries=1", n=90, heads=4, key_heads=2)
SEES_ALL_PADDED = Problem(
    name="sees all, padded", text="window:3 | global:5;queries=1", n=64, batch=3, padded=(64, 29, 1)
)
WAYS = {
    "local": {"overlap": "local"},
    "ring": {"exchange": "ring"},
    "stages": {"receive_budget": 24_000},
    "stages and local": {"overlap": "local", "receive_budget": 12_000},
}


def wanted(problem):
    inputs = problem.inputs()
    return answer(
        *inputs[:3],
        problem.pattern,
        grad_output=inputs.grad_output,
        grad_lse=inputs.grad_lse,
        key_padding_mask=problem.key_padding_mask(),
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "problem",
    [
        BY_NAME["dilated-ladder-causal"],
        BY_NAME["random-per-head-causal"],
        SEES_ALL,
        SEES_ALL_PADDED,
    ],
    ids=lambda problem: problem.name,
)
def test_every_way_matches_the_oracle(problem, way):
    expected = wanted(problem)
    for got, want in zip(run(problem, SequenceLayout.zigzag(problem.n, 3), **WAYS[way]), expected, strict=True):
        assert error(got, want) <= 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_ranks_without_tokens_take_part(way):
    problem = BY_NAME["gqa"]
    layout = SequenceLayout.of_lengths([20, 0, 30, 11])
    for got, want in zip(run(problem, layout, **WAYS[way]), wanted(problem), strict=True):
        assert error(got, want) <= 1e-12


@pytest.mark.parametrize("text", ["dilated:128x1,384x3", "window:40 & causal", "window:20 | global:100;queries=1"])
@pytest.mark.parametrize(
    "layout", [SequenceLayout.contiguous(700, 2), SequenceLayout.zigzag(700, 2)], ids=["two", "zigzag"]
)
def test_tiles_inside_a_shard_are_computed_where_they_lie(text, layout):
    problem = Problem(name="long", text=text, n=700, heads=3, key_heads=3, d=8, e=8)
    assert sum(share.stages[0].work.blocks for share in shares(text, layout, heads=3, overlap="local")) > 0
    for got, want in zip(run(problem, layout, overlap="local"), wanted(problem), strict=True):
        assert error(got, want) <= 1e-12


@pytest.mark.parametrize("overlap", ["none", "local"])
def test_a_butterfly_matches_the_oracle(overlap):
    found = run(LADDER, SequenceLayout.contiguous(128, 8), exchange="butterfly", overlap=overlap)
    for got, want in zip(found, wanted(LADDER), strict=True):
        assert error(got, want) <= 1e-12


@pytest.mark.parametrize("way", [{}, *WAYS.values()], ids=["fetch", *WAYS])
@pytest.mark.parametrize("problem", [BY_NAME["gqa"], SEES_ALL_PADDED], ids=lambda p: p.name)
def test_dropout_is_that_of_one_device(problem, way):
    inputs = problem.inputs()
    leaves = [x.requires_grad_() for x in inputs[:3]]
    options = {"enable_gqa": True, "key_padding_mask": problem.key_padding_mask(), "dropout_p": 0.3}

    def results(attend, seed=3):
        torch.manual_seed(seed)
        output, lse = attend(*leaves, problem.pattern, **options)
        return output, lse, *torch.autograd.grad((output * inputs.grad_output).sum(), leaves)

    wanted = results(attention_with_lse)
    assert error(results(attention_with_lse, seed=4)[0], wanted[0].detach()) > 0.01
    for world in (4,) if way else (1, 2, 3, 8):
        layout = SequenceLayout.contiguous(problem.n, world)
        found = results(lambda *a, at=layout, **o: virtual_attention(*a, at, **o, **way))
        for got, want in zip(found, wanted, strict=True):
            assert error(got, want.detach()) <= 1e-12


@pytest.mark.skipif(not library_path().exists(), reason="C++ kernel not built")
def test_the_backends_drop_the_same_weights_from_positions():
    problem, layout = BY_NAME["dilated-block-offset"], SequenceLayout.zigzag(100, 3)
    found = []
    for backend in ("cpu", "native"):
        torch.manual_seed(5)
        found.append(
            virtual_attention(
                *problem.inputs()[:3], problem.pattern, layout, enable_gqa=True, dropout_p=0.5, backend=backend
            ).output
        )
    assert error(found[0], found[1]) <= 1e-12


@pytest.mark.parametrize("way", [{}, *WAYS.values()], ids=["fetch", *WAYS])
def test_rows_that_are_not_needed_may_be_anything(way):
    """Every row of K and V that no query of a rank sees is NaN: the rank's rows come out as they were."""
    problem = BY_NAME["gqa"]
    query, key, value = problem.inputs()[:3]
    clean = attention_with_lse(query, key, value, problem.pattern, enable_gqa=True).output
    layout = SequenceLayout.contiguous(problem.n, 4)
    seen = multiplicities(problem.pattern, problem.n, problem.heads) > 0
    for rank in range(layout.world):
        own = layout.positions(rank)
        needed = seen[:, own].any(1).unflatten(0, (problem.key_heads, -1)).any(1)[..., None]
        assert not needed.all()
        given = [torch.where(needed, x, torch.nan) for x in (key, value)]
        found = virtual_attention(query, *given, problem.pattern, layout, enable_gqa=True, **way).output
        assert error(found[:, :, own], clean[:, :, own]) <= 1e-12


def shares(text, layout, heads=4, **options):
    inputs = [torch.zeros(1, heads, layout.n, 16)] * 3
    return make_schedules(Call(parse(text), layout, **options).spec(*inputs), layout, VirtualTransport(layout.world))


def asked(share):
    """The rows that each exchange of a share brings."""
    return [stage.exchange.request.codes for stage in share.stages if stage.exchange is not None]


def test_stages_stay_within_the_budget():
    layout, row_bytes = SequenceLayout.contiguous(512, 4), 2 * 16 * 4
    whole = shares("window:100", layout, overlap="local")
    rows = len(asked(whole[1])[0])
    budget = rows * row_bytes // 3
    staged = shares("window:100", layout, overlap="local", receive_budget=budget)
    assert len({len(share.stages) for share in staged}) == 1
    for before, share in zip(whole, staged, strict=True):
        fetched = asked(share)
        # Two stages are here at a time.
        assert all(2 * len(codes) * row_bytes <= budget for codes in fetched)
        assert torch.cat(fetched).sort().values.equal(asked(before)[0].sort().values)


def test_queries_that_see_everything_fetch_nothing():
    layout = SequenceLayout.contiguous(256, 4)
    fetching = traffic("window:3 | global:2;queries=1", layout, 4, row_bytes=1)[0]
    assert fetching.share_of_ring == 1.0
    travelling = shares("window:3 | global:2;queries=1", layout, overlap="local")
    assert all(share.visit.tokens == 2 for share in travelling)
    assert len(asked(travelling[0])[0]) == 4 * 3
    assert all(share.visit is None for share in shares("window:3 | global:2", layout, overlap="local"))
    assert all(share.visit is None for share in shares("window:3 | global:2;queries=1", layout))


def test_the_choice_is_by_predicted_time_and_says_so():
    layout = SequenceLayout.contiguous(1024, 8)
    ladder = "dilated:64x1,128x2,256x4,512x8,1024x16"
    slow_messages = shares(ladder, layout, machine=Machine(latency=1.0))[0]
    assert slow_messages.exchange == "butterfly"
    assert slow_messages.why.startswith("predicted direct ")
    assert "; not ring: its sums depend on the number of ranks" in slow_messages.why
    assert shares(ladder, layout, machine=Machine(latency=0.0))[0].exchange in ("direct", "butterfly")
    window = shares("window:9", layout)[0]
    assert window.exchange == "direct" and "not butterfly: the pattern is not a plain dilated one" in window.why
    dense = shares("full", layout, overlap="local", machine=Machine(bandwidth=1e3, flops=5.6e4, latency=0.0))[0]
    assert dense.exchange == "ring"
    assert shares("full", layout, overlap="local", exchange="direct")[0].why == "requested"


def test_reports_count_what_the_steps_move():
    layout = SequenceLayout.contiguous(1024, 8)
    ladder = "dilated:64x1,128x2,256x4,512x8,1024x16"
    direct, through = (shares(ladder, layout, exchange=way)[3].stages[0].exchange for way in ("direct", "butterfly"))
    told = direct.report(64, ranks_per_node=4), through.report(64, ranks_per_node=4)
    assert told[0].rows_received == told[1].rows_received
    assert told[1].messages == 3 < told[0].messages
    assert 0 < told[0].bytes_between_nodes < told[0].bytes_received
    assert "a ring or an all-gather receives" in str(told[1])


def test_more_ranks_than_blocks():
    problem = BY_NAME["random"]
    found = run(problem, SequenceLayout.contiguous(problem.n, 40), overlap="local")
    for got, want in zip(found, wanted(problem), strict=True):
        assert error(got, want) <= 1e-12


PATTERNS = (
    "window:64 & causal",
    "window:64",
    "causal",
    "full",
    "dilated:64x1,256x4,1024x16",
    "dilated:64x1,256x4,1024x16 & causal",
    "window:32 | global:16",
    "random:0.1;block=64 & causal",
    "hierarchical:2x1,8x4;block=64",
)


@pytest.mark.parametrize("machine", [Machine(), Machine(bandwidth=1e9, flops=1e12)], ids=["fast", "slow"])
def test_the_chosen_layout_is_never_worse_than_another(machine):
    for text in PATTERNS:
        choice = choose_layout(text, 1024, 3, heads=2, machine=machine)
        assert choice.seconds[choice.name] == min(choice.seconds.values())
        assert set(choice.seconds) == {"contiguous", "zigzag", "dealt out"}
        assert str(choice).startswith(f"{choice.name}: predicted contiguous")


def test_layouts_are_compared_by_what_they_send():
    machine = Machine(flops=1e30)
    for text in ("window:64 & causal", "dilated:64x1,256x4,1024x16"):
        seconds = choose_layout(text, 1024, 3, heads=2, machine=machine).seconds
        for name, layout in {"contiguous": SequenceLayout.contiguous, "zigzag": SequenceLayout.zigzag}.items():
            moved = traffic(text, layout(1024, 3), 2, row_bytes=2 * 64 * 2)
            told = max(machine.transfer(one.bytes_received, one.messages) for one in moved)
            assert seconds[name] == pytest.approx(told)


def test_layout_choice_balances_causal_work_only():
    assert choose_layout("window:64 & causal", 2048, 4, heads=2).name == "contiguous"
    assert choose_layout("causal", 2048, 4, heads=2, machine=Machine(bandwidth=1e12, flops=1e9)).name != "contiguous"


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"overlap": "some"}, "overlap must be one of none, local"),
        ({"exchange": "pigeon"}, "exchange must be one of auto, direct, butterfly, ring"),
        ({"receive_budget": 0}, "receive_budget must be a number of bytes"),
        ({"dropout_p": 1.0}, r"dropout_p must lie in \[0, 1\)"),
        ({"cu_seqlens": torch.tensor([0, 30])}, "cu_seqlens must ascend from 0 to the sequence length 70"),
    ],
)
def test_wrong_options_say_what_must_hold(change, says):
    shard = torch.zeros(1, 2, 70, 8)
    with pytest.raises(ValueError, match=says):
        context_parallel_attention(shard, shard, shard, "causal", SequenceLayout.contiguous(70, 1), **change)


def test_a_group_that_cannot_carry_gpu_tensors_says_so(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="need a process group that supports them"):
            check_group(None, 1, torch.device("cuda"))
        check_group(None, 1, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_an_assumption_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        Machine(bandwidth=0.0)
    with pytest.raises(ValueError, match="latency must not be negative"):
        Machine(latency=-1.0)
