"""Warmup of a first GPU call starts once, in parallel with planning, and only for calls that need it."""

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from dilated_attention_pytorch import attention
from dilated_attention_pytorch.kernels.launch import triton_abi, warmup
from dilated_attention_pytorch.ops.attention import plan_cache

WORK = "hash_compiler", "make_driver", "_import_kernels"


@pytest.fixture
def done(monkeypatch):
    """Log of warmup steps in a process without earlier ones; Triton, forks and devices are replaced."""
    done = []
    monkeypatch.setattr(warmup, "_unbegun", threading.Lock())
    monkeypatch.setattr(warmup, "_threads", [])
    monkeypatch.setattr(os, "register_at_fork", lambda before: done.append(before.__name__))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pytest.importorskip("triton")
    for name in WORK:

        def work(device, name=name):
            done.append((name, device))

        work.__name__ = name
        monkeypatch.setattr(warmup, name, work)
    return done


def query(is_cuda=True, dtype=torch.bfloat16):
    return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, device="the device")


def test_warmup_starts_once(done):
    for _ in range(3):
        warmup.begin(query(), "auto")
        warmup.finish()
    assert done[0] == "finish"
    assert sorted(done[1:]) == sorted((name, "the device") for name in WORK)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_warmup_starts_for_a_named_gpu_backend(done, backend):
    warmup.begin(query(), backend)
    warmup.finish()
    assert len(done) == 4


@pytest.mark.parametrize(
    ("given", "backend"),
    [(query(is_cuda=False), "auto"), (query(dtype=torch.float64), "auto"), (query(), "reference"), (query(), "flex")],
    ids=["CPU", "float64", "reference", "flex"],
)
def test_calls_without_triton_start_no_warmup(done, given, backend):
    warmup.begin(given, backend)
    assert not warmup._threads and not warmup._unbegun.locked() and not done


def test_interpreted_calls_start_no_warmup(done, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    warmup.begin(query(), "auto")
    assert not warmup._threads and not done


def test_cpu_calls_start_no_warmup(done, monkeypatch):
    asked = []
    begin, get = warmup.begin, plan_cache.get
    monkeypatch.setattr(warmup, "begin", lambda *given: (asked.append(given[1]), begin(*given)))
    monkeypatch.setattr(plan_cache, "get", lambda *given: (asked.append("plan"), get(*given))[1])
    x = torch.randn(1, 1, 37, 8)
    attention(x, x, x, "window:5", backend="reference")
    assert asked == ["reference", "plan"]
    assert not warmup._threads and not done


def test_callers_wait_for_the_whole_warmup(done, monkeypatch):
    go, ended = threading.Event(), []

    def slow(device):
        go.wait(10)
        ended.append(True)

    monkeypatch.setattr(warmup, "make_driver", slow)
    warmup.begin(query(), "auto")
    waiting = threading.Thread(target=lambda: (warmup.finish(), ended.append("waited")))
    waiting.start()
    assert ended == []
    go.set()
    waiting.join(10)
    assert ended == [True, "waited"]


def test_failed_warmup_is_silent(done, monkeypatch, capfd):
    def failing(device):
        raise RuntimeError("no compiler")

    for name in WORK:
        monkeypatch.setattr(warmup, name, failing)
    warmup.begin(query(), "auto")
    warmup.finish()
    assert len(warmup._threads) == 3 and not any(thread.is_alive() for thread in warmup._threads)
    assert capfd.readouterr() == ("", "")


def test_no_thread_can_be_started(done, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    warmup.begin(query(), "auto")
    warmup.finish()
    assert done == ["finish"]


class Source:
    """Fake Triton source: a kernel with two descriptors that is slow to trace; only one may be traced at a time."""

    traced = threading.Lock()

    def __init__(self):
        self.signature = {"q": "tensordesc<bf16[64,64]>", "p_x": "*fp32", "k": "tensordesc<bf16[64,64]>", "n": "i32"}
        self.launcher = threading.Event()

    def make_ir(self, number):
        assert self.traced.acquire(blocking=False)
        time.sleep(0.01)
        self.traced.release()
        return number

    def compiled(self, number):
        """Compile function in the form that Triton submits to a thread."""
        src = self

        def compile():
            found = src.make_ir(number)
            return found, src.launcher.wait(10)

        return compile


class Driver:
    """Fake Triton driver: builds a launcher from a source and the metadata of its descriptors."""

    made = ()

    def launcher_cls(self, source, metadata):
        self.made = *self.made, len(metadata.tensordesc_meta)
        source.launcher.set()
        if metadata.global_scratch_size is None:
            raise RuntimeError("what fails here fails again where it is needed")


def test_launchers_are_built_while_kernels_are_traced(monkeypatch):
    driver = pytest.importorskip("triton").runtime.driver

    active = Driver()
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(triton_abi, "entry_class", lambda: triton_abi.SignatureEntry)
    with triton_abi.Compilers(4) as pool:
        compiling = [pool.submit(Source().compiled(number)) for number in range(4)]
    assert [one.result() for one in compiling] == [(number, True) for number in range(4)]
    assert active.made == (2,) * 4


def test_unknown_triton_release_compiles_by_itself(monkeypatch):
    monkeypatch.setattr(triton_abi, "entry_class", lambda: None)
    source = Source()
    source.launcher.set()
    with triton_abi.Compilers(1) as pool:
        assert pool.submit(source.compiled(3)).result() == (3, True)
    assert list(vars(source)) == ["signature", "launcher"]
