"""What the first call on a GPU needs of triton, whatever it computes, made ready while its plan is made.

Hashing triton's files, having a C compiler make its driver and importing kernels take more than a second one after
another, most of it outside of Python. They are begun on threads as soon as a call is met that will need them, once a
process; whoever compiles a kernel waits for them, so that nothing is done twice. What fails here fails again, and is
told, where it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread

import torch
from torch import Tensor

_unbegun = Lock()
"""Taken once, by whoever begins, and never given back."""
_threads: list[Thread] = []


def begin(query: Tensor, backend: str) -> None:
    """Begin, where the first kernel of this process may be compiled for a call with such queries."""
    if not query.is_cuda or _unbegun.locked():
        return
    if backend not in ("auto", "hopper", "triton") or query.dtype == torch.float64:
        return
    if os.environ.get("TRITON_INTERPRET") == "1" or not _unbegun.acquire(blocking=False):
        return
    if hasattr(os, "register_at_fork"):
        # A child would find locks of modules taken by threads that it does not have.
        os.register_at_fork(before=finish)
    with suppress(Exception):
        # On this thread: one that imports a part of it while another imports the whole does not wait for the whole.
        import triton  # noqa: F401

        for work in (_hash_compiler, _make_driver, _import_kernels):
            _start(work, query.device)


def finish() -> None:
    """Wait until what was begun is done."""
    for thread in _threads:
        thread.join()


def _start(work: Callable[[torch.device], object], device: torch.device) -> None:
    def run() -> None:
        with suppress(Exception):
            work(device)

    # No daemon: one that is stopped at the interpreter's exit would leave a compiler running, and its files behind.
    thread = Thread(target=run, name=f"dilated-attention-{work.__name__.strip('_')}")
    # An interpreter that ends starts no threads.
    with suppress(RuntimeError):
        thread.start()
        _threads.append(thread)


def _hash_compiler(device: torch.device) -> None:
    """Read and hash what triton consists of, which it keeps."""
    from .triton_abi import knows_triton

    if knows_triton():
        from triton.runtime.cache import triton_key

        triton_key()


def _make_driver(device: torch.device) -> None:
    """Have a C compiler make triton's driver, and the assembler tell its version."""
    from triton.runtime import driver

    from .triton_abi import knows_triton

    if driver.active is not None and knows_triton():
        from triton.backends.nvidia.compiler import get_ptxas_version

        major, minor = torch.cuda.get_device_capability(device)
        get_ptxas_version(10 * major + minor)


def _import_kernels(device: torch.device) -> None:
    """Import the kernels for a device, and hash the one that every first call on a Hopper GPU compiles."""
    # Before Gluon, which imports it too: so does a thread that compiles a kernel of its own meanwhile.
    import triton.compiler.code_generator  # noqa: F401

    if torch.cuda.get_device_capability(device)[0] == 9:
        from ..hopper.forward_kernel import attention_fwd_kernel

        _ = attention_fwd_kernel.cache_key
    else:
        from ..triton import launches  # noqa: F401
