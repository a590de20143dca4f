"""Launch the library's kernels on the stub driver, each through Triton's own launcher and directly, and print both.

A program of its own, since Triton opens its driver once in a process. The environment names the stub (see
`test_direct_launch.py`); arguments are names of scenes, and `--time` for host microseconds. Prints one JSON object.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs

from dilated_attention_pytorch import nn
from dilated_attention_pytorch.kernels import hopper
from dilated_attention_pytorch.kernels import triton as portable
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.kernels.launch import launcher, triton_abi
from dilated_attention_pytorch.kernels.triton import backend as triton_backend
from dilated_attention_pytorch.kernels.triton import launches as triton_launches
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.selection import backend as selection_backend
from dilated_attention_pytorch.selection import indices
from dilated_attention_pytorch.selection import kernels as selection_kernels

STREAM = 77
ROUNDS, REPEATS = 21, 30
"""Rounds of a measurement, in which both ways take turns, and launches of a round."""


def pretend_gpu() -> None:
    """Make Triton compile for the stub's device and launch on it; CPU tensors stand for memory of the device."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    # Kernels are imported before the variable below, with which CPU tensors are accepted, decides how they run.
    for package in (hopper, portable, selection_kernels):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    os.environ["TRITON_INTERPRET"] = "1"
    triton_backend.why_not = lambda call: None
    selection_backend.allows_host_sync = lambda device: False
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    torch.cuda.get_device_properties = lambda device: properties
    torch.cuda.is_current_stream_capturing = lambda: False
    # Tensors of the CPU have no device index.
    torch.cuda.current_device = lambda: None
    torch._C._cuda_getCurrentRawStream = lambda device: STREAM
    active: Any = driver.active
    active.get_current_device, active.get_current_stream = lambda: 0, lambda device: STREAM
    # The stub reads PTX, which states the sizes of parameters; no time is spent in the assembler.
    CUDABackend.make_cubin = lambda self, source, *rest: source.encode()


def problem(pattern: str, block: int, d: int = 64, e: int = 64, padded: bool = False) -> AttentionCall:
    plan = make_plan(parse(pattern), 250, 2, block_size=block)
    query = torch.zeros(1, 250, 2, d, dtype=torch.bfloat16).transpose(1, 2)
    key, value = (torch.zeros(1, 1, 250, width, dtype=torch.bfloat16) for width in (d, e))
    return AttentionCall(query, key, value, plan, 0.125, torch.zeros(1, 250, dtype=torch.bool) if padded else None)


def backward(backend: Any, call: AttentionCall) -> None:
    output = torch.zeros(*call.query.shape[:3], call.value.shape[3], dtype=call.query.dtype)
    lse = torch.zeros(call.query.shape[:3])
    backend.backward(call, output, lse, output, None)


def portable_attention(pattern: str) -> None:
    """Forward and backward pass of the Triton backend."""
    call = problem(pattern, 32)
    triton_launches.forward(call)
    backward(triton_launches, call)


def hopper_attention(pattern: str, *widths: int, padded: bool = False) -> None:
    """Forward and backward pass of the Hopper backend."""
    call = problem(pattern, 128, *widths, padded=padded)
    runner = hopper_backend.prepare(call)
    runner.forward(call)
    for fused in (False, True):
        hopper_backend.reproducible_gradients = lambda fused=fused: not fused
        backward(runner, call)


def learned_attention(score_unit: int) -> None:
    """Forward and backward pass of a learned layer: the steps of the selection, and attention on its blocks."""
    config = nn.AdaptiveConfig(score_unit=score_unit)
    layer = nn.BlockSparseAdaptive([1024], [1], 2, 64, config, block_size=64, backend="triton")
    x = [torch.zeros(1, 512, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    layer(*x, True).sum().backward()


def normal_forms() -> None:
    """Normal forms of index tensors, with and without counts."""
    listed, counts = torch.zeros(1, 2, 512, 4, dtype=torch.int64), torch.zeros(1, 2, 512, dtype=torch.int32)
    for is_counted in (False, True):
        indices.normal_form(listed, counts, None, 2, 512, 64, True, is_counted=is_counted)
        indices.normal_form(listed[:, :, :8], None, None, 2, 512, 64, False, is_counted=is_counted)


LADDER = "dilated:128x1,250x4"
SCENES: dict[str, Callable[[], None]] = {
    "triton window": lambda: portable_attention("window:100"),
    "triton ladder": lambda: portable_attention(LADDER),
    "hopper window": lambda: hopper_attention("window:100"),
    "hopper ladder": lambda: hopper_attention(LADDER),
    "hopper ladder, widths 80 and 96": lambda: hopper_attention(LADDER, 80, 96),
    "hopper padding": lambda: hopper_attention("window:100", padded=True),
    "learned blocks": lambda: learned_attention(64),
    "learned tokens": lambda: learned_attention(1),
    "index tensors": normal_forms,
}


def overlaps_of(launch: Any, count: int) -> list[bool]:
    """Whether each launch may start before the launch in front of it has ended, which must be able to overlap too."""
    if not isinstance(launch, launcher.Launches):
        return [False] * count
    able = [one.overlaps for one in launch.steps]
    return [one and before for one, before in zip(able, [False, *able], strict=False)]


def outlives_triton_cache(recorder: Recorder) -> bool:
    """Whether a direct launch works after Triton has dropped the compiled kernel, with which it unloads the module."""
    from dilated_attention_pytorch.kernels.triton.backward_kernels import delta_bwd_kernel

    output, lse = torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 64)
    triton_launches.delta_of(output, lse, output, None)
    delta_bwd_kernel.device_caches.clear()
    gc.collect()
    recorder.stub.stub_clear()
    recorder.originals["Launch"](*recorder.last)
    return recorder.stub.stub_records().decode().startswith(delta_bwd_kernel.__name__)


class Recorder:
    """Replaces the functions that launch kernels by ones that launch every kernel both ways."""

    def __init__(self, timed: bool) -> None:
        from triton.backends.nvidia.driver import CudaLauncher

        self.stub: Any = ctypes.CDLL("libcuda.so.1")
        self.stub.stub_records.restype = ctypes.c_char_p
        self.timed, self.own, self.hooked = timed, 0, 0
        self.launches: list[dict[str, Any]] = []
        self.originals: dict[str, Callable[..., None]] = {}
        self.last: tuple[Any, ...] = ()
        self._launcher, self._call = CudaLauncher, CudaLauncher.__call__
        CudaLauncher.__call__ = lambda launcher, *given: self._counted(launcher, *given)
        for owner in (launcher.Launch, launcher.Launches):
            self.originals[owner.__name__] = owner.__call__
            owner.__call__ = self._both(owner.__call__)
        function = launcher.launch
        both = self._both(function)
        for module in [*sys.modules.values()]:
            if getattr(module, "launch", None) is function:
                module.launch = both

    def _counted(self, launcher: Any, *given: Any) -> None:
        self.own += 1
        self._call(launcher, *given)

    def _both(self, launch: Callable[..., None]) -> Callable[..., None]:
        def run(*given: Any, **options: Any) -> None:
            self.last = given
            # Compiles; Triton's own launcher runs a kernel for the first time.
            launch(*given, **options)
            with_hooks = self._recorded(launch, given, options, self._hook)
            direct = self._recorded(launch, given, options)
            found = {"own": with_hooks, "direct": direct, "overlaps": overlaps_of(given[0], len(direct["records"]))}
            if self.timed:
                found["us"] = self._measured(lambda: launch(*given, **options))
            self.launches.append(found)

        return run

    def _hook(self, metadata: Any) -> None:
        self.hooked += 1

    def _recorded(self, launch: Any, given: Any, options: Any, *hooks: Any) -> dict[str, Any]:
        """Recorded launches, how many of them Triton's own launcher made, and calls of the hook."""
        self.stub.stub_clear()
        self.own = self.hooked = 0
        for hook in hooks:
            knobs.runtime.launch_enter_hook.add(hook)
        launch(*given, **options)
        for hook in hooks:
            knobs.runtime.launch_enter_hook.remove(hook)
        return {"records": self.stub.stub_records().decode().splitlines(), "own": self.own, "hooked": self.hooked}

    def _measured(self, launch: Callable[[], None]) -> dict[str, float]:
        """Host microseconds of a launch or sequence of launches, both ways: least of rounds in turns."""
        kept, self._launcher.__call__ = self._launcher.__call__, self._call
        entry: Any = triton_abi.Entry
        has_hooks = entry.has_hooks
        self.stub.stub_record(0)
        times: dict[str, list[float]] = {"own": [], "direct": []}
        for _ in range(ROUNDS):
            for way, each in times.items():
                entry.has_hooks = True if way == "own" else has_hooks
                begin = time.perf_counter()
                for _ in range(REPEATS):
                    launch()
                each.append((time.perf_counter() - begin) / REPEATS * 1e6)
        entry.has_hooks, self._launcher.__call__ = has_hooks, kept
        self.stub.stub_record(1)
        return {way: round(min(each), 2) for way, each in times.items()}


def main(*arguments: str) -> None:
    pretend_gpu()
    recorder = Recorder("--time" in arguments)
    scenes = {}
    for name in arguments:
        if name in SCENES:
            recorder.launches = scenes[name] = []
            SCENES[name]()
    recorder.launches = []
    survives = outlives_triton_cache(recorder)
    print(json.dumps({"triton": triton.__version__, "scenes": scenes, "outlives_triton_cache": survives}))


if __name__ == "__main__":
    main(*sys.argv[1:])
