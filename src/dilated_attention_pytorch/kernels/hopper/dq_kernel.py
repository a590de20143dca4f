"""Row-wise dQ kernel for Hopper in Gluon: bitwise reproducible, with the scores computed a second time.

A work item is 128 query rows of one head; each of two warpgroups owns 64 of them. A step is one tile of keys:

    S = Q K^T      dP = dO V^T      dQ += dS K

The third product of a step is issued after the first two of the next step, so that the tensor cores are busy while the
weights of that step are computed. With blocks of 64 an item is one block, and a program has one warpgroup.

dS of padded keys is set to 0. The product runs over the keys, so padded keys are zeroed in shared memory, too.

Of several parts, the last to run adds the contributions of the others to its own before rounding, so that the sum is
rounded once.

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

from .dkv_kernel import (
    ITEM_BATCH,
    ITEM_HEAD,
    ITEM_ROW,
    ITEM_ROWS,
    ITEM_STEPS,
    ITEM_STORED,
    ROWS,
    TILE_MASK,
    load_backward_tiles,
    mask_weights,
)
from .forward_kernel import HOLD
from .primitives import (
    barrier_pairs,
    base_2,
    drop_columns,
    here,
    put_rows,
    read,
    release,
    ring,
    row_pointers,
    wait_for_launch,
    workers_of,
)


@gluon.jit
def gather_row_step(
    C: gl.constexpr, dq, ds, tile_count, step, q_slot, q_rows, lse, delta, no_scores, b_q, b_do, b_k, b_v,
    b_tile, b_kept, full, empty, p_bits, scale_log2, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dS of one tile of keys, and the contribution of the preceding tile to dQ, for the rows of warpgroup `C`.

    `q_rows` are its queries in registers, or None to read them from shared memory.
    """
    BN: gl.constexpr = b_k.shape[len(b_k.shape) - 2]
    D: gl.constexpr = b_k.shape[len(b_k.shape) - 1]
    operand_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq.type.layout, k_width=2)
    slot = tile_count % STAGES
    # In the first step there is no dS yet: its own keys are multiplied by zeros.
    behind = (tile_count + STAGES - gl.where(step > 0, 1, 0)) % STAGES
    o_item = here(q_slot * workers_of(BLOCK) + C)
    q = b_q.index(o_item).reshape([ROWS, D]) if q_rows is None else q_rows
    do = b_do.index(o_item).reshape([ROWS, D])
    k = b_k.index(slot).reshape([BN, D])
    v = b_v.index(slot).reshape([BN, D])
    note = b_tile.index(slot)
    # With two stages the keys of the preceding step are multiplied first, as the next tile takes their place.
    EARLY: gl.constexpr = STAGES == 2
    mbarrier.wait(full.index(slot), (tile_count // STAGES) & 1)
    if EARLY:
        operand = gl.convert_layout(ds.to(b_k.dtype), operand_layout)
        dq_token = warpgroup_mma(operand, b_k.index(behind).reshape([BN, D]), dq, is_async=True)
    scores_token = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    dp_token = warpgroup_mma(do, v.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    if EARLY:
        dq = warpgroup_mma_wait(2, deps=(dq_token,))
        mbarrier.arrive(empty.index(behind), count=1, pred=step > 0)
        scores = warpgroup_mma_wait(1, deps=(scores_token,))
    else:
        operand = gl.convert_layout(ds.to(b_k.dtype), operand_layout)
        dq_token = warpgroup_mma(operand, b_k.index(behind).reshape([BN, D]), dq, is_async=True)
        scores = warpgroup_mma_wait(2, deps=(scores_token,))
    weights = gl.exp2(scores * scale_log2 - lse)
    if read(note, TILE_MASK) >= 0:
        weights = mask_weights(weights, note, p_bits, C, BLOCK, False)
    dp = warpgroup_mma_wait(0 if EARLY else 1, deps=(dp_token,))
    ds = weights * (dp - delta)
    if b_kept is not None:
        ds = drop_columns(ds, b_kept.index(slot), 0.0)
    if not EARLY:
        gl.inline_asm_elementwise(HOLD, "=r,r", [tile_count], dtype=gl.int32, is_pure=False, pack=1)
        dq = warpgroup_mma_wait(0, deps=(dq_token,))
        mbarrier.arrive(empty.index(behind), count=1, pred=step > 0)
    return dq, ds, tile_count + 1


@gluon.jit
def gather_queries(
    C: gl.constexpr, dq_desc, dq_more, p_dq, dq_columns, b_q, b_do, b_k, b_v, b_item, b_tile, b_kept, full, empty,
    q_full, q_empty, p_lse, p_delta, p_bits, heads, n, q_rate, q_longer, scale, scale_log2,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Warpgroup `C`: dQ of its 64 rows of every item of this program."""
    STRIDED: gl.constexpr = len(b_k.shape) == 6
    BN: gl.constexpr = b_k.shape[len(b_k.shape) - 2]
    D: gl.constexpr = b_k.shape[len(b_k.shape) - 1]
    dtype: gl.constexpr = b_k.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    no_scores = gl.full([ROWS, BN], 0.0, gl.float32, scores_layout)
    row = C * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))

    tile_count = 0
    item_count = 0
    mbarrier.wait(q_full.index(0), 0)
    more = read(b_item.index(0), ITEM_BATCH) >= 0
    while more:
        q_slot = item_count % Q_STAGES
        if Q_STAGES > 1:
            # The gradient of the previous item is stored through its query buffer, which is released only now.
            release(q_empty, item_count - 1)
        item = b_item.index(q_slot)
        steps = read(item, ITEM_STEPS)
        batch = read(item, ITEM_BATCH)
        head = read(item, ITEM_HEAD)
        first = read(item, ITEM_ROW)
        rows = read(item, ITEM_ROWS)
        o_own = (batch * heads + head).to(gl.int64) * n + (first + row * (q_rate if STRIDED else 1))
        lse = gl.expand_dims(base_2(gl.load(p_lse + o_own, mask=row < rows, other=float("inf"))), 1)
        delta = gl.expand_dims(gl.load(p_delta + o_own, mask=row < rows, other=0.0), 1)
        dq = gl.full([ROWS, D], 0.0, gl.float32, acc_layout)
        ds = no_scores
        # Products of 64 keys would read these rows as often as the keys.
        q_rows = None
        if workers_of(BLOCK) == 1:
            rows_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores_layout, k_width=2)
            q_rows = b_q.index(q_slot).reshape([ROWS, D]).load(rows_layout)
        for step in range(steps):
            dq, ds, tile_count = gather_row_step(
                C, dq, ds, tile_count, step, q_slot, q_rows, lse, delta, no_scores, b_q, b_do, b_k, b_v,
                b_tile, b_kept, full, empty, p_bits, scale_log2, BLOCK, STAGES,
            )  # fmt: skip
        behind = (tile_count + STAGES - 1) % STAGES
        operand = gl.convert_layout(ds.to(dtype), operand_layout)
        dq_token = warpgroup_mma(operand, b_k.index(behind).reshape([BN, D]), dq, is_async=True)
        b_dq = b_q.index(q_slot * workers_of(BLOCK) + C)
        if p_dq is not None:
            # The query buffer is free, and the last product hides the latency of this load.
            wait_for_launch()
            p_head = p_dq + (batch * (dq_desc.strides[0] // 8) + head * (dq_desc.strides[1] // 8)) * 8
            p_own, exist = row_pointers(p_head, first, q_rate, rows, dq_desc.strides[2] // 8, dq_columns, C, D)
            b_dq.reshape([ROWS, D]).store(gl.load(p_own, mask=exist, other=0.0))
        # Without a step the ring is uninitialised, and 0 * NaN is not 0.
        dq = gl.where(steps > 0, warpgroup_mma_wait(0, deps=(dq_token,)), 0.0)
        mbarrier.arrive(empty.index(behind), count=1, pred=steps > 0)

        if p_dq is None:
            o_dq = read(item, ITEM_STORED) if SPLIT else first
            put_rows(dq * scale, dq_desc, dq_more, batch, head, o_dq, rows, q_rate, q_longer, b_dq, C)
        else:
            b_own = b_dq.reshape([ROWS, D])
            b_own.store((dq * scale + b_own.load(acc_layout).to(gl.float32)).to(dtype))
            gl.store(p_own, b_own.load(p_own.type.layout), mask=exist)
            fence_async_shared()
        if Q_STAGES == 1:
            release(q_empty, item_count)
        item_count += 1
        next_slot = item_count % Q_STAGES
        mbarrier.wait(q_full.index(next_slot), (item_count // Q_STAGES) & 1)
        more = read(b_item.index(next_slot), ITEM_BATCH) >= 0
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "dq_columns", "items", "items_a_batch", "heads", "group", "query_blocks", "n", "n_keys", "q_rate", "q_longer",
        "k_rate", "k_longer", "scale", "scale_log2",
    ],
    do_not_specialize_on_alignment=[
        "p_lse", "p_work", "p_class", "p_walk", "p_whole", "p_partial", "p_tiles", "p_bits", "p_padding", "p_next"
    ],
)  # fmt: skip
def attention_dq_bwd_kernel(
    q_desc, q_more, do_desc, do_more, k_desc, k_more, v_desc, v_more, dq_desc, dq_more, p_dq, dq_columns, p_lse,
    p_delta, p_work, p_class, p_walk, p_whole, p_partial, p_tiles, p_bits, p_padding, p_next, items, items_a_batch,
    heads, group, query_blocks, n, n_keys, q_rate, q_longer, k_rate, k_longer, scale, scale_log2,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, SPLIT: gl.constexpr,
    WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dQ of every item, claimed by programs dynamically; the part that joins the others receives `p_dq`.

    `n` is the number of queries, `n_keys` the number of keys, or None if both are equal. `dq_columns` is the width of
    dQ in units of 16 bytes, or None if it equals the width of a tile or `p_dq` is None.
    """
    WORKERS: gl.constexpr = workers_of(BLOCK)
    dtype: gl.constexpr = k_desc.dtype
    note: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    b_q = gl.allocate_shared_memory(dtype, ring(WORKERS * Q_STAGES, q_desc), q_desc.layout)
    b_do = gl.allocate_shared_memory(dtype, ring(WORKERS * Q_STAGES, do_desc), do_desc.layout)
    b_k = gl.allocate_shared_memory(dtype, ring(STAGES, k_desc), k_desc.layout)
    b_v = gl.allocate_shared_memory(dtype, ring(STAGES, v_desc), v_desc.layout)
    b_item = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 8], note)
    b_tile = gl.allocate_shared_memory(gl.int32, [STAGES, 8], note)
    full, empty = barrier_pairs(STAGES, WORKERS)
    q_full, q_empty = barrier_pairs(Q_STAGES, WORKERS)
    if p_padding is None:
        b_kept: gl.constexpr = None
        whole: gl.constexpr = None
    else:
        b_kept = gl.allocate_shared_memory(gl.int32, [STAGES, 8], note)
        whole = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(whole.index(0), count=1)
    if WORKERS == 1:
        gl.warp_specialize(
            [
                (gather_queries, (
                    0, dq_desc, dq_more, p_dq, dq_columns, b_q, b_do, b_k, b_v, b_item, b_tile, b_kept, full, empty,
                    q_full, q_empty, p_lse, p_delta, p_bits, heads, n, q_rate, q_longer, scale, scale_log2,
                    BLOCK, STAGES, Q_STAGES, SPLIT,
                )),
                (load_backward_tiles, (
                    q_desc, q_more, do_desc, do_more, k_desc, k_more, v_desc, v_more,
                    b_q, b_do, b_k, b_v, b_tile, b_item, b_tile, b_kept, full, empty, q_full, q_empty, whole,
                    p_lse, p_delta, p_work, p_class, p_walk, p_whole, p_partial, p_tiles, p_padding, p_next, items,
                    items_a_batch, heads, group, 0, query_blocks, n, n_keys, q_rate, q_longer, k_rate, k_longer,
                    BLOCK, STAGES, Q_STAGES, False, SPLIT,
                )),
            ],
            [1],
            [32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (gather_queries, (
                    0, dq_desc, dq_more, p_dq, dq_columns, b_q, b_do, b_k, b_v, b_item, b_tile, b_kept, full, empty,
                    q_full, q_empty, p_lse, p_delta, p_bits, heads, n, q_rate, q_longer, scale, scale_log2,
                    BLOCK, STAGES, Q_STAGES, SPLIT,
                )),
                (gather_queries, (
                    1, dq_desc, dq_more, p_dq, dq_columns, b_q, b_do, b_k, b_v, b_item, b_tile, b_kept, full, empty,
                    q_full, q_empty, p_lse, p_delta, p_bits, heads, n, q_rate, q_longer, scale, scale_log2,
                    BLOCK, STAGES, Q_STAGES, SPLIT,
                )),
                (load_backward_tiles, (
                    q_desc, q_more, do_desc, do_more, k_desc, k_more, v_desc, v_more,
                    b_q, b_do, b_k, b_v, b_tile, b_item, b_tile, b_kept, full, empty, q_full, q_empty, whole,
                    p_lse, p_delta, p_work, p_class, p_walk, p_whole, p_partial, p_tiles, p_padding, p_next, items,
                    items_a_batch, heads, group, 0, query_blocks, n, n_keys, q_rate, q_longer, k_rate, k_longer,
                    BLOCK, STAGES, Q_STAGES, False, SPLIT,
                )),
            ],
            [4, 1],
            [WORKER_REGISTERS, 32],
        )  # fmt: skip
