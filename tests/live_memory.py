"""Memory that tensors hold at once, counted from their storages: the same on every machine and at any load."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Bytes of the storages made inside this context and of `given`: those alive now, and the most at once.

    Autograd's saved tensors count. Memory that operators allocate inside and free does not.
    """

    def __init__(self, *given: torch.Tensor, floating_only: bool = False) -> None:
        super().__init__()
        self.floating_only = floating_only
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        for tensor in given:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or not self.floating_only):
                self._add(tensor)
        return made

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, storage: int) -> None:
        self.now -= self.sizes.pop(storage)
