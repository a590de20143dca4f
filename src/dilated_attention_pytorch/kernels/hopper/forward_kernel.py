"""Forward kernel for Hopper in Gluon: a producer warp loads tiles by TMA, two consumer warpgroups run wgmma.

A work item is 128 query rows of one head; each warpgroup owns 64 of them. The producer runs ahead through the key
tiles of the item and into the next item, so the ring of buffers never drains at the end of a row. In each turn a
warpgroup issues `Q K^T` of the next tile and `P V` of the current one, then computes the softmax while its sibling
uses the tensor cores; at the end of a row the next tile is the first of the next item.

With blocks of 64 an item is one block, and a program has one consumer warpgroup (`primitives.workers_of`). Two programs
share a multiprocessor, so that one multiplies while the other computes its softmax, without turns: their lists differ.

The producer passes the entries of the plan to the warpgroups through shared memory beside each tile, so the
warpgroups load nothing themselves except the words of an element mask. With `p_padding` it also passes a bit per key,
and zeroes the values of padded keys in shared memory; a tile without padded keys differs in one branch.

Code generation constrains the structure. The assembler serializes products that are in flight across the end of a
loop, and Triton 3.6 made two loops over the tiles of a row share a register that only the first one set; there is
therefore a single loop.

A strided part of a plan is read through descriptors of five dimensions (`primitives.copy_rows_in`) and merged with the
output and LSE of earlier parts in memory.

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
    warpgroup_mma_wait,
)

from .primitives import (
    OUTSIDE,
    ROWS,
    barrier_pairs,
    box_coordinates,
    claim_item,
    copy_out,
    copy_rows_in,
    drop_columns,
    first_and_count,
    joined,
    kept_words,
    let_next_start,
    next_item,
    post,
    read,
    ring,
    row_pointers,
    wait_for_launch,
    workers_of,
    zero_rows,
)

WORK_WIDTH = gl.constexpr(8)
"""int32 a work item: head, query tile of an item's rows, full begin, count, base, partial begin, count, base."""
PIECE_WORK_WIDTH = gl.constexpr(9)
"""int32 per piece of a long row: as above, then the index of its output tile, which has the rows of an item."""
STRIDED_WORK_WIDTH = gl.constexpr(10)
"""int32 per strided item: as above with the first token instead of the tile, then existing rows and key offset."""
LN2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)

ITEM_HEAD, ITEM_ROW, ITEM_FULL, ITEM_PARTIAL, ITEM_BATCH, ITEM_ROWS = (gl.constexpr(i) for i in range(6))
"""Fields of an item's mailbox; ITEM_BATCH is -1 after the last item. ITEM_ROWS is the number of existing rows of a
strided item, or the destination of a piece of a long row."""
TILE_MASK, TILE_LAST = (gl.constexpr(i) for i in range(2))
"""Fields of a partial tile's mailbox: offset of its mask, and its last key relative to the first column."""
TURN = gl.constexpr(8)
"""First of two hardware barriers for the turns; the compiler uses low numbers itself."""


@gluon.jit
def load_tile(desc, more, batch, head, residue, row, longer, count, full, buffer, STAGES: gl.constexpr):
    """Start copying a tile into its slot of the ring, which must be free."""
    slot = count % STAGES
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    copy_rows_in(desc, more, batch, head, residue, row, longer, full.index(slot), buffer.index(slot))


@gluon.jit
def wait_until_used(used, tile):
    """Wait until the scores of a tile, and the weighted values of the tile before it, are computed."""
    STAGES: gl.constexpr = used.shape[0]
    mbarrier.wait(used.index(tile % STAGES), (tile // STAGES) & 1, pred=tile >= 0)


@gluon.jit
def load_keys(
    k_desc, k_more, v_desc, v_more, b_k, b_v, b_tile, b_kept, k_full, v_full, used, whole, p_padding,
    batch, head, n, token, keys, rate, longer, count, mask, o_col, BLOCK: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):  # fmt: skip
    """Start copying a tile of keys and values from a token on; column `o_col` of `mask`, or None, is its first key."""
    BN: gl.constexpr = k_desc.block_shape[len(k_desc.block_shape) - 2]
    residue, row = box_coordinates(k_desc, token, rate)
    if p_padding is not None:
        a, b, c, d = kept_words(p_padding, batch, n, token, rate if len(k_desc.block_shape) == 5 else 1, BN)
        some = gl.where((a & b & c & d) == -1, 0, 1)
        none = (a | b | c | d) == 0
        row = gl.where(none, OUTSIDE, row)
    k_slot = count % K_STAGES
    wait_until_used(used, count - K_STAGES)
    if mask is not None:
        post(b_tile.index(k_slot), mask * BLOCK * (BLOCK // 32) + o_col // 32, keys - 1, 0, 0, 0, 0)
    if p_padding is not None:
        post(b_kept.index(k_slot), a, b, c, d, some, 0)
    load_tile(k_desc, k_more, batch, head, residue, row, longer, count, k_full, b_k, K_STAGES)
    wait_until_used(used, count - V_STAGES + 1)
    if p_padding is None:
        load_tile(v_desc, v_more, batch, head, residue, row, longer, count, v_full, b_v, V_STAGES)
    elif (some == 0) | none:
        # One phase of this barrier per tile, so that its parity follows from the count.
        mbarrier.arrive(whole.index(0), count=1)
        load_tile(v_desc, v_more, batch, head, residue, row, longer, count, v_full, b_v, V_STAGES)
    else:
        b_values = b_v.index(count % V_STAGES)
        mbarrier.expect(whole.index(0), v_desc.block_type.nbytes)
        copy_rows_in(v_desc, v_more, batch, head, residue, row, longer, whole.index(0), b_values)
        mbarrier.wait(whole.index(0), count & 1)
        zero_rows(b_values, a, b, c, d)
        mbarrier.arrive(v_full.index(count % V_STAGES), count=1)


@gluon.jit
def load_tiles(
    q_desc, q_more, k_desc, k_more, v_desc, v_more, o_desc, o_more, b_q, b_k, b_v, b_old, b_item, b_tile, b_kept,
    q_full, q_empty, k_full, v_full, old_full, old_empty, used, whole, p_work, p_full, p_partial, p_tiles, p_padding,
    p_next, items, items_a_batch, group, n, q_rate, q_longer, k_rate, k_longer, BLOCK: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, Q_STAGES: gl.constexpr, DYNAMIC: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Producer warp: Q of an item, then K and V of each of its tiles, as buffers become free."""
    STRIDED: gl.constexpr = len(q_desc.block_shape) == 5
    BN: gl.constexpr = k_desc.block_shape[len(k_desc.block_shape) - 2]
    SUB: gl.constexpr = BLOCK // BN
    WORKERS: gl.constexpr = workers_of(BLOCK)
    WIDTH: gl.constexpr = STRIDED_WORK_WIDTH if STRIDED else PIECE_WORK_WIDTH if SPLIT else WORK_WIDTH
    let_next_start()
    tile_count = 0
    item_count = 0
    item = gl.program_id(0)
    while item < items:
        claim = claim_item(p_next, DYNAMIC)
        batch = item // items_a_batch
        p_item = p_work + (item % items_a_batch) * WIDTH
        head = gl.load(p_item)
        o_query = gl.load(p_item + 1)
        full_begin = gl.load(p_item + 2)
        full_steps = gl.load(p_item + 3) * SUB
        full_base = gl.load(p_item + 4)
        partial_begin = gl.load(p_item + 5)
        partial_steps = gl.load(p_item + 6) * SUB
        partial_base = gl.load(p_item + 7)
        rows = WORKERS * ROWS
        if STRIDED:
            rows = gl.load(p_item + 8)
            k_offset = gl.load(p_item + 9)
        else:
            o_query *= WORKERS * ROWS
            if SPLIT:
                rows = gl.load(p_item + 8) * (WORKERS * ROWS)
        key_head = head // group
        # Rows of an item are adjacent in the box of a descriptor.
        q_residue, q_row = box_coordinates(q_desc, o_query, q_rate)
        slot = item_count % Q_STAGES
        mbarrier.wait(q_empty.index(slot), ((item_count // Q_STAGES) & 1) ^ 1)
        post(b_item.index(slot), head, o_query, full_steps, partial_steps, batch, rows)
        mbarrier.expect(q_full.index(slot), WORKERS * q_desc.block_type.nbytes)
        for half in gl.static_range(WORKERS):
            row, b_half = q_row + half * ROWS, b_q.index(slot * WORKERS + half)
            copy_rows_in(q_desc, q_more, batch, head, q_residue, row, q_longer, q_full.index(slot), b_half)
        for step in range(full_steps):
            tile = full_base + gl.load(p_full + full_begin + step // SUB)
            o_key = gl.load(p_tiles + 2 * tile) + k_offset if STRIDED else tile * BLOCK + (step % SUB) * BN
            load_keys(
                k_desc, k_more, v_desc, v_more, b_k, b_v, b_tile, b_kept, k_full, v_full, used, whole, p_padding,
                batch, key_head, n, o_key, BN, k_rate, k_longer, tile_count, None, 0, BLOCK, K_STAGES, V_STAGES,
            )  # fmt: skip
            tile_count += 1
        for step in range(partial_steps):
            p_entry = p_partial + (partial_begin + step // SUB) * 4
            o_col = (step % SUB) * BN
            tile = partial_base + gl.load(p_entry)
            if STRIDED:
                o_key, keys = first_and_count(p_tiles, tile, k_offset, k_rate)
            else:
                o_key = tile * BLOCK + o_col
                keys = n - o_key
            mask = gl.load(p_entry + 1)
            load_keys(
                k_desc, k_more, v_desc, v_more, b_k, b_v, b_tile, b_kept, k_full, v_full, used, whole, p_padding,
                batch, key_head, n, o_key, keys, k_rate, k_longer, tile_count, mask, o_col, BLOCK, K_STAGES, V_STAGES,
            )  # fmt: skip
            tile_count += 1
        if STRIDED:
            # Output rows of earlier parts. Requested last, so that no tile waits until the rows of the previous item
            # have been read; they still arrive several tiles before they are needed.
            wait_for_launch()
            mbarrier.wait(old_empty.index(0), (item_count & 1) ^ 1)
            mbarrier.expect(old_full.index(0), WORKERS * q_desc.block_type.nbytes)
            for half in gl.static_range(WORKERS):
                row = q_row + half * ROWS
                copy_rows_in(
                    o_desc, o_more, batch, head, q_residue, row, q_longer, old_full.index(0), b_old.index(half)
                )
        item_count += 1
        item = next_item(claim, p_next, item, items, DYNAMIC)
    slot = item_count % Q_STAGES
    mbarrier.wait(q_empty.index(slot), ((item_count // Q_STAGES) & 1) ^ 1)
    post(b_item.index(slot), 0, 0, 0, 0, -1, 0)
    mbarrier.arrive(q_full.index(slot), count=1)


# A score, or -inf if its bit is 0. In PTX, as the compiler would pack such comparisons into words of bits.
MASK_ONE = gl.constexpr("""{
    .reg .pred allowed;
    .reg .b32 bit;
    and.b32 bit, $2, $3;
    setp.ne.b32 allowed, bit, 0;
    selp.f32 $0, $1, 0fFF800000, allowed;
}""")


@gluon.jit
def mask_scores(scores, note, p_bits, o_row, BLOCK: gl.constexpr):
    """Scores [64, BN], -inf where the element mask or the end of the sequence excludes the pair."""
    layout: gl.constexpr = scores.type.layout
    BN: gl.constexpr = scores.type.shape[1]
    row = o_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    col = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(0, layout)), 0)
    p_row = p_bits + read(note, TILE_MASK) + row * (BLOCK // 32)
    last_key = read(note, TILE_LAST)
    word = gl.full([ROWS, BN], 0, gl.int32, layout)
    for w in gl.static_range(BN // 32):
        valid_bits = gl.minimum(gl.maximum(last_key + 1 - 32 * w, 0), 32)
        here = gl.load(p_row + w) & ((1 << valid_bits.to(gl.int64)) - 1).to(gl.int32)
        word = gl.where((col >> 5) == w, gl.expand_dims(here, 1), word)
    # Within a word, a thread's columns differ in bits 0, 3 and 4: one shift for all, then a test of a constant bit.
    word = word >> (col & 6)
    bit = gl.full([ROWS, BN], 1, gl.int32, layout) << (col & 25)
    return gl.inline_asm_elementwise(MASK_ONE, "=f,f,r,r", [scores, word, bit], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sum_in_thread(weights):
    """Sums [64, 4] of a [64, BN] tile over the columns of one thread; the four are added at the end of the row."""
    BN: gl.constexpr = weights.type.shape[1]
    return gl.sum(gl.sum(weights.reshape([ROWS, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax_step(scores, row_max, row_sum, scale):
    """Weights [64, BN], factor of the earlier sums [64], new maximum [64] (log2 units) and sums [64, 4]."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    # A row without a key so far keeps -inf; its exponents must be -inf, not NaN.
    shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    weights = gl.exp2(scores * scale - gl.expand_dims(shift, 1))
    factor = gl.exp2(row_max - shift)
    spread = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout)), 1)
    return weights, factor, new_max, row_sum * spread + sum_in_thread(weights)


@gluon.jit
def take_turn(C: gl.constexpr, PING_PONG: gl.constexpr):
    """Wait until the sibling has issued its products."""
    if PING_PONG:
        gl.inline_asm_elementwise(
            "bar.sync $1, 256; mov.b32 $0, 0;", "=r,n", [TURN + C], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def pass_turn(C: gl.constexpr, PING_PONG: gl.constexpr):
    """Let the sibling issue its products."""
    if PING_PONG:
        gl.inline_asm_elementwise(
            "bar.arrive $1, 256; mov.b32 $0, 0;", "=r,n", [TURN + 1 - C], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def as_operand(weights, acc, b_v):
    """Weights [64, BN] as the left operand of the product with a tile of `b_v` into `acc`.

    Converted in the turn that uses it: 16-bit values that cross the end of a loop are unpacked and packed again.
    """
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    return gl.convert_layout(weights.to(b_v.dtype), layout)


@gluon.jit
def rescale(acc, factor):
    """Rows of `acc` times their factors."""
    return acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout)), 1)


# A loop that is never entered, as a scheduling barrier: the assembler moves neither the softmax nor a wait across it.
HOLD = gl.constexpr("""{
    .reg .pred never;
again:
    setp.lt.s32 never, $1, 0;
    @!never bra done;
    nanosleep.u32 1;
    bra again;
done:
    mov.b32 $0, 0;
}""")


@gluon.jit
def attend_tile(
    acc, weights, factor, row_max, row_sum, tile_count, partial, q, b_k, b_v, b_tile, b_kept, k_full, v_full, used,
    p_bits, o_row, scale, scores_layout: gl.constexpr, C: gl.constexpr, BLOCK: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """One turn inside a row: scores of tile `tile_count + 1`, weighted values of tile `tile_count`."""
    BN: gl.constexpr = b_k.shape[len(b_k.shape) - 2]
    D: gl.constexpr = b_k.shape[len(b_k.shape) - 1]
    # Whether `acc` is rescaled in this turn: hidden behind the scores, at the cost of longer live registers.
    LATE: gl.constexpr = D == 64
    zero = gl.full([ROWS, BN], 0.0, gl.float32, scores_layout)
    ahead = tile_count + 1
    k_slot = ahead % K_STAGES
    v_slot = tile_count % V_STAGES
    mbarrier.wait(k_full.index(k_slot), (ahead // K_STAGES) & 1)
    take_turn(C, PING_PONG)
    k = b_k.index(k_slot).reshape([BN, D]).permute((1, 0))
    scores_token = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    operand = as_operand(weights, acc, b_v)
    if LATE:
        acc = rescale(acc, factor)
    mbarrier.wait(v_full.index(v_slot), (tile_count // V_STAGES) & 1)
    acc_token = warpgroup_mma(operand, b_v.index(v_slot).reshape([BN, D]), acc, is_async=True)
    pass_turn(C, PING_PONG)
    scores = warpgroup_mma_wait(1, deps=(scores_token,))
    if partial:
        scores = mask_scores(scores, b_tile.index(k_slot), p_bits, o_row, BLOCK)
    if b_kept is not None:
        scores = drop_columns(scores, b_kept.index(k_slot), -float("inf"))
    weights, factor, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale)
    gl.inline_asm_elementwise(HOLD, "=r,r", [tile_count], dtype=gl.int32, is_pure=False, pack=1)
    acc = warpgroup_mma_wait(0, deps=(acc_token,))
    mbarrier.arrive(used.index(ahead % K_STAGES), count=1)
    if not LATE:
        acc = rescale(acc, factor)
    return acc, weights, factor, row_max, row_sum, ahead


@gluon.jit
def attend_rows(
    C: gl.constexpr, o_desc, p_out, p_lse, p_sink, b_q, b_k, b_v, b_old, b_item, b_tile, b_kept,
    q_full, q_empty, k_full, v_full, old_full, old_empty, used, p_bits,
    heads, n, o_batch, o_head, o_row_stride, o_columns, q_rate, scale, BLOCK: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, Q_STAGES: gl.constexpr, PING_PONG: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Warpgroup `C`: its 64 rows of every item of this program."""
    STRIDED: gl.constexpr = len(b_k.shape) == 6
    WORKERS: gl.constexpr = workers_of(BLOCK)
    BN: gl.constexpr = b_k.shape[len(b_k.shape) - 2]
    D: gl.constexpr = b_k.shape[len(b_k.shape) - 1]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    score_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    zero = gl.full([ROWS, BN], 0.0, gl.float32, scores_layout)

    tile_count = 0
    item_count = 0
    if C == 1:
        pass_turn(C, PING_PONG)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    q = b_q.index(C).reshape([ROWS, D])
    scores_token = warpgroup_mma(q, b_k.index(0).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    more = True
    while more:
        q_slot = item_count % Q_STAGES
        item = b_item.index(q_slot)
        q_rows = b_q.index(q_slot * WORKERS + C).reshape([ROWS, D])
        if WORKERS == 1:
            # Products of 64 keys would read the queries as often as the keys, all that shared memory can deliver.
            q_rows = q_rows.load(gl.DotOperandLayout(operand_index=0, parent=scores_layout, k_width=2))
        o_row = C * ROWS if STRIDED else (read(item, ITEM_ROW) + C * ROWS) % BLOCK
        full_steps = read(item, ITEM_FULL)

        scores = warpgroup_mma_wait(0, deps=(scores_token,))
        if full_steps == 0:
            scores = mask_scores(scores, b_tile.index(tile_count % K_STAGES), p_bits, o_row, BLOCK)
        if b_kept is not None:
            scores = drop_columns(scores, b_kept.index(tile_count % K_STAGES), -float("inf"))
        mbarrier.arrive(used.index(tile_count % K_STAGES), count=1)
        row_max = gl.full([ROWS], -float("inf"), gl.float32, score_rows)
        row_sum = sum_in_thread(zero)
        weights, factor, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale)
        acc = gl.full([ROWS, D], 0.0, gl.float32, acc_layout)
        # The output of the previous item is stored through its Q buffer, which is released only now.
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index((item_count + Q_STAGES - 1) % Q_STAGES), count=1, pred=item_count > 0)

        for step in range(1, full_steps + read(item, ITEM_PARTIAL)):
            acc, weights, factor, row_max, row_sum, tile_count = attend_tile(
                acc, weights, factor, row_max, row_sum, tile_count, step >= full_steps, q_rows,
                b_k, b_v, b_tile, b_kept, k_full, v_full, used, p_bits, o_row, scale,
                scores_layout, C, BLOCK, K_STAGES, V_STAGES, PING_PONG,
            )  # fmt: skip

        batch = read(item, ITEM_BATCH)
        head = read(item, ITEM_HEAD)
        stored_rows = o_desc.shape[2] if SPLIT else n
        p_head = p_lse + (batch * heads + head).to(gl.int64) * stored_rows
        if STRIDED:
            # Loaded before the last products, which hide its latency.
            wait_for_launch()
            row = C * ROWS + gl.arange(0, ROWS, score_rows)
            p_row = p_head + read(item, ITEM_ROW) + row * q_rate
            old = gl.load(p_row, mask=row < read(item, ITEM_ROWS), other=-float("inf"))
        # The last values of this row and the first scores of the next item share a turn. After the last item the
        # scores are computed from stale buffers and never read.
        operand = as_operand(weights, acc, b_v)
        if D == 64:
            acc = rescale(acc, factor)
        v_slot = tile_count % V_STAGES
        mbarrier.wait(v_full.index(v_slot), (tile_count // V_STAGES) & 1)
        take_turn(C, PING_PONG)
        acc_token = warpgroup_mma(operand, b_v.index(v_slot).reshape([BN, D]), acc, is_async=True)
        tile_count += 1
        item_count += 1
        next_slot = item_count % Q_STAGES
        k_slot = tile_count % K_STAGES
        mbarrier.wait(q_full.index(next_slot), (item_count // Q_STAGES) & 1)
        more = read(b_item.index(next_slot), ITEM_BATCH) >= 0
        mbarrier.wait(k_full.index(k_slot), (tile_count // K_STAGES) & 1, pred=more)
        k = b_k.index(k_slot).reshape([BN, D]).permute((1, 0))
        scores_token = warpgroup_mma(
            b_q.index(next_slot * WORKERS + C).reshape([ROWS, D]), k, zero, use_acc=False, is_async=True
        )
        pass_turn(C, PING_PONG)
        b_o = b_q.index(q_slot * WORKERS + C)
        if STRIDED:
            first = read(item, ITEM_ROW)
            rows = read(item, ITEM_ROWS)
            acc = warpgroup_mma_wait(1, deps=(acc_token,))
            total = gl.convert_layout(gl.sum(row_sum, 1), score_rows)
            mbarrier.wait(old_full.index(0), (item_count - 1) & 1)
            new_factor, old_factor, both = joined(row_max, total, old * LOG2_E)
            b_before = b_old.index(C).reshape([ROWS, D])
            out = rescale(acc, new_factor) + rescale(b_before.load(acc_layout).to(gl.float32), old_factor)
            b_rows = b_o.reshape([ROWS, D])
            b_rows.store(out.to(b_q.dtype))
            p_rows = p_out + (batch.to(gl.int64) * o_batch + head.to(gl.int64) * o_head) * 8
            p_own, exist = row_pointers(p_rows, first, q_rate, rows, o_row_stride, o_columns, C, D)
            gl.store(p_own, b_rows.load(p_own.type.layout), mask=exist)
            mbarrier.arrive(old_empty.index(0), count=1)
            gl.store(p_row, both * LN2, mask=row < rows)
            # Order the writes to this buffer before the producer's copies into it.
            fence_async_shared()
        else:
            acc = warpgroup_mma_wait(1, deps=(acc_token,))
            total = gl.convert_layout(gl.sum(row_sum, 1), score_rows)
            every = total
            if p_sink is not None:
                # Infinite for a row without keys, whose maximum is -inf; NaN if the sink is -inf, too.
                every += gl.exp2((gl.load(p_sink + head) - row_max * LN2) * LOG2_E)
            inverse = gl.where(total == 0.0, 0.0, 1.0 / every)
            out = rescale(acc, inverse)
            o_stored = read(item, ITEM_ROWS if SPLIT else ITEM_ROW) + C * ROWS
            b_o.reshape([ROWS, D]).store(out.to(b_q.dtype))
            fence_async_shared()
            copy_out(o_desc, [batch, head, o_stored, 0], b_o)
            o_token = o_stored + gl.arange(0, ROWS, score_rows)
            gl.store(p_head + o_token, (row_max + gl.log2(total)) * LN2, mask=o_token < stored_rows)
    warpgroup_mma_wait(0, deps=(scores_token,))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "items", "items_a_batch", "heads", "group", "n", "n_keys", "o_batch", "o_head", "o_row", "o_columns",
        "q_rate", "q_longer", "k_rate", "k_longer", "scale",
    ],
    do_not_specialize_on_alignment=[
        "p_lse", "p_sink", "p_work", "p_full", "p_partial", "p_tiles", "p_bits", "p_padding", "p_next"
    ],
)  # fmt: skip
def attention_fwd_kernel(
    q_desc, q_more, k_desc, k_more, v_desc, v_more, o_desc, o_more, p_out, p_lse, p_sink, p_work, p_full, p_partial,
    p_tiles, p_bits, p_padding, p_next, items, items_a_batch, heads, group, n, n_keys, o_batch, o_head, o_row,
    o_columns, q_rate, q_longer, k_rate, k_longer, scale, BLOCK: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PING_PONG: gl.constexpr, DYNAMIC: gl.constexpr,
    SPLIT: gl.constexpr, WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Output and LSE of every item, claimed in order; `scale` is in log2 units, and every item has a tile.

    `n` is the number of queries, `n_keys` the number of keys, or None if both are equal.
    `p_next` points to a counter that is 0 before and after the launch; without DYNAMIC, program `p` processes items
    `p, p + programs, ...`. Descriptors of five dimensions select a strided part, which is merged with the output at
    `p_out` (strides `o_batch`, `o_head`, `o_row`, and width `o_columns` if it is not that of a tile, in units of 16
    bytes) and the LSE; `p_tiles` holds start and end of key tiles. With SPLIT items are pieces of rows, whose output
    and LSE are stored through `o_desc` and `p_lse`. `p_padding` has a byte per sample and key, not 0 for a padded key;
    None without padding. `p_sink` has a logit of each head that joins the sum of every row, None without sinks.
    """
    # Two, as the first scores of the next item are computed before the output of this item has left its Q buffer.
    Q_STAGES: gl.constexpr = 2
    # At width 128 the consumers need all registers, and the producer of a strided part spills a little per item.
    STRIDED: gl.constexpr = len(q_desc.block_shape) == 5
    LOADER_REGISTERS: gl.constexpr = 32 if STRIDED and q_desc.block_type.numel == 64 * 64 else 24
    WORKERS: gl.constexpr = workers_of(BLOCK)
    key_end = n if n_keys is None else n_keys
    dtype: gl.constexpr = q_desc.dtype
    note: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    b_q = gl.allocate_shared_memory(dtype, ring(WORKERS * Q_STAGES, q_desc), q_desc.layout)
    b_k = gl.allocate_shared_memory(dtype, ring(K_STAGES, k_desc), k_desc.layout)
    b_v = gl.allocate_shared_memory(dtype, ring(V_STAGES, v_desc), v_desc.layout)
    b_old = gl.allocate_shared_memory(
        dtype, ring(WORKERS, o_desc) if STRIDED else [1], q_desc.layout if STRIDED else note
    )
    old_full, old_empty = barrier_pairs(1, WORKERS)
    b_item = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 8], note)
    b_tile = gl.allocate_shared_memory(gl.int32, [K_STAGES, 8], note)
    q_full, q_empty = barrier_pairs(Q_STAGES, WORKERS)
    k_full, used = barrier_pairs(K_STAGES, WORKERS)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(s), count=1)
    if p_padding is None:
        b_kept: gl.constexpr = None
        whole: gl.constexpr = None
    else:
        b_kept = gl.allocate_shared_memory(gl.int32, [K_STAGES, 8], note)
        whole = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(whole.index(0), count=1)
    if WORKERS == 2:
        gl.warp_specialize(
            [
                (attend_rows, (
                    0, o_desc, p_out, p_lse, p_sink, b_q, b_k, b_v, b_old, b_item, b_tile, b_kept,
                    q_full, q_empty, k_full, v_full, old_full, old_empty, used,
                    p_bits, heads, n, o_batch, o_head, o_row, o_columns, q_rate, scale,
                    BLOCK, K_STAGES, V_STAGES, Q_STAGES, PING_PONG, SPLIT,
                )),
                (attend_rows, (
                    1, o_desc, p_out, p_lse, p_sink, b_q, b_k, b_v, b_old, b_item, b_tile, b_kept,
                    q_full, q_empty, k_full, v_full, old_full, old_empty, used,
                    p_bits, heads, n, o_batch, o_head, o_row, o_columns, q_rate, scale,
                    BLOCK, K_STAGES, V_STAGES, Q_STAGES, PING_PONG, SPLIT,
                )),
                (load_tiles, (
                    q_desc, q_more, k_desc, k_more, v_desc, v_more, o_desc, o_more,
                    b_q, b_k, b_v, b_old, b_item, b_tile, b_kept,
                    q_full, q_empty, k_full, v_full, old_full, old_empty, used, whole,
                    p_work, p_full, p_partial, p_tiles, p_padding, p_next, items, items_a_batch, group, key_end,
                    q_rate, q_longer, k_rate, k_longer, BLOCK, K_STAGES, V_STAGES, Q_STAGES, DYNAMIC, SPLIT,
                )),
            ],
            [4, 1],
            [WORKER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_rows, (
                    0, o_desc, p_out, p_lse, p_sink, b_q, b_k, b_v, b_old, b_item, b_tile, b_kept,
                    q_full, q_empty, k_full, v_full, old_full, old_empty, used,
                    p_bits, heads, n, o_batch, o_head, o_row, o_columns, q_rate, scale,
                    BLOCK, K_STAGES, V_STAGES, Q_STAGES, PING_PONG, SPLIT,
                )),
                (load_tiles, (
                    q_desc, q_more, k_desc, k_more, v_desc, v_more, o_desc, o_more,
                    b_q, b_k, b_v, b_old, b_item, b_tile, b_kept,
                    q_full, q_empty, k_full, v_full, old_full, old_empty, used, whole,
                    p_work, p_full, p_partial, p_tiles, p_padding, p_next, items, items_a_batch, group, key_end,
                    q_rate, q_longer, k_rate, k_longer, BLOCK, K_STAGES, V_STAGES, Q_STAGES, DYNAMIC, SPLIT,
                )),
            ],
            [1],
            [LOADER_REGISTERS],
        )  # fmt: skip
