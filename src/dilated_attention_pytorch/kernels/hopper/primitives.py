"""Device functions of the Hopper kernels: mailboxes, item queue, TMA copies, padded keys, sums in global memory."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, ir
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Releases after 3.6 renamed the TMA copies.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

ROWS = gl.constexpr(64)
"""Rows of a warpgroup."""
PIECE = gl.constexpr(64 * 64)
"""Elements of the piece of dQ that a warpgroup computes per step."""

if hasattr(tma, "async_atomic_add"):
    add_out = tma.async_atomic_add
else:
    # Triton 3.6 compiles the TMA reduction but does not export it.
    @builtin
    def add_out(tensor_desc, coord, src, _semantic=None):
        """Start an asynchronous addition of a tile in shared memory to global memory."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """Shared memory as another type; a method of the buffer whose name depends on the release."""
    dtype, layout, *shape = (getattr(x, "value", x) for x in (dtype, layout, *shape))
    return _semantic.memdesc_reinterpret(buffer, dtype, shape, layout)


@triton.constexpr_function
def ring(stages, desc):
    """Shape of a ring buffer of `stages` tiles of a descriptor."""
    return [stages, *desc.block_shape]


@triton.constexpr_function
def workers_of(block):
    """Consumer warpgroups of a program for blocks of a size; each has 64 rows of an item."""
    return min(block // 64, 2)


@gluon.jit
def barrier_pairs(STAGES: gl.constexpr, READERS: gl.constexpr = 2):
    """Full and empty barriers of each stage; two consumer warpgroups arrive on an empty barrier, or all readers."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=READERS)
    return full, empty


@gluon.jit
def sync_warp():
    """Synchronize the lanes of a warp: one lane arrives on a barrier for all, and orders its own accesses alone.

    Triton releases after 3.6 insert this synchronization themselves.
    """
    gl.inline_asm_elementwise("bar.warp.sync -1; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def post(slot, a, b, c, d, e, f):
    """Write six integers into a mailbox of eight, as the last write of a warp before it signals a barrier."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = gl.arange(0, 8, layout)
    late = gl.where(at == 3, d, gl.where(at == 4, e, f))
    slot.store(gl.where(at == 0, a, gl.where(at == 1, b, gl.where(at == 2, c, late))))
    sync_warp()


@gluon.jit
def read(slot, which: gl.constexpr):
    """Integer `which` of a mailbox, broadcast to every thread."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    at = gl.arange(0, 8, layout)
    return gl.sum(gl.where(at == which, slot.load(layout), 0), 0)


@gluon.jit
def here(x):
    """Identity that blocks code motion: values derived from `x` would be hoisted out of the loop and spilled."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release(empty, item):
    """Release the buffers of an item to the loader once its gradients are stored."""
    tma.store_wait(0)
    mbarrier.arrive(empty.index((item + empty.shape[0]) % empty.shape[0]), count=1, pred=item >= 0)


@gluon.jit
def box_coordinates(desc, token, rate):
    """Residue and row of a token for a descriptor of five dimensions; otherwise 0 and the token.

    Called before a wait, which hides the latency of the division.
    """
    residue = 0
    row = token
    if len(desc.block_shape) == 5:
        row = token // rate
        residue = token - row * rate
    return residue, row


@gluon.jit
def let_next_start():
    """Allow an overlapping next launch to start while the programs of this launch end."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_launch():
    """Wait until the preceding launch has ended and its writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_rows_in(desc, more, batch, head, residue, row, longer, full, buffer):
    """Start copying a tile of rows, `rate` tokens apart, from the coordinates of `box_coordinates` on.

    A descriptor (batch, head, token, column) has adjacent rows. Strided rows have two descriptors of five dimensions
    (batch, head, residue, row, column): `more` describes the first `longer` residues, which have one row more, and is
    None if there are none.
    """
    if len(desc.block_shape) == 4:
        copy_in(desc, [batch, head, row, 0], full, buffer)
    elif more is None:
        copy_in(desc, [batch, head, residue, row, 0], full, buffer)
    elif residue < longer:
        copy_in(more, [batch, head, residue, row, 0], full, buffer)
    else:
        copy_in(desc, [batch, head, residue - longer, row, 0], full, buffer)


KEPT_SOME = gl.constexpr(4)
"""Field of the mailbox of a key tile behind its four words of kept keys: 1 if a key is padded."""
OUTSIDE = gl.constexpr(2**30)
"""Row from which on a TMA copy reads zeros, past the end of every tensor."""


@gluon.jit
def kept_words(p_padding, batch, n, first, rate, KEYS: gl.constexpr):
    """Bits of the keys of a tile that are not padded, 32 per word; of 64 keys twice the same words.

    `p_padding` points to a byte per sample and token, 0 for a key that is kept. Rows past the end of a segment have the
    bits of their tokens, which the tile holds, too; rows past the end of the sequence count as kept.
    """
    at = gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [1], [0]))
    token = first + at * rate
    padded = gl.load(p_padding + batch.to(gl.int64) * n + token, mask=token < n, other=0)
    bit = gl.where(padded == 0, 1 << (at & 31), 0)
    a = gl.sum(gl.where(at < 32, bit, 0), 0)
    b = gl.sum(gl.where((at >= 32) & (at < 64), bit, 0), 0)
    c = a
    d = b
    if KEYS == 128:
        c = gl.sum(gl.where((at >= 64) & (at < 96), bit, 0), 0)
        d = gl.sum(gl.where(at >= 96, bit, 0), 0)
    return a, b, c, d


@gluon.jit
def is_kept(note, at):
    """Whether keys `at` of a tile are kept, by the mailbox with its words; shaped as `at`."""
    late = gl.where(at < 96, read(note, 2), read(note, 3))
    word = gl.where(at < 32, read(note, 0), gl.where(at < 64, read(note, 1), late))
    # The columns of a thread differ in bits 0, 3 and 4 of a word: one shift for all, then a test of a constant bit.
    return ((word >> (at & 6)) & (1 << (at & 25))) != 0


@gluon.jit
def drop_columns(values, note, other):
    """Values [64, keys] of a tile with `other` in the columns of padded keys."""
    if read(note, KEPT_SOME) != 0:
        col = gl.arange(0, values.type.shape[1], gl.SliceLayout(0, values.type.layout))
        values = gl.where(gl.expand_dims(is_kept(note, col), 0), values, other)
    return values


@gluon.jit
def drop_rows(values, note, C: gl.constexpr):
    """Values [64, columns] of warpgroup `C` with 0 in the rows of padded keys."""
    if read(note, KEPT_SOME) != 0:
        row = here(C * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, values.type.layout)))
        values = gl.where(gl.expand_dims(is_kept(note, row), 1), values, 0.0)
    return values


@gluon.jit
def zero_rows(buffer, a, b, c, d):
    """Zero the rows of padded keys of a tile in shared memory, as a weight of 0 times NaN is NaN.

    A swizzled tile consists of columns of 64 elements, and a row of such a column of 128 contiguous bytes, whose order
    is irrelevant here.
    """
    D: gl.constexpr = buffer.shape[len(buffer.shape) - 1]
    GROUPS: gl.constexpr = buffer.shape[len(buffer.shape) - 2] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    shape: gl.constexpr = [D // 64 * GROUPS, 8, 32]
    b_groups = reinterpret(buffer, gl.int32, shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))
    for number in range(D // 64 * GROUPS):
        group = number % GROUPS
        word = gl.where(group < 4, a, gl.where(group < 8, b, gl.where(group < 12, c, d)))
        kept = (word >> (group % 4 * 8)) & 255
        if kept != 255:
            b_group = b_groups.index(number)
            b_group.store(gl.where(gl.expand_dims(((kept >> row) & 1) != 0, 1), b_group.load(layout), 0))
    fence_async_shared()
    sync_warp()


@gluon.jit
def add_rows_out(desc, more, batch, head, token, rate, longer, buffer):
    """Start adding rows in shared memory to rows `rate` tokens apart, from a token on; see `copy_rows_in`."""
    residue, row = box_coordinates(desc, token, rate)
    if more is None:
        add_out(desc, [batch, head, residue, row, 0], buffer)
    elif residue < longer:
        add_out(more, [batch, head, residue, row, 0], buffer)
    else:
        add_out(desc, [batch, head, residue - longer, row, 0], buffer)


@gluon.jit
def put_rows(values, desc, more, batch, head, first, rows, rate, longer, buffer, C: gl.constexpr):
    """Start storing the 64 rows [64, D] of warpgroup `C`; rows of a strided part are added."""
    D: gl.constexpr = values.type.shape[1]
    b_own = buffer.reshape([ROWS, D])
    if len(desc.block_shape) == 5:
        # Rows past the end of the segment belong to other items.
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
    """First token of a tile of a strided axis for a head offset, and the number of its tokens that exist."""
    first = gl.load(p_tiles + 2 * tile) + offset
    return first, (gl.maximum(gl.load(p_tiles + 2 * tile + 1) - first, 0) + rate - 1) // rate


@gluon.jit
def row_pointers(p_rows, first, rate, rows, stride, columns, C: gl.constexpr, D: gl.constexpr):
    """Pointers to the 64 rows of warpgroup `C` of an item, 16 bytes per thread, and a mask of existing elements.

    Strides and `columns`, the width of rows that do not fill their tile, are in units of 16 bytes, so that the
    compiler can derive the alignment of rows.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = C * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    col = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, layout)), 0)
    p_row = p_rows + (first + row * rate).to(gl.int64) * stride * 8
    p_own, exist = gl.expand_dims(p_row, 1) + col, gl.expand_dims(row < rows, 1)
    if columns is not None:
        exist = exist & (col < columns * 8)
    return p_own, exist


@gluon.jit
def joined_rows(values, p_rows, desc, batch, head, first, rows, buffer, C: gl.constexpr):
    """Sum of the 64 rows [64, D] of warpgroup `C` and the rows in memory, staged through their output buffer."""
    D: gl.constexpr = values.type.shape[1]
    b_own = buffer.reshape([ROWS, D])
    p_head = p_rows + (batch * (desc.strides[0] // 8) + head * (desc.strides[1] // 8)) * 8
    p_own, exist = row_pointers(p_head, first, 1, rows, desc.strides[2] // 8, None, C, D)
    b_own.store(gl.load(p_own, mask=exist, other=0.0))
    return values + b_own.load(values.type.layout).to(gl.float32)


@gluon.jit
def base_2(lse):
    """LSE in log2 units; +inf for a row without a key, so that its weights `exp2(scores - LSE)` are 0."""
    return gl.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634)


@gluon.jit
def joined(row_max, total, old):
    """Factors of the new sums and of the old output, and their joint LSE, all [64], in log2 units."""
    top = gl.maximum(row_max, old)
    shift = gl.where(top == -float("inf"), 0.0, top)
    new_factor = gl.exp2(row_max - shift)
    old_factor = gl.exp2(old - shift)
    sums = total * new_factor + old_factor
    inverse = gl.where(sums == 0.0, 0.0, 1.0 / sums)
    return new_factor * inverse, old_factor * inverse, shift + gl.log2(sums)


@gluon.jit
def add_piece(p_piece, piece):
    """Add a piece of dQ [64, 64] to its accumulator, 16 bytes per thread at a time."""
    # Reorder so that the register index is innermost and the index of the owning thread comes before it.
    parts = piece.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    runs = parts.reshape([8, 128, 4])
    layout: gl.constexpr = runs.type.layout
    o_run = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1), 2)
    o_thread = gl.expand_dims(gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0), 2)
    o_float = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1)
    gl.atomic_add(p_piece + (o_run * 512 + o_thread * 4 + o_float), runs, sem="relaxed")


@gluon.jit
def leave_piece(p_sum, tile, piece, C: gl.constexpr, D: gl.constexpr):
    """Add a piece of dQ to a float32 accumulator; an accumulator of another dtype receives the piece as rows.

    In such rows a thread stores its 16 columns contiguously: column 8j + 2t + i is at 16t + 2j + i.
    """
    if p_sum.dtype.element_ty == gl.float32:
        add_piece(p_sum + (tile.to(gl.int64) * 2 + C) * PIECE, piece)
    else:
        # Layout with the same elements per thread, row by row.
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
        # Half of the rows of the tile, or half of the columns.
        o_piece = (tile.to(gl.int64) * 2 + C) * PIECE if D == 64 else tile.to(gl.int64) * (2 * PIECE) + C * 64
        gl.store(p_sum + o_piece + (row * D + col), permuted)


@gluon.jit
def claim_item(p_next, DYNAMIC: gl.constexpr):
    """Claim the next item; the claim, in lane 0, is needed only when the current item is done."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    claim = lane
    if DYNAMIC:
        claim = gl.atomic_add(p_next + lane, gl.full_like(lane, 1), mask=lane == 0, sem="relaxed")
    return claim


@gluon.jit
def next_item(claim, p_next, item, items, DYNAMIC: gl.constexpr):
    """Item of an earlier claim; none is left from `items` on.

    Every item makes one claim, so the last claim of a launch is known, and its program resets the counter.
    """
    if DYNAMIC:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        claimed = gl.sum(gl.where(lane == 0, claim, 0), 0)
        gl.store(p_next, 0, mask=claimed == items - 1)
        item = gl.num_programs(0) + claimed
    else:
        item += gl.num_programs(0)
    return item


@gluon.jit
def claim_in_order(p_next, items):
    """Claim an item of a program that has none left to stream, so that items start in the order of their claims.

    Each program ends with a claim past the last item; the last of these resets the counter.
    """
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    item = gl.sum(gl.where(lane == 0, claim_item(p_next, True), 0), 0)
    gl.store(p_next, 0, mask=item == items + gl.num_programs(0) - 1)
    return item
