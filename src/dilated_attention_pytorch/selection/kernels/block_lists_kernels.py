"""Block lists of a selection in the layout of the attention kernels, with table sizes that follow from shapes alone.

Names as in `primitives`. All tables are int32 and share one arena `p_room`; the parameters `o_` are their offsets in
it. P is the number of list entries that a program processes at a time, a power of two. SIZE is the block size. HALVES
is the number of work items of the Hopper kernels per block, 0 if they do not run.

A row is a query block of one head and sample. Its list names the key blocks that it reads: first whole tiles, without a
mask, then partial tiles, then unused entries. Mask 0 allows every pair, for a ragged last block; mask 1 is causal;
mask 2 is empty.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_partial(
    p_partial, o_entry, b_tile, b_mask, b_here, SIZE: tl.constexpr, TURNED: tl.constexpr, HOLES: tl.constexpr
):  # fmt: skip
    """Write entries of `lowering.partial_entries`: tile, mask, first and last difference of the mask's band.
    Differences are key minus query, or with TURNED query minus key. Mask 2, which exists with HOLES, has a band outside
    of the tile."""
    p_line = p_partial + o_entry.to(tl.int64) * 4
    tl.store(p_line, b_tile, mask=b_here)
    tl.store(p_line + 1, b_mask, mask=b_here)
    if HOLES:
        OUTSIDE: tl.constexpr = -SIZE if TURNED else SIZE
        b_first = tl.where((b_mask == 1) & TURNED, 0, 1 - SIZE)
        b_last = tl.where((b_mask == 1) & (not TURNED), 0, SIZE - 1)
        tl.store(p_line + 2, tl.where(b_mask == 2, OUTSIDE, b_first), mask=b_here)
        tl.store(p_line + 3, tl.where(b_mask == 2, OUTSIDE, b_last), mask=b_here)
    else:
        tl.store(p_line + 2, tl.where((b_mask > 0) & TURNED, 0, 1 - SIZE), mask=b_here)
        tl.store(p_line + 3, tl.where((b_mask > 0) & (not TURNED), 0, SIZE - 1), mask=b_here)


@triton.jit
def list_index(head, SHARED: tl.constexpr):
    """Index of the list of a query head, if SHARED adjacent heads share a list; `head` may count over samples."""
    if SHARED > 1:
        head = head // SHARED
    return head


@triton.jit(do_not_specialize=["batch", "heads", "blocks", "listed", "sinks", "entries"])
def query_lists_kernel(
    p_indices, p_room, o_lists, o_rows, o_work, o_items, o_held, o_partial, batch, heads, blocks, listed, sinks,
    entries, P: tl.constexpr, SIZE: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    HALVES: tl.constexpr, BY_ROW: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Write the list, work item and row record of one query block: the direction of the output and dQ.

    `p_indices` holds `listed` block numbers per row. Candidates are the NEAR blocks around the row's own, the first
    `sinks` blocks, then the listed blocks; a prefix sum over each kind places whole tiles before partial ones. The
    lists of all rows have `entries` entries, and their masks follow at that distance. HALVES items for the Hopper
    kernels are written as well; with BY_ROW the same row of all heads starts together. An item needs a tile: a row
    without blocks, which exists only if LOCAL is 0, gets its own tile with mask 2.
    """
    NEAR: tl.constexpr = LOCAL if CAUSAL or LOCAL == 0 else 2 * LOCAL - 1
    HOLES: tl.constexpr = LOCAL == 0 and HALVES > 0
    MASKED: tl.constexpr = (RAGGED or CAUSAL) or HOLES
    tiles = batch * blocks
    row = tl.program_id(0)
    head = row // tiles
    tile = row % tiles
    sample = tile // blocks
    own = tile % blocks
    shared = NEAR + sinks
    many = shared + listed
    o_k = tl.arange(0, P)
    b_block = own + o_k - (LOCAL - 1)
    b_first = tl.where(tl.abs(own - (o_k - NEAR)) < LOCAL, -1, o_k - NEAR)
    b_block = tl.where(o_k < NEAR, b_block, b_first)
    line = list_index(sample * heads + head, SHARED)
    p_own = p_indices + (line.to(tl.int64) * blocks + own) * listed + o_k - shared
    b_block = tl.where(o_k < shared, b_block, tl.load(p_own, mask=(o_k >= shared) & (o_k < many), other=-1))
    b_valid = (b_block >= 0) & (b_block < blocks)
    b_mask = tl.full([P], -1, tl.int32)
    if RAGGED:
        b_mask = tl.where(b_block == blocks - 1, 0, b_mask)
    if CAUSAL:
        b_valid = b_valid & (b_block <= own)
        b_mask = tl.where(b_block == own, 1, b_mask)
    b_whole = (b_valid & (b_mask < 0)).to(tl.int32)
    b_part = (b_valid & (b_mask >= 0)).to(tl.int32)
    whole = tl.sum(b_whole, 0)
    part = tl.sum(b_part, 0)
    b_rest = 1 - b_whole - b_part
    b_at = tl.where(b_whole > 0, tl.cumsum(b_whole, 0), whole + tl.cumsum(b_part, 0))
    b_at = tl.where(b_rest > 0, whole + part + tl.cumsum(b_rest, 0), b_at) - 1
    begin = row * many
    o_entry = begin + b_at
    b_block = tl.where(b_valid, b_block, own) if HOLES else tl.minimum(tl.maximum(b_block, 0), blocks - 1)
    b_tile = sample * blocks + b_block
    p_lists = p_room + o_lists
    tl.store(p_lists + o_entry, b_tile, mask=o_k < many)
    if MASKED:
        b_mask = tl.maximum(b_mask, 0)
        if HOLES:
            b_mask = tl.where(b_rest > 0, 2, b_mask)
        tl.store(p_lists + entries + o_entry, b_mask, mask=o_k < many)
        if HALVES > 0:
            store_partial(p_room + o_partial, o_entry, b_tile, b_mask, o_k < many, SIZE, False, HOLES)
    # Longest first: under a causal mask the last rows have the most tiles.
    place = (blocks - 1 - own) * batch + sample if CAUSAL else tile
    o_c = tl.arange(0, 8)
    middle = begin + whole
    b_line = tl.where(o_c == 0, tile, tl.where(o_c == 1, begin, tl.where(o_c == 5, middle + part, middle)))
    b_line = tl.where((o_c == 3) | (o_c == 6), 0, tl.where(o_c == 7, -1, b_line))
    tl.store(p_room + o_work + (head * tiles + place) * 8 + o_c, b_line)
    tl.store(p_room + o_rows + row * 6 + o_c - 1, b_line, mask=(o_c > 0) & (o_c < 7))
    for half in tl.static_range(HALVES):
        item = (place * heads + head if BY_ROW else head * tiles + place) * HALVES + half
        b_line = tl.where(o_c == 0, head, tl.where(o_c == 1, tile * HALVES + half, tl.where(o_c == 2, begin, whole)))
        masked = tl.maximum(part, (whole == 0).to(tl.int32)) if HOLES else part
        b_line = tl.where(o_c == 5, middle, tl.where(o_c == 6, masked, b_line))
        tl.store(p_room + o_items + item * 8 + o_c, tl.where((o_c == 4) | (o_c == 7), 0, b_line))
        b_line = tl.where(o_c < 2, b_line, tl.where(o_c == 2, whole + part, 0))
        tl.store(p_room + o_held + item * 4 + o_c, b_line, mask=o_c < 4)


@triton.jit
def popcount(b_word):
    """Number of set bits of each 32-bit word, int32."""
    b_word = b_word.to(tl.uint32)
    b_word = b_word - ((b_word >> 1) & 0x55555555)
    b_word = (b_word & 0x33333333) + ((b_word >> 2) & 0x33333333)
    b_word = (b_word + (b_word >> 4)) & 0x0F0F0F0F
    return ((b_word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def fill_table(p_table, many, value):
    """Set `many` elements of a table to `value`, split over all programs of the launch."""
    program = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    for first in range(program * 512, many, tl.num_programs(0) * tl.num_programs(1) * 512):
        o = first + tl.arange(0, 512)
        tl.store(p_table + o, o * 0 + value, mask=o < many)


@triton.jit(do_not_specialize=["blocks", "heads", "samples", "listed", "filled"])
def mark_kernel(
    p_indices, p_room, o_bits, o_filled, o_counter, blocks, heads, samples, listed, filled, P: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Transpose the lists of 32 query blocks into one word of a bit matrix [heads, key tiles, words]. Bit i of a word
    is set if query block 32 * word + i lists the key tile. Also zeroes `filled` elements at `o_filled` and the counter
    of `key_lists_kernel` for the next launch."""
    word = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) % heads
    sample = tl.program_id(1).to(tl.int64) // heads
    key_tiles = samples * blocks
    fill_table(p_room + o_filled, filled, 0)
    fill_table(p_room + o_counter, 1, 0)
    # No other program writes these words.
    p_bits = p_room + o_bits + (head * key_tiles + sample * blocks) * tl.num_programs(0) + word
    for first in range(0, blocks, 128):
        o_b = first + tl.arange(0, 128)
        tl.store(p_bits + o_b.to(tl.int64) * tl.num_programs(0), o_b * 0, mask=o_b < blocks)
    tl.debug_barrier()
    o_i = tl.arange(0, 32)[:, None]
    o_q = word * 32 + o_i
    p_own = p_indices + (list_index(tl.program_id(1).to(tl.int64), SHARED) * blocks + o_q) * listed
    for slot in range(0, listed, P):
        o_k = slot + tl.arange(0, P)[None, :]
        b_block = tl.load(p_own + o_k, mask=(o_q < blocks) & (o_k < listed), other=blocks)
        o_word = b_block.to(tl.int64) * tl.num_programs(0)
        # Relaxed: the words are read by the next launch only, and every ordered atomic would cost a fence.
        tl.atomic_or(p_bits + o_word, (1 << o_i) + o_k * 0, mask=b_block < blocks, sem="relaxed")


@triton.jit
def readers_of_block(p_bits, row, own, o_q, blocks, sinks, words, LOCAL: tl.constexpr, CAUSAL: tl.constexpr):
    """Mask of the query blocks `o_q` that read the key block `own`: it is listed, near, or one of the first."""
    b_bits = tl.load(p_bits + row.to(tl.int64) * words + o_q // 32, mask=o_q < blocks, other=0)
    b_reads = (((b_bits >> (o_q % 32)) & 1) > 0) | (own + o_q * 0 < sinks) | (tl.abs(o_q - own) < LOCAL)
    return b_reads & (o_q < blocks) & (o_q >= (own if CAUSAL else 0))


@triton.jit(do_not_specialize=["batch", "blocks", "sinks", "words", "entries", "many"])
def key_lists_kernel(
    p_room, p_query_lists, o_bits, o_counters, o_lists, o_rows, o_total, o_partial, o_turned, batch, blocks, sinks,
    words, entries, many, P: tl.constexpr, SIZE: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Write the list of the query blocks that read one key block: the direction of dK and dV.

    Query blocks ascend, whole tiles before partial ones. A first pass over the bit matrix counts them, an atomic
    counter allocates the entries, and a second pass writes them; no result depends on the order of allocations. With
    HALVES the `many` entries of query block `row` are also written as TURNED partial entries, for dQ on Hopper.
    """
    HOLES: tl.constexpr = LOCAL == 0 and HALVES > 0
    MASKED: tl.constexpr = (RAGGED or CAUSAL) or HOLES
    p_bits = p_room + o_bits
    p_lists = p_room + o_lists
    row = tl.program_id(0)
    tile = row % (batch * blocks)
    own = tile % blocks
    # All tiles of a ragged last key block are partial: dQ summed by key tile would add products of rows without a key.
    is_last = own == (blocks - 1 if RAGGED else blocks)
    whole = 0
    part = 0
    for first in range(0, blocks, P):
        o_q = first + tl.arange(0, P)
        b_reads = readers_of_block(p_bits, row, own, o_q, blocks, sinks, words, LOCAL, CAUSAL)
        b_partial = (o_q == (blocks - 1 if RAGGED else blocks)) | (o_q == (own if CAUSAL else blocks)) | is_last
        whole += tl.sum((b_reads & (b_partial == 0)).to(tl.int32), 0)
        part += tl.sum((b_reads & b_partial).to(tl.int32), 0)
    begin = tl.atomic_add(p_room + o_counters, whole + part)
    next_whole = begin
    next_partial = begin + whole
    for first in range(0, blocks, P):
        o_q = first + tl.arange(0, P)
        b_reads = readers_of_block(p_bits, row, own, o_q, blocks, sinks, words, LOCAL, CAUSAL)
        b_partial = (o_q == (blocks - 1 if RAGGED else blocks)) | (o_q == (own if CAUSAL else blocks)) | is_last
        b_whole = (b_reads & (b_partial == 0)).to(tl.int32)
        b_part = (b_reads & b_partial).to(tl.int32)
        o_entry = tl.where(b_partial, next_partial + tl.cumsum(b_part, 0), next_whole + tl.cumsum(b_whole, 0)) - 1
        b_tile = tile - own + o_q
        tl.store(p_lists + o_entry, b_tile, mask=b_reads)
        if MASKED:
            b_mask = (o_q == (own if CAUSAL else blocks)).to(tl.int32)
            tl.store(p_lists + entries + o_entry, b_mask, mask=b_reads)
            if HALVES > 0:
                store_partial(p_room + o_partial, o_entry, b_tile, b_mask, b_reads, SIZE, False, HOLES)
        next_whole += tl.sum(b_whole, 0)
        next_partial += tl.sum(b_part, 0)
    o_c = tl.arange(0, 8)
    b_line = tl.where(o_c == 0, begin, tl.where(o_c == 4, begin + whole + part, begin + whole))
    tl.store(p_room + o_rows + row * 6 + o_c, tl.where((o_c == 2) | (o_c == 5), 0, b_line), mask=o_c < 6)
    tl.store(p_room + o_total + row, whole + part)
    if MASKED and HALVES > 0:
        for first in range(0, many, P):
            o_k = first + tl.arange(0, P)
            o_entry = row * many + o_k
            b_tile = tl.load(p_query_lists + o_entry, mask=o_k < many, other=0)
            b_mask = tl.load(p_query_lists + entries + o_entry, mask=o_k < many, other=0)
            store_partial(p_room + o_turned, o_entry, b_tile, b_mask, o_k < many, SIZE, True, HOLES)


@triton.jit
def count_readers(p_total, o_row, b_here, tiles, GROUP: tl.constexpr):
    """Number of query blocks that read each key row `o_row`, summed over the GROUP query heads of its key head."""
    o_first = (o_row // tiles * GROUP) * tiles + o_row % tiles
    b_readers = tl.load(p_total + o_first, mask=b_here, other=0)
    for member in tl.static_range(1, GROUP):
        b_readers += tl.load(p_total + o_first + member * tiles, mask=b_here, other=0)
    return b_readers


@triton.jit(do_not_specialize=["tiles", "run"])
def held_items_kernel(p_room, o_total, o_items, tiles, run, P: tl.constexpr, HALVES: tl.constexpr, GROUP: tl.constexpr):
    """Write the Hopper work items of one key block of a key head, sorted by the number of their query blocks. The place
    of a row is its rank among the `run` rows sorted together: the number of rows with more query blocks, or with as
    many and a smaller index."""
    row = tl.program_id(0)
    first = row // run * run
    p_total = p_room + o_total
    readers = count_readers(p_total, row, row >= 0, tiles, GROUP)
    place = first
    for begin in range(first, first + run, P):
        o_row = begin + tl.arange(0, P)
        b_here = o_row < first + run
        b_readers = tl.where(b_here, count_readers(p_total, o_row, b_here, tiles, GROUP), -1)
        place += tl.sum(((b_readers > readers) | ((b_readers == readers) & (o_row < row))).to(tl.int32), 0)
    o_c = tl.arange(0, 4)
    for half in tl.static_range(HALVES):
        b_line = tl.where(o_c == 0, row // tiles, tl.where(o_c == 1, row % tiles * HALVES + half, readers))
        tl.store(p_room + o_items + (place * HALVES + half) * 4 + o_c, tl.where(o_c == 3, 0, b_line))


@triton.jit(do_not_specialize=[
    "lines", "rows", "lists", "entries", "listed", "blocks", "first",
    "si_b", "si_s", "si_r", "si_k", "sc_b", "sc_s", "sc_r",
])  # fmt: skip
def normal_lists_kernel(
    p_indices, p_counts, p_lists, p_sharing, p_many, lines, rows, lists, entries, listed, blocks, first,
    si_b, si_s, si_r, si_k, sc_b, sc_s, sc_r,
    R: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr,
    COUNTED: tl.constexpr, SHARING: tl.constexpr,
):  # fmt: skip
    """Sort the lists of R rows and drop duplicates and blocks that a row may not list; P is the padded list length.
    SIZE rows belong to a block. The position of a block in its list is the number of smaller blocks. With SHARING, rows
    that list their own block are marked in `p_sharing`, and the block is dropped."""
    o_line = tl.program_id(0) * R + tl.arange(0, R)
    o_k = tl.arange(0, P)[None, :]
    row = o_line % rows
    line = (o_line // rows).to(tl.int64)
    sample = line // lists
    own = (row // SIZE)[:, None]
    b_here = (o_line < lines)[:, None] & (o_k < entries)
    if COUNTED:
        p_own = p_counts + sample * sc_b + line % lists * sc_s + row.to(tl.int64) * sc_r
        b_here = b_here & (o_k < tl.load(p_own, mask=o_line < lines, other=0)[:, None])
    p_own = p_indices + sample * si_b + line % lists * si_s + row.to(tl.int64) * si_r
    b_block = tl.load(p_own[:, None] + o_k.to(tl.int64) * si_k, mask=b_here, other=-1)
    b_some = (b_block >= first) & (b_block < blocks)
    if CAUSAL:
        b_some = b_some & (b_block <= own - LOCAL)
    elif LOCAL > 0:
        b_some = b_some & (tl.abs(b_block - own) >= LOCAL)
    if SHARING:
        # Entries past the count are -1, which is no row's own block.
        b_mine = tl.max((b_block == own).to(tl.int32), 1)
        tl.store(p_sharing + o_line, b_mine.to(tl.int1), mask=o_line < lines)
    b_block = tl.where(b_some, b_block, blocks).to(tl.int32)
    o_before = tl.arange(0, P)[None, None, :] < tl.arange(0, P)[None, :, None]
    b_again = tl.sum(((b_block[:, None, :] == b_block[:, :, None]) & o_before).to(tl.int32), 2)
    b_block = tl.where(b_again > 0, blocks, b_block)
    b_place = tl.sum((b_block[:, None, :] < b_block[:, :, None]).to(tl.int32), 2)
    many = tl.sum((b_block < blocks).to(tl.int32), 1)
    b_here = (o_line < lines)[:, None]
    p_own = p_lists + o_line.to(tl.int64)[:, None] * listed
    tl.store(p_own + b_place, b_block, mask=b_here & (b_block < blocks))
    tl.store(p_own + o_k, o_k * 0 + blocks, mask=b_here & (o_k >= many[:, None]) & (o_k < listed))
    if p_many is not None:
        tl.store(p_many + o_line, many, mask=o_line < lines)
