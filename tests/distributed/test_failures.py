"""A mistake or an exception on one gloo rank: every rank raises at once, and the group stays usable."""

from __future__ import annotations

import copy
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from oracle import error
from processes import all_pass

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.distributed import (
    SequenceLayout,
    attempt,
    context_parallel_attention,
    context_parallel_attention_with_lse,
    context_parallel_loss,
    shard_sequence,
)
from dilated_attention_pytorch.distributed import exchange as exchange_module
from dilated_attention_pytorch.distributed import executor as executor_module
from dilated_attention_pytorch.distributed import learned as learned_module
from dilated_attention_pytorch.distributed import schedule as schedule_module
from dilated_attention_pytorch.distributed.config import DistributedSparseConfig
from dilated_attention_pytorch.nn import (
    BlockSparseRingDistributedDilatedAttention,
    MultiheadBlockSparseAdaptive,
    set_process_group,
)

SOON = 10.0
"""Seconds within which every rank must raise; the group's timeout is three times as long."""
ODD = 1
"""The rank on which something is wrong."""


@contextmanager
def raises_everywhere(rank: int, kind: type[Exception], here: str, elsewhere: str):
    """Expect the odd rank's own error there, and a ValueError that names it on the others, without waiting."""
    begin = time.monotonic()
    with pytest.raises(kind if rank == ODD else ValueError, match=here if rank == ODD else elsewhere):
        yield
    assert time.monotonic() - begin < SOON
    dist.barrier()


def modules(**options):
    ladder = [16, 64], [1, 4]
    config = DistributedSparseConfig(block_size=16)
    return {
        "core": dap.RingDilatedAttention(*ladder, **options),
        "blocks": dap.BlockSparseRingDilatedAttention([64], [1], block_size=16, **options),
        "multihead": dap.RingMultiheadDilatedAttention(32, 4, *ladder, **options),
        "multihead blocks": dap.BlockSparseRingMultiheadDilatedAttention(32, 4, [64], [1], block_size=16, **options),
        "nodes": BlockSparseRingDistributedDilatedAttention(32, 4, [64], [1], config, **options),
    }


def call(module, n: int = 20):
    multihead = hasattr(module, "out_proj")
    x = torch.randn(1, n, 32) if multihead else torch.randn(1, n, 4, 8)
    return module(x)[0] if multihead else module(x, x, x)


def a_group_is_explicit(rank: int, world: int) -> None:
    both = r"(?s)process_group in a job of 2 ranks.*process_group=torch.distributed.group.WORLD.*ring_size=1"
    for name, module in modules().items():
        for built in (module, copy.deepcopy(module)):
            with pytest.raises(ValueError, match=both):
                call(built)
        assert set_process_group(module, dist.group.WORLD) == 1
        assert module.ranks.world == world, name
        assert call(module, 20 - rank).isfinite().all(), name
        set_process_group(module, None)
        if rank == 0:
            call(module)
    if rank == 0:
        for module in modules(ring_size=1).values():
            call(module)
        # Data parallelism needs no setting where the name promises no ring.
        call(MultiheadBlockSparseAdaptive(32, 4, [64], [1], block_size=16))


@pytest.mark.timeout(60)
def test_ring_modules_need_an_explicit_group():
    all_pass(a_group_is_explicit, 2, seconds=50)


def positions_meet_empty_shards(rank: int, world: int) -> None:
    layout = SequenceLayout.of_lengths([20, 0, 13])
    x = torch.randn(1, layout.n, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for position in ("rotary", "xpos", "alibi"):
        torch.manual_seed(0)
        options = {"position": position, "dtype": torch.float64}
        over = dap.RingMultiheadDilatedAttention(32, 4, [16], [2], process_group=dist.group.WORLD, **options)
        alone = dap.MultiheadDilatedAttention(32, 4, [16], [2], **options)
        alone.load_state_dict(over.state_dict())
        found = over(shard_sequence(x, layout, rank, 1), is_causal=True)[0]
        wanted = shard_sequence(alone(x, is_causal=True)[0], layout, rank, 1)
        assert error(found, wanted) <= 1e-12
        found.sum().backward()


def one_rank_leaves_the_range(rank: int, world: int) -> None:
    """The last shard alone lies beyond what float32 holds."""
    for kind in ("ring", "nodes", "adaptive"):
        options = {"position": dap.Xpos(scale_base=8.0), "process_group": dist.group.WORLD}
        if kind == "ring":
            module = dap.RingMultiheadDilatedAttention(32, 4, [16], [2], **options)
        elif kind == "nodes":
            config = DistributedSparseConfig(block_size=16)
            module = BlockSparseRingDistributedDilatedAttention(32, 4, [64], [1], config, **options)
        else:
            module = MultiheadBlockSparseAdaptive(32, 4, [64], [1], block_size=16, **options)
        n = 100 if rank == 0 else 700 if rank == ODD else 0
        with raises_everywhere(rank, ValueError, "XPOS must stay", r"(?s)same call.*rank 1: failed with .*XPOS"):
            module(torch.randn(1, n, 32), is_causal=True)
        assert module(torch.randn(1, 5, 32), is_causal=True)[0].isfinite().all()


class Broken(dap.Pattern):
    """A user's pattern that fails on one rank."""

    def resolve(self, n: int, heads: int):
        raise KeyError("no such table")

    def describe(self) -> str:
        return "broken"


def any_exception_is_shared(rank: int, world: int) -> None:
    layout = SequenceLayout.contiguous(40 * world, world)
    shard = torch.randn(1, 2, 40, 8)
    other = r"(?s)same call.*rank 1: failed with "
    with raises_everywhere(rank, KeyError, "no such table", other + "KeyError"):
        context_parallel_attention(*[shard] * 3, Broken() if rank == ODD else "window:4", layout)
    with raises_everywhere(rank, TypeError, "layout must be a SequenceLayout", other + "TypeError"):
        context_parallel_attention(*[shard] * 3, "window:4", "zigzag" if rank == ODD else layout)
    with raises_everywhere(rank, TypeError, "key must", other):
        context_parallel_attention(shard, None if rank == ODD else shard, shard, "window:4", layout)


def planning_fails_on_one(rank: int, world: int) -> None:
    layout, shard = SequenceLayout.contiguous(40 * world, world), torch.randn(1, 2, 40, 8)
    names = ("_rank_plans", "_requests", "_stage", "_cuts", "predict", "_ring_schedules")
    steps = [*((schedule_module, name) for name in names), (exchange_module, "_plan")]
    failed = 0
    for way in WAYS:
        for at, (module, step) in enumerate(steps):
            real, calls = getattr(module, step), []

            def short(*args, real=real, calls=calls, **kwargs):
                calls.append(1)
                if rank == ODD:
                    raise MemoryError("no room")
                return real(*args, **kwargs)

            setattr(module, step, short)
            # Another width every time, for schedules are cached.
            text, begin = f"window:{3 + at} | global:2;queries=1", time.monotonic()
            try:
                context_parallel_attention(*[shard] * 3, text, layout, **way)
            except MemoryError as raised:
                assert str(raised) == "no room" if rank == ODD else "rank 1: MemoryError: no room" in str(raised)
                assert time.monotonic() - begin < SOON
                failed += 1
            else:
                assert not calls
            finally:
                setattr(module, step, real)
            assert context_parallel_attention(*[shard] * 3, text, layout, **way).isfinite().all()
    assert failed >= 18


WAYS = [{}, {"overlap": "local"}, {"overlap": "local", "receive_budget": 512}, {"exchange": "ring"}]


def computing_fails_on_one(rank: int, world: int) -> None:
    """An exception between the collectives of a call, forward or backward, whichever stage it comes in."""
    layout = SequenceLayout.contiguous(40 * world, world)
    leaves = [torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3)]
    padding = torch.zeros(1, 40, dtype=torch.bool)

    def step(way: dict) -> None:
        text = "window:5 | global:2;queries=1"
        context_parallel_attention(*leaves, text, layout, key_padding_mask=padding, **way).sum().backward()

    for way in WAYS:
        for name in ("attend", "differentiate", "RowSource.rows"):
            owner, _, attribute = name.rpartition(".")
            place = exchange_module.RowSource if owner else executor_module
            real = getattr(place, attribute)
            for nth in (1, 2) if name != "RowSource.rows" else (1, 3):
                calls = []

                def broken(*args, real=real, calls=calls, nth=nth, **kwargs):
                    calls.append(1)
                    if rank == ODD and len(calls) == nth:
                        raise KeyError("broken")
                    return real(*args, **kwargs)

                setattr(place, attribute, broken)
                begin = time.monotonic()
                try:
                    step(way)
                except (KeyError, ValueError) as raised:
                    assert isinstance(raised, KeyError) == (rank == ODD), raised
                    assert rank == ODD or "rank 1: KeyError: 'broken'" in str(raised)
                    assert time.monotonic() - begin < SOON
                else:
                    assert rank != ODD or len(calls) < nth
                finally:
                    setattr(place, attribute, real)
                step(way)


def learned_layer_fails_on_one(rank: int, world: int) -> None:
    module = MultiheadBlockSparseAdaptive(32, 4, [64], [1], block_size=16, process_group=dist.group.WORLD)
    x, real = torch.randn(1, 32, 32), learned_module.selected_attention
    if rank == ODD:
        learned_module.selected_attention = lambda *_, **__: {}["nothing"]
    with raises_everywhere(rank, KeyError, "nothing", r"(?s)every rank to succeed.*rank 1: KeyError"):
        module(x)
    learned_module.selected_attention = real
    assert module(x)[0].isfinite().all()


def memory_runs_out_on_one(rank: int, world: int) -> None:
    """All ranks run the step again, although memory ran out on one alone and in the middle of a call."""
    layout, shard, runs = SequenceLayout.contiguous(20 * world, world), torch.randn(1, 2, 20, 8), []
    real = executor_module.attend

    def short(*args):
        if rank == ODD and len(runs) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return real(*args)

    def step() -> torch.Tensor:
        runs.append(1)
        return context_parallel_attention(*[shard] * 3, "window:4", layout)

    executor_module.attend = short
    assert attempt(step, lighten=lambda: True).isfinite().all()
    assert len(runs) == 2
    runs.clear()
    with pytest.raises(torch.OutOfMemoryError if rank == ODD else MemoryError, match=r"out of memory|rank 1"):
        step()
    executor_module.attend = real
    dist.barrier()


def no_tokens_at_all(rank: int, world: int) -> None:
    layout = SequenceLayout.contiguous(0, world)
    leaves = [torch.randn(2, 2, 0, 8, requires_grad=True) for _ in range(3)]
    for way in WAYS:
        output, lse = context_parallel_attention_with_lse(*leaves, "dilated:8x1,16x2", layout, is_causal=True, **way)
        assert output.shape == (2, 2, 0, 8) and lse.shape == (2, 2, 0)
        (output.sum() + lse.sum()).backward()
    with raises_everywhere(rank, ValueError, "pattern", r"(?s)same call.*rank 1: failed with "):
        context_parallel_attention(*leaves, "nonsense" if rank == ODD else "window:4", layout)
    module = dap.RingMultiheadDilatedAttention(32, 4, [16], [2], process_group=dist.group.WORLD)
    assert module(torch.randn(1, 0, 32))[0].shape == (1, 0, 32)


def losses_fail_on_one(rank: int, world: int) -> None:
    logits = torch.randn(1, 6, 5, requires_grad=True)
    labels = torch.zeros(1, 6, dtype=torch.int64)
    elsewhere = r"(?s)every rank to succeed.*rank 1: "
    with raises_everywhere(rank, ValueError, "labels must have shape", elsewhere + "ValueError: labels"):
        context_parallel_loss(logits, labels[:, :5] if rank == ODD else labels)
    with raises_everywhere(rank, IndexError, "out of bounds", elsewhere + "IndexError"):
        context_parallel_loss(logits, labels + 9 if rank == ODD else labels)
    with raises_everywhere(rank, ValueError, "gradients must be", elsewhere):
        context_parallel_loss(logits, labels, gradients="max" if rank == ODD else "mean")
    assert context_parallel_loss(logits, labels).isfinite()


def failures(rank: int, world: int) -> None:
    positions_meet_empty_shards(rank, world)
    one_rank_leaves_the_range(rank, world)
    any_exception_is_shared(rank, world)
    losses_fail_on_one(rank, world)
    memory_runs_out_on_one(rank, world)
    learned_layer_fails_on_one(rank, world)
    no_tokens_at_all(rank, world)


@pytest.mark.timeout(90)
def test_an_exception_on_one_rank_is_raised_on_all():
    all_pass(failures, 3, seconds=80)


@pytest.mark.timeout(90)
def test_a_failed_plan_on_one_rank_is_raised_on_all():
    all_pass(planning_fails_on_one, 2, seconds=80)


@pytest.mark.timeout(90)
def test_a_failed_computation_on_one_rank_is_raised_on_all():
    all_pass(computing_fails_on_one, 2, seconds=80)
