"""The Hopper kernels compile for sm_90a within the registers and shared memory of a multiprocessor, without spills.

No GPU is needed. Work items are checked against the plan.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from kernels.compile_record import passes_once

from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.kernels.hopper.layouts import boxes_of, shared_registers, tile_layout
from dilated_attention_pytorch.kernels.hopper.lowering import GROUP, Strides, balanced, is_regular, lower
from dilated_attention_pytorch.kernels.launch import triton_abi
from dilated_attention_pytorch.kernels.launch.launcher import OPTIONS
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import Axis, make_plan

SHARED_MEMORY = {1: 232448, 2: 115712}
"""Bytes a program may have on compute capability 9.0, by the number of programs that share a multiprocessor."""


def compile_kernel(kernel, types, constants, **options):
    triton = pytest.importorskip("triton")
    from kernels.assembler import compile_source
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    given = [name for name in ("p_out",) if name in kernel.arg_names and name not in constants]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in given}
    source = GluonASTSource(kernel, signature, places, aligned)
    try:
        return compile_source(source, OPTIONS | options)
    except (AttributeError, TypeError, NotImplementedError) as problem:
        pytest.skip(f"the Gluon language of triton {triton.__version__} differs: {problem}")


def ways(listing):
    """Basic blocks of a kernel's listing, lines of each, and which may follow each."""
    blocks, at, tables = [[]], {}, {}
    body = listing[listing.index(".entry") :] if ".entry" in listing else listing
    for name, places in re.findall(r"(\$L_brx_\d+): \.branchtargets(.*?);", body, re.DOTALL):
        tables[name] = re.findall(r"\$L__BB\d+_\d+", places)
    for line in map(str.strip, body.splitlines()):
        if label := re.match(r"(\$L__BB\d+_\d+):", line):
            at[label[1]] = len(blocks)
            blocks.append([])
            continue
        blocks[-1].append(line)
        if re.match(r"(@!?%p\d+\s+)?(bra|brx|ret)\b", line):
            blocks.append([])
    after = [{here + 1} if here + 1 < len(blocks) else set() for here in range(len(blocks))]
    for here, lines in enumerate(blocks):
        last = lines[-1] if lines else ""
        if re.match(r"(bra|brx|ret)\b", last):
            after[here] = set()
        if jump := re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\d+_\d+)", last):
            after[here].add(at[jump[1]])
        if jump := re.search(r"\bbrx\.idx.*?(\$L_brx_\d+)", last):
            after[here] |= {at[name] for name in tables[jump[1]]}
    return blocks, after


def unordered_signals(listing):
    """Signals by one thread after accesses to shared memory that, on some path, no barrier orders for other threads."""
    blocks, after = ways(listing)
    found, loose_at, waiting = {}, {0: False}, [0]
    while waiting:
        here = waiting.pop()
        loose = loose_at[here]
        for line in blocks[here]:
            if re.search(r"bar\.sync|bar\.warp\.sync|barrier\.sync", line):
                loose = False
            elif re.search(r"(ld|st)\.shared|(ld|st)matrix", line):
                loose = True
            elif "mbarrier.arrive" in line and loose:
                found[line] = None
        for place in after[here]:
            if place not in loose_at or loose > loose_at[place]:
                loose_at[place] = loose
                waiting.append(place)
    return list(found)


def assert_fits(compiled, spilled, programs=1):
    from kernels.assembler import report

    assert not unordered_signals(compiled.asm["ptx"])
    log = report(compiled)
    # A reload per row costs nothing.
    assert int(re.search(r"(\d+) bytes spill loads", log).group(1)) <= spilled, log
    assert "serialized" not in log, log
    assert int(re.search(r"Used (\d+) registers", log).group(1)) <= {1: 168, 2: 128}[programs]
    assert compiled.metadata.shared <= SHARED_MEMORY[programs]


def descriptor(rows, d, dtype, rank):
    layout = tile_layout(rows, d, dtype, rank)
    return f"tensordesc<{'bf16' if dtype == torch.bfloat16 else 'fp16'}[{'1,' * (rank - 2)}{rows},{d}],{layout!r}>"


@pytest.fixture(autouse=True)
def needs_gluon():
    reason = hopper_backend.gluon_missing()
    if reason is not None:
        pytest.skip(reason)


def test_unordered_signals_are_detected():
    written, signal = "st.shared.b32 [%r1], %r2;", "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 64;"
    assert unordered_signals(f"{written}\n{signal}") == [signal]
    assert unordered_signals(f"{written}\nbar.warp.sync -1;\n{signal}") == []
    # In a loop an access after the signal precedes the next signal.
    begin, end = "bra.uni $L__BB0_1;\n$L__BB0_1:", "@%p2 bra $L__BB0_1;\nret;"
    assert unordered_signals(f"{begin}\n{signal}\n{written}\n{end}") == [signal]
    assert unordered_signals(f"{begin}\nbar.warp.sync -1;\n{signal}\n{written}\n{end}") == []


# A strided part spills addresses once per row, and at width 128 the producer spills values of an item.
@pytest.mark.parametrize(
    ("d", "block", "dtype", "kind", "spilled"),
    [
        (64, 128, torch.bfloat16, "plain", 4),
        (128, 128, torch.bfloat16, "plain", 4),
        (128, 256, torch.float16, "plain", 4),
        (128, 128, torch.bfloat16, "split", 4),
        (64, 128, torch.bfloat16, "run of rows", 4),
        (64, 128, torch.bfloat16, "strided", 64),
        (128, 128, torch.bfloat16, "strided", 256),
        (128, 128, torch.bfloat16, "strided unevenly", 320),
        (64, 128, torch.bfloat16, "strided, narrow rows", 64),
        (128, 128, torch.bfloat16, "strided unevenly, narrow rows, run of rows", 320),
        (64, 128, torch.bfloat16, "plain padded", 64),
        (128, 128, torch.bfloat16, "plain padded", 64),
        (128, 256, torch.float16, "split padded", 64),
        (64, 128, torch.bfloat16, "plain with sink", 4),
        (128, 128, torch.bfloat16, "plain with sink", 4),
        (64, 128, torch.bfloat16, "strided padded", 64),
        (128, 128, torch.bfloat16, "strided unevenly padded", 320),
        *((128, 64, torch.bfloat16, kind, 16) for kind in ("plain", "split", "plain padded")),
        (128, 64, torch.bfloat16, "strided", 16),
        (128, 64, torch.bfloat16, "strided unevenly padded, narrow rows, run of rows", 64),
    ],
)
@passes_once(triton_abi)
def test_forward_fits_a_multiprocessor(d, block, dtype, kind, spilled, monkeypatch):
    from dilated_attention_pytorch.kernels.hopper.forward_kernel import attention_fwd_kernel

    strided = kind.startswith("strided")
    query = torch.empty(1, 1, 1, d)
    call = AttentionCall(query, query, query, SimpleNamespace(block_size=block), 1.0)
    config = hopper_backend.config_of(call, strided)
    rank = 5 if strided else 4
    rows, keys = descriptor(64, d, dtype, rank), descriptor(config.key_tile, d, dtype, rank)
    types = dict.fromkeys(("p_work", "p_full", "p_partial", "p_tiles", "p_bits", "p_next"), "*i32")
    types |= dict.fromkeys(("items", "items_a_batch", "heads", "group", "n", "o_batch", "o_head", "o_row"), "i32")
    types |= {"o_columns": "i32", "n_keys": "i32"}
    types |= dict.fromkeys(("q_rate", "q_longer", "k_rate", "k_longer"), "i32") | {"p_lse": "*fp32", "scale": "fp32"}
    types |= {"q_desc": rows, "k_desc": keys, "v_desc": keys, "o_desc": rows, "p_out": "*bf16"}
    types |= {"q_more": rows, "k_more": keys, "v_more": keys, "o_more": rows, "p_padding": "*u8", "p_sink": "*bf16"}
    optional = {"p_padding": "padded", "p_sink": "sink", "o_columns": "narrow", "n_keys": "run"}
    missing = [] if "unevenly" in kind else ["q_more", "k_more", "v_more", "o_more"]
    missing += ["p_out"] * (not strided) + [name for name, word in optional.items() if word not in kind]
    constants = dict.fromkeys(missing) | {
        "BLOCK": block,
        "K_STAGES": config.k_stages,
        "V_STAGES": config.v_stages,
        "PING_PONG": config.ping_pong,
        "DYNAMIC": config.persistent,
        "SPLIT": kind.startswith("split"),
        "WORKER_REGISTERS": config.registers,
    }
    compiled = compile_kernel(attention_fwd_kernel, types, constants, **shared_registers(config.programs))
    assert_fits(compiled, spilled, config.programs)
    # Rows of any width are stored 16 bytes at a time; other stores write LSE and counters.
    assert bool(re.search(r"st\.global\.v4", compiled.asm["ptx"])) == strided
    assert not re.search(r"st\.global(\.v2)?\.b16|st\.global\.v2", compiled.asm["ptx"])
    if triton_abi.entry_class() is triton_abi.SignatureEntry:
        assert_launcher_is_known_ahead(compiled, monkeypatch)


def assert_launcher_is_known_ahead(compiled, monkeypatch):
    """The launcher source prepared during compilation equals the one that Triton requests afterwards."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    asked = []

    def note(src, **_):
        asked.append(src)
        return SimpleNamespace(launch=None)

    monkeypatch.setattr(nvidia, "compile_module_from_src", note)
    monkeypatch.setattr(nvidia, "library_dirs", list)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(launcher_cls=nvidia.CudaLauncher))
    triton_abi.make_launcher(compiled.src)
    nvidia.CudaLauncher(compiled.src, compiled.metadata)
    assert len(asked) == 2 and asked[0] == asked[1]


def met_by_query(step, plan):
    """Multiplicity of every pair of a part, written out from the records the kernel reads."""
    work, block, n = step.by_query, plan.block_size, plan.n
    dense = torch.zeros(plan.heads, n, n, dtype=torch.int32)
    masks = plan.masks.dense(block).int()
    for head, place, full_begin, full, full_base, partial_begin, partial, partial_base, *rest in work.items.tolist():
        held = place * step.item_rows
        rows, offset = rest or (min(step.item_rows, n - held), 0)
        first, o_row = (place, 0) if step.strided else (held, held % block)
        query = first + step.queries.rate * torch.arange(rows)
        met = [(full_base + entry, None) for entry in work.full[full_begin : full_begin + full].tolist()]
        for entry, mask, low, high in work.partial[partial_begin : partial_begin + partial].tolist():
            seen = masks[mask, o_row : o_row + rows]
            if low <= high:
                difference = torch.arange(block) - torch.arange(rows)[:, None] - o_row
                assert torch.equal(seen.bool(), (difference >= low) & (difference <= high))
            met.append((partial_base + entry, seen))
        for tile, seen in met:
            start, end = work.tiles[tile].tolist()
            key = start + offset + step.keys.rate * torch.arange(block)
            exist = key < end
            assert seen is not None or bool(exist.all())
            seen = torch.ones(rows, block, dtype=torch.int32) if seen is None else seen
            dense[head, query[:, None], key[exist]] += seen[:, exist]
    return dense


PATTERNS = [
    "causal",
    "window:200",
    "random:0.3;block=128;seed=1;per_head=1 & causal",
    "global:64 | window:100",
    "blocks:0,,1 2,,4;block=128",
    "dilated:128x1,256x2,640x5 & causal",
    "dilated:300x3,200x1",
    "dilated:128x1,256x2;heads=split;offset=block",
    "documents:130,1,300,209 & causal",
    "heads{window:40 / dilated:256x4 / causal}",
]


@pytest.mark.parametrize(
    ("pattern", "block"), [(p, b) for p in PATTERNS for b in (64, 128)] + [(p, 256) for p in PATTERNS[:5]]
)
def test_work_records_are_the_plan(pattern, block):
    plan = make_plan(parse(pattern), 640, 3, block_size=block)
    steps = lower(plan)
    assert torch.equal(sum(met_by_query(step, plan) for step in steps), plan.to_dense())
    assert not any(not step.strided for step in steps[1:])
    for step in steps:
        rows = {(head, place) for head, place, *_ in step.by_query.items.tolist()}
        assert len(rows) == len(step.by_query.items)
        assert step.strided or step.by_query.covers == (len(rows) == 3 * 640 // step.item_rows)


def test_a_part_that_writes_every_row_runs_first():
    steps = lower(make_plan(parse("dilated:512x4,256x2,128x1"), 1024, 4))
    assert [(step.strided, step.queries.rate) for step in steps] == [(False, 1), (True, 4), (True, 2)]


@pytest.mark.parametrize(("n", "rate"), [(640, 5), (641, 5), (999, 12), (7, 12)])
def test_strided_boxes_hold_every_token_once_and_nothing_else(n, rate):
    tensor = torch.arange(2 * 3 * n * 8).view(2, n, 3, 8).transpose(1, 2)
    axis = Strides(rate, n % rate)
    short, long = boxes_of(tensor, axis)
    held = []
    for box, first, residues in ((long, 0, axis.longer), (short, axis.longer, rate - axis.longer)):
        # Without a whole round of residues the short ones have no row, and their box is not used.
        residues = residues if first == 0 or n >= rate else 0
        assert (box is None) == (residues == 0) or box.shape[2] == residues or n < rate
        for residue in range(residues if box is not None else 0):
            for row in range(box.shape[3]):
                token = first + residue + rate * row
                place = strides_sum(box, 1, 2, residue, row) + box.begin // tensor.element_size()
                assert tensor[0, 0, 0, 0] + place == tensor[1, 2, token, 0]
                held.append(token)
    assert sorted(held) == list(range(n))


def strides_sum(box, *place):
    return sum(stride * at for stride, at in zip(box.strides, place, strict=False))


@pytest.mark.parametrize("rank", [4, 5])
@pytest.mark.parametrize(("rows", "d"), [(128, 128), (64, 128), (128, 64), (64, 64)])
def test_rows_of_swizzled_tiles_are_contiguous(rows, d, rank):
    """`zero_rows` writes the rows of padded keys without regard to the order inside 128 bytes."""
    libtriton = pytest.importorskip("triton._C.libtriton")
    context = libtriton.ir.context()
    libtriton.ir.load_dialects(context)
    builder = libtriton.gluon_ir.GluonOpBuilder(context)
    if not hasattr(builder, "to_linear_layout"):
        pytest.skip("this release of triton prints no layouts")
    layout = tile_layout(rows, d, torch.bfloat16, rank)._to_ir(builder)
    bases = builder.to_linear_layout(layout, [*(1,) * (rank - 2), rows, d]).offset_bases
    for offset in (1, 2, 7, 63, 64, 65, 8 * 64 + 3, rows * d - 1):
        place = [0] * rank
        for bit, base in enumerate(bases):
            place = [a ^ (b * (offset >> bit & 1)) for a, b in zip(place, base, strict=True)]
        line = offset // 64
        assert place[-2] == line % rows and place[-1] // 64 == line // rows


def test_only_gpus_are_supported():
    plan = make_plan(parse("causal"), 256, 2, block_size=128)
    query, key, value = (torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3))
    assert hopper_backend.why_not(AttentionCall(query, key, value, plan, 0.125)) == "needs a CUDA tensor, got cpu"


@pytest.mark.parametrize(
    ("d", "e", "scale", "reason"),
    [
        (64, 64, 0.125, None),
        (96, 96, 0.1, None),
        (8, 128, 0.1, None),
        (80, 40, -0.1, None),
        (128, 128, 0.0, None),
        (20, 64, 0.1, "needs query and value widths that are multiples of 8 up to 128, got 20 and 64"),
        (64, 136, 0.1, "needs query and value widths that are multiples of 8 up to 128, got 64 and 136"),
    ],
)
def test_supported_widths_and_scales_are_stated(d, e, scale, reason, monkeypatch):
    monkeypatch.setattr(hopper_backend, "device_problem", lambda device: None)
    plan = make_plan(parse("causal"), 256, 2, block_size=128)
    query, key, value = (torch.zeros(1, 2, 256, width, dtype=torch.bfloat16) for width in (d, d, e))
    assert hopper_backend.why_not(AttentionCall(query, key, value, plan, scale)) == reason


def test_axis_with_an_offset_of_a_head_is_not_regular():
    start = torch.arange(2) * 128
    shifted, plain = (
        Axis(1, torch.tensor([0, offset], dtype=torch.int32), start.clone(), torch.full_like(start, 384))
        for offset in (128, 0)
    )
    assert is_regular(plain, 128, 384)
    assert not is_regular(shifted, 128, 384)


def test_heavy_items_start_first_and_neighbours_together():
    items = torch.arange(4000)[:, None]
    work = torch.arange(1, 9).repeat(500)
    started = balanced(items, work)[:, 0]
    assert torch.equal(started.sort().values, items[:, 0].int())
    # Number of items with the work of a group; no item leaves its group.
    size = GROUP * 8 * len(work) // int(work.sum())
    assert int((started - items[:, 0]).abs().max()) <= size
    last = work[started[-size // 2 :]]
    assert int(work[started[-size:]].max()) == 8 and int(last.max()) <= 5 and int(last[-1]) == 1


def test_equally_heavy_items_keep_their_order():
    work = torch.full((4000,), 4)
    items = torch.arange(len(work))[:, None]
    assert torch.equal(balanced(items, work), items.int())
    work[[7, 2000]] = 100
    first = torch.tensor([7, 2000])
    rest = items[torch.isin(items[:, 0], first, invert=True)]
    assert torch.equal(balanced(items, work), torch.cat((first[:, None], rest)).int())
