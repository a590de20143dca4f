"""What a first call on a GPU needs is begun once, beside the making of its plan, and by no call that needs it not."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from dilated_attention_pytorch import attention
from dilated_attention_pytorch.kernels import first_call
from dilated_attention_pytorch.ops.attention import plan_cache

WORK = "_hash_compiler", "_make_driver", "_import_kernels"


@pytest.fixture
def done(monkeypatch):
    """What was done, in a process where nothing has begun; triton, forks and devices are left alone."""
    done = []
    monkeypatch.setattr(first_call, "_unbegun", threading.Lock())
    monkeypatch.setattr(first_call, "_threads", [])
    monkeypatch.setattr(os, "register_at_fork", lambda before: done.append(before.__name__))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pytest.importorskip("triton")
    for name in WORK:

        def work(device, name=name):
            done.append((name, device))

        work.__name__ = name
        monkeypatch.setattr(first_call, name, work)
    return done


def query(is_cuda=True, dtype=torch.bfloat16):
    return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, device="the device")


def test_it_is_begun_once(done):
    for _ in range(3):
        first_call.begin(query(), "auto")
        first_call.finish()
    assert done[0] == "finish"
    assert sorted(done[1:]) == sorted((name, "the device") for name in WORK)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_backend_that_needs_it_may_be_named(done, backend):
    first_call.begin(query(), backend)
    first_call.finish()
    assert len(done) == 4


@pytest.mark.parametrize(
    ("given", "backend"),
    [(query(is_cuda=False), "auto"), (query(dtype=torch.float64), "auto"), (query(), "reference"), (query(), "cudnn")],
    ids=["CPU", "float64", "reference", "cudnn"],
)
def test_a_call_that_needs_it_not_leaves_it(done, given, backend):
    first_call.begin(given, backend)
    assert not first_call._threads and not first_call._unbegun.locked() and not done


def test_the_interpreter_of_triton_needs_it_not(done, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    first_call.begin(query(), "auto")
    assert not first_call._threads and not done


def test_a_call_on_the_cpu_begins_nothing_and_any_call_asks_before_its_plan(done, monkeypatch):
    asked = []
    begin, get = first_call.begin, plan_cache.get
    monkeypatch.setattr(first_call, "begin", lambda *given: (asked.append(given[1]), begin(*given)))
    monkeypatch.setattr(plan_cache, "get", lambda *given: (asked.append("plan"), get(*given))[1])
    x = torch.randn(1, 1, 37, 8)
    attention(x, x, x, "window:5", backend="reference")
    assert asked == ["reference", "plan"]
    assert not first_call._threads and not done


def test_whoever_needs_it_waits_for_all_of_it(done, monkeypatch):
    go, ended = threading.Event(), []

    def slow(device):
        go.wait(10)
        ended.append(True)

    monkeypatch.setattr(first_call, "_make_driver", slow)
    first_call.begin(query(), "auto")
    waiting = threading.Thread(target=lambda: (first_call.finish(), ended.append("waited")))
    waiting.start()
    assert ended == []
    go.set()
    waiting.join(10)
    assert ended == [True, "waited"]


def test_what_fails_is_silent(done, monkeypatch, capfd):
    def failing(device):
        raise RuntimeError("no compiler")

    for name in WORK:
        monkeypatch.setattr(first_call, name, failing)
    first_call.begin(query(), "auto")
    first_call.finish()
    assert len(first_call._threads) == 3 and not any(thread.is_alive() for thread in first_call._threads)
    assert capfd.readouterr() == ("", "")


def test_no_thread_can_be_started(done, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    first_call.begin(query(), "auto")
    first_call.finish()
    assert done == ["finish"]
