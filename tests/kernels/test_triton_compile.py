"""The Triton kernels compile for sm_90 without a GPU, within its shared memory and nearly without spilling."""

import re

import pytest
from kernels.assembler import compile_source, report
from kernels.compile_record import passes_once

SHARED_MEMORY = 232448
"""Bytes a program may have on compute capability 9.0."""
SMALL_SHARED_MEMORY = 101376
"""The same on the smaller GPUs, which run the same tiles in single precision."""
INTEGERS = ("p_work", "p_heads", "p_owners", "p_rows", "p_lists", "p_masks")
TOKENS = ("p_q_axis", "p_k_axis", "p_seed", "p_positions", "p_source", "p_tile", "p_first", "p_order", "p_place")
TOKENS += ("p_places", "p_key_places", "p_bias_sum")
FLOATS = ("p_lse", "p_delta", "p_carry", "p_sum", "p_sum_k", "p_sum_v", "p_weight", "p_part_lse", "p_listed")
FLOATS += ("p_bias", "p_bias_bad", "p_bias_unit")
NUMBERS = ("scale", "scale_log2", "cap_scale", "inverse_keep", "coverage", "root")
PLAIN = dict.fromkeys(
    ("STRIDED", "PER_HEAD", "BOUNDED", "BITS", "PADDING", "DROPOUT", "POSITIONS", "CONTAIN", "SPLIT", "MIXED"),
    False,
)
CAP = ("cap_scale",)
BIAS = ("p_bias", "bias_size", "p_bias_sum", "p_bias_bad", "p_bias_unit")
ONE_AXIS = (*BIAS, "p_places", "s_places")
BIAS_BY_PLACE = (*ONE_AXIS, "bias_columns")
BIAS_BY_HEAD = (*BIAS_BY_PLACE, "p_key_places")
SINK = ("p_sink",)
PLAIN |= dict.fromkeys(CAP + BIAS_BY_HEAD + SINK)
ENDS = dict.fromkeys(("CARRY_IN", "CARRY_OUT", "SUM_IN", "SUM_OUT"), False)


def type_of(name, rows="*bf16"):
    if name in NUMBERS:
        return "fp32"
    if not name.startswith("p_"):
        return "i32"
    if name in INTEGERS:
        return "*i32"
    if name in TOKENS:
        return "*i64"
    return "*fp32" if name in FLOATS or name.startswith("p_piece") else "*u8" if name == "p_padding" else rows


def compile_kernel(kernel, constants, tiles, rows="*bf16", types=None, **more):
    from triton.compiler import ASTSource

    from dilated_attention_pytorch.kernels.launch.launcher import OPTIONS
    from dilated_attention_pytorch.kernels.triton import launches

    names = kernel.arg_names
    precision = "tf32x3" if rows == "*fp32" else "ieee"
    constants = {"SIGN": 1, "CAREFUL": launches.CAREFUL, "PRECISION": precision} | constants
    known = {name: value for name, value in constants.items() if name in names}
    known |= {name: 1 for name in ("q_rate", "k_rate", "group") if name in names}
    types = {name: type_of(name, rows) for name in names} | (types or {})
    signature = {name: "constexpr" if name in known else types[name] for name in names}
    even = [
        name for name in names if name not in known and (name.startswith("p_") or "_length" in name or name[2:3] == "_")
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in even if name not in NUMBERS}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in known.items()}, attributes)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages} | OPTIONS | more
    return compile_source(source, options)


def spilled(compiled):
    """Bytes of stack, as the assembler reports them."""
    return int(re.search(r"(\d+) bytes stack frame", report(compiled)).group(1))


def compile_named(name, d, table, rows="*bf16", features=(), **flags):
    """One of the three kernels with its own tiles, for a plan of one part with partial tiles.

    `features` are arguments that are None otherwise.
    """
    from dilated_attention_pytorch.kernels.triton import backward_kernels as triton_backward
    from dilated_attention_pytorch.kernels.triton import forward_kernels as triton_forward

    kernel = {
        "forward": triton_forward.attention_fwd_kernel,
        "dq": triton_backward.attention_dq_bwd_kernel,
        "dkv": triton_backward.attention_dkv_bwd_kernel,
    }[name]
    tiles = getattr(table[d], name)
    sizes = {"BLOCK": 128, "BM": tiles.m, "BN": tiles.n, "D": d, "E": d, "DP": d, "EP": d, "GROUP": 1, "PARTIAL": True}
    strides = dict.fromkeys(("SK_N", "SV_N", "SQ_N", "SG_N"), d)
    constants = PLAIN | ENDS | sizes | strides | flags
    constants = {name: value for name, value in constants.items() if name not in features}
    return compile_kernel(kernel, constants, tiles, rows)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["forward", "dq", "dkv"])
@passes_once()
def test_kernel_fits_a_multiprocessor(name, d, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import launches

    compiled = compile_named(name, d, launches.HALF)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert "wgmma" in compiled.asm["ptx"]
    # The forward of width 128 spills on purpose: two small programs a multiprocessor overlap better than one large.
    assert spilled(compiled) <= (256 if (name, d) == ("forward", 128) else 128)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "rows"), [(64, "*bf16"), (128, "*bf16"), (256, "*bf16"), (64, "*fp32")])
@pytest.mark.parametrize("name", ["forward", "dq", "dkv"])
@pytest.mark.parametrize(
    "features",
    [CAP, BIAS, CAP + BIAS_BY_PLACE, CAP + BIAS_BY_HEAD],
    ids=["cap", "bias", "cap-places", "cap-places-by-head"],
)
@passes_once()
def test_kernels_with_scores_changed_fit(name, d, rows, features, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import launches

    table, room = (launches.HALF, SHARED_MEMORY) if rows == "*bf16" else (launches.SINGLE, SMALL_SHARED_MEMORY)
    sizes = table[d].with_bias(d, by_position="p_places" in features) if "p_bias" in features else table[d]
    compiled = compile_named(name, d, {d: sizes}, rows, features)
    assert compiled.metadata.shared <= room
    assert bool(re.search(r"\b(red|atom)\.", compiled.asm["ptx"])) == ("p_bias" in features and name == "dq")
    assert spilled(compiled) <= 512


@pytest.mark.parametrize("features", [ONE_AXIS, (*ONE_AXIS, "p_key_places")], ids=["for all heads", "by head"])
@pytest.mark.parametrize("name", ["forward", "dq", "dkv"])
@passes_once()
def test_kernels_with_positions_on_one_axis_compile(name, features, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import launches

    sizes = {64: launches.HALF[64].with_bias(64, by_position=True)}
    assert spilled(compile_named(name, 64, sizes, "*bf16", features, GROUP=4 if name == "dkv" else 1)) <= 512


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@passes_once()
def test_forward_with_a_sink_fits(d, split, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import launches

    compiled = compile_named("forward", d, launches.HALF, "*bf16", SINK, SPLIT=split)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert spilled(compiled) <= (256 if d == 128 else 128)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "d"), [("forward", 64), ("dkv", 128)])
@passes_once()
def test_float32_kernels_are_small_enough_to_compile_quickly(name, d, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import launches

    compiled = compile_named(name, d, launches.SINGLE, "*fp32")
    assert compiled.metadata.shared <= SMALL_SHARED_MEMORY
    # The assembler takes a second for some 2500 instructions.
    assert sum(line.endswith(";") for line in compiled.asm["ptx"].splitlines()) <= 10_000
    assert "mma" in compiled.asm["ptx"]


PACKED = {
    "windows": dict.fromkeys(("STRIDED", "PER_HEAD", "BOUNDED"), True),
    "lists": dict.fromkeys(("PER_HEAD", "BOUNDED", "BITS", "MIXED"), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("name", ["forward", "dq", "dkv"])
@passes_once()
def test_kernels_of_packed_documents_fit_a_multiprocessor(name, packed, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import launches

    compiled = compile_named(name, 64, launches.HALF, **PACKED[packed])
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert "wgmma" in compiled.asm["ptx"]
    assert spilled(compiled) <= 192


@pytest.mark.slow
@passes_once()
def test_bit_masks_compile_in_single_precision(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dilated_attention_pytorch.kernels.triton import forward_kernels as triton_forward
    from dilated_attention_pytorch.kernels.triton import launches

    tiles = launches.SINGLE[64].forward.within(16)
    sizes = {"BLOCK": 16, "BM": tiles.m, "BN": tiles.n, "D": 16, "E": 16, "DP": 16, "EP": 16, "PARTIAL": True}
    constants = PLAIN | ENDS | sizes | {"SK_N": 16, "SV_N": 16, "BITS": True}
    compiled = compile_kernel(triton_forward.attention_fwd_kernel, constants, tiles, "*fp32")
    assert compiled.metadata.shared <= SHARED_MEMORY
