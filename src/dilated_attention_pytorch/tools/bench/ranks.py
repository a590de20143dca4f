"""Ranks of the benchmark: one after another in this process, or processes of this machine over gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from ... import parse
from ...distributed import (
    SequenceLayout,
    context_parallel_attention_with_lse,
    shard_sequence,
    traffic,
    unshard_sequence,
    virtual_attention,
)
from ...ops import AttentionOutput
from .cases import Case, Group
from .gate import Computed
from .measure import PeakMemory, clock
from .results import DIRECTIONS

PATIENCE = timedelta(seconds=300)
"""Timeout of a rank in seconds."""
Three = tuple[Tensor, Tensor, Tensor]
"""query, key, value"""


def in_turn(case: Case, group: Group, inputs: Three, backend: str) -> Callable[[], AttentionOutput]:
    """All ranks one after another; the time is that of one device for the work of all."""
    layout = SequenceLayout.contiguous(group.n, case.ranks)
    return lambda: virtual_attention(*inputs, parse(case.pattern), layout, backend=backend)


def exchanged(case: Case, group: Group) -> dict[str, Any]:
    """Bytes exchanged in a forward pass, and those of a ring."""
    layout = SequenceLayout.contiguous(group.n, case.ranks)
    row_bytes = 2 * group.d * getattr(torch, group.dtype).itemsize
    moved = traffic(case.pattern, layout, group.heads, group.key_heads, row_bytes=row_bytes)
    most = max(moved, key=lambda rank: rank.bytes_received)
    sizes = {"ranks": case.ranks, "received_bytes": most.bytes_received, "ring_bytes": most.ring_bytes}
    return {**sizes, "processes": True} if case.processes else sizes


class Processes:
    """Processes of this machine, each with its shard of the sequence, that compute on request.

    A call returns when the slowest has answered. What crosses between them goes over gloo on the loopback interface.
    """

    def __init__(self, case: Case, group: Group, inputs: Three, grad_output: Tensor, backend: str) -> None:
        self.layout = SequenceLayout.contiguous(group.n, case.ranks)
        self.inputs, self.grad_output = tuple(x.detach() for x in inputs), grad_output
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.ends: list[Connection] = []
        self.members = []
        for rank in range(case.ranks):
            mine, theirs = context.Pipe()
            shards = [shard_sequence(x.detach(), self.layout, rank) for x in (*inputs, grad_output)]
            # Arrays travel by value: shared memory of tensors would need a file descriptor each.
            arrays = [x.contiguous().numpy() for x in shards]
            member = context.Process(
                target=_serve,
                args=(theirs, rank, case.ranks, port, case.pattern, group.n, backend, arrays),
                daemon=True,
            )
            member.start()
            # Close the parent's copy of the child's end: reading then fails if the process dies, instead of blocking.
            theirs.close()
            self.ends.append(mine)
            self.members.append(member)
        self._ask("ready")

    def prepare(self) -> tuple[dict[str, Any], Computed]:
        """First calls of both directions: the subject to time, and the inputs of the gate."""
        run = {name: partial(self._ask, name) for name in DIRECTIONS}
        found = {
            "run": run,
            "first_call_s": clock(run["forward"]),
            # Memory of other processes is not measured here.
            "peak": {name: PeakMemory("cpu") for name in DIRECTIONS},
        }
        run["backward"]()
        output, lse, *gradients = (
            unshard_sequence(parts, self.layout) for what in ("output", "gradients") for parts in self._results(what)
        )
        return found, Computed(*(*self.inputs, output, lse, self.grad_output, *gradients))

    def close(self) -> None:
        """End the processes."""
        for end in self.ends:
            end.close()
        for member in self.members:
            member.join(timeout=10)
            if member.is_alive():
                member.kill()

    def _results(self, what: str) -> list[tuple[Tensor, ...]]:
        return list(zip(*([torch.from_numpy(x) for x in answer] for answer in self._ask(what)), strict=True))

    def _ask(self, what: str) -> list[Any]:
        try:
            for end in self.ends:
                end.send(what)
            answers = [end.recv() for end in self.ends]
        except (EOFError, OSError) as error:
            raise RuntimeError(f"a rank ended in {what!r}; see its output for the reason") from error
        return answers


def _serve(
    requests: Connection, rank: int, world: int, port: int, pattern: str, n: int, backend: str, arrays: Sequence[Any]
) -> None:
    """Main loop of a rank, until the parent closes the pipe."""
    import signal

    # The parent handles an interruption and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=PATIENCE)
    layout = SequenceLayout.contiguous(n, world)
    query, key, value, grad_output = (torch.from_numpy(x) for x in arrays)
    inputs = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
    found: dict[str, tuple[Tensor, ...]] = {}
    while True:
        try:
            what = requests.recv()
        except (EOFError, OSError):
            break
        match what:
            case "forward":
                found["output"] = context_parallel_attention_with_lse(*inputs, pattern, layout, backend=backend)
            case "backward":
                output = found["output"][0]
                found["gradients"] = torch.autograd.grad(output, inputs, grad_output, retain_graph=True)
        requests.send([x.detach().numpy() for x in found[what]] if what in found else None)
    dist.destroy_process_group()
