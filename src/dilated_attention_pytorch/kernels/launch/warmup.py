"""Preparation of Triton for the first GPU call of a process, beside the construction of its plan.

Hashing Triton's files, compiling its driver and importing kernels take more than a second one after another, most of
it outside of Python. They run on threads that start with the first call that needs them, once a process. Code that
compiles a kernel waits for these threads, so that no work is done twice. An error on a thread is dropped: the same
error is raised where the result is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread

import torch
from torch import Tensor

from ..registry import backend_named
from .triton_abi import hash_compiler, make_driver

_unbegun = Lock()
"""Acquired by the first call that begins, and never released."""
_threads: list[Thread] = []


def begin(query: Tensor, backend: str) -> None:
    """Start the preparation if a call with this query may compile the first kernel of the process."""
    if not query.is_cuda or _unbegun.locked():
        return
    if backend not in ("auto", "hopper", "triton") or query.dtype == torch.float64:
        return
    if os.environ.get("TRITON_INTERPRET") == "1" or not _unbegun.acquire(blocking=False):
        return
    if hasattr(os, "register_at_fork"):
        # A forked child would inherit import locks held by threads that it does not have.
        os.register_at_fork(before=finish)
    with suppress(Exception):
        # On this thread: a thread that imports a submodule does not wait for another that imports the package.
        import triton  # noqa: F401

        for work in (hash_compiler, make_driver, _import_kernels):
            _start(work, query.device)


def finish() -> None:
    """Wait for the threads of the preparation."""
    for thread in _threads:
        thread.join()


def _start(work: Callable[[torch.device], object], device: torch.device) -> None:
    def run() -> None:
        with suppress(Exception):
            work(device)

    # Not a daemon thread: killed at interpreter exit, it would leave a compiler process and its files behind.
    thread = Thread(target=run, name=f"dilated-attention-{work.__name__.strip('_')}")
    # A finalizing interpreter starts no threads.
    with suppress(RuntimeError):
        thread.start()
        _threads.append(thread)


def _import_kernels(device: torch.device) -> None:
    """Import the kernels of the backend that a first call on the device compiles."""
    # Before Gluon, which imports it too: so does a thread that compiles a kernel of its own meanwhile.
    import triton.compiler.code_generator  # noqa: F401

    name = "hopper" if torch.cuda.get_device_capability(device)[0] == 9 else "triton"
    backend_named(name).import_kernels()  # pyrefly: ignore[missing-attribute]
