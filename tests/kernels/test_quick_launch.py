"""Launches that go straight to a compiled kernel's entry: each must be one that the kernel was compiled for."""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.launch import launcher as quick_launch
from dilated_attention_pytorch.kernels.launch import triton_abi, warmup
from dilated_attention_pytorch.kernels.launch.arena import Arena
from dilated_attention_pytorch.kernels.launch.launcher import Launch, launch
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan

LOG2E = 1.4426950408889634


class Entry:
    """Stands for the compiled entry of a kernel."""

    has_hooks = False

    def __init__(self, calls):
        self.calls = calls

    def stream_of(self, device):
        return 7

    def __call__(self, grid, stream, arguments, overlaps):
        self.calls.append((grid, stream, arguments, overlaps))


class Kernel:
    """Fake kernel with three arguments and a constant, which records the arguments of public launches."""

    arg_names = ("p_x", "many", "scale", "SIZE")

    def __init__(self):
        self.public, self.quick = [], []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.public.append((grid, arguments, options))
            return self

        return run


class Parameter(NamedTuple):
    """Fake parameter of a kernel."""

    do_not_specialize: bool


@pytest.fixture
def kernel(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(quick_launch, "entry_of", lambda compiled: Entry(compiled.quick))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(quick_launch, "_launches", {})
    return kernel


def test_repeated_launch_is_direct(kernel):
    x, y = torch.zeros(64), torch.ones(64)
    launch(kernel, (3, 2), x, 5, 0.5, SIZE=16)
    assert kernel.public == [((3, 2, 1), (x, 5, 0.5), {"SIZE": 16, "enable_fp_fusion": True})] and not kernel.quick
    launch(kernel, (4,), y, 5, 0.25, SIZE=16)
    assert len(kernel.public) == 1
    assert kernel.quick == [((4, 1, 1), 7, (y.data_ptr(), 5, 0.25, None), False)]


def test_compilation_waits_for_the_warmup(kernel, monkeypatch):
    known = []
    monkeypatch.setattr(warmup, "finish", lambda: known.append(len(kernel.public)))
    for _ in range(2):
        launch(kernel, (1,), torch.zeros(64), 5, 0.5, SIZE=16)
    assert known == [0]


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(64)[1:]},
        {"x": torch.zeros(64, dtype=torch.float16)},
        {"many": 16},
        {"scale": 1},
        {"size": 32},
    ],
    ids=["alignment", "dtype", "a whole number", "a whole number for another", "a constant"],
)
def test_specialized_properties_have_separate_launches(kernel, other):
    given = {"x": torch.zeros(64), "many": 5, "scale": 1.0, "size": 16}
    for each in (given, given | other):
        launch(kernel, (1,), each["x"], each["many"], each["scale"], SIZE=each["size"])
    assert len(kernel.public) == 2 and not kernel.quick


def test_unspecialized_numbers_share_a_launch_by_type(kernel):
    kernel.params = [Parameter(False), Parameter(True), Parameter(False), Parameter(False)]
    x = torch.zeros(64)
    for many in (5, 16, 2**31 - 1):
        launch(kernel, (1,), x, many, 0.5, SIZE=16)
    assert len(kernel.public) == 1 and [arguments[1] for _, _, arguments, _ in kernel.quick] == [16, 2**31 - 1]
    for many in (2**31, 5.0):
        launch(kernel, (1,), x, many, 0.5, SIZE=16)
    assert len(kernel.public) == 3


def test_hooks_see_every_launch(kernel, monkeypatch):
    x = torch.zeros(64)
    launch(kernel, (1,), x, 5, 0.5, SIZE=16)
    monkeypatch.setattr(Entry, "has_hooks", True)
    launch(kernel, (1,), x, 5, 0.5, SIZE=16)
    assert len(kernel.public) == 2 and not kernel.quick


def test_a_launch_runs_on_the_device_of_its_tensors(kernel, monkeypatch):
    current = [0]

    @contextmanager
    def switched(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", switched)
    noted = lambda *_, **__: kernel.public.append(current[-1]) or kernel  # noqa: E731
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: noted)
    run, x = Launch(kernel, torch.device("cuda", 1), 5, 0.5, SIZE=16), torch.zeros(64)
    for _ in range(2):
        run((1, 1, 1), (x,))
    # Triton launches on the current device, which is 0.
    assert kernel.public == [1, 1] and not kernel.quick
    with switched(1):
        run((1, 1, 1), (x,))
    assert len(kernel.quick) == 1


@pytest.mark.parametrize("name", ["attention_fwd_kernel", "attention_dq_bwd_kernel", "attention_dkv_bwd_kernel"])
def test_direct_launches_pass_their_own_softcap(kernel, monkeypatch, name):
    pytest.importorskip("triton")
    from dilated_attention_pytorch.kernels.triton import launches

    known = getattr(launches, name)
    kernel.arg_names, kernel.params = known.arg_names, getattr(known, "params", ())
    monkeypatch.setattr(launches, "launch", lambda one, *given, **named: one is kernel and launch(one, *given, **named))
    monkeypatch.setattr(launches, "delta_of", lambda *_: torch.zeros(1, 2, 32))
    monkeypatch.setattr(launches, name, kernel)
    query = torch.randn(1, 2, 32, 16)
    call = AttentionCall(query, query, query, make_plan(parse("causal"), 32, 2, 16), 0.25)
    caps = 0.0, 2.0, 0.0, 4.0, 2.0
    passed = []
    for cap in caps:
        before = len(kernel.public), len(kernel.quick)
        capped = replace(call, softcap=cap)
        if name == "attention_fwd_kernel":
            launches.forward(capped)
        else:
            launches.backward(capped, query, torch.zeros(1, 2, 32), query, None)
        arguments = [one[1] for one in kernel.public[before[0] :]] + [one[2] for one in kernel.quick[before[1] :]]
        assert len(arguments) == 1
        named = dict(zip(known.arg_names, arguments[0], strict=False))
        passed.append((named["cap_scale"], named["scale" if name == "attention_fwd_kernel" else "scale_log2"]))
    assert passed == [(0.25 / cap, cap * LOG2E) if cap else (None, 0.25 * LOG2E) for cap in caps]
    # One entry without a cap and one with any; both are called directly from then on.
    assert (len(kernel.public), len(kernel.quick)) == (2, 3)


def test_launch_cache_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(quick_launch, "CACHE_SIZE", 2)
    for many in (1, 2, 3, 3):
        launch(kernel, (1,), torch.zeros(64), many, 0.5, SIZE=16)
    assert len(quick_launch._launches) == 1 and len(kernel.public) == 3 and len(kernel.quick) == 1


def test_tensors_behind_numbers_may_be_absent(kernel):
    kernel.params = [Parameter(False), Parameter(True), Parameter(True), Parameter(False)]
    x, y = torch.zeros(64), torch.ones(64)
    for place in (y, None, x, None):
        launch(kernel, (1,), x, 5, place, SIZE=16)
    assert [arguments[2] for _, arguments, _ in kernel.public] == [y, None]
    assert [arguments[2] for _, _, arguments, _ in kernel.quick] == [x.data_ptr(), None]


def test_an_unsupported_release_of_triton_launches_publicly(kernel, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(quick_launch, "entry_of", triton_abi.entry_of)
    monkeypatch.setattr(triton, "__version__", "3.10.1")
    kernel.run = None
    for _ in range(2):
        launch(kernel, (1,), torch.zeros(64), 5, 0.5, SIZE=16)
    assert len(kernel.public) == 2
    assert triton_abi.why_not() == (
        "direct launches need Triton 3.6 to 3.9 for CUDA, got 3.10.1; every launch takes more host time"
    )
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert triton_abi.why_not() is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "got 3.9.0 for ROCm" in triton_abi.why_not()


@pytest.fixture
def prepared(kernel):
    """A launch of the recording kernel with a varying second argument."""
    kernel.params = [Parameter(False), Parameter(True), Parameter(False), Parameter(False)]
    return Launch(kernel, torch.device("cpu"), 0.5, SIZE=16)


def test_prepared_launch_passes_addresses_and_varying_integers(kernel, prepared):
    x, y = torch.zeros(64), torch.ones(64)
    prepared((3, 1, 1), [x], 5)
    assert kernel.public == [((3, 1, 1), (x, 5, 0.5), {"SIZE": 16, "enable_fp_fusion": True})] and not kernel.quick
    prepared((4, 1, 1), [y], 16)
    assert len(kernel.public) == 1
    assert kernel.quick == [((4, 1, 1), 7, (y.data_ptr(), 16, 0.5, None), False)]


@pytest.mark.parametrize("other", [torch.zeros(64)[1:], torch.zeros(64, dtype=torch.float16)], ids=["place", "dtype"])
def test_prepared_launch_depends_on_specialization(kernel, prepared, other):
    for x in (torch.zeros(64), other):
        prepared((1, 1, 1), [x], 5)
    assert len(kernel.public) == 2 and not kernel.quick


def test_hooks_see_every_prepared_launch(kernel, prepared, monkeypatch):
    x = torch.zeros(64)
    prepared((1, 1, 1), [x], 5)
    monkeypatch.setattr(Entry, "has_hooks", True)
    prepared((1, 1, 1), [x], 5)
    assert len(kernel.public) == 2 and not kernel.quick


def test_tensors_of_an_arena_do_not_overlap():
    shapes = {"close": (2, 3), "wide": (2, 3), "none": (0, 4), "line": (5,)}
    room = Arena(torch.float32, torch.device("cpu"), shapes, {"wide": (16, 1)})
    made = room()
    for value, x in enumerate(made):
        x.fill_(value)
    assert [x.shape for x in made] == [*shapes.values()] and made[0].is_contiguous()
    assert all(bool((x == value).all()) for value, x in enumerate(made))
    assert all((x.data_ptr() - made[0].data_ptr()) % 16 == 0 for x in made if len(x))


def test_tensors_of_an_arena_begin_at_the_kernel_offsets():
    room = Arena(torch.int32, torch.device("cpu"), {"first": (2, 3), "none": (0, 4), "last": (5,)})
    memory = room.made()
    first, last = room.begin("first", "last")
    memory[first : first + 6], memory[last : last + 5] = torch.arange(6), 7
    assert room.tensor(memory, "first").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert room.tensor(memory, "last").tolist() == [7] * 5
    assert room.tensor(memory, "none").shape == (0, 4)
    assert len(memory) == room.total


def test_launches_of_a_call_stay_in_order_across_threads():
    calls = []

    class Slow(Entry):
        """Entry with a slow launch, during which other threads may run."""

        def __call__(self, *given):
            super().__call__(*given)
            time.sleep(1e-3)

    class Bound:
        grid, overlaps = (1, 1, 1), True

        def bind(self, addresses):
            return Slow(calls), addresses

    def run():
        launches = quick_launch.Launches(torch.device("cpu"), [Bound()] * 3)
        tensor = torch.empty(1)
        for _ in range(5):
            launches(tensor)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    addresses = [arguments for _, _, arguments, _ in calls]
    assert len(addresses) == 45
    assert all(len({*addresses[place : place + 3]}) == 1 for place in range(0, 45, 3))
