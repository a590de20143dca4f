"""What the Hopper kernels are made of: mailboxes, items taken in turn, tiles moved by TMA, sums in memory."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Releases after 3.6 renamed the TMA copies.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

ROWS = gl.constexpr(64)
"""Rows a warpgroup owns."""
PIECE = gl.constexpr(64 * 64)
"""Numbers in what a warpgroup gives of dQ at once."""

if hasattr(tma, "async_atomic_add"):
    add_out = tma.async_atomic_add
else:
    # Release 3.6 compiles the TMA addition and gives it no name.
    from triton.experimental.gluon.language._core import builtin, ir

    @builtin
    def add_out(tensor_desc, coord, src, _semantic=None):
        """Start adding a tile in shared memory to global memory."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


@triton.constexpr_function
def ring(stages, desc):
    """Shape of that many buffers for the tiles of a descriptor."""
    return [stages, *desc.block_shape]


@gluon.jit
def barrier_pairs(STAGES: gl.constexpr):
    """A barrier for each stage that says it is full, and one by which two warpgroups say that they are done with it."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    return full, empty


@gluon.jit
def post(slot, a, b, c, d, e, f):
    """Write up to eight integers into a mailbox, as the last of what one warp writes before it says so."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = gl.arange(0, 8, layout)
    late = gl.where(at == 3, d, gl.where(at == 4, e, f))
    slot.store(gl.where(at == 0, a, gl.where(at == 1, b, gl.where(at == 2, c, late))))
    # One lane tells, by a barrier in shared memory, what all have written, and is held to its own writes alone.
    # Releases after 3.6 wait here by themselves.
    gl.inline_asm_elementwise("bar.warp.sync -1; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def read(slot, which: gl.constexpr):
    """One integer of a mailbox, the same in every thread."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    at = gl.arange(0, 8, layout)
    return gl.sum(gl.where(at == which, slot.load(layout), 0), 0)


@gluon.jit
def here(x):
    """The same value, but made here: what follows from it would else be moved out of the loop, and spilled."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release(empty, item):
    """Hand the buffers of an item back to the loader once its gradients have left them."""
    tma.store_wait(0)
    mbarrier.arrive(empty.index((item + empty.shape[0]) % empty.shape[0]), count=1, pred=item >= 0)


@gluon.jit
def box_coordinates(desc, token, rate):
    """Residue and row of a token where a descriptor has five dimensions, else 0 and the token.

    Asked for before a wait: the division takes long, and who waits for the tile waits for it too.
    """
    residue = 0
    row = token
    if len(desc.block_shape) == 5:
        row = token // rate
        residue = token - row * rate
    return residue, row


@gluon.jit
def let_next_start():
    """Let programs of the next launch start as those of this one end, if it is one that overlaps."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_launch():
    """Wait until the launch before one that overlaps it has ended, and all that it wrote is seen."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_rows_in(desc, more, batch, head, residue, row, longer, full, buffer):
    """Start copying the rows from the coordinates of `box_coordinates` on, `rate` tokens apart.

    A descriptor (batch, head, token, column) has adjacent rows. Of five dimensions, (batch, head, residue, row,
    column), there are two: the first `longer` residues have a row more than the others and are described by `more`,
    which is None when there are none.
    """
    if len(desc.block_shape) == 4:
        copy_in(desc, [batch, head, row, 0], full, buffer)
    elif more is None:
        copy_in(desc, [batch, head, residue, row, 0], full, buffer)
    elif residue < longer:
        copy_in(more, [batch, head, residue, row, 0], full, buffer)
    else:
        copy_in(desc, [batch, head, residue - longer, row, 0], full, buffer)


@gluon.jit
def add_rows_out(desc, more, batch, head, token, rate, longer, buffer):
    """Start adding rows in shared memory to those from a token on, `rate` tokens apart; descriptors as above."""
    residue, row = box_coordinates(desc, token, rate)
    if more is None:
        add_out(desc, [batch, head, residue, row, 0], buffer)
    elif residue < longer:
        add_out(more, [batch, head, residue, row, 0], buffer)
    else:
        add_out(desc, [batch, head, residue - longer, row, 0], buffer)


@gluon.jit
def put_rows(values, desc, more, batch, head, first, rows, rate, longer, buffer, C: gl.constexpr):
    """Start storing the 64 rows [64, D] that warpgroup `C` owns of an item; those of a strided part are added."""
    D: gl.constexpr = values.type.shape[1]
    b_own = buffer.reshape([ROWS, D])
    if len(desc.block_shape) == 5:
        # Past the end of their segment lie rows that others add to.
        row = C * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, values.type.layout))
        b_own.store(gl.where(gl.expand_dims(row < rows, 1), values, 0.0).to(buffer.dtype))
        fence_async_shared()
        wait_for_launch()
        add_rows_out(desc, more, batch, head, first + C * ROWS * rate, rate, longer, buffer)
    else:
        b_own.store(values.to(buffer.dtype))
        fence_async_shared()
        copy_out(desc, [batch, head, first + C * ROWS, 0], buffer)


@gluon.jit
def first_and_count(p_tiles, tile, offset, rate):
    """First token of a tile of a strided axis for a head of that offset, and how many of its tokens exist."""
    first = gl.load(p_tiles + 2 * tile) + offset
    return first, (gl.maximum(gl.load(p_tiles + 2 * tile + 1) - first, 0) + rate - 1) // rate


@gluon.jit
def row_pointers(p_rows, first, rate, rows, stride, C: gl.constexpr, D: gl.constexpr):
    """Pointers to the 64 rows of warpgroup `C` of an item, 16 bytes a thread, and which of its rows exist.

    Strides are counted in 16 bytes, which tells the compiler how the rows are aligned.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = C * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    col = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, layout)), 0)
    p_row = p_rows + (first + row * rate).to(gl.int64) * stride * 8
    return gl.expand_dims(p_row, 1) + col, gl.expand_dims(row < rows, 1)


@gluon.jit
def joined_rows(values, p_rows, desc, batch, head, first, rows, buffer, C: gl.constexpr):
    """The 64 rows [64, D] of warpgroup `C` with what lies there added, by way of the buffer that they leave through."""
    D: gl.constexpr = values.type.shape[1]
    b_own = buffer.reshape([ROWS, D])
    p_head = p_rows + (batch * (desc.strides[0] // 8) + head * (desc.strides[1] // 8)) * 8
    p_own, exist = row_pointers(p_head, first, 1, rows, desc.strides[2] // 8, C, D)
    b_own.store(gl.load(p_own, mask=exist, other=0.0))
    return values + b_own.load(values.type.layout).to(gl.float32)


@gluon.jit
def base_2(lse):
    """LSE of rows as the weights `exp2(scores - LSE)` need it: +inf of a row without a key, so that they come out 0."""
    return gl.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634)


@gluon.jit
def joined(row_max, total, old):
    """Factors of the new sums and of the old output, and the LSE of both together, all [64] and in log2 units."""
    top = gl.maximum(row_max, old)
    shift = gl.where(top == -float("inf"), 0.0, top)
    new_factor = gl.exp2(row_max - shift)
    old_factor = gl.exp2(old - shift)
    sums = total * new_factor + old_factor
    inverse = gl.where(sums == 0.0, 0.0, 1.0 / sums)
    return new_factor * inverse, old_factor * inverse, shift + gl.log2(sums)


@gluon.jit
def add_piece(p_piece, piece):
    """Add a piece of dQ [64, 64] to its sum, 16 bytes a thread at a time."""
    # Row, half and column of a register, brought together behind those of the thread that holds it.
    parts = piece.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    runs = parts.reshape([8, 128, 4])
    layout: gl.constexpr = runs.type.layout
    o_run = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1), 2)
    o_thread = gl.expand_dims(gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0), 2)
    o_float = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1)
    gl.atomic_add(p_piece + (o_run * 512 + o_thread * 4 + o_float), runs, sem="relaxed")


@gluon.jit
def leave_piece(p_sum, tile, piece, C: gl.constexpr, D: gl.constexpr):
    """Add a piece of dQ to the float32 sum; or, where that has other numbers, store it as rows of its own.

    Of those a thread stores its 16 columns side by side: (8j + 2t + i) lies at (16t + 2j + i).
    """
    if p_sum.dtype.element_ty == gl.float32:
        add_piece(p_sum + (tile.to(gl.int64) * 2 + C) * PIECE, piece)
    else:
        # The same numbers in the same threads, but one row after the other.
        layout: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
            lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[64, 64],
        )
        permuted = piece.to(p_sum.dtype.element_ty).reshape([ROWS, 8, 4, 2]).permute((0, 2, 1, 3)).reshape([ROWS, 64])
        permuted = gl.convert_layout(permuted, layout)
        row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
        col = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
        # Half of the tile's rows, or of their columns.
        o_piece = (tile.to(gl.int64) * 2 + C) * PIECE if D == 64 else tile.to(gl.int64) * (2 * PIECE) + C * 64
        gl.store(p_sum + o_piece + (row * D + col), permuted)


@gluon.jit
def claim_item(p_next, DYNAMIC: gl.constexpr):
    """Ask for one more item; the answer, in the first lane, is needed only when this item is done."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    claim = lane
    if DYNAMIC:
        claim = gl.atomic_add(p_next + lane, gl.full_like(lane, 1), mask=lane == 0, sem="relaxed")
    return claim


@gluon.jit
def next_item(claim, p_next, item, items, DYNAMIC: gl.constexpr):
    """The item claimed before; beyond `items` there is none left.

    Every item makes one claim, so the last claim of a launch is known, and its holder sets the counter back to zero.
    """
    if DYNAMIC:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        claimed = gl.sum(gl.where(lane == 0, claim, 0), 0)
        gl.store(p_next, 0, mask=claimed == items - 1)
        item = gl.num_programs(0) + claimed
    else:
        item += gl.num_programs(0)
    return item
