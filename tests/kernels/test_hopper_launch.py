"""Direct launches pass the arguments that Triton's public launch passes, for the tensors of each call."""

import threading
from dataclasses import replace
from weakref import ref

import pytest
import torch
from conftest import poisoned
from kernels.test_selection import drawn

from dilated_attention_pytorch import make_selection
from dilated_attention_pytorch.distributed import SequenceLayout
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.kernels.hopper import backward as hopper_gradients
from dilated_attention_pytorch.kernels.hopper import split_rows as hopper_split
from dilated_attention_pytorch.kernels.hopper.lowering import launch_cache, lower
from dilated_attention_pytorch.kernels.launch import launcher as hopper_launch
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.plan.buffers import Pairs, buffer_plan
from dilated_attention_pytorch.selection.attend import CallChoices
from dilated_attention_pytorch.selection.kernels import lowering as learned_lowering
from dilated_attention_pytorch.selection.kernels.gathered_attention import GatheredAttend
from dilated_attention_pytorch.selection.kernels.lowering import Listed, ListedAttend


class Entry:
    """Fake compiled entry that records the arguments of its launches."""

    has_hooks = False

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def described(self, place, address, box):
        return address + box.begin, *box[:2]

    def stream_of(self, device):
        return 0

    def __call__(self, grid, stream, arguments, overlaps):
        self.launches.append((self.name, grid, *arguments))


class Kernel:
    """Fake Triton kernel, compiled or not, that records the arguments of public launches."""

    arg_names = ()

    def __init__(self, name, launches, params=()):
        self.name, self.launches, self.params = name, launches, params
        self.compiled_ahead, self.made_ready = [], []

    def warmup(self, *arguments, grid, **options):
        self.compiled_ahead.append((len(self.launches), options))
        return self

    @property
    def run(self):
        self.made_ready.append((len(self.launches), threading.current_thread() is threading.main_thread()))

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
            self.launches.append((self.name, grid, *flat))
            return self

        return launch


@pytest.fixture
def recorded(monkeypatch):
    """Public and direct launches, recorded on a fake CUDA device."""
    reason = hopper_backend.gluon_missing()
    if reason is not None:
        pytest.skip(reason)
    from dilated_attention_pytorch.kernels.hopper import dkv_kernel as hopper_backward
    from dilated_attention_pytorch.kernels.hopper import dq_kernel as hopper_backward_rows
    from dilated_attention_pytorch.kernels.hopper import forward_kernel as hopper_forward
    from dilated_attention_pytorch.kernels.hopper import pre_post_kernels as hopper_prepare
    from dilated_attention_pytorch.kernels.triton import backward_kernels as triton_backward
    from dilated_attention_pytorch.kernels.triton import forward_kernels as triton_forward

    public, direct = [], []
    kernels = (
        (hopper_forward, "attention_fwd_kernel"),
        (hopper_backward, "attention_dkv_bwd_kernel"),
        (hopper_backward_rows, "attention_dq_bwd_kernel"),
        (hopper_prepare, "prepare_bwd_kernel"),
        (hopper_prepare, "finish_dq_kernel"),
        (triton_forward, "merge_pieces_kernel"),
        (triton_backward, "sum_pieces_bwd_kernel"),
    )
    for module, name in kernels:
        monkeypatch.setattr(module, name, Kernel(name, public, getattr(module, name).params))
    monkeypatch.setattr(hopper_launch, "_launches", {})
    monkeypatch.setattr(hopper_backend, "_counters", {})
    learned_lowering._frame.cache_clear()
    monkeypatch.setattr(hopper_launch, "entry_of", lambda compiled: Entry(compiled.name, direct))
    for module in (hopper_backend, hopper_gradients):
        monkeypatch.setattr(module, "processors", lambda _: 132)
    # No kernel reads the lists of learned plans here, so that they are not written.
    monkeypatch.setattr(hopper_launch.Launch, "__call__", lambda *arguments: None)
    monkeypatch.setattr(hopper_backend, "why_not", lambda call: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return public, direct


def problem(pattern, n=300):
    plan = make_plan(parse(pattern), n, 4, block_size=128)
    query = torch.zeros(2, n, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    key, value = (torch.zeros(2, 2, n, 64, dtype=torch.bfloat16) for _ in range(2))
    return AttentionCall(query, key, value, plan, 0.125)


class Arena:
    """Allocator that returns the same memory in every call, so that addresses of two calls agree."""

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
def test_repeated_forward_launches_pass_equal_arguments(pattern, parts, recorded, monkeypatch):
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
def test_repeated_backward_launches_pass_equal_arguments(pattern, parts, fused, recorded, monkeypatch):
    public, direct = recorded
    call = problem(pattern)
    output, grad_output, lse = torch.zeros_like(call.query), torch.zeros_like(call.query), torch.zeros(2, 4, 300)
    # Built before the allocator is replaced, so that both calls make the same allocations.
    tensors = call.query, call.key, call.value, output, grad_output, lse, lse
    config = hopper_gradients.BACKWARD_CONFIGS[64]
    launch = hopper_gradients.BackwardLaunch(call, tensors, False, config, fused)
    arena = Arena(monkeypatch)
    for _ in range(2):
        arena.count = 0
        launch(*tensors)
    assert len(public) == 1 + 2 * parts
    assert direct == public


@pytest.mark.parametrize("fused", [True, False])
def test_unwritten_gradient_rows_start_at_zero(fused, recorded):
    plan = make_plan(parse("dilated:256x1,1024x4 & causal"), 1024, 4, block_size=128)
    # Buffer of a rank: the rows of each part are adjacent, and the first part does not have all rows.
    plan = buffer_plan(plan, 2, Pairs(SequenceLayout.contiguous(1024, 4).token_runs(1))).plan
    query = torch.zeros(1, 4, plan.n, 64, dtype=torch.bfloat16)
    key, lse = torch.zeros(1, 2, plan.n, 64, dtype=torch.bfloat16), torch.zeros(1, 4, plan.n)
    call = AttentionCall(query, key, key, plan, 0.125)
    tensors = query, key, key, query, query, lse, lse
    launch = hopper_gradients.BackwardLaunch(call, tensors, False, hopper_gradients.BACKWARD_CONFIGS[64], fused)
    # No kernel runs here, and allocated memory is filled with NaN.
    assert all(bool((gradient == 0).all()) for gradient in launch(*tensors))


def test_overlapping_launches_have_separate_counters(recorded, monkeypatch):
    overlapped = []
    monkeypatch.setattr(Entry, "__call__", lambda self, grid, stream, arguments, overlaps: overlapped.append(overlaps))
    call = problem("dilated:128x1,300x4,200x2")
    lse = torch.zeros(2, 4, 300)
    tensors = call.query, call.key, call.value, call.query, call.query, lse, lse
    config = hopper_gradients.BACKWARD_CONFIGS[64]

    def told(run, slot, *given):
        """Whether each launch overlaps the one before it, and where it counts."""
        overlapped.clear()
        for _ in range(2):
            run(*given)
        launches = run.launches.steps
        places = [[one for one in launch._arguments if isinstance(one, hopper_launch.PtrArg)] for launch in launches]
        return overlapped, [next(one.begin for one in reversed(each) if one.slot == slot) for each in places]

    overlap, counted = told(hopper_backend.prepare(call).forward, hopper_backend.COUNTERS, call)
    assert overlap == [False, True, True] and counted == [0, 1, 2]
    for fused in (False, True):
        backward = hopper_gradients.BackwardLaunch(call, tensors, False, config, fused)
        overlap, counted = told(backward, hopper_gradients.SPACE, *tensors)
        # The preparing launch and the first one after it wait, and so do the launches that compute dQ from sums.
        kernels = 3 if fused else 6
        assert overlap == [False, False] + [True] * (kernels - 1) + [False] * (3 * fused)
        assert len(set(counted[1 : 1 + kernels])) == kernels


def test_launches_overlap_only_launches_that_wait(recorded, monkeypatch):
    overlapped = []
    monkeypatch.setattr(Entry, "__call__", lambda self, grid, stream, arguments, overlaps: overlapped.append(overlaps))
    kernel = Kernel("", [])

    def launch(number, grid, overlaps):
        return hopper_launch.LaunchStep(kernel, grid, (number,), (torch.zeros(1),), overlaps=overlaps)

    # A launch without items is skipped; the next one follows the launch before it.
    each = (0, True), (1, False), (0, True), (1, True), (0, False), (1, True), (1, False), (1, True)
    launches = hopper_launch.Launches(torch.device("cpu"), [launch(i, *one) for i, one in enumerate(each)])
    for _ in range(2):
        launches(torch.zeros(1))
    assert overlapped == [False, False, True, False, False]


def test_a_thread_without_a_context_binds_again(monkeypatch):
    began, launched = [], []

    class Bound:
        has_hooks = False
        stream_of = staticmethod(lambda index: 0)

        def __call__(self, *arguments):
            launched.append(arguments)

    class Step:
        grid, overlaps = (1, 1, 1), False

        def bind(self, addresses):
            if not began:
                raise RuntimeError("invalid device context")
            return Bound(), ()

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: began.append(k) or zeros(*a, **k))
    launches = hopper_launch.Launches(torch.device("cpu"), [Step()])
    launches(torch.ones(1))
    assert began == [{"device": torch.device("cpu")}] and len(launched) == 1


@pytest.mark.parametrize(
    ("pattern", "fused", "joins", "cleared"),
    [
        ("dilated:128x1,300x4,200x2", False, True, [True, False, False]),
        ("dilated:128x1,300x4,200x2", True, False, [False] * 3),
        ("dilated:100x1,300x4", False, True, [True] * 3),
        ("dilated:100x1,300x4", True, False, [True] * 3),
        ("dilated:300x4", False, False, [True] * 3),
        ("window:100", False, False, [False] * 3),
    ],
)
def test_last_part_of_dq_by_rows_adds_the_other_parts(pattern, fused, joins, cleared, recorded, monkeypatch):
    public, _ = recorded
    call = problem(pattern)
    lse = torch.zeros(2, 4, 300)
    tensors = call.query, call.key, call.value, call.query, call.query, lse, lse
    config = hopper_gradients.BACKWARD_CONFIGS[64]
    launch = hopper_gradients.BackwardLaunch(call, tensors, False, config, fused)
    monkeypatch.setattr(torch, "empty_strided", poisoned(torch.empty_strided))
    gradients = launch(*tensors)
    assert [bool((one == 0).all()) for one in gradients] == cleared
    names = [name.removeprefix("attention_").removesuffix("_bwd_kernel") for name, *_ in public]
    parts = names.count("dkv")
    assert names == ["prepare", *["dkv"] * parts, *["finish_dq_kernel" if fused else "dq"] * parts]
    # A descriptor is its address, shape and strides.
    keys = [len(arguments[1]) == 5 for name, _, *arguments in public if "dkv" in name]
    rows = [arguments for name, _, *arguments in public if "dq_bwd" in name]
    assert keys == sorted(keys)
    assert [len(arguments[1]) == 5 for arguments in rows] == ([] if fused else keys[::-1])
    joined = [arguments[arguments.index(lse.data_ptr()) - 2] for arguments in rows]
    assert joined == [None] * (len(rows) - joins) + [gradients[0].data_ptr()] * joins


@pytest.mark.parametrize("fused", [True, False])
def test_pieces_of_long_rows_are_launched_and_joined(fused, recorded, monkeypatch):
    monkeypatch.setattr(hopper_split, "ROWS_A_PIECE", 1)
    monkeypatch.setattr(hopper_split, "SHORTEST_PIECE", 128**2)
    public, direct = recorded
    call = problem("global:128;queries=1 | window:60", 1400)
    forward = hopper_backend.prepare(call).forward
    output, grad_output, lse = torch.zeros_like(call.query), torch.zeros_like(call.query), torch.zeros(2, 4, 1400)
    tensors = call.query, call.key, call.value, output, grad_output, lse, lse
    config = hopper_gradients.BACKWARD_CONFIGS[64]
    backward = hopper_gradients.BackwardLaunch(call, tensors, False, config, fused)
    arena = Arena(monkeypatch)
    for _ in range(2):
        arena.count = 0
        forward(call)
        gradients = backward(*tensors)
    names = ["fwd", "fwd", "merge_pieces", "prepare_bwd", *["dkv_bwd"] * 2, *["sum_pieces_bwd"] * 2]
    names += ["finish_dq"] if fused else ["dq_bwd", "dq_bwd", "sum_pieces_bwd"]
    assert [name.removeprefix("attention_").removesuffix("_kernel") for name, *_ in public] == names
    assert direct == public
    # The launch that sums pieces receives the gradient, and the pieces that an earlier launch wrote.
    sums = [arguments for name, _, *arguments in public if name == "sum_pieces_bwd_kernel"]
    assert [to for to, *_ in sums] == [one.data_ptr() for one in (*gradients[1:], *gradients[: not fused])]
    written = {address for name, _, *arguments in public if "dkv" in name or "dq_bwd" in name for address in arguments}
    assert all(arguments[2] in written for arguments in sums)


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


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("pattern", ["window:100", "dilated:128x1,300x4"])
def test_launches_follow_the_padding_of_each_call(pattern, fused, recorded, monkeypatch):
    public, direct = recorded
    monkeypatch.setattr(hopper_backend, "reproducible_gradients", lambda: not fused)
    call = problem(pattern)
    output, lse = torch.zeros_like(call.query), torch.zeros(2, 4, 300)
    masks = [torch.zeros(2, 300, dtype=torch.bool) for _ in range(2)]
    for mask in (None, *masks, None, masks[0]):
        public.clear()
        direct.clear()
        padded = replace(call, key_padding_mask=mask)
        hopper_backend.forward(padded)
        hopper_backend.backward(padded, output, lse, output, None)
        read = [
            [one for one in masks if one.data_ptr() in arguments]
            for name, _, *arguments in (*public, *direct)
            if "attention" in name
        ]
        assert read and all(len(found) == (mask is not None) for found in read)
        assert mask is None or all(found[0] is mask for found in read)


def test_launch_with_hooks_is_public(recorded, monkeypatch):
    public, direct = recorded
    call = problem("window:100")
    runner = hopper_backend.prepare(call)
    runner.forward(call)
    monkeypatch.setattr(Entry, "has_hooks", True)
    runner.forward(call)
    assert (len(public), len(direct)) == (2, 0)


def test_cache_of_argument_lists_is_bounded(recorded, monkeypatch):
    monkeypatch.setattr(hopper_launch, "CACHED_ADDRESSES", 4)
    call = problem("window:100")
    launch = hopper_backend.ForwardLaunch(call, hopper_backend.FORWARD_CONFIGS[64])
    kept = [launch(call) for _ in range(12)]
    assert len(launch.launches._cache) <= 4
    assert len(kept) == len(recorded[0]) + len(recorded[1])


@pytest.mark.parametrize("fused", [True, False])
def test_prepared_backward_launches_equal_the_backend(fused, recorded, monkeypatch):
    public, direct = recorded
    call = problem("dilated:100x1,300x4")
    runner = hopper_backend.prepare(call)
    output, grad_output, lse = torch.zeros_like(call.query), torch.zeros_like(call.query), torch.zeros(2, 4, 300)
    monkeypatch.setattr(hopper_backend, "reproducible_gradients", lambda: not fused)
    found = output, lse, grad_output, None
    hopper_backend.backward(call, *found)
    arena = Arena(monkeypatch)
    for one in (hopper_backend, runner):
        arena.count = 0
        one.backward(call, *found)
    assert len(public) == 5
    half = len(direct) // 2
    assert direct[:half] == direct[half:] and half == 5


def boxes(launches, tensor):
    """Shape and strides of every TMA descriptor of a tensor in some launches."""
    found = []
    for _, _, *arguments in launches:
        for place, one in enumerate(arguments[:-2]):
            if one == tensor.data_ptr() and isinstance(arguments[place + 1], tuple):
                found.append(arguments[place + 1 : place + 3])
    return found


def laid_anew(call):
    """The call with tensors as `save_on_cpu` returns them: contiguous; and keys with heads inside tokens."""
    query, value = (x.clone(memory_format=torch.contiguous_format) for x in (call.query, call.value))
    key = call.key.transpose(1, 2).contiguous().transpose(1, 2)
    return replace(call, query=query, key=key, value=value)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("pattern", ["window:100", "dilated:128x1,300x4"])
def test_backward_follows_the_strides_of_saved_tensors(pattern, fused, recorded, monkeypatch):
    public, direct = recorded
    monkeypatch.setattr(hopper_backend, "reproducible_gradients", lambda: not fused)
    call = problem(pattern)
    other = laid_anew(call)
    assert call.query.stride() != other.query.stride() and call.key.stride() != other.key.stride()
    runner = hopper_backend.prepare(call)
    output, lse = torch.zeros_like(call.query), torch.zeros(2, 4, 300)
    for one in (call, other, call, other):
        public.clear()
        direct.clear()
        for _ in range(2):
            runner.backward(one, output, lse, output, None)
        for tensor in (one.query, one.key, one.value):
            known = {(tuple(shape), tuple(strides)) for shape, strides in boxes([*public, *direct], tensor)}
            wanted = {
                (tuple(box.shape), tuple(box.strides))
                for step in lower(one.plan)
                for axis in [step.queries if tensor is one.query else step.keys]
                for box in hopper_launch.boxes_of(tensor, axis if step.strided else None)
                if box is not None and box.begin == 0
            }
            assert known == wanted


def test_saved_tensors_that_tma_cannot_read_are_copied(recorded):
    public, direct = recorded
    call = problem("window:100")
    runner = hopper_backend.prepare(call)
    output, lse = torch.zeros_like(call.query), torch.zeros(2, 4, 300)
    runner.backward(call, output, lse, output, None)

    def off_the_grid(x):
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    def rows_apart(x):
        return torch.cat([x, x[..., :1]], -1)[..., : x.shape[-1]]

    for lay in (off_the_grid, rows_apart, lambda x: x.mT.contiguous().mT):
        for name in ("query", "key", "value"):
            other = replace(call, **{name: lay(getattr(call, name))})
            public.clear()
            direct.clear()
            runner.backward(other, output, lse, output, None)
            launched = [argument for launch in (*public, *direct) for argument in launch]
            assert launched and getattr(other, name).data_ptr() not in launched


def test_gradient_misaligned_for_tma_is_copied(recorded):
    public, _ = recorded
    call = problem("window:100")
    output, lse = torch.zeros_like(call.query), torch.zeros(2, 4, 300)
    grad_output = torch.zeros(output.numel() + 1, dtype=output.dtype)[1:].view(output.shape)
    runner = hopper_backend.prepare(call)
    runner.backward(call, output, lse, output, None)
    public.clear()
    runner.backward(call, output, lse, grad_output, None)
    launched = [argument for launch in public for argument in launch]
    assert launched and grad_output.data_ptr() not in launched


@pytest.mark.parametrize("fused", [True, False])
def test_kernels_compile_together_before_the_first_launch(fused, recorded, monkeypatch):
    from dilated_attention_pytorch.kernels.hopper import dkv_kernel as hopper_backward
    from dilated_attention_pytorch.kernels.hopper import dq_kernel as hopper_backward_rows
    from dilated_attention_pytorch.kernels.hopper import forward_kernel as hopper_forward
    from dilated_attention_pytorch.kernels.hopper import pre_post_kernels as hopper_prepare

    call = problem("dilated:128x1,300x4,100x1,300x7")
    runner = hopper_backend.prepare(call)
    forward = hopper_forward.attention_fwd_kernel
    monkeypatch.setattr(hopper_backend, "reproducible_gradients", lambda: not fused)
    for _ in range(2):
        output, lse = runner.forward(call)
    assert [launched for launched, _ in forward.compiled_ahead] == [0] * 3
    assert all(options == hopper_launch.OPTIONS for _, options in forward.compiled_ahead)
    before = len(recorded[0])
    for _ in range(2):
        runner.backward(call, output, lse, output, None)
    kernels = hopper_backward.attention_dkv_bwd_kernel, hopper_backward_rows.attention_dq_bwd_kernel
    assert len(kernels[0].compiled_ahead) == 3
    assert len(kernels[1].compiled_ahead) == (0 if fused else 3)
    assert len(hopper_prepare.finish_dq_kernel.compiled_ahead) == (2 if fused else 0)
    for kernel in (*kernels, hopper_prepare.prepare_bwd_kernel, hopper_prepare.finish_dq_kernel):
        assert all(launched == before for launched, _ in kernel.compiled_ahead)
        # The launcher of a kernel is compiled, too, in parallel with the kernels.
        assert kernel.made_ready == [(before, False)] * (len(kernel.compiled_ahead) > 0)


def test_kernels_compile_together_if_the_first_is_cached(recorded, monkeypatch):
    from dilated_attention_pytorch.kernels.hopper import dkv_kernel as hopper_backward
    from dilated_attention_pytorch.kernels.hopper import pre_post_kernels as hopper_prepare

    call = problem("dilated:128x1,300x4,100x1,300x7")
    runner = hopper_backend.prepare(call)
    output, lse = runner.forward(call)
    for reproducible in (True, False):
        monkeypatch.setattr(hopper_backend, "reproducible_gradients", lambda told=reproducible: told)
        for kernel in (hopper_backward.attention_dkv_bwd_kernel, hopper_prepare.finish_dq_kernel):
            kernel.compiled_ahead.clear()
        before = len(recorded[0])
        runner.backward(call, output, lse, output, None)
    for kernel, count in ((hopper_backward.attention_dkv_bwd_kernel, 3), (hopper_prepare.finish_dq_kernel, 2)):
        assert [launched for launched, _ in kernel.compiled_ahead] == [before] * count


def test_single_kernel_compiles_beside_its_launcher(recorded):
    from dilated_attention_pytorch.kernels.hopper import forward_kernel as hopper_forward

    call = problem("window:100")
    hopper_backend.prepare(call).forward(call)
    kernel = hopper_forward.attention_fwd_kernel
    assert len(kernel.compiled_ahead) == len(recorded[0]) == 1
    assert kernel.made_ready == [(0, False)]


def test_compilers_wait_for_the_warmup(recorded, monkeypatch):
    from dilated_attention_pytorch.kernels.hopper import forward_kernel as hopper_forward
    from dilated_attention_pytorch.kernels.launch import warmup

    kernel = hopper_forward.attention_fwd_kernel
    known = []
    monkeypatch.setattr(warmup, "finish", lambda: known.append(len(kernel.compiled_ahead)))
    call = problem("dilated:128x1,300x4")
    runner = hopper_backend.prepare(call)
    for _ in range(2):
        runner.forward(call)
    assert known == [0]


class Learned:
    """Calls of a drawn selection, which lives no longer than they."""

    def __init__(self, seed, n=512, size=128, group=2):
        listed = Listed(drawn(1, 4, n, size, is_causal=True, per_token=False, seed=seed), on_hopper=True)
        query = torch.zeros(1, 4, n, 64, dtype=torch.bfloat16)
        key = query[:, ::group].clone()
        self.forward = AttentionCall(query, key, key.clone(), listed.plan, 0.125)
        listed.choose(self.forward, "hopper", choices := CallChoices())
        self.backward = replace(self.forward, plan=listed.whole_plan)
        listed.choose(self.backward, "hopper", choices)

    def run(self):
        output, lse = hopper_backend.forward(self.forward)
        hopper_backend.backward(self.backward, output, lse, output, None)

    def lists(self, fused):
        """Tables that its kernels read."""
        return *lower(self.forward.plan)[0].by_query[:-1], *hopper_gradients.lists_of(self.backward, fused)


def addresses(tensors):
    return {tensor.data_ptr() for tensor in tensors}


@pytest.mark.parametrize("fused", [True, False])
def test_learned_plans_of_one_shape_share_launches_and_no_list(fused, recorded, monkeypatch):
    public, direct = recorded
    monkeypatch.setattr(hopper_backend, "reproducible_gradients", lambda: not fused)
    first, second = Learned(0), Learned(1)
    first.run()
    kernels = len(public)
    own, other = (addresses(one.lists(fused)) for one in (second, first))
    arena = Arena(monkeypatch)
    for watched in (False, True):
        monkeypatch.setattr(Entry, "has_hooks", watched)
        arena.count = 0
        second.run()
    assert (len(public), len(direct)) == (2 * kernels, kernels)
    assert direct == public[kernels:]
    passed = {argument for launch in direct for argument in launch}
    assert own <= passed
    assert len(other - own) == (7 if fused else 10)
    assert not (other - own) & passed
    cache = launch_cache(first.forward.plan)
    assert cache is launch_cache(second.backward.plan)
    assert sorted(key[0] for key in cache) == ["hopper backward", "hopper forward"]


@pytest.mark.parametrize("other", [{"n": 500}, {"size": 256}, {"group": 1}])
def test_learned_plans_of_other_shapes_have_own_launches(other, recorded):
    public, direct = recorded
    one, another = Learned(0), Learned(0, **other)
    launched = []
    for each in (one, another, one):
        public.clear()
        direct.clear()
        each.run()
        launched.append([*public, *direct])
    # Addresses are larger.
    numbers = [
        [[word for word in launch if isinstance(word, int) and word < 2**20] for launch in each] for each in launched
    ]
    assert numbers[0] == numbers[2] != numbers[1]
    assert all(another.forward.plan.n in launch for launch in numbers[1])
    own = addresses(another.lists(False))
    assert own <= {word for launch in launched[1] for word in launch}


def test_launches_keep_no_list_of_a_learned_plan_alive(recorded):
    for seed in range(2):
        learned = Learned(seed)
        learned.run()
    shared = addresses(Learned(2).lists(False)) & addresses(learned.lists(False))
    lists = [ref(one) for one in learned.lists(False) if one.data_ptr() not in shared]
    plans = [ref(call.plan) for call in (learned.forward, learned.backward)]
    assert len(lists) == 11
    del learned
    assert [one() for one in lists + plans] == [None] * len(lists + plans)


@pytest.fixture
def laid_out(recorded, monkeypatch):
    """Kernels that lay out lists, in the order of their launches."""
    names = []
    run = lambda launch, *given: names.append(launch.kernel.__name__)  # noqa: E731
    monkeypatch.setattr(hopper_launch.Launch, "__call__", run)
    return names


def made_selection(per_token, n=512):
    indices = torch.randint(-1, 4, (1, 4, n if per_token else n // 128, 3), dtype=torch.int32)
    return make_selection(indices, n=n, heads=4, granularity=128, is_causal=True)


def tensors(n=512):
    return [torch.zeros(1, heads, n, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]


QUERY_SIDE, KEY_SIDE = ["query_lists_kernel"], ["mark_kernel", "key_lists_kernel", "held_items_kernel"]


def test_lists_of_a_selection_are_written_once(recorded, laid_out, monkeypatch):
    public, direct = recorded
    selection, x, choices = made_selection(False), tensors(), CallChoices()

    def step():
        attend = ListedAttend(selection, 0.125, None, 0.0, None, "hopper", False, None, choices)
        output, lse = attend.forward(*x)
        attend.backward(*x, output, lse, output, None)
        made = direct.copy(), laid_out.copy()
        direct.clear()
        laid_out.clear()
        return made

    assert step() == ([], QUERY_SIDE + KEY_SIDE)
    launches = []
    with monkeypatch.context() as patched:
        arena = Arena(patched)
        for _ in range(2):
            arena.count = 0
            launched, laid = step()
            assert not laid
            launches.append(launched)
    assert launches[0] == launches[1] and len(launches[0]) == len(public)
    # Later calls use the lists of the first call.
    passed = [{one for launch in each for one in launch if isinstance(one, int)} for each in (public, launches[0])]
    (listed,) = (value for _, value in selection.memo._values.values())
    for plan in (listed.plan, listed.whole_plan):
        assert addresses(lower(plan)[0].by_query[:-1]) <= passed[0] & passed[1]
    selection.indices.add_(0)
    for _ in range(2):
        assert step()[1] == QUERY_SIDE + KEY_SIDE


def test_items_of_another_group_of_heads_are_written_again(recorded, laid_out):
    selection = made_selection(False)

    def step(key_heads):
        query = torch.zeros(1, 4, 512, 64, dtype=torch.bfloat16)
        key, value = (query[:, :key_heads].clone() for _ in range(2))
        attend = ListedAttend(selection, 0.125, None, 0.0, None, "hopper", False, None, CallChoices())
        output, lse = attend.forward(query, key, value)
        attend.backward(query, key, value, output, lse, output, None)
        made = laid_out.copy()
        laid_out.clear()
        return made

    items = KEY_SIDE[-1:]
    # Items of another group overwrite the earlier ones.
    made = [step(key_heads) for key_heads in (2, 2, 4, 4, 2, 2)]
    assert made == [QUERY_SIDE + KEY_SIDE, [], items, [], items, []]


def test_captured_passes_write_their_own_lists(recorded, laid_out, monkeypatch):
    selection, x, choices = made_selection(False), tensors(), CallChoices()

    def attend():
        return ListedAttend(selection, 0.125, None, 0.0, None, "hopper", False, None, choices)

    first = attend()
    output, lse = first.forward(*x)
    laid_out.clear()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patched.setattr(torch.Tensor, "is_cuda", True)
        patched.setattr(selection.memo, "_device", torch.device("cuda", 0))
        # A backward pass may be captured where the forward pass was not.
        first.backward(*x, output, lse, output, None)
        assert laid_out == QUERY_SIDE + KEY_SIDE
        laid_out.clear()
        second = attend()
        second.forward(*x)
        assert laid_out == QUERY_SIDE
    laid_out.clear()
    third = attend()
    third.forward(*x)
    assert not laid_out
    third.backward(*x, output, lse, output, None)
    # Lists of the captured pass are in the memory of its graph, so that they are written again.
    assert laid_out == KEY_SIDE


def test_selection_by_tokens_is_inverted_once(laid_out):
    selection, x = made_selection(True), tensors()
    inversion = ["mark_tokens_kernel", "runs_kernel", "place_kernel"]
    for wanted in (inversion, []):
        attend = GatheredAttend(selection, 0.125, None, 0.0, None, "triton", False, None)
        call = attend.shared_call(*x)
        (chunk,) = attend.chunks(*x)
        index = attend._inverted(call, chunk)
        assert laid_out == wanted and attend._inverted(call, chunk) is index
        laid_out.clear()
    # Lists of some heads are another selection.
    some = chunk._replace(heads=slice(2, 4), key_heads=slice(1, 2), is_whole=False)
    for _ in range(2):
        attend = GatheredAttend(selection, 0.125, None, 0.0, None, "triton", False, None)
        attend._inverted(call, some)
        assert laid_out == inversion
        laid_out.clear()
