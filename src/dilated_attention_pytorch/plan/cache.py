"""Cache of plans by value: bounded in bytes, least recently used out first, safe between threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

import torch

from ..patterns import BlockLists, Pattern
from .builder import make_plan, own_block
from .plan import Plan


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
