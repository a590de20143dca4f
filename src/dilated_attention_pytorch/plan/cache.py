"""Caches: of plans by value, of tensors by stream, and of values derived from tensors while these are unchanged.

The cache of plans is bounded in bytes, least recently used out first, and safe between threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from ..patterns import BlockLists, Pattern
from .builder import make_plan, own_block
from .plan import Plan

Result = TypeVar("Result")


class CacheInfo(NamedTuple):
    """Statistics of a cache."""

    hits: int
    misses: int
    evictions: int
    plans: int
    nbytes: int
    limit: int


class PlanKey(NamedTuple):
    """Cache key of a plan."""

    pattern: Pattern
    n: int
    heads: int
    block_size: int
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of the block lists in the pattern, which may exceed those of its plan."""
        return _nbytes(self.pattern)


class PlanCache:
    """Plans by (pattern, n, heads, block size, device).

    >>> from dilated_attention_pytorch import Causal
    >>> from dilated_attention_pytorch.plan import PlanCache
    >>> cache = PlanCache()
    >>> cache.get(Causal(), 256, 4) is cache.get(Causal(), 256, 4)
    True
    >>> cache.info().hits
    1
    """

    def __init__(self, limit: int = 512 * 2**20) -> None:
        self.limit = limit
        self._lock = threading.RLock()
        self._plans: OrderedDict[PlanKey, Plan] = OrderedDict()
        self._nbytes = self._hits = self._misses = self._evictions = 0

    def get(
        self, pattern: Pattern, n: int, heads: int, block_size: int | None = None, device: torch.device | str = "cpu"
    ) -> Plan:
        """Look up a plan, building it on a miss. A plan larger than the limit is returned but not stored."""
        block_size = own_block(pattern) if block_size is None else block_size
        key = PlanKey(pattern, n, heads, block_size, torch.device(device))
        plan = self.find(key)
        if plan is None:
            with self._lock:
                self._misses += 1
            plan = make_plan(pattern, n, heads, block_size, device)
            self._keep(key, plan)
        return plan

    def find(self, key: PlanKey) -> Plan | None:
        """The cached plan, or None."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._hits += 1
                self._plans.move_to_end(key)
        return plan

    def info(self) -> CacheInfo:
        with self._lock:
            return CacheInfo(self._hits, self._misses, self._evictions, len(self._plans), self._nbytes, self.limit)

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()
            self._nbytes = self._hits = self._misses = self._evictions = 0

    def _keep(self, key: PlanKey, plan: Plan) -> None:
        size = plan.nbytes + key.nbytes
        with self._lock:
            if size > self.limit or key in self._plans:
                return
            self._plans[key] = plan
            self._nbytes += size
            while self._nbytes > self.limit:
                oldest, dropped = self._plans.popitem(last=False)
                self._nbytes -= dropped.nbytes + oldest.nbytes
                self._evictions += 1


def _nbytes(pattern: Pattern) -> int:
    own = pattern.nbytes if isinstance(pattern, BlockLists) else 0
    return own + sum(map(_nbytes, pattern.children))


class StreamCache:
    """Values by key. On a GPU a value is valid on the stream that computes it.

    A captured call does not use the cache: memory that a graph reads must not be freed with a cache entry, and values
    that a graph computes exist only once it is replayed.
    """

    __slots__ = ("_most", "_values")

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[Hashable, tuple[int | None, Any]] = {}

    def get(self, device: torch.device, key: Hashable, make: Callable[[], Result]) -> Result:
        """`make()`, or the cached result of an earlier call on this stream; all are dropped for one too many."""
        stream = None
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return make()
            stream = torch._C._cuda_getCurrentRawStream(device.index)
        made = self._values.get(key)
        if made is None or made[0] != stream:
            if len(self._values) >= self._most:
                self._values.clear()
            made = self._values[key] = stream, make()
        return made[1]


class TensorMemo(StreamCache):
    """Cache of values that calls derive from some tensors.

    A value is valid for the tensors that the memo was made with: after the first change in place that torch counts,
    nothing is cached any more. The owner of the memo keeps the tensors. No value may refer to it or to them, so that
    they are freed with their last user and not by the garbage collector.
    """

    __slots__ = ("_device", "_memory", "_state", "_tensors")

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(16)
        self._device = tensors[0].device
        self._tensors = [ref(x) for x in tensors]
        # Kept, so that no other tensor has this memory.
        self._memory = [x.untyped_storage() for x in tensors]
        self._state = self._now()

    def _now(self) -> list[Hashable]:
        tensors = [x() for x in self._tensors]
        return [x if x is None else (x._version, x.data_ptr(), x.shape, x.stride()) for x in tensors]

    def is_outdated(self) -> bool:
        """Whether a tensor was changed."""
        return self._now() != self._state

    def derive(self, name: Hashable, make: Callable[[], Result]) -> Result:
        """`make()`, or the cached result of an earlier call on this stream."""
        if self.is_outdated():
            self._values.clear()
            return make()
        return self.get(self._device, name, make)
