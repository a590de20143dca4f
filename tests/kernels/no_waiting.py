"""Modes that raise on operations that make the host wait for a GPU, for paths that never read device values."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dilated_attention_pytorch.ops import varlen
from dilated_attention_pytorch.selection import attention, backend, indices

attention_op = import_module("dilated_attention_pytorch.ops.attention")
"""The module; `ops.attention` is the function of the same name."""

READS = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "bincount",
    "unique_dim",
    "_unique",
    "_unique2",
    "unique_consecutive",
    "unique_dim_consecutive",
}


class NoWaiting(TorchDispatchMode):
    """Raises where an operation's result, or its size, would have to be known to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        indices = args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ()
        by_mask = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)
        unsized = func._overloadname == "Tensor" and name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in READS or by_mask or unsized:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **kwargs)


class Launched(TorchDispatchMode):
    """Count the GPU work of a block of code: kernels, and operations other than views and allocations."""

    def __enter__(self) -> Launched:
        from triton.runtime import interpreter

        self.count, self.executor = 0, interpreter.GridExecutor
        self.run = self.executor.__call__
        self.executor.__call__ = self.kernel
        return super().__enter__()

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        self.executor.__call__ = self.run

    @property
    def kernel(self):
        def run(executor, *args, **options):
            self.count += 1
            with _disable_current_modes():
                return self.run(executor, *args, **options)

        return run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func._schema.name.removeprefix("aten::")
        looks = func._schema.returns and func._schema.returns[0].alias_info is not None and not func._schema.is_mutable
        # Memory is poisoned here by filling it.
        self.count += not (looks or made.startswith(("empty", "new_empty", "detach", "_unsafe_view", "fill_")))
        return func(*args, **(kwargs or {}))


class GpuRules:
    """Treat CPU tensors as GPU tensors that the host may not read. Calls on lists run as operators only if `traced`."""

    def __init__(self, traced: bool = False) -> None:
        self.traced = traced

    def __enter__(self) -> None:
        self.allows_host_sync, self.is_observed = backend.allows_host_sync, attention.is_observed
        # Otherwise the mode would see the operators and not the operations inside.
        attention.is_observed = indices.is_observed = lambda *tensors: self.traced
        for module in (attention_op, varlen, backend):
            module.allows_host_sync = lambda device: False
        self.mode = NoWaiting()
        self.mode.__enter__()

    def __exit__(self, *problem: object) -> None:
        self.mode.__exit__(*problem)
        for module in (attention_op, varlen, backend):
            module.allows_host_sync = self.allows_host_sync
        attention.is_observed = indices.is_observed = self.is_observed
