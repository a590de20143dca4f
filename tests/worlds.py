"""Many ranks in one process: virtual ones, and torch's own test tools, which are private and kept to this file."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from limits import scaled
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.fake_pg import FakeStore

from dilated_attention_pytorch.distributed import virtual_attention


def run_threads(check: Callable[[int, int], None], world: int, seconds: float = 120) -> None:
    """Run `check(rank, world)` on a thread each, with real collectives between them; every rank must come to its end.

    `seconds` is a limit for two quiet cores.
    """
    seconds = scaled(seconds)
    store, failures = dist.HashStore(), {}
    everyone = threading.Barrier(world)

    def member(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            check(rank, world)
            everyone.wait(seconds)
            dist.destroy_process_group()
        except BaseException as error:
            failures[rank] = traceback.format_exc()
            everyone.abort()
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg.ProcessLocalGroup.reset()
    multi_threaded_pg._install_threaded_pg()
    if not hasattr(dist.distributed_c10d._world, "comms"):
        # torch 2.11 asks for communicators when a group ends, and its world of threads has none.
        dist.distributed_c10d._world.comms = []
    try:
        threads = [threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
        assert not any(thread.is_alive() for thread in threads), f"ranks still run after {seconds} s"
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())[:2])


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """A group of any size whose collectives move nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_virtual_ranks(problem, layout, backend="auto", dtype=torch.float64, **options):
    """Output, LSE and all gradients of a named problem on virtual ranks."""
    inputs = problem.inputs(dtype)
    leaves = [t.requires_grad_() for t in inputs[:3]]
    padding = problem.key_padding_mask()
    output, lse = virtual_attention(
        *leaves, problem.pattern, layout, enable_gqa=True, key_padding_mask=padding, backend=backend, **options
    )
    objective = (output * inputs.grad_output).sum() + torch.where(lse.isfinite(), lse * inputs.grad_lse, 0.0).sum()
    return output, lse, *torch.autograd.grad(objective, leaves)
