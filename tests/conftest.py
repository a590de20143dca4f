"""Set-up of every test: poisoned memory, fixed seeds, one thread a worker, reproducible examples, scaled limits."""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator

# Threads that wait in a loop take the time of the other workers. OpenMP reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from browser import CHROMIUM, Browser
from limits import scaled

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

try:
    from hypothesis import HealthCheck, Phase, settings
except ImportError:
    # A GPU machine where nothing can be installed still runs tests/gpu.
    settings = None
else:
    settings.register_profile(
        "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
    # Whether a test fails is all that is asked of a planted bug: a smaller example may take minutes to find.
    settings.register_profile(
        "planted", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate], database=None
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

LIBRARY = "dilated_attention_pytorch"
ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)

# torch lists the functions that follow a default device once, and must find the real allocators then.
with torch.device("cpu"):
    torch.empty(0)


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`allocate`, filling with NaN what it gives to the library, so that a forgotten write cannot pass a comparison.

    Integers are two thirds of the largest, an index beyond any memory.
    """

    def allocate_poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        memory = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] == LIBRARY and memory.dtype is not torch.bool and not memory.is_complex():
            with torch.no_grad():
                memory.fill_(float("nan") if memory.is_floating_point() else torch.iinfo(memory.dtype).max // 3 * 2)
        return memory

    return allocate_poisoned


@pytest.fixture(autouse=True)
def poison_unwritten_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tracing reads the allocators' identity, and a Python stand-in would break the graph.
    if request.node.get_closest_marker("compile") is None:
        for owner, name in ALLOCATORS:
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for the tests of pages; every test opens its page in a new tab."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    started = Browser(tmp_path_factory.mktemp("browser") / "profile")
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(autouse=True)
def seed_from_name(request: pytest.FixtureRequest) -> None:
    """Each test draws its own numbers, the same in every run, alone or with others."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def shape_checks_off_where_untyped(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of our own error messages must reach them before the runtime checker does."""
    if request.node.get_closest_marker("untyped") is None:
        yield
        return
    from jaxtyping import config

    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Scale the time limit of a test to the machine, unless the command line gives one."""
    if item.config.pluginmanager.has_plugin("timeout") and item.config.getoption("timeout") is None:
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker is not None else float(item.config.getini("timeout") or 0)
        item.add_marker(pytest.mark.timeout(scaled(seconds)), append=False)
    yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        # A long test that is started last leaves the other workers idle.
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
