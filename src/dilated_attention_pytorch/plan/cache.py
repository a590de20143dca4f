"""Plans kept by value: bounded in bytes, least recently used out first, safe between threads, saved without pickle."""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import must
from ..files import write_whole
from ..patterns import Pattern, parse
from .plan import FULL_BEGIN, FULL_END, PARTIAL_BEGIN, PARTIAL_END, Axis, Masks, Part, Plan, Walk, tensors_of
from .planner import make_plan, own_block

MAGIC = b"dap plans 1\n"
PIECES = {piece.__name__: piece for piece in (Plan, Part, Axis, Walk, Masks)}
DTYPES = {"int32": torch.int32, "int64": torch.int64}
LARGEST_HEADER = 64 * 2**20


class CacheInfo(NamedTuple):
    """How a cache has fared."""

    hits: int
    misses: int
    evictions: int
    plans: int
    nbytes: int
    limit: int


class PlanKey(NamedTuple):
    """What decides a plan."""

    pattern: Pattern
    n: int
    heads: int
    block_size: int
    device: torch.device


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
        """The plan, built if it is not here. One larger than the limit is returned but not kept."""
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
        """The plan if it is here."""
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all plans to one file. It appears whole or not at all."""
        with self._lock:
            plans = list(self._plans.items())
        tensors = [tensor.cpu().contiguous() for _, plan in plans for tensor in tensors_of(plan)]
        header = json.dumps(
            {
                "plans": [{"key": [str(part) for part in key], "plan": _outline(plan)} for key, plan in plans],
                "tensors": [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors],
            }
        ).encode()
        body = b"".join([MAGIC, struct.pack("<Q", len(header)), header, *(_bytes(tensor) for tensor in tensors)])
        write_whole(Path(path), lambda temporary: Path(temporary).write_bytes(body + sha256(body).digest()))

    def load(self, path: str | os.PathLike[str]) -> int:
        """Add the plans of a file, and say how many. A damaged or foreign file raises and adds nothing."""
        try:
            plans = _read(Path(path).read_bytes())
        except (KeyError, TypeError, ValueError, IndexError, RecursionError, RuntimeError, struct.error) as error:
            raise must(
                "a plan file must be one that PlanCache.save wrote, whole",
                f"{os.fspath(path)!r} ({error})",
                "Delete it; plans are rebuilt when they are asked for.",
            ) from None
        for key, plan in plans:
            self._keep(key, plan.to(key.device))
        return len(plans)

    def _keep(self, key: PlanKey, plan: Plan) -> None:
        size = plan.nbytes
        with self._lock:
            if size > self.limit or key in self._plans:
                return
            self._plans[key] = plan
            self._nbytes += size
            while self._nbytes > self.limit:
                _, oldest = self._plans.popitem(last=False)
                self._nbytes -= oldest.nbytes
                self._evictions += 1


def _outline(value: Any) -> Any:
    """A plan without its tensors, as JSON."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, tuple):
        return [_outline(item) for item in value]
    if is_dataclass(value):
        return {"": type(value).__name__, **{f.name: _outline(getattr(value, f.name)) for f in fields(value)}}
    return value


def _bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _read(body: bytes) -> list[tuple[PlanKey, Plan]]:
    if not body.startswith(MAGIC):
        raise ValueError("it begins differently")
    if sha256(body[:-32]).digest() != body[-32:]:
        raise ValueError("its checksum does not match")
    at = len(MAGIC) + 8
    (length,) = struct.unpack("<Q", body[len(MAGIC) : at])
    if length > min(LARGEST_HEADER, len(body)):
        raise ValueError("its header is too long")
    header = json.loads(body[at : at + length])
    at += length
    tensors = []
    for dtype, shape in header["tensors"]:
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if any(edge < 0 for edge in shape) or at + size > len(body) - 32:
            raise ValueError("a tensor reaches past its end")
        tensors.append(torch.frombuffer(bytearray(body[at : at + size]) or bytearray(1), dtype=torch.uint8))
        tensors[-1] = tensors[-1][:size].view(DTYPES[dtype]).reshape(shape)
        at += size
    waiting = iter(tensors)
    plans = []
    for item in header["plans"]:
        text, n, heads, block_size, device = item["key"]
        key = PlanKey(parse(text), int(n), int(heads), int(block_size), torch.device(device))
        plan = _rebuild(item["plan"], waiting)
        if not isinstance(plan, Plan) or (plan.n, plan.heads, plan.block_size) != key[1:4]:
            raise ValueError("a plan does not belong to its key")
        _check(plan)
        plans.append((key, plan))
    return plans


def _rebuild(outline: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if outline is None:
        return next(tensors)
    if isinstance(outline, list):
        return tuple(_rebuild(item, tensors) for item in outline)
    if isinstance(outline, dict):
        values = {name: _rebuild(item, tensors) for name, item in outline.items() if name}
        if outline[""] == "Part" and all(map(torch.equal, tensors_of(values["queries"]), tensors_of(values["keys"]))):
            values["keys"] = values["queries"]
        return PIECES[outline[""]](**values)
    return outline


def _check(plan: Plan) -> None:
    """Refuse indices that would send a kernel outside its memory."""
    words = -(-plan.block_size // 32)
    if plan.masks.bits.shape[1:] != (plan.block_size, words) or plan.masks.band.shape != (len(plan.masks.bits), 2):
        raise ValueError("its masks have the wrong shape")
    for part in plan.parts:
        for axis in (part.queries, part.keys):
            lengths = len(axis.offset) == plan.heads and len(axis.start) == len(axis.end)
            if axis.rate < 1 or not lengths or not _within(axis.end, plan.n + 1) or not _within(axis.start, plan.n):
                raise ValueError("an axis leaves the sequence")
            if not _within(axis.offset, axis.rate):
                raise ValueError("an offset leaves its rate")
        sides = (part.by_query, part.queries, part.keys), (part.by_key, part.keys, part.queries)
        for walk, stationary, streamed in sides:
            classes, rest = divmod(len(walk.rows), max(stationary.tiles, 1))
            if rest or not _within(part.head_class + 1, classes + 1) or not _within(walk.order, len(walk.rows)):
                raise ValueError("a walk does not fit its axis")
            table = walk.rows.long()
            for begin, end, column in (
                (FULL_BEGIN, FULL_END, walk.full),
                (PARTIAL_BEGIN, PARTIAL_END, walk.partial),
            ):
                if not _within(table[:, [begin, end]], len(column) + 1) or bool(
                    (table[:, begin] > table[:, end]).any()
                ):
                    raise ValueError("a list leaves its storage")
            _, tile, mask = walk.entries()
            if not _within(tile, streamed.tiles) or not _within(mask + 1, len(plan.masks.bits) + 1):
                raise ValueError("an entry names a tile or mask that is not there")


def _within(values: torch.Tensor, limit: int) -> bool:
    return not values.numel() or bool((values.min() >= 0) & (values.max() < limit))
