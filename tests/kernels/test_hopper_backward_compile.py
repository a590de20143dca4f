"""The Hopper backward kernels compile for sm_90a without a GPU: within the registers and shared memory of a
multiprocessor, and with their products left asynchronous. The lists the host prepares are checked against the plan."""

import re
from types import SimpleNamespace

import pytest
import torch
from kernels import test_hopper_compile
from kernels.compile_record import passes_once
from kernels.test_hopper_compile import SHARED_MEMORY, unordered_signals

from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.kernels.hopper import backward as hopper_gradients
from dilated_attention_pytorch.kernels.hopper.layouts import shared_registers, tile_layout
from dilated_attention_pytorch.kernels.hopper.lowering import lower
from dilated_attention_pytorch.kernels.launch.launcher import OPTIONS
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan

ALIGNED = ("p_delta", "p_sum", "p_dq", "p_dk", "p_dv", "p_q", "p_do", "p_part")
POINTERS = ("p_work", "p_class", "p_walk", "p_whole", "p_partial", "p_tiles", "p_bits", "p_next")
POINTERS += ("p_source", "p_first", "p_order", "p_turns")
OPTIONAL = {"p_dq": "joining", "dq_columns": "narrow", "n_keys": "run", "p_turns": "in turns", "p_padding": "padded"}
"""Arguments that only some kinds of kernel take."""
NUMBERS = (
    *("items", "items_a_batch", "heads", "group", "query_tiles", "sum_tiles", "key_blocks", "query_blocks", "n"),
    *("q_rate", "q_longer", "k_rate", "k_longer", "dq_columns", "n_keys"),
    *("rows", "blocks", "key_tiles", "first_head", "sq_b", "sq_h", "sq_n", "sg_b", "sg_h", "sg_n"),
)


@pytest.fixture(autouse=True)
def needs_gluon():
    reason = hopper_backend.gluon_missing()
    if reason is not None:
        pytest.skip(reason)


def assemble(kernel, descriptors, constants, programs=1):
    """A compiled kernel and the assembler's report on it."""
    triton = pytest.importorskip("triton")
    from kernels.assembler import compile_source, report
    from triton.experimental.gluon._runtime import GluonASTSource

    types = dict.fromkeys(POINTERS, "*i32") | dict.fromkeys(NUMBERS, "i32") | descriptors
    types |= dict.fromkeys(("p_lse", "p_delta", "p_sum"), "*fp32") | dict.fromkeys(("scale", "scale_log2"), "fp32")
    types |= dict.fromkeys(("p_dq", "p_dk", "p_dv", "p_q", "p_do", "p_part"), "*bf16") | {"p_padding": "*u8"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    given = [name for name in ALIGNED if name in names and name not in constants]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in given}
    source = GluonASTSource(kernel, signature, places, aligned)
    try:
        compiled = compile_source(source, OPTIONS | shared_registers(programs))
    except (AttributeError, TypeError, NotImplementedError) as problem:
        pytest.skip(f"the Gluon language of triton {triton.__version__} differs: {problem}")
    return compiled, report(compiled)


def descriptor(rows, d, dtype, rank):
    layout = tile_layout(rows, d, dtype, rank)
    return f"tensordesc<{'bf16' if dtype == torch.bfloat16 else 'fp16'}[{'1,' * (rank - 2)}{rows},{d}],{layout!r}>"


def without(kernel, kind):
    """Arguments that a kind of kernel does not take."""
    missing = [name for name in kernel.arg_names if name.endswith("_more") and "strided" not in kind]
    return dict.fromkeys(missing + [name for name in kernel.arg_names if OPTIONAL.get(name, "") not in kind])


def config_for(d, block):
    query = torch.empty(1, 1, 1, d)
    return hopper_gradients.config_of(AttentionCall(query, query, query, SimpleNamespace(block_size=block), 1.0))


def assert_fits(compiled, log, spilled, programs=1):
    assert not unordered_signals(compiled.asm["ptx"])
    assert "serialized" not in log, log
    assert int(re.search(r"Used (\d+) registers", log).group(1)) <= {1: 168, 2: 128}[programs]
    assert int(re.search(r"(\d+) bytes spill stores", log).group(1)) <= spilled, log
    assert compiled.metadata.shared <= SHARED_MEMORY[programs]


# Spilled are addresses of an item and, at width 64, masked weights, but no value of a step without a mask.
@pytest.mark.parametrize(
    ("d", "block", "dtype", "fused", "kind", "spilled"),
    [
        (64, 128, torch.bfloat16, True, "plain", 256),
        (128, 128, torch.bfloat16, True, "plain", 96),
        (128, 256, torch.float16, True, "plain", 96),
        (64, 128, torch.bfloat16, False, "plain", 320),
        (128, 128, torch.bfloat16, False, "plain", 96),
        (128, 128, torch.bfloat16, False, "split", 96),
        (64, 128, torch.bfloat16, True, "run of rows", 256),
        (128, 128, torch.bfloat16, False, "run of rows", 96),
        (64, 128, torch.bfloat16, True, "strided", 320),
        (128, 128, torch.bfloat16, False, "strided", 224),
        (64, 128, torch.bfloat16, True, "plain in turns", 256),
        (128, 128, torch.bfloat16, True, "plain in turns", 96),
        (128, 128, torch.bfloat16, True, "split in turns", 96),
        (128, 128, torch.bfloat16, True, "strided in turns", 224),
        (64, 128, torch.bfloat16, True, "plain padded", 256),
        (128, 128, torch.bfloat16, True, "plain padded", 96),
        (64, 128, torch.bfloat16, False, "plain padded", 320),
        (128, 128, torch.bfloat16, False, "split padded", 96),
        (128, 128, torch.bfloat16, True, "strided padded", 320),
        (128, 128, torch.bfloat16, False, "strided padded", 224),
        *((128, 64, torch.bfloat16, False, kind, 96) for kind in ("plain", "split padded, run of rows")),
        (128, 64, torch.float16, False, "strided padded", 224),
    ],
)
@passes_once(test_hopper_compile)
def test_key_gradients_fit_a_multiprocessor(d, block, dtype, fused, kind, spilled):
    from dilated_attention_pytorch.kernels.hopper.dkv_kernel import attention_dkv_bwd_kernel

    rank = 5 if "strided" in kind else 4
    config = config_for(d, block)
    streamed, held = descriptor(config.streamed_tile, d, dtype, rank), descriptor(64, d, dtype, rank)
    descriptors = dict.fromkeys(("q_desc", "q_more", "do_desc", "do_more"), streamed)
    descriptors |= dict.fromkeys(("k_desc", "k_more", "v_desc", "v_more"), held)
    descriptors |= dict.fromkeys(("dk_desc", "dk_more", "dv_desc", "dv_more"), held)
    constants = {
        "BLOCK": block,
        "STAGES": config.stages if fused else config.stages_by_rows,
        "KV_STAGES": config.held_stages,
        "DQ": fused,
        "SPLIT": "split" in kind,
        **without(attention_dkv_bwd_kernel, kind),
        "WORKER_REGISTERS": config.registers,
    }
    compiled, log = assemble(attention_dkv_bwd_kernel, descriptors, constants, config.programs)
    assert_fits(compiled, log, spilled, config.programs)
    # The sum of dQ is fast only while every addition moves 16 bytes.
    assert ("add.v4.f32" in compiled.asm["ptx"]) == fused
    assert ("cp.reduce.async.bulk.tensor.5d" in compiled.asm["ptx"]) == ("strided" in kind)
    if "in turns" in kind:
        assert_adds_in_turns(compiled.asm["ptx"])


def assert_adds_in_turns(ptx):
    """Every addition to dQ is between the barrier of its turn and the barrier of the count, which have no other use."""
    words = r"bar(?:rier)?\.\w+ (?:13|14|15)\b|add\.v4\.f32|ld\.acquire\.gpu|red\.release\.gpu"
    found = "".join(f"{word} " for word in re.findall(words, ptx))
    for turn in (13, 14):
        piece = f"bar.sync {turn} {'add.v4.f32 ' * 8}bar.arrive 15 "
        assert found.count(piece) == 2
        found = found.replace(piece, "")
    assert found == "ld.acquire.gpu bar.arrive 13 bar.arrive 14 bar.sync 15 red.release.gpu "


@pytest.mark.parametrize(
    ("d", "block", "kind", "spilled"),
    [
        (64, 128, "plain", 288),
        *((128, 128, kind, 16) for kind in ("plain", "split", "strided", "joining", "joining strided")),
        (128, 128, "joining strided, narrow rows", 16),
        (64, 128, "joining, narrow rows, run of rows", 288),
        (64, 128, "plain padded", 288),
        *((128, 128, f"{kind} padded", 16) for kind in ("plain", "split", "joining strided")),
        *((128, 64, kind, 16) for kind in ("plain", "split padded", "joining strided, narrow rows")),
    ],
)
@passes_once(test_hopper_compile)
def test_query_gradient_fits_a_multiprocessor(d, block, kind, spilled):
    from dilated_attention_pytorch.kernels.hopper.dq_kernel import attention_dq_bwd_kernel

    config = config_for(d, block)
    rank = 5 if "strided" in kind else 4
    streamed, held = (descriptor(rows, d, torch.bfloat16, rank) for rows in (config.streamed_tile, 64))
    descriptors = dict.fromkeys(("k_desc", "k_more", "v_desc", "v_more"), streamed)
    descriptors |= dict.fromkeys(("q_desc", "q_more", "do_desc", "do_more", "dq_desc", "dq_more"), held)
    constants = {
        "BLOCK": block,
        "STAGES": config.row_stages,
        "Q_STAGES": config.held_stages,
        "SPLIT": "split" in kind,
        **without(attention_dq_bwd_kernel, kind),
        "WORKER_REGISTERS": config.registers,
    }
    compiled, log = assemble(attention_dq_bwd_kernel, descriptors, constants, config.programs)
    assert_fits(compiled, log, spilled, config.programs)
    # By address it reads dQ only to join it, once the launches that added to it have ended.
    ptx = compiled.asm["ptx"]
    reads = [place.start() for place in re.finditer(r"ld\.global\.v4", ptx)]
    assert bool(reads) == ("joining" in kind)
    assert not re.search(r"(ld|st)\.global(\.v2)?\.b16|(ld|st)\.global\.v2", ptx)
    assert not reads or "griddepcontrol.wait" in ptx[ptx.rindex("wgmma.commit_group", 0, reads[0]) : reads[0]]


@pytest.mark.parametrize(("d", "spilled"), [(64, 320), (128, 224)])
@passes_once(test_hopper_compile)
def test_gradients_of_gathered_queries_fit_a_multiprocessor(d, spilled):
    from dilated_attention_pytorch.selection.kernels import hopper_gathered
    from dilated_attention_pytorch.selection.kernels.hopper_gathered_kernel import chosen_bwd_kernel

    config = hopper_gathered.CONFIGS[d]
    names = [name for name in chosen_bwd_kernel.arg_names if name.endswith("_desc")]
    descriptors = dict.fromkeys(names, descriptor(64, d, torch.bfloat16, 4))
    constants = dict(zip(("BM", "STAGES", "WORKER_REGISTERS", "LOADER_REGISTERS"), config, strict=True))
    constants |= {"BLOCK": hopper_gathered.BLOCK, **without(chosen_bwd_kernel, "plain")}
    compiled, log = assemble(chosen_bwd_kernel, descriptors, constants)
    assert_fits(compiled, log, spilled)
    # Rows are loaded and stored 16 bytes at a time.
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"cp\.async\.cg\.shared\.global \[.*\], 0x10", ptx)) == 2 * config.tile * d // 8 // 128
    assert not re.findall(r"st\.global\.(?!v4)", ptx)


def meetings(step, plan, group, *, by_key):
    """Multiplicity of every pair of a part, written out from the records the kernels read."""
    block, n = plan.block_size, plan.n
    work = step.backward_items(group, by_key=by_key)
    held, streamed = (step.keys, step.queries) if by_key else (step.queries, step.keys)
    dense = torch.zeros(plan.heads, n, n, dtype=torch.int32)
    shifts = torch.arange(32, dtype=torch.int32)
    masks = ((work.bits[..., None] >> shifts) & 1).flatten(2)[..., :block]
    classes = work.classes.view(plan.heads, -1)
    tiles = len(work.rows) // (int(classes[:, 0].max()) + 1)
    element = torch.arange(block)
    for holder, place, steps, *rest in work.items.tolist():
        if step.strided:
            first, (count, tile, own_offset), o_row = place, rest, 0
        else:
            first = place * step.item_rows
            count, tile, o_row = min(step.item_rows, n - first), first // block, first % block
        here = first + held.rate * torch.arange(count)
        met = 0
        for head in range(holder * group, (holder + 1) * group) if by_key else (holder,):
            kind, *offsets = classes[head].tolist()
            if kind < 0 or (by_key and step.strided and offsets[0] != own_offset):
                continue
            pairs = dense[head].T if by_key else dense[head]
            row = work.rows[kind * tiles + tile].tolist()
            lists = [(row[2] + entry, None) for entry in work.full[row[0] : row[1]].tolist()]
            for entry, mask, low, high in work.partial[row[3] : row[4]].tolist():
                difference = o_row + torch.arange(count)[:, None] - element
                band = ((difference >= low) & (difference <= high)).int()
                lists.append((row[5] + entry, band if low <= high else masks[mask, o_row : o_row + count]))
            for other, seen in lists:
                start, end = work.tiles[other].tolist()
                there = start + (offsets[1] if step.strided else 0) + streamed.rate * element
                exist = there < min(end, n)
                seen = torch.ones(count, block, dtype=torch.int32) if seen is None else seen
                pairs[here[:, None], there[exist]] += seen[:, exist]
            met += len(lists)
        assert met == steps
    return dense


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("by_key", [True, False])
@pytest.mark.parametrize(
    ("pattern", "block"),
    [
        *(("causal", block) for block in (64, 128, 256)),
        *(("global:64 | window:100", block) for block in (128, 256)),
        ("window:200", 128),
        ("random:0.3;block=64;seed=1;per_head=1 & causal", 64),
        ("dilated:128x1,256x2,640x5 & causal", 64),
        ("random:0.3;block=128;seed=1;per_head=1 & causal", 256),
        ("blocks:0,,1 2,,4;block=128", 128),
        ("dilated:128x1,256x2,640x5 & causal", 128),
        ("dilated:300x3,200x1", 128),
        ("dilated:128x1,256x2;heads=split;offset=block", 128),
        ("documents:130,1,300,209 & causal", 128),
    ],
)
def test_work_records_are_the_plan(pattern, block, by_key, group):
    plan = make_plan(parse(pattern), 640, 4, block_size=block)
    steps = lower(plan)
    assert torch.equal(sum(meetings(step, plan, group, by_key=by_key) for step in steps), plan.to_dense())
    for step in steps:
        items = step.backward_items(group, by_key=by_key).items.tolist()
        rows = {(head, place) for head, place, *_ in items}
        assert len(rows) == len(items)
        # A plain part writes every row, with or without a pair.
        assert step.strided or len(items) == (4 // group if by_key else 4) * 640 // step.item_rows
