"""Ranks as real processes on gloo, for tests: a rank that raises is reported, one that hangs fails the test."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from limits import scaled

# Children of this server find torch imported, so a rank starts in milliseconds.
SERVER = multiprocessing.get_context("forkserver")
store: dist.Store
"""Of a rank: where all ranks meet; the test's own process keeps it."""
SERVER.set_forkserver_preload(["torch", "torch.distributed", "dilated_attention_pytorch.distributed"])


def run_ranks(
    check: Callable[..., Any],
    world: int,
    *arguments: Any,
    seconds: float = 60.0,
    timeout: float | None = None,
    until_one_fails: bool = False,
) -> dict[int, Any]:
    """What `check(rank, world, *arguments)` returns on each rank, or the text of what it raised.

    Args:
        check: a function of a test module.
        world: how many processes.
        arguments: what else it is given.
        seconds: after which a rank that still runs is killed and the test fails, on two quiet cores.
        timeout: after which a collective gives up; 30 seconds on two quiet cores where None.
        until_one_fails: do not wait for the others once a rank has raised.

    A rank that ended without an answer (it was told to die) is left out.
    """
    seconds, timeout = scaled(seconds), scaled(30.0) if timeout is None else timeout
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members, pipes = [], {}
    for rank in range(world):
        mine, theirs = SERVER.Pipe(duplex=False)
        place = inspect.getfile(check), check.__name__
        process = SERVER.Process(target=_member, args=(theirs, place, rank, world, meeting.port, timeout, arguments))
        process.start()
        theirs.close()
        members.append(process)
        pipes[mine] = rank
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    try:
        while pipes:
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"ranks {sorted(pipes.values())} still run after {seconds} s\n{answers}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    continue
                if until_one_fails and failure(answers[rank]):
                    return answers
    finally:
        for process in members:
            process.join(0.0 if pipes else 10.0)
            if process.is_alive():
                process.kill()
    return answers


def all_pass(check: Callable[..., Any], world: int, *arguments: Any, **limits: Any) -> dict[int, Any]:
    """`run_ranks`, where every rank must come to its end; the first that raises ends the test."""
    answers = run_ranks(check, world, *arguments, until_one_fails=True, **limits)
    failed = {rank: text for rank, text in answers.items() if failure(text)}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
    assert sorted(answers) == list(range(world))
    return answers


def start(program: Callable[..., int], *arguments: Any) -> Any:
    """A process that runs a function of a test module in the present folder and ends with the status it returns."""
    process = SERVER.Process(target=_program, args=((inspect.getfile(program), program.__name__), arguments))
    process.start()
    return process


def failure(answer: Any) -> bool:
    """Whether a rank's answer is the text of what it raised."""
    return isinstance(answer, str) and answer.startswith("Traceback")


def _member(
    pipe: Connection,
    place: tuple[str, str],
    rank: int,
    world: int,
    port: int,
    timeout: float,
    arguments: tuple[Any, ...],
) -> None:
    global store
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("first", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    try:
        pipe.send(_load(*place)(rank, world, *arguments))
    except BaseException:
        pipe.send(traceback.format_exc())
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _program(place: tuple[str, str], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    sys.exit(_load(*place)(*arguments))


def _load(file: str, name: str) -> Callable[..., Any]:
    """A function of a test file, which has no name by which a process could import it."""
    spec = importlib.util.spec_from_file_location("checks", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
