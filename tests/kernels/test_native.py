"""The C++ backend: threads, pieces, repeatability, and how it is built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calls import Menu, draw_call
from cases import BY_NAME, Problem
from hypothesis import given, settings
from oracle import answer, error
from strategies import EXPANDED, laid_out, strategy

from dilated_attention_pytorch import attention, attention_with_lse, make_plan, parse
from dilated_attention_pytorch.kernels import reference
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.cpu import native
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive
from dilated_attention_pytorch.ops.attention import CallSettings, call_of
from dilated_attention_pytorch.ops.memory_budget import memory
from dilated_attention_pytorch.selection.backend import select

built = pytest.mark.skipif(not native.library_path().exists(), reason="C++ kernel not built")
PROBLEM = Problem(
    name="", text="dilated:64x1,128x3 & causal", n=230, heads=6, key_heads=3, d=24, e=40, batch=2, padded=(230, 100)
)


def run(problem, dtype=torch.float64, **changes):
    inputs = problem.inputs(dtype)
    plan = make_plan(problem.pattern, problem.n, problem.heads, block_size=problem.block_size)
    call = AttentionCall(*inputs[:3], plan, problem.d**-0.5, problem.key_padding_mask(), pattern=problem.pattern)
    call = replace(call, **changes)
    results = []
    for backend in (native, reference):
        output, lse = backend.forward(call)
        grads = backend.backward(call, output, lse, inputs.grad_output, inputs.grad_lse)
        results.append((output, lse, *grads, *([] if call.bias is None else [grads.bias])))
    return results


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@built
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("key_heads", [1, 3, 6])
def test_any_number_of_threads_gives_the_same_result_twice(threads, count, key_heads):
    threads(count)
    problem = replace(PROBLEM, key_heads=key_heads, batch=1, padded=())
    found, wanted = run(problem)
    again, _ = run(problem)
    for got, repeated, want in zip(found, again, wanted, strict=True):
        assert error(got, want) <= 1e-12
        assert torch.equal(got, repeated)


@built
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("key_heads", [1, 6])
@pytest.mark.parametrize("widths", [(9,), (801,), (5, 7)], ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_bias_gradients_repeat_on_any_number_of_threads(threads, count, key_heads, widths, block_size):
    threads(count)
    problem = replace(PROBLEM, key_heads=key_heads, block_size=block_size)
    bias = torch.linspace(-9, 9, 6 * widths[0] * widths[-1], dtype=torch.float64).cos()[
        : 6 * torch.Size(widths).numel()
    ]
    positions = None if len(widths) == 1 else torch.arange(2 * 230 * 2).view(2, 230, 2) * 7919 % 11
    changes = {"bias": bias.view(6, *widths), "bias_positions": positions, "softcap": 2.0}
    found, wanted = run(problem, **changes)
    again, _ = run(problem, **changes)
    assert len(found) == 6
    for got, repeated, want in zip(found, again, wanted, strict=True):
        assert error(got, want) <= 1e-12
        assert torch.equal(got, repeated)


@built
def test_threads_beyond_the_memory_limit_stay_idle(threads, monkeypatch):
    threads(4)
    monkeypatch.setattr(native, "SPLIT_BUDGET", 0)
    found, wanted = run(replace(PROBLEM, key_heads=1, batch=1, padded=()))
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) <= 1e-12


@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_head_by_head_equals_all_at_once(monkeypatch, dtype):
    changes = {
        "dropout_p": 0.2,
        "seed": torch.tensor([77]),
        "softcap": 3.0,
        "bias": torch.linspace(-2, 2, 66).view(6, 11),
    }
    whole, _ = run(PROBLEM, dtype, **changes)
    monkeypatch.setattr(native, "WIDE_BUDGET", 0)
    pieces, _ = run(PROBLEM, dtype, **changes)
    for got, want in zip(pieces, whole, strict=True):
        assert error(got, want) <= torch.finfo(dtype).eps
        assert got.stride() == want.stride()


@built
@pytest.mark.parametrize("n", [128, 640])
def test_single_precision_error_is_at_most_two_millionths(n):
    problem = Problem(name="", text="full", n=n, heads=2, d=64, e=64, block_size=128)
    inputs = problem.inputs(torch.float32)
    plan = make_plan(problem.pattern, n, 2, block_size=128)
    call = AttentionCall(*inputs[:3], plan, 0.125, pattern=problem.pattern)
    exact = replace(call, query=call.query.double(), key=call.key.double(), value=call.value.double())
    for got, want in zip(native.forward(call), reference.forward(exact), strict=True):
        assert error(got, want) <= 2e-6


@built
@pytest.mark.parametrize("text", ["full", "dilated:16x1,64x2", "window:9 & causal"])
@pytest.mark.parametrize("shared", EXPANDED)
def test_keys_or_values_that_share_memory_match_oracle(text, shared):
    shape = 2, 4, 70, 8
    for shared_keys, shared_values in ((True, False), (False, True), (True, True)):
        query, key, value, grad = (laid_out(torch.randn(shape, dtype=torch.float64), "tokens first") for _ in range(4))
        key = laid_out(key, shared) if shared_keys else key
        value = laid_out(value, shared) if shared_values else value
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        output, lse = attention_with_lse(*leaves, text, backend="native")
        found = output, lse, *torch.autograd.grad(output, leaves, grad)
        for got, want in zip(found, answer(*leaves, parse(text), grad_output=grad), strict=True):
            assert error(got, want) <= 1e-12


@built
def test_one_shared_key_gives_every_head_its_own_value():
    query, key = torch.randn(2, 2, 1, 3), torch.randn(2, 1, 1, 3).expand(2, 2, 1, 3)
    value = torch.randn(2, 1, 2, 3).transpose(1, 2)
    assert attention(query, key, value, "full", backend="native").equal(value)


@built
@settings(max_examples=int(os.environ.get("DAP_FUZZ_EXAMPLES", "60")))
@given(call=strategy(draw_call, Menu(longest=150, edges=(127, 128, 129))))
def test_any_memory_layout_matches_oracle(call):
    assert max(call.shares("native").values()) <= 1, call.told("native")


@built
@pytest.mark.parametrize(
    "text",
    [
        "hierarchical:0x1;block=32 | dilated:100x2",
        "block_dilated:397x1;block=32 | dilated:77x8",
        "blocks:0 1 2,0 1 2,0 1 2;block=128 | dilated:100x2",
    ],
)
def test_rows_of_a_covered_branch_stay_inside_their_buffers(text):
    """A sanitized build sees any access outside; see `.ci/sanitize`."""
    query, key, value = torch.randn(3, 1, 1, 257, 8).unbind()
    call = call_of(query, key, value, CallSettings(pattern=text, scale=8**-0.5, backend="native"))
    wanted = answer(query, key, value, parse(text)).output
    # From the smallest chunks of rows up to all rows at once.
    for budget in memory(call, "native", "forward").sizes.values():
        output = attention(query, key, value, text, backend="native", memory_budget=max(budget, 4096))
        assert error(output, wanted) <= 2e-6


@built
def test_tiles_at_one_address_with_other_rates_are_copied_apart():
    query, key, value = torch.randn(3, 1, 1, 1024, 16, dtype=torch.float64).unbind()
    text = "dilated:256x2,512x4"
    assert (
        error(attention(query, key, value, text, backend="native"), answer(query, key, value, parse(text)).output)
        <= 1e-12
    )


@built
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e18])
@pytest.mark.parametrize("text", ["full", "causal", "dilated:32x1,64x2;overlap=union"])
def test_value_gradients_are_exact_at_large_logits(text, size):
    """Scores of a row differ so much that one key has all the weight."""
    n = 64
    query, key = 1 + torch.rand(1, 1, n, 1), torch.randperm(n).view(1, 1, n, 1) + 0.3 * torch.rand(1, 1, n, 1)
    value, grad = torch.randn(2, 1, 1, n, 8).unbind()
    value.requires_grad_()
    output = attention(query, key, value, text, scale=size, backend="native")
    (found,) = torch.autograd.grad(output, value, grad)
    wanted = answer(query, key, value, parse(text), scale=size, grad_output=grad)
    assert error(output, wanted.output) <= 1e-6
    assert error(found, wanted.value_grad) <= 1e-6


def best_of_pairs(queries, keys, there):
    pairs = (queries @ keys.flatten(2, 3).mT).unflatten(-1, keys.shape[2:4])
    return pairs.masked_fill(~there[:, :, None], -torch.inf).amax(-1)


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (70, 9, 5, 16), (129, 70, 25, 33), (64, 64, 128, 8)])
def test_best_matches_equal_the_maximum_of_all_pairs(threads, sizes, dtype):
    rows, blocks, units, rank = sizes
    queries = torch.randn(2, rows, 2, rank, dtype=dtype).transpose(1, 2)
    keys, there = torch.randn(2, 2, blocks, units, rank, dtype=dtype), torch.rand(2, 2, blocks, units) > 0.6
    there[1, 1, -1] = False
    for visible in (torch.ones_like(there), there):
        wanted = best_of_pairs(queries, keys, visible)
        for count in (1, 3):
            threads(count)
            found = native.best_match(queries, keys, None if visible.all() else visible)
            assert error(found, wanted) <= (1e-6 if dtype == torch.float32 else 1e-13)


@built
def test_best_matches_of_other_dtypes_are_left_to_torch():
    queries, keys = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 3, 1, 8)
    for pair in ((queries.bfloat16(), keys), (queries, keys.double()), (queries.bfloat16(), keys.bfloat16())):
        assert native.best_match(*pair, None) is None


@built
@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (3, 1), (1, 1)])
def test_best_matches_read_first_blocks_without_a_copy(shape, monkeypatch):
    queries, keys = torch.randn(*shape, 70, 8), torch.randn(*shape, 9, 4, 8)
    there = torch.rand(*shape, 9, 4) > 0.4
    wanted = native.best_match(queries, keys, there)[..., :5]
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: x if x.is_contiguous() else pytest.fail("copied"))
    assert torch.equal(native.best_match(queries, keys[:, :, :5], there[:, :, :5]), wanted)


@built
def test_best_matches_accept_any_strides():
    queries, keys = torch.randn(2, 70, 3, 8).transpose(1, 2), torch.randn(2, 4, 3, 9, 8).permute(0, 2, 3, 1, 4)
    there = torch.rand(2, 9, 3, 4).transpose(1, 2) > 0.4
    wanted = native.best_match(*(x.clone(memory_format=torch.contiguous_format) for x in (queries, keys, there)))
    assert torch.equal(native.best_match(queries, keys, there), wanted)


@built
def test_best_matches_keep_nan_in_its_block_and_infinities():
    queries, keys = torch.randn(1, 1, 40, 4), torch.randn(1, 1, 6, 30, 4)
    keys[0, 0, 2, 3], keys[0, 0, 4, 29] = torch.nan, torch.inf
    found = native.best_match(queries, keys, None)
    wanted = best_of_pairs(queries, keys, torch.ones(1, 1, 6, 30, dtype=torch.bool))
    assert torch.equal(found.isnan(), wanted.isnan()) and bool(found[..., 2].isnan().all())
    there = torch.ones(1, 1, 6, 30, dtype=torch.bool)
    there[0, 0, 2, 3] = there[0, 0, 4, 29] = False
    assert error(native.best_match(queries, keys, there), best_of_pairs(queries, keys, there)) <= 1e-6


@built
@pytest.mark.parametrize("width", [1, 5, 40, 70])
@pytest.mark.parametrize(("local", "sink", "is_causal"), [(1, 0, True), (3, 2, True), (0, 0, False), (2, 1, False)])
def test_chosen_blocks_are_the_first_of_the_best(width, local, sink, is_causal, threads):
    rows, room, blocks = 33, 6, 70
    # Few values, so that many are equal; both zeros are.
    scores = torch.randint(-4, 5, (2, 3, rows, width)) / torch.tensor([2.0, -2.0])[torch.randint(2, (width,))]
    for value in (torch.nan, torch.inf, -torch.inf):
        scores = scores.masked_fill(torch.rand_like(scores) < 0.1, value)
    own, wanted = torch.randint(blocks, (rows,)), torch.randint(-1, room + 1, (2, 3, rows))
    visible, column = torch.rand(2, 3, blocks) > 0.3, torch.arange(width)
    away = (column - own[:, None] >= local) & (not is_causal) | (own[:, None] - column >= max(local, is_causal))
    competes = away & (column >= sink) & visible[:, :, None, :width] & (scores > -torch.inf)
    order = scores.masked_fill(~competes, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    rank = order.argsort(-1)
    chosen = competes & (rank < wanted[..., None])
    listed = torch.where(chosen, column, blocks).sort(-1).values[..., :room]
    for count in (1, 3):
        threads(count)
        found, counts = native.choose_blocks(scores, own, wanted, visible, room, local, sink, is_causal)
        assert torch.equal(counts, chosen.sum(-1, dtype=torch.int32))
        assert torch.equal(found[..., : listed.shape[-1]], listed.int())
        assert bool((found[..., listed.shape[-1] :] == blocks).all())


@built
@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("explore", [True, False])
def test_rows_rank_alike_in_torch(granularity, is_causal, explore, monkeypatch):
    config = AdaptiveConfig(0.8, granularity=granularity, score_unit=4)
    layer = BlockSparseAdaptive([300], [1], 2, 16, config, block_size=16)
    # Equal scores: the blocks of rounded keys.
    query, key = torch.randn(2, 2, 2, 300, 16).round()
    padding = torch.rand(2, 300) > 0.8
    lists = []
    for _ in range(2):
        torch.manual_seed(0)
        lists.append(select(layer.score_blocks(query, key, is_causal, padding), 300, explore))
        monkeypatch.setattr(native, "choose_blocks", lambda *given: None)
    assert torch.equal(lists[0].indices, lists[1].indices) and torch.equal(lists[0].counts, lists[1].counts)


def test_missing_library_reason_names_the_build_command(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "none.so")
    problem = BY_NAME["causal"]
    inputs = problem.inputs()
    call = AttentionCall(*inputs[:3], make_plan(problem.pattern, problem.n, problem.heads), 1.0)
    reason = native.why_not(call)
    assert reason is not None and reason.startswith("not built; the first call builds it where it can")
    assert "run `python -m dilated_attention_pytorch.kernels.cpu.native` (needs g++)" in reason


def test_broken_library_is_reported(monkeypatch, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native, "library_path", lambda: broken)
    monkeypatch.setattr(native, "_library", native._library.__wrapped__)
    problem = BY_NAME["causal"]
    inputs = problem.inputs()
    call = AttentionCall(*inputs[:3], make_plan(problem.pattern, problem.n, problem.heads), 1.0)
    reason = native.why_not(call)
    assert reason is not None
    assert reason.startswith("cannot be loaded (")


def reason_against(library, monkeypatch):
    monkeypatch.setattr(native, "library_path", lambda: library)
    monkeypatch.setattr(native, "_library", native._library.__wrapped__)
    problem = BY_NAME["causal"]
    inputs = problem.inputs()
    return native.why_not(AttentionCall(*inputs[:3], make_plan(problem.pattern, problem.n, problem.heads), 1.0))


@pytest.fixture
def library(tmp_path):
    """A copy of the built library in a folder of its own."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    copy = folder / "native.so"
    shutil.copy(native.library_path(), copy)
    copy.chmod(0o600)
    return copy


@built
@pytest.mark.parametrize("change", ["none", "file mode", "folder mode", "open folder above", "symlink"])
def test_a_library_that_others_could_write_is_refused(library, monkeypatch, change):
    match change:
        case "file mode":
            library.chmod(0o620)
        case "folder mode":
            library.parent.chmod(0o777)
        case "open folder above":
            library.parent.parent.chmod(0o777)
        case "symlink":
            library.rename(library.with_name("elsewhere.so"))
            library.symlink_to(library.with_name("elsewhere.so"))
    reason = reason_against(library, monkeypatch)
    if change == "none":
        assert reason is None
    else:
        assert reason is not None
        assert reason.startswith("cannot be loaded (expected ")


@built
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("taken", ["file", "folder"])
def test_a_library_of_another_user_is_refused(library, monkeypatch, taken):
    os.chown(library if taken == "file" else library.parent, 65534, 65534)
    reason = reason_against(library, monkeypatch)
    assert reason is not None
    assert "to belong to user 0, got user 65534" in reason


@built
def test_a_build_is_private_whatever_the_umask(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    copy = f'while [ "$1" != -o ]; do shift; done; exec cp {native.library_path()} "$2"'
    compiler.write_text(f"#!/bin/sh\n{copy}\n")
    compiler.chmod(0o755)
    target = tmp_path / "above" / "cache" / "native.so"
    monkeypatch.setattr(native, "local_path", lambda: target)
    monkeypatch.setenv("CXX", str(compiler))
    before = os.umask(0)
    try:
        assert native.build() == 0
        target.chmod(0o666)
        target.parent.chmod(0o777)
        # A library that other users can write is rebuilt, in a folder that they cannot write.
        assert native.build() == 0
    finally:
        os.umask(before)
    assert [place.stat().st_mode & 0o777 for place in (target, target.parent, target.parent.parent)] == [
        0o600,
        0o700,
        0o700,
    ]


@pytest.mark.parametrize("named", ["", "relative", "./cache"])
def test_a_relative_cache_folder_is_ignored(monkeypatch, named):
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", "/home/someone")
    assert native.local_path().parent == Path("/home/someone/.cache/dilated_attention_pytorch")


@pytest.mark.parametrize("change", ["processor", "torch", "machine", "flags"])
def test_the_name_of_the_library_follows_what_it_was_built_for(monkeypatch, change):
    before = native.local_path().name
    match change:
        case "processor":
            monkeypatch.setattr(native.toolchain, "processor_flags", lambda: "flags : one that nobody has")
        case "torch":
            monkeypatch.setattr(torch, "__version__", "0.1")
        case "machine":
            monkeypatch.setattr(native.platform, "machine", lambda: "pdp11")
        case "flags":
            monkeypatch.setenv("DAP_NATIVE_FLAGS", "-DNDEBUG")
    assert native.local_path().name != before


def test_building_without_a_compiler_names_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(native, "local_path", lambda: tmp_path / "native.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.build() == 1
    assert "needs g++" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_failed_compilation_is_reported_and_leaves_no_file(monkeypatch, tmp_path, capsys):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'error: cannot compile' >&2\nexit 3\n")
    compiler.chmod(0o755)
    target = tmp_path / "cache" / "native.so"
    monkeypatch.setattr(native, "local_path", lambda: target)
    monkeypatch.setenv("CXX", str(compiler))
    assert native.build() == 1
    assert "error: cannot compile" in capsys.readouterr().out
    assert list(target.parent.iterdir()) == []


@built
def test_building_again_does_nothing(capsys):
    before = native.library_path().stat().st_mtime_ns
    assert native.build() == 0
    assert "already built" in capsys.readouterr().out
    assert native.library_path().stat().st_mtime_ns == before


FIRST_CALLS = """
import os, sys, torch, dilated_attention_pytorch as dap
sys.platform = os.environ.get("TEST_PLATFORM", sys.platform)
q, k, v = torch.randn(3, 1, 2, 64, 8).unbind()
for _ in range(2):
    dap.attention(q, k, v, "causal")
print(dap.explain(q, k, v, "causal").backend)
"""


@pytest.fixture
def first_calls(tmp_path):
    """Run two calls in a process that has no built library, with a compiler that copies the library of this one."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; exec cp {native.library_path()} "$2"\n', encoding="utf-8"
    )
    compiler.chmod(0o755)

    def run(**environment: str) -> tuple[str, list[str]]:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        settings = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": str(compiler)} | environment
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", FIRST_CALLS],
            env=inherited | settings,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip(), done.stderr.splitlines()

    return run


@built
def test_first_call_builds_and_prints_one_line(first_calls, tmp_path):
    backend, lines = first_calls()
    assert backend == "native" and len(lines) == 1
    assert lines[0].startswith(f"building the C++ kernel for this processor with {tmp_path / 'compiler'}, once;")
    assert first_calls() == ("native", [])


@built
@pytest.mark.parametrize("environment", [{"DAP_NATIVE_BUILD": "0"}, {"PYTEST_CURRENT_TEST": "test_x (call)"}])
def test_nothing_is_built_where_building_is_off(first_calls, tmp_path, environment):
    assert first_calls(**environment) == ("cpu", [])
    assert not (tmp_path / "cache").exists()


@built
def test_slow_path_names_the_missing_tool_once(first_calls, tmp_path):
    backend, lines = first_calls(CXX="no-such-compiler")
    assert backend == "cpu" and len(lines) == 1
    assert lines[0].startswith("attention on the CPU runs on torch operations, several times slower")
    assert "install g++ or name one in CXX" in lines[0]
    (tmp_path / "file").touch()
    backend, lines = first_calls(XDG_CACHE_HOME=str(tmp_path / "file"))
    assert backend == "cpu" and len(lines) == 1 and "no place for it" in lines[0]
    backend, lines = first_calls(CXX="false", XDG_CACHE_HOME=str(tmp_path / "other"))
    assert backend == "cpu" and "native kernel: " in lines[1]


@built
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_platforms_use_torch_and_print_one_line(first_calls, tmp_path, platform):
    backend, lines = first_calls(TEST_PLATFORM=platform)
    assert backend == "cpu" and len(lines) == 1 and f"it runs on Linux, got {platform}" in lines[0]
    assert not (tmp_path / "cache").exists()


def test_calls_on_other_devices_build_nothing(monkeypatch):
    monkeypatch.setattr(native, "_offered", False)
    monkeypatch.setattr(native, "_offer_build", lambda: pytest.fail("built"))
    problem = BY_NAME["causal"]
    tensors = (x.to("meta") for x in problem.inputs()[:3])
    call = AttentionCall(*tensors, make_plan(problem.pattern, problem.n, problem.heads), 1.0)
    assert not native.prepare_first_use(call)
