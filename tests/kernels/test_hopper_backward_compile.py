"""The Hopper backward kernels compile for sm_90a without a GPU: within the registers and shared memory of a
multiprocessor, and with their products left asynchronous. The lists the host prepares are checked against the plan."""

import re
import subprocess

import pytest
import torch

from dilated_attention_pytorch.kernels import hopper_backend, hopper_gradients
from dilated_attention_pytorch.kernels.registry import AttentionCall
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan

SHARED_MEMORY = 232448
"""Bytes a program may have on compute capability 9.0."""
POINTERS = ("p_work", "p_class", "p_walk", "p_whole", "p_partial", "p_bits", "p_next")
NUMBERS = ("items", "items_a_batch", "heads", "group", "query_tiles", "key_blocks", "query_blocks", "n")


@pytest.fixture(autouse=True)
def needs_gluon():
    reason = hopper_backend.gluon_missing()
    if reason is not None:
        pytest.skip(reason)


def assemble(kernel, descriptors, constants, folder):
    """Compile a kernel; bytes of shared memory and what the assembler says of it."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.experimental.gluon._runtime import GluonASTSource

    types = dict.fromkeys(POINTERS, "*i32") | dict.fromkeys(NUMBERS, "i32") | descriptors
    types |= dict.fromkeys(("p_rows", "p_sum"), "*fp32") | dict.fromkeys(("scale", "scale_log2"), "fp32")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("p_rows", "p_sum") if name in names}
    source = GluonASTSource(kernel, signature, places, aligned)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=hopper_backend.OPTIONS)
    except (AttributeError, TypeError, NotImplementedError) as problem:
        pytest.skip(f"the Gluon language of triton {triton.__version__} differs: {problem}")
    listing = folder / "kernel.ptx"
    listing.write_text(compiled.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", listing, "-o", folder / "kernel.cubin"]
    return compiled, subprocess.run(command, capture_output=True, text=True, check=True).stderr


def descriptor(rows, d, dtype):
    layout = hopper_backend.tile_layout(rows, d, dtype)
    return f"tensordesc<{'bf16' if dtype == torch.bfloat16 else 'fp16'}[1,1,{rows},{d}],{layout!r}>"


def assert_fits(compiled, log, spilled):
    assert "serialized" not in log, log
    assert int(re.search(r"Used (\d+) registers", log).group(1)) <= 168
    assert int(re.search(r"(\d+) bytes spill stores", log).group(1)) <= spilled, log
    assert compiled.metadata.shared <= SHARED_MEMORY


# Out of registers go addresses of an item and, at width 64, weights under a mask: nothing of a step without one.
@pytest.mark.parametrize(
    ("d", "block", "dtype", "fused", "spilled"),
    [
        (64, 128, torch.bfloat16, True, 256),
        (128, 128, torch.bfloat16, True, 64),
        (128, 256, torch.float16, True, 64),
        (64, 128, torch.bfloat16, False, 320),
        (128, 128, torch.bfloat16, False, 64),
    ],
)
def test_key_gradients_fit_a_multiprocessor(d, block, dtype, fused, spilled, tmp_path):
    from dilated_attention_pytorch.kernels.hopper_backward import attention_dkv_bwd_kernel

    config = hopper_gradients.BACKWARD_CONFIGS[d]
    streamed, held = descriptor(config.streamed_tile, d, dtype), descriptor(64, d, dtype)
    descriptors = dict.fromkeys(("q_desc", "do_desc"), streamed)
    descriptors |= dict.fromkeys(("k_desc", "v_desc", "dk_desc", "dv_desc"), held)
    constants = {
        "BLOCK": block,
        "STAGES": config.stages,
        "KV_STAGES": config.held_stages,
        "DQ": fused,
        "SKEW": config.skew,
        "WORKER_REGISTERS": config.registers,
    }
    compiled, log = assemble(attention_dkv_bwd_kernel, descriptors, constants, tmp_path)
    assert_fits(compiled, log, spilled)
    # The sum of dQ is fast only while every addition moves 16 bytes.
    assert ("add.v4.f32" in compiled.asm["ptx"]) == fused


@pytest.mark.parametrize("d", [64, 128])
def test_query_gradient_fits_a_multiprocessor(d, tmp_path):
    from dilated_attention_pytorch.kernels.hopper_backward_rows import attention_dq_bwd_kernel

    config = hopper_gradients.BACKWARD_CONFIGS[d]
    streamed, held = descriptor(config.streamed_tile, d, torch.bfloat16), descriptor(64, d, torch.bfloat16)
    descriptors = dict.fromkeys(("k_desc", "v_desc"), streamed)
    descriptors |= dict.fromkeys(("q_desc", "do_desc", "dq_desc"), held)
    constants = {
        "BLOCK": 128,
        "STAGES": config.stages,
        "Q_STAGES": config.held_stages,
        "WORKER_REGISTERS": config.registers,
    }
    assert_fits(*assemble(attention_dq_bwd_kernel, descriptors, constants, tmp_path), 0)


def meetings(work, plan, group, *, by_key):
    """Multiplicity of every pair, written out from the records the kernels read."""
    block, n = plan.block_size, plan.n
    dense = torch.zeros(plan.heads, n, n, dtype=torch.int32)
    shifts = torch.arange(32, dtype=torch.int32)
    masks = ((work.bits[..., None] >> shifts) & 1).flatten(2)[..., :block]
    tiles = len(work.rows) // (int(work.classes.max()) + 1)
    element = torch.arange(block)
    for holder, tile, steps, _ in work.items.tolist():
        first = tile * hopper_gradients.HELD_ROWS
        held = slice(first, min(first + hopper_gradients.HELD_ROWS, n))
        count = held.stop - first
        met = 0
        for head in range(holder * group, (holder + 1) * group) if by_key else (holder,):
            kind = int(work.classes[head])
            if kind < 0:
                continue
            pairs = dense[head].T if by_key else dense[head]
            row = work.rows[kind * tiles + first // block].tolist()
            for entry in work.full[row[0] : row[1]].tolist():
                at = (row[2] + entry) * block
                pairs[held, at : at + block] += 1
            for entry, mask, low, high in work.partial[row[3] : row[4]].tolist():
                at = (row[5] + entry) * block
                o_row = first % block
                if low <= high:
                    difference = o_row + torch.arange(count)[:, None] - element
                    seen = ((difference >= low) & (difference <= high)).int()
                else:
                    seen = masks[mask, o_row : o_row + count]
                pairs[held, at : at + block] += seen[:, : n - at]
            met += row[1] - row[0] + row[4] - row[3]
        assert met == steps
    return dense


@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize("by_key", [True, False])
@pytest.mark.parametrize(
    "pattern",
    [
        "causal",
        "window:200",
        "random:0.3;block=128;seed=1;per_head=1 & causal",
        "global:64 | window:100",
        "blocks:0,,1 2,,4;block=128",
    ],
)
def test_work_records_are_the_plan(pattern, by_key, block):
    plan = make_plan(parse(pattern), 640, 4, block_size=block)
    work = hopper_gradients.held_work(plan, 2, by_key=by_key)
    assert torch.equal(meetings(work, plan, 2, by_key=by_key), plan.to_dense())
    rows = {(head, tile) for head, tile, *_ in work.items.tolist()}
    assert len(rows) == len(work.items) == (2 if by_key else 4) * 5


class Recorder:
    """Stands for a compiled entry: remembers what it is launched with."""

    watched = False

    def __init__(self):
        self.launches = []

    def described(self, place, address, shape, strides):
        return place, address, shape, strides

    def stream_of(self, device):
        return 0

    def __call__(self, grid, stream, *arguments):
        self.launches.append((grid, *arguments))


@pytest.mark.parametrize("fused", [True, False])
def test_later_launches_pass_what_the_first_did(fused, monkeypatch):
    plan = make_plan(parse("window:100"), 300, 4, block_size=128)
    query, grad_output = (torch.zeros(2, 300, 4, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    key, value = (torch.zeros(2, 2, 300, 64, dtype=torch.bfloat16) for _ in range(2))
    output, lse = torch.zeros_like(query), torch.zeros(2, 4, 300)
    call = AttentionCall(query, key, value, plan, 0.125)
    config = hopper_gradients.BACKWARD_CONFIGS[64]
    recorder = Recorder()
    first = []

    def launch(kernel, identity, grid, arguments, **options):
        flat = []
        place = 0
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                flat.append(argument.data_ptr())
            elif hasattr(argument, "block_shape"):
                flat += (place, argument.base.data_ptr(), tuple(argument.shape), tuple(argument.strides))
                place += 1
            else:
                flat.append(argument)
        first.append((grid, *flat))
        hopper_backend._compiled[identity] = (None, recorder)

    monkeypatch.setattr(hopper_backend, "_compiled", {})
    monkeypatch.setattr(hopper_gradients, "launch", launch)
    monkeypatch.setattr(hopper_gradients, "_launch_rows", lambda *_: None)
    monkeypatch.setattr(hopper_gradients, "processors", lambda _: 132)
    # One buffer for everything made on the way: addresses of two calls then agree, and a swapped tensor still shows.
    made = {}
    monkeypatch.setattr(
        hopper_gradients, "empty_rows", lambda like, width: made.setdefault(id(like), torch.empty_like(like))
    )
    space = torch.empty(2**20)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: space)
    launches = hopper_gradients.BackwardLaunch(call, output, grad_output, lse, True, config, fused)
    for _ in range(2):
        launches(call, output, lse, grad_output, lse)
    assert len(first) == (1 if fused else 2)
    assert recorder.launches == first
