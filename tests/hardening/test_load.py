"""Many callers at once, many calls in a row, and processes that split: the same numbers, no hang, flat memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from limits import scaled
from oracle import error

from dilated_attention_pytorch import PlanCache, attention, parse
from dilated_attention_pytorch.kernels.cpu import native
from dilated_attention_pytorch.ops import plan_cache

SOURCE = Path(__file__).resolve().parents[2] / "src"
CALLS = int(os.environ.get("DAP_SOAK_CALLS", "300"))
"""Of the soak; continuous integration makes a few hundred."""
built = pytest.mark.skipif(not native.library_path().exists(), reason="the C++ kernel is not built")
PATTERNS = ("causal", "window:9 & causal", "dilated:16x1,64x4", "window:3 | global:5", "heads{window:4 / causal}")


def started(program: str, **environment: str) -> subprocess.Popen[str]:
    """A Python process with the library of this checkout."""
    settings = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"} | environment
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], env=settings, stdout=pipe, stderr=pipe, text=True)


def finished(*children: subprocess.Popen[str], seconds: float = 120) -> list[str]:
    """What they wrote, once all have ended well."""
    try:
        told = [child.communicate(timeout=scaled(seconds)) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (out, err) in zip(children, told, strict=True):
        assert child.returncode == 0, f"{out}{err[-3000:]}"
    return [out for out, _ in told]


def test_eight_threads_turn_a_small_cache_over():
    """Plans are built, found and evicted at the same time, and every call gets its own."""
    cache = PlanCache(limit=8_000)
    wanted = {(text, n): parse(text).resolve(n, 2).describe() for text in PATTERNS for n in (33, 64, 100)}
    ready = threading.Barrier(8)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        ready.wait()
        for index in torch.randint(len(wanted), (60,), generator=generator).tolist():
            text, n = list(wanted)[index]
            plan = cache.get(parse(text).resolve(n, 2), n, 2, 16)
            assert (plan.name, plan.n) == (wanted[text, n], n)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    info = cache.info()
    assert info.hits + info.misses == 480
    assert info.evictions > 0
    assert info.nbytes <= info.limit
    assert info.nbytes == sum(plan.nbytes for plan in cache._plans.values())


@pytest.mark.parametrize("backend", ["cpu", pytest.param("native", marks=built)])
def test_eight_threads_compute_forward_and_backward_at_once(backend):
    query, key, value = torch.randn(3, 1, 2, 90, 8).unbind()

    def gradients(text: str) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        output = attention(*leaves, text, backend=backend)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]

    wanted = {text: gradients(text) for text in PATTERNS}
    with ThreadPoolExecutor(8) as pool:
        for text, found in zip(PATTERNS * 6, pool.map(gradients, PATTERNS * 6), strict=True):
            for got, want in zip(found, wanted[text], strict=True):
                # Threads of torch's own may sum dK and dV in another grouping.
                assert error(got, want) <= 1e-6


SOAK = """
import gc, os, random, sys, torch
from dilated_attention_pytorch import attention
from dilated_attention_pytorch.ops import plan_cache
from dilated_attention_pytorch.ops.decode import attention_step
random.seed(0)
plan_cache.limit = 2**20
def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
def call():
    n, heads = random.randint(1, 300), random.choice([1, 2, 4])
    text = random.choice(["window:{} & causal", "dilated:{}x1,{}x3", "window:{} | global:5", "random:0.5;block=16;seed={}"])
    text = text.replace("{}", str(random.randint(1, 99)))
    query, key, value = torch.randn(3, 1, heads, n, 8, requires_grad=True).unbind()
    attention(query, key, value, text, dropout_p=random.choice([0, 0.1])).sum().backward()
    if "random" not in text:
        with torch.no_grad():
            attention_step(query[:, :, -1:], key, value, text, n - 1)
calls = int(sys.argv[1]) if len(sys.argv) > 1 else CALLS
for _ in range(calls // 3):
    call()
before = resident()
for _ in range(calls - calls // 3):
    call()
info = plan_cache.info()
assert info.nbytes <= info.limit and info.evictions > 0, info
print(before, resident())
"""


def test_calls_of_varying_length_leave_memory_flat():
    (told,) = finished(started(SOAK.replace("CALLS", str(CALLS))), seconds=120 + CALLS)
    before, after = map(float, told.split())
    assert after - before < 24, f"{before:.0f} MB grew to {after:.0f} MB"


FORK = """
import os, sys, torch
from dilated_attention_pytorch import attention
torch.set_num_threads(2)
query, key, value = torch.randn(3, 1, 2, 400, 16).unbind()
WORK = lambda: attention(query, key, value, "dilated:64x1,256x4 & causal", backend="BACKEND")
wanted = WORK()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    found = WORK()
    os._exit(0 if torch.equal(found, wanted) else 3)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
WORK()
"""


@pytest.mark.parametrize("backend", ["cpu", pytest.param("native", marks=built)])
def test_a_child_of_fork_computes_the_same(backend):
    """With one thread in the child, as torch's own data loaders set it: no OpenMP pool outlives a fork."""
    program = FORK.replace("BACKEND", backend)
    finished(started(program))


BUILD = """
import torch
from dilated_attention_pytorch import attention
from dilated_attention_pytorch.kernels.cpu import native
assert native.build() == 0
query = torch.randn(1, 1, 50, 8)
assert attention(query, query, query, "causal", backend="native").isfinite().all()
"""


@built
def test_four_processes_build_into_one_cache(tmp_path):
    """The compiler here copies a finished library, so that four builds take no time."""
    compiler = tmp_path / "compiler"
    copy = f'while [ "$1" != -o ]; do shift; done; sleep 0.2; exec cp {native.local_path()} "$2"'
    compiler.write_text(f"#!/bin/sh\n{copy}\n")
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    finished(*(started(BUILD, CXX=str(compiler), XDG_CACHE_HOME=str(cache)) for _ in range(4)))
    assert [path.name for path in (cache / "dilated_attention_pytorch").iterdir()] == [native.local_path().name]


@pytest.mark.compile
def test_compiling_again_and_again_gives_the_same():
    query, key, value = torch.randn(3, 1, 2, 70, 8).unbind()
    wanted = attention(query, key, value, "window:9 & causal")
    before = plan_cache.info().plans
    for _ in range(4):
        torch._dynamo.reset()
        step = torch.compile(
            lambda q, k, v: attention(q, k, v, "window:9 & causal"), backend="aot_eager", fullgraph=True
        )
        assert torch.equal(step(query, key, value), wanted)
    assert plan_cache.info().plans == before
