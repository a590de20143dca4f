"""Kernels compiled for compute capability 9.0 without a GPU, with the assembler's report on each."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton")

import triton
from kernels.compile_record import Check, Compilations
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas

TARGET = GPUTarget("cuda", 90, 32)


def compile_source(source: Any, options: dict[str, Any]) -> Any:
    """A compiled kernel that holds the assembler's report instead of machine code, so that it is assembled once."""
    return next(compile_sources([(source, options)]))


def compile_sources(compilations: Compilations) -> Iterator[Any]:
    """Several of them."""
    _begin(compilations)
    return (_compile(*one, "assembler_reports", make_cubin=_assemble) for one in compilations)


def lower_source(source: Any, options: dict[str, Any]) -> Any:
    """A kernel lowered to LLVM, where its shared memory is known; neither optimized by LLVM nor assembled."""
    return next(lower_sources([(source, options)]))


def lower_sources(compilations: Compilations) -> Iterator[Any]:
    """Several of them."""
    _begin(compilations)
    return (_lower(*one) for one in compilations)


def _begin(compilations: Compilations) -> None:
    if Check.running is not None:
        Check.running.begin(TARGET, compilations)


def _lower(source: Any, options: dict[str, Any]) -> Any:
    with mock.patch.dict(os.environ, DISABLE_LLVM_OPT="1"):
        return _compile(source, options, "lowered", make_ptx=_skip_ptx, make_cubin=lambda *given: b"")


def _compile(source: Any, options: dict[str, Any], folder: str, **stages: Any) -> Any:
    with mock.patch.multiple(CUDABackend, **stages), knobs.cache.scope():
        # Triton's own cache holds machine code.
        knobs.cache.dir = str(Path(knobs.cache.dir, folder))
        return triton.compile(source, target=TARGET, options=options)


def report(compiled: Any) -> str:
    """Registers, stack and warnings of a kernel from `compile_source`."""
    return compiled.asm["cubin"].decode()


def _skip_ptx(backend: Any, module: Any, metadata: dict[str, Any], *rest: Any) -> str:
    metadata["name"] = ""
    return ""


def _assemble(backend: Any, ptx: str, *rest: Any) -> bytes:
    with TemporaryDirectory() as folder:
        listing = Path(folder, "kernel.ptx")
        listing.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", listing, "-o", listing.with_suffix(".cubin")]
        return subprocess.run(command, capture_output=True, check=True).stderr
