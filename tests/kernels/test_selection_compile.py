"""The kernels of learned selections compile for sm_90 without a GPU, within its registers and shared memory."""

import re
from functools import cache

import pytest
from kernels import recorded, test_triton_compile
from kernels.assembler import compile_sources, lower_sources
from kernels.compile_record import passes_once
from kernels.test_triton_compile import PLAIN, SHARED_MEMORY, SMALL_SHARED_MEMORY, compile_kernel, spilled

NAMED = ("p_rows", "p_columns", "p_bias", "p_keep", "p_project", "p_right", "p_rest", "p_scale", "p_log")
FACTORS = dict.fromkeys(NAMED, "*fp32")
PRESENT = dict.fromkeys(("p_there", "p_right_there", "p_visible", "p_sight", "p_present"), "*i1")
LISTS = dict.fromkeys(("p_indices", "p_counts", "p_may"), "*i32")
BOUNDS = dict.fromkeys(("kept", "coldest"), "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("name", "which"), [("chosen_fwd_kernel", 0), ("chosen_bwd_kernel", 1)])
@passes_once(test_triton_compile, recorded)
def test_gathering_kernels_fit_a_multiprocessor_twice(name, which, d, bounded, monkeypatch):
    from dilated_attention_pytorch.selection.kernels import gathered_attention

    compiled = compile_gathering(name, gathered_attention.WHOLE[d][which], d, monkeypatch, bounded=bounded)
    assert compiled.metadata.shared <= SHARED_MEMORY // (1 if (name, d) == ("chosen_bwd_kernel", 128) else 2)
    assert "wgmma" in compiled.asm["ptx"]
    assert spilled(compiled) <= 128


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize(("name", "kind"), [("chosen_fwd_kernel", "forward"), ("chosen_bwd_kernel", "dkv")])
@passes_once(test_triton_compile, recorded)
def test_gathering_kernels_in_single_precision_fit_a_small_gpu(name, kind, d, bounded, monkeypatch):
    from dilated_attention_pytorch.kernels.triton import launches

    tiles = getattr(launches.SINGLE[d], kind)
    compiled = compile_gathering(name, tiles, d, monkeypatch, "*fp32", bounded)
    assert compiled.metadata.shared <= SMALL_SHARED_MEMORY
    assert "mma" in compiled.asm["ptx"]


def compile_gathering(name, tiles, d, monkeypatch, rows="*bf16", bounded=False):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.selection.kernels import gathered_attention

    sizes = {"BLOCK": 128, "D": d, "E": d, "DP": d, "EP": d, "BM": tiles.m, "BN": tiles.n, "GROUP": 1}
    types = dict.fromkeys(("p_source", "p_tile", "p_first", "p_order"), "*i32") | {"p_bounds": "*i64"}
    sizes |= {} if bounded else {"p_bounds": None}
    return compile_kernel(getattr(gathered_attention, name), PLAIN | sizes | {"RAGGED": False}, tiles, rows, types)


SCORED = FACTORS | PRESENT | LISTS | BOUNDS | {"p_scores": "*fp32", "p_ids": "*i64"}
RANKABLE = SCORED | {"p_sight": "*i32"}
RANKED = {"T": 256, "V": 4, "K": 32, "READY": False, "NOISE": True, "SIZE": 128, "CAUSAL": True}
RANKED |= {"width": 256, "blocks": 256}
LONG = {"T": 8192, "BM": 1, "K": 128, "SIZE": 1, "CAUSAL": False, "COVERAGE": False}
READY = {"T": 1024, "K": 128, "READY": True, "NOISE": False, "COVERAGE": False, "width": 1024, "blocks": 1024}
RAGGED = {"W": 128, "V": 1, "NOISE": False, "width": 7813, "blocks": 7813}
HIDDEN = {"M": 128, "T": 8192, "SIZE": 1, "IDS": False, "EVEN": True, "CAUSAL": False, "KEEP": False}
HIDDEN |= {"LISTS": False}
LEARNED = {"BLOCK": 128, "W": 128, "D": 64, "DP": 64, "E": 64, "EP": 64, "SALIENCY": True, "PADDING": False}
LEARNED |= {"LISTED": 1, "EACH": 1, "OWN": False}
PROJECTED = {"BM": 32, "M": 128, "RANK": 32, "RP": 32, "PRECISION": "tf32x3"}
NO_GROUP = {"GROUP": 1, "KEYS": 1} | dict.fromkeys(("p_left", "lines", "key_heads"))
ALONE = NO_GROUP | dict.fromkeys(("p_own", "p_project", "so_b", "so_h", "so_n"))
SELECTING = {"SIZE": 128, "CAUSAL": False, "HOLES": False, "OWN": False}
TAUGHT = {"BM": 128, "L": 32, "BMA": 16, "LA": 256, "FLOOR": 2.0**-10}
MASSES = dict.fromkeys(("p_logs", "p_scores", "p_all_scores", "p_grad", "p_all_grad", "p_found"), "*fp32") | {
    "p_mean": "*fp32"
}
MASSES |= {"p_rows": "*i64", "p_blocks": "*i32", "p_visible": "*i1", "factor": "fp32", "all_factor": "fp32"}

PARTS = dict.fromkeys(("p_means", "p_summary", "p_units", "p_first", "p_bias", "p_mixture", "p_match"), "*fp32")
PARTS |= dict.fromkeys(("p_rows", "p_columns", "p_right", "p_scale"), "*fp32") | {"p_half": "*fp16", "p_rest": "*fp16"}
ROWS = {"U": 8, "M": 128, "D": 64, "RANK": 32, "RP": 32, "PRECISION": "tf32x3"}
SIDES = {"MP": 128, "BN": 32, "HELD_LEFT": 16, "HELD_RIGHT": 16, "MET_LEFT": 128, "MET_RIGHT": 128, "KNOWN": False}
SUMS = {"BM": 32, "BN": 64, "BK": 64, "BP": 512, "KEYS": 1}
PARAMETERS = SCORED | PARTS | dict.fromkeys(("p_factors", "p_own", "p_room", "p_grad", "p_out", "p_weight"), "*fp32")


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize(("some", "size", "is_causal"), [(False, 128, True), (True, 128, True), (False, 8, False)])
@passes_once(test_triton_compile, recorded)
def test_match_kernels_fit_a_multiprocessor_repeatedly(some, size, is_causal, rounds, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import launches
    from dilated_attention_pytorch.selection.kernels import block_scores as triton_selection

    wide = triton_selection.UNITS
    grouped, columns = triton_selection.matched_together(8, 32, wide, triton_selection.BLOCKS)
    rows = triton_selection.matched_rows(size)
    tiles = launches.Tiles(rows, columns, rows // 16, 3)
    constants = {"BM": tiles.m, "BN": tiles.n, "RANK": 32, "RP": 32, "UK": 8, "UG": grouped, "D": 64}
    constants |= {"SIZE": size, "IDS": some, "CAUSAL": is_causal, "HOLES": False}
    constants |= {"ROUNDS": rounds, "WHOLE": True, "PRECISION": "tf32x3", "STAGES": triton_selection.STAGES}
    constants |= dict.fromkeys(("TOGETHER", "NOISE"), is_causal and not some)
    types = SCORED | {"p_own": "*bf16", "p_table": "*fp32"}
    types |= dict.fromkeys(("p_right", "p_rest"), "*fp16")
    compiled = compile_kernel(triton_selection.match_kernel, constants, tiles, types=types)
    assert compiled.metadata.shared <= SHARED_MEMORY // 3
    assert spilled(compiled) == 0
    assert f"wgmma.mma_async.sync.aligned.m64n{wide}k16.f32.f16.f16" in compiled.asm["ptx"]
    # All products of a step are unrolled, and loads that feed no product are pipelined as well.
    loops = re.findall(r"^( *)%\S+ = scf\.for(.*?)^\1\}", compiled.asm["ttgir"], re.MULTILINE | re.DOTALL)
    copies = loops[-1][1].count("ttg.async_copy_global_to_local")
    assert copies == (128 // wide) * (1 if rounds else 2) + 2
    # The assembler takes a second for some 2500 instructions.
    assert sum(line.endswith(";") for line in compiled.asm["ptx"].splitlines()) <= 6_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wide", "rank", "holes", "rounds"), [(128, 32, False, True), (256, 32, True, False), (256, 64, False, True)]
)
@passes_once(test_triton_compile, recorded)
def test_choice_kernels_spill_little_and_fit_twice(wide, rank, holes, rounds, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import launches
    from dilated_attention_pytorch.selection.kernels import block_scores as triton_selection
    from dilated_attention_pytorch.selection.kernels import choose_blocks as triton_choice

    grouped, columns = triton_selection.matched_together(8, rank)
    narrow = wide < triton_choice.CHOSEN_AMONG
    constants = {"BM": triton_choice.CHOSEN, "BN": columns, "T": wide, "K": 32, "D": 64, "RANK": rank, "RP": rank}
    constants |= {"UK": 8, "UG": grouped, "SIZE": 128, "CAUSAL": True, "NOISE": True, "HOLES": holes, "ROUNDS": rounds}
    constants |= {"WHOLE": not holes, "FEW": narrow, "NEXT": not narrow, "AFTER": narrow}
    types = SCORED | {"p_table": "*fp32", "p_own": "*bf16", "p_right": "*fp16", "p_rest": "*fp16"}
    tiles = launches.Tiles(0, 0, 4, 3)
    compiled = compile_kernel(
        triton_choice.choice_kernel, constants | {"PRECISION": "tf32x3"}, tiles, types=types,
        maxnreg=triton_choice.NARROW_REGISTERS if narrow else None,
    )  # fmt: skip
    # Three programs per multiprocessor of the narrowest kernel and two of others, with a few spilled registers.
    assert compiled.metadata.shared <= SHARED_MEMORY // (3 if narrow else 2)
    assert spilled(compiled) <= 32
    # Rows are projected as they are.
    assert f"wgmma.mma_async.sync.aligned.m64n{rank}k16.f32.bf16.bf16" in compiled.asm["ptx"]
    assert f"griddepcontrol.{'wait' if narrow else 'launch_dependents'}" in compiled.asm["ptx"]
    # Scores [tokens, blocks] exist in the layout of the products only.
    moved = [line for line in compiled.asm["ttgir"].splitlines() if "ttg.convert_layout" in line]
    assert not any(f"tensor<64x{wide}x" in line for line in moved)
    # Words of a row are in adjacent lanes, so that the stores of a warp hit few rows.
    (layout,) = set(re.findall(rf"tt\.store .*tensor<64x{wide // 32}x!tt\.ptr<i32>, (#\w+)>", compiled.asm["ttgir"]))
    threads = f"threadsPerWarp = [{1024 // wide}, {wide // 32}]"
    assert re.search(rf"^{layout} = .*{re.escape(threads)}", compiled.asm["ttgir"], re.MULTILINE)
    assert sum(line.endswith(";") for line in compiled.asm["ptx"].splitlines()) <= 10_000


@pytest.mark.slow
@pytest.mark.parametrize(("wide", "rows", "lanes"), [(128, 8, 4), (512, 2, 16), (512, 4, 8)])
@passes_once(test_triton_compile, recorded)
def test_warps_rank_several_rows_in_few_lanes(wide, rows, lanes, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import launches
    from dilated_attention_pytorch.selection.kernels import choose_blocks as triton_choice

    constants = RANKED | {"T": wide, "BM": rows, "W": 4 * lanes, "COVERAGE": False, "width": wide, "blocks": wide}
    compiled = compile_kernel(triton_choice.rank_kernel, constants, launches.Tiles(0, 0, 1, 1), types=SCORED)
    told = compiled.asm["ttgir"]
    assert f"sizePerThread = [1, 1, 4], threadsPerWarp = [{rows}, 1, {lanes}]" in told
    # No other layout holds a score for every row and block.
    moved = [line for line in told.splitlines() if "ttg.convert_layout" in line]
    assert not any(f"tensor<{rows}x{wide}xf32" in line for line in moved)


@pytest.mark.slow
@pytest.mark.parametrize(("wide", "rows", "lanes"), [(512, 2, 16), (1024, 1, 32)])
@passes_once(test_triton_compile, recorded)
def test_ranking_kernels_leave_registers_for_many_warps(wide, rows, lanes, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import launches
    from dilated_attention_pytorch.selection.kernels import choose_blocks as triton_choice

    constants = RANKED | READY | {"T": wide, "BM": rows, "W": 4 * lanes, "width": wide}
    # The registers of 28 warps a multiprocessor, or of the most programs that it has.
    registers = triton_choice.READY_REGISTERS[int(rows > 1)]
    compiled = compile_kernel(
        triton_choice.rank_kernel, constants, launches.Tiles(0, 0, 1, 1), types=RANKABLE, maxnreg=registers
    )
    assert spilled(compiled) == 0
    # Adjacent scores are loaded as vectors of four.
    assert compiled.asm["ptx"].count("ld.global.v4") == 1024 // 128


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "warps", "constants", "types"),
    [
        ("choose_blocks", "rank_kernel", 1, RANKED | {"BM": 8, "W": 16, "COVERAGE": False}, SCORED),
        ("choose_blocks", "rank_kernel", 1, RANKED | {"BM": 4, "W": 32, "COVERAGE": True}, SCORED),
        ("choose_blocks", "rank_kernel", 1, RANKED | READY | {"BM": 1, "W": 128}, RANKABLE),
        ("choose_blocks", "rank_kernel", 4, RANKED | LONG | {"W": 512, "width": 8192, "blocks": 8192}, SCORED),
        ("choose_blocks", "rank_kernel", 4, RANKED | LONG | RAGGED, SCORED),
        ("summaries", "factor_kernel", 2, PROJECTED | ALONE | {"D": 64, "DP": 64, "UNITS": 8}, PARTS),
        ("block_mass", "block_lse_kernel", 4, LEARNED | {"BM": 64, "BMA": 64, "BN": 64, "CAUSAL": True}, MASSES),
        ("block_mass", "distill_kernel", 8, LEARNED | TAUGHT | {"T": 256, "CAUSAL": False}, MASSES),
        ("block_mass", "distill_kernel", 8, LEARNED | TAUGHT | {"T": 0, "CAUSAL": True}, MASSES),
        ("score_gradients", "own_kernel", 4, ROWS | {"BM": 32, "BH": 64, "SIZE": 1}, PARAMETERS),
        ("score_gradients", "sides_bwd_kernel", 4, ROWS | SIDES | {"HOLES": False}, PARAMETERS),
        ("score_gradients", "sides_bwd_kernel", 4, ROWS | SIDES | {"HOLES": True}, PARAMETERS),
        ("block_scores", "selecting_kernel", 4, SELECTING | {"BM": 16, "T": 256}, SCORED),
        ("block_scores", "selecting_kernel", 16, SELECTING | {"BM": 1, "T": 8192, "HOLES": True}, SCORED),
        ("score_gradients", "sums_kernel", 4, ROWS | SUMS | NO_GROUP | {"BR": 32, "SIZE": 1}, PARAMETERS),
        ("score_gradients", "mixture_kernel", 4, ROWS | SUMS, PARAMETERS),
    ],
)
@passes_once(test_triton_compile, recorded)
def test_ranking_and_learning_fit_into_registers(module, name, warps, constants, types, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from importlib import import_module

    kernel = getattr(import_module(f"dilated_attention_pytorch.selection.kernels.{module}"), name)
    stages = 3 if name == "factor_kernel" else 1
    tiles = import_module("dilated_attention_pytorch.kernels.triton.launches").Tiles(0, 0, warps, stages)
    lists = {"p_lists": "*i32"} if name == "distill_kernel" else {}
    compiled = compile_kernel(kernel, constants, tiles, types=types | lists)
    assert compiled.metadata.shared <= 65536
    assert spilled(compiled) == 0
    assert sum(line.endswith(";") for line in compiled.asm["ptx"].splitlines()) <= 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "constants"),
    [
        (128, {}),
        (128, {"CAUSAL": True}),
        (64, {"CAUSAL": True}),
        (128, {"CAUSAL": True, "LISTS": True}),
        (64, {"CAUSAL": True, "LISTS": True}),
        (32, {"LISTS": True}),
        (64, {"KEEP": True, "IDS": True, "EVEN": False}),
        (64, {"KEEP": True, "SIZE": 128, "EVEN": False, "CAUSAL": True}),
        (32, {}),
        (32, {"KEEP": True, "SIZE": 128, "IDS": True, "EVEN": False}),
    ],
)
@passes_once(test_triton_compile, recorded)
def test_hidden_units_are_vectorized_and_stay_in_registers(side, constants, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import launches
    from dilated_attention_pytorch.selection.kernels import block_scores as triton_selection

    warps, units, stages = triton_selection.HIDDEN[side]
    assert side < 32 * warps
    constants = HIDDEN | {"BM": side, "BN": side, "UM": units, "STAGES": stages} | constants
    tiles, registers = launches.Tiles(side, side, warps, 3), triton_selection.HIDDEN_REGISTERS
    kernel = triton_selection.hidden_kernel
    compiled = compile_kernel(kernel, constants, tiles, types=SCORED, maxnreg=registers)
    # 16 warps a multiprocessor.
    assert compiled.metadata.shared <= SHARED_MEMORY * warps // 16
    assert f".maxnreg {registers}" in compiled.asm["ptx"]
    # Some assemblers spill a few addresses of the largest tiles, each used once per step of a thousand instructions.
    assert spilled(compiled) <= (80 if side == 128 else 0)
    assert sum(line.endswith(";") for line in compiled.asm["ptx"].splitlines()) <= 4_500
    if stages > 1:
        # Factors of later steps are on their way to shared memory.
        assert "cp.async.wait_group" in compiled.asm["ptx"]
        return
    lines = compiled.asm["ttgir"].splitlines()
    # The first loop is over hidden units; with LISTS another counts visible blocks.
    begun = next(place for place, line in enumerate(lines) if "scf.for" in line)
    ended = next(place for place, line in enumerate(lines) if "scf.yield" in line)
    assert not any("ttg.convert_layout" in line or "ttg.local" in line for line in lines[begun:ended])
    quads = compiled.asm["ptx"].count("ld.global.v4")
    assert quads == units * (side // 32 + constants["EVEN"] * (1 + constants["KEEP"]))


IN_ROOM = dict.fromkeys(("p_indices", "p_room", "p_query_lists"), "*i32")
SIZED = {"SIZE": 128, "P": 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "warps", "constants"),
    [
        ("query_lists_kernel", 1, SIZED | {"CAUSAL": False, "RAGGED": False, "HALVES": 1}),
        ("query_lists_kernel", 4, {"SIZE": 256, "P": 2048, "CAUSAL": True, "HALVES": 2}),
        ("query_lists_kernel", 1, SIZED | {"CAUSAL": False, "RAGGED": False, "HALVES": 1, "LOCAL": 0}),
        ("key_lists_kernel", 4, {"SIZE": 128, "P": 1024, "CAUSAL": True, "HALVES": 1}),
        ("key_lists_kernel", 4, {"SIZE": 128, "P": 1024, "CAUSAL": False, "RAGGED": False, "HALVES": 1, "LOCAL": 0}),
        ("held_items_kernel", 4, {"P": 1024, "HALVES": 2}),
        ("query_lists_kernel", 1, SIZED | {"CAUSAL": False, "RAGGED": False, "HALVES": 1, "SHARED": 4}),
        ("mark_kernel", 4, {"P": 32}),
        ("mark_tokens_kernel", 8, {"P": 64, "T": 1024, "WORDS": 4}),
        ("mark_tokens_kernel", 8, {"P": 64, "T": 1024, "WORDS": 4, "SHARED": 4}),
        ("runs_kernel", 4, {"SIZE": 128, "P": 1024, "BS": 512, "BT": 8}),
        ("place_kernel", 8, {"SIZE": 128, "P": 32, "T": 256, "R": 256, "WORDS": 4}),
        ("place_kernel", 8, {"SIZE": 128, "P": 64, "T": 1024, "R": 1024, "WORDS": 4}),
    ],
)
@passes_once(test_triton_compile, recorded)
def test_kernels_around_the_ranking_are_small(name, warps, constants, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import launches
    from dilated_attention_pytorch.selection.kernels import block_lists_kernels as triton_lists
    from dilated_attention_pytorch.selection.kernels import gather_index

    rest = {"LOCAL": 2, "BY_ROW": True, "RAGGED": True, "GROUP": 2, "SHARED": 1}
    tiles = launches.Tiles(0, 0, warps, 1)
    kernel = getattr(triton_lists, name, None) or getattr(gather_index, name)
    compiled = compile_kernel(kernel, rest | constants, tiles, types=IN_ROOM)
    assert compiled.metadata.shared <= 16384
    assert spilled(compiled) == 0
    assert sum(line.endswith(";") for line in compiled.asm["ptx"].splitlines()) <= 3_000


@pytest.mark.slow
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("integers", "entries"), [("*i32", 4), ("*i64", 16), ("*i32", 51), ("*i64", 128)])
@passes_once(test_triton_compile, recorded)
def test_normal_form_stays_in_registers(integers, entries, counted, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    import torch

    from dilated_attention_pytorch.kernels.triton import launches
    from dilated_attention_pytorch.selection.kernels import normal_lists

    made = {}
    monkeypatch.setattr(normal_lists, "Launch", lambda kernel, device, *numbers, **constants: made.update(constants))
    sizes = 128, 128, 0, 1, True, True, counted, counted, *(1,) * 7
    normal_lists._normal_lists_launch(torch.device("cpu"), (1, 4, 16384, entries), *sizes)
    made |= {} if counted else {"p_many": None}
    tiles = launches.Tiles(0, 0, made["num_warps"], 1)
    types = {"p_indices": integers, "p_counts": integers, "p_lists": "*i32", "p_many": "*i32", "p_sharing": "*i1"}
    compiled = compile_kernel(normal_lists.normal_lists_kernel, made, tiles, types=types)
    assert compiled.metadata.shared <= 16384
    assert spilled(compiled) == 0
    assert sum(line.endswith(";") for line in compiled.asm["ptx"].splitlines()) <= 3_000


SUMMED = {"p_query": "*bf16", "p_key": "*bf16"} | dict.fromkeys(("p_means", "p_own", "p_summary", "p_units"), "*fp32")
SUMMED |= dict.fromkeys(("p_own_there", "p_own_visible", "p_there", "p_visible", "p_padding"), "*i1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own_unit", "width", "padding"), [(16, 64, False), (128, 64, False), (128, 128, False), (16, 80, True)]
)
@passes_once(test_triton_compile, recorded)
def test_sums_stay_in_registers_and_load_whole_lines(own_unit, width, padding, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    import torch

    from dilated_attention_pytorch.kernels.triton import launches
    from dilated_attention_pytorch.selection.kernels import summaries as triton_summaries

    made = {}
    monkeypatch.setattr(
        triton_summaries, "Launch", lambda kernel, device, *numbers, **constants: made.update(constants)
    )
    shape, apart = (1, 8, 4096, width), (4096 * 8 * width, width, 8 * width, 1)
    told = 128, own_unit, 16, True, padding, triton_summaries.ROWS, triton_summaries.ASKED
    triton_summaries._summing(torch.device("cpu"), shape, 8, apart, apart, 2, *told)
    tiles = launches.Tiles(0, 0, made["num_warps"], 3)
    compiled = compile_kernel(triton_summaries.summaries_kernel, made, tiles, types=SUMMED)
    assert compiled.metadata.shared <= 16384
    assert spilled(compiled) == 0
    ptx = compiled.asm["ptx"]
    assert ptx.count("ld.global.v4.b32") == 2 * triton_summaries.ASKED
    # A test of mean - mean would be fused with the product before rounding, so that ragged blocks seem not finite.
    assert "neg.f32" not in ptx
    # Loops have no exchange between threads, except for padding masks, and within a warp for the means to store.
    loops = re.findall(r"^( *)%\S+ = scf\.for(.*?)^\1\}", compiled.asm["ttgir"], re.MULTILINE | re.DOTALL)
    assert len(loops) == 2
    met = [line for _, body in loops for line in body.splitlines() if "tt.reduce" in line or "ttg.convert" in line]
    assert padding or not [line for line in met if "ttg.convert_layout %b_mean" not in line]
    assert sum(line.endswith(";") for line in ptx.splitlines()) <= 3_000


def test_longest_rows_are_ranked_within_a_program():
    from dilated_attention_pytorch.selection import backend
    from dilated_attention_pytorch.selection.kernels import choose_blocks as triton_choice

    assert backend.MOST_RANKED // triton_choice.MOST_RANKED <= 32


def test_lists_longer_than_32_bits_are_refused():
    import torch

    from dilated_attention_pytorch.selection.kernels.lowering import ListedBlocks

    options = 1, 128, 0, 0, False, False, 1, False
    assert ListedBlocks(torch.device("cpu"), (1, 32, 16384, 4095), *options).entries < 2**31
    with pytest.raises(ValueError, match=r"must be < 2\^31, 524288 times 4096 here, got 2147483648"):
        ListedBlocks(torch.device("cpu"), (1, 32, 16384, 4096), *options)


SIZES = (16, 32, 64, 128, 256)
GRID = [(size, 2**power) for size in SIZES for power in range(size.bit_length())]
LARGE_UNITS = [(32, 1), (128, 2), (256, 1)]
GRID_KERNELS = (
    "add_tokens_kernel", "attention_dkv_bwd_kernel", "attention_dq_bwd_kernel", "attention_fwd_kernel", "best_kernel",
    "block_lse_kernel", "choice_kernel", "chosen_bwd_kernel", "chosen_fwd_kernel", "delta_bwd_kernel", "distill_kernel",
    "factor_kernel", "hidden_kernel", "join_tokens_kernel", "key_lists_kernel", "mark_kernel", "mark_tokens_kernel",
    "match_kernel", "mixture_kernel", "own_kernel", "place_kernel", "query_lists_kernel", "rank_kernel", "runs_kernel",
    "selecting_kernel", "sides_bwd_kernel", "split_kernel", "summaries_kernel", "sums_kernel",
)  # fmt: skip
"""Kernels of the training steps over `GRID`."""


def launches(size, unit, **config):
    """Each launch of training steps by blocks and by tokens once."""
    from kernels.recorded import training_step

    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("TRITON_INTERPRET", raising=False)
        return {one for causal in (False, True) for one in training_step(patched, size, unit, causal, **config)}


@cache
def grid_launches():
    """Each launch of training steps over `GRID` once."""
    return {one for size, unit in GRID for one in launches(size, unit)}


@pytest.mark.parametrize(("size", "unit"), LARGE_UNITS)
@passes_once(test_triton_compile, recorded)
def test_score_gradients_compile_for_many_units(size, unit, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = launches(size, unit)
    assert any(one.name == "best_kernel" for one in found) == (size // unit > 128)
    for one in compile_launches(found, ("best_kernel", "sides_bwd_kernel")):
        assert spilled(one) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID_KERNELS)
@passes_once(test_triton_compile, recorded)
def test_every_score_unit_and_block_size_compiles(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = [one for one in grid_launches() if one.name == name]
    assert found
    # The assembler, which takes another third of the time, runs in the tests above only.
    for one, lowered in zip(found, lower_sources([(one.source, dict(one.options)) for one in found]), strict=True):
        assert lowered.metadata.shared <= SHARED_MEMORY, one


def test_every_kernel_of_a_training_step_is_in_the_grid():
    assert {one.name for one in grid_launches()} == set(GRID_KERNELS)


@pytest.mark.slow
@passes_once(test_triton_compile, recorded)
def test_widest_matches_of_many_units_compile(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    names = "best_kernel", "match_kernel", "own_kernel", "sides_bwd_kernel"
    compile_launches(launches(256, 1, match_rank=128), names)


GROUPED = [
    (128, 1, 16, {"heads": 64, "key_heads": 4, "match_rank": 16, "select": "group"}),
    (64, 4, 8, {"heads": 8, "key_heads": 4, "select": "all"}),
    (16, 16, 2, {"heads": 8, "key_heads": 1, "select": "group", "group_size": 2}),
]
"""Block size, score unit, heads per list; a list has all heads of one or of several key heads, or some of one."""
GROUP_KERNELS = "distill_kernel", "factor_kernel", "sums_kernel"
"""Kernels with a loop over the heads of a list."""


@pytest.mark.slow
@pytest.mark.parametrize(("size", "unit", "group", "config"), GROUPED)
@passes_once(test_triton_compile, recorded)
def test_kernels_of_shared_lists_compile(size, unit, group, config, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = launches(size, unit, **config)
    told = {one.name: dict(one.constants) for one in found}
    assert told["factor_kernel"]["GROUP"] == told["sums_kernel"]["GROUP"] == group
    assert told["distill_kernel"]["LISTED"] == told["block_lse_kernel"]["LISTED"] == group
    # Rows come projected: these kernels read no query.
    assert told["match_kernel"]["D"] == told["own_kernel"]["D"] == 0
    names = (*GROUP_KERNELS, "choice_kernel", "own_kernel") if group == 16 else GROUP_KERNELS
    for lowered in lower_sources([(one.source, dict(one.options)) for one in found if one.name in names]):
        assert lowered.metadata.shared <= SHARED_MEMORY


@pytest.mark.slow
@passes_once(test_triton_compile, recorded)
def test_loops_over_sixteen_heads_do_not_spill(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    size, unit, _, config = GROUPED[0]
    assert max(map(spilled, compile_launches(launches(size, unit, **config), GROUP_KERNELS))) == 0


@passes_once(test_triton_compile, recorded)
def test_kernels_of_lists_that_read_one_key_head_compile(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for one in compile_launches(launches(128, 1, heads=8, key_heads=2), ("factor_kernel", "sums_kernel")):
        assert spilled(one) == 0, one


def compile_launches(found, names):
    made = [*compile_sources([(one.source, dict(one.options)) for one in found if one.name in names])]
    assert max(one.metadata.shared for one in made) <= SHARED_MEMORY
    return made
