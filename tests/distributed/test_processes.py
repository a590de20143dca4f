"""Real processes on gloo: the same numbers as one process, the bytes that were planned, and errors on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import BY_NAME
from oracle import answer, error
from processes import all_pass

from dilated_attention_pytorch import attention_with_lse
from dilated_attention_pytorch.distributed import (
    SequenceLayout,
    context_parallel_attention,
    context_parallel_attention_with_lse,
    shard_sequence,
)
from dilated_attention_pytorch.distributed.exchange import exchange, plan_exchange, request_for
from dilated_attention_pytorch.distributed.schedule import rank_plan
from dilated_attention_pytorch.distributed.simulate import traffic
from dilated_attention_pytorch.distributed.transport import GroupTransport, VirtualTransport

NAMES = ("dilated-ladder-causal", "dilated-block-offset", "random-per-head-causal", "padded")


def compare(problem, layout, rank: int, group=None, **options) -> None:
    """Twice, so that the second call runs on the plans the first one agreed on."""
    inputs = problem.inputs()
    padding = problem.key_padding_mask()
    wanted = answer(
        *inputs[:3],
        problem.pattern,
        grad_output=inputs.grad_output,
        grad_lse=inputs.grad_lse,
        key_padding_mask=padding,
    )
    mask = None if padding is None else shard_sequence(padding, layout, rank, 1)
    for _ in range(2):
        leaves = [shard_sequence(x, layout, rank).clone().requires_grad_() for x in inputs[:3]]
        output, lse = context_parallel_attention_with_lse(
            *leaves, problem.pattern, layout, group, enable_gqa=True, key_padding_mask=mask, **options
        )
        grads = [shard_sequence(x, layout, rank) for x in (inputs.grad_output, inputs.grad_lse)]
        objective = (output * grads[0]).sum() + torch.where(lse.isfinite(), lse * grads[1], 0.0).sum()
        found = output, lse, *torch.autograd.grad(objective, leaves)
        for got, want in zip(found, wanted, strict=True):
            assert error(got, shard_sequence(want, layout, rank)) <= 1e-12, (problem.name, layout, options)


def every_way(rank: int, world: int) -> None:
    problem = BY_NAME["dilated-ladder-causal"]
    layout = SequenceLayout.zigzag(problem.n, world)
    for options in ({"overlap": "local"}, {"exchange": "ring"}, {"overlap": "local", "receive_budget": 4096}):
        compare(problem, layout, rank, **options)
    compare(BY_NAME["padded"], SequenceLayout.contiguous(64, world), rank, exchange="ring")
    ladder = BY_NAME["full"].__class__(name="ladder", text="dilated:16x1,32x2,64x4", n=64, heads=4, key_heads=2)
    compare(ladder, SequenceLayout.contiguous(64, world), rank, exchange="butterfly", overlap="local")
    sees_all = BY_NAME["full"].__class__(name="sees all", text="window:3 | global:2;queries=1", n=96, heads=4)
    compare(sees_all, SequenceLayout.contiguous(96, world), rank, overlap="local")


def dropout_is_that_of_one_device(rank: int, world: int) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(2, 2, 60, 8, dtype=torch.float64) for _ in range(4)]
    layout = SequenceLayout.contiguous(60, world)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    torch.manual_seed(2)
    wanted = attention_with_lse(*leaves, "window:9", dropout_p=0.3).output
    grads = torch.autograd.grad((wanted * inputs[3]).sum(), leaves)
    own = [shard_sequence(x, layout, rank).clone().requires_grad_() for x in inputs[:3]]
    torch.manual_seed(2 if rank == 0 else 77)
    found = context_parallel_attention(*own, "window:9", layout, dropout_p=0.3)
    assert error(found, shard_sequence(wanted.detach(), layout, rank)) <= 1e-12
    mine = torch.autograd.grad((found * shard_sequence(inputs[3], layout, rank)).sum(), own)
    for got, want in zip(mine, grads, strict=True):
        assert error(got, shard_sequence(want, layout, rank)) <= 1e-12


def autocast_rounds_inputs_as_on_one_device(rank: int, world: int) -> None:
    inputs = [torch.randn(1, 2, 30, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    layout = SequenceLayout.contiguous(30, world)
    wholes = [x.clone().requires_grad_() for x in inputs[:3]]
    leaves = [shard_sequence(x, layout, rank).clone().requires_grad_() for x in inputs[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = attention_with_lse(*wholes, "window:9")
        found = context_parallel_attention_with_lse(*leaves, "window:9", layout)
    assert [x.dtype for x in found] == [x.dtype for x in wanted] == [torch.bfloat16, torch.float32]
    grads = torch.autograd.grad((wanted.output * inputs[3]).sum(), wholes)
    mine = torch.autograd.grad((found.output * shard_sequence(inputs[3], layout, rank)).sum(), leaves)
    for got, want in zip((*found, *mine), (*wanted, *grads), strict=True):
        assert error(got, shard_sequence(want.detach(), layout, rank)) <= 1e-2


def exchange_and_its_derivatives(rank: int, world: int) -> None:
    layout = SequenceLayout.contiguous(50, world)
    pattern = BY_NAME["global-window"].pattern
    requests = [request_for(rank_plan(pattern, layout, r, 2, 2).far_codes, layout, r, 2) for r in range(world)]
    plans = plan_exchange(requests, layout, 2, VirtualTransport(world))
    (mine,) = plan_exchange([requests[rank]], layout, 2, GroupTransport(None, rank))
    assert mine.send.equal(plans[rank].send) and mine.request.codes.equal(plans[rank].request.codes)
    assert (mine.send_counts, mine.request.counts) == (plans[rank].send_counts, plans[rank].request.counts)
    generator = torch.Generator().manual_seed(0)
    shards = [torch.randn(p.local_rows, 3, generator=generator, dtype=torch.float64).requires_grad_() for p in plans]
    weights = [torch.randn(len(p.request.codes), 3, generator=generator, dtype=torch.float64) for p in plans]

    def together(kept):
        sent = [shard[plan.send].split(plan.send_counts) for shard, plan in zip(kept, plans, strict=True)]
        return [torch.cat([from_rank[r] for from_rank in sent]) for r in range(world)]

    objective = sum((x**3 * w).sum() for x, w in zip(together(shards), weights, strict=True))
    wanted = torch.autograd.grad(objective, shards, create_graph=True)
    twice = torch.autograd.grad(sum((g**2).sum() for g in wanted), shards)

    own = shards[rank].detach().requires_grad_()
    received = exchange(own, mine, None)
    assert received.equal(together(shards)[rank])
    (first,) = torch.autograd.grad((received**3 * weights[rank]).sum(), own, create_graph=True)
    assert error(first, wanted[rank].detach()) <= 1e-14
    (second,) = torch.autograd.grad((first**2).sum(), own)
    assert error(second, twice[rank]) <= 1e-14

    halves = [w.bfloat16() for w in weights]
    total = sum((x.float() * w).sum() for x, w in zip(together(shards), halves, strict=True))
    rounded_once = torch.autograd.grad(total, shards)[rank].bfloat16()
    own_halves = own.detach().bfloat16().requires_grad_()
    assert torch.autograd.grad(exchange(own_halves, mine, None), own_halves, halves[rank])[0].equal(rounded_once)

    (returned,) = torch.autograd.grad(exchange(own, mine, None), own, weights[rank])
    products = torch.stack([(received.detach() * weights[rank]).sum(), (own.detach() * returned).sum()])
    dist.all_reduce(products)
    assert abs(products[0] - products[1]) <= 1e-12


def bytes_are_those_planned(rank: int, world: int) -> None:
    problem = BY_NAME["dilated-ladder"]
    layout = SequenceLayout.contiguous(problem.n, world)
    row_bytes = 8 * problem.batch * (problem.d + problem.e)
    planned = traffic(problem.pattern, layout, problem.heads, problem.key_heads, row_bytes=row_bytes)[rank]
    leaves = [shard_sequence(x, layout, rank).clone().requires_grad_() for x in problem.inputs()[:3]]
    context_parallel_attention(*leaves, problem.pattern, layout)
    moved = []
    send = dist.all_to_all_single

    def counted(output, input, *splits, **options):  # the names are torch's
        moved.append((output.numel() * output.itemsize, input.numel() * input.itemsize))
        return send(output, input, *splits, **options)

    dist.all_to_all_single = counted
    try:
        context_parallel_attention(*leaves, problem.pattern, layout).sum().backward()
    finally:
        dist.all_to_all_single = send
    assert planned.bytes_received > 0
    forward = planned.bytes_received, planned.bytes_sent
    assert moved == [forward, forward[::-1]]


def disagreement_raises_everywhere(rank: int, world: int) -> None:
    layout = SequenceLayout.contiguous(12 * world, world)
    shard = torch.randn(1, 2, 12, 8)
    odd = rank == world - 1
    must_hold = "every rank must make the same call"
    with pytest.raises(ValueError, match=must_hold) as caught:
        context_parallel_attention(shard, shard, shard, "window:5" if odd else "window:4", layout)
    assert f"rank {world - 1}: window:5" in str(caught.value)
    with pytest.raises(ValueError, match=must_hold):
        context_parallel_attention(*[shard.double() if odd else shard] * 3, "window:4", layout)
    with pytest.raises(ValueError, match=must_hold):
        context_parallel_attention(shard, shard.clone().requires_grad_(odd), shard, "window:4", layout)
    with pytest.raises(ValueError, match=must_hold):
        context_parallel_attention(shard, shard, shard, "window:4", layout, overlap="local" if odd else "none")
    with pytest.raises(ValueError, match="query must hold the 12 tokens" if odd else must_hold):
        context_parallel_attention(shard[:, :, :11] if odd else shard, shard, shard, "window:4", layout)
    with pytest.raises(ValueError, match=must_hold):
        context_parallel_attention(shard, shard, shard, "window:4", layout, sink=torch.zeros(2) if odd else None)
    other = SequenceLayout.contiguous(12 * world, world + 1)
    with pytest.raises(ValueError, match=f"a process group of {world + 1} members" if odd else must_hold):
        context_parallel_attention(shard, shard, shard, "window:4", other if odd else layout)
    with pytest.raises(ValueError, match="dropout_p must lie in" if odd else must_hold):
        context_parallel_attention(shard, shard, shard, "window:4", layout, dropout_p=1.5 if odd else 0.0)
    with pytest.raises(ValueError, match='exchange="butterfly" must be possible'):
        context_parallel_attention(shard, shard, shard, "window:4", layout, exchange="butterfly")
    assert context_parallel_attention(shard, shard, shard, "window:4", layout).isfinite().all()


def small_check(rank: int, world: int) -> None:
    compare(BY_NAME["dilated-ladder-causal"], SequenceLayout.contiguous(141, world), rank)
    every_way(rank, world)
    dropout_is_that_of_one_device(rank, world)
    autocast_rounds_inputs_as_on_one_device(rank, world)
    exchange_and_its_derivatives(rank, world)
    bytes_are_those_planned(rank, world)
    disagreement_raises_everywhere(rank, world)


def same_as_one_process(rank: int, world: int) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    for size, group in groups.items():
        if rank < size:
            for name in NAMES:
                compare(BY_NAME[name], SequenceLayout.contiguous(BY_NAME[name].n, size), rank, group)
            compare(BY_NAME["global-window"], SequenceLayout.zigzag(BY_NAME["global-window"].n, size), rank, group)
    empty = SequenceLayout.of_lengths([40, 0, *[1] * (world - 3), 61 - 40 - (world - 3)])
    compare(BY_NAME["gqa"], empty, rank, groups[world])
    compare(BY_NAME["gqa"], empty, rank, groups[world], exchange="ring")
    small_check(rank, world)


@pytest.mark.timeout(200)
def test_two_processes_compute_what_one_does():
    all_pass(small_check, 2, seconds=150)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_to_four_processes_compute_what_one_does():
    all_pass(same_as_one_process, 4, seconds=280)
