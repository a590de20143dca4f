"""Kernels compiled for compute capability 9.0 without a GPU, with the assembler's report on each."""

from __future__ import annotations

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas


def compile_source(source: Any, options: dict[str, Any]) -> Any:
    """A compiled kernel that holds the assembler's report instead of machine code, so that it is assembled once."""
    # Triton's own cache holds machine code.
    folder = Path(knobs.cache.dir, "assembler_reports")
    with mock.patch.object(CUDABackend, "make_cubin", _assemble), knobs.cache.scope():
        knobs.cache.dir = str(folder)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def report(compiled: Any) -> str:
    """Registers, stack and warnings of a kernel from `compile_source`."""
    return compiled.asm["cubin"].decode()


def _assemble(backend: Any, ptx: str, *rest: Any) -> bytes:
    with TemporaryDirectory() as folder:
        listing = Path(folder, "kernel.ptx")
        listing.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", listing, "-o", listing.with_suffix(".cubin")]
        return subprocess.run(command, capture_output=True, check=True).stderr
