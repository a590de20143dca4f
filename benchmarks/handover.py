"""Kernels that hand numbers from one warp to four others, and nothing else: what racecheck says of what is right.

`plain`: all lanes write, a barrier of the warp, one lane arrives at a barrier in shared memory, readers wait for it.
`bytes`: the arrival also expects the bytes of a copy by TMA, which complete the phase; so the loader of the Hopper
backward hands over LSE and delta. Run by sanitize.py.
"""

# Gluon compiles the syntax tree of a kernel; Python's types say nothing about what it is given.
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dilated_attention_pytorch.kernels.hopper.layouts import tile_layout
from dilated_attention_pytorch.kernels.hopper.primitives import copy_in

SIDE, NUMBERS, STEPS = 64, gl.constexpr(128), 8
"""Rows and columns of the copied tile, numbers handed over at once, and how often."""


@gluon.jit
def buffers(desc):
    """Room for a tile and the numbers, and the barriers that say that they are there, and read."""
    b_tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    b_numbers = gl.allocate_shared_memory(gl.int32, [NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(empty.index(0), count=1)
    return b_tile, b_numbers, full, empty


@gluon.jit
def write_numbers(desc, b_tile, b_numbers, full, empty, STEPS: gl.constexpr, BYTES: gl.constexpr):
    """One warp: the place of each number plus the step, once those of the step before have been read."""
    layout: gl.constexpr = gl.BlockedLayout([NUMBERS // 32], [32], [1], [0])
    for step in range(STEPS):
        mbarrier.wait(empty.index(0), (step & 1) ^ 1)
        b_numbers.store(gl.arange(0, NUMBERS, layout) + step)
        gl.inline_asm_elementwise("bar.warp.sync -1; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        if BYTES:
            mbarrier.expect(full.index(0), desc.block_type.nbytes)
            copy_in(desc, [0, 0], full.index(0), b_tile)
        else:
            mbarrier.arrive(full.index(0), count=1)


@gluon.jit
def read_numbers(p_sums, b_numbers, full, empty, STEPS: gl.constexpr):
    """Four warps: the sum over the steps of each number."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    sums = gl.full([NUMBERS], 0, gl.int32, layout)
    for step in range(STEPS):
        mbarrier.wait(full.index(0), step & 1)
        sums += b_numbers.load(layout)
        mbarrier.arrive(empty.index(0), count=1)
    gl.store(p_sums + gl.arange(0, NUMBERS, layout), sums)


@gluon.jit
def handover_plain_kernel(desc, p_sums, STEPS: gl.constexpr):
    """Sums of numbers handed over by an arrival; a kernel for each case, as a report names kernels."""
    b_tile, b_numbers, full, empty = buffers(desc)
    gl.warp_specialize(
        [
            (read_numbers, (p_sums, b_numbers, full, empty, STEPS)),
            (write_numbers, (desc, b_tile, b_numbers, full, empty, STEPS, False)),
        ],
        [1],
        [24],
    )


@gluon.jit
def handover_bytes_kernel(desc, p_sums, STEPS: gl.constexpr):
    """The same by an arrival that expects bytes."""
    b_tile, b_numbers, full, empty = buffers(desc)
    gl.warp_specialize(
        [
            (read_numbers, (p_sums, b_numbers, full, empty, STEPS)),
            (write_numbers, (desc, b_tile, b_numbers, full, empty, STEPS, True)),
        ],
        [1],
        [24],
    )


KERNELS = {"plain": handover_plain_kernel, "bytes": handover_bytes_kernel}


def is_right(case: str) -> bool:
    """Whether every number arrived in every step."""
    tile = torch.ones(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    desc = TensorDescriptor(tile, [SIDE, SIDE], [SIDE, 1], [SIDE, SIDE], tile_layout(SIDE, SIDE, tile.dtype, rank=2))
    sums = torch.zeros(NUMBERS.value, dtype=torch.int32, device="cuda")
    KERNELS[case][(1,)](desc, sums, STEPS, num_warps=4)
    wanted = STEPS * torch.arange(len(sums)) + sum(range(STEPS))
    return torch.equal(sums.cpu(), wanted.int())
