"""Backward kernel for Hopper in Gluon: dK and dV accumulate in registers while queries stream, dQ in global memory.

A work item is 128 keys of one key head; each of two warpgroups owns 64 of them. A step is one tile of query rows:

    S^T = K Q^T      dP^T = V dO^T      dV += P^T dO      dQ += dS K      dK += dS^T Q

Both score products are computed transposed, so that P^T is already the register operand of dV. dQ needs dS of all 128
keys: the warpgroups exchange it through shared memory; each computes a 64 x 64 piece of dQ and adds it to a float32
accumulator in global memory, one step later, so that neither waits for the other. The order of these additions is not
fixed, so dQ of two runs may differ in its last bits; without DQ the kernel leaves dQ to `dq_kernel`. With blocks of 64
a program has one warpgroup, an item is one block, and dQ is left to `dq_kernel`.

With `p_turns` the order is fixed: items add to a tile of dQ in the order of their claims. Every streamed tile carries
its turn, and a fourth partition (`keep_turns`) releases the piece of both warpgroups when the counter of the tile has
reached that turn, and increments the counter when both have added. An item waits only for items that were claimed
before it, by programs that run, so some item can always go on.

The accumulator has the order of the registers that are added to it (`PIECE` floats per piece), so that every addition
is 16 bytes per thread and a warp accesses contiguous memory. `pre_post_kernels.finish_dq_kernel` restores row order.

dK and dV of a padded key are set to 0 at the end, so that steps ignore padding except for dQ, whose product runs over
the keys: dS of a padded key is set to 0, and so is the key itself in shared memory. An item without a kept key has no
step, except with turns, which count its additions.

Descriptors of five dimensions (`primitives.copy_rows_in`) select a strided part, whose gradients are added to the
results of earlier parts.

Names: `p_` pointer, `b_` buffer in shared memory, `o_` offset; shape comments are [rows, columns].
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .primitives import (
    OUTSIDE,
    ROWS,
    barrier_pairs,
    base_2,
    box_coordinates,
    claim_in_order,
    claim_item,
    copy_rows_in,
    drop_rows,
    first_and_count,
    here,
    joined_rows,
    kept_words,
    leave_piece,
    let_next_start,
    next_item,
    post,
    put_rows,
    read,
    release,
    ring,
    sync_warp,
    wait_for_launch,
    workers_of,
    zero_rows,
)

MEETING = gl.constexpr(8)
EXCHANGE = gl.constexpr(9)
"""Hardware barriers of the two warpgroups: one, and from EXCHANGE on four; the compiler uses low numbers itself."""
TURN = gl.constexpr(13)
ADDED = gl.constexpr(15)
"""Hardware barriers of the turn warp: with each warpgroup, and with both."""

ITEM_HEAD, ITEM_ROW, ITEM_STEPS, ITEM_BATCH, ITEM_ROWS, ITEM_STORED = (gl.constexpr(i) for i in range(6))
"""Fields of an item's mailbox; ITEM_BATCH is -1 after the last item, ITEM_STORED the destination of a piece."""
TILE_SUM, TILE_MASK, TILE_LOW, TILE_HIGH, TILE_LAST, TILE_TURN = (gl.constexpr(i) for i in range(6))
"""Fields of a streamed tile's mailbox: index in the dQ accumulator; mask, -1 for a whole tile; band of differences held
minus streamed; last key; turn, -1 after the last tile. Rows are relative to the first rows of the item and of the
tile."""


@gluon.jit
def stream_tile(
    first_desc, first_more, second_desc, second_more, b_first, b_second, b_rows, b_tile, b_kept, full, empty, whole,
    p_lse, p_delta, p_padding, n, o_rows, token, rows, rate, longer,
    count, batch, head, sum_tile, mask, low, high, last_key, turn, STAGES: gl.constexpr, BY_KEY: gl.constexpr,
):  # fmt: skip
    """Start copying a streamed tile, its mailbox, and LSE and delta of its queries into a slot of the ring."""
    BM: gl.constexpr = first_desc.block_shape[len(first_desc.block_shape) - 2]
    if BY_KEY:
        # Read before the wait for a free slot, which hides the latency.
        row = gl.arange(0, BM, gl.BlockedLayout([BM // 32], [32], [1], [0]))
        o_row = o_rows + (token + row * (rate if len(first_desc.block_shape) == 5 else 1))
        lse = gl.load(p_lse + o_row, mask=row < rows, other=float("inf"))
        delta = gl.load(p_delta + o_row, mask=row < rows, other=0.0)
    residue, box_row = box_coordinates(first_desc, token, rate)
    if p_padding is not None:
        a, b, c, d = kept_words(p_padding, batch, n, token, rate if len(first_desc.block_shape) == 5 else 1, BM)
        some = gl.where((a & b & c & d) == -1, 0, 1)
        none = (a | b | c | d) == 0
        box_row = gl.where(none, OUTSIDE, box_row)
    slot = count % STAGES
    mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
    if BY_KEY:
        b_rows.index(slot).slice(0, BM).store(base_2(lse))
        b_rows.index(slot).slice(BM, BM).store(delta)
    post(b_tile.index(slot), sum_tile, mask, low, high, last_key, turn)
    here_full = full.index(slot)
    if p_padding is None:
        mbarrier.expect(here_full, 2 * first_desc.block_type.nbytes)
        copy_rows_in(first_desc, first_more, batch, head, residue, box_row, longer, here_full, b_first.index(slot))
    else:
        b_keys = b_first.index(slot)
        post(b_kept.index(slot), a, b, c, d, some, 0)
        if (some == 0) | none:
            # One phase of this barrier per tile, so that its parity follows from the count.
            mbarrier.arrive(whole.index(0), count=1)
            mbarrier.expect(here_full, 2 * first_desc.block_type.nbytes)
            copy_rows_in(first_desc, first_more, batch, head, residue, box_row, longer, here_full, b_keys)
        else:
            mbarrier.expect(whole.index(0), first_desc.block_type.nbytes)
            copy_rows_in(first_desc, first_more, batch, head, residue, box_row, longer, whole.index(0), b_keys)
            mbarrier.wait(whole.index(0), count & 1)
            zero_rows(b_keys, a, b, c, d)
            mbarrier.expect(here_full, first_desc.block_type.nbytes)
    copy_rows_in(second_desc, second_more, batch, head, residue, box_row, longer, here_full, b_second.index(slot))


@gluon.jit
def stream_head(
    streamed_1, streamed_1_more, streamed_2, streamed_2_more, b_1, b_2, b_rows, b_tile, b_kept, full, empty, whole,
    p_lse, p_delta, p_padding, p_class, p_walk, p_whole, p_partial, p_tiles, heads, sum_tiles, blocks, n, rate, longer,
    tile_count, batch, query_head, head, block, o_row, held_rows, held_offset,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, BY_KEY: gl.constexpr,
):  # fmt: skip
    """Stream the tiles of an item in one query head, and return the updated tile count.

    A separate function, as the compiler duplicates the code of nested loops.
    """
    STRIDED: gl.constexpr = len(streamed_1.block_shape) == 5
    BM: gl.constexpr = streamed_1.block_shape[len(streamed_1.block_shape) - 2]
    SUB: gl.constexpr = BLOCK // BM
    if STRIDED:
        kind = gl.load(p_class + query_head * 3)
        offset = gl.load(p_class + query_head * 3 + 2)
        if BY_KEY:
            # Heads of a group may sample other keys.
            kind = gl.where(gl.load(p_class + query_head * 3 + 1) == held_offset, kind, -1)
    else:
        kind = gl.load(p_class + query_head)
    p_own = p_walk + (gl.maximum(kind, 0) * blocks + block) * 6
    whole_begin = gl.load(p_own)
    whole_steps = gl.where(kind >= 0, gl.load(p_own + 1) - whole_begin, 0) * SUB
    whole_base = gl.load(p_own + 2)
    partial_begin = gl.load(p_own + 3)
    partial_steps = gl.where(kind >= 0, gl.load(p_own + 4) - partial_begin, 0) * SUB
    partial_base = gl.load(p_own + 5)
    own_row = batch * heads + query_head
    o_rows = own_row.to(gl.int64) * n
    first_tile = own_row * sum_tiles
    for step in range(whole_steps):
        tile = whole_base + gl.load(p_whole + whole_begin + step // SUB)
        sub_tile = tile * SUB + step % SUB
        token = gl.load(p_tiles + 2 * tile) + offset + (step % SUB) * BM * rate if STRIDED else sub_tile * BM
        stream_tile(
            streamed_1, streamed_1_more, streamed_2, streamed_2_more, b_1, b_2, b_rows, b_tile, b_kept,
            full, empty, whole, p_lse, p_delta, p_padding, n, o_rows, token, BM, rate, longer,
            tile_count, batch, head, first_tile + sub_tile, -1, 0, 0, 0, 0, STAGES, BY_KEY,
        )  # fmt: skip
        tile_count += 1
    for step in range(partial_steps):
        p_entry = p_partial + (partial_begin + step // SUB) * 4
        o_col = (step % SUB) * BM
        tile = partial_base + gl.load(p_entry)
        sub_tile = tile * SUB + step % SUB
        if STRIDED:
            token, rows = first_and_count(p_tiles, tile, offset, rate)
            token += o_col * rate
            rows -= o_col
        else:
            token = sub_tile * BM
            rows = n - token
        mask = gl.load(p_entry + 1) * (BLOCK * BLOCK // 32) + o_row * (BLOCK // 32) + o_col // 32
        low = gl.load(p_entry + 2) - o_row + o_col
        high = gl.load(p_entry + 3) - o_row + o_col
        last_key = (held_rows if BY_KEY else rows) - 1
        stream_tile(
            streamed_1, streamed_1_more, streamed_2, streamed_2_more, b_1, b_2, b_rows, b_tile, b_kept,
            full, empty, whole, p_lse, p_delta, p_padding, n, o_rows, token, rows, rate, longer,
            tile_count, batch, head, first_tile + sub_tile, mask, low, high, last_key, 0, STAGES, BY_KEY,
        )  # fmt: skip
        tile_count += 1
    return tile_count


@gluon.jit
def stream_in_turn(
    streamed_1, streamed_1_more, streamed_2, streamed_2_more, b_1, b_2, b_rows, b_tile, full, empty,
    p_lse, p_delta, p_class, p_entries, p_tiles, heads, group, sum_tiles, n, rate, longer,
    tile_count, batch, held_head, first_entry, steps, o_row, held_rows, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Stream the tiles of an item in the order of its entries, with their turns; return the updated tile count."""
    STRIDED: gl.constexpr = len(streamed_1.block_shape) == 5
    BM: gl.constexpr = streamed_1.block_shape[len(streamed_1.block_shape) - 2]
    SUB: gl.constexpr = BLOCK // BM
    for step in range(steps):
        p_entry = p_entries + (first_entry + step // SUB) * 6
        o_col = (step % SUB) * BM
        tile = gl.load(p_entry)
        mask = gl.load(p_entry + 1)
        head = held_head * group + gl.load(p_entry + 4)
        sub_tile = tile * SUB + step % SUB
        if STRIDED:
            token, rows = first_and_count(p_tiles, tile, gl.load(p_class + head * 3 + 2), rate)
            token += o_col * rate
            rows -= o_col
        else:
            token = sub_tile * BM
            rows = n - token
        o_mask = gl.where(mask < 0, -1, mask * (BLOCK * BLOCK // 32) + o_row * (BLOCK // 32) + o_col // 32)
        low = gl.load(p_entry + 2) - o_row + o_col
        high = gl.load(p_entry + 3) - o_row + o_col
        own_row = batch * heads + head
        stream_tile(
            streamed_1, streamed_1_more, streamed_2, streamed_2_more, b_1, b_2, b_rows, b_tile, None,
            full, empty, None, p_lse, p_delta, None, n, own_row.to(gl.int64) * n, token, rows, rate, longer, tile_count,
            batch, head, own_row * sum_tiles + sub_tile, o_mask, low, high, held_rows - 1, gl.load(p_entry + 5), STAGES,
            True,
        )  # fmt: skip
        tile_count += 1
    return tile_count


@gluon.jit
def hold_keys(desc, more, batch, head, residue, row, longer, full, whole, buffer, slot, count, some, a, b, c, d):
    """Start copying the two halves of the keys of an item, or copy them and zero the rows of padded keys."""
    HALF_BYTES: gl.constexpr = desc.block_type.nbytes
    if some == 0:
        # One phase of this barrier per item, so that its parity follows from the count.
        mbarrier.arrive(whole.index(0), count=1)
        mbarrier.expect(full, 4 * HALF_BYTES)
        for half in gl.static_range(2):
            b_half = buffer.index(slot * 2 + half)
            copy_rows_in(desc, more, batch, head, residue, row + half * ROWS, longer, full, b_half)
    else:
        mbarrier.expect(whole.index(0), 2 * HALF_BYTES)
        for half in gl.static_range(2):
            b_half = buffer.index(slot * 2 + half)
            copy_rows_in(desc, more, batch, head, residue, row + half * ROWS, longer, whole.index(0), b_half)
        mbarrier.wait(whole.index(0), count & 1)
        zero_rows(buffer.index(slot * 2), a, b, a, b)
        zero_rows(buffer.index(slot * 2 + 1), c, d, c, d)
        mbarrier.expect(full, 2 * HALF_BYTES)


@gluon.jit
def load_backward_tiles(
    held_1, held_1_more, held_2, held_2_more, streamed_1, streamed_1_more, streamed_2, streamed_2_more,
    b_held_1, b_held_2, b_1, b_2, b_rows, b_item, b_tile, b_kept,
    full, empty, held_full, held_empty, whole,
    p_lse, p_delta, p_work, p_class, p_walk, p_whole, p_partial, p_tiles, p_padding, p_next, items, items_a_batch,
    heads, group, sum_tiles, blocks, n, n_keys, held_rate, held_longer, rate, longer,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, HELD_STAGES: gl.constexpr, BY_KEY: gl.constexpr, SPLIT: gl.constexpr,
    TURNS: gl.constexpr = False,
):  # fmt: skip
    """Producer warp: the two held tiles of an item, then the pairs of tiles that stream past them.

    BY_KEY holds K and V and streams Q and dO of every head of the group; otherwise Q and dO are held, and K and V
    stream. There are `n` queries and `n_keys` keys, None for equal. With SPLIT an item is a piece of a row, and the
    walk has a row for each block of pieces. With TURNS an item is claimed when it starts, the first one too, and has
    its own entries (`turns.in_turns`). Words of kept keys are passed in `b_kept`; `whole` is the barrier of keys whose
    padded rows are zeroed before use, or None.
    """
    n_held = n
    n_streamed = n
    if n_keys is not None:
        n_held = n_keys if BY_KEY else n
        n_streamed = n if BY_KEY else n_keys
    STRIDED: gl.constexpr = len(streamed_1.block_shape) == 5
    WORKERS: gl.constexpr = workers_of(BLOCK)
    BM: gl.constexpr = streamed_1.block_shape[len(streamed_1.block_shape) - 2]
    SUB: gl.constexpr = BLOCK // BM
    let_next_start()
    tile_count = 0
    item_count = 0
    item = claim_in_order(p_next, items) if TURNS else gl.program_id(0)
    while item < items:
        if not TURNS:
            claim = claim_item(p_next, True)
        batch = item // items_a_batch
        p_item = p_work + (item % items_a_batch) * ((6 if STRIDED else 4) + TURNS)
        held_head = gl.load(p_item)
        o_held = gl.load(p_item + 1)
        steps = gl.load(p_item + 2) * SUB
        stored = 0
        held_offset = 0
        if STRIDED:
            held_rows = gl.load(p_item + 3)
            block = gl.load(p_item + 4)
            held_offset = gl.load(p_item + 5)
            o_row = 0
        else:
            o_held *= WORKERS * ROWS
            held_rows = n_held - o_held
            o_row = o_held % BLOCK
            block = o_held // BLOCK
            if SPLIT:
                stored = gl.load(p_item + 3) * (WORKERS * ROWS)
                block = stored // BLOCK
        members = group if BY_KEY else 1
        if BY_KEY and p_padding is not None:
            a, b, c, d = kept_words(p_padding, batch, n_held, o_held, held_rate if STRIDED else 1, WORKERS * ROWS)
            some = gl.where((a & b & c & d) == -1, 0, 1)
            if not TURNS:
                none = (a | b | c | d) == 0
                steps = gl.where(none, 0, steps)
                members = gl.where(none, 0, group)
        residue, first_row = box_coordinates(held_1, o_held, held_rate)
        slot = item_count % HELD_STAGES
        mbarrier.wait(held_empty.index(slot), ((item_count // HELD_STAGES) & 1) ^ 1)
        post(b_item.index(slot), held_head, o_held, steps, batch, held_rows, stored)
        here_full = held_full.index(slot)
        if BY_KEY and p_padding is not None:
            post(b_kept.index(slot), a, b, c, d, some, 0)
        ZEROES: gl.constexpr = BY_KEY and whole is not None
        if ZEROES:
            hold_keys(
                held_1, held_1_more, batch, held_head, residue, first_row, held_longer, here_full, whole, b_held_1,
                slot, item_count, some, a, b, c, d,
            )  # fmt: skip
        else:
            mbarrier.expect(here_full, 2 * WORKERS * held_1.block_type.nbytes)
        for half in gl.static_range(WORKERS):
            row = first_row + half * ROWS
            b_1_half, b_2_half = b_held_1.index(slot * WORKERS + half), b_held_2.index(slot * WORKERS + half)
            if not ZEROES:
                copy_rows_in(held_1, held_1_more, batch, held_head, residue, row, held_longer, here_full, b_1_half)
            copy_rows_in(held_2, held_2_more, batch, held_head, residue, row, held_longer, here_full, b_2_half)
        if TURNS:
            tile_count = stream_in_turn(
                streamed_1, streamed_1_more, streamed_2, streamed_2_more, b_1, b_2, b_rows, b_tile, full, empty,
                p_lse, p_delta, p_class, p_partial, p_tiles, heads, group, sum_tiles, n_streamed, rate, longer,
                tile_count, batch, held_head, gl.load(p_item + (6 if STRIDED else 4)), steps, o_row, held_rows,
                BLOCK, STAGES,
            )  # fmt: skip
        else:
            for member in range(members):
                if BY_KEY:
                    query_head = held_head * group + member
                    head = query_head
                else:
                    query_head = held_head
                    head = held_head // group
                tile_count = stream_head(
                    streamed_1, streamed_1_more, streamed_2, streamed_2_more, b_1, b_2, b_rows, b_tile, b_kept, full,
                    empty, whole, p_lse, p_delta, None if BY_KEY else p_padding, p_class, p_walk, p_whole, p_partial,
                    p_tiles, heads, sum_tiles, blocks, n_streamed, rate, longer, tile_count, batch, query_head, head,
                    block, o_row, held_rows, held_offset, BLOCK, STAGES, BY_KEY,
                )  # fmt: skip
        item_count += 1
        item = claim_in_order(p_next, items) if TURNS else next_item(claim, p_next, item, items, True)
    if TURNS:
        slot = tile_count % STAGES
        mbarrier.wait(empty.index(slot), ((tile_count // STAGES) & 1) ^ 1)
        post(b_tile.index(slot), 0, -1, 0, 0, 0, -1)
        mbarrier.arrive(full.index(slot), count=1)
    # Launches must end in order, even if this one did not depend on the one before.
    wait_for_launch()
    slot = item_count % HELD_STAGES
    mbarrier.wait(held_empty.index(slot), ((item_count // HELD_STAGES) & 1) ^ 1)
    post(b_item.index(slot), 0, 0, 0, -1, 0, 0)
    mbarrier.arrive(held_full.index(slot), count=1)


@gluon.jit
def mask_weights(weights, note, p_bits, C: gl.constexpr, BLOCK: gl.constexpr, BY_KEY: gl.constexpr):
    """Weights [64 held, BM streamed], 0 where the element mask or the end of the sequence excludes the pair."""
    layout: gl.constexpr = weights.type.layout
    BM: gl.constexpr = weights.type.shape[1]
    low = read(note, TILE_LOW)
    high = read(note, TILE_HIGH)
    last_key = read(note, TILE_LAST)
    row = here(C * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout)))
    col = here(gl.arange(0, BM, gl.SliceLayout(0, layout)))
    if low <= high:
        first = gl.expand_dims(row - high, 1)
        last = gl.expand_dims(row - low, 1)
        column = gl.expand_dims(col, 0)
        weights = gl.where((column >= first) & (column <= last), weights, 0.0)
    else:
        p_word = p_bits + read(note, TILE_MASK) + row * (BLOCK // 32)
        word = gl.full([ROWS, BM], 0, gl.int32, layout)
        for w in gl.static_range(BM // 32):
            word = gl.where(gl.expand_dims((col // 32) == w, 0), gl.expand_dims(gl.load(p_word + w), 1), word)
        weights = gl.where(((word >> gl.expand_dims(col & 31, 0)) & 1) != 0, weights, 0.0)
    if BY_KEY:
        weights = gl.where(gl.expand_dims(row <= last_key, 1), weights, 0.0)
    else:
        weights = gl.where(gl.expand_dims(col <= last_key, 0), weights, 0.0)
    return weights


@gluon.jit
def piece_product(C: gl.constexpr, b_ds, b_k, o_item, parity, no_piece):
    """Issue the product of dS and K over all keys for the piece of dQ of warpgroup `C`."""
    D: gl.constexpr = b_k.shape[len(b_k.shape) - 1]
    token = no_piece
    for half in gl.static_range(2):
        if D == 128:
            left = b_ds.index(parity * 2 + half).permute((1, 0))
            right = b_k.index(o_item + half).reshape([ROWS, D]).slice(C * ROWS, ROWS, dim=1)
        else:
            left = b_ds.index(parity * 2 + half).slice(C * ROWS, ROWS, dim=1).permute((1, 0))
            right = b_k.index(o_item + half).reshape([ROWS, D])
        token = warpgroup_mma(left, right, token, use_acc=half == 1, is_async=True)
    return token


@gluon.jit
def hand_over(C: gl.constexpr, parity):
    """Signal the sibling warpgroup: dS of this parity is written, dS of the other parity has been read."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [EXCHANGE + C * 2 + parity], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def take_over(C: gl.constexpr, parity, needed):
    """If `needed`, wait until the sibling warpgroup hands over dS of this parity."""
    gl.inline_asm_elementwise(
        "{ .reg .pred yes; setp.ne.s32 yes, $2, 0; @yes bar.sync $1, 256; mov.b32 $0, 0; }", "=r,r,r",
        [EXCHANGE + (1 - C) * 2 + parity, needed], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def meet():
    """Synchronize both warpgroups; earlier writes to shared memory become visible to both."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.b32 $0, 0;", "=r,n", [MEETING], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def keep_turns(b_tile, full, empty, p_turns, STAGES: gl.constexpr):
    """Turn warp: let both warpgroups add to a tile of dQ once all earlier items have, and count the addition.

    The additions of the warpgroups precede the barrier ADDED, and the increment after it is a release at the scope of
    the GPU; the poll of the next item is an acquire and precedes the barrier TURN of its warpgroups. So its additions
    come after these in the order of each address. No asynchronous copy takes part.
    """
    count = 0
    mbarrier.wait(full.index(0), 0)
    turn = read(b_tile.index(0), TILE_TURN)
    while turn >= 0:
        slot = count % STAGES
        p_turn = p_turns + read(b_tile.index(slot), TILE_SUM)
        sync_warp()
        mbarrier.arrive(empty.index(slot), count=1)
        gl.inline_asm_elementwise(
            "{ .reg .pred early; .reg .b32 now; again: ld.acquire.gpu.global.b32 now, [$1]; "
            "setp.ne.s32 early, now, $2; @early bra again; mov.b32 $0, 0; }",
            "=r,l,r", [p_turn, turn], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        sync_warp()
        gl.inline_asm_elementwise(
            "bar.arrive $1, 160; bar.arrive $2, 160; mov.b32 $0, 0;", "=r,n,n", [TURN, TURN + 1], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        gl.inline_asm_elementwise(
            "bar.sync $1, 288; mov.b32 $0, 0;", "=r,n", [ADDED], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
            "@first red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }",
            "=r,l", [p_turn], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        count += 1
        slot = count % STAGES
        mbarrier.wait(full.index(slot), (count // STAGES) & 1)
        turn = read(b_tile.index(slot), TILE_TURN)


@gluon.jit
def sum_piece(p_sum, tile, piece, C: gl.constexpr, D: gl.constexpr, TURNS: gl.constexpr):
    """Add a piece of dQ to the accumulator; with TURNS when the turn warp allows it."""
    if TURNS:
        gl.inline_asm_elementwise(
            "bar.sync $1, 160; mov.b32 $0, 0;", "=r,n", [TURN + C], dtype=gl.int32, is_pure=False, pack=1
        )
    leave_piece(p_sum, tile, piece, C, D)
    if TURNS:
        gl.inline_asm_elementwise(
            "bar.arrive $1, 288; mov.b32 $0, 0;", "=r,n", [ADDED], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def gather_step(
    C: gl.constexpr, dk_token, dv, sum_tile, tile_count, step, kv_slot, no_scores, no_piece,
    b_q, b_do, b_k, b_v, b_ds, b_rows, b_tile, b_kept, full, empty, p_sum, p_bits, scale_log2,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, DQ: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Contribution of one tile of queries to dK and dV of warpgroup `C`, and the dQ piece of the preceding tile."""
    BM: gl.constexpr = b_q.shape[len(b_q.shape) - 2]
    D: gl.constexpr = b_q.shape[len(b_q.shape) - 1]
    dtype: gl.constexpr = b_q.dtype
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv.type.layout, k_width=2)
    queries: gl.constexpr = gl.SliceLayout(0, no_scores.type.layout)
    slot = tile_count % STAGES
    o_item = here(kv_slot * workers_of(BLOCK))
    k = b_k.index(o_item + C).reshape([ROWS, D])
    v = b_v.index(o_item + C).reshape([ROWS, D])
    q = b_q.index(slot).reshape([BM, D])
    do = b_do.index(slot).reshape([BM, D])
    note = b_tile.index(slot)
    mbarrier.wait(full.index(slot), (tile_count // STAGES) & 1)
    scores_token = warpgroup_mma(k, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    dp_token = warpgroup_mma(v, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    # dK of the previous step overlaps the start of this one, so its queries are free only now.
    scores, dk = warpgroup_mma_wait(1, deps=(scores_token, dk_token))
    mbarrier.arrive(empty.index((tile_count + STAGES - 1) % STAGES), count=1, pred=step > 0)
    lse = b_rows.index(slot).slice(0, BM).load(queries)
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(lse, 0))
    if read(note, TILE_MASK) >= 0:
        weights = mask_weights(weights, note, p_bits, C, BLOCK, True)
    dp = warpgroup_mma_wait(0, deps=(dp_token,))
    delta = b_rows.index(slot).slice(BM, BM).load(queries)
    ds = weights * (dp - gl.expand_dims(delta, 0))
    if DQ and b_kept is not None:
        ds = drop_rows(ds, b_kept.index(kv_slot), C)
    ds = ds.to(dtype)
    # Without the exchange, dK is the only reader of dS of the previous step, and has completed above.
    parity = tile_count % 2 if DQ else 0
    if DQ:
        # Afterwards the sibling has written dS of the previous step and read dS of the step before that.
        take_over(C, 1 - parity, (step > 0).to(gl.int32))
    b_ds.index(parity * 2 + C).store(ds)
    fence_async_shared()
    dv_token = warpgroup_mma(gl.convert_layout(weights.to(dtype), operand), do, dv, is_async=True)
    if DQ:
        # Product of the previous step; in the first step it reads uninitialised memory and is not added.
        piece_token = piece_product(C, b_ds, b_k, o_item, 1 - parity, no_piece)
    # From shared memory: a register operand would occupy registers that the next scores need.
    dk_token = warpgroup_mma(b_ds.index(parity * 2 + C), q, dk, is_async=True)
    if DQ:
        dv, piece = warpgroup_mma_wait(1, deps=(dv_token, piece_token))
        hand_over(C, parity)
        if step > 0:
            sum_piece(p_sum, sum_tile, piece, C, D, TURNS)
        sum_tile = read(note, TILE_SUM)
    else:
        dv = warpgroup_mma_wait(1, deps=(dv_token,))
    return dk_token, dv, sum_tile, tile_count + 1


@gluon.jit
def gather_keys(
    C: gl.constexpr, dk_desc, dk_more, dv_desc, dv_more,
    b_q, b_do, b_k, b_v, b_ds, b_rows, b_item, b_tile, b_kept, full, empty, kv_full, kv_empty,
    p_dk, p_dv, p_sum, p_bits, k_rate, k_longer, scale, scale_log2,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, KV_STAGES: gl.constexpr, DQ: gl.constexpr, SPLIT: gl.constexpr,
    TURNS: gl.constexpr = False,
):  # fmt: skip
    """Warpgroup `C`: dK and dV of its 64 keys of every item of this program, added to `p_dk` and `p_dv` if given."""
    WORKERS: gl.constexpr = workers_of(BLOCK)
    BM: gl.constexpr = b_q.shape[len(b_q.shape) - 2]
    D: gl.constexpr = b_q.shape[len(b_q.shape) - 1]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    piece_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    no_scores = gl.full([ROWS, BM], 0.0, gl.float32, scores_layout)
    no_piece = gl.full([ROWS, ROWS], 0.0, gl.float32, piece_layout)

    tile_count = 0
    item_count = 0
    mbarrier.wait(kv_full.index(0), 0)
    more = read(b_item.index(0), ITEM_BATCH) >= 0
    while more:
        kv_slot = item_count % KV_STAGES
        if KV_STAGES > 1:
            # The gradients of the previous item are stored through its K and V buffers, which are released only now.
            release(kv_empty, item_count - 1)
        item = b_item.index(kv_slot)
        steps = read(item, ITEM_STEPS)
        dk_token = warpgroup_mma_init(gl.full([ROWS, D], 0.0, gl.float32, acc_layout))
        dv = gl.full([ROWS, D], 0.0, gl.float32, acc_layout)
        sum_tile = steps * 0
        for step in range(steps):
            dk_token, dv, sum_tile, tile_count = gather_step(
                C, dk_token, dv, sum_tile, tile_count, step, kv_slot, no_scores, no_piece,
                b_q, b_do, b_k, b_v, b_ds, b_rows, b_tile, b_kept, full, empty, p_sum, p_bits, scale_log2, BLOCK,
                STAGES, DQ, TURNS,
            )  # fmt: skip
        dk = warpgroup_mma_wait(0, deps=(dk_token,))
        if DQ:
            parity = (tile_count + 1) % 2
            take_over(C, parity, (steps > 0).to(gl.int32))
            piece_token = piece_product(C, b_ds, b_k, here(kv_slot * 2), parity, no_piece)
            piece = warpgroup_mma_wait(0, deps=(piece_token,))
            if steps > 0:
                sum_piece(p_sum, sum_tile, piece, C, D, TURNS)
        mbarrier.arrive(empty.index((tile_count + STAGES - 1) % STAGES), count=1, pred=steps > 0)

        batch = read(item, ITEM_BATCH)
        head = read(item, ITEM_HEAD)
        o_key = read(item, ITEM_STORED if SPLIT else ITEM_ROW)
        rows = read(item, ITEM_ROWS)
        if b_kept is not None:
            dv = drop_rows(dv, b_kept.index(kv_slot), C)
            dk = drop_rows(dk, b_kept.index(kv_slot), C)
        b_dv = b_v.index(kv_slot * WORKERS + C)
        b_dk = b_k.index(kv_slot * WORKERS + C)
        if p_dv is not None:
            dv = joined_rows(dv, p_dv, dv_desc, batch, head, o_key, rows, b_dv, C)
        put_rows(dv, dv_desc, dv_more, batch, head, o_key, rows, k_rate, k_longer, b_dv, C)
        if WORKERS == 2:
            # The sibling also reads these rows of K; once it is done, their buffer may hold dK.
            meet()
        dk *= scale
        if p_dk is not None:
            dk = joined_rows(dk, p_dk, dk_desc, batch, head, o_key, rows, b_dk, C)
        put_rows(dk, dk_desc, dk_more, batch, head, o_key, rows, k_rate, k_longer, b_dk, C)
        if KV_STAGES == 1:
            release(kv_empty, item_count)
        item_count += 1
        next_slot = item_count % KV_STAGES
        mbarrier.wait(kv_full.index(next_slot), (item_count // KV_STAGES) & 1)
        more = read(b_item.index(next_slot), ITEM_BATCH) >= 0
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "items", "items_a_batch", "heads", "group", "sum_tiles", "key_blocks", "n", "n_keys", "q_rate", "q_longer",
        "k_rate", "k_longer", "scale", "scale_log2",
    ],
    do_not_specialize_on_alignment=[
        "p_lse", "p_turns", "p_work", "p_class", "p_walk", "p_whole", "p_partial", "p_tiles", "p_bits", "p_padding",
        "p_next",
    ],
)  # fmt: skip
def attention_dkv_bwd_kernel(
    q_desc, q_more, do_desc, do_more, k_desc, k_more, v_desc, v_more, dk_desc, dk_more, dv_desc, dv_more,
    p_lse, p_delta, p_sum, p_turns, p_work, p_class, p_walk, p_whole, p_partial, p_tiles, p_bits, p_padding, p_next,
    items, items_a_batch, heads, group, sum_tiles, key_blocks, n, n_keys, q_rate, q_longer, k_rate, k_longer, scale,
    scale_log2,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, KV_STAGES: gl.constexpr, DQ: gl.constexpr, SPLIT: gl.constexpr,
    WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV of every item, claimed by programs dynamically; with DQ also the unscaled accumulator of dQ.

    `n` is the number of queries, `n_keys` the number of keys, or None if both are equal.
    """
    WORKERS: gl.constexpr = workers_of(BLOCK)
    BM: gl.constexpr = q_desc.block_shape[len(q_desc.block_shape) - 2]
    dtype: gl.constexpr = q_desc.dtype
    note: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    exchange: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BM], dtype)
    b_q = gl.allocate_shared_memory(dtype, ring(STAGES, q_desc), q_desc.layout)
    b_do = gl.allocate_shared_memory(dtype, ring(STAGES, do_desc), do_desc.layout)
    b_k = gl.allocate_shared_memory(dtype, ring(WORKERS * KV_STAGES, k_desc), k_desc.layout)
    b_v = gl.allocate_shared_memory(dtype, ring(WORKERS * KV_STAGES, v_desc), v_desc.layout)
    b_ds = gl.allocate_shared_memory(dtype, [2 * WORKERS if DQ else WORKERS, ROWS, BM], exchange)
    b_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BM], note)
    b_item = gl.allocate_shared_memory(gl.int32, [KV_STAGES, 8], note)
    b_tile = gl.allocate_shared_memory(gl.int32, [STAGES, 8], note)
    TURNS: gl.constexpr = p_turns is not None
    full, empty = barrier_pairs(STAGES, 3 if TURNS else WORKERS)
    kv_full, kv_empty = barrier_pairs(KV_STAGES, WORKERS)
    if p_padding is None:
        b_kept: gl.constexpr = None
    else:
        b_kept = gl.allocate_shared_memory(gl.int32, [KV_STAGES, 8], note)
    if DQ and p_padding is not None:
        whole = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(whole.index(0), count=1)
    else:
        whole: gl.constexpr = None
    # A list of partitions that is put together would lose the constants among their arguments.
    if TURNS:
        gl.warp_specialize(
            [
                (gather_keys, (
                    0, dk_desc, dk_more, dv_desc, dv_more,
                    b_q, b_do, b_k, b_v, b_ds, b_rows, b_item, b_tile, b_kept, full, empty, kv_full, kv_empty,
                    None, None, p_sum, p_bits, k_rate, k_longer, scale, scale_log2, BLOCK, STAGES, KV_STAGES, DQ, SPLIT,
                    TURNS,
                )),
                (gather_keys, (
                    1, dk_desc, dk_more, dv_desc, dv_more,
                    b_q, b_do, b_k, b_v, b_ds, b_rows, b_item, b_tile, b_kept, full, empty, kv_full, kv_empty,
                    None, None, p_sum, p_bits, k_rate, k_longer, scale, scale_log2, BLOCK, STAGES, KV_STAGES, DQ, SPLIT,
                    TURNS,
                )),
                (load_backward_tiles, (
                    k_desc, k_more, v_desc, v_more, q_desc, q_more, do_desc, do_more,
                    b_k, b_v, b_q, b_do, b_rows, b_item, b_tile, b_kept, full, empty, kv_full, kv_empty, whole,
                    p_lse, p_delta, p_work, p_class, p_walk, p_whole, p_partial, p_tiles, p_padding, p_next, items,
                    items_a_batch, heads, group, sum_tiles, key_blocks, n, n_keys, k_rate, k_longer, q_rate, q_longer,
                    BLOCK, STAGES, KV_STAGES, True, SPLIT, TURNS,
                )),
                (keep_turns, (b_tile, full, empty, p_turns, STAGES)),
            ],
            [4, 1, 1],
            [WORKER_REGISTERS, 32, 32],
        )  # fmt: skip
    elif WORKERS == 1:
        gl.warp_specialize(
            [
                (gather_keys, (
                    0, dk_desc, dk_more, dv_desc, dv_more,
                    b_q, b_do, b_k, b_v, b_ds, b_rows, b_item, b_tile, b_kept, full, empty, kv_full, kv_empty,
                    None, None, p_sum, p_bits, k_rate, k_longer, scale, scale_log2, BLOCK, STAGES, KV_STAGES, DQ, SPLIT,
                )),
                (load_backward_tiles, (
                    k_desc, k_more, v_desc, v_more, q_desc, q_more, do_desc, do_more,
                    b_k, b_v, b_q, b_do, b_rows, b_item, b_tile, b_kept, full, empty, kv_full, kv_empty, whole,
                    p_lse, p_delta, p_work, p_class, p_walk, p_whole, p_partial, p_tiles, p_padding, p_next, items,
                    items_a_batch, heads, group, sum_tiles, key_blocks, n, n_keys, k_rate, k_longer, q_rate, q_longer,
                    BLOCK, STAGES, KV_STAGES, True, SPLIT,
                )),
            ],
            [1],
            [32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (gather_keys, (
                    0, dk_desc, dk_more, dv_desc, dv_more,
                    b_q, b_do, b_k, b_v, b_ds, b_rows, b_item, b_tile, b_kept, full, empty, kv_full, kv_empty,
                    None, None, p_sum, p_bits, k_rate, k_longer, scale, scale_log2, BLOCK, STAGES, KV_STAGES, DQ, SPLIT,
                )),
                (gather_keys, (
                    1, dk_desc, dk_more, dv_desc, dv_more,
                    b_q, b_do, b_k, b_v, b_ds, b_rows, b_item, b_tile, b_kept, full, empty, kv_full, kv_empty,
                    None, None, p_sum, p_bits, k_rate, k_longer, scale, scale_log2, BLOCK, STAGES, KV_STAGES, DQ, SPLIT,
                )),
                (load_backward_tiles, (
                    k_desc, k_more, v_desc, v_more, q_desc, q_more, do_desc, do_more,
                    b_k, b_v, b_q, b_do, b_rows, b_item, b_tile, b_kept, full, empty, kv_full, kv_empty, whole,
                    p_lse, p_delta, p_work, p_class, p_walk, p_whole, p_partial, p_tiles, p_padding, p_next, items,
                    items_a_batch, heads, group, sum_tiles, key_blocks, n, n_keys, k_rate, k_longer, q_rate, q_longer,
                    BLOCK, STAGES, KV_STAGES, True, SPLIT,
                )),
            ],
            [4, 1],
            [WORKER_REGISTERS, 32],
        )  # fmt: skip
