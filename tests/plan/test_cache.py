"""The plan cache: by value, bounded, shared by threads, and safe to read from disk."""

from __future__ import annotations

import json
import struct
import threading
from hashlib import sha256

import pytest
import torch

from dilated_attention_pytorch import Causal, Dilated, PlanCache, Random, SlidingWindow
from dilated_attention_pytorch.plan.cache import MAGIC


@pytest.fixture
def filled(tmp_path):
    cache = PlanCache()
    cache.get(Dilated((32, 64), (1, 2)) & Causal(), 200, 4)
    cache.get(Random(0.3, block=16, per_head=True), 130, 2, 32)
    path = tmp_path / "plans"
    cache.save(path)
    return cache, path


def test_equal_patterns_share_a_plan():
    cache = PlanCache()
    first = cache.get(SlidingWindow(3), 100, 2)
    assert cache.get(SlidingWindow(3, 3), 100, 2) is first
    assert cache.get(SlidingWindow(3), 101, 2) is not first
    assert cache.get(SlidingWindow(3), 100, 2, 64) is not first
    assert cache.info()[:4] == (1, 3, 0, 3)


def test_the_least_recently_used_leaves_when_bytes_run_out():
    size = PlanCache().get(SlidingWindow(3), 1000, 2).nbytes
    cache = PlanCache(limit=int(2.5 * size))
    for before in (3, 4, 3, 5):
        cache.get(SlidingWindow(before), 1000, 2)
    info = cache.info()
    assert (info.evictions, info.plans) == (1, 2) and info.nbytes <= cache.limit
    cache.get(SlidingWindow(3), 1000, 2)
    assert cache.info().hits == 2
    cache.clear()
    assert cache.info()[:5] == (0, 0, 0, 0, 0)


def test_a_plan_over_the_limit_is_built_and_not_kept():
    cache = PlanCache(limit=10)
    assert cache.get(Causal(), 300, 1).n == 300
    assert cache.info().plans == 0


def test_threads_share_one_cache():
    cache, plans = PlanCache(), []

    def work():
        plans.extend(cache.get(SlidingWindow(w), 500, 2) for w in range(1, 20))

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    info = cache.info()
    assert len(plans) == 8 * 19 == info.hits + info.misses
    assert info.plans == 19 and info.nbytes == sum({p.name: p.nbytes for p in plans}.values())


def test_saved_plans_come_back_equal(filled):
    cache, path = filled
    other = PlanCache()
    assert other.load(path) == 2
    assert other.info().nbytes == cache.info().nbytes
    plan = other.get(Dilated((32, 64), (1, 2)) & Causal(), 200, 4)
    assert other.info().hits == 1
    assert torch.equal(plan.to_dense(), cache.get(Dilated((32, 64), (1, 2)) & Causal(), 200, 4).to_dense())


def resealed(body: bytes) -> bytes:
    return body + sha256(body).digest()


def with_header(content: bytes, change) -> bytes:
    at = len(MAGIC) + 8
    (length,) = struct.unpack("<Q", content[len(MAGIC) : at])
    header = json.dumps(change(json.loads(content[at : at + length]))).encode()
    return resealed(MAGIC + struct.pack("<Q", len(header)) + header + content[at + length : -32])


def longer_tensor(header):
    header["tensors"][0][1] = [10**9]
    return header


def other_length(header):
    header["plans"][0]["plan"]["n"] = 10
    header["plans"][0]["key"][1] = "10"
    return header


def foreign_class(header):
    header["plans"][0]["plan"][""] = "Popen"
    return header


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"PK\x03\x04 something else",
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:300] + bytes([content[300] ^ 1]) + content[301:],
        lambda content: resealed(MAGIC + struct.pack("<Q", 2**62)),
        lambda content: resealed(MAGIC + struct.pack("<Q", 7) + b"[[[[[[["),
        lambda content: with_header(content, longer_tensor),
        lambda content: with_header(content, other_length),
        lambda content: with_header(content, foreign_class),
    ],
)
def test_damaged_and_foreign_files_are_refused_whole(filled, damage):
    _, path = filled
    path.write_bytes(damage(path.read_bytes()))
    other = PlanCache()
    with pytest.raises(ValueError, match=r"a plan file must be one that PlanCache\.save wrote, whole"):
        other.load(path)
    assert other.info().plans == 0
    assert other.get(Causal(), 20, 1).n == 20


def test_an_index_outside_its_memory_is_refused(filled):
    _, path = filled
    content = path.read_bytes()
    at = len(MAGIC) + 8
    (length,) = struct.unpack("<Q", content[len(MAGIC) : at])
    tensors_begin = at + length
    refused = 0
    for offset in range(tensors_begin, len(content) - 35, 44):
        changed = content[:offset] + struct.pack("<i", 10**6) + content[offset + 4 : -32]
        path.write_bytes(resealed(changed))
        try:
            PlanCache().load(path)
        except ValueError:
            refused += 1
    assert refused > 50


def test_saving_leaves_the_old_file_when_it_fails(filled, monkeypatch):
    cache, path = filled
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        cache.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
