"""The Hopper kernels compile for sm_90a without a GPU: within the registers and shared memory of a multiprocessor, and
without spilling. What the host prepares for them is checked against the plan."""

import re
import subprocess

import pytest
import torch

from dilated_attention_pytorch.kernels import hopper_backend
from dilated_attention_pytorch.kernels.registry import AttentionCall
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan

SHARED_MEMORY = 232448
"""Bytes a program may have on compute capability 9.0."""


def compile_kernel(kernel, types, constants, **options):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, places)
    try:
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=hopper_backend.OPTIONS | options)
    except (AttributeError, TypeError, NotImplementedError) as problem:
        pytest.skip(f"the Gluon language of triton {triton.__version__} differs: {problem}")


def assemble(compiled, folder):
    """What the assembler says of a compiled kernel: its log, with registers, stack and warnings."""
    from triton.backends.nvidia.compiler import get_ptxas

    listing = folder / "kernel.ptx"
    listing.write_text(compiled.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", listing, "-o", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def assert_fits(compiled, folder):
    log = assemble(compiled, folder)
    # One register that is read back once a row costs nothing.
    assert int(re.search(r"(\d+) bytes spill loads", log).group(1)) <= 4
    assert "serialized" not in log, log
    assert int(re.search(r"Used (\d+) registers", log).group(1)) <= 168
    assert compiled.metadata.shared <= SHARED_MEMORY


def descriptor(rows, d, dtype):
    layout = hopper_backend.tile_layout(rows, d, dtype)
    return f"tensordesc<{'bf16' if dtype == torch.bfloat16 else 'fp16'}[1,1,{rows},{d}],{layout!r}>"


@pytest.fixture(autouse=True)
def needs_gluon():
    reason = hopper_backend.gluon_missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("d", "block", "dtype"), [(64, 128, torch.bfloat16), (128, 128, torch.bfloat16), (128, 256, torch.float16)]
)
def test_forward_fits_a_multiprocessor(d, block, dtype, tmp_path):
    from dilated_attention_pytorch.kernels.hopper_forward import attention_fwd_kernel

    config = hopper_backend.FORWARD_CONFIGS[d]
    rows, keys = descriptor(64, d, dtype), descriptor(config.key_tile, d, dtype)
    types = dict.fromkeys(("p_work", "p_full", "p_partial", "p_bits", "p_next"), "*i32")
    types |= dict.fromkeys(("items", "items_a_batch", "heads", "group", "n"), "i32")
    types |= {"q_desc": rows, "k_desc": keys, "v_desc": keys, "o_desc": rows, "p_lse": "*fp32", "scale": "fp32"}
    constants = {
        "BLOCK": block,
        "K_STAGES": config.k_stages,
        "V_STAGES": config.v_stages,
        "PING_PONG": config.ping_pong,
        "DYNAMIC": config.persistent,
        "WORKER_REGISTERS": config.registers,
    }
    assert_fits(compile_kernel(attention_fwd_kernel, types, constants), tmp_path)


def meetings(work, plan):
    """Multiplicity of every pair, written out from the records the kernel reads."""
    block, n = plan.block_size, plan.n
    dense = torch.zeros(plan.heads, n, n, dtype=torch.int32)
    masks = plan.masks.dense(block).int()
    for head, tile, full_begin, full, full_base, partial_begin, partial, partial_base in work.items.tolist():
        first = tile * hopper_backend.QUERY_ROWS
        rows = slice(first, min(first + hopper_backend.QUERY_ROWS, n))
        for entry in work.full[full_begin : full_begin + full].tolist():
            key = (full_base + entry) * block
            dense[head, rows, key : key + block] += 1
        for entry, mask, low, high in work.partial[partial_begin : partial_begin + partial].tolist():
            key = (partial_base + entry) * block
            seen = masks[mask, first % block :][: rows.stop - rows.start, : n - key]
            if low <= high:
                difference = torch.arange(seen.shape[1]) - torch.arange(seen.shape[0])[:, None] - first % block
                assert torch.equal(seen.bool(), (difference >= low) & (difference <= high))
            dense[head, rows, key : key + block] += seen
    return dense


@pytest.mark.parametrize("block", [128, 256])
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
def test_work_records_are_the_plan(pattern, block):
    plan = make_plan(parse(pattern), 640, 3, block_size=block)
    work = hopper_backend.work_by_query(plan)
    assert torch.equal(meetings(work, plan), plan.to_dense())
    rows = {(head, tile) for head, tile, *_ in work.items.tolist()}
    assert len(rows) == len(work.items)
    assert work.covers == (len(rows) == 3 * 5)


def test_only_gpus_are_served():
    plan = make_plan(parse("causal"), 256, 2, block_size=128)
    query, key, value = (torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3))
    assert hopper_backend.why_not(AttentionCall(query, key, value, plan, 0.125)) == "needs a CUDA tensor, got cpu"


def test_a_head_that_reads_from_further_on_is_not_regular():
    from dilated_attention_pytorch.kernels.hopper_backend import _is_regular
    from dilated_attention_pytorch.plan import Axis

    start = torch.arange(2) * 128
    shifted, plain = (
        Axis(1, torch.tensor([0, offset], dtype=torch.int32), start.clone(), torch.full_like(start, 384))
        for offset in (128, 0)
    )
    assert _is_regular(plain, 128, 384)
    assert not _is_regular(shifted, 128, 384)
