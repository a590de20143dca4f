"""Backward over gathered queries for Hopper in Gluon: the consumers of `dkv_kernel`, on rows at any address.

A work item is a key block of one key head with the query tiles that list it. TMA on Hopper cannot gather rows: a
producer warpgroup copies them with cp.async, while two consumer warpgroups multiply. A gathered row belongs to one key
block, so that its partial dQ is stored, not accumulated; dK and dV are added to the gradients from the shared blocks.

Names: `p_` pointer, `b_` buffer in shared memory, `o_` offset.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...kernels.hopper.dkv_kernel import gather_keys
from ...kernels.hopper.primitives import ROWS, barrier_pairs, base_2, copy_rows_in, post, ring

# Releases after 3.6 renamed it.
copy_in = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

PRODUCER_BARRIER = gl.constexpr(14)
"""Named hardware barrier of the producer warpgroup."""


@gluon.jit
def sync_producers():
    """Synchronize the four producer warps; their earlier writes to shared memory are then visible to all of them."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 128; mov.b32 $0, 0;", "=r,n", [PRODUCER_BARRIER], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def signal_full(full):
    """Arrive on the full barrier of a pipeline stage once the copies of all four producer warps are visible."""
    fence_async_shared()
    sync_producers()
    mbarrier.arrive(full, count=1)


@gluon.jit
def copy_gathered(p_rows, o_row, exist, stride, buffer):
    """Start copying the rows `o_row` into a buffer [BM, D], 16 bytes per thread; rows that do not exist become zeros.
    Strides are in units of 16 bytes, so that the compiler can derive the alignment of rows."""
    layout: gl.constexpr = o_row.type.layout.parent
    col = gl.expand_dims(gl.arange(0, buffer.shape[1], gl.SliceLayout(0, layout)), 0)
    p_row = p_rows + (o_row * stride).to(gl.int64) * 8
    copy_in(buffer, gl.expand_dims(p_row, 1) + col, mask=gl.expand_dims(exist, 1))


@gluon.jit
def load_gathered_tiles(
    k_desc, v_desc, b_k, b_v, b_q, b_do, b_rows, b_item, b_tile, full, empty, kv_full, kv_empty,
    p_q, p_do, p_lse, p_delta, p_source, p_first, p_order, rows, n, blocks, key_tiles, heads, first_head, group,
    sq_b, sq_h, sq_n, sg_b, sg_h, sg_n, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer warpgroup: load a key block, then every query tile that lists it, over the query heads of the group."""
    BM: gl.constexpr = b_q.shape[1]
    D: gl.constexpr = b_q.shape[2]
    SUB: gl.constexpr = BLOCK // BM
    by_row: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0]))
    one_each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    key_head = gl.program_id(1)
    tile = gl.load(p_order + key_head * key_tiles + gl.program_id(0))
    sample = tile // blocks
    first_key = (tile - sample * blocks) * BLOCK
    p_runs = p_first + key_head * group * (key_tiles + 1) + tile
    steps = 0
    for member in range(group):
        p_run = p_runs + member * (key_tiles + 1)
        steps += (gl.load(p_run + 1) - gl.load(p_run)) * SUB
    post(b_item.index(0), key_head, first_key, steps, sample, n - first_key, 0)
    sync_producers()
    mbarrier.expect(kv_full.index(0), 4 * k_desc.block_type.nbytes)
    for half in gl.static_range(2):
        row = first_key + half * ROWS
        copy_rows_in(k_desc, None, sample, key_head, 0, row, 0, kv_full.index(0), b_k.index(half))
        copy_rows_in(v_desc, None, sample, key_head, 0, row, 0, kv_full.index(0), b_v.index(half))
    o_tile = gl.arange(0, BM, by_row)
    o_own = gl.arange(0, BM, one_each)
    count = 0
    for member in range(group):
        head = key_head * group + member
        p_run = p_runs + member * (key_tiles + 1)
        p_queries = p_q + (sample.to(gl.int64) * sq_b + head * sq_h) * 8
        p_grads = p_do + (sample.to(gl.int64) * sg_b + head * sg_h) * 8
        o_stream = (sample * heads + first_head + head).to(gl.int64) * n
        p_sources = p_source + head.to(gl.int64) * rows
        first_place = head * (rows // BM)
        for j in range(gl.load(p_run) * SUB, gl.load(p_run + 1) * SUB):
            # Read before the wait for a free slot, which hides the latency.
            source = gl.load(p_sources + j * BM + o_tile)
            own = gl.load(p_sources + j * BM + o_own)
            o_lse = o_stream + (own - sample * n)
            lse = gl.load(p_lse + o_lse, mask=own >= 0, other=float("inf"))
            delta = gl.load(p_delta + o_lse, mask=own >= 0, other=0.0)
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            copy_gathered(p_queries, source - sample * n, source >= 0, sq_n, b_q.index(slot))
            copy_gathered(p_grads, source - sample * n, source >= 0, sg_n, b_do.index(slot))
            async_copy.commit_group()
            b_rows.index(slot).slice(0, BM).store(base_2(lse))
            b_rows.index(slot).slice(BM, BM).store(delta)
            post(b_tile.index(slot), first_place + j, -1, 0, 0, 0, 0)
            if count > 0:
                # Wait for the copies of the previous tile only, which overlap with those of this one.
                async_copy.wait_group(1)
                signal_full(full.index((count + STAGES - 1) % STAGES))
            count += 1
    if count > 0:
        async_copy.wait_group(0)
        signal_full(full.index((count + STAGES - 1) % STAGES))
    mbarrier.wait(kv_empty.index(0), 0)
    post(b_item.index(0), 0, 0, 0, -1, 0, 0)
    signal_full(kv_full.index(0))


@gluon.jit(
    do_not_specialize=[
        "rows", "n", "blocks", "key_tiles", "heads", "first_head", "group", "sq_b", "sq_h", "sq_n", "sg_b", "sg_h",
        "sg_n", "scale", "scale_log2",
    ],
    do_not_specialize_on_alignment=["p_lse", "p_delta", "p_source", "p_first", "p_order"],
)  # fmt: skip
def chosen_bwd_kernel(
    k_desc, k_more, v_desc, v_more, dk_desc, dk_more, dv_desc, dv_more, p_dk, p_dv, p_q, p_do, p_lse, p_delta, p_part,
    p_source, p_first, p_order, rows, n, blocks, key_tiles, heads, first_head, group, sq_b, sq_h, sq_n, sg_b, sg_h,
    sg_n, scale, scale_log2, BLOCK: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    WORKER_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Add to dK and dV of a key block, and store the partial dQ of each query that lists it, without the scale. Two
    consumer warpgroups (`gather_keys`) hold 64 keys each; a third warpgroup is the producer."""
    D: gl.constexpr = k_desc.block_shape[3]
    dtype: gl.constexpr = k_desc.dtype
    note: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gathered: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, D], dtype)
    exchange: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BM], dtype)
    b_q = gl.allocate_shared_memory(dtype, [STAGES, BM, D], gathered)
    b_do = gl.allocate_shared_memory(dtype, [STAGES, BM, D], gathered)
    b_k = gl.allocate_shared_memory(dtype, ring(2, k_desc), k_desc.layout)
    b_v = gl.allocate_shared_memory(dtype, ring(2, v_desc), v_desc.layout)
    b_ds = gl.allocate_shared_memory(dtype, [4, ROWS, BM], exchange)
    b_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BM], note)
    b_item = gl.allocate_shared_memory(gl.int32, [1, 8], note)
    b_tile = gl.allocate_shared_memory(gl.int32, [STAGES, 8], note)
    full, empty = barrier_pairs(STAGES)
    kv_full, kv_empty = barrier_pairs(1)
    gl.warp_specialize(
        [
            (gather_keys, (
                0, dk_desc, dk_more, dv_desc, dv_more,
                b_q, b_do, b_k, b_v, b_ds, b_rows, b_item, b_tile, None, full, empty, kv_full, kv_empty,
                p_dk, p_dv, p_part, p_source, 1, 0, scale, scale_log2, BLOCK, STAGES, 1, True, False,
            )),
            (gather_keys, (
                1, dk_desc, dk_more, dv_desc, dv_more,
                b_q, b_do, b_k, b_v, b_ds, b_rows, b_item, b_tile, None, full, empty, kv_full, kv_empty,
                p_dk, p_dv, p_part, p_source, 1, 0, scale, scale_log2, BLOCK, STAGES, 1, True, False,
            )),
            (load_gathered_tiles, (
                k_desc, v_desc, b_k, b_v, b_q, b_do, b_rows, b_item, b_tile, full, empty, kv_full, kv_empty,
                p_q, p_do, p_lse, p_delta, p_source, p_first, p_order, rows, n, blocks, key_tiles, heads, first_head,
                group, sq_b, sq_h, sq_n, sg_b, sg_h, sg_n, BLOCK, STAGES,
            )),
        ],
        [4, 4],
        [WORKER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
