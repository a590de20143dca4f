"""What would make the host wait for a GPU, forbidden: for paths that must never read back what a device computed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
