"""Lists of blocks that a tensor holds, laid out for the attention kernels: every row where shapes alone put it.

Names as in `triton_primitives`; P is the power of two that holds a list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plan.selected import Chosen, Selection
from .quick_launch import launch
from .triton_launch import OPTIONS, held


@triton.jit
def store_partial(p_partial, o_entry, b_tile, b_mask, b_here, SIZE: tl.constexpr, P: tl.constexpr):
    """Entries as `hopper_work.Ground.partial` has them: tile, mask, first and last difference of its band."""
    p_line = p_partial + o_entry.to(tl.int64) * 4
    tl.store(p_line, b_tile, mask=b_here)
    tl.store(p_line + 1, b_mask, mask=b_here)
    tl.store(p_line + 2, tl.full([P], 1 - SIZE, tl.int32), mask=b_here)
    tl.store(p_line + 3, tl.where(b_mask > 0, 0, SIZE - 1), mask=b_here)


@triton.jit(do_not_specialize=["batch", "heads", "blocks", "listed", "sinks", "entries"])
def query_lists_kernel(
    p_indices, p_lists, p_rows, p_work, p_items, p_held, p_partial, batch, heads, blocks, listed, sinks,
    entries, P: tl.constexpr, SIZE: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    HALVES: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """What one query block meets: tiles met whole, then those met in part, then room that is not used.

    Blocks that every row sees come first among the meetings, its own after LOCAL - 1 others, then those listed for it.
    With HALVES also items of 128 rows for Hopper; BY_ROW starts the same row of all heads together.
    """
    NEAR: tl.constexpr = LOCAL if CAUSAL else 2 * LOCAL - 1
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
    p_own = p_indices + ((sample * heads + head).to(tl.int64) * blocks + own) * listed + o_k - shared
    b_block = tl.where(o_k < shared, b_block, tl.load(p_own, mask=(o_k >= shared) & (o_k < many), other=-1))
    b_some = (b_block >= 0) & (b_block < blocks)
    b_mask = tl.full([P], -1, tl.int32)
    if RAGGED:
        b_mask = tl.where(b_block == blocks - 1, 0, b_mask)
    if CAUSAL:
        b_some = b_some & (b_block <= own)
        b_mask = tl.where(b_block == own, 1, b_mask)
    b_whole = (b_some & (b_mask < 0)).to(tl.int32)
    b_part = (b_some & (b_mask >= 0)).to(tl.int32)
    whole = tl.sum(b_whole, 0)
    part = tl.sum(b_part, 0)
    b_rest = 1 - b_whole - b_part
    b_at = tl.where(b_whole > 0, tl.cumsum(b_whole, 0), whole + tl.cumsum(b_part, 0))
    b_at = tl.where(b_rest > 0, whole + part + tl.cumsum(b_rest, 0), b_at) - 1
    begin = row * many
    o_entry = begin + b_at
    b_tile = sample * blocks + tl.minimum(tl.maximum(b_block, 0), blocks - 1)
    tl.store(p_lists + o_entry, b_tile, mask=o_k < many)
    if RAGGED or CAUSAL:
        b_mask = tl.maximum(b_mask, 0)
        tl.store(p_lists + entries + o_entry, b_mask, mask=o_k < many)
        if HALVES > 0:
            store_partial(p_partial, o_entry, b_tile, b_mask, o_k < many, SIZE, P)
    # Under a causal mask the last rows meet most.
    place = (blocks - 1 - own) * batch + sample if CAUSAL else tile
    o_c = tl.arange(0, 8)
    middle = begin + whole
    b_line = tl.where(o_c == 0, tile, tl.where(o_c == 1, begin, tl.where(o_c == 5, middle + part, middle)))
    b_line = tl.where((o_c == 3) | (o_c == 6), 0, tl.where(o_c == 7, -1, b_line))
    tl.store(p_work + (head * tiles + place) * 8 + o_c, b_line)
    tl.store(p_rows + row * 6 + o_c - 1, b_line, mask=(o_c > 0) & (o_c < 7))
    for half in tl.static_range(HALVES):
        item = (place * heads + head if BY_ROW else head * tiles + place) * HALVES + half
        b_line = tl.where(o_c == 0, head, tl.where(o_c == 1, tile * HALVES + half, tl.where(o_c == 2, begin, whole)))
        b_line = tl.where(o_c == 5, middle, tl.where(o_c == 6, part, b_line))
        tl.store(p_items + item * 8 + o_c, tl.where((o_c == 4) | (o_c == 7), 0, b_line))
        b_line = tl.where(o_c < 2, b_line, tl.where(o_c == 2, whole + part, 0))
        tl.store(p_held + item * 4 + o_c, b_line, mask=o_c < 4)


def query_lists(selection: Selection, halves: int, by_row: bool) -> tuple[Tensor, ...]:
    """Lists and then masks of a selection by query blocks, rows as `Walk` has them, work as `Side` has it, Hopper's
    items of the output and of dQ, and partial entries. All int32.

    `halves` is the number of items of 128 rows in a block, 0 for none; `by_row` as in the kernel.
    """
    indices, local = selection.indices.contiguous(), selection.local_blocks
    batch, heads, t, listed = indices.shape
    sinks, ragged = min(selection.sink_blocks, t), selection.n % selection.block_size > 0
    many = (local if selection.is_causal else 2 * local - 1) + sinks + listed
    rows, masked = heads * batch * t, ragged or selection.is_causal
    room = indices.new_empty
    lists, table, work = room(rows * many * (1 + masked)), room((rows, 6)), room((rows, 8))
    items, held_items = room((rows * halves, 8)), room((rows * halves, 4))
    partial = room((rows * many * (masked and halves > 0), 4))
    launch(query_lists_kernel, (rows,),
        indices, lists, table, work, items, held_items, partial, batch, heads, t, listed, sinks, rows * many,
        P=held(many), SIZE=selection.block_size, LOCAL=local, CAUSAL=selection.is_causal, RAGGED=ragged,
        HALVES=halves, BY_ROW=by_row, num_warps=4 if many > 256 else 1, **OPTIONS,
    )  # fmt: skip
    return lists, table, work, items, held_items, partial


@triton.jit
def ones_of(b_word):
    """How many bits are set."""
    b_word = b_word.to(tl.uint32)
    b_word = b_word - ((b_word >> 1) & 0x55555555)
    b_word = (b_word & 0x33333333) + ((b_word >> 2) & 0x33333333)
    b_word = (b_word + (b_word >> 4)) & 0x0F0F0F0F
    return ((b_word * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["n", "blocks", "heads", "samples", "listed", "rows"])
def chosen_kernel(
    p_indices, p_bits, p_before, p_first, p_source, p_place, p_tile, n, blocks, heads, samples, listed, rows,
    s_sample, s_head, SIZE: tl.constexpr, P: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    """For 32 tokens: set the bit of each in the words of the tiles it chose, or with PLACE say where each choice lies.

    A choice lies as far into its tile's run as there are tokens before it that chose the same.
    """
    word = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) % heads
    sample = tl.program_id(1).to(tl.int64) // heads
    key_tiles = samples * blocks
    o_i = tl.arange(0, 32)[:, None]
    o_token = word * 32 + o_i
    p_own = p_indices + sample * s_sample + head * s_head + o_token.to(tl.int64) * listed
    for slot in range(0, listed, P):
        o_k = slot + tl.arange(0, P)[None, :]
        b_real = (o_token < n) & (o_k < listed)
        b_block = tl.load(p_own + o_k, mask=b_real, other=blocks)
        b_some = b_block < blocks
        b_tile = sample * blocks + b_block
        o_word = (head * key_tiles + b_tile) * tl.num_programs(0) + word
        if PLACE:
            b_bits = tl.load(p_bits + o_word, mask=b_some, other=0)
            b_within = tl.load(p_before + o_word, mask=b_some, other=0) + ones_of(b_bits & ((1 << o_i) - 1))
            b_first = tl.load(p_first + head * (key_tiles + 1) + b_tile, mask=b_some, other=0)
            b_place = b_first * SIZE + b_within
            o_entry = ((head * samples + sample) * n + o_token) * listed + o_k
            tl.store(p_place + o_entry, tl.where(b_some, b_place, rows), mask=b_real)
            tl.store(p_source + head * rows + b_place, sample * n + o_token + o_k * 0, mask=b_some)
            p_met = p_tile + head * (rows // SIZE) + b_first + b_within // SIZE
            tl.store(p_met, b_tile, mask=b_some & (b_within % SIZE == 0))
        else:
            tl.atomic_or(p_bits + o_word, (1 << o_i) + o_k * 0, mask=b_some)


@triton.jit
def seen_by(p_bits, row, own, o_q, blocks, sinks, words, LOCAL: tl.constexpr, CAUSAL: tl.constexpr):
    """Which query blocks see the key block `own`: those that listed it, near ones, and all if it is among the first."""
    b_bits = tl.load(p_bits + row.to(tl.int64) * words + o_q // 32, mask=o_q < blocks, other=0)
    b_seen = (((b_bits >> (o_q % 32)) & 1) > 0) | (own + o_q * 0 < sinks) | (tl.abs(o_q - own) < LOCAL)
    return b_seen & (o_q < blocks) & (o_q >= (own if CAUSAL else 0))


@triton.jit(do_not_specialize=["batch", "blocks", "sinks", "words", "entries"])
def key_lists_kernel(
    p_bits, p_next, p_lists, p_rows, p_total, p_partial, batch, blocks, sinks, words, entries,
    P: tl.constexpr, SIZE: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """The query blocks that see one key block, ascending: those met whole, then those met in part.

    Lists lie in the order in which programs ask for room, which nothing depends on.
    """
    row = tl.program_id(0)
    tile = row % (batch * blocks)
    own = tile % blocks
    whole = 0
    part = 0
    for first in range(0, blocks, P):
        o_q = first + tl.arange(0, P)
        b_seen = seen_by(p_bits, row, own, o_q, blocks, sinks, words, LOCAL, CAUSAL)
        b_cut = (o_q == (blocks - 1 if RAGGED else blocks)) | (o_q == (own if CAUSAL else blocks))
        whole += tl.sum((b_seen & (b_cut == 0)).to(tl.int32), 0)
        part += tl.sum((b_seen & b_cut).to(tl.int32), 0)
    begin = tl.atomic_add(p_next, whole + part)
    met = begin
    cut = begin + whole
    for first in range(0, blocks, P):
        o_q = first + tl.arange(0, P)
        b_seen = seen_by(p_bits, row, own, o_q, blocks, sinks, words, LOCAL, CAUSAL)
        b_cut = (o_q == (blocks - 1 if RAGGED else blocks)) | (o_q == (own if CAUSAL else blocks))
        b_whole = (b_seen & (b_cut == 0)).to(tl.int32)
        b_part = (b_seen & b_cut).to(tl.int32)
        o_entry = tl.where(b_cut, cut + tl.cumsum(b_part, 0), met + tl.cumsum(b_whole, 0)) - 1
        b_tile = tile - own + o_q
        tl.store(p_lists + o_entry, b_tile, mask=b_seen)
        if RAGGED or CAUSAL:
            b_mask = (o_q == (own if CAUSAL else blocks)).to(tl.int32)
            tl.store(p_lists + entries + o_entry, b_mask, mask=b_seen)
            if HALVES > 0:
                store_partial(p_partial, o_entry, b_tile, b_mask, b_seen, SIZE, P)
        met += tl.sum(b_whole, 0)
        cut += tl.sum(b_part, 0)
    o_c = tl.arange(0, 8)
    b_line = tl.where(o_c == 0, begin, tl.where(o_c == 4, begin + whole + part, begin + whole))
    tl.store(p_rows + row * 6 + o_c, tl.where((o_c == 2) | (o_c == 5), 0, b_line), mask=o_c < 6)
    tl.store(p_total + row, whole + part)


def key_lists(selection: Selection, entries: int, halves: int) -> tuple[Tensor, ...]:
    """Of each key block the query blocks that see it: lists and then masks, rows, their lengths, partial entries."""
    indices, t = selection.indices.contiguous(), selection.blocks
    batch, heads, _, listed = indices.shape
    rows, words = heads * batch * t, -(-t // 32)
    ragged, causal = selection.n % selection.block_size > 0, selection.is_causal
    masked = ragged or causal
    # Of the lists too, what is not used is looked at with the rest; both begin where rows of 16 bytes do.
    room_of_lists = -(-entries * (1 + masked) // 4) * 4
    empty = torch.zeros(room_of_lists + rows * words + 1, dtype=torch.int32, device=indices.device)
    lists, bits = empty[: entries * (1 + masked)], empty[room_of_lists:]
    room = indices.new_empty
    table, total, partial = room((rows, 6)), room(rows), room((entries * (masked and halves > 0), 4))
    if listed:
        launch(chosen_kernel, (words, batch * heads),
            indices, bits, bits, bits, bits, bits, bits, t, t, heads, batch, listed, 0, *indices.stride()[:2],
            SIZE=selection.block_size, P=min(held(listed), 64), PLACE=False, num_warps=4, **OPTIONS,
        )  # fmt: skip
    launch(key_lists_kernel, (rows,),
        bits, bits[-1:], lists, table, total, partial, batch, t, min(selection.sink_blocks, t), words, entries,
        P=min(held(t), 1024), SIZE=selection.block_size, LOCAL=selection.local_blocks, CAUSAL=causal, RAGGED=ragged,
        HALVES=halves, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return lists, table, total, partial


@triton.jit(do_not_specialize=["tiles", "run"])
def held_items_kernel(p_met, p_items, tiles, run, P: tl.constexpr, HALVES: tl.constexpr):
    """Items of one key block of a key head, stored behind those of its run of rows that meet more."""
    row = tl.program_id(0)
    first = row // run * run
    met = tl.load(p_met + row)
    place = first
    for begin in range(first, first + run, P):
        o_row = begin + tl.arange(0, P)
        b_met = tl.load(p_met + o_row, mask=o_row < first + run, other=-1)
        place += tl.sum(((b_met > met) | ((b_met == met) & (o_row < row))).to(tl.int32), 0)
    o_c = tl.arange(0, 4)
    for half in tl.static_range(HALVES):
        b_line = tl.where(o_c == 0, row // tiles, tl.where(o_c == 1, row % tiles * HALVES + half, met))
        tl.store(p_items + (place * HALVES + half) * 4 + o_c, tl.where(o_c == 3, 0, b_line))


def held_items(met: Tensor, tiles: int, halves: int, few: bool) -> Tensor:
    """Items of dK and dV as `HeldWork` has them, the heaviest of a head first, where they are `few` of all.

    A row looks at the others as often as its scorer did.
    """
    run = met.numel() if few else tiles
    items = torch.empty((met.numel() * halves, 4), dtype=torch.int32, device=met.device)
    sizes = {"P": min(held(run), 1024), "HALVES": halves, "num_warps": 4}
    launch(held_items_kernel, (met.numel(),), met, items, tiles, run, **sizes, **OPTIONS)
    return items


@triton.jit(do_not_specialize=["words"])
def runs_kernel(p_bits, p_before, p_tiles, words, SIZE: tl.constexpr, P: tl.constexpr):
    """Of one key tile: tokens that chose it before each word, and the tiles of SIZE they fill, counted from 1 on."""
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    total = 0
    for first in range(0, words, P):
        o_w = first + tl.arange(0, P)
        b_many = ones_of(tl.load(p_bits + row * words + o_w, mask=o_w < words, other=0))
        tl.store(p_before + row * words + o_w, total + tl.cumsum(b_many, 0) - b_many, mask=o_w < words)
        total += tl.sum(b_many, 0)
    p_own = p_tiles + row + tl.program_id(1)
    tl.store(p_own + 1, ((total + SIZE - 1) // SIZE).to(tl.int64))
    tl.store(p_own, (total * 0).to(tl.int64), mask=tl.program_id(0) == 0)


def chosen_tokens(selection: Selection) -> Chosen:
    """`plan.selected.chosen_tokens`, in a bit a token and key tile instead of a sort."""
    indices, size, t = selection.indices, selection.block_size, selection.blocks
    batch, heads, n, listed = indices.shape
    # Some heads of all are read where they lie.
    indices = indices if indices.stride()[2:] == (listed, 1) else indices.contiguous()
    key_tiles, words, each = batch * t, -(-n // 32), batch * n * listed
    query_tiles = max(each // size + min(key_tiles, each), 1)
    rows = query_tiles * size
    made = {"dtype": torch.int64, "device": indices.device}
    bits = torch.zeros((heads, key_tiles, words), dtype=torch.int32, device=indices.device)
    before, first = torch.empty_like(bits), torch.empty((heads, key_tiles + 1), **made)
    source = torch.full((heads, rows), -1, **made)
    tile = torch.full((heads, query_tiles), key_tiles, **made)
    place = torch.empty((heads, batch * n, listed), **made)

    def each_choice(place_them: bool) -> None:
        launch(chosen_kernel, (words, batch * heads),
            indices, bits, before, first, source, place, tile, n, t, heads, batch, listed, rows, *indices.stride()[:2],
            SIZE=size, P=min(held(listed), 64), PLACE=place_them, num_warps=4, **OPTIONS,
        )  # fmt: skip

    each_choice(False)
    launch(runs_kernel, (key_tiles, heads), bits, before, first, words, SIZE=size, P=min(held(words), 1024), **OPTIONS)
    first.cumsum_(1)
    each_choice(True)
    return Chosen(source, place, tile, first)
