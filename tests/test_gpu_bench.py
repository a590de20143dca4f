"""The GPU suite compares like with like: peers get the pairs the library computes, and the page says what was found."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from docs_pages import docs_gpu_tables, docs_page
from torch import Tensor

from dilated_attention_pytorch import parse
from dilated_attention_pytorch.tools.bench import command, gpu, peers
from dilated_attention_pytorch.tools.bench import runner as bench
from dilated_attention_pytorch.tools.bench.gate import Computed
from dilated_attention_pytorch.tools.bench.grid import (
    BLOCK_KINDS,
    LADDERS,
    OURS,
    PLAN,
    GpuCase,
    K,
    cases,
    ladder_pairs,
    published,
    tiny_cases,
)
from dilated_attention_pytorch.tools.bench.peers import BLOCK, BlockTable, PeerProblem, lists_of
from dilated_attention_pytorch.tools.bench.results import OURS_ANY_ORDER

SMALL = {"n": 1024, "d": 16, "heads": 2, "key_heads": 2, "dtype": "float32"}


def multiplicity(pattern, n: int, head: int) -> torch.Tensor:
    position = torch.arange(n)
    return pattern.resolve(n, 8).multiplicity(position[:, None], position[None, :], head)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("density", [0.1, 0.4])
def test_peers_are_given_the_pairs_of_the_pattern(kind: str, causal: bool, density: float):
    case = GpuCase(kind=kind, density=density, causal=causal, **SMALL)
    blocks = case.blocks("cpu")
    wanted = multiplicity(parse(case.pattern), case.n, 0)
    assert torch.equal(multiplicity(gpu.OfBlocks(blocks), case.n, 0), wanted)
    assert blocks.pairs == wanted.sum()
    assert wanted.any(1).all(), "a row without keys is where peers differ"


@pytest.mark.parametrize("text", ["dilated:256x1,512x4", "dilated:300x3,4096x7", *LADDERS.values()])
@pytest.mark.parametrize("n", [512, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_pairs_of_a_ladder_are_counted_exactly(text: str, n: int, causal: bool):
    pattern = parse(text)
    whole = parse(f"{text} & causal") if causal else pattern
    wanted = sum(int(multiplicity(whole, n, head).sum()) for head in range(3))
    assert ladder_pairs(pattern, n, 3, causal) == wanted


@pytest.mark.parametrize("width", [None, 6])
def test_lists_hold_the_table(width: int | None):
    table = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.4
    table[2] = False
    counts, indices = lists_of(table, width)
    assert indices.shape == (6, table.sum(1).max() if width is None else width)
    assert [line[:count].tolist() for count, line in zip(counts, indices, strict=True)] == [
        row.nonzero()[:, 0].tolist() for row in table
    ]


def test_the_causal_diagonal_is_partial_and_the_rest_whole():
    blocks = BlockTable(torch.ones(3, 3, dtype=torch.bool).tril(), causal=True)
    assert torch.equal(blocks.partial, torch.eye(3, dtype=torch.bool))
    assert blocks.pairs == (3 * BLOCK) * (3 * BLOCK + 1) // 2
    assert not replace(blocks, causal=False).partial.any()


def test_gpu_grid_is_complete_and_starts_with_headlines():
    listed = cases()
    assert len({case.key(OURS, "forward") for case in listed}) == len(listed)
    known = set(published())
    assert known < set(listed) and {case.block for case in known} == {64, BLOCK}
    listed = [case for case in listed if case not in known]
    assert {case.block for case in listed} == {64, BLOCK}
    assert {case.n for case in listed} == {4 * K, 16 * K, 64 * K, 256 * K, 1024 * K}
    assert {case.d for case in listed} == {64, 128}
    assert {(case.heads, case.key_heads) for case in listed} == {(8, 8), (16, 16), (16, 4)}
    assert {case.kind for case in listed} == {"dense", PLAN, *LADDERS, *BLOCK_KINDS}
    assert {case.density for case in listed} == {None, 0.1, 0.05, 0.01}
    assert {case.causal for case in listed if case.is_blocks} == {True, False}
    first = listed[:20]
    assert {case.kind for case in first} == {"dense", "random", "local"}
    assert not any(case.causal for case in first)
    assert {case.n for case in listed[-8:]} == {1024 * K} != {listed[-9].n}, "what takes longest comes last"
    for case in (*listed, *known):
        if case.kind != PLAN:
            assert case.n % case.block == 0
            parse(case.pattern).resolve(case.n, case.heads)


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.is_blocks and case.n == 16 * K], ids=lambda c: c.name
)
def test_densities_are_near_what_is_asked(case: GpuCase):
    kept = float(case.blocks("cpu").table.sum(1).float().mean())
    asked = case.kept / (2 if case.causal else 1)
    # At one block in a hundred of 128, the window, the stride and the global blocks each need a block of their own.
    assert 0.5 * asked - 1 <= kept <= 1.5 * asked + 2


def test_lse_of_the_gate_is_that_of_the_definition():
    case = GpuCase(kind="random", density=0.4, causal=True, **SMALL)
    query, key, _, _ = gpu.draw(256, 16, 4, 2, "float32", "cpu")
    oracle = gpu.OfBlocks(replace(case, n=256).blocks("cpu"))
    found = gpu.exact_lse(query, key, oracle, [0, 3])
    for head in (0, 3):
        scores = query[0, head].double() @ key[0, head // 2].double().T / 4
        scores = scores.masked_fill(multiplicity(oracle, 256, head) == 0, -math.inf)
        torch.testing.assert_close(found[0, head].double(), scores.logsumexp(-1).detach(), atol=1e-5, rtol=1e-5)


def test_absent_peers_say_so():
    tensor = torch.zeros(1, 2, 256, 16)
    problem = PeerProblem(query=tensor, key=tensor, value=tensor, grad_output=tensor, blocks=None, causal=False)
    assert peers.why_not("sdpa-flash", problem) is None
    for name in ("sdpa-cudnn", "flex", "fa4", "cudnn-blocks", "cudnn-interval"):
        assert "CUDA" in peers.why_not(name, problem)


def dense(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE of attention on allowed pairs, (1, heads, n, d)."""
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~allowed, -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN-frontend's functions by their documentation, computed densely."""

    def allowed_blocks(indices: Tensor, counts: Tensor, block: int) -> Tensor:
        assert indices.dtype == counts.dtype == torch.int32 and indices.is_contiguous() and counts.is_contiguous()
        table = torch.zeros(*indices.shape[:3], indices.shape[2] + 1, dtype=torch.bool)
        listed = torch.arange(indices.shape[3]) < counts[..., None]
        table.scatter_(3, torch.where(listed, indices, indices.shape[2]).long(), True)
        return table[..., :-1].repeat_interleave(block, 2).repeat_interleave(block, 3)

    def forward(query, key, value, indices, *, q2k_block_nums, sparse_block_size, kv_splits=1):
        assert kv_splits == 1 or sparse_block_size == 64
        pair = dense(query, key, value, allowed_blocks(indices, q2k_block_nums, sparse_block_size))
        return dict(zip(("o_tensor", "lse_tensor"), pair, strict=True))

    def backward(grad, query, key, value, output, lse, indices, *, q2k_block_nums, sparse_block_size):
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        with torch.enable_grad():
            again, logs = dense(*leaves, allowed_blocks(indices, q2k_block_nums, sparse_block_size))
        torch.testing.assert_close((again, logs), (output, lse))
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), torch.autograd.grad(again, leaves, grad), strict=True))

    def create_mask_plan(bounds, query, key, value, *, build_backward):
        assert bounds.shape == (1, 3, query.shape[1]) and bounds.dtype == torch.int32 and build_backward
        column = torch.arange(key.shape[1])
        first, low, high = bounds[0, :, :, None]
        return (column < first) | ((column >= low) & (column < high))

    def flex_attn_func(query, key, value, *, mask_plan):
        return dense(*(tensor.transpose(1, 2) for tensor in (query, key, value)), mask_plan)[0].transpose(1, 2)

    blocks = {"block_sparse_attention_forward": forward, "block_sparse_attention_backward": backward}
    interval = {"create_mask_plan": create_mask_plan, "flex_attn_func": flex_attn_func}
    for name, functions in (("block_sparse_attention", blocks), ("flex_attention", interval)):
        module = ModuleType(f"cudnn.{name}")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(
    ("peer", "kind", "causal"),
    [("cudnn-blocks", "random", False), ("cudnn-interval", "local", False), ("cudnn-interval", "local", True)],
)
def test_cudnn_peers_compute_the_same_pairs(cudnn: None, peer: str, kind: str, causal: bool, block: int):
    case = GpuCase(kind=kind, density=0.4, causal=causal, block=block, **SMALL | {"n": 512})
    assert peer in case.subjects
    query, key, value, grad = gpu.draw(case.n, case.d, case.heads, case.key_heads, case.dtype, "cpu")
    blocks = case.blocks("cpu")
    problem = PeerProblem(query=query, key=key, value=value, grad_output=grad, blocks=blocks, causal=causal)
    runner = peers.build(peer, problem)
    lse = gpu.exact_lse(query, key, gpu.OfBlocks(blocks), [0, 1])
    error, _ = gpu.examine(case, runner, lse, gpu.OfBlocks(blocks))
    assert error <= 1.0
    assert torch.equal(multiplicity(gpu.OfBlocks(blocks), case.n, 0), multiplicity(parse(case.pattern), case.n, 0))


def test_intervals_need_adjacent_blocks():
    with pytest.raises(ValueError, match="adjacent"):
        BlockTable(torch.tensor([[True, False, True]] * 3), causal=False).intervals()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[GpuCase]:
    listed = [
        GpuCase(kind="dense", **SMALL | {"n": 256}),
        GpuCase(kind="local", density=0.6, **SMALL | {"n": 256}),
        GpuCase(kind=PLAN, **SMALL | {"n": 256}),
    ]
    monkeypatch.setattr(gpu, "tiny_cases", lambda: listed)
    return listed


def measured(out, *options: str) -> list[dict]:
    arguments = ["--suite", "gpu", "--device", "cpu", "--tiny", "--out", str(out), *options]
    status = command.main(arguments)
    assert status == 0
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_a_run_writes_a_line_a_subject_and_direction(few: list[GpuCase], tmp_path):
    lines = measured(tmp_path / "gpu.jsonl")
    wanted = {c.key(s, way) for c in few[:2] for s in c.subjects for way in ("forward", "backward")}
    assert {gpu.key_of(line) for line in lines} == wanted | {few[2].key(OURS, "plan")}
    assert len(lines) == len(wanted) + 1
    timed = {(line["subject"], line["direction"]): line for line in lines if line["p50_ms"] is not None}
    subjects = (OURS, OURS_ANY_ORDER, "sdpa-flash")
    assert set(timed) == {(s, way) for s in subjects for way in ("forward", "backward")} | {(OURS, "plan")}
    own = timed[OURS, "backward"]
    assert own["gate"] < 0.5 and own["flops"] == 2.5 * 4 * few[1].blocks("cpu").pairs * 16 * 2
    assert timed[OURS, "forward"]["call_us"] > 0 and own["plan_bytes"] > 0


def test_resuming_measures_what_is_missing(few: list[GpuCase], tmp_path):
    out = tmp_path / "gpu.jsonl"
    whole = measured(out)
    assert len(measured(out, "--resume")) == len(whole)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:-1]))
    resumed = measured(out, "--resume")
    assert [gpu.key_of(line) for line in resumed] == [gpu.key_of(line) for line in whole]


def test_a_peer_that_was_not_installed_gets_another_chance(few: list[GpuCase], tmp_path):
    out = tmp_path / "gpu.jsonl"
    lines = measured(out)
    for line in lines:
        line["skipped"] = peers.NOT_INSTALLED if line["subject"] == "fa4" else line["skipped"]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = measured(out, "--resume")[len(lines) :]
    assert {line["subject"] for line in again} == {"fa4"}


def test_nothing_is_begun_after_the_budget(few: list[GpuCase], tmp_path, capsys):
    assert measured(tmp_path / "gpu.jsonl", "--budget", "0") == []
    assert "cases 1 to 3" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed_and_the_page_says_so(few: list[GpuCase], tmp_path, monkeypatch):
    def wrong(computed: Computed, *_: object) -> float:
        return math.inf

    monkeypatch.setattr(gpu, "error_ratio", wrong)
    out = tmp_path / "gpu.jsonl"
    assert command.main(["--suite", "gpu", "--device", "cpu", "--tiny", "--out", str(out)]) == 1
    text = out.read_text()
    assert "Infinity" not in text and "NaN" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(line["p50_ms"] is None for line in lines if line["direction"] != "plan")
    assert "| ours | forward | wrong, 1e+30 times the accepted error | 1 |" in docs_page.page(lines)


def test_a_failing_subject_leaves_the_others(few: list[GpuCase], tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel\nsecond line")

    monkeypatch.setattr(gpu, "ours", broken)
    lines = measured(tmp_path / "gpu.jsonl")
    own = [line for line in lines if line["subject"] == OURS and line["direction"] != "plan"]
    assert {line["skipped"] for line in own} == {"RuntimeError: no such kernel"}
    assert any(line["p50_ms"] for line in lines if line["subject"] == "sdpa-flash")


def test_a_dead_gpu_is_left_behind_and_not_tried_again(few: list[GpuCase], tmp_path, monkeypatch):
    """The library's own call ends the GPU: a fresh process goes on with what comes after it."""
    out, alive, commands = tmp_path / "gpu.jsonl", [True], []

    def deadly(*_: object) -> None:
        alive[0] = False
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(gpu, "ours", deadly)
    monkeypatch.setattr(gpu, "is_alive", lambda device: alive[0])
    monkeypatch.setattr(gpu.os, "execv", lambda program, command: commands.append(command))
    arguments = ["--suite", "gpu", "--device", "cpu", "--tiny", "--out", str(out)]
    assert command.main(arguments) == 1
    assert len(commands) == 1 and "--resume" in commands[0] and str(out) in commands[0]
    alive[0] = True
    lines = measured(out, *commands[0][commands[0].index("--resume") :])
    assert alive[0], "what ended the GPU once was tried again"
    assert {line["subject"] for line in lines} >= {OURS, "flex", "fa4", "sdpa-flash"}
    assert lines[-1]["direction"] == "plan"


def test_tiny_cases_hold_every_kind():
    assert {case.kind for case in tiny_cases()} == {case.kind for case in cases()}


def line(subject: str, direction: str, ms: float, case: GpuCase, **rest: object) -> dict:
    session = gpu.Session(out=None, device="cpu")
    flops = 1e9 * bench.WORK.get(direction, 1)
    known = {"p50_ms": ms, "tflops": flops / ms / 1e9, "density": 0.1, "pattern": "p", "lse_bytes": 100, **rest}
    if subject == OURS:
        known |= {"plan_ms": 1.0, "plan_bytes": 10}
    return gpu.line_of(case, subject, direction, session, **known)


@pytest.fixture
def story() -> list[dict]:
    """Twice as fast as FlashAttention-4 forward in one case, half as fast in another; slower backward."""
    near, far = (GpuCase(kind=kind, n=64 * K, d=64, density=0.1) for kind in ("random", "local"))
    small = GpuCase(kind="random", n=16 * K, d=64, density=0.01)
    dense = GpuCase(kind="dense", n=64 * K, d=64)
    ladder = GpuCase(kind="longnet-ladder", n=256 * K, d=64)
    return [
        line(OURS, "forward", 1.0, near, workspace_bytes=100),
        line("fa4", "forward", 2.0, near),
        line(OURS, "forward", 4.0, far, workspace_bytes=110),
        line("fa4", "forward", 2.0, far),
        line(OURS, "backward", 5.0, near, workspace_bytes=90),
        line("fa4", "backward", 2.5, near),
        line(OURS, "forward", 0.1, small, call_us=20.0, host_us=15.0),
        line("flex", "forward", 0.3, small, call_us=80.0, host_us=70.0),
        line("fa4", "forward", 20.0, dense),
        line("fa4", "backward", 40.0, dense),
        line("sdpa-cudnn", "forward", 2.0, dense),
        line(OURS, "forward", 1.6, ladder, workspace_bytes=100),
        line(OURS, "plan", 12.0, GpuCase(kind=PLAN, n=2**20, d=64, heads=16, key_heads=16)),
    ]


def test_promises_are_judged_by_means_and_worst_cases(story: list[dict]):
    found = {judged.bar.what: judged for judged in docs_gpu_tables.judge(story)}
    values = {what: round(judged.bar.measured, 6) for what, judged in found.items()}
    assert values == {
        "64K tokens, densities 5 and 10 %, forward vs FlashAttention-4": 1.0,
        "64K tokens, densities 5 and 10 %, backward vs FlashAttention-4": 0.5,
        "block-sparse forward vs FlashAttention-4": 1.0,
        "block-sparse forward vs FlexAttention": 3.0,
        "block-sparse backward vs FlashAttention-4": 0.5,
        "16K tokens, density 1 %, whole call forward vs FlexAttention": 4.0,
        "dilated forward, rate vs dense cuDNN": 1.25,
        "extra peak memory forward": 1.1,
        "extra peak memory backward": 0.9,
        "plan of 1M tokens x 16 heads x 64 blocks a row: memory": 0.00001,
        "plan of 1M tokens x 16 heads x 64 blocks a row: time": 12.0,
        "speed-up over dense FlashAttention-4 at 64K, density 10%, forward + backward": 10.0,
    }
    broken = {what for what, judged in found.items() if not judged.bar.passed}
    assert broken == {
        "64K tokens, densities 5 and 10 %, backward vs FlashAttention-4",
        "block-sparse backward vs FlashAttention-4",
        "extra peak memory forward",
    }
    forward = found["block-sparse forward vs FlashAttention-4"]
    assert (forward.least, forward.most, forward.cases) == (0.5, 2.0, 2), "a mean stands beside its least case"


def test_page_lists_cases_with_losses_first(story: list[dict]):
    page = docs_page.page(story)
    rows = [row for row in page[page.index("### Block-sparse") :].splitlines() if row.startswith("| ")][2:5]
    assert [row.split(" | ")[0] for row in rows] == ["| local-10%", "| random-10%", "| random-1%"], rows


def test_page_shows_losses_in_any_order_of_lines(story: list[dict]):
    page = docs_page.page(story)
    assert page == docs_page.page(story[::-1])
    assert "**0.50x**" in page and "2.00x" in page and "**missed**" in page and "| met |" in page
    assert "python -m dilated_attention_pytorch.tools.bench --suite gpu" in page
    for row in page.splitlines():
        assert not row.startswith("|") or row.endswith("|")


def test_a_later_line_replaces_an_earlier_one(story: list[dict]):
    later = {**story[0], "p50_ms": 0.5}
    assert docs_gpu_tables.Results([*story, later]).ours("forward")[-1]["p50_ms"] == 0.5


def test_the_page_is_written_from_files(story: list[dict], tmp_path):
    source, page = tmp_path / "gpu.jsonl", tmp_path / "benchmarks.md"
    source.write_text("".join(json.dumps(line) + "\n" for line in story))
    other = tmp_path / "tiles.jsonl"
    other.write_text('{"kernel": "forward", "ms": 1.0}\n')
    assert docs_page.main([str(source), str(other), "--out", str(page)]) == 0
    assert page.read_text() == docs_page.page(story)


def test_what_is_said_of_the_gpu_is_what_was_measured():
    root = Path(__file__).parents[1]
    lines = (root / "benchmarks/results/h200_gpu.jsonl").read_text().splitlines()
    found = {judged.bar.what: judged for judged in docs_gpu_tables.judge(map(json.loads, lines))}
    any_order = ", sums in any order"

    def mean(what: str) -> str:
        return f"{found[what].bar.measured:.2f}x"

    def sparse(what: str, how: str = "") -> list[str]:
        return [mean(f"{what} vs {peer}{how}") for peer in ("FlashAttention-4", "FlexAttention")]

    def ladder(direction: str, how: str = "") -> str:
        return mean(f"dilated {direction}, rate vs dense cuDNN{how}")

    readme = (root / "README.md").read_text()
    bound = "64K tokens, densities 5 and 10 %,"
    for row, what, how in (
        ("forward", f"{bound} forward", ""),
        ("backward, bitwise reproducible", f"{bound} backward", ""),
        ("backward, `reproducible_gradients(False)`", f"{bound} backward", any_order),
        (
            "forward, 16K tokens, 1 %: a whole call, mostly host time",
            "16K tokens, density 1 %, whole call forward",
            "",
        ),
    ):
        judged = [found[f"{what} vs {peer}{how}"] for peer in ("FlashAttention-4", "FlexAttention")]
        cells = [f"{one.bar.measured:.2f}x ({one.least:.2f} to {one.most:.2f})" for one in judged]
        assert f"| {row} | {' | '.join(cells)} |" in readme
    forward, backward = sparse("block-sparse forward"), sparse("block-sparse backward")
    both = f"{ladder('forward')} of dense cuDNN's rate forward, {ladder('backward')} backward"
    assert f"{both} ({ladder('backward', any_order)} with atomic sums" in readme
    orders = json.loads((root / "src/dilated_attention_pytorch/kernels/preference.json").read_text())["cuda sm_90"]
    of_sparse, of_dilated = (order["because"] for order in orders if order["when"] != "uncommon")
    speeds = f"{forward[0]} FlashAttention-4's block-sparse speed forward and {backward[0]} backward"
    assert f"{speeds}, and at {forward[1]} and {backward[1]} FlexAttention's" in of_sparse
    assert f"{ladder('forward')} dense cuDNN's rate forward and {ladder('backward')} backward" in of_dilated
