"""A rank that dies, stalls, fails or runs out of memory: the same kind of error everywhere, in time, or the same result."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import processes
import pytest
import torch
import torch.distributed as dist
from limits import scaled, slowdown
from oracle import error
from processes import all_pass, run_ranks

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import distributed
from dilated_attention_pytorch.distributed import SequenceLayout, shard_sequence
from dilated_attention_pytorch.distributed import receive_buffers as memory_module
from dilated_attention_pytorch.distributed.config import DistributedSparseConfig
from dilated_attention_pytorch.distributed.receive_buffers import (
    Arenas,
    on_pressure,
    relieve,
    shared_arenas,
)
from dilated_attention_pytorch.distributed.recovery import (
    LeftBehind,
    RankLost,
    RankStalled,
    StepFailed,
    attempt,
    fault_of,
    faults,
    regroup,
    vote,
)
from dilated_attention_pytorch.distributed.transport import least_free
from dilated_attention_pytorch.nn import BlockSparseRingDistributedDilatedAttention, set_process_group

N = 120
"""Tokens."""
LADDER = [16, 64], [1, 4]


def sequence() -> torch.Tensor:
    return torch.randn(1, N, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def layer(**options):
    torch.manual_seed(0)
    return dap.RingMultiheadDilatedAttention(32, 4, *LADDER, position="rotary", dtype=torch.float64, **options)


def step(module, rank: int, world: int) -> torch.Tensor:
    """One forward and backward pass; the gradient of this rank's tokens."""
    x = shard_sequence(sequence(), SequenceLayout.contiguous(N, world), rank, 1).requires_grad_()
    module(x, is_causal=True)[0].square().sum().backward()
    return x.grad


def dying(rank: int, world: int, when: str, slower: float) -> tuple[str, float, float]:
    """Rank 1 goes away; the others find out, form a group of those left, and come to the exact result."""
    module = layer(process_group=dist.group.WORLD)
    step(module, rank, world)
    x = shard_sequence(sequence(), SequenceLayout.contiguous(N, world), rank, 1).requires_grad_()
    begin = time.monotonic()
    if rank == 1 and when == "forward":
        os._exit(1)

    def both_passes() -> None:
        output = module(x, is_causal=True)[0].square().sum()
        if rank == 1:
            os._exit(1)
        output.backward()

    with pytest.raises((RankLost, RankStalled)) as caught, faults():
        attempt(both_passes) if when == "attempt" else both_passes()
    noticed = time.monotonic() - begin
    assert "regroup" in str(caught.value)
    left = regroup(processes.store, 1, rank, world, settle=1.5 * slower, timeout=timedelta(seconds=20 * slower))
    assert left.members == tuple(r for r in range(world) if r != 1)
    assert set_process_group(module, dist.group.WORLD) == 1
    found = step(module, left.rank, left.world)
    whole = sequence().requires_grad_()
    layer(ring_size=1)(whole, is_causal=True)[0].square().sum().backward()
    wanted = shard_sequence(whole.grad, SequenceLayout.contiguous(N, left.world), left.rank, 1)
    return type(caught.value).__name__, noticed, error(found, wanted)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("when", ["forward", "backward", "attempt"])
def test_other_ranks_continue_exactly_after_a_rank_dies(when):
    slower = slowdown()
    answers = run_ranks(dying, 3, when, slower, timeout=20.0 * slower)
    assert sorted(answers) == [0, 2], answers
    for kind, noticed, difference in answers.values():
        assert kind == "RankLost"
        assert noticed < 10 * slower
        assert difference <= 1e-12


def stalling(rank: int, world: int, patience: float) -> str:
    """Rank 1 stays silent for longer than the others wait."""
    module = layer(process_group=dist.group.WORLD)
    step(module, rank, world)
    begin = time.monotonic()
    if rank == 1:
        time.sleep(2.5 * patience)
    try:
        with faults():
            step(module, rank, world)
    except (RankLost, RankStalled) as fault:
        if rank != 1:
            assert time.monotonic() - begin < 2 * patience
            assert isinstance(fault, RankStalled) or rank != 0
    else:
        return "no fault"
    try:
        left = regroup(processes.store, 1, rank, world, settle=patience / 4, timeout=timedelta(seconds=5 * patience))
    except LeftBehind as behind:
        return str(behind)
    return f"{left.world} are left"


@pytest.mark.timeout(120)
def test_a_rank_that_stalls_is_given_up_at_the_timeout():
    patience = scaled(4.0)
    answers = run_ranks(stalling, 3, patience, timeout=patience)
    assert answers[0] == answers[2] == "2 are left", answers
    assert "ranks [0, 2] went on without rank 1" in answers[1], answers


def deciding_together(rank: int, world: int) -> None:
    assert vote() == ({}, False)
    assert vote(MemoryError("no room") if rank == 2 else None) == ({2: "MemoryError: no room"}, True)
    with pytest.raises(KeyError if rank == 1 else StepFailed, match="wrong") as caught:
        attempt(lambda: fails_on_one(rank))
    if rank != 1:
        assert caught.value.errors == {1: "KeyError: 'wrong'"}
    memory_runs_out(rank)
    memory_runs_out_for_good(rank)
    the_poorest_rank_decides(rank)
    all_may_meet_again(rank, world)


def all_may_meet_again(rank: int, world: int) -> None:
    """Where no one is lost, no one waits."""
    begin = time.monotonic()
    left = regroup(processes.store, 1, rank, world, settle=90.0, timeout=timedelta(seconds=80))
    assert left == (rank, world, tuple(range(world)), 0)
    assert time.monotonic() - begin < 80
    assert vote() == ({}, False)


def raising_within_a_step(rank: int, world: int) -> tuple[str, str, str, float]:
    """Rank 1 raises while the others wait for it in a collective of another size than a vote."""
    begin = time.monotonic()

    def broken():
        if rank == 1:
            raise ValueError("a broken batch")
        module(shard_sequence(sequence(), SequenceLayout.contiguous(N, world), rank, 1), is_causal=True)

    module = layer(process_group=dist.group.WORLD)
    with pytest.raises(Exception) as caught:
        attempt(broken)
    raised = caught.value
    return type(raised).__name__, str(raised), type(raised.__cause__).__name__, time.monotonic() - begin


@pytest.mark.timeout(60)
def test_the_error_of_a_rank_reaches_every_user():
    patience = scaled(4.0)
    answers = run_ranks(raising_within_a_step, 3, timeout=patience)
    assert answers[1][:2] == ("ValueError", "a broken batch"), answers
    for rank in (0, 2):
        kind, text, cause, _ = answers[rank]
        assert (kind, cause) == ("StepFailed", "RankStalled"), answers
        assert text == "another rank raised:\n  rank 1: ValueError: a broken batch"
    assert all(seconds < 3 * patience for *_, seconds in answers.values()), answers


def going_on_from_one_state(rank: int, world: int) -> tuple[int, list[float], int]:
    """Rank 2 dies when rank 0 has completed one step more than rank 1."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    step = 0
    for _ in range(5 if rank == 0 else 4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        step += 1
    if rank == 2:
        os._exit(1)
    options = {"settle": 1.5, "timeout": timedelta(seconds=20)}
    left = regroup(processes.store, 1, rank, world, step=step, state=[model, optimizer], **options)
    moment = optimizer.state[model.weight]
    held = torch.cat([model.weight.detach().flatten(), moment["exp_avg"].flatten(), moment["step"].view(1)])
    again = regroup(processes.store, 2, left.rank, left.world, step=left.step, state=[model, optimizer], **options)
    return left.step, held.tolist(), again.step


@pytest.mark.timeout(60)
def test_ranks_that_are_left_agree_on_step_and_state():
    answers = run_ranks(going_on_from_one_state, 3, timeout=20.0)
    assert sorted(answers) == [0, 1], answers
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][2] == answers[0][1][-1] == 5


def fails_on_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("wrong")


def over_nodes(**settings):
    torch.manual_seed(0)
    config = DistributedSparseConfig(block_size=16, node_size=2, inter_node_sparsity=0.3, **settings)
    options = {"process_group": dist.group.WORLD, "dtype": torch.float64}
    return BlockSparseRingDistributedDilatedAttention(32, 4, [64], [1], config, **options)


def rows_of(module, rank: int) -> torch.Tensor:
    x = shard_sequence(sequence(), SequenceLayout.contiguous(N, 3), rank, 1).requires_grad_()
    output = module(x)[0]
    output.square().sum().backward()
    return torch.cat([output.detach(), x.grad])


def memory_runs_out(rank: int) -> None:
    """Once, on one rank, after the exchange: all compute again, in smaller parts, to the same numbers."""
    wanted = rows_of(over_nodes(), rank)
    real, calls = distributed.context_parallel_attention, []

    def short_of_memory(*args, **kwargs):
        calls.append(kwargs.get("receive_budget"))
        output = real(*args, **kwargs)
        if rank == 2 and len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return output

    module = over_nodes()
    distributed.context_parallel_attention = short_of_memory
    try:
        assert error(rows_of(module, rank), wanted) <= 1e-12
    finally:
        distributed.context_parallel_attention = real
    assert len(calls) == 2
    assert calls[1] is not None and (calls[0] is None or calls[1] < calls[0])


def memory_runs_out_for_good(rank: int) -> None:
    def never_enough():
        if rank == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")

    lighter = []
    # One rank that gives memory back is enough to try again.
    with pytest.raises(torch.OutOfMemoryError if rank == 0 else StepFailed, match="CUDA out of memory"):
        attempt(never_enough, lighten=lambda: lighter.append(1) or rank == 1)
    assert len(lighter) == 2


def the_poorest_rank_decides(rank: int) -> None:
    wanted = rows_of(over_nodes(), rank)
    memory_module.free_bytes = lambda device: 20_000 if rank == 1 else 10**9
    real, budgets = distributed.context_parallel_attention, []

    def watched(*args, **kwargs):
        budgets.append(kwargs.get("receive_budget"))
        return real(*args, **kwargs)

    distributed.context_parallel_attention = watched
    try:
        assert least_free(torch.device("cpu")) == 20_000
        assert error(rows_of(over_nodes(), rank), wanted) <= 1e-12
        rows_of(over_nodes(enable_memory_optimization=False), rank)
    finally:
        distributed.context_parallel_attention = real
    assert budgets == [8192, None]
    with torch.no_grad():
        module, own = over_nodes(), shard_sequence(sequence(), SequenceLayout.contiguous(N, 3), rank, 1)
        held = [(module(own), shared_arenas.nbytes)[1] for _ in range(3)]
    assert 0 < held[1] == held[2] <= 2 * 8192


@pytest.mark.timeout(120)
def test_ranks_decide_together():
    all_pass(deciding_together, 3)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1234"), RankLost),
        (RuntimeError("Timed out waiting 4000ms for recv operation to complete"), RankStalled),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), RankLost),
        (dist.DistBackendError("Watchdog caught collective operation timeout"), RankStalled),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
        (ValueError("scale must be finite"), None),
    ],
)
def test_errors_of_torch_get_a_type(raised, kind):
    assert fault_of(raised) is kind
    with pytest.raises(kind or type(raised)), faults():
        raise raised


def test_arenas_are_used_again_when_nothing_lies_in_them():
    cpu, arenas = torch.device("cpu"), Arenas()
    first, second = (arenas.take((4, 4), torch.float32, cpu) for _ in range(2))
    assert arenas.nbytes == 128
    third = arenas.take((4, 4), torch.float32, cpu)
    assert arenas.nbytes == 128
    assert len({x.data_ptr() for x in (first, second, third)}) == 3
    place, part = first.data_ptr(), first[1:2]
    del first
    assert arenas.take((2, 2), torch.float64, cpu).data_ptr() != place
    del part
    assert arenas.take((2, 2), torch.float64, cpu).data_ptr() == place
    larger = arenas.take((5, 4), torch.float32, cpu)
    assert arenas.nbytes == 64 + 80
    del larger, second
    handle = on_pressure(arenas.drop)
    assert relieve()
    assert arenas.nbytes == 0
    assert not relieve()
    handle.remove()


def test_a_product_keeps_what_it_was_computed_from():
    """A buffer that autograd still needs is not given out again."""
    arenas = Arenas(1)
    rows, weight = arenas.take((3, 3), torch.float32, torch.device("cpu")).fill_(2.0), torch.ones(3, 3).requires_grad_()
    product = (rows @ weight).sum()
    place = rows.data_ptr()
    del rows
    assert arenas.take((3, 3), torch.float32, torch.device("cpu")).data_ptr() != place
    product.backward()
    assert weight.grad.eq(6.0).all()
    del product
    assert arenas.take((3, 3), torch.float32, torch.device("cpu")).data_ptr() == place
