"""Launches that go straight to a compiled kernel's entry: each must be one that the kernel was compiled for."""

import threading
import time
from typing import NamedTuple

import pytest
import torch

from dilated_attention_pytorch.kernels.launch import gluon_launcher as hopper_launch
from dilated_attention_pytorch.kernels.launch import launcher as quick_launch
from dilated_attention_pytorch.kernels.launch import warmup
from dilated_attention_pytorch.kernels.launch.launcher import Arena, Launch, launch


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
    """Stands for a kernel of three arguments and a constant; what the public way is given is noted."""

    arg_names = ("p_x", "many", "scale", "SIZE")

    def __init__(self):
        self.public, self.quick = [], []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.public.append((grid, arguments, options))
            return self

        return run


class Parameter(NamedTuple):
    """Stands for what a kernel knows of an argument."""

    do_not_specialize: bool


@pytest.fixture
def kernel(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(quick_launch, "entry_of", lambda compiled: Entry(compiled.quick))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(quick_launch, "_cache", {})
    return kernel


def test_a_launch_like_an_earlier_one_takes_the_quick_way(kernel):
    x, y = torch.zeros(64), torch.ones(64)
    launch(kernel, (3, 2), x, 5, 0.5, SIZE=16)
    assert kernel.public == [((3, 2), (x, 5, 0.5), {"SIZE": 16})] and not kernel.quick
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
def test_what_a_kernel_may_be_compiled_for_is_told_apart(kernel, other):
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


def test_whoever_watches_launches_sees_them(kernel, monkeypatch):
    x = torch.zeros(64)
    launch(kernel, (1,), x, 5, 0.5, SIZE=16)
    monkeypatch.setattr(Entry, "has_hooks", True)
    launch(kernel, (1,), x, 5, 0.5, SIZE=16)
    assert len(kernel.public) == 2 and not kernel.quick


def test_another_device_than_the_current_takes_the_public_way(kernel, monkeypatch):
    x = torch.zeros(64)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for _ in range(2):
        launch(kernel, (1,), x, 5, 0.5, SIZE=16)
    assert len(kernel.public) == 2 and not kernel.quick


def test_only_so_many_are_kept(kernel, monkeypatch):
    monkeypatch.setattr(quick_launch, "CACHE_SIZE", 2)
    for many in (1, 2, 3, 3):
        launch(kernel, (1,), torch.zeros(64), many, 0.5, SIZE=16)
    assert len(quick_launch._cache) == 1 and len(kernel.public) == 3 and len(kernel.quick) == 1


@pytest.fixture
def prepared(kernel):
    """A launch whose second argument changes, on the kernel that notes what it is given."""
    kernel.params = [Parameter(False), Parameter(True), Parameter(False), Parameter(False)]
    return Launch(kernel, torch.device("cpu"), 0.5, SIZE=16)


def test_a_prepared_launch_takes_addresses_and_what_changes(kernel, prepared):
    x, y = torch.zeros(64), torch.ones(64)
    prepared((3, 1, 1), [x], 5)
    assert kernel.public == [((3, 1, 1), (x, 5, 0.5), {"SIZE": 16})] and not kernel.quick
    prepared((4, 1, 1), [y], 16)
    assert len(kernel.public) == 1
    assert kernel.quick == [((4, 1, 1), 7, (y.data_ptr(), 16, 0.5, None), False)]


@pytest.mark.parametrize("other", [torch.zeros(64)[1:], torch.zeros(64, dtype=torch.float16)], ids=["place", "dtype"])
def test_prepared_launch_depends_on_specialization(kernel, prepared, other):
    for x in (torch.zeros(64), other):
        prepared((1, 1, 1), [x], 5)
    assert len(kernel.public) == 2 and not kernel.quick


def test_whoever_watches_prepared_launches_sees_them(kernel, prepared, monkeypatch):
    x = torch.zeros(64)
    prepared((1, 1, 1), [x], 5)
    monkeypatch.setattr(Entry, "has_hooks", True)
    prepared((1, 1, 1), [x], 5)
    assert len(kernel.public) == 2 and not kernel.quick


def test_tensors_of_one_room_do_not_overlap():
    shapes = {"close": (2, 3), "wide": (2, 3), "none": (0, 4), "line": (5,)}
    room = Arena(torch.float32, torch.device("cpu"), shapes, {"wide": (16, 1)})
    made = room()
    for value, x in enumerate(made):
        x.fill_(value)
    assert [x.shape for x in made] == [*shapes.values()] and made[0].is_contiguous()
    assert all(bool((x == value).all()) for value, x in enumerate(made))
    assert all((x.data_ptr() - made[0].data_ptr()) % 16 == 0 for x in made if len(x))


def test_tensors_of_a_room_lie_where_a_kernel_is_told():
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
        """Others may run during its launch."""

        def __call__(self, *given):
            super().__call__(*given)
            time.sleep(1e-3)

    class Bound:
        grid, overlaps = (1, 1, 1), True

        def bind(self, addresses):
            return Slow(calls), addresses

    def run():
        launches = hopper_launch.Launches(torch.device("cpu"), [Bound()] * 3)
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
