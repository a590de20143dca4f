"""The plan cache: by value, bounded in bytes, shared by threads."""

from __future__ import annotations

import threading

from dilated_attention_pytorch import BlockLists, Causal, PlanCache, SlidingWindow


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


def test_block_lists_count_towards_the_limit():
    dense = BlockLists.of([list(range(256))] * 256, block=1)
    cache = PlanCache(limit=3 * dense.nbytes)
    for row in range(5):
        lists = BlockLists.of([[row], *[list(range(256))] * 255], block=1)
        cache.get(lists & Causal(), 256, 1)
    info = cache.info()
    assert info.plans == 2 and 2 * (dense.nbytes - 2048) < info.nbytes <= cache.limit
