"""Launches that go past triton's argument inspection pass what its public way does, on the tensors of each call."""

from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch.kernels import hopper_backend, hopper_gradients, hopper_launch
from dilated_attention_pytorch.kernels.registry import AttentionCall
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan


class Entry:
    """Stands for a compiled entry: remembers what it is launched with."""

    watched = False

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def described(self, place, address, box):
        return address + box.begin, *box[:2]

    def stream_of(self, device):
        return 0

    def __call__(self, grid, stream, arguments):
        self.launches.append((self.name, grid, *arguments))


class Kernel:
    """Stands for a kernel of triton, compiled or not: remembers what it is launched with the public way."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            flat = []
            for argument in arguments:
                if isinstance(argument, torch.Tensor):
                    flat.append(argument.data_ptr())
                elif hasattr(argument, "block_shape"):
                    flat += (argument.base.data_ptr(), tuple(argument.shape), tuple(argument.strides))
                else:
                    flat.append(argument)
            self.launches.append((self.name, grid[0], *flat))
            return self

        return launch


@pytest.fixture
def recorded(monkeypatch):
    """What is launched the public way, and what past it, with a CUDA device made of air."""
    reason = hopper_backend.gluon_missing()
    if reason is not None:
        pytest.skip(reason)
    from dilated_attention_pytorch.kernels import hopper_backward, hopper_backward_rows, hopper_forward, hopper_prepare

    public, direct = [], []
    kernels = (
        (hopper_forward, "attention_fwd_kernel"),
        (hopper_backward, "attention_dkv_bwd_kernel"),
        (hopper_backward_rows, "attention_dq_bwd_kernel"),
        (hopper_prepare, "prepare_bwd_kernel"),
        (hopper_prepare, "finish_dq_kernel"),
    )
    for module, name in kernels:
        monkeypatch.setattr(module, name, Kernel(name, public))
    monkeypatch.setattr(hopper_launch, "_compiled", {})
    monkeypatch.setattr(hopper_launch, "_counters", {})
    monkeypatch.setattr(hopper_launch, "entry_of", lambda compiled: Entry(compiled.name, direct))
    for module in (hopper_backend, hopper_gradients):
        monkeypatch.setattr(module, "processors", lambda _: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return public, direct


def problem(pattern):
    plan = make_plan(parse(pattern), 300, 4, block_size=128)
    query = torch.zeros(2, 300, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    key, value = (torch.zeros(2, 2, 300, 64, dtype=torch.bfloat16) for _ in range(2))
    return AttentionCall(query, key, value, plan, 0.125)


class Arena:
    """Gives every call the same memory for what it makes on the way, so that addresses of two calls agree."""

    def __init__(self, monkeypatch):
        self.made, self.count = [], 0
        for name in ("empty", "empty_strided", "empty_like", "zeros_like", "full_like"):
            monkeypatch.setattr(torch, name, self.giving(getattr(torch, name)))

    def giving(self, make):
        def give(*args, **kwargs):
            if self.count == len(self.made):
                self.made.append(make(*args, **kwargs))
            self.count += 1
            return self.made[self.count - 1]

        return give


PATTERNS = [("window:100", 1), ("dilated:100x1,300x4", 2)]


@pytest.mark.parametrize(("pattern", "parts"), PATTERNS)
def test_later_forward_launches_pass_what_the_first_did(pattern, parts, recorded, monkeypatch):
    public, direct = recorded
    call = problem(pattern)
    runner = hopper_backend.prepare(call)
    arena = Arena(monkeypatch)
    for _ in range(2):
        arena.count = 0
        runner.forward(call)
    assert len(public) == parts
    assert direct == public


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("pattern", "parts"), PATTERNS)
def test_later_backward_launches_pass_what_the_first_did(pattern, parts, fused, recorded, monkeypatch):
    public, direct = recorded
    call = problem(pattern)
    output, grad_output, lse = torch.zeros_like(call.query), torch.zeros_like(call.query), torch.zeros(2, 4, 300)
    # Built before memory is shared out, so that what is asked for then is the same in both calls.
    tensors = call.query, call.key, call.value, output, grad_output, lse, lse
    config = hopper_gradients.BACKWARD_CONFIGS[64]
    launch = hopper_gradients.BackwardLaunch(call, tensors, False, config, fused)
    arena = Arena(monkeypatch)
    for _ in range(2):
        arena.count = 0
        launch(*tensors)
    assert len(public) == 1 + 2 * parts
    assert direct == public


def test_launches_follow_the_tensors_of_each_call(recorded):
    public, direct = recorded
    call = problem("window:100")
    runner = hopper_backend.prepare(call)
    runner.forward(call)
    kept = []
    for _ in range(3):
        other = replace(call, query=call.query.clone())
        kept.append((other, runner.forward(other)))
    for (other, found), launched in zip(kept, direct, strict=True):
        assert launched[2] == other.query.data_ptr()
        assert found.lse.data_ptr() in launched
    assert len(public) == 1


def test_a_watched_launch_takes_the_public_way(recorded, monkeypatch):
    public, direct = recorded
    call = problem("window:100")
    runner = hopper_backend.prepare(call)
    runner.forward(call)
    monkeypatch.setattr(Entry, "watched", True)
    runner.forward(call)
    assert (len(public), len(direct)) == (2, 0)


def test_argument_lists_are_kept_for_so_many_addresses_only(recorded, monkeypatch):
    monkeypatch.setattr(hopper_launch, "KEPT_ADDRESSES", 4)
    call = problem("window:100")
    launch = hopper_backend.ForwardLaunch(call, hopper_backend.FORWARD_CONFIGS[64])
    kept = [launch(call) for _ in range(12)]
    assert len(launch.launches._kept) <= 4
    assert len(kept) == len(recorded[0]) + len(recorded[1])
